"""FoodCollector of Unity ML-Agents: agents collect green food, avoid red food, and freeze each other with lasers.

There are four areas with five agents each. An agent observes seven rays (food, agent, wall, red food, frozen agent),
its velocity, whether it is frozen and whether it shoots. It decides in every fifth fixed step: three continuous actions
move it forward and sideways and turn it, and a choice shoots. Green food gives 1 and red food -1, and both appear again
elsewhere in the area. An agent that is hit by a laser can't act for four seconds. An episode always lasts 5000 fixed
steps. Actions are those of the hybrid scene (ML-Agents package 2.2.1), observations those of the scene with rays
(release 1); today's scene has a grid of 40 x 40 cells in place of the rays.

Differences from Unity: bodies stay on the floor, also where Unity drops them from a height; contacts between agents are
those of discs with the area of their cubes; food does not touch other food; all agents act before the lasers hit.
"""

import numpy as np

from envs.unity_scenes.boxes import (
    ANCHORS,
    DT,
    FRICTION,
    OFFSET,
    Drawn,
    cast_at_boxes,
    cast_at_walls,
    directions,
    drawing,
    seen,
)

CREW = 5  # agents of an area
NUM_FOOD = 25  # in an area, and as many red ones
WALL = 50.0  # distance of the walls from the centre of an area
SPAWN = 45.0  # agents and food appear within this distance of the centre, along x and z
SPEED = 2.0
TURN = np.radians(300) * DT
DRAG = 0.5
LOSS = ANCHORS * FRICTION * 9.81 * DT * (1 - DRAG * DT)  # of speed by friction, in a fixed step
FAST = 5.0  # agents slow down above this speed
FOOD = 0.75  # radius of a ball
FOOD_MASS = 5.0
AGENT_MASS = 10.0
ROLLING = 2 / 7 * 0.05  # relative loss of a rolling ball's speed per second, by its angular drag
SLIDING = 5 / 7  # of its speed is left when a ball that slides has begun to roll
FROZEN_STEPS = 200  # 4 s
LASER = 25.0  # length
LASER_RADIUS = 2.0
RAY = 50.0  # length
RAY_RADIUS = 0.5
TAGS = np.repeat([2, 0, 3, 1, 4], [4, NUM_FOOD, NUM_FOOD, CREW - 1, CREW - 1])
WAYS = directions(3, 70)
LASER_SIZE = (0.175, 10.0, 0.065)  # half of the drawn laser's width, length and height


