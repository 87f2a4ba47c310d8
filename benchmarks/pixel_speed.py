"""Measure what each part of PPO from pixels costs, and compare its speed with SB3's CnnPolicy.

    python benchmarks/pixel_speed.py                  about fifteen minutes
    python benchmarks/pixel_speed.py --rounds 1       about five minutes

The environment is DummyPixels-v0, 64 x 64 x 3, with 8 and with 32 envs, 256 steps per iteration,
batches of 512 and 10 epochs, on the CPU. The first figure is that of gymnasium's envs alone; each
of the next ones adds a part. SB3 has the same settings, runs alternately with the script, and
learns for one iteration before its time is taken. At the end, HalfCheetah-v5 from pixels in two
workers without updates is compared with gymnasium's own rendering in one process.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

PARTS = """
import sys, time
import gymnasium as gym
import numpy as np
import ppo_pixel as ppo
from onefile_rl import fast
from onefile_rl.frames import Frames, stacked

part = sys.argv[1]
num_envs = int(sys.argv[2])
steps = int(sys.argv[3])
args = ppo.Args(env_id="DummyPixels-v0", num_envs=num_envs)
random_actions = np.random.default_rng(0).uniform(-1, 1, (100, num_envs, 2)).astype(np.float32)

if part == "envs":
    envs = [gym.make(args.env_id, disable_env_checker=True) for _ in range(num_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=i)

    def step(t):
        for env, action in zip(envs, random_actions[t % 100]):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
else:
    envs, _ = ppo.make_envs(args, 1)
    spec = ppo.describe(args, envs)
    slots = np.arange(num_envs)
    frames = Frames(spec["images"], spec["stack"], num_envs, 260 * num_envs)
    act = fast.Acting(ppo.Agent(spec, args).eval(), enabled=False)
    next_obs, infos = envs.reset(seed=1)
    stacks = frames.add(slots, next_obs)

    def step(t):
        global next_obs, infos, stacks
        actions = random_actions[t % 100]
        if part == "policy":
            vectors, masks = ppo.get_vectors_and_masks(next_obs, infos, slots, spec)
            _, actions, _, _ = act(stacked(frames.images(), stacks), vectors, masks)
        next_obs, _, terminated, truncated, infos = envs.step(actions)
        frames.new_episode |= terminated | truncated
        stacks = frames.add(slots, next_obs)
        if t % 256 == 255:
            stacks = frames.keep(stacks)

for t in range(20):
    step(t)
start = time.time()
for t in range(steps // num_envs):
    step(t)
print(steps // num_envs * num_envs / (time.time() - start))
"""
SB3 = """
import sys, time
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
import envs

num_envs = int(sys.argv[1])
steps = int(sys.argv[2])
learns = sys.argv[3] == "learns"
envs = make_vec_env("DummyPixels-v0", num_envs)
model = PPO("CnnPolicy", envs, n_steps=256, batch_size=512, n_epochs=10, device="cpu")
if not learns:
    model.train = lambda: None
model.learn(256 * num_envs)
start = time.time()
model.learn(steps)
print(steps / (time.time() - start))
"""
RENDERING = """
import sys, time
import gymnasium as gym
from envs.rendering import choose_gl

steps = int(sys.argv[1])
choose_gl()
env = gym.make("HalfCheetah-v5", render_mode="rgb_array", width=64, height=64)
env.reset(seed=1)
env.render()
start = time.time()
for _ in range(steps):
    env.step(env.action_space.sample())
    env.render()
print(steps / (time.time() - start))
"""


def script_speed(options):
    """Return the steps per second of ppo_pixel.py with these options."""
    return ours("ppo_pixel.py", *options.split())[0]


def compare_dummy_pixels(num_envs, args):
    """Print the speed of each part, and the comparison with SB3."""
    steps = args.iterations * 256 * num_envs
    options = f"--env-id DummyPixels-v0 --num-envs {num_envs} --num-steps 256"
    options += f" --num-minibatches {num_envs // 2} --total-timesteps {steps} --update-epochs"
    rollouts = lambda: script_speed(f"{options} 0")
    training = lambda: script_speed(f"{options} 10")
    parts = {
        "envs alone": lambda: float(python("-c", PARTS, "envs", num_envs, 8 * steps)),
        "+ storage of images": lambda: float(python("-c", PARTS, "images", num_envs, 8 * steps)),
        "+ policy": lambda: float(python("-c", PARTS, "policy", num_envs, 4 * steps)),
        "+ rollout and advantages": rollouts,
        "+ updates": training,
    }
    for name, measure in parts.items():
        speed = median(measure() for _ in range(args.rounds))
        print(f"{num_envs:2} envs, {name:24} {speed:8.0f} steps/s", flush=True)
    turns(
        f"{num_envs} envs, SB3",
        args.rounds,
        training,
        lambda: float(python("-c", SB3, num_envs, steps, "learns")),
        1.4,
    )
    turns(
        f"{num_envs} envs, rollouts only, SB3",
        args.rounds,
        rollouts,
        lambda: float(python("-c", SB3, num_envs, steps, "collects")),
        3,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument(
        "--iterations", type=int, default=4, help="iterations of a run, of 256 steps each"
    )
    args = parser.parse_args()

    for num_envs in (8, 32):
        compare_dummy_pixels(num_envs, args)
    cheetah = "--env-id HalfCheetah-v5 --from-pixels --num-workers 2 --update-epochs 0"
    cheetah += f" --total-timesteps {args.iterations * 2048}"
    rendered = median(float(python("-c", RENDERING, 50)) for _ in range(args.rounds))
    collected = median(script_speed(cheetah) for _ in range(args.rounds))
    print(
        "HalfCheetah-v5 from pixels, 8 envs, 2 workers, rollouts only: "
        f"{collected:.0f} frames/s (at least 1000 wanted); "
        f"gymnasium's rendering: {rendered:.0f} frames/s"
    )


if __name__ == "__main__":
    main()
