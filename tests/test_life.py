"""A run's life: checkpoint, resume, evaluate, film, export, and what happens when something goes wrong on the way."""

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

import numpy as np
import onnx
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import needs_gl, stop_after

import ppo_continuous_multiagent as ppo
from envs.vector import SyncEnvs, film, make_env
from unity_vec_env import UnityPlayerError, UnityVecEnv

SMALL = dict(env_id="parity_env:Parity-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8), checkpoint_interval=1)


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def train(resumed=None, **kwargs):
    """Train and return the run's folder."""
    before = set(ppo.Path("runs").glob("*"))
    ppo.train(ppo.Args(**{**SMALL, "exp_name": f"run{len(before)}", **kwargs}), resumed)
    return next(iter(set(ppo.Path("runs").glob("*")) - before), None) or resumed[0].parent


def call(monkeypatch, *line):
    if "--resume" in line:
        time.sleep(1.1)  # TensorBoard takes event files in the order of their names, which have the second in them
    monkeypatch.setattr(sys, "argv", ["ppo_continuous_multiagent.py", *map(str, line)])
    ppo.main()


def weights(folder):
    return ppo.load(folder)[1]["agent"]


def curve(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if not tag.startswith("time/") and "SPS" not in tag}


# Checkpoint and resume


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resume_equals_uninterrupted(monkeypatch, num_envs, capsys):
    """Stopped in the middle and resumed, with episodes running: the same weights to the byte, and the same curves, as in one go."""
    settings = dict(num_envs=num_envs, total_timesteps=64 * num_envs * 8)
    whole = train(**settings)
    with monkeypatch.context() as patch:
        stop_after(patch, ppo, 3)
        part = train(**settings)
    state = ppo.load(part)[1]
    assert state["iteration"] == 3 and any(state["episodes"][2]), "stopped after the iteration, within an episode"
    assert f"--resume {part}" in capsys.readouterr().out
    call(monkeypatch, "--resume", part)
    first, second = weights(whole), weights(part)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert curve(whole) == curve(part), "no gap and no overlap"


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
    state = ppo.load(folder)[1]
    train(total_timesteps=320, exp_name="early")
    early = next(ppo.Path("runs").glob("*early*"))
    (folder / "checkpoint.pt").write_bytes((early / "checkpoint.pt").read_bytes())
    call(monkeypatch, "--resume", folder, "--total-timesteps", 512)
    assert [step for step, _ in curve(folder)["losses/policy_loss"]] == [64 * k for k in range(1, 9)] and state["global_step"] == 512


def test_a_conflicting_argument_is_refused_with_both_values(monkeypatch):
    folder = train(total_timesteps=64)
    with pytest.raises(SystemExit, match=r"--gamma 0.5: the run has --gamma 0.99"):
        call(monkeypatch, "--resume", folder, "--total-timesteps", 256, "--gamma", 0.5)
    assert ppo.load(folder)[1]["global_step"] == 64


def life(folder):
    """Go on from the run's checkpoint until somebody kills us."""
    args = ppo.Args(**SMALL, total_timesteps=10**7)
    sys.stdout = open(os.devnull, "w")
    try:
        path, state = ppo.load(folder)
    except ValueError:
        path, state = None, None
    ppo.train(args, (path, state) if state else None)


def test_killed_at_any_moment_the_checkpoint_is_whole():
    rng, fork, steps = random.Random(0), multiprocessing.get_context("fork"), [0]
    torch.set_num_threads(1)
    folder = train(total_timesteps=64)
    for _ in range(20):
        child = fork.Process(target=life, args=(folder,))
        child.start()
        time.sleep(rng.uniform(0.1, 0.6))
        child.kill()
        child.join()
        steps.append(ppo.load(folder)[1]["global_step"])
    assert steps == sorted(steps) and steps[-1] > 64, "every life went on from the last"


@pytest.mark.parametrize("what", ["truncated", "foreign", "older", "missing", "code"])
def test_a_bad_checkpoint_is_one_line_and_stays_as_it_is(monkeypatch, what, capfd):
    folder = train(total_timesteps=64)
    path = folder / "checkpoint.pt"
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:-500])
    elif what == "foreign":
        torch.save({"model": torch.zeros(3)}, path)
    elif what == "older":
        torch.save({**torch.load(path, weights_only=True), "format": "ppo_continuous_multiagent 0"}, path)
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
    monkeypatch.setattr(ppo.time, "time", lambda: 1e9 + 1e-6 * next(clock))  # two runs within a second
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
            kept.append(ppo.load(next(ppo.Path("runs").iterdir()))[1]["global_step"])
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(ppo.os, "fsync", full)
    folder = train(total_timesteps=64 * 8)
    assert "No space left on device" in capsys.readouterr().out
    assert len(kept) == 3 and 0 < kept[0] == kept[2] < 64 * 8
    assert ppo.load(folder)[1]["global_step"] == 64 * 8 and not list(folder.glob("*.tmp"))


