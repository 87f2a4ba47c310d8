"""The base of UnityVecEnv and GodotVecEnv: players, slots for their agents, and gymnasium's interface.

A player (unity.Player or godot.Game) is one process of the game, with these methods:

    connect()                             wait for the game's connection
    meet(behavior, layout)                find the agents to train; set `behavior`, `layout` and `num_agents`
    start()                               return the first Message
    reset()                               tell the game to start new episodes
    send_actions(continuous, discrete)    send the actions, one row per agent that requested a decision
    receive()                             return the next Message, or None if the game goes on only when the agents of
                                          the other players have acted (see shared.py)
    close()                               end the game

A step calls `send_actions` of every player, then `receive` until every player has an agent that requests a decision.
`EngineVecEnv._apply` enters the messages into the arrays that `step` returns.

A subclass defines `_launch(worker)`, which returns a new player, and calls `_open_players` at the end of its
constructor.
"""

import functools
import select
import time
import weakref
from collections import Counter
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from PIL import Image

from onefile_rl.engines import waits
from onefile_rl.engines.limits import LARGEST, describe, find_invalid
from onefile_rl.engines.process import (
    LOG_INTERVAL,
    SLICE,
    PlayerGone,
    close_all,
    defer_signals,
    exit_on_signals,
)
from onefile_rl.engines.scenes import EngineError, derive_seed

MANY_EPISODES = 1_000  # of one decision, after which a notice is printed


