"""Godot games with the Godot RL Agents plugin as one gymnasium VectorEnv: one slot per agent, over any number of games.

    python godot_vec_env.py --path GodotDiscs                random actions in a bundled scene, and how fast that is
    envs = GodotVecEnv("./game.x86_64", num_players=2)       an exported game, a folder with project.godot, or "editor"
    obs, infos = envs.reset()
    obs, rewards, terminated, truncated, infos = envs.step(actions)

The contract is UnityVecEnv's. In a Godot game all agents decide at the same time: `infos["ready"]` is always True for
everybody, and `infos["closed"]` after every step, but for the agents of a game that was started anew
(`infos["restarted"]`). Ended agents start again by themselves (SAME_STEP): `infos["final_obs"]` is the last
observation, `infos["final_info"]["episode"]` the return "r" and the length in decisions "l". `step_async` and
`step_wait` are the two halves of `step`: games simulate in between.

The protocol has one `done`, and the observation beside it is the next episode's. An agent's get_info() can say more:

    "terminal_observation": obs      the last observation; without it `final_obs` is the one before it
    "TimeLimit.truncated": true      this end is a time limit; without it every end is a termination
    "is_success": true               infos["is_success"], by slot, when an episode ends
    "action_mask": [1, 0, 1]         infos["action_mask"]: which discrete choices are allowed now, all actions in a row
    "stats": {"name": 0.5}           infos["stats"]: means over the agents

Observations are concatenated into one Box; with images the space is a Dict of "vector" and uint8 images (height, width,
channel). Discrete actions make a MultiDiscrete, both kinds a Dict of "continuous" and "discrete".
"""

import json
import math
import os
import select
import shutil
import sys
import time
import weakref
from contextlib import closing, contextmanager
from pathlib import Path

import gymnasium as gym
import numpy as np
import orjson
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs import GODOT_SCENES
from processes import (
    LARGEST_MESSAGE,
    PlayerError,
    Process,
    Stream,
    close_all,
    find_build,
    one_line,
    orderly_exit,
    signals_later,
)

EDITOR_PORT = 11008  # where a game that nobody gave a port looks for Python
TICKS = 60  # physics ticks in a second of game time, as the plugin sets it
MOST = 100_000  # agents of a game, numbers of an observation, actions of an agent
NONSENSE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)  # what reading it can raise


class GodotError(PlayerError):
    """Of a Godot game."""


class GodotGone(GodotError):
    """The game crashed or hangs: a new one may do better."""


def find_godot(path):
    given = os.environ.get("GODOT")
    godot = given or shutil.which("godot") or shutil.which("godot4")
    if not godot:
        get = "get one from godotengine.org or your system's packages, put it on the PATH as `godot`, or set $GODOT"
        raise GodotError(f"{path} is run by Godot 4, and there is none here: {get}")
    if given and not (os.path.isfile(given) and os.access(given, os.X_OK)):
        raise GodotError(f"$GODOT is {given}, and no program is there")
    return godot


def find_game(path):
    """The command that starts a game: a bundled scene by its id, a project by its folder, or an exported game."""
    if path in GODOT_SCENES:
        folder = Path(__file__).resolve().parent / "envs" / "godot"
        return [find_godot(path), "--path", str(folder), f"res://{path.removeprefix('Godot').lower()}.tscn"]
    folder = Path(path).parent if Path(path).name == "project.godot" else Path(path)
    if (folder / "project.godot").is_file():
        return [find_godot(path), "--path", str(folder.resolve())]
    if found := find_build(path, GodotError):
        return [found]
    hint = "Give an exported game, or the folder with its project.godot."
    raise GodotError(f"{path}: no game there. {hint} Bundled scenes: {', '.join(GODOT_SCENES)}.")


class Wire(Stream):
    """Messages are JSON behind their length in four bytes. The game connects, Python speaks first."""

    awake, piece = 0, 1 << 16  # a step of a game takes a millisecond or more: who waits sleeps

    def send(self, message, timeout=None):
        data = orjson.dumps(message)
        self._write(len(data).to_bytes(4, "little") + data, None if timeout is None else time.monotonic() + timeout)

    def receive(self, timeout=None):
        deadline, buffer = None if timeout is None else time.monotonic() + timeout, self.buffer
        while len(buffer) < 4:
            self._fill(deadline)
        end = 4 + int.from_bytes(buffer[:4], "little")
        if end > LARGEST_MESSAGE:
            raise ConnectionError(f"its message is larger than {LARGEST_MESSAGE >> 20} MiB")
        while len(buffer) < end:
            self._fill(deadline)
        data = bytes(memoryview(buffer)[4:end])
        del buffer[:end]
        try:
            message = orjson.loads(data)
        except ValueError:  # or an infinite number, which Godot writes as 1e99999: slower, and takes it
            message = read_slowly(data)
        if not isinstance(message, dict):
            raise ConnectionError("its message is not a JSON object")
        return message


