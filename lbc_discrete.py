"""Two policies and a bandit that mixes them: generalized data distribution iteration, learnable behaviour control.

    python lbc_discrete.py --env-id CartPole-v1                                 any gymnasium env; choices, or --bins
    python lbc_discrete.py --env-id Basic                                       a bundled scene: no Unity needed
    python lbc_discrete.py --env-id CartPole-v1 --architecture transformer --num-actors 2
    python lbc_discrete.py --evaluate runs/NAME --capture-video                 also --resume and --export runs/NAME
    python benchmarks/plot_bandit.py runs/NAME                                  what it learned, and what was chosen

Two networks, each with V(s) and A(s, a), learn off-policy from the same sequences, each with a discount and a shape of
the rewards of its own. What acts is a mixture: mu = e softmax(k1 A1) + (1 - e) softmax(k2 A2). Its index (k1, k2, e) is
drawn for each env and episode, by bandits that learn from the returns which ones pay.

A row has its index and mu's probability of its action. What is learned is the mixture at that index with the networks
of now; each network's gradient goes through its own softmax. V has V-trace's targets, Q = A - E[A] + V ReTrace's, and
the policy V-trace's advantage: three losses for each network.

From GDI (Fan & Xiao, ICML 2022), here called GDI, with these choices where it is silent or where it did not work as
well; the numbers stand at the lines:
 1. Rewards are shaped and then scaled: values should stay within about 10. It matters most.
 2. Gradients of V inside Q and of the policy inside E[A] are stopped, and ReTrace's bootstrap is the expected one,
    which is V by construction. GDI's appendix has the sampled one.
 3. An action of several branches has a product of mixtures, each branch its own. GDI has one branch.
 4. The bandits' c is 1, one tiling each, their tiles start at the first return. Greedy is the argmax of the mixture at
    the index that the bandits think best.
 5. An episode that is cut, by a time limit or a lost player, has one row more, its last observation, of which only the
    value is asked: the bootstrap. So what follows a row is always the next row, and at an end rho and c are 0.
    Gradients are clipped network by network: k up to 50 multiplies them.
 6. Adam without decay, and small sequences and batches: GDI's numbers are for Atari with 160 envs.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads are for larger products than a policy's

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn

import actors
import fast
import ranks
import runs
from actors import Rollout, actor, play
from envs.bins import make_envs
from policies import mean_returns


@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """part of the run's name"""
    env_id: str = "CartPole-v1"
    """a bundled scene (Basic), a gymnasium id, or module:id"""
    num_envs: int = 8
    """how many gymnasium envs to step at once (a Unity scene has as many as it has agents)"""
    bandit: Literal["gdi", "window", "random", "fixed"] = "gdi"
    """who draws the indices: GDI's vote of tile-coded bandits, one with a sliding window, chance, or nobody"""
    fixed_index: tuple[float, float, float] = (10.0, 10.0, 0.5)
    """k1, k2 and e of --bandit fixed"""
    max_k: float = 50.0
    """the sharpest that a policy can be: k = 1 / temperature goes from 0 to this"""
    ucb_coef: float | None = None
    """weight of the bandits' bonus for what was seldom tried; default: 1 for gdi, 0.3 for window"""
    window: int = 400
    """episodes that --bandit window remembers"""
    num_actors: int = 0
    """processes that act, each with so many envs; 0: in this one"""
    learning_rate: float = 1e-3
    """of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    sequence_length: int = 20
    """decisions of a sequence; what follows its last one is the next sequence's first"""
    replay_size: int = 400
    """sequences in the replay"""
    batch_size: int = 32
    """sequences per update: those that are new, as many as there are envs, and the rest from the replay"""
    num_updates: int = 2
    """updates per iteration; 0 collects without learning"""
    gamma_1: float = 0.99
    """discount per decision of network 1"""
    gamma_2: float = 0.99
    """and of network 2"""
    shaping_1: Literal["none", "log", "root"] = "none"
    """of network 1's rewards: log is GDI's 2 log(1 + r), and - log(1 - r) below 0; root is (1 + r)^(1/4) - 1"""
    shaping_2: Literal["none", "log", "root"] = "none"
    """and of network 2's"""
    reward_scale: float = 0.1
    """shaped rewards times this: values should stay within about 10"""
    rho_bar: float = 1.05
    """ratios are clipped here, where V's targets and the advantage are weighted"""
    c_bar: float = 1.05
    """and here, where traces go on"""
    trace_lambda: float = 1.0
    """how far traces look: 0 one step, 1 to the end"""
    vf_coef: float = 1.0
    """weight of the two V losses"""
    qf_coef: float = 1.0
    """weight of the two Q losses"""
    pg_coef: float = 1.0
    """weight of the two policy losses"""
    max_grad_norm: float = 1.0
    """each network's gradient is scaled down to this norm"""
    norm_obs: bool = True
    """normalise observations by their running mean and variance"""
    min_obs_std: float = 0.01
    """the smallest std to divide by: what hardly moves in training may move in Unity"""
    architecture: Literal["dense", "transformer"] = "dense"
    """layers that see one observation, or a causal transformer over the episode's last ones"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the layers of each network; the transformer has so many blocks, and the first width"""
    activation: Literal["tanh", "silu"] = "tanh"
    """between the layers; the transformer has GELU"""
    context: int = 8
    """observations that a block of the transformer looks at, its own included"""
    num_heads: int = 4
    """of a block's attention"""
    bins: int = 11
    """choices per dimension where actions are continuous"""
    eval_interval: int = 20_000
    """decisions between two greedy evaluations of network 1, network 2 and the mixture; 0: none"""


