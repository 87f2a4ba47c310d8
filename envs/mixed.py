"""A scene for tests: agents with periods, offsets, lifetimes, MaxSteps, absences and late arrivals of their own, all
drawn from the seed.

An observation says whose it is and when it was made: agent, episode, fixed steps in all, the agent's last action.
"""

import numpy as np


class Mixed:
    behavior, sensors, continuous, branches = "Mixed?team=0", [("Body", 3), ("LastAction", 2)], 2, ()
    num_agents = 8
    dt = 0.02

    def __init__(self, num_agents, seed, parameters):
        self.num_agents, self.rng = num_agents, np.random.default_rng(seed)
        self.period = self.rng.integers(1, 8, num_agents)
        self.offset = self.rng.integers(0, self.period)
        self.between = self.rng.random(num_agents) < 0.5
        self.max_step = np.where(self.rng.random(num_agents) < 0.5, 0, self.rng.integers(5, 40, num_agents))
        self.restless = self.rng.random(num_agents) < 0.5  # are disabled now and then, and come back under a new id
        self.restless[0] = False  # without one enabled agent, nothing is ever sent
        self.episode, self.last = np.zeros(num_agents, int), np.zeros((num_agents, 2), np.float32)
        self.absent = self.rng.integers(0, 20, num_agents)  # fixed steps until it is enabled

    def begin(self, who):
        if self.academy.total == 0 and not self.episode.any():  # the restless come later: nothing has been sent of them
            self.academy.done[self.restless] = True
            self.academy.disable(np.flatnonzero(self.restless))
        self.episode[who] += 1
        self.last[who] = 0

    def observe(self, who):
        body = np.stack([who, self.episode[who], np.full(len(who), self.academy.total)], 1).astype(np.float32)
        return [body, self.last[who]]

    def act(self, who, continuous, discrete):
        self.last[who] = continuous
        self.academy.reward[who] += continuous[:, 0]

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
    """The same with choices, some of which are forbidden: which ones, the agent's id and the time tell."""

    behavior, continuous, branches = "MixedDiscrete?team=0", 0, (3, 2)

    def act(self, who, continuous, discrete):
        super().act(who, discrete, discrete)

    def mask(self, who):
        """True where a choice is forbidden."""
        left, right = (who + self.academy.total) % 3, (who + self.academy.total) % 4
        return np.concatenate([left[:, None] == np.arange(3), right[:, None] == np.arange(2)], 1)