def read_slowly(data):
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"its message is not JSON ({error})") from None


class Game(Process):
    """One Godot process and the wire to it."""

    def __init__(self, path, worker, base_port, timeout, args):
        found = None if path == "editor" else find_game(path)
        port = (0 if found else EDITOR_PORT) if base_port is None else base_port + worker
        command = found and (lambda port: [*found, *args, f"--port={port}"])
        super().__init__(f"game {worker} ({path})", command, port, base_port, timeout, GodotError, GodotGone)
        self.worker, self.failures = worker, 0  # failures in a row
        if command is None:
            print(f"Waiting for Play in the Godot editor (port {self.port}) ...", flush=True)

    @property
    def hint(self):
        """A script that fails does not end a game: it says so, and is silent from then on."""
        errors = [line for line in self.last_words() if "ERROR" in line] if self.process else []
        return errors[-1].strip() if errors else "has its scene a Sync node, in training mode?"

    @property
    def late(self):
        return f": {self.hint}"

    def connect(self):
        self.accept(lambda sock, seconds: Wire(sock))
        self.send({"type": "handshake", "major_version": "0", "minor_version": "7"})
        self.send({"type": "env_info"})

    def receive(self, kind):
        message = super().receive()
        if message.get("type") != kind:
            raise self.error(f"answers {message.get('type')!r}, and {kind!r} was expected")
        return message

    def close(self):
        super().close({"type": "close"})


