"""Interrupt real training runs in random ways, and check that nothing is lost, left over or leaking.

    python benchmarks/torture.py --minutes 5
    python benchmarks/torture.py --minutes 2 --runs unity --only "kill -9" SIGTERM
    python benchmarks/torture.py --minutes 5 --out torture               keep the runs and their output

Small runs of the scripts are interrupted one after another: signals, kill -9 of the trainer, of a
player, a worker, an actor or a rank of torchrun, stopped processes, a closed pipe, a full disk, also
at the end of a run, two processes for one run, damaged messages of a player. Runs that end are
resumed. In parallel, one trainer, the "veteran", runs from the first minute to the last through all
incidents that a trainer must survive; the growth of memory and of open files is measured there. With
the same seed the incidents are the same, in the same order; their number depends on the time.

After each incident the checkpoint must load, be finite, and have at least as many decisions as any
checkpoint before. After an orderly end it must be that of the last logged iteration. After kill -9
it may be older by the checkpoint interval and by unfinished iterations. A run that ends on a full
disk must report how many decisions the checkpoint has. A resumed run must continue from exactly
there, and each of two torchrun jobs its own run. A run with damaged messages must restart the player
or end with one line. No process, port, shared memory or temporary file
may be left over. Processes are recognized by an environment variable that their children inherit; no
other process is touched.

The exit code is 1 if anything is lost or left over. Linux only. With root rights, disks and /dev/shm
are tmpfs in a private mount namespace; otherwise "full disk" is skipped.
"""

import argparse
import ctypes
import itertools
import json
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
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import mutations
import torch
from tensorboard.compat.proto.event_pb2 import Event

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onefile_rl import checkpoints  # noqa: E402

MARK = f"TORTURE={uuid.uuid4()}"  # the environment variable of all processes started here
NUMBERS = itertools.count(1)  # of the trainers
LIBC = ctypes.CDLL(None)
DISK_SIZE = 64  # MiB
DECISIONS = r"checkpoint\.pt has ([\d,]+) of ([\d,]+) decisions"  # of a message about a full disk
TIMEOUT = 90  # seconds for anything that must happen; a hung player is noticed after 60

# Script, decisions per iteration, and settings that make an iteration short. A checkpoint is
# written every third iteration.
PPO = "ppo_continuous_multiagent.py"
BALL = "--env-id 3DBall --num-players 2 --num-steps 32 --num-minibatches 8"
RUNS = {
    "gym": (PPO, 512, "--env-id Reacher2Dof-v0 --num-envs 2 --num-steps 256 --num-minibatches 8"),
    "unity": (PPO, 768, BALL),
    "pixel": (
        "ppo_pixel.py",
        64,
        "--env-id DummyPixels-v0 --num-workers 2 --num-envs 4 --num-steps 16 --num-minibatches 2 "
        "--update-epochs 1 --features 64 --timeout-wait 10",
    ),
    "actors": (
        "lbc_discrete.py",
        320,
        "--env-id CartPole-v1 --num-actors 2 --num-envs 8 --replay-size 50 --hidden-sizes 16 "
        "--eval-interval 0 --timeout-wait 5",
    ),
    "sac": (
        "sac_continuous.py",
        1000,
        "--env-id Reacher2Dof-v0 --buffer-size 5000 --learning-starts 500 --batch-size 32 "
        "--updates-per-step 0.1 --hidden-sizes 32 32 --save-buffer",
    ),
    "torchrun": (
        PPO,
        256,
        "--env-id Reacher2Dof-v0 --num-envs 1 --num-steps 128 --num-minibatches 4",
    ),
    "unity messages": (PPO, 0, ""),  # see mutations.py
    "godot messages": (PPO, 0, ""),
    "veteran": (PPO, 768, BALL),
}
# The command of docs/cluster.md, with which nothing listens for other machines
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-conf=store_type=file", "--nproc_per_node=2", "--max-restarts=1"]

SURVIVED = ["full disk", "two at once"]  # the trainer continues
ENDED = [
    "kill -9",
    "SIGTERM",
    "SIGINT",
    "SIGINT twice",
    "SIGHUP",
    "stdout closed",
    "resumed while it ends",
]
# Incidents after which no trainer is left. "resumed while it ends" may leave the resumed one
NO_TRAINER = [*ENDED[:-1], "worker killed", "worker stopped", "player stopped, SIGINT twice"]
FULL_AT_END = ["full disk at the end", "full disk, room at the end"]
ALL_RUNS = [*ENDED, *SURVIVED, *FULL_AT_END]
INCIDENTS = dict.fromkeys(RUNS, ALL_RUNS)
INCIDENTS["unity"] = [*ALL_RUNS, "player killed", "player stopped, SIGINT twice"]
INCIDENTS["pixel"] = [*ALL_RUNS, "worker killed", "worker stopped"]
INCIDENTS["actors"] = [*ALL_RUNS, "actor killed", "actor stopped"]
INCIDENTS["torchrun"] = ["rank killed", "ranks of two jobs killed"]
INCIDENTS["unity messages"] = INCIDENTS["godot messages"] = mutations.KINDS
INCIDENTS["veteran"] = [*SURVIVED, "player killed", "player killed", "player stopped"]


