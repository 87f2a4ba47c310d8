"""Proximal policy optimization for continuous actions, one policy for all agents: Unity scenes and gymnasium envs.

    python ppo_continuous_multiagent.py --env-id Crawler                                    a bundled scene: no Unity needed
    python ppo_continuous_multiagent.py --env-id Crawler --unity-path ./Builds/Crawler      the same settings on your Unity build
    python ppo_continuous_multiagent.py --env-id HalfCheetah-v5 --num-envs 8 --compile      any gymnasium env with continuous actions
    python ppo_continuous_multiagent.py --evaluate runs/NAME --capture-video                also --resume runs/NAME, --export runs/NAME

One row per decision. Agents that decide at their own pace fill no (num_steps, num_envs) rectangle, so rows are gathered as they come and then
ordered agent by agent: an agent's rows stand together, in time. A rollout ends when batch_size rows are closed. An agent's open row is its
bootstrap, and the first row of its next rollout. With gymnasium envs this is the usual rectangle, and SB3's numbers.

What differs from Stable-Baselines3 (SB3) and from CleanRL; the numbers stand at the lines:
 1. SB3's VecNormalize and gymnasium's wrappers update their statistics at every step. Here they are part of the agent and change between
    iterations only: what acts is what learns, the first ratio is 1, and a saved agent carries them.
 2. SB3's loss has vf_coef * mse, CleanRL's and ours vf_coef * 0.5 * mse: our --vf-coef 1.0 is SB3's 0.5.
 3. SB3's value clipping takes the clipped error alone, CleanRL's and ours the larger one; SB3 and we have it off by default.
 4. SB3 anneals from the progress after the rollout (the last update has a rate of 0), CleanRL and we from the progress before it.
 5. CleanRL treats a time limit as a death. SB3 and we bootstrap with the value of the final observation.
 6. CleanRL shuffles time by time and in place; SB3 and we draw a fresh permutation of the rows agent by agent.
 7. CleanRL checks the KL after an epoch; SB3 and we before each step, against 1.5 times the target.
 8. Adam and the gradient's norm work on one flat vector, log-probs are computed after the rollout in one batch, and GAE in double precision:
    sums in another order, so parity with SB3 holds to rounding and not to the bit.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads are for larger products than a policy's

import argparse
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
    exp_name: str = "ppo_continuous_multiagent"
    """part of the run's name"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    wandb_project_name: str = "unity-mujoco-rl"
    """the project's name there"""
    device: str = "cpu"
    """cpu, cuda or mps: where rollout and update live"""
    compile: bool = False
    """torch.compile the update: half a minute at the first start, then several times faster on small networks"""
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
    """of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    num_steps: int = 2048
    """decisions per agent and iteration; times the agents it is the batch size"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """how often each row is used; 0 collects without learning"""
    gamma: float = 0.99
    """discount per decision"""
    gae_lambda: float = 0.95
    """how far the advantage estimate looks: 0 one step, 1 to the end"""
    clip_coef: float = 0.2
    """the surrogate is clipped at ratios of 1 - and 1 + this"""
    norm_adv: bool = True
    """normalise advantages in each minibatch"""
    clip_vloss: bool = False
    """clip the value's change by clip_coef too"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """the gradient is scaled down to this norm"""
    target_kl: float | None = None
    """stop an iteration's updates when the policy has moved 1.5 times this far"""
    norm_obs: bool = True
    """normalise observations by their running mean and variance"""
    norm_reward: bool = True
    """scale rewards by the running std of the discounted return"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the layers of policy and value network"""
    activation: Literal["tanh", "silu"] = "tanh"
    """between the layers; silu is what ML-Agents' networks have, there called swish"""
    logstd_init: float = 0.0
    """log std of the actions at the start"""


