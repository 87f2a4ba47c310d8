"""The end of a wait for a player or a process, when a signal has asked the run to stop.

The first signal lets the iteration finish. An iteration does not finish while a player or a process does not answer, so
code that waits for one calls `check_stop` several times a second: it ends a wait that still lasts a second after the
signal.
"""

import time

STOP_SECONDS = 1.0  # how long a wait continues after the first signal
stop_times = []  # when a signal asked the run to stop, as time.monotonic()


def note_stop():
    """Note that the run was asked to stop."""
    stop_times.append(time.monotonic())


def check_stop(started):
    """Raise KeyboardInterrupt if the run was asked to stop more than a second ago, and the wait that began at `started`
    lasts longer than that too."""
    if stop_times and time.monotonic() > max(stop_times[0], started) + STOP_SECONDS:
        raise KeyboardInterrupt
