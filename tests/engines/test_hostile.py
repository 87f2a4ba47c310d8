"""Test UnityVecEnv with faulty players, other processes on its port, and scenes that are set up wrongly.

Each ends in time, with an error of one line, and leaves no process.
"""

import io
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing, suppress

import numpy as np
import pytest
from conftest import ROOT, ScriptedPlayer, UnityMessageProto, agent, free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from onefile_rl.engines import process, unity_wire
from onefile_rl.engines.unity import Player, UnityLayout, UnityPlayerError, UnityPlayerGone
from onefile_rl.engines.unity_wire import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    REQUEST,
    SETTINGS,
    WELCOME,
    WINDOW_UPDATE,
    frame,
)
from unity_vec_env import UnityVecEnv

NAME = "Scripted?team=0"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def request(*ids, size=3):
    return {NAME: [agent(i, [np.full(size, i)]) for i in ids]}


def hello():
    message = UnityMessageProto()
    message.unity_output.rl_initialization_output.communication_version = "1.5.0"
    message.unity_output.rl_initialization_output.capabilities.hybridActions = True
    return message


def call(number, message):
    """Return the bytes of a player's call."""
    message.header.status = 200
    data = message.SerializeToString()
    data = struct.pack("!BI", 0, len(data)) + data
    return frame(HEADERS, END_HEADERS, 2 * number + 1, REQUEST) + frame(
        DATA, END_STREAM, 2 * number + 1, data
    )


@pytest.fixture(autouse=True, scope="module")
def several_calls_at_a_time():
    """Many players of these tests send everything at once, and do not wait for answers."""
    unity_wire.Wire.one_call_at_a_time = False
    yield
    unity_wire.Wire.one_call_at_a_time = True


def conversation(*messages):
    calls = [
        call(number, message)
        for number, message in enumerate((hello(), UnityMessageProto(), *messages))
    ]
    return PREFACE + WELCOME + b"".join(calls)


def rl_message(behaviors, specs=None):
    message = UnityMessageProto()
    for name, agents in behaviors.items():
        if name in (specs or {}):
            brain = message.unity_output.rl_initialization_output.brain_parameters.add(
                brain_name=name
            )
            brain.action_spec.num_continuous_actions, branches = specs[name]
            brain.action_spec.num_discrete_actions = len(branches)
            brain.action_spec.discrete_branch_sizes.extend(branches)
        for info in agents:
            message.unity_output.rl_output.agentInfos[name].value.add(**info)
    return message


def executable(folder, text, name="Game.x86_64"):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ends(pids):
    assert pids
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a process is left"


# Players that are lost during the handshake

PLAYER = f"""#!{sys.executable}
import os, socket, sys
with open({{pids!r}}, "a") as file:
    print(os.getpid(), file=file)
number, port = len(open({{pids!r}}).readlines()), int(sys.argv[-1])
if number == {{bad}}:
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall({{says!r}})
    if {{waits}}:
        s.recv(1)
    os._exit(7)
python, player = {sys.executable!r}, {str(ROOT / "envs" / "unity_scenes" / "player.py")!r}
os.execv(python, [python, player, "--scene", "Mixed", *sys.argv[1:]])
"""
LAST_BYTES = {
    "nothing": b"",
    "half a preface": PREFACE[:7],
    "a preface": PREFACE + WELCOME,
    "a call without a message": PREFACE + WELCOME + frame(HEADERS, END_HEADERS, 1, REQUEST),
    "half a message": conversation()[:-80],
    "hello": PREFACE + WELCOME + call(0, hello()),
    "the handshake": conversation(),
    "no message": PREFACE + WELCOME + frame(HEADERS, END_HEADERS | END_STREAM, 1, REQUEST),
    "settings of another size": PREFACE + frame(SETTINGS, 0, 0, b"odd"),
    "a call of no stream": PREFACE
    + frame(HEADERS, END_HEADERS, 0)
    + frame(DATA, END_STREAM, 0, bytes(5)),
    "padding and nothing else": PREFACE + frame(HEADERS, END_HEADERS, 1) + frame(DATA, 8, 1),
}


