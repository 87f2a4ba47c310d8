"""PushBlock and Hallway: what Unity's scenes do, in closed forms; contacts that behave like contacts; rays against a
march along them."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.boxes import DT, LENGTH, OFFSET, SIDE, Boxes, cast_at_boxes, cast_at_walls, directions, seen, separations
from envs.hallway import PADS, PANEL, PANELS, Hallway
from envs.player import Academy
from envs.pushblock import BLOCK, GOAL, THE_GOAL, WALL, PushBlock
from unity_vec_env import UnityVecEnv

NOTHING, FORWARD, BACK, RIGHT, LEFT, STRAFE_LEFT, STRAFE_RIGHT = range(7)


def in_process(scene, policy=lambda who: [NOTHING] * len(who)):
    """The scene's Academy, with a policy in place of a client; what was sent stands in its log."""

    def exchange(outbox):
        academy.log += outbox
        (asking,) = [who for who, *_, done, _ in outbox if not done] or [[]]
        return np.zeros((len(asking), 0)), np.reshape(policy(asking), (len(asking), 1)).astype(int)

    academy = Academy(scene, scene.num_agents, exchange)
    academy.log = []
    academy.step()
    return academy


def alone(**more):
    """A cube on an endless floor."""
    settings = dict(gravity=24.525, box_moves=False, cube_turns=False) | more
    boxes = Boxes(1, (-1e6, -1e6), (1e6, 1e6), **settings)
    boxes.position[0, 1] = 1e5
    return boxes


@pytest.mark.parametrize(
    ("scene", "agents", "sensors", "choices"), [("PushBlock", 32, [105, 105], 7), ("Hallway", 16, [105, 3], 5)]
)
def test_layout_is_unitys(scene, agents, sensors, choices):
    with closing(UnityVecEnv(scene)) as envs:
        assert envs.num_envs == agents and list(envs.sensors) == sensors and envs.behavior == f"{scene}?team=0"
        assert envs.single_action_space.nvec.tolist() == [choices]
        obs, infos = envs.reset()
        assert infos["ready"].all() and infos["action_mask"].all() and obs.min() >= 0 and obs.max() <= 1


# Moving


@pytest.mark.parametrize(
    ("gravity", "drag", "friction", "push", "top", "loss"),
    [(24.525, 4, 0.3, 3.0, 31.1, 0.271), (19.62, 2, 0.6, 1.5, 24.7, 0.452)],
    ids=["PushBlock", "Hallway"],
)
def test_top_speed_and_friction_are_unitys(gravity, drag, friction, push, top, loss):
    """Speeds that were read off recordings of Unity: about 31 and 25 m/s, and a loss of 0.452 m/s a fixed step."""
    boxes = alone(gravity=gravity)
    boxes.drag[:, 0], boxes.ground[:] = drag, friction
    for _ in range(500):
        boxes.step(np.array([[0, push]]))
    fast = boxes.velocity[0, 0, 1]
    assert fast == pytest.approx(top, abs=0.1)
    boxes.step(np.zeros((1, 2)))
    assert fast * (1 - drag * DT) - boxes.velocity[0, 0, 1] == pytest.approx(loss, abs=1e-3)


def test_a_body_falls_onto_the_floor_and_rests():
    boxes = alone()
    boxes.drag[:, 0], boxes.height[0, 0] = 4, 0.5
    steps = 0
    while boxes.height[0, 0] > OFFSET:
        boxes.step(np.array([[1.0, 0]]))
        steps += 1
    assert 11 <= steps <= 13, "12 fixed steps in Unity"
    for _ in range(20):
        boxes.step(np.zeros((1, 2)))
    assert abs(boxes.height[0, 0]) < 1e-3 and boxes.fall[0, 0] == 0 and not boxes.velocity[0, 0].any()


@pytest.mark.parametrize(("Scene", "degrees"), [(PushBlock, 4), (Hallway, 3)])
def test_turns_and_moves_are_the_agents_own(Scene, degrees):
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
    assert academy.reward[0] == pytest.approx((-2 if Scene is Hallway else -3) / scene.max_step - 1 / scene.max_step)


# Contacts


def test_a_push_keeps_the_momentum_and_parts_the_bodies():
    boxes = alone(box_moves=True)
    boxes.ground[:] = 0
    boxes.position[0], boxes.velocity[0, 0], boxes.yaw[0] = [(0, -3), (0.3, 0)], (1.0, 12), 0.7
    for _ in range(40):
        boxes.step(np.zeros((1, 2)))
    np.testing.assert_allclose(boxes.velocity[0].sum(0), (1.0, 12), atol=1e-9)
    assert boxes.velocity[0, 1, 1] >= boxes.velocity[0, 0, 1] - 1e-9, "the cube does not go through"
    gap = separations(boxes.position[:, 0] - boxes.position[:, 1], boxes.axes(), boxes.half).max()
    assert gap > -1e-3


