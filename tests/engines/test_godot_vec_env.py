"""Test GodotVecEnv with fake_godot.py, a game in Python that can crash, hang and send invalid messages."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, call, free_port, listening, train
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hostile import assert_ends

import crossq_continuous as crossq
import ppo_continuous_multiagent as ppo
import ppo_hybrid_multiagent as hybrid
import sac_continuous as sac
from godot_vec_env import GodotVecEnv, as_pettingzoo, as_sb3
from onefile_rl.engines import godot, process, vec_env
from onefile_rl.engines.godot import GodotError, GodotGone
from onefile_rl.engines.scenes import EngineError

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BOX = {"obs": {"size": [2], "space": "box"}}
PUSH = {"push": {"size": 2, "action_type": "continuous"}}


def info(n=2, obs=BOX, actions=PUSH, names=None):
    names = names or ["shared_policy"] * n
    spaces = {"observation_space": [obs] * n, "action_space": [actions] * n}
    return {"type": "env_info", "n_agents": n, "agent_policy_names": names, **spaces}


def reset(*rows, infos=None):
    return {
        "type": "reset",
        "obs": [{"obs": row} for row in rows],
        "info": infos or [{}] * len(rows),
    }


def step(*rows, reward=None, done=None, infos=None):
    n = len(rows)
    out = {"type": "step", "obs": [{"obs": row} for row in rows], "info": infos or [{}] * n}
    return out | {"reward": reward or [0.0] * n, "done": done or [False] * n}


def launch(*steps, n=2, **more):
    return {
        "info": info(n),
        "reset": reset(*[[i, 0] for i in range(n)]),
        "steps": list(steps),
    } | more


class Fake:
    """A game with one scenario per launch; the last scenario repeats."""

    def __init__(self, folder, *launches):
        folder = Path(tempfile.mkdtemp(dir=folder))
        self.log, scenario, game = folder / "log", folder / "scenario.json", folder / "game.x86_64"
        scenario.write_text(json.dumps({"log": str(self.log), "launches": launches}))
        fake = ROOT / "tests" / "fake_godot.py"
        game.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {fake} --scenario={scenario} "$@"\n')
        game.chmod(0o755)
        self.path = str(game)

    def received(self):
        """Return the launches and the messages that the game has received, in order."""
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )

    def actions(self):
        return [line["action"] for line in self.received() if line.get("type") == "action"]

    def pids(self):
        return [line["pid"] for line in self.received() if "launch" in line]


@pytest.fixture
def play(tmp_path):
    """Return a function that makes an env of launches. The env and its games are ended after the test."""
    opened = []

    def make(*launches, **kwargs):
        fake = Fake(tmp_path, *launches)
        opened.append((None, fake))
        envs = GodotVecEnv(fake.path, **{"timeout": 60, **kwargs})
        opened.append((envs, fake))
        return envs, fake

    yield make
    for envs, _ in opened:
        if envs is not None:
            envs.close()
    if pids := [pid for _, fake in opened for pid in fake.pids()]:
        assert_ends(pids)


def act(envs, value=0.0):
    return envs.step(np.full(envs.action_space.shape, value, envs.action_space.dtype))


# The contract


def test_is_a_gymnasium_vector_env(play):
    envs, _ = play(launch(step([1, 1], [2, 2])))
    assert isinstance(envs, gym.vector.VectorEnv) and envs.num_envs == 2
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    assert envs.single_observation_space.shape == (
        2,
    ) and envs.single_action_space == gym.spaces.Box(-1, 1, (2,))
    obs, infos = envs.reset()
    assert (
        envs.observation_space.contains(obs) and infos["ready"].all() and not infos["closed"].any()
    )
    after, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
    assert after.tolist() == [[1, 1], [2, 2]] and infos["ready"].all() and infos["closed"].all()
    assert rewards.shape == terminated.shape == truncated.shape == (2,) and "final_obs" not in infos
    assert obs.tolist() == [[0, 0], [1, 0]], "not overwritten by the next step"


def test_done_is_a_termination_unless_get_info_says_otherwise(play):
    """Four agents end: with all entries of get_info(), with a final observation, with a time limit, and with none."""
    told = [
        {"terminal_observation": {"obs": [7, 7]}, "TimeLimit.truncated": True, "is_success": False},
        {"terminal_observation": {"obs": [8, 8]}, "is_success": True},
        {"TimeLimit.truncated": True},
        {},
    ]
    first = step(*[[5, i] for i in range(4)], reward=[1.0] * 4)
    ends = step(*[[6, i] for i in range(4)], reward=[0.5] * 4, done=[True] * 4, infos=told)
    envs, _ = play(launch(first, ends, first, n=4))
    envs.reset()
    act(envs)
    obs, rewards, terminated, truncated, infos = act(envs)
    assert (
        truncated.tolist() == [True, False, True, False]
        and terminated.tolist() == (~truncated).tolist()
    )
    assert [row.tolist() for row in infos["final_obs"]] == [[7, 7], [8, 8], [5, 2], [5, 3]], (
        "without a final observation, the one before"
    )
    assert obs[:, 0].tolist() == [6] * 4, "the first observations of the next episodes"
    assert infos["final_info"]["episode"]["r"].tolist() == [1.5] * 4
    assert infos["final_info"]["episode"]["l"].tolist() == [2] * 4
    assert infos["is_success"] == {0: False, 1: True}
    assert "final_obs" not in act(envs)[4]


def test_several_observations_are_one_vector_in_the_games_order(play):
    spaces = {"eyes": {"size": [2], "space": "box"}, "arm": {"size": [2, 2], "space": "box"}}
    seen = {"arm": [[3, 4], [5, 6]], "eyes": [1, 2]}
    first = {"info": info(1, spaces), "reset": {"type": "reset", "obs": [seen]}}
    envs, _ = play(first)
    assert envs.reset()[0].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert envs.sensors == [2, 4] and envs.inputs == ["eyes", "arm"]


@pytest.mark.parametrize("order", [[3, 5, 6], [5, 6, 3]])
def test_images_are_uint8_height_width_channel(play, order):
    """The plugin's cameras give their shape as (channels, height, width) and send rows of pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    spaces = BOX | {"camera_2d": {"size": order, "space": "box"}}
    seen = {"type": "reset", "obs": [{"obs": [1, 2], "camera_2d": pixels.tobytes().hex()}]}
    envs, _ = play({"info": info(1, spaces), "reset": seen})
    obs, _ = envs.reset()
    assert envs.observation_space.contains(obs) and obs["vector"].tolist() == [[1, 2]]
    np.testing.assert_array_equal(obs["camera_2d"][0], pixels)
    assert envs.sensors == [2, "camera_2d"]


