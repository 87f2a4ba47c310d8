"""Basic of Unity ML-Agents: an agent on a line goes left to a small reward or right to a large one. No physics.

It starts at 10 of 20 places and sees its own, as a one of twenty numbers. It decides in every fixed step: stay, left,
right; each costs 0.01. At 7 it gets 0.1, at 17 it gets 1, and the episode ends: the best is 0.93. Unity loads the scene
anew then, so that the agent comes back under another id, and here too. Different from Unity: there can be several
agents (Unity's scene has one), and the end and the next episode's first decision always come in one message.
"""

import numpy as np

START, SMALL, LARGE, PLACES = 10, 7, 17, 20
STEP = np.array([0, -1, 1])
FLOOR, LINE, BLUE, GREEN = (40, 40, 40), (20, 20, 20), (70, 110, 240), (50, 200, 80)


class Basic:
    behavior, sensors, continuous, branches = "Basic?team=0", [("Basic", PLACES)], 0, (3,)
    num_agents = 1
    period, offset, between, max_step = 1, 0, True, 0
    dt, film_fps = 0.02, 5

    def __init__(self, num_agents, seed, parameters):
        self.num_agents, self.place = num_agents, np.full(num_agents, START)

    def begin(self, who):
        self.place[who] = START

    def observe(self, who):
        return [np.eye(PLACES, dtype=np.float32)[self.place[who]]]

    def act(self, who, continuous, discrete):
        academy = self.academy
        academy.reward[who] -= 0.01
        self.place[who] = np.clip(self.place[who] + STEP[discrete[:, 0]], 0, PLACES - 1)
        place = self.place[who]
        ended = (place == SMALL) | (place == LARGE)
        if ended.any():
            who = who[ended]
            academy.reward[who] += np.where(place[ended] == SMALL, 0.1, 1.0)
            academy.end(who)
            academy.disable(who)
            academy.enable(who)

    def update(self):
        pass

    def physics(self):
        pass

    def film(self, height, width):
        """A line for each agent, with its two goals."""
        side = max(4, min(width // PLACES, height // self.num_agents))
        wall = np.full((self.num_agents * side, PLACES * side, 3), FLOOR, np.uint8)
        for agent, place in enumerate(self.place):
            row = wall[agent * side :][: side - 1]
            for where, color, size in ((SMALL, GREEN, 2), (LARGE, GREEN, 1), (place, BLUE, 1)):
                margin = side // 4 * (size - 1) + 1
                row[margin : side - margin, where * side + margin : (where + 1) * side - margin] = color
        wall[::side], wall[:, ::side] = LINE, LINE
        return wall[: wall.shape[0] // 2 * 2, : wall.shape[1] // 2 * 2]
