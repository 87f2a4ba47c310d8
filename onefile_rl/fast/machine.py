"""Threads, memory, and metrics that stay tensors until the end of an iteration."""

import ctypes
import os
import shutil
import sys

import torch

THREADS = torch.get_num_threads()  # the number of cores, or OMP_NUM_THREADS


def threads(work):
    """Return how many threads to use for matrix products with `work` outputs. Small ones are faster in one thread."""
    return 1 if work < 2**17 else THREADS


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
            columns.setdefault(name, []).append(torch.as_tensor(x))
    scalars = {
        name: torch.stack(x).double().mean().item()
        for name, x in columns.items()
        if x[0].numel() == 1
    }
    return scalars | {name: x[-1] for name, x in columns.items() if name not in scalars}


def compiler():
    """Return whether there is a C++ compiler, which torch.compile needs."""
    return any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")))
