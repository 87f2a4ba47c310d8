"""EnvPool's MuJoCo envs, written in C++, as a vector env."""

import os

import numpy as np

from envs.sync import check_numbers

NO_ATTRIBUTES = """EnvPool's envs have no attributes: run gymnasium's with --env-kwargs '{"render_mode": null}'"""


class EnvPoolEnvs:
    """EnvPool's envs as a vector env.

    After an end, EnvPool takes one step to reset. That slot is not ready in between, its next step completes no
    decision, and the observation of the end is the final one.
    """

    def __init__(self, env_id, num_envs, seed):
        import envpool

        num_threads = min(num_envs, os.cpu_count())
        self.pool = envpool.make_gymnasium(
            env_id, num_envs=num_envs, num_threads=num_threads, seed=seed
        )
        self.num_envs = num_envs
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space

    def reset(self, seed):
        """Reset all envs. EnvPool takes its seed in the constructor: `seed` has no effect here."""
        self.ready = np.ones(self.num_envs, bool)
        obs, _ = self.pool.reset()
        obs = obs.astype(np.float32)
        check_numbers(obs)
        return obs, {"ready": self.ready, "closed": ~self.ready}

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions):
        self.pool.send(actions)

    def step_wait(self):
        obs, rewards, terminated, truncated, _ = self.pool.recv()
        obs = obs.astype(np.float32)
        check_numbers(obs, rewards)
        done = terminated | truncated
        closed = self.ready
        self.ready = ~done
        infos = {"ready": self.ready, "closed": closed}
        if done.any():
            infos["final_obs"] = obs
        return obs, rewards, terminated, truncated, infos

    def get_attr(self, name):
        raise ValueError(NO_ATTRIBUTES)

    def set_attr(self, name, value):
        raise ValueError(NO_ATTRIBUTES)

    def close(self):
        self.pool.close()
