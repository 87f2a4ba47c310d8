"""Runs: checkpoints, resume, evaluation, videos, export, and errors on the way."""

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnx
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import call, curve, needs_gl, stop_after, train

import ppo_continuous_multiagent as ppo
from envs.make import SyncEnvs, make_env, make_envs
from envs.rendering import use_tracking_camera
from onefile_rl import checkpoints, evaluate, export, runs, trust
from unity_vec_env import UnityPlayerError, UnityVecEnv

SMALL = dict(
    env_id="parity_env:Parity-v0",
    num_steps=64,
    num_minibatches=4,
    update_epochs=2,
    hidden_sizes=(8, 8),
)
SMALL |= dict(checkpoint_interval=1)


pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, ppo, SMALL), partial(call, ppo)


def spec(obs_dim, action_dim, low=-1.0, high=1.0):
    return {
        "obs_dim": obs_dim,
        "action_dim": action_dim,
        "sensors": [obs_dim],
        "low": low,
        "high": high,
    }


def load(folder):
    return checkpoints.load(folder, ppo.__file__)[1]


def weights(folder):
    return load(folder)["kept"]["agent"]


# Checkpoint and resume


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resume_equals_uninterrupted(monkeypatch, num_envs, capsys):
    """Stopped in the middle and resumed, with episodes running: the same weights to the byte, and the same curves, as
    in one go."""
    settings = dict(num_envs=num_envs, total_timesteps=64 * num_envs * 8)
    whole = train(**settings)
    with monkeypatch.context() as patch:
        stop_after(patch, ppo, "gae", 3)
        part = train(**settings)
    state = load(part)
    assert state["iteration"] == 3 and state["episodes"]["l"].any(), (
        "stopped after the iteration, within an episode"
    )
    assert f"--resume {part}" in capsys.readouterr().out
    call(monkeypatch, "--resume", part)
    first, second = weights(whole), weights(part)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert curve(whole) == curve(part), "no gap and no overlap"


def test_asked_to_stop_between_two_iterations_it_keeps_what_it_has(monkeypatch):
    end_iteration = runs.Run.end_iteration

    def settled(self):
        end_iteration(self)  # whether to stop has been asked already
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs.Run, "end_iteration", settled)
    folder = train(total_timesteps=64 * 8, checkpoint_interval=10**6)
    assert load(folder)["global_step"] == 64


def test_resume_after_the_end_goes_further(monkeypatch):
    folder = train(total_timesteps=128)
    with pytest.raises(SystemExit, match="larger --total-timesteps"):
        call(monkeypatch, "--resume", folder)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 256)
    steps = [step for step, _ in curve(folder)["losses/policy_loss"]]
    assert steps == [64, 128, 192, 256]


def test_what_came_after_the_checkpoint_comes_again_once(monkeypatch):
    """The run dies three iterations after its last checkpoint: their points are not in the curve twice."""
    folder = train(total_timesteps=512, checkpoint_interval=320)
    state = load(folder)
    train(total_timesteps=320, exp_name="early")
    early = next(Path("runs").glob("*early*"))
    (folder / "checkpoint.pt").write_bytes((early / "checkpoint.pt").read_bytes())
    call(monkeypatch, "--resume", folder, "--total-timesteps", 512)
    assert [step for step, _ in curve(folder)["losses/policy_loss"]] == [
        64 * k for k in range(1, 9)
    ]
    assert state["global_step"] == 512


def test_a_conflicting_argument_is_refused_with_both_values(monkeypatch):
    folder = train(total_timesteps=64)
    with pytest.raises(SystemExit, match=r"--gamma 0.5: the run has --gamma 0.99"):
        call(monkeypatch, "--resume", folder, "--total-timesteps", 256, "--gamma", 0.5)
    assert load(folder)["global_step"] == 64


def life(folder):
    """Resume the run from its checkpoint until the process is killed."""
    args = ppo.Args(**SMALL, total_timesteps=10**7, compile=False)
    sys.stdout = open(os.devnull, "w")
    try:
        resumed = checkpoints.load(folder, ppo.__file__)
    except ValueError:
        resumed = None
    ppo.train(args, resumed)


