"""Curricula: environment parameters that change during a run, lesson by lesson.

    read(file)      the block environment_parameters of an ML-Agents YAML file, as --curriculum keeps it
    check(block)    refuse a block that can't work
    Curriculum      the lessons of a run: which one is current, and when the next one starts

A lesson ends when the mean return of its last `min_lesson_length` episodes is above its threshold (measure reward), or
when the share of the run that is done is above it (measure progress). This is checked once per iteration. The next
lesson applies to each agent from its next episode on.
"""

import difflib
import errno
import reprlib
import stat
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from onefile_rl.engines.printing import printable
from onefile_rl.engines.samplers import KINDS, make, parse

BLOCK = "environment_parameters"
LARGEST_FILE = 100_000  # bytes of a YAML file, which take a few seconds to read
MOST_VALUES = 100_000  # of the parameters: more than the largest file has without aliases
MOST_LESSONS = 1_000  # of a parameter
MOST_INTERVALS = 100  # of a sampler
LONGEST = 1_000_000  # episodes: the largest min_lesson_length
MEASURES = ("reward", "progress")

# Keys of ML-Agents' format, and their defaults
LESSON = {"name": None, "value": None, "completion_criteria": None}
CRITERIA = {
    "behavior": None,
    "measure": "reward",
    "threshold": 0.0,
    "min_lesson_length": 0,
    "signal_smoothing": None,
    "require_reset": None,
}
SAMPLER = ("sampler_type", "sampler_parameters")
SAMPLERS = {
    "uniform": {"min_value": 0.0, "max_value": 1.0},
    "gaussian": {"mean": 1.0, "st_dev": 1.0},
    "multirangeuniform": {"intervals": [[0.0, 1.0]]},
}

# Settings of ML-Agents that have no effect here
NOT_USED = {
    "signal_smoothing": "returns are not smoothed: a lesson ends by the mean return alone",
    "require_reset": "a lesson starts with the next episode of each agent, without a reset",
    "seed": "samplers use the seed of the run",
}


class Loader(yaml.SafeLoader):
    """Loads plain types only.

    It refuses a key that is there twice, of which YAML's own loader drops the first value, the key <<, with which a few
    lines can describe endless mappings, and tags, such as !!map, which can give a value to the wrong constructor.
    """

    def compose_node(self, parent, index):
        event = self.peek_event()
        if getattr(event, "tag", None):
            problem = f"the tag {shown(event.tag)} can't be used: leave it out"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            problem = None
            if key_node.tag.endswith(":merge"):
                problem = "<< can't be used: write the keys out"
            elif key_node.value in keys:
                problem = f"{shown(key_node.value)} is there twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key_node.value)
        return super().construct_mapping(node, deep)


def read(file, report=False):
    """Return the parameters in a YAML file: the whole file of an ML-Agents trainer, or only the block.

    The result has plain types only. A ValueError names the place of an error. report: print which settings have no
    effect
    """
    try:
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file")
        if status.st_size > LARGEST_FILE:
            raise OSError(errno.EFBIG, f"larger than {LARGEST_FILE:,} bytes")
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ValueError(f"--curriculum {file}: can't be read ({reason})") from None
    try:
        content = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "not YAML"
        raise ValueError(f"{file}, {where}: {error.problem or error.context}") from None
    except Exception as error:  # what YAML's loader raises for numbers and dates is not documented
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"{file} is not YAML: {printable(reason)}") from None

    if isinstance(content, dict) and (BLOCK in content or "behaviors" in content):
        content = content.get(BLOCK)
        file = f"{file}: {BLOCK}"
    if not content:
        raise ValueError(f"{file}: there are no environment parameters")
    if not is_bounded(content):
        fix = "give each alias (*NAME) fewer times"
        raise ValueError(f"{file} has more than {MOST_VALUES:,} values: {fix}")
    block, not_used = read_block(content, file)
    for key in not_used if report else []:
        print(f"{file}: {key} has no effect: {NOT_USED[key]}", flush=True)
    return block


def is_bounded(content):
    """Return whether the content of a file has at most MOST_VALUES values. Aliases can make it endless."""
    count = 0
    rest = [content]
    while rest and count <= MOST_VALUES:
        x = rest.pop()
        count += 1
        if isinstance(x, dict):
            rest += x.values()
        elif isinstance(x, list):
            rest += x
    return count <= MOST_VALUES


