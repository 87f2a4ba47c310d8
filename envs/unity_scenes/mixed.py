"""A scene for tests: each agent has its own decision period, offset, episode length, MaxStep and times of absence.

All of them are drawn from the seed. An observation tells its origin: agent, episode, total number of fixed steps, and
the agent's last action.
"""

import numpy as np


class Mixed:
    behavior = "Mixed?team=0"
    sensors = [("Body", 3), ("LastAction", 2)]
    continuous = 2
    branches = ()
    num_agents = 8
    dt = 0.02

    def __init__(self, num_agents, seed, parameters):
        self.num_agents = num_agents
        self.rng = np.random.default_rng(seed)
        self.period = self.rng.integers(1, 8, num_agents)
        self.offset = self.rng.integers(0, self.period)
        self.between = self.rng.random(num_agents) < 0.5
        self.max_step = np.where(
            self.rng.random(num_agents) < 0.5, 0, self.rng.integers(5, 40, num_agents)
        )
        self.restless = (
            self.rng.random(num_agents) < 0.5
        )  # disabled at times, and enabled again with a new id
        self.restless[0] = False  # nothing is sent without an enabled agent
        self.episode = np.zeros(num_agents, int)
        self.last = np.zeros((num_agents, 2), np.float32)
        self.absent = self.rng.integers(0, 20, num_agents)  # fixed steps until it is enabled

    def begin(self, agents):
        if self.academy.total == 0 and not self.episode.any():  # restless agents are enabled later
            self.academy.done[self.restless] = True
            self.academy.disable(np.flatnonzero(self.restless))
        self.episode[agents] += 1
        self.last[agents] = 0

    def observe(self, agents):
        body = np.stack(
            [agents, self.episode[agents], np.full(len(agents), self.academy.total)], 1
        ).astype(np.float32)
        return [body, self.last[agents]]

    def act(self, agents, continuous, discrete):
        self.last[agents] = continuous
        self.academy.reward[agents] += continuous[:, 0]

    def update(self):
        self.academy.reward += 0.25

    def physics(self):
        academy = self.academy
        leaves = academy.enabled & self.restless & (self.rng.random(self.num_agents) < 0.02)
        ends = academy.enabled & ~leaves & (self.rng.random(self.num_agents) < 0.08)
        if ends.any():
            academy.reward[ends] = -1
            academy.end(np.flatnonzero(ends))
        if leaves.any():
            academy.disable(np.flatnonzero(leaves))
            self.absent[leaves] = self.rng.integers(1, 30, leaves.sum())
        back = ~academy.enabled & (self.absent == 0)
        if back.any():
            academy.enable(np.flatnonzero(back))
        self.absent -= ~academy.enabled
        if self.rng.random() < 0.3:
            academy.stats.append(("Mixed/Enabled", float(academy.enabled.sum()), 0))


class MixedDiscrete(Mixed):
    """The variant with discrete actions. The agent and the time determine which ones are forbidden."""

    behavior = "MixedDiscrete?team=0"
    continuous = 0
    branches = (3, 2)

    def act(self, agents, continuous, discrete):
        super().act(agents, discrete, discrete)

    def mask(self, agents):
        """Return True where an action is forbidden, as ML-Agents sends it."""
        left = (agents + self.academy.total) % 3
        right = (agents + self.academy.total) % 4
        return np.concatenate([left[:, None] == np.arange(3), right[:, None] == np.arange(2)], 1)


class MixedHybrid(MixedDiscrete):
    """The variant with both kinds of actions. An observation shows all of them."""

    behavior = "MixedHybrid?team=0"
    sensors = [("Body", 3), ("LastAction", 4)]
    continuous = 2

    def __init__(self, num_agents, seed, parameters):
        super().__init__(num_agents, seed, parameters)
        self.last = np.zeros((num_agents, 4), np.float32)

    def act(self, agents, continuous, discrete):
        Mixed.act(self, agents, np.concatenate([continuous, discrete], 1), discrete)
