"""PushBlock of Unity ML-Agents: thirty-two agents, each of which pushes a block into a green goal.

An agent observes seven rays at its own height and seven above it, each with the two previous observations. It decides
in every fifth fixed step: nothing, forward, back, turn right, turn left, strafe left, strafe right. Each fixed step
costs 1 / 5000. The block in the goal gives 5 and ends the episode. Numbers are those of Unity's scene (ML-Agents
package 2.2.1). Unity turns the whole room by a multiple of 90 degrees at each reset; agents cannot observe that, so
here the room does not turn.

Differences from Unity: the contacts (envs/unity_scenes/boxes.py); bodies slide on the floor and neither tip nor climb;
the spheres of the upper rays just touch the tops of the walls, and hit them whenever the agent stands on the floor, in
Unity in three of four cases.
"""

import numpy as np

from envs.unity_scenes.boxes import (
    DT,
    OFFSET,
    Boxes,
    Drawn,
    Stack,
    cast_at_boxes,
    cast_at_walls,
    directions,
    drawing,
    seen,
)
from onefile_rl.engines.samplers import per_agent

WIDTH = 12.5  # half of the floor
GOAL = -8.35  # z of the goal's face
SPEED = 3.0
TURN = np.radians(200) * DT
# For each action: the push along the agent's right and forward axes, and the turn
PUSH = SPEED * np.array([(0, 0), (0, 1), (0, -1), (0, 0), (0, 0), (-0.75, 0), (0.75, 0)])
TURNS = TURN * np.array([0, 0, 0, 1, -1, 0, 0])
BLOCK, THE_GOAL, WALL = range(3)
WAYS = directions(3, 90)
SPAWN = 6.25  # bodies start within this distance of the centre, along x and z
CLEAR = 2.5  # and at this distance from other bodies


class PushBlock(Drawn):
    behavior = "PushBlock?team=0"
    continuous = 0
    branches = (7,)
    sensors = [(f"StackingSensor_size3_{name}RayPerceptionSensor", 105) for name in ("Offset", "")]
    num_agents = 32
    period = 5
    offset = 0
    between = True
    max_step = 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        self.boxes = Boxes(
            n, (-WIDTH, GOAL), (WIDTH, WIDTH), 2.5 * 9.81, box_moves=True, cube_turns=False
        )
        self.boxes.drag[:, 0] = 4
        self.boxes.yaw[:] = np.pi
        self.push = np.zeros((n, 2))
        self.stacks = [Stack(n, 35), Stack(n, 35)]

    def begin(self, agents):
        boxes = self.boxes
        parameters = self.parameters
        friction = per_agent(parameters, "dynamic_friction", 0.0, agents)
        boxes.ground[agents] = (0.6 + friction)[:, None] / 2
        boxes.drag[agents, 1] = per_agent(parameters, "block_drag", 0.5, agents)
        boxes.half[agents] = per_agent(parameters, "block_scale", 2.0, agents)[:, None] / 2
        boxes.gravity[agents, 0] = per_agent(parameters, "gravity", 2.5 * 9.81, agents)
        for agent in agents:
            # As in Unity, new positions keep away from the agent's old one
            old = (boxes.position[agent, 0].copy(), CLEAR + boxes.reach()[agent, 0])
            block = boxes.position[agent, 1] = self.place([old])
            boxes.position[agent, 0] = self.place([old, (block, CLEAR + boxes.half[agent])])
        boxes.velocity[agents] = 0
        boxes.fall[agents] = 0
        boxes.height[agents] = (0.5, 0.625)  # both start at a height of 1
        self.push[agents] = 0
        for stack in self.stacks:
            stack.frames[agents] = 0

    def place(self, taken):
        """Return a random position away from the goal and from other bodies. taken: their (centre, distance to keep)"""
        while True:
            place = self.rng.uniform(-SPAWN, SPAWN, 2)
            if place[1] - CLEAR > GOAL and all(
                (np.abs(place - at) > near).any() for at, near in taken
            ):
                return place

    def observe(self, agents):
        boxes = self.boxes
        start = boxes.position[agents, 0]
        yaw = boxes.yaw[agents, None] + WAYS
        way = np.stack([np.sin(yaw), np.cos(yaw)], -1)
        walls = cast_at_walls(start, way, boxes.low, boxes.high)
        blocks = cast_at_boxes(start, way, boxes.position[agents, 1:], boxes.half[agents, None])
        lower = seen(
            np.concatenate([walls, blocks], -1), np.array([WALL, THE_GOAL, WALL, WALL, BLOCK]), 3
        )
        # The upper spheres hit the edge of a wall when their centre is above it. They pass over the goal.
        tops = cast_at_walls(start, way, np.array([-WIDTH, -WIDTH]), boxes.high, radius=0)
        tops[boxes.height[agents, 0] > OFFSET] = np.inf
        upper = seen(tops, np.array([WALL] * 4), 3)
        return [
            stack.push(agents, frame)
            for stack, frame in zip(self.stacks, (upper, lower), strict=True)
        ]

    def act(self, agents, continuous, discrete):
        action = discrete[:, 0]
        self.boxes.yaw[agents] += TURNS[action]
        self.push[agents] = (PUSH[action][:, :, None] * self.boxes.axes(agents)).sum(1)
        self.academy.reward[agents] -= 1 / 5000

    def update(self):
        pass

    def physics(self):
        boxes = self.boxes
        boxes.step(self.push)
        self.push[:] = 0
        (scored,) = (boxes.position[:, 1, 1] - boxes.half[:, 1] - GOAL < OFFSET).nonzero()
        if len(scored):
            self.academy.reward[scored] += 5
            self.academy.end(scored)

    def drawn(self):
        wall = "0.55 0.6 0.65 1"
        goal = "0.35 0.8 0.45 1"
        floor = "0.86 0.84 0.78 1"
        room = [
            ((0, -0.5, 0), (12.5, 12.5, 0.5), floor),
            ((0, -0.005, -10.5), (12.5, 2.15, 0.05), goal),
        ]
        room += [((x, 0.5, 0), (0.25, 13, 1), wall) for x in (-12.75, 12.75)]
        room += [((0, 0.5, z), (12.5, 0.25, 1), wall) for z in (-12.75, 12.75)]
        bodies = [((0.5, 0.5, 0.5), "0.25 0.45 0.9 1"), ((0.3, 0.06, 0.12), "1 1 1 1")]
        bodies.append(((*self.boxes.half[0], 0.375), "0.9 0.55 0.2 1"))
        columns = min(self.num_agents, 3)
        return drawing(bodies, room, columns, min(self.num_agents // columns, 2), spacing=(28, 28))

    def poses(self):
        """Return the poses of the agent, its eyes and the block."""
        boxes = self.boxes
        yaw = boxes.yaw
        cube, block = np.moveaxis(boxes.position, 1, 0)
        eyes = cube + 0.5 * boxes.axes()[:, 1]
        height = boxes.height[:, 0]
        rows = [
            (cube, 0.5 + height, yaw),
            (eyes, 0.65 + height, yaw),
            (block, 0.375 + boxes.height[:, 1], 0 * yaw),
        ]
        return np.stack([np.stack([at[:, 0], up, at[:, 1], turn], -1) for at, up, turn in rows], 1)
