"""ppo_continuous_multiagent.py: parity with the real SB3, advantages, truncation, rows of mixed periods, determinism,
bad input."""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import (
    assert_compiled_is_the_same,
    assert_no_fast_is_the_same,
    assert_parity,
    assert_refused,
    learn_with_sb3,
    needs_compiler,
    spy_on,
    start_like_sb3,
    train,
    trajectories,
    watch,
)
from hypothesis import given
from hypothesis import strategies as st

import ppo_continuous_multiagent as ppo
from onefile_rl import checkpoints, fast

SMALL = dict(
    env_id="parity_env:Parity-v0",
    num_steps=64,
    num_minibatches=4,
    update_epochs=2,
    hidden_sizes=(8, 8),
)


@pytest.fixture
def spy(monkeypatch, tmp_path):
    return spy_on(ppo, monkeypatch, tmp_path, SMALL)


# Parity with SB3


class Freeze(pytest.importorskip("stable_baselines3").common.callbacks.BaseCallback):
    """Difference (1): SB3's VecNormalize, with statistics that change between iterations only."""

    def _on_rollout_start(self):
        venv = self.training_env
        if not hasattr(self, "obs"):
            self.discounted = np.zeros(venv.num_envs)
        else:
            venv.obs_rms.update(np.concatenate(self.obs))
            venv.ret_rms.update(np.concatenate(self.returns))
        self.obs, self.returns, self.now = [], [], venv.get_original_obs()
        self.model._last_obs = venv.normalize_obs(self.now)

    def _on_step(self):
        venv = self.training_env
        self.obs.append(self.now)
        self.now = venv.get_original_obs()
        self.discounted = self.discounted * venv.gamma + venv.get_original_reward()
        self.returns.append(self.discounted.copy())
        self.discounted[self.locals["dones"]] = 0
        return True


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("normalize", [False, True])
def test_parity_with_sb3(spy, monkeypatch, num_envs, normalize):
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    iterations, steps = 5, 64
    venv = make_vec_env("Parity-v0", num_envs, seed=3)
    if normalize:
        venv = VecNormalize(venv, training=False, gamma=0.97)
    settings = dict(n_steps=steps, batch_size=32, n_epochs=3, gamma=0.97, ent_coef=0.01)
    model = PPO("MlpPolicy", venv, **settings, seed=3, device="cpu")
    names = {"actor_logstd": "log_std", "actor_mean.4": "action_net", "critic.4": "value_net"}
    for i in ("0", "2"):
        names |= {
            f"actor_mean.{i}": f"mlp_extractor.policy_net.{i}",
            f"critic.{i}": f"mlp_extractor.value_net.{i}",
        }
    first, initial, final = learn_with_sb3(
        model, names, iterations, Freeze() if normalize else None
    )
    start_like_sb3(ppo, monkeypatch, initial)
    seen = spy(
        num_envs=num_envs, num_steps=steps, num_minibatches=steps * num_envs // 32, update_epochs=3,
        total_timesteps=iterations * steps * num_envs, hidden_sizes=(64, 64), gamma=0.97, ent_coef=0.01, vf_coef=1.0,
        anneal_lr=False, norm_obs=normalize, norm_reward=normalize, min_obs_std=0.0, seed=3,
    )  # fmt: skip
    obs, actions, logprobs, advantages, returns, values, *_ = (x.numpy() for x in seen.batches[0])
    ours = dict(observations=obs, actions=actions, log_probs=logprobs)
    ours |= dict(values=values, advantages=advantages, returns=returns)
    assert_parity(seen, ours, first, initial, final, num_envs, 0.97)


# The advantage


def test_advantage_of_a_geometric_series():
    """Reward 1 for ever, value 0, an episode of n steps that ends: the sum of (gamma lambda)^k."""
    n, gamma, lam = 12, 0.9, 0.8
    advantages = ppo.gae([1.0] * n, [0.0] * n, [0.0] * n, [True] * (n - 1) + [False], gamma, lam)
    expected = [(1 - (gamma * lam) ** (n - i)) / (1 - gamma * lam) for i in range(n)]
    np.testing.assert_allclose(advantages, expected)


