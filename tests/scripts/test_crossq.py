"""crossq_continuous.py: parity with sb3-contrib, batch renormalization, the joint pass, and checkpoints with running
statistics. Everything else is the code of sac_continuous.py, which the first test checks."""

import difflib
import inspect
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
import torch.nn as nn
from conftest import assert_refused, call, curve, needs_compiler, stop_after, train

import crossq_continuous as crossq
import sac_continuous as sac
from onefile_rl import checkpoints, export, fast, runs

SMALL = dict(
    env_id="parity_env:Parity-v0",
    buffer_size=500,
    learning_starts=20,
    batch_size=16,
    hidden_sizes=(8, 8),
    total_timesteps=200,
    checkpoint_interval=50,
)
SPEC = {"obs_dim": 5, "action_dim": 3, "sensors": [5], "low": -1.0, "high": 1.0}
BETAS = (0.5, 0.999)
pytestmark = pytest.mark.usefixtures("empty_folder")
run, call = partial(train, crossq, SMALL), partial(call, crossq)


def load(folder):
    return checkpoints.load(folder, crossq.__file__)[1]


def weights(folder):
    return load(folder)["kept"]["agent"]


def make_agent(spec=SPEC, **settings):
    return crossq.Agent(spec, crossq.Args(**{"hidden_sizes": (8, 8), **settings}))


def make_optimizers(agent, lr):
    parameters = (agent.qf.parameters(), agent.actor.parameters())
    optimizers = [fast.Adam(params, lr=lr, betas=BETAS) for params in parameters]
    return [*optimizers, fast.Adam([agent.log_alpha], lr=lr)]


def make_minibatch(num_rows=16, obs_dim=5, action_dim=3):
    actions = torch.rand(num_rows, action_dim) * 2 - 1
    ends = (torch.rand(num_rows) < 0.2).float()
    obs, next_obs = 3 * torch.randn(2, num_rows, obs_dim) + 1
    mb = crossq.Batch(obs, actions, torch.randn(num_rows), next_obs, ends)
    return mb, torch.randn_like(actions), torch.randn_like(actions)


def statistics(module):
    return {name: x.clone() for name, x in module.named_buffers()}


def assert_moved(before, after, moved):
    """Check that either all statistics moved, or none."""
    assert before
    for name in before:
        assert torch.equal(before[name], after[name]) != moved, name


# The difference to SAC


def test_everything_else_is_sacs():
    """The replay buffer, the policy and the loop are those of sac_continuous.py, and so are their tests."""
    names = ("ReplayBuffer", "Batch", "describe", "check_buffer_size", "update", "main")
    for name in (*names, "find_first_update"):
        source = inspect.getsource(getattr(crossq, name))
        assert source == inspect.getsource(getattr(sac, name)), name
    for name in ("get_action", "act"):
        source = inspect.getsource(getattr(crossq.Agent, name))
        assert source == inspect.getsource(getattr(sac.Agent, name)), name
    ours, sacs = (inspect.getsource(script.train).splitlines() for script in (crossq, sac))
    changed = [line[2:].split()[0] for line in difflib.ndiff(sacs, ours) if line[0] in "+-"]
    allowed = {"betas", "q_optimizer", "actor_optimizer", "num_rows"}
    assert set(changed) == allowed and len(changed) == 7
    assert crossq.PRESETS == sac.PRESETS


def test_there_are_no_target_networks():
    """All parameters of the agent are learned."""
    agent = make_agent()
    assert not any("target" in name for name, _ in agent.named_modules())
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    optimizers = make_optimizers(agent, 1e-2)
    for _ in range(3):
        crossq.update(agent, *optimizers, *make_minibatch(), crossq.Args(target_entropy=-3.0))
    for name, p in agent.named_parameters():
        assert not torch.equal(p, before[name]), name


# Parity with sb3-contrib


