"""The docs' pictures and tables, from the curves that run.py and learning.py keep.

    python benchmarks/plots.py                                      of benchmarks/results
    python benchmarks/plots.py --out benchmarks/results/quick       of another folder
    python benchmarks/plots.py CartPole-v1 Acrobot-v1               of these envs only; tables.md stays as it is

A picture is ENV.png, with SAC's and the bandit's curves, which are shorter, in ENV.sac.png and ENV.lbc.png: the mean of
the seeds with their range, and each seed as a thin line, over decisions and over wall time. A point is the mean over
the 2 % of the decisions before it. Where a seed was stopped on the way there is no mean of all. Curves without a column
`seconds`, kept before there was one, have no wall time: they are named, and left out there.

tables.md, printed too, has a row for each script and env: mean over the last tenth of each seed's decisions, the first
decisions at the goal, success, and what the saved policies did when they were evaluated, if run.py kept that.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from learning import RESULTS, last_tenth, read_csv

TARGETS = {  # what others have published: PPO's best and CleanRL's SAC at a million; ML-Agents' own figures
    "HalfCheetah-v5": (5819, "rl-zoo, tuned, published"),
    "Hopper-v5": (2609, "Tianshou, published"),
    "Walker2d-v5": (3589, "Tianshou, published"),
    "HalfCheetah-v5.sac": (9635, "CleanRL, published, at a million"),
    "3DBall": (100, "ML-Agents' benchmark"),
    "3DBall.sac": (100, "ML-Agents' benchmark"),
    "Crawler": (2353, "Unity's own policy in this scene"),
    "CartPole-v1": (475, "solved"),
    "CartPole-v1.lbc": (475, "solved"),
    "CartPoleBlind-v0": (475, "solved"),
    "LunarLander-v3": (200, "solved"),
    "Basic": (0.93, "ML-Agents' benchmark"),
    "Basic.lbc": (0.93, "ML-Agents' benchmark"),
    "PushBlock": (4.5, "ML-Agents' benchmark"),
    "Hallway": (0.7, "ML-Agents' benchmark"),
    "GodotDiscs": (1.7, "solved"),
    "GodotDiscs.sac": (1.7, "solved"),
    "GodotRover": (1.7, "solved"),
}
GOALS = {  # what the tables look for: a column, its value, and the mean of how many iterations has to be there
    "3DBall": ("return", 95, 1),
    "CartPole-v1": ("return", 475, 1),
    "CartPoleBlind-v0": ("return", 475, 1),
    "Acrobot-v1": ("return", -90, 1),
    "LunarLander-v3": ("return", 200, 1),
    "InvertedPendulum-v5": ("return", 950, 1),
    "Basic": ("return", 0.925, 1),
    "PushBlock": ("return", 4.5, 24),  # short episodes, which are the good ones, end first
    "GridWorld": ("return", 0.8, 1),
    "GodotDiscs": ("return", 1.7, 1),
    "GodotRover": ("return", 1.7, 1),
    "DummyPixels-v0": ("success", 0.95, 1),
    "DummyPixelsDiscrete-v0": ("success", 0.95, 1),
    "Reacher2Dof-v0": ("success", 0.95, 5),
    "Reacher3Dof-v0": ("success", 0.95, 5),
    "Reacher6Dof-v0": ("success", 0.95, 5),
    "ReacherPlane-v0": ("success", 0.95, 5),
}
FAMILIES = ("sac", "lbc")  # with pictures of their own
SMOOTH, POINTS = 0.02, 400
HEADER = ("env", "script", "seeds", "decisions", "over the last tenth", "mean ± std", "first at the goal", "goal")
HEADER += ("success", "evaluated", "seconds")


def read_all(folder, envs=()):
    """Curves by picture and script, each a dict from seed to curve."""
    curves = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("*.csv")):
        env, script, seed = path.stem.rsplit(".", 2)
        if envs and env not in envs:
            continue
        try:
            family = next((f".{name}" for name in FAMILIES if name in script), "")
            curves[env + family][script][int(seed)] = read_csv(path)
        except ValueError:
            print(f"{path.name} is not a whole curve: left out")
    if not curves:
        raise SystemExit(f"{folder} has no curves{' of ' + ', '.join(envs) if envs else ''}: run a script first")
    return curves


def env_of(picture):
    env, _, family = picture.rpartition(".")
    return env if family in FAMILIES else picture


# Pictures


def smoothed(curve):
    """At each point the mean of the iterations in the last 2 % of the decisions before it."""
    steps, sums = curve["decisions"], np.concatenate([[0], np.cumsum(curve["return"])])
    begin = np.searchsorted(steps, steps - SMOOTH * steps[-1], "right")
    end = np.arange(1, len(steps) + 1)
    return (sums[end] - sums[begin]) / (end - begin)


def alike(runs):
    """Whether they went about equally far: one that stopped on the way has no mean with the others."""
    ends = [curve["decisions"][-1] for curve in runs]
    return min(ends) > 0.9 * max(ends)


def draw_curves(axes, column, scripts):
    for k, (script, seeds) in enumerate(sorted(scripts.items())):
        color = f"C{k % 10}"  # by its place among all: the same in both panels
        lines = [(curve[column], smoothed(curve)) for curve in seeds.values() if column in curve]
        if not lines:
            continue
        label = f"{script}, {len(lines)} seeds" if len(lines) > 1 else f"{script}, 1 seed"
        whole = len(lines) > 1 and alike(seeds.values())
        for x, y in lines:
            axes.plot(x, y, color=color, lw=0.7 if whole else 1.3, alpha=0.55 if whole else 0.9, label=label)
            label = None
        if not whole:
            continue
        grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), POINTS)
        every = np.array([np.interp(grid, x, y) for x, y in lines])
        axes.fill_between(grid, every.min(0), every.max(0), color=color, alpha=0.15, lw=0)
        axes.plot(grid, every.mean(0), color=color, lw=1.8)


def in_decisions(x):
    return f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"


def draw(picture, scripts):
    """A figure: over decisions, and over wall time if a curve has it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    timed = [curve for seeds in scripts.values() for curve in seeds.values() if "seconds" in curve]
    columns = ["decisions"] + ["seconds"] * bool(timed)
    size = (6 if len(columns) == 1 else 10.5, 3.8)
    figure, grid = plt.subplots(
        1, len(columns), figsize=size, dpi=110, layout="constrained", sharey=True, squeeze=False
    )
    for axes, column in zip(grid[0], columns, strict=True):
        draw_curves(axes, column, scripts)
        if picture in TARGETS:
            value, whose = TARGETS[picture]
            axes.axhline(value, color="black", ls=":", lw=1.2, label=f"{whose}: {value:,g}")
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    grid[0][0].set(xlabel="decisions", ylabel="return of training episodes")
    grid[0][0].xaxis.set_major_formatter(lambda x, _: in_decisions(x))
    if timed:
        longest = max(curve["seconds"][-1] for curve in timed)
        unit, name = next(
            (pair for pair in ((3600, "hours"), (60, "minutes")) if longest >= 2 * pair[0]), (1, "seconds")
        )
        grid[0][1].set(xlabel=f"wall time, {name}")
        grid[0][1].set_xticks([tick * unit for tick in MaxNLocator(7).tick_values(0, longest / unit)])
        grid[0][1].set_xlim(0, 1.03 * longest)
        grid[0][1].xaxis.set_major_formatter(lambda x, _: f"{x / unit:g}")
    figure.suptitle(env_of(picture))
    handles, labels = grid[0][0].get_legend_handles_labels()
    handles = [Line2D([], [], color=x.get_color(), ls=x.get_linestyle(), lw=1.8) for x in handles]
    # Below the axes, where it hides no curve.
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(labels) > 1 else 1, fontsize=8)
    return figure


