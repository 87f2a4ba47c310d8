"""One policy for each behavior of a Unity game, in one run: --behavior A B.

    start                       train A and B, if the command line says so
    runs/NAME/A, runs/NAME/B    the folders of the behaviors
    runs/NAME/behaviors.json    which behavior has which folder

The command starts a process of the same script for each behavior, with --behavior A and --behavior B. Each of them is
an ordinary run, with its own networks, checkpoints and curves. This process has the players, which the runs share: see
engines/shared.py. A behavior that has reached its total acts on with the policy that its process has exported.
"""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from onefile_rl import distributed, signals
from onefile_rl.arguments import as_typed, command_line
from onefile_rl.checkpoints import FOLDERS, folder_name, folders_of, replacing
from onefile_rl.engines import shared, waits
from onefile_rl.engines.printing import printable
from onefile_rl.engines.process import kill_tree
from onefile_rl.engines.scenes import derive_seed, engine
from onefile_rl.engines.unity import base_name

COMPLETE = 3  # exit code of a process whose run had reached its total before
LOOK_INTERVAL = 0.05  # seconds between two looks at whether processes have ended
PRINTING = threading.Lock()  # so that lines of two processes do not mix
PLAYER_ARGS = ("num_players", "base_port", "player_args", "time_scale", "others", "image_order")


def folder():
    """Return the folder for the run of this process if it trains one of several behaviors, else None."""
    found = shared.settings()
    return Path(found["folder"]) if found else None


def own_lessons(block, behavior):
    """Return the parameters of a curriculum without those whose lessons another behavior completes."""
    own = {}
    for name, value in block.items():
        owners = lesson_owners(value)
        if not owners or base_name(behavior) in owners:
            own[name] = value
    return own


def lesson_owners(value):
    """Return the behaviors, without their teams, that complete the lessons of a parameter. None: any behavior."""
    lessons = value["curriculum"] if isinstance(value, dict) else []
    criteria = [lesson["completion_criteria"] for lesson in lessons]
    names = {x["behavior"] for x in criteria if x}
    return {name and base_name(name) for name in names}


def missing_parameters(path, args):
    """Yield a line for each environment parameter that lessons of another behavior set in the run of this one.

    path: a checkpoint, or the folder of a behavior, which is resumed or evaluated without the others
    """
    folder = Path(path).resolve()
    if not folder.is_dir():
        folder = folder.parent
    for behavior, name in (folders_of(folder.parent) or {}).items():
        if name == folder.name:
            continue
        file = folder.parent / name / "config.json"
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text())
            parameters = list(config["args"]["curriculum"])
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            continue
        for parameter in parameters:
            if parameter not in args.env_parameters and parameter not in args.curriculum:
                what = f"{parameter}: the lessons of {behavior} set it in this run, and it is not set now"
                yield printable(f"{what}: give --env-parameters {parameter}=VALUE")


# The command line


