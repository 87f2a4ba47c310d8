"""A compiled update that follows the loop: values that may change are inputs of the graph, all others are checked."""

import inspect
import logging
import os
import re
import time
import types

import torch
import torch.nn as nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._C._dynamo.guards import TensorGuards

from onefile_rl.fast import cache
from onefile_rl.fast.adam import Adam, read_param_groups

# Values that only torch, Python and this file can change
INTERNAL = ("__import_torch", "__builtins_dict", ".__defaults__")
TENSOR_CHECKS = ("TENSOR_MATCH", "TYPE_MATCH", "DUPLICATE_INPUT")
VALUES = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "SEQUENCE_LENGTH")
HINT = "Make it a float of Args, or give --no-compile"


class LiveArgs:
    """The arguments as the compiled function sees them: floats are tensors, everything else is a checked constant."""

    def __init__(self, args, names, numbers):
        vars(self)["fixed"] = args
        for name, number in zip(names, numbers, strict=True):
            vars(self)[name] = number

    def __getattr__(self, name):
        return getattr(self.fixed, name)

    def __setattr__(self, name, value):
        raise ValueError(
            f"args.{name} is assigned inside the compiled update: assign it in the training loop"
        )


def keep_guards(entries):
    """Choose which of torch's checks run before each call.

    Most of them are about the structure of modules, about the tensors inside of modules and of
    fast.Adam, and about torch itself. Together they take longer than all others. They are left out:
    `CompiledUpdate` itself checks what matters about these tensors. Values of the script and
    gradients are always checked.
    """
    structure = ("_parameters", "_buffers", "_modules", "_hooks")
    optimizer = (".groups[", ".state[", ".state)")
    pair = re.compile(r"\.groups\[\d+\]\[0\]\[\d+\]$")  # (parameter, state) in fast.Adam
    kept = []
    for entry in entries:
        keep = not pair.search(entry.name) and not any(part in entry.name for part in INTERNAL)
        if any(part in entry.name for part in structure):
            keep = entry.guard_type in VALUES and "_hooks" not in entry.name
        elif any(part in entry.name for part in optimizer):
            keep = keep and entry.guard_type not in TENSOR_CHECKS
        elif entry.name.startswith(("names[", "kinds[")):  # variables of CompiledUpdate.compile
            keep = False
        kept.append(keep or entry.name.endswith(".grad"))
    return kept


def signature(tensor):
    return tensor.requires_grad, tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def find_optimizers(function, inputs):
    """Return the optimizers that the function gets, or reads from its closure or from its module."""
    variables = inspect.getclosurevars(function)
    values = [*inputs, *variables.nonlocals.values(), *variables.globals.values()]
    return [x for x in values if isinstance(x, torch.optim.Optimizer)]


