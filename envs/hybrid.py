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
        columns = range(self.action_space.shape[0])
        self.read = make_reader(
            env.action_space, iter(columns[: len(low)]), iter(columns[len(low) :])
        )

    def action(self, row):
        return self.read(row)


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


def make_reader(space, columns, branch_columns):
    """Return a function that reads an action of a nested space from a row.

    columns: an iterator over the columns of the continuous actions that are left
    branch_columns: an iterator over the columns of the choices that are left
    """
    if isinstance(space, gym.spaces.Dict):
        readers = {
            name: make_reader(part, columns, branch_columns) for name, part in space.spaces.items()
        }
        return lambda row: {name: read(row) for name, read in readers.items()}
    if isinstance(space, gym.spaces.Tuple):
        readers = [make_reader(part, columns, branch_columns) for part in space.spaces]
        return lambda row: tuple([read(row) for read in readers])

    start = getattr(space, "start", 0)
    if isinstance(space, gym.spaces.Discrete):
        column = next(branch_columns)
        return lambda row: start + int(row[column])

    is_box = isinstance(space, gym.spaces.Box)
    own = [*itertools.islice(columns if is_box else branch_columns, math.prod(space.shape))]
    own = slice(own[0], own[-1] + 1) if own else slice(0, 0)
    shape = space.shape
    dtype = space.dtype
    if not is_box:
        return lambda row: (row[own].reshape(shape).astype(dtype) + start).astype(dtype)
    if dtype == np.float32:
        return lambda row: np.array(row[own], dtype).reshape(shape)

    def read(row):
        # The bounds of the rows, in single precision, may be a little beyond those of the space
        values = row[own].reshape(shape).astype(np.float64)
        values = np.rint(values) if dtype.kind in "iu" else values
        return np.asarray(np.clip(values, space.low, space.high), dtype)

    return read
