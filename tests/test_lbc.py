"""lbc_discrete.py: traces and losses against their formulas, mixtures, rows, memory, bandits, a run's life."""

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
from conftest import ROOT, call, curve, needs_compiler, stop_after, train, trajectories, watch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_copies import copy_of, saved
from test_discrete import masks_of

import actors
import checkpoints
import fast
import lbc_discrete as lbc
import policies
from envs import EngineError
from envs.bins import Binned
from envs.vector import SyncEnvs, make_env

SMALL = dict(num_envs=3, sequence_length=8, batch_size=8, replay_size=20, hidden_sizes=(8, 8), eval_interval=0)
SMALL |= dict(env_id="parity_env:MaskedBranches-v0", total_timesteps=360, exp_name="test")
SPEC = {"obs_dim": 5, "branches": [3, 2, 4], "start": [0, 1, 0], "sensors": [2, 3], "bins": 0}
MEMORY = dict(architecture="transformer", context=4, num_heads=2)
STILL = dict(learning_rate=1e-30, norm_obs=False)  # float32 weights stay as they are

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, lbc, SMALL), partial(call, lbc)


# Traces


def random_sequences(seed, n=3, length=12):
    """As loss() has them: with ends, dead rows after some, and ratios on both sides of 1."""
    rng = np.random.default_rng(seed)
    terminated, alive = rng.random((n, length)) < 0.2, rng.random((n, length)) < 0.8
    terminated &= alive
    data = dict(rewards=rng.normal(size=(n, length)), values=rng.normal(size=(n, length + 1)))
    data |= dict(q=rng.normal(size=(n, length)), ratio=np.exp(rng.normal(size=(n, length))))
    return data | dict(discounts=0.9 * (1.0 - terminated), alive=alive.astype(float), terminated=terminated)


def double_loops(rewards, values, q, ratio, discounts, alive, terminated, rho_bar=1.05, c_bar=1.05, lam=0.7):
    """Sums of products as they are defined, row by row. A dead row is an end: nothing looks past its value."""
    n, length = rewards.shape
    vs, adv, qs = values[:, :-1].copy(), np.zeros((n, length)), q.copy()
    rho, c = np.minimum(ratio, rho_bar), lam * np.minimum(ratio, c_bar)
    for i in range(n):
        for t in range(length):
            if not alive[i, t]:
                continue
            v_weight = q_weight = 1.0
            for j in range(t, length):
                if not alive[i, j]:
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
    adv = alive * rho * (rewards + discounts * after - values[:, :-1])
    return vs, adv, qs


@pytest.mark.parametrize("seed", range(20))
def test_vtrace_and_retrace_equal_double_loops(seed):
    data = random_sequences(seed)
    rewards, values, q, ratio, discounts, alive = (
        torch.as_tensor(data[name]) for name in ("rewards", "values", "q", "ratio", "discounts", "alive")
    )
    rho, c = alive * ratio.clamp(max=1.05), alive * 0.7 * ratio.clamp(max=1.05)
    vs, adv = lbc.vtrace(rewards, values, discounts, rho, c)
    qs = lbc.retrace(rewards, values, q, discounts, c)
    expected = double_loops(**data)
    lives = data["alive"] > 0
    for ours, theirs in zip((vs, adv, qs), expected, strict=True):
        np.testing.assert_allclose(ours.numpy()[lives], theirs[lives], atol=1e-12)
    np.testing.assert_allclose(vs.numpy()[~lives], data["values"][:, :-1][~lives], atol=0)


def test_on_policy_vs_is_the_n_step_return_and_qs_its_closed_form():
    rng, gamma, length = np.random.default_rng(0), 0.9, 10
    r, v, q = rng.normal(size=length), rng.normal(size=length + 1), rng.normal(size=length)
    one = torch.ones(1, length, dtype=torch.float64)
    rewards, values, qs = (torch.as_tensor(x)[None] for x in (r, v, q))
    vs, adv = lbc.vtrace(rewards, values, gamma * one, one, one)
    targets = lbc.retrace(rewards, values, qs, gamma * one, one)
    for t in range(length):
        n_step = sum(gamma ** (j - t) * r[j] for j in range(t, length)) + gamma ** (length - t) * v[-1]
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
            np.array([rng.choice(np.flatnonzero(row[a:b])) for row in mask.reshape(n * length, -1)]).reshape(n, length)
            for a, b in zip(ends, ends[1:], strict=False)
        ],
        2,
    )
    data = random_sequences(seed, n, length)
    index = np.stack([rng.uniform(0, 5, (n, length)), rng.uniform(0, 5, (n, length)), rng.random((n, length))], 2)
    prob, obs = rng.uniform(0.05, 1, (n, length)), rng.normal(size=(n, length + 1, 5))
    age = np.tile(np.arange(length + 1), (n, 1))
    arrays = (obs, age, mask, index, action, prob, data["rewards"], data["terminated"] * 1.0, data["alive"])
    return lbc.Batch(*map(torch.as_tensor, arrays)), data


