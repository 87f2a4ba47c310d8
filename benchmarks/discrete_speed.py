"""Measure the speed of ppo_discrete_multiagent.py and ppo_lstm_multiagent.py, and of SB3's PPO and
sb3-contrib's RecurrentPPO with the same hyperparameters.

    python benchmarks/discrete_speed.py                  about ten minutes
    python benchmarks/discrete_speed.py --rounds 1       about four minutes

Both sides run alternately, so that other load on the machine affects both. The environments are
CartPole-v1 and CartPoleBlind-v0 with 8 envs and the batches of the presets. The recurrent policies
are an LSTM of size 64 without other layers, with sequences as long as a rollout, as in
RecurrentPPO. The time for compiling is not included, nor is one iteration of SB3 at the start.
Basic runs with its preset.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

DISCRETE = "ppo_discrete_multiagent.py"
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


if __name__ == "__main__":
    main()
