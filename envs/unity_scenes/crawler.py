"""Crawler of Unity ML-Agents with MuJoCo physics: a body on four legs walks towards a target at a given speed.

Observations, actions, rewards, ends and resets are those of Unity's CrawlerAgent; bodies, joints and drives are those
of Unity's prefab. The physics is not PhysX, so returns are close to Unity's but not equal. It was fitted to recordings
of a real Unity player (a state and an action, and the state one decision later), and ML-Agents' own trained policy
walks in it. Known differences:

1. PhysX solves its joints only approximately: legs twist by a few degrees under load, knees come apart by up to 4 cm,
   and sideways hip motion is partly noise. Here legs twist as much as in PhysX. Otherwise joints are exact, and softer
   drives, softer contacts and less friction compensate.
2. Parts of one crawler pass through each other. Touching the target is detected, but the target exerts no force.
3. The ray that points down hits the ground only, never a leg of the crawler.
4. All crawlers share one arena without interacting. In Unity each has its own.

MuJoCo's (x, y, z) is Unity's (x, z, y), its quaternion (w, x, y, z) is Unity's (w, -x, -z, -y). Only `observe` converts
to Unity's coordinates.
"""

from typing import NamedTuple

import mujoco
import numpy as np

DT = 0.01333  # Unity's fixed step in this scene: 75 Hz
GRAVITY = 14.715  # 1.5 times the Earth's, as ProjectSettingsOverrides sets it
ARENA = 49.5  # distance from the centre to a wall
START_HEIGHT = 2.156  # of the body's centre
TARGET_HEIGHT = 2.006  # of a new target, which drops to the ground
CONTACT_OFFSET = 0.02  # PhysX creates contacts before parts touch: 0.01 for each of the two

# The nine parts: the body, then the upper and the lower part of each leg
RADIUS = np.array([0.5] + [0.15, 0.15] * 4)
HALF = np.array([0] + [0.325, 0.6] * 4)  # distance from a part's centre to the centre of its cap
MEAN = np.full(9, 1 / 9)
TOUCH = RADIUS + CONTACT_OFFSET
ENDS = np.array([1] + [1, 0] * 4, bool)  # the episode ends when one of these touches the ground
PARENT = np.array(
    [1, 2, 1, 3, 1, 4, 1, 5]
)  # of each part of a leg: an index into (cube, body, the four upper legs)

# The hinges of each leg: hip x, hip y, twist of the upper leg, knee; then the twist of the last lower leg. PhysX locks
# its joints against twists, but they twist nevertheless: the first three legs at the knee, about the upper leg's axis;
# the last leg, which PhysX solves last, at the hip and a little at the knee.
DRIVEN = np.array([0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15])
TWISTS = np.array([2, 6, 10, 14, 16])
LOWEST = np.radians([-60, -20, 0] * 4)
RANGE = np.radians([60, 40, 150] * 4)
GOAL = np.array(
    [0, 1, 8, 2, 3, 9, 4, 5, 10, 6, 7, 11]
)  # index of the action that sets a driven hinge's target
FORCE = np.array(
    [12, 12, 16, 13, 13, 17, 14, 14, 18, 15, 15, 19]
)  # index of the action that sets its strength
STRENGTH = np.array(
    [12, 16, 13, 17, 14, 18, 15, 19]
)  # the same indices in the order of the observation

# Of the prefab's JointDriveController
SPRING = 40000.0
DAMPER = 5000.0
MAX_FORCE = 20000.0
DRAG = np.array([0.05 * 32] * 3 + [0.05 * 20] * 3)  # Unity's drag of 0.05 per second


class Physics(NamedTuple):
    """Solver settings and fitted numbers that replace PhysX."""

    weight: tuple[float, ...]  # of the hinges in the solver
    twist: float  # the fraction of a twist that one step removes
    friction: float  # of the contacts; 0.6 in Unity
    impedance: float  # of the contacts
    recovery: float  # the fraction of a penetration that one step removes
    margin: (
        float  # contacts are created before parts touch, which needs two corrections: see `solve`
    )
    cone: str
    solver: str
    iterations: int
    substeps: int  # of a fixed step

    @property
    def dt(self):
        return DT / self.substeps

    def rate(self, damping):
        """Return the gain of the drives as implicit springs, speed per tan(error / 2), for each crawler's damping."""
        out = np.repeat(2 * SPRING / (DAMPER * damping + SPRING * self.dt), 17).reshape(-1, 17)
        out[:, TWISTS] = 2 * self.twist / self.dt
        return out

    def soft(self):
        """Return MuJoCo's solref and solimp for which one step gives a speed of recovery * penetration / dt.

        MuJoCo divides by the impedance.
        """
        reference = f"{-self.recovery * self.impedance / self.dt**2} {-self.impedance / self.dt}"
        return reference, f"{self.impedance} {self.impedance} .001"


