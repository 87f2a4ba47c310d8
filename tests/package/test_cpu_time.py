"""onefile_rl/cpu_time.py counts the CPU time of the process and of its descendants."""

import os
import signal
import subprocess
import sys
import time

import pytest

from onefile_rl import cpu_time

BUSY = """
import time
while time.process_time() < {seconds}:
    pass
print("done", flush=True)
{after}
"""


def busy(seconds, after=""):
    return [sys.executable, "-c", BUSY.format(seconds=seconds, after=after)]


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(cpu_time, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(cpu_time, "SCAN_SHARE", float("inf"))
    return cpu_time.CpuClock()


def test_own_time_counts_and_sleep_does_not(clock):
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    working = clock.seconds()
    assert working >= 0.3
    time.sleep(0.5)
    assert clock.seconds() < working + 0.4


def test_ended_children_count(clock):
    subprocess.run(busy(0.5), check=True, capture_output=True)
    assert clock.seconds() >= 0.45


@pytest.mark.skipif(sys.platform != "linux", reason="running children are counted on Linux only")
def test_running_children_and_their_children_count(clock):
    """A player runs until the end of training."""
    inner = busy(0.4, "import time; time.sleep(600)")
    outer = f"import subprocess; subprocess.Popen({inner!r}).wait()"
    process = subprocess.Popen(busy(0.4, outer), stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout.readline() == b"done\n"
        assert clock.seconds() >= 0.35, "of the child"
        assert process.stdout.readline() == b"done\n"
        both = clock.seconds()
        assert both >= 0.75, "of the child and its child"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert clock.seconds() >= both, "nothing is lost when they end"


def test_a_clock_starts_at_zero_and_never_goes_back(clock, monkeypatch):
    assert cpu_time.CpuClock().seconds() < 0.3, "what was used before is not counted"
    values = iter([9.0, 5.0, 10.0])
    monkeypatch.setattr(clock, "total", lambda: clock.start + next(values))
    assert [clock.seconds() for _ in range(3)] == [9, 9, 10]
