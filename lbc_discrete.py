"""Two policies mixed by bandits, for discrete actions: generalized data distribution iteration
(GDI) and learnable behaviour control (LBC).

    python lbc_discrete.py --env-id CartPole-v1                     any gymnasium env
    python lbc_discrete.py --env-id Pendulum-v1 --bins 7            continuous actions as 7 choices
    python lbc_discrete.py --env-id Basic                           a bundled Unity scene
    python lbc_discrete.py --env-id CartPole-v1 --architecture transformer --num-actors 2
    python lbc_discrete.py --evaluate runs/NAME --capture-video     also --resume and --export
    python benchmarks/plot_bandit.py runs/NAME                      plot losses, returns, indices

Two networks estimate V(s) and A(s, a), each with its own discount and its own shaping of the
rewards. Each network has a softmax policy, softmax(k A), where k is 1 / temperature. The agent
acts with the behaviour policy, a mixture of both:

    mu = epsilon softmax(k1 A1) + (1 - epsilon) softmax(k2 A2)

The triple (k1, k2, epsilon) is the index of the mixture. At the start of each episode, bandits
draw an index for the env, and at the end they learn from the sum of the env's rewards, neither
shaped nor discounted, how good the index was.
Decisions are stored in sequences, each with its index and with mu's probability of the action,
and the sequences go into a replay buffer. An update takes the new sequences and some old ones.
The target policy pi is the mixture at the stored index, but computed with the current networks,
and each network gets the gradient through its own softmax only. V learns the targets of V-trace,
Q = A - E[A] + V learns the targets of Retrace, and the policy follows the policy gradient with
the advantages of V-trace. So there are three losses per network.

The papers are GDI (Fan & Xiao, ICML 2022) and LBC (Fan et al., ICLR 2023). Where GDI leaves
something open, or where something else worked better here, this script decides as follows. The
numbers are those of the comments at the lines:
 1. Rewards are shaped first and then multiplied by --reward-scale. It should keep values within
    about 10: no other setting matters as much.
 2. The gradients of V inside Q, and of the policy inside E[A], are stopped. Retrace bootstraps
    with the expected Q of the next state, which is V by construction. GDI's appendix has the Q of
    the sampled action.
 3. An action with several branches has a product of mixtures, one per branch. GDI has one branch.
 4. The bandits' exploration coefficient is 1, each bandit has one tiling, and the estimates of
    all tiles start at the first return. The greedy policy is the argmax of the mixture at the
    index that the bandits estimate to be best.
 5. After a time limit an extra row has the final observation. After a crash of the game, the row
    whose reward never arrives takes its place. Only the value of such a row is used, to bootstrap.
    So the state after a row is always that of the next row, and no trace passes the extra row,
    because rho and c are 0 there.
 6. Gradients are clipped network by network, because k multiplies them by up to 50.
 7. Adam without weight decay, and small sequences and batches: GDI's numbers are for Atari with
    160 envs.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a policy is too small for several threads

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from envs.bins import make_envs
from onefile_rl import actor_processes, checkpoints, distributed, fast, runs
from onefile_rl.evaluate import mean_returns
from onefile_rl.normalizer import Normalizer


@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder"""
    env_id: str = "CartPole-v1"
    """a bundled scene (Basic), a gymnasium id, or module:id"""
    num_envs: int = 8
    """the number of gymnasium envs; a Unity scene has as many as it has agents"""
    bandit: Literal["gdi", "window", "random", "fixed"] = "gdi"
    """what draws the indices: GDI's bandits, a bandit with a sliding window, chance, or
    --fixed-index"""
    fixed_index: tuple[float, float, float] = (10.0, 10.0, 0.5)
    """the index of --bandit fixed: k1, k2 and epsilon"""
    max_k: float = 50.0
    """the largest k of an index; k is 1 / temperature and at least 0"""
    ucb_coef: float | None = None
    """the weight of the bandits' exploration bonus; default: 1 for gdi, 0.3 for window"""
    window: int = 400
    """the number of episodes that --bandit window uses"""
    num_actors: int = 0
    """the number of actor processes, each with num_envs envs; 0 acts in this process. An iteration
    collects a sequence for each of the num_actors * num_envs envs"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizer"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    sequence_length: int = 20
    """decisions per sequence"""
    replay_size: int = 400
    """sequences in the replay buffer"""
    batch_size: int = 32
    """sequences per update: new ones, as many as there are envs in all actors, and replayed ones"""
    num_updates: int = 2
    """updates per iteration; 0: only the normalization statistics and the bandits learn"""
    gamma_1: float = 0.99
    """the discount factor per decision of network 1"""
    gamma_2: float = 0.99
    """the discount factor per decision of network 2"""
    shaping_1: Literal["none", "log", "root"] = "none"
    """the shaping of network 1's rewards: log is 2 log(1 + r), or -log(1 - r) below 0; root is
    sign(r) ((1 + |r|)^(1/4) - 1) + 0.001 r"""
    shaping_2: Literal["none", "log", "root"] = "none"
    """the shaping of network 2's rewards"""
    reward_scale: float = 0.1
    """the factor of shaped rewards: values should stay within about 10"""
    rho_bar: float = 1.05
    """the clipping threshold of V-trace's rho, the weights of the temporal differences"""
    c_bar: float = 1.05
    """the clipping threshold of V-trace's and Retrace's c, the weights of the traces"""
    trace_lambda: float = 1.0
    """the lambda of the traces: 0 is one step, 1 the whole sequence"""
    vf_coef: float = 1.0
    """the weight of the two V losses"""
    qf_coef: float = 1.0
    """the weight of the two Q losses"""
    pg_coef: float = 1.0
    """the weight of the two policy losses"""
    max_grad_norm: float = 1.0
    """the maximum norm for gradient clipping, of each network"""
    norm_obs: bool = True
    """normalize observations by their running mean and variance, and clip them to -10 and 10"""
    min_obs_std: float = 0.01
    """the smallest standard deviation that observations are divided by"""
    architecture: Literal["dense", "transformer"] = "dense"
    """dense layers for one observation, or a causal transformer for the last ones"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """the widths of the layers; a transformer has as many blocks, all with the first width"""
    activation: Literal["tanh", "silu"] = "tanh"
    """the activation function of dense layers"""
    context: int = 8
    """observations that a block of the transformer attends to, including the current one"""
    num_heads: int = 4
    """the number of attention heads of a block"""
    bins: int = 11
    """the number of values per dimension that continuous actions are discretized to"""
    eval_interval: int = 20_000
    """decisions between greedy evaluations of both networks and of the mixture; 0 for none"""


# Settings per environment. Options on the command line take precedence.
LARGER = dict(
    num_envs=16, replay_size=1_000, batch_size=64, num_updates=4, hidden_sizes=(128, 128),
)  # fmt: skip
PRESETS = {
    "CartPole-v1": dict(total_timesteps=100_000),
    "Acrobot-v1": LARGER | dict(
        total_timesteps=150_000, reward_scale=0.2, batch_size=128, num_updates=8,
    ),
    "LunarLander-v3": LARGER | dict(
        total_timesteps=800_000, learning_rate=4e-4, gamma_1=0.997, gamma_2=0.995, eval_interval=100_000,
    ),
    "LaserHockey-v0": dict(
        total_timesteps=1_000_000, hidden_sizes=(128, 128), gamma_1=0.98, gamma_2=0.99,
    ),
    "Basic": dict(
        total_timesteps=50_000, player_args=("--agents", "16"), gamma_1=0.9, gamma_2=0.9, reward_scale=1.0,
    ),
}  # fmt: skip

# Options that may differ when a run is resumed
FREE = ("num_actors", "eval_interval")

# The indices of the greedy evaluations. None is the index that the bandits estimate to be best
GREEDY = {
    "greedy/network_1": (1.0, 1.0, 1.0),
    "greedy/network_2": (1.0, 1.0, 0.0),
    "greedy/mixture": None,
}


def check(args):
    """Check the arguments before the run starts."""
    runs.check(
        args,
        above_0=(
            "max_k", "window", "learning_rate", "sequence_length", "replay_size", "batch_size",
            "reward_scale", "rho_bar", "c_bar", "max_grad_norm", "hidden_sizes", "context", "num_heads",
        ),
        from_0=(
            "fixed_index", "ucb_coef", "num_actors", "num_updates", "vf_coef", "qf_coef", "pg_coef",
            "min_obs_std", "eval_interval",
        ),
        from_0_to_1=("gamma_1", "gamma_2", "trace_lambda"),
        at_most={
            "fixed_index": 1e6, "max_k": 1e6, "window": 10**6, "num_actors": 1_000,
            "sequence_length": 10_000, "num_updates": 10_000, "hidden_sizes": 2**16, "context": 1_000,
            "num_heads": 1_000, "bins": 1_000,
        },
    )  # fmt: skip
    actor_processes.check(args)
    if args.fixed_index[2] > 1:
        given = f"--fixed-index {args.fixed_index}"
        raise ValueError(f"{given}: epsilon, the last number, must be between 0 and 1")
    if args.bins < 2:
        raise ValueError(
            f"--bins {args.bins}: must be at least 2, the lowest and the highest value"
        )
    if args.replay_size < args.batch_size:
        given = f"--replay-size {args.replay_size}"
        raise ValueError(f"{given}: must be at least --batch-size {args.batch_size}")
    if args.architecture == "transformer":
        sizes = args.hidden_sizes
        if not sizes or sizes[0] % args.num_heads:
            given = f"--num-heads {args.num_heads}"
            raise ValueError(f"{given}: must divide the first of --hidden-sizes {sizes}")
        if args.context < 2:
            fix = "a transformer needs at least 2; use --architecture dense"
            raise ValueError(f"--context {args.context}: {fix}")


def describe(args, envs):
    """Return the spec: the env in plain numbers. `window` is a transformer's context, else 0."""
    spec = runs.describe(args, envs, discrete=True)
    spec["bins"] = getattr(envs, "bins", 0)
    spec["window"] = args.context if args.architecture == "transformer" else 0
    return spec


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(sizes, activation):
    layers = []
    for size_in, size_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers.append(layer_init(nn.Linear(size_in, size_out)))
        layers.append({"tanh": nn.Tanh, "silu": nn.SiLU}[activation]())
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A transformer block with causal attention to the last `context` observations of the episode.
    Each head has a learned bias for each distance."""

    def __init__(self, width, num_heads, context):
        super().__init__()
        self.num_heads = num_heads
        self.context = context
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, context))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x, timestep):
        num_sequences, length, width = x.shape
        q, k, v = (
            part.view(num_sequences, length, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, 2)
        )

        # A row attends to itself and to earlier rows, within the context and within its episode
        position = torch.arange(length, device=x.device)
        distance = position[:, None] - position
        visible = (distance >= 0) & (distance < self.context) & (distance <= timestep[..., None])
        scores = q @ k.mT / math.sqrt(width / self.num_heads)
        scores = scores + self.distance_bias[:, distance.clamp(0, self.context - 1)]
        attention = scores.masked_fill(~visible[:, None], -math.inf).softmax(3)

        attended = (attention @ v).transpose(1, 2).reshape(num_sequences, length, width)
        x = x + self.out(attended)
        return x + self.mlp(x)


class Network(nn.Module):
    """V(s) and A(s, a), by dense layers from one observation or by a transformer from several."""

    def __init__(self, spec, args):
        super().__init__()
        self.blocks = nn.ModuleList()
        if args.architecture == "dense":
            sizes = (spec["obs_dim"], *args.hidden_sizes)
            self.body = mlp(sizes, args.activation)
            width = sizes[-1]
        else:
            width = args.hidden_sizes[0]
            self.body = layer_init(nn.Linear(spec["obs_dim"], width), std=1.0)
            for _ in args.hidden_sizes:
                self.blocks.append(Block(width, args.num_heads, args.context))

        # How many earlier observations a row can see
        self.memory = len(self.blocks) * (args.context - 1)
        self.value = layer_init(nn.Linear(width, 1), std=1.0)
        self.advantage = layer_init(nn.Linear(width, sum(spec["branches"])), std=0.01)

    def forward(self, x, timestep):
        """Return V and A. A transformer needs (sequence, row, obs) and the timestep of each row in
        its episode. It returns V and A of all rows but the first `memory`, which only serve as
        context. What is more than `timestep` rows before a row is empty or of another episode: any
        network with memory must mask it, as Block does."""
        x = self.body(x)
        for block in self.blocks:
            x = block(x, timestep)
        if self.memory:
            x = x[:, self.memory :]
        return self.value(x).squeeze(-1), self.advantage(x)


class Agent(nn.Module):
    """Both networks, the statistics of the observations and the best index: everything that is
    needed to act. `spec` describes the env in plain numbers."""

    def __init__(self, spec, args):
        super().__init__()
        self.obs_rms = nn.Identity()
        if args.norm_obs:
            self.obs_rms = Normalizer(spec["obs_dim"], min_std=args.min_obs_std)
        self.networks = nn.ModuleList([Network(spec, args), Network(spec, args)])
        self.memory = self.networks[0].memory

        # Where each branch of the action is in A, and its lowest number in the env
        ends = np.cumsum(spec["branches"]).tolist()
        self.branches = [slice(end - n, end) for end, n in zip(ends, spec["branches"], strict=True)]
        self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)
        # The index of greedy actions, as a row. After each iteration it is the bandits' best index
        self.register_buffer("best_index", torch.tensor([args.fixed_index]))

    def mixture(self, advantages, index, mask):
        """Return the probabilities of the mixture policy, one tensor per branch of the action:

            mu(a | s) = epsilon softmax(k1 A1(s, a)) + (1 - epsilon) softmax(k2 A2(s, a))

        `advantages` are A1 and A2, and the last dimension of `index` is k1, k2, epsilon. Actions
        whose `mask` is 0 have probability 0. Acting and learning both use this method, so a change
        applies to both.
        """
        k1 = index[..., 0:1]
        k2 = index[..., 1:2]
        epsilon = index[..., 2:3]
        forbidden = (mask.float() - 1.0) * 1e8
        logits_1 = advantages[0] * k1 + forbidden
        logits_2 = advantages[1] * k2 + forbidden
        mixture = []
        for branch in self.branches:
            probs_1 = logits_1[..., branch].softmax(-1)
            probs_2 = logits_2[..., branch].softmax(-1)
            mixture.append(epsilon * probs_1 + (1 - epsilon) * probs_2)
        return mixture

    def act(self, obs, mask, index=None, timestep=None, deterministic=False):
        """Return the actions to learn from, the same actions for the env, and mu's probabilities.

        The default of `index` is the best index. With a transformer `obs` are the last memory + 1
        observations of each agent, and `timestep` their timesteps.
        """
        if index is None:
            index = self.best_index
        x = self.obs_rms(obs)
        advantages = []
        for network in self.networks:
            _, advantage = network(x, timestep)
            advantages.append(advantage[:, 0] if self.memory else advantage)
        mixture = self.mixture(advantages, index, mask)
        if deterministic:
            actions = [probs.argmax(1, True) for probs in mixture]
        else:
            actions = [torch.multinomial(probs, 1) for probs in mixture]

        # The probability of an action with several branches: a product of mixtures (3)
        mu_prob = 1.0
        for probs, action in zip(mixture, actions, strict=True):
            mu_prob = mu_prob * probs.gather(1, action)
        action = torch.cat(actions, 1)
        return action, action + self.start, mu_prob[:, 0]

    def forward(self, obs, timestep):
        """Return V and A of both networks, stacked in the first dimension."""
        x = self.obs_rms(obs)
        values_1, advantages_1 = self.networks[0](x, timestep)
        values_2, advantages_2 = self.networks[1](x, timestep)
        return torch.stack([values_1, values_2]), torch.stack([advantages_1, advantages_2])


class Bandit:
    """Base class of the bandits. A bandit has three methods:

        draw()                                      return the index of a new episode
        update(index, episodic_return, global_step) learn from an episode that has ended
        best()                                      return the index for greedy actions

    Bandits divide the unit cube, not the space of indices: `to_point` maps an index into the cube,
    with k on a logarithmic scale, and `to_index` maps a point back.

    Checkpoints keep all attributes but `args`: numbers, strings, arrays, and lists, tuples and
    dicts of them.

    With --num-actors each actor process has a copy of the bandit, which draws its indices. The
    learner updates the original with all episodes. `update` also runs on the copy, with the
    episodes of its actor and a global_step of 0. Regularly the attributes of the original replace
    those of the copy. What `draw` changes in a copy is then lost, so change attributes in `update`.
    The history that a copy receives has the last --window episodes only, and its num_episodes counts
    these. A new bandit must call super().update(), and best() may be called before an episode has
    ended. Its name belongs in BANDITS and in Args.bandit.
    """

    def __init__(self, args):
        self.args = args
        self.num_episodes = 0
        # One row per episode: global_step, k1, k2, epsilon, return. It grows when it is full
        self.history = np.zeros((256, 5))

    def to_index(self, point):
        assert np.all((point >= 0) & (point <= 1)), f"not in the unit cube: {point}"
        k1, k2 = np.expm1(point[:2] * math.log1p(self.args.max_k))
        return np.array([k1, k2, point[2]])

    def to_point(self, index):
        ks = np.log1p(index[..., :2]) / math.log1p(self.args.max_k)
        return np.concatenate([ks, index[..., 2:]], -1)

    def update(self, index, episodic_return, global_step):
        if self.num_episodes == len(self.history):
            empty_rows = np.zeros((max(256, self.num_episodes), 5))
            self.history = np.concatenate([self.history, empty_rows])
        self.history[self.num_episodes] = global_step, *index, episodic_return
        self.num_episodes += 1

    def state(self, last=None):
        """Return copies of the attributes. `last` limits the history to the last episodes."""
        first = 0 if last is None else max(0, self.num_episodes - last)
        state = checkpoints.attributes(self, but=("args", "history", "num_episodes"))
        state["history"] = torch.tensor(self.history[first : self.num_episodes])
        state["num_episodes"] = self.num_episodes - first
        return state

    def restore(self, state):
        checkpoints.restore_attributes(self, state)


class FixedBandit(Bandit):
    """Always the same index."""

    def draw(self):
        return np.array(self.args.fixed_index)

    def best(self):
        return np.array(self.args.fixed_index)


class TileBandits(Bandit):
    """GDI's bandits. Each of the three dimensions of a point is cut into blocks and has several
    bandits, which differ in the tiles that group the blocks. To draw an index, each dimension takes
    the proposal of one of its bandits."""

    NUM_BANDITS = 7  # per dimension
    NUM_BLOCKS = 20
    NUM_PROPOSALS = 3  # a bandit proposes one of this many best blocks

    def __init__(self, args):
        super().__init__(args)
        shape = (3, self.NUM_BANDITS, 1)
        width = np.random.choice([2, 3, 4], shape)
        offset = np.random.randint(0, 4, shape)
        self.tile = (np.arange(self.NUM_BLOCKS) + offset) // width  # the tile of each block
        self.learning_rate = np.random.choice([0.05, 0.1, 0.2], shape)
        self.greedy = np.random.rand(*shape) < 0.5  # the others sample blocks by their scores
        # The estimated return of each tile, and its number of episodes. There are fewer tiles than
        # blocks, so the last entries are not used
        self.tile_values = np.zeros((3, self.NUM_BANDITS, self.NUM_BLOCKS))
        self.tile_counts = np.zeros((3, self.NUM_BANDITS, self.NUM_BLOCKS))

    def block_values(self):
        return np.take_along_axis(self.tile_values, self.tile, 2)

    def draw(self):
        # One bandit per dimension, and the values and counts of all blocks, which are those of
        # their tiles
        axis = np.arange(3)
        bandit = np.random.randint(0, self.NUM_BANDITS, 3)
        tile = self.tile[axis, bandit]
        values = np.take_along_axis(self.tile_values[axis, bandit], tile, 1)
        counts = np.take_along_axis(self.tile_counts[axis, bandit], tile, 1)

        # Upper confidence bounds of standardized values
        scores = (values - values.mean(1, keepdims=True)) / (values.std(1, keepdims=True) + 1e-8)
        ucb_coef = 1.0 if self.args.ucb_coef is None else self.args.ucb_coef  # (4)
        total = self.tile_counts[axis, bandit].sum(1, keepdims=True)
        scores += ucb_coef * np.sqrt(np.log(1 + total) / (1 + counts))

        # With Gumbel noise the blocks with the highest scores are a sample from softmax(scores),
        # without replacement. Greedy bandits use so little noise that it only breaks ties
        noise = np.random.gumbel(size=scores.shape)
        scores += np.where(self.greedy[axis, bandit], 1e-6 * noise, noise)

        # One of the best blocks in each dimension, and a random point in these blocks
        rank = np.random.randint(0, self.NUM_PROPOSALS, 3)
        block = np.argsort(scores, 1)[axis, -1 - rank]
        return self.to_index((block + np.random.rand(3)) / self.NUM_BLOCKS)

    def best(self):
        block = self.block_values().mean(1).argmax(1)
        return self.to_index((block + 0.5) / self.NUM_BLOCKS)  # (4)

    def update(self, index, episodic_return, global_step):
        if self.num_episodes == 0:
            self.tile_values[:] = episodic_return  # (4)
        block = (self.to_point(index) * self.NUM_BLOCKS).astype(int).clip(0, self.NUM_BLOCKS - 1)
        tile = np.take_along_axis(self.tile, block[:, None, None], 2)
        value = np.take_along_axis(self.tile_values, tile, 2)
        count = np.take_along_axis(self.tile_counts, tile, 2)
        value = value + self.learning_rate * (episodic_return - value)
        np.put_along_axis(self.tile_values, tile, value, 2)
        np.put_along_axis(self.tile_counts, tile, count + 1, 2)
        super().update(index, episodic_return, global_step)


class RandomBandit(TileBandits):
    """Uniformly random points. The best index is estimated as by GDI's bandits."""

    def draw(self):
        return self.to_index(np.random.rand(3))


