"""ML-Agents' Crawler on MuJoCo physics: a body on four legs walks towards a target at a wanted speed. A scene of
`player.py`.

Observations, actions, rewards, ends and resets are those of Unity's CrawlerAgent; bodies, joints and drives are those
of Unity's prefab. The physics is not PhysX: scores are near Unity's, not Unity's. It was fitted to recordings of a real
Unity player (state and action in, state one decision later out), and ML-Agents' own trained policy walks in it. Known
to differ:

1. PhysX does not solve its joints to the end: legs twist by some degrees under load, knees come apart by up to 4 cm,
   and sideways hip motion is partly noise. Here legs twist as much as there; otherwise joints are exact, and softer
   drives, softer contacts and less friction stand in for the rest.
2. Parts of one crawler pass through each other, and the target is touched but pushes nobody.
3. The down ray sees the ground only, never a leg of the crawler's own.
4. All crawlers share one arena without seeing each other. In Unity each has its own.

MuJoCo's (x, y, z) is Unity's (x, z, y), its quaternion (w, x, y, z) Unity's (w, -x, -z, -y). Only `observe` speaks
Unity's.
"""

from typing import NamedTuple

import mujoco
import numpy as np

DT = 0.01333  # Unity's fixed step in this scene: 75 Hz
GRAVITY = 14.715  # 1.5 times the Earth's, as ProjectSettingsOverrides sets it
ARENA = 49.5  # centre to wall
START_HEIGHT, TARGET_HEIGHT = 2.156, 2.006  # of the body's centre and of a new target, which drops to the ground
CONTACT_OFFSET = 0.02  # PhysX makes a contact before parts touch: 0.01 for each of the two

# The nine parts: body, then upper and lower of each leg.
RADIUS = np.array([0.5] + [0.15, 0.15] * 4)
HALF = np.array([0] + [0.325, 0.6] * 4)  # centre to the centre of a cap
MEAN = np.full(9, 1 / 9)
TOUCH = RADIUS + CONTACT_OFFSET
ENDS = np.array([1] + [1, 0] * 4, bool)  # touching the ground with one of these ends the episode
PARENT = np.array([1, 2, 1, 3, 1, 4, 1, 5])  # of the legs' parts, among (cube, body, the four upper legs)

# The hinges: hip x, hip y, the upper leg's twist and the knee of each leg; then the last lower leg's twist. PhysX's
# joints are locked against twists and give all the same: those of the first three legs at the knee, about the upper
# leg's axis; the last leg's, which PhysX solves last, at the hip, and a little at the knee.
DRIVEN, TWISTS = np.array([0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15]), np.array([2, 6, 10, 14, 16])
LOWEST, RANGE = np.radians([-60, -20, 0] * 4), np.radians([60, 40, 150] * 4)
GOAL = np.array([0, 1, 8, 2, 3, 9, 4, 5, 10, 6, 7, 11])  # action that sets a driven hinge's target
FORCE = np.array([12, 12, 16, 13, 13, 17, 14, 14, 18, 15, 15, 19])  # action that sets its strength
STRENGTH = np.array([12, 16, 13, 17, 14, 18, 15, 19])  # the same, in the order of the observation

SPRING, DAMPER, MAX_FORCE = 40000.0, 5000.0, 20000.0  # of the prefab's JointDriveController
DRAG = np.array([0.05 * 32] * 3 + [0.05 * 20] * 3)  # Unity's of 0.05 per second


