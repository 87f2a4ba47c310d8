"""--init-from: a new run that starts with the weights and statistics of another one."""

import importlib
import json
import shutil
from functools import partial
from pathlib import Path

import conftest
import gymnasium as gym
import numpy as np
import parity_env
import pytest
import torch
from conftest import assert_refused, call, curve, needs_compiler, stop_after
from copies import copy_of
from test_distributed import finish, torchrun

import ppo_continuous_multiagent as ppo
from onefile_rl import checkpoints, initial, runs

PPO = dict(
    num_steps=32, num_minibatches=2, update_epochs=1, hidden_sizes=(8, 8), total_timesteps=64
)
SAC = dict(
    buffer_size=500, learning_starts=20, batch_size=16, hidden_sizes=(8, 8), total_timesteps=60
)
SCRIPTS = {
    "ppo_continuous_multiagent": PPO | {"env_id": "parity_env:Parity-v0"},
    "ppo_discrete_multiagent": PPO | {"env_id": "parity_env:MaskedBranches-v0"},
    "ppo_hybrid_multiagent": PPO | {"env_id": "parity_env:Hybrid-v0"},
    "ppo_lstm_multiagent": PPO
    | {"env_id": "parity_env:MaskedBranches-v0", "memory_size": 12, "sequence_length": 5},
    "ppo_pixel": dict(
        env_id="parity_env:ParityPixels-v0", num_envs=2, num_steps=32, num_minibatches=4,
        update_epochs=1, features=16, total_timesteps=64,
    ),
    "sac_continuous": SAC | {"env_id": "parity_env:Parity-v0"},
    "crossq_continuous": SAC | {"env_id": "parity_env:Parity-v0"},
    "lbc_discrete": dict(
        env_id="parity_env:MaskedBranches-v0", num_envs=3, sequence_length=8, batch_size=8,
        replay_size=20, hidden_sizes=(8, 8), eval_interval=0, total_timesteps=240,
    ),
}  # fmt: skip
SMALL = SCRIPTS["ppo_continuous_multiagent"]

pytestmark = pytest.mark.usefixtures("empty_folder")
call = partial(call, ppo)


def train(script=ppo, **settings):
    return conftest.train(script, SCRIPTS.get(script.__name__, SMALL), **settings)


def load(folder, script=ppo):
    return checkpoints.load(folder, script.__file__)[1]


def tensors(folder, script=ppo):
    """Return the tensors of all modules in a checkpoint, by name."""
    kept = load(folder, script)["kept"]
    modules = [name for name in ("agent", "return_rms") if name in kept]
    return {f"{name}.{key}": x for name in modules for key, x in kept[name].items()}


def states_at_the_start(monkeypatch):
    """Return a list that gets the first state of each run: all that a checkpoint of it would have."""
    states = []
    iterations = runs.Run.iterations

    def begun(run):
        states.append(run.snapshot)
        yield from iterations(run)

    monkeypatch.setattr(runs.Run, "iterations", begun)
    return states


