"""Where the time of PPO from pixels goes, rung by rung, and steps per second beside SB3's CnnPolicy, taking turns.

    python benchmarks/pixel_speed.py                  about fifteen minutes
    python benchmarks/pixel_speed.py --rounds 1       a first look

DummyPixels-v0, 64 x 64 x 3, 256 steps an iteration, batches of 512, 10 epochs, CPU: at 8 and at 32 envs. The first rung
is gymnasium's envs with nothing around them; each next one adds something. SB3 has the same settings, and has learned
for an iteration before its clock starts. Then HalfCheetah-v5 from pixels, collecting alone, in two workers, beside what
gymnasium's own rendering gives a process.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

RUNGS = """
import sys, time
import gymnasium as gym
import numpy as np
import fast
import ppo_pixel as ppo
rung, n, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
args = ppo.Args(env_id="DummyPixels-v0", num_envs=n)
actions = np.random.default_rng(0).uniform(-1, 1, (100, n, 2)).astype(np.float32)
if rung == "envs":
    envs = [gym.make(args.env_id, disable_env_checker=True) for _ in range(n)]
    [env.reset(seed=i) for i, env in enumerate(envs)]
    def step(t):
        for env, action in zip(envs, actions[t % 100]):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
else:
    envs, _ = ppo.make_envs(args, 1)
    spec = ppo.describe(args, envs)
    frames, everybody, act = ppo.Frames(spec, n, 260 * n), np.arange(n), fast.Acting(ppo.Agent(spec, args)).module
    seen = frames.see(*envs.reset(seed=1), everybody)
    def step(t):
        global seen
        action = actions[t % 100]
        if rung == "policy":
            _, action, *_ = act(ppo.stacked(frames.images(), seen[0]), *seen[1:])
        obs, _, terminated, truncated, infos = envs.step(action)
        frames.begins |= terminated | truncated
        seen = frames.see(obs, infos, everybody)
        if t % 256 == 255:
            seen = frames.forget(seen[0]), *seen[1:]
for t in range(20):
    step(t)
start = time.time()
for t in range(steps // n):
    step(t)
print(steps // n * n / (time.time() - start))
"""
SB3 = """
import sys, time
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
import envs
n, steps, learns = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "learns"
model = PPO("CnnPolicy", make_vec_env("DummyPixels-v0", n), n_steps=256, batch_size=512, n_epochs=10, device="cpu")
if not learns:
    model.train = lambda: None
model.learn(256 * n)
start = time.time()
model.learn(steps)
print(steps / (time.time() - start))
"""
RENDERING = """
import sys, time
import gymnasium as gym
from envs import choose_gl
choose_gl()
env = gym.make("HalfCheetah-v5", render_mode="rgb_array", width=64, height=64)
env.reset(seed=1)
env.render()
start = time.time()
for _ in range(int(sys.argv[1])):
    env.step(env.action_space.sample())
    env.render()
print(int(sys.argv[1]) / (time.time() - start))
"""


def script(*args):
    return ours("ppo_pixel.py", *args)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--iterations", type=int, default=4, help="iterations of 256 steps a turn")
    args = parser.parse_args()
    for n in (8, 32):
        steps = args.iterations * 256 * n
        dummy = [
            "--env-id",
            "DummyPixels-v0",
            "--num-envs",
            n,
            "--num-steps",
            256,
            "--num-minibatches",
            n // 2,
            "--total-timesteps",
            steps,
        ]
        rungs = {
            "nothing but envs": lambda: float(python("-c", RUNGS, "envs", n, 8 * steps)),
            "+ moving observations": lambda: float(python("-c", RUNGS, "moving", n, 8 * steps)),
            "+ policy": lambda: float(python("-c", RUNGS, "policy", n, 4 * steps)),
            "+ storage and advantage": lambda: script(*dummy, "--update-epochs", 0),
            "+ training": lambda: script(*dummy, "--update-epochs", 10),
        }
        for name, measure in rungs.items():
            print(f"{n:2} envs, {name:24} {median(measure() for _ in range(args.rounds)):8.0f} steps/s", flush=True)
        turns(
            f"{n} envs, SB3",
            args.rounds,
            rungs["+ training"],
            lambda: float(python("-c", SB3, n, steps, "learns")),
            1.4,
        )
        turns(
            f"{n} envs, collecting alone, SB3",
            args.rounds,
            rungs["+ storage and advantage"],
            lambda: float(python("-c", SB3, n, steps, "collects")),
            3,
        )
    cheetah = [
        "--env-id",
        "HalfCheetah-v5",
        "--from-pixels",
        "--num-workers",
        2,
        "--update-epochs",
        0,
        "--total-timesteps",
        args.iterations * 2048,
    ]
    rendered = median(float(python("-c", RENDERING, 50)) for _ in range(args.rounds))
    collected = median(script(*cheetah) for _ in range(args.rounds))
    print(
        f"HalfCheetah-v5 from pixels, 8 envs, 2 workers, collecting alone: {collected:.0f} frames/s "
        f"(at least 1000 wanted); gymnasium's rendering: {rendered:.0f}"
    )


if __name__ == "__main__":
    main()
