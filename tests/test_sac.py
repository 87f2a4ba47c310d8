"""sac_continuous.py: parity with the real SB3, the buffer against each agent's own transitions, overlap, and a run's
life where it differs from PPO's."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import assert_refused, call, curve, needs_compiler, stop_after, train, trajectories, watch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints
import fast
import policies
import runs
import sac_continuous as sac

SMALL = dict(env_id="parity_env:Parity-v0", buffer_size=500, learning_starts=20, batch_size=16, hidden_sizes=(8, 8))
SMALL |= dict(total_timesteps=200, checkpoint_interval=50)
pytestmark = pytest.mark.usefixtures("empty_folder")
run, call = partial(train, sac, SMALL), partial(call, sac)


LOSSES = ("losses/qf_loss", "losses/qf_values", "losses/alpha", "losses/actor_loss", "losses/entropy")
SPEC = {"obs_dim": 5, "action_dim": 3, "sensors": [5], "low": -1.0, "high": 1.0}


def load(folder):
    return checkpoints.load(folder, sac.__file__)[1]


def weights(folder):
    return load(folder)["kept"]["agent"]


def spy(monkeypatch, initial=None, seed=11):
    """Sees the agent, the buffer and every update's losses; the agent begins with these weights, and chance with this
    seed."""
    seen, build, fill, compiled = SimpleNamespace(losses=[], numbers=[]), sac.Agent, sac.Buffer, runs.Run.compiled

    def agent(*args):
        seen.agent = build(*args)
        if initial:
            seen.agent.load_state_dict(initial, strict=False)
            torch.manual_seed(seed)
            np.random.seed(seed)
        return seen.agent

    def buffer(*args):
        seen.buffer = fill(*args)
        return seen.buffer

    def spied(*args):
        step = compiled(*args)

        def counted(*inputs):
            out = step(*inputs)
            seen.losses.append([out[name].item() for name in LOSSES if name in out])
            seen.numbers.append(inputs[-4:])
            return out

        return counted

    monkeypatch.setattr(sac, "Agent", agent)
    monkeypatch.setattr(sac, "Buffer", buffer)
    monkeypatch.setattr(runs.Run, "compiled", spied)
    return seen


# Parity with SB3


def make_sb3(**kwargs):
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    kwargs |= dict(buffer_size=5000, policy_kwargs=dict(net_arch=[32, 32]))
    model = SAC("MlpPolicy", "Pendulum-v1", seed=3, device="cpu", **kwargs)
    model.set_logger(configure(None, []))
    return model


def of_sb3(model):
    """SB3's weights under our names."""
    state, out = model.policy.state_dict(), {"log_alpha": model.log_ent_coef.detach().clone()}
    for end in ("weight", "bias"):
        for ours, theirs in {"0": "latent_pi.0", "2": "latent_pi.2"}.items():
            out[f"actor.{ours}.{end}"] = state[f"actor.{theirs}.{end}"].clone()
        out[f"actor.4.{end}"] = torch.cat([state[f"actor.mu.{end}"], state[f"actor.log_std.{end}"]])
        for ours, theirs in {"critics": "critic", "targets": "critic_target"}.items():
            for i in range(3):
                pair = [state[f"{theirs}.qf{k}.{2 * i}.{end}"] for k in range(2)]
                stacked = torch.stack([x.T if end == "weight" else x[None] for x in pair])
                out[f"{ours}.{'weights' if end == 'weight' else 'biases'}.{i}"] = stacked
    return out


class Losses(pytest.importorskip("stable_baselines3").common.callbacks.BaseCallback):
    """SB3's losses of every update, in our order: critics, temperature, actor. It trains after the step, so a step sees
    the update before it."""

    def _on_training_start(self):
        self.rows = []

    def _on_step(self):
        values = self.logger.name_to_value
        if "train/critic_loss" in values:
            self.rows.append([values[f"train/{name}"] for name in ("critic_loss", "ent_coef", "actor_loss")])
        return True


