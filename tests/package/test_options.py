"""Options: no value ends in a traceback, --fast and --compile fit together, and Enum fields are stored and restored."""

import ast
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from pathlib import Path

import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT, call

import crossq_continuous as crossq
import lbc_discrete as lbc
import ppo_continuous_multiagent as ppo
import ppo_discrete_multiagent as discrete
import ppo_hybrid_multiagent as hybrid
import ppo_pixel as pixel
import sac_continuous as sac
from onefile_rl import arguments, fast, runs, trust
from onefile_rl.arguments import from_plain, to_plain

VECTORS = "--env-id parity_env:Parity-v0 --hidden-sizes 4"
IMAGES = "--env-id parity_env:ParityPixels-v0 --num-envs 1 --features 4"
SMALL = {
    ppo: f"{VECTORS} --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 16",
    discrete: "--env-id parity_env:Branches-v0 --hidden-sizes 4 --num-steps 8 --num-minibatches 2 --total-timesteps 16",
    hybrid: "--env-id parity_env:Hybrid-v0 --hidden-sizes 4 --num-steps 8 --num-minibatches 2 --total-timesteps 16",
    sac: f"{VECTORS} --buffer-size 64 --learning-starts 4 --batch-size 4 --total-timesteps 8",
    crossq: f"{VECTORS} --buffer-size 64 --learning-starts 4 --batch-size 4 --total-timesteps 8",
    lbc: "--env-id parity_env:Branches-v0 --hidden-sizes 4 --num-envs 1 --sequence-length 2 --batch-size 2 "
    "--replay-size 2 --total-timesteps 4",
    pixel: f"{IMAGES} --num-steps 4 --num-minibatches 2 --update-epochs 1 --total-timesteps 4",
}
NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1",
    "1e308",
    "-1e308",
    "1e-308",
    "2147483648",
    "9" * 20,
    "nonsense",
    "",
)
STRINGS = (
    "",
    "..",
    "../../x",
    "nonsense",
    "-1",
    "\U0001f916",
    "a b",
    "{",
    "[1]",
    "null",
    "x=",
    "x=nan",
    "=1",
    "x=1=2",
)
REASONS = (
    "is not a number",
    "checkpoint",
    "memory",
    "--num-minibatches",
    "allocate",
    "no player found",
    "no game found",
)
ENDLESS = {("total_timesteps", "2147483648")}  # valid, but takes too long

pytestmark = pytest.mark.usefixtures("empty_folder")


# Every option with every kind of value


def names_of(script):
    """Return the script's options; for three scripts only their own, because four others test the common ones."""
    common = (
        {field.name for field in fields(runs.Args)} if script in (lbc, crossq, hybrid) else set()
    )
    return [field.name for field in fields(script.Args) if field.name not in common | {"compile"}]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of an enormous logstd_init
@pytest.mark.parametrize(
    ("script", "name"),
    [(script, name) for script in SMALL for name in names_of(script)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_no_value_of_an_option_ends_in_a_traceback(script, name, monkeypatch, capsys):
    """Every value works, or is refused in one line that names the option."""
    kind = str(next(field.type for field in fields(script.Args) if field.name == name))
    values = [()] if "bool" in kind else NUMBERS if "int" in kind or "float" in kind else STRINGS
    for value in values:
        if (name, value) in ENDLESS:
            continue
        option = "--" + name.replace("_", "-")
        line = [*SMALL[script].split(), "--exp-name", f"x{values.index(value)}"]
        line += [option] if value == () else [f"{option}={value}"]
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *line])
        try:
            script.main()
        except SystemExit as end:
            if isinstance(end.code, str):
                assert len(end.code.strip().splitlines()) == 1, end.code
                assert any(word in end.code for word in (option, *REASONS)), end.code
            else:  # the parser has printed the error
                assert option in capsys.readouterr().err


