#!/usr/bin/env python3
"""A player without Unity: scenes on MuJoCo physics that speak ML-Agents' protocol as a Unity build does.

    python -m envs.player --scene Crawler --render crawler.mp4                    look at a scene under random actions
    UnityVecEnv("Crawler")                                                        as the scripts do: --env-id Crawler
    UnityEnvironment("envs/player.py", additional_args=["--scene", "Crawler"])    the stock client; or --unity-path

`Academy` keeps Unity's order of a fixed step and DecisionRequester's rules. A scene is a class with

    behavior, sensors [(name, size)], continuous, branches      what goes over the wire: one action space for all
                                                                agents; an image's size is its shape
    period, offset, between, max_step                           DecisionRequester and MaxStep: a number, or one per
                                                                agent
    begin(who), observe(who), act(who, continuous, discrete)    OnEpisodeBegin, CollectObservations, OnActionReceived
    update(), physics()                                         the agents' FixedUpdate; the physics step and its
                                                                collisions
    mask(who), film(height, width), pose()                      where there are: forbidden choices; a picture of a
                                                                scene without a MuJoCo model; before a picture is taken

and changes `academy.reward`, or calls `academy.end`, as an agent script calls AddReward, SetReward and EndEpisode.
`who` are agents' indices.
"""

import argparse
import importlib
import io
import struct
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image

# Launched as a program, like a Unity build, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs import NEEDS_GL, SCENES, cheap, choose_gl
from unity_player import UnityMessageProto, Wire

STATS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520").bytes_le
ENVIRONMENT_PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400").bytes_le
RESET = 1


class Academy:
    """Unity's Academy with its agents and their DecisionRequesters: one entry per agent in every array.

    `exchange(outbox)` is called when a message is due and returns the continuous and discrete actions of the agents
    that ask in it, or None for a reset. The outbox holds tuples (ids, observations, rewards, done, interrupted), each
    for agents that decided or ended together.
    """

    def __init__(self, scene, num_agents, exchange):
        self.scene, self.exchange = scene, exchange
        self.order = np.arange(num_agents)  # agents are called in the order in which they were enabled
        self.id, self.next_id = np.arange(num_agents), num_agents
        self.enabled = np.ones(num_agents, bool)
        self.done = np.zeros(num_agents, bool)  # has ended and not decided since
        self.acts = np.zeros(num_agents, bool)  # has requested an action
        self.steps = np.zeros(num_agents, int)  # of the episode
        self.reward = np.zeros(num_agents, np.float32)  # since the last decision
        self.continuous = np.zeros((num_agents, scene.continuous), np.float32)  # last actions received
        self.discrete = np.zeros((num_agents, len(scene.branches)), np.int32)
        self.limit = np.where(np.asarray(scene.max_step) > 0, scene.max_step, np.iinfo(int).max)
        self.count, self.total = 0, 0  # fixed steps since the last full reset, and since the start
        self.outbox, self.stats = [], []
        scene.academy = self

    def step(self):
        """One FixedUpdate: requests, counters, observations, the exchange, actions, MaxStep; then the agents' own
        update and physics."""
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
        """A full reset, as the client's `reset` causes it: episodes are cut without a terminal, and rewards and last
        actions stay."""
        self.count = 0
        who = self._agents(self.enabled)
        self.steps[who] = 0
        self.scene.begin(who)

    def end(self, who, interrupted=False):
        """EndEpisode. An agent that ended already and has not decided since only begins anew: no second terminal."""
        self._finish(who, interrupted)
        self.steps[who] = 0
        self.scene.begin(who)

    def disable(self, who):
        """The terminal of a disabled agent does not count as interrupted, though it is no true end."""
        self._finish(who, interrupted=False)
        self.enabled[who] = False
        self.order = np.setdiff1d(self.order, who, assume_unique=True)

    def enable(self, who):
        """Agents that are enabled again get new ids and the last places in the order; their step count goes on."""
        self.id[who] = np.arange(self.next_id, self.next_id + len(who))
        self.next_id += len(who)
        self.enabled[who], self.done[who] = True, False
        self.order = np.concatenate([self.order, who])
        self.scene.begin(who)

    def _agents(self, mask):
        return self.order if mask.all() else self.order[mask[self.order]]

    def _finish(self, who, interrupted):
        who = who[~self.done[who]]
        if len(who):
            self._put(who, done=True, interrupted=interrupted)
            self.acts[who] = False

    def _put(self, who, done=False, interrupted=False):
        self.outbox.append((who, self.id[who], self.scene.observe(who), self.reward[who], done, interrupted))
        self.reward[who], self.continuous[who], self.discrete[who], self.done[who] = 0, 0, 0, done

    def _exchange(self):
        outbox, self.outbox = self.outbox, []
        actions = self.exchange(outbox)
        if actions is None:
            self.reset()
            return
        for who, *_, done, _ in outbox:
            if not done and len(actions[0]):
                self.continuous[who], self.discrete[who] = actions


