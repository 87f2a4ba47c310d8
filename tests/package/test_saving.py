"""What a run writes: seeds that stay valid, files that fail, files of other runs, and numbers that are not finite."""

from functools import partial

import gymnasium as gym
import parity_env  # noqa: F401
import pytest
from conftest import call, train

import ppo_continuous_multiagent as ppo
from envs.make import SyncEnvs
from onefile_rl import checkpoints
from onefile_rl.engines.scenes import derive_seed

SMALL = dict(
    env_id="parity_env:Parity-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8),
    checkpoint_interval=1,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, ppo, SMALL), partial(call, ppo)


def load(path):
    return checkpoints.load(path, ppo.__file__)[1]


# Seeds


def test_a_derived_seed_is_the_sum_and_wraps_at_the_largest_one():
    assert derive_seed(1, 2**30) == 2**30 + 1
    assert derive_seed(2**31 - 1, 0) == 2**31 - 1
    assert derive_seed(2**31 - 1, 1) == derive_seed(2**31, 0) == 0
    assert derive_seed(5, 3 * 2**31 + 7) == 12


def test_a_run_with_the_largest_seed_is_resumed_and_evaluated(monkeypatch, capsys):
    """A player's seed is a signed integer of 32 bits. A resumed run adds its decisions to the seed."""
    settings = dict(env_id="3DBall", num_steps=8, total_timesteps=96, seed=2**31 - 1)
    folder = train(**settings)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 192)
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 12)
    assert load(folder)["global_step"] == 192
    assert "after 192 decisions, 12 episodes" in capsys.readouterr().out


def test_every_env_gets_a_valid_seed():
    seeds = []

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

    SyncEnvs([Env(), Env(), Env()]).reset(seed=2**31 - 2)
    assert seeds == [2**31 - 2, 2**31 - 1, 0]
