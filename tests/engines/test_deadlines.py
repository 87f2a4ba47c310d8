"""Nothing is waited for without end: endless episodes, slots without agents, processes that are stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, call, train

import lbc_discrete as lbc
import ppo_continuous_multiagent as ppo
from envs.pixel_workers import WorkerHangs
from envs.pixels import PixelEnvs
from onefile_rl import actor_processes, evaluate
from onefile_rl.engines import waits
from onefile_rl.engines.process import Lines, write_line
from unity_vec_env import UnityVecEnv

LIMIT = 60  # seconds: far above what any of these tests takes


def read_until(process, pattern):
    """Read the output of a process up to a line with `pattern`, and return what was read."""
    read = ""
    for line in process.stdout:
        read += line
        if re.search(pattern, line):
            return read
    raise AssertionError(f"the output ended without {pattern}: {read}")


# Evaluation


class Slots:
    """Envs with one agent in each slot whose episodes have the length that `lengths` has: 0 for no agent."""

    single_action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, *lengths):
        self.lengths = np.array(lengths)
        self.num_envs = len(lengths)
        self.present = self.lengths > 0

    def reset(self, seed):
        self.t = 0
        return np.zeros((self.num_envs, 2)), {"ready": self.present, "closed": ~self.present}

    def step(self, actions):
        self.t += 1
        done = self.present & (self.t % np.maximum(self.lengths, 1) == 0)
        reward = self.present.astype(float)
        infos = {"ready": self.present, "closed": self.present}
        return np.zeros((self.num_envs, 2)), reward, done, np.zeros_like(done), infos


def act(obs, infos, slots, new_episode):
    return np.zeros((len(slots), 1))


def test_an_evaluation_does_not_wait_for_slots_without_an_agent():
    """The other slots play their episodes."""
    results, unfinished = evaluate.play_episodes(act, Slots(3, 0, 5, 0, 0), 10, seed=1)
    assert sorted(results[0]) == [3] * 5 + [5] * 5 and unfinished.size == 0


def test_an_evaluation_does_not_wait_for_episodes_that_never_end():
    envs = Slots(3, 10**9, 40)
    results, unfinished = evaluate.play_episodes(act, envs, 6, seed=1, patience=50)
    assert sorted(results[1]) == [3, 3, 40, 40], "a slot with long episodes is waited for"
    assert unfinished.tolist() == [[51], [51]], "the return and the length so far"
    results, unfinished = evaluate.play_episodes(act, Slots(10**9, 0), 2, seed=1, patience=2000)
    assert results.shape == (3, 0) and unfinished.tolist() == [[2001], [2001]]


def test_evaluation_of_a_scene_with_more_slots_than_agents():
    """The player of 3DBall has two agents, and there are places for four."""
    agent = ppo.Agent({"obs_dim": 8, "action_dim": 2, "low": -1.0, "high": 1.0}, ppo.Args())
    play = evaluate.play_vectors(agent, {}, 4)
    envs = UnityVecEnv("3DBall", seed=3, max_agents=4, player_args=["--agents", "2"])
    with closing(envs):
        results, unfinished = evaluate.play_episodes(play, envs, 8, 3)
    assert results.shape == (3, 8) and unfinished.size == 0


def test_the_result_says_how_many_episodes_have_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = dict(
        num_steps=16, num_minibatches=2, total_timesteps=32, exp_name="test", hidden_sizes=(4,)
    )
    folder = train(ppo, small, env_id="parity_env:Parity-v0")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="no episode ended: give a larger --eval-steps"):
        call(ppo, monkeypatch, "--evaluate", folder, "--eval-episodes", 3, "--eval-steps", 2)
    out = capsys.readouterr().out
    assert "0 episodes; 3 of 3 episodes are missing: 1 agents did not end an episode within" in out
    assert "--eval-steps 2 steps, with a return" in out


# Processes that are stopped


def test_a_line_has_a_deadline_even_in_its_middle():
    code = "import sys, time; sys.stdout.write('one\\ntw'); sys.stdout.flush(); time.sleep(600)"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        lines = Lines(process.stdout)
        assert lines.read(LIMIT) == b"one"
        with pytest.raises(TimeoutError):
            lines.read(0.1)
        with pytest.raises(TimeoutError):
            write_line(process.stdin, bytes(1 << 20), 0.1)
        process.kill()
        assert lines.read(LIMIT) is None


def test_a_stopped_pixel_worker_is_named(tmp_path):
    envs = PixelEnvs("parity_env:ParityPixels-v0", 2, 2, timeout=20)
    with closing(envs):
        envs.reset(1)
        os.kill(envs.workers[1].process.pid, signal.SIGSTOP)
        for worker in envs.workers:
            worker.timeout = 0.5
        started = time.monotonic()
        with pytest.raises(WorkerHangs, match="the worker of envs 1 to 1 has not answered for 0.5"):
            envs.step(
                np.zeros((2, *envs.single_action_space.shape), envs.single_action_space.dtype)
            )
    assert time.monotonic() - started < 4, "it is not given time to end by itself"


ACTORS = dict(
    env_id="CartPole-v1", sequence_length=4, hidden_sizes=(8,), batch_size=8, replay_size=16,
    num_updates=1, eval_interval=0, compile=False, exp_name="test", num_actors=2, num_envs=1,
)  # fmt: skip


def test_a_stopped_actor_is_started_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stopped = []
    receive = actor_processes.ActorProcesses.receive

    def receive_and_stop(self):
        received = receive(self)
        if not stopped:
            stopped.append(self.processes[0][0].pid)
            os.kill(stopped[0], signal.SIGSTOP)
            while not self.restarts:
                self.last_times[0] -= self.hang_seconds  # as if so much time had passed
                received += receive(self)
        return received

    monkeypatch.setattr(actor_processes.ActorProcesses, "receive", receive_and_stop)
    lbc.train(lbc.Args(**ACTORS, total_timesteps=200))
    assert "Actor 0 has sent nothing for 300 s and is started again" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(stopped[0], 0)


# Ctrl-C


def test_only_a_wait_that_lasts_is_ended_by_a_stop(monkeypatch):
    monkeypatch.setattr(waits, "stop_times", [])
    now = time.monotonic()
    waits.check_stop(now - 100)
    waits.note_stop()
    waits.check_stop(now - 100)  # the stop has just been requested
    waits.stop_times[0] -= 100
    waits.check_stop(time.monotonic())  # the wait has just begun
    with pytest.raises(KeyboardInterrupt):
        waits.check_stop(now - 100)


def stop_all(pid):
    """Stop the descendants of a process that this test has started."""
    from onefile_rl.engines.process import process_tree

    children = process_tree(pid) - {pid}
    assert children
    for child in children:
        os.kill(child, signal.SIGSTOP)


def wait_until_idle(pid):
    """Wait until a process computes nothing any more, because it waits for something."""

    def ticks():  # of CPU time
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = -1000
    while (now := ticks()) > before + 5:
        before = now
        time.sleep(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "line",
    [
        "ppo_continuous_multiagent.py --env-id 3DBall --num-players 1",
        "ppo_continuous_multiagent.py --env-id 3DBall --num-players 2",
        "lbc_discrete.py --env-id CartPole-v1 --num-actors 2 --num-envs 1",
        "ppo_pixel.py --env-id parity_env:ParityPixels-v0 --num-envs 2 --num-workers 2",
    ],
)
def test_the_first_ctrl_c_ends_a_wait_and_saves_a_checkpoint(line, tmp_path):
    script, *options = line.split()
    options += ["--total-timesteps", "100000000", "--no-compile"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.Popen(
        [sys.executable, str(ROOT / script), *options],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        read_until(run, r" [1-9][\d,]* steps ")
        stop_all(run.pid)
        wait_until_idle(run.pid)  # without this, it might have all it needs to end the iteration
        started = time.monotonic()
        run.send_signal(signal.SIGINT)
        out = run.communicate(timeout=LIMIT)[0]
        assert time.monotonic() - started < 40  # a second, and the time to end on a busy machine
        assert re.search(r"Stopped after [\d,]+ decisions. Resume with", out), out
        assert "Traceback" not in out and run.returncode == 130
        assert list(tmp_path.glob("runs/*/checkpoint.pt"))
    finally:
        run.kill()
        run.wait()