def test_a_steady_push_moves_both():
    """Two masses and one force: half the speed that the push alone would give."""
    boxes = alone(box_moves=True)
    boxes.ground[:] = 0
    boxes.position[0] = [(0, -1.5), (0, 0)]
    for _ in range(10):
        boxes.step(np.array([[0, 1.0]]))
    np.testing.assert_allclose(boxes.velocity[0, :, 1], 5, atol=0.05)


def test_a_fast_cube_is_in_the_wall_for_a_moment_and_leaves_it_without_speed():
    boxes = Boxes(1, (-5, -5), (5, 5), 20.0, box_moves=False, cube_turns=False)
    boxes.position[0] = [(0, 4.0), (-4, -4)]
    boxes.velocity[0, 0] = (0, 30)
    boxes.step(np.zeros((1, 2)))
    depths = []
    for _ in range(12):
        depths.append(boxes.position[0, 0, 1] + SIDE - 5)
        boxes.step(np.zeros((1, 2)))
    assert 0.05 < depths[0] < 0.2 and abs(depths[-1]) < 2e-3 and (np.diff(depths) <= 1e-9).all()
    assert not boxes.velocity[0, 0].any(), "what undoes an overlap does not stay in the velocity"


def test_a_corner_that_meets_a_wall_turns_the_cube_flat():
    boxes = Boxes(1, (-5, -5), (5, 5), 19.62, box_moves=False, cube_turns=True)
    boxes.position[0], boxes.yaw[0] = [(0, 3), (-4, -4)], np.radians(20)
    for _ in range(60):
        boxes.step(np.array([[0, 1.5]]))
    assert abs(np.degrees(boxes.yaw[0])) < 3, "pressed on, it stands with its face to the wall"
    turned = Boxes(1, (-5, -5), (5, 5), 19.62, box_moves=False, cube_turns=False)
    turned.position[0], turned.yaw[0] = [(0, 3), (-4, -4)], np.radians(20)
    for _ in range(60):
        turned.step(np.array([[0, 1.5]]))
    assert np.degrees(turned.yaw[0]) == pytest.approx(20), "PushBlock's rotation is frozen"


@pytest.mark.parametrize(("x", "turns"), [(0.0, 0), (-2.2, 1), (2.2, -1)])
def test_a_cube_that_meets_a_box_with_half_its_face_turns_about_its_edge(x, turns):
    """What presses is where the two overlap: in the middle it stands, beyond an edge it turns that way round."""
    boxes = Boxes(1, (-50, -50), (50, 50), 19.62, box_moves=False, cube_turns=True)
    boxes.half[:], boxes.position[0] = (2, 0.5), [(x, -1.2), (0, 0)]
    for _ in range(12):
        boxes.step(np.array([[0, 1.5]]))
    assert turns * np.degrees(boxes.yaw[0]) > 5 if turns else abs(boxes.yaw[0]) < 1e-3


@pytest.mark.parametrize("Scene", [PushBlock, Hallway])
def test_nobody_leaves_the_room_or_stays_in_another(Scene):
    scene, rng = Scene(8, 3, {}), np.random.default_rng(3)
    held = rng.integers(0, scene.branches[0], 8)

    def policy(who):  # hold a choice for a while, so that bodies get fast
        held[rng.random(8) < 0.2] = rng.integers(0, scene.branches[0])
        return held[who]

    academy, boxes, deep = in_process(scene, policy), scene.boxes, 0
    for _ in range(1500):
        academy.step()
        reach = boxes.reach()
        over = np.maximum(boxes.low - (boxes.position - reach), boxes.position + reach - boxes.high)
        over = over if boxes.box_moves else over[:, :1]
        gap = separations(boxes.position[:, 0] - boxes.position[:, 1], boxes.axes(), boxes.half).max(1)
        assert over.max() < 0.7 and gap.min() > -0.7, "at 31 m/s a step is 0.62 m"
        deep += (over.max((1, 2)) > 0.05) | (gap < -0.05)
    assert deep.max() < 400


# Rays


def march(start, way, middle, half, radius):
    """How far a disc comes, step by step, until it touches a box."""
    t = np.linspace(0, LENGTH, 24_001)
    outside = np.maximum(np.abs(start + t[:, None] * way - middle) - half, 0)
    gap = np.linalg.norm(outside, axis=1) - radius
    (hits,) = (gap <= 0).nonzero()
    return np.inf if gap[0] < 0 or not len(hits) else t[hits[0]]


numbers = st.floats(-8, 8).map(lambda x: round(x, 3))


