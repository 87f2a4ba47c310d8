"""What a run writes: seeds that stay valid, files that fail, files of other runs, and numbers that are not finite."""

import errno
import json
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import conftest
import gymnasium as gym
import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import call, curve, stop_after, train
from test_distributed import finish, torchrun

import ppo_continuous_multiagent as ppo
import sac_continuous as sac
from envs.make import SyncEnvs
from onefile_rl import checkpoints, runs
from onefile_rl.engines.scenes import derive_seed

SMALL = dict(
    env_id="parity_env:Parity-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8),
    checkpoint_interval=1,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, ppo, SMALL), partial(call, ppo)


def load(path):
    return checkpoints.load(path, ppo.__file__)[1]


# Seeds


def test_a_derived_seed_is_the_sum_and_wraps_at_the_largest_one():
    assert derive_seed(1, 2**30) == 2**30 + 1
    assert derive_seed(2**31 - 1, 0) == 2**31 - 1
    assert derive_seed(2**31 - 1, 1) == derive_seed(2**31, 0) == 0
    assert derive_seed(5, 3 * 2**31 + 7) == 12


def test_a_run_with_the_largest_seed_is_resumed_and_evaluated(monkeypatch, capsys):
    """A player's seed is a signed integer of 32 bits. A resumed run adds its decisions to the seed."""
    settings = dict(env_id="3DBall", num_steps=8, total_timesteps=96, seed=2**31 - 1)
    folder = train(**settings)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 192)
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 12)
    assert load(folder)["global_step"] == 192
    assert "after 192 decisions, 12 episodes" in capsys.readouterr().out


def test_every_env_gets_a_valid_seed():
    seeds = []

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

    SyncEnvs([Env(), Env(), Env()]).reset(seed=2**31 - 2)
    assert seeds == [2**31 - 2, 2**31 - 1, 0]


# Files that can't be written


FULL = OSError(errno.ENOSPC, "No space left on device")
LINE = "--env-id parity_env:Parity-v0 --num-steps 64 --num-minibatches 4 --update-epochs 1 --no-compile"
LINE = [*LINE.split(), "--hidden-sizes", 8, "--checkpoint-interval", 1, "--total-timesteps", 64 * 4]


class Disk:
    """Let writing checkpoints fail: `is_full(path)` decides which ones."""

    def __init__(self, monkeypatch):
        self.save = runs.save
        self.is_full = lambda path: False
        self.tried = []
        monkeypatch.setattr(runs, "save", self.save_or_fail)

    def save_or_fail(self, path, state):
        self.tried.append((path.name, state["global_step"]))
        if self.is_full(path):
            raise FULL
        self.save(path, state)


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(runs, "END_SECONDS", 0.2)
    return Disk(monkeypatch)


def only_run():
    (folder,) = Path("runs").iterdir()
    return folder


def full_from_iteration(monkeypatch, disk, iteration):
    end_iteration = runs.Run.end_iteration

    def ended(run):
        if run.iteration == iteration:
            disk.is_full = lambda path: True
        end_iteration(run)

    monkeypatch.setattr(runs.Run, "end_iteration", ended)


def test_a_full_disk_at_the_end_is_an_error(monkeypatch, disk, capsys):
    """The run does not say that it is saved, and says what is."""
    full_from_iteration(monkeypatch, disk, 3)
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, *LINE)
    message = str(caught.value).strip()
    folder = only_run()
    assert message.startswith(f"{folder}/checkpoint.pt could not be written ({FULL}): ")
    assert f"{folder}/checkpoint.pt has 128 of 256 decisions" in message
    assert f"--resume {folder}" in message and len(message.splitlines()) == 1
    assert load(folder)["global_step"] == 128
    assert "Saved" not in capsys.readouterr().out


