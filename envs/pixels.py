"""Gymnasium envs with images as one vector env, in this process or in workers: rendering scales over processes and not
over threads.

    envs = PixelEnvs("Reacher-v5", num_envs=8, num_workers=2, from_pixels=True)

Observations are dicts, as UnityVecEnv's: uint8 images (height, width, channel) and, where there is anything else,
"vector". They are views of arrays that the next step overwrites. infos are those of envs/vector.py.

A worker is this file run as a program, with several envs. It reads actions from memory that is shared, and writes what
comes of them there; a line on its standard input wakes it, a line on its standard output answers. When this process is
gone, so is the input, and the worker ends.
"""

import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import imageio
import mujoco
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs import NEEDS_GL, EngineError, cheap, choose_gl, engine
from envs.vector import (
    FILM_STEPS,
    LONGEST,
    SyncEnvs,
    check_finite,
    find,
    follow,
    is_image,
    make_godot_envs,
    make_unity_envs,
)

CAMERAS = {
    "Reacher": {"distance": 0.5, "elevation": -90, "azimuth": 90, "lookat": np.zeros(3)}
}  # gymnasium's own shows arm and target in a few pixels
COARSE = {
    "numslices": 12,
    "numstacks": 6,
    "numquads": 2,
}  # of round bodies and floors: fewer triangles than MuJoCo's draw in a third of the time
NOTHING = np.zeros((0, 1))  # where there is no vector
SMALL = 256  # pixels: films of smaller images are enlarged


class WorkerDied(EngineError):
    """Which worker, and its last words."""


def make_envs(args, seed, film=None):
    """As envs.vector has it, of envs that are seen. film: one env or player, and its video is written there."""
    if engine(args) == "Godot":
        return make_godot_envs(args, seed, film, headless=False)
    if engine(args) == "Unity":
        envs, how = make_unity_envs(args, seed, film, no_graphics=False)  # else Unity's cameras see nothing
        envs.film_steps = FILM_STEPS // 3  # GridWorld's steps are slow
        return envs, how
    settings = {
        key: getattr(args, key) for key in ("from_pixels", "image_size", "grayscale", "action_repeat", "env_kwargs")
    }
    if film:
        return Filmed(PixelEnvs(args.env_id, 1, **settings), film), "one gymnasium env, filmed"
    how = f"{args.num_envs} gymnasium env(s), " + (
        f"in {args.num_workers} workers" if args.num_workers else "one after another"
    )
    return PixelEnvs(args.env_id, args.num_envs, args.num_workers, **settings), how


def is_mujocos(env_id):
    return str(find(env_id).entry_point).startswith(("gymnasium.envs.mujoco", "envs.reacher"))


def describe_seen(args, envs):
    """What is seen, in plain numbers. sensors: in Unity's order, names of images and sizes of vectors."""
    seen, action = envs.single_observation_space, envs.single_action_space
    images = {name: space.shape for name, space in getattr(seen, "spaces", {}).items() if name != "vector"}
    if not images:
        kind = "continuous" if isinstance(action, gym.spaces.Box) else "discrete"
        other = f"ppo_{kind}_multiagent.py takes vectors"
        way = "; --from-pixels renders it" if hasattr(envs, "num_workers") and is_mujocos(args.env_id) else ""
        raise ValueError(f"{args.env_id} has no images in its observations {seen}: {other}{way}")
    vector = seen["vector"].shape[0] if "vector" in seen.spaces else 0
    return {
        "images": images,
        "vector": vector,
        "sensors": getattr(envs, "sensors", [*images, *[vector] * (vector > 0)]),
    }


def make_pixel_env(
    env_id, from_pixels=False, image_size=64, grayscale=False, action_repeat=1, env_kwargs=None, painter=None
):
    """One gymnasium env whose observations are a dict of images and a vector. painter: another env of the same id and
    process, whose OpenGL draws this one too."""
    spec, kwargs = find(env_id), dict(env_kwargs or {})
    if from_pixels:
        if not is_mujocos(env_id):
            raise ValueError(
                f"--from-pixels renders gymnasium's MuJoCo envs and the reachers, and {env_id} is none of them"
            )
        choose_gl()
        kwargs |= {"render_mode": "rgb_array", "width": image_size, "height": image_size}
        if spec.name in CAMERAS:
            kwargs.setdefault("default_camera_config", CAMERAS[spec.name])
    try:
        env = gym.make(spec, disable_env_checker=True, **kwargs)
        if from_pixels:
            env = follow(Repeat(env, action_repeat) if action_repeat > 1 else env, kwargs)
            env = FromPixels(env, painter and painter.get_wrapper_attr("viewer"))
            return Named(env, grayscale)
    except (AttributeError, ImportError, OSError, RuntimeError, gym.error.Error) as error:
        raise ValueError(
            f"--from-pixels {NEEDS_GL} ({error})" if from_pixels else f"--env-id {env_id}: {error}"
        ) from None
    except Exception as error:
        given = f" with {env_kwargs}" if env_kwargs else ""
        raise ValueError(f"--env-id {env_id}{given} can't be made: {' '.join(str(error).split())}") from None
    return Named(Repeat(env, action_repeat) if action_repeat > 1 else env, grayscale)