@linux
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("sent", LAST_BYTES)
def test_a_player_lost_in_its_handshake_is_gone(sent, waits, tmp_path):
    pids = tmp_path / "pids"
    path = executable(
        tmp_path, PLAYER.format(pids=str(pids), bad=1, says=LAST_BYTES[sent], waits=waits)
    )
    with pytest.raises(UnityPlayerGone, match="player 0 .*"):
        UnityVecEnv(path, timeout=0.7)
    assert_ends([int(pid) for pid in pids.read_text().split()])


@linux
@pytest.mark.parametrize(
    "sent", ["nothing", "a preface", "a call without a message", "hello", "the handshake"]
)
def test_a_player_lost_in_its_handshake_is_restarted(sent, tmp_path):
    pids = tmp_path / "pids"
    path = executable(
        tmp_path, PLAYER.format(pids=str(pids), bad=2, says=LAST_BYTES[sent], waits=False)
    )
    with closing(UnityVecEnv(path, max_agents=16, timeout=60, max_restarts=2)) as envs:
        envs.reset()
        envs.players[0].process.kill()
        *_, infos = envs.step(envs.action_space.sample())
        assert infos["restarted"].all() and envs.restarts == 2
        envs.step(envs.action_space.sample())
    assert_ends([int(pid) for pid in pids.read_text().split()])


def test_all_players_are_closed_if_closing_one_fails():
    closed = []

    class Bad:
        def close(self):
            closed.append(self)
            raise KeyboardInterrupt

    players = [Bad(), Bad(), Bad()]
    with pytest.raises(KeyboardInterrupt):
        process.close_all(players)
    assert len(closed) == 3 and not players


# Processes that players start

WRAPPERS = {
    "a script that waits for the player": '{player} "$@" &\necho $! >> {pids}\nwait\n',
    "a script that leaves something running": 'sleep 600 &\necho $! >> {pids}\nexec {player} "$@"\n',
    "a script that ignores SIGTERM": "trap '' TERM\n{player} \"$@\" &\necho $! >> {pids}\nsleep 600\n",
    "a script that crashes": "sleep 600 &\necho $! >> {pids}\nexit 3\n",
    "a session of its own": 'setsid sleep 600 &\necho $! >> {pids}\n{player} "$@"\nsleep 600\n',
}


@linux
@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize("hangs", [False, True])
def test_processes_of_a_wrapper_script_end_with_it(how, hangs, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.5)
    pids = tmp_path / "pids"
    player = f"{sys.executable} {ROOT / 'envs' / 'unity_scenes' / 'player.py'} --scene Mixed"
    path = executable(
        tmp_path, f"#!/bin/sh\necho $$ >> {pids}\n" + WRAPPERS[how].format(player=player, pids=pids)
    )
    with suppress(UnityPlayerGone), closing(UnityVecEnv(path, max_agents=16)) as envs:
        envs.reset()
        if hangs:
            os.kill(int(pids.read_text().split()[-1]), signal.SIGSTOP)
    assert_ends([int(pid) for pid in pids.read_text().split()])


@linux
def test_without_proc_the_process_group_of_a_wrapper_ends(tmp_path, monkeypatch):
    """As on systems that do not list the processes that a player has started."""
    pids = tmp_path / "pids"
    path = executable(tmp_path, f"#!/bin/sh\nsleep 600 &\necho $$ $! >> {pids}\nsleep 600\n")
    monkeypatch.setattr(process, "process_tree", lambda leader: set())
    with pytest.raises(UnityPlayerGone):
        UnityVecEnv(path, timeout=0.5)
    assert_ends([int(pid) for pid in pids.read_text().split()])


INTERRUPTED = """
import os, signal, subprocess, sys, threading
from onefile_rl.engines import unity
from unity_vec_env import UnityVecEnv
begun = subprocess.Popen.__init__
launched = []
def popen(self, *args, **kwargs):
    begun(self, *args, **kwargs)
    print(self.pid, flush=True)
    if not self.args[0].endswith("Game.x86_64"):
        return
    launched.append(self.pid)
    if {midst}:
        os.kill(os.getpid(), signal.{name})
    elif len(launched) == 2:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.{name})).start()
subprocess.Popen.__init__ = popen
if {exits}:
    signal.signal(signal.{name}, lambda *_: sys.exit(3))
UnityVecEnv({path!r}, num_players=2)
"""