@pytest.mark.parametrize("branches", [(4,), (3, 2)])
@pytest.mark.parametrize("which", ["vf_coef", "qf_coef", "pg_coef"])
def test_the_gradient_of_each_loss_is_its_formula(which, branches):
    """By V and A themselves, of both networks: three losses for each. The formulas are in numpy, by hand."""
    mb, data = batch_of(branches)
    n, length = data["rewards"].shape
    rng = np.random.default_rng(1)
    values = torch.as_tensor(rng.normal(size=(2, n, length + 1))).requires_grad_()
    advantages = torch.as_tensor(rng.normal(size=(2, n, length + 1, sum(branches)))).requires_grad_()
    real = agent_of(branches)

    class Leaves:
        branches, sharpened = real.branches, real.sharpened

        def __call__(self, obs, age):
            return values, advantages

    coefs = dict(vf_coef=0.0, qf_coef=0.0, pg_coef=0.0) | {which: 1.3}
    args = lbc.Args(gamma_1=0.9, gamma_2=0.8, shaping_2="root", reward_scale=0.5, trace_lambda=0.7, **coefs)
    value, metrics = lbc.loss(Leaves(), mb, args)
    value.backward()

    v, a = values.detach().numpy(), advantages.detach().numpy()[:, :, :-1]
    mask, action, index = mb.mask.numpy(), mb.action.numpy(), mb.index.numpy()
    e, count = index[..., 2:], data["alive"].sum()
    total = 0
    for i, (gamma, how) in enumerate([(0.9, "none"), (0.8, "root")]):
        r = data["rewards"]
        shaped = r if how == "none" else np.sign(r) * ((1 + np.abs(r)) ** 0.25 - 1) + 0.001 * r
        joint, mean_a, chosen_a, parts = np.ones((n, length)), np.zeros((n, length)), np.zeros((n, length)), []
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
        given = data | {"rewards": 0.5 * shaped, "values": v[i], "q": q, "ratio": joint / mb.prob.numpy()}
        vs, adv, qs = double_loops(**(given | {"discounts": gamma * (1.0 - data["terminated"])}))
        weight = data["alive"] / count
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
        assert all(points[0][t] == pytest.approx(points[1][t] + points[2][t], rel=1e-4, abs=1e-6) for t in points[0])


def test_shapings_are_gdis():
    r = torch.tensor([-3.0, 0.0, 15.0])
    np.testing.assert_allclose(lbc.shape(r, "log"), [-math.log(4), 0, 2 * math.log(16)], rtol=1e-6)
    np.testing.assert_allclose(lbc.shape(r, "root"), [-(4**0.25 - 1) - 0.003, 0, 1.015], rtol=1e-5)
    assert lbc.shape(r, "none") is r


# Mixtures


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.integers(0, 1000))
def test_the_mixture_is_a_distribution_and_the_expected_q_is_v(branches, seed):
    """Over all joint actions that the mask allows: probabilities add up to 1, Q to V; the rest is never drawn."""
    agent, rng = agent_of(branches, seed).double(), np.random.default_rng(seed)
    mask = torch.as_tensor(masks_of(branches, 1, rng))
    obs, index = torch.randn(1, 5).double(), torch.tensor([[3.0, 20.0, rng.random()]]).double()
    total = expected = 0.0
    with torch.no_grad():
        values, advantages = agent(obs[:, None], None)
        policies_ = agent.sharpened(advantages[:, :, 0], index, mask)
        e = index[0, 2]
        for action in np.ndindex(*branches):
            allowed = all(mask[0, branch][a] for branch, a in zip(agent.branches, action, strict=True))
            prob, q = 1.0, values[:, 0, 0].clone()
            for branch, a, p1, p2 in zip(agent.branches, action, *policies_, strict=True):
                pi = e * p1[0] + (1 - e) * p2[0]
                prob = prob * pi[a]
                q += advantages[:, 0, 0, branch][:, a] - (pi * advantages[:, 0, 0, branch]).sum(1)
            assert allowed or prob == 0
            total, expected = total + prob, expected + prob * q
        drawn, _, prob = agent.act(obs.expand(50, -1), mask.expand(50, -1), index)
        assert all(mask[0, branch][a].all() for branch, a in zip(agent.branches, drawn.T, strict=True))
    assert total == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(expected, values[:, 0, 0], atol=1e-8)


def test_actions_are_drawn_by_the_mixture_and_their_probability_is_told():
    agent = agent_of((3, 2))
    obs, mask = np.tile(np.ones(5, np.float32), (40_000, 1)), np.tile([True, True, False, True, True], (40_000, 1))
    index = np.tile(np.array([4.0, 0.5, 0.3], np.float32), (40_000, 1))
    action, _, prob = fast.Acting(agent).checked(obs[:2], mask[:2], index[:2])(obs, mask, index)
    for pair in {tuple(row) for row in action.tolist()}:
        rows = (action == pair).all(1)
        assert rows.mean() == pytest.approx(prob[rows][0, 0], abs=0.01)
        assert np.ptp(prob[rows]) < 1e-6


