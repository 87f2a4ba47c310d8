"""The contract of all vector envs: which slots request an action, and which rewards have arrived."""

from contextlib import closing

import numpy as np
import parity_env  # noqa: F401
import pytest

from envs.make import make_envs
from envs.pixels import PixelEnvs
from onefile_rl import runs


def make(env_id, num_envs):
    return make_envs(
        runs.Args(env_id=env_id, num_envs=num_envs, max_agents=12 if env_id == "Mixed" else None), 1
    )[0]


@pytest.mark.parametrize(
    ("env_id", "num_envs"),
    [
        ("parity_env:Parity-v0", 3),
        ("InvertedPendulum-v5", 3),
        ("Hopper-v5", 1),
        ("3DBall", 1),
        ("Mixed", 1),
    ],
)
def test_every_action_is_closed_once(env_id, num_envs):
    """A slot that requests an action is closed before it requests the next one. A slot that is not closed has no reward
    and no end."""
    with closing(make(env_id, num_envs)) as envs:
        obs, infos = envs.reset(seed=1)
        assert infos["ready"].any() and not infos["closed"].any()
        pending = np.zeros(envs.num_envs, bool)
        rng = np.random.default_rng(0)
        closed = 0
        ends = 0
        for _ in range(200):
            assert not (pending & infos["ready"]).any()
            pending |= infos["ready"]
            actions = rng.uniform(-1, 1, (envs.num_envs, *envs.single_action_space.shape)).astype(
                np.float32
            )
            obs, reward, terminated, truncated, infos = envs.step(actions)
            assert (pending | ~infos["closed"]).all() and obs.dtype == np.float32
            assert not (
                reward[~infos["closed"]].any() or (terminated | truncated)[~infos["closed"]].any()
            )
            pending &= ~infos["closed"]
            closed = closed + infos["closed"].sum()
            ends = ends + (terminated | truncated).sum()
        assert closed > 150 and ends > 2


def test_images_are_closed_at_every_step():
    with closing(PixelEnvs("DummyPixels-v0", 2)) as envs:
        _, infos = envs.reset(seed=1)
        assert infos["ready"].all() and not infos["closed"].any()
        *_, infos = envs.step(np.zeros((2, 2), np.float32))
        assert infos["ready"].all() and infos["closed"].all()


def test_nested_actions_are_vectors():
    with closing(make("parity_env:Square-v0", 2)) as envs:
        envs.reset(seed=1)
        assert envs.single_action_space.shape == (4,)
        assert envs.step(np.arange(8, dtype=np.float32).reshape(2, 4))[1].tolist() == [0 + 3, 4 + 7]
