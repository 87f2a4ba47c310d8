"""Soft actor-critic for continuous actions, one policy for all agents: Unity scenes and gymnasium envs.

    python sac_continuous.py --env-id 3DBall                                    a bundled scene: no Unity needed
    python sac_continuous.py --env-id Crawler --unity-path ./Builds/Crawler     the same settings on your Unity build
    python sac_continuous.py --env-id HalfCheetah-v5 --compile                  any gymnasium env with bounded continuous actions
    python sac_continuous.py --evaluate runs/NAME --capture-video               also --resume runs/NAME, --export runs/NAME

A transition enters the buffer when it is closed, by its agent's next decision or by its end: the right reward, the right next observation, and
terminated for true ends only, whatever the agents' pace. While players simulate, the learner updates: the policy that acts is then behind by the
updates of one step, and --no-overlap does one after the other, as it is with gymnasium's own envs.

What differs from Stable-Baselines3 (SB3) and from CleanRL; the numbers stand at the lines:
 1. SB3 and CleanRL train once per step of all envs. Here --updates-per-step counts updates per decision, whoever made it.
 2. SB3 bounds log std to [-20, 2] by clipping, as we do; CleanRL squashes it into [-5, 2].
 3. SB3's and our log-probs and critics know actions between -1 and 1; CleanRL's know the env's units, which shifts the entropy.
 4. SB3 and we take half the critics' mse, one learning rate for all, the temperature's loss with log alpha, and the temperature's step first; CleanRL
    takes the whole mse, 1e-3 for critics and temperature, alpha in its loss, and does it last, with actions sampled anew.
 5. SB3 and CleanRL store observations twice, or once with next observations that are wrong at ends. Here each is stored once, and exactly.
 6. SB3 has no normalisation of observations; --norm-obs keeps the buffer raw and applies the present statistics to what is sampled.
 7. CleanRL's policy_frequency makes up for the steps it left out; ours updates policy and temperature once in so many updates.
 8. The twin critics are one batched product, Adam works on flat vectors: sums in another order, so parity with SB3 holds to rounding.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads are for larger products than a policy's

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.func import functional_call

from envs import SCENES
from envs.vector import film, make_vec_env
from unity_vec_env import UnityPlayerError


@dataclass
class Args:
    env_id: str = "Crawler"
    """a bundled scene (3DBall, Crawler), a gymnasium id, or module:id"""
    unity_path: str | None = None
    """a Unity build to launch, or "editor" to wait for its Play button; --env-id then chooses the settings only"""
    behavior: str | None = None
    """which of a Unity build's behaviors to train, if it has several"""
    num_players: int = 1
    """how many Unity players to launch; their agents are trained together"""
    max_agents: int | None = None
    """slots for agents per player; default: as many as there are at the first decision"""
    time_scale: float = 20.0
    """Unity's game time per wall time"""
    base_port: int | None = None
    """first port for Unity players; default: free ports"""
    player_args: tuple[str, ...] = ()
    """more command line arguments for the players, e.g. --player-args=--agents=20"""
    max_restarts: int = 3
    """how often in a row a player that crashes or hangs is started again"""
    num_envs: int = 1
    """how many gymnasium envs to step at once (a Unity scene has as many as it has agents)"""
    seed: int = 1
    """of the envs, the networks, the actions and the minibatches"""
    exp_name: str = "sac_continuous"
    """part of the run's name"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    wandb_project_name: str = "unity-mujoco-rl"
    """the project's name there"""
    device: str = "cpu"
    """cpu, cuda or mps: where rollout and update live"""
    compile: bool = False
    """torch.compile the update: about twenty seconds at the start, then faster, most of all on small networks"""
    checkpoint_interval: int = 100_000
    """decisions between two checkpoints; there is one at the end, on Ctrl-C and on SIGTERM too"""
    keep_checkpoints: int = 1
    """how many of the last checkpoints to keep, beside best.pt, the best by mean return"""
    capture_video: bool = False
    """film the deterministic policy into runs/NAME/videos, in an env of its own"""
    video_interval: int = 500_000
    """decisions between two films"""
    resume: str | None = None
    """runs/NAME: go on where that run stopped; --total-timesteps may be raised, the other settings are the run's"""
    evaluate: str | None = None
    """runs/NAME, or a checkpoint of it: no training, only episodes with the deterministic policy"""
    eval_episodes: int = 20
    """how many, equally many of every agent"""
    export: str | None = None
    """runs/NAME, or a checkpoint of it: write policy.onnx, for the Model field of Unity's Behavior Parameters"""

    total_timesteps: int = 1_000_000
    """decisions of all agents together"""
    learning_rate: float = 3e-4
    """of Adam, for policy, critics and temperature"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer"""
    save_buffer: bool = False
    """save the replay buffer with each checkpoint; without it a resumed run fills a new one before it learns on"""
    learning_starts: int = 10_000
    """decisions before the first update; they are taken at random"""
    batch_size: int = 256
    """transitions per update"""
    updates_per_step: float = 1.0
    """updates per decision, of all agents together; fractions are allowed, 0 collects without learning"""
    policy_frequency: int = 1
    """updates of the critics for each one of policy and temperature"""
    overlap: bool = True
    """update while players or EnvPool simulate"""
    gamma: float = 0.99
    """discount per decision"""
    tau: float = 0.005
    """how far the target critics follow at each update"""
    alpha: float = 1.0
    """temperature: the weight of the entropy, at the start"""
    autotune: bool = True
    """let the temperature follow the target entropy"""
    target_entropy: float | None = None
    """default: minus the number of actions"""
    norm_obs: bool = False
    """normalise observations by their running mean and variance"""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """widths of the layers of policy and critics"""
    activation: Literal["relu", "silu"] = "relu"
    """between the layers; silu is what ML-Agents' networks have, there called swish"""


