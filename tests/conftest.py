"""What the tests share: the checkout on the path, and a player that says what a test tells it to."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unity_vec_env import UnityVecEnv  # noqa: E402
from unity_player import UnityMessageProto, Wire  # noqa: E402

there = sys.platform != "linux" or (find_library("EGL") and find_library("GL"))
needs_gl = pytest.mark.skipif(not there, reason="no OpenGL here, on Debian and Ubuntu: apt-get install libegl1 libgl1")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def agent(number, obs, reward=0.0, done=False, interrupted=False, mask=(), group_reward=0.0, name="Body"):
    """An AgentInfoProto as keyword arguments. `obs` is a list of arrays, one per sensor."""
    sensors = [dict(shape=np.shape(o), float_data=dict(data=np.ravel(o).tolist()), name=f"{name}{i}") for i, o in enumerate(obs)]
    return dict(id=number, reward=reward, done=done, max_step_reached=interrupted, observations=sensors, action_mask=mask, group_reward=group_reward)


class ScriptedPlayer:
    """Connects like a player and sends each message of the script: a dict from behavior to a list of agents.

    `replies` holds, for each message, the answer's rl_input. After the script it quits.
    """

    def __init__(self, script, specs=None, version="1.5.0", side_channel=b""):
        self.script, self.specs, self.version, self.side_channel = script, specs or {"Scripted?team=0": (2, ())}, version, side_channel
        self.port, self.replies, self.peers = free_port(), [], []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while True:
            try:
                wire = Wire.connect(self.port)
                break
            except ConnectionRefusedError:
                time.sleep(0.005)
        try:
            hello = UnityMessageProto()
            hello.unity_output.rl_initialization_output.communication_version = self.version
            hello.unity_output.rl_initialization_output.capabilities.hybridActions = True
            self.greeting = self.call(wire, hello).rl_initialization_input
            self.first = self.call(wire, UnityMessageProto()).rl_input
            sent = set()
            for behaviors in self.script:
                message = UnityMessageProto()
                message.unity_output.rl_output.side_channel, self.side_channel = self.side_channel, b""
                for name, agents in behaviors.items():
                    if agents and name not in sent:
                        sent.add(name)
                        continuous, branches = self.specs[name]
                        brain = message.unity_output.rl_initialization_output.brain_parameters.add(brain_name=name)
                        brain.action_spec.num_continuous_actions, brain.action_spec.num_discrete_actions = continuous, len(branches)
                        brain.action_spec.discrete_branch_sizes.extend(branches)
                    for info in agents:
                        message.unity_output.rl_output.agentInfos[name].value.add(**info)
                self.replies.append(self.call(wire, message).rl_input)
            bye = UnityMessageProto()
            bye.header.status = 400
            wire.send(bye)
        except ConnectionError:
            pass
        finally:
            wire.close()

    def call(self, wire, message):
        message.header.status = 200
        wire.send(message)
        reply = wire.receive(10)
        if reply.header.status != 200:
            raise ConnectionError
        return reply.unity_input


@pytest.fixture
def scripted():
    """Makes an env of a script; env and player are closed after the test."""
    opened = []

    def make(script, max_agents=None, behavior=None, timeout=5, **kwargs):
        player = ScriptedPlayer(script, **kwargs)
        envs = UnityVecEnv("editor", base_port=player.port, max_agents=max_agents, behavior=behavior, timeout=timeout)
        opened.append((envs, player))
        return envs, player

    yield make
    for envs, player in opened:
        envs.close()
        player.thread.join(5)


# Runs of a script


@pytest.fixture
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def train(script, small, resumed=None, **kwargs):
    """Train and return the run's folder."""
    before = set(Path("runs").glob("*"))
    script.train(script.Args(**{**small, "exp_name": f"run{len(before)}", **kwargs}), resumed)
    return next(iter(set(Path("runs").glob("*")) - before), None) or resumed[0].parent


def call(script, monkeypatch, *line):
    """The script's command line."""
    if "--resume" in line:
        time.sleep(1.1)  # TensorBoard takes event files in the order of their names, which have the second in them
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, line)])
    script.main()


def assert_refused(script, line, match, folder):
    """One line that says what is wrong, before any work starts."""
    out = subprocess.run(
        [sys.executable, script.__file__, *line.split()], cwd=folder, capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": str(ROOT / "tests")}, timeout=120
    )  # fmt: skip
    assert out.returncode == 1 and match in out.stderr and len(out.stderr.strip().splitlines()) == 1, out.stderr
    assert not (folder / "runs").exists()


def stop_after(monkeypatch, where, name, times):
    """SIGTERM when a function is called for the so-manieth time."""
    function, calls = getattr(where, name), []

    def counted(*args):
        calls.append(None)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args)

    monkeypatch.setattr(where, name, counted)


def curve(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if not tag.startswith("time/") and "SPS" not in tag}


def watch(script, monkeypatch, crash_at=None):
    """A list that fills with what the script's Unity players are asked and answer; before one of its steps the first player is killed."""
    make_envs, record = script.make_envs, []

    def watched(*args):
        envs, how = make_envs(*args)
        reset, step_async, step_wait = envs.reset, envs.step_async, envs.step_wait

        def asked(actions):
            if len(record) == crash_at:
                envs.players[0].process.kill()
            record.append([actions.copy()])
            step_async(actions)

        def answered():
            record[-1].append(step_wait())
            return record[-1][1]

        def begun(**kwargs):
            record.append(reset(**kwargs))
            return record[-1]

        envs.reset, envs.step_async, envs.step_wait = begun, asked, answered
        return envs, how

    monkeypatch.setattr(script, "make_envs", watched)
    return record


def trajectories(record):
    """What each agent saw, did and got, from a watched run: a list for each episode of (obs, action, reward, next obs, terminated).

    What is open at the end is not in them. An episode that a crash cut has what was closed before.
    """
    (obs, infos), done, running, pending = record[0], [], {}, {}
    for actions, (after, reward, terminated, truncated, following) in record[1:]:
        pending |= {slot: (obs[slot], actions[slot]) for slot in np.flatnonzero(infos["ready"])}
        for slot in np.flatnonzero(following.get("restarted", [])):
            pending.pop(slot, None)
            done.append(running.pop(slot, []))
        for slot in list(pending):
            ended = terminated[slot] or truncated[slot]
            if ended or following["ready"][slot]:
                next_obs = following["final_obs"][slot] if ended else after[slot]
                running.setdefault(slot, []).append((*pending.pop(slot), reward[slot], next_obs, bool(terminated[slot])))
                if ended:
                    done.append(running.pop(slot))
        obs, infos = after, following
    return [*done, *running.values()]
