"""The bundled scenes: Unity's layout and physical properties. benchmarks/scene_fidelity.py compares them with Unity."""

import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from conftest import ROOT

from envs.unity_scenes.ball3d import Ball3D
from envs.unity_scenes.crawler import HALF, RADIUS, Crawler
from envs.unity_scenes.gridworld import BLUE, GREEN, MOVES, RED, GridWorld
from envs.unity_scenes.player import Academy
from unity_vec_env import UnityVecEnv


def in_process(scene, actions=lambda requests: np.zeros((requests, 20))):
    """Return the scene's Academy, with a policy in place of a client."""

    def exchange(outbox):
        requests = sum(len(agents) for agents, *_, done, _ in outbox if not done)
        log.extend(outbox)
        return actions(requests), np.zeros((requests, 0))

    log = []
    academy = Academy(scene, scene.num_agents, exchange)
    academy.log = log
    return academy


def play(scene, decisions, seed=1):
    """Return the returns and lengths of episodes with random actions, over `decisions` decisions per agent."""
    rng = np.random.default_rng(seed)
    returns = []
    lengths = []
    with closing(UnityVecEnv(scene, seed=seed)) as envs:
        envs.reset()
        for _ in range(decisions):
            *_, infos = envs.step(rng.uniform(-1, 1, envs.action_space.shape))
            if "final_info" in infos:
                returns.extend(infos["final_info"]["episode"]["r"][infos["_final_info"]])
                lengths.extend(infos["final_info"]["episode"]["l"][infos["_final_info"]])
    return np.array(returns), np.array(lengths)


LAYOUTS = [("3DBall", 12, 8, 2), ("Crawler", 10, 158, 20)]


@pytest.mark.parametrize(("scene", "agents", "observations", "actions"), LAYOUTS)
def test_layout_is_unitys(scene, agents, observations, actions):
    with closing(UnityVecEnv(scene)) as envs:
        shapes = envs.single_observation_space.shape, envs.single_action_space.shape
        assert (envs.num_envs, *shapes) == (agents, (observations,), (actions,))
        assert envs.behavior == f"{scene}?team=0"


def test_ball_with_random_next_actionshas_unitys_return():
    returns, lengths = play("3DBall", 600)
    assert len(returns) > 250 and abs(returns.mean() - 0.93) < 0.1 and abs(lengths.mean() - 20) < 3
    assert np.allclose(returns, 0.1 * (lengths - 1) - 1, atol=1e-4), (
        "0.1 for every decision, -1 for the fall"
    )


def test_crawler_with_random_next_actionshas_unitys_return():
    returns, lengths = play("Crawler", 400)
    assert len(returns) > 200 and abs(returns.mean() + 0.7) < 0.4 and 9 < lengths.mean() < 19


@pytest.mark.parametrize("scene", ["3DBall", "Crawler"])
def test_max_step_interrupts(scene):
    with closing(UnityVecEnv(scene, player_args=["--max-step", "5", "--agents", "2"])) as envs:
        envs.reset()
        _, _, terminated, truncated, infos = envs.step(np.zeros(envs.action_space.shape))
        assert truncated.all() and not terminated.any()
        assert infos["ready"].all(), "the end and the next decision arrive together"


def test_ball_falls_freely_then_rests():
    scene = Ball3D(1, 0, {})
    academy = in_process(scene, lambda requests: np.zeros((requests, 2)))
    academy.step()
    scene.platform[0] = (1, 0, 0, 0)
    scene.position[0] = (0, 4, 0)
    scene.velocity[0] = 0
    for step in range(1, 16):
        academy.step()
        assert scene.velocity[0, 1] == pytest.approx(-9.81 * 0.02 * step)
    for _ in range(100):
        academy.step()
    assert (
        scene.position[0] == pytest.approx([0, 3, 0], abs=0.03)
        and np.abs(scene.velocity[0]).max() < 0.05
    )


def test_ball_rolls_down_a_tilted_platform():
    """A solid ball that rolls without slipping accelerates by 5/7 g sin(slope)."""
    scene = Ball3D(1, 0, {})
    slope = np.radians(5)
    academy = in_process(scene, lambda requests: np.zeros((requests, 2)))
    academy.step()
    scene.platform[0] = np.cos(slope / 2), 0, 0, np.sin(slope / 2)  # about z: the -x side sinks
    scene.position[0] = 3.0 * np.array([-np.sin(slope), np.cos(slope), 0])
    scene.velocity[0] = 0
    scene.spin[0] = 0
    for _ in range(40):
        academy.step()
    speed = np.linalg.norm(scene.velocity[0])
    assert scene.velocity[0, 0] < 0 and speed == pytest.approx(
        5 / 7 * 9.81 * np.sin(slope) * 0.8, rel=0.05
    )


