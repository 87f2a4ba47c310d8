"""Trained here, used elsewhere: inputs that never moved, joints that give, worlds that differ, and tools to see it."""

import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import ROOT, call, train

import policies
import ppo_continuous_multiagent as ppo
import ppo_pixel as pixel
import sac_continuous as sac
from envs.compare import Trained
from envs.crawler import ALTERNATIVE, DRIVEN, FITTED, RANGES, TWISTS, Crawler
from envs.player import Academy

SMALL = dict(env_id="Crawler", num_players=1, num_steps=16, num_minibatches=2, update_epochs=1, hidden_sizes=(8, 8))
SPEC = {"obs_dim": 3, "action_dim": 2, "low": -1.0, "high": 1.0, "sensors": [3]}

# An input that hardly moves


@pytest.mark.parametrize("script", [ppo, sac, pixel])
def test_an_input_that_never_moved_is_not_blown_up(script):
    """What moves by 0.02 where it trembled by 1e-4 in training is 2, not 200; what moves as it did is as it was."""
    still, moving = 1e-4 * torch.randn(5000), 3 * torch.randn(5000) + 1
    batch = torch.stack([still, moving, torch.zeros(5000)], 1)
    ours, sb3s = script.Normalizer(3, least=script.Args().min_obs_std), script.Normalizer(3, least=0.0)
    for normalizer in (ours, sb3s):
        normalizer.update(batch)
    moved = torch.tensor([[0.02, 4.0, 0.0]])
    assert ours(moved)[0] == pytest.approx([2, 1, 0], abs=0.1) and sb3s(moved)[0, 0] == 10
    assert torch.equal(ours(moved)[0, 1], sb3s(moved)[0, 1]), "the same number where the spread is large enough"
    expected = (moved[0] - batch.double().mean(0)) / (batch.double().var(0, unbiased=False) + 1e-8).sqrt()
    np.testing.assert_allclose(sb3s(moved)[0], expected.clip(-10, 10), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("script", [ppo, sac])
def test_the_smallest_std_is_in_the_agent_and_in_the_export(script, tmp_path):
    """An input that trembles moves the exported policy as little as the agent."""
    agent = script.Agent(SPEC, script.Args(hidden_sizes=(8, 8), norm_obs=True, min_obs_std=0.5))
    agent.obs_rms.update(torch.randn(1000, 3) * torch.tensor([1e-3, 1.0, 1.0]))
    assert agent.state_dict()["obs_rms.scale"][0] == 2
    again = script.Agent(SPEC, script.Args(hidden_sizes=(8, 8), norm_obs=True))
    again.load_state_dict(agent.state_dict())
    obs = torch.randn(64, 3)
    policies.export(again, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    (exported,) = session.run(["deterministic_continuous_actions"], {"obs_0": obs.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(exported, agent.act(obs, deterministic=True)[1], atol=1e-5)


# The Crawler


def crawlers(n=10, parameters=None, physics=FITTED, seed=1, action=None):
    """A scene whose agents act at random, its Academy, and what they see."""
    scene, rng, seen = Crawler(n, seed, parameters if parameters is not None else {}, physics), None, []
    rng = np.random.default_rng(seed)

    def exchange(outbox):
        asking = [observations for _, _, observations, _, done, _ in outbox if not done]
        seen.extend(np.hstack(observations) for observations in asking)
        count = sum(len(observations[0]) for observations in asking)
        actions = rng.uniform(-1, 1, (count, 20)) if action is None else np.tile(action, (count, 1))
        return actions, np.zeros((count, 0))

    return SimpleNamespace(scene=scene, academy=Academy(scene, n, exchange), seen=seen)


def steps(world, count):
    for _ in range(count):
        world.academy.step()
    return world


def test_every_input_spreads_as_in_unity(monkeypatch):
    """Under random actions, all 158 of them, those of the knees and hips that give among them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from scene_fidelity import UNITY_OBSERVATIONS

    unity = np.array(UNITY_OBSERVATIONS["Crawler", "random"][1].split(), float)
    here = np.concatenate(steps(crawlers(), 2500).seen).std(0, dtype=float)
    assert np.allclose(here[unity == 0], 0)
    unity[138] = 0  # the recorded targets sometimes fell through the ground
    ratio = here[unity > 0] / unity[unity > 0]
    assert ratio.min() > 0.55 and ratio.max() < 1.8, f"{ratio.min():.2f} to {ratio.max():.2f}"


def test_the_sign_of_the_rotation_to_the_goal_is_unitys():
    """Beyond 120 degrees it is the largest of x, y and z that is positive, not w."""
    world = steps(crawlers(1), 1)
    scene = world.scene
    for yaw in np.radians(np.arange(-175, 180, 10)):  # the body's forward axis, from the cube's, about Unity's y
        s, c = scene.forward[0]
        scene.xmat[0, 0, :, 1] = s * np.cos(yaw) + c * np.sin(yaw), c * np.cos(yaw) - s * np.sin(yaw), 0
        x, y, z, w = scene.observe(np.array([0]))[1][0, 7:11]
        back = -yaw if yaw < np.radians(120) else 2 * np.pi - yaw  # from the body to the cube
        assert (x, y, z, w) == pytest.approx((0, np.sin(back / 2), 0, np.cos(back / 2)), abs=1e-5)


def test_a_twist_gives_and_comes_back():
    """Held still in the air, a leg that is twisted returns; the driven hinges do what they are told."""
    world = steps(crawlers(1, action=np.zeros(20)), 5)
    scene = world.scene
    scene.angle[0, TWISTS] = 0.1
    twisted = np.abs(scene.angle[0, TWISTS]).copy()
    steps(world, 10)
    assert (np.abs(scene.angle[0, TWISTS]) < 0.3 * twisted).all()
    assert np.abs(scene.goal[0, TWISTS]).max() == 0 and np.ptp(scene.goal[0, DRIVEN]) > 0


def test_without_a_range_nothing_is_drawn():
    plain, zero = (steps(crawlers(3, parameters), 100) for parameters in ({}, dict.fromkeys(RANGES, 0.0)))
    np.testing.assert_array_equal(np.concatenate(plain.seen), np.concatenate(zero.seen))
    assert not zero.scene.drawn


def drawn(scene):
    model, n = scene.model, scene.num_agents
    mass = model.body_mass[2:].reshape(n, 9) / [20, 2, 1, 2, 1, 2, 1, 2, 1]
    friction = model.pair_friction.reshape(n, -1, 5)[:, :, 0] / FITTED.friction
    return {"mass": mass, "strength": scene.power, "friction": friction, "delay": scene.delay}


def test_ranges_are_drawn_for_each_agent_and_episode():
    world = steps(crawlers(12, dict.fromkeys(RANGES, 0.1) | {"randomize_delay": 2}), 1)
    scene, others = world.scene, np.arange(12) != 2
    first = {name: x.copy() for name, x in drawn(scene).items()}
    for name in ("mass", "strength", "friction"):
        assert 0.9 <= first[name].min() < 1 < first[name].max() <= 1.1, name
        assert len(np.unique(first[name][:, 0])) == 12, f"{name}: the agents differ"
    assert (np.ptp(first["friction"], axis=1) == 0).all(), "one ground for all parts of an agent"
    scene.begin(np.array([2]))
    for name, x in drawn(scene).items():
        np.testing.assert_array_equal(x[others], first[name][others])
        assert name == "delay" or not np.array_equal(x[2], first[name][2]), "another episode, another draw"
    scene.begin(np.arange(12))
    assert set(scene.delay) == {0, 1, 2}
    whole = scene.model.body_subtreemass[2:].reshape(12, 9)
    np.testing.assert_allclose(whole[:, 0], scene.model.body_mass[2:].reshape(12, 9).sum(1))


def test_a_range_by_name_moves_that_alone_and_can_be_taken_back():
    parameters = {"randomize_friction": 0.5}
    world = steps(crawlers(3, parameters), 1)
    now = drawn(world.scene)
    assert np.ptp(now["friction"]) > 0.1 and np.allclose(now["mass"], 1) and np.allclose(now["strength"], 1)
    parameters["randomize_friction"] = 0.0
    world.scene.begin(np.arange(3))
    assert np.allclose(drawn(world.scene)["friction"], 1)


def test_a_delayed_action_takes_effect_later():
    """By as many fixed steps as the delay says."""
    for delay in range(4):
        world = crawlers(1, {"randomize_delay": 3.0}, action=np.full(20, 0.5))
        scene = world.scene
        scene.draw = lambda *_: None
        scene.drawn, scene.delay[:], scene.wait[:] = True, delay, -1
        taken = []
        for _ in range(5):
            world.academy.step()
            taken.append(bool(scene.goal[0, DRIVEN].any()))
        assert taken == [step >= delay for step in range(5)]


def test_the_alternative_physics_is_another_and_a_crawler_stands_in_it():
    pose = np.zeros(20)
    pose[8:12], pose[12:] = 0.2, 1.0
    worlds = [steps(crawlers(1, physics=physics, action=pose), 450) for physics in (FITTED, ALTERNATIVE)]
    for world in worlds:
        assert 0.6 < world.scene.xpos[0, 0, 2] < 1.6 and np.abs(world.scene.qvel).max() < 0.5
    assert not np.allclose(worlds[0].seen[20], worlds[1].seen[20], atol=1e-2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--scene 3DBall --randomize 0.1", "--randomize and --physics are for Crawler: 3DBall has one physics"),
        ("--scene GridWorld --physics alternative", "--randomize and --physics are for Crawler"),
        ("--scene Crawler --randomize 1.5", "--randomize 1.5: from 0 to 0.9"),
        ("--scene Crawler --randomize nan", "--randomize nan: from 0 to 0.9"),
    ],
)
def test_a_player_says_what_it_can_not_do(line, says):
    command = [sys.executable, "-m", "envs.player", *line.split()]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 2 and says in out.stderr.splitlines()[-1]


# The tools


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(train, ppo, SMALL)(total_timesteps=320, player_args=("--randomize=0.1",))


def test_transfer_plays_a_policy_in_both_worlds(run):
    command = [sys.executable, str(ROOT / "benchmarks" / "transfer.py"), str(run), "--episodes", "10"]
    out = subprocess.run(command, capture_output=True, text=True)
    rows = re.findall(
        rf"^{run.name} +320 +(\S+) ± \S+ \(\d+\) +(\S+) ± \S+ \(\d+\) +(-?\d+)%$", out.stdout, re.MULTILINE
    )
    assert len(rows) == 1 and rows[0][0] != rows[0][1], out.stdout + out.stderr
    command[2] = str(run.parent)
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 1 and out.stderr.strip().endswith("no checkpoint of a run there")


def compared(*line):
    command = [sys.executable, str(ROOT / "unity_vec_env.py"), "--steps", "60", *line]
    return subprocess.run(command, capture_output=True, text=True)


def test_compare_names_the_inputs_that_training_never_saw(run, monkeypatch):
    out = compared("--path", "Crawler", "--compare", str(run))
    assert (
        "Random actions: --export the run, and its policy acts" in out.stdout
        and "in 99% of 600 decisions" in out.stdout
    )
    call(ppo, monkeypatch, "--export", run)
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["kept"]["agent"]["obs_rms.mean"][5] = 30.0
    state["kept"]["agent"]["obs_rms.scale"][:] = 1e-3
    state["kept"]["agent"]["obs_rms.scale"][5] = 1.0
    torch.save(state, run / "checkpoint.pt")
    out = compared("--path", "Crawler", "--compare", str(run))
    assert "The run's exported policy acts" in out.stdout and "1 of 158 inputs do not lie within 5 stds" in out.stdout
    assert re.search(r"^ +5  PhysicsBodySensor:Body +100% +30 ± 1 ", out.stdout, re.MULTILINE), out.stdout


@pytest.mark.parametrize(
    ("path", "where", "says"),
    [
        ("3DBall", ".", "saw 158 numbers, this build sends 8"),
        ("Crawler", "nothing", "no checkpoint of a run there"),
    ],
)
def test_compare_says_what_can_not_be_compared(run, path, where, says):
    out = compared("--path", path, "--compare", str(run / where))
    assert out.returncode == 1 and says in out.stderr and len(out.stderr.strip().splitlines()) == 1


def test_compare_counts_as_a_plain_loop_does():
    trained = Trained.__new__(Trained)
    trained.mean, trained.std = np.array([0.0, 1.0]), np.array([1.0, 0.1])
    trained.clear()
    rows = [np.random.default_rng(i).normal(size=(i, 2)) * [1, 0.4] for i in range(9)]
    for row in rows:
        trained.see(row)
    every = np.concatenate(rows)
    assert trained.count == len(every) and (trained.high == every.max(0)).all() and (trained.low == every.min(0)).all()
    assert trained.far.tolist() == [0, int((np.abs(every[:, 1] - 1) > 0.5).sum())]
