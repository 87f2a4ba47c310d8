"""UnityVecEnv and GodotVecEnv in the interfaces of Stable-Baselines3 and PettingZoo: the same transitions, the checks
of both projects, and the refusals of what they can't express."""

import subprocess
import sys
import warnings
from contextlib import closing, contextmanager

import numpy as np
import pytest
from conftest import ROOT, agent
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.test import api_test, parallel_api_test
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecCheckNan, VecEnv, VecNormalize

from onefile_rl.engines.pettingzoo_view import default_actions
from onefile_rl.engines.unity import UnityPlayerError
from unity_vec_env import UnityVecEnv, as_pettingzoo, as_sb3

NAME = "Scripted?team=0"
TOGETHER = ("3DBall", "Basic", "FoodCollector", "GridWorld", "Hallway", "PushBlock", "Sorter")
APART = ("Mixed", "MixedDiscrete", "MixedHybrid")


def short(scene, **more):
    """A scene whose episodes are cut after 40 fixed steps, so that some of them end soon."""
    if scene in APART:
        return UnityVecEnv(scene, seed=3, max_agents=16, **more)
    count = ["--agents", "16"] if scene == "Basic" else []
    return UnityVecEnv(scene, seed=3, player_args=["--max-step", "40", *count], **more)


def parts(obs):
    return obs if isinstance(obs, dict) else {"vector": obs}


def assert_equal_obs(first, second):
    assert parts(first).keys() == parts(second).keys()
    for name, array in parts(first).items():
        np.testing.assert_array_equal(array, parts(second)[name], err_msg=name)


def row_of(batch, slot):
    """One agent's row of observations or actions."""
    if isinstance(batch, dict):
        return {name: array[slot] for name, array in batch.items()}
    return batch[slot]


# Imports


@pytest.mark.parametrize("module", ["unity_vec_env", "godot_vec_env"])
@pytest.mark.parametrize(
    ("function", "package"), [("as_sb3", "stable-baselines3"), ("as_pettingzoo", "pettingzoo")]
)
def test_the_helpers_need_neither_library(module, function, package):
    """Without the packages, a helper can be imported, and its view says what to install."""
    code = f"""
import sys
sys.modules["stable_baselines3"] = sys.modules["pettingzoo"] = None
import {module}
try:
    {module}.{function}(None)
except ModuleNotFoundError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{function} needs {package}: pip install {package}\n", done.stderr


# Stable-Baselines3


@pytest.mark.parametrize("scene", ["3DBall", "Basic", "GridWorld", "Sorter"])
def test_sb3_sees_the_transitions_of_the_env(scene):
    ended = 0
    with closing(short(scene)) as envs, closing(as_sb3(short(scene))) as view:
        assert isinstance(view, VecEnv) and view.num_envs == envs.num_envs
        envs.action_space.seed(5)
        obs, infos = envs.reset()
        assert_equal_obs(view.reset(), obs)
        for _ in range(30):
            if envs.layout.branches:
                np.testing.assert_array_equal(get_action_masks(view), infos["action_mask"])
            actions = envs.action_space.sample()
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            seen, seen_rewards, done, rows = view.step(actions)
            assert_equal_obs(seen, obs)
            assert seen_rewards.dtype == np.float32
            np.testing.assert_array_equal(seen_rewards, rewards.astype(np.float32))
            np.testing.assert_array_equal(done, terminated | truncated)
            assert infos["closed"].all()
            for slot, row in enumerate(rows):
                assert row["TimeLimit.truncated"] is bool(truncated[slot])
                if not done[slot]:
                    assert list(row) == ["TimeLimit.truncated"]
                    continue
                ended += 1
                assert_equal_obs(row["terminal_observation"], infos["final_obs"][slot])
                episode = infos["final_info"]["episode"]
                assert row["episode"]["r"] == episode["r"][slot]
                assert row["episode"]["l"] == episode["l"][slot]
                assert row["episode"]["t"] > 0
    assert ended > 5


def test_sb3_resets_into_new_episodes():
    """The first reset returns the first observations, the second one starts new episodes."""
    with closing(short("3DBall")) as envs, closing(as_sb3(short("3DBall"))) as view:
        for _ in range(3):
            obs, _ = envs.reset()
            np.testing.assert_array_equal(view.reset(), obs)
        actions = np.zeros(envs.action_space.shape, np.float32)
        envs.step(actions)
        view.step(actions)
        np.testing.assert_array_equal(view.reset(), envs.reset()[0])


def test_sb3_resets_after_steps_without_a_reset():
    with closing(as_sb3(short("3DBall"))) as view:
        first, _ = view._first
        view.step(np.zeros((12, 2)))
        assert not np.array_equal(view.reset(), first)


@pytest.mark.parametrize(
    ("algorithm", "scene", "policy", "settings"),
    [
        (PPO, "3DBall", "MlpPolicy", dict(n_steps=8, batch_size=48, n_epochs=1)),
        (SAC, "3DBall", "MlpPolicy", dict(learning_starts=24, train_freq=1)),
        (PPO, "GridWorld", "MultiInputPolicy", dict(n_steps=4, batch_size=36, n_epochs=1)),
        (MaskablePPO, "Basic", "MlpPolicy", dict(n_steps=8, batch_size=64, n_epochs=1)),
        (MaskablePPO, "Sorter", "MultiInputPolicy", dict(n_steps=8, batch_size=32, n_epochs=1)),
    ],
)
def test_sb3_algorithms_train_and_evaluate(algorithm, scene, policy, settings):
    """With SB3's wrappers, which check the numbers and normalize."""
    view = VecCheckNan(as_sb3(short(scene)), raise_exception=True)
    if scene == "3DBall":
        view = VecNormalize(view)
    with closing(view):
        assert is_masking_supported(view) == (scene != "3DBall")
        model = algorithm(policy, view, device="cpu", seed=3, **settings)
        model.learn(200)
        assert model.num_timesteps >= 200 and len(model.ep_info_buffer) > 0
        returns, lengths = evaluate_policy(
            model, view, n_eval_episodes=4, return_episode_rewards=True
        )
        assert len(returns) == len(lengths) == 4


