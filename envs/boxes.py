"""Cubes that walk on a floor, push a box or run into one, and see by rays: what PushBlock and Hallway have in common.

Everything stands upright and is seen from above: (x, z) are Unity's axes, a yaw of 0 looks along z and turns to the
right. A cube meets the four walls of its room and one box; contacts are solved as PhysX does it, found once a step
(a fast cube is in a wall before it is stopped), impulses that keep bodies apart, and what only undoes an overlap does
not stay in the velocity. Different from Unity: the order in which contacts are solved, and friction, which acts
against the motion, where PhysX's acts at two anchors of each contact.
"""

import functools

import mujoco
import numpy as np

DT = 0.02
SIDE = 0.5  # half of a cube's edge
OFFSET = 0.02  # PhysX acts before bodies touch: Unity's default of 0.01 for each
RECOVERY, RECOVERY_MAX = -0.8 / DT, np.array([[10.0], [0.0]])  # of an overlap: what moves a body; what stays
FRICTION = 0.6  # Unity's default material; a floor may have another
ANCHORS = 2  # each of PhysX's two anchors has the whole friction: so fast cubes are slowed in recordings of Unity
ITERATIONS = 6
MAX_SPIN = 7.0  # Unity's default limit, rad/s
LENGTH, RADIUS = 12.0, 0.5  # of the rays: spheres that are cast
TOUCH = 0.005  # a sphere that is deeper in a body than this when it starts does not see it


def separations(away, cube, half):
    """How far a cube and a box are apart along the box's axes and the cube's: [n, 4]; the largest is the distance.
    away: from the box's middle to the cube's; cube: its axes."""
    along_box = np.abs(away) - half - SIDE * np.abs(cube).sum(1)
    along_cube = np.abs(np.vecdot(cube, away[:, None])) - SIDE - np.vecdot(np.abs(cube), half[..., None, :])
    return np.concatenate([along_box, along_cube], 1)


