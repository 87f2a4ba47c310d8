"""ppo_lstm_multiagent.py: parity with RecurrentPPO, the LSTM state of each agent, sequences, export, changed copies."""

import sys
from dataclasses import replace

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import (
    ROOT,
    assert_refused,
    call,
    curve,
    learn_with_sb3,
    start_like_sb3,
    stop_after,
    train,
    trajectories,
    watch,
)
from copies import assert_equal_states, copy_of, saved, state_of
from hypothesis import given
from hypothesis import strategies as st

import ppo_lstm_multiagent as ppo
from onefile_rl import export, fast
from onefile_rl.evaluate import play_vectors

NAME = "ppo_lstm_multiagent.py"
SMALL = dict(
    env_id="parity_env:MaskedBranches-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8,),
    memory_size=12, sequence_length=5,
)  # fmt: skip
SPEC = {"obs_dim": 5, "branches": [3, 2, 4], "start": [0, 0, 0], "sensors": [2, 3], "memory": 12}
STEPPED = "Stepping the memory with PyTorch (slower): its step() is not the LSTM of fast/lstm.py"
BY_TORCH = "Acting with PyTorch (slower)"


def random_masks(branches, count, rng):
    """Return random action masks that allow at least one choice of each branch."""
    parts = [rng.random((count, size)) < 0.5 for size in branches]
    for part in parts:
        part[np.arange(count), rng.integers(0, part.shape[1], count)] = True
    return np.concatenate(parts, 1)


def random_inputs(count, rng, branches=(3, 2, 4), obs_dim=5):
    """Return random arguments of agent.act: observations, masks and LSTM states."""
    obs = rng.normal(size=(count, obs_dim)).astype(np.float32)
    states = rng.normal(size=(count, 24)).astype(np.float32)
    return obs, random_masks(branches, count, rng), states


def spy_on(script, monkeypatch, tmp_path):
    """Return a list that is filled by a run: the agent, then each batch with its ratios and the changes of its values.

    Both are computed sequence by sequence, before the first update on the batch.
    """
    monkeypatch.chdir(tmp_path)
    make_batch, Agent, seen = script.make_batch, script.Agent, []

    def spied_agent(*args):
        agent = Agent(*args)
        if not seen:
            seen.append(agent)
        return agent

    def spied_batch(agent, rollout, batch_size, reward_scale, args):
        batch = make_batch(agent, rollout, batch_size, reward_scale, args)
        inds, ratios, changes = [], [], []
        state = np.random.get_state()
        with torch.no_grad():
            for mb_inds, sizes in script.minibatches(batch.begins, args):
                mb = script.Batch(*(column[mb_inds] for column in batch))
                inputs = (mb.obs, mb.masks, mb.lstm_states[: sizes[0]], mb.actions, sizes)
                _, newlogprob, _, newvalue, _ = agent.get_action_and_value(*inputs)
                inds.append(mb_inds)
                ratios.append((newlogprob - mb.logprobs).exp())
                changes.append(newvalue - mb.values)
        np.random.set_state(state)
        assert sorted(torch.cat(inds).tolist()) == [*range(len(batch.obs))]
        seen.append((batch, torch.cat(ratios), torch.cat(changes)))
        return batch

    monkeypatch.setattr(script, "Agent", spied_agent)
    monkeypatch.setattr(script, "make_batch", spied_batch)
    return seen


def assert_learns_what_it_acts(seen):
    """Assert that with unchanged weights all ratios are 1, and all values are those of the rollout."""
    for _, ratios, changes in seen[1:]:
        np.testing.assert_allclose(ratios, 1, atol=1e-5)
        np.testing.assert_allclose(changes, 0, atol=1e-5)


# Parity


