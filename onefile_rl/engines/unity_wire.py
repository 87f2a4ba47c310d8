"""ML-Agents' messages, and the connection that carries them: the protobuf classes and a small gRPC.

The message classes in mlagents-envs work with protobuf 3 only, which on Python 3.11 and later parses in pure Python.
Their files contain the serialized descriptors, and `rebuild_messages` builds the classes from these with the current
protobuf, which parses in C. Import this module before `mlagents_envs`, and `import mlagents_envs` works too.

A player calls the gRPC method `Exchange` repeatedly, one call at a time. For this, a handful of HTTP/2 frames is all
that is needed. A gRPC server in Python switches threads four times per call. `Wire` needs no threads, and notices at
once when its peer dies. Its peers are Unity players and the stock Python client, which use gRPC's C core.
"""

import ast
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

from onefile_rl.engines.process import LARGEST_MESSAGE, Stream


def rebuild_messages():
    """Put every module `mlagents_envs.communicator_objects.*_pb2` into `sys.modules`, built from its descriptor."""
    package = "mlagents_envs.communicator_objects"
    files = {}
    for path in Path(importlib.util.find_spec(package).submodule_search_locations[0]).glob(
        "*_pb2.py"
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            literal = node.value if isinstance(node, ast.Constant) else None
            data = literal.encode("latin1", "ignore") if isinstance(literal, str) else literal
            if isinstance(data, bytes) and b".proto\x12" in data[:100]:
                file = descriptor_pb2.FileDescriptorProto.FromString(data)
                files[file.name] = (path.stem, data, file.dependency)

    def add(name):
        stem, data, dependencies = files.pop(name)
        for dependency in dependencies:  # these first: the pool rejects a file with unknown imports
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

from mlagents_envs.communicator_objects.unity_message_pb2 import UnityMessageProto  # noqa: E402

# HTTP/2 (RFC 9113): types of frames, flags, and identifiers of settings.
DATA = 0
HEADERS = 1
RST_STREAM = 3
SETTINGS = 4
PING = 6
WINDOW_UPDATE = 8
END_STREAM = 1
ACK = 1
END_HEADERS = 4
PADDED = 8
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST_WINDOW = 2**31 - 1
LARGEST_FRAME = 2**24 - 1


def frame(kind, flags, stream, payload=b""):
    """Return an HTTP/2 frame."""
    return struct.pack("!IBI", len(payload) << 8 | kind, flags, stream) + payload


def header(name, value):
    """Return a literal HPACK field, without indexing and without Huffman coding, so that neither side needs a table."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


# The first frames of either side: the peer may send whole messages, in large frames, without waiting for credit.
WELCOME = frame(
    SETTINGS,
    0,
    0,
    struct.pack("!HIHI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW, MAX_FRAME_SIZE, LARGEST_FRAME),
)
WELCOME += frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", LARGEST_WINDOW - 65535))
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
    """One end of the connection between a player, which is the client and calls, and Python, the server.

    `send` and `receive` alternate. Both raise ConnectionError if the peer is gone or violates the protocol, and
    TimeoutError if they are not finished within `timeout` seconds.
    """

    one_call_at_a_time = True  # whether a call before the answer to the last one is an error

    def __init__(self, sock, server, timeout=5):
        super().__init__(sock)
        self.server = server
        self.stream = 0 if server else -1  # the current call
        self.complete = False  # whether the peer's message of the current call has arrived
        self.body = []  # the parts of that message so far
        self.body_size = 0  # their size in memory
        self.received = 0  # bytes that the peer has sent since its credit was renewed last
        self.window = 65535  # bytes that the peer allows us to send, on the connection
        self.stream_window = 65535  # and in the current call
        self.initial_window = 65535  # the value of `stream_window` at the start of a call
        self.max_frame = 16384  # the largest frame that the peer accepts
        deadline = time.monotonic() + timeout
        if server:
            while len(self.buffer) < len(PREFACE) and PREFACE.startswith(self.buffer):
                self._fill(deadline)
            if not self.buffer.startswith(PREFACE):
                raise ConnectionError("the peer does not speak gRPC")
            del self.buffer[: len(PREFACE)]
        self._write(WELCOME if server else PREFACE + WELCOME, deadline)

    @classmethod
    def connect(cls, port):
        """Return the client's end of a new connection to `port` on this machine."""
        return cls(socket.create_connection(("127.0.0.1", port)), server=False)

    def send(self, message: UnityMessageProto, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        data = message.SerializeToString()
        data = struct.pack("!BI", 0, len(data)) + data  # gRPC's prefix: not compressed, length
        if self.server:
            if not self.complete:
                raise ConnectionError("there is no call to answer")
            if self.poll() and self.one_call_at_a_time:
                self._check_no_other_call()
        else:
            self.stream += 2
            self.stream_window = self.initial_window
        self.complete = False
        out = frame(HEADERS, END_HEADERS, self.stream, RESPONSE if self.server else REQUEST)
        while data:
            size = min(len(data), self.max_frame, self.window, self.stream_window)
            if size <= 0:  # out of credit: the peer renews it while it reads
                self._write(out, deadline)
                out = b""
                self._handle_frame(deadline)
                continue
            last = END_STREAM if size == len(data) and not self.server else 0
            out += frame(DATA, last, self.stream, data[:size])
            data = data[size:]
            self.window -= size
            self.stream_window -= size
        if self.server:
            out += frame(HEADERS, END_HEADERS | END_STREAM, self.stream, TRAILERS)
        self._write(out, deadline)

    def receive(self, timeout=None) -> UnityMessageProto:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.complete:
            self._handle_frame(deadline)
        data = b"".join(self.body)
        self._clear_body()
        if len(data) < 5 or data[0] != 0 or int.from_bytes(data[1:5], "big") != len(data) - 5:
            raise ConnectionError(
                "the peer refused the call"
            )  # it sent an error status instead of a message
        if self.received > 2**30:
            self._write(frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", self.received)), deadline)
            self.received = 0
        try:
            return UnityMessageProto.FromString(data[5:])
        except DecodeError as error:
            raise ConnectionError(str(error)) from None

    def _clear_body(self):
        self.body = []
        self.body_size = 0

    def _check_no_other_call(self):
        """Raise an error if the frames that have arrived begin another call.

        The peer has sent a message twice then, and later messages would be too late by one step.
        """
        start = 0
        while len(self.buffer) >= start + 9:
            size_and_kind, _, stream = struct.unpack_from("!IBI", self.buffer, start)
            if size_and_kind & 255 == HEADERS and stream > self.stream:
                raise ConnectionError("the peer called again before it got an answer")
            start += 9 + (size_and_kind >> 8)

    def _handle_frame(self, deadline):
        """Receive one frame and act on it."""
        buffer = self.buffer
        while len(buffer) < 9:
            self._fill(deadline)
        size_and_kind, flags, stream = struct.unpack_from("!IBI", buffer)
        size = size_and_kind >> 8
        kind = size_and_kind & 255
        while len(buffer) < 9 + size:
            self._fill(deadline)
        payload = bytes(buffer[9 : 9 + size])
        del buffer[: 9 + size]

        if kind in (DATA, HEADERS):
            if kind == HEADERS and self.server and stream > self.stream:
                self.stream = stream
                self.stream_window = self.initial_window
                self._clear_body()
            elif stream != self.stream or stream == 0:
                raise ConnectionError("the peer sent a frame of a call that is not active")
            if kind == DATA:
                self.received += size
                self.body_size += size + 64  # an empty frame uses memory too
                if self.body_size > LARGEST_MESSAGE:
                    raise ConnectionError(f"its message is larger than {LARGEST_MESSAGE >> 20} MiB")
                self.body.append(
                    payload[1 : size - payload[0]] if flags & PADDED and payload else payload
                )
            if flags & END_STREAM:
                self.complete = True
        elif kind == SETTINGS and not flags & ACK and size % 6 == 0:
            for key, value in struct.iter_unpack("!HI", payload):
                if key == INITIAL_WINDOW_SIZE:
                    self.stream_window += value - self.initial_window
                    self.initial_window = value
                elif key == MAX_FRAME_SIZE:
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
            raise ConnectionError("the peer cancelled the call")
