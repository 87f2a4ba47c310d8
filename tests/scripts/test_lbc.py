"""lbc_discrete.py: traces and losses against their formulas, mixtures, sequences, memory, bandits, resume, actors."""

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as imageio
import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT, curve, needs_compiler, stop_after, train, trajectories, watch
from conftest import call as call_script
from hypothesis import given, settings
from hypothesis import strategies as st
from test_copies import copy_of, saved
from test_discrete import masks_of

import lbc_discrete as lbc
from envs.bins import Binned
from envs.make import SyncEnvs, make_env
from onefile_rl import actor_processes, checkpoints, export, fast
from onefile_rl.engines.scenes import EngineError

SMALL = dict(
    num_envs=3,
    sequence_length=8,
    batch_size=8,
    replay_size=20,
    hidden_sizes=(8, 8),
    eval_interval=0,
)
SMALL |= dict(env_id="parity_env:MaskedBranches-v0", total_timesteps=360, exp_name="test")
SPEC = {"obs_dim": 5, "branches": [3, 2, 4], "start": [0, 1, 0], "sensors": [2, 3], "bins": 0}
MEMORY = dict(architecture="transformer", context=4, num_heads=2)
UNCHANGED = dict(learning_rate=1e-30, norm_obs=False)  # float32 weights stay the same

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, lbc, SMALL), partial(call_script, lbc)


# Traces


def random_sequences(seed, n=3, length=12):
    """Return random rows with terminations, rows that are not valid, and ratios below and above 1."""
    rng = np.random.default_rng(seed)
    terminated, valid = rng.random((n, length)) < 0.2, rng.random((n, length)) < 0.8
    terminated &= valid
    data = dict(rewards=rng.normal(size=(n, length)), values=rng.normal(size=(n, length + 1)))
    data |= dict(q=rng.normal(size=(n, length)), ratio=np.exp(rng.normal(size=(n, length))))
    return data | dict(
        discounts=0.9 * (1.0 - terminated), valid=valid.astype(float), terminated=terminated
    )


def double_loops(
    rewards, values, q, ratio, discounts, valid, terminated, rho_bar=1.05, c_bar=1.05, lam=0.7
):
    """Return the targets by their definitions, row by row. Nothing looks past the value of a row that is not valid."""
    n, length = rewards.shape
    vs, adv, qs = values[:, :-1].copy(), np.zeros((n, length)), q.copy()
    rho, c = np.minimum(ratio, rho_bar), lam * np.minimum(ratio, c_bar)
    for i in range(n):
        for t in range(length):
            if not valid[i, t]:
                continue
            v_weight = q_weight = 1.0
            for j in range(t, length):
                if not valid[i, j]:
                    break
                if j > t:
                    q_weight *= discounts[i, j - 1] * c[i, j]
                target = rewards[i, j] + discounts[i, j] * values[i, j + 1]
                vs[i, t] += v_weight * rho[i, j] * (target - values[i, j])
                qs[i, t] += q_weight * (target - q[i, j])
                v_weight *= discounts[i, j] * c[i, j]
                if terminated[i, j]:
                    break
    after = np.concatenate([vs[:, 1:], values[:, -1:]], 1)
    adv = valid * rho * (rewards + discounts * after - values[:, :-1])
    return vs, adv, qs


@pytest.mark.parametrize("seed", range(20))
def test_vtrace_and_retrace_equal_double_loops(seed):
    data = random_sequences(seed)
    rewards, values, q, ratio, discounts, valid = (
        torch.as_tensor(data[name])
        for name in ("rewards", "values", "q", "ratio", "discounts", "valid")
    )
    rho, c = valid * ratio.clamp(max=1.05), valid * 0.7 * ratio.clamp(max=1.05)
    vs, adv = lbc.vtrace(rewards, values, discounts, rho, c)
    qs = lbc.retrace(rewards, values, q, discounts, c)
    expected = double_loops(**data)
    is_valid = data["valid"] > 0
    for ours, theirs in zip((vs, adv, qs), expected, strict=True):
        np.testing.assert_allclose(ours.numpy()[is_valid], theirs[is_valid], atol=1e-12)
    np.testing.assert_allclose(vs.numpy()[~is_valid], data["values"][:, :-1][~is_valid], atol=0)


def test_on_policy_vs_is_the_n_step_return_and_qs_its_closed_form():
    rng, gamma, length = np.random.default_rng(0), 0.9, 10
    r, v, q = rng.normal(size=length), rng.normal(size=length + 1), rng.normal(size=length)
    one = torch.ones(1, length, dtype=torch.float64)
    rewards, values, qs = (torch.as_tensor(x)[None] for x in (r, v, q))
    vs, adv = lbc.vtrace(rewards, values, gamma * one, one, one)
    targets = lbc.retrace(rewards, values, qs, gamma * one, one)
    for t in range(length):
        n_step = (
            sum(gamma ** (j - t) * r[j] for j in range(t, length)) + gamma ** (length - t) * v[-1]
        )
        assert vs[0, t].item() == pytest.approx(n_step, abs=1e-12)
        assert adv[0, t].item() == pytest.approx(n_step - v[t], abs=1e-12)
        closed = n_step + sum(gamma ** (j - t) * (v[j] - q[j]) for j in range(t + 1, length))
        assert targets[0, t].item() == pytest.approx(closed, abs=1e-12)


# Losses


def agent_of(branches=(3, 2, 4), seed=0, **more):
    torch.manual_seed(seed)
    spec = SPEC | {"branches": list(branches), "start": [0] * len(branches)}
    agent = lbc.Agent(spec, lbc.Args(hidden_sizes=(8, 8), **more))
    for x in agent.parameters():
        torch.nn.init.normal_(x, 0, 0.5)
    return agent


def batch_of(branches, seed=0, n=4, length=7):
    rng = np.random.default_rng(seed)
    mask = masks_of(branches, n * length, rng).reshape(n, length, -1)
    mask = np.ones_like(mask) if len(branches) == 1 else mask
    ends = np.cumsum([0, *branches])
    action = np.stack(
        [
            np.array(
                [rng.choice(np.flatnonzero(row[a:b])) for row in mask.reshape(n * length, -1)]
            ).reshape(n, length)
            for a, b in zip(ends, ends[1:], strict=False)
        ],
        2,
    )
    data = random_sequences(seed, n, length)
    index = np.stack(
        [rng.uniform(0, 5, (n, length)), rng.uniform(0, 5, (n, length)), rng.random((n, length))], 2
    )
    prob, obs = rng.uniform(0.05, 1, (n, length)), rng.normal(size=(n, length + 1, 5))
    timestep = np.tile(np.arange(length + 1), (n, 1))
    arrays = (
        obs,
        timestep,
        mask,
        index,
        action,
        prob,
        data["rewards"],
        data["terminated"] * 1.0,
        data["valid"],
    )
    return lbc.Batch(*map(torch.as_tensor, arrays)), data


