"""Unity ML-Agents players as one gymnasium VectorEnv: one slot per agent, over any number of players.

    python unity_vec_env.py --path Crawler                   random actions in a bundled scene, and how fast that is
    envs = UnityVecEnv("./Builds/Crawler", num_players=2)    a Unity build; "editor" waits for the Play button
    obs, infos = envs.reset()
    obs, rewards, terminated, truncated, infos = envs.step(actions)

Unity's agents decide at their own pace. `infos["ready"]` says, after `reset` and after every `step`, which slots ask
for an action now: their rows of `obs` are fresh. `step` sends the actions of those rows, ignores the others, and
returns as soon as every player has an agent that asks. A decision is closed by the agent's next decision or by its end,
and that message's reward is its reward: `infos["closed"]` says whose last action has its reward now. A row that is not
closed carries no transition: reward 0. Ended agents start again by themselves (SAME_STEP): `infos["final_obs"]` is the
last observation, `infos["final_info"]["episode"]` the return "r" and the length in decisions "l". `truncated` means
that Unity interrupted the episode (MaxStep). An ended row whose new episode has not asked yet is not ready, and its obs
row is not fresh. `step_async` and `step_wait` are its two halves: players simulate in between. A player that crashes or
hangs is started anew (`max_restarts`): `infos["restarted"]` then says whose open decisions will never be closed.

Vector sensors are concatenated into one Box; with images the space is a Dict of "vector" and uint8 images (height,
width, channel). Discrete branches make a MultiDiscrete, both kinds of action a Dict of "continuous" and "discrete";
`infos["action_mask"]`, one column per choice of every branch, is True where the choice is allowed. `infos["stats"]`
holds what the game gave to Unity's StatsRecorder.
"""

import io
import math
import struct
import time
import uuid
from collections import Counter

import numpy as np
from PIL import Image

import players
from processes import one_line

# Before mlagents_envs, whose messages it repairs.
from unity_player import Player, UnityMessageProto, UnityPlayerError

# isort: split
from mlagents_envs.side_channel import IncomingMessage
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.side_channel_manager import SideChannelManager
from mlagents_envs.side_channel.stats_side_channel import StatsAggregationMethod, StatsSideChannel

# Messages to wait for an agent: ten times the longest decision period in Unity's inspector; agents may ask when they
# like.
PATIENCE = 200
RESET = 1
MOST = 100_000  # actions of an agent, all branches' choices together
PNG = b"\x89PNG\r\n\x1a\n"


