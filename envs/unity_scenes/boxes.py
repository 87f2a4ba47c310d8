"""Physics, ray sensors and rendering that PushBlock and Hallway share: a cube in a room with walls and one box.

Bodies stand upright, so positions are two-dimensional: (x, z) are Unity's axes, a yaw of 0 looks along z, and a
positive yaw turns right. A cube touches the four walls of its room and one box. Contacts are solved as PhysX does it:
they are found once per step (a fast cube enters a wall before it is stopped), and impulses keep the bodies apart. The
velocity that removes an overlap is not kept. Differences from Unity: the order in which contacts are solved; friction,
which acts against the motion here and at two anchors of each contact in PhysX.
"""

import functools

import mujoco
import numpy as np

DT = 0.02
SIDE = 0.5  # half of a cube's edge
OFFSET = 0.02  # PhysX creates contacts before bodies touch: Unity's default is 0.01 for each body
RECOVERY = -0.8 / DT  # speed that removes an overlap, per metre
RECOVERY_MAX = np.array(
    [[10.0], [0.0]]
)  # its limit in the velocity that moves a body, and in the one that is kept
FRICTION = 0.6  # of Unity's default material; a floor may have another value
ANCHORS = 2  # each of PhysX's two anchors has the full friction: recordings of Unity show that deceleration
ITERATIONS = 6
MAX_SPIN = 7.0  # Unity's default limit, rad/s
LENGTH = 12.0  # of a ray
RADIUS = 0.5  # of the sphere that a ray casts
TOUCH = 0.005  # a sphere that starts deeper inside a body does not detect it


def separations(away, cube, half):
    """Return the separation of a cube and a box along the box's and the cube's axes: [n, 4]. The largest one counts.

    away: vector from the centre of the box to the centre of the cube
    cube: axes of the cube
    half: half of the box's edges
    """
    along_box = np.abs(away) - half - SIDE * np.abs(cube).sum(1)
    along_cube = (
        np.abs(np.vecdot(cube, away[:, None])) - SIDE - np.vecdot(np.abs(cube), half[..., None, :])
    )
    return np.concatenate([along_box, along_cube], 1)


