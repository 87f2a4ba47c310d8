"""Files of torch that other people may have written: they are read without running code, and take no more memory than
their size."""

import stat
import zipfile
from contextlib import suppress

import torch

MAX_DEPTH = 50  # of dicts and lists inside of each other


def read(path):
    """Return the content of a file that torch.save wrote, without running code. Its size is bounded by that of the
    file."""
    incomplete = f"{path} is not a checkpoint, or is incomplete"
    with suppress(OSError):
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device may have no end
            raise ValueError(f"{path} is not a regular file: give a checkpoint")
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such checkpoint") from None
    except Exception:
        raise ValueError(incomplete) from None

    # torch does not compress, so what is larger than the file was made to fill the memory
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(incomplete)
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(incomplete)
    if size > free_memory():
        raise ValueError(f"{path} does not fit into the free memory: it has {size:,} bytes")

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        fits = is_bounded(state, size)
    except MemoryError:
        raise
    except Exception:
        raise ValueError(incomplete) from None
    if not fits:
        raise ValueError(f"{path} is not a valid checkpoint: it is larger than its file")
    return state


def free_memory():
    """Return the bytes of free memory, or infinity where this is not known. Only Linux is checked."""
    try:
        with open("/proc/meminfo") as file:
            available = next(line for line in file if line.startswith("MemAvailable"))
    except OSError:
        return float("inf")
    return 1024 * int(available.split()[1])


def is_bounded(state, size):
    """Return whether the content of a checkpoint is not larger than its file, which has `size` bytes.

    A few bytes can describe more: a tensor whose elements share memory, or lists that contain each other many times.
    """
    count = 0
    num_bytes = 0
    level = [state]
    for _ in range(MAX_DEPTH):
        inner = []
        for x in level:
            if isinstance(x, dict):
                inner += [*x.keys(), *x.values()]
            elif isinstance(x, (list, tuple, set)):
                inner += x
            elif isinstance(x, torch.Tensor):
                if x.layout != torch.strided or x.device.type != "cpu" or x.is_quantized:
                    return False
                num_bytes += x.numel() * x.element_size()
                if x.numel() * x.element_size() > x.untyped_storage().nbytes():
                    return False
            if len(inner) > size:
                return False
        count += len(inner)
        if count > size or num_bytes > 4 * size:
            return False
        if not inner:
            return True
        level = inner
    return False
