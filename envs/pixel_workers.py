"""Worker processes of PixelEnvs: rendering scales over processes and not over threads.

A worker is this file run as a program, with several envs. It reads actions from shared memory and writes observations,
rewards and ends there. A JSON line on its standard input starts each request, and a JSON line on its standard output
answers it. When the main process ends, the input ends, and the worker exits.
"""

import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs import attributes, contract
from envs.pixel_wrappers import make_pixel_env
from envs.sync import MAX_REPLAY_STEPS, SyncEnvs
from onefile_rl.engines import errors
from onefile_rl.engines.process import Lines, kill_tree, write_line
from onefile_rl.engines.scenes import EngineError

# What a worker does before its first answer, and the replay of long episodes, take longer than a step: their deadlines
# are these multiples of the timeout.
START_TIMEOUTS = 5
REPLAY_TIMEOUTS = 60


class WorkerDied(EngineError):
    """A worker process has ended. The message says why, or contains what it wrote to its standard error."""


class WorkerHangs(EngineError):
    """A worker process does not answer."""


class Group(SyncEnvs):
    """Envs that are stepped one after another and whose observations are rows of given arrays.

    arrays: "actions", "rewards", "terminated", "truncated", "success", and for each part of an observation
        "obs.NAME" and "final.NAME"; other processes may share their memory
    """

    def __init__(self, envs, arrays, parameters=None, make=None):
        super().__init__(envs, parameters, make)
        self.arrays = arrays
        self.names = list(envs[0].observation_space.spaces)
        self.shapes = [(name, x.shape) for name, x in envs[0].observation_space.spaces.items()]

    def _gather(self, observations):
        for i, obs in enumerate(observations):
            self._put("obs", i, obs)

    def _put(self, kind, i, obs):
        for name in self.names:
            self.arrays[f"{kind}.{name}"][i] = obs[name]

    def _differs(self, obs):
        """Return whether a part of an observation may have another shape than its space."""
        if not isinstance(obs, dict):
            return True
        return any(getattr(obs.get(name), "shape", None) != shape for name, shape in self.shapes)

    def _equals_last(self, i, observation):
        for name in self.names:
            saved = self.arrays[f"obs.{name}"][i]
            if np.asarray(observation[name], saved.dtype).tobytes() != saved.tobytes():
                return False
        return True

    def step(self):
        actions = self.arrays["actions"]
        rewards = self.arrays["rewards"]
        terminated = self.arrays["terminated"]
        truncated = self.arrays["truncated"]
        success = self.arrays["success"]
        for i, env in enumerate(self.envs):
            episode = self.episodes[i]
            first = not episode.actions
            if first:
                episode.note_first_step(env)
            obs, rewards[i], term, trunc, info = contract.step(env, actions[i])
            terminated[i] = term
            truncated[i] = trunc
            if self._differs(obs):
                contract.check_observation(env, obs)
            if term or trunc:
                self._put("final", i, obs)
                succeeded = contract.read_success(env, info)
                success[i] = -1 if succeeded is None else succeeded
                obs = self._next_episode(i)
            elif len(episode.actions) < MAX_REPLAY_STEPS:
                episode.actions.append(actions[i].copy())
            self._put("obs", i, obs)

    def restore(self, episodes):
        """Replay the running episodes and return the envs that start a new one.

        The "obs" arrays hold the saved observations before the call and the current ones after it.
        """
        observations, restarted = self._replay(episodes)
        self._gather(observations)
        return restarted


def make_group(env, num_envs, env_id, settings, parameters, arrays):
    """Return a Group of `env` and as many more envs as make `num_envs`. All of them render with the viewer of `env`.

    settings: arguments of make_pixel_env. parameters: numbers and samplers, by name
    """
    others = [make_pixel_env(env_id, painter=env, **settings) for _ in range(num_envs - 1)]

    def make(arguments):
        env_kwargs = (settings.get("env_kwargs") or {}) | arguments
        return make_pixel_env(env_id, **settings | {"env_kwargs": env_kwargs})

    return Group([env, *others], arrays, parameters, make)


