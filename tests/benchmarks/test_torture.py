"""benchmarks/torture.py with real runs, and with a script that loses decisions and leaves things over."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def torture(*args):
    command = [sys.executable, ROOT / "benchmarks" / "torture.py", "--minutes", "0.1", *args]
    out = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=400)
    return out.returncode, out.stdout + out.stderr


def events(out):
    """Return the numbers of the table by incident: events, survived, lost, left over, skipped."""
    rows = re.findall(r"^(.+?) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", out, re.MULTILINE)
    return {name: [*map(int, numbers)] for name, *numbers in rows}


def test_nothing_is_lost_or_left_over():
    code, out = torture("--runs", "gym", "veteran", "--only", "kill -9", "SIGTERM", "player killed")
    assert code == 0 and "Lost: nothing" in out and "Left over: nothing" in out, out
    assert events(out) == {
        "SIGTERM": [2, 2, 0, 0, 0],
        "kill -9": [1, 1, 0, 0, 0],
        "player killed": [2, 2, 0, 0, 0],
    }


def test_losses_and_leftovers_are_reported(tmp_path):
    """With a copy that does not save at an orderly end, and leaves a process and a file over."""
    script = ROOT / "ppo_continuous_multiagent.py"
    doctored = """
import subprocess, tempfile
exit = runs.Run.__exit__

def forget(self, *error):
    subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tempfile.mkstemp()
    self.snapshot = None
    exit(self, *error)

runs.Run.__exit__ = forget
end_iteration = runs.Run.end_iteration
runs.Run.end_iteration = lambda self: None if self.stop else end_iteration(self)


if __name__ == "__main__":"""
    text, found = re.subn(r'\nif __name__ == "__main__":', lambda _: doctored, script.read_text())
    assert found == 1
    (tmp_path / script.name).write_text(text)
    code, out = torture("--script", tmp_path / script.name, "--runs", "gym", "--only", "SIGTERM")
    assert code == 1 and events(out) == {"SIGTERM": [1, 0, 1, 1, 0]}, out
    assert re.search(r"gym, SIGTERM: \d+ decisions: \d+ made, \d+ kept", out), out
    assert (
        re.search(r"gym, SIGTERM: process \d+, sleep 300", out)
        and "gym, SIGTERM: temporary file tmp" in out
    ), out


def test_the_same_seed_gives_the_same_incidents(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import itertools
    import random

    import torture as tool

    first, again, other = (
        [*itertools.islice(tool.plan(random.Random(seed), tool.INCIDENTS), 50)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {(name, incident[0]) for name, visit in first for incident in visit} == {
        (name, what) for name, incidents in tool.INCIDENTS.items() for what in incidents
    }
