"""Proximal policy optimization from images, or images and vectors, continuous and discrete actions, one policy for all agents: Unity scenes and gymnasium envs.

    python ppo_pixel.py --env-id GridWorld                                                  a bundled scene: no Unity needed
    python ppo_pixel.py --env-id GridWorld --unity-path ./Builds/GridWorld                  the same settings on your Unity build
    python ppo_pixel.py --env-id DummyPixels-v0                                             any gymnasium env that has images
    python ppo_pixel.py --env-id Reacher-v5 --from-pixels --num-workers 2                   any of gymnasium's MuJoCo envs, rendered
    python ppo_pixel.py --evaluate runs/NAME --capture-video                                also --resume runs/NAME, --export runs/NAME

What images change in ppo_continuous_multiagent.py, which explains the rest:
 - An image is stored once, as uint8. A row's observation is the numbers of its last --frame-stack images: they are stacked and scaled when it is used.
 - One encoder an image, channels last; vectors, normalised, join after it; policy and value share all layers but the last. Values and log-probs
   are kept from acting.
 - Two runs with one seed are equal to the byte in one thread, OMP_NUM_THREADS=1; in several, sums of convolutions are rounded differently from run to run.
 - Discrete actions: a head for each branch. A choice that Unity's mask forbids has probability 0, when it is sampled and when it is learned from.
 - The exported model takes an image as float (batch, channel, height, width) from 0 to 1, an input for each sensor in Unity's order: so have the models that
   ML-Agents itself exports, for Barracuda (package 2.x, though its sensors send height, width, channel) and for Sentis (3.x, whose sensors have the channels first). The
   mask is the input action_masks, 1 where a choice is allowed. --frame-stack K wants a sensor with as many Observation Stacks, which begins with black ones.

What differs from Stable-Baselines3 (SB3) and from CleanRL; the numbers stand at the lines:
 1. SB3's VecNormalize and gymnasium's wrappers update their statistics at every step. Here they are part of the agent and change between
    iterations only: what acts is what learns, the first ratio is 1, and a saved agent carries them.
 2. SB3's loss has vf_coef * mse, CleanRL's and ours vf_coef * 0.5 * mse: our --vf-coef 1.0 is SB3's 0.5.
 3. SB3's value clipping takes the clipped error alone, CleanRL's and ours the larger one; SB3 and we have it off by default.
 4. SB3 anneals from the progress after the rollout (the last update has a rate of 0), CleanRL and we from the progress before it.
 5. CleanRL treats a time limit as a death. SB3 and we bootstrap with the value of the final observation.
 6. CleanRL shuffles time by time and in place; SB3 and we draw a fresh permutation of the rows agent by agent.
 7. CleanRL checks the KL after an epoch; SB3 and we before each step, against 1.5 times the target.
 8. Adam and the gradient's norm work on one flat vector, images are laid out with the channels last, and GAE is in double precision:
    sums in another order, so parity with SB3 holds to rounding and not to the bit.
 9. With one image and nothing else the network is SB3's CnnPolicy. Several images, or images and vectors, go into one more layer together, where SB3's
    MultiInputPolicy has two of 64 for the policy and two for the value.
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
from envs.pixels import Filmed, PixelEnvs, WorkerDied, is_mujocos
from envs.vector import FILM_STEPS, make_vec_env
from unity_vec_env import UnityPlayerError


@dataclass
class Args:
    env_id: str = "GridWorld"
    """a bundled scene (GridWorld), a gymnasium id, or module:id"""
    from_pixels: bool = False
    """see what gymnasium renders of a MuJoCo env in place of its observations"""
    image_size: int = 64
    """height and width of what is rendered"""
    frame_stack: int | None = None
    """how many of the last images an observation has; default: 3 with --from-pixels, otherwise 1"""
    grayscale: bool = False
    """see grey images"""
    action_repeat: int = 1
    """how often a gymnasium env gets each action; only the last image is seen"""
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
    num_envs: int = 8
    """how many gymnasium envs to step at once (a Unity scene has as many as it has agents)"""
    num_workers: int = 0
    """how many processes to step gymnasium envs in, several envs in each; 0: in this one"""
    seed: int = 1
    """of the envs, the networks, the actions and the minibatches"""
    exp_name: str = "ppo_pixel"
    """part of the run's name"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    wandb_project_name: str = "unity-mujoco-rl"
    """the project's name there"""
    device: str = "cpu"
    """cpu, cuda or mps: where rollout and update live"""
    compile: bool = False
    """torch.compile the update: some ten seconds at the start"""
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
    num_steps: int = 256
    """decisions per agent and iteration; times the agents it is the batch size"""
    num_minibatches: int = 8
    """minibatches per epoch"""
    update_epochs: int = 4
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
    """normalise vector observations by their running mean and variance"""
    norm_reward: bool = True
    """scale rewards by the running std of the discounted return"""
    encoder: Literal["nature", "impala"] = "nature"
    """three convolutions, as SB3's CnnPolicy has, or IMPALA's residual network"""
    features: int = 512
    """width of the layer behind an encoder, and of the one where several images and vectors come together"""
    logstd_init: float = 0.0
    """log std of the actions at the start"""