class Repeat(gym.Wrapper):
    """Every action several times; the rewards are added."""

    def __init__(self, env, times):
        super().__init__(env)
        self.times = times

    def step(self, action):
        total = 0.0
        for _ in range(self.times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class FromPixels(gym.ObservationWrapper):
    """What gymnasium renders of a MuJoCo env takes the place of its observation. Envs with one model share what draws
    them: changing between OpenGL contexts would take a tenth of the time."""

    def __init__(self, env, viewer=None):
        super().__init__(env)
        self.base, self.viewer = env.unwrapped, viewer
        cheap(self.base.model)
        if viewer is None:
            env.reset(seed=0)  # gymnasium's camera looks for ever at what is the middle now
            quality, fine = self.base.model.vis.quality, {}
            for name, few in COARSE.items():
                fine[name] = getattr(quality, name)
                setattr(quality, name, min(few, fine[name]))
            env.render()  # here, if anywhere, it shows that there is no OpenGL
            self.viewer = getattr(self.base, "mujoco_renderer", self.base).viewer
            for name, value in fine.items():  # films are larger
                setattr(quality, name, value)
        self.observation_space = gym.spaces.Box(
            0, 255, (self.viewer.viewport.height, self.viewer.viewport.width, 3), np.uint8
        )

    def observation(self, _):
        """As gymnasium's viewer does it, without the depth, which it reads too."""
        view, out = self.viewer, np.empty(self.observation_space.shape, np.uint8)
        view.make_context_current()  # what films this env has another
        mujoco.mjv_updateScene(
            self.base.model, self.base.data, view.vopt, view.pert, view.cam, mujoco.mjtCatBit.mjCAT_ALL, view.scn
        )
        mujoco.mjr_render(view.viewport, view.scn, view.con)
        mujoco.mjr_readPixels(out, None, view.viewport, view.con)
        return out[::-1]


class Named(gym.ObservationWrapper):
    """Any nest of observations as a dict: each image by its name, the rest in one "vector"."""

    def __init__(self, env, grayscale=False):
        super().__init__(env)
        self.grayscale, spaces, size = grayscale, {}, 0
        self.leaves = [(name, path, space, is_image(space)) for name, path, space in leaves(env.observation_space)]
        for name, _, space, image in self.leaves:
            if image:
                height, width, channels = picture(np.empty(space.shape)).shape
                spaces[name] = gym.spaces.Box(0, 255, (height, width, 1 if grayscale else channels), np.uint8)
            else:
                size += gym.spaces.flatdim(space)
        if size:
            spaces["vector"] = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = gym.spaces.Dict(spaces)

    def observation(self, obs):
        out, vector = {}, []
        for name, path, space, image in self.leaves:
            value = obs
            for key in path:
                value = value[key]
            if image:
                out[name] = grey(picture(value)) if self.grayscale else picture(value)
            else:
                vector.append(gym.spaces.flatten(space, value))
        if vector:
            out["vector"] = np.concatenate(vector, dtype=np.float32)
        return out


def leaves(space, path=()):
    """Name, path and space of everything in a nest of observations."""
    inside = (
        space.spaces.items()
        if isinstance(space, gym.spaces.Dict)
        else enumerate(space.spaces)
        if isinstance(space, gym.spaces.Tuple)
        else None
    )
    if inside is None:
        yield ".".join(map(str, path)) or "image", path, space
    else:
        for key, part in inside:
            yield from leaves(part, (*path, key))


def picture(array):
    """Channels last, and at least one."""
    if array.ndim == 2:
        return array[:, :, None]
    return array.transpose(1, 2, 0) if array.shape[0] < min(array.shape[1:]) else array


def grey(image):
    """ITU-R BT.601's weights, in whole numbers."""
    if image.shape[2] == 1:
        return image
    return (image[:, :, :3] @ np.array([77, 150, 29], np.uint32) >> 8).astype(np.uint8)[:, :, None]


class Group(SyncEnvs):
    """Some of the envs, one after another, into rows of arrays that others may see."""

    def __init__(self, envs, arrays):
        super().__init__(envs)
        self.arrays, self.names = arrays, list(envs[0].observation_space.spaces)

    def _gather(self, observations):
        for i, obs in enumerate(observations):
            self._put("obs", i, obs)

    def _put(self, what, i, obs):
        for name in self.names:
            self.arrays[f"{what}.{name}"][i] = obs[name]

    def step(self):
        actions, rewards, terminated, truncated, success = (
            self.arrays[key] for key in ("actions", "rewards", "terminated", "truncated", "success")
        )
        for i, env in enumerate(self.envs):
            obs, rewards[i], term, trunc, info = env.step(actions[i])
            terminated[i], truncated[i] = term, trunc
            if term or trunc:
                self._put("final", i, obs)
                success[i] = info.get("is_success", -1)
                self.episodes[i] = ({"random": env.unwrapped.np_random.bit_generator.state}, [])
                obs, _ = env.reset()
            elif len(self.episodes[i][1]) < LONGEST:
                self.episodes[i][1].append(actions[i].copy())
            self._put("obs", i, obs)


class Worker:
    """A process with some of the envs, seen from here."""

    def __init__(self, first, last, job):
        self.name, self.log = f"worker of envs {first} to {last - 1}", tempfile.TemporaryFile()
        command = [sys.executable, str(Path(__file__).resolve())]
        path = os.pathsep.join(path for path in sys.path if path)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "pass_fds": job["files"]}
        environment = {"LP_NUM_THREADS": "0", **os.environ, "PYTHONPATH": path}
        # A session of its own: Ctrl-C is for this process, which finishes the iteration first.
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.send({"first": first, "last": last, **job})

    def send(self, message):
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self.died() from None

    def receive(self):
        line = self.process.stdout.readline()
        if not line:
            raise self.died()
        return json.loads(line)

    def died(self):
        code = self.process.wait()
        self.log.seek(0)
        words = self.log.read().decode(errors="replace").strip()
        return WorkerDied(f"the {self.name} ended with exit code {code}: {words or 'it said nothing'}")

    def close(self):
        with contextlib.suppress(OSError):  # it is gone, and what it was to be told with it
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


