"""The command line that all scripts share.

Args                    the common arguments; each script adds those of its algorithm
to_plain, from_plain    convert arguments to plain types, for checkpoints and config.json, and back
check(args, ...)        refuse arguments that cannot work, before any work starts
describe(args, envs)    return the spec of a policy, and refuse an env that the script does not support
command_line(...)       parse sys.argv, with defaults from the env's preset or from a checkpoint
"""

import argparse
import importlib.util
import json
import math
import re
import sys
import types
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from envs.hybrid import HybridSpace
from onefile_rl import curriculum, distributed, fast
from onefile_rl.checkpoints import load
from onefile_rl.engines.files import free_memory
from onefile_rl.engines.onnx_policy import find_policy, parse_others
from onefile_rl.engines.printing import printable
from onefile_rl.engines.samplers import parse
from onefile_rl.engines.scenes import PARAMETERS, SCENES, derive_seed, engine
from onefile_rl.entities import HEADS, UNITS
from onefile_rl.trust import risks

# Arguments that may differ when a run is resumed.
FREE = {
    "base_port",
    "capture_video",
    "checkpoint_interval",
    "compile",
    "device",
    "fast",
    "godot_path",
    "keep_checkpoints",
    "max_restarts",
    "others",
    "real_time",
    "resume",
    "rollout_share",
    "time_scale",
    "timeout_wait",
    "total_timesteps",
    "track",
    "trust",
    "unity_path",
    "video_interval",
    "wandb_project_name",
}

# Limits of the common arguments. A script passes the limits of its own arguments to check().
ABOVE_0 = {
    "checkpoint_interval",
    "eval_episodes",
    "eval_steps",
    "keep_checkpoints",
    "max_agents",
    "num_envs",
    "num_players",
    "time_scale",
    "timeout_wait",
    "total_timesteps",
    "video_interval",
}
FROM_0 = {"base_port", "max_restarts", "seed"}
AT_MOST = {
    "base_port": 64_000,
    "max_agents": 100_000,
    "max_restarts": 10**6,
    "num_envs": 10_000,
    "num_players": 1_000,
    "seed": 2**31,
    "timeout_wait": 1e6,
}
LARGEST_INT = 2**40
LARGEST_FLOAT = 1e30

SCRIPTS = {
    "continuous": "ppo_continuous_multiagent.py or sac_continuous.py",
    "discrete": "ppo_discrete_multiagent.py",
    "hybrid": "ppo_hybrid_multiagent.py",
}


# Arguments


def parse_json_object(words):
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def parse_parameters(words):
    """Return numbers and texts of samplers, by name. check() refuses other texts."""
    parameters = {}
    for word in words:
        name, is_given, value = word.partition("=")
        if not is_given:
            raise ValueError(f"{word}: write NAME=VALUE, for example mass=3")
        if name in parameters:
            raise ValueError(f"{name} is given twice")
        try:
            parameters[name] = curriculum.plain_value(parse(value))
        except ValueError:
            parameters[name] = value
    return parameters


def dict_option(nargs, metavar, parse, to_words):
    """Return a type annotation with which tyro reads a dict from the command line.

    `parse` turns the words after the option into a dict, and `to_words` turns a dict back into words.
    """
    is_instance = lambda value: isinstance(value, dict)
    return Annotated[dict, PrimitiveConstructorSpec(nargs, metavar, parse, is_instance, to_words)]


JsonObject = dict_option(1, "JSON", parse_json_object, lambda value: [json.dumps(value)])
Parameters = dict_option(
    "*",
    "NAME=VALUE",
    parse_parameters,
    lambda value: [f"{name}={curriculum.value_text(x)}" for name, x in value.items()],
)
Lessons = dict_option(1, "FILE.yaml", lambda words: curriculum.read(words[0]), curriculum.describe)

Policies = dict_option(
    "*",
    "NAME=FILE",
    parse_others,
    lambda value: [f"{name}={path}" for name, path in value.items()],
)