# Whatever the command line says wins. GridWorld has the discount and entropy bonus of ML-Agents' official settings.
DUMMY = dict(total_timesteps=100_000, learning_rate=1e-3, gamma=0.9)
PRESETS = {
    **{f"DummyPixels{kind}-v0": DUMMY for kind in ("", "Discrete", "MultiDiscrete", "Dict")},
    "GridWorld": dict(total_timesteps=100_000, learning_rate=1e-3, num_steps=128, num_minibatches=9, gamma=0.9, ent_coef=5e-3, features=256),
}


FORMAT = "ppo_pixel 2"  # of checkpoints
THREADS = torch.get_num_threads()  # as many as there are cores, or OMP_NUM_THREADS
FREE = {"resume", "total_timesteps", "unity_path", "base_port", "time_scale", "max_restarts", "track", "wandb_project_name", "device", "compile", "num_workers"}
FREE |= {"checkpoint_interval", "keep_checkpoints", "capture_video", "video_interval"}  # what may be another when a run goes on


def unity_settings(args):
    return {key: getattr(args, key) for key in ("behavior", "num_players", "max_agents", "base_port", "time_scale", "player_args", "max_restarts")}


def make_envs(args, seed):
    if args.unity_path or args.env_id in SCENES:
        return make_vec_env(args.env_id, 1, seed, args.unity_path, no_graphics=False, **unity_settings(args))  # else Unity's cameras see nothing
    settings = {key: getattr(args, key) for key in ("from_pixels", "image_size", "grayscale", "action_repeat")}
    how = f"{args.num_envs} gymnasium env(s), " + (f"in {args.num_workers} workers" if args.num_workers else "one after another")
    return PixelEnvs(args.env_id, args.num_envs, args.num_workers, **settings), how


def describe(args, envs):
    """What the agent sees and does, in plain numbers."""
    seen, action = envs.single_observation_space, envs.single_action_space
    images = {name: space.shape for name, space in getattr(seen, "spaces", {}).items() if name != "vector"}
    if not images:
        other = "ppo_continuous_multiagent.py takes vectors" if isinstance(action, gym.spaces.Box) else "no script here takes vectors with discrete actions"
        way = "; --from-pixels renders it" if hasattr(envs, "num_workers") and is_mujocos(args.env_id) else ""
        raise ValueError(f"{args.env_id} has no images in its observations {seen}: {other}{way}")
    if not isinstance(action, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        raise ValueError(f"{args.env_id} has actions {action}: this script takes either continuous or discrete ones")
    smallest = {"nature": 36, "impala": 8}[args.encoder]
    for name, (height, width, _) in images.items():
        if min(height, width) < smallest:
            raise ValueError(f"{name} is {height} x {width}: --encoder {args.encoder} takes {smallest} x {smallest} and more")
    branches = np.ravel(getattr(action, "nvec", getattr(action, "n", []))).astype(int).tolist()
    vector = seen["vector"].shape[0] if "vector" in seen.spaces else 0
    sensors = getattr(envs, "sensors", [*images, *[vector] * (vector > 0)])  # in Unity's order: sizes of the vector sensors, names of the images
    stack = args.frame_stack or (3 if args.from_pixels else 1)
    spec = {"images": images, "stack": stack, "vector": vector, "sensors": sensors}
    return spec | {"continuous": 0 if branches else math.prod(action.shape), "branches": branches}


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


def nature(channels):
    layers = [nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)]
    return nn.Sequential(*(part for layer in layers for part in (layer_init(layer), nn.ReLU())))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = (layer_init(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2))

    def forward(self, x):
        return x + self.conv2(torch.relu(self.conv1(torch.relu(x))))


