"""Gymnasium envs with images as one vector env, in this process or in worker processes.

    envs = PixelEnvs("Reacher-v5", num_envs=8, num_workers=2, from_pixels=True)

Observations are dicts, like those of UnityVecEnv: uint8 images (height, width, channel) and, if the env observes
anything else, "vector". They are views of arrays that the next step overwrites. `infos` are those of envs/make.py.
"""

import mmap

import gymnasium as gym
import numpy as np

from envs import attributes
from envs.hybrid import HybridSpace
from envs.make import VIDEO_STEPS, make_godot_envs, make_unity_envs, note_parameters
from envs.parameters import ARGUMENT, find_places
from envs.pixel_workers import (
    REPLAY_TIMEOUTS,
    START_TIMEOUTS,
    Worker,
    carve,
    make_group,
    shared_file,
    to_json,
)
from envs.pixel_wrappers import is_preprocessed_atari, is_rendered_by_mujoco, make_pixel_env
from envs.rendering import video_writer
from envs.sync import check_numbers, report_restarted, restarted_info, values_per_env
from onefile_rl.engines.scenes import engine

PIXEL_ARGS = ("from_pixels", "grayscale", "action_repeat", "env_kwargs", "reset_options")
NO_VECTOR = np.zeros((0, 1))
MIN_VIDEO_SIZE = 256  # pixels: smaller images are enlarged in videos
VIDEO_SIZE = 480  # pixels, of rendered MuJoCo envs


def make_envs(args, seed, video=None):
    """Return a vector env with image observations and a description of it.

    video: the path of a video to record; there is only one env or player then
    """
    if engine(args) == "Godot":
        return make_godot_envs(args, seed, video, headless=False)
    if engine(args) == "Unity":
        envs, how = make_unity_envs(
            args, seed, video, no_graphics=False
        )  # without graphics, cameras render nothing
        envs.video_steps = VIDEO_STEPS // 3  # videos of GridWorld show few steps a second
        return envs, how
    settings = {key: getattr(args, key) for key in PIXEL_ARGS}
    # Only a size that the user chose resizes images; copies of the script may have a default
    if args.from_pixels or args.image_size != type(args).image_size:
        settings["image_size"] = args.image_size
    settings["parameters"] = args.env_parameters
    if video:
        envs = PixelEnvs(args.env_id, 1, **settings)
        return RecordedPixelEnvs(envs, video), "one gymnasium env, recorded"
    where = f"in {args.num_workers} workers" if args.num_workers else "one after another"
    envs = PixelEnvs(
        args.env_id, args.num_envs, args.num_workers, timeout=args.timeout_wait, **settings
    )
    return envs, f"{args.num_envs} gymnasium env(s), {where}"


def describe_seen(args, envs):
    """Return the layout of the observations as a dict of plain numbers.

    "images": the shape of each image, by name
    "vector": the size of the vector
    "sensors": in Unity's order, the names of images and the sizes of vectors
    """
    seen = envs.single_observation_space
    images = {
        name: space.shape for name, space in getattr(seen, "spaces", {}).items() if name != "vector"
    }
    if not images:
        kind = "continuous" if isinstance(envs.single_action_space, gym.spaces.Box) else "discrete"
        if isinstance(envs.single_action_space, HybridSpace):
            kind = "hybrid"
        renderable = hasattr(envs, "num_workers") and is_rendered_by_mujoco(args.env_id)
        advice = f"ppo_{kind}_multiagent.py takes vectors" + (
            "; --from-pixels renders it" if renderable else ""
        )
        raise ValueError(f"{args.env_id} has no images in its observations {seen}: {advice}")
    vector = seen["vector"].shape[0] if "vector" in seen.spaces else 0
    default = [*images, vector] if vector else [*images]
    return {"images": images, "vector": vector, "sensors": getattr(envs, "sensors", default)}


def frame_stack(args):
    """Return the number of last images in an observation: --frame-stack, or what is usual for the env."""
    if args.frame_stack:
        return args.frame_stack
    if args.from_pixels:
        return 3
    atari = engine(args) is None and is_preprocessed_atari(args.env_id, args.env_kwargs)
    return 4 if atari else 1


def check_parameters(env, parameters, settings):
    """Refuse parameters that the env does not have. Rendered envs share a viewer and can't be made again."""
    places = find_places(env, parameters)
    for name, (place, _) in places.items():
        if place == ARGUMENT and settings.get("from_pixels"):
            what = f"environment parameter {name} is an argument of {env.spec.id}'s constructor"
            raise ValueError(f"{what}: with --from-pixels only attributes can change")
    note_parameters(env, places)


