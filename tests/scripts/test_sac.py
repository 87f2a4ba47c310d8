"""sac_continuous.py: parity with SB3, the replay buffer against each agent's own transitions, updates during
simulation, and checkpoints where they differ from PPO's."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import (
    assert_refused,
    call,
    curve,
    needs_compiler,
    stop_after,
    train,
    trajectories,
    watch,
)
from hypothesis import given
from hypothesis import strategies as st

import sac_continuous as sac
from envs.sync import SyncEnvs
from onefile_rl import checkpoints, export, fast, runs

SMALL = dict(
    env_id="parity_env:Parity-v0",
    buffer_size=500,
    learning_starts=20,
    batch_size=16,
    hidden_sizes=(8, 8),
)
SMALL |= dict(total_timesteps=200, checkpoint_interval=50)
pytestmark = pytest.mark.usefixtures("empty_folder")
run, call = partial(train, sac, SMALL), partial(call, sac)


LOSSES = (
    "losses/qf_loss",
    "losses/qf1_values",
    "losses/alpha",
    "losses/actor_loss",
    "losses/entropy",
)
SPEC = {"obs_dim": 5, "action_dim": 3, "sensors": [5], "low": -1.0, "high": 1.0}


def load(folder):
    return checkpoints.load(folder, sac.__file__)[1]


def weights(folder):
    return load(folder)["kept"]["agent"]


def spy(monkeypatch, initial=None, seed=11):
    """Return what a run makes: the agent, the replay buffer and the losses of every update. The agent starts with the
    weights `initial`, if they are given, and the random numbers with `seed`."""
    seen = SimpleNamespace(losses=[])
    make_agent, make_buffer, compile_update = sac.Agent, sac.ReplayBuffer, runs.Run.compile

    def agent(*args):
        seen.agent = make_agent(*args)
        if initial:
            seen.agent.load_state_dict(initial, strict=False)
            torch.manual_seed(seed)
            np.random.seed(seed)
        return seen.agent

    def buffer(*args):
        seen.rb = make_buffer(*args)
        return seen.rb

    def compiled(*args):
        update = compile_update(*args)

        def watched(*inputs):
            metrics = update(*inputs)
            seen.losses.append([metrics[name].item() for name in LOSSES if name in metrics])
            return metrics

        return watched

    monkeypatch.setattr(sac, "Agent", agent)
    monkeypatch.setattr(sac, "ReplayBuffer", buffer)
    monkeypatch.setattr(runs.Run, "compile", compiled)
    return seen


def make_optimizers(agent, lr):
    parameters = (agent.qf.parameters(), agent.actor.parameters(), [agent.log_alpha])
    return [fast.Adam(params, lr=lr) for params in parameters]


# Parity with SB3


def make_sb3(**kwargs):
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    kwargs |= dict(buffer_size=5000, policy_kwargs=dict(net_arch=[32, 32]))
    model = SAC("MlpPolicy", "Pendulum-v1", seed=3, device="cpu", **kwargs)
    model.set_logger(configure(None, []))
    return model


def of_sb3(model):
    """Return SB3's weights under our names."""
    state, out = model.policy.state_dict(), {"log_alpha": model.log_ent_coef.detach().clone()}
    for end in ("weight", "bias"):
        for ours, theirs in {"0": "latent_pi.0", "2": "latent_pi.2"}.items():
            out[f"actor.{ours}.{end}"] = state[f"actor.{theirs}.{end}"].clone()
        out[f"actor.4.{end}"] = torch.cat([state[f"actor.mu.{end}"], state[f"actor.log_std.{end}"]])
        for ours, theirs in {"qf": "critic", "qf_target": "critic_target"}.items():
            for i in range(3):
                pair = [state[f"{theirs}.qf{k}.{2 * i}.{end}"] for k in range(2)]
                stacked = torch.stack([x.T if end == "weight" else x[None] for x in pair])
                out[f"{ours}.{'weights' if end == 'weight' else 'biases'}.{i}"] = stacked
    return out