def impala(channels):
    layers = []
    for out in (16, 32, 32):
        layers += [layer_init(nn.Conv2d(channels, out, 3, padding=1)), nn.MaxPool2d(3, 2, 1), Residual(out), Residual(out)]
        channels = out
    return nn.Sequential(*layers, nn.ReLU())


class Agent(nn.Module):
    """What is saved and put to use: the statistics of the vector observations are part of it."""

    def __init__(self, spec, args):
        super().__init__()
        make, self.branches, self.norm_obs = {"nature": nature, "impala": impala}[args.encoder], spec["branches"], args.norm_obs
        if not self.branches:
            self.actor_logstd = nn.Parameter(torch.full((spec["continuous"],), args.logstd_init))
        shapes = [(spec["stack"] * channels, height, width) for height, width, channels in spec["images"].values()]
        self.encoders = nn.ModuleList(nn.Sequential(*make(shape[0]), nn.Flatten()) for shape in shapes)
        for encoder, shape in zip(self.encoders, shapes, strict=True):
            size = encoder(torch.zeros(1, *shape)).shape[1]
            encoder.extend([layer_init(nn.Linear(size, args.features)), nn.ReLU()])
        size, self.trunk = len(shapes) * args.features + spec["vector"], nn.Identity()  # SB3 differs (9)
        if size > args.features:
            self.trunk = nn.Sequential(layer_init(nn.Linear(size, args.features)), nn.ReLU())
        self.actor = layer_init(nn.Linear(args.features, sum(self.branches) or spec["continuous"]), std=0.01)
        self.critic = layer_init(nn.Linear(args.features, 1), std=1.0)
        self.obs_rms = Normalizer(spec["vector"])

    def normalize(self, vector):
        if not self.norm_obs:
            return vector
        return ((vector - self.obs_rms.shift) * self.obs_rms.scale).clamp(-10, 10)

    def encode(self, images, vector):
        """images: uint8 (batch, channel, height, width), in memory with the channels last."""
        parts = [encoder(image.float().div_(255)) for encoder, image in zip(self.encoders, images, strict=True)]
        return self.trunk(torch.cat([*parts, self.normalize(vector)], 1) if isinstance(self.trunk, nn.Sequential) else parts[0])

    def choices(self, x, mask):
        """Log-probs of each branch's choices."""
        logits = self.actor(x)
        if mask.shape[1]:
            logits = logits.masked_fill(~mask, -1e8)
        return [branch.log_softmax(1) for branch in logits.split(self.branches, 1)]

    def log_density(self, mean, action):
        z = (action - mean) * torch.exp(-self.actor_logstd)
        return (-0.5 * z**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)

    def policy(self, deterministic=False):
        """A function from observations to actions, not clipped, their log-probs, and values, as arrays."""
        device = self.critic.bias.device

        @torch.inference_mode()
        def act(images, vector, mask):
            x = self.encode([image.to(device) for image in images], torch.as_tensor(vector, device=device))
            if self.branches:
                logprobs = self.choices(x, torch.as_tensor(mask, device=device))
                action = torch.cat([p.argmax(1, True) if deterministic else torch.multinomial(p.exp(), 1) for p in logprobs], 1)
                logprob = sum(p.gather(1, a) for p, a in zip(logprobs, action.split(1, 1), strict=True)).squeeze(1)
            else:
                mean = self.actor(x)
                action = mean if deterministic else mean + self.actor_logstd.exp() * torch.randn_like(mean)
                logprob = self.log_density(mean, action)
            return action.cpu().numpy(), logprob.cpu().numpy(), self.critic(x).flatten().cpu().numpy()

        return act

    def forward(self, images, vector, mask, action):
        """Log-probs of the actions, the mean entropy, values."""
        x = self.encode(images, vector)
        if self.branches:
            logprobs = self.choices(x, mask)
            logprob = sum(p.gather(1, a) for p, a in zip(logprobs, action.split(1, 1), strict=True)).squeeze(1)
            entropy = -sum((p.exp() * p).sum(1) for p in logprobs).mean()
        else:
            logprob = self.log_density(self.actor(x), action)
            entropy = (self.actor_logstd + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprob, entropy, self.critic(x).flatten()


class Frames:
    """Every image once. An observation is the numbers of its images, the newest last; an episode's first image stands for those before it."""

    def __init__(self, spec, n, capacity):
        self.store = {name: np.empty((capacity, *shape), np.uint8) for name, shape in spec["images"].items()}
        self.count, self.last = 0, np.zeros((n, spec["stack"]), int)  # of each slot: its last observation

    def add(self, obs, who):
        """Numbers of these slots' new images."""
        first, self.count = self.count, self.count + len(who)
        for name, images in self.store.items():
            if self.count > len(images):
                images = self.store[name] = np.concatenate([images, np.empty_like(images)])
            images[first : self.count] = obs[name] if len(who) == len(obs[name]) else obs[name][who]
        return np.arange(first, self.count)

    def see(self, obs, who, begins):
        """These slots' new observations. begins: the slots' episodes that begin with them."""
        new = self.add(obs, who)[:, None]
        rows = np.concatenate([self.last[who, 1:], new], 1)
        if begins.any():
            rows = np.where(begins[who, None], new, rows)
        self.last[who] = rows
        return rows

    def final(self, obs, slot):
        """The last observation of a slot's episode, before the slot sees the next one's first."""
        return np.append(self.last[slot, 1:], self.add({name: image[None] for name, image in obs.items()}, [slot]))

    def forget(self, *observations):
        """Keep only these observations' images, and the slots' last ones; returns the observations' new numbers."""
        used = np.unique(np.concatenate([x.ravel() for x in (self.last, *observations)]))
        for images in self.store.values():
            images[: len(used)] = images[used]
        self.count = len(used)
        self.last, *observations = (np.searchsorted(used, x) for x in (self.last, *observations))
        return observations

    def images(self, device="cpu"):
        return [torch.from_numpy(images[: self.count]).to(device) for images in self.store.values()]


def stacked(images, rows):
    """Observations by the numbers of their images: (batch, channel, height, width), the oldest image's channels first, in memory with the channels last."""
    out = []
    for x in images:
        frames = [x.index_select(0, column) for column in rows.unbind(1)]
        out.append((torch.cat(frames, 3) if len(frames) > 1 else frames[0]).permute(0, 3, 1, 2))
    return out


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

    def update(flat, exp_avg, exp_avg_sq, numbers, mb_inds, images, *batch):
        vectors, masks, actions, logprobs, advantages, returns, values = (x[mb_inds] for x in batch)
        flat = flat.detach().requires_grad_()
        parameters = {name: part.view(shape) for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True)}
        newlogprob, entropy, newvalue = functional_call(agent, parameters, (images, vectors, masks, actions))
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
        unguarded = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # the shapes are the same for ever
        return torch.compile(update, fullgraph=True, dynamic=False, options=unguarded)
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


