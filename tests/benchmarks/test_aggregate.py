"""benchmarks/aggregate.py against closed forms."""

import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import aggregate


def interquartile_mean(*scores):
    return aggregate.interquartile_mean([np.array(scores, float)])


def test_interquartile_mean_is_the_mean_of_the_middle_half():
    assert interquartile_mean(100, 2, 3, 1) == 2.5, "without 1 and 100, in any order"
    assert interquartile_mean(*range(1, 9)) == 4.5
    assert interquartile_mean(-1e9, 1, 2, 3, 4, 5, 6, 1e9) == 3.5, "outliers do not count"


def test_interquartile_mean_rounds_a_fraction_of_runs_down():
    """As scipy.stats.trim_mean(x, 0.25) does: of ten runs, two are left out at each end."""
    assert interquartile_mean(1, 2, 6) == 3, "the mean: a quarter of three is less than one"
    assert interquartile_mean(0, 1, 3, 5, 100) == 3
    assert interquartile_mean(0, 1, 3, 3, 5, 6, 100) == pytest.approx(18 / 5)
    assert interquartile_mean(0, 1, 4, 5, 6, 7, 8, 9, 50, 60) == 6.5


def test_interquartile_mean_of_tasks_is_that_of_all_their_runs():
    tasks = [np.array([1.0, 8.0]), np.array([2.0, 3.0, 4.0, 5.0, 6.0, 7.0])]
    assert aggregate.interquartile_mean(tasks) == 4.5


def test_interquartile_mean_of_curves_is_taken_at_each_point():
    curves = np.array([[1.0, 2, 3, 100], [-9, 5, 5, 5]])  # two points of four runs
    assert aggregate.interquartile_mean([curves]).tolist() == [2.5, 5]


def test_profile_falls_by_a_step_at_each_score():
    tasks = [np.array([1.0, 2, 2, 4])]
    thresholds = [0, 1, 1.5, 2, 3, 4, 5]
    profile = aggregate.performance_profile(tasks, thresholds)
    assert profile.tolist() == [1, 0.75, 0.75, 0.25, 0.25, 0, 0]


def test_profile_gives_tasks_equal_weights():
    tasks = [np.array([1.0]), np.array([0.0, 0, 0])]
    assert aggregate.performance_profile(tasks, [0.5]).tolist() == [0.5]


def test_probability_of_improvement_counts_pairs_and_ties_as_half():
    probability = lambda a, b: aggregate.probability_of_improvement([np.array(a)], [np.array(b)])
    assert probability([3.0, 4], [1.0, 2]) == 1
    assert probability([1.0, 2], [3.0, 4]) == 0
    assert probability([5.0, 5], [5.0, 5, 5]) == 0.5
    assert probability([1.0, 3], [2.0, 3]) == (0 + 0 + 1 + 0.5) / 4
    tasks = [np.array([1.0]), np.array([1.0])]
    others = [np.array([0.0]), np.array([1.0, 1])]
    assert aggregate.probability_of_improvement(tasks, others) == (1 + 0.5) / 2


def test_interval_of_equal_scores_has_no_width():
    constant = [np.full(5, 7.0), np.full(3, 7.0)]
    assert aggregate.bootstrap_interval(aggregate.interquartile_mean, constant).tolist() == [7, 7]
    low, high = aggregate.bootstrap_interval(
        aggregate.probability_of_improvement, constant, constant
    )
    assert low == high == 0.5
    profile = lambda tasks: aggregate.performance_profile(tasks, [6, 7])
    assert aggregate.bootstrap_interval(profile, constant).tolist() == [[1, 0], [1, 0]]


def test_bootstrap_draws_runs_within_their_task():
    """The tasks differ, the runs of a task do not: without strata the mean would vary."""
    tasks = [np.zeros(4), np.ones(4)]
    assert aggregate.bootstrap_interval(aggregate.interquartile_mean, tasks).tolist() == [0.5, 0.5]


def test_bootstrap_draws_whole_curves():
    """Both points of a curve come from the same run, so that their difference does not vary."""
    curves = [np.array([[1.0, 5, 9, 2, 7], [2, 6, 10, 3, 8]])]
    difference = lambda tasks: np.diff(aggregate.interquartile_mean(tasks), axis=0)
    assert np.allclose(aggregate.bootstrap_interval(difference, curves), 1)


def test_interval_of_the_mean_of_three_runs_is_their_range():
    """One of 27 samples has three times the lowest run, which is more than 2.5 %."""
    low, high = aggregate.bootstrap_interval(
        aggregate.interquartile_mean, [np.array([1.0, 4.0, 5.0])]
    )
    assert (low, high) == (1, 5)


def test_intervals_of_normal_samples_contain_the_true_value():
    """Of 200 intervals of 30 runs each, 95 % should. Percentile intervals are a little too narrow."""
    rng = np.random.default_rng(1)
    num_inside = 0
    for sample in rng.normal(3, 2, (200, 30)):
        low, high = aggregate.bootstrap_interval(aggregate.interquartile_mean, [sample])
        num_inside += low < 3 < high
    assert 0.88 <= num_inside / 200 <= 0.99


def test_normalized_scores_are_0_and_1_at_the_ends():
    assert aggregate.normalized([-10, 40, 90], -10, 90).tolist() == [0, 0.5, 1]
