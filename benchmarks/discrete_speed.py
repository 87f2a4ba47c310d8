"""Steps per second of ppo_discrete_multiagent.py and ppo_lstm_multiagent.py beside SB3's PPO and sb3-contrib's
RecurrentPPO with the same hyperparameters, taking turns so that noise hits both.

    python benchmarks/discrete_speed.py                  about ten minutes
    python benchmarks/discrete_speed.py --rounds 1       a first look

CartPole-v1 and CartPoleBlind-v0 with 8 envs, the presets' batches; memory with an LSTM of 64 and no other layers, as
RecurrentPPO's is then, and sequences as long as a rollout. What theirs learns before its clock starts, and our
compiling, is not counted. Basic runs with its preset.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

SB3 = """
import sys, time
import torch
from stable_baselines3.common.env_util import make_vec_env
memory, steps = sys.argv[1] == "memory", int(sys.argv[2])
torch.set_num_threads(1)
same = dict(n_steps=128, n_epochs=10, device="cpu")
if memory:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    args = parser.parse_args()
    choices, steps = "ppo_discrete_multiagent.py", 102_400
    mine = lambda: ours(choices, "--env-id", "CartPole-v1", "--total-timesteps", steps)[0]
    turns("CartPole-v1, 8 envs", args.rounds, mine, lambda: float(python("-c", SB3, "choices", 10_240)), 3.5)
    memory = ["--env-id", "CartPoleBlind-v0", "--hidden-sizes", "--sequence-length", 128]
    mine = lambda: ours("ppo_lstm_multiagent.py", *memory, "--total-timesteps", 20_480)[0]
    turns("with memory", args.rounds, mine, lambda: float(python("-c", SB3, "memory", 5_120)), 3)
    rates = [ours(choices, "--env-id", "Basic", "--total-timesteps", 200_000)[0] for _ in range(args.rounds)]
    print(f"Basic: {median(rates):.0f} decisions/s, median of the turns (at least 5000 wanted)", flush=True)


if __name__ == "__main__":
    main()
