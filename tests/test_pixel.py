"""ppo_pixel.py: parity with the real SB3, frame stacks, masks, workers, encoders, the run's life, bad input."""

import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import onnx
import onnxruntime
import parity_env  # noqa: F401
import pytest
import torch
from conftest import (
    agent,
    assert_compiled_is_the_same,
    assert_parity,
    assert_refused,
    learn_with_sb3,
    needs_compiler,
    needs_gl,
    run_script,
    start_like_sb3,
    stop_after,
)

import fast
import policies
import ppo_pixel as ppo
import runs
from checkpoints import load
from envs import cheap
from envs.pixels import Named, PixelEnvs, WorkerDied
from envs.vector import follow
from unity_player import UnityPlayerError

SMALL = dict(
    env_id="parity_env:ParityPixels-v0", num_envs=2, num_steps=32, num_minibatches=4, update_epochs=2, features=16
)


@pytest.fixture
def spy(monkeypatch, tmp_path):
    """Runs the script in an empty folder, and sees what goes into the advantage and into the update. In one thread: in
    several, sums of convolutions are rounded differently from run to run."""
    monkeypatch.setattr(fast, "THREADS", 1)
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    seen = SimpleNamespace(gae=[], batches=[], observations=[], ratios=[], minibatches=[], agent=None)
    gae, make_batch, compiled, build = ppo.gae, ppo.make_batch, runs.Run.compiled, ppo.Agent

    def spied_gae(*args):
        seen.gae.append((*args, gae(*args)))
        return seen.gae[-1][-1]

    def spied_make_batch(agent, rollout, *args):
        seen.batches.append(make_batch(agent, rollout, *args))
        seen.observations.append(ppo.stacked(rollout.frames.images(), seen.batches[-1].images)[0].numpy())
        return seen.batches[-1]

    def spied_compiled(run, update, updates):
        step = compiled(run, update, updates)

        def spied(*inputs):
            mb = inputs[5]
            seen.minibatches.append(mb)
            if len(seen.ratios) < len(seen.batches):  # an iteration's first update
                with torch.no_grad():
                    seen.ratios.append((seen.agent(*mb[:4])[0] - mb.logprobs).exp()[0].item())
            return step(*inputs)

        return spied

    def remembered(*args):
        seen.agent = build(*args)
        return seen.agent

    monkeypatch.setattr(ppo, "gae", spied_gae)
    monkeypatch.setattr(ppo, "make_batch", spied_make_batch)
    monkeypatch.setattr(runs.Run, "compiled", spied_compiled)
    monkeypatch.setattr(ppo, "Agent", remembered)

    def run(**kwargs):
        ppo.train(ppo.Args(**{**SMALL, "exp_name": f"run{len(seen.batches)}", **kwargs}))
        return seen

    return run


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """These images are too small for more, and several tests may run on few cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    torch.set_num_threads(1)


# Parity with SB3


@pytest.mark.parametrize("kind", ["", "Discrete", "MultiDiscrete"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_parity_with_sb3(spy, monkeypatch, num_envs, kind):
    """With a small learning rate: where a ReLU's input passes through 0, rounding decides, and Adam makes a step of it.

    But nearly all weights agree much closer.
    """
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    iterations, steps = 5, 128 // num_envs
    venv = make_vec_env(f"ParityPixels{kind}-v0", num_envs, seed=3)
    model = PPO(
        "CnnPolicy",
        venv,
        n_steps=steps,
        batch_size=64,
        n_epochs=2,
        learning_rate=3e-5,
        gamma=0.97,
        ent_coef=0.01,
        seed=3,
        device="cpu",
    )
    names = {f"encoders.0.{i}": f"features_extractor.cnn.{i}" for i in (0, 2, 4)}
    names |= {
        "actor_logstd": "log_std",
        "encoders.0.7": "features_extractor.linear.0",
        "actor": "action_net",
        "critic": "value_net",
    }
    first, initial, final = learn_with_sb3(model, names, iterations)
    start_like_sb3(ppo, monkeypatch, initial)
    seen = spy(
        env_id=f"parity_env:ParityPixels{kind}-v0", num_envs=num_envs, num_steps=steps, num_minibatches=2,
        update_epochs=2, total_timesteps=iterations * 128, features=512, learning_rate=3e-5, gamma=0.97, ent_coef=0.01,
        vf_coef=1.0, anneal_lr=False, norm_reward=False, seed=3,
    )  # fmt: skip
    _, _, _, actions, logprobs, values, advantages, returns = seen.batches[0]
    ours = dict(
        observations=seen.observations[0], actions=actions.numpy(), log_probs=logprobs.numpy(), values=values.numpy()
    )
    ours |= dict(advantages=advantages.numpy(), returns=returns.numpy())
    assert_parity(seen, ours, first, initial, final, num_envs, 0.97, moved=3e-5)
    learned = seen.agent.state_dict()
    for key, value in final.items():
        assert np.quantile(abs(learned[key] - value), 0.99) < 1e-6, key


# Frames


@pytest.mark.parametrize("stack", [1, 3])
def test_stacks_are_gymnasiums_at_starts_and_ends_too(stack):
    """Every row's images, over many episodes of both ends, are FrameStackObservation's; a cut episode's last ones
    too."""
    twins = [gym.wrappers.FrameStackObservation(gym.make("parity_env:ParityPixels-v0"), stack) for _ in range(2)]
    with closing(PixelEnvs("parity_env:ParityPixels-v0", 2)) as envs:
        frames = ppo.Frames({"images": {"image": (36, 36, 3)}, "stack": stack, "branches": []}, 2, 4)  # it has to grow
        see = lambda rows: ppo.stacked(frames.images(), torch.as_tensor(rows))[0].numpy().transpose(0, 2, 3, 1)
        gymnasiums = lambda obs: np.concatenate(list(obs), axis=-1)
        obs, _ = envs.reset(seed=1)
        everybody, ends = np.arange(2), 0
        expected = [gymnasiums(env.reset(seed=1 + i)[0]) for i, env in enumerate(twins)]
        np.testing.assert_array_equal(see(frames.see(obs, {}, everybody)[0]), expected)
        rng = np.random.default_rng(0)
        for _ in range(60):
            actions = rng.uniform(-1, 1, (2, 2)).astype(np.float32)
            obs, _, terminated, truncated, infos = envs.step(actions)
            frames.begins |= terminated | truncated
            for i, env in enumerate(twins):
                after, _, *ended, _ = env.step(actions[i])
                assert tuple(ended) == (terminated[i], truncated[i])
                if any(ended):
                    np.testing.assert_array_equal(
                        see(frames.final(infos["final_obs"][i], i)[0][None])[0], gymnasiums(after)
                    )
                    after, _ = env.reset()
                    ends += 1
                expected[i] = gymnasiums(after)
            np.testing.assert_array_equal(see(frames.see(obs, {}, everybody)[0]), expected)
            if rng.random() < 0.2:
                frames.forget(frames.last)
                np.testing.assert_array_equal(see(frames.last), expected)
        assert ends > 10


def test_an_image_is_stored_once(spy, monkeypatch):
    """64 rows with stacks of four, 256 images: stored are 64, those that the two agents see at the border, and the last
    ones of cut episodes."""
    counts, finals, final, forget = [], [], ppo.Frames.final, ppo.Frames.forget
    monkeypatch.setattr(ppo.Frames, "final", lambda self, *args: (finals.append(len(counts)), final(self, *args))[1])
    monkeypatch.setattr(ppo.Frames, "forget", lambda self, *rows: (counts.append(self.count), forget(self, *rows))[1])
    spy(frame_stack=4, total_timesteps=128)
    assert (
        counts[0] == 64 + 2 + finals.count(0)
        and 64 < counts[1] <= 64 + 2 * 4 + finals.count(1)
        and 0 < len(finals) < 20
    )


def test_a_rollouts_rows_are_stacks_of_one_episode(spy):
    """With an env that counts its steps into its image: a row's stack is the last steps of its own episode, over the
    rollouts' borders too."""
    seen = spy(env_id="parity_env:Counting-v0", frame_stack=3, num_steps=16, total_timesteps=128)
    for mb in seen.minibatches:
        for oldest, older, newest in mb.images[0][:, ::3, 0, 0].tolist():
            assert (oldest, older) == (max(newest - 2, newest // 10 * 10), max(newest - 1, newest // 10 * 10)), (
                "ten numbers an episode"
            )


# Masks


def test_masked_choices_are_never_taken_and_have_probability_0():
    spec = {
        "images": {"image": (36, 36, 3)},
        "stack": 1,
        "vector": 0,
        "action_dim": 2,
        "branches": [3, 4],
        "start": [0, 0],
    }
    agent = ppo.Agent(spec, ppo.Args(features=16))
    torch.nn.init.normal_(agent.actor.weight, std=30)  # so sure of itself that the mask matters
    images = [torch.randint(0, 256, (4000, 3, 36, 36), dtype=torch.uint8)]
    mask = torch.rand(4000, 7) < 0.5
    mask[:, 1] = mask[:, 5] = True
    vector = torch.zeros(4000, 0)
    for deterministic in (False, True):
        action, _, logprob, _ = fast.Acting(agent, deterministic).module(images, vector.numpy(), mask.numpy())
        taken = mask.gather(1, torch.as_tensor(action) + torch.tensor([0, 3]))
        assert taken.all() and np.isfinite(logprob).all()
    with torch.no_grad():
        probabilities = torch.cat([p.exp() for p in agent.choices(agent.encode(images, vector), mask)], 1)
        assert (probabilities[~mask] == 0).all()
        np.testing.assert_allclose(probabilities[:, :3].sum(1), 1, atol=1e-5)
        logprob, entropy, _ = agent(images, vector, mask, torch.as_tensor(action))
        assert torch.isfinite(logprob).all() and 0 <= entropy < np.log(3) + np.log(4)


def test_gradients_do_not_pass_through_masked_choices():
    spec = {"images": {"image": (36, 36, 3)}, "stack": 1, "vector": 0, "action_dim": 1, "branches": [4], "start": [0]}
    agent = ppo.Agent(spec, ppo.Args(features=16))
    mask = torch.tensor([[True, True, False, True]]).expand(8, 4)
    logprob, entropy, _ = agent(
        [torch.randint(0, 256, (8, 3, 36, 36), dtype=torch.uint8)],
        torch.zeros(8, 0),
        mask,
        torch.zeros(8, 1, dtype=int),
    )
    (logprob.sum() + entropy).backward()
    assert (
        torch.isfinite(agent.actor.weight.grad).all()
        and (agent.actor.bias.grad[2] == 0)
        and agent.actor.bias.grad[0] != 0
    )
    assert entropy <= np.log(3) + 1e-6


def test_the_mask_of_a_scene_arrives(spy):
    """GridWorld's walls: no row of the batch has an action that its mask forbids, and there are such masks."""
    seen = spy(env_id="GridWorld", num_envs=1, num_steps=16, num_minibatches=2, total_timesteps=144)
    _, _, masks, actions, *_ = seen.batches[0]
    assert masks.gather(1, actions).all() and 0.05 < (~masks).float().mean() < 0.5
    assert masks[:, 0].all(), "staying is always allowed"


# Agents that decide at their own pace


def test_rows_of_agents_that_do_not_wait(spy, scripted, monkeypatch):
    """A scripted player whose second agent asks every other time: rows, stacks and advantages are each agent's own."""
    images = lambda a, t: [np.full((36, 36, 1), (10 * a + t) / 255, np.float32), np.full(1, 10 * a + t, np.float32)]
    script = [
        {"Scripted?team=0": [agent(a, images(a, t), reward=t) for a in (0, 1) if a == 0 or t % 2 == 0]}
        for t in range(7)
    ]
    envs, _ = scripted(script, max_agents=2)
    monkeypatch.setattr(ppo, "make_envs", lambda args, seed: (envs, "a scripted player"))
    envs.seed = 1
    settings = dict(
        unity_path="x", frame_stack=2, num_envs=1, num_steps=4, num_minibatches=1, update_epochs=1, total_timesteps=8
    )
    seen = spy(**settings, norm_reward=False, norm_obs=False, gamma=0.5)
    pictures, vectors, *_ = seen.minibatches[0]
    times = vectors.flatten().tolist()
    assert sorted(times) == [0, 1, 2, 3, 4, 5, 10, 12], "the ninth was one too many"
    for time, (old, new) in zip(times, pictures[0][:, :, 0, 0].tolist(), strict=True):
        assert new == time and old == max(time - (1 if time < 10 else 2), time // 10 * 10)
    rewards, values, following, goes_on = (np.array(x) for x in seen.gae[0][:4])
    assert rewards.tolist() == [1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 0] and goes_on.sum() == 7
    np.testing.assert_allclose(following[[0, 1, 2, 3, 4, 5, 7, 8, 9]], values[[1, 2, 3, 4, 5, 6, 8, 9, 10]])


def test_unity_gets_graphics(tmp_path, monkeypatch):
    """A build that is started with -nographics has blind cameras."""
    build = tmp_path / "Build.x86_64"
    build.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "pathlib.Path(__file__).with_name('args').write_text(' '.join(sys.argv[1:]))\n"
    )
    build.chmod(0o755)
    with pytest.raises(UnityPlayerError, match="exit code 0"):
        ppo.make_envs(ppo.Args(unity_path=str(build), player_args=("--mine",), max_restarts=0), 1)
    assert (tmp_path / "args").read_text().split()[:2] == ["--mine", "--mlagents-port"]


# Networks


@pytest.mark.parametrize("encoder", ["nature", "impala"])
def test_all_that_is_seen_is_used(encoder):
    """Two cameras and a vector: the action and the value depend on each, and each encoder learns."""
    spec = {
        "images": {"a": (40, 48, 3), "b": (36, 36, 1)},
        "stack": 2,
        "vector": 5,
        "action_dim": 2,
        "branches": [],
        "low": -1.0,
        "high": 1.0,
    }
    network = ppo.Agent(spec, ppo.Args(encoder=encoder, features=32))
    images = [
        torch.randint(0, 256, (2, 6, 40, 48), dtype=torch.uint8),
        torch.randint(0, 256, (2, 2, 36, 36), dtype=torch.uint8),
    ]
    vector, nothing, action = torch.randn(2, 5), torch.zeros(2, 0, dtype=bool), torch.zeros(2, 2)
    logprob, _, value = network(images, vector, nothing, action)
    for changed in (([255 - images[0], images[1]], vector), ([images[0], 255 - images[1]], vector), (images, -vector)):
        other = network(*changed, nothing, action)
        assert (other[0] != logprob).all() and (other[2] != value).all()
    (logprob.sum() + value.sum()).backward()
    assert all((p.grad != 0).any() for p in network.parameters())


def test_vectors_and_images_are_both_needed(spy):
    """The image shows the target, the vector says where the dot is: statistics of the vector are kept, those of images
    not needed."""
    seen = spy(env_id="parity_env:ParityPixelsDict-v0", total_timesteps=128)
    assert seen.agent.obs_rms.mean.shape == (2,) and seen.agent.obs_rms.count > 100
    _, vectors, *_ = seen.batches[0]
    assert vectors.shape == (64, 2) and vectors.std() > 0.1


def test_first_ratio_of_every_update_is_one(spy):
    for kind in ("", "Discrete"):
        seen = spy(env_id=f"parity_env:ParityPixels{kind}-v0", total_timesteps=192)
    assert len(seen.ratios) == 6
    np.testing.assert_allclose(seen.ratios, 1, atol=1e-5)


@needs_compiler
def test_compiled_update_is_the_same(spy):
    assert_compiled_is_the_same(spy, total_timesteps=128)


# Envs


def rollout(num_workers, env_id, **settings):
    out, rng = [], np.random.default_rng(0)
    with closing(PixelEnvs(env_id, 3, num_workers, **settings)) as envs:
        out.append({name: x.copy() for name, x in envs.reset(seed=5)[0].items()})
        for _ in range(30):
            actions = rng.uniform(-1, 1, (3, *envs.single_action_space.shape)).astype(np.float32)
            obs, *rest, infos = envs.step(actions)
            out.append(({name: x.copy() for name, x in obs.items()}, *rest, infos))
    return out


def assert_equal(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = a.values(), b.values()
    if isinstance(a, np.ndarray) or np.isscalar(a):
        np.testing.assert_array_equal(a, b)
    else:
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)


@pytest.mark.parametrize(
    "env_id",
    ["parity_env:ParityPixels-v0", "parity_env:ParityPixelsDict-v0", pytest.param("Reacher-v5", marks=needs_gl)],
)
def test_workers_give_the_same_rollout(env_id):
    settings = {"from_pixels": True, "action_repeat": 3} if env_id == "Reacher-v5" else {}
    alone, shared = rollout(0, env_id, **settings), rollout(2, env_id, **settings)
    assert_equal(alone, shared)
    assert any("final_obs" in infos for *_, infos in alone[1:]) and (
        env_id == "Reacher-v5" or any("is_success" in infos for *_, infos in alone[1:])
    )


def test_workers_train_the_same(spy):
    alone = {k: v.clone() for k, v in spy(total_timesteps=128).agent.state_dict().items()}
    shared = spy(total_timesteps=128, num_workers=2).agent.state_dict()
    assert all(torch.equal(alone[key], shared[key]) for key in alone)


def test_a_worker_that_dies_is_reported_with_its_traceback(tmp_path):
    line = "--env-id parity_env:Dies-v0 --num-envs 2 --num-workers 2 --num-steps 32 --num-minibatches 2"
    line += " --total-timesteps 256 --features 16"
    out = run_script(ppo, line, tmp_path)
    assert out.returncode == 1 and "the worker of envs 0 to 0 ended with exit code 1" in out.stderr
    assert (
        "Traceback" in out.stderr
        and "ZeroDivisionError" in out.stderr
        and "parity_env.py" in out.stderr
        and "ppo_pixel.py" not in out.stderr
    ), "the worker's traceback, not ours"
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert load(path, ppo.__file__)[1]["global_step"] == 64


def test_a_killed_worker_ends_the_run(tmp_path):
    with pytest.raises(WorkerDied, match="exit code -9"), closing(PixelEnvs("DummyPixels-v0", 2, 2)) as envs:
        envs.reset(seed=1)
        envs.workers[1].process.kill()
        for _ in range(2):
            envs.step(np.zeros((2, 2), np.float32))


def test_workers_are_gone_afterwards():
    with closing(PixelEnvs("DummyPixels-v0", 2, 2)) as envs:
        processes, before = [worker.process for worker in envs.workers], set(Path("/dev/shm").glob("tmp*"))
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() == 0 for process in processes) and not before, "and no file is left"


