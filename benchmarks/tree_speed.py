"""Compare the training speed of two checkouts of this repository, OLD and NEW, on this machine.

    python benchmarks/tree_speed.py ../before .                          all rows, three rounds
    python benchmarks/tree_speed.py ../before . --rows ppo-1 sac         only these rows
    python benchmarks/tree_speed.py ../before . --rounds 1 --steps sac=500 crawler=20480
    python benchmarks/tree_speed.py ../before . --rounds 0 --first-compile

Each row of the table is one script with one environment. Its two checkouts run alternately with the
same options, OLD first in one round and NEW first in the next, so that other load on the machine
affects both. A round of all rows takes about six minutes on two idle cores. The speed is that of
the run's last line of progress, in decisions per second; it does not include the time for
compiling. The ratio is the median of NEW / OLD over the rounds, followed by its range.

--first-compile measures how long the very first compilation of an update takes, with an empty cache
of the compiler.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass
class Row:
    """A script, its options, and the number of decisions of a run.

    `first_steps` is the number of decisions after which the update has been called, for
    --first-compile. It is None if the update of this script is not compiled.
    """

    script: str
    options: str
    steps: int
    first_steps: int | None = None


# Settings that affect the speed are explicit: the presets of the two checkouts may differ.
PPO = "--update-epochs 10 --hidden-sizes 64 64 --activation tanh"
CHEETAH = f"--env-id HalfCheetah-v5 --compile --num-minibatches 32 --logstd-init 0 --norm-adv {PPO}"
ROWS = {
    "ppo-1": Row(
        "ppo_continuous_multiagent.py",
        f"{CHEETAH} --num-envs 1 --num-steps 2048",
        steps=40_960,
        first_steps=2048,
    ),
    "ppo-8": Row(
        "ppo_continuous_multiagent.py",
        f"{CHEETAH} --num-envs 8 --num-steps 256",
        steps=61_440,
        first_steps=2048,
    ),
    "sac": Row(
        "sac_continuous.py",
        "--env-id HalfCheetah-v5 --compile --num-envs 1 --batch-size 256 --hidden-sizes 256 256 "
        "--activation relu --learning-starts 100 --updates-per-step 1",
        steps=2000,
        first_steps=200,
    ),
    "discrete": Row(
        "ppo_discrete_multiagent.py",
        "--env-id CartPole-v1 --compile --num-envs 8 --num-steps 128 --num-minibatches 8 "
        f"--norm-adv {PPO}",
        steps=102_400,
        first_steps=1024,
    ),
    "memory": Row(
        "ppo_lstm_multiagent.py",
        "--env-id CartPoleBlind-v0 --num-envs 8 --num-steps 128 --num-minibatches 4 "
        "--update-epochs 10 --hidden-sizes 64 --memory-size 128 --sequence-length 64",
        steps=20_480,
    ),
    "pixels": Row(
        "ppo_pixel.py",
        "--env-id DummyPixels-v0 --no-compile --num-envs 8 --num-steps 256 --num-minibatches 8 "
        "--update-epochs 4 --features 512",
        steps=8192,
    ),
    "3dball": Row(
        "ppo_continuous_multiagent.py",
        "--env-id 3DBall --compile --num-players 1 --num-steps 512 --num-minibatches 96 "
        "--update-epochs 3 --hidden-sizes 128 128 --activation tanh",
        steps=36_864,
        first_steps=6144,
    ),
    "crawler": Row(
        "ppo_continuous_multiagent.py",
        "--env-id Crawler --compile --num-players 2 --num-steps 1024 --num-minibatches 10 "
        "--update-epochs 3 --hidden-sizes 512 512 512 --activation silu",
        steps=40_960,
        first_steps=20_480,
    ),
}


def train(tree, row, steps, **environment):
    """Return the output of a run of the row's script in the checkout `tree`."""
    command = [sys.executable, str(tree / row.script), *row.options.split()]
    command += ["--seed", "1", "--total-timesteps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(tree), **environment}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["the run printed no error"]
        raise SystemExit(f"{tree / row.script} failed: {lines[-1]}")
    return result.stdout


def measure_speed(tree, row, steps):
    """Return the decisions per second of a run."""
    return float(re.findall(r"(\d+) SPS", train(tree, row, steps))[-1])


def measure_first_compile(tree, row):
    """Return the seconds that compiling the update takes with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        output = train(tree, row, row.first_steps, TORCHINDUCTOR_CACHE_DIR=cache)
    seconds = [float(x) for x in re.findall(r"Compiled the update in ([\d.]+) s", output)]
    if not seconds:
        raise SystemExit(f"{tree / row.script} did not compile its update:\n{output.strip()}")
    return sum(seconds)


def take_turns(measure, trees, rounds):
    """Return the results of `measure(tree)` for each tree, one per round."""
    results = {tree: [] for tree in trees}
    for number in range(rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            results[tree].append(measure(tree))
    return [results[tree] for tree in trees]


def print_row(name, old, new, digits):
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    cells = [
        f"{name:<10}",
        f"{median(old):>12,.{digits}f}",
        f"{median(new):>12,.{digits}f}",
        f"{median(ratios):>10.2f}",
        f"{spread:>16}",
    ]
    print("".join(cells), flush=True)


def print_header(unit):
    header = f"{'':<10}{'OLD':>12}{'NEW':>12}{'NEW / OLD':>10}{'range':>16}"
    print(f"\n{unit}, medians\n{header}", flush=True)


def read_steps(parser, words):
    """Return the number of decisions by row. `words` are like "sac=500"."""
    steps = {name: row.steps for name, row in ROWS.items()}
    for word in words:
        name, _, number = word.partition("=")
        if name not in ROWS or not number.isdecimal() or int(number) == 0:
            parser.error(f"--steps {word}: give ROW=STEPS, ROW is one of {', '.join(ROWS)}")
        steps[name] = int(number)
    return steps


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="the folder of one checkout")
    parser.add_argument("new", type=Path, metavar="NEW", help="the folder of the other checkout")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout per row")
    parser.add_argument(
        "--steps", nargs="+", default=[], metavar="ROW=STEPS", help="decisions of a run of this row"
    )
    parser.add_argument(
        "--first-compile", action="store_true", help="also measure the first compilation"
    )
    args = parser.parse_args()

    # Refuse bad arguments before any run
    steps = read_steps(parser, args.steps)
    trees = [args.old.resolve(), args.new.resolve()]
    for tree in trees:
        for name in args.rows:
            if not (tree / ROWS[name].script).is_file():
                parser.error(f"{tree} has no {ROWS[name].script}: give the folder of a checkout")
    if args.rounds < 0:
        parser.error(f"--rounds {args.rounds}: must be 0 or more")
    if trees[0] == trees[1]:
        parser.error(f"{args.old} and {args.new} are the same folder: give two checkouts")

    print(f"OLD: {trees[0]}\nNEW: {trees[1]}")
    if args.rounds:
        print_header("Training speed, decisions per second")
        for name in args.rows:
            measure = lambda tree: measure_speed(tree, ROWS[name], steps[name])
            print_row(name, *take_turns(measure, trees, args.rounds), digits=0)

    if args.first_compile:
        print_header("First compilation with an empty cache, seconds")
        for name in args.rows:
            if ROWS[name].first_steps is None:
                continue
            measure = lambda tree: measure_first_compile(tree, ROWS[name])
            print_row(name, *take_turns(measure, trees, 1), digits=1)


if __name__ == "__main__":
    main()
