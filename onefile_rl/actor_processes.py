"""Actor processes: they step environments and send arrays to the learner, the process that trains.

The script decides what the actor processes do. Each of them calls the function of the script
`run_actor(args, spec, seed, learner)`, and the learner uses ActorProcesses in place of envs:

    train()                                            run_actor()

    envs.push(state)  -->  runs/NAME/weights.pt  -->   learner.pull()
    envs.receive()    <--  shared memory         <--   learner.send(array, message)

A state is a dict of weights and other values. Its file is replaced atomically.

The shared memory has one place for an array per environment. An actor copies an array into one of
its free places, and writes the number of the place and the message to its standard output. The
learner copies the array, and writes the number to the actor's standard input: the place is free
again. An actor without a free place waits, so it can't get further ahead of the learner than its
places allow. An actor ends when its standard input is closed, that is, when the learner ends. An
actor that ends earlier is started again. So is an actor that hangs: it has sent nothing for five
times --timeout-wait.
"""

import contextlib
import importlib.util
import json
import mmap
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

from envs.pixels import shared_file
from onefile_rl import distributed
from onefile_rl.arguments import from_plain, to_plain
from onefile_rl.checkpoints import plain, save
from onefile_rl.engines import waits
from onefile_rl.engines.process import SLICE, Lines, PlayerGone, kill_tree
from onefile_rl.engines.scenes import EngineError, derive_seed

WEIGHTS = "weights.pt"
# An actor that has sent nothing for this many times --timeout-wait hangs. Its players have a
# deadline of --timeout-wait themselves, and it starts them again.
HANG_TIMEOUTS = 5
REFUSED = 3  # exit code of an actor that refuses what its envs return: starting it again is no help


def check(args):
    """Refuse arguments that can't be combined with --num-actors."""
    if distributed.SIZE > 1 and args.num_actors:
        given = f"--num-actors {args.num_actors}"
        raise ValueError(f"{given}: with torchrun each rank has its own envs, leave it out")
    if args.num_actors and args.base_port is not None:
        given = f"--base-port {args.base_port}"
        raise ValueError(f"{given}: --num-actors launch their own players, leave it out")
    if args.num_actors and args.curriculum:
        fix = "leave --num-actors out, or give --env-parameters instead"
        raise ValueError(f"--curriculum: actor processes have no lessons; {fix}")


def replace_envs(make_envs, script, args, seed, **options):
    """Return ActorProcesses instead of envs, and a description. `make_envs` is the function of the
    script. Envs with other options, those of a video, are returned as they are."""
    envs, how = make_envs(args, seed, **options)
    if options:
        return envs, how
    with contextlib.closing(envs):  # they were opened for their spaces
        return ActorProcesses(args, seed, script, envs), f"{args.num_actors} actors, each {how}"