def user_line(text):
    """Return "file.py:12: code" for the last line of a traceback inside `text` that is not part of torch."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', text)
    own = [
        line
        for line in lines
        if f"{os.sep}torch{os.sep}" not in line[0] and "onefile_rl" not in line[0]
    ]
    if not own:
        return ""
    path, number, code = own[-1]
    return f" ({os.path.basename(path)}:{number}: {code.strip()})"


def copy_of(function):
    """Return a copy with its own code object, by which torch keeps what it has compiled."""
    code = function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__, closure=function.__closure__)
    copy.__defaults__ = function.__defaults__
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Shortcut:
    """What torch.compile has made of a function, called without torch's own wrapper.

    The wrapper takes as long as a fifth of a small update. It saves and restores settings, most of which are about
    compiling again. `accepts` makes the checks of the compiled function, and has to be called first.
    """

    def __init__(self, function, entry):
        """function: as it was given to torch.compile. entry: what torch keeps for it."""
        self.guards = entry.guard_manager
        self.variables = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        self.variables = {name: cell.cell_contents for name, cell in self.variables.items()}
        self.compiled = types.FunctionType(
            entry.code, function.__globals__, closure=function.__closure__
        )

    def accepts(self, numbers, *others):
        """Return whether nothing has changed that was compiled in."""
        # torch removes its entry when an object that was compiled in does not exist any more
        if self.guards.cache_entry is None:
            return False
        return self.guards.check({**self.variables, "numbers": numbers, "others": others})


class CompiledUpdate:
    """`function(*inputs)`, compiled by torch.compile at its first call.

    Floats may change from call to call: those of `args`, which must be one of the inputs, and floats among the inputs
    themselves are inputs of the compiled graph. If anything else that the function read while it was compiled changes,
    the call fails with an error that names it; without `insist` the plain function runs from then on instead.

    `fast.Adam` is compiled together with the loss. The steps of other optimizers run between compiled parts.
    """

    def __init__(self, function, args, insist=False):
        self.function = function
        self.args = args
        self.insist = insist
        self.seconds = None  # how long the first call took
        self.compiled = None
        self.whole = None  # what is given to torch.compile, if it is compiled as a whole
        self.shortcut = None
        self.numbers = None  # the floats of the last call, and the tensor with them
        self.numbers_tensor = None
        self.float_names = [name for name, value in vars(args).items() if isinstance(value, float)]

    def __call__(self, *inputs):
        if self.seconds is None:
            return self.first_call(inputs)
        if self.compiled is None:
            return self.function(*inputs)
        read_param_groups()
        graph_inputs = self.to_graph_inputs(inputs)
        changed = self.changed_tensor()
        if not changed:
            try:
                if self.shortcut and self.shortcut.accepts(*graph_inputs):
                    return self.shortcut.compiled(*graph_inputs)
                return self.compiled(*graph_inputs)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                changed = self.what_changed(graph_inputs)
        if self.insist:
            raise ValueError(f"compiled into the update and different now: {changed}. {HINT}")
        print(f"\nThe update is not compiled any more: {changed} has changed. {HINT}", flush=True)
        self.compiled = None
        return self.function(*inputs)

    def first_call(self, inputs):
        print(
            "\nCompiling the update: a few seconds, up to a minute the very first time", flush=True
        )
        start = time.perf_counter()
        self.watch_tensors(inputs)
        read_param_groups()
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # its warnings repeat the errors
        logging.getLogger("torch._logging._internal").setLevel(logging.ERROR)
        cache.repair()
        try:
            try:
                return self.compile_and_call(inputs)
            except Exception:  # another process may have been writing a library
                if not cache.repair():
                    raise
                return self.compile_and_call(inputs)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            lines = [line for line in lines if not line.endswith(" raised:")]  # of the backend
            reason = lines[0] if lines else type(error).__name__
            reason += user_line(str(error))
            if self.insist:
                raise ValueError(f"--compile: torch can't compile this update: {reason}") from None
            print(f"\nThe update is not compiled: {reason}", flush=True)
            self.compiled = None
            return self.function(*inputs)
        finally:
            self.seconds = time.perf_counter() - start

    def compile_and_call(self, inputs):
        self.compile(inputs)
        outputs = self.compiled(*self.to_graph_inputs(inputs))
        self.shortcut = self.find_shortcut()
        return outputs

    def watch_tensors(self, inputs):
        """Remember the kind of each tensor that the modules and the fast.Adam optimizers have now.

        The compiled code does not check the sizes of its tensors: it would build an error message
        for each of them at every call, which takes longer than one of its matrix products.
        """
        self.watched = []  # of each tensor: the dict that has it, its name there, label, signature
        seen = set()

        def watch(where, name, label):
            tensor = where[name]
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                self.watched.append((where, name, label, signature(tensor)))

        for module in [x for x in inputs if isinstance(x, nn.Module)]:
            for path, part in module.named_modules():
                for where in (part._parameters, part._buffers):
                    for name in where:
                        watch(where, name, f"{path}.{name}".lstrip("."))
        for optimizer in find_optimizers(self.function, inputs):
            if isinstance(optimizer, Adam):
                for state in optimizer.state.values():
                    for name in state:
                        watch(state, name, f"{name} of fast.Adam")
        tensors = [where[name] for where, name, _, _ in self.watched]
        self.tensor_guards = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        )

    def compile(self, inputs):
        function, args, names = self.function, self.args, self.float_names
        foreign = [x for x in find_optimizers(function, inputs) if not isinstance(x, Adam)]
        for optimizer in foreign:
            optimizer.step = torch.compiler.disable(optimizer.step)
            optimizer.zero_grad = torch.compiler.disable(optimizer.zero_grad)
        if foreign:
            classes = " and ".join(sorted({type(optimizer).__name__ for optimizer in foreign}))
            print(
                f"The update is compiled but for the steps of {classes}: fast.Adam is compiled too",
                flush=True,
            )

        kinds = [self.kind(x) for x in inputs]

        def with_tensors(numbers, *others):
            floats = numbers.unbind()
            live_args = LiveArgs(args, names, floats[: len(names)])
            num_floats = len(names)
            num_others = 0
            inputs = []
            for kind in kinds:
                if kind == "args":
                    inputs.append(live_args)
                elif kind == "float":
                    inputs.append(floats[num_floats])
                    num_floats += 1
                else:
                    inputs.append(others[num_others])
                    num_others += 1
            return function(*inputs)

        torch._dynamo.config.trace_autograd_ops = True
        torch._dynamo.config.record_runtime_overhead = False  # two more calls, for torch's profiler
        settings = dict(
            dynamic=False,
            recompile_limit=1,
            options={
                "guard_filter_fn": keep_guards,
                "cpp_wrapper": args.device == "cpu",
                "size_asserts": False,  # see watch_tensors
            },
        )
        if foreign:  # in parts, with the function itself as the outermost one
            function = torch.compile(copy_of(function), **settings)
            self.compiled = with_tensors
        else:
            self.whole = copy_of(with_tensors)
            self.compiled = torch.compile(self.whole, fullgraph=True, **settings)

    def find_shortcut(self):
        """Return a Shortcut to the function that torch has compiled, None if there are several parts or none."""
        entries = _debug_get_cache_entry_list(self.whole.__code__) if self.whole else []
        return Shortcut(self.whole, entries[0]) if len(entries) == 1 else None

    def kind(self, x):
        if isinstance(x, type(self.args)):
            return "args"
        return "float" if isinstance(x, float) else "other"

    def to_graph_inputs(self, inputs):
        """Return one tensor with all floats, and the inputs that are neither floats nor args."""
        args = self.args
        numbers = []
        others = []
        for x in inputs:
            kind = self.kind(x)
            if kind == "args":
                args = x
            elif kind == "float":
                numbers.append(x)
            else:
                others.append(x)
        if args is not self.args:  # a copy by dataclasses.replace: only its floats may differ
            for name, value in vars(self.args).items():
                if name not in self.float_names and getattr(args, name) != value:
                    raise ValueError(f"compiled into the update and different now: {name}. {HINT}")
        values = vars(args)
        numbers = [*[values[name] for name in self.float_names], *numbers]
        if numbers != self.numbers:
            self.numbers = numbers
            self.numbers_tensor = torch.tensor(numbers, device=self.args.device)
        return self.numbers_tensor, *others

    def changed_tensor(self):
        """Return the name of a watched tensor that differs in more than its values from when the
        update was compiled, or None."""
        tensors = [where.get(name) for where, name, _, _ in self.watched]
        if self.tensor_guards.check(*tensors):
            return None
        for tensor, (_, _, label, compiled) in zip(tensors, self.watched, strict=True):
            now = None if tensor is None else signature(tensor)
            if now != compiled:
                only_grad = now is not None and now[1:] == compiled[1:]
                return (
                    f"requires_grad of {label}" if only_grad else f"the kind of tensor of {label}"
                )
        return None

    def what_changed(self, graph_inputs):
        """Return the check that failed, and the line of the script that read the value."""
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                self.compiled(*graph_inputs)
        except RuntimeError as error:
            failed = re.search(r"- \d+/\d+: (.*)", str(error))
            if not failed:
                return str(error)
            condition, *comments = re.split(r"\s+#\s", failed[1])
            condition = re.sub(r"\b[GL]\['(\w+)'\]", r"\1", condition)
            condition = re.sub(r"\S*\]\.(?=\w)", "", condition).strip()
            condition = re.sub(r"__import_\w+\.", "", condition)
            where = re.findall(r"([^/\s]+\.py:\d+)", comments[-1]) if comments else []
            return f"{condition} ({where[0]})" if where else condition
        return "an input"
