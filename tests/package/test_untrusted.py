"""Checkpoints of unknown origin: signatures, links, control characters, and content that is malformed or too large."""

import copy
import importlib
import io
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT, call, run_script, train

import ppo_continuous_multiagent as ppo
import sac_continuous as sac
from onefile_rl import checkpoints, evaluate, fast, initial, runs, trust
from onefile_rl.arguments import check_changed_args, fits
from onefile_rl.engines import files
from onefile_rl.engines.compare import Trained
from onefile_rl.engines.printing import printable

SMALL = dict(
    env_id="parity_env:Parity-v0", num_steps=16, num_minibatches=2, update_epochs=1, hidden_sizes=(8,),
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, ppo, SMALL), partial(call, ppo)


def change(folder, **entries):
    """Change entries of a checkpoint."""
    path = folder / "checkpoint.pt"
    torch.save(torch.load(path, weights_only=True) | entries, path)


def read(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def refused(monkeypatch, *line):
    """Return the one line with which a command line is refused."""
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, *line)
    text = str(caught.value).strip()
    assert text and len(text.splitlines()) == 1
    return text


# Signatures


def test_a_run_of_this_machine_is_signed(monkeypatch):
    folder = train(total_timesteps=16)
    assert checkpoints.load(folder, ppo.__file__)[1]["signed"]
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1)


@pytest.mark.parametrize("what", ["weights", "agent_attributes", "script_numbers", "envs", "args"])
def test_a_signature_is_valid_for_its_content_only(what):
    folder = train(total_timesteps=16)
    state = read(folder)
    if what == "weights":
        next(iter(state["kept"]["agent"].values())).view(-1)[0] += 1
    elif what == "args":
        state["args"]["seed"] += 1
    else:
        state[what] = {"x": 1}
    torch.save(state, folder / "checkpoint.pt")
    assert not checkpoints.load(folder, ppo.__file__)[1]["signed"]


def test_a_signature_is_not_valid_for_another_program_of_the_same_name(monkeypatch, tmp_path):
    """The relative path of the checkpoint names another program in another folder."""
    folder = train(total_timesteps=16)
    state = read(folder)
    state["args"] |= {"unity_path": "./game", "env_id": "game"}
    torch.save(state | {"seal": trust.seal(state)}, folder / "checkpoint.pt")
    assert checkpoints.load(folder, ppo.__file__)[1]["signed"]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere / folder)
    monkeypatch.chdir(elsewhere)
    (elsewhere / "game").write_text("#!/bin/sh\ntouch started\n")
    (elsewhere / "game").chmod(0o755)
    assert "would start ./game: give --unity-path" in refused(monkeypatch, "--evaluate", folder)
    assert not Path("started").exists()


