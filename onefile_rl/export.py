"""Export of a policy as an ONNX file for Unity or Godot, and as JSON for Godot without .NET."""

import contextlib
import json
import warnings

import numpy as np
import torch
import torch.nn as nn
from torch.onnx import symbolic_helper, symbolic_opset9

from onefile_rl.checkpoints import replacing, using
from onefile_rl.evaluate import load_agent

# Entries of a spec that the exported graphs do not support.
UNSUPPORTED = {
    "bins": "continuous actions in bins",
    "window": "a transformer over past observations",
}

# ONNX operators that envs/godot_scenes/policy.gd implements, for vectors.
GDSCRIPT_OPERATORS = {
    "Add",
    "ArgMax",
    "Cast",
    "Clip",
    "Concat",
    "Div",
    "Elu",
    "Equal",
    "Gemm",
    "LogSoftmax",
    "Max",
    "Min",
    "Mul",
    "Pow",
    "ReduceMean",
    "Relu",
    "Sigmoid",
    "Slice",
    "Sqrt",
    "Sub",
    "Tanh",
}


class UnityGraph(nn.Module):
    """The graph that ML-Agents' inference in Unity expects. Observations are normalized inside.

    Inputs:
        obs_0, obs_1, ...   one per sensor, in Unity's order: vectors (batch, size), BufferSensors (batch, rows, size),
                            or images (batch, channels, height, width) with values from 0 to 1; stacked images are
                            channels
        action_masks        only with discrete actions: (batch, sum of branch sizes), 1 where an action is allowed
        recurrent_in        only with memory: (batch, 1, memory size)

    Outputs, where KIND is "continuous" or "discrete", or both one after the other:
        KIND_actions                    sampled actions: (batch, number of actions), or (batch, number of branches)
        deterministic_KIND_actions      the most likely actions, in the same shape
        version_number                  3, the version of this format
        memory_size                     0 without memory
        KIND_action_output_shape        the number of continuous actions, or the size of each branch
        recurrent_out                   only with memory: the input of the next step

    Continuous actions are those that the env received in training. Discrete actions count from 0.
    """

    def __init__(self, agent, spec):
        super().__init__()
        self.agent = agent
        self.sensors = spec["sensors"]  # the size or shape of a vector, or the name of an image
        self.images = spec.get("images")
        self.stack = spec.get("stack", 1)
        self.branches = spec.get("branches", [])
        self.memory_size = spec.get(
            "memory", 0
        )  # of the policy; the memory of the value network is not exported

        # Only continuous actions have bounds
        self.num_continuous = spec["action_dim"] if "low" in spec else 0
        kinds = {}
        if self.num_continuous:
            kinds["continuous"] = [float(self.num_continuous)]
        if self.branches:
            kinds["discrete"] = [[float(size) for size in self.branches]]
        self.output_shapes = list(kinds.values())

        self.inputs = [f"obs_{i}" for i in range(len(self.sensors))]
        self.outputs = []
        for kind in kinds:
            self.outputs += [f"{kind}_actions", f"deterministic_{kind}_actions"]
        self.outputs += ["version_number", "memory_size"]
        self.outputs += [f"{kind}_action_output_shape" for kind in kinds]
        if self.branches:
            self.inputs.append("action_masks")
        if self.memory_size:
            self.inputs.append("recurrent_in")
            self.outputs.append("recurrent_out")

    def example(self):
        """Return example inputs, from which the exporter takes the shapes."""
        inputs = []
        for sensor in self.sensors:
            if isinstance(sensor, str):
                height, width, channels = self.images[sensor]
                inputs.append(torch.zeros(1, self.stack * channels, height, width))
            else:
                inputs.append(torch.zeros(1, *np.atleast_1d(sensor).tolist()))
        if self.branches:
            inputs.append(torch.ones(1, sum(self.branches)))
        if self.memory_size:
            inputs.append(torch.zeros(1, 1, self.memory_size))
        return tuple(inputs)

    def forward(self, *inputs):
        observations = inputs[: len(self.sensors)]
        masks = inputs[len(self.sensors)] if self.branches else None

        # The arguments of agent.act
        vectors = [
            x.flatten(1) if x.dim() > 2 else x
            for x, sensor in zip(observations, self.sensors, strict=True)
            if not isinstance(sensor, str)
        ]
        vector = torch.cat(vectors, 1) if vectors else inputs[0].new_zeros(1, 0)
        if self.images is not None:
            images = [255 * observations[self.sensors.index(name)] for name in self.images]
            arguments = [images, vector, masks]
        elif self.branches:
            arguments = [vector, masks]
        else:
            arguments = [vector]
        if self.memory_size:
            policy_memory = inputs[-1][:, 0]
            value_memory = torch.zeros_like(policy_memory)
            arguments.append(torch.cat([policy_memory, value_memory], 1))

        # agent.act returns the actions to store, which count from 0 if they are discrete, and those for the env.
        sampled = self.agent.act(*arguments, deterministic=False)
        deterministic = self.agent.act(*arguments, deterministic=True)
        outputs = []
        if self.num_continuous and self.branches:  # side by side in one row
            n = self.num_continuous
            outputs += [sampled[1][:, :n], deterministic[1][:, :n]]
            outputs += [sampled[0][:, n:].long(), deterministic[0][:, n:].long()]
        else:
            which = 0 if self.branches else 1
            outputs += [sampled[which], deterministic[which]]
        version_number = torch.tensor([3.0])
        memory_size = torch.tensor([float(self.memory_size)])
        outputs += [version_number, memory_size]
        outputs += [torch.tensor(shape) for shape in self.output_shapes]
        if self.memory_size:
            new_memory = sampled[-1]
            outputs.append(new_memory[:, None, : self.memory_size])
        return tuple(outputs)