# ML-Agents' official settings for its scenes; whatever the command line says wins. The temperatures start at a tenth and a twentieth of the official ones:
# beside rewards this small a random policy would be worth more than a good one for the first hundred thousands of decisions.
REACHER = dict(total_timesteps=100_000, buffer_size=100_000, learning_starts=1_000, batch_size=128, learning_rate=1e-3, gamma=0.95, hidden_sizes=(128, 128))
PRESETS = {
    "3DBall": dict(
        total_timesteps=200_000, buffer_size=200_000, learning_starts=1_000, batch_size=64, updates_per_step=0.1, alpha=0.05, norm_obs=True,
        hidden_sizes=(64, 64), activation="silu",
    ),
    "Crawler": dict(
        total_timesteps=5_000_000, buffer_size=500_000, learning_starts=5_000, updates_per_step=0.05, gamma=0.995, alpha=0.05, norm_obs=True,
        hidden_sizes=(512, 512, 512), activation="silu",
    ),
    "Reacher2Dof-v0": REACHER,
    "Reacher3Dof-v0": REACHER,
    "Reacher6Dof-v0": REACHER,
    "ReacherPlane-v0": REACHER,
}  # fmt: skip


FORMAT = "sac_continuous 2"  # of checkpoints
REPORT = 1000  # decisions between two rows of a curve
THREADS = torch.get_num_threads()  # as many as there are cores, or OMP_NUM_THREADS
FREE = {"resume", "total_timesteps", "unity_path", "base_port", "time_scale", "max_restarts", "track", "wandb_project_name", "device", "compile"}
FREE |= {"checkpoint_interval", "save_buffer", "keep_checkpoints", "capture_video", "video_interval"}  # what may be another when a run goes on


def unity_settings(args):
    return {key: getattr(args, key) for key in ("behavior", "num_players", "max_agents", "base_port", "time_scale", "player_args", "max_restarts")}


def make_envs(args, seed):
    return make_vec_env(args.env_id, args.num_envs, seed, args.unity_path, **unity_settings(args))


