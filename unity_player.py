"""From a Unity player to its messages: ML-Agents' protobuf in C, the one gRPC call it makes, and the process at the
other end.

mlagents-envs ships message classes that only protobuf 3 accepts, and on Python 3.11+ that protobuf parses in pure
Python. Its files still hold the serialized descriptors, so the classes are rebuilt from those on a current protobuf;
`import mlagents_envs` works then.

A player calls `Exchange` over and over, one call at a time. For that, gRPC is a handful of HTTP/2 frames. A gRPC server
in Python takes four thread hand-overs per call; `Wire` takes none, holds no thread, sees at once that its peer died,
and answers to 127.0.0.1 alone (on Linux, to its own player alone). Its peers are Unity players and the stock Python
client, both on gRPC's C core.
"""

import ast
import difflib
import importlib.util
import socket
import struct
import sys
import time
import types
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder
from google.protobuf.message import DecodeError

from envs import SCENES
from processes import LARGEST_MESSAGE, PlayerError, PlayerGone, Process, Stream, find_build

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

# HTTP/2 (RFC 9113): frame types, flags, and what we allow our peer: whole messages at once, no waiting for credit, in
# frames as large as their 24 bits can say.
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST = 2**31 - 1
LARGEST_FRAME = 2**24 - 1


def frame(kind, flags, stream, payload=b""):
    return struct.pack("!IBI", len(payload) << 8 | kind, flags, stream) + payload


