"""The reachers: a state and pictures that can be trusted, actions that go where they should, a reward that adds up, and
rollouts that are right."""

import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from conftest import needs_gl
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
import policies
import ppo_continuous_multiagent as ppo
from envs import cheap, choose_gl, reacher
from envs.vector import SyncEnvs, make_env, make_envs

IDS = ("Reacher2Dof-v0", "Reacher3Dof-v0", "Reacher6Dof-v0", "ReacherPlane-v0")
every = pytest.mark.parametrize("env_id", IDS)
choose_gl()


def play(env, seed, actions, render=False):
    """Observations, rewards and all that MuJoCo integrates, as bytes, over several episodes."""
    obs, _ = env.reset(seed=seed)
    state = np.zeros(mujoco.mj_stateSize(env.unwrapped.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    log = [obs.tobytes()]
    for action in actions:
        obs, reward, _, truncated, _ = env.step(action)
        if render:
            env.render()
        mujoco.mj_getState(env.unwrapped.model, env.unwrapped.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        assert np.isfinite(obs).all() and np.isfinite(state).all() and np.isfinite(reward)
        log += [obs.tobytes(), reward, state.tobytes()]
        if truncated:
            log.append(env.reset()[0].tobytes())
    return log


def random_actions(env, n, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (n, *env.action_space.shape)).astype(np.float32)


# The env


@every
@pytest.mark.filterwarnings("ignore:.*minimum value is -infinity|.*maximum value is infinity")
def test_gymnasiums_checker_is_content(env_id):
    check_env(gym.make(f"envs:{env_id}").unwrapped, skip_render_check=True)


@every
def test_two_creations_and_one_used_before_are_equal(env_id):
    first, second = make_env(env_id), make_env(f"envs:{env_id}")
    actions = random_actions(first, 250)
    log = play(first, 7, actions)
    play(second, 8, actions[:33])  # stops within an episode
    assert play(second, 7, actions) == log == play(first, 7, actions)
    assert play(first, 8, actions) != log


@every
def test_each_motor_drives_its_own_joint(env_id):
    """By name, and by generalised force: action i turns joint i, in its direction, and no other."""
    env = make_env(env_id).unwrapped
    for i in range(env.joints):
        motor = env.model.actuator(i)
        assert motor.name == env.model.joint(i).name == f"joint{i}" and motor.trnid[0] == i
        for sign in (1, -1):
            env.reset(seed=i)
            env.step(sign * np.eye(env.joints, dtype=np.float32)[i])
            np.testing.assert_array_equal(env.data.qfrc_actuator, sign * 0.9 * np.eye(env.joints)[i])
            if not env.model.opt.gravity.any():
                assert np.sign(env.qvel[i]) == sign and np.argmax(np.abs(env.qvel)) == i


@every
def test_nothing_explodes(env_id):
    """Random actions, held for a while, at full strength. A million steps: benchmarks/reacher.py."""
    env, rng, fastest = make_env(env_id), np.random.default_rng(1), 0.0
    env.reset(seed=1)
    for _ in range(1500):
        action = np.sign(rng.normal(size=env.action_space.shape)).astype(np.float32)
        for _ in range(rng.integers(1, 40)):
            obs, reward, _, truncated, _ = env.step(action)
            assert np.isfinite(obs).all() and np.isfinite(reward)
            fastest = max(fastest, np.abs(env.unwrapped.qvel).max())
            if truncated:
                env.reset()
    assert 2.5 < fastest < 6, "3 rad/s is where damping and a motor are in balance"


def tip_of(joints, angles):
    """Of a planar arm, by hand."""
    lengths, total = [length for _, length in reacher.ARMS[joints]], np.cumsum(angles)
    return np.array([np.dot(lengths, np.cos(total)), np.dot(lengths, np.sin(total))])


@every
def test_observation_is_what_the_docstring_says(env_id):
    env = make_env(env_id)
    for action in [None, *random_actions(env, 60)]:
        obs, info = env.reset(seed=3) if action is None else env.step(action)[::4]
        bare, n, axes = env.unwrapped, env.unwrapped.joints, 3 if env_id == "Reacher6Dof-v0" else 2
        assert len(obs) == 3 * n + axes + 2 * (env_id == "ReacherPlane-v0")
        expected = np.concatenate([np.sin(bare.qpos), np.cos(bare.qpos), bare.qvel])
        np.testing.assert_allclose(obs[: 3 * n], expected, atol=1e-6)
        if axes == 2:
            angles = np.arctan2(obs[:n], obs[n : 2 * n])
            way = bare.data.mocap_pos[0, :2] - tip_of(n, angles)
            np.testing.assert_allclose(obs[3 * n : 3 * n + 2], way, atol=1e-6)
        assert info["distance"] == pytest.approx(np.linalg.norm(obs[3 * n : 3 * n + axes]), abs=1e-6)
        assert info["is_success"] == (info["distance"] < 0.02)


def test_moving_target_is_foretold_by_the_observation():
    """Straight on with the velocity that is observed, off the edges as light off a mirror, never beyond them."""
    env, bounces = make_env("ReacherPlane-v0"), 0
    (x0, x1), (y0, y1) = reacher.PLANE
    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        for _ in range(99):
            place, velocity = tip_of(2, np.arctan2(obs[:2], obs[2:4])) + obs[6:8], obs[8:10]
            obs = env.step(np.ones(2, np.float32))[0]
            after = tip_of(2, np.arctan2(obs[:2], obs[2:4])) + obs[6:8]
            straight = place + 0.04 * velocity
            inside = np.clip(straight, [x0, y0], [x1, y1])
            np.testing.assert_allclose(after, 2 * inside - straight, atol=1e-6)
            np.testing.assert_allclose(obs[8:10], np.where(inside == straight, velocity, -velocity), atol=1e-6)
            bounces += (inside != straight).any()
            assert x0 - 1e-6 <= after[0] <= x1 + 1e-6 and y0 - 1e-6 <= after[1] <= y1 + 1e-6
    assert bounces > 10


def solve(env, target):
    """Joint angles that bring the fingertip to a target, by damped least squares from a few starts; returns what is
    left of the distance."""
    model, data, jacobian, left = env.model, mujoco.MjData(env.model), np.zeros((3, env.joints)), np.inf
    for start in range(5):
        data.qpos[:] = np.random.default_rng(start).uniform(-2, 2, env.joints) if start else reacher.REST[env.joints]
        for _ in range(100):
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            error = target - data.site_xpos[0]
            left = min(left, np.linalg.norm(error))
            if left < 1e-4:
                return left
            mujoco.mj_jacSite(model, data, jacobian, None, 0)
            data.qpos += jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-5 * np.eye(3), error)
    return left


@every
def test_every_target_can_be_reached(env_id):
    env = make_env(env_id).unwrapped
    for seed in range(200):
        env.reset(seed=seed)
        if env.plane:
            for _ in range(seed // 2):
                env.step(np.zeros(2, np.float32))
        assert solve(env, env.target.copy()) < 1e-3, (seed, env.target)


@pytest.mark.parametrize(("env_id", "axes"), [("Reacher2Dof-v0", 2), ("Reacher3Dof-v0", 2), ("Reacher6Dof-v0", 3)])
def test_targets_are_uniform(env_id, axes):
    """In area or volume: of the distance, its square or cube is uniform. Each direction is as likely as its
    opposite."""
    env, places = make_env(env_id).unwrapped, []
    for seed in range(2000):
        env.reset(seed=seed)
        places.append(env.target - [0, 0, reacher.SHOULDER if axes == 3 else env.target[2]])
    places, (low, high) = np.array(places), (reacher.NEAR**axes, reacher.FAR**axes)
    share = np.sort((np.linalg.norm(places, axis=1) ** axes - low) / (high - low))
    assert np.abs(share - np.linspace(0, 1, 2000)).max() < 0.04
    assert abs((places[:, 1] > 0).mean() - 0.5) < 0.04
    assert (places[:, [0, 2]] >= 0).all() if axes == 3 else abs((places[:, 0] > 0).mean() - 0.5) < 0.04


@every
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 100))
def test_progress_telescopes_to_the_difference_of_the_potential(env_id, seed, steps):
    env = make_env(env_id)
    _, info = env.reset(seed=seed)
    first, total = info["distance"], 0.0
    for action in random_actions(env, steps, seed):
        _, reward, _, _, info = env.step(action)
        total += reward + 0.1 * np.mean(action.astype(float) ** 2) - info["is_success"]
    assert total == pytest.approx(50 * (first - info["distance"]), abs=1e-4)


@pytest.mark.parametrize("env_id", IDS[:3])
def test_bonus_while_within_two_centimetres(env_id):
    """An arm at rest that stays there: no progress, no control cost, only the bonus."""
    env = make_env(env_id).unwrapped
    env.model.opt.gravity[:] = 0
    for away, expected in ((0.0199, True), (0.0201, False)):
        env.reset(seed=1)
        env.target[:] = env.tip + [away, 0, 0]
        env.observe()
        for _ in range(3):
            reward, info = env.step(np.zeros(env.joints, np.float32))[1::3]
            assert info["is_success"] == expected and reward == pytest.approx(float(expected), abs=1e-9)


@every
def test_episodes_are_truncated_and_never_terminate(env_id):
    env = make_env(env_id)
    env.reset(seed=0)
    ends = [env.step(action)[2:4] for action in random_actions(env, 100)]
    assert ends == [(False, False)] * 99 + [(False, True)]


# Pictures


@needs_gl
@every
def test_the_state_does_not_know_whether_it_was_rendered(env_id):
    plain, filmed = make_env(env_id), make_env(env_id, render_mode="rgb_array", width=64, height=64)
    cheap(filmed.unwrapped.model)
    actions = random_actions(plain, 120)
    assert play(plain, 2, actions) == play(filmed, 2, actions, render=True)


@needs_gl
@every
@pytest.mark.parametrize("size", [64, 480])
def test_arm_target_and_fingertip_are_seen(env_id, size):
    """Wherever they are: some pixels of each colour, in every one of many episodes."""
    env = make_env(env_id, render_mode="rgb_array", width=size, height=size)
    cheap(env.unwrapped.model)
    for seed in range(20):
        env.reset(seed=seed)
        for action in random_actions(env, seed):
            env.step(action)
        picture = env.render()
        red, green, blue = np.moveaxis(picture.astype(int), 2, 0)
        assert picture.shape == (size, size, 3) and picture.dtype == np.uint8
        scale = (size / 64) ** 2
        assert ((blue > red + 50) & (blue > green + 15)).sum() > 30 * scale, "the arm"
        assert ((red > green + 50) & (red > blue + 70)).sum() > 5 * scale, "the target"
        assert ((green > red + 40) & (green > blue + 40)).sum() > 2 * scale, "the fingertip"


@needs_gl
def test_two_envs_draw_each_its_own_picture():
    """Each has an OpenGL context of its own: taking turns changes nothing."""
    alone = make_env("Reacher2Dof-v0", render_mode="rgb_array", width=64, height=64)
    alone.reset(seed=1)
    expected = alone.render()
    film = dict(render_mode="rgb_array", width=64, height=64)
    one, other = make_env("Reacher2Dof-v0", **film), make_env("Reacher6Dof-v0", **film)
    one.reset(seed=1)
    other.reset(seed=2)
    for _ in range(3):
        np.testing.assert_array_equal(one.render(), expected)
        assert not np.array_equal(other.render(), expected)
    other.close()
    np.testing.assert_array_equal(one.render(), expected)


@needs_gl
def test_head_up_line_is_on_request(tmp_path):
    plain, told = (make_env("Reacher3Dof-v0", render_mode="rgb_array", hud=hud) for hud in (False, True))
    for env in (plain, told):
        env.reset(seed=1)
        env.step(np.ones(3, np.float32))
    changed = (plain.render() != told.render()).any(2)
    assert changed.any() and not changed[40:].any(), "one line, at the top"


@needs_gl
def test_film_of_a_reacher(tmp_path):
    import imageio

    play = lambda agent, spec, n: lambda obs, infos, who, begins: np.ones((len(who), 3))
    policies.film(ppo.Args(env_id="Reacher3Dof-v0"), make_envs, play, None, None, tmp_path / "film.mp4")
    frames = [frame.astype(int) for frame in imageio.get_reader(tmp_path / "film.mp4")]
    assert len(frames) == 100 and max(abs(frame - frames[0]).max() for frame in frames) > 100


# In the scripts


@every
def test_it_comes_back_exactly(env_id):
    """SyncEnvs plays episodes again: the same from there on, over the next ends too."""
    rng, make = np.random.default_rng(0), lambda: SyncEnvs([make_env(env_id) for _ in range(2)])
    envs, twin = make(), make()
    envs.reset(seed=5)
    actions = rng.uniform(-1, 1, (400, 2, *envs.single_action_space.shape)).astype(np.float32)
    for k in range(130):
        envs.step(actions[k])
    twin.restore(envs.state())
    for k in range(130, 400):
        for a, b in zip(envs.step(actions[k])[:4], twin.step(actions[k])[:4], strict=True):
            np.testing.assert_array_equal(a, b)


class Told(gym.Env):
    """Episodes of 1, 2, 3, ... steps; every third is a success, and its other steps say the contrary."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.episode = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.left = self.episode + 1, self.episode + 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        ended = self.left == 0
        return np.zeros(1, np.float32), 0.0, ended, False, {"is_success": (self.episode % 3 == 0) == ended}


def test_success_is_told_at_ends_by_slot():
    envs = SyncEnvs([Told(), Told()])
    envs.reset(seed=0)
    envs.envs[1].left = 2
    told = [envs.step(np.zeros((2, 1), np.float32))[-1].get("is_success") for _ in range(8)]
    assert told == [{0: False}, {1: False}, {0: False}, {1: False}, None, {0: True}, {1: True}, None]


def test_success_rate_is_logged_and_printed(monkeypatch, tmp_path, capsys):
    """The share of the episodes that ended in the iteration. Of episodes 1 to 7, 2 are successes; of 8 to 10, one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "make_envs", lambda args, seed: (SyncEnvs([Told()]), "told"))
    ppo.train(ppo.Args(env_id="Told", num_steps=28, total_timesteps=56, num_minibatches=1, update_epochs=1))
    assert "success 33%" in capsys.readouterr().out
    (folder,) = tmp_path.glob("runs/*")
    scalars = EventAccumulator(str(folder), {"scalars": 0}).Reload().Scalars("charts/success_rate")
    assert [(x.step, x.value) for x in scalars] == [(28, pytest.approx(2 / 7)), (56, pytest.approx(1 / 3))]
    monkeypatch.setattr(sys, "argv", ["ppo", "--evaluate", str(folder), "--eval-episodes", "9"])
    ppo.main()
    assert capsys.readouterr().out.strip().endswith("; success 33.3%")


