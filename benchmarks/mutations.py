"""Training runs whose player sends damaged messages. torture.py uses this program.

    python benchmarks/mutations.py train unity "bits flipped" SEED NUM_RUNS FOLDER SCRIPT

Trains several times, each time in a new folder, with a game that damages a tenth of its
messages at random. The game is the bundled Unity player with its scene Mixed, or the stand-in for a
Godot game of the tests. The runs are forks of this process, so that torch is imported only once. A
line of JSON is printed for each run: its folder and its exit code, or "hangs".

With the same seed the messages are damaged in the same way, as far as the runs are the same.
"""

import importlib
import json
import os
import random
import re
import runpy
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KINDS = [
    "bits flipped",
    "message cut off",
    "message sent twice",
    "messages out of order",
    "wrong length",
    "wrong numbers",
]
SHARE = 0.1  # of the messages that are damaged
CLOSING_SHARE = (
    0.8  # of the incomplete messages, after which the game closes the connection at once
)
AT_ONCE = 4  # runs at the same time: most of them wait for their player
RUN_SECONDS = 120  # after which a run hangs; it has few decisions and short deadlines
NUMBERS = ["nan", "inf", "-inf", "1e38", "-1e300", "1e-45", "-1", "2147483648", "1e99"]
PREFACE = 24  # bytes at the start of a connection of HTTP/2

OPTIONS = "--num-steps 16 --num-minibatches 2 --update-epochs 1 --hidden-sizes 8 --no-compile "
OPTIONS += "--total-timesteps 512 --checkpoint-interval 200 --timeout-wait 2 --max-restarts 2"


# The game


class Damage:
    """Decides which messages are damaged, and how.

    log: a file with a line for each launch of the game and for each damaged message
    """

    def __init__(self, engine, kind, seed, log):
        self.engine = engine
        self.kind = kind
        self.log = Path(log)
        num_launches = self.log.read_text().count("launch") if self.log.exists() else 0
        self.rng = random.Random(f"{seed} {num_launches}")
        self.sent = []  # the last messages
        self.note("launch")

    def note(self, text):
        with open(self.log, "a") as file:
            file.write(text + "\n")

    def is_due(self):
        return self.rng.random() < SHARE

    def apply(self, data):
        """Return the bytes to send instead of a message."""
        self.sent = [*self.sent[-5:], data]
        if not self.is_due():
            return data
        rng = self.rng
        if self.kind == "bits flipped":
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif self.kind == "message cut off":
            damaged = data[: rng.randrange(len(data))]
        elif self.kind == "message sent twice":
            damaged = data + data
        elif self.kind == "messages out of order":
            damaged = rng.choice(self.sent) + rng.choice([b"", data])
        elif self.kind == "wrong length":
            damaged = self.change_length(data)
        elif self.engine == "godot":
            damaged = self.change_number(data)
        else:
            return data  # change_fields() has changed the numbers
        self.note(self.kind)
        return bytes(damaged)

    def closes(self):
        """Return whether the game closes the connection. Otherwise the trainer waits for more."""
        incomplete = self.kind in ("message cut off", "wrong length")
        return incomplete and self.rng.random() < CLOSING_SHARE

    def change_length(self, data):
        """Change a field that has the length of a message, or of a part of it."""
        fields = [(0, 4, "little")]
        if self.engine == "unity":  # the length of each frame, and gRPC's inside of it
            at = PREFACE if data.startswith(b"PRI") else 0
            fields = []
            while at + 9 <= len(data):
                fields.append((at, 3, "big"))
                size = int.from_bytes(data[at : at + 3], "big")
                if size >= 5:
                    fields.append((at + 10, 4, "big"))
                at += 9 + size
        at, width, order = self.rng.choice(fields)
        length = int.from_bytes(data[at : at + width], order)
        largest = 256**width - 1
        choices = [0, 1, length - 1, length + 1, largest, self.rng.randint(0, largest)]
        changed = max(0, self.rng.choice(choices)) % (largest + 1)
        return data[:at] + changed.to_bytes(width, order) + data[at + width :]

    def change_number(self, data):
        """Change a number of a JSON message."""
        text = data[4:].decode()
        number = self.rng.choice(list(re.finditer(r"-?\d[\d.e+-]*|false|true", text)))
        words = [*NUMBERS, "null", '"1"', "[]", "NaN", "-Infinity", "1e99999", "true"]
        text = text[: number.start()] + self.rng.choice(words) + text[number.end() :]
        changed = text.encode()
        return len(changed).to_bytes(4, "little") + changed

    def change_fields(self, message):
        """Change a number of an agent in a message of ML-Agents."""
        behaviors = message.unity_output.rl_output.agentInfos
        if not behaviors or not self.is_due():
            return
        info = self.rng.choice(behaviors[next(iter(behaviors))].value)
        number = float(self.rng.choice(NUMBERS))
        name = self.rng.choice(["id", "reward", "group_reward", "observation", "shape", "mask"])
        whole = self.rng.choice([-1, 0, 1, 2**31 - 1, -(2**31)])
        sensor = self.rng.choice(info.observations)
        if name == "observation":
            sensor.float_data.data[self.rng.randrange(len(sensor.float_data.data))] = number
        elif name == "shape":
            sensor.shape[0] = whole
        elif name == "mask":
            info.action_mask.extend([True] * self.rng.randint(1, 9))
        else:
            setattr(info, name, whole if name == "id" else number)
        self.note(self.kind)


