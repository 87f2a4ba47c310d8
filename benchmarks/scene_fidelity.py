"""Compare a bundled scene with Unity's: scores, and the distribution of every observation.

    python benchmarks/scene_fidelity.py --scene 3DBall                       random actions, seconds
    python benchmarks/scene_fidelity.py --scene 3DBall --onnx 3DBall.onnx    and a policy, minutes
    python benchmarks/scene_fidelity.py --scene Crawler --onnx Crawler.onnx

Unity's numbers were recorded with a real Unity player and are part of this file. ML-Agents ships a
trained policy for each scene, in Project/Assets/ML-Agents/Examples/<scene>/TFModels/ of its
repository. These policies were trained in Unity, so their scores here show how similar the scene
is. All agents play the same number of episodes, and all episodes count: the first N episodes to
finish would mostly be short ones. The exit code is 1 if a threshold is missed.
"""

import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onefile_rl.engines.printing import printable
from unity_vec_env import UnityVecEnv


@dataclass
class Args:
    scene: Literal["3DBall", "Crawler"] = "3DBall"
    """the bundled scene to compare with Unity's"""
    onnx: Path | None = None
    """the policy that ML-Agents ships for this scene; default: compare only random actions"""
    episodes: int = 100
    """episodes of the shipped policy (1000 decisions each unless they end early); random
    actions play ten times as many. Rounded up so that all agents play the same number"""
    seed: int = 1
    """the seed of the scene, of the random actions and of the policy's noise"""


class Figures(NamedTuple):
    """Statistics of the episodes. nan: not recorded."""

    episodes: int
    mean_return: float
    std_return: float
    mean_length: float
    median_length: float
    full_length: float  # the share of the episodes that MaxStep ended


# Unity with the ML-Agents C# package 2.2.1, decision period 5, MaxStep 5000. Actions are uniform in
# [-1, 1], or sampled from the shipped policy.
UNITY = {
    ("3DBall", "random"): {"Unity": Figures(289, 0.93, 0.57, 20.3, 19, 0.0)},
    ("3DBall", "onnx"): {"Unity": Figures(13, 92.6, 25.6, 927, 1000, 0.92)},
    ("Crawler", "random"): {
        "Unity": Figures(438, -0.72, 1.40, 13.3, 8, 0.0),
        "Unity, longer": Figures(1502, -0.71, math.nan, 14.8, math.nan, 0.0),
    },
    ("Crawler", "onnx"): {
        "Unity": Figures(10, 2475, 740, 1000, 1000, 1.0),
        "Unity, longer": Figures(92, 2003, math.nan, 985, math.nan, 0.97),
    },
}

# Name, field of Figures, smallest and largest value.
THRESHOLDS = {
    ("3DBall", "random"): [
        ("return", "mean_return", 0.83, 1.03),
        ("length", "mean_length", 17, 23),
    ],
    ("3DBall", "onnx"): [("return", "mean_return", 90, math.inf)],
    # Unity's lengths are 13 to 15, give or take 4.
    ("Crawler", "random"): [
        ("return", "mean_return", -1.1, -0.3),
        ("length", "mean_length", 9, 19),
    ],
    ("Crawler", "onnx"): [
        ("return", "mean_return", 1900, math.inf),
        ("full length", "full_length", 0.95, 1),
    ],
}

