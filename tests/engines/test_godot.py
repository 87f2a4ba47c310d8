"""Test the bundled scenes in a real Godot: observations, seeds, crashes, and exported policies without Python."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn as nn
from conftest import ROOT, call
from test_hostile import assert_ends

import crossq_continuous as crossq
import ppo_continuous_multiagent as ppo
import ppo_discrete_multiagent as discrete
import ppo_hybrid_multiagent as hybrid
import sac_continuous as sac
from godot_vec_env import GodotVecEnv
from onefile_rl import export
from onefile_rl.engines.godot import GodotError, GodotGone

GODOT = os.environ.get("GODOT") or shutil.which("godot") or shutil.which("godot4")
needs_godot = pytest.mark.skipif(
    not GODOT, reason="no Godot 4 found: set $GODOT, or put `godot` on the PATH"
)
GAME = ROOT / "envs" / "godot_scenes"
DISCS = {"obs_dim": 6, "action_dim": 2, "low": -1.0, "high": 1.0, "sensors": [6], "inputs": ["obs"]}
ROVER = {"obs_dim": 14, "branches": [3, 3], "start": [0, 0], "sensors": [14], "inputs": ["obs"]}
# A rover with continuous actions between its branches, as in game_with_both()
BOTH = {
    "obs_dim": 14,
    "sensors": [14],
    "inputs": ["obs"],
    "action_dim": 2,
    "low": -1.0,
    "high": 1.0,
    "branches": [3, 3],
    "action_order": [["discrete", 3], ["continuous", 2], ["discrete", 3]],
}


def game_with_both(folder):
    """Return a copy of the game in which rovers also have the continuous actions "push", and report them."""
    game = shutil.copytree(GAME, folder / "game")
    source = (game / "rover.gd").read_text()
    push = '"push": {"size": 2, "action_type": "continuous"}, '
    for old, new in (
        ('"drive": {"size": 3', push + '"drive": {"size": 3'),
        (
            '\tsteer = int(action["steer"])\n',
            '\tsteer = int(action["steer"])\n\tprint("push ", action["push"])\n',
        ),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    (game / "rover.gd").write_text(source)
    return game


@pytest.fixture
def open_envs():
    opened = []

    def make(*args, **kwargs):
        opened.append(GodotVecEnv(*args, **kwargs))
        return opened[-1]

    yield make
    for envs in opened:
        envs.close()


def push(obs):
    """Return actions that push the discs to their targets, and brake near them."""
    return np.clip(4 * (obs[:, 2:4] - 0.5 * obs[:, 4:6]), -1, 1)


def record(path, seed, steps=60, **kwargs):
    """Return all observations, rewards and ends as bytes, and the number of episodes that ended."""
    out, ended = b"", 0
    with closing(GodotVecEnv(path, seed=seed, **kwargs)) as envs:
        envs.action_space.seed(3)
        obs, _ = envs.reset()
        out += obs.tobytes()
        for _ in range(steps):
            *arrays, infos = envs.step(envs.action_space.sample())
            ended += int((arrays[2] | arrays[3]).sum())
            finals = [x.tobytes() for x in infos.get("final_obs", []) if x is not None]
            out += b"".join([*(array.tobytes() for array in arrays), *finals])
    return out, ended


# The scenes


@needs_godot
@pytest.mark.parametrize("scene", ["GodotDiscs", "GodotRover"])
def test_runs_with_the_same_seed_are_identical(scene):
    (first, ended), (second, _), (other, _) = (
        record(scene, seed, num_players=2) for seed in (1, 1, 7)
    )
    assert first == second and first != other and ended > 5


@needs_godot
def test_a_disc_ends_at_its_target_outside_or_at_the_time_limit(open_envs):
    """Check the final observation, the type of the end, and the first observation of the next episode."""
    envs = open_envs("GodotDiscs", player_args=["--agents=3"])
    obs, _ = envs.reset()
    ends, total = {}, np.zeros(3)
    while len(ends) < 3:
        actions = push(obs)
        actions[1] = [1, 0]  # to the right, until it is outside
        actions[2] = -2 * obs[2, 4:6]  # stays in place
        before = obs
        obs, reward, terminated, truncated, infos = envs.step(actions)
        total += reward
        for slot in np.flatnonzero(terminated | truncated):
            if slot not in ends:
                ends[slot] = (
                    infos["final_obs"][slot],
                    bool(truncated[slot]),
                    infos["is_success"][slot],
                    total[slot],
                )
                assert np.abs(infos["final_obs"][slot] - before[slot]).max() < 0.5, (
                    "final_obs belongs to the episode that ended"
                )
                assert (obs[slot, 4:6] == 0).all(), "obs belongs to the next episode, at rest"
            total[slot] = 0
    final, cut, success, score = ends[0]
    assert not cut and success and np.hypot(*final[2:4]) < 0.1 and score > 1
    final, cut, success, score = ends[1]
    assert not cut and not success and final[0] > 1 and score < 0.8
    final, cut, success, score = ends[2]
    assert cut and not success and abs(score) < 0.5
    assert infos["final_info"]["episode"]["l"][2] == 200


@needs_godot
def test_no_tick_of_a_new_episode_belongs_to_the_old_action(open_envs):
    """A disc rests between an end and its next decision: the rewards add up to the distance that it moved."""
    envs = open_envs("GodotDiscs", player_args=["--agents=16"])
    obs, _ = envs.reset()
    start, total, seen = np.hypot(*obs[:, 2:4].T), np.zeros(16), 0
    for _ in range(60):
        obs, reward, terminated, truncated, infos = envs.step(push(obs))
        total += reward
        for slot in np.flatnonzero(terminated):
            left = np.hypot(*infos["final_obs"][slot][2:4])
            assert total[slot] == pytest.approx(start[slot] - left + 1, abs=1e-3)
            start[slot], total[slot], seen = np.hypot(*obs[slot, 2:4]), 0, seen + 1
    assert seen > 20


@needs_godot
def test_a_rovers_boost_is_masked_while_its_battery_is_low(open_envs):
    envs = open_envs("GodotRover", player_args=["--agents=4"])
    assert envs.single_action_space.nvec.tolist() == [3, 3]
    obs, infos = envs.reset()
    seen = set()
    for _ in range(60):
        allowed = infos["action_mask"][:, 5]
        assert (allowed == (obs[:, 13] > 0.25)).all() and infos["action_mask"][:, :5].all()
        seen |= set(allowed.tolist())
        actions = np.stack([np.zeros(4, int), np.where(allowed, 2, 1)], 1)  # in circles
        obs, *_, infos = envs.step(actions)
    assert seen == {True, False}


@needs_godot
def test_reset_starts_new_episodes(open_envs):
    envs = open_envs("GodotDiscs", player_args=["--agents=2"])
    first, _ = envs.reset()
    for _ in range(3):
        moved, *_ = envs.step(np.ones((2, 2)))
    obs, infos = envs.reset()
    assert (moved[:, 4:6] > 0).all() and (obs[:, 4:6] == 0).all() and not np.allclose(obs, first)
    assert not infos["closed"].any()


@needs_godot
def test_other_numbers_of_agents_ticks_and_games(open_envs):
    envs = open_envs("GodotDiscs", num_players=2, action_repeat=2, player_args=["--agents=5"])
    obs, _ = envs.reset()
    after, *_ = envs.step(np.ones((10, 2)))
    assert envs.num_envs == 10 and len(np.unique(obs[:, 0])) == 10
    np.testing.assert_allclose(
        after[:, 4:6], 2 * 600 / 60 / 300, rtol=0.05, err_msg="two ticks of force"
    )
    with pytest.raises(GodotError, match="exit code 2: .*--agents=0: there must be at least one"):
        open_envs("GodotDiscs", player_args=["--agents=0"])


@needs_godot
@pytest.mark.skipif(
    not os.environ.get("GODOT_RL_PLUGIN"),
    reason="$GODOT_RL_PLUGIN: a folder with the plugin's addons",
)
def test_the_sync_node_of_the_plugin_works(tmp_path):
    game = shutil.copytree(GAME, tmp_path / "game")
    shutil.copytree(Path(os.environ["GODOT_RL_PLUGIN"]) / "addons", game / "addons")
    subprocess.run(
        [GODOT, "--headless", "--import", "--path", game], capture_output=True, timeout=300
    )
    first, ended = record(str(game), 1, player_args=["--sync=plugin"])
    assert first == record(str(game), 1, player_args=["--sync=plugin"])[0] and ended > 5


# Crashes and hangs


@needs_godot
def test_a_killed_game_is_restarted(open_envs):
    envs = open_envs("GodotDiscs", num_players=2, max_restarts=1, player_args=["--agents=3"])
    envs.reset()
    envs.step(np.zeros((6, 2)))
    envs.players[1].process.kill()
    obs, rewards, terminated, truncated, infos = envs.step(np.zeros((6, 2)))
    assert infos["restarted"].tolist() == [False] * 3 + [True] * 3 == (~infos["closed"]).tolist()
    assert envs.step(np.zeros((6, 2)))[4]["closed"].all() and envs.restarts == 1


@needs_godot
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_game_that_hangs_is_ended_in_time(open_envs):
    envs = open_envs("GodotDiscs")
    envs.reset()
    envs.players[0].timeout = 0.5
    pid = envs.players[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(GodotGone, match="has not answered for 0.5 s"):
        envs.step(np.zeros((16, 2)))
    assert time.monotonic() - start < 30
    assert_ends([pid])


@needs_godot
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_game_ends_when_python_is_killed_and_leaves_no_files():
    before = sorted(GAME.iterdir())
    code = "import os, signal\nfrom godot_vec_env import GodotVecEnv\nenvs = GodotVecEnv('GodotDiscs')\nenvs.reset()\n"
    code += "print(envs.players[0].process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert_ends([int(out.stdout)])
    assert sorted(GAME.iterdir()) == before


# Exported policies


class Other(nn.Module):
    """A network with other layers, one of them without a bias."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.ELU(), nn.Linear(8, 8), nn.ReLU()
        )
        self.head = nn.Linear(8, 2)

    def act(self, obs, deterministic=False):
        return None, torch.sigmoid(self.head(self.net(obs)))


