"""UnityVecEnv and GodotVecEnv as a ParallelEnv or an AECEnv of PettingZoo.

In both, the agent of slot i is called "agent_i". An agent leaves when its episode ends, with its final observation, and
returns only after a reset, as PettingZoo demands. The game starts the agent's next episode at once. Until the reset,
the view sends actions of 0 for it, or the first ones that are allowed, and does not show it. When all agents have left,
the episode of the view is over.

infos["agent_i"]["action_mask"] has the allowed options of each discrete action, as `sample` of the action space takes
them: a tuple of int8 arrays, and with continuous actions beside them a dict of None and this tuple. When an episode
ends, the info has "episode" with the return "r" and the length "l", and "is_success" if the game reports it.
"""

import numpy as np
from pettingzoo import AECEnv, ParallelEnv

from onefile_rl.engines.vec_env import describe_ended, list_slots


def decide_together(envs):
    """Return whether all agents request a decision at the start and after one step."""
    _, infos = envs.reset()
    if not infos["ready"].all():
        return False
    *_, infos = envs.step(default_actions(envs, infos))
    return bool(infos["ready"].all())


def default_actions(envs, infos):
    """Return actions of 0 for all slots, or the first discrete actions that are allowed."""
    branches = envs.layout.branches
    actions = {}
    if envs.layout.continuous:
        actions["continuous"] = np.zeros((envs.num_envs, envs.layout.continuous), np.float32)
    if branches:
        masks = np.split(infos["action_mask"], np.cumsum(branches)[:-1], axis=1)
        actions["discrete"] = np.stack([mask.argmax(1) for mask in masks], 1)
    return actions if len(actions) > 1 else next(iter(actions.values()))


class View:
    """What both views share: names, spaces, and single rows of the arrays of `envs`."""

    metadata = {"name": "engine_view_v0", "render_modes": []}
    render_mode = None

    def __init__(self, envs):
        self.envs = envs
        self.possible_agents = [f"agent_{slot}" for slot in range(envs.num_envs)]
        self.slot_of = {agent: slot for slot, agent in enumerate(self.possible_agents)}
        self.agents = []

    def observation_space(self, agent):
        return self.envs.single_observation_space

    def action_space(self, agent):
        return self.envs.single_action_space

    def close(self):
        self.envs.close()

    def _set(self, actions, agent, action):
        """Enter the action of one agent into the actions of all slots."""
        if not isinstance(actions, dict):
            actions = {"": actions}
            action = {"": action}
        for kind, array in actions.items():
            row = np.asarray(action[kind])
            if row.shape != array.shape[1:]:
                raise ValueError(
                    f"as_pettingzoo: the action of {agent} is {row}, not an array of shape {array.shape[1:]}"
                )
            array[self.slot_of[agent]] = row

    def _obs_of(self, obs, slot):
        if isinstance(obs, dict):
            return {name: array[slot] for name, array in obs.items()}
        return obs[slot]

    def _info_of(self, infos, slot):
        branches = self.envs.layout.branches
        if not branches:
            return {}
        mask = infos["action_mask"][slot].astype(np.int8)
        mask = tuple(np.split(mask, np.cumsum(branches)[:-1]))
        if self.envs.layout.continuous:
            mask = {"continuous": None, "discrete": mask}
        return {"action_mask": mask}

    def _check_restarted(self, infos):
        if "restarted" in infos:
            slots = list_slots(infos["restarted"])
            lost = f"the last actions of the agents {slots} have no reward"
            fix = "reset the env to continue"
            raise self.envs.Error(f"as_pettingzoo: a player was restarted, and {lost}: {fix}")


