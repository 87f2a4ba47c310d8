"""GridWorld of Unity ML-Agents: nine agents, each on its own board, walk to the green plus and avoid the red cross.

An agent observes an image of its board from above, and nothing else. It decides in every fixed step: stay, up, down,
left, right; the action mask forbids steps into a wall. The plus gives 1 and the cross -1, and both end the episode;
each step costs 0.01. The boards are drawn flat and dark, in Unity's image size: a network trained here has not seen
Unity's lighting. Newer ML-Agents packages also tell the agent which of the two is the goal; here it is always the plus,
as in older ones.
"""

import numpy as np

HEIGHT = 64
WIDTH = 84
MOVES = np.array(
    [(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)]
)  # stay, up, down, left, right: columns, rows
FLOOR = (40, 40, 40)
LINE = (20, 20, 20)
BLUE = (70, 110, 240)
GREEN = (50, 200, 80)
RED = (230, 60, 60)


class GridWorld:
    behavior = "GridWorld?team=0"
    sensors = [("CameraSensor", (HEIGHT, WIDTH, 3))]
    continuous = 0
    branches = (5,)
    num_agents = 9
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
        self.places = np.zeros(
            (num_agents, 3, 2), int
        )  # column and row of the plus, of the cross and of the agent
        self.size = np.zeros(num_agents, int)

    def begin(self, agents):
        for agent in agents:
            size = self.size[agent] = max(2, int(self.parameters.get("gridSize", 5)))
            self.places[agent] = np.stack(
                np.divmod(self.rng.choice(size * size, 3, replace=False), size), 1
            )

    def observe(self, agents):
        return [np.stack([self.picture(agent) for agent in agents])]

    def mask(self, agents):
        """Return True where an action is forbidden, as ML-Agents sends it."""
        after = self.places[agents, None, 2] + MOVES
        return ((after < 0) | (after >= self.size[agents, None, None])).any(2)

    def act(self, agents, continuous, discrete):
        self.academy.reward[agents] -= 0.01
        allowed = ~self.mask(agents)[
            np.arange(len(agents)), discrete[:, 0]
        ]  # a wall stops the agent
        self.places[agents, 2] += MOVES[discrete[:, 0]] * allowed[:, None]
        for agent in agents:
            found = np.flatnonzero((self.places[agent, :2] == self.places[agent, 2]).all(1))
            if len(found):
                self.academy.reward[agent] = (1, -1)[found[0]]
                self.academy.end(np.array([agent]))

    def update(self):
        pass

    def physics(self):
        pass

    def picture(self, agent):
        """Draw an agent's board as an image, centred and with the height of the image."""
        size = self.size[agent]
        side = HEIGHT // size
        board = np.full((side * size, side * size, 3), FLOOR, np.uint8)
        board[::side] = board[:, ::side] = LINE
        third = max(side // 3, 1)
        i, j = np.indices((side - 1, side - 1)) - (side - 2) / 2
        plus = (abs(i) < third / 2) | (abs(j) < third / 2)
        cross = (abs(i - j) < third / 1.5) | (abs(i + j) < third / 1.5)
        square = np.maximum(abs(i), abs(j)) < side / 3
        drawn = zip(self.places[agent], (plus, cross, square), (GREEN, RED, BLUE), strict=True)
        for (column, row), shape, color in drawn:
            board[row * side + 1 : (row + 1) * side, column * side + 1 : (column + 1) * side][
                shape
            ] = color
        picture = np.full((HEIGHT, WIDTH, 3), LINE, np.uint8)
        top = (HEIGHT - side * size) // 2
        left = (WIDTH - side * size) // 2
        picture[top : top + side * size, left : left + side * size] = board
        return picture

    def draw_frame(self, height, width):
        """Draw all boards in a square."""
        columns = int(np.ceil(np.sqrt(self.num_agents)))
        rows = -(-self.num_agents // columns)
        scale = max(1, min(height // HEIGHT, width // WIDTH) // columns)
        wall = np.zeros((rows * HEIGHT, columns * WIDTH, 3), np.uint8)
        for agent in range(self.num_agents):
            wall[agent // columns * HEIGHT :, agent % columns * WIDTH :][:HEIGHT, :WIDTH] = (
                self.picture(agent)
            )
        return wall.repeat(scale, 0).repeat(scale, 1)
