"""Signals that end a run: the first one lets the iteration finish, the second one stops at once."""

import signal

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


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