@dataclass
class Args:
    """The arguments that all scripts share. The docstring of a field is its text in --help."""

    # Experiment
    exp_name: str = ""
    """the name of the experiment, a part of the run's folder name"""
    seed: int = 1
    """the seed of the envs, networks, actions and minibatches; --evaluate uses the run's seed + 1000 by default"""
    total_timesteps: int = 1_000_000
    """the number of decisions to train for, counted over all agents; PPO rounds down to whole iterations"""
    device: str = "cpu"
    """the device of the rollout and the update: cpu, cuda, cuda:N or mps"""
    fast: bool = True
    """use numpy acting and a compiled update; --no-fast computes the same with plain PyTorch only"""
    compile: bool | None = None
    """compile the update (--compile, --no-compile); by default, in long runs if a C++ compiler is installed"""
    track: bool = False
    """log to Weights & Biases as well; this needs the package wandb"""
    wandb_project_name: str = "unity-mujoco-rl"
    """the Weights & Biases project to log to"""

    # Environment
    env_id: str = ""
    """the env: a bundled scene, a gymnasium id, or module:id to import a module that registers the id"""
    env_kwargs: JsonObject = field(default_factory=dict)
    """keyword arguments of the gymnasium env as a JSON object, for example '{"ctrl_cost_weight": 0.2}'"""
    reset_options: JsonObject = field(default_factory=dict)
    """options that a gymnasium env gets with every reset, as a JSON object, for example '{"low": -0.1, "high": 0.1}'"""
    env_parameters: Parameters = field(default_factory=dict)
    """parameters of a Unity scene or gymnasium env, numbers or samplers, for example scale=2 'mass=uniform(0.5,10)'"""
    curriculum: Lessons = field(default_factory=dict)
    """a YAML file with lessons for these parameters, in ML-Agents' format (environment_parameters)"""
    num_envs: int = 1
    """the number of parallel gymnasium envs; in a Unity or Godot scene every agent counts as one env"""

    # Unity and Godot
    unity_path: str | None = None
    """the Unity build to launch, or "editor" to wait for its Play button; --env-id then selects the preset"""
    godot_path: str | None = None
    """the Godot game to launch (exported, or a folder with project.godot), or "editor" to wait for its Play button"""
    behavior: str | None = None
    """the Unity behavior (all its teams, or one: NAME?team=0) or Godot policy to train; A B: a Unity policy for each"""
    others: Policies = field(default_factory=dict)
    """policies of Unity behaviors that are not trained: NAME=FILE.onnx or NAME=runs/NAME; by default, random actions"""
    num_players: int = 1
    """the number of Unity or Godot processes to launch; their agents are trained together"""
    player_args: tuple[str, ...] = ()
    """additional command-line arguments of the players, for example --player-args=--agents=20"""
    base_port: int | None = None
    """the port of the first player, the others use the ports that follow; by default, free ports are chosen"""
    max_restarts: int = 3
    """the number of consecutive restarts of a crashed or hanging player before the run stops"""
    timeout_wait: float = 60.0
    """the seconds to wait for an answer from a player or a worker process before it counts as hanging"""
    max_agents: int | None = None
    """the number of agent slots per Unity player; by default, the number of agents in the first step"""
    flat_entities: bool = False
    """take the rows of a Unity scene's BufferSensors as plain inputs, without attention"""
    time_scale: float = 20.0
    """the speed of a Unity scene as a multiple of real time"""
    image_order: Literal["auto", "channels-first", "channels-last"] = "auto"
    """the order of uncompressed images that a Unity scene declares as channels first; auto: by ML-Agents' version"""
    real_time: bool = False
    """run a Godot game in a window and in real time"""

    # Checkpoints and videos
    checkpoint_interval: int = 100_000
    """the number of decisions between two checkpoints; one is also saved at the end and on Ctrl-C or SIGTERM"""
    keep_checkpoints: int = 1
    """the number of recent checkpoints to keep, in addition to best.pt, which has the highest mean return"""
    capture_video: bool = False
    """record videos of the deterministic policy in runs/NAME/videos; recording uses a separate env"""
    video_interval: int = 500_000
    """the number of decisions between two videos"""

    # Starting from another run
    init_from: str | None = None
    """start with the weights and statistics of this run or checkpoint, runs/NAME or runs/NAME/best.pt"""
    init_partly: bool = False
    """with --init-from: take what fits, start the rest new, and print a line for each part"""

    # Using a run
    resume: str | None = None
    """continue this run, runs/NAME, up to a larger --total-timesteps; an older .pt file continues in a new folder"""
    evaluate: str | None = None
    """evaluate the deterministic policy of this run or checkpoint, runs/NAME or runs/NAME/best.pt, without training"""
    eval_episodes: int = 20
    """the number of evaluation episodes, divided equally among the agents"""
    eval_steps: int = 100_000
    """the number of steps after which an evaluation does not wait any longer for the end of an agent's episode"""
    export: str | None = None
    """write the policy of this run or checkpoint to policy.onnx, for Unity or Godot, and for Godot to policy.json"""
    trust: bool = False
    """allow a checkpoint from another machine to start programs, import modules and restore envs as it says"""

    # Distributed training
    rollout_share: float = 1.0
    """when a PPO rollout may end early: at this share of finished ranks, or of the rollout with several behaviors"""