@settings(max_examples=200, deadline=None)
@given(numbers, numbers, st.floats(0, 6.28), st.floats(0.1, 4), st.floats(0.1, 4), st.sampled_from([0.2, 0.5]))
def test_rays_come_as_far_as_a_march_along_them(x, z, angle, a, b, radius):
    start, way, half = np.array([x, z]), np.array([np.sin(angle), np.cos(angle)]), np.array([a, b])
    near = np.linalg.norm(np.maximum(np.abs(start) - half, 0)) - radius
    if abs(near) < 0.01:  # touching at the start: the next test
        return
    (((found,),),) = cast_at_boxes(start[None], way[None, None], np.zeros((1, 1, 2)), half[None, None], radius)
    expected = march(start, way, np.zeros(2), half, radius)
    if np.isinf(expected) or found > LENGTH:
        aside = march(start, way, np.zeros(2), half, radius + 2e-3)  # it may just have grazed the box
        assert (np.isinf(expected) and found > LENGTH - 1e-3) or not np.isinf(aside) or near < 0
    else:
        assert found == pytest.approx(expected, abs=2e-2)


def test_a_sphere_does_not_see_what_it_starts_in_and_sees_what_it_touches():
    way, middle, half = np.array([[[0.0, 1.0]]]), np.zeros((1, 1, 2)), np.ones((1, 1, 2))
    cast = lambda z: cast_at_boxes(np.array([[0.0, z]]), way, middle, half).item()
    assert cast(-4) == pytest.approx(2.5) and cast(-1.5) == 0 and cast(-1.4) == np.inf
    room = lambda z: cast_at_walls(np.array([[0.0, z]]), way, np.array([-5, -5]), np.array([5, 5]))[0, 0].min()
    assert room(0) == pytest.approx(4.5) and room(4.5) == 0 and room(4.6) == np.inf


def test_rays_go_forward_then_right_and_left_by_turns():
    np.testing.assert_allclose(np.degrees(directions(3, 90)), [0, 30, -30, 60, -60, 90, -90])
    np.testing.assert_allclose(np.degrees(directions(2, 70)), [0, 35, -35, 70, -70])


def test_a_ray_sends_tag_miss_and_fraction():
    out = seen(np.array([[[3.0, 6.0], [20.0, np.inf]]]), np.array([1, 0]), 3)
    np.testing.assert_allclose(out, [[0, 1, 0, 0, 0.25, 0, 0, 0, 1, 1]])


# PushBlock


def pushblock(n=1, **more):
    scene = PushBlock(n, 0, dict(more))
    return scene, in_process(scene)


def test_pushblock_sees_block_goal_and_walls_where_they_are():
    scene, academy = pushblock()
    boxes = scene.boxes
    boxes.height[:], boxes.fall[:] = 0, 0
    boxes.position[0], boxes.yaw[0] = [(0, 0), (0, 5)], 0.0  # forward is z: the block is there
    upper, lower = (x.reshape(3, 7, 5)[-1] for x in scene.observe(np.array([0])))
    np.testing.assert_allclose(lower[0], np.append(np.eye(3)[BLOCK], [0, (5 - 1 - 0.5) / 12]), atol=1e-6)
    np.testing.assert_allclose(lower[5], np.append(np.eye(3)[WALL], [0, (12.5 - 0.5) / 12]), atol=1e-6)
    boxes.yaw[0] = np.pi  # the goal's side
    upper, lower = (x.reshape(3, 7, 5)[-1] for x in scene.observe(np.array([0])))
    np.testing.assert_allclose(lower[0], np.append(np.eye(3)[THE_GOAL], [0, (8.35 - 0.5) / 12]), atol=1e-6)
    np.testing.assert_allclose(upper[0], [0, 0, 0, 1, 1], atol=1e-6)  # over the goal to a wall 12.5 m away: too far
    boxes.position[0, 0] = (0, -4)
    upper = scene.observe(np.array([0]))[0].reshape(3, 7, 5)[-1]
    np.testing.assert_allclose(upper[0], np.append(np.eye(3)[WALL], [0, 8.5 / 12]), atol=1e-6)
    boxes.height[:, 0] = 0.4
    assert scene.observe(np.array([0]))[0].reshape(3, 7, 5)[-1, 0, 3] == 1, "a sphere in the air passes over the walls"


def test_frames_stand_oldest_first_and_begin_with_zeros():
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
    np.testing.assert_array_equal(last[:2], frames[2][1:])  # the terminal one adds a frame, the next begins anew
    assert not scene.stacks[1].frames.any()


