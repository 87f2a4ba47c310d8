"""Test players that several processes share: each behavior gets the transitions of a run of its own."""

import itertools
import json
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import closing, suppress

import numpy as np
import pytest
from conftest import ScriptedPlayer, agent
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transitions import EVENTS

from envs.make import SharedUnityEnvs
from onefile_rl.engines import shared
from onefile_rl.engines.process import PlayerError, PlayerGone
from unity_vec_env import UnityVecEnv

NAMES = ("Long?team=0", "Short?team=0")
SPECS = {NAMES[0]: (2, ()), NAMES[1]: (1, (3,))}  # sizes differ
SIZES = {NAMES[0]: 3, NAMES[1]: 4}


def policy(name, rows):
    """Return the actions of agents, as a function of their observations."""
    wave = np.sin(rows @ np.arange(1, SIZES[name] + 1)).astype(np.float32)
    if name == NAMES[0]:
        return np.stack([wave, -wave], 1), None
    return wave[:, None] / 2, (np.abs(wave) * 2.99).astype(int)[:, None]


def info(name, number, clock, reward=0.0, **how):
    """An agent that observes its id, the time, and zeros."""
    return agent(number, [[number, clock, *[0] * (SIZES[name] - 2)]], reward, **how)


@st.composite
def games(draw):
    """Draw the messages of a player whose agents have two behaviors, and change them between two episodes."""
    places = draw(st.integers(1, 4))
    names = [draw(st.sampled_from(NAMES)) for _ in range(places)]
    ids = list(range(places))
    decided = [False] * places
    script = []
    clock = 0
    for _ in range(draw(st.integers(2, 25))):
        message = {name: ([], []) for name in NAMES}
        for place in range(places):
            event = draw(st.sampled_from(EVENTS[:-1]))
            clock += 1
            reward = draw(st.sampled_from((-1.0, 0.0, 0.5)))
            if ("end" in event or "interrupt" in event) and decided[place]:
                how = dict(done=True, interrupted="interrupt" in event)
                message[names[place]][0].append(
                    info(names[place], ids[place], clock, reward, **how)
                )
                decided[place] = False
                names[place] = draw(st.sampled_from(NAMES))  # the id stays, as in WallJump
            if "decide" in event:
                message[names[place]][1].append(info(names[place], ids[place], clock, reward))
                decided[place] = True
        found = {name: ends + deciding for name, (ends, deciding) in message.items()}
        if any(found.values()):
            script.append({name: agents for name, agents in found.items() if agents})
    first = {name: [info(name, 10 + i, 0)] for i, name in enumerate(NAMES)}  # they leave at once
    gone = {name: [info(name, 10 + i, 0, done=True)] for i, name in enumerate(NAMES)}
    last = {name: [info(name, 20, 1000)] for name in NAMES}
    return [first, gone, *script, last], places + 1


def play(envs, name):
    """Act with the policy until the last message, and return the transitions of a training loop."""
    out = []
    pending = {}
    obs, infos = envs.reset()
    while not (obs[infos["ready"], 1] == 1000).any():
        continuous, discrete = policy(name, obs)
        for slot in np.flatnonzero(infos["ready"]):
            pending[slot] = tuple(obs[slot].tolist())
        rows = continuous
        if discrete is not None:  # UnityEnvs takes rows of both, UnityVecEnv a dict
            both = {"continuous": continuous, "discrete": discrete}
            rows = both if type(envs) is UnityVecEnv else np.concatenate([continuous, discrete], 1)
        obs, rewards, terminated, truncated, infos = envs.step(rows)
        for slot in np.flatnonzero(infos["closed"]):
            ended = bool(terminated[slot] or truncated[slot])
            after = infos["final_obs"][slot] if ended else obs[slot]
            row = (rewards[slot], tuple(after.tolist()), bool(terminated[slot]), ended)
            out.append((pending.pop(slot), *row))
    return out


def actions_in(reply):
    """Return the actions in a reply, by behavior."""
    return {
        name: [(list(row.continuous_actions), list(row.discrete_actions)) for row in rows.value]
        for name, rows in reply.agent_actions.items()
        if rows.value
    }


