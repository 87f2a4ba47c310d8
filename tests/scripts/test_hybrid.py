"""ppo_hybrid_multiagent.py: the product of the distributions, equality with the scripts for one kind of actions,
nested action spaces, export, and runs."""

import inspect
import itertools
from contextlib import closing

import gymnasium as gym
import numpy as np
import onnxruntime
import parity_env
import pytest
import torch
from conftest import (
    ROOT,
    assert_compiled_is_the_same,
    assert_no_fast_is_the_same,
    assert_refused,
    call,
    curve,
    needs_compiler,
    run_script,
    spy_on,
    train,
    watch,
)
from copies import copy_of, saved
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import ppo_continuous_multiagent as continuous
import ppo_discrete_multiagent as discrete
import ppo_hybrid_multiagent as ppo
from envs import make
from envs.hybrid import HybridActions, HybridSpace, is_hybrid
from envs.make import make_env, make_envs
from onefile_rl import export, fast
from onefile_rl.engines import unity_model

HYBRID = "parity_env:Hybrid-v0"
SMALL = dict(env_id=HYBRID, num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8))
SPEC = {
    "obs_dim": 5,
    "sensors": [2, 3],
    "action_dim": 2,
    "low": [-1.0, -0.5],
    "high": [1.0, 0.25],
    "branches": [3, 2, 4],
}


@pytest.fixture
def spy(monkeypatch, tmp_path):
    return spy_on(ppo, monkeypatch, tmp_path, SMALL)


def agent_of(spec=SPEC, seed=0, script=ppo):
    """Return an agent with random weights, also in the last layers."""
    torch.manual_seed(seed)
    agent = script.Agent(spec, script.Args(hidden_sizes=(8, 8)))
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.7 * torch.randn_like(parameter))
    return agent


def masks_of(branches, count, rng):
    """Return random masks that allow at least one choice of each branch."""
    parts = [np.zeros((count, 0), bool)]
    for size in branches:
        part = rng.random((count, size)) < 0.5
        part[np.arange(count), rng.integers(0, size, count)] = True
        parts.append(part)
    return np.concatenate(parts, 1)


def split(columns, branches):
    """Return the columns of each branch."""
    return np.split(columns, np.cumsum(branches)[:-1], 1)


def observations(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)


# The product of the distributions


@settings(max_examples=30)
@given(st.integers(1, 3), st.lists(st.integers(2, 5), min_size=1, max_size=3), st.integers(0, 1000))
def test_log_probs_and_entropies_are_the_sums_over_all_parts(action_dim, branches, seed):
    """Those of torch's own distributions, with the means and probabilities of the actor."""
    agent = agent_of(SPEC | {"action_dim": action_dim, "branches": branches, "low": -1.0}, seed)
    rng = np.random.default_rng(seed)
    obs = torch.as_tensor(observations(100, seed))
    mask = torch.as_tensor(masks_of(branches, 100, rng))
    with torch.no_grad():
        action, logprob, entropy, value = agent.get_action_and_value(obs, mask)
        again = agent.get_action_and_value(obs, mask, action)
        outputs = agent.actor(agent.obs_rms(obs))
    assert action.shape == (100, action_dim + len(branches))
    normal = torch.distributions.Normal(outputs[:, :action_dim], agent.actor_logstd.exp())
    expected_logprob = normal.log_prob(action[:, :action_dim]).sum(1)
    expected_entropy = normal.entropy().sum(1)
    logits = outputs[:, action_dim:].split(branches, 1)
    for i, (part, allowed) in enumerate(zip(logits, mask.split(branches, 1), strict=True)):
        choice = torch.distributions.Categorical(logits=part.masked_fill(~allowed, -1e8))
        expected_logprob += choice.log_prob(action[:, action_dim + i])
        expected_entropy += choice.entropy()
    np.testing.assert_allclose(logprob, expected_logprob.detach(), atol=1e-4)
    np.testing.assert_allclose(entropy, expected_entropy.detach(), atol=1e-4)
    np.testing.assert_array_equal(again[0], action)
    np.testing.assert_allclose(again[1], logprob, atol=1e-6)
    np.testing.assert_array_equal(value, agent.get_value(obs).detach())