# The processes that a trainer starts, and its message about one that is stopped
CHILDREN = {
    "player": ("envs/unity_scenes/player.py", "has not answered for"),
    "worker": ("envs/pixel_workers.py", "has not answered for"),
    "actor": ("onefile_rl/actor_processes.py", "has sent nothing for"),
}


class Stopped(Exception):
    """This program itself was interrupted."""


# Information of the system


def marked(mark, script=""):
    """Yield the processes whose mark starts with `mark` and whose command line contains `script`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            is_marked = any(x.startswith(mark.encode()) for x in variables)
            if is_marked and script.encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def variable(pid, name):
    """Return an environment variable of a process, None if there is none."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(f"{name}=".encode()):
                return line.decode().partition("=")[2]
    return None


def kill(pids):
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def open_files(pid):
    """Return the names of the open files and sockets of a process."""
    with suppress(OSError):
        links = Path(f"/proc/{pid}/fd").iterdir()
        return [os.path.basename(os.path.realpath(link)) for link in links]
    return []


def listening():
    """Return the ports on which processes listen, by the name of their socket."""
    ports = {}
    for protocol in ("tcp", "tcp6"):
        for line in Path("/proc/net", protocol).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A":
                ports[f"socket:[{cells[9]}]"] = int(cells[1].rpartition(":")[2], 16)
    return ports


def unshare_mounts():
    """Make later mounts visible to this process and its children only. Return whether it worked."""
    new_namespace = 0x20000
    private = 0x44000
    if os.geteuid() != 0 or LIBC.unshare(new_namespace) != 0:
        return False
    return LIBC.mount(b"", b"/", b"", private, None) == 0


def mount(place):
    """Mount a small tmpfs. Return whether it worked."""
    size = f"size={DISK_SIZE}m".encode()
    return LIBC.mount(b"tmpfs", bytes(Path(place)), b"tmpfs", 0, size) == 0


def events(folder, pid):
    """Yield the TensorBoard events of a process. The last one may be incomplete."""
    if not folder:
        return
    for path in sorted(folder.glob(f"events.out.tfevents.*.{pid}.*")):
        data = path.read_bytes()
        at = 0
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            if at + 16 + size > len(data):
                break
            with suppress(Exception):  # incomplete, on a full disk
                yield Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size


def finite(x):
    """Return whether all tensors in nested dicts and lists are finite."""
    if isinstance(x, torch.Tensor):
        return bool(torch.isfinite(x).all())
    if isinstance(x, dict):
        return all(map(finite, x.values()))
    if isinstance(x, (list, tuple)):
        return all(map(finite, x))
    return True


def to_number(text):
    """Return a number of a message, "12,288" for example."""
    return int(text.replace(",", ""))


# Runs