class UnityVecEnv(players.PlayersEnv):
    Error, seeded = UnityPlayerError, "Unity"

    def __init__(
        self, path, *, behavior=None, num_players=1, max_agents=None, seed=0, base_port=None,
        time_scale=20.0, parameters=None, player_args=(), no_graphics=True, timeout=60, max_restarts=0,
    ):  # fmt: skip
        """
        path: a bundled scene's id, a Unity build, or "editor"
        behavior: which one to train, where there are several; agents of the others act at random
        max_agents: slots per player; if None, as many as there are agents at the first decision
        seed: player i gets seed + i; Unity takes it at its start only
        base_port: player i listens on base_port + i; if None, on a free port
        time_scale: game time per wall time; the bundled scenes always run as fast as they can
        parameters: Unity's environment parameters, name to float
        player_args: more command line arguments for the players
        timeout: seconds to wait for a player
        max_restarts: how often in a row a player that crashes or hangs is started anew
        """
        super().__init__(path, num_players, seed, timeout, max_restarts)
        if max_agents is not None and max_agents < 1:
            raise ValueError(f"--max-agents {max_agents}: there must be at least one slot")
        self.behavior, self.max_agents, self.told = behavior, max_agents, set()
        args = [*(["-nographics", "-batchmode"] if no_graphics else []), *player_args]
        self._settings = path, base_port, args, time_scale, parameters or {}
        self._open_players(num_players)

    def _launch(self, worker):
        path, base_port, args, time_scale, parameters = self._settings
        player = Player(path, worker, base_port, self.timeout, args)
        engine, settings = EngineConfigurationChannel(), EnvironmentParametersChannel()
        player.stats = StatsSideChannel()
        engine.set_configuration_parameters(time_scale=time_scale, target_frame_rate=-1)
        for key, value in parameters.items():
            settings.set_float_parameter(key, value)
        player.channels = SideChannelManager([engine, settings, player.stats])
        player.specs = {}  # of its behaviors
        player.asking, player.others = [], {}  # who asks: our slots, others' agents
        player.rng = np.random.default_rng(self.seed + worker)  # for the others
        return player

    def _greet(self, player):
        player.connect(self._seed(player.worker))
        self._send(player, reset=True)

    def _begin(self, player):
        """All agents of a behavior share one policy, so all players must be alike."""
        actions = player.specs[self.behavior]
        if (actions.num_continuous_actions, list(actions.discrete_branch_sizes)) != (self._continuous, self._branches):
            has = f"{actions.num_continuous_actions} continuous actions, branches {list(actions.discrete_branch_sizes)}"
            first_has = f"{self._continuous} and {self._branches} of the first player"
            raise UnityPlayerError(f"{player.name}: {self.behavior} has {has}, not {first_has}: start the same build")
        player.slots = Slots(range(player.rows.start, player.rows.stop))
        self._take(player, player.first)

    def _restart_episodes(self, player):
        """Unity cuts them without a word: open decisions are nobody's then."""
        player.slots.clear()
        player.asking, player.others = [], {}
        self._send(player, reset=True)

    def _hear(self, player):
        if self._take(player, self._receive(player)):
            return True
        if time.monotonic() > self._deadline:
            nobody = f"has had no agent of {self.behavior} that asks for an action"
            raise player.error(f"{nobody} for {self.timeout:g} s")
        # Unity sends an end on its own when an agent dies between decisions: nobody asks for an action then.
        self._send(player)
        return False

    def _take(self, player, message):
        """Terminals first, then decisions: one message can hold both of one agent, and the end is the older. True if
        anybody asks."""
        self._note_others(player, message)
        infos = list(self._agents(message))
        ended, asking = [info for info in infos if info.done], [info for info in infos if not info.done]
        if ended:
            final = self._observe(player, ended)
            slots = [player.slots.end(info.id) for info in ended]
            for row, slot in enumerate(slots):
                if slot is not None and self._open[slot]:  # else it ended before its first decision
                    self._close(np.array([slot]), rewards([ended[row]]))
                    last = {key: value[row].copy() for key, value in final.items()}
                    self._end(slot, ended[row].max_step_reached, last)
        if asking:
            try:
                slots = [player.slots.of(info.id) for info in asking]
            except StopIteration:
                size = len(player.slots.owner)
                what = f"{player.name} has more agents than its {size} slots"
                raise UnityPlayerError(f"{what}: give a larger --max-agents") from None
            if len(set(slots)) < len(slots):
                (twice, _), *_ = Counter(info.id for info in asking).most_common(1)
                why = f"{player.name}: agent {twice} is in one message twice"
                raise UnityPlayerError(f"{why}: every agent needs an id of its own, as Unity gives it")
            player.asking = slots = np.array(slots)
            self._close(slots, rewards(asking))
            self._see(slots, self._observe(player, asking))
            if self._branches:
                for slot, info in zip(slots, asking, strict=True):
                    if len(info.action_mask) == self._mask.shape[1]:
                        self._mask[slot] = ~np.array(info.action_mask)
        return bool(asking)

    def _receive(self, player):
        message = player.receive()
        for brain in message.unity_output.rl_initialization_output.brain_parameters:
            self._learn_actions(player, brain.brain_name, brain.action_spec)
        if message.unity_output.rl_output.side_channel:
            self._read_channels(player, message.unity_output.rl_output.side_channel)
        return message

    def _learn_actions(self, player, behavior, spec):
        who, sizes = f"{player.name}: {behavior}", [spec.num_continuous_actions, *spec.discrete_branch_sizes]
        if sizes[0] < 0 or min(sizes[1:], default=1) < 1:
            what = f"{sizes[0]} continuous actions and branches of {sizes[1:]}"
            raise UnityPlayerError(f"{who} has {what}: give every branch a size in Behavior Parameters")
        if sum(sizes) > MOST:
            raise UnityPlayerError(f"{who} has more than {MOST} actions: see its Behavior Parameters")
        if player.specs.setdefault(behavior, spec) != spec:
            raise UnityPlayerError(f"{who} has other actions than at first: they must stay the same")

    def _read_channels(self, player, data):
        """Side channels: one after the other, each with its id, its length and its bytes."""
        data = memoryview(data)
        while data:
            channel, size = bytes(data[:16]), int.from_bytes(data[16:20], "little", signed=True)
            content, data = bytes(data[20 : 20 + max(size, 0)]), data[20 + max(size, 0) :]
            try:
                if len(channel) < 16 or len(content) != size:
                    raise ValueError("it is cut off")
                if channel == player.stats.channel_id.bytes_le:
                    player.stats.on_message_received(IncomingMessage(content))
                elif "side channel" not in self.told:
                    self.told.add("side channel")
                    print(f"The game speaks on side channel {uuid.UUID(bytes_le=channel)}: nobody listens", flush=True)
            except (ValueError, struct.error) as error:
                what = f"{player.name}: a side channel's message can't be read ({error})"
                raise UnityPlayerError(f"{what}: what does the game send there?") from None

    def _statistics(self):
        stats = {}
        for player in self.players:
            for key, values in player.stats.get_and_reset_stats().items():
                stats.setdefault(key, []).extend(values)
                self.sums.update([key] * (values[-1][1] == StatsAggregationMethod.SUM))
        return {key: aggregate(values) for key, values in stats.items()}

    def _send(self, player, continuous=None, discrete=None, reset=False):
        message = UnityMessageProto()
        reply = message.unity_input.rl_input
        reply.side_channel = bytes(player.channels.generate_side_channel_messages())
        reply.command = RESET if reset else 0
        if len(player.asking):
            rows = reply.agent_actions[self.behavior]
            if discrete is None:  # the array's rows, each behind the same few bytes, are the serialized list already
                table = np.empty((len(player.asking), len(self._head) + 4 * self._continuous), np.uint8)
                table[:, : len(self._head)] = self._head
                table[:, len(self._head) :] = continuous[player.asking].astype("<f4").view(np.uint8)
                rows.MergeFromString(table.tobytes())
            else:
                continuous = [()] * len(player.asking) if continuous is None else continuous[player.asking].tolist()
                for a, b in zip(continuous, discrete[player.asking].tolist(), strict=True):
                    rows.value.add(continuous_actions=a, discrete_actions=b)
        for name, infos in player.others.items():
            spec, rows = player.specs[name], reply.agent_actions[name].value
            for info in infos:
                scores = player.rng.random(sum(spec.discrete_branch_sizes))
                if len(info.action_mask) == len(scores):
                    scores -= np.array(info.action_mask)
                branches = np.split(scores, np.cumsum(spec.discrete_branch_sizes))[:-1]
                a = player.rng.uniform(-1, 1, spec.num_continuous_actions).tolist()
                rows.add(continuous_actions=a, discrete_actions=[int(branch.argmax()) for branch in branches])
        player.asking, player.others = [], {}
        player.send(message)

    # Which behavior

    def _agents(self, message):
        return message.unity_output.rl_output.agentInfos[self.behavior].value

    def _meet(self, player):
        """Wait for the first message in which agents of the wanted behavior ask for actions."""
        deadline = time.monotonic() + self.timeout
        for _ in range(PATIENCE):
            if time.monotonic() > deadline:
                break
            message = self._receive(player)
            wanted = [name for name in sorted(player.specs) if self.behavior in (None, name, name.split("?team=")[0])]
            if len(wanted) > 1:
                several = ", ".join(wanted)
                raise UnityPlayerError(f"{player.name} has several behaviors, choose one by --behavior: {several}")
            if wanted:
                self.behavior = wanted[0]
                asking = sum(not info.done for info in self._agents(message))
                if asking:
                    player.first, player.count = message, self.max_agents or asking
                    return
            self._note_others(player, message)
            self._send(player)
        there = f"it has {', '.join(sorted(player.specs))}" if player.specs else "it has no agents at all"
        wanted = self.behavior or "(any)"
        raise UnityPlayerError(f"{player.name}: no agent of behavior {wanted} asks for actions; {there}")

    def _note_others(self, player, message):
        """Nobody trains the agents of other behaviors: they act at random, and the user is told."""
        for name, agents in message.unity_output.rl_output.agentInfos.items():
            if name != self.behavior and agents.value:
                if name not in player.specs:
                    what = f"{player.name}: agents of {name} come without a word on their actions"
                    raise UnityPlayerError(f"{what}: start the game, or Play in the editor, anew")
                player.others[name] = [info for info in agents.value if not info.done]
                if self.behavior in player.specs and name not in self.told:
                    self.told.add(name)
                    print(one_line(f"Training {self.behavior}; agents of {name} act at random"), flush=True)

    # What the agents see and do

    def _make_spaces(self):
        self._vectors, self._images, self._names, self.sensors = [], [], [], []
        start, taken = 0, {"vector"}
        info = next(info for info in self._agents(self.players[0].first) if not info.done)
        for i, sensor in enumerate(info.observations):
            shape, name = tuple(sensor.shape), sensor.name or f"sensor_{i}"
            where = f"{self.behavior}, sensor {name}"
            if len(shape) == 3:  # package 3.0 moved the channels to the front; the dimensions' properties tell
                channels_first = list(sensor.dimension_properties) == [1, 2, 2]
                if name in taken:
                    number = next(k for k in range(2, len(info.observations) + 3) if f"{name}_{k}" not in taken)
                    print(one_line(f"The image of sensor {i} is {name}_{number} here: {name} is taken"), flush=True)
                    name = f"{name}_{number}"
                taken.add(name)
                shape = shape[1:] + shape[:1] if channels_first else shape
                image(sensor, shape, channels_first, where)
                self._images.append((i, name, shape, channels_first))
                self.sensors.append(name)
            else:  # where its floats stand in an agent's serialized sensors
                if math.prod(shape) != len(sensor.float_data.data):
                    sent = f"{len(sensor.float_data.data)} values"
                    raise UnityPlayerError(f"{where}: it says that its shape is {shape}, and sends {sent}")
                end = start + sensor.float_data.ByteSize()
                self._vectors.append((i, end - start, end - 4 * math.prod(shape), end))
                self._names += [name] * math.prod(shape)
                # In Unity's order: sizes of the vector sensors, names of the images.
                self.sensors.append(math.prod(shape))
                start = end
        if not self._names and not self._images:
            add = "set Space Size in Behavior Parameters, or add a sensor"
            raise UnityPlayerError(f"{self.behavior}: its agents observe nothing: {add}")
        spec = self.players[0].specs[self.behavior]
        if not spec.num_continuous_actions and not spec.discrete_branch_sizes:
            add = "set Continuous Actions or Discrete Branches in Behavior Parameters"
            raise UnityPlayerError(f"{self.behavior}: its agents have no actions: {add}")
        images = {name: shape for _, name, shape, _ in self._images}
        self._set_spaces(len(self._names), images, spec.num_continuous_actions, list(spec.discrete_branch_sizes))
        example = UnityMessageProto().unity_input.rl_input.agent_actions[self.behavior]
        example.value.add(continuous_actions=[0] * self._continuous)
        # What stands before an agent's actions.
        self._head = np.frombuffer(example.SerializeToString(), np.uint8)[: -4 * self._continuous]

    def _observe(self, player, infos):
        """The observations of these agents, one row each. The packed floats of a message are the array's bytes
        already."""
        out, alike = {}, "agents of one behavior need the same sensors"
        agents = [info.observations for info in infos]
        if [*map(len, agents)] != [len(self.sensors)] * len(infos):
            who = next(info for info in infos if len(info.observations) != len(self.sensors))
            how_many = f"{len(who.observations)} sensors, not {len(self.sensors)} as at first"
            raise UnityPlayerError(f"{player.name}, agent {who.id} has {how_many}: {alike}")
        if self._vectors:
            if self._images:
                agents = [[observations[i] for i, *_ in self._vectors] for observations in agents]
            chunks = [sensor.float_data.SerializeToString() for observations in agents for sensor in observations]
            if [*map(len, chunks)] != [length for _, length, _, _ in self._vectors] * len(infos):
                what = f"{player.name}, agents {[info.id for info in infos]}: a sensor sends another number of values"
                raise UnityPlayerError(f"{what} than at first: {alike}")
            table = np.frombuffer(b"".join(chunks), np.uint8).reshape(len(infos), -1)
            parts = [table[:, first:end] for _, _, first, end in self._vectors]
            rows = out["vector"] = np.concatenate(parts, axis=1).view("<f4")
            if not np.isfinite(rows).all():
                row, column = np.argwhere(~np.isfinite(rows))[0]
                where = f"agent {infos[row].id}, sensor {self._names[column]}"
                raise UnityPlayerError(f"{where}: observation {column} is {rows[row, column]}")
        for i, name, shape, channels_first in self._images:
            pictures = [image(x.observations[i], shape, channels_first, f"agent {x.id}, sensor {name}") for x in infos]
            out[name] = np.stack(pictures)
        return out


