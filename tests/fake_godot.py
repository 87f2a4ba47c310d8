"""A fake Godot game for the tests: it connects, answers from a scenario, and can misbehave.

    fake_godot.py --scenario=FILE --port=N      FILE: {"log": path, "launches": [{"info", "reset", "steps"}, ...]}

Each launch uses the next entry of "launches". A step is a message, the text of a message, the name of a fault, or a
list: ["both", message, message] or ["print", text, times, message]. The log has one line for each launch and for each
message that was received. Only small modules of the standard library are imported, so that the game starts in a few
hundredths of a second.
"""

import json
import os
import socket
import sys
import time

options = dict(
    word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word
)
with open(options["scenario"]) as file:
    scenario = json.load(file)


def note(what):
    with open(scenario["log"], "a") as file:
        file.write(json.dumps(what) + "\n")


number = 0
if os.path.exists(scenario["log"]):
    with open(scenario["log"]) as file:
        number = sum('"launch"' in line for line in file)
note({"launch": number, "pid": os.getpid(), "args": sys.argv[1:]})
launch = scenario["launches"][min(number, len(scenario["launches"]) - 1)]


def read(size):
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            os._exit(0)  # the peer is closed
        data += chunk
    return data


def packed(message):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(data).to_bytes(4, "little") + data


def send(what):
    if isinstance(what, list) and what[0] == "print":  # a text a number of times, and a message
        print(what[1] * what[2], flush=True)
        sock.sendall(packed(what[3]))
    elif isinstance(what, list):  # several messages at once
        sock.sendall(b"".join(packed(message) for message in what[1:]))
    elif not isinstance(what, str):
        sock.sendall(packed(what))
    elif what == "crash":
        print("it hurts", flush=True)
        os._exit(7)
    elif what == "leave":
        sock.close()
        os._exit(0)
    elif what == "hang":
        time.sleep(600)
    elif what == "half":
        sock.sendall(packed(launch["reset"])[:-9])
        os._exit(7)
    elif what == "drip":
        for byte in packed(launch["reset"]):
            sock.sendall(bytes([byte]))
            time.sleep(0.2)
    elif what == "endless":
        sock.sendall(b"\xff\xff\xff\xff" + bytes(100))
        time.sleep(600)
    elif what == "flood":
        sock.sendall((2**28).to_bytes(4, "little"))
        while True:
            sock.sendall(bytes(1 << 16))
            time.sleep(0.001)  # the whole message takes four seconds, independent of the machine
    elif what == "no JSON":
        sock.sendall(packed(b'{"type": "step", '))
    elif what == "no UTF-8":
        sock.sendall(packed(b'{"type": "\xff"}'))
    elif what.startswith("{"):  # the text of a message
        sock.sendall(packed(what.encode()))
    elif what == "deep":
        sock.sendall(packed(b"[" * 100_000))
    elif what == "no object":
        sock.sendall(packed(b"[1]"))
    elif what == "another type":
        sock.sendall(packed({"type": "call", "returns": []}))
    elif what == "script error":
        print(
            "SCRIPT ERROR: Invalid call. Nonexistent function 'get_obs'.\n   at: _physics_process (sync.gd:1)",
            flush=True,
        )
        time.sleep(600)


print(launch.get("prints", ""), flush=True)
if launch.get("dies", "") in (True, options.get("env_seed")):
    print("no license", flush=True)
    os._exit(3)
if launch.get("late"):
    time.sleep(launch["late"])
if launch.get("never"):
    time.sleep(600)
sock = socket.create_connection(("127.0.0.1", int(options["port"])))
steps = iter(launch.get("steps", []))
while True:
    message = json.loads(read(int.from_bytes(read(4), "little")))
    note(message)
    if message["type"] == "close":
        if not launch.get("ignores_close"):
            break
    elif message["type"] == "env_info":
        send(launch["info"])
    elif message["type"] == "reset":
        send(launch["reset"])
    elif message["type"] == "action":
        send(next(steps, launch.get("forever", "leave")))