@pytest.mark.parametrize("branches", [(4,), (3, 2)])
@pytest.mark.parametrize("which", ["vf_coef", "qf_coef", "pg_coef"])
def test_the_gradient_of_each_loss_is_its_formula(which, branches):
    """The gradients by V and A of both networks, for each of the three losses, against formulas in numpy."""
    mb, data = batch_of(branches)
    n, length = data["rewards"].shape
    rng = np.random.default_rng(1)
    values = torch.as_tensor(rng.normal(size=(2, n, length + 1))).requires_grad_()
    advantages = torch.as_tensor(
        rng.normal(size=(2, n, length + 1, sum(branches)))
    ).requires_grad_()
    real = agent_of(branches)

    class Leaves:
        branches, mixture = real.branches, real.mixture

        def __call__(self, obs, timestep):
            return values, advantages

    coefs = dict(vf_coef=0.0, qf_coef=0.0, pg_coef=0.0) | {which: 1.3}
    args = lbc.Args(
        gamma_1=0.9, gamma_2=0.8, shaping_2="root", reward_scale=0.5, trace_lambda=0.7, **coefs
    )
    value, metrics = lbc.lbc_loss(Leaves(), mb, args)
    value.backward()

    v, a = values.detach().numpy(), advantages.detach().numpy()[:, :, :-1]
    mask, action, index = mb.mask.numpy(), mb.action.numpy(), mb.index.numpy()
    e, count = index[..., 2:], data["valid"].sum()
    total = 0
    for i, (gamma, how) in enumerate([(0.9, "none"), (0.8, "root")]):
        r = data["rewards"]
        shaped = r if how == "none" else np.sign(r) * ((1 + np.abs(r)) ** 0.25 - 1) + 0.001 * r
        joint, mean_a, chosen_a, parts = (
            np.ones((n, length)),
            np.zeros((n, length)),
            np.zeros((n, length)),
            [],
        )
        for k, branch in enumerate(real.branches):
            logits = a[..., branch] * index[..., :2].transpose(2, 0, 1)[..., None]
            s = np.where(mask[..., branch], np.exp(logits), 0)
            s /= s.sum(-1, keepdims=True)
            pi, one = e * s[0] + (1 - e) * s[1], np.eye(s.shape[-1])[action[..., k]]
            joint *= (pi * one).sum(-1)
            mean_a += (pi * a[i][..., branch]).sum(-1)
            chosen_a += (one * a[i][..., branch]).sum(-1)
            own = (e if i == 0 else 1 - e) * s[i]
            parts.append((branch, one, pi, s[i], (own * one).sum(-1) / (pi * one).sum(-1)))
        q = chosen_a - mean_a + v[i][:, :-1]
        given = data | {
            "rewards": 0.5 * shaped,
            "values": v[i],
            "q": q,
            "ratio": joint / mb.mu_prob.numpy(),
        }
        vs, adv, qs = double_loops(**(given | {"discounts": gamma * (1.0 - data["terminated"])}))
        weight = data["valid"] / count
        by_v, by_a = np.zeros_like(v[i]), np.zeros((n, length + 1, sum(branches)))
        if which == "vf_coef":
            by_v[:, :-1] = 1.3 * weight * 2 * (v[i][:, :-1] - vs)
            total += 1.3 * (weight * (vs - v[i][:, :-1]) ** 2).sum()
        for branch, one, pi, s, share in parts:
            if which == "qf_coef":
                by_a[:, :-1, branch] = 1.3 * (weight * 2 * (q - qs))[..., None] * (one - pi)
            if which == "pg_coef":
                slope = index[..., i : i + 1] * share[..., None] * (one - s)
                by_a[:, :-1, branch] = -1.3 * (weight * adv)[..., None] * slope
        total += 1.3 * (weight * (q - qs) ** 2).sum() if which == "qf_coef" else 0
        total -= 1.3 * (weight * adv * np.log(joint)).sum() if which == "pg_coef" else 0
        np.testing.assert_allclose(values.grad[i].numpy(), by_v, atol=1e-10)
        np.testing.assert_allclose(advantages.grad[i].numpy(), by_a, atol=1e-10)
        assert np.abs(by_v).max() + np.abs(by_a).max() > 1e-3
    assert value.item() == pytest.approx(total, abs=1e-10)
    name = {"vf_coef": "value", "qf_coef": "q", "pg_coef": "policy"}[which]
    both = metrics[f"losses/{name}_loss_1"] + metrics[f"losses/{name}_loss_2"]
    assert both.item() == pytest.approx(value.item() / 1.3) == metrics[f"losses/{name}_loss"].item()
    assert metrics["losses/loss"].item() == pytest.approx(value.item())


def test_the_six_losses_and_their_sums_are_logged_by_name():
    tags = curve(train(total_timesteps=48))
    for name in ("value_loss", "q_loss", "policy_loss", "loss"):
        points = [dict(tags[f"losses/{name}{end}"]) for end in ("", "_1", "_2")]
        assert all(
            points[0][t] == pytest.approx(points[1][t] + points[2][t], rel=1e-4, abs=1e-6)
            for t in points[0]
        )


def test_reward_shapings_are_those_of_gdi():
    r = torch.tensor([-3.0, 0.0, 15.0])
    np.testing.assert_allclose(
        lbc.shape_reward(r, "log"), [-math.log(4), 0, 2 * math.log(16)], rtol=1e-6
    )
    np.testing.assert_allclose(
        lbc.shape_reward(r, "root"), [-(4**0.25 - 1) - 0.003, 0, 1.015], rtol=1e-5
    )
    assert lbc.shape_reward(r, "none") is r


# Mixtures


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.integers(0, 1000))
def test_the_mixture_is_a_distribution_and_the_expected_q_is_v(branches, seed):
    """Over all joint actions: probabilities sum to 1, the expected Q is V, and forbidden actions are never drawn."""
    agent, rng = agent_of(branches, seed).double(), np.random.default_rng(seed)
    mask = torch.as_tensor(masks_of(branches, 1, rng))
    obs, index = torch.randn(1, 5).double(), torch.tensor([[3.0, 20.0, rng.random()]]).double()
    total = expected = 0.0
    with torch.no_grad():
        values, advantages = agent(obs[:, None], None)
        mixture = agent.mixture(advantages[:, :, 0], index, mask)
        for action in np.ndindex(*branches):
            allowed = all(
                mask[0, branch][a] for branch, a in zip(agent.branches, action, strict=True)
            )
            prob, q = 1.0, values[:, 0, 0].clone()
            for branch, a, (pi,) in zip(agent.branches, action, mixture, strict=True):
                prob = prob * pi[a]
                q += advantages[:, 0, 0, branch][:, a] - (pi * advantages[:, 0, 0, branch]).sum(1)
            assert allowed or prob == 0
            total, expected = total + prob, expected + prob * q
        drawn, _, prob = agent.act(obs.expand(50, -1), mask.expand(50, -1), index)
        assert all(
            mask[0, branch][a].all() for branch, a in zip(agent.branches, drawn.T, strict=True)
        )
    assert total == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(expected, values[:, 0, 0], atol=1e-8)


