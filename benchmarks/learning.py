"""Learning curves: run a script, or SB3 with the same settings, and keep the curve as a CSV. run.py makes all of the
docs' curves with it, plots.py draws them.

    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id HalfCheetah-v5 --seeds 1 2 3
    python benchmarks/learning.py my_ppo.py --env-id HalfCheetah-v5 --seeds 1 2 3 --jobs 2 --out my_results     a copy
    python benchmarks/learning.py sb3-ppo --env-id HalfCheetah-v5 --seeds 1                                   or sb3-sac
    python benchmarks/learning.py ppo_pixel.py --env-id Reacher-v5 --seeds 1 2 3 --from-pixels --num-workers 2
    python benchmarks/learning.py sb3-ppo-pixel --env-id Reacher-v5 --seeds 1 2 3 --from-pixels
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Crawler --run runs/NAME     it is there already
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher3Dof-v0 --seeds 1 2 3 4 5 --evaluate 200
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher2Dof-v0 --label one-env --num-envs 1
    python benchmarks/plots.py --out my_results                                                     draw what there is

Further arguments go to the script, which compiles its update if the run is long enough (--no-compile: it does not).
Curves are benchmarks/results/ENV.SCRIPT.SEED.csv, with --from-pixels ENV-pixels.SCRIPT.SEED.csv: decisions, mean return
and length of the episodes that ended in an iteration, their success rate if the env tells, and the seconds by the clock
since the run began to learn. The table gives each run's mean over its last tenth. --evaluate plays so many episodes
with the saved policy, in a new process and with envs of another seed. --jobs runs so many at a time, each in one thread
and with its output in a log. --out keeps the curves in that folder, and the runs themselves, with their checkpoints and
logs, in its runs/.
"""

import argparse
import contextlib
import csv
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = ("decisions", "return", "length", "success", "seconds")  # the last two where they are known


class Failed(Exception):
    """A run that ended without a curve; the last line that it wrote."""


running, starting, stopping = set(), threading.Lock(), threading.Event()


def call(command, **how):
    """A process's exit code. It has a session of its own: Ctrl-C comes to us alone, and we end what is ours."""
    with starting:
        if stopping.is_set():
            raise Failed("stopped")
        process = subprocess.Popen(command, start_new_session=True, **how)
        running.add(process)
    try:
        process.wait()
    except KeyboardInterrupt:
        end_runs()
        raise
    finally:
        running.discard(process)
    if stopping.is_set():
        raise Failed("stopped")
    return process.returncode


def end_runs(patience=10):
    """Begin no others. A script that is asked twice closes its players at once; one that does not end is killed with
    all that it has started."""
    stopping.set()
    with starting:
        mine = list(running)
    for seconds in (0.5, patience, 0):
        for process in mine:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    process.terminate() if seconds else os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(process.poll() is None for process in mine):
            with contextlib.suppress(KeyboardInterrupt):  # somebody is impatient, but it is a matter of moments
                time.sleep(0.05)


