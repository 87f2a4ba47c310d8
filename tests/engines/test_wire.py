"""Test Wire against gRPC's C core on either side, and that messages are parsed in C."""

import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from conftest import UnityMessageProto, Wire
from google.protobuf.internal import api_implementation

from onefile_rl.engines.unity_wire import (
    DATA,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

EXCHANGE = "/communicator_objects.UnityToExternalProto/Exchange"
SIZES = (
    0,
    1,
    16_384,
    70_000,
    5_000_000,
    100,
)  # below and above a frame, a window, and gRPC's cap of 4 MB
NO_CAP = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def message(size):
    out = UnityMessageProto()
    out.header.status = 200
    out.unity_output.rl_output.side_channel = (bytes(range(251)) * (size // 251 + 1))[:size]
    return out


def test_messages_are_parsed_in_c():
    assert api_implementation.Type() == "upb"
    assert UnityMessageProto.FromString(message(10).SerializeToString()) == message(10)


def test_stock_client_imports_with_this_protobuf():
    from mlagents_envs.communicator_objects.observation_pb2 import PNG
    from mlagents_envs.environment import UnityEnvironment

    assert UnityEnvironment.API_VERSION == "1.5.0" and PNG == 1


def test_server_answers_a_grpc_client():
    listener = socket.create_server(("127.0.0.1", 0))
    received = []

    def client():
        with grpc.insecure_channel(
            f"localhost:{listener.getsockname()[1]}", options=NO_CAP
        ) as channel:
            call = channel.unary_unary(
                EXCHANGE, UnityMessageProto.SerializeToString, UnityMessageProto.FromString
            )
            received.extend(call(message(size), wait_for_ready=True, timeout=60) for size in SIZES)

    thread = threading.Thread(target=client)
    thread.start()
    with listener, listener.accept()[0] as sock:
        wire = Wire(sock, server=True)
        for size in SIZES:
            assert wire.receive(20) == message(size)
            wire.send(message(size + 3))
        with pytest.raises(ConnectionError):
            wire.receive(20)
    thread.join()
    assert received == [message(size + 3) for size in SIZES]


def test_client_calls_a_grpc_server():
    proto = UnityMessageProto
    handler = grpc.unary_unary_rpc_method_handler(
        lambda x, _: x, proto.FromString, proto.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(1), options=NO_CAP)
    service = "communicator_objects.UnityToExternalProto"
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Exchange": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    wire = Wire.connect(port)
    for size in SIZES:
        wire.send(message(size))
        assert wire.receive(20) == message(size)
    server.stop(0)
    with pytest.raises(OSError):
        wire.send(message(1))
        wire.receive(20)
    wire.close()


def test_a_grpc_server_that_refuses_is_an_error():
    server = grpc.server(ThreadPoolExecutor(1))  # without any method
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    wire = Wire.connect(port)
    wire.send(message(1))
    with pytest.raises(ConnectionError):
        wire.receive(20)
    wire.close()
    server.stop(0)


def test_credit_is_renewed_after_a_gigabyte():
    """The peer's credit lasts for 2 GiB on one connection; without renewal a long run would stop there."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = Wire.connect(listener.getsockname()[1])
    server = Wire(listener.accept()[0], server=True)
    server.received = 2**30 + 1
    before = client.window
    client.send(message(1))
    server.receive(5)
    server.send(message(1))
    client.receive(5)
    assert client.window > before + 2**30
    listener.close(), client.close(), server.close()


@pytest.mark.parametrize(("scarce", "plenty"), [(0, 1), (1, 0)])
def test_sends_no_more_than_the_peer_allows(scarce, plenty):
    """The peer allows 65,535 bytes, for the connection (0) or for this call (1), then more in small steps."""
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    peer.settimeout(60)
    peer.sendall(
        PREFACE
        + frame(SETTINGS, 0, 0)
        + frame(HEADERS, 4, 1)
        + frame(DATA, 1, 1, bytes([0, 0, 0, 0, 0]))
    )
    wire = Wire(listener.accept()[0], server=True)
    wire.receive(5)
    peer.sendall(frame(WINDOW_UPDATE, 0, plenty, (1 << 20).to_bytes(4, "big")))
    thread = threading.Thread(target=wire.send, args=(message(200_000),), daemon=True)
    thread.start()
    credit, got, data = 65535, b"", b""
    while True:
        while len(got) < 9 or len(got) < 9 + int.from_bytes(got[:3], "big"):
            if credit == 0:
                credit = 20_000
                peer.sendall(frame(WINDOW_UPDATE, 0, scarce, credit.to_bytes(4, "big")))
            got += peer.recv(1 << 16)
        size, kind, flags = int.from_bytes(got[:3], "big"), got[3], got[4]
        payload, got = got[9 : 9 + size], got[9 + size :]
        if kind == DATA:
            assert size <= 16_384
            credit -= size
            assert credit >= 0
            data += payload
        if kind == HEADERS and flags & 1:
            break
    assert UnityMessageProto.FromString(data[5:]) == message(200_000)
    thread.join(5)
    listener.close(), peer.close(), wire.close()


def test_only_a_call_is_answered_and_only_once():
    listener = socket.create_server(("127.0.0.1", 0))
    client = Wire.connect(listener.getsockname()[1])
    server = Wire(listener.accept()[0], server=True)
    with pytest.raises(ConnectionError, match="no call to answer"):
        server.send(message(1))
    client.send(message(1))
    server.receive(5)
    server.send(message(2))
    with pytest.raises(ConnectionError, match="no call to answer"):
        server.send(message(3))
    assert client.receive(5) == message(2)
    listener.close(), client.close(), server.close()


@pytest.mark.parametrize(
    "frames", [frame(DATA, 1, 3, bytes(5)), frame(HEADERS, 4, 0), frame(DATA, 1, 0, bytes(5))]
)
def test_frames_of_other_calls_are_refused(frames):
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    peer.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1) + frames)
    wire = Wire(listener.accept()[0], server=True)
    with pytest.raises(ConnectionError, match="a call that is not active"):
        wire.receive(1)
    listener.close(), peer.close(), wire.close()


@pytest.mark.parametrize("when", ["at once", "before the answer"])
def test_a_second_call_before_the_answer_is_refused(when):
    """A message that is sent twice: all later ones would be too late by one step."""
    data = struct.pack("!BI", 0, 0)
    calls = [frame(HEADERS, 4, stream) + frame(DATA, 1, stream, data) for stream in (1, 3)]
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    peer.sendall(PREFACE + frame(SETTINGS, 0, 0) + calls[0])
    wire = Wire(listener.accept()[0], server=True)
    if when == "at once":
        peer.sendall(calls[1])
    wire.receive(5)
    if when == "before the answer":
        peer.sendall(calls[1] + frame(PING, 0, 0, bytes(8)))
        select.select([wire.sock], [], [], 5)
    with pytest.raises(ConnectionError, match="the peer called again before it got an answer"):
        wire.send(message(1), 5)
    listener.close(), peer.close(), wire.close()


def test_a_silent_peer_times_out():
    listener = socket.create_server(("127.0.0.1", 0))
    client = Wire.connect(listener.getsockname()[1])
    server = Wire(listener.accept()[0], server=True)
    with pytest.raises(TimeoutError):
        server.receive(0.05)
    listener.close(), client.close(), server.close()
