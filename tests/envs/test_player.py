"""The player follows Unity's order of a fixed step, and ML-Agents' own client and UnityVecEnv receive the same."""

import importlib
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT

from envs.unity_scenes.player import Academy, expects_channels_first
from onefile_rl.engines import scenes
from onefile_rl.engines.scenes import SCENES as ALL_SCENES
from unity_vec_env import UnityVecEnv

REQUEST = "request"
END = "end"
INTERRUPT = "interrupt"


class Lives:
    """Agents whose episode ends after `lives[i]` fixed steps, in the collision phase. 0: never."""

    behavior = "Lives"
    sensors = [("Age", 1)]
    continuous = 1
    branches = ()

    def __init__(self, lives, period=5, offset=0, max_step=0, between=False):
        self.lives = np.array(lives)
        self.max_step = np.array(max_step)
        self.period = np.array(period)
        self.offset = np.array(offset)
        self.between = between
        self.age = np.zeros(len(lives), int)
        self.executed = []
        self.log = []
        self.academy = Academy(self, len(lives), self.exchange)

    def begin(self, agents):
        self.age[agents] = 0

    def observe(self, agents):
        return [self.age[agents, None].astype(np.float32)]

    def act(self, agents, continuous, discrete):
        self.executed.append(
            (self.academy.total, dict(zip(agents.tolist(), continuous[:, 0].tolist(), strict=True)))
        )

    def update(self):
        self.academy.reward += 1

    def physics(self):
        self.age += 1
        ended = (self.lives > 0) & (self.age >= self.lives) & self.academy.enabled
        if ended.any():
            self.academy.end(np.flatnonzero(ended))

    def exchange(self, outbox):
        rows = []
        for _, ids, observations, rewards, done, interrupted in outbox:
            kind = INTERRUPT if interrupted else END if done else REQUEST
            columns = ids.tolist(), rewards.tolist(), observations[0][:, 0].tolist()
            rows += [(kind, *row) for row in zip(*columns, strict=True)]
        self.log.append((self.academy.total, rows))
        requests = sum(kind == REQUEST for kind, *_ in rows)
        return np.full((requests, 1), self.academy.total), np.zeros((requests, 0))

    def run(self, steps):
        for _ in range(steps):
            self.academy.step()
        return {step: [(kind, agent) for kind, agent, *_ in rows] for step, rows in self.log}


def test_messages_are_sent_when_unity_sends_them():
    """An end is sent in the next fixed step, alone if no agent requests a decision then. Two ends without a decision in
    between are sent once."""
    scene = Lives([7, 0, 2, 0], period=[5, 5, 5, 3], offset=[0, 0, 3, 0], max_step=[0, 10, 0, 0])
    assert scene.run(11) == {
        1: [(REQUEST, 0), (REQUEST, 1), (REQUEST, 3)],
        3: [(END, 2)],  # before its first decision
        4: [(REQUEST, 2), (REQUEST, 3)],
        5: [(END, 2)],
        6: [(REQUEST, 0), (REQUEST, 1)],
        7: [(REQUEST, 3)],
        8: [(END, 0)],
        9: [(REQUEST, 2)],
        10: [(REQUEST, 3)],
        11: [
            (INTERRUPT, 1),
            (END, 2),
            (REQUEST, 0),
            (REQUEST, 1),
        ],  # an end and the next decision in one message
    }


def test_reward_is_the_sum_since_the_last_decision():
    scene = Lives([7])
    scene.run(16)
    first = [(1, [(REQUEST, 0, 0, 0)]), (6, [(REQUEST, 0, 5, 5)]), (8, [(END, 0, 2, 7)])]
    second = [(11, [(REQUEST, 0, 3, 3)]), (15, [(END, 0, 4, 7)])]
    assert scene.log == [*first, *second, (16, [(REQUEST, 0, 1, 1)])]


