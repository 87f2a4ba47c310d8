"""A Unity player: a process that speaks ML-Agents' protocol, and its messages as arrays.

`Player` launches the process and exchanges messages with it. `UnityLayout` knows where the observations of a behavior
are in a message.
"""

import difflib
import io
import math
import struct
import sys
import time
import uuid
from pathlib import Path

import numpy as np
from PIL import Image

from onefile_rl.engines.limits import describe, find_invalid
from onefile_rl.engines.messages import End, Layout, Message
from onefile_rl.engines.process import PlayerError, PlayerGone, Process, find_build, one_line
from onefile_rl.engines.scenes import SCENES

# Before mlagents_envs, whose message classes it rebuilds.
from onefile_rl.engines.unity_wire import UnityMessageProto, Wire

# isort: split
import mlagents_envs
from mlagents_envs.side_channel import IncomingMessage
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.side_channel_manager import SideChannelManager
from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

# Messages to wait for the first request of a decision: ten times the longest decision period in Unity's inspector, 20.
# Agents may also request decisions without a period.
PATIENCE = 200
RESET = 1  # the command that starts new episodes
MOST_ACTIONS = 100_000  # of an agent: continuous actions and the options of all branches
PNG = b"\x89PNG\r\n\x1a\n"
SAME_SENSORS = "all agents of a behavior need the same sensors"


class UnityPlayerError(PlayerError):
    """An error of a Unity player."""


class UnityPlayerGone(UnityPlayerError, PlayerGone):
    """The player crashed or hangs. Starting it again may help."""


def find_player(path):
    """Return the command that starts a bundled scene, given by its id, or a Unity build."""
    if path in SCENES:
        player = Path(__file__).resolve().parents[2] / "envs" / "unity_scenes" / "player.py"
        return [sys.executable, str(player), "--scene", path]
    if build := find_build(path, UnityPlayerError):
        return [build]
    if sys.platform == "darwin":
        hint = "On macOS it is NAME.app."
    elif sys.platform == "win32":
        hint = "On Windows it is NAME.exe beside NAME_Data."
    else:
        hint = "On Linux it is NAME.x86_64 beside NAME_Data."
    similar = difflib.get_close_matches(path, SCENES, 1, 0.5)
    suggestion = f" Did you mean {similar[0]}?" if similar else ""
    raise UnityPlayerError(
        f"{path}: no player found. {hint} Bundled scenes: {', '.join(SCENES)}.{suggestion}"
    )