# Mean and std of every observation at which an agent requested an action, in the order of the
# observation. In the recordings of Crawler the target sometimes fell through the ground, down to
# -9773 m, hence its mean height and its large std.
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
    """Return names of groups of observations, and the indices of each group."""
    if scene == "3DBall":
        names = ["platform rotation z", "platform rotation x"]
        names += [f"ball {axis}" for axis in "xyz"]
        names += [f"ball velocity {axis}" for axis in "xyz"]
        return [(name, [i]) for i, name in enumerate(names)]

    # Name, first index, stride from part to part, size
    kinds = (
        ("position", 0, 7, 3),
        ("rotation", 3, 7, 4),
        ("velocity", 63, 3, 3),
        ("local rotation", 90, 4, 4),
    )
    parts_by_name = {"body": [0], "upper legs": [1, 3, 5, 7], "lower legs": [2, 4, 6, 8]}
    out = []
    for name, parts in parts_by_name.items():
        for kind, start, stride, size in kinds:
            indices = [start + stride * part + k for part in parts for k in range(size)]
            out.append((f"{name}: {kind}", indices))
    out += [
        ("speed off the goal", [126]),
        ("average velocity", [127, 128, 129]),
        ("goal velocity", [130, 131, 132]),
        ("rotation to the goal", [133, 134, 135, 136]),
        ("target x, z", [137, 139]),
        ("target height", [138]),
        ("ray down", [140]),
        ("body touches", [141]),
    ]
    per_leg = (
        "upper legs touch",
        "upper legs' strength",
        "lower legs touch",
        "lower legs' strength",
    )
    for i, name in enumerate(per_leg):
        out.append((name, [142 + i + 4 * leg for leg in range(4)]))
    return out


def load(path, seed, num_observations, num_actions):
    """Return an ONNX policy as a function of observations. It samples its actions, as in Unity."""
    import onnxruntime

    if not path.is_file():
        where = "Project/Assets/ML-Agents/Examples/<scene>/TFModels/ of ML-Agents has one per scene"
        raise SystemExit(f"--onnx {path}: no such file. {where}")
    onnxruntime.set_seed(seed)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(path, options)
    except Exception as error:
        reason = printable(str(error).splitlines()[0])
        raise SystemExit(f"--onnx {path}: not a model that onnxruntime can run: {reason}") from None

    # One input per sensor: obs_0, obs_1, ...
    inputs = {x.name: x.shape for x in session.get_inputs()}
    outputs = {x.name: x.shape for x in session.get_outputs()}
    sizes = {f"obs_{i}": inputs.get(f"obs_{i}", [None])[-1] for i in range(len(inputs))}
    known = all(isinstance(size, int) for size in sizes.values())
    fits = known and sum(sizes.values()) == num_observations
    if not fits or outputs.get("continuous_actions", [None])[-1] != num_actions:
        needed = f"{num_observations} numbers as obs_0, obs_1, ... and {num_actions} actions"
        raise SystemExit(
            f"--onnx {path}: the scene has {needed} as continuous_actions; the model has {printable(inputs)}"
        )
    ends = np.cumsum(list(sizes.values()))[:-1]

    def policy(obs):
        sensors = dict(zip(sizes, np.split(obs, ends, axis=1), strict=True))
        return session.run(["continuous_actions"], sensors)[0]

    return policy


def run(scene, name, policy, episodes, seed, player_args=()):
    """Play until every agent has finished its share of the episodes.

    Return the number of episodes, the figures without it, and the mean and std of the observations.
    """
    returns = []
    lengths = []
    interrupted = []
    start = time.time()
    last_print = start
    with closing(UnityVecEnv(scene, seed=seed, player_args=player_args)) as envs:
        share = math.ceil(episodes / envs.num_envs)
        finished = np.zeros(envs.num_envs, int)
        steps = 0
        shape = envs.single_observation_space.shape
        count = 0
        total = np.zeros(shape)
        squares = np.zeros(shape)
        obs, infos = envs.reset()
        while (finished < share).any():
            # Statistics of the observations at which agents request an action
            requested = obs[infos["ready"] & (finished < share)].astype(float)
            count += len(requested)
            total += requested.sum(0)
            squares += (requested**2).sum(0)

            obs, _, terminated, truncated, infos = envs.step(policy(obs))
            steps += 1
            for slot in np.flatnonzero((terminated | truncated) & (finished < share)):
                finished[slot] += 1
                returns.append(infos["final_info"]["episode"]["r"][slot])
                lengths.append(infos["final_info"]["episode"]["l"][slot])
                interrupted.append(truncated[slot])

            live = sys.stdout.isatty()
            if time.time() - last_print > (1 if live else 20):
                last_print = time.time()
                line = f"{scene}, {name}: {len(returns)} of {share * envs.num_envs} episodes"
                line += f", {steps} steps, {last_print - start:.0f} s"
                if returns:
                    line += f", return {np.mean(returns):.2f} so far"
                print(f"{line:<100}", end="\r" if live else "\n", flush=True)

    figures = (
        np.mean(returns),
        np.std(returns),
        np.mean(lengths),
        np.median(lengths),
        np.mean(interrupted),
    )
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return len(returns), figures, mean, std