def test_sb3_evaluates_whole_episodes():
    """evaluate_policy() reports the returns of the game, also if a wrapper changes the rewards."""

    class Zero:
        def predict(self, obs, **_):
            return np.zeros((len(obs), 2), np.float32), None

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that there is no Monitor
        with closing(as_sb3(UnityVecEnv("3DBall", player_args=["--max-step", "10"]))) as view:
            assert view.env_is_wrapped(Monitor) == [True] * 12
            wrapped = VecNormalize(view, norm_obs=False)
            returns, lengths = evaluate_policy(Zero(), wrapped, 12, return_episode_rewards=True)
    assert lengths == [2] * 12 and np.allclose(returns, 0.2)


def test_sb3_attributes():
    with closing(as_sb3(short("Basic"))) as view:
        assert view.get_attr("render_mode") == [None] * 16
        assert view.get_attr("behavior", [1, 2]) == ["Basic?team=0"] * 2
        first, second = view.get_attr("action_masks", indices=[0, 1])
        np.testing.assert_array_equal(first(), [True] * 3)
        assert len(view.env_method("action_masks", indices=4)) == 1
        with pytest.raises(AttributeError, match="no_such_thing"):
            view.get_attr("no_such_thing")
        with pytest.raises(AttributeError, match="walk: the agents of a game have no such method"):
            view.env_method("walk")
        with pytest.raises(AttributeError, match="color: the agents of a game have no attributes"):
            view.set_attr("color", "red")
        view.set_options({"level": 2})
        with pytest.raises(ValueError, match="the reset of a game has no options"):
            view.reset()


def test_sb3_gets_the_success_of_episodes(scripted):
    """Godot games report it; here the flag is entered into the env's infos."""
    done = agent(0, [[1, 2, 3]], 1.0, done=True)
    script = [{NAME: [agent(0, [[0, 0, 0]])]}, {NAME: [done, agent(0, [[4, 5, 6]])]}]
    envs, _ = scripted(script)
    step_wait = envs.step_wait

    def with_success():
        *rest, infos = step_wait()
        return (*rest, infos | {"is_success": {0: True}})

    envs.step_wait = with_success
    view = as_sb3(envs)
    *_, (row,) = view.step(np.zeros((1, 2)))
    assert row["is_success"] is True and row["episode"]["r"] == 1


# PettingZoo