def to_env(action, space):
    """Actions as the env takes them: clipped, or counted from where the space begins."""
    if isinstance(space, gym.spaces.Box):
        return np.minimum(np.maximum(action, space.low.ravel()), space.high.ravel())
    return action + np.ravel(space.start)


def evaluate(agent, envs, spec, episodes, seed, steps=math.inf):
    """Returns, lengths and successes (nan where the env tells none) of each agent's first episodes, equally many of every agent: short ones don't crowd
    out the long. Nothing is sampled."""
    policy, space, n = agent.policy(deterministic=True), envs.single_action_space, envs.num_envs
    left = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    opened, total, length, results = np.zeros(n, bool), np.zeros(n), np.zeros(n, int), []
    frames, begins = Frames(spec, n, 4 * n * (1 + spec["stack"])), np.ones(n, bool)
    actions = np.zeros((n, *space.shape), space.dtype)
    obs, infos = envs.reset(seed=seed)
    while left.any() and steps > 0:
        ready, steps = infos.get("ready", np.ones(n, bool)), steps - 1
        if ready.any():
            who = np.flatnonzero(ready)
            rows = torch.from_numpy(frames.see(obs, who, begins))
            begins[who] = False
            vector, mask = obs.get("vector", np.zeros((n, 0), np.float32))[who], infos.get("action_mask", np.zeros((n, 0), bool))[who]
            action, *_ = policy(stacked(frames.images(), rows), vector, mask)
            actions[ready] = to_env(action, space).reshape(-1, *space.shape)
            frames.forget()
        opened |= ready
        obs, reward, terminated, truncated, infos = envs.step(actions)
        done = terminated | truncated
        begins |= done
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


