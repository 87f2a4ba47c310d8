"""Proximal policy optimization from images, or images and vectors, one policy for all agents: Unity and gymnasium.

    python ppo_pixel.py --env-id GridWorld                                      a bundled scene: no Unity needed
    python ppo_pixel.py --unity-path ./Builds/MyScene                           your Unity build
    python ppo_pixel.py --godot-path ./my_game                                  your Godot game
    python ppo_pixel.py --env-id DummyPixels-v0                                 any gymnasium env that has images
    python ppo_pixel.py --env-id Reacher-v5 --from-pixels --num-workers 2       any of its MuJoCo envs, rendered
    python ppo_pixel.py --evaluate runs/NAME --capture-video                    also --resume and --export runs/NAME

What images change in ppo_continuous_multiagent.py, which explains the rest:
 - An image is stored once, as uint8. A row has the numbers of its last --frame-stack images.
 - One encoder an image, channels last; vectors, normalised, join after it; policy and value share all layers but the
   last. So log-probs and values come with acting, and are kept.
 - Actions are continuous, or discrete: a head for each branch. A choice that Unity's mask forbids has probability 0.
 - Two runs with one seed are equal to the byte in one thread, OMP_NUM_THREADS=1; in several, sums of convolutions are
   rounded differently from run to run.
 - The exported model takes an image as float (batch, channel, height, width) from 0 to 1, and masks as action_masks,
   1 where a choice is allowed: as ML-Agents' own, for Barracuda (package 2.x) and for Sentis (3.x). --frame-stack K
   wants a sensor with as many Observation Stacks, which begins with black ones.

What differs from Stable-Baselines3 (SB3) and from CleanRL; the numbers stand at the lines:
 1. SB3's VecNormalize and gymnasium's wrappers update their statistics at every step. Here they are part of the agent
    and change between iterations only: what acts is what learns, the first ratio is 1, and a saved agent carries them.
 2. SB3's loss has vf_coef * mse, CleanRL's and ours vf_coef * 0.5 * mse: our --vf-coef 1.0 is SB3's 0.5.
 3. SB3's value clipping takes the clipped error alone, CleanRL's and ours the larger one; SB3 and we have it off.
 4. SB3 anneals from the progress after the rollout (the last update has a rate of 0), CleanRL and we from before it.
 5. CleanRL treats a time limit as a death. SB3 and we bootstrap with the value of the final observation.
 6. CleanRL shuffles time by time and in place; SB3 and we draw a fresh permutation of the rows agent by agent.
 7. CleanRL checks the KL after an epoch; SB3 and we before each step, against 1.5 times the target.
 8. Adam and the gradient's norm work on one flat vector, images are laid out with the channels last, and GAE is in
    double precision: sums in another order, so parity with SB3 holds to rounding and not to the bit.
 9. With one image and nothing else the network is SB3's CnnPolicy. Several images, or images and vectors, go into one
    more layer together, where SB3's MultiInputPolicy has two of 64 for the policy and two for the value.
10. SB3 divides an observation by its std however small (from 1e-4 on), here it is by --min-obs-std at least.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

import fast
import ranks
import runs
from envs import engine
from envs.pixels import describe_seen, make_envs


@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """part of the run's name"""
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
    num_envs: int = 8
    """how many gymnasium envs to step at once (a scene has as many as it has agents)"""
    num_workers: int = 0
    """how many processes to step gymnasium envs in, several envs in each; 0: in this one"""
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
    anneal_ent: bool = False
    """let it fall linearly to 0 too, as ML-Agents does"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """the gradient is scaled down to this norm"""
    target_kl: float | None = None
    """stop an iteration's updates when the policy has moved 1.5 times this far"""
    norm_obs: bool = True
    """normalise vector observations by their running mean and variance"""
    min_obs_std: float = 0.01
    """the smallest std to divide by: what hardly moves in training may move in Unity; 0 is SB3's"""
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
ROVER = ("--camera=48", "--disable-render-loop")  # it draws when it is asked to
PRESETS = {
    **{f"DummyPixels{kind}-v0": DUMMY for kind in ("", "Discrete", "MultiDiscrete", "Dict")},
    "GodotRover": dict(DUMMY, gamma=0.98, features=256, ent_coef=5e-3, player_args=ROVER),
    "GridWorld": dict(DUMMY, num_steps=128, num_minibatches=9, ent_coef=5e-3, features=256),
}
SMALLEST = {"nature": 36, "impala": 8}  # image that an encoder takes


