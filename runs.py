"""A run's life, for all scripts: command line, folder, log, progress, checkpoints, its end, and what is done with it
afterwards. It knows no algorithm.

    main(...)                       train, --resume, --evaluate or --export, as the command line says
    with Run(args, ...) as run:     around a training loop: envs, signals, and a checkpoint whatever happens
        obs, infos = run.start(...)             the folder; from here on the run exists, new or resumed
        for iteration in run.iterations():      between two of them: checkpoints and films
            run.spent("act"), run.record(...)   where the time goes; after each step of the envs
            run.log({"losses/x": x})            ends an iteration

A run is a folder runs/NAME with TensorBoard's events, config.json, the script as it was, checkpoint.pt, best.pt and
videos/. Its parts are in files of their own: arguments.py, checkpoints.py, policies.py.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch

import fast
import ranks
from arguments import FREE, Args, Bounds, batches, bounds, check, check_memory, command_line, describe, option
from checkpoints import FORMAT, Lock, copy_of, fingerprint, load, put_back, random_state, save, seal, set_random_state
from envs import EngineError
from policies import film, play_vectors, use

# What scripts use.
__all__ = ["Args", "Bounds", "Run", "batches", "bounds", "check", "check_memory", "describe", "main"]

WORTH = 5_000  # updates that earn back the seconds of compiling
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def heed(how):
    """Do so on signals that ask for an end. What was to be ignored is: nohup does so."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, how)


over = []  # not empty: the run has come to its end


def interrupt(number, _):
    """When all is done a signal would only change the exit code."""
    if not over:
        raise KeyboardInterrupt


