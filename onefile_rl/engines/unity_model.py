"""Unity's checks of a model, in Python: what happens when an .onnx file is assigned to Behavior Parameters.

    python unity_vec_env.py --check policy.onnx --path BUILD        against the sensors and actions of a build
    python unity_vec_env.py --check policy.onnx --run runs/NAME     against those that a run was trained with

ML-Agents' package compares a model with the sensors and actions of an agent in nine steps, which `check_model` follows
(package 3.0; 2.x has the same ones):

    1   the outputs version_number and memory_size
    2   an output with actions, its shape, and with Deterministic Inference its deterministic twin
    3   a version that the package supports
    4   a memory size that is not -1
    5   an input for each sensor, for the memory and for the action mask
    6   no other inputs
    7   the shape of each input
    8   the numbers of actions
    9   the output of the memory

Some problems are not noticed by Unity, and make the model fail or act wrongly when it runs. They have the number 0.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from onefile_rl.engines.onnx_files import first_line, load
from onefile_rl.engines.printing import printable

VERSIONS = (2, 3)  # of the model format that the package supports; 2 is that of ML-Agents 1.x
OPSETS = (7, 15)  # that Unity's inference reads
OTHER_INPUTS = ("action_masks", "epsilon", "prev_action", "recurrent_in", "sequence_length")
KINDS = ("continuous", "discrete")
LONGEST = 1_000  # numbers of a constant, such as the sizes of branches
LARGEST = 1e9  # of these numbers
SHOWN = 20  # problems that are listed
FLOAT = 1  # ONNX's numbers of types
INTEGERS = (6, 7)


class Behavior(NamedTuple):
    """What a model must fit: sensors as pairs of a name and Unity's shape, and actions.

    The shape of an image is (channels, height, width).
    """

    name: str
    sensors: list[tuple[str, tuple[int, ...]]]
    continuous: int
    branches: list[int]


class Problem(NamedTuple):
    """A check that failed. level: "warning" or "error" in Unity's inspector, or "unnoticed" by Unity"""

    check: int
    level: str
    text: str

    def __str__(self):
        number = f"check {self.check}, {self.level}" if self.check else "not checked by Unity"
        return f"{number}: {self.text}"


def behavior_of_layout(name, layout):
    """Return the behavior of a player, from its Layout."""
    behavior = make_behavior(
        name, layout.sensors, layout.images, layout.continuous, layout.branches
    )
    shapes = [shape for _, shape in behavior.sensors]
    return behavior._replace(sensors=list(zip(layout.sensor_names, shapes, strict=True)))


def behavior_of_run(run):
    """Return the behavior that a run was trained with, from its checkpoint."""
    # It needs torch, which is slow to import
    from onefile_rl.engines.files import read

    path = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
    try:
        spec = read(path)["spec"]
        if not isinstance(spec, dict):
            raise TypeError
    except Exception:
        raise ValueError(f"--run {run}: no checkpoint of a run found") from None
    if "inputs" in spec:
        raise ValueError(f"--run {run}: its env is a Godot game, which has no checks of models")
    try:
        return behavior_of_spec(str(run), spec)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ValueError(f"--run {run}: its checkpoint has a spec that can't be read") from None


def behavior_of_spec(name, spec):
    """Return the behavior of a policy's spec. Stacked images are channels."""
    images = {}
    for image, (height, width, channels) in spec.get("images", {}).items():
        images[image] = (height, width, channels * spec.get("stack", 1))
    branches = spec.get("branches", [])
    continuous = spec["action_dim"] if "low" in spec else 0  # only continuous actions have bounds
    return make_behavior(name, spec["sensors"], images, continuous, branches)


def make_behavior(name, sensors, images, continuous, branches):
    shapes = []
    for i, sensor in enumerate(sensors):
        if isinstance(sensor, str):
            height, width, channels = images[sensor]
            shapes.append((sensor, (int(channels), int(height), int(width))))
        else:
            shapes.append((f"sensor {i}", tuple(np.atleast_1d(sensor).tolist())))
    return Behavior(name, shapes, int(continuous), [int(size) for size in branches])


