"""benchmarks/torture.py with real runs, and with a script that loses decisions and leaves things over."""

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
FULL_AT_END = ["full disk at the end", "full disk, room at the end"]
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small disk"
)


def torture(*args):
    """With no minutes, each run goes through its first incidents and no others, however fast the machine is."""
    command = [sys.executable, ROOT / "benchmarks" / "torture.py", "--minutes", "0", *args]
    out = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=400)
    return out.returncode, out.stdout + out.stderr


def imported(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "engines"))
    return importlib.import_module("torture")


def doctored(tmp_path, code):
    """Return a copy of the script with more code before its start."""
    script = ROOT / "ppo_continuous_multiagent.py"
    start = '\nif __name__ == "__main__":'
    text = script.read_text()
    assert text.count(start) == 1
    (tmp_path / script.name).write_text(text.replace(start, f"\n{code}\n{start}"))
    return tmp_path / script.name


def events(out):
    """Return the numbers of the table by incident: events, survived, lost, left over, skipped."""
    rows = re.findall(r"^(.+?) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", out, re.MULTILINE)
    return {name: [*map(int, numbers)] for name, *numbers in rows}


def test_nothing_is_lost_or_left_over():
    code, out = torture("--runs", "gym", "veteran", "--only", "kill -9", "SIGTERM", "player killed")
    assert code == 0 and "Lost: nothing" in out and "Left over: nothing" in out, out
    assert events(out) == {
        "SIGTERM": [2, 2, 0, 0, 0],
        "kill -9": [1, 1, 0, 0, 0],
        "player killed": [2, 2, 0, 0, 0],
    }


def test_losses_and_leftovers_are_reported(tmp_path):
    """With a copy that does not save at an orderly end, and leaves a process and a file over."""
    script = doctored(
        tmp_path,
        """
import subprocess, tempfile
exit = runs.Run.__exit__

def forget(self, *error):
    subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tempfile.mkstemp()
    self.snapshot = None
    exit(self, *error)

runs.Run.__exit__ = forget
end_iteration = runs.Run.end_iteration
runs.Run.end_iteration = lambda self: None if self.stop else end_iteration(self)
""",
    )
    code, out = torture("--script", script, "--runs", "gym", "--only", "SIGTERM")
    assert code == 1 and events(out) == {"SIGTERM": [1, 0, 1, 1, 0]}, out
    assert re.search(r"gym, SIGTERM: \d+ decisions: \d+ made, \d+ kept", out), out
    assert (
        re.search(r"gym, SIGTERM: process \d+, sleep 300", out)
        and "gym, SIGTERM: temporary file tmp" in out
    ), out


@needs_root
def test_a_full_disk_at_the_end_loses_nothing_that_was_reported_as_saved():
    code, out = torture("--runs", "gym", "--only", *FULL_AT_END)
    assert code == 0 and "Lost: nothing" in out and "Left over: nothing" in out, out
    assert events(out) == {name: [1, 1, 0, 0, 0] for name in FULL_AT_END}


LIES = {
    "nothing was lost": (
        "runs.Run.save_at_the_end = lambda self: None",
        r"reports \d+ decisions with exit code 0, the checkpoint has \d+ of \d+",
    ),
    "more was saved": (
        """
failure = runs.Run.failure

def boast(self):
    self.checkpoint_step += 1
    return failure(self)

runs.Run.failure = boast
""",
        r"the checkpoint has \d+ of \d+ decisions, and with exit code 1 it reports: .*checkpoint.pt has",
    ),
}


@needs_root
@pytest.mark.parametrize("lie", LIES)
def test_a_run_that_lies_about_what_it_saved_is_reported(lie, tmp_path):
    code, found = LIES[lie]
    script = doctored(tmp_path, code)
    code, out = torture("--script", script, "--runs", "gym", "--only", FULL_AT_END[0])
    assert code == 1 and events(out) == {FULL_AT_END[0]: [1, 0, 1, 0, 0]}, out
    assert re.search(found, out), out


def assert_survived(out, code, incident):
    """A fast machine may have time for more than one such incident."""
    assert code == 0 and "Lost: nothing" in out and "Left over: nothing" in out, out
    number, survived, lost, left_over, skipped = events(out)[incident]
    assert number == survived > 0 and lost == left_over == skipped == 0, out


@pytest.mark.slow
@pytest.mark.parametrize(("run", "what"), [("pixel", "worker"), ("actors", "actor")])
def test_a_stopped_process_is_noticed(run, what):
    code, out = torture("--runs", run, "--only", f"{what} stopped")
    assert_survived(out, code, f"{what} stopped")