class Slots:
    """Which slot is whose in one player. Only a slot whose agent has ended, or that nobody has had, goes to another
    agent."""

    def __init__(self, slots):
        self.owner = dict.fromkeys(slots)
        self.clear()

    def clear(self):
        self.owner, self.slot, self.free = dict.fromkeys(self.owner), {}, dict.fromkeys(self.owner)

    def of(self, agent):
        """The slot of an agent that decides. A new agent gets one never used, or that of the agent which ended longest
        ago."""
        slot = self.slot.get(agent)
        if slot is None:
            slot = next(iter(self.free))
            self.slot.pop(self.owner[slot], None)
            self.slot[agent], self.owner[slot] = slot, agent
        self.free.pop(slot, None)
        return slot

    def end(self, agent):
        slot = self.slot.get(agent)
        if slot is not None:
            self.free.pop(slot, None)
            self.free[slot] = None
        return slot


def image(sensor, shape, channels_first, where):
    """A camera's picture as uint8 (height, width, channel). Unity sends PNGs of three channels each, or floats from 0
    to 1."""
    if not sensor.compressed_data:
        values = np.array(sensor.float_data.data, np.float32)
        right = values.size == math.prod(shape) and min(shape) > 0
        if not right or not (values.min() >= 0 and values.max() <= 1):  # a NaN fails this too
            raise UnityPlayerError(f"{where}: not an image of shape {shape} with values from 0 to 1")
        values = np.rint(values * 255).astype(np.uint8)
        return values.reshape(shape[2:] + shape[:2]).transpose(1, 2, 0) if channels_first else values.reshape(shape)
    files = (io.BytesIO(PNG + part) for part in sensor.compressed_data.split(PNG)[1:])
    try:
        pixels = np.concatenate([np.asarray(Image.open(file).convert("RGB")) for file in files], axis=2)
        if sensor.compressed_channel_mapping:
            # Stacked grey images: equal channels of a PNG belong to one channel, -1 is padding.
            first = [list(sensor.compressed_channel_mapping).index(channel) for channel in range(shape[2])]
            pixels = pixels[:, :, first]
    except Exception as error:  # of any kind: what a decoder raises on broken data is not agreed
        raise UnityPlayerError(f"{where}: its PNG is broken ({error})") from None
    pixels = pixels[:, :, : shape[2]]
    if pixels.shape != shape:
        raise UnityPlayerError(f"{where}: an image of shape {pixels.shape}, not {shape}: its size must not change")
    return pixels


