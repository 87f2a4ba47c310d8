"""What a changed copy of a script can rely on. Each test changes lines of the real source, as a user would, and runs
the copy."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT, call, curve, needs_compiler, needs_gl
from copies import ENV, PPO, SAC, SMALL, copy_of, saved, state_of, train

from onefile_rl import fast

ALL = pytest.mark.parametrize("name", SMALL)
# One line of each network.
LAYER = {
    "ppo_continuous_multiagent.py": '{"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()',
    "sac_continuous.py": '{"relu": nn.ReLU, "silu": nn.SiLU}[args.activation]()',
    "crossq_continuous.py": '{"relu": nn.ReLU, "silu": nn.SiLU}[args.activation]()',
}

pytestmark = pytest.mark.usefixtures("empty_folder")


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


# 1. Acting and learning use the same policy code

LAYERNORM = "nn.Sequential(nn.LayerNorm(size_out), {})"
DROPOUT = "nn.Sequential({}, nn.Dropout(0.5))"
ELU = "nn.ELU()"
MISH = "nn.Mish()"


@ALL
@pytest.mark.parametrize("layer", [LAYERNORM, ELU, MISH, DROPOUT])
def test_what_acts_is_what_learns(name, layer, monkeypatch, capsys):
    """In training, in --evaluate and in the exported file it is the module that decides, to 1e-5, whatever its layers
    are."""
    script = copy_of(name, (LAYER[name], layer.format(LAYER[name])))
    monkeypatch.setattr(fast.Acting, "told", set())
    folder = train(script)
    told = (
        "Acting with PyTorch (slower): numpy acting does not support Mish"
        in capsys.readouterr().out
    )
    assert told == (layer == MISH), "it says so where numpy has no such layer"
    agent, spec = saved(script, folder)

    obs = 3 * np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    chance = torch.get_rng_state()
    actions = fast.Acting(agent)(obs)[0]
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
@ALL
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
    """A number in act() that the training loop changes: act() is translated again and never uses the old value."""
    clamp = "clamp(self.bounds.low, self.bounds.high)"
    script = copy_of(
        "ppo_continuous_multiagent.py", (f"action.{clamp}", f"(action * self.gain).{clamp}")
    )
    spec = {"obs_dim": 3, "action_dim": 2, "sensors": [3], "low": -9.0, "high": 9.0}
    agent, obs = script.Agent(spec, script.Args(**PPO)), np.ones((4, 3), np.float32)
    agent.gain, act = 1.0, fast.Acting(agent, deterministic=True)
    before = act(obs)[1]
    agent.gain = 2.0
    np.testing.assert_allclose(act(obs)[1], 2 * before, atol=1e-6)
    assert act.enabled, "and still in numpy"


@ALL
def test_dropout_is_on_while_training_and_off_in_evaluation(name, monkeypatch):
    script = copy_of(name, (LAYER[name], DROPOUT.format(LAYER[name])))
    modes, forward = [], torch.nn.Dropout.forward
    monkeypatch.setattr(
        torch.nn.Dropout, "forward", lambda self, x: modes.append(self.training) or forward(self, x)
    )
    folder = train(script)
    assert True in modes, "the update drops"
    modes.clear()
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 2)
    call(script, monkeypatch, "--export", folder)
    assert modes and not any(modes)


def test_acting_is_translated_under_a_profiler():
    """`python -m cProfile` must show the same run. The translation itself uses a profile function for a moment."""
    import cProfile

    script = copy_of("ppo_continuous_multiagent.py")
    agent = script.Agent(
        {"obs_dim": 3, "action_dim": 2, "low": [-1, -1], "high": [1, 1]}, script.Args()
    )
    act = fast.Acting(agent)
    profiler = cProfile.Profile()
    profiler.enable()
    act(np.zeros((1, 3), np.float32))
    act(np.zeros((1, 3), np.float32))
    profiler.disable()
    assert act.enabled and act.calls == 2
    calls = {
        entry.code.co_name: entry.callcount
        for entry in profiler.getstats()
        if hasattr(entry.code, "co_name")
    }
    assert calls["__call__"] >= 2, "the profiler goes on after the translation"


# 2. The agent always has the current weights

EPOCHS = "                    metrics.append(mb_metrics)\n"
LOGPROB = "agent.get_action_and_value(batch.obs, batch.actions)[1]"


def test_the_agent_is_live_inside_the_epochs():
    """A KL stop with `agent`: it sees every update at once."""
    look = f"                    SEEN.append((batch.logprobs - {LOGPROB}).mean().item())\n"
    seen = ("REACHER = dict(", "SEEN = []\nREACHER = dict(")
    script = copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + look), seen)
    train(script)
    assert (
        len(script.SEEN) == 24 and len(set(script.SEEN)) == 24 and max(map(abs, script.SEEN)) < 0.1
    )


def test_a_kl_stop_in_a_copy_stops():
    stop = (
        f"                    if (batch.logprobs - {LOGPROB}).mean() > -1.0:\n"
        "                        stop = True\n"
        "                        break\n"
    )
    script = copy_of("ppo_continuous_multiagent.py", (EPOCHS, EPOCHS + stop))
    state = state_of(script, train(script))
    assert state["kept"]["optimizer"]["state"][0]["step"] == 3, "one update an iteration"


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_parameter_whose_data_is_replaced_acts_and_learns(compile):
    """`.data = ...` is an assignment in place for torch: optimizer, compiled update and numpy acting follow."""
    replace = "            agent.actor_logstd.data = torch.full_like(agent.actor_logstd, -3.0)\n"
    look = "                STDS.append((actions - agent.act(torch.as_tensor(obs), True)[0].detach().numpy()) ** 2)\n"
    begin = "            # Collect a rollout. One thread"
    stored = "                rollout.decide(ready, obs, actions)\n"
    script = copy_of(
        "ppo_continuous_multiagent.py",
        (begin, replace + begin),
        (stored, stored + look),
        ("REACHER = dict(", "STDS = []\nREACHER = dict("),
    )
    agent, _ = saved(script, train(script, compile=compile, learning_rate=1e-2))
    assert np.sqrt(np.mean(script.STDS)) == pytest.approx(np.exp(-3.0), rel=0.2)
    assert (
        not torch.equal(agent.actor_logstd, torch.full((2,), -3.0))
        and (agent.actor_logstd < -2.5).all()
    ), "it learns"


def test_a_parameter_that_is_assigned_is_an_error_that_names_it():
    replace = "            agent.actor_logstd = torch.nn.Parameter(torch.zeros_like(agent.actor_logstd))\n"
    begin = "            # Log\n"
    script = copy_of("ppo_continuous_multiagent.py", (begin, replace + begin))
    with pytest.raises(
        ValueError,
        match="actor_logstd was replaced by another parameter, which no optimizer updates",
    ):
        train(script)


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_frozen_layer_stays_as_it_was(compile):
    made = "        self.bounds = runs.Bounds(spec)\n"
    freeze = (
        made
        + "        self.actor_mean[0].requires_grad_(False)\n        BEGAN.append(self.actor_mean[0].weight.clone())\n"
    )
    first = "REACHER = dict("
    script = copy_of(
        "ppo_continuous_multiagent.py", (made, freeze), (first, f"BEGAN = []\n{first}")
    )
    agent, _ = saved(script, train(script, compile=compile))
    assert torch.equal(agent.actor_mean[0].weight, script.BEGAN[0])
    assert not torch.equal(agent.actor_mean[2].bias, torch.zeros(8)), "the others learn"


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_layer_that_is_frozen_later_stays_as_it_was(compile, monkeypatch, capsys):
    """From the second iteration on. A compiled update notices it, and the run goes on without."""
    freeze = (
        "            if iteration == 1:\n"
        "                agent.actor_mean[0].requires_grad_(False)\n"
        "                BEGAN.append(agent.actor_mean[0].weight.clone())\n"
    )
    first = "REACHER = dict("
    line = LOOP["ppo_continuous_multiagent.py"]
    script = copy_of(
        "ppo_continuous_multiagent.py", (line, freeze + line), (first, f"BEGAN = []\n{first}")
    )
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1 if compile else 10**9)
    agent, _ = saved(script, train(script))
    assert torch.equal(agent.actor_mean[0].weight, script.BEGAN[0])
    out = capsys.readouterr().out
    assert (
        "not compiled any more: requires_grad of actor_mean.0.weight has changed" in out
    ) == compile


def test_a_parameter_in_no_optimizer_is_an_error_that_names_it():
    forget = "        a_optimizer = fast.Adam([agent.log_alpha], lr=args.learning_rate)\n"
    other = "        a_optimizer = fast.Adam(agent.actor.parameters(), lr=args.learning_rate)\n"
    with pytest.raises(
        ValueError, match="parameter log_alpha is not in any optimizer and would never be updated"
    ):
        train(copy_of("sac_continuous.py", (forget, other)))


# 3. A number that changes takes effect, compiled or not

LOOP = {
    "ppo_continuous_multiagent.py": "            torch.set_num_threads(1)\n",
    "sac_continuous.py": "            if run.due(LOG_INTERVAL):\n",
    "crossq_continuous.py": "            if run.due(LOG_INTERVAL):\n",
}
ANNEALED = {
    "ppo_continuous_multiagent.py": "            args.ent_coef = 0.5 * (1 - iteration / num_iterations)\n",
    "sac_continuous.py": "            args.gamma = 0.9 + 0.1 * run.global_step / run.total\n",
    "crossq_continuous.py": "            args.gamma = 0.9 + 0.1 * run.global_step / run.total\n",
}


@needs_compiler
@ALL
def test_an_annealed_coefficient_takes_effect_compiled_or_not(name):
    plain = copy_of(name)
    constant = saved(plain, train(plain))[0].state_dict()
    script = copy_of(name, (LOOP[name], ANNEALED[name] + LOOP[name]))
    eager, compiled = (
        saved(script, train(script, compile=compile))[0].state_dict() for compile in (False, True)
    )
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)
    moved = "actor_logstd" if "actor_logstd" in eager else "qf.weights.0"
    assert not torch.allclose(eager[moved], constant[moved], atol=1e-5), "it made a difference"


@needs_compiler
def test_other_args_given_to_the_update_take_effect_compiled_or_not():
    """As replace() makes them, for one update."""
    given = "agent, optimizer, batch, mb_inds, float(num_rows), args\n"
    call_ = given, given.replace("args", "replace(args, ent_coef=0.1 * iteration)")
    imported = "from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"
    script = copy_of("ppo_continuous_multiagent.py", call_, imported)
    eager, compiled = (
        saved(script, train(script, compile=compile))[0].state_dict() for compile in (False, True)
    )
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)
    assert not torch.allclose(eager["actor_logstd"], torch.zeros(2), atol=1e-3)
    script = copy_of(
        "ppo_continuous_multiagent.py",
        (given, given.replace("args", "replace(args, norm_adv=iteration == 0)")),
        imported,
    )
    with pytest.raises(ValueError, match="compiled into the update and different now: norm_adv"):
        train(script, compile=True)


@needs_compiler
@pytest.mark.parametrize("where", ["global", "argument", "attribute", "shape"])
def test_what_is_compiled_in_cannot_change_in_silence(where):
    bonus = {"global": "BONUS", "attribute": "agent.bonus"}.get(where, "args.ent_coef")
    use = ("args.ent_coef * entropy_loss +", f"{bonus} * entropy_loss +")
    more = {
        "global": "            global BONUS\n            BONUS = 0.1 * iteration\n",
        "argument": "            args.norm_adv = iteration == 0\n",
        "attribute": "            agent.bonus = 0.1 * iteration\n",
        "shape": "            minibatch_size = batch_size // args.num_minibatches // (iteration + 1)\n",
    }[where]
    name, begin = (
        "ppo_continuous_multiagent.py",
        ("REACHER = dict(", "BONUS = 0.0\nREACHER = dict("),
    )
    script = copy_of(name, use, (LOOP[name], more + LOOP[name]), begin)
    with pytest.raises(
        ValueError, match="compiled into the update and different now: .*--no-compile"
    ) as caught:
        train(script, compile=True)
    named = {
        "global": "BONUS",
        "argument": "norm_adv",
        "attribute": "bonus",
        "shape": "size mismatch",
    }[where]
    assert named in str(caught.value)
    train(script, compile=False)


def test_code_that_numpy_acting_cannot_translate_is_named_with_its_line(capsys, monkeypatch):
    """A branch on an observation: the module acts, and the message names the file and the line."""
    line = "        action_mean = self.actor_mean(x)\n"
    branch = "        if x.sum() > 1e9:\n            action_mean = -action_mean\n"
    script = copy_of("ppo_continuous_multiagent.py", (line, line + branch))
    monkeypatch.setattr(fast.Acting, "told", set())
    train(script)
    source = Path(script.__file__).read_text()
    number = source[: source.index("if x.sum() > 1e9")].count("\n") + 1
    place = f"{Path(script.__file__).name}, line {number}"
    assert f"does not support the Python code of act() ({place})" in capsys.readouterr().out


@needs_compiler
def test_what_cannot_be_compiled_runs_all_the_same(capsys, monkeypatch):
    """A branch on a number that is a tensor when it is compiled: by itself the script goes on without, and --compile
    says why it can't."""
    line, branch = (
        "    v_loss = (newvalue - mb.returns)",
        "    if args.ent_coef > 0.1:\n        pg_loss = 2 * pg_loss\n",
    )
    script = copy_of("ppo_continuous_multiagent.py", (line, branch + line))
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1)
    folder = train(script)
    out = capsys.readouterr().out
    assert "The update is not compiled: " in out and "Compiled the update" not in out
    assert state_of(script, folder)["global_step"] == 192
    with pytest.raises(ValueError, match="--compile: torch can't compile this update: .*"):
        train(script, compile=True)


