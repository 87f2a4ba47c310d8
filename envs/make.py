"""Make a vector env for any --env-id: a bundled scene, a Unity build, a Godot game, or a gymnasium env.

    envs, how = make_envs(args, seed)       args: the script's arguments; how: describes in a few words how envs run

All of these vector envs have num_envs, single_observation_space, single_action_space, reset, step and close. Envs reset
themselves when an episode ends. `infos` contains, with one entry per slot:

    "ready"             whether the slot requests an action now
    "closed"            whether the reward of the slot's last action has arrived
    "final_obs"         the last observation of an episode that ended
    "is_success"        whether an episode that ended was a success, if the env reports it
    "action_mask"       for discrete actions: True where an action is allowed, with the branches side by side
    "restarted"         whether the slot's pending decision was lost and a new episode has started
    "stats"             statistics that a Unity or Godot game reports

Observations and actions are vectors: nested spaces are flattened. Actions with a continuous and a discrete part are
rows of both, see envs/hybrid.py.

`envs.set_parameters(parameters)` sets environment parameters, numbers and samplers by name, from the next episode of
each agent on: see envs/parameters.py for gymnasium envs, unity_vec_env.py for Unity. Godot's games have none.

`envs.set_attr(name, value)` sets an attribute of all gymnasium envs at once, and `envs.get_attr(name)` reads it. A
resumed run keeps the values: see envs/sync.py.
"""

import copy
import difflib
import importlib
import importlib.util
import traceback
from pathlib import Path

import gymnasium as gym
import imageio
import numpy as np

from envs import contract
from envs.envpool_envs import EnvPoolEnvs
from envs.hybrid import HybridActions, HybridSpace, is_hybrid
from envs.parameters import ARGUMENT
from envs.rendering import load_triton, use_tracking_camera, video_writer
from envs.sync import RecordedEnvs, SyncEnvs
from godot_vec_env import GodotVecEnv
from onefile_rl.engines import shared
from onefile_rl.engines.scenes import GODOT_SCENES, SCENES, engine
from unity_vec_env import UnityVecEnv

WIDER = 10  # see rescale_far_actions
NARROWER = 100
SMALLEST_IMAGE = 8  # pixels: the encoders of ppo_pixel.py take no smaller images
MAKE_OPTIONS = ("max_episode_steps", "disable_env_checker")  # arguments of gym.make itself
VIDEO_STEPS = 450  # decisions in a video of a scene: half a minute of Crawler

# Arguments of the scripts that UnityVecEnv and GodotVecEnv take under the same name
PLAYER_ARGS = ("num_players", "base_port", "player_args", "max_restarts")
UNITY_ARGS = (*PLAYER_ARGS, "behavior", "max_agents", "time_scale", "others", "image_order")
GODOT_ARGS = (*PLAYER_ARGS, "real_time")


def make_envs(args, seed, video=None):
    """Return a vector env and a description of it.

    video: the path of a video to record; there is only one env or player then
    """
    game = engine(args)
    if game == "Unity":
        return make_unity_envs(args, seed, video)
    if game == "Godot":
        return make_godot_envs(args, seed, video)
    if video:
        rendered = {"render_mode": "rgb_array"}

        def make_recorded(more):
            env = make_script_env(args, args.env_kwargs | rendered | more)
            return use_tracking_camera(env, args.env_kwargs)

        envs = RecordedEnvs(make_recorded({}), video, args.env_parameters, make_recorded)
        return envs, "one gymnasium env, recorded"
    # EnvPool has other arguments, and no parameters
    plain = not args.env_kwargs and not args.reset_options and not args.env_parameters
    if args.num_envs > 1 and plain and is_in_envpool(args.env_id):
        return EnvPoolEnvs(args.env_id, args.num_envs, seed), f"EnvPool, {args.num_envs} envs"
    make = lambda more: make_script_env(args, args.env_kwargs | more)
    envs = SyncEnvs([make({}) for _ in range(args.num_envs)], args.env_parameters, make)
    note_parameters(envs.envs[0], envs.places)
    return envs, f"{args.num_envs} gymnasium env(s) in one process"


