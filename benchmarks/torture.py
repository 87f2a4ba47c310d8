"""Real training runs through random misfortunes: what is lost (nothing should be), what stays behind, what grows.

    python benchmarks/torture.py --minutes 5                             exit code 1 if anything is lost or left behind
    python benchmarks/torture.py --minutes 2 --runs unity --only "kill -9" SIGTERM
    python benchmarks/torture.py --minutes 5 --out torture               keeps the runs, and what they said

Small runs of all scripts are struck one after another: signals, kill -9 of trainer, player and worker, a reader that
goes away, a full disk, two processes in one run. What ends is resumed. Beside them one trainer, the veteran, lives on
from the first minute to the last, through all that a trainer must survive: memory and file descriptors are its. With a
seed the misfortunes are the same, in the same order; the clock decides how many there are.

After each one the checkpoint must load, be finite, and have at least the decisions that any checkpoint had before.
After an orderly end it must be that of the last iteration in the run's log; after kill -9 it may be older by the
checkpoint interval and the iterations that were under way. Who resumes must go on from just there. No process, port,
shared memory or temporary file may stay. Processes are known by a mark in their environment, which their children
inherit: nothing without it is touched. Linux only. As root, disks and /dev/shm are tmpfs of our own, in a mount
namespace that ends with us; otherwise no disk gets full.
"""

import argparse
import ctypes
import itertools
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from tensorboard.compat.proto.event_pb2 import Event

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoints  # noqa: E402

MARK, NUMBERS = f"TORTURE={uuid.uuid4()}", itertools.count(1)
LIBC, DISK = ctypes.CDLL(None), 64  # MiB
PATIENCE = 90  # seconds for whatever must happen; a hung player is noticed after 60
# Script, decisions in an iteration, and settings that make one short. A checkpoint is written every third.
PPO, BALL = "ppo_continuous_multiagent.py", "--env-id 3DBall --num-players 2 --num-steps 32 --num-minibatches 8"
RUNS = {
    "gym": (PPO, 512, "--env-id Reacher2Dof-v0 --num-envs 2 --num-steps 256 --num-minibatches 8"),
    "unity": (PPO, 768, BALL),
    "pixel": (
        "ppo_pixel.py", 64, "--env-id DummyPixels-v0 --num-workers 2 --num-envs 4 --num-steps 16 --num-minibatches 2 "
        "--update-epochs 1 --features 64"
    ),
    "sac": (
        "sac_continuous.py", 1000, "--env-id Reacher2Dof-v0 --buffer-size 5000 --learning-starts 500 --batch-size 32 "
        "--updates-per-step 0.1 --hidden-sizes 32 32 --save-buffer"
    ),
    "veteran": (PPO, 768, BALL),
}  # fmt: skip
LASTING = ["full disk", "two at once"]  # the trainer lives on
ENDS = ["kill -9", "SIGTERM", "SIGINT", "SIGINT twice", "SIGHUP", "stdout gone", "resumed while it ends"]
ENDING = [*ENDS[:-1], "worker killed", "player stopped, SIGINT twice"]  # and nobody has gone on
MISFORTUNES = dict.fromkeys(RUNS, ENDS + LASTING)
MISFORTUNES["unity"] = [*ENDS, *LASTING, "player killed", "player stopped, SIGINT twice"]
MISFORTUNES["pixel"] = [*ENDS, *LASTING, "worker killed"]
MISFORTUNES["veteran"] = [*LASTING, "player killed", "player killed", "player stopped"]


class Stopped(Exception):
    """We are interrupted ourselves."""


# What the system knows


