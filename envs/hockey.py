"""Laser hockey (martius-lab/hockey-env), the opponent inside, as a gymnasium env: LaserHockey-v0.

    pip install --no-deps git+https://github.com/martius-lab/hockey-env.git

It is not on PyPI. Its setup asks for box2d-py, which has no wheels for a current Python; what it needs is among the
pinned packages already, so it is installed without dependencies.

    --env-kwargs '{"mode": "shooting", "weak_opponent": false, "touch": 0.1}'

What is different here:
 - Actions are choices: back, nothing, forward along x and y, and as a turn; and whether to shoot.
 - Observations are single precision, each number about as large as 1: places by half the field, speeds by 10, the
   puck's by 25, the time left to hold the puck by its 15 steps.
 - Rewards: 10 and -10 for a goal, and, weighted, what the game only tells in infos: `closeness` to a puck that comes
   (the game's own reward has it once), a `touch`, the puck's `direction`. A touch counts little: puck and player can
   meet again and again.
 - The time limit is a truncation; in the game it is an end. `is_success`: the game was won.
 - Chance is the env's own: seeds, who begins, and the opponent's, which draws from numpy's global generator. An episode
   begins the same wherever it is begun from.
"""

import gymnasium as gym
import numpy as np

HALF, TURN, SPEED, PUCK, HOLD = (5.0, 4.0), np.pi / 3, 10.0, 25.0, 15.0
PLAYER = (*HALF, TURN, SPEED, SPEED, SPEED)
SCALE = 1 / np.array([*PLAYER, *PLAYER, *HALF, PUCK, PUCK, HOLD, HOLD])
CHOICES = [np.array([-1.0, 0.0, 1.0])] * 3 + [np.array([0.0, 1.0])]
MISSING = "laser hockey is not installed: pip install --no-deps git+https://github.com/martius-lab/hockey-env.git"


class Hockey(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    observation_space = gym.spaces.Box(-np.inf, np.inf, SCALE.shape, np.float32)
    action_space = gym.spaces.MultiDiscrete([len(values) for values in CHOICES])

    def __init__(self, mode="normal", weak_opponent=True, closeness=1.0, touch=0.1, direction=1.0, render_mode=None):
        try:
            from hockey import hockey_env
        except ImportError:
            raise ImportError(MISSING) from None
        modes = {name.lower().removeprefix("train_"): one for name, one in hockey_env.Mode.__members__.items()}
        if mode not in modes:
            raise ValueError(f"mode {mode!r}: there are {', '.join(modes)}")
        self.render_mode, self.closeness, self.touch, self.direction = render_mode, closeness, touch, direction
        chance = np.random.get_state()
        # Not by gym.make: its entry names a module that is gone. And the mode as it is: a number would be no mode.
        self.game = hockey_env.HockeyEnv_BasicOpponent(mode=modes[mode], weak_opponent=weak_opponent)
        np.random.set_state(chance)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        seed, one_starting = int(self.np_random.integers(2**31)), bool(self.np_random.integers(2))
        self.game.opponent.phase = self.np_random.uniform(0, np.pi)
        self.chance = np.random.RandomState(seed).get_state()  # the opponent's
        self.game.player1_has_puck = self.game.player2_has_puck = 0  # the game forgets to
        obs, _ = self.game.reset(one_starting, seed=seed)  # without a seed it would take one from nowhere
        return self._see(obs), {}

    def step(self, action):
        game_action = np.array([values[choice] for values, choice in zip(CHOICES, action, strict=True)], np.float32)
        chance = np.random.get_state()
        np.random.set_state(self.chance)
        try:
            obs, reward, done, _, info = self.game.step(game_action)
        finally:
            self.chance = np.random.get_state()
            np.random.set_state(chance)
        reward += (self.closeness - 1) * info["reward_closeness_to_puck"]  # it has it once
        reward += self.touch * info["reward_touch_puck"] + self.direction * info["reward_puck_direction"]
        scored = info["winner"] != 0
        infos = {"is_success": info["winner"] == 1} if done else {}
        return self._see(obs), float(reward), bool(done and scored), bool(done and not scored), infos

    def render(self):
        return self.game.render("rgb_array")

    def close(self):
        self.game.close()

    def _see(self, obs):
        return (np.asarray(obs) * SCALE).astype(np.float32)
