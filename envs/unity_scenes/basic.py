"""Basic of Unity ML-Agents: an agent on a line moves left to a small reward or right to a large one. No physics.

The agent starts at place 10 of 20 and observes its place as a one-hot vector. It decides in every fixed step: stay,
left or right; each step costs 0.01. Place 7 gives 0.1, place 17 gives 1, and both end the episode: the highest return
is 0.93. At an end Unity reloads the scene, so that the agent gets a new id, and so does this scene. Differences from
Unity: there can be several agents (Unity's scene has one), and an end and the next episode's first decision always
arrive in one message.
"""

import numpy as np

START = 10
SMALL = 7
LARGE = 17
PLACES = 20
STEP = np.array([0, -1, 1])
FLOOR = (40, 40, 40)
LINE = (20, 20, 20)
BLUE = (70, 110, 240)
GREEN = (50, 200, 80)


class Basic:
    behavior = "Basic?team=0"
    sensors = [("Basic", PLACES)]
    continuous = 0
    branches = (3,)
    num_agents = 1
    period = 1
    offset = 0
    between = True
    max_step = 0
    dt = 0.02
    video_fps = 5

    def __init__(self, num_agents, seed, parameters):
        self.num_agents = num_agents
        self.place = np.full(num_agents, START)

    def begin(self, agents):
        self.place[agents] = START

    def observe(self, agents):
        return [np.eye(PLACES, dtype=np.float32)[self.place[agents]]]

    def act(self, agents, continuous, discrete):
        academy = self.academy
        academy.reward[agents] -= 0.01
        self.place[agents] = np.clip(self.place[agents] + STEP[discrete[:, 0]], 0, PLACES - 1)
        place = self.place[agents]
        ended = (place == SMALL) | (place == LARGE)
        if ended.any():
            agents = agents[ended]
            academy.reward[agents] += np.where(place[ended] == SMALL, 0.1, 1.0)
            academy.end(agents)
            academy.disable(agents)
            academy.enable(agents)

    def update(self):
        pass

    def physics(self):
        pass

    def draw_frame(self, height, width):
        """Draw a line for each agent, with its two goals."""
        side = max(4, min(width // PLACES, height // self.num_agents))
        wall = np.full((self.num_agents * side, PLACES * side, 3), FLOOR, np.uint8)
        for agent, place in enumerate(self.place):
            row = wall[agent * side :][: side - 1]
            for where, color, size in ((SMALL, GREEN, 2), (LARGE, GREEN, 1), (place, BLUE, 1)):
                margin = side // 4 * (size - 1) + 1
                row[margin : side - margin, where * side + margin : (where + 1) * side - margin] = (
                    color
                )
        wall[::side] = LINE
        wall[:, ::side] = LINE
        return wall[: wall.shape[0] // 2 * 2, : wall.shape[1] // 2 * 2]
