"""Proximal policy optimization with memory, discrete actions, one policy for all agents: Unity and gymnasium.

    python ppo_lstm_multiagent.py --env-id Hallway                              a bundled scene: no Unity needed
    python ppo_lstm_multiagent.py --unity-path ./Builds/MyScene                 your Unity build
    python ppo_lstm_multiagent.py --godot-path ./my_game                        your Godot game
    python ppo_lstm_multiagent.py --env-id CartPoleBlind-v0 --num-envs 8        any gymnasium env, discrete actions
    python ppo_lstm_multiagent.py --evaluate runs/NAME --capture-video          also --resume and --export runs/NAME

What memory changes in ppo_discrete_multiagent.py, which explains the rest:
 - An LSTM stands between the layers and the heads, one for the policy and one for the value. An agent's memory goes on
   from decision to decision, whatever its pace, and is zero where an episode begins.
 - A row keeps the memory that its decision began with. So log-probs and values are those of acting, and a final
   observation is judged with the memory of its episode.
 - Minibatches are whole sequences: rows of an agent that follow each other in an episode, --sequence-length at most,
   with the first one's memory. They are packed, not padded: short ones cost what they are.
 - The exported model has recurrent_in and recurrent_out, of --memory-size numbers: the policy's, as ML-Agents has it.
 - The update is not compiled: no two minibatches have the same shape.

What differs from Stable-Baselines3 (SB3) and from CleanRL: the numbers at the lines are those of that script's list.
sb3-contrib's RecurrentPPO cuts a sequence in two at random, once an epoch; here none is cut but at --sequence-length.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads are for larger products than a policy's

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

import fast
import ranks
import runs
from envs.vector import make_envs


@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """part of the run's name"""
    env_id: str = "CartPoleBlind-v0"
    """a bundled scene (Hallway), a gymnasium id, or module:id"""
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
    anneal_ent: bool = False
    """let it fall linearly to 0 too, as ML-Agents does"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """the gradient is scaled down to this norm"""
    target_kl: float | None = None
    """stop an iteration's updates when the policy has moved 1.5 times this far"""
    norm_obs: bool = True
    """normalise observations by their running mean and variance"""
    min_obs_std: float = 0.01
    """the smallest std to divide by: what hardly moves in training may move in Unity; 0 is SB3's"""
    norm_reward: bool = True
    """scale rewards by the running std of the discounted return"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the layers of policy and value network"""
    memory_size: int = 128
    """numbers that the policy remembers, as ML-Agents counts them: half of them are the LSTM's width"""
    sequence_length: int = 64
    """decisions that a gradient goes back through"""
    forget_bias: float = 0.0
    """added to the LSTM's forget gates at the start: they stay open longer, and so does what was seen last"""
    activation: Literal["tanh", "silu"] = "tanh"
    """between the layers; silu is what ML-Agents' networks have, there called swish"""


CLASSIC = dict(num_envs=8, num_steps=128, num_minibatches=4, learning_rate=1e-3, hidden_sizes=(64,))
PRESETS = {
    "CartPole-v1": dict(total_timesteps=200_000, **CLASSIC),
    "CartPoleBlind-v0": dict(total_timesteps=300_000, **CLASSIC),
    "Hallway": dict(  # ML-Agents' settings, but for 64 agents, normalised inputs, larger steps and open forget gates
        total_timesteps=4_000_000, player_args=("--agents", "64"), num_steps=64, num_minibatches=8, update_epochs=4,
        learning_rate=1e-3, ent_coef=0.02, norm_reward=False, hidden_sizes=(128, 128), activation="silu",
        forget_bias=2.0,
    ),
}  # fmt: skip


def check(args):
    if args.compile:
        raise ValueError("--compile: no two minibatches of sequences have the same shape, leave it out")
    above_0 = ("num_steps", "num_minibatches", "learning_rate", "max_grad_norm", "target_kl", "hidden_sizes")
    above_0 += ("memory_size", "sequence_length")
    from_0, from_0_to_1 = ("clip_coef", "ent_coef", "vf_coef", "update_epochs", "min_obs_std"), ("gamma", "gae_lambda")
    highest = {"update_epochs": 10_000, "hidden_sizes": 2**16, "memory_size": 2**16}
    runs.check(args, above_0, from_0, from_0_to_1, at_most=highest)
    if args.memory_size % 2:
        raise ValueError(f"--memory-size {args.memory_size}: must be even, half of it is the LSTM's width")


