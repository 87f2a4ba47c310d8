"""Signatures that tell checkpoints of this machine from checkpoints of other machines.

Loading a checkpoint runs no code, but using its arguments can: they can start a program, import a module, name files
and log to the network. Each run therefore signs its arguments with a secret of this machine. A checkpoint without a
valid signature may use risky arguments only if the user gives them on the command line, or gives --trust.
"""

import hmac
import json
import os
from contextlib import suppress
from pathlib import Path

RISKY = ("unity_path", "godot_path", "player_args", "env_kwargs", "env_id", "track")


def secret():
    """Return the secret of this machine and user, created on first use, or None if it cannot be stored."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(config, "unity-mujoco-rl", "secret")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".secret.{os.getpid()}.tmp")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(os.urandom(32))
            with suppress(
                FileExistsError
            ):  # another process has created it in the meantime: use that one
                os.link(temporary, path)
            temporary.unlink()
        return path.read_bytes() or None
    except (OSError, RuntimeError):
        return None


def seal(args):
    """Return the signature of the risky arguments in the dict `args`, or "" if this machine has no secret."""
    key = secret()
    if key is None:
        return ""
    text = json.dumps({name: args[name] for name in RISKY}, sort_keys=True, default=list)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def risks(state):
    """Return what the risky arguments of a checkpoint would do, by argument. Empty if this machine has signed it."""
    args = state["args"]

    # Two different placeholders: a missing signature must not equal a missing secret.
    if hmac.compare_digest(state.get("seal") or "-", seal(args) or "+"):
        return {}

    effects = {}
    for name in RISKY:
        value = args[name]
        if name == "env_id":
            module = value.rpartition(":")[0]
            if module:
                effects[name] = f"import {module}"
        elif not value:
            continue
        elif name == "player_args":
            effects[name] = f"pass {value} to a player"
        elif name == "env_kwargs":
            effects[name] = f"pass {value} to the env"
        elif name == "track":
            effects[name] = "log to the network"
        else:
            effects[name] = f"start {value}"
    return effects
