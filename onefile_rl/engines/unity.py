"""A Unity player: a process that speaks ML-Agents' protocol, and its messages as arrays.

`Player` launches the process and exchanges messages with it. `UnityLayout` knows where the observations of a behavior
are in a message.
"""

import difflib
import io
import math
import os
import struct
import sys
import time
import uuid
from pathlib import Path

import numpy as np
from PIL import Image

from onefile_rl.engines.limits import describe, find_invalid
from onefile_rl.engines.messages import End, Layout, Message
from onefile_rl.engines.onnx_policy import OnnxPolicy
from onefile_rl.engines.process import PlayerError, PlayerGone, Process, find_build, one_line
from onefile_rl.engines.samplers import parse, sampler_seed
from onefile_rl.engines.scenes import SCENES

# Before mlagents_envs, whose message classes it rebuilds.
from onefile_rl.engines.unity_wire import UnityMessageProto, Wire

# isort: split
import mlagents_envs
from mlagents_envs.side_channel import IncomingMessage, SideChannel
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

# Messages to wait for the first request of a decision: ten times the longest decision period in Unity's inspector, 20.
# Agents may also request decisions without a period.
PATIENCE = 200
RESET = 1  # the command that starts new episodes
MOST_ACTIONS = 100_000  # of an agent: continuous actions and the options of all branches
MOST_OBSERVATIONS = 1_000_000  # numbers of an agent, images aside
PNG = b"\x89PNG\r\n\x1a\n"
VARIABLE_SIZE = 4  # property of a dimension: rows that are not used are zeros
SAME_SENSORS = "all agents of a behavior need the same sensors"
# Versions of ML-Agents' package that declare images as (channels, height, width), and send the floats of an image
# without compression as (height, width, channels).
MISDECLARED = ("3.0.0-exp.1", "3.0.0", "4.0.0")
IMAGE_ORDERS = ("auto", "channels-first", "channels-last")


class UnityPlayerError(PlayerError):
    """An error of a Unity player."""


class UnityPlayerGone(UnityPlayerError, PlayerGone):
    """The player crashed or hangs. Starting it again may help."""


def base_name(behavior):
    """Return the name of a behavior without its team."""
    return behavior.split("?team=")[0]


def lists_of_channels(side_channels, num_players):
    """Return the side channels of each player. A channel sends its messages once, so each player needs its own."""
    if callable(side_channels):
        lists = [list(side_channels(worker)) for worker in range(num_players)]
    elif side_channels and num_players > 1:
        function = (
            "a function that returns a new list for each player, side_channels=lambda worker: [...]"
        )
        raise ValueError(f"side_channels with {num_players} players: give {function}")
    else:
        lists = [list(side_channels) for _ in range(num_players)]

    for channels in lists:
        for channel in channels:
            if not isinstance(channel, SideChannel) or not hasattr(channel, "message_queue"):
                what = f"{type(channel).__name__} is not a SideChannel of mlagents_envs"
                raise ValueError(f"side_channels: {what} whose __init__ calls super().__init__(id)")
        ids = [channel.channel_id for channel in channels]
        if len(set(ids)) < len(ids):
            raise ValueError("side_channels: two channels of a player have the same id")
    objects = [id(channel) for channels in lists for channel in channels]
    if len(set(objects)) < len(objects):
        raise ValueError(
            "side_channels: two players share a channel: make a new one for each player"
        )
    return lists


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
    if "/" in path and not os.path.lexists(path):
        raise UnityPlayerError(f"{path}: no player found, there is no such file or folder. {hint}")
    similar = difflib.get_close_matches(path, SCENES, 1, 0.5)
    suggestion = f" Did you mean {similar[0]}?" if similar else ""
    raise UnityPlayerError(
        f"{path}: no player found. {hint} Bundled scenes: {', '.join(SCENES)}.{suggestion}"
    )