def test_200_updates_are_sb3s(monkeypatch):
    """Same weights, same transitions, same chance: losses, temperature and weights of 200 updates."""
    model, rng = make_sb3(batch_size=64), np.random.default_rng(0)
    initial = of_sb3(model)
    buffer = sac.Buffer(5000, 1, 3, 1)
    obs = rng.normal(size=3).astype(np.float32)
    for t in range(300):
        action, reward = rng.uniform(-1, 1, 1).astype(np.float32), rng.normal()
        after = rng.normal(size=3).astype(np.float32)
        terminated, truncated = t % 40 == 39, t % 50 == 49
        done, infos = np.array([terminated or truncated]), [{"TimeLimit.truncated": truncated and not terminated}]
        model.replay_buffer.add(obs, after, action, np.array([reward]), done, infos)
        buffer.open(np.arange(1), obs)
        buffer.act(np.arange(1), action)
        buffer.close(np.arange(1), reward, terminated, {0: after} if terminated or truncated else {})
        obs = rng.normal(size=3).astype(np.float32) if terminated or truncated else after
    buffer.open(np.arange(1), obs)
    args = sac.Args(hidden_sizes=(32, 32), batch_size=64, target_entropy=-1.0)
    agent = sac.Agent({"obs_dim": 3, "action_dim": 1, "low": -2.0, "high": 2.0}, args)
    agent.load_state_dict(initial, strict=False)
    policy = fast.Vector(agent, [""], ["critics", "targets"])
    critics, targets = fast.Vector(agent, ["critics"], []), fast.Vector(agent, ["targets"], [])
    averages = [[torch.zeros_like(vector.data) for _ in range(2)] for vector in (critics, policy)]
    objectives = [fast.Functional(f, agent, policy, critics, targets) for f in (sac.critic_loss, sac.actor_loss)]
    ours, theirs = [], []
    torch.manual_seed(5)
    np.random.seed(5)
    for i in range(200):
        mb = [torch.as_tensor(x) for x in buffer.sample(64)]
        mb = sac.Batch(*mb, torch.randn_like(mb[1]), torch.randn_like(mb[1]))
        numbers = sac.adam_numbers(i + 1, args.learning_rate) * 2
        metrics = sac.update(args, *objectives, policy.data, critics.data, targets.data, *averages, mb, *numbers)
        ours.append([metrics[f"losses/{name}"].item() for name in ("qf_loss", "alpha", "actor_loss")])
    torch.manual_seed(5)
    np.random.seed(5)
    for _ in range(200):
        model.train(1, batch_size=64)
        values = model.logger.name_to_value
        theirs.append([values[f"train/{name}"] for name in ("critic_loss", "ent_coef", "actor_loss")])
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    final = agent.state_dict()
    for key, value in of_sb3(model).items():
        np.testing.assert_allclose(final[key].numpy(), value.numpy(), atol=1e-4, err_msg=key)
        assert not np.allclose(value.numpy(), initial[key].numpy(), atol=1e-3), f"{key} learned"


def test_a_run_of_1000_steps_is_sb3s(monkeypatch):
    """Pendulum-v1, learning from step 100: the same actions and losses, but for rounding, which 900 updates let
    grow."""
    model, log = make_sb3(batch_size=32, learning_starts=100), Losses()
    initial = of_sb3(model)
    torch.manual_seed(11)
    np.random.seed(11)
    model.learn(1000, callback=log, log_interval=10**6)
    seen = spy(monkeypatch, initial)
    settings = dict(buffer_size=5000, batch_size=32, learning_starts=100, hidden_sizes=(32, 32))
    run(env_id="Pendulum-v1", **settings, total_timesteps=1000, seed=3)
    theirs = model.replay_buffer
    np.testing.assert_allclose(seen.buffer.actions[:1000], theirs.actions[:1000, 0], atol=1e-3)
    np.testing.assert_allclose(seen.buffer.actions[:300], theirs.actions[:300, 0], atol=1e-5)
    np.testing.assert_allclose(seen.buffer.obs[:1000], theirs.observations[:1000, 0], atol=1e-2)
    np.testing.assert_allclose(seen.buffer.rewards[:1000], theirs.rewards[:1000, 0], atol=1e-2)
    assert len(seen.losses) == 900
    np.testing.assert_allclose(np.array(seen.losses)[:-1, [0, 2, 3]], log.rows, rtol=1e-3, atol=1e-3)


