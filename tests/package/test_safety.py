"""Safety: untrusted checkpoints, full disks, non-finite numbers, signals and crashes, and concurrent processes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import parity_env
import pytest
import torch
from conftest import ROOT, call, curve, needs_gl, stop_after, train

import ppo_continuous_multiagent as ppo
import ppo_pixel as pixel
from envs.make import SyncEnvs, make_envs
from envs.pixels import PixelEnvs
from onefile_rl import actor_processes, checkpoints, evaluate, export, runs
from onefile_rl.engines.scenes import EngineError

SMALL = dict(
    env_id="parity_env:Parity-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8),
    checkpoint_interval=1,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, ppo, SMALL), partial(call, ppo)


def load(folder):
    return checkpoints.load(folder, ppo.__file__)[1]


# Checkpoints of other machines


def change_arguments(folder, **args):
    """Change the arguments in a checkpoint, which makes its signature invalid."""
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["args"] |= args
    torch.save(state, path)


EVIL = {
    "unity_path": (
        {"unity_path": "./evil.sh", "env_id": "evil"},
        "would start ./evil.sh: give --unity-path on this command line, or --trust",
    ),
    "godot_path": (
        {"godot_path": "./evil.sh", "env_id": "evil"},
        "would start ./evil.sh: give --godot-path on this command line, or --trust",
    ),
    "env_id": (
        {"env_id": "evil:Parity-v0"},
        "would import evil: give --env-id on this command line, or --trust",
    ),
    "player_args": (
        {"env_id": "3DBall", "player_args": ("--render", "evil")},
        "--player-args on this command line, or --trust",
    ),
    "env_kwargs": (
        {"env_kwargs": {"xml_file": "evil"}, "env_id": "Hopper-v5"},
        "give --env-kwargs on this command line, or --trust",
    ),
    "others": (
        {"env_id": "3DBall", "others": {"Goalie": "evil.sh"}},
        "would load the policies {'Goalie': 'evil.sh'}: give --others on this command line, or --trust",
    ),
    "track": (
        {"track": True},
        "would import parity_env, log to the network: give --env-id and --track on this command line",
    ),
}


@pytest.mark.parametrize("what", EVIL)
@pytest.mark.parametrize("option", ["--evaluate", "--resume"])
def test_an_untrusted_checkpoint_starts_nothing(what, option, monkeypatch):
    """Programs, modules and files of an untrusted checkpoint are used only if the command line names them."""
    Path("evil.sh").write_text("#!/bin/sh\ntouch started\n")
    Path("evil.sh").chmod(0o755)
    Path("evil.py").write_text("open('started', 'w')\n")
    monkeypatch.syspath_prepend(os.getcwd())
    folder = train(total_timesteps=64)
    args, expected = EVIL[what]
    change_arguments(folder, **args)
    with pytest.raises(
        SystemExit, match="was not written on this machine and in this place, and would"
    ) as caught:
        call(monkeypatch, option, folder, "--total-timesteps", 128)
    assert expected in str(caught.value) and len(str(caught.value).strip().splitlines()) == 1
    assert not Path("started").exists() and "evil" not in sys.modules


def test_an_untrusted_checkpoint_is_used_if_the_user_allows_it(monkeypatch, capsys):
    """By repeating the option on the command line, or with --trust."""
    folder = train(total_timesteps=64)
    change_arguments(folder, seed=3, env_kwargs={})
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    torch.save(state | {"seal": "another machine's"}, folder / "checkpoint.pt")
    with pytest.raises(
        SystemExit, match="would import parity_env: give --env-id on this command line, or --trust"
    ):
        call(monkeypatch, "--evaluate", folder)
    call(
        monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--env-id", "parity_env:Parity-v0"
    )
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--trust")
    assert capsys.readouterr().out.count("after 64 decisions, 1 episodes") == 2


def test_a_plain_env_and_an_export_need_no_trust(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=64)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    torch.save(state | {"seal": ""}, folder / "checkpoint.pt")
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    other = train(total_timesteps=64)
    change_arguments(other, unity_path="./evil.sh")
    call(monkeypatch, "--export", other)
    assert (other / "policy.onnx").exists()


def test_only_the_user_can_read_the_secret():
    train(total_timesteps=64)
    path = Path(os.environ["XDG_CONFIG_HOME"], "unity-mujoco-rl", "secret")
    assert len(path.read_bytes()) == 32 and path.stat().st_mode & 0o077 == 0


def test_without_a_secret_runs_work_but_are_not_trusted(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    folder = train(total_timesteps=64)
    with pytest.raises(SystemExit, match="was not written on this machine"):
        call(monkeypatch, "--evaluate", folder)


# A full disk


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of three megabytes and change into it."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    before = os.getcwd()
    os.chdir(place)
    yield place
    os.chdir(before)
    subprocess.run(["umount", "-l", place], check=True)


def fill(path="ballast"):
    with open(path, "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@contextlib.contextmanager
def keeping_full():
    """Fill the disk again and again: a file that replaces another one frees its room."""
    ended = threading.Event()

    def keep_full():
        while not ended.wait(0.002):
            fill()

    fill()
    thread = threading.Thread(target=keep_full)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_temporarily_full_disk_does_not_end_the_run(small_disk, monkeypatch, capsys):
    """The run reports it and continues. Once there is space again, checkpoints and curves are written again."""
    settle, count, seen = runs.Run.end_iteration, [], []

    def settled(run):
        count.append(None)
        if len(count) == 4:
            fill()
        settle(run)
        if 4 <= len(count) <= 9:
            seen.append(load(run.folder)["global_step"])
        if len(count) == 9:
            Path("ballast").unlink()

    monkeypatch.setattr(runs.Run, "end_iteration", settled)
    folder = train(total_timesteps=64 * 20, hidden_sizes=(64, 64))
    out = capsys.readouterr().out
    failed = r"checkpoint.pt could not be written \(\[Errno 28\] No space left on device\)"
    assert re.search(failed + r": .*/checkpoint.pt has 192 of 256 decisions", out)
    assert "checkpoint.pt with 640 decisions" in out, "saved again at the first iteration with room"
    assert seen[0] == seen[-1] == 64 * 3 and load(folder)["global_step"] == 64 * 20
    assert not list(folder.glob(".*.tmp"))
    assert [step for step, _ in curve(folder)["losses/policy_loss"]][-5:] == [
        64 * k for k in range(16, 21)
    ]


def test_a_full_disk_at_the_end_is_reported_and_ends_with_an_error(small_disk):
    """The first Ctrl-C ends the training, and the run waits for room. The second one ends the wait."""
    with start(*LINE[:-1], 1) as process:
        (folder,) = wait_for(lambda: list(Path("runs").glob("*")))
        wait_for((folder / "checkpoint.pt").exists)
        with keeping_full():
            process.send_signal(signal.SIGINT)
            seen = []
            while "press Ctrl-C to give up" not in "".join(seen):
                seen.append(process.stdout.readline())
                assert seen[-1], process.stderr.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "Resume with" not in out
    step = load(folder)["global_step"]
    # It may be the second write of checkpoint.pt that fails, which adds the list of files
    failed = rf"({folder}/checkpoint.pt could not be written|could not be added to {folder}/checkpoint.pt)"
    assert re.search(failed, err) and len(err.splitlines()) == 2
    assert f"{folder}/checkpoint.pt has {step:,} of " in err and f"--resume {folder}" in err


def test_actors_keep_their_weights_on_a_full_disk(small_disk, capsys):
    """The learner continues, reports it once, and the next state replaces the file when there is room."""
    space = gym.spaces.Box(-1, 1, (1,))
    envs = SimpleNamespace(num_envs=1, single_observation_space=space, single_action_space=space)
    args = SimpleNamespace(num_actors=1, timeout_wait=60)
    actors = actor_processes.ActorProcesses(args, 1, "x.py", envs)
    actors.folder = small_disk
    actors.processes = {0: None}
    weights = lambda: torch.load(small_disk / actor_processes.WEIGHTS)["x"][0]
    actors.push({"x": torch.full((10_000,), 1.0)})
    fill()
    for _ in range(3):
        actors.push({"x": torch.full((10_000,), 2.0)})
    assert weights() == 1
    Path("ballast").unlink()
    actors.push({"x": torch.full((10_000,), 3.0)})
    assert weights() == 3 and not list(small_disk.glob(".*"))
    out = capsys.readouterr().out
    assert out.count("weights.pt could not be written ([Errno 28] No space left on device)") == 1
    fill()
    actors.processes = {}
    with pytest.raises(ValueError, match="weights.pt can't be written: .*No space left"):
        actors.launch(small_disk, {}, np.zeros(1), {"x": torch.full((1_000_000,), 1.0)})


@needs_gl
def test_a_video_that_cannot_be_written_does_not_end_the_run(small_disk, monkeypatch, capsys):
    """The message says that the disk is full. A video that was requested alone is an error."""

    def without_room(*args):
        fill()
        try:
            evaluate.record_video(*args)
        finally:
            Path("ballast").unlink()

    monkeypatch.setattr(runs, "record_video", without_room)
    folder = train(
        env_id="InvertedPendulum-v5", total_timesteps=64, capture_video=True, video_interval=64
    )
    out = capsys.readouterr().out
    for step in (0, 64):
        failed = f"{folder}/videos/{step}.mp4 could not be recorded: "
        assert f"{failed}[Errno 28] No space left on device\n" in out
    assert "OpenGL" not in out and load(folder)["global_step"] == 64
    fill()
    with pytest.raises(SystemExit, match="evaluation.mp4 could not be written: .*No space left"):
        call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--capture-video")
    assert "Wrote" not in capsys.readouterr().out and not list((folder / "videos").iterdir())


def test_an_output_that_cannot_be_written_does_not_end_the_run():
    """The output is a file, and the disk is full."""
    command = [sys.executable, str(ROOT / "ppo_continuous_multiagent.py")]
    command += [*map(str, LINE[:-4]), "--total-timesteps", "512"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with open("/dev/full", "w") as full:
        out = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (out.returncode, out.stderr) == (0, "")
    assert load(next(Path("runs").iterdir()))["global_step"] == 512


def test_the_log_is_written_again_when_there_is_room(small_disk):
    """The thread of TensorBoard's writer ends, without a traceback, and the run opens another one."""
    line = [*LINE[:-1], 10**6]
    with start(*line) as process:
        folder = until_it_learns(process)
        fill()
        seen = []
        while "The log could not be written, some points of the curves are lost" not in "".join(
            seen
        ):
            seen.append(process.stdout.readline())
            assert seen[-1], process.stderr.read()
        Path("ballast").unlink()
        wait_for(lambda: len(list(folder.glob("events*"))) == 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and err == ""
    assert curve(folder)["losses/policy_loss"][-1][0] == load(folder)["global_step"]


def test_a_log_that_cannot_be_written_does_not_end_the_run(monkeypatch, capsys):
    """TensorBoard's writer raises at every call once its thread has ended, so the run replaces it."""
    from torch.utils.tensorboard import SummaryWriter

    add, calls = SummaryWriter.add_scalar, []

    def broken(self, *args):
        calls.append(self)
        if self is calls[0] and len(calls) > 60:
            raise OSError(28, "No space left on device")
        return add(self, *args)

    monkeypatch.setattr(SummaryWriter, "add_scalar", broken)
    folder = train(total_timesteps=64 * 10)
    assert (
        "The log could not be written, some points of the curves are lost"
        in capsys.readouterr().out
    )
    steps = [step for step, _ in curve(folder)["losses/policy_loss"]]
    assert steps[-1] == 640 and len(steps) >= 8


def test_no_space_for_a_new_run_is_one_line(small_disk, monkeypatch):
    fill()
    line = [
        "--env-id",
        "parity_env:Parity-v0",
        "--num-steps",
        64,
        "--num-minibatches",
        4,
        "--total-timesteps",
        64,
    ]
    with pytest.raises(
        SystemExit, match=r"runs/.* can't be written: .*No space left on device"
    ) as caught:
        call(monkeypatch, *line)
    assert len(str(caught.value).strip().splitlines()) == 1
    assert list(Path("runs").iterdir()) == []


def test_a_run_that_cannot_start_leaves_no_folder(monkeypatch):
    def reset(self, *, seed=None, options=None):
        raise MemoryError

    monkeypatch.setattr(parity_env.Parity, "reset", reset)
    line = ["--num-steps", 64, "--num-minibatches", 4, "--total-timesteps", 64]
    with pytest.raises(SystemExit, match="not enough memory"):
        call(monkeypatch, "--env-id", "parity_env:Parity-v0", *line)
    assert list(Path("runs").iterdir()) == []


def test_an_export_is_complete_or_does_not_exist(small_disk, monkeypatch):
    folder = train(total_timesteps=64)
    fill()
    with pytest.raises(SystemExit, match=r"policy.onnx can't be written: .*"):
        call(monkeypatch, "--export", folder)
    assert not (folder / "policy.onnx").exists() and not list(folder.glob(".*.tmp"))


def test_an_export_for_godot_is_complete_or_an_error(monkeypatch):
    folder = train(total_timesteps=64)

    def full(model, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "export", lambda *_: None)
    monkeypatch.setattr(export, "is_for_godot", lambda spec: True)
    monkeypatch.setattr(export, "export_for_gdscript", full)
    with pytest.raises(SystemExit, match=r"policy.json can't be written: .*No space left"):
        call(monkeypatch, "--export", folder)


@needs_gl
def test_a_video_of_a_scene_is_complete_or_an_error(small_disk):
    fill()
    command = [sys.executable, "-m", "envs.unity_scenes.player", "--scene", "3DBall"]
    command += ["--render", str(small_disk / "scene.mp4"), "--seconds", "0.2"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.returncode == 1 and "Wrote" not in out.stdout
    assert "scene.mp4 could not be written: " in out.stderr and "Traceback" not in out.stderr


def test_a_network_that_cannot_be_exported_is_one_line(monkeypatch):
    folder = train(total_timesteps=64)

    def unsupported(*args, **kwargs):
        raise torch.onnx.errors.UnsupportedOperatorError("aten::erfinv", 9, None)

    monkeypatch.setattr(export.torch.onnx, "export", unsupported)
    with pytest.raises(SystemExit, match=r"policy.onnx can't be written: .*aten::erfinv"):
        call(monkeypatch, "--export", folder)


# Non-finite numbers


class Broken(gym.Env):
    """An env with a non-finite observation, final observation or reward from step `at` on."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, what, at):
        self.what, self.at, self.steps = what, at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        bad = self.steps >= self.at
        obs = np.array([0, 0, np.inf if bad and self.what != "reward" else 0], np.float32)
        return (
            obs,
            float("nan") if bad and self.what == "reward" else 1.0,
            bad and self.what == "final",
            False,
            {},
        )


@pytest.mark.parametrize("what", ["observation", "final", "reward"])
def test_a_non_finite_number_of_an_env_ends_the_run(what, monkeypatch):
    """It would make the statistics and then the weights nan, and the next checkpoint would overwrite the good one."""
    expected = "env 0: reward is nan" if what == "reward" else "env 0: observation 2 is inf"
    monkeypatch.setattr(
        ppo, "make_envs", lambda args, seed: (SyncEnvs([Broken(what, 150)]), "broken")
    )
    with pytest.raises(EngineError, match=expected):
        train(total_timesteps=64 * 8)
    (folder,) = Path("runs").iterdir()
    state = load(folder)
    assert state["global_step"] == 128 and all(
        torch.isfinite(x).all() for x in state["kept"]["agent"].values()
    )


def test_a_non_finite_number_of_envpool_is_an_error(monkeypatch):
    args = ppo.Args(env_id="InvertedPendulum-v5", num_envs=3)
    with closing(make_envs(args, 1)[0]) as envs:
        envs.reset(seed=1)
        receive = envs.pool.recv
        monkeypatch.setattr(
            envs.pool, "recv", lambda: (np.full((3, 4), [0, np.nan, 0, 0]), *receive()[1:])
        )
        with pytest.raises(EngineError, match="env 0: observation 1 is nan"):
            envs.step(np.zeros((3, 1)))


# The end of a run


def start(*line, script="ppo_continuous_multiagent.py", **kwargs):
    command = [sys.executable, "-u", str(ROOT / script), *map(str, line)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


LINE = "--env-id parity_env:Parity-v0 --num-steps 256 --num-minibatches 4 --update-epochs 20 --no-compile"
LINE = [*LINE.split(), "--total-timesteps", 10**7, "--checkpoint-interval", 10**6]


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def until_it_learns(process, least=512):
    """Return the run's folder after a few iterations, of at least so many steps, before the first checkpoint."""
    for line in process.stdout:
        steps = re.match(r"\s*([\d,]+) steps ", line)
        if steps and int(steps[1].replace(",", "")) >= least:
            break
    (folder,) = Path("runs").glob("*")
    assert process.poll() is None and not (folder / "checkpoint.pt").exists()
    return folder


@pytest.mark.parametrize(
    "ways", [["SIGINT"], ["SIGTERM"], ["SIGHUP"], ["SIGINT", "SIGINT"], ["SIGTERM", "SIGTERM"]]
)
def test_every_signal_saves_a_checkpoint(ways):
    """The first signal lets the iteration finish. The second one ends the run and loses only this iteration."""
    with start(*LINE) as process:
        folder = until_it_learns(process)
        for way in ways:
            process.send_signal(getattr(signal, way))
            time.sleep(0.02)
        out, err = process.communicate(timeout=300)
    assert load(folder)["global_step"] >= 256 and load(folder)["global_step"] % 256 == 0
    assert (
        "Finishing the iteration and saving a checkpoint; press Ctrl-C again to stop at once" in out
    )
    assert (
        f"Resume with: python {ROOT / 'ppo_continuous_multiagent.py'} --resume {folder}" in out
        and "Traceback" not in err
    )
    # 0 if the iteration ended before the second signal
    assert process.returncode in ((0,) if len(ways) == 1 else (0, 130)), (process.returncode, err)


def test_more_signals_do_not_interrupt_the_last_checkpoint(monkeypatch):
    """The second and the third Ctrl-C arrive while it is written."""
    saved, save = [], runs.save

    def interrupted(path, state):
        saved.append(path)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        save(path, state)

    monkeypatch.setattr(runs, "save", interrupted)
    stop_after(monkeypatch, ppo, "make_batch", 2)
    with pytest.raises(KeyboardInterrupt):
        train(total_timesteps=640, checkpoint_interval=10**6)
    assert load(next(Path("runs").glob("*")))["global_step"] == 128 and len(saved) > 1


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_after_the_end_of_the_run_changes_nothing(monkeypatch, capsys, way):
    trained = ppo.train

    def then_a_signal(*args):
        trained(*args)
        os.kill(os.getpid(), getattr(signal, way))

    monkeypatch.setattr(ppo, "train", then_a_signal)
    before = {number: signal.getsignal(number) for number in runs.SIGNALS}
    try:
        few = "--num-steps 64 --num-minibatches 2 --update-epochs 1 --hidden-sizes 8 --total-timesteps 64"
        call(monkeypatch, *f"--env-id parity_env:Parity-v0 {few}".split())
    finally:
        for number, how in before.items():
            signal.signal(number, how)
    assert "Evaluate with" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_the_interpreter_exits_changes_nothing(way):
    """Exiting can take a second, and everything is saved by then."""
    line = [*LINE[:-4], "--total-timesteps", "512"]
    program = f"import atexit, os, runpy, signal, sys; atexit.register(os.kill, os.getpid(), signal.{way}); "
    program += (
        f"sys.argv = {[ppo.__file__, *line]}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    out = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (out.returncode, out.stderr) == (0, "") and "Saved runs/" in out.stdout


def test_nohup_is_respected():
    with start(*LINE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        until_it_learns(process)
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)


def test_a_closed_stdout_saves_a_checkpoint():
    """As with `| head`."""
    with start(*LINE) as process:
        folder = until_it_learns(process)
        process.stdout.close()
        assert process.wait(300) == 1
        assert "Traceback" not in process.stderr.read()
    assert load(folder)["global_step"] >= 256


def test_a_run_without_stdout_and_stderr_works():
    """As with `>&- 2>&-`."""
    line = [sys.executable, ppo.__file__, *map(str, LINE), "--total-timesteps", "256"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *line]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    assert subprocess.run(closed, env=environment, timeout=300).returncode == 0
    (folder,) = Path("runs").iterdir()
    assert load(folder)["global_step"] == 256


def test_a_failure_between_two_iterations_saves_the_last_one(monkeypatch):
    """A worker that died during the update, and a stdout that is closed when the progress is printed."""
    for error, name in ((EngineError("a worker died"), "state"), (BrokenPipeError(), "show")):
        shutil.rmtree("runs", ignore_errors=True)
        calls, where = [], SyncEnvs if name == "state" else runs.Run
        original = getattr(where, name)

        def broken(self, *args, calls=calls, error=error, original=original):
            calls.append(None)
            if len(calls) == 3:
                raise error
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, broken)
            if name == "show":
                patch.setattr(
                    runs.Run,
                    "due_at",
                    property(lambda self: 0.0, lambda self, x: None),
                    raising=False,
                )
                patch.setattr(
                    runs.Run, "record", lambda *args, record=runs.Run.record: quietly(record, *args)
                )
            with pytest.raises(type(error)):
                train(total_timesteps=64 * 8, checkpoint_interval=10**6)
        (folder,) = Path("runs").iterdir()
        assert load(folder)["global_step"] == {"state": 128, "show": 192}[name]


def quietly(record, run, *args):
    """Call `record` without the progress line, so that it is printed between iterations only."""
    show, run.show = run.show, lambda: None
    record(run, *args)
    run.show = show


def test_an_exception_of_the_env_saves_a_checkpoint(monkeypatch, capsys):
    class Dies(gym.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            return 1 // (self.steps < 200) and super().step(action)

    monkeypatch.setattr(
        ppo,
        "make_envs",
        lambda args, seed: (SyncEnvs([Dies(gym.make("parity_env:Parity-v0"))]), "dies"),
    )
    with pytest.raises(ZeroDivisionError):
        train(total_timesteps=64 * 8, checkpoint_interval=10**6)
    (folder,) = Path("runs").iterdir()
    assert load(folder)["global_step"] == 192
    resume = f"python ppo_continuous_multiagent.py --resume {folder}"
    assert f"Stopped after 192 decisions. Resume with: {resume}\n" in capsys.readouterr().out


def test_a_killed_worker_saves_a_checkpoint():
    """Three times, because it may be killed while it receives an action, while it steps, or while it answers."""
    line = "--env-id DummyPixels-v0 --num-envs 4 --num-workers 2 --num-steps 32 --num-minibatches 2 --features 8"
    line += (
        " --update-epochs 1 --total-timesteps 1000000 --checkpoint-interval 1000000 --no-compile"
    )
    for _ in range(3):
        shutil.rmtree("runs", ignore_errors=True)
        with start(*line.split(), script="ppo_pixel.py") as process:
            folder = until_it_learns(process, 256)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            _, err = process.communicate(timeout=300)
        assert (
            process.returncode == 1 and "ended with exit code -9" in err and "Traceback" not in err
        )
        assert checkpoints.load(folder, pixel.__file__)[1]["global_step"] >= 128


def test_workers_leave_no_shared_memory():
    """It is anonymous, so it cannot outlive them. Other processes may use /dev/shm meanwhile."""
    with closing(PixelEnvs("DummyPixels-v0", 2, 2)) as envs:
        for worker in envs.workers:
            mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
            assert "/memfd:envs" in mapped and "/dev/shm/" not in mapped


# Several processes


def test_a_second_process_in_a_run_is_refused(monkeypatch):
    folder = train(total_timesteps=64)
    with start("--resume", folder, "--total-timesteps", 10**7) as process:
        wait_for(
            lambda: (
                (folder / "lock").exists()
                and f"process {process.pid}" in (folder / "lock").read_text()
            )
        )
        with pytest.raises(
            SystemExit, match=f"{folder} is in use: process {process.pid} trains it"
        ):
            call(monkeypatch, "--resume", folder, "--total-timesteps", 256)
        process.send_signal(signal.SIGKILL)
    call(monkeypatch, "--resume", folder, "--total-timesteps", load(folder)["global_step"] + 64)


def test_a_run_that_was_resumed_in_the_meantime_is_not_reset(monkeypatch):
    """Another process saves and releases the lock after this one has loaded the checkpoint and before it locks."""
    folder = train(total_timesteps=64)
    resumed = checkpoints.load(folder, ppo.__file__)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 128)
    with pytest.raises(ValueError, match="has changed in the meantime"):
        ppo.train(ppo.Args(**{**SMALL, "resume": str(folder), "total_timesteps": 256}), resumed)
    assert load(folder)["global_step"] == 128


def test_processes_that_start_together_use_the_same_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "new"))
    program = "import sys, time; from onefile_rl.trust import secret; "
    program += "time.sleep(max(0, float(sys.argv[1]) - time.time())); "
    program += "print(secret().hex())"
    command = [sys.executable, "-c", program, str(time.time() + 6)]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert len({child.communicate(timeout=300)[0] for child in children}) == 1


