"""Sorter of Unity ML-Agents: eight agents, each of which touches numbered tiles in ascending order.

An agent stands in a round room, with tiles at random ones of twenty places at the wall. It observes each tile that is
there as a row of 23 numbers: the tile's number as a one-hot vector of 20, its position relative to the agent, and
whether it was touched. There are up to twenty tiles, and the rows that are left over are zeros. It also observes its
own velocity, and its position and heading, each with the previous ones. It decides in every fifth fixed step, with
three branches of three options: nothing, forward, back; nothing, right, left, which takes the place of forward and
back; nothing, turn left, turn right. Each fixed step costs 1 / 5000. The next tile gives 1 and another one gives -1 and
ends the episode; the last tile ends it too. An episode has 1 to `num_tiles` tiles, an environment parameter that is 20
by default. Numbers are those of Unity's scene (ML-Agents package 2.2.1): the one-hot vector of tile 20 is all zeros,
because its place is that of the tile's position.

Differences from Unity: the contacts. A wall or a tile takes the velocity toward it from the agent, without friction;
the agent neither tips nor leaves the floor.
"""

import numpy as np

from envs.unity_scenes.boxes import ANCHORS, DT, FRICTION, OFFSET, SIDE, Drawn, drawing, separations

PLACES = 20  # at the wall; the numbers of the tiles are 1 to 20
WIDTH = PLACES + 3  # numbers in the row of a tile
RADIUS = 20.5  # distance of a tile's centre from the room's
HALF = np.array([3.5, 1.52]) / 2  # half of a tile's edges, along the wall and across
WALL = 19.98  # radius of the room
SPEED = 3.0
TURN = np.radians(200) * DT
# For each option: the push along the forward axis, along the right axis, and the turn
FORWARD = SPEED * np.array([0, 1, -1])
RIGHT = SPEED * np.array([0, 1, -1])
TURNS = TURN * np.array([0, -1, 1])
DRAG = 4.0
GRAVITY = 2.5 * 9.81
CORNERS = SIDE * np.array([(a, b) for a in (-1, 1) for b in (-1, 1)])
ANGLES = np.arange(PLACES) * 2 * np.pi / PLACES
ABOVE = np.stack([np.sin(ANGLES), np.cos(ANGLES)], 1)  # from the room's centre to each place
ALONG = np.stack([ABOVE[:, 1], -ABOVE[:, 0]], 1)  # along the wall there
NEAR = RADIUS - HALF[1] - np.sqrt(2) * SIDE - OFFSET  # nearer to the centre nothing is touched


