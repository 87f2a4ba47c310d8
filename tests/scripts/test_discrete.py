"""ppo_discrete_multiagent.py: parity with the real SB3 and with MaskablePPO, masks, branches, export, Basic."""

import sys
from contextlib import closing

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import (
    assert_compiled_is_the_same,
    assert_no_fast_is_the_same,
    assert_parity,
    assert_refused,
    call,
    learn_with_sb3,
    needs_compiler,
    run_script,
    spy_on,
    start_like_sb3,
    train,
    watch,
)
from copies import copy_of, saved
from hypothesis import given, settings
from hypothesis import strategies as st

import ppo_discrete_multiagent as ppo
from envs.make import make_envs
from envs.unity_scenes.basic import Basic
from envs.unity_scenes.player import Academy
from onefile_rl import export, fast
from unity_vec_env import UnityVecEnv

SMALL = dict(
    env_id="CartPole-v1", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8)
)
SPEC = {"obs_dim": 5, "branches": [3, 2, 4], "start": [0, 1, 0], "sensors": [2, 3]}


@pytest.fixture
def spy(monkeypatch, tmp_path):
    return spy_on(ppo, monkeypatch, tmp_path, SMALL)


# Parity


def assert_same_as(model, spy, monkeypatch, env_id, num_envs):
    names = {"actor.4": "action_net", "critic.4": "value_net"}
    for i in ("0", "2"):
        names |= {
            f"actor.{i}": f"mlp_extractor.policy_net.{i}",
            f"critic.{i}": f"mlp_extractor.value_net.{i}",
        }
    first, initial, final = learn_with_sb3(model, names, 5)
    start_like_sb3(ppo, monkeypatch, initial)
    seen = spy(
        env_id=env_id, num_envs=num_envs, num_steps=64, num_minibatches=2 * num_envs, update_epochs=3, gamma=0.97,
        total_timesteps=5 * 64 * num_envs, hidden_sizes=(64, 64), ent_coef=0.01, vf_coef=1.0, anneal_lr=False,
        norm_obs=False, norm_reward=False, seed=3,
    )  # fmt: skip
    obs, masks, actions, logprobs, advantages, returns, values, *_ = (
        x.numpy() for x in seen.batches[0]
    )
    ours = dict(observations=obs, actions=actions, log_probs=logprobs)
    ours |= dict(values=values, advantages=advantages, returns=returns)
    assert_parity(
        seen, ours, first, initial, final, num_envs, 0.97, 5e-4, both=env_id != "CartPole-v1"
    )
    return masks


SB3 = dict(n_steps=64, batch_size=32, n_epochs=3, gamma=0.97, ent_coef=0.01, seed=3, device="cpu")


@pytest.mark.parametrize(
    ("env_id", "num_envs"), [("CartPole-v1", 1), ("CartPole-v1", 8), ("Branches-v0", 4)]
)
def test_parity_with_sb3(spy, monkeypatch, env_id, num_envs):
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO("MlpPolicy", make_vec_env(env_id, num_envs, seed=3), **SB3)
    module = "" if env_id == "CartPole-v1" else "parity_env:"
    assert assert_same_as(model, spy, monkeypatch, module + env_id, num_envs).all()


@pytest.mark.parametrize(("env_id", "num_envs"), [("Masked-v0", 1), ("MaskedBranches-v0", 4)])
def test_masks_are_those_of_maskable_ppo(spy, monkeypatch, env_id, num_envs):
    contrib = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.env_util import make_vec_env

    model = contrib.MaskablePPO("MlpPolicy", make_vec_env(env_id, num_envs, seed=3), **SB3)
    masks = assert_same_as(model, spy, monkeypatch, f"parity_env:{env_id}", num_envs)
    assert 0.2 < masks.mean() < 0.9, "there was something to forbid"


# Choices


def agent_of(branches, seed=0, start=None):
    torch.manual_seed(seed)
    spec = SPEC | {"branches": branches, "start": start or [0] * len(branches)}
    agent = ppo.Agent(spec, ppo.Args(hidden_sizes=(8, 8)))
    for x in agent.actor.parameters():
        torch.nn.init.normal_(x)
    return agent


def policy_of(agent, obs, mask):
    """Return the log-probs of all choices, branch by branch."""
    return agent.get_choice_logprobs(agent.obs_rms(torch.as_tensor(obs)), torch.as_tensor(mask))


def masks_of(branches, count, rng):
    """At random, and at least one choice of each branch."""
    parts = [rng.random((count, size)) < 0.5 for size in branches]
    for part in parts:
        part[np.arange(count), rng.integers(0, part.shape[1], count)] = True
    return np.concatenate(parts, 1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.integers(0, 1000))
