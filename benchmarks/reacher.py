"""A million random steps of each reacher: nothing is ever not a number, and how many steps a second, beside gymnasium's
own Reacher-v5.

    python benchmarks/reacher.py                      about five minutes
    python benchmarks/reacher.py --steps 20000        a first look

They take turns, so that noise hits all. One core, stepped as the scripts step them: without a policy, resets and all.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs.vector import make_env

IDS = ("Reacher-v5", "Reacher2Dof-v0", "Reacher3Dof-v0", "Reacher6Dof-v0", "ReacherPlane-v0")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    turns, speeds = 10, {env_id: [] for env_id in IDS}
    rng, envs = np.random.default_rng(0), {env_id: make_env(env_id) for env_id in IDS}
    for env in envs.values():
        env.reset(seed=0)
    for _ in range(turns):
        for env_id, env in envs.items():
            actions = rng.uniform(-1, 1, (args.steps // turns, *env.action_space.shape)).astype(np.float32)
            seen, start = [], time.perf_counter()
            for action in actions:
                obs, reward, terminated, truncated, _ = env.step(action)
                seen += obs, reward
                if terminated or truncated:
                    env.reset()
            speeds[env_id].append(len(actions) / (time.perf_counter() - start))
            if not (np.isfinite(np.stack(seen[::2])).all() and np.isfinite(seen[1::2]).all()):
                raise SystemExit(f"{env_id}: an observation or a reward is not a number")
    for env_id, each in speeds.items():
        times = median(a / b for a, b in zip(each, speeds["Reacher-v5"], strict=True))
        done = f"{env_id:16} {args.steps // turns * turns:,} steps, all finite"
        rate = f"{median(each):6.0f} steps/s, {times:.2f} times Reacher-v5's (medians of {turns} turns)"
        print(f"{done}; {rate}")


if __name__ == "__main__":
    main()