def normalized_by_batches():
    """Return an agent of CrossQ whose policy has statistics of minibatches."""
    agent = crossq.Agent(DISCS, crossq.Args(hidden_sizes=(16, 16), norm_obs=True))
    agent.actor.train()
    for _ in range(100):
        agent.actor(2 * torch.randn(64, DISCS["obs_dim"]) + 1)
    return agent


AGENTS = {
    "ppo": lambda: (ppo.Agent(DISCS, ppo.Args(hidden_sizes=(16, 16))), DISCS),
    "ppo, silu": lambda: (ppo.Agent(DISCS, ppo.Args(hidden_sizes=(16,), activation="silu")), DISCS),
    "sac": lambda: (sac.Agent(DISCS, sac.Args(hidden_sizes=(16, 16), norm_obs=True)), DISCS),
    "crossq": lambda: (normalized_by_batches(), DISCS),
    "a changed copy": lambda: (Other(), DISCS),
    "discrete actions": lambda: (
        discrete.Agent(ROVER, discrete.Args(hidden_sizes=(16, 16))),
        ROVER,
    ),
    "hybrid actions": lambda: (
        hybrid.Agent(BOTH, hybrid.Args(hidden_sizes=(16, 16))),
        BOTH,
    ),
    "two inputs": lambda: (
        ppo.Agent(DISCS, ppo.Args(hidden_sizes=(8,))),
        DISCS | {"sensors": [4, 2], "inputs": ["a", "b"]},
    ),
}


