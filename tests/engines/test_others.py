"""Test the behaviors that are not trained: which ones they are, and the policies that play them."""

import os

import numpy as np
import onnx
import pytest
import torch
from conftest import agent
from onnx import TensorProto, helper

import ppo_discrete_multiagent as discrete
import ppo_lstm_multiagent as lstm
from onefile_rl import export
from onefile_rl.engines.onnx_policy import OnnxPolicy, PolicyError, parse_others
from onefile_rl.engines.unity import UnityPlayerError
from unity_vec_env import UnityVecEnv

NAME = "Scripted?team=0"
OTHER = "Other?team=1"
FLOAT = TensorProto.FLOAT


def request(*ids, name=NAME, **kwargs):
    return {name: [agent(i, [[i, 2.0 * i]], **kwargs) for i in ids]}


def act(envs, value=0.0):
    return envs.step(np.full(envs.action_space.shape, value, envs.action_space.dtype))


def sent(reply, name):
    """The actions that a player received for a behavior: continuous and discrete ones of each agent."""
    rows = reply.agent_actions[name].value
    return [(list(a.continuous_actions), list(a.discrete_actions)) for a in rows]


def save_model(path, nodes, inputs, outputs):
    """Write an ONNX model. inputs, outputs: by name, the type and the shape of a row."""
    values = lambda named: [
        helper.make_tensor_value_info(name, kind, ["batch", *shape])
        for name, (kind, shape) in named.items()
    ]
    graph = helper.make_graph(nodes, "policy", values(inputs), values(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=6)
    onnx.save(model, path)
    return str(path)


def doubling(path):
    """A policy of two actions, twice the observations."""
    return save_model(
        path,
        [helper.make_node("Add", ["obs_0", "obs_0"], ["continuous_actions"])],
        {"obs_0": (FLOAT, [2])},
        {"continuous_actions": (FLOAT, [2])},
    )


def highest_allowed(path):
    """A policy of a branch of three, which chooses the first of the actions that are allowed."""
    return save_model(
        path,
        [helper.make_node("ArgMax", ["action_masks"], ["discrete_actions"], axis=1, keepdims=1)],
        {"obs_0": (FLOAT, [2]), "action_masks": (FLOAT, [3])},
        {"discrete_actions": (TensorProto.INT64, [1])},
    )


def counting(path):
    """A policy with a memory: its action is the number of its decisions in the episode so far."""
    one = helper.make_tensor("one", FLOAT, [1], [1.0])
    nodes = [
        helper.make_node("Constant", [], ["one"], value=one),
        helper.make_node("Add", ["recurrent_in", "one"], ["recurrent_out"]),
        helper.make_node("Squeeze", ["recurrent_in"], ["continuous_actions"], axes=[1]),
    ]
    return save_model(
        path,
        nodes,
        {"obs_0": (FLOAT, [2]), "recurrent_in": (FLOAT, [1, 1])},
        {"continuous_actions": (FLOAT, [1]), "recurrent_out": (FLOAT, [1, 1])},
    )


def with_other(scripted, others, *messages, spec=(2, ()), **kwargs):
    """An env that trains NAME, whose player also has agents of OTHER."""
    script = [{**request(0), OTHER: other} for other in messages]
    specs = {NAME: (2, ()), OTHER: spec}
    settings = dict(others=others)
    return scripted(script, behavior=NAME, specs=specs, settings=settings, **kwargs)


# Policies


def test_a_policy_plays_the_agents_of_another_behavior(scripted, capsys, tmp_path):
    agents = request(7, 8, name=OTHER)[OTHER]
    policy = doubling(tmp_path / "policy.onnx")
    envs, player = with_other(scripted, {"Other": policy}, agents, agents[1:], agents)
    envs.reset()
    act(envs, 0.5), act(envs, 0.5)
    assert sent(player.replies[0], OTHER) == [([14, 28], []), ([16, 32], [])]
    assert sent(player.replies[1], OTHER) == [([16, 32], [])]
    assert sent(player.replies[0], NAME) == [([0.5, 0.5], [])], "the trained agents are not changed"
    assert f"agents of {OTHER} act with {policy}" in capsys.readouterr().out


def test_a_policy_sees_the_action_masks(scripted, tmp_path):
    forbidden = [[True, False, False], [True, True, False], []]
    agents = [agent(i, [[0, 0]], mask=mask) for i, mask in zip((7, 8, 9), forbidden, strict=True)]
    others = {"Other": highest_allowed(tmp_path / "policy.onnx")}
    envs, player = with_other(scripted, others, agents, agents, spec=(0, (3,)))
    envs.reset()
    act(envs)
    assert sent(player.replies[0], OTHER) == [([], [1]), ([], [2]), ([], [0])]


def test_a_policy_with_memory_remembers_each_episode_of_each_agent(scripted, tmp_path):
    agents = request(7, 8, name=OTHER)[OTHER]
    end = agent(7, [[0, 0]], done=True)
    others = {"Other": counting(tmp_path / "policy.onnx")}
    messages = [agents, agents, agents[:1], [end, *agents], agents, agents, agents]
    envs, player = with_other(scripted, others, *messages, spec=(1, ()))
    envs.reset()
    for _ in range(4):
        act(envs)
    chosen = [[a[0][0] for a in sent(reply, OTHER)] for reply in player.replies]
    assert chosen == [[0, 0], [1, 1], [2], [0, 2]], "agent 7 starts again after its end"
    envs.reset()
    act(envs)
    chosen = [a[0][0] for a in sent(player.replies[5], OTHER)]
    assert chosen == [0, 0], "a reset ends all episodes"


def images_model(path):
    """A policy whose action is the first pixel of each channel."""
    nodes = [
        helper.make_node("Slice", ["obs_0"], ["corner"], axes=[2, 3], starts=[0, 0], ends=[1, 1]),
        helper.make_node("Flatten", ["corner"], ["continuous_actions"], axis=1),
    ]
    return save_model(
        path, nodes, {"obs_0": (FLOAT, [3, 4, 6])}, {"continuous_actions": (FLOAT, [3])}
    )


@pytest.mark.parametrize("properties", [[1, 2, 2], [2, 2, 1]])
def test_a_policy_gets_images_as_unity_passes_them(scripted, tmp_path, properties):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    first = properties == [1, 2, 2]
    sent_pixels = pixels.transpose(2, 0, 1) if first else pixels
    data = dict(data=(sent_pixels.ravel() / 255).tolist())
    info = agent(7, [])
    info["observations"] = [
        dict(shape=sent_pixels.shape, float_data=data, dimension_properties=properties)
    ]
    others = {"Other": images_model(tmp_path / "policy.onnx")}
    envs, player = with_other(scripted, others, [info], [info], spec=(3, ()))
    envs.reset()
    act(envs)
    ((chosen, _),) = sent(player.replies[0], OTHER)
    np.testing.assert_allclose(chosen, pixels[0, 0] / 255, atol=1e-6)


def test_the_exported_policy_of_a_run_samples_as_unity_does(scripted, tmp_path):
    """The run's policy.onnx acts with the policy's probabilities, and never chooses a masked action."""
    spec = {"obs_dim": 2, "sensors": [2], "branches": [3], "start": [0]}
    policy = discrete.Agent(spec, discrete.Args(hidden_sizes=(4,)))
    export.export(policy, spec, tmp_path / "policy.onnx")
    agents = [agent(i, [[0.5, -1]], mask=[False, True, False]) for i in range(400)]
    others = {"Other": str(tmp_path)}
    envs, player = with_other(scripted, others, agents, agents, agents, spec=(0, (3,)))
    envs.reset()
    act(envs), act(envs)
    chosen = np.array([[a[1][0] for a in sent(player.replies[i], OTHER)] for i in range(2)])
    masks = torch.tensor([[True, False, True]])
    with torch.no_grad():
        (logprobs,) = policy.get_choice_logprobs(torch.tensor([[0.5, -1.0]]), masks)
    assert not (chosen == 1).any()
    share = (chosen == 0).mean()
    assert abs(share - logprobs[0, 0].exp().item()) < 0.1 and 0.1 < share < 0.9
    assert (chosen[0] != chosen[1]).any(), "new samples in each step"


def test_sampled_actions_follow_the_seed(tmp_path):
    spec = {"obs_dim": 2, "sensors": [2], "branches": [3], "start": [0]}
    export.export(discrete.Agent(spec, discrete.Args()), spec, tmp_path / "policy.onnx")
    inputs = (range(50), [np.zeros((50, 2))], np.ones((50, 3)), 0, [3])
    draws = []
    for seed in (1, 1, 2):
        policy = OnnxPolicy("Other", tmp_path / "policy.onnx", seed)
        draws.append([policy.act(*inputs)[1].ravel().tolist() for _ in range(3)])
    assert draws[0] == draws[1] != draws[2]


def test_the_memory_of_an_exported_lstm_is_kept(tmp_path):
    """The same observation gives other probabilities later in the episode, as in the agent itself."""
    spec = {"obs_dim": 2, "sensors": [2], "branches": [3], "start": [0], "memory": 8}
    args = lstm.Args(hidden_sizes=(4,))
    export.export(lstm.Agent(spec, args), spec, tmp_path / "policy.onnx")
    policy = OnnxPolicy("Other", tmp_path / "policy.onnx", 0)
    policy.act([7], [np.ones((1, 2))], np.ones((1, 3)), 0, [3])
    first = policy.memory[7].copy()
    policy.act([7], [np.ones((1, 2))], np.ones((1, 3)), 0, [3])
    assert np.abs(first).max() > 0 and not np.allclose(first, policy.memory[7])


def test_the_name_with_a_team_comes_first(scripted, tmp_path):
    others = {"Other": counting(tmp_path / "a.onnx"), OTHER: doubling(tmp_path / "b.onnx")}
    agents = request(7, name=OTHER)[OTHER]
    envs, player = with_other(scripted, others, agents, agents)
    envs.reset()
    act(envs)
    assert sent(player.replies[0], OTHER) == [([14, 28], [])]


def test_words_of_the_command_line():
    words = ["Goalie=a.onnx", "Edge?team=1=runs/x=y", "A b=c.onnx"]
    expected = {"Goalie": "a.onnx", "Edge?team=1": "runs/x=y", "A b": "c.onnx"}
    assert parse_others(words) == expected
    for word in ("Goalie", "=a.onnx", "Goalie="):
        with pytest.raises(ValueError, match="is not NAME=FILE"):
            parse_others([word])


# Bad policies: one line, and before the game starts where that is possible


def refused(match, **others):
    with pytest.raises(ValueError, match=match) as caught:
        UnityVecEnv("no/such/build", others=others)
    assert "\n" not in str(caught.value)


def test_a_policy_that_cannot_be_loaded_is_refused_before_the_game_starts(tmp_path):
    refused("--others Other=no.onnx: there is no such file: give an .onnx file", Other="no.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model \x1b[2J")
    refused("onnxruntime can't load it", Other=str(tmp_path / "bad.onnx"))
    (tmp_path / "my_ppo.py").write_text("")
    refused(
        f"no policy.onnx, write it with: python my_ppo.py --export {tmp_path}", Other=str(tmp_path)
    )
    node = [helper.make_node("Identity", ["obs_0"], ["action"])]
    vector = (FLOAT, [2])
    path = save_model(tmp_path / "old.onnx", node, {"obs_0": vector}, {"action": vector})
    refused("has no output continuous_actions or discrete_actions", Other=path)


def test_a_policy_that_is_older_than_its_checkpoint_is_mentioned(scripted, capsys, tmp_path):
    doubling(tmp_path / "policy.onnx")
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    os.utime(tmp_path / "policy.onnx", (1, 1))
    with_other(scripted, {"Other": str(tmp_path)}, request(7, name=OTHER)[OTHER])
    assert "checkpoint is newer than its policy.onnx, write it again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "spec", "obs", "match"),
    [
        (doubling, (3, ()), [[1, 2]], "has 2 continuous actions, the behavior 3"),
        (doubling, (2, (3,)), [[1, 2]], "has no discrete actions, the behavior 1"),
        (doubling, (0, (3,)), [[1, 2]], "has 2 continuous actions, the behavior 0"),
        (
            doubling,
            (2, ()),
            [[1, 2, 3]],
            r"obs_0 has the shape \[2\] in the model and \[3\] in the",
        ),
        (doubling, (2, ()), [[1, 2], [3]], "has the inputs obs_0, the behavior obs_0, obs_1"),
        (highest_allowed, (0, (2,)), [[1, 2]], r"action_masks has the shape \[3\] in the model"),
    ],
)
def test_a_policy_of_another_behavior_is_one_line(scripted, tmp_path, model, spec, obs, match):
    others = {"Other": model(tmp_path / "policy.onnx")}
    envs, _ = with_other(scripted, others, [agent(7, obs)], spec=spec)
    envs.reset()
    with pytest.raises(PolicyError, match=match) as caught:
        act(envs)
    assert "\n" not in str(caught.value) and "choose a model of this behavior" in str(caught.value)