FITTED = Physics(
    weight=(5.5, 2.0, 0.42, 2.6) * 3 + (5.5, 2.0, 0.6, 2.6, 0.13), twist=0.3, friction=0.4, impedance=0.8,
    recovery=0.25, margin=CONTACT_OFFSET, cone="elliptic", solver="Newton", iterations=6, substeps=1,
)  # fmt: skip
# Other physics, to test policies that were trained with FITTED. Not fitted, but ML-Agents' own policy walks in it.
ALTERNATIVE = Physics(
    weight=(4.4, 1.6, 0.2, 2.1) * 3 + (4.4, 1.6, 0.3, 2.1, 0.1), twist=0.2, friction=0.6, impedance=0.9, recovery=0.1,
    margin=0.0, cone="pyramidal", solver="CG", iterations=20, substeps=2,
)  # fmt: skip
PHYSICS = {"fitted": FITTED, "alternative": ALTERNATIVE}

# Domain randomisation, drawn for each crawler and episode. An environment parameter of one of these names gives a
# range; the player's --randomize gives all of them, times these factors. Masses of the parts, strengths of the joints,
# friction, and damping of drives and air are multiplied by 1 - range to 1 + range. The delay is the number of fixed
# steps until an action takes effect, from 0 to the range, at most 4.
RANGES = {f"randomize_{what}": 1 for what in ("mass", "strength", "friction", "damping")} | {
    "randomize_delay": 20
}

# The product conjugate(a) * b of MuJoCo's quaternions, in Unity's order (x, y, z, w) = (1, 2, 3, 4): the component to
# which a[i] * b[j] is added, and its sign
PRODUCT = np.array([[4, -1, -3, -2], [1, 4, 2, -3], [3, -2, 4, 1], [2, 3, -1, 4]])
LOCAL = (np.sign(PRODUCT)[:, :, None] * np.eye(4)[np.abs(PRODUCT) - 1]).reshape(4, 16)


