"""Plot what a run of lbc_discrete.py learned and which indices its bandits drew.

    python benchmarks/plot_bandit.py runs/NAME                  writes runs/NAME/bandit.png
    python benchmarks/plot_bandit.py runs/NAME --out my.png

The plot shows the six losses and their sums, the returns in training, the greedy returns of network 1, network 2 and
the mixture at the best index, returns by index as heat maps, the bandits' estimates, and the index of each episode. It
is made from TensorBoard's events and the last checkpoint, also while the run is still going.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onefile_rl.engines import files

NAMES = ("k1", "k2", "epsilon")
PAIRS = ((0, 1), (0, 2), (1, 2))
TICKS = (0, 1, 3, 10, 50)  # of k, on a logarithmic scale


def read(folder):
    """Return the scalars by name, as arrays of steps and values, and the checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = folder / "checkpoint.pt"
    try:
        state = files.read(path)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if "history" not in state.get("kept", {}).get("bandit", {}):
        raise SystemExit(f"{path} has no bandit: give a run of lbc_discrete.py")
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    scalars = {
        tag: np.array([(x.step, x.value) for x in events.Scalars(tag)]).T
        for tag in events.Tags()["scalars"]
    }
    return scalars, state


def points(history, max_k):
    """Return the indices of episodes as points in the unit cube, with k on a logarithmic scale."""
    return np.concatenate([np.log1p(history[:, 1:3]) / math.log1p(max_k), history[:, 3:4]], 1)


def curve(axes, scalars, tags, title, log=False):
    """Plot scalars, smoothed. `tags` are pairs of name and label."""
    found = [(tag, label) for tag, label in tags if tag in scalars]
    for tag, label in found:
        steps, values = scalars[tag]
        width = max(1, len(steps) // 100)
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        marker = "o" if len(steps) < 30 else None
        axes.plot(steps[width - 1 :], smooth, label=label, lw=1.2, marker=marker, ms=3)
    axes.set(title=title, xlabel="decisions")
    if log:
        axes.set_yscale("log")
    if found:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "nothing logged", ha="center", va="center", transform=axes.transAxes)


def name_axis(axes, which, name, max_k):
    """Label an axis, with the ticks of k on a logarithmic scale."""
    if name.startswith("k"):
        ticks = [k for k in TICKS if k <= max_k]
        getattr(axes, f"set_{which}ticks")(
            [math.log1p(k) / math.log1p(max_k) for k in ticks], ticks
        )
    getattr(axes, f"set_{which}label")(name)


def heat_map(figure, axes, history, x, pair, max_k):
    """Plot the mean return of the episodes in each cell. Cells without episodes are white."""
    i, j = pair
    cells = 12
    edges = np.linspace(0, 1, cells + 1)
    total, *_ = np.histogram2d(x[:, i], x[:, j], [edges, edges], weights=history[:, 4])
    count, *_ = np.histogram2d(x[:, i], x[:, j], [edges, edges])
    with np.errstate(invalid="ignore"):
        image = axes.imshow(
            (total / count).T, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap="viridis"
        )
    figure.colorbar(image, ax=axes)
    axes.set_title(f"mean return by {NAMES[i]} and {NAMES[j]}, {cells} x {cells}")
    name_axis(axes, "x", NAMES[i], max_k)
    name_axis(axes, "y", NAMES[j], max_k)


def estimate(axes, bandit, history, x, axis, args):
    """Plot the bandits' estimates along an axis: those of each tile-coded bandit and their mean, or the mean returns of
    the episodes in the window."""
    axes.set_title(f"the bandits' estimate by {NAMES[axis]}")
    if "tile_values" in bandit:
        values = np.take_along_axis(bandit["tile_values"].numpy(), bandit["tile"].numpy(), 2)[axis]
        centers = (np.arange(values.shape[1]) + 0.5) / values.shape[1]
        for values_of_one in values:
            axes.step(centers, values_of_one, where="mid", color="tab:gray", lw=0.6, alpha=0.7)
        axes.step(centers, values.mean(0), where="mid", color="tab:blue", lw=1.8)
    else:
        last = slice(-args["window"], None)
        levels = np.unique(x[last, axis].round(3))
        means = [
            history[last, 4][np.isclose(x[last, axis], level, atol=1e-3)].mean() for level in levels
        ]
        axes.plot(levels, means, "o-", color="tab:blue")
    axes.set_ylabel("return")
    name_axis(axes, "x", NAMES[axis], args["max_k"])


def draw(scalars, state, title):
    """Return the figure of a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args = state["args"]
    bandit = state["kept"]["bandit"]
    history = bandit["history"].numpy()
    x = points(history, args["max_k"])
    figure, grid = plt.subplots(5, 3, figsize=(15, 20), dpi=80)

    # Losses
    titles = {
        "value_loss": "V losses",
        "q_loss": "Q losses",
        "policy_loss": "policy losses",
        "loss": "all three, weighted",
    }
    for axes, (name, loss_title) in zip(grid.flat, titles.items(), strict=False):
        tags = [
            (f"losses/{name}_1", "network 1"),
            (f"losses/{name}_2", "network 2"),
            (f"losses/{name}", "sum"),
        ]
        curve(axes, scalars, tags, loss_title, log=name in ("value_loss", "q_loss"))

    # Returns
    curve(
        grid[1, 1], scalars, [("charts/episodic_return", "training")], "return of training episodes"
    )
    tags = [
        (f"greedy/{name}", name.replace("_", " ")) for name in ("network_1", "network_2", "mixture")
    ]
    curve(grid[1, 2], scalars, tags, "greedy return")
    best = state["kept"]["agent"]["best_index"][0].tolist()
    grid[1, 2].set_xlabel("decisions; best index now: " + ", ".join(f"{v:.3g}" for v in best))

    # Indices
    for axes, pair in zip(grid[2], PAIRS, strict=True):
        heat_map(figure, axes, history, x, pair, args["max_k"])
    for axis, axes in enumerate(grid[3]):
        estimate(axes, bandit, history, x, axis, args)
    for axis, axes in enumerate(grid[4]):
        name = NAMES[axis]
        axes.scatter(history[:, 0], x[:, axis], s=4, c=history[:, 4], cmap="viridis", alpha=0.6)
        width = max(1, len(history) // 30)
        smooth = np.convolve(x[:, axis], np.ones(width) / width, "valid")
        axes.plot(
            history[width - 1 :, 0], smooth, color="tab:red", lw=1.5, label=f"mean of {width}"
        )
        axes.set(title=f"{name} of each episode, coloured by its return", xlabel="decisions")
        name_axis(axes, "y", name, args["max_k"])
        axes.legend(fontsize=7)

    for axes in grid[:2].flat:
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="runs/NAME")
    parser.add_argument(
        "--out", type=Path, help="the file to write; default: bandit.png in the folder of the run"
    )
    args = parser.parse_args()
    scalars, state = read(args.run)
    if not len(state["kept"]["bandit"]["history"]):
        raise SystemExit(f"{args.run}: no episode has ended yet")
    out = args.out or args.run / "bandit.png"
    draw(scalars, state, args.run.name).savefig(out)
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
