"""What makes the scripts fast, and must not change what they compute: acting in numpy, weights in one vector, a
compiled update.

    act = fast.Acting(agent).checked(obs)               agent.act as a function of arrays
    weights = fast.Vector(agent)                        the agent's parameters are parts of weights.data from now on
    update = fast.Compiled(update, args)                torch.compile; the floats of args stay as live as in Python

Nothing here knows an algorithm. What can't be made fast safely stays as it is, with a line that says so.
"""

import ctypes
import logging
import math
import operator
import os
import re
import shutil
import sys
import time

import numpy as np
import torch
import torch.nn as nn
from torch import fx
from torch.func import functional_call

THREADS = torch.get_num_threads()  # as many as there are cores, or OMP_NUM_THREADS


def threads(work):
    """For products of this many numbers: small ones are not worth a second thread, waking it costs more than it
    computes."""
    return 1 if work < 2**17 else THREADS


def keep_freed_memory(threshold, trim):
    """What an update frees stays at hand, up to `trim` bytes, in pieces up to `threshold`: otherwise the next one gets
    it back page by page."""
    if sys.platform == "linux":
        for option, size in ((-3, threshold), (-1, trim)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, size)


def tensors(device, *arrays):
    """Arrays, tensors, or lists of them, as tensors there."""
    return [tensors(device, *x) if isinstance(x, list) else torch.as_tensor(x, device=device) for x in arrays]


def means(metrics):
    """Of a list of dicts of tensors, name by name."""
    columns = {name: [] for row in metrics for name in row}
    for row in metrics:
        for name, x in row.items():
            columns[name].append(x)
    return {name: torch.stack(x).mean().item() for name, x in columns.items()}


# Acting


def _linear(layer):
    weight, bias = layer.weight.detach().numpy(), None if layer.bias is None else layer.bias.detach().numpy()

    def linear(x):
        y = (weight @ x.T).T  # x @ weight.T takes nearly twice as long
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
    """As torch draws one of each row's."""
    assert count == 1
    return (p / torch.empty(p.shape).exponential_().numpy()).argmax(-1)[:, None]


def _argmax(x, axis, keepdims=False):
    return x.argmax(axis, keepdims=keepdims)


def _gather(x, axis, places):
    return np.take_along_axis(x, places, axis)


def _cat(parts, axis=0):
    return np.concatenate(parts, axis)


def _same(x):
    return x


LAYERS = {  # each is made of the layer, in evaluation mode, and reads its weights where they are
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Tanh: lambda layer: np.tanh,
    nn.ReLU: lambda layer: _relu,
    nn.SiLU: lambda layer: _silu,
    nn.ELU: lambda layer: lambda x: _elu(x, layer.alpha),
    nn.Dropout: lambda layer: _same,
    nn.Identity: lambda layer: _same,
}
FUNCTIONS = {
    **{f: f for f in (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.getitem)},
    **dict.fromkeys((torch.exp, "exp"), np.exp),
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


INLINE = {operator.add: " + ", operator.sub: " - ", operator.mul: " * ", operator.truediv: " / "}  # a call less


class Unknown(Exception):
    """What has no counterpart in numpy here."""


class Acting(nn.Module):
    """`agent.act` on arrays, in evaluation mode, without gradients.

    For a few observations and a small network torch's calls take three times as long as numpy's. So, on a CPU, the
    graph of `act` is translated if every part of it is known, reads the weights where they are, and is compared with
    the module on real observations; otherwise the module acts.
    """

    told = set()

    def __init__(self, agent, deterministic=False):
        super().__init__()
        self.agent, self.deterministic, self.inputs, self.fast = agent, deterministic, 1, None

    def forward(self, *obs):
        return self.agent.act(*(obs[i] for i in range(self.inputs)), deterministic=self.deterministic)

    @torch.no_grad()
    def module(self, *obs):
        training, device = self.agent.training, next(self.agent.parameters()).device
        if training:
            self.agent.eval()
        out = self.agent.act(*tensors(device, *obs), deterministic=self.deterministic)
        if training:
            self.agent.train()
        return [x.cpu().numpy() for x in out]

    def checked(self, *obs):
        """The function to act with from now on; obs: observations to compare on. Call it again when more than weights
        may have changed."""
        if self.fast is False or next(self.agent.parameters()).device.type != "cpu":
            return self.module
        self.inputs = len(obs)
        for derive in (
            self.fast is None,
            True,
        ):  # what is not a tensor is fixed when it is derived: after a change it is derived anew
            try:
                self.fast = self.derive() if derive else self.fast
            except Exception as error:  # the tracer's own, too: a branch that depends on observations, for example
                self.tell(error if isinstance(error, Unknown) else "how to follow act()")
                return self.module
            if self.same(*obs):
                return self.fast
        self.tell("what act() does between two calls")
        return self.module

    def derive(self):
        """The graph as the text of a Python function, a line for each node."""
        tracer = fx.Tracer()
        tracer.proxy_buffer_attributes = True  # else what is computed from statistics would be fixed
        lines, scope = [], {"inf": math.inf}
        for node in tracer.trace(self).nodes:
            if node.op == "placeholder":
                lines.append(f"def act(*{node.name}):")
            elif node.op == "get_attr":
                scope[node.name] = operator.attrgetter(node.target)(self).detach().numpy()
            elif node.op == "output":
                lines.append(f"return {node.args[0]}")
            else:
                do, inputs = self.counterpart(node), list(map(str, node.args))
                scope[f"do_{node.name}"] = do
                called = f"do_{node.name}({', '.join(inputs)})"
                lines.append(f"{node.name} = " + (INLINE[do].join(inputs) if do in INLINE else called))
        exec("\n    ".join(lines), scope)
        return scope["act"]

    def counterpart(self, node):
        if node.op == "call_module":
            layer = self.get_submodule(node.target)
            if type(layer) not in LAYERS or layer._forward_hooks or layer._forward_pre_hooks:
                raise Unknown(type(layer).__name__)
            return LAYERS[type(layer)](layer)
        if node.target not in FUNCTIONS or node.kwargs:
            raise Unknown(getattr(node.target, "__name__", node.target))
        return FUNCTIONS[node.target]

    def same(self, *obs):
        chance, outputs = torch.get_rng_state(), []
        for act in (self.fast, self.module):
            torch.set_rng_state(chance)
            outputs.append(act(*obs))
        torch.set_rng_state(chance)
        return all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*outputs, strict=True))

    def tell(self, what):
        if str(what) not in self.told:
            self.told.add(str(what))
            print(f"The module itself acts, which is slower: fast.py does not know {what}", flush=True)
        self.fast = False


