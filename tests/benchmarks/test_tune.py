"""benchmarks/tune.py searches settings, continues after a kill, prunes, and keeps away from the seeds
of reported results. A stub replaces a script where the training itself does not matter."""

import importlib
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import learning
import optuna
import tune

SCRIPTS = sorted(path.stem for path in ROOT.glob("*_*.py") if not path.stem.endswith("_env"))

# Its return rises to 100 * learning_rate + seed. Files next to it let it wait or fail.
STUB = """
import os, pathlib, sys, time
from dataclasses import dataclass


@dataclass
class Args:
    exp_name: str = "stub"
    seed: int = 1
    env_id: str = "Toy-v0"
    unity_path: str | None = None
    godot_path: str | None = None
    total_timesteps: int = 1000
    resume: str | None = None
    evaluate: str | None = None
    eval_episodes: int = 20
    export: str | None = None
    learning_rate: float = 0.5
    epochs: int = 3
    flag: bool = True
    hidden_sizes: tuple[int, ...] = (64, 64)
    offset: float = -1.0
    gae_lambda: float = 0.95


PRESETS = {"Preset-v0": dict(learning_rate=0.25)}


def check(args):
    if not args.learning_rate > 0:
        raise ValueError(f"--learning-rate {args.learning_rate}: must be above 0")


if __name__ == "__main__":
    import tyro
    args = tyro.cli(Args)
    here = pathlib.Path(__file__).parent
    if args.evaluate:
        sys.exit(print(f"x: 9 episodes of 5 decisions on average: return {args.eval_episodes}.50 ± 1.00, from 6 to 8"))
    number = int(args.exp_name.removeprefix("trial-"))
    with open(here / "begun.txt", "a") as file:
        file.write(f"{number} {args.seed} {args.learning_rate} {os.getpid()}\\n")
    if (here / f"break.{number}").exists():
        sys.exit("it broke: no such thing")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    folder = pathlib.Path("runs", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}")
    writer = EventFileWriter(str(folder))
    for step in range(100, args.total_timesteps + 1, 100):
        value = 100 * args.learning_rate + args.seed - (1000 - step) / 100
        print(f"{step:>10,} steps {step / 1000:4.0%}  return {value:9.2f}    123 SPS", flush=True)
        for tag, x in (("return", value), ("length", 5)):
            summary = Summary(value=[Summary.Value(tag=f"charts/episodic_{tag}", simple_value=x)])
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        while step == 500 and (here / f"wait.{number}").exists():
            time.sleep(0.1)
            print("waiting", flush=True)
    writer.close()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    learning.stopping.clear()
    yield tmp_path
    learning.end_runs()
    learning.stopping.clear()


LINE = ["stub.py", "--env-id", "Toy-v0", "--search", "learning_rate=0.1..1.0"]


def run(monkeypatch, *line):
    """Run tune.py in this process."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/tune.py", *map(str, line)])
    tune.main()


def refused(monkeypatch, *line):
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, *line)
    message = str(error.value)
    assert "\n" not in message
    return message