def test_actions_that_are_no_numbers_are_refused(scripted, tmp_path):
    nodes = [helper.make_node("Log", ["obs_0"], ["continuous_actions"])]
    shape = {"obs_0": (FLOAT, [2])}, {"continuous_actions": (FLOAT, [2])}
    others = {"Other": save_model(tmp_path / "policy.onnx", nodes, *shape)}
    envs, _ = with_other(scripted, others, [agent(7, [[-1, 0]])])
    envs.reset()
    with pytest.raises(PolicyError, match="the model's actions are not finite"):
        act(envs)


def test_a_policy_for_the_trained_behavior_is_refused(scripted, tmp_path):
    policy = doubling(tmp_path / "policy.onnx")
    for name, behavior in ((NAME, None), ("Scripted", "Scripted"), (NAME, "Scripted")):
        with pytest.raises(UnityPlayerError, match="this is the behavior that is trained"):
            scripted([request(0)] * 2, behavior=behavior, settings=dict(others={name: policy}))


def test_a_policy_without_agents_is_mentioned(scripted, capsys, tmp_path):
    policy = doubling(tmp_path / "policy.onnx")
    scripted([request(0)], settings=dict(others={"Goalie": policy}))
    out = capsys.readouterr().out
    assert f"--others Goalie: the game has no such behavior so far, it has {NAME}" in out


