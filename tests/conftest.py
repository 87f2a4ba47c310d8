"""What the tests share: the checkout on the path, a scripted player, and runs of the scripts and of SB3."""

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp()  # where this machine's secret is, for the tests
sys.path.insert(0, str(ROOT))

from envs.rendering import load_triton  # noqa: E402
from onefile_rl import runs  # noqa: E402
from onefile_rl.engines import process  # noqa: E402
from onefile_rl.engines.unity import UnityMessageProto, Wire  # noqa: E402
from unity_vec_env import UnityVecEnv  # noqa: E402

# In the background of a shell and under nohup, signals are ignored, and every child process would inherit that.
IGNORED_ELSEWHERE = {
    "SIGINT": signal.default_int_handler,
    "SIGQUIT": signal.SIG_DFL,
    "SIGTERM": signal.SIG_DFL,
    "SIGHUP": lambda *_: (
        None
    ),  # not inherited by programs; the tests themselves survive a hangup under nohup
}
for name, handler in IGNORED_ELSEWHERE.items():
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, name), handler)
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_SETMASK, [])

# The same examples in every run, however slow the machine is
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

load_triton()  # tests also render with gymnasium and MuJoCo directly

there = sys.platform != "linux" or (find_library("EGL") and find_library("GL"))
needs_gl = pytest.mark.skipif(
    not there, reason="no OpenGL here, on Debian and Ubuntu: apt-get install libegl1 libgl1"
)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))),
    reason="no C++ compiler here, on Debian and Ubuntu: apt-get install g++",
)


# Below the ports that Linux gives to connections, and from another one on in every process
PORTS = range(20_000, 32_000)
ports = itertools.cycle(PORTS)
ports = itertools.islice(ports, os.getpid() * 101 % len(PORTS), None)


def free_port():
    """Return a port of this machine that is free, and that neither a connection nor another test will get."""
    for port in ports:
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # another process has it
            pass


def listening():
    """Return the local addresses on which this process listens: TCP sockets in state 0A. Other tests may listen too."""
    own = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(file))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in open(f"/proc/net/{name}").readlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def agent(
    number, obs, reward=0.0, done=False, interrupted=False, mask=(), group_reward=0.0, name="Body"
):
    """An AgentInfoProto as keyword arguments. `obs` is a list of arrays, one per sensor."""
    data = [dict(data=np.ravel(o).tolist()) for o in obs]
    sensors = [
        dict(shape=np.shape(o), float_data=data[i], name=f"{name}{i}") for i, o in enumerate(obs)
    ]
    info = dict(
        id=number, reward=reward, done=done, max_step_reached=interrupted, group_reward=group_reward
    )
    return dict(**info, observations=sensors, action_mask=mask)


class ScriptedPlayer:
    """Connects like a player and sends each message of the script: a dict from behavior to a list of agents.

    `replies` holds, for each message, the answer's rl_input. After the script it quits. `side_channel` is the data of
    the first message, or a list with the data of the first messages.
    """

    def __init__(
        self, script, specs=None, version="1.5.0", side_channel=b"", port=None, package=""
    ):
        self.script, self.specs = script, specs or {"Scripted?team=0": (2, ())}
        self.version, self.package = version, package
        self.side_channel = [side_channel] if isinstance(side_channel, bytes) else [*side_channel]
        self.port, self.replies, self.peers = port or free_port(), [], []
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
            hello.unity_output.rl_initialization_output.package_version = self.package
            hello.unity_output.rl_initialization_output.capabilities.hybridActions = True
            self.greeting = self.call(wire, hello).rl_initialization_input
            self.first = self.call(wire, UnityMessageProto()).rl_input
            sent = set()
            for behaviors in self.script:
                message = UnityMessageProto()
                if self.side_channel:
                    message.unity_output.rl_output.side_channel = self.side_channel.pop(0)
                for name, agents in behaviors.items():
                    if agents and name not in sent:
                        sent.add(name)
                        continuous, branches = self.specs[name]
                        brain = message.unity_output.rl_initialization_output.brain_parameters.add(
                            brain_name=name
                        )
                        brain.action_spec.num_continuous_actions = continuous
                        brain.action_spec.num_discrete_actions = len(branches)
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
        reply = wire.receive(60)
        if reply.header.status != 200:
            raise ConnectionError
        return reply.unity_input