def marked(mark, script=""):
    """Processes whose mark begins so, and whose command line has this in it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            marks = (entry / "environ").read_bytes().split(b"\0")
            if any(x.startswith(mark.encode()) for x in marks) and script.encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def end(pids):
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def open_files(pid):
    """By what stands behind them."""
    with suppress(OSError):
        return [os.path.basename(os.path.realpath(link)) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return []


def listening():
    """Ports by the inode of their socket."""
    rows = [row.split() for x in ("tcp", "tcp6") for row in Path("/proc/net", x).read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def own_mounts():
    """From here on, mounts that only we and our children see."""
    new_namespace, private = 0x20000, 0x44000
    return os.geteuid() == 0 and LIBC.unshare(new_namespace) == 0 and LIBC.mount(b"", b"/", b"", private, None) == 0


def mount(place):
    return LIBC.mount(b"tmpfs", bytes(Path(place)), b"tmpfs", 0, f"size={DISK}m".encode()) == 0


def events(folder, pid):
    """What a process wrote for TensorBoard. The last record may be half there."""
    for path in sorted(folder.glob(f"events.out.tfevents.*.{pid}.*")) if folder else ():
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data) and at + 16 + (size := struct.unpack_from("<Q", data, at)[0]) <= len(data):
            with suppress(Exception):  # torn, on a full disk
                yield Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size


def finite(x):
    if isinstance(x, torch.Tensor):
        return bool(torch.isfinite(x).all())
    return all(map(finite, x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()))


# Runs


class Life:
    """A trainer's process, what it says, and what it holds."""

    def __init__(self, run):
        number = next(NUMBERS)
        self.run, self.mark, self.words, self.held, self.samples = run, f"{MARK}.{number}.", "", set(), []
        self.begin, self.from_step, self.blows = time.monotonic(), run.step, 0
        self.temporary, self.log = run.home / f"tmp{number}", open(run.home / f"life{number}.txt", "wb")
        self.temporary.mkdir()
        more = ["--resume", run.folder] if run.folder else run.settings
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(run.home.parent / "config")}
        environment |= {"TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1", "TORTURE": self.mark.partition("=")[2]}
        command = [sys.executable, str(run.script), *map(str, more)]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.process = subprocess.Popen(command, cwd=run.disk, env=environment, start_new_session=True, **streams)
        self.pid, self.out = self.process.pid, self.process.stdout
        os.set_blocking(self.out.fileno(), False)

    def look(self):
        """Whether it lives."""
        alive = self.process.poll() is None
        with suppress(ValueError):  # we have closed it
            while more := self.out.read(65536):
                self.words += more.decode(errors="replace")
                self.log.write(more)
        if alive and time.monotonic() > self.begin + len(self.samples):
            for pid in marked(self.mark):
                self.held |= {name for name in open_files(pid) if name.startswith("socket:")}
            with suppress(OSError):
                pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
                self.samples.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(open_files(self.pid))))
        return alive

    def signal(self, number):
        """As a terminal does it: to the whole group, which the trainer leads."""
        if self.process.poll() is None:
            os.killpg(self.pid, number)

    def printed(self):
        return max((int(x.replace(",", "")) for x in re.findall(r"([\d,]+) steps", self.words)), default=0)

    def said(self):
        """When it ended."""
        return max(map(int, re.findall(r"Stopped after (\d+) decisions", self.words)), default=0)

    def began(self):
        """Where it went on, by its log: TensorBoard forgets what comes after."""
        starts = (event.step - 1 for event in events(self.run.folder, self.pid) if event.session_log.status == 1)
        return next(starts, None)

    def logged(self):
        """The last iteration that it has finished."""
        return max((event.step for event in events(self.run.folder, self.pid) if event.summary.value), default=0)