def test_advantage_is_zero_where_values_are_true():
    gamma, n = 0.9, 20
    true = 1 / (1 - gamma)
    advantages = ppo.gae([1.0] * n, [true] * n, [true] * n, [True] * (n - 1) + [False], gamma, 0.95)
    np.testing.assert_allclose(advantages, 0, atol=1e-12)


class Blank(torch.nn.Module):
    """Values of 0, so that with a discount of 0 an advantage is its reward."""

    def get_action_and_value(self, obs, action):
        return action, obs[:, 0], torch.tensor(0.0), torch.zeros(len(obs))

    def get_value(self, obs):
        return torch.zeros(len(obs))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60), st.integers(0, 9))
def test_rows_are_sorted_by_agent_and_time(events, spare):
    """Agents decide and get their rewards in any order. The k-th reward of an agent belongs to its k-th decision, and
    the rows of an agent stand together, in time. Rows beyond the batch are the first ones of the next batch, and a
    pending decision is stored when its reward arrives."""
    rollout, args = ppo.Rollout(100, 4, 1, 1), ppo.Args(gamma=0.0, norm_reward=False)
    decided, closing, waiting = [], [], set()
    no = np.zeros(4, bool)
    for a, b in events:
        if a not in waiting:
            rollout.decide(np.array([a]), [[len(decided)]], [[-len(decided)]])
            decided.append(a)
            waiting.add(a)
        if b in waiting:
            after = np.full((4, 1), 1000.0 + len(closing))
            rollout.add(np.array([b]), np.full(4, len(closing)), no, no, after, {}, 0.9)
            closing.append(b)
            waiting.discard(b)
    rewards = {k: [i for i, slot in enumerate(closing) if slot == k] for k in range(4)}
    decisions = {k: [i for i, slot in enumerate(decided) if slot == k] for k in range(4)}
    pairs = [pair for k in range(4) for pair in zip(decisions[k], rewards[k], strict=False)]
    for part in (
        range(0, max(0, len(closing) - spare)),
        range(max(0, len(closing) - spare), len(closing)),
    ):
        if not len(part):
            continue
        batch = ppo.make_batch(Blank(), rollout, len(part), 1.0, args)
        expected = [pair for pair in pairs if pair[1] in part]
        made = zip(batch.obs[:, 0].tolist(), batch.advantages.tolist(), strict=True)
        assert [*made] == expected
        assert (batch.actions[:, 0] == -batch.obs[:, 0]).all()
        assert (batch.next_obs[:, 0] == 1000 + batch.advantages).all()
        rollout.remove(len(part))
    assert rollout.size == 0
    assert [rollout.pending_obs[k, 0] for k in sorted(waiting)] == [
        decisions[k][-1] for k in sorted(waiting)
    ]


def test_a_slow_rank_uses_rows_twice():
    rollout, args = ppo.Rollout(10, 1, 1, 1), ppo.Args(gamma=0.0, norm_reward=False)
    for i in range(3):
        rollout.decide(np.array([0]), [[i]], [[0]])
        rollout.add(
            np.array([0]),
            np.array([float(i)]),
            np.zeros(1, bool),
            np.zeros(1, bool),
            np.ones((1, 1)),
            {},
            0.9,
        )
    batch = ppo.make_batch(Blank(), rollout, 8, 1.0, args)
    assert batch.advantages.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_next_observations_are_final_ones_at_an_end(spy):
    """Parity-v0 ends in both ways: `next_obs` is the next row's observation, or the final one of the episode."""
    batch = spy(num_envs=2, total_timesteps=128, norm_obs=False).batches[0]
    done = (batch.terminated | batch.truncated).numpy()
    following = np.r_[batch.obs[1:], batch.obs[:1]]
    equal = (batch.next_obs.numpy() == following).all(1)
    last = np.arange(len(done)) % 64 == 63
    assert equal[~done & ~last].all() and not equal[done].any() and done.sum() > 4


def test_truncation_is_not_termination(spy):
    """Reward 1 at every step and a time limit after each: the value is 1 / (1 - gamma) = 5. Were it a death, it would
    be 1."""
    seen = spy(
        env_id="parity_env:OneStep-v0", gamma=0.8, num_steps=64, num_minibatches=1, update_epochs=20,
        total_timesteps=64 * 60, learning_rate=3e-3, norm_obs=False, norm_reward=False, anneal_lr=False,
        max_grad_norm=1e9,
    )  # fmt: skip
    assert seen.agent.critic(torch.ones(1, 1)).item() == pytest.approx(5, abs=0.3)


