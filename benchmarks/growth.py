"""How it grows, in the Crawler scene: more agents in a player, more players, a long run, ranks of torchrun.

    python benchmarks/growth.py                                       all of it, about an hour of two cores
    python benchmarks/growth.py agents players ranks exchange core    these, twenty minutes
    python benchmarks/growth.py memory --decisions 500000

Each measurement has a process of its own, and what is compared takes turns, so that noise hits both. agents: one player
with 10, 40 and 160 under random actions, no learning. players: 1, 2 and 4 with ten agents each, the same, and end to
end with PPO, in batches of equally many decisions. memory: what the training process and its players hold while PPO
runs, over the first tenth of the time after the first decision, a tenth in the middle, and the last; Linux only. ranks:
two processes of torchrun with a player each against one process with two, the same decisions, batches and minibatches
together. exchange: how long 2 and 4 ranks take to average one number and Crawler's gradient, nothing else done. core:
PPO and its player on one core, as a rank among many would be, with the whole batch, an eighth and a 64th of it; Linux
only. Cells are medians of the turns, with their range.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent
PPO = ROOT / "ppo_continuous_multiagent.py"
AGENTS = 10  # of a Crawler player, if nobody asks for others
OFTEN = 0.2  # seconds between two looks at the memory


def random_actions(agents, players, seconds):
    """Decisions a second, nothing learned. Runs in a process of its own: see apart()."""
    import numpy as np

    from unity_vec_env import UnityVecEnv

    with closing(UnityVecEnv("Crawler", num_players=players, player_args=["--agents", str(agents)])) as envs:
        actions = np.random.default_rng(0).uniform(-1, 1, (100, *envs.action_space.shape)).astype(np.float32)
        _, infos = envs.reset()
        count, decisions, start = 0, 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            decisions += np.count_nonzero(infos["ready"])
            *_, infos = envs.step(actions[count % 100])
            count += 1
        print("decisions/s", decisions / (time.perf_counter() - start))


def python(*command, cores=None):
    """What a Python program says, run in a folder of its own. cores: it and what it starts have only these."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *map(str, command)]
        keep = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        out = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, preexec_fn=keep)
    if out.returncode:
        raise SystemExit((out.stderr.strip() or "it said nothing").splitlines()[-1])
    return out.stdout


def apart(agents, players, seconds):
    return float(re.search(r"decisions/s (\S+)", python(__file__, "--one", agents, players, seconds))[1])