def test_the_end_of_a_run_waits_for_room(monkeypatch, disk, capsys):
    full_from_iteration(monkeypatch, disk, 3)
    report = runs.Run.report

    def then_there_is_room(run, what, line, **kwargs):
        report(run, what, line, **kwargs)
        if what == "end":
            disk.is_full = lambda path: False

    monkeypatch.setattr(runs.Run, "report", then_there_is_room)
    monkeypatch.setattr(runs, "END_SECONDS", 100)
    call(monkeypatch, *LINE)
    out = capsys.readouterr().out
    assert "for room on the disk, press Ctrl-C to give up" in out and "Evaluate with" in out
    assert load(only_run())["global_step"] == 256


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_wait_for_room(monkeypatch, disk, way):
    full_from_iteration(monkeypatch, disk, 3)
    sleep = runs.time.sleep

    def interrupted(seconds):
        os.kill(os.getpid(), getattr(signal, way))
        sleep(seconds)

    monkeypatch.setattr(runs.time, "sleep", interrupted)
    monkeypatch.setattr(runs, "END_SECONDS", 1000)
    with pytest.raises(SystemExit, match="has 128 of 256 decisions"):
        call(monkeypatch, *LINE)


def test_an_error_that_ends_the_run_is_shown_beside_a_checkpoint_that_failed(
    monkeypatch, disk, capsys
):
    full_from_iteration(monkeypatch, disk, 3)
    end_iteration = runs.Run.end_iteration

    def broken(run):
        end_iteration(run)
        if run.iteration == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(runs.Run, "end_iteration", broken)
    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, *LINE)
    assert "has 128 of 192 decisions; free some space and resume with" in capsys.readouterr().out


def test_a_checkpoint_that_failed_is_tried_again_at_the_next_iteration(disk):
    """Not after another whole interval."""
    disk.is_full = lambda path: len(disk.tried) == 1
    train(total_timesteps=64 * 12, checkpoint_interval=64 * 4)
    steps = [step // 64 for name, step in disk.tried if name == "checkpoint.pt"]
    assert sorted(set(steps)) == [4, 5, 8, 12]


def test_a_best_checkpoint_that_failed_is_written_later_as_it_was(monkeypatch, disk, capsys):
    """A best return counts only when best.pt has been written. The message names best.pt."""
    log = runs.Run.log

    def with_known_returns(run, scalars):
        log(run, scalars)
        run.since_checkpoint = [10.0 if run.iteration == 2 else 1.0]
        # No room for best.pt in the iterations 2 and 3
        disk.is_full = lambda path: path.name == "best.pt" and run.iteration in (2, 3)

    monkeypatch.setattr(runs.Run, "log", with_known_returns)
    folder = train(total_timesteps=64 * 6)
    best = load(folder / "best.pt")
    assert best["best"] == load(folder)["best"] == 10 and best["global_step"] == 128
    failed = f"{folder}/best.pt could not be written ({FULL})"
    assert f"{failed}: {folder}/checkpoint.pt has 128 of 128 decisions" in capsys.readouterr().out


small_sac = dict(
    env_id="parity_env:Parity-v0", learning_starts=20, batch_size=8, hidden_sizes=(8, 8), buffer_size=1000,
    updates_per_step=0.1, save_buffer=True, checkpoint_interval=1,
)  # fmt: skip


def train_sac(**settings):
    return conftest.train(sac, small_sac, **settings)


def test_weights_are_saved_without_room_for_the_buffer(monkeypatch, disk, capsys):
    """The checkpoint refers to the last complete buffer, and a resumed run continues with that one."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    disk.is_full = lambda path: path.name == "buffer_200.pt"
    with pytest.raises(runs.NotSaved, match=r"buffer_200.pt could not .*, buffer is in buffer_150"):
        train_sac(total_timesteps=200)
    folder = only_run()
    state = checkpoints.load(folder, sac.__file__)[1]
    assert state["global_step"] == 200 and state["large"] == {"buffer": "buffer_150.pt"}
    assert sorted(path.name for path in folder.glob("buffer*")) == ["buffer_150.pt"]

    buffers = []
    monkeypatch.setattr(
        sac.ReplayBuffer, "sample", sampled := spy(sac.ReplayBuffer.sample, buffers)
    )
    disk.is_full = lambda path: False
    conftest.call(sac, monkeypatch, "--resume", folder, "--total-timesteps", 300)
    out = capsys.readouterr().out
    assert "buffer_150.pt is of 150 decisions, and checkpoint.pt of 200" in out
    assert sampled and buffers[-1].num_added == 250, "150 old transitions and 100 new ones"
    last_old, first_new = buffers[-1].next_row[149], buffers[-1].obs[150]
    assert last_old >= buffers[-1].first_final, "an end, because the next decision is not there"
    assert not np.array_equal(buffers[-1].obs[last_old], first_new)


def spy(function, seen):
    def spied(self, *args):
        seen.append(self)
        return function(self, *args)

    return spied


def test_a_buffer_that_was_never_written_is_not_claimed(monkeypatch, disk, capsys):
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    disk.is_full = lambda path: path.name.startswith("buffer")
    with pytest.raises(runs.NotSaved, match=r"has 100 of 100 decisions, buffer is not saved"):
        train_sac(total_timesteps=100)
    folder = only_run()
    assert checkpoints.load(folder, sac.__file__)[1]["large"] == {}
    disk.is_full = lambda path: False
    conftest.call(sac, monkeypatch, "--resume", folder, "--total-timesteps", 150)
    assert "checkpoint.pt has no buffer: it starts empty" in capsys.readouterr().out


def test_a_buffer_that_leaves_no_room_for_the_checkpoint_is_removed(monkeypatch, disk):
    """Otherwise no later checkpoint could be written."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    disk.is_full = lambda path: (
        path.name == "checkpoint.pt" and path.with_name("buffer_100.pt").exists()
    )
    folder = train_sac(total_timesteps=200)
    assert [path.name for path in folder.glob("buffer*")] == ["buffer_200.pt"]
    assert checkpoints.load(folder, sac.__file__)[1]["large"] == {"buffer": "buffer_200.pt"}