class Losses(pytest.importorskip("stable_baselines3").common.callbacks.BaseCallback):
    """Record SB3's losses of every update: critics, temperature, actor. SB3 trains after the step, so a step sees the
    update before it."""

    def _on_training_start(self):
        self.rows = []

    def _on_step(self):
        values = self.logger.name_to_value
        if "train/critic_loss" in values:
            self.rows.append(
                [values[f"train/{name}"] for name in ("critic_loss", "ent_coef", "actor_loss")]
            )
        return True


def test_200_updates_are_sb3s():
    """With the same weights, transitions and random numbers, the losses, the temperature and the weights of 200 updates
    are the same."""
    model, rng = make_sb3(batch_size=64), np.random.default_rng(0)
    initial = of_sb3(model)
    rb = sac.ReplayBuffer(5000, 1, 3, 1)
    slots = np.arange(1)
    obs = rng.normal(size=3).astype(np.float32)
    for t in range(300):
        action, reward = rng.uniform(-1, 1, 1).astype(np.float32), np.array([rng.normal()])
        real_next_obs = rng.normal(size=3).astype(np.float32)
        terminated, truncated = np.array([t % 40 == 39]), np.array([t % 50 == 49])
        done = terminated | truncated
        sb3_infos = [{"TimeLimit.truncated": bool(truncated[0] and not terminated[0])}]
        model.replay_buffer.add(obs, real_next_obs, action, reward, done, sb3_infos)
        next_obs = rng.normal(size=3).astype(np.float32) if done[0] else real_next_obs
        rb.decide(slots, obs, action)
        rb.add(
            slots, reward, terminated, truncated, next_obs[None], {"final_obs": real_next_obs[None]}
        )
        obs = next_obs
    args = sac.Args(hidden_sizes=(32, 32), batch_size=64, target_entropy=-1.0)
    agent = sac.Agent({"obs_dim": 3, "action_dim": 1, "low": -2.0, "high": 2.0}, args)
    agent.load_state_dict(initial, strict=False)
    optimizers = make_optimizers(agent, args.learning_rate)
    ours, theirs = [], []
    torch.manual_seed(5)
    np.random.seed(5)
    for _ in range(200):
        mb = rb.sample(64, "cpu")
        noise, next_noise = torch.randn_like(mb.actions), torch.randn_like(mb.actions)
        metrics = sac.update(agent, *optimizers, mb, noise, next_noise, args)
        ours.append(
            [metrics[f"losses/{name}"].item() for name in ("qf_loss", "alpha", "actor_loss")]
        )
    torch.manual_seed(5)
    np.random.seed(5)
    for _ in range(200):
        model.train(1, batch_size=64)
        values = model.logger.name_to_value
        theirs.append(
            [values[f"train/{name}"] for name in ("critic_loss", "ent_coef", "actor_loss")]
        )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    final = agent.state_dict()
    for key, value in of_sb3(model).items():
        np.testing.assert_allclose(final[key].numpy(), value.numpy(), atol=1e-4, err_msg=key)
        assert not np.allclose(value.numpy(), initial[key].numpy(), atol=1e-3), f"{key} learned"


def test_a_run_of_1000_steps_is_sb3s(monkeypatch):
    """Pendulum-v1, learning from step 100: the same actions and losses up to rounding, which grows during the 900
    updates."""
    model, log = make_sb3(batch_size=32, learning_starts=100), Losses()
    initial = of_sb3(model)
    torch.manual_seed(11)
    np.random.seed(11)
    model.learn(1000, callback=log, log_interval=10**6)
    seen = spy(monkeypatch, initial)
    settings = dict(buffer_size=5000, batch_size=32, learning_starts=100, hidden_sizes=(32, 32))
    run(env_id="Pendulum-v1", **settings, total_timesteps=1000, seed=3)
    theirs = model.replay_buffer
    np.testing.assert_allclose(seen.rb.actions[:1000], theirs.actions[:1000, 0], atol=1e-3)
    np.testing.assert_allclose(seen.rb.actions[:300], theirs.actions[:300, 0], atol=1e-5)
    np.testing.assert_allclose(seen.rb.obs[:1000], theirs.observations[:1000, 0], atol=1e-2)
    np.testing.assert_allclose(seen.rb.rewards[:1000], theirs.rewards[:1000, 0], atol=1e-2)
    assert len(seen.losses) == 900
    np.testing.assert_allclose(
        np.array(seen.losses)[:-1, [0, 2, 3]], log.rows, rtol=1e-3, atol=1e-3
    )


