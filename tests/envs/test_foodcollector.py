"""FoodCollector: Unity's layout and rules, closed forms of its motion, rays, lasers and food."""

from contextlib import closing

import numpy as np
import pytest

from envs.unity_scenes.foodcollector import FOOD, NUM_FOOD, SPAWN, WALL, FoodCollector
from envs.unity_scenes.player import Academy
from unity_vec_env import UnityVecEnv

NOTHING = (0, 0, 0, 0)
FORWARD = (1, 0, 0, 0)
SHOOT = (0, 0, 0, 1)
KEPT = 1 - 0.5 * 0.02  # of a speed, by drag, in a fixed step
LOSS = 2 * 0.6 * 9.81 * 0.02 * KEPT  # by friction


def play(num_agents=5, seed=0, **parameters):
    """Return a scene whose agents do nothing and whose food is out of the way, and its Academy.

    `actions` has the action of each agent: forward, right, turn, shoot.
    """

    def exchange(outbox):
        academy.log.extend(outbox)
        agents = [x for agents, *_, done, _ in outbox if not done for x in agents]
        rows = academy.actions[agents]
        return rows[:, :3], rows[:, 3:].astype(int)

    scene = FoodCollector(num_agents, seed, parameters)
    academy = Academy(scene, num_agents, exchange)
    academy.actions = np.tile(NOTHING, (num_agents, 1)).astype(float)
    academy.log = []
    academy.step()
    for i in range(num_agents):
        place(scene, i, (-40 + 15 * (i % 5), -40))
    scene.food[:] = (WALL - 1, WALL - 1)
    scene.food_velocity[:] = 0
    return scene, academy


def place(scene, agent, position, yaw=0.0, velocity=(0, 0)):
    scene.position[agent] = position
    scene.yaw[agent] = np.radians(yaw)
    scene.velocity[agent] = velocity


def run(academy, steps):
    for _ in range(steps):
        academy.step()


def until_decision(academy):
    """Go on until the next fixed step has decisions."""
    while academy.count % 5:
        academy.step()


def rays_of(scene, agent):
    """Return tags, miss flags and distances of an agent's rays, forward first, in metres."""
    rays = scene.observe(np.array([agent]))[0].reshape(7, 7)
    return rays[:, :5], rays[:, 5], 50 * rays[:, 6]


def test_layout_is_unitys():
    with closing(UnityVecEnv("FoodCollector")) as envs:
        assert envs.num_envs == 20 and envs.behavior == "FoodCollector?team=0"
        assert envs.sensors == [49, 4]
        assert envs.single_action_space["continuous"].shape == (3,)
        assert envs.single_action_space["discrete"].nvec.tolist() == [2]
        obs, infos = envs.reset()
        assert envs.observation_space.contains(obs)
        assert infos["ready"].all() and infos["action_mask"].all()


def test_a_decision_is_five_fixed_steps_and_its_action_acts_in_each():
    scene, academy = play(1)
    until_decision(academy)
    academy.actions[0] = (0, 0, 0.1, 0)
    academy.log.clear()
    yaw = scene.yaw[0]
    run(academy, 5)
    assert len(academy.log) == 1, "one request"
    assert np.degrees(yaw - scene.yaw[0]) == pytest.approx(30)
    run(academy, 1)
    assert len(academy.log) == 2


def test_an_episode_lasts_5000_fixed_steps_and_is_interrupted():
    assert FoodCollector.max_step == 5000
    with closing(UnityVecEnv("FoodCollector", player_args=["--max-step", "50"])) as envs:
        envs.reset()
        nothing = {"continuous": np.zeros((20, 3)), "discrete": np.zeros((20, 1), int)}
        for i in range(10):
            _, _, terminated, truncated, infos = envs.step(nothing)
            assert truncated.all() == (i == 9) and not terminated.any()
        assert all(row.shape == (53,) for row in infos["final_obs"])


# Motion


@pytest.mark.parametrize(
    ("action", "push"),
    [
        ((1, 0), (0, 1)),
        ((-1, 0), (0, -1)),
        ((0, 1), (1, 0)),
        ((0, -0.5), (-0.5, 0)),
        ((1, 1), (1, 1)),
        ((7, -9), (-1, 1)),
    ],
)
@pytest.mark.parametrize("shoots", [0, 1])
def test_actions_push_2_metres_per_second_each_fixed_step_and_half_of_it_with_the_laser(
    action, push, shoots
):
    scene, academy = play(1)
    place(scene, 0, (0, 0), yaw=90)
    until_decision(academy)
    place(scene, 0, (0, 0), yaw=90)  # looks along x: forward is x, and right is -z
    academy.actions[0] = (*action, 0, shoots)
    academy.step()
    right, forward = push
    change = 2 * (0.5 if shoots else 1) * np.array([forward, -right])
    speed = np.linalg.norm(change) * KEPT
    expected = change * KEPT * (speed - LOSS) / speed
    assert scene.velocity[0] == pytest.approx(expected, abs=1e-6)
    assert scene.position[0] == pytest.approx(0.02 * expected, abs=1e-6)