def check(block):
    """Refuse a block of parameters that can't work, for example that of a checkpoint."""
    read_block(block, "--curriculum")


def describe(block):
    """Return the words that stand for a block in --help."""
    return [", ".join(block) if block else "none"]


def read_block(content, where):
    """Return the parameters with canonical values, and the names of the settings that have no effect."""
    not_used = []
    block = {}
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {shown(content)}: give a parameter in each entry")
    for name, value in content.items():
        check_name(name, where)
        place = f"{where}: {name}"
        if isinstance(value, dict) and difflib.get_close_matches(name, [BLOCK], cutoff=0.8):
            raise ValueError(f"{place}: did you mean {BLOCK}?")
        if isinstance(value, dict) and "curriculum" in value:
            check_keys(value, ("curriculum",), place)
            lessons = value["curriculum"]
            place += ".curriculum"
            if not isinstance(lessons, list) or not lessons:
                raise ValueError(f"{place} is {shown(lessons)}: give a list of lessons")
            if len(lessons) > MOST_LESSONS:
                raise ValueError(f"{place} has {len(lessons)} lessons: give at most {MOST_LESSONS}")
            last = len(lessons) - 1
            block[name] = {
                "curriculum": [
                    read_lesson(lesson, i == last, f"{place}[{i}]", not_used)
                    for i, lesson in enumerate(lessons)
                ]
            }
        else:
            block[name] = read_value(value, place, not_used, may_have_lessons=True)
    return block, list(dict.fromkeys(not_used))


def check_name(name, where):
    """Refuse a name that can't be sent to a player."""
    valid = isinstance(name, str) and name.isascii() and name.isprintable()
    if not valid or not name or " " in name or "=" in name:
        raise ValueError(f"{where}: {shown(name)} can't be the name of a parameter")


def check_keys(entry, allowed, place):
    for key in entry:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1) if isinstance(key, str) else []
            fix = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(allowed)}"
            raise ValueError(f"{place} has {shown(key)}: {fix}")


def read_lesson(lesson, is_last, place, not_used):
    if not isinstance(lesson, dict):
        raise ValueError(f"{place} is {shown(lesson)}: give {', '.join(LESSON)}")
    check_keys(lesson, LESSON, place)
    if "value" not in lesson:
        raise ValueError(f"{place} has no value: give a number or a sampler")
    number = place.rpartition("[")[2].rstrip("]")
    name = read_lesson_name(lesson.get("name", f"Lesson{number}"), f"{place}.name")
    criteria = lesson.get("completion_criteria")
    if criteria is None and not is_last:
        raise ValueError(f"{place} has no completion_criteria, and it is not the last lesson")
    if criteria is not None:
        criteria = read_criteria(criteria, f"{place}.completion_criteria", not_used)
    value = read_value(lesson["value"], f"{place}.value", not_used)
    return {"name": name, "value": value, "completion_criteria": criteria}


def read_lesson_name(name, place):
    """Return the name as a text. YAML reads some words as numbers or bools."""
    if not isinstance(name, (str, int, float, bool)):
        raise ValueError(f"{place} is {shown(name)}: give a text")
    try:
        text = str(name)
    except ValueError:  # Python does not print integers with thousands of digits
        raise ValueError(f"{place} is {shown(name)}: give a shorter text") from None
    if not text.isprintable():
        raise ValueError(f"{place} is {shown(text)}: give printable characters")
    return text


