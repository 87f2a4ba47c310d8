"""PushBlock and Hallway: closed forms of Unity's behaviour, properties of contacts, and rays against a march."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.unity_scenes.boxes import (
    DT,
    LENGTH,
    OFFSET,
    SIDE,
    Boxes,
    cast_at_boxes,
    cast_at_walls,
    directions,
    seen,
    separations,
)
from envs.unity_scenes.hallway import PADS, PANEL, PANELS, Hallway
from envs.unity_scenes.player import Academy
from envs.unity_scenes.pushblock import BLOCK, GOAL, THE_GOAL, WALL, PushBlock
from unity_vec_env import UnityVecEnv

NOTHING, FORWARD, BACK, RIGHT, LEFT, STRAFE_LEFT, STRAFE_RIGHT = range(7)


def in_process(scene, policy=lambda agents: [NOTHING] * len(agents)):
    """Return the scene's Academy with a policy in place of a client. Its log holds everything that was sent."""

    def exchange(outbox):
        academy.log += outbox
        (requests,) = [agents for agents, *_, done, _ in outbox if not done] or [[]]
        return np.zeros((len(requests), 0)), np.reshape(
            policy(requests), (len(requests), 1)
        ).astype(int)

    academy = Academy(scene, scene.num_agents, exchange)
    academy.log = []
    academy.step()
    return academy


def alone(**more):
    """Return one cube on an endless floor."""
    settings = dict(gravity=24.525, box_moves=False, cube_turns=False) | more
    boxes = Boxes(1, (-1e6, -1e6), (1e6, 1e6), **settings)
    boxes.position[0, 1] = 1e5
    return boxes


@pytest.mark.parametrize(
    ("scene", "agents", "sensors", "num_actions"),
    [("PushBlock", 32, [105, 105], 7), ("Hallway", 16, [105, 3], 5)],
)
def test_layout_is_unitys(scene, agents, sensors, num_actions):
    with closing(UnityVecEnv(scene)) as envs:
        assert (
            envs.num_envs == agents
            and list(envs.sensors) == sensors
            and envs.behavior == f"{scene}?team=0"
        )
        assert envs.single_action_space.nvec.tolist() == [num_actions]
        obs, infos = envs.reset()
        assert (
            infos["ready"].all()
            and infos["action_mask"].all()
            and obs.min() >= 0
            and obs.max() <= 1
        )


# Motion


@pytest.mark.parametrize(
    ("gravity", "drag", "friction", "push", "top", "loss"),
    [(24.525, 4, 0.3, 3.0, 31.1, 0.271), (19.62, 2, 0.6, 1.5, 24.7, 0.452)],
    ids=["PushBlock", "Hallway"],
)
def test_top_speed_and_friction_are_unitys(gravity, drag, friction, push, top, loss):
    """Recordings of Unity show top speeds of about 31 and 25 m/s, and a loss of 0.452 m/s per fixed step in Hallway."""
    boxes = alone(gravity=gravity)
    boxes.drag[:, 0] = drag
    boxes.ground[:] = friction
    for _ in range(500):
        boxes.step(np.array([[0, push]]))
    fast = boxes.velocity[0, 0, 1]
    assert fast == pytest.approx(top, abs=0.1)
    boxes.step(np.zeros((1, 2)))
    assert fast * (1 - drag * DT) - boxes.velocity[0, 0, 1] == pytest.approx(loss, abs=1e-3)


def test_a_body_falls_onto_the_floor_and_rests():
    boxes = alone()
    boxes.drag[:, 0] = 4
    boxes.height[0, 0] = 0.5
    steps = 0
    while boxes.height[0, 0] > OFFSET:
        boxes.step(np.array([[1.0, 0]]))
        steps += 1
    assert 11 <= steps <= 13, "12 fixed steps in Unity"
    for _ in range(20):
        boxes.step(np.zeros((1, 2)))
    assert (
        abs(boxes.height[0, 0]) < 1e-3 and boxes.fall[0, 0] == 0 and not boxes.velocity[0, 0].any()
    )


