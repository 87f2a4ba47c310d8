"""Any env of the scripts' --env-id as a vector env: a bundled scene, a Unity build, a Godot game, or a gymnasium id.

    envs, how = make_envs(args, seed)       args: the scripts'; how: in words, how they are stepped

They all have num_envs, single_observation_space, single_action_space, reset, step and close, start again by themselves,
and say in infos

    "ready", "closed"               which slots ask for an action now; whose last action has its reward now
    "final_obs", "is_success"       by slot, when an episode ends; the latter where the env tells
    "action_mask"                   where actions are discrete: True where a choice is allowed; all branches in a row
    "restarted", "stats"            a game's: whose open decisions will never be closed; what it counts

Observations and actions are vectors: what an env nests is flattened.
"""

import difflib
import importlib
import math
import os

import gymnasium as gym
import imageio
import numpy as np

from envs import GODOT_SCENES, NEEDS_GL, SCENES, EngineError, cheap, choose_gl, engine
from godot_vec_env import GodotVecEnv
from unity_vec_env import UnityVecEnv

FILM_STEPS = 450  # decisions: half a minute of Crawler
LONGEST = 100_000  # steps of an episode that are kept to be played again
BOTH = ("num_players", "base_port", "player_args", "max_restarts")
UNITY, GODOT = (*BOTH, "behavior", "max_agents", "time_scale"), (*BOTH, "real_time")


def make_envs(args, seed, film=None):
    """film: one env or player, and its video is written there."""
    if game := engine(args):
        return {"Unity": make_unity_envs, "Godot": make_godot_envs}[game](args, seed, film)
    if film:
        env = follow(make_env(args.env_id, render_mode="rgb_array", **args.env_kwargs), args.env_kwargs)
        return FilmedEnvs(env, film), "one gymnasium env, filmed"
    if args.num_envs > 1 and not args.env_kwargs and is_envpools(args.env_id):  # its options are not gymnasium's
        return EnvPoolEnvs(args.env_id, args.num_envs, seed), f"EnvPool, {args.num_envs} envs"
    how = f"{args.num_envs} gymnasium env(s), one after another"
    return SyncEnvs([make_env(args.env_id, **args.env_kwargs) for _ in range(args.num_envs)]), how


def make_unity_envs(args, seed, film=None, **more):
    """more: UnityVecEnv's arguments that the scripts have no option for."""
    settings = {key: getattr(args, key) for key in UNITY} | {"parameters": args.env_parameters} | more
    if film:
        player_args = (*args.player_args, "--render", str(film))
        settings |= {"num_players": 1, "max_restarts": 0, "base_port": None, "player_args": player_args}
    envs = UnityVecEnv(args.unity_path or args.env_id, seed=seed, **settings)
    return envs, f"{len(envs.players)} Unity player(s), {envs.num_envs} agents"


def make_godot_envs(args, seed, film=None, **more):
    """more: GodotVecEnv's arguments that the scripts have no option for."""
    settings = {key: getattr(args, key) for key in GODOT} | {"policy": args.behavior} | more
    if film:
        movie = film.with_suffix(".avi").resolve()
        player_args = (*args.player_args, "--write-movie", str(movie))
        settings |= {"num_players": 1, "max_restarts": 0, "base_port": None, "player_args": player_args}
        settings |= {"headless": False, "real_time": False}
    envs = GodotVecEnv(args.godot_path or args.env_id, seed=seed, **settings)
    if film:
        envs.film_steps, close = FILM_STEPS // 4, envs.close_extras  # each has eight frames

        def close_film(**kwargs):
            close(**kwargs)
            with imageio.get_writer(film, fps=30, macro_block_size=1) as video:
                for i, frame in enumerate(imageio.get_reader(movie)):
                    if i % 2:
                        video.append_data(frame)
            movie.unlink()

        envs.close_extras = close_film
    return envs, f"{len(envs.players)} Godot game(s), {envs.num_envs} agents"


def find(env_id):
    """gymnasium's entry for an id or a module:id; near ones are suggested."""
    module, _, name = env_id.rpartition(":")
    try:
        importlib.import_module(module or "gymnasium")
        return gym.spec(name)
    except ImportError as error:
        raise ValueError(f"--env-id {env_id}: {error}") from None
    except (gym.error.Error, ValueError) as error:
        near = difflib.get_close_matches(name, [*gym.registry, *SCENES, *GODOT_SCENES], 3)
        raise ValueError(
            f"--env-id {env_id}: " + (f"did you mean {' or '.join(near)}?" if near else str(error))
        ) from None