def close_players_on_error(method):
    """Close all players if `method` raises: a message may be half read then, so the env cannot be used any more."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.close_players()
            raise

    return guarded


class EngineVecEnv(VectorEnv):
    """A vector env over the players of an engine. Its contract is in the docstring of unity_vec_env.py."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    Error = EngineError  # the engine's exception
    max_agents = None  # slots per player; None for the number of agents at the first decision
    flatten_entities = False  # whether sensors of entities are part of the vector

    def __init__(self, path, num_players, seed, timeout, max_restarts):
        if num_players < 1:
            raise ValueError(f"--num-players {num_players}: at least one player is needed")
        if path == "editor" and num_players > 1:
            raise ValueError(f"--num-players {num_players}: there is only one editor")
        self.path = path
        self.seed = seed
        self.timeout = timeout
        self.max_restarts = max_restarts
        self.restarts = 0  # of all players so far
        self.behavior = None
        self.layout = None
        self.sums = set()  # names of the statistics that the game wants to be added up
        self.announced = set()  # topics of the notices that were printed
        self.players = []
        self.close_players = weakref.finalize(
            self, close_all, self.players
        )  # also when Python exits
        self._fresh = True  # no action has been sent since the episodes started
        self._waiting = {}  # the players whose answer is expected, by their sockets
        self._deferred = {}  # the players whose answer is expected in the next step, by their sockets
        self._statistics = {}
        self._log_due_at = 0.0
        self._short_episodes = 0  # that ended with their first decision, in a row

    @exit_on_signals()
    @close_players_on_error
    def _open_players(self, num_players):
        """Launch the players, make the spaces, and take the first observations."""
        # Launch all before waiting for any of them.
        for worker in range(num_players):
            with defer_signals():
                self.players.append(self._launch(worker))
        for player in list(self.players):
            try:
                player.connect()
            except PlayerGone as error:
                self._connect_again(player, error)
        for player in list(self.players):
            try:
                if player.layout is None:  # not launched again by now
                    self._meet(player)
            except PlayerGone as error:
                self._connect_again(player, error)

        self.num_envs = 0
        for player in self.players:
            count = self.max_agents or player.num_agents
            player.slots = Slots(range(self.num_envs, self.num_envs + count))
            self.num_envs += count
        self.sensors = self.layout.sensors
        self.entities = self.layout.entities
        self._make_spaces()

        self._clear()
        for player in list(self.players):
            try:
                self._begin(player)
            except PlayerGone as error:
                self._restart(player, error)
        self._restarted = None  # no decision was pending

    def _begin(self, player):
        """Apply the first message of a player. One without a decision is waited for together with the other players."""
        message = player.start()
        self._apply(player, message)
        if not message.agents:
            self._waiting[player.wire.sock] = player

    def _connect_again(self, player, error):
        """Replace a player that was lost before its slots are known.

        A player that runs and does not connect is an error: most likely it is not a game with agents.
        """
        while True:
            if player.wire is None and not player.has_ended():
                raise error
            player = self._relaunch(player, error)
            try:
                player.connect()
                self._meet(player)
                return
            except PlayerGone as next_error:
                error = next_error

    def _launch(self, worker):
        """Return a new player with the number `worker`."""
        raise NotImplementedError

    def _meet(self, player):
        """Find the agents of a player. All players share the behavior and the layout of the first one."""
        player.meet(self.behavior, self.layout)
        self.behavior = player.behavior
        self.layout = player.layout

    def _seed(self, worker):
        """Return the seed of a player. It changes with a restart, so that a player does not repeat its episodes."""
        return derive_seed(self.seed, worker + 1000 * self.restarts)

    def _make_spaces(self):
        # The vector with all numbers of an agent, and the images. The spaces may have entities apart from it
        self._obs = {}
        if self.layout.vector_size:
            self._obs["vector"] = np.zeros((self.num_envs, self.layout.vector_size), np.float32)
        for name, shape in self.layout.images.items():
            self._obs[name] = np.zeros((self.num_envs, *shape), np.uint8)
        self._entities = {} if self.flatten_entities else self.layout.entities
        self._plain_columns = np.ones(self.layout.vector_size, bool)
        for first, rows, size in self._entities.values():
            self._plain_columns[first : first + rows * size] = False

        observations = {}
        if self._plain_columns.any():
            shape = (int(self._plain_columns.sum()),)
            observations["vector"] = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
        for name, (_, rows, size) in self._entities.items():
            observations[name] = gym.spaces.Box(-np.inf, np.inf, (rows, size), np.float32)
        for name, shape in self.layout.images.items():
            observations[name] = gym.spaces.Box(0, 255, shape, np.uint8)
        actions = {}
        if self.layout.continuous:
            actions["continuous"] = gym.spaces.Box(-1, 1, (self.layout.continuous,), np.float32)
        if self.layout.branches:
            actions["discrete"] = gym.spaces.MultiDiscrete(self.layout.branches)
        self._continuous = self.layout.continuous
        self._branches = self.layout.branches
        self._has_parts = bool(self.layout.images or self._entities)
        self.single_observation_space = (
            gym.spaces.Dict(observations) if self._has_parts else observations["vector"]
        )
        self.single_action_space = (
            gym.spaces.Dict(actions) if len(actions) > 1 else next(iter(actions.values()))
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # Gymnasium's interface

    def reset(self, *, seed=None, options=None):
        """Start new episodes. The first call after construction returns the observations of the first episodes."""
        if seed is not None and seed != self.seed:
            instead = f"{type(self).__name__}(..., seed={seed})"
            raise ValueError(
                f"reset(seed={seed}): the seed is set when the players start, use {instead}"
            )
        if not self._fresh:
            if self._waiting:
                self.step_wait()
            self._clear()
            self._send(reset=True)
            self._receive()
            self._restarted = None  # no decision was pending
        elif self._waiting:
            self._receive()
        self._fresh = False
        return self._copy_obs(), self._make_infos()

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions):
        """Send the actions and return at once. The players simulate while the caller does something else."""
        continuous, discrete = self._check_actions(actions)
        self._pending |= self._ready
        self._new_step()
        self._send(continuous, discrete)

    def step_wait(self):
        """Return what `step` returns, for the actions of the last `step_async`."""
        self._receive()
        if time.monotonic() > self._log_due_at:
            self._log_due_at = time.monotonic() + LOG_INTERVAL
            for player in self.players:
                player.check_log()
        self._returns += self._rewards
        self._lengths += self._closed
        return (
            self._copy_obs(),
            self._rewards,
            self._terminated,
            self._truncated,
            self._make_infos(),
        )

    def close_extras(self, **kwargs):
        self.close_players()

    def _check_actions(self, actions):
        """Return the continuous and the discrete actions as arrays, None for a kind that the agents do not have."""
        if not isinstance(actions, dict):
            actions = {"discrete" if self._branches else "continuous": actions}
        continuous = actions.get("continuous")
        discrete = actions.get("discrete")
        if self._continuous:
            continuous = np.asarray(continuous)
            expected = (self.num_envs, self._continuous)
            if continuous.shape != expected:
                raise ValueError(
                    f"actions have shape {continuous.shape}, not {expected}: pass one row per slot"
                )
            finite = np.isfinite(continuous)
            if not finite.all() and not finite[self._ready].all():
                slot = np.flatnonzero(self._ready & ~finite.all(1))[0]
                raise ValueError(f"the action of slot {slot} is not finite: {continuous[slot]}")
        if self._branches:
            discrete = np.asarray(discrete)
            expected = (self.num_envs, len(self._branches))
            if discrete.shape != expected:
                raise ValueError(
                    f"discrete actions have shape {discrete.shape}, not {expected}: pass one row per slot"
                )
            allowed = (discrete >= 0) & (discrete < self._branches)
            if not allowed[self._ready].all():
                raise ValueError(
                    f"discrete actions must be at least 0 and below the branch sizes {self._branches}"
                )
        return continuous, discrete

    def _copy_obs(self):
        return self._unwrap({name: array.copy() for name, array in self._obs.items()})

    def _unwrap(self, observations):
        """Return the observation of the spaces: the vector itself if there are neither images nor entities."""
        if not self._has_parts:
            return observations["vector"]
        return self._separate(observations) if self._entities else observations

    def _separate(self, observations):
        """Take the entities out of the vector, of one agent or of several."""
        vector = observations["vector"]
        parts = {}
        if self._plain_columns.any():
            parts["vector"] = vector[..., self._plain_columns]
        for name, (first, rows, size) in self._entities.items():
            columns = vector[..., first : first + rows * size]
            parts[name] = columns.reshape(*vector.shape[:-1], rows, size)
        images = {name: observations[name] for name in self.layout.images}
        return parts | images

    def _make_infos(self):
        infos = {"ready": self._ready.copy(), "closed": self._closed}
        if self._restarted is not None:
            infos["restarted"] = self._restarted
        if self._branches:
            infos["action_mask"] = self._mask
        if self._statistics:
            infos["stats"] = {name: aggregate(values) for name, values in self._statistics.items()}
            self._statistics = {}
        for slot, final_obs in self._final_obs.items():
            episode = {"r": self._returns[slot], "l": self._lengths[slot]}
            self._count_short(self._lengths[slot])
            self._add_info(
                infos, {"final_obs": final_obs, "final_info": {"episode": episode}}, slot
            )
            self._returns[slot] = 0
            self._lengths[slot] = 0
        if self._success:
            infos["is_success"] = self._success
        return infos

    def _count_short(self, length):
        """Print a notice after many episodes of one decision: in most games they are a mistake."""
        self._short_episodes = self._short_episodes + 1 if length <= 1 else 0
        if self._short_episodes == MANY_EPISODES:
            what = f"{MANY_EPISODES} episodes in a row have ended with their first decision"
            fix = "check that a new episode resets what ends it"
            self.players[0].announce("short episodes", f"{self.path}: {what}: {fix}")

    # Exchange with the players

    @close_players_on_error
    def _send(self, continuous=None, discrete=None, reset=False):
        """Send the actions, or the request to start new episodes, to all players. `_receive` waits for the answers."""
        self._check_open()
        self._fresh = False
        self._waiting = self._deferred
        self._deferred = {}
        deferred = list(self._waiting.values())
        for player in list(self.players):
            if player in deferred:  # it still has to answer the actions of an earlier step
                continue
            try:
                if reset:
                    player.slots.clear()
                    player.reset()
                else:
                    slots = player.requesting
                    player.send_actions(
                        None if continuous is None else continuous[slots],
                        None if discrete is None else discrete[slots],
                    )
                self._waiting[player.wire.sock] = player
            except PlayerGone as error:
                self._restart(player, error)

    @close_players_on_error
    def _receive(self):
        """Receive messages from all players until each of them has an agent that requests a decision."""
        self._check_open()
        deadline = time.monotonic() + self.timeout
        waiting = self._waiting
        while waiting:
            arrived = list(waiting) if len(waiting) == 1 else self._wait_for_any()
            if not arrived:
                sock, player = next(iter(waiting.items()))
                del waiting[sock]
                player.wire.gave_up = True
                self._restart(player, player.no_answer())
            for sock in arrived:
                player = waiting[sock]
                try:
                    is_ready = self._receive_from(player, deadline)
                except PlayerGone as error:
                    del waiting[sock]
                    self._restart(player, error)
                    continue
                if is_ready:
                    del waiting[sock]
                    player.failures = 0

    def _wait_for_any(self):
        """Return the sockets of the players that have answered. The list is empty if none did before the timeout."""
        started = time.monotonic()
        arrived = [s for s, player in self._waiting.items() if player.wire.has_message()]
        while not arrived and (left := started + self.timeout - time.monotonic()) > 0:
            arrived, _, _ = select.select(self._waiting, [], [], min(left, SLICE))
            if not arrived:
                self._check_stop(started)
                for player in self._waiting.values():
                    player.check_log()
        return arrived

    def _check_stop(self, started):
        """End the wait for the players that began at `started` if the run was asked to stop."""
        try:
            waits.check_stop(started)
        except KeyboardInterrupt:
            for player in self._waiting.values():  # do not wait for them when they are closed
                player.wire.gave_up = True
            raise

    def _receive_from(self, player, deadline):
        """Receive one message of a player. Return whether this step waits no longer for the player."""
        message = player.receive()
        if message is None:  # it goes on when the agents of the other players have acted
            self._deferred[player.wire.sock] = player
            return True
        self._apply(player, message)
        if message.agents:
            return True
        if time.monotonic() > deadline:
            raise player.error(
                f"has had no agent of {self.behavior} that requests a decision for {self.timeout:g} s"
            )
        # If an agent ends between two decisions, Unity sends that at once, and continues after an answer.
        player.send_actions()
        return False

    def _check_open(self):
        if not self.players:
            raise self.Error("the env is closed")

    @exit_on_signals()
    def _restart(self, player, error):
        """Replace a player that crashed or hangs by a new one, whose agents get the same slots.

        Raise `error` if the player was restarted `max_restarts` times in a row.
        """
        slots = player.slots.all
        while True:
            player = self._relaunch(player, error)
            player.slots = Slots(slots)
            try:
                player.connect()
                self._meet(player)
                if player.num_agents != len(slots) and player.fixed_agents:
                    raise self.Error(
                        f"{player.name} has {player.num_agents} agents, and had {len(slots)}"
                    )
                self._drop_episodes(slice(slots.start, slots.stop))
                self._begin(player)
                return
            except PlayerGone as next_error:
                error = next_error

    def _relaunch(self, player, error):
        """Close a player that was lost because of `error`, and return a new one that is not connected yet.

        Raise `error` if the player was restarted `max_restarts` times in a row.
        """
        failures = player.failures + 1
        if failures > self.max_restarts:
            raise error
        attempt = f"attempt {failures} of {self.max_restarts}"
        print(f"\n{error}; restarting it ({attempt})", flush=True)
        player.close()
        self.restarts += 1
        with defer_signals():
            new_player = self._launch(player.worker)
            self.players[self.players.index(player)] = new_player
        new_player.failures = failures
        return new_player

    # Arrays of the current step

    def _clear(self):
        """Forget all episodes."""
        self._slot_numbers = np.arange(self.num_envs)
        self._pending = np.zeros(self.num_envs, bool)  # has an action whose reward has not arrived
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, int)
        self._new_step()

    def _new_step(self):
        """Make new arrays for each step, because the caller may keep the old ones."""
        self._rewards = np.zeros(self.num_envs)
        self._terminated = np.zeros(self.num_envs, bool)
        self._truncated = np.zeros(self.num_envs, bool)
        self._closed = np.zeros(self.num_envs, bool)
        self._ready = np.zeros(self.num_envs, bool)
        self._restarted = None
        self._final_obs = {}
        self._success = {}
        if self._branches:
            self._mask = np.ones((self.num_envs, sum(self._branches)), bool)

    def _drop_episodes(self, slots):
        """Forget the episodes of a player that was lost, with everything that it has sent in this step."""
        for array in (self._ready, self._pending, self._closed, self._terminated, self._truncated):
            array[slots] = False
        for array in (self._rewards, self._returns, self._lengths):
            array[slots] = 0
        for slot in range(slots.start, slots.stop):
            self._final_obs.pop(slot, None)
            self._success.pop(slot, None)
        if self._restarted is None:
            self._restarted = np.zeros(self.num_envs, bool)
        self._restarted[slots] = True

    def _apply(self, player, message):
        """Enter a message into the arrays of this step."""
        for name, values in message.statistics.items():
            self._statistics.setdefault(name, []).extend(values)
            if values[-1][1] == "sum":
                self.sums.add(name)

        # Ends first: an agent can end and request the first decision of its next episode in one message.
        for end in message.ends:
            slot = player.slots.release(end.agent)
            if (
                slot is not None and self._pending[slot]
            ):  # otherwise it ended before its first decision
                self._end_episode(player, slot, end)

        if message.agents:
            slots = self._assign_slots(player, message.agents)
            self._close_decisions(player, message.agents, slots, message.rewards)
            for name, rows in message.observations.items():
                self._obs[name][slots] = rows
            if message.action_masks is not None:
                self._mask[slots] = message.action_masks
            self._ready[slots] = True
            player.requesting = slots

    def _assign_slots(self, player, agents):
        try:
            return player.slots.assign(agents)
        except LookupError:
            what = f"{player.name} has more agents than its {len(player.slots.all)} slots"
            raise self.Error(f"{what}: set a larger --max-agents") from None
        except ValueError:
            (agent, _), *_ = Counter(agents).most_common(1)
            what = f"{player.name}: agent {agent} is in one message twice"
            raise self.Error(f"{what}: every agent needs its own id") from None

    def _close_decisions(self, player, agents, slots, rewards):
        """Assign rewards to the pending decisions. A reward without a pending decision is dropped."""
        if found := find_invalid(rewards):
            row, _ = found
            reward = describe(rewards[row])
            raise self.Error(f"{player.name}, agent {agents[row]}: its reward is {reward}")
        pending = self._pending[slots]
        if not pending.all():
            rewards = rewards[pending]
            slots = self._slot_numbers[slots][pending]
        self._pending[slots] = False
        self._closed[slots] = True
        self._rewards[slots] = rewards

    def _end_episode(self, player, slot, end):
        if not abs(end.reward) <= LARGEST:  # NaN fails this too
            reward = describe(end.reward)
            raise self.Error(f"{player.name}, agent {end.agent}: its reward is {reward}")
        self._pending[slot] = False
        self._closed[slot] = True
        self._rewards[slot] = end.reward
        self._truncated[slot] = end.truncated
        self._terminated[slot] = not end.truncated
        final_obs = end.observation
        if final_obs is None:
            final_obs = {name: array[slot].copy() for name, array in self._obs.items()}
        self._final_obs[slot] = self._unwrap(final_obs)
        if end.success is not None:
            self._success[slot] = end.success