def make_sb3(**kwargs):
    from sb3_contrib import CrossQ
    from stable_baselines3.common.logger import configure

    kwargs |= dict(buffer_size=5000, policy_kwargs=dict(net_arch=[32, 32]))
    model = CrossQ("MlpPolicy", "Pendulum-v1", seed=3, device="cpu", **kwargs)
    model.set_logger(configure(None, []))
    return model


def of_sb3(model):
    """Return the weights and statistics of sb3-contrib's CrossQ under our names."""
    state, out = model.policy.state_dict(), {"log_alpha": model.log_ent_coef.detach().clone()}
    norm_names = {"weight": "scale", "bias": "bias", "mean": "ra_mean", "var": "ra_var"}
    for i in range(3):  # the layers of a network are norm, linear, activation
        norm, linear = 3 * i, 3 * i + 1
        for ours, theirs in norm_names.items():
            pair = [state[f"critic.qf{k}.{norm}.{theirs}"][None] for k in range(2)]
            out[f"qf.norms.{i}.{ours}"] = torch.stack(pair)
            out[f"actor.{norm}.{ours}"] = state[f"actor.latent_pi.{norm}.{theirs}"][None].clone()
        pair = [state[f"critic.qf{k}.{linear}.weight"].T for k in range(2)]
        out[f"qf.weights.{i}"] = torch.stack(pair)
        pair = [state[f"critic.qf{k}.{linear}.bias"][None] for k in range(2)]
        out[f"qf.biases.{i}"] = torch.stack(pair)
        for end in ("weight", "bias"):
            if i < 2:
                out[f"actor.{linear}.{end}"] = state[f"actor.latent_pi.{linear}.{end}"].clone()
            else:
                heads = [state[f"actor.{head}.{end}"] for head in ("mu", "log_std")]
                out[f"actor.{linear}.{end}"] = torch.cat(heads)
    return out


def test_60_updates_are_sb3s():
    """With the same weights, transitions and random numbers, the losses, the temperature, the running statistics and
    the weights of 60 updates are the same, 20 of them with a policy update."""
    model, rng = make_sb3(batch_size=64, learning_rate=1e-3), np.random.default_rng(0)
    initial = of_sb3(model)
    rb = crossq.ReplayBuffer(5000, 1, 3, 1)
    slots = np.arange(1)
    obs = rng.normal(size=3).astype(np.float32)
    for t in range(300):
        action, reward = rng.uniform(-1, 1, 1).astype(np.float32), np.array([rng.normal()])
        next_obs = rng.normal(size=3).astype(np.float32)
        terminated = np.array([t % 40 == 39])
        model.replay_buffer.add(obs, next_obs, action, reward, terminated, [{}])
        rb.decide(slots, obs, action)
        final_obs = {"final_obs": next_obs[None]}
        rb.add(slots, reward, terminated, np.zeros(1, bool), next_obs[None], final_obs)
        obs = next_obs
    args = crossq.Args(hidden_sizes=(32, 32), batch_size=64, target_entropy=-1.0)
    agent = crossq.Agent({"obs_dim": 3, "action_dim": 1, "low": -2.0, "high": 2.0}, args)
    missing, unexpected = agent.load_state_dict(initial, strict=False)
    assert not unexpected
    assert all(name.endswith(".steps") or name.startswith("bounds.") for name in missing)
    optimizers = make_optimizers(agent, args.learning_rate)

    ours, theirs = [], []
    torch.manual_seed(5)
    np.random.seed(5)
    for i in range(60):
        mb = rb.sample(64, "cpu")
        next_noise = torch.randn_like(mb.actions)
        if i % 3 == 2:
            noise = torch.randn_like(mb.actions)
            metrics = crossq.update(agent, *optimizers, mb, noise, next_noise, args)
        else:
            metrics = crossq.update_critics(agent, optimizers[0], mb, next_noise, args)
        names = ("qf_loss", "alpha", "actor_loss")
        ours.append([metrics[f"losses/{x}"].item() for x in names if f"losses/{x}" in metrics])
    torch.manual_seed(5)
    np.random.seed(5)
    for i in range(60):
        model.train(1, batch_size=64)
        names = ("critic_loss", "ent_coef", "actor_loss")[: 3 if i % 3 == 2 else 2]
        theirs.append([model.logger.name_to_value[f"train/{name}"] for name in names])
    for our_losses, their_losses in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4, atol=1e-4)
    final = agent.state_dict()
    for key, value in of_sb3(model).items():
        np.testing.assert_allclose(final[key].numpy(), value.numpy(), atol=1e-4, err_msg=key)
        assert not np.allclose(value.numpy(), initial[key].numpy(), atol=1e-3), f"{key} learned"


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_layer_is_sb3s(is_warm):
    """With large variances, so that the place of eps makes no difference."""
    from sb3_contrib.common.torch_layers import BatchRenorm1d

    ours = crossq.BatchRenorm((1, 6), crossq.Args(renorm_warmup_steps=4 if is_warm else 100))
    theirs = BatchRenorm1d(6, warmup_steps=4 if is_warm else 100)
    x = 30 * torch.randn(10, 32, 6) + 20 * torch.randn(10, 1, 6)
    for rows in x:
        torch.testing.assert_close(ours(rows), theirs(rows), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.mean[0], theirs.ra_mean)
    torch.testing.assert_close(ours.var[0], theirs.ra_var)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(x[0]), theirs(x[0]))