def test_acting_in_numpy_is_the_module():
    agent, rng = agent_of(), np.random.default_rng(0)
    obs, mask = rng.normal(size=(50, 5)).astype(np.float32), masks_of([3, 2, 4], 50, rng)
    index = np.stack([rng.uniform(0, 9, 50), rng.uniform(0, 9, 50), rng.random(50)], 1).astype(np.float32)
    acting = fast.Acting(agent)
    act = acting.checked(obs, mask, index)
    assert act is acting.fast
    for seed in range(10):
        outs = []
        for way in (act, acting.module):
            torch.manual_seed(seed)
            outs.append(way(obs, mask, index))
        np.testing.assert_array_equal(outs[0][0], outs[1][0])
        np.testing.assert_allclose(outs[0][2], outs[1][2], rtol=1e-4)


# Ratios


def spied(monkeypatch, **settings):
    """Batches of a run, and the agent at each version, by the number of updates."""
    seen = SimpleNamespace(batches=[], agents={}, sequences=[], agent=None)
    make_batch, act, build = lbc.make_batch, lbc.Rollout.act, lbc.Agent

    def built(*args):
        seen.agent = build(*args)
        return seen.agent

    def acted(rollout, how):
        if rollout.version not in seen.agents:
            seen.agents[rollout.version] = {name: x.clone() for name, x in seen.agent.state_dict().items()}
        return act(rollout, how)

    def made(rows, *rest):
        seen.batches.append(make_batch(rows, *rest))
        seen.sequences.append(rows)
        return seen.batches[-1]

    with monkeypatch.context() as patch:
        patch.setattr(lbc, "Agent", built)
        patch.setattr(lbc.Rollout, "act", acted)
        patch.setattr(lbc, "make_batch", made)
        train(**settings)
    return seen


@torch.no_grad()
def ratios(agent, mb):
    """Of what was done, by the formula."""
    _, advantages = agent(mb.obs, mb.age)
    ratio, e = 1 / mb.prob, mb.index[..., 2:]
    for k, (p1, p2) in enumerate(zip(*agent.sharpened(advantages[:, :, :-1], mb.index, mb.mask), strict=True)):
        ratio = ratio * (e * p1 + (1 - e) * p2).gather(2, mb.action[..., k : k + 1]).squeeze(2)
    return ratio[mb.alive > 0]


WAYS = {
    "branches, masks": {},
    "bins": dict(env_id="parity_env:Parity-v0", bins=5),
    "transformer": MEMORY,
    "window": dict(bandit="window", env_id="CartPole-v1"),
    "own paces": dict(env_id="MixedDiscrete", max_agents=8, num_envs=8),
    "own paces, transformer": dict(env_id="MixedDiscrete", max_agents=8, num_envs=8, **MEMORY),
}


@pytest.mark.parametrize("way", WAYS)
def test_with_unchanged_weights_every_ratio_is_1(way, monkeypatch):
    """Fresh and replayed rows, over ends and cuts, whoever decides when."""
    seen = spied(monkeypatch, **(STILL | WAYS[way]))
    assert len(seen.batches) > 10
    for mb in seen.batches:
        np.testing.assert_allclose(ratios(seen.agent, mb), 1, rtol=2e-4)
    assert (
        all(mb.alive.mean() > 0.5 for mb in seen.batches)
        and len(set(seen.batches[-1].index[..., 0].flatten().tolist())) > 2
    )


@pytest.mark.parametrize("more", [{}, MEMORY])
def test_a_rows_probability_is_that_of_its_version_statistics_included(monkeypatch, more):
    seen = spied(monkeypatch, learning_rate=1e-2, **more)
    assert len(seen.agents) > 10, "it learns on the way"
    changed = 0
    for rows in seen.sequences[-6:]:
        for version in set(rows["version"].ravel().tolist()):
            seen.agent.load_state_dict(seen.agents[version])
            mb = lbc.make_batch(rows, seen.agent.memory, "cpu")
            its = torch.as_tensor(rows["version"][:, seen.agent.memory : -1] == version)
            mb = mb._replace(alive=mb.alive * its)
            np.testing.assert_allclose(ratios(seen.agent, mb), 1, rtol=2e-4)
            changed += (ratios(seen.agent, mb._replace(alive=1.0 * ~its)) - 1).abs().max() > 1e-3 if (~its).any() else 0
    assert changed > 3, "another version has other probabilities"


# Rows


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("memory", [{}, MEMORY])
def test_rows_are_what_was_seen_done_and_answered(monkeypatch, crashes, memory):
    """Agents of mixed periods that end, vanish and come back, and a player that crashes: an alive row has what its
    agent saw and did; where it goes on the row after has what came of it, alive or not; ages count from the first."""
    record = watch(lbc, monkeypatch, crash_at=60 if crashes else None)
    settings = dict(env_id="MixedDiscrete", max_agents=12, num_envs=8, batch_size=12, total_timesteps=900, **memory)
    seen = spied(monkeypatch, **(STILL | settings))
    told = {}
    for episode in trajectories(record):
        for age, (obs, action, reward, next_obs, terminated) in enumerate(episode):
            told.setdefault(obs.tobytes(), []).append((age, action.tolist(), reward, next_obs, terminated))
    assert any("restarted" in out[-1] for _, out in record[1:]) == crashes
    rows, dead = np.concatenate([x[:12] for x in seen.sequences[::2]]), 0
    for sequence in rows:
        for row, after in zip(sequence, sequence[1:], strict=False):
            if not row["alive"]:
                dead += bool(row["age"])
                continue
            found = [x for x in told[row["obs"].tobytes()] if x[1] == row["action"].tolist()]
            found = [x for x in found if abs(x[2] - row["reward"]) < 1e-5 and x[4] == row["terminated"]]
            assert found and row["age"] in [x[0] for x in found]
            if not row["terminated"]:
                assert any(np.array_equal(x[3], after["obs"]) for x in found) and after["age"] == row["age"] + 1
            else:
                assert after["age"] == 0
    assert dead > 2, "episodes were cut"