def test_actions_between_decisions():
    """Without `between`, agents act in decision steps only. With it, the last action is repeated in every step; it is
    zero from an end to the next decision."""
    scene = Lives([7])
    scene.run(11)
    assert scene.executed == [(1, {0: 1}), (6, {0: 6}), (11, {0: 11})]
    scene = Lives([7], between=True)
    scene.run(11)
    assert [value[0] for _, value in scene.executed] == [1, 1, 1, 1, 1, 6, 6, 0, 0, 0, 11]


def test_a_reset_sends_no_ends():
    scene = Lives([0, 0], period=[5, 3])
    scene.run(4)
    plain = scene.exchange
    scene.exchange = None
    # It returns None, which is a reset
    scene.academy.exchange = lambda outbox: scene.log.append((scene.academy.total, "reset"))
    scene.academy.step(), scene.academy.step()
    scene.academy.exchange = plain
    scene.academy.step()
    step, rows = scene.log[-1]
    requests = [(kind, agent) for kind, agent, *_ in rows]
    assert step == 7 and requests == [(REQUEST, 0), (REQUEST, 1)], (
        "decisions are counted from the reset"
    )
    assert [age for *_, age in rows] == [1, 1], "the rest of the reset's fixed step is simulated"


def test_disabled_agents_return_with_new_ids():
    scene = Lives([0, 0], period=1)
    scene.run(1)
    scene.academy.disable(np.array([0]))
    scene.run(1)
    scene.academy.enable(np.array([0]))
    log = scene.run(1)
    assert log[2] == [(END, 0), (REQUEST, 1)] and log[3] == [(REQUEST, 1), (REQUEST, 2)]


# The same player with two clients

SCENES = [scene for scene in ALL_SCENES if scene != "WallClimb"]  # it has several behaviors
EXTRA = {scene: dict(max_agents=16) if scene.startswith("Mixed") else {} for scene in SCENES}
for scene in (
    "PushBlock",
    "Hallway",
    "Sorter",
    "FoodCollector",
):  # random actions hardly ever end an episode
    EXTRA[scene]["player_args"] = ["--max-step", "40"]
STEPS = {
    "Mixed": 150,
    "MixedDiscrete": 150,
    "MixedHybrid": 150,
    "3DBall": 60,
    "Basic": 400,
}  # 40 for other scenes


def action(agent, count, size, branches):
    """Return the continuous actions and the choices of an agent's decision number `count`."""
    rng = np.random.default_rng((agent, count))
    continuous = rng.uniform(-1, 1, size).astype(np.float32)
    return continuous, rng.integers(0, np.array(branches, int)).astype(np.int32)


def seen(parts):
    """Return the bytes of all sensors, of images as uint8."""
    plain = lambda part: np.rint(part * 255).astype(np.uint8) if part.ndim == 3 else part
    return b"".join(plain(part).tobytes() for part in parts)


def by_stock_client(scene, steps, monkeypatch):
    """Return the transitions of each agent from the batches of ML-Agents' own client."""
    from mlagents_envs.base_env import ActionTuple
    from mlagents_envs.environment import UnityEnvironment

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    settings = dict(seed=5, no_graphics=True, worker_id=os.getpid() % 5000)
    more = ["--scene", scene, *EXTRA[scene].get("player_args", [])]
    env = UnityEnvironment(
        str(ROOT / "envs" / "unity_scenes" / "player.py"), additional_args=more, **settings
    )
    out = {}
    pending = {}
    chosen = {}
    count = {}
    try:
        env.reset()
        (name,) = env.behavior_specs
        spec = env.behavior_specs[name].action_spec
        for _ in range(steps):
            decisions, terminals = env.get_steps(name)
            for steps_, ended in ((terminals, True), (decisions, False)):
                for row, agent in enumerate(steps_.agent_id.tolist()):
                    obs = seen(o[row] for o in steps_.obs)
                    if agent in pending:
                        interrupted = bool(ended and steps_.interrupted[row])
                        end = (ended and not interrupted, interrupted)
                        reward = float(steps_.reward[row])
                        out.setdefault(agent, []).append((*pending.pop(agent), reward, obs, *end))
                    if not ended:
                        count[agent] = count.get(agent, -1) + 1
                        sizes = spec.continuous_size, spec.discrete_branches
                        chosen[agent] = action(agent, count[agent], *sizes)
                        pending[agent] = (obs, *(part.tobytes() for part in chosen[agent]))
            if len(decisions):
                parts = zip(*(chosen[agent] for agent in decisions.agent_id.tolist()), strict=True)
                env.set_actions(name, ActionTuple(*map(np.stack, parts)))
            env.step()
    finally:
        env.close()
    return out