# Batch renormalization


def test_before_the_warmup_a_layer_is_batch_normalization():
    """A minibatch gets the mean 0 and the variance 1, up to eps. The statistics move by the momentum."""
    layer = crossq.BatchRenorm((1, 4), crossq.Args(batch_norm_momentum=0.1))
    x = 5 * torch.randn(64, 4) + torch.arange(4)
    out = layer(x)
    torch.testing.assert_close(out.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(0), torch.ones(4), atol=1e-3, rtol=0)
    torch.testing.assert_close(layer.mean[0], 0.1 * x.mean(0))
    torch.testing.assert_close(layer.var[0], 0.9 + 0.1 * x.var(0))
    reference = nn.BatchNorm1d(4, eps=1e-3, momentum=0.1)
    reference(x)
    torch.testing.assert_close(layer.mean[0], reference.running_mean)
    torch.testing.assert_close(layer.var[0], reference.running_var)
    layer.eval()
    reference.eval()
    torch.testing.assert_close(layer(x), reference(x))


def test_after_the_warmup_a_layer_uses_the_running_statistics():
    """Within its limits, batch renormalization gives the numbers of the evaluation mode, and the gradient of batch
    normalization."""
    layer = crossq.BatchRenorm((1, 4), crossq.Args(renorm_warmup_steps=0))
    for _ in range(500):
        layer(2 * torch.randn(64, 4) + 1)
    x = (3 * torch.randn(64, 4) + 2).requires_grad_()
    layer.eval()
    expected = layer(x)
    layer.train()
    out = layer(x)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(out.square().sum() + out[0].sum(), x)
    torch.testing.assert_close(gradient.sum(0), torch.zeros(4), atol=1e-3, rtol=0)


