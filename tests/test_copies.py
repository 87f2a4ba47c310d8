"""What a changed copy of a script can rely on. Each test changes lines of the real source, as a user would, and runs
the copy."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT, call, curve, needs_compiler, needs_gl

import checkpoints
import fast

PPO = dict(num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8), total_timesteps=192)
SAC = dict(buffer_size=500, learning_starts=20, batch_size=16, hidden_sizes=(8, 8), total_timesteps=80)
SMALL = {"ppo_continuous_multiagent.py": PPO, "sac_continuous.py": SAC}
BOTH = pytest.mark.parametrize("name", SMALL)
ENV, NUMBERS = "parity_env:Parity-v0", itertools.count()
# One line of each network.
LAYER = {
    "ppo_continuous_multiagent.py": '{"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()',
    "sac_continuous.py": '{"relu": nn.ReLU, "silu": nn.SiLU}[activation]()',
}

pytestmark = pytest.mark.usefixtures("empty_folder")


def changed(name, *changes, to="my_script.py"):
    """A copy of a script with these texts replaced, imported."""
    source = (ROOT / name).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    Path(to).write_text(source)
    module = f"copy_{next(NUMBERS)}"  # torch keeps modules by name
    spec = importlib.util.spec_from_file_location(module, Path(to).resolve())
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def train(script, **settings):
    before = set(Path("runs").glob("*"))
    settings = SMALL[script.original] | {"env_id": ENV, "exp_name": f"run{len(before)}"} | settings
    script.train(script.Args(**settings))
    (folder,) = set(Path("runs").glob("*")) - before
    return folder


def copy_of(name, *changes):
    script = changed(name, *changes)
    script.original = name
    return script


def saved(script, folder):
    """The module as it was saved, for evaluation, and its spec."""
    state = checkpoints.load(folder, script.__file__)[1]
    agent = script.Agent(state["spec"], script.Args(**state["args"]))
    agent.load_state_dict(state["kept"]["agent"])
    return agent.eval(), state["spec"]


@torch.no_grad()
def best(agent, obs):
    """What the module itself does, without noise, as the env gets it."""
    return agent.act(torch.as_tensor(obs), deterministic=True)[1].numpy()


def recorded(script, monkeypatch):
    """What the envs of this script showed, and got, to be filled."""
    make_envs, record = script.make_envs, []

    def made(*args, **kwargs):
        envs, how = make_envs(*args, **kwargs)
        reset, step, seen = envs.reset, envs.step, []

        def begun(**kwargs):
            seen[:] = [reset(**kwargs)]
            return seen[0]

        def stepped(actions):
            record.append((seen[0][0].copy(), actions.copy()))
            out = step(actions)
            seen[:] = [(out[0], out[-1])]
            return out

        envs.reset, envs.step = begun, stepped
        return envs, how

    monkeypatch.setattr(script, "make_envs", made)
    return record


# 1. What acts is what learns

LAYERNORM, ELU, MISH, DROPOUT = "nn.LayerNorm(b), {}", "nn.ELU()", "nn.Mish()", "{}, nn.Dropout(0.5)"


@BOTH
@pytest.mark.parametrize("layer", [LAYERNORM, ELU, MISH, DROPOUT])
def test_what_acts_is_what_learns(name, layer, monkeypatch, capsys):
    """In training, in --evaluate and in the exported file it is the module that decides, to 1e-5, whatever its layers
    are."""
    script = copy_of(name, (LAYER[name], layer.format(LAYER[name])))
    monkeypatch.setattr(fast.Acting, "told", set())
    folder = train(script)
    told = "The module itself acts" in capsys.readouterr().out
    assert told == (layer == MISH), "it says so where numpy has no such layer"
    agent, spec = saved(script, folder)

    obs = 3 * np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    chance = torch.get_rng_state()
    actions = fast.Acting(agent).checked(obs)(obs)[0]
    torch.set_rng_state(chance)
    with torch.no_grad():
        expected = agent.act(torch.as_tensor(obs))[0]
    np.testing.assert_allclose(actions, expected, atol=1e-5)

    record = recorded(script, monkeypatch)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 3)
    assert len(record) > 5
    for seen, got in record:
        np.testing.assert_allclose(got, best(agent, seen), atol=1e-5)

    call(script, monkeypatch, "--export", folder)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    exported = session.run(["deterministic_continuous_actions"], {"obs_0": obs})[0]
    np.testing.assert_allclose(exported, best(agent, obs), atol=1e-5)


@needs_gl
@BOTH
def test_what_is_filmed_is_what_learns(name, monkeypatch):
    script = copy_of(name, (LAYER[name], LAYERNORM.format(LAYER[name])))
    folder = train(script, env_id="InvertedPendulum-v5")
    agent, _ = saved(script, folder)
    record = recorded(script, monkeypatch)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--capture-video")
    assert len(record) > 2 and (folder / "videos" / "evaluation.mp4").exists()
    for seen, got in record:
        np.testing.assert_allclose(got, best(agent, seen), atol=1e-5)


def test_a_layer_that_is_not_what_it_was_derived_from_is_noticed(capsys):
    """A number in act() that the training loop changes: it is derived anew, and never acts as it was."""
    clamp = "clamp(self.bounds.low, self.bounds.high)"
    script = copy_of("ppo_continuous_multiagent.py", (f"action.{clamp}", f"(action * self.gain).{clamp}"))
    spec = {"obs_dim": 3, "action_dim": 2, "sensors": [3], "low": -9.0, "high": 9.0}
    agent, obs = script.Agent(spec, script.Args(**PPO)), np.ones((4, 3), np.float32)
    agent.gain, acting = 1.0, fast.Acting(agent, deterministic=True)
    before = acting.checked(obs)(obs)[1]
    agent.gain = 2.0
    np.testing.assert_allclose(acting.checked(obs)(obs)[1], 2 * before, atol=1e-6)
    assert acting.fast, "and still in numpy"


@BOTH
def test_dropout_is_on_while_training_and_off_in_evaluation(name, monkeypatch):
    script = copy_of(name, (LAYER[name], DROPOUT.format(LAYER[name])))
    modes, forward = [], torch.nn.Dropout.forward
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: modes.append(self.training) or forward(self, x))
    folder = train(script)
    assert True in modes, "the update drops"
    modes.clear()
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 2)
    call(script, monkeypatch, "--export", folder)
    assert modes and not any(modes)


# 2. The agent is live

EPOCHS = '                optimizer["step"] += 1\n'


def test_the_agent_is_live_inside_the_epochs():
    """A KL stop with `agent`: it sees every update at once."""
    look = "                SEEN.append((batch.logprobs - agent(batch.obs, batch.actions)[0]).mean().item())\n"
    seen = ("REACHER = dict(num_envs", "SEEN = []\nREACHER = dict(num_envs")
    script = copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + look), seen)
    train(script)
    assert len(script.SEEN) == 24 and len(set(script.SEEN)) == 24 and max(map(abs, script.SEEN)) < 0.1


def test_a_kl_stop_of_ones_own_stops():
    stop = (
        "                if (batch.logprobs - agent(batch.obs, batch.actions)[0]).mean() > -1.0:\n"
        "                    break\n"
    )
    script = copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + stop))
    state = checkpoints.load(train(script), script.__file__)[1]
    assert state["kept"]["optimizer"]["step"] == 3, "one update an iteration"


def test_a_parameter_that_is_replaced_is_an_error_that_names_it():
    replace = "                agent.actor_logstd.data = torch.zeros_like(agent.actor_logstd)\n"
    script = copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + replace))
    with pytest.raises(ValueError, match="actor_logstd is another tensor than it was"):
        train(script)


def test_a_parameter_that_is_assigned_anew_is_an_error_that_names_it():
    replace = "                agent.actor_logstd = torch.nn.Parameter(torch.zeros_like(agent.actor_logstd))\n"
    script = copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + replace))
    with pytest.raises(ValueError, match="actor_logstd is another parameter than it was"):
        train(script)


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_frozen_layer_stays_as_it_was(compile):
    made = "        self.bounds = runs.Bounds(spec)\n"
    freeze = (
        made
        + "        self.actor_mean[0].requires_grad_(False)\n        BEGAN.append(self.actor_mean[0].weight.clone())\n"
    )
    first = "REACHER = dict(num_envs"
    script = copy_of("ppo_continuous_multiagent.py", (made, freeze), (first, f"BEGAN = []\n{first}"))
    agent, _ = saved(script, train(script, compile=compile))
    assert torch.equal(agent.actor_mean[0].weight, script.BEGAN[0])
    assert not torch.equal(agent.actor_mean[2].bias, torch.zeros(8)), "the others learn"


def test_freezing_a_layer_that_learns_is_an_error():
    freeze = "                agent.actor_mean[0].requires_grad_(False)\n"
    with pytest.raises(ValueError, match="requires_grad_.. comes too late here"):
        train(copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + freeze)))


def test_a_parameter_that_nothing_would_learn_is_an_error_that_names_it():
    forget = 'but=["critics", "targets"]', 'only=["actor"]'
    with pytest.raises(ValueError, match="log_alpha is in no vector"):
        train(copy_of("sac_continuous.py", forget))


# 3. A number that changes takes effect, compiled or not

LOOP = {
    "ppo_continuous_multiagent.py": "            torch.set_num_threads(1)  #",
    "sac_continuous.py": "            if run.due(REPORT):\n",
}
ANNEALED = {
    "ppo_continuous_multiagent.py": "            args.ent_coef = 0.5 * (1 - iteration / num_iterations)\n",
    "sac_continuous.py": "            args.gamma = 0.9 + 0.1 * run.global_step / run.total\n",
}


@needs_compiler
@BOTH
def test_an_annealed_coefficient_takes_effect_compiled_or_not(name):
    plain = copy_of(name)
    constant = saved(plain, train(plain))[0].state_dict()
    script = copy_of(name, (LOOP[name], ANNEALED[name] + LOOP[name]))
    eager, compiled = (saved(script, train(script, compile=compile))[0].state_dict() for compile in (False, True))
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)
    moved = "actor_logstd" if "actor_logstd" in eager else "critics.weights.0"
    assert not torch.allclose(eager[moved], constant[moved], atol=1e-5), "it made a difference"


@needs_compiler
def test_other_args_given_to_the_update_take_effect_compiled_or_not():
    """As replace() makes them, for one update."""
    call_ = "step(args, objective,", "step(replace(args, ent_coef=0.1 * iteration), objective,"
    imported = "from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"
    script = copy_of("ppo_continuous_multiagent.py", call_, imported)
    eager, compiled = (saved(script, train(script, compile=compile))[0].state_dict() for compile in (False, True))
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)
    assert not torch.allclose(eager["actor_logstd"], torch.zeros(2), atol=1e-3)
    script = copy_of(
        "ppo_continuous_multiagent.py", (call_[0], "step(replace(args, norm_adv=iteration == 0), objective,"), imported
    )
    with pytest.raises(ValueError, match="compiled into the update and different now: norm_adv"):
        train(script, compile=True)


@needs_compiler
@pytest.mark.parametrize("where", ["global", "argument", "attribute", "shape"])
def test_what_is_compiled_in_cannot_change_in_silence(where):
    bonus = {"global": "BONUS", "attribute": "agent.bonus"}.get(where, "args.ent_coef")
    use = ("args.ent_coef * entropy +", f"{bonus} * entropy +")
    more = {
        "global": "            global BONUS\n            BONUS = 0.1 * iteration\n",
        "argument": "            args.norm_adv = iteration == 0\n",
        "attribute": "            agent.bonus = 0.1 * iteration\n",
        "shape": "            minibatch_size = batch_size // args.num_minibatches // (iteration + 1)\n",
    }[where]
    name, begin = "ppo_continuous_multiagent.py", ("REACHER = dict(num_envs", "BONUS = 0.0\nREACHER = dict(num_envs")
    script = copy_of(name, use, (LOOP[name], more + LOOP[name]), begin)
    with pytest.raises(ValueError, match="compiled into the update and different now: .*--no-compile") as caught:
        train(script, compile=True)
    named = {"global": "BONUS", "argument": "norm_adv", "attribute": "bonus", "shape": "size mismatch"}[where]
    assert named in str(caught.value)
    train(script, compile=False)


@needs_compiler
def test_what_cannot_be_compiled_runs_all_the_same(capsys, monkeypatch):
    """A branch on a number that is a tensor when it is compiled: by itself the script goes on without, and --compile
    says why it can't."""
    line, branch = "    v_loss = (newvalue", "    if args.ent_coef > 0.1:\n        pg_loss = 2 * pg_loss\n"
    script = copy_of("ppo_continuous_multiagent.py", (line, branch + line))
    monkeypatch.setattr("runs.WORTH", 1)
    folder = train(script)
    assert "The update is not compiled: " in capsys.readouterr().out
    assert checkpoints.load(folder, script.__file__)[1]["global_step"] == 192
    with pytest.raises(ValueError, match="--compile: torch can't compile this update: .*"):
        train(script, compile=True)


