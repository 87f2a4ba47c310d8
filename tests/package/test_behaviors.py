"""--behavior A B: one policy for each behavior of a Unity game, in one run."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, ScriptedPlayer, agent, assert_refused, call, curve, run_script

import crossq_continuous as crossq
import lbc_discrete as lbc
import ppo_continuous_multiagent as continuous
import ppo_discrete_multiagent as ppo
import sac_continuous as sac
from onefile_rl import behaviors, runs
from onefile_rl.checkpoints import folders_of

BOTH = "--env-id WallClimb --behavior BigWall SmallWall"
SMALL = "--hidden-sizes 8 --num-steps 8 --num-minibatches 2 --update-epochs 1 --no-compile --player-args=--agents=8"
SMALL += " --max-agents 8 --no-fast"
NAMES = ("BigWall", "SmallWall")


def only_run(folder):
    (found,) = (folder / "runs").iterdir()
    return found


def steps(folder):
    """The decisions in the checkpoint of each behavior."""
    return {
        name: torch.load(folder / name / "checkpoint.pt", weights_only=True)["global_step"]
        for name in NAMES
    }


def assert_complete(folder, total):
    """All behaviors have their decisions: a step adds up to one for each agent beyond the total."""
    assert all(total <= count < total + 8 for count in steps(folder).values())


def start(folder, line):
    """Start the script as a user would. Its first two lines of output that tell of folders are awaited."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, ppo.__file__, *line.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    while sum("tensorboard --logdir" in line for line in lines) < 2:
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    return process