@needs_gl
@pytest.mark.parametrize(
    ("env_id", "grayscale"), [("InvertedPendulum-v5", False), ("InvertedPendulum-v5", True), ("Reacher3Dof-v0", False)]
)
def test_rendered_images_show_the_env(env_id, grayscale):
    """Two envs in one process: each sees its own state, the same as alone, and its images change."""
    first = rollout(0, env_id, from_pixels=True, image_size=48, grayscale=grayscale)
    images = np.stack([obs["image"] for obs, *_ in first[1:]])
    assert images.shape == (30, 3, 48, 48, 1 if grayscale else 3) and images.std() > 3
    assert (images[5] != images[0]).any((1, 2, 3)).all() and (images[:, 0] != images[:, 1]).any()


@needs_gl
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Reacher2Dof-v0"])
def test_rendered_images_are_gymnasiums(env_id):
    """Each env's own state, whichever env's OpenGL draws it, without shadows, and but for the edges of bodies that have
    fewer sides."""
    gymnasiums = follow(gym.make(env_id, render_mode="rgb_array", width=64, height=64).unwrapped, {})
    with closing(PixelEnvs(env_id, 3, from_pixels=True)) as envs, closing(gymnasiums):
        envs.reset(seed=1)
        for _ in range(20):
            images = envs.step(np.stack([np.full(envs.single_action_space.shape, x, np.float32) for x in (-1, 0, 1)]))[
                0
            ]["image"].astype(int)
        cheap(gymnasiums.model)
        slices = [env.unwrapped.model.vis.quality.numslices for env in envs.group.envs]
        assert slices == [gymnasiums.model.vis.quality.numslices] * 3, "films have all of them"
        gymnasiums.reset(seed=0)
        gymnasiums.render()
        for env, image in zip(envs.group.envs, images, strict=True):
            mujoco.mj_copyData(gymnasiums.data, gymnasiums.model, env.unwrapped.data)
            difference = [np.abs(gymnasiums.render() - other).mean() for other in images]
            assert np.abs(gymnasiums.render() - image).mean() == min(difference) < 1 and sorted(difference)[1] > 2