def test_the_mixture_is_its_formula():
    """epsilon softmax(k1 A1) + (1 - epsilon) softmax(k2 A2), for each branch."""
    agent, rng = agent_of((3, 2)), np.random.default_rng(0)
    a1, a2 = rng.normal(size=(2, 4, 5))
    index = np.stack([rng.uniform(0, 9, 4), rng.uniform(0, 9, 4), rng.random(4)], 1)
    mixture = agent.mixture(
        torch.as_tensor(np.stack([a1, a2])), torch.as_tensor(index), torch.ones(4, 5)
    )
    for branch, probs in zip((slice(0, 3), slice(3, 5)), mixture, strict=True):
        p1, p2 = np.exp(index[:, :1] * a1[:, branch]), np.exp(index[:, 1:2] * a2[:, branch])
        p1, p2 = p1 / p1.sum(1, keepdims=True), p2 / p2.sum(1, keepdims=True)
        np.testing.assert_allclose(probs, index[:, 2:] * p1 + (1 - index[:, 2:]) * p2, rtol=1e-6)


def test_actions_are_drawn_by_the_mixture_with_the_probability_that_is_returned():
    agent = agent_of((3, 2))
    obs, mask = (
        np.tile(np.ones(5, np.float32), (40_000, 1)),
        np.tile([True, True, False, True, True], (40_000, 1)),
    )
    index = np.tile(np.array([4.0, 0.5, 0.3], np.float32), (40_000, 1))
    action, _, prob = fast.Acting(agent)(obs, mask, index)
    for pair in {tuple(row) for row in action.tolist()}:
        rows = (action == pair).all(1)
        assert rows.mean() == pytest.approx(prob[rows][0], abs=0.01)
        assert np.ptp(prob[rows]) < 1e-6


def test_acting_with_numpy_equals_acting_with_torch():
    agent, rng = agent_of(), np.random.default_rng(0)
    obs, mask = rng.normal(size=(50, 5)).astype(np.float32), masks_of([3, 2, 4], 50, rng)
    index = np.stack([rng.uniform(0, 9, 50), rng.uniform(0, 9, 50), rng.random(50)], 1).astype(
        np.float32
    )
    acting = fast.Acting(agent)
    for seed in range(10):
        outs = []
        for act in (acting, acting.act_with_torch):
            torch.manual_seed(seed)
            outs.append(act(obs, mask, index))
        np.testing.assert_array_equal(outs[0][0], outs[1][0])
        np.testing.assert_allclose(outs[0][2], outs[1][2], rtol=1e-4)
    assert acting.enabled, "numpy acts"


# Ratios


def spied(monkeypatch, **settings):
    """Train, and return the batches, the sequences that they were made from, the agent, and its state by version."""
    seen = SimpleNamespace(batches=[], sequences=[], agent=None, agents={})
    make_batch, decide, build = lbc.make_batch, lbc.Rollout.decide, lbc.Agent

    def built(*args):
        seen.agent = build(*args)
        return seen.agent

    def decided(rollout, slots, actions, mu_prob, version):
        if version not in seen.agents:
            seen.agents[version] = {name: x.clone() for name, x in seen.agent.state_dict().items()}
        decide(rollout, slots, actions, mu_prob, version)

    def made(sequences, *rest):
        seen.batches.append(make_batch(sequences, *rest))
        seen.sequences.append(sequences)
        return seen.batches[-1]

    with monkeypatch.context() as patch:
        patch.setattr(lbc, "Agent", built)
        patch.setattr(lbc.Rollout, "decide", decided)
        patch.setattr(lbc, "make_batch", made)
        train(**settings)
    return seen


@torch.no_grad()
def ratios(agent, mb):
    """Return the ratios pi / mu of the actions in the valid rows."""
    _, advantages = agent(mb.obs, mb.timestep)
    ratio = 1 / mb.mu_prob
    for i, probs in enumerate(agent.mixture(advantages[:, :, :-1], mb.index, mb.mask)):
        ratio = ratio * probs.gather(2, mb.action[..., i : i + 1]).squeeze(2)
    return ratio[mb.valid > 0]


WAYS = {
    "branches, masks": {},
    "bins": dict(env_id="parity_env:Parity-v0", bins=5),
    "transformer": MEMORY,
    "window": dict(bandit="window", env_id="CartPole-v1"),
    "mixed periods": dict(env_id="MixedDiscrete", max_agents=8, num_envs=8),
    "mixed periods, transformer": dict(env_id="MixedDiscrete", max_agents=8, num_envs=8, **MEMORY),
}


@pytest.mark.parametrize("way", WAYS)
def test_with_unchanged_weights_every_ratio_is_1(way, monkeypatch):
    """New and replayed rows, over terminations and truncations, with agents that decide at their own pace."""
    seen = spied(monkeypatch, **(UNCHANGED | WAYS[way]))
    assert len(seen.batches) > 10
    for mb in seen.batches:
        np.testing.assert_allclose(ratios(seen.agent, mb), 1, rtol=2e-4)
    assert all(mb.valid.mean() > 0.5 for mb in seen.batches)
    assert len(set(seen.batches[-1].index[..., 0].flatten().tolist())) > 2


@pytest.mark.parametrize("more", [{}, MEMORY])
def test_mu_prob_is_that_of_the_version_that_acted_with_its_statistics(monkeypatch, more):
    seen = spied(monkeypatch, learning_rate=1e-2, **more)
    assert len(seen.agents) > 10, "it learned in between"
    changed = 0
    for rows in seen.sequences[-6:]:
        for version in set(rows["version"].ravel().tolist()):
            seen.agent.load_state_dict(seen.agents[version])
            mb = lbc.make_batch(rows, seen.agent.memory, "cpu")
            its = torch.as_tensor(rows["version"][:, seen.agent.memory : -1] == version)
            mb = mb._replace(valid=mb.valid * its)
            np.testing.assert_allclose(ratios(seen.agent, mb), 1, rtol=2e-4)
            others = ratios(seen.agent, mb._replace(valid=1.0 * ~its))
            changed += bool(len(others)) and (others - 1).abs().max().item() > 1e-3
    assert changed > 3, "another version has other probabilities"


