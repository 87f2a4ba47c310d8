"""Compare the observations of a Unity build with those of a training run.

`python unity_vec_env.py --path BUILD --compare runs/NAME` lists the inputs of the policy whose values in this build are
far outside their distribution in training.
"""

from pathlib import Path

import numpy as np

from onefile_rl.engines.printing import printable

FAR = 5.0  # a value is far if it is more than this many standard deviations of training from the mean of training
OFTEN = 0.01  # an input is reported if its value is far in more than this share of the decisions


class Trained:
    """Statistics of a run's vector observations in training, and the policy if the run was exported.

    `update` counts how often the observations of a build are far from those of training, and `report` lists the inputs
    for which this happens often.
    """

    def __init__(self, run):
        import torch

        path = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
        try:
            agent = torch.load(path, map_location="cpu", weights_only=True)["kept"]["agent"]
        except Exception:
            raise ValueError(f"--compare {run}: no checkpoint of a run found") from None
        if "obs_rms.mean" not in agent:
            why = "the run was trained without --norm-obs, so its checkpoint has no statistics of observations"
            raise ValueError(f"--compare {run}: {why}")
        self.mean = agent["obs_rms.mean"].numpy()
        self.std = 1 / agent["obs_rms.scale"].double().numpy()
        self.policy = self.load_policy(path.with_name("policy.onnx"))
        self.clear()

    def load_policy(self, path):
        """Return the exported deterministic policy as a function of vector observations.

        Return None if there is no export, or if the policy needs images or action masks.
        """
        import onnxruntime

        if not path.exists():
            return None
        try:
            session = onnxruntime.InferenceSession(path)
        except Exception as error:
            reason = printable((str(error).splitlines() or [""])[0])[:200]
            raise ValueError(f"{path} is not a model that onnxruntime can run: {reason}") from None
        shapes = {inputs.name: inputs.shape for inputs in session.get_inputs()}
        if any(len(shape) != 2 for shape in shapes.values()) or "action_masks" in shapes:
            return None
        splits = np.cumsum([shape[1] for shape in shapes.values()])[:-1]

        def policy(obs):
            sensors = np.split(obs, splits, axis=1)
            inputs = dict(zip(shapes, sensors, strict=True))
            return session.run(["deterministic_continuous_actions"], inputs)[0]

        return policy

    def clear(self):
        """Forget all observations of the build."""
        size = len(self.mean)
        self.count = 0
        self.sum = 0.0
        self.squares = 0.0
        self.far = np.zeros(size, int)
        self.low = np.full(size, np.inf)
        self.high = np.full(size, -np.inf)

    def start(self, names):
        """Check that the build has as many inputs as the policy. Return the exported policy, or None."""
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
        self.count += len(obs)
        self.sum = self.sum + obs.sum(0, float)
        self.squares = self.squares + (obs.astype(float) ** 2).sum(0)
        self.far += (np.abs(obs - self.mean) > FAR * self.std).sum(0)
        if len(obs):
            self.low = np.minimum(self.low, obs.min(0))
            self.high = np.maximum(self.high, obs.max(0))

    def report(self, names):
        """Return a table of the inputs that are often far from training, the worst first.

        `names` are the names of the sensors that the inputs belong to.
        """
        share = self.far / self.count
        mean = self.sum / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
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