@settings(max_examples=30)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.integers(0, 1000))
def test_a_forbidden_choice_has_probability_0_and_is_never_made(branches, seed):
    agent = agent_of(SPEC | {"branches": branches}, seed)
    mask = masks_of(branches, 200, np.random.default_rng(seed))
    obs = observations(200, seed)
    with torch.no_grad():
        _, logprobs = agent.get_mean_and_choice_logprobs(
            agent.obs_rms(torch.as_tensor(obs)), torch.as_tensor(mask)
        )
    for p, allowed in zip(logprobs, split(mask, branches), strict=True):
        assert (p.exp().numpy()[~allowed] == 0).all()
        np.testing.assert_allclose(p.exp().sum(1), 1, atol=1e-5)
    for enabled, deterministic in itertools.product((True, False), repeat=2):
        act = fast.Acting(agent, enabled, deterministic)
        for actions in act(obs, mask):
            choices = actions[:, 2:].astype(int)
            for column, allowed in zip(choices.T, split(mask, branches), strict=True):
                assert allowed[np.arange(200), column].all()


def test_all_parts_are_drawn_by_their_probabilities():
    agent = agent_of(SPEC | {"branches": [4]})
    obs = np.tile(observations(1), (40_000, 1))
    mask = np.tile([True, True, False, True], (40_000, 1))
    actions, _ = fast.Acting(agent)(obs, mask)
    with torch.no_grad():
        mean, (logprobs,) = agent.get_mean_and_choice_logprobs(
            agent.obs_rms(torch.as_tensor(obs[:1])), torch.as_tensor(mask[:1])
        )
        std = agent.actor_logstd.exp().numpy()
    np.testing.assert_allclose(actions[:, :2].mean(0), mean[0], atol=0.03 * std.max())
    np.testing.assert_allclose(actions[:, :2].std(0), std, rtol=0.03)
    share = np.bincount(actions[:, 2].astype(int), minlength=4) / 40_000
    np.testing.assert_allclose(share, logprobs.exp()[0], atol=0.01)
    z = (actions[:, 0] - actions[:, 0].mean()) / std[0]
    for choice in (0, 1, 3):
        chosen = actions[:, 2] == choice
        if chosen.sum() > 1000:
            assert abs(z[chosen].mean()) < 0.1, "the parts are independent"


def test_acting_in_numpy_is_the_module():
    """The same random numbers, the same actions; and it is numpy that acts."""
    agent = agent_of()
    obs = 3 * observations(50)
    mask = masks_of([3, 2, 4], 50, np.random.default_rng(0))
    act = fast.Acting(agent)
    for seed in range(20):
        outs = []
        for way in (act, act.act_with_torch):
            torch.manual_seed(seed)
            outs.append(way(obs, mask))
        for ours, expected in zip(*outs, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-5)
        np.testing.assert_array_equal(outs[0][0][:, 2:], outs[1][0][:, 2:])
        low, high = np.array([-1, -0.5]), np.array([1, 0.25])
        np.testing.assert_allclose(outs[0][1][:, :2], outs[0][0][:, :2].clip(low, high))
        np.testing.assert_array_equal(outs[0][1][:, 2:], outs[0][0][:, 2:])
    assert act.enabled


# Equality with the scripts for one kind of actions

BRANCHES = {"branches": [3, 2], "start": [0, 0]}
BOX = {"action_dim": 2, "low": -1.0, "high": 1.0}
KINDS = {
    "continuous": (continuous, BOX | {"branches": []}),
    "discrete": (discrete, BRANCHES | {"action_dim": 0, "low": [], "high": []}),
}