# The buffer

KINDS = st.sampled_from(("decide", "terminate", "truncate", "lose", "terminate and decide"))
EVENTS = st.lists(st.tuples(st.integers(0, 2), KINDS), max_size=80)


def content(rb):
    """Return all transitions of a replay buffer, the oldest first."""
    rows = np.arange(max(0, rb.num_added - rb.capacity), rb.num_added) % rb.capacity
    obs, actions, next_obs = rb.obs[rows, 0], rb.actions[rows, 0], rb.obs[rb.next_row[rows], 0]
    columns = obs.tolist(), actions.tolist(), rb.rewards[rows].tolist(), next_obs.tolist()
    return [*zip(*columns, map(bool, rb.terminated[rows]), strict=True)]


def add(rb, slots, reward, terminated, truncated, next_obs, final_obs=None):
    """Give `rb.add` arrays with an entry for each slot, from values for `slots` only."""
    num_slots, obs_dim = rb.pending_obs.shape
    arrays = [
        np.zeros(num_slots),
        *np.zeros((2, num_slots), bool),
        *np.zeros((2, num_slots, obs_dim), np.float32),
    ]
    for array, value in zip(
        arrays, (reward, terminated, truncated, next_obs, final_obs), strict=True
    ):
        if value is not None:
            array[slots] = value
    rb.add(slots, *arrays[:4], {"final_obs": arrays[4]})


@given(EVENTS, st.integers(3, 12))
def test_the_buffer_holds_each_agents_own_transitions(events, size):
    """Agents decide, terminate, are truncated and are lost in any order, in a buffer so small that it is overwritten
    again and again. It has exactly the last transitions."""
    rb, pending, expected, clock = sac.ReplayBuffer(size, 3, 1, 1), {}, [], 0
    for slot, event in events:
        clock, slots = clock + 1, np.array([slot])
        final, first = np.float32([clock]), np.float32([clock + 0.5])
        if slot in pending and event == "lose":
            rb.cut(slots)
            del pending[slot]
        elif slot in pending:
            ended = event != "decide"
            after = float(final[0]) if ended else float(first[0])
            expected.append((*pending.pop(slot), float(-clock), after, "terminate" in event))
            add(rb, slots, -clock, "terminate" in event, event == "truncate", first, final)
        if "decide" in event:
            rb.decide(slots, first, [[clock / 100]])
            pending[slot] = (float(first[0]), float(np.float32(clock / 100)))
        assert content(rb) == expected[-size:]
    twin = sac.ReplayBuffer(size, 3, 1, 1)
    twin.restore(rb.state())
    assert content(twin) == expected[-size:]


@pytest.mark.parametrize("crash_at", [None, 60])
@pytest.mark.parametrize("overlap", [True, False])
def test_transitions_of_mixed_periods_are_those_of_each_agent(monkeypatch, crash_at, overlap):
    """In a scene whose agents decide, end, vanish and come back at their own pace, with a player that crashes, every
    transition is stored once, and no other is."""
    record, seen = watch(sac, monkeypatch, crash_at), spy(monkeypatch)
    settings = dict(
        buffer_size=2000, learning_starts=100, updates_per_step=0.1, total_timesteps=1000
    )
    run(env_id="Mixed", max_agents=12, **settings, overlap=overlap)

    def key(obs, action, reward, next_obs, terminated):
        return (
            obs.tobytes(),
            action.tobytes(),
            np.float32(reward),
            next_obs.tobytes(),
            bool(terminated),
        )

    expected = sorted(
        key(*transition) for trajectory in trajectories(record) for transition in trajectory
    )
    rb = seen.rb
    row = lambda i: key(
        rb.obs[i], rb.actions[i], rb.rewards[i], rb.obs[rb.next_row[i]], rb.terminated[i]
    )
    assert expected == sorted(row(i) for i in range(rb.num_added)) and rb.num_added >= 1000
    assert any("restarted" in out[-1] for _, out in record[1:]) == bool(crash_at)
    assert len(seen.losses) == pytest.approx(90, abs=2)


