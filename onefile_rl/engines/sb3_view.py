"""UnityVecEnv and GodotVecEnv as a VecEnv of Stable-Baselines3: one env per agent."""

import time
from functools import partial

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from onefile_rl.engines.vec_env import describe_ended, list_slots


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
            what = "the agents have continuous and discrete actions together"
            raise ValueError(f"as_sb3: {what}, which SB3 does not support: use as_pettingzoo")
        self.envs = envs
        self.started = time.time()
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        # The first reset returns these observations. They are taken here so that agents that don't fit are refused
        # before a model is made.
        self._first = envs.reset()
        self._check_ready(self._first[1])

    def reset(self):
        if any(self._options):
            raise ValueError("as_sb3: set_options: the reset of a game has no options")
        obs, infos = self._first or self.envs.reset()
        self._first = None
        self._check_ready(infos)
        return obs

    def step_async(self, actions):
        self._first = None
        self.envs.step_async(actions)

    def step_wait(self):
        obs, rewards, terminated, truncated, infos = self.envs.step_wait()
        self._check_restarted(infos)
        self._check_ready(infos)
        rows = [{"TimeLimit.truncated": bool(cut)} for cut in truncated]
        done = terminated | truncated
        for slot in np.flatnonzero(done):
            rows[slot]["terminal_observation"] = infos["final_obs"][slot]
            rows[slot] |= describe_ended(infos, slot)
            rows[slot]["episode"]["t"] = round(time.time() - self.started, 6)
        return obs, rewards.astype(np.float32), done, rows

    def _check_restarted(self, infos):
        if "restarted" not in infos:
            return
        slots = list_slots(infos["restarted"])
        lost = f"a player was restarted, and the last actions of the agents {slots} have no reward"
        fix = "call reset to continue; SB3's learn does so unless reset_num_timesteps=False"
        raise self.envs.Error(f"as_sb3: {lost}: {fix}")

    def _check_ready(self, infos):
        """Raise an error unless all agents request a decision. If they do, all transitions are complete."""
        ready = infos["ready"]
        if not ready.all():
            what = f"the agents {list_slots(~ready)} request no decision in this step"
            why = "decision periods differ, agents pause, or there are more slots than agents"
            fix = "use infos['ready'] of the env itself, or as_pettingzoo"
            raise ValueError(f"as_sb3: {what}: {why}. SB3 steps all agents together: {fix}")
        self.masks = infos.get("action_mask")

    def close(self):
        self.envs.close()

    def seed(self, seed=None):
        if seed is not None and seed != self.envs.seed:
            fix = f"give {type(self.envs).__name__}(..., seed={seed})"
            raise ValueError(f"as_sb3: seed {seed}: a game gets its seed when it starts: {fix}")
        return [self.envs.seed] * self.num_envs

    # Attributes and methods of single envs, as SB3 asks for them

    def get_attr(self, attr_name, indices=None):
        slots = list(self._get_indices(indices))
        if attr_name == "action_masks":
            self._check_masks()
            return [partial(self._mask_of, slot) for slot in slots]
        return [getattr(self.envs, attr_name)] * len(slots)

    def set_attr(self, attr_name, value, indices=None):
        raise AttributeError(f"as_sb3: {attr_name}: the agents of a game have no attributes to set")

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        if method_name != "action_masks":
            raise AttributeError(f"as_sb3: {method_name}: the agents of a game have no such method")
        self._check_masks()
        return [self._mask_of(slot) for slot in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class, indices=None):
        # The infos of ended episodes are Monitor's, and evaluate_policy() looks for them if this is True.
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]

    def _check_masks(self):
        if not self.envs.layout.branches:
            raise AttributeError("as_sb3: agents with continuous actions have no action_masks")

    def _mask_of(self, slot):
        """Return the allowed actions of an agent, the options of all branches side by side."""
        return self.masks[slot]