def test_last_and_best_checkpoints_are_kept():
    folder = train(total_timesteps=64 * 6, keep_checkpoints=2)
    assert sorted(path.name for path in folder.glob("*.pt")) == ["best.pt", "checkpoint.pt", "checkpoint_320.pt", "checkpoint_384.pt"]
    assert ppo.load(folder / "checkpoint_320.pt")[1]["global_step"] == 320
    best = ppo.load(folder / "best.pt")[1]
    returns = {step: value for step, value in curve(folder)["charts/episodic_return"]}
    assert best["best"] == pytest.approx(max(returns.values()), rel=1e-4) == pytest.approx(returns[best["global_step"]], rel=1e-4)


def test_config_tells_a_run_apart():
    config = json.loads((train(total_timesteps=64) / "config.json").read_text())
    assert config["args"]["seed"] == 1 and config["versions"]["torch"].startswith("2.") and "commit" in config


def test_envs_come_back_where_they_were():
    """Played again from their episodes' beginning, after several ends: the same observations as had they never stopped."""
    rng = np.random.default_rng(0)
    envs = SyncEnvs([make_env("Hopper-v5") for _ in range(2)])
    envs.reset(seed=5)
    ends = sum(len(envs.step(rng.uniform(-1, 1, (2, 3)).astype(np.float32))[-1]) for _ in range(200))
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
    folder = train(env_id="Hopper-v5", num_steps=1024, num_minibatches=16, update_epochs=8, total_timesteps=20 * 1024, hidden_sizes=(64, 64))
    trained = np.mean([value for _, value in curve(folder)["charts/episodic_return"]][-3:])
    untrained = curve(folder)["charts/episodic_return"][0][1]
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 10, "--seed", 100)
    line = capsys.readouterr().out.splitlines()[-1]
    mean = float(line.split("return ")[1].split(" ")[0])
    assert trained > 3 * untrained and mean > 0.9 * trained, line


def test_evaluation_takes_equally_many_episodes_of_every_agent():
    """Three envs with episodes of 1, 10 and 100 steps, nine episodes: three of each, though the first env could have given all nine."""

    class Envs:
        num_envs = 3
        single_action_space = ppo.gym.spaces.Box(-1, 1, (1,))

        def reset(self, seed):
            self.t = np.zeros(3, int)
            return np.zeros((3, 2), np.float32), {}

        def step(self, actions):
            self.t += 1
            done = self.t % [1, 10, 100] == 0
            return np.zeros((3, 2), np.float32), np.ones(3), done, np.zeros(3, bool), {}

    returns, lengths = ppo.evaluate(ppo.Agent(2, 1, ppo.Args(**SMALL)), Envs(), 9, 1)
    assert sorted(returns) == sorted(lengths) == [1] * 3 + [10] * 3 + [100] * 3


