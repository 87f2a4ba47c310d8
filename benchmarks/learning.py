"""Learning curves: run a script, or SB3 with the same settings, keep the curve as a CSV, and draw what there is.

    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id HalfCheetah-v5 --seeds 1 2 3
    python benchmarks/learning.py my_ppo.py --env-id HalfCheetah-v5 --seeds 1 2 3 --jobs 2 --out my_results     a copy
    python benchmarks/learning.py sb3-ppo --env-id HalfCheetah-v5 --seeds 1                                   or sb3-sac
    python benchmarks/learning.py ppo_pixel.py --env-id Reacher-v5 --seeds 1 2 3 --from-pixels --num-workers 2
    python benchmarks/learning.py sb3-ppo-pixel --env-id Reacher-v5 --seeds 1 2 3 --from-pixels
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Crawler --run runs/NAME     it is there already
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher3Dof-v0 --seeds 1 2 3 4 5 --evaluate 200
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher2Dof-v0 --label one-env --num-envs 1
    python benchmarks/learning.py plot --out my_results

Further arguments go to the script, which compiles its update if the run is long enough (--no-compile: it does not).
Curves are benchmarks/results/ENV.SCRIPT.SEED.csv, with --from-pixels ENV-pixels.SCRIPT.SEED.csv: decisions, mean return
and length of the episodes that ended in an iteration, and their success rate if the env tells. The table gives each
run's mean over its last tenth. --evaluate plays so many episodes with the saved policy, in a new process and with envs
of another seed. --jobs runs so many at a time, each in one thread and with its output in a log. --out keeps the curves
in that folder, and the runs themselves, with their checkpoints and logs, in its runs/.
"""

import argparse
import csv
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = {  # what others have published: CleanRL's ppo_continuous_action.py; ML-Agents' own figures
    "HalfCheetah-v5": (1443, "CleanRL"),
    "Hopper-v5": (2383, "CleanRL"),
    "Walker2d-v5": (2288, "CleanRL"),
    "3DBall": (100, "ML-Agents"),
    "Crawler": (2353, "Unity's own policy in this scene"),
    "CartPole-v1": (475, "solved"),
    "LunarLander-v3": (200, "solved"),
    "Basic": (0.93, "ML-Agents"),
    "PushBlock": (4.5, "ML-Agents"),
    "Hallway": (0.7, "ML-Agents"),
    "GodotDiscs": (1.7, "solved"),
}


class Failed(Exception):
    """A run that ended without a curve; the last line that it wrote."""


