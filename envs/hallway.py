"""Hallway of Unity ML-Agents: an agent passes a block with a symbol, and must remember it to know which goal is right.

Sixteen halls, one agent in each. It sees five rays and how far the episode is, each with the last two frames. It
decides in every sixth fixed step: nothing, forward, back, turn right, turn left. -1 / 3000 a fixed step; the right goal
gives 1, a wrong one -0.1, in the place of what the decision had cost, and either ends the episode. Numbers are those of
Unity's scene (ML-Agents' package 2.2.1), X always in the middle of the hall and O anywhere across it, as there.

Different from Unity: the contacts (envs/boxes.py); the agent does not tip, or climb onto a goal's pad, which ends the
episode at the first touch.
"""

import numpy as np

from envs.boxes import (
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

WIDTH, LENGTH = 9.5, 24.75  # halves of the hall between its walls
SPEED, TURN = 1.5, np.radians(150) * DT
TURNS = TURN * np.array([0, 0, 0, 1, -1])
FORWARD = SPEED * np.array([0, 1, -1, 0, 0])
O_GOAL, X_GOAL, O_BLOCK, X_BLOCK, WALL = range(5)
WAYS = directions(2, 70)
MIDDLE = 0.015  # of the floor, off the hall's by that much
# Left and right goal: a pad on the floor, 0.05 high, and a panel behind it.
PADS, PAD = np.array([(-7, 22.29), (7, 22.29)]), np.array([2.0, 2.0])
PANELS, PANEL = np.array([(-7, 24.79), (7, 24.79)]), np.array([4.081, 1.145]) / 2
SYMBOL = np.array([2.0, 0.5])
CORRECT, WRONG, SUM = "Goal/Correct", "Goal/Wrong", 2


class Hallway(Drawn):
    behavior, continuous, branches = "Hallway?team=0", 0, (5,)
    sensors = [("StackingSensor_size3_RayPerceptionSensor", 105), ("StackingSensor_size3_VectorSensor_size1", 3)]
    num_agents = 16
    period, offset, between, max_step = 6, 0, True, 3000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng, self.parameters = np.random.default_rng(seed), parameters
        room = (-WIDTH, -LENGTH), (WIDTH, LENGTH)
        self.boxes = Boxes(n, *room, 2 * 9.81, box_moves=False, cube_turns=True)
        self.boxes.drag[:, 0], self.boxes.half[:] = 2, SYMBOL
        self.push, self.rays, self.time = np.zeros((n, 2)), Stack(n, 35), Stack(n, 1)
        self.symbol, self.left = np.zeros((2, n), int)  # which it is, O or X; which goal is on the left

    def begin(self, who):
        boxes, rng, k = self.boxes, self.rng, len(who)
        boxes.gravity = self.parameters.get("gravity", 2 * 9.81)
        self.symbol[who], self.left[who] = rng.integers(0, 2, (2, k))
        across = np.where(self.symbol[who] == 0, rng.uniform(-3, 3, k), 0)
        boxes.position[who, 1] = np.stack([MIDDLE + across, rng.uniform(-5, 5, k)], 1)
        boxes.position[who, 0] = np.stack([MIDDLE + rng.uniform(-3, 3, k), rng.uniform(-20, -10, k)], 1)
        boxes.yaw[who] = rng.uniform(0, 2 * np.pi, k)
        boxes.velocity[who], boxes.fall[who], boxes.height[who, 0] = 0, 0, 0.5  # its spin stays, as in Unity
        self.push[who] = 0
        self.rays.frames[who], self.time.frames[who] = 0, 0
        self.academy.stats += [(name, 0.0, SUM) for name in (CORRECT, WRONG) for _ in who]

    def observe(self, who):
        boxes, k = self.boxes, len(who)
        start, yaw = boxes.position[who, 0], boxes.yaw[who, None] + WAYS
        way = np.stack([np.sin(yaw), np.cos(yaw)], -1)
        middles = np.concatenate([boxes.position[who, 1:], np.broadcast_to([*PADS, *PANELS], (k, 4, 2))], 1)
        halves = np.broadcast_to([SYMBOL, PAD, PAD, PANEL, PANEL], (k, 5, 2))
        # A sphere at the agent's height meets a pad's edge with what of it hangs that low.
        over = 0.45 + boxes.height[who, 0]
        low = np.sqrt(np.maximum(RADIUS**2 - over**2, 0))
        radius = np.stack([np.full(k, RADIUS), low, low, np.full(k, RADIUS), np.full(k, RADIUS)], 1)[:, None]
        walls = cast_at_walls(start, way, boxes.low, boxes.high)
        distances = np.concatenate([walls, cast_at_boxes(start, way, middles, halves, radius)], -1)
        frame = np.zeros((k, 35), np.float32)
        for symbol in (0, 1):
            for left in (0, 1):
                these = (self.symbol[who] == symbol) & (self.left[who] == left)
                if these.any():
                    goals = [O_GOAL + left, X_GOAL - left]
                    tags = np.array([WALL] * 4 + [O_BLOCK + symbol, *goals, *goals])
                    frame[these] = seen(distances[these], tags, 5)
        steps = (self.academy.steps[who, None] / 3000).astype(np.float32)
        return [self.rays.push(who, frame), self.time.push(who, steps)]

    def act(self, who, continuous, discrete):
        choice = discrete[:, 0]
        self.boxes.yaw[who] += TURNS[choice]
        self.push[who] = FORWARD[choice, None] * self.boxes.axes(who)[:, 1]
        self.academy.reward[who] -= 1 / 3000

    def update(self):
        pass

    def physics(self):
        boxes = self.boxes
        boxes.step(self.push)
        self.push[:] = 0
        cube = boxes.position[:, 0]
        if cube[:, 1].max() < PADS[0, 1] - PAD[1] - 1:
            return
        side, axes = np.where(cube[:, 0] < 0, 0, 1), boxes.axes()
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
        wall, floor = "0.55 0.6 0.65 1", "0.86 0.84 0.78 1"
        room = [((MIDDLE, 0, 0), (10, 25, 0.5), floor)]
        room += [((x, 1.5, 0), (0.25, 25, 2), wall) for x in (-9.75, 9.75)]
        room += [((0, 1.5, z), (10, 0.25, 2), wall) for z in (-25, 25)]
        o, x = "0.9 0.5 0.15 1", "0.55 0.3 0.8 1"
        bodies = [((0.5, 0.5, 0.5), "0.25 0.45 0.9 1"), ((0.3, 0.06, 0.12), "1 1 1 1")]
        bodies += [((*SYMBOL, 2), color) for color in (o, x)] + [((2, 2, 0.06), color) for color in (o, x)]
        return drawing(bodies, room, min(self.num_agents, 4), 1, spacing=(22, 54))

    def poses(self):
        """The agent, its eyes, the symbols O and X (one of them below the floor), their goals."""
        boxes = self.boxes
        yaw, (cube, symbol), height = boxes.yaw, np.moveaxis(boxes.position, 1, 0), boxes.height[:, 0]
        rows = [(cube, 1 + height, yaw), (cube + 0.5 * boxes.axes()[:, 1], 1.15 + height, yaw)]
        rows += [(symbol, np.where(self.symbol == which, 2.5, -1000), 0 * yaw) for which in (0, 1)]
        rows += [(PADS[np.where(self.left == which, 0, 1)], 0.5 + 0 * yaw, 0 * yaw) for which in (0, 1)]
        return np.stack([np.stack([at[:, 0], up, at[:, 1], turn], -1) for at, up, turn in rows], 1)
