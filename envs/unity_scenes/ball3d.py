"""3DBall of Unity ML-Agents: twelve agents, each of which tilts a platform to keep a ball from falling off.

MuJoCo moves the bodies and renders them. The contact of a ball with its platform is computed here, as PhysX does it:
Unity teleports the platform, so it has no velocity and lifts the ball by position alone, which MuJoCo's soft contacts
cannot express. From the states of a real Unity player and with its actions, the ball's position after one decision is
off by 0.04 mm (rms) with a trained policy and by 0.6 mm with random actions.

The axes are Unity's, with y up. Differences from Unity: numbers are float64; MuJoCo is right-handed, so images are
mirrored; a ball whose centre is inside the platform leaves through the top; balls never sleep.
"""

import mujoco
import numpy as np

from onefile_rl.engines.samplers import per_agent

DT = 0.02
# Constants of the inner loop are arrays, because numpy converts a Python number in every call.
ZERO, ONE, STEP, LEAN, DEGREE = (np.array(x) for x in (0.0, 1.0, DT, 0.25, np.pi / 180))
ACTION = (np.array(-1.0), ONE)  # lowest and highest
EDGE = (np.array(-2.5), np.array(2.5))  # of the platform
GRAVITY = 9.81
# A ball outside of these bounds has fallen
LOWEST = np.array([-3, -2, -3])
HIGHEST = np.array([3, np.inf, 3])
# Friction of Unity's default material: the material that ML-Agents' prefab names is missing in its repository
FRICTION = np.array(0.6)
SPIN_KEPT = np.array(1 - 0.01 * DT)  # angular drag
MAX_SPIN = np.array(7.0)  # Unity's default limit in rad/s: a ball faster than 3.5 m/s slides
# PhysX creates contacts before bodies touch: Unity's default offset is 0.01 for each of the two
CONTACT_OFFSET = np.array(0.02)
# In a step PhysX removes 0.8 of an overlap or of a gap, at most at 10 m/s. The velocity that removes an overlap is not
# kept after the step.
RECOVERY = np.array(-0.8 / DT)
RECOVERY_MAX = np.array([10.0, 0.0])[:, None, None]
FAR = np.array(-np.inf)
# q @ TURN_Z is the quaternion q (w, x, y, z) times k, and q @ TURN_X is q times i.
TURN_Z = np.array([[0, 0, 0, 1.0], [0, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 0, 0]])
TURN_X = np.array([[0, 1.0, 0, 0], [-1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]])
# a @ SKEW is the matrix of the cross product with a.
SKEW = np.array(
    [[0, 0, 0, 0, 0, -1.0, 0, 1, 0], [0, 0, 1, 0, 0, 0, -1, 0, 0], [0, -1, 0, 1, 0, 0, 0, 0, 0]]
)
ONES = np.ones((3, 3))


def dot(a, b):
    """Return the dot product of each row in three equal columns: numpy is fastest with arrays of the same shape."""
    return (a * b) @ ONES


def turn(q, half, matrix):
    """Rotate the quaternions q about a local axis by twice the angle `half`. matrix: TURN_X or TURN_Z"""
    return np.cos(half) * q + np.sin(half) * (q @ matrix)