def film(path, agent, args, spec):
    """Write a video of the deterministic policy, in an env of its own: an episode of a gymnasium env, or half a minute of a bundled scene."""
    if args.env_id in SCENES:
        args = replace(args, num_players=1, max_restarts=0, base_port=None, player_args=(*args.player_args, "--render", str(path)))
        with closing(make_envs(args, args.seed)[0]) as envs:
            evaluate(agent, envs, spec, 10**9, args.seed, FILM_STEPS // 3)
    else:
        with closing(Filmed(make_envs(replace(args, num_envs=1, num_workers=0), args.seed)[0], path)) as envs:
            evaluate(agent, envs, spec, 1, args.seed)


class Exported(nn.Module):
    """The graph that Unity's inference reads: an input for each sensor, the statistics inside, actions as the env got them."""

    def __init__(self, agent, state):
        super().__init__()
        self.agent, self.spec, self.low, self.high = agent, state["spec"], state["low"], state["high"]
        kind, constants = ("discrete" if agent.branches else "continuous"), ["version_number", "memory_size"]
        self.outputs = [f"{kind}_actions", f"deterministic_{kind}_actions", *constants, f"{kind}_action_output_shape"]

    def clip(self, action):
        if len(self.low.unique()) == len(self.high.unique()) == 1:
            return action.clamp(self.low.flatten()[0].item(), self.high.flatten()[0].item())
        return torch.min(torch.max(action, self.low), self.high)

    def forward(self, *inputs):
        agent, sensors = self.agent, dict(zip(range(len(self.spec["sensors"])), inputs, strict=False))
        images = {name: sensors[i] for i, name in enumerate(self.spec["sensors"]) if isinstance(name, str)}
        parts = [encoder(images[name]) for name, encoder in zip(self.spec["images"], agent.encoders, strict=True)]
        vectors = [sensors[i] for i, size in enumerate(self.spec["sensors"]) if not isinstance(size, str)]
        if vectors:
            parts.append(agent.normalize(torch.cat(vectors, 1)))
        x = agent.actor(agent.trunk(torch.cat(parts, 1)))
        if agent.branches:
            branches = (x + (inputs[-1] - 1) * 1e8).split(agent.branches, 1)
            sampled = torch.cat([torch.multinomial(branch.softmax(1), 1) for branch in branches], 1)
            best, size = torch.cat([branch.argmax(1, True) for branch in branches], 1), torch.tensor([[float(b) for b in agent.branches]])
        else:
            sampled, best = self.clip(x + agent.actor_logstd.exp() * torch.randn_like(x)), self.clip(x)
            size = torch.tensor([float(self.low.numel())])
        return sampled, best, torch.tensor([3.0]), torch.tensor([0.0]), size


def export(agent, state, path):
    """Opset 9, as ML-Agents writes it: Unity knows 7 to 15, and torch's newer exporter none of them."""
    spec, graph = state["spec"], Exported(agent, state)
    names = [f"obs_{i}" for i in range(len(spec["sensors"]))] + ["action_masks"] * bool(agent.branches)
    inputs = []
    for sensor in spec["sensors"]:
        if isinstance(sensor, str):
            height, width, channels = spec["images"][sensor]
            inputs.append(torch.zeros(1, spec["stack"] * channels, height, width))
        else:
            inputs.append(torch.zeros(1, sensor))
    inputs += [torch.ones(1, sum(agent.branches))] * bool(agent.branches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of age, and that constants are constant
        torch.onnx.export(
            graph, tuple(inputs), path, dynamo=False, opset_version=9,
            input_names=names, output_names=graph.outputs, dynamic_axes={name: {0: "batch"} for name in (*names, *graph.outputs[:2])},
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
                 "keep_checkpoints", "video_interval", "eval_episodes", "image_size", "action_repeat", "features"):  # fmt: skip
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be between 0 and 1")
    for name in ("clip_coef", "ent_coef", "vf_coef", "update_epochs", "max_restarts", "num_workers"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")
    if args.frame_stack is not None and args.frame_stack < 1:
        raise ValueError(f"--frame-stack {args.frame_stack}: must be above 0")
    unity = args.unity_path or args.env_id in SCENES
    if unity and args.num_envs not in (1, Args.num_envs):
        raise ValueError(f"--num-envs {args.num_envs}: a Unity scene has as many envs as it has agents; more come with --num-players")
    for name in ("from_pixels", "grayscale", "num_workers"):
        if unity and getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is for gymnasium envs: a Unity scene has its own cameras and processes")
    if args.from_pixels and args.image_size < (smallest := {"nature": 36, "impala": 8}[args.encoder]):
        raise ValueError(f"--image-size {args.image_size}: --encoder {args.encoder} takes {smallest} x {smallest} and more")
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
    spec, space = describe(args, envs), envs.single_action_space
    n, batch_size = envs.num_envs, envs.num_envs * args.num_steps
    action_dim, action_type = spec["continuous"] or len(spec["branches"]), np.int64 if spec["branches"] else np.float32
    if batch_size % args.num_minibatches:
        raise ValueError(f"--num-minibatches {args.num_minibatches} does not divide the batch of {n} x {args.num_steps} = {batch_size} decisions")
    if args.total_timesteps < batch_size:
        raise ValueError(f"--total-timesteps {args.total_timesteps}: less than one batch of {n} x {args.num_steps} = {batch_size} decisions")
    minibatch_size, num_iterations = batch_size // args.num_minibatches, args.total_timesteps // batch_size
    if resumed and num_iterations <= resumed[1]["iteration"]:
        raise ValueError(f"{resumed[0]} has {resumed[1]['global_step']} decisions already: give a larger --total-timesteps to go on")
    env_actions = np.zeros((n, *space.shape), space.dtype)
    flat_actions = env_actions.reshape(n, action_dim)
    if sys.platform == "linux":  # what an update frees stays at hand (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD): otherwise the next one gets it back page by page
        for option, size in ((-3, 2**30), (-1, 2**31 - 1)):
            ctypes.CDLL(None).mallopt(option, size)
    # Convolutions are worth all cores. But while agents act, workers and players need them.
    act_threads, learn_threads = THREADS if getattr(envs, "num_workers", None) == 0 else 1, THREADS

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
    agent = Agent(spec, args).to(device)
    return_rms = Normalizer()
    update = make_update(agent, args)
    flat = nn.utils.parameters_to_vector(agent.parameters()).detach()
    optimizer, num_updates = [torch.zeros_like(flat), torch.zeros_like(flat)], 0  # Adam's two averages and its steps
    discounted, episode_return, episode_length = [0.0] * n, [0.0] * n, [0] * n
    iteration, global_step, best, recent, since_checkpoint, next_obs = 0, 0, -math.inf, [], [], None
    frames, begins = Frames(spec, n, 2 * (batch_size + 2 * n) + n * spec["stack"]), np.ones(n, bool)  # begins: the next observation is an episode's first
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
            next_obs, infos, begins[:] = envs.restore(state["envs"]), {}, False
            frames.add({name: images.flatten(0, 1).numpy() for name, images in state["frames"].items()}, range(frames.last.size))
            frames.last = np.roll(np.arange(frames.last.size).reshape(frames.last.shape), 1, axis=1)  # as it was before next_obs, the newest
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
        state |= {"frames": {name: torch.from_numpy(images[frames.last]) for name, images in frames.store.items()}, "spec": spec}
        state |= {key: torch.as_tensor(getattr(space, key, np.zeros(0))).reshape(1, -1) for key in ("low", "high")}
        try:
            for name in ["checkpoint.pt"] + ["best.pt"] * better + [f"checkpoint_{global_step}.pt"] * (args.keep_checkpoints > 1):
                save(folder / name, state)
            for old in sorted(folder.glob("checkpoint_*.pt"), key=os.path.getmtime)[: -args.keep_checkpoints]:
                old.unlink()
        except OSError as error:
            print(f"\nThe checkpoint could not be saved, the one before it is still there: {error}", flush=True)

    def show_policy():
        (folder / "videos").mkdir(exist_ok=True)
        film(folder / "videos" / f"{global_step}.mp4", agent, args, spec)

    everybody = np.arange(n)

    def asking(infos):
        ready = infos.get("ready")  # gymnasium's envs have no such key: all are ready
        return everybody if ready is None or ready.all() else np.flatnonzero(ready)

    def pick(x, who):
        return x if who is everybody else x[who]

    nothing = {"vector": np.zeros((n, 0), np.float32), "action_mask": np.zeros((n, 0), bool)}  # where there is none

    def look():
        """What those who ask see now: numbers of images, vector, mask."""
        rows = frames.see(next_obs, who, begins)
        begins[who] = False
        return rows, pick((nothing | next_obs)["vector"], who).copy(), pick((nothing | infos)["action_mask"], who)

    def blank(k):
        """k rows: who, what it saw, its action, log-prob, value."""
        kinds = ((int, spec["stack"]), (np.float32, spec["vector"]), (bool, seen[2].shape[1]), (action_type, action_dim))
        return [np.zeros(k, int), *(np.zeros((k, size), kind) for kind, size in kinds), np.zeros(k, np.float32), np.zeros(k, np.float32)]

    @torch.no_grad()
    def judge(images, rows, *rest):
        """Log-probs and values, as the agent is now."""
        logprob, _, value = agent(stacked(images, torch.as_tensor(rows, device=device)), *(torch.as_tensor(x, device=device) for x in rest))
        return logprob.cpu().numpy(), value.cpu().numpy()

    who = asking(infos)
    seen = look()
    opened = np.zeros(n, bool)  # has its action and waits for what comes of it
    open_rows = blank(0)  # of the last iteration
    if args.compile:
        start = time.time()
        torch.set_num_threads(learn_threads)  # torch compiles anew when it changes
        example = [torch.from_numpy(x).to(device).expand(batch_size, *x.shape[1:]).clone() for x in (*blank(1)[2:6], *[np.zeros(1, np.float32)] * 3)]
        images = stacked(frames.images(device), torch.zeros((minibatch_size, spec["stack"]), dtype=int, device=device))
        update(flat, *optimizer, torch.ones(2, device=device), torch.arange(minibatch_size, device=device), images, *example)
        print(f"Compiled the update in {time.time() - start:.1f} s", flush=True)
    progress, seconds = Progress(num_iterations * batch_size, global_step), {"env": 0.0, "act": 0.0, "learn": 0.0}
    last = False
    if args.capture_video and not resumed:
        show_policy()
    start = time.perf_counter()
    while iteration < num_iterations and not stop:
        lr = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)  # SB3 differs (4)
        torch.set_num_threads(act_threads)
        act = agent.policy()
        if len(open_rows[0]):  # asked before and not answered yet: judged by the weights of now, as all rows of the batch
            open_rows[5:] = judge(frames.images(device), *open_rows[1:5])
        columns = [[rows] for rows in open_rows]
        answers, rewards, terminations, truncations, finals, lost, successes, num_closed = [], [], [], [], {}, [], [], 0
        while num_closed - len(lost) < batch_size:
            action, logprob, value = act(stacked(frames.images(), torch.from_numpy(seen[0])), *seen[1:])
            for column, rows in zip(columns, (who, *seen, action, logprob, value), strict=True):
                column.append(rows)
            flat_actions[who] = to_env(action, space)
            now = time.perf_counter()
            seconds["act"] += now - start
            try:
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
            except (UnityPlayerError, WorkerDied):
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
                    final = infos["final_obs"][closes[k]]
                    finals[num_closed + k] = frames.final(final, closes[k]), final.get("vector", np.zeros(0, np.float32))
                successes += infos.get("is_success", {}).values()
            begins |= terminated | truncated | infos.get("restarted", False)
            seen = look()
            answers.append(closes)
            rewards.append(pick(reward, closes))
            terminations.append(pick(terminated, closes))
            truncations.append(pick(truncated, closes))
            num_closed += len(closes)
            progress.show(global_step + num_closed, recent, seconds, getattr(envs, "restarts", 0))
        global_step += num_closed - len(lost)

        # Rows agent by agent: CleanRL differs (6). Last of each agent stands its open row, whose value is the bootstrap.
        torch.set_num_threads(learn_threads)
        images = frames.images(device)
        acted, rest = sum(map(len, columns[0])), blank(len(who))
        rest[:4], rest[6] = (who, *seen), judge(images, *seen, rest[4])[1]
        columns = [np.concatenate([*column, rows]) for column, rows in zip(columns, rest, strict=True)]
        order, closed, closing_order = agent_by_agent(columns[0], np.concatenate(answers), n)
        open_rows = [x[np.sort(order[~closed & (order < acted)])] for x in columns]
        owner, value = columns[0][order], columns[6][order].astype(float)
        obs, vectors, masks, actions, logprobs, values = (torch.as_tensor(x[order], device=device) for x in columns[1:])
        row_of = np.zeros(num_closed, int)  # of each closing message
        row_of[closing_order] = np.flatnonzero(closed)
        reward, ended, gone = np.zeros(len(order)), np.zeros(len(order), bool), np.zeros(len(order), bool)
        reward[row_of], ended[row_of] = np.concatenate(rewards), np.concatenate(terminations) | np.concatenate(truncations)
        gone[row_of[lost]] = True
        closed &= ~gone

        next_values = np.where(closed & ~ended, np.roll(value, -1), 0.0)
        if finals:
            final_obs, final_vectors = (np.stack(x) for x in zip(*finals.values(), strict=True))
            rest = blank(len(finals))
            next_values[row_of[list(finals)]] = judge(images, final_obs, final_vectors, rest[3], rest[4])[1]
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
        obs, *batch = (x[rows] for x in (obs, vectors, masks, actions, logprobs))
        batch += [b_advantages, b_advantages + b_values, b_values]
        metrics, stopped, last_good = [], False, (*optimizer, num_updates)
        for _ in range(args.update_epochs):
            for mb_inds in torch.as_tensor(np.random.permutation(batch_size), device=device).split(minibatch_size):
                numbers = torch.tensor(adam_numbers(num_updates + 1, lr), device=device)
                *new, mb_metrics = update(flat, *optimizer, numbers, mb_inds, stacked(images, obs[mb_inds]), *batch)
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
        if spec["vector"]:
            agent.obs_rms.update(vectors[rows])
        return_rms.update(torch.tensor(discounted_returns))
        open_rows[1], rows = frames.forget(open_rows[1], seen[0])
        seen = rows, *seen[1:]

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
    agent = Agent(state["spec"], args)
    agent.load_state_dict(state["agent"])
    if args.export:
        target = path.with_name("policy.onnx")
        export(agent, state, target)
        print(f"Wrote {target}: drop it into a Unity project, and into the Model field of its Behavior Parameters")
        return
    agent.to(args.device)
    with closing(make_envs(replace(args, max_restarts=0), args.seed)[0]) as envs:
        there, spec = describe(args, envs), state["spec"]
        for key in ("images", "vector", "continuous", "branches"):
            if there[key] != spec[key]:
                raise ValueError(f"{path} has {key} {spec[key]}, the env has {there[key]}")
        returns, lengths, successes = evaluate(agent, envs, spec, args.eval_episodes, args.seed)
    steps = f"after {state['global_step']:,} decisions, {len(returns)} episodes of {lengths.mean():.0f} decisions on average"
    print(f"{path} {steps}: return {returns.mean():.2f} ± {returns.std():.2f}, from {returns.min():.2f} to {returns.max():.2f}", end="")
    print("" if np.isnan(successes).any() else f"; success {successes.mean():.1%}")
    if args.capture_video:
        video = path.parent / "videos" / "evaluation.mp4"
        video.parent.mkdir(exist_ok=True)
        film(video, agent, args, spec)
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
    except (ValueError, UnityPlayerError, WorkerDied, FloatingPointError) as error:
        raise SystemExit(f"\n{error}") from None


if __name__ == "__main__":
    main()
