#!/usr/bin/env python3
"""A player without Unity: scenes that communicate by ML-Agents' protocol, as a Unity build does.

    python -m envs.unity_scenes.player --scene Crawler --render crawler.mp4    record a video of a scene
    UnityVecEnv("Crawler")                                                     as the scripts do with --env-id Crawler
    UnityEnvironment("envs/unity_scenes/player.py", additional_args=["--scene", "Crawler"])   ML-Agents' own client

`Academy` follows Unity's order of a fixed step and the rules of DecisionRequester. A scene is a class with

    behavior, sensors, continuous, branches     the behavior's name, (name, size) of each sensor, the number of
                                                continuous actions, the sizes of the discrete branches; the size of an
                                                image is its shape, and that of a BufferSensor (rows, size of a row)
    period, offset, between, max_step           settings of DecisionRequester and MaxStep: a number, or one per agent
    begin(agents)                               OnEpisodeBegin
    observe(agents)                             CollectObservations
    act(agents, continuous, discrete)           OnActionReceived
    update()                                    FixedUpdate of the agents
    physics()                                   the physics step and its collisions
    mask(agents)                                optional: True where a discrete action is forbidden
    behavior_of(agents)                         optional: the behavior of each agent, in scenes with several; all of
                                                them are in `behaviors`, and have the same sensors and actions
    draw_frame(height, width)                   optional: an image of the scene, if it has no MuJoCo model
    pose()                                      optional: called before an image is rendered

A scene changes `academy.reward` and calls `academy.end`, as an agent script calls AddReward, SetReward and EndEpisode.
`agents` is an array of agents' indices. `begin` reads the client's environment parameters with
`per_agent(parameters, name, default, agents)`: a sampler draws a value for each agent and episode.
"""

import argparse
import importlib
import io
import math
import struct
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image

# The file is launched as a program, like a Unity build, from any folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from envs.rendering import (
    NEEDS_GL,
    check_video,
    choose_gl,
    disable_expensive_rendering,
    video_writer,
)
from onefile_rl.engines.samplers import Parameters
from onefile_rl.engines.scenes import SCENES
from onefile_rl.engines.unity_wire import UnityMessageProto, Wire

STATS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520").bytes_le
ENVIRONMENT_PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400").bytes_le
RESET = 1
NONE = 1  # properties of a sensor's dimensions
VARIABLE_SIZE = 4


