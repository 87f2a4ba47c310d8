"""CartPole without its velocities: what it needs must be remembered. Whoever sees but the present can't balance it."""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class CartPoleBlind(CartPoleEnv):
    """The cart's place and the pole's angle."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.observation_space = gym.spaces.Box(self.observation_space.low[::2], self.observation_space.high[::2])

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs[::2], info

    def step(self, action):
        obs, *rest = super().step(action)
        return np.ascontiguousarray(obs[::2]), *rest