class Run:
    """One folder, and the processes that come and go in it."""

    def __init__(self, name, report, args):
        script, self.batch, settings = RUNS[name]
        self.name, self.report, self.home = name, report, report.out / name
        self.script = args.script.resolve() if script == PPO else ROOT / script
        self.interval, self.settings = 3 * self.batch, settings.split()
        self.settings += ["--no-compile", "--total-timesteps", 10**9, "--checkpoint-interval", self.interval]
        self.disk, self.folder, self.step, self.seen, self.life = self.home / "disk", None, 0, None, None
        self.what, self.troubles = "", [0, 0]
        self.disk.mkdir(parents=True)
        self.mounted = report.mounts and mount(self.disk)

    def lose(self, words):
        self.troubles[0] += 1
        self.report.note(self.report.lost, "LOST", f"{self.name}, {self.what}: {words}")

    def leave(self, words):
        self.troubles[1] += 1
        self.report.note(self.report.left, "LEFT BEHIND", f"{self.name}, {self.what}: {words}")

    def look(self):
        """A checkpoint is whole whenever one looks, and never older than it was."""
        self.folder = self.folder or next((path.parent for path in self.disk.glob("runs/*/checkpoint.pt")), None)
        if self.folder is None:
            return
        try:
            file = os.stat(self.folder / "checkpoint.pt")
            if (file.st_ino, file.st_mtime_ns) == self.seen:
                return
            self.seen, before = (file.st_ino, file.st_mtime_ns), self.step
            state = checkpoints.load(self.folder, self.script)[1]
        except (OSError, ValueError) as error:
            return self.lose(str(error))
        self.step = state["global_step"]
        if not finite(state["kept"]):
            self.lose("the checkpoint is not finite")
        if self.step < before:
            self.lose(f"the checkpoint goes back from {before} to {self.step} decisions")

    def wait(self, done, seconds=PATIENCE):
        until = time.monotonic() + seconds
        while not done():
            if self.life:
                self.life.look()
            self.look()
            if self.report.stop.is_set():
                raise Stopped
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def goes_on(self, decisions=0):
        """A new checkpoint, so many decisions later, by the process that is there."""
        life, before = self.life, self.step
        there = self.wait(lambda: not life.look() or self.step > before + decisions)
        if not there or not life.look():
            last = (life.words.strip().splitlines() or ["it said nothing"])[-1]
            self.lose(f"does not go on after {before} decisions: {last}")
            return self.over()
        if life.from_step and life.began() not in (None, life.from_step):
            self.lose(f"goes on from {life.began()} decisions, and the checkpoint had {life.from_step}")
        life.from_step = 0
        for path in self.folder.glob(".*.tmp"):
            if f".{life.pid}." not in path.name:
                self.leave(path.name)

    def over(self, late=None):
        """The process has ended, or is ended here. late: by how many decisions what it kept may be older than what it
        made; None if nothing is promised."""
        life, self.life = self.life, None
        if not self.wait(lambda: not life.look()):
            self.lose(f"has not ended after {PATIENCE} s")
            end([life.pid])
        life.process.wait()
        life.look()
        life.log.close()
        life.out.close()
        self.report.lives.append(life)
        if not self.wait(lambda: not list(marked(life.mark)), 15):
            for pid in marked(life.mark):
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
                self.leave(f"process {pid}, {command}")
                end([pid])
        for port in {port for name, port in listening().items() if name in life.held}:
            self.leave(f"port {port}")
        for path in life.temporary.iterdir():
            self.leave(f"temporary file {path.name}")
        self.look()
        made = max(life.logged(), life.printed() if late else 0) - (late or 0)
        if late is not None and self.step < made:
            self.lose(f"{made - self.step} decisions: {made} made, {self.step} kept")
        if life.said() > self.step:
            self.lose(f"it says {life.said()} decisions, the checkpoint has {self.step}")
        with suppress(ValueError):  # what is wrong with the checkpoint is known by now
            for file in checkpoints.load(self.folder, self.script)[1]["large"].values() if self.folder else ():
                if not (self.folder / file).exists():
                    self.lose(f"{file}, a part of the checkpoint")

    def suffer(self, what, when, how):
        """when, how: random numbers from 0 to 1, for the moment and for whatever else there is to choose."""
        self.what, self.troubles = what, [0, 0]
        if what == "full disk" and not self.mounted:
            self.report.tell(self, "skipped: only root can mount a small disk", skipped=True)
            return self.wait(lambda: False, 1)
        new, twin = self.life is None, None
        if new and self.folder and what == "two at once":
            twin = Life(self)
        self.life = life = self.life or Life(self)
        if new and self.step and what in ENDS and when < 0.25:  # in the midst of its start
            self.wait(lambda: not life.look(), 16 * when)
        elif not twin:
            self.goes_on()
            self.wait(lambda: False, 3 * when)
        if self.life:
            life.look()
            before = max(self.step, life.printed())
            life.blows += 1
            self.strike(life, what, how, twin)
            if self.life and what in ENDING:
                self.over(0 if what != "kill -9" else self.interval + 2 * self.batch)
            elif self.life:
                self.goes_on(self.interval)  # one may have been under way
            self.report.tell(self, f"{before:,} -> {self.step:,}")
        else:
            self.report.tell(self, "it was not there to suffer")

    def strike(self, life, what, how, twin):
        if what.startswith(("player", "worker")):
            script, children = {"p": "envs/player.py", "w": "envs/pixels.py"}[what[0]], []
            self.wait(lambda: children.extend(sorted(marked(life.mark, script))) or children)
            hung = life.words.count("has not answered")
            os.kill(children[int(how * len(children))], signal.SIGSTOP if "stopped" in what else signal.SIGKILL)
            if what == "player stopped":
                self.wait(lambda: life.words.count("has not answered") > hung)
        if what == "kill -9":
            end([life.pid])
        elif what in ("SIGTERM", "SIGINT", "SIGHUP"):
            life.signal(getattr(signal, what))
        elif what.endswith("SIGINT twice"):
            life.signal(signal.SIGINT)
            self.wait(lambda: not life.look(), how)
            life.signal(signal.SIGINT)
        elif what == "stdout gone":
            life.out.close()
        elif what == "resumed while it ends":  # somebody does not wait: is refused, or goes on from the end
            second = Life(self)
            self.wait(lambda: not second.look(), 6 * how)
            life.signal(signal.SIGTERM)
            self.over(0)
            self.life, second.from_step = second, life.said() or second.from_step
            self.wait(lambda: not second.look() or "tensorboard --logdir" in second.words)
            if not second.look() and ("in use" in second.words or "in the meantime" in second.words):
                self.over()
        elif what == "two at once":  # one is told so and ends, and the other does not notice
            both = [life, twin or Life(self)]
            self.wait(lambda: not all(life.look() for life in both))
            both.sort(key=Life.look)
            if [life.look() for life in both] != [False, True] or "in use" not in both[0].words:
                self.lose("of two processes in one run not exactly one is refused")
            self.life = both[0]
            self.over()
            self.life = both[1]
        elif what == "full disk":
            ballast = self.disk / "ballast"
            with suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            try:
                self.wait(lambda: False, 1 + 3 * how)
            finally:
                ballast.unlink(missing_ok=True)


