"""Envs of other packages work, or one line says what is wrong and what to do. Stand-ins are in outside_env.py."""

import importlib.util
import json
from contextlib import closing
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import assert_refused, call

import ppo_continuous_multiagent as ppo
import ppo_discrete_multiagent as ppo_discrete
import ppo_pixel
from envs import make, pixels
from envs.make import make_env
from envs.pixel_workers import Group
from envs.pixel_wrappers import make_pixel_env, resize
from envs.pixels import PixelEnvs
from envs.sync import SyncEnvs
from onefile_rl import arguments, checkpoints, runs
from onefile_rl.engines import errors, samplers
from onefile_rl.engines.scenes import EngineError
from onefile_rl.fast import machine

SMALL = dict(
    num_steps=16, num_minibatches=2, update_epochs=1, hidden_sizes=(4,), total_timesteps=32
)


@pytest.fixture(autouse=True)
def print_notes_again(monkeypatch):
    monkeypatch.setattr(make, "noted", set())


def needs(module):
    there = importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not there, reason=f"the package {module} is not installed")


def refused(function, *args, **kwargs):
    """Return the message of a ValueError, which has one line."""
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert errors.is_message(caught.value, ppo_pixel.__file__)
    return message


def play(env_id, steps=3, **kwargs):
    """Return the rewards of one env, stepped as the scripts do."""
    with closing(SyncEnvs([make_env(f"outside_env:{env_id}", **kwargs)])) as envs:
        envs.reset(seed=1)
        space = envs.single_action_space
        actions = np.zeros((1, *space.shape), space.dtype)
        return [envs.step(actions)[1][0] for _ in range(steps)]


# Ids