def batch_of(script, agent, count=64, seed=1):
    """Return a batch for any of the scripts with random rows, of actions that the agent has sampled."""
    rng = np.random.default_rng(seed)
    rows = {
        "obs": torch.as_tensor(observations(count)),
        "next_obs": torch.as_tensor(observations(count, 2)),
        "terminated": torch.as_tensor(rng.random(count) < 0.1),
        "truncated": torch.as_tensor(rng.random(count) < 0.1),
    }
    for name in ("logprobs", "advantages", "returns", "values"):
        rows[name] = torch.as_tensor(rng.normal(size=count), dtype=torch.float32)
    if "masks" in script.Batch._fields:
        branches = [x.stop - x.start for x in agent.branch_slices]
        rows["masks"] = torch.as_tensor(masks_of(branches, count, rng))
    torch.manual_seed(seed)
    given = [rows[name] for name in ("obs", "masks") if name in rows]
    with torch.no_grad():
        rows["actions"], logprobs, _, _ = agent.get_action_and_value(*given)
    rows["logprobs"] = logprobs + 0.1 * rows["logprobs"]
    return script.Batch(**rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip_vloss", [False, True])
def test_updates_with_one_kind_of_actions_are_those_of_its_script(kind, clip_vloss):
    """From the same weights and the same batch: actions, all metrics and the weights, over five updates."""
    script, spec = KINDS[kind]
    spec = spec | {"obs_dim": 5, "sensors": [5]}
    agents = [agent_of(spec, script=each) for each in (script, ppo)]
    weights = agents[0].state_dict()
    weights = {name.replace("actor_mean", "actor"): value for name, value in weights.items()}
    incomplete = agents[1].load_state_dict(weights, strict=False)
    empty = {"actor_logstd"} if kind == "discrete" else set()
    assert {*incomplete.missing_keys} == empty and not incomplete.unexpected_keys
    initial = {name: value.clone() for name, value in agents[1].state_dict().items()}
    batches = [batch_of(each, agent) for each, agent in zip((script, ppo), agents, strict=True)]
    np.testing.assert_array_equal(batches[0].actions, batches[1].actions)

    results = []
    for each, agent, batch in zip((script, ppo), agents, batches, strict=True):
        args = each.Args(hidden_sizes=(8, 8), ent_coef=0.01, clip_vloss=clip_vloss)
        optimizer = fast.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
        rows = torch.arange(len(batch.obs))
        results.append([each.update(agent, optimizer, batch, rows, 64.0, args) for _ in range(5)])
    for theirs, ours in zip(*results, strict=True):
        assert theirs.keys() == ours.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-5, rtol=1e-5, err_msg=name)
    assert results[0][0]["losses/clipfrac"] > 0
    learned = agents[1].state_dict()
    for name, value in agents[0].state_dict().items():
        name = name.replace("actor_mean", "actor")
        np.testing.assert_allclose(learned[name], value, atol=1e-5, err_msg=name)
        if name.endswith("weight"):
            assert not torch.allclose(initial[name], value, atol=1e-3), "they learned"


class NoBox(parity_env.MaskedBranches):
    """MaskedBranches with a continuous part of no dimensions."""

    action_space = spaces.Tuple([spaces.MultiDiscrete([3, 2]), spaces.Box(-1, 1, (0,), np.float32)])

    def step(self, action):
        choices, nothing = action
        assert nothing.shape == (0,)
        return super().step(choices)


gym.register("NoBox-v0", NoBox, max_episode_steps=7)


def test_a_run_without_continuous_actions_is_that_of_the_discrete_script(empty_folder):
    """Everything that is logged over three iterations, and the final weights."""
    small = SMALL | dict(num_envs=2, total_timesteps=384, compile=False, ent_coef=0.01)
    ids = {discrete: "parity_env:MaskedBranches-v0", ppo: "NoBox-v0"}
    folders = {script: train(script, small | dict(env_id=env_id)) for script, env_id in ids.items()}
    curves = {script: curve(folder) for script, folder in folders.items()}
    assert curves[ppo].keys() == curves[discrete].keys() and len(curves[ppo]) > 8
    for name, points in curves[discrete].items():
        np.testing.assert_allclose(curves[ppo][name], points, atol=1e-5, rtol=1e-5, err_msg=name)
    states = [
        torch.load(folder / "checkpoint.pt", weights_only=True)["kept"]["agent"]
        for folder in folders.values()
    ]
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, atol=1e-5, err_msg=name)


