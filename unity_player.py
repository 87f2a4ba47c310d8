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
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from contextlib import contextmanager, suppress
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder
from google.protobuf.message import DecodeError

from envs import SCENES, EngineError

EDITOR_PORT = 5004
GRACE = 5  # seconds that a player has to end after the goodbye


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
LARGEST_MESSAGE = 2**29  # no scene comes near; more is a peer that never stops
AWAKE = 1.5e-3 if hasattr(os, "sched_yield") else 0  # seconds
DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)  # not on Windows


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


class Wire:
    """One end of the connection between a player (the client: it calls) and Python (the server: it answers).

    `send` and `receive` alternate. Both raise ConnectionError when the peer is gone or says what makes no sense, and
    TimeoutError when they are not done in time, whatever the peer does meanwhile.
    """

    def __init__(self, sock, server, timeout=5):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.server = sock, server
        self.buffer = bytearray()
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

    def close(self):
        self.sock.close()

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

    def _fill(self, deadline):
        """Read what there is. For a short wait it pays to stay awake: a core that has gone idle is slow to come back.
        Others go first."""
        if deadline is not None and time.monotonic() > deadline:  # a peer that never pauses would not be seen below
            raise TimeoutError("timed out")
        until = time.perf_counter() + AWAKE
        while time.perf_counter() < until:
            try:
                chunk = self.sock.recv(1 << 20, DONTWAIT)
                break
            except BlockingIOError:
                os.sched_yield()
        else:
            with self._in_time(deadline):
                chunk = self.sock.recv(1 << 20)
        if not chunk:
            raise ConnectionError("the connection was closed")
        self.buffer += chunk

    def _write(self, data, deadline):
        """The peer has room for a message almost always. If not, it must make some in time."""
        try:
            sent = self.sock.send(data, DONTWAIT) if DONTWAIT else 0
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            with self._in_time(deadline):
                self.sock.sendall(memoryview(data)[sent:])

    @contextmanager
    def _in_time(self, deadline):
        self.sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        try:
            yield
        finally:
            self.sock.settimeout(None)


def one_line(text):
    """Names and last words are the player's: neither line breaks nor a terminal's commands come along."""
    return "".join(c if c.isprintable() else " " for c in str(text))


class UnityPlayerError(EngineError):
    """What went wrong with a player and what to do about it, in one line."""

    def __init__(self, what):
        super().__init__(one_line(what))


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


# Who ends a player must know of it