@needs_gl
def test_action_repeat_adds_rewards():
    with closing(PixelEnvs("InvertedPendulum-v5", 1, from_pixels=True, action_repeat=4)) as envs:
        envs.reset(seed=1)
        assert envs.step(np.zeros((1, 1), np.float32))[1] == 4


def test_nests_are_images_and_a_vector():
    image, grey = gym.spaces.Box(0, 255, (3, 40, 50), np.uint8), gym.spaces.Box(0, 255, (40, 50), np.uint8)
    body = gym.spaces.Dict({"x": gym.spaces.Box(-1, 1, (2, 2)), "on": gym.spaces.Discrete(3)})
    space = gym.spaces.Dict({"eye": gym.spaces.Tuple([image, grey]), "body": body})
    env = gym.Env()
    env.observation_space = space
    env.action_space = gym.spaces.Discrete(2)
    named, obs = Named(env), space.sample()
    seen = named.observation(obs)
    for what in (seen, named.observation_space):
        assert {name: x.shape for name, x in what.items()} == {
            "eye.0": (40, 50, 3),
            "eye.1": (40, 50, 1),
            "vector": (7,),
        }
    np.testing.assert_array_equal(seen["eye.0"], obs["eye"][0].transpose(1, 2, 0))
    assert seen["vector"].sum() == pytest.approx(obs["body"]["x"].sum() + 1)