LARGER = dict(num_envs=16, replay_size=1_000, batch_size=64, num_updates=4, hidden_sizes=(128, 128))
LANDING = dict(learning_rate=4e-4, gamma_1=0.997, gamma_2=0.995, eval_interval=100_000)
PRESETS = {
    "CartPole-v1": dict(total_timesteps=100_000),
    "Acrobot-v1": LARGER | dict(total_timesteps=150_000, reward_scale=0.2, batch_size=128, num_updates=8),
    "LunarLander-v3": dict(total_timesteps=800_000, **LANDING, **LARGER),
    "LaserHockey-v0": dict(total_timesteps=1_000_000, hidden_sizes=(128, 128), gamma_1=0.98, gamma_2=0.99),
    "Basic": dict(total_timesteps=50_000, player_args=("--agents", "16"), gamma_1=0.9, gamma_2=0.9, reward_scale=1.0),
}
VOTERS, BLOCKS, BEST = 7, 20, 3  # of GDI's: how many vote, in how many pieces a dimension is cut, proposals of each
FREE = ("num_actors", "eval_interval")  # may be another when a run goes on
AVERAGES = ("exp_avg_1", "exp_avg_sq_1", "exp_avg_2", "exp_avg_sq_2")  # Adam's
GREEDY = {"greedy/network_1": (1.0, 1.0, 1.0), "greedy/network_2": (1.0, 1.0, 0.0), "greedy/mixture": None}


def check(args):
    above_0 = ("max_k", "window", "learning_rate", "sequence_length", "replay_size", "batch_size", "reward_scale")
    above_0 += ("rho_bar", "c_bar", "max_grad_norm", "hidden_sizes", "context", "num_heads")
    from_0 = ("fixed_index", "ucb_coef", "num_updates", "vf_coef", "qf_coef", "pg_coef", "min_obs_std", "eval_interval")
    from_0 += ("num_actors",)
    at_most = {"hidden_sizes": 2**16, "sequence_length": 10_000, "num_updates": 10_000, "bins": 1_000, "max_k": 1e6}
    at_most |= {"context": 1_000, "num_heads": 1_000, "window": 10**6, "fixed_index": 1e6, "num_actors": 1_000}
    runs.check(args, above_0, from_0, ("gamma_1", "gamma_2", "trace_lambda"), at_most)
    actors.check(args)
    if args.fixed_index[2] > 1:
        raise ValueError(f"--fixed-index {args.fixed_index}: the last, e, must be between 0 and 1")
    if args.bins < 2:
        raise ValueError(f"--bins {args.bins}: at least two, the lowest value and the highest")
    if args.replay_size < args.batch_size:
        raise ValueError(f"--replay-size {args.replay_size}: must hold a batch of {args.batch_size} (--batch-size)")
    if args.architecture == "transformer" and (not args.hidden_sizes or args.hidden_sizes[0] % args.num_heads):
        raise ValueError(f"--num-heads {args.num_heads}: does not divide --hidden-sizes {args.hidden_sizes}")