class WindowBandit(Bandit):
    """Upper confidence bounds over a grid of points, from the last episodes only."""

    def __init__(self, args):
        super().__init__(args)
        points = (
            0.1,
            0.4,
            0.7,
            1.0,
        )  # in the unit cube: with --max-k 50 a k of 0.5, 3.8, 15 and 50
        epsilons = (0.0, 0.5, 1.0)
        arms = [(p1, p2, epsilon) for p1 in points for p2 in points for epsilon in epsilons]
        self.arms = np.array(arms)

    def statistics(self):
        """Return the number of episodes and the mean return of each arm."""
        history = self.history[max(0, self.num_episodes - self.args.window) : self.num_episodes]
        distances = ((self.to_point(history[:, None, 1:-1]) - self.arms) ** 2).sum(2)
        arm = distances.argmin(1)
        counts = np.bincount(arm, minlength=len(self.arms))
        totals = np.bincount(arm, history[:, -1], len(self.arms))
        return counts, totals / np.maximum(counts, 1)

    def draw(self):
        counts, means = self.statistics()
        if np.random.rand() < 0.05:
            return self.to_index(self.arms[np.random.randint(len(self.arms))])
        if not counts.all():
            return self.to_index(self.arms[np.random.choice(np.flatnonzero(counts == 0))])
        ucb_coef = 0.3 if self.args.ucb_coef is None else self.args.ucb_coef
        scores = (means - means.min()) / (np.ptp(means) + 1e-8)
        scores += ucb_coef * np.sqrt(math.log(counts.sum()) / counts)
        return self.to_index(self.arms[np.argmax(scores)])

    def best(self):
        counts, means = self.statistics()
        return self.to_index(self.arms[np.argmax(np.where(counts > 0, means, -math.inf))])


