"""CrossQ for continuous actions: SAC with batch normalization and without target networks.

    python crossq_continuous.py --env-id 3DBall                   a bundled Unity scene
    python crossq_continuous.py --unity-path ./Builds/MyScene     your Unity build
    python crossq_continuous.py --godot-path ./my_game            your Godot game
    python crossq_continuous.py --env-id HalfCheetah-v5           any gymnasium env with bounded actions
    python crossq_continuous.py --resume runs/NAME                or --evaluate, --export

CrossQ (https://arxiv.org/abs/1902.05605) learns from fewer steps than SAC, and an update takes about
1.3 times as long. `diff sac_continuous.py crossq_continuous.py` shows what it changes:
 - All layers of policy and Q networks have batch normalized inputs. After --renorm-warmup-steps
   updates of a network, 100,000 by default, this becomes batch renormalization. Of the presets only
   the Q networks of Crawler get there: those of 3DBall make 19,900 updates.
 - There are no target networks. The Q networks evaluate (obs, action) and (next_obs, next_action) in
   one pass, so that both are normalized by the same statistics.
 - Adam's first beta is 0.5 for policy and Q networks, the learning rate is 1e-3, and the policy is
   updated once in three updates.

Agents in a game request decisions at their own pace. A transition is stored when its reward has
arrived: with the next decision of the same agent, or at the end of its episode. Only real ends are
stored as terminated, time limits are not.

Games simulate in their own processes, and the networks are updated meanwhile. The acting policy
then lags by the updates of one step. With --no-overlap, and with gymnasium's own vector
envs, the updates follow the step.

Differences from sb3-contrib's CrossQ (SB3) and from CleanRL's SAC, referenced by number in the code:
 1. SB3 and CleanRL train once per step of all envs. Here --updates-per-step is the number of
    updates per decision, and the decisions of all agents count.
 2. SB3 and this script clip the log std to [-20, 2]. CleanRL squashes it into [-5, 2].
 3. In SB3 and here, log-probs and Q networks use actions between -1 and 1. CleanRL uses the units
    of the env, which shifts the entropy.
 4. SB3 and this script use half the mean squared error for the critics, one learning rate for
    everything, and a temperature loss with log_alpha and the actions of the policy update. CleanRL
    uses the whole mean squared error, 1e-3 for critics and temperature, and a temperature loss with
    alpha and newly sampled actions after the policy update.
 5. SB3 and CleanRL store each observation twice. SB3's optimize_memory_usage stores it once, but then
    treats time limits as terminations. Here it is stored once, and final observations are kept.
 6. SB3's CrossQ and CleanRL's SAC do not normalize observations otherwise. With --norm-obs the
    replay buffer has raw observations, and the networks normalize what is sampled with the current
    statistics.
 7. CleanRL makes up for the policy updates that policy_frequency skips. SB3 updates policy and
    temperature in the last of policy_frequency updates, this script updates them in the first.
 8. Both Q networks are computed by one batched product per layer, which adds in another order. So
    where nothing else differs, results equal SB3's up to rounding.
 9. SB3's Q networks are 1,024 wide, the authors' 2,048. Here they are as wide as the policy: an
    update at width 1,024 takes ten times as long on a CPU.
10. After the warm-up SB3 normalizes by sqrt(var / r^2 + eps), and its gradient is NaN if a
    feature is constant in a minibatch. Here it is the formula of the paper, sqrt(var + eps) / r.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a policy is too small for several threads

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from envs.make import make_envs
from onefile_rl import distributed, fast, runs
from onefile_rl.normalizer import Normalizer


# Inherited from runs.Args: total_timesteps, seed, num_envs, device, and the options of Unity and
# Godot, checkpoints, videos and evaluation
@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder"""
    env_id: str = "Crawler"
    """a bundled scene (3DBall, Crawler, GodotDiscs), a gymnasium id, or module:id"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizers of policy, Q networks and temperature"""
    buffer_size: int = 1_000_000
    """the number of transitions in the replay buffer (of each rank, under torchrun)"""
    save_buffer: bool = False
    """save the replay buffer with each checkpoint; otherwise a resumed run fills a new one first"""
    learning_starts: int = 10_000
    """the number of decisions of all agents and ranks before the first update; their actions are random"""
    batch_size: int = 256
    """the number of transitions per update (and rank, under torchrun)"""
    updates_per_step: float = 1.0
    """updates per decision of any agent (of one rank, under torchrun); may be below 1; 0: collect data, do not learn"""
    policy_frequency: int = 3
    """updates of the Q networks per update of policy and temperature"""
    overlap: bool = True
    """update the networks while Unity, Godot or EnvPool simulate"""
    gamma: float = 0.99
    """the discount factor per decision"""
    alpha: float = 1.0
    """the temperature, the weight of the entropy; with autotune, its initial value"""
    autotune: bool = True
    """adjust the temperature so that the entropy reaches target_entropy"""
    target_entropy: float | None = None
    """the target of autotune; default: minus the number of action dimensions"""
    norm_obs: bool = False
    """normalize observations by their running mean and variance, and clip them to -10 and 10"""
    min_obs_std: float = 0.01
    """the smallest standard deviation that observations are divided by; 0: no minimum, as in SB3"""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """the widths of the hidden layers of policy and Q networks"""
    activation: Literal["relu", "silu"] = "relu"
    """the activation function; silu is ML-Agents' swish"""
    batch_norm_momentum: float = 0.01
    """the weight of a new minibatch in the running statistics of batch normalization"""
    renorm_warmup_steps: int = 100_000
    """updates of a network before its batch normalization becomes batch renormalization; most presets make fewer"""


