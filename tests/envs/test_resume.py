"""Attributes of envs, and running episodes that continue exactly after a resume."""

import io
from contextlib import closing

import gymnasium as gym
import numpy as np
import parity_env  # noqa: F401
import pytest
import torch

from envs import attributes
from envs.envpool_envs import EnvPoolEnvs
from envs.make import make_env, make_envs
from envs.pixels import PixelEnvs
from envs.sync import SyncEnvs
from onefile_rl import checkpoints, runs

NUM_ENVS = 3
VECTORS = "parity_env:Curriculum-v0"
PIXELS = "parity_env:CurriculumPixels-v0"
KINDS = ["vectors", "pixels", "pixels in 2 workers"]
every_kind = pytest.mark.parametrize("kind", KINDS)
in_process = pytest.mark.parametrize("kind", KINDS[:2])


def make(kind):
    if kind == "vectors":
        return SyncEnvs([make_env(VECTORS) for _ in range(NUM_ENVS)])
    return PixelEnvs(PIXELS, NUM_ENVS, 2 if "workers" in kind else 0)


def base(envs, i):
    return getattr(envs, "group", envs).envs[i].unwrapped


def saved_and_loaded(state):
    """Return the state as a checkpoint brings it back."""
    file = io.BytesIO()
    torch.save(checkpoints.plain(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copied(out):
    """Return what reset, restore or step returned, in copies: images are overwritten by the next step."""
    obs, *rest = out
    return {name: array.copy() for name, array in obs.items()} if isinstance(
        obs, dict
    ) else obs.copy(), *rest


def assert_equal_bytes(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_equal_bytes(a[name], b[name])
    else:
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def steps(envs, rng, count):
    outs = []
    for _ in range(count):
        actions = rng.uniform(-1, 1, (NUM_ENVS, 2)).astype(np.float32)
        outs.append(copied(envs.step(actions)))
    return outs


def assert_resumed_equals_uninterrupted(kind, change, before, after, more=None):
    """Change attributes after `before` steps, step on, and resume: everything that follows must be the same.

    more: another change, directly before the checkpoint
    """
    rng = np.random.default_rng(0)
    with closing(make(kind)) as envs, closing(make(kind)) as twin:
        envs.reset(seed=5)
        steps(envs, rng, before)
        change(envs)
        (*_, (last_obs, *_)) = steps(envs, rng, after)
        if more:
            more(envs)
        state = saved_and_loaded(envs.state())
        obs, infos = copied(twin.restore(state))
        assert_equal_bytes(obs, last_obs)
        assert infos["ready"].all() and not infos["closed"].any() and "restarted" not in infos

        # The resumed run is resumed once more, in the same episodes
        random_state = rng.bit_generator.state
        expected = steps(envs, rng, 40)
        rng.bit_generator.state = random_state
        outs = steps(twin, rng, 1)
        with closing(make(kind)) as third:
            _, infos = third.restore(saved_and_loaded(twin.state()))
            assert "restarted" not in infos
            outs += steps(third, rng, 39)
        for ours, theirs in zip(outs, expected, strict=True):
            for a, b in zip(ours[:4], theirs[:4], strict=True):
                assert_equal_bytes(a, b)
        assert (
            sum((terminated | truncated).sum() for _, _, terminated, truncated, _ in expected) > 3
        )


def set_by_set_attr(envs):
    envs.set_attr("push", [0.3, 0.5, 0.7])
    envs.set_attr("wind", np.array([0.01, -0.02, 0.03]))
    envs.set_attr("mode", "slow")


def set_directly(envs):
    for i in range(NUM_ENVS):
        base(envs, i).push = 0.3 + 0.2 * i
        base(envs, i).wind = np.array([0.01, -0.02, 0.03])
        base(envs, i).mode = "slow"


@every_kind
@pytest.mark.parametrize("after", [2, 30])
def test_set_attr_survives_a_resume(kind, after, capsys):
    """Set during an episode, which is still running at the checkpoint (after 2 steps) or has ended (after 30)."""
    assert_resumed_equals_uninterrupted(kind, set_by_set_attr, 9, after)
    assert not capsys.readouterr().out


@in_process
def test_an_attribute_that_is_assigned_directly_survives_a_resume(kind, capsys):
    """Assigned during an episode that has ended since, and again directly before the checkpoint."""

    def once_more(envs):
        for i in range(NUM_ENVS):
            base(envs, i).push = 0.9

    def back_to_the_first_values(envs):
        for i in range(NUM_ENVS):
            base(envs, i).push = 0.5
            base(envs, i).mode = "fast"

    assert_resumed_equals_uninterrupted(kind, set_directly, 9, 30)
    assert_resumed_equals_uninterrupted(kind, set_directly, 9, 30, more=once_more)
    assert_resumed_equals_uninterrupted(kind, set_directly, 9, 30, more=back_to_the_first_values)
    assert not capsys.readouterr().out


@in_process
def test_an_attribute_that_is_assigned_after_each_end_survives_a_resume(kind, capsys):
    """A curriculum that looks at `terminated` assigns when the next episode has already been reset."""
    rng = np.random.default_rng(0)
    with closing(make(kind)) as envs:
        envs.reset(seed=5)
        for i in range(NUM_ENVS):
            base(envs, i).push = 0.2
        for step in range(60):
            _, _, terminated, truncated, _ = envs.step(
                rng.uniform(-1, 1, (NUM_ENVS, 2)).astype(np.float32)
            )
            for i in np.flatnonzero(terminated | truncated):
                base(envs, i).push += 0.05
            if step % 3 == 0:  # also in the first episodes, and before the first step of others
                state = saved_and_loaded(envs.state())
                last = copied((envs._obs() if kind == "pixels" else envs.last_obs,))[0]
                with closing(make(kind)) as twin:
                    assert_equal_bytes(copied(twin.restore(state))[0], last)
                    assert twin.get_attr("push") == envs.get_attr("push")
    assert not capsys.readouterr().out


@in_process
def test_an_episode_that_cannot_be_replayed_is_reported_and_replaced(kind, capsys):
    """Direct assignment during an episode: when it happened is unknown. The new episode has the new value."""
    rng = np.random.default_rng(0)
    with closing(make(kind)) as envs, closing(make(kind)) as twin, closing(make(kind)) as third:
        envs.reset(seed=5)
        steps(envs, rng, 2)
        base(envs, 1).push = 0.9
        (*_, (last_obs, *_)) = steps(envs, rng, 2)
        obs, infos = copied(twin.restore(saved_and_loaded(envs.state())))
        lines = capsys.readouterr().out.splitlines()
        assert (
            len(lines) == 1
            and lines[0].startswith("Env 1: ")
            and "a new episode starts" in lines[0]
        )
        assert infos["restarted"].tolist() == [False, True, False] and infos["ready"].all()
        rows = lambda obs, which: (
            {k: v[which] for k, v in obs.items()} if kind == "pixels" else obs[which]
        )
        assert_equal_bytes(rows(obs, [0, 2]), rows(last_obs, [0, 2]))
        with pytest.raises(AssertionError):
            assert_equal_bytes(rows(obs, [1]), rows(last_obs, [1]))
        assert twin.get_attr("push") == (0.5, 0.9, 0.5)

        # The new episode is an episode like any other
        (*_, (last_obs, *_)) = steps(twin, rng, 3)
        obs, infos = copied(third.restore(saved_and_loaded(twin.state())))
        assert_equal_bytes(obs, last_obs)
        assert "restarted" not in infos and not capsys.readouterr().out


@pytest.mark.parametrize("num_workers", [0, 2])
def test_envs_with_other_randomness_start_new_episodes(num_workers, capsys):
    """One line names all of them. The observations are those of new episodes."""
    with closing(PixelEnvs("parity_env:Unseeded-v0", NUM_ENVS, num_workers)) as envs:
        envs.reset(seed=5)
        steps(envs, np.random.default_rng(0), 3)
        state = saved_and_loaded(envs.state())
    with closing(PixelEnvs("parity_env:Unseeded-v0", NUM_ENVS, num_workers)) as envs:
        obs, infos = envs.restore(state)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("Envs 0, 1, 2: ") and infos["restarted"].all()
        assert envs.get_attr("age") == (0, 0, 0) and not np.array_equal(
            obs["image"], state["obs"]["image"]
        )
        assert all(len(episode["actions"]) == 0 for episode in envs.state()["episodes"])


def test_a_replay_that_ends_too_early_starts_a_new_episode(capsys):
    """Here the episode's length is not reproducible. The replay must not step an env beyond its end."""
    envs = SyncEnvs([make_env("parity_env:Fading-v0")])
    envs.reset(seed=5)
    for _ in range(5):
        envs.step(np.zeros((1, 1), np.float32))
    twin = SyncEnvs([make_env("parity_env:Fading-v0", length=3)])
    obs, infos = twin.restore(envs.state())
    assert (
        infos["restarted"].all()
        and obs.tolist() == [[0.0]]
        and "Env 0: " in capsys.readouterr().out
    )


@every_kind
def test_get_attr_and_set_attr_are_gymnasiums(kind):
    with closing(make(kind)) as envs:
        envs.set_attr("push", 0.25)  # before the first reset, too
        envs.reset(seed=1)
        assert envs.get_attr("push") == (0.25,) * NUM_ENVS
        envs.set_attr("push", [1, 2.5, np.float32(0.1)])
        values = envs.get_attr("push")
        assert values == (1, 2.5, np.float32(0.1)) and [type(x) for x in values] == [
            int,
            float,
            np.float32,
        ]
        envs.set_attr("wind", np.arange(3, dtype=np.int16))
        assert all(x.dtype == np.int16 and x.tolist() == [0, 1, 2] for x in envs.get_attr("wind"))
        with pytest.raises(ValueError, match="got 2 values for 3 envs"):
            envs.set_attr("push", [1, 2])
        with pytest.raises(AttributeError, match="nothing"):
            envs.get_attr("nothing")
        envs.step(np.zeros((NUM_ENVS, 2), np.float32))  # they still work
        if kind == "vectors":
            theirs = gym.vector.SyncVectorEnv([lambda: gym.make(VECTORS)] * NUM_ENVS)
            theirs.set_attr("push", [1, 2, 3])
            envs.set_attr("push", [1, 2, 3])
            assert theirs.get_attr("push") == envs.get_attr("push")


def test_workers_say_which_values_they_take():
    with closing(make("pixels in 2 workers")) as envs:
        envs.reset(seed=1)
        with pytest.raises(
            ValueError, match="set_attr: push is a dict; workers only take numbers, strings"
        ):
            envs.set_attr("push", {"a": 1})
        with pytest.raises(
            AttributeError,
            match="get_attr: action_space is a Box; workers only send numbers, strings",
        ):
            envs.get_attr("action_space")
        envs.step(np.zeros((NUM_ENVS, 2), np.float32))


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("Basic", "pass g with --env-parameters g=4.2"),
        ("HalfCheetah-v5", """run gymnasium's with --env-kwargs '{"render_mode": null}'"""),
    ],
)
def test_other_envs_say_what_they_take_instead(env_id, says):
    with closing(make_envs(runs.Args(env_id=env_id, num_envs=2), 1)[0]) as envs:
        with pytest.raises(ValueError) as caught:
            envs.set_attr("g", 4.2)
        assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
        with pytest.raises(ValueError, match="have no attributes"):
            envs.get_attr("g")


def test_the_advice_for_envpool_is_right():
    args = dict(env_id="HalfCheetah-v5", num_envs=2)
    with closing(make_envs(runs.Args(**args), 1)[0]) as envs:
        assert isinstance(envs, EnvPoolEnvs)
    with closing(make_envs(runs.Args(**args, env_kwargs={"render_mode": None}), 1)[0]) as envs:
        envs.reset(seed=1)
        envs.set_attr("_forward_reward_weight", 2.0)
        assert envs.get_attr("_forward_reward_weight") == (2.0, 2.0)


def test_views_of_arrays_stay_views():
    """Reacher's attributes are views of each other and of MuJoCo's data: they must be written in place."""
    envs, twin = (SyncEnvs([make_env("ReacherPlane-v0")]) for _ in range(2))
    envs.reset(seed=5)
    for _ in range(130):
        envs.step(np.full((1, 2), 0.3, np.float32))
    twin.restore(saved_and_loaded(envs.state()))
    reacher = twin.envs[0].unwrapped
    assert reacher.sin.base is reacher.state and np.shares_memory(reacher.qpos, reacher.data.qpos)
    for _ in range(130):
        a, b = (x.step(np.full((1, 2), -0.3, np.float32))[0] for x in (envs, twin))
        assert_equal_bytes(a, b)


def test_encoding_keeps_values_and_types():
    import json

    values = [1, 1.5, True, "a", None, float("inf"), np.float32(0.1), np.int64(-3), np.bool_(True)]
    values += [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array([0.1, np.nan]),
        np.zeros((0, 2), np.float32),
    ]
    for value in values:
        again = attributes.decode(json.loads(json.dumps(attributes.encode(value))))
        assert type(again) is type(value)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(again, value)
            assert again.dtype == value.dtype
        else:
            assert again == value
    assert (
        not attributes.is_plain(np.zeros(65))
        and not attributes.is_plain([1])
        and not attributes.is_plain(object())
    )