class Slots:
    """The slots of one player, and which agent has which of them.

    When the episode of an agent ends, its slot becomes free. The agent gets the same slot for its next episode, unless
    a new agent has taken the slot in between.
    """

    def __init__(self, slots):
        self.all = slots
        self.clear()

    def clear(self):
        """Take the slots from all agents."""
        self.owner = dict.fromkeys(self.all)  # from each slot to its agent
        self.slot_of = {}  # from each agent to its slot
        self.free = dict.fromkeys(self.all)  # the slots that a new agent can get, in this order
        self.released = []  # the slots that were freed since the last call of `assign`
        self.last_agents = None  # the argument of the last call of `assign`
        self.last_slots = None  # and its result

    def assign(self, agents):
        """Return the slots of agents that request a decision; new agents get a free slot.

        The slots are a slice if they are consecutive, because this is faster, and an array otherwise. Raise LookupError
        if there is no free slot, and ValueError if an agent appears twice.
        """
        if agents != self.last_agents:
            slots = [self._assign(agent) for agent in agents]
            if len(set(slots)) < len(slots):
                raise ValueError
            first = slots[0]
            last = slots[-1]
            are_consecutive = slots == list(range(first, last + 1))
            self.last_slots = slice(first, last + 1) if are_consecutive else np.array(slots)
            self.last_agents = agents
        else:  # as in most messages: all agents still have their slots, but some may have ended in between
            for slot in self.released:
                if self.owner[slot] in agents:
                    self.free.pop(slot, None)
        self.released = []
        return self.last_slots

    def _assign(self, agent):
        slot = self.slot_of.get(agent)
        if slot is None:
            if not self.free:
                raise LookupError
            slot = next(iter(self.free))
            self.slot_of.pop(self.owner[slot], None)
            self.slot_of[agent] = slot
            self.owner[slot] = agent
        self.free.pop(slot, None)
        return slot

    def release(self, agent):
        """Free the slot of an agent whose episode ended, as the last one to be given to another agent. Return it."""
        slot = self.slot_of.get(agent)
        if slot is not None:
            self.free.pop(slot, None)
            self.free[slot] = None
            self.released.append(slot)
        return slot