# Teams

EDGE = {"Edge?team=0": (2, ()), "Edge?team=1": (2, ()), OTHER: (2, ())}


def edge(*messages):
    """Messages with agents of the two teams, given by their ids, or as agents."""
    to_agent = lambda x: agent(x, [[x, 2.0 * x]]) if isinstance(x, int) else x
    return [
        {f"Edge?team={team}": [to_agent(x) for x in ids] for team, ids in enumerate(teams)}
        for teams in messages
    ]


@pytest.mark.parametrize("behavior", ["Edge", None])
def test_a_name_without_a_team_means_all_teams(scripted, capsys, behavior):
    envs, player = scripted(
        edge(([0, 1], [2]), ([1], [2]), ([0], [])), behavior=behavior, specs=EDGE
    )
    obs, infos = envs.reset()
    assert envs.behavior == "Edge" and obs[:, 0].tolist() == [0, 1, 2] and infos["ready"].all()
    actions = np.array([[0.1, 0], [0.2, 0], [0.3, 0]], np.float32)
    obs, *_, infos = envs.step(actions)
    first = lambda reply, team: [round(a[0][0], 3) for a in sent(reply, f"Edge?team={team}")]
    assert (first(player.replies[0], 0), first(player.replies[0], 1)) == ([0.1, 0.2], [0.3])
    assert infos["ready"].tolist() == [False, True, True]
    envs.step(actions)
    assert (first(player.replies[1], 0), first(player.replies[1], 1)) == ([0.2], [0.3])
    assert "act at random" not in capsys.readouterr().out