class Report:
    def __init__(self, out):
        self.out, self.start, self.stop, self.lock = out, time.monotonic(), threading.Event(), threading.Lock()
        self.lost, self.left, self.lives, self.events = [], [], [], []
        self.mounts = own_mounts()
        self.shared = set() if self.mounts and mount("/dev/shm") else set(os.listdir("/dev/shm"))

    def note(self, where, kind, words):
        with self.lock:
            where.append(words)
            print(f"{time.monotonic() - self.start:6.1f} s  {kind}  {words}", flush=True)

    def tell(self, run, words, skipped=False):
        """One line for each misfortune."""
        for name in set(os.listdir("/dev/shm")) - self.shared if not run.life else ():
            self.shared.add(name)
            run.leave(f"/dev/shm/{name}")
        with self.lock:
            self.events.append((run.what, skipped, *map(bool, run.troubles)))
            print(f"{time.monotonic() - self.start:6.1f} s  {run.name:8} {run.what:29} {words}", flush=True)

    def table(self):
        print(f"\n{'misfortune':30} events  survived  lost  left behind  skipped")
        for what in dict.fromkeys(event[0] for event in sorted(self.events)):
            rows = [row for name, *row in self.events if name == what]
            done = [(lost, left) for skipped, lost, left in rows if not skipped]
            lost, left = (sum(row[i] for row in done) for i in (0, 1))
            survived = sum(not any(row) for row in done)
            print(f"{what:30} {len(done):6} {survived:9} {lost:5} {left:12} {len(rows) - len(done):8}")
        oldest = max(self.lives, key=lambda life: len(life.samples), default=None)
        if oldest and len(oldest.samples) >= 8:
            n = len(oldest.samples) // 4
            sizes, files = ([median(x[n : 2 * n]), median(x[-n:])] for x in zip(*oldest.samples, strict=True))
            if 4 * n >= 60 and files[1] > files[0] + 8:
                self.left.append(f"{files[1] - files[0]:.0f} file descriptors in the longest-living trainer")
            print(f"The longest life: {oldest.run.name}, {len(oldest.samples)} s, {oldest.blows} misfortunes")
            grown = f"RSS {sizes[0]:.1f} -> {sizes[1]:.1f} MiB, file descriptors {files[0]:.0f} -> {files[1]:.0f}"
            print(f"  from its second quarter to its last: {grown}")
        for name, words in (("Lost", self.lost), ("Left behind", self.left)):
            print("\n".join([f"{name}: {len(words) or 'nothing'}", *(f"  {x}" for x in words)]))