# The run's life


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_equals_uninterrupted(spy, monkeypatch, num_workers):
    settings = dict(total_timesteps=64 * 6, frame_stack=3, num_workers=num_workers, checkpoint_interval=1)
    whole = {k: v.clone() for k, v in spy(**settings, exp_name="whole").agent.state_dict().items()}
    with monkeypatch.context() as patch:
        stop_after(patch, ppo, "gae", 3)
        spy(**settings, exp_name="part")
    (part,) = Path("runs").glob("*part*")
    path, state = load(part, ppo.__file__)
    assert state["iteration"] == 3 and any(state["episodes"]["l"])
    monkeypatch.setattr(sys, "argv", ["ppo_pixel.py", "--resume", str(part)])
    ppo.main()
    after = load(part, ppo.__file__)[1]["kept"]["agent"]
    assert all(torch.equal(whole[key], after[key]) for key in whole)


def test_evaluation_plays_as_training_saw(spy, monkeypatch, capsys):
    """The deterministic policy's returns, env by env and step by step, against a loop with gymnasium's own stacks."""
    seen = spy(env_id="parity_env:ParityPixelsDiscrete-v0", frame_stack=2, total_timesteps=128, exp_name="run")
    (folder,) = Path("runs").iterdir()
    monkeypatch.setattr(sys, "argv", ["ppo_pixel.py", "--evaluate", str(folder), "--eval-episodes", "6", "--seed", "9"])
    ppo.main()
    line, expected, act = (
        capsys.readouterr().out.splitlines()[-1],
        [],
        fast.Acting(seen.agent, deterministic=True).module,
    )
    for i in range(2):
        env = gym.wrappers.FrameStackObservation(gym.make("parity_env:ParityPixelsDiscrete-v0"), 2)
        obs, _ = env.reset(seed=9 + i)
        for _ in range(3):
            total, done = 0.0, False
            while not done:
                picture = torch.as_tensor(np.concatenate(list(obs), -1)[None]).permute(0, 3, 1, 2)
                action, *_ = act([picture], np.zeros((1, 0), np.float32), np.ones((1, 5), bool))
                obs, reward, terminated, truncated, _ = env.step(action[0, 0])
                total, done = total + reward, terminated or truncated
            expected.append(total)
            obs, _ = env.reset()
    assert f"return {np.mean(expected):.2f} ± {np.std(expected):.2f}" in line


