"""All learning curves of the docs: scripts, envs and seeds, with SB3 beside them where the docs have it.

    python benchmarks/run.py --quick                a first look, five minutes of two cores: benchmarks/results/quick
    python benchmarks/run.py --full --jobs 2        the docs' own, about a day of two cores: benchmarks/results
    python benchmarks/run.py --full --list          what is there and what is missing; nothing is run
    python benchmarks/run.py --full CartPole-v1     of these envs only
    python benchmarks/plots.py                      then: pictures and tables (quick: --out benchmarks/results/quick)

A run is a row's seed. One that has its CSV, with at least nine tenths of its decisions, is not made again: after Ctrl-C
the same command goes on with what is missing, from the start of the run that was interrupted. A run that fails is told
in a line, the others go on, and the exit code is 1. --jobs runs so many at a time, each in one thread if there are
several. What a run says is in OUT/logs, what its saved policy did in OUT/ENV.SCRIPT.SEED.txt. learning.py makes each.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import learning

PPO, CHOICES, MEMORY = "ppo_continuous_multiagent.py", "ppo_discrete_multiagent.py", "ppo_lstm_multiagent.py"
SAC, BANDIT, PIXELS = "sac_continuous.py", "lbc_discrete.py", "ppo_pixel.py"
ONE, TWO, THREE, FIVE = (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4, 5)
BLIND = "--num-envs 8 --num-steps 128 --num-minibatches 4 --learning-rate 1e-3"
SB3_SETTINGS = (
    "--compile --num-envs 1 --num-steps 2048 --hidden-sizes 64 64 --activation tanh --logstd-init 0 --norm-adv"
)
HALL = "--player-args=--agents=64 --num-steps 64 --num-minibatches 8 --update-epochs 4 --learning-rate 1e-3 "
HALL += "--ent-coef 0.02 --no-norm-reward --hidden-sizes 128 128 --activation silu"


@dataclass
class Row:
    """more: further arguments. evaluate: episodes of the saved policy. sb3: the peer, with seeds of its own."""

    script: str
    env: str
    seeds: tuple
    total: int
    more: str = ""
    evaluate: int = 0
    label: str = ""
    sb3: str = ""
    sb3_seeds: tuple = ONE


QUICK = [
    Row(CHOICES, "CartPole-v1", TWO, 50_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=TWO),
    Row(CHOICES, "Acrobot-v1", TWO, 100_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=TWO),
    Row(CHOICES, "Basic", TWO, 30_000, "--no-compile"),
    Row(PPO, "Reacher2Dof-v0", TWO, 150_000, "--no-compile", evaluate=100),
    Row(PPO, "3DBall", TWO, 120_000, "--no-compile"),
    Row(SAC, "3DBall", TWO, 60_000, "--no-compile"),
    Row(MEMORY, "CartPoleBlind-v0", ONE, 60_000, "--no-compile"),
    Row(BANDIT, "CartPole-v1", ONE, 50_000, "--no-compile"),
    Row(PIXELS, "DummyPixels-v0", ONE, 50_000, "--no-compile"),
]
FULL = [
    Row(PPO, "3DBall", THREE, 150_000, "--no-compile"),
    Row(PPO, "HalfCheetah-v5", THREE, 1_000_000, "--compile", evaluate=20),
    Row(PPO, "HalfCheetah-v5", THREE, 1_000_000, SB3_SETTINGS, label="sb3-settings", sb3="sb3-ppo", sb3_seeds=THREE),
    Row(PPO, "Hopper-v5", THREE, 1_000_000, "--compile", sb3="sb3-ppo", sb3_seeds=THREE, evaluate=20),
    Row(PPO, "Walker2d-v5", THREE, 1_000_000, "--compile", sb3="sb3-ppo", sb3_seeds=THREE, evaluate=20),
    Row(PPO, "Reacher2Dof-v0", FIVE, 300_000, "--compile", evaluate=200),
    Row(
        PPO, "Reacher2Dof-v0", THREE, 300_000, "--compile --num-envs 1 --num-steps 2048", evaluate=200, label="one-env"
    ),
    Row(PPO, "Reacher3Dof-v0", FIVE, 400_000, "--compile", evaluate=200),
    Row(PPO, "Reacher6Dof-v0", THREE, 500_000, "--compile", evaluate=200),
    Row(PPO, "ReacherPlane-v0", THREE, 200_000, "--compile", evaluate=200),
    Row(PPO, "GodotDiscs", THREE, 40_960, "--no-compile", evaluate=160),
    Row(CHOICES, "CartPole-v1", THREE, 100_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=THREE),
    Row(CHOICES, "Acrobot-v1", THREE, 200_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=THREE),
    Row(CHOICES, "LunarLander-v3", THREE, 1_000_000, "--no-compile", evaluate=100),
    Row(CHOICES, "Basic", THREE, 50_000, "--no-compile", evaluate=64),
    Row(CHOICES, "PushBlock", THREE, 500_000, "--no-compile", evaluate=96),
    Row(CHOICES, "GodotRover", ONE, 200_000, "--no-compile", evaluate=200),
    Row(CHOICES, "CartPoleBlind-v0", THREE, 300_000, f"--no-compile {BLIND}", evaluate=100),
    Row(MEMORY, "CartPoleBlind-v0", THREE, 300_000, evaluate=100),
    Row(SAC, "3DBall", THREE, 60_000, "--no-compile"),
    Row(SAC, "HalfCheetah-v5", THREE, 100_000, "--compile", sb3="sb3-sac"),
    Row(SAC, "HalfCheetah-v5", ONE, 1_000_000, "--compile", evaluate=20, label="sac_continuous-million"),
    Row(SAC, "Hopper-v5", THREE, 100_000, "--compile", sb3="sb3-sac"),
    Row(SAC, "Reacher3Dof-v0", THREE, 100_000, "--compile", evaluate=200),
    Row(SAC, "GodotDiscs", ONE, 40_000, "--no-compile", evaluate=200),
    Row(SAC, "Crawler", ONE, 1_000_000, "--compile", evaluate=40),
    Row(BANDIT, "CartPole-v1", FIVE, 100_000, "--no-compile", evaluate=100),
    Row(BANDIT, "Acrobot-v1", FIVE, 150_000, "--compile", evaluate=100),
    Row(BANDIT, "LunarLander-v3", THREE, 800_000, "--compile", evaluate=100),
    Row(BANDIT, "Basic", THREE, 50_000, "--no-compile", evaluate=100),
    Row(BANDIT, "InvertedPendulum-v5", THREE, 100_000, "--no-compile --bins 11", evaluate=100),
    Row(BANDIT, "Pendulum-v1", THREE, 200_000, "--no-compile --bins 5 --reward-scale 0.01", evaluate=100),
    Row(PIXELS, "DummyPixels-v0", THREE, 100_000, "--no-compile", evaluate=200),
    Row(PIXELS, "DummyPixelsDiscrete-v0", THREE, 100_000, "--no-compile", evaluate=200),
    Row(PIXELS, "GridWorld", ONE, 100_000, "--no-compile", evaluate=200),
    Row(PIXELS, "InvertedPendulum-v5", ONE, 150_000, "--no-compile --from-pixels", sb3="sb3-ppo-pixel"),
    Row(PIXELS, "Reacher-v5", ONE, 150_000, "--no-compile --from-pixels", sb3="sb3-ppo-pixel"),
    # Hours each, so they come last.
    Row(CHOICES, "Hallway", ONE, 1_000_000, f"--no-compile {HALL}"),
    Row(MEMORY, "Hallway", THREE, 4_000_000, evaluate=256),
    Row(PPO, "Crawler", THREE, 10_000_000, evaluate=40),
    Row(PPO, "Crawler", ONE, 10_000_000, "--player-args=--randomize=0.1", label="randomized", evaluate=40),
]
ENOUGH = 0.9  # of a run's decisions: an iteration that would go beyond the total is not begun, so a curve ends before
LOOK = 15  # seconds between two looks at how far the runs are


class Job:
    """A row's seed, or its peer's: what learning.run() takes."""

    def __init__(self, row, what, label, seed, evaluate, out, jobs):
        self.seed, self.total = seed, row.total
        self.more = ["--total-timesteps", str(row.total), *shlex.split(row.more)]
        self.more += ["--exp-name", label] if label else []  # not to be taken for the same seed's run without it
        script = next((path.resolve() for path in (Path(what), learning.ROOT / what) if path.is_file()), None)
        self.args = SimpleNamespace(what=what, script=script, env_id=row.env, label=label, evaluate=evaluate, run=None)
        self.args.out, self.args.jobs, self.args.quiet = out, jobs, True
        self.path = learning.csv_of(seed, self.args, self.more)
        self.args.log = out / "logs" / f"{self.path.stem}.txt"
        self.name = self.path.stem.replace(".", " ")

    def complete(self):
        """Whether its curve is there and whole."""
        try:
            return learning.read_csv(self.path)["decisions"][-1] >= ENOUGH * self.total
        except (OSError, ValueError):
            return False

    def progress(self):
        """How far it is, as its log says."""
        try:
            text = self.args.log.read_text()
        except OSError:
            return "0%"
        steps = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) steps", text)]
        return f"{min(1, steps[-1] / self.total):.0%}" if steps else "0%"

    def run(self):
        """What came of it, in a line, and whether it is there now."""
        self.start = time.monotonic()
        curve, said, why = learning.run(self.seed, self.args, self.more)
        if not why and not self.complete():
            why = f"ended after {curve['decisions'][-1]:,.0f} of {self.total:,} decisions"
        if why:
            return f"failed: {why}", False
        words = f"{learning.in_words(curve)}, {time.monotonic() - self.start:.0f} s"
        if said and " ± " in said:
            where, _, what = said.strip().rpartition(" after ")  # the run's folder is nobody else's business
            self.path.with_suffix(".txt").write_text(f"After {what}\n")
        elif said:
            words += f"; not evaluated: {said.strip()}"
        return words, True


def jobs_of(rows, out, jobs):
    for row in rows:
        label = row.label or None
        yield from (Job(row, row.script, label, seed, row.evaluate, out, jobs) for seed in row.seeds)
        if row.sb3:
            yield from (Job(row, row.sb3, None, seed, 0, out, jobs) for seed in row.sb3_seeds)


def show(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run_all(todo, jobs):
    """Names of the runs that failed."""
    pool, failed, done = ThreadPoolExecutor(jobs), [], 0
    try:
        tasks = {pool.submit(job.run): job for job in todo}
        left = set(tasks)
        while left:
            ended, left = wait(left, LOOK, FIRST_COMPLETED)
            for task in ended:
                said, fine = task.result()
                done += 1
                failed += [] if fine else [tasks[task].name]
                show(f"[{done}/{len(todo)}] {tasks[task].name}: {said}")
            if not ended:
                show("running: " + ", ".join(f"{tasks[t].name} {tasks[t].progress()}" for t in left if t.running()))
    except BaseException:
        learning.end_runs()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--quick", action="store_true", help="a first look, into results/quick")
    which.add_argument("--full", action="store_true", help="the docs' own, into results")
    parser.add_argument("envs", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many runs at a time; default: one a core")
    parser.add_argument("--out", type=Path, help="keep curves, logs and runs in this folder")
    parser.add_argument("--list", action="store_true", help="say what is there and what is missing, and run nothing")
    args = parser.parse_args()
    rows, out = (QUICK, learning.RESULTS / "quick") if args.quick else (FULL, learning.RESULTS)
    out = (args.out or out).resolve()
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be above 0")
    for env in args.envs:
        if env not in {row.env for row in rows}:
            raise SystemExit(f"{env}: not in the matrix, which has {', '.join(sorted({row.env for row in rows}))}")
    every = list(jobs_of([row for row in rows if row.env in args.envs or not args.envs], out, args.jobs))
    todo = [job for job in every if not job.complete()]
    if args.list:
        for job in every:
            print(f"{'missing' if job in todo else 'there  '}  {job.name}, {job.total:,} decisions")
        return
    show(f"{len(every) - len(todo)} of {len(every)} runs are there, {len(todo)} to go, {args.jobs} at a time: {out}")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    again = f"python {shlex.join([sys.argv[0], *sys.argv[1:]])}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = run_all(todo, args.jobs)
    except KeyboardInterrupt:
        print(f"\nStopped. What is complete is kept. To go on: {again}", flush=True)
        raise SystemExit(130) from None
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}. Logs: {out / 'logs'}. To try again: {again}")
    show(f"All there. Pictures and tables: python benchmarks/plots.py --out {out}")


if __name__ == "__main__":
    main()