# Weights


class Vector:
    """Parameters of a module as parts of one vector, `data`: what changes the one has changed the other. Adam on it is
    a few operations, and not a few for each layer. only, but: beginnings of the names that belong to it, or that
    don't."""

    def __init__(self, module, only=("",), but=()):
        named = [
            (n, p) for n, p in module.named_parameters() if n.startswith(tuple(only)) and not n.startswith(tuple(but))
        ]
        self.names, self.parameters = zip(*named, strict=True)
        self.vector = nn.utils.parameters_to_vector(self.parameters).detach()
        nn.utils.vector_to_parameters(self.vector, self.parameters)
        self.places, self.learns = [p.data_ptr() for p in self.parameters], [p.requires_grad for p in self.parameters]

    @property
    def data(self):
        if self.learns != [p.requires_grad for p in self.parameters]:
            raise ValueError("requires_grad_() comes too late here: freeze parameters where the agent is made")
        if self.places != [p.data_ptr() for p in self.parameters]:
            now = [p.data_ptr() for p in self.parameters]
            name = next(n for n, old, new in zip(self.names, self.places, now, strict=True) if old != new)
            way = "change it in place, by .data.copy_()"
            raise ValueError(f"{name} is another tensor than it was, which nothing would learn: {way}")
        return self.vector


class Functional(nn.Module):
    """function(module, ...), with vectors in the place of the module's parameters: those of `layout`, or others like
    them."""

    def __init__(self, function, module, *layout):
        super().__init__()
        self.function, self.module = function, module
        self.parts = [[] for _ in layout]
        for parts, vector in zip(self.parts, layout, strict=True):
            for name, p in zip(vector.names, vector.parameters, strict=True):
                parts.append((f"module.{name}", p.shape, p.numel(), p.requires_grad))
        nobodys = {n for n, _ in module.named_parameters()} - {n for vector in layout for n in vector.names}
        if nobodys:
            raise ValueError(f"{sorted(nobodys)[0]} is in no vector: nothing would learn it")

    def forward(self, *inputs):
        return self.function(self.module, *inputs)

    def of(self, vectors, *inputs):
        parameters = {}
        for vector, parts in zip(vectors, self.parts, strict=True):
            pieces = vector.split([size for _, _, size, _ in parts])
            for (name, shape, _, learns), piece in zip(parts, pieces, strict=True):
                parameters[name] = (piece if learns else piece.detach()).view(shape)
        return functional_call(self, parameters, inputs)


# Memory