def note_parameters(env, places):
    """Print a line about the parameters that are arguments of the env's constructor."""
    arguments = [name for name, (place, _) in places.items() if place == ARGUMENT]
    if arguments:
        what = "is an argument" if len(arguments) == 1 else "are arguments"
        made = "the env is made again for every other value"
        note(f"{env.spec.id}: {' and '.join(arguments)} {what} of its constructor: {made}")


def make_script_env(args, env_kwargs):
    """Return one gymnasium env with vectors, as the arguments of a script describe it."""
    env = make_env(args.env_id, **env_kwargs)
    if hasattr(args, "logstd_init"):  # the policy is a normal distribution, as PPO's
        env = rescale_far_actions(env)
    return ResetOptions(env, args.reset_options) if args.reset_options else env


class HybridRows:
    """Lets UnityVecEnv and GodotVecEnv take actions with a continuous and a discrete part as rows of both."""

    def _make_spaces(self):
        super()._make_spaces()
        space = self.single_action_space
        if isinstance(space, gym.spaces.Dict):
            branches = space["discrete"].nvec.tolist()
            self.single_action_space = HybridSpace(space["continuous"], branches)

    def _check_actions(self, actions):
        if isinstance(self.single_action_space, HybridSpace):
            continuous, discrete = self.single_action_space.split(actions)
            actions = {"continuous": continuous, "discrete": discrete}
        return super()._check_actions(actions)


class UnityEnvs(HybridRows, UnityVecEnv):
    """UnityVecEnv for the scripts, with an explanation for callers of get_attr and set_attr."""

    def get_attr(self, name):
        raise ValueError("Unity's agents have no attributes here: read them in the Unity project")

    def set_attr(self, name, value):
        raise ValueError(
            f"Unity's agents have no attributes here: pass {name} with --env-parameters {name}={value}"
        )


class SharedUnityEnvs(shared.SharedEnvs, UnityEnvs):
    """UnityEnvs of a run that trains one of several behaviors: see onefile_rl/behaviors.py."""


class GodotEnvs(HybridRows, GodotVecEnv):
    """GodotVecEnv for the scripts, with an explanation for callers of get_attr and set_attr."""

    def get_attr(self, name):
        raise ValueError("Godot's agents have no attributes here: read them in the Godot project")

    def set_attr(self, name, value):
        raise ValueError(
            f"Godot's agents have no attributes here: pass {name} with --player-args=--{name}={value}"
        )


def make_unity_envs(args, seed, video=None, **more):
    """Return the vector env of a Unity scene or build, and a description.

    more: arguments of UnityVecEnv for which the scripts have no option
    """
    settings = {key: getattr(args, key) for key in UNITY_ARGS}
    settings |= {"parameters": args.env_parameters, "timeout": args.timeout_wait}
    settings |= {"flatten_entities": True} | more  # a policy takes them apart by its spec
    if video:
        player_args = (*args.player_args, "--render", str(video))
        settings |= {
            "num_players": 1,
            "max_restarts": 0,
            "base_port": None,
            "player_args": player_args,
        }
    Envs = SharedUnityEnvs if shared.settings() and not video else UnityEnvs
    envs = Envs(args.unity_path or args.env_id, seed=seed, **settings)
    return envs, f"{len(envs.players)} Unity player(s), {envs.num_envs} agents"


def make_godot_envs(args, seed, video=None, **more):
    """Return the vector env of a Godot game, and a description.

    more: arguments of GodotVecEnv for which the scripts have no option
    """
    settings = {key: getattr(args, key) for key in GODOT_ARGS}
    settings |= {"policy": args.behavior, "timeout": args.timeout_wait} | more
    if video:
        movie = video.with_suffix(".avi").resolve()
        player_args = (*args.player_args, "--write-movie", str(movie))
        settings |= {
            "num_players": 1,
            "max_restarts": 0,
            "base_port": None,
            "player_args": player_args,
        }
        settings |= {"headless": False, "real_time": False}
    envs = GodotEnvs(args.godot_path or args.env_id, seed=seed, **settings)
    if video:
        convert_movie_on_close(envs, movie, video)
    return envs, f"{len(envs.players)} Godot game(s), {envs.num_envs} agents"