def read_criteria(criteria, place, not_used):
    if not isinstance(criteria, dict):
        raise ValueError(f"{place} is {shown(criteria)}: give {', '.join(CRITERIA)}")
    check_keys(criteria, CRITERIA, place)
    for key in ("signal_smoothing", "require_reset"):
        if criteria.get(key):
            not_used.append(key)
    given = CRITERIA | criteria
    measure = given["measure"]
    if measure not in MEASURES:
        raise ValueError(f"{place}.measure is {shown(measure)}: give {' or '.join(MEASURES)}")
    try:
        threshold = parse(given["threshold"])
    except ValueError:
        threshold = None
    if not isinstance(threshold, float):
        raise ValueError(f"{place}.threshold is {shown(given['threshold'])}: give a number")
    if measure == "progress" and not 0 <= threshold <= 1:
        raise ValueError(f"{place}.threshold is {threshold:g}: progress is between 0 and 1")
    length = given["min_lesson_length"]
    if type(length) is not int or not 0 <= length <= LONGEST:
        fix = f"give a number of episodes up to {LONGEST:,}"
        raise ValueError(f"{place}.min_lesson_length is {shown(length)}: {fix}")
    behavior = given["behavior"]
    if behavior is not None and not (isinstance(behavior, str) and behavior.isprintable()):
        raise ValueError(f"{place}.behavior is {shown(behavior)}: give the name of a behavior")
    return {
        "behavior": behavior,
        "measure": measure,
        "threshold": threshold,
        "min_lesson_length": length,
    }


def read_value(value, place, not_used, may_have_lessons=False):
    """Return a number, or the text of a sampler. may_have_lessons: for the message about a wrong key."""
    try:
        if not isinstance(value, dict):
            return plain_value(parse(value))
    except ValueError as error:
        raise ValueError(f"{place} is {shown(value)}: {error}") from None

    kinds = ("curriculum", *SAMPLER) if may_have_lessons else SAMPLER
    check_keys(value, kinds, place)
    kind = value.get("sampler_type")
    if not isinstance(kind, str) or kind not in SAMPLERS:
        raise ValueError(f"{place}.sampler_type is {shown(kind)}: give {', '.join(KINDS)}")
    given = value.get("sampler_parameters", {})
    place += ".sampler_parameters"
    if not isinstance(given, dict):
        raise ValueError(f"{place} is {shown(given)}: give {', '.join(SAMPLERS[kind])}")
    check_keys(given, (*SAMPLERS[kind], "seed"), place)
    if given.get("seed", -1) != -1:
        not_used.append("seed")
    given = {name: x for name, x in given.items() if name != "seed"}
    numbers = list((SAMPLERS[kind] | given).values())
    if kind == "multirangeuniform":
        intervals = numbers[0]
        pairs = isinstance(intervals, list) and all(
            isinstance(pair, list) and len(pair) == 2 for pair in intervals
        )
        if not pairs:
            fix = "give a list of pairs, [[MIN, MAX], ...]"
            raise ValueError(f"{place}.intervals is {shown(intervals)}: {fix}")
        if len(intervals) > MOST_INTERVALS:
            raise ValueError(
                f"{place}.intervals has {len(intervals)}: give at most {MOST_INTERVALS}"
            )
        numbers = [x for pair in intervals for x in pair]
    try:
        return plain_value(make(kind, numbers))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def plain_value(value):
    """Return a parsed value as the arguments keep it: a float, or the text of a sampler."""
    return value if isinstance(value, float) else str(value)


def value_text(value):
    return f"{value:g}" if isinstance(value, float) else value


class Shortener(reprlib.Repr):
    """Shortens values. Python does not print integers with thousands of digits."""

    def repr_int(self, x, level):
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"an integer of {x.bit_length():,} bits"


def shown(x):
    """Return a value of a file as a short text. Not with repr(): aliases can make it endless."""
    return printable(Shortener().repr(x))[:60]


class Lesson(NamedTuple):
    name: str
    value: float | str
    completion_criteria: dict | None


