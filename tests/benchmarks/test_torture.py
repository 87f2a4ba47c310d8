"""benchmarks/torture.py with real runs, and with a script that loses decisions and leaves things over."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
FULL_AT_END = ["full disk at the end", "full disk, room at the end"]
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small disk"
)


def torture(*args):
    command = [sys.executable, ROOT / "benchmarks" / "torture.py", "--minutes", "0.1", *args]
    out = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=400)
    return out.returncode, out.stdout + out.stderr


def doctored(tmp_path, code):
    """Return a copy of the script with more code before its start."""
    script = ROOT / "ppo_continuous_multiagent.py"
    start = '\nif __name__ == "__main__":'
    text = script.read_text()
    assert text.count(start) == 1
    (tmp_path / script.name).write_text(text.replace(start, f"\n{code}\n{start}"))
    return tmp_path / script.name


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
    script = doctored(
        tmp_path,
        """
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
""",
    )
    code, out = torture("--script", script, "--runs", "gym", "--only", "SIGTERM")
    assert code == 1 and events(out) == {"SIGTERM": [1, 0, 1, 1, 0]}, out
    assert re.search(r"gym, SIGTERM: \d+ decisions: \d+ made, \d+ kept", out), out
    assert (
        re.search(r"gym, SIGTERM: process \d+, sleep 300", out)
        and "gym, SIGTERM: temporary file tmp" in out
    ), out


@needs_root
def test_a_full_disk_at_the_end_loses_nothing_that_was_reported_as_saved():
    code, out = torture("--runs", "gym", "--only", *FULL_AT_END)
    assert code == 0 and "Lost: nothing" in out and "Left over: nothing" in out, out
    assert events(out) == {name: [1, 1, 0, 0, 0] for name in FULL_AT_END}


LIES = {
    "nothing was lost": (
        "runs.Run.save_at_the_end = lambda self: None",
        r"reports \d+ decisions with exit code 0, the checkpoint has \d+ of \d+",
    ),
    "more was saved": (
        """
failure = runs.Run.failure

def boast(self):
    self.checkpoint_step += 1
    return failure(self)

runs.Run.failure = boast
""",
        r"the checkpoint has \d+ of \d+ decisions, and with exit code 1 it reports: .*checkpoint.pt has",
    ),
}


@needs_root
@pytest.mark.parametrize("lie", LIES)
def test_a_run_that_lies_about_what_it_saved_is_reported(lie, tmp_path):
    code, found = LIES[lie]
    script = doctored(tmp_path, code)
    code, out = torture("--script", script, "--runs", "gym", "--only", FULL_AT_END[0])
    assert code == 1 and events(out) == {FULL_AT_END[0]: [1, 0, 1, 0, 0]}, out
    assert re.search(found, out), out


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