def test_the_script_differs_from_the_continuous_one_by_distribution_and_masks_only():
    """What the docs say of the diff."""
    for name in ("gae", "compute_advantages", "update", "approx_kl", "layer_init", "mlp", "check"):
        ours, theirs = (inspect.getsource(getattr(x, name)) for x in (ppo, continuous))
        assert ours == theirs, name
    for name in ("add", "cut", "remove", "as_index"):
        ours, theirs = (inspect.getsource(getattr(x.Rollout, name)) for x in (ppo, continuous))
        assert ours.replace("        self.masks[rows] = self.pending_masks[index]\n", "") == theirs
    lines = [
        (ROOT / f"ppo_{kind}_multiagent.py").read_text().splitlines()
        for kind in ("continuous", "hybrid")
    ]
    loops = [x[x.index("def train(args, resumed=None):") :] for x in lines]
    new = [line.strip() for line in loops[1] if line not in loops[0]]
    assert len(new) <= 8, new


# Nested action spaces


class Echo(gym.Env):
    """Keeps the actions that it gets."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, space="dict"):
        self.action_space = SPACES[space][0]
        self.got = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.got.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


gym.register("Echo-v0", Echo, max_episode_steps=100)

# A space, a row of continuous actions and choices, and the action that the env gets
GRID = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [-2, 0]])
SPACES = {
    "dict": (
        spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Discrete(3)),
        [0.5, -0.25, 2],
        {"a": [0.5, -0.25], "b": 2},
    ),
    "discrete first": (
        spaces.Dict(a=spaces.MultiDiscrete([3, 2]), b=spaces.Box(-1, 1, (1,), np.float32)),
        [0.5, 2, 1],
        {"a": [2, 1], "b": [0.5]},
    ),
    "unsorted names": (
        spaces.Dict(
            [("z", spaces.Discrete(2)), ("a", spaces.Box(-1, 1, (1,))), ("b", spaces.Discrete(3))]
        ),
        [0.5, 1, 2],
        {"z": 1, "a": [0.5], "b": 2},
    ),
    "tuple": (
        spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(-1, 1, (2, 1), np.float64)]),
        [0.5, -1, 2],
        (1, [[0.5], [-1]]),
    ),
    "parts between": (
        spaces.Tuple(
            [
                spaces.Discrete(2),
                spaces.Box(-1, 1, (1,)),
                spaces.Discrete(4),
                spaces.Box(-2, 0, (2,)),
            ]
        ),
        [0.5, -1.5, -0.5, 1, 3],
        (1, [0.5], 3, [-1.5, -0.5]),
    ),
    "a grid with starts": (
        spaces.Tuple([GRID, spaces.Box(-1, 1, (1,), np.float32)]),
        [0.0, 1, 2, 3, 4],
        ([[2, 3], [1, 4]], [0]),
    ),
    "nested": (
        spaces.Dict(
            arm=spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Dict(grip=spaces.Discrete(2))]),
            legs=spaces.Dict(gait=spaces.MultiDiscrete([2, 3]), speed=spaces.Box(0, 1, ())),
        ),
        [0.5, -0.5, 0.75, 1, 0, 2],
        {"arm": ([0.5, -0.5], {"grip": 1}), "legs": {"gait": [0, 2], "speed": 0.75}},
    ),
    "whole numbers": (
        spaces.Dict(a=spaces.Box(0, 3, (3,), np.int32), b=spaces.Discrete(2)),
        [0.4, 1.6, 3.0, 1],
        {"a": [0, 2, 3], "b": 1},
    ),
    "bytes": (
        spaces.Dict(a=spaces.Box(0, 255, (2,), np.uint8), b=spaces.Discrete(2)),
        [254.6, 0.2, 0],
        {"a": [255, 0], "b": 0},
    ),
    "bounds beyond single precision": (
        spaces.Dict(
            a=spaces.Box(0.1, 0.3, (1,), np.float64),
            b=spaces.Discrete(2),
            c=spaces.Box(0, 2**31 - 1, (1,), np.int32),
        ),
        [np.float32(0.3), 2.0**31, 1],
        {"a": [0.3], "b": 1, "c": [2**31 - 1]},
    ),
    "no dimensions": (
        spaces.Tuple([spaces.Box(-1, 1, (0,)), spaces.Discrete(2)]),
        [1],
        ([], 1),
    ),
}


def assert_equal(got, expected):
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert_equal(got[name], value)
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for value, each in zip(got, expected, strict=True):
            assert_equal(value, each)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", SPACES)
def test_rows_reach_the_env_as_nested_actions(name):
    space, row, expected = SPACES[name]
    assert is_hybrid(space)
    env = HybridActions(Echo(name))
    env.reset(seed=0)
    env.step(np.array(row, np.float32))
    assert_equal(env.unwrapped.got[0], expected)
    assert env.action_space.shape == (len(row),)


@pytest.mark.parametrize("name", SPACES)
def test_sampled_actions_of_every_nested_space_are_in_it(name, empty_folder):
    """In training: the env itself refuses what is not in its space."""
    small = SMALL | dict(num_steps=16, num_minibatches=2, total_timesteps=32, compile=False)
    folder = train(ppo, small | dict(env_id="Echo-v0", env_kwargs={"space": name}))
    assert (folder / "checkpoint.pt").exists()


def test_far_bounds_are_rescaled_and_choices_are_not(capsys, monkeypatch):
    monkeypatch.setattr(make, "noted", set())
    args = ppo.Args(env_id="parity_env:HybridTuple-v0", num_envs=2)
    envs, _ = make_envs(args, seed=1)
    with closing(envs):
        assert "2 of 2 action(s) are rescaled to -1 to 1" in capsys.readouterr().out
        space = envs.single_action_space
        assert isinstance(space, HybridSpace) and space.branches == [3]
        assert (space.continuous.low == -1).all() and (space.continuous.high == 1).all()
        got = []
        for env in envs.envs:
            env.unwrapped.step = lambda action: (
                got.append(action) or type(env.unwrapped).step(env.unwrapped, action)
            )
        envs.reset(seed=1)
        envs.step(np.array([[-1, 1, 0], [0.5, 0, 2]], np.float32))
    (first, far), (second, near) = got
    assert (first, second) == (1, 3)
    assert far.tolist() == [[100, 200]] and near.tolist() == [[175, 150]]
    spec = ppo.describe(args, envs)
    assert (
        spec["action_dim"] == 2
        and spec["branches"] == [3]
        and (spec["low"], spec["high"]) == (-1, 1)
    )


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(a=spaces.Box(-1, 1, (2,))),
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
        spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)]),
        spaces.Box(-1, 1, (2,)),
        spaces.MultiDiscrete([2, 3]),
    ],
    ids=str,
)
def test_other_spaces_are_not_hybrid(space):
    assert not is_hybrid(space)


def test_masks_of_a_gymnasium_env_are_those_of_its_branches():
    envs, _ = make_envs(ppo.Args(env_id=HYBRID, num_envs=3), seed=1)
    with closing(envs):
        _, infos = envs.reset(seed=1)
        expected = [env.unwrapped.action_masks() for env in envs.envs]
        np.testing.assert_array_equal(infos["action_mask"], expected)
        assert not infos["action_mask"].all()


# Rollouts


def test_first_ratio_is_1(spy):
    """The log-probs of acting are those of the update, with masks and unclipped actions."""
    seen = spy(num_envs=3, total_timesteps=64 * 3 * 3)
    assert len(seen.ratios) == 3
    for ratio in seen.ratios:
        np.testing.assert_allclose(ratio, 1, atol=1e-5)
    steer = seen.batches[0].actions[:, :2]
    assert (steer.abs() > 1).any(), "learned from before they are clipped"


@pytest.mark.parametrize("crashes", [False, True])
def test_rows_of_mixed_periods_are_what_was_asked_and_answered(spy, monkeypatch, crashes):
    """Agents of a Unity scene that decide, end, vanish and return at their own pace, and a player that crashes."""
    record = watch(ppo, monkeypatch, crash_at=60 if crashes else None)
    seen = spy(
        env_id="MixedHybrid", max_agents=12, num_steps=32, total_timesteps=384 * 2, norm_obs=False
    )
    told = {}
    obs, infos = record[0]
    for (actions, (after, *_, following)), mask in zip(record[1:], record.masks, strict=False):
        for slot in np.flatnonzero(infos["ready"]):
            pair = (mask[slot].tolist(), actions[slot].tolist())
            told.setdefault(obs[slot].tobytes(), []).append(pair)
        obs, infos = after, following
    assert any("restarted" in out[-1] for _, out in record[1:]) == crashes
    for batch in seen.batches:
        sent = torch.cat([batch.actions[:, :2].clamp(-1, 1), batch.actions[:, 2:]], 1)
        rows = zip(batch.obs.numpy(), batch.masks.tolist(), sent.tolist(), strict=True)
        for row, mask, action in rows:
            assert (mask, action) in told[row.tobytes()]
        assert 0.5 < batch.masks.float().mean() < 0.95
    for ratio in seen.ratios:
        np.testing.assert_allclose(ratio, 1, atol=1e-5)


@needs_compiler
def test_no_fast_computes_the_same(empty_folder):
    """One update per iteration: all metrics of the first one."""
    assert_no_fast_is_the_same(ppo, SMALL, total_timesteps=128, num_minibatches=1, update_epochs=1)


@needs_compiler
def test_compiled_update_is_the_same(spy):
    assert_compiled_is_the_same(spy, total_timesteps=192)


# Runs


def test_resume_equals_uninterrupted_to_the_byte(monkeypatch, empty_folder):
    small = SMALL | dict(num_envs=2, anneal_lr=False)
    whole = torch.load(train(ppo, small, total_timesteps=512) / "checkpoint.pt", weights_only=True)
    part = train(ppo, small, total_timesteps=256)
    call(ppo, monkeypatch, "--resume", part, "--total-timesteps", 512)
    again = torch.load(part / "checkpoint.pt", weights_only=True)

    def compare(left, right, where):
        if isinstance(left, dict):
            assert left.keys() == right.keys(), where
            for name, value in left.items():
                compare(value, right[name], f"{where}/{name}")
        elif isinstance(left, (list, tuple)):
            assert len(left) == len(right), where
            for i, (x, y) in enumerate(zip(left, right, strict=True)):
                compare(x, y, f"{where}/{i}")
        elif isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype and torch.equal(left, right), where
        else:
            assert left == right, where

    compare(whole["kept"], again["kept"], "kept")
    assert "actor.0.weight" in whole["kept"]["agent"] and "optimizer" in whole["kept"]


class Target(gym.Env):
    """One step: steer to half the observation, and choose its sign. The best return is 1."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Dict(sign=spaces.Discrete(2), steer=spaces.Box(-1, 1, (1,), np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.x, {}

    def step(self, action):
        right = action["sign"] == (self.x[0] > 0)
        reward = float(right) - 4 * float(action["steer"][0] - self.x[0] / 2) ** 2
        return self.x, reward, True, False, {}