class DamagedSocket(socket.socket):
    """The game's end of the connection. Each call of send() has one message."""

    damage = None

    def send(self, data, flags=0):
        self.sendall(data)
        return len(data)

    def sendall(self, data, flags=0):
        damaged = self.damage.apply(bytes(data))
        super().sendall(damaged)
        if damaged != data and self.damage.closes():
            self.shutdown(socket.SHUT_WR)


def play(engine, kind, seed, log, *options):
    """Run the game until the trainer closes the connection."""
    DamagedSocket.damage = Damage(engine, kind, seed, log)
    connect = socket.create_connection
    socket.create_connection = lambda *args: DamagedSocket(fileno=connect(*args).detach())
    if engine == "godot":
        sys.argv = ["fake_godot.py", *options]
        runpy.run_path(str(ROOT / "tests" / "fake_godot.py"), run_name="__main__")
        return

    from envs.unity_scenes import player
    from onefile_rl.engines.unity_wire import Wire

    send = Wire.send

    def change_and_send(self, message, timeout=None):
        if kind == "wrong numbers":
            DamagedSocket.damage.change_fields(message)
        send(self, message, timeout)

    Wire.send = change_and_send
    sys.argv = ["player.py", "--scene", "Mixed", *options]
    player.main()


# The runs


def write_scenario(path, log, rng):
    """Write the messages of the stand-in for a Godot game: two agents whose episodes end at times."""
    row = lambda: {"obs": [rng.uniform(-1, 1), rng.uniform(-1, 1)]}
    space = {"obs": {"size": [2], "space": "box"}}
    action = {"push": {"size": 2, "action_type": "continuous"}}
    info = {"type": "env_info", "n_agents": 2, "observation_space": [space] * 2}
    info |= {"action_space": [action] * 2, "agent_policy_names": ["shared_policy"] * 2}
    reset = {"type": "reset", "obs": [row(), row()], "info": [{}, {}]}
    steps = []
    for _ in range(400):
        end = {"terminal_observation": row(), "TimeLimit.truncated": True, "is_success": False}
        step = {"type": "step", "obs": [row(), row()], "info": [end, {"stats": {"a": 1.5}}]}
        step |= {"reward": [rng.random(), 1], "done": [rng.random() < 0.1, False]}
        steps.append(step)
    launch = {"info": info, "reset": reset, "steps": steps}
    path.write_text(json.dumps({"log": str(log), "launches": [launch]}))


def make_game(engine, kind, seed, folder):
    """Write the executable of the game. Return the options of a run with it."""
    this = Path(__file__).resolve()
    words = [sys.executable, this, "play", engine, kind, seed, folder / "damage.txt"]
    if engine == "godot":
        write_scenario(folder / "scenario.json", folder / "messages.txt", random.Random(seed))
        words.append(f"--scenario={folder / 'scenario.json'}")
    game = folder / "game.x86_64"
    game.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    game.chmod(0o755)
    options = [f"--{engine}-path", str(game), *OPTIONS.split(), "--seed", str(seed)]
    return [*options, "--max-agents", "16"] if engine == "unity" else options


def enter(folder):
    """Move this process, a fork, into the folder of its run, and its output into a file there."""
    os.chdir(folder)
    with open("output.txt", "wb") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def collect(running):
    """Print the exit codes of the runs that have ended. End runs that hang.

    running: the folder and the deadline of each run, by its process
    """
    for pid, (folder, deadline) in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        if not ended and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = "hangs"
        if code is not None:
            del running[pid]
            print(json.dumps({"folder": str(folder), "code": code}), flush=True)
    time.sleep(0.01)


def train(engine, kind, seed, num_runs, folder, script):
    """Train several times. Each run is a fork, which ends as a script does that was started."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401, imported before the forks

    import godot_vec_env  # noqa: F401
    import unity_vec_env  # noqa: F401

    sys.path.insert(0, str(Path(script).parent))
    module = importlib.import_module(Path(script).stem)
    running = {}
    for number in range(int(num_runs)):
        while len(running) == AT_ONCE:
            collect(running)
        run_folder = Path(folder, f"run{number}")
        run_folder.mkdir(parents=True)
        options = make_game(engine, kind, int(seed) + number, run_folder)
        pid = os.fork()
        if pid == 0:
            enter(run_folder)
            sys.argv = [script, *options]
            module.main()
            return
        running[pid] = (run_folder, time.monotonic() + RUN_SECONDS)
    while running:
        collect(running)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    {"play": play, "train": train}[task](*arguments)