def mjcf(n):
    """Return the MuJoCo model of n platforms and balls as XML."""
    columns = min(n, int(np.ceil(np.sqrt(n * 4 / 3))))  # as in Unity: 4 by 3 platforms, 9 m apart
    rows = -(-n // columns)
    away = 11 * max(columns, rows * 4 / 3, 2) + 8
    middle = (columns - 1) / 2, (rows - 1) / 2
    places = [
        f'pos="{9 * (i % columns - middle[0])} {9 * (middle[1] - i // columns)} 0"'
        for i in range(n)
    ]
    slides = "".join(f'<joint type="slide" axis="{axis}"/>' for axis in ("1 0 0", "0 1 0", "0 0 1"))
    box = '<geom type="box" size="2.5 2.5 2.5" rgba="0.25 0.55 0.9 1"/>'
    ball = f'{slides}<joint type="ball"/><geom size="0.5" mass="1" material="ball"/>'
    platforms = "".join(f'<body mocap="true" {place}>{box}</body>' for place in places)
    balls = "".join(f"<body {place}>{ball}</body>" for place in places)
    return f"""<mujoco>
      <option timestep="{DT}" gravity="0 {-GRAVITY} 0"><flag constraint="disable" contact="disable"/></option>
      <statistic extent="1"/>
      <visual><headlight ambient="0.4 0.4 0.4" diffuse="0.3 0.3 0.3"/>
        <global offwidth="1920" offheight="1080"/><map zfar="1000"/></visual>
      <asset>
        <texture type="skybox" builtin="gradient" rgb1="0.75 0.82 0.86" rgb2="0.47 0.56 0.61" width="64" height="384"/>
        <texture name="checks" type="cube" builtin="checker" rgb1="0.95 0.95 0.95" rgb2="0.85 0.35 0.2"
          width="64" height="64"/>
        <material name="ball" texture="checks"/></asset>
      <worldbody><light directional="true" dir="-0.4 -1 -0.6" diffuse="0.6 0.6 0.6"/>
        <camera name="video" pos="0 {0.27 * away + 1} {away}" xyaxes="1 0 0 0 1 -0.27" fovy="35"/>
        {platforms}{balls}</worldbody></mujoco>"""


class Ball3D:
    behavior = "3DBall?team=0"
    sensors = [("VectorSensor_size8", 8)]
    continuous = 2
    branches = ()
    num_agents = 12
    period = 5
    offset = 0
    between = True
    max_step = 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters
        self.model = mujoco.MjModel.from_xml_string(mjcf(n))
        self.data = mujoco.MjData(self.model)
        self.platform = self.data.mocap_quat
        self.position = self.data.qpos.reshape(n, 7)[:, :3]  # from the platform's centre
        self.velocity, self.rolling = np.split(self.data.qvel.reshape(n, 6), 2, axis=1)
        self.spin = np.zeros(
            (n, 3)
        )  # `rolling`, which is in the ball's frame, in the world's frame
        frames = self.data.xmat.reshape(-1, 3, 3)
        self.platform_frame = frames[1 : n + 1]
        self.ball_frame = frames[n + 1 :]
        self.radius = np.full((n, 3), 0.5)
        self.inertia = np.full((n, 3), 0.1)  # inertia per mass
        self.fall = np.tile([0, -GRAVITY * DT, 0], (n, 1))  # change of velocity in a fixed step
        self.lift = self.data.qfrc_applied.reshape(n, 6)[:, 1]  # force against MuJoCo's gravity

    def begin(self, agents):
        """Start an episode. The ball keeps its spin, as in Unity, where it has an effect at the next landing."""
        half = np.radians(10 * self.rng.random((len(agents), 2)) - 5)
        self.platform[agents] = turn(
            turn(np.array([[1.0, 0, 0, 0]]), half[:, :1], TURN_X), half[:, 1:], TURN_Z
        )
        self.position[agents] = [-1.5, 4, -1.5] + self.rng.random((len(agents), 3)) * [3, 0, 3]
        self.velocity[agents] = 0
        radius = 0.5 * per_agent(self.parameters, "scale", 1.0, agents)
        self.radius[agents] = radius[:, None]
        self.inertia[agents] = 0.4 * radius[:, None] ** 2
        self.model.geom_size[self.num_agents + agents, 0] = radius
        gravity = per_agent(self.parameters, "gravity", GRAVITY, agents)
        self.fall[agents, 1] = -gravity * DT
        self.lift[agents] = GRAVITY - gravity  # of a ball with mass 1
        # The parameter "mass" has no effect: the ball touches nothing that can move

    def observe(self, agents):
        parts = [self.platform[agents, 3:0:-2], self.position[agents], self.velocity[agents]]
        return [np.concatenate(parts, 1, dtype=np.float32)]

    def act(self, agents, continuous, discrete):
        """Tilt the platforms. `agents` are always all agents: they act in every fixed step."""
        action = np.minimum(np.maximum(continuous, ACTION[0]), ACTION[1])
        half = DEGREE * action
        limit = LEAN * np.abs(action)
        q = self.platform
        for i, axis, matrix in ((0, 3, TURN_Z), (1, 1, TURN_X)):
            # True unless the platform is tilted far to that side already. NaN actions give False, as in C#.
            free = action[:, i] * q[:, axis] < limit[:, i]
            q = turn(q, np.where(free, half[:, i], ZERO)[:, None], matrix)
        self.platform[:] = q
        self.academy.reward[:] = 0.1
        off = (self.position < LOWEST) | (self.position > HIGHEST)
        if off.any():
            fell = np.flatnonzero(off.any(1))
            self.academy.reward[fell] = -1
            self.academy.end(fell)

    def update(self):
        pass

    def physics(self):
        """Simulate one fixed step as PhysX does.

        Find the impulses that keep a ball out of its platform and move the ball. The impulses that only remove an
        overlap do not change its velocity after the step.
        """
        mujoco.mj_step1(self.model, self.data)
        velocity = self.velocity + self.fall
        spin = self.spin
        spin *= np.minimum(MAX_SPIN / np.sqrt(dot(spin, spin) + 1e-20), SPIN_KEPT)

        centre = np.vecmat(self.position, self.platform_frame)
        arm = centre - np.minimum(
            np.maximum(centre, EDGE[0]), EDGE[1]
        )  # from the platform's nearest point
        distance = np.sqrt(dot(arm, arm))
        if not distance.all():
            inside = distance[:, 0] == 0
            arm[inside, 1] = centre[inside, 1] - EDGE[1] - 1e-9
            distance[inside] = arm[inside, 1:2]
        normal = np.matvec(self.platform_frame, arm / distance)
        gap = distance - self.radius
        approach = dot(velocity, normal)

        lever = distance / self.inertia
        cross = (normal @ SKEW).reshape(-1, 3, 3)
        slip = velocity - approach * normal + distance * np.matvec(cross, spin)
        grip = slip / (ONE + distance * lever)  # the impulse that makes the ball roll
        limit = FRICTION / np.sqrt(dot(grip, grip) + 1e-20)
        leave = np.where(gap < CONTACT_OFFSET, RECOVERY * gap, FAR)
        impulse = np.maximum(np.minimum(leave, RECOVERY_MAX) - approach, ZERO)
        moving, lasting = impulse * normal - np.minimum(limit * impulse, ONE) * grip

        spin -= lever * np.matvec(cross, lasting)
        self.velocity += lasting
        self.rolling[:] = np.vecmat(spin, self.ball_frame)
        mujoco.mj_step2(self.model, self.data)
        self.position += STEP * (moving - lasting)
