"""Checkpoints: one file with everything that a run needs to continue. It is written atomically and loaded without
running code."""

import hashlib
import math
import os
import random
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

try:
    import fcntl
except ImportError:  # Windows: two processes that train one run are not detected there
    fcntl = None

FORMAT = 4


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
    for name, value in attributes.items():
        path, _, attribute = name.partition(":")
        setattr(module.get_submodule(path), attribute, value)


@torch.no_grad()
def restore_state(x, saved, where):
    """Restore an object in place from the state that `copy_state` returned. `where` is named in errors."""
    if isinstance(x, nn.Module):
        restore_module(x, saved, where)
    elif has_state_dict(x):
        try:
            x.load_state_dict(saved)
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
    module.load_state_dict(saved)


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
    temporary.unlink(missing_ok=True)  # of a killed process with the same id
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Lock:
    """A lock on a run's folder: one process at a time trains it. The lock ends with the process."""

    def __init__(self, folder):
        self.file = open(folder / "lock", "a+")
        try:
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.seek(0)
            owner = self.file.read() or "another process"
            self.file.close()
            raise ValueError(f"{folder} is in use: {owner} trains it") from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()}")
        self.file.flush()
        for leftover in folder.glob(".*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)

    def close(self):
        self.file.close()


def fingerprint(script):
    """Return a hash of the script, to notice that it was changed."""
    return hashlib.sha256(Path(script).read_bytes()).hexdigest()


def load(path, script):
    """Return the path and the content of a checkpoint of this script. `path` is a file, or the folder of a run."""
    path = Path(path)
    if path.is_dir():
        path = path / "checkpoint.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such checkpoint") from None
    except Exception:
        raise ValueError(f"{path} is not a checkpoint, or is incomplete") from None
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {version}, and this version reads format {FORMAT}: train again"
        )
    name = Path(script).stem
    if state["script"] != name:
        why = "another network may have the same weights"
        raise ValueError(
            f"{path} is a checkpoint of {state['script']}.py, and this is {name}.py: {why}"
        )
    return path, state


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
