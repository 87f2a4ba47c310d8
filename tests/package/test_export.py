"""Export of a policy: the JSON for Godot. tests/engines/test_godot.py runs it in a real Godot."""

import json

import numpy as np
import pytest
import torch

import ppo_continuous_multiagent as ppo
from onefile_rl import export


@pytest.mark.parametrize("action_dim", [1, 2])
def test_weights_are_matrices_and_other_constants_are_vectors(action_dim, tmp_path):
    """Also in a layer with a single output. The steps give the actions of the agent."""
    spec = {
        "obs_dim": 3,
        "sensors": [3],
        "inputs": ["obs"],
        "action_dim": action_dim,
        "low": -1.0,
        "high": 1.0,
    }
    agent = ppo.Agent(spec, ppo.Args(hidden_sizes=(4,)))
    torch.nn.init.normal_(agent.actor_mean[-1].weight)
    export.export(agent, spec, tmp_path / "policy.onnx")
    export.export_for_gdscript(tmp_path / "policy.onnx", tmp_path / "policy.json")
    program = json.loads((tmp_path / "policy.json").read_text())

    weights = {step["in"][1] for step in program["steps"] if step["op"] == "Gemm"}
    dimensions = {name: np.ndim(value) for name, value in program["constants"].items()}
    assert len(weights) == 2
    assert dimensions == {name: 2 if name in weights else 1 for name in dimensions}

    values = {name: np.array(value) for name, value in program["constants"].items()} | {
        "obs": np.array([0.3, -0.5, 1.0])
    }
    operators = {
        "Gemm": lambda step, x, weight, bias: weight @ x + bias,
        "Sub": lambda step, x, y: x - y,
        "Mul": lambda step, x, y: x * y,
        "Clip": lambda step, x: x.clip(step["min"], step["max"]),
        "Max": lambda step, x, y: np.maximum(x, y),
        "Min": lambda step, x, y: np.minimum(x, y),
        "Tanh": lambda step, x: np.tanh(x),
    }
    for step in program["steps"]:
        values[step["out"]] = operators[step["op"]](step, *(values[name] for name in step["in"]))
    with torch.no_grad():
        expected = agent.act(torch.tensor([[0.3, -0.5, 1.0]]), deterministic=True)[1][0]
    np.testing.assert_allclose(values["output"], expected, atol=1e-5)
