"""ppo_pixel.py: parity with SB3, stacks of images, masks, workers, encoders, runs, invalid input."""

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
    call,
    curve,
    learn_with_sb3,
    needs_compiler,
    needs_gl,
    run_script,
    start_like_sb3,
    stop_after,
)

import ppo_pixel as ppo
from envs.pixel_workers import WorkerDied
from envs.pixel_wrappers import Named
from envs.pixels import PixelEnvs
from envs.rendering import disable_expensive_rendering, use_tracking_camera
from onefile_rl import evaluate, export, fast, runs
from onefile_rl.checkpoints import load, plain
from onefile_rl.engines.unity import UnityPlayerError
from onefile_rl.frames import Frames, stacked

SMALL = dict(
    env_id="parity_env:ParityPixels-v0",
    num_envs=2,
    num_steps=32,
    num_minibatches=4,
    update_epochs=2,
    features=16,
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """With several threads, sums in convolutions are rounded differently from run to run."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(fast, "THREADS", 1)
    torch.set_num_threads(1)


@pytest.fixture
def spy(monkeypatch, tmp_path):
    """Return a function that runs the script in an empty folder and returns what it computed.

    gae          arguments and result of each call
    batches      the batch of each iteration
    stale        the number of rows of each iteration that were decided before the last update
    observations the images of each batch
    minibatches  images and minibatch of each update
    ratios       the ratios of the first minibatch of each iteration
    """
    monkeypatch.chdir(tmp_path)
    seen = SimpleNamespace(
        gae=[], batches=[], stale=[], observations=[], minibatches=[], ratios=[], agent=None
    )
    gae = ppo.gae
    make_batch = ppo.make_batch
    compile_update = runs.Run.compile
    build = ppo.Agent

    def spied_gae(*args):
        seen.gae.append((*args, gae(*args)))
        return seen.gae[-1][-1]

    def spied_make_batch(agent, rollout, all_images, *args):
        seen.stale.append(rollout.stale[: rollout.size].sum())
        batch = make_batch(agent, rollout, all_images, *args)
        seen.batches.append(batch)
        seen.observations.append(stacked(all_images, batch.stacks)[0].numpy())
        return batch

    def spied_compile(run, update, num_updates):
        compiled_update = compile_update(run, update, num_updates)

        def spied_update(agent, optimizer, images, mb, *inputs):
            seen.minibatches.append((images, mb))
            if len(seen.ratios) < len(seen.batches):  # the first update of an iteration
                with torch.no_grad():
                    given = (images, mb.vectors, mb.masks, mb.actions)
                    logprob = seen.agent.get_action_and_value(*given)[1]
                seen.ratios.append((logprob - mb.logprobs).exp())
            return compiled_update(agent, optimizer, images, mb, *inputs)

        return spied_update

    def remember(*args):
        seen.agent = build(*args)
        return seen.agent

    monkeypatch.setattr(ppo, "gae", spied_gae)
    monkeypatch.setattr(ppo, "make_batch", spied_make_batch)
    monkeypatch.setattr(runs.Run, "compile", spied_compile)
    monkeypatch.setattr(ppo, "Agent", remember)

    def run(**kwargs):
        ppo.train(ppo.Args(**{**SMALL, "exp_name": f"run{len(seen.batches)}", **kwargs}))
        return seen

    return run


def act(agent, images, vector, mask, deterministic=False):
    """Return what Agent.act returns, as arrays."""
    return fast.Acting(agent, enabled=False, deterministic=deterministic)(images, vector, mask)


def probabilities(agent, images, vector, mask):
    """Return the probability of every combination of choices, (batch, *branches)."""
    columns = []
    for choices in np.ndindex(*agent.branches):
        actions = torch.tensor(choices).expand(len(mask), -1)
        with torch.no_grad():
            columns.append(agent.get_action_and_value(images, vector, mask, actions)[1].exp())
    return torch.stack(columns, 1).reshape(len(mask), *agent.branches)


# Parity with SB3


@pytest.mark.parametrize("kind", ["", "Discrete", "MultiDiscrete"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_parity_with_sb3(spy, monkeypatch, num_envs, kind):
    """The learning rate is small: rounding can change the sign of a ReLU's input, and Adam makes a full
    step of it. Nearly all weights agree much closer.
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
    batch = seen.batches[0]
    ours = dict(
        observations=seen.observations[0],
        actions=batch.actions.numpy(),
        log_probs=batch.logprobs.numpy(),
        values=batch.values.numpy(),
        advantages=batch.advantages.numpy(),
        returns=batch.returns.numpy(),
    )
    assert_parity(seen, ours, first, initial, final, num_envs, 0.97, moved=3e-5)
    learned = seen.agent.state_dict()
    for key, value in final.items():
        assert np.quantile(abs(learned[key] - value), 0.99) < 1e-6, key


# Frames


@pytest.mark.parametrize("stack", [1, 3])
def test_stacks_are_those_of_gymnasium(stack):
    """Over many episodes that terminate or are truncated, each observation and each final observation has
    the images of gymnasium's FrameStackObservation."""
    env_id = "parity_env:ParityPixels-v0"
    twins = [gym.wrappers.FrameStackObservation(gym.make(env_id), stack) for _ in range(2)]
    slots = np.arange(2)
    num_ends = 0
    rng = np.random.default_rng(0)

    def images_of(frames, stacks):
        return stacked(frames.images(), stacks)[0].numpy().transpose(0, 2, 3, 1)

    def channels_of(obs):
        return np.concatenate(list(obs), axis=-1)

    with closing(PixelEnvs(env_id, 2)) as envs:
        frames = Frames({"image": (36, 36, 3)}, stack, 2, capacity=4)  # it has to grow
        obs, _ = envs.reset(seed=1)
        expected = [channels_of(env.reset(seed=1 + i)[0]) for i, env in enumerate(twins)]
        np.testing.assert_array_equal(images_of(frames, frames.add(slots, obs)), expected)
        for _ in range(60):
            actions = rng.uniform(-1, 1, (2, 2)).astype(np.float32)
            obs, _, terminated, truncated, infos = envs.step(actions)
            frames.new_episode |= terminated | truncated
            for i, env in enumerate(twins):
                next_obs, _, *ended, _ = env.step(actions[i])
                assert tuple(ended) == (terminated[i], truncated[i])
                if any(ended):
                    final = frames.add_final(frames.last[i], infos["final_obs"][i])
                    np.testing.assert_array_equal(
                        images_of(frames, final[None])[0], channels_of(next_obs)
                    )
                    next_obs, _ = env.reset()
                    num_ends += 1
                expected[i] = channels_of(next_obs)
            np.testing.assert_array_equal(images_of(frames, frames.add(slots, obs)), expected)
            if rng.random() < 0.2:
                frames.keep(frames.last)
                np.testing.assert_array_equal(images_of(frames, frames.last), expected)
    assert num_ends > 10


def test_kept_images_get_new_numbers():
    frames = Frames({"image": (1, 1, 1)}, 2, num_slots=2, capacity=10)
    stacks = [frames.add(np.arange(2), {"image": np.full((2, 1, 1, 1), t)}) for t in range(4)]
    before = stacked(frames.images(), stacks[1])[0]
    kept = frames.keep(stacks[1])
    assert frames.size == 8, (
        "images of the times 0 and 1 in the stack, 2 and 3 in the current stacks"
    )
    np.testing.assert_array_equal(stacked(frames.images(), kept)[0], before)
    frames.keep(frames.last)
    assert frames.size == 4
    assert stacked(frames.images(), frames.last)[0].flatten().tolist() == [2, 3, 2, 3]


def test_restored_frames_are_those_that_were_saved():
    frames, restored, again = (Frames({"image": (1, 1, 1)}, 3, 2, 10) for _ in range(3))
    assert frames.state() == {}, "there are no images yet"
    for t in range(5):
        frames.add(np.arange(2), {"image": np.full((2, 1, 1, 1), t)})
    restored.restore(plain(frames.state()))
    again.restore(plain(restored.state()))
    for copy in (restored, again):
        assert stacked(copy.images(), copy.last)[0].flatten(1).tolist() == [[2, 3, 4]] * 2
        copy.add(np.arange(2), {"image": np.full((2, 1, 1, 1), 5)})
        assert stacked(copy.images(), copy.last)[0].flatten(1).tolist() == [[3, 4, 5]] * 2


def test_an_image_is_stored_once(spy, monkeypatch):
    """64 rows with stacks of four have 256 images. 64 are stored, in addition to the first images of an
    iteration and the final images of episodes."""
    sizes = []  # at the end of each iteration
    finals = []  # the iteration of each final image
    add_final = Frames.add_final
    keep = Frames.keep

    def counted_add_final(*args):
        finals.append(len(sizes))
        return add_final(*args)

    def counted_keep(frames, stacks):
        sizes.append(frames.size)
        return keep(frames, stacks)

    monkeypatch.setattr(Frames, "add_final", counted_add_final)
    monkeypatch.setattr(Frames, "keep", counted_keep)
    spy(frame_stack=4, total_timesteps=128)
    assert sizes[0] == 64 + 2 + finals.count(0)
    assert 64 < sizes[1] <= 64 + 2 * 4 + finals.count(1)
    assert 0 < len(finals) < 25


def test_rows_have_stacks_of_one_episode(spy):
    """The env shows the number of its step, ten steps per episode. The stack of a row has the last steps of
    its own episode, also at the start of a rollout, and so has the stack of its next observation."""
    seen = spy(env_id="parity_env:Counting-v0", frame_stack=3, num_steps=16, total_timesteps=128)
    for images, _ in seen.minibatches:
        for oldest, older, newest in images[0][:, ::3, 0, 0].tolist():
            first = newest // 10 * 10
            assert (oldest, older) == (max(newest - 2, first), max(newest - 1, first))


# Rollout

CAMERA = {"images": {"image": (1, 1, 1)}, "vector": 0, "branches": [3], "action_dim": 1}


def step(rollout, t, ready, closed, reward=0.0, done=(), final=None):
    """Store a step of two slots whose images show 10 * slot + t."""
    obs = {"image": np.array([t, 10 + t], np.uint8).reshape(2, 1, 1, 1)}
    terminated = np.zeros(2, bool)
    truncated = np.isin(np.arange(2), done)
    infos = {}
    if final is not None:
        infos["final_obs"] = {slot: {"image": np.full((1, 1, 1), final)} for slot in done}
    rollout.frames.new_episode |= truncated
    rollout.frames.add(np.array(ready), obs)
    slots = np.array(closed, int)
    rollout.add(slots, np.full(2, reward), terminated, truncated, obs, infos, 0.5)


def decide(rollout, slots, logprob=0.0):
    slots = np.array(slots)
    count = len(slots)
    stacks = rollout.frames.last[slots]
    masks = np.ones((count, 3), bool)
    rollout.decide(slots, stacks, np.zeros((count, 0)), masks, slots[:, None], logprob, 0.0)


def shown(rollout, stacks):
    return stacked(rollout.frames.images(), stacks)[0].flatten(1).tolist()


def test_rows_are_complete_and_pending_decisions_survive_a_removal():
    rollout = ppo.Rollout(10, Frames(CAMERA["images"], 2, 2, 4), CAMERA)
    step(rollout, 0, ready=[0, 1], closed=[])
    decide(rollout, [0, 1], logprob=-1.0)
    step(rollout, 1, ready=[0], closed=[0], reward=1.0)
    decide(rollout, [0])
    step(rollout, 2, ready=[0], closed=[0], reward=2.0, done=[0], final=9)
    assert shown(rollout, rollout.stacks[:2]) == [[0, 0], [0, 1]]
    assert shown(rollout, rollout.next_stacks[:2]) == [[0, 1], [1, 9]], "the final observation"
    assert rollout.discounted_returns[:2].tolist() == [1.0, 2.5]
    assert rollout.running_returns.tolist() == [0.0, 0.0]

    rollout.remove(1)
    assert shown(rollout, rollout.stacks[:1]) == [[0, 1]]
    assert shown(rollout, rollout.next_stacks[:1]) == [[1, 9]]
    assert rollout.stale[:1].all(), "the second row is left over, and the weights have changed"

    decide(rollout, [0])
    step(rollout, 3, ready=[0, 1], closed=[0, 1])
    assert rollout.slots[:3].tolist() == [0, 0, 1]
    assert shown(rollout, rollout.stacks[1:3]) == [[2, 2], [10, 10]]
    assert shown(rollout, rollout.next_stacks[1:3]) == [[2, 3], [10, 13]]
    assert rollout.stale[:3].tolist() == [True, False, True], "slot 1 has waited for its reward"
    assert rollout.logprobs[2] == -1.0


def test_a_crash_ends_episodes_as_a_time_limit():
    rollout = ppo.Rollout(10, Frames(CAMERA["images"], 2, 2, 4), CAMERA)
    step(rollout, 0, ready=[0, 1], closed=[])
    decide(rollout, [0, 1])
    step(rollout, 1, ready=[0, 1], closed=[0, 1], reward=1.0)
    decide(rollout, [0, 1])
    rollout.cut(np.array([0]))
    step(rollout, 2, ready=[0, 1], closed=[1])
    assert rollout.truncated[:3].tolist() == [True, False, False]
    assert shown(rollout, rollout.next_stacks[:3]) == [[0, 1], [10, 11], [11, 12]]
    assert shown(rollout, rollout.frames.last) == [[2, 2], [11, 12]], "slot 0 has a new episode"
    assert rollout.running_returns.tolist() == [0.0, 0.5]


# Masks


def test_choices_that_are_not_allowed_have_probability_0():
    spec = {
        "images": {"image": (36, 36, 3)},
        "stack": 1,
        "vector": 0,
        "action_dim": 2,
        "branches": [3, 4],
        "start": [0, 0],
    }
    agent = ppo.Agent(spec, ppo.Args(features=16))
    torch.nn.init.normal_(agent.actor.weight, std=30)  # logits that only the mask can outweigh
    images = [torch.randint(0, 256, (4000, 3, 36, 36), dtype=torch.uint8)]
    mask = torch.rand(4000, 7) < 0.5
    mask[:, 1] = True
    mask[:, 5] = True
    vector = torch.zeros(4000, 0)

    for deterministic in (False, True):
        actions, _, logprobs, _ = act(agent, images, vector, mask, deterministic)
        taken = mask.gather(1, torch.as_tensor(actions) + torch.tensor([0, 3]))
        assert taken.all()
        assert np.isfinite(logprobs).all()

    allowed = mask[:, :3, None] & mask[:, None, 3:]
    p = probabilities(agent, images, vector, mask)
    assert (p[~allowed] == 0).all()
    np.testing.assert_allclose(p.sum((1, 2)), 1, atol=1e-4)
    given = (images, vector, mask, torch.as_tensor(actions))
    with torch.no_grad():
        _, logprob, entropy, _ = agent.get_action_and_value(*given)
    assert torch.isfinite(logprob).all()
    assert (entropy >= 0).all()
    assert (entropy < np.log(3) + np.log(4)).all()


def test_gradients_do_not_pass_through_choices_that_are_not_allowed():
    spec = {
        "images": {"image": (36, 36, 3)},
        "stack": 1,
        "vector": 0,
        "action_dim": 1,
        "branches": [4],
        "start": [0],
    }
    agent = ppo.Agent(spec, ppo.Args(features=16))
    images = [torch.randint(0, 256, (8, 3, 36, 36), dtype=torch.uint8)]
    mask = torch.tensor([[True, True, False, True]]).expand(8, 4)
    actions = torch.zeros(8, 1, dtype=int)
    _, logprob, entropy, _ = agent.get_action_and_value(images, torch.zeros(8, 0), mask, actions)
    (logprob.sum() + entropy.mean()).backward()
    assert torch.isfinite(agent.actor.weight.grad).all()
    assert agent.actor.bias.grad[2] == 0
    assert agent.actor.bias.grad[0] != 0
    assert (entropy <= np.log(3) + 1e-6).all()


def test_the_masks_of_a_scene_are_used(spy):
    """GridWorld does not allow to walk into a wall: no action of the batch does."""
    seen = spy(env_id="GridWorld", num_envs=1, num_steps=16, num_minibatches=2, total_timesteps=144)
    batch = seen.batches[0]
    assert batch.masks.gather(1, batch.actions).all()
    assert 0.05 < (~batch.masks).float().mean() < 0.5, "there are walls"
    assert batch.masks[:, 0].all(), "staying is always allowed"


# Agents that decide at their own pace


@pytest.fixture
def two_paces(scripted, monkeypatch):
    """Let the script train in a scripted scene with two agents, of which the second requests an action every
    other time. Images and vectors show 10 * agent + time, and rewards are the time."""

    def start(num_messages):
        script = []
        for t in range(num_messages):
            agents = []
            for number in (0, 1):
                if number == 0 or t % 2 == 0:
                    value = 10 * number + t
                    image = np.full((36, 36, 1), value / 255, np.float32)
                    obs = [image, np.full(1, value, np.float32)]
                    agents.append(agent(number, obs, reward=t))
            script.append({"Scripted?team=0": agents})
        envs, _ = scripted(script, max_agents=2)
        envs.seed = 1
        monkeypatch.setattr(ppo, "make_envs", lambda args, seed: (envs, "a scripted player"))

    return start


PACES = dict(
    unity_path="x", frame_stack=2, num_envs=1, num_steps=4, num_minibatches=1, update_epochs=1
)


def test_rows_of_agents_with_different_paces(spy, two_paces):
    """Rows, stacks and advantages are those of each agent."""
    two_paces(7)
    seen = spy(**PACES, total_timesteps=8, norm_reward=False, norm_obs=False, gamma=0.5)
    images, mb = seen.minibatches[0]
    values = mb.vectors.flatten().tolist()
    assert sorted(values) == [0, 1, 2, 3, 4, 5, 10, 12], "the ninth row waits for the next batch"
    for value, (older, newest) in zip(values, images[0][:, :, 0, 0].tolist(), strict=True):
        step = 1 if value < 10 else 2
        assert newest == value
        assert older == max(value - step, value // 10 * 10)

    rewards, values, next_values, continues = (np.array(x) for x in seen.gae[0][:4])
    assert rewards.tolist() == [1, 2, 3, 4, 5, 6, 2, 4, 6]
    assert np.flatnonzero(~continues).tolist() == [5, 8], "the last row of each agent"
    np.testing.assert_array_equal(next_values[continues], values[1:][continues[:-1]])
    assert (next_values != 0).all()


def test_decisions_from_before_an_update_have_the_log_probs_of_the_current_policy(spy, two_paces):
    """In the second iteration one row was pending during the last update, in the third one was left over."""
    two_paces(10)
    seen = spy(**PACES | dict(num_steps=2, total_timesteps=12, learning_rate=1e-3))
    assert seen.stale == [0, 1, 1]
    np.testing.assert_allclose(torch.cat(seen.ratios), 1, atol=1e-5)


def test_unity_gets_graphics(tmp_path, monkeypatch):
    """The cameras of a build that is started with -nographics do not render."""
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


@pytest.mark.parametrize("encoder", ["nature", "simple", "impala"])
def test_all_observations_are_used(encoder):
    """With two cameras and a vector, actions and values depend on each, and all parameters learn."""
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
    image_a = torch.randint(0, 256, (2, 6, 40, 48), dtype=torch.uint8)
    image_b = torch.randint(0, 256, (2, 2, 36, 36), dtype=torch.uint8)
    vector = torch.randn(2, 5)
    mask = torch.zeros(2, 0, dtype=bool)
    action = torch.zeros(2, 2)
    _, logprob, _, value = network.get_action_and_value([image_a, image_b], vector, mask, action)
    changes = (
        ([255 - image_a, image_b], vector),
        ([image_a, 255 - image_b], vector),
        ([image_a, image_b], -vector),
    )
    for images, other_vector in changes:
        given = (images, other_vector, mask, action)
        _, other_logprob, _, other_value = network.get_action_and_value(*given)
        assert (other_logprob != logprob).all()
        assert (other_value != value).all()
        np.testing.assert_array_equal(
            network.get_value(images, other_vector).detach(), other_value.detach()
        )
    (logprob.sum() + value.sum()).backward()
    assert all((p.grad != 0).any() for p in network.parameters())


def test_vectors_are_normalized(spy):
    """The image shows the target and the vector has the position of the dot: both are needed."""
    seen = spy(env_id="parity_env:ParityPixelsDict-v0", total_timesteps=128)
    assert seen.agent.obs_rms.mean.shape == (2,)
    assert seen.agent.obs_rms.count > 100
    vectors = seen.batches[0].vectors
    assert vectors.shape == (64, 2)
    assert vectors.std() > 0.1


def test_first_ratio_of_every_update_is_one(spy):
    for kind in ("", "Discrete"):
        seen = spy(env_id=f"parity_env:ParityPixels{kind}-v0", total_timesteps=192)
    assert len(seen.ratios) == 6
    np.testing.assert_allclose(torch.cat(seen.ratios), 1, atol=1e-5)


def test_target_kl_stops_before_the_step(spy):
    """The KL is 0 before the first step, which is taken. Before the second step it is too large."""
    spy(target_kl=1e-9, total_timesteps=64, update_epochs=5)
    (path,) = Path("runs").glob("*/checkpoint.pt")
    assert load(path, ppo.__file__)[1]["kept"]["optimizer"]["state"][0]["step"] == 1


@needs_compiler
def test_compiled_update_is_the_same(spy):
    assert_compiled_is_the_same(spy, total_timesteps=128)


@needs_compiler
def test_no_fast_computes_the_same(spy):
    """All scalars of the first two iterations, with and without the compiled update."""
    curves = []
    for name, settings in {"fast": dict(compile=True), "plain": dict(fast=False)}.items():
        spy(total_timesteps=128, exp_name=name, **settings)
        (folder,) = Path("runs").glob(f"*__{name}__*")
        curves.append(curve(folder))
    assert curves[0].keys() == curves[1].keys()
    for tag, points in curves[0].items():
        assert len(points) == 2 or not tag.startswith("losses/")
        np.testing.assert_allclose(points, curves[1][tag], rtol=1e-5, atol=1e-5, err_msg=tag)


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
    [
        "parity_env:ParityPixels-v0",
        "parity_env:ParityPixelsDict-v0",
        pytest.param("Reacher-v5", marks=needs_gl),
    ],
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
    ), "the traceback of the worker, not of this process"
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert load(path, ppo.__file__)[1]["global_step"] == 64


def test_a_killed_worker_ends_the_run(tmp_path):
    with (
        pytest.raises(WorkerDied, match="exit code -9"),
        closing(PixelEnvs("DummyPixels-v0", 2, 2)) as envs,
    ):
        envs.reset(seed=1)
        envs.workers[1].process.kill()
        for _ in range(2):
            envs.step(np.zeros((2, 2), np.float32))


def test_workers_are_gone_afterwards():
    with closing(PixelEnvs("DummyPixels-v0", 2, 2)) as envs:
        processes = [worker.process for worker in envs.workers]
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() == 0 for process in processes)