COMMON = {f.name for f in fields(Args)}


def option(name):
    """Return the command-line option of an argument: "num_envs" -> "--num-envs"."""
    return "--" + name.replace("_", "-")


# Conversion to plain types and back


def to_plain(args):
    """Return the arguments as a dict of plain types. Enum members become their names, as on the command line.

    Checkpoints hold plain types only, because they are loaded without running code, and config.json holds JSON.
    """
    return {f.name: plain_value(getattr(args, f.name), f.name) for f in fields(args)}


def plain_value(value, name):
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(plain_value(element, name) for element in value)
    if isinstance(value, dict) and not any(isinstance(key, Enum) for key in value):
        return {key: plain_value(element, name) for key, element in value.items()}
    kinds = "numbers, strings, Enum members, or tuples, lists and dicts of these"
    raise ValueError(
        f"{option(name)} {value}: a checkpoint cannot store a {type(value).__name__}; use {kinds}"
    )


def from_plain(Args, plain):
    """Return an `Args` from the dict that to_plain() made: where a field's type has an Enum, names become members."""
    types = get_type_hints(Args)
    values = {}
    for name, value in plain.items():
        members = {}
        for kind in enums_in(types[name]):
            members |= kind.__members__
        values[name] = restored_value(value, members, name) if members else value
    return Args(**values)


def enums_in(annotation):
    """Return the Enum classes in a type annotation such as Kind, `Kind | None`, tuple[Kind, ...] or Literal[Kind.A]."""
    kind = annotation if isinstance(annotation, type) else type(annotation)
    if issubclass(kind, Enum):
        return [kind]
    return [kind for part in get_args(annotation) for kind in enums_in(part)]


