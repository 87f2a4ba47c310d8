"""Laser hockey (martius-lab/hockey-env) against its built-in opponent, as the gymnasium env LaserHockey-v0.

    pip install --no-deps git+https://github.com/martius-lab/hockey-env.git

The package is not on PyPI. It declares box2d-py, which has no wheels for a current Python, as a dependency. Everything
it needs is among this project's pinned packages, so install it without dependencies.

    --env-kwargs '{"mode": "shooting", "weak_opponent": false, "touch": 0.1}'

Differences from the package:
 - Actions are discrete: -1, 0 or 1 along x, along y and as a turn; and whether to shoot.
 - Observations are float32 and scaled to about 1: positions by half of the field, speeds by 10, the puck's by 25, the
   time left to hold the puck by its 15 steps.
 - Rewards: 10 and -10 for a goal, plus weighted terms that the game reports in its infos: `closeness` to an approaching
   puck (the game's own reward contains it once), a `touch`, and the puck's `direction`. The weight of a touch is small,
   because puck and player can touch repeatedly.
 - The time limit is a truncation; in the package it is a termination. `is_success` is True if the game was won.
 - All randomness comes from the env's seed: the start, the side that starts, and the opponent, which draws from numpy's
   global generator. The start of an episode does not depend on earlier episodes.
"""

import gymnasium as gym
import numpy as np

# Scales of the observation: positions, angles, speeds, the puck's speed, steps that a player can hold the puck
HALF = (5.0, 4.0)
TURN = np.pi / 3
SPEED = 10.0
PUCK = 25.0
HOLD = 15.0
PLAYER = (*HALF, TURN, SPEED, SPEED, SPEED)
SCALE = 1 / np.array([*PLAYER, *PLAYER, *HALF, PUCK, PUCK, HOLD, HOLD])
ACTION_VALUES = [np.array([-1.0, 0.0, 1.0])] * 3 + [np.array([0.0, 1.0])]
MISSING = "laser hockey is not installed: pip install --no-deps git+https://github.com/martius-lab/hockey-env.git"


class Hockey(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    observation_space = gym.spaces.Box(-np.inf, np.inf, SCALE.shape, np.float32)
    action_space = gym.spaces.MultiDiscrete([len(values) for values in ACTION_VALUES])

    def __init__(
        self,
        mode="normal",
        weak_opponent=True,
        closeness=1.0,
        touch=0.1,
        direction=1.0,
        render_mode=None,
    ):
        """
        mode: normal, shooting or defense
        closeness, touch, direction: weights of the reward terms
        """
        try:
            from hockey import hockey_env
        except ImportError:
            raise ImportError(MISSING) from None
        modes = {
            name.lower().removeprefix("train_"): one
            for name, one in hockey_env.Mode.__members__.items()
        }
        if mode not in modes:
            raise ValueError(f"mode {mode!r} is unknown: choose one of {', '.join(modes)}")
        self.render_mode = render_mode
        self.closeness = closeness
        self.touch = touch
        self.direction = direction
        global_random = np.random.get_state()
        # Not with gym.make, whose entry point names a missing module. The mode must be an enum: a number fails.
        self.game = hockey_env.HockeyEnv_BasicOpponent(
            mode=modes[mode], weak_opponent=weak_opponent
        )
        np.random.set_state(global_random)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31))
        one_starting = bool(self.np_random.integers(2))
        self.game.opponent.phase = self.np_random.uniform(0, np.pi)
        self.opponent_random = np.random.RandomState(seed).get_state()
        # The game does not reset these two
        self.game.player1_has_puck = 0
        self.game.player2_has_puck = 0
        obs, _ = self.game.reset(one_starting, seed=seed)  # without a seed it would be random
        return self._scale(obs), {}

    def step(self, action):
        values = [values[i] for values, i in zip(ACTION_VALUES, action, strict=True)]
        game_action = np.array(values, np.float32)
        global_random = np.random.get_state()
        np.random.set_state(self.opponent_random)
        try:
            obs, reward, done, _, info = self.game.step(game_action)
        finally:
            self.opponent_random = np.random.get_state()
            np.random.set_state(global_random)
        reward += (self.closeness - 1) * info[
            "reward_closeness_to_puck"
        ]  # the game's reward contains it once
        reward += (
            self.touch * info["reward_touch_puck"] + self.direction * info["reward_puck_direction"]
        )
        scored = info["winner"] != 0
        infos = {"is_success": info["winner"] == 1} if done else {}
        return (
            self._scale(obs),
            float(reward),
            bool(done and scored),
            bool(done and not scored),
            infos,
        )

    def render(self):
        return self.game.render("rgb_array")

    def close(self):
        self.game.close()

    def _scale(self, obs):
        return (np.asarray(obs) * SCALE).astype(np.float32)
