"""The messages of a game after decoding, the same for all engines.

unity.py and godot.py decode the bytes of their engines into these types. vec_env.py turns them into the return values
of gymnasium's interface.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass
class Layout:
    """Observations and actions of the agents of one behavior.

    Attributes:
        sensors: one entry per sensor, in the engine's order: the size of a vector, the name of an image
        vector_size: the sum of the sizes of all vectors
        images: from the name of each image to its shape (height, width, channels)
        continuous: the number of continuous actions
        branches: the number of options of each discrete action
    """

    sensors: list[int | str]
    vector_size: int
    images: dict[str, tuple[int, int, int]]
    continuous: int
    branches: list[int]


class End(NamedTuple):
    """The end of an agent's episode.

    Attributes:
        agent: the id of the agent
        reward: the reward of its last decision
        truncated: whether the engine interrupted the episode, as at a time limit
        observation: the final observation, an array for "vector" and for each image; None if the game did not send it
        success: whether the episode was a success; None if the game did not say so
    """

    agent: int
    reward: float
    truncated: bool
    observation: dict[str, np.ndarray] | None
    success: bool | None = None


class Message(NamedTuple):
    """One message of a game, restricted to the agents that are trained.

    Attributes:
        ends: the episodes that ended; they ended before the decisions below were requested
        agents: the ids of the agents that request a decision, empty if there is none
        rewards: the rewards of the last decisions of `agents`
        observations: an array for "vector" and for each image, with one row for each of `agents`
        action_masks: one row for each of `agents`, True where a discrete action is allowed; None if all are allowed
        statistics: from the name of a statistic to pairs of a value and how to aggregate the values of one step:
            "average", "sum", "most_recent" or "histogram"
    """

    ends: list[End]
    agents: list[int]
    rewards: np.ndarray | None
    observations: dict[str, np.ndarray]
    action_masks: np.ndarray | None
    statistics: dict[str, list[tuple[float, str]]]
