"""Transfer of trained policies: nearly constant inputs, joint twists, domain randomisation, and tools to compare."""

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

import crossq_continuous as crossq
import ppo_continuous_multiagent as ppo
import ppo_pixel as pixel
import sac_continuous as sac
from envs.unity_scenes.crawler import ALTERNATIVE, DRIVEN, FITTED, RANGES, TWISTS, Crawler
from envs.unity_scenes.player import Academy
from onefile_rl import export
from onefile_rl.engines.compare import Trained

SMALL = dict(
    env_id="Crawler",
    num_players=1,
    num_steps=16,
    num_minibatches=2,
    update_epochs=1,
    hidden_sizes=(8, 8),
)
SPEC = {"obs_dim": 3, "action_dim": 2, "low": -1.0, "high": 1.0, "sensors": [3]}

# Inputs that are nearly constant in training


@pytest.mark.parametrize("script", [ppo, sac, crossq, pixel])
def test_a_nearly_constant_input_is_not_scaled_up(script):
    """An input with a std of 1e-4 in training that is 0.02 becomes 2, not 200. Other inputs do not change."""
    still = 1e-4 * torch.randn(5000)
    moving = 3 * torch.randn(5000) + 1
    batch = torch.stack([still, moving, torch.zeros(5000)], 1)
    ours = script.Normalizer(3, min_std=script.Args().min_obs_std)
    sb3s = script.Normalizer(3, min_std=0.0)
    for normalizer in (ours, sb3s):
        normalizer.update(batch)
    moved = torch.tensor([[0.02, 4.0, 0.0]])
    assert ours(moved)[0] == pytest.approx([2, 1, 0], abs=0.1) and sb3s(moved)[0, 0] == 10
    assert torch.equal(ours(moved)[0, 1], sb3s(moved)[0, 1]), (
        "the same number where the std is large enough"
    )
    expected = (moved[0] - batch.double().mean(0)) / (
        batch.double().var(0, unbiased=False) + 1e-8
    ).sqrt()
    np.testing.assert_allclose(sb3s(moved)[0], expected.clip(-10, 10), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("script", [ppo, sac, crossq])
def test_the_minimum_std_is_in_the_agent_and_in_the_export(script, tmp_path):
    """The exported policy scales a nearly constant input as the agent does."""
    agent = script.Agent(SPEC, script.Args(hidden_sizes=(8, 8), norm_obs=True, min_obs_std=0.5))
    agent.obs_rms.update(torch.randn(1000, 3) * torch.tensor([1e-3, 1.0, 1.0]))
    assert agent.state_dict()["obs_rms.scale"][0] == 2
    again = script.Agent(SPEC, script.Args(hidden_sizes=(8, 8), norm_obs=True))
    again.load_state_dict(agent.state_dict())
    obs = torch.randn(64, 3)
    export.export(again, SPEC, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    (exported,) = session.run(["deterministic_continuous_actions"], {"obs_0": obs.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(exported, agent.act(obs, deterministic=True)[1], atol=1e-5)


# The Crawler


def crawlers(n=10, parameters=None, physics=FITTED, seed=1, action=None):
    """Return a scene whose agents act at random, its Academy, and its observations."""
    scene = Crawler(n, seed, parameters if parameters is not None else {}, physics)
    rng = None
    seen = []
    rng = np.random.default_rng(seed)

    def exchange(outbox):
        requests = [observations for _, _, observations, _, done, _ in outbox if not done]
        seen.extend(np.hstack(observations) for observations in requests)
        count = sum(len(observations[0]) for observations in requests)
        actions = rng.uniform(-1, 1, (count, 20)) if action is None else np.tile(action, (count, 1))
        return actions, np.zeros((count, 0))

    return SimpleNamespace(scene=scene, academy=Academy(scene, n, exchange), seen=seen)


def steps(world, count):
    for _ in range(count):
        world.academy.step()
    return world


def test_the_std_of_every_input_is_unitys(monkeypatch):
    """All 158 inputs with random actions, including those of knees and hips that twist."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from scene_fidelity import UNITY_OBSERVATIONS

    unity = np.array(UNITY_OBSERVATIONS["Crawler", "random"][1].split(), float)
    here = np.concatenate(steps(crawlers(), 2500).seen).std(0, dtype=float)
    assert np.allclose(here[unity == 0], 0)
    unity[138] = 0  # the recorded targets sometimes fell through the ground
    ratio = here[unity > 0] / unity[unity > 0]
    assert ratio.min() > 0.55 and ratio.max() < 1.8, f"{ratio.min():.2f} to {ratio.max():.2f}"


def test_the_sign_of_the_rotation_to_the_goal_is_unitys():
    """Beyond 120 degrees the largest of x, y and z is positive, not w."""
    world = steps(crawlers(1), 1)
    scene = world.scene
    for yaw in np.radians(
        np.arange(-175, 180, 10)
    ):  # the body's forward axis, from the cube's, about Unity's y
        s, c = scene.forward[0]
        scene.xmat[0, 0, :, 1] = (
            s * np.cos(yaw) + c * np.sin(yaw),
            c * np.cos(yaw) - s * np.sin(yaw),
            0,
        )
        x, y, z, w = scene.observe(np.array([0]))[1][0, 7:11]
        back = -yaw if yaw < np.radians(120) else 2 * np.pi - yaw  # from the body to the cube
        assert (x, y, z, w) == pytest.approx((0, np.sin(back / 2), 0, np.cos(back / 2)), abs=1e-5)


def test_a_twist_decays():
    """A twisted leg in the air returns to zero, and the driven hinges follow their goals."""
    world = steps(crawlers(1, action=np.zeros(20)), 5)
    scene = world.scene
    scene.angle[0, TWISTS] = 0.1
    twisted = np.abs(scene.angle[0, TWISTS]).copy()
    steps(world, 10)
    assert (np.abs(scene.angle[0, TWISTS]) < 0.3 * twisted).all()
    assert np.abs(scene.goal[0, TWISTS]).max() == 0 and np.ptp(scene.goal[0, DRIVEN]) > 0


def test_without_a_range_nothing_is_randomized():
    plain, zero = (
        steps(crawlers(3, parameters), 100) for parameters in ({}, dict.fromkeys(RANGES, 0.0))
    )
    np.testing.assert_array_equal(np.concatenate(plain.seen), np.concatenate(zero.seen))
    assert not zero.scene.randomized


def drawn(scene):
    model = scene.model
    n = scene.num_agents
    mass = model.body_mass[2:].reshape(n, 9) / [20, 2, 1, 2, 1, 2, 1, 2, 1]
    friction = model.pair_friction.reshape(n, -1, 5)[:, :, 0] / FITTED.friction
    return {"mass": mass, "strength": scene.power, "friction": friction, "delay": scene.delay}


def test_ranges_are_drawn_for_each_agent_and_episode():
    world = steps(crawlers(12, dict.fromkeys(RANGES, 0.1) | {"randomize_delay": 2}), 1)
    scene = world.scene
    others = np.arange(12) != 2
    first = {name: x.copy() for name, x in drawn(scene).items()}
    for name in ("mass", "strength", "friction"):
        assert 0.9 <= first[name].min() < 1 < first[name].max() <= 1.1, name
        assert len(np.unique(first[name][:, 0])) == 12, f"{name}: the agents differ"
    assert (np.ptp(first["friction"], axis=1) == 0).all(), (
        "the ground is the same for all parts of an agent"
    )
    scene.begin(np.array([2]))
    for name, x in drawn(scene).items():
        np.testing.assert_array_equal(x[others], first[name][others])
        assert name == "delay" or not np.array_equal(x[2], first[name][2]), (
            "each episode draws new values"
        )
    scene.begin(np.arange(12))
    assert set(scene.delay) == {0, 1, 2}
    whole = scene.model.body_subtreemass[2:].reshape(12, 9)
    np.testing.assert_allclose(whole[:, 0], scene.model.body_mass[2:].reshape(12, 9).sum(1))


def test_a_range_by_name_randomizes_only_that_and_can_be_reset():
    parameters = {"randomize_friction": 0.5}
    world = steps(crawlers(3, parameters), 1)
    now = drawn(world.scene)
    assert (
        np.ptp(now["friction"]) > 0.1
        and np.allclose(now["mass"], 1)
        and np.allclose(now["strength"], 1)
    )
    parameters["randomize_friction"] = 0.0
    world.scene.begin(np.arange(3))
    assert np.allclose(drawn(world.scene)["friction"], 1)


def test_a_delayed_action_takes_effect_later():
    """It waits for as many fixed steps as the delay."""
    for delay in range(4):
        world = crawlers(1, {"randomize_delay": 3.0}, action=np.full(20, 0.5))
        scene = world.scene
        scene.randomize = lambda *_: None
        scene.randomized = True
        scene.delay[:] = delay
        scene.wait[:] = -1
        taken = []
        for _ in range(5):
            world.academy.step()
            taken.append(bool(scene.goal[0, DRIVEN].any()))
        assert taken == [step >= delay for step in range(5)]


def test_the_alternative_physics_differs_and_a_crawler_stands_in_it():
    pose = np.zeros(20)
    pose[8:12] = 0.2
    pose[12:] = 1.0
    worlds = [
        steps(crawlers(1, physics=physics, action=pose), 450) for physics in (FITTED, ALTERNATIVE)
    ]
    for world in worlds:
        assert 0.6 < world.scene.xpos[0, 0, 2] < 1.6 and np.abs(world.scene.qvel).max() < 0.5
    assert not np.allclose(worlds[0].seen[20], worlds[1].seen[20], atol=1e-2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "--scene 3DBall --randomize 0.1",
            "--randomize and --physics are for Crawler: 3DBall has one physics",
        ),
        ("--scene GridWorld --physics alternative", "--randomize and --physics are for Crawler"),
        ("--scene Crawler --randomize 1.5", "--randomize 1.5: must be from 0 to 0.9"),
        ("--scene Crawler --randomize nan", "--randomize nan: must be from 0 to 0.9"),
    ],
)
def test_a_player_refuses_arguments_that_do_not_fit(line, says):
    command = [sys.executable, "-m", "envs.unity_scenes.player", *line.split()]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 2 and says in out.stderr.splitlines()[-1]


# Tools


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(train, ppo, SMALL)(total_timesteps=320, player_args=("--randomize=0.1",))


def test_transfer_evaluates_a_policy_with_both_physics(run):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "transfer.py"),
        str(run),
        "--episodes",
        "10",
    ]
    out = subprocess.run(command, capture_output=True, text=True)
    rows = re.findall(
        rf"^{run.name} +320 +(\S+) ± \S+ \(\d+\) +(\S+) ± \S+ \(\d+\) +(-?\d+)%$",
        out.stdout,
        re.MULTILINE,
    )
    assert len(rows) == 1 and rows[0][0] != rows[0][1], out.stdout + out.stderr
    command[2] = str(run.parent)
    out = subprocess.run(command, capture_output=True, text=True)
    message = "is not a checkpoint: give the folder of a run"
    assert out.returncode == 1 and out.stderr.strip().endswith(message)


def compared(*line):
    command = [sys.executable, str(ROOT / "unity_vec_env.py"), "--steps", "60", *line]
    return subprocess.run(command, capture_output=True, text=True)


def test_compare_names_the_inputs_that_training_never_saw(run, monkeypatch):
    out = compared("--path", "Crawler", "--compare", str(run))
    assert (
        "Acting at random: export the run with --export to act with its policy" in out.stdout
        and "in 99% of 600 decisions" in out.stdout
    )
    call(ppo, monkeypatch, "--export", run)
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["kept"]["agent"]["obs_rms.mean"][5] = 30.0
    state["kept"]["agent"]["obs_rms.scale"][:] = 1e-3
    state["kept"]["agent"]["obs_rms.scale"][5] = 1.0
    torch.save(state, run / "checkpoint.pt")
    out = compared("--path", "Crawler", "--compare", str(run))
    assert (
        "Acting with the run's exported policy" in out.stdout
        and "1 of 158 inputs do not lie within 5 stds" in out.stdout
    )
    assert re.search(r"^ +5  PhysicsBodySensor:Body +100% +30 ± 1 ", out.stdout, re.MULTILINE), (
        out.stdout
    )


@pytest.mark.parametrize(
    ("path", "where", "says"),
    [
        ("3DBall", ".", "was trained on 158 inputs, this build has 8"),
        ("Crawler", "nothing", "no checkpoint of a run found"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(run, path, where, says):
    out = compared("--path", path, "--compare", str(run / where))
    assert out.returncode == 1 and says in out.stderr and len(out.stderr.strip().splitlines()) == 1


def test_compare_counts_like_a_plain_loop():
    trained = Trained.__new__(Trained)
    trained.mean = np.array([0.0, 1.0])
    trained.std = np.array([1.0, 0.1])
    trained.clear()
    rows = [np.random.default_rng(i).normal(size=(i, 2)) * [1, 0.4] for i in range(9)]
    for row in rows:
        trained.update(row)
    every = np.concatenate(rows)
    assert (
        trained.count == len(every)
        and (trained.high == every.max(0)).all()
        and (trained.low == every.min(0)).all()
    )
    assert trained.far.tolist() == [0, int((np.abs(every[:, 1] - 1) > 0.5).sum())]