# 4. Metrics are a dict


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_new_metric_has_its_own_name(compile):
    new = '        "losses/entropy": entropy_loss,\n'
    first = '        "losses/first": ratio.detach()[0] * 0 + 7,\n'
    script = copy_of("ppo_continuous_multiagent.py", (new, first + new))
    plain = copy_of("ppo_continuous_multiagent.py")
    before, after = curve(train(plain, compile=compile)), curve(train(script, compile=compile))
    assert [value for _, value in after.pop("losses/first")] == [7, 7, 7]
    assert before.keys() == after.keys()
    for name, points in before.items():
        np.testing.assert_allclose(points, after[name], atol=1e-5, err_msg=name)


# 5. A copy can't load another script's checkpoints by mistake


def test_a_copys_runs_have_its_name():
    script = copy_of("ppo_continuous_multiagent.py")
    script.train(script.Args(**PPO, env_id=ENV))
    (folder,) = Path("runs").iterdir()
    assert (
        "__my_script__" in folder.name
        and (folder / "my_script.py").read_text() == Path("my_script.py").read_text()
    )


@ALL
def test_a_checkpoint_of_the_original_is_one_line_and_the_other_way_round(name, monkeypatch):
    copy, original = copy_of(name), copy_of(name, to=name)
    for script, folder in ((copy, train(original)), (original, train(copy))):
        for option in ("--evaluate", "--resume", "--export"):
            with pytest.raises(
                SystemExit,
                match=r"is a checkpoint of \w+.py, whose network may differ from that of \w+.py",
            ) as caught:
                call(script, monkeypatch, option, folder)
            assert len(str(caught.value).strip().splitlines()) == 1