class Trainer:
    """A training process, its output, and samples of its memory and open files."""

    def __init__(self, run):
        number = next(NUMBERS)
        self.run = run
        self.mark = f"{MARK}.{number}."
        self.output = ""
        self.sockets = set()  # of the trainer and its children
        self.samples = []  # memory in MiB and number of open files, once per second
        self.start = time.monotonic()
        self.resumed_step = (
            run.step
        )  # the decisions of the checkpoint to resume; 0: none, or checked
        self.incidents = 0
        self.temporary = run.home / f"tmp{number}"
        self.temporary.mkdir()
        self.log = open(run.home / f"trainer{number}.txt", "wb")

        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(run.home.parent / "config"),
            "TMPDIR": str(self.temporary),
            # torch makes this folder together with the first optimizer, by default in TMPDIR
            "TORCHINDUCTOR_CACHE_DIR": str(run.home.parent / "inductor"),
            "PYTHONUNBUFFERED": "1",
            "TORTURE": self.mark.partition("=")[2],
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see TORCHRUN
        }
        self.process = subprocess.Popen(
            [*map(str, run.command())],
            cwd=run.disk,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.pid = self.process.pid
        self.writer = self.pid  # the process that writes the run; with torchrun, rank 0
        self.pipe = self.process.stdout
        os.set_blocking(self.pipe.fileno(), False)

    def is_alive(self):
        """Read new output, take a sample, and return whether the process is alive."""
        alive = self.process.poll() is None
        with suppress(ValueError):  # the pipe was closed here
            while more := self.pipe.read(65536):
                self.output += more.decode(errors="replace")
                self.log.write(more)
        if alive and time.monotonic() > self.start + len(self.samples):
            for pid in marked(self.mark):
                self.sockets |= {x for x in open_files(pid) if x.startswith("socket:")}
            with suppress(OSError):
                pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
                memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
                self.samples.append((memory, len(open_files(self.pid))))
        return alive

    def signal(self, number):
        """Send a signal to the process group of the trainer, as a terminal does."""
        if self.process.poll() is None:
            os.killpg(self.pid, number)

    def printed_step(self):
        """Return the decisions of the last line of progress."""
        steps = re.findall(r"([\d,]+) steps", self.output)
        return max(map(to_number, steps), default=0)

    def stopped_step(self):
        """Return the decisions that the trainer reported when it stopped."""
        steps = re.findall(r"Stopped after ([\d,]+) decisions", self.output)
        return max(map(to_number, steps), default=0)

    def first_step(self):
        """Return the decisions from which the trainer resumed, according to its events."""
        for event in events(self.run.folder, self.writer):
            if event.session_log.status == 1:
                return event.step - 1
        return None

    def logged_step(self):
        """Return the decisions of the last logged iteration."""
        steps = [x.step for x in events(self.run.folder, self.writer) if x.summary.value]
        return max(steps, default=0)


class Run:
    """The folder of a run, and its current trainer."""

    def __init__(self, name, report, args):
        script, self.batch, settings = RUNS[name]
        self.name = name
        self.report = report
        self.home = report.out / name
        self.script = args.script.resolve() if script == PPO else ROOT / script
        self.interval = 3 * self.batch
        self.settings = [*settings.split(), "--no-compile", "--total-timesteps", 10**9]
        self.settings += ["--checkpoint-interval", self.interval]
        self.disk = self.home / "disk"
        self.folder = None  # of the run, once it has a checkpoint
        self.step = 0  # decisions of the last checkpoint
        self.seen = None  # inode and time of the last checkpoint
        self.trainer = None
        self.incident = ""
        self.num_lost = 0  # in the current incident
        self.num_left = 0
        self.disk.mkdir(parents=True)
        self.mounted = report.mounts and mount(self.disk)

    def command(self):
        """Return the command that starts the run, or resumes it."""
        options = ["--resume", self.folder] if self.folder else self.settings
        return [sys.executable, self.script, *options]

    def report_lost(self, text):
        self.num_lost += 1
        self.report.note(self.report.lost, "LOST", f"{self.name}, {self.incident}: {text}")

    def report_left(self, text):
        self.num_left += 1
        self.report.note(self.report.left, "LEFT OVER", f"{self.name}, {self.incident}: {text}")

    def find_folder(self):
        """Return the folder of the run, None if it has no checkpoint yet."""
        paths = self.disk.glob("runs/*/checkpoint.pt")
        return next((path.parent for path in paths), None)

    def check_checkpoint(self):
        """Check a new checkpoint: it must be complete, finite, and not older than the last one."""
        if self.folder is None:
            self.folder = self.find_folder()
        if self.folder is None:
            return
        before = self.step
        try:
            file = os.stat(self.folder / "checkpoint.pt")
            version = (file.st_ino, file.st_mtime_ns)
            if version == self.seen:
                return
            self.seen = version
            state = checkpoints.load(self.folder, self.script)[1]
        except (OSError, ValueError) as error:
            self.report_lost(str(error))
            return
        self.step = state["global_step"]
        if not finite(state["kept"]):
            self.report_lost("the checkpoint is not finite")
        if self.step < before:
            self.report_lost(f"the checkpoint went back from {before} to {self.step} decisions")

    def wait(self, done, seconds=TIMEOUT):
        """Wait until done() is true. Return False after so many seconds."""
        until = time.monotonic() + seconds
        while not done():
            if self.trainer:
                self.trainer.is_alive()
            self.check_checkpoint()
            if self.report.stop.is_set():
                raise Stopped
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def sleep(self, seconds):
        self.wait(lambda: False, seconds)

    def expect_progress(self, decisions=0):
        """Wait for a new checkpoint with more than so many decisions since the last one."""
        trainer = self.trainer
        before = self.step
        progress = self.wait(lambda: not trainer.is_alive() or self.step > before + decisions)
        if not progress or not trainer.is_alive():
            lines = trainer.output.strip().splitlines() or ["no output"]
            self.report_lost(f"does not continue after {before} decisions: {lines[-1]}")
            self.expect_end()
            return
        if trainer.resumed_step and trainer.first_step() not in (None, trainer.resumed_step):
            wrong = f"resumes from {trainer.first_step()} decisions"
            self.report_lost(f"{wrong}, but the checkpoint had {trainer.resumed_step}")
        trainer.resumed_step = 0
        for path in self.folder.glob(".*.tmp"):
            if f".{trainer.writer}." not in path.name:
                self.report_left(path.name)

    def expect_end(self, allowed_loss=None):
        """Wait for the end of the trainer, and check that nothing is lost or left over.

        allowed_loss: by how many decisions the checkpoint may be older than the last logged
            iteration; None: by any number
        """
        trainer = self.trainer
        self.trainer = None
        if not self.wait(lambda: not trainer.is_alive()):
            self.report_lost(f"has not ended after {TIMEOUT} s")
            kill([trainer.pid])
        trainer.process.wait()
        trainer.is_alive()  # reads the last output
        trainer.log.close()
        trainer.pipe.close()
        self.report.trainers.append(trainer)

        self.check_leftovers(trainer)
        self.check_checkpoint()
        self.check_losses(trainer, allowed_loss)

    def check_leftovers(self, trainer):
        """Report processes, ports and temporary files that the trainer has left over."""
        if not self.wait(lambda: not list(marked(trainer.mark)), 15):
            for pid in marked(trainer.mark):
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                command = command.replace("\0", " ")
                self.report_left(f"process {pid}, {command}")
                kill([pid])
        for port in {port for name, port in listening().items() if name in trainer.sockets}:
            self.report_left(f"port {port}")
        for path in self.find_temporary(trainer):
            self.report_left(f"temporary file {path.name}")

    def find_temporary(self, trainer):
        """Return the temporary files that a trainer has left over."""
        return list(trainer.temporary.iterdir())

    def check_losses(self, trainer, allowed_loss):
        """Report decisions and files that the checkpoint should have."""
        if allowed_loss is not None:
            made = trainer.logged_step()
            if allowed_loss:
                made = max(made, trainer.printed_step())
            made -= allowed_loss
            if self.step < made:
                lost = f"{made - self.step} decisions: {made} made, {self.step} kept"
                self.report_lost(lost)
        if trainer.stopped_step() > self.step:
            reported = f"the trainer reported {trainer.stopped_step()} decisions"
            self.report_lost(f"{reported}, the checkpoint has {self.step}")
        if not self.folder:
            return
        with suppress(ValueError):  # a bad checkpoint has been reported already
            state = checkpoints.load(self.folder, self.script)[1]
            for file in state["large"].values():
                if not (self.folder / file).exists():
                    self.report_lost(f"{file}, a part of the checkpoint")

    def begin(self, incident):
        """Begin an incident."""
        self.incident = incident
        self.num_lost = 0
        self.num_left = 0

    def suffer(self, incident, when, how):
        """Let the run go through one incident.

        when, how: random numbers from 0 to 1 that determine its time and its details
        """
        self.begin(incident)
        if incident.startswith("full disk") and not self.mounted:
            self.report.tell(self, "skipped: only root can mount a small disk", skipped=True)
            self.sleep(1)
            return

        # Start a trainer if there is none, and choose the time of the incident
        is_new = self.trainer is None
        twin = None
        if is_new and self.folder and incident == "two at once":
            twin = Trainer(self)
        if is_new:
            self.trainer = Trainer(self)
        trainer = self.trainer
        if is_new and self.step and incident in ENDED and when < 0.25:
            self.wait(lambda: not trainer.is_alive(), 16 * when)  # while it starts
        elif not twin:
            self.expect_progress()
            self.sleep(3 * when)
        if not self.trainer:
            self.report.tell(self, "the trainer had ended before")
            return

        trainer.is_alive()  # reads its output
        before = max(self.step, trainer.printed_step())
        trainer.incidents += 1
        self.strike(trainer, incident, how, twin)
        if self.trainer and incident in NO_TRAINER:
            killed = incident == "kill -9"
            self.expect_end(self.interval + 2 * self.batch if killed else 0)
            if incident.startswith(tuple(CHILDREN)) and "Traceback" in trainer.output:
                self.report_lost("the trainer ended with a traceback")
        elif self.trainer:
            # More than one interval: a checkpoint may have been under way
            self.expect_progress(self.interval)
        self.report.tell(self, f"{before:,} -> {self.step:,}")

    def strike(self, trainer, incident, how, twin):
        """Cause the incident."""
        if incident.startswith(tuple(CHILDREN)):
            self.strike_child(trainer, incident, how)
        if incident == "kill -9":
            kill([trainer.pid])
        elif incident in ("SIGTERM", "SIGINT", "SIGHUP"):
            trainer.signal(getattr(signal, incident))
        elif incident.endswith("SIGINT twice"):
            trainer.signal(signal.SIGINT)
            self.wait(lambda: not trainer.is_alive(), how)
            trainer.signal(signal.SIGINT)
        elif incident == "stdout closed":
            trainer.pipe.close()
        elif incident == "resumed while it ends":
            self.resume_while_it_ends(trainer, how)
        elif incident == "two at once":
            self.run_two(trainer, twin or Trainer(self))
        elif incident == "full disk":
            with self.full_disk() as fill:
                self.wait(fill, 1 + 3 * how)
        elif incident in FULL_AT_END:
            self.end_on_full_disk(trainer, incident == "full disk at the end", how)

    def strike_child(self, trainer, incident, how):
        """Kill or stop a player, a worker or an actor. A stopped one must be noticed."""
        what = incident.split()[0]
        script, message = CHILDREN[what]
        children = []
        self.wait(lambda: children.extend(sorted(marked(trainer.mark, script))) or children)
        num_messages = trainer.output.count(message)
        number = signal.SIGSTOP if "stopped" in incident else signal.SIGKILL
        os.kill(children[int(how * len(children))], number)
        if incident.endswith("stopped"):
            noticed = lambda: not trainer.is_alive() or trainer.output.count(message) > num_messages
            if not self.wait(noticed) or message not in trainer.output:
                self.report_lost(f"a stopped {what} was not reported within {TIMEOUT} s")

    def resume_while_it_ends(self, trainer, how):
        """Start a second trainer, then end the first one. The second one is refused, or resumes
        from the end of the first one."""
        second = Trainer(self)
        self.wait(lambda: not second.is_alive(), 6 * how)
        trainer.signal(signal.SIGTERM)
        self.expect_end(0)
        self.trainer = second
        second.resumed_step = trainer.stopped_step() or second.resumed_step
        self.wait(lambda: not second.is_alive() or "tensorboard --logdir" in second.output)
        refused = "in use" in second.output or "in the meantime" in second.output
        if not second.is_alive() and refused:
            self.expect_end()

    def run_two(self, trainer, twin):
        """Run two trainers: one must be refused, the other one continues."""
        both = [trainer, twin]
        self.wait(lambda: not all(x.is_alive() for x in both))
        both.sort(key=Trainer.is_alive)
        ended, alive = both
        as_expected = not ended.is_alive() and alive.is_alive() and "in use" in ended.output
        if not as_expected:
            self.report_lost("of two processes for one run, not exactly one was refused")
        self.trainer = ended
        self.expect_end()
        self.trainer = alive

    @contextmanager
    def full_disk(self):
        """Fill the disk. Yields a function that fills it again: a trainer may remove files."""
        path = self.disk / "ballast"

        def fill():
            with suppress(OSError):
                while file.write(bytes(4096)):
                    pass

        try:
            with open(path, "wb", buffering=0) as file:
                fill()
                yield fill
        finally:
            path.unlink(missing_ok=True)

    def end_on_full_disk(self, trainer, stays_full, how):
        """End a trainer on a full disk. It waits for room. Either there is some, or it is told to
        give up with a second signal."""
        with self.full_disk() as fill:
            self.wait(fill, 0.5 + 2 * how)
            trainer.signal(signal.SIGTERM)
            self.wait(lambda: fill() or not trainer.is_alive() or "; waiting" in trainer.output)
            if stays_full:
                trainer.signal(signal.SIGTERM)
                self.wait(lambda: fill() or not trainer.is_alive())
                self.expect_end()
        if not stays_full:
            self.expect_end(0)
        self.check_last_words(trainer, saved=not stays_full)

    def check_last_words(self, trainer, saved):
        """Check what a trainer reports at its end about the last state, and its exit code."""
        code = trainer.process.returncode
        lines = trainer.output.strip().splitlines() or ["no output"]
        *_, (_, made) = re.findall(DECISIONS, trainer.output) or [("0", "0")]
        made = max(trainer.logged_step(), trainer.stopped_step(), to_number(made))
        claims_all = trainer.stopped_step() > 0
        if claims_all and (self.step < made or code != 0):
            text = f"reports {trainer.stopped_step()} decisions with exit code {code}"
            self.report_lost(f"{text}, the checkpoint has {self.step} of {made}")
        elif saved and not claims_all:
            self.report_lost(f"has not saved {made} decisions although there was room: {lines[-1]}")
        elif not claims_all:
            told = re.search(DECISIONS, lines[-1])
            if code == 0 or not told or to_number(told[1]) != self.step:
                text = f"the checkpoint has {self.step} of {made} decisions"
                self.report_lost(f"{text}, and with exit code {code} it reports: {lines[-1]}")


class Jobs(Run):
    """Two jobs of torchrun at the same time in one folder, with the same arguments."""

    def suffer(self, incident, when, how):
        """Kill a rank of one job, or of both. Each job must restart its ranks and resume its own
        run from its last checkpoint."""
        self.begin(incident)
        disk = self.disk / f"jobs{len(list(self.disk.iterdir()))}"
        disk.mkdir()
        jobs = [Job(self, disk, number) for number in (1, 2)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.expect_progress()
        jobs[0].sleep(3 * when)

        # Kill a rank, and wait for the restart
        before = sum(job.step for job in jobs)
        killed = jobs if "two" in incident else [jobs[how < 0.5]]
        killed = [job for job in killed if job.trainer]
        for job in killed:
            job.kill_rank(str(int(10 * how) % 2))
        for job in killed:
            job.expect_restart()

        # End both jobs in an orderly way
        for job in jobs:
            if job.trainer:
                job.expect_progress()
        for job in jobs:
            if job.trainer:
                os.kill(job.trainer.pid, signal.SIGTERM)
                job.expect_end(0)
        self.check_folder(disk)
        self.num_lost += sum(job.num_lost for job in jobs)
        self.num_left += sum(job.num_left for job in jobs)
        self.report.tell(self, f"{before:,} -> {sum(job.step for job in jobs):,}")

    def check_folder(self, disk):
        """Check that the jobs have one run each, and have left no notes."""
        folders = list(disk.glob("runs/*"))
        if len(folders) != 2:
            self.report_lost(f"two jobs have made {len(folders)} runs")
        for path in disk.rglob("run.json"):
            self.report_left(f"a job's note {path.relative_to(disk)}")


class Job(Run):
    """A job of torchrun, and its run."""

    def __init__(self, jobs, disk, number):
        vars(self).update(vars(jobs))
        self.name = f"{jobs.name} {number}"
        self.disk = disk
        self.ranks_before = {}  # that were alive when one of them was killed

    def command(self):
        return [*TORCHRUN, "--log-dir=logs", self.script, *self.settings]

    def start(self):
        """Start the job, and wait for its folder: the folder's name has the time in seconds."""
        self.trainer = Trainer(self)
        self.wait(lambda: not self.trainer.is_alive() or self.starts(), 2 * TIMEOUT)
        self.note_writer()

    def starts(self):
        """Return the folders that the ranks have named at their starts."""
        return re.findall(
            r"^(runs/\S+): (?:resumed .*; )?2 ranks", self.trainer.output, re.MULTILINE
        )

    def ranks(self):
        """Return the processes of the ranks, by the number of the rank."""
        pids = set(marked(self.trainer.mark, self.script.name)) - {self.trainer.pid}
        return {variable(pid, "RANK"): pid for pid in pids}

    def note_writer(self):
        self.trainer.writer = self.ranks().get("0", self.trainer.pid)

    def find_folder(self):
        if self.trainer is None or not self.starts():
            return None
        folder = self.disk / self.starts()[0]
        return folder if (folder / "checkpoint.pt").exists() else None

    def find_temporary(self, trainer):
        """Return all but the file of torchrun's rendezvous, which torchrun does not remove."""
        return [path for path in trainer.temporary.iterdir() if not path.name.startswith("tmp")]

    def kill_rank(self, rank):
        self.ranks_before = self.ranks()
        kill([self.ranks_before[rank]])

    def expect_restart(self):
        """Wait until torchrun has restarted the ranks, and check that they resume the job's run."""
        trainer = self.trainer
        before = set(self.ranks_before.values())
        self.wait(lambda: not before & set(self.ranks().values()), 2 * TIMEOUT)
        self.check_checkpoint()
        trainer.resumed_step = self.step
        self.wait(lambda: not trainer.is_alive() or len(self.starts()) > 1, 2 * TIMEOUT)
        self.note_writer()
        first, *others = self.starts()
        if others != [first]:
            self.report_lost(f"the job of {first} was restarted with {others or 'no run'}")


class Messages(Run):
    """Runs whose player sends damaged messages, see mutations.py."""

    def __init__(self, name, report, args):
        super().__init__(name, report, args)
        self.num_runs = args.damaged_runs

    def command(self):
        engine, _, _ = self.name.partition(" ")
        program = [sys.executable, mutations.__file__, "train", engine, self.incident]
        return [*program, self.seed, self.num_runs, self.batch_folder, self.script]

    def find_folder(self):
        return None  # there are many, and check_run() checks them

    def suffer(self, incident, when, how):
        """Train several times with one kind of damage. Each run ends as planned or with one line."""
        self.begin(incident)
        self.seed = int(1e6 * how)
        self.batch_folder = self.disk / f"{incident} {self.seed}".replace(" ", "_")
        trainer = self.trainer = Trainer(self)
        self.wait(lambda: not trainer.is_alive(), mutations.RUN_SECONDS * self.num_runs)
        self.expect_end()

        # Check the runs, and remove them if nothing is wrong: the disk is small
        ended = [json.loads(line) for line in trainer.output.splitlines() if line.startswith("{")]
        if len(ended) < self.num_runs or trainer.process.returncode != 0:
            self.report_lost(f"only {len(ended)} runs: {trainer.output.strip()[-200:]}")
        counts = [(0, 0, 0)]
        counts += [self.check_run(Path(run["folder"]), run["code"]) for run in ended]
        damaged, restarts, failed = map(sum, zip(*counts, strict=True))
        if damaged == 0:
            self.report_lost(f"the game has sent no message: {trainer.output.strip()[-200:]}")
        if not self.num_lost and not self.num_left:
            shutil.rmtree(self.batch_folder)
        text = f"{len(ended)} runs, {damaged} messages, {restarts} restarts, {failed} ended early"
        self.report.tell(self, text)

    def check_run(self, folder, code):
        """Check how a run has ended. Return the numbers of damaged messages, restarts and errors."""
        output = (folder / "output.txt").read_text(errors="replace")
        *_, last_part = output.strip().split("\n\n")
        if code not in (0, 1) or "Traceback" in output:
            self.report_lost(f"{folder.name} ends with {code}: {output.strip()[-200:]}")
        elif code == 1 and len(last_part.splitlines()) != 1:
            self.report_lost(f"{folder.name} ends with more than one line: {last_part[-200:]}")
        for path in folder.glob("runs/*/checkpoint.pt"):
            try:
                if not finite(checkpoints.load(path, self.script)[1]["kept"]):
                    self.report_lost(f"{folder.name}: the checkpoint is not finite")
            except (OSError, ValueError) as error:
                self.report_lost(str(error))
        damage = folder / "damage.txt"
        num_damaged = damage.read_text().count(self.incident) if damage.exists() else 0
        return num_damaged, output.count("; restarting it"), code != 0


CLASSES = {"torchrun": Jobs, "unity messages": Messages, "godot messages": Messages}


class Report:
    """All incidents, and everything that was lost or left over."""

    def __init__(self, out):
        self.out = out
        self.start = time.monotonic()
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.lost = []
        self.left = []
        self.trainers = []  # those that have ended
        self.events = []  # incident, whether it was skipped, whether something was lost, left over
        self.mounts = unshare_mounts()
        self.shared = set()  # names in /dev/shm that are known
        if not self.mounts or not mount("/dev/shm"):
            self.shared = set(os.listdir("/dev/shm"))

    def note(self, notes, kind, text):
        with self.lock:
            notes.append(text)
            print(f"{time.monotonic() - self.start:6.1f} s  {kind}  {text}", flush=True)

    def tell(self, run, text, skipped=False):
        """Print a line for an incident."""
        if not run.trainer:
            for name in set(os.listdir("/dev/shm")) - self.shared:
                self.shared.add(name)
                run.report_left(f"/dev/shm/{name}")
        with self.lock:
            self.events.append((run.incident, skipped, run.num_lost > 0, run.num_left > 0))
            seconds = f"{time.monotonic() - self.start:6.1f} s"
            print(f"{seconds}  {run.name:14} {run.incident:29} {text}", flush=True)

    def print_table(self):
        print(f"\n{'incident':30} events  survived  lost  left over  skipped")
        for incident in sorted({event[0] for event in self.events}):
            rows = [event[1:] for event in self.events if event[0] == incident]
            done = [(lost, left) for skipped, lost, left in rows if not skipped]
            num_lost = sum(lost for lost, _ in done)
            num_left = sum(left for _, left in done)
            survived = sum(not lost and not left for lost, left in done)
            cells = f"{len(done):6} {survived:9} {num_lost:5} {num_left:10}"
            print(f"{incident:30} {cells} {len(rows) - len(done):8}")
        self.print_growth()
        for name, notes in (("Lost", self.lost), ("Left over", self.left)):
            print(f"{name}: {len(notes) or 'nothing'}")
            for text in notes:
                print(f"  {text}")

    def print_growth(self):
        """Print how the memory and the open files of the longest-running trainer have grown."""
        oldest = max(self.trainers, key=lambda trainer: len(trainer.samples), default=None)
        if not oldest or len(oldest.samples) < 8:
            return
        quarter = len(oldest.samples) // 4
        grown = []
        for column in zip(*oldest.samples, strict=True):
            grown.append((median(column[quarter : 2 * quarter]), median(column[-quarter:])))
        memory, files = grown
        if 4 * quarter >= 60 and files[1] > files[0] + 8:
            leaked = files[1] - files[0]
            self.left.append(f"{leaked:.0f} file descriptors in the longest-running trainer")
        duration = f"{len(oldest.samples)} s, {oldest.incidents} incidents"
        print(f"The longest-running trainer: {oldest.run.name}, {duration}")
        memory = f"RSS {memory[0]:.1f} -> {memory[1]:.1f} MiB"
        files = f"file descriptors {files[0]:.0f} -> {files[1]:.0f}"
        print(f"  from its second quarter to its last: {memory}, {files}")


# The order of the incidents


def plan(rng, incidents, num_per_visit=3):
    """Yield the name of a run and a few of its incidents, in random order and without end.

    All incidents of a run are used before one is repeated.
    """
    left = {name: [] for name in incidents}
    while incidents:
        for name in rng.sample(list(incidents), len(incidents)):
            if not left[name]:
                left[name] = rng.sample(incidents[name], len(incidents[name]))
            visit = []
            for _ in left[name][:num_per_visit]:
                visit.append((left[name].pop(), rng.random(), rng.random()))
            yield name, visit


def run_plan(visits, runs, report, until):
    """Go through the visits until the time is over, at least through one.

    A trainer that is alive at the end of a visit is ended with SIGTERM, the veteran at the end.
    """
    try:
        for i, (name, incidents) in enumerate(visits):
            run = runs[name]
            for incident in incidents:
                if i == 0 or time.monotonic() < until:
                    run.suffer(*incident)
            if run.trainer and (name != "veteran" or time.monotonic() > until):
                run.suffer("SIGTERM", 0.3, 0)
            if time.monotonic() > until:
                return
    except Stopped:
        pass
    except BaseException:
        report.stop.set()
        raise


def run_all(incidents, args, report, runs):
    """Run the veteran and the other runs in parallel."""
    until = report.start + 60 * args.minutes
    for name in incidents:
        runs[name] = CLASSES.get(name, Run)(name, report, args)
    others = {name: x for name, x in incidents.items() if name != "veteran"}
    veteran = {name: x for name, x in incidents.items() if name == "veteran"}
    with ThreadPoolExecutor() as pool:
        try:
            futures = []
            for i, part in enumerate((others, veteran)):
                visits = plan(random.Random(args.seed + i), part)
                futures.append(pool.submit(run_plan, visits, runs, report, until))
            for future in futures:
                future.result()
        finally:
            report.stop.set()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5, help="duration")
    parser.add_argument("--seed", type=int, default=1, help="seed of the incidents")
    parser.add_argument(
        "--script",
        type=Path,
        default=ROOT / PPO,
        help="a changed copy of the script of gym, unity and veteran",
    )
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), help="only these runs"
    )
    parser.add_argument("--only", nargs="+", help="only these incidents, see the table")
    what = "runs with damaged messages per incident"
    parser.add_argument("--damaged-runs", type=int, default=16, help=what)
    parser.add_argument("--out", type=Path, help="keep runs and output in a new folder there")
    args = parser.parse_args()
    incidents = {}
    for name in args.runs:
        chosen = [x for x in INCIDENTS[name] if args.only is None or x in args.only]
        if chosen:
            incidents[name] = chosen
    if not incidents:
        names = sorted({x for name in args.runs for x in INCIDENTS[name]})
        parser.error(f"--only: give one or more of {', '.join(names)}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)

    # Children inherit an ignored signal, as in a background job, but not a handler
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        ignored = signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, (lambda *_: None) if ignored else signal.default_int_handler)

    out = Path(tempfile.mkdtemp(prefix="torture", dir=args.out)).resolve()
    runs = {}
    try:
        report = Report(out)
        run_all(incidents, args, report, runs)
        report.print_table()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        kill(marked(MARK))
        for run in runs.values():
            if run.mounted:
                if args.out:  # no other process can see this mount
                    shutil.copytree(run.disk, run.home / "kept")
                LIBC.umount2(bytes(run.disk), 2)
        if not args.out:
            shutil.rmtree(out, ignore_errors=True)
    raise SystemExit(1 if report.lost or report.left else 0)


if __name__ == "__main__":
    main()