class Boxes:
    """n rooms with one cube and one box each.

    box_moves: whether the box can be pushed
    cube_turns: whether contacts can turn the cube
    """

    def __init__(self, n, low, high, gravity, box_moves, cube_turns):
        self.low = np.array(low, float)
        self.high = np.array(high, float)
        self.gravity = np.full((n, 1), float(gravity))
        self.box_moves = float(box_moves)
        self.inertia = 6.0 * cube_turns
        self.points = 1 + cube_turns
        # Of cube and box: [n, 2], and for positions and velocities [n, 2, 2]
        self.position, self.velocity = np.zeros((2, n, 2, 2))
        self.height, self.fall = np.zeros((2, n, 2))  # height above the floor, vertical velocity
        self.yaw, self.spin = np.zeros((2, n))  # of the cube
        self.half = np.ones((n, 2))  # half of the box's edges
        self.drag = np.zeros((n, 2))
        self.ground = np.full((n, 2), FRICTION)  # friction with the floor

    def step(self, push):
        """Simulate one fixed step. push: the change of the cubes' velocities, [n, 2]"""
        # Drag and gravity
        kept = 1 - DT * self.drag
        self.velocity[:, 0] += push
        self.velocity *= kept[..., None]
        fall = (self.fall - DT * self.gravity) * kept
        lands = RECOVERY * self.height
        lands[self.height > OFFSET] = -np.inf
        lasting = np.maximum(fall, np.minimum(lands, 0))
        self.height += DT * np.maximum(fall, np.minimum(lands, RECOVERY_MAX[0]))
        self.fall = lasting

        # Friction with the floor
        press = ANCHORS * self.ground * (lasting - fall)  # the largest change of speed by friction
        speed = np.sqrt(np.vecdot(self.velocity, self.velocity)) + 1e-12
        self.velocity *= np.maximum(1 - press / speed, 0)[..., None]
        brake = press[:, 0] * (
            np.sqrt(2) * SIDE * self.inertia
        )  # the anchors are far apart, at corners
        self.spin -= np.clip(self.spin, -brake, brake)

        # Contacts: one velocity moves the bodies, the other one is kept
        velocity = np.stack([self.velocity] * 2)
        spin = np.stack([self.spin] * 2)
        busy, contacts = self.contacts()
        if len(busy):
            velocity[:, busy], spin[:, busy] = self.solve(
                contacts, velocity[:, busy], spin[:, busy]
            )
        self.position += DT * velocity[0]
        self.yaw += DT * spin[0]
        self.velocity = velocity[1]
        self.spin = np.clip(spin[1], -MAX_SPIN, MAX_SPIN)

    def axes(self, agents=slice(None)):
        """Return the right and forward axes of the cubes: [n, 2, 2]."""
        sin = np.sin(self.yaw[agents])
        cos = np.cos(self.yaw[agents])
        return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)

    def reach(self, agents=slice(None)):
        """Return how far cube and box extend along x and z: [n, 2, 2]."""
        cube = SIDE * (np.abs(np.sin(self.yaw[agents])) + np.abs(np.cos(self.yaw[agents])))
        return np.stack([np.repeat(cube[:, None], 2, 1), self.half[agents]], 1)

    def contacts(self):
        """Return the rooms with contacts, and a list of contacts in them.

        A contact is a tuple of the gap, the normal, the arm from the cube's centre, and the signs with which an impulse
        along the normal moves the cube and the box.
        """
        reach = self.reach()
        room = np.minimum(
            self.position - reach - self.low, self.high - reach - self.position
        )  # to the nearer wall
        apart = np.abs(self.position[:, 0] - self.position[:, 1]) - reach[:, 0] - self.half
        walls = room < OFFSET
        boxes = (apart < OFFSET).all(1)
        walls[:, 1] &= self.box_moves > 0
        (busy,) = (walls.any((1, 2)) | boxes).nonzero()
        if not len(busy):
            return busy, []
        walls = walls[busy]
        out = []
        room = room[busy]
        sign = np.where(
            self.position[busy] < (self.low + self.high) / 2, 1.0, -1.0
        )  # away from the nearer wall
        axes = SIDE * self.axes(busy)
        corners = np.stack([a * axes[:, 0] + b * axes[:, 1] for a in (-1, 1) for b in (-1, 1)], 1)
        for k in (0, 1):
            if walls[:, 0, k].any():
                normal = np.zeros((len(busy), 2))
                normal[:, k] = sign[:, 0, k]
                lowest = np.argsort(np.vecdot(corners, normal[:, None]), 1)
                wall = room[:, 0, k] - np.vecdot(corners, normal[:, None]).min(
                    1
                )  # from the cube's centre
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

    def against_box(self, agents, axes, corners):
        """Return the contacts of cubes with boxes.

        The normal is the axis with the largest separation. Contact points are corners of the body that points with a
        corner at the other's face, clipped to that face.
        """
        half = self.half[agents]
        away = self.position[agents, 0] - self.position[agents, 1]
        rows = np.arange(len(agents))
        cube = axes / SIDE
        apart = separations(away, axes / SIDE, half)
        best = apart.argmax(1)
        normal = np.concatenate([np.broadcast_to(np.eye(2), cube.shape), cube], 1)[rows, best]
        normal = (
            normal * np.where(np.vecdot(normal, away) < 0, -1.0, 1.0)[:, None]
        )  # from the box to the cube
        if self.points == 1:
            return [(apart.max(1), normal, normal * 0, 1, -1)]
        tangent = np.stack([-normal[:, 1], normal[:, 0]], -1)
        of_box = best < 2  # whether the face is the box's
        corner = (
            np.array([(a, b) for a in (-1, 1) for b in (-1, 1)]) * half[:, None] - away[:, None]
        )
        points = np.where(of_box[:, None, None], corners, corner)  # from the cube's centre
        heights = np.vecdot(points, normal[:, None]) * np.where(of_box, 1.0, -1.0)[:, None]
        two = points[rows[:, None], np.argsort(heights, 1)[:, :2]]
        face = np.where(of_box[:, None], -away, 0.0)  # the centre of the body with the face
        extent = np.where(of_box, np.vecdot(np.abs(tangent), half), SIDE)
        depth = np.where(of_box, np.vecdot(np.abs(normal), half), SIDE)
        along = np.vecdot(two - face[:, None], tangent[:, None])
        cut = np.clip(along, -extent[:, None], extent[:, None])
        length = along[:, 1] - along[:, 0]
        share = (cut - along[:, :1]) / np.where(np.abs(length) < 1e-9, 1.0, length)[:, None]
        two = two[:, :1] + share[..., None] * (two[:, 1:] - two[:, :1])
        gap = (
            np.where(of_box, 1.0, -1.0)[:, None] * np.vecdot(two - face[:, None], normal[:, None])
            - depth[:, None]
        )
        gap[apart.max(1) > OFFSET] = np.inf
        return [(gap[:, p], normal, two[:, p], 1, -1) for p in (0, 1)]

    def solve(self, contacts, velocity, spin):
        """Return velocities and spins after the contacts' impulses, which are solved one after another, several times.

        There are two solutions, as in RECOVERY_MAX: the velocity that moves the bodies and the one that is kept.
        """
        # Velocity of the cube, velocity of the box, spin of the cube
        state = np.concatenate([velocity.reshape(*spin.shape, 4), spin[..., None]], -1)
        freely = np.array([1, 1, self.box_moves, self.box_moves, self.inertia])
        rows = []
        for gap, normal, arm, cube, box in contacts:
            wanted = np.minimum(np.where(gap < OFFSET, RECOVERY * gap, -np.inf), RECOVERY_MAX)
            for axis in (normal, np.stack([-normal[:, 1], normal[:, 0]], -1)):
                lever = cube * (arm[:, 1] * axis[:, 0] - arm[:, 0] * axis[:, 1])
                # state @ along is the speed at the contact
                along = np.concatenate([cube * axis, box * axis, lever[:, None]], 1)
                moves = along * freely
                rows.append((along, moves, 1 / np.vecdot(along, moves), wanted))
        totals = np.zeros((len(rows), *spin.shape))
        for _ in range(ITERATIONS):
            for i, (along, moves, inverse, wanted) in enumerate(rows):
                before = totals[i]
                speed = np.vecdot(state, along)
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
    """Return the angles of a sensor's rays in radians to the right: forward, then alternating right and left."""
    steps = np.arange(1, rays + 1) * degrees / rays
    return np.radians(np.concatenate([[0.0], np.stack([steps, -steps], 1).ravel()]))


