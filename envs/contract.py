"""What gymnasium's API expects from an env, and messages for envs that return something else.

As long as an env keeps to the API, only `step` runs at every step, and `check_observation` and `read_success` once or
twice per episode.
"""

import inspect
from pathlib import Path

import gymnasium as gym
import numpy as np

STEP = "observation, reward, terminated, truncated, info"
ADD_UP = "add up its parts in a wrapper, see docs/environments.md"
ADAPT = "adapt it in a module of your own, see docs/environments.md"
# The wrappers of gym.make, which return rewards as they are
NEUTRAL_WRAPPERS = (
    gym.wrappers.OrderEnforcing,
    gym.wrappers.PassiveEnvChecker,
    gym.wrappers.TimeLimit,
)
LIBRARIES = (str(Path(gym.__file__).parent), str(Path(__file__).parent))


def name(env):
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def shape(value):
    """Return a short description of a value: its type, and the shape of an array."""
    kind = type(value).__name__
    return f"{kind} of shape {value.shape}" if isinstance(value, np.ndarray) else kind


def raised_by_env(error):
    """Return whether the env's own code raised an exception, and not gymnasium's wrappers or this package."""
    traceback = error.__traceback__
    while traceback.tb_next:
        traceback = traceback.tb_next
    return not traceback.tb_frame.f_code.co_filename.startswith(LIBRARIES)


def explain_reset(env, error):
    """Raise an error that says what the reset returned, if that is not what gymnasium expects."""
    if raised_by_env(error):
        return
    base = env.unwrapped
    parameters = inspect.signature(base.reset).parameters
    has_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [p for p in ("seed", "options") if p not in parameters and not has_any]
    if missing:
        raise ValueError(
            f"{name(env)}: reset has no argument {missing[0]}, gymnasium's API has seed and options: {ADAPT}"
        )
    try:
        result = base.reset(seed=0)
    except Exception:
        return
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"{name(env)}: reset returned {describe(result)}, expected 2 values (observation, info): {ADAPT}"
        )


def step(env, action):
    """Step an env, and return its observation, reward, terminated, truncated and info. The reward is a float, and
    terminated and truncated are bools."""
    try:
        observation, reward, terminated, truncated, info = env.step(action)
    except (TypeError, ValueError) as error:
        explain_step(env, action, error)
        raise
    if type(reward) is not float:
        reward = to_number(env, reward)
    if type(terminated) is not bool:
        terminated = to_flag(env, "terminated", terminated)
    if type(truncated) is not bool:
        truncated = to_flag(env, "truncated", truncated)
    return observation, reward, terminated, truncated, info


def explain_step(env, action, error):
    """Raise an error that says what the step returned, if that is not what gymnasium expects."""
    if raised_by_env(error):
        return
    try:
        result = env.unwrapped.step(action)
    except Exception:
        return
    if not (isinstance(result, tuple) and len(result) == 5):
        raise ValueError(
            f"{name(env)}: step returned {describe(result)}, expected 5 values ({STEP}): {ADAPT}"
        )


def describe(result):
    if isinstance(result, tuple):
        return f"{len(result)} values ({', '.join(map(shape, result))})"
    return f"one value ({shape(result)})"


def to_number(env, reward):
    """Return a reward that is not a float as one. An array with one element is a number too, a text is none."""
    if isinstance(reward, (int, np.number)):
        try:
            return float(reward)
        except OverflowError:
            raise ValueError(f"{name(env)}: the reward is too large for a float: {ADAPT}") from None
    array = np.asarray(reward)
    if array.size == 1 and array.dtype.kind in "biuf":
        return float(array.item())
    fix = ADD_UP if array.size > 1 else ADAPT
    given = repr(reward)[:60] if isinstance(reward, (str, bytes)) else shape(reward)
    raise ValueError(f"{name(env)}: the reward is {given}, expected a number: {fix}")


def to_flag(env, what, value):
    """Return `terminated` or `truncated` as a bool. The text "False" would count as true."""
    if isinstance(value, np.bool_):
        return bool(value)
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "biuf":
        return bool(array.item())
    given = repr(value)[:60] if isinstance(value, (str, bytes)) else shape(value)
    raise ValueError(f"{name(env)}: {what} is {given}, expected True or False: {ADAPT}")


def read_success(env, info):
    """Return whether an episode that ended was a success, or None if its info does not say so."""
    if not isinstance(info, dict):
        raise ValueError(f"{name(env)}: the info is {shape(info)}, expected a dict: {ADAPT}")
    if "is_success" not in info:
        return None
    success = info["is_success"]
    array = np.asarray(success)
    if array.size != 1 or array.dtype.kind not in "biuf":
        wrong = f"is_success in the info is {shape(success)}"
        raise ValueError(f"{name(env)}: {wrong}, expected True or False: {ADAPT}")
    return array.item()


def check_reward_space(env):
    """Raise an error if the env declares several rewards, as MO-Gymnasium's envs do, and no wrapper combines them."""
    layer = env
    while isinstance(layer, NEUTRAL_WRAPPERS):
        layer = layer.env
    space = None if isinstance(layer, gym.Wrapper) else getattr(layer, "reward_space", None)
    if isinstance(space, gym.spaces.Box) and space.shape not in ((), (1,)):
        raise ValueError(
            f"{name(env)}: the reward is a vector of shape {space.shape}, expected a number: {ADD_UP}"
        )


def check_observation(env, observation):
    """Raise an error if an observation does not have the shape that its space says."""
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict):  # images and a vector, by name
        if not isinstance(observation, dict):
            wrong = f"the observation is {shape(observation)}, its space is a dict"
            raise ValueError(f"{name(env)}: {wrong}: correct the env's observation_space")
        for key, part in space.spaces.items():
            check_shape(env, f"observation {key}", observation.get(key), part.shape)
    else:
        check_shape(env, "observation", observation, space.shape)


def check_shape(env, what, value, expected):
    if value is None:
        raise ValueError(
            f"{name(env)}: the {what} is None, its space has shape {expected}: correct the env's step and reset"
        )
    array = np.asarray(value)
    if array.dtype.kind in "US":
        raise ValueError(
            f"{name(env)}: the {what} has text, its space has numbers: correct the env's step and reset"
        )
    actual = array.shape
    if actual != expected and (actual, expected) != ((), (1,)):  # a plain number is a vector of one
        raise ValueError(
            f"{name(env)}: the {what} has shape {actual}, its space has {expected}: correct the env's observation_space"
        )