def describe(args, envs):
    return runs.describe(args, envs, discrete=True) | {"memory": args.memory_size}


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
        self.scale.copy_(torch.rsqrt((self.var + 1e-8).clamp(min=self.least**2)))  # SB3 differs (9)


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(sizes, activation):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [layer_init(nn.Linear(a, b)), {"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()]
    return nn.Sequential(*layers)


class Memory(nn.Module):
    """An LSTM. What it remembers is one vector: its output and its cells."""

    def __init__(self, size, width, forget_bias=0.0):
        super().__init__()
        self.seen, self.kept = nn.Linear(size, 4 * width), nn.Linear(width, 4 * width)
        for x in self.parameters():  # as torch's own
            nn.init.uniform_(x, -(width**-0.5), width**-0.5)
        self.seen.bias.data[width : 2 * width] += forget_bias

    def step(self, x, memory):
        """One decision: the output, and what is remembered. Change it here: it acts, and it is what is learned."""
        h, c = memory.chunk(2, 1)
        i, f, g, o = (self.seen(x) + self.kept(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, torch.cat([h, c], 1)


class Agent(nn.Module):
    """What acts, learns, is saved, evaluated and exported: the statistics of the observations are part of it. spec: the
    env in plain numbers."""

    def __init__(self, spec, args):
        super().__init__()
        sizes = (spec["obs_dim"], *args.hidden_sizes)
        self.obs_rms = Normalizer(spec["obs_dim"], least=args.min_obs_std) if args.norm_obs else nn.Identity()
        width = args.memory_size // 2
        self.actor_layers, self.critic_layers = mlp(sizes, args.activation), mlp(sizes, args.activation)
        self.actor_memory, self.critic_memory = (Memory(sizes[-1], width, args.forget_bias) for _ in range(2))
        self.unrolled = fast.Unrolled()
        self.actor = layer_init(nn.Linear(width, sum(spec["branches"])), std=0.01)
        self.critic = layer_init(nn.Linear(width, 1), std=1.0)
        ends = np.cumsum(spec["branches"]).tolist()
        self.branches = [slice(end - size, end) for end, size in zip(ends, spec["branches"], strict=True)]
        self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)  # the env's first choices

    def choices(self, x, mask):
        """Log-probs of each branch's choices. mask: 0 where one is forbidden."""
        logits = self.actor(x) + (mask.float() - 1.0) * 1e8
        return [logits[:, branch].log_softmax(1) for branch in self.branches]

    def act(self, obs, mask, memory, deterministic=False):
        """Actions as the update sees them, and as the env gets them; and what is remembered of it all."""
        x = self.obs_rms(obs)
        actors, critics = memory.chunk(2, 1)
        y, actors = self.actor_memory.step(self.actor_layers(x), actors)
        _, critics = self.critic_memory.step(self.critic_layers(x), critics)
        policy = self.choices(y, mask)
        chosen = [p.argmax(1, True) if deterministic else torch.multinomial(p.exp(), 1) for p in policy]
        action = torch.cat(chosen, 1)
        return action, action + self.start, torch.cat([actors, critics], 1)

    def get_value(self, obs, memory):
        out, _ = self.critic_memory.step(self.critic_layers(self.obs_rms(obs)), memory.chunk(2, 1)[1])
        return self.critic(out).flatten()

    def forward(self, obs, mask, memory, action, sizes=None):
        """Log-probs of the actions, the mean entropy, values. sizes: of packed sequences, and memory is that of their
        first rows; None: every row is a sequence of its own."""
        x, sizes = self.obs_rms(obs), torch.tensor([len(obs)]) if sizes is None else sizes
        memories, inputs = (self.actor_memory, self.critic_memory), (self.actor_layers(x), self.critic_layers(x))
        y, v = self.unrolled(memories, inputs, memory.chunk(2, 1), sizes)
        policy = self.choices(y, mask)
        logprob = sum(p.gather(1, a) for p, a in zip(policy, action.split(1, 1), strict=True)).squeeze(1)
        entropy = -sum((p.exp() * p).sum(1) for p in policy).mean()
        return logprob, entropy, self.critic(v).flatten()


class Rollout:
    """Decisions in the order in which they were asked for, a row each. A row is open until it is known what came of
    it."""

    COLUMNS = ("obs", "masks", "memory", "actions", "slot", "ended", "rewards", "returns")

    def __init__(self, capacity, n, obs_dim, branches, memory):
        self.obs, self.actions = np.zeros((capacity, obs_dim), np.float32), np.zeros((capacity, len(branches)), int)
        self.masks = np.ones((capacity, sum(branches)), bool)
        self.memory, self.now = np.zeros((capacity, memory), np.float32), np.zeros((n, memory), np.float32)
        self.slot, self.ended = np.zeros(capacity, int), np.zeros(capacity, bool)  # whose row; its episode ended here
        self.rewards, self.returns = np.zeros((2, capacity))  # the latter are discounted, of the episode so far
        self.closed, self.num_closed = np.zeros(capacity, int), 0  # rows in the order in which they were closed
        self.row, self.count, self.finals = np.full(n, -1), 0, {}  # each slot's open row; final observations by row
        self.discounted = np.zeros(n)  # each slot's last return
        self.asked, self.old = 0, 0  # how many asked last; rows whose actions were chosen before the last update

    def open(self, who, obs, mask):
        """These slots ask for actions."""
        first, self.count, self.asked = self.count, self.count + len(who), len(who)
        if self.count > len(self.slot):  # players that were lost left rows behind
            for name in (*self.COLUMNS, "closed"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        self.obs[first : self.count], self.masks[first : self.count], self.slot[first : self.count] = obs, mask, who
        self.memory[first : self.count], self.row[who] = self.now[who], np.arange(first, self.count)

    def act(self, who, actions, memory):
        """Of those who asked last."""
        self.actions[self.count - len(actions) : self.count], self.now[who] = actions, memory

    def close(self, who, rewards, terminated, truncated, infos, gamma):
        """What came of these slots' open rows. The arrays have an entry for each slot."""
        rows, before = self.row[who], self.num_closed
        self.num_closed += len(who)
        self.row[who], self.closed[before : self.num_closed] = -1, rows
        self.rewards[rows], self.ended[rows] = rewards[who], (terminated | truncated)[who]
        self.discounted[who] = self.returns[rows] = gamma * self.discounted[who] + rewards[who]
        if "final_obs" in infos:
            for row, slot in zip(rows, who, strict=True):
                if truncated[slot] and not terminated[slot]:  # CleanRL differs (5)
                    self.finals[row] = infos["final_obs"][slot], self.now[slot].copy()
            self.discounted[terminated | truncated], self.now[terminated | truncated] = 0, 0

    def drop(self, who):
        """These slots' open rows will never be closed: the rows before them end there, as at a time limit."""
        for slot in who[self.row[who] >= 0]:
            *_, before = -1, *np.flatnonzero(self.slot[: self.row[slot]] == slot)
            if before >= 0 and not self.ended[before]:
                row = self.row[slot]
                self.ended[before], self.finals[before] = True, (self.obs[row].copy(), self.memory[row].copy())
            self.slot[self.row[slot]] = -1
        self.row[who], self.discounted[who], self.now[who] = -1, 0, 0

    def forget(self, used):
        """Rows that were learned from. Open ones stay, and the few that agents of mixed periods have closed beyond the
        batch."""
        stays = self.slot[: self.count] >= 0
        stays[used] = False
        rows, new = np.flatnonzero(stays), np.cumsum(stays) - 1
        for column in (getattr(self, name) for name in self.COLUMNS):
            column[: len(rows)] = column[rows]
        left = self.closed[len(used) : self.num_closed]
        self.closed[: len(left)] = new[left]
        self.row[self.row >= 0] = new[self.row[self.row >= 0]]
        self.finals = {new[row]: obs for row, obs in self.finals.items() if stays[row]}
        self.count, self.num_closed, self.old = len(rows), len(left), len(rows) - self.asked


def gae(rewards, values, next_values, goes_on, gamma, gae_lambda):
    """Advantages of rows that stand agent by agent. next_values: of what follows the row, 0 at an end; goes_on: the
    next row follows in the episode."""
    advantages, lastgaelam = [0.0] * len(rewards), 0.0
    for i in range(len(rewards) - 1, -1, -1):
        delta = rewards[i] + gamma * next_values[i] - values[i]
        lastgaelam = delta + gamma * gae_lambda * lastgaelam if goes_on[i] else delta
        advantages[i] = lastgaelam
    return advantages


class Batch(NamedTuple):
    obs: torch.Tensor
    masks: torch.Tensor
    memory: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor


@torch.no_grad()
def make_batch(agent, rollout, used, reward_scale, args):
    """The rows `used`, agent by agent, each agent's in time. Its last row is open, and its value the bootstrap."""
    order = np.argsort(rollout.slot[: rollout.count], kind="stable")
    order = order[rollout.slot[order] >= 0]
    place, closed = np.zeros(rollout.count, int), np.zeros(rollout.count, bool)
    place[order], closed[rollout.closed[: rollout.num_closed]] = np.arange(len(order)), True
    closed, ended, rewards = closed[order], rollout.ended[order], rollout.rewards[order]

    # Values and log-probs in one batch, with the weights and statistics that chose the actions: SB3 differs (1, 8).
    columns = rollout.obs, rollout.masks, rollout.memory, rollout.actions
    obs, masks, memory, actions = (torch.as_tensor(x[order], device=args.device) for x in columns)
    agent.eval()
    logprobs, _, values = agent(obs, masks, memory, actions)
    value = values.double().cpu().numpy()
    next_values = np.where(closed & ~ended, np.roll(value, -1), 0.0)
    if rollout.finals:
        final = [np.stack(x) for x in zip(*rollout.finals.values(), strict=True)]  # observations, what is remembered
        next_values[place[list(rollout.finals)]] = agent.get_value(*fast.tensors(args.device, *final)).cpu()
    agent.train()

    rewards = np.clip(rewards * reward_scale, -10, 10) if args.norm_reward else rewards
    goes_on = closed & ~ended & np.roll(closed, -1)
    columns = (x.tolist() for x in (rewards, value, next_values, goes_on))
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    rows = torch.as_tensor(np.sort(place[used]), device=args.device)
    advantages, values = torch.tensor(advantages, dtype=torch.float32, device=args.device)[rows], values[rows]
    # What was remembered of decisions that older weights made stays as it is: a sequence begins after them.
    slot = rollout.slot[order]
    begins = np.r_[True, (slot[1:] != slot[:-1]) | ended[:-1] | (order[:-1] < rollout.old)][rows.cpu()]
    return begins, Batch(
        obs[rows], masks[rows], memory[rows], actions[rows], logprobs[rows], advantages, advantages + values, values
    )


def loss(agent, mb, sizes, args):
    """The objective on a minibatch, and what is logged of it. Change it here."""
    newlogprob, entropy, newvalue = agent(mb.obs, mb.masks, mb.memory, mb.actions, sizes)
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


def update(args, objective, weights, exp_avg, exp_avg_sq, sequences, batch, *numbers):
    """One step on a minibatch. objective: loss() as a function of the agent's weights too."""
    mb_inds, firsts, sizes = sequences
    mb = Batch(*(x[mb_inds] for x in batch))._replace(memory=batch.memory[firsts])
    leaf = weights.detach().requires_grad_()
    value, metrics = objective.of([leaf], mb, sizes, args)
    (grad,) = torch.autograd.grad(value, leaf)
    with torch.no_grad():
        grad = ranks.mean(grad, rows=len(mb_inds))
        grad_norm = grad.norm()
        adam(weights, grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1), exp_avg, exp_avg_sq, *numbers)
    return {name: x.detach() for name, x in metrics.items()} | {"losses/grad_norm": grad_norm}


def minibatches(begins, args):
    """Epoch by epoch: rows, packed; the first rows of their sequences; and how many of these reach each step."""
    ends = [*np.flatnonzero(begins), len(begins)]
    starts = np.concatenate([np.arange(a, b, args.sequence_length) for a, b in itertools.pairwise(ends)])
    lengths, count = np.diff(starts, append=len(begins)), min(args.num_minibatches, ranks.least(len(starts)))
    for _ in range(args.update_epochs):
        for some in np.array_split(np.random.permutation(len(starts)), count):
            some = some[np.argsort(-lengths[some], kind="stable")]  # as packed sequences stand, the longest first
            sizes = (lengths[some] > np.arange(lengths[some[0]])[:, None]).sum(1)
            rows = np.concatenate([starts[some[:size]] + step for step, size in enumerate(sizes)])
            yield *(torch.as_tensor(x, device=args.device) for x in (rows, starts[some])), torch.as_tensor(sizes)


def train(args, resumed=None):
    """resumed: path and content of a checkpoint to go on from."""
    check(args)
    with runs.Run(args, __file__, make_envs, resumed) as run:
        envs, n = run.envs, run.envs.num_envs
        spec, (batch_size, minibatch_size, num_iterations) = describe(args, envs), runs.batches(args, n)
        total = num_iterations * batch_size * ranks.SIZE

        agent = Agent(spec, args).to(args.device)
        weights, return_rms, ent_coef = fast.Vector(agent), Normalizer(), args.ent_coef
        optimizer = {"exp_avg": torch.zeros_like(weights.data), "exp_avg_sq": torch.zeros_like(weights.data), "step": 0}
        objective, acting = fast.Functional(loss, agent, weights), fast.Acting(agent)
        rollout = Rollout(batch_size + 3 * n, n, spec["obs_dim"], spec["branches"], 2 * spec["memory"])
        env_actions = np.zeros((n, *envs.single_action_space.shape), envs.single_action_space.dtype)
        rows = env_actions.reshape(n, -1)  # the same, a column for each branch
        kept, running = {"optimizer": optimizer, "return_rms": return_rms}, {"discounted": rollout.discounted}
        running["memory"] = rollout.now
        words = f"batches of {batch_size}, minibatches of {minibatch_size}"
        next_obs, infos = run.start(words, total, spec, agent, kept, running=running)
        ready = np.flatnonzero(infos["ready"])
        obs, mask = next_obs[ready], infos["action_mask"][ready]  # of those who ask for an action
        rollout.open(ready, obs, mask)

        for iteration in run.iterations():
            left = 1 - run.global_step / total
            lr = args.learning_rate * (left if args.anneal_lr else 1)  # SB3 differs (4)
            if args.anneal_ent:
                args.ent_coef = ent_coef * left
            torch.set_num_threads(1)  # while agents act, the players need the cores
            act = acting.checked(obs, mask, rollout.now[ready])
            while not run.enough(rollout.num_closed, batch_size):
                actions, rows[ready], memory = act(obs, mask, rollout.now[ready])
                rollout.act(ready, actions, memory)
                run.spent("act")
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                run.record(reward, terminated, truncated, infos)
                if "restarted" in infos:
                    rollout.drop(np.flatnonzero(infos["restarted"]))
                (closed,), (ready,) = infos["closed"].nonzero(), infos["ready"].nonzero()
                rollout.close(closed, reward, terminated, truncated, infos, args.gamma)
                obs, mask = next_obs[ready], infos["action_mask"][ready]
                rollout.open(ready, obs, mask)
            run.spent("act")

            torch.set_num_threads(fast.threads(minibatch_size * max(args.hidden_sizes, default=1)))
            used, metrics = rollout.closed[: min(rollout.num_closed, batch_size)], []
            begins, batch = make_batch(agent, rollout, used, return_rms.scale.item(), args)
            for sequences in minibatches(begins, args):
                state = weights.data, optimizer["exp_avg"], optimizer["exp_avg_sq"]
                before = [x.clone() for x in state] if args.target_kl is not None else None
                mb_metrics = update(args, objective, *state, sequences, batch, *adam_numbers(optimizer["step"] + 1, lr))
                if before and ranks.mean(mb_metrics["losses/approx_kl"]) > 1.5 * args.target_kl:  # CleanRL differs (7)
                    for x, old in zip(state, before, strict=True):
                        x.copy_(old)
                    break
                optimizer["step"] += 1
                metrics.append(mb_metrics)
            if args.norm_obs:
                agent.obs_rms.update(batch.obs)
            return_rms.update(torch.as_tensor(rollout.returns[used]))
            rollout.forget(used)
            run.spent("learn")
            explained_variance = 1 - (batch.advantages.var() / batch.returns.var()).item()
            run.log(fast.means(metrics) | {"losses/explained_variance": explained_variance, "charts/learning_rate": lr})


def main():
    runs.main(__file__, __doc__, Args, PRESETS, train, Agent, make_envs, describe, check)


if __name__ == "__main__":
    main()
