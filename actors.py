"""Acting for lbc_discrete.py: rows that become sequences, what its bandits are told, and processes that act and hand
their sequences over in shared memory.

An actor is this file run as a program: it imports the script, makes envs, agent and bandit of its own, and acts.
Weights, statistics and the bandit's state come from the disk, runs/NAME/weights.pt, replaced as a whole, with the
number of updates as their version. A sequence goes into a place of the shared memory that is free, and a line on the
actor's standard output says which, and which episodes ended; a line on its standard input gives the place back. While
none is free the actor waits: it is never further ahead than its places. When the learner is gone, so is the input, and
the actor ends; when an actor is gone, another takes its place.
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
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

import fast
import ranks
from checkpoints import plain, replacing
from envs import EngineError
from envs.pixels import shared_file

WEIGHTS = "weights.pt"


class Episodes:
    """What bandits are told, an episode a row: decisions so far, k1, k2, e, return. A bandit's arrays are what is kept
    of it."""

    def __init__(self):
        self.count, self.told = 0, np.zeros((256, 5))

    def update(self, index, episodic_return, step):
        """An episode has ended."""
        if self.count == len(self.told):
            self.told = np.concatenate([self.told, np.zeros_like(self.told)])
        self.told[self.count] = step, *index, episodic_return
        self.count += 1

    def state(self):
        arrays = {name: x.copy() for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        return arrays | {"told": self.told[: self.count].copy()}

    def restore(self, state):
        for name, x in state.items():
            setattr(self, name, x.numpy().copy())
        self.count, self.told = len(self.told), np.concatenate([self.told, np.zeros((256, 5))])


class Rollout:
    """Each slot's rows, in time, as they become a sequence: `memory` rows that are only seen, then those to learn from,
    and one more that is the next sequence's first. A row is dead until it is known what came of it; at a cut it stays
    so, and only its value is asked."""

    KEPT = ("at", "age", "returns", "asked", "index")

    def __init__(self, agent, n, length, bandit=None):
        row, memory = agent.row, agent.memory
        self.rows = np.zeros((n, memory + length + 1), row)
        self.dead = np.zeros((), row)
        self.dead["prob"] = 1
        self.memory, self.bandit, self.version, self.sequences = memory, bandit, 0, []  # the latter are whole
        self.at, self.age, self.returns = np.full(n, memory), np.zeros(n, int), np.zeros(n)
        self.asked = np.zeros(n, bool)  # these slots' last rows are open
        self.index = np.array([bandit.draw() for _ in range(n)]) if bandit else np.zeros((n, 3))
        self.env_actions = np.zeros((n, *row["action"].shape), int)

    def state(self):
        return {name: getattr(self, name).copy() for name in self.KEPT} | {"rows": self.rows.view(np.uint8).copy()}

    def restore(self, state):
        for name in self.KEPT:
            getattr(self, name)[:] = state[name].numpy()
        self.rows.view(np.uint8)[:] = state["rows"].numpy()

    def start(self, obs, infos):
        """What the envs show first."""
        ready = np.flatnonzero(infos["ready"])
        self.open(ready, obs[ready], infos["action_mask"][ready])

    def put(self, who, obs, mask=True):
        """A row for each of these slots, dead as yet."""
        row, rows, last = (who, self.at[who]), self.rows, self.rows.shape[1] - 1
        rows[row] = self.dead
        for name, x in (("obs", obs), ("mask", mask), ("index", self.index[who]), ("age", self.age[who])):
            rows[name][row] = x
        for slot in who[self.at[who] == last]:
            self.sequences.append(rows[slot].copy())
            rows[slot, : self.memory + 1] = rows[slot, last - self.memory :]
            self.at[slot] = self.memory

    def open(self, who, obs, mask):
        """These slots ask for actions. What they see: observations, masks, indices; with memory also the observations
        before, and the age of each."""
        self.put(who, obs, mask)
        self.ready, self.asked[who] = who, True
        self.seen = obs, mask, self.index[who].astype(np.float32)
        if self.memory:
            window = who[:, None], self.at[who][:, None] + np.arange(-self.memory, 1)
            self.seen = self.rows["obs"][window], *self.seen[1:], self.rows["age"][window]

    def act(self, act):
        """Choose for those who asked. Returns what the env gets, a row for each slot."""
        row = self.ready, self.at[self.ready]
        self.rows["action"][row], self.env_actions[self.ready], prob = act(*self.seen)
        self.rows["prob"][row], self.rows["version"][row] = prob[:, 0], self.version
        return self.env_actions

    def receive(self, obs, rewards, terminated, truncated, infos, step):
        """What the envs answered. An episode that ends tells the bandit, and its env gets the next index. Returns what
        ended: index, return, length."""
        if "restarted" in infos:
            self.drop(np.flatnonzero(infos["restarted"]))
        (who,), (ready,) = infos["closed"].nonzero(), infos["ready"].nonzero()
        row = who, self.at[who]
        for name, x in (("reward", rewards[who]), ("terminated", terminated[who]), ("alive", 1)):
            self.rows[name][row] = x
        self.at[who] += 1
        self.age[who] += 1
        self.asked[who] = False
        self.returns += rewards
        cut = who[(truncated & ~terminated)[who]]
        if len(cut):
            self.put(cut, np.stack([infos["final_obs"][slot] for slot in cut]))  # the script's (5)
            self.at[cut] += 1
        ended = np.flatnonzero(terminated | truncated)
        episodes = [[*self.index[slot].tolist(), self.returns[slot].item(), self.age[slot].item()] for slot in ended]
        for slot in ended:
            self.bandit.update(self.index[slot], self.returns[slot], step)
        self.begin(ended)
        self.open(ready, obs[ready], infos["action_mask"][ready])
        return episodes

    def drop(self, who):
        """These slots' open rows will never be closed: they stay dead, and the rows before them end there."""
        self.at[who[self.asked[who]]] += 1
        self.asked[who] = False
        self.begin(who)

    def begin(self, who):
        self.age[who], self.returns[who] = 0, 0
        for slot in who:
            self.index[slot] = self.bandit.draw()


