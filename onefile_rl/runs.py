"""A training run: command line, folder, log, progress, checkpoints and resume. It knows no algorithm.

    main(...)                                   train, --resume, --evaluate or --export, as the command line says

    with Run(args, ...) as run:                 opens the envs; saves a checkpoint at the end, also after an error
        next_obs, infos = run.start(...)        makes the run's folder, or restores the checkpoint
        for iteration in run.iterations():      saves checkpoints and videos between two iterations
            run.spent("act")                    counts the time since the last call as time for acting
            run.record(reward, ...)             counts decisions and episodes, after each step of the envs
            run.log({"losses/x": x})            writes the scalars and ends the iteration

The folder runs/NAME has TensorBoard's events, config.json, a copy of the script, checkpoint.pt, best.pt and videos/.
"""

import contextlib
import errno
import gc
import importlib.metadata
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from onefile_rl import behaviors, distributed, fast, initial, signals
from onefile_rl.arguments import (
    COMMON,
    FREE,
    Args,
    Bounds,
    as_typed,
    bounds,
    check,
    check_batch,
    check_changed_args,
    check_memory,
    command_line,
    describe,
    describe_entities,
    from_plain,
    option,
    to_plain,
)
from onefile_rl.checkpoints import (
    FORMAT,
    Lock,
    check_agent,
    check_kept,
    check_room,
    copy_state,
    fingerprint,
    has_state_dict,
    load,
    not_finite,
    plain,
    plain_attributes,
    random_state,
    restore_state,
    save,
    set_attributes,
    set_numbers,
    set_random_state,
    using,
)
from onefile_rl.cpu_time import CpuClock
from onefile_rl.curriculum import Curriculum, value_text
from onefile_rl.engines import waits
from onefile_rl.engines.errors import (
    describe_exit,
    describe_out_of_memory,
    is_message,
    is_out_of_memory,
    is_own,
)
from onefile_rl.engines.files import read
from onefile_rl.engines.printing import accept_any_encoding, printable, printable_lines
from onefile_rl.engines.scenes import EngineError, derive_seed
from onefile_rl.evaluate import evaluate_checkpoint, play_vectors, record_video
from onefile_rl.export import export_checkpoint
from onefile_rl.signals import SIGNALS  # noqa: F401
from onefile_rl.trust import RISKY, seal

# What the scripts use
__all__ = [
    "Args",
    "Bounds",
    "Run",
    "bounds",
    "check",
    "check_batch",
    "check_memory",
    "describe",
    "describe_entities",
    "main",
]

WORTH = 5_000  # a compiled update pays off from this many updates on
END_SECONDS = 60  # how long the end of a run waits for room on the disk
FREE_SPACE = "free some space"
REPORT_SECONDS = 60  # between two messages about the same failure
ended = []  # not empty: the run has ended, and a signal changes nothing any more


def changes(before, now):
    return {name: x for name, x in now.items() if name not in before or before[name] != x}


NUMBERS = (int, float, bool)


def inside(variables):
    """Yield the names and values of a dict, and those inside of dicts, lists and tuples in it."""
    for name, value in variables.items():
        yield name, value
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", x) for key, x in list(value.items()))
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", x) for i, x in enumerate(value))


def folder_id(folder):
    """Return the id of the run that made a folder, or None if its config.json has none, as in an earlier version."""
    file = folder / "config.json"
    if not file.is_file():  # a pipe has no end
        return None
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return config.get("run") if isinstance(config, dict) else None


def is_run(path, state):
    """Return whether this is checkpoint.pt in the folder of the run that wrote it, and not a copy of another run's."""
    in_folder = path.name == "checkpoint.pt" and path.with_name("config.json").exists()
    if not in_folder or path.is_symlink():
        return False
    return folder_id(path.parent) in (None, state.get("run"))


def shortened(x):
    """Return the text of an argument, without the end of a long one, such as a curriculum."""
    text = str(x)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_numbered(name):
    return name.startswith("checkpoint_")


def raise_interrupt(number, _):
    if not ended:
        raise KeyboardInterrupt


class NotSaved(Exception):
    """The run has ended, and its last state is not on the disk, or not all of it."""


class Complete(ValueError):
    """The run to resume has reached its total."""