def test_the_correction_has_limits():
    """A minibatch far from the running statistics is normalized by its own, times r and plus d."""
    layer = crossq.BatchRenorm((1, 1), crossq.Args(renorm_warmup_steps=0))
    layer.steps.fill_(1)
    x = torch.tensor([[-1.0], [1.0]]) * 100 + 10_000  # far from the mean 0 and the variance 1
    half = 0.5**0.5
    expected = torch.tensor([[-half * 3 + 5], [half * 3 + 5]])
    torch.testing.assert_close(layer(x), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_constant_feature_has_finite_gradients(steps):
    """A unit that is 0 for all rows of a minibatch, before and after the warm-up."""
    layer = crossq.BatchRenorm((1, 2), crossq.Args(renorm_warmup_steps=0))
    layer.steps.fill_(steps)
    x = torch.zeros(8, 2, requires_grad=True)
    (layer(x) * torch.randn(8, 2)).sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(layer.weight.grad).all()


def test_the_joint_pass_is_two_passes_only_in_evaluation_mode():
    agent = make_agent()
    mb, _, _ = make_minibatch()
    joint = torch.cat([mb.obs, mb.next_obs]), torch.cat([mb.actions, mb.actions])
    passes = (mb.obs, mb.actions), (mb.next_obs, mb.actions)
    torch.testing.assert_close(agent.qf(*joint), torch.cat([agent.qf(*x) for x in passes], 1))
    agent.qf.train()
    together, apart = agent.qf(*joint), torch.cat([agent.qf(*x) for x in passes], 1)
    assert (together - apart).abs().max() > 0.01


def test_the_target_is_of_the_joint_pass():
    """The critic loss, written out: both halves of one pass in training mode, no gradient through the target."""
    agent, args = make_agent(), crossq.Args(target_entropy=-3.0)
    mb, _, next_noise = make_minibatch()
    twin = make_agent()
    twin.load_state_dict(agent.state_dict())
    twin.qf.train()
    next_actions, next_log_pi, _ = twin.get_action(mb.next_obs, next_noise)
    obs, actions = torch.cat([mb.obs, mb.next_obs]), torch.cat([mb.actions, next_actions])
    q, next_q = twin.qf(obs, actions)[:, :16], twin.qf(obs, actions)[:, 16:]
    target = mb.rewards + 0.99 * (1 - mb.terminated) * (next_q.min(0).values - next_log_pi)
    expected = 0.5 * sum(((q[k] - target.detach()) ** 2).mean() for k in range(2))
    gradients = torch.autograd.grad(expected, list(twin.qf.parameters()))

    class Sgd(fast.Adam):
        def step(self):
            self.gradients = [p.grad.clone() for p in agent.qf.parameters()]

    optimizer = Sgd(agent.qf.parameters())
    metrics = crossq.update_critics(agent, optimizer, mb, next_noise, args)
    torch.testing.assert_close(metrics["losses/qf_loss"], expected.detach())
    for ours, other in zip(optimizer.gradients, gradients, strict=True):
        torch.testing.assert_close(ours, other)


def test_statistics_move_only_in_the_networks_own_update():
    """Those of the Q networks in the update of the Q networks, those of the policy in the update of the policy, none
    when the policy acts or is evaluated."""
    agent, args = make_agent(norm_obs=True), crossq.Args(target_entropy=-3.0)
    q_optimizer, actor_optimizer, a_optimizer = make_optimizers(agent, 1e-3)
    mb, noise, next_noise = make_minibatch()

    qf, actor = statistics(agent.qf), statistics(agent.actor)
    fast.Acting(agent)(mb.obs.numpy())
    fast.Acting(agent, enabled=False, deterministic=True)(mb.obs.numpy())
    assert_moved(qf, statistics(agent.qf), False)
    assert_moved(actor, statistics(agent.actor), False)

    crossq.update_critics(agent, q_optimizer, mb, next_noise, args)
    assert_moved(qf, statistics(agent.qf), True)
    assert_moved(actor, statistics(agent.actor), False)

    qf = statistics(agent.qf)
    crossq.update_actor(agent, actor_optimizer, a_optimizer, mb.obs, noise, args)
    assert_moved(qf, statistics(agent.qf), False)
    assert_moved(actor, statistics(agent.actor), True)
    assert not any(module.training for module in agent.modules()), "acts in evaluation mode"


def test_the_policy_update_computes_no_gradients_of_the_q_networks():
    agent = make_agent()
    action = torch.zeros(20, 3, requires_grad=True)
    agent.qf(torch.randn(20, 5), action, frozen=True).sum().backward()
    assert action.grad.any() and all(p.grad is None for p in agent.qf.parameters())


# Acceleration

# The bias of a ReLU unit that is active for all rows has no effect behind a batch normalization. Its gradient is a
# rounding error, which Adam scales up: 1e-9 becomes 1e-4. SiLU has no linear part.
SMOOTH = dict(activation="silu")


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_policy_acts_as_the_network_does_and_follows_it(activation):
    """Numpy acting has the batch normalization, with the current weights and statistics."""
    agent, args = make_agent(activation=activation), crossq.Args(target_entropy=-3.0)
    obs = 10 * torch.randn(64, 5)
    act = fast.Acting(agent)
    act(obs.numpy())
    _, actor_optimizer, a_optimizer = make_optimizers(agent, 1e-2)
    for _ in range(10):
        mb, noise, _ = make_minibatch()
        crossq.update_actor(agent, actor_optimizer, a_optimizer, mb.obs, noise, args)
    torch.manual_seed(0)
    actions, _ = act(obs.numpy())
    torch.manual_seed(0)
    with torch.no_grad():
        expected, _, _ = agent.get_action(obs, torch.randn(64, 3))
    assert act.enabled and act.translations == 1
    np.testing.assert_allclose(actions, expected.numpy(), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("warmup", [10, 1000])
def test_compiled_update_is_the_same(warmup):
    """Weights, temperature and running statistics are those of the update that is not compiled, also when the warm-up
    ends within the run."""
    settings = SMOOTH | dict(total_timesteps=80, norm_obs=True, renorm_warmup_steps=warmup)
    plain, compiled = (weights(run(**settings, compile=compile)) for compile in (False, True))
    assert plain["qf.norms.0.steps"] == 60 and plain["actor.0.steps"] == 20
    for key, value in plain.items():
        np.testing.assert_allclose(compiled[key], value, atol=2e-5, err_msg=key)


@needs_compiler
def test_no_fast_computes_the_same(monkeypatch):
    """Numpy acting and compiled updates give the same curves as plain PyTorch."""
    monkeypatch.setattr(crossq, "LOG_INTERVAL", 10)
    fast_curves = curve(run(**SMOOTH, total_timesteps=50, compile=True))
    plain_curves = curve(run(**SMOOTH, total_timesteps=50, fast=False))
    assert "losses/qf_loss" in fast_curves and fast_curves.keys() == plain_curves.keys()
    for tag, points in plain_curves.items():
        np.testing.assert_allclose(fast_curves[tag], points, rtol=1e-5, atol=1e-5, err_msg=tag)


# Runs


def test_the_policy_is_updated_once_in_three_updates():
    kept = load(run(total_timesteps=80))["kept"]
    names = ("q_optimizer", "actor_optimizer", "a_optimizer")
    assert [kept[name]["state"][0]["step"] for name in names] == [60, 20, 20]
    assert [kept[name]["param_groups"][0]["betas"] for name in names] == [
        BETAS,
        BETAS,
        (0.9, 0.999),
    ]


def test_two_runs_with_one_seed_are_equal():
    first, second, other = (weights(run(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["actor.1.weight"], other["actor.1.weight"])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resume_equals_uninterrupted(monkeypatch, num_envs):
    """A run that is stopped and resumed with its replay buffer has the same weights and running statistics, to the
    byte, as an uninterrupted run."""
    settings = dict(num_envs=num_envs, total_timesteps=600, buffer_size=150, save_buffer=True)
    settings |= dict(norm_obs=True, updates_per_step=0.7, renorm_warmup_steps=100)
    with monkeypatch.context() as patch:
        patch.setattr(crossq, "LOG_INTERVAL", 50)
        whole = run(**settings)
        stop_after(patch, crossq.ReplayBuffer, "sample", 200)
        part = run(**settings)
        assert 200 < load(part)["global_step"] < 400
        call(monkeypatch, "--resume", part)
    first, second = (weights(folder) for folder in (whole, part))
    assert first["qf.norms.0.steps"] > 350
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_truncation_is_not_termination(monkeypatch):
    """With reward 1 at every step and a time limit after each, the value is 1 / (1 - gamma) = 5. If a time limit were
    a termination, it would be 1."""
    values = []
    compile_update = runs.Run.compile

    def spied(*args):
        update = compile_update(*args)

        def watched(*inputs):
            metrics = update(*inputs)
            values.append(metrics["losses/qf1_values"].item())
            return metrics

        return watched

    monkeypatch.setattr(runs.Run, "compile", spied)
    settings = dict(gamma=0.8, alpha=1e-6, autotune=False, learning_rate=3e-3)
    run(env_id="parity_env:OneStep-v0", **settings, total_timesteps=800)
    assert np.mean(values[-50:]) == pytest.approx(5, abs=0.3)


def test_it_learns():
    """The return of Pendulum-v1 rises from about -1,200 to above -400 in 4,000 steps, with exploration noise."""
    settings = dict(buffer_size=5000, learning_starts=200, batch_size=64, hidden_sizes=(64, 64))
    folder = run(env_id="Pendulum-v1", **settings, total_timesteps=4000)
    returns = [value for _, value in curve(folder)["charts/episodic_return"]]
    assert returns[0] < -800 and returns[-1] > -400


def test_a_loss_that_is_not_a_number_stops_the_run():
    with pytest.raises(FloatingPointError, match="a loss or gradient is not a number"):
        run(learning_rate=1e29)
    (path,) = Path("runs").glob("*/checkpoint.pt")
    state = torch.load(path, weights_only=True)
    assert all(torch.isfinite(v).all() for v in state["kept"]["agent"].values())
    assert state["kept"]["counters"]["updates"] == 0
    assert state["kept"]["agent"]["qf.norms.0.steps"] == 0


def test_a_saved_policy_is_evaluated_with_its_running_statistics(monkeypatch, capsys):
    """--evaluate has the numbers of the run, and a policy whose statistics are lost acts differently."""
    folder = run()
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 7)
    assert "after 200 decisions, 7 episodes" in capsys.readouterr().out
    state = weights(folder)
    agent = make_agent({"obs_dim": 3, "action_dim": 2, "low": -1.0, "high": 1.0})
    agent.load_state_dict(state)
    obs = torch.randn(20, 3)
    with torch.no_grad():
        before = agent.act(obs, deterministic=True)[0]
        agent.actor[0].mean.zero_()
        agent.actor[0].var.fill_(1)
        assert not torch.allclose(before, agent.act(obs, deterministic=True)[0], atol=1e-3)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-0.4, 0.4)])
