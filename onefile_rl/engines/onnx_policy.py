"""Exported policies that play the agents that are not trained, as Unity plays them in inference."""

import math
import re
from pathlib import Path

import numpy as np

from onefile_rl.engines.limits import LARGEST
from onefile_rl.engines.onnx_files import first_line, start_session
from onefile_rl.engines.printing import printable
from onefile_rl.engines.process import PlayerError

# NAME or NAME?team=NUMBER, then the path, in which there may be more equals signs
OTHER = re.compile(r"(.+?(?:\?team=\d+)?)=(.+)")
LARGEST_MEMORY_SIZE = 1_000_000  # numbers that an LSTM remembers of an agent


class PolicyError(PlayerError):
    """A policy that can't play the agents of a behavior."""


def parse_others(words):
    """Return a dict from behavior to path, from words such as Goalie=policy.onnx or Goalie?team=1=runs/NAME."""
    others = {}
    for word in words:
        match = OTHER.fullmatch(word)
        if not match:
            raise ValueError(f"{word!r} is not NAME=FILE")
        others[match[1]] = match[2]
    return others


def find_policy(name, path):
    """Return the ONNX file of `--others NAME=PATH`, where PATH is the file or the folder of a run.

    A run's checkpoint is not loaded: to act with it is to run its script. The policy that the run has exported is data.
    """
    file = Path(path)
    if file.is_dir():
        if not (file / "policy.onnx").is_file():
            what = "the run has no policy.onnx, write it with"
            raise ValueError(f"--others {name}={path}: {what}: {export_command(path)}")
        return file / "policy.onnx"
    if not file.is_file():
        fix = "give an .onnx file or the folder of a run"
        raise ValueError(f"--others {name}={path}: there is no such file: {fix}")
    return file


def export_command(folder):
    """Return the command that exports a run. A run's folder contains its script."""
    scripts = sorted(script.name for script in Path(folder).glob("*.py"))
    return f"python {scripts[0] if scripts else 'SCRIPT.py'} --export {folder}"


