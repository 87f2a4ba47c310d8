"""Measure the speed of ppo_discrete_multiagent.py and ppo_lstm_multiagent.py, and of SB3's PPO and
sb3-contrib's RecurrentPPO with the same hyperparameters; and of ppo_hybrid_multiagent.py beside
ppo_discrete_multiagent.py.

    python benchmarks/discrete_speed.py                  about ten minutes
    python benchmarks/discrete_speed.py --rounds 1       about four minutes

Both sides run alternately, so that other load on the machine affects both. The environments are
CartPole-v1 and CartPoleBlind-v0 with 8 envs and the batches of the presets. The recurrent policies
are an LSTM of size 64 without other layers, with sequences as long as a rollout, as in
RecurrentPPO. The time for compiling is not included, nor is one iteration of SB3 at the start.
Basic runs with its preset.

The hybrid script is compared with the discrete one in steps per CPU second, in an env that costs
nearly nothing, with the same batches and networks with six outputs: two branches of three choices,
or three continuous actions and one branch.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

DISCRETE = "ppo_discrete_multiagent.py"
HYBRID = "ppo_hybrid_multiagent.py"
LSTM = "ppo_lstm_multiagent.py"
SB3 = """
import sys, time
import torch
from stable_baselines3.common.env_util import make_vec_env

recurrent = sys.argv[1] == "recurrent"
steps = int(sys.argv[2])
torch.set_num_threads(1)
same = dict(n_steps=128, n_epochs=10, device="cpu")
if recurrent:
    import envs
    from sb3_contrib import RecurrentPPO
    layers = dict(net_arch=dict(pi=[], vf=[]), lstm_hidden_size=64)
    envs = make_vec_env("CartPoleBlind-v0", 8)
    model = RecurrentPPO("MlpLstmPolicy", envs, batch_size=256, policy_kwargs=layers, **same)
else:
    from stable_baselines3 import PPO
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 8), batch_size=128, **same)
model.learn(1024)
start = time.time()
model.learn(steps)
print(steps / (time.time() - start))
"""

SAME = """
import importlib, sys, time
import gymnasium as gym
import numpy as np

class Same(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, hybrid):
        self.action_space = gym.spaces.MultiDiscrete([3, 3])
        if hybrid:
            parts = [gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(3)]
            self.action_space = gym.spaces.Tuple(parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(4, np.float32), {}

    def step(self, action):
        return np.ones(4, np.float32), 1.0, False, False, {}

gym.register("Same-v0", Same, max_episode_steps=200)
script = importlib.import_module(sys.argv[1])
settings = dict(num_envs=8, num_steps=128, num_minibatches=8, total_timesteps=51_200, compile=False)
kind = {"hybrid": "hybrid" in sys.argv[1]}
start = time.process_time()
script.train(script.Args(env_id="Same-v0", env_kwargs=kind, **settings))
print("speed", 51_200 / (time.process_time() - start))
"""


def same(script):
    """Return the steps per CPU second of a script in the env Same."""
    return float(python("-c", SAME, script.removesuffix(".py")).split()[-1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    args = parser.parse_args()

    cartpole = ["--env-id", "CartPole-v1", "--total-timesteps", 102_400]
    turns(
        "CartPole-v1, 8 envs",
        args.rounds,
        lambda: ours(DISCRETE, *cartpole)[0],
        lambda: float(python("-c", SB3, "feed-forward", 10_240)),
        3.5,
    )
    blind = ["--env-id", "CartPoleBlind-v0", "--hidden-sizes", "--sequence-length", 128]
    blind += ["--total-timesteps", 20_480]
    turns(
        "CartPoleBlind-v0 with an LSTM, 8 envs",
        args.rounds,
        lambda: ours(LSTM, *blind)[0],
        lambda: float(python("-c", SB3, "recurrent", 5_120)),
        3,
    )
    basic = ["--env-id", "Basic", "--total-timesteps", 200_000]
    speed = median(ours(DISCRETE, *basic)[0] for _ in range(args.rounds))
    print(f"Basic: {speed:.0f} decisions/s, median (at least 5000 wanted)", flush=True)
    turns("hybrid beside discrete", args.rounds, lambda: same(HYBRID), lambda: same(DISCRETE), 0.9)


if __name__ == "__main__":
    main()
