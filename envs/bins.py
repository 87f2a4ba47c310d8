"""Continuous actions as discrete ones: each action dimension is divided into `args.bins` values.

    envs, how = make_envs(args, seed)       as in envs.make, but without continuous actions

Each dimension becomes a discrete branch with args.bins actions, evenly spaced from the lowest value to the highest.
An odd number of bins includes the middle.
"""

import gymnasium as gym
import numpy as np

import envs.make


def make_envs(args, seed, video=None):
    """Return a vector env with discrete actions and a description of it."""
    inner, how = envs.make.make_envs(args, seed, video)
    if not isinstance(inner.single_action_space, gym.spaces.Box):
        return inner, how
    try:
        binned = Binned(inner, args.bins, args.env_id)
    except BaseException:
        inner.close()
        raise
    return binned, f"{how}, {args.bins} bins per action dimension"


class Binned:
    """A vector env with discrete actions around one with continuous actions. Other attributes are those of `inner`."""

    def __init__(self, inner, bins, name):
        space = inner.single_action_space
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(
                f"{name} has actions without bounds: ppo_continuous_multiagent.py takes them"
            )
        self.inner = inner
        self.bins = bins
        self.single_action_space = gym.spaces.MultiDiscrete([bins] * space.shape[0])
        self.values = np.linspace(space.low, space.high, bins).astype(
            space.dtype
        )  # [bin, dimension]
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
