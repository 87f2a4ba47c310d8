"""A Godot game: a process that speaks the protocol of the plugin Godot RL Agents, and its messages as arrays.

A message is a JSON object behind its length in four bytes. The game connects, then Python sends requests and the game
answers them. `Game` launches the process and exchanges messages with it. `GodotLayout` reads the observations.
"""

import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import orjson

from onefile_rl.engines.limits import describe, find_invalid
from onefile_rl.engines.messages import End, Layout, Message
from onefile_rl.engines.process import (
    LARGEST_MESSAGE,
    PlayerError,
    PlayerGone,
    Process,
    Stream,
    find_build,
    one_line,
)
from onefile_rl.engines.scenes import GODOT_SCENES

NO_SYNC = "check that its scene has a Sync node in training mode"
MOST = 100_000  # agents of a game, numbers in an observation, actions of an agent
INVALID = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)  # raised by invalid messages
LISTS = {
    "reset": ("obs", "info"),
    "step": ("obs", "info", "reward", "done"),
}  # with one entry per agent, by type


class GodotError(PlayerError):
    """An error of a Godot game."""


class GodotGone(GodotError, PlayerGone):
    """The game crashed or hangs. Starting it again may help."""


def find_errors(lines):
    """Return the errors in Godot's output, each with the place in a script where it happened."""
    errors = []
    for i, line in enumerate(lines):
        if not line.startswith(("ERROR:", "SCRIPT ERROR:", "USER ERROR:", "Error:")):
            continue
        if line.startswith("Error: Can't open display"):  # Godot failed to show another error
            continue
        error = line.strip()
        place = lines[i + 1].strip() if i + 1 < len(lines) else ""
        if place.startswith("at: ") and "res://" in place:
            error += f" {place}"
        if "No loader found" in line and ".cs" in line:
            error += ": a C# script needs the .NET edition of Godot"
        errors.append(error)
    return errors


def find_godot(path):
    """Return the Godot executable that runs the project or scene `path`."""
    given = os.environ.get("GODOT")
    godot = given or shutil.which("godot") or shutil.which("godot4")
    if not godot:
        fix = "install it from godotengine.org or your system's packages, put it on the PATH as `godot`, or set $GODOT"
        raise GodotError(f"{path} needs Godot 4, which was not found: {fix}")
    if given and not (os.path.isfile(given) and os.access(given, os.X_OK)):
        raise GodotError(f"$GODOT is {given}, which is not an executable file")
    return godot


def find_game(path):
    """Return the command that starts a bundled scene, given by its id, a project, given by its folder, or a game."""
    if path in GODOT_SCENES:
        folder = Path(__file__).resolve().parents[2] / "envs" / "godot_scenes"
        return [
            find_godot(path),
            "--path",
            str(folder),
            f"res://{path.removeprefix('Godot').lower()}.tscn",
        ]
    folder = Path(path).parent if Path(path).name == "project.godot" else Path(path)
    if (folder / "project.godot").is_file():
        return [find_godot(path), "--path", str(folder.resolve())]
    if build := find_build(path, GodotError):
        return [build]
    hint = "Give an exported game, or the folder with its project.godot."
    raise GodotError(f"{path}: no game found. {hint} Bundled scenes: {', '.join(GODOT_SCENES)}.")