def test_a_forbidden_choice_has_probability_0(branches, seed):
    """In sampling, log-prob and entropy; what is allowed sums to 1; log-probs and entropy are torch's own."""
    agent, rng = agent_of(branches, seed), np.random.default_rng(seed)
    obs, mask = rng.normal(size=(200, 5)).astype(np.float32), masks_of(branches, 200, rng)
    with torch.no_grad():
        policy = policy_of(agent, obs, mask)
        for p, allowed in zip(policy, np.split(mask, np.cumsum(branches)[:-1], 1), strict=True):
            assert (p.exp().numpy()[~allowed] == 0).all() and np.allclose(p.exp().sum(1), 1)
        for deterministic in (False, True):
            for enabled in (True, False):
                act = fast.Acting(agent, enabled, deterministic)
                actions = act(obs, mask)[0]
                for column, allowed in zip(
                    actions.T, np.split(mask, np.cumsum(branches)[:-1], 1), strict=True
                ):
                    assert allowed[np.arange(200), column].all()
        actions = torch.as_tensor(agent.act(torch.as_tensor(obs), torch.as_tensor(mask))[0])
        _, logprob, entropy, _ = agent.get_action_and_value(
            torch.as_tensor(obs), torch.as_tensor(mask), actions
        )
        dists = [torch.distributions.Categorical(logits=p) for p in policy]
        expected = sum(d.log_prob(a) for d, a in zip(dists, actions.T, strict=True))
        np.testing.assert_allclose(logprob, expected, atol=1e-5)
        plain = sum(-(p.exp() * p.clamp(min=-50)).sum(1) for p in policy)
        np.testing.assert_allclose(entropy, plain, atol=1e-5)


def test_acting_in_numpy_is_the_module():
    """The same random numbers, the same choices; and it is numpy that acts."""
    agent, rng = agent_of([3, 2, 4], start=[0, 1, 0]), np.random.default_rng(0)
    obs, mask = rng.normal(size=(50, 5)).astype(np.float32), masks_of([3, 2, 4], 50, rng)
    act = fast.Acting(agent)
    for seed in range(20):
        outs = []
        for way in (act, act.act_with_torch):
            torch.manual_seed(seed)
            outs.append(way(obs, mask))
        np.testing.assert_array_equal(outs[0][0], outs[1][0])
        np.testing.assert_array_equal(outs[0][1], outs[0][0] + [0, 1, 0])
    assert act.enabled


def test_choices_are_drawn_by_their_probabilities():
    agent, obs = agent_of([4]), np.tile(np.ones(5, np.float32), (40_000, 1))
    mask = np.tile([True, True, False, True], (40_000, 1))
    act = fast.Acting(agent)
    with torch.no_grad():
        p = policy_of(agent, obs[:1], mask[:1])[0].exp()[0].numpy()
    share = np.bincount(act(obs, mask)[0][:, 0], minlength=4) / 40_000
    np.testing.assert_allclose(share, p, atol=0.01)


def test_first_ratio_is_1(spy):
    """Acting's log-probs are the update's, masks and all."""
    seen = spy(env_id="parity_env:MaskedBranches-v0", num_envs=3, total_timesteps=64 * 3 * 3)
    assert len(seen.ratios) == 3 and all(
        torch.allclose(x, torch.ones_like(x), atol=1e-6) for x in seen.ratios
    )


@pytest.mark.parametrize("crashes", [False, True])
def test_rows_of_mixed_periods_are_what_was_asked_and_chosen(spy, monkeypatch, crashes):
    """Agents that decide, end, vanish and come back at their own pace, and a player that crashes: every row has the
    mask and the choices of its own decision, and with unchanged weights its ratio is 1."""
    record = watch(ppo, monkeypatch, crash_at=60 if crashes else None)
    seen = spy(
        env_id="MixedDiscrete", max_agents=12, num_steps=32, total_timesteps=384 * 2, norm_obs=False
    )
    told = {}
    (obs, infos), masks = record[0], record.masks
    for (actions, (after, *_, following)), mask in zip(record[1:], masks, strict=False):
        for slot in np.flatnonzero(infos["ready"]):
            told.setdefault(obs[slot].tobytes(), []).append(
                (mask[slot].tolist(), actions[slot].tolist())
            )
        obs, infos = after, following
    assert any("restarted" in out[-1] for _, out in record[1:]) == crashes
    for batch in seen.batches:
        for row, mask, action in zip(
            batch.obs.numpy(), batch.masks.tolist(), batch.actions.tolist(), strict=True
        ):
            assert (mask, action) in told[row.tobytes()]
        assert 0.5 < batch.masks.float().mean() < 0.9
    assert all(torch.allclose(x, torch.ones_like(x), atol=1e-6) for x in seen.ratios)