@needs_gl
@pytest.mark.parametrize(
    ("env_id", "grayscale"),
    [("InvertedPendulum-v5", False), ("InvertedPendulum-v5", True), ("Reacher3Dof-v0", False)],
)
def test_rendered_images_show_the_env(env_id, grayscale):
    """With several envs in one process, each image shows the state of its own env, and changes."""
    first = rollout(0, env_id, from_pixels=True, image_size=48, grayscale=grayscale)
    images = np.stack([obs["image"] for obs, *_ in first[1:]])
    assert images.shape == (30, 3, 48, 48, 1 if grayscale else 3) and images.std() > 3
    assert (images[5] != images[0]).any((1, 2, 3)).all() and (images[:, 0] != images[:, 1]).any()


@needs_gl
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Reacher2Dof-v0"])
def test_rendered_images_are_gymnasiums(env_id):
    """All envs are rendered with the OpenGL context of the first. Each image shows the state of its own env,
    and differs from gymnasium's rendering without shadows only at the edges of round bodies."""
    gymnasiums = use_tracking_camera(
        gym.make(env_id, render_mode="rgb_array", width=64, height=64).unwrapped, {}
    )
    with closing(PixelEnvs(env_id, 3, from_pixels=True)) as envs, closing(gymnasiums):
        envs.reset(seed=1)
        for _ in range(20):
            images = envs.step(
                np.stack(
                    [np.full(envs.single_action_space.shape, x, np.float32) for x in (-1, 0, 1)]
                )
            )[0]["image"].astype(int)
        disable_expensive_rendering(gymnasiums.model)
        slices = [env.unwrapped.model.vis.quality.numslices for env in envs.group.envs]
        assert slices == [gymnasiums.model.vis.quality.numslices] * 3, (
            "videos are rendered with all slices"
        )
        gymnasiums.reset(seed=0)
        gymnasiums.render()
        for env, image in zip(envs.group.envs, images, strict=True):
            mujoco.mj_copyData(gymnasiums.data, gymnasiums.model, env.unwrapped.data)
            difference = [np.abs(gymnasiums.render() - other).mean() for other in images]
            assert (
                np.abs(gymnasiums.render() - image).mean() == min(difference) < 1
                and sorted(difference)[1] > 2
            )