class Physics(NamedTuple):
    """What stands in for PhysX: how the world is solved, and numbers that were fitted."""

    weight: tuple[float, ...]  # of the hinges in the solver
    twist: float  # the part of a twist that is undone in a step
    friction: float  # of the contacts; 0.6 in Unity
    impedance: float  # of the contacts
    recovery: float  # the part of a penetration that is undone in a step
    margin: float  # contacts begin before parts touch: then two corrections of theirs are needed, see `physics`
    cone: str
    solver: str
    iterations: int
    substeps: int  # of a fixed step

    @property
    def dt(self):
        return DT / self.substeps

    def rate(self, damping):
        """The drives as implicit springs: speed per tan(error / 2), for each crawler's damping."""
        out = np.repeat(2 * SPRING / (DAMPER * damping + SPRING * self.dt), 17).reshape(-1, 17)
        out[:, TWISTS] = 2 * self.twist / self.dt
        return out

    def soft(self):
        """MuJoCo divides by the impedance: speed -> recovery * penetration / dt in one step."""
        reference = f"{-self.recovery * self.impedance / self.dt**2} {-self.impedance / self.dt}"
        return reference, f"{self.impedance} {self.impedance} .001"


FITTED = Physics(
    weight=(5.5, 2.0, 0.42, 2.6) * 3 + (5.5, 2.0, 0.6, 2.6, 0.13), twist=0.3, friction=0.4, impedance=0.8,
    recovery=0.25, margin=CONTACT_OFFSET, cone="elliptic", solver="Newton", iterations=6, substeps=1,
)  # fmt: skip
# Another world, for policies that were trained in the first: nothing was fitted but that ML-Agents' own policy walks.
ALTERNATIVE = Physics(
    weight=(4.4, 1.6, 0.2, 2.1) * 3 + (4.4, 1.6, 0.3, 2.1, 0.1), twist=0.2, friction=0.6, impedance=0.9, recovery=0.1,
    margin=0.0, cone="pyramidal", solver="CG", iterations=20, substeps=2,
)  # fmt: skip
PHYSICS = {"fitted": FITTED, "alternative": ALTERNATIVE}

# What is drawn for each crawler and episode where an environment parameter of this name gives a range, or the player's
# --randomize, times these: masses of the parts, strengths of the joints, friction, damping of drives and air, each
# times 1 - range to 1 + range; and the fixed steps until an action takes effect, from 0 to the range, at most 4.
RANGES = {f"randomize_{what}": 1 for what in ("mass", "strength", "friction", "damping")} | {"randomize_delay": 20}

# conjugate(a) * b of MuJoCo's quaternions, as Unity's (x, y, z, w) = (1, 2, 3, 4): where a[i] * b[j] goes, and with
# which sign
PRODUCT = np.array([[4, -1, -3, -2], [1, 4, 2, -3], [3, -2, 4, 1], [2, 3, -1, 4]])
LOCAL = (np.sign(PRODUCT)[:, :, None] * np.eye(4)[np.abs(PRODUCT) - 1]).reshape(4, 16)