def check(args):
    above_0 = ("num_steps", "num_minibatches", "learning_rate", "max_grad_norm", "target_kl", "features", "image_size")
    above_0, from_0_to_1 = (*above_0, "frame_stack", "action_repeat"), ("gamma", "gae_lambda")
    from_0 = ("clip_coef", "ent_coef", "vf_coef", "update_epochs", "num_workers", "min_obs_std")
    at_most = {"update_epochs": 10_000, "features": 2**16, "image_size": 4096, "frame_stack": 256, "num_workers": 1000}
    runs.check(args, above_0, from_0, from_0_to_1, at_most)
    for name in ("from_pixels", "grayscale", "num_workers"):
        if getattr(args, name) and engine(args):
            why = f"a {engine(args)} scene has its own cameras and processes"
            raise ValueError(f"{runs.option(name)} is for gymnasium envs: {why}")
    if args.from_pixels and args.image_size < (size := SMALLEST[args.encoder]):
        raise ValueError(f"--image-size {args.image_size}: --encoder {args.encoder} takes {size} x {size} and more")


def describe(args, envs):
    """What the agent sees and does, in plain numbers."""
    action, stack = envs.single_action_space, args.frame_stack or (3 if args.from_pixels else 1)
    spec = describe_seen(args, envs) | {"stack": stack}
    for name, (height, width, _) in spec["images"].items():
        if min(height, width) < (size := SMALLEST[args.encoder]):
            raise ValueError(f"{name} is {height} x {width}: --encoder {args.encoder} takes {size} x {size} and more")
    if isinstance(action, gym.spaces.Box):
        return spec | {"action_dim": math.prod(action.shape), "branches": [], **runs.bounds(action)}
    if not isinstance(action, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        raise ValueError(f"{args.env_id} has actions {action}: this script takes either continuous or discrete ones")
    branches = np.ravel(action.n if isinstance(action, gym.spaces.Discrete) else action.nvec).tolist()
    return spec | {"action_dim": len(branches), "branches": branches, "start": np.ravel(action.start).tolist()}


class Normalizer(nn.Module):
    """Running mean and variance, in double precision, as buffers: saved and loaded with whatever they belong to."""

    def __init__(self, *shape, least=0.0):
        super().__init__()
        self.least = least
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))  # the same in single precision, as they are put to use
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x):
        return ((x - self.shift) * self.scale).clamp(-10.0, 10.0)

    def update(self, batch):
        mean, var, count = ranks.moments(batch)
        delta, total = mean - self.mean, self.count + count
        self.var.copy_((self.var * self.count + var * count + delta**2 * self.count * count / total) / total)
        self.mean += delta * count / total
        self.count += count
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.rsqrt((self.var + 1e-8).clamp(min=self.least**2)))  # SB3 differs (10)


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
        layers += [layer_init(nn.Conv2d(channels, out, 3, padding=1)), nn.MaxPool2d(3, 2, 1)]
        layers += [Residual(out), Residual(out)]
        channels = out
    return nn.Sequential(*layers, nn.ReLU())