def test_surplus_checkpoints_make_room_on_a_full_disk(monkeypatch, disk):
    """A third numbered checkpoint leaves no room for the buffer, and --keep-checkpoints is 2."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)

    def is_full(path):
        if path.name.startswith("buffer"):
            return len(list(path.parent.glob("checkpoint_*"))) > 2
        return False

    disk.is_full = is_full
    folder = train_sac(total_timesteps=200, keep_checkpoints=2)
    names = sorted(path.name for path in folder.glob("*_*.pt"))
    assert names == ["buffer_200.pt", "checkpoint_150.pt", "checkpoint_200.pt"]


def test_the_last_good_files_are_never_removed_for_room(monkeypatch, disk):
    """Not the buffer to which checkpoint.pt refers, while a newer one can't be added to it."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    seen = []

    def is_full(path):
        if path.name == "checkpoint.pt" and path.with_name("buffer_150.pt").exists():
            seen.append(path.with_name("buffer_100.pt").exists())
            return True
        return path.name == "buffer_200.pt"

    disk.is_full = is_full
    with pytest.raises(runs.NotSaved, match="buffer is in buffer_100.pt"):
        train_sac(total_timesteps=200, keep_checkpoints=2)
    assert seen and all(seen)
    names = sorted(path.name for path in only_run().glob("*_*.pt"))
    assert names == ["buffer_100.pt", "checkpoint_150.pt", "checkpoint_200.pt"]