@needs_compiler
def test_no_fast_computes_the_same(empty_folder):
    """One update per iteration: all metrics of the first one."""
    assert_no_fast_is_the_same(
        ppo,
        SMALL,
        env_id="parity_env:MaskedBranches-v0",
        total_timesteps=128,
        num_minibatches=1,
        update_epochs=1,
    )


@needs_compiler
def test_compiled_update_is_the_same(spy):
    assert_compiled_is_the_same(spy, env_id="parity_env:MaskedBranches-v0", total_timesteps=192)


# A changed copy


@pytest.mark.parametrize(
    "layer",
    [
        "nn.Sequential(nn.LayerNorm(size_out), {})",
        "nn.ELU()",
        "nn.Mish()",
        "nn.Sequential({}, nn.Dropout(0.5))",
    ],
)
def test_what_acts_is_what_learns(layer, monkeypatch, empty_folder):
    """In training, in --evaluate and in the exported file it is the module that decides, whatever its layers are."""
    old = '{"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()'
    script = copy_of("ppo_discrete_multiagent.py", (old, layer.format(old)))
    folder = train(
        script, SMALL | dict(env_id="parity_env:MaskedBranches-v0", num_envs=2, total_timesteps=384)
    )
    agent, _ = saved(script, folder)
    rng = np.random.default_rng(0)
    obs, mask = 3 * rng.standard_normal((50, 3)).astype(np.float32), masks_of([3, 2], 50, rng)
    act, chance = fast.Acting(agent), torch.get_rng_state()
    actions = act(obs, mask)[0]
    torch.set_rng_state(chance)
    assert act.enabled != ("Mish" in layer)
    with torch.no_grad():
        np.testing.assert_array_equal(
            actions, agent.act(torch.as_tensor(obs), torch.as_tensor(mask))[0]
        )
        best = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)[0]
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 3)
    call(script, monkeypatch, "--export", folder)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    given = {"obs_0": obs, "action_masks": mask.astype(np.float32)}
    np.testing.assert_array_equal(session.run(["deterministic_discrete_actions"], given)[0], best)


@needs_compiler
def test_an_annealed_coefficient_takes_effect_compiled_or_not(empty_folder):
    line = "            torch.set_num_threads(1)\n"
    anneal = "            args.ent_coef = 0.5 * (1 - iteration / num_iterations)\n"
    plain, script = (
        copy_of("ppo_discrete_multiagent.py", *x) for x in ((), ((line, anneal + line),))
    )
    constant = saved(plain, train(plain, SMALL, total_timesteps=256))[0].state_dict()
    eager, compiled = (
        saved(script, train(script, SMALL, total_timesteps=256, compile=x))[0].state_dict()
        for x in (False, True)
    )
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)
    assert not torch.allclose(constant["actor.0.weight"], eager["actor.0.weight"], atol=1e-5)


# A run's life


@pytest.mark.parametrize("masked", [False, True])
def test_exported_policy_equals_the_agent(masked, tmp_path):
    """Names, shapes and choices that Unity's inference reads; a forbidden choice is never made."""
    agent, rng = agent_of(SPEC["branches"], start=SPEC["start"]), np.random.default_rng(1)
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    export.export(agent, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    assert [x.name for x in session.get_inputs()] == ["obs_0", "obs_1", "action_masks"]
    names = [x.name for x in session.get_outputs()]
    assert names[:2] == ["discrete_actions", "deterministic_discrete_actions"]
    obs = rng.normal(size=(500, 5)).astype(np.float32)
    mask = masks_of(SPEC["branches"], 500, rng) if masked else np.ones((500, 9), bool)
    given = {"obs_0": obs[:, :2], "obs_1": obs[:, 2:], "action_masks": mask.astype(np.float32)}
    sampled, best, _, _, shape = session.run(names, given)
    with torch.no_grad():
        expected = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), deterministic=True)[0]
    np.testing.assert_array_equal(best, expected)
    assert shape.tolist() == [[3, 2, 4]]
    for column, allowed in zip(sampled.astype(int).T, np.split(mask, [3, 5], 1), strict=True):
        assert allowed[np.arange(500), column].all()


def test_resume_equals_uninterrupted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    small = SMALL | dict(env_id="parity_env:MaskedBranches-v0", num_envs=2, anneal_lr=False)
    whole = torch.load(train(ppo, small, total_timesteps=512) / "checkpoint.pt", weights_only=True)
    part = train(ppo, small, total_timesteps=256)
    call(ppo, monkeypatch, "--resume", part, "--total-timesteps", 512)
    again = torch.load(part / "checkpoint.pt", weights_only=True)
    for name, x in whole["kept"]["agent"].items():
        assert torch.equal(x, again["kept"]["agent"][name]), name