# The buffer

KINDS = st.sampled_from(("decide", "terminate", "truncate", "lose", "terminate and decide"))
EVENTS = st.lists(st.tuples(st.integers(0, 2), KINDS), max_size=80)


def content(buffer):
    """All transitions in a buffer, as sampling would give them, the oldest first."""
    rows = np.arange(max(0, buffer.added - buffer.size), buffer.added) % buffer.size
    obs, actions, after = buffer.obs[rows, 0], buffer.actions[rows, 0], buffer.obs[buffer.next_row[rows], 0]
    columns = obs.tolist(), actions.tolist(), buffer.rewards[rows].tolist(), after.tolist()
    return [*zip(*columns, map(bool, buffer.terminated[rows]), strict=True)]


@given(EVENTS, st.integers(3, 12))
def test_the_buffer_holds_each_agents_own_transitions(events, size):
    """Agents decide, end, are cut and lost in any order, in a ring so small that it is overwritten again and again: the
    last transitions, exactly."""
    buffer, pending, expected, clock = sac.Buffer(size, 3, 1, 1), {}, [], 0
    for slot, event in events:
        clock, who = clock + 1, np.array([slot])
        final, first = np.float32([clock]), np.float32([clock + 0.5])
        if slot in pending and event == "lose":
            buffer.drop(who)
            del pending[slot]
        elif slot in pending:
            ended = event != "decide"
            after = float(final[0]) if ended else float(first[0])
            expected.append((*pending.pop(slot), float(-clock), after, "terminate" in event))
            buffer.close(who, -clock, "terminate" in event, {slot: final} if ended else {})
        if "decide" in event:
            buffer.open(who, first)
            buffer.act(who, [[clock / 100]])
            pending[slot] = (float(first[0]), float(np.float32(clock / 100)))
        assert content(buffer) == expected[-size:]
    twin = sac.Buffer(size, 3, 1, 1)
    twin.restore(buffer.state())
    assert content(twin) == expected[-size:]


@pytest.mark.parametrize("crash_at", [None, 60])
@pytest.mark.parametrize("overlap", [True, False])
def test_transitions_of_mixed_periods_are_those_of_each_agent(monkeypatch, crash_at, overlap):
    """A scene whose agents decide, end, vanish and come back at their own pace, and a player that crashes: every
    transition once, and no other."""
    record, seen = watch(sac, monkeypatch, crash_at), spy(monkeypatch)
    settings = dict(buffer_size=2000, learning_starts=100, updates_per_step=0.1, total_timesteps=1000)
    run(env_id="Mixed", max_agents=12, **settings, overlap=overlap)

    def key(obs, action, reward, next_obs, terminated):
        return obs.tobytes(), action.tobytes(), np.float32(reward), next_obs.tobytes(), bool(terminated)

    expected = sorted(key(*transition) for trajectory in trajectories(record) for transition in trajectory)
    b = seen.buffer
    row = lambda i: key(b.obs[i], b.actions[i], b.rewards[i], b.obs[b.next_row[i]], b.terminated[i])
    assert expected == sorted(row(i) for i in range(b.added)) and b.added >= 1000
    assert any("restarted" in out[-1] for _, out in record[1:]) == bool(crash_at)
    assert len(seen.losses) == pytest.approx(90, abs=2)


