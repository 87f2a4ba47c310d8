"""Sorter: Unity's layout and rules, closed forms of its motion and contacts."""

from contextlib import closing

import numpy as np
import pytest

from envs.unity_scenes.player import Academy
from envs.unity_scenes.sorter import ABOVE, HALF, PLACES, RADIUS, WALL, WIDTH, Sorter
from unity_vec_env import UnityVecEnv

NOTHING = (0, 0, 0)
FORWARD = (1, 0, 0)


def play(scene, action=NOTHING):
    """Return an Academy whose agents all take `action`, and which keeps what it sends."""

    def exchange(outbox):
        requests = sum(len(agents) for agents, *_, done, _ in outbox if not done)
        academy.log.extend(outbox)
        return np.zeros((requests, 0)), np.tile(academy.action, (requests, 1))

    academy = Academy(scene, scene.num_agents, exchange)
    academy.action = action
    academy.log = []
    return academy


def arrange(scene, places, numbers=None):
    """Give agent 0 tiles at these places, in ascending order of their numbers."""
    count = len(places)
    scene.count[0] = count
    scene.number[0, :count] = numbers or np.arange(1, count + 1)
    scene.place[0, :count] = places
    scene.rank[0] = PLACES
    scene.rank[0, places] = np.arange(count)
    scene.touched[0] = 0


def walk(scene, academy, place, steps=400):
    """Let agent 0 walk from the room's centre to a place. Return its reward and whether its episode ended."""
    scene.position[0] = 0
    scene.velocity[0] = 0
    scene.yaw[0] = 2 * np.pi * place / PLACES
    academy.action = FORWARD
    academy.reward[0] = 0
    academy.log.clear()
    before = academy.steps[0]
    for step in range(1, steps + 1):
        academy.step()
        reached = np.linalg.norm(scene.position[0]) > 18.5 or academy.steps[0] < before + step
        if reached:
            break
    for _ in range(10):
        academy.step()
        if academy.steps[0] < before + step:
            break
    ended = any(done for *_, done, _ in academy.log) or academy.outbox
    rewards = academy.reward[0] + sum(rewards[0] for *_, rewards, _, _ in academy.log)
    rewards += sum(rewards[0] for *_, rewards, _, _ in academy.outbox)
    return rewards, bool(ended)


def rows_of(scene):
    return scene.tiles(np.array([0])).reshape(PLACES, WIDTH)


def test_layout_is_unitys():
    with closing(UnityVecEnv("Sorter")) as envs:
        assert envs.num_envs == 8 and envs.behavior == "Sorter?team=0"
        assert envs.sensors == [(20, 23), 10, 8]
        spaces = envs.single_observation_space.spaces
        assert {name: space.shape for name, space in spaces.items()} == {
            "vector": (18,),
            "BufferSensor": (20, 23),
        }
        assert envs.single_action_space.nvec.tolist() == [3, 3, 3]
        obs, _ = envs.reset()
        assert envs.observation_space.contains(obs)


def test_rows_are_the_tiles_and_the_others_are_zero():
    """A row has the tile's number, its position relative to the agent in units of 20 m, and whether it was touched."""
    scene = Sorter(1, 0, {})
    play(scene).step()
    arrange(scene, [5, 0, 10], [2, 7, 20])
    scene.position[0] = (3.0, -4.0)
    scene.touched[0] = 1
    rows = rows_of(scene)
    assert not rows[3:].any()
    assert np.flatnonzero(rows[0, :20]).tolist() == [2]
    assert np.flatnonzero(rows[1, :20]).tolist() == [7]
    assert not rows[2, :20].any(), "as in Unity, the position takes the place of number 20"
    expected = [(20.5 - 3, 4), (-3, 20.5 + 4), (-3, -20.5 + 4)]  # east, north and south
    assert rows[:3, 20:22] * 20 == pytest.approx(np.array(expected), abs=1e-4)
    assert rows[:3, 22].tolist() == [1, 0, 0]


def test_number_of_tiles_is_an_environment_parameter():
    for most in (1, 3, 20):
        scene = Sorter(500, 0, {"num_tiles": float(most)})
        play(scene).step()
        assert sorted(set(scene.count)) == list(range(1, most + 1)), "uniform from 1 to num_tiles"
    scene = Sorter(500, 0, {})
    play(scene).step()
    assert scene.count.max() == 20
    for agent in range(500):
        count = scene.count[agent]
        numbers = scene.number[agent, :count]
        assert (np.diff(numbers) > 0).all() and numbers[0] >= 1 and numbers[-1] <= 20
        assert len(set(scene.place[agent, :count])) == count