def test_evaluate_plays_as_trained(monkeypatch, tmp_path, capsys):
    """Basic, solved in a few seconds, and evaluated with the best choices: 0.93 every time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["ppo_discrete_multiagent.py", "--env-id", "Basic", "--total-timesteps", "16384"],
    )
    ppo.main()
    (folder,) = (tmp_path / "runs").glob("*")
    call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", 32)
    assert "32 episodes of 7 decisions on average: return 0.93 ± 0.00" in capsys.readouterr().out


LINES = [
    ("--env-id Reacher2Dof-v0", "use ppo_continuous_multiagent.py or sac_continuous.py"),
    ("--env-id 3DBall", "use ppo_continuous_multiagent.py or sac_continuous.py"),
    ("--env-id GridWorld", "use ppo_pixel.py for images"),
    ("--env-id DummyPixelsDiscrete-v0", "ppo_pixel.py takes them"),
    ("--env-id CartPole-v1 --min-obs-std nan", "--min-obs-std nan: must be a finite number"),
    ("--env-id CartPole-v0x", "did you mean"),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)


@pytest.mark.parametrize(
    "script", ["ppo_continuous_multiagent", "sac_continuous", "crossq_continuous"]
)
def test_other_scripts_name_this_one(script, tmp_path):
    out = run_script(__import__(script), "--env-id CartPole-v1", tmp_path)
    assert "use ppo_discrete_multiagent.py" in out.stderr


# Envs


def test_masks_of_gymnasium_envs_are_those_of_now():
    args = ppo.Args(env_id="parity_env:MaskedBranches-v0", num_envs=2)
    with closing(make_envs(args, 1)[0]) as envs:
        obs, infos = envs.reset(seed=1)
        for _ in range(30):
            for env, mask in zip(envs.envs, infos["action_mask"], strict=True):
                np.testing.assert_array_equal(env.unwrapped.action_masks(), mask)
            choices = [
                [part.argmax() for part in np.split(mask, [3])] for mask in infos["action_mask"]
            ]
            obs, *_, infos = envs.step(np.array(choices))


def test_basic_is_unitys():
    """Rewards, ends, and an agent that comes back under another id."""
    with closing(UnityVecEnv("Basic")) as envs:
        obs, infos = envs.reset()
        assert envs.num_envs == 1 and envs.behavior == "Basic?team=0" and infos["action_mask"].all()
        assert isinstance(
            envs.single_action_space, gym.spaces.MultiDiscrete
        ) and envs.single_action_space.nvec == [3]
        for choice, steps, total in ((2, 7, 0.93), (1, 3, 0.07)):
            rewards = []
            for step in range(steps):
                assert obs[0].argmax() == 10 + (step if choice == 2 else -step) and obs.sum() == 1
                obs, reward, terminated, truncated, infos = envs.step(np.array([[choice]]))
                rewards.append(reward[0])
                assert (
                    terminated[0] == (step == steps - 1) and not truncated[0] and infos["ready"][0]
                )
            assert sum(rewards) == pytest.approx(total) and obs[0].argmax() == 10
        obs, reward, *_ = envs.step(np.array([[0]]))
        assert obs[0].argmax() == 10 and reward[0] == pytest.approx(-0.01)


def test_a_film_of_a_classic_env_says_nothing_else(empty_folder):
    """And shows something that moves."""
    folder = train(ppo, SMALL, total_timesteps=64)
    line = f"--evaluate {folder} --eval-episodes 1 --capture-video"
    out = run_script(ppo, line, ".")
    assert out.returncode == 0 and out.stderr == "" and "evaluation.mp4" in out.stdout
    frames = imageio.imread(folder / "videos" / "evaluation.mp4")
    assert len(frames) > 5 and np.abs(frames[0].astype(int) - frames[-1]).mean() > 0.1


def test_basics_agent_comes_back_under_another_id():
    """Unity loads the scene again."""
    sent = []

    def exchange(outbox):
        sent.extend((ids.tolist(), done) for _, ids, _, _, done, _ in outbox)
        return np.zeros((1, 0)), np.full((1, 1), 2)

    academy = Academy(Basic(1, 0, {}), 1, exchange)
    for _ in range(16):
        academy.step()
    assert [ids for ids, done in sent if done] == [[0], [1]]
    assert [ids for ids, done in sent if not done] == [[0]] * 7 + [[1]] * 7 + [[2]] * 2