def test_evaluation_on_a_scene_counts_decisions():
    agent = ppo.Agent(8, 2, ppo.Args(**SMALL))
    with ppo.closing(UnityVecEnv("3DBall", seed=3)) as envs:
        returns, lengths = ppo.evaluate(agent, envs, 24, 3)
    assert len(returns) == 24
    np.testing.assert_allclose(returns, 0.1 * (lengths - 1) - 1, atol=1e-3)  # 0.1 a decision, -1 for the fall


def test_a_checkpoint_of_another_env_is_one_line(monkeypatch):
    folder = train(total_timesteps=64)
    with pytest.raises(SystemExit, match="observations and .* actions, the env has 11 and 3"):
        call(monkeypatch, "--evaluate", folder, "--env-id", "Hopper-v5")


# Film


@needs_gl
def test_training_is_filmed_and_not_disturbed():
    plain = weights(train(env_id="InvertedPendulum-v5", total_timesteps=128))
    folder = train(env_id="InvertedPendulum-v5", total_timesteps=128, capture_video=True, video_interval=64)
    assert sorted(path.name for path in (folder / "videos").iterdir()) == ["0.mp4", "128.mp4", "64.mp4"]
    assert all(torch.equal(plain[key], value) for key, value in weights(folder).items())


@needs_gl
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Crawler"])
def test_film_shows_something_that_moves(env_id, tmp_path, monkeypatch):
    import imageio

    monkeypatch.setattr("envs.vector.FILM_STEPS", 10)
    unity = ppo.unity_settings(ppo.Args())
    film(tmp_path / "film.mp4", lambda obs: np.ones((len(obs), 3 if env_id == "Hopper-v5" else 20), np.float32), env_id, 1, unity)
    frames = [frame.astype(int) for frame in imageio.get_reader(tmp_path / "film.mp4")]
    assert len(frames) > 5 and frames[0].std() > 10
    assert max(abs(frame - frames[0]).max() for frame in frames) > 50


def test_without_gl_the_packages_are_named(monkeypatch):
    class Blind(ppo.gym.Wrapper):
        def render(self):
            raise ImportError("Unable to load EGL library")

    monkeypatch.setattr("envs.vector.make_env", lambda *_, **__: Blind(make_env("Hopper-v5")))
    with pytest.raises(ValueError, match="apt-get install libegl1 libgl1"):
        film("film.mp4", None, "Hopper-v5", 1, {})


def test_a_unity_build_is_not_filmed_from_here():
    with pytest.raises(ValueError, match="Recorder"):
        ppo.train(ppo.Args(unity_path="./Build", capture_video=True))


# Export

CRAWLER = {"sensors": [126, 32], "low": -torch.ones(1, 20), "high": torch.ones(1, 20)}


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_exported_policy_equals_the_agent(activation):
    args = ppo.Args(hidden_sizes=(32, 32), activation=activation)
    agent = ppo.Agent(158, 20, args)
    agent.obs_rms.update(3 * torch.randn(500, 158) + 1)
    torch.nn.init.normal_(agent.actor_mean[-1].weight, std=0.3)
    torch.nn.init.constant_(agent.actor_logstd, -1)
    ppo.export(agent, CRAWLER, "policy.onnx")
    session = onnxruntime.InferenceSession("policy.onnx")
    obs = 5 * torch.randn(1000, 158)
    feed = lambda rows: {"obs_0": rows[:, :126].numpy(), "obs_1": rows[:, 126:].numpy()}  # noqa: E731
    with torch.no_grad():
        expected = agent.actor_mean(agent.normalize(obs)).clamp(-1, 1).numpy()
    for size in (1, 64, 1000):
        rows = [session.run(["deterministic_continuous_actions"], feed(part))[0] for part in obs.split(size)]
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-5)
    same = torch.cat([obs[:1]] * 4000)
    sampled = session.run(["continuous_actions"], feed(same))[0]
    with torch.no_grad():
        torch_sampled = (agent.actor_mean(agent.normalize(obs[:1])) + agent.actor_logstd.exp() * torch.randn(4000, 20)).clamp(-1, 1).numpy()
    np.testing.assert_allclose(sampled.mean(0), torch_sampled.mean(0), atol=0.05)
    np.testing.assert_allclose(sampled.std(0), torch_sampled.std(0), atol=0.05)