class Run:
    """make_envs(args, seed) gives the envs, and how they are stepped, in words. resumed: path and content of a
    checkpoint to go on from."""

    def __init__(self, args, script, make_envs, resumed=None):
        self.args, self.script, self.make_envs, self.resumed = args, Path(script), make_envs, resumed
        self.fingerprint = fingerprint(script)
        self.iteration, self.global_step, self.best, self.recent = 0, 0, -math.inf, []
        if resumed:
            for name in ("iteration", "global_step", "best", "recent"):
                setattr(self, name, resumed[1][name])
        self.begun_at = self.logged_at = self.filmed_at = self.saved_at = self.global_step
        self.leads, self.pace, self.agreed, self.own = ranks.RANK == 0, ranks.Pace(args.rollout_share), False, 0
        self.stop, self.compiling, self.since_checkpoint, self.last_successes = [], [], [], []
        self.snapshot, self.saved, self.writer, self.lock, self.words = None, None, None, None, ""
        self.seconds, self.due_at, self.live = {"env": 0.0, "act": 0.0, "learn": 0.0}, 0.0, sys.stdout.isatty()

    def __enter__(self):
        # Players and EnvPool can't be put back into the middle of an episode: they begin new ones, with another seed.
        self.handlers = {number: signal.getsignal(number) for number in SIGNALS}
        heed(self.end_now)  # players that are being launched are closed again
        args, self.first = self.args, ranks.RANK * max(self.args.num_envs, self.args.num_players)  # env of this rank's
        args.device = ranks.local(args.device)
        if args.base_port is not None:
            args.base_port += self.first
        try:
            ranks.join(args.device)
            self.envs, self.how = self.make_envs(args, args.seed + self.global_step + self.first)
        except BaseException:
            self.unheed()
            raise
        heed(self.ask_to_stop)
        n = self.envs.num_envs
        self.returns, self.lengths = np.zeros(n), np.zeros(n, int)  # of the running episodes
        self.ended, self.successes, self.stats = [], [], defaultdict(list)  # since the last log()
        random.seed(args.seed + ranks.RANK)
        np.random.seed(args.seed + ranks.RANK)
        torch.manual_seed(args.seed)  # all ranks begin with the same weights: they part in start()
        self.envs.single_action_space.seed(args.seed + ranks.RANK)
        return self

    def unheed(self):
        for number, before in self.handlers.items():
            signal.signal(number, before)

    def ask_to_stop(self, number, _):
        self.stop.append(number)
        heed(self.end_now)
        with contextlib.suppress(OSError):  # print() may be what was interrupted
            os.write(1, b"\nFinishing the iteration and saving; once more to stop at once\n")

    def end_now(self, number, _):
        self.unheed()
        raise KeyboardInterrupt

    def __exit__(self, kind, error, _):
        heed(lambda *_: None)  # somebody is impatient, or torchrun ends who is left: this is a matter of moments
        over.append(True)
        with contextlib.ExitStack() as stack:  # whatever fails, the rest is done
            stack.callback(self.unheed)
            stack.callback(ranks.leave)
            stack.callback(self.envs.close)
            if self.lock:
                stack.callback(self.lock.close)
            if self.snapshot and self.leads:
                stack.callback(self.close_logs)
                if self.snapshot is not self.saved:
                    self.save_checkpoint()
        if kind in (None, KeyboardInterrupt) and self.snapshot:
            ranks.remember(None)
            script = f"python {self.script.name}"
            if self.global_step < self.total or kind:
                decisions = self.snapshot["global_step"]
                print(f"Stopped after {decisions} decisions. To go on: {script} --resume {self.folder}")
            else:
                print(f"Saved {self.folder}/checkpoint.pt. To see what it does: {script} --evaluate {self.folder}")

    def compiled(self, function, updates):
        """The function, compiled if the user says so, or if that many updates earn it back; and the same again when the
        run goes on."""
        insist = bool(self.args.compile) and not self.resumed
        if self.args.compile is None:
            self.args.compile = updates >= WORTH and fast.compiler()
        if not self.args.compile or not fast.compiler():
            return function
        self.words = "compiles its update; "
        self.compiling.append(fast.Compiled(function, self.args, insist))
        return self.compiling[-1]

    def start(self, words, total, spec, agent, kept, play=play_vectors, large=None, running=None):
        """kept: what is saved and put back beside the agent, by name: modules, dicts, arrays, or what has state() and
        restore(). running: the same, of episodes that run; it is put back if they are. large: the same, in files of its
        own, only with the last checkpoint; these have state() and restore(). play(agent, spec, n): see
        policies.evaluate(). Returns the first observations and infos."""
        self.spec, self.agent, self.total, self.play = spec, agent, total, play
        self.kept, self.large, self.running = {"agent": agent, **kept}, large or {}, running or {}
        self.given, self.parameters = asdict(self.args), dict(agent.named_parameters())
        self.seal = seal(self.given)
        try:
            first = None
            if self.resumed:
                first = self.restore()
            elif self.leads:
                self.make_folder()
            if self.leads:
                self.open_logs()
        except OSError as error:
            raise ValueError(f"{self.folder} can't be written: {error}") from None
        self.meet()
        self.came_back = not self.resumed or first is not None  # the envs are where the run left them
        how = f"{ranks.SIZE} ranks, each with {self.how}" if ranks.SIZE > 1 else self.how
        print(f"{self.folder}: {how}; {words}; {self.words}tensorboard --logdir runs", flush=True)
        obs, infos = first or self.envs.reset(seed=self.args.seed + self.global_step + self.first)
        self.snapshot = self.state()
        if self.args.capture_video and not self.resumed and self.leads:
            self.film()
        self.last = time.perf_counter()
        return obs, infos

    def meet(self):
        """Ranks begin with rank 0's weights and with chance of their own."""
        if ranks.SIZE > 1:
            self.folder = Path(ranks.gathered(str(self.folder) if self.leads else "")[0])
            ranks.remember(self.folder)
            ranks.same(*self.agent.state_dict().values())
            if not self.leads:
                torch.manual_seed(self.args.seed + self.global_step + ranks.RANK)

    def make_folder(self):
        name = re.sub(r"[^\w.+-]+", "-", self.args.env_id.split(":")[-1])
        self.folder = Path("runs", f"{name}__{self.args.exp_name}__{self.args.seed}__{int(time.time())}")
        if self.folder.exists():
            raise ValueError(f"{self.folder} exists already: wait a second, or give another --exp-name")
        self.folder.mkdir(parents=True)
        self.lock = Lock(self.folder)
        shutil.copy(self.script, self.folder)
        config = {"args": asdict(self.args), "python": sys.version}
        packages = ("torch", "numpy", "gymnasium", "mujoco", "mlagents-envs")
        config["versions"] = {package: importlib.metadata.version(package) for package in packages}
        if shutil.which("git"):
            command, place = ["git", "rev-parse", "HEAD"], self.script.resolve().parent
            config["commit"] = subprocess.run(command, cwd=place, capture_output=True, text=True).stdout.strip() or None
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))

    def open_logs(self, again=False):
        args = self.args
        if args.track and not again:
            import wandb

            more = {"id": self.folder.name, "resume": "allow", "config": vars(args), "save_code": True}
            wandb.init(project=args.wandb_project_name, sync_tensorboard=True, **more)
        from torch.utils.tensorboard import SummaryWriter

        again = self.global_step + 1 if self.resumed or again else None  # what came after the checkpoint comes again
        self.writer = SummaryWriter(self.folder, purge_step=again)
        if again is None:
            rows = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    # The loop

    def iterations(self):
        """Numbers of iterations until there were enough decisions, or the user asks to stop. An iteration ends with
        log()."""
        logged = self.iteration
        while not self.finished():
            yield self.iteration
            if self.iteration > logged:
                logged = self.iteration
                self.settle()
        if self.global_step != self.snapshot["global_step"]:  # asked to stop at the last moment
            self.snapshot = self.state()

    def finished(self):
        """Ranks agree in log() on an end that somebody asks for."""
        return self.global_step >= self.total or (bool(self.stop) if ranks.SIZE == 1 else self.agreed)

    def enough(self, closed, wanted):
        """Whether a rollout ends with so many rows."""
        return self.pace.enough(closed, wanted, self.iteration)

    def due(self, decisions):
        """Whether so many more have been made since the last log(), or it is the last time."""
        return self.crossed(decisions, self.logged_at)

    def passed(self, decisions):
        """The same, but an end that the user asks for changes nothing: the run goes on as if it had not been."""
        return self.global_step // decisions > self.logged_at // decisions or self.global_step >= self.total

    def crossed(self, decisions, before):
        return self.global_step // decisions > before // decisions or self.finished()

    def spent(self, what):
        """All the time since the last call was spent with this."""
        now = time.perf_counter()
        self.seconds[what] += now - self.last
        self.last = now
        for compiled in self.compiling:
            if compiled.seconds is not None:
                print(f"\nCompiled the update in {compiled.seconds:.1f} s", flush=True)
                self.seconds[what] -= compiled.seconds
                self.compiling = [other for other in self.compiling if other is not compiled]

    def record(self, reward, terminated, truncated, infos, in_step=False):
        """After each step of the envs: time, decisions, episodes, what the game counts, the progress line. in_step:
        ranks step together. Returns how many decisions of all ranks were closed; if they don't, about so many."""
        self.spent("env")
        closed = infos["closed"]
        count = int(np.count_nonzero(closed))
        made = int(ranks.total(count)) if in_step else count * ranks.SIZE
        self.own += count
        self.global_step += made
        self.returns += reward
        self.lengths += closed
        if "final_obs" in infos:
            for slot in np.flatnonzero(terminated | truncated).tolist():
                self.ended.append((float(self.returns[slot]), int(self.lengths[slot])))
                self.returns[slot], self.lengths[slot] = 0.0, 0
            self.successes += infos.get("is_success", {}).values()
        if "restarted" in infos:
            self.returns[infos["restarted"]], self.lengths[infos["restarted"]] = 0.0, 0
        if "stats" in infos:
            for key, value in infos["stats"].items():
                self.stats[key] += value if isinstance(value, list) else [value]
        if self.last >= self.due_at:
            self.show()
        return made

    def show(self, end=False):
        """One live line: steps, return, speed, where the time goes, time left. Without a terminal a plain line every
        few seconds."""
        self.due_at = time.perf_counter() + (0.2 if self.live else 5)
        mean = f"{np.mean(self.recent):9.2f}" if self.recent else "        -"
        total = sum(self.seconds.values()) or 1e-9
        shares = " ".join(f"{name} {x / total:3.0%}" for name, x in self.seconds.items())
        left = max(0, self.total - self.global_step) / max(self.speed(), 1e-9)
        known = total >= 1 and left < 1e8  # the first second's speed says nothing
        left = f"{int(left // 3600):02d}:{int(left // 60 % 60):02d}:{int(left % 60):02d}" if known else "--:--:--"
        line = f"{self.global_step:>10,} steps {min(1, self.global_step / self.total):4.0%}  return {mean}"
        line += f"  {self.speed():6.0f} SPS  {shares}  {left} left"
        line += f"  success {np.mean(self.last_successes):.0%}" if self.last_successes else ""
        line += f"  {self.envs.restarts} restart(s)" if getattr(self.envs, "restarts", 0) else ""
        print(f"\r{line}\033[K" if self.live else line, end="" if self.live and not end else "\n", flush=True)

    def speed(self):
        """Decisions a second of this process, without films, checkpoints and compiling."""
        return (self.global_step - self.begun_at) / (sum(self.seconds.values()) or 1e-9)

    def close_logs(self):
        writer, self.writer = self.writer, None
        with contextlib.suppress(Exception):
            writer.close()

    def check_agent(self):
        """What is not finite would be saved in the place of what is."""
        for name, x in self.agent.named_parameters():
            if x is not self.parameters.get(name):
                raise ValueError(
                    f"{name} is another parameter than it was, which nothing would learn: change it in place"
                )
        for name, x in self.agent.state_dict().items():
            if not torch.isfinite(x).all():
                where = f"{name} is not finite now; the state before it is in {self.folder}/checkpoint.pt"
                raise FloatingPointError(f"iteration {self.iteration + 1}: a loss or gradient is not a number: {where}")

    def shared(self, scalars):
        """What all ranks have to tell, and whether one was asked to stop."""
        if ranks.SIZE == 1:
            return scalars
        told = ranks.gathered((scalars, self.ended, self.successes, dict(self.stats), self.own, bool(self.stop)))
        every, ended, successes, stats, own, stops = zip(*told, strict=True)
        self.ended, self.successes = [x for part in ended for x in part], [x for part in successes for x in part]
        self.stats = defaultdict(list)
        for key, values in ((key, values) for part in stats for key, values in part.items()):
            self.stats[key] += values
        self.global_step, self.own, self.agreed = self.logged_at + sum(own), 0, any(stops)
        return {name: float(np.mean([part[name] for part in every if name in part])) for name in scalars}

    def log(self, scalars):
        """Write these, what the envs told, and the time. It ends an iteration."""
        self.check_agent()
        scalars = self.shared(dict(scalars))
        scalars["charts/SPS"] = self.speed()
        if self.ended:
            self.recent = [r for r, _ in self.ended]
            self.since_checkpoint += self.recent
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(self.ended, axis=0)
        if self.successes:
            self.last_successes = self.successes
            scalars["charts/success_rate"] = np.mean(self.successes)
        for key, values in self.stats.items():
            scalars[f"{getattr(self.envs, 'engine', 'unity')}/{key}"] = (
                np.sum(values) if key in self.envs.sums else np.mean(values)
            )
        scalars |= {f"time/{name}": x / sum(self.seconds.values()) for name, x in self.seconds.items()}
        try:
            if self.writer is None and self.leads:
                self.open_logs(again=True)
            for name, x in scalars.items() if self.leads else ():
                self.writer.add_scalar(name, x, self.global_step)
        except Exception as error:  # the writer's thread has ended: on a full disk, for example
            print(f"\nThe log could not be written, some points of the curves are lost: {error}", flush=True)
            self.close_logs()
        self.ended, self.successes, self.logged_at, self.iteration = [], [], self.global_step, self.iteration + 1
        self.stats.clear()

    def settle(self):
        """Between two iterations."""
        try:
            self.snapshot = self.state()
        except EngineError:  # a worker has died since: the iteration is kept, and then the run ends
            self.snapshot = self.state(with_envs=False)
            raise
        if self.finished() or time.perf_counter() >= self.due_at:
            self.show(self.finished())
        if self.leads and self.crossed(self.args.checkpoint_interval, self.saved_at):
            self.save_checkpoint()
        if self.leads and self.args.capture_video and self.crossed(self.args.video_interval, self.filmed_at):
            self.film()
        self.last = time.perf_counter()

    # What is kept

    def state(self, with_envs=True):
        """All that is needed to go on from here, in copies."""
        state = {"format": FORMAT, "script": self.script.stem, "fingerprint": self.fingerprint}
        state |= {"args": self.given, "seal": self.seal, "spec": self.spec, "recent": self.recent, "best": self.best}
        state |= {"iteration": self.iteration, "global_step": self.global_step, "large": {}}
        state["kept"] = {name: copy_of(thing) for name, thing in self.kept.items()}
        state["running"] = {name: copy_of(thing) for name, thing in self.running.items()}
        state["episodes"] = {"r": self.returns.copy(), "l": self.lengths.copy()}
        state["envs"] = self.envs.state() if with_envs and hasattr(self.envs, "state") else None
        state["random"] = random_state() | {"actions": self.envs.single_action_space.np_random.bit_generator.state}
        return state

    def restore(self):
        (path, state), self.folder = self.resumed, self.resumed[0].parent
        self.lock = Lock(self.folder) if self.leads else None
        if load(path, self.script)[1]["global_step"] != self.global_step:  # somebody had the lock until now
            raise ValueError(f"{path} has changed in the meantime: do it again")
        if self.global_step >= self.total:
            raise ValueError(f"{path} has {self.global_step} decisions: give a larger --total-timesteps to go on")
        if state["fingerprint"] != self.fingerprint:
            print(
                f"{self.script.name} is not what it was when {path} was written, and goes on as it is now", flush=True
            )
        for name, thing in self.kept.items():
            put_back(thing, state["kept"][name], path)
        for name, file in state["large"].items():
            file = self.folder / file
            if name in self.large and file.exists():
                try:
                    self.large[name].restore(torch.load(file, map_location="cpu", weights_only=True))
                except Exception:
                    raise ValueError(f"{file} is not whole: delete it, and the run goes on with a new one") from None
        if ranks.SIZE > 1:  # their envs begin new episodes
            return None
        set_random_state(state["random"])
        self.envs.single_action_space.np_random.bit_generator.state = state["random"]["actions"]
        if state["envs"] is None:
            return None
        self.returns[:], self.lengths[:] = state["episodes"]["r"].numpy(), state["episodes"]["l"].numpy()
        for name, thing in self.running.items():
            put_back(thing, state["running"][name], path)
        return self.envs.restore(state["envs"])

    def save_checkpoint(self):
        """The last snapshot. A disk that is full for a while does not end the run."""
        with contextlib.suppress(Exception):
            self.writer.flush()
        state, step, last = self.snapshot, self.snapshot["global_step"], self.saved_at
        mean = float(np.mean(self.since_checkpoint)) if self.since_checkpoint else -math.inf
        better, self.best, self.since_checkpoint = mean > self.best, max(mean, self.best), []
        state |= {"best": self.best, "large": {name: f"{name}_{step}.pt" for name in self.large}}
        try:
            for name, thing in self.large.items():
                save(self.folder / state["large"][name], thing.state())
            numbered = [f"checkpoint_{step}.pt"] * (self.args.keep_checkpoints > 1)
            for name in ["checkpoint.pt"] + ["best.pt"] * better + numbered:
                save(self.folder / name, state)
            self.saved, old = state, sorted(self.folder.glob("checkpoint_*.pt"), key=os.path.getmtime)
            old = old[: -self.args.keep_checkpoints]
            old += [file for name in self.large for file in self.folder.glob(f"{name}_*.pt")]
            for file in old:
                if file.name not in state["large"].values():
                    file.unlink()
        except (OSError, RuntimeError) as error:  # the latter is torch's word for it
            there = f"the one of {last} decisions is still there"
            print(f"\nThe checkpoint could not be saved, {there}: {error}", flush=True)
        self.saved_at = step

    def film(self):
        self.filmed_at = self.global_step
        path = self.folder / "videos" / f"{self.global_step}.mp4"
        try:
            film(self.args, self.make_envs, self.play, self.agent, self.spec, path)
        except OSError as error:
            print(f"\n{path} could not be written: {error}", flush=True)