class Normalizer(nn.Module):
    """Running mean and variance, in double precision, as buffers: saved and loaded with whatever they belong to."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))  # the same in single precision, as they are put to use
        self.register_buffer("scale", torch.ones(shape))

    def update(self, batch):
        batch = batch.double()
        mean, var, count = batch.mean(0), batch.var(0, unbiased=False), len(batch)
        delta, total = mean - self.mean, self.count + count
        self.var.copy_((self.var * self.count + var * count + delta**2 * self.count * count / total) / total)
        self.mean += delta * count / total
        self.count += count
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.rsqrt(self.var + 1e-8))


def mlp(sizes, activation, out):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), {"relu": nn.ReLU, "silu": nn.SiLU}[activation]()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], out))


class Critics(nn.Module):
    """Two Q functions side by side: each layer is one batched product."""

    def __init__(self, sizes, activation):
        super().__init__()
        self.activation = {"relu": nn.functional.relu, "silu": nn.functional.silu}[activation]
        linear = [[nn.Linear(a, b) for a, b in zip(sizes, (*sizes[1:], 1), strict=True)] for _ in range(2)]
        self.weights = nn.ParameterList(torch.stack([layer.weight.detach().T for layer in pair]) for pair in zip(*linear, strict=True))
        self.biases = nn.ParameterList(torch.stack([layer.bias.detach()[None] for layer in pair]) for pair in zip(*linear, strict=True))

    def forward(self, normalized_obs, action):
        x = torch.cat([normalized_obs, action], 1).expand(2, -1, -1)
        *layers, (weight, bias) = zip(self.weights, self.biases, strict=True)
        for w, b in layers:
            x = self.activation(torch.baddbmm(b, x, w))
        return (x * weight.mT).sum(2) + bias[..., 0]  # one output: no matrix product is worth its while


class Agent(nn.Module):
    """What is saved and put to use: the statistics of the observations are part of it."""

    def __init__(self, obs_dim, action_dim, args):
        super().__init__()
        self.actor = mlp((obs_dim, *args.hidden_sizes), args.activation, 2 * action_dim)  # mean and log std
        self.log_alpha = nn.Parameter(torch.tensor([math.log(args.alpha)]))
        self.critics = Critics((obs_dim + action_dim, *args.hidden_sizes), args.activation)
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.norm_obs, self.activation = args.norm_obs, args.activation
        self.obs_rms = Normalizer(obs_dim)

    def normalize(self, obs):
        if not self.norm_obs:
            return obs
        return ((obs - self.obs_rms.shift) * self.obs_rms.scale).clamp(-10, 10)

    def policy(self, deterministic=False):
        """A function from observations to actions as arrays, between -1 and 1.

        On a CPU it is written out in numpy, on the weights themselves: what the update changes, it follows.
        """
        device = self.log_alpha.device
        if device.type != "cpu":

            @torch.inference_mode()
            def act(obs):
                mean, log_std = self.actor(self.normalize(torch.as_tensor(obs, device=device))).chunk(2, 1)
                return (mean if deterministic else mean + log_std.clamp(-20, 2).exp() * torch.randn_like(mean)).tanh().cpu().numpy()

            return act
        layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in self.actor if isinstance(layer, nn.Linear)]
        shift, scale = self.obs_rms.shift.numpy(), self.obs_rms.scale.numpy()

        def act(obs):
            x = obs
            if self.norm_obs:
                x = (obs - shift) * scale
                np.maximum(np.minimum(x, 10.0, out=x), -10.0, out=x)
            for weight, bias in layers[:-1]:
                x = x @ weight
                x += bias
                if self.activation == "relu":
                    np.maximum(x, 0.0, out=x)
                else:
                    x /= 1 + np.exp(-x)
            x = x @ layers[-1][0]
            x += layers[-1][1]
            x, log_std = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
            if not deterministic:
                x = x + np.exp(np.minimum(np.maximum(log_std, -20.0), 2.0)) * torch.randn(x.shape).numpy()
            return np.tanh(x)

        return act

    def forward(self, normalized_obs, noise):
        """Sampled actions between -1 and 1, and their log-probs."""
        mean, log_std = self.actor(normalized_obs).chunk(2, 1)
        log_std = log_std.clamp(-20, 2)  # CleanRL differs (2)
        action = torch.tanh(mean + log_std.exp() * noise)
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - torch.log(1 - action**2 + 1e-6)  # CleanRL differs (3)
        return action, logprob.sum(1)


class Buffer:
    """Closed transitions in the order in which they were closed, the oldest overwritten. Each observation is stored once: SB3 and CleanRL differ (5).

    `obs` has a row for each transition, then one for each agent, its open decision, then those that ended episodes, of which there are no more than
    transitions: memory that is never written to is never taken. `next_row` says in which of them a transition's next observation is: the agent's next
    transition, which is overwritten later than this one, or its open decision, or a final one.
    """

    def __init__(self, size, n, obs_dim, action_dim):
        self.size, self.n, self.added = size, n, 0
        self.obs, self.actions = np.zeros((size + n + size, obs_dim), np.float32), np.zeros((size + n, action_dim), np.float32)
        self.rewards, self.terminated, self.next_row, self.owner = np.zeros(size, np.float32), np.zeros(size, np.float32), np.zeros(size, int), np.zeros(size, int)
        self.last = np.full(n, -1)  # each agent's last transition, if its next observation is the open decision's
        self.used, self.free = size + n, []  # rows of obs; those that final observations left behind

    def open(self, who, obs):
        self.obs[self.size + who] = obs

    def act(self, who, actions):
        self.actions[self.size + who] = actions

    def close(self, who, rewards, terminated, finals):
        """What came of these agents' open decisions. finals: the final observations of the episodes that ended, by agent. Then comes open()."""
        count = np.arange(self.added, self.added + len(who))
        rows, old = count % self.size, count[count >= self.size] % self.size
        if len(old):  # overwritten now
            ended = self.next_row[old]
            self.free.extend(ended[ended >= self.size + self.n])
            self.last[self.owner[old][self.last[self.owner[old]] == old]] = -1
        self.added += len(who)
        self.obs[rows], self.actions[rows] = self.obs[self.size + who], self.actions[self.size + who]
        self.rewards[rows], self.terminated[rows], self.owner[rows], self.next_row[rows] = rewards, terminated, who, self.size + who
        before = self.last[who]
        self.next_row[before[before >= 0]] = rows[before >= 0]
        self.last[who] = rows
        for slot, obs in finals.items():
            self.put_aside(slot, obs)

    def put_aside(self, slot, obs):
        """The agent's last transition ends here, with this observation."""
        if self.last[slot] >= 0:
            row = self.free.pop() if self.free else self.used
            self.used = max(self.used, row + 1)
            self.next_row[self.last[slot]], self.obs[row] = row, obs
            self.last[slot] = -1

    def drop(self, who):
        """These agents' open decisions will never be closed."""
        for slot in who:
            self.put_aside(slot, self.obs[self.size + slot])

    def __len__(self):
        return min(self.added, self.size)

    def sample(self, batch_size):
        rows = np.random.randint(0, len(self), batch_size)
        return self.obs.take(rows, 0), self.actions.take(rows, 0), self.rewards.take(rows), self.obs.take(self.next_row.take(rows), 0), self.terminated.take(rows)

    def state(self):
        used = len(self)
        state = {key: torch.as_tensor(getattr(self, key)[:used].copy()) for key in ("actions", "rewards", "terminated", "next_row", "owner")}
        state |= {"obs": torch.as_tensor(self.obs[:used].copy()), "more": torch.as_tensor(self.obs[self.size : self.used].copy())}
        return state | {"last": torch.as_tensor(self.last), "free": [int(row) for row in self.free], "added": self.added}

    def restore(self, state):
        used = len(state["obs"])
        for key in ("actions", "rewards", "terminated", "next_row", "owner"):
            getattr(self, key)[:used] = state[key].numpy()
        self.used = self.size + len(state["more"])
        self.obs[:used], self.obs[self.size : self.used] = state["obs"].numpy(), state["more"].numpy()
        self.last, self.free, self.added = state["last"].numpy(), state["free"], state["added"]


def available_memory():
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except OSError:
        return math.inf


def adam(flat, grad, exp_avg, exp_avg_sq, factor, eps):
    """Adam on a flat vector, in place. Its two numbers come from the step and the learning rate: adam_numbers()."""
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    flat.addcdiv_(exp_avg, exp_avg_sq.sqrt().mul_(factor).add_(eps), value=-1)


def adam_numbers(step, lr):
    """Adam's learning rate and bias corrections, worked out once and not at every weight, as a compiled kernel would."""
    rate = lr / (1 - 0.9**step)
    return 1 / (rate * math.sqrt(1 - 0.999**step)), 1e-8 / rate