def test_actions_go_to_their_agents_by_name(play):
    both = {
        "turn": {"size": 3, "action_type": "discrete"},
        "push": {"size": 2, "action_type": "continuous"},
    }
    both |= {
        "gear": {"size": 4, "action_type": "discrete"},
        "lift": {"size": 1, "action_type": "continuous"},
    }
    envs, fake = play(launch(step([0, 0], [0, 0])) | {"info": info(2, actions=both)})
    assert envs.single_action_space["discrete"] == gym.spaces.MultiDiscrete([3, 4])
    envs.reset()
    continuous, discrete = np.array([[0.5, -0.5, 1], [0, 0.25, -1]]), np.array([[2, 3], [0, 1]])
    envs.step({"continuous": continuous, "discrete": discrete})
    assert fake.actions() == [
        [
            {"push": [0.5, -0.5], "lift": [1.0], "turn": 2, "gear": 3},
            {"push": [0.0, 0.25], "lift": [-1.0], "turn": 0, "gear": 1},
        ]
    ]


def test_action_masks_come_from_get_info(play):
    turn = {"turn": {"size": 3, "action_type": "discrete"}}
    mask = [{"action_mask": [1, 0, True]}, {}]
    first = {"info": info(2, actions=turn), "reset": reset([0, 0], [0, 0], infos=mask)}
    envs, _ = play(
        first
        | {"steps": [step([0, 0], [0, 0]), step([0, 0], [0, 0], infos=[{"action_mask": [1]}, {}])]}
    )
    assert envs.reset()[1]["action_mask"].tolist() == [[True, False, True], [True] * 3]
    assert act(envs)[4]["action_mask"].all()
    with pytest.raises(GodotError, match="agent 0: its action_mask must have 3 entries"):
        act(envs)


def test_statistics_are_means_over_the_agents(play):
    told = [{"stats": {"speed": 1.0, "hits": 3}}, {"stats": {"speed": 2.0}}]
    envs, _ = play(launch(step([0, 0], [0, 0], infos=told), step([0, 0], [0, 0])))
    envs.reset()
    assert act(envs)[4]["stats"] == {"speed": 1.5, "hits": 3.0}
    assert "stats" not in act(envs)[4]


def test_one_of_several_policies_is_trained_and_the_others_act_at_random(play, capsys):
    names = ["fox", "hare", "fox"]
    game = {
        "info": info(3, names=names),
        "reset": reset([0, 0], [1, 1], [2, 2]),
        "steps": [step([3, 3], [4, 4], [5, 5])],
    }
    envs, fake = play(game, policy="fox")
    assert "Training fox; agents of hare act at random" in capsys.readouterr().out
    assert envs.reset()[0].tolist() == [[0, 0], [2, 2]]
    assert act(envs, 0.5)[0].tolist() == [[3, 3], [5, 5]]
    ((first, other, second),) = fake.actions()
    assert (
        first == second == {"push": [0.5, 0.5]}
        and other != first
        and max(map(abs, other["push"])) <= 1
    )
    with pytest.raises(
        GodotError, match="has several policies, choose one with --behavior: fox, hare"
    ):
        play(game)
    with pytest.raises(GodotError, match="has no policy cat: fox, hare"):
        play(game, policy="cat")


def test_older_plugins_send_one_space_for_all_agents(play):
    old = {"type": "env_info", "n_agents": 2, "observation_space": BOX, "action_space": PUSH}
    envs, _ = play(launch() | {"info": old})
    assert envs.num_envs == 2 and envs.single_observation_space.shape == (2,)


def test_games_run_as_fast_as_they_can_and_are_seeded(play, monkeypatch):
    envs, fake = play(launch(), num_players=2, seed=5, action_repeat=3, player_args=["--mine=1"])
    envs.close()
    lines = sorted(" ".join(line["args"]) for line in fake.received() if "launch" in line)
    for number, line in enumerate(lines):
        assert (
            "--headless --fixed-fps 60" in line and "--speedup=1 --action_repeat=3 --mine=1" in line
        )
        assert f"--env_seed={5 + number} " in line, "each game has its own seed"
    monkeypatch.setenv("DISPLAY", ":0")
    envs, fake = play(launch(), real_time=True)
    line = " ".join(fake.received()[0]["args"])
    assert "fixed-fps" not in line and "headless" not in line and "speedup" not in line
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    if sys.platform == "linux":
        with pytest.raises(GodotError, match="needs a display: start this under xvfb-run"):
            play(launch(), headless=False)


def test_reset_starts_new_episodes(play):
    envs, fake = play(
        launch(step([4, 4], [4, 4], reward=[1, 1]), step([5, 5], [5, 5], done=[True, True]))
    )
    envs.reset()
    envs.reset()
    assert sum(line.get("type") == "reset" for line in fake.received()) == 2, (
        "the first call of reset sends no request"
    )
    act(envs)
    envs.step_async(np.zeros((2, 2)))
    obs, infos = envs.reset()
    assert (
        obs.tolist() == [[0, 0], [1, 0]] and "final_obs" not in infos and not infos["closed"].any()
    )
    with pytest.raises(ValueError, match="GodotVecEnv\\(..., seed=7\\)"):
        envs.reset(seed=7)


# Transitions