@pytest.mark.parametrize(("Scene", "degrees"), [(PushBlock, 4), (Hallway, 3)])
def test_actions_turn_and_push_along_the_agents_axes(Scene, degrees):
    scene = Scene(2, 0, {})
    academy = in_process(scene)
    yaw = scene.boxes.yaw.copy()
    scene.act(np.array([0, 1]), None, np.array([[RIGHT], [LEFT]]))
    np.testing.assert_allclose(np.degrees(scene.boxes.yaw - yaw), [degrees, -degrees])
    scene.boxes.yaw[:] = np.pi / 2  # to the right: along x
    scene.act(np.array([0, 1]), None, np.array([[FORWARD], [BACK]]))
    speed = 3.0 if Scene is PushBlock else 1.5
    np.testing.assert_allclose(scene.push, [(speed, 0), (-speed, 0)], atol=1e-12)
    if Scene is PushBlock:
        scene.act(np.array([0, 1]), None, np.array([[STRAFE_LEFT], [STRAFE_RIGHT]]))
        np.testing.assert_allclose(scene.push, [(0, 2.25), (0, -2.25)], atol=1e-12)
    assert academy.reward[0] == pytest.approx(
        (-2 if Scene is Hallway else -3) / scene.max_step - 1 / scene.max_step
    )


# Contacts


def test_a_collision_conserves_momentum_and_separates_the_bodies():
    boxes = alone(box_moves=True)
    boxes.ground[:] = 0
    boxes.position[0] = [(0, -3), (0.3, 0)]
    boxes.velocity[0, 0] = (1.0, 12)
    boxes.yaw[0] = 0.7
    for _ in range(40):
        boxes.step(np.zeros((1, 2)))
    np.testing.assert_allclose(boxes.velocity[0].sum(0), (1.0, 12), atol=1e-9)
    assert boxes.velocity[0, 1, 1] >= boxes.velocity[0, 0, 1] - 1e-9, (
        "the cube does not pass through the box"
    )
    gap = separations(boxes.position[:, 0] - boxes.position[:, 1], boxes.axes(), boxes.half).max()
    assert gap > -1e-3


def test_a_steady_push_moves_both():
    """The force accelerates two masses: the speed is half of that of the cube alone."""
    boxes = alone(box_moves=True)
    boxes.ground[:] = 0
    boxes.position[0] = [(0, -1.5), (0, 0)]
    for _ in range(10):
        boxes.step(np.array([[0, 1.0]]))
    np.testing.assert_allclose(boxes.velocity[0, :, 1], 5, atol=0.05)


def test_a_fast_cube_enters_a_wall_and_is_pushed_out_without_a_rebound():
    boxes = Boxes(1, (-5, -5), (5, 5), 20.0, box_moves=False, cube_turns=False)
    boxes.position[0] = [(0, 4.0), (-4, -4)]
    boxes.velocity[0, 0] = (0, 30)
    boxes.step(np.zeros((1, 2)))
    depths = []
    for _ in range(12):
        depths.append(boxes.position[0, 0, 1] + SIDE - 5)
        boxes.step(np.zeros((1, 2)))
    assert 0.05 < depths[0] < 0.2 and abs(depths[-1]) < 2e-3 and (np.diff(depths) <= 1e-9).all()
    assert not boxes.velocity[0, 0].any(), "the velocity that removes an overlap is not kept"


def test_a_cube_that_hits_a_wall_with_a_corner_turns_its_face_to_it():
    boxes = Boxes(1, (-5, -5), (5, 5), 19.62, box_moves=False, cube_turns=True)
    boxes.position[0] = [(0, 3), (-4, -4)]
    boxes.yaw[0] = np.radians(20)
    for _ in range(60):
        boxes.step(np.array([[0, 1.5]]))
    assert abs(np.degrees(boxes.yaw[0])) < 3, "pushed on, its face is at the wall"
    turned = Boxes(1, (-5, -5), (5, 5), 19.62, box_moves=False, cube_turns=False)
    turned.position[0] = [(0, 3), (-4, -4)]
    turned.yaw[0] = np.radians(20)
    for _ in range(60):
        turned.step(np.array([[0, 1.5]]))
    assert np.degrees(turned.yaw[0]) == pytest.approx(20), "PushBlock's rotation is frozen"


@pytest.mark.parametrize(("x", "turns"), [(0.0, 0), (-2.2, 1), (2.2, -1)])
def test_a_cube_that_hits_a_box_with_part_of_its_face_turns_about_the_edge(x, turns):
    """The contact force acts where the faces overlap: a centred cube does not turn, one beyond an edge does."""
    boxes = Boxes(1, (-50, -50), (50, 50), 19.62, box_moves=False, cube_turns=True)
    boxes.half[:] = (2, 0.5)
    boxes.position[0] = [(x, -1.2), (0, 0)]
    for _ in range(12):
        boxes.step(np.array([[0, 1.5]]))
    assert turns * np.degrees(boxes.yaw[0]) > 5 if turns else abs(boxes.yaw[0]) < 1e-3