# Rows


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("memory", [{}, MEMORY])
def test_rows_are_the_transitions_of_each_agent(monkeypatch, crashes, memory):
    """Agents of mixed periods that end, vanish and come back, and a player that crashes: a valid row has the
    observation, action and reward of its agent, the next row has the next observation, and timesteps count from the
    start of the episode."""
    record = watch(lbc, monkeypatch, crash_at=60 if crashes else None)
    settings = dict(
        env_id="MixedDiscrete",
        max_agents=12,
        num_envs=8,
        batch_size=12,
        total_timesteps=900,
        **memory,
    )
    seen = spied(monkeypatch, **(UNCHANGED | settings))
    known = {}
    for episode in trajectories(record):
        for timestep, (obs, action, reward, next_obs, terminated) in enumerate(episode):
            known.setdefault(obs.tobytes(), []).append(
                (timestep, action.tolist(), reward, next_obs, terminated)
            )
    assert any("restarted" in out[-1] for _, out in record[1:]) == crashes
    rows, invalid = np.concatenate([x[:12] for x in seen.sequences[::2]]), 0
    for sequence in rows:
        for row, after in zip(sequence, sequence[1:], strict=False):
            if not row["valid"]:
                invalid += bool(row["timestep"])
                continue
            found = [x for x in known[row["obs"].tobytes()] if x[1] == row["action"].tolist()]
            found = [
                x for x in found if abs(x[2] - row["reward"]) < 1e-5 and x[4] == row["terminated"]
            ]
            assert found and row["timestep"] in [x[0] for x in found]
            if not row["terminated"]:
                assert (
                    any(np.array_equal(x[3], after["obs"]) for x in found)
                    and after["timestep"] == row["timestep"] + 1
                )
            else:
                assert after["timestep"] == 0
    assert invalid > 2, "episodes were cut"


def test_a_truncated_episode_bootstraps_from_its_final_observation():
    """Episodes of one step with reward 1 and a time limit: the value is 1 / (1 - gamma), times the scale. If a time
    limit counted as a termination, it would be 1, times the scale."""
    more = dict(
        env_id="parity_env:OneStep-v0", bins=2, gamma_1=0.5, gamma_2=0.8, total_timesteps=2400
    )
    folder = train(**more, norm_obs=False, learning_rate=2e-2, reward_scale=0.5, bandit="fixed")
    agent, _ = saved(lbc, folder)
    with torch.no_grad():
        values = agent(torch.ones(1, 1, 1), None)[0].flatten()
    np.testing.assert_allclose(values, [1.0, 2.5], rtol=0.05)


@pytest.mark.parametrize("crosses", ["terminated", "cut"])
def test_nothing_passes_the_end_of_an_episode(crosses):
    """Rewards and observations after an end do not change the targets before it, and attention does not pass it in
    either direction."""
    agent = agent_of((3,), **MEMORY).double()
    mb, _ = batch_of((3,), n=2, length=7 + agent.memory)
    mb = lbc.Batch(*(x if i < 2 else x[:, agent.memory :] for i, x in enumerate(mb)))
    end = 3  # the last row of its episode, among the rows to learn from
    terminated, valid = torch.zeros_like(mb.reward), torch.ones_like(mb.reward)
    if crosses == "terminated":
        terminated[:, end] = 1
        first = end + 1
    else:
        valid[:, end + 1] = 0  # its final observation
        first = end + 2
    timestep = mb.timestep.clone()
    timestep[:, agent.memory + first :] -= agent.memory + first
    mb = mb._replace(terminated=terminated, valid=valid, timestep=timestep)

    def targets(mb):
        values, advantages = agent(mb.obs, mb.timestep)
        q = advantages[0, :, :-1].sum(-1)
        discounts = 0.9 * (1 - mb.terminated)
        vs, adv = lbc.vtrace(mb.reward, values[0], discounts, mb.valid, mb.valid)
        return values, vs, adv, lbc.retrace(mb.reward, values[0], q, discounts, mb.valid)

    with torch.no_grad():
        before = targets(mb)
        later, at = mb._replace(obs=mb.obs.clone(), reward=mb.reward.clone()), agent.memory + first
        later.obs[:, at:] += 1
        later.reward[:, first:] += 1
        after = targets(later)
        for x, y in zip(before[1:], after[1:], strict=True):
            np.testing.assert_allclose(x[:, : end + 1], y[:, : end + 1], atol=1e-12)
            assert not np.allclose(x[:, first:], y[:, first:], atol=1e-3)
        earlier = mb._replace(obs=mb.obs.clone())
        earlier.obs[:, :at] += 1
        np.testing.assert_allclose(
            targets(earlier)[0][:, :, first:], before[0][:, :, first:], atol=1e-12
        )
        one = mb._replace(obs=mb.obs.clone())
        one.obs[:, agent.memory] += 1  # within its episode it is seen by later rows only
        moved = (targets(one)[0] - before[0]).abs().amax((0, 1)) > 1e-9
        assert moved.tolist() == [k < first for k in range(len(moved))]


def test_a_window_is_all_that_a_row_sees():
    """A row sees `memory` earlier observations wherever it is in a sequence, so acting and learning see the same."""
    agent = agent_of((3,), **MEMORY)
    assert agent.memory == 6
    obs, timestep = torch.randn(1, 20, 5), torch.arange(20)[None] + 50
    with torch.no_grad():
        whole = agent(obs, timestep)[1][:, 0]
        for t in range(6, 20):
            window = slice(t - 6, t + 1)
            alone = agent(obs[:, window], timestep[:, window])[1][:, 0, 0]
            np.testing.assert_allclose(alone, whole[:, t - 6], atol=1e-5)


# Bandits


class Numbered(lbc.FixedBandit):
    """Draws have k1 = 1, 2, 3..."""

    def __init__(self, args):
        super().__init__(args)
        self.draws = 0

    def draw(self):
        self.draws += 1
        return np.array([self.draws, 0.0, 0.5])


def test_the_bandit_learns_from_index_and_return_of_each_episode(monkeypatch):
    monkeypatch.setitem(lbc.BANDITS, "gdi", Numbered)
    seen = spied(monkeypatch, **UNCHANGED)
    folder = sorted(Path("runs").iterdir())[-1]
    history = checkpoints.load(folder, lbc.__file__)[1]["kept"]["bandit"]["history"].numpy()
    episodes = {}
    for rows in np.concatenate([x[:3] for x in seen.sequences[::2]])[:, :-1].reshape(-1):
        if rows["valid"]:
            episodes.setdefault(int(rows["index"][0]), []).append(rows.copy())
    assert len(history) > 20 and len(set(history[:, 1])) == len(history), (
        "each episode has its own index"
    )
    matched = 0
    for _, number, _, _, episodic_return in history:
        rows = episodes.get(int(number))  # the last ones are not in a complete sequence yet
        if rows and rows[-1]["terminated"] and rows[0]["timestep"] == 0:
            assert sum(row["reward"] for row in rows) == pytest.approx(episodic_return, abs=1e-4)
            assert [row["timestep"] for row in rows] == list(range(len(rows)))
            matched += 1
    assert matched > 20


def bump(t, arms, rng):
    return np.exp(-(((arms - (0.1 + 0.8 * t / 1000)) / 0.15) ** 2))


