"""Measure how training scales in the Crawler scene: agents, players, memory, ranks of torchrun.

    python benchmarks/growth.py                                      all, an hour on two cores
    python benchmarks/growth.py agents players ranks exchange core   these only, twenty minutes
    python benchmarks/growth.py memory --decisions 500000

Each measurement runs in its own process. What is compared runs alternately, so that other load on
the machine affects all of it. Cells have the median of the rounds, and the range.

    agents      one player with 10, 40 and 160 agents: random actions, no learning
    players     1, 2 and 4 players with ten agents each: random actions, and PPO with batches of the
                same number of decisions
    memory      memory of the training process and of its players during a run of PPO: the mean over
                the first tenth of the time after the first decision, a tenth in the middle, and the
                last tenth (Linux only)
    ranks       two ranks of torchrun with one player each, and one process with two players: the
                same total of decisions, batches and minibatches
    exchange    the time in which 2 and 4 ranks average one number, and the gradient of Crawler
    core        PPO and its player on one core, like one rank of many: with the whole batch, an
                eighth and a 64th of it (Linux only)
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
# torchrun without a port that other machines can reach, see docs/cluster.md
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
AGENTS = 10  # agents of a Crawler player by default
SAMPLE_SECONDS = 0.2  # between two samples of the memory


# Measurements that run in their own process


def random_actions(agents, players, seconds):
    """Print the decisions per second with random actions."""
    import numpy as np

    from unity_vec_env import UnityVecEnv

    player_args = ["--agents", str(agents)]
    envs = UnityVecEnv("Crawler", num_players=players, player_args=player_args)
    with closing(envs):
        rng = np.random.default_rng(0)
        actions = rng.uniform(-1, 1, (100, *envs.action_space.shape)).astype(np.float32)
        _, infos = envs.reset()
        steps = 0
        decisions = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            decisions += np.count_nonzero(infos["ready"])
            *_, infos = envs.step(actions[steps % 100])
            steps += 1
        print("decisions/s", decisions / (time.perf_counter() - start))


def exchange_times():
    """Print the milliseconds of distributed.average(), for one number and for Crawler's gradient.

    All ranks call this.
    """
    import torch

    import ppo_continuous_multiagent as ppo
    from onefile_rl import distributed

    spec = dict(obs_dim=172, action_dim=20, low=-1.0, high=1.0)
    agent = ppo.Agent(spec, ppo.Args(**ppo.PRESETS["Crawler"]))
    num_weights = sum(x.numel() for x in agent.parameters())
    torch.set_num_threads(1)
    distributed.join("cpu")
    for size, repeats in ((1, 500), (num_weights, 50)):
        x = torch.zeros(size)
        for _ in range(10):
            distributed.average(x)
        start = time.perf_counter()
        for _ in range(repeats):
            distributed.average(x)
        milliseconds = (time.perf_counter() - start) / repeats * 1e3
        if distributed.RANK == 0:
            print("numbers", size, "ms", milliseconds, flush=True)
    distributed.leave()


# Processes


def python(*command, cores=None):
    """Run Python with these arguments in a temporary folder and return its output.

    `cores`: the only cores that this process and its children may use
    """
    command = [sys.executable, *map(str, command)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=pin,
        )
    if result.returncode:
        error = result.stderr.strip() or "the process printed no error"
        raise SystemExit(error.splitlines()[-1])
    return result.stdout


def random_speed(agents, players, seconds):
    """Return the decisions per second with random actions, measured in a new process."""
    output = python(__file__, "--random-actions", agents, players, seconds)
    return float(re.search(r"decisions/s (\S+)", output)[1])


def training_speed(*command):
    """Return the decisions per second of a training run, from its last line of progress."""
    return float(re.findall(r"(\d+) SPS", python(*command))[-1])


def settings(players, args, ranks=1):
    """Return the options of PPO for batches of args.batch decisions of all players of all ranks."""
    num_steps = args.batch // (AGENTS * players * ranks)
    options = ["--env-id", "Crawler", "--num-players", players, "--num-steps", num_steps]
    return [*options, "--total-timesteps", args.steps]


def take_turns(measures, rounds):
    """Call each of the measures once per round, and return their results by name."""
    results = {name: [] for name in measures}
    for number in range(rounds):
        for name, measure in measures.items():
            speed = measure()
            results[name].append(speed)
            line = f"    round {number + 1}: {name}: {speed:,.0f} decisions/s"
            print(line, file=sys.stderr, flush=True)
    return results


# Tables


def format_speeds(speeds):
    if len(speeds) == 1:
        return f"{speeds[0]:,.0f}"
    return f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"


def print_table(header, *rows):
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print()


def agents(args):
    measures = {}
    for count in (10, 40, 160):
        measures[f"{count} agents"] = lambda n=count: random_speed(n, 1, args.seconds)
    speeds = take_turns(measures, args.rounds)
    rows = []
    for name, x in speeds.items():
        ratio = median(x) / median(speeds["10 agents"])
        rows.append((name, format_speeds(x), f"{ratio:.2f}"))
    print_table(("one player", "decisions/s, random actions", "against 10"), *rows)


def players(args):
    counts = {"1 player": 1, "2 players": 2, "4 players": 4}
    random_measures = {}
    ppo_measures = {}
    for name, count in counts.items():
        random_measures[name] = lambda n=count: random_speed(AGENTS, n, args.seconds)
        ppo_measures[name] = lambda n=count: training_speed(PPO, *settings(n, args))
    random = take_turns(random_measures, args.rounds)
    ppo = take_turns(ppo_measures, args.rounds)
    rows = [(name, format_speeds(random[name]), format_speeds(ppo[name])) for name in counts]
    header = ("10 agents each", "decisions/s, random actions", "decisions/s, PPO end to end")
    print_table(header, *rows)


def ranks(args):
    one = [PPO, *settings(2, args)]
    two = [*TORCHRUN, "--nproc_per_node=2", PPO, *settings(1, args, ranks=2)]
    measures = {
        "one process": lambda: training_speed(*one),
        "two ranks": lambda: training_speed(*two),
    }
    speeds = take_turns(measures, args.rounds)
    pairs = zip(speeds["one process"], speeds["two ranks"], strict=True)
    ratio = median(b / a for a, b in pairs)
    print_table(
        ("the same work", "decisions/s, PPO end to end", "against one process"),
        ("one process, two players", format_speeds(speeds["one process"]), ""),
        (
            "two ranks, a player each",
            format_speeds(speeds["two ranks"]),
            f"{ratio:.2f}, median of the rounds",
        ),
    )


def exchange(args):
    rows = []
    for num_ranks in (2, 4):
        times = {}  # milliseconds by the number of averaged numbers
        for number in range(args.rounds):
            processes = f"--nproc_per_node={num_ranks}"
            output = python(*TORCHRUN, processes, __file__, "--exchange-times")
            for size, milliseconds in re.findall(r"numbers (\d+) ms (\S+)", output):
                times.setdefault(int(size), []).append(float(milliseconds))
            line = f"    round {number + 1}: {num_ranks} ranks: {times}"
            print(line, file=sys.stderr, flush=True)
        cells = [f"{median(x):.2f} ms ({min(x):.2f} to {max(x):.2f})" for x in times.values()]
        rows.append((f"{num_ranks} ranks", *cells))
    names = [f"{size:,} number{'s' if size > 1 else ''}" for size in times]
    print_table(("averaged", *names), *rows)


def core(args):
    if sys.platform != "linux":
        print("core: skipped, only Linux can bind a process to a core\n")
        return
    rows = []
    for share in (1, 8, 64):
        num_steps = max(1, args.batch // share // AGENTS)
        batch = num_steps * AGENTS
        total = max(batch, args.steps // min(share, 4))
        command = [PPO, "--env-id", "Crawler", "--num-players", 1, "--num-steps", num_steps]
        command += ["--total-timesteps", total, "--no-compile"]
        outputs = [python(*command, cores={0}) for _ in range(args.rounds)]
        speeds = [float(re.findall(r"(\d+) SPS", output)[-1]) for output in outputs]
        shares = re.findall(r"env +\d+% act +\d+% learn +\d+%", outputs[-1])[-1]
        seconds = f"{batch / median(speeds):.2f} s"
        rows.append((f"{batch:,}", format_speeds(speeds), seconds, " ".join(shares.split())))
        print(f"    {rows[-1]}", file=sys.stderr, flush=True)
    header = ("decisions of a batch", "decisions/s", "an iteration", "where the time goes")
    print_table(header, *rows)


def resident(pid):
    """Return the resident memory of a process in megabytes; 0 if there is no such process."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def players_of(pid):
    """Return the process ids of the players that this process has launched."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"--mlagents-port" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    except OSError:
        return []
    return found


def sample_memory(command):
    """Run a training process with two players. Return samples of its memory and of its players'
    memory, in megabytes, from the first decision on."""
    samples = []
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log.txt"), "w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(SAMPLE_SECONDS)
                own = resident(process.pid)
                of_players = [resident(pid) for pid in players_of(process.pid)]
                # At the end of a run the players end first
                complete = own and len(of_players) == 2 and all(of_players)
                if complete and " steps " in Path(log.name).read_text():
                    samples.append((own, sum(of_players)))
        finally:
            process.terminate()  # has no effect if the run has ended
            process.wait()
        output = Path(log.name).read_text()
    if process.returncode:
        raise SystemExit(f"memory: {output.strip().splitlines()[-1]}")
    if len(samples) < 10:
        raise SystemExit("memory: the run was too short, give more --decisions")
    return samples


def memory(args):
    if sys.platform != "linux":
        print("memory: skipped, only Linux tells the memory of a process\n")
        return
    command = [sys.executable, str(PPO), *map(str, settings(2, args)), "--seed", "1"]
    command[command.index("--total-timesteps") + 1] = str(args.decisions)
    samples = sample_memory(command)
    tenth = len(samples) // 10
    middle = len(samples) // 2 - tenth // 2
    rows = []
    names = ("training process", "its two players together")
    for name, x in zip(names, zip(*samples, strict=True), strict=True):
        parts = [
            fmean(x[:tenth]),
            fmean(x[middle : middle + tenth]),
            fmean(x[-tenth:]),
            max(x),
        ]
        rows.append((name, *(f"{part:,.0f} MB" for part in parts)))
    run = f"{args.decisions:,} decisions of PPO"
    print_table((run, "first tenth", "in the middle", "last tenth", "maximum"), *rows)


QUESTIONS = {
    "agents": agents,
    "players": players,
    "memory": memory,
    "ranks": ranks,
    "exchange": exchange,
    "core": core,
}


def check(args):
    """Refuse arguments that can't work."""
    for question in args.questions:
        if question not in QUESTIONS:
            raise SystemExit(f"{question}: not one of {', '.join(QUESTIONS)}")
    for name in ("rounds", "seconds", "steps", "decisions"):
        if getattr(args, name) <= 0:
            raise SystemExit(f"--{name} {getattr(args, name)}: must be above 0")
    if args.batch < 40 or args.batch % 40:
        reason = "must be a multiple of 40, the number of agents of four players"
        raise SystemExit(f"--batch {args.batch}: {reason}")
    if min(args.steps, args.decisions) < args.batch:
        given = f"--steps {args.steps}, --decisions {args.decisions}"
        raise SystemExit(f"{given}: must be at least --batch, {args.batch}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = sys.exit  # errors are one line, without the usage
    names = ", ".join(QUESTIONS)
    parser.add_argument(
        "questions", nargs="*", metavar="QUESTION", help=f"some of {names}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each measurement runs")
    parser.add_argument(
        "--seconds", type=float, default=10, help="duration of a measurement with random actions"
    )
    parser.add_argument(
        "--steps", type=int, default=81_920, help="decisions of a run of PPO that is timed"
    )
    parser.add_argument(
        "--batch", type=int, default=20_480, help="decisions of an iteration of PPO in total"
    )
    parser.add_argument(
        "--decisions", type=int, default=2_000_000, help="decisions of the run of `memory`"
    )
    parser.add_argument("--random-actions", type=float, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--exchange-times", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    # The processes that this program starts
    if args.exchange_times:
        exchange_times()
        return
    if args.random_actions:
        num_agents, num_players, seconds = args.random_actions
        random_actions(int(num_agents), int(num_players), seconds)
        return

    check(args)
    print(f"{os.cpu_count()} cores\n")
    for question in args.questions or QUESTIONS:
        QUESTIONS[question](args)


if __name__ == "__main__":
    main()
