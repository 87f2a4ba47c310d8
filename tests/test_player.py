"""The player keeps Unity's order of a fixed step, and says the same to the stock client and to UnityVecEnv."""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from envs import SCENES
from envs.player import Academy
from unity_vec_env import UnityVecEnv

ASK, END, INTERRUPT = "ask", "end", "interrupt"


class Lives:
    """Agents that die of age: `lives[i]` fixed steps after their beginning, in the collision phase. 0: never."""

    behavior, sensors, continuous, branches = "Lives", [("Age", 1)], 1, ()

    def __init__(self, lives, period=5, offset=0, max_step=0, between=False):
        self.lives, self.max_step = np.array(lives), np.array(max_step)
        self.period, self.offset = np.array(period), np.array(offset)
        self.between, self.age, self.executed, self.log = between, np.zeros(len(lives), int), [], []
        self.academy = Academy(self, len(lives), self.exchange)

    def begin(self, who):
        self.age[who] = 0

    def observe(self, who):
        return [self.age[who, None].astype(np.float32)]

    def act(self, who, continuous, discrete):
        self.executed.append((self.academy.total, dict(zip(who.tolist(), continuous[:, 0].tolist(), strict=True))))

    def update(self):
        self.academy.reward += 1

    def physics(self):
        self.age += 1
        dead = (self.lives > 0) & (self.age >= self.lives) & self.academy.enabled
        if dead.any():
            self.academy.end(np.flatnonzero(dead))

    def exchange(self, outbox):
        rows = []
        for _, ids, observations, rewards, done, interrupted in outbox:
            kind = INTERRUPT if interrupted else END if done else ASK
            columns = ids.tolist(), rewards.tolist(), observations[0][:, 0].tolist()
            rows += [(kind, *row) for row in zip(*columns, strict=True)]
        self.log.append((self.academy.total, rows))
        asking = sum(kind == ASK for kind, *_ in rows)
        return np.full((asking, 1), self.academy.total), np.zeros((asking, 0))

    def run(self, steps):
        for _ in range(steps):
            self.academy.step()
        return {step: [(kind, agent) for kind, agent, *_ in rows] for step, rows in self.log}


def test_messages_go_out_when_unity_sends_them():
    """A death leaves with the next fixed step, alone if nobody decides then; two deaths without a decision between are
    one terminal."""
    scene = Lives([7, 0, 2, 0], period=[5, 5, 5, 3], offset=[0, 0, 3, 0], max_step=[0, 10, 0, 0])
    assert scene.run(11) == {
        1: [(ASK, 0), (ASK, 1), (ASK, 3)],
        3: [(END, 2)],  # before its first decision
        4: [(ASK, 2), (ASK, 3)],
        5: [(END, 2)],
        6: [(ASK, 0), (ASK, 1)],
        7: [(ASK, 3)],
        8: [(END, 0)],
        9: [(ASK, 2)],
        10: [(ASK, 3)],
        11: [(INTERRUPT, 1), (END, 2), (ASK, 0), (ASK, 1)],  # an end and the next decision in one message
    }


def test_reward_is_the_sum_since_the_last_decision():
    scene = Lives([7])
    scene.run(16)
    first = [(1, [(ASK, 0, 0, 0)]), (6, [(ASK, 0, 5, 5)]), (8, [(END, 0, 2, 7)])]
    second = [(11, [(ASK, 0, 3, 3)]), (15, [(END, 0, 4, 7)])]
    assert scene.log == [*first, *second, (16, [(ASK, 0, 1, 1)])]


def test_actions_between_decisions():
    """Without: on decision steps alone. With: the last action at every step, and zero from an end to the next
    decision."""
    scene = Lives([7])
    scene.run(11)
    assert scene.executed == [(1, {0: 1}), (6, {0: 6}), (11, {0: 11})]
    scene = Lives([7], between=True)
    scene.run(11)
    assert [value[0] for _, value in scene.executed] == [1, 1, 1, 1, 1, 6, 6, 0, 0, 0, 11]


def test_reset_cuts_episodes_without_a_terminal():
    scene = Lives([0, 0], period=[5, 3])
    scene.run(4)
    scene.exchange, plain = None, scene.exchange
    # It returns None: a reset.
    scene.academy.exchange = lambda outbox: scene.log.append((scene.academy.total, "reset"))
    scene.academy.step(), scene.academy.step()
    scene.academy.exchange = plain
    scene.academy.step()
    step, rows = scene.log[-1]
    assert step == 7 and [(kind, agent) for kind, agent, *_ in rows] == [(ASK, 0), (ASK, 1)], "the phase starts anew"
    assert [age for *_, age in rows] == [1, 1], "the rest of the fixed step of the reset still runs"


def test_disabled_agents_come_back_under_new_ids():
    scene = Lives([0, 0], period=1)
    scene.run(1)
    scene.academy.disable(np.array([0]))
    scene.run(1)
    scene.academy.enable(np.array([0]))
    log = scene.run(1)
    assert log[2] == [(END, 0), (ASK, 1)] and log[3] == [(ASK, 1), (ASK, 2)]


# The same player behind two clients

EXTRA = {scene: dict(max_agents=16) if scene.startswith("Mixed") else {} for scene in SCENES}
for scene in ("PushBlock", "Hallway"):  # at random hardly anybody comes to the end
    EXTRA[scene]["player_args"] = ["--max-step", "40"]
STEPS = {"Mixed": 150, "MixedDiscrete": 150, "3DBall": 60, "Basic": 400}  # the others: 40