@pytest.mark.parametrize("crashes", [False, True])
def test_rows_of_mixed_periods_are_those_of_each_agent(spy, monkeypatch, crashes):
    """Advantages of a scene whose agents decide, end, vanish and come back at their own pace, against each agent's own
    trajectory.

    When the player crashes, open decisions are dropped, and their observations end the trajectories as a time limit
    would.
    """
    record = watch(ppo, monkeypatch, crash_at=60 if crashes else None)
    settings = dict(
        num_steps=32,
        num_minibatches=4,
        norm_obs=False,
        norm_reward=False,
        gamma=0.9,
        learning_rate=1e-12,
    )
    seen = spy(env_id="Mixed", max_agents=12, total_timesteps=384, **settings)
    value = lambda obs: seen.agent.critic(torch.as_tensor(obs[None])).item()
    expected = {}
    for trajectory in trajectories(record):
        advantage = 0.0
        for obs, _, reward, next_obs, terminated in reversed(trajectory):
            following = 0.0 if terminated else value(next_obs)
            advantage = reward + 0.9 * following - value(obs) + 0.9 * 0.95 * advantage
            expected.setdefault(obs.tobytes(), []).append(
                advantage
            )  # after a crash the first observations come again
    b_obs, _, _, b_advantages, *_ = seen.batches[0]
    assert any("restarted" in out[-1] for _, out in record[1:]) == crashes
    assert len(b_obs) == 384 and len({o.numpy().tobytes() for o in b_obs}) > 370
    for row, advantage in zip(b_obs.numpy(), b_advantages.tolist(), strict=True):
        assert any(advantage == pytest.approx(e, abs=1e-4) for e in expected[row.tobytes()])


# The update


