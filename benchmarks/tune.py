"""Search good settings of a script for an env, with Optuna.

    python benchmarks/tune.py ppo_continuous_multiagent.py --env-id Walker2d-v5 --trials 40 --jobs 2
    python benchmarks/tune.py my_ppo.py --env-id Hopper-v5 --total-timesteps 300000 --seeds 101 102
    python benchmarks/tune.py sac_continuous.py --env-id Hopper-v5 --search learning_rate=log:1e-4..3e-3 gamma=0.98,0.99

A trial trains the script with one setting: once for each of --seeds, one after another. Its score is
the mean return over the last tenth of the decisions, or with --evaluate N the return of the saved
policy over N episodes, averaged over the seeds. A trial that is below the median of the others after
a tenth of its training or more is stopped. The first trial has the script's own setting, as far as it
is in the search space. The seeds 1 to 10 are refused: results are reported with them.

--search names the options to search and their values; without it, DEFAULT_SPACES below is used:

    learning_rate=log:1e-5..1e-2        a range, on a logarithmic scale
    gae_lambda=0.8..1.0                 a range; of whole numbers if the option is one
    activation=tanh,silu                one of these
    'hidden_sizes=64 64,256 256'        one of these: options with several values
    norm_adv=True,False                 a flag

All other arguments are passed on to the script, in all trials.

Everything is in the folder --out: study.db, from which the same command continues after Ctrl-C, a
crash or with more --trials, the output of the trials in logs/, the runs in runs/, and tuning.png:
which options mattered, and the score over the values of each.
"""

import argparse
import contextlib
import importlib.util
import io
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import learning
import numpy as np
from learning import Failed

from onefile_rl.arguments import command_line, option
from onefile_rl.checkpoints import Lock, fingerprint
from onefile_rl.engines.printing import printable

# The search space of a script that has the first option. Options that it does not have are left out
DEFAULT_SPACES = {
    "gae_lambda": [
        "learning_rate=log:3e-5..3e-3",
        "num_steps=256,512,1024,2048,4096",
        "num_minibatches=4,8,16,32,64",
        "update_epochs=3..20",
        "gamma=0.95,0.98,0.99,0.995,0.999",
        "gae_lambda=0.8..1.0",
        "clip_coef=0.1..0.4",
        "ent_coef=0,1e-4,1e-3,3e-3,1e-2",
        "norm_adv=True,False",
        "hidden_sizes=64 64,128 128,256 256",
        "logstd_init=-2.0..0.0",
    ],
    "buffer_size": [
        "learning_rate=log:1e-4..3e-3",
        "learning_starts=1000,5000,10000",
        "batch_size=64,128,256,512",
        "gamma=0.95,0.98,0.99,0.995,0.999",
        "tau=log:0.001..0.05",
        "alpha=log:0.01..1.0",
        "policy_frequency=1,2,3",
        "norm_obs=True,False",
        "hidden_sizes=128 128,256 256,400 300",
    ],
}
RESERVED = range(1, 11)  # seeds of reported results
FIRST = "first"  # attribute of the first trial
OWN = "the script's own setting"
NOT_SEARCHED = {
    "--seed": "give --seeds",
    "--exp-name": "leave it out, runs are named after their trial",
    "--resume": "leave it out, trials are new runs",
    "--export": "leave it out, trials are new runs",
    "--help": "see python SCRIPT --help",
}
STARTUP_TRIALS = 5  # trials that are compared with before any trial is stopped
TENTHS = 10
POLL_SECONDS = 15  # between two lines about the progress
PROGRESS = re.compile(r"([\d,]+) steps .* return +(-?[\d.]+)")
FORMS = "give NAME=LOW..HIGH, NAME=log:LOW..HIGH or NAME=VALUE,VALUE"


# The script and its options


def load(path):
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("tuned_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"{path} can't be loaded: {type(error).__name__}: {error}") from None
    for name in ("Args", "PRESETS", "check"):
        if not hasattr(module, name):
            raise SystemExit(f"{path} has no {name}: give a script, or a changed copy of one")
    return module


def parse(module, path, words):
    """Return the arguments that the script has with this command line. Refuse it as the script
    would, in one line."""
    shown = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(path), *words]),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
    ):
        try:
            args, _, _ = command_line(path, module.Args, module.PRESETS, "")
            module.check(args)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        except SystemExit:
            raise SystemExit(learning.last_line(shown.getvalue())) from None
    return args