class OnnxPolicy:
    """The model in an ONNX file, with the inputs and outputs of ML-Agents' models (see export.UnityGraph).

    As Unity does unless Deterministic Inference is set, it samples actions. The memory of a model with an LSTM is kept
    for each agent from the start to the end of its episodes.

    Args:
        name: the behavior, for messages
        path: the ONNX file or the folder of a run
        seed: the seed of the sampled actions
    """

    def __init__(self, name, path, seed):
        file = find_policy(name, path)
        self.path = path
        self.given = f"--others {name}={path}"
        checkpoint = file.with_name("checkpoint.pt")
        self.notice = None
        if checkpoint.is_file() and checkpoint.stat().st_mtime > file.stat().st_mtime:
            newer = "the run's checkpoint is newer than its policy.onnx, write it again with"
            self.notice = f"{self.given}: {newer}: {export_command(file.parent)}"
        try:
            self.session = start_session(file, seed)
        except ValueError as error:
            raise ValueError(f"{self.given}: {error}") from None

        self.shapes = {x.name: x.shape[1:] for x in self.session.get_inputs()}
        outputs = {x.name for x in self.session.get_outputs()}
        self.kinds = [kind for kind in ("continuous", "discrete") if f"{kind}_actions" in outputs]
        self.outputs = [f"{kind}_actions" for kind in self.kinds]
        if not self.kinds:
            missing = "it has no output continuous_actions or discrete_actions"
            raise ValueError(f"{self.given}: {missing}: export it with this project or ML-Agents")
        self.memory = {}  # from the id of an agent to its memory
        if "recurrent_in" in self.shapes:
            self.outputs.append("recurrent_out")
            sizes = self.shapes["recurrent_in"]
            if not all(isinstance(size, int) for size in sizes):
                raise ValueError(f"{self.given}: its input recurrent_in has no fixed size")
            if not 0 < math.prod(sizes) <= LARGEST_MEMORY_SIZE:
                what = f"its input recurrent_in has the shape {sizes}"
                raise ValueError(f"{self.given}: {what}, more than {LARGEST_MEMORY_SIZE:,} numbers")

    def forget_all(self):
        """Clear the memory of all agents."""
        self.memory = {}

    def forget(self, agents):
        """Clear the memory of agents whose episodes ended."""
        for agent in agents:
            self.memory.pop(agent, None)

    def act(self, agents, observations, allowed, continuous, branches):
        """Return the continuous and the discrete actions, arrays with one row for each of `agents`.

        Args:
            agents: the ids of the agents
            observations: one array per sensor, with one row per agent; images are (channels, height, width), from 0
            to 1
            allowed: one row per agent, True where a discrete action is allowed
            continuous: the number of continuous actions that the behavior has
            branches: the number of options of each discrete action that the behavior has
        """
        inputs = self._inputs(agents, observations, allowed)
        try:
            outputs = dict(zip(self.outputs, self.session.run(self.outputs, inputs), strict=True))
        except Exception as error:
            raise PolicyError(f"{self.given}: onnxruntime: {first_line(error)}") from None
        for output, array in outputs.items():
            is_array = isinstance(array, np.ndarray) and array.dtype.kind in "iuf"
            if not is_array or array.ndim < 2 or len(array) != len(agents):
                what = f"the output {output} must be an array of numbers with one row per agent"
                raise PolicyError(f"{self.given}: {what}: choose a model of this behavior")
        if "recurrent_out" in outputs:
            expected = (len(agents), *self.shapes["recurrent_in"])
            if outputs["recurrent_out"].shape != expected:
                sizes = f"{list(outputs['recurrent_out'].shape)}, recurrent_in {list(expected)}"
                what = f"the output recurrent_out has the shape {sizes}"
                raise PolicyError(f"{self.given}: {what}: they must be equal")
            self.memory |= zip(agents, outputs["recurrent_out"], strict=True)

        sizes = {"continuous": continuous, "discrete": len(branches)}
        actions = {}
        for kind, size in sizes.items():
            chosen = outputs.get(f"{kind}_actions")
            if (kind in self.kinds) != (size > 0) or (size and chosen.shape[1:] != (size,)):
                theirs = chosen.shape[1] if kind in self.kinds else "no"
                what = f"the model has {theirs} {kind} actions, the behavior {size}"
                raise PolicyError(f"{self.given}: {what}: choose a model of this behavior")
            actions[kind] = chosen if size else np.zeros((len(agents), 0))
        if not (np.abs(actions["continuous"]) <= LARGEST).all():  # False for NaN too
            raise PolicyError(
                f"{self.given}: the model's actions are not finite or beyond {LARGEST:g}"
            )
        discrete = actions["discrete"].astype(int)
        if not ((discrete >= 0) & (discrete < np.array(branches, int))).all():
            what = f"the model chooses {discrete.max(0).tolist()}, the branches are {branches}"
            raise PolicyError(f"{self.given}: {what}: choose a model of this behavior")
        return actions["continuous"], discrete

    def _inputs(self, agents, observations, allowed):
        inputs = {f"obs_{i}": array for i, array in enumerate(observations)}
        if "action_masks" in self.shapes:
            inputs["action_masks"] = allowed
        if "recurrent_in" in self.shapes:
            shape = self.shapes["recurrent_in"]
            new = np.zeros(shape, np.float32)
            inputs["recurrent_in"] = np.stack([self.memory.get(agent, new) for agent in agents])
        if inputs.keys() != self.shapes.keys():
            theirs = printable(", ".join(sorted(self.shapes)))[:200]
            what = f"the model has the inputs {theirs}, the behavior {', '.join(sorted(inputs))}"
            raise PolicyError(f"{self.given}: {what}: choose a model of this behavior")
        for name, array in inputs.items():
            theirs = self.shapes[name]
            if len(theirs) == 1:  # a matrix may be flat in the model
                array = array.reshape(len(array), -1)
            ours = array.shape[1:]
            # A size that is not fixed has a name instead of a number
            fits = len(theirs) == len(ours) and all(
                a == b for a, b in zip(theirs, ours, strict=True) if isinstance(a, int)
            )
            if not fits:
                sizes = f"{printable(theirs)} in the model and {list(ours)} in the game"
                what = f"the input {name} has the shape {sizes}"
                raise PolicyError(f"{self.given}: {what}: choose a model of this behavior")
            inputs[name] = array.astype(np.float32)
        return inputs