def print_figures(scene, name, figures):
    """Print the figures of this scene and of Unity."""
    title = f"{scene}, {'random actions' if name == 'random' else 'shipped policy'}"
    columns = ("episodes", "return", "std", "length", "median", "MaxStep")
    print(f"\n{title:<34}" + "".join(f"{column:>10}" for column in columns))
    for source, x in {"here": figures, **UNITY[scene, name]}.items():
        line = f"  {source:<32}{x.episodes:>10}{x.mean_return:>10.2f}{x.std_return:>10.2f}"
        line += f"{x.mean_length:>10.1f}{x.median_length:>10.0f}{x.full_length:>10.0%}"
        print(line.replace("nan", "  -"))


def print_observations(scene, name, mean, std):
    """Print the mean and std of the observations here and in Unity, by group."""
    unity_mean, unity_std = (
        np.array(text.split(), float) for text in UNITY_OBSERVATIONS[scene, name]
    )
    line = f"  {'observation':<32}{'mean here':>10}{'Unity':>10}{'std here':>10}{'Unity':>10}"
    print(f"{line}{'means differ, in stds of Unity':>32}{'stds, here / Unity':>20}")
    for group, indices in groups(scene):
        size = f" ({len(indices)})" if len(indices) > 1 else ""
        line = f"  {group + size:<32}"
        line += f"{mean[indices].mean():>10.3f}{unity_mean[indices].mean():>10.3f}"
        rms = np.sqrt((std[indices] ** 2).mean())
        unity_rms = np.sqrt((unity_std[indices] ** 2).mean())
        line += f"{rms:>10.3f}{unity_rms:>10.3f}"

        # The largest differences of the group
        shifts = (mean[indices] - unity_mean[indices]) / np.maximum(unity_std[indices], 1e-3)
        largest_shift = shifts[np.abs(shifts).argmax()]
        ratios = [std[i] / unity_std[i] for i in indices if unity_std[i] > 0]
        largest_ratio = max(ratios, key=lambda x: abs(math.log(x or 1e-9)), default=1)
        print(f"{line}{largest_shift:>+32.2f}{largest_ratio:>20.2f}")
    if scene == "Crawler":
        legend = "the mean of the means, the rms of the stds, and the largest of both differences"
        print(f"  (n): a group of n observations: {legend}")


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.episodes < 1:
        raise SystemExit(f"--episodes {args.episodes}: must be at least 1")
    num_observations, num_actions = {"3DBall": (8, 2), "Crawler": (158, 20)}[args.scene]
    rng = np.random.default_rng(args.seed)

    def random_policy(obs):
        return rng.uniform(-1, 1, (len(obs), num_actions)).astype(np.float32)

    policies = {"random": random_policy}
    if args.onnx:
        policies["onnx"] = load(args.onnx, args.seed, num_observations, num_actions)

    verdicts = []
    missed = 0
    for name, policy in policies.items():
        wanted = args.episodes * (10 if name == "random" else 1)
        episodes, numbers, mean, std = run(args.scene, name, policy, wanted, args.seed)
        figures = Figures(episodes, *numbers)
        print_figures(args.scene, name, figures)
        print_observations(args.scene, name, mean, std)
        for title, field, low, high in THRESHOLDS[args.scene, name]:
            value = getattr(figures, field)
            holds = low <= value <= high
            missed += not holds
            limits = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            verdicts.append(f"{name} {title} {value:.4g} is {'' if holds else 'NOT '}{limits}")
    skipped = "" if args.onnx else " (shipped policy skipped: no --onnx)"
    verdict = f"{missed} thresholds MISSED" if missed else "thresholds hold"
    print(f"\n{args.scene}: {verdict}{skipped}: {'; '.join(verdicts)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