def fits(value, annotation):
    """Return whether a plain value, as in a checkpoint, can be a value of a field with this type annotation."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, kind) for kind in inner)
    if origin is Literal:
        return value in inner or enums_in(annotation) != []
    if origin in (tuple, list):
        if not isinstance(value, origin):
            return False
        if origin is list or inner[1:] == (...,):
            return all(fits(element, inner[0]) for element in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    kind = origin or annotation
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in (bool, str, dict, tuple, list, type(None)):
        return isinstance(value, kind)
    return True  # Enum members are checked by from_plain()


def restored_value(value, members, name):
    if isinstance(value, (list, tuple)):
        return type(value)(restored_value(element, members, name) for element in value)
    if isinstance(value, dict):
        return {key: restored_value(element, members, name) for key, element in value.items()}
    if not isinstance(value, str):
        return value
    if value not in members:
        raise ValueError(
            f"{option(name)} {value}: the checkpoint has this value, the script has {', '.join(members)}"
        )
    return members[value]


# Checks


def check(args, above_0=(), from_0=(), from_0_to_1=(), at_most=()):
    """Raise a ValueError of one line for arguments that cannot work, before any work starts.

    above_0, from_0, from_0_to_1: names of the script's own arguments that must be above 0, at least 0, or between 0
    and 1. at_most: upper limits of the script's own arguments, by name.
    """
    check_limits(
        args, ABOVE_0.union(above_0), FROM_0.union(from_0), from_0_to_1, AT_MOST | dict(at_most)
    )
    check_names_and_numbers(args)
    check_engine_options(args)
    check_video(args)
    check_compile(args)
    check_track(args)
    check_device(args.device)


def check_limits(args, above_0, from_0, from_0_to_1, at_most):
    """Check every number against its limits, and every string for being empty."""
    for name, value in vars(args).items():
        if value is None:
            continue
        for x in value if isinstance(value, tuple) else [value]:
            problem = None
            if x == "":
                problem = "is empty: give a value, or leave the option out"
            elif isinstance(x, float) and not math.isfinite(x):
                problem = "must be a finite number"
            elif isinstance(x, (int, float)) and abs(x) > (
                LARGEST_INT if isinstance(x, int) else LARGEST_FLOAT
            ):
                problem = "is too large"
            elif name in above_0 and not x > 0:
                problem = "must be above 0"
            elif name in from_0 and not x >= 0:
                problem = "must not be negative"
            elif name in from_0_to_1 and not 0 <= x <= 1:
                problem = "must be between 0 and 1"
            elif name in at_most and x > at_most[name]:
                problem = f"must be at most {at_most[name]}"
            if problem:
                raise ValueError(f"{option(name)} {x}: {problem}")


def check_names_and_numbers(args):
    if not 0 < args.rollout_share <= 1:
        raise ValueError(f"--rollout-share {args.rollout_share}: must be above 0 and at most 1")

    for name, value in args.env_parameters.items():
        curriculum.check_name(name, "--env-parameters")
        try:
            parse(value)
        except ValueError as error:
            raise ValueError(f"--env-parameters {name}={printable(value)}: {error}") from None
    if args.init_partly and args.init_from is None:
        raise ValueError("--init-partly: give --init-from too")
    curriculum.check(args.curriculum)
    both = sorted(args.env_parameters.keys() & args.curriculum.keys())
    if both and args.evaluate is None:
        raise ValueError(
            f"--env-parameters {both[0]}: --curriculum sets it too, remove it from one of them"
        )

    # The name becomes a part of a folder's name.
    if not re.fullmatch(r"[\w.+-]+", args.exp_name) or args.exp_name.startswith("."):
        allowed = (
            "use letters, digits, dots, dashes, plus signs and underscores, and no dot at the start"
        )
        raise ValueError(f"--exp-name {args.exp_name!r}: {allowed}")


def check_engine_options(args):
    """Check that the options fit the engine: Unity, Godot, or none for gymnasium envs."""
    if distributed.SIZE > 1 and "editor" in (args.unity_path, args.godot_path):
        raise ValueError(
            "--unity-path editor and --godot-path editor are for one process: leave torchrun out"
        )
    if args.unity_path and args.godot_path:
        raise ValueError("--unity-path and --godot-path: give only one of them")

    game = engine(args)
    if game and args.num_envs > 1 and args.num_envs != type(args).num_envs:
        problem = f"a {game} scene has one env per agent; add players with --num-players"
        raise ValueError(f"--num-envs {args.num_envs}: {problem}")
    if game == "Unity" and args.env_kwargs:
        raise ValueError(
            "--env-kwargs is for gymnasium envs; use --env-parameters for a Unity scene"
        )
    if game == "Godot" and args.env_kwargs:
        raise ValueError(
            "--env-kwargs is for gymnasium envs; use --player-args=--NAME=VALUE for a Godot game"
        )
    if game and args.reset_options:
        raise ValueError(
            f"--reset-options is for gymnasium envs: leave it out, {args.env_id} is a {game} scene"
        )
    if game == "Godot" and args.env_parameters:
        raise ValueError(
            "--env-parameters is for Unity scenes and gymnasium envs; use --player-args=--NAME=VALUE for a Godot game"
        )
    if game == "Godot" and args.curriculum:
        raise ValueError(
            "--curriculum is for Unity scenes and gymnasium envs; let a Godot game choose its lessons itself"
        )
    if args.env_id in SCENES and not args.unity_path:
        known = PARAMETERS.get(args.env_id, ())
        for name in [*args.env_parameters, *args.curriculum]:
            if name not in known:
                theirs = f"it has {', '.join(known)}" if known else "it has none"
                raise ValueError(f"{args.env_id} has no parameter {printable(name)}: {theirs}")
    if args.others and game != "Unity":
        fix = "agents of other policies act at random" if game else "a gymnasium env has none"
        raise ValueError(f"--others is for the behaviors of Unity scenes: leave it out, {fix}")
    for name, path in args.others.items():
        if not isinstance(path, str):
            raise ValueError(f"--others {printable(name)}={printable(path)}: give a path")
        if args.export is None:  # an export needs no env
            find_policy(name, path)
    if args.image_order != "auto" and game != "Unity":
        raise ValueError("--image-order is for Unity scenes: leave it out")
    if game == "Godot" and args.max_agents:
        problem = "the number of agents of a Godot game is fixed; leave the option out"
        raise ValueError(f"--max-agents {args.max_agents}: {problem}")
    if game != "Godot" and args.real_time:
        raise ValueError("--real-time is for Godot games; use --time-scale 1 for a Unity scene")


def check_video(args):
    if args.capture_video and args.unity_path:
        other = "record a Unity build with Unity's Recorder package"
        raise ValueError(f"--capture-video records gymnasium envs and bundled scenes; {other}")
    if args.capture_video and args.godot_path:
        other = "record a Godot game with Godot's --write-movie"
        raise ValueError(f"--capture-video records gymnasium envs and bundled scenes; {other}")


def check_compile(args):
    if args.compile and not args.fast:
        resumed = "add --fast to resume a run that was started with --no-fast"
        raise ValueError(f"--compile and --no-fast: give only one of them, or {resumed}")
    # A resumed run that was compiled on another machine continues without.
    if args.compile and not args.resume and not fast.compiler():
        raise ValueError(
            "--compile needs a C++ compiler; on Debian and Ubuntu: apt-get install g++"
        )


def check_track(args):
    if args.track and not importlib.util.find_spec("wandb"):
        raise ValueError("--track needs Weights & Biases: pip install wandb")


def check_device(device):
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    kind, _, index = device.partition(":")
    index = index or "0"
    if not index.isdecimal() or int(index) >= counts.get(kind, 0):
        available = ", ".join(kind for kind, count in counts.items() if count)
        raise ValueError(f"--device {device}: not on this machine, which has {available}")


def check_memory(name, value, needed):
    """Raise a ValueError if the option `name` with `value` needs more bytes than are free. Only Linux is checked."""
    free = free_memory()
    if needed > free:
        sizes = f"needs {needed / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free"
        raise ValueError(f"{name} {value} {sizes}: choose a smaller value")


def check_batch(args, num_agents, spec=None):
    """Raise a ValueError if the batch can't be divided into minibatches, or if total_timesteps is less than one batch.

    spec: the spec of the policy; with it, a rollout that does not fit into the memory is refused
    """
    batch_size = num_agents * args.num_steps
    if batch_size % args.num_minibatches:
        size = f"{num_agents} x {args.num_steps} = {batch_size} decisions"
        raise ValueError(
            f"--num-minibatches {args.num_minibatches} does not divide the batch of {size}"
        )

    if args.total_timesteps < batch_size * distributed.SIZE:
        size = f"{num_agents} agents x --num-steps {args.num_steps} = {batch_size} decisions"
        if distributed.SIZE > 1:
            size += f" on each of {distributed.SIZE} ranks"
        raise ValueError(f"--total-timesteps {args.total_timesteps}: less than one batch, {size}")

    if spec:
        minibatch_size = batch_size // args.num_minibatches
        needed = rollout_bytes(spec, batch_size + num_agents, minibatch_size)
        check_memory("--num-steps", args.num_steps, needed)


def rollout_bytes(spec, num_rows, minibatch_size):
    """Return about how many bytes the observations of one iteration of PPO take."""
    # Observations and next observations, both again in the batch, and once more in normalized form
    vectors = 5 * 4 * num_rows * (spec.get("obs_dim") or spec.get("vector", 0))

    # Embeddings, attention scores and sums of entities while the log-probs of all rows are computed
    for _, rows, _ in spec.get("entities", []):
        vectors += 4 * num_rows * rows * (10 * UNITS + 2 * HEADS * rows)

    # Each image once as bytes, final ones in addition, and the stacks of a minibatch as floats
    pixels = sum(math.prod(shape) for shape in spec.get("images", {}).values())
    stacks = 2 * 4 * minibatch_size * spec.get("stack", 1) * pixels
    return vectors + 2 * num_rows * pixels + stacks


# The spec of a policy


def describe(args, envs, discrete=False, hybrid=False, entities=False):
    """Return the spec of a policy on vectors: sizes of observations and actions, and bounds, as plain numbers.

    A checkpoint stores the spec, and agents are built from it. discrete: whether the script is for discrete actions.
    hybrid: whether it is for continuous and discrete actions together. entities: whether its policy attends to
    entities; the rows of a BufferSensor are flattened otherwise. An env that the script does not support is refused
    with the name of the script that does.
    """
    obs_space = envs.single_observation_space
    action_space = envs.single_action_space
    if isinstance(action_space, gym.spaces.Box):
        kind = "continuous"
    elif isinstance(action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        kind = "discrete"
    elif isinstance(action_space, HybridSpace):
        kind = "hybrid"
    else:
        supported = (
            "the scripts support Box, Discrete and MultiDiscrete, and a Dict or Tuple of both kinds"
        )
        raise ValueError(f"{args.env_id} has actions {action_space}: {supported}")
    if not isinstance(obs_space, gym.spaces.Box):
        supported = "this script supports vectors only; use ppo_pixel.py for images"
        raise ValueError(f"{args.env_id} has observations {obs_space}: {supported}")
    if kind != ("hybrid" if hybrid else "discrete" if discrete else "continuous"):
        raise ValueError(f"{args.env_id} has actions {action_space}: use {SCRIPTS[kind]}")

    (obs_dim,) = obs_space.shape
    spec = {"obs_dim": obs_dim, "sensors": getattr(envs, "sensors", [obs_dim])}
    if hasattr(envs, "inputs"):  # Godot's observations have names
        spec["inputs"] = envs.inputs
    if found := describe_entities(args, envs, entities):
        spec["entities"] = found
    if kind == "continuous":
        return spec | {"action_dim": action_space.shape[0]} | bounds(action_space)
    if kind == "hybrid":
        if hasattr(envs, "action_order"):  # Godot's exported policies keep the order of the game
            spec["action_order"] = envs.action_order
        spec["action_dim"] = action_space.continuous.shape[0]
        spec["branches"] = action_space.branches
        return spec | bounds(action_space.continuous)
    sizes = action_space.n if isinstance(action_space, gym.spaces.Discrete) else action_space.nvec
    return spec | {
        "branches": np.ravel(sizes).tolist(),
        "start": np.ravel(action_space.start).tolist(),
    }


def describe_entities(args, envs, supported):
    """Return (first column, rows, size) of each sensor with entities, empty if the policy is to take them as columns.

    A line names the entities that a script does not support.
    """
    found = getattr(envs, "entities", {})
    if args.flat_entities or not found:
        return []
    if not supported:
        sensors = [f"{name} ({rows} x {size})" for name, (_, rows, size) in found.items()]
        where = "the PPO scripts for vectors attend to them"
        print(f"Flattening the entities of {', '.join(sensors)}: {where}", flush=True)
        return []
    return [list(entities) for entities in found.values()]


def bounds(space):
    """Return the bounds of a Box as "low" and "high": numbers if all actions share them, otherwise lists."""
    low = space.low.ravel().tolist()
    high = space.high.ravel().tolist()
    if len(set(low)) == 1 and len(set(high)) == 1:
        return {"low": low[0], "high": high[0]}
    return {"low": low, "high": high}


class Bounds(nn.Module):
    """Action bounds `low` and `high`, tensors with one number per continuous action."""

    def __init__(self, spec):
        super().__init__()
        for name in ("low", "high"):
            if isinstance(spec[name], float):  # shared by all actions
                bounds = torch.full((spec["action_dim"],), spec[name])
            else:
                bounds = torch.tensor(spec[name])
            # The largest numbers for infinite ones: all that an agent has must be finite. They are
            # not part of the state_dict: every agent gets them from its spec
            self.register_buffer(name, bounds.nan_to_num(), persistent=False)


# The command line


def without(lessons, parameters):
    """Return the parameters of a preset without those that have lessons, which replace them."""
    return {name: x for name, x in parameters.items() if name not in lessons}


def as_typed(script):
    """Return the script's path as the user has typed it, so that printed commands work in the current folder."""
    typed = sys.argv[0]
    return typed if Path(typed).name == Path(script).name else Path(script).name


