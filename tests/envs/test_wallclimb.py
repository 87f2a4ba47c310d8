"""WallClimb, the scene with two behaviors: its rules, and agents that change their behavior between two episodes."""

from contextlib import closing

import numpy as np
import pytest

from envs.unity_scenes.player import Academy
from envs.unity_scenes.wallclimb import AGENT, BLOCK, COLUMNS, WALL, WallClimb
from unity_vec_env import UnityVecEnv

RIGHT = 4
UP = 1


def board(big, agent, block):
    """A scene with one agent, whose places are given, and a function that plays an action."""
    actions = []
    sent = []

    def exchange(outbox):
        sent.extend(zip(scene.academy.senders, outbox, strict=True))
        requests = sum(len(agents) for agents, *_, done, _ in outbox if not done)
        return np.zeros((requests, 0)), np.full((requests, 1), actions.pop() if actions else 0)

    scene = WallClimb(1, 0, {"big_wall": float(big)})
    academy = Academy(scene, 1, exchange)
    academy.step()
    scene.places[0] = (agent, block)

    def play(action):
        actions.append(action)
        academy.step()
        return tuple(scene.places[0, AGENT].tolist()), tuple(scene.places[0, BLOCK].tolist())

    return scene, play, sent


def test_a_small_wall_is_stepped_over_and_a_big_one_stops():
    for big, column in ((False, WALL + 1), (True, WALL - 1)):
        _, play, _ = board(big, (0, WALL - 1), (4, 2))
        assert play(RIGHT) == ((0, column), (4, 2))


def test_a_block_is_pushed_and_climbed_at_the_wall():
    _, play, _ = board(True, (2, 1), (2, 2))
    assert play(RIGHT) == ((2, 2), (2, 3))
    assert play(RIGHT) == ((2, 3), (2, 4))
    assert play(RIGHT) == ((2, WALL + 1), (2, 4)), "over the block and the wall"


def test_a_block_at_the_edge_does_not_move():
    _, play, _ = board(True, (1, 3), (0, 3))
    assert play(UP) == ((1, 3), (0, 3))


def test_an_agent_that_arrives_ends_under_its_old_name_and_keeps_its_id():
    scene, play, sent = board(False, (0, COLUMNS - 2), (4, 2))
    scene.parameters["big_wall"] = 1.0
    play(RIGHT)
    sent.clear()
    play(0)
    assert [(names, out[1].tolist(), out[4]) for names, out in sent] == [
        (["SmallWall?team=0"], [0], True),
        (["BigWall?team=0"], [0], False),
    ]
    assert sent[0][1][3] == pytest.approx(0.99), "1 for the arrival, and a step costs 0.01"


def test_both_behaviors_are_in_the_game():
    for behavior in ("BigWall", "SmallWall"):
        with closing(UnityVecEnv("WallClimb", behavior=behavior, max_agents=24)) as envs:
            envs.reset()
            assert set(envs.players[0].action_specs) == set(WallClimb.behaviors)
            for _ in range(20):
                *_, infos = envs.step(np.zeros(envs.action_space.shape, int))
            assert 1 <= infos["ready"].sum() < 24


def test_frames_have_the_size_of_the_video():
    scene, _, _ = board(True, (0, 0), (2, 2))
    frame = scene.draw_frame(480, 640)
    assert frame.dtype == np.uint8 and frame.shape[0] % 2 == frame.shape[1] % 2 == 0
