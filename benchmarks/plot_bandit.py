"""What a run of lbc_discrete.py learned and what its bandits chose, in one picture.

    python benchmarks/plot_bandit.py runs/NAME                  writes runs/NAME/bandit.png
    python benchmarks/plot_bandit.py runs/NAME --out my.png

The six losses and their sums; training's returns; greedy returns of network 1, network 2 and the mixture at the best
index; returns by index, as heat maps; what the bandits themselves think of each index; how the chosen index moves. It
reads TensorBoard's events and the last checkpoint: of a run that runs, too.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch

PAIRS = (("k1", "k2", 0, 1), ("k1", "e", 0, 2), ("k2", "e", 1, 2))
TICKS = (0, 1, 3, 10, 50)  # of k, by its logarithm


def read(folder):
    """Scalars by name, as steps and values; the checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = folder / "checkpoint.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SystemExit(f"{path}: there is no such checkpoint, or not yet") from None
    except Exception:
        raise SystemExit(f"{path} is not a checkpoint, or not a whole one") from None
    if "told" not in state.get("kept", {}).get("bandit", {}):
        raise SystemExit(f"{path} has no bandit: this draws runs of lbc_discrete.py")
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    scalars = {tag: np.array([(x.step, x.value) for x in events.Scalars(tag)]).T for tag in events.Tags()["scalars"]}
    return scalars, state


def points(told, max_k):
    """Indices between 0 and 1, k by its logarithm."""
    return np.concatenate([np.log1p(told[:, 1:3]) / math.log1p(max_k), told[:, 3:4]], 1)


def curve(axes, scalars, tags, title, log=False):
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
    """Ticks of k by its logarithm."""
    if name.startswith("k"):
        ticks = [k for k in TICKS if k <= max_k]
        getattr(axes, f"set_{which}ticks")([math.log1p(k) / math.log1p(max_k) for k in ticks], ticks)
    getattr(axes, f"set_{which}label")(name)


def heat_map(figure, axes, told, x, pair, max_k):
    """Mean return of the episodes in each cell; what was never tried is white."""
    first, second, i, j = pair
    cells, edges = 12, np.linspace(0, 1, 13)
    total, *_ = np.histogram2d(x[:, i], x[:, j], [edges, edges], weights=told[:, 4])
    count, *_ = np.histogram2d(x[:, i], x[:, j], [edges, edges])
    with np.errstate(invalid="ignore"):
        image = axes.imshow((total / count).T, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axes)
    axes.set_title(f"mean return by {first} and {second}, {cells} x {cells}")
    name_axis(axes, "x", first, max_k)
    name_axis(axes, "y", second, max_k)


def estimate(axes, bandit, told, x, name, axis, args):
    """The bandits' own: tiles voter by voter and their mean; else means of the remembered episodes along the axis."""
    axes.set_title(f"the bandits' estimate by {name}")
    if "weights" in bandit:
        values = np.take_along_axis(bandit["weights"].numpy(), bandit["tile"].numpy(), 2)[axis]
        places = (np.arange(values.shape[1]) + 0.5) / values.shape[1]
        for voter in values:
            axes.step(places, voter, where="mid", color="tab:gray", lw=0.6, alpha=0.7)
        axes.step(places, values.mean(0), where="mid", color="tab:blue", lw=1.8)
    else:
        last = slice(-args["window"], None)
        levels = np.unique(x[last, axis].round(3))
        means = [told[last, 4][np.isclose(x[last, axis], level, atol=1e-3)].mean() for level in levels]
        axes.plot(levels, means, "o-", color="tab:blue")
    axes.set_ylabel("return")
    name_axis(axes, "x", name, args["max_k"])


def draw(scalars, state, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args, bandit = state["args"], state["kept"]["bandit"]
    told = bandit["told"].numpy()
    x = points(told, args["max_k"])
    figure, grid = plt.subplots(5, 3, figsize=(15, 20), dpi=80)
    for axes, (name, words) in zip(
        grid[0], {"value_loss": "V", "q_loss": "Q", "policy_loss": "policy"}.items(), strict=True
    ):
        tags = [
            (f"losses/{name}{end}", label) for end, label in (("_1", "network 1"), ("_2", "network 2"), ("", "sum"))
        ]
        curve(axes, scalars, tags, f"{words} losses", log=name != "policy_loss")
    tags = [("losses/loss_1", "network 1"), ("losses/loss_2", "network 2"), ("losses/loss", "sum")]
    curve(grid[1, 0], scalars, tags, "all three, weighted")
    curve(grid[1, 1], scalars, [("charts/episodic_return", "training")], "return of training episodes")
    tags = [(f"greedy/{name}", name.replace("_", " ")) for name in ("network_1", "network_2", "mixture")]
    curve(grid[1, 2], scalars, tags, "greedy return")
    best = state["kept"]["agent"]["index"][0].tolist()
    grid[1, 2].set_xlabel("decisions; best index now: " + ", ".join(f"{v:.3g}" for v in best))
    for axes, pair in zip(grid[2], PAIRS, strict=True):
        heat_map(figure, axes, told, x, pair, args["max_k"])
    for axis, (axes, name) in enumerate(zip(grid[3], ("k1", "k2", "e"), strict=True)):
        estimate(axes, bandit, told, x, name, axis, args)
    for axis, (axes, name) in enumerate(zip(grid[4], ("k1", "k2", "e"), strict=True)):
        axes.scatter(told[:, 0], x[:, axis], s=4, c=told[:, 4], cmap="viridis", alpha=0.6)
        width = max(1, len(told) // 30)
        smooth = np.convolve(x[:, axis], np.ones(width) / width, "valid")
        axes.plot(told[width - 1 :, 0], smooth, color="tab:red", lw=1.5, label=f"mean of {width}")
        axes.set(title=f"{name} of each episode, coloured by its return", xlabel="decisions")
        name_axis(axes, "y", name, args["max_k"])
        axes.legend(fontsize=7)
    for axes in grid[:2].flat:
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="runs/NAME")
    parser.add_argument("--out", type=Path, help="where to write it; default: bandit.png in the run's folder")
    args = parser.parse_args()
    scalars, state = read(args.run)
    if not len(state["kept"]["bandit"]["told"]):
        raise SystemExit(f"{args.run}: no episode has ended yet")
    out = args.out or args.run / "bandit.png"
    draw(scalars, state, args.run.name).savefig(out)
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
