"""`agent.act` computed by numpy.

For a few observations and a small network, calls of torch take three times as long as those of numpy. So the graph of
`agent.act` is traced and translated, operation by operation. The translation reads the weights where they are, and is
compared with the module on real observations. Whatever else `act` reads is watched, and a change leads to a new
translation. Where something can't be translated, the module itself acts, and a line says so.
"""

import copy
import inspect
import math
import operator
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch import fx

from onefile_rl.fast.machine import tensors

COMPARE_EVERY = 1000  # calls between two comparisons with the module
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, slice, torch.Size)
CONSTANTS = (*PLAIN, torch.Tensor, np.ndarray, list, tuple, dict, set)
INTERNAL = {*vars(nn.Module()), *dir(nn.Module)}  # attributes that every module has

# Numpy counterparts of layers and functions


def _linear(layer):
    weight, bias = (
        layer.weight.detach().numpy(),
        None if layer.bias is None else layer.bias.detach().numpy(),
    )

    def linear(x):
        # For few rows, x @ weight.T and weight @ x.T take nearly twice as long
        y = weight.dot(x.T).T
        if bias is not None:
            y += bias
        return y

    return linear


def _layer_norm(layer):
    assert len(layer.normalized_shape) == 1 and layer.bias is not None
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()

    def layer_norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + layer.eps) * weight + bias

    return layer_norm


def _silu(x):
    return 0.5 * x * (1 + np.tanh(0.5 * x))


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def _relu(x):
    return np.maximum(x, 0.0)


def _elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0)))


def _clamp(x, low, high, least=np.maximum, most=np.minimum):
    return most(least(x, low), high)


def _log_softmax(x, axis):
    x = x - x.max(axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def _softmax(x, axis):
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


def _multinomial(p, count):
    """Draw one index per row with the same random numbers as torch."""
    assert count == 1
    return (p / torch.empty(p.shape).exponential_().numpy()).argmax(-1)[:, None]


def _argmax(x, axis, keepdims=False):
    return x.argmax(axis, keepdims=keepdims)


def _gather(x, axis, places):
    return np.take_along_axis(x, places, axis)


def _amax(x, axis, keepdims=False):
    return x.max(axis, keepdims=keepdims)


def _sum(x, axis, keepdims=False):
    return x.sum(axis, keepdims=keepdims)


def _cat(parts, axis=0):
    return np.concatenate(parts, axis)


def _same(x):
    return x


# A function of arrays for each layer in evaluation mode. It reads the layer's weights where they are.
LAYERS = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Tanh: lambda layer: np.tanh,
    nn.ReLU: lambda layer: _relu,
    nn.SiLU: lambda layer: _silu,
    nn.ELU: lambda layer: lambda x: _elu(x, layer.alpha),
    nn.LeakyReLU: lambda layer: lambda x: np.where(x > 0, x, layer.negative_slope * x),
    nn.Sigmoid: lambda layer: _sigmoid,
    nn.Dropout: lambda layer: _same,
    nn.Identity: lambda layer: _same,
}
FUNCTIONS = {
    **{
        f: f
        for f in (
            operator.add,
            operator.sub,
            operator.mul,
            operator.truediv,
            operator.neg,
            operator.gt,
            operator.matmul,
            operator.getitem,
        )
    },
    operator.pow: operator.pow,
    **dict.fromkeys((torch.exp, "exp"), np.exp),
    **dict.fromkeys((torch.log, "log"), np.log),
    **dict.fromkeys((torch.sqrt, "sqrt"), np.sqrt),
    **dict.fromkeys((torch.abs, "abs"), np.abs),
    **dict.fromkeys((torch.amax, "amax"), _amax),
    **dict.fromkeys((torch.sum, "sum"), _sum),
    "reshape": lambda x, *shape: x.reshape(shape),
    **dict.fromkeys((torch.transpose, "transpose"), np.swapaxes),
    **dict.fromkeys((torch.tanh, nn.functional.tanh, "tanh"), np.tanh),
    **dict.fromkeys((torch.sigmoid, "sigmoid"), _sigmoid),
    **dict.fromkeys((torch.relu, nn.functional.relu, "relu"), _relu),
    **dict.fromkeys((torch.clamp, "clamp"), _clamp),
    **dict.fromkeys((torch.chunk, "chunk"), lambda x, parts, axis: np.split(x, parts, axis)),
    **dict.fromkeys((torch.log_softmax, "log_softmax"), _log_softmax),
    **dict.fromkeys((torch.softmax, "softmax"), _softmax),
    **dict.fromkeys((torch.gather, "gather"), _gather),
    **dict.fromkeys((torch.argmax, "argmax"), _argmax),
    torch.cat: _cat,
    "float": lambda x: x.astype(np.float32),
    torch.multinomial: _multinomial,
    torch.randn_like: lambda x: torch.randn(x.shape).numpy(),
}