@pytest.mark.parametrize("env_id", ["DummyPixels-v0", "GridWorld", pytest.param("Reacher-v5", marks=needs_gl)])
def test_films_show_something_that_moves(env_id, tmp_path, monkeypatch):
    import imageio

    monkeypatch.setattr("envs.pixels.FILM_STEPS", 60)
    args = ppo.Args(env_id=env_id, from_pixels=env_id == "Reacher-v5", features=16, num_envs=1)
    with closing(ppo.make_envs(args, 1)[0]) as envs:
        spec = ppo.describe(args, envs)
    torch.manual_seed(1)  # not any network moves
    network = ppo.Agent(spec, args)
    torch.nn.init.normal_(network.actor.weight)  # an untrained one hardly does
    policies.film(args, ppo.make_envs, ppo.play, network, spec, tmp_path / "film.mp4")
    frames = [frame.astype(int) for frame in imageio.get_reader(tmp_path / "film.mp4")]
    assert len(frames) > 5 and min(frames[0].shape[:2]) >= 256 and frames[0].std() > 5
    assert max(abs(frame - frames[0]).max() for frame in frames) > 50


def exported(spec, agent):
    policies.export(agent, spec, "policy.onnx")
    model = onnx.load("policy.onnx")
    onnx.checker.check_model(model, full_check=True)
    shape = lambda value: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
    return onnxruntime.InferenceSession("policy.onnx"), {value.name: shape(value) for value in model.graph.input}, model