def aggregate(values):
    """Reduce the values of one statistic in one step to a number; those of a histogram stay a list."""
    numbers = [number for number, _ in values]
    method = values[-1][1]
    if method == "average":
        return float(np.mean(numbers))
    if method == "sum":
        return float(np.sum(numbers))
    if method == "histogram":
        return numbers
    return numbers[-1]


def describe_ended(infos, slot):
    """Return the return and length of the episode that has ended in a slot, and whether it was a success if the game
    reports it."""
    episode = infos["final_info"]["episode"]
    described = {"episode": {"r": float(episode["r"][slot]), "l": int(episode["l"][slot])}}
    if slot in infos.get("is_success", {}):
        described["is_success"] = infos["is_success"][slot]
    return described


def list_slots(mask):
    """Return the first slots of a boolean array as text."""
    slots = np.flatnonzero(mask)
    return ", ".join(map(str, slots[:5])) + (", ..." if len(slots) > 5 else "")


def save_first_images(envs, obs, folder):
    """Write the images of the first slot to a folder as PNGs: the first three channels, or one."""
    if not envs.layout.images:
        raise ValueError(f"--save-images {folder}: the agents have no images")
    for name in envs.layout.images:
        pixels = obs[name][0]
        pixels = pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
        path = Path(folder, f"{safe}.png")
        Path(folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        print(f"Wrote {path}")


def demo(make_envs, steps, seed, trained=None, images=None):
    """Step an env with random actions and print the number of decisions per second.

    `trained` (compare.Trained) compares the observations with those of a training run, whose policy acts if it was
    exported. `images` is a folder to which an image of each camera is written.
    """
    with closing(make_envs()) as envs:
        print(f"{envs.behavior}: {envs.num_envs} agent{'s' if envs.num_envs > 1 else ''}")
        print(f"observations {envs.single_observation_space}")
        print(f"actions {envs.single_action_space}")
        envs.action_space.seed(seed)
        obs, infos = envs.reset()
        if images:
            save_first_images(envs, obs, images)
        policy = trained.start(envs.layout.input_names, envs.layout.entities) if trained else None
        decisions = 0
        returns = []
        start = time.perf_counter()
        for _ in range(steps):
            ready = infos["ready"]
            vectors = obs.get("vector") if isinstance(obs, dict) else obs
            decisions += ready.sum()
            if trained:
                trained.update(vectors[ready])
            actions = policy(vectors) if policy else envs.action_space.sample()
            obs, _, _, _, infos = envs.step(actions)
            if "final_info" in infos:
                returns.extend(infos["final_info"]["episode"]["r"][infos["_final_info"]])
        seconds = time.perf_counter() - start
        mean = f"mean return {np.mean(returns):.2f}" if returns else "no episode ended"
        rate = f"{decisions} decisions in {seconds:.1f} s: {decisions / seconds:.0f} per second"
        print(f"{rate}; {len(returns)} episodes, {mean}")
        if decisions == steps * envs.num_envs:
            print("All agents request a decision in every step")
        else:
            share = f"{decisions / steps:.1f} of {envs.num_envs} slots"
            print(f"Decision periods differ or slots are free: {share} request one per step")
        if trained:
            print(trained.report(envs.layout.input_names))