def descendants(pid):
    """The processes that a process has started, and those that these have started."""
    out = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in out.splitlines()}
    found = {pid}
    while more := {x for x, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def assert_all_end(pids):
    deadline = time.monotonic() + 120
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def is_running(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def child_of(process, name):
    """The process that trains a behavior."""
    for pid in descendants(process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if name.encode() in words:
            return pid
    raise AssertionError(f"no process trains {name}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of both behaviors."""
    folder = tmp_path_factory.mktemp("trained")
    out = run_script(ppo, f"{BOTH} {SMALL} --total-timesteps 320", folder)
    assert out.returncode == 0, out.stdout + out.stderr
    return folder, out.stdout


def test_each_behavior_has_a_folder_with_its_own_checkpoint_and_curves(trained):
    folder, out = trained
    run = only_run(folder)
    assert folders_of(run) == {name: name for name in NAMES}
    assert_complete(run, 320)
    weights = []
    for name in NAMES:
        points = curve(run / name)["charts/learning_rate"]
        assert points[-1][0] == steps(run)[name]
        state = torch.load(run / name / "checkpoint.pt", weights_only=True)
        assert state["args"]["behavior"] == name
        weights.append(state["kept"]["agent"]["actor.0.weight"])
    assert not torch.equal(*weights)
    for line in out.splitlines():
        assert re.match(r"\[(BigWall|SmallWall)\] |Training ", line), line


def test_a_behavior_that_is_complete_acts_on_with_its_policy(trained):
    _, out = trained
    assert re.search(r"Training \w+; agents of \w+\?team=0 act with runs/.*/\w+", out)


def test_behaviors_are_evaluated_and_exported_by_name(trained, monkeypatch, capsys):
    folder, _ = trained
    run = only_run(folder).relative_to(folder)
    monkeypatch.chdir(folder)
    for name, other in (NAMES, NAMES[::-1]):
        others = f"{other}={run}/{other}"
        call(ppo, monkeypatch, "--evaluate", run / name, "--eval-episodes", 2, "--others", others)
        out = capsys.readouterr().out
        assert f"{run}/{name}/checkpoint.pt after 32" in out
        assert f"agents of {other}?team=0 act with {run}/{other}" in out
        (run / name / "policy.onnx").unlink()
        call(ppo, monkeypatch, "--export", run / name)
        assert (run / name / "policy.onnx").exists()
    for option in ("--evaluate", "--export"):
        match = f"{run} has a run for each behavior: give {run}/BigWall or {run}/SmallWall"
        with pytest.raises(SystemExit, match=match):
            call(ppo, monkeypatch, option, run)


def test_resume_continues_all_behaviors(trained, monkeypatch):
    folder, _ = trained
    run = only_run(folder).relative_to(folder)
    out = run_script(ppo, f"--resume {run}", folder)
    assert out.returncode == 1 and "all behaviors have reached their totals" in out.stderr

    # One of them alone, then the other one up to it
    monkeypatch.chdir(folder)
    call(ppo, monkeypatch, "--resume", run / "BigWall", "--total-timesteps", 640)
    before = steps(run)
    out = run_script(ppo, f"--resume {run} --total-timesteps 640", folder)
    assert out.returncode == 0, out.stderr
    assert f"agents of BigWall?team=0 act with {run}/BigWall" in out.stdout
    assert_complete(run, 640)
    assert steps(run)["BigWall"] == before["BigWall"] and before["SmallWall"] < 640


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_all_behaviors(tmp_path, number):
    process = start(tmp_path, f"{BOTH} {SMALL} --total-timesteps 10000000")
    pids = descendants(process.pid)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    run = only_run(tmp_path)
    resume = f"Resume with: python {ppo.__file__} --resume runs/{run.name}\n"
    assert out.count(resume) == 2
    assert all(count > 0 for count in steps(run).values())
    assert_all_end(pids)


def test_a_killed_process_stops_the_run_and_the_others_are_saved(tmp_path):
    process = start(tmp_path, f"{BOTH} {SMALL} --total-timesteps 10000000")
    pids = descendants(process.pid)
    os.kill(child_of(process, "SmallWall"), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    run = only_run(tmp_path)
    line = f"SmallWall has ended with SIGKILL, and the run stops. Resume with: python {ppo.__file__} --resume"
    assert process.returncode == 1 and f"{line} runs/{run.name}\n" in out and "Traceback" not in out
    assert (run / "BigWall" / "checkpoint.pt").exists()
    assert_all_end(pids)


def test_all_processes_end_with_the_first_one(tmp_path):
    process = start(tmp_path, f"{BOTH} {SMALL} --total-timesteps 10000000")
    pids = descendants(process.pid)
    assert len(pids) == 3, "two processes that train, and the player"
    process.kill()
    process.wait(120)
    assert_all_end(pids)
    run = only_run(tmp_path)
    assert all((run / name / "checkpoint.pt").exists() for name in NAMES)
    process.stdout.close()


def test_a_player_that_is_killed_is_started_again_for_both(tmp_path):
    line = f"{BOTH} {SMALL} --total-timesteps 2560"
    process = start(tmp_path, line)
    (player,) = [
        pid
        for pid in descendants(process.pid)
        if b"--mlagents-port" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    os.kill(player, signal.SIGKILL)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    for name in NAMES:
        assert re.search(
            rf"\[{name}\] player 0 .*exit code -9.*restarting it \(attempt 1 of 3\)", out
        )
    assert_complete(only_run(tmp_path), 2560)


@pytest.mark.parametrize(
    ("script", "more"),
    [
        (continuous, "--num-steps 8 --num-minibatches 2 --update-epochs 1"),
        (sac, "--learning-starts 8 --batch-size 4 --buffer-size 100"),
        (crossq, "--learning-starts 8 --batch-size 4 --buffer-size 100"),
    ],
)
def test_scripts_for_continuous_actions_train_behaviors_of_different_sizes(tmp_path, script, more):
    messages = []
    for step in range(400):
        ended = step % 10 == 9
        runners = [agent(i, [[step % 7, i]], 1.0) for i in (0, 1)]
        chasers = [agent(5, [[1.0, step % 5, 0.5]], 0.5)] if step % 2 == 0 else []
        if ended:
            runners += [agent(i, [[step % 7, i]], 1.0, done=True) for i in (0, 1)]
        messages.append({"Runner?team=0": runners, "Chaser?team=1": chasers})
    player = ScriptedPlayer(messages, specs={"Runner?team=0": (2, ()), "Chaser?team=1": (1, ())})
    line = f"--unity-path editor --base-port {player.port} --behavior Runner Chaser {more}"
    line += " --total-timesteps 64 --hidden-sizes 4 --no-compile --max-restarts 0"
    out = run_script(script, line, tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    run = only_run(tmp_path)
    sizes = {}
    for name in ("Runner", "Chaser"):
        state = torch.load(run / name / "checkpoint.pt", weights_only=True)
        sizes[name] = (state["spec"]["obs_dim"], state["spec"]["action_dim"])
        assert state["global_step"] >= 64
    assert sizes == {"Runner": (2, 2), "Chaser": (3, 1)}


def test_lines_that_cannot_work_are_refused_before_any_work_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(line, match, script=ppo):
        with pytest.raises(SystemExit) as caught:
            call(script, monkeypatch, *line.split())
        assert match in str(caught.value) and len(str(caught.value).strip().splitlines()) == 1
        assert not Path("runs").exists()

    refused("--env-id WallClimb --behavior A A", "an agent has one policy, give each behavior once")
    refused("--env-id WallClimb --behavior A A?team=0", "an agent has one policy")
    refused("--env-id WallClimb --behavior A? A!", "two of them need the same folder")
    refused("--env-id CartPole-v1 --behavior A B", "several behaviors are for Unity scenes")
    refused("--env-id GodotRover --behavior A B", "several behaviors are for Unity scenes")
    refused(BOTH, "trains one behavior", lbc)
    refused(f"{BOTH} --num-steps 0", "--num-steps 0: must be above 0")
    Path("policy.onnx").write_bytes(b"")
    others = "--others BigWall=policy.onnx"
    refused(f"{BOTH} {others}", "--others BigWall: this is a behavior that is trained")
    refused("--unity-path no/such --behavior A B", "no/such: no player found")


def test_a_behavior_that_does_not_exist_is_one_line(tmp_path):
    line = "--env-id WallClimb --behavior BigWall Smallwall --max-restarts 0"
    match = "no agent of behavior Smallwall requests decisions at first; it has BigWall?team=0, SmallWall?team=0"
    assert_refused(ppo, line, match, tmp_path)


def test_actions_that_the_script_does_not_support_are_refused_by_name(tmp_path):
    out = run_script(continuous, f"{BOTH} --num-steps 8 --num-minibatches 1", tmp_path)
    assert out.returncode == 1 and not (tmp_path / "runs").exists()
    lines = out.stderr.strip().splitlines()
    assert "use ppo_discrete_multiagent.py" in lines[0] and len(lines) <= 2
    assert all(re.match(r"\[(Big|Small)Wall\] WallClimb has actions", line) for line in lines)


def test_torchrun_is_refused(monkeypatch):
    monkeypatch.setattr(behaviors.distributed, "SIZE", 2)
    with pytest.raises(ValueError, match="trained without torchrun; give one of them"):
        behaviors.check_run(ppo.Args(env_id="WallClimb"), ["A", "B"], ppo.__file__)


def lesson(*owners):
    criteria = [{"behavior": owner, "measure": "reward", "threshold": 0.5} for owner in owners]
    lessons = [
        {"name": str(i), "value": i, "completion_criteria": x} for i, x in enumerate(criteria)
    ]
    return {"curriculum": [*lessons, {"name": "last", "value": 9, "completion_criteria": None}]}


def test_each_behavior_completes_its_own_lessons():
    block = {"height": lesson("Big"), "width": lesson("Small?team=0"), "mass": 2.0}
    assert set(behaviors.own_lessons(block, "Big?team=1")) == {"height", "mass"}
    assert set(behaviors.own_lessons(block, "Small")) == {"width", "mass"}
    for wrong in (lesson("Big", "Small"), lesson("Other"), lesson(None)):
        args = ppo.Args(env_id="WallClimb", curriculum={"height": wrong})
        with pytest.raises(ValueError, match="height: with several behaviors, name one of the"):
            behaviors.check_run(args, ["Big", "Small"], ppo.__file__)


def test_a_folder_that_names_other_places_is_refused(tmp_path, monkeypatch):
    for content in ({"A": "../A"}, {"A": 3}, {"-x": "-x"}, {}, ["A"]):
        (tmp_path / "behaviors.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="behaviors.json is not valid"):
            folders_of(tmp_path)
    with pytest.raises(SystemExit, match="behaviors.json is not valid"):
        call(ppo, monkeypatch, "--resume", tmp_path)


def test_a_run_can_be_resumed_before_a_behavior_has_its_first_checkpoint(tmp_path):
    """After kill -9 of all processes: the other behavior has saved more often."""
    process = start(tmp_path, f"{BOTH} {SMALL} --total-timesteps 10000000")
    pids = descendants(process.pid) | {process.pid}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert_all_end(pids)
    run = only_run(tmp_path).relative_to(tmp_path)
    out = run_script(ppo, f"--resume {run} --total-timesteps 320", tmp_path)
    assert out.returncode == 0, out.stderr
    assert_complete(tmp_path / run, 320)


def test_behaviors_learn_together_with_a_share_of_their_rollouts(tmp_path):
    """Both have as many iterations, although BigWall has about a quarter of the agents."""
    options = "--rollout-share 0.01 --env-parameters big_wall=0.25"
    line = f"{BOTH} {SMALL} {options} --total-timesteps 640"
    out = run_script(ppo, line, tmp_path)
    assert out.returncode == 0, out.stderr
    run = only_run(tmp_path)
    ends = [[x[0] for x in curve(run / name)["charts/learning_rate"]] for name in NAMES]
    together = min(len(x) for x in ends)
    big, small = np.diff([x[:together] for x in ends])
    assert len(big) > 3 and big.sum() < 0.7 * small.sum(), "by the agents, not by the batch of 64"


def test_a_stopped_process_ends_with_the_first_signal(tmp_path):
    process = start(tmp_path, f"{BOTH} {SMALL} --total-timesteps 10000000")
    pids = descendants(process.pid)
    os.kill(child_of(process, "SmallWall"), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert_all_end(pids)


def test_help_after_the_behaviors_is_printed(tmp_path):
    out = run_script(ppo, f"{BOTH} -h --total-timesteps 320", tmp_path)
    assert out.returncode == 0 and "usage:" in out.stdout and not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    """From each behavior that notices it. There is nothing to resume."""
    (tmp_path / "runs").touch()
    out = run_script(ppo, f"{BOTH} {SMALL} --total-timesteps 320", tmp_path)
    lines = out.stderr.strip().splitlines()
    assert out.returncode == 1 and 1 <= len(lines) <= 2, out.stderr
    assert all("can't be written: " in line and "Not a directory" in line for line in lines)


@pytest.mark.parametrize("content", ["{", "[" * 200_000])
def test_a_damaged_list_of_behaviors_is_one_line(tmp_path, content):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "behaviors.json").write_text(content)
    out = run_script(ppo, "--resume b", tmp_path)
    assert out.returncode == 1 and out.stderr.strip() == (
        "b/behaviors.json is damaged: it is not valid JSON"
    )


def test_pipes_in_the_folder_of_a_run_are_not_waited_for(tmp_path):
    """Another machine's archive can contain them."""
    os.mkfifo(tmp_path / "behaviors.json")
    os.mkfifo(tmp_path / "config.json")
    results = []
    reads = lambda: results.extend([folders_of(tmp_path), runs.folder_id(tmp_path)])
    thread = threading.Thread(target=reads, daemon=True)
    thread.start()
    thread.join(60)
    assert results == [None, None]


def test_a_run_that_has_never_started_is_not_to_be_resumed(trained):
    folder, _ = trained
    run = only_run(folder).relative_to(folder)
    out = run_script(ppo, f"{BOTH} --hidden-sizes 7 --init-from {run}/BigWall", folder)
    assert out.returncode == 1 and "does not fit" in out.stderr
    assert "Resume with" not in out.stderr and only_run(folder)


def test_parameters_that_another_behavior_sets_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "lessons.yaml").write_text(LESSONS_OF_BIG_WALL)
    line = f"{BOTH} {SMALL} --total-timesteps 320 --curriculum lessons.yaml"
    out = run_script(ppo, line, tmp_path)
    assert out.returncode == 0, out.stderr
    run = only_run(tmp_path).relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    wanted = "big_wall: the lessons of BigWall set it in this run, and it is not set now"
    call(ppo, monkeypatch, "--evaluate", run / "SmallWall", "--eval-episodes", 1)
    assert wanted in capsys.readouterr().out
    given = ("--env-parameters", "big_wall=0.5")
    call(ppo, monkeypatch, "--evaluate", run / "SmallWall", "--eval-episodes", 1, *given)
    assert wanted not in capsys.readouterr().out
    call(ppo, monkeypatch, "--evaluate", run / "BigWall", "--eval-episodes", 1)
    assert wanted not in capsys.readouterr().out


LESSONS_OF_BIG_WALL = """
environment_parameters:
  big_wall:
    curriculum:
      - name: A
        value: 0.7
        completion_criteria: {behavior: BigWall, measure: progress, threshold: 0.1}
      - name: B
        value: 0.9
"""