@contextmanager
def signals_go_to(handler, names, where):
    """For a while, and where the old handler is one of these. Only the main thread can set handlers, and runs them."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in names if main and hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers if where(signal.getsignal(number))}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def orderly_exit():
    """SIGTERM ends Python on the spot, and a player that is not connected yet would never see that: as SystemExit it
    passes by whoever closes the players."""

    def leave(number, _):
        raise SystemExit(128 + number)

    with signals_go_to(leave, ("SIGTERM", "SIGHUP"), lambda old: old == signal.SIG_DFL):
        yield


@contextmanager
def signals_later():
    """In the midst of a launch nobody knows the process yet who could end it: Ctrl-C comes after it."""
    came, note = [], lambda number, _: came.append(number)
    try:
        with signals_go_to(note, ("SIGINT", "SIGTERM", "SIGHUP"), lambda old: old not in (None, signal.SIG_IGN)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def family(leader):
    """The processes of the session that this one leads, and what they have started elsewhere, as Linux tells."""
    parents, found = {}, set()
    for entry in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with suppress(OSError):  # it has just ended
            _, parent, _, session = entry.read_text(errors="replace").rpartition(")")[2].split()[:4]
            pid = int(entry.parent.name)
            parents[pid] = int(parent)
            if leader in (pid, int(session)):
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def other_end(sock):
    """User and inode of the socket that this one is connected to, as Linux tells; None if it is not there any more."""

    def written(address):  # as in /proc/net: the four bytes as one number, in hex
        return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"

    here, there = written(sock.getsockname()), written(sock.getpeername())
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # gRPC speaks IPv4 through IPv6 sockets
        for row in map(str.split, Path(table).read_text().splitlines() if os.path.exists(table) else ()):
            if row[1].endswith(there) and row[2].endswith(here) and row[9] != "0":  # else nobody holds it any more
                return int(row[7]), row[9]
    return None


class Player:
    """One Unity process and the wire to it."""

    def __init__(self, path, worker, base_port, timeout, args):
        self.name, self.timeout = f"player {worker} ({path})", timeout
        self.wire = self.process = None
        self.ended = False  # the process, and all that it has started
        command = None if path == "editor" else find_player(path)
        port = (0 if command else EDITOR_PORT) if base_port is None else base_port + worker
        if not 0 <= port < 2**16:
            raise UnityPlayerError(f"--base-port {base_port}: there is no port {port}")
        try:
            self.listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            why = f"port {port} is taken ({error.strerror})"
            raise UnityPlayerError(f"{why}: without --base-port a free one is chosen") from None
        self.port = self.listener.getsockname()[1]
        if command is None:
            print(f"Waiting for Play in the Unity editor (port {self.port}) ...", flush=True)
            return
        command += [*args, "--mlagents-port", str(self.port)]
        try:  # a session of its own: Ctrl-C is for this process, which then says goodbye to the player
            self.log = tempfile.TemporaryFile()
            streams = dict(stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
            self.process = subprocess.Popen(command, **streams, start_new_session=True)
        except (OSError, ValueError) as error:  # ValueError: an argument that no program can be given
            self.listener.close()
            why = getattr(error, "strerror", error)
            raise UnityPlayerError(f"{command[0]} can't be started: {why}") from None

    def connect(self, seed):
        """Wait for the player's call and shake hands. The port is closed as soon as the player is through."""
        deadline, strangers = time.monotonic() + self.timeout, 0
        self.listener.settimeout(0.1)
        while self.wire is None:
            left = deadline - time.monotonic()
            if left < 0 or (self.process and self.exit_code(0) is not None):
                others = f"; connections of others that were closed: {strangers}" if strangers else ""
                raise self.error(f"has not connected to port {self.port} within {self.timeout:g} s{others}")
            try:
                sock = self.listener.accept()[0]
            except TimeoutError:
                continue
            except OSError as error:
                raise self.error(f"can't be talked to: {error}") from None
            try:
                if self.is_at(sock):
                    self.wire = Wire(sock, server=True, timeout=left if self.process else min(left, 5))
            except OSError as error:
                if self.process:
                    raise self.error(f"can't be talked to: {error}") from None
            finally:
                if self.wire is None:
                    sock.close()
            strangers += 1
        self.listener.close()
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

    def is_at(self, sock):
        """Whether the player is at the other end, and not somebody else who found the port. The editor was not started
        here: it must be the user's. (Root needs no port to meddle.) Only Linux tells who is there: on other systems,
        and without /proc, whoever comes first is taken for the player."""
        if not os.path.exists("/proc/net/tcp"):
            return True
        user, inode = other_end(sock) or (None, None)
        if self.process is None:
            return user in (os.geteuid(), 0)
        for pid in family(self.process.pid) if inode else ():
            try:
                owner = os.stat(f"/proc/{pid}").st_uid
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(FileNotFoundError):
                        if os.readlink(link) == f"socket:[{inode}]":
                            return True
            except PermissionError:  # a program with rights of its own: the user must do
                if user in (os.geteuid(), owner):
                    return True
            except OSError:  # it has just ended
                continue
        return False

    def send(self, reply):
        reply.header.status = 200
        try:
            self.wire.send(reply, self.timeout)
        except TimeoutError:
            raise self.error(f"has not read what it was sent for {self.timeout:g} s") from None
        except OSError as error:
            raise self.error(f"is gone: {error}") from None

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
        code = self.exit_code(0.1) if self.process else None
        if code is not None:
            self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
            words = [line for line in self.log.read().decode(errors="replace").split("\n") if line.strip()]
            what = f"ended with exit code {code}: {words[-1] if words else 'it said nothing'}"
        return UnityPlayerGone(f"{self.name} {what}")

    def exit_code(self, seconds):
        """None if it has not ended within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            self.end()  # at once: soon its number may be another's
        return self.process.returncode

    def end(self):
        """The process, and what it has started: a build is often started by a script. (On Windows, the process
        alone.)"""
        if self.ended:
            return
        for pid in family(self.process.pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # not ours to end, or the kernel waits for its disk
            self.process.wait(GRACE)
        self.ended = True

    def close(self):
        """Say goodbye, as a Unity player expects it, and make sure of it."""
        self.listener.close()
        try:
            if self.wire:
                goodbye = UnityMessageProto()
                goodbye.header.status = 400
                with suppress(OSError):
                    self.wire.send(goodbye, 1)
                self.wire.close()
            if self.process and self.wire:
                self.exit_code(GRACE)
        finally:  # whatever happens meanwhile: a second Ctrl-C, say
            if self.process:
                self.end()
                self.log.close()
