"""Signals that end a run: the first one lets the iteration finish, the second one stops at once.

An iteration does not finish while a player or a process does not answer. Code that waits for one calls `check_stop`
several times a second: it ends a wait that still lasts a second after the first signal.
"""

import signal
import time

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]

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


def handle(handler):
    """Install `handler` for SIGINT, SIGTERM and SIGHUP, except for signals that are ignored, as under nohup."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def handlers():
    return {number: signal.getsignal(number) for number in SIGNALS}


def restore(handlers):
    for number, handler in handlers.items():
        signal.signal(number, handler)
