"""ppo_lstm_multiagent.py: parity with RecurrentPPO, memory per agent whatever its pace, sequences, export."""

from dataclasses import replace

import numpy as np
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import assert_refused, call, curve, learn_with_sb3, start_like_sb3, train, watch
from hypothesis import given
from hypothesis import strategies as st
from test_copies import copy_of, saved
from test_discrete import masks_of

import fast
import policies
import ppo_lstm_multiagent as ppo
from policies import play_vectors

SMALL = dict(
    env_id="parity_env:MaskedBranches-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8,),
    memory_size=12, sequence_length=5,
)  # fmt: skip
SPEC = {"obs_dim": 5, "branches": [3, 2, 4], "start": [0, 0, 0], "sensors": [2, 3], "memory": 12}


def spied(monkeypatch, tmp_path):
    """The batches of a run, and for each the ratios of all rows, sequence by sequence, before anything was learned."""
    monkeypatch.chdir(tmp_path)
    make_batch, build, seen = ppo.make_batch, ppo.Agent, []

    def built(*args):
        seen.append(build(*args))
        return seen[0]

    def made(agent, rollout, used, scale, args):
        begins, batch = make_batch(agent, rollout, used, scale, args)
        ratios = []
        with torch.no_grad():
            for rows, firsts, sizes in ppo.minibatches(begins, replace(args, update_epochs=1)):
                given = batch.obs[rows], batch.masks[rows], batch.memory[firsts], batch.actions[rows], sizes
                logprobs, _, values = agent(*given)
                ratios.append((rows, (logprobs - batch.logprobs[rows]).exp(), values - batch.values[rows]))
        seen.append((begins, batch, ratios))
        return begins, batch

    monkeypatch.setattr(ppo, "Agent", built)
    monkeypatch.setattr(ppo, "make_batch", made)
    return seen


# Parity


def told(train, losses):
    """RecurrentPPO.train, and what it logs."""

    def and_tell(model):
        train(model)
        logged = model.logger.name_to_value
        losses.append([logged[f"train/{name}"] for name in ("policy_gradient_loss", "value_loss", "entropy_loss")])

    return and_tell


@pytest.mark.parametrize("num_envs", [1, 4])
def test_first_rollout_and_losses_are_those_of_recurrent_ppo(num_envs, monkeypatch, tmp_path):
    """With one minibatch of everything: what was seen, done, remembered and judged; the losses; the weights after."""
    contrib = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.env_util import make_vec_env

    policy_kwargs = dict(net_arch=dict(pi=[], vf=[]), lstm_hidden_size=6)
    model = contrib.RecurrentPPO(
        "MlpLstmPolicy", make_vec_env("Branches-v0", num_envs, seed=3), n_steps=32, batch_size=32 * num_envs,
        n_epochs=1, gamma=0.97, ent_coef=0.01, policy_kwargs=policy_kwargs, seed=3, device="cpu",
    )  # fmt: skip
    names = {"actor": "action_net", "critic": "value_net"}
    ends = {"seen.weight": "weight_ih_l0", "kept.weight": "weight_hh_l0", "seen.bias": "bias_ih_l0"}
    for ours, theirs in {**ends, "kept.bias": "bias_hh_l0"}.items():
        names |= {f"{part}_memory.{ours}": f"lstm_{part}.{theirs}" for part in ("actor", "critic")}
    losses = []
    with monkeypatch.context() as patched:
        patched.setattr(np.random, "randint", lambda *_: 0)  # where theirs cuts a sequence in two, at random
        patched.setattr(type(model), "train", told(type(model).train, losses))
        first, initial, final = learn_with_sb3(model, names, 3)
    seen = spied(monkeypatch, tmp_path)
    start_like_sb3(ppo, monkeypatch, initial)
    args = ppo.Args(
        env_id="parity_env:Branches-v0", num_envs=num_envs, num_steps=32, num_minibatches=1, update_epochs=1,
        total_timesteps=3 * 32 * num_envs, hidden_sizes=(), memory_size=12, sequence_length=32, ent_coef=0.01,
        vf_coef=1.0, gamma=0.97, anneal_lr=False, norm_obs=False, norm_reward=False, seed=3, exp_name="parity",
    )  # fmt: skip
    ppo.train(args)
    _, batch, _ = seen[1]
    ours = dict(observations=batch.obs, actions=batch.actions, log_probs=batch.logprobs, values=batch.values)
    for key, x in {**ours, "advantages": batch.advantages, "returns": batch.returns}.items():
        np.testing.assert_allclose(x.numpy().squeeze(), first[key], atol=1e-5, rtol=1e-5, err_msg=key)
    logged = curve(next(tmp_path.glob("runs/*")))
    for k, (policy_loss, value_loss, entropy_loss) in enumerate(losses):
        ours = [logged[f"losses/{name}"][k][1] for name in ("policy_loss", "value_loss", "entropy")]
        np.testing.assert_allclose(ours, [policy_loss, value_loss / 2, -entropy_loss], atol=1e-5, rtol=1e-5)
    state = seen[0].state_dict()
    for key, x in final.items():
        np.testing.assert_allclose(state[key], x, atol=1e-4, err_msg=key)
        assert not np.allclose(x, initial[key], atol=1e-4), "they learned"