class Agent(nn.Module):
    """What acts, learns, is saved, evaluated and exported: the statistics of the vectors are part of it. spec: the env
    in plain numbers."""

    def __init__(self, spec, args):
        super().__init__()
        self.branches, self.has_vector = spec["branches"], spec["vector"] > 0
        if self.branches:
            self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)
        else:
            self.actor_logstd = nn.Parameter(torch.full((spec["action_dim"],), args.logstd_init))
            self.bounds = runs.Bounds(spec)
        make = {"nature": nature, "impala": impala}[args.encoder]
        shapes = [(spec["stack"] * channels, height, width) for height, width, channels in spec["images"].values()]
        self.encoders = nn.ModuleList(nn.Sequential(*make(shape[0]), nn.Flatten()) for shape in shapes)
        for encoder, shape in zip(self.encoders, shapes, strict=True):
            size = encoder(torch.zeros(1, *shape)).shape[1]
            encoder.extend([layer_init(nn.Linear(size, args.features)), nn.ReLU()])
        size, self.trunk = len(shapes) * args.features + spec["vector"], nn.Identity()
        if size > args.features:  # SB3 differs (9)
            self.trunk = nn.Sequential(layer_init(nn.Linear(size, args.features)), nn.ReLU())
        self.actor = layer_init(nn.Linear(args.features, sum(self.branches) or spec["action_dim"]), std=0.01)
        self.critic = layer_init(nn.Linear(args.features, 1), std=1.0)
        self.obs_rms = Normalizer(spec["vector"], least=args.min_obs_std) if args.norm_obs else nn.Identity()

    def encode(self, images, vector):
        """images: from 0 to 255, (batch, channel, height, width), in memory with the channels last."""
        parts = [encoder(image / 255) for encoder, image in zip(self.encoders, images, strict=True)]
        return self.trunk(torch.cat([*parts, self.obs_rms(vector)], 1) if self.has_vector else torch.cat(parts, 1))

    def choices(self, x, mask):
        """Log-probs of each branch's choices. mask: 0 where one is forbidden."""
        logits = self.actor(x) + (mask.float() - 1) * 1e8
        return [branch.log_softmax(1) for branch in logits.split(self.branches, 1)]

    def logprob(self, policy, action):
        """policy: log-probs of the choices, or the actions' mean."""
        if self.branches:
            return sum(p.gather(1, a) for p, a in zip(policy, action.split(1, 1), strict=True)).squeeze(1)
        z = (action - policy) * torch.exp(-self.actor_logstd)
        return (-0.5 * z**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)

    def act(self, images, vector, mask, deterministic=False):
        """Actions as the update sees them, and as the env gets them; their log-probs, values."""
        x = self.encode(images, vector)
        if self.branches:
            policy = self.choices(x, mask)
            chosen = [p.argmax(1, True) if deterministic else torch.multinomial(p.exp(), 1) for p in policy]
            action = torch.cat(chosen, 1)
            env_action = action + self.start
        else:
            policy = mean = self.actor(x)
            action = mean if deterministic else mean + self.actor_logstd.exp() * torch.randn_like(mean)
            env_action = action.clamp(self.bounds.low, self.bounds.high)
        return action, env_action, self.logprob(policy, action), self.critic(x).flatten()

    def forward(self, images, vector, mask, action):
        """Log-probs of the actions, the mean entropy, values."""
        x = self.encode(images, vector)
        if self.branches:
            policy = self.choices(x, mask)
            entropy = -sum((p.exp() * p).sum(1) for p in policy).mean()
        else:
            policy = self.actor(x)
            entropy = (self.actor_logstd + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return self.logprob(policy, action), entropy, self.critic(x).flatten()


class Frames:
    """Every image once. A stack is the numbers of its images, the newest last, at first all the episode's first."""

    def __init__(self, spec, n, capacity):
        self.store = {name: np.empty((capacity, *shape), np.uint8) for name, shape in spec["images"].items()}
        self.count, self.last = 0, np.zeros((n, spec["stack"]), int)  # the latter are the slots' last stacks
        self.begins, self.spec = np.ones(n, bool), spec  # the former: whose next image is an episode's first

    def add(self, obs, who):
        """Numbers of these slots' new images."""
        first, self.count = self.count, self.count + len(who)
        for name, images in self.store.items():
            if self.count > len(images):
                images = self.store[name] = np.concatenate([images, np.empty_like(images)])
            images[first : self.count] = obs[name] if len(who) == len(obs[name]) else obs[name][who]
        return np.arange(first, self.count)

    def see(self, obs, infos, who):
        """What these slots see now: stacks, vectors (of no numbers if there are none), masks."""
        new, choices = self.add(obs, who)[:, None], sum(self.spec["branches"])
        stacks = np.where(self.begins[who, None], new, np.concatenate([self.last[who, 1:], new], 1))
        self.last[who], self.begins[who] = stacks, False
        vectors = obs["vector"][who] if "vector" in obs else np.zeros((len(who), 0), np.float32)
        masks = infos["action_mask"][who] if "action_mask" in infos else np.ones((len(who), choices), bool)
        return stacks, vectors, masks

    def final(self, obs, slot):
        """The last of a slot's episode, before it sees the next one's first: stack, vector."""
        new = self.add({name: image[None] for name, image in obs.items()}, [slot])
        return np.append(self.last[slot, 1:], new), obs.get("vector", ())

    def forget(self, stacks):
        """Keep only the images of these stacks, and of the slots' last ones; returns the stacks in new numbers."""
        used = np.unique(np.concatenate([self.last, stacks]))
        for images in self.store.values():
            images[: len(used)] = images[used]
        self.last, self.count = np.searchsorted(used, self.last), len(used)
        return np.searchsorted(used, stacks)

    def images(self, device="cpu"):
        return [torch.from_numpy(images[: self.count]).to(device) for images in self.store.values()]

    def state(self):
        return {name: images[self.last] for name, images in self.store.items()}

    def restore(self, state):
        new = self.add({name: images.flatten(0, 1).numpy() for name, images in state.items()}, range(self.last.size))
        self.last = np.roll(new.reshape(self.last.shape), 1, axis=1)  # as before the newest, which is seen again
        self.begins[:] = False


def stacked(images, stacks):
    """(batch, channel, height, width), the oldest image's channels first, in memory with the channels last."""
    out = []
    for x in images:
        frames = [x.index_select(0, column) for column in torch.as_tensor(stacks).unbind(1)]
        out.append((torch.cat(frames, 3) if len(frames) > 1 else frames[0]).permute(0, 3, 1, 2))
    return out


class Rollout:
    """Decisions in the order in which they were asked for, a row each. A row is open until what came of it is known."""

    OBS, ACT = ("stacks", "vectors", "masks"), ("actions", "logprobs", "values")
    COLUMNS = (*OBS, *ACT, "judged", "slot", "ended", "rewards", "returns")

    def __init__(self, capacity, n, spec):
        self.frames = Frames(spec, n, capacity + n * spec["stack"])
        self.stacks = np.zeros((capacity, spec["stack"]), int)
        self.vectors = np.zeros((capacity, spec["vector"]), np.float32)
        self.masks = np.zeros((capacity, sum(spec["branches"])), bool)
        self.actions = np.zeros((capacity, spec["action_dim"]), np.int64 if spec["branches"] else np.float32)
        self.logprobs, self.values = np.zeros(capacity, np.float32), np.zeros(capacity, np.float32)
        self.judged = np.zeros(capacity, bool)  # whether these two are there, by the weights of now
        self.slot, self.ended = np.zeros(capacity, int), np.zeros(capacity, bool)  # whose row; if its episode ended
        self.rewards, self.returns = np.zeros(capacity), np.zeros(capacity)  # the latter are discounted, so far
        self.closed, self.num_closed = np.zeros(capacity, int), 0  # rows in the order in which they were closed
        self.row, self.count, self.finals = np.full(n, -1), 0, {}  # slots' open rows; rows of final observations
        self.discounted = np.zeros(n)  # each slot's last return

    def open(self, who, obs, infos):
        """These slots ask for actions."""
        self.row[who] = self.add(who, *self.frames.see(obs, infos, who))

    def add(self, who, stacks, vectors, masks):
        first, self.count = self.count, self.count + len(who)
        if self.count > len(self.slot):  # players that were lost left rows behind
            for name in (*self.COLUMNS, "closed"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        new = slice(first, self.count)
        self.stacks[new], self.vectors[new], self.masks[new] = stacks, vectors, masks
        self.slot[new], self.judged[new] = who, False
        return np.arange(first, self.count)

    def seen(self, rows):
        return stacked(self.frames.images(), self.stacks[rows]), self.vectors[rows], self.masks[rows]

    def act(self, who, actions, logprobs, values):
        rows = self.row[who]
        self.actions[rows], self.logprobs[rows], self.values[rows], self.judged[rows] = actions, logprobs, values, True

    def close(self, who, rewards, terminated, truncated, infos, gamma):
        """What came of these slots' open rows. The arrays have an entry for each slot."""
        rows, before = self.row[who], self.num_closed
        self.num_closed += len(who)
        self.row[who], self.closed[before : self.num_closed] = -1, rows
        self.rewards[rows], self.ended[rows] = rewards[who], (terminated | truncated)[who]
        self.discounted[who] = self.returns[rows] = gamma * self.discounted[who] + rewards[who]
        if "final_obs" in infos:
            self.discounted[terminated | truncated], self.frames.begins[terminated | truncated] = 0, True
            for row, slot in zip(rows, who, strict=True):
                if truncated[slot] and not terminated[slot]:  # CleanRL differs (5)
                    (self.finals[row],) = self.add([-1], *self.frames.final(infos["final_obs"][slot], slot), True)

    def drop(self, who):
        """These slots' open rows will never be closed: the rows before them end there, as at a time limit."""
        for slot in who[self.row[who] >= 0]:
            *_, before = -1, *np.flatnonzero(self.slot[: self.row[slot]] == slot)
            if before >= 0 and not self.ended[before]:
                self.ended[before], self.finals[before] = True, self.row[slot]
            self.slot[self.row[slot]] = -1
        self.row[who], self.discounted[who], self.frames.begins[who] = -1, 0, True

    def forget(self, used):
        """Rows that were learned from. Open ones stay, and the few that agents of mixed periods have closed beyond."""
        stays = self.slot[: self.count] >= 0
        stays[used] = False
        self.finals = {row: final for row, final in self.finals.items() if stays[row]}
        stays[list(self.finals.values())] = True
        rows, new = np.flatnonzero(stays), np.cumsum(stays) - 1
        for column in (getattr(self, name) for name in self.COLUMNS):
            column[: len(rows)] = column[rows]
        left = self.closed[len(used) : self.num_closed]
        self.closed[: len(left)] = new[left]
        self.row[self.row >= 0] = new[self.row[self.row >= 0]]
        self.finals = {new[row]: new[final] for row, final in self.finals.items()}
        self.stacks[: len(rows)], self.judged[: len(rows)] = self.frames.forget(self.stacks[: len(rows)]), False
        self.count, self.num_closed = len(rows), len(left)


def gae(rewards, values, next_values, goes_on, gamma, gae_lambda):
    """Of rows agent by agent. next_values: of what follows, 0 at an end; goes_on: the next row is of the episode."""
    advantages, lastgaelam = [0.0] * len(rewards), 0.0
    for i in range(len(rewards) - 1, -1, -1):
        delta = rewards[i] + gamma * next_values[i] - values[i]
        lastgaelam = delta + gamma * gae_lambda * lastgaelam if goes_on[i] else delta
        advantages[i] = lastgaelam
    return advantages


class Batch(NamedTuple):
    images: torch.Tensor  # their numbers; in a minibatch the images themselves, a list
    vectors: torch.Tensor
    masks: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


@torch.no_grad()
def make_batch(agent, rollout, used, reward_scale, args):
    """The rows `used`, agent by agent, each agent's in time: CleanRL differs (6). Its open row is its bootstrap."""
    order = np.argsort(rollout.slot[: rollout.count], kind="stable")
    order = order[rollout.slot[order] >= 0]
    place, closed = np.zeros(rollout.count, int), np.zeros(rollout.count, bool)
    place[order], closed[rollout.closed[: rollout.num_closed]] = np.arange(len(order)), True
    closed, ended, rewards = closed[order], rollout.ended[order], rollout.rewards[order]

    # Log-probs and values are acting's, but of rows that ask now, final observations, and rows older than the weights.
    rows = np.flatnonzero(~rollout.judged[: rollout.count])
    agent.eval()
    logprobs, _, values = agent(*fast.tensors(args.device, *rollout.seen(rows), rollout.actions[rows]))
    agent.train()
    rollout.logprobs[rows], rollout.values[rows] = logprobs.cpu(), values.cpu()
    value = rollout.values[order].astype(float)
    next_values = np.where(closed & ~ended, np.roll(value, -1), 0.0)
    next_values[place[list(rollout.finals)]] = rollout.values[list(rollout.finals.values())]

    rewards = np.clip(rewards * reward_scale, -10, 10) if args.norm_reward else rewards
    goes_on = closed & ~ended & np.roll(closed, -1)
    columns = (x.tolist() for x in (rewards, value, next_values, goes_on))
    advantages = np.array(gae(*columns, args.gamma, args.gae_lambda), np.float32)
    places = np.sort(place[used])
    advantages, rows = advantages[places], order[places]
    columns = [getattr(rollout, name)[rows] for name in rollout.OBS + rollout.ACT]
    return Batch(*fast.tensors(args.device, *columns, advantages, advantages + rollout.values[rows]))


def loss(agent, mb, args):
    """The objective on a minibatch, and what is logged of it. Whatever is read from args stays live when compiled."""
    newlogprob, entropy, newvalue = agent(mb.images, mb.vectors, mb.masks, mb.actions)
    logratio = newlogprob - mb.logprobs
    ratio = logratio.exp()
    advantages = mb.advantages
    if args.norm_adv and len(advantages) > 1:
        advantages = ranks.normalized(advantages)
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
    v_loss = (newvalue - mb.returns) ** 2
    if args.clip_vloss:  # SB3 differs (3)
        v_clipped = mb.values + (newvalue - mb.values).clamp(-args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb.returns) ** 2)
    v_loss = 0.5 * v_loss.mean()  # SB3 differs (2)
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - logratio).mean(),
        "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss, metrics