def test_exported_graph_is_what_unity_reads():
    agent = ppo.Agent(158, 20, ppo.Args(activation="silu"))
    torch.nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in agent.parameters())), agent.parameters())  # equal biases are stored once
    ppo.export(agent, CRAWLER, "policy.onnx")
    model = onnx.load("policy.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version <= 15
    shape = lambda value: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]  # noqa: E731
    assert {value.name: shape(value) for value in model.graph.input} == {"obs_0": ["batch", 126], "obs_1": ["batch", 32]}
    outputs = {value.name: shape(value) for value in model.graph.output}
    assert outputs["continuous_actions"] == outputs["deterministic_continuous_actions"] == ["batch", 20]
    known = {"Gemm", "Sigmoid", "Mul", "Add", "Sub", "Div", "Clip", "Concat", "Exp", "RandomNormalLike", "Constant"}
    assert {node.op_type for node in model.graph.node} <= known
    session = onnxruntime.InferenceSession("policy.onnx")
    feed = {"obs_0": np.zeros((1, 126), np.float32), "obs_1": np.zeros((1, 32), np.float32)}
    constants = dict(zip(outputs, session.run(list(outputs), feed), strict=True))
    assert (constants["version_number"], constants["memory_size"], constants["continuous_action_output_shape"]) == (3, 0, 20)


def test_export_of_a_scene_has_its_sensors(monkeypatch):
    folder = train(env_id="Crawler", num_players=1, num_steps=8, total_timesteps=80)
    call(monkeypatch, "--export", folder)
    assert [value.name for value in onnx.load(folder / "policy.onnx").graph.input] == ["obs_0", "obs_1"]


def test_bounds_of_their_own_are_exported_too():
    low, high = torch.tensor([[-0.1, -0.2]]), torch.tensor([[0.2, 0.05]])
    agent = ppo.Agent(3, 2, ppo.Args())
    torch.nn.init.normal_(agent.actor_mean[-1].weight)
    ppo.export(agent, {"sensors": [3], "low": low, "high": high}, "policy.onnx")
    obs = torch.randn(50, 3)
    actions = onnxruntime.InferenceSession("policy.onnx").run(["deterministic_continuous_actions"], {"obs_0": obs.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(actions, torch.min(torch.max(agent.actor_mean(obs), low), high).numpy(), atol=1e-5)


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
    assert ppo.load(folder)[1]["global_step"] >= 24 * 32 * 3
    assert "2 restart(s)" in capsys.readouterr().out.splitlines()[-2]


def test_a_player_that_crashes_again_and_again_stops_the_run_with_a_checkpoint(monkeypatch):
    kill_player(monkeypatch, 0, lambda k: k > 40)
    with pytest.raises(UnityPlayerError, match="ended with exit code"):
        train(env_id="3DBall", num_steps=32, max_restarts=2, total_timesteps=12 * 32 * 10)
    (folder,) = ppo.Path("runs").iterdir()
    assert ppo.load(folder)[1]["global_step"] == 12 * 32


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_open_decisions_of_a_lost_player_are_dropped(number):
    """Crashed or hung: the other player's agents go on, this one's begin anew, and the mask says whose decisions will never be closed."""
    with ppo.closing(UnityVecEnv("3DBall", num_players=2, timeout=5, max_restarts=1)) as envs:
        envs.reset()
        actions = np.zeros((24, 2), np.float32)
        envs.step(actions)
        os.kill(envs.players[1].process.pid, number)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        assert infos["restarted"].tolist() == [False] * 12 + [True] * 12
        assert rewards[:12].all() and not (rewards[12:].any() or terminated[12:].any() or truncated[12:].any())
        assert infos["ready"].all() and envs.restarts == 1
        *_, infos = envs.step(actions)
        assert "restarted" not in infos