@needs_gl
def test_action_repeat_adds_rewards():
    with closing(PixelEnvs("InvertedPendulum-v5", 1, from_pixels=True, action_repeat=4)) as envs:
        envs.reset(seed=1)
        assert envs.step(np.zeros((1, 1), np.float32))[1] == 4


def test_nested_observations_are_images_and_a_vector():
    image, grey = (
        gym.spaces.Box(0, 255, (3, 40, 50), np.uint8),
        gym.spaces.Box(0, 255, (40, 50), np.uint8),
    )
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


# Runs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_equals_uninterrupted(spy, monkeypatch, num_workers):
    settings = dict(
        total_timesteps=64 * 6, frame_stack=3, num_workers=num_workers, checkpoint_interval=1
    )
    whole = {k: v.clone() for k, v in spy(**settings, exp_name="whole").agent.state_dict().items()}
    with monkeypatch.context() as patch:
        stop_after(patch, ppo, "gae", 3)
        spy(**settings, exp_name="part")
    (part,) = Path("runs").glob("*part*")
    path, state = load(part, ppo.__file__)
    assert state["iteration"] == 3 and any(state["episodes"]["l"])
    call(ppo, monkeypatch, "--resume", part)
    after = load(part, ppo.__file__)[1]["kept"]["agent"]
    assert all(torch.equal(whole[key], after[key]) for key in whole)


