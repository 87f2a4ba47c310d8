"""Environment parameters: samplers, and lessons that follow each other, in ML-Agents' format."""

import contextlib
import itertools
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
import yaml
from conftest import ROOT, assert_refused, call, curve, stop_after, train
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel

import lbc_discrete as lbc
import ppo_continuous_multiagent as ppo
from envs.make import make_envs
from envs.pixels import PixelEnvs
from envs.unity_scenes.ball3d import Ball3D
from onefile_rl import checkpoints, curriculum
from onefile_rl.engines.samplers import Parameters, Stream, parse, per_agent, sampler_seed
from unity_vec_env import UnityVecEnv

SMALL = dict(
    env_id="parity_env:Tunable-v0", num_steps=64, num_minibatches=4, update_epochs=2, hidden_sizes=(8, 8),
    checkpoint_interval=1,
)  # fmt: skip
TUNABLE = {"push": "uniform(0.2, 0.9)", "pull": "multirangeuniform(0, 0.2, 0.5, 0.7)", "drag": 0.1}

pytestmark = pytest.mark.usefixtures("empty_folder")
train, call = partial(train, ppo, SMALL), partial(call, ppo)

WALL_JUMP = """
behaviors:
  BigWallJump:
    trainer_type: ppo
environment_parameters:
  big_wall_height:
    curriculum:
      - name: Lesson0
        completion_criteria:
          measure: progress
          behavior: BigWallJump
          signal_smoothing: true
          min_lesson_length: 100
          threshold: 0.1
        value:
          sampler_type: uniform
          sampler_parameters:
            min_value: 0.0
            max_value: 4.0
      - name: Lesson1
        value: 8.0
  mass:
    sampler_type: gaussian
    sampler_parameters:
      mean: 2
      st_dev: .3
  length:
    sampler_type: multirangeuniform
    sampler_parameters:
      intervals: [[7, 10], [15, 20]]
  gravity: 9.81
"""


def load(folder):
    return checkpoints.load(folder, ppo.__file__)[1]


def weights(folder):
    return load(folder)["kept"]["agent"]


def lessons(*values, threshold=0.0, measure="reward", length=1, **more):
    """Return a parameter with a lesson for each value. `threshold` is a number, or one for each lesson but the last."""
    thresholds = threshold if isinstance(threshold, tuple) else (threshold,) * (len(values) - 1)
    criteria = [
        {"measure": measure, "threshold": x, "min_lesson_length": length, **more}
        for x in thresholds
    ]
    return {
        "curriculum": [
            {"name": f"L{i}", "value": value}
            | ({"completion_criteria": criteria[i]} if i < len(criteria) else {})
            for i, value in enumerate(values)
        ]
    }


def write(block, file="lessons.yaml"):
    Path(file).write_text(block if isinstance(block, str) else yaml.safe_dump(block))
    return file


# The file


def test_ml_agents_block_is_accepted_as_it_is(capsys):
    """Within the YAML of a trainer, with its block alone, and without the name of the block."""
    whole = curriculum.read(write(WALL_JUMP), report=True)
    assert "signal_smoothing has no effect: returns are not smoothed" in capsys.readouterr().out
    block = {
        "environment_parameters": yaml.safe_load(WALL_JUMP)["environment_parameters"],
    }
    assert curriculum.read(write(block, "block.yaml")) == whole
    assert curriculum.read(write(block["environment_parameters"], "inner.yaml")) == whole
    first, last = whole["big_wall_height"]["curriculum"]
    assert first["value"] == "uniform(0, 4)" and last["value"] == 8.0
    assert first["completion_criteria"]["min_lesson_length"] == 100
    assert whole["mass"] == "gaussian(2, 0.3)" and whole["gravity"] == 9.81
    assert whole["length"] == "multirangeuniform(7, 10, 15, 20)"


@pytest.mark.parametrize("key", ["signal_smoothing", "require_reset", "seed"])
def test_what_has_no_effect_is_said_in_a_line(key, capsys):
    """And nothing if ML-Agents' value is that there is no such effect."""
    for value, has_effect in ((True, True), (False, False)):
        sampler = {"sampler_type": "uniform"}
        criteria = {"behavior": "B", "measure": "reward", "threshold": 1, "min_lesson_length": 2}
        if key == "seed":
            sampler["sampler_parameters"] = {"seed": 7 if value else -1}
        else:
            criteria[key] = value
        first = {"name": "A", "completion_criteria": criteria, "value": sampler}
        block = {"a": {"curriculum": [first, {"value": 1}]}, "b": sampler}
        read = curriculum.read(write(block), report=True)
        assert read["a"]["curriculum"][0]["value"] == "uniform(0, 1)"
        lines = capsys.readouterr().out.splitlines()
        assert [f": {key} has no effect: " in line for line in lines] == [True] * has_effect


@pytest.mark.parametrize("name", ["3dball", "sorter"])
def test_bundled_files_are_valid(name):
    block = curriculum.read(str(ROOT / "envs" / "unity_scenes" / f"{name}.yaml"))
    if name == "sorter":
        steps = block["num_tiles"]["curriculum"]
        tiles = [1, *range(2, 22, 2)]
        assert [lesson["value"] for lesson in steps] == tiles
        thresholds = [lesson["completion_criteria"]["threshold"] for lesson in steps[:-1]]
        best = np.array([(n + 1) / 2 for n in tiles[1:-1]])  # the mean of 1 to n tiles
        assert thresholds == pytest.approx([0.98, *0.8 * best])
    else:
        assert block == {"mass": "uniform(0.5, 10)", "scale": "uniform(0.75, 3)"}


