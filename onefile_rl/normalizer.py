"""Running mean and variance, to normalize observations and rewards."""

import torch
import torch.nn as nn

from onefile_rl import distributed


class Normalizer(nn.Module):
    """Running mean and variance in double precision, kept as buffers: they are saved and loaded with their module.

    `shape` is the shape of one row. `min_std` is the smallest standard deviation that `forward` divides by.
    """

    def __init__(self, *shape, min_std=0.0):
        super().__init__()
        self.min_std = min_std
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        # What `forward` uses: the mean and 1 / std in single precision
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x):
        return ((x - self.shift) * self.scale).clamp(-10.0, 10.0)

    def update(self, batch):
        """Add the rows of `batch`, of all ranks, to the statistics."""
        batch_mean, batch_var, batch_count = distributed.moments(batch)
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
        self.scale.copy_(torch.rsqrt((self.var + 1e-8).clamp(min=self.min_std**2)))
