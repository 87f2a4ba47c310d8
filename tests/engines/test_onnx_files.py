"""ONNX files of strangers: each is refused in one line, opens no other file and takes no large memory."""

import os
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onefile_rl.engines import unity_model
from onefile_rl.engines.onnx_policy import OnnxPolicy, PolicyError

pytestmark = pytest.mark.usefixtures("empty_folder")
OBS = helper.make_tensor_value_info("obs_0", TensorProto.FLOAT, ["batch", 6])
ACTIONS = helper.make_tensor_value_info("continuous_actions", TensorProto.FLOAT, ["batch", 2])
WEIGHTS = numpy_helper.from_array(np.ones((6, 2), np.float32), "w")
MULTIPLY = helper.make_node("MatMul", ["obs_0", "w"], ["product"])


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def write(nodes, weights=(WEIGHTS,), inputs=(OBS,), outputs=(ACTIONS,), domain=None):
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=weights)
    opsets = [helper.make_opsetid("", 13)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    Path("policy.onnx").write_bytes(model.SerializeToString())


def act():
    policy = OnnxPolicy("Goalie", "policy.onnx", seed=1)
    return policy.act([0, 1], [np.ones((2, 6), np.float32)], np.ones((2, 0), bool), 2, [])


def refused():
    """Return the line with which a policy is refused. No more than 500 MB are taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, PolicyError)) as caught:
        act()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
    text = str(caught.value)
    assert text.startswith("--others Goalie=policy.onnx: ")
    assert len(text.splitlines()) == 1 and len(text) < 1000
    return text


def test_a_plain_model_acts():
    write([node("MatMul", "obs_0 w", "continuous_actions")])
    assert act()[0].tolist() == [[6, 6], [6, 6]]


@pytest.mark.parametrize("place", ["weights.bin", "../weights.bin", "/etc/passwd", "/dev/zero"])
@pytest.mark.parametrize("where", ["initializer", "constant", "branch"])
def test_other_files_are_not_opened(place, where):
    Path("weights.bin").write_bytes(bytes(48))
    outside = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(6, 2))
    outside.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place), ("offset", "0"), ("length", "48")):
        outside.external_data.add(key=key, value=value)
    multiply = node("MatMul", "obs_0 w", "continuous_actions")
    if where == "initializer":
        write([multiply], [outside])
    elif where == "constant":
        write([node("Constant", "", "w", value=outside), multiply], [])
    else:
        inner = [node("Constant", "", "v", value=outside), node("MatMul", "obs_0 v", "x")]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
        branch = helper.make_graph(inner, "branch", [], [x])
        yes = numpy_helper.from_array(np.array(True), "yes")
        nodes = [node("If", "yes", "continuous_actions", then_branch=branch, else_branch=branch)]
        write(nodes, [yes])
    assert "its weights are in other files: export it as one file" in refused()
    with pytest.raises(ValueError, match="its weights are in other files"):
        unity_model.Model("policy.onnx")


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Expand"])
def test_memory_is_bounded(kind):
    shape = numpy_helper.from_array(np.array([60_000, 60_000], np.int64), "shape")
    nodes = [MULTIPLY, node("ReduceSum", "obs_0", "sum", keepdims=0)]
    nodes.append(node(kind, "shape" if kind == "ConstantOfShape" else "sum shape", "large"))
    nodes.append(node("ReduceSum", "large", "number", keepdims=0))
    nodes.append(node("Add", "product number", "continuous_actions"))
    write(nodes, [WEIGHTS, shape])
    assert "onnxruntime: " in refused()


def test_a_model_that_does_not_end_is_refused():
    condition = helper.make_tensor_value_info("go_on", TensorProto.BOOL, [])
    count = helper.make_tensor_value_info("count", TensorProto.INT64, [])
    value = helper.make_tensor_value_info("value", TensorProto.FLOAT, None)
    kept = helper.make_tensor_value_info("kept", TensorProto.FLOAT, None)
    again = helper.make_tensor_value_info("again", TensorProto.BOOL, [])
    inner = [node("Identity", "go_on", "again"), node("Identity", "value", "kept")]
    body = helper.make_graph(inner, "body", [count, condition, value], [again, kept])
    yes = numpy_helper.from_array(np.array(True), "yes")
    loop = helper.make_node("Loop", ["", "yes", "product"], ["continuous_actions"], body=body)
    write([MULTIPLY, loop], [WEIGHTS, yes])
    assert "it has the operator Loop, which may not end" in refused()


def test_operators_of_others_are_refused():
    write([node("Evil", "obs_0", "continuous_actions", domain="evil")], domain="evil")
    assert "it has the operator Evil of evil" in refused()


def output_of(kind, shape):
    return helper.make_tensor_value_info("continuous_actions", kind, shape)


OUTPUTS = {
    "strings": (
        [MULTIPLY, node("Cast", "product", "continuous_actions", to=TensorProto.STRING)],
        output_of(TensorProto.STRING, ["batch", 2]),
    ),
    "a number": (
        [node("ReduceSum", "obs_0", "continuous_actions", keepdims=0)],
        output_of(TensorProto.FLOAT, []),
    ),
    "a list": (
        [node("SequenceConstruct", "obs_0", "continuous_actions")],
        helper.make_tensor_sequence_value_info("continuous_actions", TensorProto.FLOAT, None),
    ),
    "one row": (
        [
            node("MatMul", "obs_0 w", "all"),
            node("ReduceMax", "all", "continuous_actions", axes=[0], keepdims=1),
        ],
        ACTIONS,
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_other_types_are_refused(kind):
    nodes, output = OUTPUTS[kind]
    write(nodes, outputs=[output])
    assert "the output continuous_actions must be an array of numbers" in refused()


@pytest.mark.parametrize("size", [10**12, 4])
def test_a_memory_of_another_size_is_refused(size):
    memory = helper.make_tensor_value_info("recurrent_in", TensorProto.FLOAT, ["batch", 1, size])
    after = helper.make_tensor_value_info("recurrent_out", TensorProto.FLOAT, None)
    nodes = [
        node("MatMul", "obs_0 w", "continuous_actions"),
        node("Relu", "obs_0", "recurrent_out"),
    ]
    write(nodes, inputs=[OBS, memory], outputs=[ACTIONS, after])
    expected = "has the shape [1, 1000000000000]" if size > 4 else "recurrent_out has the shape"
    assert expected in refused()


def test_files_that_are_no_models_are_refused():
    for content in (b"", b"cos\nsystem\n(S'touch run'\ntR.", bytes(range(256)) * 40):
        Path("policy.onnx").write_bytes(content)
        refused()
        with pytest.raises(ValueError):
            unity_model.check_model("policy.onnx", BEHAVIOR)
    assert not Path("run").exists()
    Path("policy.onnx").unlink()
    os.mkfifo("policy.onnx")
    assert "there is no such file" in refused()
    with pytest.raises(ValueError, match="it is not a file"):
        unity_model.Model("policy.onnx")


BEHAVIOR = unity_model.Behavior("Goalie", [("vector", (6,))], 2, [])


@pytest.mark.parametrize("value", [np.nan, 1e30, "text", np.zeros(2000)])
def test_constants_of_a_checked_model_are_numbers(value):
    array = np.array([value], object) if isinstance(value, str) else np.array(value, np.float32)
    constants = [numpy_helper.from_array(np.atleast_1d(array), name) for name in ("v", "m")]
    nodes = [node("Identity", "v", "version_number"), node("Identity", "m", "memory_size")]
    names = ("version_number", "memory_size")
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in names]
    write(nodes, constants, outputs=outputs)
    with pytest.raises(ValueError, match="the constant version_number has no valid numbers"):
        unity_model.check_model("policy.onnx", BEHAVIOR)


def test_names_in_a_checked_model_do_not_control_the_terminal():
    name = "a\033[2J" + "b" * 10**6
    given = helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
    constants = {"version_number": 3, "memory_size": 0, "continuous_action_output_shape": 2}
    tensors = [
        numpy_helper.from_array(np.array([x], np.float32), f"_{key}")
        for key, x in constants.items()
    ]
    nodes = [node("MatMul", "obs_0 w", "continuous_actions")]
    nodes += [node("Identity", f"_{key}", key) for key in constants]
    outputs = [helper.make_tensor_value_info(key, TensorProto.FLOAT, [1]) for key in constants]
    write(nodes, [WEIGHTS, *tensors], inputs=[OBS, given], outputs=[ACTIONS, *outputs])
    fits, text = unity_model.verdict("policy.onnx", BEHAVIOR)
    assert not fits and "\033" not in text and len(text) < 2000
    assert "Unity has nothing to give to the input a\\x1b[2Jbbb" in text