class ParallelView(View, ParallelEnv):
    """A ParallelEnv: all agents that have not left act in every step.

    An agent that requests no decision after a step is an error: a ParallelEnv can't express it.
    """

    def reset(self, seed=None, options=None):
        obs, self._infos = self.envs.reset(seed=seed)
        self.agents = list(self.possible_agents)
        self._check_ready()
        return self._by_agent(obs)

    def step(self, actions):
        if set(actions) != set(self.agents):
            there = ", ".join(self.agents) or "none: reset the env"
            raise ValueError(
                f"as_pettingzoo: actions of {', '.join(actions)}; the agents are {there}"
            )
        if not self.agents:
            return {}, {}, {}, {}, {}
        rows = default_actions(self.envs, self._infos)
        for agent, action in actions.items():
            self._set(rows, agent, action)
        obs, rewards, terminated, truncated, self._infos = self.envs.step(rows)
        self._check_restarted(self._infos)

        acted = self.agents
        done = terminated | truncated
        self.agents = [agent for agent in acted if not done[self.slot_of[agent]]]
        self._check_ready()
        observations, infos = self._by_agent(obs)
        for agent in acted:
            slot = self.slot_of[agent]
            if done[slot]:
                observations[agent] = self._infos["final_obs"][slot]
                infos[agent] = describe_ended(self._infos, slot)
        by_agent = lambda array: {agent: array[self.slot_of[agent]].item() for agent in acted}
        return observations, by_agent(rewards), by_agent(terminated), by_agent(truncated), infos

    def _by_agent(self, obs):
        """Return the observations and the infos of the agents that have not left."""
        slots = {agent: self.slot_of[agent] for agent in self.agents}
        return (
            {agent: self._obs_of(obs, slot) for agent, slot in slots.items()},
            {agent: self._info_of(self._infos, slot) for agent, slot in slots.items()},
        )

    def _check_ready(self):
        missing = np.zeros(self.envs.num_envs, bool)
        missing[[self.slot_of[agent] for agent in self.agents]] = True
        missing &= ~self._infos["ready"]
        if missing.any():
            what = f"the agents {list_slots(missing)} request no decision in this step"
            why = "decision periods differ, agents pause, or there are more slots than agents"
            fix = "use as_pettingzoo(envs, parallel=False)"
            raise ValueError(f"as_pettingzoo: {what}: {why}. A ParallelEnv needs all: {fix}")


class AECView(View, AECEnv):
    """An AECEnv: agents act one after another, each when it requests a decision.

    The game continues when all agents that request a decision have acted. The reward of `last` is the one since the
    agent's last action. An agent that requests its first decision later than others joins then.
    """

    def reset(self, seed=None, options=None):
        obs, self._game_infos = self.envs.reset(seed=seed)
        self.agents = []
        self.rewards = {}
        self._cumulative_rewards = {}
        self.terminations = {}
        self.truncations = {}
        self.infos = {}
        self._observations = {}
        self._left = set()  # agents whose episode has ended
        self._skip_agent_selection = None
        self._actions = default_actions(self.envs, self._game_infos)
        self._requesting = []  # agents whose turn is still to come before the game continues
        self._take_requests(obs)
        self.agent_selection = self._requesting[0]

    def observe(self, agent):
        return self._observations[agent]

    def step(self, action):
        if not self.agents:
            raise ValueError("as_pettingzoo: there are no agents: reset the env")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._set(self._actions, agent, action)
        self._cumulative_rewards[agent] = 0
        self._clear_rewards()
        self._requesting.remove(agent)

        # Agents that have left request decisions too, and the game waits for them
        while not self._requesting and set(self.agents) - self._left:
            self._step_game()
        if self._requesting:
            self.agent_selection = self._requesting[0]
        self._accumulate_rewards()
        self._deads_step_first()

    def _step_game(self):
        obs, rewards, terminated, truncated, infos = self.envs.step(self._actions)
        self._check_restarted(infos)
        self._game_infos = infos
        self._actions = default_actions(self.envs, infos)
        for agent in self.agents:
            slot = self.slot_of[agent]
            if agent in self._left:
                continue
            self.rewards[agent] += rewards[slot].item()  # 0 while the decision is pending
            if terminated[slot] or truncated[slot]:
                self._left.add(agent)
                self.terminations[agent] = bool(terminated[slot])
                self.truncations[agent] = bool(truncated[slot])
                self._observations[agent] = infos["final_obs"][slot]
                self.infos[agent] = describe_ended(infos, slot)
        self._take_requests(obs)

    def _take_requests(self, obs):
        """Note the agents that request a decision now. New ones join."""
        for slot in np.flatnonzero(self._game_infos["ready"]):
            agent = self.possible_agents[slot]
            if agent in self._left:
                continue
            if agent not in self.agents:
                self.agents.append(agent)
                self.rewards[agent] = 0
                self._cumulative_rewards[agent] = 0
                self.terminations[agent] = False
                self.truncations[agent] = False
            self._observations[agent] = self._obs_of(obs, slot)
            self.infos[agent] = self._info_of(self._game_infos, slot)
            self._requesting.append(agent)