class Boxes:
    """n rooms with a cube each, and with a box each. drag, ground: of cube and box, [n, 2]; box_moves: else it stands
    fast; cube_turns: contacts can spin it."""

    def __init__(self, n, low, high, gravity, box_moves, cube_turns):
        self.low, self.high, self.gravity = np.array(low, float), np.array(high, float), gravity
        self.box_moves, self.inertia, self.points = float(box_moves), 6.0 * cube_turns, 1 + cube_turns
        self.position, self.velocity = np.zeros((2, n, 2, 2))  # of cube and box
        self.height, self.fall = np.zeros((2, n, 2))  # above where they rest; vertical velocity
        self.yaw, self.spin = np.zeros((2, n))
        self.half = np.ones((n, 2))  # of the box's edges
        self.drag, self.ground = np.zeros((n, 2)), np.full((n, 2), FRICTION)

    def step(self, push):
        """A fixed step. push: what the cubes' velocities change by."""
        kept = 1 - DT * self.drag
        self.velocity[:, 0] += push
        self.velocity *= kept[..., None]
        fall = (self.fall - DT * self.gravity) * kept
        lands = RECOVERY * self.height
        lands[self.height > OFFSET] = -np.inf
        lasting = np.maximum(fall, np.minimum(lands, 0))
        self.height += DT * np.maximum(fall, np.minimum(lands, RECOVERY_MAX[0]))
        self.fall, press = lasting, ANCHORS * self.ground * (lasting - fall)  # the latter: what friction can take
        speed = np.sqrt(np.vecdot(self.velocity, self.velocity)) + 1e-12
        self.velocity *= np.maximum(1 - press / speed, 0)[..., None]
        brake = press[:, 0] * (np.sqrt(2) * SIDE * self.inertia)  # the anchors are far apart, at corners
        self.spin -= np.clip(self.spin, -brake, brake)

        velocity, spin = np.stack([self.velocity] * 2), np.stack([self.spin] * 2)  # which moves the bodies; which stays
        busy, contacts = self.contacts()
        if len(busy):
            velocity[:, busy], spin[:, busy] = self.solve(contacts, velocity[:, busy], spin[:, busy])
        self.position += DT * velocity[0]
        self.yaw += DT * spin[0]
        self.velocity, self.spin = velocity[1], np.clip(spin[1], -MAX_SPIN, MAX_SPIN)

    def axes(self, who=slice(None)):
        """The cubes' right and forward: [n, 2, 2]."""
        s, c = np.sin(self.yaw[who]), np.cos(self.yaw[who])
        return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], 1)

    def reach(self, who=slice(None)):
        """How far cube and box extend along x and z: [n, 2, 2]."""
        cube = SIDE * (np.abs(np.sin(self.yaw[who])) + np.abs(np.cos(self.yaw[who])))
        return np.stack([np.repeat(cube[:, None], 2, 1), self.half[who]], 1)

    def contacts(self):
        """Rooms in which something touches, and there: gap, normal, arm from the cube's centre, and the signs with
        which the normal's impulse moves cube and box."""
        reach = self.reach()
        room = np.minimum(self.position - reach - self.low, self.high - reach - self.position)  # to the nearer wall
        apart = np.abs(self.position[:, 0] - self.position[:, 1]) - reach[:, 0] - self.half
        walls, boxes = room < OFFSET, (apart < OFFSET).all(1)
        walls[:, 1] &= self.box_moves > 0
        (busy,) = (walls.any((1, 2)) | boxes).nonzero()
        if not len(busy):
            return busy, []
        walls, out, room = walls[busy], [], room[busy]
        sign = np.where(self.position[busy] < (self.low + self.high) / 2, 1.0, -1.0)  # away from the nearer wall
        axes = SIDE * self.axes(busy)
        corners = np.stack([a * axes[:, 0] + b * axes[:, 1] for a in (-1, 1) for b in (-1, 1)], 1)
        for k in (0, 1):
            if walls[:, 0, k].any():
                normal = np.zeros((len(busy), 2))
                normal[:, k] = sign[:, 0, k]
                lowest = np.argsort(np.vecdot(corners, normal[:, None]), 1)
                wall = room[:, 0, k] - np.vecdot(corners, normal[:, None]).min(1)  # from the cube's centre
                for p in range(self.points):
                    arm = corners[np.arange(len(busy)), lowest[:, p]]
                    out.append((wall + np.vecdot(arm, normal), normal, arm, 1, 0))
            if walls[:, 1, k].any():
                normal = np.zeros((len(busy), 2))
                normal[:, k] = sign[:, 1, k]
                out.append((room[:, 1, k], normal, normal * 0, 0, 1))
        if boxes[busy].any():
            out += self.against_box(busy, axes, corners)
        return busy, out

    def against_box(self, who, axes, corners):
        """Cube and box: the axis on which they are furthest apart, and the points of the one that stands with a corner
        towards the other's face, cut off where that ends."""
        half, away, rows = self.half[who], self.position[who, 0] - self.position[who, 1], np.arange(len(who))
        cube, apart = axes / SIDE, separations(away, axes / SIDE, half)
        best = apart.argmax(1)
        normal = np.concatenate([np.broadcast_to(np.eye(2), cube.shape), cube], 1)[rows, best]
        normal = normal * np.where(np.vecdot(normal, away) < 0, -1.0, 1.0)[:, None]  # from the box to the cube
        if self.points == 1:
            return [(apart.max(1), normal, normal * 0, 1, -1)]
        tangent = np.stack([-normal[:, 1], normal[:, 0]], -1)
        of_box = best < 2  # whose face it is
        corner = np.array([(a, b) for a in (-1, 1) for b in (-1, 1)]) * half[:, None] - away[:, None]
        points = np.where(of_box[:, None, None], corners, corner)  # seen from the cube's centre
        heights = np.vecdot(points, normal[:, None]) * np.where(of_box, 1.0, -1.0)[:, None]
        two = points[rows[:, None], np.argsort(heights, 1)[:, :2]]
        face = np.where(of_box[:, None], -away, 0.0)  # the middle of the body whose face it is
        extent = np.where(of_box, np.vecdot(np.abs(tangent), half), SIDE)
        depth = np.where(of_box, np.vecdot(np.abs(normal), half), SIDE)
        along = np.vecdot(two - face[:, None], tangent[:, None])
        cut = np.clip(along, -extent[:, None], extent[:, None])
        length = along[:, 1] - along[:, 0]
        share = (cut - along[:, :1]) / np.where(np.abs(length) < 1e-9, 1.0, length)[:, None]
        two = two[:, :1] + share[..., None] * (two[:, 1:] - two[:, :1])
        gap = np.where(of_box, 1.0, -1.0)[:, None] * np.vecdot(two - face[:, None], normal[:, None]) - depth[:, None]
        gap[apart.max(1) > OFFSET] = np.inf
        return [(gap[:, p], normal, two[:, p], 1, -1) for p in (0, 1)]

    def solve(self, contacts, velocity, spin):
        """Impulses, contact by contact and again, until nothing approaches what it touches. Two solutions at once: see
        RECOVERY_MAX."""
        state = np.concatenate([velocity.reshape(*spin.shape, 4), spin[..., None]], -1)  # cube's, box's, spin
        freely, rows = np.array([1, 1, self.box_moves, self.box_moves, self.inertia]), []
        for gap, normal, arm, cube, box in contacts:
            wanted = np.minimum(np.where(gap < OFFSET, RECOVERY * gap, -np.inf), RECOVERY_MAX)
            for axis in (normal, np.stack([-normal[:, 1], normal[:, 0]], -1)):
                lever = cube * (arm[:, 1] * axis[:, 0] - arm[:, 0] * axis[:, 1])
                along = np.concatenate([cube * axis, box * axis, lever[:, None]], 1)  # state @ along: the speed there
                moves = along * freely
                rows.append((along, moves, 1 / np.vecdot(along, moves), wanted))
        totals = np.zeros((len(rows), *spin.shape))
        for _ in range(ITERATIONS):
            for i, (along, moves, inverse, wanted) in enumerate(rows):
                before, speed = totals[i], np.vecdot(state, along)
                if i % 2 == 0:  # along the normal
                    after = np.maximum(before + (wanted - speed) * inverse, 0)
                    limit = FRICTION * after
                else:
                    after = np.minimum(np.maximum(before - speed * inverse, -limit), limit)
                state += (after - before)[..., None] * moves
                totals[i] = after
        return state[..., :4].reshape(velocity.shape), state[..., 4]


