"""Measure how fast two behaviors are trained in one run, beside one behavior with as many agents.

    python benchmarks/behaviors_speed.py --rounds 3         five minutes on two cores

All train PPO in the WallClimb scene, with 24 agents: one run has agents of BigWall only, the others as many of
BigWall as of SmallWall, the last one with --rollout-share 0.5. They run alternately, so that other load on the machine
affects all of them. Decisions per second are
those between the first and the last point of the curves; CPU time is that of all processes, with their start.
"""

import argparse
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ppo_discrete_multiagent.py"
LINE = "--env-id WallClimb --no-compile --total-timesteps 100000000 --player-args=--max-step=20"
TWO = "--behavior BigWall SmallWall --env-parameters big_wall=0.5"
WAYS = {
    "one behavior": "--behavior BigWall --env-parameters big_wall=1",
    "two behaviors": TWO,
    "two that learn together": f"{TWO} --rollout-share 0.5",
}


def measure(line, seconds):
    """Return the decisions per second of a run, the CPU seconds per 1,000 decisions, and the decisions."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, str(SCRIPT), *LINE.split(), *line.split()]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        behaviors = line.count("Wall ") or 1
        started = 0
        while started < behaviors and (text := run.stdout.readline()):
            started += "tensorboard --logdir" in text
        time.sleep(seconds)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        rate = 0.0
        decisions = 0
        for file in Path(folder, "runs").rglob("events.out*"):
            events = EventAccumulator(str(file.parent), {"scalars": 0}).Reload()
            points = events.Scalars("charts/learning_rate")
            first = points[0]
            last = points[-1]
            rate += (last.step - first.step) / (last.wall_time - first.wall_time)
            decisions += last.step
    return rate, 1000 * cpu / decisions, decisions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each of them runs")
    parser.add_argument("--seconds", type=float, default=25, help="how long a run trains")
    args = parser.parse_args()
    results = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, line in WAYS.items():
            results[way].append(measure(line, args.seconds))
            rate, cpu, decisions = results[way][-1]
            print(
                f"{way}: {rate:.0f} decisions/s, {cpu:.2f} CPU s per 1,000, {decisions:,}",
                flush=True,
            )
    one, *others = results
    for way in others:
        for name, column in (("decisions/s", 0), ("CPU seconds per decision", 1)):
            pairs = zip(results[one], results[way], strict=True)
            ratios = sorted(b[column] / a[column] for a, b in pairs)
            spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{way} / {one}, {name}: {median(ratios):.2f} {spread}")


if __name__ == "__main__":
    main()
