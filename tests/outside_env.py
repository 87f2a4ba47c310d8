"""Stand-ins for envs of other packages: the same spaces and return values, without the packages."""

import sys

import gymnasium as gym
import numpy as np
import torch

from envs.tasks.dummy import DummyPixels


class Mission(gym.Space):
    """A space of texts that is not gymnasium's, as MiniGrid has one."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "get to the green goal square"

    def contains(self, x):
        return isinstance(x, str)


class Simple(gym.Env):
    """Observes two numbers. Subclasses change one thing each."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def see(self):
        return np.full(2, 0.25, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.see(), {}

    def step(self, action):
        return self.see(), 1.0, False, False, {}


class Grid(Simple):
    """As MiniGrid: a direction, a small image and a text."""

    observation_space = gym.spaces.Dict(
        {
            "direction": gym.spaces.Discrete(4),
            "image": gym.spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "mission": Mission(),
        }
    )
    action_space = gym.spaces.Discrete(7)

    def see(self):
        image = np.arange(7 * 7 * 3, dtype=np.uint8).reshape(7, 7, 3)
        return {"direction": 2, "image": image, "mission": "get to the green goal square"}


class OnlyText(Simple):
    observation_space = Mission()


class Endless(Simple):
    """Has an observation without a fixed size."""

    observation_space = gym.spaces.Dict({"list": gym.spaces.Sequence(gym.spaces.Discrete(3))})


class Objectives(Simple):
    """As MO-Gymnasium: a vector of rewards."""

    def __init__(self, declared=False):
        if declared:
            self.reward_space = gym.spaces.Box(0, 2, (2,), np.float32)

    def step(self, action):
        return self.see(), np.array([1.0, 2.0]), False, False, {}


class FirstReward(gym.RewardWrapper):
    """Chooses one of several rewards."""

    def reward(self, reward):
        return reward[0]


class RewardInArray(Simple):
    """Returns the reward as an array of shape (1,)."""

    def step(self, action):
        return self.see(), np.array([1.5], np.float32), False, False, {}


class OldStep(Simple):
    """Returns four values, as envs of the old gym."""

    def step(self, action):
        return self.see(), 1.0, False, {}


class OldReset(Simple):
    """Returns no info, as envs of the old gym. The observation has two numbers and can be unpacked."""

    def reset(self, *, seed=None, options=None):
        return self.see()


class OldResetWithoutSeed(Simple):
    def reset(self):
        return self.see()


class WrongShape(Simple):
    """Returns one number where its space has two: numpy would copy it into both."""

    def see(self):
        return np.zeros(1, np.float32)


class LateSlip(Simple):
    """Returns something else than gymnasium's API has in its third step: a value of an episode that ends there."""

    def __init__(self, **slip):
        self.slip = slip
        self.count = 0

    def step(self, action):
        self.count += 1
        values = {"obs": self.see(), "reward": 1.0, "terminated": False, "info": {}}
        if self.count == 3:
            values |= {"terminated": "info" in self.slip} | self.slip
        return values["obs"], values["reward"], values["terminated"], False, values["info"]


class LateSlipParts(LateSlip):
    """The same, with an observation by name."""

    observation_space = gym.spaces.Dict({"vector": Simple.observation_space})

    def see(self):
        return {"vector": super().see()}


class Asserts(Simple):
    """Fails without a message, as a Fetch env does with a version of MuJoCo that it does not support."""

    def __init__(self, env_id=None, id=None):
        self.env_id = env_id
        self.id = id
        assert env_id is not None


class Starts(Simple):
    """Starts where the options of the reset say."""

    x = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = (options or {}).get("x", 0.0)
        return self.see(), {}

    def see(self):
        return np.full(2, self.x, np.float32)


class StartsPixels(DummyPixels):
    """Shows a brightness that the options of the reset give."""

    def reset(self, *, seed=None, options=None):
        self.brightness = (options or {}).get("brightness", 0)
        return super().reset(seed=seed)

    def _image(self, dot):
        return np.full_like(self.canvas, self.brightness)


class Words(DummyPixels):
    """Gives its reward as text."""

    def step(self, action):
        return self.canvas, "1.0", False, False, {}


class ExhaustsPixels(DummyPixels):
    """Has not enough memory for a step."""

    def step(self, action):
        raise MemoryError


class QuitsPixels(DummyPixels):
    """Ends the program in its first step, as if all were well."""

    def step(self, action):
        sys.exit(0)


class BreaksPixels(DummyPixels):
    """Raises a ValueError of Python's own."""

    def step(self, action):
        return int("x")


class Valve(Simple):
    """Wants the action 170 of 100 to 200."""

    action_space = gym.spaces.Box(100, 200, (1,), np.float32)

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.see(), -abs(float(action[0]) - 170) / 10, False, False, {}


class Dimensions(Simple):
    """Returns the sum of actions with very different bounds."""

    action_space = gym.spaces.Box(
        np.array([-0.4, 100, -np.inf, -1, 0], np.float32),
        np.array([0.4, 200, 5, 1, 1e-3], np.float32),
    )

    def step(self, action):
        return self.see(), float(np.sum(action)), False, False, {}


class Levels(Simple):
    """Has whole numbers from 0 to 255 as actions."""

    action_space = gym.spaces.Box(0, 255, (2,), np.uint8)

    def step(self, action):
        assert action.dtype == np.uint8
        return self.see(), float(action[0]), False, False, {}


class Breaks(Simple):
    """Raises a ValueError of Python's own after some steps."""

    def __init__(self, steps=20):
        self.steps = [steps]

    def step(self, action):
        self.steps[0] -= 1
        return self.see(), float(np.sqrt(1)) if self.steps[0] else int("x"), False, False, {}


class Quits(Breaks):
    """Ends the program after some steps, as if all were well."""

    def step(self, action):
        self.steps[0] -= 1
        if not self.steps[0]:
            sys.exit(0)
        return self.see(), 1.0, False, False, {}


class Exhausts(Breaks):
    """Has not enough memory after some steps: without a message, or with that of numpy or torch."""

    def __init__(self, steps=20, how=None):
        super().__init__(steps)
        self.how = how

    def step(self, action):
        self.steps[0] -= 1
        if not self.steps[0]:
            if self.how == "numpy":
                np.empty(2**55)
            if self.how == "torch":
                torch.empty(2**55)
            raise MemoryError
        return self.see(), 1.0, False, False, {}


class LosesPipe(Breaks):
    """Loses the connection to a program of its own after some steps."""

    def step(self, action):
        self.steps[0] -= 1
        if not self.steps[0]:
            raise BrokenPipeError("the simulator is gone")
        return self.see(), 1.0, False, False, {}


class Wide(Simple):
    """Has more observations than the memory holds for a rollout."""

    observation_space = gym.spaces.Box(-1, 1, (2_000_000,), np.float32)

    def see(self):
        return np.zeros(2_000_000, np.float32)


class Stripes(gym.Env):
    """Shows an image of 8 x 12 pixels: the left half is black, the right half is white."""

    observation_space = gym.spaces.Box(0, 255, (8, 12, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._image(), {}

    def step(self, action):
        return self._image(), 0.0, False, False, {}

    def _image(self):
        image = np.zeros((8, 12, 3), np.uint8)
        image[:, 6:] = 255
        return image


class Various(Simple):
    """Observes and takes what the spaces say, with random values."""

    def __init__(self, observation, action):
        self.observation_space = observation
        self.action_space = action

    def see(self):
        return self.observation_space.sample()

    def step(self, action):
        space = self.action_space
        if isinstance(space, gym.spaces.Box) and space.is_bounded():
            assert space.contains(np.asarray(action, space.dtype)), action
        elif not isinstance(space, gym.spaces.Box):
            assert space.contains(action), action
        return self.see(), 1, False, False, {}


class PlainNumbers(Simple):
    """Observes a number of Python's own in place of an array of shape (1,)."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def see(self):
        return 0.5


NUMBERS = gym.spaces.Box(-1, 1, (3,), np.float32)
ONE = gym.spaces.Box(-1, 1, (1,), np.float32)
VARIOUS = {
    "Tuple": (gym.spaces.Tuple([NUMBERS, gym.spaces.Discrete(3)]), ONE),
    "Text": (gym.spaces.Dict({"numbers": NUMBERS, "text": gym.spaces.Text(4)}), ONE),
    "Double": (gym.spaces.Box(-1, 1, (3,), np.float64), gym.spaces.Box(-1, 1, (2,), np.float64)),
    "Bool": (gym.spaces.MultiBinary(5), ONE),
    "Bytes": (gym.spaces.Box(0, 255, (128,), np.uint8), ONE),
    "Unbounded": (NUMBERS, gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)),
    "Start": (NUMBERS, gym.spaces.Discrete(3, start=-1)),
    "Table": (NUMBERS, gym.spaces.MultiDiscrete([[2, 3], [4, 5]])),
}
for label, (observation, action) in VARIOUS.items():
    kwargs = {"observation": observation, "action": action}
    gym.register(f"Various{label}-v0", Various, kwargs=kwargs, max_episode_steps=5)
gym.register("VariousAutoreset-v0", lambda: gym.wrappers.Autoreset(Simple()), max_episode_steps=5)
gym.register("VariousEndless-v0", Simple)
gym.register("LateSlip-v0", LateSlip, disable_env_checker=True)
gym.register("LateSlipParts-v0", LateSlipParts, disable_env_checker=True)

for kind in (
    Grid, OnlyText, Endless, Objectives, RewardInArray, OldStep, OldReset, OldResetWithoutSeed, WrongShape, Asserts,
    PlainNumbers, Starts, Valve, Dimensions, Levels, Breaks, Quits, LosesPipe, Exhausts,
    Wide, Stripes,
):  # fmt: skip
    gym.register(f"{kind.__name__}-v0", kind, max_episode_steps=5)
gym.register("OneObjective-v0", lambda: FirstReward(Objectives(declared=True)))
for kind in (StartsPixels, Words, ExhaustsPixels, QuitsPixels, BreaksPixels):
    gym.register(f"{kind.__name__}-v0", kind, kwargs={"size": 36}, max_episode_steps=5)
