"""Repair of the folder in which torch keeps compiled code.

A compiler that is killed while it writes a library leaves a truncated file behind, and torch would fail to load it in
every later run. The same error occurs while another process still writes the file.
"""

import os
import struct
import time
from pathlib import Path

WRITING_SECONDS = 10  # a truncated file that is older than this is not being written any more


def is_truncated(path):
    """Return whether a library of Linux ends before its section headers, which are at its end."""
    with open(path, "rb") as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 64:
        return True
    if head[:5] != b"\x7fELF\x02":  # not a 64-bit library of Linux
        return False
    (start,) = struct.unpack_from("<Q", head, 40)
    entry_size, count = struct.unpack_from("<HH", head, 58)
    return start == 0 or start + entry_size * count > size


def repair():
    """Remove truncated libraries, and wait for those that are being written. Return whether there were any."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    found = False
    deadline = time.monotonic() + WRITING_SECONDS  # the time of a file may be in the future
    for path in Path(cache_dir()).rglob("*.so"):
        try:
            while is_truncated(path):
                found = True
                is_old = time.time() - path.stat().st_mtime > WRITING_SECONDS
                if is_old or time.monotonic() > deadline:
                    path.unlink()
                time.sleep(0.5)
        except OSError:  # removed, here or by another process
            pass
    return found