def main(script, doc, Args, presets, train, Agent, make_envs, describe, check, play=play_vectors, free=()):
    """free: options of the script's own that may be another when a run goes on."""
    over.clear()
    heed(interrupt)
    if ranks.RANK:  # rank 0 speaks
        sys.stdout = open(os.devnull, "w")
    if (folder := ranks.begun()) and Path(folder, "checkpoint.pt").exists():
        sys.argv[1:] = ["--resume", folder]
    try:
        args, default, checkpoint = command_line(script, Args, presets, doc)
        check(args)
        if args.resume is not None:
            for name in sorted({f.name for f in fields(Args)} - FREE - set(free)):
                ours, theirs = getattr(args, name), getattr(default, name)
                if ours != theirs:
                    has = f"the run has {option(name)} {theirs} and goes on with it"
                    raise ValueError(f"{option(name)} {ours}: {has}; leave it out")
            train(args, checkpoint)
        elif checkpoint:
            if ranks.SIZE > 1:
                raise ValueError("--evaluate and --export are for one process: leave torchrun out")
            use(args, *checkpoint, script, Agent, make_envs, describe, play)
        else:
            train(args)
    except (ValueError, EngineError, FloatingPointError, MemoryError) as error:
        raise SystemExit(f"\n{error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"\n{ranks.failed[0]}" if ranks.failed else 130) from None
    except BrokenPipeError:  # whoever read the output is gone
        sys.stdout = open(os.devnull, "w")
        raise SystemExit(1) from None
    except RuntimeError as error:  # torch's
        if ranks.failed:
            raise SystemExit(f"\n{ranks.failed[0]}") from None
        if "allocate" not in str(error):
            raise
        raise SystemExit(f"\nnot enough memory: {str(error).splitlines()[0]}") from None
    finally:
        heed(signal.SIG_IGN)  # all is done: a signal would only change the exit code
