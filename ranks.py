"""Several processes that train one agent. Each has its own envs; they share what they learn.

    torchrun --nproc_per_node=2 ppo_continuous_multiagent.py --env-id Crawler

torchrun starts them, gives each its rank, and starts them again if one fails (--max-restarts). In a script:

    grad = ranks.mean(grad, rows)           of all ranks; one that has fewer rows weighs less
    mean, var, count = ranks.moments(x)     of all ranks' rows
    ranks.normalized(advantages)            as if all ranks' were one minibatch

Without torchrun there is one rank, and nothing here costs anything or changes a number.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from envs import EngineError

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PATIENCE = timedelta(minutes=float(os.environ.get("RANKS_PATIENCE_MINUTES", 20)))  # until a rank that hangs is given up
OFTEN = 0.01  # seconds between two looks at whether the others are done


class RankLost(EngineError):
    """Another rank is gone, and nobody can go on without it."""


failed = []  # why ranks can't go on together: a compiled function raises an error of its own, which does not say it


@contextlib.contextmanager
def together():
    """What all ranks do at once; it fails if one is gone."""
    try:
        yield
    except RuntimeError as error:  # gloo's and nccl's
        failed.append(f"rank {RANK}: another rank is gone or hangs ({str(error).splitlines()[0][:120]})")
        raise RankLost(failed[0]) from None


def join(device):
    """Meet the others."""
    if SIZE > 1 and not dist.is_initialized():
        if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):  # all on this machine: nobody else may listen
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        backend, more = "nccl" if device.startswith("cuda") else "gloo", {}
        with together():
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it may still know the ranks before a restart
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(host, port, SIZE, is_master=False, timeout=PATIENCE)
                attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
                more = {"store": dist.PrefixStore(attempt, store), "rank": RANK, "world_size": SIZE}
            dist.init_process_group(backend, timeout=PATIENCE, **more)


def leave():
    """Part from the others. gloo's threads let go of a tensor a moment after it was waited for, and torch does not join
    them: if the interpreter ends within that moment, they abort it."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        time.sleep(0.2)


def local(device):
    """A GPU for each rank of this machine."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and SIZE > 1 else device


# Numbers


@torch.library.custom_op("ranks::sum_", mutates_args=("x",))
def _sum(x: torch.Tensor) -> None:
    with together():
        dist.all_reduce(x)


@_sum.register_fake
def _(x):
    pass


def mean(x, rows=1.0):
    """Of all ranks' x, each weighed by its rows."""
    if SIZE == 1:
        return x
    whole = torch.cat([x.flatten() * rows, torch.as_tensor(rows, dtype=x.dtype, device=x.device).reshape(1)])
    torch.ops.ranks.sum_(whole)
    return (whole[:-1] / whole[-1]).view_as(x)


def normalized(x):
    """x as if all ranks' were one batch: without its mean, divided by its std."""
    if SIZE == 1:
        return (x - x.mean()) / (x.std() + 1e-8)
    wide = x.double()
    sums = torch.stack([wide.sum(), (wide**2).sum(), torch.full_like(wide[0], len(x))])  # in one exchange
    torch.ops.ranks.sum_(sums)
    mean, count = sums[0] / sums[2], sums[2]
    var = (sums[1] - count * mean**2).clamp(min=0) / (count - 1)
    return (x - mean.float()) / (var.sqrt().float() + 1e-8)


def moments(batch):
    """Mean, variance and number of all ranks' rows, in double precision."""
    batch = batch.double()
    if SIZE == 1:
        return batch.mean(0), batch.var(0, unbiased=False), len(batch)
    first = torch.stack([batch.sum(0), torch.full_like(batch.sum(0), len(batch))])
    torch.ops.ranks.sum_(first)
    mean, count = first[0] / first[1], first[1].flatten()[0]
    squares = ((batch - mean) ** 2).sum(0)
    torch.ops.ranks.sum_(squares)
    return mean, squares / count, count


def total(number):
    """Of all ranks' numbers."""
    if SIZE == 1:
        return number
    x = torch.tensor([number], dtype=torch.float64)
    torch.ops.ranks.sum_(x)
    return x.item()


def least(number):
    return number if SIZE == 1 else min(gathered(number))


def gathered(thing):
    """All ranks' things, in the order of the ranks."""
    if SIZE == 1:
        return [thing]
    things = [None] * SIZE
    with together():
        dist.all_gather_object(things, thing)
    return things


def same(*tensors):
    """Rank 0's, in the place of one's own."""
    if SIZE > 1:
        with together():
            for x in tensors:
                dist.broadcast(x, 0)


# Who waits for whom


class Pace:
    """Whether a rollout may end early: once this share of the ranks has finished its own."""

    def __init__(self, share):
        self.share, self.looked = share, 0.0

    def enough(self, closed, wanted, iteration):
        """Rows of this rank's. Called at each step."""
        if SIZE == 1 or self.share >= 1:
            return closed >= wanted
        key, store = f"finished/{iteration}", dist.distributed_c10d._get_default_store()
        if closed >= wanted:
            store.add(key, 1)
            return True
        if closed == 0 or time.perf_counter() < self.looked + OFTEN:
            return False
        self.looked = time.perf_counter()
        return store.add(key, 0) >= self.share * SIZE


def filled(rows, wanted):
    """The first of the rows that were wanted, and their number. If there are fewer some come twice: a batch keeps its
    shape, and weighs what it has."""
    rows = rows[:wanted]
    return np.resize(rows, wanted) if len(rows) < wanted else rows, float(len(rows))


# A job that torchrun starts again


def note():
    """Where a job's run is noted: by the id that torchrun gives the job, whatever is started again."""
    return Path("runs", f".torchrun-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}")


def begun():
    """The folder of the run that this job had begun before torchrun started it again."""
    again = SIZE > 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return note().read_text() if again and note().exists() else None


def remember(folder):
    """For begun(). None: the run has come to its end."""
    if RANK == 0 and SIZE > 1:
        if folder is None:
            note().unlink(missing_ok=True)
        elif int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
            note().write_text(str(folder))