BANDITS = {"gdi": TileBandits, "window": WindowBandit, "random": RandomBandit, "fixed": FixedBandit}


def row_dtype(spec):
    """Return the dtype of a row, which is one decision."""
    num_branches = len(spec["branches"])
    fields = [
        ("obs", "f4", (spec["obs_dim"],)),
        ("mask", "?", (sum(spec["branches"]),)),
        ("index", "f4", (3,)),  # of the episode
        ("timestep", "i8"),  # the number of decisions of the episode before this one
        ("action", "i8", (num_branches,)),
        ("mu_prob", "f4"),  # the probability of the action under mu, when it was taken
        ("reward", "f4"),
        ("terminated", "f4"),
        ("valid", "f4"),  # 1 for a decision whose reward has arrived
        ("version", "i8"),  # the number of updates before, of the weights that chose the action
    ]
    return np.dtype(fields, align=True)


def rows_to_learn_from(sequences, memory):
    """Return the rows of sequences without the context before them and the state after them."""
    return sequences[..., memory:-1]


class Episode(NamedTuple):
    """An episode that has ended. Actor processes send it as a list."""

    index: list
    episodic_return: float
    length: int


class Rollout:
    """The latest decisions of each slot, one row each, that become sequences.

    This is the sequence of one slot, with memory 2 and sequence_length 4. The episode was truncated
    after the decision at o7, and o8 is its final observation. The next episode starts at o0.

        position      0      1      2      3      4      5      6
        obs           o4     o5     o6     o7     o8     o0     o1
        timestep      4      5      6      7      8      0      1
        valid         1      1      1      1      0      1      0
                      |---------|   |-----------------------|   |-|
                      context of    rows to learn from. Of o8   the state after the last row,
                      the first     only the value is used,     and the first row to learn from
                      rows          to bootstrap (5)            in the next sequence

    A slot is an agent's place in the vector env. `memory` is the number of earlier observations
    that a transformer can see, else 0. A row is started when an agent requests a decision and
    becomes valid when the reward arrives. When the last row of a sequence is started, the sequence
    is complete. It goes to `sequences`, and the slot continues with the last memory + 1 rows as its
    first ones.
    """

    ARRAYS = ("position", "timestep", "returns", "pending", "index")

    def __init__(self, spec, memory, num_slots, length, bandit=None):
        self.memory = memory
        self.bandit = bandit
        self.sequences = []  # complete ones
        self.rows = np.zeros((num_slots, memory + length + 1), row_dtype(spec))
        self.empty_row = np.zeros((), self.rows.dtype)
        self.empty_row["mu_prob"] = 1
        self.position = np.full(num_slots, memory)  # of the pending row, or of the next row
        self.timestep = np.zeros(num_slots, int)
        self.returns = np.zeros(num_slots)  # of the running episodes
        self.pending = np.zeros(num_slots, bool)  # whether a decision is waiting for its reward
        self.index = np.zeros((num_slots, 3))
        if bandit:
            self.start_episodes(range(num_slots))

    def state(self):
        state = {name: getattr(self, name).copy() for name in self.ARRAYS}
        # As bytes, because torch has no dtype for rows
        return state | {"rows": self.rows.view(np.uint8).copy()}

    def restore(self, state):
        for name in self.ARRAYS:
            getattr(self, name)[:] = state[name].numpy()
        self.rows.view(np.uint8)[:] = state["rows"].numpy()

    def observe(self, next_obs, infos):
        """Start a row for each slot that requests a decision. Return these slots and the inputs of
        `Agent.act` for them."""
        ready = infos["ready"].nonzero()[0]
        obs = next_obs[ready]
        mask = infos["action_mask"][ready]
        self.start_rows(ready, obs, mask)
        self.pending[ready] = True
        index = self.index[ready].astype(np.float32)
        if not self.memory:
            return ready, (obs, mask, index)
        context = (ready[:, None], self.position[ready, None] + np.arange(-self.memory, 1))
        return ready, (self.rows["obs"][context], mask, index, self.rows["timestep"][context])

    def start_rows(self, slots, obs, mask=True):
        """Start a row for each of these slots. It is not valid as long as it has no reward."""
        at = (slots, self.position[slots])
        self.rows[at] = self.empty_row
        self.rows["obs"][at] = obs
        self.rows["mask"][at] = mask
        self.rows["index"][at] = self.index[slots]
        self.rows["timestep"][at] = self.timestep[slots]

        # Sequences that are complete
        last = self.rows.shape[1] - 1
        for slot in slots[self.position[slots] == last]:
            self.sequences.append(self.rows[slot].copy())
            self.rows[slot, : self.memory + 1] = self.rows[slot, last - self.memory :]
            self.position[slot] = self.memory

    def decide(self, slots, actions, mu_prob, version):
        """Store the actions of slots that have requested one."""
        at = (slots, self.position[slots])
        self.rows["action"][at] = actions
        self.rows["mu_prob"][at] = mu_prob
        self.rows["version"][at] = version

    def add(self, reward, terminated, truncated, infos, global_step):
        """Store the rewards that have arrived, and let the bandit learn from the episodes that have
        ended. The arrays have an entry for each slot of the env. Return these episodes."""
        if "restarted" in infos:
            self.cut(np.flatnonzero(infos["restarted"]))
        closed = infos["closed"].nonzero()[0]
        at = (closed, self.position[closed])
        self.rows["reward"][at] = reward[closed]
        self.rows["terminated"][at] = terminated[closed]
        self.rows["valid"][at] = 1
        self.position[closed] += 1
        self.timestep[closed] += 1
        self.pending[closed] = False
        self.returns[closed] += reward[closed]

        # After a truncation an extra row has the final observation (5)
        bootstraps = closed[(truncated & ~terminated)[closed]]
        if len(bootstraps):
            final_obs = np.stack([infos["final_obs"][slot] for slot in bootstraps])
            self.start_rows(bootstraps, final_obs)
            self.position[bootstraps] += 1

        # The bandit learns from all episodes that have ended before it draws the next indices
        ended = np.flatnonzero(terminated | truncated)
        episodes = []
        for slot in ended:
            index = self.index[slot].copy()
            episodic_return = self.returns[slot].item()
            self.bandit.update(index, episodic_return, global_step)
            length = self.timestep[slot].item()
            episodes.append(Episode(index.tolist(), episodic_return, length))
        self.start_episodes(ended)
        return episodes

    def cut(self, slots):
        """End the episodes of slots whose game crashed. A pending row stays in the sequence, but
        never becomes valid. It has the observation after the last valid row, so its value is used
        to bootstrap (5)."""
        self.position[slots[self.pending[slots]]] += 1
        self.pending[slots] = False
        self.start_episodes(slots)

    def start_episodes(self, slots):
        for slot in slots:
            self.timestep[slot] = 0
            self.returns[slot] = 0
            self.index[slot] = self.bandit.draw()


