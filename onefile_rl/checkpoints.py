"""Checkpoints: one file with everything that a run needs to continue. It is written atomically and loaded without
running code."""

import builtins
import hashlib
import json
import math
import os
import random
import re
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from onefile_rl.engines.files import read
from onefile_rl.engines.printing import printable
from onefile_rl.engines.scenes import EngineError
from onefile_rl.trust import is_signed, strings

try:
    import fcntl
except ImportError:  # Windows: two processes that train one run are not detected there
    fcntl = None

FORMAT = 4
FOLDERS = "behaviors.json"  # in the folder of a run that trains several behaviors

# The types of a checkpoint's entries. Those of "envs" depend on the kind of envs.
NUMBER = (int, float)
STRUCTURE = {
    "args": dict,
    "changed_args": dict,
    "agent_attributes": dict,
    "script_numbers": dict,
    "spec": dict,
    "large": dict,
    "kept": dict,
    "running": dict,
    "episodes": dict,
    "random": dict,
    "recent": list,
    "best": NUMBER,
    "iteration": int,
    "global_step": int,
    "script": str,
    "fingerprint": str,
    "seal": str,
    "envs": object,
}
LARGEST_COUNT = 2**41  # --total-timesteps is at most 2**40
# The types of an agent's tensors
DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def plain(x):
    """Convert to tensors and Python's own types, which can be loaded without running code."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        if len(x) and all(isinstance(y, np.ndarray) for y in x):
            return torch.as_tensor(np.stack(x))
        return type(x)(map(plain, x))
    if isinstance(x, np.ndarray):
        return torch.as_tensor(x)
    return x.item() if isinstance(x, np.generic) else x


def has_state_dict(x):
    """Return whether this is a module, an optimizer, a scheduler or the like."""
    return not isinstance(x, type) and hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def check_kept(name, x):
    """Refuse copies of a state: the checkpoint would have the state of now, for ever."""
    if isinstance(x, dict):
        is_copy = set(x) == {"state", "param_groups"} or any(
            isinstance(key, torch.Tensor) for key in x
        )
        if is_copy:
            raise ValueError(
                f"keep: {name!r} is the state of an optimizer: give the optimizer itself"
            )
        return
    kinds = (torch.Tensor, np.ndarray, list)
    if not isinstance(x, kinds) and not has_state_dict(x) and not hasattr(x, "state"):
        what = (
            "give a module, an optimizer, a dict, an array, or an object with state() and restore()"
        )
        raise ValueError(f"keep: {name!r} is a {type(x).__name__}, which can't be restored: {what}")


def copy_state(x):
    """Return a copy of an object's state."""
    if has_state_dict(x):
        x = x.state_dict()
    elif hasattr(x, "state") and callable(x.state):
        return x.state()
    if isinstance(x, dict):
        return {key: copy_state(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(copy_state(value) for value in x)
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return x.copy() if isinstance(x, np.ndarray) else x


def plain_attributes(module):
    """Return the numbers and strings among the attributes of a module and its parts, by path and name."""
    return {
        f"{path}:{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (int, float, str)) and name != "training"
    }


def set_attributes(module, attributes):
    """Set numbers and strings among the attributes of a module and its parts. Anything else can't be replaced."""
    parts = dict(module.named_modules())
    for name, value in attributes.items():
        path, _, attribute = name.partition(":")
        part = parts.get(path)
        replaceable = part is not None and is_new_name(attribute)
        if replaceable and hasattr(part, attribute):
            replaceable = isinstance(vars(part).get(attribute), (int, float, str))
        if not replaceable:
            raise ValueError(
                f"the checkpoint has the attribute {printable(name)}, which the script's agent does not have"
            )
        setattr(part, attribute, value)


def set_numbers(variables, numbers):
    """Set numbers among the globals of a script. Anything else can't be replaced."""
    for name, value in numbers.items():
        allowed = is_new_name(name) and not hasattr(builtins, name)
        if not allowed or type(variables.get(name, 0)) not in (int, float, bool):
            raise ValueError(
                f"the checkpoint has the number {printable(name)}, which is not a number of the script"
            )
        variables[name] = value


def is_new_name(name):
    return name.isidentifier() and not name.startswith("__")


@torch.no_grad()
def restore_state(x, saved, where):
    """Restore an object in place from the state that `copy_state` returned. `where` is named in errors."""
    if isinstance(x, nn.Module):
        restore_module(x, saved, where)
    elif has_state_dict(x):
        options = [dict(group) for group in getattr(x, "param_groups", [])]
        try:
            x.load_state_dict(saved)
            check_options(x, options)
        except (ValueError, KeyError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{where} does not fit the {type(x).__name__} of this script: {reason}"
            ) from None
    elif hasattr(x, "restore"):
        x.restore(saved)
    elif isinstance(x, dict):
        for name, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(x.get(name), torch.Tensor):
                x[name].copy_(value)
            elif has_state_dict(x.get(name)):
                restore_state(x[name], value, where)
            else:
                x[name] = value
    elif isinstance(x, torch.Tensor):
        x.copy_(saved)
    else:
        x[:] = saved.numpy() if isinstance(x, np.ndarray) else saved


def check_options(optimizer, options):
    """Refuse options of an optimizer, such as its learning rate, that have another form than `options`, those of the
    script: the error would come with the first update."""
    for i, ours in enumerate(options):
        theirs = optimizer.param_groups[i]
        for name, value in ours.items():
            saved = theirs.get(name)
            valid = name == "params" or has_form(saved, value)
            if valid and name == "betas":
                valid = saved == value or all(0 < beta < 1 for beta in saved)
            if not valid:
                raise ValueError(f"{name} is {printable(repr(saved))[:60]}")


def has_form(x, example):
    """Return whether an option of an optimizer is of the same kind as another: a number, a pair of numbers, a flag."""
    if isinstance(example, (tuple, list)):
        fits = isinstance(x, (tuple, list)) and len(x) == len(example)
        return fits and all(map(has_form, x, example))
    if isinstance(example, (bool, str)):
        return x is None or isinstance(x, type(example))
    if example is None:
        return x is None or isinstance(x, NUMBER)
    if not isinstance(example, (*NUMBER, torch.Tensor)):
        return True
    if isinstance(x, torch.Tensor):
        return x.numel() == 1 and x.dtype in DTYPES and not math.isnan(x.item())
    return isinstance(x, NUMBER) and not isinstance(x, bool) and x == x  # not nan


def attributes(x, but=()):
    """Return copies of all attributes of an object by name, except those in `but`, as a checkpoint can keep them.

    These are numbers, strings, bools, None, arrays, and lists, tuples and dicts of them. Anything else is an error that
    names the attribute.
    """
    return {
        name: encode(f"{type(x).__name__}.{name}", value)
        for name, value in vars(x).items()
        if name not in but
    }


def restore_attributes(x, saved):
    """Set the attributes that `attributes` returned."""
    for name, value in saved.items():
        setattr(x, name, decode(value))


def encode(name, x):
    """Convert arrays to tensors, and refuse what can't be loaded again."""
    if type(x) in (bool, int, float, str, type(None)):
        return x
    if type(x) in (list, tuple):
        return type(x)(encode(name, value) for value in x)
    if type(x) is dict and all(type(key) in (bool, int, float, str) for key in x):
        return {key: encode(name, value) for key, value in x.items()}
    if isinstance(x, (np.ndarray, np.generic)):
        with suppress(TypeError, ValueError):  # torch has no such dtype
            return torch.as_tensor(np.array(x))
        fix = "use an array of numbers"
    else:
        fix = "use numbers, strings, arrays, or lists, tuples and dicts of them"
    what = f"array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
    raise ValueError(f"{name} contains a {what}, which a checkpoint can't keep: {fix}")


def decode(x):
    """Convert tensors to arrays, and those without dimensions to numpy's numbers."""
    if isinstance(x, dict):
        return {key: decode(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(decode, x))
    return x.numpy().copy()[()] if isinstance(x, torch.Tensor) else x


def restore_module(module, saved, where):
    """Load a module's state, or raise an error that names the first tensor that does not fit."""
    here = module.state_dict()

    def size(tensor):
        return "is missing" if tensor is None else f"is {list(tensor.shape)}"

    for name in [*here, *saved]:
        ours = here.get(name)
        theirs = saved.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            sizes = f"{name} {size(theirs)} in the checkpoint and {size(ours)} here"
            raise ValueError(f"{where} does not fit this script's network: {sizes}")
        if not same_kind(ours, theirs):
            kinds = f"{name} is {theirs.dtype} in the checkpoint and {ours.dtype} here"
            raise ValueError(f"{where} does not fit this script's network: {kinds}")
    module.load_state_dict(saved)


def same_kind(x, y):
    """Return whether two tensors have the same dtype, or floating-point numbers of any precision."""
    return x.dtype == y.dtype or (x.is_floating_point() and y.is_floating_point())


def not_finite(x, name):
    """Yield the names of the arrays in a state that have an infinite element or a nan, and of numbers that are nan.

    A single number may be infinite, as the best return before the first episode has ended.
    """
    if isinstance(x, dict):
        for key, value in x.items():
            yield from not_finite(value, f"{name}.{key}" if name else str(key))
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from not_finite(value, f"{name}.{i}")
    elif isinstance(x, np.ndarray) and x.dtype.names:
        for field in x.dtype.names:
            yield from not_finite(x[field], f"{name}.{field}")
    elif isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
        # A sum needs no array for its result. It can be infinite if all elements are finite
        if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
            yield name
    elif isinstance(x, np.ndarray) and x.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            finite = np.isfinite(x.sum())
        if not finite and not np.isfinite(x).all():
            yield name
    elif isinstance(x, (float, np.floating)) and math.isnan(x):
        yield name


class FileForTorch:
    """A file that keeps the error of a failed write. torch raises another one, without the reason."""

    def __init__(self, file):
        self.file = file
        self.error = None

    def write(self, data):
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


def save(path, state, durable=True):
    """Write a state to a file. Raise an OSError if the file could not be written, for example to a full disk.

    durable: wait until the file is on the disk, so that it survives a power failure
    """
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file_for_torch = FileForTorch(file)
        try:
            torch.save(plain(state), file_for_torch)
        except RuntimeError:
            if file_for_torch.error:
                raise file_for_torch.error from None
            raise
        file.flush()
        if durable:
            os.fsync(file.fileno())


def check_room(folder):
    """Raise an OSError if no file can be written to a folder now."""
    probe = Path(folder) / f".room.{os.getpid()}.tmp"
    try:
        probe.write_bytes(bytes(2**16))
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def replacing(path):
    """Give the name of a temporary file that replaces `path` when it is complete. A crash or a full disk leaves the old
    file as it was."""
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process with the same id, or a link
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Lock:
    """A lock on a run's folder: one process at a time trains it. The lock ends with the process."""

    def __init__(self, folder):
        self.file = open_own_file(folder / "lock")
        try:
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = printable(self.file.read(100)) or "another process"
            self.file.close()
            raise ValueError(f"{folder} is in use: {owner} trains it") from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()}")
        self.file.flush()
        for leftover in folder.glob(".*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)

    def close(self):
        self.file.close()


def open_own_file(path):
    """Open a file to read and write, and create it if it does not exist. A link to another file is not followed."""
    problem = f"{path} is a link to another file: delete it"
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError:
        if path.is_symlink():
            raise ValueError(problem) from None
        raise
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(number)
        raise ValueError(problem)
    return open(number, "r+", errors="replace")


def folder_name(text):
    """Return a text as the name of a folder."""
    return re.sub(r"[^\w.+-]+", "-", text)


def folders_of(path):
    """Return the folder of each behavior, by name, if `path` is the folder of a run that trains several behaviors, else
    None."""
    if not Path(path, FOLDERS).is_file():  # a pipe has no end
        return None
    try:
        text = Path(path, FOLDERS).read_text()
    except (OSError, ValueError):
        return None
    try:
        folders = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{Path(path, FOLDERS)} is damaged: it is not valid JSON") from None
    names = folders.items() if isinstance(folders, dict) else []
    valid = all(isinstance(x, str) and x == folder_name(name) for name, x in names)
    printed = all(name.isprintable() and not name.startswith("-") for name, _ in names)
    if not names or not valid or not printed:
        raise ValueError(
            f"{Path(path, FOLDERS)} is not valid: it names other folders than those of behaviors"
        )
    return folders


def fingerprint(script):
    """Return a hash of the script, to notice that it was changed."""
    return hashlib.sha256(Path(script).read_bytes()).hexdigest()


def load(path, script, any_script=False):
    """Return the path and the content of a checkpoint of this script. `path` is a file, or the folder of a run.

    any_script: accept a checkpoint of another script too

    The content has two more entries: "signed", whether this machine has written it, and "trusted", whether its envs may
    be restored too. Everything is checked before memory is taken for it.
    """
    path = Path(path)
    if path.is_dir():
        if folders := folders_of(path):
            runs = " or ".join(str(path / folder) for folder in folders.values())
            raise ValueError(f"{path} has a run for each behavior: give {runs}")
        path = path / "checkpoint.pt"
    state = read(path)
    version = state.get("format") if isinstance(state, dict) else None
    if not isinstance(version, int) or version != FORMAT:
        theirs = printable(version)[:20]
        raise ValueError(
            f"{path} has checkpoint format {theirs}, and this version reads format {FORMAT}: train again"
        )
    problem = structure_problem(state)
    if problem:
        raise ValueError(f"{path} is not a valid checkpoint: {problem}")
    name = Path(script).stem
    if state["script"] != name and not any_script:
        theirs = f"{printable(state['script'])}.py"
        raise ValueError(
            f"{path} is a checkpoint of {theirs}, whose network may differ from that of {name}.py: use {theirs}"
        )
    try:
        state["signed"] = is_signed(state)
    except Exception:  # arguments are missing, or have other types
        state["signed"] = False
    state["trusted"] = state["signed"]
    if not state["signed"]:
        for key in ("args", "changed_args", "spec", "kept"):
            for text in strings(state[key]):
                if not text.isprintable():
                    problem = f"{key} has control characters in {printable(text)[:60]}"
                    raise ValueError(f"{path} is not a valid checkpoint: {problem}")
    return path, state


def structure_problem(state):
    """Return what is wrong with the entries of a checkpoint, or None."""
    for key, kind in STRUCTURE.items():
        if key not in state:
            return f"it has no {key}"
        if not isinstance(state[key], kind) or isinstance(state[key], bool):
            return f"{key} is a {type(state[key]).__name__}"
    # Missing in earlier versions
    for key, kind in {"files": dict, "run": str, "curriculum": dict}.items():
        if not isinstance(state.get(key, kind()), kind):
            return f"{key} is a {type(state[key]).__name__}"
    for key in ("iteration", "global_step"):
        if not 0 <= state[key] <= LARGEST_COUNT:
            return f"{key} is {state[key]}"
    if state["best"] != state["best"]:
        return "best is nan"
    for key, kind in STRUCTURE.items():
        if kind is dict and not all(isinstance(name, str) for name in state[key]):
            return f"{key} has a name that is not a string"

    for key in ("args", "changed_args"):
        for name, value in state[key].items():
            if not is_plain(value):
                return f"{key} has {printable(name)}, which is not a number or a string"

    # Numbers and strings that are set into objects, and names of files
    if not all(isinstance(x, NUMBER) for x in state["recent"]):
        return "recent has something else than numbers"
    if not all(isinstance(x, NUMBER) for x in state["script_numbers"].values()):
        return "script_numbers has something else than numbers"
    if not all(isinstance(x, (*NUMBER, str)) for x in state["agent_attributes"].values()):
        return "agent_attributes has something else than numbers and strings"
    for file in state["large"].values():
        if not isinstance(file, str) or Path(file).name != file:
            return f"large names {printable(file)}, which is not a file of its folder"

    # The agent, and the episodes
    agent = state["kept"].get("agent")
    if not isinstance(agent, dict) or not all(isinstance(x, torch.Tensor) for x in agent.values()):
        return "kept has no agent"
    for name, x in agent.items():
        if x.dtype not in DTYPES:
            return f"{printable(name)} of the agent is {x.dtype}"
    for name in not_finite(agent, ""):
        return f"{printable(name)} of the agent is not finite"
    if not all(isinstance(state["episodes"].get(name), torch.Tensor) for name in ("r", "l")):
        return "episodes has no returns and lengths"
    return None


def is_plain(x):
    """Return whether a value consists of numbers, strings, bools and None, in lists, tuples and dicts."""
    if isinstance(x, dict):
        return all(map(is_plain, x.keys())) and all(map(is_plain, x.values()))
    if isinstance(x, (list, tuple)):
        return all(map(is_plain, x))
    return x is None or isinstance(x, (bool, int, float, str))


@contextmanager
def using(path, state):
    """Turn errors in objects that are made from a checkpoint into one line, unless this machine has written it."""
    try:
        yield
    except (EngineError, MemoryError, OSError):
        raise
    except Exception as error:
        text = str(error)
        if state["signed"] or (isinstance(error, ValueError) and text and "\n" not in text):
            raise
        reason = printable((text.splitlines() or [""])[0])[:200]
        raise ValueError(f"{path} can't be used: {type(error).__name__}: {reason}") from None


def check_agent(path, state, Agent, args):
    """Refuse a checkpoint whose agent would have other sizes than its weights, before memory is taken for the agent."""
    if state["signed"]:
        return
    with using(path, state):
        with torch.device("meta"):
            agent = Agent(state["spec"], args)
        missing = agent.state_dict()
        for name, x in state["kept"]["agent"].items():
            ours = missing.pop(name, None)
            if ours is None or ours.shape != x.shape or not same_kind(ours, x):
                raise ValueError(f"{path} does not fit this script's network: {printable(name)}")
        if missing:
            raise ValueError(f"{path} does not fit this script's network: it has no {min(missing)}")


def random_state():
    """Return the state of all random number generators."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