def redrawn(t, arms, rng):
    return np.random.default_rng([rng, t // 500]).random(len(arms))


def growing(t, arms, rng):
    return (1 + t / 50) * np.exp(-(((arms - 0.7) / 0.2) ** 2))


def regret(bandit, world, seed, pulls=1000):
    """Return the regret per pull, relative to the range of returns, of 20 arms along k1 with 10 % noise."""
    np.random.seed(seed)
    rng, arms, lost = np.random.default_rng(seed), (np.arange(20) + 0.5) / 20, 0.0
    bandit = bandit(lbc.Args())
    if isinstance(bandit, lbc.WindowBandit):
        bandit.arms = np.stack([arms, np.full(20, 0.5), np.full(20, 0.5)], 1)
    for t in range(pulls):
        means = world(t, arms, seed)
        index = bandit.draw()
        arm = min(19, int(bandit.to_point(index)[0] * 20))
        scale = np.ptp(means)
        lost += (means.max() - means[arm]) / scale
        bandit.update(index, means[arm] + 0.1 * scale * rng.normal(), t)
    return lost / pulls


# Measured, mean of seeds 1 to 6, relative to random: gdi 0.41, 0.72, 0.36; window 0.27, 0.18, 0.23
BOUNDS = {
    lbc.TileBandits: (0.6, 0.88, 0.55),
    lbc.WindowBandit: (0.45, 0.4, 0.45),
    lbc.RandomBandit: None,
}


@pytest.mark.parametrize("bandit", BOUNDS)
def test_bandits_have_less_regret_than_random_indices(bandit):
    """With a best arm that moves, with arms that are redrawn, and with growing returns. Random indices fail all."""
    for k, world in enumerate((bump, redrawn, growing)):
        chance = np.mean([regret(lbc.RandomBandit, world, seed) for seed in (1, 2)])
        if bandit is lbc.RandomBandit:
            np.random.seed(99)
            ratio = (
                np.mean([regret(lbc.RandomBandit, world, seed, 999) for seed in (1, 2)]) / chance
            )
            assert ratio > max(bounds[k] for bounds in BOUNDS.values() if bounds)
        else:
            assert (
                np.mean([regret(bandit, world, seed) for seed in (1, 2)]) / chance
                < BOUNDS[bandit][k]
            ), world


def test_all_tiles_with_an_index_learn_with_their_rate():
    np.random.seed(0)
    bandit = lbc.TileBandits(lbc.Args())
    index = np.array([3.0, 50.0, 0.5])
    bandit.update(index, 7.0, 1)
    assert (bandit.tile_values == 7).all(), "tiles start at the first return"
    bandit.update(index, 17.0, 2)
    block = [int(math.log(4) / math.log(51) * 20), 19, 10]
    for axis in range(3):
        for number in range(bandit.NUM_BANDITS):
            tile = bandit.tile[axis, number]
            mine = tile == tile[block[axis]]
            values = bandit.block_values()[axis, number]
            np.testing.assert_allclose(values[mine], 7 + 10 * bandit.learning_rate[axis, number, 0])
            np.testing.assert_allclose(values[~mine], 7)
            assert 1 <= mine.sum() <= 4 and bandit.tile_counts[axis, number].sum() == 2
    assert bandit.to_point(bandit.to_index(np.array([0.3, 0.8, 0.1]))) == pytest.approx(
        [0.3, 0.8, 0.1]
    )
    with pytest.raises(AssertionError, match="not in the unit cube"):
        bandit.to_index(np.array([10.0, 0.8, 0.1]))
    for _ in range(200):
        k1, k2, e = bandit.draw()
        assert 0 <= k1 <= 50 and 0 <= k2 <= 50 and 0 <= e <= 1


@pytest.mark.parametrize("bandit", lbc.BANDITS.values())
def test_a_restored_bandit_is_the_same(bandit):
    np.random.seed(0)
    first, second = bandit(lbc.Args()), bandit(lbc.Args())
    for t in range(300):
        first.update(first.draw(), float(t % 7), t)
    second.restore(checkpoints.plain(first.state()))
    drawn = []
    for bandit in (first, second):
        np.random.seed(5)
        drawn.append([bandit.draw().tolist() for _ in range(20)] + [bandit.best().tolist()])
        bandit.update(bandit.draw(), 3.0, 301)
    assert drawn[0] == drawn[1] and np.array_equal(first.history[:301], second.history[:301])


def test_a_window_has_the_last_episodes():
    np.random.seed(0)
    bandit = lbc.WindowBandit(lbc.Args(window=50))
    good, other = bandit.to_index(bandit.arms[7]), bandit.to_index(bandit.arms[30])
    for index in (good, other):
        for t in range(60):
            bandit.update(index, 1.0, t)
    counts, _ = bandit.statistics()
    assert counts[30] == 50 and counts.sum() == 50


# Envs


def test_bins_reach_from_the_lowest_to_the_highest():
    env = Binned(SyncEnvs([make_env("Pendulum-v1") for _ in range(2)]), 5, "x")
    sent = []
    env.inner.step = lambda actions: sent.append(actions.copy()) or (None, None, None, None, {})
    assert env.single_action_space.nvec.tolist() == [5]
    env.step(np.array([[0], [4]]))
    env.step(np.array([[2], [3]]))
    np.testing.assert_allclose(np.concatenate(sent)[:, 0], [-2, 2, 0, 1])
    many = Binned(SyncEnvs([make_env("parity_env:Square-v0")]), 3, "x")
    many.inner.step = lambda actions: sent.append(actions.copy()) or (None, None, None, None, {})
    many.step(np.array([[0, 1, 2, 1]]))
    np.testing.assert_allclose(sent[-1], [[-9, 0, 9, 0]])


# Checkpoints, evaluation and export


def flatten(x, path=""):
    """Yield the path and the value of everything in nested dicts, lists and tuples."""
    if isinstance(x, (dict, list, tuple)):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from flatten(value, f"{path}.{key}")
    else:
        yield path, x


def assert_same_state(one, other, script=lbc):
    """Assert that the checkpoints of two runs keep the same, to the byte, and that their curves are equal."""
    first, second = (
        dict(flatten(checkpoints.load(x, script.__file__)[1]["kept"])) for x in (one, other)
    )
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert torch.equal(x, second[name]) if isinstance(x, torch.Tensor) else x == second[name], (
            name
        )
    assert curve(one) == curve(other)


@pytest.mark.parametrize(
    "more", [{}, MEMORY, dict(env_id="parity_env:Parity-v0", bins=3, bandit="window")]
)
def test_resume_equals_uninterrupted(monkeypatch, more):
    """Stopped and resumed within episodes and sequences: weights, replay buffer, bandits and curves, to the byte."""
    more = more | dict(eval_interval=100)
    whole = train(**more)
    with monkeypatch.context() as patch:
        stop_after(patch, lbc, "make_batch", 19)
        part = train(**more)
    assert 0 < checkpoints.load(part, lbc.__file__)[1]["global_step"] < 300
    call(monkeypatch, "--resume", part)
    assert_same_state(whole, part)


def test_no_fast_computes_the_same():
    """Compare the scalars of the first iteration. Later ones amplify rounding."""
    fast_run, plain_run = (
        curve(train(total_timesteps=24, eval_interval=24, fast=x)) for x in (True, False)
    )
    assert (
        fast_run.keys() == plain_run.keys()
        and "losses/policy_loss_2" in fast_run
        and "greedy/mixture" in fast_run
    )
    for name, points in fast_run.items():
        assert [step for step, _ in points] == [step for step, _ in plain_run[name]]
        ours, theirs = ([value for _, value in run[name]] for run in (fast_run, plain_run))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)


def test_exported_policy_equals_the_agent(tmp_path):
    agent, rng = agent_of(), np.random.default_rng(1)
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    agent.best_index.copy_(torch.tensor([[2.0, 30.0, 0.4]]))
    export.export(agent, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    obs, mask = rng.normal(size=(300, 5)).astype(np.float32), masks_of(SPEC["branches"], 300, rng)
    given = {"obs_0": obs[:, :2], "obs_1": obs[:, 2:], "action_masks": mask.astype(np.float32)}
    sampled, best = session.run(["discrete_actions", "deterministic_discrete_actions"], given)
    with torch.no_grad():
        expected = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)[0]
    np.testing.assert_array_equal(best, expected)
    for column, allowed in zip(sampled.astype(int).T, np.split(mask, [3, 5], 1), strict=True):
        assert allowed[np.arange(300), column].all()


@pytest.mark.parametrize(
    ("more", "why"), [(MEMORY, "past observations"), (dict(env_id="Pendulum-v1"), "in bins")]
)
def test_what_unitys_layout_has_no_place_for_is_one_line(more, why, monkeypatch):
    folder = train(**more)
    with pytest.raises(
        SystemExit, match=f"--export: Unity's model format does not support .*{why}"
    ) as caught:
        call(monkeypatch, "--export", folder)
    assert len(str(caught.value).strip().splitlines()) == 1
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 2)


