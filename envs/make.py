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

Observations and actions are vectors: nested spaces are flattened.

`envs.set_attr(name, value)` sets an attribute of all gymnasium envs, for example for a curriculum, and
`envs.get_attr(name)` reads it. A resumed run keeps the values: see envs/sync.py.
"""

import difflib
import importlib

import gymnasium as gym
import imageio
import numpy as np

from envs.envpool_envs import EnvPoolEnvs
from envs.rendering import load_triton, use_tracking_camera
from envs.sync import RecordedEnvs, SyncEnvs
from godot_vec_env import GodotVecEnv
from onefile_rl.engines.scenes import GODOT_SCENES, SCENES, engine
from unity_vec_env import UnityVecEnv

VIDEO_STEPS = 450  # decisions in a video of a scene: half a minute of Crawler

# Arguments of the scripts that UnityVecEnv and GodotVecEnv take under the same name
PLAYER_ARGS = ("num_players", "base_port", "player_args", "max_restarts")
UNITY_ARGS = (*PLAYER_ARGS, "behavior", "max_agents", "time_scale")
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
        env = make_env(args.env_id, render_mode="rgb_array", **args.env_kwargs)
        return RecordedEnvs(
            use_tracking_camera(env, args.env_kwargs), video
        ), "one gymnasium env, recorded"
    if (
        args.num_envs > 1 and not args.env_kwargs and is_in_envpool(args.env_id)
    ):  # EnvPool has other arguments
        return EnvPoolEnvs(args.env_id, args.num_envs, seed), f"EnvPool, {args.num_envs} envs"
    envs = [make_env(args.env_id, **args.env_kwargs) for _ in range(args.num_envs)]
    return SyncEnvs(envs), f"{args.num_envs} gymnasium env(s), one after another"


class UnityEnvs(UnityVecEnv):
    """UnityVecEnv with an explanation for callers of get_attr and set_attr."""

    def get_attr(self, name):
        raise ValueError("Unity's agents have no attributes here: read them in the Unity project")

    def set_attr(self, name, value):
        raise ValueError(
            f"Unity's agents have no attributes here: pass {name} with --env-parameters {name}={value}"
        )


class GodotEnvs(GodotVecEnv):
    """GodotVecEnv with an explanation for callers of get_attr and set_attr."""

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
    settings |= {"parameters": args.env_parameters} | more
    if video:
        player_args = (*args.player_args, "--render", str(video))
        settings |= {
            "num_players": 1,
            "max_restarts": 0,
            "base_port": None,
            "player_args": player_args,
        }
    envs = UnityEnvs(args.unity_path or args.env_id, seed=seed, **settings)
    return envs, f"{len(envs.players)} Unity player(s), {envs.num_envs} agents"


def make_godot_envs(args, seed, video=None, **more):
    """Return the vector env of a Godot game, and a description.

    more: arguments of GodotVecEnv for which the scripts have no option
    """
    settings = {key: getattr(args, key) for key in GODOT_ARGS}
    settings |= {"policy": args.behavior} | more
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
        with imageio.get_writer(video, fps=30, macro_block_size=1) as writer:
            for i, frame in enumerate(imageio.get_reader(movie)):
                if i % 2:
                    writer.append_data(frame)
        movie.unlink()

    envs.close_extras = close_and_convert


def find(env_id):
    """Return gymnasium's spec of an env id, which is NAME or MODULE:NAME. An error suggests similar ids."""
    load_triton()  # the env may render, as soon as its module is imported
    module, _, name = env_id.rpartition(":")
    try:
        importlib.import_module(module or "gymnasium")
        return gym.spec(name)
    except ImportError as error:
        raise ValueError(f"--env-id {env_id}: {error}") from None
    except (gym.error.Error, ValueError) as error:
        near = difflib.get_close_matches(name, [*gym.registry, *SCENES, *GODOT_SCENES], 3)
        reason = f"did you mean {' or '.join(near)}?" if near else str(error)
        raise ValueError(f"--env-id {env_id}: {reason}") from None


def is_in_envpool(env_id):
    return str(find(env_id).entry_point).startswith("gymnasium.envs.mujoco")


def is_image(space):
    return (
        isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
    )


def make_env(env_id, **kwargs):
    """Return one gymnasium env whose observations and actions are vectors."""
    spec = find(env_id)
    try:
        env = gym.make(spec, disable_env_checker=True, **kwargs)
    except Exception as error:
        given = f" with {kwargs}" if kwargs else ""
        raise ValueError(
            f"--env-id {env_id}{given} can't be made: {' '.join(str(error).split())}"
        ) from None
    if is_image(env.observation_space):
        raise ValueError(f"{env_id} has images {env.observation_space}: ppo_pixel.py takes them")
    if (
        not isinstance(env.observation_space, gym.spaces.Box)
        or len(env.observation_space.shape) != 1
    ):
        env = gym.wrappers.FlattenObservation(env)
    space = env.action_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) != 1:
        flat = gym.spaces.Box(space.low.ravel(), space.high.ravel(), dtype=space.dtype)
        env = gym.wrappers.TransformAction(env, lambda action: action.reshape(space.shape), flat)
    return env
