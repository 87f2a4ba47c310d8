"""Make all learning curves of the docs: scripts, envs and seeds, and SB3 for comparison.

    python benchmarks/run.py --quick                a small set, five minutes on two cores
    python benchmarks/run.py --full --jobs 2        the curves of the docs, about a day on two cores
    python benchmarks/run.py --full --list          list complete and missing runs, run nothing
    python benchmarks/run.py --full CartPole-v1     only these envs
    python benchmarks/plots.py                      then draw pictures and tables

The curves are saved in benchmarks/results, with --quick in benchmarks/results/quick; give the same
folder to plots.py with --out. A run that has a CSV with at least nine tenths of its decisions is
not repeated: after Ctrl-C, the same command continues with the missing runs, and starts an
interrupted run from its beginning. If a run fails, its error is printed, the others continue, and the exit code
is 1. With --jobs above 1, each run uses one thread.

The output of a run is in OUT/logs, the evaluation of its saved policy in OUT/ENV.SCRIPT.SEED.txt.
learning.py makes the individual runs.
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

PPO = "ppo_continuous_multiagent.py"
DISCRETE = "ppo_discrete_multiagent.py"
HYBRID = "ppo_hybrid_multiagent.py"
LSTM = "ppo_lstm_multiagent.py"
SAC = "sac_continuous.py"
CROSSQ = "crossq_continuous.py"
BANDIT = "lbc_discrete.py"
PIXELS = "ppo_pixel.py"
ONE = (1,)
TWO = (1, 2)
THREE = (1, 2, 3)
FIVE = (1, 2, 3, 4, 5)
TEN = tuple(range(1, 11))
BLIND = "--num-envs 8 --num-steps 128 --num-minibatches 4 --learning-rate 1e-3"
SB3_SETTINGS = (
    "--compile --num-envs 1 --num-steps 2048 --hidden-sizes 64 64 --activation tanh "
    "--logstd-init 0 --norm-adv --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95 --vf-coef 0.5"
)
HALL = (
    "--player-args=--agents=64 --num-steps 64 --num-minibatches 8 --update-epochs 4 "
    "--learning-rate 1e-3 --ent-coef 0.02 --no-norm-reward --hidden-sizes 128 128 --activation silu"
)
LESSONS = f"--curriculum {learning.ROOT / 'envs' / 'unity_scenes' / 'sorter.yaml'}"


@dataclass
class Row:
    """A script and an env.

    more: further options of the script
    evaluate: how many episodes to evaluate the saved policy with
    label: the name of the curve, instead of the script's name
    sb3: the algorithm of SB3 to run with the same settings, with the seeds sb3_seeds
    """

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
    Row(DISCRETE, "CartPole-v1", TWO, 50_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=TWO),
    Row(DISCRETE, "Acrobot-v1", TWO, 100_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=TWO),
    Row(DISCRETE, "Basic", TWO, 30_000, "--no-compile"),
    Row(PPO, "Reacher2Dof-v0", TWO, 150_000, "--no-compile", evaluate=100),
    Row(PPO, "3DBall", TWO, 120_000, "--no-compile"),
    Row(SAC, "3DBall", TWO, 60_000, "--no-compile"),
    Row(LSTM, "CartPoleBlind-v0", ONE, 60_000, "--no-compile"),
    Row(BANDIT, "CartPole-v1", ONE, 50_000, "--no-compile"),
    Row(PIXELS, "DummyPixels-v0", ONE, 50_000, "--no-compile"),
]
FULL = [
    Row(PPO, "3DBall", THREE, 150_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=THREE),
    Row(
        PPO,
        "3DBall",
        THREE,
        300_000,
        "--no-compile --env-parameters 'mass=uniform(0.5,10)' 'scale=uniform(0.75,3)'",
        label="sampled",
        evaluate=100,
    ),
    Row(
        PPO,
        "3DBall",
        THREE,
        150_000,
        "--no-compile --env-parameters gravity=15 scale=2.5",
        label="physics-new",
    ),
    Row(PPO, "HalfCheetah-v5", TEN, 1_000_000, "--compile", evaluate=20),
    Row(
        PPO,
        "HalfCheetah-v5",
        THREE,
        1_000_000,
        SB3_SETTINGS,
        label="sb3-settings",
        sb3="sb3-ppo",
        sb3_seeds=THREE,
    ),
    Row(PPO, "Hopper-v5", TEN, 1_000_000, "--compile", evaluate=20),
    Row(
        PPO,
        "Hopper-v5",
        THREE,
        1_000_000,
        SB3_SETTINGS,
        label="sb3-settings",
        sb3="sb3-ppo",
        sb3_seeds=THREE,
        evaluate=20,
    ),
    Row(PPO, "Walker2d-v5", TEN, 1_000_000, "--compile", evaluate=20),
    Row(
        PPO,
        "Walker2d-v5",
        THREE,
        1_000_000,
        SB3_SETTINGS,
        label="sb3-settings",
        sb3="sb3-ppo",
        sb3_seeds=THREE,
        evaluate=20,
    ),
    Row(PPO, "Ant-v5", THREE, 1_000_000, "--compile", evaluate=20),
    Row(PPO, "Humanoid-v5", THREE, 1_000_000, "--compile", evaluate=20),
    Row(PPO, "Reacher2Dof-v0", FIVE, 300_000, "--compile", evaluate=200),
    Row(
        PPO,
        "Reacher2Dof-v0",
        THREE,
        300_000,
        "--compile --num-envs 1 --num-steps 2048",
        evaluate=200,
        label="one-env",
    ),
    Row(PPO, "Reacher3Dof-v0", FIVE, 400_000, "--compile", evaluate=200),
    Row(PPO, "Reacher6Dof-v0", THREE, 500_000, "--compile", evaluate=200),
    Row(PPO, "ReacherPlane-v0", THREE, 200_000, "--compile", evaluate=200),
    Row(PPO, "GodotDiscs", THREE, 40_960, "--no-compile", evaluate=160),
    Row(DISCRETE, "CartPole-v1", THREE, 100_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=THREE),
    Row(DISCRETE, "Acrobot-v1", THREE, 200_000, "--no-compile", sb3="sb3-ppo", sb3_seeds=THREE),
    Row(DISCRETE, "LunarLander-v3", THREE, 1_000_000, "--no-compile", evaluate=100),
    Row(
        DISCRETE,
        "Basic",
        THREE,
        50_000,
        "--no-compile",
        evaluate=64,
        sb3="sb3-maskable-ppo",
        sb3_seeds=THREE,
    ),
    Row(DISCRETE, "PushBlock", THREE, 500_000, "--no-compile", evaluate=96),
    Row(DISCRETE, "Sorter", ONE, 5_000_000, f"--no-compile {LESSONS}", label="curriculum"),
    Row(
        DISCRETE,
        "Sorter",
        ONE,
        1_000_000,
        f"--no-compile --flat-entities {LESSONS}",
        label="curriculum-flat",
    ),
    Row(DISCRETE, "GodotRover", ONE, 200_000, "--no-compile", evaluate=200),
    Row(DISCRETE, "CartPoleBlind-v0", THREE, 300_000, f"--no-compile {BLIND}", evaluate=100),
    Row(LSTM, "CartPoleBlind-v0", THREE, 300_000, evaluate=100),
    Row(SAC, "3DBall", THREE, 60_000, "--no-compile"),
    Row(SAC, "HalfCheetah-v5", THREE, 100_000, "--compile", sb3="sb3-sac"),
    Row(
        SAC,
        "HalfCheetah-v5",
        ONE,
        1_000_000,
        "--compile",
        evaluate=20,
        label="sac_continuous-million",
    ),
    Row(SAC, "Hopper-v5", THREE, 100_000, "--compile", sb3="sb3-sac"),
    Row(SAC, "Walker2d-v5", ONE, 1_000_000, "--compile", evaluate=20),
    Row(CROSSQ, "HalfCheetah-v5", ONE, 1_000_000, "--compile", evaluate=20),
    Row(CROSSQ, "Walker2d-v5", ONE, 1_000_000, "--compile", evaluate=20),
    Row(CROSSQ, "3DBall", THREE, 60_000, "--no-compile"),
    Row(SAC, "Reacher3Dof-v0", THREE, 100_000, "--compile", evaluate=200),
    Row(SAC, "GodotDiscs", ONE, 40_000, "--no-compile", evaluate=200),
    Row(SAC, "Crawler", ONE, 1_000_000, "--compile", evaluate=40),
    Row(BANDIT, "CartPole-v1", FIVE, 100_000, "--no-compile", evaluate=100),
    Row(BANDIT, "Acrobot-v1", FIVE, 150_000, "--compile", evaluate=100),
    Row(BANDIT, "LunarLander-v3", THREE, 800_000, "--compile", evaluate=100),
    Row(BANDIT, "Basic", THREE, 50_000, "--no-compile", evaluate=100),
    Row(BANDIT, "InvertedPendulum-v5", THREE, 100_000, "--no-compile --bins 11", evaluate=100),
    Row(
        BANDIT,
        "Pendulum-v1",
        THREE,
        200_000,
        "--no-compile --bins 5 --reward-scale 0.01",
        evaluate=100,
    ),
    Row(PIXELS, "DummyPixels-v0", THREE, 100_000, "--no-compile", evaluate=200),
    Row(PIXELS, "DummyPixelsDiscrete-v0", THREE, 100_000, "--no-compile", evaluate=200),
    Row(PIXELS, "GridWorld", ONE, 100_000, "--no-compile", evaluate=200),
    Row(
        PIXELS,
        "InvertedPendulum-v5",
        ONE,
        150_000,
        "--no-compile --from-pixels",
        sb3="sb3-ppo-pixel",
    ),
    Row(PIXELS, "Reacher-v5", ONE, 150_000, "--no-compile --from-pixels", sb3="sb3-ppo-pixel"),
    Row(HYBRID, "FoodCollector", THREE, 2_000_000, evaluate=40),
    # These take hours each, so they are the last
    Row(DISCRETE, "Hallway", ONE, 1_000_000, f"--no-compile {HALL}"),
    Row(LSTM, "Hallway", THREE, 4_000_000, evaluate=256),
    Row(PPO, "Crawler", THREE, 10_000_000, evaluate=40),
    Row(
        PPO,
        "Crawler",
        ONE,
        10_000_000,
        "--player-args=--randomize=0.1",
        label="randomized",
        evaluate=40,
    ),
]
# The share of its decisions that a complete curve has. It ends before the total, because an
# iteration that would exceed the total is not started
ENOUGH = 0.9
POLL_SECONDS = 15  # between two lines about the progress of the runs


class Job:
    """One run: a row and a seed. `what` is the script or the algorithm of SB3."""

    def __init__(self, row, what, label, seed, evaluate, out, jobs):
        self.seed = seed
        self.total = row.total
        self.more = ["--total-timesteps", str(row.total), *shlex.split(row.more)]
        if label:  # another run of this script, env and seed may have no label
            self.more += ["--exp-name", label]
        self.args = SimpleNamespace(
            what=what,
            script=learning.find_script(what),
            env_id=row.env,
            label=label,
            evaluate=evaluate,
            run=None,
            out=out,
            jobs=jobs,
            quiet=True,
        )
        self.path = learning.csv_of(seed, self.args, self.more)
        self.args.log = out / "logs" / f"{self.path.stem}.txt"
        self.name = self.path.stem.replace(".", " ")

    def complete(self):
        """Return whether there is a complete curve."""
        try:
            return learning.read_csv(self.path)["decisions"][-1] >= ENOUGH * self.total
        except (OSError, ValueError):
            return False

    def progress(self):
        """Return the progress from the log, in percent."""
        try:
            text = self.args.log.read_text()
        except OSError:
            return "0%"
        steps = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) steps", text)]
        return f"{min(1, steps[-1] / self.total):.0%}" if steps else "0%"

    def run(self):
        """Run, and return the result as text and whether the curve is complete."""
        start = time.monotonic()
        curve, evaluation, error = learning.run(self.seed, self.args, self.more)
        if not error and not self.complete():
            error = f"ended after {curve['decisions'][-1]:,.0f} of {self.total:,} decisions"
        if error:
            return f"failed: {error}", False
        text = f"{learning.summary(curve)}, {time.monotonic() - start:.0f} s"
        if evaluation and re.search(r" (±|\+-) ", evaluation):
            _, _, result = evaluation.strip().rpartition(" after ")  # without the run's folder
            self.path.with_suffix(".txt").write_text(f"After {result}\n")
        elif evaluation:
            text += f"; not evaluated: {evaluation.strip()}"
        return text, True


def jobs_of(rows, out, jobs):
    """Yield the runs of all rows."""
    for row in rows:
        for seed in row.seeds:
            yield Job(row, row.script, row.label or None, seed, row.evaluate, out, jobs)
        if row.sb3:
            for seed in row.sb3_seeds:
                yield Job(row, row.sb3, None, seed, 0, out, jobs)


def show(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run_all(jobs, num_jobs):
    """Run the jobs, `num_jobs` at a time. Return the names of those that failed."""
    pool = ThreadPoolExecutor(num_jobs)
    failed = []
    num_done = 0
    try:
        tasks = {pool.submit(job.run): job for job in jobs}
        left = set(tasks)
        while left:
            ended, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
            for task in ended:
                text, complete = task.result()
                num_done += 1
                if not complete:
                    failed.append(tasks[task].name)
                show(f"[{num_done}/{len(jobs)}] {tasks[task].name}: {text}")
            if not ended:
                active = [tasks[task] for task in left if task.running()]
                progress = ", ".join(f"{job.name} {job.progress()}" for job in active)
                show(f"running: {progress}")
    except BaseException:
        learning.end_runs()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = sys.exit  # errors are one line, without the usage
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--quick", action="store_true", help="a small set, into results/quick")
    which.add_argument("--full", action="store_true", help="the curves of the docs, into results")
    parser.add_argument("envs", nargs="*", help="only these envs")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="how many runs at a time; default: cores"
    )
    parser.add_argument("--out", type=Path, help="save curves, logs and runs in this folder")
    parser.add_argument(
        "--list", action="store_true", help="list complete and missing runs, run nothing"
    )
    args = parser.parse_args()
    rows = QUICK if args.quick else FULL
    out = args.out or (learning.RESULTS / "quick" if args.quick else learning.RESULTS)
    out = out.resolve()
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be above 0")
    known = sorted({row.env for row in rows})
    for env in args.envs:
        if env not in known:
            raise SystemExit(f"{env}: not one of the envs, which are {', '.join(known)}")

    if args.envs:
        rows = [row for row in rows if row.env in args.envs]
    jobs = list(jobs_of(rows, out, args.jobs))
    missing = [job for job in jobs if not job.complete()]
    if args.list:
        for job in jobs:
            state = "missing " if job in missing else "complete"
            print(f"{state}  {job.name}, {job.total:,} decisions")
        return
    complete = f"{len(jobs) - len(missing)} of {len(jobs)} runs are complete"
    show(f"{complete}, {len(missing)} to run, {args.jobs} at a time: {out}")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    command = f"python {shlex.join(sys.argv)}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = run_all(missing, args.jobs)
    except KeyboardInterrupt:
        print(f"\nStopped. Complete runs are kept. Continue with: {command}", flush=True)
        raise SystemExit(130) from None
    if failed:
        names = ", ".join(failed)
        raise SystemExit(
            f"{len(failed)} failed: {names}. Logs: {out / 'logs'}. Try again with: {command}"
        )
    show(f"All runs are complete. Pictures and tables: python benchmarks/plots.py --out {out}")


if __name__ == "__main__":
    main()