def action_sizes(space):
    """Return the number of continuous actions and the sizes of the branches."""
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else {"": space}
    continuous = 0
    branches = []
    for part in parts.values():
        if isinstance(part, gym.spaces.Box):
            continuous = part.shape[0]
        else:
            branches = part.nvec.tolist()
    return continuous, branches


def by_vec_env(scene, steps):
    """Return the transitions of each agent from UnityVecEnv."""
    out = {}
    pending = {}
    count = {}
    with closing(UnityVecEnv(scene, seed=5, flatten_entities=True, **EXTRA[scene])) as envs:
        obs, infos = envs.reset()
        owner = envs.players[0].slots.owner
        continuous, branches = action_sizes(envs.single_action_space)
        images = isinstance(obs, dict)  # GridWorld, which has no vector

        def of(obs, slot=...):
            return seen([obs["CameraSensor"][slot] / np.float32(255) if images else obs[slot]])

        for _ in range(steps):
            actions = {
                "continuous": np.zeros((envs.num_envs, continuous), np.float32),
                "discrete": np.zeros((envs.num_envs, len(branches)), np.int32),
            }
            for slot in np.flatnonzero(infos["ready"]):
                agent = owner[slot]
                count[agent] = count.get(agent, -1) + 1
                parts = action(agent, count[agent], continuous, branches)
                actions["continuous"][slot], actions["discrete"][slot] = parts
                pending[slot] = (agent, of(obs, slot), *(part.tobytes() for part in parts))
            if not (continuous and len(branches)):
                sent = actions["continuous"] if continuous else actions["discrete"]
            else:
                sent = actions
            obs, rewards, terminated, truncated, infos = envs.step(sent)
            for slot in np.flatnonzero(terminated | truncated | infos["ready"]):
                if slot in pending:
                    ended = terminated[slot] or truncated[slot]
                    agent, *decision = pending.pop(slot)
                    after = of(infos["final_obs"][slot]) if ended else of(obs, slot)
                    end = bool(terminated[slot]), bool(truncated[slot])
                    out.setdefault(agent, []).append((*decision, rewards[slot], after, *end))
    return out


@pytest.mark.parametrize("scene", SCENES)
def test_both_clients_receive_the_same(scene, monkeypatch):
    steps = STEPS.get(scene, 40)
    stock = by_stock_client(scene, steps, monkeypatch)
    ours = by_vec_env(scene, steps)
    assert stock.keys() <= ours.keys()
    compared = 0
    # UnityVecEnv has more transitions: its step includes messages that contain ends only
    for agent, transitions in stock.items():
        assert transitions == ours[agent][: len(transitions)]
        compared += len(transitions)
    assert compared > 150 and any(t[-2] or t[-1] for rows in stock.values() for t in rows), (
        "some of them are ends"
    )


@pytest.mark.parametrize("scene", SCENES)
def test_same_seed_same_bytes(scene):
    first = by_vec_env(scene, 30)
    second = by_vec_env(scene, 30)
    assert first == second


def test_players_have_different_seeds():
    with closing(UnityVecEnv("3DBall", num_players=2)) as envs:
        obs, _ = envs.reset()
    assert envs.num_envs == 24 and not np.array_equal(obs[:12], obs[12:])