def test_a_sampled_batch_never_mixes_agents_or_episodes():
    """Each observation is (slot, episode, step). The next observation has the same slot and episode, one step later."""
    rng, num_slots = np.random.default_rng(0), 5
    rb = sac.ReplayBuffer(200, num_slots, 3, 1)
    everyone = np.arange(num_slots)
    episode, clock = np.arange(num_slots), np.zeros(num_slots, int)
    see = lambda slots: np.stack([slots, episode[slots], clock[slots]], 1)
    rb.decide(everyone, see(everyone), 0)
    for _ in range(300):
        slots = np.flatnonzero(rng.random(num_slots) < 0.6)
        clock[slots] += 1
        final_obs = see(slots)
        truncated = rng.random(len(slots)) < 0.1
        ended = slots[truncated]
        episode[ended] += num_slots
        clock[ended] = 0
        add(rb, slots, 0, False, truncated, see(slots), final_obs)
        rb.decide(slots, see(slots), 0)
        if len(rb):
            mb = rb.sample(32, "cpu")
            np.testing.assert_array_equal(
                mb.next_obs - mb.obs, np.broadcast_to([0, 0, 1], mb.obs.shape)
            )


def test_observations_are_stored_once():
    rb, slots = sac.ReplayBuffer(10_000, 12, 8, 2), np.arange(12)
    for t in range(2000):
        add(rb, slots, 0, False, slots == t % 12, 0)
    # 2,000 episodes ended, 834 of them are in the buffer.
    assert rb.end < 10_000 + 12 + 1400, "rows of overwritten final observations are used again"


def test_an_agent_slower_than_the_whole_buffer_keeps_transitions_apart():
    """The last transition of slot 0 is overwritten while its next decision is pending. When that decision is stored, it
    must not be linked to the transition that is in this row now."""
    rb, one, other = sac.ReplayBuffer(3, 2, 1, 1), np.array([0]), np.array([1])
    rb.decide(one, [[0]], 0)
    rb.decide(other, [[10]], 0)
    add(rb, one, 0, False, False, 1)
    for k in range(1, 4):
        add(rb, other, 0, False, False, 10 + k)
    assert [(a, b) for a, _, _, b, _ in content(rb)] == [(10, 11), (11, 12), (12, 13)]
    add(rb, one, 0, False, False, 2)
    assert [(a, b) for a, _, _, b, _ in content(rb)] == [(11, 12), (12, 13), (1, 2)]


def test_a_buffer_that_cannot_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"--buffer-size 100000000000 needs [\d,]+ MiB, but [\d,]+ MiB are free"
    ):
        run(buffer_size=10**11)
    assert not Path("runs").exists()


# The update


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_policy_acts_as_the_network_does_and_follows_it(activation):
    agent = sac.Agent(SPEC, sac.Args(hidden_sizes=(8, 8), activation=activation, norm_obs=True))
    obs = 10 * torch.randn(64, 5)
    act = fast.Acting(agent)
    act(obs.numpy())
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        torch.manual_seed(0)
        actions, _ = act(obs.numpy())
        torch.manual_seed(0)
        expected, _, _ = agent.get_action(obs, torch.randn(64, 3))
    assert act.enabled
    np.testing.assert_allclose(actions, expected.numpy(), atol=1e-5)