# Rays


def directions(rays, degrees):
    """Of a sensor, in radians to the right: forward, then right and left by turns."""
    steps = np.arange(1, rays + 1) * degrees / rays
    return np.radians(np.concatenate([[0.0], np.stack([steps, -steps], 1).ravel()]))


def cast_at_walls(start, way, low, high, radius=RADIUS):
    """Distances to a room's walls, from inside: [n, rays, 4], low x, low z, high x, high z."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gaps = np.concatenate([start - radius - low, high - radius - start], 1)[:, None]
        toward = np.concatenate([-way, way], 2)
        far = np.where(toward > 1e-9, np.maximum(gaps, 0) / toward, np.inf)
    return np.where(gaps < -TOUCH, np.inf, far)


def cast_at_boxes(start, way, middle, half, radius=RADIUS):
    """Distances to boxes: [n, rays, boxes]. start [n, 2], way [n, rays, 2], middle and half [n, boxes, 2], radius a
    number or [n, 1, boxes]."""
    from_middle = (start[:, None] - middle)[:, None]  # [n, 1, boxes, 2]
    way, half = way[:, :, None], half[:, None]
    radius = np.broadcast_to(np.asarray(radius, float), from_middle.shape[:-1])
    out = np.full(np.broadcast_shapes(way.shape, from_middle.shape)[:-1], np.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for grow in (np.array([1.0, 0.0]), np.array([0.0, 1.0])):  # a rounded box is two boxes and four discs
            size = half + radius[..., None] * grow
            near = (-np.sign(way) * size - from_middle) / way
            far = (np.sign(way) * size - from_middle) / way
            still = np.abs(way) < 1e-12
            inside = np.abs(from_middle) <= size
            near = np.where(still, np.where(inside, -np.inf, np.inf), near).max(-1)
            far = np.where(still, np.where(inside, np.inf, -np.inf), far).min(-1)
            hit = (near <= far) & (near >= 0)
            out = np.where(hit, np.minimum(out, near), out)
        for a in (-1, 1):
            for b in (-1, 1):
                arm = from_middle - half * np.array([a, b])
                approach = np.vecdot(arm, way)
                under = approach**2 - np.vecdot(arm, arm) + radius**2
                near = -approach - np.sqrt(np.maximum(under, 0))
                out = np.where((under >= 0) & (near >= 0), np.minimum(out, near), out)
    outside = np.maximum(np.abs(from_middle) - half, 0)
    gap = np.sqrt(np.vecdot(outside, outside)) - radius
    touching = np.abs(gap) <= TOUCH
    toward = np.vecdot(np.where(outside > 0, np.sign(from_middle), 0) * outside, way) < 0
    out = np.where(touching & toward, 0.0, out)
    return np.where((gap < -TOUCH) | (radius <= 0), np.inf, out)


def seen(distances, tags, num_tags):
    """What a ray sensor sends of distances [n, rays, bodies]: for each ray the nearest body's tag as a one of num_tags,
    whether it met nothing, and how far it came, 1 being all the way."""
    nearest = distances.argmin(-1)
    far = np.take_along_axis(distances, nearest[..., None], -1)[..., 0]
    hit = far <= LENGTH
    out = np.zeros((*hit.shape, num_tags + 2), np.float32)
    out[..., :num_tags] = np.eye(num_tags)[tags[nearest]] * hit[..., None]
    out[..., -2] = ~hit
    out[..., -1] = np.where(hit, far / LENGTH, 1.0)
    return out.reshape(len(out), -1)


class Stack:
    """A sensor's last three frames, the oldest first; zeros where there was none yet."""

    def __init__(self, n, size):
        self.frames = np.zeros((n, 3, size), np.float32)

    def push(self, who, frame):
        self.frames[who] = np.concatenate([self.frames[who, 1:], frame[:, None]], 1)
        return self.frames[who].reshape(len(who), -1)


