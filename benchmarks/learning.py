"""Learning curves: run a script, or SB3 with the same settings, keep the curve as a CSV, and draw what there is.

    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id HalfCheetah-v5 --seeds 1 2 3
    python benchmarks/learning.py sb3-ppo --env-id HalfCheetah-v5 --seeds 1                                 or sb3-sac
    python benchmarks/learning.py ppo_pixel.py --env-id Reacher-v5 --seeds 1 2 3 --from-pixels --num-workers 2
    python benchmarks/learning.py sb3-ppo-pixel --env-id Reacher-v5 --seeds 1 2 3 --from-pixels
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Crawler --run runs/NAME       a run that is there already
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher3Dof-v0 --seeds 1 2 3 4 5 --evaluate 200
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher2Dof-v0 --seeds 1 2 3 --label one-env --num-envs 1 --num-steps 2048
    python benchmarks/learning.py plot

Further arguments go to the script. Curves are benchmarks/results/ENV.SCRIPT.SEED.csv, with --from-pixels ENV-pixels.SCRIPT.SEED.csv: decisions, mean return and
length of the episodes that ended in an iteration, and their success rate if the env tells. The table gives each run's mean over its last tenth. --evaluate
plays so many episodes with the saved policy, in a new process and with envs of another seed.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = {  # what others have published: CleanRL's ppo_continuous_action.py; ML-Agents' own figures
    "HalfCheetah-v5": (1443, "CleanRL"),
    "Hopper-v5": (2383, "CleanRL"),
    "Walker2d-v5": (2288, "CleanRL"),
    "3DBall": (100, "ML-Agents"),
    "Crawler": (2417, "Unity's own policy in this scene"),
}


def run_script(script, env_id, seed, episodes, more):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), "--env-id", env_id, "--seed", str(seed), *more]
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=folder, check=True)
        (run,) = Path(folder, "runs").iterdir()
        if episodes:
            command = [sys.executable, str(ROOT / script), "--evaluate", str(run), "--eval-episodes", str(episodes), "--seed", str(seed + 1000)]
            subprocess.run(command, cwd=folder, check=False)  # its curve is worth keeping even so
        return read_events(run)


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    returns, lengths = (events.Scalars(f"charts/episodic_{name}") for name in ("return", "length"))
    rates = [events.Scalars("charts/success_rate")] if "charts/success_rate" in events.Tags()["scalars"] else []
    return [(row[0].step, *(x.value for x in row)) for row in zip(returns, lengths, *rates, strict=True)]


def run_sb3(what, env_id, seed, more):
    """SB3 with the settings of our scripts: PPO with VecNormalize, half its weight of the value loss, and a falling learning rate; SAC with 10,000 random
    steps first."""
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    rows, every = [], 1000 if what == "sb3-sac" else 2048

    class Log(BaseCallback):
        ended = []

        def _on_step(self):
            self.ended += [info["episode"] for info in self.locals["infos"] if "episode" in info]
            if self.num_timesteps % every == 0 and self.ended:
                rows.append((self.num_timesteps, np.mean([e["r"] for e in self.ended]), np.mean([e["l"] for e in self.ended])))
                self.ended = []
                if len(rows) % 20 == 0:
                    print(f"{self.num_timesteps:,} steps, return {rows[-1][1]:.1f}", flush=True)
            return True

    total = int(more[more.index("--total-timesteps") + 1]) if "--total-timesteps" in more else 1_000_000
    if what == "sb3-ppo":
        torch.set_num_threads(1)
        envs = VecNormalize(make_vec_env(env_id, 1, seed=seed))
        model = PPO("MlpPolicy", envs, learning_rate=lambda left: 3e-4 * left, vf_coef=0.25, seed=seed, device="cpu")
    elif what == "sb3-sac":
        torch.set_num_threads(1)
        model = SAC("MlpPolicy", make_vec_env(env_id, 1, seed=seed), learning_starts=10_000, seed=seed, device="cpu")
    else:
        sys.path.insert(0, str(ROOT))
        import gymnasium as gym
        import tyro

        from envs.pixels import make_pixel_env
        from ppo_pixel import PRESETS, Args

        args = tyro.cli(Args, default=Args(env_id=env_id, **PRESETS.get(env_id, {})), args=more)

        def make():
            env = make_pixel_env(env_id, args.from_pixels, args.image_size, args.grayscale, args.action_repeat)
            return gym.wrappers.TransformObservation(env, lambda obs: obs["image"], env.observation_space["image"])

        envs, total = make_vec_env(make, args.num_envs, seed=seed), args.total_timesteps
        stack = args.frame_stack or (3 if args.from_pixels else 1)
        envs = VecNormalize(VecFrameStack(envs, stack) if stack > 1 else envs, norm_obs=False, gamma=args.gamma)
        model = PPO(
            "CnnPolicy", envs, learning_rate=lambda left: args.learning_rate * left, n_steps=args.num_steps, n_epochs=args.update_epochs, gamma=args.gamma,
            batch_size=args.num_envs * args.num_steps // args.num_minibatches, gae_lambda=args.gae_lambda, clip_range=args.clip_coef,
            ent_coef=args.ent_coef, vf_coef=0.5 * args.vf_coef, max_grad_norm=args.max_grad_norm, seed=seed, device="cpu",
        )  # fmt: skip
    model.learn(total, callback=Log())
    return rows


def last_tenth(rows, column=1):
    return np.mean([row[column] for row in rows if row[0] > 0.9 * rows[-1][0]])


def plot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = defaultdict(lambda: defaultdict(list))
    for path in sorted(RESULTS.glob("*.csv")):
        env_id, script, _ = path.stem.split(".")
        picture = f"{env_id}.sac" if "sac" in script else env_id  # of their own: SAC's runs are shorter
        with open(path) as file:
            curves[picture][script].append([tuple(map(float, row)) for row in list(csv.reader(file))[1:]])
    for picture, scripts in curves.items():
        figure, axes = plt.subplots(figsize=(6, 3.5), dpi=110)
        for color, (script, runs) in zip(("tab:blue", "tab:orange", "tab:green", "tab:red"), sorted(scripts.items()), strict=False):
            for k, rows in enumerate(runs):
                steps, values = np.array(rows).T[:2]
                width = max(1, len(steps) // 100)
                smooth = np.convolve(values, np.ones(width) / width, "valid")
                axes.plot(steps[width - 1 :], smooth, color=color, lw=1.2, alpha=0.8, label=script if k == 0 else None)
            ends = [last_tenth(rows) for rows in runs]
            rates = "   success " + " ".join(f"{last_tenth(rows, 3):.1%}" for rows in runs) if len(runs[0][0]) > 3 else ""
            print(f"{picture:20} {script:28} {np.mean(ends):8.1f} ± {np.std(ends):6.1f}   {' '.join(f'{e:.1f}' for e in ends)}{rates}")
        if picture in TARGETS:
            axes.axhline(TARGETS[picture][0], color="gray", ls=":", lw=1, label=TARGETS[picture][1])
        axes.set(title=picture.removesuffix(".sac"), xlabel="decisions", ylabel="return of training episodes")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(RESULTS / f"{picture}.png")
        plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="a script of this folder's parent, sb3-ppo, sb3-sac, sb3-ppo-pixel, or plot")
    parser.add_argument("--env-id")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--run", type=Path, help="take this run's curve instead of running anything")
    parser.add_argument("--evaluate", type=int, help="play so many episodes with the saved policy")
    parser.add_argument("--label", help="a name for the script's curve with these arguments")
    args, more = parser.parse_known_args()
    if args.what == "plot":
        return plot()
    RESULTS.mkdir(exist_ok=True)
    for seed in args.seeds:
        if args.run:
            rows = read_events(args.run)
        elif args.what.startswith("sb3-"):
            rows = run_sb3(args.what, args.env_id, seed, more)
        else:
            rows = run_script(args.what, args.env_id, seed, args.evaluate, more)
        name = args.env_id + "-pixels" * ("--from-pixels" in more)
        with open(RESULTS / f"{name}.{args.label or args.what.removesuffix('.py')}.{seed}.csv", "w", newline="") as file:
            header = ("decisions", "return", "length", "success")[: len(rows[0])]
            csv.writer(file).writerows([header, *((step, *(f"{x:.6g}" for x in values)) for step, *values in rows)])
        success = f", success {last_tenth(rows, 3):.1%}," if len(rows[0]) > 3 else ""
        print(f"{args.env_id} seed {seed}: {last_tenth(rows):.1f}{success} over the last tenth", flush=True)


if __name__ == "__main__":
    main()