class Sorter(Drawn):
    behavior = "Sorter?team=0"
    continuous = 0
    branches = (3, 3, 3)
    sensors = [
        ("BufferSensor", (PLACES, WIDTH)),
        ("RBSensor", 10),
        ("StackingSensor_size2_VectorSensor_size4", 8),
    ]
    num_agents = 8
    period = 5
    offset = 0
    between = True
    max_step = 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        self.position, self.velocity, self.push = np.zeros((3, n, 2))
        self.yaw = np.full(n, np.pi)
        self.count = np.zeros(n, int)  # tiles of the episode
        self.touched = np.zeros(n, int)  # of these
        # Of each tile, in ascending order: its number and its place. Rows beyond `count` are unused
        self.number, self.place = np.zeros((2, n, PLACES), int)
        self.rank = np.zeros(
            (n, PLACES), int
        )  # of the tile at each place, `PLACES` if there is none
        self.before = np.zeros((n, 4), np.float32)  # the last position and heading

    def begin(self, agents):
        most = int(np.clip(self.parameters.get("num_tiles", PLACES), 1, PLACES))
        for agent in agents:
            count = self.rng.integers(1, most + 1)
            self.count[agent] = count
            numbers = self.rng.choice(PLACES, count, replace=False) + 1
            self.number[agent, :count] = np.sort(numbers)
            places = self.rng.choice(PLACES, count, replace=False)
            self.place[agent, :count] = places
            self.rank[agent] = PLACES
            self.rank[agent, places] = np.arange(count)
        self.touched[agents] = 0
        self.position[agents] = 0
        self.velocity[agents] = 0
        self.push[agents] = 0
        self.before[agents] = 0
        # The heading is kept, as in Unity

    def observe(self, agents):
        return [self.tiles(agents), self.body(agents), self.pose_stack(agents)]

    def tiles(self, agents):
        """Return the rows of the tiles, side by side."""
        k = len(agents)
        order = np.arange(PLACES)
        there = order < self.count[agents, None]
        rows = np.zeros((k, PLACES, WIDTH), np.float32)
        number = self.number[agents]
        which = np.nonzero(there & (number < PLACES))
        rows[*which, number[which]] = 1
        tiles = RADIUS * ABOVE[self.place[agents]]
        rows[..., PLACES : PLACES + 2] = (tiles - self.position[agents, None]) / 20
        rows[..., -1] = order < self.touched[agents, None]
        rows[~there] = 0
        return rows.reshape(k, -1)

    def body(self, agents):
        """Return the pose of the body relative to itself, which is constant, and its velocity in its own frame."""
        out = np.zeros((len(agents), 10), np.float32)
        out[:, 6] = 1
        right, forward = self.axes(agents)
        out[:, 7] = np.vecdot(self.velocity[agents], right)
        out[:, 9] = np.vecdot(self.velocity[agents], forward)
        return out

    def pose_stack(self, agents):
        now = np.empty((len(agents), 4), np.float32)
        now[:, :2] = self.position[agents] / 20
        now[:, 2:] = self.axes(agents)[1]
        stack = np.concatenate([self.before[agents], now], 1)
        self.before[agents] = now
        return stack

    def axes(self, agents=slice(None)):
        """Return the right and the forward axes of the agents."""
        sin = np.sin(self.yaw[agents])
        cos = np.cos(self.yaw[agents])
        return np.stack([cos, -sin], -1), np.stack([sin, cos], -1)

    def act(self, agents, continuous, discrete):
        forward, right, turn = discrete.T
        right_axis, forward_axis = self.axes(agents)
        self.push[agents] = np.where(
            right[:, None] > 0,
            RIGHT[right, None] * right_axis,
            FORWARD[forward, None] * forward_axis,
        )
        self.yaw[agents] += TURNS[turn]
        self.academy.reward[agents] -= 1 / 5000

    def update(self):
        pass

    def physics(self):
        # Drag, and friction with the floor
        kept = 1 - DRAG * DT
        self.velocity = (self.velocity + self.push) * kept
        self.push[:] = 0
        gravity = self.parameters.get("gravity", GRAVITY)
        loss = ANCHORS * FRICTION * gravity * DT * kept
        speed = np.sqrt(np.vecdot(self.velocity, self.velocity)) + 1e-12
        self.velocity *= np.maximum(1 - loss / speed, 0)[:, None]
        self.position += DT * self.velocity

        # Contacts with the wall and with tiles
        near = np.flatnonzero(np.vecdot(self.position, self.position) > NEAR**2)
        if len(near):
            self.touch_wall(near)
            self.touch_tiles(near)

    def touch_wall(self, agents):
        """Keep the corners of the agents within the room."""
        right, forward = self.axes(agents)
        corners = self.position[agents, None] + CORNERS @ np.stack([right, forward], 1)
        far = np.sqrt(np.vecdot(corners, corners))
        corner = far.argmax(1)
        rows = np.arange(len(agents))
        depth = np.maximum(far[rows, corner] - WALL, 0)
        normal = corners[rows, corner] / far[rows, corner][:, None]
        self.push_out(agents, -normal, depth)

    def touch_tiles(self, agents):
        """Reward the agents that touch a tile, and keep all of them out of the tiles."""
        # The tile at the nearest place: the others are out of reach
        angle = np.arctan2(self.position[agents, 0], self.position[agents, 1])
        place = np.rint(angle * PLACES / (2 * np.pi)).astype(int) % PLACES
        rank = self.rank[agents, place]
        frame = np.stack([ALONG[place], ABOVE[place]], 1)  # the axes of that place
        away = np.vecdot(frame, (self.position[agents] - RADIUS * ABOVE[place])[:, None])
        axes = np.stack(self.axes(agents), 1) @ frame.swapaxes(1, 2)
        gaps = separations(away, axes, np.broadcast_to(HALF, away.shape))
        touches = (gaps.max(1) < OFFSET) & (rank < PLACES)
        if not touches.any():
            return

        # Out of the tile along the wall or across it, whichever is nearer
        across = gaps[:, 1] > gaps[:, 0]
        axis = np.where(across[:, None], frame[:, 1], frame[:, 0])
        side = np.where(np.where(across, away[:, 1], away[:, 0]) < 0, -1.0, 1.0)
        depth = np.where(touches, np.maximum(-np.maximum(gaps[:, 0], gaps[:, 1]), 0), 0)
        self.push_out(agents, axis * side[:, None], depth)

        new = touches & (rank >= self.touched[agents])
        right = new & (rank == self.touched[agents])
        wrong = agents[new & ~right]
        right = agents[right]
        self.academy.reward[right] += 1
        self.touched[right] += 1
        self.academy.reward[wrong] -= 1
        done = right[self.touched[right] == self.count[right]]
        ended = np.concatenate([wrong, done])
        if len(ended):
            self.academy.end(ended)

    def push_out(self, agents, normal, depth):
        """Move agents by `depth` along `normal`, and stop their motion against it."""
        self.position[agents] += depth[:, None] * normal
        against = np.minimum(np.vecdot(self.velocity[agents], normal), 0) * (depth > 0)
        self.velocity[agents] -= against[:, None] * normal

    def drawn(self):
        floor = "0.86 0.84 0.78 1"
        edge = RADIUS + 1.5  # tiles stand on the floor
        room = [((0, -0.5, 0), (edge, edge, 0.5), floor)]
        bodies = [((0.5, 0.5, 0.5), "0.25 0.45 0.9 1"), ((0.3, 0.06, 0.12), "1 1 1 1")]
        # Tiles from the smallest to the largest number: bright to dark. Touched ones sink into the floor
        for rank in range(PLACES):
            shade = 1 - 0.8 * rank / (PLACES - 1)
            bodies.append(((*HALF, 2.14), f"{shade:.2f} {0.7 * shade:.2f} 0.2 1"))
        columns = min(self.num_agents, 2)
        return drawing(bodies, room, columns, min(self.num_agents // columns, 2), spacing=(46, 46))

    def poses(self):
        """Return the poses of the agent, its eyes and the tiles. Missing tiles are below the floor."""
        _, forward = self.axes()
        rows = np.zeros((self.num_agents, 2 + PLACES, 4))
        rows[:, 0] = np.column_stack(
            [self.position[:, 0], 0.5 + 0 * self.yaw, self.position[:, 1], self.yaw]
        )
        eyes = self.position + 0.5 * forward
        rows[:, 1] = np.column_stack([eyes[:, 0], 0.65 + 0 * self.yaw, eyes[:, 1], self.yaw])
        tiles = RADIUS * ABOVE[self.place]
        order = np.arange(PLACES)
        there = order < self.count[:, None]
        touched = order < self.touched[:, None]
        rows[:, 2:, 0] = tiles[..., 0]
        rows[:, 2:, 1] = np.where(there, np.where(touched, -1.7, 1.84), -1000)
        rows[:, 2:, 2] = tiles[..., 1]
        rows[:, 2:, 3] = ANGLES[self.place]
        return rows
