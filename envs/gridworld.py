"""GridWorld of Unity ML-Agents: nine agents, each on a board of its own, walk to the green plus and not to the red
cross.

An agent sees its board from above, and nothing else. It decides in every fixed step: stay, up, down, left, right; the
mask forbids steps into a wall. 1 and the end on the plus, -1 and the end on the cross, -0.01 a step. The boards are
drawn flat and dark, in Unity's size: a network trained here has not seen Unity's light. Newer packages also tell the
agent which of the two is the goal; here it is always the plus, as it was before.
"""

import numpy as np

HEIGHT, WIDTH = 64, 84
MOVES = np.array([(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)])  # stay, up, down, left, right: columns, rows
FLOOR, LINE, BLUE, GREEN, RED = ((40, 40, 40), (20, 20, 20), (70, 110, 240), (50, 200, 80), (230, 60, 60))


class GridWorld:
    behavior, sensors, continuous, branches = "GridWorld?team=0", [("CameraSensor", (HEIGHT, WIDTH, 3))], 0, (5,)
    num_agents = 9
    period, offset, between, max_step = 1, 0, True, 100
    dt, film_fps = 0.02, 5

    def __init__(self, num_agents, seed, parameters):
        self.num_agents, self.rng, self.parameters = num_agents, np.random.default_rng(seed), parameters
        self.places = np.zeros((num_agents, 3, 2), int)  # column and row of the plus, the cross, the agent
        self.size = np.zeros(num_agents, int)

    def begin(self, who):
        for agent in who:
            size = self.size[agent] = max(2, int(self.parameters.get("gridSize", 5)))
            self.places[agent] = np.stack(np.divmod(self.rng.choice(size * size, 3, replace=False), size), 1)

    def observe(self, who):
        return [np.stack([self.picture(agent) for agent in who])]

    def mask(self, who):
        """True where a choice is forbidden."""
        after = self.places[who, None, 2] + MOVES
        return ((after < 0) | (after >= self.size[who, None, None])).any(2)

    def act(self, who, continuous, discrete):
        self.academy.reward[who] -= 0.01
        allowed = ~self.mask(who)[np.arange(len(who)), discrete[:, 0]]  # a wall stops whoever walks into it
        self.places[who, 2] += MOVES[discrete[:, 0]] * allowed[:, None]
        for agent in who:
            found = np.flatnonzero((self.places[agent, :2] == self.places[agent, 2]).all(1))
            if len(found):
                self.academy.reward[agent] = (1, -1)[found[0]]
                self.academy.end(np.array([agent]))

    def update(self):
        pass

    def physics(self):
        pass

    def picture(self, agent):
        """The board in the middle of the picture, as high as it is."""
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
            board[row * side + 1 : (row + 1) * side, column * side + 1 : (column + 1) * side][shape] = color
        picture = np.full((HEIGHT, WIDTH, 3), LINE, np.uint8)
        top, left = (HEIGHT - side * size) // 2, (WIDTH - side * size) // 2
        picture[top : top + side * size, left : left + side * size] = board
        return picture

    def film(self, height, width):
        """All boards in a square."""
        columns = int(np.ceil(np.sqrt(self.num_agents)))
        rows, scale = -(-self.num_agents // columns), max(1, min(height // HEIGHT, width // WIDTH) // columns)
        wall = np.zeros((rows * HEIGHT, columns * WIDTH, 3), np.uint8)
        for agent in range(self.num_agents):
            wall[agent // columns * HEIGHT :, agent % columns * WIDTH :][:HEIGHT, :WIDTH] = self.picture(agent)
        return wall.repeat(scale, 0).repeat(scale, 1)