class Wire(Stream):
    """One end of the connection to a game. Messages are dicts."""

    # A step of a game takes a millisecond or more, too long to poll.
    spin_seconds = 0
    chunk_size = 1 << 16

    def send(self, message, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        data = orjson.dumps(message)
        self._write(len(data).to_bytes(4, "little") + data, deadline)

    def receive(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        buffer = self.buffer
        while len(buffer) < 4:
            self._fill(deadline)
        end = 4 + int.from_bytes(buffer[:4], "little")
        if end > LARGEST_MESSAGE:
            raise ConnectionError(f"its message is larger than {LARGEST_MESSAGE >> 20} MiB")
        while len(buffer) < end:
            self._fill(deadline)
        data = bytes(memoryview(buffer)[4:end])
        del buffer[:end]
        message = parse_json(data)
        if not isinstance(message, dict):
            raise ConnectionError("its message is not a JSON object")
        return message


def parse_json(data):
    """Parse with orjson, and with the slower json what orjson rejects: Godot writes infinity as 1e99999."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"its message is not JSON ({error})") from None


class Game(Process):
    """One Godot process and the connection to it. `args` are additional command line arguments, see also Process."""

    kind = "game"
    editor = "Godot"
    editor_port = 11008  # the plugin's default
    fixed_agents = True
    Error = GodotError
    Gone = GodotGone

    def __init__(self, path, worker, base_port, timeout, args, *, seed=0, announced=None):
        command = None
        if path != "editor":
            found = find_game(path)
            command = lambda port: [*found, *args, f"--env_seed={seed}", f"--port={port}"]
        super().__init__(path, command, worker, base_port, timeout, announced)
        self.rng = np.random.default_rng(seed)  # for the agents that are not trained
        self.behavior = None
        self.layout = None
        self.request = None  # the type of the last request, and of its answer: "reset" or "step"

    @property
    def hint(self):
        """A script error does not end a game: Godot prints it, and the game does not answer any more."""
        errors = find_errors(self.log.last_lines()) if self.process else []
        return errors[-1] if errors else NO_SYNC

    @property
    def connect_hint(self):
        """Before a game connects, its first error is the cause of the others."""
        errors = find_errors(self.log.first_lines()) if self.process else []
        return f": {errors[0] if errors else NO_SYNC}"

    def explain_wait(self):
        errors = find_errors(self.log.first_lines()) if self.process else []
        if errors:
            self.announce("not connected", f"{self.name} has not connected yet: {errors[0]}")

    def last_words(self):
        lines = self.log.last_lines()
        if self.wire is None:
            errors = find_errors(self.log.first_lines())
            return errors[0] if errors else super().last_words()
        # The lines below an error, which say where it happened, are indented
        errors = find_errors(lines) if lines and lines[-1].startswith(" ") else []
        return errors[-1] if errors else super().last_words()

    def note_output(self, lines):
        errors = [error for error in find_errors(lines) if error.startswith("SCRIPT ERROR")]
        if errors:
            what = "reports a script error, and the run continues"
            self.announce("script error", f"{self.name} {what}: {errors[0]}")

    # Start

    def connect(self):
        """Wait for the game and request a description of its agents."""
        self.accept(lambda sock, seconds: Wire(sock))
        self.send_message({"type": "handshake", "major_version": "0", "minor_version": "7"})
        self.send_message({"type": "env_info"})

    def meet(self, behavior, layout):
        """Read the description of the agents.

        `behavior` is the policy_name of the agents to train, or None if there is only one. `layout` is that of the
        first game, None for the first game itself.
        """
        info = self.receive_message("env_info")
        try:
            self.size = whole_number(info["n_agents"])  # of all policies
            if not 0 < self.size <= MOST:
                raise ValueError(f"{self.size} agents")
            names = [
                str(name)
                for name in info.get("agent_policy_names") or ["shared_policy"] * self.size
            ]
            observation_spaces = self._one_per_agent(info["observation_space"])
            action_spaces = self._one_per_agent(info["action_space"])
            if not len(names) == len(observation_spaces) == len(action_spaces) == self.size:
                raise ValueError(f"{self.size} agents, {len(names)} names")
            observations = [read_observations(space) for space in observation_spaces]
            actions = [read_actions(space) for space in action_spaces]
        except INVALID as error:
            raise GodotError(
                f"{self.name}: the description of its agents is invalid ({error})"
            ) from None

        matching = [name for name in sorted(set(names)) if behavior in (None, name)]
        if len(matching) != 1:
            has = (
                "several policies, choose one with --behavior"
                if matching
                else f"no policy {behavior}"
            )
            raise GodotError(f"{self.name} has {has}: {', '.join(sorted(set(names)))}")
        (self.behavior,) = matching
        self.agents = [agent for agent, name in enumerate(names) if name == self.behavior]
        self.untrained = [
            (agent, actions[agent]) for agent, name in enumerate(names) if name != self.behavior
        ]
        self.num_agents = len(self.agents)
        first = self.agents[0]
        self.layout = layout or GodotLayout(observations[first], actions[first])
        for agent in self.agents:
            if (observations[agent], actions[agent]) != (
                self.layout.observations,
                self.layout.actions,
            ):
                what = (
                    f"{self.name}, agent {agent} has other observations or actions than the first"
                )
                raise GodotError(f"{what}: all agents of one policy must be alike, in all games")
        if self.untrained:
            others = ", ".join(sorted(set(names) - {self.behavior}))
            self.announce(
                "untrained", f"Training {self.behavior}; agents of {others} act at random"
            )

    def _one_per_agent(self, space):
        """Before version 0.7 of the plugin, all agents share one description."""
        return space if isinstance(space, list) else [space] * self.size

    def start(self):
        """Return the first message."""
        self.reset()
        return self.receive()

    # From Godot

    def receive(self):
        """Return the answer to the last request."""
        message = self.receive_message(self.request)
        message["info"] = message.get("info") or [None] * self.size
        for name in LISTS[self.request]:
            entries = message.get(name)
            if not isinstance(entries, list) or len(entries) != self.size:
                what = f"{len(entries)} entries" if isinstance(entries, list) else "no list"
                raise GodotError(
                    f"{self.name}: its {name!r} has {what}, and there are {self.size} agents"
                )
        infos = self._trained(message["info"])
        infos = self._decode_infos(infos) if any(infos) else None
        observations = self.layout.observe(self._trained(message["obs"]), self.name, self.agents)

        # All agents decide at the same time, so all have a reward and request the next decision.
        ends = []
        if self.request == "reset":
            rewards = np.zeros(self.num_agents)
        else:
            rewards = self._numbers("reward", self._trained(message["reward"]), self.agents)
            if message["done"].count(False) < self.size:
                ends = self._decode_ends(
                    self._trained(message["done"]), rewards, infos or [{}] * self.num_agents
                )
        masks = self._decode_masks(infos) if infos and self.layout.branches else None
        statistics = self._decode_statistics(infos) if infos else {}
        return Message(ends, self.agents, rewards, observations, masks, statistics)

    def receive_message(self, kind):
        """Return the next message as Godot sends it. `kind` is its expected type."""
        try:
            message = self.wire.receive(self.timeout)
        except TimeoutError:
            raise self.no_answer() from None
        except OSError as error:
            raise self.disconnected(error) from None
        if message.get("type") != kind:
            raise self.error(f"sent a message of type {message.get('type')!r} instead of {kind!r}")
        return message

    def _trained(self, values):
        """Return the values of the trained agents, from a list with one value per agent."""
        return [values[agent] for agent in self.agents] if self.untrained else values

    def _numbers(self, name, values, agents):
        """Return `values`, one of each of the `agents`, as an array. Godot writes NaN as null."""
        try:
            numbers = to_numbers(values, np.float64)
            if numbers.shape != (len(values),):
                raise ValueError
        except INVALID:
            for agent, value in zip(agents, values, strict=True):
                if value is not None and not isinstance(value, (bool, int, float)):
                    what = f"its {name} is {quoted(value)}: it must be a number"
                    raise GodotError(f"{self.name}, agent {agent}: {what}") from None
            raise GodotError(f"{self.name}: its {name} is too large") from None
        return numbers

    def _decode_infos(self, infos):
        """Return the dict of each agent's get_info(), which may return null instead of an empty one."""
        for agent, info in zip(self.agents, infos, strict=True):
            if info is not None and not isinstance(info, dict):
                what = "get_info() must return a Dictionary"
                raise GodotError(f"{self.name}, agent {agent}: its info is {info!r}: {what}")
        return [info or {} for info in infos]

    def _flag(self, agent, name, value):
        """Return a boolean of a message. The word "false" is not one: it would count as true."""
        if value in (False, True) and isinstance(value, (bool, int, float)):
            return bool(value)
        where = f"{self.name}, agent {agent}"
        raise GodotError(f"{where}: its {name} is {quoted(value)}: it must be true or false")

    def _decode_ends(self, done, rewards, infos):
        ends = []
        for agent, is_done, reward, info in zip(self.agents, done, rewards, infos, strict=True):
            if not self._flag(agent, "done", is_done):
                continue
            final_obs = None
            if info.get("terminal_observation") is not None:
                rows = self.layout.observe([info["terminal_observation"]], self.name, [agent])
                final_obs = {name: array[0] for name, array in rows.items()}
            flags = {}
            for name in ("TimeLimit.truncated", "is_success"):
                if info.get(name) is not None:
                    flags[name] = self._flag(agent, name, info[name])
            truncated = flags.get("TimeLimit.truncated", False)
            ends.append(End(agent, reward, truncated, final_obs, flags.get("is_success")))
        return ends

    def _decode_masks(self, infos):
        masks = np.ones((self.num_agents, sum(self.layout.branches)), bool)
        for row, (agent, info) in enumerate(zip(self.agents, infos, strict=True)):
            mask = info.get("action_mask")
            if mask is None:
                continue
            if not isinstance(mask, list) or len(mask) != masks.shape[1]:
                what = f"its action_mask must have {masks.shape[1]} entries, one for each discrete action"
                raise GodotError(f"{self.name}, agent {agent}: {what}")
            masks[row] = [self._flag(agent, "action_mask", allowed) for allowed in mask]
        return masks

    def _decode_statistics(self, infos):
        statistics = {}
        for agent, info in zip(self.agents, infos, strict=True):
            if not isinstance(info.get("stats"), dict):
                continue
            for name, value in info["stats"].items():
                (number,) = self._numbers(f"stats {one_line(name)}", [value], [agent])
                if not np.isfinite(number):
                    raise GodotError(f"{self.name}, agent {agent}: its stats {name} is {number}")
                statistics.setdefault(one_line(name), []).append((number, "average"))
        return statistics

    # To Godot

    def reset(self):
        """Tell the game to start new episodes."""
        self._check_in_step()
        self.request = "reset"
        self.send_message({"type": "reset"})

    def send_actions(self, continuous=None, discrete=None):
        """Send actions, with one row for each trained agent."""
        actions = self.layout.name_actions(continuous, discrete)
        if self.untrained:
            of_agent = dict(zip(self.agents, actions, strict=True))
            for agent, spaces in self.untrained:
                of_agent[agent] = self._random_actions(spaces)
            actions = [of_agent[agent] for agent in range(self.size)]
        self._check_in_step()
        self.request = "step"
        self.send_message({"type": "action", "action": actions})

    def _check_in_step(self):
        """Raise an error if the game has sent something that was not requested: later answers would be too late by one
        step, because a message does not say which request it answers."""
        if self.wire.poll():
            raise self.error(
                "sent more than one message for a request: its answers are out of step"
            )

    def _random_actions(self, spaces):
        return {
            name: int(self.rng.integers(size))
            if is_discrete
            else self.rng.uniform(-1, 1, size).tolist()
            for name, (size, is_discrete) in spaces.items()
        }

    def close(self):
        super().close({"type": "close"})


class GodotLayout(Layout):
    """Layout of a policy's agents, and how Godot writes their observations and actions.

    `observations` and `actions` are what `read_observations` and `read_actions` return.
    """

    def __init__(self, observations, actions):
        super().__init__([], 0, {}, 0, [])
        self.observations = observations
        self.actions = actions
        self.inputs = list(observations)  # the names of the sensors
        self.vectors = {}  # from the name of each vector to its size
        for name, (shape, is_image) in observations.items():
            if is_image:
                self.images[name] = shape
                self.sensors.append(name)
            else:
                self.vectors[name] = math.prod(shape)
                self.vector_size += self.vectors[name]
                self.sensors.append(self.vectors[name])
        self.columns = []  # for each action, whether it is discrete, and its columns in the array of actions
        for size, is_discrete in actions.values():
            if is_discrete:
                self.columns.append((True, len(self.branches)))
                self.branches.append(size)
            else:
                self.columns.append((False, slice(self.continuous, self.continuous + size)))
                self.continuous += size

    def observe(self, rows, game_name, agents):
        """Return the observations of `agents`, from a list of what their get_obs() returned."""
        observations = {}
        vectors = []
        try:
            for name, size in self.vectors.items():
                values = [row[name] for row in rows]
                vectors.append(to_numbers(values, np.float32).reshape(len(rows), size))
            for name, shape in self.images.items():
                images = [bytes.fromhex(row[name]) for row in rows]
                observations[name] = decode_images(images, shape)
        except INVALID:
            expected = self.images.get(name) or f"{self.vectors[name]} numbers"
            what = f"{name!r} of get_obs() is not the {expected} of get_obs_space()"
            if name in self.images:
                what += explain_image(rows, name)
            else:
                what += explain_vector(rows, name)
            raise GodotError(
                f"{game_name}, agent {', '.join(map(str, agents[:4]))}: {what}"
            ) from None
        if vectors:
            floats = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
            if found := find_invalid(floats):
                row, column = found
                where = f"{game_name}, agent {agents[row]}"
                raise GodotError(f"{where}: observation {column} is {describe(floats[found])}")
            observations["vector"] = floats
        return observations

    def name_actions(self, continuous, discrete):
        """Return a dict from the name of each action to its value for every row."""
        values = [
            (discrete if is_discrete else continuous)[:, at].tolist()
            for is_discrete, at in self.columns
        ]
        if len(values) == 1:  # as in most games
            (name,) = self.actions
            return [{name: value} for value in values[0]]
        return [dict(zip(self.actions, row, strict=True)) for row in zip(*values, strict=True)]


def to_numbers(values, dtype):
    """Return an array of a list, or of lists of the same length. null is nan. A text is a ValueError, also one that
    numpy would read as a number."""
    array = np.array(values)
    if array.dtype.kind in "biuf":
        with np.errstate(over="ignore"):
            return array.astype(dtype, copy=False)
    if array.dtype.kind != "O" or any(isinstance(x, str) for x in array.flat):
        raise ValueError("a text")
    return np.array(values, dtype)  # null, or integers beyond 64 bits


def quoted(value):
    """Return a value of a message for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def explain_vector(rows, name):
    """Return the first text among the numbers of a vector, for the end of an error message."""
    for row in rows:
        values = row.get(name) if isinstance(row, dict) else None
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str):
                return f", it has {quoted(value)}"
    return ""


def decode_images(images, shape):
    """Return images (height, width, channels), given as bytes, as one array.

    The plugin's camera declares three channels, and sends four if its viewport is transparent: the last one is dropped.
    """
    height, width, channels = shape
    sent = len(images[0]) // (height * width)
    pixels = np.frombuffer(b"".join(images), np.uint8).reshape(len(images), height, width, sent)
    if sent == 4 and channels == 3:
        return np.ascontiguousarray(pixels[..., :3])
    if sent != channels:
        raise ValueError(f"{sent} channels")
    return pixels


def explain_image(rows, name):
    """Return why images are not what they should be, for the end of an error message."""
    sizes = {
        len(row[name]) // 2
        for row in rows
        if isinstance(row, dict) and isinstance(row.get(name), str)
    }
    if 0 in sizes:
        return ", it is empty: a camera needs a display"
    return f", it has {min(sizes)} bytes" if sizes else ""


def whole_number(value):
    """Return a number of a message as an int. Godot may write it with a fraction of 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def read_observations(spaces):
    """Return a dict from the name of each observation to its shape and whether it is an image.

    The plugin's cameras give their shape as (channels, height, width), but send (height, width, channels).
    """
    observations = {}
    for name, space in spaces.items():
        shape = [space["size"]] if isinstance(space["size"], (int, float)) else space["size"]
        shape = tuple(map(whole_number, shape))
        is_image = "2d" in name
        if space.get("space", "box") != "box":
            raise ValueError(f"{name!r} is {space['space']!r}: send it as numbers, one-hot")
        largest = LARGEST_MESSAGE if is_image else MOST
        if not 0 < math.prod(shape) <= largest:
            raise ValueError(f"{name!r} has the size {list(shape)}")
        if is_image:
            if len(shape) == 3 and shape[0] <= 4:
                shape = (*shape[1:], shape[0])
            if len(shape) != 3:
                raise ValueError(f"{name!r}, an image, has the size {list(shape)}")
        observations[name] = (shape, is_image)
    if not observations:
        raise ValueError("agents observe nothing: add something to get_obs_space()")
    return observations


def read_actions(spaces):
    """Return a dict from the name of each action to its size and whether it is discrete."""
    actions = {}
    for name, space in spaces.items():
        if space["action_type"] not in ("discrete", "continuous"):
            raise ValueError(f"{name!r} has the action_type {space['action_type']!r}")
        actions[name] = (whole_number(space["size"]), space["action_type"] == "discrete")
    sizes = [size for size, _ in actions.values()]
    if not sizes or min(sizes) < 1 or sum(sizes) > MOST:
        raise ValueError(f"actions of the sizes {sizes}")
    return actions
