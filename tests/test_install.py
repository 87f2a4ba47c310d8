"""The environment that runs the tests is the one that requirements.txt describes, and copied scripts run in it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PINS = dict(
    re.findall(
        r"^([\w-]+)(?:\[[\w,]+\])?==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE
    )
)


def test_every_requirement_is_pinned_exactly_and_installed():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert requirements.pop() == "-e ."
    assert len(requirements) == len(PINS)
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in PINS}
    assert installed == PINS


def test_gym_is_not_installed():
    assert not {"gym", "mlagents-gym"} & {
        dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()
    }


def test_the_installed_packages_are_compatible():
    out = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout


def test_tensorboard_command_works():
    out = subprocess.run(
        [Path(sys.executable).parent / "tensorboard", "--version"], capture_output=True, text=True
    )
    assert out.returncode == 0 and PINS["tensorboard"] in out.stdout, out.stderr


def test_a_script_copied_to_another_folder_runs_there(tmp_path):
    """Without PYTHONPATH, because `pip install -r requirements.txt` installs the checkout as an editable package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = lambda *command: subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    installed = run("-c", "import onefile_rl; print(onefile_rl.__file__)").stdout.strip()
    if installed != str(ROOT / "onefile_rl" / "__init__.py"):
        pytest.skip("onefile_rl is not installed from this checkout: pip install -e .")

    shutil.copy(ROOT / "ppo_continuous_multiagent.py", tmp_path / "my_ppo.py")
    out = run("my_ppo.py", "--env-id", "Reacher3Dof-v0", "--total-timesteps", "4096")
    assert out.returncode == 0, out.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert "__my_ppo__" in folder.name
    assert (folder / "checkpoint.pt").exists() and (folder / "my_ppo.py").exists()
