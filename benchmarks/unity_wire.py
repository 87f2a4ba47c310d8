"""Measure how fast Python exchanges messages with a player: UnityVecEnv and the mlagents-envs
client.

    python benchmarks/unity_wire.py                 installs mlagents-envs, then about a minute
    python benchmarks/unity_wire.py --no-stock      without the mlagents-envs client

Both clients run alternately, so that other load on the machine affects both. The player simulates
nothing: it sends the same message of 10 agents (observations of 126 and 32 numbers, 20 actions)
repeatedly. The stock client is mlagents-envs 0.28.0 with protobuf 3.20.3, the versions that pip
installs for this Python, in a temporary virtual environment. Python's time per exchange is the time
in `step` without the time spent waiting for the player. The last lines are the bundled scenes with
random actions, including their physics.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve()
STOCK = ["mlagents-envs==0.28.0", "protobuf==3.20.3", "numpy==1.23.5", "setuptools==80.10.2"]
STOCK_CLIENT = """
import json, sys, time
import numpy as np
from mlagents_envs.base_env import ActionTuple
from mlagents_envs.environment import UnityEnvironment

path = sys.argv[1]
seconds = float(sys.argv[2])
env = UnityEnvironment(path, no_graphics=True, worker_id=int(sys.argv[3]))
env.reset()
(name,) = env.behavior_specs
actions = np.zeros((10, 20), np.float32)
count = 0
start = time.perf_counter()
while time.perf_counter() - start < seconds:
    env.set_actions(name, ActionTuple(actions))
    env.step()
    decisions, terminals = env.get_steps(name)
    count += 1
print(json.dumps(count / (time.perf_counter() - start)))
env.close()
"""
sys.path.insert(0, str(HERE.parent.parent))


def make_message(agents):
    """Return the player's message: the observations and rewards of all agents."""
    from onefile_rl.engines import unity_wire

    message = unity_wire.UnityMessageProto()
    message.header.status = 200
    for i in range(agents):
        infos = message.unity_output.rl_output.agentInfos["Idle?team=0"]
        info = infos.value.add(id=i, reward=0.5)
        for size in (126, 32):
            sensor = info.observations.add(shape=[size], name=f"Sensor{size}")
            sensor.float_data.data.extend(k / 7 + i for k in range(size))
    return message


def run_player(port, agents):
    """Act as a player that always sends the same message, until the client closes it."""
    from onefile_rl.engines import unity_wire

    # The first message has the version, the third one the behavior
    hello = unity_wire.UnityMessageProto()
    initialization = hello.unity_output.rl_initialization_output
    initialization.communication_version = "1.5.0"
    for capability in initialization.capabilities.DESCRIPTOR.fields:
        setattr(initialization.capabilities, capability.name, True)
    message = make_message(agents)
    first = unity_wire.UnityMessageProto()
    first.CopyFrom(message)
    brains = first.unity_output.rl_initialization_output.brain_parameters
    brain = brains.add(brain_name="Idle?team=0")
    brain.action_spec.num_continuous_actions = 20

    wire = unity_wire.Wire.connect(port)
    try:
        for start in (hello, unity_wire.UnityMessageProto(), first):
            start.header.status = 200
            wire.send(start)
            wire.receive()
        while True:
            wire.send(message)
            if wire.receive().header.status != 200:
                break
    except ConnectionError:
        pass


def ours(path, seconds):
    """Return exchanges per second, Python's milliseconds per exchange, and decisions per second."""
    import numpy as np

    from onefile_rl.engines import unity_wire
    from unity_vec_env import UnityVecEnv

    wire_class = unity_wire.Wire
    fill = wire_class._fill
    waited = 0.0

    def timed_fill(wire, deadline):
        nonlocal waited
        before = time.perf_counter()
        fill(wire, deadline)
        waited += time.perf_counter() - before

    wire_class._fill = timed_fill
    with closing(UnityVecEnv(path)) as envs:
        rng = np.random.default_rng(0)
        actions = rng.uniform(-1, 1, (100, *envs.action_space.shape)).astype(np.float32)
        _, infos = envs.reset()
        count = 0
        decisions = 0
        waited = 0.0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            decisions += np.count_nonzero(infos["ready"])
            *_, infos = envs.step(actions[count % 100])
            count += 1
        total = time.perf_counter() - start
    wire_class._fill = fill
    return count / total, (total - waited) / count * 1e3, decisions / total


def install_stock(folder):
    """Install the mlagents-envs client in a virtual environment, and return its Python."""
    print("Installing the stock client ...", flush=True)
    python = folder / "stock" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder / "stock"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", *STOCK], check=True)
    return python


def stock(python, path, seconds, worker_id):
    """Return the exchanges per second of the mlagents-envs client."""
    command = [python, "-c", STOCK_CLIENT, path, str(seconds), str(worker_id)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def launcher(folder, agents):
    """Write a program that starts the player of this file, and return its path."""
    path = folder / f"Idle{agents}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" --player {agents} "$@"\n')
    path.chmod(0o755)
    return str(path)


def compare(folder, args):
    """Print the exchanges with 10 agents, of both clients alternately."""
    idle = launcher(folder, 10)
    stock_python = None if args.no_stock else install_stock(folder)
    times = []
    ratios = []
    for number in range(args.rounds):
        speed, milliseconds, _ = ours(idle, args.seconds)
        times.append(milliseconds)
        line = f"round {number + 1}, 10 agents: {speed:5.0f} exchanges/s"
        line += f", {milliseconds:.3f} ms of Python each"
        if stock_python:
            stock_speed = stock(stock_python, idle, args.seconds, number)
            ratios.append(speed / stock_speed)
            line += f"; stock {stock_speed:4.0f} exchanges/s; ratio {ratios[-1]:.1f}"
        print(line, flush=True)
    print(f"10 agents: {median(times):.3f} ms of Python per exchange, median (at most 0.3 wanted)")
    if ratios:
        print(f"ratio: {median(ratios):.1f}, median (at least 20 wanted)")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each client")
    parser.add_argument("--seconds", type=float, default=4, help="duration of a measurement")
    parser.add_argument("--no-stock", action="store_true", help="do not measure the stock client")
    parser.add_argument("--player", type=int, metavar="AGENTS", help=argparse.SUPPRESS)
    parser.add_argument("--mlagents-port", type=int, help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args()
    if args.player:
        run_player(args.mlagents_port, args.player)
        return

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare(folder, args)
        crowd = launcher(folder, 100)
        milliseconds = median(ours(crowd, args.seconds)[1] for _ in range(args.rounds))
        goal = "median (at most 1.5 wanted)"
        print(f"100 agents: {milliseconds:.3f} ms of Python per exchange, {goal}", flush=True)
        for scene, wanted in (("Crawler", 2500), ("3DBall", 6000)):
            speed = median(ours(scene, args.seconds)[2] for _ in range(args.rounds))
            rate = f"{speed:.0f} decisions/s, median (at least {wanted} wanted)"
            print(f"{scene}, one player, random actions: {rate}", flush=True)


if __name__ == "__main__":
    main()
