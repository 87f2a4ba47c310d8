"""Signatures that tell checkpoints of this machine from checkpoints of other machines.

Loading a checkpoint runs no code, but using its arguments can: they can start a program, import a module, name files
and log to the network. Each run therefore signs its checkpoints with a secret of this machine. The signature covers the
whole content, and the absolute paths of the programs, modules and files that the arguments name, so it is not valid for
other weights, nor in another folder where ./game is another program. It contains none of these paths.

A checkpoint without a valid signature may use risky arguments only if the user gives them on the command line, or gives
--trust, and its envs start new episodes.
"""

import hashlib
import hmac
import importlib.machinery
import importlib.util
import json
import os
from contextlib import suppress
from pathlib import Path

import torch

from onefile_rl.engines.printing import printable

RISKY = (
    "unity_path",
    "godot_path",
    "player_args",
    "env_kwargs",
    "reset_options",
    "others",
    "env_id",
    "track",
)


def secret():
    """Return the secret of this machine and user, created on first use, or None if it cannot be stored."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(config, "unity-mujoco-rl", "secret")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".secret.{os.getpid()}.tmp")
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(os.urandom(32))
            with suppress(
                FileExistsError
            ):  # another process has created it in the meantime: use that one
                os.link(temporary, path)
            temporary.unlink()
        return path.read_bytes() or None
    except (OSError, RuntimeError):
        return None


def seal(state):
    """Return the signature of a checkpoint of plain types, or "" if it can't be signed: this machine has no secret, or
    the module that the arguments name can't be located."""
    key = secret()
    if key is None:
        return ""
    content = hashlib.sha256()
    for name in sorted(state.keys() - {"seal", "signed", "trusted"}):
        add_to_digest(content, name)
        add_to_digest(content, state[name])
    paths = places(state["args"] | state["changed_args"])
    if paths is None:
        return ""
    text = json.dumps([content.hexdigest(), paths])
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def add_to_digest(digest, x):
    """Add a value of plain types and tensors to a hash. Every value and every length has a type and an end."""
    if isinstance(x, dict):
        digest.update(f"dict {len(x)};".encode())
        for key, value in x.items():
            add_to_digest(digest, key)
            add_to_digest(digest, value)
    elif isinstance(x, (list, tuple)):
        digest.update(f"{'list' if isinstance(x, list) else 'tuple'} {len(x)};".encode())
        for value in x:
            add_to_digest(digest, value)
    elif isinstance(x, torch.Tensor):
        digest.update(f"{x.dtype} {list(x.shape)};".encode())
        digest.update(x.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    else:
        text = repr(x).encode("utf-8", "surrogatepass")
        digest.update(f"{type(x).__name__} {len(text)};".encode())
        digest.update(text)


def places(args):
    """Return the absolute paths of what the arguments name: programs, modules, and other files that exist.

    None if a module can't be located: it can be another one each time, so no signature is valid for it.
    """
    paths = []
    for name in ("unity_path", "godot_path"):
        if args[name]:
            paths.append(str(Path(args[name]).resolve()))
    if args.get(
        "others"
    ):  # the policies of other behaviors; an older checkpoint has no such argument
        paths += [str(Path(text).resolve()) for text in strings(list(args["others"].values()))]
    module = args["env_id"].rpartition(":")[0]
    if module:
        files = module_places(module)
        if files is None:
            return None
        paths += files
    names = ("env_kwargs", "player_args", "reset_options")
    for text in strings([args.get(name) for name in names]):
        path = Path(text.rpartition("=")[2] if text.startswith("-") else text)
        try:
            paths.append(str(path.resolve()) if path.exists() else None)
        except (OSError, ValueError):  # too long, or with a zero byte
            paths.append(None)
    return paths


def module_places(module):
    """Return the absolute paths of a module and of the packages that contain it, or None if one can't be located.

    A package without __init__.py has several folders. Nothing is imported: importlib.util.find_spec would import the
    packages.
    """
    first, *rest = module.split(".")
    try:
        specs = [importlib.util.find_spec(first)]
        for name in rest:
            # A loader looks for the last part of a name only
            folders = list(specs[-1].submodule_search_locations)
            specs.append(importlib.machinery.PathFinder.find_spec(name, folders))
        paths = []
        for spec in specs:
            files = [spec.origin] if spec.has_location else list(spec.submodule_search_locations)
            if not files:
                return None
            paths += [str(Path(file).resolve()) for file in files]
    except Exception:  # there is no such module, it is not a package, or it has no file
        return None
    return paths


def strings(x):
    """Yield the strings in dicts, lists and tuples, keys included."""
    if isinstance(x, str):
        yield x
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from strings(key)
            yield from strings(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from strings(value)


def is_signed(state):
    """Return whether this machine has signed a checkpoint."""
    expected = seal(state)
    return expected != "" and hmac.compare_digest(state["seal"].encode(), expected.encode())


def risks(state):
    """Return what the risky arguments of a checkpoint would do, by argument. Empty if this machine has signed it."""
    if state["signed"]:
        return {}

    args = state["args"]
    effects = {}
    for name in RISKY:
        value = args.get(name)
        if name == "env_id":
            module = str(value).rpartition(":")[0]
            if module:
                effects[name] = f"import {printable(module)}"
        elif not value:
            continue
        elif name == "player_args":
            effects[name] = f"pass {printable(value)} to a player"
        elif name in ("env_kwargs", "reset_options"):
            effects[name] = f"pass {printable(value)} to the env"
        elif name == "others":
            effects[name] = f"load the policies {printable(value)}"
        elif name == "track":
            effects[name] = "log to the network"
        else:
            effects[name] = f"start {printable(value)}"
    return effects
