"""Make a million random steps in each reacher, check that all values are finite, and compare the
speed with gymnasium's own Reacher-v5.

    python benchmarks/reacher.py                      about five minutes
    python benchmarks/reacher.py --steps 20000        a few seconds

The envs run alternately, so that other load on the machine affects all of them. They run on one
core, without a policy, and are stepped as in the scripts. The time for resets is included.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs.make import make_env

IDS = ("Reacher-v5", "Reacher2Dof-v0", "Reacher3Dof-v0", "Reacher6Dof-v0", "ReacherPlane-v0")
ROUNDS = 10


def measure(env_id, env, actions):
    """Return the steps per second with these actions."""
    observations = []
    rewards = []
    start = time.perf_counter()
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        if terminated or truncated:
            env.reset()
    speed = len(actions) / (time.perf_counter() - start)
    if not np.isfinite(np.stack(observations)).all() or not np.isfinite(rewards).all():
        raise SystemExit(f"{env_id}: an observation or a reward is not finite")
    return speed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of each env")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    envs = {env_id: make_env(env_id) for env_id in IDS}
    speeds = {env_id: [] for env_id in IDS}
    for env in envs.values():
        env.reset(seed=0)
    for _ in range(ROUNDS):
        for env_id, env in envs.items():
            shape = (args.steps // ROUNDS, *env.action_space.shape)
            actions = rng.uniform(-1, 1, shape).astype(np.float32)
            speeds[env_id].append(measure(env_id, env, actions))

    for env_id, x in speeds.items():
        ratio = median(a / b for a, b in zip(x, speeds["Reacher-v5"], strict=True))
        checked = f"{env_id:16} {args.steps // ROUNDS * ROUNDS:,} steps, all finite"
        speed = f"{median(x):6.0f} steps/s, {ratio:.2f} times Reacher-v5's"
        print(f"{checked}; {speed} (medians of {ROUNDS} rounds)")


if __name__ == "__main__":
    main()