BAD_FILES = [
    ("a: [1, 2", "line 1, column 9: expected ',' or ']'"),
    ("a: 1\n b: 2", "line 2, column 3: mapping values are not allowed here"),
    ("a: !!python/object:os.x {}", "line 1, column 4: the tag 'tag:yaml.org"),
    ("a: 1\nb: !!map foo", "line 2, column 4: the tag 'tag:yaml.org,2002:map' can't be used"),
    ("a: 2001-13-45", "is not YAML: month must be in 1..12"),
    ("", "there are no environment parameters"),
    ("behaviors: {}", "environment_parameters: there are no environment parameters"),
    ("[1, 2]", "is [1, 2]: give a parameter in each entry"),
    ("a b: 1", "'a b' can't be the name of a parameter"),
    ("a: soon", "a is 'soon': give a number, uniform(MIN, MAX)"),
    ("a: true", "a is True: give a number"),
    ("a: .inf", "a is inf: must be a finite number"),
    ("a: {curriculum: 3}", "a.curriculum is 3: give a list of lessons"),
    ("a: {curriculum: [3]}", "a.curriculum[0] is 3: give name, value, completion_criteria"),
    ("a: {curriculum: [{name: x}]}", "a.curriculum[0] has no value"),
    ("a: {curriculum: [{valu: 1}]}", "a.curriculum[0] has 'valu': did you mean value?"),
    ("a: {curriculum: [{steps: 1}]}", "a.curriculum[0] has 'steps': allowed are name, value"),
    ("environment_paramters: {a: 1}", "paramters: did you mean environment_parameters?"),
    ("a: {curriculm: [{value: 1}]}", "a has 'curriculm': did you mean curriculum?"),
    ("a: {curriculum: [{name: null, value: 1}]}", "a.curriculum[0].name is None: give a text"),
    ("a: {curriculum: [{name: [b], value: 1}]}", "a.curriculum[0].name is ['b']: give a text"),
    ("a: {curriculum: [{name: 2001-01-01, value: 1}]}", "name is datetime.date(2001, 1, 1): give"),
    ('a: {curriculum: [{name: "a\\eb", value: 1}]}', "give printable characters"),
    ("a: {number: 1}", "a has 'number': allowed are curriculum, sampler_type, sampler_parameters"),
    (
        "a: {curriculum: [{value: 1, completion_criterion: {threshold: 1}}, {value: 2}]}",
        "a.curriculum[0] has 'completion_criterion': did you mean completion_criteria?",
    ),
    (
        "a: {curriculum: [{value: 1}, {value: 2}]}",
        "a.curriculum[0] has no completion_criteria, and it is not the last lesson",
    ),
    (
        "a: {curriculum: [{value: 1, completion_criteria: {threshold: x}}]}",
        "a.curriculum[0].completion_criteria.threshold is 'x': give a number",
    ),
    (
        "a: {curriculum: [{value: 1, completion_criteria: {measure: Elo}}]}",
        "a.curriculum[0].completion_criteria.measure is 'Elo': give reward or progress",
    ),
    (
        "a: {curriculum: [{value: 1, completion_criteria: {measure: progress, threshold: 2}}]}",
        "threshold is 2: progress is between 0 and 1",
    ),
    (
        "a: {curriculum: [{value: 1, completion_criteria: {min_lesson_length: -1}}]}",
        "completion_criteria.min_lesson_length is -1: give a number of episodes",
    ),
    ("a: {sampler_type: normal}", "a.sampler_type is 'normal': give uniform, gaussian"),
    ("a: {sampler_type: [uniform]}", "a.sampler_type is ['uniform']: give uniform, gaussian"),
    ("a: {sampler_type: {b: 1}}", "a.sampler_type is {'b': 1}: give uniform, gaussian"),
    (
        "a: {sampler_type: uniform, sampler_parameters: {min: 1}}",
        "a.sampler_parameters has 'min': allowed are min_value, max_value",
    ),
    (
        "a: {sampler_type: uniform, sampler_parameters: {min_value: 3}}",
        "a.sampler_parameters: uniform(3, 1): 3 is above 1",
    ),
    (
        "a: {sampler_type: multirangeuniform, sampler_parameters: {intervals: [1, 2]}}",
        "a.sampler_parameters.intervals is [1, 2]: give a list of pairs",
    ),
]


@pytest.mark.parametrize(("text", "problem"), BAD_FILES)
def test_a_malformed_file_is_one_line_that_names_the_place(text, problem, monkeypatch):
    monkeypatch.setattr(ppo, "train", lambda args: None)
    with pytest.raises(SystemExit) as refused:
        call(monkeypatch, "--env-id", "3DBall", "--curriculum", write(text))
    line = str(refused.value).strip()
    assert problem in line and "lessons.yaml" in line and "\n" not in line


def nested_aliases(first, names="abcdefghijk"):
    """Return YAML with lists, each of which has the one before nine times."""
    lines = [f"a: &a {first}"]
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join(lines)