def run_script(script, seed, args, more):
    """A run's curve, and what there is to say about it. With --out the run stays there, else nowhere."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, log, quiet = args.out or Path(temporary), args.log or Path(temporary, "log.txt"), args.quiet
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment |= {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
        env = re.sub(r"[^\w.+-]+", "-", args.env_id.split(":")[-1])  # another env's run may be in the same folder
        named = more[more.index("--exp-name") + 1] if "--exp-name" in more else script.stem
        name = f"runs/{env}__{named}__{seed}__*"
        before = set(folder.glob(name))
        command = [sys.executable, str(script), "--env-id", args.env_id, "--seed", str(seed), *more]
        say(command, args)
        with open(log, "w") as file:  # a single run is seen while it runs, but for what it says when it fails
            code = call(command, cwd=folder, env=environment, stdout=file if quiet else None, stderr=file)
        text = log.read_text()
        if not quiet:
            print(text, end="", file=sys.stderr, flush=True)
        runs = sorted(set(folder.glob(name)) - before)
        if runs and args.out and quiet:
            shutil.copy(log, runs[0] / "log.txt")
        if code or not runs:
            raise Failed(last_line(text))
        return read_events(runs[0]), evaluate(script, runs[0], seed, args, environment)


def evaluate(script, run, seed, args, environment):
    if not args.evaluate:
        return ""
    command = [sys.executable, str(script), "--evaluate", str(run.resolve()), "--eval-episodes", str(args.evaluate)]
    command += ["--seed", str(seed + 1000)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        said = err if call(command, cwd=run, env=environment, stdout=out, stderr=err) else out
        said.seek(0)
        return "\n" + last_line(said.read())  # without it the curve is worth keeping too


def say(command, args):
    if not args.log:
        print(" ".join(command) + "\n", end="", flush=True)


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[-1].startswith("╰"):  # a wrong argument is told in a box: what it is comes first
        box = max((i for i, line in enumerate(lines) if line.startswith("╭")), default=-1)
        return lines[box + 1].strip("│ ")
    return lines[-1] if lines else "it wrote nothing"


def run_sb3_apart(seed, args, more):
    """SB3 in a process of its own, so that there can be several."""
    command = [sys.executable, __file__, args.what, "--env-id", args.env_id, "--seeds", str(seed), *more]
    command += ["--out", str(args.out or RESULTS), *(["--label", args.label] if args.label else [])]
    say(command, args)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(args.log, "w+") if args.log else tempfile.TemporaryFile("w+"))
        code = call(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file)
        file.seek(0)
        if code:
            raise Failed(last_line(file.read()))
    return read_csv(csv_of(seed, args, more)), ""


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tags = {"return": "episodic_return", "length": "episodic_length", "success": "success_rate"}
    told = {name: f"charts/{tag}" for name, tag in tags.items() if f"charts/{tag}" in events.Tags()["scalars"]}
    if "return" not in told:
        raise Failed("no episode ended in it, so there is no curve: give more --total-timesteps")
    points = {name: events.Scalars(tag) for name, tag in told.items()}
    curve = {"decisions": np.array([point.step for point in points["return"]], float)}
    curve |= {name: np.array([point.value for point in row]) for name, row in points.items()}
    stamps = np.array([point.wall_time for point in points["return"]])
    return curve | {"seconds": since_start(stamps, events.FirstEventTimestamp(), folder)}


def since_start(stamps, first, folder):
    """Seconds that a run took until these stamps. A run that was resumed has a file of events for each of its lives:
    between them nobody ran."""
    seconds = stamps - first
    for begin in sorted(int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*"))[1:]:
        before = stamps < begin
        if before.any():
            seconds[~before] -= begin - stamps[before].max()
    return seconds


def peer_settings(what, env_id, more):
    """The arguments that our script would have. SB3 has nothing to compile."""
    sys.path.insert(0, str(ROOT))
    import gymnasium as gym
    import tyro

    kind = "ppo_pixel" if what == "sb3-ppo-pixel" else "ppo_continuous_multiagent"
    if what == "sb3-sac":
        kind = "sac_continuous"
    elif what == "sb3-ppo" and not isinstance(gym.make(env_id).action_space, gym.spaces.Box):
        kind = "ppo_discrete_multiagent"
    script = importlib.import_module(kind)
    preset = script.Args(env_id=env_id, **script.PRESETS.get(env_id, {}))
    more = [word for word in more if word not in ("--compile", "--no-compile")]
    return tyro.cli(script.Args, default=preset, args=more)


def run_sb3(what, env_id, seed, more):
    """SB3 with the settings of our scripts, which are given further arguments as they would be: PPO with VecNormalize,
    and our weight of the value loss, which counts half of it, in SB3's terms."""
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    rows, every, start = [], 1000, time.time()
    args = peer_settings(what, env_id, more)
    total = args.total_timesteps

    class Log(BaseCallback):
        ended = []

        def _on_step(self):
            self.ended += [info["episode"] for info in self.locals["infos"] if "episode" in info]
            if self.num_timesteps % every == 0 and self.ended:
                means = (np.mean([episode[key] for episode in self.ended]) for key in ("r", "l"))
                rows.append((self.num_timesteps, *means, time.time() - start))
                self.ended = []
                if len(rows) % 20 == 0:
                    print(f"{self.num_timesteps:,} steps, return {rows[-1][1]:.1f}", flush=True)
            return True

    if what == "sb3-sac":
        torch.set_num_threads(1)
        model = SAC(
            "MlpPolicy", make_vec_env(env_id, 1, seed=seed), learning_rate=args.learning_rate, gamma=args.gamma,
            buffer_size=args.buffer_size, learning_starts=args.learning_starts, batch_size=args.batch_size,
            tau=args.tau, policy_kwargs=dict(net_arch=list(args.hidden_sizes)), seed=seed, device="cpu",
        )  # fmt: skip
    else:
        pixels = what == "sb3-ppo-pixel"

        def make_images():
            from envs.pixels import make_pixel_env

            env = make_pixel_env(env_id, args.from_pixels, args.image_size, args.grayscale, args.action_repeat)
            return gym.wrappers.TransformObservation(env, lambda obs: obs["image"], env.observation_space["image"])

        envs = make_vec_env(make_images if pixels else env_id, args.num_envs, seed=seed)
        policy, layers = "CnnPolicy", None
        if pixels:
            stack = args.frame_stack or (3 if args.from_pixels else 1)
            envs = VecFrameStack(envs, stack) if stack > 1 else envs
        else:
            torch.set_num_threads(1)
            activation = {"tanh": torch.nn.Tanh, "silu": torch.nn.SiLU}[args.activation]
            policy, layers = "MlpPolicy", dict(net_arch=list(args.hidden_sizes), activation_fn=activation)
            layers |= {"log_std_init": args.logstd_init} if hasattr(args, "logstd_init") else {}
        envs = VecNormalize(envs, norm_obs=args.norm_obs and not pixels, norm_reward=args.norm_reward, gamma=args.gamma)
        model = PPO(
            policy, envs, learning_rate=lambda left: args.learning_rate * (left if args.anneal_lr else 1),
            n_steps=args.num_steps, batch_size=args.num_envs * args.num_steps // args.num_minibatches,
            n_epochs=args.update_epochs, gamma=args.gamma, gae_lambda=args.gae_lambda, clip_range=args.clip_coef,
            clip_range_vf=args.clip_coef if args.clip_vloss else None, normalize_advantage=args.norm_adv,
            ent_coef=args.ent_coef, vf_coef=0.5 * args.vf_coef, max_grad_norm=args.max_grad_norm,
            target_kl=args.target_kl, policy_kwargs=layers, seed=seed, device="cpu",
        )  # fmt: skip
        every = args.num_steps * args.num_envs
    start = time.time()
    model.learn(total, callback=Log())
    if not rows:
        raise Failed("no episode ended in it, so there is no curve: give more --total-timesteps")
    return dict(zip(("decisions", "return", "length", "seconds"), np.array(rows, float).T, strict=True))