class Frozen:
    """Plays the behavior that is not trained, in place of an ONNX file."""

    notice = None
    path = "the same policy"

    def forget(self, agents):
        list(agents)

    def forget_all(self):
        pass

    def act(self, agents, observations, allowed, continuous, branches):
        numbers, options = policy(agents[0][0], observations[0])
        return numbers, np.zeros((len(numbers), 0), int) if options is None else options


class Members:
    """The processes of a hub, here threads of this process."""

    def __init__(self, monkeypatch, hub):
        self.local = threading.local()
        self.hub = hub
        self.results = {}
        self.threads = []
        monkeypatch.setattr(shared, "settings", lambda: self.local.settings)

    def start(self, name, function, num_players=1, **more):
        def run():
            self.local.settings = json.loads(self.hub.environment(name)[shared.VARIABLE])
            try:
                settings = dict(behavior=name, num_players=num_players, **more)
                with closing(SharedUnityEnvs("Mixed", **settings)) as envs:
                    envs.wait_for_others()
                    self.results[name] = function(envs)
            except BaseException as error:
                self.results[name] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def serve(self, seconds=60):
        deadline = time.monotonic() + seconds
        while any(thread.is_alive() for thread in self.threads):
            assert time.monotonic() < deadline, "the processes are stuck"
            self.hub.step(0.02)
            if not self.hub.training and self.hub.all_ready():
                self.hub.go()
        for result in self.results.values():
            if isinstance(result, BaseException):
                raise result
        return self.results


def make_hub(players, timeout=60, names=NAMES, max_restarts=None):
    """Return a hub for scripted players. A player that is started again is the next one of the list."""
    players = list(players)
    num_players = len(players) if max_restarts is None else 1

    def make_player(worker, seed, is_trained):
        port = players.pop(0).port
        return shared.HubPlayer(
            "editor", worker, port - worker, timeout, [], seed=seed, is_trained=is_trained
        )

    return shared.Hub(list(names), make_player, num_players, 0, timeout)


@settings(max_examples=60, deadline=None)
@given(games())
def test_two_behaviors_store_what_two_runs_with_the_other_one_frozen_store(game):
    script, places = game
    with pytest.MonkeyPatch.context() as monkeypatch:
        player = ScriptedPlayer(script, SPECS)
        with closing(make_hub([player])) as hub:
            members = Members(monkeypatch, hub)
            for name in NAMES:
                members.start(name, lambda envs, name=name: play(envs, name), max_agents=places)
            together = members.serve()
        sent = [actions_in(reply) for reply in player.replies]

    for i, name in enumerate(NAMES):
        alone = ScriptedPlayer(script, SPECS)
        settings = dict(behavior=name, max_agents=places, timeout=60)
        with closing(UnityVecEnv("editor", base_port=alone.port, **settings)) as envs:
            envs.players[0].policies[NAMES[1 - i]] = Frozen()
            expected = play(envs, name)
        assert Counter(together[name]) == Counter(expected)
        assert sent == [actions_in(reply) for reply in alone.replies], "the game gets the same"


