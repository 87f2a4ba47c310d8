"""Actions with a continuous and a discrete part, as rows of numbers.

A row has the continuous actions first, then the choice of each branch, counted from 0. The scripts and the vector envs
that they use exchange such rows, whatever the env itself calls its parts and however it nests them.
"""

import itertools
import math

import gymnasium as gym
import numpy as np


class HybridSpace(gym.Space):
    """Rows of continuous actions and choices.

    continuous: the Box of the continuous actions, a vector
    branches: the number of choices of each branch
    """

    def __init__(self, continuous, branches):
        self.continuous = continuous
        self.branches = list(branches)
        super().__init__((continuous.shape[0] + len(self.branches),), np.float32)

    def split(self, rows):
        """Return the continuous actions and the choices of one row, or of an array of rows."""
        num_continuous = self.continuous.shape[0]
        return rows[..., :num_continuous], rows[..., num_continuous:].astype(int)

    def __repr__(self):
        return f"{self.continuous} and branches of {self.branches}"


class HybridActions(gym.ActionWrapper):
    """Takes rows as actions of an env with a Dict or Tuple of Boxes and discrete spaces."""

    def __init__(self, env):
        super().__init__(env)
        low = []
        high = []
        branches = []
        for space in parts(env.action_space):
            if isinstance(space, gym.spaces.Box):
                low.append(space.low.ravel())
                high.append(space.high.ravel())
            else:
                branches += branch_sizes(space)
        low = np.concatenate(low).astype(np.float32)
        high = np.concatenate(high).astype(np.float32)
        self.action_space = HybridSpace(gym.spaces.Box(low, high), branches)

    def action(self, row):
        continuous, choices = self.action_space.split(row)
        return join(self.env.action_space, iter(continuous), iter(choices))


def is_hybrid(space):
    """Return whether an action space is a Dict or Tuple with at least one Box and one discrete part, and nothing
    else."""
    if not isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return False
    boxes = [isinstance(part, gym.spaces.Box) for part in parts(space)]
    discrete = (gym.spaces.Discrete, gym.spaces.MultiDiscrete)
    choices = [isinstance(part, discrete) for part in parts(space)]
    return any(boxes) and any(choices) and sum(boxes) + sum(choices) == len(boxes)


def parts(space):
    """Return the spaces in a nested space, in its order."""
    if isinstance(space, gym.spaces.Dict):
        nested = space.spaces.values()
    elif isinstance(space, gym.spaces.Tuple):
        nested = space.spaces
    else:
        return [space]
    return [part for inner in nested for part in parts(inner)]


def branch_sizes(space):
    """Return the number of choices of each branch of a discrete space."""
    sizes = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
    return np.ravel(sizes).tolist()


def join(space, continuous, choices):
    """Return an action of a nested space, from iterators over its continuous actions and its choices."""
    if isinstance(space, gym.spaces.Dict):
        return {name: join(part, continuous, choices) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(join(part, continuous, choices) for part in space.spaces)
    if isinstance(space, gym.spaces.Discrete):
        return space.start + next(choices)
    rest = continuous if isinstance(space, gym.spaces.Box) else choices
    values = np.array([*itertools.islice(rest, math.prod(space.shape))]).reshape(space.shape)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return (values + space.start).astype(space.dtype)
    if space.dtype.kind in "iu":
        values = np.rint(values)
    # Bounds in single precision may be a little beyond those of the space
    return np.asarray(np.clip(values.astype(np.float64), space.low, space.high), space.dtype)