def refuse_nested_actions(env_id, env):
    has_images = any(name != "vector" for name in env.observation_space.spaces)
    advice = "ppo_hybrid_multiagent.py takes vectors"
    if has_images:
        advice = "this script supports continuous or discrete actions, not both at once"
    raise ValueError(f"{env_id} has actions {env.action_space}: {advice}")


class PixelEnvs:
    """Gymnasium envs with images, in this process (`num_workers` 0) or in worker processes."""

    def __init__(self, env_id, num_envs, num_workers=0, timeout=60, parameters=None, **settings):
        """timeout: seconds to wait for an answer of a worker. parameters: numbers and samplers, by name. settings:
        arguments of make_pixel_env"""
        self.timeout = timeout
        self.num_envs = num_envs
        self.num_workers = min(num_workers, num_envs)
        self.workers = []
        self.all_slots = np.ones(num_envs, bool)
        self.no_slots = np.zeros(num_envs, bool)

        # One env tells the spaces, and so the layout of the arrays
        env = make_pixel_env(env_id, **settings)
        parameters = {name: str(value) for name, value in (parameters or {}).items()}
        check_parameters(env, parameters, settings)
        if env.action_space.shape is None:  # a Dict or Tuple
            refuse_nested_actions(env_id, env)
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.fps = env.metadata.get("render_fps", 30)
        layout = {
            "actions": (env.action_space.shape, env.action_space.dtype.str),
            "rewards": ((), "f8"),
            "terminated": ((), "?"),
            "truncated": ((), "?"),
            "success": ((), "i1"),  # -1 if the env does not report it
        }
        for name, space in env.observation_space.spaces.items():
            layout[f"obs.{name}"] = (space.shape, space.dtype.str)
            layout[f"final.{name}"] = (space.shape, space.dtype.str)

        if self.num_workers == 0:
            self.arrays, _ = carve(layout, num_envs, None)
            self.group = make_group(env, num_envs, env_id, settings, parameters, self.arrays)
        else:
            env.close()
            self._start_workers(env_id, settings, parameters, layout)

    def _start_workers(self, env_id, settings, parameters, layout):
        with shared_file() as (file, path, files):
            _, size = carve(layout, self.num_envs, None)
            file.truncate(size)
            self.memory = mmap.mmap(file.fileno(), 0)
            self.arrays, _ = carve(layout, self.num_envs, self.memory)
            job = {
                "env_id": env_id,
                "settings": settings,
                "parameters": parameters,
                "num_envs": self.num_envs,
                "layout": layout,
            }
            job |= {"memory": path, "files": files}
            bounds = np.linspace(0, self.num_envs, self.num_workers + 1).astype(int).tolist()
            try:
                for first, last in zip(bounds[:-1], bounds[1:], strict=True):
                    self.workers.append(Worker(first, last, job, self.timeout))
                for worker in self.workers:
                    worker.receive(START_TIMEOUTS)
            except BaseException:
                self.close()
                raise

    def _request(self, request, values=None):
        """Send a request to all workers at the same time and return their answers. values: one per worker"""
        try:
            for i, worker in enumerate(self.workers):
                worker.send([request, values[i] if values else None])
            timeouts = REPLAY_TIMEOUTS if request == "restore" else 1
            return [worker.receive(timeouts) for worker in self.workers]
        except (
            BaseException
        ):  # an answer may be read in part only: the workers cannot be used any more
            self.close()
            raise

    def _split(self, rows):
        """Return the part of a list, with one entry per env, that belongs to each worker."""
        return [rows[worker.first : worker.last] for worker in self.workers]

    def _obs(self):
        return {name: self.arrays[f"obs.{name}"] for name in self.single_observation_space.spaces}

    def reset(self, seed):
        if self.workers:
            self._request("reset", [seed] * len(self.workers))
        else:
            self.group.reset(seed)
        check_numbers(self.arrays.get("obs.vector", NO_VECTOR))
        return self._obs(), {"ready": self.all_slots, "closed": self.no_slots}

    def step(self, actions):
        self.arrays["actions"][:] = actions
        if self.num_workers:
            self._request("step")
        else:
            self.group.step()
        rewards = self.arrays["rewards"].copy()
        terminated = self.arrays["terminated"].copy()
        truncated = self.arrays["truncated"].copy()
        check_numbers(self.arrays.get("obs.vector", NO_VECTOR), rewards)

        infos = {"ready": self.all_slots, "closed": self.all_slots}
        for i in np.flatnonzero(terminated | truncated).tolist():
            final_obs = {
                name: self.arrays[f"final.{name}"][i].copy()
                for name in self.single_observation_space.spaces
            }
            check_numbers(final_obs.get("vector", NO_VECTOR)[None], env=i)
            infos.setdefault("final_obs", {})[i] = final_obs
            if self.arrays["success"][i] >= 0:
                infos.setdefault("is_success", {})[i] = bool(self.arrays["success"][i])
        return self._obs(), rewards, terminated, truncated, infos

    def set_parameters(self, parameters):
        """Set environment parameters from the next episode of each env on, as SyncEnvs does."""
        if self.workers:
            texts = {name: str(value) for name, value in parameters.items()}
            self._request("set_parameters", [texts] * len(self.workers))
        else:
            self.group.set_parameters(parameters)

    def get_attr(self, name):
        """Return the attribute `name` of each env. Workers only send numbers, strings, None and small arrays."""
        if not self.workers:
            return self.group.get_attr(name)
        values = []
        for answer in self._request("get_attr", [name] * len(self.workers)):
            if "error" in answer:
                raise AttributeError(answer["error"])
            values += map(attributes.decode, answer["values"])
        return tuple(values)

    def set_attr(self, name, value):
        """Set the attribute `name` of each env.

        value: one value for all envs, or a list or tuple with one value per env; workers only take numbers, strings,
            None and small arrays
        """
        if not self.workers:
            self.group.set_attr(name, value)
            return
        values = values_per_env(value, self.num_envs)
        for env_value in values:
            if not attributes.is_plain(env_value):
                kind = type(env_value).__name__
                raise ValueError(
                    f"set_attr: {name} is a {kind}; workers only take {attributes.PLAIN_DESCRIPTION}"
                )
        encoded = [attributes.encode(env_value) for env_value in values]
        self._request("set_attr", [[name, part] for part in self._split(encoded)])

    def state(self):
        """Return what `restore` needs, as SyncEnvs does. None also if a worker has died."""
        if self.num_workers and not self.workers:
            return None
        if self.workers:
            parts = self._request("state")
            episodes = None if None in parts else [episode for part in parts for episode in part]
        else:
            episodes = self.group.episode_states()
        if episodes is None:
            return None
        return {
            "episodes": episodes,
            "obs": {name: array.copy() for name, array in self._obs().items()},
        }

    def restore(self, state):
        """Continue the episodes of `state` by replaying them, as SyncEnvs does."""
        for name, array in self._obs().items():
            array[:] = np.asarray(
                state["obs"][name]
            )  # the envs compare it with their replayed observation
        if self.workers:
            parts = self._request("restore", self._split(to_json(state["episodes"])))
            restarted = [
                worker.first + i
                for worker, part in zip(self.workers, parts, strict=True)
                for i in part
            ]
        else:
            restarted = self.group.restore(state["episodes"])
        report_restarted(restarted)
        infos = {"ready": self.all_slots, "closed": self.no_slots} | restarted_info(
            restarted, self.num_envs
        )
        return self._obs(), infos

    def close(self):
        while self.workers:
            self.workers.pop().close()
        if self.num_workers == 0:
            self.group.close()