def adam(weights, grad, exp_avg, exp_avg_sq, rate, correction):
    """Adam in place, on all weights at once. The last two: see adam_numbers()."""
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    weights.sub_(rate * exp_avg / (exp_avg_sq.sqrt() * correction + 1e-5))


def adam_numbers(step, lr):
    """Adam's learning rate and bias correction, worked out once and not at every weight, as a compiled kernel would."""
    return lr / (1 - 0.9**step), 1 / math.sqrt(1 - 0.999**step)


def update(args, objective, weights, exp_avg, exp_avg_sq, mb, rows, *numbers):
    """One step on a minibatch. objective: loss() as a function of the agent's weights too; rows: of this rank's batch,
    which is what it weighs."""
    leaf = weights.detach().requires_grad_()
    value, metrics = objective.of([leaf], mb, args)
    (grad,) = torch.autograd.grad(value, leaf)
    with torch.no_grad():
        grad = ranks.mean(grad, rows)
        grad_norm = grad.norm()
        adam(weights, grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1), exp_avg, exp_avg_sq, *numbers)
    return {name: x.detach() for name, x in metrics.items()} | {"losses/grad_norm": grad_norm}


def minibatches(batch_size, minibatch_size, args):
    """Rows, epoch by epoch: CleanRL differs (6)."""
    for _ in range(args.update_epochs):
        yield from torch.as_tensor(np.random.permutation(batch_size), device=args.device).split(minibatch_size)