class GodotVecEnv(VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    engine = "godot"

    @orderly_exit()
    def __init__(
        self, path, *, policy=None, num_players=1, seed=0, base_port=None, action_repeat=None, speedup=1,
        real_time=False, player_args=(), headless=True, timeout=60, max_restarts=0,
    ):  # fmt: skip
        """
        path: a bundled scene's id, an exported game, a project's folder, or "editor"
        policy: which policy_name to train, where there are several; agents of the others act at random
        seed: game i gets seed + i, at its start
        base_port: game i connects to base_port + i; if None, to a free port
        action_repeat: physics ticks per decision; if None, the Sync node's
        speedup: of the game's clock; without real_time every game runs as fast as it can whatever this says
        real_time: in a window, and no faster than the clock
        player_args: more command line arguments for the games
        headless: without a window; cameras need one
        timeout: seconds to wait for a game
        max_restarts: how often in a row a game that crashes or hangs is started anew
        """
        if num_players < 1 or (path == "editor" and num_players > 1):
            why = "there must be at least one game, and there is only one editor"
            raise ValueError(f"--num-players {num_players}: {why}")
        if path != "editor":
            find_game(path)
        headless = headless and not real_time
        if not headless and path != "editor" and sys.platform == "linux":
            if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                raise GodotError(f"{path}: a window or a camera needs a display: start this under xvfb-run")
        args = ["--headless"] if headless else ["--audio-driver", "Dummy"]
        if not real_time:  # a frame is a tick, and the next one follows at once
            args += ["--fixed-fps", str(round(TICKS * speedup)), "--disable-vsync"]
        if not real_time or speedup != 1:  # else the Sync node's
            args.append(f"--speedup={speedup}")
        if action_repeat:
            args.append(f"--action_repeat={action_repeat}")
        self.policy, self.seed, self.timeout, self.fresh = policy, seed, timeout, True
        self.max_restarts, self.restarts, self.sums = max_restarts, 0, set()
        self.players, self._waiting, self._spaces = [], {}, None
        self._settings = path, base_port, [*args, *player_args]
        self.close_players = weakref.finalize(self, close_all, self.players)  # at the latest when Python ends
        try:
            for worker in range(num_players):
                with signals_later():
                    self.players.append(self._launch(worker))
            for game in self.players:
                game.connect()
            for game in self.players:
                self._meet(game)
            self._make_spaces()
            self._new_step()
            for game in self.players:
                self._begin(game)
        except BaseException:
            self.close_players()
            raise

    # gymnasium's interface

    def reset(self, *, seed=None, options=None):
        """Start all episodes anew. The first call after construction finds them new already."""
        if seed is not None and seed != self.seed:
            raise ValueError(f"reset(seed={seed}): a game takes its seed when it starts: GodotVecEnv(..., seed={seed})")
        if not self.fresh:
            if self._waiting:
                self.step_wait()
            self._new_step()
            self._returns[:], self._lengths[:] = 0, 0
            self._ask("reset", lambda game: {"type": "reset"})
            self._listen()
            self._restarted[:] = False  # nothing was open
        self.fresh = False
        return self._copy_obs(), self._infos()

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions):
        """Send the actions, so that the games simulate while the caller does something else."""
        rows = self._check(actions)
        self._new_step()
        self._ask("step", lambda game: {"type": "action", "action": self._actions(game, *rows)})

    def step_wait(self):
        self._listen()
        self._returns += self._rewards
        self._lengths += self._closed
        return self._copy_obs(), self._rewards, self._terminated, self._truncated, self._infos()

    def close_extras(self, **kwargs):
        self.close_players()

    def _check(self, actions):
        parts = actions if isinstance(actions, dict) else {"discrete" if self._branches else "continuous": actions}
        widths = {"continuous": self._continuous, "discrete": len(self._branches)}
        continuous, discrete = (np.asarray(parts.get(kind)) if width else None for kind, width in widths.items())
        for given, width in zip((continuous, discrete), widths.values(), strict=True):
            if width and given.shape != (self.num_envs, width):
                raise ValueError(f"actions have shape {given.shape}, not {(self.num_envs, width)}: one row per slot")
        if self._continuous and not np.isfinite(continuous).all():
            slot = np.flatnonzero(~np.isfinite(continuous).all(1))[0]
            raise ValueError(f"the action of slot {slot} is not finite: {continuous[slot]}")
        if self._branches and not ((discrete >= 0) & (discrete < self._branches)).all():
            raise ValueError(f"discrete actions must be below the branches' sizes {self._branches}")
        return continuous, discrete

    def _copy_obs(self):
        return self._unwrap({key: value.copy() for key, value in self._obs.items()})

    def _unwrap(self, observations):
        return observations if self._images else observations["vector"]

    def _infos(self):
        infos = {"ready": np.ones(self.num_envs, bool), "closed": self._closed}
        if self._restarted.any():
            infos["restarted"] = self._restarted
        if self._branches:
            infos["action_mask"] = self._mask
        if self._stats:
            infos["stats"] = {name: float(np.mean(values)) for name, values in self._stats.items()}
        for slot, final in self._final.items():
            episode = {"r": self._returns[slot], "l": self._lengths[slot]}
            self._add_info(infos, {"final_obs": final, "final_info": {"episode": episode}}, slot)
            self._returns[slot], self._lengths[slot] = 0, 0
        if self._success:
            infos["is_success"] = self._success
        return infos

    # The exchange

    def _new_step(self):
        n = self.num_envs
        self._rewards, self._final, self._success, self._stats = np.zeros(n), {}, {}, {}
        self._terminated, self._truncated = np.zeros(n, bool), np.zeros(n, bool)
        self._closed, self._restarted = np.zeros(n, bool), np.zeros(n, bool)
        self._mask = np.ones((n, sum(self._branches)), bool)

    def _ask(self, reply, message):
        """All games at once."""
        if not self.players:
            raise GodotError("the env is closed")
        self.fresh, self._waiting, self._reply = False, {}, reply
        with self._no_way_back():
            for game in list(self.players):
                try:
                    game.send(message(game))
                    self._waiting[game.wire.sock] = game
                except GodotGone as error:
                    self._restart(game, error)

    def _listen(self):
        """Take the answers, in whatever order they come."""
        waiting = self._waiting
        with self._no_way_back():
            while waiting:
                arrived = list(waiting) if len(waiting) == 1 else select.select(waiting, [], [], self.timeout)[0]
                for sock in arrived or list(waiting)[:1]:
                    game = waiting.pop(sock)
                    try:
                        if not arrived:
                            raise game.silent()
                        self._take(game, game.receive(self._reply))
                        game.failures = 0
                    except GodotGone as error:
                        self._restart(game, error)

    @contextmanager
    def _no_way_back(self):
        """A message may be half read when something goes wrong: the games are closed then."""
        try:
            yield
        except BaseException:
            self.close_players()
            raise

    @orderly_exit()
    def _restart(self, game, error):
        """A new game in the place of one that is gone. What its agents had begun is nobody's."""
        slots, failures = game.slots, game.failures
        while True:
            failures += 1
            if failures > self.max_restarts:
                raise error
            print(f"\n{error}; starting it again ({failures} of {self.max_restarts} times in a row)", flush=True)
            game.close()
            self.restarts += 1
            try:
                with signals_later():
                    new = self.players[self.players.index(game)] = self._launch(game.worker)
                game, game.slots, game.failures = new, slots, failures
                game.connect()
                self._meet(game)
                self._begin(game)
            except GodotGone as again:
                error = again
                continue
            for array in (self._closed, self._terminated, self._truncated, self._rewards, self._returns, self._lengths):
                array[slots] = 0
            for slot in range(slots.start, slots.stop):
                self._final.pop(slot, None)
                self._success.pop(slot, None)
            self._restarted[slots] = True
            return

    def _launch(self, worker):
        path, base_port, args = self._settings
        seed = self.seed + worker + 1000 * self.restarts  # started anew: not the same episodes again
        return Game(path, worker, base_port, self.timeout, [*args, f"--env_seed={seed}"])

    def _begin(self, game):
        game.send({"type": "reset"})
        self._take(game, game.receive("reset"))

    def _actions(self, game, continuous, discrete):
        """A dict for each agent of the game; nobody trains those of other policies, and they act at random."""
        columns = [continuous[game.slots, part].tolist() for _, part in self._floats]
        columns += [discrete[game.slots, column].tolist() for _, column in self._choices]
        names = [name for name, _ in (*self._floats, *self._choices)]
        mine = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if not game.others:
            return mine
        out = dict(zip(game.mine, mine, strict=True))
        for agent, spaces in game.others:
            out[agent] = {
                name: int(game.rng.integers(size)) if discrete else game.rng.uniform(-1, 1, size).tolist()
                for name, (size, discrete) in spaces.items()
            }
        return [out[agent] for agent in range(game.size)]

    def _take(self, game, message):
        """What came of the actions, first; then what is seen now."""
        slots, told = game.slots, message.get("info") or [{}] * game.size
        for name in ("obs", "info", "reward", "done") if message["type"] == "step" else ("obs", "info"):
            given = told if name == "info" else message.get(name)
            if not isinstance(given, list) or len(given) != game.size:
                what = f"{len(given)} entries" if isinstance(given, list) else "no list"
                raise GodotError(f"{game.name}: its {name!r} has {what}, and there are {game.size} agents")
        told = [info if isinstance(info, dict) else {} for info in told] if any(told) else told
        seen = self._observe(game, message["obs"], game.mine)
        if message["type"] == "step":
            self._close(game, message, told)
        if any(told):
            for slot, agent in enumerate(game.mine, slots.start):
                self._note(game, slot, agent, told[agent])
        for key, rows in seen.items():
            self._obs[key][slots] = rows

    def _close(self, game, message, told):
        slots = game.slots
        self._rewards[slots] = self._numbers(game, game.mine, "reward", [message["reward"][i] for i in game.mine])
        self._closed[slots] = True
        if not any(message["done"]):
            return
        for slot, agent in enumerate(game.mine, slots.start):
            if message["done"][agent]:
                info = told[agent] or {}
                self._truncated[slot] = bool(info.get("TimeLimit.truncated"))
                self._terminated[slot] = not self._truncated[slot]
                final = {key: value[slot : slot + 1].copy() for key, value in self._obs.items()}
                if info.get("terminal_observation") is not None:
                    final = self._observe(game, {agent: info["terminal_observation"]}, [agent])
                self._final[slot] = self._unwrap({key: value[0] for key, value in final.items()})
                if "is_success" in info:
                    self._success[slot] = bool(info["is_success"])

    def _note(self, game, slot, agent, info):
        """What else an agent's get_info() says."""
        if self._branches and info.get("action_mask") is not None:
            mask = info["action_mask"]
            if not isinstance(mask, list) or len(mask) != self._mask.shape[1]:
                what = f"its action_mask must have {self._mask.shape[1]} entries, one for each choice"
                raise GodotError(f"{game.name}, agent {agent}: {what}")
            self._mask[slot] = [bool(x) for x in mask]
        if isinstance(info.get("stats"), dict):
            for name, value in info["stats"].items():
                (value,) = self._numbers(game, [agent], f"stats {name}", [value])
                self._stats.setdefault(one_line(name), []).append(value)

    def _numbers(self, game, agents, what, values):
        """Godot writes what is not a number as null."""
        try:
            numbers = np.array(values, np.float64)
            if numbers.shape != (len(values),):
                raise ValueError
        except NONSENSE:
            raise GodotError(f"{game.name}: its {what} is not a list of numbers") from None
        if not np.isfinite(numbers).all():
            row = np.flatnonzero(~np.isfinite(numbers))[0]
            raise GodotError(f"{game.name}, agent {agents[row]}: its {what} is {numbers[row]}")
        return numbers

    # What the agents see and do

    def _meet(self, game):
        """Who is in a game, and what they see and do: all games must be alike."""
        info = game.receive("env_info")
        try:
            size = int(info["n_agents"])
            if not 0 < size <= MOST:
                raise ValueError(f"{size} agents")
            names = [str(name) for name in info.get("agent_policy_names") or ["shared_policy"] * size]
            spaces = [
                value if isinstance(value, list) else [value] * size  # before 0.7 one for all
                for value in (info["observation_space"], info["action_space"])
            ]
            if not len(names) == len(spaces[0]) == len(spaces[1]) == size:
                raise ValueError(f"{size} agents, {len(names)} names")
            sees, does = (
                [read(agent) for agent in all] for read, all in zip((read_seen, read_actions), spaces, strict=True)
            )
        except NONSENSE as error:
            raise GodotError(f"{game.name}: who its agents are, and their spaces, makes no sense ({error})") from None
        wanted = sorted(set(names) if self.policy is None else {self.policy} & set(names))
        if len(wanted) != 1:
            has = "several policies, choose one by --behavior" if wanted else f"no policy {self.policy}"
            raise GodotError(f"{game.name} has {has}: {', '.join(sorted(set(names)))}")
        (self.policy,) = wanted
        game.size, game.rng = size, np.random.default_rng(self.seed + game.worker)  # for the others
        game.mine = [agent for agent, name in enumerate(names) if name == self.policy]
        game.others = [(agent, does[agent]) for agent, name in enumerate(names) if name != self.policy]
        first = sees[game.mine[0]], does[game.mine[0]]
        self._spaces = self._spaces or first
        for agent in game.mine:
            if (sees[agent], does[agent]) != self._spaces:
                why = "agents of one policy, and all games, must be alike"
                raise GodotError(f"{game.name}, agent {agent} has other observations or actions than the first: {why}")
        if hasattr(game, "slots") and game.slots.stop - game.slots.start != len(game.mine):
            raise GodotError(f"{game.name} has {len(game.mine)} agents, and had {game.slots.stop - game.slots.start}")
        if game.others and game.worker == 0 and not self.restarts:
            others = ", ".join(sorted(set(names) - {self.policy}))
            print(one_line(f"Training {self.policy}; agents of {others} act at random"), flush=True)

    def _make_spaces(self):
        self.num_envs = 0
        for game in self.players:
            game.slots = slice(self.num_envs, self.num_envs + len(game.mine))
            self.num_envs += len(game.mine)
        sees, does = self._spaces
        self._vectors = {name: math.prod(shape) for name, (shape, image) in sees.items() if not image}
        self._images = {name: shape for name, (shape, image) in sees.items() if image}
        self.sensors = [name if name in self._images else self._vectors[name] for name in sees]  # as UnityVecEnv has it
        self.inputs = list(sees)  # their names
        self._floats, self._choices, self._continuous, self._branches = [], [], 0, []
        for name, (size, discrete) in does.items():
            if discrete:
                self._choices.append((name, len(self._branches)))
                self._branches.append(size)
            else:
                self._floats.append((name, slice(self._continuous, self._continuous + size)))
                self._continuous += size
        spaces, actions = {}, {}
        if self._vectors:
            spaces["vector"] = gym.spaces.Box(-np.inf, np.inf, (sum(self._vectors.values()),), np.float32)
        for name, shape in self._images.items():
            spaces[name] = gym.spaces.Box(0, 255, shape, np.uint8)
        if self._continuous:
            actions["continuous"] = gym.spaces.Box(-1, 1, (self._continuous,), np.float32)
        if self._branches:
            actions["discrete"] = gym.spaces.MultiDiscrete(self._branches)
        self.single_observation_space = gym.spaces.Dict(spaces) if self._images else spaces["vector"]
        self.single_action_space = gym.spaces.Dict(actions) if len(actions) > 1 else next(iter(actions.values()))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs = {key: np.zeros((self.num_envs, *space.shape), space.dtype) for key, space in spaces.items()}
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)

    def _observe(self, game, observations, agents):
        """The observations of these agents, one row each."""
        out, vectors = {}, []
        try:
            for name, size in self._vectors.items():
                rows = np.array([observations[agent][name] for agent in agents], np.float32).reshape(len(agents), -1)
                if rows.shape[1] != size:
                    raise ValueError
                vectors.append(rows)
            for name, shape in self._images.items():
                pixels = b"".join(bytes.fromhex(observations[agent][name]) for agent in agents)
                out[name] = np.frombuffer(pixels, np.uint8).reshape(len(agents), *shape)
        except NONSENSE:
            size = shape if name in self._images else f"{size} numbers"
            empty = "; without a display a camera sees nothing" if name in self._images else ""
            what = f"{name!r} of get_obs() is not the {size} that get_obs_space() says{empty}"
            raise GodotError(f"{game.name}, agent {', '.join(map(str, agents[:4]))}: {what}") from None
        if vectors:
            rows = out["vector"] = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
            if not np.isfinite(rows).all():
                row, column = np.argwhere(~np.isfinite(rows))[0]
                where = f"{game.name}, agent {agents[row]}"
                raise GodotError(f"{where}: observation {column} is {rows[row, column]}")
        return out