class ReplayBuffer:
    """The last `size` sequences. `sequence` is an example of one."""

    def __init__(self, size, sequence):
        runs.check_memory("--replay-size", size, size * sequence.nbytes)
        self.sequences = np.zeros((size, *sequence.shape), sequence.dtype)
        self.num_added = 0
        self.num_used = 0  # the sequences that were added after these are new

    def add(self, sequence):
        self.sequences[self.num_added % len(self.sequences)] = sequence
        self.num_added += 1

    def new_inds(self, num_new):
        """Return the indices of the oldest `num_new` sequences that have not been used yet."""
        return np.arange(self.num_used, self.num_used + num_new) % len(self.sequences)

    def sample(self, num_new, batch_size):
        """Return a batch: `num_new` new sequences, and others that are sampled uniformly from all."""
        size = min(self.num_added, len(self.sequences))
        sampled_inds = np.random.randint(0, size, batch_size - num_new)
        return self.sequences[np.concatenate([self.new_inds(num_new), sampled_inds])]

    def state(self):
        sequences = self.sequences.view(np.uint8).copy()  # as in Rollout.state
        return {"sequences": sequences, "num_added": self.num_added, "num_used": self.num_used}

    def restore(self, state):
        self.sequences.view(np.uint8)[:] = state["sequences"].numpy()
        self.num_added = state["num_added"]
        self.num_used = state["num_used"]


