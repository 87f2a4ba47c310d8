"""Threads, memory, and metrics that stay tensors until the end of an iteration."""

import ctypes
import functools
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch

MAX_THREADS = torch.get_num_threads()  # the number of cores, or OMP_NUM_THREADS
ROUNDS = 8  # measurements per number of threads


def threads(work):
    """Return how many threads to use for matrix products with `work` outputs. Small ones are faster in one thread."""
    return 1 if work < 2**17 else free_threads()


@functools.cache
def free_threads():
    """Return how many threads are fastest on this machine now, at most MAX_THREADS. It is measured once per process.

    On cores that other processes use too, threads wait for each other actively: two threads can be ten times slower
    than one. If the user sets OMP_NUM_THREADS, that number is used.
    """
    if "OMP_NUM_THREADS" in os.environ or MAX_THREADS == 1:
        return MAX_THREADS
    limit = max(1, math.ceil(min(MAX_THREADS, cpu_quota())))
    before = torch.get_num_threads()
    try:
        best = fastest(limit, time_products)
    finally:
        torch.set_num_threads(before)
    if best < limit:
        fix = "set OMP_NUM_THREADS to choose the number yourself"
        print(f"Other processes use the cores: {best} of {limit} threads; {fix}", flush=True)
    return best


def fastest(limit, measure):
    """Return the number of threads with the shortest time: 1, 2, 4, ... or `limit`. measure(n) returns seconds.

    A number is given up as soon as it has taken longer than the best number so far.
    """
    candidates = [2**i for i in range(limit.bit_length()) if 2**i < limit] + [limit]
    best = 1
    shortest = math.inf
    for n in candidates:
        total = 0.0
        for _ in range(ROUNDS):
            total += measure(n)
            if total > shortest:
                break
        if total <= shortest:
            best = n
            shortest = total
    return best


def time_products(n):
    """Return the seconds that some matrix products take with n threads, about 5 ms on one free core."""
    torch.set_num_threads(n)
    x = torch.ones(256, 256)
    x @ x  # starts the threads
    start = time.perf_counter()
    for _ in range(12):
        x @ x
    return time.perf_counter() - start


def cpu_quota(folder="/sys/fs/cgroup"):
    """Return the number of cores that the control group of a container or job may use, inf without a limit."""
    try:
        quota, period = Path(folder, "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = Path(folder, "cpu", "cpu.cfs_quota_us").read_text().strip()
            period = Path(folder, "cpu", "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return int(quota) / int(period) if quota.isdecimal() else math.inf  # "max" and -1: no limit


def keep_freed_memory(threshold, trim):
    """Let malloc keep freed memory, up to `trim` bytes in pieces of up to `threshold`, for the next update.

    Otherwise the system takes the memory back, and the next update has to get it again page by page.
    """
    if sys.platform == "linux":
        m_mmap_threshold = -3
        m_trim_threshold = -1
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, threshold)
        libc.mallopt(m_trim_threshold, trim)


def tensors(device, *arrays):
    """Return arrays, tensors, or lists of them as tensors on the device."""
    return [
        tensors(device, *x) if isinstance(x, list) else torch.as_tensor(x, device=device)
        for x in arrays
    ]


def detach(metrics):
    """Return a dict of numbers and tensors as a dict of tensors without gradients."""
    return {name: torch.as_tensor(x).detach() for name, x in metrics.items()}


def means(metrics):
    """Return the mean of each metric over a list of dicts. A tensor with several elements stays one, the last."""
    columns = {}
    for row in metrics:
        for name, x in row.items():
            if not isinstance(x, torch.Tensor):
                x = torch.as_tensor(x)
            columns.setdefault(name, []).append(x)
    scalars = {
        name: torch.stack(x).double().mean().item()
        for name, x in columns.items()
        if x[0].numel() == 1
    }
    return scalars | {name: x[-1] for name, x in columns.items() if name not in scalars}


def compiler():
    """Return whether there is a C++ compiler, which torch.compile needs."""
    return any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")))