@linux
@pytest.mark.parametrize("midst", [False, True])
@pytest.mark.parametrize(
    ("name", "exits"), [("SIGTERM", False), ("SIGTERM", True), ("SIGINT", False), ("SIGHUP", False)]
)
def test_a_signal_during_the_launch_leaves_no_process(name, exits, midst, tmp_path):
    path = executable(tmp_path, "#!/bin/sh\nexec sleep 600\n")
    code = INTERRUPTED.format(name=name, exits=exits, midst=midst, path=path)
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert out.returncode != 0
    assert_ends([int(pid) for pid in out.stdout.split()])


def test_a_launch_restores_the_signal_handlers(scripted):
    handlers = [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    scripted([request(0)])
    assert handlers == [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]


def test_ctrl_c_during_close_still_ends_the_players():
    envs = UnityVecEnv("Mixed", num_players=2, max_agents=16)
    pids = [player.process.pid for player in envs.players]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process, "GRACE", 1)
        envs.close()
    assert_ends(pids)


# Other processes on the port


@linux
def test_another_process_that_connects_first_is_rejected(tmp_path):
    stranger = ScriptedPlayer([request(0)] * 100)
    player = f"{sys.executable} {ROOT / 'envs' / 'unity_scenes' / 'player.py'} --scene Mixed"
    path = executable(tmp_path, f'#!/bin/sh\nsleep 0.5\n{player} "$@"\n')
    with closing(UnityVecEnv(path, base_port=stranger.port, max_agents=16, timeout=60)) as envs:
        assert envs.behavior == "Mixed?team=0"
        envs.reset()
        envs.step(envs.action_space.sample())
    stranger.thread.join(5)
    assert not stranger.replies and not hasattr(stranger, "greeting")


@linux
def test_connections_of_other_processes_do_not_extend_the_timeout(tmp_path):
    path, port, done = (
        executable(tmp_path, "#!/bin/sh\nexec sleep 600\n"),
        free_port(),
        threading.Event(),
    )

    def knock():
        while not done.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(conversation())
                sock.recv(1)

    thread = threading.Thread(target=knock)
    thread.start()
    start = time.monotonic()
    try:
        with pytest.raises(
            UnityPlayerGone, match="within 0.5 s; rejected connections of other processes: [0-9]+"
        ):
            UnityVecEnv(path, base_port=port, timeout=0.5)
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - start < 30


@linux
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user"
)
def test_another_user_is_not_accepted_as_the_editor():
    port, players = free_port(), []
    code = f"""
import os, socket, time
os.setuid(65534)
s = socket.socket()
while s.connect_ex(("127.0.0.1", {port})):
    time.sleep(0.005)
try:
    s.sendall(bytes.fromhex("{conversation(*[rl_message(request(0, 1), {NAME: (2, ())})] * 2).hex()}"))
    print(len(s.recv(1)), flush=True)
except ConnectionResetError:
    print(0)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    def editor():
        if other.stdout.readline() == "0\n":  # closed without an answer
            players.append(ScriptedPlayer([request(0)] * 2, port=port))

    thread = threading.Thread(target=editor)
    thread.start()
    with closing(UnityVecEnv("editor", base_port=port, timeout=60)) as envs:
        assert envs.num_envs == 1 and players
    thread.join()
    other.wait()


def test_a_peer_without_grpc_is_not_accepted_as_the_editor():
    port = free_port()

    def browse():
        sock = knock(port)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert not sock.recv(1)
        ScriptedPlayer([request(0)], port=port)

    thread = threading.Thread(target=browse)
    thread.start()
    with closing(UnityVecEnv("editor", base_port=port, timeout=60)) as envs:
        assert envs.num_envs == 1
    thread.join()


def knock(port):
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.005)


@linux
def test_grpc_players_with_ipv6_sockets_are_recognized(tmp_path):
    text = f"""#!{sys.executable}
