"""A scene with two behaviors, after WallJump of Unity ML-Agents: agents on boards get to the other side of a wall.

An agent decides in every fixed step: stay, up, down, left, right. Each step costs 0.01. The last column gives 1 and
ends the episode. Before each episode it is drawn whether the wall is small or big, and the agent is then trained under
the name SmallWall or BigWall: as in WallJump, an agent changes its behavior and keeps its id.

An agent steps over a small wall as if it were not there. A big wall stops it, unless it stands behind a block that
touches the wall: then it climbs over both. A block is pushed by an agent that walks against it, if the place behind it
is free.

The environment parameter `big_wall` is the probability of a big wall.
"""

import numpy as np

from onefile_rl.engines.samplers import per_agent

ROWS = 5
COLUMNS = 8
WALL = 5  # column of the wall
MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])  # rows, columns
AGENT, BLOCK = range(2)
SIDE = 16  # pixels of a cell
FLOOR = (40, 40, 40)
LINE = (20, 20, 20)
BLUE = (70, 110, 240)
ORANGE = (230, 140, 50)
GREEN = (50, 200, 80)
WALLS = ((70, 80, 90), (140, 150, 160))  # small and big


class WallClimb:
    behaviors = ("BigWall?team=0", "SmallWall?team=0")
    behavior = behaviors[0]
    sensors = [("Places", 2 * (ROWS + COLUMNS))]
    continuous = 0
    branches = (5,)
    num_agents = 24
    period = 1
    offset = 0
    between = True
    max_step = 100
    dt = 0.02
    video_fps = 5

    def __init__(self, num_agents, seed, parameters):
        self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        self.places = np.zeros((num_agents, 2, 2), int)  # row and column of agent and block
        self.big = np.zeros(num_agents, bool)

    def begin(self, agents):
        chance = per_agent(self.parameters, "big_wall", 0.6, agents)
        self.big[agents] = self.rng.random(len(agents)) < chance
        for agent in agents:
            rows = self.rng.integers(0, ROWS, 2)
            self.places[agent, AGENT] = (rows[0], self.rng.integers(0, 2))
            self.places[agent, BLOCK] = (rows[1], self.rng.integers(2, 4))

    def behavior_of(self, agents):
        big, small = self.behaviors
        return [big if is_big else small for is_big in self.big[agents].tolist()]

    def observe(self, agents):
        places = self.places[agents]
        rows = np.eye(ROWS, dtype=np.float32)[places[:, :, 0]]
        columns = np.eye(COLUMNS, dtype=np.float32)[places[:, :, 1]]
        return [np.concatenate([rows, columns], 2).reshape(len(agents), -1)]

    def act(self, agents, continuous, discrete):
        self.academy.reward[agents] -= 0.01
        for agent, action in zip(agents, discrete[:, 0], strict=True):
            self.move(agent, MOVES[action])
        arrived = agents[self.places[agents, AGENT, 1] == COLUMNS - 1]
        if len(arrived):
            self.academy.reward[arrived] += 1
            self.academy.end(arrived)

    def move(self, agent, way):
        """Move an agent, and the block that it walks against."""
        at, block = self.places[agent]
        to = at + way
        if not way.any() or not self.on_board(to):
            return
        if (to == block).all():
            behind = to + way
            if self.on_board(behind) and behind[1] != WALL:
                self.places[agent] = (to, behind)
            elif behind[1] == WALL and way[1] > 0:  # over the block and the wall
                self.places[agent, AGENT] = behind + way
        elif to[1] != WALL:
            self.places[agent, AGENT] = to
        elif not self.big[agent]:
            self.places[agent, AGENT] = to + way

    def on_board(self, place):
        return 0 <= place[0] < ROWS and 0 <= place[1] < COLUMNS

    def update(self):
        pass

    def physics(self):
        pass

    def picture(self, agent):
        """Draw the board of an agent."""
        board = np.full((SIDE * ROWS, SIDE * COLUMNS, 3), FLOOR, np.uint8)
        board[:, SIDE * WALL : SIDE * (WALL + 1)] = WALLS[int(self.big[agent])]
        board[:, SIDE * (COLUMNS - 1) :] = GREEN
        for (row, column), color, margin in zip(
            self.places[agent], (BLUE, ORANGE), (3, 1), strict=True
        ):
            cell = board[SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)]
            cell[margin:-margin, margin:-margin] = color
        board[::SIDE] = LINE
        board[:, ::SIDE] = LINE
        return board

    def draw_frame(self, height, width):
        """Draw as many boards as there is room for."""
        columns = max(1, min(width // (SIDE * COLUMNS), self.num_agents))
        rows = max(1, min(height // (SIDE * ROWS), self.num_agents // columns))
        boards = [self.picture(agent) for agent in range(rows * columns)]
        return np.vstack(
            [np.hstack(boards[row * columns : (row + 1) * columns]) for row in range(rows)]
        )