def test_every_common_option_has_a_help_text():
    """The string below a field: one line, a phrase in lower case, not the same for two options."""
    tree = ast.parse(Path(arguments.__file__).read_text())
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    texts = {}
    for statement, following in itertools.pairwise(args.body):
        if isinstance(statement, ast.AnnAssign):
            texts[statement.target.id] = following.value.value
    assert list(texts) == [field.name for field in fields(arguments.Args)]
    for name, text in texts.items():
        assert (
            text[0].islower()
            and not text.endswith(".")
            and "\n" not in text
            and len(text.split()) > 3
        ), name
    assert len(set(texts.values())) == len(texts)


# --fast and --compile


def parsed(monkeypatch, *line):
    """Return the arguments that ppo.train would get."""
    seen = []
    monkeypatch.setattr(ppo, "train", lambda args, resumed=None: seen.append(args))
    call(ppo, monkeypatch, *line)
    return seen[0]


def trained(monkeypatch, *line):
    call(ppo, monkeypatch, *SMALL[ppo].split(), *line)
    (folder,) = Path("runs").iterdir()
    return folder


def set_saved(folder, **args):
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["args"] |= args
    torch.save(state | {"seal": trust.seal(state)}, path)


def test_fast_is_the_default_and_no_fast_turns_it_off(monkeypatch):
    assert parsed(monkeypatch, *SMALL[ppo].split()).fast is True
    assert parsed(monkeypatch, *SMALL[ppo].split(), "--no-fast").fast is False


def test_compile_and_no_fast_are_refused_in_one_line(monkeypatch):
    with pytest.raises(
        SystemExit, match="--compile and --no-fast: give only one of them"
    ) as caught:
        call(ppo, monkeypatch, *SMALL[ppo].split(), "--no-fast", "--compile")
    assert len(str(caught.value).strip().splitlines()) == 1 and not Path("runs").exists()


def test_a_compiled_run_can_be_resumed_with_no_fast(monkeypatch):
    """The run has decided to compile; --no-fast on the command line overrides this decision."""
    folder = trained(monkeypatch)
    set_saved(folder, compile=True)
    args = parsed(monkeypatch, "--resume", folder, "--no-fast", "--total-timesteps", 32)
    assert (args.fast, args.compile) == (False, False)
    with pytest.raises(SystemExit, match="--compile and --no-fast"):
        call(
            ppo, monkeypatch, "--resume", folder, "--no-fast", "--compile", "--total-timesteps", 32
        )


def test_a_run_without_fast_can_be_resumed_with_fast(monkeypatch):
    folder = trained(monkeypatch, "--no-fast")
    assert parsed(monkeypatch, "--resume", folder, "--total-timesteps", 32).fast is False
    assert parsed(monkeypatch, "--resume", folder, "--fast", "--total-timesteps", 32).fast is True
    with pytest.raises(
        SystemExit, match="add --fast to resume a run that was started with --no-fast"
    ):
        call(ppo, monkeypatch, "--resume", folder, "--compile", "--total-timesteps", 32)


def test_a_compiled_run_can_be_evaluated_without_a_compiler(monkeypatch, capsys):
    folder = trained(monkeypatch)
    set_saved(folder, compile=True)
    monkeypatch.setattr(fast, "compiler", lambda: None)
    for option in ([], ["--no-fast"]):
        call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", 1, "--trust", *option)
    assert capsys.readouterr().out.count("after 16 decisions, 1 episodes") == 2


# Enum fields


class Kind(Enum):
    FIRST = 1
    SECOND = 2


class Word(StrEnum):
    LEFT = "l"
    RIGHT = "r"


@dataclass
class EnumArgs(runs.Args):
    kind: Kind = Kind.FIRST
    word: Word = Word.LEFT
    optional: Kind | None = None
    kinds: tuple[Kind, ...] = (Kind.FIRST,)
    mixed: tuple[int, Kind] = (1, Kind.FIRST)
    by_name: dict[str, Kind] = field(default_factory=dict)
    text: str = "FIRST"