@pytest.mark.parametrize("scene", TOGETHER)
def test_parallel_env_passes_pettingzoos_test(scene):
    with closing(as_pettingzoo(UnityVecEnv(scene, player_args=["--max-step", "40"]))) as env:
        assert isinstance(env, ParallelEnv)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel_api_test(env, num_cycles=40)


@pytest.mark.parametrize("scene", [*APART, "3DBall", "Basic"])
@pytest.mark.filterwarnings("ignore:Agent's m.*imum observation space value is")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be")
@pytest.mark.filterwarnings("ignore:Environment has not defined a render")
def test_aec_env_passes_pettingzoos_test(scene):
    more = dict(max_agents=16) if scene in APART else dict(player_args=["--max-step", "40"])
    parallel = None if scene in APART else False
    with closing(as_pettingzoo(UnityVecEnv(scene, **more), parallel)) as env:
        assert isinstance(env, AECEnv)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for expected in ("Agent's m", "Action space for", "Environment has not defined a r"):
                warnings.filterwarnings("ignore", expected)
            api_test(env, num_cycles=50)


@pytest.mark.parametrize("scene", ["3DBall", "Basic", "FoodCollector", "Sorter"])
def test_parallel_env_sees_the_transitions_of_the_env(scene):
    """Until an agent leaves, its rows are those of the env. Afterwards it acts with zeros and is not shown."""
    with closing(short(scene)) as envs, closing(as_pettingzoo(short(scene), True)) as view:
        obs, infos = envs.reset()
        envs.action_space.seed(5)
        seen, _ = view.reset()
        live = list(range(envs.num_envs))
        while live:
            assert view.agents == [f"agent_{slot}" for slot in live]
            sampled = envs.action_space.sample()
            actions = default_actions(envs, infos)
            for slot in live:
                if isinstance(actions, dict):
                    for kind in actions:
                        actions[kind][slot] = sampled[kind][slot]
                else:
                    actions[slot] = sampled[slot]
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            results = view.step({f"agent_{slot}": row_of(sampled, slot) for slot in live})
            for values in results:
                assert list(map(str, sorted(values))) == sorted(f"agent_{slot}" for slot in live)
            for slot in list(live):
                row, reward, ended, cut, info = (values[f"agent_{slot}"] for values in results)
                assert (reward, ended, cut) == (rewards[slot], terminated[slot], truncated[slot])
                if terminated[slot] or truncated[slot]:
                    live.remove(slot)
                    assert_equal_obs(row, infos["final_obs"][slot])
                    episode = infos["final_info"]["episode"]
                    assert info["episode"] == {"r": episode["r"][slot], "l": episode["l"][slot]}
                else:
                    assert_equal_obs(row, row_of(obs, slot))
        assert view.agents == [] and view.step({}) == ({}, {}, {}, {}, {})


def action_of(envs, slot, count):
    """The action of an agent's decision number `count`."""
    rng = np.random.default_rng((slot, count))
    action = {}
    if envs.layout.continuous:
        action["continuous"] = rng.uniform(-1, 1, envs.layout.continuous).astype(np.float32)
    if envs.layout.branches:
        action["discrete"] = rng.integers(0, envs.layout.branches)
    return action if len(action) > 1 else next(iter(action.values()))


def first_episodes(envs):
    """The first episode of each slot, from UnityVecEnv. Afterwards its agents act with zeros, as in the view."""
    obs, infos = envs.reset()
    pending, episodes, left = {}, {}, set()
    while not episodes or episodes.keys() - left:
        actions = default_actions(envs, infos)
        for slot in np.flatnonzero(infos["ready"]).tolist():
            if slot in left:
                continue
            action = action_of(envs, slot, len(episodes.setdefault(slot, [])))
            pending[slot] = bytes_of(row_of(obs, slot))
            for kind, array in actions.items() if isinstance(actions, dict) else [("", actions)]:
                array[slot] = action[kind] if kind else action
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for slot in np.flatnonzero(infos["closed"]).tolist():
            if slot in left:
                continue
            done = bool(terminated[slot]), bool(truncated[slot])
            after = infos["final_obs"][slot] if any(done) else row_of(obs, slot)
            episodes[slot].append((pending.pop(slot), rewards[slot], bytes_of(after), *done))
            if any(done):
                left.add(slot)
    return episodes


def bytes_of(obs):
    return b"".join(parts(obs)[name].tobytes() for name in sorted(parts(obs)))