class Batch(NamedTuple):
    """Sequences in the first dimension, rows in the second. `obs` and `timestep` have all rows of a
    sequence, the other columns only those to learn from."""

    obs: torch.Tensor
    timestep: torch.Tensor
    mask: torch.Tensor
    index: torch.Tensor
    action: torch.Tensor
    mu_prob: torch.Tensor
    reward: torch.Tensor
    terminated: torch.Tensor
    valid: torch.Tensor


def make_batch(sequences, memory, device):
    """Return sequences as a batch of tensors."""
    rows = rows_to_learn_from(sequences, memory)
    columns = []
    for name in Batch._fields:
        column = sequences[name] if name in ("obs", "timestep") else rows[name]
        columns.append(torch.as_tensor(np.ascontiguousarray(column), device=device))
    return Batch(*columns)


def shape_reward(reward, shaping):
    """Return the rewards with one of GDI's two shapings."""
    if shaping == "log":
        return torch.log1p(reward.abs()) * torch.where(reward >= 0, 2.0, -1.0)
    if shaping == "root":
        return reward.sign() * ((1 + reward.abs()) ** 0.25 - 1) + 0.001 * reward
    if shaping == "none":
        return reward
    raise ValueError(f"there is no shaping {shaping!r}")


def discounted_sums(deltas, weights):
    """Return x with x[t] = deltas[t] + weights[t] * x[t + 1], where time is the last dimension.

    This takes log2(length) steps instead of a loop over time: each step doubles how far every x[t]
    looks ahead.
    """
    ahead = 1
    while ahead < deltas.shape[-1]:
        deltas = deltas + weights * nn.functional.pad(deltas[..., ahead:], (0, ahead))
        weights = weights * nn.functional.pad(weights[..., ahead:], (0, ahead))
        ahead *= 2
    return deltas


