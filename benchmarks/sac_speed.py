"""Steps per second of sac_continuous.py beside SB3's SAC with the same settings, taking turns so that noise hits both.

    python benchmarks/sac_speed.py                  about eight minutes
    python benchmarks/sac_speed.py --rounds 1       a first look

HalfCheetah-v5, one env, batches of 256, networks of 256x256, one update per step from step 100 on, CPU, all cores for
both. Compilation happens before the clock starts and is printed apart. The scenes run with their presets: the first
1,000 and 5,000 decisions are random, and there are no updates yet. A second figure leaves them out.
"""

import argparse
from statistics import median

from ppo_speed import ours, python, turns

SB3 = """
import sys, time
from stable_baselines3 import SAC
steps = int(sys.argv[1])
model = SAC("MlpPolicy", "HalfCheetah-v5", learning_starts=100, device="cpu")
model.learn(200)
start = time.time()
model.learn(steps, reset_num_timesteps=False)
print(steps / (time.time() - start))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--steps", type=int, default=2000, help="steps a turn; SB3 takes a half")
    args = parser.parse_args()
    cheetah = ["--env-id", "HalfCheetah-v5", "--learning-starts", 100, "--total-timesteps", args.steps]
    for more in ((), ("--compile",)):
        name = " ".join(("1 env, SB3", *more))
        mine = lambda more=more: ours("sac_continuous.py", *cheetah, *more)[0]
        turns(name, args.rounds, mine, lambda: float(python("-c", SB3, args.steps // 2)), 2)
    for scene, steps, starts, wanted in (("3DBall", 30000, 1000, 1500), ("Crawler", 20000, 5000, 500)):
        command = ["sac_continuous.py", "--env-id", scene, "--compile", "--total-timesteps"]
        idle = (*command, starts, "--updates-per-step", 0)
        rates = [(ours(*command, steps)[0], ours(*idle)[0]) for _ in range(args.rounds)]
        updating = median((steps - starts) / (steps / rate - starts / random) for rate, random in rates)
        whole = f"{median(rate for rate, _ in rates):.0f} decisions/s, median of the turns (at least {wanted} wanted)"
        print(f"{scene}: {whole}; {updating:.0f} while it updates", flush=True)


if __name__ == "__main__":
    main()
