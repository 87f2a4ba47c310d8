"""Draw the pictures and tables of the docs, from the curves that run.py and learning.py write.

    python benchmarks/plots.py                                    the curves in benchmarks/results
    python benchmarks/plots.py --out benchmarks/results/quick     the curves in another folder
    python benchmarks/plots.py CartPole-v1 Acrobot-v1             only these envs, without tables.md
    python benchmarks/plots.py --compare ppo_continuous_multiagent sb3-ppo
    python benchmarks/plots.py Hopper-v5 Walker2d-v5 --compare my_ppo sb3-ppo --out my_results

A picture is named ENV.png. The curves of SAC and CrossQ and of the bandit, which are shorter, have
their own pictures, ENV.sac.png and ENV.lbc.png, and so have those with other environment
parameters, ENV.sampled.png and ENV.physics.png. A picture shows each seed as a thin line, the interquartile
mean of all seeds and its 95 % bootstrap interval, over decisions and over time: CPU time if the
curves have it, otherwise wall time. A point is the mean over the 2 % of the decisions before it.
There is no mean of all seeds if one of them was stopped early. Old curves without a column
`seconds` are not drawn over time, and their names are printed.

tables.md, which is printed too, has a row for each script and env: the mean over the last tenth of
the decisions of each seed, their interquartile mean with its interval, the probability of
improvement over SB3, the decisions at which the goal was first reached, the success rate, and the
evaluation of the saved policies, if run.py has made one.

--compare compares scripts over all envs in which each of them has curves, or over the envs given.
The last script is the baseline. compare.SCRIPTS.png has the interquartile means, the probability of
improvement over the baseline, the performance profiles, and the interquartile mean over decisions
and over time. With several envs, returns are normalized in each env: 0 is the mean of the first
points of all curves, 1 the interquartile mean of the best script. If runs have different lengths,
their ends are compared at the number of decisions that all of them have.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import aggregate
import numpy as np
from learning import RESULTS, accept_any_encoding, last_tenth, read_csv

# Published results: the best ones of PPO, and of CleanRL's SAC after a million steps; ML-Agents'
# own figures
TARGETS = {
    "HalfCheetah-v5": (5819, "rl-zoo, tuned, published"),
    "Hopper-v5": (2609, "Tianshou, published"),
    "Walker2d-v5": (3589, "Tianshou, published"),
    "Ant-v5": (3258, "Tianshou, published"),
    "HalfCheetah-v5.sac": (9635, "CleanRL, published, at a million"),
    "3DBall": (100, "ML-Agents' benchmark"),
    "3DBall.sac": (100, "ML-Agents' benchmark"),
    "3DBall.sampled": (100, "the longest episode"),
    "3DBall.physics": (100, "the longest episode"),
    "Crawler": (2353, "Unity's own policy in this scene"),
    "CartPole-v1": (475, "solved"),
    "CartPole-v1.lbc": (475, "solved"),
    "CartPoleBlind-v0": (475, "solved"),
    "LunarLander-v3": (200, "solved"),
    "Basic": (0.93, "ML-Agents' benchmark"),
    "Basic.lbc": (0.93, "ML-Agents' benchmark"),
    "PushBlock": (4.5, "ML-Agents' benchmark"),
    "Sorter": (1.47, "hand-written policy, two tiles"),
    "Hallway": (0.7, "ML-Agents' benchmark"),
    "FoodCollector": (10, "ML-Agents' benchmark"),
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
    "FoodCollector": ("return", 10, 5),  # not all agents end in an iteration
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
# These have separate pictures
FAMILIES = {
    "sac": ("sac", "crossq", "tqc"),
    "lbc": ("lbc",),
    "sampled": ("sampled",),
    "physics": ("physics",),
}
SMOOTH = 0.02  # the share of the decisions over which a curve is smoothed
POINTS = 200  # points of the mean of all seeds
OUR_RUNS = ("sb3-settings",)  # our script with SB3's settings; other labels sb3-... are SB3
TIMES = {"cpu_seconds": "CPU time", "seconds": "wall time"}
HEADER = (
    "env",
    "script",
    "seeds",
    "decisions",
    "over the last tenth",
    "mean ± std",
    "IQM (95 %)",
    "better than SB3 (95 %)",
    "first at the goal",
    "goal",
    "success",
    "evaluated",
    "evaluated IQM (95 %)",
    "seconds",
    "CPU seconds",
)


def read_all(folder, envs=()):
    """Return all curves of a folder: by picture, then by script, then by seed."""
    curves = defaultdict(lambda: defaultdict(dict))
    by_number = lambda path: (path.stem.rsplit(".", 1)[0], len(path.stem), path.stem)
    for path in sorted(folder.glob("*.csv"), key=by_number):
        env, script, seed = path.stem.rsplit(".", 2)
        if envs and env not in envs:
            continue
        picture = env
        for family, names in FAMILIES.items():
            if any(name in script for name in names):
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


def on_grid(lines):
    """Return POINTS places from the last of the starts to the first of the ends of the lines, and
    the values of all lines there: an array of points x lines."""
    grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), POINTS)
    return grid, np.array([np.interp(grid, x, y) for x, y in lines]).T


def draw_interval(axes, x, tasks, color, label=None):
    """Draw the interquartile mean of curves and its interval."""
    low, high = aggregate.bootstrap_interval(aggregate.interquartile_mean, tasks)
    axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    axes.plot(x, aggregate.interquartile_mean(tasks), color=color, lw=1.8, label=label)


def draw_curves(axes, column, scripts):
    """Draw the curves of all scripts over `column`: decisions, seconds or cpu_seconds."""
    for k, (script, seeds) in enumerate(sorted(scripts.items())):
        color = f"C{k % 10}"  # the same in both panels
        lines = [(curve[column], smoothed(curve)) for curve in seeds.values() if column in curve]
        if not lines:
            continue

        # Each seed, thin if there is a mean
        has_mean = len(lines) > 1 and have_equal_length(seeds.values())
        label = f"{script}, {len(lines)} seeds" if len(lines) > 1 else f"{script}, 1 seed"
        width = 0.7 if has_mean else 1.3
        alpha = min(0.55, 3 / len(lines)) if has_mean else 0.9
        for x, y in lines:
            axes.plot(x, y, color=color, lw=width, alpha=alpha, label=label)
            label = None
        if has_mean:
            grid, values = on_grid(lines)
            draw_interval(axes, grid, [values], color)


def time_column(curves):
    """Return the column of the time that curves are drawn over, or None: CPU time if each curve with
    a time has it, otherwise wall time."""
    timed = [curve for curve in curves if "seconds" in curve]
    if not timed:
        return None
    return "cpu_seconds" if all("cpu_seconds" in curve for curve in timed) else "seconds"


def format_decisions(x):
    if x >= 1e6:
        return f"{x / 1e6:g}M"
    return f"{x / 1e3:g}k" if x else "0"


def unit_of(seconds):
    """Return a unit for this duration: its seconds and its name."""
    for unit, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return unit, name
    return 1, "seconds"


def set_time_axis(axes, column, longest):
    """Label the axis of a time of up to `longest` seconds."""
    from matplotlib.ticker import MaxNLocator

    unit, name = unit_of(longest)
    axes.set(xlabel=f"{TIMES[column]}, {name}")
    axes.set_xticks([tick * unit for tick in MaxNLocator(7).tick_values(0, longest / unit)])
    axes.set_xlim(0, 1.03 * longest)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / unit:g}")


def draw(picture, scripts):
    """Return a figure: the curves over decisions, and over time if it is known."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    curves = [curve for seeds in scripts.values() for curve in seeds.values()]
    time = time_column(curves)
    columns = ["decisions", time] if time else ["decisions"]
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
    if time:
        set_time_axis(panels[time], time, max(curve[time][-1] for curve in curves if time in curve))

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


