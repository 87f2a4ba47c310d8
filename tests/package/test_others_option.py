"""--others on the command line: training, checkpoints, resume and evaluation carry the policies of other behaviors."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import ScriptedPlayer, agent, assert_refused, call
from onnx import TensorProto, helper

import ppo_continuous_multiagent as ppo

pytestmark = pytest.mark.usefixtures("empty_folder")
NAME = "Runner?team=0"
OTHER = "Chaser?team=1"
LINE = """--hidden-sizes 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --no-compile --max-restarts 0
    --unity-path editor --behavior Runner"""


def save_policy(path, factor):
    """Write a policy whose actions are a multiple of the observations."""
    number = helper.make_tensor("number", TensorProto.FLOAT, [1], [factor])
    nodes = [
        helper.make_node("Constant", [], ["number"], value=number),
        helper.make_node("Mul", ["obs_0", "number"], ["continuous_actions"]),
    ]
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2])
    graph = helper.make_graph(nodes, "policy", [value("obs_0")], [value("continuous_actions")])
    opset = [helper.make_opsetid("", 9)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=6), path)


class Game:
    """A scripted player with two runners, whose episodes end after ten decisions, and a chaser."""

    def __init__(self):
        script = []
        for step in range(200):
            ended = (
                [agent(i, [[step, i]], 1.0, done=True) for i in (0, 1)] if step % 10 == 9 else []
            )
            runners = [agent(i, [[step, i]], 1.0) for i in (0, 1)]
            script.append({NAME: ended + runners, OTHER: [agent(5, [[1.0, step]])]})
        self.player = ScriptedPlayer(script, specs={NAME: (2, ()), OTHER: (2, ())})

    def factors(self):
        """How the chaser's actions were related to its observations."""
        self.player.thread.join(60)
        actions = [reply.agent_actions[OTHER].value for reply in self.player.replies]
        played = [list(rows[0].continuous_actions) for rows in actions if rows]
        assert len(played) > 5
        observed = [[1.0, step] for step, rows in enumerate(actions) if rows]
        factors = [action[0] for action in played]
        np.testing.assert_allclose(np.array(observed) * np.array(factors)[:, None], played)
        return set(factors)


def run(monkeypatch, *line):
    game = Game()
    call(ppo, monkeypatch, *line, "--base-port", game.player.port)
    return game.factors()


def test_a_run_its_evaluation_and_its_continuation_play_against_the_policy(monkeypatch, capsys):
    save_policy("two.onnx", 2.0)
    line = [*LINE.split(), "--total-timesteps", 32]
    assert run(monkeypatch, *line, "--others", "Chaser=two.onnx") == {2.0}
    (folder,) = Path("runs").iterdir()
    args = torch.load(folder / "checkpoint.pt", weights_only=True)["args"]
    assert args["others"] == {"Chaser": "two.onnx"}
    assert "agents of Chaser?team=1 act with two.onnx" in capsys.readouterr().out
    assert run(monkeypatch, "--evaluate", folder, "--eval-episodes", 2) == {2.0}
    assert run(monkeypatch, "--resume", folder, "--total-timesteps", 48) == {2.0}

    # Another opponent for the rest of the run, and for its evaluation
    save_policy("three.onnx", 3.0)
    line = ["--resume", folder, "--total-timesteps", 64, "--others", "Chaser=three.onnx"]
    assert run(monkeypatch, *line) == {3.0}
    assert run(monkeypatch, "--evaluate", folder, "--eval-episodes", 2) == {3.0}


def test_bad_options_are_one_line_before_any_work_starts(tmp_path):
    small = "--total-timesteps 32 --num-steps 8 --num-minibatches 2"
    refused = lambda line, match: assert_refused(ppo, f"{line} {small}", match, tmp_path)
    refused("--env-id 3DBall --others A=no.onnx", "--others A=no.onnx: there is no such file")
    refused("--env-id Pendulum-v1 --others A=no.onnx", "--others is for the behaviors of Unity")
    refused("--godot-path . --others A=no.onnx", "--others is for the behaviors of Unity")
    refused("--env-id Pendulum-v1 --image-order channels-last", "--image-order is for Unity")


def test_an_export_needs_no_opponent(monkeypatch):
    save_policy("two.onnx", 2.0)
    line = [*LINE.split(), "--total-timesteps", 32]
    run(monkeypatch, *line, "--others", "Chaser=two.onnx")
    Path("two.onnx").unlink()
    (folder,) = Path("runs").iterdir()
    call(ppo, monkeypatch, "--export", folder)
    assert (folder / "policy.onnx").exists()
    with pytest.raises(SystemExit, match="--others Chaser=two.onnx: there is no such file"):
        call(ppo, monkeypatch, "--evaluate", folder)
