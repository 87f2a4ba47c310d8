"""What all scripts take from the command line: their common arguments, what is refused before any work starts, and the
defaults, which come from the env's settings or from a checkpoint."""

import argparse
import importlib.util
import json
import math
import re
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from tyro.constructors import PrimitiveConstructorSpec

import fast
import ranks
from checkpoints import load, risks
from envs import engine

# What may be another when a run goes on.
FREE = {"resume", "total_timesteps", "unity_path", "base_port", "time_scale", "max_restarts", "device", "compile"}
FREE |= {"godot_path", "real_time"}
FREE |= {
    "rollout_share",
    "trust",
    "track",
    "wandb_project_name",
    "checkpoint_interval",
    "keep_checkpoints",
    "capture_video",
    "video_interval",
}
SCRIPTS = {
    "continuous": "ppo_continuous_multiagent.py, or sac_continuous.py,",
    "discrete": "ppo_discrete_multiagent.py",
}
ABOVE_0 = {"num_envs", "num_players", "max_agents", "time_scale", "total_timesteps", "eval_episodes"}
ABOVE_0 |= {"checkpoint_interval", "keep_checkpoints", "video_interval"}
FROM_0 = {"max_restarts", "seed", "base_port"}
AT_MOST = {"num_envs": 10_000, "num_players": 1_000, "max_agents": 100_000, "base_port": 64_000}
AT_MOST |= {"seed": 2**31, "max_restarts": 10**6}


def json_object(words):
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def named_numbers(words):
    return {name: float(number) for name, number in (word.split("=") for word in words)}


def option_of(nargs, metavar, parse, write):
    """How tyro reads a dict."""
    return Annotated[dict, PrimitiveConstructorSpec(nargs, metavar, parse, lambda x: isinstance(x, dict), write)]


JsonObject = option_of(1, "JSON", json_object, lambda x: [json.dumps(x)])
Numbers = option_of("*", "NAME=NUMBER", named_numbers, lambda x: [f"{name}={number:g}" for name, number in x.items()])


@dataclass
class Args:
    """What all scripts have; each adds its algorithm's."""

    env_id: str = ""
    """a bundled scene, a gymnasium id, or module:id"""
    env_kwargs: JsonObject = field(default_factory=dict)
    """arguments of a gymnasium env, as JSON: --env-kwargs '{"ctrl_cost_weight": 0.2}'"""
    unity_path: str | None = None
    """a Unity build to launch, or "editor" to wait for its Play button; with --env-id of a bundled scene it takes that
    one's settings"""
    godot_path: str | None = None
    """a Godot game to launch: an exported one, a folder with project.godot, run by $GODOT or `godot`, or "editor", to
    wait for its Play button; --env-id as for Unity"""
    real_time: bool = False
    """show a Godot game in a window, no faster than the clock"""
    behavior: str | None = None
    """which of a Unity build's behaviors, or of a Godot game's policies, to train, if it has several"""
    env_parameters: Numbers = field(default_factory=dict)
    """Unity's environment parameters: --env-parameters mass=3 scale=0.5"""
    num_players: int = 1
    """how many players, Unity's or Godot's, to launch; their agents are trained together"""
    max_agents: int | None = None
    """slots for agents per Unity player; default: as many as there are at the first decision"""
    time_scale: float = 20.0
    """Unity's game time per wall time"""
    base_port: int | None = None
    """first port for players; default: free ports"""
    player_args: tuple[str, ...] = ()
    """more command line arguments for the players, e.g. --player-args=--agents=20"""
    max_restarts: int = 3
    """how often in a row a player that crashes or hangs is started again"""
    num_envs: int = 1
    """how many gymnasium envs to step at once (a scene has as many as it has agents)"""
    seed: int = 1
    """of the envs, the networks, the actions and the minibatches; of --evaluate: the run's + 1000, so that its episodes
    are new"""
    exp_name: str = ""
    """part of the run's name"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    wandb_project_name: str = "unity-mujoco-rl"
    """the project's name there"""
    device: str = "cpu"
    """cpu, cuda or mps: where rollout and update live"""
    compile: bool | None = None
    """--compile, --no-compile: torch.compile the update, half a minute the very first time, a few seconds later.
    Default: if there is a C++ compiler and the run is long enough to earn it back"""
    checkpoint_interval: int = 100_000
    """decisions between two checkpoints; there is one at the end, on Ctrl-C and on SIGTERM too"""
    keep_checkpoints: int = 1
    """how many of the last checkpoints to keep, beside best.pt, the best by mean return"""
    capture_video: bool = False
    """film the deterministic policy into runs/NAME/videos, in an env of its own"""
    video_interval: int = 500_000
    """decisions between two films"""
    resume: str | None = None
    """runs/NAME: go on where that run stopped; --total-timesteps may be raised, the other settings are the run's"""
    evaluate: str | None = None
    """runs/NAME, or a checkpoint of it: no training, only episodes with the deterministic policy"""
    eval_episodes: int = 20
    """how many, equally many of every agent"""
    export: str | None = None
    """runs/NAME, or a checkpoint of it: write policy.onnx, for the Model field of Unity's Behavior Parameters, or
    for Godot's plugin, and then policy.json too, for envs/godot/policy.gd"""
    rollout_share: float = 1.0
    """with torchrun: a rank that lags ends its rollout early once this share of the ranks has finished theirs, as in
    DD-PPO; 1: none does. PPO's; SAC's ranks step together, the bandit's wait for sequences"""
    trust: bool = False
    """with a checkpoint of another machine: let its arguments start programs and import modules"""
    total_timesteps: int = 1_000_000
    """decisions of all agents together"""