@pytest.mark.parametrize("encoder", ["nature", "impala"])
def test_exported_policy_equals_the_agent(encoder, monkeypatch, tmp_path):
    """Images as float (batch, channel, height, width) from 0 to 1, sensors in Unity's order: vector, camera, vector."""
    monkeypatch.chdir(tmp_path)
    spec = {
        "images": {"Camera": (40, 48, 3)},
        "stack": 2,
        "vector": 5,
        "action_dim": 2,
        "branches": [],
        "sensors": [2, "Camera", 3],
        "low": -1.0,
        "high": 1.0,
    }
    network = ppo.Agent(spec, ppo.Args(encoder=encoder, features=32))
    network.obs_rms.update(3 * torch.randn(100, 5) + 1)
    torch.nn.init.normal_(network.actor.weight, std=0.1)
    session, inputs, model = exported(spec, network)
    assert (
        inputs == {"obs_0": ["batch", 2], "obs_1": ["batch", 6, 40, 48], "obs_2": ["batch", 3]}
        and model.opset_import[0].version == 9
    )
    images, vector = torch.randint(0, 256, (20, 6, 40, 48), dtype=torch.uint8), torch.randn(20, 5)
    with torch.no_grad():
        expected = network.actor(network.encode([images], vector)).clamp(-1, 1).numpy()
    feed = {"obs_0": vector[:, :2].numpy(), "obs_1": (images.float() / 255).numpy(), "obs_2": vector[:, 2:].numpy()}
    np.testing.assert_allclose(session.run(["deterministic_continuous_actions"], feed)[0], expected, atol=1e-5)
    assert session.run(["version_number", "memory_size", "continuous_action_output_shape"], feed) == [3, 0, 2]