def assert_started_with(state, expected):
    for name, x in expected.items():
        module, _, key = name.partition(".")
        torch.testing.assert_close(state["kept"][module][key], x, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_starts_with_weights_and_statistics_and_nothing_else(
    name, monkeypatch, capsys
):
    """Another seed and env, so that nothing is equal by chance. Optimizers, counters and steps start new."""
    script = importlib.import_module(name)
    source = train(script, seed=3)
    expected = tensors(source, script)
    capsys.readouterr()
    states = states_at_the_start(monkeypatch)
    new = train(script, seed=4)
    other = train(script, seed=4, init_from=str(source))
    fresh, state = states
    assert_started_with(state, expected)
    assert state["global_step"] == state["iteration"] == 0 and state["recent"] == []
    assert any(
        not torch.equal(x, fresh["kept"]["agent"][k]) for k, x in state["kept"]["agent"].items()
    )
    for key in state["kept"].keys() - {"agent", "return_rms"}:
        text = repr(checkpoints.plain(state["kept"][key]))
        assert text == repr(checkpoints.plain(fresh["kept"][key])), f"{key} starts new"
    out = capsys.readouterr().out
    steps = load(source, script)["global_step"]
    assert f"Starting from {source}/checkpoint.pt after {steps:,} decisions; new: " in out
    assert "starts new: it" not in out
    config = json.loads((other / "config.json").read_text())["init_from"]
    assert config["decisions"] == steps and config["run"] == load(source, script)["run"]
    assert "init_from" not in json.loads((new / "config.json").read_text())


def test_the_optimizer_starts_new():
    source = train(seed=3)
    assert load(source)["kept"]["optimizer"]["state"]
    folder = train(init_from=str(source), update_epochs=0)
    for entry in load(folder)["kept"]["optimizer"]["state"].values():
        assert all(not torch.as_tensor(x).any() for x in entry.values())


def test_lessons_start_with_the_first(monkeypatch):
    criteria = {"measure": "progress", "threshold": 0.3}
    steps = [{"value": 0.3, "completion_criteria": criteria}, {"value": 0.6}]
    settings = dict(env_id="parity_env:Tunable-v0", curriculum={"push": {"curriculum": steps}})
    source = train(**settings)
    assert load(source)["curriculum"]["number"] == {"push": 1}
    states = states_at_the_start(monkeypatch)
    train(**settings, init_from=str(source))
    assert states[0]["curriculum"]["number"] == {"push": 0}


def test_a_file_can_be_given_instead_of_a_folder(monkeypatch):
    source = train(seed=3)
    shutil.copy(source / "checkpoint.pt", "policy.pt")
    states = states_at_the_start(monkeypatch)
    train(init_from="policy.pt")
    assert_started_with(states[0], tensors(source))


# What does not fit


def test_what_does_not_fit_is_named_and_refused(tmp_path, capsys, monkeypatch):
    source = train(hidden_sizes=(8, 6))
    with pytest.raises(ValueError) as refused:
        train(init_from=str(source))
    line = str(refused.value)
    assert "\n" not in line and line.endswith(
        ": --init-partly takes what fits, and starts the rest new"
    )
    assert f"--init-from {source}/checkpoint.pt does not fit: " in line
    assert "has weight that is [6, 8] in the checkpoint and [8, 8] here" in line
    assert "; and 1 more: " in line


def test_a_layer_that_is_missing_or_too_much_is_named():
    source = train(hidden_sizes=(8,))
    with pytest.raises(ValueError, match=r"actor.\S+ .*is not in the checkpoint"):
        train(init_from=str(source))
    deep = train(hidden_sizes=(8, 8, 8))
    with pytest.raises(ValueError, match="is in the checkpoint and not in this script"):
        train(init_from=str(deep))


def test_init_partly_starts_what_does_not_fit_new(monkeypatch, capsys):
    """A layer is new as a whole or not at all, with a line for each of them."""
    source = train(seed=3, hidden_sizes=(8, 6))
    expected = tensors(source)
    capsys.readouterr()
    states = states_at_the_start(monkeypatch)
    train(seed=4)
    train(seed=4, init_from=str(source), init_partly=True)
    fresh, state = states
    lines = [x for x in capsys.readouterr().out.splitlines() if " starts new: it " in x]
    new = {line.split(" starts new")[0] for line in lines}
    assert len(lines) == len(new) == 4, "two layers each of actor and critic"
    for name, x in state["kept"]["agent"].items():
        part = name.rpartition(".")[0]
        source_of = fresh["kept"]["agent"][name] if part in new else expected[f"agent.{name}"]
        torch.testing.assert_close(x, source_of, rtol=0, atol=0, msg=name)
    assert any(name.startswith("obs_rms") and name not in new for name in state["kept"]["agent"])


def test_statistics_are_taken_as_a_whole(monkeypatch):
    """A mean without its count would be wrong."""
    source = train(seed=3)
    path = source / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    del content["kept"]["agent"]["obs_rms.count"]
    del content["kept"]["return_rms"]["count"]
    torch.save(content, path)
    states = states_at_the_start(monkeypatch)
    train(init_from=str(source), init_partly=True)
    kept = states[0]["kept"]
    assert not kept["agent"]["obs_rms.mean"].any() and (kept["agent"]["obs_rms.var"] == 1).all()
    assert kept["return_rms"]["mean"] == 0 and kept["return_rms"]["var"] == 1


def test_an_agent_of_which_nothing_fits_is_refused():
    """The statistics of returns always fit, and are not enough."""
    source = train(norm_obs=False)
    path = source / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    content["kept"]["agent"] = {"encoder.weight": torch.zeros(3, 3)}
    torch.save(content, path)
    with pytest.raises(ValueError, match="nothing of its agent fits, leave --init-from out"):
        train(init_from=str(source), init_partly=True)


def test_settings_that_belong_to_the_weights_are_reported(capsys):
    source = train(activation="silu")
    train(init_from=str(source))
    line = f"{source}/checkpoint.pt was trained with activation silu (here tanh)"
    assert line in capsys.readouterr().out


# Tensors of the same size with another meaning


class Choices(parity_env.Parity):
    """Actions of any layout: branches alone, or with continuous actions that have bounds."""

    def __init__(self, branches=(), start=None, continuous=0, bound=1.0):
        box = gym.spaces.Box(-bound, bound, (continuous,), np.float32)
        choices = gym.spaces.MultiDiscrete(branches, start=start) if branches else None
        self.action_space = choices or box
        if choices and continuous:
            self.action_space = gym.spaces.Tuple([choices, box])

    def step(self, action):
        self.x = 0.9 * self.x + 0.1 * self.np_random.standard_normal(3)
        return self.x.astype(np.float32), 1.0, False, False, {}


gym.register("Choices-v0", Choices, max_episode_steps=20)

OTHER_ACTIONS = {
    "ppo_discrete_multiagent": [
        (dict(branches=[2, 4]),),
        (dict(branches=[3, 3]),),
        (dict(branches=[6]),),
        (dict(branches=[3, 3], start=[0, 1]),),
    ],
    "ppo_lstm_multiagent": [
        (dict(branches=[2, 4]),),
        (dict(branches=[3, 3]),),
    ],
    "lbc_discrete": [
        (dict(branches=[2, 4]),),
        (dict(branches=[3, 3]),),
    ],
    "ppo_hybrid_multiagent": [
        (dict(branches=[2, 4], continuous=2),),
        (dict(branches=[3, 3], continuous=2),),
    ],
}
PAIRS = [
    (name, *pair)
    for name, layouts in OTHER_ACTIONS.items()
    for pair in zip(layouts, [*layouts[1:], layouts[0]], strict=True)
]


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(("name", "theirs", "ours"), PAIRS)
def test_other_actions_of_the_same_size_are_refused_and_named(name, theirs, ours, partly):
    """Six logits are two branches with two and four choices, or with three each, or one branch."""
    script = importlib.import_module(name)
    source = train(script, env_id="Choices-v0", env_kwargs=theirs[0])
    settings = dict(env_id="Choices-v0", env_kwargs=ours[0])
    with pytest.raises(ValueError) as refused:
        train(script, **settings, init_from=str(source), init_partly=partly)
    line = str(refused.value)
    assert line.startswith(f"--init-from {source}/checkpoint.pt: the actions are ")
    assert str(theirs[0]["branches"]) in line and str(ours[0]["branches"]) in line
    assert line.endswith(
        "here: the sizes are equal and the meanings are not, leave --init-from out"
    )


@pytest.mark.parametrize("name", ["ppo_continuous_multiagent", "ppo_hybrid_multiagent"])
def test_other_bounds_are_no_obstacle(name, monkeypatch):
    script = importlib.import_module(name)
    layout = dict(continuous=2, branches=[3] if "hybrid" in name else [])
    settings = dict(env_id="Choices-v0")
    source = train(script, **settings, env_kwargs=layout | {"bound": 2.0})
    states = states_at_the_start(monkeypatch)
    train(script, **settings, env_kwargs=layout, init_from=str(source))
    assert_started_with(states[0], tensors(source, script))


BOX = {"action_dim": 2, "low": -1.0, "high": 1.0, "obs_dim": 20}


@pytest.mark.parametrize(
    ("theirs", "ours", "what"),
    [
        ({"entities": [[5, 5, 3]]}, {"entities": [(0, 5, 3)]}, "entities"),
        ({"entities": [[5, 5, 3]]}, {}, "entities"),
        (
            {"images": {"eye": (36, 36, 1)}, "stack": 4},
            {"images": {"eye": (36, 36, 2)}, "stack": 2},
            "images",
        ),
        ({"branches": [2], "start": [0]}, {"branches": [2], "start": [1]}, "actions"),
    ],
)
def test_other_layouts_of_the_same_size_are_found(theirs, ours, what):
    found = initial.other_layouts(BOX | theirs, BOX | ours)
    assert list(found) == [what] and found[what][0] != found[what][1]
    assert not initial.other_layouts(BOX | theirs, BOX | theirs | {"low": -2.0, "high": [1, 2]})


def test_layouts_of_other_sizes_are_left_to_the_tensors():
    """With --init-partly they start new."""
    larger = {"obs_dim": 26, "entities": [[5, 7, 3]], "action_dim": 3}
    assert not initial.other_layouts(BOX | {"entities": [[5, 5, 3]]}, BOX | larger)


# Other scripts, copies and processes


def test_a_run_of_another_script_is_taken_where_it_fits(monkeypatch, capsys):
    hybrid = importlib.import_module("ppo_hybrid_multiagent")
    lstm = importlib.import_module("ppo_lstm_multiagent")
    source = train(lstm, seed=3)
    with pytest.raises(ValueError, match="does not fit"):
        train(hybrid, init_from=str(source))
    states = states_at_the_start(monkeypatch)
    capsys.readouterr()
    train(hybrid, init_from=str(source), init_partly=True)
    out = capsys.readouterr().out
    assert f"{source}/checkpoint.pt was written by ppo_lstm_multiagent.py" in out
    expected = tensors(source, lstm)
    assert_started_with(states[0], {k: x for k, x in expected.items() if "obs_rms" in k})


def test_a_changed_copy_takes_its_own_modules_too(monkeypatch, capsys):
    """A module that checkpoints keep under the name of its variable; and the run of the original, partly."""
    change = (
        "        return_rms = Normalizer()",
        "        return_rms = Normalizer()\n        target = torch.nn.Linear(3, 2)",
    )
    script = copy_of("ppo_continuous_multiagent.py", change)
    settings = SMALL | {"exp_name": "copy"}
    script.train(script.Args(**settings, seed=3))
    (source,) = Path("runs").iterdir()
    expected = load(source, script)["kept"]["target"]
    states = states_at_the_start(monkeypatch)
    script.train(script.Args(**settings, seed=4, init_from=str(source)))
    torch.testing.assert_close(states[0]["kept"]["target"], expected, rtol=0, atol=0)

    original = train(seed=3)
    with pytest.raises(ValueError, match="target has weight that is not in the checkpoint"):
        script.train(script.Args(**settings, seed=5, init_from=str(original)))
    capsys.readouterr()
    script.train(script.Args(**settings, seed=5, init_from=str(original), init_partly=True))
    assert_started_with(states[-1], tensors(original))
    assert (
        "target starts new: it has weight that is not in the checkpoint" in capsys.readouterr().out
    )


def test_a_resumed_run_does_not_start_again(monkeypatch, capsys):
    """It is the uninterrupted run, to the byte, and the other run need not be there any more."""
    source = train(seed=3)
    settings = dict(total_timesteps=32 * 6, init_from=str(source))
    whole = train(**settings)
    with monkeypatch.context() as patch:
        stop_after(patch, ppo, "gae", 3)
        part = train(**settings)
    shutil.rmtree(source)
    capsys.readouterr()
    call(monkeypatch, "--resume", part)
    assert "Starting from" not in capsys.readouterr().out
    first, second = tensors(whole), tensors(part)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert curve(whole) == curve(part)
    with pytest.raises(
        SystemExit, match="--init-from other: the run has --init-from .*, leave it out"
    ):
        call(monkeypatch, "--resume", part, "--init-from", "other")
    call(monkeypatch, "--evaluate", part, "--eval-episodes", 1)


@needs_compiler
def test_a_compiled_run_starts_from_another_one(monkeypatch):
    source = train(seed=3)
    plain = tensors(train(init_from=str(source), compile=False))
    compiled = tensors(train(init_from=str(source), compile=True))
    new = tensors(train(compile=False))
    for key, x in plain.items():
        np.testing.assert_allclose(compiled[key], x, atol=1e-5, err_msg=key)
    assert any(not np.allclose(new[key], x, atol=1e-3) for key, x in plain.items())


def test_ranks_start_from_another_run():
    source = train(seed=3)
    line = "--env-id parity_env:Parity-v0 --num-steps 32 --num-minibatches 2 --update-epochs 0"
    line += f" --hidden-sizes 8 8 --total-timesteps 128 --exp-name ranks --init-from {source}"
    process = torchrun(ppo.__file__, *line.split())
    out = finish(process)
    assert process.returncode == 0, out
    assert out.count("Starting from") == 1, "rank 0 says it"
    (folder,) = Path("runs").glob("*ranks*")
    weights = tensors(folder)
    for name, x in tensors(source).items():
        if "rms" not in name:  # the statistics have more observations
            torch.testing.assert_close(weights[name], x, rtol=0, atol=0, msg=name)
    assert (weights["agent.obs_rms.count"] > tensors(source)["agent.obs_rms.count"]).all()


# Files that can't be used


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--init-from runs_of_mine", "--init-from: runs_of_mine"),
        ("--init-partly", "--init-partly: give --init-from too"),
    ],
)
def test_bad_options_are_one_line(line, problem, tmp_path):
    assert_refused(ppo, f"--env-id parity_env:Parity-v0 {line}", problem, tmp_path)


