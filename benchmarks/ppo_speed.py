"""Measure the speed of ppo_continuous_multiagent.py and of SB3's PPO with the same hyperparameters.

    python benchmarks/ppo_speed.py                  about ten minutes
    python benchmarks/ppo_speed.py --rounds 1       about four minutes

Both run alternately, so that other load on the machine affects both. The environment is
HalfCheetah-v5, with batches of 2048, minibatches of 64, 10 epochs and networks of 64x64, on the
CPU. The time for compiling is printed, but not included. SB3 learns for one iteration before its
time is taken. A rollout without updates is compared with the vector env alone and random actions.
The scenes run with their presets.
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
PPO = "ppo_continuous_multiagent.py"
SB3 = """
import sys, time
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

num_envs = int(sys.argv[1])
steps = int(sys.argv[2])
torch.set_num_threads(1)
envs = make_vec_env("HalfCheetah-v5", num_envs)
model = PPO("MlpPolicy", envs, n_steps=2048 // num_envs, device="cpu")
model.learn(2048)
start = time.time()
model.learn(steps)
print(steps / (time.time() - start))
"""
SB3_SETTINGS = ["--hidden-sizes", 64, 64, "--activation", "tanh", "--logstd-init", 0, "--norm-adv"]
ENVS_ALONE = """
import sys, time
import numpy as np
from envs.make import make_envs
from onefile_rl.runs import Args

num_envs = int(sys.argv[1])
steps = int(sys.argv[2])
envs, _ = make_envs(Args(env_id="HalfCheetah-v5", num_envs=num_envs), seed=1)
envs.reset(seed=1)
space = envs.single_action_space
rng = np.random.default_rng(0)
actions = rng.uniform(-1, 1, (100, num_envs, *space.shape)).astype(space.dtype)
start = time.time()
for i in range(steps // num_envs):
    envs.step(actions[i % 100])
print(steps / (time.time() - start))
"""


def python(*args):
    """Run Python with these arguments in a temporary folder, and return its output."""
    command = [sys.executable, *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
    if result.returncode:
        raise SystemExit(result.stderr)
    return result.stdout


def ours(script, *args):
    """Return the steps per second of a run and its share of the time for acting in percent, from
    its last line of progress."""
    output = python(ROOT / script, *args)
    for line in re.findall(r"Compiled.*", output):
        print(f"    ({line})")
    speed = re.findall(r"(\d+) SPS", output)[-1]
    acting = re.findall(r"act +(\d+)%", output)[-1]
    return float(speed), int(acting)


def turns(name, rounds, measure, measure_other, wanted):
    """Measure both sides once per round, and print their ratio. `wanted` is the goal."""
    ratios = []
    for _ in range(rounds):
        speed = measure()
        other = measure_other()
        ratios.append(speed / other)
        line = f"{speed:6.0f} against {other:6.0f} steps/s, {ratios[-1]:.2f}"
        print(f"  {name}: {line}", flush=True)
    print(f"{name}: {median(ratios):.2f}, median (at least {wanted} wanted)", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument(
        "--steps", type=int, default=40960, help="steps of a run; SB3 makes a quarter of them"
    )
    args = parser.parse_args()

    for num_envs, wanted in ((1, 4), (8, 3.5)):
        cheetah = ["--env-id", "HalfCheetah-v5", "--num-envs", num_envs]
        cheetah += ["--num-steps", 2048 // num_envs]
        cheetah += [*SB3_SETTINGS, "--total-timesteps", args.steps]
        turns(
            f"{num_envs} env(s), SB3",
            args.rounds,
            lambda: ours(PPO, *cheetah)[0],
            lambda: float(python("-c", SB3, num_envs, args.steps // 4)),
            wanted,
        )
    turns(
        "8 envs, rollouts only, envs alone",
        args.rounds,
        lambda: ours(PPO, *cheetah, "--update-epochs", 0)[0],
        lambda: float(python("-c", ENVS_ALONE, 8, args.steps)),
        0.8,
    )
    for scene, steps, wanted in (("3DBall", 61440, 3000), ("Crawler", 61440, 1600)):
        options = ["--env-id", scene, "--total-timesteps", steps]
        results = [ours(PPO, *options) for _ in range(args.rounds)]
        speed = median(speed for speed, _ in results)
        acting = median(acting for _, acting in results)
        rate = f"{speed:.0f} decisions/s, median (at least {wanted} wanted)"
        print(f"{scene}: {rate}, {acting:.0f} % of the time acting", flush=True)


if __name__ == "__main__":
    main()