def make_update(agent, args, with_policy=True):
    """One update on a batch: gradients and Adam on two flat vectors, the actor's with log alpha and the critics', so that it can be compiled whole. They, the
    targets and Adam's averages are changed in place; what is returned are the metrics."""
    target_entropy = args.target_entropy if args.target_entropy is not None else -float(agent.actor[-1].out_features // 2)
    policy_parts = [(f"actor.{name}", p.shape, p.numel()) for name, p in agent.actor.named_parameters()] + [("log_alpha", (1,), 1)]
    critic_parts = [(name, p.shape, p.numel()) for name, p in agent.critics.named_parameters()]

    def named(flat, parts):
        names, shapes, sizes = zip(*parts, strict=True)
        return {name: part.view(shape) for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True)}

    def q_values(flat, *inputs):
        return functional_call(agent.critics, named(flat, critic_parts), inputs)

    def update(policy, critics, targets, policy_averages, critic_averages, numbers, obs, actions, rewards, next_obs, terminated, noise, next_noise):
        obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)  # SB3 differs (6)
        policy_leaf, critics_leaf = policy.detach().requires_grad_(), critics.detach().requires_grad_()
        parameters, alpha = named(policy_leaf, policy_parts), policy[-1].exp()
        with torch.no_grad():
            next_actions, next_logprob = functional_call(agent, parameters, (next_obs, next_noise))
            next_values = q_values(targets, next_obs, next_actions).amin(0) - alpha * next_logprob
            backup = rewards + args.gamma * (1 - terminated) * next_values
        qf_loss = 0.5 * ((q_values(critics_leaf, obs, actions) - backup) ** 2).mean(1).sum()  # CleanRL differs (4)
        (grad,) = torch.autograd.grad(qf_loss, critics_leaf)
        with torch.no_grad():
            adam(critics, grad, *critic_averages, *numbers[:2])
            targets.lerp_(critics, args.tau)
        metrics = [qf_loss, backup.mean(), alpha]
        if with_policy:
            new_actions, logprob = functional_call(agent, parameters, (obs, noise))
            actor_loss = (alpha * logprob - q_values(critics, obs, new_actions).amin(0)).mean()
            (grad,) = torch.autograd.grad(actor_loss, policy_leaf)
            with torch.no_grad():
                entropy = -logprob.mean()
                if args.autotune:
                    grad[-1] = entropy - target_entropy  # of -log_alpha * (logprob + target_entropy)
                adam(policy, grad, *policy_averages, *numbers[2:])
                metrics += [actor_loss, entropy]
        return torch.stack([x.detach() for x in metrics])

    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        update.__code__ = update.__code__.replace()  # a copy: torch keeps what it compiles by the code, and without guards would take it for another's
        # The shapes are the same for ever, and what calls the kernels can be C++ too.
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "cpp_wrapper": args.device == "cpu"}
        return torch.compile(update, fullgraph=True, dynamic=False, options=options)
    return update


def save(path, state):
    """Written beside its place and renamed: a crash or a full disk leaves the last one whole."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path):
    """A run's checkpoint, by the run's folder or its own name. Nothing in it is executed, so it may come from anybody."""
    path = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such checkpoint") from None
    except Exception:
        raise ValueError(f"{path} is not a checkpoint, or not a whole one") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is a checkpoint of another script, or of another version of this one, which reads {FORMAT!r}")
    return path, state


def random_state():
    name, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_random_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def scale(action, low, high):
    """From -1 and 1 to the env's bounds."""
    return 0.5 * (high + low) + 0.5 * (high - low) * action


def evaluate(agent, envs, episodes, seed):
    """Returns, lengths and successes (nan where the env tells none) of each agent's first episodes, equally many of every agent: short ones don't crowd
    out the long. Nothing is sampled."""
    policy, space, n = agent.policy(deterministic=True), envs.single_action_space, envs.num_envs
    left = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    opened, total, length, results = np.zeros(n, bool), np.zeros(n), np.zeros(n, int), []
    actions = np.zeros((n, *space.shape), space.dtype)
    obs, infos = envs.reset(seed=seed)
    while left.any():
        ready = infos.get("ready", np.ones(n, bool))
        if ready.any():
            mean = policy(np.asarray(obs[ready], np.float32).reshape(ready.sum(), -1))
            actions[ready] = scale(mean.reshape(-1, *space.shape), space.low, space.high)
        opened |= ready
        obs, reward, terminated, truncated, infos = envs.step(actions)
        done = terminated | truncated
        closed = opened & (done | infos.get("ready", True))
        opened &= ~closed
        total[closed] += reward[closed]
        length[closed] += 1
        for slot in np.flatnonzero(done & closed):
            if left[slot]:
                results.append((total[slot], length[slot], infos.get("is_success", {}).get(slot, math.nan)))
                left[slot] -= 1
            total[slot], length[slot] = 0, 0
    return np.array(results).T


class Exported(nn.Module):
    """The graph that Unity's inference reads: an input for each sensor, the statistics inside, actions as the env got them."""

    outputs = ["continuous_actions", "deterministic_continuous_actions", "version_number", "memory_size", "continuous_action_output_shape"]

    def __init__(self, agent, low, high):
        super().__init__()
        self.agent, self.low, self.high = agent, low, high

    def scale(self, action):
        if len(self.low.unique()) == len(self.high.unique()) == 1:
            low, high = self.low.flatten()[0].item(), self.high.flatten()[0].item()
            return action if (low, high) == (-1, 1) else scale(action, low, high)
        return scale(action, self.low, self.high)

    def forward(self, *sensors):
        mean, log_std = self.agent.actor(self.agent.normalize(torch.cat(sensors, 1))).chunk(2, 1)
        sampled = (mean + log_std.clamp(-20, 2).exp() * torch.randn_like(mean)).tanh()
        return self.scale(sampled), self.scale(mean.tanh()), torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([float(self.low.numel())])