@st.composite
def scenarios(draw):
    """Draw the launches of each game: steps in which agents continue, end or are truncated, and the step of a crash."""
    length, games, clock = draw(st.integers(1, 12)), [], 0
    n = draw(st.integers(1, 3))
    for game in range(draw(st.integers(1, 2))):
        launches, left = [], length
        while left > 0:
            crash = (
                draw(st.integers(0, left - 1))
                if len(launches) < 2 and draw(st.booleans())
                else None
            )
            steps, rows = [], []
            for _ in range(n):
                clock += 1
                rows.append([game, clock])
            first = reset(*rows)
            for _ in range(left if crash is None else crash):
                rows, told, done = [], [], []
                for _ in range(n):
                    clock += 2
                    event = draw(
                        st.sampled_from(
                            (
                                "continues",
                                "continues",
                                "ends",
                                "is truncated",
                                "ends without a final observation",
                            )
                        )
                    )
                    rows.append([game, clock])
                    done.append(event != "continues")
                    seen = (
                        {"terminal_observation": {"obs": [game, clock - 1]}}
                        if event in ("ends", "is truncated")
                        else {}
                    )
                    told.append(
                        seen | ({"TimeLimit.truncated": True} if event == "is truncated" else {})
                    )
                reward = [draw(st.sampled_from((-1.0, 0.0, 0.5, 2.0))) for _ in range(n)]
                steps.append(step(*rows, reward=reward, done=done, infos=told))
            left -= len(steps) + (crash is not None)
            fault = (
                [draw(st.sampled_from(("crash", "leave", "half", "no JSON")))]
                if crash is not None
                else []
            )
            launches.append({"info": info(n), "reset": first, "steps": steps + fault})
        games.append(launches)
    return length, games


def transitions_of_each_agent(launches, told):
    """Return the transitions (obs, action, reward, next obs, terminated, truncated) of the messages."""
    out = []
    for launch, actions in zip(launches, told, strict=False):
        seen = launch["reset"]["obs"]
        for message, action in zip(launch["steps"], actions, strict=False):
            if isinstance(message, str):  # a crash: pending decisions get no reward
                break
            for i, said in enumerate(message["info"]):
                ended, cut = message["done"][i], bool(said.get("TimeLimit.truncated"))
                last = said.get("terminal_observation", seen[i]) if ended else message["obs"][i]
                did = tuple(np.float32(action[i]["push"]).tolist())
                row = (
                    tuple(seen[i]["obs"]),
                    did,
                    message["reward"][i],
                    tuple(last["obs"]),
                    ended and not cut,
                    cut,
                )
                out.append(row)
            seen = message["obs"]
    return out


def transitions_of_the_env(envs, length):
    """Return the transitions that a training loop sees, slot by slot."""
    rng, out, running = np.random.default_rng(0), [], [(0.0, 0)] * envs.num_envs
    obs, infos = envs.reset()
    for _ in range(length):
        assert infos["ready"].all()
        actions = rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
        before = obs
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        lost = infos.get("restarted", np.zeros(envs.num_envs, bool))
        assert (infos["closed"] == ~lost).all()
        for slot in range(envs.num_envs):
            ended = bool(terminated[slot] or truncated[slot])
            if lost[slot]:
                assert rewards[slot] == 0 and not ended, "no transition in this row"
                running[slot] = (0.0, 0)
                continue
            after = infos["final_obs"][slot] if ended else obs[slot]
            end = bool(terminated[slot]), bool(truncated[slot])
            did = tuple(before[slot].tolist()), tuple(actions[slot].tolist())
            out.append((*did, rewards[slot], tuple(after.tolist()), *end))
            total, count = running[slot]
            running[slot] = (total + rewards[slot], count + 1)
            if ended:
                episode = infos["final_info"]["episode"]
                assert (episode["r"][slot], episode["l"][slot]) == running[slot]
                running[slot] = (0.0, 0)
    return out


@settings(max_examples=25, deadline=None)
@given(scenarios())
def test_transitions_are_those_of_each_agent(tmp_path_factory, drawn):
    length, games = drawn
    fakes = [Fake(tmp_path_factory.mktemp("game"), *launches) for launches in games]
    both = tmp_path_factory.mktemp("both") / "game.x86_64"  # the seed decides which one runs
    even = f'case "$*" in *env_seed=*[02468]\\ *) exec {fakes[0].path} "$@";; esac'
    both.write_text(f'#!/bin/sh\n{even}\nexec {fakes[-1].path} "$@"\n')
    both.chmod(0o755)
    with closing(
        GodotVecEnv(str(both), num_players=len(games), timeout=60, max_restarts=3)
    ) as envs:
        got = transitions_of_the_env(envs, length)
        assert envs.restarts == sum(
            any(isinstance(s, str) for s in one["steps"]) for game in games for one in game
        )
    expected = []
    for launches, fake in zip(games, fakes, strict=True):
        told = []
        for line in fake.received():
            if "launch" in line:
                told.append([])
            elif line.get("type") == "action":
                told[-1].append(line["action"])
        expected += transitions_of_each_agent(launches, told)
    assert Counter(got) == Counter(expected)


# Games that crash, hang, or send invalid messages: an error of one line, in time, and no process is left

LOST = {
    "crash": "ended with exit code 7: it hurts",
    "leave": "ended with exit code 0",
    "half": "ended with exit code 7",
    "hang": "has not answered for 1 s: check that its scene has a Sync node",
    "drip": "has not answered for 1 s",
    "flood": "has not answered for 1 s",
    "endless": "its message is larger than 512 MiB",
    "no JSON": "its message is not JSON",
    "deep": "its message is not JSON",
    "no UTF-8": "its message is not JSON",
    "no object": "its message is not a JSON object",
    "another type": "sent a message of type 'call' instead of '.*'",
    "script error": "has not answered for 1 s: SCRIPT ERROR: Invalid call. Nonexistent function 'get_obs'",
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.3)


def seconds_until_lost(fault, game):
    """Return the timeout of an env: only a game that does not answer is lost by it."""
    return 1 if "has not answered" in LOST[fault] or game.get("reset") == "hang" else 60


@linux
@pytest.mark.parametrize("fault", LOST)
@pytest.mark.parametrize("when", ["info", "reset", "steps"])
def test_a_lost_game_is_an_error_of_one_line(fault, when, play, patient):
    game = launch() | ({"steps": [fault]} if when == "steps" else {when: fault})
    if fault in ("half", "drip") and when == "reset":
        game["reset"] = "hang"
    start = time.monotonic()
    with pytest.raises(GodotGone, match="game 0 .*") as caught:
        envs, _ = play(game, timeout=seconds_until_lost(fault, game))
        envs.reset()
        act(envs)
    assert "\n" not in str(caught.value) and time.monotonic() - start < 30
    if game.get("reset") != "hang":
        assert caught.match(LOST[fault])


