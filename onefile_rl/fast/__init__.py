"""Acceleration that does not change what the scripts compute. Everything here can be replaced by a plain torch line.

optimizer = fast.Adam(agent.parameters(), lr=1e-3)      torch.optim.Adam, traceable by torch.compile
update = fast.CompiledUpdate(update, args)              update itself
act = fast.Acting(agent)              agent.act, computed by numpy on a CPU
"""

from onefile_rl.fast.acting import Acting
from onefile_rl.fast.adam import Adam
from onefile_rl.fast.compiled import CompiledUpdate
from onefile_rl.fast.lstm import Unrolled, lstm
from onefile_rl.fast.machine import (
    compiler,
    detach,
    free_threads,
    keep_freed_memory,
    means,
    tensors,
    threads,
)

__all__ = [
    "Acting",
    "Adam",
    "CompiledUpdate",
    "Unrolled",
    "compiler",
    "detach",
    "free_threads",
    "keep_freed_memory",
    "lstm",
    "means",
    "tensors",
    "threads",
]


def __getattr__(name):
    """Return THREADS, the number of threads for large products. It is measured at the first use only."""
    if name == "THREADS":
        return free_threads()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
