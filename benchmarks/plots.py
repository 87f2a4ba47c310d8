"""Draw the pictures and tables of the docs, from the curves that run.py and learning.py write.

    python benchmarks/plots.py                                    the curves in benchmarks/results
    python benchmarks/plots.py --out benchmarks/results/quick     the curves in another folder
    python benchmarks/plots.py CartPole-v1 Acrobot-v1             only these envs, without tables.md

A picture is named ENV.png. The curves of SAC and of the bandit, which are shorter, have their own
pictures, ENV.sac.png and ENV.lbc.png. A picture shows the mean of all seeds, their range, and each
seed as a thin line, over decisions and over wall time. A point is the mean over the 2 % of the
decisions before it. There is no mean of all seeds if one of them was stopped early. Old curves
without a column `seconds` are not drawn over wall time, and their names are printed.

tables.md, which is printed too, has a row for each script and env: the mean over the last tenth of
the decisions of each seed, the decisions at which the goal was first reached, the success rate, and
the evaluation of the saved policies, if run.py has made one.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from learning import RESULTS, accept_any_encoding, last_tenth, read_csv

# Published results: the best ones of PPO, and of CleanRL's SAC after a million steps; ML-Agents'
# own figures
TARGETS = {
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
# Goals for the tables: a column, its value, and the number of iterations whose mean must reach it
GOALS = {
    "3DBall": ("return", 95, 1),
    "CartPole-v1": ("return", 475, 1),
    "CartPoleBlind-v0": ("return", 475, 1),
    "Acrobot-v1": ("return", -90, 1),
    "LunarLander-v3": ("return", 200, 1),
    "InvertedPendulum-v5": ("return", 950, 1),
    "Basic": ("return", 0.925, 1),
    "PushBlock": ("return", 4.5, 24),  # the successful episodes are short and end first
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
FAMILIES = ("sac", "lbc")  # these have separate pictures
SMOOTH = 0.02  # the share of the decisions over which a curve is smoothed
POINTS = 400  # points of the mean of all seeds
HEADER = (
    "env",
    "script",
    "seeds",
    "decisions",
    "over the last tenth",
    "mean ± std",
    "first at the goal",
    "goal",
    "success",
    "evaluated",
    "seconds",
)


def read_all(folder, envs=()):
    """Return all curves of a folder: by picture, then by script, then by seed."""
    curves = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("*.csv")):
        env, script, seed = path.stem.rsplit(".", 2)
        if envs and env not in envs:
            continue
        picture = env
        for family in FAMILIES:
            if family in script:
                picture = f"{env}.{family}"
        try:
            curves[picture][script][int(seed)] = read_csv(path)
        except ValueError:
            print(f"{path.name} is not complete: skipped")
    if not curves:
        of_envs = f" of {', '.join(envs)}" if envs else ""
        raise SystemExit(f"{folder} has no curves{of_envs}: run a script first")
    return curves


def env_of(picture):
    env, _, family = picture.rpartition(".")
    return env if family in FAMILIES else picture


# Pictures


def smoothed(curve):
    """Return, for each point, the mean over the iterations in the last 2 % of the decisions."""
    decisions = curve["decisions"]
    sums = np.concatenate([[0], np.cumsum(curve["return"])])
    begin = np.searchsorted(decisions, decisions - SMOOTH * decisions[-1], "right")
    end = np.arange(1, len(decisions) + 1)
    return (sums[end] - sums[begin]) / (end - begin)


def have_equal_length(curves):
    """Return whether all curves have about the same number of decisions."""
    ends = [curve["decisions"][-1] for curve in curves]
    return min(ends) > 0.9 * max(ends)


def draw_curves(axes, column, scripts):
    """Draw the curves of all scripts over `column`, which is "decisions" or "seconds"."""
    for k, (script, seeds) in enumerate(sorted(scripts.items())):
        color = f"C{k % 10}"  # the same in both panels
        lines = [(curve[column], smoothed(curve)) for curve in seeds.values() if column in curve]
        if not lines:
            continue

        # Each seed, thin if there is a mean
        has_mean = len(lines) > 1 and have_equal_length(seeds.values())
        label = f"{script}, {len(lines)} seeds" if len(lines) > 1 else f"{script}, 1 seed"
        width = 0.7 if has_mean else 1.3
        alpha = 0.55 if has_mean else 0.9
        for x, y in lines:
            axes.plot(x, y, color=color, lw=width, alpha=alpha, label=label)
            label = None
        if not has_mean:
            continue

        # Mean and range of the seeds
        first = max(x[0] for x, _ in lines)
        last = min(x[-1] for x, _ in lines)
        grid = np.linspace(first, last, POINTS)
        values = np.array([np.interp(grid, x, y) for x, y in lines])
        axes.fill_between(grid, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
        axes.plot(grid, values.mean(0), color=color, lw=1.8)


def format_decisions(x):
    return f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"


def unit_of(seconds):
    """Return a unit for this duration: its seconds and its name."""
    for unit, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return unit, name
    return 1, "seconds"


def draw(picture, scripts):
    """Return a figure: the curves over decisions, and over wall time if it is known."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    curves = [curve for seeds in scripts.values() for curve in seeds.values()]
    longest = max((curve["seconds"][-1] for curve in curves if "seconds" in curve), default=None)
    columns = ["decisions"] if longest is None else ["decisions", "seconds"]
    figure, grid = plt.subplots(
        1,
        len(columns),
        figsize=(6 if len(columns) == 1 else 10.5, 3.8),
        dpi=110,
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    panels = dict(zip(columns, grid[0], strict=True))
    for column, axes in panels.items():
        draw_curves(axes, column, scripts)
        if picture in TARGETS:
            value, source = TARGETS[picture]
            axes.axhline(value, color="black", ls=":", lw=1.2, label=f"{source}: {value:,g}")
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)

    # Axes
    axes = panels["decisions"]
    axes.set(xlabel="decisions", ylabel="return of training episodes")
    axes.xaxis.set_major_formatter(lambda x, _: format_decisions(x))
    if longest is not None:
        unit, name = unit_of(longest)
        axes = panels["seconds"]
        axes.set(xlabel=f"wall time, {name}")
        axes.set_xticks([tick * unit for tick in MaxNLocator(7).tick_values(0, longest / unit)])
        axes.set_xlim(0, 1.03 * longest)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / unit:g}")

    # Title and legend. The legend is below the axes, where it hides no curve
    figure.suptitle(env_of(picture))
    handles, labels = panels["decisions"].get_legend_handles_labels()
    thick = []
    for handle in handles:
        color = handle.get_color()
        thick.append(Line2D([], [], color=color, ls=handle.get_linestyle(), lw=1.8))
    num_columns = 2 if len(labels) > 1 else 1
    figure.legend(thick, labels, loc="outside lower center", ncols=num_columns, fontsize=8)
    return figure