def test_the_block_in_the_goal_gives_five_and_the_end():
    scene, academy = pushblock(2)
    scene.boxes.height[:] = 0
    scene.boxes.position[0], scene.boxes.yaw[0] = [(0, -5.0), (0, -6.9)], np.pi
    scene.boxes.position[1] = [(0, 5), (0, 0)]
    academy.exchange = lambda outbox: (academy.log.extend(outbox), (np.zeros((2, 0)), np.array([[FORWARD], [0]])))[1]
    steps = 1  # of in_process
    while not any(done for *_, done, _ in academy.outbox):
        academy.step()
        steps += 1
        assert steps < 60
    ((who, _, _, reward, done, interrupted),) = [row for row in academy.outbox if row[4]]
    assert who.tolist() == [0] and done and not interrupted
    since = (steps - 1) % 5 + 1  # fixed steps of the last decision
    assert reward[0] == pytest.approx(5 - since / 5000, abs=1e-5)
    assert scene.boxes.position[0, 1, 1] > GOAL + 2, "a new episode has begun"


def test_pushblock_is_put_in_clear_of_goal_block_and_itself():
    scene, academy = pushblock(64)
    for _ in range(5):
        before, reach = scene.boxes.position[:, 0].copy(), scene.boxes.reach()[:, 0]
        scene.begin(np.arange(64))
        cube, block = scene.boxes.position[:, 0], scene.boxes.position[:, 1]
        assert np.abs(scene.boxes.position).max() <= 6.25 and scene.boxes.position[..., 1].min() > -5.85
        assert (np.abs(cube - block) > 3.5).any(1).all()
        assert all((np.abs(x - before) > 2.5 + reach).any(1).all() for x in (cube, block))
    assert np.allclose(scene.boxes.yaw, np.pi), "the heading is not drawn anew"


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
            _, reward, terminated, truncated, infos = envs.step(np.zeros(envs.action_space.shape, int))
            if truncated.any():
                break
        assert truncated.all() and not terminated.any() and "final_obs" in infos


# Hallway


@pytest.mark.parametrize("which", [0, 1], ids=["O", "X"])
@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
@pytest.mark.parametrize("place", [PADS, PANELS], ids=["pad", "panel"])
def test_hallways_goal_gives_one_or_takes_a_tenth(which, side, place):
    scene = Hallway(1, 0, {})
    academy = in_process(scene)
    scene.boxes.height[:] = 0
    scene.symbol[0], scene.left[0] = which, 0  # O is on the left
    academy.stats.clear()
    scene.boxes.position[0, 0] = place[side] - [0, 2.0 + 0.5 if place is PADS else PANEL[1] + 0.5]
    academy.reward[0] = -0.7  # what is pending is replaced
    scene.physics()
    ((*_, reward, done, interrupted),) = academy.outbox
    right = which == side
    assert reward[0] == pytest.approx(1 if right else -0.1) and done and not interrupted
    assert ("Goal/Correct" if right else "Goal/Wrong", 1.0, 2) in academy.stats


def test_hallway_sees_symbol_goals_walls_and_the_time():
    scene = Hallway(1, 0, {})
    academy = in_process(scene)
    boxes = scene.boxes
    boxes.height[:], boxes.position[0], boxes.yaw[0] = 0, [(0, -10), (0, 0)], 0.0
    for which in (0, 1):
        scene.symbol[0], academy.steps[0] = which, 300
        rays, time = scene.observe(np.array([0]))
        rays = rays.reshape(3, 5, 7)[-1]
        np.testing.assert_allclose(rays[0], np.append(np.eye(5)[2 + which], [0, (10 - 0.5 - 0.5) / 12]), atol=1e-6)
        np.testing.assert_allclose(rays[3, [4, 6]], [1, 9 / np.sin(np.radians(70)) / 12], atol=1e-6)
        assert time[0, -1] == pytest.approx(0.1)
    for left in (0, 1):  # in front of the left goal: the pad's edge is met by what of the sphere hangs that low
        scene.left[0], boxes.position[0, 0] = left, (-7, 15)
        ray = scene.observe(np.array([0]))[0].reshape(3, 5, 7)[-1, 0]
        far = 22.29 - 2 - 15 - np.sqrt(0.5**2 - 0.45**2)
        np.testing.assert_allclose(ray, np.append(np.eye(5)[left], [0, far / 12]), atol=1e-6)


def test_hallways_symbol_and_goals_are_drawn_evenly_and_apart():
    """Where O is tells nothing about where its goal is; X always stands in the middle."""
    scene = Hallway(2000, 0, {})
    in_process(scene)
    both = np.bincount(2 * scene.symbol + scene.left, minlength=4)
    assert both.min() > 420
    across = scene.boxes.position[:, 1, 0] - 0.015
    assert not across[scene.symbol == 1].any() and np.abs(across[scene.symbol == 0]).max() > 2.9
    cube = scene.boxes.position[:, 0]
    assert cube[:, 1].min() >= -20 and cube[:, 1].max() <= -10 and np.abs(cube[:, 0]).max() < 3.1
    assert np.histogram(scene.boxes.yaw % (2 * np.pi), 4)[0].min() > 420