class Run:
    """One training run. `make_envs(args, seed)` returns the envs and a description of how they are stepped. `resumed`
    is the path and the content of a checkpoint to continue from."""

    def __init__(self, args, script, make_envs, resumed=None):
        self.args = args
        self.script = Path(script)
        self.command = f"python {as_typed(script)}"
        self.make_envs = make_envs
        self.resumed = resumed
        self.fingerprint = fingerprint(script)
        self.leads = distributed.RANK == 0  # this rank writes files
        self.pace = distributed.Pace(args.rollout_share)
        # With --compile. A compiled resumed run may have been compiled by default
        self.must_compile = bool(args.compile) and not resumed

        # Progress, part of the checkpoint
        self.iteration = 0
        self.global_step = 0
        self.best = -math.inf  # the best mean return at a checkpoint
        self.recent = []  # returns of the last iteration in which episodes ended
        if resumed:
            for name in ("iteration", "global_step", "best", "recent"):
                setattr(self, name, resumed[1][name])
        self.initial = None  # the path and the content of the checkpoint to start from
        if args.init_from is not None and not resumed:
            self.initial = initial.read(args.init_from, script)
        self.curriculum = Curriculum(args.curriculum)
        if resumed:
            self.curriculum.restore(resumed[1].get("curriculum"), resumed[0])
        self.given_parameters = args.env_parameters
        args.env_parameters = self.given_parameters | self.curriculum.values()
        self.first_step = self.global_step
        self.logged_step = self.global_step
        self.video_step = self.global_step
        self.saved_step = self.global_step  # of the last checkpoint that was written completely
        self.own_decisions = 0  # decisions of this rank since the last log()

        self.snapshot = None  # the state at the end of the last iteration
        self.saved = None  # the last state that was written to the disk, with all of its files
        self.failed = {}  # why files of the last checkpoint could not be written, by name: text and number
        self.retry_at = 0.0  # when a checkpoint that failed is written again
        self.reported = {}  # when a failure was reported, by what failed
        self.may_be_infinite = set()  # names of kept arrays that are not finite at the start

        # The files of this run, part of the checkpoint
        self.run_id = None
        self.checkpoint_step = None  # decisions in checkpoint.pt; None if there is no such file
        self.files = {}  # numbered checkpoints and large files that this run wrote: their decisions, by name
        self.large_files = {}  # the last complete file of each large object, by the object's name
        self.referred = {}  # the large files to which checkpoint.pt on the disk refers, by the object's name
        self.new_best = None  # the best state, until it is in best.pt
        self.writer = None
        self.lock = None
        self.made_folder = False  # the folder is new
        self.frame = None
        self.frozen = False  # objects of the start are hidden from the garbage collector
        self.not_kept = set()  # names of variables that were found too late
        self.stop = []  # signals that asked for an end
        self.ranks_stop = False  # a rank was asked to stop, and all ranks know it
        self.compiling = []  # compiled updates whose time has not been reported yet
        self.update_description = ""
        self.since_checkpoint = []  # returns
        self.last_successes = []

        self.seconds = {"env": 0.0, "act": 0.0, "learn": 0.0}
        self.cpu_clock = None  # made when the training starts
        self.due_at = 0.0  # when the progress line is printed next
        self.live = sys.stdout.isatty()

    def __enter__(self):
        args = self.args
        self.handlers = signals.handlers()
        signals.handle(self.stop_at_once)  # an interrupt during the launch still closes all players
        self.first_env = distributed.RANK * max(args.num_envs, args.num_players)
        self.device = args.device
        args.device = distributed.local_device(args.device)
        if args.base_port is not None:
            args.base_port += self.first_env
        try:
            distributed.join(args.device)
            # Players and EnvPool can't continue an episode: they start new ones, with another seed
            self.envs_seed = derive_seed(args.seed, self.global_step + self.first_env)
            self.envs, self.how = self.make_envs(args, self.envs_seed)
        except BaseException:
            signals.restore(self.handlers)
            raise
        signals.handle(self.stop_after_iteration)
        self.excepthook = threading.excepthook
        threading.excepthook = self.report_thread

        # The running episodes, and what has been counted since the last log()
        num_envs = self.envs.num_envs
        self.curriculum.behavior = getattr(self.envs, "behavior", None)
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, int)
        self.episodes = []
        self.successes = []
        self.stats = defaultdict(list)

        # Seeds. All ranks create the same weights; start() gives them different random numbers afterwards
        rank_seed = derive_seed(args.seed, distributed.RANK)
        random.seed(rank_seed)
        np.random.seed(rank_seed)
        torch.manual_seed(args.seed)
        self.envs.single_action_space.seed(rank_seed)
        return self

    def stop_after_iteration(self, number, _):
        self.stop.append(number)
        if distributed.SIZE == 1:  # the other ranks would wait for a rank that does not finish
            waits.note_stop()
        signals.handle(self.stop_at_once)
        if sys.__stdout__ is None:  # file 1 may be any other file
            return
        with contextlib.suppress(OSError):  # not print(), which may have been interrupted
            os.write(
                1,
                b"\nFinishing the iteration and saving a checkpoint; press Ctrl-C again to stop at once\n",
            )

    def report_thread(self, failure):
        """Print the traceback of a thread, except for TensorBoard's writer: write() reports its error."""
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            self.excepthook(failure)

    def stop_at_once(self, number, _):
        signals.restore(self.handlers)
        raise KeyboardInterrupt

    def __exit__(self, kind, error, _):
        signals.handle(lambda *_: None)  # what follows must not be interrupted
        ended.append(True)
        waits.stop_times.clear()
        self.frame = None
        gc.unfreeze()
        problem = None
        with contextlib.ExitStack() as stack:  # if one of these fails, the others still run
            stack.callback(signals.restore, self.handlers)
            stack.callback(setattr, threading, "excepthook", self.excepthook)
            stack.callback(distributed.leave)
            stack.callback(self.envs.close)
            if self.made_folder and not self.snapshot and self.checkpoint_step is None:
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self.lock:
                stack.callback(self.lock.close)
            if self.writer and not self.snapshot:
                stack.callback(self.close_writer)
            if self.snapshot and self.leads:
                stack.callback(self.close_writer)
                if self.snapshot is not self.saved:
                    problem = self.save_at_the_end()
        if problem and kind in (None, KeyboardInterrupt):
            raise NotSaved(problem)
        if problem and problem != str(error):  # beside the error that ended the run
            with contextlib.suppress(OSError):
                print(f"\n{problem}", flush=True)
        elif kind in (None, KeyboardInterrupt) and self.snapshot:
            distributed.note_run(None)
            if self.global_step < self.total or kind:
                print(self.stopped())
            else:
                print(
                    f"Saved {self.folder}/checkpoint.pt. "
                    f"Evaluate with: {self.command} --evaluate {self.folder}"
                )
        elif self.snapshot and not problem:  # beside the error that ended the run
            with contextlib.suppress(OSError):
                print(f"\n{self.stopped()}", flush=True)

    def stopped(self):
        step = self.snapshot["global_step"]
        whole_run = self.folder.parent if behaviors.folder() else self.folder
        resume = f"{self.command} --resume {whole_run}"
        return f"Stopped after {step:,} decisions. Resume with: {resume}"

    # Start

    def compile(self, function, num_updates):
        """Return the update function, compiled with --compile, or if `num_updates` are enough to make up for the time
        that compiling takes. A resumed run compiles if the run did before."""
        args = self.args
        if args.compile is None:
            args.compile = args.fast and num_updates >= WORTH and fast.compiler()
        if not args.fast or not args.compile or not fast.compiler():
            return function
        self.update_description = "compiled update; "
        update = fast.CompiledUpdate(function, args, self.must_compile)
        self.compiling.append(update)
        return update

    def start(
        self,
        agent,
        spec,
        total,
        keep=None,
        episodes=None,
        large=None,
        play=play_vectors,
        description="",
    ):
        """Make the run's folder or restore the checkpoint, and return the first observations and infos.

        agent: the module that is trained, evaluated and exported
        spec: the env in plain numbers, from which the agent can be made again
        total: the number of decisions at which the run ends
        keep: what the checkpoint has beside the agent, by name: modules, optimizers, schedulers, dicts, arrays, or
            objects with state() and restore(). Objects with a state_dict() among the variables of the caller and of the
            script are kept too, if they are not in `keep`
        episodes: the same for the running episodes, with a row for each slot: restored only if the envs can continue
            their episodes. Arrays become 0 where an episode can't be continued; cut(slots) of an object is called
        large: the same for large objects with state() and restore(): saved in separate files, after the checkpoint. If
            a file is not of the same moment as the checkpoint, cut(slots) of the object is called with all slots
        play: see evaluate.evaluate()
        description: printed in the first line
        """
        self.agent = agent
        self.spec = spec
        self.total = total
        self.play = play
        self.keep = {"agent": agent, **(keep or {})}
        self.keep_episodes = episodes or {}
        self.large = large or {}
        self.frame = sys._getframe(1)
        self.given_args = to_plain(self.args)
        self.given_args["device"] = self.device
        self.given_args["env_parameters"] = self.given_parameters
        self.parameters = dict(agent.named_parameters())
        for name, thing in (self.keep | self.keep_episodes).items():
            check_kept(name, thing)
        for name, thing in self.find_stateful().items():
            print(f"Also kept in checkpoints: {name}", flush=True)
            self.keep[name] = thing
        self.keep |= self.loose_parameters()
        self.check_optimizers()
        self.agent_attributes = plain_attributes(agent)
        self.script_numbers = self.plain_globals()

        self.try_parameters()

        first = None
        self.cpu_clock = CpuClock()
        try:
            if self.resumed:
                with using(*self.resumed):
                    first = self.restore()
            elif self.initial:
                self.start_from_other()
            if not self.resumed and self.leads:
                self.make_folder()
            if self.leads:
                self.open_writer()
        except OSError as error:
            raise ValueError(f"{self.folder} can't be written: {error}") from None
        self.synchronize_ranks()
        # Slots whose episodes in the checkpoint the envs could not continue
        self.lost_slots = np.zeros(0, int)
        if self.resumed and first is None:
            self.lost_slots = np.arange(self.envs.num_envs)
            self.curriculum.restarted(range(self.envs.num_envs))
        elif first and "restarted" in first[1]:
            self.lost_slots = np.flatnonzero(first[1]["restarted"])
        for line in self.curriculum.waiting():
            print(line, flush=True)

        if hasattr(self.envs, "wait_for_others"):  # the processes of other behaviors
            if not self.resumed:  # all can be resumed as soon as one of them has learned
                self.snapshot = self.state()
                self.may_be_infinite = set(self.names_not_finite(self.snapshot))
                self.save_checkpoint()
            self.envs.wait_for_others()
        how = (
            f"{distributed.SIZE} ranks, each with {self.how}" if distributed.SIZE > 1 else self.how
        )
        if self.resumed:
            how = f"resumed after {self.global_step:,} decisions; {how}"
        print(
            f"{self.folder}: {how}; {description}; {self.update_description}tensorboard --logdir runs",
            flush=True,
        )
        self.initial = None  # its tensors are not needed any more
        obs, infos = first or self.envs.reset(seed=self.envs_seed)
        self.snapshot = self.state()
        self.may_be_infinite = set(self.names_not_finite(self.snapshot))
        if self.args.capture_video and not self.resumed and self.leads:
            self.record_video()
        self.last = time.perf_counter()
        return obs, infos

    def try_parameters(self):
        """Refuse values of later lessons, and ends of samplers, with which a gymnasium env can't be made."""
        if not hasattr(self.envs, "try_parameter"):
            return
        for name, value in self.given_parameters.items():
            try:
                self.envs.try_parameter(name, value)
            except (ValueError, EngineError) as error:
                raise ValueError(f"--env-parameters {name}={value}: {error}") from None
        for name, lessons in self.curriculum.lessons.items():
            for lesson in lessons:
                try:
                    self.envs.try_parameter(name, lesson.value)
                except (ValueError, EngineError) as error:
                    where = f"--curriculum: {name} {value_text(lesson.value)}"
                    if len(lessons) > 1:
                        where += f", lesson {lesson.name}"
                    raise ValueError(f"{where}: {error}") from None

    def start_from_other(self):
        """Take the weights and statistics of --init-from."""
        path, state = self.initial
        with using(path, state):
            initial.start_from(path, state, self.keep, self.spec, self.args.init_partly)
            initial.report_settings(path, state, self.given_args, self.script.stem, COMMON)

    def find_stateful(self):
        """Return modules, optimizers and the like among the script's variables that are not kept
        yet, by name."""
        everything = [self.keep, self.keep_episodes, self.large]
        known = {id(x) for kept in everything for _, x in inside(kept)}
        modules = [x for x in self.keep.values() if isinstance(x, nn.Module)]
        known |= {id(part) for module in modules for part in module.modules()}
        found = {}
        variables = self.frame.f_globals | self.frame.f_locals
        own = {name: vars(x) for name, x in variables.items() if self.is_plain_object(x)}
        for name, x in [*inside(variables), *inside(own)]:
            if has_state_dict(x) and id(x) not in known:
                found[name] = x
                known.add(id(x))
        for name, attributes in own.items():
            numbers = [f"{name}.{key}" for key, x in attributes.items() if type(x) in NUMBERS]
            if numbers and any(key.startswith(f"{name}.") for key in found):
                fix = "put numbers that change in a dict, and pass it to run.start in keep"
                print(f"Not kept in checkpoints: {', '.join(numbers)}; {fix}", flush=True)
        return found

    def is_plain_object(self, x):
        """Return whether `x` is an instance of a class of the script that is not a module."""
        own = type(x).__module__ == self.frame.f_globals["__name__"]
        return own and hasattr(x, "__dict__") and not has_state_dict(x) and x is not self.args

    def loose_parameters(self):
        """Return the parameters that an optimizer updates and no kept module has, by optimizer."""
        modules = [x for x in self.keep.values() if isinstance(x, nn.Module)]
        known = {id(p) for module in modules for p in module.parameters()}
        found = {}
        for name, thing in self.keep.items():
            if isinstance(thing, torch.optim.Optimizer):
                params = [p for group in thing.param_groups for p in group["params"]]
                loose = [p for p in params if id(p) not in known]
                if loose:
                    found[f"parameters of {name}"] = {str(i): p for i, p in enumerate(loose)}
        return found

    def plain_globals(self):
        """Return the numbers among the globals of the script."""
        return {name: x for name, x in self.frame.f_globals.items() if type(x) in NUMBERS}

    def kept_tensors(self):
        """Return the parameters that are kept, and the buffers."""
        modules = [x for x in self.keep.values() if isinstance(x, nn.Module)]
        parameters = [p for module in modules for p in module.parameters()]
        for name, thing in self.keep.items():
            if name.startswith("parameters of "):
                parameters += thing.values()
        return parameters, [x for module in modules for x in module.buffers()]

    def check_optimizers(self):
        """Refuse a parameter that no optimizer updates."""
        optimizers = [x for x in self.keep.values() if isinstance(x, torch.optim.Optimizer)]
        if not optimizers:
            return
        updated = {id(p) for x in optimizers for group in x.param_groups for p in group["params"]}
        for name, p in self.parameters.items():
            if p.requires_grad and id(p) not in updated:
                fix = "give it to one, or set requires_grad_(False)"
                raise ValueError(
                    f"parameter {name} is not in any optimizer and would never be updated: {fix}"
                )
        for name, module in self.keep.items():
            if isinstance(module, nn.Module) and module is not self.agent:
                loose = [p for p in module.parameters() if p.requires_grad and id(p) not in updated]
                if loose:
                    what = f"{name}: no optimizer updates {len(loose)} of its parameters"
                    print(f"{what}; if they are to stay as they are, requires_grad_(False) says so")

    def synchronize_ranks(self):
        """Give all ranks the weights of rank 0, and different random numbers."""
        if distributed.SIZE == 1:
            return
        self.folder = Path(distributed.gather(str(self.folder) if self.leads else "")[0])
        distributed.note_run(self.folder)
        parameters, buffers = self.kept_tensors()
        distributed.broadcast(*(x.data for x in parameters), *buffers)
        if not self.leads:
            seed = derive_seed(self.args.seed, self.global_step + distributed.RANK)
            torch.manual_seed(seed)

    def make_folder(self):
        self.folder = behaviors.folder() or Path("runs", behaviors.new_folder_name(self.args))
        if self.folder.exists():
            raise ValueError(
                f"{self.folder} exists already: wait a second, or give another --exp-name"
            )
        self.folder.mkdir(parents=True)
        self.made_folder = True
        self.lock = Lock(self.folder)
        self.run_id = secrets.token_hex(8)
        shutil.copy(self.script, self.folder)

        packages = ("torch", "numpy", "gymnasium", "mujoco", "mlagents-envs")
        versions = {package: importlib.metadata.version(package) for package in packages}
        config = {"run": self.run_id, "args": self.given_args}
        config |= {"python": sys.version, "versions": versions}
        if shutil.which("git"):
            command = ["git", "rev-parse", "HEAD"]
            where = self.script.resolve().parent
            commit = subprocess.run(
                command, cwd=where, capture_output=True, text=True
            ).stdout.strip()
            config["commit"] = commit or None
        if self.resumed:
            config["resumed_from"] = {"file": str(self.resumed[0]), "decisions": self.global_step}
        if self.initial:
            path, state = self.initial
            started_from = {"file": str(path), "decisions": state["global_step"]}
            config["init_from"] = started_from | {"run": state.get("run")}
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))

    def open_writer(self, reopen=False):
        args = self.args
        if args.track and not reopen:
            import wandb

            wandb.init(
                project=args.wandb_project_name,
                id="__".join(self.folder.parts[-2:] if behaviors.folder() else [self.folder.name]),
                resume="allow",
                config=vars(args),
                sync_tensorboard=True,
                save_code=True,
            )
        from torch.utils.tensorboard import SummaryWriter

        # Points that were logged after the checkpoint will be logged again
        in_place = self.checkpoint_step is not None
        purge_step = self.global_step + 1 if in_place or reopen else None
        self.writer = SummaryWriter(self.folder, purge_step=purge_step)
        if purge_step is None:
            rows = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    def close_writer(self):
        writer = self.writer
        self.writer = None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            self.report_lost_points(error)

    def report_lost_points(self, error):
        line = f"The log could not be written, some points of the curves are lost: {error}"
        self.report("log", line)

    def report(self, what, line, interval=REPORT_SECONDS):
        """Print a line about something that failed, at most once in `interval` seconds."""
        now = time.monotonic()
        if now >= self.reported.get(what, -math.inf) + interval:
            self.reported[what] = now
            with contextlib.suppress(OSError):
                print(f"\n{line}", flush=True)

    # The training loop

    def iterations(self):
        """Yield the number of each iteration until the run has its decisions or was asked to stop. An iteration ends
        with log()."""
        logged = self.iteration
        while not self.finished():
            yield self.iteration
            if self.iteration > logged:
                logged = self.iteration
                self.end_iteration()
        if self.global_step != self.snapshot["global_step"]:  # asked to stop at the last moment
            self.snapshot = self.state()

    def finished(self):
        """Return whether the run has ended. Ranks agree in log() on a stop that was requested."""
        stopped = bool(self.stop) if distributed.SIZE == 1 else self.ranks_stop
        return self.global_step >= self.total or stopped

    def has_enough(self, num_rows, wanted):
        """Return whether a rollout with `num_rows` rows of `wanted` is complete."""
        share = self.args.rollout_share
        if share < 1 and hasattr(self.envs, "others_learn"):  # processes of other behaviors
            self.envs.set_missing(max(wanted - num_rows, 0))
            if self.envs.others_learn and num_rows >= share * wanted:
                return True
        return self.pace.has_enough(num_rows, wanted, self.iteration)

    def due(self, decisions):
        """Return whether another multiple of `decisions` has been reached since the last log(), or the run ends."""
        return self.crossed(decisions, self.logged_step)

    def passed(self, decisions):
        """Return the same as due(), but regardless of a requested stop: a resumed run continues as if there had been
        none."""
        return (
            self.global_step // decisions > self.logged_step // decisions
            or self.global_step >= self.total
        )

    def crossed(self, decisions, before):
        return self.global_step // decisions > before // decisions or self.finished()

    def spent(self, what):
        """Count the time since the last call for "env", "act" or "learn"."""
        now = time.perf_counter()
        self.seconds[what] += now - self.last
        self.last = now
        for update in self.compiling:
            if update.seconds is not None:
                if update.compiled is not None:
                    print(f"\nCompiled the update in {update.seconds:.1f} s", flush=True)
                self.seconds[what] -= update.seconds
                self.compiling = [other for other in self.compiling if other is not update]

    def record(self, reward, terminated, truncated, infos, in_step=False):
        """Count time, decisions, episodes and statistics after a step of the envs, and print the progress line.

        in_step: all ranks step at the same time. Returns the number of decisions of all ranks that got their reward;
        an estimate if the ranks are not in step.
        """
        self.spent("env")
        closed = infos["closed"]
        count = int(np.count_nonzero(closed))
        decisions = int(distributed.total(count)) if in_step else count * distributed.SIZE
        self.own_decisions += count
        self.global_step += decisions
        self.returns += reward
        self.lengths += closed
        if "final_obs" in infos:
            for slot in np.flatnonzero(terminated | truncated).tolist():
                self.episodes.append((float(self.returns[slot]), int(self.lengths[slot])))
                self.curriculum.record(slot, float(self.returns[slot]))
                self.returns[slot] = 0.0
                self.lengths[slot] = 0
            self.successes += infos.get("is_success", {}).values()
        if "restarted" in infos:
            self.returns[infos["restarted"]] = 0.0
            self.lengths[infos["restarted"]] = 0
            self.curriculum.restarted(np.flatnonzero(infos["restarted"]).tolist())
        if "stats" in infos:
            for key, value in infos["stats"].items():
                self.stats[key] += value if isinstance(value, list) else [value]
        if self.last >= self.due_at:
            self.show()
        return decisions

    def record_episodes(self, num_decisions, episodes):
        """Count decisions and episodes of envs that other processes step. An episode is a pair of return and length."""
        self.spent("env")
        self.own_decisions += num_decisions
        self.global_step += num_decisions
        self.episodes += episodes
        if self.last >= self.due_at:
            self.show()

    def show(self, end=False):
        """Print the progress: decisions, return, speed, shares of the time, time left. On a terminal this is one line
        that is updated, otherwise a new line every few seconds."""
        self.due_at = time.perf_counter() + (0.2 if self.live else 5)
        mean = f"{np.mean(self.recent):9.2f}" if self.recent else "        -"
        total = sum(self.seconds.values()) or 1e-9
        shares = " ".join(f"{name} {x / total:3.0%}" for name, x in self.seconds.items())
        seconds = max(0, self.total - self.global_step) / max(self.speed(), 1e-9)
        left = "--:--:--"
        if total >= 1 and seconds < 1e8:  # the speed of the first second is not typical
            left = (
                f"{int(seconds // 3600):02d}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
            )
        line = f"{self.global_step:>10,} steps {min(1, self.global_step / self.total):4.0%}  return {mean}"
        line += f"  {self.speed():6.0f} SPS"
        rest = f"  {left} left"
        if self.last_successes:
            rest += f"  success {np.mean(self.last_successes):.0%}"
        if self.curriculum.changing():
            rest += f"  {self.curriculum.summary()}"
        if getattr(self.envs, "restarts", 0):
            rest += f"  {self.envs.restarts} restart(s)"
        # A line that is wider than the terminal can't be updated in place
        width = shutil.get_terminal_size().columns - 1 if self.live else math.inf
        if len(line) + len(shares) + 2 + len(rest) <= width:
            line += f"  {shares}"
        line += rest
        if len(line) > width:
            line = line[: int(width)]
        print(
            f"\r{line}\033[K" if self.live else line,
            end="" if self.live and not end else "\n",
            flush=True,
        )

    def speed(self):
        """Return the decisions per second of this process, without the time for videos, checkpoints and compiling."""
        return (self.global_step - self.first_step) / (sum(self.seconds.values()) or 1e-9)

    def check_agent(self):
        """Raise an error if the weights are not finite, or if a parameter was replaced. The checkpoint stays."""
        for name, x in self.agent.named_parameters():
            if x is not self.parameters.get(name):
                fix = "change it in place, with torch.no_grad() and copy_()"
                raise ValueError(
                    f"{name} was replaced by another parameter, which no optimizer updates: {fix}"
                )
        for name, x in self.agent.state_dict().items():
            if not torch.isfinite(x).all():
                where = f"{name} is not finite; the last checkpoint is {self.folder}/checkpoint.pt"
                raise FloatingPointError(
                    f"iteration {self.iteration + 1}: a loss or gradient is not a number: {where}"
                )

    def gather_ranks(self, scalars):
        """Combine scalars, episodes and requests to stop of all ranks, and check that they have the same weights."""
        if distributed.SIZE == 1:
            return scalars
        numbers = {name: x for name, x in scalars.items() if np.size(x) == 1}
        mine = (
            numbers,
            self.episodes,
            self.successes,
            dict(self.stats),
            self.own_decisions,
            bool(self.stop),
            self.curriculum.new_returns,
        )
        gathered = distributed.gather((*mine, self.checksum()))
        every, episodes, successes, stats, own, stops, lessons, checksums = zip(
            *gathered, strict=True
        )
        if not np.allclose(checksums, checksums[0], rtol=1e-6, atol=0):
            fix = "call distributed.average_gradients(parameters) between backward() and step() of every optimizer"
            raise ValueError(f"the ranks have different weights: {fix}")
        distributed.broadcast(*self.kept_tensors()[1])  # statistics such as those of BatchNorm
        self.episodes = [episode for part in episodes for episode in part]
        self.successes = [success for part in successes for success in part]
        self.curriculum.new_returns = [x for part in lessons for x in part]
        self.stats = defaultdict(list)
        for part in stats:
            for key, values in part.items():
                self.stats[key] += values
        self.global_step = self.logged_step + sum(own)
        self.own_decisions = 0
        self.ranks_stop = any(stops)
        means = {
            name: float(np.mean([part[name] for part in every if name in part])) for name in numbers
        }
        return scalars | means

    def checksum(self):
        """Return numbers that differ between ranks whose weights differ."""
        parameters = [p.detach().double() for p in self.kept_tensors()[0]]
        absolute = sum(p.abs().sum().item() for p in parameters)
        squared = sum((p * p).sum().item() for p in parameters)
        return [absolute, squared]

    def log(self, scalars):
        """Write scalars, statistics of the episodes, and times. This ends an iteration. Tensors and arrays with several
        elements are written as histograms."""
        self.check_agent()
        scalars = self.gather_ranks({name: self.to_number(name, x) for name, x in scalars.items()})
        scalars["charts/SPS"] = self.speed()
        scalars["charts/cpu_seconds"] = distributed.total(self.cpu_clock.seconds())
        if self.episodes:
            self.recent = [episodic_return for episodic_return, _ in self.episodes]
            self.since_checkpoint += self.recent
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(
                self.episodes, axis=0
            )
        if self.successes:
            self.last_successes = self.successes
            scalars["charts/success_rate"] = np.mean(self.successes)
        for key, values in self.stats.items():
            name = f"{getattr(self.envs, 'engine', 'unity')}/{key}"
            scalars[name] = np.sum(values) if key in self.envs.sums else np.mean(values)
        for name, x in self.seconds.items():
            scalars[f"time/{name}"] = x / sum(self.seconds.values())
        scalars |= self.curriculum.scalars()
        self.write(scalars)
        self.episodes = []
        self.successes = []
        self.stats.clear()
        self.logged_step = self.global_step
        self.iteration += 1
        self.next_lessons()

    def next_lessons(self):
        """Start the next lessons of the curriculum that are due."""
        changed = self.curriculum.update(self.global_step / self.total, self.envs.num_envs)
        if not changed:
            return
        self.args.env_parameters = self.args.env_parameters | changed
        self.envs.set_parameters(changed)
        # Returns of different lessons can't be compared: best.pt is the best of the current one
        self.best = -math.inf
        self.new_best = None
        self.since_checkpoint = []
        for name, value in changed.items():
            lesson = self.curriculum.current(name).name
            line = f"{name} {value_text(value)}: lesson {lesson} starts"
            print(f"\n{line} after {self.global_step:,} decisions", flush=True)

    def to_number(self, name, x):
        """Return a float, or an array with several elements."""
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().numpy()
        try:
            x = np.asarray(x, float)
        except (TypeError, ValueError):
            raise ValueError(
                f"run.log: {name} is a {type(x).__name__}: give a number, a tensor or an array"
            ) from None
        return x.item() if x.size == 1 else x

    def write(self, scalars):
        if not self.leads:
            return
        try:
            if self.writer is None:  # it failed before
                check_room(self.folder)
                self.open_writer(reopen=True)
            for name, x in scalars.items():
                if np.size(x) == 1:
                    self.writer.add_scalar(name, x, self.global_step)
                else:
                    self.writer.add_histogram(name, x, self.global_step)
        except Exception as error:
            # The writer's thread has ended, for example because the disk is full
            self.report_lost_points(error)
            self.close_writer()

    def end_iteration(self):
        """Take a snapshot, and write checkpoints and videos where they are due."""
        try:
            self.snapshot = self.state()
        except EngineError:  # a worker has died: keep this iteration, then end the run
            self.snapshot = self.state(with_envs=False)
            raise
        if not self.frozen:
            # Let the garbage collector ignore what exists by now: modules, networks, compiled code.
            # Otherwise it looks at all of these objects again and again
            gc.collect()
            gc.freeze()
            self.frozen = True
        if self.finished() or time.perf_counter() >= self.due_at:
            self.show(self.finished())
        if (
            self.leads
            and self.crossed(self.args.checkpoint_interval, self.saved_step)
            and time.perf_counter() >= self.retry_at
        ):
            self.save_checkpoint()
            if self.failed and not self.finished():
                again = f"{self.advice()}; the run continues and tries again"
                self.report("checkpoint", f"{self.failure()}; {again}")
        if (
            self.leads
            and self.args.capture_video
            and self.crossed(self.args.video_interval, self.video_step)
        ):
            self.record_video()
        self.last = time.perf_counter()

    # Checkpoints

    def changed_args(self):
        """Return the arguments that the training loop has changed."""
        now = to_plain(self.args)
        own = {
            name: value
            for name, value in now["env_parameters"].items()
            if name not in self.args.curriculum
        }
        now["env_parameters"] = own  # the others are those of the lessons
        kept = set(self.given_args) - {"device", "base_port", "compile"}
        return {name: now[name] for name in kept if now[name] != self.given_args[name]}

    def state(self, with_envs=True):
        """Return everything that is needed to continue from here, as copies."""
        for name in sorted(self.find_stateful().keys() - self.not_kept):
            print(f"\n{name} is not kept in checkpoints: make it before run.start()", flush=True)
            self.not_kept.add(name)
        attributes = plain_attributes(self.agent)
        numbers = self.plain_globals()
        return {
            "format": FORMAT,
            "script": self.script.stem,
            "fingerprint": self.fingerprint,
            "args": self.given_args,
            "changed_args": self.changed_args(),
            "agent_attributes": changes(self.agent_attributes, attributes),
            "script_numbers": changes(self.script_numbers, numbers),
            "seal": "",  # made when the checkpoint is saved
            "spec": self.spec,
            "iteration": self.iteration,
            "global_step": self.global_step,
            "recent": self.recent,
            "curriculum": self.curriculum.state(),
            "best": self.best,
            "run": self.run_id,
            "files": {},
            "large": {},
            "kept": {name: copy_state(thing) for name, thing in self.keep.items()},
            "running": {name: copy_state(thing) for name, thing in self.keep_episodes.items()},
            "episodes": {"r": self.returns.copy(), "l": self.lengths.copy()},
            "envs": self.envs.state() if with_envs and hasattr(self.envs, "state") else None,
            "random": random_state()
            | {"actions": self.envs.single_action_space.np_random.bit_generator.state},
        }

    def restore(self):
        """Restore the checkpoint. Return observations and infos if the envs continue their episodes, else None."""
        path, state = self.resumed = self.latest_checkpoint(*self.resumed)
        self.folder = path.parent
        in_place = is_run(path, state)
        if in_place:
            self.lock = Lock(self.folder) if self.leads else None
            if (
                load(path, self.script)[1]["global_step"] != self.global_step
            ):  # another process had the lock until now
                raise ValueError(f"{path} has changed in the meantime: resume again")
            self.run_id = state.get("run") or secrets.token_hex(8)
            self.large_files = {
                name: file for name, file in state["large"].items() if self.is_own_file(file, name)
            }
            self.files = {
                file: step
                for file, step in state.get("files", {}).items()
                if self.is_own_file(file, "checkpoint", *self.large) and isinstance(step, int)
            }
            if folder_id(self.folder) is None:
                # The checkpoint may be a copy of another run's: only its large files have the id of their run
                large = self.large_files.values()
                self.files = {file: step for file, step in self.files.items() if file in large}
            for file in self.large_files.values():  # "files" is missing in an earlier version
                self.files.setdefault(file, self.global_step)
            self.referred = dict(self.large_files)
            self.checkpoint_step = self.global_step
            videos = self.folder / "videos"
            if self.leads and not videos.is_symlink():
                for leftover in videos.glob(".*.tmp.*"):  # of a process that was killed
                    leftover.unlink(missing_ok=True)
        if self.global_step >= self.total:
            raise Complete(
                f"{path} has {self.global_step} decisions: give a larger --total-timesteps to continue"
            )
        if not in_place:
            self.best = -math.inf
            if self.leads:
                self.make_folder()
                why = "not the latest checkpoint of a run's folder"
                print(f"{path} is {why}: the run continues in {self.folder}", flush=True)
        if state["fingerprint"] != self.fingerprint:
            print(
                f"{self.script.name} has changed since {path} was written: continuing with the script as it is now"
            )
        for name, thing in self.keep.items():
            if name not in state["kept"]:
                raise ValueError(
                    f"{path} has no {name}, and this script keeps it: the script was changed since"
                )
            restore_state(thing, state["kept"][name], path)
        for name in state["kept"].keys() - self.keep.keys():
            print(
                f"{path} has {printable(name)}, and this script has no such variable: it is not restored",
                flush=True,
            )
        risky = sorted(set(RISKY) & set(state["changed_args"]))
        if risky and not state["trusted"]:
            raise ValueError(
                f"{path} was not written on this machine and would change {option(risky[0])}: give --trust"
            )
        changed = from_plain(type(self.args), self.given_args | state["changed_args"])
        for name in state["changed_args"]:
            setattr(self.args, name, getattr(changed, name))
        self.args.env_parameters = self.args.env_parameters | self.curriculum.values()
        if state["changed_args"]:
            names = ", ".join(
                f"{name} {printable(value)}"
                for name, value in sorted(state["changed_args"].items())
            )
            print(f"Arguments as the training loop had changed them: {names}", flush=True)
        set_attributes(self.agent, state["agent_attributes"])
        set_numbers(self.frame.f_globals, state["script_numbers"])
        for name, thing in self.large.items():
            self.restore_large(name, thing)
        if distributed.SIZE > 1:  # the envs of all ranks start new episodes
            return None
        if not state["trusted"]:
            reason = "was not written on this machine, or not in this place"
            print(
                f"{path} {reason}: the envs start new episodes; --trust restores them", flush=True
            )
            seed = derive_seed(self.args.seed, self.global_step)
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            return None
        set_random_state(state["random"])
        self.envs.single_action_space.np_random.bit_generator.state = state["random"]["actions"]
        if state["envs"] is None:
            return None
        self.returns[:] = state["episodes"]["r"].numpy()
        self.lengths[:] = state["episodes"]["l"].numpy()
        for name, thing in self.keep_episodes.items():
            restore_state(thing, state["running"][name], path)
        obs, infos = self.envs.restore(state["envs"])
        if "restarted" in infos:  # the episodes of these slots could not be continued
            slots = np.flatnonzero(infos["restarted"])
            for thing in (self.returns, self.lengths, *self.keep_episodes.values()):
                if isinstance(thing, np.ndarray):
                    thing[slots] = 0
                elif hasattr(thing, "cut"):
                    thing.cut(slots)
        return obs, infos

    def latest_checkpoint(self, path, state):
        """Return the path and the content of checkpoint.pt if it has the same state as the file to resume. best.pt and
        numbered checkpoints do not refer to the large files."""
        latest = path.with_name("checkpoint.pt")
        if path.name == latest.name or not latest.exists():
            return path, state
        try:
            latest_state = load(latest, self.script)[1]
        except ValueError:  # checkpoint.pt is damaged, and this file is not
            return path, state
        names = ("run", "global_step", "changed_args")
        same = all(latest_state.get(name) == state.get(name) for name in names)
        return (latest, latest_state) if same and is_run(latest, latest_state) else (path, state)

    def is_own_file(self, file, *names):
        """Return whether a checkpoint may name this file: it can't name files in other folders, for example."""
        name, _, number = str(file).removesuffix(".pt").rpartition("_")
        return name in names and number.isdecimal() and f"{name}_{number}.pt" == file

    def restore_large(self, name, thing):
        """Restore an object from its own file. It stays as it is, with a message, if there is no such file."""
        path, state = self.resumed
        if not self.is_own_file(state["large"].get(name), name):
            print(f"{path} has no {name}: it starts empty", flush=True)
            return
        file = path.with_name(state["large"][name])
        if not file.exists():
            print(f"{file} is missing: {name} starts empty", flush=True)
            return
        fix = "delete it to continue with a new one"
        try:
            saved = read(file)
        except ValueError as error:
            raise ValueError(f"{error}: {fix}") from None
        try:
            if "run" not in state:  # a checkpoint of an earlier version
                thing.restore(saved)
                return
            of_this_run = saved["run"] == state["run"]
            step = saved["global_step"]
            if of_this_run:
                thing.restore(saved["state"])
        except MemoryError:
            raise
        except Exception:
            raise ValueError(f"{file} is incomplete: {fix}") from None
        if not of_this_run:
            print(f"{file} belongs to another run: {name} starts empty", flush=True)
            self.files.pop(file.name, None)  # it is not removed
            self.large_files.pop(name, None)
        elif step != self.global_step:
            of = f"{step:,} decisions, and {path.name} of {self.global_step:,}"
            print(f"{file} is of {of}: the run continues with both", flush=True)
            if hasattr(thing, "cut"):  # its running episodes are not those of the checkpoint
                thing.cut(range(self.envs.num_envs))

    def names_not_finite(self, state):
        """Yield the names of values in a state that are not finite. States of envs are not checked."""
        yield from not_finite(state["kept"], "")
        yield from not_finite(state["running"], "")
        for name in ("episodes", "recent", "changed_args", "agent_attributes", "script_numbers"):
            yield from not_finite(state[name], name)

    def check_finite(self, state, large):
        """Raise an error if a state must not replace a good checkpoint."""
        names = [*self.names_not_finite(state), *not_finite(large, "")]
        bad = [name for name in names if name not in self.may_be_infinite]
        if bad:
            fix = "train again with a smaller learning rate"
            if self.checkpoint_step is not None:
                last = f"{self.folder}/checkpoint.pt has {self.checkpoint_step:,} decisions"
                fix = f"{last}, resume from there, or {fix}"
            raise FloatingPointError(
                f"iteration {state['iteration']}: {bad[0]} is not finite, and this state is not saved: {fix}"
            )

    def save_checkpoint(self):
        """Write the last snapshot and what belongs to it. `self.failed` has what could not be written: the run
        continues when the disk is full."""
        started = time.perf_counter()
        with contextlib.suppress(Exception):
            self.writer.flush()
        state = self.snapshot
        step = state["global_step"]
        large = {name: thing.state() for name, thing in self.large.items()}
        self.check_finite(state, large)
        if self.since_checkpoint:
            mean = float(np.mean(self.since_checkpoint))
            if mean > max(self.best, self.new_best["best"] if self.new_best else -math.inf):
                self.new_best = state | {"best": mean}

        # The weights first: a large file may take all of the room. checkpoint.pt refers only to files that are complete
        self.failed = {}
        before = self.on_disk()
        if self.write_checkpoint(state):
            if self.new_best and self.write_file("best.pt", self.new_best):
                self.best = self.new_best["best"]
                self.new_best = None
            if self.args.keep_checkpoints > 1:
                self.write_numbered(state)
            self.write_large(large, step)
            if self.on_disk() != before and not self.write_checkpoint(state):
                self.forget_large(before["large"])

        if self.failed:
            # Spend at most a third of the time on files that can't be written
            now = time.perf_counter()
            self.retry_at = now + 2 * (now - started)
            return
        self.saved = state
        self.saved_step = step
        self.since_checkpoint = []
        self.remove_old_files()
        if self.reported.pop("checkpoint", None):
            line = f"Saved {self.folder}/checkpoint.pt with {step:,} decisions"
            self.report("saved", line, interval=0)

    def on_disk(self):
        """Return what a checkpoint says about the other files of the run."""
        return {"best": self.best, "files": dict(self.files), "large": dict(self.large_files)}

    def write_checkpoint(self, state):
        written = self.write_file("checkpoint.pt", state | self.on_disk())
        if written:
            self.checkpoint_step = state["global_step"]
            self.referred = dict(self.large_files)
        return written

    def write_numbered(self, state):
        name = f"checkpoint_{state['global_step']}.pt"
        if self.write_file(name, state | {"best": self.best}):
            self.files[name] = state["global_step"]

    def write_file(self, name, content):
        """Write a file of the run, a checkpoint with its signature. Return whether that succeeded. If it fails, files
        that are not needed any more make room for a second attempt."""
        try:
            content = self.signed(content) if "seal" in content else content
            try:
                save(self.folder / name, content)
            except (OSError, RuntimeError):
                if not self.remove_old_files():
                    raise
                save(self.folder / name, content)
        except (OSError, RuntimeError, MemoryError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            number = errno.ENOMEM if is_out_of_memory(error) else getattr(error, "errno", None)
            self.failed[name] = (reason, number)
            return False
        return True

    def write_large(self, large, step):
        """Write the states of the large objects."""
        for name, thing in large.items():
            file = f"{name}_{step}.pt"
            content = {"run": self.run_id, "global_step": self.global_step, "state": thing}
            if self.write_file(file, content):
                self.files[file] = step
                self.large_files[name] = file

    def forget_large(self, before):
        """Remove large files that left no room for the checkpoint that refers to them."""
        for name, file in list(self.large_files.items()):
            if before.get(name) != file:
                (self.folder / file).unlink(missing_ok=True)
                del self.files[file]
        self.large_files = before

    def failure(self):
        """Return what could not be written, and what the files have instead."""
        step = self.snapshot["global_step"]
        checkpoint = f"{self.folder}/checkpoint.pt"
        if self.checkpoint_step is None:
            there = f"there is no {checkpoint}"
        else:
            there = f"{checkpoint} has {self.checkpoint_step:,} of {step:,} decisions"
        for name in self.large:
            if self.checkpoint_step is not None and name in self.large_files:
                there += f", {name} is in {self.large_files[name]}"
            elif self.checkpoint_step is not None:
                there += f", {name} is not saved"
        name, (reason, _) = next(iter(self.failed.items()))
        what = f"{self.folder}/{name} could not be written"
        if name == "checkpoint.pt" and self.checkpoint_step == step:
            # It has been written, but not a second time, with the names of the files that belong to it
            added = " and ".join(self.large) or "the list of files"
            what = f"{added} could not be added to {checkpoint}"
        return f"{what} ({reason}): {there}"

    def advice(self):
        """Return what to do about the first file that could not be written."""
        _, number = next(iter(self.failed.values()))
        if number == errno.EFBIG:
            return "raise the limit for the size of a file (ulimit -f)"
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
            return "make the folder writable"
        if number == errno.ENOMEM:
            return "free some memory"
        return FREE_SPACE

    def save_at_the_end(self):
        """Write the last snapshot. Wait for room on the disk, until a signal arrives or END_SECONDS have passed.
        Return a line about what is not saved, or None."""
        gave_up = []
        end = time.monotonic() + END_SECONDS
        while True:
            try:
                self.save_checkpoint()
            except FloatingPointError as error:
                return str(error)
            left = end - time.monotonic()
            if not self.failed:
                return None
            if gave_up or left <= 0:
                resume = f"{self.command} --resume {self.folder}"
                fix = "train again" if self.checkpoint_step is None else f"resume with {resume}"
                return f"{self.failure()}; {self.advice()} and {fix}"
            how = f"waiting {left:.0f} s for room on the disk, press Ctrl-C to give up"
            if self.advice() != FREE_SPACE:
                how = f"{self.advice()}, or press Ctrl-C to give up; trying for {left:.0f} s"
            signals.handle(lambda number, _: gave_up.append(number))
            self.report("end", f"{self.failure()}; {how}", interval=10)
            next_try = time.monotonic() + min(1, left)
            while time.monotonic() < next_try and not gave_up:
                time.sleep(0.05)

    def remove_old_files(self):
        """Remove numbered checkpoints beyond --keep-checkpoints, and large files that no checkpoint refers to. Only
        files that this run has written are removed. Return whether there were any."""
        large = [*self.large_files.values(), *self.referred.values()]
        numbered = sorted((step, name) for name, step in self.files.items() if is_numbered(name))
        old = [name for _, name in numbered[: -self.args.keep_checkpoints]]
        old += [name for name in self.files if not is_numbered(name) and name not in large]
        removed = False
        for name in old:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)
                del self.files[name]
                removed = True
        return removed

    def signed(self, state):
        """Return a checkpoint of plain types with the signature of this machine."""
        state = plain(state)
        return state | {"seal": seal(state)}

    def record_video(self):
        self.video_step = self.global_step
        path = self.folder / "videos" / f"{self.global_step}.mp4"
        try:
            record_video(self.args, self.make_envs, self.play, self.agent, self.spec, path)
        except (OSError, ValueError, EngineError) as error:
            # The first video shows that a package is missing, before any work is done
            if self.global_step == 0 and not isinstance(error, OSError):
                raise
            print(f"\n{path} could not be recorded: {error}", flush=True)


