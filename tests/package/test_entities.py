"""Entities: closed forms of the attention over them, their statistics, acting with numpy, and export."""

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import agent as agent_info
from hypothesis import given
from hypothesis import strategies as st

import ppo_continuous_multiagent as ppo
import ppo_discrete_multiagent as ppo_discrete
import ppo_hybrid_multiagent as ppo_hybrid
import ppo_lstm_multiagent as ppo_lstm
from onefile_rl import export, fast, runs
from onefile_rl.entities import UNITS, Attention, Entities, num_features
from onefile_rl.normalizer import Normalizer

NAME = "Scripted?team=0"
# Two own numbers, five entities of three numbers, an own number, two entities of two numbers
SPEC = {
    "obs_dim": 22,
    "sensors": [2, [5, 3], 1, [2, 2]],
    "entities": [[2, 5, 3], [18, 2, 2]],
}
ACTIONS = {
    ppo: {"action_dim": 2, "low": -1.0, "high": 1.0},
    ppo_discrete: {"branches": [3, 2], "start": [0, 0]},
    ppo_hybrid: {"action_dim": 2, "low": -1.0, "high": 1.0, "branches": [3, 2]},
    ppo_lstm: {"branches": [3, 2], "start": [0, 0], "memory": 8},
}
scripts = pytest.mark.parametrize("script", ACTIONS, ids=lambda script: script.__name__)


def observations(rows, seed=0):
    """Return random observations in which some rows of entities are padding, and in the first all of them."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(rows, 22)).astype(np.float32)
    for i, used in enumerate(rng.integers(0, 6, rows)):
        obs[i, 2 + 3 * used : 17] = 0
        obs[i, 18 + 2 * (used % 3) : 22] = 0
    obs[0, 2:17] = obs[0, 18:] = 0
    return obs


def make_agent(script, **kwargs):
    """Return a spec and an agent with random weights, also in the last layers."""
    spec = SPEC | ACTIONS[script]
    torch.manual_seed(1)
    agent = script.Agent(spec, script.Args(hidden_sizes=(16,), **kwargs))
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if not isinstance(agent.obs_rms, torch.nn.Identity):
        agent.obs_rms.update(torch.as_tensor(observations(300, seed=5)))
    return spec, agent.eval()


def inputs_of(spec, obs):
    """Return the other arguments of agent.act for these observations."""
    more = []
    if "branches" in spec:
        more.append(np.ones((len(obs), 5), bool))
    if "memory" in spec:
        more.append(np.full((len(obs), 16), 0.1, np.float32))
    return more


# Closed forms


def attend(entities, own=None, rows=6, seed=0):
    """Return the output of an Attention for the entities of one agent, in a sensor of `rows` rows."""
    torch.manual_seed(seed)
    entities = torch.as_tensor(entities, dtype=torch.float32).reshape(-1, 3)
    attention = Attention(rows, 3, 2)
    padded = torch.zeros(rows, 3)
    padded[: len(entities)] = entities
    own = torch.tensor([[0.3, -1.0]]) if own is None else own
    with torch.no_grad():
        return attention(padded.reshape(1, -1), own)[0]


entities_of_three = st.lists(
    st.tuples(*[st.floats(-3, 3, width=32)] * 3).filter(any), min_size=1, max_size=6
)


@given(entities_of_three, st.randoms(use_true_random=False))
def test_order_of_the_entities_does_not_matter(entities, random):
    shuffled = entities.copy()
    random.shuffle(shuffled)
    torch.testing.assert_close(attend(shuffled), attend(entities), atol=1e-5, rtol=1e-5)


@given(entities_of_three, st.integers(6, 30))
def test_number_of_padding_rows_does_not_matter(entities, rows):
    expected = attend(entities, rows=len(entities))
    torch.testing.assert_close(attend(entities, rows=rows), expected, atol=1e-5, rtol=1e-5)


def test_place_of_the_padding_does_not_matter():
    gap = [(1, 2, 3), (0, 0, 0), (4, 5, 6)]
    torch.testing.assert_close(attend(gap), attend([gap[0], gap[2]]), atol=1e-5, rtol=1e-5)


def test_all_padding_gives_zero():
    assert attend([]).tolist() == [0] * UNITS


@pytest.mark.parametrize("tiny", [1e-2, 1e-6, -1e-20, 1e-38])
def test_an_entity_near_zero_counts(tiny):
    """ML-Agents' trainer drops an entity with a sum of squares below 0.01."""
    alone = attend([(tiny, 0, 0)])
    assert alone.abs().max() > 0.1
    near = attend([(1, 2, 3), (0, tiny, 0)])
    assert (near - attend([(1, 2, 3)])).abs().max() > 0.05