def last_tenth(curve, column="return"):
    return curve[column][curve["decisions"] > 0.9 * curve["decisions"][-1]].mean()


def csv_of(seed, args, more):
    name, label = args.env_id + "-pixels" * ("--from-pixels" in more), args.label or Path(args.what).stem
    return (args.out or RESULTS) / f"{name}.{label}.{seed}.csv"


def read_csv(path):
    """Column by column. Raises ValueError if it is not whole."""
    with open(path, newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if not rows or tuple(header[:3]) != COLUMNS[:3]:
        raise ValueError(f"{path} has no curve")
    return dict(zip(header, np.array([[float(x) for x in row] for row in rows]).T, strict=True))


def write_csv(path, curve):
    """All of it or nothing."""
    names = [name for name in COLUMNS if name in curve]
    rows = zip(*(curve[name] for name in names), strict=True)
    with tempfile.NamedTemporaryFile("w", newline="", dir=path.parent, suffix=".part", delete=False) as file:
        csv.writer(file).writerows([names, *((int(step), *(f"{x:.6g}" for x in values)) for step, *values in rows)])
    os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
    os.replace(file.name, path)


def in_words(curve):
    success = f", success {last_tenth(curve, 'success'):.1%}," if "success" in curve else ""
    return f"{last_tenth(curve):.4g}{success} over the last tenth"


def print_table(name, label, runs):
    ends = [last_tenth(curve) for curve in runs]
    rates = ""
    if "success" in runs[0]:
        rates = "   success " + " ".join(f"{last_tenth(curve, 'success'):.1%}" for curve in runs)
    each = " ".join(f"{end:.4g}" for end in ends)
    print(f"{name:20} {label:28} {np.mean(ends):8.1f} ± {np.std(ends):6.1f}   {each}{rates}", flush=True)


def run(seed, args, more):
    """One seed's curve, kept as a CSV too, what there is to say about the run, and why it failed, if it did."""
    curve, said = {}, ""
    try:
        if args.run:
            curve = read_events(args.run)
        elif not args.what.startswith("sb3-"):
            curve, said = run_script(args.script, seed, args, more)
        elif args.quiet:
            curve, said = run_sb3_apart(seed, args, more)
        else:
            curve = run_sb3(args.what, args.env_id, seed, more)
        write_csv(csv_of(seed, args, more), curve)
    except Failed as error:
        return {}, said, str(error)
    except Exception as error:  # whatever it is, the other seeds' runs go on
        return {}, said, f"{type(error).__name__}: {error}"
    return curve, said, None


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
    except BaseException:
        end_runs()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


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
        import plots

        return plots.draw_all(args.out or RESULTS)
    if not args.env_id:
        raise SystemExit("--env-id is missing: which env is it to learn?")
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be above 0")
    args.script = next((path.resolve() for path in (Path(args.what), ROOT / args.what) if path.is_file()), None)
    if args.script is None and not args.what.startswith("sb3-") and not args.run:
        raise SystemExit(f"{args.what}: there is no such script")
    (args.out or RESULTS).mkdir(parents=True, exist_ok=True)
    args.quiet, args.log = args.jobs > 1, None
    curves, failed = {}, {}
    for seed, (curve, said, why) in run_all(args, more):
        if why:
            failed[seed] = why
            print(f"{args.env_id} seed {seed}: failed", flush=True)
            continue
        curves[seed] = curve
        print(f"{args.env_id} seed {seed}: {in_words(curve)}{said}", flush=True)
    if curves:
        print_table(args.env_id, args.label or Path(args.what).stem, [curves[seed] for seed in sorted(curves)])
    if failed:
        raise SystemExit("\n".join(f"{args.env_id} seed {seed} failed: {why}" for seed, why in sorted(failed.items())))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