def test_interrupted_iterations_are_repeated(spy, monkeypatch):
    """Interrupt a run within its first iteration, within its third, and within the first one after it was
    resumed. In the end it equals an uninterrupted run, stacks of images included."""
    settings = dict(total_timesteps=64 * 4, frame_stack=3)
    whole = {k: v.clone() for k, v in spy(**settings, exp_name="whole").agent.state_dict().items()}
    gae = ppo.gae
    steps = []
    for times in (1, 3, 1):
        calls = []

        def interrupted(*args):
            calls.append(None)
            if len(calls) == times:
                raise KeyboardInterrupt
            return gae(*args)

        with monkeypatch.context() as patch:
            patch.setattr(ppo, "gae", interrupted)
            if not steps:
                with pytest.raises(KeyboardInterrupt):
                    spy(**settings, exp_name="part")
                (part,) = Path("runs").glob("*part*")
            else:
                with pytest.raises(SystemExit):
                    call(ppo, patch, "--resume", part)
        steps.append(load(part, ppo.__file__)[1]["global_step"])
    assert steps == [0, 128, 128]
    call(ppo, monkeypatch, "--resume", part)
    after = load(part, ppo.__file__)[1]["kept"]["agent"]
    assert all(torch.equal(whole[key], after[key]) for key in whole)