gym.register("Target-v0", Target)


def test_it_learns_both_parts_and_evaluates_the_best_action(monkeypatch, capsys, empty_folder):
    small = SMALL | dict(env_id="Target-v0", num_envs=4, hidden_sizes=(16,), logstd_init=-1.0)
    small |= dict(learning_rate=1e-2, update_epochs=5, compile=False)
    folder = train(ppo, small, total_timesteps=64 * 4 * 30)
    agent, _ = saved(ppo, folder)
    obs = torch.linspace(-0.9, 0.9, 20)[:, None]
    with torch.no_grad():
        _, best = agent.act(obs, torch.ones(20, 2, dtype=torch.bool), deterministic=True)
    np.testing.assert_allclose(best[:, 0], obs[:, 0] / 2, atol=0.2)
    np.testing.assert_array_equal(best[:, 1], obs[:, 0] > 0)
    capsys.readouterr()
    call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", 100)
    out = capsys.readouterr().out
    assert "100 episodes of 1 decisions" in out
    assert float(out.split("return ")[-1].split()[0]) > 0.9


@pytest.mark.parametrize("masked", [False, True])
def test_exported_policy_equals_the_agent(masked, tmp_path):
    """Both kinds of actions under the names, types and shapes that Unity's inference reads, and Unity's checks."""
    agent = agent_of()
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    agent.eval()
    path = tmp_path / "policy.onnx"
    export.export(agent, SPEC, path)
    session = onnxruntime.InferenceSession(path)
    assert [x.name for x in session.get_inputs()] == ["obs_0", "obs_1", "action_masks"]
    outputs = {x.name: x.type for x in session.get_outputs()}
    assert outputs == {
        "continuous_actions": "tensor(float)",
        "deterministic_continuous_actions": "tensor(float)",
        "discrete_actions": "tensor(int64)",
        "deterministic_discrete_actions": "tensor(int64)",
        "version_number": "tensor(float)",
        "memory_size": "tensor(float)",
        "continuous_action_output_shape": "tensor(float)",
        "discrete_action_output_shape": "tensor(float)",
    }
    obs = 3 * observations(500)
    rng = np.random.default_rng(1)
    mask = masks_of(SPEC["branches"], 500, rng) if masked else np.ones((500, 9), bool)
    given = {"obs_0": obs[:, :2], "obs_1": obs[:, 2:], "action_masks": mask.astype(np.float32)}
    out = dict(zip(outputs, session.run(list(outputs), given), strict=True))
    with torch.no_grad():
        _, best = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)
    np.testing.assert_allclose(out["deterministic_continuous_actions"], best[:, :2], atol=1e-5)
    np.testing.assert_array_equal(out["deterministic_discrete_actions"], best[:, 2:])
    assert out["continuous_action_output_shape"].tolist() == [2]
    assert out["discrete_action_output_shape"].tolist() == [[3, 2, 4]]

    # Sampled actions: within the bounds and the masks, and not always the best ones
    sampled = out["continuous_actions"]
    assert (sampled >= SPEC["low"]).all() and (sampled <= SPEC["high"]).all()
    for column, allowed in zip(
        out["discrete_actions"].T, split(mask, SPEC["branches"]), strict=True
    ):
        assert allowed[np.arange(500), column].all()
    assert (out["discrete_actions"] != out["deterministic_discrete_actions"]).any()
    assert not np.allclose(sampled, out["deterministic_continuous_actions"], atol=1e-3)

    sensors = [("Body", (2,)), ("Eyes", (3,))]
    behavior = unity_model.Behavior("Mine", sensors, 2, [3, 2, 4])
    for deterministic in (False, True):
        assert unity_model.check_model(path, behavior, deterministic=deterministic) == []
    for wrong in ((1, [3, 2, 4]), (2, [3, 2]), (2, [3, 2, 5])):
        assert unity_model.check_model(path, unity_model.Behavior("Mine", sensors, *wrong))