# Memory


def test_forget_bias_keeps_what_was_seen():
    """Without input and other weights a step leaves sigmoid(bias) of the cells: 5 % after 24 steps, and not 6e-8."""
    left = {}
    for bias in (0.0, 2.0):
        memory = ppo.Memory(5, 6, bias)
        for name, x in memory.named_parameters():
            x.data *= name == "seen.bias"
        memory.seen.bias.data[:6], memory.seen.bias.data[12:] = 0, 0  # but for the forget gates
        memory.seen.bias.data[6:12] = bias
        state = torch.cat([torch.zeros(1, 6), torch.ones(1, 6)], 1)
        for _ in range(24):
            _, state = memory.step(torch.zeros(1, 5), state)
        left[bias] = state[0, -1].item()
    assert left[0.0] == pytest.approx(0.5**24, rel=1e-4) and left[2.0] == pytest.approx(0.8808**24, rel=1e-2)
    args, agents = ppo.Args(hidden_sizes=(8,), memory_size=8), []
    for bias in (2.0, 0.0):
        torch.manual_seed(0)
        agents.append(ppo.Agent(SPEC, replace(args, forget_bias=bias)))
    for name in ("actor_memory", "critic_memory"):
        open_, plain = (getattr(agent, name).seen.bias for agent in agents)
        np.testing.assert_allclose((open_ - plain).detach(), [0] * 4 + [2] * 4 + [0] * 8, atol=1e-6)


def test_memory_is_torchs_lstm():
    """Step by step, in numpy over packed sequences, and its gradient."""
    rng, memories = np.random.default_rng(0), [ppo.Memory(5, 6) for _ in range(2)]
    lengths = np.sort(rng.integers(1, 9, 4))[::-1].copy()
    sizes = torch.as_tensor((lengths > np.arange(lengths[0])[:, None]).sum(1))
    x, state, by = torch.randn(2, int(sizes.sum()), 5), torch.randn(2, 4, 12), torch.randn(2, int(sizes.sum()), 6)
    gates = torch.stack([m.seen(part) + m.kept.bias for m, part in zip(memories, x, strict=True)])
    outs = fast.lstm(gates, torch.stack([m.kept.weight for m in memories]), state, sizes)
    ours = torch.autograd.grad((outs * by).sum(), [p for m in memories for p in m.parameters()])
    for k, memory in enumerate(memories):
        theirs = torch.nn.LSTM(5, 6)
        pairs = {"weight_ih_l0": memory.seen.weight, "weight_hh_l0": memory.kept.weight}
        theirs.load_state_dict(pairs | {"bias_ih_l0": memory.seen.bias, "bias_hh_l0": memory.kept.bias})
        packed = torch.nn.utils.rnn.PackedSequence(x[k], sizes)
        expected, _ = theirs(packed, tuple(part[None].contiguous() for part in state[k].chunk(2, 1)))
        np.testing.assert_allclose(outs[k].detach(), expected.data.detach(), atol=1e-6)
        (expected.data * by[k]).sum().backward()
        grads = [theirs.weight_ih_l0, theirs.bias_ih_l0, theirs.weight_hh_l0, theirs.bias_hh_l0]
        for a, b in zip(ours[4 * k : 4 * k + 4], grads, strict=True):
            np.testing.assert_allclose(a, b.grad, atol=1e-5)
        with torch.no_grad():
            now, first = state[k, :1], []
            for step in range(int(lengths[0])):  # the longest sequence is the first of each step
                out, now = memory.step(x[k, [int(sizes[:step].sum())]], now)
                first.append(out[0])
        at = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        np.testing.assert_allclose(torch.stack(first), expected.data.detach()[at], atol=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 9))
def test_minibatches_are_whole_sequences(begins, length, parts):
    """Every row once an epoch; a sequence is rows that follow each other, and none begins in its midst."""
    begins[0] = True
    args = ppo.Args(sequence_length=length, num_minibatches=parts, update_epochs=1)
    everything = []
    for rows, firsts, sizes in ppo.minibatches(np.array(begins), args):
        rows, sequences, at = rows.tolist(), {first: [] for first in firsts.tolist()}, 0
        for size in sizes.tolist():
            for first, row in zip(firsts.tolist()[:size], rows[at : at + size], strict=True):
                sequences[first].append(row)
            at += size
        assert at == len(rows)
        for first, sequence in sequences.items():
            assert sequence == [*range(first, first + len(sequence))] and len(sequence) <= length
            assert not any(begins[row] for row in sequence[1:])
        everything += rows
    assert sorted(everything) == [*range(len(begins))]