@pytest.mark.parametrize("num_envs", [1, 4])
def test_first_rollout_losses_and_weights_are_those_of_recurrent_ppo(
    num_envs, monkeypatch, tmp_path
):
    """With one minibatch of all rows: the columns of the first batch, three losses, and the weights after them."""
    contrib = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.env_util import make_vec_env

    policy_kwargs = dict(net_arch=dict(pi=[], vf=[]), lstm_hidden_size=6)
    model = contrib.RecurrentPPO(
        "MlpLstmPolicy", make_vec_env("Branches-v0", num_envs, seed=3), n_steps=32, batch_size=32 * num_envs,
        n_epochs=1, gamma=0.97, ent_coef=0.01, policy_kwargs=policy_kwargs, seed=3, device="cpu",
    )  # fmt: skip
    names = {"actor": "action_net", "critic": "value_net"}
    for part in ("actor", "critic"):
        for layer in ("ih", "hh"):
            for kind in ("weight", "bias"):
                names[f"{part}_memory.linear_{layer}.{kind}"] = f"lstm_{part}.{kind}_{layer}_l0"

    losses = []
    learn = type(model).train

    def learn_and_log(model):
        learn(model)
        logged = model.logger.name_to_value
        losses.append(
            [
                logged[f"train/{name}"]
                for name in ("policy_gradient_loss", "value_loss", "entropy_loss")
            ]
        )

    with monkeypatch.context() as patched:
        patched.setattr(
            np.random, "randint", lambda *_: 0
        )  # no random cut of a sequence: difference (6)
        patched.setattr(type(model), "train", learn_and_log)
        first, initial, final = learn_with_sb3(model, names, 3)

    seen = spy_on(ppo, monkeypatch, tmp_path)
    start_like_sb3(ppo, monkeypatch, initial)
    args = ppo.Args(
        env_id="parity_env:Branches-v0", num_envs=num_envs, num_steps=32, num_minibatches=1, update_epochs=1,
        total_timesteps=3 * 32 * num_envs, hidden_sizes=(), memory_size=12, sequence_length=32, ent_coef=0.01,
        vf_coef=1.0, gamma=0.97, anneal_lr=False, norm_obs=False, norm_reward=False, seed=3, exp_name="parity",
    )  # fmt: skip
    ppo.train(args)
    batch, _, _ = seen[1]
    ours = dict(
        observations=batch.obs, actions=batch.actions, log_probs=batch.logprobs, values=batch.values
    )
    ours |= dict(advantages=batch.advantages, returns=batch.returns)
    for key, x in ours.items():
        np.testing.assert_allclose(
            x.numpy().squeeze(), first[key], atol=1e-5, rtol=1e-5, err_msg=key
        )
    logged = curve(next(tmp_path.glob("runs/*")))
    for k, (policy_loss, value_loss, entropy_loss) in enumerate(losses):
        ours = [logged[f"losses/{name}"][k][1] for name in ("policy_loss", "value_loss", "entropy")]
        np.testing.assert_allclose(
            ours, [policy_loss, value_loss / 2, -entropy_loss], atol=1e-5, rtol=1e-5
        )
    state = seen[0].state_dict()
    for key, x in final.items():
        np.testing.assert_allclose(state[key], x, atol=1e-4, err_msg=key)
        assert not np.allclose(x, initial[key], atol=1e-4), "they learned"


# The LSTM


def test_forget_bias_keeps_the_cells():
    """Without inputs and other weights, a step multiplies the cells by sigmoid(forget_bias)."""
    cells = {}
    for bias in (0.0, 2.0):
        memory = ppo.Memory(5, 12, bias)
        for name, x in memory.named_parameters():
            if name != "linear_ih.bias":
                x.data.zero_()
        memory.linear_ih.bias.data.zero_()
        memory.linear_ih.bias.data[6:12] = bias
        state = torch.cat([torch.zeros(1, 6), torch.ones(1, 6)], 1)
        for _ in range(24):
            _, state = memory.step(torch.zeros(1, 5), state)
        cells[bias] = state[0, -1].item()
    assert cells[0.0] == pytest.approx(0.5**24, rel=1e-4) and cells[2.0] == pytest.approx(
        0.8808**24, rel=1e-2
    )

    args, agents = ppo.Args(hidden_sizes=(8,), memory_size=8), []
    for bias in (2.0, 0.0):
        torch.manual_seed(0)
        agents.append(ppo.Agent(SPEC | {"memory": 8}, replace(args, forget_bias=bias)))
    for name in ("actor_memory", "critic_memory"):
        with_bias, without = (getattr(agent, name).linear_ih.bias for agent in agents)
        np.testing.assert_allclose(
            (with_bias - without).detach(), [0] * 4 + [2] * 4 + [0] * 8, atol=1e-6
        )