def read_seen(spaces):
    """Name to shape, and whether it is an image. The plugin's cameras call themselves (channel, height, width), and
    send rows of pixels."""
    out = {}
    for name, space in spaces.items():
        shape = [space["size"]] if isinstance(space["size"], (int, float)) else space["size"]
        shape, image = tuple(map(int, shape)), "2d" in name
        if space.get("space", "box") != "box":
            raise ValueError(f"{name!r} is {space['space']!r}: send it as numbers, one-hot")
        if (name == "vector" and image) or not 0 < math.prod(shape) <= (LARGEST_MESSAGE if image else MOST):
            raise ValueError(f"{name!r} has the size {list(shape)}")
        if image:
            channels = shape[0] if len(shape) == 3 else 5
            shape = (*shape[1:], channels) if channels <= 4 else shape
            if len(shape) != 3:
                raise ValueError(f"{name!r}, an image, has the size {list(shape)}")
        out[name] = shape, image
    if not out:
        raise ValueError("agents observe nothing: give get_obs_space() something")
    return out


def read_actions(spaces):
    """Name to size, and whether it is discrete."""
    out = {name: (int(space["size"]), space["action_type"] == "discrete") for name, space in spaces.items()}
    if not out or min(size for size, _ in out.values()) < 1 or sum(size for size, _ in out.values()) > MOST:
        raise ValueError(f"actions of the sizes {[size for size, _ in out.values()]}")
    return out


