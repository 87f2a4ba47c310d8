"""How near a bundled scene is to Unity's: scores and the distribution of every observation, beside those of a real
Unity player.

    python benchmarks/scene_fidelity.py --scene 3DBall                         random actions, seconds
    python benchmarks/scene_fidelity.py --scene 3DBall --onnx 3DBall.onnx      and ML-Agents' own policy, minutes
    python benchmarks/scene_fidelity.py --scene Crawler --onnx Crawler.onnx

The shipped policies lie in ML-Agents' repository, Project/Assets/ML-Agents/Examples/<scene>/TFModels/. They were
trained in Unity, so what they score here tells how much of Unity is here. Every agent plays the same number of
episodes, and all of these count: taking the first N to finish would favour short ones. The exit code is 1 if a
threshold is missed.
"""

import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from unity_vec_env import UnityVecEnv


@dataclass
class Args:
    scene: Literal["3DBall", "Crawler"] = "3DBall"
    """the bundled scene to compare with Unity's"""
    onnx: Path | None = None
    """the policy that ML-Agents ships for this scene; without it, only random actions are compared"""
    episodes: int = 100
    """how many of the shipped policy (1000 decisions each if nobody falls), ten times as many under random actions;
    rounded up to equal shares of the agents"""
    seed: int = 1
    """of the scene, the random actions and the policy's noise"""


# Episodes, return mean and std, length mean and median, share ended by MaxStep; nan: not kept.
# Unity with the ML-Agents C# package 2.2.1, decision period 5, MaxStep 5000; actions uniform in [-1, 1], or sampled
# from the shipped policy.
UNITY = {
    ("3DBall", "random"): {"Unity": (289, 0.93, 0.57, 20.3, 19, 0.0)},
    ("3DBall", "onnx"): {"Unity": (13, 92.6, 25.6, 927, 1000, 0.92)},
    ("Crawler", "random"): {
        "Unity": (438, -0.72, 1.40, 13.3, 8, 0.0),
        "Unity, longer": (1502, -0.71, math.nan, 14.8, math.nan, 0.0),
    },
    ("Crawler", "onnx"): {
        "Unity": (10, 2475, 740, 1000, 1000, 1.0),
        "Unity, longer": (92, 2003, math.nan, 985, math.nan, 0.97),
    },
}

# name, which figure, from, to
THRESHOLDS = {
    ("3DBall", "random"): [("return", 0, 0.83, 1.03), ("length", 2, 17, 23)],
    ("3DBall", "onnx"): [("return", 0, 90, math.inf)],
    # Unity's lengths are 13 to 15, give or take 4.
    ("Crawler", "random"): [("return", 0, -1.1, -0.3), ("length", 2, 9, 19)],
    ("Crawler", "onnx"): [("return", 0, 1900, math.inf), ("full length", 4, 0.95, 1)],
}