def test_memory_is_torchs_lstm():
    """Outputs of `step`, and outputs and gradients of fast.lstm, are those of nn.LSTM."""
    rng, memories = np.random.default_rng(0), [ppo.Memory(5, 12) for _ in range(2)]
    lengths = np.sort(rng.integers(1, 9, 4))[::-1].copy()
    sizes = torch.as_tensor((lengths > np.arange(lengths[0])[:, None]).sum(1))
    num_rows = int(sizes.sum())
    x, states, weights = (
        torch.randn(2, num_rows, 5),
        torch.randn(2, 4, 12),
        torch.randn(2, num_rows, 6),
    )
    pre = torch.stack(
        [m.linear_ih(part) + m.linear_hh.bias for m, part in zip(memories, x, strict=True)]
    )
    outputs = fast.lstm(pre, torch.stack([m.linear_hh.weight for m in memories]), states, sizes)
    ours = torch.autograd.grad(
        (outputs * weights).sum(), [p for m in memories for p in m.parameters()]
    )
    for k, memory in enumerate(memories):
        lstm = torch.nn.LSTM(5, 6)
        parameters = {
            "weight_ih_l0": memory.linear_ih.weight,
            "weight_hh_l0": memory.linear_hh.weight,
        }
        parameters |= {"bias_ih_l0": memory.linear_ih.bias, "bias_hh_l0": memory.linear_hh.bias}
        lstm.load_state_dict(parameters)
        packed = torch.nn.utils.rnn.PackedSequence(x[k], sizes)
        expected, _ = lstm(packed, tuple(part[None].contiguous() for part in states[k].chunk(2, 1)))
        np.testing.assert_allclose(outputs[k].detach(), expected.data.detach(), atol=1e-6)
        (expected.data * weights[k]).sum().backward()
        grads = [lstm.weight_ih_l0, lstm.bias_ih_l0, lstm.weight_hh_l0, lstm.bias_hh_l0]
        for a, b in zip(ours[4 * k : 4 * k + 4], grads, strict=True):
            np.testing.assert_allclose(a, b.grad, atol=1e-5)
        with torch.no_grad():
            state, longest = states[k, :1], []
            for step in range(
                int(lengths[0])
            ):  # the longest sequence is the first one of each step
                output, state = memory.step(x[k, [int(sizes[:step].sum())]], state)
                longest.append(output[0])
        rows = np.concatenate([[0], np.cumsum(sizes.tolist())[:-1]])
        np.testing.assert_allclose(torch.stack(longest), expected.data.detach()[rows], atol=1e-6)


def test_second_derivatives_are_refused():
    """numpy computes the first derivatives only."""
    pre = torch.randn(1, 3, 8, requires_grad=True)
    outputs = fast.lstm(pre, torch.randn(1, 8, 2), torch.zeros(1, 3, 4), torch.tensor([3]))
    (grad,) = torch.autograd.grad((outputs**2).sum(), pre, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_actor_and_critic_have_an_lstm_each():
    """Difference (10): the value has no gradient in the policy's LSTM, and the other way round."""
    agent = ppo.Agent(SPEC, ppo.Args(**SMALL))
    inputs = torch.randn(3, 5), torch.ones(3, 9, dtype=bool), torch.randn(3, 24)
    _, logprob, _, value, _ = agent.get_action_and_value(*inputs)
    for output, own in [(logprob, "actor_memory"), (value, "critic_memory")]:
        for name in ("actor_memory", "critic_memory"):
            weight = getattr(agent, name).linear_ih.weight
            (grad,) = torch.autograd.grad(
                output.sum(), weight, allow_unused=True, retain_graph=True
            )
            assert (grad is not None) == (name == own)


# Sequences


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 9))
def test_minibatches_are_whole_sequences(begins, length, parts):
    """An epoch has every row once. The rows of a sequence are successive, and none of them but the first begins one."""
    begins[0] = True
    args = ppo.Args(sequence_length=length, num_minibatches=parts, update_epochs=1)
    rows = []
    for mb_inds, sizes in ppo.minibatches(torch.tensor(begins), args):
        starts = mb_inds[: sizes[0]].tolist()
        sequences = {start: [] for start in starts}
        for step in mb_inds.split(sizes.tolist()):
            for start, row in zip(starts, step.tolist(), strict=False):
                sequences[start].append(row)
        assert sum(map(len, sequences.values())) == len(mb_inds)
        for start, sequence in sequences.items():
            assert sequence == [*range(start, start + len(sequence))] and len(sequence) <= length
            assert not any(begins[row] for row in sequence[1:])
            after = sequence[-1] + 1
            assert len(sequence) == length or after == len(begins) or begins[after], (
                "no shorter than necessary"
            )
        rows += mb_inds.tolist()
    assert sorted(rows) == [*range(len(begins))]