# The reachers': short horizon, little noise, and an activation that is good at products, which kinematics is made of.
REACHER = dict(num_envs=8, num_steps=256, num_minibatches=16, learning_rate=1e-3, gamma=0.95, hidden_sizes=(128, 128), activation="silu", logstd_init=-0.7)
# ML-Agents' official settings for its scenes; whatever the command line says wins. Its policies send a third of their action, so that a std of a third is
# theirs of 1. 3DBall's buffer is half the official one: it learns in half the decisions. Crawler's is filled by two players at once.
PRESETS = {
    "3DBall": dict(
        total_timesteps=500_000, num_steps=512, num_minibatches=96, update_epochs=3, gae_lambda=0.99, ent_coef=1e-3, hidden_sizes=(128, 128)
    ),
    "Crawler": dict(
        total_timesteps=10_000_000, num_players=2, num_steps=1024, num_minibatches=10, update_epochs=3, gamma=0.995, ent_coef=5e-3,
        hidden_sizes=(512, 512, 512), activation="silu", logstd_init=-1.1,
    ),
    "Reacher2Dof-v0": dict(total_timesteps=300_000, **REACHER),
    "Reacher3Dof-v0": dict(total_timesteps=400_000, **REACHER),
    "Reacher6Dof-v0": dict(total_timesteps=500_000, **REACHER),
    "ReacherPlane-v0": dict(total_timesteps=200_000, **REACHER),
}  # fmt: skip