# Six times: an implementation without a limit needs a second for it, and not all memory
MERGES = [
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}"
    for before, name in itertools.pairwise("abcdefg")
]
HUGE = f"0x{'f' * 9000}"  # Python does not print it
SEXAGESIMAL = ":".join("1" * 400)

HOSTILE_FILES = {
    "aliases": (
        f"{nested_aliases('[0, 1]')}\nenvironment_parameters: {{mass: *k}}",
        "has more than 100,000 values: give each alias (*NAME) fewer times",
    ),
    "aliases in a name": (
        f"{nested_aliases('[0, 1]', 'abcdefg')}\n"
        "environment_parameters: {mass: {curriculum: [{name: *g, value: 1}]}}",
        "has more than 100,000 values",
    ),
    "a name in itself": (
        "mass: {curriculum: [{name: &a [*a], value: 1}]}",
        "has more than 100,000 values",
    ),
    "aliases of lessons": (
        f"lesson: &a {{value: 1}}\ncourse: &b {{curriculum: [{'*a, ' * 1000}]}}\n"
        + "environment_parameters:\n"
        + "\n".join(f"  mass{i}: *b" for i in range(200)),
        "has more than 100,000 values",
    ),
    "merged mappings": (
        "\n".join(["a: &a {mass: 1}", *MERGES, "environment_parameters: *g"]),
        "line 2, column 8: << can't be used: write the keys out",
    ),
    "a large integer": (f"mass: 1{'0' * 400}", "must be a finite number"),
    "an integer that can't be printed": (f"mass: {HUGE}", "mass is an integer of 36,000 bits: "),
    "an integer in base 60": (f"mass: {SEXAGESIMAL}", "must be a finite number"),
    "a number in base 60": (f"mass: {SEXAGESIMAL}.5", "is not YAML: int too large to convert"),
    "a large threshold": (
        f"mass: {{curriculum: [{{value: 1, completion_criteria: {{threshold: {HUGE}}}}}]}}",
        "threshold is an integer of 36,000 bits: give a number",
    ),
    "a large number of a sampler": (
        f"mass: {{sampler_type: uniform, sampler_parameters: {{min_value: {HUGE}}}}}",
        "mass.sampler_parameters: must be a finite number",
    ),
    "a large interval": (
        "mass: {sampler_type: multirangeuniform, "
        f"sampler_parameters: {{intervals: [[{HUGE}, 1]]}}}}",
        "mass.sampler_parameters: must be a finite number",
    ),
    "a large name": (
        f"mass: {{curriculum: [{{name: {HUGE}, value: 1}}]}}",
        "name is an integer of 36,000 bits: give a shorter text",
    ),
    "a large number of episodes": (
        f"mass: {{curriculum: [{{value: 1, completion_criteria: {{min_lesson_length: {HUGE}}}}}]}}",
        "min_lesson_length is an integer of 36,000 bits: give a number of episodes",
    ),
    "a large key": (f"? {HUGE}\n: 1", "an integer of 36,000 bits can't be the name of a parameter"),
    "a large integer in a list": (f"mass: [[{HUGE}]]", "mass is [[an integer of 36,000 bits]]: "),
    "aliases in a sampler": (
        f"{nested_aliases('[0, 1]')}\nenvironment_parameters:\n  mass:\n    sampler_type: multirangeuniform\n"
        "    sampler_parameters: {intervals: *k}",
        "has more than 100,000 values",
    ),
    "a list in itself": ("mass: &a [*a]", "has more than 100,000 values"),
    "a block in itself": ("&a {mass: {curriculum: *a}}", "has more than 100,000 values"),
    "a tag": ("mass: !!python/object/apply:os.system ['touch run']", "line 1, column 7: the tag"),
    "many digits": (f"mass: {'9' * 5000}", "is not YAML: Exceeds the limit"),
    "depth": (f"mass: {'[' * 20_000}", "is not YAML: maximum recursion depth"),
    "a key that is there twice": ("mass: 1\nmass: 2", "line 2, column 1: 'mass' is there twice"),
    "size": (f"# {'x' * 200_000}\nmass: 1", "can't be read (larger than 100,000 bytes)"),
    "many lessons": (
        f"lesson: &a {{value: 1}}\nenvironment_parameters: {{mass: {{curriculum: [{'*a, ' * 2000}]}}}}",
        "mass.curriculum has 2000 lessons: give at most 1000",
    ),
    "many intervals": (
        "pair: &a [0, 1]\nenvironment_parameters:\n  mass:\n    sampler_type: multirangeuniform\n"
        f"    sampler_parameters: {{intervals: [{'*a, ' * 2000}]}}",
        "intervals has 2000: give at most 100",
    ),
}


TAGS = (
    "!!map [a, b]", "!!map a", "!!set [a]", "!!omap a", "!!pairs a", "!!seq a", "!!bool foo", "!!int ''",
    "!!float ''", "!!timestamp foo", "!!binary a", "!!null a", "!!str [a]", "! a", "!own a", "!<own> a",
)  # fmt: skip