class Academy:
    """Unity's Academy with its agents and their DecisionRequesters: one entry per agent in every array.

    `exchange(outbox)` is called when a message is due. It returns the continuous and discrete actions of the agents
    that request one in this message, or None for a reset. The outbox is a list of tuples (agents, ids, observations,
    rewards, done, interrupted), each for agents that requested a decision or ended together.
    """

    def __init__(self, scene, num_agents, exchange):
        self.scene = scene
        self.exchange = exchange
        self.order = np.arange(
            num_agents
        )  # as in Unity, agents are called in the order in which they were enabled
        self.id = np.arange(num_agents)
        self.next_id = num_agents
        self.enabled = np.ones(num_agents, bool)
        self.done = np.zeros(num_agents, bool)  # has ended and not decided since
        self.acts = np.zeros(num_agents, bool)  # has requested an action
        self.steps = np.zeros(num_agents, int)  # of the episode
        self.reward = np.zeros(num_agents, np.float32)  # since the last decision
        self.continuous = np.zeros(
            (num_agents, scene.continuous), np.float32
        )  # last actions received
        self.discrete = np.zeros((num_agents, len(scene.branches)), np.int32)
        self.limit = np.where(np.asarray(scene.max_step) > 0, scene.max_step, np.iinfo(int).max)
        self.count = 0  # fixed steps since the last full reset
        self.total = 0  # fixed steps since the start
        self.outbox = []
        self.senders = []  # the behaviors of the agents of each entry in the outbox
        self.stats = []
        scene.academy = self

    def step(self):
        """Simulate one fixed step.

        The order is Unity's: requests, counters, observations, the exchange, actions, MaxStep; then FixedUpdate of the
        agents and the physics.
        """
        if self.total == 0:
            self.reset()
        decides = self.enabled & (self.count % self.scene.period == self.scene.offset)
        self.acts |= decides | (self.enabled & self.scene.between)
        self.count += 1
        self.total += 1
        self.steps += self.enabled
        if decides.any():
            self._put(self._agents(decides))
        if self.outbox and self.enabled.any():
            self._exchange()
        acting = self._agents(self.enabled & self.acts)
        self.acts[:] = False
        if len(acting):
            self.scene.act(acting, self.continuous[acting], self.discrete[acting])
        over = self.steps >= self.limit
        if over.any():
            self.end(self._agents(over), interrupted=True)
        self.scene.update()
        self.scene.physics()

    def reset(self):
        """Reset all agents, as the client's `reset` does: no ends are sent, and rewards and last actions stay."""
        self.count = 0
        agents = self._agents(self.enabled)
        self.steps[agents] = 0
        self.scene.begin(agents)

    def end(self, agents, interrupted=False):
        """End episodes, as EndEpisode does. For an agent that has not decided since its last end, no end is sent."""
        self._finish(agents, interrupted)
        self.steps[agents] = 0
        self.scene.begin(agents)

    def disable(self, agents):
        """Disable agents. As in Unity, their end is not sent as interrupted, although it is not a terminal state."""
        self._finish(agents, interrupted=False)
        self.enabled[agents] = False
        self.order = np.setdiff1d(self.order, agents, assume_unique=True)

    def enable(self, agents):
        """Enable agents again: they get new ids and the last places in the order, and keep their step count."""
        self.id[agents] = np.arange(self.next_id, self.next_id + len(agents))
        self.next_id += len(agents)
        self.enabled[agents] = True
        self.done[agents] = False
        self.order = np.concatenate([self.order, agents])
        self.scene.begin(agents)

    def _agents(self, mask):
        return self.order if mask.all() else self.order[mask[self.order]]

    def _finish(self, agents, interrupted):
        agents = agents[~self.done[agents]]
        if len(agents):
            self._put(agents, done=True, interrupted=interrupted)
            self.acts[agents] = False

    def _put(self, agents, done=False, interrupted=False):
        """Add agents to the outbox."""
        if hasattr(self.scene, "behavior_of"):
            self.senders.append(self.scene.behavior_of(agents))
        else:
            self.senders.append([self.scene.behavior] * len(agents))
        observations = self.scene.observe(agents)
        self.outbox.append(
            (agents, self.id[agents], observations, self.reward[agents], done, interrupted)
        )
        self.reward[agents] = 0
        self.continuous[agents] = 0
        self.discrete[agents] = 0
        self.done[agents] = done

    def _exchange(self):
        outbox = self.outbox
        self.outbox = []
        actions = self.exchange(outbox)
        self.senders = []
        if actions is None:
            self.reset()
            return
        continuous, discrete = actions
        start = 0
        for agents, *_, done, _ in outbox:
            if not done and len(continuous):
                end = start + len(agents)
                self.continuous[agents] = continuous[start:end]
                self.discrete[agents] = discrete[start:end]
                start = end