@pytest.mark.parametrize("scene", [*APART, "3DBall"])
def test_aec_env_sees_the_transitions_of_the_env(scene):
    """Each agent's observations, rewards and ends are those of its slot, whatever the decision periods are."""
    with closing(short(scene)) as envs:
        expected = first_episodes(envs)
    seen, pending = {}, {}
    with closing(as_pettingzoo(short(scene), parallel=False)) as env:
        env.reset()
        for name in env.agent_iter():
            slot = env.possible_agents.index(name)
            obs, reward, terminated, truncated, info = env.last()
            episode = seen.setdefault(slot, [])
            if slot in pending:
                episode.append((pending[slot], reward, bytes_of(obs), terminated, truncated))
            else:
                assert reward == 0, "the reward of no action"
            if terminated or truncated:
                assert info["episode"]["l"] == len(episode)
                assert info["episode"]["r"] == pytest.approx(sum(row[1] for row in episode))
                env.step(None)
            else:
                pending[slot] = bytes_of(obs)
                env.step(action_of(env.envs, slot, len(episode)))
    assert seen == expected
    assert len(seen) > 4 and all(rows[-1][-1] or rows[-1][-2] for rows in seen.values())


def test_the_probe_of_the_periods_is_followed_by_new_episodes():
    """By default one step finds out which interface fits. The env is then reset."""
    with closing(short("3DBall")) as envs, closing(as_pettingzoo(short("3DBall"))) as view:
        _, infos = envs.reset()
        envs.step(default_actions(envs, infos))
        obs, _ = envs.reset()
        seen, _ = view.reset()
        np.testing.assert_array_equal(np.stack(list(seen.values())), obs)


def test_masks_fit_the_action_space():
    """`sample` of PettingZoo's users takes them."""
    with closing(as_pettingzoo(short("MixedDiscrete"), parallel=False)) as env:
        env.reset()
        for name in env.agent_iter(60):
            *_, terminated, truncated, info = env.last()
            if terminated or truncated:
                env.step(None)
                continue
            slot = env.possible_agents.index(name)
            flat = np.concatenate(info["action_mask"]).astype(bool)
            np.testing.assert_array_equal(flat, env._game_infos["action_mask"][slot])
            action = env.action_space(name).sample(mask=info["action_mask"])
            assert all(mask[a] for mask, a in zip(info["action_mask"], action, strict=True))
            env.step(action)


# Refusals


