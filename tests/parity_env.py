"""Small tasks for tests, for example parity_env:Parity-v0 and, with images, parity_env:ParityPixels-v0.

Most are deterministic given their seed, and their episodes are both terminated and truncated.
"""

import gymnasium as gym
import numpy as np

from envs.tasks.dummy import DummyPixels


class Parity(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 3)
        return self.x.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float32)), "actions must be clipped"
        a, b = np.asarray(action, float)
        push = np.array([0.5 * a, 0.3 * b, 0.2 * a * b + 0.1])
        noise = self.np_random.standard_normal(3)
        self.x = 0.9 * self.x + push + 0.05 * noise
        reward = float(1 + 3 * self.x[0] - self.x[1] ** 2)
        return self.x.astype(np.float32), reward, bool(abs(self.x[0]) > 0.9), False, {}


class OneStep(gym.Env):
    """One step with reward 1, then truncation. The value of a state is 1 / (1 - gamma), not 1."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}


class Nested(Parity):
    """Parity with a nested Dict observation."""

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
    """Has a matrix as action. The reward is the sum of its diagonal."""

    observation_space = gym.spaces.Box(-1, 1, (2, 2), np.float32)
    action_space = gym.spaces.Box(-9, 9, (2, 2), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((2, 2), np.float32), {}

    def step(self, action):
        return np.zeros((2, 2), np.float32), float(np.trace(action)), False, False, {}


class Branches(Parity):
    """The variant of Parity with discrete actions."""

    action_space = gym.spaces.MultiDiscrete([3, 2])

    def step(self, action):
        push = np.array([action[0] - 1, action[1] - 0.5, 0.3])
        noise = self.np_random.standard_normal(3)
        self.x = 0.9 * self.x + 0.4 * push + 0.05 * noise
        reward = float(1 + 3 * self.x[0] - self.x[1] ** 2)
        return self.x.astype(np.float32), reward, bool(abs(self.x[0]) > 0.55), False, {}


class MaskedBranches(Branches):
    """The state determines which actions are allowed."""

    def action_masks(self):
        """Return the masks of all branches side by side, as sb3-contrib expects them."""
        left = self.x[0] > -0.3
        right = self.x[0] < 0.3
        return np.array([left, True, right, self.x[1] > -0.2, self.x[1] <= 0.2])

    def step(self, action):
        assert all(self.action_masks()[[action[0], 3 + action[1]]]), "the action must be allowed"
        return super().step(action)


class Hybrid(MaskedBranches):
    """Two continuous actions and two branches with masks. The names are sorted, the discrete part comes first."""

    action_space = gym.spaces.Dict(
        {
            "gear": gym.spaces.MultiDiscrete([3, 2]),
            "steer": gym.spaces.Box(-1, 1, (2,), np.float32),
        }
    )

    def step(self, action):
        assert self.action_space.contains(action), "actions must be in their space"
        obs, reward, *rest = super().step(action["gear"])
        return obs, reward - float(np.square(action["steer"] - 0.5).sum()), *rest


class HybridTuple(Parity):
    """One choice that counts from 1, and continuous actions with far bounds."""

    action_space = gym.spaces.Tuple(
        [gym.spaces.Discrete(3, start=1), gym.spaces.Box(100, 200, (1, 2), np.float32)]
    )

    def step(self, action):
        assert self.action_space.contains(action), "actions must be in their space"
        choice, far = action
        noise = self.np_random.standard_normal(3)
        push = np.append((far[0] - 150) / 50, choice - 2)
        self.x = 0.9 * self.x + 0.4 * push + 0.05 * noise
        reward = float(1 + 3 * self.x[0] - self.x[2] ** 2)
        return self.x.astype(np.float32), reward, bool(abs(self.x[0]) > 0.9), False, {}


class HybridBinary(Hybrid):
    """Has a part that is neither continuous nor a choice."""

    action_space = gym.spaces.Dict(
        {"flags": gym.spaces.MultiBinary(2), "steer": gym.spaces.Box(-1, 1, (2,), np.float32)}
    )


class Huge(Branches):
    """Returns the huge number `value` at `step` (0: the reset) as a reward, an observation or a final observation."""

    def __init__(self, value=1e300, step=3, where="reward"):
        self.value = value
        self.at = step
        self.where = where

    def _see(self, obs, is_final=False):
        obs = obs.astype(np.float64)
        if self.t == self.at and self.where == ("final" if is_final else "observation"):
            obs[1] = self.value
        return obs

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.t = 0
        return self._see(obs), info

    def step(self, action):
        obs, reward, *_ = super().step(action)
        self.t += 1
        if self.t == self.at and self.where == "reward":
            reward = self.value
        return self._see(obs, self.t == 5), reward, self.t == 5, False, {}


class HugePixels(DummyPixels):
    """Returns a huge reward in the third step, or a huge vector with the final observation."""

    def __init__(self, where="reward"):
        super().__init__(size=36)
        position = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"image": self.observation_space, "position": position}
        )
        self.where = where

    def reset(self, **kwargs):
        self.t = 0
        image, info = super().reset(**kwargs)
        return {"image": image, "position": np.zeros(2)}, info

    def step(self, action):
        self.t += 1
        image, reward, *_ = super().step(action)
        if self.t == 3 and self.where == "reward":
            reward = 1e300
        position = np.full(2, 1e35 if self.t == 5 and self.where == "final" else 0)
        return {"image": image, "position": position}, reward, self.t == 5, False, {}


class Masked(MaskedBranches):
    action_space = gym.spaces.Discrete(3)

    def action_masks(self):
        return super().action_masks()[:3]

    def step(self, action):
        assert self.action_masks()[action], "the action must be allowed"
        return Branches.step(self, np.array([action, 1]))


class ParityPixels(DummyPixels):
    """DummyPixels whose episodes also terminate at the left edge."""

    def step(self, action):
        if self.actions == "continuous":
            assert self.action_space.contains(np.asarray(action, np.float32)), (
                "actions must be clipped"
            )
        obs, reward, terminated, *rest = super().step(action)
        return obs, reward, terminated or self.x < 6, *rest


class Counting(DummyPixels):
    """Counts steps from episode to episode and shows the number as the image. An episode has ten numbers."""

    def reset(self, **kwargs):
        self.number = self.number // 10 * 10 + 10 if hasattr(self, "number") else 0
        return super().reset(**kwargs)

    def step(self, action):
        self.number += 1
        obs, reward, *_ = super().step(action)
        return obs, reward, self.number % 20 == 9, self.number % 20 == 19, {}

    def _image(self, dot):
        return np.full_like(self.canvas, self.number % 250)


class Curriculum(Parity):
    """Parity with attributes that a training loop may change. They affect steps and resets."""

    def __init__(self):
        self.push = 0.5
        self.wind = np.zeros(3)
        self.mode = "fast"
        self.episodes = 0
        self.mass = None  # drawn once for all episodes
        self.steps = np.zeros(1)  # of all episodes, counted in place

    def reset(self, **kwargs):
        super().reset(**kwargs)
        if self.mass is None:
            self.mass = self.np_random.uniform(0.5, 1)
        self.episodes += 1
        self.x = self.x * self.push * self.mass + 0.01 * self.episodes + 0.001 * self.steps
        return self.x.astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        _, reward, terminated, truncated, info = super().step(self.push * np.asarray(action))
        self.x = self.x + self.wind + (0.0 if self.mode == "fast" else 0.02)
        return self.x.astype(np.float32), reward, terminated, truncated, info


class Tunable(Parity):
    """Parity with environment parameters: the argument `pull`, the attribute `push` and the property `drag`."""

    def __init__(self, pull=1.0, level=1):
        if level < 0:
            raise ValueError("level must be at least 0")
        self.shift = 0.1 * pull
        self.level = level
        self.push = 0.5
        self.kept = 1.0
        self.mode = "fast"

    @property
    def drag(self):
        return 1 - self.kept

    @drag.setter
    def drag(self, drag):
        self.kept = 1 - drag

    def reset(self, **kwargs):
        super().reset(**kwargs)
        self.x = self.kept * self.x * self.push + self.shift
        return self.x.astype(np.float32), {}

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(self.push * np.asarray(action))
        self.x = self.kept * self.x + self.shift
        return self.x.astype(np.float32), reward, terminated, truncated, info


class CurriculumPixels(DummyPixels):
    """DummyPixels with such attributes, observed as an image and a vector."""

    def __init__(self, **kwargs):
        super().__init__(vector=True, **kwargs)
        self.push = 0.5
        self.wind = np.zeros(3)
        self.mode = "fast"

    def step(self, action):
        slow = 1.0 if self.mode == "fast" else 0.5
        return super().step(
            np.clip(slow * self.push * action + self.wind[:2], -1, 1).astype(np.float32)
        )


class Unseeded(DummyPixels):
    """Shows noise that does not depend on the env's seed."""

    def reset(self, **kwargs):
        self.age = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.age += 1
        obs, *_ = super().step(action)
        return obs, 0.0, False, False, {}

    def _image(self, dot):
        return np.random.default_rng().integers(0, 256, self.canvas.shape, np.uint8)