# Tables


def first_at(curve, column, value, iterations):
    """Decisions of the first iteration at which the mean of so many is there; None if it never is."""
    if len(curve[column]) < iterations:
        return None
    means = np.convolve(curve[column], np.ones(iterations) / iterations, "valid")
    there = np.flatnonzero(means >= value)
    return int(curve["decisions"][there[0] + iterations - 1]) if len(there) else None


def number(x):
    """As the docs write it: four digits or so, no more."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def goal_in_words(env):
    column, value, iterations = GOALS[env]
    words = f"{value:.0%} success" if column == "success" else f"{value:g}"
    return words + (f", mean of {iterations} iterations" if iterations > 1 else "")


def evaluated(folder, env, script, seed):
    """What run.py kept of a run's evaluation."""
    path = folder / f"{env}.{script}.{seed}.txt"
    said = (
        re.search(r"return (\S+ ± [^\s,;]+).*?(?:success (\S+))?$", path.read_text().strip()) if path.exists() else None
    )
    return (said[2] or said[1]) if said else ""


def row(env, script, by_seed, folder):
    """Column by column what there is to say about a script's runs; seeds keep their order."""
    runs, cells = list(by_seed.values()), {"env": env, "script": script, "seeds": ", ".join(map(str, by_seed))}
    ends, steps = [last_tenth(curve) for curve in runs], sorted(int(curve["decisions"][-1]) for curve in runs)
    cells["decisions"] = " to ".join(f"{x:,}" for x in dict.fromkeys((steps[0], steps[-1])))
    cells["over the last tenth"] = ", ".join(map(number, ends))
    if len(runs) > 1 and alike(runs):
        cells["mean ± std"] = f"{number(np.mean(ends))} ± {number(np.std(ends))}"
    if env in GOALS and all(GOALS[env][0] in curve for curve in runs):
        first = [first_at(curve, *GOALS[env]) for curve in runs]
        cells["first at the goal"] = ", ".join(f"{at:,}" if at else "never" for at in first)
        cells["goal"] = goal_in_words(env)
    cells["success"] = ", ".join(f"{last_tenth(curve, 'success'):.1%}" for curve in runs if "success" in curve)
    cells["evaluated"] = ", ".join(filter(None, (evaluated(folder, env, script, seed) for seed in by_seed)))
    cells["seconds"] = ", ".join(f"{curve['seconds'][-1]:,.0f}" for curve in runs if "seconds" in curve)
    return cells