class _Lstm(torch.autograd.Function):
    """The steps of packed sequences in numpy: for small batches torch's take several times as long. (network, row,
    number) in all arrays; gates in torch's order, input, forget, cell, output."""

    @staticmethod
    def forward(ctx, pre, kept, memory, sizes):
        gates, kept, (h, c) = pre.detach().numpy().copy(), kept.detach().numpy(), np.split(memory.numpy(), 2, -1)
        width, ends = h.shape[-1], np.cumsum(sizes.numpy()).tolist()
        scale = np.repeat(np.array([0.5, 0.5, 1, 0.5], np.float32), width)  # sigmoid(x) is (1 + tanh(x / 2)) / 2
        out, before, cells, bent = (np.empty((*gates.shape[:2], width), np.float32) for _ in range(4))
        back = np.ascontiguousarray(kept.transpose(0, 2, 1))
        for end, size in zip(ends, sizes.tolist(), strict=True):
            rows, h, c = slice(end - size, end), h[:, :size], c[:, :size]
            before[:, rows], cells[:, rows], z = h, c, gates[:, rows]
            z += h @ back
            z *= scale
            np.tanh(z, out=z)
            for gate in (z[..., : 2 * width], z[..., 3 * width :]):
                gate += 1
                gate *= 0.5
            i, f, g, o = (z[..., k * width : (k + 1) * width] for k in range(4))
            c = f * c + i * g
            bent[:, rows] = np.tanh(c)
            h = out[:, rows] = o * bent[:, rows]
        ctx.kept = gates, kept, before, cells, bent, sizes.tolist(), ends
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx, grad):
        gates, kept, before, cells, bent, sizes, ends = ctx.kept
        width, grad, out = before.shape[-1], grad.numpy(), np.empty_like(gates)
        dh, dc = np.zeros((2, len(kept), sizes[0], width), np.float32)
        i, f, g, o = (gates[..., k * width : (k + 1) * width] for k in range(4))
        # What does not depend on the step after: slopes of the gates, and of the output by the cells.
        slopes = np.concatenate([g * i * (1 - i), cells * f * (1 - f), i * (1 - g * g), bent * o * (1 - o)], -1)
        opens = o * (1 - bent * bent)
        for end, size in zip(reversed(ends), reversed(sizes), strict=True):
            rows = slice(end - size, end)
            dh_now = grad[:, rows] + dh[:, :size]
            dc_now = dc[:, :size] + dh_now * opens[:, rows]
            z = out[:, rows]
            for k, by in enumerate((dc_now, dc_now, dc_now, dh_now)):
                part = slice(k * width, (k + 1) * width)
                np.multiply(by, slopes[:, rows, part], out=z[..., part])
            dh[:, :size], dc[:, :size] = z @ kept, dc_now * f[:, rows]
        return torch.from_numpy(out), torch.from_numpy(out.transpose(0, 2, 1) @ before), None, None


def lstm(pre, kept, memory, sizes):
    """Outputs of LSTMs side by side, over packed sequences. pre: their gates before what was kept comes in, biases
    and all, (network, row, gate); kept: the weights of that, (network, gate, width); memory: outputs and cells that the
    sequences begin with, (network, sequence, 2 width); sizes: how many sequences reach each step."""
    if pre.device.type == "cpu":
        return _Lstm.apply(pre, kept, memory, sizes)
    none, same, outs = pre.new_zeros(pre.shape[-1]), torch.eye(pre.shape[-1], device=pre.device), []
    for x, weight, (h, c) in zip(pre, kept, (m.chunk(2, 1) for m in memory), strict=True):
        first = [h[None].contiguous(), c[None].contiguous()]
        outs.append(torch.lstm(x, sizes, first, [same, weight, none, none], True, 1, 0.0, False, False)[0])
    return torch.stack(outs)