@pytest.mark.parametrize(
    ("args", "file"),
    [
        ({"env_id": "some_envs:X-v0"}, "some_envs.py"),
        ({"env_id": "no_init.some_envs:X-v0"}, "no_init/some_envs.py"),
        ({"env_id": "no_init.inner.some_envs:X-v0"}, "no_init/inner/some_envs.py"),
        ({"env_kwargs": {"xml_file": "robot.xml"}}, "robot.xml"),
        ({"reset_options": {"xml_file": "robot.xml"}}, "robot.xml"),
        ({"player_args": ["--level=robot.xml"]}, "robot.xml"),
        ({"others": {"Goalie": "policy.onnx"}}, "policy.onnx"),
    ],
)
def test_a_signature_is_not_valid_for_other_files_of_the_same_name(
    args, file, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend("")
    args = dict.fromkeys(trust.RISKY) | {"env_id": "x", "env_kwargs": {}} | args
    args["player_args"] = args["player_args"] or ()
    state = {"args": args, "changed_args": {}, "seal": ""}
    seals = []
    for name in ("one", "two", "none"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        if name != "none":
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("")
        seals.append(trust.seal(state))
        assert trust.seal(state) == seals[-1]
    assert len(set(seals)) == 3


def test_a_signature_covers_the_module_and_not_only_its_package(monkeypatch, tmp_path):
    """The folders of a package without __init__.py can be those of several projects."""
    monkeypatch.syspath_prepend(tmp_path / "one")
    (tmp_path / "one" / "shared").mkdir(parents=True)
    (tmp_path / "two" / "shared").mkdir(parents=True)
    (tmp_path / "two" / "shared" / "some_envs.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "two")
    before = trust.module_places("shared.some_envs")
    folders = [str(tmp_path / name / "shared") for name in ("two", "one")]
    assert before == [*folders, f"{folders[0]}/some_envs.py"]
    (tmp_path / "two" / "shared" / "some_envs.py").rename(
        tmp_path / "one" / "shared" / "some_envs.py"
    )
    importlib.invalidate_caches()
    assert trust.module_places("shared.some_envs") == [*folders, f"{folders[1]}/some_envs.py"]


@pytest.mark.parametrize("module", ["nowhere", "sys", "json.nowhere", "sys.x", ".json", "json..x"])
def test_a_module_that_can_not_be_located_is_not_signed(module):
    args = dict.fromkeys(trust.RISKY) | {"env_id": f"{module}:X-v0"}
    state = {"args": args, "changed_args": {}, "seal": ""}
    assert trust.seal(state) == "" and not trust.is_signed(state)


def test_a_signature_is_checked_without_an_import(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "with_init").mkdir()
    for name in ("__init__", "some_envs"):
        (tmp_path / "with_init" / f"{name}.py").write_text("raise SystemExit('imported')")
    files = [str(tmp_path / "with_init" / f"{name}.py") for name in ("__init__", "some_envs")]
    assert trust.module_places("with_init.some_envs") == files
    assert "with_init" not in sys.modules


def test_a_checkpoint_contains_no_path_that_the_user_did_not_give(monkeypatch, tmp_path):
    folder = train(total_timesteps=16)
    with zipfile.ZipFile(folder / "checkpoint.pt") as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert str(tmp_path).encode() not in content and str(ROOT).encode() not in content


def test_an_option_on_the_command_line_answers_the_question_about_it(monkeypatch, capsys):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    state = read(folder)
    change(folder, args=state["args"] | {"track": True})
    assert "give --track" in refused(monkeypatch, "--evaluate", folder)
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--no-track")
    assert "after 16 decisions" in capsys.readouterr().out


def test_a_value_is_not_taken_for_the_option_trust(monkeypatch):
    folder = train(total_timesteps=16)
    change(folder, seal="")
    assert "or --trust" in refused(monkeypatch, "--evaluate", folder, "--behavior", "trust")


def test_the_envs_of_an_unknown_checkpoint_are_not_restored(monkeypatch, capsys):
    """Their attributes would be set from the file."""
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, seal="")
    state = read(folder)["envs"]
    assert state is not None
    call(monkeypatch, "--resume", folder, "--total-timesteps", 32)
    assert "the envs start new episodes; --trust restores them" in capsys.readouterr().out
    change(folder, seal="")
    call(monkeypatch, "--resume", folder, "--total-timesteps", 48, "--trust")
    assert "new episodes" not in capsys.readouterr().out


def test_an_unknown_checkpoint_does_not_change_risky_arguments(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, changed_args={"unity_path": "./evil.sh"})
    text = refused(monkeypatch, "--resume", folder, "--total-timesteps", 32)
    assert "would change --unity-path: give --trust" in text


@pytest.mark.parametrize(
    "name", [":forward", ":_modules", ":__class__", "actor_mean.0:weight", "nowhere:x", ":act"]
)
def test_only_numbers_and_strings_of_the_agent_are_replaced(name, monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, agent_attributes={name: 1})
    for line in (["--evaluate", folder], ["--resume", folder, "--total-timesteps", 32]):
        assert f"has the attribute {name}" in refused(monkeypatch, *line)


@pytest.mark.parametrize("name", ["train", "np", "__name__", "__builtins__", "len", "Agent"])
def test_only_numbers_of_the_script_are_replaced(name, monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, script_numbers={name: 1})
    before = vars(ppo).get(name)
    text = refused(monkeypatch, "--resume", folder, "--total-timesteps", 32)
    assert f"has the number {name}" in text and vars(ppo).get(name) is before


# Links


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_lock_that_is_a_link_is_not_followed(make, monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    Path("precious").write_text("precious")
    (folder / "lock").unlink()
    make(Path("precious").resolve(), folder / "lock")
    text = refused(monkeypatch, "--resume", folder, "--total-timesteps", 32)
    assert "lock is a link to another file: delete it" in text
    assert Path("precious").read_text() == "precious"


def test_links_in_the_folder_of_a_run_are_replaced(monkeypatch):
    """Those of a temporary file and of an export; the files that they point to stay as they are."""
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    Path("precious").write_text("precious")
    for name in (f".policy.onnx.{os.getpid()}.tmp", "policy.onnx"):
        (folder / name).symlink_to(Path("precious").resolve())
    call(monkeypatch, "--export", folder)
    assert Path("precious").read_text() == "precious"
    assert not (folder / "policy.onnx").is_symlink() and (folder / "policy.onnx").stat().st_size > 8


@pytest.mark.parametrize("what", ["folder", "file"])
def test_links_in_place_of_videos_are_not_followed(what, monkeypatch, capsys):
    """Nothing outside of the run's folder is written or removed."""
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    outside = Path("outside").resolve()
    outside.mkdir()
    precious = outside / ".16.1.tmp.mp4"
    precious.write_text("precious")
    if what == "folder":
        (folder / "videos").symlink_to(outside)
    else:
        (folder / "videos").mkdir()
        (folder / "videos" / f".evaluation.{os.getpid()}.tmp.mp4").symlink_to(precious)
        (folder / "videos" / f".32.{os.getpid()}.tmp.mp4").symlink_to(precious)

    def record(args, make_envs, play, agent, spec, path):
        path.write_bytes(b"video")

    monkeypatch.setattr(evaluate, "record", record)
    monkeypatch.setattr(evaluate, "check_video", lambda path: None)
    line = ["--resume", folder, "--total-timesteps", 32, "--capture-video", "--video-interval", 16]
    call(monkeypatch, *line)
    out = capsys.readouterr().out
    line = ["--evaluate", folder, "--eval-episodes", 1, "--capture-video"]
    problem = f"{folder}/videos is a link to another folder: delete it"
    if what == "folder":
        assert problem in out and problem in refused(monkeypatch, *line)
    else:
        call(monkeypatch, *line)
        assert (folder / "videos" / "evaluation.mp4").read_bytes() == b"video"
    assert list(outside.iterdir()) == [precious] and precious.read_text() == "precious"
    assert runs.load(folder, ppo.__file__)[1]["global_step"] == 32


# Text


def test_control_characters_are_never_printed():
    assert printable("a\033[2Jb\r\n\x9b\u202ec\ud800é±") == "a\\x1b[2Jb\\r\\n\\x9b\\u202ec\\ud800é±"


ESCAPE = "\033]0;x\007"
TEXTS = {
    "script": dict(script=ESCAPE),
    "format": dict(format=ESCAPE),
    "argument": dict(args=ESCAPE),
    "env_id": dict(args={"env_id": f"x{ESCAPE}:y"}),
    "unity_path": dict(args={"unity_path": ESCAPE}),
    "spec": dict(spec={ESCAPE: 1}),
    "spec value": dict(spec={"sensors": ESCAPE}),
    "kept": dict(kept={ESCAPE: 1}),
    "attribute": dict(agent_attributes={f":{ESCAPE}": 1}),
    "number": dict(script_numbers={ESCAPE: 1}),
    "changed": dict(changed_args={"exp_name": ESCAPE}),
    "large": dict(large={"buffer": f"../{ESCAPE}"}),
    "weights": dict(weights={ESCAPE: torch.zeros(1)}),
}


@pytest.mark.parametrize("what", TEXTS)
@pytest.mark.parametrize("option", ["--evaluate", "--resume", "--help"])
def test_a_checkpoint_does_not_write_control_characters(what, option, monkeypatch, capsys):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    state = read(folder)
    capsys.readouterr()
    for name, value in TEXTS[what].items():
        if value is ESCAPE and name == "args":
            state["args"][ESCAPE] = 1
        elif name == "weights":
            state["kept"]["agent"] |= value
        elif isinstance(value, dict):
            state[name] |= value
        else:
            state[name] = value
    torch.save(state, folder / "checkpoint.pt")
    line = ["--evaluate" if option == "--help" else option, folder, "--total-timesteps", 32]
    error = ""
    try:
        call(monkeypatch, *line, *(["--help"] if option == "--help" else []))
    except SystemExit as end:
        error = str(end)
    out, err = capsys.readouterr()
    assert "\033]" not in out + err + error and "\007" not in out + err + error


def test_a_model_does_not_write_control_characters():
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    (folder / "policy.onnx").write_bytes(ESCAPE.encode() * 9)
    with pytest.raises(ValueError, match="is not an ONNX model, or is incomplete") as caught:
        Trained(folder)
    assert str(caught.value).isprintable()


def test_results_survive_an_ascii_terminal(tmp_path):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    command = [sys.executable, ppo.__file__, "--evaluate", str(folder), "--eval-episodes", "2"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LANG": "C", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert out.returncode == 0, out.stderr
    assert b"2 episodes" in out.stdout and b" +- " in out.stdout and b", from " in out.stdout


# Content that is too large


def inflate(path):
    """Replace the largest tensor in a file by 64 MiB of zeros, compressed."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    largest = max(entries, key=lambda name: len(entries[name]) * ("data/" in name))
    entries[largest] = bytes(2**26)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    assert path.stat().st_size < 2**20


def test_a_file_that_inflates_is_refused(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    inflate(folder / "checkpoint.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert "is not a checkpoint, or is incomplete" in refused(monkeypatch, "--evaluate", folder)
    with pytest.raises(ValueError, match="is not a checkpoint, or is incomplete"):
        Trained(folder)


def test_a_buffer_that_inflates_is_refused(monkeypatch):
    line = [
        "--env-id",
        "parity_env:Parity-v0",
        "--save-buffer",
        "--hidden-sizes",
        8,
        "--batch-size",
    ]
    line += [8, "--learning-starts", 20, "--buffer-size", 1000, "--no-compile"]
    conftest.call(sac, monkeypatch, *line, "--total-timesteps", 64)
    (folder,) = Path("runs").iterdir()
    inflate(folder / "buffer_64.pt")
    with pytest.raises(SystemExit) as caught:
        conftest.call(sac, monkeypatch, "--resume", folder, "--total-timesteps", 128)
    message = str(caught.value).strip()
    assert message.endswith("is incomplete: delete it to continue with a new one")
    assert "buffer_64.pt" in message and len(message.splitlines()) == 1


def test_a_buffer_that_exceeds_the_memory_is_not_called_incomplete():
    class Buffer:
        def restore(self, state):
            raise MemoryError

    files_of = {"large": {"buffer": "buffer_1.pt"}, "run": "a"}
    torch.save({"run": "a", "global_step": 1, "state": {}}, "buffer_1.pt")
    run = runs.Run.__new__(runs.Run)
    run.resumed = (Path("checkpoint.pt"), files_of)
    with pytest.raises(MemoryError):
        run.restore_large("buffer", Buffer())


STATISTICS = {
    "no dict": [1, 2],
    "no agent": {"kept": {}},
    "no tensor": {"obs_rms.mean": [0.0], "obs_rms.scale": [1.0]},
    "no scale": {"obs_rms.mean": torch.zeros(4)},
    "a scale of 0": {"obs_rms.mean": torch.zeros(4), "obs_rms.scale": torch.zeros(4)},
    "nan": {"obs_rms.mean": torch.full((4,), math.nan), "obs_rms.scale": torch.ones(4)},
    "other sizes": {"obs_rms.mean": torch.zeros(4), "obs_rms.scale": torch.ones(5)},
    "no vector": {"obs_rms.mean": torch.zeros(2, 2), "obs_rms.scale": torch.ones(2, 2)},
    "sparse": {"obs_rms.mean": torch.zeros(4).to_sparse(), "obs_rms.scale": torch.ones(4)},
}


@pytest.mark.parametrize("what", STATISTICS)
def test_compare_refuses_invalid_statistics(what):
    content = STATISTICS[what]
    if isinstance(content, dict) and "kept" not in content:
        content = {"kept": {"agent": content}}
    torch.save(content, "checkpoint.pt")
    with pytest.raises(ValueError) as caught:
        Trained(".")
    assert len(str(caught.value).splitlines()) == 1 and "checkpoint.pt" in str(caught.value)


def test_compare_refuses_a_model_of_another_run(monkeypatch):
    mine = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    other = train(env_id="Hopper-v5", total_timesteps=16, exp_name="other")
    call(monkeypatch, "--export", other)
    shutil.copy(other / "policy.onnx", mine)
    with pytest.raises(ValueError, match="is not the policy of this run: export the run again"):
        Trained(mine)
    assert Trained(other).policy is not None


def test_a_file_that_is_larger_than_the_memory_is_refused(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    monkeypatch.setattr(files, "free_memory", lambda: 1000)
    assert "does not fit into the free memory" in refused(monkeypatch, "--evaluate", folder)


def test_a_tensor_that_is_larger_than_its_memory_is_refused(monkeypatch):
    """One number that is repeated 2^40 times."""
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    state = read(folder)
    state["kept"]["agent"]["x"] = torch.zeros(1).expand(2**40)
    torch.save(state, folder / "checkpoint.pt")
    assert "it is larger than its file" in refused(monkeypatch, "--evaluate", folder)


def test_lists_that_contain_each_other_are_refused(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    x = [1] * 10
    for _ in range(40):
        x = [x] * 10
    change(folder, running={"x": x})
    assert "it is larger than its file" in refused(monkeypatch, "--evaluate", folder)
    y = []
    y.append(y)
    change(folder, running={"y": y})
    assert "it is larger than its file" in refused(monkeypatch, "--evaluate", folder)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("args", "hidden_sizes", (2**16, 2**16)),
        ("spec", "obs_dim", 2**38),
        ("spec", "action_dim", 2**38),
    ],
)
@pytest.mark.parametrize("option", ["--evaluate", "--resume", "--export"])
def test_an_agent_of_absurd_size_is_refused_before_memory_is_taken(
    where, name, value, option, monkeypatch
):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, **{where: read(folder)[where] | {name: value}})
    text = refused(monkeypatch, option, folder, "--total-timesteps", 32)
    assert "does not fit this script's network" in text


# Malformed content


def test_values_are_checked_against_the_types_of_the_arguments():
    good = [
        (1, int),
        (1, float),
        (None, str | None),
        ((1, 2), tuple[int, ...]),
        ({}, dict),
        (True, bool),
    ]
    bad = [
        (True, int),
        ("1", float),
        (1, str | None),
        ((1, "x"), tuple[int, ...]),
        (1, dict),
        (1, bool),
    ]
    assert all(fits(*pair) for pair in good) and not any(fits(*pair) for pair in bad)


def paths_in(x, path=(), depth=4):
    """Yield the paths of the entries of dicts and lists: all of the first levels, and a few of long lists."""
    if depth and isinstance(x, (dict, list, tuple)):
        items = list(x.items()) if isinstance(x, dict) else list(enumerate(x))[:2]
        for key, value in items:
            yield (*path, key)
            yield from paths_in(value, (*path, key), depth - 1)


def mutate(x, path, change):
    """Return x with the entry at `path` changed, or without it if `change` is "delete"."""
    x = list(x) if isinstance(x, tuple) else x
    key, *rest = path
    if rest:
        x[key] = mutate(x[key], rest, change)
    elif change == "delete":
        del x[key]
    else:
        x[key] = change(x[key])
    return x


CHANGES = [
    "delete",
    lambda x: None,
    lambda x: -1,
    lambda x: 2**63,
    lambda x: float("nan"),
    lambda x: "\033[31m",
    lambda x: [],
    lambda x: {},
    lambda x: {"a": x},
    lambda x: [x, x],
    lambda x: torch.zeros(2, 3),
    lambda x: x[:0] if isinstance(x, torch.Tensor) and x.ndim else (x,),
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("part", [0, 1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_a_malformed_checkpoint_is_one_line_or_works(part, monkeypatch, capsys, tmp_path):
    """Each entry of a real checkpoint is deleted or changed."""
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    good = read(folder)
    rng = random.Random(part)
    paths = list(paths_in(good))
    first = [path for path in paths if len(path) == 1]
    cases = [(path, "delete") for path in first[part::4]]
    cases += [(rng.choice(paths), rng.choice(CHANGES)) for _ in range(80)]
    monkeypatch.setattr(runs, "save", lambda *_: None)  # the checkpoint stays as it is
    bad = folder / "checkpoint.pt"
    ended = 0
    for path, change in cases:
        buffer = io.BytesIO()
        torch.save(mutate(copy.deepcopy(good), path, change), buffer)
        bad.write_bytes(buffer.getvalue())
        option = rng.choice(["--evaluate", "--resume", "--resume", "--export"])
        line = [option, folder, "--total-timesteps", 32, "--eval-episodes", 1, "--no-compile"]
        monkeypatch.setattr(sys, "argv", ["ppo.py", *map(str, line)])
        if rng.random() < 0.5:
            sys.argv.append("--trust")
        try:
            ppo.main()
        except SystemExit as end:
            ended += 1
            text = str(end).strip()
            assert len(text.splitlines()) == 1 and "\033" not in text, (path, text)
        except Exception as error:
            raise AssertionError(f"{path} {option}: {error!r}") from error
    assert ended >= len(first) // 4
    capsys.readouterr()


def test_arguments_that_training_has_changed_are_checked_as_those_of_a_command_line(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, changed_args={"checkpoint_interval": 0})
    text = refused(monkeypatch, "--resume", folder, "--total-timesteps", 32)
    problem = "changed_args: --checkpoint-interval 0: must be above 0"
    assert text.endswith(f"checkpoint.pt is not a valid checkpoint: {problem}")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("video_interval", 0, "--video-interval 0: must be above 0"),
        ("keep_checkpoints", -3, "--keep-checkpoints -3: must be above 0"),
        ("num_minibatches", 0, "--num-minibatches 0: must be above 0"),
        ("num_steps", 10**15, "--num-steps 1000000000000000: is too large"),
        ("learning_rate", float("inf"), "--learning-rate inf: must be a finite number"),
        ("learning_rate", "x", "--learning-rate can't be 'x'"),
        ("nothing", 1, "--nothing can't be 1"),
    ],
)
def test_arguments_that_can_not_have_been_changed_like_this_are_refused(name, value, problem):
    state = {"signed": False, "changed_args": {name: value}}
    with pytest.raises(
        ValueError, match=re.escape(f"x.pt is not a valid checkpoint: changed_args: {problem}")
    ):
        check_changed_args("x.pt", state, ppo.Args(), ppo.check)
    check_changed_args("x.pt", state | {"changed_args": {"ent_coef": 0.0}}, ppo.Args(), ppo.check)


def test_another_file_of_the_run_does_not_change_arguments_unchecked(monkeypatch, capsys):
    """checkpoint.pt is used for a file with the same state only."""
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, seal="")
    shutil.copy(folder / "checkpoint.pt", folder / "best.pt")
    change(folder, changed_args={"keep_checkpoints": -3})
    call(monkeypatch, "--resume", folder / "best.pt", "--total-timesteps", 32)
    assert "keep_checkpoints" not in capsys.readouterr().out


def test_an_optimizer_that_could_not_make_an_update_is_refused(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    state = read(folder)
    state["kept"]["optimizer"]["param_groups"][0]["betas"] = (0.9,)
    torch.save(state, folder / "checkpoint.pt")
    text = refused(monkeypatch, "--resume", folder, "--total-timesteps", 32)
    assert "checkpoint.pt does not fit the Adam of this script: betas is (0.9,)" in text


@pytest.mark.parametrize("Adam", [fast.Adam, torch.optim.Adam])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("betas", 0.9),
        ("betas", (-1.0, 0.9)),
        ("betas", ("x", "y")),
        ("eps", None),
        ("eps", "x"),
        ("lr", float("nan")),
        ("lr", True),
    ],
)
def test_options_of_an_optimizer_have_the_form_of_those_of_the_script(name, value, Adam):
    optimizer = Adam([torch.nn.Parameter(torch.zeros(2))])
    saved = copy.deepcopy(optimizer.state_dict())
    checkpoints.restore_state(optimizer, saved | {}, "x.pt")
    saved["param_groups"][0][name] = value
    with pytest.raises((ValueError, TypeError)):  # a TypeError of an unknown checkpoint is one line
        checkpoints.restore_state(optimizer, saved, "x.pt")


@pytest.mark.parametrize("option", ["--evaluate", "--resume", "--export"])
def test_weights_of_another_kind_are_refused(option, monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    state = read(folder)
    weights = state["kept"]["agent"]
    name = next(name for name in weights if name.endswith("weight"))
    weight = weights[name]
    weights[name] = weight.int()
    torch.save(state, folder / "checkpoint.pt")
    text = refused(monkeypatch, option, folder, "--total-timesteps", 32)
    assert text.endswith(f"checkpoint.pt does not fit this script's network: {name}")
    for dtype in (torch.complex64, torch.float8_e5m2):
        weights[name] = weight.to(dtype)
        torch.save(state, folder / "checkpoint.pt")
        with pytest.raises(ValueError, match=f"{name} of the agent is {dtype}"):
            checkpoints.load(folder, ppo.__file__)


@pytest.mark.parametrize("entry", [{"best": float("nan")}, {"iteration": 2**62}])
def test_progress_that_is_not_possible_is_refused(entry):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, **entry)
    ((name, value),) = entry.items()
    with pytest.raises(ValueError, match=f"is not a valid checkpoint: {name} is {value}"):
        checkpoints.load(folder, ppo.__file__)


@pytest.mark.parametrize("option", ["--evaluate", "--resume", "--export"])
def test_an_agent_that_is_not_finite_is_refused(option, monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    state = read(folder)
    name = next(name for name in state["kept"]["agent"] if name.endswith("weight"))
    state["kept"]["agent"][name][0, 0] = float("nan")
    torch.save(state | {"seal": trust.seal(state)}, folder / "checkpoint.pt")
    text = refused(monkeypatch, option, folder, "--total-timesteps", 32)
    assert text.endswith(f"is not a valid checkpoint: {name} of the agent is not finite")
    assert not (folder / "policy.onnx").exists()


def test_a_file_that_is_not_an_archive_is_one_line(monkeypatch):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    path = folder / "checkpoint.pt"
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert "not a checkpoint" in refused(monkeypatch, "--evaluate", folder)
    for _ in range(20):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 20):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
        except SystemExit as end:
            assert len(str(end).strip().splitlines()) == 1
    torch.save({"format": 4}, path, _use_new_zipfile_serialization=False)
    assert "not a checkpoint" in refused(monkeypatch, "--evaluate", folder)


READERS = {
    "a file": lambda path: files.read(path),
    "a run": lambda path: checkpoints.load(path.parent, ppo.__file__),
    "a run to start from": lambda path: initial.read(path.parent, ppo.__file__),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "/dev/null")])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(make, reader):
    """The reader of a pipe would wait for its writer: it has a thread of its own."""
    path = Path("checkpoint.pt").resolve()
    make(path)
    lines = []

    def read_it():
        try:
            READERS[reader](path)
        except ValueError as error:
            lines.append(str(error))

    thread = threading.Thread(target=read_it, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # ends the thread
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].endswith(f"{path} is not a regular file: give a checkpoint")


def test_a_malformed_checkpoint_is_one_line_on_the_terminal(tmp_path):
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=16)
    change(folder, spec=[])
    out = run_script(ppo, f"--evaluate {folder.resolve()}", tmp_path)
    assert out.returncode == 1 and "is not a valid checkpoint: spec is a list" in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
