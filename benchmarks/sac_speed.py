"""Measure the speed of sac_continuous.py and crossq_continuous.py, and of SB3 with the same settings.

    python benchmarks/sac_speed.py                  about ten minutes
    python benchmarks/sac_speed.py --rounds 1       about four minutes

Both run alternately, so that other load on the machine affects both. The environment is
HalfCheetah-v5, one env, with batches of 256, networks of 256x256 and one update per step from step
100 on; both use all cores of the CPU. The time for compiling is printed, but not included. The
scenes run with their presets: the first 1,000 and 5,000 decisions are random and have no updates. A
second figure does not include them.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

SB3 = """
import sys, time
from sb3_contrib import CrossQ
from stable_baselines3 import SAC

steps = int(sys.argv[1])
algorithm = {"sac": SAC, "crossq": CrossQ}[sys.argv[2]]
settings = dict(learning_starts=100, policy_kwargs=dict(net_arch=[256, 256]), device="cpu")
model = algorithm("MlpPolicy", "HalfCheetah-v5", **settings)
model.learn(200)
start = time.time()
model.learn(steps, reset_num_timesteps=False)
print(steps / (time.time() - start))
"""
SCENES = (  # scene, decisions, random decisions before the first update, wanted speed
    ("3DBall", 30000, 1000, 1500),
    ("Crawler", 20000, 5000, 500),
)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument(
        "--steps", type=int, default=2000, help="steps of a run; SB3 makes half of them"
    )
    args = parser.parse_args()

    cheetah = ["--env-id", "HalfCheetah-v5", "--learning-starts", 100]
    cheetah += ["--total-timesteps", args.steps]
    for name, more in (("sac", ()), ("sac", ("--compile",)), ("crossq", ("--compile",))):
        turns(
            " ".join((f"{name}, 1 env, SB3", *more)),
            args.rounds,
            lambda: ours(f"{name}_continuous.py", *cheetah, *more)[0],
            lambda: float(python("-c", SB3, args.steps // 2, name)),
            2,
        )

    for scene, steps, learning_starts, wanted in SCENES:
        command = ["sac_continuous.py", "--env-id", scene, "--compile", "--total-timesteps"]
        speeds = []
        updating = []
        for _ in range(args.rounds):
            speed = ours(*command, steps)[0]
            random_speed = ours(*command, learning_starts, "--updates-per-step", 0)[0]
            seconds = steps / speed - learning_starts / random_speed
            speeds.append(speed)
            updating.append((steps - learning_starts) / seconds)
        rate = f"{median(speeds):.0f} decisions/s, median (at least {wanted} wanted)"
        print(f"{scene}: {rate}; {median(updating):.0f} while it updates", flush=True)


if __name__ == "__main__":
    main()