def test_the_top_speed_is_where_push_drag_friction_and_slowing_balance():
    scene, academy = play(1)
    until_decision(academy)
    academy.actions[0] = FORWARD
    for _ in range(400):
        scene.position[0] = 0
        academy.step()
    speed = (2 * KEPT - LOSS) / (1 - 0.95 * KEPT)
    assert scene.velocity[0] == pytest.approx([0, speed] @ scene.axes()[0], rel=1e-3)
    assert speed == pytest.approx(29.4, abs=0.1)


def test_a_laser_brakes_and_speeds_above_5_are_reduced():
    for speed, shoots, kept in (
        (4, 0, 1),
        (4, 1, 0.75),
        (6, 0, 0.95),
        (6, 1, 0.75),
        (8, 1, 0.7125),
    ):
        scene, academy = play(1)
        until_decision(academy)
        academy.actions[0] = (0, 0, 0, shoots)
        place(scene, 0, (0, 0), velocity=(0, speed))
        academy.step()
        assert scene.velocity[0, 1] == pytest.approx(kept * speed * KEPT - LOSS, abs=1e-6)


@pytest.mark.parametrize(("turn", "degrees"), [(0.01, -6), (1, -6), (-0.3, 6), (0, 0)])
def test_only_the_direction_of_a_turn_counts(turn, degrees):
    """6 degrees per fixed step, because Unity normalizes the axis of the rotation; positive is to the left."""
    scene, academy = play(1)
    until_decision(academy)
    academy.actions[0] = (0, 0, turn, 0)
    place(scene, 0, (0, 0), yaw=10)
    academy.step()
    assert np.degrees(scene.yaw[0]) == pytest.approx(10 + degrees)


def test_walls_stop_agents_and_balls():
    scene, academy = play(1)
    until_decision(academy)
    academy.actions[0] = FORWARD
    place(scene, 0, (0, WALL - 3), yaw=0, velocity=(0, 20))
    scene.food[0, 0] = (WALL - 2, 0)
    scene.food_velocity[0, 0] = (10, 0)
    run(academy, 40)
    assert scene.position[0] == pytest.approx([0, WALL - 0.5], abs=1e-6)
    assert scene.velocity[0] == pytest.approx([0, 0], abs=1e-6)
    assert scene.food[0, 0, 0] == WALL - FOOD and scene.food_velocity[0, 0, 0] == 0


def test_agents_that_collide_keep_their_momentum_and_do_not_overlap():
    scene, academy = play(2)
    place(scene, 0, (0, 0), velocity=(8, 0))
    place(scene, 1, (2, 0))
    run(academy, 30)
    away = scene.position[1, 0] - scene.position[0, 0]
    assert away >= 2 / np.sqrt(np.pi) - 1e-6, "discs with the area of the cubes"
    assert scene.position[1, 0] > 2 and scene.velocity[0, 0] <= scene.velocity[1, 0] + 1e-9
    scene.velocity[:2] = ((3, 0), (-1, 0))
    scene.position[:2] = ((0, 0), (2 / np.sqrt(np.pi) + 0.01, 0))
    scene.separate_agents()
    assert scene.velocity[:2, 0] == pytest.approx([1, 1])


# Observations


def test_rays_see_food_as_a_sphere_cast_does():
    """The distance at which a sphere of 0.5 m at the agent's height touches a ball, which is 0.25 m higher."""
    scene, _ = play(1)
    place(scene, 0, (0, 0))
    reach = np.sqrt((0.5 + FOOD) ** 2 - 0.25**2)
    for ball, tag in ((0, 0), (NUM_FOOD, 3)):
        scene.food[:] = (WALL - 1, WALL - 1)
        scene.food[0, ball] = (0.6, 20)
        tags, missed, distance = rays_of(scene, 0)
        assert tags[0].argmax() == tag and tags[0].sum() == 1 and not missed[0]
        assert distance[0] == pytest.approx(20 - np.sqrt(reach**2 - 0.6**2), abs=1e-4)
        assert tags[1:, [0, 3]].sum() == 0


