"""Does what was learned in one physics walk in another? Policies of the Crawler, in the scene as it was fitted to Unity
and in one that training never sees: other solver, time step, friction, softness of contacts and joints.

    python benchmarks/transfer.py runs/NAME                             one run, or several; also their best.pt
    python benchmarks/transfer.py runs/NAME --onnx Crawler.onnx         and the policy that ML-Agents ships

Nothing is trained. Each policy plays, without noise, equally many episodes of every agent in either world. The exit
code is 1 if a run's policy keeps less than 70 % of its return.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

WORLDS, GOAL = ("fitted", "alternative"), 0.7


def evaluate(script, path, world, args):
    """Return, its spread, and the length of the run's episodes in this world, by the script's own --evaluate."""
    command = [sys.executable, str(script), "--evaluate", str(path), "--eval-episodes", str(args.episodes)]
    command += ["--seed", str(args.seed), f"--player-args=--physics={world}", "--no-capture-video"]
    out = subprocess.run(command, capture_output=True, text=True)
    said = re.search(r"of (\d+) decisions on average: return (\S+) ± (\S+),", out.stdout)
    if not said:
        raise SystemExit((out.stderr.strip() or "it said nothing").splitlines()[-1])
    length, mean, std = map(float, said.groups())
    return mean, std, length


def shipped(world, args):
    """The same of ML-Agents' policy, which samples its actions."""
    from scene_fidelity import load, run

    policy = load(args.onnx, args.seed, 158, 20)
    _, (mean, std, length, *_), *_ = run("Crawler", "onnx", policy, args.episodes, args.seed, [f"--physics={world}"])
    return mean, std, length


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or checkpoints")
    parser.add_argument("--episodes", type=int, default=40, help="in each world")
    parser.add_argument("--seed", type=int, default=1001, help="of the scenes")
    parser.add_argument("--onnx", type=Path, help="the policy that ML-Agents ships: see scene_fidelity.py")
    args = parser.parse_args()
    policies = []
    for path in args.runs:
        path = path / "checkpoint.pt" if path.is_dir() else path
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            script, step = ROOT / f"{Path(state['script']).name}.py", state["global_step"]
        except Exception:
            raise SystemExit(f"{path}: no checkpoint of a run there") from None
        if state["args"]["env_id"] != "Crawler" or not script.exists():
            raise SystemExit(f"{path}: a run of Crawler, by a script that is here, has another physics to go to")
        name = f"{path.parent.name}/{path.name}".replace("/checkpoint.pt", "")
        policies.append((name, f"{step:,}", lambda world, s=script, p=path: evaluate(s, p, world, args)))
    if args.onnx:
        policies.append((args.onnx.name, "in Unity", lambda world: shipped(world, args)))
    width, short = max(len(name) for name, *_ in policies), 0
    print(
        f"{'policy':{width}}  {'trained':>10}" + "".join(f"  {world:>22}" for world in WORLDS) + "   kept", flush=True
    )
    for name, trained, play in policies:
        results = [play(world) for world in WORLDS]
        kept = results[1][0] / results[0][0]
        short += kept < GOAL and trained != "in Unity"
        cells = "".join(f"  {f'{mean:.1f} ± {std:.1f} ({length:.0f})':>22}" for mean, std, length in results)
        print(f"{name:{width}}  {trained:>10}{cells}  {kept:5.0%}", flush=True)
    print(f"return ± std (length in decisions) over {args.episodes} episodes; at least {GOAL:.0%} are to be kept")
    raise SystemExit(bool(short))


if __name__ == "__main__":
    main()