# Pictures


def drawing(bodies, room, columns, rows, spacing, tilt=1.1):
    """A MuJoCo model to look at, and the places of its rooms. bodies: half sizes and color of what moves in each of
    them; room: position, half sizes and color of what does not. Unity's z goes up in the picture."""
    places = [(spacing[0] * i, -spacing[1] * j) for j in range(rows) for i in range(columns)]
    numbers = lambda *x: " ".join(f"{v:g}" for v in x)
    world = ""
    for x, y in places:
        for (a, b, c), half, color in room:
            world += f'<geom type="box" pos="{numbers(x + a, y + c, b)}" size="{numbers(*half)}" rgba="{color}"/>'
        for half, color in bodies:
            world += f'<body mocap="true"><geom type="box" size="{numbers(*half)}" rgba="{color}"/></body>'
    away = 1.35 * max(spacing[0] * columns, 1.35 * spacing[1] * rows)
    x, y = np.mean(places, 0)
    camera = numbers(x, y - away * np.cos(tilt), away * np.sin(tilt))
    model = mujoco.MjModel.from_xml_string(f"""<mujoco>
      <statistic extent="1"/>
      <visual><headlight ambient="0.45 0.45 0.45" diffuse="0.3 0.3 0.3"/>
        <global offwidth="1920" offheight="1080"/><map zfar="2000"/></visual>
      <asset>
        <texture type="skybox" builtin="gradient" rgb1="0.75 0.82 0.86" rgb2="0.47 0.56 0.61" width="64" height="384"/>
      </asset>
      <worldbody><light directional="true" dir="-0.4 0.3 -1" diffuse="0.5 0.5 0.5"/>
        <camera name="film" pos="{camera}" xyaxes="1 0 0 0 {np.sin(tilt):g} {np.cos(tilt):g}" fovy="35"/>
        {world}</worldbody></mujoco>""")
    return model, np.array(places)


class Drawn:
    """A scene of which MuJoCo draws the first rooms, when somebody looks: `drawn()` gives the model and the rooms'
    places, `poses()` the bodies' (x, height, z) and yaws, [n, bodies, 4]."""

    @functools.cached_property
    def model(self):
        model, self.places = self.drawn()
        return model

    @functools.cached_property
    def data(self):
        return mujoco.MjData(self.model)

    def pose(self):
        x, height, z, yaw = np.moveaxis(self.poses()[: len(self.places)], -1, 0)
        where = np.stack([x + self.places[:, :1], z + self.places[:, 1:], height], -1)
        self.data.mocap_pos[:] = where.reshape(-1, 3)
        self.data.mocap_quat[:, 0] = np.cos(yaw.ravel() / 2)
        self.data.mocap_quat[:, 3] = -np.sin(yaw.ravel() / 2)
        mujoco.mj_forward(self.model, self.data)