def test_tiles_in_ascending_order_give_one_each_and_the_last_ends_the_episode():
    scene = Sorter(1, 0, {})
    academy = play(scene)
    academy.step()
    arrange(scene, [3, 12, 7])
    for place, last in ((3, False), (12, False), (7, True)):
        start = academy.total
        reward, ended = walk(scene, academy, place)
        penalty = (academy.total - start) / 5000
        assert reward == pytest.approx(1 - penalty, abs=1 / 5000 + 1e-6) and ended == last


def test_a_wrong_tile_costs_one_and_ends_the_episode():
    scene = Sorter(1, 0, {})
    academy = play(scene)
    academy.step()
    arrange(scene, [3, 12, 7])
    walk(scene, academy, 3)
    reward, ended = walk(scene, academy, 7)
    assert reward == pytest.approx(-1, abs=0.02) and ended


def test_a_tile_that_was_touched_does_nothing_any_more():
    scene = Sorter(1, 0, {})
    academy = play(scene)
    academy.step()
    arrange(scene, [3, 12])
    walk(scene, academy, 3)
    reward, ended = walk(scene, academy, 3)
    assert -0.05 < reward < 0 and not ended and scene.touched[0] == 1


@pytest.mark.parametrize("place", [0, 4, 11])
def test_wall_and_tiles_stop_the_agent(place):
    """Face to face with a tile, an agent stands half its size before it. Between tiles its front corners touch the
    wall."""
    front = RADIUS - HALF[1] - 0.5
    wall = np.sqrt(WALL**2 - 0.5**2) - 0.5
    for tiles, expected in (([place, (place + 5) % 20], front), ([(place + 5) % 20], wall)):
        scene = Sorter(1, 0, {})
        academy = play(scene)
        academy.step()
        arrange(scene, tiles)
        walk(scene, academy, place)
        for _ in range(100):
            academy.step()
        position = scene.position[0]
        assert np.linalg.norm(position) == pytest.approx(expected, abs=0.03)
        assert position / np.linalg.norm(position) == pytest.approx(ABOVE[place], abs=1e-3)


def test_actions_push_and_turn():
    """3 m/s per fixed step, less drag and friction; 4 degrees per fixed step; sideways takes the place of forward."""
    kept = 1 - 4 * 0.02
    loss = 2 * 0.6 * 2.5 * 9.81 * 0.02 * kept
    speed = 3 * kept - loss
    for action, way in (
        ((1, 0, 0), (0, 1)),
        ((2, 0, 0), (0, -1)),
        ((0, 1, 0), (1, 0)),
        ((0, 2, 0), (-1, 0)),
        ((1, 2, 0), (-1, 0)),
    ):
        scene = Sorter(1, 0, {})
        academy = play(scene, action)
        scene.yaw[:] = 0
        academy.step()
        assert scene.velocity[0] == pytest.approx(speed * np.array(way), abs=1e-6)
    for turn, degrees in ((1, -4), (2, 4)):
        scene = Sorter(1, 0, {})
        academy = play(scene, (0, 0, turn))
        scene.yaw[:] = 0
        for _ in range(5):
            academy.step()
        assert np.degrees(scene.yaw[0]) == pytest.approx(5 * degrees)


def test_body_and_pose_sensors():
    scene = Sorter(1, 0, {})
    play(scene).step()
    scene.yaw[0] = np.pi / 2  # looks along x
    scene.velocity[0] = (2.0, -1.0)
    agents = np.array([0])
    assert scene.body(agents)[0] == pytest.approx([0, 0, 0, 0, 0, 0, 1, 1, 0, 2], abs=1e-6)
    scene.before[:] = 0
    scene.position[0] = (10, -5)
    assert scene.pose_stack(agents)[0] == pytest.approx([0, 0, 0, 0, 0.5, -0.25, 1, 0], abs=1e-6)
    scene.position[0] = (20, 0)
    assert scene.pose_stack(agents)[0] == pytest.approx([0.5, -0.25, 1, 0, 1, 0, 1, 0], abs=1e-6)


def test_an_episode_is_interrupted_by_max_step_and_costs_one():
    player_args = ["--max-step", "50"]
    with closing(UnityVecEnv("Sorter", player_args=player_args)) as envs:
        envs.reset()
        total = np.zeros(8)
        for _ in range(10):
            _, rewards, terminated, truncated, _ = envs.step(np.zeros((8, 3), int))
            total += rewards
        assert truncated.all() and not terminated.any()
        assert total == pytest.approx(np.full(8, -50 / 5000))