# Operators that are written into the generated function directly, which saves a call.
INLINE = {operator.add: " + ", operator.sub: " - ", operator.mul: " * ", operator.truediv: " / "}


class NotTranslated(Exception):
    """A part of `act` that has no counterpart in numpy."""


class Acting:
    """Call `agent.act` with numpy arrays, in evaluation mode and without gradients.

    enabled: False lets the module act in any case. deterministic: passed on to `agent.act`.
    """

    allowed = True  # --no-fast sets this to False for the whole process
    told = set()  # reasons that have been printed

    def __init__(self, agent, enabled=True, deterministic=False):
        self.agent = agent
        self.deterministic = deterministic
        self.device = next(agent.parameters()).device
        self.enabled = enabled and self.allowed and self.device.type == "cpu"
        self.translation = None
        self.calls = 0
        self.translations = 0

    def __call__(self, *obs):
        if self.calls % COMPARE_EVERY == 0 or not self.enabled or self.translation.is_outdated():
            if self.calls == 0:
                self.check_one_policy(obs)
            if self.enabled:
                self.translate(obs)
            if not self.enabled:
                self.calls += 1
                return self.act_with_torch(*obs)
        self.calls += 1
        return self.translation.act(*obs)

    @torch.no_grad()
    def act_with_torch(self, *obs):
        training = self.agent.training
        if training:
            self.agent.eval()
        out = self.agent.act(*tensors(self.device, *obs), deterministic=self.deterministic)
        if training:
            self.agent.train()
        return [x.cpu().numpy() for x in out]

    @torch.no_grad()
    def check_one_policy(self, obs):
        """Refuse an `act` that samples other actions than `get_action_and_value`, from which the agent learns."""
        learned = getattr(self.agent, "get_action_and_value", None)
        if learned is None:
            return
        state = torch.get_rng_state()
        acted = self.act_with_torch(*obs)[0]
        torch.set_rng_state(state)
        training = self.agent.training
        self.agent.eval()
        expected = (
            learned(*tensors(self.device, *obs), deterministic=self.deterministic)[0].cpu().numpy()
        )
        self.agent.train(training)
        torch.set_rng_state(state)
        if not np.allclose(acted, expected, rtol=1e-4, atol=1e-5):
            fix = "change the distribution in get_action_and_value, and let act() call it"
            raise ValueError(f"act() and get_action_and_value() return different actions: {fix}")

    def translate(self, obs):
        """Make sure that the translation computes what the module computes for these observations."""
        try:
            if self.translation and not self.translation.is_outdated() and self.is_equal(obs):
                return
            self.translation = Translation(self.agent, len(obs), self.deterministic)
            self.translations += 1
            if self.translations > 10 + self.calls / 100:
                raise NotTranslated("values that change every few steps")
            if not self.is_equal(obs):
                raise NotTranslated("an act() whose result changes from call to call")
        except NotTranslated as reason:
            self.act_with_torch_because(reason)
        except Exception as error:  # of the tracer, for example for a branch on an observation
            self.act_with_torch_because(f"the Python code of act(){self.place_in_script(error)}")

    def place_in_script(self, error):
        """Return the line of the agent's file at which the error was raised, as text."""
        file = inspect.getfile(type(self.agent))
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        return f" ({Path(file).name}, line {lines[-1]})" if lines else ""

    def is_equal(self, obs):
        state = torch.get_rng_state()
        outputs = []
        for act in (self.translation.act, self.act_with_torch):
            torch.set_rng_state(state)
            outputs.append(act(*obs))
        torch.set_rng_state(state)
        pairs = zip(*outputs, strict=True)
        return all(np.allclose(ours, expected, rtol=1e-4, atol=1e-5) for ours, expected in pairs)

    def act_with_torch_because(self, reason):
        if str(reason) not in self.told:
            self.told.add(str(reason))
            print(
                f"Acting with PyTorch (slower): numpy acting does not support {reason}", flush=True
            )
        self.enabled = False


