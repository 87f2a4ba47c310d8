"""Evaluate Crawler policies in the physics that they were trained in, and in an alternative one.

    python benchmarks/transfer.py runs/NAME                         one or more runs or checkpoints
    python benchmarks/transfer.py runs/NAME --onnx Crawler.onnx     and the policy of ML-Agents

The "fitted" physics is fitted to Unity. The "alternative" physics has another solver, time step,
friction, and softness of contacts and joints, and is never used in training. Nothing is trained
here. Each policy plays without noise, and all agents play the same number of episodes. The exit
code is 1 if a policy keeps less than 70 % of its return.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from onefile_rl.checkpoints import read  # noqa: E402
from onefile_rl.engines.printing import accept_any_encoding  # noqa: E402

WORLDS = ("fitted", "alternative")
GOAL = 0.7  # the share of the return that a policy should keep


def evaluate(script, path, world, args):
    """Return the mean return, its standard deviation and the mean length of episodes, from the
    script's own --evaluate."""
    command = [sys.executable, str(script), "--evaluate", str(path), "--no-capture-video"]
    command += ["--eval-episodes", str(args.episodes), "--seed", str(args.seed)]
    command += [f"--player-args=--physics={world}"]
    result = subprocess.run(command, capture_output=True, text=True)
    line = r"of (\d+) decisions on average: return (\S+) (?:±|\+-) (\S+),"
    found = re.search(line, result.stdout)
    if not found:
        error = result.stderr.strip() or "the evaluation printed no error"
        raise SystemExit(error.splitlines()[-1])
    length, mean, std = map(float, found.groups())
    return mean, std, length


def evaluate_shipped(world, args):
    """Return the same numbers for the policy of ML-Agents, which samples its actions."""
    from scene_fidelity import load, run

    policy = load(args.onnx, args.seed, 158, 20)
    player_args = [f"--physics={world}"]
    result = run("Crawler", "onnx", policy, args.episodes, args.seed, player_args)
    mean, std, length, *_ = result[1]
    return mean, std, length


def read_policy(path):
    """Return the name of a policy, the script that trained it, and its number of decisions."""
    try:
        state = read(path)
        script = ROOT / f"{Path(state['script']).name}.py"
        decisions = state["global_step"]
    except Exception:
        raise SystemExit(f"{path} is not a checkpoint: give the folder of a run") from None
    if state["args"]["env_id"] != "Crawler" or not script.exists():
        supported = "give a run of Crawler that a script of this repository has trained"
        raise SystemExit(f"{path} can't be evaluated in another physics: {supported}")
    name = f"{path.parent.name}/{path.name}".replace("/checkpoint.pt", "")
    return name, script, decisions


def main():
    accept_any_encoding()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or checkpoints")
    parser.add_argument("--episodes", type=int, default=40, help="episodes in each physics")
    parser.add_argument("--seed", type=int, default=1001, help="seed of the scenes")
    parser.add_argument(
        "--onnx", type=Path, help="the policy that ML-Agents ships, see scene_fidelity.py"
    )
    args = parser.parse_args()

    policies = []  # name, where or how long it was trained, and how to evaluate it
    for path in args.runs:
        path = path / "checkpoint.pt" if path.is_dir() else path
        name, script, decisions = read_policy(path)
        play = lambda world, script=script, path=path: evaluate(script, path, world, args)
        policies.append((name, f"{decisions:,}", play))
    if args.onnx:
        policies.append((args.onnx.name, "in Unity", lambda world: evaluate_shipped(world, args)))

    width = max(len(name) for name, *_ in policies)
    columns = "".join(f"  {world:>22}" for world in WORLDS)
    print(f"{'policy':{width}}  {'trained':>10}{columns}   kept", flush=True)
    missed = False
    for name, trained, play in policies:
        results = [play(world) for world in WORLDS]
        kept = results[1][0] / results[0][0]
        if kept < GOAL and trained != "in Unity":
            missed = True
        cells = ""
        for mean, std, length in results:
            cells += f"  {f'{mean:.1f} ± {std:.1f} ({length:.0f})':>22}"
        print(f"{name:{width}}  {trained:>10}{cells}  {kept:5.0%}", flush=True)
    legend = f"return ± std (length in decisions) over {args.episodes} episodes"
    print(f"{legend}; the goal is to keep at least {GOAL:.0%}")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