def plan(rng, decks, visit=3):
    """Run after run, each with a few misfortunes of its shuffled deck."""
    left = {name: [] for name in decks}
    while decks:
        for name in rng.sample(list(decks), len(decks)):
            left[name] = left[name] or rng.sample(decks[name], len(decks[name]))
            yield name, [(left[name].pop(), rng.random(), rng.random()) for _ in left[name][:visit]]


def lane(visits, runs, report, until):
    """Visits, one after another, to the end of the time; at least one. What lives when its visit is over goes with
    SIGTERM."""
    try:
        for i, (name, blows) in enumerate(visits):
            for blow in blows:
                if i == 0 or time.monotonic() < until:
                    runs[name].suffer(*blow)
            if runs[name].life and (name != "veteran" or time.monotonic() > until):
                runs[name].suffer("SIGTERM", 0.3, 0)
            if time.monotonic() > until:
                return
    except Stopped:
        pass
    except BaseException:
        report.stop.set()
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the misfortunes")
    parser.add_argument(
        "--script", type=Path, default=ROOT / PPO, help="in the place of that of gym, unity and veteran"
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="only these")
    parser.add_argument("--only", nargs="+", help="only these misfortunes, by their names in the table")
    parser.add_argument("--out", type=Path, help="keep runs and output in a new folder there")
    args = parser.parse_args()
    decks = {run: [x for x in MISFORTUNES[run] if x in (args.only or MISFORTUNES[run])] for run in args.runs}
    decks = {run: deck for run, deck in decks.items() if deck}
    if not decks:
        parser.error(f"--only: {', '.join(sorted({x for run in args.runs for x in MISFORTUNES[run]}))}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    for number in signals:  # what we ignore, as in the background, our children must not: a handler is not inherited
        ignored = signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, (lambda *_: None) if ignored else signal.default_int_handler)
    out, runs = Path(tempfile.mkdtemp(prefix="torture", dir=args.out)).resolve(), {}
    try:
        report = Report(out)
        runs, until = {name: Run(name, report, args) for name in decks}, report.start + 60 * args.minutes
        lanes = [[name for name in decks if name != "veteran"], [name for name in decks if name == "veteran"]]
        plans = [plan(random.Random(args.seed + i), {name: decks[name] for name in x}) for i, x in enumerate(lanes)]
        with ThreadPoolExecutor() as pool:
            try:
                for future in [pool.submit(lane, visits, runs, report, until) for visits in plans]:
                    future.result()
            finally:
                report.stop.set()
        report.table()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        end(marked(MARK))
        for run in runs.values():
            if run.mounted:  # nobody else sees what is there
                shutil.copytree(run.disk, run.home / "kept") if args.out else None
                LIBC.umount2(bytes(run.disk), 2)
        if not args.out:
            shutil.rmtree(out, ignore_errors=True)
    raise SystemExit(bool(report.lost or report.left))


if __name__ == "__main__":
    main()