class Translation:
    """A numpy function with the graph of `agent.act`, and the values that the graph depends on."""

    def __init__(self, agent, num_inputs, deterministic):
        root = Root(agent, num_inputs, deterministic)
        with Recorder(agent) as recorder:
            tracer = fx.Tracer()
            tracer.proxy_buffer_attributes = (
                True  # or else values that are computed from statistics would be constants
            )
            graph = tracer.trace(root)
        if recorder.assigned:
            raise NotTranslated(f"an act() that assigns {sorted(recorder.assigned)[0]}")
        self.identical = []  # where a value is read, its name there, and the value: must be the same object
        self.compared = []  # how a value is read, the value, and how to compare the two
        for where, name, value in recorder.values_read():
            self.watch(where, name, value)
        self.act = self.generate(root, graph)

    def is_outdated(self):
        for where, name, value in self.identical:
            if where.get(name) is not value:
                return True
        if not self.compared:  # any() takes half of the time of this function
            return False
        return any(not is_same(read(), value) for read, value, is_same in self.compared)

    def watch(self, where, name, value):
        """Translate again when `where[name]` changes."""
        if isinstance(
            value, (*PLAIN, torch.Tensor, nn.Module, types.FunctionType, types.MethodType)
        ):
            self.identical.append((where, name, value))
        elif isinstance(value, np.ndarray):
            self.compared.append((lambda: where.get(name), value.copy(), np.array_equal))
        elif isinstance(value, (list, tuple, dict, set)):
            self.compared.append((lambda: where.get(name), copy.copy(value), operator.eq))
        elif hasattr(value, "__dict__"):
            self.compared.append(
                (lambda: dict(vars(where.get(name))), dict(vars(value)), operator.eq)
            )
        else:
            raise NotTranslated(f"{name}, a {type(value).__name__}")

    def watch_tensor(self, owner, name, tensor):
        """Translate again when the module gets another tensor under this name. Changes in place are seen anyway."""
        tensors_by_name = owner._buffers if name in owner._buffers else owner._parameters
        if name not in tensors_by_name:
            tensors_by_name = vars(owner)
        self.identical.append((tensors_by_name, name, tensor))

    def generate(self, root, graph):
        """Write the graph as the text of a Python function, one line for each node that the result depends on."""
        needed = set()
        for node in reversed(graph.nodes):
            if node.op in ("output", "placeholder") or node in needed:
                needed.update(node.all_input_nodes)
                needed.add(node)
        lines = []
        scope = {"inf": math.inf}
        for node in graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                lines.append(f"def act(*{node.name}):")
            elif node.op == "get_attr":
                owner, _, name = node.target.rpartition(".")
                tensor = operator.attrgetter(node.target)(root)
                if name.startswith("_tensor_constant"):
                    raise NotTranslated("a tensor that act() makes")
                self.watch_tensor(root.get_submodule(owner), name, tensor)
                scope[node.name] = tensor.detach().numpy()
            elif node.op == "output":
                lines.append(f"return {node.args[0]}")
            else:
                counterpart = self.counterpart(root, node)
                inputs = list(map(str, node.args))
                if counterpart is _clamp:  # numpy takes twice as long with a float as a bound
                    for i, bound in enumerate(node.args):
                        if isinstance(bound, float):
                            inputs[i] = f"bound_{i}_{node.name}"
                            scope[inputs[i]] = np.array(bound, np.float32)
                scope[f"do_{node.name}"] = counterpart
                called = f"do_{node.name}({', '.join(inputs)})"
                expression = INLINE[counterpart].join(inputs) if counterpart in INLINE else called
                lines.append(f"{node.name} = {expression}")
        exec("\n    ".join(lines), scope)
        return scope["act"]

    def counterpart(self, root, node):
        if node.op == "call_module":
            layer = root.get_submodule(node.target)
            if type(layer) not in LAYERS or layer._forward_hooks or layer._forward_pre_hooks:
                raise NotTranslated(type(layer).__name__)
            for name, parameter in layer._parameters.items():
                self.watch_tensor(layer, name, parameter)
            return LAYERS[type(layer)](layer)
        if node.target not in FUNCTIONS or node.kwargs:
            raise NotTranslated(getattr(node.target, "__name__", node.target))
        return FUNCTIONS[node.target]