def mjcf(num_agents, physics):
    """Return the MuJoCo model as XML.

    Contacts are listed pair by pair, parts with ground and walls: there are too few collision bits for many crawlers,
    and finding contacts takes far longer.
    """
    # Quaternions of the legs, which point along the diagonals
    s = 0.6532815
    c = 0.2705981
    legs = ((1, -1, s, s, c, c), (-1, -1, s, s, -c, -c), (-1, 1, c, c, -s, -s), (1, 1, c, c, s, s))
    walls = (("east", ARENA, 0), ("west", -ARENA, 0), ("north", 0, ARENA), ("south", 0, -ARENA))
    worlds = ("ground", *(name for name, _, _ in walls))
    camera = """<camera name="video" mode="trackcom" pos="0 -8 3.5" xyaxes="1 0 0 0 .5 1"/>
        <light mode="trackcom" directional="true" pos="2 -2 9" dir="-.2 .2 -1" diffuse=".6 .6 .6"/>"""
    crawlers = pairs = sensors = ""
    for k in range(num_agents):
        hidden = 'group="3"' if k else ""  # videos show crawler 0 only
        crawlers += f"""<body name="body{k}" pos="0 0 {START_HEIGHT}">{camera if k == 0 else ""}
            <joint type="free" limited="false" frictionloss="0"/>
            <geom name="body{k}" type="sphere" size=".5" mass="20" rgba=".9 .5 .15 1" {hidden}/>"""
        parts = [f"body{k}"]
        for i, (x, y, *quat) in enumerate(legs):
            upper = f"upper{k}_{i}"
            lower = f"lower{k}_{i}"
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
        pairs += "".join(
            f'<pair geom1="{world}" geom2="{part}"/>' for part in parts for world in worlds
        )
    walls = "".join(
        f'<geom name="{name}" type="plane" size="50 50 1" pos="{x} {y} 0" zaxis="{-x} {-y} 0" group="3"/>'
        for name, x, y in walls
    )
    solref, solimp = physics.soft()
    # frictionloss only creates the rows that `solve` turns into drives
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
    behavior = "Crawler?team=0"
    continuous = 20
    branches = ()
    sensors = [("PhysicsBodySensor:Body", 126), ("VectorSensor_size32", 32)]
    num_agents = 10
    period = 5
    offset = 0
    between = False
    max_step = 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters, physics=FITTED):
        n = self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        self.world = physics
        self.randomized = False
        self.model = mujoco.MjModel.from_xml_string(mjcf(n, physics))
        self.data = data = mujoco.MjData(self.model)
        self.model.dof_damping.reshape(n, 23)[:, :6] = DRAG
        # Views of MuJoCo's arrays, one row per crawler. World and target are the two bodies before the crawlers.
        self.qpos = data.qpos.reshape(n, 24)
        self.qvel = data.qvel.reshape(n, 23)
        self.velocity = data.sensordata.reshape(n, 9, 3)
        self.angle = self.qpos[:, 7:]
        self.spin = self.qvel[:, 6:]
        self.xpos = data.xpos[2:].reshape(n, 9, 3)
        self.xquat = data.xquat[2:].reshape(n, 9, 4)
        self.xmat = data.xmat[2:].reshape(n, 9, 3, 3)
        self.height = self.xpos[:, :, 2]  # of the parts' centres
        self.slope = self.xmat[:, :, 2, 2]  # of the parts' axes
        self.facing = self.xmat[:, 0, :, 1]  # the body's forward axis
        # The drives
        self.goal = np.zeros((n, 17))
        self.force = np.full((n, 17), MAX_FORCE)
        self.strength = np.zeros((n, 8))
        self.touching = np.zeros((n, 9), bool)
        self.rate = physics.rate(np.ones(n))
        self.weight = np.array(physics.weight)
        # Domain randomisation: factors of the strengths, and actions that wait for their delay
        self.power = np.ones((n, 12))
        self.delay = np.zeros(n, int)
        self.wait = np.zeros(n, int)  # fixed steps until the action takes effect
        self.acted = np.zeros((n, 20))
        # The task: wanted speed, the reference frame of the observations, the target
        self.speed = np.ones(n)
        self.cube = np.zeros((n, 3))
        self.forward = np.zeros((n, 2))
        self.distance = np.zeros(n)
        self.target = np.zeros((n, 2))
        self.dropped = np.zeros(n, int)
        self.drop_target(range(n), 0)

    def drop_target(self, agents, now):
        """Place new targets at the fixed step `now`."""
        for i in agents:  # Random.insideUnitSphere * 40, projected onto the ground
            point = self.rng.normal(size=3)
            self.target[i] = point[:2] * 40 * self.rng.random() ** (1 / 3) / np.linalg.norm(point)
            self.dropped[i] = now
        self.data.mocap_pos[0, :2] = self.target[0]

    def target_height(self, agents):
        steps = self.academy.total - self.dropped[agents]
        return np.maximum(TARGET_HEIGHT - GRAVITY * DT**2 / 2 * steps * (steps + 1), 0.5)

    def begin(self, agents):
        """Start an episode. As in Unity, target, joint goals and strengths stay as they are until the next decision."""
        for i in agents:
            yaw = self.rng.uniform(0, 2 * np.pi)
            self.qpos[i] = 0
            self.qpos[i, 2:7] = START_HEIGHT, np.cos(yaw / 2), 0, 0, -np.sin(yaw / 2)
            self.speed[i] = self.rng.uniform(0.1, 15)
        ranges = [self.parameters.get(name, 0.0) for name in RANGES]
        if any(ranges) or self.randomized:
            self.randomize(agents, *np.clip(ranges, 0, [0.9] * 4 + [self.period - 1]))
        self.qvel[agents] = 0
        self.touching[agents] = False
        mujoco.mj_step1(self.model, self.data)  # the other crawlers' results do not change
        self.turn_cube(agents)

    def randomize(self, agents, mass, strength, friction, damping, delay):
        """Multiply the nominal masses, strengths, frictions and dampings by random numbers, and draw the delays.

        MuJoCo's contact softness scales with the mass.
        """
        n = self.num_agents
        model = self.model
        if not self.randomized:
            self.parts = [
                x[2:].reshape(n, 9, -1)
                for x in (model.body_mass, model.body_inertia, model.body_invweight0)
            ]
            self.nominal = [x.copy() for x in self.parts]
            self.randomized = True
        times = lambda spread, *shape: self.rng.uniform(
            1 - spread, 1 + spread, (len(agents), *shape)
        )
        masses = times(mass, 9, 1)
        air = times(damping)
        for part, nominal, power in zip(self.parts, self.nominal, (1, 1, -1), strict=True):
            part[agents] = nominal[agents] * masses**power
        whole = model.body_subtreemass[2:].reshape(n, 9)
        whole[agents] = self.parts[0][agents, :, 0]
        whole[agents, 1::2] += whole[agents, 2::2]
        whole[agents, 0] += whole[agents, 1::2].sum(-1)
        model.pair_friction.reshape(n, -1, 5)[agents, :, :2] = (
            self.world.friction * times(friction)[:, None, None]
        )
        model.dof_damping.reshape(n, 23)[agents, :6] = DRAG * air[:, None]
        self.rate[agents] = self.world.rate(air)
        self.power[agents] = times(strength, 12)
        self.delay[agents] = self.rng.integers(0, round(delay) + 1, len(agents))

    def turn_cube(self, agents):
        """Update the cube, the reference frame of the observations.

        It points from its last position to the target, and then moves to the body.
        """
        way = self.target[agents] - self.cube[agents, :2]
        self.distance[agents] = distance = np.hypot(way[:, 0], way[:, 1])
        self.forward[agents] = way / distance[:, None]
        self.cube[agents] = self.xpos[agents, 0]

    def act(self, agents, continuous, discrete):
        self.strength[agents] = (continuous[:, STRENGTH] + 1) / 2
        if self.randomized:
            self.acted[agents] = continuous
            self.wait[agents] = self.delay[agents]
        else:
            self.drive(agents, continuous)

    def drive(self, agents, action):
        hinges = np.ix_(agents, DRIVEN)
        self.goal[hinges] = LOWEST + RANGE * (np.clip(action[:, GOAL], -1, 1) + 1) / 2
        # Unity does not clip strengths
        self.force[hinges] = np.maximum(
            (action[:, FORCE] + 1) / 2 * MAX_FORCE * self.power[agents], 1e-6
        )

    def update(self):
        self.turn_cube(slice(None))
        miss = MEAN @ self.velocity
        miss[:, :2] -= self.forward * self.speed[:, None]
        match = 1 - np.minimum(np.vecdot(miss, miss) / self.speed**2, 1)
        self.academy.reward += match * match * (np.vecdot(self.facing[:, :2], self.forward) + 1) / 2

    def physics(self):
        # PhysX finds contacts before it moves the parts: a contact refers to the positions before the step.
        self.touching = self.height - np.abs(self.slope * HALF) < TOUCH
        if self.randomized:
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
        """Simulate one substep: mj_step2, then mj_step1 of the next one, to have current positions and velocities."""
        data = self.data
        hinges = self.goal.size
        world = self.world
        dt = world.dt
        # PhysX's slerp drive is an implicit spring inside the solver, with a maximum force. Here it is a friction row
        # with a target speed. MuJoCo has already copied all rows except aref into constraint islands, one per crawler,
        # and it solves the copies.
        half = (self.goal - self.angle) / 2
        cos = np.cos(half)
        weight = (self.weight * cos * cos).ravel()
        rows = data.map_efc2iefc[:hinges]
        aref = data.efc_aref
        data.iefc_frictionloss[rows] = (self.force * cos).ravel() / 2
        data.iefc_D[rows] = weight
        data.iefc_R[rows] = 1 / weight
        aref[:hinges] = ((self.rate * np.tan(half) - self.spin) / dt).ravel()
        if world.margin:
            # Contacts are the last rows, three each. The normal needs two corrections: within the margin MuJoCo pushes
            # parts away, PhysX only slows them down; and MuJoCo's convex friction cone lifts sliding parts at a speed
            # of friction * slip, and feet slide at metres per second.
            contacts = data.nf + data.nl
            slip = data.efc_vel[contacts:].reshape(-1, 3)
            friction = data.contact.friction[:, 0] if self.randomized else world.friction
            lift = friction / dt * np.hypot(slip[:, 1], slip[:, 2])
            aref[contacts::3] -= world.recovery * world.margin / dt**2 + lift
        mujoco.mj_step2(self.model, data)
        mujoco.mj_step1(self.model, data)

    def touch_target(self, agents):
        """Replace the targets that are touched. Of a capsule, five points are tested against the target, a 1 m box."""
        centre = np.column_stack([self.target[agents], self.target_height(agents)])
        points = (
            np.linspace(-1, 1, 5)[:, None, None, None] * HALF[:, None] * self.xmat[agents, :, :, 2]
            + self.xpos[agents]
        )
        gap = np.maximum(np.abs(points - centre[:, None]) - 0.5, 0)
        self.drop_target(
            agents[(np.linalg.norm(gap, axis=-1) < RADIUS).any((0, 2))], self.academy.total
        )

    def observe(self, agents):
        k = len(agents)
        quat = self.xquat[agents]
        cube = self.cube[agents]
        forward = self.forward[agents]
        facing = self.facing[agents]
        s, c = forward.T
        vectors = np.zeros((k, 21, 3))
        vectors[:, :9] = self.xpos[agents] - cube[:, None]
        vectors[:, 9:18] = self.velocity[agents]
        vectors[:, 18] = MEAN @ vectors[:, 9:18]
        vectors[:, 19, :2] = forward * self.speed[agents, None]
        vectors[:, 20, :2] = self.target[agents] - cube[:, :2]
        vectors[:, 20, 2] = self.target_height(agents) - cube[:, 2]
        turn = np.zeros((k, 3, 3))  # into the cube's frame and Unity's axes
        turn[:, 0, 0] = c
        turn[:, 1, 0] = -s
        turn[:, 2, 1] = 1
        turn[:, 0, 2] = s
        turn[:, 1, 2] = c
        vectors = vectors @ turn
        # The sign of a quaternion matters to a policy: as in Quaternion.LookRotation, half of the cube's yaw is in
        # (-60, 120] degrees.
        yaw = np.arctan2(s, c)
        yaw = np.where(yaw < -2 / 3 * np.pi, yaw + 2 * np.pi, yaw) / 2
        frames = np.zeros((k, 6, 4))
        frames[:, 0, 0] = np.cos(yaw)
        frames[:, 0, 3] = -np.sin(yaw)
        frames[:, 1] = quat[:, 0]
        frames[:, 2:] = quat[:, 1::2]
        local = (frames @ LOCAL).reshape(k, 6, 4, 4)
        body = np.empty((k, 126), np.float32)
        vector = np.empty((k, 32), np.float32)
        pose = body[:, :63].reshape(k, 9, 7)
        pose[..., :3] = vectors[:, :9]
        pose[..., 3:] = quat @ local[:, 0]
        body[:, 63:90] = vectors[:, 9:18].reshape(k, 27)
        body[:, 90:94] = pose[:, 0, 3:]
        body[:, 94:] = (quat[:, 1:, None] @ local[:, PARENT]).reshape(k, 32)
        average = vectors[:, 18]
        want = vectors[:, 19]
        off = want - average
        vector[:, 0] = np.sqrt(np.vecdot(off, off))
        vector[:, 1:4] = average
        vector[:, 4:7] = want
        vector[:, 11:14] = vectors[:, 20]
        x, y, z = facing.T
        rotation = vector[:, 7:11]  # Quaternion.FromToRotation
        rotation[:, 0] = z * c
        rotation[:, 1] = y * s - x * c
        rotation[:, 2] = -z * s
        rotation[:, 3] = 1 + x * s + y * c
        rotation /= np.maximum(np.sqrt(np.vecdot(rotation, rotation)), 1e-9)[:, None]
        # As in the conversion of a matrix to a quaternion: beyond 120 degrees the largest of x, y and z is positive.
        (back,) = (rotation[:, 3] <= 0.5).nonzero()
        axis = rotation[back, np.abs(rotation[back, :3]).argmax(1)]
        rotation[back] *= np.where(axis < 0, -1, 1)[:, None]
        vector[:, 14] = np.minimum(self.height[agents, 0] / 10, 1)
        vector[:, 15] = self.touching[agents, 0]
        vector[:, 16::2] = self.touching[agents, 1:]
        vector[:, 17::2] = self.strength[agents]
        return [body, vector]