def test_a_cut_episode_bootstraps_from_its_last_observation():
    """One step, reward 1, then the time limit, for ever: the value is 1 / (1 - gamma), times the scale; of a limit that
    counted as an end it would be 1."""
    more = dict(env_id="parity_env:OneStep-v0", bins=2, gamma_1=0.5, gamma_2=0.8, total_timesteps=2400)
    folder = train(**more, norm_obs=False, learning_rate=2e-2, reward_scale=0.5, bandit="fixed")
    agent, _ = saved(lbc, folder)
    with torch.no_grad():
        values = agent(torch.ones(1, 1, 1), None)[0].flatten()
    np.testing.assert_allclose(values, [1.0, 2.5], rtol=0.05)


@pytest.mark.parametrize("crosses", ["terminated", "cut"])
def test_nothing_passes_an_end(crosses):
    """Whatever comes after an end, rewards, values and actions: targets and gradients before it are the same. So it is
    with attention, in both directions."""
    agent = agent_of((3,), **MEMORY).double()
    mb, _ = batch_of((3,), n=2, length=7 + agent.memory)
    mb = lbc.Batch(*(x if i < 2 else x[:, agent.memory :] for i, x in enumerate(mb)))
    end = 3  # the last row of its episode, in the place where rows to learn from begin
    terminated, alive = torch.zeros_like(mb.reward), torch.ones_like(mb.reward)
    if crosses == "terminated":
        terminated[:, end] = 1
        first = end + 1
    else:
        alive[:, end + 1] = 0  # its last observation
        first = end + 2
    age = mb.age.clone()
    age[:, agent.memory + first :] -= agent.memory + first
    mb = mb._replace(terminated=terminated, alive=alive, age=age)

    def targets(mb):
        values, advantages = agent(mb.obs, mb.age)
        q = advantages[0, :, :-1].sum(-1)
        discounts = 0.9 * (1 - mb.terminated)
        vs, adv = lbc.vtrace(mb.reward, values[0], discounts, mb.alive, mb.alive)
        return values, vs, adv, lbc.retrace(mb.reward, values[0], q, discounts, mb.alive)

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
        np.testing.assert_allclose(targets(earlier)[0][:, :, first:], before[0][:, :, first:], atol=1e-12)
        one = mb._replace(obs=mb.obs.clone())
        one.obs[:, agent.memory] += 1  # within an episode it is seen, by later rows only, and not for ever
        moved = (targets(one)[0] - before[0]).abs().amax((0, 1)) > 1e-9
        assert moved.tolist() == [k < first for k in range(len(moved))]


def test_a_window_is_all_that_a_row_sees():
    """Its own and as many as memory says, wherever it stands in a sequence: acting and learning see the same."""
    agent = agent_of((3,), **MEMORY)
    assert agent.memory == 6
    obs, age = torch.randn(1, 20, 5), torch.arange(20)[None] + 50
    with torch.no_grad():
        whole = agent(obs, age)[1][:, 0]
        for t in range(6, 20):
            window = slice(t - 6, t + 1)
            np.testing.assert_allclose(agent(obs[:, window], age[:, window])[1][:, 0, 0], whole[:, t - 6], atol=1e-5)


# Bandits


class Numbered(lbc.Fixed):
    """Its draws are 1, 2, 3..."""

    def __init__(self, args):
        super().__init__(args)
        self.draws = 0

    def draw(self):
        self.draws += 1
        return np.array([self.draws, 0.0, 0.5])


def test_an_ending_episode_updates_with_its_own_return_and_index_and_gets_the_next(monkeypatch):
    monkeypatch.setitem(lbc.BANDITS, "gdi", Numbered)
    seen = spied(monkeypatch, **STILL)
    folder = sorted(Path("runs").iterdir())[-1]
    told = checkpoints.load(folder, lbc.__file__)[1]["kept"]["bandit"]["told"].numpy()
    episodes = {}
    for rows in np.concatenate([x[:3] for x in seen.sequences[::2]])[:, :-1].reshape(-1):
        if rows["alive"]:
            episodes.setdefault(int(rows["index"][0]), []).append(rows.copy())
    assert len(told) > 20 and sorted(told[:, 1]) == sorted(set(told[:, 1])), "an index for each episode"
    matched = 0
    for _, number, _, _, episodic_return in told:
        rows = episodes.get(int(number))  # the last ones are in no whole sequence yet
        if rows and rows[-1]["terminated"] and rows[0]["age"] == 0:
            assert sum(row["reward"] for row in rows) == pytest.approx(episodic_return, abs=1e-4)
            assert [row["age"] for row in rows] == list(range(len(rows)))
            matched += 1
    assert matched > 20