@pytest.mark.slow
def test_two_torchrun_jobs_in_one_folder_resume_their_own_runs():
    code, out = torture("--runs", "torchrun", "--only", "ranks of two jobs killed")
    assert_survived(out, code, "ranks of two jobs killed")


def test_a_job_that_resumes_another_run_is_reported(monkeypatch, tmp_path):
    tool = imported(monkeypatch)
    lost = []
    left = []
    job = SimpleNamespace(ranks_before={}, ranks=dict, step=512, report_lost=lost.append)
    job.trainer = SimpleNamespace(is_alive=lambda: True)
    job.starts = lambda: ["runs/a", "runs/b"]
    job.wait = lambda done, seconds: done()
    job.check_checkpoint = job.note_writer = lambda: None
    tool.Job.expect_restart(job)
    assert lost == ["the job of runs/a was restarted with ['runs/b']"]

    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.json").touch()
    jobs = SimpleNamespace(report_lost=lost.append, report_left=left.append)
    tool.Jobs.check_folder(jobs, tmp_path)
    assert lost[1:] == ["two jobs have made 1 runs"] and left == ["a job's note logs/run.json"]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [pytest.param("unity", "bits flipped", marks=pytest.mark.slow), ("godot", "wrong numbers")],
)
def test_damaged_messages_end_a_run_with_one_line_or_restart_the_player(engine, kind):
    code, out = torture("--runs", f"{engine} messages", "--only", kind, "--damaged-runs", "4")
    assert_survived(out, code, kind)


def test_a_traceback_of_a_damaged_message_is_reported(monkeypatch, tmp_path):
    tool = imported(monkeypatch)
    lost = []
    run = SimpleNamespace(report_lost=lost.append, incident="bits flipped")
    output = tmp_path / "output.txt"
    for text, code, is_right in [
        ("runs/x\n\nplayer 0 was disconnected\n", 1, True),
        ("runs/x\n\nplayer 0 was disconnected\nand more\n", 1, False),
        ("Traceback (most recent call last):\n\nKeyError: 5\n", 1, False),
        ("runs/x\n", "hangs", False),
        ("runs/x\n", -11, False),
        ("Saved runs/x\n", 0, True),
    ]:
        output.write_text(text)
        lost.clear()
        tool.Messages.check_run(run, tmp_path, code)
        assert len(lost) == (not is_right), text


def test_every_kind_of_damage_changes_messages(monkeypatch, tmp_path):
    """Of both engines; with the same seed the changes are the same."""
    imported(monkeypatch)
    import mutations
    from test_hostile import RECORDED

    text = b'{"type": "step", "reward": [0.5, 1]}'
    messages = {"unity": RECORDED[:400], "godot": len(text).to_bytes(4, "little") + text}
    monkeypatch.setattr(mutations, "SHARE", 1.0)
    for engine, message in messages.items():
        for kind in mutations.KINDS:
            if (engine, kind) == ("unity", "wrong numbers"):  # it changes messages, not bytes
                continue
            sent = []
            for attempt in range(2):
                damage = mutations.Damage(engine, kind, 7, tmp_path / f"{engine}{kind}{attempt}")
                sent.append([damage.apply(message) for _ in range(10)])
            assert sent[0] == sent[1] and any(x != message for x in sent[0]), kind


def test_wrong_numbers_of_unity_are_in_the_message(monkeypatch, tmp_path):
    imported(monkeypatch)
    import mutations
    from test_hostile import NAME, request, rl_message

    monkeypatch.setattr(mutations, "SHARE", 1.0)
    damage = mutations.Damage("unity", "wrong numbers", 7, tmp_path / "log")
    right = rl_message(request(0, 1), {NAME: (2, ())})
    different = 0
    for _ in range(20):
        message = rl_message(request(0, 1), {NAME: (2, ())})
        damage.change_fields(message)
        different += message.SerializeToString() != right.SerializeToString()
    assert different > 10


def test_the_same_seed_gives_the_same_incidents(monkeypatch):
    import itertools
    import random

    tool = imported(monkeypatch)
    first, again, other = (
        [*itertools.islice(tool.plan(random.Random(seed), tool.INCIDENTS), 50)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {(name, incident[0]) for name, visit in first for incident in visit} == {
        (name, what) for name, incidents in tool.INCIDENTS.items() for what in incidents
    }
