"""Small deterministic tasks whose episodes end in both ways: registered as parity_env:Parity-v0 and, seen as images,
parity_env:ParityPixels-v0."""

import gymnasium as gym
import numpy as np

from envs.dummy import DummyPixels


class Parity(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 3)
        return self.x.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float32)), "actions arrive clipped"
        a, b = np.asarray(action, float)
        push, noise = np.array([0.5 * a, 0.3 * b, 0.2 * a * b + 0.1]), self.np_random.standard_normal(3)
        self.x = 0.9 * self.x + push + 0.05 * noise
        reward = float(1 + 3 * self.x[0] - self.x[1] ** 2)
        return self.x.astype(np.float32), reward, bool(abs(self.x[0]) > 0.9), False, {}


class OneStep(gym.Env):
    """One step, reward 1, then the time limit. The state goes on: its value is 1 / (1 - gamma), not 1."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}


class Nested(Parity):
    """The same task seen as a Dict within a Dict."""

    observation_space = gym.spaces.Dict(
        {
            "body": gym.spaces.Dict({"x": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)}),
            "z": gym.spaces.Box(-np.inf, np.inf, (1,), np.float32),
        }
    )

    def _see(self, obs):
        return {"body": {"x": obs[:2]}, "z": obs[2:]}

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self._see(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self._see(obs), *rest


class BadReward(Parity):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float("nan"), *rest


class Unbounded(Parity):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Square(gym.Env):
    """Actions that are a matrix; the reward is the sum of its diagonal."""

    observation_space = gym.spaces.Box(-1, 1, (2, 2), np.float32)
    action_space = gym.spaces.Box(-9, 9, (2, 2), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((2, 2), np.float32), {}

    def step(self, action):
        return np.zeros((2, 2), np.float32), float(np.trace(action)), False, False, {}


class Branches(Parity):
    """Choices in the place of numbers."""

    action_space = gym.spaces.MultiDiscrete([3, 2])

    def step(self, action):
        push, noise = np.array([action[0] - 1, action[1] - 0.5, 0.3]), self.np_random.standard_normal(3)
        self.x = 0.9 * self.x + 0.4 * push + 0.05 * noise
        reward = float(1 + 3 * self.x[0] - self.x[1] ** 2)
        return self.x.astype(np.float32), reward, bool(abs(self.x[0]) > 0.55), False, {}


class MaskedBranches(Branches):
    """Where it may go depends on where it is."""

    def action_masks(self):
        """As sb3-contrib asks for them: of all branches, one after another."""
        left, right = self.x[0] > -0.3, self.x[0] < 0.3
        return np.array([left, True, right, self.x[1] > -0.2, self.x[1] <= 0.2])

    def step(self, action):
        assert all(self.action_masks()[[action[0], 3 + action[1]]]), "nothing forbidden arrives"
        return super().step(action)


class Masked(MaskedBranches):
    action_space = gym.spaces.Discrete(3)

    def action_masks(self):
        return super().action_masks()[:3]

    def step(self, action):
        assert self.action_masks()[action], "nothing forbidden arrives"
        return Branches.step(self, np.array([action, 1]))


class ParityPixels(DummyPixels):
    """The dot's task, which also ends at the left edge."""

    def step(self, action):
        if self.actions == "continuous":
            assert self.action_space.contains(np.asarray(action, np.float32)), "actions arrive clipped"
        obs, reward, terminated, *rest = super().step(action)
        return obs, reward, terminated or self.x < 6, *rest


class Counting(DummyPixels):
    """Episodes of ten numbers, one a step and image, the next episode's ten after the last's."""

    def reset(self, **kwargs):
        self.number = self.number // 10 * 10 + 10 if hasattr(self, "number") else 0
        return super().reset(**kwargs)

    def step(self, action):
        self.number += 1
        obs, reward, *_ = super().step(action)
        return obs, reward, self.number % 20 == 9, self.number % 20 == 19, {}

    def _image(self, dot):
        return np.full_like(self.canvas, self.number % 250)


class Dies(DummyPixels):
    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        return 1 // (self.steps < 50) and super().step(action)


gym.register("Parity-v0", Parity, max_episode_steps=7)
gym.register("Branches-v0", Branches, max_episode_steps=7)
gym.register("Masked-v0", Masked, max_episode_steps=7)
gym.register("MaskedBranches-v0", MaskedBranches, max_episode_steps=7)
gym.register("OneStep-v0", OneStep, max_episode_steps=1)
gym.register("Nested-v0", Nested, max_episode_steps=7)
gym.register("BadReward-v0", BadReward, max_episode_steps=15)
gym.register("Square-v0", Square, max_episode_steps=7)
gym.register("Unbounded-v0", Unbounded, max_episode_steps=7)
for kind in ("", "Discrete", "MultiDiscrete"):
    kwargs = {"actions": kind.lower() or "continuous", "size": 36}
    gym.register(f"ParityPixels{kind}-v0", ParityPixels, kwargs=kwargs, max_episode_steps=7)
gym.register("ParityPixelsDict-v0", ParityPixels, kwargs={"vector": True, "size": 36}, max_episode_steps=7)
gym.register("Counting-v0", Counting, kwargs={"size": 36})
gym.register("Dies-v0", Dies, kwargs={"size": 36})
gym.register("Tiny-v0", DummyPixels, kwargs={"size": 20})