class ActorProcesses:
    """The learner's side: starts the processes, gives them states and receives their arrays.

    It has the attributes that a run reads from its envs. `num_envs` is the number of all
    environments together, and `restarts` counts the processes that were started again.
    """

    def __init__(self, args, seed, script, envs):
        self.args = args
        self.seed = seed
        self.script = str(Path(script).resolve())
        self.envs_per_actor = envs.num_envs
        self.num_envs = args.num_actors * envs.num_envs
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        for name in (
            "bins",
            "sensors",
            "entities",
            "inputs",
        ):  # parts of the spec that not all envs have
            if hasattr(envs, name):
                setattr(self, name, getattr(envs, name))

        self.processes = {}  # by number: the process and the file with its error messages
        self.lines = {}  # by number: what the process writes
        self.last_times = {}  # by number: when it was started, or has sent something last
        self.hang_seconds = HANG_TIMEOUTS * args.timeout_wait
        self.restarts = 0
        self.failures_in_a_row = 0
        self.push_error = None  # why the last state could not be written
        self.folder = None
        self.stack = contextlib.ExitStack()

    def reset(self, seed):
        """Return no observations: they are in the actor processes, which reset their envs when they
        start."""
        return None, None

    def launch(self, folder, spec, array, state):
        """Start the processes. Each array that they send has the shape and dtype of `array`.
        `state` is the first state that they pull. `folder` is the folder of the run."""
        self.folder = folder.resolve()
        self.spec = spec
        self.push(state)
        if self.push_error:
            raise ValueError(f"{self.folder / WEIGHTS} can't be written: {self.push_error}")
        self.selector = self.stack.enter_context(selectors.DefaultSelector())
        file, self.memory_path, self.inherited_files = self.stack.enter_context(shared_file())
        file.truncate(self.num_envs * array.nbytes)
        memory = mmap.mmap(file.fileno(), 0)
        self.places = np.frombuffer(memory, array.dtype).reshape(self.num_envs, *array.shape)
        for number in range(self.args.num_actors):
            self.start(number)

    def start(self, number):
        """Start the process with this number, and tell it what to do."""
        first_place = number * self.envs_per_actor
        seed = derive_seed(self.seed, 10_000 * (number + 1) + 1_000 * self.restarts)
        job = {
            "script": self.script,
            "args": to_plain(self.args),
            "spec": plain(self.spec),
            "seed": seed,
            "weights": str(self.folder / WEIGHTS),
            "memory": self.memory_path,
            "num_places": self.num_envs,
            "free_places": list(range(first_place, first_place + self.envs_per_actor)),
        }
        log = tempfile.TemporaryFile()
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=self.inherited_files,
            start_new_session=True,  # Ctrl-C goes to the learner, which finishes its iteration
            bufsize=0,
        )
        self.processes[number] = (process, log)
        self.lines[number] = Lines(process.stdout)
        self.last_times[number] = time.monotonic()
        self.selector.register(process.stdout, selectors.EVENT_READ, number)
        self.tell(process, job)

    def tell(self, process, message):
        with contextlib.suppress(OSError):  # receive() notices that the process has ended
            process.stdin.write(json.dumps(message).encode() + b"\n")

    def push(self, state):
        """Write the state that the actors pull. If the disk is full, they continue with the last one, and the next
        call tries again."""
        last_error = self.push_error
        self.push_error = None
        try:
            save(self.folder / WEIGHTS, state, durable=False)
        except (OSError, RuntimeError) as error:
            self.push_error = str(error).splitlines()[0]
            if self.processes and not last_error:
                failed = f"{self.folder / WEIGHTS} could not be written ({self.push_error})"
                print(f"\n{failed}: the actors continue with the last weights", flush=True)

    def receive(self):
        """Wait until an actor has sent something. Return pairs of an array and its message."""
        received = []
        started = time.monotonic()
        while not received:
            for key, _ in self.selector.select(SLICE):
                number = key.data
                process, _ = self.processes[number]
                lines = self.lines[number]
                is_open = lines.fill()
                while (line := lines.pop()) is not None:
                    self.failures_in_a_row = 0
                    self.last_times[number] = time.monotonic()
                    place, message = json.loads(line)
                    received.append((self.places[place].copy(), message))
                    self.tell(process, place)
                if not is_open:
                    self.restart(number)
            self.restart_hanging()
            if not received:
                waits.check_stop(started)
        return received

    def restart_hanging(self):
        """Start the processes again that have sent nothing for too long. An actor without a free
        place has sent something that was not received yet, so it is not among them."""
        for number, last_time in list(self.last_times.items()):
            is_late = time.monotonic() > last_time + self.hang_seconds
            if is_late and not self.lines[number].poll.poll(0):
                kill_tree(self.processes[number][0])
                self.restart(number, f"has sent nothing for {self.hang_seconds:g} s")

    def restart(self, number, what=None):
        """Start a process again that has ended. `what` says why, if it was ended from here."""
        process, log = self.processes.pop(number)
        self.selector.unregister(process.stdout)
        code, error = end(process, log)
        if code == REFUSED:
            raise EngineError(f"actor {number}: {error}")
        what = what or f"ended with exit code {code}"
        if self.failures_in_a_row >= self.args.max_restarts:
            restarts = f"{self.failures_in_a_row} restarts in a row"
            raise EngineError(f"actor {number} {what}, {restarts}: {error}")
        print(f"\nActor {number} {what} and is started again: {error}", flush=True)
        self.restarts += 1
        self.failures_in_a_row += 1
        self.start(number)

    def close(self):
        for process, _ in self.processes.values():
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + 5
        for process, log in self.processes.values():
            end(process, log, max(deadline - time.monotonic(), 0.1))
        self.processes.clear()
        self.stack.close()
        if self.folder:
            (self.folder / WEIGHTS).unlink(missing_ok=True)


def end(process, log, seconds=5):
    """End a process, which has some seconds to end by itself. Return its exit code and the last
    line of its error messages."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        process.wait()
    process.stdout.close()
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    log.close()
    return process.returncode, lines[-1] if lines else "no error message"


class LearnerGone(Exception):
    """The learner has ended."""


class Learner:
    """The actor's side: pulls states from the learner, and sends it arrays."""

    def __init__(self, job, memory, output):
        self.weights = job["weights"]
        self.last_file = None  # the file that was read last
        self.places = np.frombuffer(memory, np.uint8).reshape(job["num_places"], -1)
        self.free_places = job["free_places"]
        self.output = output

    def pull(self):
        """Return the learner's state, or None if it has pushed none since the last call."""
        with open(self.weights, "rb") as file:  # an open file stays complete when it is replaced
            status = os.fstat(file.fileno())
            this_file = (status.st_ino, status.st_mtime_ns)
            if this_file == self.last_file:
                return None
            self.last_file = this_file
            return torch.load(file, map_location="cpu", weights_only=True)

    def send(self, array, message):
        """Send an array, and a message in JSON's types. Waits while the learner has not read the
        last arrays."""
        while not self.free_places:
            line = sys.stdin.buffer.readline()
            if not line:
                raise LearnerGone
            self.free_places.append(int(line))
        place = self.free_places.pop(0)
        self.places[place] = array.view(np.uint8)
        try:
            self.output.write(json.dumps([place, message]).encode() + b"\n")
        except BrokenPipeError:
            raise LearnerGone from None


def main():
    """Run the script's `run_actor` in this process, until the learner ends."""
    output = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what an env prints goes to the error messages
    job = json.loads(sys.stdin.buffer.readline())

    spec = importlib.util.spec_from_file_location("script", job["script"])
    script = importlib.util.module_from_spec(spec)
    sys.modules["script"] = script
    spec.loader.exec_module(script)

    # JSON has lists instead of tuples
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in job["args"].items()}
    args = from_plain(script.Args, given)
    np.random.seed(job["seed"])
    torch.manual_seed(job["seed"])
    torch.set_num_threads(1)
    with open(job["memory"], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    try:
        script.run_actor(args, job["spec"], job["seed"], Learner(job, memory, output))
    except LearnerGone:
        pass
    except PlayerGone:  # starting the actor again may help
        raise
    except EngineError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