def test_evaluation_is_greedy_at_the_best_index(monkeypatch, capsys):
    """The evaluated policy has the saved statistics and index. Basic is solved in a few seconds."""
    monkeypatch.setattr(
        sys, "argv", ["lbc_discrete.py", "--env-id", "Basic", "--total-timesteps", "16384"]
    )
    lbc.main()
    (folder,) = Path("runs").glob("*")
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 32)
    assert "32 episodes of 7 decisions on average: return 0.93 ± 0.00" in capsys.readouterr().out
    tags = curve(folder)
    assert tags["greedy/mixture"][-1][1] == pytest.approx(0.93)


def test_evaluation_with_memory_sees_the_last_observations_of_the_episode(monkeypatch):
    agent = agent_of((3,), **MEMORY).eval()
    spec, rng, windows = SPEC | {"branches": [3], "start": [0]}, np.random.default_rng(0), []
    record = lambda self, *inputs: windows.append(inputs) or [np.zeros((2, 1))] * 3
    monkeypatch.setattr(fast.Acting, "act_with_torch", record)
    play, begins, ages = lbc.play(agent, spec, 2), np.ones(2, bool), np.zeros(2, int)
    past = [[], []]
    for _ in range(30):
        obs = rng.normal(size=(2, 5)).astype(np.float32)
        for slot in range(2):
            past[slot] = [obs[slot]] if begins[slot] else [*past[slot], obs[slot]]
        play(
            obs,
            {"action_mask": np.ones((2, 3), bool), "ready": np.ones(2, bool)},
            np.arange(2),
            begins,
        )
        seen, _, _, ages = windows[-1]
        for slot in range(2):
            assert ages[slot, -1] == len(past[slot]) - 1
            count = min(7, len(past[slot]))
            np.testing.assert_array_equal(seen[slot, 7 - count :], past[slot][-count:])
        begins = rng.random(2) < 0.15


LINES = [
    ("--env-id parity_env:Unbounded-v0", "has actions without bounds"),
    ("--env-id GridWorld", "use ppo_pixel.py for images"),
    (
        "--fixed-index 1 1 2",
        "--fixed-index (1.0, 1.0, 2.0): epsilon, the last number, must be between 0 and 1",
    ),
    ("--num-envs 64", "--batch-size 32: must hold a new sequence of each of 64 envs"),
    ("--replay-size 8", "--replay-size 8: must be at least --batch-size 32"),
    ("--bins 1", "--bins 1: must be at least 2"),
    (
        "--architecture transformer --num-heads 5",
        "--num-heads 5: must divide the first of --hidden-sizes",
    ),
    ("--architecture transformer --context 1", "--context 1: a transformer needs at least 2"),
    ("--total-timesteps 100", "less than one sequence per env"),
    (
        "--env-id Basic --num-actors 2 --base-port 6000",
        "--base-port 6000: --num-actors launch their own players",
    ),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_bad_input_is_one_line(line, match, monkeypatch):
    """Before any work starts."""
    with pytest.raises(SystemExit, match=".*") as caught:
        call(monkeypatch, *line.split())
    assert match in str(caught.value) and len(str(caught.value).strip().splitlines()) == 1
    assert not Path("runs").exists()


# Actors


def test_rows_of_actors_have_the_probability_of_the_version_that_they_pulled(monkeypatch):
    """With the weights, statistics and context of that version every ratio is 1, and the lag is logged."""
    pushed, push, batches, make_batch = {}, actor_processes.ActorProcesses.push, [], lbc.make_batch

    def spied(self, state):
        pushed[state["version"]] = {name: x.clone() for name, x in state["agent"].items()}
        push(self, state)

    monkeypatch.setattr(actor_processes.ActorProcesses, "push", spied)
    monkeypatch.setattr(
        lbc, "make_batch", lambda rows, *rest: batches.append(rows) or make_batch(rows, *rest)
    )
    folder = train(num_actors=2, num_envs=2, learning_rate=1e-2, total_timesteps=700, **MEMORY)
    state = checkpoints.load(folder, lbc.__file__)[1]
    agent, versions = lbc.Agent(state["spec"], lbc.Args(**state["args"])), set()
    for rows in batches[-8:]:
        for version in set(
            rows["version"][:, agent.memory : -1][rows["valid"][:, agent.memory : -1] > 0].tolist()
        ):
            agent.load_state_dict(pushed[version])
            mb = make_batch(rows, agent.memory, "cpu")
            its = torch.as_tensor(rows["version"][:, agent.memory : -1] == version)
            np.testing.assert_allclose(
                ratios(agent, mb._replace(valid=mb.valid * its)), 1, rtol=2e-4
            )
            versions.add(version)
    assert len(versions) > 3
    lags = [lag for _, lag in curve(folder)["charts/lag"]]
    assert lags[0] == 0 and 0 < max(lags) < 40
    history = state["kept"]["bandit"]["history"]
    assert len(history) > 20 and len(set(history[:, 1].tolist())) == len(history), (
        "the bandit has their episodes"
    )
    assert not (folder / actor_processes.WEIGHTS).exists() and not children()


def children():
    me = f"\n{os.getpid()}"
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"actor_processes.py") for word in words) and fields[0] != "Z":
            found.append((int(status.parent.name), int(fields[1])))
    return [pid for pid, parent in found if f"\n{parent}" == me]