def test_an_id_without_its_module_is_suggested_with_it(monkeypatch, tmp_path):
    """Stands in for ALE/Pong-v5 with ale_py installed."""
    code = "import gymnasium, outside_env\ngymnasium.register('Far/Pong-v5', outside_env.Grid)\n"
    (tmp_path / "far_away.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(make.PACKAGES, "far_away", ("far-away", ("Far/",)))
    try:
        assert refused(make_env, "Far/Pong-v5").endswith("did you mean far_away:Far/Pong-v5?")
    finally:
        gym.registry.pop("Far/Pong-v5", None)


def test_an_id_of_a_known_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(make.PACKAGES, "no_such_module", ("no-such-package", ("NoSuch/",)))
    message = refused(make_env, "NoSuch/Thing-v0")
    assert "pip install no-such-package, then --env-id no_such_module:NoSuch/Thing-v0" in message
    message = refused(make_env, "no_such_module:NoSuch/Thing-v0")
    assert message.endswith("No module named 'no_such_module': pip install no-such-package")


def test_a_module_in_another_folder_is_found_with_the_advice(monkeypatch, tmp_path):
    (tmp_path / "mine_only.py").write_text("")
    monkeypatch.chdir(tmp_path)
    message = refused(make_env, "mine_only:Thing-v0")
    assert message.endswith("mine_only.py is in this folder: set PYTHONPATH=. to import it")


@pytest.mark.parametrize(
    "env_id", ["crafter:CrafterReward-v1", "CrafterReward-v1", "pettingzoo.mpe:simple_v3"]
)
def test_ids_of_other_apis_say_that_they_need_an_adapter(env_id):
    message = refused(make_env, env_id)
    assert "registers no gymnasium envs" in message and "docs/environments.md" in message


def test_a_module_without_envs_is_named():
    assert "the module colorsys registers no gymnasium envs" in refused(
        make_env, "colorsys:Qqqqqq-v0"
    )


def test_a_constructor_that_fails_without_a_message_is_described():
    message = refused(make_env, "outside_env:Asserts-v0")
    assert "can't be made: AssertionError (outside_env.py, line " in message
    assert message == refused(make_pixel_env, "outside_env:Asserts-v0")


def test_env_kwargs_may_have_any_name():
    env = make_env("outside_env:Asserts-v0", env_id="CartPole-v1", id=7)
    assert env.unwrapped.env_id == "CartPole-v1" and env.unwrapped.id == 7


def test_a_video_sets_the_render_mode_that_env_kwargs_name_too(monkeypatch):
    args = runs.Args(env_id="outside_env:Starts-v0", env_kwargs={"render_mode": "human"})
    monkeypatch.setattr(make, "RecordedEnvs", lambda env, *_: env)
    env, _ = make.make_envs(args, 1, video="video.mp4")
    assert env.render_mode == "rgb_array"


# What envs return


def test_a_text_among_the_observations_is_left_out(capsys):
    env = make_env("outside_env:Grid-v0")
    obs, _ = env.reset(seed=1)
    image = np.arange(147, dtype=np.float32)
    np.testing.assert_array_equal(obs, np.concatenate([[0, 0, 1, 0], image]))
    assert env.observation_space.shape == obs.shape and obs.dtype == np.float32
    make_env("outside_env:Grid-v0")
    text, flat = sorted(capsys.readouterr().out.splitlines(), key=lambda line: "flattened" in line)
    assert text == "Grid-v0: observation mission (Mission) is left out, it has no numbers"
    assert (
        flat == "Grid-v0: observation image, an image of 7 x 7 pixels, is flattened into the vector"
    )


def test_a_text_beside_an_image_is_left_out(capsys):
    env = make_pixel_env("outside_env:Grid-v0", image_size=42)
    obs, _ = env.reset(seed=1)
    assert obs["image"].shape == (42, 42, 3) and obs["vector"].tolist() == [0, 0, 1, 0]
    np.testing.assert_array_equal(obs["image"][::6, ::6].ravel(), np.arange(147))
    assert "mission (Mission) is left out" in capsys.readouterr().out


def test_observations_without_numbers_are_refused():
    assert "none of them are numbers" in refused(make_env, "outside_env:OnlyText-v0")
    assert "has no fixed size" in refused(make_env, "outside_env:Endless-v0")


def test_a_script_for_vectors_refuses_an_image_in_a_dict():
    assert refused(make_env, "DummyPixelsDict-v0").endswith("uint8): ppo_pixel.py takes them")


def test_small_images_are_refused_with_the_option_that_resizes_them(monkeypatch):
    args = ppo_pixel.Args(env_id="outside_env:Grid-v0", num_envs=1)
    envs, _ = pixels.make_envs(args, 1)
    message = refused(ppo_pixel.describe, args, envs)
    assert message.endswith("needs at least 36 x 36; resize it with --image-size 36")


def test_image_size_resizes_images_of_any_env():
    args = ppo_pixel.Args(env_id="outside_env:Stripes-v0", num_envs=2, image_size=36)
    envs, _ = pixels.make_envs(args, 1)
    obs, _ = envs.reset(seed=1)
    assert obs["image"].shape == (2, 36, 36, 3)
    assert (obs["image"][:, :, :18] == 0).all() and (obs["image"][:, :, 18:] == 255).all()


def test_a_default_image_size_of_a_copy_resizes_nothing():
    class Copy(ppo_pixel.Args):
        image_size = 64

    envs, _ = pixels.make_envs(Copy(env_id="outside_env:Stripes-v0", num_envs=1, image_size=64), 1)
    assert envs.single_observation_space["image"].shape == (8, 12, 3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_resized_pixels_are_means(channels):
    image = np.random.default_rng(0).integers(0, 256, (8, 8, channels), np.uint8)
    means = image.reshape(4, 2, 4, 2, channels).mean((1, 3))
    assert np.abs(resize(image, 4) - means).max() <= 1
    assert resize(image, 4).shape == (4, 4, channels)


@pytest.mark.parametrize(
    ("env_id", "match"),
    [
        (
            "Objectives-v0",
            "the reward is ndarray of shape (2,), expected a number: add up its parts",
        ),
        (
            "OldStep-v0",
            "step returned 4 values (ndarray of shape (2,), float, bool, dict), expected 5 values",
        ),
        ("OldReset-v0", "reset returned one value (ndarray of shape (2,)), expected 2 values"),
        ("OldResetWithoutSeed-v0", "reset has no argument seed"),
        ("WrongShape-v0", "the observation has shape (1,), its space has (2,)"),
    ],
)
def test_an_env_of_another_api_is_refused_with_what_it_returned(env_id, match):
    assert f"{env_id}: {match}" in refused(play, env_id)


@pytest.mark.parametrize(
    ("slip", "match"),
    [
        ({"obs": np.zeros(1, np.float32)}, "the observation has shape (1,), its space has (2,)"),
        ({"obs": 0.5}, "the observation has shape (), its space has (2,)"),
        ({"obs": None}, "the observation is None, its space has shape (2,)"),
        ({"reward": 10**400}, "the reward is too large for a float"),
        ({"reward": "1.5"}, "the reward is '1.5', expected a number"),
        ({"reward": b"1.5"}, "the reward is b'1.5', expected a number"),
        ({"reward": None}, "the reward is NoneType, expected a number"),
        ({"terminated": "False"}, "terminated is 'False', expected True or False"),
        ({"terminated": None}, "terminated is NoneType, expected True or False"),
        ({"obs": ["0.5", "0.5"], "terminated": True}, "the observation has text, its space has"),
        (
            {"terminated": np.array([True, False])},
            "terminated is ndarray of shape (2,), expected True or False",
        ),
        ({"info": None}, "the info is NoneType, expected a dict"),
        ({"info": {"is_success": None}}, "is_success in the info is NoneType, expected True"),
        ({"info": {"is_success": "yes"}}, "is_success in the info is str, expected True or False"),
    ],
)
def test_a_wrong_value_within_an_episode_is_refused_too(slip, match):
    assert f"LateSlip-v0: {match}" in refused(play, "LateSlip-v0", **slip)


@pytest.mark.parametrize(
    ("obs", "match"),
    [
        ({"vector": np.zeros(1, np.float32)}, "the observation vector has shape (1,), its space"),
        ({}, "the observation vector is None, its space has shape (2,)"),
        (None, "the observation is NoneType, its space is a dict"),
    ],
)
def test_a_wrong_part_of_an_observation_within_an_episode_is_refused(obs, match):
    """As in SyncEnvs, where observations have several parts."""
    env = gym.make("outside_env:LateSlipParts-v0", obs=obs)
    numbers = {"obs.vector": (1, 2), "final.vector": (1, 2), "actions": (1, 1), "rewards": 1}
    flags = {"terminated": 1, "truncated": 1, "success": 1}
    group = Group([env], {name: np.zeros(size) for name, size in (numbers | flags).items()})
    group.reset(seed=1)
    group.step()
    group.step()
    assert match in refused(group.step)


def test_several_rewards_are_refused_before_a_run_starts():
    """MO-Gymnasium's envs declare their rewards."""
    message = refused(make_env, "outside_env:Objectives-v0", declared=True)
    assert "Objectives-v0: the reward is a vector of shape (2,), expected a number" in message
    assert play("OneObjective-v0") == [1, 1, 1]


def test_a_reward_in_an_array_of_one_number_is_a_number():
    assert play("RewardInArray-v0") == [1.5, 1.5, 1.5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reset_options_reach_every_reset(num_workers):
    args = runs.Args(env_id="outside_env:Starts-v0", num_envs=2, reset_options={"x": 0.75})
    envs, _ = make.make_envs(args, 1)
    obs, _ = envs.reset(seed=1)
    assert (obs == 0.75).all()
    for _ in range(5):
        obs, *_, infos = envs.step(np.zeros((2, 1), np.float32))
    assert "final_obs" in infos and (obs == 0.75).all()

    settings = dict(num_workers=num_workers, reset_options={"brightness": 99})
    with closing(PixelEnvs("outside_env:StartsPixels-v0", 2, **settings)) as envs:
        obs, _ = envs.reset(1)
        assert (obs["image"] == 99).all()


def test_reset_options_come_back_with_a_checkpoint(monkeypatch, empty_folder):
    line = ["--env-id", "outside_env:Starts-v0", "--reset-options", '{"x": 0.5}']
    for name, value in (SMALL | {"hidden_sizes": 4}).items():
        line += [arguments.option(name), value]
    call(ppo, monkeypatch, *line)
    (folder,) = sorted(ppo.Path("runs").iterdir())
    seen = []
    act = ppo.Agent.act
    monkeypatch.setattr(
        ppo.Agent, "act", lambda self, obs, **k: seen.append(obs) or act(self, obs, **k)
    )
    call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--no-fast")
    assert seen and all((obs == 0.5).all() for obs in seen)


def test_reset_options_of_a_scene_are_refused():
    args = ppo.Args(env_id="3DBall", reset_options={"x": 1})
    assert "--reset-options is for gymnasium envs" in refused(ppo.check, args)


def test_a_checkpoint_from_before_a_common_option_can_be_used(monkeypatch, empty_folder):
    ppo.train(ppo.Args(env_id="outside_env:Starts-v0", exp_name="old", **SMALL))
    (folder,) = ppo.Path("runs").iterdir()
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    del state["args"]["reset_options"]
    checkpoints.save(folder / "checkpoint.pt", state)
    call(ppo, monkeypatch, "--resume", folder, "--total-timesteps", 64, "--trust")


# Actions


def test_far_bounds_are_rescaled_for_ppo_only(capsys):
    given = dict(env_id="outside_env:Dimensions-v0")
    envs, _ = make.make_envs(ppo.Args(**given), 1)
    space = envs.single_action_space
    np.testing.assert_array_equal(space.low, np.array([-0.4, -1, -np.inf, -1, -1], np.float32))
    np.testing.assert_array_equal(space.high, np.array([0.4, 1, 5, 1, 1], np.float32))
    envs.reset(seed=1)
    rewards = [envs.step(np.array([a], np.float32))[1][0] for a in np.eye(5)[[1, 4]] - np.eye(5)[3]]
    np.testing.assert_allclose(rewards, [200 + 5e-4 - 1, 150 + 1e-3 - 1], rtol=1e-6)
    assert (
        "2 of 5 action(s) are rescaled to -1 to 1: action 1, from 100 to 200"
        in capsys.readouterr().out
    )

    plain, _ = make.make_envs(runs.Args(**given), 1)
    assert plain.single_action_space == gym.spec("Dimensions-v0").entry_point.action_space


@pytest.mark.parametrize(
    "env_id", ["Humanoid-v5", "Pendulum-v1", "parity_env:Square-v0", "HalfCheetah-v5"]
)
def test_usual_bounds_stay_as_they_are(env_id):
    env = make_env(env_id)
    assert make.rescale_far_actions(env) is env


def test_whole_numbers_are_rescaled():
    env = make.rescale_far_actions(make_env("outside_env:Levels-v0"))
    env.reset(seed=1)
    rewards = [env.step(np.full(2, x, np.float32))[1] for x in (-1, 0, 1)]
    assert rewards[0] == 0 and rewards[1] in (127, 128) and rewards[2] == 255


def test_ppo_learns_actions_between_100_and_200(monkeypatch, empty_folder):
    settings = SMALL | dict(
        total_timesteps=4096, num_steps=128, num_envs=4, update_epochs=4, num_minibatches=4
    )
    kept = []
    log = runs.Run.log
    monkeypatch.setattr(
        runs.Run,
        "log",
        lambda run, x: kept.append(np.mean([r for r, _ in run.episodes])) or log(run, x),
    )
    ppo.train(
        ppo.Args(
            env_id="outside_env:Valve-v0",
            exp_name="valve",
            learning_rate=0.01,
            gamma=0.0,
            **settings,
        )
    )
    assert kept[0] < -15 and kept[-1] > -12  # the return of five steps; -35 at 100, 0 at 170


def test_bounds_are_tensors_with_one_number_per_action():
    """Code that scales or squashes actions needs no special case for bounds that all actions share."""
    shared = runs.Bounds({"low": -1.0, "high": 2.0, "action_dim": 3})
    assert shared.low.tolist() == [-1.0] * 3 and shared.high.tolist() == [2.0] * 3
    each = runs.Bounds({"low": [-1.0, 0.0], "high": [2.0, 3.0], "action_dim": 2})
    assert ((each.high - each.low) / 2).log().shape == (2,)
    assert not shared.state_dict() and not each.state_dict()  # a checkpoint has them in its spec


def test_one_infinite_bound_among_finite_ones_works(empty_folder):
    ppo.train(ppo.Args(env_id="outside_env:Dimensions-v0", exp_name="infinite", **SMALL))
    bounds = runs.Bounds({"low": [-np.inf, -1.0], "high": [1.0, np.inf]})
    assert torch.isfinite(bounds.low).all() and torch.isfinite(bounds.high).all()
    clipped = torch.tensor([-1e30, 1e30]).clamp(bounds.low, bounds.high)
    assert clipped.tolist() == torch.tensor([-1e30, 1e30]).tolist()


# What has always worked


@pytest.mark.parametrize(
    "env_id",
    [
        "VariousTuple-v0",
        "VariousText-v0",
        "VariousDouble-v0",
        "VariousBool-v0",
        "VariousBytes-v0",
        "VariousUnbounded-v0",
        "VariousStart-v0",
        "VariousTable-v0",
        "VariousAutoreset-v0",
        "VariousEndless-v0",
        "PlainNumbers-v0",
    ],
)
def test_usual_spaces_train(env_id, empty_folder):
    discrete = env_id in ("VariousStart-v0", "VariousTable-v0")
    script = ppo_discrete if discrete else ppo
    script.train(script.Args(env_id=f"outside_env:{env_id}", exp_name="usual", num_envs=2, **SMALL))


# Memory and errors


def test_a_rollout_that_exceeds_the_memory_is_refused(monkeypatch, empty_folder):
    args = ppo.Args(
        env_id="outside_env:Wide-v0", exp_name="wide", num_steps=8192, total_timesteps=8192
    )
    message = refused(ppo.train, args)
    assert (
        message.startswith("--num-steps 8192 needs 312,5") and "choose a smaller value" in message
    )


def test_images_that_exceed_the_memory_are_refused():
    spec = {"images": {"image": (2000, 2000, 3)}, "stack": 4, "vector": 0}
    args = SimpleNamespace(num_steps=10_000, num_minibatches=10, total_timesteps=10**6)
    assert "choose a smaller value" in refused(runs.check_batch, args, 8, spec)


def test_a_value_error_of_an_env_keeps_its_traceback(monkeypatch, empty_folder):
    args = [
        arguments.option(name) + f"={value}"
        for name, value in (SMALL | {"hidden_sizes": 4}).items()
    ]
    with pytest.raises(ValueError, match="invalid literal") as caught:
        call(ppo, monkeypatch, "--env-id", "outside_env:Breaks-v0", *args)
    files = [entry.path.name for entry in caught.traceback]
    assert files[-1] == "outside_env.py"
    (folder,) = ppo.Path("runs").iterdir()
    assert (folder / "checkpoint.pt").exists()


def line_of(**settings):
    """Return the options of a small run, for a command line."""
    settings = SMALL | {"hidden_sizes": 4} | settings
    return [f"{arguments.option(name)}={value}" for name, value in settings.items()]


def test_an_env_that_exits_is_an_error_with_its_place(monkeypatch, empty_folder):
    with pytest.raises(SystemExit) as caught:
        call(ppo, monkeypatch, *line_of(env_id="outside_env:Quits-v0"))
    message = str(caught.value.code).strip()
    assert "outside_env.py, line " in message and "ended the program with sys.exit() (0)" in message
    assert len(message.splitlines()) == 1
    (folder,) = ppo.Path("runs").iterdir()
    assert (folder / "checkpoint.pt").exists()

    # In an evaluation too
    with pytest.raises(SystemExit, match="ended the program with sys.exit"):
        call(ppo, monkeypatch, "--evaluate", folder)


@pytest.mark.parametrize(
    ("how", "reason"),
    [(None, ""), ("numpy", " (Unable to allocate "), ("torch", "DefaultCPUAllocator")],
)
def test_an_env_without_memory_is_one_line_and_loses_nothing(
    how, reason, monkeypatch, empty_folder, capsys
):
    env_kwargs = json.dumps({"how": how})
    line = line_of(env_id="outside_env:Exhausts-v0", env_kwargs=env_kwargs)
    with pytest.raises(SystemExit) as caught:
        call(ppo, monkeypatch, *line)
    message = str(caught.value.code).strip()
    assert "outside_env.py, line " in message and "not enough memory" in message
    assert reason in message and message.endswith("or use fewer envs or smaller batches")
    assert len(message.splitlines()) == 1
    (folder,) = ppo.Path("runs").iterdir()
    resume = f"python ppo_continuous_multiagent.py --resume {folder}"
    assert f"Stopped after 16 decisions. Resume with: {resume}" in capsys.readouterr().out
    assert checkpoints.load(folder, ppo.__file__)[1]["global_step"] == 16

    # In an evaluation too
    with pytest.raises(SystemExit, match="not enough memory"):
        call(ppo, monkeypatch, "--evaluate", folder)


def test_help_still_ends_without_an_error(monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        call(ppo, monkeypatch, "--help")
    assert caught.value.code in (0, None) and "--env-id" in capsys.readouterr().out


def test_a_broken_pipe_of_an_env_keeps_its_traceback(monkeypatch, empty_folder):
    with pytest.raises(BrokenPipeError, match="the simulator is gone"):
        call(ppo, monkeypatch, *line_of(env_id="outside_env:LosesPipe-v0"))
    (folder,) = ppo.Path("runs").iterdir()
    assert (folder / "checkpoint.pt").exists()


def test_only_deliberate_errors_of_the_project_are_messages(tmp_path):
    def caught(function, *args):
        try:
            function(*args)
        except ValueError as error:
            return error

    def one_end_without_the_other():
        return samplers.Sampler("multirangeuniform", (1.0,)).ranges  # an error of zip

    assert errors.is_message(caught(make_env, "NoSuchThing"), "script.py")
    assert not errors.is_message(caught(int, "x"), "script.py")
    assert errors.is_message(caught(arguments.parse_parameters, ["a"]), "script.py")
    assert not errors.is_message(caught(one_end_without_the_other), "script.py")

    # A script is a part of the project, where it raises an error itself
    script = tmp_path / "script.py"
    script.write_text("def check():\n    raise ValueError('no')\ndef slip():\n    int('x')\n")
    namespace = {}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    assert errors.is_message(caught(namespace["check"]), script)
    assert not errors.is_message(caught(namespace["slip"]), script)
    assert not errors.is_message(caught(namespace["check"]), "other.py")


# Threads


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 12])
def test_free_cores_are_all_used(limit):
    assert machine.fastest(limit, lambda n: 1 / n) == limit


def test_threads_that_wait_for_each_other_are_not_used():
    measured = []

    def measure(n):
        measured.append(n)
        return 1.0 if n == 1 else 30.0

    assert machine.fastest(8, measure) == 1
    assert measured.count(2) == measured.count(8) == 1  # given up at once
    assert machine.fastest(8, lambda n: 1 / n if n <= 4 else 1.0) == 4  # half of the cores are free


def test_a_number_of_threads_that_the_user_sets_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(machine, "MAX_THREADS", 2)
    monkeypatch.setattr(machine, "fastest", None)
    assert machine.free_threads.__wrapped__() == 2


def test_fewer_threads_are_reported(monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "MAX_THREADS", 2)
    monkeypatch.setattr(machine, "cpu_quota", lambda: np.inf)
    monkeypatch.setattr(machine, "time_products", lambda n: n)
    assert machine.free_threads.__wrapped__() == 1
    assert "Other processes use the cores: 1 of 2 threads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, np.inf),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, np.inf),
        ({}, np.inf),
    ],
)
def test_the_quota_of_a_container_limits_the_threads(files, cores, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cpu_quota(tmp_path) == cores


# The packages themselves, where they are installed


@needs("ale_py")
@needs("cv2")
def test_atari_has_the_usual_preprocessing():
    args = ppo_pixel.Args(env_id="ale_py:ALE/Pong-v5", num_envs=1)
    envs, _ = pixels.make_envs(args, 1)
    spec = ppo_pixel.describe(args, envs)
    assert spec["images"] == {"image": (84, 84, 1)} and spec["stack"] == 4
    game = envs.group.envs[0].unwrapped
    envs.reset(1)
    frames = game.ale.getEpisodeFrameNumber()
    envs.step(np.zeros(1, int))
    assert game.ale.getEpisodeFrameNumber() == frames + 4


@needs("ale_py")
def test_atari_without_its_module_is_suggested_with_it(tmp_path):
    assert_refused(ppo_pixel, "--env-id ALE/Pong-v5", "did you mean ale_py:ALE/Pong-v5?", tmp_path)


@needs("ale_py")
def test_atari_with_a_frame_skip_of_its_own_is_used_as_it_is():
    env = make_pixel_env("ale_py:ALE/Pong-v5", env_kwargs={"frameskip": 2})
    assert env.observation_space["image"].shape == (210, 160, 3)


@needs("minigrid")
def test_minigrid_works_on_its_image_and_direction():
    env = make_env("minigrid:MiniGrid-Empty-5x5-v0")
    assert env.reset(seed=1)[0].shape == (151,)


@needs("mo_gymnasium")
def test_vector_rewards_of_mo_gymnasium_are_refused():
    message = refused(make_env, "mo_gymnasium:deep-sea-treasure-v0")
    assert "the reward is a vector of shape (2,)" in message


@pytest.mark.parametrize("kind", ["Words-v0", "ExhaustsPixels-v0", "QuitsPixels-v0"])
def test_a_worker_ends_with_the_line_that_its_envs_would_have_ended_with(kind):
    expected = {
        "Words-v0": "Words-v0: the reward is '1.0', expected a number: ",
        "ExhaustsPixels-v0": "outside_env.py, line [0-9]+: not enough memory: ",
        "QuitsPixels-v0": "outside_env.py, line [0-9]+ ended the program with sys.exit",
    }
    with (
        closing(PixelEnvs(f"outside_env:{kind}", 2, num_workers=2)) as envs,
        pytest.raises(EngineError, match=expected[kind]) as caught,
    ):
        envs.reset(seed=1)
        envs.step(np.zeros((2, 2), np.float32))
    assert str(caught.value).startswith("the worker of envs 0 to 0 ended: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_worker_keeps_the_traceback_of_an_error_in_an_env():
    with (
        closing(PixelEnvs("outside_env:BreaksPixels-v0", 2, num_workers=2)) as envs,
        pytest.raises(EngineError, match="ended with exit code 1: Traceback") as caught,
    ):
        envs.reset(seed=1)
        envs.step(np.zeros((2, 2), np.float32))
    assert "outside_env.py" in str(caught.value)
    assert str(caught.value).endswith("ValueError: invalid literal for int() with base 10: 'x'")