def vtrace(rewards, values, discounts, rho, c):
    """Return the targets of V and the advantages of the policy gradient.

    `values` has one entry more than the others, for the state after the last row. `discounts` are 0
    where an episode terminates. `rho` and `c` are the clipped ratios, and 0 in rows that are not
    valid: there the target is V itself.
    """
    deltas = rho * (rewards + discounts * values[..., 1:] - values[..., :-1])
    vs = values[..., :-1] + discounted_sums(deltas, discounts * c)
    next_vs = torch.cat([vs[..., 1:], values[..., -1:]], -1)
    pg_advantages = rho * (rewards + discounts * next_vs - values[..., :-1])
    return vs, pg_advantages


def retrace(rewards, values, q, discounts, c):
    """Return the targets of Q. A trace is weighted by the c of the next row, and there is no rho.
    `values` are the expected Q (2), with one entry more than the others."""
    deltas = rewards + discounts * values[..., 1:] - q
    next_c = nn.functional.pad(c[..., 1:], (0, 1))
    return q + discounted_sums(deltas, discounts * next_c)


def lbc_loss(agent, mb, args):
    """Return the sum of the losses of both networks, and the metrics to log.

    The first dimension of values, advantages, ratios, targets and losses is the network. No network
    gets a gradient from the losses of the other.
    """
    # V and A of the rows to learn from. `values` also has the state after the last row
    values, advantages = agent(mb.obs, mb.timestep)
    newvalue = values[:, :, :-1]
    advantages = advantages[:, :, :-1]

    # The target policy pi, twice. pi_1 and pi_2 have the same probabilities: the gradient of pi_1
    # goes to network 1 only, that of pi_2 to network 2 only
    pi_1 = agent.mixture([advantages[0], advantages[1].detach()], mb.index, mb.mask)
    pi_2 = agent.mixture([advantages[0].detach(), advantages[1]], mb.index, mb.mask)

    # The probability and Q = A - E[A] + V of the actions (2), over all branches (3)
    pi_prob = torch.ones_like(newvalue)
    newq = newvalue.detach()
    for i, branch in enumerate(agent.branches):
        pi = torch.stack([pi_1[i], pi_2[i]])
        advantage = advantages[..., branch]
        action = mb.action[..., i : i + 1].expand(2, -1, -1, -1)
        expected_advantage = (pi.detach() * advantage).sum(3)
        newq = newq + advantage.gather(3, action).squeeze(3) - expected_advantage
        pi_prob = pi_prob * pi.gather(3, action).squeeze(3)

    # Targets
    with torch.no_grad():
        ratio = pi_prob / mb.mu_prob
        rho = mb.valid * ratio.clamp(max=args.rho_bar)
        c = mb.valid * args.trace_lambda * ratio.clamp(max=args.c_bar)
        rewards_1 = shape_reward(mb.reward, args.shaping_1)
        rewards_2 = shape_reward(mb.reward, args.shaping_2)
        rewards = torch.stack([rewards_1, rewards_2]) * args.reward_scale  # (1)
        discounts_1 = args.gamma_1 * (1 - mb.terminated)
        discounts_2 = args.gamma_2 * (1 - mb.terminated)
        discounts = torch.stack([discounts_1, discounts_2])
        vs, pg_advantages = vtrace(rewards, values, discounts, rho, c)
        qs = retrace(rewards, values, newq, discounts, c)

    # Three losses per network: means over the valid rows. The clamp avoids log(0): where it takes
    # effect, rho is nearly 0, and with it the advantage
    num_valid = mb.valid.sum().clamp(min=1)
    v_loss = ((vs - newvalue) ** 2 * mb.valid).sum((1, 2)) / num_valid
    q_loss = ((qs - newq) ** 2 * mb.valid).sum((1, 2)) / num_valid
    pg_loss = -(pg_advantages * pi_prob.clamp(min=1e-30).log() * mb.valid).sum((1, 2)) / num_valid
    loss = args.vf_coef * v_loss + args.qf_coef * q_loss + args.pg_coef * pg_loss

    metrics = {
        "losses/ratio": (ratio[0] * mb.valid).sum() / num_valid,
        "losses/clipfrac": ((ratio[0] > args.rho_bar) * mb.valid).sum() / num_valid,
    }
    losses = {"value_loss": v_loss, "q_loss": q_loss, "policy_loss": pg_loss, "loss": loss}
    for name, x in losses.items():
        metrics |= {f"losses/{name}": x.sum(), f"losses/{name}_1": x[0], f"losses/{name}_2": x[1]}
    for i in range(2):
        metrics[f"losses/values_{i + 1}"] = (newvalue[i] * mb.valid).sum() / num_valid
    return loss.sum(), metrics