@pytest.mark.parametrize("env_id", ["parity_env:MaskedBranches-v0", "MixedDiscrete", "crash"])
def test_with_unchanged_weights_every_ratio_is_1(env_id, monkeypatch, tmp_path):
    """Sequence by sequence from the stored memory, over periods, ends, cuts and restarts: log-probs and values are
    those of acting; and a memory is zero where an episode begins."""
    seen = spied(monkeypatch, tmp_path)
    record = watch(ppo, monkeypatch, crash_at=50) if env_id == "crash" else None
    settings = dict(env_id="MixedDiscrete", max_agents=12, num_steps=32)
    if env_id.startswith("parity_env"):
        settings = dict(env_id=env_id, num_envs=3)
    ppo.train(ppo.Args(**SMALL | settings, total_timesteps=1200, exp_name="x"))
    assert len(seen) > 3 and (record is None or any("restarted" in out[-1] for _, out in record[1:]))
    for begins, batch, ratios in seen[1:]:
        rows = torch.cat([rows for rows, *_ in ratios])
        assert sorted(rows.tolist()) == [*range(len(batch.obs))]
        np.testing.assert_allclose(torch.cat([x for _, x, _ in ratios]), 1, atol=1e-5)
        np.testing.assert_allclose(torch.cat([x for *_, x in ratios]), 0, atol=1e-5)
        assert batch.memory.abs().sum(1)[~torch.as_tensor(begins)].min() > 0, "it remembers"
    first = seen[1][1].memory[torch.as_tensor(seen[1][0])]
    assert (first == 0).all(), "in the first rollout every sequence begins an episode"