def convert_movie_on_close(envs, movie, video):
    """Make `envs.close` convert Godot's AVI file, of 60 frames a second, into a video with 30."""
    envs.video_steps = VIDEO_STEPS // 4  # a decision has eight frames
    close_extras = envs.close_extras

    def close_and_convert(**kwargs):
        close_extras(**kwargs)
        with video_writer(video, fps=30) as writer:
            for i, frame in enumerate(imageio.get_reader(movie)):
                if i % 2:
                    writer.append_data(frame)
        movie.unlink()

    envs.close_extras = close_and_convert


# Packages whose ids are known, and how these start. A module that is imported registers its ids.
PACKAGES = {
    "ale_py": ("ale-py", ("ALE/",)),
    "minigrid": ("minigrid", ("MiniGrid-", "BabyAI-")),
    "gymnasium_robotics": (
        "gymnasium-robotics",
        ("Fetch", "Hand", "Adroit", "Franka", "PointMaze", "AntMaze"),
    ),
    "highway_env": (
        "highway-env",
        ("highway-", "merge-", "roundabout-", "parking-", "intersection-", "racetrack-"),
    ),
    "PyFlyt.gym_envs": ("pyflyt", ("PyFlyt/",)),
    "mo_gymnasium": ("mo-gymnasium", ("mo-", "deep-sea-treasure", "resource-gathering")),
    "shimmy": ("shimmy", ("GymV21Environment", "GymV26Environment", "dm_control/")),
}

# Packages whose envs are not gymnasium's, and what adapts them
NOT_GYMNASIUM = {
    "crafter": "Crafter has the API of the old gym: adapt it in a module of your own",
    "pettingzoo": "PettingZoo's envs have several agents: adapt one in a module of your own, with an agent per env",
}
ADAPT = "see docs/environments.md"


def find(env_id):
    """Return gymnasium's spec of an env id, which is NAME or MODULE:NAME. An error suggests similar ids."""
    load_triton()  # the env may render, as soon as its module is imported
    module, _, name = env_id.rpartition(":")
    for package, advice in NOT_GYMNASIUM.items():
        if (module or name).lower().startswith(package) and name not in gym.registry:
            raise ValueError(
                f"--env-id {env_id}: {package} registers no gymnasium envs. {advice}, {ADAPT}"
            )
    try:
        importlib.import_module(module or "gymnasium")
    except ImportError as error:
        raise ValueError(f"--env-id {env_id}: {missing_module(module, error)}") from None
    try:
        return gym.spec(name)
    except (gym.error.Error, ValueError) as error:
        reason = missing_id(module, name, error)
        raise ValueError(f"--env-id {env_id}: {reason}") from None


def missing_module(module, error):
    """Return what to do about a module of an env id that can't be imported."""
    package = PACKAGES.get(module, (None,))[0]
    if package and isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]:
        return f"{error}: pip install {package}"
    if Path(f"{module}.py").exists():
        return f"{error}, but {module}.py is in this folder: set PYTHONPATH=. to import it"
    return str(error)


def missing_id(module, name, error):
    """Return what to do about an id that is not registered. The module has been imported."""
    # An id of a package that was not imported
    for known, (package, starts) in PACKAGES.items():
        if module or not name.startswith(starts):
            continue
        if importlib.util.find_spec(known.split(".")[0]) is None:
            return f"install its package and name the module: pip install {package}, then --env-id {known}:{name}"
        try:
            importlib.import_module(known)
        except ImportError:
            continue
        if name in gym.registry:
            return f"did you mean {known}:{name}?"
        break

    near = difflib.get_close_matches(name, [*gym.registry, *SCENES, *GODOT_SCENES], 3)
    if near:
        return f"did you mean {' or '.join(map(with_module, near))}?"
    if module and not any(registered_by(spec, module) for spec in gym.registry.values()):
        return f"the module {module} registers no gymnasium envs: it must call gymnasium.register, {ADAPT}"
    return str(error)