@pytest.mark.parametrize("env_id", ["parity_env:MaskedBranches-v0", "MixedDiscrete", "crash"])
def test_with_unchanged_weights_every_ratio_is_1(env_id, monkeypatch, tmp_path):
    """Sequences that start from stored states give the log-probs and values of acting, over different decision periods,
    ends of episodes, ends of rollouts and restarts of a player. The state is zero at the start of an episode."""
    seen = spy_on(ppo, monkeypatch, tmp_path)
    record = watch(ppo, monkeypatch, crash_at=50) if env_id == "crash" else None
    settings = dict(env_id="MixedDiscrete", max_agents=12, num_steps=32)
    if env_id.startswith("parity_env"):
        settings = dict(env_id=env_id, num_envs=3)
    ppo.train(ppo.Args(**SMALL | settings, total_timesteps=1200, exp_name="x"))
    assert len(seen) > 3 and (
        record is None or any("restarted" in out[-1] for _, out in record[1:])
    )
    assert_learns_what_it_acts(seen)
    for batch, *_ in seen[1:]:
        assert batch.lstm_states.abs().sum(1)[~batch.begins].min() > 0, (
            "the state is not zero within an episode"
        )
    first = seen[1][0]
    assert (first.lstm_states[first.begins] == 0).all(), (
        "in the first rollout every sequence starts an episode"
    )


@pytest.mark.parametrize("crashes", [False, True])
def test_values_of_each_agent_are_those_of_its_own_states(crashes, monkeypatch, tmp_path):
    """Advantages of agents that decide at different periods, against the trajectory of each agent, along which the LSTM
    is stepped. A final observation is valued with the state at the end of its episode."""
    seen = spy_on(ppo, monkeypatch, tmp_path)
    record = watch(ppo, monkeypatch, crash_at=60 if crashes else None)
    settings = dict(
        env_id="MixedDiscrete",
        max_agents=12,
        num_steps=32,
        norm_obs=False,
        norm_reward=False,
        gamma=0.9,
    )
    ppo.train(ppo.Args(**SMALL | settings, learning_rate=1e-12, total_timesteps=384, exp_name="x"))
    assert any("restarted" in out[-1] for _, out in record[1:]) == crashes
    agent, (batch, *_) = seen
    mask = torch.ones(1, batch.masks.shape[1])
    expected = {}
    for trajectory in trajectories(record):
        states = [torch.zeros(1, 24)]
        with torch.no_grad():
            for obs, *_ in trajectory:
                states.append(agent.act(torch.as_tensor(obs[None]), mask, states[-1])[2])
            value = lambda obs, state: agent.get_value(torch.as_tensor(obs[None]), state).item()
            advantage = 0.0
            for t in reversed(range(len(trajectory))):
                obs, _, reward, next_obs, terminated = trajectory[t]
                next_value = 0.0 if terminated else value(next_obs, states[t + 1])
                advantage = (
                    reward + 0.9 * next_value - value(obs, states[t]) + 0.9 * 0.95 * advantage
                )
                expected.setdefault(obs.tobytes(), []).append(
                    advantage
                )  # after a crash observations occur again
    for obs, advantage in zip(batch.obs.numpy(), batch.advantages.tolist(), strict=True):
        assert any(advantage == pytest.approx(e, abs=1e-4) for e in expected[obs.tobytes()])