class PixelEnvs:
    def __init__(self, env_id, num_envs, num_workers=0, **settings):
        """settings: make_pixel_env's"""
        self.num_envs, self.num_workers, self.workers = num_envs, min(num_workers, num_envs), []
        self.everybody, self.nobody = np.ones(num_envs, bool), np.zeros(num_envs, bool)
        env = make_pixel_env(env_id, **settings)
        self.single_observation_space, self.single_action_space, self.fps = (
            env.observation_space,
            env.action_space,
            env.metadata.get("render_fps", 30),
        )
        layout = {"actions": (env.action_space.shape, env.action_space.dtype.str), "rewards": ((), "f8")}
        layout |= {"terminated": ((), "?"), "truncated": ((), "?"), "success": ((), "i1")}
        for name, space in env.observation_space.spaces.items():
            layout |= {f"{what}.{name}": (space.shape, space.dtype.str) for what in ("obs", "final")}
        if self.num_workers == 0:
            self.arrays, _ = carve(layout, num_envs, None)
            self.group = Group(
                [env, *(make_pixel_env(env_id, painter=env, **settings) for _ in range(num_envs - 1))], self.arrays
            )
            return
        env.close()
        with shared_file() as (file, name, files):
            file.truncate(carve(layout, num_envs, None)[1])
            self.memory = mmap.mmap(file.fileno(), 0)
            self.arrays, _ = carve(layout, num_envs, self.memory)
            places = np.linspace(0, num_envs, self.num_workers + 1).astype(int).tolist()
            job = {"env_id": env_id, "settings": settings, "num_envs": num_envs, "layout": layout}
            job |= {"memory": name, "files": files}
            try:
                for first, last in zip(places, places[1:], strict=False):
                    self.workers.append(Worker(first, last, job))
                for worker in self.workers:
                    worker.receive()
            except BaseException:
                self.close()
                raise

    def _ask(self, what, each=None):
        """All workers at the same time."""
        try:
            for i, worker in enumerate(self.workers):
                worker.send([what, each[i] if each else None])
            return [worker.receive() for worker in self.workers]
        except BaseException:  # an answer may be half read: there is no way back
            self.close()
            raise

    def _obs(self):
        return {name: self.arrays[f"obs.{name}"] for name in self.single_observation_space.spaces}

    def reset(self, seed):
        if self.workers:
            self._ask("reset", [seed] * len(self.workers))
        else:
            self.group.reset(seed)
        return self._obs(), {"ready": self.everybody, "closed": self.nobody}

    def step(self, actions):
        self.arrays["actions"][:] = actions
        if self.num_workers:
            self._ask("step")
        else:
            self.group.step()
        rewards, terminated, truncated = (self.arrays[key].copy() for key in ("rewards", "terminated", "truncated"))
        check_finite(rewards, self.arrays.get("obs.vector", NOTHING))
        infos = {"ready": self.everybody, "closed": self.everybody}
        for i in np.flatnonzero(terminated | truncated).tolist():
            infos.setdefault("final_obs", {})[i] = {
                name: self.arrays[f"final.{name}"][i].copy() for name in self.single_observation_space.spaces
            }
            if self.arrays["success"][i] >= 0:
                infos.setdefault("is_success", {})[i] = bool(self.arrays["success"][i])
        return self._obs(), rewards, terminated, truncated, infos

    def state(self):
        """As SyncEnvs has it. None, too, when a worker has died."""
        if self.num_workers and not self.workers:
            return None
        if not self.workers:
            return self.group.state()
        states = self._ask("state")
        return None if None in states else [episode for state in states for episode in state]

    def restore(self, state):
        if self.workers:
            places = np.linspace(0, self.num_envs, self.num_workers + 1).astype(int).tolist()
            state = in_lists(state)
            self._ask("restore", [state[first:last] for first, last in zip(places, places[1:], strict=False)])
        else:
            self.group.restore(state)
        return self._obs(), {"ready": self.everybody, "closed": self.nobody}

    def close(self):
        while self.workers:
            self.workers.pop().close()
        if self.num_workers == 0:
            self.group.close()