class Link:
    """The player's end of the connection: the handshake, then one message per exchange."""

    def __init__(self, port):
        self.wire = Wire.connect(port)
        self.parameters = Parameters()
        self.heads = None
        self.described = set()  # the behaviors whose actions were sent
        hello = UnityMessageProto()
        output = hello.unity_output.rl_initialization_output
        output.name = "AcademySingleton"
        output.communication_version = "1.5.0"
        output.package_version = "2.2.1"
        for capability in output.capabilities.DESCRIPTOR.fields:
            setattr(output.capabilities, capability.name, True)
        greeting = self._call(hello).rl_initialization_input
        self.seed = greeting.seed
        self.channels_first = expects_channels_first(greeting.package_version)
        self._call(UnityMessageProto())  # the client answers with its first reset

    def exchange(self, outbox):
        scene = self.academy.scene
        message = UnityMessageProto()
        output = message.unity_output
        if self.heads is None:
            self.heads = []
            for name, size in scene.sensors:
                shape = size if isinstance(size, tuple) else (size,)
                if len(shape) == 3:
                    self.heads.append(image_head(name, shape, self.channels_first))
                else:
                    self.heads.append(sensor_head(name, shape))
        rows = {}  # the agents of each behavior in the message
        for (agents, ids, observations, rewards, done, interrupted), names in zip(
            outbox, self.academy.senders, strict=True
        ):
            for name in dict.fromkeys(names):
                if name in rows:
                    continue
                if name not in self.described:
                    self._describe(scene, name, output.rl_initialization_output.brain_parameters)
                rows[name] = output.rl_output.agentInfos[name].value
            sensors = serialized(self.heads, observations)
            masks = (
                scene.mask(agents).tolist()
                if hasattr(scene, "mask") and not done
                else [()] * len(ids)
            )
            for name, agent, reward, row, mask in zip(
                names, ids.tolist(), rewards.tolist(), sensors, masks, strict=True
            ):
                info = rows[name].add(
                    id=agent,
                    reward=reward,
                    done=done,
                    max_step_reached=interrupted,
                    action_mask=mask,
                )
                info.MergeFromString(row)
        output.rl_output.side_channel = b"".join(
            STATS
            + struct.pack("<ii", len(key) + 12, len(key))
            + key.encode()
            + struct.pack("<fi", value, method)
            for key, value, method in self.academy.stats
        )
        self.academy.stats.clear()
        reply = self._call(message)
        if reply.command == RESET:
            return None
        if not reply.agent_actions:
            return [], []
        received = {name: iter(part.value) for name, part in reply.agent_actions.items()}
        actions = []
        for (*_, done, _), names in zip(outbox, self.academy.senders, strict=True):
            if not done:
                actions += [next(received[name]) for name in names]
        return [list(a.continuous_actions) for a in actions], [
            list(a.discrete_actions) for a in actions
        ]

    def _describe(self, scene, name, brains):
        """Add the actions of a behavior to a message. Unity does so with the behavior's first agent."""
        spec = brains.add(brain_name=name, is_training=True).action_spec
        spec.num_continuous_actions = scene.continuous
        spec.num_discrete_actions = len(scene.branches)
        spec.discrete_branch_sizes.extend(scene.branches)
        self.described.add(name)

    def _call(self, message):
        message.header.status = 200
        self.wire.send(message)
        reply = self.wire.receive()
        if reply.header.status != 200:
            raise ConnectionError("the client has closed the connection")
        data = reply.unity_input.rl_input.side_channel
        while data:  # a sequence of channel, length and payload
            channel = data[:16]
            size = int.from_bytes(data[16:20], "little")
            payload = data[20 : 20 + size]
            data = data[20 + size :]
            if channel == ENVIRONMENT_PARAMETERS:
                self.parameters.read(payload)
        answer = reply.unity_input
        return answer if answer.HasField("rl_initialization_input") else answer.rl_input


def sensor_head(name, shape):
    """Return the bytes that precede a sensor's floats in a serialized agent. The floats' own bytes follow them.

    Protobuf accepts fields in any order, so that the floats can be last. A sensor of two dimensions is a BufferSensor.
    """
    size = math.prod(shape)
    info = UnityMessageProto().unity_output.rl_output.agentInfos[""].value.add()
    sensor = info.observations.add()
    sensor.float_data.data.extend([0] * size)
    floats = sensor.SerializeToString()
    sensor.name = name
    sensor.shape.extend(shape)
    sensor.dimension_properties.extend((VARIABLE_SIZE, NONE) if len(shape) == 2 else (NONE,))
    whole = info.SerializeToString()
    sensor.ClearField("float_data")
    described = sensor.SerializeToString()
    return np.frombuffer(
        whole[: -len(floats) - len(described)] + described + floats[: -4 * size], np.uint8
    )