class Fading(gym.Env):
    """Terminates after `length` steps and observes the number of steps."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, length=10):
        self.limits = [length]  # in a list: not an attribute that a resume restores

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.array([self.age], np.float32), {}

    def step(self, action):
        assert self.age < self.limits[0], "no step after the end"
        self.age += 1
        return np.array([self.age], np.float32), 0.0, self.age == self.limits[0], False, {}


class Dies(DummyPixels):
    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        return 1 // (self.steps < 50) and super().step(action)


gym.register("Parity-v0", Parity, max_episode_steps=7)
gym.register("Branches-v0", Branches, max_episode_steps=7)
gym.register("Masked-v0", Masked, max_episode_steps=7)
gym.register("MaskedBranches-v0", MaskedBranches, max_episode_steps=7)
gym.register("Hybrid-v0", Hybrid, max_episode_steps=7)
gym.register("HybridTuple-v0", HybridTuple, max_episode_steps=7)
gym.register("HybridBinary-v0", HybridBinary, max_episode_steps=7)
gym.register("OneStep-v0", OneStep, max_episode_steps=1)
gym.register("Nested-v0", Nested, max_episode_steps=7)
gym.register("BadReward-v0", BadReward, max_episode_steps=15)
gym.register("Huge-v0", Huge)
gym.register("HugePixels-v0", HugePixels)
gym.register("Square-v0", Square, max_episode_steps=7)
gym.register("Unbounded-v0", Unbounded, max_episode_steps=7)
for kind in ("", "Discrete", "MultiDiscrete"):
    kwargs = {"actions": kind.lower() or "continuous", "size": 36}
    gym.register(f"ParityPixels{kind}-v0", ParityPixels, kwargs=kwargs, max_episode_steps=7)
gym.register(
    "ParityPixelsDict-v0", ParityPixels, kwargs={"vector": True, "size": 36}, max_episode_steps=7
)
gym.register("Counting-v0", Counting, kwargs={"size": 36})
gym.register("Tunable-v0", Tunable, max_episode_steps=7)
gym.register("Curriculum-v0", Curriculum, max_episode_steps=7)
gym.register("CurriculumPixels-v0", CurriculumPixels, kwargs={"size": 36}, max_episode_steps=7)
gym.register("Unseeded-v0", Unseeded, kwargs={"size": 36})
gym.register("Fading-v0", Fading)
gym.register("Dies-v0", Dies, kwargs={"size": 36})
gym.register("Tiny-v0", DummyPixels, kwargs={"size": 20})