# Checks


def option(name):
    return "--" + name.replace("_", "-")


def check(args, above_0=(), from_0=(), from_0_to_1=(), at_most=()):
    """Refuse what can't work, before any work starts. The names are the script's own; those of Args are above."""
    highest = AT_MOST | dict(at_most)
    for name, value in vars(args).items():
        for x in value if isinstance(value, tuple) else () if value is None else (value,):
            wrong = None
            if x == "":
                wrong = "is empty: give it a value, or leave it out"
            elif isinstance(x, float) and not math.isfinite(x):
                wrong = "must be a finite number"
            elif isinstance(x, (int, float)) and abs(x) > (2**40 if isinstance(x, int) else 1e30):
                wrong = "is too large"
            elif name in {*above_0, *ABOVE_0} and not x > 0:
                wrong = "must be above 0"
            elif name in {*from_0, *FROM_0} and not x >= 0:
                wrong = "must not be negative"
            elif name in from_0_to_1 and not 0 <= x <= 1:
                wrong = "must be between 0 and 1"
            elif name in highest and x > highest[name]:
                wrong = f"must be at most {highest[name]}"
            if wrong:
                raise ValueError(f"{option(name)} {x}: {wrong}")
    if not 0 < args.rollout_share <= 1:
        raise ValueError(f"--rollout-share {args.rollout_share}: must be above 0, and at most 1")
    if ranks.SIZE > 1 and "editor" in (args.unity_path, args.godot_path):
        raise ValueError("--unity-path editor, --godot-path editor: there is one editor, and each rank wants a player")
    for name, value in args.env_parameters.items():
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"--env-parameters {name}={value}: must be a finite number")
    if not re.fullmatch(r"[\w.+-]+", args.exp_name) or args.exp_name.startswith("."):
        raise ValueError(f"--exp-name {args.exp_name!r}: must be letters, digits, dots, dashes and underscores")
    game = engine(args)
    if args.unity_path and args.godot_path:
        raise ValueError("--unity-path and --godot-path: one at a time")
    if args.num_envs > 1 and game and args.num_envs != type(args).num_envs:
        more = f"a {game} scene has as many envs as it has agents; more come with --num-players"
        raise ValueError(f"--num-envs {args.num_envs}: {more}")
    if args.env_kwargs and game:
        takes = {"Unity": "--env-parameters", "Godot": "--player-args=--NAME=VALUE"}[game]
        raise ValueError(f"--env-kwargs is for gymnasium envs; a {game} scene takes {takes}")
    if args.env_parameters and game != "Unity":
        takes = "Godot game takes --player-args=--NAME=VALUE" if game else "gymnasium env takes --env-kwargs"
        raise ValueError(f"--env-parameters is for Unity scenes; a {takes}")
    if args.max_agents and game == "Godot":
        raise ValueError(
            f"--max-agents {args.max_agents}: a Godot game has as many agents as it has, from start to end"
        )
    if args.real_time and game != "Godot":
        raise ValueError("--real-time is for Godot games; a Unity scene takes --time-scale 1")
    if args.compile and not args.resume and not fast.compiler():
        raise ValueError("--compile needs a C++ compiler, on Debian and Ubuntu: apt-get install g++")
    if args.track and not importlib.util.find_spec("wandb"):
        raise ValueError("--track needs Weights & Biases: pip install wandb")
    if args.capture_video and (args.unity_path or args.godot_path):
        other = "Unity's own Recorder package films a Unity build" if args.unity_path else "--write-movie a Godot game"
        raise ValueError(f"--capture-video films gymnasium envs and bundled scenes; {other}")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    kind, _, number = args.device.partition(":")
    if not (number or "0").isdecimal() or int(number or 0) >= count.get(kind, 0):
        there = ", ".join(kind for kind, number in count.items() if number)
        raise ValueError(f"--device {args.device}: not on this machine, which has {there}")


def batches(args, n):
    """Decisions of this rank's batch, of a minibatch, and how many batches there are; n: agents."""
    batch_size = n * args.num_steps
    if batch_size % args.num_minibatches:
        size = f"{n} x {args.num_steps} = {batch_size} decisions"
        raise ValueError(f"--num-minibatches {args.num_minibatches} does not divide the batch of {size}")
    if args.total_timesteps < batch_size * ranks.SIZE:
        size = f"{n} agents x --num-steps {args.num_steps} = {batch_size} decisions" + " a rank" * (ranks.SIZE > 1)
        raise ValueError(f"--total-timesteps {args.total_timesteps}: less than one batch, {size}")
    return batch_size, batch_size // args.num_minibatches, args.total_timesteps // (batch_size * ranks.SIZE)


