"""Compare the bandits of lbc_discrete.py with fixed and with random indices.

    python benchmarks/bandit_question.py                 run what is missing, then print the table; an hour on one core
    python benchmarks/bandit_question.py --jobs 2        two runs at a time, each in one thread
    python benchmarks/bandit_question.py --table         print the table of the runs so far

The protocol, written down before the runs:
 - Three envs, CartPole-v1 (50,000 decisions), Acrobot-v1 (60,000) and Basic (20,000), times three reward scales, 0.01,
   0.1 and 1. Seeds 1 to 5. Everything else is the script's default, not compiled.
 - bandit: --bandit gdi. random: --bandit random. fixed: --bandit fixed with the best of the indices (1, 1, 0.5),
   (10, 10, 0.5) and (50, 50, 0.5), chosen for each env and scale by the mean score on seeds 101 and 102. one: the one
   of these indices that is best over all envs and scales on those seeds.
 - Two measures, in the returns of the env. Training: the mean return of the episodes that ended in the second half of
   the run, including exploration. Greedy: the mean return of 20 new episodes with the greedy policy. An episode that
   does not end within 1,000 decisions, which only Basic allows, counts as the lower end of the env's range.
 - A score is the position of a return in the env's range: CartPole 20 to 500, Acrobot -500 to -80, Basic 0 to 0.93. An
   index is chosen by the mean of the scores of both measures.
 - The verdict: the score of a seed is its mean over the nine combinations. The bandit is better in a measure if its
   mean score is above that of fixed and that of random by more than two standard errors of the seeds' differences.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import argparse
import contextlib
import csv
import io
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onefile_rl.engines.printing import accept_any_encoding  # noqa: E402

CSV = ROOT / "benchmarks" / "results" / "bandit" / "question.csv"
COLUMNS = ("env", "scale", "bandit", "k1", "k2", "e", "seed", "training", "greedy")
STEPS = {"CartPole-v1": 50_000, "Acrobot-v1": 60_000, "Basic": 20_000}
SETTINGS = {  # not the presets, which may change
    "CartPole-v1": {},
    "Acrobot-v1": {},
    "Basic": dict(player_args=("--agents", "16"), gamma_1=0.9, gamma_2=0.9),
}
ENDS = {"CartPole-v1": (20, 500), "Acrobot-v1": (-500, -80), "Basic": (0, 0.93)}
SCALES = (0.01, 0.1, 1.0)
SEEDS = (1, 2, 3, 4, 5)
OTHERS = (101, 102)  # the seeds that indices are chosen by
INDICES = ((1.0, 1.0, 0.5), (10.0, 10.0, 0.5), (50.0, 50.0, 0.5))
CELLS = [(env, scale) for env in STEPS for scale in SCALES]
NONE = (0.0, 0.0, 0.0)  # in the columns k1, k2 and e of a run without a fixed index
EPISODES = 20


def one_run(job):
    """Return the two measures of one run."""
    import lbc_discrete as lbc
    from onefile_rl import checkpoints
    from onefile_rl.evaluate import evaluate

    # Train
    env, scale, bandit, *index, seed = job
    settings = SETTINGS[env] | dict(
        total_timesteps=STEPS[env], reward_scale=scale, bandit=bandit, seed=seed
    )
    if bandit == "fixed":
        settings["fixed_index"] = tuple(index)
    args = lbc.Args(env_id=env, eval_interval=0, compile=False, **settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        lbc.train(args)
        (run,) = Path("runs").iterdir()
        state = checkpoints.load(run, lbc.__file__)[1]
    if state["global_step"] < STEPS[env]:
        raise RuntimeError(f"{job} was stopped after {state['global_step']} decisions")
    history = state["kept"]["bandit"]["history"].numpy()
    training = history[history[:, 0] > STEPS[env] / 2, 4].mean()

    # Evaluate the greedy policy
    agent = lbc.Agent(state["spec"], args)
    agent.load_state_dict(state["kept"]["agent"])
    envs, _ = lbc.make_envs(replace(args, num_envs=EPISODES), seed + 1000)
    with contextlib.closing(envs):
        play = lbc.play(agent.eval(), state["spec"], envs.num_envs)
        results = evaluate(play, envs, EPISODES, seed + 1000, steps=1000)
    returns = results[0] if len(results) else np.zeros(0)
    missing = np.full(EPISODES - len(returns), float(ENDS[env][0]))
    return training, np.concatenate([returns, missing]).mean()


def read():
    """Return the measures of the runs so far, by job."""
    if not CSV.exists():
        return {}
    with open(CSV) as file:
        rows = list(csv.reader(file))[1:]
    have = {}
    for env, scale, bandit, k1, k2, epsilon, seed, training, greedy in rows:
        job = (env, float(scale), bandit, float(k1), float(k2), float(epsilon), int(seed))
        have[job] = (float(training), float(greedy))
    return have


def run(jobs, count, have):
    """Run the jobs that are missing, `count` at a time, and write each result when it is there."""
    missing = [job for job in jobs if job not in have]
    CSV.parent.mkdir(parents=True, exist_ok=True)
    if missing and not CSV.exists():
        CSV.write_text(",".join(COLUMNS) + "\n")
    pool = ProcessPoolExecutor(count, get_context("spawn"))
    try:
        tasks = {pool.submit(one_run, job): job for job in missing}
        for done, task in enumerate(as_completed(tasks), 1):
            job = tasks[task]
            have[job] = task.result()
            with open(CSV, "a") as file:
                csv.writer(file, lineterminator="\n").writerow(
                    [*job, *(f"{x:.6g}" for x in have[job])]
                )
            print(
                f"{done}/{len(missing)} {job}: training {have[job][0]:.3g}, greedy {have[job][1]:.3g}",
                flush=True,
            )
    finally:
        pool.shutdown(cancel_futures=True)


def score(env, returns):
    """Return the positions of returns in the env's range."""
    low, high = ENDS[env]
    return (np.array(returns) - low) / (high - low)