def test_log_prob_is_that_of_the_squashed_gaussian():
    agent = sac.Agent(SPEC, sac.Args(hidden_sizes=(8,)))
    obs, noise = torch.randn(20, 5), torch.randn(20, 3)
    mean, log_std = agent.actor(obs).chunk(2, 1)
    normal, tanh = (
        torch.distributions.Normal(mean, log_std.exp()),
        torch.distributions.TanhTransform(),
    )
    squashed = torch.distributions.TransformedDistribution(normal, [tanh])
    action, log_prob, mean_action = agent.get_action(obs, noise)
    torch.testing.assert_close(log_prob, squashed.log_prob(action).sum(1), atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(mean_action, mean.tanh())


def test_the_policy_update_computes_no_gradients_of_the_q_networks():
    """They would cost time, and be zeroed before the next update of the Q networks."""
    agent = sac.Agent(SPEC, sac.Args(hidden_sizes=(8,)))
    action = torch.zeros(20, 3, requires_grad=True)
    agent.qf(torch.randn(20, 5), action, frozen=True).sum().backward()
    assert action.grad.any() and all(p.grad is None for p in agent.qf.parameters())


def test_policy_frequency_skips_updates_of_policy_and_temperature(monkeypatch):
    seen = spy(monkeypatch)
    kept = load(run(policy_frequency=3, total_timesteps=80))["kept"]
    assert [len(losses) for losses in seen.losses] == [5, 3, 3] * 20
    steps = {
        name: kept[name]["state"][0]["step"]
        for name in ("q_optimizer", "actor_optimizer", "a_optimizer")
    }
    assert steps == {"q_optimizer": 60, "actor_optimizer": 20, "a_optimizer": 20}


@needs_compiler
def test_compiled_update_is_the_same():
    """Weights, temperature and target networks are those of the update that is not compiled."""
    settings = dict(policy_frequency=2, total_timesteps=80, norm_obs=True)
    plain, compiled = (weights(run(**settings, compile=compile)) for compile in (False, True))
    for key, value in plain.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)


@needs_compiler
def test_no_fast_computes_the_same(monkeypatch):
    """Numpy acting and compiled updates give the same curves as plain PyTorch."""
    monkeypatch.setattr(sac, "LOG_INTERVAL", 10)
    fast_curves = curve(run(total_timesteps=50, compile=True))
    plain_curves = curve(run(total_timesteps=50, fast=False))
    assert set(LOSSES) <= set(fast_curves) and fast_curves.keys() == plain_curves.keys()
    for tag, points in plain_curves.items():
        np.testing.assert_allclose(fast_curves[tag], points, rtol=1e-5, atol=1e-5, err_msg=tag)


def test_without_autotune_the_temperature_stays():
    folder = run(autotune=False, alpha=0.2, total_timesteps=80)
    assert weights(folder)["log_alpha"].exp().item() == pytest.approx(0.2)
    assert "losses/alpha_loss" not in curve(folder)


@pytest.mark.parametrize(("updates_per_step", "expected"), [(0.25, 45), (1, 180), (2, 360)])
def test_updates_per_step_counts_decisions(monkeypatch, updates_per_step, expected):
    seen = spy(monkeypatch)
    run(updates_per_step=updates_per_step, num_envs=4 if updates_per_step == 1 else 1)
    assert len(seen.losses) == pytest.approx(expected, abs=4)


@pytest.mark.parametrize("settings", [dict(), dict(env_id="Mixed", max_agents=12)])
def test_learning_can_start_with_the_first_transition(monkeypatch, settings):
    """The buffer is never sampled while it is empty."""
    seen = spy(monkeypatch)
    run(learning_starts=0, updates_per_step=0.5, **settings)
    assert len(seen.losses) == pytest.approx(100, abs=10)


def test_learning_waits_until_all_ranks_have_transitions(monkeypatch):
    """The decisions of another rank are counted in this one too, which may have none to sample yet."""
    sizes = [0, 0, 0]
    smallest = lambda number: sizes.pop() if sizes else number
    monkeypatch.setattr(sac.distributed, "minimum", smallest)
    seen = spy(monkeypatch)
    run(learning_starts=20)
    assert len(seen.losses) == 180 - 3 and not sizes


