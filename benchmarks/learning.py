"""Train with a script, or with SB3 and the same settings, and save the learning curve as a CSV.

run.py makes all curves of the docs with this program, plots.py draws them.

    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id HalfCheetah-v5 --seeds 1 2 3
    python benchmarks/learning.py my_ppo.py --env-id HalfCheetah-v5 --seeds 1 2 3 --jobs 2 --out my_results
    python benchmarks/learning.py sb3-ppo --env-id HalfCheetah-v5 --seeds 1
    python benchmarks/learning.py sb3-sac --env-id HalfCheetah-v5 --seeds 1
    python benchmarks/learning.py sb3-crossq --env-id HalfCheetah-v5 --seeds 1
    python benchmarks/learning.py sb3-tqc --env-id HalfCheetah-v5 --seeds 1
    python benchmarks/learning.py sb3-ppo --env-id 3DBall --seeds 1 2 3              through as_sb3
    python benchmarks/learning.py sb3-maskable-ppo --env-id Basic --seeds 1 2 3      through as_sb3
    python benchmarks/learning.py ppo_pixel.py --env-id Reacher-v5 --seeds 1 2 3 --from-pixels --num-workers 2
    python benchmarks/learning.py sb3-ppo-pixel --env-id Reacher-v5 --seeds 1 2 3 --from-pixels
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher3Dof-v0 --seeds 1 2 3 4 5 --evaluate 200
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Reacher2Dof-v0 --label one-env --num-envs 1
    python benchmarks/learning.py ppo_continuous_multiagent.py --env-id Crawler --run runs/NAME
    python benchmarks/plots.py --out my_results

All other arguments are passed on to the script. It compiles its update if the run is long enough;
--no-compile prevents this.

A curve is saved as benchmarks/results/ENV.SCRIPT.SEED.csv, with --from-pixels as
ENV-pixels.SCRIPT.SEED.csv. ENV is the id without its module, with - for slashes. The columns are
decisions, mean return and mean length of the episodes that ended in an iteration, their success
rate if the env reports it, seconds of wall time since the start of training, and CPU seconds of the
run's processes.

The table at the end has the mean over the last tenth of each run.
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
sys.path.insert(0, str(ROOT))

from onefile_rl.cpu_time import CpuClock  # noqa: E402
from onefile_rl.engines.printing import accept_any_encoding  # noqa: E402
from onefile_rl.engines.scenes import GODOT_SCENES, SCENES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = (
    "decisions",
    "return",
    "length",
    "success",
    "seconds",
    "cpu_seconds",
)  # the last three are optional
CPU_TAG = "charts/cpu_seconds"
NO_EPISODE = "no episode ended in this run, so there is no curve: give more --total-timesteps"


class Failed(Exception):
    """A run ended without a curve. The message is its last line of output."""


# Processes

running = set()  # the processes of the runs
starting = threading.Lock()
stopping = threading.Event()  # set: do not start any more runs


def launch(command, **kwargs):
    """Start a process and return it.

    The process has its own session. Ctrl-C is then sent to this program only, which ends its
    processes.
    """
    with starting:
        if stopping.is_set():
            raise Failed("stopped")
        process = subprocess.Popen(command, start_new_session=True, **kwargs)
        running.add(process)
    return process


def call(command, **kwargs):
    """Run a process and return its exit code."""
    process = launch(command, **kwargs)
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
    """End all runs, and start no others."""
    stopping.set()
    with starting:
        processes = list(running)
    end(processes, patience)


def end(processes, patience=10):
    """End processes that launch() has started.

    A script closes its players at once when it is terminated twice. After `patience` seconds the
    script and its children are killed.
    """
    for seconds in (0.5, patience, 0):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is not None:
                    continue
                if seconds:
                    process.terminate()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            with contextlib.suppress(KeyboardInterrupt):  # another Ctrl-C changes nothing
                time.sleep(0.05)


def print_command(command, args):
    if not args.log:
        print(" ".join(command) + "\n", end="", flush=True)


def last_line(text):
    """Return the last line of a program's output, or the error in a box of tyro."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no output"
    if lines[-1].startswith("╰"):  # in a box the error comes first, then hints
        box = max((i for i, line in enumerate(lines) if line.startswith("╭")), default=-1)
        return lines[box + 1].strip("│ ")
    rules = [i for i, line in enumerate(lines) if re.fullmatch("-{20,}", line)]
    if rules and "--help" in lines[-1]:  # a box in ASCII
        return lines[rules[0] + 1]
    return lines[-1]