def test_a_sequence_ends_where_older_weights_chose_the_action():
    """Rows of slot 0 and 1 that were decided in iteration 0 and got their rewards in iteration 1."""
    rollout, args = ppo.Rollout(10, 2, 5, [3, 2, 4], 24), ppo.Args(**SMALL)
    agent, rng = ppo.Agent(SPEC, args), np.random.default_rng(0)
    no = np.zeros(2, bool)
    for iteration, slots in [(0, [0, 1]), (1, [0, 1]), (1, [0, 1]), (1, [0])]:
        obs, masks, states = random_inputs(len(slots), rng)
        actions = [[part.argmax() for part in np.split(mask, [3, 5])] for mask in masks]
        rollout.decide(np.array(slots), obs, masks, states, actions)
        if iteration == 0:
            rollout.remove(0)  # at the end of an iteration
        rollout.add(np.array(slots), np.ones(2), no, no, np.ones((2, 5)), {}, 0.9)
    batch = ppo.make_batch(agent, rollout, 7, 1.0, args)
    assert batch.begins.tolist() == [True, True, False, False, True, True, False]
    rollout.stale[:] = False
    assert ppo.make_batch(agent, rollout, 7, 1.0, args).begins.tolist() == [
        True,
        *[False] * 3,
        True,
        *[False] * 2,
    ]


# Acting, learning, evaluation and export


def test_numpy_acts_as_the_agent_does():
    agent, inputs = ppo.Agent(SPEC, ppo.Args(**SMALL)), random_inputs(50, np.random.default_rng(0))
    act = fast.Acting(agent)
    torch.manual_seed(1)
    ours = act(*inputs)
    assert act.enabled
    torch.manual_seed(1)
    with torch.no_grad():
        expected = agent.act(*map(torch.as_tensor, inputs))
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_no_fast_computes_the_same(empty_folder, monkeypatch):
    """All logged scalars of two iterations with learning. With --no-fast, torch acts and steps the LSTM."""
    calls, with_lstm = [], fast.Unrolled.with_lstm

    def counted(*args):
        calls.append(None)
        return with_lstm(*args)

    monkeypatch.setattr(fast.Unrolled, "with_lstm", counted)
    settings = SMALL | dict(num_envs=2, total_timesteps=256)
    by_default = curve(train(ppo, settings))
    assert len(calls) == 2 * 2 * 4 + 1, "once in each update, and once to compare"
    calls.clear()
    without = curve(train(ppo, settings, fast=False))
    assert not calls
    assert by_default.keys() == without.keys() and "losses/grad_norm" in without
    for name, points in by_default.items():
        assert len(points) == 2
        np.testing.assert_allclose(points, without[name], atol=1e-5, rtol=1e-5, err_msg=name)


def test_target_kl_stops_before_the_step(empty_folder):
    """The first step finds a KL divergence of 0. The second one finds that of the first step, and is not made."""
    folder = train(ppo, SMALL, total_timesteps=64, target_kl=1e-9, update_epochs=5)
    assert state_of(ppo, folder)["kept"]["optimizer"]["state"][0]["step"] == 1