def test_killed_at_any_moment_the_checkpoint_is_whole():
    rng, fork, steps = random.Random(0), multiprocessing.get_context("fork"), [0]
    torch.set_num_threads(1)
    folder = train(total_timesteps=64)
    for _ in range(20):
        child = fork.Process(target=life, args=(folder,))
        child.start()
        before = (folder / "checkpoint.pt").stat().st_mtime_ns
        deadline = time.monotonic() + 60 * rng.randint(0, 1)  # killed while it starts, or later
        while time.monotonic() < deadline:
            if (folder / "checkpoint.pt").stat().st_mtime_ns != before:
                break
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.3))
        child.kill()
        child.join()
        steps.append(load(folder)["global_step"])
    assert steps == sorted(steps) and steps[-1] > 64, "every life went on from the last"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("what", ["truncated", "foreign", "older", "missing", "code"])
def test_a_bad_checkpoint_is_one_line_and_stays_as_it_is(monkeypatch, what, capfd):
    folder = train(total_timesteps=64)
    path = folder / "checkpoint.pt"
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:-500])
    elif what == "foreign":
        torch.save({"model": torch.zeros(3)}, path)
    elif what == "older":
        torch.save({**torch.load(path, weights_only=True), "format": 2}, path)
    elif what == "missing":
        path.unlink()
    else:
        path.write_bytes(pickle.dumps(Evil()))
    before = path.read_bytes() if path.exists() else None
    for option in ("--resume", "--evaluate", "--export"):
        with pytest.raises(SystemExit, match="checkpoint") as caught:
            call(monkeypatch, option, folder)
        assert len(str(caught.value).strip().splitlines()) == 1
    assert (path.read_bytes() if path.exists() else None) == before
    assert not os.path.exists("evil"), "a checkpoint from a stranger can't run code"


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_run_is_never_overwritten(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(
        runs.time, "time", lambda: 1e9 + 1e-6 * next(clock)
    )  # two runs within a second
    folder = train(total_timesteps=64, exp_name="same")
    before = (folder / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        train(total_timesteps=64, exp_name="same")
    assert (folder / "checkpoint.pt").read_bytes() == before


def test_a_full_disk_does_not_end_the_run(monkeypatch, capsys):
    """For a while there is no space: the run says so and goes on, and at every moment the last checkpoint is whole."""
    written, kept, fsync = [], [], os.fsync

    def full(file):
        written.append(file)
        if 4 <= len(written) <= 6:
            kept.append(load(next(Path("runs").iterdir()))["global_step"])
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    folder = train(total_timesteps=64 * 8)
    assert "No space left on device" in capsys.readouterr().out
    assert len(kept) == 3 and 0 < kept[0] == kept[2] < 64 * 8
    assert load(folder)["global_step"] == 64 * 8 and not list(folder.glob("*.tmp"))


def test_last_and_best_checkpoints_are_kept():
    folder = train(total_timesteps=64 * 6, keep_checkpoints=2)
    names = sorted(path.name for path in folder.glob("*.pt"))
    assert names == ["best.pt", "checkpoint.pt", "checkpoint_320.pt", "checkpoint_384.pt"]
    assert load(folder / "checkpoint_320.pt")["global_step"] == 320
    best = load(folder / "best.pt")
    returns = dict(curve(folder)["charts/episodic_return"])
    highest = pytest.approx(max(returns.values()), rel=1e-4)
    assert best["best"] == highest and returns[best["global_step"]] == highest


def test_config_tells_a_run_apart():
    config = json.loads((train(total_timesteps=64) / "config.json").read_text())
    assert (
        config["args"]["seed"] == 1
        and config["versions"]["torch"].startswith("2.")
        and "commit" in config
    )


def test_envs_come_back_where_they_were():
    """Played again from their episodes' beginning, after several ends: the same observations as had they never
    stopped."""
    rng = np.random.default_rng(0)
    envs = SyncEnvs([make_env("Hopper-v5") for _ in range(2)])
    envs.reset(seed=5)
    ends = sum(
        len(envs.step(rng.uniform(-1, 1, (2, 3)).astype(np.float32))[-1]) for _ in range(200)
    )
    state = envs.state()
    twin = SyncEnvs([make_env("Hopper-v5") for _ in range(2)])
    twin.restore(state)
    for _ in range(100):
        actions = rng.uniform(-1, 1, (2, 3)).astype(np.float32)
        for a, b in zip(envs.step(actions)[:4], twin.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(a, b)
    assert ends > 2


# Evaluate


def test_a_loaded_policy_is_as_good_as_it_was_in_training(monkeypatch, capsys):
    """The return of training's last episodes, with the noise of exploration, against the saved policy's without it."""
    settings = dict(num_steps=1024, num_minibatches=16, update_epochs=8, hidden_sizes=(64, 64))
    folder = train(env_id="Hopper-v5", **settings, total_timesteps=20 * 1024)
    trained = np.mean([value for _, value in curve(folder)["charts/episodic_return"]][-3:])
    untrained = curve(folder)["charts/episodic_return"][0][1]
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 10, "--seed", 100)
    line = capsys.readouterr().out.splitlines()[-1]
    mean = float(line.split("return ")[1].split(" ")[0])
    assert trained > 3 * untrained and mean > 0.9 * trained, line


def test_evaluation_takes_equally_many_episodes_of_every_agent():
    """Three envs with episodes of 1, 10 and 100 steps, nine episodes: three of each, though the first env could have
    given all nine."""

    class Envs:
        num_envs = 3
        single_action_space = gym.spaces.Box(-1, 1, (1,))

        def reset(self, seed):
            self.t = np.zeros(3, int)
            return np.zeros((3, 2), np.float32), {
                "ready": np.ones(3, bool),
                "closed": np.zeros(3, bool),
            }

        def step(self, actions):
            self.t += 1
            done = self.t % [1, 10, 100] == 0
            infos = {"ready": np.ones(3, bool), "closed": np.ones(3, bool)}
            return np.zeros((3, 2), np.float32), np.ones(3), done, np.zeros(3, bool), infos

    agent = ppo.Agent(spec(2, 1), ppo.Args(**SMALL))
    returns, lengths, _ = evaluate.evaluate(evaluate.play_vectors(agent, {}, 3), Envs(), 9, 1)
    assert sorted(returns) == sorted(lengths) == [1] * 3 + [10] * 3 + [100] * 3


def test_evaluation_on_a_scene_counts_decisions():
    agent = ppo.Agent(spec(8, 2), ppo.Args(**SMALL))
    with closing(UnityVecEnv("3DBall", seed=3)) as envs:
        returns, lengths, _ = evaluate.evaluate(evaluate.play_vectors(agent, {}, 12), envs, 24, 3)
    assert len(returns) == 24
    np.testing.assert_allclose(
        returns, 0.1 * (lengths - 1) - 1, atol=1e-3
    )  # 0.1 a decision, -1 for the fall


def test_a_checkpoint_of_another_env_is_one_line(monkeypatch):
    folder = train(total_timesteps=64)
    with pytest.raises(SystemExit, match="has obs_dim 3, the env has 11"):
        call(monkeypatch, "--evaluate", folder, "--env-id", "Hopper-v5")


def test_evaluation_is_of_new_episodes_and_records_a_video_only_if_asked(monkeypatch, capsys):
    """The envs have another seed than in training. Its --capture-video does not apply here."""
    folder, made, recorded = train(total_timesteps=64, seed=5), [], []
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["args"]["capture_video"] = True
    state["seal"] = trust.seal(state)
    torch.save(state, path)
    original = ppo.make_envs
    monkeypatch.setattr(
        ppo, "make_envs", lambda args, seed: made.append(seed) or original(args, seed)
    )
    monkeypatch.setattr(evaluate, "record_video", lambda *args: recorded.append(args))
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    assert made == [1005] and not recorded
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--seed", 7, "--capture-video")
    assert made == [1005, 7] and len(recorded) == 1


# What is measured


def one_run(folder, **values):
    run = runs.Run(ppo.Args(), ppo.__file__, None)
    run.total, run.envs, run.folder = 1_000_000, None, folder
    for name, value in values.items():
        setattr(run, name, value)
    return run


def test_speed_is_that_of_this_process(tmp_path, capsys):
    """A resumed run's own decisions by its own seconds, and the time left by that."""
    run = one_run(
        tmp_path,
        global_step=900_000,
        first_step=899_000,
        seconds={"env": 6.0, "act": 3.0, "learn": 1.0},
    )
    assert run.speed() == 100
    run.show()
    assert (
        "  90%  " in (line := capsys.readouterr().out)
        and "100 SPS" in line
        and "00:16:40 left" in line
    )


def test_the_first_point_of_a_resumed_curve_has_its_own_speed(monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(total_timesteps=64 * 40)
    clock = itertools.count()
    monkeypatch.setattr(
        runs.time, "perf_counter", lambda: float(next(clock))
    )  # a second at each look
    call(monkeypatch, "--resume", folder, "--total-timesteps", 64 * 41)
    speed = EventAccumulator(str(folder)).Reload().Scalars("charts/SPS")[-1].value
    assert speed < 1, "64 decisions and more than 64 looks at the clock"


def test_time_left_goes_beyond_a_day(tmp_path, capsys):
    run = one_run(
        tmp_path,
        global_step=100_000,
        first_step=0,
        seconds={"env": 100_000.0, "act": 0.0, "learn": 0.0},
    )
    run.show()
    assert "250:00:00 left" in capsys.readouterr().out


def test_time_left_is_not_told_from_the_first_moment(tmp_path, capsys):
    run = one_run(
        tmp_path, global_step=20, first_step=0, seconds={"env": 0.9, "act": 0.0, "learn": 0.0}
    )
    run.show()
    assert "--:--:-- left" in capsys.readouterr().out


def test_progress_is_never_more_than_all_of_it(tmp_path, capsys):
    run = one_run(
        tmp_path,
        global_step=1_014_000,
        first_step=0,
        seconds={"env": 1.0, "act": 0.0, "learn": 0.0},
    )
    run.show()
    assert " 100%  " in (line := capsys.readouterr().out) and "00:00:00 left" in line


def test_films_and_checkpoints_are_not_in_the_speed(monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock, late = time.perf_counter, [0]
    monkeypatch.setattr(runs.time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(runs, "record_video", lambda *args: late.append(late.pop() + 1000))
    folder = train(total_timesteps=128, capture_video=True, video_interval=64)
    assert EventAccumulator(str(folder)).Reload().Scalars("charts/SPS")[-1].value > 128 / 500


# What the env is told


def test_env_kwargs_reach_the_env(monkeypatch):
    """As JSON; with several envs, too, and what the env does not take is one line."""
    for more in ([], ["--num-envs", 2]):
        line = ["--env-id", "Reacher2Dof-v0", "--env-kwargs", '{"joints": 3}', "--num-steps", 8]
        line += ["--num-minibatches", 1, "--total-timesteps", 16, *more]
        call(monkeypatch, *line, "--exp-name", f"x{len(more)}", "--num-envs", 1 + len(more) // 2)
        (folder,) = Path("runs").glob(f"*x{len(more)}*")
        assert load(folder)["spec"]["action_dim"] == 3 and load(folder)["args"]["env_kwargs"] == {
            "joints": 3
        }
    refusal = "--env-id Reacher2Dof-v0 with .'legs': 3.* can't be made: .*unexpected keyword argument 'legs'"
    with pytest.raises(SystemExit, match=refusal):
        call(monkeypatch, "--env-id", "Reacher2Dof-v0", "--env-kwargs", '{"legs": 3}')
    with pytest.raises(
        SystemExit,
        match="--env-kwargs is for gymnasium envs; use --env-parameters for a Unity scene",
    ):
        call(monkeypatch, "--env-id", "3DBall", "--env-kwargs", '{"legs": 3}')


def test_env_parameters_reach_the_player(monkeypatch):
    """3DBall's ball has the scale that it is told: it lies higher."""
    heights = []
    for scale in (1, 3):
        args = ppo.Args(env_id="3DBall", env_parameters={"scale": float(scale)})
        with closing(make_envs(args, 1)[0]) as envs:
            envs.reset()
            for _ in range(8):  # until it lies
                obs, *_ = envs.step(np.zeros((12, 2), np.float32))
            heights.append(np.median(obs[:, 3]))
    assert heights[1] > heights[0] + 0.5
    seen = []
    monkeypatch.setattr(ppo, "train", seen.append)
    call(monkeypatch, "--env-id", "3DBall", "--env-parameters", "mass=3", "scale=0.5")
    assert seen[0].env_parameters == {"mass": 3.0, "scale": 0.5}


def test_a_build_of_ones_own_gives_the_run_its_name_and_no_scenes_settings(monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "train", seen.append)
    for line in (
        ["--unity-path", "./Builds/Crawler.x86_64"],
        ["--unity-path", "./Builds/Crawler.x86_64", "--env-id", "Crawler"],
        ["--unity-path", "editor"],
    ):
        call(monkeypatch, *line)
    own, crawlers, editor = seen
    assert (own.env_id, own.hidden_sizes, own.num_players) == ("Crawler", (64, 64), 1)
    assert (crawlers.env_id, crawlers.hidden_sizes, crawlers.num_players) == (
        "Crawler",
        (512, 512, 512),
        2,
    )
    assert editor.env_id == "editor"


def test_what_the_game_counts_is_in_tensorboard(monkeypatch):
    """Averages are averaged, sums are added up, over an iteration."""
    original = ppo.make_envs

    def counting(args, seed):
        envs, how = original(args, seed)
        step = envs.step

        def stepped(actions):
            *out, infos = step(actions)
            return *out, infos | {"stats": {"Goal/Hit": 0.5, "Goal/Sum": 2.0}}

        envs.step, envs.sums = stepped, {"Goal/Sum"}
        return envs, how

    monkeypatch.setattr(ppo, "make_envs", counting)
    points = curve(train(total_timesteps=128))
    assert points["unity/Goal/Hit"] == [(64, 0.5), (128, 0.5)]
    assert points["unity/Goal/Sum"] == [(64, 128.0), (128, 128.0)]


# Videos


@needs_gl
def test_videos_do_not_disturb_training():
    plain = weights(train(env_id="InvertedPendulum-v5", total_timesteps=128))
    folder = train(
        env_id="InvertedPendulum-v5", total_timesteps=128, capture_video=True, video_interval=64
    )
    assert sorted(path.name for path in (folder / "videos").iterdir()) == [
        "0.mp4",
        "128.mp4",
        "64.mp4",
    ]
    assert all(torch.equal(plain[key], value) for key, value in weights(folder).items())


@needs_gl
@pytest.mark.parametrize(
    ("env_id", "size"), [("Hopper-v5", 3), ("Crawler", 20), ("PushBlock", 1), ("Hallway", 1)]
)
def test_a_video_shows_something_that_moves(env_id, size, tmp_path, monkeypatch):
    import imageio

    monkeypatch.setattr(evaluate, "VIDEO_STEPS", 10)
    play = lambda agent, spec, n: lambda obs, infos, who, begins: np.ones((len(who), size))
    evaluate.record_video(
        ppo.Args(env_id=env_id), make_envs, play, None, None, tmp_path / "video.mp4"
    )
    frames = [frame.astype(int) for frame in imageio.get_reader(tmp_path / "video.mp4")]
    assert len(frames) > 5 and frames[0].std() > 10
    assert max(abs(frame - frames[0]).max() for frame in frames) > 50


@needs_gl
@pytest.mark.parametrize("pixels", [False, True], ids=["video", "from pixels"])
@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v5", "Ant-v5", "Swimmer-v5", "Hopper-v5", "Walker2d-v5", "Humanoid-v5"]
)
def test_what_runs_stays_in_the_picture(env_id, pixels, tmp_path):
    import mujoco

    from envs.pixels import make_pixel_env

    if pixels:
        env = make_pixel_env(env_id, from_pixels=True, image_size=128)
        look = lambda: env.observation(env.env.observation(None))["image"]
    else:
        video = make_envs(ppo.Args(env_id=env_id), 1, video=tmp_path / "video.mp4")[0]
        env, look = video.envs[0], lambda: video.envs[0].render()
        video.reset(seed=1)
    env.reset(seed=1)
    count = lambda: int(
        (np.ptp(look().astype(int), -1) > 40).sum()
    )  # floors are grey, and what runs is not
    before, base = count(), env.unwrapped
    base.data.qpos[0] += 20
    mujoco.mj_forward(base.model, base.data)
    assert before > 50 and 0.5 < count() / before < 2, (before, count())
    (env if pixels else video).close()


def test_a_camera_that_follows_changes_the_picture_alone():
    envs = [make_env("HalfCheetah-v5", render_mode="rgb_array"), make_env("HalfCheetah-v5")]
    assert use_tracking_camera(envs[0], {}).unwrapped.mujoco_renderer.camera_id == 0
    given = {"default_camera_config": {"distance": 9.0}}
    assert (
        use_tracking_camera(
            make_env("HalfCheetah-v5", **given), given
        ).unwrapped.mujoco_renderer.camera_id
        == -1
    )
    other = make_env("HalfCheetah-v5")
    other.unwrapped.mujoco_renderer.camera_id, size = (
        7,
        other.unwrapped.model.geom_size.copy(),
    )  # as its author might
    assert use_tracking_camera(other, {}).unwrapped.mujoco_renderer.camera_id == 7
    assert np.array_equal(other.unwrapped.model.geom_size, size)
    for env in envs:
        env.reset(seed=1)
    for action in np.random.default_rng(1).uniform(-1, 1, (100, 6)).astype(np.float32):
        first, second = (env.step(action) for env in envs)
        assert np.array_equal(first[0], second[0]) and first[1] == second[1]


def test_without_gl_the_packages_are_named(monkeypatch):
    class Blind(gym.Wrapper):
        def render(self):
            raise ImportError("Unable to load EGL library")

    monkeypatch.setattr("envs.make.make_env", lambda *_, **__: Blind(make_env("Hopper-v5")))
    with pytest.raises(ValueError, match="apt-get install libegl1 libgl1"):
        evaluate.record_video(
            ppo.Args(env_id="Hopper-v5"), make_envs, lambda *_: None, None, None, Path("video.mp4")
        )


def test_a_unity_build_is_not_recorded_from_here():
    with pytest.raises(ValueError, match="Recorder"):
        ppo.train(ppo.Args(unity_path="./Build", capture_video=True))


# Export

CRAWLER = spec(158, 20) | {"sensors": [126, 32]}


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_exported_policy_equals_the_agent(activation):
    args = ppo.Args(hidden_sizes=(32, 32), activation=activation)
    agent = ppo.Agent(CRAWLER, args)
    agent.obs_rms.update(3 * torch.randn(500, 158) + 1)
    torch.nn.init.normal_(agent.actor_mean[-1].weight, std=0.3)
    torch.nn.init.constant_(agent.actor_logstd, -1)
    export.export(agent, CRAWLER, "policy.onnx")
    session = onnxruntime.InferenceSession("policy.onnx")
    obs = 5 * torch.randn(1000, 158)
    feed = lambda rows: {"obs_0": rows[:, :126].numpy(), "obs_1": rows[:, 126:].numpy()}
    with torch.no_grad():
        expected = agent.actor_mean(agent.obs_rms(obs)).clamp(-1, 1).numpy()
    for size in (1, 64, 1000):
        rows = [
            session.run(["deterministic_continuous_actions"], feed(part))[0]
            for part in obs.split(size)
        ]
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-5)
    same = torch.cat([obs[:1]] * 4000)
    sampled = session.run(["continuous_actions"], feed(same))[0]
    with torch.no_grad():
        mean, noise = agent.actor_mean(agent.obs_rms(obs[:1])), torch.randn(4000, 20)
        torch_sampled = (mean + agent.actor_logstd.exp() * noise).clamp(-1, 1).numpy()
    np.testing.assert_allclose(sampled.mean(0), torch_sampled.mean(0), atol=0.05)
    np.testing.assert_allclose(sampled.std(0), torch_sampled.std(0), atol=0.05)


def test_exported_graph_is_what_unity_reads():
    agent = ppo.Agent(CRAWLER, ppo.Args(activation="silu"))
    numbers = torch.randn(
        sum(p.numel() for p in agent.parameters())
    )  # equal biases are stored once
    torch.nn.utils.vector_to_parameters(numbers, agent.parameters())
    export.export(agent, CRAWLER, "policy.onnx")
    model = onnx.load("policy.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version <= 15
    shape = lambda value: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
    inputs = {value.name: shape(value) for value in model.graph.input}
    assert inputs == {"obs_0": ["batch", 126], "obs_1": ["batch", 32]}
    outputs = {value.name: shape(value) for value in model.graph.output}
    assert (
        outputs["continuous_actions"]
        == outputs["deterministic_continuous_actions"]
        == ["batch", 20]
    )
    known = {
        "Gemm",
        "Sigmoid",
        "Mul",
        "Add",
        "Sub",
        "Div",
        "Clip",
        "Concat",
        "Exp",
        "RandomNormalLike",
        "Constant",
    }
    assert {node.op_type for node in model.graph.node} <= known
    session = onnxruntime.InferenceSession("policy.onnx")
    feed = {"obs_0": np.zeros((1, 126), np.float32), "obs_1": np.zeros((1, 32), np.float32)}
    constants = dict(zip(outputs, session.run(list(outputs), feed), strict=True))
    assert (constants["version_number"], constants["memory_size"]) == (3, 0)
    assert constants["continuous_action_output_shape"] == 20


def test_export_of_a_scene_has_its_sensors(monkeypatch):
    folder = train(env_id="Crawler", num_players=1, num_steps=8, total_timesteps=80)
    call(monkeypatch, "--export", folder)
    assert [value.name for value in onnx.load(folder / "policy.onnx").graph.input] == [
        "obs_0",
        "obs_1",
    ]


def test_bounds_of_their_own_are_exported_too():
    low, high = [-0.1, -0.2], [0.2, 0.05]
    agent = ppo.Agent(spec(3, 2, low, high), ppo.Args())
    torch.nn.init.normal_(agent.actor_mean[-1].weight)
    export.export(agent, spec(3, 2, low, high), "policy.onnx")
    obs = torch.randn(50, 3)
    session = onnxruntime.InferenceSession("policy.onnx")
    actions = session.run(["deterministic_continuous_actions"], {"obs_0": obs.numpy()})[0]
    with torch.no_grad():
        expected = agent.actor_mean(obs).clamp(torch.tensor(low), torch.tensor(high)).numpy()
    np.testing.assert_allclose(actions, expected, atol=1e-5)


# Players that crash


def kill_player(monkeypatch, worker, at):
    """Kill a player before the env's k-th step, for every k of which at(k)."""
    make_envs = ppo.make_envs

    def fragile(args, seed):
        envs, how = make_envs(args, seed)
        step, count = envs.step, itertools.count(1)

        def stepped(actions):
            if at(next(count)):
                envs.players[worker].process.kill()
            return step(actions)

        envs.step = stepped
        return envs, how

    monkeypatch.setattr(ppo, "make_envs", fragile)


def test_a_crashed_player_is_started_again_and_training_goes_on(monkeypatch, capsys):
    kill_player(monkeypatch, 1, lambda k: k in (20, 50))
    folder = train(env_id="3DBall", num_players=2, num_steps=32, total_timesteps=24 * 32 * 3)
    assert load(folder)["global_step"] >= 24 * 32 * 3
    assert "2 restart(s)" in capsys.readouterr().out.splitlines()[-2]


def test_a_player_that_crashes_again_and_again_stops_the_run_with_a_checkpoint(monkeypatch):
    kill_player(monkeypatch, 0, lambda k: k > 40)
    with pytest.raises(UnityPlayerError, match="ended with exit code"):
        train(env_id="3DBall", num_steps=32, max_restarts=2, total_timesteps=12 * 32 * 10)
    (folder,) = Path("runs").iterdir()
    assert load(folder)["global_step"] == 12 * 32


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_open_decisions_of_a_lost_player_are_dropped(number, patient):
    """Crashed or hung: the other player's agents continue, this one's restart, and the mask says whose decisions will
    never be closed."""
    with closing(UnityVecEnv("3DBall", num_players=2, timeout=5, max_restarts=1)) as envs:
        envs.reset()
        actions = np.zeros((24, 2), np.float32)
        envs.step(actions)
        os.kill(envs.players[1].process.pid, number)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        assert infos["restarted"].tolist() == [False] * 12 + [True] * 12
        assert rewards[:12].all() and not (
            rewards[12:].any() or terminated[12:].any() or truncated[12:].any()
        )
        assert infos["ready"].all() and envs.restarts == 1
        *_, infos = envs.step(actions)
        assert "restarted" not in infos