class RecordedPixelEnvs:
    """PixelEnvs with one env and a video of it: the rendered env in a larger size, or else its enlarged images."""

    def __init__(self, envs, path):
        self.envs = envs
        self.num_envs = 1
        self.single_action_space = envs.single_action_space
        self.single_observation_space = envs.single_observation_space
        self.video = video_writer(path, envs.fps)
        self.renderer = self._make_renderer()

    @property
    def env(self):
        """The env, which may have been made again for another parameter."""
        return self.envs.group.envs[0]

    def _make_renderer(self):
        """Return a renderer of gymnasium's MuJoCo envs in the size of the video, None for other envs."""
        base = self.env.unwrapped
        if not hasattr(base, "mujoco_renderer"):
            return None
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

        camera = base.mujoco_renderer.default_cam_config
        camera_id = base.mujoco_renderer.camera_id
        return MujocoRenderer(
            base.model, base.data, camera, VIDEO_SIZE, VIDEO_SIZE, camera_id=camera_id
        )

    def _append_frame(self, image):
        if self.renderer:
            if self.renderer.viewer:
                self.renderer.viewer.make_context_current()
            image = self.renderer.render("rgb_array")
        times = -(-MIN_VIDEO_SIZE // image.shape[0])
        self.video.append_data(np.ascontiguousarray(image.repeat(times, 0).repeat(times, 1)))

    def reset(self, seed):
        obs, infos = self.envs.reset(seed)
        self._append_frame(
            self.env.render() if self.env.render_mode else next(iter(obs.values()))[0]
        )
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        done = terminated[0] or truncated[0]
        shown = infos["final_obs"][0] if done else {name: value[0] for name, value in obs.items()}
        if not (
            done and self.renderer
        ):  # at an end, the env already shows the next episode's first state
            self._append_frame(next(image for name, image in shown.items() if name != "vector"))
        return obs, rewards, terminated, truncated, infos

    def close(self):
        try:
            self.video.close()
        finally:
            if self.renderer:
                self.renderer.close()
            self.envs.close()
