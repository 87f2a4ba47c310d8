"""How fast Python and a player exchange messages: UnityVecEnv beside the stock mlagents-envs client, in one alternating
run.

    python benchmarks/unity_wire.py                 makes a virtual environment for the stock client, about a minute
    python benchmarks/unity_wire.py --no-stock      only this project's figures

The player does nothing: it sends the same message of 10 agents (observations 126 + 32, 20 actions) again and again. The
stock client runs with mlagents-envs 0.28.0 and protobuf 3.20.3, what pip gives it on this Python. The Python side of an
exchange is the time in `step` less the time in which it waits for the player's bytes. The last lines are the bundled
scenes under random actions, physics and all.
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
env = UnityEnvironment(sys.argv[1], no_graphics=True, worker_id=int(sys.argv[3]))
env.reset()
(name,) = env.behavior_specs
actions, count, start = np.zeros((10, 20), np.float32), 0, time.perf_counter()
while time.perf_counter() - start < float(sys.argv[2]):
    env.set_actions(name, ActionTuple(actions))
    env.step()
    decisions, terminals = env.get_steps(name)
    count += 1
print(json.dumps(count / (time.perf_counter() - start)))
env.close()
"""
sys.path.insert(0, str(HERE.parent.parent))


def do_nothing(port, agents):
    """The player: a message made once, whatever the answer."""
    from unity_player import UnityMessageProto, Wire

    wire, hello, message = Wire.connect(port), UnityMessageProto(), UnityMessageProto()
    hello.header.status = message.header.status = 200
    hello.unity_output.rl_initialization_output.communication_version = "1.5.0"
    for capability in hello.unity_output.rl_initialization_output.capabilities.DESCRIPTOR.fields:
        setattr(hello.unity_output.rl_initialization_output.capabilities, capability.name, True)
    for i in range(agents):
        info = message.unity_output.rl_output.agentInfos["Idle?team=0"].value.add(id=i, reward=0.5)
        for size in (126, 32):
            sensor = info.observations.add(shape=[size], name=f"Sensor{size}")
            sensor.float_data.data.extend(k / 7 + i for k in range(size))
    first = UnityMessageProto()
    first.CopyFrom(message)
    brain = first.unity_output.rl_initialization_output.brain_parameters.add(brain_name="Idle?team=0")
    brain.action_spec.num_continuous_actions = 20
    try:
        for start in (hello, UnityMessageProto(), first):
            start.header.status = 200
            wire.send(start)
            wire.receive()
        while True:
            wire.send(message)
            if wire.receive().header.status != 200:
                break
    except ConnectionError:
        pass


def ours(path, seconds, **kwargs):
    """Exchanges per second, milliseconds of Python per exchange, and decisions per second."""
    import numpy as np

    from unity_player import Wire
    from unity_vec_env import UnityVecEnv

    fill, waited = Wire._fill, 0.0

    def timed(wire, deadline):
        nonlocal waited
        before = time.perf_counter()
        fill(wire, deadline)
        waited += time.perf_counter() - before

    Wire._fill = timed
    with closing(UnityVecEnv(path, **kwargs)) as envs:
        actions = np.random.default_rng(0).uniform(-1, 1, (100, *envs.action_space.shape)).astype(np.float32)
        _, infos = envs.reset()
        count, decisions, waited, start = 0, 0, 0.0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            decisions += np.count_nonzero(infos["ready"])
            *_, infos = envs.step(actions[count % 100])
            count += 1
        wall = time.perf_counter() - start
    Wire._fill = fill
    return count / wall, (wall - waited) / count * 1e3, decisions / wall


def launcher(folder, agents):
    path = Path(folder) / f"Idle{agents}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" --player {agents} "$@"\n')
    path.chmod(0o755)
    return str(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the two clients take turns")
    parser.add_argument("--seconds", type=float, default=4, help="length of a turn")
    parser.add_argument("--no-stock", action="store_true", help="leave the stock client out")
    parser.add_argument("--player", type=int, metavar="AGENTS", help=argparse.SUPPRESS)
    parser.add_argument("--mlagents-port", type=int, help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args()
    if args.player:
        return do_nothing(args.mlagents_port, args.player)

    with tempfile.TemporaryDirectory() as folder:
        idle, stock_python = launcher(folder, 10), Path(folder) / "stock" / "bin" / "python"
        if not args.no_stock:
            print("Installing the stock client ...", flush=True)
            subprocess.run([sys.executable, "-m", "venv", Path(folder) / "stock"], check=True)
            subprocess.run([stock_python, "-m", "pip", "install", "-qq", *STOCK], check=True)
        mine, stock = [], []
        for turn in range(args.rounds):
            mine.append(ours(idle, args.seconds))
            line = f"turn {turn + 1}, 10 agents: {mine[-1][0]:5.0f} exchanges/s, {mine[-1][1]:.3f} ms of Python each"
            if not args.no_stock:
                command = [stock_python, "-c", STOCK_CLIENT, idle, str(args.seconds), str(turn)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                stock.append(json.loads(out.splitlines()[-1]))
                line += f"; stock {stock[-1]:4.0f} exchanges/s; ratio {mine[-1][0] / stock[-1]:.1f}"
            print(line, flush=True)
        each = median(m[1] for m in mine)
        print(f"10 agents: {each:.3f} ms of Python per exchange, median of the turns (at most 0.3 wanted)")
        if stock:
            ratio = median(m[0] / s for m, s in zip(mine, stock, strict=True))
            print(f"ratio: {ratio:.1f}, median of the turns (at least 20 wanted)")
        many = [ours(launcher(folder, 100), args.seconds)[1] for _ in range(args.rounds)]
        each = median(many)
        print(f"100 agents: {each:.3f} ms of Python per exchange, median of the turns (at most 1.5 wanted)", flush=True)
        for scene, wanted in (("Crawler", 2500), ("3DBall", 6000)):
            rates = [ours(scene, args.seconds)[2] for _ in range(args.rounds)]
            rate = f"{median(rates):.0f} decisions/s, median of the turns (at least {wanted} wanted)"
            print(f"{scene}, one player, random actions: {rate}", flush=True)


if __name__ == "__main__":
    main()