@ALL
def test_weights_that_do_not_fit_are_one_line_that_names_the_first(name, monkeypatch):
    folder = train(copy_of(name))
    script = copy_of(name, (LAYER[name], LAYERNORM.format(LAYER[name])))
    match = r"does not fit this script's network: .*\.[12]\.0\.weight is missing in the checkpoint"
    with pytest.raises(SystemExit, match=match) as caught:
        call(script, monkeypatch, "--evaluate", folder)
    assert len(str(caught.value).strip().splitlines()) == 1


def test_a_script_that_changed_since_says_so(monkeypatch, capsys):
    """The same weights fit, but they are another network's: no error is possible, so there is a line."""
    folder = train(copy_of("ppo_continuous_multiagent.py"))
    script = copy_of("ppo_continuous_multiagent.py", (LAYER["ppo_continuous_multiagent.py"], ELU))
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    assert (
        f"my_script.py has changed since {folder}/checkpoint.pt was written"
        in capsys.readouterr().out
    )


def test_a_resumed_run_says_that_its_script_changed(monkeypatch, capsys):
    folder = train(copy_of("ppo_continuous_multiagent.py"))
    script = copy_of("ppo_continuous_multiagent.py", (LAYER["ppo_continuous_multiagent.py"], ELU))
    call(script, monkeypatch, "--resume", folder, "--total-timesteps", 256)
    assert (
        f"my_script.py has changed since {folder}/checkpoint.pt was written"
        in capsys.readouterr().out
    )