# 4. Metrics are a dict


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_new_metric_has_its_own_name(compile):
    new = '        "losses/entropy": entropy,\n'
    first = '        "losses/first": ratio.detach()[0] * 0 + 7,\n'
    script = copy_of("ppo_continuous_multiagent.py", (new, first + new))
    plain = copy_of("ppo_continuous_multiagent.py")
    before, after = curve(train(plain, compile=compile)), curve(train(script, compile=compile))
    assert [value for _, value in after.pop("losses/first")] == [7, 7, 7]
    assert before.keys() == after.keys()
    for name, points in before.items():
        np.testing.assert_allclose(points, after[name], atol=1e-5, err_msg=name)


# 5. A copy is its own


def test_a_copys_runs_have_its_name():
    script = copy_of("ppo_continuous_multiagent.py")
    script.train(script.Args(**PPO, env_id=ENV))
    (folder,) = Path("runs").iterdir()
    assert "__my_script__" in folder.name and (folder / "my_script.py").read_text() == Path("my_script.py").read_text()


@BOTH
def test_a_checkpoint_of_the_original_is_one_line_and_the_other_way_round(name, monkeypatch):
    copy, original = copy_of(name), changed(name, to=name)
    original.original = name
    for script, folder in ((copy, train(original)), (original, train(copy))):
        for option in ("--evaluate", "--resume", "--export"):
            with pytest.raises(SystemExit, match=r"is a checkpoint of \w+.py, and this is \w+.py") as caught:
                call(script, monkeypatch, option, folder)
            assert len(str(caught.value).strip().splitlines()) == 1