def test_evaluation_has_the_observations_of_training(spy, monkeypatch, capsys):
    """The returns of --evaluate are those of the deterministic policy in envs with gymnasium's own stacks."""
    seen = spy(
        env_id="parity_env:ParityPixelsDiscrete-v0",
        frame_stack=2,
        total_timesteps=128,
        exp_name="run",
    )
    (folder,) = Path("runs").iterdir()
    call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", "6", "--seed", "9")
    line = capsys.readouterr().out.splitlines()[-1]
    expected = []
    for i in range(2):
        env = gym.wrappers.FrameStackObservation(gym.make("parity_env:ParityPixelsDiscrete-v0"), 2)
        obs, _ = env.reset(seed=9 + i)
        for _ in range(3):
            episodic_return = 0.0
            done = False
            while not done:
                image = torch.as_tensor(np.concatenate(list(obs), -1)[None]).permute(0, 3, 1, 2)
                vector = np.zeros((1, 0), np.float32)
                mask = np.ones((1, 5), bool)
                actions, *_ = act(seen.agent, [image], vector, mask, deterministic=True)
                obs, reward, terminated, truncated, _ = env.step(actions[0, 0])
                episodic_return += reward
                done = terminated or truncated
            expected.append(episodic_return)
            obs, _ = env.reset()
    assert f"return {np.mean(expected):.2f} ± {np.std(expected):.2f}" in line


