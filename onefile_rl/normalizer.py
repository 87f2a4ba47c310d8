"""Running mean and variance, to normalize observations and rewards."""

import torch
import torch.nn as nn

from onefile_rl import distributed


class Normalizer(nn.Module):
    """Running mean and variance in double precision, kept as buffers: they are saved and loaded with their module.

    `shape` is the shape of one row. `min_std` is the smallest standard deviation that `forward` divides by.

    `entities` are the columns of a vector that are rows of entities (onefile_rl/entities.py). All rows of a sensor
    share their statistics, which are those of the rows that are not padding. They are divided by the root of their
    mean square, and not shifted: so a row of zeros stays one, and no other row becomes one.
    """

    def __init__(self, *shape, min_std=0.0, entities=()):
        super().__init__()
        self.min_std = min_std
        self.entities = [tuple(sensor) for sensor in entities]
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        # Of each column if there are entities: some rows have fewer of them
        count_shape = shape if entities else ()
        self.register_buffer("count", torch.full(count_shape, 1e-4, dtype=torch.float64))
        # What `forward` uses: the mean and 1 / std in single precision
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x):
        return ((x - self.shift) * self.scale).clamp(-10.0, 10.0)

    def update(self, batch):
        """Add the rows of `batch`, of all ranks, to the statistics."""
        moments = self.moments_with_entities if self.entities else distributed.moments
        batch_mean, batch_var, batch_count = moments(batch)
        delta = batch_mean - self.mean
        total = self.count + batch_count
        m2 = (
            self.var * self.count
            + batch_var * batch_count
            + delta**2 * self.count * batch_count / total
        )
        self.var.copy_(m2 / total)
        self.mean += delta * batch_count / total
        self.count += batch_count
        self.shift.copy_(self.mean)
        variance = self.var
        if self.entities:
            columns = self.entity_columns()
            self.shift[columns] = 0
            variance = torch.where(columns, self.var + self.mean**2, self.var)
        self.scale.copy_(torch.rsqrt((variance + 1e-8).clamp(min=self.min_std**2)))

    def entity_columns(self):
        """Return True for each column of an entity."""
        columns = torch.zeros_like(self.mean, dtype=torch.bool)
        for first, rows, size in self.entities:
            columns[first : first + rows * size] = True
        return columns

    def moments_with_entities(self, batch):
        """Return the mean, the variance and the number of rows of each column, without the padding of entities."""
        mean, var, count = distributed.moments(batch)
        count = torch.full_like(mean, count)
        for first, rows, size in self.entities:
            columns = slice(first, first + rows * size)
            entities = batch[:, columns].reshape(-1, size)
            entities = entities[(entities != 0).any(1)]
            if distributed.total(len(entities)) == 0:
                count[columns] = 0
                continue
            row_mean, row_var, row_count = distributed.moments(entities)
            mean[columns] = row_mean.repeat(rows)
            var[columns] = row_var.repeat(rows)
            count[columns] = float(row_count)
        return mean, var, count
