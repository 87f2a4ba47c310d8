"""From a Godot game to its messages: JSON behind its length, and the process at the other end."""

import json
import os
import shutil
import time
from pathlib import Path

import orjson

from envs import GODOT_SCENES
from processes import LARGEST_MESSAGE, PlayerError, PlayerGone, Process, Stream, find_build

EDITOR_PORT = 11008  # where a game that nobody gave a port looks for Python


class GodotError(PlayerError):
    """Of a Godot game."""


class GodotGone(GodotError, PlayerGone):
    """The game crashed or hangs: a new one may do better."""


def find_godot(path):
    given = os.environ.get("GODOT")
    godot = given or shutil.which("godot") or shutil.which("godot4")
    if not godot:
        get = "get one from godotengine.org or your system's packages, put it on the PATH as `godot`, or set $GODOT"
        raise GodotError(f"{path} is run by Godot 4, and there is none here: {get}")
    if given and not (os.path.isfile(given) and os.access(given, os.X_OK)):
        raise GodotError(f"$GODOT is {given}, and no program is there")
    return godot


def find_game(path):
    """The command that starts a game: a bundled scene by its id, a project by its folder, or an exported game."""
    if path in GODOT_SCENES:
        folder = Path(__file__).resolve().parent / "envs" / "godot"
        return [find_godot(path), "--path", str(folder), f"res://{path.removeprefix('Godot').lower()}.tscn"]
    folder = Path(path).parent if Path(path).name == "project.godot" else Path(path)
    if (folder / "project.godot").is_file():
        return [find_godot(path), "--path", str(folder.resolve())]
    if found := find_build(path, GodotError):
        return [found]
    hint = "Give an exported game, or the folder with its project.godot."
    raise GodotError(f"{path}: no game there. {hint} Bundled scenes: {', '.join(GODOT_SCENES)}.")


class Wire(Stream):
    """Messages are JSON behind their length in four bytes. The game connects, Python speaks first."""

    awake, piece = 0, 1 << 16  # a step of a game takes a millisecond or more: who waits sleeps

    def send(self, message, timeout=None):
        data = orjson.dumps(message)
        self._write(len(data).to_bytes(4, "little") + data, None if timeout is None else time.monotonic() + timeout)

    def receive(self, timeout=None):
        deadline, buffer = None if timeout is None else time.monotonic() + timeout, self.buffer
        while len(buffer) < 4:
            self._fill(deadline)
        end = 4 + int.from_bytes(buffer[:4], "little")
        if end > LARGEST_MESSAGE:
            raise ConnectionError(f"its message is larger than {LARGEST_MESSAGE >> 20} MiB")
        while len(buffer) < end:
            self._fill(deadline)
        data = bytes(memoryview(buffer)[4:end])
        del buffer[:end]
        try:
            message = orjson.loads(data)
        except ValueError:  # or an infinite number, which Godot writes as 1e99999: slower, and takes it
            message = read_slowly(data)
        if not isinstance(message, dict):
            raise ConnectionError("its message is not a JSON object")
        return message


def read_slowly(data):
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"its message is not JSON ({error})") from None


class Game(Process):
    """One Godot process and the wire to it."""

    def __init__(self, path, worker, base_port, timeout, args):
        found = None if path == "editor" else find_game(path)
        port = (0 if found else EDITOR_PORT) if base_port is None else base_port + worker
        command = found and (lambda port: [*found, *args, f"--port={port}"])
        super().__init__(f"game {worker} ({path})", command, port, base_port, timeout, GodotError, GodotGone)
        self.worker = worker
        if command is None:
            print(f"Waiting for Play in the Godot editor (port {self.port}) ...", flush=True)

    @property
    def hint(self):
        """A script that fails does not end a game: it says so, and is silent from then on."""
        errors = [line for line in self.last_words() if "ERROR" in line] if self.process else []
        return errors[-1].strip() if errors else "has its scene a Sync node, in training mode?"

    @property
    def late(self):
        return f": {self.hint}"

    def connect(self):
        self.accept(lambda sock, seconds: Wire(sock))
        self.send({"type": "handshake", "major_version": "0", "minor_version": "7"})
        self.send({"type": "env_info"})

    def receive(self, kind):
        message = super().receive()
        if message.get("type") != kind:
            raise self.error(f"answers {message.get('type')!r}, and {kind!r} was expected")
        return message

    def close(self):
        super().close({"type": "close"})