@pytest.fixture
def scripted():
    """Makes an env of a script; env and player are closed after the test."""
    opened = []

    def make(script, max_agents=None, behavior=None, timeout=60, settings=None, **kwargs):
        player = ScriptedPlayer(script, **kwargs)
        envs = UnityVecEnv(
            "editor",
            base_port=player.port,
            max_agents=max_agents,
            behavior=behavior,
            timeout=timeout,
            **(settings or {}),
        )
        opened.append((envs, player))
        return envs, player

    yield make
    for envs, player in opened:
        envs.close()
        player.thread.join(5)


@pytest.fixture
def patient(monkeypatch):
    """A game may take a minute to connect, also in an env with a short timeout: starting a process takes its time."""
    accept = process.Process.accept

    def accepted(self, make_wire):
        timeout = self.timeout
        self.timeout = 60
        try:
            accept(self, make_wire)
        finally:
            self.timeout = timeout

    monkeypatch.setattr(process.Process, "accept", accepted)


# Runs of a script


@pytest.fixture(autouse=True)
def signals():
    """A script's end ignores them."""
    before = {number: signal.getsignal(number) for number in runs.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def seeds():
    """Make the random numbers of a test independent of the tests before it."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


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
        time.sleep(
            1.1
        )  # TensorBoard takes event files in the order of their names, which have the second in them
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, line)])
    script.main()


def run_script(script, line, folder, **more):
    """As a user would, in a process of its own. `more` are variables of its environment."""
    command = [sys.executable, script.__file__, *line.split()]
    environment = {
        "PATH": "",
        "PYTHONPATH": str(ROOT / "tests"),
        "XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"],
        **more,
    }
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300
    )


def assert_refused(script, line, match, folder):
    """One line that says what is wrong, before any work starts."""
    out = run_script(script, line, folder)
    assert (
        out.returncode == 1 and match in out.stderr and len(out.stderr.strip().splitlines()) == 1
    ), out.stderr
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
    tags = [
        tag
        for tag in events.Tags()["scalars"]
        if not tag.startswith("time/") and tag not in ("charts/SPS", "charts/cpu_seconds")
    ]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


class Record(list):
    """What players were asked and answered; and the masks that stood when they were asked."""

    def __init__(self):
        super().__init__()
        self.masks = []


def watch(script, monkeypatch, crash_at=None):
    """A list that fills with what the script's Unity players are asked and answer; before one of its steps the first
    player is killed."""
    make_envs, record = script.make_envs, Record()

    def watched(*args):
        envs, how = make_envs(*args)
        reset, step_async, step_wait = envs.reset, envs.step_async, envs.step_wait

        def asked(actions):
            if len(record) == crash_at:
                envs.players[0].process.kill()
            record.append([actions.copy()])
            record.masks.append(np.array(envs._mask) if envs._branches else None)
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
    """What each agent saw, did and got, from a watched run: a list for each episode of (obs, action, reward, next obs,
    terminated).

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
                transition = (*pending.pop(slot), reward[slot], next_obs, bool(terminated[slot]))
                running.setdefault(slot, []).append(transition)
                if ended:
                    done.append(running.pop(slot))
        obs, infos = after, following
    return [*done, *running.values()]


def assert_compiled_is_the_same(spy, **settings):
    """spy: what spy_on gives."""
    plain = {key: value.clone() for key, value in spy(**settings).agent.state_dict().items()}
    compiled = spy(**settings, compile=True).agent.state_dict()
    for key, value in plain.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)


def assert_no_fast_is_the_same(script, small, **settings):
    """All scalars of the first iteration, with numpy acting and a compiled update, and with plain PyTorch."""
    quick, plain = (
        curve(train(script, small, **settings, **way))
        for way in (dict(compile=True), dict(fast=False))
    )
    assert quick.keys() == plain.keys() and any(name.startswith("losses/") for name in plain)
    for name, points in plain.items():
        np.testing.assert_allclose(quick[name][0], points[0], atol=1e-5, rtol=1e-5, err_msg=name)