class FoodCollector(Drawn):
    behavior = "FoodCollector?team=0"
    continuous = 3
    branches = (2,)
    sensors = [("RayPerceptionSensor", 49), ("VectorSensor_size4", 4)]
    num_agents = 4 * CREW
    period = 5
    offset = 0
    between = True
    max_step = 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        self.num_areas = -(-num_agents // CREW)
        n = self.num_areas * CREW  # places for agents; those that are not used are far away
        self.position = np.full((n, 2), 1e6)  # (x, z)
        self.velocity = np.zeros((n, 2))
        self.yaw = np.zeros(n)
        self.half = np.full(n, 0.5)  # of a cube's edge
        self.push = np.zeros((n, 2))
        self.frozen = np.zeros(n, bool)
        self.frozen_at = np.zeros(n, int)
        self.shoots = np.zeros(n, bool)
        self.food = np.zeros((self.num_areas, 2 * NUM_FOOD, 2))  # positions, the red ones last
        self.food_velocity = np.zeros_like(self.food)
        crew = np.arange(n).reshape(self.num_areas, CREW)
        self.others = np.array([np.delete(crew[i // CREW], i % CREW) for i in range(n)])

    def begin(self, agents):
        k = len(agents)
        if (
            self.academy.count == 0
        ):  # a full reset; the end of an episode leaves the food where it is
            self.food[:] = self.rng.uniform(-SPAWN, SPAWN, self.food.shape)
            self.food_velocity[:] = 0
        self.position[agents] = self.rng.uniform(-SPAWN, SPAWN, (k, 2))
        self.velocity[agents] = 0
        self.push[agents] = 0
        self.yaw[agents] = np.radians(self.rng.integers(0, 360, k))
        self.half[agents] = self.parameters.get("agent_scale", 1.0) / 2
        self.frozen[agents] = False
        self.shoots[agents] = False

    # Observations

    def axes(self, agents=slice(None)):
        """Return the right and forward axes of the cubes: [n, 2, 2]."""
        sin = np.sin(self.yaw[agents])
        cos = np.cos(self.yaw[agents])
        return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)

    def cast(self, agents, way, radius):
        """Return the distances of rays to walls, food, red food, agents and frozen agents: [n, rays, bodies].

        way: directions, [n, rays, 2]. The spheres of all agents are at the height of their centres.
        """
        start = self.position[agents]
        corner = np.array([WALL, WALL])
        walls = cast_at_walls(start, way, -corner, corner, radius)
        rise = self.half[agents] - FOOD
        reach = np.sqrt(np.maximum((radius + FOOD) ** 2 - rise**2, 0))
        food = cast_at_discs(start, way, self.food[agents // CREW], reach)

        # The other cubes, each in its own frame
        others = self.others[agents]
        axes = self.axes(others.ravel()).reshape(*others.shape, 2, 2)
        away = start[:, None] - self.position[others]
        starts = np.einsum("nokx,nox->nok", axes, away).reshape(-1, 2)
        ways = np.einsum("nokx,nrx->nork", axes, way).reshape(-1, way.shape[1], 2)
        halves = np.repeat(self.half[others].reshape(-1, 1, 1), 2, 2)
        cubes = cast_at_boxes(starts, ways, np.zeros((len(starts), 1, 2)), halves, radius)
        cubes = np.moveaxis(cubes.reshape(*others.shape, -1), 1, 2)
        is_frozen = self.frozen[others][:, None]
        agents_only = np.where(is_frozen, np.inf, cubes)
        frozen_only = np.where(is_frozen, cubes, np.inf)
        return np.concatenate([walls, food, agents_only, frozen_only], -1)

    def observe(self, agents):
        yaw = self.yaw[agents, None] + WAYS
        way = np.stack([np.sin(yaw), np.cos(yaw)], -1)
        rays = seen(self.cast(agents, way, RAY_RADIUS), TAGS, 5, RAY)
        velocity = np.vecdot(self.axes(agents), self.velocity[agents, None])
        flags = np.stack([self.frozen[agents], self.shoots[agents]], 1)
        return [rays, np.concatenate([velocity, flags], 1).astype(np.float32)]

    # Actions

    def act(self, agents, continuous, discrete):
        thawed = self.academy.total - self.frozen_at[agents] > FROZEN_STEPS
        self.frozen[agents] &= ~thawed
        able = ~self.frozen[agents]
        forward, right, turn = np.clip(continuous, -1, 1).T * able
        shoots = able & (discrete[:, 0] > 0)
        self.shoots[agents] = shoots
        right_axis, forward_axis = np.moveaxis(self.axes(agents), 1, 0)
        push = SPEED * (forward[:, None] * forward_axis + right[:, None] * right_axis)
        self.push[agents] = np.where(shoots, 0.5, 1.0)[:, None] * push
        self.velocity[agents] *= np.where(shoots, 0.75, 1.0)[:, None]
        self.yaw[agents] -= TURN * np.sign(turn)  # Unity uses the direction of the turn only
        fast = np.vecdot(self.velocity[agents], self.velocity[agents]) > FAST**2
        self.velocity[agents] *= np.where(fast, 0.95, 1.0)[:, None]
        if shoots.any():
            self.shoot(agents[shoots])

    def shoot(self, shooters):
        """Freeze the agents that lasers hit before anything else."""
        # Only a laser that has an agent in its way needs the rest
        others = self.others[shooters]
        away = self.position[others] - self.position[shooters, None]
        right, forward = np.moveaxis(
            np.vecdot(self.axes(shooters)[:, None], away[:, :, None]), -1, 0
        )
        reach = LASER_RADIUS + np.sqrt(2) * self.half[others]
        in_way = ~self.frozen[others] & (np.abs(right) < reach) & (forward > 0)
        shooters = shooters[(in_way & (forward < LASER + reach)).any(1)]
        if not len(shooters):
            return

        way = self.axes(shooters)[:, 1:]
        distances = self.cast(shooters, way, LASER_RADIUS)[:, 0]
        nearest = distances.argmin(1)
        first_agent = 4 + 2 * NUM_FOOD
        hits = (distances.min(1) <= LASER) & (TAGS[nearest] == 1)
        hit = self.others[shooters[hits], nearest[hits] - first_agent]
        self.frozen[hit] = True
        self.frozen_at[hit] = self.academy.total

    # Physics

    def update(self):
        pass

    def physics(self):
        # Drag, friction with the floor, and the contacts of agents
        velocity = (self.velocity + self.push) * (1 - DRAG * DT)
        speed = np.sqrt(np.vecdot(velocity, velocity)) + 1e-12
        self.velocity = velocity * np.maximum(1 - LOSS / speed, 0)[:, None]
        self.push[:] = 0
        self.separate_agents()
        self.position += DT * self.velocity
        reach = self.half * (np.abs(np.sin(self.yaw)) + np.abs(np.cos(self.yaw)))
        used = slice(0, self.num_agents)
        stop_at_walls(self.position[used], self.velocity[used], WALL - reach[used, None])

        # Balls roll
        self.food_velocity *= 1 - ROLLING * DT
        self.food += DT * self.food_velocity
        stop_at_walls(self.food, self.food_velocity, WALL - FOOD)
        self.eat()

    def separate_agents(self):
        """Remove the velocity with which agents approach each other, and their overlap."""
        away = self.position[:, None] - self.position[self.others]
        distance = np.sqrt(np.vecdot(away, away)) + 1e-12
        gap = distance - (self.half[:, None] + self.half[self.others]) * 2 / np.sqrt(np.pi)
        if not (gap < OFFSET).any():
            return
        normal = away / distance[..., None]
        approach = np.vecdot(self.velocity[:, None] - self.velocity[self.others], normal)
        # Both have the same mass, so each takes half of it
        impulse = np.where(gap < OFFSET, np.maximum(-approach, 0) / 2, 0)
        self.velocity += (impulse[..., None] * normal).sum(1)
        overlap = np.maximum(-gap, 0) / 2
        self.position += (overlap[..., None] * normal).sum(1)

    def eat(self):
        """Give the rewards of agents that touch food, and let that food appear elsewhere."""
        crew = (self.num_areas, CREW)
        away = self.food[:, None] - self.position.reshape(*crew, 1, 2)
        near = np.vecdot(away, away) < (np.sqrt(2) * self.half.max() + FOOD + OFFSET) ** 2
        areas, members, balls = near.nonzero()
        if not len(areas):
            return
        agents = areas * CREW + members

        # The nearest point of the cube, in its own frame
        axes = self.axes(agents)
        local = np.vecdot(axes, away[areas, members, balls][:, None])
        half = self.half[agents, None]
        from_cube = local - np.clip(local, -half, half)
        gap = np.sqrt(np.vecdot(from_cube, from_cube)) - FOOD
        touching = gap < OFFSET
        # An agent that is faster than the contact is wide may have the ball's centre inside
        inside = (from_cube == 0).all(1)
        normal = np.where(inside[:, None], local, from_cube)
        normal = (normal[..., None] * axes).sum(1)
        normal /= np.sqrt(np.vecdot(normal, normal))[:, None] + 1e-12
        for i in touching.nonzero()[0]:
            self.eat_one(agents[i], areas[i], balls[i], normal[i])

    def eat_one(self, agent, area, ball, normal):
        """The ball keeps the velocity of the collision when it appears elsewhere, as in Unity."""
        self.academy.reward[agent] += 1.0 if ball < NUM_FOOD else -1.0
        approach = (self.velocity[agent] - self.food_velocity[area, ball]) @ normal
        impulse = max(approach, 0) / (1 / AGENT_MASS + 1 / FOOD_MASS)
        self.velocity[agent] -= impulse / AGENT_MASS * normal
        self.food_velocity[area, ball] += SLIDING * impulse / FOOD_MASS * normal
        self.food[area, ball] = self.rng.uniform(-SPAWN, SPAWN, 2)

    # Rendering

    def drawn(self):
        wall = "0.55 0.6 0.65 1"
        floor = "0.86 0.84 0.78 1"
        room = [((0, -0.5, 0), (WALL, WALL, 0.5), floor)]
        room += [((x, 1, 0), (0.5, WALL + 1, 1.5), wall) for x in (-WALL - 0.5, WALL + 0.5)]
        room += [((0, 1, z), (WALL, 0.5, 1.5), wall) for z in (-WALL - 0.5, WALL + 0.5)]
        cube = (self.half[0],) * 3
        bodies = [(cube, "0.25 0.45 0.9 1")] * CREW + [(cube, "0.1 0.1 0.15 1")] * CREW
        bodies += [((0.3, 0.06, 0.12), "1 1 1 1")] * CREW + [(LASER_SIZE, "1 0.3 0.2 0.7")] * CREW
        bodies += [((FOOD,), "0.3 0.75 0.3 1")] * NUM_FOOD + [
            ((FOOD,), "0.85 0.2 0.2 1")
        ] * NUM_FOOD
        return drawing(bodies, room, 1, 1, spacing=(104, 94), tilt=1.3)

    def poses(self):
        """Return the poses of agents, frozen agents, eyes, lasers and food. What is not visible is below the floor."""
        forward = self.axes()[:, 1]
        below = -1000.0
        height = self.half
        rows = [
            (self.position, np.where(self.frozen, below, height), self.yaw),
            (self.position, np.where(self.frozen, height, below), self.yaw),
            (self.position + self.half[:, None] * forward, 1.3 * height, self.yaw),
            (self.position + 10 * forward, np.where(self.shoots, height, below), self.yaw),
        ]
        crew = (self.num_areas, CREW)
        columns = [np.stack([at[:, 0], up, at[:, 1], turn], -1) for at, up, turn in rows]
        columns = [column.reshape(*crew, 4) for column in columns]
        food = np.zeros((*self.food.shape[:2], 4))
        food[..., 0] = self.food[..., 0]
        food[..., 1] = FOOD
        food[..., 2] = self.food[..., 1]
        return np.concatenate([*columns, food], 1)


def cast_at_discs(start, way, middle, radius):
    """Return the distances of rays to discs: [n, rays, discs]. A ray does not detect a disc that it starts in.

    start: [n, 2]
    way: directions, [n, rays, 2]
    middle: centres, [n, discs, 2]
    radius: [n], that of a disc and of the ray's sphere together
    """
    away = (start[:, None] - middle)[:, None]  # [n, 1, discs, 2]
    approach = np.vecdot(away, way[:, :, None])
    outside = np.vecdot(away, away) - radius[:, None, None] ** 2
    under = approach**2 - outside
    hit = (under >= 0) & (outside >= 0) & (approach < 0)
    return np.where(hit, -approach - np.sqrt(np.maximum(under, 0)), np.inf)


def stop_at_walls(position, velocity, limit):
    """Keep bodies within `limit` of the centre, along x and z, in place."""
    beyond = np.abs(position) > limit
    if beyond.any():
        velocity[beyond & (position * velocity > 0)] = 0
        np.clip(position, -limit, limit, out=position)