def test_exported_policy_equals_the_agent(bounds):
    low, high = bounds
    spec = {"obs_dim": 158, "action_dim": 20, "sensors": [126, 32], "low": low, "high": high}
    agent = make_agent(spec, hidden_sizes=(32, 32), activation="silu", norm_obs=True)
    agent.obs_rms.update(3 * torch.randn(500, 158) + 1)
    agent.actor.train()
    for _ in range(50):
        agent.actor(agent.obs_rms(3 * torch.randn(64, 158) + 1))
    agent.actor.eval()
    export.export(agent, spec, "policy.onnx")
    session, obs = onnxruntime.InferenceSession("policy.onnx"), 5 * torch.randn(300, 158)
    feed = {"obs_0": obs[:, :126].numpy(), "obs_1": obs[:, 126:].numpy()}
    expected = fast.Acting(agent, deterministic=True)(obs.numpy())[1]
    exported = session.run(["deterministic_continuous_actions"], feed)[0]
    np.testing.assert_allclose(exported, expected, atol=1e-5)


# Bad input


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--env-id CartPole-v1", "use ppo_discrete_multiagent.py"),
        (
            "--env-id parity_env:Unbounded-v0",
            "ppo_continuous_multiagent.py accepts unbounded ones too",
        ),
        (
            "--env-id parity_env:Parity-v0 --batch-norm-momentum 1.5",
            "--batch-norm-momentum 1.5: must be between 0 and 1",
        ),
        (
            "--env-id parity_env:Parity-v0 --batch-size 1",
            "--batch-size 1: batch normalization needs at least 2 transitions",
        ),
    ],
)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(crossq, line, match, tmp_path)
