"""Steps per second of ppo_continuous_multiagent.py beside SB3's PPO with the same hyperparameters, taking turns so that
noise hits both.

    python benchmarks/ppo_speed.py                  about ten minutes
    python benchmarks/ppo_speed.py --rounds 1       a first look

HalfCheetah-v5, batches of 2048, minibatches of 64, 10 epochs, networks of 64x64, CPU. Compilation happens before the
clock starts and is printed apart; SB3 has learned for an iteration before its clock starts. Collecting alone is
measured against the bare vector env with random actions. The scenes run with their presets.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
SB3 = """
import sys, time
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
n, steps = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
model = PPO("MlpPolicy", make_vec_env("HalfCheetah-v5", n), n_steps=2048 // n, device="cpu")
model.learn(2048)
start = time.time()
model.learn(steps)
print(steps / (time.time() - start))
"""
SB3_SETTINGS = ["--hidden-sizes", 64, 64, "--activation", "tanh", "--logstd-init", 0, "--norm-adv"]
BARE = """
import sys, time
import numpy as np
from envs.vector import make_envs
from runs import Args
n, steps = int(sys.argv[1]), int(sys.argv[2])
envs, _ = make_envs(Args(env_id="HalfCheetah-v5", num_envs=n), seed=1)
envs.reset(seed=1)
space = envs.single_action_space
actions = np.random.default_rng(0).uniform(-1, 1, (100, n, *space.shape)).astype(space.dtype)
start = time.time()
for i in range(steps // n):
    envs.step(actions[i % 100])
print(steps / (time.time() - start))
"""


def python(*args):
    """What a Python program prints, run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command, environment = [sys.executable, *map(str, args)], {**os.environ, "PYTHONPATH": str(ROOT)}
        out = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(out.stderr)
    return out.stdout


def ours(script, *args):
    """Steps per second and the share of acting, of the run's last line."""
    out = python(ROOT / script, *args)
    for line in re.findall(r"Compiled.*", out):
        print(f"    ({line})")
    return float(re.findall(r"(\d+) SPS", out)[-1]), int(re.findall(r"act +(\d+)%", out)[-1])


def turns(name, rounds, mine, other, wanted):
    ratios = []
    for _ in range(rounds):
        a, b = mine(), other()
        ratios.append(a / b)
        print(f"  {name}: {a:6.0f} against {b:6.0f} steps/s, {a / b:.2f}", flush=True)
    print(f"{name}: {median(ratios):.2f}, median of the turns (at least {wanted} wanted)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--steps", type=int, default=40960, help="steps a turn; SB3 takes a quarter")
    args = parser.parse_args()
    ppo = "ppo_continuous_multiagent.py"
    for n, wanted in ((1, 4), (8, 3.5)):
        cheetah = ["--env-id", "HalfCheetah-v5", "--num-envs", n, "--num-steps", 2048 // n]
        cheetah += [*SB3_SETTINGS, "--total-timesteps", args.steps]
        mine, theirs = lambda: ours(ppo, *cheetah)[0], lambda: float(python("-c", SB3, n, args.steps // 4))
        turns(f"{n} env(s), SB3", args.rounds, mine, theirs, wanted)
    turns(
        "8 envs, collecting alone, bare envs",
        args.rounds,
        lambda: ours(ppo, *cheetah, "--update-epochs", 0)[0],
        lambda: float(python("-c", BARE, 8, args.steps)),
        0.8,
    )
    for scene, steps, wanted in (("3DBall", 61440, 3000), ("Crawler", 61440, 1600)):
        runs = [ours(ppo, "--env-id", scene, "--total-timesteps", steps) for _ in range(args.rounds)]
        sps, act = median(r[0] for r in runs), median(r[1] for r in runs)
        rate = f"{sps:.0f} decisions/s, median of the turns (at least {wanted} wanted)"
        print(f"{scene}: {rate}, {act:.0f} % of the time acting", flush=True)


if __name__ == "__main__":
    main()