class Player(Process):
    """One Unity process and the connection to it.

    `args` are additional command line arguments. `side_channels` are those of this player. See UnityVecEnv for
    `time_scale`, `parameters`, `others` and `image_order`, and Process for the other arguments.
    """

    editor = "Unity"
    editor_port = 5004
    hint = "check that an agent still requests decisions"
    Error = UnityPlayerError
    Gone = UnityPlayerGone

    def __init__(
        self, path, worker, base_port, timeout, args, *, seed=0, time_scale=20.0, parameters=None, announced=None,
        others=None, side_channels=(), image_order="auto",
    ):  # fmt: skip
        # From the behavior of agents that are not trained, with or without its team, to the policy that plays them
        self.policies = {
            name: OnnxPolicy(name, policy, seed) for name, policy in (others or {}).items()
        }
        command = None
        if path != "editor":
            found = find_player(path)
            command = lambda port: [*found, *args, "--mlagents-port", str(port)]
        super().__init__(path, command, worker, base_port, timeout, announced)
        self.seed = seed
        self.rng = np.random.default_rng(seed)  # for the agents that are not trained
        self.image_order = image_order
        self.behavior = None  # the one to train; without a team, all its teams
        self.layout = None
        self.action_specs = {}  # of all behaviors, by name
        self.trained = []  # the names of the behaviors to train
        self.counts = {}  # trained agents that request a decision, by the behavior's name
        self.untrained = {}  # agents of other behaviors that request a decision, by the behavior's name

        engine = EngineConfigurationChannel()
        engine.set_configuration_parameters(time_scale=time_scale, target_frame_rate=-1)
        self.parameters = EnvironmentParametersChannel()
        self.num_samplers = 0  # that were sent
        self.set_parameters(parameters or {})
        self.stats = StatsSideChannel()
        self.side_channels = [engine, self.parameters, *side_channels]
        self.receivers = {self.stats.channel_id.bytes_le: [self.stats]}
        for channel in side_channels:
            self.receivers.setdefault(channel.channel_id.bytes_le, []).append(channel)

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
        self.package_version = hello.package_version
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

        `behavior` is a name with its team, a name without a team for all teams, or None if there is only one name.
        `layout` is that of the first player, None for the first player itself.
        """
        self.behavior = behavior
        deadline = time.monotonic() + self.timeout
        for _ in range(PATIENCE):
            if time.monotonic() > deadline:
                break
            message = self.receive_message()
            self._read_specs(message)
            if behavior is None and self.action_specs:
                self.behavior = self._only_behavior()
            self._find_trained()
            requesting = [
                info for _, infos in self._agents(message) for info in infos if not info.done
            ]
            if requesting:
                self.first_message = message
                self.num_agents = len(requesting)
                self.layout = layout or self._make_layout(requesting[0].observations)
                self._find_trained()  # now with a layout that all of them must have
                self._check_others()
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

    def _only_behavior(self):
        """Return the only behavior of the game, without its team if there are several teams."""
        names = sorted(self.action_specs)
        if len({base_name(name) for name in names}) > 1:
            several = f"{self.name} has several behaviors, choose one with --behavior"
            raise UnityPlayerError(f"{several}: {', '.join(names)}")
        return names[0] if len(names) == 1 else base_name(names[0])

    def _find_trained(self):
        """Find the behaviors to train among those that the game has described, and check their actions."""
        self.trained = [
            name for name in sorted(self.action_specs) if self.behavior in (name, base_name(name))
        ]
        if self.layout:
            for name in self.trained:
                self._check_actions(name)

    def _check_actions(self, name):
        """All players and teams must have the actions of the first one, because their agents share one policy."""
        spec = self.action_specs[name]
        branches = list(spec.discrete_branch_sizes)
        if (spec.num_continuous_actions, branches) != (
            self.layout.continuous,
            self.layout.branches,
        ):
            here = f"{spec.num_continuous_actions} continuous actions, branches {branches}"
            first = f"{self.layout.continuous} and {self.layout.branches} of the first player"
            fix = "start the same build"
            if name != self.trained[0]:
                fix += f", or choose one team, for example with --behavior '{name}'"
            raise UnityPlayerError(f"{self.name}: {name} has {here}, not {first}: {fix}")

    def _make_layout(self, sensors):
        """Return the layout of the trained agents, of which one has these observations."""
        declared = self._sends_declared_order()
        spec = self.action_specs[self.trained[0]]
        layout = UnityLayout(self.trained[0], sensors, spec, declared)
        if layout.raw_images and self.image_order == "auto":
            self._announce_image_order(layout.raw_images, declared)
        return layout

    def _sends_declared_order(self):
        """Return whether uncompressed images have their channels first if they are declared so."""
        if self.image_order == "auto":
            return self.package_version not in MISDECLARED
        return self.image_order == "channels-first"

    def _announce_image_order(self, names, declared):
        images = f"{', '.join(names)}: uncompressed images of ML-Agents' package"
        version = self.package_version or "of an unknown version"
        look = "Look at one with python unity_vec_env.py --path BUILD --save-images FOLDER"
        if declared:
            order = "are read as (channels, height, width), but some versions send another order"
            other = "channels-last"
        else:
            order = (
                "are read as (height, width, channels), the order in which this version sends them"
            )
            other = "channels-first"
        fix = f"if it is scrambled, give --image-order {other} or set Compression to PNG in Unity"
        self.announce("image order", f"{images} {version} {order}. {look}; {fix}")

    def _check_others(self):
        """Refuse a policy for the behavior that is trained, and mention one for a behavior that is not there."""
        for name, policy in self.policies.items():
            if policy.notice:
                self.announce(policy.notice, policy.notice)
            if name in self.trained or name == self.behavior:
                raise UnityPlayerError(f"--others {name}: this is the behavior that is trained")
            there = sorted(self.action_specs)
            if not any(name in (other, base_name(other)) for other in there):
                what = f"--others {name}: the game has no such behavior so far"
                self.announce(f"others {name}", f"{what}, it has {', '.join(there)}")

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
        """Return pairs of a trained behavior's name and the AgentInfoProtos of its agents."""
        infos = message.unity_output.rl_output.agentInfos
        return [(name, infos[name].value) for name in self.trained if name in infos]

    def _decode(self, message):
        self._note_untrained(message)
        ended = []
        ended_agents = []
        requesting = []
        agents = []
        self.counts = {}
        for name, infos in self._agents(message):
            deciding = [info for info in infos if not info.done]
            done = [info for info in infos if info.done]
            if deciding:
                self.counts[name] = len(deciding)
            requesting += deciding
            agents += self._keys(name, deciding)
            ended += done
            ended_agents += self._keys(name, done)
        ends = self._decode_ends(ended, ended_agents) if ended else []
        statistics = {
            name: [(value, method.name.lower()) for value, method in values]
            for name, values in self.stats.get_and_reset_stats().items()
        }
        if not requesting:
            return Message(ends, [], None, {}, None, statistics)
        rewards = np.array([info.reward + info.group_reward for info in requesting])
        observations = self.layout.observe(requesting, self.name)
        masks = decode_masks(requesting, self.layout.branches) if self.layout.branches else None
        return Message(ends, agents, rewards, observations, masks, statistics)

    def _keys(self, name, infos):
        """Return what identifies agents. With several teams, an id can move from one to another."""
        if name == self.behavior:
            return [info.id for info in infos]
        return [f"{info.id} of {name}" for info in infos]

    def _decode_ends(self, infos, agents):
        observations = self.layout.observe(infos, self.name)
        ends = []
        for row, (info, agent) in enumerate(zip(infos, agents, strict=True)):
            final_obs = {name: array[row].copy() for name, array in observations.items()}
            reward = info.reward + info.group_reward
            ends.append(End(agent, reward, info.max_step_reached, final_obs))
        return ends

    def _read_specs(self, message):
        """Read the parts of a message that are not about agents: action specs and side channels."""
        brains = message.unity_output.rl_initialization_output.brain_parameters
        for brain in brains:
            self._read_action_spec(brain.brain_name, brain.action_spec)
        if brains:
            self._find_trained()
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
            if len(channel) < 16 or len(content) != size:
                raise self._unreadable("it is cut off")
            for receiver in self.receivers.get(channel, ()):
                try:
                    receiver.on_message_received(IncomingMessage(content))
                except (ValueError, struct.error) as error:
                    if receiver is not self.stats:  # a class of the caller
                        raise
                    raise self._unreadable(error) from None
            if channel not in self.receivers:
                unknown = f"side channel {uuid.UUID(bytes_le=channel)}, which has no receiver"
                self.announce("side channel", f"Ignoring the game's messages on {unknown}")

    def _unreadable(self, reason):
        what = f"{self.name}: a side channel's message cannot be read ({reason})"
        return UnityPlayerError(f"{what}: check what the game sends there")

    def _note_untrained(self, message):
        """Remember the agents of other behaviors that request a decision."""
        for name, agents in message.unity_output.rl_output.agentInfos.items():
            if name in self.trained or not agents.value:
                continue
            if name not in self.action_specs:
                what = (
                    f"{self.name}: agents of {name} appeared without a description of their actions"
                )
                raise UnityPlayerError(
                    f"{what}: restart the game, or press Play in the editor again"
                )
            self.untrained[name] = [info for info in agents.value if not info.done]
            policy = self._policy(name)
            if policy:
                policy.forget((name, info.id) for info in agents.value if info.done)
            if self.trained:
                how = f"act with {policy.path}" if policy else "act at random"
                self.announce(name, f"Training {self.behavior}; agents of {name} {how}")

    def _policy(self, name):
        """Return the policy that plays a behavior that is not trained, or None."""
        return self.policies.get(name) or self.policies.get(base_name(name))

    # To Unity

    def reset(self):
        """Tell the player to start new episodes. Unity sends no end of the old ones."""
        self.untrained = {}
        for policy in self.policies.values():
            policy.forget_all()
        message = self._new_message()
        message.unity_input.rl_input.command = RESET
        self.send_message(message)

    def set_parameters(self, parameters):
        """Send environment parameters with the next message. Unity draws from samplers itself."""
        channel = self.parameters
        for name, value in parameters.items():
            value = parse(value)
            if isinstance(value, float):
                channel.set_float_parameter(name, value)
                continue
            seed = sampler_seed(self.seed, name, self.num_samplers)
            self.num_samplers += 1
            if value.kind == "uniform":
                channel.set_uniform_sampler_parameters(name, *value.numbers, seed)
            elif value.kind == "gaussian":
                channel.set_gaussian_sampler_parameters(name, *value.numbers, seed)
            else:
                channel.set_multirangeuniform_sampler_parameters(name, value.ranges, seed)

    def send_actions(self, continuous=None, discrete=None):
        """Send actions, with one row for each agent that requested a decision in the last message, in its order."""
        message = self._new_message()
        actions = message.unity_input.rl_input.agent_actions
        end = 0
        for name, count in self.counts.items():
            start = end
            end += count
            if discrete is not None:
                floats = [()] * count if continuous is None else continuous[start:end].tolist()
                for numbers, options in zip(floats, discrete[start:end].tolist(), strict=True):
                    actions[name].value.add(continuous_actions=numbers, discrete_actions=options)
            elif continuous is not None:
                actions[name].MergeFromString(self.layout.serialize(continuous[start:end]))
        self._add_untrained_actions(actions)
        self.send_message(message)

    def _add_untrained_actions(self, actions):
        """Add the actions of the agents that are not trained and requested a decision in the last message."""
        for name, infos in self.untrained.items():
            if infos and (policy := self._policy(name)):
                self._add_policy_actions(actions[name].value, name, infos, policy)
            else:
                self._add_random_actions(actions[name].value, infos, self.action_specs[name])
        self.untrained = {}

    def _new_message(self):
        message = UnityMessageProto()
        data = bytearray()
        for channel in self.side_channels:
            for content in channel.message_queue:
                data += channel.channel_id.bytes_le + struct.pack("<i", len(content)) + content
            channel.message_queue = []
        message.unity_input.rl_input.side_channel = bytes(data)
        return message

    def _add_policy_actions(self, rows, name, infos, policy):
        """Add the actions of agents that a policy plays."""
        spec = self.action_specs[name]
        branches = list(spec.discrete_branch_sizes)
        continuous, discrete = policy.act(
            [(name, info.id) for info in infos],
            self._observe_as_model(name, infos),
            decode_masks(infos, branches),
            spec.num_continuous_actions,
            branches,
        )
        for numbers, options in zip(continuous.tolist(), discrete.tolist(), strict=True):
            rows.add(continuous_actions=numbers, discrete_actions=options)

    def _observe_as_model(self, name, infos):
        """Return the observations of agents as the inputs of a model: one array per sensor."""
        declared = self._sends_declared_order()
        inputs = []
        for i, first in enumerate(infos[0].observations):
            where = f"{self.name}, {name}, sensor {first.name or i}"
            shape = (len(infos), *first.shape)
            try:
                sensors = [info.observations[i] for info in infos]
                if len(shape) == 4:
                    form = image_form(first, declared)
                    images = np.stack([decode_image(sensor, *form, where) for sensor in sensors])
                    inputs.append(images.transpose(0, 3, 1, 2) / np.float32(255))
                else:
                    rows = [sensor.float_data.data for sensor in sensors]
                    inputs.append(np.array(rows, np.float32).reshape(shape))
            except (IndexError, ValueError):
                raise UnityPlayerError(f"{where}: agents differ: {SAME_SENSORS}") from None
            if find_invalid(inputs[-1].reshape(len(infos), -1)):
                raise UnityPlayerError(f"{where}: an observation is not finite or beyond 1e30")
        return inputs

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
        super().send_message(message)

    def close(self):
        goodbye = UnityMessageProto()
        goodbye.header.status = 400
        super().close(goodbye)