class Link:
    """The player's end of the wire: the handshake, then one message per exchange."""

    def __init__(self, port):
        self.wire = Wire.connect(port)
        self.parameters, self.heads = {}, None
        hello = UnityMessageProto()
        output = hello.unity_output.rl_initialization_output
        output.name, output.communication_version, output.package_version = "AcademySingleton", "1.5.0", "2.2.1"
        for capability in output.capabilities.DESCRIPTOR.fields:
            setattr(output.capabilities, capability.name, True)
        self.seed = self._call(hello).rl_initialization_input.seed
        self._call(UnityMessageProto())  # answered when the client resets for the first time

    def exchange(self, outbox):
        scene, message = self.academy.scene, UnityMessageProto()
        output = message.unity_output
        if self.heads is None:
            head = lambda size: image_head if isinstance(size, tuple) else sensor_head
            self.heads = [head(size)(name, size) for name, size in scene.sensors]
            brains = output.rl_initialization_output.brain_parameters
            spec = brains.add(brain_name=scene.behavior, is_training=True).action_spec
            spec.num_continuous_actions, spec.num_discrete_actions = scene.continuous, len(scene.branches)
            spec.discrete_branch_sizes.extend(scene.branches)
        infos = output.rl_output.agentInfos[scene.behavior].value
        for who, ids, observations, rewards, done, interrupted in outbox:
            sensors = serialized(self.heads, observations)
            masks = scene.mask(who).tolist() if hasattr(scene, "mask") and not done else [()] * len(ids)
            for agent, reward, row, mask in zip(ids.tolist(), rewards.tolist(), sensors, masks, strict=True):
                info = infos.add(id=agent, reward=reward, done=done, max_step_reached=interrupted, action_mask=mask)
                info.MergeFromString(row)
        output.rl_output.side_channel = b"".join(
            STATS + struct.pack("<ii", len(key) + 12, len(key)) + key.encode() + struct.pack("<fi", value, method)
            for key, value, method in self.academy.stats
        )
        self.academy.stats.clear()
        reply = self._call(message)
        if reply.command == RESET:
            return None
        actions = reply.agent_actions[scene.behavior].value
        return [list(a.continuous_actions) for a in actions], [list(a.discrete_actions) for a in actions]

    def _call(self, message):
        message.header.status = 200
        self.wire.send(message)
        reply = self.wire.receive()
        if reply.header.status != 200:
            raise ConnectionError("the client said goodbye")
        data = reply.unity_input.rl_input.side_channel
        while data:  # channel, length, payload, again and again
            channel, size = data[:16], int.from_bytes(data[16:20], "little")
            payload, data = data[20 : 20 + size], data[20 + size :]
            if channel == ENVIRONMENT_PARAMETERS:
                key = 4 + int.from_bytes(payload[:4], "little")
                kind, value = struct.unpack("<if", payload[key : key + 8])
                if kind == 0:  # a plain float; samplers are Unity's own
                    self.parameters[payload[4:key].decode()] = value
        answer = reply.unity_input
        return answer if answer.HasField("rl_initialization_input") else answer.rl_input


def sensor_head(name, size):
    """What stands before a sensor's floats in a serialized agent: an array's bytes are the rest. Protobuf takes fields
    in any order."""
    info = UnityMessageProto().unity_output.rl_output.agentInfos[""].value.add()
    sensor = info.observations.add()
    sensor.float_data.data.extend([0] * size)
    floats = sensor.SerializeToString()
    sensor.name = name
    sensor.shape.append(size)
    sensor.dimension_properties.append(1)
    whole = info.SerializeToString()
    sensor.ClearField("float_data")
    described = sensor.SerializeToString()
    return np.frombuffer(whole[: -len(floats) - len(described)] + described + floats[: -4 * size], np.uint8)


def image_head(name, shape):
    """An agent with nothing but this image, which is to be put in as a PNG."""
    info = UnityMessageProto().unity_output.rl_output.agentInfos[""].value.add()
    info.observations.add(name=name, shape=shape, dimension_properties=(2, 2, 1), compression_type=1)
    return info


def serialized(heads, observations):
    """What the agents see, one string of bytes each. Images are PNGs of any length, arrays of floats are their
    bytes."""
    if all(isinstance(head, np.ndarray) for head in heads):
        floats = [observation.astype("<f4").view(np.uint8) for observation in observations]
        parts = [np.broadcast_to(head, (len(floats[0]), len(head))) for head in heads]
        return [row.tobytes() for row in np.hstack([part for pair in zip(parts, floats, strict=True) for part in pair])]
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
    """Import only the scene that is played: the test scene needs no physics engine."""
    modules = {"3DBall": "ball3d", "MixedDiscrete": "mixed"}
    names = {"3DBall": "Ball3D"}
    module = importlib.import_module(f"envs.{modules.get(args.scene, args.scene.lower())}")
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
    """Be a client's player until it says goodbye or is gone."""
    with ExitStack() as stack:
        try:
            link = Link(args.mlagents_port)
            scene = make_scene(args, link.seed, link.parameters)
            link.academy = Academy(scene, scene.num_agents, link.exchange)
            film = stack.enter_context(Film(args, scene)) if args.render else None
            while True:
                link.academy.step()
                if film:
                    film.frame()
        except (ConnectionError, KeyboardInterrupt):
            pass


