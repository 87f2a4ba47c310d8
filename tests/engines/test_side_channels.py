"""Test side channels of the caller: they are read and written around each exchange, a set per player."""

import re
import struct
import subprocess
import sys
import uuid
from contextlib import closing

import numpy as np
import pytest
from conftest import ROOT, ScriptedPlayer, agent
from mlagents_envs.side_channel import OutgoingMessage, SideChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

from unity_vec_env import UnityVecEnv

NAME = "Scripted?team=0"
ID = uuid.UUID("621f0a70-4f87-11ea-a6bf-784f4387d1f7")


class Words(SideChannel):
    """Sends and receives strings."""

    def __init__(self, channel=ID):
        super().__init__(channel)
        self.heard = []

    def on_message_received(self, message):
        self.heard.append(message.read_string())

    def say(self, text):
        message = OutgoingMessage()
        message.write_string(text)
        self.queue_message_to_send(message)


def frame(content, channel=ID):
    """A message as it is on the wire: the channel, the length, the content."""
    return channel.bytes_le + struct.pack("<i", len(content)) + content


def text(word):
    return struct.pack("<i", len(word)) + word.encode()


def request():
    return {NAME: [agent(0, [[0.0]])]}


def act(envs):
    return envs.step(np.zeros(envs.action_space.shape, np.float32))


def test_messages_are_read_and_written_with_each_exchange(scripted):
    words = Words()
    words.say("at the start")
    data = [frame(text("one")), frame(text("two")) + frame(text("three")), b"", frame(text("four"))]
    settings = dict(side_channels=[words])
    envs, player = scripted([request()] * 4, side_channel=data, settings=settings)
    assert frame(text("at the start")) in player.first.side_channel
    envs.reset()
    assert words.heard == ["one"]
    words.say("left")
    words.say("right")
    act(envs)
    assert words.heard == ["one", "two", "three"]
    act(envs)
    assert words.heard == ["one", "two", "three"]
    words.say("again")
    envs.reset()
    assert words.heard[-1] == "four"
    assert player.replies[0].side_channel == frame(text("left")) + frame(text("right"))
    assert player.replies[1].side_channel == b"", "a message is sent once"
    assert player.replies[2].command == 1 and player.replies[2].side_channel == frame(text("again"))
    assert envs.side_channels == [[words]]


def test_the_own_channels_still_work(scripted):
    """Time scale, environment parameters and statistics, also beside a channel of the caller with the same id."""
    stat = text("height") + struct.pack("<fi", 2.5, 0)
    statistics = StatsSideChannel()
    parameters = EnvironmentParametersChannel()
    settings = dict(side_channels=[statistics, parameters], parameters={"mass": 3.0})
    data = frame(stat, statistics.channel_id)
    envs, player = scripted([request()] * 2, side_channel=data, settings=settings)
    assert envs.reset()[1]["stats"] == {"height": 2.5}
    assert [value for value, _ in statistics.get_and_reset_stats()["height"]] == [2.5]
    mass = lambda number: frame(text("mass") + struct.pack("<if", 0, number), parameters.channel_id)
    assert mass(3.0) in player.first.side_channel
    parameters.set_float_parameter("mass", 4.0)
    act(envs)
    assert player.replies[0].side_channel == mass(4.0)


def test_a_channel_without_a_receiver_is_mentioned_once(scripted, capsys):
    data = [frame(b"x", uuid.UUID(int=5))] * 2
    envs, _ = scripted([request()] * 2, side_channel=data, settings=dict(side_channels=[Words()]))
    envs.reset(), act(envs)
    assert capsys.readouterr().out.count("Ignoring the game's messages on side channel") == 1


def test_an_error_in_a_channel_of_the_caller_is_raised_as_it_is(scripted):
    class Broken(Words):
        def on_message_received(self, message):
            raise ValueError("my own mistake")

    settings = dict(side_channels=[Broken()])
    with pytest.raises(ValueError, match="^my own mistake$"):
        scripted([request()], side_channel=frame(text("x")), settings=settings)


class TwoPlayers:
    """Two scripted players that are accepted as the players 0 and 1 of one env."""

    def __init__(self, monkeypatch, **settings):
        from onefile_rl.engines import unity

        players = [
            ScriptedPlayer([request()] * 3, side_channel=frame(text(f"I am {i}"))) for i in (0, 1)
        ]
        Player = unity.Player

        def make(path, worker, base_port, timeout, args, **kwargs):
            return Player("editor", 0, players[worker].port, timeout, args, **kwargs)

        monkeypatch.setattr("unity_vec_env.Player", make)
        self.players = players
        self.envs = UnityVecEnv("two", num_players=2, **settings)


def test_each_player_has_its_own_channels(monkeypatch):
    two = TwoPlayers(monkeypatch, side_channels=lambda worker: [Words()])
    with closing(two.envs) as envs:
        (first,), (second,) = envs.side_channels
        envs.reset()
        assert (first.heard, second.heard) == (["I am 0"], ["I am 1"])
        second.say("to player 1")
        act(envs)
    assert two.players[0].replies[0].side_channel == b""
    assert two.players[1].replies[0].side_channel == frame(text("to player 1"))


def test_a_restarted_player_keeps_its_channels():
    words = Words()
    envs = UnityVecEnv("Mixed", max_agents=16, max_restarts=1, side_channels=[words])
    with closing(envs):
        envs.reset()
        envs.players[0].process.kill()
        while not envs.restarts:
            act(envs)
        assert envs.side_channels == [[words]]
        assert words in envs.players[0].side_channels


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (dict(side_channels=[Words()], num_players=2), "give a function that returns a new list"),
        (dict(side_channels=[Words(), Words()]), "two channels of a player have the same id"),
        (dict(side_channels=["Words"]), "str is not a SideChannel of mlagents_envs"),
        (dict(side_channels=lambda worker: [SHARED], num_players=2), "two players share a channel"),
    ],
)
def test_channels_that_cannot_work_are_refused_before_the_game_starts(settings, match):
    with pytest.raises(ValueError, match=match) as caught:
        UnityVecEnv("no/such/build", **settings)
    assert "\n" not in str(caught.value)


SHARED = Words()


def test_a_channel_that_forgot_to_call_its_base_class_is_refused():
    class Forgot(SideChannel):
        def __init__(self):
            pass

        def on_message_received(self, message):
            pass

    with pytest.raises(ValueError, match="whose __init__ calls"):
        UnityVecEnv("no/such/build", side_channels=[Forgot()])


def test_the_example_of_the_documentation_runs(tmp_path):
    """As a program of its own, with a scripted player instead of the build."""
    page = (ROOT / "docs" / "unity.md").read_text()
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "SideChannel" in block
    ]
    player = ScriptedPlayer([request()] * 3, side_channel=[b"", frame(text("level 2"))])
    path = '"./Builds/MyScene"'
    assert example.count(path) == 1
    (tmp_path / "example.py").write_text(
        example.replace(path, f'"editor", base_port={player.port}')
    )
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "The game says: level 2" in done.stdout
    assert any(frame(text("night")) in reply.side_channel for reply in player.replies)
