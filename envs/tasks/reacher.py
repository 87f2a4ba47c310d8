"""Reaching tasks: arms with 2 or 3 joints in a plane, with 6 in space, and with 2 that follow a moving target. They are
small and well understood, so that they help to tell a bug of the algorithm from one of the env.

    env = gymnasium.make("envs:Reacher3Dof-v0", render_mode="rgb_array")

Observation: sin and cos of the joint angles, their velocities, the vector from the fingertip to the target and, if the
target moves, its velocity. Action i is the torque of joint i, from -1 to 1. Reward: 50 per metre by which the fingertip
approaches the target, which adds up to the difference of the potential -50 * distance; minus 0.1 * the mean squared
action; plus 1 while within 2 cm. Episodes are truncated after 100 steps and never terminate. info["is_success"] is True
while the fingertip is within 2 cm of the target. An episode is a success if that holds at its last step.

The planar arms have no gravity, the 6-joint arm has. There are no contacts and no joint limits, so there are no
constraints to solve and the simulation stays stable. Only `reset` draws random numbers, from np_random. Rendering does
not change the state.
"""

import math

import gymnasium as gym
import mujoco
import numpy as np

from envs.rendering import choose_gl

RADIUS = 0.02  # distance that counts as success, and radius of the rendered target
# Weights of the reward
PROGRESS = 50.0
CONTROL = 0.1
BONUS = 1.0
SUBSTEPS = 4
TIMESTEP = 0.01
ARMS = {  # by number of joints: axis and length of each link, which points along x at zero angles
    2: [("0 0 1", 0.12), ("0 0 1", 0.12)],
    3: [("0 0 1", 0.1), ("0 0 1", 0.08), ("0 0 1", 0.06)],
    # x points up: yaw, shoulder, elbow, roll, wrist
    6: [
        ("1 0 0", 0.06),
        ("0 1 0", 0.1),
        ("0 1 0", 0.04),
        ("1 0 0", 0.05),
        ("0 1 0", 0.03),
        ("0 0 1", 0.03),
    ],
}
REST = {
    2: (0, 1.5),
    3: (-0.5, 1, 1),
    6: (0, 0.6, 1, 0, 0.6, 0),
}  # episodes start near this pose, with a bent arm
HEIGHT = {2: 0.02, 3: 0.02, 6: 0.2}  # of the base
SHOULDER = HEIGHT[6] + ARMS[6][0][1]
# Distance of targets from the shoulder: the arm needs to be neither folded nor stretched
NEAR = 0.08
FAR = 0.21
PLANE = ((-0.14, 0.14), (0.06, 0.16))  # range of the moving target along x and y
SPEED = (0.04, 0.12)  # of the moving target, m/s


def mjcf(joints, plane, width, height):
    """Return the MuJoCo model as XML. width, height: largest size of rendered images"""
    links = ARMS[joints]
    arm = f'<site name="fingertip" pos="{links[-1][1]} 0 0" size="0.014" rgba="0.1 0.75 0.3 1"/>'
    # From the outermost link, because each link contains the next one
    for i, (axis, length) in reversed(list(enumerate(links))):
        color = ("0.16 0.36 0.62 1", "0.35 0.62 0.85 1")[i % 2]
        before = links[i - 1][1] if i else 0
        geom = f'<geom type="capsule" size="0.011" fromto="0 0 0 {length} 0 0" rgba="{color}"/>'
        arm = f'<body pos="{before} 0 0"><joint name="joint{i}" axis="{axis}"/>{geom}\n{arm}</body>'
    motors = "".join(f'<motor name="joint{i}" joint="joint{i}"/>' for i in range(joints))
    (x0, x1), (y0, y1) = PLANE
    middle = f"{(x0 + x1) / 2} {(y0 + y1) / 2} -0.01"
    half = f"{(x1 - x0) / 2 + RADIUS} {(y1 - y0) / 2 + RADIUS} 0.005"
    sheet = (
        f'<geom type="box" pos="{middle}" size="{half}" rgba="0.95 0.85 0.6 1"/>' if plane else ""
    )
    base = HEIGHT[joints]
    up, floor, gravity = ('euler="0 -90 0"', 0, -9.81) if joints == 6 else ("", -0.02, 0)
    above = 'pos="0 0 1" fovy="30"'
    aside = 'pos="0.58 -0.84 0.58" xyaxes="0.8 0.55 0 -0.19 0.28 0.94" fovy="31"'
    ball = f'<geom size="{RADIUS}" rgba="0.95 0.1 0.05 0.5"/>'
    disc = f'<geom type="cylinder" pos="0 0 -0.015" size="{RADIUS} 0.002" rgba="0.9 0.15 0.1 1"/>'
    return f"""<mujoco>
      <option timestep="{TIMESTEP}" gravity="0 0 {gravity}" integrator="implicitfast">
        <flag constraint="disable" contact="disable"/></option>
      <visual><headlight ambient="0.4 0.4 0.4" diffuse="0.3 0.3 0.3" specular="0 0 0"/>
        <global offwidth="{width}" offheight="{height}"/></visual>
      <asset><texture type="skybox" builtin="flat" rgb1="0.75 0.78 0.8" width="8" height="48"/></asset>
      <default><joint damping="0.3" armature="0.01"/><motor gear="0.9" ctrlrange="-1 1"/></default>
      <worldbody>
        <light directional="true" dir="-0.3 0.3 -1" diffuse="0.3 0.3 0.3" specular="0 0 0"/>
        <camera name="video" {aside if joints == 6 else above}/>
        <geom type="plane" pos="0 0 {floor}" size="0 0 0.1" rgba="0.75 0.78 0.8 1"/>{sheet}
        <geom type="cylinder" fromto="0 0 {floor} 0 0 {base}" size="0.02" rgba="0.25 0.25 0.28 1"/>
        <body pos="0 0 {base}" {up}>{arm}</body>
        <body name="target" mocap="true">{ball if joints == 6 else disc}</body>
      </worldbody>
      <actuator>{motors}</actuator></mujoco>"""


