"""Players that several processes share, each of which trains one behavior.

One process has the players: its `Hub` divides each message by behavior, and answers a player when every process that
was asked has answered. The other processes have ordinary vector envs, whose players are `SharedPlayer`s: each is a
connection to the hub that carries the messages of one player, restricted to one behavior.

The frames of a connection have a length, a kind and a content:

    from the process    GREETING    the behavior, the number of the player, and a key, as JSON
                        ANSWER      how many decisions a rollout still needs, or -1, and a serialized message: a reset
                                    at first, then the answer to each MESSAGE or LAST
                        NOTE        a serialized message with nothing but side channels, sent after ENDS
                        READY       the process is ready to train
    from the hub        SPECIMEN    a message with the actions and sensors of the behavior, which is not answered
                        MESSAGE     a message with agents of the behavior that request a decision
                        LAST        the same, and another behavior learns after it (--rollout-share)
                        ENDS        a message whose agents of the behavior have all ended: the hub does not wait for an
                                    answer, so the player may go on at once
                        ELSEWHERE   this player goes on when the agents of the process in other players have acted
                        GONE        the player was lost, for the reason in the content: connect again
                        READY       all processes are ready to train
                        STOP        stop at once

No wait of a process has a deadline. The hub has the deadlines of the players, and each side notices when the other one
has ended.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress

from onefile_rl.engines import waits
from onefile_rl.engines.messages import Message
from onefile_rl.engines.onnx_policy import OnnxPolicy
from onefile_rl.engines.process import (
    DONTWAIT,
    LARGEST_MESSAGE,
    LOG_INTERVAL,
    SLICE,
    SPIN_SECONDS,
    PlayerGone,
    Stream,
    close_all,
)
from onefile_rl.engines.scenes import derive_seed
from onefile_rl.engines.unity import (
    PATIENCE,
    RESET,
    EnvironmentParametersChannel,
    Player,
    UnityPlayerError,
    UnityPlayerGone,
    base_name,
)
from onefile_rl.engines.unity_wire import UnityMessageProto

VARIABLE = "ONEFILE_RL_SHARED"  # of the environment: what a process needs to find the hub, as JSON
GREETING, ANSWER, NOTE, READY, SPECIMEN, MESSAGE, LAST, ENDS, ELSEWHERE, GONE, STOP = range(11)
GREETING_SECONDS = 5  # in which a process that has connected must say who it is
PARAMETERS = EnvironmentParametersChannel().channel_id.bytes_le
LARGEST_BACKLOG = 2**16  # bytes of side channels that wait for the next message of a behavior


def settings():
    """Return how this process reaches the hub, as Hub.environment() describes it, or None if it has its own players."""
    text = os.environ.get(VARIABLE)
    return json.loads(text) if text else None


def belongs_to(name, behavior):
    """Return whether agents under `name` are trained by --behavior `behavior`: a name, or all teams of a name."""
    return behavior in (name, base_name(name))


class Channel(Stream):
    """A connection between the hub and a process."""

    def _before(self, deadline, call, argument):
        """Call a method of the socket that waits, without a limit: the hub says when a wait ends."""
        try:
            while True:
                self.sock.settimeout(SLICE)
                try:
                    return call(argument)
                except TimeoutError:
                    pass
        finally:
            self.sock.settimeout(None)

    def send(self, kind, content=b""):
        self._write(struct.pack("!IB", len(content), kind) + content, None)

    def receive(self):
        """Wait for a frame. Return its kind and its content."""
        while (frame := self.pop()) is None:
            self._fill(None)
        return frame

    def take(self):
        """Append what has arrived to the buffer. Raise ConnectionError if the peer has closed the connection."""
        try:
            chunk = self.sock.recv(self.chunk_size, DONTWAIT)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionError("the peer closed the connection")
        self.buffer += chunk

    def has_message(self):
        if len(self.buffer) < 5:
            return False
        (size,) = struct.unpack_from("!I", self.buffer)
        if size > LARGEST_MESSAGE:
            raise ConnectionError("its message is too large")
        return len(self.buffer) >= 5 + size

    def pop(self):
        """Return the next complete frame in the buffer, or None."""
        if not self.has_message():
            return None
        size, kind = struct.unpack_from("!IB", self.buffer)
        content = bytes(self.buffer[5 : 5 + size])
        del self.buffer[: 5 + size]
        return kind, content


class SharedPlayer(Player):
    """A player of the hub, as far as the behavior of this process is concerned."""

    is_asked = True  # whether the hub waits for an answer to the last message
    others_learn = False  # whether another behavior learns after the last message
    missing = -1  # see SharedEnvs

    def _start(self, path, command, base_port):
        """There is nothing to launch: the hub has the process."""

    def handshake(self):
        found = settings()
        try:
            self.wire = Channel(socket.create_connection(("127.0.0.1", found["port"])))
        except OSError:
            raise self._hub_ended() from None
        greeting = {"behavior": found["behavior"], "worker": self.worker, "key": found["key"]}
        self._send(GREETING, json.dumps(greeting).encode())

    def _hub_ended(self):
        return UnityPlayerError(f"{self.name}: the process that has the players has ended")

    def _send(self, kind, content=b""):
        try:
            self.wire.send(kind, content)
        except OSError:
            # The hub may have said why
            while True:
                self._receive()

    def _receive(self):
        try:
            kind, content = self.wire.receive()
        except OSError:
            raise self._hub_ended() from None
        if kind == STOP:
            raise KeyboardInterrupt
        if kind == GONE:
            raise UnityPlayerGone(content.decode())
        return kind, content

    def wait_for_others(self):
        """Wait until all processes are ready to train."""
        self._send(READY)
        self._receive()

    def meet(self, behavior, layout):
        _, content = self._receive()
        message = UnityMessageProto.FromString(content)
        self.package_version = message.unity_output.rl_initialization_output.package_version
        self.behavior = behavior
        self._read_specs(message)
        self._find_trained()
        requesting = [info for _, infos in self._agents(message) for info in infos if not info.done]
        self.num_agents = len(requesting)
        self.layout = layout or self._make_layout(requesting[0].observations)
        self._find_trained()  # now with a layout that all of them must have

    def start(self):
        """Return a message without agents: the first one that has any is waited for with those of other players."""
        return Message([], [], None, {}, None, {})

    def receive(self):
        kind, content = self._receive()
        if kind == ELSEWHERE:
            return None
        self.is_asked = kind in (MESSAGE, LAST)
        self.others_learn = kind == LAST
        message = UnityMessageProto.FromString(content)
        self._read_specs(message)
        return self._decode(message)

    def send_message(self, message):
        if self.is_asked:
            self._send(ANSWER, struct.pack("!i", self.missing) + message.SerializeToString())
        elif message.unity_input.rl_input.side_channel:
            self._send(NOTE, message.SerializeToString())

    def close(self):
        if self.wire:
            self.wire.close()


class SharedEnvs:
    """Lets a UnityVecEnv share the players of a hub. It waits for them as long as the hub does.

    With `set_missing` the hub learns how many decisions a rollout still needs, and `others_learn` tells whether the
    rollout of another behavior is complete now.
    """

    def __init__(self, path, **settings):
        super().__init__(path, **settings | {"timeout": float("inf"), "others": None})

    def _launch(self, worker):
        return SharedPlayer(
            self.path, worker, None, self.timeout, [], seed=self._seed(worker), time_scale=self.time_scale,
            parameters=self.parameters, announced=self.announced, image_order=self.image_order,
        )  # fmt: skip

    def _check_stop(self, started):
        """Wait on: another behavior may be learning. The hub stops a wait for a player that does not answer."""

    def wait_for_others(self):
        """Wait until the processes of all behaviors are ready to train."""
        self.players[0].wait_for_others()

    def set_missing(self, num_decisions):
        """Tell the hub with the next actions how many decisions the rollout still needs."""
        for player in self.players:
            player.missing = num_decisions

    @property
    def others_learn(self):
        return any(player.others_learn for player in self.players)

    def reset(self, *, seed=None, options=None):
        if not self._fresh:
            raise ValueError("reset: agents of other behaviors are in the middle of an episode")
        return super().reset(seed=seed, options=options)


# The hub


def requests_decisions(message):
    """Return whether an agent in a message requests a decision."""
    infos = message.unity_output.rl_output.agentInfos.values()
    return any(not info.done for agents in infos for info in agents.value)


def count_agents(message):
    """Return how many agents are in a message. Nearly always it has the reward of a decision of each of them."""
    infos = message.unity_output.rl_output.agentInfos.values()
    return sum(len({info.id for info in agents.value}) for agents in infos)


class HubPlayer(Player):
    """A player whose agents are trained in several processes. `is_trained(name)` says which behaviors these are."""

    def __init__(self, *args, is_trained, **settings):
        super().__init__(*args, **settings)
        self.is_trained = is_trained
        self.brains = {}  # the description of each behavior's actions, by name

    def _find_trained(self):
        self.trained = [name for name in sorted(self.action_specs) if self.is_trained(name)]

    def receive_message(self):
        message = super().receive_message()
        for brain in message.unity_output.rl_initialization_output.brain_parameters:
            self._read_action_spec(brain.brain_name, brain.action_spec)
            self.brains[brain.brain_name] = brain
            self._find_trained()
        return message

    def part(self, message, behavior, side_channel=b"", brains=None):
        """Return the part of a message that is about a behavior, and how many of its agents are in it."""
        part = UnityMessageProto()
        part.header.status = 200
        output = part.unity_output
        count = 0
        for name, agents in message.unity_output.rl_output.agentInfos.items():
            if agents.value and belongs_to(name, behavior):
                output.rl_output.agentInfos[name].CopyFrom(agents)
                count += len(agents.value)
        output.rl_output.side_channel = side_channel
        if brains is None:
            brains = message.unity_output.rl_initialization_output.brain_parameters
        for brain in brains:
            if belongs_to(brain.brain_name, behavior):
                output.rl_initialization_output.brain_parameters.add().CopyFrom(brain)
        return part, count

    def answer(self, message, answers):
        """Answer a message with the actions of several processes, and those of the agents that are not trained."""
        self._note_untrained(message)
        reply = self._new_message()
        rl_input = reply.unity_input.rl_input
        for part in answers:
            for name, actions in part.agent_actions.items():
                rl_input.agent_actions[name].CopyFrom(actions)
            rl_input.side_channel += part.side_channel
            rl_input.command |= part.command
        self._add_untrained_actions(rl_input.agent_actions)
        self.send_message(reply)


def wait_for_any(sockets, seconds):
    """Return the sockets that have data, after a wait of up to `seconds`. It polls first, as Stream._fill() does."""
    spin_until = time.perf_counter() + min(seconds, SPIN_SECONDS)
    while time.perf_counter() < spin_until:
        arrived, _, _ = select.select(sockets, [], [], 0)
        if arrived:
            return arrived
        os.sched_yield()
    return select.select(sockets, [], [], seconds)[0]


class Member:
    """The process of a behavior, as the hub sees it."""

    def __init__(self, behavior):
        self.behavior = behavior
        self.channels = {}  # its connections, by the number of the player
        self.ready = False
        self.trains = True  # whether its process runs; afterwards a policy plays its agents
        self.missing = None  # how many decisions its rollout still needs, with --rollout-share
        self.holds = set()  # the numbers of the players that wait for its actions
        self.plan = set()  # those that it is about to answer: it has begun to, or was told to


class Seat:
    """A player and its place in the hub."""

    def __init__(self, worker):
        self.worker = worker
        self.player = None
        self.resets = {}  # the first answers of the members that have connected, until the player is started
        self.parameters = {}  # the last message about each environment parameter, by member and name
        self.specimens = {}  # from a behavior to a message in which its agents request decisions
        self.brains = {}  # the description of the actions of each behavior and team
        self.started = False
        self.message = None  # the last one, until it is answered
        self.asked = (
            set()
        )  # the members whose agents request decisions in it and that have not answered it
        self.answers = []  # those that the next answer of the player consists of
        self.backlog = {}  # side channels for the next message of a member
        self.sent_at = 0.0
        self.idle = 0.0  # seconds of simulation since agents that are trained have acted last


class Hub:
    """The players of a run that trains several behaviors, each in its own process.

    Args:
        behaviors: the names, with or without a team
        make_player: returns a HubPlayer, make_player(worker, seed, is_trained)
        num_players: how many players there are
        seed: see EngineVecEnv
        timeout: seconds to wait for a player

    `step` serves the processes. It raises an EngineError if the run can't go on.
    """

    def __init__(self, behaviors, make_player, num_players, seed, timeout):
        self.members = [Member(behavior) for behavior in behaviors]
        self.make_player = make_player
        self.seed = seed
        self.timeout = timeout
        self.restarts = 0
        self.key = secrets.token_hex(16)
        self.seats = [Seat(worker) for worker in range(num_players)]
        self.players = []
        self.strangers = {}  # connections that have not said who they are, and until when they may
        self.lost = set()  # connections of players that were lost, which the processes close
        self.policies = {}  # from the behavior of a process that has ended to the folder of its run
        self.training = False  # all members were ready
        self.log_due_at = 0.0
        self.listener = socket.create_server(("127.0.0.1", 0))
        try:
            for seat in self.seats:
                self._launch(seat)
        except BaseException:
            self.close()
            raise

    def environment(self, behavior, **more):
        """Return the environment variable of the process that trains a behavior. settings() returns `more` there."""
        found = {"port": self.listener.getsockname()[1], "key": self.key, "behavior": behavior}
        return {VARIABLE: json.dumps(found | more)}

    def close(self):
        close_all(self.players)
        self.listener.close()
        for channel in self._channels():
            channel.close()

    def stop(self):
        """Tell all processes to stop at once."""
        self.listener.close()  # a process that is about to connect notices this
        for channel in self._channels():
            with suppress(OSError):
                channel.send(STOP)

    def _channels(self):
        channels = [x for member in self.members for x in member.channels.values()]
        return [*self.strangers, *self.lost, *channels]

    def _is_trained(self, name):
        return any(m.trains and belongs_to(name, m.behavior) for m in self.members)

    def _launch(self, seat):
        seed = derive_seed(self.seed, seat.worker + 1000 * self.restarts)
        player = self.make_player(seat.worker, seed, self._is_trained)
        self.players.append(player)
        seat.player = player
        for behavior in self.policies:
            self._add_policy(player, behavior)
        player.behavior = self._trained_names()

    def _trained_names(self):
        return " and ".join(member.behavior for member in self.members if member.trains)

    def _add_policy(self, player, behavior):
        player.policies[behavior] = OnnxPolicy(behavior, self.policies[behavior], player.seed)

    # The processes

    def step(self, seconds=SLICE):
        """Wait up to `seconds` for players and processes, and serve them."""
        sockets = {x.sock: (None, None, x) for x in (*self.strangers, *self.lost)}
        for member in self.members:
            for worker, channel in member.channels.items():
                sockets[channel.sock] = (member, worker, channel)
        simulating = {}
        for seat in self.seats:
            if seat.started and seat.message is None:
                simulating[seat.player.wire.sock] = seat
        arrived = wait_for_any([self.listener, *sockets, *simulating], seconds)
        for sock in arrived:
            if sock is self.listener:
                self._accept()
            elif sock in simulating:
                self._attempt(simulating[sock], self._receive)
            else:
                self._read(*sockets[sock])
        if len(self.seats) > 1:
            self._break_deadlocks()
        self._check_times(simulating)

    def _accept(self):
        sock, _ = self.listener.accept()
        self.strangers[Channel(sock)] = time.monotonic() + GREETING_SECONDS

    def _read(self, member, worker, channel):
        try:
            channel.take()
            if channel in self.strangers and (frame := channel.pop()):
                member, worker = self._admit(channel, *frame)
        except (ConnectionError, LookupError, ValueError):
            self.strangers.pop(channel, None)
            self.lost.discard(channel)
            channel.close()
            if member and member.channels.get(worker) is channel:
                del member.channels[worker]
            return
        while member and member.channels.get(worker) is channel and (frame := channel.pop()):
            self._handle(member, self.seats[worker], *frame)

    def _admit(self, channel, kind, content):
        """Return the member and the number of the player of a new connection, or raise an error."""
        greeting = json.loads(content) if kind == GREETING and len(content) < 10_000 else {}
        if not hmac.compare_digest(str(greeting["key"]), self.key):
            raise ConnectionError
        member = {member.behavior: member for member in self.members}[greeting["behavior"]]
        worker = self.seats[greeting["worker"]].worker
        del self.strangers[channel]
        member.channels[worker] = channel
        return member, worker

    def _handle(self, member, seat, kind, content):
        if kind == READY:
            member.ready = True
            return
        missing = -1
        if kind == ANSWER:
            (missing,) = struct.unpack_from("!i", content)
            content = content[4:]
        answer = UnityMessageProto.FromString(content).unity_input.rl_input
        self._note_parameters(member, seat, answer)
        if answer.command == RESET:
            seat.resets[member] = answer
            self._start_when_complete(seat)
            return
        if not seat.started:  # meant for a player that was lost since
            return
        if kind == ANSWER and member not in seat.asked:
            return
        seat.answers.append(answer)
        if kind == NOTE:  # for the next answer of the player
            return
        seat.asked.remove(member)
        member.missing = missing if missing >= 0 else None
        member.plan = member.plan or set(member.holds)
        member.plan.discard(seat.worker)
        member.holds.discard(seat.worker)
        self._answer_when_complete(seat)

    def _note_parameters(self, member, seat, answer):
        """Remember the environment parameters of a process: it may have ended when the player is started again."""
        data = answer.side_channel
        while data:  # a sequence of channel, length and content
            end = 20 + int.from_bytes(data[16:20], "little")
            if data[:16] == PARAMETERS:
                # The content begins with the length of the name, and the name
                name = data[24 : 24 + int.from_bytes(data[20:24], "little")]
                seat.parameters[member, name] = data[:end]
            data = data[end:]

    def go(self):
        """Let the processes train, once all of them are ready."""
        self.training = True
        for member in self.members:
            if 0 in member.channels:
                self._send(member, 0, READY)
        for seat in self.seats:
            if seat.started:
                self._attempt(seat, self._distribute)

    def all_ready(self):
        return all(member.ready or not member.trains for member in self.members)

    def play_on(self, member, folder):
        """Let the policy that a run has exported play the agents of a process that has ended."""
        self.policies[member.behavior] = folder
        member.trains = False
        member.holds.clear()
        member.plan.clear()
        for player in self.players:
            self._add_policy(player, member.behavior)
            player.behavior = self._trained_names()
            player._find_trained()
        for seat in self.seats:
            if not seat.started:
                self._start_when_complete(seat)
            elif member in seat.asked:
                seat.asked.remove(member)
                self._answer_when_complete(seat)

    def _send(self, member, worker, kind, content=b""):
        """Send a frame to a process. If it has ended, that is noticed elsewhere."""
        if worker in member.channels:
            with suppress(OSError):
                member.channels[worker].send(kind, content)

    # The players

    def _attempt(self, seat, action):
        """Call action(seat). If the player is lost, tell the processes, which connect again."""
        try:
            action(seat)
        except PlayerGone as error:
            self._lose(seat, error)

    def _lose(self, seat, error):
        player = seat.player
        if player.wire is None and not player.has_ended():  # most likely not a game with agents
            raise error
        player.close()
        self.players.remove(player)
        seat.started = False
        seat.message = None
        seat.resets = {}
        seat.answers = []
        seat.asked = set()
        seat.player = None
        for member in self.members:
            member.holds.discard(seat.worker)
            member.plan.discard(seat.worker)
            self._send(member, seat.worker, GONE, str(error).encode())
            if seat.worker in member.channels:
                self.lost.add(member.channels.pop(seat.worker))

    def _start_when_complete(self, seat):
        if len([m for m in seat.resets if m.trains]) == len([m for m in self.members if m.trains]):
            self._attempt(seat, self._start)

    def _start(self, seat):
        """Start a player with the parameters of all processes, and describe their behaviors to them."""
        if seat.player is None:
            self.restarts += 1
            self._launch(seat)
        player = seat.player
        player.handshake()
        answers = list(seat.resets.values())
        for (member, _), data in seat.parameters.items():
            if not member.trains:
                answers.append(UnityMessageProto().unity_input.rl_input)
                answers[-1].side_channel = data
        player.answer(UnityMessageProto(), answers)
        seat.message = player.receive_message()
        self._find_specimens(seat)
        player._find_trained()
        seat.started = True
        seat.idle = 0.0
        seat.brains |= player.brains
        for member in self.members:
            if member.trains:
                # All teams that have appeared so far, also those that came after the specimen
                specimen, _ = player.part(
                    seat.specimens[member.behavior], member.behavior, brains=seat.brains.values()
                )
                version = player.package_version
                specimen.unity_output.rl_initialization_output.package_version = version
                self._send(member, seat.worker, SPECIMEN, specimen.SerializeToString())
        if self.training:
            self._distribute(seat)

    def _find_specimens(self, seat):
        """Let all agents act at random until each behavior has had an agent that requests a decision."""
        player = seat.player
        deadline = time.monotonic() + self.timeout
        for _ in range(PATIENCE):
            for member in self.members:
                if member.behavior in seat.specimens:
                    continue
                part, _ = player.part(seat.message, member.behavior)
                if requests_decisions(part):
                    seat.specimens[member.behavior] = part
            missing = [m.behavior for m in self.members if m.behavior not in seat.specimens]
            if not missing:
                return
            if time.monotonic() > deadline:
                break
            player.trained = []  # all of them act at random
            player.answer(seat.message, [])
            seat.message = player.receive_message()
        there = ", ".join(sorted(player.action_specs)) or "no agents at all"
        what = f"no agent of behavior {missing[0]} requests decisions at first; it has {there}"
        raise UnityPlayerError(f"{player.name}: {what}")

    def _receive(self, seat):
        seat.message = seat.player.receive_message()
        seat.idle += time.monotonic() - seat.sent_at
        self._distribute(seat)

    def _distribute(self, seat):
        """Send the last message of a player to the processes whose agents are in it."""
        player = seat.player
        side_channel = seat.message.unity_output.rl_output.side_channel
        parts = {}
        for member in self.members:
            if not member.trains:
                continue
            backlog = seat.backlog.pop(member, b"") + side_channel
            part, count = player.part(seat.message, member.behavior, backlog)
            if count == 0 and len(backlog) < LARGEST_BACKLOG:
                seat.backlog[member] = backlog
                continue
            parts[member] = part
            if member.missing is not None:
                member.missing -= count_agents(part)
        full = {m for m in self.members if m.trains and m.missing is not None and m.missing <= 0}
        for member, part in parts.items():
            kind = ENDS
            if requests_decisions(part):
                kind = LAST if full - {member} else MESSAGE
                seat.asked.add(member)
                member.holds.add(seat.worker)
            self._send(member, seat.worker, kind, part.SerializeToString())
        self._answer_when_complete(seat)

    def _answer_when_complete(self, seat):
        if seat.asked or seat.message is None or not self.training:
            return
        self._attempt(seat, self._answer)

    def _answer(self, seat):
        if any(answer.agent_actions for answer in seat.answers):
            seat.idle = 0.0
        elif seat.idle > self.timeout:
            names = seat.player.behavior
            what = f"has had no agent of {names} that requests a decision for {self.timeout:g} s"
            raise seat.player.error(what)
        seat.player.answer(seat.message, seat.answers)
        seat.message = None
        seat.answers = []
        seat.sent_at = time.monotonic()

    def _break_deadlocks(self):
        """Let processes act that wait for players which wait for other processes.

        A process acts when all of its players have an agent that requests a decision. With one player that waits for
        behavior A and another one that waits for B, neither of the processes would ever act.
        """
        if any(not seat.started or seat.message is None for seat in self.seats):
            return
        members = [m for m in self.members if m.trains]
        if any(m.plan for m in members):
            return
        holding = [m for m in members if m.holds]
        if any(len(m.holds) == len(self.seats) for m in holding):
            return  # it acts
        for member in holding:
            member.plan = set(member.holds)
            for seat in self.seats:
                if member not in seat.asked:
                    self._send(member, seat.worker, ELSEWHERE)

    def _check_times(self, simulating):
        now = time.monotonic()
        for channel in [x for x, until in self.strangers.items() if now > until]:
            del self.strangers[channel]
            channel.close()
        for seat in simulating.values():
            if seat.message is not None or not seat.started:
                continue
            waits.check_stop(seat.sent_at)
            if now > seat.sent_at + self.timeout:
                seat.player.wire.gave_up = True
                self._lose(seat, seat.player.no_answer())
        if now > self.log_due_at:
            self.log_due_at = now + LOG_INTERVAL
            for player in self.players:
                player.check_log()
