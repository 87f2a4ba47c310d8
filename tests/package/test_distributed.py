"""Several processes that learn as one, started by torchrun: the real one, on this machine."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT, needs_compiler

import lbc_discrete as lbc
import ppo_continuous_multiagent as ppo
from onefile_rl import arguments, checkpoints, distributed

pytestmark = pytest.mark.usefixtures("empty_folder")
SMALL = "--env-id parity_env:Parity-v0 --num-envs 2 --num-steps 32 --num-minibatches 2 "
SMALL += "--update-epochs 2 --hidden-sizes 8"

LEARN = '''
"""Five updates on a batch of which each rank has its part, and the weights after them."""
import importlib
import sys
import numpy as np
import torch
from onefile_rl import fast
from onefile_rl import distributed

def vectors(rng, *shapes):
    return [torch.as_tensor(rng.normal(size=shape), dtype=torch.float32) for shape in shapes]

def flat(*things):
    return torch.cat([x.detach().flatten().float() for x in things])

def ppo(name, compiled=False):
    script, rng, n = importlib.import_module(name), np.random.default_rng(0), 48
    torch.manual_seed(0)
    args = script.Args(hidden_sizes=(8, 8), ent_coef=0.01)
    spec = {"obs_dim": 5, "action_dim": 2, "low": -1.0, "high": 1.0, "branches": [3], "start": [0]}
    agent = script.Agent(spec, args)
    obs, advantages, logprobs, returns, values = vectors(rng, (n, 5), n, n, n, n)
    agent.obs_rms.update(obs[distributed.RANK :: distributed.SIZE])
    ends = torch.zeros(n, dtype=torch.bool)
    rest = advantages, returns, values, obs, ends, ends
    masks = torch.as_tensor(rng.random((n, 3)) < 0.8)
    masks[:, 0] = True
    if name == "ppo_discrete_multiagent":
        batch = script.Batch(obs, masks, torch.zeros(n, 1, dtype=torch.int64), logprobs - 1, *rest)
    elif name == "ppo_hybrid_multiagent":
        actions = torch.cat([*vectors(rng, (n, 2)), torch.zeros(n, 1)], 1)
        batch = script.Batch(obs, masks, actions, logprobs - 3, *rest)
    else:
        batch = script.Batch(obs, vectors(rng, (n, 2))[0], logprobs - 2, *rest)
    batch = script.Batch(*(x[distributed.RANK :: distributed.SIZE] for x in batch))
    optimizer = fast.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    update = fast.CompiledUpdate(script.update, args, insist=True) if compiled else script.update
    rows = torch.arange(n // distributed.SIZE)
    for _ in range(5):
        metrics = update(agent, optimizer, batch, rows, float(len(rows)), args)
    return flat(*agent.parameters(), *agent.obs_rms.buffers()), metrics["losses/grad_norm"]

def sac():
    script, rng, n = importlib.import_module("sac_continuous"), np.random.default_rng(0), 48
    torch.manual_seed(0)
    args = script.Args(hidden_sizes=(8, 8), target_entropy=-2.0, norm_obs=True)
    agent = script.Agent({"obs_dim": 5, "action_dim": 2, "low": -1.0, "high": 1.0}, args)
    parameters = agent.qf.parameters(), agent.actor.parameters(), [agent.log_alpha]
    optimizers = [fast.Adam(params, lr=1e-2) for params in parameters]
    batch = vectors(rng, (n, 5), (n, 2), n, (n, 5), n, (n, 2), (n, 2))
    *batch, noise, next_noise = (x[distributed.RANK :: distributed.SIZE] for x in batch)
    mb = script.Batch(*batch)
    agent.obs_rms.update(mb.obs)
    for _ in range(5):
        metrics = script.update(agent, *optimizers, mb, noise, next_noise, args)
    return torch.cat([p.detach().flatten() for p in agent.parameters()]), metrics["losses/qf_loss"]

def bandit():
    """Sequences with rows that are not valid, more of them on one rank than on the other."""
    script, rng, n, length = importlib.import_module("lbc_discrete"), np.random.default_rng(0), 16, 6
    torch.manual_seed(0)
    args = script.Args(hidden_sizes=(8, 8))
    agent = script.Agent({"obs_dim": 5, "branches": [3], "start": [0], "bins": 0}, args)
    optimizer = fast.Adam(agent.networks.parameters(), lr=1e-2, eps=1e-5)
    obs, reward = vectors(rng, (n, length + 1, 5), (n, length))
    choices = torch.as_tensor(rng.integers(0, 3, (n, length, 1)))
    uniform = torch.as_tensor(rng.random((3, n, length)), dtype=torch.float32)
    valid = (uniform[0] < torch.linspace(0.2, 1.0, n)[torch.randperm(n)][:, None]).float()
    index = torch.stack([3 * uniform[1], 5 * uniform[1], uniform[2]], 2)
    rest = torch.full((n, length), 0.4), reward, (uniform[2] < 0.1).float(), valid
    mb = script.Batch(obs, torch.zeros(n, length + 1, dtype=int), torch.ones(n, length, 3), index, choices, *rest)
    mb = script.Batch(*(x[distributed.RANK :: distributed.SIZE] for x in mb))
    agent.obs_rms.update(mb.obs[:, :-1][mb.valid > 0])
    for _ in range(5):
        script.update(agent, optimizer, mb, args)
    state = [*agent.networks.parameters(), *agent.obs_rms.buffers()]
    return torch.cat([x.detach().flatten().float() for x in state])

def main(path):
    distributed.join("cpu")
    out = {"sac": sac()[0], "bandit": bandit()}
    for name in ("ppo_continuous_multiagent", "ppo_discrete_multiagent", "ppo_hybrid_multiagent"):
        out[name], out[name + " norm"] = ppo(name)
    if "compiled" in sys.argv:
        out["compiled"], _ = ppo("ppo_continuous_multiagent", compiled=True)
    if distributed.RANK == 0:
        torch.save(out, path)
    distributed.leave()

if __name__ == "__main__":
    main(sys.argv[1])
'''


# Nothing of torchrun listens for other machines, as in docs/cluster.md
LOOPBACK = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]


def torchrun(*command, count=2, more=(), loopback=True):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), "."])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if loopback:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *(LOOPBACK if loopback else []),
        f"--nproc_per_node={count}",
        *more,
        *map(str, command),
    ]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def finish(process, timeout=240):
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return out


@pytest.mark.parametrize("what", ["plain", pytest.param("compiled", marks=needs_compiler)])
def test_two_ranks_with_half_the_batch_each_learn_as_one_with_the_whole(what):
    """Gradients, their norm, advantages' normalisation, the statistics of the observations; SAC's targets too."""
    Path("learn.py").write_text(LEARN)
    process = torchrun("learn.py", "two.pt", what)
    out = finish(process)
    assert process.returncode == 0, out
    sys.path.insert(0, ".")
    subprocess.run(
        [sys.executable, "learn.py", "one.pt"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    two, one = torch.load("two.pt"), torch.load("one.pt")
    for name, x in one.items():
        np.testing.assert_allclose(two[name], x, atol=1e-5, rtol=1e-4, err_msg=name)
    if what == "compiled":
        np.testing.assert_allclose(
            two["compiled"], one["ppo_continuous_multiagent"], atol=1e-5, rtol=1e-4
        )


EQUAL = "            run.log("
CHECKED = """            with open(f"rows_{distributed.RANK}.txt", "a") as file:
                own = sum(p.sum().item() for p in agent.parameters())
                print(num_rows, sum(distributed.gather(own)) / distributed.SIZE - own, file=file)
            run.log("""
SLOW = """
import os
import time
import gymnasium as gym
import parity_env

class Slow(gym.Wrapper):
    def step(self, action):
        time.sleep(0.02 * (os.environ.get("RANK") == "1"))
        return self.env.step(action)

gym.register("Slow-v0", lambda: Slow(gym.make("Parity-v0")))
"""


def copy_with_a_look_inside():
    source = (ROOT / "ppo_continuous_multiagent.py").read_text()
    assert source.count(EQUAL) == 1
    Path("my_ppo.py").write_text(source.replace(EQUAL, CHECKED))


def test_ranks_of_different_speed_neither_wait_nor_drift():
    """One is slow: it ends its rollouts early, weighs less, and all have the same weights after each iteration."""
    copy_with_a_look_inside()
    Path("slow.py").write_text(SLOW)
    line = SMALL.replace("parity_env:Parity-v0", "slow:Slow-v0").split()
    process = torchrun("my_ppo.py", *line, "--total-timesteps", 512, "--rollout-share", 0.5)
    out = finish(process)
    assert process.returncode == 0, out
    rows = [np.loadtxt(f"rows_{rank}.txt", ndmin=2) for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) >= 4 and not np.abs(np.concatenate(rows)[:, 1]).any(), (
        "the same weights"
    )
    assert (rows[0][:, 0] == 64).all() and rows[1][:, 0].mean() < 48, "the slow one has fewer rows"
    (folder,) = Path("runs").iterdir()
    state = checkpoints.load(folder, "my_ppo.py")[1]
    assert state["global_step"] == sum(x[:, 0].sum() for x in rows) >= 512, (
        "and all of them are counted"
    )
    assert "2 ranks, each with" in out and out.count("Saved runs/") == 1, "rank 0 speaks"


OTHERS = {
    "ppo_hybrid_multiagent.py": "--env-id parity_env:Hybrid-v0 --num-steps 32 --num-minibatches 4",
    "ppo_lstm_multiagent.py": "--env-id CartPoleBlind-v0 --num-steps 32 --num-minibatches 4 --memory-size 8",
    "ppo_pixel.py": "--env-id DummyPixels-v0 --num-steps 32 --num-minibatches 2 --update-epochs 1 --features 16",
    "sac_continuous.py": "--env-id parity_env:Parity-v0 --learning-starts 50 --batch-size 16 --norm-obs",
    "crossq_continuous.py": "--env-id parity_env:Parity-v0 --learning-starts 50 --batch-size 16 --norm-obs",
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_scripts_learn_together_too(name):
    """To their end, and with the same weights and running statistics in both ranks."""
    off_policy = name in ("sac_continuous.py", "crossq_continuous.py")
    total = 2_400 if off_policy else 256
    source = (ROOT / name).read_text()
    line = "                run.log(" if off_policy else "            run.log("
    assert source.count(line) == 1
    own = "torch.cat([x.flatten() for x in agent.state_dict().values()]).double().sum().item()"
    check = (
        f'{line[: -len("run.log(")]}assert len(set(distributed.gather({own}))) == 1, "they drift"\n'
    )
    Path("my_script.py").write_text(source.replace(line, check + line))
    more = ["--num-envs", 2, "--total-timesteps", total, *["--no-compile"] * ("lstm" not in name)]
    process = torchrun("my_script.py", *OTHERS[name].split(), *more)
    out = finish(process)
    assert process.returncode == 0 and "2 ranks, each with" in out, out
    (folder,) = Path("runs").iterdir()
    assert checkpoints.load(folder, "my_script.py")[1]["global_step"] >= total


def rank_of(process, number):
    """The process of a rank that torchrun has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if parent == process.pid and f"RANK={number}".encode() in words:
            return int(path.name)
    raise AssertionError("no such rank")


def when_it_runs(iterations=3):
    deadline = time.time() + 120
    while time.time() < deadline:
        for path in Path(".").glob("rows_1.txt"):
            if len(path.read_text().splitlines()) >= iterations:
                return
        time.sleep(0.1)
    raise AssertionError("it does not start")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_rank_ends_the_job_with_a_checkpoint_and_a_restart_goes_on_from_it(
    restarts, monkeypatch
):
    """Without a secret no checkpoint is signed: a restart does not need a signature."""
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    copy_with_a_look_inside()
    total = 2_000_000 if not restarts else 8_000
    line = [*SMALL.split(), "--total-timesteps", total, "--checkpoint-interval", 640]
    process = torchrun("my_ppo.py", *line, more=[f"--max-restarts={restarts}"])
    when_it_runs(12)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    out = finish(process)
    (folder,) = Path("runs").glob("[!.]*")
    state = checkpoints.load(folder, "my_ppo.py")[1]
    if restarts:
        assert process.returncode == 0, out
        assert not list(Path("runs").glob(".*")), "nothing is left behind"
        assert (
            state["global_step"] >= total - 128
            and f"{folder}: 2 ranks" in out
            and out.count("Saved runs/") == 1
        )
    else:
        assert process.returncode != 0 and 640 <= state["global_step"] < total
        assert "another rank is gone" in out or "Stopped after" in out, out


# What ranks exchange, and where they listen

EXCHANGE = """
import math
import sys
import numpy as np
import torch.distributed as dist
from onefile_rl import distributed

def refuse(*args, **kwargs):
    sys.exit("unpickled")

dist.all_gather_object = dist.broadcast_object_list = refuse
dist.distributed_c10d._tensor_to_object = refuse
distributed.join("cpu")
rank = distributed.RANK
rng = np.random.default_rng(rank)
floats = [float.fromhex("0x1.fffffffffffffp+1023"), 5e-324, -0.0, 0.1, math.inf, *rng.normal(size=99)]
mine = {"floats": floats, "texts": ["", chr(233)] * rank, "none": None, "true": np.bool_(True)}
mine |= {"numbers": [np.float32(0.1), np.int64(2**62), np.arange(3)], "empty": {}, "rank": rank}
every = distributed.gather(mine)
for number, theirs in enumerate(every):
    same = [*floats[:5], *np.random.default_rng(number).normal(size=99)]
    assert list(map(float.hex, theirs["floats"])) == list(map(float.hex, map(float, same)))
    assert theirs["texts"] == ["", chr(233)] * number and theirs["rank"] == number
    assert theirs["none"] is None and theirs["true"] is True and theirs["empty"] == {}
    assert theirs["numbers"] == [float(np.float32(0.1)), 2**62, [0, 1, 2]]
assert distributed.minimum(5 - rank) == 4 and distributed.total(1) == 2
distributed.leave()
if rank == 0:
    print("exchanged")
"""


def test_ranks_exchange_json_and_unpickle_nothing():
    Path("exchange.py").write_text(EXCHANGE)
    process = torchrun("exchange.py")
    out = finish(process)
    assert process.returncode == 0 and "exchanged" in out, out


def test_what_json_does_not_have_is_refused():
    with pytest.raises(TypeError, match="ranks can't exchange a set"):
        distributed.to_json({"a": {1, 2}})


def listening(pid):
    """Return the addresses on which a process and its children listen."""
    addresses = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            words = line.split()
            raw = bytes.fromhex(words[1].split(":")[0])
            raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
            if words[3] == "0A":
                addresses[f"socket:[{words[9]}]"] = socket.inet_ntop(family, raw)
    found = []
    pids = [pid]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, task.read_text().split())
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found += [addresses[link]] if (link := os.readlink(file)) in addresses else []
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")
def test_the_documented_command_listens_on_loopback_only():
    page = (ROOT / "docs" / "cluster.md").read_text()
    command = re.search(r"^    (TORCH\S+=1 torchrun .*?[^\\])\n", page, re.DOTALL | re.MULTILINE)[1]
    command = shlex.split(command.replace("\\\n", " "))
    assert command[0] == "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" and command[1] == "torchrun"
    options = [word for word in command[2:] if word.startswith("--")]
    assert {*LOOPBACK, "--nproc_per_node=2"} <= set(options)
    copy_with_a_look_inside()
    process = torchrun("my_ppo.py", *SMALL.split(), "--total-timesteps", 10**7)
    try:
        when_it_runs(1)
        found = listening(process.pid)
        assert len(found) >= 2 and set(found) <= {"127.0.0.1", "::1"}, found
    finally:
        os.kill(process.pid, signal.SIGTERM)
        finish(process)