def command_line(script, Args, presets, doc):
    """Parse sys.argv and return the arguments, their defaults, and the checkpoint (path, state) or None.

    The defaults come from the checkpoint that --resume, --evaluate or --export names, or from the preset of the env.
    --help shows these defaults. doc: the description that --help shows.
    """
    # Read the options that decide about the defaults before tyro parses everything.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("env_id", "unity_path", "godot_path", "resume", "evaluate", "export", "curriculum")
    for name in names:
        parser.add_argument(option(name), f"--{name}")
    given, _ = parser.parse_known_args()
    lessons = {}
    if given.curriculum is not None:
        # An error is one line here, and a box in tyro's output
        lessons = curriculum.read(given.curriculum, report=True)

    sources = [
        name for name in ("resume", "evaluate", "export") if getattr(given, name) is not None
    ]
    if len(sources) > 1:
        raise ValueError("--resume, --evaluate and --export: give only one of them")

    checkpoint = None
    if sources:
        checkpoint = load(getattr(given, sources[0]), script)
        default = defaults_of_checkpoint(Args, checkpoint, given)
    elif (given.unity_path or given.godot_path) and not given.env_id:
        default = defaults_of_build(Args, given)
    else:
        default = defaults_of_env(Args, presets, given)
        if lessons:  # a parameter of the preset that the file sets too
            default.env_parameters = without(lessons, default.env_parameters)

    # tyro has flags with two states only, and --compile has a third, its default.
    flags = {"--compile": ["--compile", "True"], "--no-compile": ["--compile", "False"]}
    words = []
    for word in sys.argv[1:]:
        words += flags.get(word.replace("_", "-"), [word])
    of = "of this run" if checkpoint else f"for --env-id {default.env_id}"
    about, _, _ = doc.partition("\n\nDifferences from")  # the list of the differences is long
    doc = f"{about.rstrip()}\n\nThe defaults below are those {of}."
    return tyro.cli(Args, description=doc, default=default, args=words), default, checkpoint


