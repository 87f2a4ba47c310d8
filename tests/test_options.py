"""No value of any option ends in a traceback: it works, or is refused in one line that names it."""

import sys
from dataclasses import fields

import parity_env  # noqa: F401
import pytest

import lbc_discrete as lbc
import ppo_continuous_multiagent as ppo
import ppo_discrete_multiagent as discrete
import ppo_pixel as pixel
import runs
import sac_continuous as sac

VECTORS = "--env-id parity_env:Parity-v0 --hidden-sizes 4"
IMAGES = "--env-id parity_env:ParityPixels-v0 --num-envs 1 --features 4"
SMALL = {
    ppo: f"{VECTORS} --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 16",
    discrete: "--env-id parity_env:Branches-v0 --hidden-sizes 4 --num-steps 8 --num-minibatches 2 --total-timesteps 16",
    sac: f"{VECTORS} --buffer-size 64 --learning-starts 4 --batch-size 4 --total-timesteps 8",
    lbc: "--env-id parity_env:Branches-v0 --hidden-sizes 4 --num-envs 1 --sequence-length 2 --batch-size 2 "
    "--replay-size 2 --total-timesteps 4",
    pixel: f"{IMAGES} --num-steps 4 --num-minibatches 2 --update-epochs 1 --total-timesteps 4",
}
NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1", "1e308", "-1e308", "1e-308", "2147483648", "9" * 20, "nonsense", "")
WORDS = ("", "..", "../../x", "nonsense", "-1", "\U0001f916", "a b", "{", "[1]", "null", "x=", "x=nan", "=1", "x=1=2")
REASONS = (
    "is not a number",
    "checkpoint",
    "memory",
    "--num-minibatches",
    "allocate",
    "no player there",
    "no game there",
)
ENDLESS = {("total_timesteps", "2147483648")}  # it works, and takes a while


def names_of(script):
    """All options; of lbc_discrete.py its own, the others are tested four times already."""
    common = {field.name for field in fields(runs.Args)} if script is lbc else set()
    return [field.name for field in fields(script.Args) if field.name not in common | {"compile"}]


pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("script", "name"),
    [(script, name) for script in SMALL for name in names_of(script)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_no_value_of_an_option_ends_in_a_traceback(script, name, monkeypatch, capsys):
    kind = str(next(field.type for field in fields(script.Args) if field.name == name))
    values = [()] if "bool" in kind else NUMBERS if "int" in kind or "float" in kind else WORDS
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
            if isinstance(end.code, str):  # otherwise the parser's own, which says what it expects
                assert len(end.code.strip().splitlines()) == 1, end.code
                assert any(word in end.code for word in (option, *REASONS)), end.code
            else:
                assert option in capsys.readouterr().err