def change(folder, edit):
    path = folder / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


def set_weight(content, x):
    name = next(name for name in content["kept"]["agent"] if name.endswith("weight"))
    content["kept"]["agent"][name] = x(content["kept"]["agent"][name])


HOSTILE = [
    (lambda c: set_weight(c, lambda w: w * float("nan")), "weight of the agent is not finite"),
    (lambda c: set_weight(c, lambda w: w.double() + 1e300), "weight is not finite"),
    (lambda c: set_weight(c, lambda w: w.to(torch.int64)), "is torch.int64 in the checkpoint"),
    (lambda c: set_weight(c, lambda w: w[:1]), "does not fit"),
    (lambda c: set_weight(c, lambda w: "x"), "not a valid checkpoint: kept has no agent"),
    (
        lambda c: c["kept"].update(return_rms=[1, 2]),
        "return_rms has mean that is not in the checkpoint",
    ),
    (lambda c: c["kept"]["agent"].update({"a\x1b[2J": torch.ones(1)}), "control characters"),
    (lambda c: c.update(global_step=-1), "not a valid checkpoint: global_step is -1"),
    (lambda c: c.update(format=1), "has checkpoint format 1"),
    (lambda c: c.pop("kept"), "not a valid checkpoint: it has no kept"),
    (lambda c: c["spec"].update(branches=5), "can't be used: TypeError"),
    (lambda c: c["spec"].update(branches=torch.ones(3)), "can't be used: RuntimeError"),
    (lambda c: c["spec"].update(action_dim="x" * 9999), "can't be used: TypeError"),
    (lambda c: c["spec"].update(start=["\x1b" * 9999]), "control characters"),
]