class Reacher(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / (SUBSTEPS * TIMESTEP))}

    def __init__(self, joints=2, plane=False, render_mode=None, width=480, height=480, hud=False):
        """
        plane: whether the target moves, within a rectangle
        hud: whether to write step, distance and reward into the image
        """
        self.render_mode = render_mode
        self.width = width
        self.height = height
        self.hud = hud
        self.viewer = None
        self.model = mujoco.MjModel.from_xml_string(mjcf(joints, plane, width, height))
        self.data = mujoco.MjData(self.model)
        self.joints = joints
        self.plane = plane
        self.axes = 3 if joints == 6 else 2
        self.tip = self.data.site("fingertip").xpos
        self.target = self.data.mocap_pos[0]
        self.qpos = self.data.qpos
        self.qvel = self.data.qvel
        self.state = np.zeros(3 * joints + self.axes + 2 * plane)
        cuts = np.cumsum([joints, joints, joints, self.axes])
        self.sin, self.cos, self.speed, self.vector, self.velocity = np.split(self.state, cuts)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, self.state.shape, np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (joints,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        random = self.np_random
        mujoco.mj_resetData(self.model, self.data)
        self.qpos[:] = REST[self.joints] + random.uniform(-0.2, 0.2, self.joints)
        self.target[2] = HEIGHT[self.joints]
        if self.plane:
            self.target[:2] = [random.uniform(*side) for side in PLANE]
            angle = random.uniform(-np.pi, np.pi)
            speed = random.uniform(*SPEED)
            self.velocity[:] = speed * np.cos(angle), speed * np.sin(angle)
        else:  # uniformly in a ring; for 6 joints in a spherical shell, above and in front of the shoulder
            direction = random.normal(size=self.axes)
            distance = random.uniform(NEAR**self.axes, FAR**self.axes) ** (1 / self.axes)
            self.target[: self.axes] = distance * direction / np.linalg.norm(direction)
            if self.axes == 3:
                self.target[:] = abs(self.target[0]), self.target[1], abs(self.target[2]) + SHOULDER
        self.steps = 0
        self.reward = 0.0
        mujoco.mj_forward(self.model, self.data)
        return self.observe(), {"is_success": self.distance < RADIUS, "distance": self.distance}

    def observe(self):
        """Return the observation and update the distance."""
        np.sin(self.qpos, out=self.sin)
        np.cos(self.qpos, out=self.cos)
        self.speed[:] = self.qvel
        vector = self.target - self.tip
        self.vector[:] = vector[: self.axes]
        self.distance = math.sqrt(vector.dot(vector))
        return self.state.astype(np.float32)

    def step(self, action):
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, SUBSTEPS)
        if self.plane:
            self.move()
        # Update the fingertip: mj_step leaves the position before its last substep
        mujoco.mj_kinematics(self.model, self.data)
        before = self.distance
        obs = self.observe()
        close = self.distance < RADIUS
        effort = CONTROL / self.joints * float(action.dot(action))
        self.reward = PROGRESS * (before - self.distance) - effort + BONUS * close
        self.steps += 1
        return obs, self.reward, False, False, {"is_success": close, "distance": self.distance}

    def move(self):
        """Move the target straight ahead. It bounces off the edges of its rectangle."""
        for i, (low, high) in enumerate(PLANE):
            place = self.target[i] + SUBSTEPS * TIMESTEP * self.velocity[i]
            if not low <= place <= high:
                place = 2 * (low if place < low else high) - place
                self.velocity[i] *= -1
            self.target[i] = place

    def render(self):
        if self.viewer is None:
            choose_gl()
            # Unlike mujoco.Renderer, it chooses the OpenGL backend now, and not at its import
            from gymnasium.envs.mujoco.mujoco_rendering import OffScreenViewer

            self.viewer = OffScreenViewer(self.model, self.data, self.width, self.height)
        self.viewer.make_context_current()  # another env may have rendered since
        picture = np.ascontiguousarray(self.viewer.render("rgb_array", camera_id=0))
        if self.hud:
            from PIL import Image, ImageDraw

            image = Image.fromarray(picture)
            text = f"step {self.steps}   distance {100 * self.distance:.1f} cm   reward {self.reward:.2f}"
            ImageDraw.Draw(image).text(
                (8, 6), text, fill="black", font_size=max(10, self.width // 30)
            )
            picture = np.array(image)
        return picture

    def close(self):
        self.viewer = None