class Model:
    """The inputs, outputs and constants of an ONNX file."""

    def __init__(self, path):
        import onnx

        if not Path(path).exists():
            raise ValueError(f"{path} is not an ONNX model: there is no such file")
        self.path = path
        try:
            _, model = load(Path(path))
            graph = model.graph
            self.inputs = {x.name: shape_of(x) for x in graph.input}
            self.outputs = {
                x.name: (x.type.tensor_type.elem_type, shape_of(x)) for x in graph.output
            }
            to_array = onnx.numpy_helper.to_array
            self.constants = {x.name: to_array(x) for x in graph.initializer}
            for node in graph.node:
                if node.op_type == "Constant" and node.attribute[0].name == "value":
                    self.constants[node.output[0]] = to_array(node.attribute[0].t)
                elif node.op_type == "Identity" and node.input[0] in self.constants:
                    self.constants[node.output[0]] = self.constants[node.input[0]]
            for name in self.constants:
                self.inputs.pop(name, None)  # old files list weights among the inputs
            self.opset = max((x.version for x in model.opset_import if not x.domain), default=0)
        except Exception as error:
            reason = first_line(error)
            raise ValueError(f"{path} is not an ONNX model that can be read: {reason}") from None

    def constant(self, name):
        """Return the numbers of an output that is a constant, None if there is no such output."""
        if name not in self.outputs or name not in self.constants:
            return None
        numbers = self.constants[name].reshape(-1)
        valid = numbers.dtype.kind in "biuf" and len(numbers) <= LONGEST
        if not valid or not (abs(numbers) <= LARGEST).all():  # False for NaN too
            raise ValueError(f"{self.path}: the constant {name} has no valid numbers")
        return numbers.tolist()


def shape_of(value):
    """Return the shape of an input or output, with None for dimensions that are not fixed."""
    dimensions = value.type.tensor_type.shape.dim
    return tuple(x.dim_value if x.HasField("dim_value") else None for x in dimensions)


def check_model(path, behavior, deterministic=False):
    """Return the problems of a model as a list, in Unity's order. An empty one means that the model fits.

    deterministic: whether Deterministic Inference is set in Behavior Parameters
    """
    model = Model(path)
    problems = []
    if not check_constants(model, problems) or not check_outputs(model, deterministic, problems):
        return problems  # Unity stops here
    version = int(model.constant("version_number")[0])
    memory = int(model.constant("memory_size")[0])
    check_version(version, memory, problems)
    if memory == -1:
        problems.append(Problem(4, "warning", "memory_size is -1: export a size, 0 without memory"))
        return problems
    if version == VERSIONS[0]:
        what = "the model has the format of ML-Agents 1.x, whose inputs have other names"
        problems.append(Problem(0, "unnoticed", f"{what}: they are not checked here"))
    elif version == VERSIONS[1]:
        check_inputs(model, behavior, memory, problems)
        check_shapes(model, behavior, problems)
    check_actions(model, behavior, problems)
    if memory > 0 and "recurrent_out" not in model.outputs:
        text = (
            f"there is a memory of {memory}, but no output recurrent_out: running the model fails"
        )
        problems.append(Problem(9, "error", text))
    check_unnoticed(model, behavior, memory, problems)
    return problems


def check_constants(model, problems):
    """Check 1. Return whether Unity can continue."""
    for name in ("version_number", "memory_size"):
        if not model.constant(name):
            why = "it is computed" if name in model.outputs else "it is missing"
            text = f"{name} must be an output that is a constant, and {why}"
            problems.append(Problem(1, "warning", text))
            return False
    return True


def check_outputs(model, deterministic, problems):
    """Check 2. Return whether Unity can continue."""
    kinds = [kind for kind in KINDS if f"{kind}_actions" in model.outputs]
    if not kinds:
        text = "there is no output continuous_actions or discrete_actions"
        problems.append(Problem(2, "warning", text))
        return False
    for kind in kinds:
        shape = model.constant(f"{kind}_action_output_shape")
        if shape is None:
            text = f"{kind}_action_output_shape must be an output that is a constant"
        elif int(sum(shape)) <= 0:
            text = f"{kind}_action_output_shape says that there are no actions: leave {kind}_actions out"
        elif deterministic and f"deterministic_{kind}_actions" not in model.outputs:
            text = f"Deterministic Inference needs the output deterministic_{kind}_actions"
        else:
            continue
        problems.append(Problem(2, "warning", text))
        return False
    return True


def check_version(version, memory, problems):
    """Check 3: the only one whose failure stops a game."""
    if not VERSIONS[0] <= version <= VERSIONS[1]:
        text = (
            f"version_number is {version}, and the package supports {VERSIONS[0]} to {VERSIONS[1]}"
        )
        problems.append(Problem(3, "error", text))
    elif version == VERSIONS[0] and memory > 0:
        text = (
            "version_number is 2, whose memory the package does not support any more: it must be 3"
        )
        problems.append(Problem(3, "error", text))


def check_inputs(model, behavior, memory, problems):
    """Checks 5 and 6."""
    expected = [f"obs_{i}" for i in range(len(behavior.sensors))]
    for name, (sensor, shape) in zip(expected, behavior.sensors, strict=True):
        if name not in model.inputs:
            text = f"there is no input {name} for {sensor} of shape {shape}"
            problems.append(Problem(5, "warning", text))
    if memory > 0 and "recurrent_in" not in model.inputs:
        text = f"there is a memory of {memory}, but no input recurrent_in"
        problems.append(Problem(5, "warning", text))
    if "discrete_actions" in model.outputs and "action_masks" not in model.inputs:
        text = "actions are discrete, but there is no input action_masks"
        problems.append(Problem(5, "warning", text))
    for name in model.inputs:
        if name not in (*expected, *OTHER_INPUTS):
            text = f"Unity has nothing to give to the input {name}"
            problems.append(Problem(6, "warning", text))