def given_options(words):
    """Return the names of the options on a command line."""
    names = set()
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            names |= {name, name.removeprefix("no_")}
    return names


def absolute_paths(words):
    """Return a command line with absolute paths of builds: the runs have another working folder."""
    words = list(words)
    for k, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in ("--unity-path", "--godot-path"):
            continue
        if equals and Path(value).exists():
            words[k] = f"{name}={Path(value).resolve()}"
        elif not equals and k + 1 < len(words) and Path(words[k + 1]).exists():
            words[k + 1] = str(Path(words[k + 1]).resolve())
    return words


# The search space


def default_space(module, given):
    """Return the default search space of a script as words of --search, without options that are
    given on the command line."""
    kinds = get_type_hints(module.Args)
    for name, space in DEFAULT_SPACES.items():
        if name in kinds:
            names = [word.partition("=")[0] for word in space]
            return [
                word
                for word, name in zip(space, names, strict=True)
                if name in kinds and name not in given
            ]
    raise SystemExit(f"there is no default search space for this script: give --search. {FORMS}")


def parse_range(word, text, kind):
    """Return a distribution of the numbers from `low` to `high`."""
    import optuna

    low, _, high = text.removeprefix("log:").partition("..")
    number = int if kind is int else float
    try:
        low = number(low)
        high = number(high)
        if not low < high:
            raise ValueError
        log = text.startswith("log:")
        if kind is int:
            return optuna.distributions.IntDistribution(low, high, log=log)
        return optuna.distributions.FloatDistribution(low, high, log=log)
    except ValueError:
        numbers = "whole numbers" if kind is int else "numbers"
        limits = f"LOW..HIGH are {numbers}, LOW below HIGH, and above 0 with log:"
        raise SystemExit(f"--search {word}: {limits}") from None


def make_space(module, path, words, fixed):
    """Return the search space and the script's own setting.

    words: the values of --search
    fixed: the rest of the script's command line
    The space is a dict of distributions by name. Every choice and the ends of every range are tried
    on the script's command line. The own setting has the values that are in the search space.
    """
    import optuna

    if not words:
        raise SystemExit("all options of the default search space are given: give --search")
    kinds = get_type_hints(module.Args)
    own_args = parse(module, path, fixed)
    space = {}
    own = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text:
            raise SystemExit(f"--search {word}: {FORMS}")
        name = name.replace("-", "_")
        if name not in kinds:
            raise SystemExit(f"--search {word}: {path.name} has no option {option(name)}")
        if name in space:
            raise SystemExit(f"--search {word}: {name} is given twice")
        if name in given_options(fixed):
            raise SystemExit(f"--search {word}: {option(name)} has a fixed value too, remove one")

        own_value = getattr(own_args, name)
        if ".." in text:
            space[name] = parse_range(word, text, kinds[name])
            ends = (space[name].low, space[name].high)
            for value in ends:
                parse(module, path, [*fixed, *option_words(name, value)])
            if isinstance(own_value, (int, float)) and ends[0] <= own_value <= ends[1]:
                own[name] = own_value
            continue
        choices = text.split(",")
        space[name] = optuna.distributions.CategoricalDistribution(choices)
        for choice in choices:
            line = [*fixed, *option_words(name, choice, kinds[name] is bool)]
            if getattr(parse(module, path, line), name) == own_value:
                own[name] = choice
    return space, own


def option_words(name, value, is_flag=False):
    """Return an option and its value as words of a command line."""
    if is_flag:
        flags = {"True": option(name), "False": option(f"no_{name}")}
        if value not in flags:
            raise SystemExit(f"--search {name}={value}: a flag is True or False")
        return [flags[value]]
    if isinstance(value, float):
        value = f"{value:.4g}"
    values = str(value).split()
    if len(values) == 1 and values[0].startswith("-"):  # not an option
        return [f"{option(name)}={values[0]}"]
    return [option(name), *values]