def test_temporary_files_of_a_killed_process_are_removed(monkeypatch):
    folder = train(total_timesteps=64)
    (folder / ".checkpoint.pt.12345.tmp").write_bytes(b"half")
    (folder / "videos").mkdir()
    (folder / "videos" / ".64.12345.tmp.mp4").write_bytes(b"half")
    call(monkeypatch, "--resume", folder, "--total-timesteps", 128)
    assert not list(folder.glob(".*.tmp")) and not list((folder / "videos").iterdir())


# The command line


@pytest.mark.parametrize(
    "option",
    ["--resume", "--evaluate", "--export", "--unity-path", "--godot-path", "--env-id", "--device"],
)
def test_an_empty_string_is_an_error(option, monkeypatch):
    with pytest.raises(SystemExit, match=f"{option} .*is empty|no such checkpoint"):
        call(monkeypatch, option, "")
    assert not Path("runs").exists()


def test_a_missing_package_is_one_line(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as if it were not installed
    with pytest.raises(
        SystemExit, match="--env-id BipedalWalker-v3 can't be made: .*[Bb]ox2"
    ) as caught:
        call(monkeypatch, "--env-id", "BipedalWalker-v3")
    assert len(str(caught.value).strip().splitlines()) == 1 and not Path("runs").exists()


def test_an_env_with_images_is_refused_with_the_right_script(monkeypatch):
    with pytest.raises(SystemExit, match="DummyPixels-v0 has images .*: ppo_pixel.py takes them"):
        call(monkeypatch, "--env-id", "DummyPixels-v0")
    assert not Path("runs").exists()