def defaults_of_checkpoint(Args, checkpoint, given):
    """Return the arguments in a checkpoint, if the script still has the same ones and the checkpoint can be trusted."""
    path, state = checkpoint
    saved_names = set(state["args"])
    script_names = {f.name for f in fields(Args)}
    removed = sorted(saved_names - script_names)
    # Options that the package has got since do nothing by default
    added = sorted(script_names - saved_names - COMMON)
    old_script = f"use the copy of the script in {path.parent}"
    if removed:
        raise ValueError(
            f"{path} has {printable(option(removed[0]))}, which the script no longer has: {old_script}"
        )
    if added:
        raise ValueError(
            f"{path} does not have {option(added[0])}, which is new in the script: {old_script}"
        )

    kinds = get_type_hints(Args)
    for name, value in state["args"].items():
        if not fits(value, kinds[name]):
            problem = f"{option(name)} can't be {printable(repr(value))[:60]}"
            raise ValueError(f"{path} is not a valid checkpoint: {problem}")

    # The checkpoint of another machine must not start programs or import modules on its own.
    given_names = {
        word.partition("=")[0].removeprefix("--").replace("-", "_")
        for word in sys.argv[1:]
        if word.startswith("--")
    }
    risky = {
        name: effect
        for name, effect in risks(state).items()
        if not {name, f"no_{name}"} & given_names
    }
    state["trusted"] |= "trust" in given_names
    if risky and not state["trusted"] and given.export is None:
        effects = ", ".join(risky.values())
        options = " and ".join(map(option, risky))
        problem = f"was not written on this machine and in this place, and would {effects}"
        raise ValueError(f"{path} {problem}: give {options} on this command line, or --trust")

    default = from_plain(Args, state["args"])
    default = replace(
        default, resume=given.resume, evaluate=given.evaluate, export=given.export, trust=False
    )
    if given.resume is None:
        # New episodes for the evaluation. Videos and compiling belong to the training.
        seed = derive_seed(default.seed, 1000)
        default = replace(default, seed=seed, capture_video=False, compile=None)
    elif "no_fast" in given_names:
        default = replace(default, compile=False)
    return default