@pytest.mark.parametrize("tagged", TAGS)
@pytest.mark.parametrize("place", ["mass: ", "mass:\n  - ", "behaviors:\n  ", ""])
def test_tags_are_refused_with_their_place(tagged, place):
    """Wherever they are, also in the part of a trainer's file that is not used."""
    write(place + tagged)
    with pytest.raises(ValueError) as refused:
        curriculum.read("lessons.yaml")
    line, column = place.count("\n") + 1, len(place.split("\n")[-1]) + 1
    start = f"lessons.yaml, line {line}, column {column}: the tag "
    assert str(refused.value).startswith(start)
    assert str(refused.value).endswith(" can't be used: leave it out")


def test_aliases_can_share_criteria_and_values():
    criteria = "&c {measure: progress, threshold: 0.5, min_lesson_length: 3}"
    sampler = "&s {sampler_type: uniform}"
    first = f"{{name: 1, value: {sampler}, completion_criteria: {criteria}}}"
    second = "{name: true, value: *s, completion_criteria: *c}"
    block = curriculum.read(write(f"a:\n  curriculum: [{first}, {second}, {{value: 2}}]"))
    one, two, three = block["a"]["curriculum"]
    assert one["completion_criteria"] == two["completion_criteria"]
    assert one["value"] == two["value"] == "uniform(0, 1)"
    assert [x["name"] for x in (one, two, three)] == ["1", "True", "Lesson2"]


@pytest.mark.parametrize("kind", HOSTILE_FILES)
def test_a_hostile_file_is_refused_in_one_short_line(kind):
    text, problem = HOSTILE_FILES[kind]
    Path("lessons.yaml").write_text(text)
    with pytest.raises(ValueError) as refused:
        curriculum.read("lessons.yaml")
    line = str(refused.value)
    assert problem in line and len(line) < 300 and "\n" not in line
    assert not Path("run").exists()


@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "/dev/zero")])
def test_a_curriculum_that_is_not_a_file_is_not_waited_for(make):
    make("lessons.yaml")
    with pytest.raises(ValueError, match="can't be read \\(not a file\\)"):
        curriculum.read("lessons.yaml")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--env-parameters mass=uniform(1,2,3)", "uniform takes two numbers"),
        ("--env-parameters mass=uniform(2,1)", "uniform(2, 1): 2 is above 1, give the smaller"),
        ("--env-parameters mass=gaussian(2,-1)", "standard deviation must not be negative"),
        ("--env-parameters mass=triangular(2,3)", "there is no sampler triangular: give a number"),
        ("--env-parameters mass=heavy", "--env-parameters mass=heavy: give a number, uniform"),
        ("--env-parameters mass=nan", "--env-parameters mass=nan: must be a finite number"),
        ("--curriculum missing.yaml", "missing.yaml: can't be read (No such file or directory)"),
        ("--curriculum ok.yaml --env-parameters mass=1", "--curriculum sets it too"),
        ("--env-parameters mas=1", "3DBall has no parameter mas: it has gravity, mass, scale"),
        ("--env-id Basic --env-parameters mas=1", "Basic has no parameter mas: it has none"),
    ],
)
def test_bad_parameters_are_one_line(line, problem, tmp_path):
    write({"mass": 2.0}, "ok.yaml")
    assert_refused(ppo, f"--env-id 3DBall {line}", problem, tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--env-id GodotDiscs --env-parameters a=1", "use --player-args=--NAME=VALUE"),
        ("--env-id GodotDiscs --curriculum ok.yaml", "let a Godot game choose its lessons itself"),
        (
            "--env-id parity_env:Tunable-v0 --env-parameters pushes=1",
            "environment parameter pushes: Tunable-v0 has no such argument or attribute; it has push",
        ),
        (
            "--env-id parity_env:Tunable-v0 --env-parameters mode=1",
            "environment parameter mode: Tunable-v0 has no such argument or attribute",
        ),
    ],
)
def test_what_has_no_parameters_is_refused(line, problem, tmp_path):
    write({"mass": 2.0}, "ok.yaml")
    assert_refused(ppo, line, problem, tmp_path)


def test_lessons_replace_the_parameters_of_a_preset(monkeypatch):
    """Sorter's preset has a number of tiles. A number on the command line beside the lessons is an error."""
    import ppo_discrete_multiagent as ppo_discrete

    seen = []
    monkeypatch.setattr(ppo_discrete, "train", seen.append)
    file = str(ROOT / "envs" / "unity_scenes" / "sorter.yaml")
    line = ["ppo_discrete_multiagent.py", "--env-id", "Sorter", "--curriculum", file]
    monkeypatch.setattr(sys, "argv", line)
    ppo_discrete.main()
    assert seen[0].env_parameters == {} and len(seen[0].curriculum["num_tiles"]["curriculum"]) == 11
    assert ppo_discrete.PRESETS["Sorter"]["env_parameters"] == {"num_tiles": 2.0}
    monkeypatch.setattr(sys, "argv", [*line, "--env-parameters", "num_tiles=3"])
    with pytest.raises(SystemExit, match="--env-parameters num_tiles: --curriculum sets it too"):
        ppo_discrete.main()


def test_actor_processes_have_no_lessons():
    args = lbc.Args(env_id="CartPole-v1", num_actors=2, curriculum={"length": 0.5})
    with pytest.raises(ValueError, match="actor processes have no lessons; leave --num-actors out"):
        lbc.check(args)


# Lessons


def follow(block, returns, progress=0.0, slots=1):
    """Return the values after each list of returns, of which each ends one iteration."""
    course = curriculum.Curriculum(block)
    values = []
    for part in returns:
        for x in part:
            course.record(None, x)
        course.update(progress, slots)
        values.append(course.values()["a"])
    return values