@pytest.mark.parametrize("Scene", [PushBlock, Hallway])
def test_bodies_stay_in_their_room_and_apart(Scene):
    scene = Scene(8, 3, {})
    rng = np.random.default_rng(3)
    held = rng.integers(0, scene.branches[0], 8)

    def policy(agents):  # repeat an action for some steps, so that bodies get fast
        held[rng.random(8) < 0.2] = rng.integers(0, scene.branches[0])
        return held[agents]

    academy = in_process(scene, policy)
    boxes = scene.boxes
    deep = 0
    for _ in range(1500):
        academy.step()
        reach = boxes.reach()
        over = np.maximum(boxes.low - (boxes.position - reach), boxes.position + reach - boxes.high)
        over = over if boxes.box_moves else over[:, :1]
        gap = separations(
            boxes.position[:, 0] - boxes.position[:, 1], boxes.axes(), boxes.half
        ).max(1)
        assert over.max() < 0.7 and gap.min() > -0.7, "at 31 m/s a step is 0.62 m"
        deep += (over.max((1, 2)) > 0.05) | (gap < -0.05)
    assert deep.max() < 400


# Rays


def march(start, way, middle, half, radius):
    """Return how far a disc moves, in small steps, until it touches a box."""
    t = np.linspace(0, LENGTH, 24_001)
    outside = np.maximum(np.abs(start + t[:, None] * way - middle) - half, 0)
    gap = np.linalg.norm(outside, axis=1) - radius
    (hits,) = (gap <= 0).nonzero()
    return np.inf if gap[0] < 0 or not len(hits) else t[hits[0]]


numbers = st.floats(-8, 8).map(lambda x: round(x, 3))


@settings(max_examples=200, deadline=None)
@given(
    numbers,
    numbers,
    st.floats(0, 6.28),
    st.floats(0.1, 4),
    st.floats(0.1, 4),
    st.sampled_from([0.2, 0.5]),
)
def test_rays_have_the_length_of_a_march_along_them(x, z, angle, a, b, radius):
    start = np.array([x, z])
    way = np.array([np.sin(angle), np.cos(angle)])
    half = np.array([a, b])
    near = np.linalg.norm(np.maximum(np.abs(start) - half, 0)) - radius
    if abs(near) < 0.01:  # touches at the start: see the next test
        return
    (((found,),),) = cast_at_boxes(
        start[None], way[None, None], np.zeros((1, 1, 2)), half[None, None], radius
    )
    expected = march(start, way, np.zeros(2), half, radius)
    if np.isinf(expected) or found > LENGTH:
        aside = march(
            start, way, np.zeros(2), half, radius + 2e-3
        )  # the ray may just touch the box
        assert (np.isinf(expected) and found > LENGTH - 1e-3) or not np.isinf(aside) or near < 0
    else:
        assert found == pytest.approx(expected, abs=2e-2)


def test_a_ray_detects_a_body_that_it_touches_but_not_one_that_it_starts_in():
    way = np.array([[[0.0, 1.0]]])
    middle = np.zeros((1, 1, 2))
    half = np.ones((1, 1, 2))
    cast = lambda z: cast_at_boxes(np.array([[0.0, z]]), way, middle, half).item()
    assert cast(-4) == pytest.approx(2.5) and cast(-1.5) == 0 and cast(-1.4) == np.inf
    room = lambda z: cast_at_walls(np.array([[0.0, z]]), way, np.array([-5, -5]), np.array([5, 5]))[
        0, 0
    ].min()
    assert room(0) == pytest.approx(4.5) and room(4.5) == 0 and room(4.6) == np.inf


def test_rays_go_forward_then_alternate_right_and_left():
    np.testing.assert_allclose(np.degrees(directions(3, 90)), [0, 30, -30, 60, -60, 90, -90])
    np.testing.assert_allclose(np.degrees(directions(2, 70)), [0, 35, -35, 70, -70])


def test_a_ray_observes_tag_miss_and_fraction():
    out = seen(np.array([[[3.0, 6.0], [20.0, np.inf]]]), np.array([1, 0]), 3)
    np.testing.assert_allclose(out, [[0, 1, 0, 0, 0.25, 0, 0, 0, 1, 1]])