# Settings per environment. Options on the command line take precedence.
# 3DBall and Crawler: sizes of networks, batches and buffer, discount and number of updates from
# ML-Agents' official settings. The initial temperature is a tenth and a twentieth of the official
# one: rewards per decision are small there, and entropy would outweigh them for a long time.
REACHER = dict(
    total_timesteps=100_000, buffer_size=100_000, learning_starts=1_000, batch_size=128, learning_rate=1e-3, gamma=0.95,
    hidden_sizes=(128, 128),
)  # fmt: skip
PRESETS = {
    "3DBall": dict(
        total_timesteps=200_000, buffer_size=200_000, learning_starts=1_000, batch_size=64, updates_per_step=0.1,
        alpha=0.05, norm_obs=True, hidden_sizes=(64, 64), activation="silu",
    ),
    "Crawler": dict(
        total_timesteps=5_000_000, buffer_size=500_000, learning_starts=5_000, updates_per_step=0.05, gamma=0.995,
        alpha=0.05, norm_obs=True, hidden_sizes=(512, 512, 512), activation="silu",
    ),
    "GodotDiscs": dict(
        total_timesteps=40_000, buffer_size=50_000, learning_starts=1_000, batch_size=128, updates_per_step=0.2,
        learning_rate=1e-3, gamma=0.98, alpha=0.05, norm_obs=True, hidden_sizes=(64, 64),
    ),
    "Reacher2Dof-v0": REACHER,
    "Reacher3Dof-v0": REACHER,
    "Reacher6Dof-v0": REACHER,
    "ReacherPlane-v0": REACHER,
}  # fmt: skip
LOG_INTERVAL = 1000  # decisions between two points of the logged curves
NORM_INTERVAL = 1000  # transitions between two updates of the statistics of the observations


def check(args):
    """Check the arguments before the run starts."""
    runs.check(
        args,
        above_0=(
            "learning_rate",
            "buffer_size",
            "batch_size",
            "policy_frequency",
            "alpha",
            "hidden_sizes",
        ),
        from_0=("learning_starts", "updates_per_step", "min_obs_std", "renorm_warmup_steps"),
        from_0_to_1=("gamma", "batch_norm_momentum"),
        at_most={"updates_per_step": 1_000, "hidden_sizes": 2**16},
    )
    if args.batch_size == 1:
        raise ValueError("--batch-size 1: batch normalization needs at least 2 transitions")
    if args.total_timesteps <= args.learning_starts and args.updates_per_step:
        fix = f"nothing would be learned, give more than --learning-starts {args.learning_starts}"
        raise ValueError(f"--total-timesteps {args.total_timesteps}: {fix}")


def describe(args, envs):
    """Return the env as a dict: obs_dim, action_dim, low, high. Refuse actions without bounds."""
    spec = runs.describe(args, envs)
    if not np.isfinite([spec["low"], spec["high"]]).all():
        reason = (
            "SAC needs bounded actions; ppo_continuous_multiagent.py accepts unbounded ones too"
        )
        raise ValueError(f"{args.env_id} has actions without bounds: {reason}")
    return spec