def test_exported_masks_forbid(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    spec = {
        "images": {"Camera": (36, 36, 3)},
        "stack": 1,
        "vector": 0,
        "action_dim": 2,
        "branches": [3, 4],
        "start": [0, 0],
        "sensors": ["Camera"],
    }
    network = ppo.Agent(spec, ppo.Args(features=32))
    torch.nn.init.normal_(network.actor.weight, std=0.3)
    session, inputs, _ = exported(spec, network)
    assert inputs == {"obs_0": ["batch", 3, 36, 36], "action_masks": ["batch", 7]}
    images, mask = (
        torch.randint(0, 256, (1, 3, 36, 36), dtype=torch.uint8).expand(4000, -1, -1, -1),
        torch.tensor([[1.0, 0, 1, 1, 1, 0, 1]]).expand(4000, 7),
    )
    feed = {"obs_0": (images.float() / 255).numpy(), "action_masks": mask.numpy()}
    sampled, best, sizes = session.run(
        ["discrete_actions", "deterministic_discrete_actions", "discrete_action_output_shape"], feed
    )
    assert sizes.tolist() == [[3, 4]] and sampled.dtype == best.dtype == np.int64
    action, *_ = fast.Acting(network, deterministic=True).module(
        list(images[None]), np.zeros((4000, 0), np.float32), mask.bool().numpy()
    )
    np.testing.assert_array_equal(best, action)
    with torch.no_grad():
        expected = torch.cat(
            [p[0].exp() for p in network.choices(network.encode([images], torch.zeros(4000, 0)), mask.bool())]
        ).numpy()
    frequencies = (
        np.concatenate([np.bincount(sampled[:, 0], minlength=3), np.bincount(sampled[:, 1], minlength=4)]) / 4000
    )
    np.testing.assert_allclose(frequencies, expected, atol=0.05)
    assert (frequencies[[1, 5]] == 0).all()


def test_export_of_a_scene_has_its_sensors(spy, monkeypatch):
    spy(env_id="GridWorld", num_envs=1, num_steps=8, num_minibatches=2, total_timesteps=72)
    (folder,) = Path("runs").iterdir()
    monkeypatch.setattr(sys, "argv", ["ppo_pixel.py", "--export", str(folder)])
    ppo.main()
    assert [value.name for value in onnx.load(folder / "policy.onnx").graph.input] == ["obs_0", "action_masks"]


# Bad input


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            "--env-id Reacher-v5",
            "(10,), float32)): ppo_continuous_multiagent.py takes vectors; --from-pixels renders it",
        ),
        ("--env-id 3DBall", "ppo_continuous_multiagent.py takes vectors"),
        ("--env-id CartPole-v1", "ppo_discrete_multiagent.py takes vectors"),
        ("--env-id DummyPixel-v0", "did you mean DummyPixels-v0"),
        (
            "--env-id CartPole-v1 --from-pixels",
            "--from-pixels renders gymnasium's MuJoCo envs and the reachers, and CartPole-v1 is none",
        ),
        (
            "--env-id Reacher-v5 --from-pixels --image-size 32",
            "--image-size 32: --encoder nature takes 36 x 36 and more",
        ),
        ("--env-id parity_env:Tiny-v0", "image is 20 x 20: --encoder nature takes 36 x 36 and more"),
        ("--env-id GridWorld --num-workers 2", "--num-workers is for gymnasium envs"),
        ("--env-id DummyPixels-v0 --frame-stack 0", "--frame-stack 0: must be above 0"),
        (
            "--env-id DummyPixels-v0 --num-minibatches 31",
            "--num-minibatches 31 does not divide the batch of 8 x 256 = 2048",
        ),
    ],
)
def test_bad_input_is_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)


def test_without_gl_the_packages_are_named(monkeypatch):
    def blind(*_, **__):
        raise ImportError("Unable to load EGL library")

    monkeypatch.setattr("envs.pixels.gym.make", blind)
    with pytest.raises(
        ValueError, match="--from-pixels needs OpenGL, on Debian and Ubuntu: apt-get install libegl1 libgl1"
    ) as caught:
        PixelEnvs("Reacher-v5", 1, from_pixels=True)
    assert len(str(caught.value).splitlines()) == 1