def test_crawler_falls_freely_then_stands():
    """With its joints held in the middle of the start pose, it drops onto its feet and keeps its body up."""
    pose = np.zeros(20)
    pose[8:12] = 0.2
    pose[12:] = 1.0  # knees bent by 90 degrees, full strength
    scene = Crawler(1, 0, {})
    academy = in_process(scene, lambda requests: np.tile(pose, (requests, 1)))
    academy.step()
    heights = []
    for _ in range(450):
        academy.step()
        heights.append(scene.xpos[0, 0, 2])
        assert (scene.height[0] - np.abs(scene.slope[0]) * HALF - RADIUS > -0.1).all(), (
            "no part sinks into the ground"
        )
    assert not any(done for *_, done, _ in academy.log), "it did not fall"
    assert 0.6 < heights[-1] < 1.6 and np.ptp(heights[-75:]) < 0.05, "and stands"
    assert np.abs(scene.qvel).max() < 0.5, "still"


def test_crawlers_are_not_disturbed_by_a_reset_of_another():
    one = Crawler(3, 0, {})
    two = Crawler(3, 0, {})
    for scene in (one, two):
        academy = in_process(scene)
        for _ in range(12):
            academy.step()
    two.begin(np.array([1]))
    for scene in (one, two):
        for _ in range(8):
            scene.physics()
    np.testing.assert_array_equal(one.qpos[[0, 2]], two.qpos[[0, 2]])
    assert not np.array_equal(one.qpos[1], two.qpos[1])


def test_crawlers_reward_at_the_wanted_velocity_is_one():
    scene = Crawler(1, 0, {})
    academy = in_process(scene)
    academy.step()
    forward = np.append(scene.forward[0], 0)
    scene.velocity[0] = forward * scene.speed[0]
    scene.facing[0] = forward
    academy.reward[:] = 0
    scene.update()
    assert academy.reward[0] == pytest.approx(1, abs=1e-2)
    scene.velocity[0] = -forward * scene.speed[0]
    academy.reward[:] = 0
    scene.update()
    assert academy.reward[0] == 0


def test_crawler_that_touches_the_ground_with_its_body_gets_minus_one():
    scene = Crawler(1, 0, {})
    academy = in_process(scene)
    academy.step()
    scene.qpos[0, 2] = 0.4
    for _ in range(3):
        academy.step()
    ends = [
        (rewards[0], interrupted) for _, _, _, rewards, done, interrupted in academy.log if done
    ]
    assert ends and ends[0] == (-1, False)
    assert scene.qpos[0, 2] > 1.5, "and a new episode starts"


@pytest.mark.parametrize("scene", ["3DBall", "Crawler"])
def test_video(scene, tmp_path):
    out = tmp_path / "scene.mp4"
    command = [
        sys.executable,
        "-m",
        "envs.unity_scenes.player",
        "--scene",
        scene,
        "--render",
        str(out),
        "--seconds",
        "0.5",
    ]
    command += ["--width", "160", "--height", "128"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "libegl1" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    import imageio.v3 as imageio

    frames = imageio.imread(out)
    assert frames.shape[1:] == (128, 160, 3) and len(frames) > 8
    assert frames[-1].std() > 10, "something is visible"
    assert np.abs(frames[0].astype(int) - frames[-1]).mean() > 0.5, "and moves"


# GridWorld


def boards(seed=1):
    """Return a scene and a function that steps its agents and returns what they sent."""
    scene = GridWorld(9, seed, {})
    next_actions = np.zeros((9, 1), int)
    sent = []

    def exchange(outbox):
        sent.extend(outbox)
        return np.zeros((9, 0)), next_actions

    academy = Academy(scene, 9, exchange)

    def step(actions):
        next_actions[:] = actions
        _ = sent.clear()
        academy.step()
        return list(sent)

    return scene, step


def test_gridworld_rewards_the_plus():
    """Agents that walk to the plus, around the cross, end with a reward of 1 and never pass a wall."""
    scene, step = boards()
    step(0)
    ends = []
    for _ in range(40):
        places = scene.places.copy()
        mask = scene.mask(np.arange(9))
        actions = np.zeros((9, 1), int)
        for agent in range(9):
            plus, cross, here = places[agent]
            after = here + MOVES
            cost = abs(after - plus).sum(1) + 100 * mask[agent] + 100 * (after == cross).all(1)
            actions[agent] = 1 + cost[1:].argmin()
        for *_, rewards, done, interrupted in step(actions):
            if done:
                ends += rewards.tolist()
                assert not interrupted
        assert ((scene.places >= 0) & (scene.places < 5)).all()
    assert len(ends) > 40 and np.allclose(ends, 1)


def test_gridworlds_image_shows_plus_cross_and_agent():
    scene, step = boards()
    (_, _, (images,), *_), *_ = step(0)
    assert images.shape == (9, 64, 84, 3) and images.dtype == np.uint8
    for agent in range(9):
        for (column, row), color in zip(scene.places[agent], (GREEN, RED, BLUE), strict=True):
            y = 2 + 12 * row + 6
            x = 12 + 12 * column + 6
            assert (images[agent, y, x] == color).all(), "in the middle of its cell"


def test_a_wall_stops_an_agent():
    scene, step = boards()
    step(0)
    scene.places[:] = [[[0, 0], [4, 4], [2, 4]]]
    assert (scene.mask(np.arange(9)) == [False, False, True, False, False]).all()
    step(2)
    assert (scene.places[:, 2] == [2, 4]).all()