@linux
@pytest.mark.parametrize("fault", ["crash", "hang", "half", "no JSON"])
def test_a_lost_game_is_restarted(fault, play, capsys, patient):
    bad, good = launch(step([3, 3], [4, 4], reward=[1, 1]), fault), launch(step([5, 5], [6, 6]))
    envs, fake = play(bad, good, timeout=seconds_until_lost(fault, bad), max_restarts=1, seed=3)
    envs.reset()
    act(envs)
    obs, rewards, terminated, truncated, infos = act(envs)
    assert (
        infos["restarted"].all()
        and not infos["closed"].any()
        and infos["ready"].all()
        and envs.restarts == 1
    )
    assert (
        obs.tolist() == [[0, 0], [1, 0]]
        and not rewards.any()
        and not (terminated | truncated).any()
    )
    assert "restarting it (attempt 1 of 1)" in capsys.readouterr().out
    assert act(envs)[0].tolist() == [[5, 5], [6, 6]]
    seeds = [
        word
        for line in fake.received()
        if "launch" in line
        for word in line["args"]
        if "seed" in word
    ]
    assert seeds == ["--env_seed=3", "--env_seed=1003"], "a restarted game has a new seed"


@linux
@pytest.mark.parametrize("late", [False, True])
def test_a_message_that_is_sent_twice_restarts_the_game(late, play, capsys):
    """All later answers would be too late by one step. `late`: it arrives with the next answer."""
    first = step([3, 3], [4, 4])
    second = step([5, 5], [6, 6])
    answers = [first, ["both", first, second]] if late else [["both", first, first], second]
    envs, _ = play(launch(*answers), launch(second), max_restarts=1)
    envs.reset()
    for _ in range(len(answers) - (not late)):
        assert "restarted" not in act(envs)[-1]
    obs, *_, infos = act(envs)
    assert infos["restarted"].all() and obs.tolist() == [[0, 0], [1, 0]]
    assert "sent more than one message for a request" in capsys.readouterr().out
    assert act(envs)[0].tolist() == [[5, 5], [6, 6]]


EARLY = {
    "before it connects": {"dies": True},
    "before it describes its agents": {"info": "crash"},
    "before its first observations": {"reset": "crash"},
}


@linux
@pytest.mark.parametrize("when", EARLY)
def test_a_game_that_dies_before_the_first_step_is_restarted(when, play, capsys):
    bad = launch() | EARLY[when]
    good = launch(step([5, 5], [6, 6]))
    envs, fake = play(bad, bad, good, max_restarts=2)
    assert envs.restarts == 2 and envs.num_envs == 2
    out = capsys.readouterr().out
    assert "restarting it (attempt 1 of 2)" in out and "restarting it (attempt 2 of 2)" in out
    obs, infos = envs.reset()
    assert obs.tolist() == [[0, 0], [1, 0]] and infos["ready"].all() and "restarted" not in infos
    assert act(envs)[0].tolist() == [[5, 5], [6, 6]]
    with pytest.raises(GodotGone, match="ended with exit code"):
        play(bad, bad, good, max_restarts=1)


@linux
def test_one_of_several_games_that_dies_before_the_first_step_is_restarted(play):
    second_dies = launch(step([5, 5], [6, 6]), dies="1")  # the seed of the second game
    envs, fake = play(second_dies, num_players=2, max_restarts=1)
    assert envs.num_envs == 4 and envs.restarts == 1 and len(fake.pids()) == 3
    envs.reset()
    assert act(envs)[0].tolist() == [[5, 5], [6, 6]] * 2


MISSING = """ERROR: Cannot open file 'res://main.tscn'.
   at: load (scene/resources/resource_format_text.cpp:1430)
ERROR: Failed loading scene: res://main.tscn.
   at: start (main/main.cpp:4668)"""
SHARP = """ERROR: No loader found for resource: res://M.cs (expected type: Script)
   at: _load (core/io/resource_loader.cpp:358)"""
SCRIPT = """SCRIPT ERROR: Invalid call. Nonexistent function 'go' in base 'Nil'.
          at: _physics_process (res://m.gd:4)
          GDScript backtrace (most recent call first):
              [0] _physics_process (res://m.gd:4)
"""


@pytest.mark.parametrize(
    ("prints", "match"),
    [
        (MISSING, "exit code 3: ERROR: Cannot open file 'res://main.tscn'.$"),
        (SHARP, "exit code 3: ERROR: No loader .* a C# script needs the .NET edition of Godot$"),
        ("Error: Can't open display: \nError: Can't run project.", "exit code 3: Error: Can't run"),
    ],
)
def test_the_first_error_of_a_game_that_does_not_start_is_quoted(prints, match, play):
    """Its last line only says where Godot's own code has noticed it."""
    with pytest.raises(GodotGone, match=match):
        play(launch(prints=prints, dies=True))


def test_errors_of_a_game_that_has_not_connected_are_shown_early(play, capsys, monkeypatch):
    monkeypatch.setattr(process, "NOTICE_SECONDS", 0.3)
    with pytest.raises(GodotGone, match="within 1.5 s: ERROR: No loader found"):
        play(launch(prints=SHARP, never=True), timeout=1.5)
    out = capsys.readouterr().out
    assert out.count("has not connected yet: ERROR: No loader found") == 1


def test_the_error_above_the_last_lines_is_quoted_after_a_crash(play):
    envs, _ = play(launch(["print", SCRIPT, 1, step([1, 1], [2, 2])], "leave"))
    envs.reset()
    act(envs)
    match = "exit code 0: SCRIPT ERROR: .* in base 'Nil'. at: _physics_process .res://m.gd:4.$"
    with pytest.raises(GodotGone, match=match):
        act(envs)


@linux
def test_the_output_of_a_broken_game_is_bounded_and_its_script_errors_are_mentioned(
    play, capsys, monkeypatch
):
    for module in (process, vec_env):
        monkeypatch.setattr(module, "LOG_INTERVAL", 0)
    noisy = ["print", SCRIPT, 10_000, step([1, 1], [2, 2])]  # 2.3 MB
    envs, _ = play(launch(*[noisy] * 8, "hang"), timeout=2)
    envs.reset()
    for _ in range(8):
        act(envs)
    log = envs.players[0].log
    assert os.fstat(log.file.fileno()).st_size < 2 * len(SCRIPT) * 10_000
    assert log.first_lines()[1] == SCRIPT.split("\n")[0] or log.first_lines()[0].startswith(
        "SCRIPT"
    )
    out = capsys.readouterr().out
    assert out.count("reports a script error, and the run continues: SCRIPT ERROR: Invalid") == 1
    assert "Nil'. at: _physics_process (res://m.gd:4)" in out
    with pytest.raises(GodotGone, match="has not answered for 2 s: SCRIPT ERROR: Invalid call"):
        act(envs)