def run_script(script, seed, args, more):
    """A run's curve, and what there is to say about it. With --out the run stays there, else nowhere."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, log, quiet = args.out or Path(temporary), Path(temporary, "log.txt"), args.jobs > 1
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment |= {"OMP_NUM_THREADS": "1"} if quiet else {}
        env = re.sub(r"[^\w.+-]+", "-", args.env_id.split(":")[-1])  # another env's run may be in the same folder
        name = f"runs/{env}__{'*' if '--exp-name' in more else script.stem}__{seed}__*"
        before = set(folder.glob(name))
        command = [sys.executable, str(script), "--env-id", args.env_id, "--seed", str(seed), *more]
        print(" ".join(command) + "\n", end="", flush=True)
        with open(log, "w") as file:  # a single run is seen while it runs, but for what it says when it fails
            out = subprocess.run(command, cwd=folder, env=environment, stdout=file if quiet else None, stderr=file)
        text = log.read_text()
        if not quiet:
            print(text, end="", file=sys.stderr, flush=True)
        runs = sorted(set(folder.glob(name)) - before)
        if runs and args.out and quiet:
            shutil.copy(log, runs[0] / "log.txt")
        if out.returncode or not runs:
            raise Failed(last_line(text))
        return read_events(runs[0]), evaluate(script, runs[0], seed, args, environment)


def evaluate(script, run, seed, args, environment):
    if not args.evaluate:
        return ""
    command = [sys.executable, str(script), "--evaluate", str(run.resolve()), "--eval-episodes", str(args.evaluate)]
    command += ["--seed", str(seed + 1000)]
    out = subprocess.run(command, cwd=run, env=environment, capture_output=True, text=True)
    return "\n" + last_line(out.stderr if out.returncode else out.stdout)  # without it the curve is worth keeping too


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def run_sb3_apart(seed, args, more):
    """SB3 in a process of its own, so that there can be several."""
    command = [sys.executable, __file__, args.what, "--env-id", args.env_id, "--seeds", str(seed), *more]
    command += ["--out", str(args.out or RESULTS), *(["--label", args.label] if args.label else [])]
    print(" ".join(command) + "\n", end="", flush=True)
    out = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if out.returncode:
        raise Failed(last_line(out.stderr))
    return read_csv(csv_of(seed, args, more)), ""


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        raise Failed("no episode ended in it, so there is no curve: give more --total-timesteps")
    returns, lengths = (events.Scalars(f"charts/episodic_{name}") for name in ("return", "length"))
    rates = [events.Scalars("charts/success_rate")] if "charts/success_rate" in events.Tags()["scalars"] else []
    return [(row[0].step, *(x.value for x in row)) for row in zip(returns, lengths, *rates, strict=True)]


def run_sb3(what, env_id, seed, more):
    """SB3 with the settings of our scripts: PPO with VecNormalize, half its weight of the value loss, and a falling
    learning rate; SAC with 10,000 random steps first."""
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    rows, every = [], 1000

    class Log(BaseCallback):
        ended = []

        def _on_step(self):
            self.ended += [info["episode"] for info in self.locals["infos"] if "episode" in info]
            if self.num_timesteps % every == 0 and self.ended:
                means = (np.mean([episode[key] for episode in self.ended]) for key in ("r", "l"))
                rows.append((self.num_timesteps, *means))
                self.ended = []
                if len(rows) % 20 == 0:
                    print(f"{self.num_timesteps:,} steps, return {rows[-1][1]:.1f}", flush=True)
            return True

    if what == "sb3-sac":
        torch.set_num_threads(1)
        total = int(more[more.index("--total-timesteps") + 1]) if "--total-timesteps" in more else 1_000_000
        model = SAC("MlpPolicy", make_vec_env(env_id, 1, seed=seed), learning_starts=10_000, seed=seed, device="cpu")
    else:
        sys.path.insert(0, str(ROOT))
        import gymnasium as gym
        import tyro

        pixels = what == "sb3-ppo-pixel"
        kind = "pixel" if pixels else "continuous_multiagent"
        if not pixels and not isinstance(gym.make(env_id).action_space, gym.spaces.Box):
            kind = "discrete_multiagent"
        script = importlib.import_module(f"ppo_{kind}")
        preset = script.Args(env_id=env_id, **script.PRESETS.get(env_id, {}))
        args = tyro.cli(script.Args, default=preset, args=more)

        def make_images():
            from envs.pixels import make_pixel_env

            env = make_pixel_env(env_id, args.from_pixels, args.image_size, args.grayscale, args.action_repeat)
            return gym.wrappers.TransformObservation(env, lambda obs: obs["image"], env.observation_space["image"])

        envs = make_vec_env(make_images if pixels else env_id, args.num_envs, seed=seed)
        policy, layers, total = "CnnPolicy", None, args.total_timesteps
        if pixels:
            stack = args.frame_stack or (3 if args.from_pixels else 1)
            envs = VecFrameStack(envs, stack) if stack > 1 else envs
        else:
            torch.set_num_threads(1)
            activation = {"tanh": torch.nn.Tanh, "silu": torch.nn.SiLU}[args.activation]
            policy, layers = "MlpPolicy", dict(net_arch=list(args.hidden_sizes), activation_fn=activation)
        envs = VecNormalize(envs, norm_obs=args.norm_obs and not pixels, norm_reward=args.norm_reward, gamma=args.gamma)
        model = PPO(
            policy, envs, learning_rate=lambda left: args.learning_rate * left, n_steps=args.num_steps,
            n_epochs=args.update_epochs, gamma=args.gamma, gae_lambda=args.gae_lambda, clip_range=args.clip_coef,
            batch_size=args.num_envs * args.num_steps // args.num_minibatches, ent_coef=args.ent_coef,
            vf_coef=0.5 * args.vf_coef, max_grad_norm=args.max_grad_norm, policy_kwargs=layers, seed=seed, device="cpu",
        )  # fmt: skip
        every = args.num_steps * args.num_envs
    model.learn(total, callback=Log())
    return rows


def last_tenth(rows, column=1):
    return np.mean([row[column] for row in rows if row[0] > 0.9 * rows[-1][0]])


def csv_of(seed, args, more):
    name, label = args.env_id + "-pixels" * ("--from-pixels" in more), args.label or Path(args.what).stem
    return (args.out or RESULTS) / f"{name}.{label}.{seed}.csv"


def read_csv(path):
    with open(path) as file:
        return [tuple(map(float, row)) for row in list(csv.reader(file))[1:]]


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        header = ("decisions", "return", "length", "success")[: len(rows[0])]
        csv.writer(file).writerows([header, *((step, *(f"{x:.6g}" for x in values)) for step, *values in rows)])


def print_table(name, label, runs):
    ends = [last_tenth(rows) for rows in runs]
    rates = ""
    if len(runs[0][0]) > 3:
        rates = "   success " + " ".join(f"{last_tenth(rows, 3):.1%}" for rows in runs)
    each = " ".join(f"{end:.1f}" for end in ends)
    print(f"{name:20} {label:28} {np.mean(ends):8.1f} ± {np.std(ends):6.1f}   {each}{rates}", flush=True)


def plot(results):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = defaultdict(lambda: defaultdict(list))
    for path in sorted(results.glob("*.csv")):
        env_id, script, _ = path.stem.split(".")
        picture = f"{env_id}.sac" if "sac" in script else env_id  # of their own: SAC's runs are shorter
        curves[picture][script].append(read_csv(path))
    if not curves:
        raise SystemExit(f"{results} has no curves: run a script first")
    colors = ("tab:blue", "tab:orange", "tab:green", "tab:red")
    for picture, scripts in curves.items():
        figure, axes = plt.subplots(figsize=(6, 3.5), dpi=110)
        for color, (script, runs) in zip(colors, sorted(scripts.items()), strict=False):
            for k, rows in enumerate(runs):
                steps, values = np.array(rows).T[:2]
                width = max(1, len(steps) // 100)
                smooth = np.convolve(values, np.ones(width) / width, "valid")
                label = script if k == 0 else None
                axes.plot(steps[width - 1 :], smooth, color=color, lw=1.2, alpha=0.8, label=label)
            print_table(picture, script, runs)
        if picture in TARGETS:
            axes.axhline(TARGETS[picture][0], color="gray", ls=":", lw=1, label=TARGETS[picture][1])
        axes.set(title=picture.removesuffix(".sac"), xlabel="decisions", ylabel="return of training episodes")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(results / f"{picture}.png")
        plt.close(figure)


def run(seed, args, more):
    """One seed's curve, kept as a CSV too, what there is to say about the run, and why it failed, if it did."""
    rows, said = [], ""
    try:
        if args.run:
            rows = read_events(args.run)
        elif not args.what.startswith("sb3-"):
            rows, said = run_script(args.script, seed, args, more)
        elif args.jobs > 1:
            rows, said = run_sb3_apart(seed, args, more)
        else:
            rows = run_sb3(args.what, args.env_id, seed, more)
        if not rows:
            raise Failed("no episode ended in it, so there is no curve: give more --total-timesteps")
        write_csv(csv_of(seed, args, more), rows)
    except Failed as error:
        return [], said, str(error)
    except Exception as error:  # whatever it is, the other seeds' runs go on
        return [], said, f"{type(error).__name__}: {error}"
    return rows, said, None