FORMAT = "ppo_continuous_multiagent 2"  # of checkpoints
THREADS = torch.get_num_threads()  # as many as there are cores, or OMP_NUM_THREADS
FREE = {"resume", "total_timesteps", "unity_path", "base_port", "time_scale", "max_restarts", "track", "wandb_project_name", "device", "compile"}
FREE |= {"checkpoint_interval", "keep_checkpoints", "capture_video", "video_interval"}  # what may be another when a run goes on


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


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(sizes, activation, out, std):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [layer_init(nn.Linear(a, b)), {"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()]
    return nn.Sequential(*layers, layer_init(nn.Linear(sizes[-1], out), std))


class Agent(nn.Module):
    """What is saved and put to use: the statistics of the observations are part of it."""

    def __init__(self, obs_dim, action_dim, args):
        super().__init__()
        sizes = (obs_dim, *args.hidden_sizes)
        self.actor_logstd = nn.Parameter(torch.full((action_dim,), args.logstd_init))
        self.actor_mean = mlp(sizes, args.activation, action_dim, std=0.01)
        self.critic = mlp(sizes, args.activation, 1, std=1.0)
        self.norm_obs, self.activation = args.norm_obs, args.activation
        self.obs_rms = Normalizer(obs_dim)

    def normalize(self, obs):
        if not self.norm_obs:
            return obs
        return ((obs - self.obs_rms.shift) * self.obs_rms.scale).clamp(-10, 10)

    def policy(self, deterministic=False):
        """A function from observations to actions as arrays, not clipped: the env gets them clipped, the update as they are.

        On a CPU it is written out in numpy: for a few observations and a small network torch's calls take three times as long.
        """
        std, device = self.actor_logstd.detach().exp(), self.actor_logstd.device
        if device.type != "cpu":

            @torch.inference_mode()
            def act(obs):
                mean = self.actor_mean(self.normalize(torch.as_tensor(obs, device=device)))
                return (mean if deterministic else mean + std * torch.randn_like(mean)).cpu().numpy()

            return act
        linear = [layer for layer in self.actor_mean if isinstance(layer, nn.Linear)]
        layers = [(np.ascontiguousarray(layer.weight.detach().numpy().T), layer.bias.detach().numpy()) for layer in linear]
        shift, scale, std = self.obs_rms.shift.numpy(), self.obs_rms.scale.numpy(), std.numpy()
        if self.norm_obs:  # the first layer does it
            lowest, highest, (weight, bias) = shift - 10 / scale, shift + 10 / scale, layers[0]
            layers[0] = scale[:, None] * weight, bias - (shift * scale) @ weight

        def act(obs):
            x = obs
            if self.norm_obs:
                x = np.maximum(np.minimum(obs, highest), lowest)
            for weight, bias in layers[:-1]:
                x = x @ weight
                x += bias
                if self.activation == "tanh":
                    np.tanh(x, out=x)
                else:
                    x /= 1 + np.exp(-x)
            x = x @ layers[-1][0]
            x += layers[-1][1]
            if not deterministic:
                x += std * torch.randn(x.shape).numpy()
            return x

        return act

    def forward(self, normalized_obs, action):
        """Log-probs of the actions, the entropy (the same for all observations), values."""
        z = (action - self.actor_mean(normalized_obs)) * torch.exp(-self.actor_logstd)
        logprob = (-0.5 * z**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)
        entropy = (self.actor_logstd + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprob, entropy, self.critic(normalized_obs).flatten()


def agent_by_agent(slots, closing, n):
    """Order rows, and what closed them, agent by agent, each agent's in time: its k-th closing message closes its k-th row.

    Agents that decide at their own pace fill no (num_steps, num_envs) rectangle, but each agent's decisions are in order. Returns the order of the rows,
    which of them are closed, and the order of the closing messages, which is the order of the closed rows.
    """
    order = np.argsort(slots, kind="stable")
    count = np.bincount(slots, minlength=n)
    rank = np.arange(len(slots)) - np.repeat(np.cumsum(count) - count, count)
    return order, rank < np.bincount(closing, minlength=n)[slots[order]], np.argsort(closing, kind="stable")


def gae(rewards, values, next_values, goes_on, gamma, gae_lambda):
    """One backward walk over the rows, agent by agent: no special case for ends, for the rollout's last step, or for the number of agents.

    next_values: value of the agent's next row, of the final observation if truncated, 0 if terminated; goes_on: the next row is the episode's next
    and is closed, so that its advantage is known.
    """
    advantages, advantage = [0.0] * len(rewards), 0.0
    for i in range(len(rewards) - 1, -1, -1):
        advantage = rewards[i] + gamma * next_values[i] - values[i] + (gamma * gae_lambda * advantage if goes_on[i] else 0.0)
        advantages[i] = advantage
    return advantages


def adam_numbers(step, lr):
    """Adam's learning rate and bias corrections, worked out once and not at every weight, as a compiled kernel would."""
    return lr / (1 - 0.9**step), 1 / math.sqrt(1 - 0.999**step)


def make_update(agent, args):
    """One minibatch: loss, gradient, clipping and Adam on one flat vector of all parameters, so that it can be compiled whole."""
    names, shapes, sizes = zip(*((name, p.shape, p.numel()) for name, p in agent.named_parameters()), strict=True)

    def update(flat, exp_avg, exp_avg_sq, numbers, mb_inds, *batch):
        obs, actions, logprobs, advantages, returns, values = (x[mb_inds] for x in batch)
        flat = flat.detach().requires_grad_()
        parameters = {name: part.view(shape) for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True)}
        newlogprob, entropy, newvalue = functional_call(agent, parameters, (obs, actions))
        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        if args.norm_adv and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
        v_loss = (newvalue - returns) ** 2
        if args.clip_vloss:  # SB3 differs (3)
            v_clipped = values + (newvalue - values).clamp(-args.clip_coef, args.clip_coef)
            v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
        v_loss = 0.5 * v_loss.mean()  # SB3 differs (2)
        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
        (grad,) = torch.autograd.grad(loss, flat)
        with torch.no_grad():
            norm = grad.norm()
            grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            approx_kl = (ratio - 1 - logratio).mean()
            new_exp_avg = exp_avg + 0.1 * (grad - exp_avg)
            new_exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * grad**2
            new_flat = flat - numbers[0] * new_exp_avg / (new_exp_avg_sq.sqrt() * numbers[1] + 1e-5)
            metrics = torch.stack([pg_loss, v_loss, entropy, approx_kl, ((ratio - 1).abs() > args.clip_coef).float().mean(), norm, ratio[0]])
        return new_flat.detach(), new_exp_avg, new_exp_avg_sq, metrics.detach()

    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        update.__code__ = update.__code__.replace()  # a copy: torch keeps what it compiles by the code, and without guards would take it for another's
        # The shapes are the same for ever, and what calls the kernels can be C++ too: for so small a network Python takes as long as they do.
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
            actions[ready] = np.clip(mean.reshape(-1, *space.shape), space.low, space.high)
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

    def clip(self, action):
        if len(self.low.unique()) == len(self.high.unique()) == 1:
            return action.clamp(self.low.flatten()[0].item(), self.high.flatten()[0].item())
        return torch.min(torch.max(action, self.low), self.high)

    def forward(self, *sensors):
        mean = self.agent.actor_mean(self.agent.normalize(torch.cat(sensors, 1)))
        sampled = mean + self.agent.actor_logstd.exp() * torch.randn_like(mean)
        return self.clip(sampled), self.clip(mean), torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([float(self.low.numel())])


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
    for name in ("num_envs", "num_players", "num_steps", "num_minibatches", "total_timesteps", "learning_rate", "max_grad_norm", "checkpoint_interval",
                 "keep_checkpoints", "video_interval", "eval_episodes"):  # fmt: skip
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be between 0 and 1")
    for name in ("clip_coef", "ent_coef", "vf_coef", "update_epochs", "max_restarts"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")
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
        raise ValueError(f"{args.env_id} has actions {envs.single_action_space}: this script takes continuous ones; with images, ppo_pixel.py takes discrete ones")
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        raise ValueError(f"{args.env_id} has observations {envs.single_observation_space}: this script takes vectors; ppo_pixel.py takes images")
    n, batch_size = envs.num_envs, envs.num_envs * args.num_steps
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    if batch_size % args.num_minibatches:
        raise ValueError(f"--num-minibatches {args.num_minibatches} does not divide the batch of {n} x {args.num_steps} = {batch_size} decisions")
    if args.total_timesteps < batch_size:
        raise ValueError(f"--total-timesteps {args.total_timesteps}: less than one batch of {n} x {args.num_steps} = {batch_size} decisions")
    minibatch_size, num_iterations = batch_size // args.num_minibatches, args.total_timesteps // batch_size
    if resumed and num_iterations <= resumed[1]["iteration"]:
        raise ValueError(f"{resumed[0]} has {resumed[1]['global_step']} decisions already: give a larger --total-timesteps to go on")
    env_actions = np.zeros((n, *envs.single_action_space.shape), envs.single_action_space.dtype)
    flat_actions, low, high = (x.reshape(-1, action_dim) for x in (env_actions, envs.single_action_space.low, envs.single_action_space.high))
    # Small products are not worth a second thread: waking it costs more than it computes. And while agents act, the players need the cores.
    learn_threads = 1 if minibatch_size * max(args.hidden_sizes) < 2**17 else THREADS

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
    print(f"{folder}: {how}; batches of {batch_size}, minibatches of {minibatch_size}; tensorboard --logdir runs", flush=True)

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    agent = Agent(obs_dim, action_dim, args).to(device)
    return_rms = Normalizer()
    update = make_update(agent, args)
    flat = nn.utils.parameters_to_vector(agent.parameters()).detach()
    optimizer, num_updates = [torch.zeros_like(flat), torch.zeros_like(flat)], 0  # Adam's two averages and its steps
    discounted, episode_return, episode_length = [0.0] * n, [0.0] * n, [0] * n
    iteration, global_step, best, recent, since_checkpoint, next_obs = 0, 0, -math.inf, [], [], None
    if resumed:
        state = resumed[1]
        agent.load_state_dict(state["agent"])
        return_rms.load_state_dict(state["return_rms"])
        flat = nn.utils.parameters_to_vector(agent.parameters()).detach()
        *optimizer, num_updates = *(x.to(device) for x in state["optimizer"][:2]), state["optimizer"][2]
        iteration, global_step, best, recent = (state[key] for key in ("iteration", "global_step", "best", "recent"))
        set_random_state(state["random"])
        if state["envs"] is not None:
            discounted, episode_return, episode_length = state["episodes"]
            next_obs, infos = envs.restore(state["envs"]), {}
    if next_obs is None:
        next_obs, infos = envs.reset(seed=args.seed + global_step)

    def keep():
        nonlocal best, since_checkpoint
        writer.flush()
        mean_return = float(np.mean(since_checkpoint)) if since_checkpoint else -math.inf
        better, best, since_checkpoint = mean_return > best, max(mean_return, best), []
        state = {"format": FORMAT, "args": asdict(args), "agent": agent.state_dict(), "return_rms": return_rms.state_dict(), "optimizer": (*optimizer, num_updates)}
        state |= {"iteration": iteration, "global_step": global_step, "best": best, "recent": recent, "random": random_state()}
        state |= {"envs": envs.state() if hasattr(envs, "state") else None, "episodes": (discounted, episode_return, episode_length)}
        state |= {"sensors": getattr(envs, "sensors", [obs_dim]), "low": torch.as_tensor(low), "high": torch.as_tensor(high)}
        try:
            for name in ["checkpoint.pt"] + ["best.pt"] * better + [f"checkpoint_{global_step}.pt"] * (args.keep_checkpoints > 1):
                save(folder / name, state)
            for old in sorted(folder.glob("checkpoint_*.pt"), key=os.path.getmtime)[: -args.keep_checkpoints]:
                old.unlink()
        except OSError as error:
            print(f"\nThe checkpoint could not be saved, the one before it is still there: {error}", flush=True)

    def show_policy():
        (folder / "videos").mkdir(exist_ok=True)
        film(folder / "videos" / f"{global_step}.mp4", agent.policy(deterministic=True), args.env_id, args.seed, unity_settings(args))

    if args.compile:
        start = time.time()
        torch.set_num_threads(learn_threads)  # torch compiles anew when it changes
        example = [torch.zeros((batch_size, *shape), device=device) for shape in ((obs_dim,), (action_dim,), (), (), (), ())]
        update(flat, *optimizer, torch.ones(2, device=device), torch.arange(minibatch_size, device=device), *example)
        print(f"Compiled the update in {time.time() - start:.1f} s", flush=True)

    everybody = np.arange(n)

    def asking(infos):
        ready = infos.get("ready")  # gymnasium's envs have no such key: all are ready
        return everybody if ready is None or ready.all() else np.flatnonzero(ready)

    def pick(x, who):
        return x if who is everybody else x[who]

    opened = np.zeros(n, bool)  # has its action and waits for what comes of it
    open_rows = [np.zeros(0, int), np.zeros((0, obs_dim), np.float32), np.zeros((0, action_dim), np.float32)]  # of the last iteration: who, obs, action
    progress, seconds = Progress(num_iterations * batch_size, global_step), {"env": 0.0, "act": 0.0, "learn": 0.0}
    who, last = asking(infos), False
    if args.capture_video and not resumed:
        show_policy()
    start = time.perf_counter()
    while iteration < num_iterations and not stop:
        lr = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)  # SB3 differs (4)
        torch.set_num_threads(1)
        act = agent.policy()
        slots, obs, actions = ([rows] for rows in open_rows)
        answers, rewards, terminations, truncations, finals, lost, successes, num_closed = [], [], [], [], {}, [], [], 0
        while num_closed - len(lost) < batch_size:
            slots.append(who)
            obs.append(np.asarray(pick(next_obs, who), np.float32).reshape(len(who), obs_dim))
            actions.append(act(obs[-1]))
            flat_actions[who] = np.minimum(np.maximum(actions[-1], low), high)
            now = time.perf_counter()
            seconds["act"] += now - start
            try:
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
            except UnityPlayerError:
                keep()  # as after the last iteration
                raise
            start = time.perf_counter()
            seconds["env"] += start - now

            acted, who = who, asking(infos)
            if acted is everybody and who is everybody and "restarted" not in infos:
                closes = everybody
            else:  # closed by the agent's next decision or by its end
                opened[acted] = True
                restarted = infos.get("restarted", False)  # with their player: these rows will be dropped
                answered = terminated | truncated | restarted
                answered[who] = True
                closes = np.flatnonzero(opened & answered)
                opened[closes] = False
                if restarted is not False:
                    lost.extend(num_closed + np.flatnonzero(restarted[closes]))
            if "final_obs" in infos:
                for k in np.flatnonzero((truncated & ~terminated)[closes]):  # CleanRL differs (5)
                    finals[num_closed + k] = infos["final_obs"][closes[k]]
                successes += infos.get("is_success", {}).values()
            answers.append(closes)
            rewards.append(pick(reward, closes))
            terminations.append(pick(terminated, closes))
            truncations.append(pick(truncated, closes))
            num_closed += len(closes)
            progress.show(global_step + num_closed, recent, seconds, getattr(envs, "restarts", 0))
        global_step += num_closed - len(lost)

        # Rows agent by agent: CleanRL differs (6). Last of each agent stands its open row, whose value is the bootstrap.
        acted = sum(map(len, slots))
        slots, obs = np.concatenate([*slots, who]), np.concatenate([*obs, np.asarray(next_obs[who], np.float32).reshape(len(who), obs_dim)])
        actions = np.concatenate([*actions, np.zeros((len(who), action_dim), np.float32)])
        order, closed, closing_order = agent_by_agent(slots, np.concatenate(answers), n)
        open_rows = [x[np.sort(order[~closed & (order < acted)])] for x in (slots, obs, actions)]
        owner, obs, actions = slots[order], torch.as_tensor(obs[order], device=device), torch.as_tensor(actions[order], device=device)
        row_of = np.zeros(num_closed, int)  # of each closing message
        row_of[closing_order] = np.flatnonzero(closed)
        reward, ended, gone = np.zeros(len(order)), np.zeros(len(order), bool), np.zeros(len(order), bool)
        reward[row_of], ended[row_of] = np.concatenate(rewards), np.concatenate(terminations) | np.concatenate(truncations)
        gone[row_of[lost]] = True
        closed &= ~gone

        # Values and log-probs in one batch, with the weights and statistics that chose the actions: SB3 differs (1, 8).
        torch.set_num_threads(learn_threads)
        with torch.no_grad():
            normalized = agent.normalize(obs)
            logprobs, _, values = agent(normalized, actions)
            value = values.double().cpu().numpy()
            next_values = np.where(closed & ~ended, np.roll(value, -1), 0.0)
            if finals:
                final_obs = np.stack([np.asarray(o, np.float32).ravel() for o in finals.values()])
                final_values = agent.critic(agent.normalize(torch.as_tensor(final_obs, device=device))).flatten()
                next_values[row_of[list(finals)]] = final_values.cpu()
        scaled = np.clip(reward * return_rms.scale.item(), -10, 10) if args.norm_reward else reward
        goes_on = closed & ~ended & np.roll(closed, -1)
        advantages = gae(scaled.tolist(), value.tolist(), next_values.tolist(), goes_on.tolist(), args.gamma, args.gae_lambda)
        returns, discounted_returns = [], []
        for slot, r, end, void in zip(*(x[closed | gone].tolist() for x in (owner, reward, ended, gone)), strict=True):
            if void:
                discounted[slot], episode_return[slot], episode_length[slot] = 0.0, 0.0, 0
                continue
            discounted[slot] = discounted[slot] * args.gamma + r
            discounted_returns.append(discounted[slot])
            episode_return[slot] += r
            episode_length[slot] += 1
            if end:
                returns.append((episode_return[slot], episode_length[slot]))
                discounted[slot], episode_return[slot], episode_length[slot] = 0.0, 0.0, 0

        rows = torch.as_tensor(np.sort(np.delete(row_of, lost)[:batch_size]), device=device)  # agents of mixed periods can close a few more in the last step
        b_advantages, b_values = torch.tensor(advantages, dtype=torch.float32, device=device)[rows], values[rows]
        batch = (normalized[rows], actions[rows], logprobs[rows], b_advantages, b_advantages + b_values, b_values)
        metrics, stopped, last_good = [], False, (*optimizer, num_updates)
        for _ in range(args.update_epochs):
            for mb_inds in torch.as_tensor(np.random.permutation(batch_size), device=device).split(minibatch_size):
                numbers = torch.tensor(adam_numbers(num_updates + 1, lr), device=device)
                *new, mb_metrics = update(flat, *optimizer, numbers, mb_inds, *batch)
                stopped = args.target_kl is not None and float(mb_metrics[3]) > 1.5 * args.target_kl  # CleanRL differs (7)
                if stopped:
                    break
                flat, *optimizer = new
                num_updates += 1
                metrics.append(mb_metrics)
            if stopped:
                break
        metrics = torch.stack(metrics).cpu() if metrics else torch.zeros(1, 7)
        if not torch.isfinite(metrics).all() or not torch.isfinite(flat).all():
            *optimizer, num_updates = last_good  # the agent's weights are those before the update still
            global_step -= num_closed - len(lost)
            keep()
            raise FloatingPointError(f"iteration {iteration + 1}: a loss or gradient is not a number. The state before it is in {folder}/checkpoint.pt")
        nn.utils.vector_to_parameters(flat, agent.parameters())
        agent.obs_rms.update(obs[rows])
        return_rms.update(torch.tensor(discounted_returns))

        now = time.perf_counter()
        seconds["learn"] += now - start
        start = now
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm")
        scalars = {f"losses/{name}": x for name, x in zip(names, metrics.mean(0).tolist(), strict=False)}
        scalars["losses/explained_variance"] = 1 - (b_advantages.var() / (b_advantages + b_values).var()).item()
        scalars["charts/learning_rate"] = lr
        scalars["charts/SPS"] = global_step / (time.time() - progress.start)
        if returns:
            recent = [r for r, _ in returns]
            since_checkpoint += recent
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(returns, axis=0)
        if successes:
            scalars["charts/success_rate"] = progress.success = np.mean(successes)
        scalars |= {f"time/{name}": x / sum(seconds.values()) for name, x in seconds.items()}
        for name, x in scalars.items():
            writer.add_scalar(name, x, global_step)
        previous_step, iteration = global_step - num_closed + len(lost), iteration + 1
        last = iteration == num_iterations or len(stop) > 0
        progress.show(global_step, recent, seconds, getattr(envs, "restarts", 0), last)
        if last or global_step // args.checkpoint_interval > previous_step // args.checkpoint_interval:
            keep()
        if args.capture_video and (last or global_step // args.video_interval > previous_step // args.video_interval):
            show_policy()
        start = time.perf_counter()
    if not last:  # asked to stop at the last moment
        keep()
    writer.close()
    if iteration < num_iterations:
        print(f"Stopped after {global_step} decisions. To go on: python {Path(sys.argv[0]).name} --resume {folder}")
    else:
        print(f"Saved {folder}/checkpoint.pt. To see what it does: python {Path(sys.argv[0]).name} --evaluate {folder}")


def use(args, path, state):
    """Export, or evaluate, an agent that was saved: its statistics come with it, and nothing changes them."""
    check(args)
    obs_dim, action_dim = len(state["agent"]["obs_rms.mean"]), len(state["agent"]["actor_logstd"])
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
        film(video, agent.policy(deterministic=True), args.env_id, args.seed, unity_settings(args))
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
                default = replace(default, num_players=1, num_steps=default.num_steps * default.num_players)
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