def rewards(infos):
    out = np.array([info.reward + info.group_reward for info in infos])
    if not np.isfinite(out).all():
        bad = np.flatnonzero(~np.isfinite(out))[0]
        raise UnityPlayerError(f"agent {infos[bad].id}: its reward is {out[bad]}")
    return out


def aggregate(values):
    """One number per statistic and step, as the game asked for it; a histogram stays a list."""
    numbers, method = [value for value, _ in values], values[-1][1]
    if method == StatsAggregationMethod.AVERAGE:
        return float(np.mean(numbers))
    if method == StatsAggregationMethod.SUM:
        return float(np.sum(numbers))
    return numbers if method == StatsAggregationMethod.HISTOGRAM else numbers[-1]


def demo(
    path: str = "Crawler", behavior: str | None = None, num_players: int = 1, max_agents: int | None = None,
    time_scale: float = 20.0, steps: int = 500, seed: int = 0, player_args: tuple[str, ...] = (),
    compare: str | None = None,
):  # fmt: skip
    """Step a bundled scene or a Unity build with random actions, and say how fast that is.

    Args:
        path: a bundled scene's id, a Unity build, or "editor"
        behavior: which of the build's behaviors acts, if it has several
        num_players: how many players to launch
        max_agents: slots for agents per player; default: as many as there are at the first decision
        time_scale: Unity's game time per wall time
        steps: how often to step
        seed: of the players and of the actions
        player_args: more for the player's command line
        compare: a run's folder: say which numbers its policy sees here that it has not met in training
    """
    settings = dict(behavior=behavior, num_players=num_players, max_agents=max_agents, time_scale=time_scale, seed=seed)
    settings["player_args"] = player_args
    try:
        trained = None
        if compare is not None:
            from envs.compare import Trained

            trained = Trained(compare)
        players.demo(lambda: UnityVecEnv(path, **settings), steps, seed, trained)
    except (UnityPlayerError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import tyro

    tyro.cli(demo)