def actor(acting, seen):
    """How to act: in numpy, compared with the module on one of those who ask; with memory the module."""
    return acting.module if len(seen) > 3 else acting.checked(*(x[:1] for x in seen))


def play(agent, spec, n, index=None):
    """For evaluate(): greedy in the mixture at this index; None: the best, the script's (4)."""
    acting, act, rollout = fast.Acting(agent, deterministic=True), None, Rollout(agent, n, 1)
    rollout.index[:] = agent.index if index is None else index

    def chosen(obs, infos, who, begins):
        nonlocal act
        rollout.age[who] = np.where(begins[who], 0, rollout.age[who] + 1)
        rollout.open(who, obs[who], infos["action_mask"][who])
        act = act or actor(acting, rollout.seen)
        actions = rollout.act(act)[who]
        rollout.at[who] += 1
        rollout.sequences.clear()
        return actions

    return chosen


def check(args):
    if ranks.SIZE > 1 and args.num_actors:
        raise ValueError(f"--num-actors {args.num_actors}: with torchrun each rank acts for itself, leave it out")
    if args.num_actors and args.base_port is not None:
        raise ValueError(f"--base-port {args.base_port}: --num-actors launch players of their own, leave it out")


def make_envs(make, script, args, seed, film=None):
    """In the place of envs: actors, each with such envs. make: the script's make_envs."""
    envs, how = make(args, seed, film)
    if film:
        return envs, how
    with contextlib.closing(envs):
        return Actors(args, seed, script, envs), f"{args.num_actors} actors, each {how}"