def header(name, value):
    """A literal HPACK field: never indexed, never Huffman-coded, so neither side needs a table."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


WELCOME = frame(SETTINGS, 0, 0, struct.pack("!HIHI", 4, LARGEST, 5, LARGEST_FRAME))
WELCOME += frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", LARGEST - 65535))
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


class Wire(Stream):
    """One end of the connection between a player (the client: it calls) and Python (the server: it answers).

    `send` and `receive` alternate. Both raise ConnectionError when the peer is gone or says what makes no sense, and
    TimeoutError when they are not done in time, whatever the peer does meanwhile.
    """

    def __init__(self, sock, server, timeout=5):
        super().__init__(sock)
        self.server = server
        self.stream, self.complete = 0 if server else -1, False  # the call under way, and whether its message is here
        self.body, self.size = [], 0  # what came of the message, and how much memory that takes
        self.received = 0  # bytes taken from the peer's credit
        self.window = self.stream_window = self.initial_window = 65535  # our credit with the peer
        self.max_frame = 16384  # the largest that the peer takes
        deadline = time.monotonic() + timeout
        if server:
            while len(self.buffer) < len(PREFACE) and PREFACE.startswith(self.buffer):
                self._fill(deadline)
            if not self.buffer.startswith(PREFACE):
                raise ConnectionError("it does not speak gRPC")
            del self.buffer[: len(PREFACE)]
        self._write(WELCOME if server else PREFACE + WELCOME, deadline)

    @classmethod
    def connect(cls, port):
        return cls(socket.create_connection(("127.0.0.1", port)), server=False)

    def send(self, message: UnityMessageProto, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        data = message.SerializeToString()
        data = struct.pack("!BI", 0, len(data)) + data  # gRPC's own prefix: not compressed, length
        if not self.server:
            self.stream, self.stream_window = self.stream + 2, self.initial_window
        elif not self.complete:
            raise ConnectionError("there is no call to answer")
        self.complete, stream = False, self.stream
        out = frame(HEADERS, END_HEADERS, stream, RESPONSE if self.server else REQUEST)
        while data:
            size = min(len(data), self.max_frame, self.window, self.stream_window)
            if size <= 0:  # out of credit: the peer gives more as it reads
                self._write(out, deadline)
                out = b""
                self._pump(deadline)
                continue
            last = END_STREAM if size == len(data) and not self.server else 0
            out += frame(DATA, last, stream, data[:size])
            data = data[size:]
            self.window -= size
            self.stream_window -= size
        if self.server:
            out += frame(HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS)
        self._write(out, deadline)

    def receive(self, timeout=None) -> UnityMessageProto:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.complete:
            self._pump(deadline)
        data, self.body, self.size = b"".join(self.body), [], 0
        if len(data) < 5 or data[0] != 0 or int.from_bytes(data[1:5], "big") != len(data) - 5:
            raise ConnectionError("the call was refused")  # trailers only: an error status of the peer's
        if self.received > 2**30:
            self._write(frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", self.received)), deadline)
            self.received = 0
        try:
            return UnityMessageProto.FromString(data[5:])
        except DecodeError as error:
            raise ConnectionError(str(error)) from None

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
        if kind in (DATA, HEADERS):
            if kind == HEADERS and self.server and stream > self.stream:
                self.stream, self.stream_window, self.body, self.size = stream, self.initial_window, [], 0
            elif stream != self.stream or stream == 0:
                raise ConnectionError("it speaks of a call that is not under way")
            if kind == DATA:
                self.received += size
                self.size += size + 64  # an empty frame takes memory too
                if self.size > LARGEST_MESSAGE:
                    raise ConnectionError(f"its message is larger than {LARGEST_MESSAGE >> 20} MiB")
                self.body.append(payload[1 : size - payload[0]] if flags & PADDED and payload else payload)
            if flags & END_STREAM:
                self.complete = True
        elif kind == SETTINGS and not flags & ACK and size % 6 == 0:
            for key, value in struct.iter_unpack("!HI", payload):
                if key == 4:
                    self.stream_window += value - self.initial_window
                    self.initial_window = value
                elif key == 5:
                    self.max_frame = min(value, LARGEST_FRAME)
            self._write(frame(SETTINGS, ACK, 0), deadline)
        elif kind == PING and not flags & ACK and size == 8:
            self._write(frame(PING, ACK, 0, payload), deadline)
        elif kind == WINDOW_UPDATE and size == 4:
            credit = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += credit
            elif stream == self.stream:
                self.stream_window += credit
        elif kind == RST_STREAM and stream == self.stream:
            raise ConnectionError("the call was cancelled")


class UnityPlayerError(PlayerError):
    """Of a Unity player."""


class UnityPlayerGone(UnityPlayerError, PlayerGone):
    """The player crashed or hangs: a new one may do better."""


def find_player(path):
    """The command that starts a player: a bundled scene by its id, or a Unity build."""
    if path in SCENES:
        return [sys.executable, str(Path(__file__).resolve().parent / "envs" / "player.py"), "--scene", path]
    if found := find_build(path, UnityPlayerError):
        return [found]
    names = {"darwin": "On macOS it is NAME.app.", "win32": "On Windows it is NAME.exe beside NAME_Data."}
    hint = names.get(sys.platform, "On Linux it is NAME.x86_64 beside NAME_Data.")
    close = difflib.get_close_matches(path, SCENES, 1, 0.5)
    near = f" Did you mean {close[0]}?" if close else ""
    raise UnityPlayerError(f"{path}: no player there. {hint} Bundled scenes: {', '.join(SCENES)}.{near}")


class Player(Process):
    """One Unity process and the wire to it."""

    hint = "does an agent still request decisions?"

    def __init__(self, path, worker, base_port, timeout, args):
        found = None if path == "editor" else find_player(path)
        port = (0 if found else EDITOR_PORT) if base_port is None else base_port + worker
        command = found and (lambda port: [*found, *args, "--mlagents-port", str(port)])
        self.worker, name = worker, f"player {worker} ({path})"
        super().__init__(name, command, port, base_port, timeout, UnityPlayerError, UnityPlayerGone)
        if command is None:
            print(f"Waiting for Play in the Unity editor (port {self.port}) ...", flush=True)

    def connect(self, seed):
        """Wait for the player's call and shake hands."""
        self.accept(lambda sock, seconds: Wire(sock, server=True, timeout=seconds))
        hello = self.receive().unity_output.rl_initialization_output
        if not hello.capabilities.hybridActions or hello.communication_version.split(".")[0] != "1":
            spoken = hello.communication_version or "none that is known"
            newer = "build it with ML-Agents' package 2.0 or newer"
            raise self.error(f"speaks ML-Agents protocol {spoken}, this is 1.3 to 1.x: {newer}")
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
        super().send(reply)

    def receive(self):
        message = super().receive()
        if message.header.status != 200:
            raise self.error("has quit")
        return message

    def close(self):
        goodbye = UnityMessageProto()
        goodbye.header.status = 400
        super().close(goodbye)