def check_buffer_size(args, spec, num_agents):
    """Return how many bytes the replay buffer needs, without the final observations, whose number is
    not known. Refuse a size that is too small, or too large for the memory."""
    if args.buffer_size < max(num_agents, args.batch_size):
        smallest = f"--batch-size {args.batch_size} and the number of agents, {num_agents}"
        raise ValueError(f"--buffer-size {args.buffer_size}: must be at least {smallest}")
    # 4 bytes for rewards and terminated, 8 for slots and next_row
    bytes_per_row = 4 * spec["obs_dim"] + 4 * spec["action_dim"] + 4 + 4 + 8 + 8
    num_bytes = (args.buffer_size + num_agents) * bytes_per_row
    runs.check_memory("--buffer-size", args.buffer_size, num_bytes)
    return num_bytes


class BatchRenorm(nn.Module):
    """Batch renormalization (https://arxiv.org/abs/1702.03275) over the rows of (..., rows, features).

    In training mode rows are normalized with the mean and the variance of their minibatch. After
    the warm-up these are corrected towards the running mean and variance, within limits. In
    evaluation mode the running mean and variance are used, and do not change. `shape` is the shape
    of the statistics. With `frozen` no gradients of weight and bias are computed.
    """

    def __init__(self, shape, args, eps=1e-3, max_r=3.0, max_d=5.0):
        super().__init__()
        self.momentum = args.batch_norm_momentum
        self.warmup_steps = args.renorm_warmup_steps
        self.eps = eps
        self.max_r = max_r
        self.max_d = max_d
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x, frozen=False):
        weight = self.weight.detach() if frozen else self.weight
        bias = self.bias.detach() if frozen else self.bias
        running_std = (self.var + self.eps).sqrt()
        if not self.training:
            return (x - self.mean) / running_std * weight + bias

        mean = x.mean(-2, keepdim=True)
        var = x.var(-2, keepdim=True)
        std = (var + self.eps).sqrt()
        with torch.no_grad():
            is_warm = self.steps > self.warmup_steps
            r = (std / running_std).clamp(1 / self.max_r, self.max_r)
            d = ((mean - self.mean) / running_std).clamp(-self.max_d, self.max_d)
            r = torch.where(is_warm, r, 1.0)
            d = torch.where(is_warm, d, 0.0)
            self.mean.lerp_(mean, self.momentum)
            self.var.lerp_(var, self.momentum)
            self.steps += 1
        return ((x - mean) / std * r + d) * weight + bias  # SB3 differs (10) after the warm-up


def mlp(sizes, args, num_outputs):
    """Return the network of the actor. The Q networks are built in SoftQNetworks."""
    layers = []
    for size_in, size_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers.append(BatchRenorm((1, size_in), args))
        layers.append(nn.Linear(size_in, size_out))
        layers.append({"relu": nn.ReLU, "silu": nn.SiLU}[args.activation]())
    layers.append(BatchRenorm((1, sizes[-1]), args))
    layers.append(nn.Linear(sizes[-1], num_outputs))
    return nn.Sequential(*layers)


class SoftQNetworks(nn.Module):
    """`num_critics` Q networks side by side: CleanRL's qf1 and qf2 in one module.

    The weights of the networks are stacked, so each layer is one batched matrix product for all.
    mlp() is not used here: other layers belong in the loop of forward(). Dropout can be called there.
    For LayerNorm, replace self.norms[i] there: normalize without parameters, then apply a gain and a
    bias of shape (num_critics, 1, features), made in __init__ and detached if `frozen`. nn.LayerNorm
    would share its gain between the networks.
    """

    def __init__(self, sizes, args, num_critics=2):
        super().__init__()
        self.num_critics = num_critics
        self.activation = {"relu": nn.functional.relu, "silu": nn.functional.silu}[args.activation]
        self.norms = nn.ModuleList()  # one before each layer
        self.weights = nn.ParameterList()  # one per layer: (num_critics, inputs, outputs)
        self.biases = nn.ParameterList()  # one per layer: (num_critics, 1, outputs)
        sizes_out = (*sizes[1:], 1)
        networks = [list(map(nn.Linear, sizes, sizes_out)) for _ in range(num_critics)]
        for layers in zip(*networks, strict=True):
            self.norms.append(BatchRenorm((num_critics, 1, layers[0].in_features), args))
            self.weights.append(torch.stack([layer.weight.detach().T for layer in layers]))
            self.biases.append(torch.stack([layer.bias.detach()[None] for layer in layers]))

    def forward(self, normalized_obs, action, frozen=False):
        """Return the values of all networks, (num_critics, batch). `frozen`: compute no gradients of
        the weights."""
        x = torch.cat([normalized_obs, action], 1).expand(self.num_critics, -1, -1)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if frozen:
                weight = weight.detach()
                bias = bias.detach()
            x = self.norms[i](x, frozen)
            if i < last:
                x = self.activation(torch.baddbmm(bias, x, weight))

        # The last layer has one output: a sum is faster than a matrix product
        return (x * weight.mT).sum(2) + bias[..., 0]