def play(agent, spec, n):
    """For policies.evaluate(): a policy that remembers images."""
    act, frames = fast.Acting(agent, deterministic=True).module, Frames(spec, n, 4 * n * (1 + spec["stack"]))

    def play(obs, infos, who, begins):
        frames.begins[:] = begins
        stacks, vectors, masks = frames.see(obs, infos, who)
        images = stacked(frames.images(), stacks)
        frames.forget(stacks)
        return act(images, vectors, masks)[1]

    return play


def train(args, resumed=None):
    """resumed: path and content of a checkpoint to go on from."""
    check(args)
    with runs.Run(args, __file__, make_envs, resumed) as run:
        envs, n = run.envs, run.envs.num_envs
        spec, (batch_size, minibatch_size, num_iterations) = describe(args, envs), runs.batches(args, n)
        total = num_iterations * batch_size * ranks.SIZE
        fast.keep_freed_memory(2**30, 2**31 - 1)

        agent = Agent(spec, args).to(args.device)
        weights, return_rms, ent_coef = fast.Vector(agent), Normalizer(), args.ent_coef
        optimizer = {"exp_avg": torch.zeros_like(weights.data), "exp_avg_sq": torch.zeros_like(weights.data), "step": 0}
        objective, act = fast.Functional(loss, agent, weights), fast.Acting(agent).module
        step = run.compiled(update, num_iterations * args.update_epochs * args.num_minibatches)
        rollout = Rollout(2 * batch_size + 6 * n, n, spec)  # twice the rows: final observations are such, too
        env_actions = np.zeros((n, *envs.single_action_space.shape), envs.single_action_space.dtype)
        flat_actions = env_actions.reshape(n, spec["action_dim"])
        kept = {"optimizer": optimizer, "return_rms": return_rms}
        running = {"discounted": rollout.discounted, "frames": rollout.frames}
        words = f"batches of {batch_size}, minibatches of {minibatch_size}"
        next_obs, infos = run.start(words, total, spec, agent, kept, play, running=running)
        ready = np.flatnonzero(infos["ready"])
        rollout.open(ready, next_obs, infos)

        for iteration in run.iterations():
            left = 1 - run.global_step / total
            lr = args.learning_rate * (left if args.anneal_lr else 1)  # SB3 differs (4)
            if args.anneal_ent:
                args.ent_coef = ent_coef * left
            # Convolutions are worth all cores. But while agents act, workers and players need them.
            torch.set_num_threads(fast.THREADS if getattr(envs, "num_workers", None) == 0 else 1)
            agent.eval()
            while not run.enough(rollout.num_closed, batch_size):
                actions, flat_actions[ready], logprobs, values = act(*rollout.seen(rollout.row[ready]))
                rollout.act(ready, actions, logprobs, values)
                run.spent("act")
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                run.record(reward, terminated, truncated, infos)
                if "restarted" in infos:
                    rollout.drop(np.flatnonzero(infos["restarted"]))
                (closed,), (ready,) = infos["closed"].nonzero(), infos["ready"].nonzero()
                rollout.close(closed, reward, terminated, truncated, infos, args.gamma)
                rollout.open(ready, next_obs, infos)
            run.spent("act")

            torch.set_num_threads(fast.THREADS)
            images, metrics = rollout.frames.images(args.device), []
            used, num_rows = ranks.filled(rollout.closed[: rollout.num_closed], batch_size)
            batch = make_batch(agent, rollout, used, return_rms.scale.item(), args)
            for mb_inds in minibatches(batch_size, minibatch_size, args):
                mb = Batch(stacked(images, batch.images[mb_inds]), *(x[mb_inds] for x in batch[1:]))
                state = weights.data, optimizer["exp_avg"], optimizer["exp_avg_sq"]
                before = [x.clone() for x in state] if args.target_kl is not None else None
                mb_metrics = step(args, objective, *state, mb, num_rows, *adam_numbers(optimizer["step"] + 1, lr))
                if before and ranks.mean(mb_metrics["losses/approx_kl"]) > 1.5 * args.target_kl:  # CleanRL differs (7)
                    for x, old in zip(state, before, strict=True):
                        x.copy_(old)
                    break
                optimizer["step"] += 1
                metrics.append(mb_metrics)
            if args.norm_obs and spec["vector"]:
                agent.obs_rms.update(batch.vectors)
            return_rms.update(torch.as_tensor(rollout.returns[used]))
            rollout.forget(used)
            run.spent("learn")
            explained_variance = 1 - (batch.advantages.var() / batch.returns.var()).item()
            run.log(fast.means(metrics) | {"losses/explained_variance": explained_variance, "charts/learning_rate": lr})


def main():
    more = {"play": play, "free": ["num_workers"]}
    runs.main(__file__, __doc__, Args, PRESETS, train, Agent, make_envs, describe, check, **more)


if __name__ == "__main__":
    main()
