"""Entities: the rows of Unity's BufferSensors, of which an agent observes a varying number. Attention reads them.

An observation is one vector, and spec["entities"] says which of its columns are entities: (first column, rows, size)
for each sensor. A row of zeros is padding, and every other row is an entity: the sensor fills the rows that it does not
use with zeros, and does not send how many it uses. An entity whose numbers are all exactly 0 can't be told apart from
padding, so give every entity a number that is never 0.

    Entities(spec)      (batch, obs_dim) to (batch, num_features): the other columns, and `UNITS` numbers per sensor
"""

import math

import torch
import torch.nn as nn

UNITS = 64  # size of an entity's embedding
HEADS = 4  # of the attention


def num_features(spec):
    """Return the number of inputs of the network behind the entities. Without entities these are all columns."""
    entities = spec.get("entities", [])
    num_entity_columns = sum(rows * size for _, rows, size in entities)
    return spec["obs_dim"] - num_entity_columns + UNITS * len(entities)


def is_entity_column(spec):
    """Return a list with True for each column of the observation that belongs to an entity."""
    columns = [False] * spec["obs_dim"]
    for first, rows, size in spec.get("entities", []):
        columns[first : first + rows * size] = [True] * (rows * size)
    return columns


def is_traced(x):
    """Return whether this call is recorded, to be compiled, exported or translated to numpy: its shapes must not depend
    on values."""
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return recorded or not isinstance(x, torch.Tensor)


def count_used(rows):
    """Return the number of rows up to the last one that any agent of the batch uses, at least 1."""
    used = (rows != 0).any(2).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1


class Entities(nn.Module):
    """Replace the entities of each sensor by one vector, to which their order and the padding make no difference."""

    def __init__(self, spec):
        super().__init__()
        self.columns = [slice(first, first + rows * size) for first, rows, size in spec["entities"]]

        # The columns between and beside the entities: what the agent observes of itself
        is_entity = is_entity_column(spec)
        starts = [i for i, x in enumerate(is_entity) if not x and (i == 0 or is_entity[i - 1])]
        ends = [i + 1 for i, x in enumerate(is_entity) if not x and (is_entity + [True])[i + 1]]
        self.own_columns = [slice(*ends) for ends in zip(starts, ends, strict=True)]
        num_own = is_entity.count(False)
        self.attention = nn.ModuleList(
            Attention(rows, size, num_own) for _, rows, size in spec["entities"]
        )

    def forward(self, x):
        parts = [x[:, columns] for columns in self.own_columns]
        own = torch.cat(parts, 1) if parts else None
        features = [] if own is None else [own]
        for columns, attention in zip(self.columns, self.attention, strict=True):
            features.append(attention(x[:, columns], own))
        return torch.cat(features, 1)


class Attention(nn.Module):
    """Self-attention among entities, then their mean: (batch, rows * size) to (batch, UNITS).

    Padding is left out: nothing attends to it, and the mean is that of the entities. Without any entity it is 0. `own`
    is what the agent observes of itself, which is embedded together with each entity.
    """

    def __init__(self, rows, size, num_own):
        super().__init__()
        self.rows = rows
        self.size = size
        self.embed = nn.Linear(size, UNITS)
        self.embed_own = nn.Linear(num_own, UNITS, bias=False) if num_own else None
        self.activation = nn.SiLU()
        self.norm = nn.LayerNorm(UNITS)
        self.query_key_value = nn.Linear(UNITS, 3 * UNITS)
        self.output = nn.Linear(UNITS, UNITS)
        self.output_norm = nn.LayerNorm(UNITS)

    def forward(self, entities, own):
        rows = entities.reshape(-1, self.rows, self.size)
        num_rows = self.rows
        if not is_traced(rows):
            num_rows = count_used(rows)
            rows = rows[:, :num_rows]
        is_there = (rows.abs().amax(2, True) > 0).float()  # (batch, rows, 1)

        # Embed. Layers get one row per entity
        x = self.embed(rows.reshape(-1, self.size)).reshape(-1, num_rows, UNITS)
        if own is not None:
            x = x + self.embed_own(own)[:, None]
        x = self.norm(self.activation(x)).reshape(-1, UNITS)

        # Attend to the entities, in each head
        heads = self.query_key_value(x).reshape(-1, num_rows, 3 * HEADS, UNITS // HEADS)
        heads = heads.transpose(1, 2)
        query, key, value = heads[:, :HEADS], heads[:, HEADS:-HEADS], heads[:, -HEADS:]
        scores = query @ key.transpose(2, 3) / math.sqrt(UNITS // HEADS)
        scores = scores + (is_there.transpose(1, 2)[:, None] - 1.0) * 1e8
        attended = (scores.softmax(3) @ value).transpose(1, 2).reshape(-1, UNITS)
        x = self.output_norm(x + self.output(attended)).reshape(-1, num_rows, UNITS)

        # Mean over the entities
        return (x * is_there).sum(1) / is_there.sum(1).clamp(1.0, float(num_rows))