def expects_channels_first(client_version):
    """Return whether a client of this version of mlagents-envs wants images declared as (channels, height, width).

    Clients since 1.0 refuse the other order, and older ones refuse this order. A Unity build has the order of its
    package; this player adapts to its client.
    """
    major = client_version.split(".")[0]
    return major.isdecimal() and int(major) >= 1


def image_head(name, shape, channels_first=False):
    """Return the message of an agent with nothing but this image, to which a PNG is added."""
    info = UnityMessageProto().unity_output.rl_output.agentInfos[""].value.add()
    properties = (2, 2, 1)  # translational equivariance in height and width
    if channels_first:
        shape = (shape[2], shape[0], shape[1])
        properties = (1, 2, 2)
    info.observations.add(
        name=name, shape=shape, dimension_properties=properties, compression_type=1
    )
    return info


def serialized(heads, observations):
    """Return the serialized observations of each agent. Images are sent as PNGs, vectors as the bytes of the floats."""
    if all(isinstance(head, np.ndarray) for head in heads):
        floats = [observation.astype("<f4").view(np.uint8) for observation in observations]
        parts = [np.broadcast_to(head, (len(floats[0]), len(head))) for head in heads]
        return [
            row.tobytes()
            for row in np.hstack(
                [part for pair in zip(parts, floats, strict=True) for part in pair]
            )
        ]
    columns = []
    for head, observation in zip(heads, observations, strict=True):
        if isinstance(head, np.ndarray):
            columns.append(serialized([head], [observation]))
            continue
        columns.append([])
        for picture in observation:
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "PNG", compress_level=1)
            head.observations[0].compressed_data = file.getvalue()
            columns[-1].append(head.SerializeToString())
    return map(b"".join, zip(*columns, strict=True))


def make_scene(args, seed, parameters):
    """Return the scene of the command line. Only its module is imported: the test scenes need no physics engine."""
    modules = {"3DBall": "ball3d", "MixedDiscrete": "mixed", "MixedHybrid": "mixed"}
    names = {"3DBall": "Ball3D"}
    module = importlib.import_module(
        f"envs.unity_scenes.{modules.get(args.scene, args.scene.lower())}"
    )
    Scene = getattr(module, names.get(args.scene, args.scene))
    more = {}
    if args.scene == "Crawler":
        more["physics"] = module.PHYSICS[args.physics]
        for name, times in module.RANGES.items():
            parameters.setdefault(name, args.randomize * times)
    scene = Scene(args.agents or Scene.num_agents, seed, parameters, **more)
    if args.decision_period is not None:
        scene.period = args.decision_period
    if args.max_step is not None:
        scene.max_step = args.max_step
    return scene


def play(args):
    """Run as a client's player until the client ends the connection."""
    with ExitStack() as stack:
        try:
            link = Link(args.mlagents_port)
            scene = make_scene(args, link.seed, link.parameters)
            link.academy = Academy(scene, scene.num_agents, link.exchange)
            video = stack.enter_context(Video(args, scene)) if args.render else None
            while True:
                link.academy.step()
                if video:
                    video.after_step()
        except (ConnectionError, KeyboardInterrupt):
            pass


def play_at_random(args):
    """Record a video of the scene with random actions."""
    scene = make_scene(args, args.seed, {})
    rng = np.random.default_rng(args.seed)

    def at_random(outbox):
        asking = sum(len(agents) for agents, *_, done, _ in outbox if not done)
        continuous = rng.uniform(-1, 1, (asking, scene.continuous))
        return continuous, rng.integers(
            0, np.array(scene.branches, int), (asking, len(scene.branches))
        )

    academy = Academy(scene, scene.num_agents, at_random)
    try:
        with Video(args, scene) as video:
            for _ in range(int(args.seconds / scene.dt)):
                academy.step()
                video.after_step()
        check_video(args.render)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"{args.render} could not be written: {reason}") from None
    print(f"Wrote {args.render}: {args.seconds:g} s of {args.scene} with random actions")