# Restarts

JOB = """
import os
import sys
import time
from pathlib import Path
from onefile_rl import distributed

name = sys.argv[1]
distributed.join("cpu")
before = distributed.interrupted_run()
with open(f"{name}.txt", "a") as file:
    file.write(f"{distributed.RANK} {before}\\n")
distributed.note_run(f"runs/{name}")
if before is None:
    distributed.gather(None)
    Path(f"{name}{distributed.RANK}.ready").touch()
    deadline = time.time() + 60
    while len(list(Path(".").glob("*.ready"))) < 4 and time.time() < deadline:
        time.sleep(0.05)
    os._exit(1)
distributed.note_run(None)
distributed.leave()
"""


@pytest.mark.parametrize("loopback", [True, False])
def test_two_jobs_in_one_folder_continue_their_own_runs(loopback):
    """Neither has an --rdzv-id, and both run at the same time. Their notes end with the jobs."""
    Path("job.py").write_text(JOB)
    more = ["--max-restarts=1", "--log-dir=logs"]
    if not loopback:
        more += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    jobs = [torchrun("job.py", name, more=more, loopback=loopback) for name in ("one", "two")]
    outs = [finish(job) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outs
    for name in ("one", "two"):
        ranks = sorted(Path(f"{name}.txt").read_text().splitlines())
        assert ranks == ["0 None", f"0 runs/{name}", "1 None", f"1 runs/{name}"]
    assert not list(Path(".").rglob("run.json")) and not Path("runs").exists()


def test_a_note_with_other_arguments_is_not_used(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(distributed, "SIZE", 2)
    monkeypatch.setattr(distributed, "gather", lambda x: [None, x])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_1" / "0" / "error.json"))
    monkeypatch.setattr(sys, "argv", ["script.py", "--seed", "1"])
    distributed.note_run("runs/x")
    assert distributed.interrupted_run() == "runs/x"
    monkeypatch.setattr(sys, "argv", ["script.py", "--seed", "2"])
    assert distributed.interrupted_run() is None
    assert capsys.readouterr().out == "runs/x is not continued, it has other arguments: --seed 1\n"
    distributed.note_run(None)
    assert not list(tmp_path.glob("*"))


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Be one of two ranks of a job with restarts. Return the path of its note."""
    monkeypatch.setattr(distributed, "SIZE", 2)
    monkeypatch.setattr(distributed, "gather", lambda x: [None, x])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_1" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    return tmp_path / "run.json"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows can't limit the size of files")
def test_a_note_that_can_not_be_written_leaves_the_one_before(job, capsys):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for before in (None, "runs/x"):
        if before:
            distributed.note_run(before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full disk
        try:
            distributed.note_run("runs/y")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "The run can't be noted, a restart begins a new one" in capsys.readouterr().out
        assert [path.name for path in job.parent.iterdir()] == (["run.json"] if before else [])
        assert distributed.interrupted_run() == before


def test_a_note_that_can_not_be_read_is_not_used(job, capsys):
    distributed.note_run("runs/x")
    complete = job.read_bytes()
    damaged = [complete[:size] for size in (0, 1, len(complete) - 1)]
    damaged += [b"\xff", b"[]", b"{}", b"null", b'{"folder": "runs/x", "arguments": 1}']
    for content in damaged:
        job.write_bytes(content)
        assert distributed.interrupted_run() is None
        line = f"{job} can't be read: the run that it names is not continued\n"
        assert capsys.readouterr().out == line


def test_a_job_without_a_place_for_its_note_says_so(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "SIZE", 2)
    monkeypatch.setattr(distributed, "gather", lambda x: [x, x])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", os.devnull)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    distributed.note_run("runs/x")
    assert "a restart begins a new one: torchrun has no --log-dir" in capsys.readouterr().out
    assert distributed.interrupted_run() is None


def test_a_checkpoint_keeps_the_device_cuda_for_every_rank(monkeypatch):
    """Not the GPU of rank 0, which all ranks would share after --resume."""
    monkeypatch.setattr(distributed, "local_device", lambda device: "cpu")
    monkeypatch.setattr(arguments, "check_device", lambda device: None)
    few = dict(num_steps=32, num_minibatches=2, total_timesteps=32, hidden_sizes=(8,))
    ppo.train(ppo.Args(env_id="parity_env:Parity-v0", device="cuda", **few))
    (folder,) = Path("runs").iterdir()
    assert checkpoints.load(folder, ppo.__file__)[1]["args"]["device"] == "cuda"
    assert json.loads((folder / "config.json").read_text())["args"]["device"] == "cuda"


def test_each_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(distributed, "SIZE", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.local_device("cuda") == "cuda:1" and distributed.local_device("cpu") == "cpu"


def test_one_process_is_alone_and_says_nothing():
    """Without torchrun nothing is waited for, and what comes out is what went in."""
    assert (distributed.RANK, distributed.SIZE) == (0, 1) and not torch.distributed.is_initialized()
    x = torch.randn(7)
    assert (
        distributed.average(x, 3.0) is x
        and distributed.total(5) == 5
        and distributed.gather(x) == [x]
        and distributed.minimum(3) == 3
    )
    np.testing.assert_array_equal(distributed.normalize(x), (x - x.mean()) / (x.std() + 1e-8))
    assert (
        distributed.Pace(0.1).has_enough(9, 10, 0) is False
        and distributed.Pace(0.1).has_enough(10, 10, 0) is True
    )


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--evaluate runs/x", "run in one process"),
        ("--unity-path editor", "editor are for one process"),
    ],
)
def test_what_ranks_can_not_do_is_refused(line, match, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "SIZE", 2)
    monkeypatch.setattr(distributed, "interrupted_run", lambda: None)
    if "--evaluate" in line:
        args = ppo.Args(
            env_id="parity_env:Parity-v0", num_steps=32, num_minibatches=2, total_timesteps=32
        )
        monkeypatch.setattr(distributed, "SIZE", 1)
        ppo.train(args)
        monkeypatch.setattr(distributed, "SIZE", 2)
        line = f"--evaluate {next(Path('runs').iterdir())}"
    monkeypatch.setattr(sys, "argv", ["ppo_continuous_multiagent.py", *line.split()])
    with pytest.raises(SystemExit, match=match):
        ppo.main()


def test_actors_and_ranks_are_not_for_each_other(monkeypatch):
    monkeypatch.setattr(distributed, "SIZE", 2)
    lbc.check(lbc.Args())
    with pytest.raises(ValueError, match="--num-actors 2: with torchrun"):
        lbc.check(lbc.Args(num_actors=2))


def test_two_ranks_of_the_bandit_end_together():
    """Each rank has its own bandits and replay buffer. The weights are the same, and rank 0 evaluates."""
    few = "--num-envs 4 --batch-size 8 --replay-size 20 --hidden-sizes 8 --eval-interval 400 --total-timesteps 800"
    process = torchrun(
        ROOT / "lbc_discrete.py", *f"--env-id CartPole-v1 --no-compile {few}".split()
    )
    out = finish(process)
    assert process.returncode == 0, out
    (run,) = Path("runs").glob("CartPole-v1__lbc_discrete__1__*")
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert (
        state["global_step"] == 800 and state["kept"]["counts"]["updates"] == 10
    )  # 2 ranks x 4 envs x 20 decisions


HOSTS = """
set -e
ip netns add {a}; ip netns add {b}
ip link add {a} type veth peer name {b}
ip link set {a} netns {a}; ip link set {b} netns {b}
ip -n {a} addr add 10.77.0.1/24 dev {a}; ip -n {b} addr add 10.77.0.2/24 dev {b}
for x in {a} {b}; do ip -n $x link set lo up; ip -n $x link set $x up; done
"""


@pytest.fixture
def hosts():
    """Two hosts that see each other and nothing else."""
    names = [f"rank{os.getpid() % 10_000}{letter}" for letter in "ab"]
    made = subprocess.run(
        ["bash", "-c", HOSTS.format(a=names[0], b=names[1])], capture_output=True, text=True
    )
    try:
        if made.returncode:
            reason = (made.stderr.strip().splitlines() or ["?"])[-1]
            pytest.skip(
                f"network namespaces can't be made here (root, and Debian's iproute2): {reason}"
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_two_hosts_learn_together(hosts):
    copy_with_a_look_inside()
    processes = []
    for number, host in enumerate(hosts):
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), "."])
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host}
        command = [
            "ip",
            "netns",
            "exec",
            host,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
        ]
        command += [
            "--nproc_per_node=1",
            f"--node_rank={number}",
            "--master_addr=10.77.0.1",
            "--master_port=29400",
        ]
        command += ["my_ppo.py", *SMALL.split(), "--total-timesteps", "512"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(
            subprocess.Popen(command, env={**os.environ, **more}, start_new_session=True, **pipes)
        )
    outs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    rows = [np.loadtxt(f"rows_{rank}.txt", ndmin=2) for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 4 and not np.abs(np.concatenate(rows)[:, 1]).any()