def test_many_episodes_of_one_decision_are_mentioned(play, capsys, monkeypatch):
    monkeypatch.setattr(vec_env, "MANY_EPISODES", 6)
    longer = [step([1, 1], [2, 2]), step([1, 1], [2, 2], done=[True, True])]
    short = [step([1, 1], [2, 2], done=[True, True])] * 5
    envs, _ = play(launch(*longer, *short))
    envs.reset()
    for _ in range(4):
        act(envs)
    assert "in a row" not in capsys.readouterr().out
    for _ in range(3):
        act(envs)
    assert capsys.readouterr().out.count("6 episodes in a row have ended with their first") == 1


def test_a_game_that_never_connects_is_not_restarted(play):
    with pytest.raises(GodotGone, match="has not connected to port .* within 0.4 s") as caught:
        play(launch(never=True), timeout=0.4, max_restarts=3)
    assert "\n" not in str(caught.value)


@linux
def test_only_restarts_in_a_row_count(play):
    once = launch(step([1, 1], [1, 1]), "crash")
    envs, _ = play(once, once, once, launch("crash"), max_restarts=1)
    envs.reset()
    with pytest.raises(GodotGone, match="exit code 7"):
        for _ in range(20):
            act(envs)
    assert envs.restarts == 3, "the last game crashed before its first answer"
    for again in (lambda: act(envs), envs.step_wait, envs.reset):
        with pytest.raises(GodotError, match="the env is closed"):
            again()


@linux
def test_a_restarted_game_with_another_number_of_agents_is_rejected(play):
    envs, _ = play(launch("crash"), launch(n=3), max_restarts=3)
    envs.reset()
    with pytest.raises(GodotError, match="has 3 agents, and had 2"):
        act(envs)


