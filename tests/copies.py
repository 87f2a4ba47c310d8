"""Changed copies of the scripts, as users make them: replace lines of the real source, import the copy, run it."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from conftest import ROOT, call, stop_after

from onefile_rl import checkpoints

ENV = "parity_env:Parity-v0"
PPO = dict(
    num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8), total_timesteps=192
)
SAC = dict(
    buffer_size=500, learning_starts=20, batch_size=16, hidden_sizes=(8, 8), total_timesteps=80
)
SMALL = {
    "ppo_continuous_multiagent.py": PPO,
    "sac_continuous.py": SAC,
    "crossq_continuous.py": SAC | {"activation": "silu"},  # see SMOOTH of test_crossq.py
}
numbers = itertools.count()


def write_copy(name, *changes, to="my_script.py"):
    """Write a copy of a script in which each old text, which must occur once, is replaced by a new one."""
    source = (ROOT / name).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    Path(to).write_text(source)


def copy_of(name, *changes, to="my_script.py"):
    """Return a changed copy of a script as a module."""
    write_copy(name, *changes, to=to)
    module = f"copy_{next(numbers)}"  # torch keeps modules by name
    spec = importlib.util.spec_from_file_location(module, Path(to).resolve())
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.original = name
    return script


def train(script, **settings):
    """Train and return the folder of the run."""
    before = set(Path("runs").glob("*"))
    settings = (
        SMALL.get(script.original, {}) | {"env_id": ENV, "exp_name": f"run{len(before)}"} | settings
    )
    script.train(script.Args(**settings))
    (folder,) = set(Path("runs").glob("*")) - before
    return folder


def train_in_process(script, *options):
    """Train in a new process, and return the folder of the run and the output."""
    before = set(Path("runs").glob("*"))
    settings = SMALL[script.original] | {"env_id": ENV, "exp_name": f"run{len(before)}"}
    line = []
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else (value,)
        line += ["--" + name.replace("_", "-"), *map(str, values)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "my_script.py", *line, *options]
    out = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert out.returncode == 0, out.stderr
    (folder,) = set(Path("runs").glob("*")) - before
    return folder, out.stdout


def state_of(script, folder):
    """Return the content of the run's checkpoint."""
    return checkpoints.load(folder, script.__file__)[1]


def weights(script, folder):
    return state_of(script, folder)["kept"]["agent"]


def saved(script, folder):
    """Return the agent as it was saved, in evaluation mode, and its spec."""
    state = state_of(script, folder)
    agent = script.Agent(state["spec"], script.Args(**state["args"]))
    agent.load_state_dict(state["kept"]["agent"])
    return agent.eval(), state["spec"]


def train_in_two_parts(script, monkeypatch, function="gae", times=2, **settings):
    """Stop a run after the iteration in which a function is called for the given time, and resume it."""
    with monkeypatch.context() as patch:
        stop_after(patch, script, function, times)
        folder = train(script, **settings)
    assert 0 < state_of(script, folder)["global_step"] < SMALL[script.original]["total_timesteps"]
    call(script, monkeypatch, "--resume", folder)
    return folder


def assert_equal_states(one, other):
    """Assert that two checkpoints have the same content in `kept`, to the byte."""
    flat_one, flat_other = dict(flatten(one["kept"])), dict(flatten(other["kept"]))
    assert flat_one.keys() == flat_other.keys()
    for name, x in flat_one.items():
        y = flat_other[name]
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


def flatten(x, path=""):
    if isinstance(x, dict):
        for key, value in x.items():
            yield from flatten(value, f"{path}.{key}")
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from flatten(value, f"{path}.{i}")
    else:
        yield path, x


def torchrun(*line, script="my_script.py"):
    """Run a script of this folder with two ranks, and return its output."""
    options = [
        "--nproc_per_node=2",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, script, *map(str, line)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    out = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    return re.sub(r"\r", "\n", out.stdout + out.stderr), out.returncode