def bump(t, arms, rng):
    return np.exp(-(((arms - (0.1 + 0.8 * t / 1000)) / 0.15) ** 2))


def redrawn(t, arms, rng):
    return np.random.default_rng([rng, t // 500]).random(len(arms))


def growing(t, arms, rng):
    return (1 + t / 50) * np.exp(-(((arms - 0.7) / 0.2) ** 2))


def regret(bandit, world, seed, pulls=1000):
    """Of 20 arms along k1, noise of a tenth of the scale: what was lost, relative to the scale, per pull."""
    np.random.seed(seed)
    rng, arms, lost = np.random.default_rng(seed), (np.arange(20) + 0.5) / 20, 0.0
    bandit = bandit(lbc.Args())
    if isinstance(bandit, lbc.Window):
        bandit.arms = np.stack([arms, np.full(20, 0.5), np.full(20, 0.5)], 1)
    for t in range(pulls):
        means = world(t, arms, seed)
        index = bandit.draw()
        arm = min(19, int(bandit.point(index)[0] * 20))
        scale = np.ptp(means)
        lost += (means.max() - means[arm]) / scale
        bandit.update(index, means[arm] + 0.1 * scale * rng.normal(), t)
    return lost / pulls


# Measured, mean of seeds 1 to 6, relative to chance: gdi 0.41, 0.72, 0.36; window 0.27, 0.18, 0.23.
BOUNDS = {lbc.Tiles: (0.6, 0.88, 0.55), lbc.Window: (0.45, 0.4, 0.45), lbc.Random: None}


@pytest.mark.parametrize("bandit", BOUNDS)
def test_bandits_lose_less_than_chance(bandit):
    """Where the best arm moves, where all are drawn anew, and where returns grow; chance fails all of it."""
    for k, world in enumerate((bump, redrawn, growing)):
        chance = np.mean([regret(lbc.Random, world, seed) for seed in (1, 2)])
        if bandit is lbc.Random:
            np.random.seed(99)
            ratio = np.mean([regret(lbc.Random, world, seed, 999) for seed in (1, 2)]) / chance
            assert ratio > max(bounds[k] for bounds in BOUNDS.values() if bounds)
        else:
            assert np.mean([regret(bandit, world, seed) for seed in (1, 2)]) / chance < BOUNDS[bandit][k], world


def test_gdis_tiles_move_by_their_rate_and_all_bandits_learn():
    np.random.seed(0)
    bandit = lbc.Tiles(lbc.Args())
    index = np.array([3.0, 50.0, 0.5])
    bandit.update(index, 7.0, 1)
    assert (bandit.weights == 7).all(), "tiles start at the first return"
    bandit.update(index, 17.0, 2)
    block = [int(math.log(4) / math.log(51) * 20), 19, 10]
    for axis in range(3):
        for voter in range(lbc.VOTERS):
            tile = bandit.tile[axis, voter]
            mine = tile == tile[block[axis]]
            values = bandit.values()[axis, voter]
            np.testing.assert_allclose(values[mine], 7 + 10 * bandit.rate[axis, voter, 0])
            np.testing.assert_allclose(values[~mine], 7)
            assert 1 <= mine.sum() <= 4 and bandit.tries[axis, voter].sum() == 2
    assert bandit.point(bandit.index(np.array([0.3, 0.8, 0.1]))) == pytest.approx([0.3, 0.8, 0.1])
    for _ in range(200):
        k1, k2, e = bandit.draw()
        assert 0 <= k1 <= 50 and 0 <= k2 <= 50 and 0 <= e <= 1


@pytest.mark.parametrize("bandit", lbc.BANDITS.values())
def test_a_bandit_comes_back_as_it_was(bandit):
    np.random.seed(0)
    first, second = bandit(lbc.Args()), bandit(lbc.Args())
    for t in range(300):
        first.update(first.draw(), float(t % 7), t)
    second.restore(checkpoints.plain(first.state()))
    for way in (first, second):
        np.random.seed(5)
        way.drawn = [way.draw().tolist() for _ in range(20)] + [way.best().tolist()]
        way.update(way.draw(), 3.0, 301)
    assert first.drawn == second.drawn and np.array_equal(first.told[:301], second.told[:301])


def test_a_window_forgets():
    np.random.seed(0)
    bandit = lbc.Window(lbc.Args(window=50))
    good, other = bandit.index(bandit.arms[7]), bandit.index(bandit.arms[30])
    for index in (good, other):
        for t in range(60):
            bandit.update(index, 1.0, t)
    tries, _ = bandit.means()
    assert tries[30] == 50 and tries.sum() == 50


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


# A run's life


def everything(folder):
    kept = checkpoints.load(folder, lbc.__file__)[1]
    parts = {name: part if isinstance(part, dict) else {"": part} for name, part in kept["kept"].items()}
    return {f"{name}.{key}": x for name, part in parts.items() for key, x in part.items()}


@pytest.mark.parametrize("more", [{}, MEMORY, dict(env_id="parity_env:Parity-v0", bins=3, bandit="window")])
def test_resume_equals_uninterrupted(monkeypatch, more):
    """Stopped in the middle and resumed, within episodes and sequences: weights, replay, bandits and curves to the
    byte."""
    more = more | dict(eval_interval=100)
    whole = train(**more)
    with monkeypatch.context() as patch:
        stop_after(patch, lbc, "adam_numbers", 19)
        part = train(**more)
    assert 0 < checkpoints.load(part, lbc.__file__)[1]["global_step"] < 300
    call(monkeypatch, "--resume", part)
    first, second = everything(whole), everything(part)
    for name, x in first.items():
        assert torch.equal(x, second[name]) if isinstance(x, torch.Tensor) else x == second[name], name
    assert curve(whole) == curve(part)


def test_exported_policy_equals_the_agent(tmp_path):
    agent, rng = agent_of(), np.random.default_rng(1)
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    agent.index.copy_(torch.tensor([[2.0, 30.0, 0.4]]))
    policies.export(agent, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    obs, mask = rng.normal(size=(300, 5)).astype(np.float32), masks_of(SPEC["branches"], 300, rng)
    given = {"obs_0": obs[:, :2], "obs_1": obs[:, 2:], "action_masks": mask.astype(np.float32)}
    sampled, best = session.run(["discrete_actions", "deterministic_discrete_actions"], given)
    with torch.no_grad():
        expected = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)[0]
    np.testing.assert_array_equal(best, expected)
    for column, allowed in zip(sampled.astype(int).T, np.split(mask, [3, 5], 1), strict=True):
        assert allowed[np.arange(300), column].all()


@pytest.mark.parametrize(("more", "why"), [(MEMORY, "last observations"), (dict(env_id="Pendulum-v1"), "in bins")])
def test_what_unitys_layout_has_no_place_for_is_one_line(more, why, monkeypatch):
    folder = train(**more)
    with pytest.raises(SystemExit, match=f"--export: Unity's layout of a model has no place for .*{why}") as caught:
        call(monkeypatch, "--export", folder)
    assert len(str(caught.value).strip().splitlines()) == 1
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 2)


def test_evaluation_is_greedy_at_the_best_index(monkeypatch, capsys):
    """What is evaluated has the saved statistics, index and context; and Basic is solved in a few seconds."""
    monkeypatch.setattr(sys, "argv", ["lbc_discrete.py", "--env-id", "Basic", "--total-timesteps", "16384"])
    lbc.main()
    (folder,) = Path("runs").glob("*")
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 32)
    assert "32 episodes of 7 decisions on average: return 0.93 ± 0.00" in capsys.readouterr().out
    tags = curve(folder)
    assert tags["greedy/mixture"][-1][1] == pytest.approx(0.93)


