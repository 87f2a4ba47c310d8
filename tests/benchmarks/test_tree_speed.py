"""benchmarks/tree_speed.py runs both checkouts with the same options and prints a row for each."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import tree_speed

# A script that prints what tree_speed.py reads, and appends its command line to a file
STUB = """
import os, sys, pathlib
here = pathlib.Path(__file__).parent
assert os.environ["PYTHONPATH"] == str(here) and not list(pathlib.Path.cwd().iterdir())
with open(here.parent / "calls.txt", "a") as file:
    file.write(f"{here.name} {' '.join(sys.argv[1:])}\\n")
speed = 1000 if here.name == "old" else 1250
print("Compiled the update in 2.5 s")
print(f" 1,000 steps  50%  return 1  1 SPS  env 1%\\n 2,000 steps 100%  return 1  {speed} SPS  env 1%")
"""


def run(folder, *words):
    command = [sys.executable, str(ROOT / "benchmarks" / "tree_speed.py"), *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def stubs(tmp_path):
    """Two folders whose scripts are stubs."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for row in tree_speed.ROWS.values():
            (tmp_path / name / row.script).write_text(STUB)
    return tmp_path


def test_checkouts_alternate_with_the_same_options(stubs):
    out = run(stubs, "old", "new", "--rows", "ppo-1", "--rounds", 3, "--steps", "ppo-1=4096")
    assert out.returncode == 0, out.stderr
    calls = [line.split(" ", 1) for line in (stubs / "calls.txt").read_text().splitlines()]
    assert [name for name, _ in calls] == ["old", "new", "new", "old", "old", "new"]
    (options,) = {options for _, options in calls}
    assert options.endswith("--seed 1 --total-timesteps 4096") and "--num-envs 1 " in options


def test_every_row_has_speeds_and_a_ratio(stubs):
    out = run(stubs, "old", "new", "--rounds", 1, "--first-compile")
    assert out.returncode == 0, out.stderr
    rows = [line.split() for line in out.stdout.splitlines() if line.endswith(("1.25", "1.00"))]
    speeds = {row[0]: row[1:] for row in rows if row[1] == "1,000"}
    assert list(speeds) == list(tree_speed.ROWS)
    assert all(row == ["1,000", "1,250", "1.25", "1.25", "to", "1.25"] for row in speeds.values())
    seconds = {row[0]: row[1:] for row in rows if row[1] != "1,000"}
    assert list(seconds) == ["ppo-1", "ppo-8", "sac", "discrete", "3dball", "crawler"]
    assert all(row == ["2.5", "2.5", "1.00", "1.00", "to", "1.00"] for row in seconds.values())


def test_two_copies_of_this_checkout(tmp_path):
    """Real runs of a copy and of this checkout itself."""
    ignore = shutil.ignore_patterns(".git", "results", "__pycache__", "runs", "docs", "tests")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=ignore)
    words = ["--rows", "memory", "--rounds", 1, "--steps", "memory=1024"]
    out = run(tmp_path, "copy", ROOT, *words)
    assert out.returncode == 0, out.stderr
    assert re.search(
        r"^memory +[\d,]+ +[\d,]+ +[\d.]+ +[\d.]+ to [\d.]+$", out.stdout, re.MULTILINE
    )
    assert [path.name for path in tmp_path.iterdir()] == ["copy"], "runs are in temporary folders"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["old", "old"], "are the same folder: give two checkouts"),
        (["old", "nowhere"], "has no ppo_continuous_multiagent.py: give the folder of a checkout"),
        (["old", "new", "--steps", "sac"], "--steps sac: give ROW=STEPS"),
        (["old", "new", "--rounds", -1], "--rounds -1: must be 0 or more"),
    ],
)
def test_bad_arguments_are_refused(stubs, words, match):
    out = run(stubs, *words)
    assert out.returncode == 2 and match in out.stderr.splitlines()[-1]
    assert not (stubs / "calls.txt").exists()


def test_a_failing_run_is_named_with_its_error(stubs):
    (stubs / "new" / "sac_continuous.py").write_text("raise SystemExit('no such env')")
    out = run(stubs, "old", "new", "--rows", "sac", "--rounds", 1)
    assert out.returncode == 1
    assert out.stderr.endswith("new/sac_continuous.py failed: no such env\n")
