"""3DBall of Unity ML-Agents: a platform tilts to keep a ball from falling off, twelve times over.

MuJoCo moves the bodies and draws them. The contact of a ball with its platform is PhysX's: the platform is teleported,
so it has no velocity and lifts the ball by position alone, which MuJoCo's soft contacts cannot express. Replaying the
actions of a real Unity player from its states, a ball is 0.04 mm (rms) off after a decision of a trained policy and
0.6 mm under random actions.

The axes are Unity's, y up. Different from Unity: float64 inside; MuJoCo is right-handed, so the picture is a mirror
image; a ball with its centre inside the platform leaves through the top; balls never sleep.
"""

import mujoco
import numpy as np

DT = 0.02
# Constants of the inner loop are arrays: numpy would convert a Python number anew in every call.
ZERO, ONE, STEP, LEAN, DEGREE = (np.array(x) for x in (0.0, 1.0, DT, 0.25, np.pi / 180))
ACTION, EDGE = (np.array(-1.0), ONE), (np.array(-2.5), np.array(2.5))  # from, to
GRAVITY = np.array([0, -9.81 * DT, 0])
LOWEST, HIGHEST = np.array([-3, -2, -3]), np.array([3, np.inf, 3])  # a ball beyond has fallen
# Unity's default material: the one that upstream's prefab names is missing in upstream's repository.
FRICTION = np.array(0.6)
SPIN_KEPT = np.array(1 - 0.01 * DT)  # angular drag
MAX_SPIN = np.array(7.0)  # Unity's default limit in rad/s: beyond 3.5 m/s a ball slides
CONTACT_OFFSET = np.array(0.02)  # PhysX acts before bodies touch: Unity's default of 0.01 for each
# PhysX removes this share of an overlap, or of a gap, in a step, not faster than 10 m/s; of an overlap's, nothing stays
# in the velocity.
RECOVERY = np.array(-0.8 / DT)
RECOVERY_MAX = np.array([10.0, 0.0])[:, None, None]
FAR = np.array(-np.inf)
# q @ TURN is the quaternion q (w, x, y, z) times k, or times i.
TURN_Z = np.array([[0, 0, 0, 1.0], [0, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 0, 0]])
TURN_X = np.array([[0, 1.0, 0, 0], [-1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]])
# a @ SKEW is the matrix of "a cross".
SKEW = np.array([[0, 0, 0, 0, 0, -1.0, 0, 1, 0], [0, 0, 1, 0, 0, 0, -1, 0, 0], [0, -1, 0, 1, 0, 0, 0, 0, 0]])
ONES = np.ones((3, 3))


def dot(a, b):
    """The product of each row, in three equal columns: numpy is fastest with arrays of one shape."""
    return (a * b) @ ONES


def turn(q, half, matrix):
    """Rotate about a local axis by twice the angle `half`."""
    return np.cos(half) * q + np.sin(half) * (q @ matrix)


