r"""Distributed training: several processes, called ranks, that train one agent. Each rank has its own environments.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d --rdzv-conf=store_type=file \
        --nproc_per_node=2 ppo_continuous_multiagent.py --env-id Crawler

torchrun starts the ranks, and starts them again if one fails (--max-restarts). With the options above nothing listens
for connections from other machines, see docs/cluster.md. A script uses

    distributed.average_gradients(parameters, weight)   before each optimizer step
    distributed.average_buffers(module)                 running statistics, after an update
    distributed.normalize(advantages)                   with the mean and std of all ranks
    distributed.moments(x)                              mean, variance and number of the rows of all ranks

Without torchrun there is one rank, and these functions neither cost anything nor change a number.
"""

import contextlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from onefile_rl.checkpoints import replacing
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
    """Connect to the other ranks. Ranks of a single machine listen on its loopback interface only."""
    if SIZE == 1 or dist.is_initialized():
        return
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(SIZE)
    if one_machine:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    # gloo exchanges what is in the memory of the CPU: numbers, episodes and requests to stop
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    options = {}
    with collective():
        store = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store may still have keys from before a restart: use keys of this attempt
            host = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, SIZE, is_master=False, timeout=TIMEOUT)
            attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            store = dist.PrefixStore(attempt, store)
        elif one_machine:
            store = loopback_store(int(os.environ["MASTER_PORT"]))
        if store is not None:
            options = {"store": store, "rank": RANK, "world_size": SIZE}
        dist.init_process_group(backend, timeout=TIMEOUT, **options)


def loopback_store(port):
    """Return a store for the ranks of one machine. A store that torch makes itself listens on all interfaces."""
    listener = None
    if RANK == 0:
        try:
            listener = socket.create_server(("127.0.0.1", port)).detach()
        except OSError as error:
            raise RankLost(f"rank 0 can't listen on 127.0.0.1:{port}: {error}") from None
    return dist.TCPStore(
        "127.0.0.1", port, SIZE, RANK == 0, timeout=TIMEOUT, master_listen_fd=listener
    )


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


def average_buffers(module):
    """Replace the floating-point buffers of a module, such as running statistics, by their mean over all ranks."""
    if SIZE == 1:
        return
    buffers = [x for x in module.buffers() if x.is_floating_point()]
    averaged = average(torch.cat([x.flatten() for x in buffers]))
    for x, part in zip(buffers, averaged.split([x.numel() for x in buffers]), strict=True):
        x.copy_(part.view_as(x))


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
    """Return a list with the object of each rank, in the order of the ranks.

    The object is sent as JSON, because reading that runs no code: numbers, strings, bools, None, and lists and dicts of
    these. Floats arrive exactly; tuples and arrays arrive as lists, numpy's numbers as Python's.
    """
    if SIZE == 1:
        return [thing]
    mine = torch.frombuffer(bytearray(to_json(thing)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(SIZE)]
    with collective():
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = int(max(lengths))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(SIZE)]
        dist.all_gather(texts, torch.cat([mine, mine.new_zeros(longest - len(mine))]))
    return [
        json.loads(text[: int(length)].numpy().tobytes())
        for text, length in zip(texts, lengths, strict=True)
    ]


def to_json(thing):
    """Return an object as the bytes of a JSON text."""

    def convert(x):
        if hasattr(x, "tolist"):  # numpy's numbers and arrays
            return x.tolist()
        raise TypeError(f"ranks can't exchange a {type(x).__name__}: use numbers and strings")

    return json.dumps(thing, default=convert).encode()


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
    """Return the file that names the run of this job, or None if torchrun has no folder for it.

    torchrun makes a new folder for the logs of each job on each machine, which only the user can read, and keeps it
    when it restarts the ranks: FOLDER/attempt_0/RANK/error.json.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    return error_file.parents[2] / "run.json" if len(error_file.parents) > 3 else None


def interrupted_run():
    """Return the folder of the run that this job was training before torchrun restarted the ranks, or None.

    All ranks call this. A rank on a machine that has joined the job since then gets the answer of the others.
    """
    path = note_path()
    folder = None
    if SIZE > 1 and path is not None and path.exists():
        try:
            note = json.loads(path.read_text())
            noted = str(note["folder"])
            arguments = list(map(str, note["arguments"]))
        except (OSError, ValueError, KeyError, TypeError):  # incomplete, for example
            print(f"{path} can't be read: the run that it names is not continued", flush=True)
        else:
            if arguments == sys.argv[1:]:
                folder = noted
            else:
                then = " ".join(arguments)
                print(f"{noted} is not continued, it has other arguments: {then}", flush=True)
    return next((folder for folder in gather(folder) if folder is not None), None)


def note_run(folder):
    """Note the run of this job for `interrupted_run`, on each machine. None: the run has ended."""
    if SIZE == 1 or os.environ.get("LOCAL_RANK") != "0":
        return
    path = note_path()
    note = {"folder": str(folder), "arguments": sys.argv[1:]}
    problem = "torchrun has no --log-dir"
    if path is not None:
        try:
            if folder is None:
                path.unlink(missing_ok=True)
            else:
                with replacing(path) as temporary:
                    temporary.write_text(json.dumps(note))
            return
        except OSError as error:
            problem = error
    if folder is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        print(f"The run can't be noted, a restart begins a new one: {problem}", flush=True)