def test_a_buffer_that_can_not_be_added_is_named(monkeypatch, disk):
    """checkpoint.pt itself has been written: only the buffer is missing."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    disk.is_full = lambda path: (
        path.name == "checkpoint.pt" and any(path.parent.glob("buffer_*.pt"))
    )
    with pytest.raises(runs.NotSaved) as caught:
        train_sac(total_timesteps=100)
    checkpoint = f"{only_run()}/checkpoint.pt"
    line = (
        f"buffer could not be added to {checkpoint} ({FULL}): {checkpoint} has 100 of 100 decisions"
    )
    assert str(caught.value).startswith(f"{line}, buffer is not saved; free some space")


@pytest.mark.parametrize("what", ["save", "seal"])
def test_a_checkpoint_without_enough_memory_ends_no_run(monkeypatch, disk, capsys, what):
    """The first checkpoint fails, in the copy for the signature or in the file, and the next one is complete."""
    original = getattr(runs, what)
    calls = []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return original(*args)

    monkeypatch.setattr(runs, what, fails_once)
    folder = train(total_timesteps=64 * 4)
    out = capsys.readouterr().out
    assert f"{folder}/checkpoint.pt could not be written (MemoryError): there is no" in out
    assert "free some memory; the run continues and tries again" in out
    assert load(folder)["global_step"] == 256


def test_a_file_that_is_too_large_is_not_answered_with_free_space(monkeypatch, disk, capsys):
    monkeypatch.setitem(globals(), "FULL", OSError(errno.EFBIG, "File too large"))
    full_from_iteration(monkeypatch, disk, 3)
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, *LINE)
    assert "raise the limit for the size of a file (ulimit -f) and resume" in caught.value.code
    out = capsys.readouterr().out
    assert "ulimit -f" in out and "free some space" not in out and "room on the disk" not in out


def test_a_buffer_of_another_run_is_not_used(monkeypatch, capsys):
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    first = train_sac(total_timesteps=100)
    second = train_sac(total_timesteps=100, seed=2)
    shutil.copy(second / "buffer_100.pt", first)
    conftest.call(sac, monkeypatch, "--resume", first, "--total-timesteps", 150)
    assert "buffer_100.pt belongs to another run: buffer starts empty" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_is_resumed_with_its_buffer(monkeypatch, capsys):
    """It has no name of its run and no list of files, and its buffer is a plain file."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    folder = train_sac(total_timesteps=100)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    del state["run"], state["files"]
    torch.save(state, folder / "checkpoint.pt")
    buffer = torch.load(folder / "buffer_100.pt", weights_only=True)["state"]
    torch.save(buffer, folder / "buffer_100.pt")
    forget_id(folder)
    conftest.call(sac, monkeypatch, "--resume", folder, "--trust", "--total-timesteps", 200)
    assert "starts empty" not in capsys.readouterr().out
    assert [path.name for path in folder.glob("buffer*")] == ["buffer_200.pt"]


# Files of other runs


def forget_id(folder):
    """Remove the id of the run from its folder, as in an earlier version."""
    config = json.loads((folder / "config.json").read_text())
    del config["run"]
    (folder / "config.json").write_text(json.dumps(config))