@pytest.mark.parametrize(("num_players", "delay"), [(2, 0), (3, 0), (3, 0.003)])
def test_players_that_wait_for_different_behaviors_do_not_wait_forever(
    monkeypatch, num_players, delay
):
    """One player asks A, another one B, and each process waits for both players.

    With a delay, one of the processes is slow, and several messages of a player arrive together.
    """
    fill = shared.Channel._fill

    def fill_late(channel, deadline):
        if shared.settings()["behavior"] == NAMES[0]:
            time.sleep(delay)
        fill(channel, deadline)

    monkeypatch.setattr(shared.Channel, "_fill", fill_late)
    both = {name: [info(name, i, 1)] for i, name in enumerate(NAMES)}
    scripts = []
    for number in range(num_players):
        script = [both]
        for step in range(2, 30):
            i = (number + step) % 2
            script.append({NAMES[i]: [info(NAMES[i], i, step, 1.0)]})
        last = {name: [info(name, i, 1000, 1.0)] for i, name in enumerate(NAMES)}
        scripts.append([*script, last, *[{}] * 3])

    def collect(envs, name):
        """Return the decisions of each slot until all players are at their ends."""
        obs, infos = envs.reset()
        total = np.zeros(envs.num_envs)
        while (obs[:, 1] < 1000).any():
            assert infos["ready"].any(), "a step returns when an agent requests a decision"
            continuous, discrete = policy(name, obs)
            rows = continuous
            if discrete is not None:
                rows = np.concatenate([continuous, discrete], 1)
            obs, rewards, *_, infos = envs.step(rows)
            total += rewards
        return total.tolist()

    with closing(make_hub([ScriptedPlayer(script, SPECS) for script in scripts])) as hub:
        members = Members(monkeypatch, hub)
        for name in NAMES:
            function = lambda envs, name=name: collect(envs, name)
            members.start(name, function, num_players=num_players)
        results = members.serve()
    for name in NAMES:
        expected = [sum(name in message for message in script[1:-3]) for script in scripts]
        assert results[name] == expected


def test_a_player_goes_on_after_an_end_while_that_behavior_learns(monkeypatch):
    """The process of an agent that has only ended is not waited for: here it is busy until the other one has acted."""
    long, short = NAMES
    both = {name: [info(name, i, 1)] for i, name in enumerate(NAMES)}
    ends = {short: [info(short, 1, 2, 1.0, done=True)]}
    later = [{long: [info(long, 0, step)]} for step in range(3, 6)]
    last = {name: [info(name, 10 + i, 1000)] for i, name in enumerate(NAMES)}
    player = ScriptedPlayer([both, ends | later[0], *later[1:], last], SPECS)
    has_acted = threading.Event()

    def act(envs, name):
        obs, infos = envs.reset()
        decisions = 0
        while not (obs[infos["ready"], 1] == 1000).any():
            continuous, discrete = policy(name, obs)
            rows = continuous if discrete is None else np.concatenate([continuous, discrete], 1)
            envs.step_async(rows)
            decisions += infos["ready"].sum()
            if name == short:
                assert has_acted.wait(60), "the other behavior waits for this one"
            if decisions == 4:
                has_acted.set()
            obs, *_, infos = envs.step_wait()
        return int(decisions)

    with closing(make_hub([player])) as hub:
        members = Members(monkeypatch, hub)
        for name in NAMES:
            members.start(name, lambda envs, name=name: act(envs, name), max_agents=2)
        assert members.serve(90) == {long: 4, short: 1}


def test_a_lost_player_is_started_again_for_all_behaviors(monkeypatch, capsys):
    both = lambda step: {name: [info(name, i, step, 1.0)] for i, name in enumerate(NAMES)}
    first = ScriptedPlayer([both(1), both(2), both(3)], SPECS)  # it quits then
    second = ScriptedPlayer([both(1), both(1000)], SPECS)

    def collect(envs, name):
        obs, infos = envs.reset()
        restarted = []
        while (obs[:, 1] < 1000).any():
            continuous, discrete = policy(name, obs)
            rows = continuous if discrete is None else np.concatenate([continuous, discrete], 1)
            obs, rewards, _, _, infos = envs.step(rows)
            if "restarted" in infos:
                restarted.append((infos["restarted"].tolist(), rewards.tolist()))
        return restarted

    with closing(make_hub([first, second], max_restarts=1)) as hub:
        members = Members(monkeypatch, hub)
        for name in NAMES:
            function = lambda envs, name=name: collect(envs, name)
            members.start(name, function, max_restarts=1)
        results = members.serve()
    assert results == {name: [([True], [0.0])] for name in NAMES}, "the lost decision has no reward"
    assert capsys.readouterr().out.count("has quit; restarting it (attempt 1 of 1)") == 2