def test_two_runs_with_one_seed_are_equal():
    first, second, other = (weights(run(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["actor.0.weight"], other["actor.0.weight"])


def test_truncation_is_not_termination(monkeypatch):
    """With reward 1 at every step and a time limit after each, the value is 1 / (1 - gamma) = 5. If a time limit were
    a termination, it would be 1."""
    seen = spy(monkeypatch)
    settings = dict(gamma=0.8, alpha=1e-6, autotune=False, learning_rate=3e-3, tau=0.05)
    run(env_id="parity_env:OneStep-v0", **settings, total_timesteps=800)
    assert seen.losses[-1][1] == pytest.approx(5, abs=0.3)


def test_statistics_are_those_of_the_observations(monkeypatch):
    seen = spy(monkeypatch)
    run(norm_obs=True, total_timesteps=1000, buffer_size=2000)
    np.testing.assert_allclose(
        seen.agent.obs_rms.mean.numpy(), seen.rb.obs[:1000].mean(0), atol=1e-4
    )
    np.testing.assert_allclose(
        seen.agent.obs_rms.scale.numpy(), 1 / seen.rb.obs[:1000].std(0), rtol=1e-3
    )


def test_it_learns():
    """The return of Pendulum-v1 rises from about -1,200 to above -400 in 4,000 steps, with exploration noise."""
    settings = dict(
        buffer_size=5000,
        learning_starts=200,
        batch_size=64,
        hidden_sizes=(64, 64),
        learning_rate=2e-3,
    )
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
    assert kept["counters"]["updates"] == 0
    for name in ("q_optimizer", "actor_optimizer", "a_optimizer"):
        assert not any(x.any() for state in kept[name]["state"].values() for x in state.values()), (
            "Adam as at the start"
        )


# Checkpoints


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resume_equals_uninterrupted(monkeypatch, num_envs):
    """A run that is stopped and resumed with its replay buffer has the same weights, to the byte, and the same curves
    as an uninterrupted run."""
    settings = dict(num_envs=num_envs, total_timesteps=600, buffer_size=150, save_buffer=True)
    settings |= dict(norm_obs=True, updates_per_step=0.7)
    with monkeypatch.context() as patch:
        patch.setattr(sac, "LOG_INTERVAL", 50)
        whole = run(**settings)
        stop_after(patch, sac.ReplayBuffer, "sample", 200)
        part = run(**settings)
        state = load(part)
        assert 200 < state["global_step"] < 400 and state["episodes"]["l"].any(), (
            "stopped within an episode"
        )
        assert [path.name for path in part.glob("buffer_*.pt")] == [state["large"]["buffer"]]
        call(monkeypatch, "--resume", part)
    first, second = (weights(folder) for folder in (whole, part))
    assert all(torch.equal(first[key], second[key]) for key in first)
    stop = state[
        "global_step"
    ]  # the curves have one more point here, and the next one has the rest of the interval
    same = lambda points: [
        point for point in points if point[0] != stop and not stop < point[0] <= stop + 50
    ]
    curves = [
        {tag: same(points) for tag, points in curve(folder).items()} for folder in (whole, part)
    ]
    assert curves[0] == curves[1]


def test_resume_without_the_buffer_fills_a_new_one_first(monkeypatch, capsys):
    folder = run(total_timesteps=100)
    seen = spy(monkeypatch)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 200)
    assert "20 decisions fill a new one before learning resumes" in capsys.readouterr().out
    assert len(seen.losses) == 80 and seen.rb.num_added == 100


def test_resume_without_the_buffer_while_a_scene_simulates(monkeypatch):
    """Updates that were due when the run stopped are not made from an empty buffer."""
    folder = run(env_id="3DBall", total_timesteps=240, learning_starts=60, updates_per_step=0.1)
    assert load(folder)["kept"]["counters"]["due_updates"] >= 1
    seen = spy(monkeypatch)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 480)
    assert len(seen.losses) > 0 and load(folder)["global_step"] >= 480


def test_a_resumed_run_that_would_learn_nothing_is_refused(monkeypatch):
    folder = run(total_timesteps=100)
    with pytest.raises(SystemExit, match="nothing would be learned, learning resumes after 120"):
        call(monkeypatch, "--resume", folder, "--total-timesteps", 110)


def test_a_resumed_run_keeps_the_transitions_of_players_that_restart(monkeypatch):
    """Players can't continue their episodes. The last transitions before the stop keep their own next observations."""
    first = spy(monkeypatch)
    folder = run(
        env_id="3DBall", max_agents=12, buffer_size=1000, total_timesteps=240, save_buffer=True
    )
    before = [
        (first.rb.obs[i].copy(), first.rb.obs[first.rb.next_row[i]].copy()) for i in range(240)
    ]
    second = spy(monkeypatch)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 480)
    after = [(second.rb.obs[i], second.rb.obs[second.rb.next_row[i]]) for i in range(240)]
    np.testing.assert_array_equal(before, after)
    assert second.rb.num_added == 480