def chosen(have):
    """Return the best index of each cell, and the best one for all cells, by the other seeds."""
    scores = np.zeros((len(CELLS), len(INDICES)))
    for i, cell in enumerate(CELLS):
        for j, index in enumerate(INDICES):
            scores[i, j] = np.mean(
                [score(cell[0], have[(*cell, "fixed", *index, seed)]) for seed in OTHERS]
            )
    each = {cell: INDICES[j] for cell, j in zip(CELLS, scores.argmax(1), strict=True)}
    return each, INDICES[scores.mean(0).argmax()]


def methods(have):
    """Return, by method, a function from a cell to the bandit and the index of its runs."""
    each, one = chosen(have)
    return {
        "bandit": lambda cell: ("gdi", *NONE),
        "random": lambda cell: ("random", *NONE),
        "fixed": lambda cell: ("fixed", *each[cell]),
        "one": lambda cell: ("fixed", *one),
    }


def table(have):
    """Print the table of each measure, and the differences between the methods."""
    each, one = chosen(have)
    ways = methods(have)
    for k, measure in enumerate(("training", "greedy")):
        print(f"\n{measure}, mean ± std of seeds {SEEDS[0]} to {SEEDS[-1]}\n")
        print(
            "| env | scale | "
            + " | ".join(ways)
            + " | fixed's index |\n|"
            + "---|" * (len(ways) + 3)
        )
        scores = {name: [] for name in ways}
        for cell in CELLS:
            line = f"| {cell[0]} | {cell[1]:g} |"
            digits = 0 if np.ptp(ENDS[cell[0]]) > 10 else 2
            for name, way in ways.items():
                returns = [have[(*cell, *way(cell), seed)][k] for seed in SEEDS]
                scores[name].append(score(cell[0], returns))
                line += f" {np.mean(returns):.{digits}f} ± {np.std(returns):.{digits}f} |"
            print(f"{line} {', '.join(f'{x:g}' for x in each[cell])} |")
        seeds = {name: np.mean(x, 0) for name, x in scores.items()}
        print(
            "| score | | "
            + " | ".join(f"{x.mean():.3f} ± {x.std():.3f}" for x in seeds.values())
            + " | |"
        )
        for other in ("fixed", "one", "random"):
            gap = seeds["bandit"] - seeds[other]
            error = gap.std(ddof=1) / len(gap) ** 0.5
            word = (
                "above"
                if gap.mean() > 2 * error
                else "below"
                if gap.mean() < -2 * error
                else "neither"
            )
            print(f"bandit - {other}: {gap.mean():+.3f}, standard error {error:.3f}: {word}")
    print(f"\none index for all: {one}")


def main():
    accept_any_encoding()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="the number of runs at a time")
    parser.add_argument("--table", action="store_true", help="print the table of the runs so far")
    args = parser.parse_args()
    have = read()
    if not args.table:
        fixed = [
            (*cell, "fixed", *index, seed) for seed in OTHERS for cell in CELLS for index in INDICES
        ]
        free = [
            (*cell, way, *NONE, seed)
            for seed in SEEDS
            for cell in CELLS
            for way in ("gdi", "random")
        ]
        run(fixed + free, args.jobs, have)
        ways = methods(have)
        rest = [
            (*cell, *ways[name](cell), seed)
            for seed in SEEDS
            for cell in CELLS
            for name in ("fixed", "one")
        ]
        run(list(dict.fromkeys(rest)), args.jobs, have)
    try:
        table(have)
    except KeyError as error:
        raise SystemExit(f"{CSV} has no row of {error} yet: run without --table first") from None


if __name__ == "__main__":
    main()