def test_a_player_that_starts_again_gets_the_parameters_of_a_behavior_that_has_ended(monkeypatch):
    """Those of its last lesson, although the process that has set them does not exist any more."""
    long, short = NAMES
    both = lambda step: {name: [info(name, i, step, 1.0)] for i, name in enumerate(NAMES)}
    first = ScriptedPlayer([both(1), both(2), both(3), both(4)], SPECS)  # it quits then
    second = ScriptedPlayer([both(1), both(1000)], SPECS)

    def act(envs, name):
        obs, infos = envs.reset()
        for step in itertools.count():
            if (obs[:, 1] == 1000).any() or (name == long and step == 2):
                return step
            if name == long and step == 1:
                envs.set_parameters({"mass": 2.5})
            continuous, discrete = policy(name, obs)
            rows = continuous if discrete is None else np.concatenate([continuous, discrete], 1)
            obs, *_, infos = envs.step(rows)

    with closing(make_hub([first, second], max_restarts=1)) as hub:
        adds = lambda player, behavior: player.policies.update({behavior: Frozen()})
        monkeypatch.setattr(hub, "_add_policy", adds)
        members = Members(monkeypatch, hub)
        for name in NAMES:
            function = lambda envs, name=name: act(envs, name)
            members.start(name, function, max_restarts=1, parameters={"mass": 1.5, name: 1.0})
        while long not in members.results:
            hub.step(0.02)
            if not hub.training and hub.all_ready():
                hub.go()
        hub.play_on(hub.members[0], "the same policy")
        members.serve()
    for data, mass in ((first.first.side_channel, 1.5), (second.first.side_channel, 2.5)):
        assert all(name.encode() in data for name in NAMES)
        (last,) = struct.unpack("<f", data[data.rindex(b"mass") + 8 :][:4])
        assert last == mass


def test_a_behavior_is_told_when_the_rollout_of_another_one_is_complete(monkeypatch):
    """With the message whose rewards complete it: the second one of Long, the last of its two decisions."""
    long, short = NAMES
    both = [{name: [info(name, i, step)] for i, name in enumerate(NAMES)} for step in range(1, 5)]
    last = {name: [info(name, i, 1000)] for i, name in enumerate(NAMES)}
    told = {}

    def act(envs, name):
        told[name] = []
        obs, infos = envs.reset()
        missing = 2
        while not (obs[:, 1] == 1000).any():
            envs.set_missing(missing if name == long else -1)
            continuous, discrete = policy(name, obs)
            rows = continuous if discrete is None else np.concatenate([continuous, discrete], 1)
            obs, *_, infos = envs.step(rows)
            missing = missing - 1 or 2
            told[name].append(envs.others_learn)

    with closing(make_hub([ScriptedPlayer([*both, last], SPECS)])) as hub:
        members = Members(monkeypatch, hub)
        for name in NAMES:
            members.start(name, lambda envs, name=name: act(envs, name))
        members.serve()
    assert told == {long: [False] * 4, short: [False, True, False, True]}


def test_a_note_after_an_end_is_not_an_answer(monkeypatch):
    """The side channels of a process arrive after the player has already asked its agents again."""
    long, short = NAMES
    hub = shared.Hub.__new__(shared.Hub)
    member = shared.Member(long)
    hub.members = [member]
    seat = shared.Seat(0)
    seat.started = True
    seat.asked = {member}
    answered = []
    monkeypatch.setattr(hub, "_answer_when_complete", lambda x: answered.append(list(x.answers)))

    note = shared.UnityMessageProto()
    note.unity_input.rl_input.side_channel = bytes(16) + bytes(4)
    hub._handle(member, seat, shared.NOTE, note.SerializeToString())
    assert not answered and seat.asked == {member}

    answer = shared.UnityMessageProto()
    answer.unity_input.rl_input.agent_actions[long].value.add()
    content = struct.pack("!i", -1) + answer.SerializeToString()
    hub._handle(member, seat, shared.ANSWER, content)
    ((first, second),) = answered
    assert first.side_channel and second.agent_actions, "both reach the player, with one message"


def test_a_behavior_that_appears_later_is_trained(monkeypatch):
    long, short = NAMES
    early = [{long: [info(long, 0, step)]} for step in range(1, 50)]
    late = [{name: [info(name, i, 1000)] for i, name in enumerate(NAMES)}]
    player = ScriptedPlayer([*early, *late, *late], SPECS)
    with closing(make_hub([player])) as hub:
        members = Members(monkeypatch, hub)
        for name in NAMES:
            members.start(name, lambda envs: envs.reset()[0][:, 1].tolist())
        assert members.serve() == {long: [1000.0], short: [1000.0]}