class Player(Process):
    """One Unity process and the connection to it.

    `args` are additional command line arguments. See UnityVecEnv for `time_scale` and `parameters`, and Process for the
    other arguments.
    """

    editor = "Unity"
    editor_port = 5004
    hint = "check that an agent still requests decisions"
    Error = UnityPlayerError
    Gone = UnityPlayerGone

    def __init__(
        self, path, worker, base_port, timeout, args, *, seed=0, time_scale=20.0, parameters=None, announced=None
    ):  # fmt: skip
        command = None
        if path != "editor":
            found = find_player(path)
            command = lambda port: [*found, *args, "--mlagents-port", str(port)]
        super().__init__(path, command, worker, base_port, timeout, announced)
        self.seed = seed
        self.rng = np.random.default_rng(seed)  # for the agents that are not trained
        self.behavior = None
        self.layout = None
        self.action_specs = {}  # of all behaviors, by name
        self.untrained = {}  # agents of other behaviors that request a decision, by the behavior's name

        engine = EngineConfigurationChannel()
        engine.set_configuration_parameters(time_scale=time_scale, target_frame_rate=-1)
        settings = EnvironmentParametersChannel()
        for name, value in (parameters or {}).items():
            settings.set_float_parameter(name, value)
        self.stats = StatsSideChannel()
        self.side_channels = SideChannelManager([engine, settings, self.stats])

    # Start

    def connect(self):
        """Wait for the player, shake hands, and let it simulate until its first message."""
        self.handshake()
        self.reset()

    def handshake(self):
        self.accept(lambda sock, seconds: Wire(sock, server=True, timeout=seconds))
        hello = self.receive_message().unity_output.rl_initialization_output
        if not hello.capabilities.hybridActions or hello.communication_version.split(".")[0] != "1":
            version = hello.communication_version or "of an unknown version"
            fix = "build it with ML-Agents' package 2.0 or newer"
            raise self.error(
                f"speaks ML-Agents protocol {version}, but 1.3 to 1.x is needed: {fix}"
            )
        reply = UnityMessageProto()
        greeting = reply.unity_input.rl_initialization_input
        greeting.seed = self.seed
        greeting.num_areas = 1
        greeting.communication_version = "1.5.0"
        greeting.package_version = mlagents_envs.__version__
        for capability in greeting.capabilities.DESCRIPTOR.fields:
            setattr(greeting.capabilities, capability.name, True)
        self.send_message(reply)
        self.receive_message()

    def meet(self, behavior, layout):
        """Wait for the first message in which agents of the behavior request decisions.

        `behavior` is a name with or without "?team=0", or None if there is only one. `layout` is that of the first
        player, None for the first player itself.
        """
        self.behavior = behavior
        deadline = time.monotonic() + self.timeout
        for _ in range(PATIENCE):
            if time.monotonic() > deadline:
                break
            message = self.receive_message()
            self._read_specs(message)
            matching = [
                name
                for name in sorted(self.action_specs)
                if self.behavior in (None, name, name.split("?team=")[0])
            ]
            if len(matching) > 1:
                names = ", ".join(matching)
                raise UnityPlayerError(
                    f"{self.name} has several behaviors, choose one with --behavior: {names}"
                )
            if matching:
                self.behavior = matching[0]
                requesting = [info for info in self._agents(message) if not info.done]
                if requesting:
                    self.first_message = message
                    self.num_agents = len(requesting)
                    spec = self.action_specs[self.behavior]
                    self.layout = layout or UnityLayout(
                        self.behavior, requesting[0].observations, spec
                    )
                    self._check_actions(spec)
                    return
            self._note_untrained(message)
            self.send_actions()
        there = (
            f"it has {', '.join(sorted(self.action_specs))}"
            if self.action_specs
            else "it has no agents at all"
        )
        wanted = self.behavior or "(any)"
        raise UnityPlayerError(
            f"{self.name}: no agent of behavior {wanted} requests decisions; {there}"
        )

    def _check_actions(self, spec):
        """All players must have the actions of the first one, because their agents share one policy."""
        branches = list(spec.discrete_branch_sizes)
        if (spec.num_continuous_actions, branches) != (
            self.layout.continuous,
            self.layout.branches,
        ):
            here = f"{spec.num_continuous_actions} continuous actions, branches {branches}"
            first = f"{self.layout.continuous} and {self.layout.branches} of the first player"
            raise UnityPlayerError(
                f"{self.name}: {self.behavior} has {here}, not {first}: start the same build"
            )

    def start(self):
        """Return the first message."""
        return self._decode(self.first_message)

    # From Unity

    def receive(self):
        """Return the next message."""
        message = self.receive_message()
        self._read_specs(message)
        return self._decode(message)

    def receive_message(self):
        """Return the next message as Unity sends it."""
        try:
            message = self.wire.receive(self.timeout)
        except TimeoutError:
            raise self.no_answer() from None
        except OSError as error:
            raise self.disconnected(error) from None
        if message.header.status != 200:
            raise self.error("has quit")
        return message

    def _agents(self, message):
        return message.unity_output.rl_output.agentInfos[self.behavior].value

    def _decode(self, message):
        self._note_untrained(message)
        infos = list(self._agents(message))
        ended = [info for info in infos if info.done]
        requesting = [info for info in infos if not info.done]
        ends = self._decode_ends(ended) if ended else []
        statistics = {
            name: [(value, method.name.lower()) for value, method in values]
            for name, values in self.stats.get_and_reset_stats().items()
        }
        if not requesting:
            return Message(ends, [], None, {}, None, statistics)
        agents = [info.id for info in requesting]
        rewards = np.array([info.reward + info.group_reward for info in requesting])
        observations = self.layout.observe(requesting, self.name)
        masks = self._decode_masks(requesting) if self.layout.branches else None
        return Message(ends, agents, rewards, observations, masks, statistics)

    def _decode_ends(self, infos):
        observations = self.layout.observe(infos, self.name)
        ends = []
        for row, info in enumerate(infos):
            final_obs = {name: array[row].copy() for name, array in observations.items()}
            ends.append(
                End(info.id, info.reward + info.group_reward, info.max_step_reached, final_obs)
            )
        return ends

    def _decode_masks(self, infos):
        """In Unity's masks, True is forbidden, and a mask can be left out."""
        masks = np.ones((len(infos), sum(self.layout.branches)), bool)
        for row, info in enumerate(infos):
            if len(info.action_mask) == masks.shape[1]:
                masks[row] = ~np.array(info.action_mask)
        return masks

    def _read_specs(self, message):
        """Read the parts of a message that are not about agents: action specs and side channels."""
        for brain in message.unity_output.rl_initialization_output.brain_parameters:
            self._read_action_spec(brain.brain_name, brain.action_spec)
        if message.unity_output.rl_output.side_channel:
            self._read_side_channels(message.unity_output.rl_output.side_channel)

    def _read_action_spec(self, behavior, spec):
        where = f"{self.name}: {behavior}"
        continuous = spec.num_continuous_actions
        branches = list(spec.discrete_branch_sizes)
        if continuous < 0 or min(branches, default=1) < 1:
            what = f"{continuous} continuous actions and branches of {branches}"
            raise UnityPlayerError(
                f"{where} has {what}: set the size of every branch in Behavior Parameters"
            )
        if continuous + sum(branches) > MOST_ACTIONS:
            raise UnityPlayerError(
                f"{where} has more than {MOST_ACTIONS} actions: check its Behavior Parameters"
            )
        if self.action_specs.setdefault(behavior, spec) != spec:
            raise UnityPlayerError(f"{where} has other actions than at first: they must not change")

    def _read_side_channels(self, data):
        """Read a sequence of messages, each with the id of its side channel, its length and its bytes."""
        data = memoryview(data)
        while data:
            channel = bytes(data[:16])
            size = int.from_bytes(data[16:20], "little", signed=True)
            end = 20 + max(size, 0)
            content = bytes(data[20:end])
            data = data[end:]
            try:
                if len(channel) < 16 or len(content) != size:
                    raise ValueError("it is cut off")
                if channel == self.stats.channel_id.bytes_le:
                    self.stats.on_message_received(IncomingMessage(content))
                else:
                    unknown = f"side channel {uuid.UUID(bytes_le=channel)}"
                    self.announce(
                        "side channel",
                        f"Ignoring the game's messages on {unknown}, which has no receiver",
                    )
            except (ValueError, struct.error) as error:
                what = f"{self.name}: a side channel's message cannot be read ({error})"
                raise UnityPlayerError(f"{what}: check what the game sends there") from None

    def _note_untrained(self, message):
        """Remember the agents of other behaviors that request a decision. They act at random."""
        for name, agents in message.unity_output.rl_output.agentInfos.items():
            if name == self.behavior or not agents.value:
                continue
            if name not in self.action_specs:
                what = (
                    f"{self.name}: agents of {name} appeared without a description of their actions"
                )
                raise UnityPlayerError(
                    f"{what}: restart the game, or press Play in the editor again"
                )
            self.untrained[name] = [info for info in agents.value if not info.done]
            if self.behavior in self.action_specs:
                self.announce(name, f"Training {self.behavior}; agents of {name} act at random")

    # To Unity

    def reset(self):
        """Tell the player to start new episodes. Unity sends no end of the old ones."""
        self.untrained = {}
        message = self._new_message()
        message.unity_input.rl_input.command = RESET
        self.send_message(message)

    def send_actions(self, continuous=None, discrete=None):
        """Send actions, with one row for each agent that requested a decision in the last message, in its order."""
        message = self._new_message()
        actions = message.unity_input.rl_input.agent_actions
        if discrete is not None:
            rows = actions[self.behavior].value
            continuous = [()] * len(discrete) if continuous is None else continuous.tolist()
            for floats, options in zip(continuous, discrete.tolist(), strict=True):
                rows.add(continuous_actions=floats, discrete_actions=options)
        elif continuous is not None:
            actions[self.behavior].MergeFromString(self.layout.serialize(continuous))
        for name, infos in self.untrained.items():
            self._add_random_actions(actions[name].value, infos, self.action_specs[name])
        self.untrained = {}
        self.send_message(message)

    def _new_message(self):
        message = UnityMessageProto()
        message.unity_input.rl_input.side_channel = bytes(
            self.side_channels.generate_side_channel_messages()
        )
        return message

    def _add_random_actions(self, rows, infos, spec):
        for info in infos:
            scores = self.rng.random(sum(spec.discrete_branch_sizes))
            if len(info.action_mask) == len(scores):
                scores -= np.array(info.action_mask)  # forbidden actions get a negative score
            branches = np.split(scores, np.cumsum(spec.discrete_branch_sizes))[:-1]
            continuous = self.rng.uniform(-1, 1, spec.num_continuous_actions).tolist()
            discrete = [int(branch.argmax()) for branch in branches]
            rows.add(continuous_actions=continuous, discrete_actions=discrete)

    def send_message(self, message):
        message.header.status = 200
        try:
            self.wire.send(message, self.timeout)
        except TimeoutError:
            raise self.not_reading() from None
        except OSError as error:
            raise self.disconnected(error) from None

    def close(self):
        goodbye = UnityMessageProto()
        goodbye.header.status = 400
        super().close(goodbye)


