"""benchmarks/learning.py makes several runs at a time and saves their curves. A failing run is
reported and stops no other."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

ENV = "parity_env:Parity-v0"
FILE = "Parity-v0"  # how the names of its files start
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
    process = start(folder, *line)
    stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start(folder, *line):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{folder}"}
    command = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), *map(str, line)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
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
            (tmp_path / "mine" / f"{FILE}.ppo_continuous_multiagent.{seed}.csv")
            .read_text()
            .splitlines()
        )
        assert lines[0] == "decisions,return,length,seconds,cpu_seconds" and [
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
    assert out.returncode == 0 and (tmp_path / "mine" / f"{FILE}.png").exists(), out.stderr


def test_an_id_with_a_slash_has_a_curve(tmp_path):
    """As ale_py:ALE/Pong-v5."""
    code = "import gymnasium, parity_env\n"
    code += "gymnasium.register('Far/Parity-v0', parity_env.Parity, max_episode_steps=20)\n"
    (tmp_path / "far_away.py").write_text(code)
    line = ["ppo_continuous_multiagent.py", "--env-id", "far_away:Far/Parity-v0", "--seeds", 1]
    out = learning(tmp_path, *line, "--out", "mine", *SMALL)
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "mine" / "Far-Parity-v0.ppo_continuous_multiagent.1.csv").exists()


def test_a_failing_run_is_reported_and_stops_no_other(tmp_path, copy):
    out = learning(
        tmp_path, copy, "--env-id", ENV, "--seeds", 1, 2, 3, "--jobs", 2, "--out", "mine", *SMALL
    )
    assert out.returncode == 1
    assert out.stderr.strip() == f"{ENV} seed 2 failed: TypeError: this copy is broken"
    assert sorted(path.name for path in (tmp_path / "mine").glob("*.csv")) == [
        f"{FILE}.my_ppo.{k}.csv" for k in (1, 3)
    ]
    assert len(list((tmp_path / "mine" / "runs").glob("*/checkpoint.pt"))) == 3, (
        "also that of the failed run"
    )


def test_a_terminated_program_ends_its_runs(tmp_path):
    line = ["ppo_continuous_multiagent.py", "--env-id", ENV, "--out", "mine", *SMALL]
    line[line.index("--total-timesteps") + 1] = 10**8
    process = start(tmp_path, *line)
    wait_until(lambda: list(tmp_path.glob("mine/runs/*/lock")))
    (lock,) = tmp_path.glob("mine/runs/*/lock")
    wait_until(lambda: lock.read_text().startswith("process "))
    pid = int(lock.read_text().removeprefix("process "))
    process.terminate()
    try:
        assert process.wait(100) == 130
        wait_until(lambda: not is_alive(pid), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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


def test_files_of_options_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("learning")
    monkeypatch.chdir(tmp_path)
    more = ["--seed", "3", "--curriculum", "a.yaml", "--init-from", "runs/x", "--compile"]
    expected = [*more[:3], f"{tmp_path}/a.yaml", "--init-from", f"{tmp_path}/runs/x", "--compile"]
    assert module.with_absolute_paths(more) == expected
