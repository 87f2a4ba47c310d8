"""What a policy sees in this build, beside what it saw in training: inputs whose values it has never met. For
`python unity_vec_env.py --path BUILD --compare runs/NAME`."""

from pathlib import Path

import numpy as np

FAR, OFTEN = 5.0, 0.01  # stds of training from its mean; in more than this share of decisions


class Trained:
    """A run's statistics of its vector observations, and its policy if it was exported."""

    def __init__(self, run):
        import torch

        path = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
        try:
            agent = torch.load(path, map_location="cpu", weights_only=True)["kept"]["agent"]
        except Exception:
            raise ValueError(f"--compare {run}: no checkpoint of a run there") from None
        if "obs_rms.mean" not in agent:
            raise ValueError(f"--compare {run}: it was trained without --norm-obs, so what it saw was not kept")
        self.mean, self.std = agent["obs_rms.mean"].numpy(), 1 / agent["obs_rms.scale"].double().numpy()
        self.act = self.exported(path.with_name("policy.onnx"))
        self.clear()

    def exported(self, path):
        """The deterministic policy as a function of vectors, as Unity would run it."""
        import onnxruntime

        if not path.exists():
            return None
        session = onnxruntime.InferenceSession(path)
        sizes = {given.name: given.shape for given in session.get_inputs()}
        if any(len(shape) != 2 for shape in sizes.values()) or "action_masks" in sizes:
            return None
        cuts = np.cumsum([shape[1] for shape in sizes.values()])[:-1]
        feed = lambda obs: dict(zip(sizes, np.split(obs, cuts, axis=1), strict=True))
        return lambda obs: session.run(["deterministic_continuous_actions"], feed(obs))[0]

    def clear(self):
        self.count, self.sum, self.squares, self.far = 0, 0.0, 0.0, np.zeros(len(self.mean), int)
        self.low, self.high = np.full(len(self.mean), np.inf), np.full(len(self.mean), -np.inf)

    def start(self, names):
        """Who is to act: the policy, or nobody."""
        if len(names) != len(self.mean):
            raise ValueError(f"--compare: the run's policy saw {len(self.mean)} numbers, this build sends {len(names)}")
        print("The run's exported policy acts" if self.act else "Random actions: --export the run, and its policy acts")
        return self.act

    def see(self, obs):
        self.count += len(obs)
        self.sum, self.squares = self.sum + obs.sum(0, float), self.squares + (obs.astype(float) ** 2).sum(0)
        self.far += (np.abs(obs - self.mean) > FAR * self.std).sum(0)
        if len(obs):
            self.low, self.high = np.minimum(self.low, obs.min(0)), np.maximum(self.high, obs.max(0))

    def report(self, names):
        """The inputs that are often far away from what training had, the worst first."""
        share, mean = self.far / self.count, self.sum / self.count
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
            there, here = f"{self.mean[i]:.4g} ± {self.std[i]:.3g}", f"{mean[i]:.4g} ± {std[i]:.3g}"
            ends = f"{self.low[i]:.4g} .. {self.high[i]:.4g}"
            lines.append(f"{i:7}  {names[i][:30]:30} {share[i]:5.0%}  {there:>20}  {here:>20}   {ends}")
        return "\n".join(lines)