def test_a_single_entity_is_embedded_alone():
    """Its attention is 1, so that the output is a plain network of it and of the agent's own numbers."""
    torch.manual_seed(0)
    attention = Attention(6, 3, 2)
    entity = torch.tensor([[0.5, -1.0, 2.0]])
    own = torch.tensor([[0.3, -1.0]])
    x = torch.nn.functional.silu(attention.embed(entity) + attention.embed_own(own))
    x = attention.norm(x)
    value = attention.query_key_value(x)[:, 2 * UNITS :]
    expected = attention.output_norm(x + attention.output(value))[0]
    torch.testing.assert_close(attend(entity), expected, atol=1e-5, rtol=1e-5)


def test_own_numbers_are_embedded_with_each_entity():
    other = torch.tensor([[2.0, 0.0]])
    assert (attend([(1, 2, 3)], other) - attend([(1, 2, 3)])).abs().max() > 0.05


def test_padding_gets_no_gradient():
    torch.manual_seed(0)
    attention = Attention(4, 3, 2)
    entities = torch.randn(5, 4, 3)
    entities[:, 2:] = 0
    entities.requires_grad_()
    output = attention(entities.reshape(5, -1), torch.randn(5, 2))
    (output * torch.randn(5, UNITS)).sum().backward()
    assert entities.grad[:, :2].abs().min() > 0 and not entities.grad[:, 2:].any()
    assert all(parameter.grad.abs().sum() > 0 for parameter in attention.parameters())


def test_rows_that_no_agent_uses_are_not_computed(monkeypatch):
    """Outputs and gradients are those of all rows."""
    torch.manual_seed(0)
    attention = Attention(20, 3, 2)
    embed, seen = attention.embed.forward, []
    attention.embed.forward = lambda x: seen.append(len(x)) or embed(x)
    entities = torch.zeros(5, 20, 3)
    entities[:, :3] = torch.randn(5, 3, 3)
    entities[2, 4] = 1e-30
    entities[3] = 0
    own = torch.randn(5, 2)
    weights = torch.randn(5, UNITS)
    results = []
    for all_rows in (False, True):
        monkeypatch.setattr("onefile_rl.entities.is_traced", lambda x, all_rows=all_rows: all_rows)
        attention.zero_grad()
        output = attention(entities.reshape(5, -1), own)
        (output * weights).sum().backward()
        results.append([output, *(p.grad.clone() for p in attention.parameters())])
    assert seen == [5 * 5, 5 * 20]
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_features_are_the_own_columns_and_a_vector_per_sensor():
    entities = Entities(SPEC)
    obs = torch.as_tensor(observations(4))
    x = entities(obs)
    assert x.shape == (4, num_features(SPEC)) == (4, 3 + 2 * UNITS)
    assert torch.equal(x[:, :3], obs[:, [0, 1, 17]])
    expected = entities.attention[1](obs[:, 18:], obs[:, [0, 1, 17]])
    assert torch.equal(x[:, -UNITS:], expected) and not x[0, 3:].any()


def test_entities_alone_are_enough():
    spec = {"obs_dim": 6, "entities": [[0, 2, 3]]}
    assert Entities(spec)(torch.randn(7, 6)).shape == (7, UNITS)


# Scripts


@scripts
def test_without_entities_nothing_is_added(script):
    """The same parameters in the same order, so that the numbers of a run stay the same."""
    spec = {"obs_dim": 5, "sensors": [5], **ACTIONS[script]}
    agent = script.Agent(spec, script.Args(hidden_sizes=(4,)))
    assert num_features(spec) == 5
    assert not any(isinstance(module, (Entities, Attention)) for module in agent.modules())
    assert agent.obs_rms.count.shape == ()
    first = next(module for module in agent.modules() if isinstance(module, torch.nn.Linear))
    assert first.in_features == 5


@scripts
@pytest.mark.parametrize("norm_obs", [True, False])
def test_policy_and_value_do_not_depend_on_the_order_of_entities(script, norm_obs):
    spec, agent = make_agent(script, norm_obs=norm_obs)
    obs = observations(50)
    other = obs.copy()
    other[:, 2:17] = obs[:, 2:17].reshape(50, 5, 3)[:, [3, 0, 4, 2, 1]].reshape(50, 15)
    assert not np.array_equal(obs, other)
    results = []
    for rows in (obs, other):
        more = map(torch.as_tensor, inputs_of(spec, rows))
        with torch.no_grad():
            results.append(
                agent.get_action_and_value(torch.as_tensor(rows), *more, deterministic=True)
            )
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)