def test_a_lesson_ends_when_the_mean_of_its_last_episodes_is_above_the_threshold():
    block = {"a": lessons(1, 2, 3, threshold=0.5, length=2)}
    assert follow(block, [[1.0]]) == [1], "too few episodes"
    assert follow(block, [[0.5, 0.5]]) == [1], "not above"
    assert follow(block, [[0.5, 0.51]]) == [2]
    assert follow(block, [[-9.0, 0.4, 0.7]]) == [2], "only the last two count"
    assert follow(block, [[9.0, 0.4, 0.5]]) == [1]
    assert follow(block, [[1.0, 1.0], [1.0], [1.0], [1.0, 1.0]]) == [2, 2, 3, 3], (
        "episodes of the lesson before do not count, and the last lesson stays"
    )
    assert follow({"a": lessons(1, 2, threshold=-0.7499, length=1)}, [[-1.0]]) == [1], (
        "no smoothing"
    )


def test_a_lesson_can_end_by_progress_after_its_episodes():
    block = {"a": lessons(1, 2, measure="progress", threshold=0.5, length=2)}
    assert follow(block, [[0.0], [0.0]], progress=0.51) == [1, 2]
    assert follow(block, [[0.0, 0.0]], progress=0.5) == [1]


def test_episodes_that_started_before_a_lesson_do_not_count():
    course = curriculum.Curriculum({"a": lessons(1, 2, 3, threshold=0.5, length=1)})
    course.record(0, 1.0)
    assert course.update(0, num_slots=2) == {"a": 2}
    course.record(0, 1.0)
    course.record(1, 1.0)
    assert course.update(0, num_slots=2) == {}
    course.record(1, 1.0)
    assert course.update(0, num_slots=2) == {"a": 3}


def test_a_restarted_episode_belongs_to_the_new_lesson():
    course = curriculum.Curriculum({"a": lessons(1, 2, 3, threshold=0.5, length=1)})
    course.record(0, 1.0)
    course.update(0, num_slots=1)
    course.restarted([0])
    course.record(0, 1.0)
    assert course.update(0, num_slots=1) == {"a": 3}


def test_lessons_of_another_behavior_stay_as_they_are():
    block = {"a": lessons(1, 2, behavior="Big"), "b": lessons(1, 2, behavior="Small")}
    course = curriculum.Curriculum(block)
    course.behavior = "Small?team=0"
    (line,) = course.waiting()
    assert (
        line == "a stays in lesson L0: it ends by returns of Big, and this run trains Small?team=0"
    )
    course.record(0, 1.0)
    assert course.update(0, num_slots=1) == {"b": 2}