def cast_at_walls(start, way, low, high, radius=RADIUS):
    """Return the distances of rays to the walls of their room: [n, rays, 4] for low x, low z, high x, high z."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gaps = np.concatenate([start - radius - low, high - radius - start], 1)[:, None]
        toward = np.concatenate([-way, way], 2)
        far = np.where(toward > 1e-9, np.maximum(gaps, 0) / toward, np.inf)
    return np.where(gaps < -TOUCH, np.inf, far)


def cast_at_boxes(start, way, middle, half, radius=RADIUS):
    """Return the distances of rays to boxes: [n, rays, boxes].

    start: [n, 2]
    way: directions, [n, rays, 2]
    middle, half: centres and half sizes, [n, boxes, 2]
    radius: a number or [n, 1, boxes]
    """
    from_middle = (start[:, None] - middle)[:, None]  # [n, 1, boxes, 2]
    way = way[:, :, None]
    half = half[:, None]
    radius = np.broadcast_to(np.asarray(radius, float), from_middle.shape[:-1])
    out = np.full(np.broadcast_shapes(way.shape, from_middle.shape)[:-1], np.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for grow in (
            np.array([1.0, 0.0]),
            np.array([0.0, 1.0]),
        ):  # a rounded box is two boxes and four discs
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


def seen(distances, tags, num_tags, length=LENGTH):
    """Return the observation of a ray sensor for distances [n, rays, bodies].

    For each ray: the tag of the nearest body as a one-hot vector of num_tags, whether the ray hit nothing, and the
    distance as a fraction of its length.
    """
    nearest = distances.argmin(-1)
    far = np.take_along_axis(distances, nearest[..., None], -1)[..., 0]
    hit = far <= length
    out = np.zeros((*hit.shape, num_tags + 2), np.float32)
    out[..., :num_tags] = np.eye(num_tags)[tags[nearest]] * hit[..., None]
    out[..., -2] = ~hit
    out[..., -1] = np.where(hit, far / length, 1.0)
    return out.reshape(len(out), -1)


class Stack:
    """The last three observations of a sensor, the oldest first. Missing ones are zeros."""

    def __init__(self, n, size):
        self.frames = np.zeros((n, 3, size), np.float32)

    def push(self, agents, frame):
        self.frames[agents] = np.concatenate([self.frames[agents, 1:], frame[:, None]], 1)
        return self.frames[agents].reshape(len(agents), -1)


# Rendering


def drawing(bodies, room, columns, rows, spacing, tilt=1.1):
    """Return a MuJoCo model for rendering and the positions of its rooms.

    bodies: half sizes and color of the bodies that move in each room; a single size is the radius of a ball
    room: position, half sizes and color of the fixed bodies
    Unity's z axis points up in the image.
    """
    places = [(spacing[0] * i, -spacing[1] * j) for j in range(rows) for i in range(columns)]
    numbers = lambda *x: " ".join(f"{v:g}" for v in x)
    world = ""
    for x, y in places:
        for (a, b, c), half, color in room:
            world += f'<geom type="box" pos="{numbers(x + a, y + c, b)}" size="{numbers(*half)}" rgba="{color}"/>'
        for half, color in bodies:
            shape = "box" if len(half) == 3 else "sphere"
            world += f'<body mocap="true"><geom type="{shape}" size="{numbers(*half)}" rgba="{color}"/></body>'
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
        <camera name="video" pos="{camera}" xyaxes="1 0 0 0 {np.sin(tilt):g} {np.cos(tilt):g}" fovy="35"/>
        {world}</worldbody></mujoco>""")
    return model, np.array(places)


class Drawn:
    """Base class of scenes whose first rooms are rendered by MuJoCo.

    drawn(): returns the model and the positions of the rooms
    poses(): returns (x, height, z, yaw) of the bodies, [n, bodies, 4]
    """

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