# A changed copy

TRUNK = (
    (
        "        self.actor = mlp(sizes, args.activation, num_outputs, output_std=0.01)\n"
        "        self.critic = mlp(sizes, args.activation, 1, output_std=1.0)\n",
        "        self.trunk = nn.Sequential(layer_init(nn.Linear(sizes[0], 16)), nn.Tanh())\n"
        "        self.actor = nn.Sequential(self.trunk, layer_init(nn.Linear(16, num_outputs), 0.01))\n"
        "        self.critic = nn.Sequential(self.trunk, layer_init(nn.Linear(16, 1), 1.0))\n",
    ),
)
OPTIMIZER = (("optimizer = fast.Adam(", "optimizer = torch.optim.RAdam("),)
OLD_LAYER = '{"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()'
LAYERNORM = ((OLD_LAYER, f"nn.Sequential(nn.LayerNorm(size_out), {OLD_LAYER})"),)
DROPOUT = ((OLD_LAYER, f"nn.Sequential({OLD_LAYER}, nn.Dropout(0.5))"),)
CHANGES = {
    "trunk": TRUNK,
    "optimizer": OPTIMIZER,
    "layer norm": LAYERNORM,
    "dropout": DROPOUT,
    "trunk and optimizer": TRUNK + OPTIMIZER,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_acts_learns_evaluates_and_is_exported(change, monkeypatch, empty_folder):
    script = copy_of("ppo_hybrid_multiagent.py", *CHANGES[change])
    folder = train(script, SMALL | dict(num_envs=2, total_timesteps=384, compile=False))
    agent, _ = saved(script, folder)
    start = script.Agent(
        torch.load(folder / "checkpoint.pt", weights_only=True)["spec"], script.Args(**SMALL)
    )
    for (name, new), old in zip(agent.named_parameters(), start.parameters(), strict=True):
        assert not torch.equal(new, old), f"{name} learned"
    obs = 3 * np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    mask = masks_of([3, 2], 50, np.random.default_rng(0))
    act = fast.Acting(agent)
    torch.manual_seed(1)
    actions, _ = act(obs, mask)
    assert act.enabled
    torch.manual_seed(1)
    with torch.no_grad():
        expected, _ = agent.act(torch.as_tensor(obs), torch.as_tensor(mask))
        _, best = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    call(script, monkeypatch, "--resume", folder, "--total-timesteps", 512)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 3)
    agent, _ = saved(script, folder)
    with torch.no_grad():
        _, best = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)
    call(script, monkeypatch, "--export", folder)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    names = ["deterministic_continuous_actions", "deterministic_discrete_actions"]
    given = {"obs_0": obs, "action_masks": mask.astype(np.float32)}
    steer, gear = session.run(names, given)
    np.testing.assert_allclose(steer, best[:, :2], atol=1e-5)
    np.testing.assert_array_equal(gear, best[:, 2:])


