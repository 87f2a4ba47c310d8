"""The messages of a game after decoding, the same for all engines.

unity.py and godot.py decode the bytes of their engines into these types. vec_env.py turns them into the return values
of gymnasium's interface.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass
class Layout:
    """Observations and actions of the agents of one behavior.

    Attributes:
        sensors: one entry per sensor, in the engine's order: the size of a vector, the shape (rows, size) of a sensor
            of two dimensions, the name of an image
        vector_size: the sum of the sizes of all vectors
        images: from the name of each image to its shape (height, width, channels)
        continuous: the number of continuous actions
        branches: the number of options of each discrete action
        entities: from the name of each sensor whose rows are entities to its first column in the vector, the number of
            rows and their size; unused rows are zeros
    """

    sensors: list[int | tuple[int, int] | str]
    vector_size: int
    images: dict[str, tuple[int, int, int]]
    continuous: int
    branches: list[int]
    entities: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class End(NamedTuple):
    """The end of an agent's episode.

    Attributes:
        agent: what identifies the agent in its player: its id, with its behavior if several are trained
        reward: the reward of its last decision
        truncated: whether the engine interrupted the episode, as at a time limit
        observation: the final observation, an array for "vector" and for each image; None if the game did not send it
        success: whether the episode was a success; None if the game did not say so
    """

    agent: int | str
    reward: float
    truncated: bool
    observation: dict[str, np.ndarray] | None
    success: bool | None = None


class Message(NamedTuple):
    """One message of a game, restricted to the agents that are trained.

    Attributes:
        ends: the episodes that ended; they ended before the decisions below were requested
        agents: the agents that request a decision, identified as in End; empty if there is none
        rewards: the rewards of the last decisions of `agents`
        observations: an array for "vector" and for each image, with one row for each of `agents`
        action_masks: one row for each of `agents`, True where a discrete action is allowed; None if all are allowed
        statistics: from the name of a statistic to pairs of a value and how to aggregate the values of one step:
            "average", "sum", "most_recent" or "histogram"
    """

    ends: list[End]
    agents: list[int] | list[str]
    rewards: np.ndarray | None
    observations: dict[str, np.ndarray]
    action_masks: np.ndarray | None
    statistics: dict[str, list[tuple[float, str]]]
