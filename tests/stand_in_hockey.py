"""A stand-in for martius-lab/hockey-env 2.6, for tests where it is not installed.

It has the interface and the pitfalls of the game and hardly any physics: a drifting puck and two players.
"""

from enum import Enum

import gymnasium as gym
import numpy as np


class Mode(Enum):
    NORMAL = 0
    TRAIN_SHOOTING = 1
    TRAIN_DEFENSE = 2


class BasicOpponent:
    def __init__(self, weak=True):
        self.weak = weak
        self.phase = np.random.uniform(0, np.pi)  # numpy's global generator

    def act(self, obs):
        self.phase += np.random.uniform(0, 0.2)
        return np.array([np.sin(self.phase), np.cos(self.phase), 0, 1])


class HockeyEnv_BasicOpponent(gym.Env):
    def __init__(self, mode=Mode.NORMAL, weak_opponent=False):
        self.mode = mode
        self.opponent = BasicOpponent(weak_opponent)
        self.one_starts = True
        self.player1_has_puck = self.player2_has_puck = 0
        self.action_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.reset(True)

    def reset(self, one_starting=None, mode=None, seed=None, options=None):
        if mode is not None:
            raise TypeError("hasattr(): attribute name must be string")
        self.np_random, _ = gym.utils.seeding.np_random(seed)  # random without a seed
        assert self.mode in Mode, "the mode must be an enum"
        self.one_starts = one_starting if one_starting is not None else not self.one_starts
        self.max_timesteps = 250 if self.mode == Mode.NORMAL else 80
        self.time = 0
        self.winner = 0
        self.one = np.zeros(6)
        self.two = np.zeros(6)
        self.one[0] = -3.0
        self.two[0] = 3.0
        side = -1 if self.one_starts else 1
        self.puck = np.array(
            [side * self.np_random.uniform(1, 2), self.np_random.uniform(-1, 1), 0.0, 0.0]
        )
        return self._obs(), {}

    def _obs(self):
        return np.hstack(
            [self.one, self.two, self.puck, [self.player1_has_puck, self.player2_has_puck]]
        )  # float64

    def step(self, action):
        actions = np.hstack([np.clip(action, -1, 1), self.opponent.act(self._obs())])
        self.one[:3] += 0.05 * actions[:3]
        self.two[:3] += 0.05 * actions[4:7]
        self.player1_has_puck = (
            15 if self.player1_has_puck == 0 and abs(self.one[0] - self.puck[0]) < 0.5 else 0
        )
        self.puck[2] = 0.8 * self.puck[2] + 0.4 * actions[3] - 0.1 * actions[7]
        self.puck[:2] += 0.02 * self.puck[2:]
        self.winner = 1 if self.puck[0] > 4 else -1 if self.puck[0] < -4 else 0
        done = (
            bool(self.winner) or self.time >= self.max_timesteps
        )  # the time limit is reported as an end
        self.time += 1
        info = {
            "winner": self.winner,
            "reward_closeness_to_puck": -0.01 * abs(self.one[0] - self.puck[0]),
        }
        info |= {
            "reward_touch_puck": float(self.player1_has_puck == 15),
            "reward_puck_direction": 0.01 * self.puck[2],
        }
        return self._obs(), 10.0 * self.winner + info["reward_closeness_to_puck"], done, False, info

    def render(self, mode="human"):
        return np.zeros((480, 600, 3), np.uint8)

    def close(self):
        pass