def update(agent, optimizer, mb, args):
    """Make one optimizer step on a batch of sequences."""
    optimizer.zero_grad()
    loss, metrics = lbc_loss(agent, mb, args)
    loss.backward()
    # The mean over the ranks of torchrun, each weighted by its number of valid rows
    distributed.average_gradients(agent.networks.parameters(), mb.valid.sum())
    for i, network in enumerate(agent.networks):  # (6)
        params = network.parameters()
        grad_norm = nn.utils.clip_grad_norm_(params, args.max_grad_norm, foreach=False)
        metrics[f"losses/grad_norm_{i + 1}"] = grad_norm
    optimizer.step()
    return fast.detach(metrics)


def play(agent, spec, num_slots, index=None):
    """Return the function that evaluate() calls to act greedily in `num_slots` slots. `index` is the
    index of the mixture, by default the best index (4)."""
    # --no-fast turns off numpy acting everywhere in the process: see fast.Acting.allowed
    act = fast.Acting(agent, enabled=not agent.memory, deterministic=True)
    rollout = Rollout(spec, agent.memory, num_slots, length=1)
    rollout.index[:] = agent.best_index.cpu() if index is None else index

    def act_greedily(obs, infos, slots, new_episode):
        """Return the actions of `slots`, those that request one. `new_episode` has an entry for
        every slot. The rollout only keeps the earlier observations, for a transformer."""
        rollout.timestep[slots] = np.where(new_episode[slots], 0, rollout.timestep[slots] + 1)
        _, inputs = rollout.observe(obs, infos)
        _, env_actions, _ = act(*inputs)
        rollout.position[slots] += 1  # the row is complete, although it has no reward
        rollout.sequences.clear()
        return env_actions

    return act_greedily


def run_actor(args, spec, seed, learner):
    """Act in an actor process. Send sequences, and the episodes that have ended, to the learner.
    onefile_rl/actor_processes.py calls this in each process that it starts."""
    envs, _ = make_envs(args, seed)
    with contextlib.closing(envs):
        agent = Agent(spec, args)
        bandit = BANDITS[args.bandit](args)
        version = pull(learner, agent, bandit, version=0)
        rollout = Rollout(spec, agent.memory, envs.num_envs, args.sequence_length, bandit)
        act = fast.Acting(agent, enabled=args.fast and not agent.memory)
        env_actions = np.zeros((envs.num_envs, len(spec["branches"])), int)
        action_shape = (envs.num_envs, *envs.single_action_space.shape)
        episodes = []
        steps = 0
        next_obs, infos = envs.reset(seed=seed)
        ready, inputs = rollout.observe(next_obs, infos)

        while True:
            # Act for the agents that request a decision, and step the envs
            actions, env_actions[ready], mu_prob = act(*inputs)
            rollout.decide(ready, actions, mu_prob, version)
            next_obs, reward, terminated, truncated, infos = envs.step(
                env_actions.reshape(action_shape)
            )
            # The actor does not know the global step: see Bandit
            episodes += rollout.add(reward, terminated, truncated, infos, global_step=0)
            ready, inputs = rollout.observe(next_obs, infos)

            # Send the sequences that are complete, with the episodes that have ended since the last
            for sequence in rollout.sequences:
                learner.send(sequence, episodes)
                episodes = []
            rollout.sequences.clear()

            # Get the current networks, statistics and bandit
            steps += 1
            if steps % args.sequence_length == 0:
                version = pull(learner, agent, bandit, version)


def state_for_actors(version, agent, bandit, args):
    """Return the state that actor processes pull. `version` is the number of updates so far."""
    bandit_state = bandit.state(last=args.window)
    return {"version": version, "agent": agent.state_dict(), "bandit": bandit_state}


def pull(learner, agent, bandit, version):
    """Load the learner's state, if there is a new one, and return the version of the agent."""
    state = learner.pull()
    if state is None:
        return version
    agent.load_state_dict(state["agent"])
    bandit.restore(state["bandit"])
    return state["version"]