class GodotGraph(nn.Module):
    """The graph that the inference of the Godot RL Agents plugin expects. Observations are normalized inside.

    Inputs:
        one per key of get_obs(), with that name: vectors (batch, size)
        state_ins           a state that is not used: (batch,)

    Outputs:
        output              deterministic actions: (batch, number of actions), as the env received them in training, or
                            (batch, sum of branch sizes), with 100 for each chosen discrete action and 0 for the others,
                            or both in the order of get_action_space()
        state_outs          state_ins, unchanged
    """

    def __init__(self, agent, spec):
        super().__init__()
        self.agent = agent
        self.sizes = spec["sensors"]
        self.branches = spec.get("branches", [])
        self.order = spec.get("action_order")  # of continuous and discrete actions together
        self.inputs = [*spec["inputs"], "state_ins"]
        self.outputs = ["output", "state_outs"]

    def example(self):
        """Return example inputs, from which the exporter takes the shapes."""
        observations = [torch.zeros(1, size) for size in self.sizes]
        return (*observations, torch.zeros(1))

    def forward(self, *inputs):
        *observations, state = inputs
        obs = torch.cat(observations, 1) if len(observations) > 1 else observations[0]
        state = state + 0  # an output must not be an input
        if not self.branches:
            env_actions = self.agent.act(obs, deterministic=True)[1]
            return env_actions, state

        masks = torch.ones(1, sum(self.branches))
        actions, env_actions, *_ = self.agent.act(obs, masks, deterministic=True)
        if not self.order:
            return torch.cat(self.one_hot(actions), 1), state
        num_continuous = sum(size for kind, size in self.order if kind == "continuous")
        chosen = iter(self.one_hot(actions[:, num_continuous:].long()))
        parts = []
        start = 0
        for kind, size in self.order:
            if kind == "discrete":
                parts.append(next(chosen))
            else:
                parts.append(env_actions[:, start : start + size])
                start += size
        return torch.cat(parts, 1), state

    def one_hot(self, actions):
        """Return a one-hot vector for each branch.

        The plugin takes the largest entry or samples from a softmax: with 100 both give the same action.
        """
        vectors = []
        for size, action in zip(self.branches, actions.split(1, 1), strict=True):
            vectors.append(100.0 * (torch.arange(size) == action))
        return vectors


def is_for_godot(spec):
    """Return whether the policy is exported for Godot. Its plugin supports neither images nor memory."""
    return "inputs" in spec and "images" not in spec and not spec.get("memory")


def export(agent, spec, path):
    """Write the agent's policy as an ONNX file with the graph of Unity or Godot."""
    graph = GodotGraph(agent, spec) if is_for_godot(spec) else UnityGraph(agent, spec)
    graph.eval()
    actions = [name for name in graph.outputs if name.endswith(("_actions", "output"))]
    names_with_batch = [*graph.inputs, *actions, "recurrent_out", "state_outs"]
    settings = {
        "input_names": graph.inputs,
        "output_names": graph.outputs,
        "dynamic_axes": {name: {0: "batch"} for name in names_with_batch},
        "opset_version": 9,  # as ML-Agents writes it; Unity reads 7 to 15
        "dynamo": False,  # the newer exporter does not write these versions
    }
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the exporter is deprecated, and some outputs are constants
        with replacing(path) as temporary, clamp_by_tensors():
            torch.onnx.export(graph, graph.example(), temporary, **settings)


@contextlib.contextmanager
def clamp_by_tensors():
    """Let the exporter write clamp(x, low, high) with tensors as bounds. Its own clamp can fail for them, because
    opset 9 has Clip for numbers only."""

    def clamp(g, x, low, high):
        bounds = {"Max": low, "Min": high}
        given = {name: x for name, x in bounds.items() if not symbolic_helper._is_none(x)}
        if not any(symbolic_helper._get_tensor_rank(bound) for bound in given.values()):
            return symbolic_opset9.clamp(g, x, low, high)
        numbers = [shared_number(bound) for bound in given.values()]
        if len(numbers) == 2 and None not in numbers:
            return g.op("Clip", x, min_f=numbers[0], max_f=numbers[1])
        for name, bound in given.items():
            x = g.op(name, x, bound)
        return x

    torch.onnx.register_custom_op_symbolic("aten::clamp", clamp, 9)
    try:
        yield
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::clamp", 9)