def registered_by(spec, module):
    entry = spec.entry_point
    entry = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return entry.split(":")[0].split(".")[0] == module.split(".")[0]


def with_module(name):
    """Return an id as --env-id takes it: with the module that registers it, if that is a known package."""
    spec = gym.registry.get(name)
    for module in PACKAGES:
        if spec and registered_by(spec, module):
            return f"{module}:{name}"
    return name


def is_in_envpool(env_id):
    return str(find(env_id).entry_point).startswith("gymnasium.envs.mujoco")


def is_image(space):
    return (
        isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
    )


def make_as_it_is(env_id, spec, kwargs):
    """Return the gymnasium env of a spec. An error says what failed, and where."""
    try:
        return gym_make(spec, kwargs)
    except Exception as error:
        raise cannot_make(env_id, kwargs, error) from None


def gym_make(spec, kwargs):
    """Return the env of a spec. `kwargs` may have any name, also one that gym.make has itself."""
    spec = copy.deepcopy(spec)
    options = {name: value for name, value in kwargs.items() if name in MAKE_OPTIONS}
    spec.kwargs |= {name: value for name, value in kwargs.items() if name not in MAKE_OPTIONS}
    return gym.make(spec, **{"disable_env_checker": True, **options})


def cannot_make(env_id, kwargs, error):
    """Return the exception for an env whose constructor has failed."""
    given = f" with {kwargs}" if kwargs else ""
    return ValueError(f"--env-id {env_id}{given} can't be made: {describe_error(error)}")


def describe_error(error):
    """Return the type, the message and the place of an exception in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    parts = [type(error).__name__, message] if message else [type(error).__name__]
    return f"{': '.join(parts)} ({Path(frame.filename).name}, line {frame.lineno})"


class ResetOptions(gym.Wrapper):
    """Passes the same options to every reset."""

    def __init__(self, env, options):
        super().__init__(env)
        self.reset_options = options

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options={**self.reset_options, **(options or {})})


def leaves(space, path=()):
    """Yield the name, the path and the space of each part of a nested observation space."""
    if isinstance(space, gym.spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, gym.spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        yield ".".join(map(str, path)) or "image", path, space
        return
    for key, part in parts:
        yield from leaves(part, (*path, key))


def known_leaves(env):
    """Return the leaves of an env's observations that can be used as numbers. A line names the others."""
    kept = []
    for name, path, space in leaves(env.observation_space):
        try:
            gym.spaces.flatdim(space)
        except NotImplementedError:
            note(
                f"{env.spec.id}: observation {name} ({type(space).__name__}) is left out, it has no numbers"
            )
        except ValueError:
            fix = "write a wrapper that makes it an array"
            raise ValueError(
                f"{env.spec.id}: observation {name} {space} has no fixed size: {fix}"
            ) from None
        else:
            kept.append((name, path, space))
    if not kept:
        raise ValueError(
            f"{env.spec.id} has observations {env.observation_space}: none of them are numbers"
        )
    return kept


def look_up(obs, path):
    """Return the part of a nested observation at a path."""
    for key in path:
        obs = obs[key]
    return obs


noted = set()  # lines that were printed


def note(line):
    """Print a line once in this process."""
    if line not in noted:
        noted.add(line)
        print(line, flush=True)


class FlattenKnown(gym.ObservationWrapper):
    """Turns a nested observation into one vector, without the parts that are not numbers."""

    def __init__(self, env):
        super().__init__(env)
        self.leaves = known_leaves(env)
        size = sum(gym.spaces.flatdim(space) for _, _, space in self.leaves)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def observation(self, obs):
        parts = [
            gym.spaces.flatten(space, look_up(obs, path)).astype(np.float32)
            for _, path, space in self.leaves
        ]
        return np.concatenate(parts)


