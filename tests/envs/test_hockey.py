"""envs/tasks/hockey.py with a stand-in that has the game's interface and pitfalls, and with the game if installed."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in_hockey
from conftest import call, train

import lbc_discrete as lbc
from envs.make import SyncEnvs, make_env
from envs.tasks.hockey import ACTION_VALUES, MISSING, SCALE

installed = importlib.util.find_spec("hockey") is not None
REAL = pytest.param(
    "real",
    marks=pytest.mark.skipif(not installed, reason="martius-lab/hockey-env is not installed here"),
)
ID = "LaserHockey-v0"


@pytest.fixture(params=["stand-in", REAL])
def game(request, monkeypatch):
    """Return the module of the game: the stand-in or the real one."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "hockey", SimpleNamespace(hockey_env=stand_in_hockey))
    from hockey import hockey_env

    return hockey_env


def played(env, seed, actions):
    """Return the observations, rewards and ends of several episodes from a seed on."""
    obs, _ = env.reset(seed=seed)
    out = [obs]
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        out.append(np.array([*obs, reward, terminated, truncated]))
        if terminated or truncated:
            out.append(env.reset()[0])
    return np.concatenate(out)


def some_actions(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, len(values), count) for values in ACTION_VALUES], 1)


def test_a_seed_determines_everything_and_numpys_global_generator_is_left_alone(game):
    """Start, starting side and opponent are the same in a new env and in a used one, for any state of numpy's global
    generator, which is not changed."""
    actions = some_actions(700)
    first = make_env(ID)
    second = make_env(ID)
    played(second, 3, some_actions(300, 1))
    second.unwrapped.game.player1_has_puck = 7  # as if an episode had ended with it
    np.random.seed(5)
    state = np.random.get_state()[1].copy()
    ours = played(first, 7, actions)
    assert (np.random.get_state()[1] == state).all()
    np.random.seed(6)
    np.testing.assert_array_equal(ours, played(second, 7, actions))
    assert not np.array_equal(ours[:18], played(second, 8, actions[:1])[:18])


def test_the_time_limit_truncates_and_a_goal_terminates(game):
    env = make_env(ID, touch=0.0, direction=0.0, closeness=0.0)
    ends = []
    for seed in range(12):
        env.reset(seed=seed)
        for t, action in enumerate(some_actions(300, seed)):
            action[3] = 1 if seed % 2 else 0
            obs, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                ends.append((t + 1, reward, terminated, truncated, info["is_success"]))
                break
            assert reward == pytest.approx(0, abs=1e-12), "only goals count without the weights"
    assert {x[2] for x in ends} == {True, False} and len(ends) == 12
    for length, reward, terminated, truncated, success in ends:
        assert terminated != truncated
        assert length == 251 if truncated else reward == pytest.approx(10 if success else -10)


def test_dense_rewards_are_weighted_infos(game):
    env = make_env(ID, closeness=2.0, touch=3.0, direction=5.0)
    env.reset(seed=1)
    inner = env.unwrapped.game
    reported = []
    step = inner.step

    def spied(action):
        reported.append(step(action))
        return reported[-1]

    inner.step = spied
    seen = [env.step(action) for action in some_actions(120)]
    for (_, base, _, _, info), (_, reward, *_) in zip(reported, seen, strict=True):
        more = (
            info["reward_closeness_to_puck"]
            + 3 * info["reward_touch_puck"]
            + 5 * info["reward_puck_direction"]
        )
        assert reward == pytest.approx(base + more)


def test_observations_are_scaled_and_actions_are_mapped(game):
    env = make_env(ID)
    given = []
    inner = env.unwrapped.game
    step = inner.step
    inner.step = lambda action: given.append(action) or step(action)
    env.reset(seed=0)
    obs, *_ = env.step(np.array([0, 1, 2, 1]))
    np.testing.assert_array_equal(given[0], [-1, 0, 1, 1])
    assert obs.dtype == np.float32 and obs.shape == (18,) == SCALE.shape
    largest = max(np.abs(env.step(action)[0]).max() for action in some_actions(200))
    assert 0.5 < largest < 5
    with pytest.raises(ValueError, match="choose one of normal, shooting, defense"):
        make_env(ID, mode="other")
    make_env(ID, mode="shooting").reset(seed=1)


def test_episodes_continue_exactly_after_a_resume(game):
    rng = np.random.default_rng(0)
    twin = None
    envs = SyncEnvs([make_env(ID) for _ in range(2)])
    envs.reset(seed=5)
    for action in some_actions(600):
        envs.step(np.stack([action, action]))
    twin = SyncEnvs([make_env(ID) for _ in range(2)])
    twin.restore(envs.state())
    for _ in range(100):
        actions = np.stack([rng.integers(0, len(values), 2) for values in ACTION_VALUES], 1)
        for a, b in zip(envs.step(actions)[:4], twin.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(a, b)


def test_training_and_evaluation_run(game, monkeypatch, empty_folder, capsys):
    small = dict(env_id=ID, num_envs=2, total_timesteps=1000, hidden_sizes=(8,), eval_interval=0)
    folder = train(lbc, small)
    call(lbc, monkeypatch, "--evaluate", folder, "--eval-episodes", 2)
    assert "; success " in capsys.readouterr().out


def test_without_the_game_one_line_says_how_to_install_it(monkeypatch, empty_folder):
    monkeypatch.setitem(sys.modules, "hockey", None)
    with pytest.raises(SystemExit, match="pip install --no-deps git") as caught:
        call(lbc, monkeypatch, "--env-id", ID)
    assert len(str(caught.value).strip().splitlines()) == 1 and MISSING in str(caught.value)