class Worker:
    """A worker process, as the main process sees it. It has the envs from `first` up to, but not including, `last`.

    timeout: seconds to wait for an answer
    """

    def __init__(self, first, last, job, timeout):
        self.first = first
        self.last = last
        self.timeout = timeout
        self.answers = False  # whether it has answered all requests
        self.name = f"worker of envs {first} to {last - 1}"
        self.log = tempfile.TemporaryFile()
        command = [sys.executable, str(Path(__file__).resolve())]
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {"LP_NUM_THREADS": "0", **os.environ, "PYTHONPATH": path}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        # In a session of its own, the worker gets no Ctrl-C: the main process finishes the iteration first.
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, pass_fds=job["files"], **pipes
        )
        self.lines = Lines(self.process.stdout)
        self.send({"first": first, "last": last, **job})

    def send(self, message):
        self.answers = False
        try:
            write_line(self.process.stdin, json.dumps(message).encode(), self.timeout)
        except TimeoutError:
            raise self.hangs(self.timeout) from None
        except OSError:
            raise self.died() from None

    def receive(self, timeouts=1):
        """Return the answer to the last request. `timeouts` is a factor of the timeout."""
        seconds = timeouts * self.timeout
        try:
            line = self.lines.read(seconds)
        except TimeoutError:
            raise self.hangs(seconds) from None
        if line is None:
            raise self.died()
        answer = json.loads(line)
        if isinstance(answer, dict) and "ended" in answer:
            raise WorkerDied(f"the {self.name} ended: {answer['ended']}")
        self.answers = True
        return answer

    def hangs(self, seconds):
        """Return the exception for a process that does not answer."""
        fix = "check what its envs do, or give a larger --timeout-wait"
        return WorkerHangs(f"the {self.name} has not answered for {seconds:g} s: {fix}")

    def died(self):
        """Return the exception for a process that has ended."""
        code = self.process.wait()
        self.log.seek(0)
        output = self.log.read().decode(errors="replace").strip()
        return WorkerDied(f"the {self.name} ended with exit code {code}: {output or 'no output'}")

    def close(self):
        with contextlib.suppress(
            OSError
        ):  # the process has ended, and the last message cannot be flushed
            self.process.stdin.close()
        try:
            self.process.wait(5 if self.answers else 0.1)
        except subprocess.TimeoutExpired:
            kill_tree(self.process)
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


@contextlib.contextmanager
def shared_file():
    """Yield a file in memory, the path under which another process opens it, and the descriptors it must inherit.

    On Linux the file has no name in any folder, so a killed process leaves nothing behind.
    """
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("envs"), "r+b") as file:
            yield file, f"/proc/self/fd/{file.fileno()}", [file.fileno()]
    else:
        with (
            tempfile.NamedTemporaryFile() as file
        ):  # deleted as soon as all processes have opened it
            yield file, file.name, []


def carve(layout, n, memory):
    """Return arrays with n rows each, all in one piece of memory, and the number of bytes that they take.

    layout: (shape, dtype) of a row, by name
    memory: a buffer; without one, each array has its own memory
    """
    arrays = {}
    size = 0
    for name, (row_shape, dtype) in layout.items():
        shape = (n, *row_shape)
        dtype = np.dtype(dtype)
        count = int(np.prod(shape))
        if memory is None:
            arrays[name] = np.zeros(shape, dtype)
        else:
            arrays[name] = np.frombuffer(memory, dtype, count, size).reshape(shape)
        size += -(-count * dtype.itemsize // 64) * 64  # rounded up to cache lines
    return arrays, size


def to_json(episodes):
    """Return the episodes of SyncEnvs.state() with their actions as lists."""
    return episodes and [
        {**episode, "actions": np.asarray(episode["actions"]).tolist()} for episode in episodes
    ]


def work():
    """Work as a worker until the input ends. An error that needs no traceback is the last answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of an env goes to the log

    def answer(value):
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()

    try:
        answer_requests(answer)
    except BaseException as error:
        line = errors.describe(error, __file__)
        if line is None:
            raise
        answer({"ended": line})


def answer_requests(answer):
    """Make the envs of a worker, and answer requests until the input ends."""
    job = json.loads(sys.stdin.buffer.readline())
    first = job["first"]
    last = job["last"]
    with open(job["memory"], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    all_arrays, _ = carve(job["layout"], job["num_envs"], memory)
    arrays = {name: array[first:last] for name, array in all_arrays.items()}
    env = make_pixel_env(job["env_id"], **job["settings"])
    group = make_group(env, last - first, job["env_id"], job["settings"], job["parameters"], arrays)

    answer(None)
    for line in sys.stdin.buffer:
        request, value = json.loads(line)
        if request == "step":
            answer(group.step())
        elif request == "reset":
            group.reset(value + first)
            answer(None)
        elif request == "state":
            answer(to_json(group.episode_states()))
        elif request == "restore":
            answer(group.restore(value))
        elif request == "set_parameters":
            answer(group.set_parameters(value))
        elif request == "get_attr":
            answer(get_encoded(group, value))
        elif request == "set_attr":
            name, values = value
            answer(group.set_attr(name, [attributes.decode(x) for x in values]))


def get_encoded(group, name):
    """Return the attribute `name` of each env, encoded, or an error message."""
    try:
        values = group.get_attr(name)
    except AttributeError as error:
        return {"error": str(error)}
    for value in values:
        if not attributes.is_plain(value):
            kind = type(value).__name__
            return {
                "error": f"get_attr: {name} is a {kind}; workers only send {attributes.PLAIN_DESCRIPTION}"
            }
    return {"values": [attributes.encode(value) for value in values]}


if __name__ == "__main__":
    work()