def check_changed_args(path, state, args, check):
    """Refuse a checkpoint of another machine if the arguments that its training loop has changed are not valid.

    check(args): the script's check of its command line
    """
    if state["signed"]:
        return
    kinds = get_type_hints(type(args))
    for name, value in state["changed_args"].items():
        if name not in kinds or not fits(value, kinds[name]):
            problem = f"{printable(option(name))} can't be {printable(repr(value))[:60]}"
            raise ValueError(f"{path} is not a valid checkpoint: changed_args: {problem}")
    try:
        check(from_plain(type(args), to_plain(args) | state["changed_args"]))
    except ValueError as error:
        problem = printable(error)
        raise ValueError(f"{path} is not a valid checkpoint: changed_args: {problem}") from None


def defaults_of_build(Args, given):
    """Return the defaults for a Unity build or Godot game without --env-id: it names the run, and has no preset."""
    path = Path(given.unity_path or given.godot_path)
    name = path.resolve().parent.name if path.name == "project.godot" else path.resolve().stem
    return Args(env_id=name or "editor", unity_path=given.unity_path, godot_path=given.godot_path)


def defaults_of_env(Args, presets, given):
    """Return the defaults with the preset of the env, if the script has one."""
    env_id = Args.env_id if given.env_id is None else given.env_id
    preset = presets.get(env_id.removeprefix("envs:"), {})
    unknown = sorted(set(preset) - {f.name for f in fields(Args)})
    if unknown:
        raise ValueError(
            f"PRESETS sets {unknown[0]} for {env_id}, but Args has no such field: remove it from PRESETS"
        )
    default = Args(env_id=env_id, **preset)

    # The editor is a single player: keep the batch size by collecting more steps per agent.
    if "editor" in (given.unity_path, given.godot_path) and default.num_players > 1:
        if hasattr(default, "num_steps"):
            default = replace(default, num_steps=default.num_steps * default.num_players)
        default = replace(default, num_players=1)
    return default