def share(x):
    return f"{x:.2f}"


def describe_goal(env):
    column, value, iterations = GOALS[env]
    text = f"{value:.0%} success" if column == "success" else f"{value:g}"
    if iterations > 1:
        text += f", mean of {iterations} iterations"
    return text


def evaluation(folder, env, script, seed):
    """Return the evaluation that run.py has saved as a match: return, its spread, success rate or
    None. Return None without an evaluation."""
    path = folder / f"{env}.{script}.{seed}.txt"
    if not path.exists():
        return None
    pattern = r"return (\S+) ((?:±|\+-) [^\s,;]+).*?(?:success (\S+))?$"
    return re.search(pattern, path.read_text().strip())


def with_interval(statistic, *groups, text=number):
    """Return a statistic and its 95 % interval as text."""
    low, high = aggregate.bootstrap_interval(statistic, *groups)
    return f"{text(statistic(*groups))} ({text(low)} to {text(high)})"


def ends(by_seed):
    """Return the means over the last tenth of the curves of all seeds."""
    return np.array([last_tenth(curve) for curve in by_seed.values()])


def row(env, script, scripts, folder):
    """Return the cells of a script's row by column. `scripts` has the curves of this env by script
    and by seed."""
    by_seed = scripts[script]
    curves = list(by_seed.values())
    totals = sorted(int(curve["decisions"][-1]) for curve in curves)
    cells = {
        "env": env,
        "script": script,
        "seeds": ", ".join(map(str, by_seed)),
        "decisions": " to ".join(f"{x:,}" for x in dict.fromkeys((totals[0], totals[-1]))),
        "over the last tenth": ", ".join(map(number, ends(by_seed))),
    }
    if len(curves) > 1 and have_equal_length(curves):
        scores = ends(by_seed)
        cells["mean ± std"] = f"{number(np.mean(scores))} ± {number(np.std(scores))}"
        cells["IQM (95 %)"] = with_interval(aggregate.interquartile_mean, [scores])
        cells["better than SB3 (95 %)"] = better_than_sb3(script, scripts)
    if env in GOALS and all(GOALS[env][0] in curve for curve in curves):
        first = [first_at(curve, *GOALS[env]) for curve in curves]
        cells["first at the goal"] = ", ".join(f"{at:,}" if at else "never" for at in first)
        cells["goal"] = describe_goal(env)
    rates = [last_tenth(curve, "success") for curve in curves if "success" in curve]
    cells["success"] = ", ".join(f"{rate:.1%}" for rate in rates)

    evaluations = [evaluation(folder, env, script, seed) for seed in by_seed]
    evaluations = [found for found in evaluations if found]
    cells["evaluated"] = ", ".join(found[3] or f"{found[1]} {found[2]}" for found in evaluations)
    if len(evaluations) > 1 and len(evaluations) == len(curves):
        scores = np.array([float(found[1]) for found in evaluations])
        cells["evaluated IQM (95 %)"] = with_interval(aggregate.interquartile_mean, [scores])

    for column, title in (("seconds", "seconds"), ("cpu_seconds", "CPU seconds")):
        times = [curve[column][-1] for curve in curves if column in curve]
        cells[title] = ", ".join(f"{x:,.0f}" for x in times)
    return cells