# PushBlock


def pushblock(n=1, **more):
    scene = PushBlock(n, 0, dict(more))
    return scene, in_process(scene)


def test_pushblock_observes_block_goal_and_walls_where_they_are():
    scene, academy = pushblock()
    boxes = scene.boxes
    boxes.height[:] = 0
    boxes.fall[:] = 0
    boxes.position[0] = [(0, 0), (0, 5)]
    boxes.yaw[0] = 0.0  # forward is z: the block is there
    upper, lower = (x.reshape(3, 7, 5)[-1] for x in scene.observe(np.array([0])))
    np.testing.assert_allclose(
        lower[0], np.append(np.eye(3)[BLOCK], [0, (5 - 1 - 0.5) / 12]), atol=1e-6
    )
    np.testing.assert_allclose(
        lower[5], np.append(np.eye(3)[WALL], [0, (12.5 - 0.5) / 12]), atol=1e-6
    )
    boxes.yaw[0] = np.pi  # the goal's side
    upper, lower = (x.reshape(3, 7, 5)[-1] for x in scene.observe(np.array([0])))
    np.testing.assert_allclose(
        lower[0], np.append(np.eye(3)[THE_GOAL], [0, (8.35 - 0.5) / 12]), atol=1e-6
    )
    # The upper ray passes over the goal, and the wall is too far away, 12.5 m
    np.testing.assert_allclose(upper[0], [0, 0, 0, 1, 1], atol=1e-6)
    boxes.position[0, 0] = (0, -4)
    upper = scene.observe(np.array([0]))[0].reshape(3, 7, 5)[-1]
    np.testing.assert_allclose(upper[0], np.append(np.eye(3)[WALL], [0, 8.5 / 12]), atol=1e-6)
    boxes.height[:, 0] = 0.4
    assert scene.observe(np.array([0]))[0].reshape(3, 7, 5)[-1, 0, 3] == 1, (
        "a sphere in the air passes over the walls"
    )


def test_stacked_frames_are_oldest_first_and_start_with_zeros():
    scene, academy = pushblock()
    first = academy.log[0][2][1][0].reshape(3, 35)
    assert not first[:2].any() and first[2].any()
    for _ in range(10):
        academy.step()
    frames = [log[2][1][0].reshape(3, 35) for log in academy.log]
    assert len(frames) == 3, "a frame at each decision"
    np.testing.assert_array_equal(frames[2], [frames[0][2], frames[1][2], frames[2][2]])
    academy.end(np.array([0]))
    last = academy.outbox[-1][2][1][0].reshape(3, 35)
    np.testing.assert_array_equal(
        last[:2], frames[2][1:]
    )  # the end adds a frame, then the stack is cleared
    assert not scene.stacks[1].frames.any()


def test_the_block_in_the_goal_gives_five_and_ends_the_episode():
    scene, academy = pushblock(2)
    scene.boxes.height[:] = 0
    scene.boxes.position[0] = [(0, -5.0), (0, -6.9)]
    scene.boxes.yaw[0] = np.pi
    scene.boxes.position[1] = [(0, 5), (0, 0)]
    academy.exchange = lambda outbox: (
        academy.log.extend(outbox),
        (np.zeros((2, 0)), np.array([[FORWARD], [0]])),
    )[1]
    steps = 1  # in_process has made one
    while not any(done for *_, done, _ in academy.outbox):
        academy.step()
        steps += 1
        assert steps < 60
    ((agents, _, _, reward, done, interrupted),) = [row for row in academy.outbox if row[4]]
    assert agents.tolist() == [0] and done and not interrupted
    since = (steps - 1) % 5 + 1  # fixed steps of the last decision
    assert reward[0] == pytest.approx(5 - since / 5000, abs=1e-5)
    assert scene.boxes.position[0, 1, 1] > GOAL + 2, "a new episode has started"


def test_pushblock_starts_away_from_goal_block_and_its_old_position():
    scene, academy = pushblock(64)
    for _ in range(5):
        before = scene.boxes.position[:, 0].copy()
        reach = scene.boxes.reach()[:, 0]
        scene.begin(np.arange(64))
        cube = scene.boxes.position[:, 0]
        block = scene.boxes.position[:, 1]
        assert (
            np.abs(scene.boxes.position).max() <= 6.25
            and scene.boxes.position[..., 1].min() > -5.85
        )
        assert (np.abs(cube - block) > 3.5).any(1).all()
        assert all((np.abs(x - before) > 2.5 + reach).any(1).all() for x in (cube, block))
    assert np.allclose(scene.boxes.yaw, np.pi), "the heading does not change at a reset"