def train(args, resumed=None):
    """Train an agent. `resumed` is the path and the content of a checkpoint to continue from."""
    check(args)
    make_envs_or_actors = make_envs
    if args.num_actors:
        make_envs_or_actors = partial(actor_processes.replace_envs, make_envs, __file__)
    with runs.Run(args, __file__, make_envs_or_actors, resumed) as run:
        envs = run.envs
        num_envs = envs.num_envs
        spec = describe(args, envs)
        decisions = num_envs * args.sequence_length  # of an iteration
        if args.batch_size < num_envs:
            given = f"--batch-size {args.batch_size}"
            raise ValueError(f"{given}: must hold a new sequence of each of {num_envs} envs")
        if args.total_timesteps < decisions * distributed.SIZE:
            given = f"--total-timesteps {args.total_timesteps}"
            size = f"{num_envs} envs x --sequence-length {args.sequence_length}"
            if distributed.SIZE > 1:
                size += f" x {distributed.SIZE} processes"
            needed = decisions * distributed.SIZE
            raise ValueError(
                f"{given}: less than one sequence per env, {size} = {needed} decisions"
            )

        agent = Agent(spec, args).to(args.device)
        # (7). A module of Agent that is in no optimizer is an error
        optimizer = fast.Adam(agent.networks.parameters(), lr=args.learning_rate, eps=1e-5)
        initial_lrs = [group["lr"] for group in optimizer.param_groups]
        bandit = BANDITS[args.bandit](args)
        rollout = Rollout(spec, agent.memory, num_envs, args.sequence_length, bandit)
        rb = ReplayBuffer(args.replay_size, rollout.rows[0])
        env_actions = np.zeros((num_envs, len(spec["branches"])), int)
        action_shape = (num_envs, *envs.single_action_space.shape)
        counts = {"updates": 0}  # a dict, because a checkpoint can't restore a number in place

        # Acceleration: numpy instead of agent.act (not for a transformer), and a compiled update.
        # --no-fast runs both in plain PyTorch
        act = fast.Acting(agent, enabled=args.fast and not agent.memory)
        num_iterations = args.total_timesteps // (decisions * distributed.SIZE)
        compiled_update = run.compile(update, num_iterations * args.num_updates)
        # One thread if the matrix products of an update are small, because that is faster
        batch_rows = args.batch_size * args.sequence_length
        torch.set_num_threads(fast.threads(batch_rows * max(args.hidden_sizes, default=1)))

        # Start the run, or resume it. A checkpoint has the agent and `keep`, and `episodes` if the
        # env can be resumed
        next_obs, infos = run.start(
            agent,
            spec,
            args.total_timesteps,
            keep={"optimizer": optimizer, "counts": counts, "bandit": bandit, "replay": rb},
            episodes={"rollout": rollout},
            play=play,
            description=f"sequences of {args.sequence_length}, "
            f"batches of {num_envs} new and {args.batch_size - num_envs} replayed sequences",
        )

        # The flags of a slot in infos, after reset and after each step. With gymnasium envs every
        # slot is ready and closed in every step:
        #   ready        it requests an action now: its rows of next_obs and action_mask are new
        #   closed       the reward of its pending action has arrived, because it is ready again or
        #                its episode ended. A new or restarted agent is ready but not closed
        #   restarted    its game crashed and was started again: the reward of its pending action
        #                never arrives
        #   action_mask  True for each action that is allowed, with the branches side by side
        if args.num_actors:
            # Start the processes. Each of them calls run_actor
            state = state_for_actors(counts["updates"], agent, bandit, args)
            envs.launch(run.folder, spec, rollout.rows[0], state)
        else:
            ready, inputs = rollout.observe(next_obs, infos)

        # Loop until total_timesteps. run.log ends an iteration, and writes a checkpoint every
        # checkpoint_interval decisions
        for iteration in run.iterations():
            # Annealing
            if args.anneal_lr:
                remaining = 1 - run.global_step / args.total_timesteps
                for group, initial_lr in zip(optimizer.param_groups, initial_lrs, strict=True):
                    group["lr"] = initial_lr * remaining

            # Collect as many sequences as there are envs
            version = counts["updates"]
            while rb.num_added < rb.num_used + num_envs:
                if args.num_actors:
                    # Receive sequences, and let the bandit learn from the episodes that have ended
                    for sequence, message in envs.receive():
                        rb.add(sequence)
                        rows = rows_to_learn_from(sequence, agent.memory)
                        episodes = [Episode(*fields) for fields in message]
                        # Count decisions and episodes, as run.record does for envs of this process
                        run.record_episodes(
                            int(rows["valid"].sum()),
                            [(episode.episodic_return, episode.length) for episode in episodes],
                        )
                        for episode in episodes:
                            index = np.array(episode.index)
                            bandit.update(index, episode.episodic_return, run.global_step)
                else:
                    # Act for the agents that request a decision
                    actions, env_actions[ready], mu_prob = act(*inputs)
                    rollout.decide(ready, actions, mu_prob, version)
                    run.spent("act")  # the time since the last record() or spent() counts as "act"

                    next_obs, reward, terminated, truncated, infos = envs.step(
                        env_actions.reshape(action_shape)
                    )
                    run.record(reward, terminated, truncated, infos)  # counts decisions, episodes

                    # Store the rewards that have arrived, and the sequences that are complete.
                    # rollout.add also lets the bandit learn from episodes that have ended, and
                    # draw the indices of the next ones
                    rollout.add(reward, terminated, truncated, infos, run.global_step)
                    ready, inputs = rollout.observe(next_obs, infos)
                    for sequence in rollout.sequences:
                        rb.add(sequence)
                    rollout.sequences.clear()
            run.spent("act")  # the time to store the last step

            # Optimize both networks
            metrics = []
            for _ in range(args.num_updates):
                mb = make_batch(rb.sample(num_envs, args.batch_size), agent.memory, args.device)
                metrics.append(compiled_update(agent, optimizer, mb, args))
                counts["updates"] += 1

            # Update the statistics of the observations and the best index
            new_rows = rows_to_learn_from(rb.sequences[rb.new_inds(num_envs)], agent.memory)
            new_rows = new_rows[new_rows["valid"] > 0]
            if args.norm_obs and distributed.total(len(new_rows)):
                agent.obs_rms.update(torch.as_tensor(new_rows["obs"], device=args.device))
            rb.num_used += num_envs
            agent.best_index.copy_(torch.as_tensor(bandit.best())[None])
            if args.num_actors:
                envs.push(state_for_actors(counts["updates"], agent, bandit, args))
            run.spent("learn")

            # Log
            k1, k2, epsilon = agent.best_index[0].tolist()
            scalars = fast.means(metrics) | {
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "bandit/k1": k1,
                "bandit/k2": k2,
                "bandit/epsilon": epsilon,
            }
            if len(new_rows):
                # How many updates the weights that acted were behind
                scalars["charts/lag"] = (version - new_rows["version"]).mean()
            # Evaluate on rank 0, if another multiple of eval_interval was reached in this iteration
            if args.eval_interval and run.leads and run.passed(args.eval_interval):
                scalars |= mean_returns(make_envs, args, partial(play, agent, spec), GREEDY)
            run.log(scalars)


def main():
    runs.main(
        __file__,
        doc=__doc__,
        Args=Args,
        presets=PRESETS,
        train=train,
        Agent=Agent,
        make_envs=make_envs,
        describe=describe,
        check=check,
        play=play,
        free=FREE,
    )


if __name__ == "__main__":
    main()