import sys
import grpc
same = lambda data: data
with grpc.insecure_channel("localhost:" + sys.argv[-1]) as channel:
    call = channel.unary_unary("/communicator_objects.UnityToExternalProto/Exchange", same, same)
    call({call(0, hello())[9 + len(REQUEST) + 9 + 5 :]!r}, wait_for_ready=True, timeout=60)
    call({call(0, UnityMessageProto())[9 + len(REQUEST) + 9 + 5 :]!r}, wait_for_ready=True, timeout=60)
"""
    player = Player(executable(tmp_path, text), 0, None, 20, [])
    try:
        player.handshake()
    finally:
        player.close()


@linux
def test_a_player_with_unreadable_file_descriptors_is_recognized_by_its_user(monkeypatch):
    def forbidden(path):
        raise PermissionError

    monkeypatch.setattr(process.Path, "iterdir", forbidden)
    player = Player("Mixed", 0, None, 20, [])
    try:
        player.handshake()
    finally:
        player.close()


# Deadlines


def endless_pings(sock):
    while True:
        sock.sendall(frame(PING, ACK, 0, bytes(8)) * 1000)


def endless_ping_requests(sock):  # without reading the answers
    while True:
        sock.sendall(frame(PING, 0, 0, bytes(8)) * 1000)


def endless_message(sock):
    sock.sendall(frame(HEADERS, END_HEADERS, 5, REQUEST))
    while True:
        sock.sendall(frame(DATA, 0, 5, b"x") * 1000)


def one_byte_at_a_time(sock):
    for byte in call(2, UnityMessageProto()) * 100:
        sock.sendall(bytes([byte]))
        time.sleep(0.05)


def silence(sock):
    pass


def connected(misbehave, timeout=0.5, settings_frames=b""):
    """Return a player after its handshake, its socket, and the thread in which it then misbehaves.

    `settings_frames` are sent in the middle of the handshake.
    """
    port, socks = free_port(), []

    def play():
        sock = knock(port)
        socks.append(sock)
        with suppress(OSError):
            sock.sendall(
                PREFACE
                + WELCOME
                + call(0, hello())
                + settings_frames
                + call(1, UnityMessageProto())
            )
            misbehave(sock)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    player = Player("editor", 0, port, 60, [])
    player.handshake()
    player.timeout = timeout
    return player, socks[0], thread


@pytest.mark.parametrize(
    "misbehave",
    [endless_pings, endless_ping_requests, endless_message, one_byte_at_a_time, silence],
)
def test_a_message_that_does_not_end_times_out(misbehave):
    player, sock, thread = connected(misbehave)
    player.send_message(UnityMessageProto())
    start = time.monotonic()
    with pytest.raises(
        UnityPlayerGone, match="player 0 .*(has not answered for 0.5 s|was disconnected)"
    ):
        player.receive()
    assert time.monotonic() - start < 30 and len(player.wire.buffer) < 2**25
    player.close()
    assert time.monotonic() - start < 30
    sock.close()
    thread.join(5)


def reads(sock):
    while sock.recv(1 << 16):
        pass


def gives_little_credit(sock):
    while True:
        sock.sendall(
            frame(WINDOW_UPDATE, 0, 3, struct.pack("!I", 1)) + frame(PING, ACK, 0, bytes(8))
        )
        time.sleep(0.02)


NO_CREDIT = frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 0))
FRAMES_OF = {size: frame(SETTINGS, 0, 0, struct.pack("!HI", 5, size)) for size in (0, 2**32 - 1)}


@pytest.mark.parametrize(
    ("settings_frames", "misbehave"),
    [
        (b"", silence),
        (NO_CREDIT, reads),
        (NO_CREDIT, gives_little_credit),
        (FRAMES_OF[0], reads),
        (FRAMES_OF[2**32 - 1], silence),
    ],
    ids=["never reads", "no credit", "little credit", "no frames", "huge frames"],
)
def test_sending_to_a_player_that_does_not_read_times_out(settings_frames, misbehave):
    player, sock, thread = connected(misbehave, settings_frames=settings_frames)
    reply = UnityMessageProto()
    reply.unity_input.rl_input.side_channel = bytes(1 << 26)
    start = time.monotonic()
    with pytest.raises(UnityPlayerGone, match="has not read its input for 0.5 s"):
        player.send_message(reply)
    player.close()
    assert time.monotonic() - start < 30
    sock.close()
    thread.join(5)


def test_close_does_not_wait_for_a_player_that_does_not_read():
    player, sock, thread = connected(silence)
    with suppress(BlockingIOError):
        while True:
            player.wire.sock.send(bytes(1 << 20), socket.MSG_DONTWAIT)
    start = time.monotonic()
    player.close()
    assert time.monotonic() - start < 30
    sock.close()
    thread.join(5)


@pytest.mark.parametrize("size", [0, 2, 50_000])
def test_memory_is_bounded(size, monkeypatch):
    monkeypatch.setattr(unity_wire, "LARGEST_MESSAGE", 2**21, raising=False)

    def endless(sock):
        sock.sendall(frame(HEADERS, END_HEADERS, 5, REQUEST))
        while True:
            sock.sendall(frame(DATA, 0, 5, bytes(size)) * 100)

    player, sock, thread = connected(endless, timeout=60)
    player.send_message(UnityMessageProto())
    with pytest.raises(UnityPlayerGone, match="its message is larger than 2 MiB"):
        player.receive()
    assert sum(map(len, player.wire.body)) <= 2**21 and len(player.wire.body) <= 2**21 / 64
    player.close()
    sock.close()
    thread.join(5)


def test_a_player_without_requests_times_out(patient):
    port = free_port()

    def idle():
        sock = knock(port)
        with suppress(OSError):
            sock.sendall(conversation())
            for number in range(2, 300):
                time.sleep(0.05)
                sock.sendall(call(number, UnityMessageProto()))

    thread = threading.Thread(target=idle, daemon=True)
    thread.start()
    start = time.monotonic()
    with pytest.raises(UnityPlayerError, match="no agents at all"):
        UnityVecEnv("editor", base_port=port, timeout=0.5)
    assert time.monotonic() - start < 30
    thread.join(5)


# Scenes that are set up wrongly


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def camera(name, value, data=None, shape=(4, 6, 3)):
    picture = png(np.full((4, 6, 3), value, np.uint8)) if data is None else data
    sensor = dict(name=name, shape=shape, compression_type=1, compressed_data=picture)
    return {**sensor, "dimension_properties": [2, 2, 1]}


def with_sensors(*sensors, number=0, vectors=()):
    info = agent(number, vectors)
    info["observations"] += sensors
    return info


def step(envs):
    return envs.step(envs.action_space.sample())


def refused(match, scripted, script, **kwargs):
    """Assert an error of one line, in the constructor or in the first step."""
    with pytest.raises(UnityPlayerError, match=match) as caught:
        envs, _ = scripted(script, **kwargs)
        envs.reset()
        step(envs)
    assert "\n" not in str(caught.value)


def test_no_observations(scripted):
    refused(
        "Scripted.*observe nothing: set Space Size in Behavior Parameters",
        scripted,
        [{NAME: [agent(0, [])]}],
    )
    refused("Scripted.*observe nothing", scripted, [{NAME: [agent(0, [[]])]}])


def test_no_actions(scripted):
    refused(
        "no actions: set Continuous Actions or Discrete Branches",
        scripted,
        [request(0)],
        specs={NAME: (0, ())},
    )


@pytest.mark.parametrize(
    "spec", [(0, (3, 0)), (-1, ()), (0, (-2,)), (2**31 - 1, ()), (0, (2**31 - 1,) * 3)]
)
def test_impossible_numbers_of_actions(scripted, spec):
    refused("Scripted.*Behavior Parameters", scripted, [request(0)], specs={NAME: spec})
    other = "Other?team=0"
    script = [{**request(0), other: [agent(1, [[0.0]])]}]
    refused(
        "Other.*Behavior Parameters",
        scripted,
        script,
        behavior="Scripted",
        specs={NAME: (2, ()), other: spec},
    )


def test_cameras_with_the_same_name(scripted, capsys):
    sensors = [
        camera("Camera", 1),
        camera("Camera", 2),
        camera("Camera_2", 3),
        camera("vector", 4),
        camera("", 5),
    ]
    envs, _ = scripted([{NAME: [with_sensors(*sensors, vectors=[[7.0], [8.0]])]}])
    obs, _ = envs.reset()
    assert envs.observation_space.contains(obs)
    seen = {name: int(image.flat[0]) for name, image in obs.items() if name != "vector"}
    assert sorted(seen.values()) == [1, 2, 3, 4, 5] and seen["Camera"] == 1
    assert obs["vector"].tolist() == [[7, 8]] and envs.sensors == [1, 1, *seen]
    assert "Camera_2 here: the name Camera is taken" in capsys.readouterr().out


def test_a_camera_named_vector_alone(scripted):
    envs, _ = scripted([{NAME: [with_sensors(camera("vector", 4))]}])
    assert "vector" not in envs.reset()[0]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        png(np.zeros((40, 60, 3), np.uint8))[:-30],
        png(np.zeros((4, 6, 3), np.uint8))[:20],
        b"JFIF",
        png(np.zeros((4, 6, 3), np.uint8)).replace(b"IDAT", b"IDAX"),
        png(np.zeros((4, 7, 3), np.uint8)),
    ],
    ids=["truncated", "a head alone", "no PNG", "no pixels", "another size"],
)
def test_a_broken_image(scripted, data, late):
    good, bad = (
        {NAME: [with_sensors(camera("Eye", 1))]},
        {NAME: [with_sensors(camera("Eye", 1, data))]},
    )
    refused(
        "sensor Eye: (its PNG is broken|an image of shape)",
        scripted,
        [good, bad] if late else [bad],
    )


def test_an_image_of_another_shape_than_it_says(scripted):
    for shape in ((4, 6, 2**31 - 1), (-4, 6, 3), (0, 0, 0), (2**30, 2**30, 3)):
        refused(
            "sensor Eye: an image",
            scripted,
            [{NAME: [with_sensors(camera("Eye", 1, shape=shape))]}],
        )
        raw = dict(name="Eye", shape=shape, float_data=dict(data=[]))
        refused("sensor Eye: not an image", scripted, [{NAME: [with_sensors(raw)]}])


def test_a_vector_of_another_shape_than_it_says(scripted):
    for shape in ((7,), (2**31 - 1, 2**31 - 1), (-3,), ()):
        raw = dict(name="Ray", shape=shape, float_data=dict(data=[1, 2, 3]))
        refused("sensor Ray: its shape is", scripted, [{NAME: [with_sensors(raw)]}])


def test_agents_with_other_sensors(scripted):
    two, one, three = (agent(i, [[0.0]] * count) for i, count in ((0, 2), (1, 1), (0, 3)))
    refused(
        "agent 1 has 1 sensors, not 2 .*the same sensors",
        scripted,
        [{NAME: [two]}, {NAME: [one]}],
        max_agents=2,
    )
    refused(
        "agent 0 has 3 sensors, not 2",
        scripted,
        [{NAME: [two, {**two, "id": 1}]}, {NAME: [{**three}, one]}],
    )
    blind = [{NAME: [with_sensors(camera("Eye", 1), vectors=[[0.0]])]}, {NAME: [agent(0, [[0.0]])]}]
    refused("agent 0 has 1 sensors, not 2", scripted, blind)


def side_channel(content, channel="12345678-0000-0000-0000-000000000000", size=None):
    size = len(content) if size is None else size
    return uuid.UUID(channel).bytes_le + struct.pack("<i", size) + content


def test_messages_on_an_unknown_side_channel_are_ignored_with_a_notice(scripted, capfd):
    class Chatty(ScriptedPlayer):
        side_channel = property(lambda self: [side_channel(b"hi")], lambda self, value: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conftest.ScriptedPlayer", Chatty)
        envs, _ = scripted([request(0)] * 5)
    envs.reset()
    for _ in range(4):
        step(envs)
    out, err = capfd.readouterr()
    assert (out + err).count("side channel") == 1 and "12345678" in out


STATS = "a1d8f7b7-cec8-50f9-b78b-d3e165a78520"


@pytest.mark.parametrize(
    "data",
    [
        b"short",
        side_channel(b"hi", size=100),
        side_channel(b"hi", size=-1),
        side_channel(struct.pack("<i", 4) + b"\xff\xff\xff\xff" + struct.pack("<fi", 1, 0), STATS),
        side_channel(struct.pack("<i", 1) + b"a" + struct.pack("<fi", 1, 77), STATS),
        side_channel(struct.pack("<i", 1) + b"a" + b"\0", STATS),
    ],
    ids=[
        "no id",
        "cut off",
        "a negative length",
        "no text",
        "no such aggregation",
        "half a number",
    ],
)
def test_a_side_channel_that_cannot_be_read(scripted, data):
    refused("side channel's message cannot be read", scripted, [request(0)] * 3, side_channel=data)


def test_a_behavior_that_was_never_described(scripted):
    specs = {NAME: (2, ())}
    for script in (
        [{"Other?team=0": [agent(1, [[0.0]])]}] * 300,
        [{**request(0), "Other?team=0": [agent(1, [[0.0]])]}] * 3,
    ):
        port = free_port()
        messages = [rl_message(behaviors, specs) for behaviors in script]
        with pytest.raises(
            UnityPlayerError,
            match="agents of Other.team=0 appeared without a description of their actions",
        ):
            play(conversation(*messages), port)


def test_actions_that_change(scripted):
    messages = [rl_message(request(0), {NAME: (2, ())}), rl_message(request(0), {NAME: (3, ())})]
    with pytest.raises(UnityPlayerError, match="has other actions than at first"):
        play(conversation(*messages), free_port())


GAME = f"""#!{sys.executable}
import socket, sys
try:
    says, _ = sys.argv[1], open(__file__ + ".begun", "x")
