"""What `requirements.txt` promises holds in the environment that runs the tests."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

PINS = dict(re.findall(r"^([\w-]+)(?:\[[\w,]+\])?==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))


def test_every_requirement_is_pinned_exactly_and_installed():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(PINS)
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in PINS}
    assert installed == PINS


def test_no_gym():
    assert not {"gym", "mlagents-gym"} & {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}


def test_packages_do_not_fight():
    out = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout


def test_tensorboard_command_works():
    out = subprocess.run([Path(sys.executable).parent / "tensorboard", "--version"], capture_output=True, text=True)
    assert out.returncode == 0 and PINS["tensorboard"] in out.stdout, out.stderr