class Curriculum:
    """The lessons of all parameters of a run.

    block: as read() returns it, or as in the YAML file
    """

    def __init__(self, block):
        block, _ = read_block(block, "--curriculum")
        self.lessons = {}
        for name, value in block.items():
            if isinstance(value, dict):
                self.lessons[name] = [Lesson(**lesson) for lesson in value["curriculum"]]
            else:
                self.lessons[name] = [Lesson(name, value, None)]
        self.number = dict.fromkeys(self.lessons, 0)  # of the current lesson, from 0
        criteria = [lesson.completion_criteria for each in self.lessons.values() for lesson in each]
        lengths = [x["min_lesson_length"] for x in criteria if x]
        self.returns = deque(maxlen=max(lengths, default=0) or 1)  # since the last change
        self.new_returns = []  # since the last update()
        self.before = set()  # slots whose episode started before the last change
        self.behavior = None  # that is trained, of a Unity scene

    def values(self):
        """Return the parameters of the current lessons."""
        return {name: self.current(name).value for name in self.lessons}

    def current(self, name):
        return self.lessons[name][self.number[name]]

    def changing(self):
        """Return the names of the parameters with several lessons."""
        return [name for name, lessons in self.lessons.items() if len(lessons) > 1]

    def record(self, slot, episodic_return):
        """Note the end of an episode. An episode that started before the last change does not count."""
        if slot in self.before:
            self.before.remove(slot)
        elif self.lessons:
            self.new_returns.append(episodic_return)

    def restarted(self, slots):
        """Note that new episodes have started in these slots."""
        self.before.difference_update(slots)

    def update(self, progress, num_slots):
        """Start the next lessons that are due. Return their parameters.

        progress: the share of the run that is done. num_slots: the number of agents
        """
        self.returns.extend(self.new_returns)
        self.new_returns = []
        due = [name for name in self.lessons if self.is_due(name, progress)]
        for name in due:
            self.number[name] += 1
        if due:
            self.returns.clear()
            self.before = set(range(num_slots))
        return {name: self.current(name).value for name in due}

    def is_due(self, name, progress):
        """Return whether the current lesson of a parameter is complete and another one follows."""
        criteria = self.current(name).completion_criteria
        if self.number[name] == len(self.lessons[name]) - 1 or not self.is_trained(criteria):
            return False
        length = criteria["min_lesson_length"]
        if len(self.returns) < length:
            return False
        if criteria["measure"] == "progress":
            return progress > criteria["threshold"]
        last = list(self.returns)[-max(length, 1) :]
        return len(last) > 0 and np.mean(last) > criteria["threshold"]

    def is_trained(self, criteria):
        """Return whether a lesson is completed by the behavior of this run."""
        wanted = criteria["behavior"]
        if wanted is None or self.behavior is None:
            return True
        return wanted.split("?team=")[0] == self.behavior.split("?team=")[0]

    def waiting(self):
        """Yield a line for each parameter whose first lesson never ends, because another behavior must complete it."""
        for name in self.changing():
            criteria = self.current(name).completion_criteria
            if criteria and not self.is_trained(criteria):
                wanted = criteria["behavior"]
                yield (
                    f"{name} stays in lesson {self.current(name).name}: it ends by returns of {wanted}, "
                    f"and this run trains {self.behavior}"
                )

    def scalars(self):
        """Return the numbers of the current lessons, to log."""
        return {f"charts/lesson/{name}": self.number[name] for name in self.changing()}

    def summary(self):
        """Return the current lessons in a few words."""
        return " ".join(f"{name} {self.current(name).name}" for name in self.changing())

    def state(self):
        return {
            "number": dict(self.number),
            "returns": list(self.returns),
            "before": sorted(self.before),
        }

    def restore(self, state, where):
        """Restore the lessons of a checkpoint, which may be of another machine."""
        state = state or self.state()  # a checkpoint of an earlier version has none
        problem = f"{where} is not a valid checkpoint: curriculum"
        try:
            number = {name: int(state["number"][name]) for name in self.lessons}
            returns = [float(x) for x in state["returns"]]
            before = {int(slot) for slot in state["before"]}
        except (KeyError, TypeError, ValueError):
            raise ValueError(problem) from None
        if not all(0 <= number[name] < len(self.lessons[name]) for name in number):
            raise ValueError(f"{problem} has a lesson that does not exist")
        if not np.isfinite(returns).all():
            raise ValueError(f"{problem} has a return that is not finite")
        self.number = number
        self.returns.extend(returns)
        self.before = before


def at_lesson(args, state, where):
    """Return the environment parameters to evaluate a checkpoint with: those of its lessons, replaced by those given.

    state, where: the content and the path of the checkpoint
    """
    curriculum = Curriculum(args.curriculum)
    curriculum.restore(state.get("curriculum"), where)
    for name in curriculum.changing():
        if name not in args.env_parameters:
            lesson = curriculum.current(name)
            value = value_text(lesson.value)
            print(f"{name} {value}: lesson {lesson.name} of the checkpoint", flush=True)
    return curriculum.values() | args.env_parameters