def test_lessons_are_in_the_log_the_progress_line_and_the_checkpoint(monkeypatch, capsys):
    file = write({"push": lessons(0.3, 0.6, 0.9, measure="progress", threshold=(0.25, 0.5))})
    line = ["--env-id", "parity_env:Tunable-v0", "--num-steps", 64, "--num-minibatches", 4]
    call(monkeypatch, *line, "--total-timesteps", 512, "--curriculum", file)
    (folder,) = Path("runs").iterdir()
    numbers = [value for _, value in curve(folder)["charts/lesson/push"]]
    assert numbers == [0, 0, 0, 1, 1, 2, 2, 2], "of the lesson that an iteration was trained in"
    out = capsys.readouterr().out
    assert "push 0.6: lesson L1 starts after 192 decisions" in out
    assert out.splitlines()[-2].endswith("push L2")
    state = load(folder)
    assert state["curriculum"]["number"] == {"push": 2} and state["changed_args"] == {}

    # An evaluation is in the lesson of its checkpoint, or with the value that is given
    seen = []
    monkeypatch.setattr(
        ppo, "make_envs", lambda args, seed: seen.append(args) or make_envs(args, seed)
    )
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    assert "push 0.9: lesson L2 of the checkpoint" in capsys.readouterr().out
    call(monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--env-parameters", "push=0.1")
    assert [args.env_parameters for args in seen] == [{"push": 0.9}, {"push": 0.1}]


def test_best_is_the_best_of_the_current_lesson():
    """In the second lesson rewards are lower. Its best checkpoint replaces that of the first."""
    block = {"pull": lessons(2.0, -2.0, measure="progress", threshold=0.5)}
    folder = train(total_timesteps=64 * 8, curriculum=block)
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["global_step"] > 64 * 5 and best["curriculum"]["number"] == {"pull": 1}


# Resume


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resume_with_samplers_and_lessons_equals_uninterrupted(monkeypatch, num_envs):
    """Stopped in the second lesson: the same weights to the byte, the same curves and the same lessons."""
    settings = dict(num_envs=num_envs, total_timesteps=64 * num_envs * 8)
    settings |= dict(env_parameters=TUNABLE)
    level = lessons(1, 2, 3, measure="progress", threshold=(0.25, 0.7), length=2)
    settings |= dict(curriculum={"level": level})
    whole = train(**settings)
    with monkeypatch.context() as patch:
        stop_after(patch, ppo, "gae", 5)
        part = train(**settings)
    state = load(part)
    assert state["iteration"] == 5 and state["episodes"]["l"].any()
    assert state["curriculum"]["number"] == {"level": 1}
    call(monkeypatch, "--resume", part)
    first, second = weights(whole), weights(part)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert curve(whole) == curve(part)
    assert load(whole)["curriculum"] == load(part)["curriculum"]


def test_a_run_is_resumed_without_its_file(monkeypatch):
    """The checkpoint has the lessons. Others are refused."""
    file = write({"push": lessons(0.3, 0.6, measure="progress", threshold=0.5)})
    line = ["--env-id", "parity_env:Tunable-v0", "--num-steps", 64, "--num-minibatches", 4]
    call(monkeypatch, *line, "--total-timesteps", 64, "--curriculum", file)
    (folder,) = Path("runs").iterdir()
    other = write({"push": 0.3}, "other.yaml")
    with pytest.raises(
        SystemExit, match="'push': 0.3}: the run has --curriculum .*\\.\\.\\., leave it out"
    ):
        call(monkeypatch, "--resume", folder, "--total-timesteps", 256, "--curriculum", other)
    Path(file).unlink()
    call(monkeypatch, "--resume", folder, "--total-timesteps", 256)
    assert load(folder)["curriculum"]["number"] == {"push": 1}


@pytest.mark.parametrize(
    "entry",
    [{"number": {"push": 7}}, {"returns": ["x"]}, {"returns": [float("nan")]}, {"before": 3}],
)
def test_lessons_of_an_invalid_checkpoint_are_refused(entry, monkeypatch):
    block = {"push": lessons(0.3, 0.6)}
    folder = train(total_timesteps=64, curriculum=block)
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["curriculum"] |= entry
    torch.save(state, path)
    with pytest.raises(SystemExit, match="is not a valid checkpoint: curriculum"):
        call(monkeypatch, "--resume", folder, "--env-id", SMALL["env_id"], "--total-timesteps", 128)


def test_a_checkpoint_from_before_curricula_is_resumed(monkeypatch):
    folder = train(total_timesteps=64)
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["curriculum"], state["args"]["curriculum"]
    torch.save(state, path)
    call(monkeypatch, "--resume", folder, "--total-timesteps", 128, "--trust")
    assert load(folder)["global_step"] == 128


def make_tunable(kind, parameters):
    if kind == "vectors":
        args = ppo.Args(env_id="parity_env:Tunable-v0", num_envs=3, env_parameters=parameters)
        return make_envs(args, 1)[0]
    workers = 2 if "workers" in kind else 0
    return PixelEnvs("parity_env:CurriculumPixels-v0", 3, workers, parameters=parameters)


def play(envs, rng, count):
    seen = []
    for _ in range(count):
        obs, rewards, *_ = envs.step(rng.uniform(-1, 1, (3, 2)).astype(np.float32))
        obs = np.hstack([x.reshape(3, -1) for x in obs.values()]) if isinstance(obs, dict) else obs
        seen.append((envs.get_attr("push"), obs.copy(), rewards.copy()))
    return seen


@pytest.mark.parametrize("kind", ["vectors", "pixels", "pixels in 2 workers"])
def test_samplers_are_drawn_per_env_and_episode_with_the_seed(kind):
    parameters = {"push": "uniform(0.2, 0.9)"}
    runs = []
    for seed in (5, 5, 6):
        with closing(make_tunable(kind, parameters)) as envs:
            envs.reset(seed=seed)
            runs.append([pushes for pushes, *_ in play(envs, np.random.default_rng(0), 30)])
    assert runs[0] == runs[1] != runs[2]
    for drawn in zip(*runs[0], strict=True):
        assert len(set(drawn)) > 2 and 0.2 <= min(drawn) <= max(drawn) <= 0.9, "one per episode"
    first = runs[0][0]
    assert len(set(first)) == 3, "the envs draw different numbers"


@pytest.mark.parametrize("kind", ["vectors", "pixels", "pixels in 2 workers"])
def test_envs_with_samplers_come_back_where_they_were(kind):
    """Restored from a state, twice: the same parameters, observations and rewards, to the byte."""
    parameters = TUNABLE if kind == "vectors" else {"push": "gaussian(0.5, 0.2)"}
    rng = np.random.default_rng(0)
    with closing(make_tunable(kind, parameters)) as envs:
        envs.reset(seed=5)
        play(envs, rng, 17)
        envs.set_parameters({"push": "uniform(0.1, 0.2)"})
        play(envs, rng, 3)
        state = envs.state()
        state = torch_round_trip(state)
        random_state = rng.bit_generator.state
        expected = play(envs, rng, 40)
    rng.bit_generator.state = random_state
    parameters = parameters | {"push": "uniform(0.1, 0.2)"}
    with closing(make_tunable(kind, parameters)) as envs:
        _, infos = envs.restore(state)
        assert "restarted" not in infos
        seen = play(envs, rng, 2)
        state = torch_round_trip(envs.state())
    with closing(make_tunable(kind, parameters)) as envs:
        _, infos = envs.restore(state)
        assert "restarted" not in infos
        seen += play(envs, rng, 38)
    for (pushes, obs, rewards), (pushes_2, obs_2, rewards_2) in zip(expected, seen, strict=True):
        assert pushes == pushes_2
        assert obs.tobytes() == obs_2.tobytes() and rewards.tobytes() == rewards_2.tobytes()


def torch_round_trip(state):
    torch.save(checkpoints.plain(state), "state.pt")
    return torch.load("state.pt", weights_only=True)


def test_an_argument_of_the_constructor_is_as_in_env_kwargs():
    """Also after the lesson has changed: the env is made again, and random numbers continue."""
    make = lambda **settings: make_envs(ppo.Args(env_id="parity_env:Tunable-v0", **settings), 1)[0]
    observations = []
    for settings in (
        dict(env_kwargs={"pull": 3.0, "level": 2}),
        dict(env_parameters={"pull": 3.0, "level": 2.0}),
    ):
        with closing(make(**settings)) as envs:
            envs.reset(seed=3)
            actions = np.zeros((1, 2), np.float32)
            observations.append([envs.step(actions)[0].tobytes() for _ in range(30)])
            assert envs.get_attr("level") == (2,) and type(envs.get_attr("level")[0]) is int
    assert observations[0] == observations[1]


@pytest.mark.parametrize(
    ("parameters", "block", "problem"),
    [
        ({}, {"level": lessons(1, 2, -7)}, "--curriculum: level -7, lesson L2: .* at least 0"),
        ({}, {"level": "uniform(-3, 2)"}, r"--curriculum: level uniform\(-3, 2\): .* at least 0"),
        ({"level": "uniform(1,2)", "pull": 1.0}, {}, None),
        (
            {"level": "uniform(-1, 2)"},
            {},
            r"--env-parameters level=uniform\(-1, 2\): .* at least 0",
        ),
    ],
)
def test_a_value_that_the_env_refuses_is_an_error_before_the_run(parameters, block, problem):
    """Also of a later lesson: the env is made once with each of them."""
    settings = dict(total_timesteps=64, env_parameters=parameters, curriculum=block)
    if problem is None:
        assert train(**settings)
        return
    with pytest.raises(ValueError, match=problem):
        train(**settings)
    assert not Path("runs").exists()


def test_a_lesson_with_other_spaces_is_an_error_before_the_run():
    block = {"joints": lessons(2, 3)}
    with pytest.raises(ValueError, match="--curriculum: joints 3, lesson L1: .* needs the same"):
        train(env_id="Reacher2Dof-v0", total_timesteps=64, curriculum=block)
    assert not Path("runs").exists()


def test_an_argument_that_changes_the_spaces_is_an_error():
    args = ppo.Args(env_id="Reacher2Dof-v0", num_envs=1, env_parameters={"joints": 3.0})
    with (
        closing(make_envs(args, 1)[0]) as envs,
        pytest.raises(RuntimeError, match="needs the same"),
    ):
        envs.reset(seed=1)


# The bundled player, and Unity's messages


def message(parameters, seed=0):
    """Return the payloads that ML-Agents' channel sends for these parameters, as a player gets them."""
    channel = EnvironmentParametersChannel()
    for name, (kind, *values) in parameters.items():
        if kind == "float":
            channel.set_float_parameter(name, *values)
        else:
            getattr(channel, f"set_{kind}_sampler_parameters")(name, *values, seed)
    return [bytes(payload) for payload in channel.message_queue]


def test_the_player_reads_ml_agents_messages():
    parameters = Parameters()
    sent = {
        "mass": ("float", 3.0),
        "scale": ("uniform", 0.5, 2.0),
        "friction": ("gaussian", 1.0, 0.0),
        "height": ("multirangeuniform", [(0.0, 1.0), (5.0, 6.0)]),
    }
    for payload in message(sent):
        parameters.read(payload)
    assert parameters.get("mass") == 3.0 and parameters.get("friction") == 1.0
    assert parameters.get("other", 7.0) == 7.0
    scales = per_agent(parameters, "scale", 1.0, range(100))
    assert len(set(scales)) == 100 and 0.5 <= scales.min() < 0.6 < 1.9 < scales.max() <= 2
    heights = per_agent(parameters, "height", 1.0, range(100))
    in_first = (heights <= 1).sum()
    assert 30 < in_first < 70 and (heights >= 5).sum() == 100 - in_first


def test_ranges_are_chosen_by_their_lengths():
    sampler = parse("multirangeuniform(0, 1, 4, 7)")
    rng = np.random.default_rng(0)
    drawn = np.array([sampler.draw(rng) for _ in range(4000)])
    assert abs((drawn >= 4).mean() - 0.75) < 0.03
    assert parse("multirangeuniform(2, 2, 3, 3)").draw(rng) in (2, 3)
    assert parse(str(sampler)) == sampler


def test_unity_gets_samplers_with_a_seed_of_the_player(scripted):
    """Unity draws itself: its messages have each sampler once, with other seeds for other parameters and players."""
    from conftest import agent

    script = [{"Scripted?team=0": [agent(0, [[1.0]])]}] * 3
    envs, player = scripted(script)
    envs.set_parameters({"mass": "uniform(1, 2)", "scale": 2})
    actions = np.zeros((1, 2), np.float32)
    envs.reset()
    envs.step(actions)
    envs.step(actions)
    data = bytes(player.replies[0].side_channel)
    size = len(EnvironmentParametersChannel().channel_id.bytes_le)
    (first,) = struct.unpack_from("<i", data, size)
    payload = data[size + 4 : size + 4 + first]
    seed = sampler_seed(0, "mass")
    assert payload == message({"mass": ("uniform", 1.0, 2.0)}, seed)[0]
    assert data.endswith(message({"scale": ("float", 2.0)})[0])
    assert not player.replies[1].side_channel, "sent once: sending restarts the stream in Unity"
    others = sampler_seed(0, "scale"), sampler_seed(1, "mass"), sampler_seed(0, "mass", 1)
    assert len({seed, *others}) == 4


def test_scenes_draw_per_agent_and_episode():
    parameters = Parameters(scale=Stream(parse("uniform(0.75, 3)"), 3))
    scene = Ball3D(4, 0, parameters)
    agents = np.arange(4)
    scene.begin(agents)
    first = scene.radius[:, 0].copy()
    scene.begin(agents[:1])
    assert len(set(first)) == 4 and scene.radius[0, 0] != first[0]
    assert (scene.radius[1:, 0] == first[1:]).all()
    twin = Ball3D(4, 7, Parameters(scale=Stream(parse("uniform(0.75, 3)"), 3)))
    twin.begin(agents)
    assert (twin.radius[:, 0] == first).all(), "by the seed of the sampler alone"


def test_gravity_of_3dball_is_that_of_the_agent():
    """A ball falls g t^2 / 2, and the mass does not matter."""
    from envs.unity_scenes.player import Academy

    drops = []
    for gravity, mass in ((9.81, 1.0), (2.0, 1.0), (2.0, 5.0)):
        scene = Ball3D(1, 0, {"gravity": gravity, "mass": mass})
        academy = Academy(scene, 1, lambda outbox: (np.zeros((1, 2)), np.zeros((1, 0))))
        for _ in range(10):
            academy.step()
        drops.append(4 - scene.position[0, 1])
    exact = 10 * 11 / 2 * 0.02**2  # semi-implicit Euler
    np.testing.assert_allclose(drops, [9.81 * exact, 2 * exact, 2 * exact], rtol=1e-6)


def heights(envs, steps=10):
    """Return the heights of 3DBall's balls when they lie: they show the scale."""
    for _ in range(steps):
        obs, *_ = envs.step(np.zeros((envs.num_envs, 2), np.float32))
    return obs[:, 3]


def test_players_draw_different_numbers_and_equal_runs_the_same():
    seen = []
    for _ in range(2):
        parameters = {"scale": "uniform(0.75, 3)"}
        with closing(UnityVecEnv("3DBall", num_players=2, seed=4, parameters=parameters)) as envs:
            envs.reset()
            seen.append(heights(envs))
    assert (seen[0] == seen[1]).all() and len(set(seen[0].round(3))) > 20


def test_a_lesson_survives_the_restart_of_a_player(monkeypatch, capsys):
    """The player is killed in the second lesson. The new one gets it before its first episode."""
    seen = []

    def fragile(args, seed):
        envs, how = make_envs(args, seed)
        step, count = envs.step, itertools.count(1)

        def stepped(actions):
            if next(count) == 80:
                envs.players[0].process.kill()
            out = step(0 * actions)
            seen.append((out[0][:, 3].copy(), "restarted" in out[-1]))
            return out

        envs.step = stepped
        return envs, how

    monkeypatch.setattr(ppo, "make_envs", fragile)
    block = {"scale": lessons(1.0, 3.0, measure="progress", threshold=0.3)}
    train(env_id="3DBall", num_steps=32, total_timesteps=12 * 32 * 3, curriculum=block)
    assert "scale 3: lesson L1 starts after 384 decisions" in capsys.readouterr().out
    (restart,) = [i for i, (_, restarted) in enumerate(seen) if restarted]
    lie = lambda i: np.median(seen[i][0])
    assert lie(25) < 3.2 and lie(restart + 10) > 3.7


def test_a_lesson_survives_kill_9(monkeypatch):
    """The process is killed in the second lesson, and the resumed run continues in it, from the first episode on."""
    file = write({"scale": lessons(1.0, 3.0, 1.0, measure="progress", threshold=(0.1, 0.9))})
    line = (
        f"--env-id 3DBall --num-steps 32 --num-minibatches 4 --update-epochs 1 --curriculum {file}"
    )
    line += f" --total-timesteps {12 * 32 * 300} --checkpoint-interval 1 --no-compile"
    process = subprocess.Popen(
        [sys.executable, ppo.__file__, *line.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    number = 0
    while number == 0 and time.monotonic() < deadline:
        time.sleep(0.2)
        assert process.poll() is None, process.stderr.read()
        with contextlib.suppress(OSError, ValueError, StopIteration):
            folder = next(Path("runs").iterdir())
            number = load(folder)["curriculum"]["number"]["scale"]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert number == 1

    # In the resumed run balls lie higher from the start
    seen = []

    def watched(args, seed):
        envs, how = make_envs(args, seed)
        seen.append(args.env_parameters)
        step = envs.step
        envs.step = lambda actions: seen.append(out := step(0 * actions)) or out
        return envs, how

    monkeypatch.setattr(ppo, "make_envs", watched)
    step = load(folder)["global_step"]
    call(monkeypatch, "--resume", folder, "--total-timesteps", step + 12 * 32)
    assert seen[0] == {"scale": 3.0}
    assert np.median(seen[10][0][:, 3]) > 3.7