def check_memory(name, value, needed):
    """What would not fit is refused before it is taken."""
    try:
        with open("/proc/meminfo") as file:
            free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except OSError:
        return
    if needed > free:
        sizes = f"needs {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} are free"
        raise ValueError(f"{name} {value} {sizes}: give a smaller one")


def describe(args, envs, discrete=False):
    """What a policy of vectors sees and does, in plain numbers. Bounds are one number if all actions share it."""
    seen, action = envs.single_observation_space, envs.single_action_space
    kinds = {"continuous": gym.spaces.Box, "discrete": (gym.spaces.Discrete, gym.spaces.MultiDiscrete)}
    kind = next((name for name, spaces in kinds.items() if isinstance(action, spaces)), None)
    if kind is None:
        raise ValueError(f"{args.env_id} has actions {action}: no script takes them, only continuous or discrete ones")
    if not isinstance(seen, gym.spaces.Box):
        raise ValueError(f"{args.env_id} has observations {seen}: this script takes vectors; ppo_pixel.py takes images")
    if kind != ("discrete" if discrete else "continuous"):
        raise ValueError(f"{args.env_id} has actions {action}: {SCRIPTS[kind]} takes them")
    (obs_dim,) = seen.shape
    spec = {"obs_dim": obs_dim, "sensors": getattr(envs, "sensors", [obs_dim])}
    spec |= {"inputs": envs.inputs} if hasattr(envs, "inputs") else {}  # Godot's have names
    if kind == "continuous":
        return spec | {"action_dim": action.shape[0], **bounds(action)}
    branches = np.ravel(action.n if isinstance(action, gym.spaces.Discrete) else action.nvec).tolist()
    return spec | {"branches": branches, "start": np.ravel(action.start).tolist()}


def bounds(space):
    low, high = space.low.ravel().tolist(), space.high.ravel().tolist()
    return {"low": low[0], "high": high[0]} if len(set(low)) == len(set(high)) == 1 else {"low": low, "high": high}


class Bounds(nn.Module):
    """A spec's `low` and `high`: numbers if all actions have the same, else tensors."""

    def __init__(self, spec):
        super().__init__()
        for name in ("low", "high"):
            if isinstance(spec[name], float):
                setattr(self, name, spec[name])
            else:
                self.register_buffer(name, torch.tensor(spec[name]))


# The command line


def command_line(script, Args, presets, doc):
    """Arguments, and the checkpoint that they name. What it holds, or the env's settings, are the defaults, so that
    --help shows what would be used."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--env-id", "--unity-path", "--godot-path", "--resume", "--evaluate", "--export"):
        peek.add_argument(name, name.replace("-", "_").replace("__", "--"))
    given = peek.parse_known_args()[0]
    saved = {name: value for name in ("resume", "evaluate", "export") if (value := getattr(given, name)) is not None}
    if len(saved) > 1:
        raise ValueError("--resume, --evaluate and --export: one at a time")
    checkpoint = None
    if saved:
        path, state = checkpoint = load(*saved.values(), script)
        differing = sorted({f.name for f in fields(Args)} ^ set(state["args"]))
        if differing:
            there, here = ("has", "has not") if differing[0] in state["args"] else ("has not", "has")
            raise ValueError(f"{path} {there} {option(differing[0])}, and this script {here}: it was changed since")
        default = replace(Args(**state["args"]), **dict.fromkeys(("resume", "evaluate", "export")) | saved, trust=False)
        given_here = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:]}
        risky = {name: what for name, what in risks(state).items() if name not in given_here}
        if risky and "trust" not in given_here and "export" not in saved:
            own = f"give {' and '.join(map(option, risky))} yourself, or --trust"
            raise ValueError(f"{path} was not written on this machine, and would {', '.join(risky.values())}: {own}")
        if "resume" not in saved:
            default = replace(default, seed=default.seed + 1000, capture_video=False)
    elif (build := given.unity_path or given.godot_path) and not given.env_id:
        # Named after the build, and without a bundled scene's settings.
        name = Path(build).resolve().parent.name if Path(build).name == "project.godot" else Path(build).resolve().stem
        default = Args(env_id=name or "editor", unity_path=given.unity_path, godot_path=given.godot_path)
    else:
        env_id = given.env_id if given.env_id is not None else Args.env_id
        preset = presets.get(env_id.removeprefix("envs:"), {})
        if gone := sorted(set(preset) - {f.name for f in fields(Args)}):
            raise ValueError(f"PRESETS has {gone[0]} for {env_id}, and Args has no such argument: remove it there too")
        default = Args(env_id=env_id, **preset)
        if "editor" in (given.unity_path, given.godot_path) and default.num_players > 1:  # there is only one
            more = {"num_steps": default.num_steps * default.num_players} if hasattr(default, "num_steps") else {}
            default = replace(default, num_players=1, **more)
    words = {"--compile": ["--compile", "True"], "--no-compile": ["--compile", "False"]}  # a flag with a third state
    line = [part for word in sys.argv[1:] for part in words.get(word.replace("_", "-"), [word])]
    return tyro.cli(Args, description=doc, default=default, args=line), default, checkpoint