@BOTH
def test_weights_that_do_not_fit_are_one_line_that_names_the_first(name, monkeypatch):
    folder = train(copy_of(name))
    script = copy_of(name, (LAYER[name], LAYERNORM.format(LAYER[name])))
    match = r"does not fit this script's network: .*\.1\.weight is not there in the checkpoint"
    with pytest.raises(SystemExit, match=match) as caught:
        call(script, monkeypatch, "--evaluate", folder)
    assert len(str(caught.value).strip().splitlines()) == 1


def test_a_script_that_changed_since_says_so(monkeypatch, capsys):
    """The same weights fit, but they are another network's: no error is possible, so there is a line."""
    folder = train(copy_of("ppo_continuous_multiagent.py"))
    script = copy_of("ppo_continuous_multiagent.py", (LAYER["ppo_continuous_multiagent.py"], ELU))
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    assert f"my_script.py is not what it was when {folder}/checkpoint.pt was written" in capsys.readouterr().out


def test_a_resumed_run_says_that_its_script_changed(monkeypatch, capsys):
    folder = train(copy_of("ppo_continuous_multiagent.py"))
    script = copy_of("ppo_continuous_multiagent.py", (LAYER["ppo_continuous_multiagent.py"], ELU))
    call(script, monkeypatch, "--resume", folder, "--total-timesteps", 256)
    assert f"my_script.py is not what it was when {folder}/checkpoint.pt was written" in capsys.readouterr().out


