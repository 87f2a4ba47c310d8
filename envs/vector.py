"""Any env of the scripts' --env-id as a vector env: a bundled scene, a Unity build, or a gymnasium id.

    envs, how = make_vec_env("HalfCheetah-v5", num_envs=8, seed=1)

They all have num_envs, single_observation_space, single_action_space, reset, step and close, start again by themselves, and give
infos["final_obs"] by slot, and infos["is_success"] where the env tells. infos["ready"], where there is one, says which slots ask for an action: see
unity_vec_env.py.
"""

import difflib
import importlib
import os
from contextlib import closing

import gymnasium as gym
import imageio
import numpy as np

from envs import NEEDS_GL, SCENES, cheap, choose_gl
from unity_vec_env import UnityVecEnv

FILM_STEPS = 450  # decisions: half a minute of Crawler
LONGEST = 100_000  # steps of an episode that are kept to be played again


def make_vec_env(env_id, num_envs, seed, unity_path=None, **unity):
    """The envs, and how they are stepped, in words. `unity` are UnityVecEnv's arguments."""
    if unity_path or env_id in SCENES:
        envs = UnityVecEnv(unity_path or env_id, seed=seed, **unity)
        return envs, f"{len(envs.players)} Unity player(s), {envs.num_envs} agents"
    if is_envpools(env_id) and num_envs > 1:
        return EnvPoolEnvs(env_id, num_envs, seed), f"EnvPool, {num_envs} envs"
    return SyncEnvs([make_env(env_id) for _ in range(num_envs)]), f"{num_envs} gymnasium env(s), one after another"


def find(env_id):
    """gymnasium's entry for an id or a module:id; near ones are suggested."""
    module, _, name = env_id.rpartition(":")
    try:
        importlib.import_module(module or "gymnasium")
        return gym.spec(name)
    except ImportError as error:
        raise ValueError(f"--env-id {env_id}: {error}") from None
    except gym.error.Error as error:
        near = difflib.get_close_matches(name, [*gym.registry, *SCENES], 3)
        raise ValueError(f"--env-id {env_id}: " + (f"did you mean {' or '.join(near)}?" if near else str(error))) from None


def is_envpools(env_id):
    return str(find(env_id).entry_point).startswith("gymnasium.envs.mujoco")


def make_env(env_id, **kwargs):
    """One gymnasium env; Dict and nested vector observations are flattened."""
    env = gym.make(find(env_id), disable_env_checker=True, **kwargs)
    return env if isinstance(env.observation_space, gym.spaces.Box) else gym.wrappers.FlattenObservation(env)


class SyncEnvs:
    """gymnasium envs, one after another. Around a small env gymnasium's own SyncVectorEnv takes as long as the env itself."""

    def __init__(self, envs):
        self.envs, self.num_envs = envs, len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space

    def reset(self, seed):
        self.episodes = [({"seed": seed + i}, []) for i in range(self.num_envs)]  # how it began, and the actions since
        return self._gather([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]), {}

    def state(self):
        """What brings the envs back to where they are, in plain numbers: how their episodes began, and all actions since. None if one is too long."""
        if any(len(actions) >= LONGEST for _, actions in self.episodes):
            return None
        return [(begin, [action.tolist() for action in actions]) for begin, actions in self.episodes]

    def restore(self, state):
        """Play the episodes again up to where they were. An env whose chance is all in its np_random comes back exactly."""
        self.episodes, last = [], []
        for env, (begin, actions) in zip(self.envs, state, strict=True):
            actions = [np.array(action, env.action_space.dtype) for action in actions]
            env.reset(seed=begin.get("seed", 0))
            if "random" in begin:
                env.unwrapped.np_random.bit_generator.state = begin["random"]
            obs, _ = env.reset(seed=begin.get("seed"))
            for action in actions:
                obs, *_ = env.step(action)
            self.episodes.append((begin, actions))
            last.append(obs)
        return self._gather(last)

    def _gather(self, observations):
        return np.stack(observations)

    def step(self, actions):
        n, infos = self.num_envs, {}
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
        return obs, rewards, terminated, truncated, infos

    def close(self):
        for env in self.envs:
            env.close()


class EnvPoolEnvs:
    """EnvPool's C++ envs. After an end they take one step to reset: that row is not ready, and its observation is the final one."""

    def __init__(self, env_id, num_envs, seed):
        import envpool

        self.pool = envpool.make_gymnasium(env_id, num_envs=num_envs, num_threads=min(num_envs, os.cpu_count()), seed=seed)
        self.num_envs, self.single_observation_space, self.single_action_space = num_envs, self.pool.observation_space, self.pool.action_space

    def reset(self, seed):
        return self.pool.reset()[0], {}

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions):
        self.pool.send(actions)

    def step_wait(self):
        obs, rewards, terminated, truncated, _ = self.pool.recv()
        done = terminated | truncated
        return obs, rewards, terminated, truncated, {"ready": ~done, "final_obs": obs} if done.any() else {}

    def close(self):
        self.pool.close()


def film(path, policy, env_id, seed, unity):
    """Write a video of a policy, in an env of its own: an episode of a gymnasium env, or half a minute of a bundled scene."""
    if env_id in SCENES:
        unity = unity | {"num_players": 1, "max_restarts": 0, "base_port": None, "player_args": (*unity["player_args"], "--render", str(path))}
        with closing(UnityVecEnv(env_id, seed=seed, **unity)) as envs:
            actions = np.zeros(envs.action_space.shape, np.float32)
            obs, infos = envs.reset()
            for _ in range(FILM_STEPS):
                actions[infos["ready"]] = np.clip(policy(obs[infos["ready"]]), -1, 1)
                obs, *_, infos = envs.step(actions)
        return
    choose_gl()
    env = make_env(env_id, render_mode="rgb_array")
    with closing(env), imageio.get_writer(path, fps=env.metadata.get("render_fps", 30), macro_block_size=1) as video:
        if hasattr(env.unwrapped, "model"):
            cheap(env.unwrapped.model)
        obs, done = env.reset(seed=seed)[0], False
        while not done:
            try:
                video.append_data(env.render())
            except Exception as error:
                raise ValueError(f"filming {NEEDS_GL} ({error})") from None
            action = policy(np.asarray(obs, np.float32).reshape(1, -1)).reshape(env.action_space.shape)
            obs, _, terminated, truncated, _ = env.step(np.clip(action, env.action_space.low, env.action_space.high))
            done = terminated or truncated