class Agent(nn.Module):
    """Actor, Q networks, temperature and the statistics of the observations. `spec` describes the
    env: obs_dim, action_dim, and the bounds of the actions."""

    def __init__(self, spec, args):
        super().__init__()
        obs_dim = spec["obs_dim"]
        action_dim = spec["action_dim"]
        self.obs_rms = nn.Identity()
        if args.norm_obs:  # SB3 differs (6)
            self.obs_rms = Normalizer(obs_dim, min_std=args.min_obs_std)

        # The actor has two outputs per action dimension: mean and log std
        self.actor = mlp((obs_dim, *args.hidden_sizes), args, 2 * action_dim)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(args.alpha)]))
        self.qf = SoftQNetworks((obs_dim + action_dim, *args.hidden_sizes), args)
        self.bounds = runs.Bounds(spec)
        self.eval()  # only the updates use the statistics of minibatches

    def get_action(self, obs, noise=None):
        """Return actions between -1 and 1, their log-probs, and the mean actions. Actions are sampled
        with `noise`, standard normal numbers that are drawn here unless they are given."""
        mean, log_std = self.actor(self.obs_rms(obs)).chunk(2, 1)
        log_std = log_std.clamp(-20.0, 2.0)  # CleanRL differs (2)
        if noise is None:
            noise = torch.randn_like(mean)
        action = torch.tanh(mean + log_std.exp() * noise)

        # Log-density of the normal sample, minus the log-derivative of tanh: CleanRL differs (3)
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - torch.log(1 - action**2 + 1e-6)
        return action, log_prob.sum(1), torch.tanh(mean)

    def act(self, obs, deterministic=False):
        """Return the actions to learn from, between -1 and 1, and the same in the env's units."""
        if deterministic:
            _, _, action = self.get_action(obs, noise=0.0)  # so that no random numbers are drawn
        else:
            action, _, _ = self.get_action(obs)
        low = self.bounds.low
        high = self.bounds.high
        return action, action * (0.5 * (high - low)) + 0.5 * (high + low)


class Batch(NamedTuple):
    obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_obs: torch.Tensor
    terminated: torch.Tensor