def run_all(args, more):
    """What run() gives, seed by seed, as they end."""
    seeds = dict.fromkeys(args.seeds)
    if args.jobs == 1:
        yield from ((seed, run(seed, args, more)) for seed in seeds)
        return
    pool = ThreadPoolExecutor(args.jobs)
    try:
        tasks = {pool.submit(run, seed, args, more): seed for seed in seeds}
        yield from ((tasks[task], task.result()) for task in as_completed(tasks))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C ends the runs that run, and begins no others


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="a script, or a changed copy of one; sb3-ppo, sb3-sac, sb3-ppo-pixel; or plot")
    parser.add_argument("--env-id")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--out", type=Path, help="keep curves and runs in this folder")
    parser.add_argument("--run", type=Path, help="take this run's curve instead of running anything")
    parser.add_argument("--evaluate", type=int, help="play so many episodes with the saved policy")
    parser.add_argument("--label", help="a name for the script's curve with these arguments")
    args, more = parser.parse_known_args()
    args.out = args.out and args.out.resolve()
    if args.what == "plot":
        return plot(args.out or RESULTS)
    if not args.env_id:
        raise SystemExit("--env-id is missing: which env is it to learn?")
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be above 0")
    args.script = next((path.resolve() for path in (Path(args.what), ROOT / args.what) if path.is_file()), None)
    if args.script is None and not args.what.startswith("sb3-") and not args.run:
        raise SystemExit(f"{args.what}: there is no such script")
    (args.out or RESULTS).mkdir(parents=True, exist_ok=True)
    curves, failed = {}, {}
    for seed, (rows, said, why) in run_all(args, more):
        if why:
            failed[seed] = why
            print(f"{args.env_id} seed {seed}: failed", flush=True)
            continue
        curves[seed] = rows
        success = f", success {last_tenth(rows, 3):.1%}," if len(rows[0]) > 3 else ""
        print(f"{args.env_id} seed {seed}: {last_tenth(rows):.1f}{success} over the last tenth{said}", flush=True)
    if curves:
        print_table(args.env_id, args.label or Path(args.what).stem, [curves[seed] for seed in sorted(curves)])
    if failed:
        raise SystemExit("\n".join(f"{args.env_id} seed {seed} failed: {why}" for seed, why in sorted(failed.items())))


if __name__ == "__main__":
    main()