def test_a_sampled_batch_never_mixes_agents_or_episodes():
    """Observations that say whose they are, of which episode and when: the next one is the same agent's, of the same
    episode, a step later."""
    rng, buffer, n = np.random.default_rng(0), sac.Buffer(200, 5, 3, 1), 5
    episode, clock, everybody = np.arange(n), np.zeros(n, int), np.arange(n)
    see = lambda who: np.stack([who, episode[who], clock[who]], 1)
    buffer.open(everybody, see(everybody))
    for _ in range(300):
        who = np.flatnonzero(rng.random(n) < 0.6)
        clock[who] += 1
        ended = who[rng.random(len(who)) < 0.1]
        buffer.close(who, np.zeros(len(who)), np.zeros(len(who)), dict(zip(ended, see(ended), strict=True)))
        episode[ended], clock[ended] = episode[ended] + n, 0
        buffer.open(who, see(who))
        obs, *_, next_obs, _ = buffer.sample(32) if len(buffer) else (see(who), see(who) + [0, 0, 1], 0)
        np.testing.assert_array_equal(next_obs - obs, np.broadcast_to([0, 0, 1], obs.shape))


def test_observations_are_stored_once():
    buffer = sac.Buffer(10_000, 12, 8, 2)
    for t in range(2000):
        buffer.close(np.arange(12), np.zeros(12), np.zeros(12), {t % 12: np.zeros(8)})
        buffer.open(np.arange(12), np.zeros((12, 8)))
    # 2,000 episodes ended, 834 of them are in the buffer.
    assert buffer.used < 10_000 + 12 + 1400, "rows of overwritten final observations are used again"


def test_an_agent_slower_than_the_whole_buffer_disturbs_nobody():
    """Its last transition is overwritten while its decision is open: what closes it must not be linked to the row's new
    owner."""
    buffer, one, other = sac.Buffer(3, 2, 1, 1), np.array([0]), np.array([1])
    for who in (one, other):
        buffer.open(who, [[10 * who[0]]])
    buffer.close(one, 0, False, {})
    buffer.open(one, [[1]])
    for k in range(1, 4):
        buffer.close(other, 0, False, {})
        buffer.open(other, [[10 + k]])
    assert [(a, b) for a, _, _, b, _ in content(buffer)] == [(10, 11), (11, 12), (12, 13)]
    buffer.close(one, 0, False, {})
    buffer.open(one, [[2]])
    assert [(a, b) for a, _, _, b, _ in content(buffer)] == [(11, 12), (12, 13), (1, 2)]


def test_a_buffer_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match=r"--buffer-size 100000000000 needs [\d,]+ MiB, and [\d,]+ are free"):
        run(buffer_size=10**11)
    assert not Path("runs").exists()


# The update


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_policy_acts_as_the_network_does_and_follows_it(activation):
    agent = sac.Agent(SPEC, sac.Args(hidden_sizes=(8, 8), activation=activation, norm_obs=True))
    obs = 10 * torch.randn(64, 5)
    acting = fast.Acting(agent)
    act = acting.checked(obs.numpy())
    assert act is acting.fast
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        torch.manual_seed(0)
        actions, _ = act(obs.numpy())
        torch.manual_seed(0)
        expected, _ = agent(obs, torch.randn(64, 3))
    np.testing.assert_allclose(actions, expected.numpy(), atol=1e-5)


def test_logprob_is_that_of_the_squashed_gaussian():
    agent = sac.Agent(SPEC, sac.Args(hidden_sizes=(8,)))
    obs, noise = torch.randn(20, 5), torch.randn(20, 3)
    mean, log_std = agent.actor(obs).chunk(2, 1)
    normal, tanh = torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform()
    squashed = torch.distributions.TransformedDistribution(normal, [tanh])
    action, logprob = agent(obs, noise)
    torch.testing.assert_close(logprob, squashed.log_prob(action).sum(1), atol=1e-2, rtol=1e-3)