def setting_words(trial_params, module):
    """Return the setting of a trial as words of a command line."""
    kinds = get_type_hints(module.Args)
    words = []
    for name, value in trial_params.items():
        words += option_words(name, value, kinds[name] is bool)
    return words


# Trials


class Attempt:
    """A running trial: the script trains, and is evaluated, with one seed after another.

    Its standard output is a pipe to this program. If this program is killed, the script notices at
    its next line of progress that nobody reads it, and ends.
    """

    def __init__(self, trial, args, lines):
        self.trial = trial
        self.args = args
        self.lines = lines  # a queue, for (attempt, line), and (attempt, None) at the end
        self.name = f"trial-{trial.number}"
        self.words = setting_words(trial.params, args.module)
        self.scores = []
        self.log = open(args.out / "logs" / f"{self.name}.txt", "w", errors="replace")
        self.is_pruned = False
        self.train()

    def seed(self):
        return self.args.seeds[len(self.scores)]

    def train(self):
        self.is_training = True
        self.steps = 0
        self.tenth = 0  # of the training, the last one that was reported
        self.returns = []  # since then
        command = [sys.executable, str(self.args.script), *self.args.fixed, *self.words]
        self.launch([*command, "--exp-name", self.name, "--seed", str(self.seed())])

    def evaluate(self, run):
        self.is_training = False
        episodes = self.args.evaluate
        self.launch(learning.evaluation_command(self.args.script, run, self.seed(), episodes))

    def launch(self, command):
        self.text = ""
        self.process = learning.launch(
            command,
            cwd=self.args.out,
            env=learning.script_environment(self.args.jobs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self.read, args=(self.process,), daemon=True).start()

    def read(self, process):
        for line in process.stdout:
            self.lines.put((self, line))
        process.wait()
        self.lines.put((self, None))

    def handle(self, line):
        """Note a line of output. Report the mean return of each tenth of the training, and end a
        trial that is to be pruned."""
        self.text += line
        self.log.write(line)
        self.log.flush()
        found = PROGRESS.search(line)
        if not found or not self.is_training or self.is_pruned:
            return
        self.steps = int(found[1].replace(",", ""))
        self.returns.append(float(found[2]))
        tenth = min(TENTHS - 1, TENTHS * self.steps // self.args.total_timesteps)
        if tenth > self.tenth:
            self.tenth = tenth
            self.report(np.mean(self.returns))
            self.returns = []
            if self.is_pruned:
                learning.end([self.process])

    def report(self, value):
        """Report a value at this point of the training. Later seeds follow after the first one."""
        self.trial.report(float(value), len(self.scores) * TENTHS + self.tenth)
        self.is_pruned = self.trial.should_prune()

    def ended(self):
        """Start the next process of the trial, or return its score. Raise Failed."""
        learning.running.discard(self.process)
        if self.process.returncode:
            raise Failed(learning.last_line(self.text))
        if self.is_training:
            (run,) = self.args.out.glob(f"runs/*__{self.name}__{self.seed()}__*")
            score = learning.last_tenth(learning.read_events(run))
            if self.args.evaluate:
                return self.evaluate(run)
        else:
            found = re.search(r"return (-?[\d.]+) (±|\+-)", self.text)
            if not found:
                raise Failed(learning.last_line(self.text))
            score = float(found[1])
        if not np.isfinite(score):
            raise Failed(f"the return is {score}")

        # The next seed, unless this one was below the median
        self.tenth = TENTHS
        is_last = len(self.scores) + 1 == len(self.args.seeds)
        if not is_last:
            self.report(score)
        self.scores.append(score)
        if is_last:
            return float(np.mean(self.scores))
        return None if self.is_pruned else self.train()

    def progress(self):
        share = min(1, self.steps / self.args.total_timesteps)
        seeds = f" of seed {self.seed()}" if len(self.args.seeds) > 1 else ""
        return f"trial {self.trial.number} {share:.0%}{seeds}"


def open_study(args, settings):
    """Return the study in args.out, new or as it was, with its interrupted trials to be repeated.

    settings: what must be the same in all trials of a study
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = args.out / "study.db"
    try:
        study = optuna.create_study(
            study_name="tune",
            storage=f"sqlite:///{file}",
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, n_warmup_steps=2),
        )
        seed = len(study.trials)
        before = dict(study.user_attrs.get("settings", settings))
    except Exception as error:  # of SQLite, SQLAlchemy and Optuna
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])[:200]
        raise SystemExit(
            f"{file} can't be opened as a study: {reason}: give another --out"
        ) from None
    # Another seed after each start: the same one would draw the settings of the last start again
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=args.jobs > 1)

    for name, value in settings.items():
        if before.get(name) != value:
            if name == "script":
                difference = f"{args.script.name} has changed since the study was started"
            else:
                theirs = printable(before.get(name))[:200]
                difference = f"the study has {name} {theirs}, and not {value}"
            raise SystemExit(f"{args.out}: {difference}: give another --out for a new study")
    check_trials(study, args)
    if not study.trials:
        study.set_user_attr("settings", settings)
        is_own = len(args.own) == len(args.space)
        study.enqueue_trial(args.own, user_attrs={FIRST: True, OWN: is_own})
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
    return study


def check_trials(study, args):
    """Refuse settings that this command does not search: they become options of the script, and study.db may be of
    another machine."""
    for trial in study.trials:
        given = trial.system_attrs.get("fixed_params", {})
        for name, value in [*trial.params.items(), *dict(given).items()]:
            try:
                searched = args.space[name]
                valid = searched._contains(searched.to_internal_repr(value))
            except (KeyError, TypeError, ValueError):
                valid = False
            if not valid:
                setting = printable(f"{name} {value}")[:100]
                what = f"trial {trial.number} has {setting}, which is not searched"
                raise SystemExit(f"{args.out / 'study.db'}: {what}: give another --out")


def finished(study):
    """Return the trials that have a result. Interrupted ones have failed without an error."""
    results = []
    for trial in study.trials:
        if trial.state.name in ("COMPLETE", "PRUNED") or "error" in trial.user_attrs:
            results.append(trial)
    return results


def start_trial(study, args, lines):
    trial = study.ask(args.space)
    return Attempt(trial, args, lines)


def end_trial(study, attempt, num_done, args):
    """Handle the end of a trial's process. Return whether the trial has ended."""
    import optuna

    number = attempt.trial.number
    try:
        score = None if attempt.is_pruned else attempt.ended()
        if score is None and not attempt.is_pruned:
            return False  # its next process runs
    except (Failed, OSError, ValueError) as error:
        if attempt.trial.user_attrs.get(FIRST):  # it is repeated with the next start
            log = args.out / "logs" / f"{attempt.name}.txt"
            raise SystemExit(f"{args.script.name} fails: {error}. Log: {log}") from None
        attempt.trial.set_user_attr("error", str(error))
        study.tell(attempt.trial, state=optuna.trial.TrialState.FAIL)
        result = f"failed: {error}"
    else:
        if attempt.is_pruned:
            study.tell(attempt.trial, state=optuna.trial.TrialState.PRUNED)
            result = f"pruned at {attempt.steps:,} decisions"
        else:
            study.tell(attempt.trial, score)
            best = study.best_trial
            result = f"{score:,.5g} (best: {best.value:,.5g}, trial {best.number})"
    learning.running.discard(attempt.process)
    attempt.log.close()
    setting = shlex.join(attempt.words)
    if attempt.trial.user_attrs.get(OWN):
        setting = OWN
    show(f"[{num_done + 1}/{args.trials}] trial {number}: {result}; {setting}")
    return True


def show(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run_trials(study, args):
    """Run trials until the study has args.trials results, args.jobs at a time."""
    lines = queue.Queue()
    active = []
    shown_at = time.monotonic()
    num_done = len(finished(study))
    while num_done < args.trials:
        while len(active) < min(args.jobs, args.trials - num_done):
            active.append(start_trial(study, args, lines))
        if time.monotonic() >= shown_at + POLL_SECONDS:
            shown_at = time.monotonic()
            show(f"running: {', '.join(attempt.progress() for attempt in active)}")
        try:
            attempt, line = lines.get(timeout=1)
        except queue.Empty:
            continue
        if line is not None:
            attempt.handle(line)
        elif end_trial(study, attempt, num_done, args):
            active.remove(attempt)
            num_done += 1


# Results


def command_of(trial, args):
    """Return the command that trains with the setting of a trial."""
    words = [*args.words, *setting_words(trial.params, args.module)]
    return f"python {shlex.join([args.what, *words])}"


def print_results(study, args):
    """Print the best setting."""
    trials = finished(study)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    num_pruned = sum(trial.state.name == "PRUNED" for trial in trials)
    num_failed = len(trials) - num_pruned - len(complete)
    counts = f"{len(trials)} trials, {num_pruned} pruned, {num_failed} failed"
    if not complete:
        raise SystemExit(f"No trial has a score: {counts}. Logs: {args.out / 'logs'}")
    best = study.best_trial
    print(f"\nBest of {counts}: trial {best.number} with a return of {best.value:,.5g}")
    for trial in complete:
        if trial.user_attrs.get(OWN):
            print(f"{OWN[0].upper()}{OWN[1:]}, trial {trial.number}: {trial.value:,.5g}")
    print(f"\n{command_of(best, args)}\n")
    words = [args.what, *args.words, *setting_words(best.params, args.module)]
    tool = Path(learning.__file__)
    if tool.is_relative_to(Path.cwd()):
        tool = tool.relative_to(Path.cwd())
    check = [str(tool), *words, "--label", "tuned", "--seeds", *map(str, RESERVED)]
    print("It is the best of many scores, so expect less from new runs. Train with other seeds:")
    print(f"python {shlex.join(check)}\n")
    path = args.out / "tuning.png"
    draw(study, args, path)
    print(f"Wrote {path}")


def importances(study):
    """Return the share of each option in the differences between good and bad trials, by name, or
    None if there are too few trials."""
    import optuna

    values = {trial.value for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])}
    if len(values) < 2:
        return None
    return optuna.importance.get_param_importances(study)


def draw(study, args, path):
    """Draw the importance of the options, and the score over each option."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    trials = finished(study)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    shares = importances(study) or {}
    names = sorted(args.space, key=lambda name: -shares.get(name, 0))
    num_columns = min(4, len(names) + 1)
    num_rows = -(-(len(names) + 1) // num_columns)
    size = (3.2 * num_columns, 2.7 * num_rows)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=size, dpi=110, layout="constrained")
    panels = list(np.ravel(grid))

    # Importance
    axes = panels[0]
    axes.barh(names, [shares.get(name, 0) for name in names], color="C0")
    axes.invert_yaxis()
    title = "importance" if shares else "importance: too few trials"
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)

    # Score over the values of each option
    best = study.best_trial
    own = [trial for trial in complete if trial.user_attrs.get(OWN)]
    for axes, name in zip(panels[1:], names, strict=False):
        choices = getattr(args.space[name], "choices", None)
        place = lambda trial: choices.index(trial.params[name]) if choices else trial.params[name]
        x = [place(trial) for trial in complete]
        y = [trial.value for trial in complete]
        points = axes.scatter(x, y, c=[trial.number for trial in complete], s=16)
        marks = [(place(best), best.value, "*", "C3", "best")]
        marks += [(place(trial), trial.value, "s", "black", OWN) for trial in own]
        for at, value, marker, color, label in marks:
            axes.plot(at, value, marker, color=color, mfc="none", ms=11, ls="none", label=label)
        bottom = axes.get_ylim()[0]
        at = [place(trial) for trial in pruned]
        axes.plot(at, [bottom] * len(at), "|", color="grey", ms=9, ls="none", label="pruned")
        if choices:
            axes.set_xticks(range(len(choices)), choices)
            axes.set_xlim(-0.5, len(choices) - 0.5)
        elif args.space[name].log:
            axes.set_xscale("log")
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    for axes in panels[len(names) + 1 :]:
        axes.set_axis_off()
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.colorbar(points, ax=panels, label="trial", shrink=0.6, ticks=MaxNLocator(integer=True))
    seeds = ", ".join(map(str, args.seeds))
    figure.suptitle(f"{args.script.name}, {args.env}: return, seeds {seeds}", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


# The command


def check_arguments(args, more):
    """Refuse bad arguments before any run."""
    for name, value in (("--jobs", args.jobs), ("--trials", args.trials)):
        if value < 1:
            raise SystemExit(f"{name} {value}: must be above 0")
    if args.evaluate is not None and args.evaluate < 1:
        raise SystemExit(f"--evaluate {args.evaluate}: must be above 0")
    for seed in args.seeds:
        if seed in RESERVED:
            limits = f"{RESERVED[0]} to {RESERVED[-1]} are reserved for reported results"
            raise SystemExit(f"--seeds {seed}: the seeds {limits}: give others, such as 101")
    if len(set(args.seeds)) < len(args.seeds):
        raise SystemExit(f"--seeds {' '.join(map(str, args.seeds))}: a seed is given twice")
    if args.script is None:
        raise SystemExit(f"{args.what}: there is no such script")
    given = given_options(more)
    for name, advice in NOT_SEARCHED.items():
        if name.removeprefix("--").replace("-", "_") in given:
            raise SystemExit(f"{name}: {advice}")
    if not args.env_id and not {"unity_path", "godot_path"} & given:
        raise SystemExit("--env-id is missing: give the environment")
    if args.jobs > 1 and "base_port" in given:
        raise SystemExit("--base-port: several jobs would use the same ports, leave it out")
    if not importlib.util.find_spec("optuna"):
        raise SystemExit("optuna is not installed: pip install -r requirements.txt")


def main():
    learning.accept_any_encoding()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = sys.exit  # errors are one line, without the usage
    parser.add_argument("what", metavar="SCRIPT", help="a script, or a changed copy of one")
    parser.add_argument("--env-id", help="the environment")
    parser.add_argument("--trials", type=int, default=40, help="the number of settings to try")
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many trials at a time; several use one thread each"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[101], help="the seeds of each trial; not 1 to 10"
    )
    parser.add_argument(
        "--search", nargs="+", metavar="NAME=VALUES", help="what to search, see above"
    )
    parser.add_argument(
        "--evaluate", type=int, help="score the saved policy with this number of episodes"
    )
    parser.add_argument("--out", type=Path, help="the folder; default: tuning/ENV.SCRIPT")
    args, more = parser.parse_known_args()
    args.script = learning.find_script(args.what)
    check_arguments(args, more)

    # The script's command line
    args.module = load(args.script)
    args.words = ["--env-id", args.env_id, *more] if args.env_id else more
    args.fixed = absolute_paths(args.words)
    search = args.search or default_space(args.module, given_options(more))
    args.space, args.own = make_space(args.module, args.script, search, args.fixed)
    parsed = parse(args.module, args.script, args.fixed)
    args.total_timesteps = parsed.total_timesteps
    args.env = parsed.env_id
    if not Path(args.what).is_file():  # found in the repository
        args.what = str(args.script)

    # The study
    name = re.sub(r"[^\w.+-]+", "-", args.env.split(":")[-1])
    args.out = (args.out or Path("tuning", f"{name}.{args.script.stem}")).resolve()
    settings = {
        "options": shlex.join(args.words),
        "--search": shlex.join(search),
        "--seeds": args.seeds,
        "--evaluate": args.evaluate,
        "script": fingerprint(args.script),
    }
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
        lock = Lock(args.out)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    with contextlib.closing(lock):
        study = open_study(args, settings)
        done = f"{len(finished(study))} of {args.trials} trials are complete"
        show(f"{done}, {args.jobs} at a time, {args.total_timesteps:,} decisions each: {args.out}")
        show(f"--search {shlex.join(search)}")
        command = f"python {shlex.join(sys.argv)}"
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            run_trials(study, args)
        except KeyboardInterrupt:
            learning.end_runs()
            print(f"\nStopped. Complete trials are kept. Continue with: {command}", flush=True)
            raise SystemExit(130) from None
        except BaseException:
            learning.end_runs()
            raise
        print_results(study, args)


if __name__ == "__main__":
    main()