SPEC = {"obs_dim": 5, "action_dim": 3, "sensors": [5], "low": -1.0, "high": 1.0}


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_policy_acts_as_the_network_does(activation):
    """The policy that acts is derived in numpy; what learns is torch's."""
    agent = ppo.Agent(SPEC, ppo.Args(**SMALL, activation=activation))
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    torch.nn.init.normal_(agent.actor_mean[-1].weight)
    torch.nn.init.normal_(agent.actor_logstd)
    obs = 10 * torch.randn(64, 5)
    act = fast.Acting(agent)
    torch.manual_seed(0)
    actions, env_actions = act(obs.numpy())
    assert act.enabled
    torch.manual_seed(0)
    with torch.no_grad():
        expected = agent.actor_mean(agent.obs_rms(obs)) + agent.actor_logstd.exp() * torch.randn(
            64, 3
        )
    np.testing.assert_allclose(actions, expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(env_actions, expected.clamp(-1, 1).numpy(), atol=1e-5)


@pytest.mark.parametrize("env_id", ["parity_env:Parity-v0", "Mixed"])
def test_first_ratio_of_every_update_is_one(spy, env_id):
    seen = spy(
        env_id=env_id, max_agents=12 if env_id == "Mixed" else None, total_timesteps=64 * 12 * 3
    )
    assert len(seen.ratios) >= 3
    np.testing.assert_allclose(torch.cat(seen.ratios), 1, atol=1e-5)


def test_target_kl_stops_before_the_step(spy):
    """The first step finds a KL of 0 and is taken; the second one finds the first one's, and is not."""
    stopped = spy(target_kl=1e-9, total_timesteps=64, update_epochs=5).agent.state_dict()
    (path,) = Path("runs").glob("*/checkpoint.pt")
    assert torch.load(path, weights_only=True)["kept"]["optimizer"]["state"][0]["step"] == 1
    assert torch.isfinite(stopped["actor_logstd"]).all()


@needs_compiler
def test_no_fast_computes_the_same(empty_folder):
    """One update per iteration: all metrics of the first one."""
    assert_no_fast_is_the_same(ppo, SMALL, total_timesteps=128, num_minibatches=1, update_epochs=1)


@needs_compiler
def test_compiled_update_is_the_same(spy):
    assert_compiled_is_the_same(spy, total_timesteps=256)


def test_two_runs_with_one_seed_are_equal(spy):
    first = {k: v.clone() for k, v in spy(total_timesteps=256).agent.state_dict().items()}
    second = spy(total_timesteps=256).agent.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = spy(total_timesteps=256, seed=2).agent.state_dict()
    assert not torch.equal(first["actor_mean.0.weight"], other["actor_mean.0.weight"])


def test_nested_observations_are_flattened(spy):
    plain = spy(total_timesteps=128).agent.state_dict()["obs_rms.mean"].clone()
    nested = spy(env_id="parity_env:Nested-v0", total_timesteps=128).agent.state_dict()[
        "obs_rms.mean"
    ]
    assert torch.equal(plain, nested)


def test_statistics_are_saved_with_the_agent(spy):
    seen = spy(total_timesteps=256)
    (path,) = Path("runs").glob("*/checkpoint.pt")
    state = torch.load(path, weights_only=True)
    agent = state["kept"]["agent"]
    assert (
        torch.equal(agent["obs_rms.mean"], seen.agent.obs_rms.mean) and agent["obs_rms.count"] > 250
    )


def test_a_loss_that_is_not_a_number_stops_the_run(spy):
    with pytest.raises(FloatingPointError, match="iteration 1: a loss or gradient is not a number"):
        spy(learning_rate=1e29, total_timesteps=128)
    (path,) = Path("runs").glob("*/checkpoint.pt")
    assert all(
        torch.isfinite(v).all()
        for v in torch.load(path, weights_only=True)["kept"]["agent"].values()
    )


# Bad input


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--env-id CartPole-v1", "use ppo_discrete_multiagent.py"),
        ("--env-id HalfCheeta-v5", "did you mean HalfCheetah-v5"),
        (
            "--env-id parity_env:Parity-v0 --num-minibatches 31",
            "--num-minibatches 31 does not divide the batch of 1 x 2048 = 2048",
        ),
        ("--env-id parity_env:Parity-v0 --total-timesteps 100", "less than one batch"),
        ("--env-id parity_env:Parity-v0 --gamma 1.5", "--gamma 1.5: must be between 0 and 1"),
        ("--env-id parity_env:Parity-v0 --num-envs -1", "--num-envs -1: must be above 0"),
        ("--env-id parity_env:Parity-v0 --device cuda:7", "--device cuda:7: not on this machine"),
        ("--env-id Crawler --num-envs 4", "add players with --num-players"),
        ("--env-id parity_env:Parity-v0 --compile", "--compile needs a C++ compiler"),
        ("--unity-path ./nowhere", "no player found"),
    ],
)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)


def test_presets_yield_to_the_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "train", seen.append)
    monkeypatch.setattr(sys, "argv", ["ppo", "--env-id", "Crawler", "--gamma", "0.9"])
    ppo.main()
    assert (seen[0].gamma, seen[0].hidden_sizes, seen[0].total_timesteps) == (
        0.9,
        (512, 512, 512),
        10_000_000,
    )


def test_help_shows_the_presets(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo", "--env-id", "Crawler", "--help"])
    with pytest.raises(SystemExit):
        ppo.main()
    assert "10000000" in capsys.readouterr().out


def test_importing_starts_nothing():
    assert gym.spec("HalfCheetah-v5") and callable(ppo.main)


def test_an_annealed_bonus_falls_to_zero(monkeypatch, empty_folder):
    """Linearly, from iteration to iteration; what is saved is what was given."""
    seen, loss = [], ppo.ppo_loss

    def watched(agent, mb, args):
        seen.append(args.ent_coef)
        return loss(agent, mb, args)

    monkeypatch.setattr(ppo, "ppo_loss", watched)
    small = dict(
        env_id="parity_env:Parity-v0",
        num_steps=32,
        num_minibatches=2,
        update_epochs=1,
        total_timesteps=128,
    )
    folder = train(ppo, small, ent_coef=0.4, anneal_ent=True)
    np.testing.assert_allclose(seen, np.repeat([0.4, 0.3, 0.2, 0.1], 2))
    assert checkpoints.load(folder, ppo.__file__)[1]["args"]["ent_coef"] == 0.4
    seen.clear()
    train(ppo, small, ent_coef=0.4)
    assert set(seen) == {0.4}