class ReplayBuffer:
    """The last `capacity` transitions. Each observation is stored once: SB3 and CleanRL differ (5).

        row  obs  slots  actions  rewards  terminated  next_row
        0    o0   0      a0       1.0      0           2         next decision of slot 0: row 2
        1    o1   1      a1       0.5      0           6         end of an episode of slot 1: row 6
        2    o2   0      a2       0.7      0           4         next decision of slot 0: pending
        3    -                                                   not written yet
        4    o3   = pending_obs[0], the decision that slot 0 is waiting on
        5    o4   = pending_obs[1], the decision that slot 1 is waiting on
        6    o5   the final observation of the episode that ended with row 1
        ...

    A slot is an agent's place in the vector env. Here the capacity is 4, and there are 2 slots.
    `obs` has a row for each transition, then one for the pending decision of each slot, then those
    of the final observations. `next_row` is the row of a transition's next observation:

        next_row < capacity                 the agent's next decision in this episode, already stored
        capacity <= next_row < first_final  its pending decision
        first_final <= next_row             the final observation of its episode

    A decision is stored when its reward has arrived, in place of the oldest row. An agent's next
    decision is thus overwritten later than the decision before it, and `next_row` stays valid.
    There are at most `capacity` final observations. Their memory is used only when it is written.
    """

    # Saved with the buffer. A new array with one row per transition belongs here, and its bytes in
    # check_buffer_size
    COLUMNS = ("slots", "obs", "actions", "rewards", "terminated", "next_row")

    def __init__(self, capacity, num_slots, obs_dim, action_dim):
        self.capacity = capacity
        self.num_added = 0  # transitions since the start of the run
        self.first_final = capacity + num_slots  # the first row of the final observations
        self.obs = np.zeros((capacity + num_slots + capacity, obs_dim), np.float32)
        self.pending_obs = self.obs[capacity : capacity + num_slots]  # a view
        self.pending_actions = np.zeros((num_slots, action_dim), np.float32)
        self.slots = np.zeros(capacity, int)
        self.actions = np.zeros((capacity, action_dim), np.float32)
        self.rewards = np.zeros(capacity, np.float32)
        self.terminated = np.zeros(capacity, np.float32)
        self.next_row = np.zeros(capacity, int)
        self.last_row = np.full(num_slots, -1)  # the transition before the pending decision, or -1
        self.end = self.first_final  # the end of the final observations
        self.free_rows = []  # rows before the end whose final observation is no longer needed

    def __len__(self):
        return min(self.num_added, self.capacity)

    def decide(self, slots, obs, actions):
        """Remember the decisions of these slots until their rewards arrive."""
        self.pending_obs[slots] = obs
        self.pending_actions[slots] = actions

    def add(self, slots, reward, terminated, truncated, next_obs, infos):
        """Store the pending decisions of `slots`, whose rewards have arrived. The other arrays have
        an entry for each slot of the env."""
        numbers = np.arange(self.num_added, self.num_added + len(slots))
        rows = numbers % self.capacity
        self.forget(rows[numbers >= self.capacity])
        self.num_added += len(slots)
        self.slots[rows] = slots
        self.obs[rows] = self.pending_obs[slots]
        self.actions[rows] = self.pending_actions[slots]
        self.rewards[rows] = reward[slots]
        self.terminated[rows] = terminated[slots]

        # The transition before has its next observation in the new row
        last_row = self.last_row[slots]
        has_last = last_row >= 0
        self.next_row[last_row[has_last]] = rows[has_last]
        self.last_row[slots] = rows

        # The new row has its next observation in the pending decision
        self.pending_obs[slots] = next_obs[slots]
        self.next_row[rows] = self.capacity + slots

        # After an end next_obs is the first observation of the next episode
        done = terminated | truncated
        for slot in slots[done[slots]]:
            self.end_episode(slot, infos["final_obs"][slot])

    def forget(self, rows):
        """Remove the references to transitions that are about to be overwritten."""
        if len(rows) == 0:
            return
        next_row = self.next_row[rows]
        self.free_rows.extend(next_row[next_row >= self.first_final])
        slots = self.slots[rows]
        self.last_row[slots[self.last_row[slots] == rows]] = -1

    def end_episode(self, slot, real_next_obs):
        """Store the final observation of a slot's episode, as the next one of its last transition."""
        last_row = self.last_row[slot]
        if last_row < 0:
            return
        if self.free_rows:
            row = self.free_rows.pop()
        else:
            row = self.end
            self.end += 1
        self.obs[row] = real_next_obs
        self.next_row[last_row] = row
        self.last_row[slot] = -1

    def cut(self, slots):
        """End the episodes of slots whose game crashed, as a time limit does. Their pending
        decisions are never stored."""
        for slot in slots:
            self.end_episode(slot, self.pending_obs[slot])

    def sample(self, batch_size, device):
        """Return random transitions as tensors."""
        rows = np.random.randint(0, len(self), batch_size)
        columns = (
            self.obs.take(rows, 0),
            self.actions.take(rows, 0),
            self.rewards.take(rows),
            self.obs.take(self.next_row.take(rows), 0),
            self.terminated.take(rows),
        )
        return Batch(*(torch.as_tensor(column, device=device) for column in columns))

    def obs_since(self, num_added):
        """Return the observations that were stored after the first `num_added` transitions."""
        first = max(num_added, self.num_added - self.capacity)
        return self.obs[np.arange(first, self.num_added) % self.capacity]

    def state(self):
        """Return the content for a checkpoint, without actions that have no reward yet."""
        columns = {name: getattr(self, name)[: len(self)] for name in self.COLUMNS}
        return columns | {
            "pending_and_final_obs": self.obs[self.capacity : self.end],
            "last_row": self.last_row,
            "free_rows": self.free_rows,
            "num_added": self.num_added,
        }

    def restore(self, state):
        for name in self.COLUMNS:
            column = getattr(self, name)
            column[: len(state[name])] = state[name]
        self.end = self.capacity + len(state["pending_and_final_obs"])
        self.obs[self.capacity : self.end] = state["pending_and_final_obs"]
        self.last_row[:] = state["last_row"]
        self.free_rows = list(state["free_rows"])
        self.num_added = state["num_added"]