class UnityLayout(Layout):
    """Layout of a behavior, and how Unity serializes its observations and actions.

    `sensors` are the observations of one agent, from which the layout is read, and `spec` are its actions.
    """

    def __init__(self, behavior, sensors, spec):
        super().__init__([], 0, {}, spec.num_continuous_actions, list(spec.discrete_branch_sizes))
        self.vectors = []  # vector sensors: index, length when serialized, first and last byte of the floats in a row
        self.image_sensors = []  # image sensors: index, name, shape, whether the channels come first
        self.input_names = []  # the name of the sensor of each number in the vector
        start = 0
        for i, sensor in enumerate(sensors):
            shape = tuple(sensor.shape)
            name = sensor.name or f"sensor_{i}"
            if len(shape) == 3:
                self._add_image(behavior, i, name, shape, sensor)
            else:
                start = self._add_vector(behavior, i, name, shape, sensor, start)
        if not self.vector_size and not self.images:
            fix = "set Space Size in Behavior Parameters, or add a sensor"
            raise UnityPlayerError(f"{behavior}: its agents observe nothing: {fix}")
        if not self.continuous and not self.branches:
            fix = "set Continuous Actions or Discrete Branches in Behavior Parameters"
            raise UnityPlayerError(f"{behavior}: its agents have no actions: {fix}")

        # The bytes before the floats of an agent's serialized continuous actions.
        example = UnityMessageProto().unity_input.rl_input.agent_actions[behavior]
        example.value.add(continuous_actions=[0] * self.continuous)
        self.action_head = np.frombuffer(example.SerializeToString(), np.uint8)[
            : -4 * self.continuous
        ]

    def _add_image(self, behavior, i, name, shape, sensor):
        taken = {"vector", *self.images}
        if name in taken:
            number = 2
            while f"{name}_{number}" in taken:
                number += 1
            print(
                one_line(f"Sensor {i} is called {name}_{number} here: the name {name} is taken"),
                flush=True,
            )
            name = f"{name}_{number}"
        # Since package 3.0 the channels come first, and the properties of the dimensions tell.
        channels_first = list(sensor.dimension_properties) == [1, 2, 2]
        if channels_first:
            shape = shape[1:] + shape[:1]
        decode_image(sensor, shape, channels_first, f"{behavior}, sensor {name}")
        self.image_sensors.append((i, name, shape, channels_first))
        self.images[name] = shape
        self.sensors.append(name)

    def _add_vector(self, behavior, i, name, shape, sensor, start):
        """Return the end of the sensor's bytes in a row, which begin at `start`."""
        size = math.prod(shape)
        if size != len(sensor.float_data.data):
            sent = f"{len(sensor.float_data.data)} values"
            raise UnityPlayerError(
                f"{behavior}, sensor {name}: its shape is {shape}, but it sends {sent}"
            )
        end = start + sensor.float_data.ByteSize()
        self.vectors.append((i, end - start, end - 4 * size, end))
        self.input_names += [name] * size
        self.vector_size += size
        self.sensors.append(size)
        return end

    def observe(self, infos, player_name):
        """Return the observations of agents, with one row for each AgentInfoProto in `infos`.

        Packed floats in a message have the bytes of a float32 array, so all agents are decoded at once.
        """
        agents = [info.observations for info in infos]
        if [*map(len, agents)] != [len(self.sensors)] * len(infos):
            wrong = next(info for info in infos if len(info.observations) != len(self.sensors))
            what = f"{len(wrong.observations)} sensors, not {len(self.sensors)} as at first"
            raise UnityPlayerError(f"{player_name}, agent {wrong.id} has {what}: {SAME_SENSORS}")
        observations = {}
        if self.vectors:
            if self.images:
                agents = [[sensors[i] for i, *_ in self.vectors] for sensors in agents]
            chunks = [
                sensor.float_data.SerializeToString() for sensors in agents for sensor in sensors
            ]
            if [*map(len, chunks)] != [length for _, length, _, _ in self.vectors] * len(infos):
                what = f"{player_name}, agents {[info.id for info in infos]}: a sensor sends another number of values"
                raise UnityPlayerError(f"{what} than at first: {SAME_SENSORS}")
            table = np.frombuffer(b"".join(chunks), np.uint8).reshape(len(infos), -1)
            floats = [table[:, first:end] for _, _, first, end in self.vectors]
            rows = np.concatenate(floats, axis=1).view("<f4")
            if found := find_invalid(rows):
                row, column = found
                where = f"{player_name}, agent {infos[row].id}, sensor {self.input_names[column]}"
                raise UnityPlayerError(f"{where}: observation {column} is {describe(rows[found])}")
            observations["vector"] = rows
        for i, name, shape, channels_first in self.image_sensors:
            images = []
            for info in infos:
                where = f"{player_name}, agent {info.id}, sensor {name}"
                images.append(decode_image(info.observations[i], shape, channels_first, where))
            observations[name] = np.stack(images)
        return observations

    def serialize(self, continuous):
        """Return the serialized list of the agents' continuous actions: equal bytes before each row of floats."""
        head = len(self.action_head)
        table = np.empty((len(continuous), head + 4 * self.continuous), np.uint8)
        table[:, :head] = self.action_head
        table[:, head:] = continuous.astype("<f4").view(np.uint8)
        return table.tobytes()