@pytest.mark.parametrize(
    "env_id", ["DummyPixels-v0", "GridWorld", pytest.param("Reacher-v5", marks=needs_gl)]
)
def test_videos_show_something_that_moves(env_id, tmp_path, monkeypatch):
    import imageio

    monkeypatch.setattr("envs.pixels.VIDEO_STEPS", 60)
    args = ppo.Args(env_id=env_id, from_pixels=env_id == "Reacher-v5", features=16, num_envs=1)
    with closing(ppo.make_envs(args, 1)[0]) as envs:
        spec = ppo.describe(args, envs)
    torch.manual_seed(1)
    network = ppo.Agent(spec, args)
    torch.nn.init.normal_(network.actor.weight)  # with the initial weights it hardly moves
    evaluate.record_video(args, ppo.make_envs, ppo.play, network, spec, tmp_path / "video.mp4")
    frames = [frame.astype(int) for frame in imageio.get_reader(tmp_path / "video.mp4")]
    assert len(frames) > 5 and min(frames[0].shape[:2]) >= 256 and frames[0].std() > 5
    assert max(abs(frame - frames[0]).max() for frame in frames) > 50


def exported(spec, agent):
    export.export(agent, spec, "policy.onnx")
    model = onnx.load("policy.onnx")
    onnx.checker.check_model(model, full_check=True)
    shape = lambda value: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
    return (
        onnxruntime.InferenceSession("policy.onnx"),
        {value.name: shape(value) for value in model.graph.input},
        model,
    )


