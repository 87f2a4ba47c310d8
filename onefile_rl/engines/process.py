"""The process of a game and the connection to it, for any engine.

A game is launched, connects to a port on loopback, and is ended together with all processes that it has started. On
Linux, only the process that was launched is accepted on the port. Every read and every write has a deadline.

unity.py and godot.py implement the protocols of their engines on top of this module.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

from onefile_rl.engines import waits
from onefile_rl.engines.scenes import EngineError

GRACE = 5  # seconds that a game has to exit after the message that tells it to
NOTICE_SECONDS = 3  # after which the errors of a game that has not connected are shown
LOG_INTERVAL = 1  # seconds between two looks at the output of a game
LARGEST_LOG = 2**20  # bytes of output that are kept on the disk
FIRST_OUTPUT = 2**14  # bytes at the start of the output that are kept in memory
LAST_OUTPUT = 2**12  # bytes at its end that are searched for errors
LARGEST_MESSAGE = (
    2**29
)  # bytes; far above any scene's messages, so that a faulty peer cannot fill the memory
LONGEST_TEXT = 2_000  # characters of a message on the terminal
SLICE = 0.2  # seconds of a wait after which it is checked whether the run was asked to stop
SPIN_SECONDS = 1.5e-3 if hasattr(os, "sched_yield") else 0
DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)  # not available on Windows


def one_line(text):
    """Replace line breaks and control characters, which a player's names and output may contain, by spaces."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def shorten(text):
    """Remove the middle of a text that is too long for a message: a player's names may have any length."""
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}"


class PlayerError(EngineError):
    """An error of a game, with a message of one line."""

    def __init__(self, message):
        super().__init__(shorten(one_line(message)))


class PlayerGone(PlayerError):
    """The game crashed or hangs. Starting it again may help."""