# Mean and std of every observation that asked for an action, in the order of the observation.
# The recorded Crawler's target sometimes fell through the ground, down to -9773 m: hence its mean height and the huge
# std.
UNITY_OBSERVATIONS = {
    ("3DBall", "random"): (
        "-.000718 .00111 -.096 3.06 .0109 -.0631 -1.42 .00708",
        ".135 .125 1.27 .57 1.26 1.35 1.19 1.28",
    ),
    ("3DBall", "onnx"): (
        "0 .0012 .0187 3.03 -.301 .00202 -.142 -.00983",
        ".0348 .0325 .361 .0853 .362 .187 .341 .207",
    ),
    ("Crawler", "random"): (
        """
        0 -.0227 0 0 .306 -.000558 .171 -.08 .0526 -.00414 -.144 .184 .113 .232 -.166 -.21 -.00446 -.241 .0985 .191 .125
        -.00367 .0595 .0833 -.0221 .295 .182 .035 -.00115 -.201 .167 -.0365 .157 .305 .0187 .0832 .0467 .00449 .115 .235
        .144 -.184 .163 -.219 .0096 .193 .124 .244 -.0948 .00547 .0513 -.0817 -.175 -.0349 -.0195 .298 .0115 -.207 -.17
        -.305 -.0213 -.0343 .155 .0196 -1.8 -.0196 .0208 -1.51 -.023 .0497 -1.5 -.0164 .0159 -1.53 -.0214 .0099 -1.53
        -.0438 .0146 -1.51 -.0244 -.0215 -1.5 -.024 .0216 -1.53 -.0267 .0256 -1.57 -.00799 0 .306 -.000558 .171 -.48
        -.324 -.2 .782 -.51 0 0 .828 -.482 .324 .2 .781 -.512 0 0 .826 -.198 .784 .478 .324 -.509 0 0 .829 -.192 -.791
        -.463 .328 -.518 0 0 .822 8.13 .0174 -1.55 -.023 0 0 7.5 .00783 .249 .0156 .517 0 -59.7 30.6 .123 0 0 .495 .279
        .504 0 .498 .28 .502 0 .5 .288 .494 0 .498 .28 .502
        """,
        """
        .00669 .0268 .00702 .0667 .66 .0653 .658 .578 .121 .596 .344 .568 .357 .556 1.18 .205 1.21 .577 .324 .589 .311
        .596 .125 .576 .352 .557 .345 .57 1.21 .21 1.17 .588 .314 .577 .322 .578 .119 .595 .356 .554 .348 .568 1.18 .198
        1.21 .589 .312 .575 .322 .591 .122 .572 .34 .569 .352 .561 1.21 .204 1.17 .576 .319 .589 .318 .564 2.04 .574
        .708 2.34 .722 1.72 3.13 1.72 .721 2.31 .723 1.73 3.12 1.71 .711 2.31 .707 1.71 3.06 1.7 .71 2.3 .721 1.63 3.08
        1.63 .0667 .66 .0653 .658 .0804 .0309 .0508 .051 .199 .0187 .0128 .116 .0787 .0311 .0503 .0495 .201 .0184 .0129
        .117 .0503 .0513 .0827 .0313 .198 .0182 .0126 .113 .0517 .0557 .0909 .0325 .204 .00398 .00165 .12 4.15 .565 1.93
        .567 0 0 4.41 .147 .646 .178 .447 .0449 267 14.9 .0541 0 0 .29 .448 .291 0 .288 .449 .289 0 .287 .453 .29 0 .289
        .449 .288
        """,
    ),
    ("Crawler", "onnx"): (
        """
        -.00202 0 .0357 -.0212 .0486 .00674 -.0714 .39 .0953 -.281 .0185 .0576 .0434 -.0425 .76 -.291 -.534 .0406 .00782
        .0706 -.0256 -.272 .116 -.409 .0273 .0206 -.000797 -.0799 -.546 -.271 -.784 .0738 .0104 .0151 -.0406 -.414 .185
        .337 .00485 -.0385 -.0302 -.0653 -.752 -.161 .595 .0473 -.0267 -.0395 -.0524 .239 .147 .491 -.0253 .0766 .0358
        .0122 .436 -.142 .955 -.0308 .0626 .0624 -.0199 -.157 .0212 2.86 -.0485 -.0153 2.72 -.0328 .092 2.67 -.233
        -.0432 2.73 -.262 .117 2.68 -.28 -.0257 2.95 -.228 .0699 2.77 -.0707 -.0855 3.06 -.0874 .00926 2.95 -.0212 .0486
        .00674 -.0714 -.424 -.32 -.125 .833 -.676 .00157 .000882 .713 -.444 .324 .158 .816 -.666 -.000517 0 .72 -.167
        .821 .423 .336 -.704 -.00217 -.00168 .683 -.127 -.829 -.432 .319 -.639 0 0 .732 3.88 -.155 .0156 2.82 0 0 6.28
        .00349 .161 .00353 .837 -.00495 -420 22.3 .0983 0 0 .423 .593 .471 0 .486 .469 .451 0 .48 .448 .554 0 .526 .39
        .513
        """,
        """
        .0129 .0109 .0344 .0699 .423 .0894 .895 .447 .0913 .412 .397 .469 .271 .736 .827 .108 .817 .792 .223 .493 .27
        .403 .121 .448 .423 .414 .238 .765 .767 .131 .868 .823 .189 .439 .295 .446 .108 .419 .225 .736 .378 .508 .866
        .197 .768 .517 .297 .771 .205 .402 .116 .47 .185 .783 .413 .417 .788 .223 .878 .416 .374 .802 .186 .99 .856 2.51
        1.03 1.21 2.52 1.5 1.41 3 1.06 1.66 2.59 1.47 2.08 3.12 1.1 1.29 2.54 1.82 2.71 2.89 1.12 1.48 2.55 1.52 2.73
        3.01 .0699 .423 .0894 .895 .0609 .0284 .0535 .0304 .134 .0193 .0165 .123 .0578 .024 .0477 .0305 .143 .0137 .0113
        .136 .0496 .0296 .0555 .0267 .141 .0175 .0169 .129 .0564 .033 .0579 .0282 .184 .0036 .00218 .15 4.09 .917 .784
        2.46 0 0 4.39 .113 .363 .125 .337 .641 1.06e+03 16.4 .0148 0 0 .215 .491 .215 0 .192 .499 .218 0 .173 .497 .166
        0 .203 .488 .213
        """,
    ),
}


