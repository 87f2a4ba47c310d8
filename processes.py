"""A game's process and the connection from it, whatever the engine: launched, listened for on loopback, known from
strangers, given deadlines, and ended with all that it has started.

unity_player.py and godot_player.py speak their protocols over it.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from envs import EngineError

GRACE = 5  # seconds that a game has to end after the goodbye
LARGEST_MESSAGE = 2**29  # bytes; no scene comes near; more is a peer that never stops
AWAKE = 1.5e-3 if hasattr(os, "sched_yield") else 0  # seconds
DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)  # not on Windows


def one_line(text):
    """Names and last words are the player's: neither line breaks nor a terminal's commands come along."""
    return "".join(c if c.isprintable() else " " for c in str(text))


class PlayerError(EngineError):
    """What went wrong with a game and what to do about it, in one line."""

    def __init__(self, what):
        super().__init__(one_line(what))


class PlayerGone(PlayerError):
    """It crashed or hangs: a new one may do better."""


class Stream:
    """One end of a connection, and what came from the other end and was not taken yet. Reading and writing raise
    ConnectionError when the peer is gone, and TimeoutError after the deadline, whatever the peer does meanwhile."""

    awake, piece = AWAKE, 1 << 20  # how long to stay awake, seconds; how much to take at once, bytes

    def __init__(self, sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.buffer = sock, bytearray()

    def close(self):
        self.sock.close()

    def _fill(self, deadline):
        """Read what there is. For a short wait it pays to stay awake: a core that has gone idle is slow to come back.
        Others go first."""
        if deadline is not None and time.monotonic() > deadline:  # a peer that never pauses would not be seen below
            raise TimeoutError("timed out")
        until = time.perf_counter() + self.awake
        while time.perf_counter() < until:
            try:
                chunk = self.sock.recv(self.piece, DONTWAIT)
                break
            except BlockingIOError:
                os.sched_yield()
        else:
            chunk = self._in_time(deadline, self.sock.recv, self.piece)
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
            self._in_time(deadline, self.sock.sendall, memoryview(data)[sent:])

    def _in_time(self, deadline, call, what):
        self.sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        try:
            return call(what)
        finally:
            self.sock.settimeout(None)


def find_build(path, error):
    """A program that an engine has built, by its name with or without the ending, or by its folder; None if there is
    none."""
    builds = {
        "darwin": (f"{path}/Contents/MacOS/*", f"{path}.app/Contents/MacOS/*"),
        "win32": (path, f"{path}.exe", f"{path}/*.exe"),
    }
    for pattern in map(
        Path, map(os.path.abspath, builds.get(sys.platform, (path, f"{path}.x86_64", f"{path}/*.x86_64")))
    ):
        for found in sorted(pattern.parent.glob(pattern.name)) if pattern.name.startswith("*") else [pattern]:
            if found.is_file() and not found.name.startswith("UnityCrashHandler"):
                if not os.access(found, os.X_OK):
                    raise error(f"{found} is not executable: chmod +x {found}")
                return str(found)
    return None


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


class Process:
    """One game and the connection from it. command: what starts it, given the port; None if the user does, as from an
    editor. gone: the error that says that it crashed or hangs. A subclass has `hint`: what a silent game may lack."""

    late = ""  # what one that does not connect may lack
    rows, failures = None, 0  # players.py's: its agents' slots, and how often in a row it was lost

    def __init__(self, name, command, port, base_port, timeout, error, gone):
        self.name, self.timeout, self.gone = name, timeout, gone
        self.wire = self.process = None
        self.ended = False  # the process, and all that it has started
        if not 0 <= port < 2**16:
            raise error(f"--base-port {base_port}: there is no port {port}")
        try:
            self.listener = socket.create_server(("127.0.0.1", port))
        except OSError as reason:
            why = f"port {port} is taken ({reason.strerror})"
            raise error(f"{why}: without --base-port a free one is chosen") from None
        self.port = self.listener.getsockname()[1]
        if command is None:
            return
        command = command(self.port)
        try:  # a session of its own: Ctrl-C is for this process, which then says goodbye to the game
            self.log = tempfile.TemporaryFile()
            streams = dict(stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
            self.process = subprocess.Popen(command, **streams, start_new_session=True)
        except (OSError, ValueError) as reason:  # ValueError: an argument that no program can be given
            self.listener.close()
            why = getattr(reason, "strerror", reason)
            raise error(f"{command[0]} can't be started: {why}") from None

    def accept(self, talk):
        """Wait for the game's connection: talk(sock, seconds) makes a wire of it. The port is closed as soon as the
        game is through."""
        deadline, strangers = time.monotonic() + self.timeout, 0
        self.listener.settimeout(0.1)
        while self.wire is None:
            left = deadline - time.monotonic()
            if left < 0 or (self.process and self.exit_code(0) is not None):
                others = f"; connections of others that were closed: {strangers}" if strangers else ""
                raise self.error(f"has not connected to port {self.port} within {self.timeout:g} s{others}{self.late}")
            try:
                sock = self.listener.accept()[0]
            except TimeoutError:
                continue
            except OSError as error:
                raise self.error(f"can't be talked to: {error}") from None
            try:
                if self.is_at(sock):
                    self.wire = talk(sock, left if self.process else min(left, 5))
            except OSError as error:
                if self.process:
                    raise self.error(f"can't be talked to: {error}") from None
            finally:
                if self.wire is None:
                    sock.close()
            strangers += 1
        self.listener.close()

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

    def send(self, message):
        try:
            self.wire.send(message, self.timeout)
        except TimeoutError:
            raise self.error(f"has not read what it was sent for {self.timeout:g} s") from None
        except OSError as error:
            raise self.error(f"is gone: {error}") from None

    def receive(self):
        try:
            return self.wire.receive(self.timeout)
        except TimeoutError:
            raise self.silent() from None
        except OSError as error:
            raise self.error(f"is gone: {error}") from None

    def silent(self):
        return self.error(f"has not answered for {self.timeout:g} s: {self.hint}")

    def error(self, what):
        """If the process has ended, that is the reason, and its last words say more."""
        code = self.exit_code(0.1) if self.process else None
        if code is not None:
            words = self.last_words()
            what = f"ended with exit code {code}: {words[-1] if words else 'it said nothing'}"
        return self.gone(f"{self.name} {what}")

    def last_words(self):
        """The lines that the process has written last."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
        return [line for line in self.log.read().decode(errors="replace").split("\n") if line.strip()]

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

    def close(self, goodbye):
        """Say goodbye, the message that the engine expects, and make sure of it."""
        self.listener.close()
        try:
            if self.wire:
                with suppress(OSError):
                    self.wire.send(goodbye, 1)
                self.wire.close()
            if self.process and self.wire:
                self.exit_code(GRACE)
        finally:  # whatever happens meanwhile: a second Ctrl-C, say
            if self.process:
                self.end()
                self.log.close()


def close_all(players):
    with ExitStack() as stack:  # which goes on when one fails
        stack.callback(players.clear)
        for player in players:
            stack.callback(player.close)