class Unrolled:
    """Memories side by side, over packed sequences. What they do is their own `step`; where that is an LSTM of the
    layers `seen` and `kept` it is done in numpy, and compared with `step` now and then; else they step in torch."""

    def __init__(self):
        self.calls, self.known = 0, True

    def __call__(self, memories, inputs, first, sizes):
        if self.known:
            try:
                gates = [m.seen(x) + m.kept.bias for m, x in zip(memories, inputs, strict=True)]
                kept = torch.stack([m.kept.weight for m in memories])
                outs = lstm(torch.stack(gates), kept, torch.stack(list(first)), sizes)
                if len(sizes) == 1 or self.calls % 100 == 0:  # an iteration's rows, one by one; some of its sequences
                    self.known = self.same(outs, memories, inputs, first, sizes)
            except Exception:  # other layers, other shapes
                self.known = False
            self.calls += len(sizes) > 1
            if self.known:
                return outs
            print(
                "Memory is stepped in torch, which is slower: fast.py knows an LSTM, and step() is not one", flush=True
            )
        return self.steps(memories, inputs, first, sizes)

    def steps(self, memories, inputs, first, sizes):
        outs = []
        for memory, x, now in zip(memories, inputs, first, strict=True):
            parts = []
            for rows in x[: int(sizes.sum())].split(sizes.tolist()):
                out, now = memory.step(rows, now[: len(rows)])
                parts.append(out)
            outs.append(torch.cat(parts))
        return torch.stack(outs)

    @torch.no_grad()
    def same(self, outs, memories, inputs, first, sizes):
        """On the first two steps: what is seen of a memory, and what is kept of it."""
        expected = self.steps(memories, inputs, first, sizes[:2])
        return torch.allclose(outs[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5)


# Compiling


def compiler():
    """Whether torch.compile can work here."""
    return any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")))


class Live:
    """Args as the compiled function sees them: floats are tensors, inputs of the graph; the rest is fixed, and
    guarded."""

    def __init__(self, args, names, numbers):
        self.fixed = args
        for name, number in zip(names, numbers, strict=True):
            setattr(self, name, number)

    def __getattr__(self, name):
        return getattr(self.fixed, name)


def _guards(entries):
    """Which of dynamo's checks before each call to keep: constants and the shapes of inputs. Those of the parameters
    and hooks of modules take longer than all the rest, and the parameters are given by the vector."""
    constant = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH")
    return [
        e.guard_type in constant
        or (e.guard_type == "TENSOR_MATCH" and "_parameters" not in e.name and "_buffers" not in e.name)
        for e in entries
    ]


class Compiled:
    """function(args, *inputs), compiled at its first call. Floats of args, and floats at the end of the inputs, may
    change from call to call: they are inputs of the graph. Whatever else it read when it was compiled can't change
    without an error. Where it can't be compiled the function itself runs, with a line that says so, or, if the user
    insists, there is an error."""

    def __init__(self, function, args, insist=False):
        self.function, self.args, self.insist, self.seconds = function, args, insist, None
        names = self.names = [name for name, value in vars(args).items() if isinstance(value, float)]

        def packed(numbers, *inputs):
            numbers = numbers.unbind()
            return function(Live(args, names, numbers[: len(names)]), *inputs, *numbers[len(names) :])

        packed.__code__ = (
            packed.__code__.replace()
        )  # a copy: torch keeps what it compiles by the code, and would take it for another's
        torch._dynamo.config.trace_autograd_ops = True
        # The shapes are the same for ever, and what calls the kernels can be C++ too: for a small network Python takes
        # as long as they do.
        options = {"guard_filter_fn": _guards, "cpp_wrapper": args.device == "cpu"}
        self.compiled = torch.compile(packed, fullgraph=True, dynamic=False, options=options, recompile_limit=1)

    def __call__(self, args, *inputs):
        if self.compiled is None:
            return self.function(args, *inputs)
        if args is not self.args:  # another one with other numbers is fine
            for name, value in vars(self.args).items():
                if name not in self.names and getattr(args, name) != value:
                    raise ValueError(f"compiled into the update and different now: {name}. Give --no-compile")
        count = sum(isinstance(x, float) for x in inputs)
        numbers = [getattr(args, name) for name in self.names] + list(inputs[len(inputs) - count :])
        inputs = torch.tensor(numbers, device=self.args.device), *inputs[: len(inputs) - count]
        if self.seconds is None:
            return self.first(args, *inputs)
        try:
            return self.compiled(*inputs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            raise ValueError(self.what_changed(inputs)) from None

    def first(self, args, numbers, *tensors):
        print("\nCompiling the update: a few seconds, half a minute the very first time", flush=True)
        start = time.perf_counter()
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # its warnings are the errors here
        try:
            return self.compiled(numbers, *tensors)
        except Exception as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            if self.insist:
                raise ValueError(f"--compile: torch can't compile this update: {reason}") from None
            print(f"\nThe update is not compiled: {reason}", flush=True)
            self.compiled = None
            return self.function(args, *tensors, *numbers[len(self.names) :].tolist())
        finally:
            self.seconds = time.perf_counter() - start

    def what_changed(self, inputs):
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                self.compiled(*inputs)
        except RuntimeError as error:
            reason = re.findall(r"- \d+/\d+: (.*?)(?:  #|$)", str(error), re.MULTILINE)
            reason = re.sub(r"\S*\]\.(?=\w)", "", reason[0]).strip() if reason else str(error)
            return (
                f"compiled into the update and different now: {reason}. Make it a float of Args, or give --no-compile"
            )