def test_an_actor_that_dies_is_started_again(monkeypatch, capsys):
    killed, receive = [], actor_processes.ActorProcesses.receive

    def spied(self):
        if len(killed) < 2 and self.failures_in_a_row == 0 and self.processes:
            process = self.processes[len(killed)][0]
            process.kill()
            process.wait()
            killed.append(process.pid)
        return receive(self)

    monkeypatch.setattr(actor_processes.ActorProcesses, "receive", spied)
    folder = train(num_actors=2, num_envs=2)
    out = capsys.readouterr().out
    assert out.count("is started again") == 2 and "Actor 0 ended with exit code -9" in out
    assert checkpoints.load(folder, lbc.__file__)[1]["global_step"] >= 360 and not children()


def test_actors_that_fail_at_once_are_one_line(monkeypatch):
    """After a few restarts the run ends with the error message of the actor."""
    monkeypatch.setenv("PARITY_BREAKS", "1")
    script = copy_of(
        "lbc_discrete.py",
        ("BANDITS = {", 'if __name__ == "script":\n    raise OSError("no luck")\nBANDITS = {'),
    )
    with pytest.raises(EngineError, match="exit code 1, 1 restarts in a row: OSError: no luck"):
        script.train(script.Args(**SMALL | dict(num_actors=1, num_envs=2, max_restarts=1)))
    assert not children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_actor_outlives_the_learner(number, tmp_path):
    """Ctrl-C saves a checkpoint and ends the actors. They also end when the learner is killed."""
    line = "--env-id CartPole-v1 --num-actors 2 --num-envs 2 --total-timesteps 1000000 --eval-interval 0 --no-compile"
    command = [sys.executable, lbc.__file__, *line.split()]
    learner = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        for line in learner.stdout:
            if " steps " in line and not line.strip().startswith("20 "):
                break
        mine = [
            int(x)
            for x in Path(f"/proc/{learner.pid}/task/{learner.pid}/children").read_text().split()
        ]
        assert len(mine) == 2
        learner.send_signal(number)
        out = learner.stdout.read()
        assert learner.wait(300) == (0 if number == signal.SIGINT else -9)
        assert number == signal.SIGKILL or f"Resume with: python {lbc.__file__} --resume" in out
        deadline = time.time() + 60
        while any(is_running(pid) for pid in mine) and time.time() < deadline:
            time.sleep(0.05)
        assert not any(is_running(pid) for pid in mine)
    finally:
        learner.kill()
        learner.wait()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Plots, and the comparison of bandits


