"""Distributed training: several processes, called ranks, that train one agent. Each rank has its own environments.

    torchrun --nproc_per_node=2 ppo_continuous_multiagent.py --env-id Crawler

torchrun starts the ranks, and starts them again if one fails (--max-restarts). A script uses

    distributed.average_gradients(parameters, weight)   before each optimizer step
    distributed.normalize(advantages)                   with the mean and std of all ranks
    distributed.moments(x)                              mean, variance and number of the rows of all ranks

Without torchrun there is one rank, and these functions neither cost anything nor change a number.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from onefile_rl.engines.scenes import EngineError

RANK = int(os.environ.get("RANK", 0))
SIZE = int(os.environ.get("WORLD_SIZE", 1))
TIMEOUT = timedelta(
    minutes=float(os.environ.get("RANKS_PATIENCE_MINUTES", 20))
)  # after which a rank counts as lost
POLL_SECONDS = 0.01  # between two looks at how many ranks have finished their rollout

failures = []  # why ranks can't continue: an error inside a compiled function does not say it


class RankLost(EngineError):
    """Another rank has ended or hangs, and the run can't continue without it."""


@contextlib.contextmanager
def collective():
    """Turn an error of a collective operation into RankLost."""
    try:
        yield
    except RuntimeError as error:  # raised by gloo and nccl
        failures.append(
            f"rank {RANK}: another rank is gone or hangs ({str(error).splitlines()[0][:120]})"
        )
        raise RankLost(failures[0]) from None


def join(device):
    """Connect to the other ranks."""
    if SIZE == 1 or dist.is_initialized():
        return
    if os.environ.get("MASTER_ADDR") in (
        "localhost",
        "127.0.0.1",
    ):  # all ranks on this machine: listen there only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    options = {}
    with collective():
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store may still have keys from before a restart: use keys of this attempt
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, SIZE, is_master=False, timeout=TIMEOUT)
            attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            options = {"store": dist.PrefixStore(attempt, store), "rank": RANK, "world_size": SIZE}
        dist.init_process_group(backend, timeout=TIMEOUT, **options)


def leave():
    """Disconnect from the other ranks.

    gloo's threads release a tensor a moment after an operation has finished, and torch does not join these threads. If
    the interpreter ended within that moment, they would abort it.
    """
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        time.sleep(0.2)


def local_device(device):
    """Return the GPU of this rank if the device is "cuda"."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and SIZE > 1 else device


# Tensors and numbers


@torch.library.custom_op("onefile_rl::all_reduce_", mutates_args=("x",))
def all_reduce_(x: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place. A custom op, because torch.compile can't trace collectives."""
    with collective():
        dist.all_reduce(x)


@all_reduce_.register_fake
def _(x):
    pass


def average(x, weight=1.0):
    """Return the mean of a tensor over all ranks, each weighted by its `weight`."""
    if SIZE == 1:
        return x
    weight = torch.as_tensor(weight, dtype=x.dtype, device=x.device).reshape(1)
    total = torch.cat([x.flatten() * weight, weight])
    all_reduce_(total)
    return (total[:-1] / total[-1]).view_as(x)


def average_gradients(parameters, weight=1.0):
    """Replace the gradients of the parameters by their mean over all ranks.

    `weight` is the weight of this rank's gradients, for example the number of rows they were computed from. All
    gradients are exchanged as one vector.
    """
    if SIZE == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    averaged = average(torch.cat([grad.flatten() for grad in grads]), weight)
    for grad, part in zip(grads, averaged.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def normalize(x):
    """Return x with the mean 0 and the standard deviation 1 over all ranks."""
    if SIZE == 1:
        return (x - x.mean()) / (x.std() + 1e-8)
    wide = x.double()
    sums = torch.stack(
        [wide.sum(), (wide**2).sum(), torch.full_like(wide[0], len(x))]
    )  # one exchange
    all_reduce_(sums)
    count = sums[2]
    mean = sums[0] / count
    var = (sums[1] - count * mean**2).clamp(min=0) / (count - 1)
    return (x - mean.float()) / (var.sqrt().float() + 1e-8)


def moments(batch):
    """Return the mean, the variance and the number of the rows of all ranks, in double precision."""
    batch = batch.double()
    if SIZE == 1:
        return batch.mean(0), batch.var(0, unbiased=False), len(batch)
    sums = torch.stack([batch.sum(0), torch.full_like(batch.sum(0), len(batch))])
    all_reduce_(sums)
    mean = sums[0] / sums[1]
    count = sums[1].flatten()[0]
    squares = ((batch - mean) ** 2).sum(0)
    all_reduce_(squares)
    return mean, squares / count, count


def total(number):
    """Return the sum of a number over all ranks."""
    if SIZE == 1:
        return number
    x = torch.tensor([number], dtype=torch.float64)
    all_reduce_(x)
    return x.item()


def minimum(number):
    """Return the smallest of a number over all ranks."""
    return number if SIZE == 1 else min(gather(number))


def gather(thing):
    """Return a list with the object of each rank, in the order of the ranks."""
    if SIZE == 1:
        return [thing]
    things = [None] * SIZE
    with collective():
        dist.all_gather_object(things, thing)
    return things


def broadcast(*tensors):
    """Copy the tensors of rank 0 to all ranks, in place."""
    if SIZE > 1:
        with collective():
            for x in tensors:
                dist.broadcast(x, 0)


# The end of a rollout


class Pace:
    """Decide whether a rollout is complete. A slow rank may stop early once `share` of the ranks have finished."""

    def __init__(self, share):
        self.share = share
        self.last_look = 0.0

    def has_enough(self, num_rows, wanted, iteration):
        """Return whether this rank, with `num_rows` rows of `wanted`, stops collecting. Called at each step."""
        if SIZE == 1 or self.share >= 1:
            return num_rows >= wanted
        key = f"finished/{iteration}"
        store = dist.distributed_c10d._get_default_store()
        if num_rows >= wanted:
            store.add(key, 1)
            return True
        if num_rows == 0 or time.perf_counter() < self.last_look + POLL_SECONDS:
            return False
        self.last_look = time.perf_counter()
        return store.add(key, 0) >= self.share * SIZE


# A job that torchrun has started again


def note_path():
    """Return the file that names the run of this job. The job's id stays the same when torchrun restarts the ranks."""
    return Path("runs", f".torchrun-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}")


def interrupted_run():
    """Return the folder of the run that this job was training before torchrun restarted it, or None."""
    restarted = SIZE > 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return note_path().read_text() if restarted and note_path().exists() else None


def note_run(folder):
    """Note the run of this job for `interrupted_run`. None: the run has ended."""
    if RANK == 0 and SIZE > 1:
        if folder is None:
            note_path().unlink(missing_ok=True)
        elif int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
            note_path().write_text(str(folder))
