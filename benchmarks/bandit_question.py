"""Does the bandit of lbc_discrete.py earn its place? One setting of it against fixed and random indices.

    python benchmarks/bandit_question.py                 run what is missing, then the table; an hour of one core
    python benchmarks/bandit_question.py --jobs 2        so many runs at a time, each in one thread
    python benchmarks/bandit_question.py --table         the table of what there is

The protocol, written down before the runs:
 - Three envs, CartPole-v1 (50,000 decisions), Acrobot-v1 (60,000) and Basic (20,000), times three scales of the rewards
   that the networks learn from, 0.01, 0.1 and 1; seeds 1 to 5. All else is the script's default, not compiled.
 - bandit: --bandit gdi. random: --bandit random. fixed: --bandit fixed with the best of the indices (1, 1, 0.5),
   (10, 10, 0.5) and (50, 50, 0.5), chosen for each env and scale by the mean score on seeds 101 and 102. one: the index
   of the three that is best over all envs and scales on those seeds, for who does not want to choose.
 - Two measures, in the env's own returns. Training: the mean return of the episodes that ended in the second half of
   the run, exploration and all. Greedy: the mean return of 20 new episodes with the saved policy's best choices; one
   that does not end within 1,000 decisions, which only Basic allows, counts as the lower end.
 - A score is where a return lies between the env's ends: CartPole 20 to 500, Acrobot -500 to -80, Basic 0 to 0.93. An
   index is chosen by the mean of the two measures' scores.
 - The verdict: a seed's score is its mean over the nine combinations. The bandit earns its place in a measure if its
   mean score is above fixed's and above random's by more than two standard errors of the seeds' differences.
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
CSV = ROOT / "benchmarks" / "results" / "bandit" / "question.csv"
COLUMNS = ("env", "scale", "bandit", "k1", "k2", "e", "seed", "training", "greedy")
STEPS = {"CartPole-v1": 50_000, "Acrobot-v1": 60_000, "Basic": 20_000}
SETTINGS = {"CartPole-v1": {}, "Acrobot-v1": {}}  # a preset may become another one, what was asked does not
SETTINGS["Basic"] = dict(player_args=("--agents", "16"), gamma_1=0.9, gamma_2=0.9)
ENDS = {"CartPole-v1": (20, 500), "Acrobot-v1": (-500, -80), "Basic": (0, 0.93)}
SCALES, SEEDS, OTHERS = (0.01, 0.1, 1.0), (1, 2, 3, 4, 5), (101, 102)
INDICES = ((1.0, 1.0, 0.5), (10.0, 10.0, 0.5), (50.0, 50.0, 0.5))
CELLS = [(env, scale) for env in STEPS for scale in SCALES]
NONE = (0.0, 0.0, 0.0)  # where nobody fixed one
EPISODES = 20


def one_run(job):
    """The two measures of one run."""
    import checkpoints
    import lbc_discrete as lbc
    from policies import evaluate

    env, scale, bandit, *index, seed = job
    settings = SETTINGS[env] | dict(total_timesteps=STEPS[env], reward_scale=scale, bandit=bandit, seed=seed)
    settings |= dict(eval_interval=0, compile=False) | (dict(fixed_index=tuple(index)) if bandit == "fixed" else {})
    args = lbc.Args(env_id=env, **settings)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        lbc.train(args)
        (run,) = Path("runs").iterdir()
        state = checkpoints.load(run, lbc.__file__)[1]
    if state["global_step"] < STEPS[env]:
        raise RuntimeError(f"{job} was asked to stop after {state['global_step']} decisions")
    told = state["kept"]["bandit"]["told"].numpy()
    training = told[told[:, 0] > STEPS[env] / 2, 4].mean()
    agent = lbc.Agent(state["spec"], args)
    agent.load_state_dict(state["kept"]["agent"])
    envs, _ = lbc.make_envs(replace(args, num_envs=EPISODES), seed + 1000)
    with contextlib.closing(envs):
        play = lbc.play(agent.eval(), state["spec"], envs.num_envs)
        results = evaluate(play, envs, EPISODES, seed + 1000, steps=1000)
    returns = results[0] if len(results) else np.zeros(0)
    return training, np.concatenate([returns, np.full(EPISODES - len(returns), float(ENDS[env][0]))]).mean()


def read():
    if not CSV.exists():
        return {}
    with open(CSV) as file:
        rows = list(csv.reader(file))[1:]
    return {
        (row[0], float(row[1]), row[2], *map(float, row[3:6]), int(row[6])): (*map(float, row[7:]),) for row in rows
    }


def run(jobs, count, have):
    """What is missing of these, each kept as soon as it is there."""
    missing = [job for job in jobs if job not in have]
    CSV.parent.mkdir(parents=True, exist_ok=True)
    if missing and not CSV.exists():
        CSV.write_text(",".join(COLUMNS) + "\n")
    pool = ProcessPoolExecutor(count, get_context("spawn"))
    try:
        tasks = {pool.submit(one_run, job): job for job in missing}
        for done, task in enumerate(as_completed(tasks), 1):
            job, have[tasks[task]] = tasks[task], task.result()
            with open(CSV, "a") as file:
                csv.writer(file, lineterminator="\n").writerow([*job, *(f"{x:.6g}" for x in have[job])])
            print(f"{done}/{len(missing)} {job}: training {have[job][0]:.3g}, greedy {have[job][1]:.3g}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


def score(env, returns):
    low, high = ENDS[env]
    return (np.array(returns) - low) / (high - low)


def chosen(have):
    """The index of each cell, and the one for all, by the other seeds."""
    scores = np.array(
        [
            [np.mean([score(cell[0], have[(*cell, "fixed", *index, seed)]) for seed in OTHERS]) for index in INDICES]
            for cell in CELLS
        ]
    )
    return {cell: INDICES[k] for cell, k in zip(CELLS, scores.argmax(1), strict=True)}, INDICES[scores.mean(0).argmax()]


def methods(have):
    """Each one's bandit and index in a cell."""
    each, one = chosen(have)
    return {
        "bandit": lambda cell: ("gdi", *NONE),
        "random": lambda cell: ("random", *NONE),
        "fixed": lambda cell: ("fixed", *each[cell]),
        "one": lambda cell: ("fixed", *one),
    }


