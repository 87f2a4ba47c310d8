"""Unity's checks of a model: every export passes them, and each of them can fail."""

import dataclasses
import re
from contextlib import closing

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import lbc_discrete
import ppo_continuous_multiagent as ppo
import ppo_discrete_multiagent as ppo_discrete
import ppo_hybrid_multiagent as ppo_hybrid
import ppo_lstm_multiagent as ppo_lstm
import ppo_pixel
import sac_continuous as sac
import unity_vec_env
from onefile_rl import export
from onefile_rl.engines import unity_model
from onefile_rl.engines.scenes import SCENES as ALL_SCENES
from onefile_rl.engines.unity_model import Behavior, check_model, verdict

# The scripts for each scene
CONTINUOUS = (ppo, sac)
DISCRETE = (ppo_discrete, ppo_lstm, lbc_discrete)
SCENES = [scene for scene in ALL_SCENES if scene != "WallClimb"]  # it has several behaviors
SCRIPTS = dict.fromkeys(SCENES, DISCRETE)
SCRIPTS |= dict.fromkeys(("3DBall", "Crawler", "Mixed"), CONTINUOUS)
SCRIPTS |= dict.fromkeys(("FoodCollector", "MixedHybrid"), (ppo_hybrid,))
SCRIPTS |= {"GridWorld": (ppo_pixel,)}


def make_args(script, scene):
    if script is ppo_pixel:
        return script.Args(env_id=scene)
    args = script.Args(env_id=scene, hidden_sizes=(8,))
    if script is ppo_lstm:
        args = dataclasses.replace(args, memory_size=12)
    return args


@pytest.mark.parametrize("scene", SCENES)
def test_every_export_of_every_scene_passes_unitys_checks(scene, tmp_path):
    """The sensors and actions are those of the player, not those of the spec."""
    script, *_ = SCRIPTS[scene]
    envs, _ = script.make_envs(make_args(script, scene), seed=1)
    with closing(envs):
        behavior = unity_model.behavior_of_layout(envs.behavior, envs.layout)
    assert len(behavior.sensors) == len(envs.sensors)
    for script in SCRIPTS[scene]:
        args = make_args(script, scene)
        spec = script.describe(args, envs)
        model = tmp_path / f"{script.__name__}.onnx"
        export.export(script.Agent(spec, args).eval(), spec, model)
        assert verdict(model, behavior) == (
            True,
            f"{model} fits {scene}?team=0: it passes Unity's nine checks",
        )
        assert check_model(model, unity_model.behavior_of_spec(scene, spec)) == []
        check_constant_outputs(model)


def check_constant_outputs(path):
    """Package 2.x reads constants by their names, and 3.x runs the model and reads outputs: both must work."""
    graph = onnx.load(path).graph
    constants = {node.output[0] for node in graph.node if node.op_type == "Constant"}
    outputs = {output.name for output in graph.output}
    numbers = {name for name in outputs if not name.endswith(("_actions", "recurrent_out"))}
    kinds = [kind for kind in ("continuous", "discrete") if f"{kind}_actions" in outputs]
    shapes = [f"{kind}_action_output_shape" for kind in kinds]
    assert numbers == {"version_number", "memory_size", *shapes}
    assert kinds and numbers <= constants


@pytest.mark.parametrize(
    "script", [ppo, ppo_discrete, ppo_hybrid, ppo_lstm], ids=lambda x: x.__name__
)
def test_exports_of_several_sensors_and_of_flat_entities_pass(script, tmp_path):
    spec = {"obs_dim": 9, "sensors": [[2, 3], 1, 2], "entities": [[0, 2, 3]]}
    if script in (ppo, ppo_hybrid):
        spec |= {"action_dim": 2, "low": -1.0, "high": 1.0}
    if script is not ppo:
        spec |= {"branches": [4, 2], "start": [0, 0]}
    if script is ppo_lstm:
        spec |= {"memory": 6}
    flat = {key: value for key, value in spec.items() if key != "entities"}
    args = script.Args(hidden_sizes=(4,))
    branches = spec.get("branches", [])
    sensors = [("Goals", (2, 3)), ("Body", (1,)), ("Eyes", (2,))]
    behavior = Behavior("Mine", sensors, spec.get("action_dim", 0), branches)
    for each in (spec, flat):
        export.export(script.Agent(each, args).eval(), each, tmp_path / "policy.onnx")
        assert check_model(tmp_path / "policy.onnx", behavior) == []
        assert check_model(tmp_path / "policy.onnx", behavior, deterministic=True) == []