def test_rays_are_seven_from_forward_to_70_degrees_on_each_side():
    scene, _ = play(1)
    for i, degrees in enumerate([0, 70 / 3, -70 / 3, 140 / 3, -140 / 3, 70, -70]):
        place(scene, 0, (3, -2), yaw=100)
        angle = np.radians(100 + degrees)
        scene.food[0, 0] = scene.position[0] + 12 * np.array([np.sin(angle), np.cos(angle)])
        tags, _, distance = rays_of(scene, 0)
        assert np.flatnonzero(tags[:, 0]).tolist() == [i]
        assert distance[i] == pytest.approx(12 - np.sqrt(1.25**2 - 0.25**2), abs=1e-4)


def test_rays_see_walls_agents_and_frozen_agents():
    scene, _ = play(2)
    place(scene, 0, (0, 0))
    place(scene, 1, (0, 10))
    tags, missed, distance = rays_of(scene, 0)
    assert tags[0].tolist() == [0, 1, 0, 0, 0] and distance[0] == pytest.approx(9, abs=1e-4)
    scene.frozen[1] = True
    tags, _, distance = rays_of(scene, 0)
    assert tags[0].tolist() == [0, 0, 0, 0, 1] and distance[0] == pytest.approx(9, abs=1e-4)
    place(scene, 0, (0, 20))
    place(scene, 1, (-30, -40))
    tags, _, distance = rays_of(scene, 0)
    assert tags[0].tolist() == [0, 0, 1, 0, 0]
    assert distance[0] == pytest.approx(WALL - 20 - 0.5, abs=1e-4)
    place(scene, 0, (0, -20))
    tags, missed, distance = rays_of(scene, 0)
    assert not tags[0].any() and missed[0] and distance[0] == 50, "beyond the length of the rays"


def test_areas_do_not_see_each_other():
    scene, _ = play(6)
    place(scene, 0, (0, 0))
    place(scene, 5, (0, 10))
    tags, _, _ = rays_of(scene, 0)
    assert tags[0].tolist() == [0, 0, 1, 0, 0] and not tags[:, 1].any()


def test_vector_has_velocity_in_the_agents_frame_and_flags():
    scene, academy = play(1)
    place(scene, 0, (0, 0), yaw=90, velocity=(3, 1))  # looks along x, right is -z
    vector = scene.observe(np.array([0]))[1]
    assert vector[0] == pytest.approx([-1, 3, 0, 0], abs=1e-6)
    scene.frozen[0] = scene.shoots[0] = True
    assert scene.observe(np.array([0]))[1][0, 2:].tolist() == [1, 1]


# Lasers


def shot(scene, academy, target, yaw=0.0, shooter=(0, 0)):
    """Let agent 0 shoot in one fixed step at agent 1, and return whether it froze."""
    until_decision(academy)
    place(scene, 0, shooter, yaw)
    place(scene, 1, target)
    scene.frozen[:] = False
    academy.actions[:] = NOTHING
    academy.actions[0] = SHOOT
    academy.step()
    return bool(scene.frozen[1])


def test_a_laser_reaches_25_metres_and_is_2_metres_thick():
    scene, academy = play(2)
    front = 0.5 + 2  # half a cube and the radius
    assert shot(scene, academy, (0, 25 + front - 0.05))
    assert not shot(scene, academy, (0, 25 + front + 0.05))
    assert shot(scene, academy, (front - 0.05, 10))
    assert not shot(scene, academy, (front + 0.05, 10))
    assert not shot(scene, academy, (0, -10)), "not backward"
    assert shot(scene, academy, (0, -10), yaw=180)
    assert not shot(scene, academy, (0, 2)), "a sphere cast ignores what it starts in"


def test_food_and_frozen_agents_stop_a_laser():
    scene, academy = play(3)
    assert shot(scene, academy, (0, 15))
    scene.food[0, 0] = (0, 8)
    assert not shot(scene, academy, (0, 15))
    scene.food[0, 0] = (WALL - 1, WALL - 1)
    until_decision(academy)
    place(scene, 2, (0, 8))
    assert not shot(scene, academy, (0, 15)) and scene.frozen[2], "the nearest agent is hit"
    until_decision(academy)
    scene.frozen[:] = (False, False, True, False, False)
    scene.frozen_at[2] = academy.total
    academy.step()
    assert scene.frozen.tolist() == [False, False, True, False, False]


def test_a_laser_stays_in_its_area():
    scene, academy = play(6)
    until_decision(academy)
    place(scene, 0, (0, 0))
    place(scene, 5, (0, 10))
    academy.actions[0] = SHOOT
    academy.step()
    assert not scene.frozen.any()


def test_a_hit_agent_can_not_act_for_4_seconds():
    scene, academy = play(2)
    assert shot(scene, academy, (0, 10))
    hit_at = academy.total
    academy.actions[0] = NOTHING
    academy.actions[1] = (1, 0.5, 1, 1)
    still = scene.position[1].copy(), scene.yaw[1]
    steps = 0
    while scene.frozen[1]:
        academy.step()
        steps += 1
        if scene.frozen[1]:
            assert (scene.position[1] == still[0]).all() and scene.yaw[1] == still[1]
            assert not scene.shoots[1]
    assert academy.total - hit_at == 201, "4 s are over in the 201st fixed step"
    assert scene.yaw[1] != still[1] and (scene.position[1] != still[0]).any()