def test_evaluation_with_memory_sees_what_acting_saw(monkeypatch):
    """play() and a rollout, on the same observations: the same windows."""
    agent = agent_of((3,), **MEMORY).eval()
    spec, rng, windows = SPEC | {"branches": [3], "start": [0]}, np.random.default_rng(0), []
    monkeypatch.setattr(fast.Acting, "module", lambda self, *seen: windows.append(seen) or [np.zeros((2, 1))] * 3)
    play, begins, ages = lbc.play(agent, spec, 2), np.ones(2, bool), np.zeros(2, int)
    past = [[], []]
    for _ in range(30):
        obs = rng.normal(size=(2, 5)).astype(np.float32)
        for slot in range(2):
            past[slot] = [obs[slot]] if begins[slot] else [*past[slot], obs[slot]]
        play(obs, {"action_mask": np.ones((2, 3), bool)}, np.arange(2), begins)
        seen, _, _, ages = windows[-1]
        for slot in range(2):
            assert ages[slot, -1] == len(past[slot]) - 1
            count = min(7, len(past[slot]))
            np.testing.assert_array_equal(seen[slot, 7 - count :], past[slot][-count:])
        begins = rng.random(2) < 0.15


LINES = [
    ("--env-id parity_env:Unbounded-v0", "has actions without bounds"),
    ("--env-id GridWorld", "ppo_pixel.py takes images"),
    ("--fixed-index 1 1 2", "--fixed-index (1.0, 1.0, 2.0): the last, e, must be between 0 and 1"),
    ("--num-envs 64", "--batch-size 32: must hold a new sequence of each of 64 envs"),
    ("--replay-size 8", "--replay-size 8: must hold a batch of 32"),
    ("--bins 1", "--bins 1: at least two"),
    ("--architecture transformer --num-heads 5", "--num-heads 5: does not divide --hidden-sizes"),
    ("--total-timesteps 100", "less than one sequence of each"),
    ("--env-id Basic --num-actors 2 --base-port 6000", "--base-port 6000: --num-actors launch players of their own"),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_bad_input_is_one_line(line, match, monkeypatch):
    """Before any work starts."""
    with pytest.raises(SystemExit, match=".*") as caught:
        call(monkeypatch, *line.split())
    assert match in str(caught.value) and len(str(caught.value).strip().splitlines()) == 1
    assert not Path("runs").exists()


# Actors


def test_actors_rows_have_the_probability_of_the_version_that_they_pulled(monkeypatch):
    """Over processes, shared memory and the disk: with the weights, statistics and context of that version every ratio
    is 1; a row's lag is known."""
    pushed, push, batches, make_batch = {}, actors.Actors.push, [], lbc.make_batch

    def spied(self, version, agent, bandit):
        pushed[version] = {name: x.clone() for name, x in agent.state_dict().items()}
        push(self, version, agent, bandit)

    monkeypatch.setattr(actors.Actors, "push", spied)
    monkeypatch.setattr(lbc, "make_batch", lambda rows, *rest: batches.append(rows) or make_batch(rows, *rest))
    folder = train(num_actors=2, num_envs=2, learning_rate=1e-2, total_timesteps=700, **MEMORY)
    state = checkpoints.load(folder, lbc.__file__)[1]
    agent, versions = lbc.Agent(state["spec"], lbc.Args(**state["args"])), set()
    for rows in batches[-8:]:
        for version in set(rows["version"][:, agent.memory : -1][rows["alive"][:, agent.memory : -1] > 0].tolist()):
            agent.load_state_dict(pushed[version])
            mb = make_batch(rows, agent.memory, "cpu")
            its = torch.as_tensor(rows["version"][:, agent.memory : -1] == version)
            np.testing.assert_allclose(ratios(agent, mb._replace(alive=mb.alive * its)), 1, rtol=2e-4)
            versions.add(version)
    assert len(versions) > 3
    lags = [lag for _, lag in curve(folder)["charts/lag"]]
    assert lags[0] == 0 and 0 < max(lags) < 40
    told = state["kept"]["bandit"]["told"]
    assert len(told) > 20 and len(set(told[:, 1].tolist())) == len(told), "their episodes came to the bandit"
    assert not (folder / actors.WEIGHTS).exists() and not children()


def children():
    me = f"\n{os.getpid()}"
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"actors.py") for word in words) and fields[0] != "Z":
            found.append((int(status.parent.name), int(fields[1])))
    return [pid for pid, parent in found if f"\n{parent}" == me]


