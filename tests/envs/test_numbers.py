"""Numbers that would spoil the weights or the running statistics are refused where they enter."""

import re
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import parity_env  # noqa: F401
import pytest

import lbc_discrete as lbc
from envs.envpool_envs import EnvPoolEnvs
from envs.make import make_envs
from envs.pixels import PixelEnvs
from onefile_rl import runs
from onefile_rl.engines import limits
from onefile_rl.engines.scenes import EngineError


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_numbers_beyond_the_limit_are_found(dtype):
    rows = np.zeros((400, 3), dtype)
    assert limits.find_invalid(rows) is None
    rows[:] = 1e25
    assert limits.find_invalid(rows) is None, "the sum of squares overflows, and no number does"
    for value in (np.nan, np.inf, -np.inf, -2e30):
        rows[7, 2] = value
        assert limits.find_invalid(rows) == (7, 2)
    assert limits.find_invalid(rows[:, 0].copy()) is None
    assert limits.find_invalid(np.zeros((0, 1))) is None


@pytest.mark.parametrize(
    ("where", "value", "step", "message"),
    [
        ("reward", 1e300, 3, "env 0: reward is 1e+300, and must be at most 1e+30"),
        ("reward", -1e39, 3, "env 0: reward is -1e+39, and must be at most 1e+30"),
        ("observation", 1e39, 3, "env 0: observation 1 is inf: clip it"),
        ("observation", -1e35, 0, "env 0: observation 1 is -1"),
        ("final", 1e35, 5, "env 0: observation 1 is 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_huge_numbers_of_a_gymnasium_env_are_refused(where, value, step, message):
    kwargs = {"where": where, "value": value, "step": step}
    envs, _ = make_envs(runs.Args(env_id="parity_env:Huge-v0", num_envs=2, env_kwargs=kwargs), 1)

    def play():
        envs.reset(1)
        for _ in range(5):
            envs.step(np.zeros((2, 2), int))

    with closing(envs), pytest.raises(EngineError, match=re.escape(message)):
        play()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("where", "what"), [("reward", "reward is 1e"), ("final", "observation 0")]
)
def test_huge_numbers_of_an_env_with_images_are_refused(where, what, num_workers):
    envs = PixelEnvs("parity_env:HugePixels-v0", 2, num_workers, env_kwargs={"where": where})
    shape = (2, *envs.single_action_space.shape)
    with closing(envs), pytest.raises(EngineError, match=f"env 0: {what}.*must be at most"):
        envs.reset(1)
        for _ in range(5):
            envs.step(np.zeros(shape, envs.single_action_space.dtype))


@pytest.mark.parametrize("which", ["reset", "observation", "reward"])
def test_huge_numbers_of_envpool_are_refused(which):
    obs = np.zeros((2, 3))
    rewards = np.zeros(2)
    if which == "reward":
        rewards[1] = 1e300
    else:
        obs[1, 2] = 1e35
    no = np.zeros(2, bool)
    first = obs if which == "reset" else np.zeros((2, 3))
    envs = EnvPoolEnvs.__new__(EnvPoolEnvs)
    envs.num_envs = 2
    envs.pool = SimpleNamespace(
        reset=lambda: (first, {}), send=lambda _: None, recv=lambda: (obs, rewards, no, no, {})
    )
    with pytest.raises(EngineError, match="env 1: (reward|observation 2) is 1"):
        envs.reset(1)
        envs.step(None)


def test_a_huge_reward_in_an_actor_process_ends_the_run(tmp_path, monkeypatch):
    """Starting the actor again is no help, and the same run without actors ends too."""
    monkeypatch.chdir(tmp_path)
    args = lbc.Args(
        env_id="parity_env:Huge-v0", sequence_length=4, hidden_sizes=(8,), batch_size=8, replay_size=16,
        num_updates=1, eval_interval=0, exp_name="test", num_actors=1, num_envs=1,
    )  # fmt: skip
    with pytest.raises(EngineError, match="^actor 0: env 0: reward is 1e.300, and must be at most"):
        lbc.train(args)