def content(folder):
    """Return the files in a folder, without TensorBoard's, and what is in them."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if "events" not in path.name}


def new_run(*before):
    (folder,) = set(Path("runs").iterdir()) - set(before)
    return folder


@pytest.mark.parametrize("name", ["best.pt", "checkpoint_64.pt"])
def test_resuming_an_older_checkpoint_leaves_the_run_as_it_is(monkeypatch, capsys, name):
    """The newer checkpoint.pt is not replaced: the run continues in a folder of its own."""
    folder = train(total_timesteps=64, keep_checkpoints=4)
    older = (folder / name).read_bytes()
    call(monkeypatch, "--resume", folder, "--total-timesteps", 256)
    (folder / name).write_bytes(older)
    before = content(folder)
    points = curve(folder)
    call(monkeypatch, "--resume", folder / name, "--total-timesteps", 192, "--exp-name", "run0")
    new = new_run(folder)
    assert content(folder) == before and curve(folder) == points
    line = f"{folder / name} is not the latest checkpoint of a run's folder: the run continues in {new}"
    assert line in capsys.readouterr().out
    assert load(new)["global_step"] == 192
    assert [step for step, _ in curve(new)["losses/policy_loss"]] == [128, 192]
    assert f'"file": "{folder / name}"' in (new / "config.json").read_text()


@pytest.mark.parametrize("put", [shutil.copy, os.symlink])
def test_a_checkpoint_of_another_run_removes_no_files(monkeypatch, capsys, put):
    """It names the files of its own run, which may have the same names."""
    folder = train(total_timesteps=128, keep_checkpoints=2)
    other = train(total_timesteps=128, keep_checkpoints=2, seed=2)
    (folder / "checkpoint.pt").unlink()
    put((other / "checkpoint.pt").resolve(), folder / "checkpoint.pt")
    before = content(folder) | content(other)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 256)
    assert content(folder) | content(other) == before
    new = new_run(folder, other)
    assert f"the run continues in {new}" in capsys.readouterr().out
    assert load(new)["global_step"] == 256


def test_a_link_to_its_own_checkpoint_is_not_replaced(monkeypatch):
    folder = train(total_timesteps=64)
    (folder / "checkpoint.pt").rename("elsewhere.pt")
    (folder / "checkpoint.pt").symlink_to(Path("elsewhere.pt").resolve())
    before = content(folder)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 128)
    assert content(folder) == before and load(new_run(folder))["global_step"] == 128


def test_a_folder_without_an_id_loses_no_files_of_before(monkeypatch):
    """A folder of an earlier version: its checkpoint may be that of another run."""
    folder = train(total_timesteps=128, keep_checkpoints=2)
    forget_id(folder)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 320)
    assert only_run() == folder and load(folder)["global_step"] == 320
    numbers = sorted(int(path.stem.split("_")[1]) for path in folder.glob("checkpoint_*"))
    assert numbers == [64, 128, 256, 320]


def test_resuming_a_file_outside_of_a_run_touches_no_neighbour(monkeypatch):
    folder = train(total_timesteps=64)
    models = Path("models")
    models.mkdir()
    for name in ("policy_a.pt", "checkpoint.pt", "checkpoint_1.pt", "best.pt", "buffer_1.pt"):
        shutil.copy(folder / "checkpoint.pt", models / name)
    (models / ".notes.tmp").write_text("notes")
    before = content(models)
    for name in ("policy_a.pt", "checkpoint.pt"):
        call(
            monkeypatch,
            "--resume",
            models / name,
            "--total-timesteps",
            128,
            "--keep-checkpoints",
            2,
        )
        assert content(models) == before
    assert sorted(load(run)["global_step"] for run in Path("runs").iterdir()) == [64, 128, 128]


def test_all_ranks_continue_an_older_checkpoint_in_the_same_new_folder():
    folder = train(total_timesteps=128, keep_checkpoints=2)
    before = content(folder)
    line = ["--resume", folder / "checkpoint_64.pt", "--total-timesteps", 320, "--exp-name", "run0"]
    process = torchrun(ppo.__file__, *line)
    out = finish(process)
    assert process.returncode == 0, out
    new = new_run(folder)
    assert content(folder) == before and load(new)["global_step"] == 320
    assert (
        out.count(f"the run continues in {new}") == 1
        and f"{new}: resumed after 64 decisions; 2 ranks" in out
    )


def test_the_best_checkpoint_continues_its_run_if_it_is_the_latest(monkeypatch):
    folder = train(total_timesteps=64)
    call(monkeypatch, "--resume", folder / "best.pt", "--total-timesteps", 128)
    assert only_run() == folder and load(folder)["global_step"] == 128


def test_old_checkpoints_are_removed_by_their_number(monkeypatch):
    """Not by the time of the file, which a clock that went back makes wrong. Files of others stay."""
    folder = train(total_timesteps=64 * 4, keep_checkpoints=2)
    for path in folder.glob("*.pt"):
        os.utime(path, (2**31, 2**31))
    for name in ("checkpoint_7.pt", "checkpoint_of_mine.pt", "checkpoint_99999.pt"):
        (folder / name).write_bytes(b"mine")
    call(monkeypatch, "--resume", folder, "--total-timesteps", 64 * 6)
    names = {path.name for path in folder.glob("checkpoint_*")}
    mine = {"checkpoint_7.pt", "checkpoint_of_mine.pt", "checkpoint_99999.pt"}
    assert names == {"checkpoint_320.pt", "checkpoint_384.pt"} | mine


def test_a_checkpoint_names_no_files_of_other_folders(monkeypatch, capsys):
    """A checkpoint may come from another machine. What it names is removed when it is old."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 50)
    folder = train_sac(total_timesteps=100, keep_checkpoints=2)
    others = [Path("mine.pt"), Path("buffer_1.pt"), folder / "mine.txt", folder / "mine_1.pt"]
    names = ["../../mine.pt", "../../buffer_1.pt", "mine.txt", "mine_1.pt", "./checkpoint_50.pt"]
    for path in others:
        path.write_bytes(b"mine")
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["files"] |= dict.fromkeys(names, 1)
    line = ["--resume", folder, "--trust", "--total-timesteps", 200]
    for file in ("../../buffer_1.pt", "mine_1.pt"):
        torch.save(state | {"large": {"buffer": file}}, folder / "checkpoint.pt")
        if file.startswith(".."):
            with pytest.raises(SystemExit, match="which is not a file of its folder"):
                conftest.call(sac, monkeypatch, *line)
        else:
            conftest.call(sac, monkeypatch, *line)
        assert all(path.read_bytes() == b"mine" for path in others)
    assert "checkpoint.pt has no buffer: it starts empty" in capsys.readouterr().out