def test_a_name_with_a_team_means_this_team(scripted, capsys):
    script = edge(([0, 1], [2]), ([0], [2]))
    envs, player = scripted(script, behavior="Edge?team=1", specs=EDGE)
    assert envs.reset()[0][:, 0].tolist() == [2]
    act(envs)
    assert len(sent(player.replies[0], "Edge?team=0")) == 2, "they act at random"
    assert "Training Edge?team=1; agents of Edge?team=0 act at random" in capsys.readouterr().out


def test_one_team_is_trained_against_a_policy_of_the_other(scripted, tmp_path):
    """A base name in others means the teams that are not trained."""
    settings = dict(others={"Edge": doubling(tmp_path / "policy.onnx")})
    script = edge(([0, 1], [2]), ([0], [2]))
    envs, player = scripted(script, behavior="Edge?team=0", specs=EDGE, settings=settings)
    envs.reset()
    act(envs, 0.5)
    assert sent(player.replies[0], "Edge?team=1") == [([4, 8], [])]
    assert sent(player.replies[0], "Edge?team=0") == [([0.5, 0.5], [])] * 2


def test_a_team_may_appear_later(scripted):
    script = edge(([0], []), ([0], [2]), ([0], [2]))
    envs, player = scripted(script, behavior="Edge", specs=EDGE, max_agents=2)
    envs.reset()
    obs, *_, infos = act(envs)
    assert infos["ready"].all() and obs[:, 0].tolist() == [0, 2]
    act(envs, 0.5)
    assert sent(player.replies[1], "Edge?team=1") == [([0.5, 0.5], [])]