def demo(
    path: str = "GodotDiscs", policy: str | None = None, num_players: int = 1, action_repeat: int | None = None,
    real_time: bool = False, headless: bool = True, steps: int = 500, seed: int = 0, player_args: tuple[str, ...] = (),
):  # fmt: skip
    """Step a game with random actions, and say how fast that is.

    Args:
        path: a bundled scene's id, an exported game, a folder with project.godot, or "editor"
        policy: which of the game's policies acts, if it has several
        num_players: how many games to launch
        action_repeat: physics ticks per decision; default: the Sync node's
        real_time: in a window, and no faster than the clock
        headless: without a window; cameras need one
        steps: how often to step
        seed: of the games and of the actions
        player_args: more for the games' command line
    """
    settings = dict(policy=policy, num_players=num_players, action_repeat=action_repeat, real_time=real_time)
    try:
        with closing(GodotVecEnv(path, headless=headless, seed=seed, player_args=player_args, **settings)) as envs:
            print(f"{envs.policy}: {envs.num_envs} agents")
            print(f"observations {envs.single_observation_space}\nactions {envs.single_action_space}")
            envs.action_space.seed(seed)
            envs.reset()
            returns, start = [], time.perf_counter()
            for _ in range(steps):
                *_, infos = envs.step(envs.action_space.sample())
                if "final_info" in infos:
                    returns.extend(infos["final_info"]["episode"]["r"][infos["_final_info"]])
            seconds, decisions = time.perf_counter() - start, steps * envs.num_envs
            mean = f"mean return {np.mean(returns):.2f}" if returns else "none ended"
            rate = f"{decisions} decisions in {seconds:.1f} s: {decisions / seconds:.0f} a second"
            print(f"{rate}; {len(returns)} episodes, {mean}")
    except (GodotError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import tyro

    tyro.cli(demo)