def check_images(env):
    """Refuse images that ppo_pixel.py takes. Images that are too small for its encoders are flattened."""
    env_id = env.spec.id
    for name, _, space in leaves(env.observation_space):
        if not is_image(space):
            continue
        shape = channels_last_shape(space.shape)
        if min(shape[:2]) >= SMALLEST_IMAGE:
            which = "images" if name == "image" else f"images {name}"
            raise ValueError(f"{env_id} has {which} {space}: ppo_pixel.py takes them")
        size = f"{shape[0]} x {shape[1]} pixels"
        note(f"{env_id}: observation {name}, an image of {size}, is flattened into the vector")


def channels_last_shape(shape):
    """Return the shape of an image as (height, width, channel). If its first dimension is the smallest, that is the
    channel."""
    if len(shape) == 2:
        return (*shape, 1)
    return (*shape[1:], shape[0]) if shape[0] < min(shape[1:]) else tuple(shape)


def rescale_far_actions(env):
    """Rescale actions whose bounds are far from those of a new policy, and print a line about it.

    A new policy of PPO has mean 0 and a standard deviation around 1. Actions between 100 and 200 would always be
    clipped to 100. So a dimension gets the bounds -1 and 1 if its own are finite and
    - contain no number between -1 and 1, or
    - are more than WIDER times wider, or NARROWER times narrower, than -1 and 1.
    Other dimensions are left as they are.
    """
    action_space = env.action_space
    has_choices = isinstance(action_space, HybridSpace)
    space = action_space.continuous if has_choices else action_space
    if not isinstance(space, gym.spaces.Box):
        return env
    low = space.low.astype(np.float64)
    high = space.high.astype(np.float64)
    width = high - low
    outside = (low >= 1) | (high <= -1)
    far = np.isfinite(width) & (width > 0)
    far &= outside | (width > 2 * WIDER) | (width < 2 / NARROWER)
    if not far.any():
        return env

    # -1 to 1 becomes low to high
    scale = np.where(far, width / 2, 1.0)
    offset = np.where(far, low, 0.0) + np.where(far, width, 0.0) / 2
    is_integer = space.dtype.kind in "iu"

    def to_env(action):
        action = np.where(far, np.clip(action * scale + offset, low, high), action)
        return (np.rint(action) if is_integer else action).astype(space.dtype)

    dtype = np.float32 if is_integer else space.dtype
    new_low = np.where(far, -1, low).astype(dtype)
    new_high = np.where(far, 1, high).astype(dtype)
    near = gym.spaces.Box(new_low, new_high, dtype=dtype)
    first = np.flatnonzero(far)[0]
    example = f"action {first}, from {low.flat[first]:g} to {high.flat[first]:g}"
    note(f"{env.spec.id}: {far.sum()} of {far.size} action(s) are rescaled to -1 to 1: {example}")
    if not has_choices:
        return gym.wrappers.TransformAction(env, to_env, near)

    def row_to_env(row):
        return np.append(to_env(row[: far.size]), row[far.size :])

    near_rows = HybridSpace(near, action_space.branches)
    return gym.wrappers.TransformAction(env, row_to_env, near_rows)


def make_env(env_id, /, **kwargs):
    """Return one gymnasium env whose observations and actions are vectors."""
    env = make_as_it_is(env_id, find(env_id), kwargs)
    contract.check_reward_space(env)
    check_images(env)
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box):
        if len(known_leaves(env)) < len(list(leaves(space))):
            env = FlattenKnown(env)
        else:
            env = gym.wrappers.FlattenObservation(env)
    elif len(space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    space = env.action_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) != 1:
        flat = gym.spaces.Box(space.low.ravel(), space.high.ravel(), dtype=space.dtype)
        env = gym.wrappers.TransformAction(env, lambda action: action.reshape(space.shape), flat)
    elif is_hybrid(space):
        env = HybridActions(env)
    return env
