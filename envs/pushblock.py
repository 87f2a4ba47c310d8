"""PushBlock of Unity ML-Agents: a cube pushes a block into the green goal, thirty-two times over.

An agent sees seven rays at its own height and seven above it, each with its last two frames. It decides in every fifth
fixed step: nothing, forward, back, turn right, turn left, strafe left, strafe right. -1 / 5000 a fixed step, 5 and the
end when the block meets the goal. Numbers are those of Unity's scene (ML-Agents' package 2.2.1). Unity turns the whole
room by quarters at each reset, which nobody in it can tell, so here it stands still.

Different from Unity: the contacts (envs/boxes.py); bodies slide on the floor and do not tip or climb; the upper rays,
whose spheres graze the walls' tops, see a wall whenever the agent stands on the floor, in Unity in three of four cases.
"""

import numpy as np

from envs.boxes import DT, OFFSET, Boxes, Drawn, Stack, cast_at_boxes, cast_at_walls, directions, drawing, seen

WIDTH, GOAL = 12.5, -8.35  # half of the floor; where the goal's face is
SPEED, TURN = 3.0, np.radians(200) * DT
# (along the agent's right, along its forward), and its turn, for each choice
PUSH = SPEED * np.array([(0, 0), (0, 1), (0, -1), (0, 0), (0, 0), (-0.75, 0), (0.75, 0)])
TURNS = TURN * np.array([0, 0, 0, 1, -1, 0, 0])
BLOCK, THE_GOAL, WALL = range(3)
WAYS = directions(3, 90)
SPAWN, CLEAR = 6.25, 2.5  # where bodies are put; how far from others


class PushBlock(Drawn):
    behavior, continuous, branches = "PushBlock?team=0", 0, (7,)
    sensors = [(f"StackingSensor_size3_{name}RayPerceptionSensor", 105) for name in ("Offset", "")]
    num_agents = 32
    period, offset, between, max_step = 5, 0, True, 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng, self.parameters = np.random.default_rng(seed), parameters
        self.boxes = Boxes(n, (-WIDTH, GOAL), (WIDTH, WIDTH), 2.5 * 9.81, box_moves=True, cube_turns=False)
        self.boxes.drag[:, 0] = 4
        self.boxes.yaw[:] = np.pi
        self.push, self.stacks = np.zeros((n, 2)), [Stack(n, 35), Stack(n, 35)]

    def begin(self, who):
        boxes, parameters = self.boxes, self.parameters
        friction = parameters.get("dynamic_friction", 0.0)
        boxes.ground[who] = (0.6 + friction) / 2
        boxes.drag[who, 1] = parameters.get("block_drag", 0.5)
        boxes.half[who] = parameters.get("block_scale", 2.0) / 2
        boxes.gravity = parameters.get("gravity", 2.5 * 9.81)
        for agent in who:
            old = boxes.position[agent, 0].copy(), CLEAR + boxes.reach()[agent, 0]  # the agent stands in its own way
            block = boxes.position[agent, 1] = self.place([old])
            boxes.position[agent, 0] = self.place([old, (block, CLEAR + boxes.half[agent])])
        boxes.velocity[who], boxes.fall[who] = 0, 0
        boxes.height[who] = (0.5, 0.625)  # both are put in at a height of 1
        self.push[who] = 0
        for stack in self.stacks:
            stack.frames[who] = 0

    def place(self, taken):
        """A place that is clear of the goal and of bodies: (middle, how near is too near)."""
        while True:
            place = self.rng.uniform(-SPAWN, SPAWN, 2)
            if place[1] - CLEAR > GOAL and all((np.abs(place - at) > near).any() for at, near in taken):
                return place

    def observe(self, who):
        boxes = self.boxes
        start, yaw = boxes.position[who, 0], boxes.yaw[who, None] + WAYS
        way = np.stack([np.sin(yaw), np.cos(yaw)], -1)
        walls = cast_at_walls(start, way, boxes.low, boxes.high)
        blocks = cast_at_boxes(start, way, boxes.position[who, 1:], boxes.half[who, None])
        lower = seen(np.concatenate([walls, blocks], -1), np.array([WALL, THE_GOAL, WALL, WALL, BLOCK]), 3)
        # The upper spheres meet the walls' edges when their centres are above them. They pass over the goal.
        tops = cast_at_walls(start, way, np.array([-WIDTH, -WIDTH]), boxes.high, radius=0)
        tops[boxes.height[who, 0] > OFFSET] = np.inf
        upper = seen(tops, np.array([WALL] * 4), 3)
        return [stack.push(who, frame) for stack, frame in zip(self.stacks, (upper, lower), strict=True)]

    def act(self, who, continuous, discrete):
        choice = discrete[:, 0]
        self.boxes.yaw[who] += TURNS[choice]
        self.push[who] = (PUSH[choice][:, :, None] * self.boxes.axes(who)).sum(1)
        self.academy.reward[who] -= 1 / 5000

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
        wall, goal, floor = "0.55 0.6 0.65 1", "0.35 0.8 0.45 1", "0.86 0.84 0.78 1"
        room = [((0, -0.5, 0), (12.5, 12.5, 0.5), floor), ((0, -0.005, -10.5), (12.5, 2.15, 0.05), goal)]
        room += [((x, 0.5, 0), (0.25, 13, 1), wall) for x in (-12.75, 12.75)]
        room += [((0, 0.5, z), (12.5, 0.25, 1), wall) for z in (-12.75, 12.75)]
        bodies = [((0.5, 0.5, 0.5), "0.25 0.45 0.9 1"), ((0.3, 0.06, 0.12), "1 1 1 1")]
        bodies.append(((*self.boxes.half[0], 0.375), "0.9 0.55 0.2 1"))
        columns = min(self.num_agents, 3)
        return drawing(bodies, room, columns, min(self.num_agents // columns, 2), spacing=(28, 28))

    def poses(self):
        """The agent, its eyes, the block."""
        boxes = self.boxes
        yaw, (cube, block) = boxes.yaw, np.moveaxis(boxes.position, 1, 0)
        eyes = cube + 0.5 * boxes.axes()[:, 1]
        height = boxes.height[:, 0]
        rows = [(cube, 0.5 + height, yaw), (eyes, 0.65 + height, yaw), (block, 0.375 + boxes.height[:, 1], 0 * yaw)]
        return np.stack([np.stack([at[:, 0], up, at[:, 1], turn], -1) for at, up, turn in rows], 1)