def groups(scene):
    """What the observations are: name and indices."""
    if scene == "3DBall":
        ball = (f"ball {what}{axis}" for what in ("", "velocity ") for axis in "xyz")
        names = ("platform rotation z", "platform rotation x", *ball)
        return [(name, [i]) for i, name in enumerate(names)]
    whats = (("position", 0, 7, 3), ("rotation", 3, 7, 4), ("velocity", 63, 3, 3), ("local rotation", 90, 4, 4))
    out = []
    for name, parts in (("body", [0]), ("upper legs", [1, 3, 5, 7]), ("lower legs", [2, 4, 6, 8])):
        for what, start, stride, size in whats:
            out.append((f"{name}: {what}", [start + stride * part + k for part in parts for k in range(size)]))
    out += [("speed off the goal", [126]), ("average velocity", [127, 128, 129]), ("goal velocity", [130, 131, 132])]
    out += [("rotation to the goal", [133, 134, 135, 136]), ("target x, z", [137, 139]), ("target height", [138])]
    out += [("ray down", [140]), ("body touches", [141])]
    for i, name in enumerate(("upper legs touch", "upper legs' strength", "lower legs touch", "lower legs' strength")):
        out.append((name, [142 + i + 4 * leg for leg in range(4)]))
    return out


def load(path, seed, observations, actions):
    """The policy as a function of observations; it samples its actions, as in Unity."""
    import onnxruntime

    if not path.is_file():
        where = "ML-Agents ships one per scene, in Project/Assets/ML-Agents/Examples/<scene>/TFModels/."
        raise SystemExit(f"--onnx {path}: no such file. {where}")
    onnxruntime.set_seed(seed)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(path, options)
    except Exception as error:
        raise SystemExit(f"--onnx {path}: not a model that onnxruntime can run: {str(error).splitlines()[0]}") from None
    inputs, outputs = {i.name: i.shape for i in session.get_inputs()}, {o.name: o.shape for o in session.get_outputs()}
    sizes = {f"obs_{i}": inputs.get(f"obs_{i}", [None])[-1] for i in range(len(inputs))}  # one per sensor
    taken = sum(size if isinstance(size, int) else -math.inf for size in sizes.values())
    if taken != observations or outputs.get("continuous_actions", [None])[-1] != actions:
        must = f"{observations} numbers as obs_0, obs_1, ... must give {actions} continuous_actions"
        raise SystemExit(f"--onnx {path}: {must}; it takes {inputs}")
    cuts = np.cumsum(list(sizes.values()))[:-1]
    feed = lambda obs: dict(zip(sizes, np.split(obs, cuts, axis=1), strict=True))
    return lambda obs: session.run(["continuous_actions"], feed(obs))[0]