def test_policy_frequency_leaves_policy_and_temperature_alone_in_between(monkeypatch):
    seen = spy(monkeypatch)
    run(policy_frequency=3, total_timesteps=80)
    assert [len(losses) for losses in seen.losses] == [5, 3, 3] * 20
    for i, numbers in enumerate(seen.numbers):
        expected = (*sac.adam_numbers(i + 1, 3e-4), *sac.adam_numbers(i // 3 + 1, 3e-4))
        assert numbers == pytest.approx(expected), "Adam counts each one's own steps"


@needs_compiler
def test_compiled_update_is_the_same():
    """Weights, temperature and targets; and to compile it changes nothing."""
    settings = dict(policy_frequency=2, total_timesteps=80, norm_obs=True)
    plain, compiled = (weights(run(**settings, compile=compile)) for compile in (False, True))
    for key, value in plain.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)


@pytest.mark.parametrize(("updates_per_step", "expected"), [(0.25, 45), (1, 180), (2, 360)])
def test_updates_per_step_counts_decisions(monkeypatch, updates_per_step, expected):
    seen = spy(monkeypatch)
    run(updates_per_step=updates_per_step, num_envs=4 if updates_per_step == 1 else 1)
    assert len(seen.losses) == pytest.approx(expected, abs=4)


def test_two_runs_with_one_seed_are_equal():
    first, second, other = (weights(run(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["actor.0.weight"], other["actor.0.weight"])


def test_truncation_is_not_termination(monkeypatch):
    """Reward 1 at every step and a time limit after each: the value is 1 / (1 - gamma) = 5. Were it a death, it would
    be 1."""
    seen = spy(monkeypatch)
    settings = dict(gamma=0.8, alpha=1e-6, autotune=False, learning_rate=3e-3, tau=0.05)
    run(env_id="parity_env:OneStep-v0", **settings, total_timesteps=800)
    assert seen.losses[-1][1] == pytest.approx(5, abs=0.3)


def test_statistics_are_those_of_the_observations(monkeypatch):
    seen = spy(monkeypatch)
    run(norm_obs=True, total_timesteps=1000, buffer_size=2000)
    np.testing.assert_allclose(seen.agent.obs_rms.mean.numpy(), seen.buffer.obs[:1000].mean(0), atol=1e-4)
    np.testing.assert_allclose(seen.agent.obs_rms.scale.numpy(), 1 / seen.buffer.obs[:1000].std(0), rtol=1e-3)


def test_it_learns():
    """Pendulum-v1: from about -1,200 to better than -400 in 4,000 steps, with the noise of exploration."""
    settings = dict(buffer_size=5000, learning_starts=200, batch_size=64, hidden_sizes=(64, 64), learning_rate=2e-3)
    folder = run(env_id="Pendulum-v1", **settings, total_timesteps=4000)
    returns = [value for _, value in curve(folder)["charts/episodic_return"]]
    assert returns[0] < -800 and returns[-1] > -400


def test_a_loss_that_is_not_a_number_stops_the_run():
    with pytest.raises(FloatingPointError, match="a loss or gradient is not a number"):
        run(learning_rate=1e29)
    (path,) = Path("runs").glob("*/checkpoint.pt")
    state = torch.load(path, weights_only=True)
    assert all(torch.isfinite(v).all() for v in state["kept"]["agent"].values())
    kept = state["kept"]
    averages = any(x.any() for x in kept["optimizer"].values())
    assert kept["counts"]["updates"] == 0 and not averages, "Adam's averages and steps belong together"


# A run's life


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resume_equals_uninterrupted(monkeypatch, num_envs):
    """Stopped in the middle and resumed with its buffer: the same weights to the byte, and the same curves, as in one
    go."""
    settings = dict(num_envs=num_envs, total_timesteps=600, buffer_size=150, save_buffer=True)
    settings |= dict(norm_obs=True, updates_per_step=0.7)
    with monkeypatch.context() as patch:
        patch.setattr(sac, "REPORT", 50)
        whole = run(**settings)
        stop_after(patch, sac.Buffer, "sample", 200)
        part = run(**settings)
        state = load(part)
        assert 200 < state["global_step"] < 400 and state["episodes"]["l"].any(), "stopped within an episode"
        assert [path.name for path in part.glob("buffer_*.pt")] == [state["large"]["buffer"]]
        call(monkeypatch, "--resume", part)
    first, second = (weights(folder) for folder in (whole, part))
    assert all(torch.equal(first[key], second[key]) for key in first)
    stop = state["global_step"]  # where it stopped there is one more point, and the next has what came after it
    same = lambda points: [point for point in points if point[0] != stop and not stop < point[0] <= stop + 50]
    curves = [{tag: same(points) for tag, points in curve(folder).items()} for folder in (whole, part)]
    assert curves[0] == curves[1]


def test_resume_without_the_buffer_fills_a_new_one_first(monkeypatch, capsys):
    folder = run(total_timesteps=100)
    seen = spy(monkeypatch)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 200)
    assert "20 decisions of the policy fill a new one before learning goes on" in capsys.readouterr().out
    assert len(seen.losses) == 80 and seen.buffer.added == 100


def test_a_resumed_run_begins_no_transition_in_the_old_one(monkeypatch):
    """Players can't be put back: the last transitions of before keep their own next observations."""
    first = spy(monkeypatch)
    folder = run(env_id="3DBall", max_agents=12, buffer_size=1000, total_timesteps=240, save_buffer=True)
    before = [(first.buffer.obs[i].copy(), first.buffer.obs[first.buffer.next_row[i]].copy()) for i in range(240)]
    second = spy(monkeypatch)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 480)
    after = [(second.buffer.obs[i], second.buffer.obs[second.buffer.next_row[i]]) for i in range(240)]
    np.testing.assert_array_equal(before, after)
    assert second.buffer.added == 480


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-0.4, 0.4), None])
def test_exported_policy_equals_the_agent(bounds):
    args = sac.Args(hidden_sizes=(32, 32), activation="silu", norm_obs=True)
    low, high = bounds or ((-torch.rand(20) - 0.1).tolist(), (torch.rand(20) + 0.1).tolist())
    spec = {"obs_dim": 158, "action_dim": 20, "sensors": [126, 32], "low": low, "high": high}
    agent = sac.Agent(spec, args)
    agent.obs_rms.update(3 * torch.randn(500, 158) + 1)
    policies.export(agent, spec, "policy.onnx")
    session, obs = onnxruntime.InferenceSession("policy.onnx"), 5 * torch.randn(300, 158)
    feed = lambda rows: {"obs_0": rows[:, :126].numpy(), "obs_1": rows[:, 126:].numpy()}
    low, high = np.array(low, np.float32), np.array(high, np.float32)
    scale = lambda act, obs: 0.5 * (high + low) + 0.5 * (high - low) * act.checked(obs)(obs)[0]
    expected = scale(fast.Acting(agent, deterministic=True), obs.numpy())
    np.testing.assert_allclose(session.run(["deterministic_continuous_actions"], feed(obs))[0], expected, atol=1e-5)
    sampled = session.run(["continuous_actions"], feed(torch.cat([obs[:1]] * 4000)))[0]
    ours = scale(fast.Acting(agent), np.repeat(obs[:1].numpy(), 4000, 0))
    np.testing.assert_allclose(sampled.mean(0), ours.mean(0), atol=0.05)
    np.testing.assert_allclose(sampled.std(0), ours.std(0), atol=0.05)


def test_a_saved_policy_is_evaluated(monkeypatch, capsys):
    folder = run()
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 7)
    assert "after 200 decisions, 7 episodes" in capsys.readouterr().out
    match = "is a checkpoint of sac_continuous.py, and this is ppo_continuous_multiagent.py"
    with pytest.raises(SystemExit, match=match):
        import ppo_continuous_multiagent as ppo

        monkeypatch.setattr(sys, "argv", ["ppo", "--evaluate", str(folder)])
        ppo.main()


# Bad input


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--env-id CartPole-v1", "ppo_discrete_multiagent.py takes them"),
        ("--env-id parity_env:Unbounded-v0", "ppo_continuous_multiagent.py takes them"),
        ("--env-id parity_env:Parity-v0 --tau 1.5", "--tau 1.5: must be between 0 and 1"),
        ("--env-id parity_env:Parity-v0 --updates-per-step -1", "--updates-per-step -1.0: must not be negative"),
        ("--env-id parity_env:Parity-v0 --buffer-size 100", "must hold a batch of 256"),
        ("--env-id parity_env:Parity-v0 --total-timesteps 1000", "nothing would be learned"),
    ],
)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(sac, line, match, tmp_path)