INVALID = {
    "no agents": (info(0), "is invalid .0 agents"),
    "a million million agents": (
        info(1) | {"n_agents": 10**12},
        "is invalid .1000000000000 agents",
    ),
    "too few names": (info(2, names=["a"]), "is invalid"),
    "no spaces": ({"type": "env_info", "n_agents": 2}, "is invalid .'observation_space'"),
    "no observations": (info(obs={}), "agents observe nothing"),
    "an observation without a size": (
        info(obs={"obs": {"size": [0], "space": "box"}}),
        "'obs' has the size .0.",
    ),
    "a huge observation": (info(obs={"obs": {"size": [10**9], "space": "box"}}), "has the size"),
    "a size that is none": (info(obs={"obs": {"size": "six", "space": "box"}}), "is invalid"),
    "a discrete observation": (
        info(obs={"obs": {"size": [4], "space": "discrete"}}),
        "send it as numbers, one-hot",
    ),
    "a flat image": (
        info(obs={"camera_2d": {"size": [36, 36], "space": "box"}}),
        "an image, has the size",
    ),
    "half an action": (
        info(actions={"a": {"size": 2.5, "action_type": "continuous"}}),
        "2.5 is not a whole number",
    ),
    "an unknown type of action": (
        info(actions={"a": {"size": 2, "action_type": "Discrete"}}),
        "'a' has the action_type 'Discrete'",
    ),
    "no actions": (info(actions={}), "actions of the sizes"),
    "actions without a size": (
        info(actions={"a": {"size": 0, "action_type": "discrete"}}),
        "actions of the sizes .0.",
    ),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_descriptions_of_agents_are_errors(what, play):
    told, match = INVALID[what]
    with pytest.raises(GodotError, match=match) as caught:
        play(launch() | {"info": told})
    assert "\n" not in str(caught.value) and isinstance(caught.value, EngineError)


def test_agents_of_one_policy_must_be_alike(play):
    other = info()
    other["action_space"] = [PUSH, {"push": {"size": 3, "action_type": "continuous"}}]
    with pytest.raises(
        GodotError, match="agent 1 has other observations or actions than the first"
    ):
        play(launch() | {"info": other})


BAD = {
    "a null": (step([0, 0], [1, None]), "agent 1: observation 1 is nan"),
    "infinite": (step([0, 0], [float("inf"), 1]), "agent 1: observation 0 is inf"),
    "too long": (
        step([0, 0], [0, 0, 0]),
        "'obs' of get_obs.. is not the 2 numbers of get_obs_space",
    ),
    "no number": (step([0, 0], ["x", 0]), "'obs' of get_obs.. is not the 2 numbers"),
    "another name": (
        {**step([0, 0], [0, 0]), "obs": [{"obs": [0, 0]}, {"eyes": [0, 0]}]},
        "'obs' of get_obs.. is not",
    ),
    "a reward that is null": (step([0, 0], [0, 0], reward=[0, None]), "agent 1: its reward is nan"),
    "a reward that is a word": (
        step([0, 0], [0, 0], reward=[0, "much"]),
        "agent 1: its reward is 'much': it must be a number",
    ),
    "a reward that is a number as a text": (
        step([0, 0], [0, 0], reward=["1.5", 0]),
        "agent 0: its reward is '1.5': it must be a number",
    ),
    "a reward that is a text beside null": (
        step([0, 0], [0, 0], reward=[None, "1.5"]),
        "agent 1: its reward is '1.5': it must be a number",
    ),
    "a reward that is a list": (
        step([0, 0], [0, 0], reward=[[1], [2]]),
        r"agent 0: its reward is \[1\]: it must be a number",
    ),
    "a reward that is a long text": (
        step([0, 0], [0, 0], reward=[0, "x" * 1000]),
        r"agent 1: its reward is 'x{59}\.\.\.: it must be a number",
    ),
    "a reward beyond all numbers": (
        step([0, 0], [0, 0], reward=[0, 10**400]),
        "its reward is too large",
    ),
    "a statistic that is a text": (
        step([0, 0], [0, 0], infos=[{}, {"stats": {"speed": "3"}}]),
        "agent 1: its stats speed is '3': it must be a number",
    ),
    "a number as a text": (
        step([0, 0], ["0.5", 0]),
        "'obs' of get_obs.. is not the 2 numbers of get_obs_space.., it has '0.5'",
    ),
    "a number as a text beside null": (
        step([0, 0], [None, "0.5"]),
        "'obs' of get_obs.. is not the 2 numbers of get_obs_space.., it has '0.5'",
    ),
    "a huge reward": (
        step([0, 0], [0, 0], reward=[0, -1e300]),
        "agent 1: its reward is -1e.300, and must be at most 1e.30",
    ),
    "a huge last reward": (
        step([0, 0], [0, 0], reward=[1e39, 0], done=[True, False]),
        "agent 0: its reward is 1e.39",
    ),
    "a number beyond single precision": (
        step([0, 0], [0, 1e39]),
        "agent 1: observation 1 is inf",
    ),
    "a final null": (
        step(
            [0, 0],
            [0, 0],
            done=[True, False],
            infos=[{"terminal_observation": {"obs": [None, 0]}}, {}],
        ),
        "agent 0: observation 0 is nan",
    ),
    "done as a word": (
        step([0, 0], [0, 0], done=[False, "false"]),
        "agent 1: its done is 'false': it must be true or false",
    ),
    "done as nothing": (
        step([0, 0], [0, 0], done=[None, False]),
        "agent 0: its done is None: it must be true or false",
    ),
    "a time limit as a word": (
        step([0, 0], [0, 0], done=[True, False], infos=[{"TimeLimit.truncated": "no"}, {}]),
        "agent 0: its TimeLimit.truncated is 'no'",
    ),
    "a success as a word": (
        step([0, 0], [0, 0], done=[True, False], infos=[{"is_success": "false"}, {}]),
        "agent 0: its is_success is 'false'",
    ),
    "an info as a word": (
        step([0, 0], [0, 0], infos=[{}, "fine"]),
        "agent 1: its info is 'fine': get_info.. must return a Dictionary",
    ),
    "too few": (
        {**step([0, 0], [0, 0]), "reward": [0]},
        "its 'reward' has 1 entries, and there are 2 agents",
    ),
    "a statistic that is null": (
        step([0, 0], [0, 0], infos=[{}, {"stats": {"speed": None}}]),
        "agent 1: its stats speed is nan",
    ),
    "too many infos": (
        step([0, 0], [0, 0], infos=[{}] * 3),
        "its 'info' has 3 entries, and there are 2 agents",
    ),
    "no list": (
        {**step([0, 0], [0, 0]), "done": None},
        "its 'done' has no list, and there are 2 agents",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_values_are_errors_that_name_the_agent(what, play):
    message, match = BAD[what]
    envs, _ = play(launch(message))
    envs.reset()
    with pytest.raises(GodotError, match=match) as caught:
        act(envs)
    assert "\n" not in str(caught.value)


def test_unusual_json_of_godot_is_read(play):
    """Infinity as 1e99999 in an unused entry, duplicate names, numbers beyond 64 bits, half a surrogate pair."""
    text = json.dumps(step([1, 2], [3, 4], reward=[0.5, 1])).replace("[3, 4]", f"[3, {10**25}]")
    odd = text.replace(
        '"info": [{}, {}]', '"info": [], "info": [{"far": -1e99999, "name": "\\ud800"}, {}]'
    )
    assert "1e99999" in odd and str(10**25) in odd
    envs, _ = play(launch(odd, text.replace("[1, 2]", "[1, 1e99999]")))
    envs.reset()
    obs, rewards, *_ = act(envs)
    assert obs.tolist() == [[1, 2], [3, np.float32(1e25)]] and rewards.tolist() == [0.5, 1]
    with pytest.raises(GodotError, match="agent 0: observation 1 is inf"):
        act(envs)


@pytest.mark.parametrize(
    ("image", "match"),
    [("", "it is empty: a camera needs a display"), ("00" * 50, "it has 50 bytes$")],
)
def test_an_empty_camera_image_is_an_error(image, match, play):
    spaces = {"camera_2d": {"size": [3, 4, 4], "space": "box"}}
    with pytest.raises(GodotError, match=f"'camera_2d' .* is not the .4, 4, 3. .*{match}"):
        play({"info": info(1, spaces), "reset": {"type": "reset", "obs": [{"camera_2d": image}]}})


def test_the_alpha_channel_of_a_camera_is_dropped(play):
    """The plugin's camera declares three channels, and sends four if its viewport is transparent."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 36, 36, 4), np.uint8)
    spaces = {"camera_2d": {"size": [3, 36, 36], "space": "box"}}
    seen = {"type": "reset", "obs": [{"camera_2d": image.tobytes().hex()} for image in pixels]}
    envs, _ = play({"info": info(2, spaces), "reset": seen})
    obs, _ = envs.reset()
    np.testing.assert_array_equal(obs["camera_2d"], pixels[..., :3])


def test_bad_actions_are_rejected_and_the_env_still_works(play):
    envs, _ = play(launch(step([1, 1], [1, 1])))
    envs.reset()
    with pytest.raises(ValueError, match=r"shape \(2, 3\), not \(2, 2\)"):
        envs.step(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="action of slot 1 is not finite"):
        envs.step(np.array([[0, 0], [0, np.nan]]))
    assert act(envs)[0].tolist() == [[1, 1], [1, 1]]


# Paths, ports and processes


def refuses(match, *args, **kwargs):
    with pytest.raises((GodotError, ValueError), match=match) as caught:
        GodotVecEnv(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_paths_that_do_not_exist(tmp_path, monkeypatch):
    refuses(
        "nowhere: no game found. .*project.godot. Bundled scenes: GodotDiscs, GodotRover", "nowhere"
    )
    (tmp_path / "game").write_text("")
    refuses("is not executable: run chmod", str(tmp_path / "game"))
    (tmp_path / "project.godot").write_text("")
    monkeypatch.setenv("GODOT", str(tmp_path / "no_godot"))
    refuses("GODOT is .*no_godot, which is not an executable file", str(tmp_path))
    monkeypatch.delenv("GODOT")
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses(
        "GodotDiscs needs Godot 4, which was not found: install it from .* or set .GODOT",
        "GodotDiscs",
    )
    refuses("--num-players 0", "GodotDiscs", num_players=0)
    refuses("there is only one editor", "editor", num_players=2)


@linux
def test_a_project_is_run_by_godot(tmp_path, monkeypatch):
    """Given by its folder or by its project.godot."""
    fake = Fake(tmp_path, launch())
    monkeypatch.setenv("GODOT", fake.path)
    project = tmp_path / "my game"
    project.mkdir()
    (project / "project.godot").write_text("")
    for path in (project, project / "project.godot"):
        with closing(GodotVecEnv(str(path), timeout=60)) as envs:
            envs.reset()
        words = [line["args"] for line in fake.received() if "launch" in line][-1]
        assert words[1:3] == ["--path", str(project)]


@linux
def test_a_game_may_start_late_but_not_after_the_timeout(play):
    envs, _ = play(launch(late=1.0), timeout=60)
    assert envs.reset()[1]["ready"].all()
    start = time.monotonic()
    with pytest.raises(
        GodotGone,
        match="has not connected to port .* within 0.4 s: check that its scene has a Sync node",
    ):
        play(launch(never=True), timeout=0.4)
    assert time.monotonic() - start < 30


def test_waits_for_the_editor(tmp_path, capsys):
    port, fake = free_port(), Fake(tmp_path, launch(step([1, 1], [2, 2])))
    later = threading.Timer(0.3, subprocess.Popen, ([fake.path, f"--port={port}"],))
    later.start()
    with closing(GodotVecEnv("editor", base_port=port, timeout=60)) as envs:
        envs.reset()
        assert act(envs)[0].tolist() == [[1, 1], [2, 2]]
    assert f"Waiting for Play in the Godot editor (port {port})" in capsys.readouterr().out
    assert godot.Game.editor_port == 11008, "the default of the plugin's Sync node"
    assert_ends(fake.pids())


@linux
def test_other_processes_are_not_accepted_as_the_game(tmp_path):
    """Another process that connects first is rejected."""
    import socket

    port, fake = free_port(), Fake(tmp_path, launch(late=0.5))
    knocked = []

    def knock():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not knocked:
            try:
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    knocked.append(sock.recv(100))
            except ConnectionRefusedError:
                time.sleep(0.005)

    thread = threading.Thread(target=knock)
    thread.start()
    with closing(GodotVecEnv(fake.path, base_port=port, timeout=60)) as envs:
        envs.reset()
    thread.join()
    assert knocked == [b""], "closed without an answer"


@linux
def test_listens_on_loopback_only_and_no_longer_than_needed(tmp_path):
    before, fake = listening(), Fake(tmp_path, launch(late=0.3))
    game = godot.Game(fake.path, 0, None, 5, [])
    (address,) = listening() - before
    assert address == f"0100007F:{game.port:04X}", "127.0.0.1 and nothing else"
    game.connect()
    assert listening() == before, "the port is closed once the game is connected"
    game.close()
    assert_ends(fake.pids())


@linux
@pytest.mark.parametrize(
    "how", ["raise RuntimeError", "pass", "os.kill(os.getpid(), signal.SIGKILL)", "del envs"]
)
def test_games_end_with_their_client(how, tmp_path):
    fake = Fake(tmp_path, launch())
    code = "import os, signal\nfrom godot_vec_env import GodotVecEnv\n"
    code += f"envs = GodotVecEnv({fake.path!r}, num_players=2)\n"
    code += f"{how}\n" + "import time\ntime.sleep(0.5)\n" * (how == "del envs")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=300)
    assert len(fake.pids()) == 2
    assert_ends(fake.pids())


@linux
def test_a_game_that_ignores_the_close_message_is_ended(play):
    envs, fake = play(launch(ignores_close=True))
    envs.close()
    assert_ends(fake.pids())


# The scripts

SMALL = dict(
    num_steps=8,
    num_minibatches=2,
    update_epochs=1,
    total_timesteps=64,
    hidden_sizes=(4,),
    compile=False,
)


def endless(n=2):
    """A game that answers any number of steps: one agent ends in every step, the other never."""
    forever = step([1, 2], [3, 4], reward=[1.0, 0.5], done=[True, False])
    return launch(n=n) | {"forever": forever}


def test_ppo_sac_and_crossq_train_evaluate_and_export_a_game(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake = Fake(tmp_path, endless())
    off_policy = dict(
        buffer_size=64, learning_starts=8, batch_size=4, total_timesteps=64, hidden_sizes=(4,)
    )
    for script in (ppo, sac, crossq):
        folder = train(
            script,
            (SMALL if script is ppo else off_policy) | {"env_id": "game"},
            godot_path=fake.path,
            compile=False,
        )
        assert "1 Godot game(s), 2 agents" in capsys.readouterr().out
        call(script, monkeypatch, "--export", folder)
        assert (folder / "policy.onnx").exists() and (folder / "policy.json").exists()
    line = f"--godot-path {fake.path} --total-timesteps 64 --num-steps 8 --num-minibatches 2 --exp-name own"
    call(ppo, monkeypatch, *line.split())
    (own,) = Path("runs").glob("game__own__*")  # named after the game
    call(ppo, monkeypatch, "--evaluate", own, "--eval-episodes", 1)
    assert "64 decisions, 1 episodes of 1 decisions" in capsys.readouterr().out
    assert_ends(fake.pids())


def test_the_hybrid_script_sends_continuous_actions_and_choices_by_name(
    tmp_path, monkeypatch, capsys
):
    """In training, with masks, and in the exported policy, in the order of the game."""
    monkeypatch.chdir(tmp_path)
    both = {
        "turn": {"size": 3, "action_type": "discrete"},
        "push": {"size": 2, "action_type": "continuous"},
        "gear": {"size": 4, "action_type": "discrete"},
        "lift": {"size": 1, "action_type": "continuous"},
    }
    masks = [{"action_mask": [1, 0, 1, 0, 0, 0, 1]}, {"action_mask": [0, 1, 0, 1, 1, 1, 0]}]
    forever = step([1, 2], [3, 4], reward=[1.0, 0.5], done=[True, False], infos=masks)
    game = {"info": info(2, actions=both), "reset": reset([0, 0], [0, 0], infos=masks)}
    fake = Fake(tmp_path, game | {"steps": [], "forever": forever})
    folder = train(hybrid, SMALL | {"env_id": "game"}, godot_path=fake.path, compile=False)
    sent = fake.actions()
    assert len(sent) >= 8
    for first, second in sent:
        for action in (first, second):
            assert list(action) == list(both), "in the order of the game"
            assert len(action["push"]) == 2 and len(action["lift"]) == 1
            assert np.abs([*action["push"], *action["lift"]]).max() <= 1
        assert first["turn"] in (0, 2) and first["gear"] == 3
        assert second["turn"] == 1 and second["gear"] in (0, 1, 2)
    assert {first["turn"] for first, _ in sent} == {0, 2}
    call(hybrid, monkeypatch, "--export", folder)
    spec = torch.load(folder / "checkpoint.pt", weights_only=True)["spec"]
    assert spec["action_order"] == [
        ["discrete", 3],
        ["continuous", 2],
        ["discrete", 4],
        ["continuous", 1],
    ]
    assert (folder / "policy.onnx").exists() and (folder / "policy.json").exists()
    assert_ends(fake.pids())


@linux
def test_training_survives_a_crash_and_saves_a_checkpoint_when_restarts_are_used_up(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    crashing = endless() | {"steps": [endless()["forever"]] * 10 + ["crash"]}
    fake = Fake(tmp_path, crashing, endless())
    train(ppo, SMALL | {"env_id": "game"}, godot_path=fake.path, max_restarts=1)
    assert len(fake.pids()) == 2
    gone = Fake(tmp_path, crashing | {"steps": [endless()["forever"]] * 20 + ["crash"]})
    with pytest.raises(GodotGone):
        train(ppo, SMALL | {"env_id": "game"}, godot_path=gone.path, max_restarts=0)
    (folder,) = set((tmp_path / "runs").glob("*run1*"))
    assert (folder / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--godot-path ./nowhere", "nowhere: no game found"),
        ("--env-id GodotDiscs", "GodotDiscs needs Godot 4, which was not found"),
        ("--env-id GodotDisc", "did you mean GodotDiscs"),
        ("--godot-path ./a --unity-path ./b", "--unity-path and --godot-path: give only one"),
        (
            "--godot-path ./a --env-parameters mass=3",
            "use --player-args=--NAME=VALUE for a Godot game",
        ),
        ("--godot-path ./a --max-agents 3", "--max-agents 3"),
        ("--godot-path ./a --num-envs 3", "a Godot scene has one env per agent"),
        ("--godot-path ./a --capture-video", "record a Godot game with Godot's --write-movie"),
        ("--env-id 3DBall --real-time", "--real-time is for Godot games"),
    ],
)
def test_invalid_options_are_errors_of_one_line(line, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("GODOT", raising=False)
    with pytest.raises(SystemExit) as caught:
        call(ppo, monkeypatch, *line.split())
    assert match in caught.value.code and len(caught.value.code.strip().splitlines()) == 1
    assert not Path("runs").exists(), "before any work starts"


def test_the_id_of_a_bundled_scene_applies_its_settings_to_a_game(monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "train", seen.append)
    for line in (
        ["--godot-path", "./games/discs"],
        ["--godot-path", "./games/discs", "--env-id", "GodotDiscs"],
    ):
        call(ppo, monkeypatch, *line)
    call(ppo, monkeypatch, "--godot-path", "editor")
    own, discs, editor = seen
    assert (own.env_id, own.num_steps) == (
        "discs",
        ppo.Args.num_steps,
    ) and editor.env_id == "editor"
    assert (discs.env_id, discs.num_steps, discs.godot_path) == ("GodotDiscs", 128, "./games/discs")


def test_statistics_are_in_tensorboard_under_godot(tmp_path, monkeypatch):
    from conftest import curve

    monkeypatch.chdir(tmp_path)
    game = endless()
    game["forever"]["info"] = [{"stats": {"speed": 2.0}}, {"stats": {"speed": 4.0}}]
    folder = train(ppo, SMALL | {"env_id": "game"}, godot_path=Fake(tmp_path, game).path)
    assert {value for _, value in curve(folder)["godot/speed"]} == {3.0}


def test_demo_prints_errors_in_one_line(tmp_path):
    command = [sys.executable, "godot_vec_env.py", "--path"]
    out = subprocess.run(
        [*command, "nowhere"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (
        out.returncode == 1
        and out.stderr.startswith("nowhere: no game found")
        and out.stderr.count("\n") == 1
    )
    fake = Fake(tmp_path, endless())
    out = subprocess.run(
        [*command, fake.path, "--steps", "20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "shared_policy: 2 agents" in out.stdout and "40 decisions in" in out.stdout, out.stderr


def test_the_demo_names_its_own_option_for_a_policy(tmp_path):
    fake = Fake(tmp_path, launch() | {"info": info(2, names=["cat", "mouse"])})
    command = [sys.executable, "godot_vec_env.py", "--path", fake.path]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert "several policies, choose one with --policy: cat, mouse" in out.stderr


def ended_step():
    """Agent 0 ends at a time limit with a success, agent 1 continues."""
    ended = {"terminal_observation": {"obs": [7, 8]}, "TimeLimit.truncated": True}
    infos = [ended | {"is_success": True}, {}]
    return step([0, 0], [1, 1], reward=[2.0, 3.0], done=[True, False], infos=infos)


def test_sb3_view_of_a_game(play):
    envs, _ = play(launch(ended_step()))
    view = as_sb3(envs)
    np.testing.assert_array_equal(view.reset(), [[0, 0], [1, 0]])
    obs, rewards, done, (first, second) = view.step(np.zeros((2, 2)))
    assert rewards.tolist() == [2, 3] and done.tolist() == [True, False]
    assert first["terminal_observation"].tolist() == [7, 8] and obs[0].tolist() == [0, 0]
    assert first["TimeLimit.truncated"] is True and first["is_success"] is True
    assert first["episode"]["r"] == 2 and second == {"TimeLimit.truncated": False}


def test_pettingzoo_view_of_a_game(play):
    envs, _ = play(launch(ended_step()))
    view = as_pettingzoo(envs, parallel=True)
    view.reset()
    obs, rewards, _, truncated, infos = view.step({a: np.zeros(2) for a in view.agents})
    assert obs["agent_0"].tolist() == [7, 8] and rewards == {"agent_0": 2, "agent_1": 3}
    assert truncated == {"agent_0": True, "agent_1": False} and view.agents == ["agent_1"]
    assert infos["agent_0"] == {"episode": {"r": 2, "l": 1}, "is_success": True}