def test_a_resumed_run_keeps_the_transitions_of_an_episode_that_cannot_continue(monkeypatch):
    """Of two envs, one continues its episode, the other starts a new one. Both keep their own next observations."""
    settings = dict(env_id="Pendulum-v1", num_envs=2, buffer_size=1000, save_buffer=True)
    first = spy(monkeypatch)
    folder = run(**settings, total_timesteps=100)
    rows = lambda rb: [(rb.obs[i].copy(), rb.obs[rb.next_row[i]].copy()) for i in range(100)]
    before = rows(first.rb)
    restore = SyncEnvs.restore

    def restore_one(envs, state):
        obs, infos = restore(envs, state)
        obs[0] += 1
        return obs, infos | {"restarted": np.array([True, False])}

    monkeypatch.setattr(SyncEnvs, "restore", restore_one)
    second = spy(monkeypatch)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 200)
    np.testing.assert_array_equal(before, rows(second.rb))
    assert second.rb.num_added == 200 and second.rb.next_row[99] < 1000 <= second.rb.next_row[98]


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-0.4, 0.4), None])
def test_exported_policy_equals_the_agent(bounds):
    args = sac.Args(hidden_sizes=(32, 32), activation="silu", norm_obs=True)
    low, high = bounds or ((-torch.rand(20) - 0.1).tolist(), (torch.rand(20) + 0.1).tolist())
    spec = {"obs_dim": 158, "action_dim": 20, "sensors": [126, 32], "low": low, "high": high}
    agent = sac.Agent(spec, args)
    agent.obs_rms.update(3 * torch.randn(500, 158) + 1)
    export.export(agent, spec, "policy.onnx")
    session, obs = onnxruntime.InferenceSession("policy.onnx"), 5 * torch.randn(300, 158)
    feed = lambda rows: {"obs_0": rows[:, :126].numpy(), "obs_1": rows[:, 126:].numpy()}
    low, high = np.array(low, np.float32), np.array(high, np.float32)
    scale = lambda act, obs: 0.5 * (high + low) + 0.5 * (high - low) * act(obs)[0]
    expected = scale(fast.Acting(agent, deterministic=True), obs.numpy())
    np.testing.assert_allclose(
        session.run(["deterministic_continuous_actions"], feed(obs))[0], expected, atol=1e-5
    )
    sampled = session.run(["continuous_actions"], feed(torch.cat([obs[:1]] * 4000)))[0]
    ours = scale(fast.Acting(agent), np.repeat(obs[:1].numpy(), 4000, 0))
    np.testing.assert_allclose(sampled.mean(0), ours.mean(0), atol=0.05)
    np.testing.assert_allclose(sampled.std(0), ours.std(0), atol=0.05)


def test_a_saved_policy_is_evaluated(monkeypatch, capsys):
    folder = run()
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 7)
    assert "after 200 decisions, 7 episodes" in capsys.readouterr().out
    match = "is a checkpoint of sac_continuous.py, whose network may differ from that of ppo_continuous_multiagent.py"
    with pytest.raises(SystemExit, match=match):
        import ppo_continuous_multiagent as ppo

        monkeypatch.setattr(sys, "argv", ["ppo", "--evaluate", str(folder)])
        ppo.main()


# Bad input


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--env-id CartPole-v1", "use ppo_discrete_multiagent.py"),
        (
            "--env-id parity_env:Unbounded-v0",
            "ppo_continuous_multiagent.py accepts unbounded ones too",
        ),
        ("--env-id parity_env:Parity-v0 --tau 1.5", "--tau 1.5: must be between 0 and 1"),
        (
            "--env-id parity_env:Parity-v0 --updates-per-step -1",
            "--updates-per-step -1.0: must not be negative",
        ),
        (
            "--env-id parity_env:Parity-v0 --buffer-size 100",
            "--buffer-size 100: must be at least --batch-size 256",
        ),
        (
            "--env-id parity_env:Parity-v0 --total-timesteps 1000",
            "--total-timesteps 1000: nothing would be learned",
        ),
    ],
)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(sac, line, match, tmp_path)