def test_exported_policy_has_the_agents_states(tmp_path):
    """Over 30 decisions with the states of the exported file: recurrent_out is the next recurrent_in."""
    agent, rng = ppo.Agent(SPEC, ppo.Args(**SMALL)), np.random.default_rng(1)
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    torch.nn.init.normal_(agent.actor.weight)
    export.export(agent, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    inputs = {x.name: x.shape for x in session.get_inputs()}
    assert [*inputs] == ["obs_0", "obs_1", "action_masks", "recurrent_in"] and inputs[
        "recurrent_in"
    ][1:] == [1, 12]
    names = [x.name for x in session.get_outputs()]
    assert names[-1] == "recurrent_out" and session.run(["memory_size"], {
        "obs_0": np.zeros((1, 2), np.float32), "obs_1": np.zeros((1, 3), np.float32),
        "action_masks": np.ones((1, 9), np.float32), "recurrent_in": np.zeros((1, 1, 12), np.float32),
    })[0] == [12]  # fmt: skip
    exported, expected, changes = np.zeros((7, 1, 12), np.float32), torch.zeros(7, 24), []
    for _ in range(30):
        obs, mask, _ = random_inputs(7, rng)
        arrays = {"obs_0": obs[:, :2], "obs_1": obs[:, 2:], "action_masks": mask.astype(np.float32)}
        outputs = ["deterministic_discrete_actions", "recurrent_out"]
        actions, exported = session.run(outputs, {**arrays, "recurrent_in": exported})
        with torch.no_grad():
            best, _, expected = agent.act(
                torch.as_tensor(obs), torch.as_tensor(mask), expected, deterministic=True
            )
        np.testing.assert_array_equal(actions, best)
        np.testing.assert_allclose(exported[:, 0], expected[:, :12], atol=1e-5)
        changes.append(exported.copy())
    assert np.ptp(changes, axis=0).min() > 0


def test_resume_equals_uninterrupted(monkeypatch, empty_folder):
    small = SMALL | dict(num_envs=2, anneal_lr=False)
    whole = train(ppo, small, total_timesteps=512)
    part = train(ppo, small, total_timesteps=256)
    call(ppo, monkeypatch, "--resume", part, "--total-timesteps", 512)
    assert_equal_states(state_of(ppo, whole), state_of(ppo, part))


def test_evaluation_starts_episodes_with_the_zero_state():
    """And keeps the state of each slot between decisions."""
    agent = ppo.Agent(SPEC, ppo.Args(**SMALL))
    play, rng = play_vectors(agent, SPEC, 3), np.random.default_rng(0)
    states = torch.zeros(3, 24)
    torch.nn.init.normal_(agent.actor.weight)
    for step in range(20):
        obs, mask, _ = random_inputs(3, rng)
        slots, new_episode = (
            np.flatnonzero(rng.random(3) < 0.6),
            rng.random(3) < (1 if step == 0 else 0.2),
        )
        if not len(slots):
            continue
        states[torch.as_tensor(new_episode)] = 0
        with torch.no_grad():
            inputs = (torch.as_tensor(obs[slots]), torch.as_tensor(mask[slots]), states[slots])
            _, expected, states[slots] = agent.act(*inputs, deterministic=True)
        np.testing.assert_array_equal(
            play(obs, {"action_mask": mask}, slots, new_episode), expected
        )


# Changed copies


@pytest.mark.parametrize("layer", ["nn.LayerNorm(size_out)", "nn.Mish()"])
def test_a_changed_copy_acts_as_it_learns(layer, monkeypatch, tmp_path, empty_folder):
    line = '        layers.append({"tanh": nn.Tanh, "silu": nn.SiLU}[activation]())\n'
    script = copy_of(NAME, (line, f"        layers.append({layer})\n{line}"))
    seen = spy_on(script, monkeypatch, tmp_path)
    folder = train(script, SMALL | dict(num_envs=2, total_timesteps=256))
    assert_learns_what_it_acts(seen)
    agent, spec = saved(script, folder)
    inputs = random_inputs(9, np.random.default_rng(0), [3, 2], 3)
    act, random_state = fast.Acting(agent), torch.get_rng_state()
    ours = act(*inputs)
    assert act.enabled == ("Mish" not in layer)
    torch.set_rng_state(random_state)
    with torch.no_grad():
        for a, b in zip(ours, agent.act(*map(torch.as_tensor, inputs)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 3)
    call(script, monkeypatch, "--export", folder)


CELL = "c = f.sigmoid() * c + i.sigmoid() * g.tanh()"
CELLS = {
    "clipped": (CELL, f"c = ({CELL[4:]}).clamp(-0.1, 0.1)"),
    "another state": ("return h, torch.cat([h, c], 1)", "return h, torch.cat([h, 0.5 * c], 1)"),
    "no bias": (
        "nn.Linear(hidden_size, 4 * hidden_size)",
        "nn.Linear(hidden_size, 4 * hidden_size, bias=False)",
    ),
    "unchanged": (CELL, CELL),
}


@pytest.mark.parametrize("cell", CELLS)
def test_sequences_are_those_of_a_changed_step(cell, empty_folder, capsys):
    """Outputs and gradients are those of `step`, and a line says that this is slow."""
    script = copy_of(NAME, CELLS[cell])
    train(script, SMALL | dict(num_envs=2, total_timesteps=256))
    assert capsys.readouterr().out.count(STEPPED) == (cell != "unchanged")
    agent, sizes = script.Agent(SPEC, script.Args(**SMALL)), torch.tensor([3, 3, 2, 1])
    obs, mask, state = torch.randn(9, 5), torch.ones(9, 9, dtype=bool), torch.randn(3, 24)
    actions, logprobs, start, now = torch.zeros(9, 3, dtype=int), [], 0, state
    for size in sizes.tolist():
        rows = slice(start, start + size)
        out = agent.get_action_and_value(obs[rows], mask[rows], now[:size], actions[rows])
        logprobs.append(out[1])
        now = out[-1]
        start += size
    sequences = agent.get_action_and_value(obs, mask, state, actions, sizes)[1]
    np.testing.assert_allclose(sequences.detach(), torch.cat(logprobs).detach(), atol=1e-5)
    agent.unrolled.enabled = False
    stepped = agent.get_action_and_value(obs, mask, state, actions, sizes)[1]
    ours, expected = (
        torch.autograd.grad(x.sum(), agent.actor_memory.linear_hh.weight)[0]
        for x in (sequences, stepped)
    )
    np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_a_step_that_changes_later_is_noticed(capsys):
    """The comparison is repeated every few updates."""
    agent, sizes = ppo.Agent(SPEC, ppo.Args(**SMALL)), torch.tensor([3, 2])
    obs, mask, states = torch.randn(5, 5), torch.ones(5, 9, dtype=bool), torch.randn(3, 24)
    compute = lambda: agent.get_action_and_value(
        obs, mask, states, torch.zeros(5, 3, dtype=int), sizes
    )
    compute()
    step = agent.actor_memory.step
    agent.actor_memory.step = lambda x, state: step(2 * x, state)
    for _ in range(sys.modules["onefile_rl.fast.lstm"].COMPARE_EVERY):
        compute()
    assert not agent.unrolled.enabled and STEPPED in capsys.readouterr().out


@pytest.mark.parametrize("place", ["output", "gradient of the memory", "gradient of the encoder"])
def test_a_changed_step_is_what_is_learned(place, capsys, empty_folder):
    """What the script computes in Agent.step or Memory.step, for acting, is learned too."""
    changed = copy_of(NAME, CHANGED_STEPS[place])
    torch.manual_seed(0)
    agent = changed.Agent(SPEC, changed.Args(**SMALL))
    sizes = torch.tensor([3, 2, 2])
    obs = torch.randn(7, 5)
    states = torch.randn(3, 24)
    gradients = []
    for enabled in (True, False):
        unrolled = fast.Unrolled(changed.unroll, enabled=enabled)
        total = sum(x.square().sum() for x in unrolled(agent, obs, states, sizes))
        parameters = [agent.actor_memory.linear_hh.weight, agent.critic_layers[0].weight]
        gradients.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)
    assert STEPPED in capsys.readouterr().out


CHANGED_STEPS = {
    "output": (
        "        return actor_hidden, critic_hidden, torch.cat([actor_state",
        "        actor_hidden = actor_hidden + 0.5\n"
        "        return actor_hidden, critic_hidden, torch.cat([actor_state",
    ),
    "gradient of the memory": (
        "        return h, torch.cat([h, c], 1)\n",
        "        return h, torch.cat([h, c], 1).detach()\n",
    ),
    "gradient of the encoder": (
        "self.critic_memory.step(critic_x, critic_state)",
        "self.critic_memory.step(critic_x.detach(), critic_state)",
    ),
}
GRU = """class Memory(nn.Module):
    def __init__(self, input_size, memory_size, forget_bias=0.0):
        super().__init__()
        self.output_size = memory_size
        self.linear_ih = nn.Linear(input_size, 3 * memory_size)
        self.linear_hh = nn.Linear(memory_size, 3 * memory_size)

    def step(self, x, state):
        x_r, x_z, x_n = self.linear_ih(x).chunk(3, 1)
        h_r, h_z, h_n = self.linear_hh(state).chunk(3, 1)
        r = (x_r + h_r).sigmoid()
        z = (x_z + h_z).sigmoid()
        n = (x_n + r * h_n).tanh()
        h = (1 - z) * n + z * state
        return h, h


"""
GRU_CELL = """class Memory(nn.Module):
    def __init__(self, input_size, memory_size, forget_bias=0.0):
        super().__init__()
        self.output_size = memory_size
        self.cell = nn.GRUCell(input_size, memory_size)

    def step(self, x, state):
        h = self.cell(x, state)
        return h, h


"""


def gru_copy(code):
    """Return a copy of the script with another class Memory."""
    source = (ROOT / NAME).read_text()
    old = source[source.index("class Memory(") : source.index("def unroll(")]
    return copy_of(NAME, (old, code))


@pytest.mark.parametrize("code", [GRU, GRU_CELL], ids=["GRU", "nn.GRUCell"])
def test_a_gru_replaces_the_lstm(code, monkeypatch, tmp_path, capsys):
    """The copy trains, learns what it acts, resumes to the byte, and is evaluated and exported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fast.Acting, "told", set())
    script = gru_copy(code)
    seen = spy_on(script, monkeypatch, tmp_path)
    settings = SMALL | dict(num_envs=2, total_timesteps=512)
    whole = train(script, settings)
    assert_learns_what_it_acts(seen)
    assert (seen[1][0].lstm_states[:, :12] != 0).any()
    out = capsys.readouterr().out
    assert STEPPED in out
    assert (f"{BY_TORCH}: numpy acting does not support GRUCell" in out) == (code == GRU_CELL)
    assert (BY_TORCH in out) == (code == GRU_CELL)

    # Resume
    with monkeypatch.context() as patch:
        stop_after(patch, script, "gae", 2)
        part = train(script, settings)
    assert state_of(script, part)["global_step"] == 256
    call(script, monkeypatch, "--resume", part)
    assert_equal_states(state_of(script, whole), state_of(script, part))

    # Without acceleration
    without = curve(train(script, settings, fast=False))
    for name, points in curve(whole).items():
        np.testing.assert_allclose(
            points[:2], without[name][:2], atol=1e-5, rtol=1e-5, err_msg=name
        )

    # Evaluate and export
    call(script, monkeypatch, "--evaluate", whole, "--eval-episodes", 3)
    assert "3 episodes" in capsys.readouterr().out
    call(script, monkeypatch, "--export", whole)
    agent, _ = saved(script, whole)
    obs, mask, states = random_inputs(9, np.random.default_rng(0), [3, 2], 3)
    session = onnxruntime.InferenceSession(whole / "policy.onnx")
    arrays = {
        "obs_0": obs,
        "action_masks": mask.astype(np.float32),
        "recurrent_in": states[:, None, :12],
    }
    actions, exported = session.run(["deterministic_discrete_actions", "recurrent_out"], arrays)
    with torch.no_grad():
        best, _, expected = agent.act(
            *map(torch.as_tensor, (obs, mask, states)), deterministic=True
        )
    np.testing.assert_array_equal(actions, best)
    np.testing.assert_allclose(exported[:, 0], expected[:, :12], atol=1e-5)


def test_another_optimizer_loss_and_metric(monkeypatch, empty_folder):
    """A copy with AdamW, a further loss term and a further metric trains, and resumes to the byte."""
    script = copy_of(
        NAME,
        (
            "optimizer = fast.Adam(agent.parameters(),",
            "optimizer = torch.optim.AdamW(agent.parameters(),",
        ),
        ("args.vf_coef * v_loss\n", "args.vf_coef * v_loss + 0.01 * newvalue.square().mean()\n"),
        (
            '        "losses/policy_loss": pg_loss,\n',
            '        "losses/policy_loss": pg_loss,\n        "losses/ratio": ratio.max(),\n',
        ),
    )
    settings = SMALL | dict(num_envs=2, total_timesteps=512)
    whole = train(script, settings)
    with monkeypatch.context() as patch:
        stop_after(patch, script, "gae", 2)
        part = train(script, settings)
    call(script, monkeypatch, "--resume", part)
    assert_equal_states(state_of(script, whole), state_of(script, part))
    assert len(curve(whole)["losses/ratio"]) == 4


LINES = [
    ("--env-id CartPole-v1 --memory-size 3", "--memory-size 3: must be even"),
    (
        "--env-id CartPole-v1 --compile",
        "--compile: minibatches of sequences differ in shape",
    ),
    ("--env-id Reacher2Dof-v0", "use ppo_continuous_multiagent.py or sac_continuous.py"),
    ("--env-id CartPole-v1 --sequence-length 0", "--sequence-length 0: must be above 0"),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)