def check_shapes(model, behavior, problems):
    """Check 7. Unity reads the channels, the height and the width from an input's shape, 1 if it has none."""
    for i, (sensor, shape) in enumerate(behavior.sensors):
        given = model.inputs.get(f"obs_{i}")
        if given is None:
            continue
        size = [1 if x is None else x for x in given]
        channels, height, width = 1, 1, 1
        if len(size) == 2:
            channels = size[1]
        elif len(size) == 3:
            channels, width = size[1:]
        elif len(size) == 4:
            channels, height, width = size[1:]
        seen = {1: (channels,), 2: (channels, width), 3: (channels, height, width)}
        if shape != seen.get(len(shape), shape):
            text = f"obs_{i} has the shape {batched(given)}, but {sensor} has {batched((None, *shape))}"
            problems.append(Problem(7, "warning", text))
        elif len(given) != len(shape) + 1:
            text = f"obs_{i} has {len(given) - 1} dimension(s), but {sensor} has {len(shape)}"
            problems.append(Problem(0, "unnoticed", f"{text}: writing the observation fails"))
    previous = model.inputs.get("prev_action")
    if previous and previous[-1] != len(behavior.branches):
        text = f"prev_action has the size {previous[-1]} for {len(behavior.branches)} branch(es)"
        problems.append(Problem(7, "warning", text))


def batched(shape):
    """Return a shape as text, whose first dimension is the batch."""
    sizes = ["batch", *("?" if x is None else str(x) for x in shape[1:])]
    return f"({', '.join(sizes)})"


def check_actions(model, behavior, problems):
    """Check 8."""
    continuous = int((model.constant("continuous_action_output_shape") or [0])[0])
    if continuous != behavior.continuous:
        text = f"the model has {continuous} continuous action(s), the agents {behavior.continuous}"
        problems.append(Problem(8, "warning", text))
    branches = [int(x) for x in model.constant("discrete_action_output_shape") or []]
    if branches != behavior.branches:
        text = f"the model has discrete branches of {branches}, the agents {behavior.branches}"
        problems.append(Problem(8, "warning", text))


def check_unnoticed(model, behavior, memory, problems):
    """Add what Unity does not check, and what fails when the model runs."""

    def add(text):
        problems.append(Problem(0, "unnoticed", text))

    if not OPSETS[0] <= model.opset <= OPSETS[1]:
        add(f"the opset is {model.opset}: Unity's inference reads {OPSETS[0]} to {OPSETS[1]}")
    shapes = [f"{kind}_action_output_shape" for kind in KINDS]
    for name in ("version_number", "memory_size", *shapes):
        if name in model.outputs and model.outputs[name][0] != FLOAT:
            add(f"{name} must be of floats")
    for kind, types, size in (
        ("continuous", (FLOAT,), behavior.continuous),
        ("discrete", INTEGERS, len(behavior.branches)),
    ):
        for name in (f"{kind}_actions", f"deterministic_{kind}_actions"):
            if name not in model.outputs:
                continue
            element_type, shape = model.outputs[name]
            if element_type not in types:
                add(f"{name} must be of {'floats' if types == (FLOAT,) else 'integers'}")
            if shape and shape[-1] not in (None, size):
                add(f"{name} has {shape[-1]} column(s) for {size} action(s)")
    mask = model.inputs.get("action_masks")
    if mask and mask[-1] not in (None, sum(behavior.branches)):
        add(f"action_masks has {mask[-1]} column(s) for {sum(behavior.branches)} options")
    for name, shape in (
        ("recurrent_in", model.inputs.get("recurrent_in")),
        ("recurrent_out", model.outputs.get("recurrent_out", (None, None))[1]),
    ):
        if shape and memory > 0 and shape[-1] not in (None, memory):
            add(f"{name} has {shape[-1]} column(s) for a memory of {memory}")


def verdict(path, behavior):
    """Return whether a model fits a behavior, and the text about it."""
    problems = check_model(path, behavior)
    others = [x for x in check_model(path, behavior, deterministic=True) if x not in problems]
    if not problems and not others:
        return True, f"{path} fits {behavior.name}: it passes Unity's nine checks"
    where = (
        f"{path} does not fit {behavior.name}:" if problems else f"{path} fits {behavior.name}, but"
    )
    texts = [str(problem) for problem in problems]
    texts += [f"with Deterministic Inference, {problem}" for problem in others]
    lines = [where, *(f"  {printable(text)[:300]}" for text in texts[:SHOWN])]
    if len(texts) > SHOWN:
        lines.append(f"  and {len(texts) - SHOWN} more")
    return not problems, "\n".join(lines)