@contextmanager
def refused(match, error=ValueError):
    """One line that says what is wrong and what to do."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)


def deciding(*ids, value=0):
    return [agent(i, [[i, value, 0]], 1.0) for i in ids]


def test_sb3_refuses_unequal_periods_before_a_model_is_made():
    with (
        closing(UnityVecEnv("Mixed", max_agents=16)) as envs,
        refused("as_sb3: the agents .* request no decision in this step: .* use infos..ready"),
    ):
        as_sb3(envs)


def test_sb3_refuses_unequal_periods_when_they_show(scripted):
    """Agent 1 decides in every second step only."""
    script = [{NAME: deciding(0, 1)}, {NAME: deciding(0, 1)}, {NAME: deciding(0)}]
    envs, _ = scripted(script)
    view = as_sb3(envs)
    view.reset()
    view.step(np.zeros((2, 2)))
    with refused("as_sb3: the agents 1 request no decision"):
        view.step(np.zeros((2, 2)))


def test_parallel_env_refuses_unequal_periods(scripted):
    script = [{NAME: deciding(0, 1)}, {NAME: deciding(0)}]
    envs, _ = scripted(script)
    view = as_pettingzoo(envs, parallel=True)
    view.reset()
    with refused(r"agents 1 request no decision .* use as_pettingzoo\(envs, parallel=False\)"):
        view.step({f"agent_{i}": np.zeros(2) for i in range(2)})


def test_an_agent_that_has_left_may_pause_in_a_parallel_env(scripted):
    """Its new episode is not shown, so it is not missed."""
    end = agent(1, [[1, 9, 9]], 2.0, done=True)
    script = [{NAME: deciding(0, 1)}, {NAME: [end, *deciding(0)]}, {NAME: deciding(0, 1)}]
    envs, _ = scripted(script)
    view = as_pettingzoo(envs, parallel=True)
    view.reset()
    obs, rewards, terminated, _, _ = view.step({f"agent_{i}": np.zeros(2) for i in range(2)})
    assert terminated == {"agent_0": False, "agent_1": True} and rewards["agent_1"] == 2
    assert obs["agent_1"].tolist() == [1, 9, 9] and view.agents == ["agent_0"]
    obs, *_ = view.step({"agent_0": np.zeros(2)})
    assert list(obs) == view.agents == ["agent_0"], "no agent returns before a reset"


def test_more_slots_than_agents_are_refused_where_all_must_act():
    with closing(UnityVecEnv("3DBall", max_agents=13)) as envs:
        with refused("as_sb3: the agents 12 request no decision .* more slots than agents"):
            as_sb3(envs)
        with refused("as_pettingzoo: the agents 12 request no decision"):
            as_pettingzoo(envs, parallel=True).reset()
        assert isinstance(as_pettingzoo(envs), AECEnv)


def test_more_agents_than_slots_are_refused(scripted):
    envs, _ = scripted([{NAME: deciding(0)}, {NAME: deciding(0, 1)}])
    view = as_sb3(envs)
    with refused("more agents than its 1 slots: set a larger --max-agents", UnityPlayerError):
        view.step(np.zeros((1, 2)))


def test_sb3_refuses_hybrid_actions():
    with (
        closing(UnityVecEnv("FoodCollector")) as envs,
        refused("as_sb3: .* continuous and discrete actions together, .* as_pettingzoo"),
    ):
        as_sb3(envs)


def test_another_seed_is_refused():
    with closing(short("Basic")) as envs:
        view = as_sb3(envs)
        assert view.seed(3) == view.seed() == [3] * 16
        with refused(r"as_sb3: seed 4: .* give UnityVecEnv\(..., seed=4\)"):
            PPO("MlpPolicy", view, seed=4, device="cpu")
        env = as_pettingzoo(envs)
        env.reset(seed=3)
        with refused(r"seed=4.* use UnityVecEnv\(..., seed=4\)"):
            env.reset(seed=4)


def kill(envs):
    envs.players[0].process.kill()
    envs.players[0].process.wait()


def test_a_restarted_player_is_an_error_in_sb3(capsys):
    """Its last actions never get a reward. After a reset the view continues."""
    with closing(as_sb3(UnityVecEnv("3DBall", num_players=2, max_restarts=1))) as view:
        view.reset()
        kill(view.envs)
        with refused("a player was restarted, and the last actions .* 0, 1, 2, 3, 4, .*call reset",
                     UnityPlayerError):  # fmt: skip
            view.step(np.zeros((24, 2)))
        assert "restarting it (attempt 1 of 1)" in capsys.readouterr().out
        assert view.reset().shape == (24, 8)
        _, _, done, rows = view.step(np.zeros((24, 2)))
        assert len(done) == len(rows) == 24


@pytest.mark.parametrize("parallel", [True, False])
def test_a_restarted_player_is_an_error_in_pettingzoo(parallel):
    envs = UnityVecEnv("3DBall", player_args=["--agents", "2"], max_restarts=1)
    with closing(as_pettingzoo(envs, parallel)) as env:
        env.reset()
        kill(envs)
        with refused("restarted, .* agents 0, 1 have no reward: reset the env", UnityPlayerError):
            if parallel:
                env.step({name: np.zeros(2) for name in env.agents})
            else:
                env.step(np.zeros(2))
                env.step(np.zeros(2))
        env.reset()
        assert env.agents == ["agent_0", "agent_1"]


def test_wrong_actions_of_pettingzoo_agents_are_refused():
    with closing(UnityVecEnv("3DBall", player_args=["--agents", "2"])) as envs:
        env = as_pettingzoo(envs, parallel=True)
        with refused("actions of agent_0; the agents are none: reset the env"):
            env.step({"agent_0": np.zeros(2)})
        env.reset()
        with refused("actions of agent_0; the agents are agent_0, agent_1"):
            env.step({"agent_0": np.zeros(2)})
        with refused(r"the action of agent_1 is 0.5, not an array of shape \(2,\)"):
            env.step({"agent_0": np.zeros(2), "agent_1": 0.5})
        with refused("there are no agents: reset the env"):
            as_pettingzoo(envs, parallel=False).step(np.zeros(2))