# Tables


def first_at(curve, column, value, iterations):
    """Return the decisions at which the mean of so many iterations first reaches the value, or
    None."""
    if len(curve[column]) < iterations:
        return None
    means = np.convolve(curve[column], np.ones(iterations) / iterations, "valid")
    reached = np.flatnonzero(means >= value)
    if len(reached) == 0:
        return None
    return int(curve["decisions"][reached[0] + iterations - 1])


def number(x):
    """Return a number with about four digits, as in the docs."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def describe_goal(env):
    column, value, iterations = GOALS[env]
    text = f"{value:.0%} success" if column == "success" else f"{value:g}"
    if iterations > 1:
        text += f", mean of {iterations} iterations"
    return text


def evaluated(folder, env, script, seed):
    """Return the success rate or the return from the evaluation that run.py has saved, or ""."""
    path = folder / f"{env}.{script}.{seed}.txt"
    if not path.exists():
        return ""
    pattern = r"return (\S+ (?:±|\+-) [^\s,;]+).*?(?:success (\S+))?$"
    found = re.search(pattern, path.read_text().strip())
    return (found[2] or found[1]) if found else ""


def row(env, script, by_seed, folder):
    """Return the cells of a script's row by column. `by_seed` has its curves."""
    curves = list(by_seed.values())
    ends = [last_tenth(curve) for curve in curves]
    totals = sorted(int(curve["decisions"][-1]) for curve in curves)
    cells = {
        "env": env,
        "script": script,
        "seeds": ", ".join(map(str, by_seed)),
        "decisions": " to ".join(f"{x:,}" for x in dict.fromkeys((totals[0], totals[-1]))),
        "over the last tenth": ", ".join(map(number, ends)),
    }
    if len(curves) > 1 and have_equal_length(curves):
        cells["mean ± std"] = f"{number(np.mean(ends))} ± {number(np.std(ends))}"
    if env in GOALS and all(GOALS[env][0] in curve for curve in curves):
        first = [first_at(curve, *GOALS[env]) for curve in curves]
        cells["first at the goal"] = ", ".join(f"{at:,}" if at else "never" for at in first)
        cells["goal"] = describe_goal(env)
    rates = [last_tenth(curve, "success") for curve in curves if "success" in curve]
    evaluations = [evaluated(folder, env, script, seed) for seed in by_seed]
    seconds = [curve["seconds"][-1] for curve in curves if "seconds" in curve]
    cells["success"] = ", ".join(f"{rate:.1%}" for rate in rates)
    cells["evaluated"] = ", ".join(filter(None, evaluations))
    cells["seconds"] = ", ".join(f"{x:,.0f}" for x in seconds)
    return cells


def table(curves, folder):
    """Return a Markdown table with a row for each script of each env, without empty columns."""
    rows = []
    for picture, scripts in sorted(curves.items()):
        for script, by_seed in sorted(scripts.items()):
            rows.append(row(env_of(picture), script, by_seed, folder))
    names = [name for name in HEADER if any(cells.get(name) for cells in rows)]
    lines = [names, ["---"] * len(names)]
    lines += [[cells.get(name, "") for name in names] for cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw_all(folder, envs=()):
    """Draw the pictures of a folder, and write its tables.md if `envs` is empty."""
    import matplotlib.pyplot as plt

    curves = read_all(folder, envs)
    without_seconds = []
    for picture, scripts in curves.items():
        figure = draw(picture, scripts)
        figure.savefig(folder / f"{picture}.png")
        plt.close(figure)
        for script, by_seed in scripts.items():
            for seed, curve in by_seed.items():
                if "seconds" not in curve:
                    without_seconds.append(f"{picture} {script} {seed}")
    text = table(curves, folder)
    if not envs:
        (folder / "tables.md").write_text(text)
    print(text)
    if without_seconds:
        names = ", ".join(without_seconds[:5])
        if len(without_seconds) > 5:
            names += f" and {len(without_seconds) - 5} more"
        count = len(without_seconds)
        print(f"{count} curves have no seconds and are not drawn over wall time: {names}")
    print(f"Wrote {len(curves)} pictures{'' if envs else ' and tables.md'} to {folder}")


def main():
    accept_any_encoding()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("envs", nargs="*", help="draw only these envs")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the folder of the curves and of the pictures"
    )
    args = parser.parse_args()
    draw_all(args.out, args.envs)


if __name__ == "__main__":
    main()