def test_acting_in_numpy_is_the_module():
    agent, rng = ppo.Agent(SPEC, ppo.Args(**SMALL)), np.random.default_rng(0)
    seen = rng.normal(size=(50, 5)).astype(np.float32), masks_of(SPEC["branches"], 50, rng)
    seen = *seen, rng.normal(size=(50, 24)).astype(np.float32)
    acting = fast.Acting(agent)
    act = acting.checked(*seen)
    assert act is acting.fast
    torch.manual_seed(1)
    ours = act(*seen)
    torch.manual_seed(1)
    for a, b in zip(ours, acting.module(*seen), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# A run's life


def test_exported_policy_remembers_as_the_agent_does(tmp_path):
    """Step by step through an episode, with the file's own memory: recurrent_out is the next recurrent_in."""
    agent, rng = ppo.Agent(SPEC, ppo.Args(**SMALL)), np.random.default_rng(1)
    agent.obs_rms.update(3 * torch.randn(100, 5) + 1)
    torch.nn.init.normal_(agent.actor.weight)
    policies.export(agent, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    inputs = {x.name: x.shape for x in session.get_inputs()}
    assert [*inputs] == ["obs_0", "obs_1", "action_masks", "recurrent_in"] and inputs["recurrent_in"][1:] == [1, 12]
    names = [x.name for x in session.get_outputs()]
    assert names[-1] == "recurrent_out" and session.run(["memory_size"], {
        "obs_0": np.zeros((1, 2), np.float32), "obs_1": np.zeros((1, 3), np.float32),
        "action_masks": np.ones((1, 9), np.float32), "recurrent_in": np.zeros((1, 1, 12), np.float32),
    })[0] == [12]  # fmt: skip
    theirs, ours, changes = np.zeros((7, 1, 12), np.float32), torch.zeros(7, 24), []
    for _ in range(30):
        obs, mask = rng.normal(size=(7, 5)).astype(np.float32), masks_of(SPEC["branches"], 7, rng)
        given = {"obs_0": obs[:, :2], "obs_1": obs[:, 2:], "action_masks": mask.astype(np.float32)}
        wanted = ["deterministic_discrete_actions", "recurrent_out"]
        best, theirs = session.run(wanted, {**given, "recurrent_in": theirs})
        with torch.no_grad():
            expected, _, ours = agent.act(torch.as_tensor(obs), torch.as_tensor(mask), ours, deterministic=True)
        np.testing.assert_array_equal(best, expected)
        np.testing.assert_allclose(theirs[:, 0], ours[:, :12], atol=1e-5)
        changes.append(theirs.copy())
    assert np.ptp(changes, axis=0).min() > 0


def test_resume_equals_uninterrupted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    small = SMALL | dict(num_envs=2, anneal_lr=False)
    whole = torch.load(train(ppo, small, total_timesteps=512) / "checkpoint.pt", weights_only=True)
    part = train(ppo, small, total_timesteps=256)
    call(ppo, monkeypatch, "--resume", part, "--total-timesteps", 512)
    again = torch.load(part / "checkpoint.pt", weights_only=True)
    for name, x in whole["kept"]["agent"].items():
        assert torch.equal(x, again["kept"]["agent"][name]), name


def test_evaluation_forgets_at_an_episodes_beginning(monkeypatch):
    """And remembers in between, slot by slot."""
    agent = ppo.Agent(SPEC, ppo.Args(**SMALL))
    choose, rng = play_vectors(agent, SPEC, 3), np.random.default_rng(0)
    memory = torch.zeros(3, 24)
    torch.nn.init.normal_(agent.actor.weight)
    for step in range(20):
        obs, mask = rng.normal(size=(3, 5)).astype(np.float32), masks_of(SPEC["branches"], 3, rng)
        who, begins = np.flatnonzero(rng.random(3) < 0.6), rng.random(3) < (1 if step == 0 else 0.2)
        if not len(who):
            continue
        memory[torch.as_tensor(begins)] = 0
        with torch.no_grad():
            _, expected, memory[who] = agent.act(
                torch.as_tensor(obs[who]), torch.as_tensor(mask[who]), memory[who], True
            )
        np.testing.assert_array_equal(choose(obs, {"action_mask": mask}, who, begins), expected)


@pytest.mark.parametrize("layer", ["nn.LayerNorm(b), {}", "nn.Mish()"])
def test_a_changed_copy_acts_as_it_learns(layer, monkeypatch, empty_folder):
    old = '{"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()'
    script = copy_of("ppo_lstm_multiagent.py", (old, layer.format(old)))
    folder = train(script, SMALL | dict(num_envs=2, total_timesteps=256))
    agent, spec = saved(script, folder)
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(9, 3)).astype(np.float32), masks_of([3, 2], 9, rng), rng.normal(size=(9, 24)).astype("f")
    acting, chance = fast.Acting(agent), torch.get_rng_state()
    ours = acting.checked(*seen)(*seen)
    torch.set_rng_state(chance)
    assert (acting.fast is False) == ("Mish" in layer)
    with torch.no_grad():
        for a, b in zip(ours, agent.act(*map(torch.as_tensor, seen)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 3)
    call(script, monkeypatch, "--export", folder)


STEP = "c = f.sigmoid() * c + i.sigmoid() * g.tanh()"
CELLS = {
    "clipped": (STEP, f"c = ({STEP[4:]}).clamp(-0.1, 0.1)"),
    "kept otherwise": ("return h, torch.cat([h, c], 1)", "return h, torch.cat([h, 0.5 * c], 1)"),
    "no bias": ("nn.Linear(width, 4 * width)", "nn.Linear(width, 4 * width, bias=False)"),
    "as it was": (STEP, STEP),
}


@pytest.mark.parametrize("cell", CELLS)
def test_another_memory_acts_and_learns_as_it_is_written(cell, monkeypatch, tmp_path, capsys):
    """Step by step and over sequences it is `step` that is computed, also for the gradient; a line says it is slow."""
    monkeypatch.chdir(tmp_path)
    script = copy_of("ppo_lstm_multiagent.py", CELLS[cell])
    train(script, SMALL | dict(num_envs=2, total_timesteps=256))
    assert ("Memory is stepped in torch" in capsys.readouterr().out) == (cell != "as it was")
    agent, sizes = script.Agent(SPEC, script.Args(**SMALL)), torch.tensor([3, 3, 2, 1])
    obs, mask, first = torch.randn(9, 5), torch.ones(9, 9, dtype=bool), torch.randn(3, 24)
    actions, rows, at, now = torch.zeros(9, 3, dtype=int), [], 0, first
    for size in sizes.tolist():
        _, _, after = agent.act(obs[at : at + size], mask[at : at + size], now[:size])
        given = obs[at : at + size], mask[at : at + size], now[:size], actions[at : at + size]
        rows.append(agent(*given)[0])
        at, now = at + size, after
    whole = agent(obs, mask, first, actions, sizes)[0]
    np.testing.assert_allclose(whole.detach(), torch.cat(rows).detach(), atol=1e-5)
    agent.unrolled.known = False
    by_steps = agent(obs, mask, first, actions, sizes)[0]
    ours, theirs = (torch.autograd.grad(x.sum(), agent.actor_memory.kept.weight)[0] for x in (whole, by_steps))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


LINES = [
    ("--env-id CartPole-v1 --memory-size 3", "--memory-size 3: must be even"),
    ("--env-id CartPole-v1 --compile", "--compile: no two minibatches of sequences have the same shape"),
    ("--env-id Reacher2Dof-v0", "ppo_continuous_multiagent.py, or sac_continuous.py, takes them"),
    ("--env-id CartPole-v1 --sequence-length 0", "--sequence-length 0: must be above 0"),
]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)