def test_a_frozen_agent_that_moves_goes_on_until_it_stops():
    scene, academy = play(2)
    place(scene, 1, (0, 0), velocity=(0, 4))
    scene.frozen[1] = True
    scene.frozen_at[1] = academy.total
    academy.step()
    assert scene.velocity[1, 1] == pytest.approx(4 * KEPT - LOSS)


def test_lasers_cost_and_give_nothing():
    scene, academy = play(2)
    academy.reward[:] = 0
    assert shot(scene, academy, (0, 10))
    assert not academy.reward.any()


# Food


@pytest.mark.parametrize(("ball", "reward"), [(0, 1), (NUM_FOOD - 1, 1), (NUM_FOOD, -1), (-1, -1)])
def test_food_gives_1_and_red_food_costs_1_and_appears_elsewhere(ball, reward):
    scene, academy = play(5)
    place(scene, 2, (0, 0), velocity=(0, 3))
    scene.food[0, ball] = (0, 0.5 + FOOD + 0.1)
    academy.log.clear()
    run(academy, 10)
    total = academy.reward.copy()
    for agents, _, _, rewards, *_ in academy.log:
        total[agents] += rewards
    assert total.tolist() == [0, 0, reward, 0, 0]
    assert (np.abs(scene.food[0, ball]) <= SPAWN + 1).all()
    assert np.linalg.norm(scene.food[0, ball]) > 2
    assert scene.food.shape == (1, 2 * NUM_FOOD, 2), "as much food as before"


def test_a_ball_takes_the_impulse_of_the_collision_along():
    """Without bounce both would have the speed 10 v / (10 + 5); of a sliding ball's speed 5/7 become rolling."""
    scene, academy = play(1)
    place(scene, 0, (0, 0), velocity=(0, 3))
    scene.food[0, 0] = (0, 0.5 + FOOD + 0.01)
    scene.eat()
    assert scene.velocity[0, 1] == pytest.approx(3 * 10 / 15)
    assert scene.food_velocity[0, 0] == pytest.approx([0, 3 * 10 / 15 * 5 / 7])


def test_food_is_touched_by_the_cube_and_not_by_a_disc():
    for yaw, front in ((0, 0.5), (45, np.sqrt(0.5))):
        for gap, eaten in ((0.01, True), (0.03, False)):
            scene, academy = play(1)
            academy.reward[:] = 0
            place(scene, 0, (0, 0), yaw)
            scene.food[0, 0] = (0, front + FOOD + gap)
            scene.eat()
            assert bool(academy.reward[0]) == eaten


def test_only_a_full_reset_scatters_the_food_again():
    scene, academy = play(5)
    before = scene.food.copy()
    academy.end(np.arange(5), interrupted=True)
    assert (scene.food == before).all()
    academy.reset()
    assert (scene.food != before).any(2).all() and (np.abs(scene.food) <= SPAWN).all()


def test_an_episode_starts_at_a_random_place_at_rest_and_thawed():
    scene, academy = play(500)
    scene.velocity[:] = 3
    scene.frozen[:] = scene.shoots[:] = True
    academy.end(np.arange(500), interrupted=True)
    position = scene.position[:500]
    assert (np.abs(position) <= SPAWN).all()
    assert position.mean(0) == pytest.approx([0, 0], abs=5)
    assert position.std(0) == pytest.approx(np.full(2, SPAWN / np.sqrt(3)), rel=0.1)
    assert not scene.velocity.any() and not scene.frozen.any() and not scene.shoots.any()
    degrees = np.degrees(scene.yaw)
    assert np.rint(degrees) == pytest.approx(degrees) and 0 <= degrees.min() < degrees.max() < 360


def test_agent_scale_is_an_environment_parameter():
    scene, academy = play(1, agent_scale=3.0)
    assert scene.half[0] == 1.5
    place(scene, 0, (0, 0))
    scene.food[0, 0] = (0, 1.5 + FOOD + 0.01)
    academy.reward[:] = 0
    scene.eat()
    assert academy.reward[0] == 1


def test_areas_may_have_fewer_agents():
    scene, academy = play(7)
    academy.actions[:] = (1, 0, 0.5, 1)
    run(academy, 200)
    assert np.isfinite(scene.position).all() and (np.abs(scene.position[:7]) < WALL).all()
    for part in scene.observe(np.arange(7)):
        assert np.isfinite(part).all()