# Runs of scripts


def script_environment(jobs):
    """Return the environment variables of a script, of which `jobs` run at a time."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def run_script(script, seed, args, more):
    """Train with a script. Return its curve and the line of its evaluation.

    The run is kept in args.out, if that is given.
    """
    environment = script_environment(args.jobs)
    command = [sys.executable, str(script), "--env-id", args.env_id, "--seed", str(seed), *more]

    # The folder of the run is the new one with this name: runs of other envs may start meanwhile
    env = file_name(args.env_id)
    exp_name = more[more.index("--exp-name") + 1] if "--exp-name" in more else script.stem
    name = f"runs/{env}__{exp_name}__{seed}__*"
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        log = args.log or Path(temporary, "log.txt")
        before = set(folder.glob(name))
        print_command(command, args)

        # A single run prints its progress; only its errors go to the log
        with open(log, "w") as file:
            stdout = file if args.quiet else None
            code = call(command, cwd=folder, env=environment, stdout=stdout, stderr=file)
        text = log.read_text()
        if not args.quiet:
            print(text, end="", file=sys.stderr, flush=True)
        runs = sorted(set(folder.glob(name)) - before)
        if runs and args.out and args.quiet:
            shutil.copy(log, runs[0] / "log.txt")
        if code or not runs:
            raise Failed(last_line(text))
        return read_events(runs[0]), evaluate(script, runs[0], seed, args, environment)


def evaluation_command(script, run, seed, episodes):
    command = [sys.executable, str(script), "--evaluate", str(run.resolve())]
    return [*command, "--eval-episodes", str(episodes), "--seed", str(seed + 1000)]


def evaluate(script, run, seed, args, environment):
    """Evaluate the saved policy with args.evaluate episodes. Return the result, or the error: a
    curve is kept even if the evaluation fails."""
    if not args.evaluate:
        return ""
    command = evaluation_command(script, run, seed, args.evaluate)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = call(command, cwd=run, env=environment, stdout=out, stderr=err)
        file = err if code else out
        file.seek(0)
        return "\n" + last_line(file.read())


def read_events(folder):
    """Return the curve of a run from its TensorBoard events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tags = {
        "return": "charts/episodic_return",
        "length": "charts/episodic_length",
        "success": "charts/success_rate",
    }
    logged = events.Tags()["scalars"]
    if tags["return"] not in logged:
        raise Failed(NO_EPISODE)
    points = events.Scalars(tags["return"])
    curve = {"decisions": np.array([point.step for point in points], float)}
    for name, tag in tags.items():
        if tag in logged:
            curve[name] = np.array([point.value for point in events.Scalars(tag)])
    times = np.array([point.wall_time for point in points])
    curve["seconds"] = since_start(times, events.FirstEventTimestamp(), folder)
    if CPU_TAG in logged:  # runs of older versions don't have it
        points = events.Scalars(CPU_TAG)
        total = sum_of_starts(np.array([point.value for point in points]))
        curve["cpu_seconds"] = np.interp(times, [point.wall_time for point in points], total)
    return curve


def sum_of_starts(seconds):
    """Return the CPU seconds since the first start of a run. In a resumed run they have been counted
    from 0 again."""
    gained = np.diff(seconds, prepend=0)
    return np.cumsum(np.where(gained < 0, seconds, gained))