def benchmark(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(name)


@pytest.mark.parametrize("bandit", ["gdi", "window"])
def test_the_plot_of_a_run(bandit, monkeypatch, capsys):
    """It shows the losses by name, greedy returns, the bandits' estimates and the index of each episode."""
    plot, folder = benchmark("plot_bandit", monkeypatch), train(bandit=bandit, eval_interval=200)
    monkeypatch.setattr(sys, "argv", ["plot_bandit.py", str(folder)])
    plot.main()
    picture = imageio.imread(folder / "bandit.png")
    assert picture.std() > 10 and "bandit.png" in capsys.readouterr().out
    scalars, state = plot.read(folder)
    figure = plot.draw(scalars, state, "x")
    drawn = {axes.get_title(): axes for axes in figure.axes}
    assert len(drawn["V losses"].lines) == len(drawn["all three, weighted"].lines) == 3
    assert [line.get_label() for line in drawn["greedy return"].lines] == [
        "network 1",
        "network 2",
        "mixture",
    ]
    points = drawn["epsilon of each episode, coloured by its return"].collections[0].get_offsets()
    history = state["kept"]["bandit"]["history"]
    np.testing.assert_allclose(points, history[:, [0, 3]])
    if bandit == "gdi":
        mean = drawn["the bandits' estimate by k2"].lines[-1].get_ydata()
        best = lbc.TileBandits(lbc.Args())
        best.restore(state["kept"]["bandit"])
        np.testing.assert_allclose(mean, best.block_values()[1].mean(0))
        assert state["kept"]["agent"]["best_index"][0].tolist() == pytest.approx(
            best.best().tolist(), rel=1e-5
        )


def test_the_comparison_of_bandits_follows_its_protocol(monkeypatch, capsys):
    """Indices are chosen by the other seeds only. Differences count from two standard errors on."""
    q = benchmark("bandit_question", monkeypatch)
    have = {}
    for env, scale in q.CELLS:
        low, high = q.ENDS[env]
        worth = lambda x: (low + x * (high - low),) * 2
        for k, index in enumerate(q.INDICES):
            good = 1 if scale == 0.1 else 2  # of the three
            have |= {
                (env, scale, "fixed", *index, seed): worth(0.6 if k == good else 0.4)
                for seed in q.OTHERS
            }
            have |= {
                (env, scale, "fixed", *index, seed): worth(0.1 * k + 0.01 * seed)
                for seed in q.SEEDS
            }
        have |= {(env, scale, "gdi", *q.NONE, seed): worth(0.5 + 0.02 * seed) for seed in q.SEEDS}
        have |= {
            (env, scale, "random", *q.NONE, seed): worth(0.5 + 0.1 * (-1) ** seed)
            for seed in q.SEEDS
        }
    each, one = q.chosen(have)
    assert {each[env, 0.1] for env in q.STEPS} == {q.INDICES[1]} and one == q.INDICES[2]
    q.table(have)
    out = capsys.readouterr().out
    assert out.count("bandit - fixed: +0.363, standard error 0.007: above") == 2
    assert out.count("bandit - random: +0.080, standard error 0.051: neither") == 2


# A changed copy


ACTIVATION = '        layers.append({"tanh": nn.Tanh, "silu": nn.SiLU}[activation]())\n'
LAYERS = {
    "LayerNorm": "        layers.append(nn.LayerNorm(size_out))\n" + ACTIVATION,
    "Mish": "        layers.append(nn.Mish())\n",
    "Dropout": ACTIVATION + "        layers.append(nn.Dropout(0.5))\n",
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_changed_network_acts_as_it_learns(layer):
    script = copy_of("lbc_discrete.py", (ACTIVATION, LAYERS[layer]))
    script.train(script.Args(**SMALL))
    (folder,) = Path("runs").iterdir()
    agent, _ = saved(script, folder)
    rng = np.random.default_rng(0)
    obs, mask = 3 * rng.standard_normal((50, 3)).astype(np.float32), masks_of([3, 2], 50, rng)
    acting, random_state = fast.Acting(agent), torch.get_rng_state()
    actions = acting(obs, mask)[0]
    torch.set_rng_state(random_state)
    assert acting.enabled == (layer != "Mish")
    with torch.no_grad():
        np.testing.assert_array_equal(
            actions, agent.act(torch.as_tensor(obs), torch.as_tensor(mask))[0]
        )


@needs_compiler
def test_a_changed_loss_with_a_schedule_and_a_metric_is_the_same_compiled():
    """An entropy bonus that is annealed and logged takes effect, compiled or not."""
    field = "    max_grad_norm: float = 1.0\n"
    bonus = '    ent_coef: float = 0.0\n    """the weight of the entropy bonus"""\n'
    line, loop = "    num_valid = mb.valid.sum().clamp(min=1)\n", "            # Annealing\n"
    entropy = "    entropy = -(pi_prob.clamp(min=1e-8).log() * mb.valid).sum() / num_valid\n"
    out = "    return loss.sum(), metrics\n"
    logged = '    metrics["losses/entropy"] = entropy\n    return loss.sum() - args.ent_coef * entropy, metrics\n'
    schedule = "            args.ent_coef = 0.5 * (1 - run.global_step / run.total)\n"
    plain = copy_of("lbc_discrete.py")
    script = copy_of(
        "lbc_discrete.py",
        (field, bonus + field),
        (line, line + entropy),
        (out, logged),
        (loop, schedule + loop),
    )
    agents, folders = [], []
    for way, compile_ in ((plain, False), (script, False), (script, True)):
        before = set(Path("runs").glob("*"))
        one = {"exp_name": f"run{len(before)}", "env_id": "CartPole-v1", "hidden_sizes": (8,)}
        way.train(way.Args(**SMALL | one, compile=compile_))
        (folder,) = set(Path("runs").glob("*")) - before
        agents.append(saved(way, folder)[0].state_dict())
        folders.append(folder)
    constant, eager, compiled = agents
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-4, err_msg=key)
    assert not torch.allclose(
        constant["networks.0.body.0.weight"], eager["networks.0.body.0.weight"], atol=1e-4
    )
    ours, theirs = (dict(curve(folder)["losses/entropy"]) for folder in folders[1:])
    assert ours.keys() == theirs.keys() and all(
        x == pytest.approx(theirs[t], abs=1e-3) for t, x in ours.items()
    )


def test_a_parameter_that_is_in_no_network_is_an_error_that_names_it():
    line = "        ends = np.cumsum"
    script = copy_of(
        "lbc_discrete.py", (line, "        self.shared = nn.Parameter(torch.zeros(3))\n" + line)
    )
    with pytest.raises(
        ValueError, match="parameter shared is not in any optimizer and would never be updated"
    ):
        script.train(script.Args(**SMALL))


BANDITS = "\n\nBANDITS = {"
DECAYING = """

class DecayingBandit(RandomBandit):
    def __init__(self, args):
        super().__init__(args)
        self.eps = 1.0
        self.counts = {"updates": 0, "recent": [(1, 2.0)], "sums": [np.zeros(2), np.ones(2)]}
        self.name = "decaying"
        self.last = None
        self.scale = np.float32(1)

    def draw(self):
        return super().draw() if np.random.rand() < self.eps else self.best()

    def update(self, index, episodic_return, global_step):
        self.eps *= 0.99
        self.scale *= np.float32(0.9)
        self.counts["updates"] += 1
        self.counts["recent"].append((global_step, episodic_return))
        self.counts["sums"][0] += episodic_return
        self.last = index
        super().update(index, episodic_return, global_step)


BANDITS = {"decaying": DecayingBandit, """
CHOICES = (
    '"gdi", "window", "random", "fixed"] = "gdi"',
    '"gdi", "window", "random", "fixed", "decaying"] = "gdi"',
)


def test_attributes_of_a_bandit_are_kept(monkeypatch):
    """Numbers, arrays, lists and dicts of a changed bandit: a resumed run equals an uninterrupted one, to the byte."""
    script = copy_of("lbc_discrete.py", CHOICES, (BANDITS, DECAYING))
    settings = SMALL | dict(bandit="decaying")
    script.train(script.Args(**settings | dict(exp_name="whole")))
    with monkeypatch.context() as patch:
        stop_after(patch, script, "make_batch", 19)
        script.train(script.Args(**settings | dict(exp_name="part")))
    whole, part = (next(Path("runs").glob(f"*{name}*")) for name in ("whole", "part"))
    stopped = checkpoints.load(part, script.__file__)[1]["kept"]["bandit"]
    assert (
        stopped["eps"] == pytest.approx(0.99 ** stopped["counts"]["updates"])
        and stopped["num_episodes"] > 5
    )
    call_script(script, monkeypatch, "--resume", part)
    assert_same_state(whole, part, script)
    assert checkpoints.load(part, script.__file__)[1]["kept"]["bandit"]["eps"] < stopped["eps"]


def test_restored_attributes_have_their_types():
    script = copy_of("lbc_discrete.py", CHOICES, (BANDITS, DECAYING))
    first, second = (script.BANDITS["decaying"](script.Args()) for _ in range(2))
    for t in range(3):
        first.update(first.draw(), float(t), t)
    torch.save(checkpoints.plain(first.state()), "state.pt")
    second.restore(torch.load("state.pt", weights_only=True))
    assert (second.eps, second.name, second.counts["recent"]) == (
        first.eps,
        "decaying",
        first.counts["recent"],
    )
    assert type(second.scale) is np.float32 and second.scale == first.scale
    assert isinstance(second.counts["sums"], list) and second.counts["sums"][0].tolist() == [3, 3]
    np.testing.assert_array_equal(second.last, first.last)
    first.last[:] = 0
    first.counts["sums"][0] += 1
    assert second.last.any() and second.counts["sums"][0].tolist() == [3, 3], "they are copies"


@pytest.mark.parametrize("num_actors", [0, 1])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("np.random.default_rng()", "Generator"),
        ("[{'a': nn.Linear(1, 1)}]", "Linear"),
        ("np.array(['x'])", "array of <U1"),
        ("lambda: 0", "function"),
    ],
)
def test_an_attribute_that_cannot_be_kept_is_one_line_that_names_it(value, kind, num_actors):
    line = "        self.num_episodes = 0\n"
    script = copy_of("lbc_discrete.py", (line, f"{line}        self.mine = {value}\n"))
    with pytest.raises(
        ValueError, match=f"^TileBandits.mine contains a {kind}, which a checkpoint can't keep"
    ) as caught:
        script.train(script.Args(**SMALL | dict(num_actors=num_actors)))
    assert len(str(caught.value).splitlines()) == 1 and not children()


def test_actors_receive_the_attributes_of_the_bandit():
    """An actor process draws with the eps that the learner's bandit has, and not with the first one."""
    drawn = """
    def draw(self):
        return np.array([self.eps, 1.0, 0.5])

    def update("""
    bandit = DECAYING.replace("\n    def update(", drawn, 1)
    bandit = bandit.replace(
        "self.eps *= 0.99", "self.eps *= 0.99 if global_step else 1.0"
    )  # only in the learner
    script = copy_of("lbc_discrete.py", CHOICES, (BANDITS, bandit))
    settings = SMALL | dict(bandit="decaying", num_actors=1, num_envs=2, total_timesteps=600)
    script.train(script.Args(**settings))
    (folder,) = Path("runs").iterdir()
    bandit = checkpoints.load(folder, script.__file__)[1]["kept"]["bandit"]
    k1 = bandit["history"][:, 1].numpy()
    assert k1[0] == 1 and k1[-1] < 0.9 and bandit["eps"] <= k1[-1]
    steps = np.log(k1) / np.log(0.99)
    np.testing.assert_allclose(steps, steps.round(), atol=1e-6)