def test_a_checkpoint_keeps_the_arguments_that_were_given():
    """A schedule that starts from one of them starts there again when the run goes on."""
    name = "ppo_continuous_multiagent.py"
    script = copy_of(name, (LOOP[name], ANNEALED[name] + LOOP[name]))
    state = state_of(script, train(script, ent_coef=0.25))
    assert state["args"]["ent_coef"] == 0.25


def test_a_removed_argument_is_gone(monkeypatch):
    field = '    ent_coef: float = 0.0\n    """the weight of the entropy bonus"""\n'
    changes = [
        (field, ""),
        (" - args.ent_coef * entropy_loss", ""),
        ("        initial_ent_coef = args.ent_coef\n", ""),
        ("args.ent_coef = initial_ent_coef * remaining", "pass"),
        ('("clip_coef", "ent_coef", "vf_coef"', '("clip_coef", "vf_coef"'),
    ]
    old = train(copy_of("ppo_continuous_multiagent.py"))
    script = copy_of("ppo_continuous_multiagent.py", *changes)
    folder = train(script)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    with pytest.raises(
        SystemExit, match="checkpoint.pt has --ent-coef, which the script no longer has"
    ):
        call(script, monkeypatch, "--evaluate", old)
    match = "PRESETS sets ent_coef for Crawler, but Args has no such field: remove it from PRESETS"
    with pytest.raises(SystemExit, match=match):
        call(script, monkeypatch, "--env-id", "Crawler")
    command = [sys.executable, "my_script.py", "--env-id", "Hopper-v5", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert out.returncode == 0 and "--ent-coef" not in out.stdout and "--vf-coef" in out.stdout


# SAC's critics

UPDATE = "    metrics = update_critics(agent, q_optimizer, mb, next_noise, args)\n"


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_third_critic_learns(compile):
    old = "self.qf = SoftQNetworks((obs_dim + action_dim, *args.hidden_sizes), args)"
    script = copy_of("sac_continuous.py", (old, old.replace("args)", "args, num_critics=3)")))
    before = script.Agent(
        {"obs_dim": 3, "action_dim": 2, "low": -1.0, "high": 1.0}, script.Args(**SAC)
    )
    agent, _ = saved(script, train(script, compile=compile))
    assert agent.qf.weights[0].shape[0] == before.qf_target.weights[0].shape[0] == 3
    values = agent.qf(torch.ones(1, 3), torch.zeros(1, 2))
    assert values.shape == (3, 1) and len(set(values.flatten().tolist())) == 3
    for k in range(3):
        assert not torch.equal(agent.qf.weights[0][k], agent.qf_target.weights[0][k]), (
            "all three were updated"
        )


@pytest.mark.parametrize("name", ["sac_continuous.py", "crossq_continuous.py"])
def test_the_q_networks_are_not_made_by_mlp(name):
    """A layer that is added to mlp() is the actor's only: SoftQNetworks does not take only some of its layers."""
    script = copy_of(name, (LAYER[name], LAYERNORM.format(LAYER[name])))
    original = copy_of(name, to=name)
    spec = {"obs_dim": 3, "action_dim": 2, "low": -1.0, "high": 1.0}
    changed, plain = [x.Agent(spec, x.Args(**SAC)) for x in (script, original)]
    assert any(isinstance(layer, torch.nn.LayerNorm) for layer in changed.actor.modules())
    assert str(changed.qf) == str(plain.qf)
    assert "mlp(sizes" not in inspect.getsource(script.SoftQNetworks)
    assert "mlp() is not used here" in script.SoftQNetworks.__doc__, "and it says so"


@needs_compiler
@pytest.mark.parametrize("function", ["update", "update_critics"])
def test_an_update_that_cannot_be_compiled_runs_all_the_same(function, capsys, monkeypatch):
    """Without --compile, which both compiled functions of a script with policy_frequency see."""
    line = "    q_optimizer.zero_grad()\n" if function == "update_critics" else UPDATE
    branch = "    if args.gamma > 0.5:\n        agent = agent\n"
    script = copy_of("crossq_continuous.py", (line, branch + line))
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1)
    folder = train(script)
    out = capsys.readouterr().out
    assert "The update is not compiled: " in out
    assert state_of(script, folder)["global_step"] == 80
    with pytest.raises(ValueError, match="--compile: torch can't compile this update: .*"):
        train(script, compile=True)