@contextlib.contextmanager
def shared_file():
    """A file in memory, how another process opens it, and what that must inherit. On Linux it has no name in any folder
    that a killed process could leave behind."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("envs"), "r+b") as file:
            yield file, f"/proc/self/fd/{file.fileno()}", [file.fileno()]
    else:
        with tempfile.NamedTemporaryFile() as file:  # gone by its name as soon as all have it
            yield file, file.name, []


def in_lists(state):
    """SyncEnvs' state, for JSON."""
    return state and [(begin, np.asarray(actions).tolist()) for begin, actions in state]


def carve(layout, n, memory):
    """Arrays of n rows each in one piece of memory, and the bytes that they take."""
    arrays, size = {}, 0
    for name, (shape, dtype) in layout.items():
        shape, dtype = (n, *shape), np.dtype(dtype)
        count = int(np.prod(shape))
        arrays[name] = (
            np.zeros(shape, dtype) if memory is None else np.frombuffer(memory, dtype, count, size).reshape(shape)
        )
        size += -(-count * dtype.itemsize // 64) * 64
    return arrays, size


class Filmed:
    """PixelEnvs of one env, with a video of its steps: what its render shows, in a size for people."""

    def __init__(self, envs, path):
        self.envs, self.video = envs, imageio.get_writer(path, fps=envs.fps, macro_block_size=1)
        self.num_envs, self.single_action_space, self.single_observation_space = (
            1,
            envs.single_action_space,
            envs.single_observation_space,
        )
        self.env = envs.group.envs[0]
        self.large = None
        if hasattr(self.env.unwrapped, "mujoco_renderer"):
            from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

            base = self.env.unwrapped
            self.large = MujocoRenderer(
                base.model,
                base.data,
                base.mujoco_renderer.default_cam_config,
                480,
                480,
                camera_id=base.mujoco_renderer.camera_id,
            )

    def _frame(self, image):
        if self.large:
            if self.large.viewer:
                self.large.viewer.make_context_current()
            image = self.large.render("rgb_array")
        times = -(-SMALL // image.shape[0])
        self.video.append_data(np.ascontiguousarray(image.repeat(times, 0).repeat(times, 1)))

    def reset(self, seed):
        out = self.envs.reset(seed)
        self._frame(self.env.render() if self.env.render_mode else next(iter(out[0].values()))[0])
        return out

    def step(self, actions):
        out = self.envs.step(actions)
        done = out[2][0] or out[3][0]
        shown = out[4]["final_obs"][0] if done else {name: value[0] for name, value in out[0].items()}
        if not (done and self.large):  # the next episode's first state is there already
            self._frame(next(image for name, image in shown.items() if name != "vector"))
        return out

    def close(self):
        self.video.close()
        if self.large:
            self.large.close()
        self.envs.close()


def work():
    """Be a worker until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an env prints goes to the log
    job = json.loads(sys.stdin.buffer.readline())
    with open(job["memory"], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    first, last = job["first"], job["last"]
    arrays = {name: array[first:last] for name, array in carve(job["layout"], job["num_envs"], memory)[0].items()}
    env = make_pixel_env(job["env_id"], **job["settings"])
    group = Group(
        [env, *(make_pixel_env(job["env_id"], painter=env, **job["settings"]) for _ in range(last - first - 1))], arrays
    )

    def answer(value):
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()

    answer(None)
    for line in sys.stdin.buffer:
        what, value = json.loads(line)
        if what == "step":
            answer(group.step())
        elif what == "reset":
            answer(group.reset(value + first)[0])
        elif what == "state":
            answer(in_lists(group.state()))
        else:
            answer(group.restore(value)[0])


if __name__ == "__main__":
    work()