class Stream:
    """One end of a connection, with a buffer of the received bytes that are not parsed yet.

    Reading and writing raise ConnectionError if the peer is gone, and TimeoutError if they are not finished at the
    deadline, even if the peer keeps sending.
    """

    spin_seconds = SPIN_SECONDS
    chunk_size = 1 << 20  # bytes to receive at once

    def __init__(self, sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.buffer = bytearray()
        self.gave_up = False  # whether a wait for the peer ended without success
        self.during_wait = None  # a function that is called several times a second in long waits

    def close(self):
        self.sock.close()

    def _fill(self, deadline):
        """Append the bytes that have arrived to the buffer; wait if there are none.

        A core that goes idle is slow to wake up, so poll for a short time before sleeping. `sched_yield` lets other
        processes run in between.
        """
        if (
            deadline is not None and time.monotonic() > deadline
        ):  # the socket's timeout does not see a constant flow
            raise TimeoutError("timed out")
        spin_until = time.perf_counter() + self.spin_seconds
        while time.perf_counter() < spin_until:
            try:
                chunk = self.sock.recv(self.chunk_size, DONTWAIT)
                break
            except BlockingIOError:
                os.sched_yield()
        else:
            chunk = self._before(deadline, self.sock.recv, self.chunk_size)
        if not chunk:
            raise ConnectionError("the peer closed the connection")
        self.buffer += chunk

    def poll(self):
        """Append the bytes that have arrived to the buffer, without waiting. Return whether it has any."""
        if DONTWAIT:
            with suppress(BlockingIOError):
                self.buffer += self.sock.recv(self.chunk_size, DONTWAIT)
        return bool(self.buffer)

    def has_message(self):
        """Return whether a whole message is in the buffer already: waiting for the socket would miss it."""
        return False

    def _write(self, data, deadline):
        """Send `data`. Almost always the socket's buffer has room for all of it and there is no wait."""
        try:
            sent = self.sock.send(data, DONTWAIT) if DONTWAIT else 0
        except BlockingIOError:
            sent = 0
        while sent < len(data):
            sent += self._before(deadline, self.sock.send, memoryview(data)[sent:])

    def _before(self, deadline, call, argument):
        """Call a method of the socket, which waits until `deadline`, or until a signal ends the run."""
        started = time.monotonic()
        try:
            while True:
                left = SLICE if deadline is None else deadline - time.monotonic()
                self.sock.settimeout(max(min(left, SLICE), 1e-3))
                try:
                    return call(argument)
                except TimeoutError:
                    if left < SLICE:
                        raise
                    waits.check_stop(started)
                    if self.during_wait:
                        self.during_wait()
        except (TimeoutError, KeyboardInterrupt):
            self.gave_up = True
            raise
        finally:
            self.sock.settimeout(None)


class Lines:
    """The lines that a process writes to `pipe`. Reading a line has a deadline, even in the middle of the line."""

    def __init__(self, pipe):
        self.pipe = pipe
        self.poll = select.poll()
        self.poll.register(pipe, select.POLLIN)
        self.buffer = bytearray()
        self.searched = 0  # bytes of the buffer without a line break

    def fill(self):
        """Append the bytes that have arrived to the buffer. Return False if the process has closed the pipe."""
        chunk = os.read(self.pipe.fileno(), 1 << 16)
        self.buffer += chunk
        return bool(chunk)

    def pop(self):
        """Return the next line in the buffer without its line break, or None if there is no whole line."""
        end = self.buffer.find(b"\n", self.searched)
        if end < 0:
            self.searched = len(self.buffer)
            return None
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        self.searched = 0
        return line

    def read(self, timeout):
        """Wait for a line. Return None if the process closed the pipe, and raise TimeoutError after `timeout` s."""
        started = time.monotonic()
        while (line := self.pop()) is None:
            if self.poll.poll(1000 * min(timeout, SLICE)):
                if not self.fill():
                    return None
            elif time.monotonic() > started + timeout:
                raise TimeoutError("timed out")
            else:
                waits.check_stop(started)
        return line


def write_line(pipe, line, timeout):
    """Write `line` and a line break to the pipe of a process. Raise TimeoutError if it does not read it in time."""
    started = time.monotonic()
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    data = memoryview(line + b"\n")
    while data:
        if poll.poll(1000 * min(timeout, SLICE)):
            sent = os.write(pipe.fileno(), data[: select.PIPE_BUF])  # this many do not block
            data = data[sent:]
        elif time.monotonic() > started + timeout:
            raise TimeoutError("timed out")
        else:
            waits.check_stop(started)


def find_build(path, error):
    """Return the executable of an exported game, or None if there is none.

    `path` is the executable, with or without its suffix, or the folder that contains it. `error` is the class of the
    exception for a file that is not executable.
    """
    if sys.platform == "darwin":
        patterns = [f"{path}/Contents/MacOS/*", f"{path}.app/Contents/MacOS/*"]
    elif sys.platform == "win32":
        patterns = [path, f"{path}.exe", f"{path}/*.exe"]
    else:
        patterns = [path, f"{path}.x86_64", f"{path}/*.x86_64"]
    for pattern in patterns:
        pattern = Path(os.path.abspath(pattern))
        candidates = (
            sorted(pattern.parent.glob(pattern.name)) if pattern.name.startswith("*") else [pattern]
        )
        for file in candidates:
            if file.is_file() and not file.name.startswith("UnityCrashHandler"):
                if not os.access(file, os.X_OK):
                    raise error(f"{file} is not executable: run chmod +x {file}")
                return str(file)
    return None


# Signals


@contextmanager
def handle_signals(handler, names, replaces):
    """Install `handler` for the named signals inside the `with` block.

    `replaces(old)` says whether the present handler of a signal is replaced. Other threads than the main thread cannot
    set handlers, and nothing happens there.
    """
    numbers = []
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {
        number: signal.getsignal(number) for number in numbers if replaces(signal.getsignal(number))
    }
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def exit_on_signals():
    """Raise SystemExit on SIGTERM and SIGHUP, so that cleanup code runs and closes the players.

    By default these signals end Python without any cleanup. A player that is not connected yet would not notice, and
    keep running.
    """

    def leave(number, _):
        raise SystemExit(128 + number)

    with handle_signals(leave, ("SIGTERM", "SIGHUP"), lambda old: old == signal.SIG_DFL):
        yield


@contextmanager
def defer_signals():
    """Deliver SIGINT, SIGTERM and SIGHUP only after the `with` block.

    An interrupt in the middle of a launch would leave a process that no variable refers to.
    """
    received = []

    def remember(number, _):
        received.append(number)

    try:
        with handle_signals(
            remember, ("SIGINT", "SIGTERM", "SIGHUP"), lambda old: old not in (None, signal.SIG_IGN)
        ):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


# Processes and sockets in /proc


def process_tree(leader):
    """Return the ids of the processes in the session of `leader` and of all their descendants (Linux only)."""
    if sys.platform != "linux":
        return set()
    parents = {}
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            _, parent, _, session = entry.read_text(errors="replace").rpartition(")")[2].split()[:4]
            pid = int(entry.parent.name)
            parents[pid] = int(parent)
            if leader in (pid, int(session)):
                found.add(pid)
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def kill_tree(process):
    """Kill a process that leads a session, and all processes that it has started.

    On Windows, only the process itself is killed.
    """
    for pid in process_tree(process.pid):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def find_peer(sock):
    """Return the user id and the inode of the local socket that `sock` is connected to, or None if it is closed.

    Reads /proc/net, so this is for Linux only.
    """

    def in_hex(address):  # as in /proc/net: the four bytes of the address as one number
        return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"

    here = in_hex(sock.getsockname())
    there = in_hex(sock.getpeername())
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # gRPC uses IPv6 sockets for IPv4 connections
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines():
            fields = line.split()
            inode = fields[9]
            if (
                fields[1].endswith(there) and fields[2].endswith(here) and inode != "0"
            ):  # 0: closed by its process
                return int(fields[7]), inode
    return None


class Log:
    """The output of a process, in a file without a name that does not grow without limit.

    A game that prints an error in every frame writes megabytes a second. The file is emptied when it is large. This
    needs a file to which writes are always appended, which Windows does not have.
    """

    def __init__(self):
        self.file = tempfile.TemporaryFile(buffering=0)
        if fcntl:
            fcntl.fcntl(
                self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) | os.O_APPEND
            )
        self.first = b""  # the first bytes, if the file was emptied
        self.last = b""  # the last bytes before the file was emptied
        self.position = 0  # up to which read_new() has read
        self.due_at = 0.0

    def _read(self, start, size):
        self.file.seek(start)
        return self.file.read(size)

    def is_due(self):
        """Return whether it is time for read_new()."""
        now = time.monotonic()
        if not fcntl or now < self.due_at:
            return False
        self.due_at = now + LOG_INTERVAL
        return True

    def read_new(self):
        """Return the lines that were written since the last call, at most 1 MiB of them. Empty a large file."""
        size = os.fstat(self.file.fileno()).st_size
        new = self._read(self.position, min(size - self.position, LARGEST_LOG))
        self.position = size
        if size > LARGEST_LOG:
            self.first = self.first or self._read(0, FIRST_OUTPUT)
            self.last = self._read(size - LAST_OUTPUT, LAST_OUTPUT)
            self.file.truncate(0)
            self.position = 0
        return to_lines(new)

    def first_lines(self):
        return to_lines(self.first or self._read(0, FIRST_OUTPUT))

    def last_lines(self):
        size = os.fstat(self.file.fileno()).st_size
        end = self._read(max(0, size - LAST_OUTPUT), LAST_OUTPUT)
        return to_lines((self.last + end)[-LAST_OUTPUT:])

    def close(self):
        self.file.close()


