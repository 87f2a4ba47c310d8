"""From a Unity player to its messages: ML-Agents' protobuf in C, the one gRPC call it makes, and the process at the other end.

mlagents-envs ships message classes that only protobuf 3 accepts, and on Python 3.11+ that protobuf parses in pure Python.
Its files still hold the serialized descriptors, so the classes are rebuilt from those on a current protobuf; `import mlagents_envs` works then.

A player calls `Exchange` over and over, one call at a time. For that, gRPC is a handful of HTTP/2 frames. A gRPC server in Python
takes four thread hand-overs per call; `Wire` takes none, holds no thread, sees at once that its peer died, and answers to 127.0.0.1
alone. Its peers are Unity players and the stock Python client, both on gRPC's C core.
"""

import ast
import difflib
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder
from google.protobuf.message import DecodeError

from envs import SCENES

EDITOR_PORT = 5004


def rebuild_messages():
    """Put every `mlagents_envs.communicator_objects.*_pb2` module into `sys.modules`, made from its own descriptor."""
    package = "mlagents_envs.communicator_objects"
    files = {}
    for path in Path(importlib.util.find_spec(package).submodule_search_locations[0]).glob("*_pb2.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            data = text.encode("latin1", "ignore") if isinstance(text, str) else text
            if isinstance(data, bytes) and b".proto\x12" in data[:100]:
                file = descriptor_pb2.FileDescriptorProto.FromString(data)
                files[file.name] = (path.stem, data, file.dependency)

    def add(name):  # dependencies first: the pool refuses a file whose imports it does not know
        stem, data, dependencies = files.pop(name)
        for dependency in dependencies:
            if dependency in files:
                add(dependency)
        module = types.ModuleType(f"{package}.{stem}")
        module.DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(data)
        builder.BuildMessageAndEnumDescriptors(module.DESCRIPTOR, vars(module))
        builder.BuildTopDescriptorsAndMessages(module.DESCRIPTOR, module.__name__, vars(module))
        sys.modules[module.__name__] = module

    while files:
        add(next(iter(files)))


if "mlagents_envs.communicator_objects.unity_message_pb2" not in sys.modules:
    rebuild_messages()

import mlagents_envs  # noqa: E402
from mlagents_envs.communicator_objects.unity_message_pb2 import UnityMessageProto  # noqa: E402

# HTTP/2 (RFC 9113): frame types, flags, and what we allow our peer: whole messages at once, no waiting for credit.
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST = 2**31 - 1
AWAKE = 1.5e-3 if hasattr(os, "sched_yield") else 0  # seconds


def frame(kind, flags, stream, payload=b""):
    return struct.pack("!IBI", len(payload) << 8 | kind, flags, stream) + payload


def header(name, value):
    """A literal HPACK field: never indexed, never Huffman-coded, so neither side needs a table."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


WELCOME = frame(SETTINGS, 0, 0, struct.pack("!HIHI", 4, LARGEST, 5, 2**24 - 1)) + frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", LARGEST - 65535))
REQUEST = (
    header(b":method", b"POST")
    + header(b":scheme", b"http")
    + header(b":path", b"/communicator_objects.UnityToExternalProto/Exchange")
    + header(b":authority", b"localhost")
    + header(b"content-type", b"application/grpc")
    + header(b"te", b"trailers")
)
RESPONSE = header(b":status", b"200") + header(b"content-type", b"application/grpc")
TRAILERS = header(b"grpc-status", b"0")


class Wire:
    """One end of the connection between a player (the client: it calls) and Python (the server: it answers).

    `send` and `receive` alternate. Both raise ConnectionError when the peer is gone, `receive` TimeoutError when it is silent.
    """

    def __init__(self, sock, server):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.server = sock, server
        self.buffer = bytearray()
        self.stream, self.body, self.complete = -1, [], False  # the call under way, what came of its message
        self.received = 0  # bytes taken from the peer's credit
        self.window, self.stream_window, self.initial_window, self.max_frame = 65535, 65535, 65535, 16384  # our credit with the peer
        if server:
            while len(self.buffer) < len(PREFACE) and PREFACE.startswith(self.buffer):
                self._fill(time.monotonic() + 5)
            if not self.buffer.startswith(PREFACE):
                raise ConnectionError("it does not speak gRPC")
            del self.buffer[: len(PREFACE)]
            sock.sendall(WELCOME)
        else:
            sock.sendall(PREFACE + WELCOME)

    @classmethod
    def connect(cls, port):
        return cls(socket.create_connection(("127.0.0.1", port)), server=False)

    def close(self):
        self.sock.close()

    def send(self, message: UnityMessageProto):
        data = message.SerializeToString()
        data = struct.pack("!BI", 0, len(data)) + data  # gRPC's own prefix: not compressed, length
        if not self.server:
            self.stream, self.stream_window = self.stream + 2, self.initial_window
        self.complete = False
        out = frame(HEADERS, END_HEADERS, self.stream, RESPONSE if self.server else REQUEST)
        while data:
            size = min(len(data), self.max_frame, self.window, self.stream_window)
            if size <= 0:  # out of credit: the peer gives more as it reads
                self.sock.sendall(out)
                out = b""
                self._pump(None)
                continue
            last = END_STREAM if size == len(data) and not self.server else 0
            out += frame(DATA, last, self.stream, data[:size])
            data = data[size:]
            self.window -= size
            self.stream_window -= size
        if self.server:
            out += frame(HEADERS, END_HEADERS | END_STREAM, self.stream, TRAILERS)
        self.sock.sendall(out)

    def receive(self, timeout=None) -> UnityMessageProto:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.complete:
            self._pump(deadline)
        data, self.body = b"".join(self.body), []
        if len(data) < 5 or data[0] != 0 or int.from_bytes(data[1:5], "big") != len(data) - 5:
            raise ConnectionError("the call was refused")  # trailers only: an error status of the peer's
        if self.received > 2**30:
            self.sock.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", self.received)))
            self.received = 0
        return UnityMessageProto.FromString(data[5:])

    def _pump(self, deadline):
        """Take one frame from the peer and act on it."""
        buffer = self.buffer
        while len(buffer) < 9:
            self._fill(deadline)
        size, flags, stream = struct.unpack_from("!IBI", buffer)
        size, kind = size >> 8, size & 255
        while len(buffer) < 9 + size:
            self._fill(deadline)
        payload = bytes(buffer[9 : 9 + size])
        del buffer[: 9 + size]
        if kind == DATA:
            self.received += size
            self.body.append(payload[1 : size - payload[0]] if flags & PADDED else payload)
        elif kind == HEADERS and self.server:
            self.stream, self.stream_window = stream, self.initial_window
        elif kind == SETTINGS and not flags & ACK:
            for key, value in struct.iter_unpack("!HI", payload):
                if key == 4:
                    self.stream_window += value - self.initial_window
                    self.initial_window = value
                elif key == 5:
                    self.max_frame = value
            self.sock.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.sock.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            credit = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += credit
            elif stream == self.stream:
                self.stream_window += credit
        elif kind == RST_STREAM and stream == self.stream:
            raise ConnectionError("the call was cancelled")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self.complete = True

    def _fill(self, deadline):
        """Read what there is. For a short wait it pays to stay awake: a core that has gone idle is slow to come back. Others go first."""
        until = time.perf_counter() + AWAKE
        while time.perf_counter() < until:
            try:
                chunk = self.sock.recv(1 << 20, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                os.sched_yield()
        else:
            self.sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            try:
                chunk = self.sock.recv(1 << 20)
            finally:
                self.sock.settimeout(None)
        if not chunk:
            raise ConnectionError("the connection was closed")
        self.buffer += chunk


class UnityPlayerError(RuntimeError):
    """What went wrong with a player and what to do about it, in one line."""


class UnityPlayerGone(UnityPlayerError):
    """The player crashed or hangs: a new one may do better."""


def find_player(path):
    """The command that starts a player: a bundled scene by its id, or a Unity build."""
    if path in SCENES:
        return [sys.executable, str(Path(__file__).resolve().parent / "envs" / "player.py"), "--scene", path]
    builds = {
        "darwin": ("On macOS it is NAME.app.", f"{path}/Contents/MacOS/*", f"{path}.app/Contents/MacOS/*"),
        "win32": ("On Windows it is NAME.exe beside NAME_Data.", path, f"{path}.exe", f"{path}/*.exe"),
        "linux": ("On Linux it is NAME.x86_64 beside NAME_Data.", path, f"{path}.x86_64", f"{path}/*.x86_64"),
    }
    hint, *patterns = builds.get(sys.platform, builds["linux"])
    for pattern in map(Path, map(os.path.abspath, patterns)):
        for found in sorted(pattern.parent.glob(pattern.name)) if pattern.name.startswith("*") else [pattern]:
            if found.is_file() and not found.name.startswith("UnityCrashHandler"):
                if not os.access(found, os.X_OK):
                    raise UnityPlayerError(f"{found} is not executable: chmod +x {found}")
                return [str(found)]
    close = difflib.get_close_matches(path, SCENES, 1, 0.5)
    near = f" Did you mean {close[0]}?" if close else ""
    raise UnityPlayerError(f"{path}: no player there. {hint} Bundled scenes: {', '.join(SCENES)}.{near}")


class Player:
    """One Unity process and the wire to it."""

    def __init__(self, path, worker, base_port, timeout, args):
        self.name, self.timeout = f"player {worker} ({path})", timeout
        self.wire = self.process = None
        command = None if path == "editor" else find_player(path)
        port = (0 if command else EDITOR_PORT) if base_port is None else base_port + worker
        try:
            self.listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise UnityPlayerError(f"port {port} is taken ({error.strerror}): without --base-port a free one is chosen") from None
        self.port = self.listener.getsockname()[1]
        if command is None:
            print(f"Waiting for Play in the Unity editor (port {self.port}) ...", flush=True)
            return
        self.log = tempfile.TemporaryFile()
        command += [*args, "--mlagents-port", str(self.port)]
        try:  # a session of its own: Ctrl-C is for this process, which then says goodbye to the player
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)
        except OSError as error:
            self.listener.close()
            raise UnityPlayerError(f"{command[0]} can't be started: {error.strerror}") from None

    def connect(self, seed):
        """Wait for the player's call and shake hands. The port is closed as soon as the player is through."""
        deadline = time.monotonic() + self.timeout
        self.listener.settimeout(0.1)
        while self.wire is None:
            try:
                self.wire = Wire(self.listener.accept()[0], server=True)
            except TimeoutError:
                if time.monotonic() > deadline or (self.process and self.process.poll() is not None):
                    raise self.error(f"has not connected to port {self.port} within {self.timeout:g} s") from None
            except OSError as error:
                raise self.error(f"can't be talked to: {error}") from None
        self.listener.close()
        hello = self.receive().unity_output.rl_initialization_output
        if not hello.capabilities.hybridActions or hello.communication_version.split(".")[0] != "1":
            spoken = hello.communication_version or "none that is known"
            raise self.error(f"speaks ML-Agents protocol {spoken}, this is 1.3 to 1.x: build it with ML-Agents' package 2.0 or newer")
        reply = UnityMessageProto()
        greeting = reply.unity_input.rl_initialization_input
        greeting.seed, greeting.num_areas = seed, 1
        greeting.communication_version, greeting.package_version = "1.5.0", mlagents_envs.__version__
        for capability in greeting.capabilities.DESCRIPTOR.fields:
            setattr(greeting.capabilities, capability.name, True)
        self.send(reply)
        self.receive()

    def send(self, reply):
        reply.header.status = 200
        try:
            self.wire.send(reply)
        except OSError:
            raise self.error("is gone") from None

    def receive(self):
        try:
            message = self.wire.receive(self.timeout)
        except TimeoutError:
            raise self.silent() from None
        except (OSError, DecodeError) as error:
            raise self.error(f"is gone: {error}") from None
        if message.header.status != 200:
            raise self.error("has quit")
        return message

    def silent(self):
        return self.error(f"has not answered for {self.timeout:g} s: does an agent still request decisions?")

    def error(self, what):
        """If the process has ended, that is the reason, and its last words say more."""
        try:
            code = self.process.wait(0.1) if self.process else None
        except subprocess.TimeoutExpired:
            code = None
        if code is not None:
            self.log.seek(max(0, self.log.tell() - 4096))
            words = [line for line in self.log.read().decode(errors="replace").split("\n") if line.strip()]
            what = f"ended with exit code {code}: {words[-1] if words else 'it said nothing'}"
        return UnityPlayerGone(f"{self.name} {what}")

    def close(self):
        """Say goodbye, as a Unity player expects it, and make sure of it."""
        self.listener.close()
        if self.wire:
            goodbye = UnityMessageProto()
            goodbye.header.status = 400
            try:
                self.wire.send(goodbye)
            except OSError:
                pass
            self.wire.close()
        if self.process:
            try:
                self.process.wait(5 if self.wire else 0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.log.close()