# Images


@torch.no_grad()
def test_a_new_encoder_acts_learns_evaluates_and_is_exported(monkeypatch):
    """From a student's paper: other convolutions, another activation, dropout. In one thread, where it is exact."""
    layers = "nn.Conv2d(channels, 8, 4, 4), nn.GELU(), nn.Dropout2d(0.5)"
    new = f"def nature(channels):\n    return nn.Sequential({layers})\n\n\n"
    script = copy_of(
        "ppo_pixel.py", ("def nature(channels):\n", f"{new}def old_nature(channels):\n")
    )
    small = dict(
        num_envs=2,
        num_steps=32,
        num_minibatches=4,
        update_epochs=2,
        features=16,
        total_timesteps=128,
    )
    with torch.enable_grad():
        script.train(script.Args(env_id="parity_env:ParityPixels-v0", **small))
    (folder,) = Path("runs").iterdir()
    agent, spec = saved(script, folder)
    assert agent.encoders[0][0].out_channels == 8 and any(
        isinstance(layer, torch.nn.GELU) for layer in agent.modules()
    )

    images = torch.randint(0, 256, (20, 3, 36, 36), dtype=torch.uint8)
    vector, mask = torch.zeros(20, 0), torch.ones(20, 0)
    best = agent.act([images], vector, mask, deterministic=True)[1].numpy()
    act = fast.Acting(agent, enabled=False)
    action, _, logprob, value = act([images], vector.numpy(), mask.numpy())
    given = ([images], vector, mask, torch.as_tensor(action))
    _, expected, _, expected_value = agent.get_action_and_value(*given)
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
        np.testing.assert_allclose(
            got, agent.act([seen], vector[:2], mask[:2], deterministic=True)[1], atol=1e-5
        )

    call(script, monkeypatch, "--export", folder)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    feed = {"obs_0": (images.float() / 255).numpy()}
    np.testing.assert_allclose(
        session.run(["deterministic_continuous_actions"], feed)[0], best, atol=1e-5
    )