def mjcf(n):
    columns = min(n, int(np.ceil(np.sqrt(n * 4 / 3))))  # Unity's wall of platforms: 4 by 3, 9 m apart
    rows = -(-n // columns)
    away = 11 * max(columns, rows * 4 / 3, 2) + 8
    middle = (columns - 1) / 2, (rows - 1) / 2
    places = [f'pos="{9 * (i % columns - middle[0])} {9 * (middle[1] - i // columns)} 0"' for i in range(n)]
    slides = "".join(f'<joint type="slide" axis="{axis}"/>' for axis in ("1 0 0", "0 1 0", "0 0 1"))
    box = '<geom type="box" size="2.5 2.5 2.5" rgba="0.25 0.55 0.9 1"/>'
    ball = f'{slides}<joint type="ball"/><geom size="0.5" mass="1" material="ball"/>'
    platforms = "".join(f'<body mocap="true" {place}>{box}</body>' for place in places)
    balls = "".join(f"<body {place}>{ball}</body>" for place in places)
    return f"""<mujoco>
      <option timestep="{DT}" gravity="0 -9.81 0"><flag constraint="disable" contact="disable"/></option>
      <statistic extent="1"/>
      <visual><headlight ambient="0.4 0.4 0.4" diffuse="0.3 0.3 0.3"/>
        <global offwidth="1920" offheight="1080"/><map zfar="1000"/></visual>
      <asset>
        <texture type="skybox" builtin="gradient" rgb1="0.75 0.82 0.86" rgb2="0.47 0.56 0.61" width="64" height="384"/>
        <texture name="checks" type="cube" builtin="checker" rgb1="0.95 0.95 0.95" rgb2="0.85 0.35 0.2"
          width="64" height="64"/>
        <material name="ball" texture="checks"/></asset>
      <worldbody><light directional="true" dir="-0.4 -1 -0.6" diffuse="0.6 0.6 0.6"/>
        <camera name="film" pos="0 {0.27 * away + 1} {away}" xyaxes="1 0 0 0 1 -0.27" fovy="35"/>
        {platforms}{balls}</worldbody></mujoco>"""


class Ball3D:
    behavior, sensors, continuous, branches = "3DBall?team=0", [("VectorSensor_size8", 8)], 2, ()
    num_agents = 12
    period, offset, between, max_step = 5, 0, True, 5000
    dt = DT

    def __init__(self, num_agents, seed, parameters):
        n = self.num_agents = num_agents
        self.rng, self.parameters = np.random.default_rng(seed), parameters
        self.model = mujoco.MjModel.from_xml_string(mjcf(n))
        self.data = mujoco.MjData(self.model)
        self.platform = self.data.mocap_quat
        self.position = self.data.qpos.reshape(n, 7)[:, :3]  # from the platform's centre
        self.velocity, self.rolling = np.split(self.data.qvel.reshape(n, 6), 2, axis=1)
        self.spin = np.zeros((n, 3))  # `rolling` in the world's frame: MuJoCo has it in the ball's, to turn the picture
        frames = self.data.xmat.reshape(-1, 3, 3)
        self.platform_frame, self.ball_frame = frames[1 : n + 1], frames[n + 1 :]
        self.radius, self.inertia = np.full((n, 3), 0.5), np.full((n, 3), 0.1)  # inertia per mass

    def begin(self, who):
        """The ball keeps its spin, as in Unity, where it tells at the next landing."""
        half = np.radians(10 * self.rng.random((len(who), 2)) - 5)
        self.platform[who] = turn(turn(np.array([[1.0, 0, 0, 0]]), half[:, :1], TURN_X), half[:, 1:], TURN_Z)
        self.position[who] = [-1.5, 4, -1.5] + self.rng.random((len(who), 3)) * [3, 0, 3]
        self.velocity[who] = 0
        self.radius[who] = radius = 0.5 * self.parameters.get("scale", 1.0)
        self.inertia[who] = 0.4 * radius**2
        self.model.geom_size[self.num_agents + who, 0] = radius
        # The mass is without effect, as the ball meets nothing that can move.
        self.model.body_mass[self.num_agents + who + 1] = self.parameters.get("mass", 1.0)

    def observe(self, who):
        parts = [self.platform[who, 3:0:-2], self.position[who], self.velocity[who]]
        return [np.concatenate(parts, 1, dtype=np.float32)]

    def act(self, who, continuous, discrete):
        """`who` is everyone here: agents act in every fixed step."""
        action = np.minimum(np.maximum(continuous, ACTION[0]), ACTION[1])
        half, limit = DEGREE * action, LEAN * np.abs(action)
        q = self.platform
        for i, axis, matrix in ((0, 3, TURN_Z), (1, 1, TURN_X)):
            # It does not lean far to that side yet; false for an action that is not a number, as in C#.
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
        """A step as PhysX solves it: find the impulses that keep a ball out of its platform, move it, then take back
        what was only to undo an overlap."""
        mujoco.mj_step1(self.model, self.data)
        velocity, spin = self.velocity + GRAVITY, self.spin
        spin *= np.minimum(MAX_SPIN / np.sqrt(dot(spin, spin) + 1e-20), SPIN_KEPT)

        centre = np.vecmat(self.position, self.platform_frame)
        arm = centre - np.minimum(np.maximum(centre, EDGE[0]), EDGE[1])  # from the nearest point of the platform
        distance = np.sqrt(dot(arm, arm))
        if not distance.all():
            inside = distance[:, 0] == 0
            arm[inside, 1] = centre[inside, 1] - EDGE[1] - 1e-9
            distance[inside] = arm[inside, 1:2]
        normal = np.matvec(self.platform_frame, arm / distance)
        gap, approach = distance - self.radius, dot(velocity, normal)

        lever, cross = distance / self.inertia, (normal @ SKEW).reshape(-1, 3, 3)
        slip = velocity - approach * normal + distance * np.matvec(cross, spin)
        grip = slip / (ONE + distance * lever)  # the impulse after which the ball rolls
        limit = FRICTION / np.sqrt(dot(grip, grip) + 1e-20)
        leave = np.where(gap < CONTACT_OFFSET, RECOVERY * gap, FAR)
        impulse = np.maximum(np.minimum(leave, RECOVERY_MAX) - approach, ZERO)
        moving, lasting = impulse * normal - np.minimum(limit * impulse, ONE) * grip

        spin -= lever * np.matvec(cross, lasting)
        self.velocity += lasting
        self.rolling[:] = np.vecmat(spin, self.ball_frame)
        mujoco.mj_step2(self.model, self.data)
        self.position += STEP * (moving - lasting)
