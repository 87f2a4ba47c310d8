"""Environments: vector envs for the scripts, and bundled tasks, Unity scenes and Godot scenes.

Importing this package registers the bundled gymnasium envs.
"""

import os

import gymnasium as gym

from envs.rendering import load_triton

if os.environ.get("MUJOCO_GL"):  # newer versions of Mesa load their LLVM when MuJoCo is imported
    load_triton()

gym.register(
    "Reacher2Dof-v0", "envs.tasks.reacher:Reacher", kwargs={"joints": 2}, max_episode_steps=100
)
gym.register(
    "Reacher3Dof-v0", "envs.tasks.reacher:Reacher", kwargs={"joints": 3}, max_episode_steps=100
)
gym.register(
    "Reacher6Dof-v0", "envs.tasks.reacher:Reacher", kwargs={"joints": 6}, max_episode_steps=100
)
gym.register(
    "ReacherPlane-v0",
    "envs.tasks.reacher:Reacher",
    kwargs={"joints": 2, "plane": True},
    max_episode_steps=100,
)
gym.register("CartPoleBlind-v0", "envs.tasks.blind:CartPoleBlind", max_episode_steps=500)
gym.register("LaserHockey-v0", "envs.tasks.hockey:Hockey")
for name, kwargs in {
    "": {},
    "Discrete": {"actions": "discrete"},
    "MultiDiscrete": {"actions": "multidiscrete"},
    "Dict": {"vector": True},
}.items():
    gym.register(
        f"DummyPixels{name}-v0", "envs.tasks.dummy:DummyPixels", kwargs=kwargs, max_episode_steps=50
    )