def describe(args, envs):
    window = args.context if args.architecture == "transformer" else 0
    return runs.describe(args, envs, discrete=True) | {"bins": getattr(envs, "bins", 0), "window": window}


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
        self.scale.copy_(torch.rsqrt((self.var + 1e-8).clamp(min=self.least**2)))


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(sizes, activation):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [layer_init(nn.Linear(a, b)), {"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Attention to the last `context` observations, nearer ones told from farther ones by a learned bias."""

    def __init__(self, width, heads, context):
        super().__init__()
        self.heads, self.context = heads, context
        self.norm, self.attend, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.near = nn.Parameter(torch.zeros(heads, context))
        layers = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.think = nn.Sequential(*layers)

    def forward(self, x, age):
        n, length, width = x.shape
        q, k, v = (y.view(n, length, self.heads, -1).transpose(1, 2) for y in self.attend(self.norm(x)).chunk(3, 2))
        place = torch.arange(length, device=x.device)
        back = place[:, None] - place  # how far a row looks back to reach another
        seen = (back >= 0) & (back < self.context) & (back <= age[..., None])  # no farther than its episode's first
        scores = q @ k.mT / math.sqrt(width / self.heads) + self.near[:, back.clamp(0, self.context - 1)]
        y = scores.masked_fill(~seen[:, None], -math.inf).softmax(3) @ v
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.think(x)


class Network(nn.Module):
    """V and A. age: how many observations of its episode came before a row; only a transformer asks."""

    def __init__(self, spec, args):
        super().__init__()
        sizes = (spec["obs_dim"], *args.hidden_sizes)
        self.body, self.blocks = mlp(sizes, args.activation), nn.ModuleList()
        if args.architecture == "transformer":
            sizes = sizes[:2]
            self.body = layer_init(nn.Linear(*sizes), 1.0)
            self.blocks.extend(Block(sizes[1], args.num_heads, args.context) for _ in args.hidden_sizes)
        self.value = layer_init(nn.Linear(sizes[-1], 1), 1.0)
        self.advantage = layer_init(nn.Linear(sizes[-1], sum(spec["branches"])), 0.01)

    def forward(self, x, age):
        x = self.body(x)
        for block in self.blocks:
            x = block(x, age)
        return x


def row_of(spec):
    """What is kept of a decision. age: decisions of its episode before it; alive: it is known what came of it; version:
    of the weights that acted, their updates."""
    row = [("obs", "f4", (spec["obs_dim"],)), ("mask", "?", (sum(spec["branches"]),)), ("index", "f4", (3,))]
    row += [("age", "i8"), ("action", "i8", (len(spec["branches"]),)), ("prob", "f4"), ("reward", "f4")]
    row += [("terminated", "f4"), ("alive", "f4"), ("version", "i8")]
    return np.dtype(row, align=True)


class Agent(nn.Module):
    """What acts, learns, is saved, evaluated and exported: the statistics of the observations and the index that the
    bandits think best are part of it. spec: the env in plain numbers."""

    def __init__(self, spec, args):
        super().__init__()
        self.obs_rms = Normalizer(spec["obs_dim"], least=args.min_obs_std) if args.norm_obs else nn.Identity()
        self.networks = nn.ModuleList(Network(spec, args) for _ in range(2))
        self.memory = len(self.networks[0].blocks) * (args.context - 1)  # observations before its own that a row sees
        ends = np.cumsum(spec["branches"]).tolist()
        self.branches = [slice(end - size, end) for end, size in zip(ends, spec["branches"], strict=True)]
        self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)  # the env's first choices
        self.register_buffer("index", torch.tensor([args.fixed_index]))
        self.row = row_of(spec)

    def sharpened(self, advantages, index, mask):
        """softmax(k A) of both networks, branch by branch. mask: 0 where a choice is forbidden."""
        forbidden = (mask.float() - 1.0) * 1e8
        logits = [a * index[..., i : i + 1] + forbidden for i, a in enumerate(advantages)]
        return [[x[..., branch].softmax(-1) for branch in self.branches] for x in logits]

    def act(self, obs, mask, index=None, age=None, deterministic=False):
        """Actions as the update sees them, and as the env gets them, and mu's probability of them. obs: with memory
        the last ones, and age theirs. index: the best if None."""
        index = self.index if index is None else index
        x = self.obs_rms(obs)
        features = [network(x, age) for network in self.networks]
        if self.memory:
            features = [x[:, -1] for x in features]
        advantages = [network.advantage(x) for network, x in zip(self.networks, features, strict=True)]
        e = index[..., 2:]
        policy = [e * p + (1 - e) * q for p, q in zip(*self.sharpened(advantages, index, mask), strict=True)]
        chosen = [p.argmax(1, True) if deterministic else torch.multinomial(p, 1) for p in policy]
        action, prob = torch.cat(chosen, 1), 1.0
        for p, choice in zip(policy, chosen, strict=True):  # a product of mixtures (3)
            prob = prob * p.gather(1, choice)
        return action, action + self.start, prob

    def forward(self, obs, age):
        """V and A of both networks, (network, sequence, row), of the rows after the first `memory`."""
        x = self.obs_rms(obs)
        features = [network(x, age)[:, self.memory :] for network in self.networks]
        values = [network.value(x).squeeze(2) for network, x in zip(self.networks, features, strict=True)]
        advantages = [network.advantage(x) for network, x in zip(self.networks, features, strict=True)]
        return torch.stack(values), torch.stack(advantages)


class Fixed(actors.Episodes):
    """Always the same index; and what all bandits have: points x between 0 and 1 in the place of indices, k by its
    logarithm."""

    def __init__(self, args):
        super().__init__()
        self.args = args

    def index(self, x):
        return np.array([*np.expm1(x[:2] * math.log1p(self.args.max_k)), x[2]])

    def point(self, index):
        return np.concatenate([np.log1p(index[..., :2]) / math.log1p(self.args.max_k), index[..., 2:]], -1)

    def draw(self):
        return np.array(self.args.fixed_index)

    def best(self):
        return self.draw()


class Tiles(Fixed):
    """GDI's: for each of x1, x2 and x3 some bandits with tiles of their own over the same blocks; one proposes."""

    def __init__(self, args):
        super().__init__(args)
        shape = (3, VOTERS, 1)
        width, offset = np.random.choice([2, 3, 4], shape), np.random.randint(0, 4, shape)
        self.tile = (np.arange(BLOCKS) + offset) // width  # of each block
        self.rate = np.random.choice([0.05, 0.1, 0.2], shape)
        self.greedy = np.random.rand(*shape) < 0.5  # proposes its best blocks, or draws them by their scores
        self.weights, self.tries = np.zeros((2, 3, VOTERS, BLOCKS))  # by tile

    def values(self):
        return np.take_along_axis(self.weights, self.tile, 2)

    def draw(self):
        axis, who = np.arange(3), np.random.randint(0, VOTERS, 3)  # all proposals have the same chance
        tile = self.tile[axis, who]
        values, tries = (np.take_along_axis(x[axis, who], tile, 1) for x in (self.weights, self.tries))
        score = (values - values.mean(1, keepdims=True)) / (values.std(1, keepdims=True) + 1e-8)
        coef = 1.0 if self.args.ucb_coef is None else self.args.ucb_coef
        score += coef * np.sqrt(np.log(1 + self.tries[axis, who].sum(1, keepdims=True)) / (1 + tries))
        noise = np.random.gumbel(size=score.shape)  # with it the largest are drawn without replacement
        score += np.where(self.greedy[axis, who], 1e-6 * noise, noise)
        block = np.argsort(score, 1)[axis, -1 - np.random.randint(0, BEST, 3)]
        return self.index((block + np.random.rand(3)) / BLOCKS)

    def best(self):
        return self.index((self.values().mean(1).argmax(1) + 0.5) / BLOCKS)  # (4)

    def update(self, index, episodic_return, step):
        if self.count == 0:
            self.weights[:] = episodic_return  # (4)
        block = (self.point(index) * BLOCKS).astype(int).clip(0, BLOCKS - 1)
        tile = np.take_along_axis(self.tile, block[:, None, None], 2)
        now = np.take_along_axis(self.weights, tile, 2)
        np.put_along_axis(self.weights, tile, now + self.rate * (episodic_return - now), 2)
        np.put_along_axis(self.tries, tile, np.take_along_axis(self.tries, tile, 2) + 1, 2)
        super().update(index, episodic_return, step)


class Random(Tiles):
    """Any index; which one is best it learns as GDI's do."""

    def draw(self):
        return self.index(np.random.rand(3))


class Window(Fixed):
    """Upper confidence bounds over a grid of indices, from the last episodes alone, their returns scaled to [0, 1]."""

    def __init__(self, args, ks=(0.1, 0.4, 0.7, 1.0), es=(0.0, 0.5, 1.0)):
        super().__init__(args)
        self.arms = np.array([(x1, x2, e) for x1 in ks for x2 in ks for e in es])

    def means(self):
        """How often each arm was drawn, and its mean return."""
        told = self.told[max(0, self.count - self.args.window) : self.count]
        arm = ((self.point(told[:, None, 1:4]) - self.arms) ** 2).sum(2).argmin(1)
        tries, total = (np.bincount(arm, x, len(self.arms)) for x in (None, told[:, 4]))
        return tries, total / np.maximum(tries, 1)

    def draw(self):
        tries, mean = self.means()
        if np.random.rand() < 0.05:
            return self.index(self.arms[np.random.randint(len(self.arms))])
        if not tries.all():
            return self.index(self.arms[np.random.choice(np.flatnonzero(tries == 0))])
        coef = 0.3 if self.args.ucb_coef is None else self.args.ucb_coef
        scaled = (mean - mean.min()) / (np.ptp(mean) + 1e-8)
        return self.index(self.arms[np.argmax(scaled + coef * np.sqrt(math.log(tries.sum()) / tries))])

    def best(self):
        tries, mean = self.means()
        return self.index(self.arms[np.argmax(np.where(tries > 0, mean, -math.inf))])


BANDITS = {"gdi": Tiles, "window": Window, "random": Random, "fixed": Fixed}


Batch = namedtuple("Batch", "obs age mask index action prob reward terminated alive")


def make_batch(rows, memory, device):
    """Columns of sequences; all but what is seen are of the rows to learn from."""
    columns = [rows[name] if name in ("obs", "age") else rows[name][:, memory:-1] for name in Batch._fields]
    return Batch(*(torch.as_tensor(np.ascontiguousarray(x), device=device) for x in columns))


def shape(reward, how):
    """GDI's two."""
    if how == "log":
        return torch.log1p(reward.abs()) * torch.where(reward >= 0, 2.0, -1.0)
    if how == "root":
        return reward.sign() * ((1 + reward.abs()) ** 0.25 - 1) + 0.001 * reward
    return reward


def traced(deltas, x):
    """acc_t = delta_t + x_t acc_{t+1} of all rows at once: each pass looks twice as far. Time is the last axis."""
    far = 1
    while far < deltas.shape[-1]:
        deltas = deltas + x * nn.functional.pad(deltas[..., far:], (0, far))
        x = x * nn.functional.pad(x[..., far:], (0, far))
        far *= 2
    return deltas


def vtrace(rewards, values, discounts, rho, c):
    """V's targets and the policy's advantages. values have an entry more, of what follows. discounts: 0 where the
    episode terminates; rho and c: 0 in dead rows, whose target is V itself."""
    deltas = rho * (rewards + discounts * values[..., 1:] - values[..., :-1])
    vs = values[..., :-1] + traced(deltas, discounts * c)
    next_vs = torch.cat([vs[..., 1:], values[..., -1:]], -1)
    return vs, rho * (rewards + discounts * next_vs - values[..., :-1])


def retrace(rewards, values, q, discounts, c):
    """Q's targets: the next row's c, no rho, and V as the expected Q of what follows (2)."""
    deltas = rewards + discounts * values[..., 1:] - q
    return q + traced(deltas, discounts * nn.functional.pad(c[..., 1:], (0, 1)))


def loss(agent, mb, args):
    """The objective on sequences, and what is logged of it. Change it here: whatever is read from args stays live when
    it is compiled. First axis: the network."""
    values, advantages = agent(mb.obs, mb.age)
    v, advantages, e = values[:, :, :-1], advantages[:, :, :-1], mb.index[..., 2:]
    policies = agent.sharpened(advantages, mb.index, mb.mask)
    prob, q = torch.ones_like(v), v.detach()
    for k, (branch, p1, p2) in enumerate(zip(agent.branches, *policies, strict=True)):
        choice = mb.action[..., k : k + 1].expand(2, -1, -1, -1)
        pi = torch.stack([e * p1 + (1 - e) * p2.detach(), e * p1.detach() + (1 - e) * p2])  # each one's own gradient
        a = advantages[..., branch]
        prob = prob * pi.gather(3, choice).squeeze(3)
        q = q + a.gather(3, choice).squeeze(3) - (pi.detach() * a).sum(3)  # (2)
    with torch.no_grad():
        ratio = prob / mb.prob
        rho = mb.alive * ratio.clamp(max=args.rho_bar)
        c = mb.alive * args.trace_lambda * ratio.clamp(max=args.c_bar)
        rewards = torch.stack([shape(mb.reward, args.shaping_1), shape(mb.reward, args.shaping_2)])
        rewards = rewards * args.reward_scale  # (1)
        discounts = torch.stack([args.gamma_1 * (1 - mb.terminated), args.gamma_2 * (1 - mb.terminated)])
        vs, adv = vtrace(rewards, values, discounts, rho, c)
        qs = retrace(rewards, values, q, discounts, c)
    count = mb.alive.sum().clamp(min=1)
    losses = {
        "value_loss": ((vs - v) ** 2 * mb.alive).sum((1, 2)) / count,
        "q_loss": ((qs - q) ** 2 * mb.alive).sum((1, 2)) / count,
        "policy_loss": -(adv * prob.clamp(min=1e-30).log() * mb.alive).sum((1, 2)) / count,  # below it rho is 0
    }
    both = args.vf_coef * losses["value_loss"] + args.qf_coef * losses["q_loss"] + args.pg_coef * losses["policy_loss"]
    metrics = {f"losses/{name}": x.sum() for name, x in (*losses.items(), ("loss", both))}
    metrics |= {f"losses/{name}_{i + 1}": x[i] for name, x in (*losses.items(), ("loss", both)) for i in range(2)}
    metrics |= {f"losses/values_{i + 1}": (v[i] * mb.alive).sum() / count for i in range(2)}
    metrics["losses/ratio"] = (ratio[0] * mb.alive).sum() / count
    metrics["losses/clipfrac"] = ((ratio[0] > args.rho_bar) * mb.alive).sum() / count
    return both.sum(), metrics


def adam(weights, grad, exp_avg, exp_avg_sq, rate, correction):
    """Adam in place (6), on all weights at once. The last two: see adam_numbers()."""
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    weights.sub_(rate * exp_avg / (exp_avg_sq.sqrt() * correction + 1e-5))


def adam_numbers(step, lr):
    """Adam's learning rate and bias correction, worked out once and not at every weight, as a compiled kernel would."""
    return lr / (1 - 0.9**step), 1 / math.sqrt(1 - 0.999**step)


def update(args, objective, networks, averages, mb, *numbers):
    """One step of both networks on a batch. objective: loss() as a function of their weights too."""
    leaves = [weights.detach().requires_grad_() for weights in networks]
    value, metrics = objective.of(leaves, mb, args)
    grads = torch.autograd.grad(value, leaves)
    metrics = {name: x.detach() for name, x in metrics.items()}
    with torch.no_grad():
        for i, (weights, grad) in enumerate(zip(networks, grads, strict=True)):
            grad = ranks.mean(grad, rows=mb.alive.sum())
            grad_norm = grad.norm()  # (5)
            clipped = grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
            adam(weights, clipped, averages[2 * i], averages[2 * i + 1], *numbers)
            metrics[f"losses/grad_norm_{i + 1}"] = grad_norm
    return metrics


def train(args, resumed=None):
    """resumed: path and content of a checkpoint to go on from."""
    check(args)
    make = partial(actors.make_envs, make_envs, __file__) if args.num_actors else make_envs
    with runs.Run(args, __file__, make, resumed) as run:
        envs, n = run.envs, run.envs.num_envs
        spec, decisions = describe(args, envs), n * args.sequence_length
        if args.batch_size < n:
            raise ValueError(f"--batch-size {args.batch_size}: must hold a new sequence of each of {n} envs")
        if args.total_timesteps < decisions * ranks.SIZE:
            size = f"{n} envs x --sequence-length {args.sequence_length} = {decisions} decisions"
            raise ValueError(f"--total-timesteps {args.total_timesteps}: less than one sequence of each, {size}")

        agent = Agent(spec, args).to(args.device)
        bandit = BANDITS[args.bandit](args)
        rollout = Rollout(agent, n, args.sequence_length, bandit)
        runs.check_memory("--replay-size", args.replay_size, args.replay_size * rollout.rows[0].nbytes)
        replay = np.zeros((args.replay_size, *rollout.rows[0].shape), rollout.rows.dtype)
        networks = [fast.Vector(agent, only=[f"networks.{i}"]) for i in range(2)]
        averages = [torch.zeros_like(networks[i // 2].data) for i in range(4)]
        counts = {"updates": 0, "added": 0, "used": 0}  # the latter two: sequences in the replay, those learned from
        objective, acting = fast.Functional(loss, agent, *networks), fast.Acting(agent)
        step = run.compiled(update, args.total_timesteps // (decisions * ranks.SIZE) * args.num_updates)
        torch.set_num_threads(fast.threads(args.batch_size * args.sequence_length * max(args.hidden_sizes, default=1)))
        kept = {"optimizer": dict(zip(AVERAGES, averages, strict=True)), "counts": counts}
        kept |= {"bandit": bandit, "replay": replay.view(np.uint8)}
        words = f"sequences of {args.sequence_length}, batches of {n} and {args.batch_size - n} replayed"
        next_obs, infos = run.start(words, args.total_timesteps, spec, agent, kept, play, running={"rollout": rollout})
        rollout.version = counts["updates"]
        if args.num_actors:
            envs.launch(run.folder, spec, rollout.rows[0], counts["updates"], agent, bandit)
        else:
            rollout.start(next_obs, infos)

        for _ in run.iterations():
            lr = args.learning_rate * (1 - run.global_step / args.total_timesteps if args.anneal_lr else 1)
            act = None if args.num_actors else actor(acting, rollout.seen)
            while counts["added"] < counts["used"] + n:
                if args.num_actors:
                    rollout.sequences = envs.receive(run, bandit, agent.memory)
                else:
                    env_actions = rollout.act(act).reshape(n, *envs.single_action_space.shape)
                    run.spent("act")
                    next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                    run.record(reward, terminated, truncated, infos)
                    rollout.receive(next_obs, reward, terminated, truncated, infos, run.global_step)
                for sequence in rollout.sequences:
                    replay[counts["added"] % len(replay)] = sequence
                    counts["added"] += 1
                rollout.sequences.clear()
            run.spent("act")

            metrics, new = [], np.arange(counts["used"], counts["used"] + n) % len(replay)
            for _ in range(args.num_updates):
                old = np.random.randint(0, min(counts["added"], len(replay)), args.batch_size - n)
                mb = make_batch(replay[np.concatenate([new, old])], agent.memory, args.device)
                counts["updates"] += 1
                numbers = adam_numbers(counts["updates"], lr)
                metrics.append(step(args, objective, [x.data for x in networks], averages, mb, *numbers))
            rows = replay[new][:, agent.memory : -1]
            rows = rows[rows["alive"] > 0]
            scalars = fast.means(metrics) | {"charts/learning_rate": lr}
            if len(rows):
                scalars["charts/lag"] = (rollout.version - rows["version"]).mean()  # updates that were not known yet
            if args.norm_obs and ranks.total(len(rows)):
                agent.obs_rms.update(torch.as_tensor(rows["obs"], device=args.device))
            counts["used"], rollout.version = counts["used"] + n, counts["updates"]
            agent.index.copy_(torch.as_tensor(bandit.best())[None])
            if args.num_actors:
                envs.push(counts["updates"], agent, bandit)
            run.spent("learn")
            scalars |= {f"bandit/{name}": x for name, x in zip(("k1", "k2", "e"), agent.index[0].tolist(), strict=True)}
            if args.eval_interval and run.leads and run.passed(args.eval_interval):
                scalars |= mean_returns(make_envs, args, partial(play, agent, spec), GREEDY)
            run.log(scalars)


def main():
    runs.main(__file__, __doc__, Args, PRESETS, train, Agent, make_envs, describe, check, play, FREE)


if __name__ == "__main__":
    main()
