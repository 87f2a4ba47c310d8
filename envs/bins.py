"""Continuous actions as choices: each dimension in so many steps from its lowest to its highest value.

    envs, how = make_envs(args, seed)       as envs.vector has it; instead of continuous actions there are choices

Every dimension is a branch of its own, with args.bins choices: the first is its lowest value, the last its highest, and
an odd number has the middle too.
"""

import gymnasium as gym
import numpy as np

import envs.vector


def make_envs(args, seed, film=None):
    made, how = envs.vector.make_envs(args, seed, film)
    if not isinstance(made.single_action_space, gym.spaces.Box):
        return made, how
    try:
        made = Binned(made, args.bins, args.env_id)
    except BaseException:
        made.close()
        raise
    return made, f"{how}, {args.bins} choices a dimension"


class Binned:
    """A vector env around one with continuous actions; whatever else it has is the other's."""

    def __init__(self, inner, bins, name):
        self.inner, self.bins, space = inner, bins, inner.single_action_space
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"{name} has actions without bounds: ppo_continuous_multiagent.py takes them")
        self.single_action_space = gym.spaces.MultiDiscrete([bins] * space.shape[0])
        self.values = np.linspace(space.low, space.high, bins).astype(space.dtype)  # by choice and dimension
        self.mask = {"action_mask": np.ones((inner.num_envs, bins * space.shape[0]), bool)}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reset(self, seed):
        obs, infos = self.inner.reset(seed=seed)
        return obs, infos | self.mask

    def restore(self, state):
        obs, infos = self.inner.restore(state)
        return obs, infos | self.mask

    def step(self, actions):
        *out, infos = self.inner.step(np.take_along_axis(self.values, actions, 0))
        return *out, infos | self.mask