# Each check fails

BEHAVIOR = Behavior("Mine", [("Goals", (2, 3)), ("Eye", (3, 4, 5)), ("Body", (2,))], 2, [4, 2])


def make_model(
    path, memory=0.0, version=3.0, drop=(), opset=9, inputs=None, computed=(), **changes
):
    """Write a model with continuous and discrete actions.

    drop: names of inputs and outputs to leave out. inputs: shapes to change or add. computed: outputs that are not
    constants. changes: the numbers of constants.
    """
    shapes = {
        "obs_0": ["batch", 2, 3],
        "obs_1": ["batch", 3, 4, 5],
        "obs_2": ["batch", 2],
        "action_masks": ["batch", 6],
    }
    if memory > 0:
        shapes["recurrent_in"] = ["batch", 1, int(memory)]
    shapes |= inputs or {}
    constants = {
        "version_number": [version],
        "memory_size": [memory],
        "continuous_action_output_shape": [2.0],
        "discrete_action_output_shape": [[4.0, 2.0]],
    } | changes
    nodes = []
    outputs = []
    for name, numbers in constants.items():
        array = np.array(numbers, np.float32)
        value = numpy_helper.from_array(array)
        nodes.append(helper.make_node("Constant", [], [f"{name}_constant"], value=value))
        operator = "Neg" if name in computed else "Identity"
        nodes.append(helper.make_node(operator, [f"{name}_constant"], [name]))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
    for name, kind, size in (
        ("continuous_actions", TensorProto.FLOAT, 2),
        ("deterministic_continuous_actions", TensorProto.FLOAT, 2),
        ("discrete_actions", TensorProto.INT64, 2),
        ("deterministic_discrete_actions", TensorProto.INT64, 2),
        ("recurrent_out", TensorProto.FLOAT, int(memory)),
    ):
        outputs.append(helper.make_tensor_value_info(name, kind, ["batch", size]))
        nodes.append(helper.make_node("Cast", ["obs_2"], [name], to=kind))
    if memory <= 0:
        drop = (*drop, "recurrent_out")
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
        if name not in drop
    ]
    outputs = [output for output in outputs if output.name not in drop]
    graph = helper.make_graph(nodes, "policy", given, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


@pytest.mark.parametrize("memory", [0.0, 6.0])
def test_a_model_with_all_kinds_of_inputs_and_actions_passes(memory, tmp_path):
    path = make_model(tmp_path / "policy.onnx", memory)
    assert check_model(path, BEHAVIOR) == check_model(path, BEHAVIOR, deterministic=True) == []


@pytest.mark.parametrize(
    ("check", "level", "text", "changes"),
    [
        (1, "warning", "version_number must be .* missing", dict(drop=["version_number"])),
        (1, "warning", "memory_size must be .* missing", dict(drop=["memory_size"])),
        (1, "warning", "version_number must be .* computed", dict(computed=["version_number"])),
        (
            2,
            "warning",
            "no output continuous_actions or discrete_actions",
            dict(drop=["continuous_actions", "discrete_actions"]),
        ),
        (
            2,
            "warning",
            "continuous_action_output_shape must be",
            dict(drop=["continuous_action_output_shape"]),
        ),
        (
            2,
            "warning",
            "discrete_action_output_shape must be",
            dict(computed=["discrete_action_output_shape"]),
        ),
        (
            2,
            "warning",
            "says that there are no actions",
            dict(continuous_action_output_shape=[0.0]),
        ),
        (3, "error", "version_number is 1", dict(version=1.0)),
        (3, "error", "version_number is 4", dict(version=4.0)),
        (3, "error", "version_number is 2, whose memory", dict(version=2.0, memory=6.0)),
        (4, "warning", "memory_size is -1", dict(memory=-1.0)),
        (5, "warning", r"no input obs_1 for Eye of shape \(3, 4, 5\)", dict(drop=["obs_1"])),
        (5, "warning", "no input recurrent_in", dict(memory=6.0, drop=["recurrent_in"])),
        (5, "warning", "no input action_masks", dict(drop=["action_masks"])),
        (6, "warning", "the input obs_3", dict(inputs={"obs_3": ["batch", 2]})),
        (6, "warning", "the input time", dict(inputs={"time": ["batch", 1]})),
        (
            7,
            "warning",
            r"obs_0 has the shape \(batch, 6\), but Goals has \(batch, 2, 3\)",
            dict(inputs={"obs_0": ["batch", 6]}),
        ),
        (7, "warning", "obs_0 has .* Goals has", dict(inputs={"obs_0": ["batch", 3, 2]})),
        (7, "warning", "obs_0 has .* Goals has", dict(inputs={"obs_0": ["batch", "rows", 3]})),
        (7, "warning", "obs_1 has .* Eye has", dict(inputs={"obs_1": ["batch", 4, 5, 3]})),
        (7, "warning", "obs_2 has .* Body has", dict(inputs={"obs_2": ["batch", 3]})),
        (7, "warning", "prev_action has the size 3", dict(inputs={"prev_action": ["batch", 3]})),
        (
            8,
            "warning",
            r"3 continuous action\(s\), the agents 2",
            dict(continuous_action_output_shape=[3.0]),
        ),
        (
            8,
            "warning",
            r"branches of \[4, 2, 1\], the agents \[4, 2\]",
            dict(discrete_action_output_shape=[[4.0, 2.0, 1.0]]),
        ),
        (
            8,
            "warning",
            r"branches of \[4, 3\], the agents \[4, 2\]",
            dict(discrete_action_output_shape=[[4.0, 3.0]]),
        ),
        (9, "error", "no output recurrent_out", dict(memory=6.0, drop=["recurrent_out"])),
        (0, "unnoticed", "opset is 16", dict(opset=16)),
        (0, "unnoticed", "action_masks has 5 column", dict(inputs={"action_masks": ["batch", 5]})),
        (
            0,
            "unnoticed",
            r"recurrent_in has 5 column\(s\) for a memory of 6",
            dict(memory=6.0, inputs={"recurrent_in": ["batch", 1, 5]}),
        ),
        (
            0,
            "unnoticed",
            r"obs_2 has 2 dimension\(s\), but Body has 1",
            dict(inputs={"obs_2": ["batch", 2, 1]}),
        ),
    ],
)
def test_each_check_fails(check, level, text, changes, tmp_path):
    path = make_model(tmp_path / "policy.onnx", **changes)
    problem, *others = check_model(path, BEHAVIOR)
    assert (problem.check, problem.level) == (check, level)
    # The inputs of version 2 are not checked, which is said too
    assert [other.level for other in others] == ["unnoticed"] * (changes.get("version") == 2.0)
    assert re.search(text, problem.text), problem.text
    fits, said = verdict(path, BEHAVIOR)
    number = f"check {check}, {level}" if check else "not checked by Unity"
    assert not fits and f"{path} does not fit Mine:\n  {number}: {problem.text}" in said


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_deterministic_inference_needs_its_own_output(kind, tmp_path):
    path = make_model(tmp_path / "policy.onnx", drop=[f"deterministic_{kind}_actions"])
    assert check_model(path, BEHAVIOR) == []
    (problem,) = check_model(path, BEHAVIOR, deterministic=True)
    assert problem.check == 2
    fits, said = verdict(path, BEHAVIOR)
    assert fits and "fits Mine, but\n  with Deterministic Inference, check 2, warning" in said


def test_types_that_unity_casts_are_reported(tmp_path):
    path = make_model(tmp_path / "policy.onnx")
    model = onnx.load(path)
    for output in model.graph.output:
        if output.name == "discrete_actions":
            output.type.tensor_type.elem_type = TensorProto.FLOAT
        if output.name == "memory_size":
            output.type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(model, path)
    texts = [problem.text for problem in check_model(path, BEHAVIOR)]
    assert texts == ["memory_size must be of floats", "discrete_actions must be of integers"]


def test_several_problems_are_all_reported(tmp_path):
    changes = dict(drop=["obs_0"], inputs={"obs_2": ["batch", 7], "time": ["batch", 1]})
    problems = check_model(make_model(tmp_path / "policy.onnx", **changes), BEHAVIOR)
    assert [problem.check for problem in problems] == [5, 6, 7]


def test_a_model_of_mlagents_1_is_not_checked_further(tmp_path):
    path = make_model(tmp_path / "policy.onnx", version=2.0)
    (problem,) = check_model(path, BEHAVIOR)
    assert problem.check == 0 and "ML-Agents 1.x" in problem.text


# The command


def export_for_basic(path, **changes):
    spec = {"obs_dim": 20, "sensors": [20], "branches": [3], "start": [0]} | changes
    export.export(ppo_discrete.Agent(spec, ppo_discrete.Args()).eval(), spec, path)
    return spec


def test_command_prints_the_verdict_against_a_build(tmp_path, capsys):
    path = tmp_path / "policy.onnx"
    export_for_basic(path)
    unity_vec_env.main(path="Basic", check=str(path))
    assert f"{path} fits Basic?team=0: it passes Unity's nine checks" in capsys.readouterr().out
    export_for_basic(path, branches=[4])
    with pytest.raises(SystemExit) as exit:
        unity_vec_env.main(path="Basic", check=str(path))
    assert exit.value.code == 1
    assert "check 8, warning: the model has discrete branches of [4]" in capsys.readouterr().out


def test_command_prints_the_verdict_against_a_run(tmp_path, capsys):
    spec = export_for_basic(tmp_path / "policy.onnx")
    torch.save({"spec": spec}, tmp_path / "checkpoint.pt")
    unity_vec_env.main(check=str(tmp_path / "policy.onnx"), run=str(tmp_path))
    assert f"fits {tmp_path}: it passes" in capsys.readouterr().out
    torch.save({"spec": spec | {"sensors": [8, 12]}}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit):
        unity_vec_env.main(check=str(tmp_path / "policy.onnx"), run=str(tmp_path))
    out = capsys.readouterr().out
    assert "check 5, warning: there is no input obs_1 for sensor 1 of shape (12,)" in out
    assert "check 7, warning: obs_0 has the shape (batch, 20), but sensor 0 has (batch, 8)" in out


def test_command_refuses_bad_input_in_one_line(tmp_path):
    path = tmp_path / "policy.onnx"
    export_for_basic(path)

    def refused(match, **kwargs):
        with pytest.raises(SystemExit, match=match) as exit:
            unity_vec_env.main(path="Basic", **kwargs)
        assert "\n" not in str(exit.value)

    refused("it is for --check", run="runs/x")
    refused("no checkpoint of a run found", check=str(path), run=str(tmp_path))
    refused("is not an ONNX model: there is no such file", check=str(tmp_path / "nothing.onnx"))
    (tmp_path / "text.onnx").write_text("text")
    refused("is not an ONNX model", check=str(tmp_path / "text.onnx"))
    for spec in ({"inputs": ["obs"]}, {"sensors": "x"}, {"sensors": ["Eye"], "branches": [2]}):
        torch.save({"spec": spec}, tmp_path / "checkpoint.pt")
        refused("Godot game|can't be read", check=str(path), run=str(tmp_path))
    torch.save([1], tmp_path / "checkpoint.pt")
    refused("no checkpoint of a run found", check=str(path), run=str(tmp_path))
