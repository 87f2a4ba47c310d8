"""benchmarks/learning.py makes several runs at a time and saves their curves. A failing run is
reported and stops no other."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

ENV = "parity_env:Parity-v0"
SMALL = [
    "--num-steps",
    64,
    "--num-minibatches",
    4,
    "--update-epochs",
    1,
    "--total-timesteps",
    192,
    "--no-compile",
]


def learning(folder, *line):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), *map(str, line)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def copy(tmp_path):
    """Return a changed copy of a script in another folder. With seed 2 it fails in its second
    iteration."""
    source = (ROOT / "ppo_continuous_multiagent.py").read_text()
    line = "        for iteration in run.iterations():\n"
    broken = f"{line}            if args.seed == 2 and iteration == 1:\n"
    broken += '                raise TypeError("this copy is broken")\n'
    assert source.count(line) == 1
    (tmp_path / "my_ppo.py").write_text(source.replace(line, broken))
    return tmp_path / "my_ppo.py"


def test_two_runs_at_a_time_are_saved_and_drawn(tmp_path):
    line = [
        "ppo_continuous_multiagent.py",
        "--env-id",
        ENV,
        "--seeds",
        1,
        2,
        "--jobs",
        2,
        "--out",
        "mine",
        *SMALL,
    ]
    out = learning(tmp_path, *line)
    assert out.returncode == 0, out.stderr
    for seed in (1, 2):
        lines = (
            (tmp_path / "mine" / f"{ENV}.ppo_continuous_multiagent.{seed}.csv")
            .read_text()
            .splitlines()
        )
        assert lines[0] == "decisions,return,length,seconds" and [
            x.split(",")[0] for x in lines[1:]
        ] == [
            "64",
            "128",
            "192",
        ]
        (run,) = (tmp_path / "mine" / "runs").glob(f"Parity-v0__*__{seed}__*")
        assert (run / "checkpoint.pt").exists() and "192 steps" in (run / "log.txt").read_text()
        assert f"seed {seed}: " in out.stdout
    assert " steps " not in out.stdout, "the output of runs is in their logs"
    assert " ± " in out.stdout.splitlines()[-1]
    out = learning(tmp_path, "plot", "--out", "mine")
    assert out.returncode == 0 and (tmp_path / "mine" / f"{ENV}.png").exists(), out.stderr


def test_a_failing_run_is_reported_and_stops_no_other(tmp_path, copy):
    out = learning(
        tmp_path, copy, "--env-id", ENV, "--seeds", 1, 2, 3, "--jobs", 2, "--out", "mine", *SMALL
    )
    assert out.returncode == 1
    assert out.stderr.strip() == f"{ENV} seed 2 failed: TypeError: this copy is broken"
    assert sorted(path.name for path in (tmp_path / "mine").glob("*.csv")) == [
        f"{ENV}.my_ppo.{k}.csv" for k in (1, 3)
    ]
    assert len(list((tmp_path / "mine" / "runs").glob("*/checkpoint.pt"))) == 3, (
        "also that of the failed run"
    )


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (["nowhere.py", "--env-id", ENV], "nowhere.py: there is no such script"),
        (["ppo_continuous_multiagent.py"], "--env-id is missing"),
        (
            ["ppo_continuous_multiagent.py", "--env-id", ENV, "--jobs", 0],
            "--jobs 0: must be above 0",
        ),
        (["plot", "--out", "."], "has no curves"),
    ],
)
def test_bad_input_is_one_line(tmp_path, line, match):
    out = learning(tmp_path, *line)
    assert out.returncode == 1 and match in out.stderr and len(out.stderr.splitlines()) == 1, (
        out.stderr
    )
    assert not list(tmp_path.iterdir())