def is_envpools(env_id):
    return str(find(env_id).entry_point).startswith("gymnasium.envs.mujoco")


def is_image(space):
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def make_env(env_id, **kwargs):
    """One gymnasium env."""
    spec = find(env_id)
    try:
        env = gym.make(spec, disable_env_checker=True, **kwargs)
    except Exception as error:
        given = f" with {kwargs}" if kwargs else ""
        raise ValueError(f"--env-id {env_id}{given} can't be made: {' '.join(str(error).split())}") from None
    if is_image(env.observation_space):
        raise ValueError(f"{env_id} has images {env.observation_space}: ppo_pixel.py takes them")
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    space = env.action_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) != 1:
        flat = gym.spaces.Box(space.low.ravel(), space.high.ravel(), dtype=space.dtype)
        env = gym.wrappers.TransformAction(env, lambda action: action.reshape(space.shape), flat)
    return env


def follow(env, given):
    """gymnasium's own camera stays where the walkers began. Their models have one that goes with them: take it, unless
    the env has a camera or its arguments give one, and let the floor, which ends for the eye alone, go on."""
    base, own = env.unwrapped, {"camera_id", "camera_name", "default_camera_config"}
    if getattr(getattr(base, "mujoco_renderer", None), "camera_id", None) == -1 and not own & set(given):
        from mujoco import mj_name2id, mjtGeom, mjtObj

        base.mujoco_renderer.camera_id = camera = mj_name2id(base.model, mjtObj.mjOBJ_CAMERA, "track")
        if camera != -1:  # it has one
            planes = base.model.geom_type == mjtGeom.mjGEOM_PLANE
            base.model.geom_size[planes, :2] *= 100
            drawn = base.model.geom_matid[planes]
            base.model.mat_texrepeat[drawn[drawn >= 0]] *= 100
    return env


def count_choices(space):
    """Of all branches; 0 where actions are continuous."""
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum()) if isinstance(space, gym.spaces.MultiDiscrete) else 0


def check_finite(rewards, obs):
    """What is not a number would poison the statistics, and then the weights."""
    if np.isfinite(obs).all() and np.isfinite(rewards).all():
        return
    for what, array in (("reward", rewards), ("observation", obs)):
        for i, row in enumerate(array.reshape(len(array), -1)):
            if not np.isfinite(row).all():
                k = np.flatnonzero(~np.isfinite(row))[0]
                which = f" {k}" if what == "observation" else ""
                raise EngineError(f"env {i}: {what}{which} is {row[k]}: clip it in the env, or end the episode before")