def test_a_dead_actor_is_started_again(monkeypatch, capsys):
    killed, receive = [], actors.Actors.receive

    def spied(self, *rest):
        if len(killed) < 2 and self.in_a_row == 0 and self.processes:
            process = self.processes[len(killed)][0]
            process.kill()
            process.wait()
            killed.append(process.pid)
        return receive(self, *rest)

    monkeypatch.setattr(actors.Actors, "receive", spied)
    folder = train(num_actors=2, num_envs=2)
    out = capsys.readouterr().out
    assert out.count("is started again") == 2 and "Actor 0 ended with exit code -9" in out
    assert checkpoints.load(folder, lbc.__file__)[1]["global_step"] >= 360 and not children()


def test_actors_that_never_live_are_one_line(monkeypatch):
    """What is wrong with the env only shows in the actors: after a few tries the run ends, with their last words."""
    monkeypatch.setenv("PARITY_BREAKS", "1")
    script = copy_of(
        "lbc_discrete.py", ("BANDITS = {", 'if __name__ == "script":\n    raise OSError("no luck")\nBANDITS = {')
    )
    with pytest.raises(EngineError, match="exit code 1, 1 restarts in a row: OSError: no luck"):
        script.train(script.Args(**SMALL | dict(num_actors=1, num_envs=2, max_restarts=1)))
    assert not children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(number, tmp_path):
    """Ctrl-C saves and ends all; a learner that is killed takes its actors with it."""
    line = "--env-id CartPole-v1 --num-actors 2 --num-envs 2 --total-timesteps 1000000 --eval-interval 0 --no-compile"
    command = [sys.executable, lbc.__file__, *line.split()]
    learner = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        for line in learner.stdout:
            if " steps " in line and not line.strip().startswith("20 "):
                break
        mine = [int(x) for x in Path(f"/proc/{learner.pid}/task/{learner.pid}/children").read_text().split()]
        assert len(mine) == 2
        learner.send_signal(number)
        out = learner.stdout.read()
        assert learner.wait(20) == (0 if number == signal.SIGINT else -9)
        assert number == signal.SIGKILL or "To go on: python lbc_discrete.py --resume" in out
        deadline = time.time() + 10
        while any(alive(pid) for pid in mine) and time.time() < deadline:
            time.sleep(0.05)
        assert not any(alive(pid) for pid in mine)
    finally:
        learner.kill()
        learner.wait()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Pictures, and the question