def test_an_id_that_moves_to_another_name_ends_under_the_old_one(scripted):
    """Agents are told apart by behavior and id. The agent's next decision belongs to a new episode in a free slot."""
    moved = agent(1, [[5, 5]], reward=2.0, done=True)
    script = edge(([0, 1], [2]), ([0, moved], [1, 2]), ([0], [1, 2]))
    envs, _ = scripted(script, behavior="Edge", specs=EDGE)
    envs.reset()
    obs, rewards, terminated, _, infos = act(envs)
    assert terminated.tolist() == [False, True, False] and rewards.tolist() == [0, 2, 0]
    assert infos["final_obs"][1].tolist() == [5, 5] and obs[1].tolist() == [1, 2]
    assert infos["ready"].all()
    *_, infos = act(envs)
    assert infos["closed"].all(), "its decision under the new name gets its reward"


def test_an_end_under_the_old_name_may_come_after_the_first_decision_under_the_new_one(scripted):
    moved = agent(1, [[5, 5]], reward=2.0, done=True)
    script = edge(([0, 1], []), ([0], [1]), ([0, moved], [1]))
    envs, _ = scripted(script, behavior="Edge", specs=EDGE, max_agents=3)
    envs.reset()
    _, _, terminated, _, infos = act(envs)
    assert not terminated.any() and infos["ready"].tolist() == [True, False, True]
    _, rewards, terminated, _, infos = act(envs)
    assert terminated.tolist() == [False, True, False] and rewards.tolist() == [0, 2, 0]
    assert infos["closed"].all(), "both decisions of the id are complete"


def test_teams_with_other_actions_are_refused(scripted):
    specs = {"Edge?team=0": (2, ()), "Edge?team=1": (3, ())}
    with pytest.raises(UnityPlayerError, match="or choose one team, for example with --behavior"):
        scripted(edge(([0], [2])), behavior="Edge", specs=specs)


def test_names_that_share_a_beginning_are_not_teams(scripted):
    specs = {"Edge?team=0": (2, ()), "Edges?team=0": (2, ())}
    script = [{"Edge?team=0": [agent(0, [[1]])], "Edges?team=0": [agent(1, [[1]])]}]
    with pytest.raises(UnityPlayerError, match="several behaviors, choose one with --behavior"):
        scripted(script, specs=specs)
    envs, _ = scripted(script, behavior="Edge", specs=specs)
    assert envs.num_envs == 1