@scripts
@pytest.mark.parametrize("deterministic", [True, False])
def test_acting_with_numpy_equals_torch(script, deterministic):
    spec, agent = make_agent(script)
    act = fast.Acting(agent, deterministic=deterministic)
    for rows in (1, 9):
        obs = observations(rows, seed=rows)
        more = inputs_of(spec, obs)
        torch.manual_seed(3)
        ours = act(obs, *more)
        torch.manual_seed(3)
        expected = act.act_with_torch(obs, *more)
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert act.enabled and act.translation


@scripts
@pytest.mark.parametrize("norm_obs", [True, False])
def test_exported_policy_has_rows_and_equals_the_agent(script, norm_obs, tmp_path):
    spec, agent = make_agent(script, norm_obs=norm_obs)
    export.export(agent, spec, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    shapes = {x.name: x.shape for x in session.get_inputs()}
    sensors = {f"obs_{i}": shapes[f"obs_{i}"] for i in range(4)}
    assert sensors == {
        "obs_0": ["batch", 2],
        "obs_1": ["batch", 5, 3],
        "obs_2": ["batch", 1],
        "obs_3": ["batch", 2, 2],
    }
    for rows in (1, 30):
        obs = observations(rows, seed=rows)
        feed = {
            "obs_0": obs[:, :2],
            "obs_1": obs[:, 2:17].reshape(-1, 5, 3),
            "obs_2": obs[:, 17:18],
            "obs_3": obs[:, 18:].reshape(-1, 2, 2),
        }
        more = inputs_of(spec, obs)
        if "branches" in spec:
            feed["action_masks"] = more[0].astype(np.float32)
        if "memory" in spec:
            feed["recurrent_in"] = more[1][:, None, :8]
        kinds = ["continuous"] * ("low" in spec) + ["discrete"] * ("branches" in spec)
        actions = session.run([f"deterministic_{kind}_actions" for kind in kinds], feed)
        actions = np.concatenate(actions, 1)  # of both kinds, side by side
        with torch.no_grad():
            expected = agent.act(*map(torch.as_tensor, (obs, *more)), deterministic=True)
        np.testing.assert_allclose(actions, expected[1 if "low" in spec else 0], atol=1e-4)


# Statistics


def test_statistics_are_those_of_the_entities_that_are_there():
    rms = Normalizer(22, entities=SPEC["entities"])
    batches = [observations(40, seed) for seed in range(3)]
    for batch in batches:
        rms.update(torch.as_tensor(batch))
    obs = np.concatenate(batches).astype(float)
    first = obs[:, 2:17].reshape(-1, 3)
    second = obs[:, 18:].reshape(-1, 2)
    first = first[first.any(1)]
    second = second[second.any(1)]
    assert len(first) < 0.7 * 5 * len(obs)
    for columns, rows, repeat in (
        (slice(0, 2), obs[:, :2], 1),
        (slice(2, 17), first, 5),
        (slice(17, 18), obs[:, 17:18], 1),
        (slice(18, 22), second, 2),
    ):
        expected = np.tile(rows.mean(0), repeat), np.tile(rows.var(0), repeat)
        np.testing.assert_allclose(rms.mean[columns], expected[0], atol=1e-4)
        np.testing.assert_allclose(rms.var[columns], expected[1], rtol=1e-3)
        np.testing.assert_allclose(rms.count[columns], len(rows), atol=1e-3)


def test_own_columns_are_normalized_as_without_entities():
    plain = Normalizer(22)
    rms = Normalizer(22, entities=SPEC["entities"])
    obs = torch.as_tensor(observations(60))
    for normalizer in (plain, rms):
        normalizer.update(obs)
    own = [0, 1, 17]
    torch.testing.assert_close(rms(obs)[:, own], plain(obs)[:, own], rtol=0, atol=0)


def test_normalized_padding_stays_padding_and_entities_stay_entities():
    """Also an entity that has the mean in all its numbers."""
    rms = Normalizer(22, min_std=0.01, entities=SPEC["entities"])
    obs = observations(60)
    obs[:, 18:] = (3.0, -1.0, 0.0, 0.0)  # an entity that never changes
    obs[1, 2:5] = 1e-7
    rms.update(torch.as_tensor(obs))
    assert not rms.shift[2:17].any() and not rms.shift[18:].any()
    for _ in range(2):
        x = rms(torch.as_tensor(obs)).numpy()
        for first, rows, size in SPEC["entities"]:
            columns = slice(first, first + rows * size)
            was = obs[:, columns].reshape(-1, size).any(1)
            assert np.array_equal(x[:, columns].reshape(-1, size).any(1), was)
        rms.update(torch.as_tensor(obs))
    assert x[:, 2:17].max() < 10 and abs(x[5, 18]) == pytest.approx(1, abs=1e-3)


def test_a_batch_without_entities_changes_no_statistics_of_theirs():
    rms = Normalizer(22, entities=SPEC["entities"])
    rms.update(torch.as_tensor(observations(60)))
    before = rms.mean.clone(), rms.var.clone(), rms.scale.clone()
    empty = observations(10)
    empty[:, 2:17] = 0
    empty[:, 18:] = 0
    rms.update(torch.as_tensor(empty))
    for old, new in zip(before, (rms.mean, rms.var, rms.scale), strict=True):
        torch.testing.assert_close(new[2:17], old[2:17])
        assert torch.isfinite(new).all() and not torch.equal(new[:2], old[:2])


# The wire, and scripts that flatten


def with_entities(obs, names=("Goals", "Others"), number=0, **kwargs):
    """Return an agent with the sensors of SPEC."""
    parts = [obs[:2], obs[2:17].reshape(5, 3), obs[17:18], obs[18:].reshape(2, 2)]
    info = agent_info(number, parts, **kwargs)
    for i, name in zip((1, 3), names, strict=True):
        info["observations"][i] |= {"name": name, "dimension_properties": (4, 1)}
    return info


def test_buffer_sensors_keep_their_rows_in_the_spaces(scripted):
    first, second, final, third = observations(4, seed=8)
    envs, _ = scripted(
        [
            {NAME: [with_entities(first)]},
            {NAME: [with_entities(final, done=True), with_entities(third)]},
        ]
    )
    shapes = {name: space.shape for name, space in envs.single_observation_space.spaces.items()}
    assert shapes == {"vector": (3,), "Goals": (5, 3), "Others": (2, 2)}
    assert envs.sensors == [2, (5, 3), 1, (2, 2)]
    obs, _ = envs.reset()
    assert envs.observation_space.contains(obs)

    def check(obs, expected):
        assert np.array_equal(np.squeeze(obs["vector"]), expected[[0, 1, 17]])
        assert np.array_equal(np.squeeze(obs["Goals"]), expected[2:17].reshape(5, 3))
        assert np.array_equal(np.squeeze(obs["Others"]), expected[18:].reshape(2, 2))

    check(obs, first)
    kept = {name: array.copy() for name, array in obs.items()}
    new, _, _, _, infos = envs.step(np.zeros((1, 2)))
    check(new, third)
    check(infos["final_obs"][0], final)
    for name, array in kept.items():
        assert np.array_equal(obs[name], array), "a step does not change earlier observations"


def test_names_of_buffer_sensors_are_unique(scripted):
    (obs,) = observations(1)
    envs, _ = scripted([{NAME: [with_entities(obs, names=("vector", "vector"))]}])
    assert [*envs.single_observation_space.spaces] == ["vector", "vector_2", "vector_3"]


def test_other_sensors_of_two_dimensions_are_part_of_the_vector(scripted):
    """They are flattened, but their export has their shape."""
    envs, _ = scripted([{NAME: [agent_info(0, [[[3, 4], [5, 6]], [7]])]}])
    assert envs.single_observation_space.shape == (5,) and envs.sensors == [(2, 2), 1]
    assert envs.entities == {}


def test_goal_observations_are_plain_inputs(scripted):
    """A sensor whose Observation Type is Goal Signal is a part of the vector, in its place."""
    info = agent_info(0, [[1.0, 2.0], [0.0, 1.0], [5.0]])
    info["observations"][1]["observation_type"] = 1
    envs, _ = scripted([{NAME: [info]}])
    obs, _ = envs.reset()
    assert obs.tolist() == [[1, 2, 0, 1, 5]]
    assert envs.sensors == [2, 2, 1] and envs.entities == {}


class Envs:
    """What describe() reads from a vector env."""

    def __init__(self, action_space):
        import gymnasium as gym

        self.single_observation_space = gym.spaces.Box(-1, 1, (22,))
        self.single_action_space = action_space
        self.sensors = [2, (5, 3), 1, (2, 2)]
        self.entities = {"Goals": (2, 5, 3), "Others": (18, 2, 2)}


def test_spec_has_the_entities_unless_they_are_to_be_flat(capsys):
    import gymnasium as gym

    envs = Envs(gym.spaces.MultiDiscrete([3, 2]))
    spec = ppo_discrete.describe(ppo_discrete.Args(), envs)
    assert spec["entities"] == [[2, 5, 3], [18, 2, 2]]
    assert "entities" not in ppo_discrete.describe(ppo_discrete.Args(flat_entities=True), envs)
    assert capsys.readouterr().out == ""
    assert "entities" not in runs.describe(ppo_discrete.Args(), envs, discrete=True)
    assert "Flattening the entities of Goals (5 x 3), Others (2 x 2)" in capsys.readouterr().out