def since_start(times, first, folder):
    """Return the seconds of training until these times, since the time `first`.

    A resumed run has an events file for each start. The time between two of them is not included.
    """
    seconds = times - first
    starts = sorted(int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*"))
    for start in starts[1:]:
        before = times < start
        if before.any():
            seconds[~before] -= start - times[before].max()
    return seconds


# Runs of SB3


def run_sb3_in_process(seed, args, more):
    """Train with SB3 in a new process and return the curve, so that several runs are possible at
    a time."""
    command = [sys.executable, __file__, args.what, "--env-id", args.env_id]
    command += ["--seeds", str(seed), *more, "--out", str(args.out or RESULTS)]
    if args.label:
        command += ["--label", args.label]
    print_command(command, args)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(args.log, "w+") if args.log else tempfile.TemporaryFile("w+") as file:
        code = call(command, env=environment, stdout=file, stderr=file)
        file.seek(0)
        if code:
            raise Failed(last_line(file.read()))
    return read_csv(csv_of(seed, args, more)), ""


# Our scripts whose settings SB3 gets; those of sb3-ppo depend on the env
PEERS = {
    "sb3-sac": "sac_continuous",
    "sb3-tqc": "sac_continuous",
    "sb3-crossq": "crossq_continuous",
    "sb3-ppo-pixel": "ppo_pixel",
    "sb3-maskable-ppo": "ppo_discrete_multiagent",
}


def has_continuous_actions(env_id):
    """Return whether the actions of an env or of a bundled scene are a Box."""
    import gymnasium as gym

    if env_id in (*SCENES, *GODOT_SCENES):
        with contextlib.closing(make_scene(env_id)) as envs:
            return isinstance(envs.single_action_space, gym.spaces.Box)
    return isinstance(gym.make(env_id).action_space, gym.spaces.Box)


def make_scene(env_id, **settings):
    """Return the vector env of a bundled scene."""
    from godot_vec_env import GodotVecEnv
    from unity_vec_env import UnityVecEnv

    return (UnityVecEnv if env_id in SCENES else GodotVecEnv)(env_id, **settings)


def peer_settings(what, env_id, more):
    """Return the arguments that our script would have with these options. SB3 does not compile."""
    sys.path.insert(0, str(ROOT))
    import tyro

    name = PEERS.get(what)
    if name is None:
        continuous = has_continuous_actions(env_id)
        name = "ppo_continuous_multiagent" if continuous else "ppo_discrete_multiagent"
    script = importlib.import_module(name)
    preset = script.Args(env_id=env_id, **script.PRESETS.get(env_id, {}))
    more = [word for word in more if word not in ("--compile", "--no-compile")]
    return tyro.cli(script.Args, default=preset, args=more)


def make_sb3_off_policy(what, args, seed):
    """Return SB3's SAC, or CrossQ or TQC of sb3-contrib."""
    import torch
    from sb3_contrib import TQC, CrossQ
    from stable_baselines3 import SAC
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    algorithm = {"sb3-sac": SAC, "sb3-tqc": TQC, "sb3-crossq": CrossQ}[what]
    own = {"policy_delay": args.policy_frequency} if what == "sb3-crossq" else {"tau": args.tau}
    return algorithm(
        "MlpPolicy",
        make_vec_env(args.env_id, 1, seed=seed),
        learning_rate=args.learning_rate,
        gamma=args.gamma,
        buffer_size=args.buffer_size,
        learning_starts=args.learning_starts,
        batch_size=args.batch_size,
        policy_kwargs=dict(net_arch=list(args.hidden_sizes)),
        seed=seed,
        device="cpu",
        **own,
    )


def make_sb3_scene(args, seed):
    """Return a bundled scene as a VecEnv of SB3, with one env per agent."""
    from unity_vec_env import as_sb3

    settings = dict(seed=seed, num_players=args.num_players, player_args=args.player_args)
    if args.env_id in SCENES:
        settings["parameters"] = args.env_parameters
    return as_sb3(make_scene(args.env_id, **settings))


def make_sb3_ppo(args, seed, from_images, masks=False):
    """Return SB3's PPO, or MaskablePPO of sb3-contrib, with VecNormalize. Our value loss has half the weight of SB3's.

    In a bundled scene, the number of envs is the number of its agents.
    """
    import gymnasium as gym
    import torch
    from sb3_contrib import MaskablePPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    def make_image_env():
        from envs.pixels import make_pixel_env

        env = make_pixel_env(
            args.env_id, args.from_pixels, args.image_size, args.grayscale, args.action_repeat
        )
        space = env.observation_space["image"]
        return gym.wrappers.TransformObservation(env, lambda obs: obs["image"], space)

    if from_images:
        envs = make_vec_env(make_image_env, args.num_envs, seed=seed)
        stack_size = args.frame_stack or (3 if args.from_pixels else 1)
        if stack_size > 1:
            envs = VecFrameStack(envs, stack_size)
        policy_kwargs = None
    else:
        if args.env_id in (*SCENES, *GODOT_SCENES):
            envs = make_sb3_scene(args, seed)
        else:
            envs = make_vec_env(args.env_id, args.num_envs, seed=seed)
        torch.set_num_threads(1)
        activation = {"tanh": torch.nn.Tanh, "silu": torch.nn.SiLU}[args.activation]
        policy_kwargs = dict(net_arch=list(args.hidden_sizes), activation_fn=activation)
        if hasattr(args, "logstd_init"):
            policy_kwargs["log_std_init"] = args.logstd_init
    envs = VecNormalize(
        envs,
        norm_obs=args.norm_obs and not from_images,
        norm_reward=args.norm_reward,
        gamma=args.gamma,
    )
    return (MaskablePPO if masks else PPO)(
        "CnnPolicy" if from_images else "MlpPolicy",
        envs,
        learning_rate=lambda left: args.learning_rate * (left if args.anneal_lr else 1),
        n_steps=args.num_steps,
        batch_size=envs.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=0.5 * args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        target_kl=args.target_kl,
        policy_kwargs=policy_kwargs,
        seed=seed,
        device="cpu",
    )


def run_sb3(what, env_id, seed, more):
    """Train with SB3 and the settings of our script, and return the curve."""
    from stable_baselines3.common.callbacks import BaseCallback

    args = peer_settings(what, env_id, more)
    if what in ("sb3-sac", "sb3-tqc", "sb3-crossq"):
        model = make_sb3_off_policy(what, args, seed)
        interval = 1000
    else:
        from_images = what == "sb3-ppo-pixel"
        model = make_sb3_ppo(args, seed, from_images, masks=what == "sb3-maskable-ppo")
        interval = model.n_steps * model.n_envs
    rows = []
    start = time.time()
    cpu_clock = CpuClock()

    class Log(BaseCallback):
        """Add a point to the curve every `interval` decisions in which episodes ended."""

        episodes = []

        def _on_step(self):
            for info in self.locals["infos"]:
                if "episode" in info:
                    self.episodes.append(info["episode"])
            if self.num_timesteps % interval == 0 and self.episodes:
                mean_return = np.mean([episode["r"] for episode in self.episodes])
                mean_length = np.mean([episode["l"] for episode in self.episodes])
                seconds = time.time() - start
                cpu_seconds = cpu_clock.seconds()
                rows.append((self.num_timesteps, mean_return, mean_length, seconds, cpu_seconds))
                self.episodes = []
                if len(rows) % 20 == 0:
                    line = f"{self.num_timesteps:,} steps, return {mean_return:.1f}"
                    print(line, flush=True)
            return True

    model.learn(args.total_timesteps, callback=Log())
    model.env.close()
    if not rows:
        raise Failed(NO_EPISODE)
    columns = np.array(rows, float).T
    names = [name for name in COLUMNS if name != "success"]
    return dict(zip(names, columns, strict=True))


# Curves


def last_tenth(curve, column="return"):
    """Return the mean of a column over the last tenth of the decisions."""
    return curve[column][curve["decisions"] > 0.9 * curve["decisions"][-1]].mean()


def file_name(env_id):
    """Return the part of an env id that names its files: without module, and without slashes."""
    return re.sub(r"[^\w.+-]+", "-", env_id.split(":")[-1])


def csv_of(seed, args, more):
    """Return the path of a run's curve."""
    env = file_name(args.env_id) + ("-pixels" if "--from-pixels" in more else "")
    label = args.label or Path(args.what).stem
    return (args.out or RESULTS) / f"{env}.{label}.{seed}.csv"


def read_csv(path):
    """Return a curve by column. Raise ValueError if the file is incomplete."""
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    if len(lines) < 2 or tuple(lines[0][:3]) != COLUMNS[:3]:
        raise ValueError(f"{path} has no curve")
    header, *rows = lines
    columns = np.array([[float(x) for x in row] for row in rows]).T
    return dict(zip(header, columns, strict=True))


def write_csv(path, curve):
    """Write a curve. The file is replaced when it is complete."""
    names = [name for name in COLUMNS if name in curve]
    lines = [names]
    for decisions, *values in zip(*(curve[name] for name in names), strict=True):
        lines.append((int(decisions), *(f"{x:.6g}" for x in values)))
    with tempfile.NamedTemporaryFile(
        "w", newline="", dir=path.parent, suffix=".part", delete=False
    ) as file:
        csv.writer(file).writerows(lines)
    os.chmod(file.name, 0o644)  # only the owner can read a temporary file
    os.replace(file.name, path)


def summary(curve):
    """Return the end of a curve as text."""
    success = ""
    if "success" in curve:
        success = f", success {last_tenth(curve, 'success'):.1%},"
    return f"{last_tenth(curve):.4g}{success} over the last tenth"


def print_table(name, label, curves):
    ends = [last_tenth(curve) for curve in curves]
    values = " ".join(f"{end:.4g}" for end in ends)
    line = f"{name:20} {label:28} {np.mean(ends):8.1f} ± {np.std(ends):6.1f}   {values}"
    if "success" in curves[0]:
        rates = [last_tenth(curve, "success") for curve in curves]
        line += "   success " + " ".join(f"{rate:.1%}" for rate in rates)
    print(line, flush=True)


# All seeds


def run(seed, args, more):
    """Train with one seed and save the curve.

    Return the curve, the line of the evaluation, and the error or None.
    """
    curve = {}
    evaluation = ""
    try:
        if args.run:
            curve = read_events(args.run)
        elif not args.what.startswith("sb3-"):
            curve, evaluation = run_script(args.script, seed, args, more)
        elif args.quiet:
            curve, evaluation = run_sb3_in_process(seed, args, more)
        else:
            curve = run_sb3(args.what, args.env_id, seed, more)
        write_csv(csv_of(seed, args, more), curve)
    except Failed as error:
        return {}, evaluation, str(error)
    except Exception as error:  # the runs of the other seeds continue
        return {}, evaluation, f"{type(error).__name__}: {error}"
    return curve, evaluation, None


def run_all(args, more):
    """Yield each seed and the result of run() when it is there."""
    seeds = dict.fromkeys(args.seeds)
    if args.jobs == 1:
        for seed in seeds:
            yield seed, run(seed, args, more)
        return
    pool = ThreadPoolExecutor(args.jobs)
    try:
        tasks = {pool.submit(run, seed, args, more): seed for seed in seeds}
        for task in as_completed(tasks):
            yield tasks[task], task.result()
    except BaseException:
        end_runs()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def with_absolute_paths(more):
    """Return the options of a script with absolute paths of files: it runs in another folder."""
    before = ["", *more]
    return [
        str(Path(word).resolve()) if option in ("--curriculum", "--init-from") else word
        for option, word in zip(before, more, strict=False)
    ]


def find_script(name):
    """Return the path of a script, relative to the current folder or to the repository."""
    for path in (Path(name), ROOT / name):
        if path.is_file():
            return path.resolve()
    return None


def main():
    accept_any_encoding()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        help="a script, a changed copy of one, sb3-ppo, sb3-maskable-ppo, sb3-sac, sb3-crossq, "
        "sb3-tqc, sb3-ppo-pixel, or plot",
    )
    parser.add_argument("--env-id", help="the environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="the seeds of the runs")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="how many runs at a time; several use one thread each and write their output to logs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="save the curves in this folder, and the runs with checkpoints and logs in its runs/",
    )
    parser.add_argument("--run", type=Path, help="save the curve of this run, train nothing")
    parser.add_argument(
        "--evaluate",
        type=int,
        help="evaluate the saved policy with this number of episodes, in a new process with "
        "another seed",
    )
    parser.add_argument("--label", help="the name of the curve, instead of the script's name")
    args, more = parser.parse_known_args()
    more = with_absolute_paths(more)
    args.out = args.out.resolve() if args.out else None
    if args.what == "plot":
        import plots

        plots.draw_all(args.out or RESULTS)
        return

    # Refuse bad arguments before any run
    if not args.env_id:
        raise SystemExit("--env-id is missing: give the environment")
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be above 0")
    args.script = find_script(args.what)
    if args.script is None and not args.what.startswith("sb3-") and not args.run:
        raise SystemExit(f"{args.what}: there is no such script")

    (args.out or RESULTS).mkdir(parents=True, exist_ok=True)
    args.quiet = args.jobs > 1
    args.log = None
    curves = {}
    errors = {}
    for seed, (curve, evaluation, error) in run_all(args, more):
        if error:
            errors[seed] = error
            print(f"{args.env_id} seed {seed}: failed", flush=True)
        else:
            curves[seed] = curve
            print(f"{args.env_id} seed {seed}: {summary(curve)}{evaluation}", flush=True)
    if curves:
        label = args.label or Path(args.what).stem
        print_table(args.env_id, label, [curves[seed] for seed in sorted(curves)])
    if errors:
        lines = [f"{args.env_id} seed {seed} failed: {x}" for seed, x in sorted(errors.items())]
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    # The runs have their own sessions and would continue without this program
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
