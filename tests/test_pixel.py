"""ppo_pixel.py: parity with the real SB3, frame stacks, masks, workers, encoders, the run's life, bad input."""

import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import assert_parity, learn_with_sb3, spy_on, start_like_sb3

import ppo_pixel as ppo

SMALL = dict(env_id="parity_env:ParityPixels-v0", num_envs=2, num_steps=32, num_minibatches=4, update_epochs=2, features=16)


@pytest.fixture
def spy(monkeypatch, tmp_path):
    return spy_on(ppo, monkeypatch, tmp_path, SMALL)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """These images are too small for more, and several tests may run on few cores."""
    monkeypatch.setattr(ppo.os, "cpu_count", lambda: 1)
    torch.set_num_threads(1)


# Parity with SB3


def observations(seen, rows):
    """Images of the first batch's rows, from the minibatches of its first epoch."""
    out = {}
    for mb_inds, images in seen.minibatches:
        out |= dict(zip(mb_inds.tolist(), images[0].numpy(), strict=True))
        if len(out) == rows:
            return np.stack([out[i] for i in range(rows)])


@pytest.mark.parametrize("kind", ["", "Discrete", "MultiDiscrete"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_parity_with_sb3(spy, monkeypatch, num_envs, kind):
    """With a small learning rate: where a ReLU's input passes through 0, rounding decides, and Adam makes a whole step of it."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    iterations, steps = 5, 128 // num_envs
    venv = make_vec_env(f"ParityPixels{kind}-v0", num_envs, seed=3)
    model = PPO("CnnPolicy", venv, n_steps=steps, batch_size=64, n_epochs=2, learning_rate=1e-4, gamma=0.97, ent_coef=0.01, seed=3, device="cpu")
    names = {f"encoders.0.{i}": f"features_extractor.cnn.{i}" for i in (0, 2, 4)}
    names |= {"actor_logstd": "log_std", "trunk.0": "features_extractor.linear.0", "actor": "action_net", "critic": "value_net"}
    first, initial, final = learn_with_sb3(model, names, iterations)
    start_like_sb3(ppo, monkeypatch, initial)
    seen = spy(
        env_id=f"parity_env:ParityPixels{kind}-v0", num_envs=num_envs, num_steps=steps, num_minibatches=2, update_epochs=2, total_timesteps=iterations * 128,
        features=512, learning_rate=1e-4, gamma=0.97, ent_coef=0.01, vf_coef=1.0, anneal_lr=False, norm_reward=False, seed=3,
    )  # fmt: skip
    _, _, _, actions, logprobs, advantages, returns, values = seen.batches[0]
    ours = dict(observations=observations(seen, 128), actions=actions.numpy(), log_probs=logprobs.numpy(), values=values.numpy())
    ours |= dict(advantages=advantages.numpy(), returns=returns.numpy())
    assert_parity(seen, ours, first, initial, final, num_envs, 0.97, moved=2e-4)
