"""How fast Godot games step: GodotVecEnv beside the stock client of Godot RL Agents, in alternating turns.

    python benchmarks/godot_speed.py --stock stock/bin/python     beside the stock client, in a Python of its own:
                                                                  python -m venv stock
                                                                  stock/bin/pip install godot-rl==0.8.2
    python benchmarks/godot_speed.py                              only this project's figures

The game is GodotDiscs, with its own Sync node, action_repeat 8, random actions. The stock client can't be in one
environment with this project: it pins an older gymnasium. "Equal settings" are --fixed-fps 60 --headless for both; the
stock client's defaults are bound to the wall clock. CPU times are of one step: Python's side, and the games'.
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
from godot_speed import cpu
import numpy as np
from godot_rl.core.godot_env import GodotEnv
path, seconds, port, settings = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
env = GodotEnv(path, port=port, convert_action_space=True, **settings)
env.reset()
rng, count, pid = np.random.default_rng(0), 0, env.proc.pid
python, godot, start = time.process_time(), cpu(pid), time.perf_counter()
while time.perf_counter() - start < seconds:
    env.step(rng.uniform(-1, 1, (env.num_envs, 2)))
    count += 1
rate = count / (time.perf_counter() - start)
times = (time.process_time() - python) / count, (cpu(pid) - godot) / count
print("steps", json.dumps([rate, *(1000 * x for x in times)]), flush=True)
env.close()
"""


def cpu(pid):
    """Seconds of a process so far, as Linux tells; 0 elsewhere."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def ours(seconds, agents=16, games=1, **settings):
    """Steps a second, and milliseconds of CPU per step of Python and of all games."""
    import numpy as np

    from godot_vec_env import GodotVecEnv

    with closing(GodotVecEnv("GodotDiscs", num_players=games, player_args=[f"--agents={agents}"], **settings)) as envs:
        envs.reset()
        rng, pids = np.random.default_rng(0), [game.process.pid for game in envs.players]
        count, python, godot, start = 0, time.process_time(), sum(map(cpu, pids)), time.perf_counter()
        while time.perf_counter() - start < seconds:
            envs.step(rng.uniform(-1, 1, (envs.num_envs, 2)))
            count += 1
        rate = count / (time.perf_counter() - start)
        times = (time.process_time() - python) / count, (sum(map(cpu, pids)) - godot) / count
        return rate, *(1000 * x for x in times)


def stock(python, game, seconds, port, **settings):
    command = [python, "-c", STOCK, game, str(seconds), str(port), json.dumps(settings), str(Path(__file__).parent)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    lines = [line for line in out.stdout.splitlines() if line.startswith("steps ")]
    if not lines:
        raise SystemExit(f"the stock client failed: {(out.stderr.strip() or out.stdout).splitlines()[-1]}")
    return json.loads(lines[0].removeprefix("steps "))


def spread(values, digits=0):
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", help="a Python that has godot-rl")
    parser.add_argument("--seconds", type=float, default=5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    args = parser.parse_args()
    from godot_vec_env import GodotError, find_game

    try:
        command = find_game("GodotDiscs")
    except GodotError as error:
        raise SystemExit(str(error)) from None
    if args.stock:
        if subprocess.run([args.stock, "-c", "import godot_rl"], capture_output=True).returncode:
            install = "python -m venv stock && stock/bin/pip install godot-rl==0.8.2"
            raise SystemExit(f"{args.stock} has no godot-rl: {install}, then --stock stock/bin/python")
        with tempfile.TemporaryDirectory() as folder:  # the stock client starts a .x86_64
            game = Path(folder, "discs.x86_64")
            game.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
            game.chmod(0o755)
            equal, here = [], []
            for i in range(args.rounds):
                settings = dict(framerate=60, action_repeat=8, speedup=1)
                equal.append(stock(args.stock, str(game), args.seconds, 12000 + i, **settings))
                here.append(ours(args.seconds))
            defaults = [stock(args.stock, str(game), args.seconds, 12100 + i) for i in range(2)]
            (fast, *cost), (its, *its_cost), (slow, *_) = (list(zip(*x, strict=True)) for x in (here, equal, defaults))
            print(f"16 agents, equal settings: here {spread(fast)} steps/s, stock client {spread(its)}: ", end="")
            print(f"{spread([a / b for a, b in zip(fast, its, strict=True)], 2)} times")
            for name, a, b in zip(("Python", "game"), cost, its_cost, strict=True):
                print(f"  CPU of a step, {name}: here {spread(a, 2)} ms, stock client {spread(b, 2)}")
            print(f"16 agents, defaults: here {spread(fast)} steps/s, stock client {spread(slow, 1)}: ", end="")
            print(f"{median(fast) / median(slow):.0f} times")
    print("| games | agents in each | steps/s | decisions/s | CPU of a step, ms: Python | games |")
    print("|---|---|---|---|---|---|")
    for games in (1, 2, 4):
        for agents in (16, 64, 256):
            turns = [ours(args.seconds, agents, games) for _ in range(max(1, args.rounds // 2))]
            rate, python, godot = (median(column) for column in zip(*turns, strict=True))
            print(
                f"| {games} | {agents} | {rate:,.0f} | {rate * games * agents:,.0f} | {python:.2f} | {godot:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