@pytest.mark.parametrize(("edit", "problem"), HOSTILE)
def test_hostile_checkpoints_are_one_line(edit, problem, monkeypatch):
    source = train()
    change(source, edit)
    before = set(Path("runs").iterdir())
    options = ["--num-steps", "32", "--num-minibatches", "2", "--hidden-sizes", "8", "8"]
    options += ["--total-timesteps", "64"]
    with pytest.raises(SystemExit, match=problem) as refused:
        call(monkeypatch, "--env-id", SMALL["env_id"], *options, "--init-from", source)
    assert len(str(refused.value).strip().splitlines()) == 1
    assert set(Path("runs").iterdir()) == before


def test_only_tensors_of_an_unsigned_checkpoint_are_used(monkeypatch):
    """Nothing that its arguments or attributes say: it needs no trust."""
    source = train(seed=3)
    names = ("args", "script_numbers", "agent_attributes")
    change(source, lambda c: c["args"].update(unity_path="./game", env_id="os:x", track=True))
    change(source, lambda c: c["agent_attributes"].update(training=0))
    change(source, lambda c: c["script_numbers"].update(WORTH=1))
    assert not load(source)["signed"]
    states = states_at_the_start(monkeypatch)
    train(seed=4)
    train(seed=4, init_from=str(source))
    for name in names:
        first, second = (dict(state[name]) for state in states)
        for each in (first, second):
            each.pop("exp_name", None)
            each.pop("init_from", None)
        assert first == second
    assert_started_with(states[1], tensors(source))


def test_a_module_with_a_state_of_its_own_kind_is_no_obstacle(capsys):
    class Counter(torch.nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    source = Counter(2, 2)
    saved = {"kept": {"agent": source.state_dict()}, "global_step": 5, "agent_attributes": {}}
    ours = Counter(2, 2)
    initial.start_from("x.pt", saved | {"spec": {}}, {"agent": ours}, {}, partly=False)
    assert torch.equal(ours.weight, source.weight)