def table(have):
    each, one = chosen(have)
    ways = methods(have)
    for k, measure in enumerate(("training", "greedy")):
        print(f"\n{measure}, mean ± std of seeds {SEEDS[0]} to {SEEDS[-1]}\n")
        print("| env | scale | " + " | ".join(ways) + " | fixed's index |\n|" + "---|" * (len(ways) + 3))
        scores = {name: [] for name in ways}
        for cell in CELLS:
            line, digits = f"| {cell[0]} | {cell[1]:g} |", 0 if np.ptp(ENDS[cell[0]]) > 10 else 2
            for name, way in ways.items():
                returns = [have[(*cell, *way(cell), seed)][k] for seed in SEEDS]
                scores[name].append(score(cell[0], returns))
                line += f" {np.mean(returns):.{digits}f} ± {np.std(returns):.{digits}f} |"
            print(f"{line} {', '.join(f'{x:g}' for x in each[cell])} |")
        seeds = {name: np.mean(x, 0) for name, x in scores.items()}
        print("| score | | " + " | ".join(f"{x.mean():.3f} ± {x.std():.3f}" for x in seeds.values()) + " | |")
        for other in ("fixed", "one", "random"):
            gap = seeds["bandit"] - seeds[other]
            error = gap.std(ddof=1) / len(gap) ** 0.5
            word = "above" if gap.mean() > 2 * error else "below" if gap.mean() < -2 * error else "neither"
            print(f"bandit - {other}: {gap.mean():+.3f}, standard error {error:.3f}: {word}")
    print(f"\none index for all: {one}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    have = read()
    if not args.table:
        fixed = [(*cell, "fixed", *index, seed) for seed in OTHERS for cell in CELLS for index in INDICES]
        free = [(*cell, way, *NONE, seed) for seed in SEEDS for cell in CELLS for way in ("gdi", "random")]
        run(fixed + free, args.jobs, have)
        ways = methods(have)
        rest = [(*cell, *ways[name](cell), seed) for seed in SEEDS for cell in CELLS for name in ("fixed", "one")]
        run(list(dict.fromkeys(rest)), args.jobs, have)
    try:
        table(have)
    except KeyError as error:
        raise SystemExit(f"{CSV} has no row of {error} yet: run without --table first") from None


if __name__ == "__main__":
    main()