@pytest.mark.parametrize("encoder", ["nature", "simple", "impala"])
def test_exported_policy_equals_the_agent(encoder, monkeypatch, tmp_path):
    """Images are floats from 0 to 1, and the inputs are Unity's sensors in their order."""
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
    images = torch.randint(0, 256, (20, 6, 40, 48), dtype=torch.uint8)
    vector = torch.randn(20, 5)
    with torch.no_grad():
        expected = network.actor(network.encode([images], vector)).clamp(-1, 1).numpy()
    feed = {
        "obs_0": vector[:, :2].numpy(),
        "obs_1": (images.float() / 255).numpy(),
        "obs_2": vector[:, 2:].numpy(),
    }
    np.testing.assert_allclose(
        session.run(["deterministic_continuous_actions"], feed)[0], expected, atol=1e-5
    )
    assert session.run(
        ["version_number", "memory_size", "continuous_action_output_shape"], feed
    ) == [3, 0, 2]


def test_the_exported_model_uses_action_masks(monkeypatch, tmp_path):
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
    images = torch.randint(0, 256, (1, 3, 36, 36), dtype=torch.uint8).expand(4000, -1, -1, -1)
    vector = torch.zeros(4000, 0)
    mask = torch.tensor([[1.0, 0, 1, 1, 1, 0, 1]]).expand(4000, 7)
    feed = {"obs_0": (images.float() / 255).numpy(), "action_masks": mask.numpy()}
    sampled, best, sizes = session.run(
        ["discrete_actions", "deterministic_discrete_actions", "discrete_action_output_shape"], feed
    )
    assert sizes.tolist() == [[3, 4]] and sampled.dtype == best.dtype == np.int64
    actions, *_ = act(network, [images], vector, mask.bool(), deterministic=True)
    np.testing.assert_array_equal(best, actions)
    p = probabilities(network, [images[:1]], vector[:1], mask[:1].bool())[0]
    expected = torch.cat([p.sum(1), p.sum(0)])
    counts = [np.bincount(sampled[:, 0], minlength=3), np.bincount(sampled[:, 1], minlength=4)]
    frequencies = np.concatenate(counts) / 4000
    np.testing.assert_allclose(frequencies, expected, atol=0.05)
    assert (frequencies[[1, 5]] == 0).all()


