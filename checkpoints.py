"""A checkpoint: one file with all that a run needs to go on, written whole or not at all, and loaded without running
code."""

import hashlib
import hmac
import json
import os
import random
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

try:
    import fcntl
except ImportError:  # Windows: two processes in one run are not noticed there
    fcntl = None

FORMAT = 3


def plain(x):
    """Tensors and Python's own types: what can be loaded without running code."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return (
            torch.as_tensor(np.stack(x))
            if len(x) and all(isinstance(y, np.ndarray) for y in x)
            else type(x)(map(plain, x))
        )
    return torch.as_tensor(x) if isinstance(x, np.ndarray) else x.item() if isinstance(x, np.generic) else x


def copy_of(x):
    """What is to be kept of an object that changes."""
    if isinstance(x, nn.Module):
        x = x.state_dict()
    if hasattr(x, "state"):
        return x.state()
    if isinstance(x, dict):
        return {key: copy_of(value) for key, value in x.items()}
    return x.clone() if isinstance(x, torch.Tensor) else x.copy() if isinstance(x, np.ndarray) else x


def put_back(x, saved, where):
    """Into the object itself, so that whoever has it sees it."""
    if isinstance(x, nn.Module):
        here = x.state_dict()
        for name in [*here, *saved]:
            there = saved.get(name)
            if name not in here or there is None or there.shape != here[name].shape:
                ours, theirs = (
                    f"is {list(y.shape)}" if y is not None else "is not there" for y in (here.get(name), there)
                )
                raise ValueError(
                    f"{where} does not fit this script's network: {name} {theirs} in the checkpoint and {ours} here"
                )
        x.load_state_dict(saved)
    elif hasattr(x, "restore"):
        x.restore(saved)
    elif isinstance(x, dict):
        for name, value in saved.items():
            if isinstance(value, torch.Tensor):
                x[name].copy_(value)
            else:
                x[name] = value
    else:
        x[:] = saved.numpy()


def save(path, state):
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save(plain(state), file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path):
    """What is written to the name that this gives is renamed when it is whole: a crash or a full disk leaves the last
    one as it was."""
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Lock:
    """One process at a time in a run's folder. The lock goes with the process, however it ends."""

    def __init__(self, folder):
        self.file = open(folder / "lock", "a+")
        try:
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.seek(0)
            there = self.file.read() or "another process"
            self.file.close()
            raise ValueError(f"{folder} is in use: {there} trains it") from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()}")
        self.file.flush()
        for left in folder.glob(".*.tmp"):  # of a process that was killed
            left.unlink(missing_ok=True)

    def close(self):
        self.file.close()


# A stranger's checkpoint runs no code when it is loaded, but its arguments could: they can start a program, import a
# module, name files, log to the network. Those of one's own runs are sealed with a secret of this machine.

RISKY = ("unity_path", "godot_path", "player_args", "env_kwargs", "env_id", "track")


def secret():
    """Made when it is first needed; None where it can't be kept."""
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "unity-mujoco-rl", "secret")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".secret.{os.getpid()}.tmp")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(os.urandom(32))
            with suppress(FileExistsError):  # of two processes that make it at once the first one wins
                os.link(temporary, path)
            temporary.unlink()
        return path.read_bytes() or None
    except (OSError, RuntimeError):
        return None


def seal(args):
    key, text = secret(), json.dumps({name: args[name] for name in RISKY}, sort_keys=True, default=list)
    return hmac.new(key, text.encode(), "sha256").hexdigest() if key else ""


def risks(state):
    """What the arguments of a checkpoint that was not written here would do, by option."""
    args = state["args"]
    if hmac.compare_digest(state.get("seal") or "-", seal(args) or "+"):
        return {}
    module = args["env_id"].rpartition(":")[0]
    told = {name: f"start {args[name]}" for name in ("unity_path", "godot_path")}
    told |= {"env_id": f"import {module}", "track": "log to the network"}
    told |= {"player_args": f"give a player {args['player_args']}", "env_kwargs": f"give the env {args['env_kwargs']}"}
    return {name: told[name] for name in RISKY if (module if name == "env_id" else args[name])}


def fingerprint(script):
    return hashlib.sha256(Path(script).read_bytes()).hexdigest()


def load(path, script):
    """A run's checkpoint, by the run's folder or its own name, if it is of this script. Nothing in it is executed."""
    path, name = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path), Path(script).stem
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such checkpoint") from None
    except Exception:
        raise ValueError(f"{path} is not a checkpoint, or not a whole one") from None
    there = state.get("format") if isinstance(state, dict) else None
    if there != FORMAT:
        raise ValueError(f"{path} is a checkpoint of another version: it has format {there}, this one reads {FORMAT}")
    if state["script"] != name:
        why = "another network may have the same weights"
        raise ValueError(f"{path} is a checkpoint of {state['script']}.py, and this is {name}.py: {why}")
    return path, state


def random_state():
    name, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_random_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