def benchmark(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(name)


@pytest.mark.parametrize("bandit", ["gdi", "window"])
def test_a_picture_of_a_run(bandit, monkeypatch, capsys):
    """It draws what the run told: losses by name, greedy returns, the bandits' own numbers, each episode's index."""
    plot, folder = benchmark("plot_bandit", monkeypatch), train(bandit=bandit, eval_interval=200)
    monkeypatch.setattr(sys, "argv", ["plot_bandit.py", str(folder)])
    plot.main()
    picture = imageio.imread(folder / "bandit.png")
    assert picture.std() > 10 and "bandit.png" in capsys.readouterr().out
    scalars, state = plot.read(folder)
    figure = plot.draw(scalars, state, "x")
    drawn = {axes.get_title(): axes for axes in figure.axes}
    assert len(drawn["V losses"].lines) == len(drawn["all three, weighted"].lines) == 3
    assert [line.get_label() for line in drawn["greedy return"].lines] == ["network 1", "network 2", "mixture"]
    points = drawn["e of each episode, coloured by its return"].collections[0].get_offsets()
    told = state["kept"]["bandit"]["told"]
    np.testing.assert_allclose(points, told[:, [0, 3]])
    if bandit == "gdi":
        mean = drawn["the bandits' estimate by k2"].lines[-1].get_ydata()
        best = lbc.Tiles(lbc.Args())
        best.restore(state["kept"]["bandit"])
        np.testing.assert_allclose(mean, best.values()[1].mean(0))
        assert state["kept"]["agent"]["index"][0].tolist() == pytest.approx(best.best().tolist(), rel=1e-5)


def test_the_questions_verdict_follows_the_protocol(monkeypatch, capsys):
    """Indices are chosen by the other seeds alone; the verdict by two standard errors of the seeds' differences."""
    q = benchmark("bandit_question", monkeypatch)
    have = {}
    for env, scale in q.CELLS:
        low, high = q.ENDS[env]
        worth = lambda x: (low + x * (high - low),) * 2
        for k, index in enumerate(q.INDICES):
            good = 1 if scale == 0.1 else 2  # of the three
            have |= {(env, scale, "fixed", *index, seed): worth(0.6 if k == good else 0.4) for seed in q.OTHERS}
            have |= {(env, scale, "fixed", *index, seed): worth(0.1 * k + 0.01 * seed) for seed in q.SEEDS}
        have |= {(env, scale, "gdi", *q.NONE, seed): worth(0.5 + 0.02 * seed) for seed in q.SEEDS}
        have |= {(env, scale, "random", *q.NONE, seed): worth(0.5 + 0.1 * (-1) ** seed) for seed in q.SEEDS}
    each, one = q.chosen(have)
    assert {each[env, 0.1] for env in q.STEPS} == {q.INDICES[1]} and one == q.INDICES[2]
    q.table(have)
    out = capsys.readouterr().out
    assert out.count("bandit - fixed: +0.363, standard error 0.007: above") == 2
    assert out.count("bandit - random: +0.080, standard error 0.051: neither") == 2


# A changed copy


@pytest.mark.parametrize("layer", ["nn.LayerNorm(b), {}", "nn.Mish()", "{}, nn.Dropout(0.5)"])
def test_what_acts_is_what_learns(layer, monkeypatch):
    old = '{"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()'
    script = copy_of("lbc_discrete.py", (old, layer.format(old)))
    script.train(script.Args(**SMALL))
    (folder,) = Path("runs").iterdir()
    agent, _ = saved(script, folder)
    rng = np.random.default_rng(0)
    obs, mask = 3 * rng.standard_normal((50, 3)).astype(np.float32), masks_of([3, 2], 50, rng)
    acting, chance = fast.Acting(agent), torch.get_rng_state()
    actions = acting.checked(obs, mask)(obs, mask)[0]
    torch.set_rng_state(chance)
    assert (acting.fast is False) == ("Mish" in layer)
    with torch.no_grad():
        np.testing.assert_array_equal(actions, agent.act(torch.as_tensor(obs), torch.as_tensor(mask))[0])


@needs_compiler
def test_a_changed_loss_with_a_schedule_and_a_metric_is_the_same_compiled():
    """A student's entropy bonus that falls, logged under its own name: it takes effect, compiled or not."""
    field = "    max_grad_norm: float = 1.0\n"
    bonus = '    ent_coef: float = 0.0\n    """of the entropy bonus"""\n'
    line, loop = "    count = mb.alive.sum().clamp(min=1)\n", "            act = None if args.num_actors"
    entropy = "    entropy = -(prob.clamp(min=1e-8).log() * mb.alive).sum() / count\n"
    out = "    return both.sum(), metrics\n"
    logged = '    metrics["losses/entropy"] = entropy\n    return both.sum() - args.ent_coef * entropy, metrics\n'
    schedule = "            args.ent_coef = 0.5 * (1 - run.global_step / run.total)\n"
    plain = copy_of("lbc_discrete.py")
    script = copy_of(
        "lbc_discrete.py", (field, bonus + field), (line, line + entropy), (out, logged), (loop, schedule + loop)
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
    assert not torch.allclose(constant["networks.0.body.0.weight"], eager["networks.0.body.0.weight"], atol=1e-4)
    ours, theirs = (dict(curve(folder)["losses/entropy"]) for folder in folders[1:])
    assert ours.keys() == theirs.keys() and all(x == pytest.approx(theirs[t], abs=1e-3) for t, x in ours.items())


def test_a_parameter_that_is_in_no_network_is_an_error_that_names_it():
    made = "        ends = np.cumsum"
    script = copy_of("lbc_discrete.py", (made, "        self.shared = nn.Parameter(torch.zeros(3))\n" + made))
    with pytest.raises(ValueError, match="shared is in no vector: nothing would learn it"):
        script.train(script.Args(**SMALL))