def test_two_players_step_at_the_same_time(tmp_path):
    """A fixed step sleeps for 20 ms. Steps of the two overlap, which they do not if one waits for the other."""
    path = tmp_path / "Slow.x86_64"
    path.write_text(f"""#!{sys.executable}
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from envs.unity_scenes import mixed, player
fast = mixed.Mixed.physics
file = open("{tmp_path}/" + str(os.getpid()), "w")
def slow(self):
    start = time.monotonic()
    time.sleep(0.02)
    print(start, time.monotonic(), file=file, flush=True)
    return fast(self)
mixed.Mixed.physics = slow
player.main()
""")
    path.chmod(0o755)

    player_args = ["--scene", "Mixed", "--agents", "1"]
    with closing(UnityVecEnv(str(path), num_players=2, player_args=player_args)) as envs:
        envs.reset()
        for _ in range(10):
            envs.step(envs.action_space.sample())
        logs = [tmp_path / str(player.process.pid) for player in envs.players]
    first, second = (
        [[float(x) for x in line.split()] for line in log.read_text().splitlines()] for log in logs
    )
    overlapping = [(a, b) for a in first for b in second if a[0] < b[1] and b[0] < a[1]]
    assert len(overlapping) >= 10


def test_number_of_agents_and_period_are_arguments():
    player_args = ["--agents", "3", "--decision-period", "1", "--max-step", "4"]
    with closing(UnityVecEnv("3DBall", player_args=player_args)) as envs:
        obs, _ = envs.reset()
        assert envs.num_envs == 3
        heights = [obs[0, 3]]
        for step in range(4):
            obs, _, _, truncated, infos = envs.step(np.zeros((3, 2)))
            assert truncated.all() == (step == 3)
        assert infos["final_info"]["episode"]["l"].tolist() == [4, 4, 4] and heights[0] == 4


def test_help_lists_scenes_and_options():
    command = [sys.executable, "-m", "envs.unity_scenes.player", "--help"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in (*ALL_SCENES, "--agents", "--decision-period", "--render"):
        assert word in out


def test_unknown_player_argument_is_refused():
    command = [sys.executable, "envs/unity_scenes/player.py", "--scene", "Mixed", "--agent", "3"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 2 and "--agent" in out.stderr


@pytest.mark.parametrize(("version", "first"), [("0.28.0", False), ("1.1.0", True)])
def test_images_have_the_declared_order_of_the_client(version, first, monkeypatch):
    """mlagents-envs 1.0 and later refuse an image that is not declared as (channels, height, width)."""
    with closing(UnityVecEnv("GridWorld")) as envs:
        expected, _ = envs.reset()
    monkeypatch.setattr("onefile_rl.engines.unity.mlagents_envs.__version__", version)
    with closing(UnityVecEnv("GridWorld")) as envs:
        obs, _ = envs.reset()
        ((_, _, shape, channels_first),) = envs.layout.image_sensors
    assert shape == (64, 84, 3) and channels_first == first
    np.testing.assert_array_equal(obs["CameraSensor"], expected["CameraSensor"])


def test_a_client_of_an_unknown_version_gets_the_old_order():
    assert not any(map(expects_channels_first, ("", "0.30.0", "dev")))
    assert all(map(expects_channels_first, ("1.0.0", "1.1.0.dev0", "2.0")))


def test_the_table_of_parameters_has_those_that_the_scenes_read():
    """Names that a scene does not read are refused, so that a typing error is noticed."""
    files = {"3DBall": "ball3d"} | {
        name: name.lower() for name in scenes.SCENES if name != "3DBall"
    }
    for scene in scenes.SCENES:
        module = importlib.import_module(
            f"envs.unity_scenes.{'mixed' if 'Mixed' in scene else files[scene]}"
        )
        source = Path(module.__file__).read_text()
        read = set(re.findall(r'(?:parameters, |parameters\.get\()"(\w+)"', source))
        read |= set(getattr(module, "RANGES", ()))
        if scene == "3DBall":
            read.add("mass")  # accepted as in Unity, without effect
        assert set(scenes.PARAMETERS.get(scene, ())) == read, scene
