"""A short torture of real runs; and one of a script that deserves it."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


def torture(*args):
    command = [sys.executable, ROOT / "benchmarks" / "torture.py", "--minutes", "0.1", *args]
    out = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=400)
    return out.returncode, out.stdout + out.stderr


def events(out):
    """By misfortune: how many there were, survived, lost something, left something behind; and were skipped."""
    rows = re.findall(r"^(.+?) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", out, re.MULTILINE)
    return {name: [*map(int, numbers)] for name, *numbers in rows}


def test_nothing_is_lost_and_nothing_stays():
    code, out = torture("--runs", "gym", "veteran", "--only", "kill -9", "SIGTERM", "player killed")
    assert code == 0 and "Lost: nothing" in out and "Left behind: nothing" in out, out
    assert events(out) == {"SIGTERM": [2, 2, 0, 0, 0], "kill -9": [1, 1, 0, 0, 0], "player killed": [2, 2, 0, 0, 0]}


def test_what_is_lost_and_what_stays_is_told(tmp_path):
    """The script, but an orderly end does not save what it has, and a process, a file and shared memory stay."""
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
settle = runs.Run.settle
runs.Run.settle = lambda self: None if self.stop else settle(self)


if __name__ == "__main__":"""
    text, found = re.subn(r'\nif __name__ == "__main__":', lambda _: doctored, script.read_text())
    assert found == 1
    (tmp_path / script.name).write_text(text)
    code, out = torture("--script", tmp_path / script.name, "--runs", "gym", "--only", "SIGTERM")
    assert code == 1 and events(out) == {"SIGTERM": [1, 0, 1, 1, 0]}, out
    assert re.search(r"gym, SIGTERM: \d+ decisions: \d+ made, \d+ kept", out), out
    assert re.search(r"gym, SIGTERM: process \d+, sleep 300", out) and "gym, SIGTERM: temporary file tmp" in out, out


def test_the_same_seed_gives_the_same_misfortunes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import itertools
    import random

    import torture as tool

    first, again, other = (
        [*itertools.islice(tool.plan(random.Random(seed), tool.MISFORTUNES), 50)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {(name, blow[0]) for name, blows in first for blow in blows} == {
        (name, what) for name, deck in tool.MISFORTUNES.items() for what in deck
    }