def mjcf(num_agents, physics):
    """Contacts are listed pair by pair, parts against ground and walls: no bits to run out of, and far less work than
    finding them."""
    s, c = 0.6532815, 0.2705981  # the legs lie along the diagonals
    legs = ((1, -1, s, s, c, c), (-1, -1, s, s, -c, -c), (-1, 1, c, c, -s, -s), (1, 1, c, c, s, s))
    walls = (("east", ARENA, 0), ("west", -ARENA, 0), ("north", 0, ARENA), ("south", 0, -ARENA))
    worlds = ("ground", *(name for name, _, _ in walls))
    film = """<camera name="film" mode="trackcom" pos="0 -8 3.5" xyaxes="1 0 0 0 .5 1"/>
        <light mode="trackcom" directional="true" pos="2 -2 9" dir="-.2 .2 -1" diffuse=".6 .6 .6"/>"""
    crawlers = pairs = sensors = ""
    for k in range(num_agents):
        hidden = 'group="3"' if k else ""  # a film shows crawler 0 only
        crawlers += f"""<body name="body{k}" pos="0 0 {START_HEIGHT}">{film if k == 0 else ""}
            <joint type="free" limited="false" frictionloss="0"/>
            <geom name="body{k}" type="sphere" size=".5" mass="20" rgba=".9 .5 .15 1" {hidden}/>"""
        parts = [f"body{k}"]
        for i, (x, y, *quat) in enumerate(legs):
            upper, lower = f"upper{k}_{i}", f"lower{k}_{i}"
            parts += [upper, lower]
            place = f'pos="{0.6363962 * x} {0.6363962 * y} -.15" quat="{" ".join(map(str, quat))}"'
            twist = '<joint axis="0 0 1" limited="false"/>'
            hip, knee, shin = ("", twist, "") if i < 3 else (twist, "", twist)
            crawlers += f"""<body name="{upper}" {place}>
                <joint pos="0 0 -.5" axis="1 0 0" range="-60 0"/>
                <joint pos="0 0 -.5" axis="0 -1 0" range="-20 20"/>{hip}
                <geom name="{upper}" type="capsule" size=".15 .325" mass="2" {hidden}/>
                <body name="{lower}" pos="0 0 1.08">{knee}<joint pos="0 0 -.75" axis="1 0 0" range="0 150"/>{shin}
                <geom name="{lower}" type="capsule" size=".15 .6" mass="1" {hidden}/></body></body>"""
        crawlers += "</body>"
        sensors += "".join(f'<framelinvel objtype="body" objname="{part}"/>' for part in parts)
        pairs += "".join(f'<pair geom1="{world}" geom2="{part}"/>' for part in parts for world in worlds)
    walls = "".join(
        f'<geom name="{name}" type="plane" size="50 50 1" pos="{x} {y} 0" zaxis="{-x} {-y} 0" group="3"/>'
        for name, x, y in walls
    )
    solref, solimp = physics.soft()
    # frictionloss only makes the rows that `physics` turns into drives
    return f"""<mujoco><size memory="{num_agents + 20}M"/><statistic extent="8"/>
        <visual><headlight ambient=".35 .35 .35"/></visual>
        <option timestep="{physics.dt}" gravity="0 0 {-GRAVITY}" cone="{physics.cone}" solver="{physics.solver}"
          iterations="{physics.iterations}" tolerance="1e-5">
        <flag eulerdamp="disable" warmstart="disable" autoreset="disable"/></option>
        <default><geom contype="0" conaffinity="0" rgba=".25 .3 .4 1"/>
        <joint limited="true" frictionloss="1" solreflimit="{solref}" solimplimit="{solimp}"/>
        <pair condim="3" friction="{physics.friction} {physics.friction} 0 0 0" margin="{physics.margin}"
          solref="{solref}" solimp="{solimp}"/></default>
        <asset>
        <texture name="checker" type="2d" builtin="checker" rgb1=".62 .66 .7" rgb2=".5 .54 .58"
          width="256" height="256"/>
        <texture type="skybox" builtin="gradient" rgb1=".75 .85 .95" rgb2=".4 .55 .75" width="64" height="64"/>
        <material name="checker" texture="checker" texrepeat="25 25"/></asset>
        <worldbody><geom name="ground" type="plane" size="50 50 1" material="checker" rgba="1 1 1 1"/>{walls}
        <body name="target" mocap="true" pos="0 0 .5"><geom type="box" size=".5 .5 .5" rgba=".2 .7 .3 1"/></body>
        {crawlers}</worldbody><contact>{pairs}</contact><sensor>{sensors}</sensor></mujoco>"""