def decode_image(sensor, shape, channels_first, where):
    """Return the image of a sensor as uint8 (height, width, channels).

    Unity sends PNGs of three channels each, or floats from 0 to 1. `where` names the sensor in messages.
    """
    if not sensor.compressed_data:
        values = np.array(sensor.float_data.data, np.float32)
        right_size = values.size == math.prod(shape) and min(shape) > 0
        if not right_size or not (values.min() >= 0 and values.max() <= 1):  # NaN fails this too
            raise UnityPlayerError(
                f"{where}: not an image of shape {shape} with values from 0 to 1"
            )
        pixels = np.rint(values * 255).astype(np.uint8)
        return (
            pixels.reshape(shape[2:] + shape[:2]).transpose(1, 2, 0)
            if channels_first
            else pixels.reshape(shape)
        )
    files = [io.BytesIO(PNG + part) for part in sensor.compressed_data.split(PNG)[1:]]
    try:
        pixels = np.concatenate(
            [np.asarray(Image.open(file).convert("RGB")) for file in files], axis=2
        )
        if sensor.compressed_channel_mapping:
            # Stacked grey images: equal channels of a PNG belong to one channel of the image, -1 is padding.
            mapping = list(sensor.compressed_channel_mapping)
            pixels = pixels[:, :, [mapping.index(channel) for channel in range(shape[2])]]
    except Exception as error:  # decoders raise many types of exceptions for broken data
        raise UnityPlayerError(f"{where}: its PNG is broken ({error})") from None
    pixels = pixels[:, :, : shape[2]]
    if pixels.shape != shape:
        raise UnityPlayerError(
            f"{where}: an image of shape {pixels.shape}, not {shape}: its size must not change"
        )
    return pixels
