"""Hallway of Unity ML-Agents: an agent passes a block with a symbol and must remember it to find the right goal.

There are sixteen halls with one agent each. An agent observes five rays and the elapsed time of the episode, each with
the two previous observations. It decides in every sixth fixed step: nothing, forward, back, turn right, turn left. Each
fixed step costs 1 / 3000. The right goal gives 1 and a wrong one -0.1, in place of the reward of that decision so far,
and both end the episode. Numbers are those of Unity's scene (ML-Agents package 2.2.1): X is always in the middle of the
hall, O anywhere across it.

Differences from Unity: the contacts (envs/unity_scenes/boxes.py); the agent neither tips nor climbs onto the pad of a
goal, because the first touch ends the episode.
"""

import numpy as np

from envs.unity_scenes.boxes import (
    DT,
    OFFSET,
    RADIUS,
    Boxes,
    Drawn,
    Stack,
    cast_at_boxes,
    cast_at_walls,
    directions,
    drawing,
    seen,
    separations,
)
from onefile_rl.engines.samplers import per_agent

# Half of the hall's inner size
WIDTH = 9.5
LENGTH = 24.75
SPEED = 1.5
TURN = np.radians(150) * DT
TURNS = TURN * np.array([0, 0, 0, 1, -1])
FORWARD = SPEED * np.array([0, 1, -1, 0, 0])
O_GOAL, X_GOAL, O_BLOCK, X_BLOCK, WALL = range(5)
WAYS = directions(2, 70)
MIDDLE = 0.015  # offset of the floor's centre from the hall's
# Left and right goal: a pad on the floor, 0.05 high, and a panel behind it. Centres and half sizes
PADS = np.array([(-7, 22.29), (7, 22.29)])
PAD = np.array([2.0, 2.0])
PANELS = np.array([(-7, 24.79), (7, 24.79)])
PANEL = np.array([4.081, 1.145]) / 2
SYMBOL = np.array([2.0, 0.5])
CORRECT = "Goal/Correct"
WRONG = "Goal/Wrong"
SUM = 2  # Unity's aggregation method of a statistic