def run(scene, name, policy, episodes, seed, player_args=()):
    """Play until every agent has finished its share of episodes: their returns, lengths and ends, and the observations'
    mean and std."""
    returns, lengths, interrupted, start, told = [], [], [], time.time(), time.time()
    with closing(UnityVecEnv(scene, seed=seed, player_args=player_args)) as envs:
        share = -(-episodes // envs.num_envs)
        finished, steps = np.zeros(envs.num_envs, int), 0
        shape = envs.single_observation_space.shape
        count, total, squares = 0, np.zeros(shape), np.zeros(shape)
        obs, infos = envs.reset()
        while (finished < share).any():
            asking = obs[infos["ready"] & (finished < share)].astype(float)
            count, total, squares = count + len(asking), total + asking.sum(0), squares + (asking**2).sum(0)
            obs, _, terminated, truncated, infos = envs.step(policy(obs))
            steps += 1
            for slot in np.flatnonzero((terminated | truncated) & (finished < share)):
                finished[slot] += 1
                returns.append(infos["final_info"]["episode"]["r"][slot])
                lengths.append(infos["final_info"]["episode"]["l"][slot])
                interrupted.append(truncated[slot])
            if time.time() - told > (1 if sys.stdout.isatty() else 20):
                told, so_far = time.time(), f", return {np.mean(returns):.2f} so far" if returns else ""
                line = f"{scene}, {name}: {len(returns)} of {share * envs.num_envs} episodes, {steps} steps"
                line += f", {told - start:.0f} s{so_far}"
                print(f"{line:<100}", end="\r" if sys.stdout.isatty() else "\n", flush=True)
    mean = total / count
    figures = np.mean(returns), np.std(returns), np.mean(lengths), np.median(lengths), np.mean(interrupted)
    return len(returns), figures, mean, np.sqrt(np.maximum(squares / count - mean**2, 0))


def report(scene, name, episodes, figures, mean, std):
    rows = {"here": (episodes, *figures), **UNITY[scene, name]}
    title = f"{scene}, {'random actions' if name == 'random' else 'shipped policy'}"
    print(f"\n{title:<34}{'episodes':>10}{'return':>10}{'std':>10}{'length':>10}{'median':>10}{'MaxStep':>10}")
    for who, (n, r, r_std, length, median, full) in rows.items():
        line = f"  {who:<32}{n:>10}{r:>10.2f}{r_std:>10.2f}{length:>10.1f}{median:>10.0f}{full:>10.0%}"
        print(line.replace("nan", "  -"))
    unity_mean, unity_std = (np.array(text.split(), float) for text in UNITY_OBSERVATIONS[scene, name])
    line = f"  {'observation':<32}{'mean here':>10}{'Unity':>10}{'std here':>10}{'Unity':>10}"
    print(f"{line}{'means differ, in stds of Unity':>32}{'stds, here / Unity':>20}")
    for group, indices in groups(scene):
        far = (mean[indices] - unity_mean[indices]) / np.maximum(unity_std[indices], 1e-3)
        spread, unity_spread = np.sqrt((std[indices] ** 2).mean()), np.sqrt((unity_std[indices] ** 2).mean())
        worst = far[np.abs(far).argmax()]
        size = f" ({len(indices)})" if len(indices) > 1 else ""
        line = f"  {group + size:<32}{mean[indices].mean():>10.3f}{unity_mean[indices].mean():>10.3f}"
        moves = [i for i in indices if unity_std[i] > 0]
        ratio = max((std[i] / unity_std[i] for i in moves), key=lambda x: abs(math.log(x or 1e-9)), default=1)
        print(f"{line}{spread:>10.3f}{unity_spread:>10.3f}{worst:>+32.2f}{ratio:>20.2f}")
    if scene == "Crawler":
        print("  (n): over n observations, the mean of the means, the rms of the stds, and the worst of the last two")


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.episodes < 1:
        raise SystemExit(f"--episodes {args.episodes}: at least 1")
    observations, actions = {"3DBall": (8, 2), "Crawler": (158, 20)}[args.scene]
    rng = np.random.default_rng(args.seed)
    policies = {"random": lambda obs: rng.uniform(-1, 1, (len(obs), actions)).astype(np.float32)}
    if args.onnx:
        policies["onnx"] = load(args.onnx, args.seed, observations, actions)
    verdicts, missed = [], 0
    for name, policy in policies.items():
        wanted = args.episodes * (10 if name == "random" else 1)
        episodes, figures, mean, std = run(args.scene, name, policy, wanted, args.seed)
        report(args.scene, name, episodes, figures, mean, std)
        for what, which, low, high in THRESHOLDS[args.scene, name]:
            good = low <= figures[which] <= high
            missed += not good
            wanted = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            verdicts.append(f"{name} {what} {figures[which]:.4g} is {'' if good else 'NOT '}{wanted}")
    left_out = "" if args.onnx else " (shipped policy not run: no --onnx)"
    verdict = f"{missed} thresholds MISSED" if missed else "thresholds hold"
    print(f"\n{args.scene}: {verdict}{left_out}: {'; '.join(verdicts)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
