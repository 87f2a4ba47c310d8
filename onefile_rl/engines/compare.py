"""Compare the observations of a Unity build with those of a training run.

`python unity_vec_env.py --path BUILD --compare runs/NAME` lists the inputs of the policy whose values in this build are
far outside their distribution in training.
"""

import math
from pathlib import Path

import numpy as np

from onefile_rl.engines.files import read
from onefile_rl.engines.onnx_files import first_line, start_session

FAR = 5.0  # a value is far if it is more than this many standard deviations of training from the mean of training
OFTEN = 0.01  # an input is reported if its value is far in more than this share of the decisions


ACTIONS = "deterministic_continuous_actions"  # the output of an exported policy


def read_statistics(path):
    """Return the mean of each vector observation in training, and its scale, 1 / std, from a checkpoint."""
    state = read(path)
    try:
        agent = state["kept"]["agent"]
        if "obs_rms.mean" not in agent:
            why = "the run was trained without --norm-obs, so its checkpoint has no statistics of observations"
            raise ValueError(f"--compare {path}: {why}")
        mean = agent["obs_rms.mean"].double().numpy()
        scale = agent["obs_rms.scale"].double().numpy()
        is_valid = mean.ndim == 1 and mean.shape == scale.shape and bool((scale > 0).all())
        is_valid = is_valid and bool(np.isfinite(mean).all() and np.isfinite(scale).all())
    except (AttributeError, KeyError, RuntimeError, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{path} has no valid statistics of observations: give a run's checkpoint")
    return mean, scale


class Trained:
    """Statistics of a run's vector observations in training, and the policy if the run was exported.

    `update` counts how often the observations of a build are far from those of training, and `report` lists the inputs
    for which this happens often.
    """

    entities = {}  # of the build: the columns that are rows of entities, as in a Layout

    def __init__(self, run):
        path = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
        if not path.exists():
            raise ValueError(f"--compare {run}: no checkpoint of a run found")
        self.mean, scale = read_statistics(path)
        self.std = 1 / scale
        self.policy = self.load_policy(path.with_name("policy.onnx"))
        self.clear()

    def load_policy(self, path):
        """Return the exported deterministic policy as a function of vector observations.

        Return None if there is no export, or if the policy needs images or action masks.
        """
        if not path.exists():
            return None
        try:
            session = start_session(path)
        except ValueError as error:
            raise ValueError(f"{path} is not a model that can be run: {error}") from None
        shapes = {inputs.name: inputs.shape for inputs in session.get_inputs()}
        if any(len(shape) > 3 for shape in shapes.values()) or "action_masks" in shapes:
            return None
        dims = [dim for shape in shapes.values() for dim in shape[1:]]
        outputs = [output.name for output in session.get_outputs()]
        is_ours = ACTIONS in outputs and all(isinstance(dim, int) for dim in dims)
        if is_ours:
            sizes = [math.prod(shape[1:]) for shape in shapes.values()]
            is_ours = sum(sizes) == len(self.mean)
        if not is_ours:
            raise ValueError(f"{path} is not the policy of this run: export the run again")
        splits = np.cumsum(sizes)[:-1]

        def policy(obs):
            sensors = np.split(obs, splits, axis=1)
            inputs = {
                name: sensor.reshape(-1, *shape[1:])
                for (name, shape), sensor in zip(shapes.items(), sensors, strict=True)
            }
            try:
                return session.run([ACTIONS], inputs)[0]
            except Exception as error:
                raise ValueError(f"{path} can't be run: {first_line(error)}") from None

        return policy

    def clear(self):
        """Forget all observations of the build."""
        size = len(self.mean)
        self.count = 0
        self.counts = np.zeros(size, int)  # of each input: padding of entities is not counted
        self.sum = 0.0
        self.squares = 0.0
        self.far = np.zeros(size, int)
        self.low = np.full(size, np.inf)
        self.high = np.full(size, -np.inf)

    def start(self, names, entities):
        """Check that the build has as many inputs as the policy. Return the exported policy, or None.

        `entities` are those of the build.
        """
        self.entities = entities
        if len(names) != len(self.mean):
            sizes = f"the run was trained on {len(self.mean)} inputs, this build has {len(names)}"
            raise ValueError(f"--compare: {sizes}: choose the run's scene")
        if self.policy:
            print("Acting with the run's exported policy")
        else:
            print("Acting at random: export the run with --export to act with its policy")
        return self.policy

    def update(self, obs):
        """Add the observations of agents that request a decision, one row per agent."""
        counted = np.ones(obs.shape, bool)
        for first, rows, size in self.entities.values():
            columns = slice(first, first + rows * size)
            is_there = obs[:, columns].reshape(-1, rows, size).any(2)
            counted[:, columns] = np.repeat(is_there, size, axis=1)
        self.count += len(obs)
        self.counts += counted.sum(0)
        self.sum = self.sum + obs.sum(0, float)  # padding is 0
        self.squares = self.squares + (obs.astype(float) ** 2).sum(0)
        self.far += ((np.abs(obs - self.mean) > FAR * self.std) & counted).sum(0)
        self.low = np.minimum(self.low, obs.min(0, initial=np.inf, where=counted))
        self.high = np.maximum(self.high, obs.max(0, initial=-np.inf, where=counted))

    def report(self, names):
        """Return a table of the inputs that are often far from training, the worst first.

        `names` are the names of the sensors that the inputs belong to.
        """
        count = np.maximum(self.counts, 1)
        share = self.far / count
        mean = self.sum / count
        std = np.sqrt(np.maximum(self.squares / count - mean**2, 0))
        worst = [i for i in np.argsort(-share, kind="stable") if share[i] > OFTEN]
        where = f"stds of training in {1 - OFTEN:.0%} of {self.count} decisions"
        if not worst:
            return f"All {len(names)} inputs lie within {FAR:g} {where}"
        lines = [
            f"{len(worst)} of {len(names)} inputs do not lie within {FAR:g} {where}:",
            f"{'input':>7}  {'sensor':30} {'far':>5}  {'training':>20}  {'here':>20}   from .. to",
        ]
        for i in worst:
            training = f"{self.mean[i]:.4g} ± {self.std[i]:.3g}"
            here = f"{mean[i]:.4g} ± {std[i]:.3g}"
            values = f"{self.low[i]:.4g} .. {self.high[i]:.4g}"
            lines.append(
                f"{i:7}  {names[i][:30]:30} {share[i]:5.0%}  {training:>20}  {here:>20}   {values}"
            )
        return "\n".join(lines)
