"""Statistics of several runs: interquartile mean, bootstrap intervals, performance profiles,
probability of improvement.

They are those of Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", 2021. plots.py and the tables of the docs use them.

The scores of a script are a list with an array per task (an env). The last axis of an array are the
runs (the seeds), so curves are arrays of points x runs. Tasks can have different numbers of runs.
The scores of different tasks are comparable only after normalized().
"""

import numpy as np

SAMPLES = 2000  # bootstrap samples
LEVEL = 95  # percent of the bootstrap samples that an interval contains


def interquartile_mean(tasks):
    """Return the mean of the middle half of all runs of all tasks.

    A quarter of the runs, rounded down, is left out at each end, as scipy.stats.trim_mean does. With
    fewer than four runs it is the mean.
    """
    ordered = np.sort(np.concatenate(tasks, axis=-1), axis=-1)
    num_runs = ordered.shape[-1]
    cut = num_runs // 4
    return ordered[..., cut : num_runs - cut].mean(-1)


def performance_profile(tasks, thresholds):
    """Return, for each threshold, the share of the runs with a score above it, averaged over the
    tasks. The thresholds are the first axis of the result."""
    levels = np.asarray(thresholds, float)
    shares = []
    for scores in tasks:
        above = scores > levels.reshape(-1, *[1] * scores.ndim)
        shares.append(above.mean(-1))
    return np.mean(shares, axis=0)


def probability_of_improvement(tasks, other_tasks):
    """Return how often a run of the first script has a higher score than a run of the other one on
    the same task, averaged over the tasks. Equal scores count half."""
    shares = []
    for ours, others in zip(tasks, other_tasks, strict=True):
        difference = ours[..., :, None] - others[..., None, :]
        wins = (difference > 0) + 0.5 * (difference == 0)
        shares.append(wins.mean((-2, -1)))
    return np.mean(shares, axis=0)


def bootstrap_interval(statistic, *groups, seed=0):
    """Return the lower and the upper end of the 95 % interval of statistic(*groups).

    groups: the scores of one script each. The bootstrap is stratified: each sample has, for every
    task, as many runs as there are, drawn with replacement among the runs of this task.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for tasks in groups:
        samples = []
        for scores in tasks:
            num_runs = scores.shape[-1]
            indices = rng.integers(num_runs, size=(SAMPLES, num_runs))
            samples.append(scores[..., indices])
        drawn.append(samples)
    tail = (100 - LEVEL) / 2
    return np.percentile(statistic(*drawn), [tail, 100 - tail], axis=-1)


def normalized(scores, low, high):
    """Return the scores on a scale on which `low` is 0 and `high` is 1."""
    return (np.asarray(scores, float) - low) / (high - low)