class Crawler:
    behavior, continuous, branches = "Crawler?team=0", 20, ()
    sensors = [("PhysicsBodySensor:Body", 126), ("VectorSensor_size32", 32)]
    num_agents, period, offset, between, max_step, dt = 10, 5, 0, False, 5000, DT

    def __init__(self, num_agents, seed, parameters, physics=FITTED):
        n = self.num_agents = num_agents
        self.rng, self.parameters, self.world, self.drawn = np.random.default_rng(seed), parameters, physics, False
        self.model = mujoco.MjModel.from_xml_string(mjcf(n, physics))
        self.data = data = mujoco.MjData(self.model)
        self.model.dof_damping.reshape(n, 23)[:, :6] = DRAG
        # Views into MuJoCo's arrays, a row per crawler; world and target are the two bodies before the crawlers'.
        self.qpos, self.qvel = data.qpos.reshape(n, 24), data.qvel.reshape(n, 23)
        self.velocity = data.sensordata.reshape(n, 9, 3)
        self.angle, self.spin = self.qpos[:, 7:], self.qvel[:, 6:]
        self.xpos, self.xquat = data.xpos[2:].reshape(n, 9, 3), data.xquat[2:].reshape(n, 9, 4)
        self.xmat = data.xmat[2:].reshape(n, 9, 3, 3)
        self.height, self.slope = self.xpos[:, :, 2], self.xmat[:, :, 2, 2]  # of the parts' centres and axes
        self.facing = self.xmat[:, 0, :, 1]  # the body's forward axis
        self.goal, self.force, self.strength = np.zeros((n, 17)), np.full((n, 17), MAX_FORCE), np.zeros((n, 8))
        self.touching, self.rate, self.weight = (
            np.zeros((n, 9), bool),
            physics.rate(np.ones(n)),
            np.array(physics.weight),
        )
        self.power, self.delay, self.wait, self.acted = np.ones((n, 12)), *np.zeros((2, n), int), np.zeros((n, 20))
        self.speed, self.cube, self.forward, self.distance = np.ones(n), np.zeros((n, 3)), np.zeros((n, 2)), np.zeros(n)
        self.target, self.dropped = np.zeros((n, 2)), np.zeros(n, int)
        self.drop_target(range(n), 0)

    def drop_target(self, who, now):
        for i in who:  # Random.insideUnitSphere * 40, flattened
            point = self.rng.normal(size=3)
            self.target[i] = point[:2] * 40 * self.rng.random() ** (1 / 3) / np.linalg.norm(point)
            self.dropped[i] = now
        self.data.mocap_pos[0, :2] = self.target[0]

    def target_height(self, who):
        steps = self.academy.total - self.dropped[who]
        return np.maximum(TARGET_HEIGHT - GRAVITY * DT**2 / 2 * steps * (steps + 1), 0.5)

    def begin(self, who):
        """As in Unity, the target, joints' goals and strengths stay: a crawler falls with its old goals until it
        decides."""
        for i in who:
            yaw = self.rng.uniform(0, 2 * np.pi)
            self.qpos[i] = 0
            self.qpos[i, 2:7] = START_HEIGHT, np.cos(yaw / 2), 0, 0, -np.sin(yaw / 2)
            self.speed[i] = self.rng.uniform(0.1, 15)
        ranges = [self.parameters.get(name, 0.0) for name in RANGES]
        if any(ranges) or self.drawn:
            self.draw(who, *np.clip(ranges, 0, [0.9] * 4 + [self.period - 1]))
        self.qvel[who], self.touching[who] = 0, False
        mujoco.mj_step1(self.model, self.data)  # for the other crawlers it computes what is there already
        self.turn_cube(who)

    def draw(self, who, mass, strength, friction, damping, delay):
        """What Physics and the prefab say, times random numbers. MuJoCo's softness of a contact goes with the mass."""
        n, model = self.num_agents, self.model
        if not self.drawn:
            self.parts = [x[2:].reshape(n, 9, -1) for x in (model.body_mass, model.body_inertia, model.body_invweight0)]
            self.nominal, self.drawn = [x.copy() for x in self.parts], True
        times = lambda spread, *shape: self.rng.uniform(1 - spread, 1 + spread, (len(who), *shape))
        masses, air = times(mass, 9, 1), times(damping)
        for part, nominal, power in zip(self.parts, self.nominal, (1, 1, -1), strict=True):
            part[who] = nominal[who] * masses**power
        whole = model.body_subtreemass[2:].reshape(n, 9)
        whole[who] = self.parts[0][who, :, 0]
        whole[who, 1::2] += whole[who, 2::2]
        whole[who, 0] += whole[who, 1::2].sum(-1)
        model.pair_friction.reshape(n, -1, 5)[who, :, :2] = self.world.friction * times(friction)[:, None, None]
        model.dof_damping.reshape(n, 23)[who, :6] = DRAG * air[:, None]
        self.rate[who], self.power[who] = self.world.rate(air), times(strength, 12)
        self.delay[who] = self.rng.integers(0, round(delay) + 1, len(who))

    def turn_cube(self, who):
        """The cube that observations are relative to looks from where it was to the target, then follows the body."""
        way = self.target[who] - self.cube[who, :2]
        self.distance[who] = distance = np.hypot(way[:, 0], way[:, 1])
        self.forward[who] = way / distance[:, None]
        self.cube[who] = self.xpos[who, 0]

    def act(self, who, continuous, discrete):
        self.strength[who] = (continuous[:, STRENGTH] + 1) / 2
        if self.drawn:
            self.acted[who], self.wait[who] = continuous, self.delay[who]
        else:
            self.drive(who, continuous)

    def drive(self, who, action):
        hinges = np.ix_(who, DRIVEN)
        self.goal[hinges] = LOWEST + RANGE * (np.clip(action[:, GOAL], -1, 1) + 1) / 2
        # Unity does not clip strengths
        self.force[hinges] = np.maximum((action[:, FORCE] + 1) / 2 * MAX_FORCE * self.power[who], 1e-6)

    def update(self):
        self.turn_cube(slice(None))
        miss = MEAN @ self.velocity
        miss[:, :2] -= self.forward * self.speed[:, None]
        match = 1 - np.minimum(np.vecdot(miss, miss) / self.speed**2, 1)
        self.academy.reward += match * match * (np.vecdot(self.facing[:, :2], self.forward) + 1) / 2

    def physics(self):
        # PhysX finds contacts before it moves the parts: what is reported after a step was near the ground before it.
        self.touching = self.height - np.abs(self.slope * HALF) < TOUCH
        if self.drawn:
            due = np.flatnonzero(self.wait == 0)
            self.drive(due, self.acted[due])
            self.wait -= 1
        for _ in range(self.world.substeps):
            self.solve()
        if self.distance.min() < 4:
            self.touch_target(np.flatnonzero(self.distance < 4))
        fatal = self.touching & ENDS
        if fatal.any():
            fell = np.flatnonzero(fatal.any(1))
            self.academy.reward[fell] = -1
            self.academy.end(fell)

    def solve(self):
        """A step is mj_step2, then mj_step1 of the next: positions and velocities are always there to be observed."""
        data, hinges, world, dt = self.data, self.goal.size, self.world, self.world.dt
        # PhysX's slerp drive is an implicit spring inside the solver, with a largest force. Here it is a friction row
        # whose wanted speed is not 0. With constraint islands, one per crawler, MuJoCo has already copied all but aref:
        # the copies are what it solves.
        half = (self.goal - self.angle) / 2
        cos = np.cos(half)
        weight = (self.weight * cos * cos).ravel()
        rows, aref = data.map_efc2iefc[:hinges], data.efc_aref
        data.iefc_frictionloss[rows] = (self.force * cos).ravel() / 2
        data.iefc_D[rows], data.iefc_R[rows] = weight, 1 / weight
        aref[:hinges] = ((self.rate * np.tan(half) - self.spin) / dt).ravel()
        if world.margin:
            # Contacts are the last rows, three each. Two corrections of the normal's: within its margin MuJoCo pushes
            # parts away, PhysX only slows them down; and MuJoCo's convex friction cone lifts what slides, at a speed of
            # friction * slip, where feet slide at metres per second.
            contacts = data.nf + data.nl
            slip = data.efc_vel[contacts:].reshape(-1, 3)
            friction = data.contact.friction[:, 0] if self.drawn else world.friction
            lift = friction / dt * np.hypot(slip[:, 1], slip[:, 2])
            aref[contacts::3] -= world.recovery * world.margin / dt**2 + lift
        mujoco.mj_step2(self.model, data)
        mujoco.mj_step1(self.model, data)

    def touch_target(self, who):
        """The target is a box of 1 m: five points along a capsule are near enough."""
        centre = np.column_stack([self.target[who], self.target_height(who)])
        points = np.linspace(-1, 1, 5)[:, None, None, None] * HALF[:, None] * self.xmat[who, :, :, 2] + self.xpos[who]
        gap = np.maximum(np.abs(points - centre[:, None]) - 0.5, 0)
        self.drop_target(who[(np.linalg.norm(gap, axis=-1) < RADIUS).any((0, 2))], self.academy.total)

    def observe(self, who):
        k = len(who)
        quat, cube, forward, facing = self.xquat[who], self.cube[who], self.forward[who], self.facing[who]
        s, c = forward.T
        vectors = np.zeros((k, 21, 3))
        vectors[:, :9], vectors[:, 9:18] = self.xpos[who] - cube[:, None], self.velocity[who]
        vectors[:, 18] = MEAN @ vectors[:, 9:18]
        vectors[:, 19, :2] = forward * self.speed[who, None]
        vectors[:, 20, :2], vectors[:, 20, 2] = self.target[who] - cube[:, :2], self.target_height(who) - cube[:, 2]
        turn = np.zeros((k, 3, 3))  # into the cube's frame, and to Unity's axes
        turn[:, 0, 0], turn[:, 1, 0], turn[:, 2, 1], turn[:, 0, 2], turn[:, 1, 2] = c, -s, 1, s, c
        vectors = vectors @ turn
        # A quaternion's sign matters to a policy: half of the cube's yaw is in (-60, 120] degrees, as
        # Quaternion.LookRotation gives it.
        yaw = np.arctan2(s, c)
        yaw = np.where(yaw < -2 / 3 * np.pi, yaw + 2 * np.pi, yaw) / 2
        frames = np.zeros((k, 6, 4))
        frames[:, 0, 0], frames[:, 0, 3] = np.cos(yaw), -np.sin(yaw)
        frames[:, 1], frames[:, 2:] = quat[:, 0], quat[:, 1::2]
        local = (frames @ LOCAL).reshape(k, 6, 4, 4)
        body, vector = np.empty((k, 126), np.float32), np.empty((k, 32), np.float32)
        pose = body[:, :63].reshape(k, 9, 7)
        pose[..., :3], pose[..., 3:] = vectors[:, :9], quat @ local[:, 0]
        body[:, 63:90], body[:, 90:94] = vectors[:, 9:18].reshape(k, 27), pose[:, 0, 3:]
        body[:, 94:] = (quat[:, 1:, None] @ local[:, PARENT]).reshape(k, 32)
        average, want = vectors[:, 18], vectors[:, 19]
        off = want - average
        vector[:, 0] = np.sqrt(np.vecdot(off, off))
        vector[:, 1:4], vector[:, 4:7], vector[:, 11:14] = average, want, vectors[:, 20]
        x, y, z = facing.T
        rotation = vector[:, 7:11]  # Quaternion.FromToRotation
        rotation[:, 0], rotation[:, 1], rotation[:, 2], rotation[:, 3] = z * c, y * s - x * c, -z * s, 1 + x * s + y * c
        rotation /= np.maximum(np.sqrt(np.vecdot(rotation, rotation)), 1e-9)[:, None]
        # As a matrix turned into a quaternion has it: beyond 120 degrees the largest of x, y and z is positive.
        (back,) = (rotation[:, 3] <= 0.5).nonzero()
        axis = rotation[back, np.abs(rotation[back, :3]).argmax(1)]
        rotation[back] *= np.where(axis < 0, -1, 1)[:, None]
        vector[:, 14] = np.minimum(self.height[who, 0] / 10, 1)
        vector[:, 15], vector[:, 16::2] = self.touching[who, 0], self.touching[who, 1:]
        vector[:, 17::2] = self.strength[who]
        return [body, vector]