class Hallway(Drawn):
    behavior = "Hallway?team=0"
    continuous = 0
    branches = (5,)
    sensors = [
        ("StackingSensor_size3_RayPerceptionSensor", 105),
        ("StackingSensor_size3_VectorSensor_size1", 3),
    ]
    num_agents = 16
    period = 6
    offset = 0
    between = True
    max_step = 3000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        room = (-WIDTH, -LENGTH), (WIDTH, LENGTH)
        self.boxes = Boxes(n, *room, 2 * 9.81, box_moves=False, cube_turns=True)
        self.boxes.drag[:, 0] = 2
        self.boxes.half[:] = SYMBOL
        self.push = np.zeros((n, 2))
        self.rays = Stack(n, 35)
        self.time = Stack(n, 1)
        self.symbol, self.left = np.zeros(
            (2, n), int
        )  # 0 for O, 1 for X: the block's symbol, the left goal's symbol

    def begin(self, agents):
        boxes = self.boxes
        rng = self.rng
        k = len(agents)
        boxes.gravity[agents, 0] = per_agent(self.parameters, "gravity", 2 * 9.81, agents)
        self.symbol[agents], self.left[agents] = rng.integers(0, 2, (2, k))
        across = np.where(self.symbol[agents] == 0, rng.uniform(-3, 3, k), 0)
        boxes.position[agents, 1] = np.stack([MIDDLE + across, rng.uniform(-5, 5, k)], 1)
        boxes.position[agents, 0] = np.stack(
            [MIDDLE + rng.uniform(-3, 3, k), rng.uniform(-20, -10, k)], 1
        )
        boxes.yaw[agents] = rng.uniform(0, 2 * np.pi, k)
        boxes.velocity[agents] = 0
        boxes.fall[agents] = 0
        boxes.height[agents, 0] = 0.5
        # The spin is kept, as in Unity
        self.push[agents] = 0
        self.rays.frames[agents] = 0
        self.time.frames[agents] = 0
        self.academy.stats += [(name, 0.0, SUM) for name in (CORRECT, WRONG) for _ in agents]

    def observe(self, agents):
        boxes = self.boxes
        k = len(agents)
        start = boxes.position[agents, 0]
        yaw = boxes.yaw[agents, None] + WAYS
        way = np.stack([np.sin(yaw), np.cos(yaw)], -1)
        middles = np.concatenate(
            [boxes.position[agents, 1:], np.broadcast_to([*PADS, *PANELS], (k, 4, 2))], 1
        )
        halves = np.broadcast_to([SYMBOL, PAD, PAD, PANEL, PANEL], (k, 5, 2))
        # Of a sphere at the agent's height, only the part below a pad's top hits the pad: a smaller radius
        over = 0.45 + boxes.height[agents, 0]
        low = np.sqrt(np.maximum(RADIUS**2 - over**2, 0))
        radius = np.stack(
            [np.full(k, RADIUS), low, low, np.full(k, RADIUS), np.full(k, RADIUS)], 1
        )[:, None]
        walls = cast_at_walls(start, way, boxes.low, boxes.high)
        distances = np.concatenate([walls, cast_at_boxes(start, way, middles, halves, radius)], -1)
        frame = np.zeros((k, 35), np.float32)
        for symbol in (0, 1):
            for left in (0, 1):
                these = (self.symbol[agents] == symbol) & (self.left[agents] == left)
                if these.any():
                    goals = [O_GOAL + left, X_GOAL - left]
                    tags = np.array([WALL] * 4 + [O_BLOCK + symbol, *goals, *goals])
                    frame[these] = seen(distances[these], tags, 5)
        steps = (self.academy.steps[agents, None] / 3000).astype(np.float32)
        return [self.rays.push(agents, frame), self.time.push(agents, steps)]

    def act(self, agents, continuous, discrete):
        action = discrete[:, 0]
        self.boxes.yaw[agents] += TURNS[action]
        self.push[agents] = FORWARD[action, None] * self.boxes.axes(agents)[:, 1]
        self.academy.reward[agents] -= 1 / 3000

    def update(self):
        pass

    def physics(self):
        boxes = self.boxes
        boxes.step(self.push)
        self.push[:] = 0
        cube = boxes.position[:, 0]
        if cube[:, 1].max() < PADS[0, 1] - PAD[1] - 1:
            return
        side = np.where(cube[:, 0] < 0, 0, 1)
        axes = boxes.axes()
        pads = separations(cube - PADS[side], axes, PAD).max(1) < OFFSET
        panels = separations(cube - PANELS[side], axes, PANEL).max(1) < OFFSET
        pads &= boxes.height[:, 0] < 0.05 + OFFSET
        (ended,) = (pads | panels).nonzero()
        if len(ended):
            goal = np.where(side[ended] == 0, self.left[ended], 1 - self.left[ended])
            right = goal == self.symbol[ended]
            self.academy.reward[ended] = np.where(right, 1.0, -0.1)
            self.academy.stats += [(CORRECT if hit else WRONG, 1.0, SUM) for hit in right]
            self.academy.end(ended)

    def drawn(self):
        wall = "0.55 0.6 0.65 1"
        floor = "0.86 0.84 0.78 1"
        room = [((MIDDLE, 0, 0), (10, 25, 0.5), floor)]
        room += [((x, 1.5, 0), (0.25, 25, 2), wall) for x in (-9.75, 9.75)]
        room += [((0, 1.5, z), (10, 0.25, 2), wall) for z in (-25, 25)]
        o = "0.9 0.5 0.15 1"
        x = "0.55 0.3 0.8 1"
        bodies = [((0.5, 0.5, 0.5), "0.25 0.45 0.9 1"), ((0.3, 0.06, 0.12), "1 1 1 1")]
        bodies += [((*SYMBOL, 2), color) for color in (o, x)] + [
            ((2, 2, 0.06), color) for color in (o, x)
        ]
        return drawing(bodies, room, min(self.num_agents, 4), 1, spacing=(22, 54))

    def poses(self):
        """Return the poses of the agent, its eyes, the symbols O and X (one is below the floor) and their goals."""
        boxes = self.boxes
        yaw = boxes.yaw
        cube, symbol = np.moveaxis(boxes.position, 1, 0)
        height = boxes.height[:, 0]
        rows = [(cube, 1 + height, yaw), (cube + 0.5 * boxes.axes()[:, 1], 1.15 + height, yaw)]
        rows += [(symbol, np.where(self.symbol == which, 2.5, -1000), 0 * yaw) for which in (0, 1)]
        rows += [
            (PADS[np.where(self.left == which, 0, 1)], 0.5 + 0 * yaw, 0 * yaw) for which in (0, 1)
        ]
        return np.stack([np.stack([at[:, 0], up, at[:, 1], turn], -1) for at, up, turn in rows], 1)