def test_export_of_a_scene_has_its_sensors(spy, monkeypatch):
    spy(env_id="GridWorld", num_envs=1, num_steps=8, num_minibatches=2, total_timesteps=72)
    (folder,) = Path("runs").iterdir()
    call(ppo, monkeypatch, "--export", folder)
    assert [value.name for value in onnx.load(folder / "policy.onnx").graph.input] == [
        "obs_0",
        "action_masks",
    ]


# Invalid input


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
            "--image-size 32: --encoder nature needs at least 36 x 36",
        ),
        (
            "--env-id parity_env:Tiny-v0",
            "image is 20 x 20: --encoder nature needs at least 36 x 36",
        ),
        ("--env-id GridWorld --num-workers 2", "--num-workers is for gymnasium envs"),
        ("--env-id DummyPixels-v0 --frame-stack 0", "--frame-stack 0: must be above 0"),
        (
            "--env-id DummyPixels-v0 --num-minibatches 31",
            "--num-minibatches 31 does not divide the batch of 8 x 256 = 2048",
        ),
    ],
)
def test_invalid_input_is_refused_in_one_line(line, match, tmp_path):
    assert_refused(ppo, line, match, tmp_path)


def test_without_opengl_the_message_names_the_packages(monkeypatch):
    def blind(*_, **__):
        raise ImportError("Unable to load EGL library")

    monkeypatch.setattr("envs.pixels.gym.make", blind)
    with pytest.raises(
        ValueError,
        match="--from-pixels needs OpenGL, on Debian and Ubuntu: apt-get install libegl1 libgl1",
    ) as caught:
        PixelEnvs("Reacher-v5", 1, from_pixels=True)
    assert len(str(caught.value).splitlines()) == 1