# Messages

LINES = [
    ("--env-id Reacher2Dof-v0", "use ppo_continuous_multiagent.py or sac_continuous.py"),
    ("--env-id 3DBall", "use ppo_continuous_multiagent.py or sac_continuous.py"),
    ("--env-id CartPole-v1", "use ppo_discrete_multiagent.py"),
    ("--env-id Basic", "use ppo_discrete_multiagent.py"),
    ("--env-id parity_env:HybridBinary-v0", "and a Dict or Tuple of both kinds"),
    (f"--env-id {HYBRID} --min-obs-std nan", "--min-obs-std nan: must be a finite number"),
    ("--env-id FoodColector", "did you mean"),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)


@pytest.mark.parametrize(
    "script",
    [
        "ppo_continuous_multiagent",
        "ppo_discrete_multiagent",
        "ppo_lstm_multiagent",
        "sac_continuous",
        "crossq_continuous",
        "lbc_discrete",
        "ppo_pixel",
    ],
)
def test_other_scripts_name_this_one(script, tmp_path):
    out = run_script(__import__(script), f"--env-id {HYBRID}", tmp_path)
    assert "ppo_hybrid_multiagent.py" in out.stderr
    assert out.returncode == 1 and len(out.stderr.strip().splitlines()) == 1


def test_make_env_flattens_nested_actions_only():
    env = make_env(HYBRID)
    assert isinstance(env.action_space, HybridSpace) and env.action_space.shape == (4,)
    assert str(env.action_space).endswith("and branches of [3, 2]")
    env.close()