def start(folder, *line):
    """Run tune.py in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "tune.py"), *map(str, line)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=folder, env=environment, **pipe)


def begun(folder):
    """Return the runs of the stub: number of the trial, seed, learning rate, process."""
    path = folder / "begun.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    kinds = (int, int, float, int)
    return [tuple(kind(x) for kind, x in zip(kinds, x.split(), strict=True)) for x in lines]


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def study_of(folder, name="Toy-v0.stub"):
    file = folder / "tuning" / name / "study.db"
    return optuna.load_study(study_name="tune", storage=f"sqlite:///{file}")


# Search


def test_the_printed_command_of_the_best_setting_runs(tmp_path):
    small = [
        "--num-steps",
        "64",
        "--num-minibatches",
        "4",
        "--total-timesteps",
        "192",
        "--no-compile",
    ]
    line = ["ppo_continuous_multiagent.py", "--env-id", "parity_env:Parity-v0", *small]
    search = ["learning_rate=log:1e-4..1e-2", "norm_adv=True,False", "hidden_sizes=8 8,16"]
    process = start(
        tmp_path, *line, "--trials", 3, "--jobs", 2, "--evaluate", 4, "--search", *search
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    folder = tmp_path / "tuning" / "Parity-v0.ppo_continuous_multiagent"
    assert (folder / "tuning.png").stat().st_size > 0
    assert len(list(folder.glob("runs/Parity-v0__trial-*__101__*/checkpoint.pt"))) == 3
    command, check = [line for line in out.splitlines() if line.startswith("python ")]
    assert "--env-id parity_env:Parity-v0 --num-steps 64" in command and "--seed" not in command
    assert "--learning-rate" in command and "norm-adv" in command and "--hidden-sizes" in command
    assert check.endswith("--label tuned --seeds 1 2 3 4 5 6 7 8 9 10")
    words = [sys.executable, *shlex.split(command)[1:], "--seed", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "192 steps 100%" in done.stdout, done.stderr


def test_the_first_trial_is_the_own_setting_and_the_best_trial_is_found(stub, monkeypatch, capsys):
    run(monkeypatch, *LINE, "--trials", 4)
    runs = begun(stub)
    assert len(runs) == 4 and runs[0][2] == 0.5
    rates = [rate for _, _, rate, _ in runs]
    assert len(set(rates)) == 4 and all(0.1 <= rate <= 1 for rate in rates)
    told = capsys.readouterr().out
    best = max(rates)
    assert f"a return of {100 * best + 101:,.5g}\n" in told, "in the last tenth the return is that"
    assert f"\npython stub.py --env-id Toy-v0 --learning-rate {best:g}\n" in told
    assert "The script's own setting, trial 0: 151\n" in told
    values = [trial.value for trial in study_of(stub).trials]
    assert values == pytest.approx([100 * rate + 101 for rate in rates])


def test_the_preset_of_the_env_is_the_own_setting(stub, monkeypatch):
    run(monkeypatch, "stub.py", "--env-id", "Preset-v0", "--search", *LINE[4:], "--trials", 1)
    assert study_of(stub, "Preset-v0.stub").trials[0].params == {"learning_rate": 0.25}


def test_the_score_is_the_mean_of_the_seeds(stub, monkeypatch):
    run(monkeypatch, *LINE, "--trials", 1, "--seeds", 11, 21)
    assert [seed for _, seed, _, _ in begun(stub)] == [11, 21]
    assert study_of(stub).trials[0].value == pytest.approx(50 + (11 + 21) / 2)


def test_the_score_is_the_evaluated_return(stub, monkeypatch):
    run(monkeypatch, *LINE, "--trials", 1, "--evaluate", 7)
    assert study_of(stub).trials[0].value == 7.5


# Pruning


def add_results(folder, value):
    """Add five complete trials with this return at every tenth."""
    study = study_of(folder)
    for _ in range(5):
        study.add_trial(
            optuna.trial.create_trial(
                params={"learning_rate": 0.5},
                distributions={"learning_rate": optuna.distributions.FloatDistribution(0.1, 1)},
                value=value,
                intermediate_values=dict.fromkeys(range(1, 21), value),
            )
        )


def test_a_trial_below_the_median_is_ended(stub, monkeypatch, capsys):
    (stub / "wait.6").touch()  # it would wait in the middle of its training, for ever
    run(monkeypatch, *LINE, "--trials", 1)
    add_results(stub, 1000.0)
    run(monkeypatch, *LINE, "--trials", 7)
    trial = study_of(stub).trials[6]
    assert trial.state.name == "PRUNED" and sorted(trial.intermediate_values)[-1] < 10
    assert not is_running(begun(stub)[-1][3])
    told = capsys.readouterr().out
    assert "trial 6: pruned at " in told and "Best of 7 trials, 1 pruned, 0 failed" in told


def test_a_trial_above_the_median_is_not_pruned(stub, monkeypatch):
    run(monkeypatch, *LINE, "--trials", 1)
    add_results(stub, -1000.0)
    run(monkeypatch, *LINE, "--trials", 7)
    trial = study_of(stub).trials[6]
    assert trial.state.name == "COMPLETE" and sorted(trial.intermediate_values) == list(
        range(1, 10)
    )


def test_the_second_seed_is_not_run_if_the_first_one_is_below_the_median(stub, monkeypatch):
    monkeypatch.setattr(tune, "PROGRESS", tune.re.compile("no line matches"))
    run(monkeypatch, *LINE, "--trials", 1, "--seeds", 101, 102)
    add_results(stub, 1000.0)
    run(monkeypatch, *LINE, "--trials", 7, "--seeds", 101, 102)
    assert [(number, seed) for number, seed, _, _ in begun(stub)] == [(0, 101), (0, 102), (6, 101)]
    assert study_of(stub).trials[6].state.name == "PRUNED"


# Interruptions


def test_after_a_kill_the_search_continues_and_no_run_stays_behind(stub):
    (stub / "wait.1").touch()
    process = start(stub, *LINE, "--trials", 3)
    wait_for(lambda: len(begun(stub)) == 2)
    process.kill()
    process.communicate(timeout=60)
    pid = begun(stub)[1][3]
    wait_for(lambda: not is_running(pid))
    process = start(stub, *LINE, "--trials", 3)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "1 of 3 trials are complete" in out, err
    runs = begun(stub)
    assert [number for number, _, _, _ in runs] == [0, 1, 2, 3]
    assert runs[2][2] == runs[1][2], "the interrupted trial is repeated"
    assert runs[3][2] not in (runs[0][2], runs[1][2])
    states = [trial.state.name for trial in study_of(stub).trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert "Best of 3 trials, 0 pruned, 0 failed" in out


def test_a_script_ends_when_the_search_is_killed(tmp_path):
    """The real script notices at its next line of progress that nobody reads it."""
    line = ["ppo_continuous_multiagent.py", "--env-id", "parity_env:Parity-v0", "--no-compile"]
    process = start(tmp_path, *line, "--total-timesteps", 10**9, "--search", "gamma=0.9..0.99")
    locks = lambda: list(tmp_path.glob("tuning/*/runs/*/lock"))
    try:
        wait_for(lambda: locks() and "process" in locks()[0].read_text())
        pid = int(locks()[0].read_text().split()[1])
        assert is_running(pid)
    finally:
        process.kill()
        process.communicate(timeout=60)
    wait_for(lambda: not is_running(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_runs(stub, number):
    for trial in (0, 1):
        (stub / f"wait.{trial}").touch()
    process = start(stub, *LINE, "--trials", 3, "--jobs", 2)
    wait_for(lambda: len(begun(stub)) == 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "Continue with: python " in out.splitlines()[-1]
    assert not any(is_running(pid) for _, _, _, pid in begun(stub))


def test_a_finished_search_runs_nothing_and_prints_its_result(stub, monkeypatch, capsys):
    run(monkeypatch, *LINE, "--trials", 1)
    first = capsys.readouterr().out
    run(monkeypatch, *LINE, "--trials", 1)
    assert len(begun(stub)) == 1
    assert first[first.index("Best of") :] in capsys.readouterr().out


def test_one_search_at_a_time_uses_a_folder(stub, monkeypatch):
    folder = stub / "tuning" / "Toy-v0.stub"
    folder.mkdir(parents=True)
    lock = tune.Lock(folder)
    assert "is in use" in refused(monkeypatch, *LINE, "--trials", 1)
    lock.close()


# Failures


def test_a_failing_trial_stops_no_other(stub, monkeypatch, capsys):
    (stub / "break.1").touch()
    run(monkeypatch, *LINE, "--trials", 3)
    states = [trial.state.name for trial in study_of(stub).trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE"]
    told = capsys.readouterr().out
    assert "trial 1: failed: it broke: no such thing; --learning-rate" in told
    assert "Best of 3 trials, 0 pruned, 1 failed" in told


def test_if_the_first_trial_fails_the_search_ends(stub, monkeypatch):
    """The env or the script does not work, and all trials would fail."""
    (stub / "break.0").touch()
    message = refused(monkeypatch, *LINE, "--trials", 3)
    assert message.startswith("stub.py fails: it broke: no such thing. Log: ")
    learning.stopping.clear()
    run(monkeypatch, *LINE, "--trials", 1)
    assert study_of(stub).best_trial.params == {"learning_rate": 0.5}, "it is repeated"


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (["nowhere.py"], "nowhere.py: there is no such script"),
        (["stub.py"], "--env-id is missing"),
        ([*LINE, "--seeds", 101, 7], "--seeds 7: the seeds 1 to 10 are reserved"),
        ([*LINE, "--seeds", 1], "--seeds 1: the seeds 1 to 10 are reserved"),
        ([*LINE, "--seeds", 11, 11], "a seed is given twice"),
        ([*LINE, "--seed", 11], "--seed: give --seeds"),
        ([*LINE, "--resume", "x"], "--resume: leave it out"),
        ([*LINE, "--jobs", 0], "--jobs 0: must be above 0"),
        ([*LINE, "--trials", 0], "--trials 0: must be above 0"),
        ([*LINE, "--trials", "many"], "invalid int value"),
        ([*LINE, "--evaluate", 0], "--evaluate 0: must be above 0"),
        ([*LINE, "--flop", 3], "--flop"),
        ([*LINE, "--learning-rate", 0.3], "--learning-rate has a fixed value too"),
        ([*LINE, "learning_rate=0.2,0.3"], "learning_rate is given twice"),
        ([*LINE, "speed=1..2"], "stub.py has no option --speed"),
        ([*LINE, "epochs"], "--search epochs: give NAME=LOW..HIGH"),
        ([*LINE, "epochs=1..2.5"], "LOW..HIGH are whole numbers"),
        ([*LINE, "offset=2..1"], "LOW below HIGH"),
        ([*LINE, "offset=log:0..1"], "above 0 with log:"),
        ([*LINE, "flag=yes,no"], "a flag is True or False"),
        ([*LINE, "epochs=1,two"], "two"),
        (["stub.py", *LINE[1:4], "learning_rate=-1..1"], "--learning-rate -1.0: must be above 0"),
        (["other.py", *LINE[1:]], "other.py has no Args"),
        (["wrong.py", *LINE[1:]], "wrong.py can't be loaded: SyntaxError"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(stub, monkeypatch, line, match):
    (stub / "other.py").write_text("x = 1\n")
    (stub / "wrong.py").write_text("x = = 1\n")
    message = refused(monkeypatch, *line)
    assert match in message
    assert not (stub / "tuning").exists() and not begun(stub)


def test_a_study_keeps_its_settings(stub, monkeypatch):
    run(monkeypatch, *LINE, "--trials", 1)
    new = "give another --out for a new study"
    message = refused(monkeypatch, *LINE, "--trials", 1, "--seeds", 102)
    assert message.endswith(f"the study has --seeds [101], and not [102]: {new}")
    message = refused(monkeypatch, *LINE, "--trials", 1, "--epochs", 5)
    assert "the study has options --env-id Toy-v0, and not --env-id Toy-v0 --epochs 5" in message
    assert "the study has --search" in refused(monkeypatch, *LINE, "epochs=1..2", "--trials", 1)
    (stub / "stub.py").write_text(STUB + "# changed\n")
    assert "stub.py has changed" in refused(monkeypatch, *LINE, "--trials", 1)
    (stub / "tuning" / "Toy-v0.stub" / "study.db").write_text("no database at all" * 99)
    assert "can't be opened as a study" in refused(monkeypatch, *LINE, "--trials", 1)


@pytest.mark.parametrize("how", ["result", "waiting", "range"])
def test_a_study_of_another_machine_gives_the_script_no_other_options(how, stub, monkeypatch):
    run(monkeypatch, *LINE, "--trials", 1)
    study = study_of(stub)
    if how == "waiting":
        study.enqueue_trial({"unity_path": "./evil\033[2J"})
    else:
        evil = {"unity_path": "./evil\033[2J"} if how == "result" else {"learning_rate": 50.0}
        kind = optuna.distributions
        choices = kind.CategoricalDistribution([*evil.values()])
        wide = choices if how == "result" else kind.FloatDistribution(0.1, 100)
        trial = optuna.trial.create_trial(
            params=evil, distributions=dict.fromkeys(evil, wide), value=1e9
        )
        study.add_trial(trial)
    before = begun(stub)
    message = refused(monkeypatch, *LINE, "--trials", 3)
    setting = "learning_rate 50.0" if how == "range" else "unity_path ./evil\\x1b[2J"
    assert f"study.db: trial 1 has {setting}, which is not searched: give another --out" in message
    assert begun(stub) == before


def test_a_study_without_valid_settings_is_refused(stub, monkeypatch):
    run(monkeypatch, *LINE, "--trials", 1)
    study_of(stub).set_user_attr("settings", 7)
    assert "can't be opened as a study" in refused(monkeypatch, *LINE, "--trials", 2)
    study_of(stub).set_user_attr("settings", {})
    assert "and not " in refused(monkeypatch, *LINE, "--trials", 2)


# The search space


def test_values_become_words_of_the_command_line():
    assert tune.option_words("learning_rate", 0.000123456) == ["--learning-rate", "0.0001235"]
    assert tune.option_words("logstd_init", -1.23456) == ["--logstd-init=-1.235"]
    assert tune.option_words("epochs", 3) == ["--epochs", "3"]
    assert tune.option_words("hidden_sizes", "64 32") == ["--hidden-sizes", "64", "32"]
    assert tune.option_words("norm_adv", "True", True) == ["--norm-adv"]
    assert tune.option_words("norm_adv", "False", True) == ["--no-norm-adv"]


def test_search_words_become_distributions_and_the_own_setting(stub):
    module = tune.load(stub / "stub.py")
    words = ["learning_rate=log:1e-3..1", "epochs=1..9", "flag=False,True"]
    words += ["hidden_sizes=8,64 64", "offset=0..1"]
    space, own = tune.make_space(module, stub / "stub.py", words, ["--env-id", "Preset-v0"])
    distributions = optuna.distributions
    assert space == {
        "learning_rate": distributions.FloatDistribution(1e-3, 1, log=True),
        "epochs": distributions.IntDistribution(1, 9),
        "flag": distributions.CategoricalDistribution(["False", "True"]),
        "hidden_sizes": distributions.CategoricalDistribution(["8", "64 64"]),
        "offset": distributions.FloatDistribution(0, 1),
    }
    own_values = {"learning_rate": 0.25, "epochs": 3, "flag": "True", "hidden_sizes": "64 64"}
    assert own == own_values, "the own offset is not in the search space"


def test_given_options_are_not_in_the_default_space(stub):
    module = tune.load(stub / "stub.py")
    names = lambda given: [word.split("=")[0] for word in tune.default_space(module, given)]
    assert names(()) == ["learning_rate", "gae_lambda", "hidden_sizes"]
    assert names({"gae_lambda"}) == ["learning_rate", "hidden_sizes"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_accept_their_default_space(name):
    module = importlib.import_module(name)
    try:
        words = tune.default_space(module, ())
    except SystemExit as error:
        assert "give --search" in str(error)
        return
    space, own = tune.make_space(module, ROOT / f"{name}.py", words, ["--env-id", "Toy-v0"])
    assert len(space) >= 5
    if name in ("ppo_continuous_multiagent", "sac_continuous"):
        assert set(own) == set(space), "the default setting is in the search space"


def test_paths_of_builds_become_absolute(stub):
    words = ["--unity-path", "stub.py", "--godot-path=stub.py", "--unity-path", "editor"]
    path = str((stub / "stub.py").resolve())
    expected = ["--unity-path", path, f"--godot-path={path}", "--unity-path", "editor"]
    assert tune.absolute_paths(words) == expected