def is_module(value):
    return isinstance(value, nn.Module) or (
        isinstance(value, type) and issubclass(value, nn.Module)
    )


class Root(nn.Module):
    """The module that is traced: `agent.act` as a function of a fixed number of inputs."""

    def __init__(self, agent, num_inputs, deterministic):
        super().__init__()
        self.agent = agent
        self.num_inputs = num_inputs
        self.deterministic = deterministic

    def forward(self, *obs):
        return self.agent.act(
            *(obs[i] for i in range(self.num_inputs)), deterministic=self.deterministic
        )


class Recorder:
    """Record which attributes of an agent's modules, and which globals of its functions, are read or assigned."""

    def __init__(self, agent):
        self.modules = list(agent.modules())
        self.classes = [type(module) for module in self.modules]
        modules = [sys.modules[cls.__module__] for cls in self.classes if not self.is_torchs(cls)]
        self.files = {getattr(module, "__file__", None) for module in modules}
        self.read = {}  # (id of a module or class, name): the dict that has the value, the value
        self.assigned = {}  # name: module, the value before, whether there was one
        self.globals = {}  # (id of a module's globals, name): these globals

    def __enter__(self):
        for module, cls in zip(self.modules, self.classes, strict=True):
            object.__setattr__(module, "__class__", self.recording(cls))
        self.profile = sys.getprofile()
        sys.setprofile(self.note_function)
        return self

    def __exit__(self, *error):
        # The profiler of cProfile, up to Python 3.11, can only be installed by its own method
        if hasattr(self.profile, "enable"):
            sys.setprofile(None)
            self.profile.enable()
        else:
            sys.setprofile(self.profile)
        for module, cls in zip(self.modules, self.classes, strict=True):
            object.__setattr__(module, "__class__", cls)
        for name, (
            module,
            value,
            existed,
        ) in self.assigned.items():  # a tracer's proxy must not stay behind
            if existed:
                setattr(module, name, value)
            else:
                delattr(module, name)

    def recording(self, cls):
        """Return a subclass that records its instances' attributes."""
        recorder = self

        def __getattribute__(module, name):
            value = super(recorded, module).__getattribute__(name)
            if name in INTERNAL or name.startswith("__"):
                return value
            if name in vars(module):
                recorder.read[id(module), name] = (vars(module), value)
            elif isinstance(value, CONSTANTS):  # of the class
                owner = next(base for base in cls.__mro__ if name in vars(base))
                recorder.read[id(owner), name] = (vars(owner), value)
            return value

        def __setattr__(module, name, value):
            if name not in recorder.assigned:
                recorder.assigned[name] = (
                    module,
                    getattr(module, name, None),
                    hasattr(module, name),
                )
            super(recorded, module).__setattr__(name, value)

        namespace = {
            "__getattribute__": __getattribute__,
            "__setattr__": __setattr__,
            "__module__": cls.__module__,
        }
        recorded = types.new_class(cls.__name__, (cls,), {}, lambda body: body.update(namespace))
        return recorded

    def is_torchs(self, cls):
        return cls.__module__.partition(".")[0] == "torch"

    def note_function(self, frame, event, _):
        """Note which globals are named in a function of a file that defines one of the agent's modules."""
        if event == "call" and frame.f_code.co_filename in self.files:
            for name in frame.f_code.co_names:
                if name in frame.f_globals:
                    self.globals[id(frame.f_globals), name] = frame.f_globals

    def values_read(self):
        """Yield each value that was read: the dict that has it, its name, and the value now."""
        for (_, name), (where, value) in self.read.items():
            yield where, name, value
        for (_, name), where in self.globals.items():
            value = where.get(name)
            is_own = getattr(value, "__module__", None) == where.get("__name__")
            is_settings = (
                is_own and hasattr(value, "__dict__") and not isinstance(value, types.FunctionType)
            )
            if isinstance(value, (CONSTANTS, types.SimpleNamespace)) or (
                is_settings and not is_module(value)
            ):
                yield where, name, value
