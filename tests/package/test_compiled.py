"""A compiled update is called without the wrapper of torch.compile, and still makes the checks of torch."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from conftest import ROOT, needs_compiler

from onefile_rl import fast
from onefile_rl.fast import cache

WAYS = ["halve"]  # read by the update


@dataclass
class Args:
    rate: float = 0.5
    device: str = "cpu"


def update(agent, optimizer, x, args):
    """Make a step, and return nothing."""
    optimizer.zero_grad()
    loss = args.rate * agent(x).pow(2).mean()
    if "halve" in WAYS:
        loss = loss / 2
    loss.backward()
    optimizer.step()


def make():
    torch.manual_seed(0)
    agent = nn.Linear(3, 2)
    return agent, fast.Adam(agent.parameters(), lr=0.1), torch.randn(5, 3), Args()


def fail(*inputs):
    raise AssertionError("torch's wrapper was called")


@needs_compiler
def test_a_compiled_update_skips_the_wrapper_of_torch_and_makes_its_checks(monkeypatch):
    inputs = make()
    expected = make()
    compiled = fast.CompiledUpdate(update, inputs[-1], insist=True)
    compiled(*inputs)
    update(*expected)

    # Later calls do not need the wrapper, and make one step each although the update returns nothing
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "compiled", fail)
        for rate in (0.5, 2.0):
            inputs[-1].rate = rate
            expected[-1].rate = rate
            compiled(*inputs)
            update(*expected)
    torch.testing.assert_close(inputs[0].weight, expected[0].weight)

    # A value that was compiled in has changed
    monkeypatch.setattr("test_compiled.WAYS", [])
    with pytest.raises(ValueError, match=r"compiled into the update and different now: .*WAYS"):
        compiled(*inputs)
    torch.testing.assert_close(inputs[0].weight, expected[0].weight)


@needs_compiler
def test_an_update_that_torch_has_forgotten_is_compiled_again():
    inputs = make()
    expected = make()
    compiled = fast.CompiledUpdate(update, inputs[-1], insist=True)
    compiled(*inputs)
    update(*expected)
    graph_inputs = compiled.to_graph_inputs(inputs)
    assert compiled.shortcut.accepts(*graph_inputs)
    torch._dynamo.reset()
    assert not compiled.shortcut.accepts(*graph_inputs)
    compiled(*inputs)
    update(*expected)
    torch.testing.assert_close(inputs[0].weight, expected[0].weight)


@needs_compiler
@pytest.mark.skipif(
    sys.platform != "linux", reason="libraries of other systems have another format"
)
def test_a_library_that_was_cut_off_is_compiled_again(tmp_path):
    """As after `kill -9` of a compiler, or while another process still writes the file."""
    code = (
        "from test_compiled import *; fast.CompiledUpdate(update, make()[-1], insist=True)(*make())"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(ROOT)]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(folders),
    }

    def compile_it():
        out = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert out.returncode == 0, out.stderr

    compile_it()
    libraries = list(tmp_path.rglob("*.so"))
    assert libraries
    for i, library in enumerate(libraries):
        os.truncate(library, [0, 5000][i % 2])
        os.utime(library, (0, 0))
    compile_it()
    assert not any(cache.is_truncated(path) for path in tmp_path.rglob("*.so"))


def test_a_truncated_library_with_a_time_in_the_future_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "WRITING_SECONDS", 0.1)
    library = tmp_path / "a.so"
    library.write_bytes(b"")
    os.utime(library, (2**33, 2**33))
    assert cache.repair() and not library.exists()
    assert not cache.repair()