def test_pushblocks_environment_parameters():
    scene, _ = pushblock(1, block_scale=3.0, dynamic_friction=0.4, block_drag=2.0, gravity=10.0)
    boxes = scene.boxes
    assert boxes.half.tolist() == [[1.5, 1.5]] and boxes.ground[0].tolist() == [0.5, 0.5]
    assert boxes.drag[0].tolist() == [4, 2] and boxes.gravity == 10


@pytest.mark.parametrize("scene", ["PushBlock", "Hallway"])
def test_max_step_interrupts(scene):
    with closing(UnityVecEnv(scene, player_args=["--max-step", "6", "--agents", "2"])) as envs:
        envs.reset()
        while True:
            _, reward, terminated, truncated, infos = envs.step(
                np.zeros(envs.action_space.shape, int)
            )
            if truncated.any():
                break
        assert truncated.all() and not terminated.any() and "final_obs" in infos


# Hallway


@pytest.mark.parametrize("which", [0, 1], ids=["O", "X"])
@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
@pytest.mark.parametrize("place", [PADS, PANELS], ids=["pad", "panel"])
def test_hallways_goals_give_one_or_minus_a_tenth(which, side, place):
    scene = Hallway(1, 0, {})
    academy = in_process(scene)
    scene.boxes.height[:] = 0
    scene.symbol[0] = which
    scene.left[0] = 0  # O is on the left
    academy.stats.clear()
    scene.boxes.position[0, 0] = place[side] - [0, 2.0 + 0.5 if place is PADS else PANEL[1] + 0.5]
    academy.reward[0] = -0.7  # the pending reward is replaced
    scene.physics()
    ((*_, reward, done, interrupted),) = academy.outbox
    right = which == side
    assert reward[0] == pytest.approx(1 if right else -0.1) and done and not interrupted
    assert ("Goal/Correct" if right else "Goal/Wrong", 1.0, 2) in academy.stats


def test_hallway_observes_symbol_goals_walls_and_time():
    scene = Hallway(1, 0, {})
    academy = in_process(scene)
    boxes = scene.boxes
    boxes.height[:] = 0
    boxes.position[0] = [(0, -10), (0, 0)]
    boxes.yaw[0] = 0.0
    for which in (0, 1):
        scene.symbol[0] = which
        academy.steps[0] = 300
        rays, time = scene.observe(np.array([0]))
        rays = rays.reshape(3, 5, 7)[-1]
        np.testing.assert_allclose(
            rays[0], np.append(np.eye(5)[2 + which], [0, (10 - 0.5 - 0.5) / 12]), atol=1e-6
        )
        np.testing.assert_allclose(rays[3, [4, 6]], [1, 9 / np.sin(np.radians(70)) / 12], atol=1e-6)
        assert time[0, -1] == pytest.approx(0.1)
    for left in (
        0,
        1,
    ):  # in front of the left goal: only the lowest part of the sphere hits the pad
        scene.left[0] = left
        boxes.position[0, 0] = (-7, 15)
        ray = scene.observe(np.array([0]))[0].reshape(3, 5, 7)[-1, 0]
        far = 22.29 - 2 - 15 - np.sqrt(0.5**2 - 0.45**2)
        np.testing.assert_allclose(ray, np.append(np.eye(5)[left], [0, far / 12]), atol=1e-6)


def test_hallways_symbol_and_goals_are_uniform_and_independent():
    """The position of O does not depend on its goal; X is always in the middle."""
    scene = Hallway(2000, 0, {})
    in_process(scene)
    both = np.bincount(2 * scene.symbol + scene.left, minlength=4)
    assert both.min() > 420
    across = scene.boxes.position[:, 1, 0] - 0.015
    assert not across[scene.symbol == 1].any() and np.abs(across[scene.symbol == 0]).max() > 2.9
    cube = scene.boxes.position[:, 0]
    assert cube[:, 1].min() >= -20 and cube[:, 1].max() <= -10 and np.abs(cube[:, 0]).max() < 3.1
    assert np.histogram(scene.boxes.yaw % (2 * np.pi), 4)[0].min() > 420
