"""What the vector envs of all engines share: players that are launched, told, heard and started anew, and a slot for
each of their agents.

unity_vec_env.py and godot_vec_env.py bring what is the engine's own, with `player` one of `self.players`:

    _launch(worker)                         starts one: a processes.Process
    _greet(player)                          waits for its connection
    _meet(player)                           learns who its agents are; player.count is how many slots they need
    _make_spaces()                          learns what they see and do, and calls `_set_spaces`
    _begin(player)                          takes the first observations
    _restart_episodes(player)               asks it to begin all of them anew
    _send(player, continuous, discrete)     sends the actions of those who ask
    _hear(player)                           takes a message: `_close`, `_end`, `_see`. True if somebody asks now
    _statistics()                           what the games have measured in this step, by name
"""

import functools
import select
import time
import weakref
from contextlib import closing

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from processes import PlayerGone, close_all, orderly_exit, signals_later


def no_way_back(method):
    """A message may be half read, and an agent half served, when something goes wrong: the players are closed then."""

    @functools.wraps(method)
    def guarded(self, *args):
        try:
            return method(self, *args)
        except BaseException:
            self.close_players()
            raise

    return guarded


class PlayersEnv(VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    player, seeded = "player", "a player"  # how the engine's are called; who takes the seed

    def __init__(self, path, num_players, seed, timeout, max_restarts):
        if num_players < 1 or (path == "editor" and num_players > 1):
            why = f"there must be at least one {self.player}, and there is only one editor"
            raise ValueError(f"--num-players {num_players}: {why}")
        self.seed, self.timeout, self.max_restarts, self.restarts = seed, timeout, max_restarts, 0
        self.fresh = True  # the episodes have just begun
        self.players, self._waiting = [], {}
        self.sums = set()  # statistics that the game wants added up
        self.close_players = weakref.finalize(self, close_all, self.players)  # at the latest when Python ends

    @orderly_exit()
    @no_way_back
    def _open_players(self, num_players):
        """The last thing that an engine's constructor does."""
        for worker in range(num_players):
            with signals_later():
                self.players.append(self._launch(worker))
        for player in self.players:
            self._greet(player)
        self.num_envs = 0
        for player in self.players:
            self._meet(player)
            player.rows = slice(self.num_envs, self.num_envs + player.count)
            self.num_envs += player.count
        self._make_spaces()
        self._clear()
        for player in self.players:
            self._begin(player)

    def _seed(self, worker):
        """Started anew, a player does not play the same episodes again."""
        return self.seed + worker + 1000 * self.restarts

    # gymnasium's interface

    def reset(self, *, seed=None, options=None):
        """Start all episodes anew. The first call after construction finds them new already."""
        if seed is not None and seed != self.seed:
            instead = f"{type(self).__name__}(..., seed={seed})"
            raise ValueError(f"reset(seed={seed}): {self.seeded} takes its seed when it starts: {instead}")
        if not self.fresh:
            if self._waiting:
                self.step_wait()
            self._clear()
            self._ask(self._restart_episodes)
            self._listen()
            self._restarted = None  # nothing was open
        self.fresh = False
        return self._copy_obs(), self._infos()

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions):
        """Send the actions, so that the players simulate while the caller does something else."""
        actions = self._check(actions)
        self._open |= self._ready
        self._new_step()
        self._ask(self._send, *actions)

    def step_wait(self):
        self._listen()
        self._returns += self._rewards
        self._lengths += self._closed
        return self._copy_obs(), self._rewards, self._terminated, self._truncated, self._infos()

    def close_extras(self, **kwargs):
        self.close_players()

    def _check(self, actions):
        parts = actions if isinstance(actions, dict) else {"discrete" if self._branches else "continuous": actions}
        continuous, discrete = parts.get("continuous"), parts.get("discrete")
        if self._continuous:
            continuous = np.asarray(continuous)
            if continuous.shape != (self.num_envs, self._continuous):
                wanted = (self.num_envs, self._continuous)
                raise ValueError(f"actions have shape {continuous.shape}, not {wanted}: one row per slot")
            finite = np.isfinite(continuous)
            if not finite.all() and not finite[self._ready].all():
                slot = np.flatnonzero(self._ready & ~finite.all(1))[0]
                raise ValueError(f"the action of slot {slot} is not finite: {continuous[slot]}")
        if self._branches:
            discrete = np.asarray(discrete)
            if discrete.shape != (self.num_envs, len(self._branches)):
                wanted = (self.num_envs, len(self._branches))
                raise ValueError(f"discrete actions have shape {discrete.shape}, not {wanted}: one row per slot")
            if not ((discrete >= 0) & (discrete < self._branches))[self._ready].all():
                raise ValueError(f"discrete actions must be below the branches' sizes {self._branches}")
        return continuous, discrete

    def _copy_obs(self):
        return self._unwrap({key: value.copy() for key, value in self._obs.items()})

    def _unwrap(self, observations):
        return observations if self._keyed else observations["vector"]

    def _infos(self):
        infos = {"ready": self._ready.copy(), "closed": self._closed}
        if self._restarted is not None:
            infos["restarted"] = self._restarted
        if self._branches:
            infos["action_mask"] = self._mask
        if stats := self._statistics():
            infos["stats"] = stats
        for slot, final in self._final.items():
            episode = {"r": self._returns[slot], "l": self._lengths[slot]}
            self._add_info(infos, {"final_obs": final, "final_info": {"episode": episode}}, slot)
            self._returns[slot], self._lengths[slot] = 0, 0
        if self._success:
            infos["is_success"] = self._success
        return infos

    # What comes of the actions

    def _set_spaces(self, vector, images, continuous, branches):
        """vector: how many numbers; images: name to shape; continuous: how many; branches: the sizes of the choices."""
        self._keyed, self._continuous, self._branches = bool(images), continuous, branches
        spaces, actions = {}, {}
        if vector:
            spaces["vector"] = gym.spaces.Box(-np.inf, np.inf, (vector,), np.float32)
        for name, shape in images.items():
            spaces[name] = gym.spaces.Box(0, 255, shape, np.uint8)
        if continuous:
            actions["continuous"] = gym.spaces.Box(-1, 1, (continuous,), np.float32)
        if branches:
            actions["discrete"] = gym.spaces.MultiDiscrete(branches)
        self._obs = {key: np.zeros((self.num_envs, *space.shape), space.dtype) for key, space in spaces.items()}
        self.single_observation_space = gym.spaces.Dict(spaces) if images else spaces["vector"]
        self.single_action_space = gym.spaces.Dict(actions) if len(actions) > 1 else next(iter(actions.values()))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def _clear(self):
        n = self.num_envs
        self._open = np.zeros(n, bool)  # has its action and waits for what comes of it
        self._returns, self._lengths = np.zeros(n), np.zeros(n, int)
        self._new_step()

    def _new_step(self):
        """Arrays of its own for each step: the caller may keep them. _ready: asks now."""
        n = self.num_envs
        self._rewards, self._final, self._success, self._restarted = np.zeros(n), {}, {}, None
        self._terminated, self._truncated, self._closed, self._ready = np.zeros((4, n), bool)
        if self._branches:
            self._mask = np.ones((n, sum(self._branches)), bool)

    def _close(self, slots, rewards):
        """These rewards close the slots' open decisions. One that comes while none is open belongs to nobody."""
        closing = self._open[slots]
        if not closing.all():
            slots, rewards = slots[closing], rewards[closing]
        self._open[slots] = False
        self._closed[slots] = True
        self._rewards[slots] = rewards

    def _end(self, slot, truncated, final):
        """final: the last observation, by its parts."""
        self._truncated[slot] = truncated
        self._terminated[slot] = not truncated
        self._final[slot] = self._unwrap(final)

    def _see(self, slots, observations):
        """What is there now, and asks for an action."""
        for key, rows in observations.items():
            self._obs[key][slots] = rows
        self._ready[slots] = True

    # The exchange

    @no_way_back
    def _ask(self, send, *actions):
        """Tell all players; nobody waits for an answer yet."""
        self._check_open()
        self.fresh, self._waiting = False, {}
        for player in list(self.players):
            try:
                send(player, *actions)
                self._waiting[player.wire.sock] = player
            except PlayerGone as error:
                self._restart(player, error)

    @no_way_back
    def _listen(self):
        """Take messages, from whichever player has one, until each has an agent that asks."""
        self._check_open()
        waiting, self._deadline = self._waiting, time.monotonic() + self.timeout
        while waiting:
            arrived = list(waiting) if len(waiting) == 1 else select.select(waiting, [], [], self.timeout)[0]
            for sock in arrived or list(waiting)[:1]:
                player = waiting[sock]
                try:
                    if not arrived:
                        raise player.silent()
                    if self._hear(player):
                        del waiting[sock]
                        player.failures = 0
                except PlayerGone as error:
                    del waiting[sock]
                    self._restart(player, error)

    def _check_open(self):
        if not self.players:
            raise self.Error("the env is closed")

    @orderly_exit()
    def _restart(self, player, error):
        """A new player in the place of one that is gone. What its agents had begun is nobody's, and their slots are the
        new one's agents'."""
        slots, failures = player.rows, player.failures
        while True:
            failures += 1
            if failures > self.max_restarts:
                raise error
            print(f"\n{error}; starting it again ({failures} of {self.max_restarts} times in a row)", flush=True)
            player.close()
            self.restarts += 1
            try:
                with signals_later():
                    new = self.players[self.players.index(player)] = self._launch(player.worker)
                player, new.rows, new.failures = new, slots, failures
                self._greet(player)
                self._meet(player)
                flags = (self._ready, self._open, self._closed, self._terminated, self._truncated)
                for array in (*flags, self._rewards, self._returns, self._lengths):
                    array[slots] = 0
                for slot in range(slots.start, slots.stop):
                    self._final.pop(slot, None)
                    self._success.pop(slot, None)
                self._restarted = np.zeros(self.num_envs, bool) if self._restarted is None else self._restarted
                self._restarted[slots] = True
                self._begin(player)
                return
            except PlayerGone as again:
                error = again


def demo(make, steps, seed, trained=None):
    """Step an env with random actions, or those of a policy that is compared, and say how fast that is."""
    with closing(make()) as envs:
        print(f"{envs.behavior}: {envs.num_envs} agents")
        print(f"observations {envs.single_observation_space}\nactions {envs.single_action_space}")
        envs.action_space.seed(seed)
        obs, infos = envs.reset()
        vector = lambda: obs["vector"] if isinstance(obs, dict) else obs
        act = trained.start(envs._names) if trained else None
        decisions, returns, start = 0, [], time.perf_counter()
        for _ in range(steps):
            decisions += infos["ready"].sum()
            if trained:
                trained.see(vector()[infos["ready"]])
            obs, *_, infos = envs.step(act(vector()) if act else envs.action_space.sample())
            if "final_info" in infos:
                returns.extend(infos["final_info"]["episode"]["r"][infos["_final_info"]])
        seconds = time.perf_counter() - start
        mean = f"mean return {np.mean(returns):.2f}" if returns else "none ended"
        rate = f"{decisions} decisions in {seconds:.1f} s: {decisions / seconds:.0f} a second"
        print(f"{rate}; {len(returns)} episodes, {mean}")
        if trained:
            print(trained.report(envs._names))