def spy_on(script, monkeypatch, tmp_path, small):
    """Runs a PPO script in an empty folder, and sees what goes into the advantage and into the update."""
    monkeypatch.chdir(tmp_path)
    seen = SimpleNamespace(gae=[], batches=[], ratios=[], agent=None)
    gae, compiled, build = script.gae, runs.Run.compile, script.Agent

    def spied_gae(*args):
        seen.gae.append((*args, gae(*args)))
        return seen.gae[-1][-1]

    def spied_compiled(run, update, updates):
        step, last = compiled(run, update, updates), []

        def spied(*inputs):
            batch = inputs[2]
            if last[-1:] != [id(batch)]:  # the first update of an iteration
                last.append(id(batch))
                with torch.no_grad():
                    given = batch[: batch._fields.index("actions") + 1]
                    seen.ratios.append(
                        (seen.agent.get_action_and_value(*given)[1] - batch.logprobs).exp()
                    )
                seen.batches.append(batch._replace(obs=seen.agent.obs_rms(batch.obs)))
            return step(*inputs)

        return spied

    def remembered(*args):
        seen.agent = build(*args)
        return seen.agent

    monkeypatch.setattr(script, "gae", spied_gae)
    monkeypatch.setattr(runs.Run, "compile", spied_compiled)
    monkeypatch.setattr(script, "Agent", remembered)

    def run(**kwargs):
        script.train(script.Args(**{**small, "exp_name": f"run{len(seen.batches)}", **kwargs}))
        return seen

    return run


def learn_with_sb3(model, names, iterations, callback=None):
    """SB3's first rollout, agent by agent, and its weights before and after under our names: ours to SB3's."""
    policy, first, buffer = model.policy, {}, model.rollout_buffer
    compute, rows = buffer.compute_returns_and_advantage, model.n_steps * model.n_envs

    def weights():
        pairs = [
            (ours + end, sb3 + end)
            for ours, sb3 in names.items()
            for end in ("", ".weight", ".bias")
        ]
        return {
            ours: policy.state_dict()[sb3].clone()
            for ours, sb3 in pairs
            if sb3 in policy.state_dict()
        }

    def computed(*args, **kwargs):
        compute(*args, **kwargs)
        if not first:
            for key in (
                "observations",
                "actions",
                "log_probs",
                "values",
                "rewards",
                "advantages",
                "returns",
            ):
                array = getattr(buffer, key)
                first[key] = np.swapaxes(array, 0, 1).reshape(rows, *array.shape[2:]).squeeze()

    buffer.compute_returns_and_advantage, initial = computed, weights()
    torch.manual_seed(11)
    np.random.seed(11)
    model.learn(iterations * rows, callback=callback)
    return first, initial, weights()


def start_like_sb3(script, monkeypatch, initial):
    """Let the script's agent begin with these weights, and the same random numbers."""
    build = script.Agent

    def same_start(*args):
        agent = build(*args)
        agent.load_state_dict(initial, strict=False)
        torch.manual_seed(11)
        np.random.seed(11)
        return agent

    monkeypatch.setattr(script, "Agent", same_start)


def assert_parity(seen, ours, first, initial, final, num_envs, gamma, moved=1e-3, both=True):
    """The first rollout to 1e-5, the last weights to 1e-4. ours: rows of the first batch by SB3's names."""
    for key, value in ours.items():
        np.testing.assert_allclose(value.squeeze(), first[key], atol=1e-5, rtol=1e-5, err_msg=key)
    rewards, values, next_values, continues = (
        np.array(x).reshape(num_envs, -1) for x in seen.gae[0][:4]
    )
    ended = ~continues
    # The last row of each env has no next row, but its episode need not have ended.
    batch = seen.batches[0]
    done = (batch.terminated | batch.truncated).numpy().reshape(num_envs, -1)
    ended[:, -1] = done[:, -1]
    rewards = (rewards + ended * gamma * next_values).ravel()
    np.testing.assert_allclose(rewards, first["rewards"], atol=1e-5, err_msg="rewards")
    died, cut = ended & (next_values == 0), ended & (next_values != 0)
    assert died.sum() > 1 and (cut.sum() > 1 or not both), "episodes ended in both ways"
    learned = seen.agent.state_dict()
    for key, value in final.items():
        np.testing.assert_allclose(learned[key].numpy(), value.numpy(), atol=1e-4, err_msg=key)
        assert not np.allclose(value.numpy(), initial[key].numpy(), atol=moved), "they learned"