def export(agent, state, path):
    """Opset 9, as ML-Agents writes it: Unity knows 7 to 15, and torch's newer exporter none of them."""
    inputs = [f"obs_{i}" for i in range(len(state["sensors"]))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of age, and that constants are constant
        torch.onnx.export(
            Exported(agent, state["low"], state["high"]), tuple(torch.zeros(1, size) for size in state["sensors"]), path, dynamo=False, opset_version=9,
            input_names=inputs, output_names=Exported.outputs, dynamic_axes={name: {0: "batch"} for name in (*inputs, *Exported.outputs[:2])},
        )  # fmt: skip


class Progress:
    """One live line: steps, return, speed, where the time goes, time left. Without a terminal a plain line every few seconds."""

    def __init__(self, total, done):
        self.total, self.done, self.live, self.start, self.due = total, done, sys.stdout.isatty(), time.time(), 0.0
        self.success = None  # share of the last episodes, where the env tells

    def show(self, steps, returns, seconds, restarts, last=False):
        now = time.time()
        if now < self.due and not last:
            return
        self.due, sps = now + (0.2 if self.live else 5), (steps - self.done) / (now - self.start)
        mean = f"{np.mean(returns):9.2f}" if returns else "        -"
        shares = " ".join(f"{name} {x / sum(seconds.values()):3.0%}" for name, x in seconds.items())
        left = time.strftime("%H:%M:%S", time.gmtime(max(0, self.total - steps) / max(sps, 1e-9)))
        line = f"{steps:>10,} steps {steps / self.total:4.0%}  return {mean}  {sps:6.0f} SPS  {shares}  {left} left"
        line += f"  success {self.success:.0%}" if self.success is not None else ""
        line += f"  {restarts} restart(s)" if restarts else ""
        print(f"\r{line}\033[K" if self.live else line, end="" if self.live and not last else "\n", flush=True)


def check(args):
    """Refuse what can't work, before any work starts."""
    for name in ("num_envs", "num_players", "total_timesteps", "learning_rate", "buffer_size", "batch_size", "policy_frequency", "alpha", "checkpoint_interval",
                 "keep_checkpoints", "video_interval", "eval_episodes"):  # fmt: skip
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    for name in ("gamma", "tau"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be between 0 and 1")
    for name in ("learning_starts", "updates_per_step", "max_restarts"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")
    if args.total_timesteps <= args.learning_starts and args.updates_per_step:
        raise ValueError(f"--total-timesteps {args.total_timesteps}: nothing would be learned before --learning-starts {args.learning_starts}")
    if args.num_envs > 1 and (args.unity_path or args.env_id in SCENES):
        raise ValueError(f"--num-envs {args.num_envs}: a Unity scene has as many envs as it has agents; more come with --num-players")
    if args.compile and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
        raise ValueError("--compile needs a C++ compiler, on Debian and Ubuntu: apt-get install g++")
    if args.track and not importlib.util.find_spec("wandb"):
        raise ValueError("--track needs Weights & Biases: pip install wandb")
    if args.capture_video and args.unity_path:
        raise ValueError("--capture-video films gymnasium envs and bundled scenes; Unity's own Recorder package films a Unity build")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(args.device.split(":")[0], False):
        raise ValueError(f"--device {args.device}: not on this machine, which has {', '.join(k for k, v in available.items() if v)}")


def train(args, resumed=None):
    """resumed: path and content of a checkpoint to go on from."""
    check(args)
    # Players and EnvPool can't be put back into the middle of an episode: they begin new ones, with another seed.
    envs, how = make_envs(args, args.seed + (resumed[1]["global_step"] if resumed else 0))
    with closing(envs):
        stop = []

        def ask_to_stop(number, _):
            stop.append(number)
            signal.signal(number, handlers[number])  # the next one ends it at once

        handlers = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            run(args, envs, how, resumed, stop)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run(args, envs, how, resumed, stop):
    if not isinstance(envs.single_action_space, gym.spaces.Box):
        raise ValueError(f"{args.env_id} has actions {envs.single_action_space}: this script takes continuous ones; ppo_pixel.py takes discrete ones")
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        raise ValueError(f"{args.env_id} has observations {envs.single_observation_space}: this script takes vectors; ppo_pixel.py takes images")
    if not np.isfinite([envs.single_action_space.low, envs.single_action_space.high]).all():
        raise ValueError(f"{args.env_id} has actions without bounds: SAC squashes them between bounds; ppo_continuous_multiagent.py takes them")
    n = envs.num_envs
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    if args.buffer_size < max(n, args.batch_size):
        raise ValueError(f"--buffer-size {args.buffer_size}: must hold a batch of {args.batch_size}, and a transition of each of {n} agents")
    needed = (args.buffer_size + n) * (4 * obs_dim + 4 * action_dim + 24)
    if needed > available_memory():
        raise ValueError(f"--buffer-size {args.buffer_size} needs {needed / 2**20:,.0f} MiB, and {available_memory() / 2**20:,.0f} are free: give a smaller one")
    if resumed and args.total_timesteps <= resumed[1]["global_step"]:
        raise ValueError(f"{resumed[0]} has {resumed[1]['global_step']} decisions already: give a larger --total-timesteps to go on")
    env_actions = np.zeros((n, *envs.single_action_space.shape), envs.single_action_space.dtype)
    flat_actions, low, high = (x.reshape(-1, action_dim) for x in (env_actions, envs.single_action_space.low, envs.single_action_space.high))
    torch.set_num_threads(1 if args.batch_size * max(args.hidden_sizes) < 2**16 else THREADS)  # small products are not worth a second thread
    if sys.platform == "linux":  # what an update frees stays at hand (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD): otherwise the next one gets it back page by page
        for option, size in ((-3, 2**25), (-1, 2**30)):
            ctypes.CDLL(None).mallopt(option, size)
    overlap = args.overlap and hasattr(envs, "step_async")

    folder = resumed[0].parent if resumed else Path("runs", f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{int(time.time())}")
    if not resumed:
        if folder.exists():
            raise ValueError(f"{folder} exists already: wait a second, or give another --exp-name")
        folder.mkdir(parents=True)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "gymnasium", "mujoco", "mlagents-envs")}
        git = shutil.which("git") and subprocess.run([shutil.which("git"), "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
        config = {"args": asdict(args), "python": sys.version, "versions": versions, "commit": git.stdout.strip() or None if git else None}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    if args.track:
        import wandb

        wandb.init(project=args.wandb_project_name, sync_tensorboard=True, config=vars(args), id=folder.name, resume="allow", save_code=True)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder, purge_step=resumed[1]["global_step"] + 1 if resumed else None)  # what came after the checkpoint comes again
    if not resumed:
        writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{key}|{value}|" for key, value in vars(args).items()))
    how += ", updates while they simulate" if overlap else ""
    print(f"{folder}: {how}; a buffer of {needed / 2**20:,.0f} MiB; tensorboard --logdir runs", flush=True)

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    agent = Agent(obs_dim, action_dim, args).to(device)
    flat = []  # policy and log alpha, critics, target critics: the agent's weights are parts of these three vectors
    for parameters in ([*agent.actor.parameters(), agent.log_alpha], list(agent.critics.parameters()), list(agent.targets.parameters())):
        flat.append(nn.utils.parameters_to_vector(parameters).detach())
        nn.utils.vector_to_parameters(flat[-1], parameters)
    updates = [make_update(agent, args, with_policy) for with_policy in (True, False)]
    optimizer = [[torch.zeros_like(x) for _ in range(2)] for x in flat[:2]]  # Adam's averages
    try:
        buffer = Buffer(args.buffer_size, n, obs_dim, action_dim)
    except MemoryError as error:
        raise ValueError(f"--buffer-size {args.buffer_size}: {error}; give a smaller one") from None
    episode_return, episode_length, learn_from = np.zeros(n), np.zeros(n, int), args.learning_starts
    num_updates, owed, normalized, global_step, best, recent, since_checkpoint, next_obs = 0, 0.0, 0, 0, -math.inf, [], [], None
    envs.single_action_space.seed(args.seed)
    if resumed:
        state = resumed[1]
        agent.load_state_dict(state["agent"])
        optimizer = [[x.to(device) for x in averages] for averages in state["optimizer"]]
        (num_updates, owed, normalized), global_step, best, recent = (state[key] for key in ("updates", "global_step", "best", "recent"))
        set_random_state(state["random"])
        envs.single_action_space.np_random.bit_generator.state = state["random"]["actions"]
        if state["buffer"] and (resumed[0].parent / state["buffer"]).exists():
            try:
                buffer.restore(torch.load(resumed[0].parent / state["buffer"], map_location="cpu", weights_only=True))
            except Exception:
                raise ValueError(f"{resumed[0].parent / state['buffer']} is not a whole buffer: delete it, and the run goes on with a new one") from None
        else:
            learn_from, normalized = global_step + args.learning_starts, 0
            print(f"The buffer was not saved: {args.learning_starts} decisions of the policy fill a new one before learning goes on", flush=True)
        if state["envs"] is not None:
            episode_return, episode_length = (np.array(x) for x in state["episodes"])
            next_obs, infos = envs.restore(state["envs"]), {}
        else:
            buffer.drop(range(n))
    if next_obs is None:
        next_obs, infos = envs.reset(seed=args.seed + global_step)

    def keep(with_buffer=args.save_buffer):
        nonlocal best, since_checkpoint
        writer.flush()
        mean_return = float(np.mean(since_checkpoint)) if since_checkpoint else -math.inf
        better, best, since_checkpoint = mean_return > best, max(mean_return, best), []
        state = {"format": FORMAT, "args": asdict(args), "agent": agent.state_dict(), "optimizer": optimizer, "updates": (num_updates, owed, normalized)}
        state |= {"global_step": global_step, "best": best, "recent": recent, "buffer": f"buffer_{global_step}.pt" if with_buffer else None}
        state |= {"random": random_state() | {"actions": envs.single_action_space.np_random.bit_generator.state}}
        state |= {"envs": envs.state() if hasattr(envs, "state") else None, "episodes": (episode_return.tolist(), episode_length.tolist())}
        state |= {"sensors": getattr(envs, "sensors", [obs_dim]), "low": torch.as_tensor(low), "high": torch.as_tensor(high)}
        try:
            if with_buffer:
                save(folder / state["buffer"], buffer.state())
            for name in ["checkpoint.pt"] + ["best.pt"] * better + [f"checkpoint_{global_step}.pt"] * (args.keep_checkpoints > 1):
                save(folder / name, state)
            for old in sorted(folder.glob("checkpoint_*.pt"), key=os.path.getmtime)[: -args.keep_checkpoints]:
                old.unlink()
            for old in folder.glob("buffer_*.pt"):  # only the last checkpoint has its buffer
                if old.name != state["buffer"]:
                    old.unlink()
        except OSError as error:
            print(f"\nThe checkpoint could not be saved, the one before it is still there: {error}", flush=True)

    def show_policy():
        (folder / "videos").mkdir(exist_ok=True)
        policy = agent.policy(deterministic=True)
        film(folder / "videos" / f"{global_step}.mp4", lambda obs: scale(policy(obs), low, high), args.env_id, args.seed, unity_settings(args))

    def learn():
        nonlocal owed, num_updates
        while owed >= 1:
            batch = [torch.as_tensor(x, device=device) for x in buffer.sample(args.batch_size)]
            noise, next_noise = torch.randn_like(batch[1]), torch.randn_like(batch[1])
            update = updates[num_updates % args.policy_frequency > 0]  # CleanRL differs (7)
            numbers = adam_numbers(num_updates + 1, args.learning_rate) + adam_numbers(num_updates // args.policy_frequency + 1, args.learning_rate)
            metrics.append(update(*flat, *optimizer, torch.tensor(numbers, device=device), *batch, noise, next_noise))
            owed, num_updates = owed - 1, num_updates + 1

    def give_up():
        nonlocal num_updates
        for x, good in zip(flat, last_good[0], strict=True):
            x.copy_(good)
        optimizer[:], num_updates = last_good[1:]
        keep(with_buffer=False)
        raise FloatingPointError(f"decision {global_step}: a loss or gradient is not a number. The weights before it are in {folder}/checkpoint.pt")

    if args.compile:
        start = time.time()
        example = [torch.zeros((args.batch_size, *shape), device=device) for shape in ((obs_dim,), (action_dim,), (), (obs_dim,), (), (action_dim,), (action_dim,))]
        for update in updates[: 1 if args.policy_frequency == 1 else 2]:
            vectors, averages = deepcopy((flat, optimizer))
            update(*vectors, *averages, torch.ones(4, device=device), *example)
        print(f"Compiled the update in {time.time() - start:.1f} s", flush=True)

    everybody = np.arange(n)

    def asking(infos):
        ready = infos.get("ready")  # gymnasium's envs have no such key: all are ready
        return everybody if ready is None or ready.all() else np.flatnonzero(ready)

    def pick(x, who):
        return x if who is everybody else x[who]

    opened = np.zeros(n, bool)  # has its action and waits for what comes of it
    progress, seconds = Progress(args.total_timesteps, global_step), {"env": 0.0, "act": 0.0, "learn": 0.0}
    who, act = asking(infos), agent.policy()
    buffer.open(who, np.asarray(pick(next_obs, who), np.float32).reshape(len(who), obs_dim))
    if args.capture_video and not resumed:
        show_policy()
    metrics, returns, successes, last_good, last = [], [], [], deepcopy((flat, optimizer, num_updates)), False
    start = time.perf_counter()
    while global_step < args.total_timesteps and not stop:
        if global_step < args.learning_starts:
            actions = np.stack([envs.single_action_space.sample() for _ in who]).reshape(len(who), action_dim)
            actions = (actions - 0.5 * (high + low)) / (0.5 * (high - low))
        else:
            actions = act(pick(buffer.obs[buffer.size : buffer.size + n], who))
            if not np.isfinite(actions).all():
                give_up()
        buffer.act(who, actions)
        flat_actions[who] = scale(actions, low, high)
        now = time.perf_counter()
        seconds["act"] += now - start
        try:
            if overlap:
                envs.step_async(env_actions)
                start = time.perf_counter()
                seconds["env"] += start - now
                learn()
                now = time.perf_counter()
                seconds["learn"] += now - start
                next_obs, reward, terminated, truncated, infos = envs.step_wait()
            else:
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
        except UnityPlayerError:
            keep()
            raise
        start = time.perf_counter()
        seconds["env"] += start - now

        acted, who = who, asking(infos)
        if acted is everybody and who is everybody and "restarted" not in infos:
            closes = everybody
        else:  # closed by the agent's next decision or by its end
            opened[acted] = True
            if "restarted" in infos:  # a lost player's agents: these decisions will never be closed
                buffer.drop(np.flatnonzero(infos["restarted"]))
                opened[infos["restarted"]], episode_return[infos["restarted"]], episode_length[infos["restarted"]] = False, 0.0, 0
            answered = terminated | truncated
            answered[who] = True
            closes = np.flatnonzero(opened & answered)
            opened[closes] = False
        ended = closes[pick(terminated | truncated, closes)]
        finals = {slot: np.asarray(infos["final_obs"][slot], np.float32).ravel() for slot in ended}
        successes += infos.get("is_success", {}).values()
        buffer.close(closes, pick(reward, closes), pick(terminated, closes), finals)
        buffer.open(who, np.asarray(pick(next_obs, who), np.float32).reshape(len(who), obs_dim))
        episode_return[closes] += pick(reward, closes)
        episode_length[closes] += 1
        for slot in ended:
            returns.append((episode_return[slot], episode_length[slot]))
            episode_return[slot], episode_length[slot] = 0.0, 0
        previous_step, global_step = global_step, global_step + len(closes)
        if global_step > learn_from:
            owed += args.updates_per_step * len(closes)  # SB3 and CleanRL differ (1)
        if args.norm_obs and buffer.added - normalized >= REPORT:
            new = np.arange(max(normalized, buffer.added - buffer.size), buffer.added) % buffer.size
            agent.obs_rms.update(torch.as_tensor(buffer.obs[new], device=device))
            normalized = buffer.added
        now = time.perf_counter()
        seconds["act"] += now - start
        if not overlap:
            learn()
        start = time.perf_counter()
        seconds["learn"] += start - now
        progress.show(global_step, recent, seconds, getattr(envs, "restarts", 0))

        last = global_step >= args.total_timesteps or len(stop) > 0
        if not last and global_step // REPORT == previous_step // REPORT:
            continue
        means = torch.stack([x for x in metrics if len(x) == len(metrics[0])]).mean(0).tolist() if metrics else []
        if not np.isfinite(means).all() or not all(torch.isfinite(x).all() for x in flat):
            give_up()
        last_good = deepcopy((flat, optimizer, num_updates))
        names = ("qf_loss", "qf_values", "alpha", "actor_loss", "entropy")
        scalars = {f"losses/{name}": x for name, x in zip(names, means, strict=False)}
        scalars["charts/SPS"] = (global_step - progress.done) / (time.time() - progress.start)
        if returns:
            recent = [float(r) for r, _ in returns]
            since_checkpoint += recent
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(returns, axis=0)
        if successes:
            scalars["charts/success_rate"] = progress.success = np.mean(successes)
        scalars |= {f"time/{name}": x / sum(seconds.values()) for name, x in seconds.items()}
        for name, x in scalars.items():
            writer.add_scalar(name, x, global_step)
        metrics, returns, successes = [], [], []
        progress.show(global_step, recent, seconds, getattr(envs, "restarts", 0), last)
        if last or global_step // args.checkpoint_interval > previous_step // args.checkpoint_interval:
            keep()
        if args.capture_video and (last or global_step // args.video_interval > previous_step // args.video_interval):
            show_policy()
        start = time.perf_counter()
    if not last:  # asked to stop at the last moment
        keep()
    writer.close()
    if global_step < args.total_timesteps:
        print(f"Stopped after {global_step} decisions. To go on: python {Path(sys.argv[0]).name} --resume {folder}")
    else:
        print(f"Saved {folder}/checkpoint.pt. To see what it does: python {Path(sys.argv[0]).name} --evaluate {folder}")


def use(args, path, state):
    """Export, or evaluate, an agent that was saved: its statistics come with it, and nothing changes them."""
    check(args)
    obs_dim, action_dim = len(state["agent"]["obs_rms.mean"]), state["low"].numel()
    agent = Agent(obs_dim, action_dim, args)
    agent.load_state_dict(state["agent"])
    if args.export:
        target = path.with_name("policy.onnx")
        export(agent, state, target)
        print(f"Wrote {target}: drop it into a Unity project, and into the Model field of its Behavior Parameters")
        return
    agent.to(args.device)
    with closing(make_envs(replace(args, max_restarts=0), args.seed)[0]) as envs:
        there = math.prod(envs.single_observation_space.shape or [0]), math.prod(envs.single_action_space.shape or [0])
        if there != (obs_dim, action_dim):
            raise ValueError(f"{path} has {obs_dim} observations and {action_dim} actions, the env has {there[0]} and {there[1]}")
        returns, lengths, successes = evaluate(agent, envs, args.eval_episodes, args.seed)
    steps = f"after {state['global_step']:,} decisions, {len(returns)} episodes of {lengths.mean():.0f} decisions on average"
    print(f"{path} {steps}: return {returns.mean():.2f} ± {returns.std():.2f}, from {returns.min():.2f} to {returns.max():.2f}", end="")
    print("" if np.isnan(successes).any() else f"; success {successes.mean():.1%}")
    if args.capture_video:
        video = path.parent / "videos" / "evaluation.mp4"
        video.parent.mkdir(exist_ok=True)
        policy, low, high = agent.policy(deterministic=True), state["low"].numpy(), state["high"].numpy()
        film(video, lambda obs: scale(policy(obs), low, high), args.env_id, args.seed, unity_settings(args))
        print(f"Wrote {video}")


def main():
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # what gives the defaults first, so that --help shows what would be used
    for name in ("--env-id", "--unity-path", "--resume", "--evaluate", "--export"):
        peek.add_argument(name, name.replace("-", "_").replace("__", "--"))
    given = peek.parse_known_args()[0]
    env_id, saved = given.env_id or Args.env_id, [x for x in (given.resume, given.evaluate, given.export) if x]
    try:
        if len(saved) > 1:
            raise ValueError("--resume, --evaluate and --export: one at a time")
        if saved:
            path, state = load(saved[0])
            default = replace(Args(**state["args"]), resume=given.resume, evaluate=given.evaluate, export=given.export)
        else:
            default = Args(env_id=env_id, **PRESETS.get(env_id.removeprefix("envs:"), {}))
            if given.unity_path == "editor" and default.num_players > 1:  # there is only one
                default = replace(default, num_players=1)
        args = tyro.cli(Args, description=__doc__, default=default)
        if args.resume:
            for name in sorted({field.name for field in fields(Args)} - FREE):
                if getattr(args, name) != getattr(default, name):
                    option = f"--{name.replace('_', '-')}"
                    raise ValueError(f"{option} {getattr(args, name)}: the run has {option} {getattr(default, name)} and goes on with it; leave it out")
            train(args, (path, state))
        elif args.evaluate or args.export:
            use(args, path, state)
        else:
            train(args)
    except (ValueError, UnityPlayerError, FloatingPointError) as error:
        raise SystemExit(f"\n{error}") from None


if __name__ == "__main__":
    main()