def play_at_random(args):
    """A video of the scene under random actions."""
    scene, rng = make_scene(args, args.seed, {}), np.random.default_rng(args.seed)

    def at_random(outbox):
        asking = sum(len(who) for who, *_, done, _ in outbox if not done)
        continuous = rng.uniform(-1, 1, (asking, scene.continuous))
        return continuous, rng.integers(0, np.array(scene.branches, int), (asking, len(scene.branches)))

    academy = Academy(scene, scene.num_agents, at_random)
    with Film(args, scene) as film:
        for _ in range(int(args.seconds / scene.dt)):
            academy.step()
            film.frame()
    print(f"{args.render}: {args.seconds:g} s of {args.scene} under random actions")


class Film:
    """A video of a scene, in the scene's time. A scene that draws itself is shown step by step: what moves by whole
    cells is too fast for the eye."""

    def __init__(self, args, scene):
        import imageio

        self.scene, self.size, self.steps = scene, (args.height, args.width), 0
        self.every = max(1, round(1 / args.fps / scene.dt))  # fixed steps per frame
        if not hasattr(scene, "film"):
            try:
                import mujoco

                cheap(scene.model)
                self.renderer = mujoco.Renderer(scene.model, *self.size)
            except Exception as error:
                raise SystemExit(f"--render {NEEDS_GL} ({error})") from None
        else:
            self.every = 1
        fps = getattr(scene, "film_fps", 1 / (self.every * scene.dt))
        self.video = imageio.get_writer(args.render, fps=fps, macro_block_size=2)

    def frame(self):
        if self.steps % self.every == 0:
            self.video.append_data(self.picture())
        self.steps += 1

    def picture(self):
        if hasattr(self.scene, "film"):
            return self.scene.film(*self.size)
        if hasattr(self.scene, "pose"):
            self.scene.pose()
        self.renderer.update_scene(self.scene.data, camera="film")
        return self.renderer.render()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.video.close()
        if hasattr(self, "renderer"):
            self.renderer.close()


def main():
    what = "A bundled scene as a player that speaks ML-Agents' protocol."
    parser = argparse.ArgumentParser(prog="player.py", description=what, allow_abbrev=False)
    parser.add_argument("--scene", required=True, choices=SCENES, help="what to play")
    parser.add_argument("--agents", type=int, help="how many agents (Unity's scenes have 12 in 3DBall, 10 in Crawler)")
    what = "fixed steps between two decisions of an agent (Unity's scenes: 5)"
    parser.add_argument("--decision-period", type=int, help=what)
    what = "fixed steps after which an episode is interrupted (Unity's scenes: 5000; 0: never)"
    parser.add_argument("--max-step", type=int, help=what)
    what = (
        "Crawler: draw friction, masses, strengths, damping and delays anew for each episode, this much around theirs"
    )
    parser.add_argument("--randomize", type=float, default=0.0, metavar="RANGE", help=what)
    what = "Crawler: as fitted to Unity's, or one that training never sees, to test policies in"
    parser.add_argument("--physics", choices=("fitted", "alternative"), default="fitted", help=what)
    what = "film what the client's agents do; without a client, the scene under random actions"
    parser.add_argument("--render", metavar="FILE.mp4", help=what)
    what = "length of a film without a client, in the scene's time"
    parser.add_argument("--seconds", type=float, default=10, help=what)
    parser.add_argument("--fps", type=float, default=25, help="frames per second of the film")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--seed", type=int, default=0, help="of the film; a client brings its own")
    parser.add_argument("--mlagents-port", type=int, help="where the client listens; the client gives this")
    for flag in ("-batchmode", "-nographics"):  # what a client passes to a Unity build
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-logFile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, least in (("agents", 1), ("decision_period", 1), ("max_step", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if not 0 <= args.randomize <= 0.9:
        parser.error(f"--randomize {args.randomize:g}: from 0 to 0.9")
    if args.scene != "Crawler" and (args.randomize or args.physics != "fitted"):
        parser.error(f"--randomize and --physics are for Crawler: {args.scene} has one physics")
    if args.render and args.scene.startswith("Mixed"):
        parser.error(f"--scene {args.scene} is for tests: there is nothing to see")
    if args.render:
        choose_gl()
    if args.mlagents_port:
        play(args)
    elif args.render:
        play_at_random(args)
    else:
        alone = "alone it can --render FILE.mp4"
        parser.error(f"no client to play for: a client launches this with --mlagents-port; {alone}")


if __name__ == "__main__":
    main()