def is_sb3(script):
    return script.startswith("sb3-") and script not in OUR_RUNS


def better_than_sb3(script, scripts):
    """Return the probability of improvement over each algorithm of SB3 that has several runs of the
    same length, as text."""
    if is_sb3(script):
        return ""
    texts = []
    for other in filter(is_sb3, sorted(scripts)):
        runs = [*scripts[script].values(), *scripts[other].values()]
        if len(scripts[other]) > 1 and have_equal_length(runs):
            groups = ([ends(scripts[script])], [ends(scripts[other])])
            improvement = aggregate.probability_of_improvement
            texts.append(f"{other}: {with_interval(improvement, *groups, text=share)}")
    return ", ".join(texts)


def table(curves, folder):
    """Return a Markdown table with a row for each script of each env, without empty columns."""
    rows = []
    for picture, scripts in sorted(curves.items()):
        for script in sorted(scripts):
            rows.append(row(env_of(picture), script, scripts, folder))
    names = [name for name in HEADER if any(cells.get(name) for cells in rows)]
    lines = [names, ["---"] * len(names)]
    lines += [[cells.get(name, "") for name in names] for cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# Comparison of scripts over several envs


def by_env(curves, names, envs):
    """Return the curves of the named scripts: by env, then by script, then by seed. Only envs in
    which each script has curves are returned."""
    found = defaultdict(dict)
    for picture, scripts in curves.items():
        for name in names:
            if name in scripts:
                found[env_of(picture)][name] = scripts[name]
    known = {name for scripts in found.values() for name in scripts}
    for name in names:
        if name not in known:
            raise SystemExit(f"--compare {name}: there are no curves with this name")
    for env in envs:
        for name in names:
            if name not in found[env]:
                raise SystemExit(f"{env} has no curves of {name}: run it first, or leave {env} out")
    common = {env: scripts for env, scripts in found.items() if len(scripts) == len(names)}
    if not common:
        raise SystemExit(f"--compare {' '.join(names)}: no env has curves of all of them")
    return common


def cut(curve, end):
    """Return the part of a curve with at most `end` decisions."""
    kept = curve["decisions"] <= end
    return {column: values[kept] for column, values in curve.items()}


def scale(env, scripts, is_alone):
    """Return the returns of an env that become 0 and 1. A single env keeps its returns.

    0 is the mean of the first points of all curves, 1 the interquartile mean of the best script.
    """
    if is_alone:
        return 0, 1
    runs = [curve for by_seed in scripts.values() for curve in by_seed.values()]
    low = np.mean([curve["return"][0] for curve in runs])
    high = max(aggregate.interquartile_mean([ends(by_seed)]) for by_seed in scripts.values())
    if high <= low:
        raise SystemExit(f"{env}: no script has learned anything there, name the other envs")
    return low, high


def comparison(found, names):
    """Return, by script, the scores at the end and the lines of all curves, normalized: the scores as
    a list with an array per env, the lines by column and env."""
    scores = {name: [] for name in names}
    lines = {name: defaultdict(list) for name in names}
    for env, scripts in found.items():
        runs = [curve for by_seed in scripts.values() for curve in by_seed.values()]
        end = min(curve["decisions"][-1] for curve in runs)
        if not have_equal_length(runs):
            print(f"{env}: not all runs have the same length, compared at {end:,.0f} decisions")
        same = {}
        for name, by_seed in scripts.items():
            same[name] = {seed: cut(curve, end) for seed, curve in by_seed.items()}
        low, high = scale(env, same, len(found) == 1)
        for name in names:
            scores[name].append(aggregate.normalized(ends(same[name]), low, high))
            for column in ("decisions", *TIMES):
                part = same if column == "decisions" else scripts
                timed = [curve for curve in part[name].values() if column in curve]
                if len(timed) == len(part[name]):
                    smooth = [aggregate.normalized(smoothed(curve), low, high) for curve in timed]
                    x = [curve[column] for curve in timed]
                    lines[name][column].append(list(zip(x, smooth, strict=True)))
    return scores, lines


def draw_efficiency(axes, column, lines, colors):
    """Draw the interquartile mean of each script over `column`, in the range that all its runs have.
    Return the largest value of the column."""
    longest = 0
    for name, by_column in lines.items():
        runs = [line for task in by_column[column] for line in task]
        grid, values = on_grid(runs)
        sizes = [len(task) for task in by_column[column]]
        tasks = np.split(values, np.cumsum(sizes)[:-1], axis=-1)
        draw_interval(axes, grid, tasks, colors[name], name)
        longest = max(longest, grid[-1])
    axes.grid(alpha=0.3)
    return longest


def draw_points(axes, names, groups_of, statistic, colors):
    """Draw a statistic of each script as a point with its interval. groups_of(name) returns the
    scores that the statistic needs."""
    for k, name in enumerate(names):
        groups = groups_of(name)
        low, high = aggregate.bootstrap_interval(statistic, *groups)
        axes.plot([low, high], [k, k], color=colors[name], lw=6, alpha=0.3, solid_capstyle="butt")
        axes.plot(statistic(*groups), k, "o", color=colors[name])
    axes.set_yticks([])  # the legend has the names
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(alpha=0.3, axis="x")


def draw_comparison(found, names, scores, lines):
    """Return a figure that compares the named scripts. The last one is the baseline. `scores` and
    `lines` are those of comparison()."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {name: f"C{k % 10}" for k, name in enumerate(names)}
    kind = "return" if len(found) == 1 else "normalized return"
    timed = []
    for column in TIMES:
        if all(len(lines[name][column]) == len(found) for name in names):
            timed.append(column)
    below = ["decisions"] * 3 + ["time"] * 3 if timed else ["decisions"] * 6
    figure, axes = plt.subplot_mosaic(
        [["iqm"] * 2 + ["improvement"] * 2 + ["profile"] * 2, below],
        figsize=(11.5, 6.5),
        dpi=110,
        layout="constrained",
    )

    # At the end
    iqm = aggregate.interquartile_mean
    draw_points(axes["iqm"], names, lambda name: [scores[name]], iqm, colors)
    axes["iqm"].set(title=f"interquartile mean, {kind}")
    baseline = names[-1]
    improvement = aggregate.probability_of_improvement
    pair = lambda name: [scores[name], scores[baseline]]
    draw_points(axes["improvement"], names[:-1], pair, improvement, colors)
    axes["improvement"].set(
        title=f"probability of improvement\nover {baseline}", xlim=(-0.03, 1.03)
    )
    axes["improvement"].axvline(0.5, color="black", ls=":", lw=1.2)

    # Profiles
    every = np.concatenate([task for tasks in scores.values() for task in tasks])
    margin = 0.05 * (np.ptp(every) or 1)
    thresholds = np.linspace(every.min() - margin, every.max() + margin, POINTS)
    for name in names:
        profile = lambda tasks: aggregate.performance_profile(tasks, thresholds)
        low, high = aggregate.bootstrap_interval(profile, scores[name])
        axes["profile"].fill_between(thresholds, low, high, color=colors[name], alpha=0.15, lw=0)
        axes["profile"].plot(thresholds, profile(scores[name]), color=colors[name], lw=1.8)
    axes["profile"].set(title="share of runs above", xlabel=kind, ylim=(-0.03, 1.03))
    axes["profile"].grid(alpha=0.3)

    # Sample efficiency
    draw_efficiency(axes["decisions"], "decisions", lines, colors)
    axes["decisions"].set(xlabel="decisions", ylabel=f"interquartile mean, {kind}")
    axes["decisions"].set_xlim(left=0)
    axes["decisions"].xaxis.set_major_formatter(lambda x, _: format_decisions(x))
    if timed:
        longest = draw_efficiency(axes["time"], timed[0], lines, colors)
        set_time_axis(axes["time"], timed[0], longest)

    seeds = []
    for name in names:
        counts = sorted({len(scripts[name]) for scripts in found.values()})
        seeds.append(f"{name}: {' to '.join(map(str, counts))} seeds")
    handles, labels = axes["decisions"].get_legend_handles_labels()
    figure.legend(handles, seeds, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.suptitle(", ".join(found))
    return figure


def compare(folder, names, envs=()):
    """Compare the named scripts over all envs that they have in common, or over the given ones."""
    import matplotlib.pyplot as plt

    if len(names) < 2 or len(set(names)) < len(names):
        raise SystemExit("--compare: give two or more different names of curves")
    found = by_env(read_all(folder, envs), names, envs)
    scores, lines = comparison(found, names)
    figure = draw_comparison(found, names, scores, lines)
    path = folder / f"compare.{'.'.join(names)}.png"
    figure.savefig(path)
    plt.close(figure)

    iqm = aggregate.interquartile_mean
    improvement = aggregate.probability_of_improvement
    print(f"{', '.join(found)}: interquartile mean (95 %), probability of improvement (95 %)")
    for name in names:
        line = f"{name:28} {with_interval(iqm, scores[name])}"
        if name != names[-1]:
            better = with_interval(improvement, scores[name], scores[names[-1]], text=share)
            line += f"   better than {names[-1]}: {better}"
        print(line)
    print(f"Wrote {path}")


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
        print(f"{count} curves have no seconds and are not drawn over time: {names}")
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
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="SCRIPT",
        help="compare these scripts; the last one is the baseline",
    )
    args = parser.parse_args()
    if args.compare:
        compare(args.out, args.compare, args.envs)
    else:
        draw_all(args.out, args.envs)


if __name__ == "__main__":
    main()