class Actors:
    """restarts: how often an actor was started again."""

    def __init__(self, args, seed, script, envs):
        self.args, self.seed, self.script = args, seed, str(Path(script).resolve())
        self.single_action_space, self.single_observation_space = (
            envs.single_action_space,
            envs.single_observation_space,
        )
        self.bins, self.sensors = (
            getattr(envs, "bins", 0),
            getattr(envs, "sensors", [*envs.single_observation_space.shape]),
        )
        self.each, self.num_envs = envs.num_envs, args.num_actors * envs.num_envs
        self.processes, self.restarts, self.in_a_row, self.folder = {}, 0, 0, None
        self.stack = contextlib.ExitStack()

    def reset(self, seed):
        """They begin when they are launched."""
        return None, None

    def launch(self, folder, spec, sequence, version, agent, bandit):
        """sequence: one, for its shape."""
        self.folder, self.spec = folder.resolve(), spec
        self.selector = self.stack.enter_context(selectors.DefaultSelector())
        self.push(version, agent, bandit)
        file, self.name, self.files = self.stack.enter_context(shared_file())
        file.truncate(self.num_envs * sequence.nbytes)
        self.places = np.frombuffer(mmap.mmap(file.fileno(), 0), sequence.dtype).reshape(self.num_envs, -1)
        for number in range(self.args.num_actors):
            self.start(number)

    def start(self, number):
        job = {"script": self.script, "args": asdict(self.args), "spec": plain(self.spec), "folder": str(self.folder)}
        job |= {"seed": self.seed + 10_000 * (number + 1) + 1_000 * self.restarts, "memory": self.name}
        job |= {"places": list(range(number * self.each, (number + 1) * self.each)), "all": self.num_envs}
        log, command = tempfile.TemporaryFile(), [sys.executable, str(Path(__file__).resolve())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "pass_fds": self.files}
        # A session of its own: Ctrl-C is for the learner, which finishes the iteration first.
        process = subprocess.Popen(command, env=environment, start_new_session=True, bufsize=0, **pipes)
        self.processes[number] = process, log
        self.selector.register(process.stdout, selectors.EVENT_READ, number)
        self.tell(process, job)

    def tell(self, process, message):
        with contextlib.suppress(OSError):  # that it is gone is noticed where it is heard
            process.stdin.write(json.dumps(message).encode() + b"\n")

    def push(self, version, agent, bandit):
        """Weights, statistics and bandit to the disk."""
        state = bandit.state()
        state["told"] = state["told"][-self.args.window :]
        with replacing(self.folder / WEIGHTS) as temporary:
            torch.save(plain({"version": version, "agent": agent.state_dict(), "bandit": state}), temporary)

    def receive(self, run, bandit, memory):
        """Wait for sequences; what ended in them is told to the run and to the bandit."""
        sequences = []
        while not sequences:
            for key, _ in self.selector.select():
                process, _ = self.processes[key.data]
                line = process.stdout.readline()
                if not line.endswith(b"\n"):
                    self.replace(key.data)
                    continue
                self.in_a_row = 0
                place, episodes = json.loads(line)
                sequences.append(self.places[place].copy())
                self.tell(process, place)
                run.global_step += int(sequences[-1]["alive"][memory:-1].sum())
                for *index, episodic_return, length in episodes:
                    bandit.update(np.array(index), episodic_return, run.global_step)
                    run.ended.append((episodic_return, length))
        run.spent("env")
        if run.last >= run.due_at:
            run.show()
        return sequences

    def replace(self, number):
        """One has died."""
        process, log = self.processes.pop(number)
        self.selector.unregister(process.stdout)
        code, words = end(process, log)
        if self.in_a_row >= self.args.max_restarts:
            raise EngineError(f"actor {number} ended with exit code {code}, {self.in_a_row} restarts in a row: {words}")
        print(f"\nActor {number} ended with exit code {code} and is started again: {words}", flush=True)
        self.restarts, self.in_a_row = self.restarts + 1, self.in_a_row + 1
        self.start(number)

    def close(self):
        for process, _ in self.processes.values():
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process, log in self.processes.values():
            end(process, log)
        self.processes.clear()
        self.stack.close()
        if self.folder:
            (self.folder / WEIGHTS).unlink(missing_ok=True)


def end(process, log):
    """Exit code and last words."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    log.seek(0)
    words = log.read().decode(errors="replace").strip().splitlines()
    log.close()
    return process.returncode, words[-1] if words else "it said nothing"


def work():
    """Be an actor until the input ends."""
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what an env prints goes to the log
    job = json.loads(sys.stdin.buffer.readline())
    spec = importlib.util.spec_from_file_location("script", job["script"])
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in job["args"].items()}
    args, seed, free, weights = script.Args(**given), job["seed"], job["places"], Path(job["folder"], WEIGHTS)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    envs, _ = script.make_envs(args, seed)
    with contextlib.closing(envs), open(job["memory"], "r+b") as file:
        agent, bandit = script.Agent(job["spec"], args), script.BANDITS[args.bandit](args)
        last, version = pull(weights, None, agent, bandit)
        rollout = Rollout(agent, envs.num_envs, args.sequence_length, bandit)
        places = np.frombuffer(mmap.mmap(file.fileno(), 0), rollout.rows.dtype).reshape(job["all"], -1)
        acting, steps, episodes, rollout.version = fast.Acting(agent), 0, [], version
        rollout.start(*envs.reset(seed=seed))
        act = actor(acting, rollout.seen)
        while True:
            if steps % args.sequence_length == 0:
                last, new = pull(weights, last, agent, bandit)
                rollout.version = rollout.version if new is None else new
            steps += 1
            actions = rollout.act(act).reshape(envs.num_envs, *envs.single_action_space.shape)
            episodes += rollout.receive(*envs.step(actions), 0)
            for sequence in rollout.sequences:
                while not free:
                    line = sys.stdin.buffer.readline()
                    if not line:
                        return
                    free.append(int(line))
                places[free[0]] = sequence
                answers.write(json.dumps([free.pop(0), episodes]).encode() + b"\n")
                episodes = []
            rollout.sequences.clear()


def pull(path, last, agent, bandit):
    """What has been pushed since `last`, if anything: which file it was, and its version."""
    with open(path, "rb") as file:  # whatever replaces it, this one stays whole
        there = os.fstat(file.fileno())
        there = there.st_ino, there.st_mtime_ns
        if there == last:
            return last, None
        pulled = torch.load(file, weights_only=True)
    agent.load_state_dict(pulled["agent"])
    bandit.restore(pulled["bandit"])
    return there, pulled["version"]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the learner is gone
        work()
