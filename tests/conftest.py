"""What the tests share: the checkout on the path, and a player that says what a test tells it to."""

import socket
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
