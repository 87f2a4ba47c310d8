"""Measure how fast Godot games step: GodotVecEnv and the client of Godot RL Agents, alternately.

    python benchmarks/godot_speed.py --stock stock/bin/python     compare with the stock client
    python benchmarks/godot_speed.py                              without the stock client

The stock client pins an older gymnasium, so it needs its own virtual environment:

    python -m venv stock
    stock/bin/pip install godot-rl==0.8.2

The game is GodotDiscs with its own Sync node, action_repeat 8 and random actions. "Equal settings"
are --fixed-fps 60 --headless for both; with its default settings the stock client is bound to
real time. CPU times are per step, of the Python process and of the games.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STOCK = """
import json, sys, time
sys.path.insert(0, sys.argv[5])
from godot_speed import cpu_seconds
import numpy as np
from godot_rl.core.godot_env import GodotEnv

path = sys.argv[1]
seconds = float(sys.argv[2])
settings = json.loads(sys.argv[4])
env = GodotEnv(path, port=int(sys.argv[3]), convert_action_space=True, **settings)
env.reset()
rng = np.random.default_rng(0)
pid = env.proc.pid
count = 0
python = time.process_time()
godot = cpu_seconds(pid)
start = time.perf_counter()
while time.perf_counter() - start < seconds:
    env.step(rng.uniform(-1, 1, (env.num_envs, 2)))
    count += 1
speed = count / (time.perf_counter() - start)
python = 1000 * (time.process_time() - python) / count
godot = 1000 * (cpu_seconds(pid) - godot) / count
print("steps", json.dumps([speed, python, godot]), flush=True)
env.close()
"""


def cpu_seconds(pid):
    """Return the CPU time of a process so far; 0 on systems other than Linux."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def ours(seconds, agents=16, games=1):
    """Return steps per second, and the CPU milliseconds per step of Python and of all games."""
    import numpy as np

    from godot_vec_env import GodotVecEnv

    envs = GodotVecEnv("GodotDiscs", num_players=games, player_args=[f"--agents={agents}"])
    with closing(envs):
        envs.reset()
        rng = np.random.default_rng(0)
        pids = [game.process.pid for game in envs.players]
        count = 0
        python = time.process_time()
        godot = sum(map(cpu_seconds, pids))
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            envs.step(rng.uniform(-1, 1, (envs.num_envs, 2)))
            count += 1
        speed = count / (time.perf_counter() - start)
        python = 1000 * (time.process_time() - python) / count
        godot = 1000 * (sum(map(cpu_seconds, pids)) - godot) / count
        return speed, python, godot


def stock(python, game, seconds, port, **settings):
    """Return the same numbers as ours() for the stock client."""
    here = str(Path(__file__).parent)
    command = [python, "-c", STOCK, game, str(seconds), str(port), json.dumps(settings), here]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    for line in result.stdout.splitlines():
        if line.startswith("steps "):
            return json.loads(line.removeprefix("steps "))
    output = result.stderr.strip() or result.stdout
    raise SystemExit(f"the stock client failed: {output.splitlines()[-1]}")


def spread(values, digits=0):
    """Return the median and the range as text."""
    low = f"{min(values):,.{digits}f}"
    high = f"{max(values):,.{digits}f}"
    return f"{median(values):,.{digits}f} ({low} to {high})"


def compare(game, args):
    """Print the comparison with the stock client, which runs the program `game`."""
    equal = dict(framerate=60, action_repeat=8, speedup=1)
    theirs = []
    here = []
    for i in range(args.rounds):
        theirs.append(stock(args.stock, game, args.seconds, 12000 + i, **equal))
        here.append(ours(args.seconds))
    defaults = [stock(args.stock, game, args.seconds, 12100 + i) for i in range(2)]

    speeds, *costs = zip(*here, strict=True)
    stock_speeds, *stock_costs = zip(*theirs, strict=True)
    default_speeds = [speed for speed, *_ in defaults]
    ratios = [a / b for a, b in zip(speeds, stock_speeds, strict=True)]
    rates = f"here {spread(speeds)} steps/s, stock client {spread(stock_speeds)}"
    print(f"16 agents, equal settings: {rates}: {spread(ratios, 2)} times")
    for name, a, b in zip(("Python", "game"), costs, stock_costs, strict=True):
        print(f"  CPU of a step, {name}: here {spread(a, 2)} ms, stock client {spread(b, 2)}")
    rates = f"here {spread(speeds)} steps/s, stock client {spread(default_speeds, 1)}"
    times = median(speeds) / median(default_speeds)
    print(f"16 agents, defaults: {rates}: {times:.0f} times")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", help="a Python that has godot-rl")
    parser.add_argument("--seconds", type=float, default=5, help="duration of a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each client")
    args = parser.parse_args()
    from godot_vec_env import GodotError, find_game

    try:
        command = find_game("GodotDiscs")
    except GodotError as error:
        raise SystemExit(str(error)) from None

    if args.stock:
        check = [args.stock, "-c", "import godot_rl"]
        if subprocess.run(check, capture_output=True).returncode:
            install = "python -m venv stock && stock/bin/pip install godot-rl==0.8.2"
            fix = f"run {install}, then give --stock stock/bin/python"
            raise SystemExit(f"{args.stock} has no godot-rl: {fix}")
        with tempfile.TemporaryDirectory() as folder:
            game = Path(folder, "discs.x86_64")  # the stock client requires this suffix
            game.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
            game.chmod(0o755)
            compare(str(game), args)

    print("| games | agents in each | steps/s | decisions/s | CPU of a step, ms: Python | games |")
    print("|---|---|---|---|---|---|")
    for games in (1, 2, 4):
        for agents in (16, 64, 256):
            rounds = max(1, args.rounds // 2)
            results = [ours(args.seconds, agents, games) for _ in range(rounds)]
            speed, python, godot = (median(column) for column in zip(*results, strict=True))
            decisions = speed * games * agents
            cells = f"{speed:,.0f} | {decisions:,.0f} | {python:.2f} | {godot:.2f}"
            print(f"| {games} | {agents} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