def action(agent, count, size, branches):
    """What an agent does in its k-th decision, continuous or discrete."""
    rng = np.random.default_rng((agent, count))
    return rng.integers(0, branches).astype(np.int32) if len(branches) else rng.uniform(-1, 1, size).astype(np.float32)


def seen(parts):
    """Sensors in their order, images as they are."""
    plain = lambda part: np.rint(part * 255).astype(np.uint8) if part.ndim == 3 else part
    return b"".join(plain(part).tobytes() for part in parts)


def by_stock_client(scene, steps, monkeypatch):
    """Transitions of each agent, from the stock client's batches."""
    from mlagents_envs.base_env import ActionTuple
    from mlagents_envs.environment import UnityEnvironment

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    settings = dict(seed=5, no_graphics=True, worker_id=os.getpid() % 5000)
    more = ["--scene", scene, *EXTRA[scene].get("player_args", [])]
    env = UnityEnvironment(str(ROOT / "envs" / "player.py"), additional_args=more, **settings)
    out, pending, count = {}, {}, {}
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
                        end, reward = (ended and not interrupted, interrupted), float(steps_.reward[row])
                        out.setdefault(agent, []).append((*pending.pop(agent), reward, obs, *end))
                    if not ended:
                        count[agent] = count.get(agent, -1) + 1
                        act = action(agent, count[agent], spec.continuous_size, spec.discrete_branches)
                        pending[agent] = (obs, act.tobytes())
            kind = np.int32 if spec.discrete_size else np.float32
            rows = [np.frombuffer(pending[agent][1], kind) for agent in decisions.agent_id.tolist()]
            if rows:
                actions = np.stack(rows)
                env.set_actions(name, ActionTuple(discrete=actions) if spec.discrete_size else ActionTuple(actions))
            env.step()
    finally:
        env.close()
    return out


def by_vec_env(scene, steps):
    """The same from UnityVecEnv's rows."""
    out, pending, count = {}, {}, {}
    with closing(UnityVecEnv(scene, seed=5, **EXTRA[scene])) as envs:
        obs, infos = envs.reset()
        owner, branches = envs.players[0].slots.owner, getattr(envs.single_action_space, "nvec", [])
        images = isinstance(obs, dict)  # of GridWorld, which has no vectors

        def of(obs, slot=...):
            return seen([obs["CameraSensor"][slot] / np.float32(255) if images else obs[slot]])

        for _ in range(steps):
            actions = np.zeros(envs.action_space.shape, np.int32 if len(branches) else np.float32)
            for slot in np.flatnonzero(infos["ready"]):
                agent = owner[slot]
                count[agent] = count.get(agent, -1) + 1
                actions[slot] = action(agent, count[agent], actions.shape[1], branches)
                pending[slot] = (agent, of(obs, slot), actions[slot].tobytes())
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for slot in np.flatnonzero(terminated | truncated | infos["ready"]):
                if slot in pending:
                    ended = terminated[slot] or truncated[slot]
                    agent, before, act = pending.pop(slot)
                    after = of(infos["final_obs"][slot]) if ended else of(obs, slot)
                    end = bool(terminated[slot]), bool(truncated[slot])
                    out.setdefault(agent, []).append((before, act, rewards[slot], after, *end))
    return out


@pytest.mark.parametrize("scene", SCENES)
def test_stock_client_sees_the_same(scene, monkeypatch):
    steps = STEPS.get(scene, 40)
    stock, ours = by_stock_client(scene, steps, monkeypatch), by_vec_env(scene, steps)
    assert stock.keys() <= ours.keys()
    compared = 0
    for agent, transitions in stock.items():  # a step of ours takes lone ends along, so it has come further
        assert transitions == ours[agent][: len(transitions)]
        compared += len(transitions)
    assert compared > 150 and any(t[4] or t[5] for rows in stock.values() for t in rows), "with ends among them"


@pytest.mark.parametrize("scene", SCENES)
def test_same_seed_same_bytes(scene):
    first, second = by_vec_env(scene, 30), by_vec_env(scene, 30)
    assert first == second


def test_players_have_different_seeds():
    with closing(UnityVecEnv("3DBall", num_players=2)) as envs:
        obs, _ = envs.reset()
    assert envs.num_envs == 24 and not np.array_equal(obs[:12], obs[12:])


def test_two_players_step_at_the_same_time(tmp_path):
    """Each takes 20 ms a fixed step, asleep: ten steps of two players take little more than ten steps of one."""
    path = tmp_path / "Slow.x86_64"
    path.write_text(f"""#!{sys.executable}
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from envs import mixed, player
fast = mixed.Mixed.physics
mixed.Mixed.physics = lambda self: (time.sleep(0.02), fast(self))
player.main()
""")
    path.chmod(0o755)

    def seconds(num_players):
        player_args = ["--scene", "Mixed", "--agents", "1"]
        with closing(UnityVecEnv(str(path), num_players=num_players, player_args=player_args)) as envs:
            envs.reset()
            start = time.monotonic()
            for _ in range(10):
                envs.step(envs.action_space.sample())
            return time.monotonic() - start

    assert seconds(2) < 1.6 * seconds(1)


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


def test_help_teaches():
    command = [sys.executable, "-m", "envs.player", "--help"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in (*SCENES, "--agents", "--decision-period", "--render"):
        assert word in out


def test_unknown_player_argument_is_refused():
    command = [sys.executable, "envs/player.py", "--scene", "Mixed", "--agent", "3"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 2 and "--agent" in out.stderr