class ReaderGone(BrokenPipeError):
    """The reader of the standard output is gone. A BrokenPipeError of an env is none of these."""


class Output:
    """The standard output, without errors on a full disk: a line that can't be written is lost. A reader that is gone,
    as with `| head`, is still an error."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, function, *args):
        try:
            function(*args)
        except BrokenPipeError as error:
            raise ReaderGone(*error.args) from None
        except OSError:
            pass

    def release(self):
        """Return the stream. What is left in its buffer and can't be written is dropped: it would be an error when the
        interpreter exits."""
        try:
            self.stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as devnull:
                os.dup2(devnull.fileno(), self.stream.fileno())
        return self.stream

    def __getattr__(self, name):
        return getattr(self.stream, name)


def interrupted_run(args, script):
    """Return the checkpoint that this job of torchrun has written before the ranks were restarted, or None.

    The arguments stay those of the command line, as at the start of the job. Those in the checkpoint are not used, so
    it needs no trust.
    """
    folder = distributed.interrupted_run()
    if folder is None:
        return None
    found = distributed.gather(Path(folder, "checkpoint.pt").exists())
    if not any(found):
        return None
    if not all(found):
        raise ValueError(
            f"{folder}: not all machines have this run; start the job in a directory that they share"
        )
    args.resume = folder
    return load(folder, script)


def export_own_policy(script, args, Agent):
    """Export the policy of this process, which plays the agents of its behavior while others are still trained."""
    export_checkpoint(args, *load(behaviors.folder(), script), script, Agent)


def main(
    script, doc, Args, presets, train, Agent, make_envs, describe, check, play=play_vectors, free=()
):
    """Run a script as its command line says. `free` are options of the script that may differ when a run is resumed."""
    ended.clear()
    signals.handle(raise_interrupt)
    accept_any_encoding()
    if distributed.RANK:  # only rank 0 prints
        sys.stdout = open(os.devnull, "w", errors="replace")
    sys.stdout = Output(sys.stdout)
    started = False
    try:
        if behaviors.start(script, Args, presets, doc, check):
            return
        args, default, checkpoint = command_line(script, Args, presets, doc)
        check(args)
        started = True
        complete = False  # the run had reached its total before
        if behaviors.folder():
            args.curriculum = behaviors.own_lessons(args.curriculum, args.behavior)
        elif checkpoint and args.export is None:
            for line in behaviors.missing_parameters(checkpoint[0], args):
                print(line, flush=True)
        fast.Acting.allowed = args.fast
        interrupted = None
        if args.evaluate is None and args.export is None:
            distributed.join(distributed.local_device(args.device))
            interrupted = interrupted_run(args, script)
        if interrupted:
            check_changed_args(*interrupted, args, check)
            check_agent(*interrupted, Agent, args)
            train(args, interrupted)
        elif args.resume is not None:
            for name in sorted({f.name for f in fields(Args)} - FREE - set(free)):
                given = to_plain(args)[name]
                saved = to_plain(default)[name]
                if given != saved:
                    theirs = f"the run has {option(name)} {shortened(saved)}"
                    raise ValueError(f"{option(name)} {shortened(given)}: {theirs}, leave it out")
            check_changed_args(*checkpoint, args, check)
            check_agent(*checkpoint, Agent, args)
            try:
                train(args, checkpoint)
            except Complete:
                if not behaviors.folder():
                    raise
                complete = True
        elif checkpoint:
            if distributed.SIZE > 1:
                raise ValueError(
                    "--evaluate and --export run in one process: start them without torchrun"
                )
            if args.export is not None:
                export_checkpoint(args, *checkpoint, script, Agent)
            else:
                evaluate_checkpoint(args, *checkpoint, script, Agent, make_envs, describe, play)
        else:
            train(args)
        if behaviors.folder():
            export_own_policy(script, args, Agent)
            if complete:
                raise SystemExit(behaviors.COMPLETE)
    except (EngineError, NotSaved) as error:
        raise SystemExit(f"\n{printable_lines(error)}") from None
    except (ValueError, FloatingPointError) as error:
        if not is_message(error, script):
            raise
        raise SystemExit(f"\n{printable_lines(error)}") from None
    except SystemExit as error:  # also of --help and of wrong options, before anything has started
        if not started or is_own(error, script):
            raise
        raise SystemExit(f"\n{printable(describe_exit(error))}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"\n{distributed.failures[0]}" if distributed.failures else 130) from None
    except ReaderGone:
        sys.stdout = open(os.devnull, "w", errors="replace")
        raise SystemExit(1) from None
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        if distributed.failures:
            raise SystemExit(f"\n{distributed.failures[0]}") from None
        if not is_out_of_memory(error):
            raise
        raise SystemExit(f"\n{printable(describe_out_of_memory(error))}") from None
    finally:
        distributed.leave()
        if isinstance(sys.stdout, Output):
            sys.stdout = sys.stdout.release()
        signals.handle(signal.SIG_IGN)  # a signal would only change the exit code now