class Video:
    """A video of a scene, in the scene's own time.

    A scene with draw_frame() moves by whole cells. It is shown step by step and slower, at its own video_fps.
    """

    def __init__(self, args, scene):
        self.scene = scene
        self.size = (args.height, args.width)
        self.steps = 0
        self.every = max(1, round(1 / args.fps / scene.dt))  # fixed steps per frame
        if not hasattr(scene, "draw_frame"):
            try:
                import mujoco

                disable_expensive_rendering(scene.model)
                self.renderer = mujoco.Renderer(scene.model, *self.size)
            except Exception as error:
                raise SystemExit(f"--render {NEEDS_GL} ({error})") from None
        else:
            self.every = 1
        fps = getattr(scene, "video_fps", 1 / (self.every * scene.dt))
        self.writer = video_writer(args.render, fps, macro_block_size=2)

    def after_step(self):
        """Append a frame if one is due."""
        if self.steps % self.every == 0:
            self.writer.append_data(self.draw())
        self.steps += 1

    def draw(self):
        if hasattr(self.scene, "draw_frame"):
            return self.scene.draw_frame(*self.size)
        if hasattr(self.scene, "pose"):
            self.scene.pose()
        self.renderer.update_scene(self.scene.data, camera="video")
        return self.renderer.render()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.writer.close()
        if hasattr(self, "renderer"):
            self.renderer.close()


def main():
    what = "Run a bundled scene as a player of ML-Agents' protocol, or record a video of it."
    parser = argparse.ArgumentParser(prog="player.py", description=what, allow_abbrev=False)
    parser.add_argument("--scene", required=True, choices=SCENES, help="the scene")
    parser.add_argument(
        "--agents", type=int, help="number of agents (Unity's scenes: 12 in 3DBall, 10 in Crawler)"
    )
    what = "fixed steps between two decisions of an agent (Unity's scenes: 5)"
    parser.add_argument("--decision-period", type=int, help=what)
    what = "fixed steps after which an episode is interrupted (Unity's scenes: 5000; 0: never)"
    parser.add_argument("--max-step", type=int, help=what)
    what = "Crawler: draw friction, masses, strengths, damping and delays for each episode, within this relative range"
    parser.add_argument("--randomize", type=float, default=0.0, metavar="RANGE", help=what)
    what = "Crawler: the physics fitted to Unity, or another one to test the transfer of policies"
    parser.add_argument("--physics", choices=("fitted", "alternative"), default="fitted", help=what)
    what = "record a video of the client's agents, or without a client, of random actions"
    parser.add_argument("--render", metavar="FILE.mp4", help=what)
    what = "length of a video without a client, in the scene's time"
    parser.add_argument("--seconds", type=float, default=10, help=what)
    parser.add_argument("--fps", type=float, default=25, help="frames per second of the video")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of a video without a client; a client sends its own",
    )
    parser.add_argument(
        "--mlagents-port", type=int, help="port of the client; the client sets this"
    )
    for flag in ("-batchmode", "-nographics"):  # a client passes these to a Unity build
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-logFile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, least in (("agents", 1), ("decision_period", 1), ("max_step", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if not 0 <= args.randomize <= 0.9:
        parser.error(f"--randomize {args.randomize:g}: must be from 0 to 0.9")
    if args.scene != "Crawler" and (args.randomize or args.physics != "fitted"):
        parser.error(f"--randomize and --physics are for Crawler: {args.scene} has one physics")
    if args.render and args.scene.startswith("Mixed"):
        parser.error(f"--render: the test scene {args.scene} cannot be rendered")
    if args.render:
        choose_gl()
    if args.mlagents_port:
        play(args)
    elif args.render:
        play_at_random(args)
    else:
        parser.error(
            "no client: a client launches this player with --mlagents-port. Or record with --render FILE.mp4"
        )


if __name__ == "__main__":
    main()
