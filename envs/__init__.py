"""Bundled environments: a player that speaks ML-Agents' protocol, and its scenes; arms that reach, as gymnasium envs."""

import gymnasium as gym

SCENES = ("3DBall", "Crawler", "Mixed")
"""ids of the bundled scenes"""

gym.register("Reacher2Dof-v0", "envs.reacher:Reacher", kwargs={"joints": 2}, max_episode_steps=100)
gym.register("Reacher3Dof-v0", "envs.reacher:Reacher", kwargs={"joints": 3}, max_episode_steps=100)
gym.register("Reacher6Dof-v0", "envs.reacher:Reacher", kwargs={"joints": 6}, max_episode_steps=100)
gym.register("ReacherPlane-v0", "envs.reacher:Reacher", kwargs={"joints": 2, "plane": True}, max_episode_steps=100)


def cheap(model):
    """A MuJoCo model without shadows, multisampling and reflections, before its first picture: without a GPU they take nearly all of the time."""
    model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
    model.mat_reflectance[:] = 0