def test_a_checkpoint_keeps_the_arguments_that_were_given():
    """A schedule that starts from one of them starts there again when the run goes on."""
    name = "ppo_continuous_multiagent.py"
    script = copy_of(name, (LOOP[name], ANNEALED[name] + LOOP[name]))
    state = checkpoints.load(train(script, ent_coef=0.25), script.__file__)[1]
    assert state["args"]["ent_coef"] == 0.25


def test_a_removed_argument_is_gone(monkeypatch):
    field = '    ent_coef: float = 0.0\n    """weight of the entropy bonus"""\n'
    changes = [
        (field, ""),
        (" - args.ent_coef * entropy", ""),
        (", ent_coef = fast.Vector(agent), Normalizer(), args.ent_coef", " = fast.Vector(agent), Normalizer()"),
        ("args.ent_coef = ent_coef * left", "pass"),
        ('("clip_coef", "ent_coef", "vf_coef"', '("clip_coef", "vf_coef"'),
    ]
    old = train(copy_of("ppo_continuous_multiagent.py"))
    script = copy_of("ppo_continuous_multiagent.py", *changes)
    folder = train(script)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    with pytest.raises(SystemExit, match="checkpoint.pt has --ent-coef, and this script has not"):
        call(script, monkeypatch, "--evaluate", old)
    match = "PRESETS has ent_coef for Crawler, and Args has no such argument: remove it there too"
    with pytest.raises(SystemExit, match=match):
        call(script, monkeypatch, "--env-id", "Crawler")
    command = [sys.executable, "my_script.py", "--env-id", "Hopper-v5", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert out.returncode == 0 and "--ent-coef" not in out.stdout and "--vf-coef" in out.stdout


# SAC's critics


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_third_critic_learns(compile):
    three = "args.activation)\n        self.targets", "args.activation, count=3)\n        self.targets"
    script = copy_of("sac_continuous.py", three)
    before = script.Agent({"obs_dim": 3, "action_dim": 2, "low": -1.0, "high": 1.0}, script.Args(**SAC))
    agent, _ = saved(script, train(script, compile=compile))
    assert agent.critics.weights[0].shape[0] == before.targets.weights[0].shape[0] == 3
    values = agent.critics(torch.ones(1, 3), torch.zeros(1, 2))
    assert values.shape == (3, 1) and len(set(values.flatten().tolist())) == 3
    assert not torch.equal(agent.critics.weights[0], agent.targets.weights[0]), "all three were updated"
    for k in range(3):
        assert not torch.equal(agent.critics.weights[0][k], agent.targets.weights[0][k])


# Images


@torch.no_grad()
def test_a_new_encoder_acts_learns_evaluates_and_is_exported(monkeypatch):
    """From a student's paper: other convolutions, another activation, dropout. In one thread, where it is exact."""
    layers = "nn.Conv2d(channels, 8, 4, 4), nn.GELU(), nn.Dropout2d(0.5)"
    new = f"def nature(channels):\n    return nn.Sequential({layers})\n\n\n"
    script = copy_of("ppo_pixel.py", ("def nature(channels):\n", f"{new}def old_nature(channels):\n"))
    small = dict(num_envs=2, num_steps=32, num_minibatches=4, update_epochs=2, features=16, total_timesteps=128)
    with torch.enable_grad():
        script.train(script.Args(env_id="parity_env:ParityPixels-v0", **small))
    (folder,) = Path("runs").iterdir()
    agent, spec = saved(script, folder)
    assert agent.encoders[0][0].out_channels == 8 and any(isinstance(layer, torch.nn.GELU) for layer in agent.modules())

    images = torch.randint(0, 256, (20, 3, 36, 36), dtype=torch.uint8)
    vector, mask = torch.zeros(20, 0), torch.ones(20, 0)
    best = agent.act([images], vector, mask, deterministic=True)[1].numpy()
    action, _, logprob, value = fast.Acting(agent).module([images], vector.numpy(), mask.numpy())
    expected, _, expected_value = agent([images], vector, mask, torch.as_tensor(action))
    np.testing.assert_allclose(logprob, expected, atol=1e-5)
    np.testing.assert_allclose(value, expected_value, atol=1e-5)

    make_envs, record = script.make_envs, []

    def made(*args, **kwargs):
        envs, how = make_envs(*args, **kwargs)
        step, reset, shown = envs.step, envs.reset, []

        def begun(**kwargs):
            out = reset(**kwargs)
            shown.append(out[0]["image"].copy())
            return out

        def stepped(actions):
            record.append((shown[-1], actions.copy()))
            out = step(actions)
            shown.append(out[0]["image"].copy())
            return out

        envs.reset, envs.step = begun, stepped
        return envs, how

    monkeypatch.setattr(script, "make_envs", made)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 2)
    assert len(record) > 3
    for image, got in record:
        seen = torch.as_tensor(image).permute(0, 3, 1, 2)
        np.testing.assert_allclose(got, agent.act([seen], vector[:2], mask[:2], deterministic=True)[1], atol=1e-5)

    call(script, monkeypatch, "--export", folder)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    feed = {"obs_0": (images.float() / 255).numpy()}
    np.testing.assert_allclose(session.run(["deterministic_continuous_actions"], feed)[0], best, atol=1e-5)
