"""Environment parameters: numbers, and samplers that draw a number for each episode.

    uniform(0.5, 10)                    between two numbers
    gaussian(1, 0.2)                    with this mean and standard deviation
    multirangeuniform(0, 1, 4, 6)       in one of several ranges, with a probability proportional to its length

These are ML-Agents' samplers. A parameter is a number or the text of a sampler, for example "uniform(0.5, 10)".
"""

import math
import re
import struct
import zlib
from typing import NamedTuple

import numpy as np

from onefile_rl.engines.scenes import derive_seed

KINDS = ("uniform", "gaussian", "multirangeuniform")  # in the order of their numbers in messages
EXAMPLES = "give a number, uniform(MIN, MAX), gaussian(MEAN, STD) or multirangeuniform(MIN, MAX, MIN, MAX, ...)"
FLOAT = 0  # types of a parameter in messages
SAMPLER = 1


class Sampler(NamedTuple):
    """A distribution. Its text can be parsed again."""

    kind: str
    numbers: tuple[float, ...]

    def __str__(self):
        numbers = ", ".join(repr(x).removesuffix(".0") for x in self.numbers)
        return f"{self.kind}({numbers})"

    @property
    def ranges(self):
        """The ranges of multirangeuniform, as pairs of lowest and highest value."""
        return list(zip(self.numbers[::2], self.numbers[1::2], strict=True))

    def draw(self, rng):
        """Return one number. `rng` is a numpy generator."""
        if self.kind == "gaussian":
            return float(rng.normal(*self.numbers))
        if self.kind == "uniform":
            return float(rng.uniform(*self.numbers))
        lengths = np.array([high - low for low, high in self.ranges])
        total = lengths.sum()
        shares = lengths / total if total else np.full(len(lengths), 1 / len(lengths))
        return float(rng.uniform(*self.ranges[rng.choice(len(shares), p=shares)]))


def parse(value):
    """Return a parameter as a float or a Sampler. A ValueError says what is wrong with it."""
    if isinstance(value, Sampler):
        return make(value.kind, value.numbers)
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", value)
        if found:
            return make(found[1], [to_float(word) for word in found[2].split(",")])
        return to_float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(EXAMPLES)
    return to_float(value)


def make(kind, numbers):
    """Return a Sampler if its numbers are valid."""
    if kind not in KINDS:
        raise ValueError(f"there is no sampler {kind}: {EXAMPLES}")
    if len(numbers) < 2 or len(numbers) % 2 or (kind != "multirangeuniform" and len(numbers) > 2):
        some = "pairs of numbers" if kind == "multirangeuniform" else "two numbers"
        raise ValueError(f"{kind} takes {some}: {EXAMPLES}")
    sampler = Sampler(kind, tuple(map(to_float, numbers)))
    if kind == "gaussian" and sampler.numbers[1] < 0:
        raise ValueError(f"{sampler}: the standard deviation must not be negative")
    if kind != "gaussian":
        for low, high in sampler.ranges:
            if low > high:
                raise ValueError(f"{sampler}: {low:g} is above {high:g}, give the smaller first")
    return sampler


def to_float(x):
    """Return a number that fits into the message of a player."""
    try:
        number = float(x)
    except OverflowError:  # an integer
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(EXAMPLES) from None
    if not math.isfinite(number) or abs(number) > 1e30:
        raise ValueError("must be a finite number")
    return number


def sampler_seed(seed, name, count=0):
    """Return the seed of a parameter's sampler: parameters of one player must not draw the same numbers.

    seed: of the player or env. count: how often the player was given another sampler before
    """
    return derive_seed(seed, zlib.crc32(name.encode()) + 1_000_003 * count)


class Stream:
    """A sampler and its random numbers."""

    def __init__(self, sampler, seed):
        self.sampler = sampler
        self.rng = np.random.default_rng(seed)

    def draw(self):
        return self.sampler.draw(self.rng)


class Parameters(dict):
    """The parameters that a player was sent, by name: floats and Streams."""

    def get(self, name, default=None):
        """Return a number. A sampler draws a new one in each call, as Unity's GetWithDefault does."""
        value = super().get(name, default)
        return value.draw() if isinstance(value, Stream) else value

    def read(self, payload):
        """Read a message of the side channel for environment parameters."""
        size = int.from_bytes(payload[:4], "little")
        name = payload[4 : 4 + size].decode()
        (kind,) = struct.unpack_from("<i", payload, 4 + size)
        rest = payload[8 + size :]
        if kind == FLOAT:
            (self[name],) = struct.unpack("<f", rest)
        elif kind == SAMPLER:
            seed, sampler = struct.unpack_from("<ii", rest)
            rest = rest[8:]
            if KINDS[sampler] == "multirangeuniform":
                rest = rest[4:]  # the number of floats
            numbers = struct.unpack(f"<{len(rest) // 4}f", rest)
            self[name] = Stream(make(KINDS[sampler], numbers), seed)


def per_agent(parameters, name, default, agents):
    """Return the parameter `name` for each of several agents that start an episode, as an array."""
    return np.array([parameters.get(name, default) for _ in agents], float)