def test_a_team_that_appears_before_the_last_behavior_is_trained(monkeypatch):
    long, short = NAMES
    team = "Long?team=1"
    script = [
        {long: [info(long, 0, 1)]},
        {team: [info(long, 1, 2)]},
        {short: [info(short, 2, 3)]},
        {team: [info(long, 1, 1000)], short: [info(short, 2, 1000)]},
    ]
    player = ScriptedPlayer(script, SPECS | {team: (2, ())})
    with closing(make_hub([player], names=("Long", short))) as hub:
        members = Members(monkeypatch, hub)
        for name in ("Long", short):
            members.start(
                name, lambda envs, name=name: play(envs, long if name == "Long" else short)
            )
        assert members.serve()["Long"] == []
    assert [list(reply.agent_actions) for reply in player.replies[2:]] == [[short]]


def test_a_behavior_that_does_not_exist_is_refused_with_those_that_do(monkeypatch):
    player = ScriptedPlayer([{NAMES[0]: [info(NAMES[0], 0, 1)]}] * 300, SPECS)
    with closing(make_hub([player], names=(NAMES[0], "Shrot"))) as hub:
        members = Members(monkeypatch, hub)
        for name in (NAMES[0], "Shrot"):
            members.start(name, lambda envs: None)
        with pytest.raises(
            PlayerError, match="no agent of behavior Shrot .* it has Long"
        ) as caught:
            members.serve()
        hub.stop()
        for thread in members.threads:
            thread.join(60)
    assert "\n" not in str(caught.value)
    assert all(isinstance(x, KeyboardInterrupt) for x in members.results.values())


def test_a_player_without_agents_that_are_trained_is_an_error(monkeypatch):
    both = {name: [info(name, i, 1)] for i, name in enumerate(NAMES)}
    other = {"Other?team=0": [agent(5, [[1.0]])]}
    player = ScriptedPlayer([both, *[other] * 1_000_000], SPECS | {"Other?team=0": (1, ())})
    with closing(make_hub([player], timeout=1)) as hub:
        members = Members(monkeypatch, hub)
        for name in NAMES:
            members.start(name, lambda envs, name=name: play(envs, name), max_restarts=0)
        with pytest.raises(PlayerGone, match="no agent of Long.* that requests a decision for 1 s"):
            members.serve()


def test_nobody_else_can_join(monkeypatch):
    player = ScriptedPlayer([{}] * 3, SPECS)
    with closing(make_hub([player])) as hub:
        port = hub.listener.getsockname()[1]
        for key in ("", "wrong", None):
            greeting = json.dumps({"behavior": NAMES[0], "worker": 0, "key": key}).encode()
            for frame in (
                struct.pack("!IB", len(greeting), 0) + greeting,
                b"\0\0\0\1\1?",
                b"\xff" * 9,
            ):
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    sock.sendall(frame)
                    sock.settimeout(0.01)
                    closed = False
                    deadline = time.monotonic() + 60
                    while not closed and time.monotonic() < deadline:
                        hub.step(0)
                        with suppress(TimeoutError):
                            closed = sock.recv(1) == b""
                    assert closed
        assert not any(member.channels for member in hub.members) and not hub.strangers


def test_a_process_notices_that_the_hub_has_ended(monkeypatch):
    both = {name: [info(name, i, 1)] for i, name in enumerate(NAMES)}
    player = ScriptedPlayer([both] * 3, SPECS)
    hub = make_hub([player])
    members = Members(monkeypatch, hub)
    for name in NAMES:
        members.start(name, lambda envs, name=name: play(envs, name), max_restarts=0)
    while not hub.training:
        hub.step(0.02)
        if hub.all_ready():
            hub.training = True
    hub.close()
    for thread in members.threads:
        thread.join(60)
    for result in members.results.values():
        assert "the process that has the players has ended" in str(result)
