"""Bundled environments: a player that speaks ML-Agents' protocol, and its scenes; as gymnasium envs, arms that reach
and a task in pixels."""

import os
import sys

import gymnasium as gym

SCENES = ("3DBall", "Basic", "Crawler", "GridWorld", "Hallway", "Mixed", "MixedDiscrete", "PushBlock")
"""ids of the bundled scenes"""
GODOT_SCENES = ("GodotDiscs", "GodotRover")
"""and of those that a Godot runs"""

gym.register("Reacher2Dof-v0", "envs.reacher:Reacher", kwargs={"joints": 2}, max_episode_steps=100)
gym.register("Reacher3Dof-v0", "envs.reacher:Reacher", kwargs={"joints": 3}, max_episode_steps=100)
gym.register("Reacher6Dof-v0", "envs.reacher:Reacher", kwargs={"joints": 6}, max_episode_steps=100)
gym.register("ReacherPlane-v0", "envs.reacher:Reacher", kwargs={"joints": 2, "plane": True}, max_episode_steps=100)
gym.register("CartPoleBlind-v0", "envs.blind:CartPoleBlind", max_episode_steps=500)
gym.register("LaserHockey-v0", "envs.hockey:Hockey")
for name, kwargs in {
    "": {},
    "Discrete": {"actions": "discrete"},
    "MultiDiscrete": {"actions": "multidiscrete"},
    "Dict": {"vector": True},
}.items():
    gym.register(f"DummyPixels{name}-v0", entry_point="envs.dummy:DummyPixels", kwargs=kwargs, max_episode_steps=50)


def engine(args):
    """The game engine that the scripts' arguments ask for, if any."""
    if args.godot_path or (args.env_id in GODOT_SCENES and not args.unity_path):
        return "Godot"
    return "Unity" if args.unity_path or args.env_id in SCENES else None


class EngineError(RuntimeError):
    """What runs the envs is gone or makes no sense: the base of what a Unity player and a worker raise."""


NEEDS_GL = "needs OpenGL, on Debian and Ubuntu: apt-get install libegl1 libgl1"


def choose_gl():
    """Before the first picture, best before MuJoCo is imported: without a display it can draw through EGL, and SDL, for
    gymnasium's classic envs, into memory."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def cheap(model):
    """A MuJoCo model without shadows, multisampling and reflections, before its first picture: without a GPU they take
    nearly all of the time."""
    model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
    model.mat_reflectance[:] = 0
