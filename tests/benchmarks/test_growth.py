"""benchmarks/growth.py prints a table for each question, measured in separate processes."""

import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import growth


def run(folder, *line):
    command = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), *map(str, line)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_agents_has_a_row_for_each_number_of_agents(tmp_path):
    out = run(tmp_path, "agents", "--rounds", 1, "--seconds", 0.2)
    assert out.returncode == 0, out.stderr
    names = [line.split(" | ")[0] for line in out.stdout.splitlines() if line.startswith("| ")]
    assert names == ["| one player", "| ---", "| 10 agents", "| 40 agents", "| 160 agents"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_exchange_times_one_number_and_a_gradient(tmp_path):
    out = run(tmp_path, "exchange", "--rounds", 1)
    assert out.returncode == 0, out.stderr
    header, _, two, four = [
        line.split(" | ") for line in out.stdout.splitlines() if line.startswith("| ")
    ]
    assert header[1] == "1 number" and header[2] == "1,238,569 numbers |"
    for name, row in (("| 2 ranks", two), ("| 4 ranks", four)):
        assert row[0] == name and 0 < float(row[1].split()[0]) < float(row[2].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can bind a process to a core")
def test_core_has_a_row_for_each_batch_size(tmp_path):
    out = run(tmp_path, "core", "--rounds", 1, "--batch", 640, "--steps", 640)
    assert out.returncode == 0, out.stderr
    _, _, *rows = [
        line.strip("| ").split(" | ") for line in out.stdout.splitlines() if line.startswith("| ")
    ]
    assert [row[0] for row in rows] == ["640", "80", "10"]
    for batch, rate, seconds, shares in rows:
        assert abs(float(batch) / float(rate.replace(",", "")) - float(seconds.split()[0])) < 0.006
        assert shares.startswith("env ") and " learn " in shares
    assert growth.python("-c", "import os; print(len(os.sched_getaffinity(0)))", cores={0}) == "1\n"


def test_measurements_alternate():
    order = []
    measures = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert growth.take_turns(measures, 2) == {"a": [1, 3], "b": [2, 4]} and order == [
        "a",
        "b",
        "a",
        "b",
    ]


def test_all_settings_have_batches_of_the_same_size():
    class Args:
        batch, steps = 20_480, 81_920

    for players, ranks in ((1, 1), (2, 1), (4, 1), (1, 2)):
        line = growth.settings(players, Args, ranks)
        steps = line[line.index("--num-steps") + 1]
        assert steps * players * ranks * growth.AGENTS == Args.batch


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of a process")
def test_resident_memory_includes_an_array():
    """In a new process: this one may return memory of other tests to the system meanwhile."""
    code = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import growth
        import numpy as np
        before = growth.resident(os.getpid())
        held = np.ones(10_000_000)  # 80 MB
        print(growth.resident(os.getpid()) - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(ROOT / "benchmarks")]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 75 < float(out.stdout) < 90, out.stderr
    assert growth.resident(2**30) == 0


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (["size"], "size: not one of agents, players, memory, ranks, exchange, core"),
        (["--batch", 50], "--batch 50: must be a multiple of 40"),
        (["--steps", 10], "--steps 10, --decisions 2000000: must be at least --batch, 20480"),
        (["--rounds", 0], "--rounds 0: must be above 0"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, line, match):
    out = run(tmp_path, *line)
    assert out.returncode == 1 and match in out.stderr and len(out.stderr.splitlines()) == 1, (
        out.stderr
    )