def asked_for():
    """Return the behaviors that the command line names, and the folder of the run to resume, both empty if this is an
    ordinary command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--behavior", nargs="+", default=[])
    parser.add_argument("--resume")
    given, _ = parser.parse_known_args()
    folders = folders_of(given.resume) if given.resume else None
    if folders:
        if given.behavior:
            raise ValueError(f"--behavior: {given.resume} knows its behaviors, leave it out")
        return list(folders), Path(given.resume)
    return (given.behavior, None) if len(given.behavior) > 1 else ([], None)


def words_of(line, behavior, old_folder=None):
    """Return the command line of the process that trains one of the behaviors that `line` names."""
    words = []
    skip = False
    for word in line:
        name, _, _ = word.partition("=")
        if word.startswith("-"):
            skip = False
        if name == "--behavior":
            skip = True
            words += ["--behavior", behavior]
        elif name == "--resume" and old_folder:
            skip = True
            words += ["--resume", str(old_folder / folders_of(old_folder)[behavior])]
        elif not skip:
            words.append(word)
    return words


def check_names(behaviors):
    for i, name in enumerate(behaviors):
        for other in behaviors[:i]:
            if name == other or base_name(name) == other or base_name(other) == name:
                raise ValueError(
                    f"--behavior {other} {name}: an agent has one policy, give each behavior once"
                )
    names = [folder_name(name) for name in behaviors]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--behavior {' '.join(behaviors)}: two of them need the same folder, rename one"
        )


def check_run(args, behaviors, script):
    """Refuse what several behaviors in one run can't do, before any process starts."""
    given = f"--behavior {' '.join(behaviors)}"
    if distributed.SIZE > 1:
        raise ValueError(
            f"{given}: several behaviors are trained without torchrun; give one of them"
        )
    if args.evaluate is not None or args.export is not None:
        raise ValueError(f"{given}: --evaluate and --export take one run: leave --behavior out")
    if engine(args) != "Unity":
        what = (
            "a Godot game is trained one policy at a time"
            if engine(args)
            else "a gymnasium env has none"
        )
        raise ValueError(f"{given}: several behaviors are for Unity scenes; {what}")
    if hasattr(args, "num_actors"):
        raise ValueError(f"{given}: {Path(script).name} trains one behavior; use a PPO script")
    for name in args.others:
        if name in behaviors or base_name(name) in behaviors:
            raise ValueError(f"--others {name}: this is a behavior that is trained")
    for name, value in args.curriculum.items():
        owners = lesson_owners(value)
        if owners and (len(owners) > 1 or not owners <= {base_name(x) for x in behaviors}):
            fix = "name one of the behaviors that are trained in all its completion_criteria"
            raise ValueError(f"--curriculum: {name}: with several behaviors, {fix}")


def start(script, Args, presets, doc, check):
    """Train several behaviors if the command line names them, or resume a run that did. Return whether it does."""
    behaviors, old_folder = asked_for()
    if not behaviors:
        return False
    check_names(behaviors)
    argv = sys.argv
    lines = {}
    parsed = {}
    try:
        for behavior in behaviors:
            lines[behavior] = words_of(argv[1:], behavior, old_folder)
            sys.argv = [argv[0], *lines[behavior]]
            # The processes print the notices about the command line
            wants_help = {"-h", "--help"} & set(argv)
            with contextlib.redirect_stdout(sys.stdout if wants_help else io.StringIO()):
                parsed[behavior] = command_line(script, Args, presets, doc)
            check(parsed[behavior][0])
    finally:
        sys.argv = argv
    args, _, checkpoint = parsed[behaviors[0]]
    check_run(args, behaviors, script)

    main_folder = old_folder or Path("runs", new_folder_name(args))
    if main_folder.exists() and not old_folder:
        raise ValueError(f"{main_folder} exists already: wait a second, or give another --exp-name")
    decisions = checkpoint[1]["global_step"] if checkpoint else 0
    train(script, args, lines, main_folder, derive_seed(args.seed, decisions))
    return True


def new_folder_name(args):
    """Return the name of a new run's folder."""
    name = re.sub(r"[^\w.+-]+", "-", args.env_id.split(":")[-1])
    return f"{name}__{args.exp_name}__{args.seed}__{int(time.time())}"


# The processes


class Child:
    """The process of a behavior, and the threads that print its output with the behavior's name."""

    def __init__(self, member, script, words, environment, where):
        self.member = member
        self.folder = where
        typed = as_typed(script)
        command = [sys.executable, typed if Path(typed).exists() else script, *words]
        # Its own session: Ctrl-C reaches this process only, which passes it on
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.running = True
        self.reader_gone = (
            None  # the exception, if the reader of the output is gone, as with `| head`
        )
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.threads = [threading.Thread(target=self.relay, args=x, daemon=True) for x in streams]
        for thread in self.threads:
            thread.start()

    def relay(self, source, target):
        """Print the lines of the process."""
        for line in source:
            text = line.decode(errors="replace").rstrip()
            if text and not self.reader_gone:
                try:
                    with PRINTING:
                        print(f"[{self.member.behavior}] {text}", file=target, flush=True)
                except (OSError, ValueError) as error:
                    self.reader_gone = error

    def has_ended(self):
        """Return whether the process has just ended. All of its output is printed then."""
        if not self.running or self.process.poll() is None:
            return False
        self.running = False
        for thread in self.threads:
            thread.join(10)
        return True

    def send_signal(self, number):
        if self.running:
            with contextlib.suppress(OSError):
                self.process.send_signal(number)
                if hasattr(signal, "SIGCONT"):  # a stopped process would not notice
                    self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.running:
            kill_tree(self.process)
            self.process.wait()
            self.running = False


