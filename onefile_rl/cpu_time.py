"""CPU time of a run: of this process, its worker processes and its players.

Unlike wall time, it is comparable between runs on a machine that other programs use too.
"""

import os
import time

PROC = "/proc"
SCAN_SECONDS = 1.0  # at least, between two scans for child processes
SCAN_SHARE = 0.002  # of the time is spent on scans at most: they take milliseconds


class CpuClock:
    """CPU seconds of this process and its descendants since the clock was made.

    Descendants that still run are counted on Linux only. Other systems tell the time of a child
    process when it has ended. GPUs are not counted.
    """

    def __init__(self):
        self.scan_at = 0.0  # when the next scan is due
        self.of_children = 0.0
        self.latest = 0.0
        self.start = self.total()

    def seconds(self):
        """Return the CPU seconds so far. Those of child processes may be some seconds
        old."""
        self.latest = max(self.latest, self.total() - self.start)
        return self.latest

    def total(self):
        now = time.monotonic()
        if now >= self.scan_at:
            times = os.times()
            ended = times.children_user + times.children_system
            self.of_children = ended + running_descendants(os.getpid())
            took = time.monotonic() - now
            self.scan_at = now + max(SCAN_SECONDS, took / SCAN_SHARE)
        return time.process_time() + self.of_children


def running_descendants(pid):
    """Return the CPU seconds of the running descendants of a process, and of those children of them
    that have ended."""
    if not has_children():
        return 0.0
    children = {}
    ticks = {}
    for name in os.listdir(PROC) if os.path.isdir(PROC) else ():
        if not name.isdecimal():
            continue
        try:
            # The name of the program, in parentheses, can contain spaces and parentheses
            with open(f"{PROC}/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # the process has ended
            continue
        process = int(name)
        children.setdefault(int(fields[1]), []).append(process)
        ticks[process] = sum(map(int, fields[11:15]))  # user, system; both of ended children
    total = 0
    left = list(children.get(pid, ()))
    while left:
        process = left.pop()
        total += ticks[process]
        left += children.get(process, ())
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0


def has_children():
    """Return whether this process has child processes, running or ended but not yet waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    except AttributeError:  # on Windows
        pass
    return True