class UnityLayout(Layout):
    """Layout of a behavior, and how Unity serializes its observations and actions.

    `sensors` are the observations of one agent, from which the layout is read, and `spec` are its actions. `declared`:
    see image_form().
    """

    def __init__(self, behavior, sensors, spec, declared=True):
        super().__init__([], 0, {}, spec.num_continuous_actions, list(spec.discrete_branch_sizes))
        self.vectors = []  # vector sensors: index, length when serialized, first and last byte of the floats in a row
        self.declared = declared
        self.image_sensors = []  # image sensors: index, name, shape, whether the channels come first
        self.raw_images = []  # names of uncompressed images that are declared with their channels first
        self.input_names = []  # the name of the sensor of each number in the vector
        self.sensor_names = [sensor.name or f"sensor_{i}" for i, sensor in enumerate(sensors)]
        start = 0
        for i, sensor in enumerate(sensors):
            shape = tuple(sensor.shape)
            name = self.sensor_names[i]
            if len(shape) == 3:
                self._add_image(behavior, i, name, sensor)
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

    def _free_name(self, i, name):
        """Return a name for sensor `i` in the observation space: its own one, or a similar one if it is taken."""
        taken = {"vector", *self.images, *self.entities}
        if name not in taken:
            return name
        number = 2
        while f"{name}_{number}" in taken:
            number += 1
        print(
            one_line(f"Sensor {i} is called {name}_{number} here: the name {name} is taken"),
            flush=True,
        )
        return f"{name}_{number}"

    def _add_image(self, behavior, i, name, sensor):
        name = self._free_name(i, name)
        shape, channels_first = image_form(sensor, self.declared)
        if is_declared_first(sensor) and not sensor.compressed_data and shape[2] > 1:
            self.raw_images.append(name)
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
        if self.vector_size + size > MOST_OBSERVATIONS:
            what = f"its agents observe more than {MOST_OBSERVATIONS:,} numbers"
            raise UnityPlayerError(f"{behavior}, sensor {name}: {what}: use fewer, or images")
        end = start + sensor.float_data.ByteSize()
        self.vectors.append((i, end - start, end - 4 * size, end))
        if len(shape) == 2 and size and sensor.dimension_properties[:1] == [VARIABLE_SIZE]:
            self.entities[self._free_name(i, name)] = (self.vector_size, *shape)
        self.input_names += [name] * size
        self.vector_size += size
        self.sensors.append(shape if len(shape) == 2 else size)
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


def decode_masks(infos, branches):
    """Return the allowed discrete actions. In Unity's masks, True is forbidden, and a mask can be left out."""
    masks = np.ones((len(infos), sum(branches)), bool)
    for row, info in enumerate(infos):
        if len(info.action_mask) == masks.shape[1]:
            masks[row] = ~np.array(info.action_mask, bool)
    return masks


def is_declared_first(sensor):
    """Return whether an image is declared as (channels, height, width), as since ML-Agents' package 3.0: the properties
    of the dimensions tell."""
    return list(sensor.dimension_properties) == [1, 2, 2]


def image_form(sensor, declared):
    """Return the shape (height, width, channels) of an image, and whether its floats have the channels first.

    declared: whether the floats have the order of the declared shape
    """
    shape = tuple(sensor.shape)
    if is_declared_first(sensor):
        return shape[1:] + shape[:1], declared
    return shape, False


def decode_image(sensor, shape, channels_first, where):
    """Return the image of a sensor as uint8 (height, width, channels).

    Unity sends PNGs of three channels each, or floats from 0 to 1. `channels_first`: the order of the floats. `where`
    names the sensor in messages.
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