def test_an_env_that_tells_no_success_has_no_rate(monkeypatch, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    ppo.train(ppo.Args(env_id="Hopper-v5", num_steps=64, total_timesteps=64, num_minibatches=1, update_epochs=1))
    (folder,) = tmp_path.glob("runs/*")
    assert "charts/success_rate" not in EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    monkeypatch.setattr(sys, "argv", ["ppo", "--evaluate", str(folder), "--eval-episodes", "2"])
    ppo.main()
    assert "success" not in capsys.readouterr().out


@every
def test_scripts_find_it_with_its_settings(env_id, monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "train", seen.append)
    for name in (env_id, f"envs:{env_id}"):
        monkeypatch.setattr(sys, "argv", ["ppo", "--env-id", name])
        ppo.main()
        envs, how = make_envs(seen[-1], 1)
        assert envs.num_envs == 8 and seen[-1].gamma == 0.95 and "gymnasium" in how


def success_rate(name, seed, num_envs, steps):
    before = set(Path("runs").glob("*"))
    settings = {**ppo.PRESETS["ReacherPlane-v0"], "num_minibatches": 8, "hidden_sizes": (64, 64)}
    settings |= {"num_envs": num_envs, "num_steps": 2048 // num_envs}
    ppo.train(ppo.Args(env_id="ReacherPlane-v0", seed=seed, exp_name=name, **{**settings, "total_timesteps": steps}))
    (folder,) = set(Path("runs").glob("*")) - before
    state = checkpoints.load(folder, ppo.__file__)[1]
    args = ppo.Args(**{**state["args"], "num_envs": 8})
    agent = ppo.Agent(state["spec"], args)
    agent.load_state_dict(state["kept"]["agent"])
    return policies.evaluate(policies.play_vectors(agent, state["spec"], 8), make_envs(args, 1)[0], 64, 1000)[2].mean()


def test_eight_envs_learn_what_one_env_learns(monkeypatch, tmp_path):
    """The same total of steps, and the same success rate within the spread of seeds. An easy variant: near is within 5
    cm. The long one: benchmarks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reacher, "RADIUS", 0.05)
    one, eight = ([success_rate(f"{n}-{seed}", seed, n, 2048 * 12) for seed in (1, 2, 3)] for n in (1, 8))
    assert min(*one, *eight) > 0.5 and abs(np.mean(one) - np.mean(eight)) < 0.15, (one, eight)
