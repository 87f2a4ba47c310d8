"""UnityVecEnv and GodotVecEnv as a VecEnv of Stable-Baselines3: one env per agent."""

import time

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

INSTEAD = "use the env itself with infos['ready'], or as_pettingzoo"


class SB3View(VecEnv):
    """A VecEnv with one env per slot of `envs`.

    SB3 stores a transition of every env in every step. So every agent must request a decision in every step, and an
    action whose reward is lost with a player that crashed is an error.

    The info of an agent has "TimeLimit.truncated" in every step. When its episode ends, it also has
    "terminal_observation", "episode" with the return "r", the length "l" and the time "t" as SB3's Monitor writes it,
    and "is_success" if the game reports it. With discrete actions, MaskablePPO finds the action masks.
    """

    def __init__(self, envs):
        if isinstance(envs.single_action_space, gym.spaces.Dict):
            kinds = "continuous and discrete actions together"
            raise ValueError(f"as_sb3: the agents have {kinds}, which SB3 does not support")
        self.envs = envs
        self.started = time.time()
        self.masks = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self):
        if any(self._options):
            raise ValueError("as_sb3: a game has no options for its reset")
        obs, infos = self.envs.reset()
        self._check_ready(infos)
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return obs

    def step_async(self, actions):
        self.envs.step_async(actions)

    def step_wait(self):
        obs, rewards, terminated, truncated, infos = self.envs.step_wait()
        if "restarted" in infos:
            slots = np.flatnonzero(infos["restarted"])
            lost = f"the last actions of the agents {describe(slots)} have no reward"
            fix = "save checkpoints, and start again with a new env"
            raise self.envs.Error(f"as_sb3: a player was restarted, and {lost}: {fix}")
        self._check_ready(infos)
        rows = [{"TimeLimit.truncated": bool(cut)} for cut in truncated]
        done = terminated | truncated
        for slot in np.flatnonzero(done):
            episode = infos["final_info"]["episode"]
            seconds = round(time.time() - self.started, 6)
            rows[slot]["terminal_observation"] = infos["final_obs"][slot]
            rows[slot]["episode"] = {
                "r": float(episode["r"][slot]),
                "l": int(episode["l"][slot]),
                "t": seconds,
            }
            if slot in infos.get("is_success", {}):
                rows[slot]["is_success"] = infos["is_success"][slot]
        return obs, rewards.astype(np.float32), done, rows

    def _check_ready(self, infos):
        """Raise an error unless all agents request a decision, which also completes all transitions."""
        ready = infos["ready"]
        if not ready.all():
            what = f"the agents {describe(np.flatnonzero(~ready))} request no decision in this step"
            why = "their decision periods differ, or there are more slots than agents"
            raise ValueError(f"as_sb3: {what}: {why}. SB3 steps all agents together: {INSTEAD}")
        self.masks = infos.get("action_mask")

    def action_masks(self):
        """Return the allowed actions of all agents, one row per agent, the branches side by side."""
        return self.masks

    def close(self):
        self.envs.close()

    def seed(self, seed=None):
        if seed is not None and seed != self.envs.seed:
            fix = f"give {type(self.envs).__name__}(..., seed={seed})"
            raise ValueError(f"seed {seed}: a game gets its seed at the start: {fix}")
        return [self.envs.seed] * self.num_envs

    # Attributes and methods of single envs, as SB3 asks for them

    def get_attr(self, attr_name, indices=None):
        count = len(list(self._get_indices(indices)))
        if attr_name == "action_masks":
            if not self.envs.layout.branches:
                raise AttributeError("agents with continuous actions have no action_masks")
            return [self.action_masks] * count
        return [getattr(self.envs, attr_name)] * count

    def set_attr(self, attr_name, value, indices=None):
        raise AttributeError(f"{attr_name}: the agents of a game have no attributes here")

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        if method_name != "action_masks" or not self.envs.layout.branches:
            raise AttributeError(f"{method_name}: the agents of a game have no such method here")
        return [self.masks[slot] for slot in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class, indices=None):
        # The infos of ended episodes are Monitor's, and evaluate_policy() looks for them if this is True.
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]


def describe(slots):
    """Return the first slots as text."""
    return ", ".join(map(str, slots[:5])) + (", ..." if len(slots) > 5 else "")