def train(script, args, lines, main_folder, seed):
    """Train each behavior in a process of its own. lines: from each behavior to the command line of its process"""
    settings = {name: getattr(args, name) for name in PLAYER_ARGS}
    num_players = settings.pop("num_players")
    base_port = settings.pop("base_port")
    player_args = ["-nographics", "-batchmode", *settings.pop("player_args")]
    path = args.unity_path or args.env_id
    announced = set()

    def make_player(worker, player_seed, is_trained):
        return shared.HubPlayer(
            path, worker, base_port, args.timeout_wait, player_args, seed=player_seed, announced=announced,
            is_trained=is_trained, **settings,
        )  # fmt: skip

    received = []

    def pass_on(number, _):
        received.append(number)
        waits.note_stop()
        for child in children:
            child.send_signal(number)

    children = []
    before = signals.handlers()
    signals.handle(pass_on)
    hub = None
    try:
        hub = shared.Hub(list(lines), make_player, num_players, seed, args.timeout_wait)
        for member in hub.members:
            where = main_folder / folder_name(member.behavior)
            environment = hub.environment(member.behavior, folder=str(where))
            words = lines[member.behavior]
            children.append(Child(member, script, words, environment, where))
        serve(hub, children, received, main_folder, script)
    finally:
        if hub:
            end(hub, children, received)
        signals.restore(before)


def serve(hub, children, received, main_folder, script):
    """Serve the processes until all of them have ended. An error tells why one of them has not trained to its end."""
    codes = set()
    look_at = 0.0  # when to look at the processes again: a look takes as long as half a message
    while any(child.running for child in children):
        hub.step()
        if hub.training and time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + LOOK_INTERVAL
        if received and not hub.training:
            raise KeyboardInterrupt
        for child in children:
            if child.reader_gone:
                raise child.reader_gone
            if child.has_ended():
                code = child.process.returncode
                codes.add(code)
                if code not in (0, COMPLETE):
                    raise SystemExit(describe_end(child, code, hub, main_folder, script))
                if any(other.running for other in children):
                    hub.play_on(child.member, str(child.folder))
        if not hub.training and hub.all_ready():
            note_folders(main_folder, children)
            hub.go()
    if codes == {COMPLETE}:
        fix = "give a larger --total-timesteps to continue"
        raise ValueError(f"{main_folder}: all behaviors have reached their totals: {fix}")


def describe_end(child, code, hub, main_folder, script):
    """Return what to print about a process that has not trained to its end. It has printed its own error."""
    if code == 1 and not hub.training:
        return 1
    how = f"exit code {code}"
    if code < 0:
        how = f"signal {-code}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name
    line = f"\n{child.member.behavior} has ended with {how}, and the run stops"
    if hub.training:
        line += f". Resume with: python {as_typed(script)} --resume {main_folder}"
    return line


def note_folders(main_folder, children):
    """Write which behavior has which folder."""
    path = main_folder / FOLDERS
    if path.exists():
        return
    content = {child.member.behavior: child.folder.name for child in children}
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2))
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error}") from None


def end(hub, children, received):
    """Stop the processes that still run, and the players. Processes that train save their checkpoints."""
    hub.stop()
    if hub.training:
        while any(child.process.poll() is None for child in children) and len(received) < 3:
            time.sleep(0.02)
    for child in children:
        child.has_ended()
        child.kill()
    hub.close()