def update_critics(agent, q_optimizer, mb, next_noise, args):
    """Make one optimizer step of the Q networks. `next_noise` is the noise of the next actions."""
    alpha = agent.log_alpha.exp().detach()  # the same as in update_actor()
    # Next actions, by the actor in evaluation mode as in SB3
    with torch.no_grad():
        next_actions, next_log_pi, _ = agent.get_action(mb.next_obs, next_noise)

    # One pass for both observations and actions: batch normalization needs them in one minibatch
    obs = torch.cat([mb.obs, mb.next_obs])
    actions = torch.cat([mb.actions, next_actions])
    agent.qf.train()
    qf_values, qf_next_values = agent.qf(agent.obs_rms(obs), actions).chunk(2, 1)
    agent.qf.eval()

    # Target: reward + discounted soft value of the next observation, 0 after a termination
    with torch.no_grad():
        min_qf_next = qf_next_values.amin(0) - alpha * next_log_pi
        next_q_value = mb.rewards + args.gamma * (1 - mb.terminated) * min_qf_next

    # Sum of the losses of the Q networks: CleanRL differs (4)
    qf_loss = 0.5 * ((qf_values - next_q_value) ** 2).mean(1).sum()
    q_optimizer.zero_grad()
    qf_loss.backward()
    distributed.average_gradients(agent.qf.parameters())
    distributed.average_buffers(agent.qf)
    q_optimizer.step()

    metrics = {
        "losses/qf_loss": qf_loss,
        "losses/alpha": alpha.squeeze(),
    }
    for i, values in enumerate(qf_values, 1):
        metrics[f"losses/qf{i}_values"] = values.mean()
    return fast.detach(metrics)


def update_actor(agent, actor_optimizer, a_optimizer, obs, noise, args):
    """Make one optimizer step of the policy, and one of the temperature. `noise` is the noise of
    the actions."""
    # Policy
    alpha = agent.log_alpha.exp().detach()  # the same as in update_critics()
    agent.actor.train()
    pi, log_pi, _ = agent.get_action(obs, noise)
    agent.actor.eval()
    min_qf_pi = agent.qf(agent.obs_rms(obs), pi, frozen=True).amin(0)
    actor_loss = (alpha * log_pi - min_qf_pi).mean()
    # zero_grad() follows the step: a compiled update requires that policy and temperature have no
    # gradients when it starts
    actor_loss.backward()
    distributed.average_gradients(agent.actor.parameters())
    distributed.average_buffers(agent.actor)
    actor_optimizer.step()
    actor_optimizer.zero_grad()
    metrics = {"losses/actor_loss": actor_loss, "losses/entropy": -log_pi.mean()}

    # Temperature: CleanRL differs (4)
    if args.autotune:
        alpha_loss = -(agent.log_alpha * (log_pi.detach() + args.target_entropy)).mean()
        alpha_loss.backward()
        distributed.average_gradients([agent.log_alpha])
        a_optimizer.step()
        a_optimizer.zero_grad()
        metrics["losses/alpha_loss"] = alpha_loss
    return fast.detach(metrics)


def update(agent, q_optimizer, actor_optimizer, a_optimizer, mb, noise, next_noise, args):
    """Update Q networks, policy and temperature: once in policy_frequency updates. The others are
    update_critics() alone. One compiled function is faster than two."""
    metrics = update_critics(agent, q_optimizer, mb, next_noise, args)
    return metrics | update_actor(agent, actor_optimizer, a_optimizer, mb.obs, noise, args)


def find_first_update(args, run, rb, counters):
    """Return the number of decisions after which the updates start. A resumed run whose replay buffer
    was not saved makes learning_starts more decisions first, to fill a new one."""
    if not run.resumed or len(rb) > 0:
        return args.learning_starts
    counters["due_updates"] = 0.0  # drop the updates that were due when the run stopped
    first = f"{args.learning_starts} decisions fill a new one"
    print(f"The replay buffer was not saved: {first} before learning resumes", flush=True)
    step = run.global_step + args.learning_starts
    if args.updates_per_step and step >= args.total_timesteps:
        problem = f"nothing would be learned, learning resumes after {step}"
        raise ValueError(f"--total-timesteps {args.total_timesteps}: {problem}")
    return step