def shared_number(bound):
    """Return the number that all elements of a constant of the graph have, or None."""
    node = bound.node()
    if not node.kind().endswith("::Constant") or not node.hasAttribute("value"):
        return None
    values = node.t("value").flatten().tolist()
    return values[0] if len(set(values)) == 1 else None


def export_checkpoint(args, path, state, script, Agent):
    """Write policy.onnx, and policy.json for a Godot game, into the folder of the checkpoint (path, state)."""
    agent = load_agent(args, path, state, script, Agent)
    spec = state["spec"]
    for key, feature in UNSUPPORTED.items():
        if spec.get(key):
            raise ValueError(f"--export: Unity's model format does not support {feature}")

    target = path.with_name("policy.onnx")
    try:
        with using(path, state):
            export(agent, spec, target)
    except (OSError, RuntimeError) as error:  # a full disk, or a layer that opset 9 does not have
        raise ValueError(f"{target} can't be written: {str(error).splitlines()[0]}") from None
    if not is_for_godot(spec):
        print(
            f"Wrote {target}: add it to a Unity project and assign it to the Model field of Behavior Parameters"
        )
        return

    print(
        f"Wrote {target}: set it as Onnx Model Path of the plugin's Sync node, in a Godot with .NET"
    )
    program = target.with_suffix(".json")
    try:
        export_for_gdscript(target, program)
    except OSError as error:
        raise ValueError(f"{program} can't be written: {error}") from None
    except ValueError as error:
        print(f"Wrote no {program.name}: {error}")
    else:
        print(f"Wrote {program}: run it with envs/godot_scenes/policy.gd, in any Godot")


# The graph as JSON for policy.gd


def export_for_gdscript(model, path):
    """Write the ONNX file `model` as JSON for envs/godot_scenes/policy.gd.

    The JSON has the names of the inputs, the constants by name, and the steps: operators in the order of execution.
    """
    import onnx

    graph = onnx.load(model).graph
    to_numbers = lambda tensor: onnx.numpy_helper.to_array(tensor).astype(float)
    constants = {tensor.name: to_numbers(tensor) for tensor in graph.initializer}
    steps = []
    for node in graph.node:
        attributes = {
            attribute.name: onnx.helper.get_attribute_value(attribute)
            for attribute in node.attribute
        }
        if node.op_type == "Constant":
            constants[node.output[0]] = to_numbers(attributes["value"])
        elif node.op_type == "Identity":
            constants[node.output[0]] = constants[node.input[0]]
        else:
            steps += gdscript_steps(node, attributes, constants)

    # Keep only the values that the output depends on.
    needed = {"output"}
    for step in reversed(steps):
        if step["out"] in needed:
            needed.update(step["in"])

    # policy.gd computes without a batch dimension. Only the weights of layers are matrices, even with one row.
    weights = {step["in"][1] for step in steps if step["op"] == "Gemm"}
    for name in constants.keys() - weights:
        constants[name] = np.atleast_1d(constants[name].squeeze())

    program = {
        "inputs": [x.name for x in graph.input if x.name in needed],
        "constants": {name: x.tolist() for name, x in constants.items() if name in needed},
        "steps": [step for step in steps if step["out"] in needed],
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(program))


def gdscript_steps(node, attributes, constants):
    """Return the steps of one ONNX node. A MatMul with a constant becomes a Gemm, which may change `constants`."""
    operator = node.op_type
    inputs = list(node.input)
    output = node.output[0]

    # A layer without a bias
    if operator == "MatMul" and inputs[1] in constants:
        weight = constants[inputs[1]]
        bias = f"{output}.bias"
        constants[inputs[1]] = weight.T
        constants[bias] = np.zeros(weight.shape[1])
        return [{"op": "Gemm", "in": [*inputs, bias], "out": output}]

    if operator == "Split":
        steps = []
        start = 0
        for name, size in zip(node.output, attributes["split"], strict=True):
            steps.append(
                {"op": "Slice", "in": inputs, "out": name, "start": start, "end": start + size}
            )
            start += size
        return steps

    if operator not in GDSCRIPT_OPERATORS:
        raise ValueError(f"envs/godot_scenes/policy.gd does not support the operator {operator}")

    step = {"op": operator, "in": inputs, "out": output}
    if operator == "Slice":
        step["start"] = attributes["starts"][0]
        # "To the end" is the largest 64-bit number, which Godot's JSON can't represent
        step["end"] = min(attributes["ends"][0], 2**31 - 1)
    elif operator != "Gemm":  # the attributes of a layer are always the same
        step |= {name: attributes[name] for name in ("min", "max", "alpha") if name in attributes}
    return [step]