except FileExistsError:
    says = sys.argv[2]
s = socket.create_connection(("127.0.0.1", int(sys.argv[-1])))
s.sendall(bytes.fromhex(says))
while s.recv(1 << 16):
    pass
"""


@pytest.mark.parametrize(
    ("behaviors", "spec", "match"),
    [
        (
            request(0),
            (3, ()),
            r"has [23] continuous actions, branches \[\], not [23] and \[\] of the first player",
        ),
        (request(0), (0, (3,)), "continuous actions, .* of the first player: start the same build"),
        (request(0, size=4), (2, ()), "player 1 .*another number of values .* the same sensors"),
        ({NAME: [with_sensors(camera("Eye", 1))]}, (2, ()), "player 1 .*|sensor Eye: not an image"),
        ({NAME: [agent(0, [[0.0], [0.0]])]}, (2, ()), "player 1 .* has [12] sensors, not [12]"),
    ],
    ids=["more actions", "discrete actions", "a longer vector", "an image", "one more sensor"],
)
def test_players_of_different_games(behaviors, spec, match, tmp_path):
    """The order in which the two connect does not matter."""
    first, second = rl_message(request(0), {NAME: (2, ())}), rl_message(behaviors, {NAME: spec})
    says = [conversation(message, message).hex() for message in (first, second)]
    with pytest.raises(UnityPlayerError, match=match):
        UnityVecEnv(
            executable(tmp_path, GAME),
            timeout=60,
            num_players=2,
            no_graphics=False,
            player_args=says,
        )


def test_an_agent_twice_in_one_message(scripted):
    refused("agent 1 is in one message twice", scripted, [request(0, 1, 1)])
    refused("agent 1 is in one message twice", scripted, [request(0, 1, 2), request(0, 1, 1)])
    end = agent(0, [[9, 9, 9]], 1.0, done=True)
    envs, _ = scripted([request(0), {NAME: [end, end, *request(0)[NAME]]}])
    envs.reset()
    _, rewards, terminated, _, infos = step(envs)
    assert (
        rewards.tolist() == [1]
        and terminated.all()
        and infos["final_info"]["episode"]["l"].tolist() == [1]
    )


def test_a_mask_of_a_wrong_length_is_ignored(scripted):
    other = "Other?team=1"
    script = [{**request(0), other: [agent(1, [[0.0]], mask=[True] * 7)]}] * 2
    envs, player = scripted(script, behavior="Scripted", specs={NAME: (2, ()), other: (0, (3,))})
    envs.reset()
    step(envs)
    assert len(player.replies[0].agent_actions[other].value[0].discrete_actions) == 1


def test_names_with_control_characters(scripted):
    name = "Bad\n\x1b[2Jname?team=0"
    with pytest.raises(UnityPlayerError) as caught:
        scripted([{name: [agent(0, [])]}], specs={name: (2, ())})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("port", [70_000, -5])
def test_a_port_that_does_not_exist(port):
    with pytest.raises(UnityPlayerError, match=f"--base-port {port}: port {port} does not exist"):
        UnityVecEnv("Mixed", base_port=port)


# Random and damaged data


def play(data, port, timeout=60):
    """Step an env whose player sends `data` without waiting for answers, until it fails."""

    def say():
        sock = knock(port)
        with suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(60)
            while sock.recv(1 << 16):
                pass
        sock.close()

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    steps = 0
    try:
        with closing(
            UnityVecEnv("editor", base_port=port, behavior="Scripted", timeout=timeout)
        ) as envs:
            envs.reset()
            while True:
                step(envs)
                steps += 1
    except UnityPlayerError as error:
        error.steps = steps
        raise
    finally:
        thread.join(5)


def recorded():
    """Return a conversation with images, masks, two behaviors, ends and side channels."""
    eye = camera("Eye", 1)
    begins = with_sensors(eye, vectors=[[1.0, 2.0], [3.0]])
    ends = {**begins, "done": True, "max_step_reached": True, "reward": 1.0}
    begins["action_mask"] = [False, True, False]
    other = agent(7, [[0.0]], mask=[True, False])
    messages = [
        rl_message(
            {NAME: [begins], "Other?team=1": [other]}, {NAME: (2, (3,)), "Other?team=1": (1, (2,))}
        ),
        rl_message({NAME: [ends]}),
        rl_message({NAME: [ends, begins], "Other?team=1": [other]}),
        rl_message({NAME: [begins]}),
    ]
    statistic = struct.pack("<i", 1) + b"a" + struct.pack("<fi", 1, 0)
    messages[1].unity_output.rl_output.side_channel = side_channel(statistic, STATS) + side_channel(
        b"hi"
    )
    return conversation(*messages)


RECORDED = recorded()
bounded = settings(max_examples=60, deadline=None)


def ends_in_one_line(data, timeout=0.2):
    start = time.monotonic()
    with pytest.raises(UnityPlayerError) as caught:
        play(data, free_port(), timeout)
    assert time.monotonic() - start < 30 and "\n" not in str(caught.value)
    return caught.value


def test_the_recorded_conversation_is_valid():
    assert ends_in_one_line(RECORDED, timeout=60).steps == 2


@bounded
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", PREFACE, PREFACE + WELCOME, RECORDED[:400], RECORDED[:1500]]),
)
def test_random_bytes(noise, before):
    ends_in_one_line(before + noise)


@bounded
@given(st.integers(0, len(RECORDED) - 1))
def test_a_conversation_that_is_cut_off(length):
    ends_in_one_line(RECORDED[:length])


@bounded
@given(st.lists(st.integers(0, 8 * len(RECORDED) - 1), min_size=1, max_size=8))
def test_flipped_bits(bits):
    data = bytearray(RECORDED)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    ends_in_one_line(bytes(data))


@bounded
@given(
    st.lists(
        st.tuples(
            st.sampled_from(range(12)),
            st.integers(0, 255),
            st.integers(0, 5),
            st.binary(max_size=40),
        )
    )
)
def test_random_frames(frames):
    ends_in_one_line(
        PREFACE + b"".join(frame(*parts) for parts in frames) + RECORDED[len(PREFACE) :]
    )


def test_more_observations_than_memory_is_refused():
    message = UnityMessageProto()
    spec = message.unity_output.rl_initialization_output.brain_parameters.add().action_spec
    spec.num_continuous_actions = 1
    agent = message.unity_output.rl_output.agentInfos["Ball"].value.add()
    for shape in ((600_000,), (200, 3000)):  # the second one are entities
        sensor = agent.observations.add(shape=shape, dimension_properties=[4, 1])
        sensor.float_data.data.extend([0.0] * 600_000)
    with pytest.raises(UnityPlayerError, match="observe more than 1,000,000 numbers"):
        UnityLayout("Ball", agent.observations, spec)