def train(args, resumed=None):
    """Train an agent. `resumed` is the path and the content of a checkpoint to continue from."""
    check(args)
    # A run seeds the random number generators, makes the envs and opens the log
    with runs.Run(args, __file__, make_envs, resumed) as run:
        envs = run.envs
        num_agents = envs.num_envs
        spec = describe(args, envs)
        buffer_bytes = check_buffer_size(args, spec, num_agents)
        # Of the envs that make_envs returns, these have step_async, because they simulate in other
        # processes or threads: UnityVecEnv, GodotVecEnv and EnvPoolEnvs
        overlap = args.overlap and hasattr(envs, "step_async")
        if args.target_entropy is None:
            args.target_entropy = -float(spec["action_dim"])

        agent = Agent(spec, args).to(args.device)
        betas = (0.5, 0.999)
        q_optimizer = fast.Adam(agent.qf.parameters(), lr=args.learning_rate, betas=betas)
        actor_optimizer = fast.Adam(agent.actor.parameters(), lr=args.learning_rate, betas=betas)
        a_optimizer = fast.Adam([agent.log_alpha], lr=args.learning_rate)
        rb = ReplayBuffer(args.buffer_size, num_agents, spec["obs_dim"], spec["action_dim"])
        counters = {
            "updates": 0,  # updates made
            "due_updates": 0.0,  # updates to make, with a fraction that waits for more decisions
            "normalized": 0,  # transitions that the statistics of the observations have seen
        }
        metrics = []
        action_space = envs.single_action_space
        action_center = 0.5 * (action_space.high + action_space.low)
        action_scale = 0.5 * (action_space.high - action_space.low)
        env_actions = np.zeros((num_agents, spec["action_dim"]), action_space.dtype)

        # Acceleration, off with --no-fast. The results are the same up to rounding, unless the agent
        # draws random numbers for anything other than its actions.
        # act(obs) is agent.act, on a CPU translated to numpy, with the current weights. The first call
        # and every 1000th after it are compared with agent.act. If they differ even after a new
        # translation, or if a layer can't be translated, agent.act itself is used from then on, and
        # a message says so
        act = fast.Acting(agent, enabled=args.fast)
        # The updates are compiled if 5,000 or more are expected and there is a C++ compiler, or with
        # --compile. Learning rates, floats of args and float arguments may change between calls.
        # Other Python values are compiled in: if one changes, a message says so, and the update is
        # no longer compiled. With --compile this is an error
        learning_decisions = args.total_timesteps - args.learning_starts
        expected_updates = int(learning_decisions * args.updates_per_step / distributed.SIZE)
        compiled_update = run.compile(update, expected_updates)
        compiled_update_critics = run.compile(update_critics, expected_updates)
        # Threads by the size of the largest product, that of both Q networks
        num_rows = 2 * 2 * args.batch_size  # two Q networks, obs and next_obs
        torch.set_num_threads(fast.threads(num_rows * max(args.hidden_sizes, default=1)))
        # Let malloc keep freed blocks of up to 32 MiB, 1 GiB in all: the next update needs the same
        fast.keep_freed_memory(threshold=2**25, trim=2**30)

        description = f"a replay buffer of {buffer_bytes / 2**20:,.0f} MiB"
        if overlap:
            description += ", updates during simulation"

        # Start or resume: reset the envs, or restore the checkpoint. Checkpoints contain the agent,
        # the arguments, and `keep`: anything with a state_dict, dicts and arrays. These are restored
        # in place, so numbers that the loop changes are in a dict. Objects in `large`, which have
        # state() and restore(), are saved in files of their own
        next_obs, infos = run.start(
            agent,
            spec,
            args.total_timesteps,
            keep={
                "q_optimizer": q_optimizer,
                "actor_optimizer": actor_optimizer,
                "a_optimizer": a_optimizer,
                "counters": counters,
            },
            large={"buffer": rb} if args.save_buffer else {},
            description=description,
        )

        first_update_step = find_first_update(args, run, rb, counters)
        is_learning = False
        # A resumed run: episodes of the buffer that the envs could not continue end here. If the
        # last save of the buffer failed, it has fewer transitions than the checkpoint
        rb.cut(run.lost_slots)
        counters["normalized"] = min(counters["normalized"], rb.num_added)

        # Agents decide at their own pace. infos has these flags for each slot:
        #   ready      it requests an action now: its row of next_obs is new
        #   closed     the reward of its pending action has arrived, with its next request or with
        #              the end of its episode. A new or restarted agent is ready, but not closed
        #   restarted  its game crashed and was started again: its pending action never gets a
        #              reward. Only present after a crash
        # With gymnasium's own vector envs, every slot is ready and closed in every step
        ready = infos["ready"].nonzero()[0]

        def learn():
            """Make the updates that are due."""
            while counters["due_updates"] >= 1:
                mb = rb.sample(args.batch_size, args.device)
                # Drawn here, because compiled code would draw other numbers from the same seed
                noise = torch.randn_like(mb.actions)
                next_noise = torch.randn_like(mb.actions)
                if counters["updates"] % args.policy_frequency == 0:  # CleanRL differs (7)
                    optimizers = (q_optimizer, actor_optimizer, a_optimizer)
                    out = compiled_update(agent, *optimizers, mb, noise, next_noise, args)
                else:
                    out = compiled_update_critics(agent, q_optimizer, mb, next_noise, args)
                metrics.append(out)
                counters["updates"] += 1
                counters["due_updates"] -= 1

        # Until total_timesteps. run.log, at the end of the loop, also writes a checkpoint whenever
        # checkpoint_interval decisions have passed
        for _ in run.iterations():
            # Act for the agents that request a decision, at random before learning starts
            obs = next_obs[ready]
            if run.global_step < args.learning_starts:
                random_actions = [action_space.sample() for _ in ready]
                random_actions = np.reshape(random_actions, (len(ready), spec["action_dim"]))
                # To [-1, 1] and back, as in SB3: the env gets what the buffer stores, up to rounding
                actions = (random_actions - action_center) / action_scale
                env_actions[ready] = action_center + action_scale * actions
            else:
                actions, env_actions[ready] = act(obs)
                if not np.isfinite(actions).all():
                    run.check_agent()  # raises an error that names the weights that are not finite
            rb.decide(ready, obs, actions)
            run.spent("act")  # the time since the last call, for time/act and the progress line

            # Step the envs, and learn while games simulate
            if overlap:
                envs.step_async(env_actions)
                run.spent("env")
                learn()
                run.spent("learn")
                next_obs, reward, terminated, truncated, infos = envs.step_wait()
            else:
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
            # num_decisions: the rewards that arrived in this step, in all ranks. in_step: the ranks
            # exchange their counts now, which is possible because all of them make the same steps
            num_decisions = run.record(reward, terminated, truncated, infos, in_step=True)

            # Store the decisions whose reward has arrived
            if "restarted" in infos:
                rb.cut(np.flatnonzero(infos["restarted"]))
            closed = infos["closed"].nonzero()[0]
            rb.add(closed, reward, terminated, truncated, next_obs, infos)
            ready = infos["ready"].nonzero()[0]
            if not is_learning and run.global_step > first_update_step:
                # The decisions may be those of another rank: wait until all ranks can sample
                is_learning = distributed.minimum(len(rb)) > 0
            if is_learning:  # SB3 and CleanRL differ (1). All ranks make each update together
                counters["due_updates"] += args.updates_per_step * num_decisions / distributed.SIZE

            # Update the statistics of the observations
            if args.norm_obs:
                num_new = distributed.total(rb.num_added - counters["normalized"])
                if num_new >= NORM_INTERVAL * distributed.SIZE:
                    new_obs = rb.obs_since(counters["normalized"])
                    agent.obs_rms.update(torch.as_tensor(new_obs, device=args.device))
                    counters["normalized"] = rb.num_added
            run.spent("act")  # storing and normalizing count as acting

            # Learn after the step
            if not overlap:
                learn()
                run.spent("learn")

            # Log
            if run.due(LOG_INTERVAL):
                run.log(fast.means(metrics))
                metrics.clear()


def main():
    runs.main(
        __file__,
        __doc__,
        Args,
        PRESETS,
        train,
        Agent,
        make_envs,
        describe,
        check,
        free=["save_buffer"],  # options that may differ when a run is resumed
    )


if __name__ == "__main__":
    main()