ENUM_ARGS = EnumArgs(
    kind=Kind.SECOND,
    word=Word.RIGHT,
    optional=Kind.FIRST,
    kinds=(Kind.SECOND, Kind.FIRST),
    mixed=(3, Kind.SECOND),
    by_name={"FIRST": Kind.SECOND},
    env_kwargs={"a": [1, {"b": None}]},
)


def test_plain_arguments_are_stored_in_checkpoints_and_json():
    plain = to_plain(ENUM_ARGS)
    assert (plain["kind"], plain["word"], plain["kinds"]) == (
        "SECOND",
        "RIGHT",
        ("SECOND", "FIRST"),
    )
    assert type(plain["word"]) is str
    assert json.loads(json.dumps(plain))["by_name"] == {"FIRST": "SECOND"}
    torch.save(plain, "plain.pt")
    assert torch.load("plain.pt", weights_only=True) == plain


def test_arguments_are_restored_from_plain_types():
    for args in (
        EnumArgs(),
        ENUM_ARGS,
        ppo.Args(hidden_sizes=(3, 4), env_parameters={"mass": 2.0}),
    ):
        restored = from_plain(type(args), to_plain(args))
        assert restored == args
        assert [type(value) for value in vars(restored).values()] == [
            type(value) for value in vars(args).values()
        ]


def test_an_enum_member_that_is_gone_is_one_line():
    with pytest.raises(
        ValueError,
        match="--kind THIRD: the checkpoint has this value, the script has FIRST, SECOND",
    ):
        from_plain(EnumArgs, to_plain(ENUM_ARGS) | {"kind": "THIRD"})


@pytest.mark.parametrize("value", [Path("x"), {Kind.FIRST: 1}, {1, 2}, (torch.zeros(1),)], ids=str)
def test_a_value_that_a_checkpoint_cannot_store_is_one_line(value):
    with pytest.raises(ValueError, match="--text .*: a checkpoint cannot store a") as caught:
        to_plain(EnumArgs(text=value))
    assert len(str(caught.value).splitlines()) == 1


def test_a_copied_script_can_have_an_enum_field(monkeypatch):
    """It works on the command line, in --help, in config.json, in the checkpoint, and in --resume and --evaluate."""
    source = (ROOT / "ppo_continuous_multiagent.py").read_text()
    head = "@dataclass\nclass Args(runs.Args):\n"
    assert source.count(head) == 1
    kind = "from enum import Enum\n\n\nclass Kind(Enum):\n    FIRST = 1\n    SECOND = 2\n\n\n"
    Path("my_ppo.py").write_text(
        source.replace(
            head, f'{kind}{head}    kind: Kind = Kind.FIRST\n    """the kind of experiment"""\n'
        )
    )
    spec = importlib.util.spec_from_file_location("my_ppo", Path("my_ppo.py").resolve())
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_ppo", script)
    spec.loader.exec_module(script)

    call(script, monkeypatch, *SMALL[ppo].split(), "--kind", "SECOND")
    (folder,) = Path("runs").iterdir()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["args"]["kind"] == "SECOND"
    assert json.loads((folder / "config.json").read_text())["args"]["kind"] == "SECOND"
    call(script, monkeypatch, "--evaluate", folder, "--eval-episodes", 1)
    call(script, monkeypatch, "--resume", folder, "--total-timesteps", 32)
    with pytest.raises(SystemExit, match=r"--kind \S*FIRST: the run has --kind \S*SECOND"):
        call(script, monkeypatch, "--resume", folder, "--total-timesteps", 48, "--kind", "FIRST")

    command = [sys.executable, "my_ppo.py", "--resume", str(folder), "--help"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "--kind {FIRST,SECOND}" in out.stdout and "(default: SECOND)" in out.stdout, out.stderr
