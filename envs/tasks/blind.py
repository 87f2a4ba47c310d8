"""CartPole without velocities: balancing it needs memory of earlier observations."""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class CartPoleBlind(CartPoleEnv):
    """CartPole whose observations are the cart's position and the pole's angle."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.observation_space = gym.spaces.Box(
            self.observation_space.low[::2], self.observation_space.high[::2]
        )

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs[::2], info

    def step(self, action):
        obs, *rest = super().step(action)
        return np.ascontiguousarray(obs[::2]), *rest