def settings(players, args, ranks=1):
    """Of PPO, for batches of args.batch decisions of all ranks' players."""
    line = ["--env-id", "Crawler", "--num-players", players, "--num-steps", args.batch // (AGENTS * players * ranks)]
    return [*line, "--total-timesteps", args.steps]


def exchange_times():
    """Milliseconds of ranks.mean(), of one number and of Crawler's gradient. Runs in every rank: see exchange()."""
    import torch

    import ppo_continuous_multiagent as ppo
    import ranks

    agent = ppo.Agent(dict(obs_dim=172, action_dim=20, low=-1.0, high=1.0), ppo.Args(**ppo.PRESETS["Crawler"]))
    torch.set_num_threads(1)
    ranks.join("cpu")
    for numbers, times in ((1, 500), (sum(x.numel() for x in agent.parameters()), 50)):
        x = torch.zeros(numbers)
        for _ in range(10):
            ranks.mean(x)
        start = time.perf_counter()
        for _ in range(times):
            ranks.mean(x)
        if ranks.RANK == 0:
            print("numbers", numbers, "ms", (time.perf_counter() - start) / times * 1e3, flush=True)
    ranks.leave()


def end_to_end(*command):
    """Decisions a second of a run, as its last line has it."""
    return float(re.findall(r"(\d+) SPS", python(*command))[-1])


def turns(measures, rounds):
    """Each measure's results, one after the other in each round."""
    results = {name: [] for name in measures}
    for turn in range(rounds):
        for name, measure in measures.items():
            results[name].append(measure())
            print(f"    turn {turn + 1}: {name}: {results[name][-1]:,.0f} decisions/s", file=sys.stderr, flush=True)
    return results


def rate(x):
    return f"{median(x):,.0f} ({min(x):,.0f} to {max(x):,.0f})" if len(x) > 1 else f"{x[0]:,.0f}"


def table(*rows):
    header, *rest = rows
    for cells in (header, ["---"] * len(header), *rest):
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print()


def agents(args):
    told = turns({f"{n} agents": lambda n=n: apart(n, 1, args.seconds) for n in (10, 40, 160)}, args.rounds)
    rows = [(name, rate(x), f"{median(x) / median(told['10 agents']):.2f}") for name, x in told.items()]
    table(("one player", "decisions/s, random actions", "against 10"), *rows)


def players(args):
    counts = {"1 player": 1, "2 players": 2, "4 players": 4}
    told = turns({name: lambda n=n: apart(AGENTS, n, args.seconds) for name, n in counts.items()}, args.rounds)
    ppo = turns({name: lambda n=n: end_to_end(PPO, *settings(n, args)) for name, n in counts.items()}, args.rounds)
    rows = [(name, rate(told[name]), rate(ppo[name])) for name in counts]
    table(("10 agents each", "decisions/s, random actions", "decisions/s, PPO end to end"), *rows)


def ranks(args):
    run = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    one, two = [PPO, *settings(2, args)], [*run, PPO, *settings(1, args, ranks=2)]
    told = turns({"one process": lambda: end_to_end(*one), "two ranks": lambda: end_to_end(*two)}, args.rounds)
    ratios = [b / a for a, b in zip(*told.values(), strict=True)]
    rows = [("one process, two players", rate(told["one process"]), "")]
    rows += [("two ranks, a player each", rate(told["two ranks"]), f"{median(ratios):.2f}, median of the turns")]
    table(("the same work", "decisions/s, PPO end to end", "against one process"), *rows)


def exchange(args):
    rows = []
    for n in (2, 4):
        told = {}
        for turn in range(args.rounds):
            out = python("-m", "torch.distributed.run", f"--nproc_per_node={n}", __file__, "--exchange")
            for numbers, ms in re.findall(r"numbers (\d+) ms (\S+)", out):
                told.setdefault(int(numbers), []).append(float(ms))
            print(f"    turn {turn + 1}: {n} ranks: {told}", file=sys.stderr, flush=True)
        rows += [(f"{n} ranks", *(f"{median(x):.2f} ms ({min(x):.2f} to {max(x):.2f})" for x in told.values()))]
    table(("averaged", *(f"{numbers:,} number{'s' * (numbers > 1)}" for numbers in told)), *rows)


def core(args):
    if sys.platform != "linux":
        print("core: only Linux keeps a process on a core; left out\n")
        return
    rows = []
    for share in (1, 8, 64):
        steps = max(1, args.batch // share // AGENTS)
        batch = steps * AGENTS
        line = [PPO, "--env-id", "Crawler", "--num-players", 1, "--num-steps", steps]
        line += ["--total-timesteps", max(batch, args.steps // min(share, 4)), "--no-compile"]
        told = [python(*line, cores={0}) for _ in range(args.rounds)]
        rates = [float(re.findall(r"(\d+) SPS", text)[-1]) for text in told]
        shares = re.findall(r"env +\d+% act +\d+% learn +\d+%", told[-1])[-1]
        rows.append((f"{batch:,}", rate(rates), f"{batch / median(rates):.2f} s", " ".join(shares.split())))
        print(f"    {rows[-1]}", file=sys.stderr, flush=True)
    table(("decisions of a batch", "decisions/s", "an iteration", "where the time goes"), *rows)


def resident(pid):
    """Megabytes of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0


def players_of(pid):
    """Its children that were launched as players."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [child for task in tasks for child in (task / "children").read_text().split()]
        return [child for child in found if b"--mlagents-port" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []


def memory(args):
    if sys.platform != "linux":
        print("memory: only Linux tells what a process holds; left out\n")
        return
    samples, command = [], [sys.executable, str(PPO), *map(str, settings(2, args)), "--seed", "1"]
    command[command.index("--total-timesteps") + 1] = str(args.decisions)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log.txt"), "w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(OFTEN)
                mine, theirs = resident(process.pid), [resident(pid) for pid in players_of(process.pid)]
                whole = mine and len(theirs) == 2 and all(theirs)  # at the end players go first
                if whole and " steps " in Path(log.name).read_text():
                    samples.append((mine, sum(theirs)))
        finally:
            process.terminate()  # asks for an end; a run that has ended does not hear it
            process.wait()
        text = Path(log.name).read_text()
    if process.returncode or len(samples) < 10:
        why = text.strip().splitlines()[-1] if process.returncode else "it was over at once: give more --decisions"
        raise SystemExit(f"memory: {why}")
    tenth, rows = len(samples) // 10, []
    for name, x in zip(("training process", "its two players together"), zip(*samples, strict=True), strict=True):
        half = len(x) // 2 - tenth // 2  # where the tenth in the middle begins
        parts = fmean(x[:tenth]), fmean(x[half : half + tenth]), fmean(x[-tenth:]), max(x)
        rows.append((name, *(f"{part:,.0f} MB" for part in parts)))
    table((f"{args.decisions:,} decisions of PPO", "first tenth", "in the middle", "last tenth", "most"), *rows)


QUESTIONS = {"agents": agents, "players": players, "memory": memory, "ranks": ranks, "exchange": exchange, "core": core}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often what is compared takes turns")
    parser.add_argument("--seconds", type=float, default=10, help="of a measurement under random actions")
    parser.add_argument("--steps", type=int, default=81_920, help="decisions of a run of PPO that is timed")
    parser.add_argument(
        "--batch", type=int, default=20_480, help="decisions of an iteration of PPO, whoever makes them"
    )
    parser.add_argument("--decisions", type=int, default=2_000_000, help="of the run whose memory is looked at")
    parser.add_argument("--one", type=float, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.exchange:
        return exchange_times()
    if args.one:
        return random_actions(int(args.one[0]), int(args.one[1]), args.one[2])
    for question in args.questions:
        if question not in QUESTIONS:
            raise SystemExit(f"{question}: not one of {', '.join(QUESTIONS)}")
    for name in ("rounds", "seconds", "steps", "decisions"):
        if getattr(args, name) <= 0:
            raise SystemExit(f"--{name} {getattr(args, name)}: must be above 0")
    if args.batch < 40 or args.batch % 40:
        raise SystemExit(f"--batch {args.batch}: must be a multiple of 40, the agents of four players")
    if min(args.steps, args.decisions) < args.batch:
        raise SystemExit(
            f"--steps {args.steps}, --decisions {args.decisions}: must be a --batch, {args.batch}, or more"
        )
    print(f"{os.cpu_count()} cores\n")
    for question in args.questions or QUESTIONS:
        QUESTIONS[question](args)


if __name__ == "__main__":
    main()