def exported(what, folder):
    """Export an agent with random weights and statistics. Return its spec, observations and deterministic actions."""
    torch.manual_seed(1)
    agent, spec = AGENTS[what]()
    agent.eval()
    with torch.no_grad():
        for x in agent.parameters():
            x.add_(0.5 * torch.randn_like(x))
    if hasattr(agent, "obs_rms"):
        agent.obs_rms.update(3 * torch.randn(100, spec["obs_dim"]) + 1)
    export.export(agent, spec, folder / "policy.onnx")
    export.export_for_gdscript(folder / "policy.onnx", folder / "policy.json")
    obs = 3 * torch.randn(32, spec["obs_dim"])
    masks = [torch.ones(32, sum(spec["branches"]))] if "branches" in spec else []
    with torch.no_grad():
        which = 0 if masks and "low" not in spec else 1
        return spec, obs, agent.act(obs, *masks, deterministic=True)[which].numpy()


def discrete_actions(row, branches):
    """Return the discrete actions that the plugin's Sync node takes from a row of outputs."""
    return [int(np.argmax(part)) for part in np.split(row, np.cumsum(branches)[:-1])]


@pytest.mark.parametrize("what", AGENTS)
def test_the_plugin_can_read_the_exported_graph(what, tmp_path):
    """The graph has inputs named as in get_obs(), state_ins and state_outs, and one row of actions."""
    spec, obs, expected = exported(what, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    assert [x.name for x in session.get_inputs()] == [*spec["inputs"], "state_ins"]
    assert [x.name for x in session.get_outputs()] == ["output", "state_outs"]
    columns = spec.get("action_dim", 0) + sum(spec.get("branches", []))
    assert session.get_outputs()[0].shape[1] == columns
    for row, best in zip(obs.numpy(), expected, strict=True):
        parts = np.split(row[None], np.cumsum(spec["sensors"])[:-1], axis=1)
        inputs = dict(zip(spec["inputs"], parts, strict=True)) | {
            "state_ins": np.ones(1, np.float32)
        }
        (output,), state = session.run(["output", "state_outs"], inputs)
        if "action_order" in spec:
            steer, drive = output[:3], output[5:]
            np.testing.assert_allclose(output[3:5], best[:2], atol=1e-5)
            assert [steer.argmax(), drive.argmax()] == best[2:].tolist()
        elif "branches" in spec:
            assert discrete_actions(output, spec["branches"]) == best.tolist()
        else:
            np.testing.assert_allclose(output, best, atol=1e-5)


@needs_godot
@pytest.mark.parametrize("what", AGENTS)
def test_gdscript_computes_the_actions_of_the_agent(what, tmp_path):
    spec, obs, expected = exported(what, tmp_path)
    rows = [np.split(row, np.cumsum(spec["sensors"])[:-1]) for row in obs.numpy()]
    seen = [
        {name: part.tolist() for name, part in zip(spec["inputs"], row, strict=True)}
        for row in rows
    ]
    (tmp_path / "obs.json").write_text(json.dumps(seen))
    scene = "rover" if "branches" in spec else "discs"
    game = game_with_both(tmp_path) if "action_order" in spec else GAME
    command = [GODOT, "--headless", "--path", game, f"res://{scene}.tscn", "--agents=1"]
    command += [f"--policy={tmp_path / 'policy.json'}", f"--check={tmp_path / 'obs.json'}"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    did = [
        json.loads(line.removeprefix("act "))
        for line in out.splitlines()
        if line.startswith("act ")
    ]
    assert len(did) == len(expected), out
    for action, best in zip(did, expected, strict=True):
        if "branches" in spec:
            assert [action["steer"], action["drive"]] == best[-2:].tolist()
        if "action_dim" in spec:
            np.testing.assert_allclose(action["push"], best[:2], atol=1e-5)


@needs_godot
def test_hybrid_actions_are_trained_evaluated_and_exported_in_a_real_game(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    game = game_with_both(tmp_path)
    line = ["--godot-path", game, "--player-args=res://rover.tscn", "--num-steps", 16]
    line += ["--num-minibatches", 2, "--hidden-sizes", 8, "--total-timesteps", 256]
    call(hybrid, monkeypatch, *line)
    (folder,) = (tmp_path / "runs").iterdir()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert {name: saved["spec"][name] for name in BOTH} == BOTH
    call(hybrid, monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    assert "1 episodes of" in capsys.readouterr().out
    call(hybrid, monkeypatch, "--export", folder)
    command = [GODOT, "--headless", "--path", game, "res://rover.tscn", "--agents=1"]
    command += [f"--policy={folder / 'policy.json'}", "--episodes=1", "--fixed-fps", "60"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    assert "1 episodes, mean return" in out
    assert re.search(r"push \[-?\d\S*, -?\d\S*\]", out), "two numbers"


def test_layers_that_gdscript_does_not_support_are_not_exported(tmp_path):
    class Odd(nn.Module):
        def act(self, obs, deterministic=False):
            return None, torch.sin(obs[:, :2])

    export.export(Odd(), DISCS, tmp_path / "policy.onnx")
    with pytest.raises(ValueError, match="does not support the operator Sin"):
        export.export_for_gdscript(tmp_path / "policy.onnx", tmp_path / "policy.json")
    assert not (tmp_path / "policy.json").exists()


@needs_godot
def test_ppo_learns_the_discs_and_the_exported_policy_works_in_godot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call(ppo, monkeypatch, "--env-id", "GodotDiscs", "--total-timesteps", 16_384, "--no-compile")
    (folder,) = Path("runs").glob("GodotDiscs__*")
    call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", 48)
    words = capsys.readouterr().out.split("return ")[-1]
    assert float(words.split(" ±")[0]) > 1.6
    call(ppo, monkeypatch, "--export", folder)
    command = [
        GODOT,
        "--headless",
        "--fixed-fps",
        "60",
        "--path",
        GAME,
        f"--policy={folder.resolve() / 'policy.json'}",
    ]
    out = subprocess.run(
        [*command, "--episodes=48"], capture_output=True, text=True, timeout=300
    ).stdout
    line = next(line for line in out.splitlines() if "episodes, mean return" in line)
    assert float(line.split("mean return ")[1].split(",")[0]) > 1.6, line


@needs_godot
@pytest.mark.skipif(not shutil.which("xvfb-run"), reason="no display: apt-get install xvfb")
def test_the_rovers_have_camera_images_under_xvfb(tmp_path):
    """Each rover has its own image in colour."""
    code = """
import numpy as np
from godot_vec_env import GodotVecEnv
envs = GodotVecEnv("GodotRover", headless=False, player_args=["--camera=40", "--agents=3", "--disable-render-loop"])
obs, _ = envs.reset()
after, *_ = envs.step(np.array([[0, 1], [1, 1], [2, 1]]))
envs.close()
for seen in (obs["camera_2d"], after["camera_2d"]):
    assert seen.shape == (3, 40, 40, 3) and seen.dtype == np.uint8
    assert all(picture.std() > 5 for picture in seen), "not one colour"
    assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])
assert (obs["camera_2d"] != after["camera_2d"]).any((1, 2, 3)).all(), "they moved"
sky, ground = seen[:, 2].mean((0, 1)), seen[:, -2].mean((0, 1))
assert sky[2] > sky[0] + 20 and sky[2] > 180, f"the sky is above, and blue: {sky}"
"""
    out = subprocess.run(
        ["xvfb-run", "-a", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