# Numbers that are not finite


def spoil(monkeypatch, change, iteration=3):
    """Call `change` with what is kept, before the end of an iteration."""
    log = runs.Run.log

    def spoiled(run, scalars):
        log(run, scalars)
        if run.iteration == iteration:
            change(run.keep | run.keep_episodes)

    monkeypatch.setattr(runs.Run, "log", spoiled)


def spoil_optimizer(kept):
    moments = kept["optimizer"].state_dict()["state"][0]["exp_avg_sq"]
    moments.view(-1)[0] = math.inf


def spoil_returns(kept):
    kept["return_rms"].var.fill_(math.nan)


def spoil_episodes(kept):
    kept["running_returns"][0] = math.nan


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (spoil_optimizer, "optimizer.state.0.exp_avg_sq"),
        (spoil_returns, "return_rms.var"),
        (spoil_episodes, "running_returns"),
    ],
)
def test_a_state_that_is_not_finite_never_replaces_a_checkpoint(monkeypatch, change, name):
    spoil(monkeypatch, change)
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, *LINE)
    message = str(caught.value).strip()
    folder = only_run()
    assert message.startswith(f"iteration 3: {name} is not finite, and this state is not saved")
    assert f"{folder}/checkpoint.pt has 128 decisions, resume from there" in message
    assert len(message.splitlines()) == 1 and load(folder)["global_step"] == 128


def test_a_state_that_is_not_finite_at_the_end_is_an_error(monkeypatch):
    spoil(monkeypatch, spoil_optimizer, iteration=3)
    stop_after(monkeypatch, ppo, "gae", 3)
    line = [*LINE[:-4], "--checkpoint-interval", 10**6, "--total-timesteps", 64 * 4]
    with pytest.raises(SystemExit, match="exp_avg_sq is not finite.*train again with a smaller"):
        call(monkeypatch, *line)
    assert not (only_run() / "checkpoint.pt").exists()


def test_what_may_be_infinite_is_saved():
    """A best value before the first one, as in a scheduler, and sums that overflow although all elements are finite."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    large = torch.full((9,), 3e38)
    state = {"plateau": plateau.state_dict(), "best": -math.inf, "large": large, "n": large.numpy()}
    assert list(checkpoints.not_finite(state, "")) == []
    rows = np.zeros(2, [("a", float), ("b", int)])
    rows["a"][1] = -math.inf
    bad = {"x": [1.0, math.nan], "y": (torch.tensor([math.inf]), 1), "rows": rows}
    assert list(checkpoints.not_finite(bad, "")) == ["x.1", "y.0", "rows.a"]


def test_an_array_that_is_infinite_from_the_start_is_saved(monkeypatch):
    start = runs.Run.start

    def with_records(run, *args, keep, **kwargs):
        return start(run, *args, keep=keep | {"records": np.full(3, -np.inf)}, **kwargs)

    monkeypatch.setattr(runs.Run, "start", with_records)
    folder = train(total_timesteps=128)
    assert torch.isinf(load(folder)["kept"]["records"]).all()