def table(curves, folder):
    """Markdown: a row for each script of each env. Columns that nobody fills are left out."""
    rows = []
    for picture, scripts in sorted(curves.items()):
        rows += [row(env_of(picture), script, seeds, folder) for script, seeds in sorted(scripts.items())]
    names = [name for name in HEADER if any(cells.get(name) for cells in rows)]
    lines = [names, ["---"] * len(names), *([cells.get(name, "") for name in names] for cells in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw_all(folder, envs=()):
    import matplotlib.pyplot as plt

    curves, without = read_all(folder, envs), []
    for picture, scripts in curves.items():
        figure = draw(picture, scripts)
        figure.savefig(folder / f"{picture}.png")
        plt.close(figure)
        for script, seeds in scripts.items():
            without += [f"{picture} {script} {seed}" for seed, curve in seeds.items() if "seconds" not in curve]
    text = table(curves, folder)
    if not envs:
        (folder / "tables.md").write_text(text)
    print(text)
    if without:
        names = ", ".join(without[:5]) + (f" and {len(without) - 5} more" if len(without) > 5 else "")
        print(f"{len(without)} curves have no seconds, and no wall time is drawn for them: {names}")
    print(f"Wrote {len(curves)} pictures{'' if envs else ' and tables.md'} to {folder}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", help="only these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder with the curves; pictures go there too")
    args = parser.parse_args()
    draw_all(args.out, args.envs)


if __name__ == "__main__":
    main()