class SyncEnvs:
    """gymnasium envs, one after another. Around a small env gymnasium's own SyncVectorEnv takes as long as the env
    itself."""

    def __init__(self, envs):
        self.envs, self.num_envs = envs, len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.everybody, self.nobody = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)
        self.masks, choices = {}, count_choices(self.single_action_space)
        if choices:
            self.masks["action_mask"] = np.ones((self.num_envs, choices), bool)
        self.masked = choices and hasattr(envs[0].unwrapped, "action_masks")  # as sb3-contrib asks for them
        self.zeros = np.zeros(self.num_envs * gym.spaces.flatdim(self.single_observation_space), np.float32)

    def reset(self, seed):
        self.episodes = [({"seed": seed + i}, []) for i in range(self.num_envs)]  # how it began, and the actions since
        obs = self._gather([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])
        return obs, {"ready": self.everybody, "closed": self.nobody} | self.mask()

    def mask(self):
        if self.masked:
            rows = [np.hstack(env.unwrapped.action_masks()) for env in self.envs]  # of all branches
            self.masks = {"action_mask": np.array(rows, bool)}
        return self.masks

    def state(self):
        """What brings the envs back to where they are: how their episodes began, and all actions since. None if one is
        too long."""
        if any(len(actions) >= LONGEST for _, actions in self.episodes):
            return None
        return [(begin, list(actions)) for begin, actions in self.episodes]

    def restore(self, state):
        """Play the episodes again up to where they were. An env whose chance is all in its np_random comes back
        exactly."""
        self.episodes, last = [], []
        for env, (begin, actions) in zip(self.envs, state, strict=True):
            actions = list(np.asarray(actions, env.action_space.dtype))
            env.reset(seed=begin.get("seed", 0))
            if "random" in begin:
                env.unwrapped.np_random.bit_generator.state = begin["random"]
            obs, _ = env.reset(seed=begin.get("seed"))
            for action in actions:
                obs, *_ = env.step(action)
            self.episodes.append((begin, actions))
            last.append(obs)
        return self._gather(last), {"ready": self.everybody, "closed": self.nobody} | self.mask()

    def _gather(self, observations):
        return np.stack(observations).astype(np.float32)

    def step(self, actions):
        n, infos = self.num_envs, {"ready": self.everybody, "closed": self.everybody}
        obs, rewards = np.empty((n, *self.single_observation_space.shape), np.float32), np.empty(n)
        terminated, truncated = np.empty(n, bool), np.empty(n, bool)
        for i, env in enumerate(self.envs):
            observation, rewards[i], term, trunc, info = env.step(actions[i])
            if term or trunc:
                infos.setdefault("final_obs", {})[i] = np.asarray(observation, np.float32)
                if "is_success" in info:
                    infos.setdefault("is_success", {})[i] = info["is_success"]
                self.episodes[i] = ({"random": env.unwrapped.np_random.bit_generator.state}, [])
                observation, _ = env.reset()
            elif len(self.episodes[i][1]) < LONGEST:
                self.episodes[i][1].append(actions[i].copy())
            obs[i], terminated[i], truncated[i] = observation, term, trunc
        if np.vdot(obs, self.zeros) != 0 or not all(map(math.isfinite, rewards.tolist())):  # the fastest way to ask
            check_finite(rewards, obs)
        if "final_obs" in infos:
            check_finite(rewards, np.stack([infos["final_obs"].get(i, row) for i, row in enumerate(obs)]))
        return obs, rewards, terminated, truncated, infos | self.mask() if self.masks else infos

    def close(self):
        for env in self.envs:
            env.close()


class FilmedEnvs(SyncEnvs):
    """One env, and a video of it."""

    def __init__(self, env, path):
        choose_gl()
        super().__init__([env])
        if hasattr(env.unwrapped, "model"):
            cheap(env.unwrapped.model)
        self.video = imageio.get_writer(path, fps=env.metadata.get("render_fps", 30), macro_block_size=1)

    def _frame(self):
        try:
            self.video.append_data(self.envs[0].render())
        except Exception as error:
            raise ValueError(f"filming {NEEDS_GL} ({error})") from None

    def reset(self, seed):
        out = super().reset(seed)
        self._frame()
        return out

    def step(self, actions):
        out = super().step(actions)
        if "final_obs" not in out[-1]:  # then the next episode's first state is there already
            self._frame()
        return out

    def close(self):
        self.video.close()
        super().close()


class EnvPoolEnvs:
    """EnvPool's C++ envs. After an end they take one step to reset: that row is not ready, its next one closes nothing,
    and its observation is the final one."""

    def __init__(self, env_id, num_envs, seed):
        import envpool

        self.pool = envpool.make_gymnasium(
            env_id, num_envs=num_envs, num_threads=min(num_envs, os.cpu_count()), seed=seed
        )
        self.num_envs, self.single_observation_space, self.single_action_space = (
            num_envs,
            self.pool.observation_space,
            self.pool.action_space,
        )

    def reset(self, seed):
        self.ready = np.ones(self.num_envs, bool)
        return self.pool.reset()[0].astype(np.float32), {"ready": self.ready, "closed": ~self.ready}

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions):
        self.pool.send(actions)

    def step_wait(self):
        obs, rewards, terminated, truncated, _ = self.pool.recv()
        obs, done = obs.astype(np.float32), terminated | truncated
        check_finite(rewards, obs)
        closed, self.ready = self.ready, ~done
        infos = {"ready": self.ready, "closed": closed}
        if done.any():
            infos["final_obs"] = obs
        return obs, rewards, terminated, truncated, infos

    def close(self):
        self.pool.close()