def to_lines(output):
    """Return the lines of a process's output that are not empty."""
    return [line for line in output.decode(errors="replace").split("\n") if line.strip()]


class Process:
    """One game and the connection to it: the base of unity.Player and godot.Game.

    Args:
        path: the user's path of the game, for messages; "editor" if the user starts it there
        command: a function from the port to the command line that starts the game; None for the editor
        worker: the number of the game
        base_port: the game connects to base_port + worker; None for a free port, or the editor's
        timeout: seconds to wait for the game
        announced: topics of the notices that were printed, a set that all games of an env share

    A subclass defines the attributes below, and `hint`, a possible reason why the game does not answer.
    """

    kind = "player"  # what messages call a game
    editor = None  # the name of the engine's editor
    editor_port = None  # where a game in the editor connects to
    fixed_agents = False  # whether the number of agents never changes
    connect_hint = ""  # a possible reason why the game does not connect
    Error = PlayerError  # the exception for wrong settings
    Gone = PlayerGone  # the exception for a game that crashed or hangs

    def __init__(self, path, command, worker, base_port, timeout, announced=None):
        self.name = f"{self.kind} {worker} ({path})"
        self.worker = worker
        self.timeout = timeout
        self.announced = set() if announced is None else announced
        self.wire = None
        self.process = None
        self.ended = False  # whether the process and all its descendants are ended

        # State that EngineVecEnv keeps for each player.
        self.slots = None  # the slots of its agents
        self.requesting = None  # the slots whose agents requested a decision in its last message
        self.failures = 0  # how often in a row it was lost
        self._start(path, command, base_port)

    def _start(self, path, command, base_port):
        """Listen for the connection of the game, and launch it."""
        # Listen before the launch: the game connects as soon as it runs.
        default_port = self.editor_port if command is None else 0  # 0: any free port
        port = default_port if base_port is None else base_port + self.worker
        if not 0 <= port < 2**16:
            raise self.Error(
                f"--base-port {base_port}: port {port} does not exist, choose a port below 65536"
            )
        try:
            self.listener = socket.create_server(("127.0.0.1", port))
        except OSError as reason:
            why = f"port {port} is in use ({reason.strerror})"
            raise self.Error(
                f"{why}: choose another --base-port, or omit it to use a free port"
            ) from None
        self.port = self.listener.getsockname()[1]
        if command is None:
            print(
                f"Waiting for Play in the {self.editor} editor (port {self.port}) ...", flush=True
            )
            return

        # The game gets its own session: Ctrl-C interrupts only this process, which then closes the game.
        command = command(self.port)
        try:
            self.log = Log()
            streams = dict(stdin=subprocess.DEVNULL, stdout=self.log.file, stderr=self.log.file)
            self.process = subprocess.Popen(command, **streams, start_new_session=True)
        except (OSError, ValueError) as reason:  # ValueError: an argument with a null byte
            self.listener.close()
            why = getattr(reason, "strerror", reason)
            raise self.Error(f"{command[0]} cannot be started: {why}") from None

    def announce(self, topic, text):
        """Print a notice, unless there was one on this topic."""
        if topic not in self.announced:
            self.announced.add(topic)
            print(shorten(one_line(text)), flush=True)

    def accept(self, make_wire):
        """Wait for the connection of the game and set `self.wire`. The port is closed afterwards.

        `make_wire(sock, seconds)` returns the wire for a connection; it raises an OSError if the peer does not speak
        the protocol.
        """
        started = time.monotonic()
        deadline = started + self.timeout
        rejected = 0
        self.listener.settimeout(0.1)
        while self.wire is None:
            seconds_left = deadline - time.monotonic()
            if seconds_left < 0 or (self.process and self.exit_code(0) is not None):
                others = (
                    f"; rejected connections of other processes: {rejected}" if rejected else ""
                )
                what = f"has not connected to port {self.port} within {self.timeout:g} s"
                raise self.error(f"{what}{others}{self.connect_hint}")
            try:
                sock = self.listener.accept()[0]
            except TimeoutError:
                waits.check_stop(started)
                self.check_log()
                if time.monotonic() > started + NOTICE_SECONDS:
                    self.explain_wait()
                continue
            except OSError as error:
                raise self.error(f"failed to connect: {error}") from None
            try:
                if self.is_peer(sock):
                    self.wire = make_wire(
                        sock, seconds_left if self.process else min(seconds_left, 5)
                    )
            except OSError as error:
                if self.process:
                    raise self.error(f"failed to connect: {error}") from None
            finally:
                if self.wire is None:
                    sock.close()
            rejected += 1
        self.listener.close()
        self.wire.during_wait = self.check_log

    def explain_wait(self):
        """Print a notice about a game that has not connected yet, if there is something to say."""

    def is_peer(self, sock):
        """Return whether the game, and not some other process, is at the other end of `sock`.

        An editor was not launched from here, so any process of the same user is accepted. (Root is accepted too: it
        needs no port to interfere.) Without /proc, as on other systems than Linux, every connection is accepted.
        """
        if not os.path.exists("/proc/net/tcp"):
            return True
        user, inode = find_peer(sock) or (None, None)
        if self.process is None:
            return user in (os.geteuid(), 0)
        if inode is None:
            return False
        for pid in process_tree(self.process.pid):
            try:
                owner = os.stat(f"/proc/{pid}").st_uid
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(FileNotFoundError):
                        if os.readlink(link) == f"socket:[{inode}]":
                            return True
            except PermissionError:  # a setuid program, for example: compare the users instead
                if user in (os.geteuid(), owner):
                    return True
            except OSError:  # the process has just ended
                continue
        return False

    def send_message(self, message):
        try:
            self.wire.send(message, self.timeout)
        except TimeoutError:
            raise self.error(f"has not read its input for {self.timeout:g} s") from None
        except OSError as error:
            raise self.disconnected(error) from None

    def no_answer(self):
        """Return the error for a game that does not answer in time."""
        return self.error(f"has not answered for {self.timeout:g} s: {self.hint}")

    def disconnected(self, error):
        """Return the error for a connection that broke with the OSError `error`."""
        return self.error(f"was disconnected: {error}")

    def error(self, what):
        """Return the error for a lost game. If its process has ended, the message is its last line of output."""
        code = self.exit_code(0.1) if self.process else None
        if code is not None:
            what = f"ended with exit code {code}: {self.last_words()}"
        return self.Gone(f"{self.name} {what}")

    def last_words(self):
        """Return the line of output that says most likely why the process has ended."""
        lines = self.log.last_lines()
        return lines[-1] if lines else "no output"

    def check_log(self):
        """Look at the output of the game from time to time, and keep it small."""
        if self.process and self.log.is_due():
            self.note_output(self.log.read_new())

    def note_output(self, lines):
        """Act on the lines that the game has written since the last call."""

    def has_ended(self):
        """Return whether the process was launched from here and has ended."""
        return bool(self.process) and self.exit_code(0) is not None

    def exit_code(self, seconds):
        """Wait up to `seconds` for the process to end. Return its exit code, or None if it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            self.end()  # now, because the system may soon give its process id to another process
        return self.process.returncode

    def end(self):
        """Kill the process and all processes that it has started. A build is often started by a script."""
        if self.ended:
            return
        kill_tree(self.process)
        with suppress(subprocess.TimeoutExpired):  # missing permission, or blocked in the kernel
            self.process.wait(GRACE)
        self.ended = True

    def close(self, goodbye):
        """Send `goodbye`, the engine's message that tells the game to exit, and end the process if it does not."""
        self.listener.close()
        try:
            if self.wire:
                with suppress(OSError):
                    self.wire.send(goodbye, 1)
                self.wire.close()
            if self.process and self.wire and not self.wire.gave_up:
                self.exit_code(GRACE)
        finally:  # also after an interrupt
            if self.process:
                self.end()
                self.log.close()


def close_all(players):
    """Close all players, even if closing one of them fails, and empty the list."""
    with ExitStack() as stack:
        stack.callback(players.clear)
        for player in players:
            stack.callback(player.close)
