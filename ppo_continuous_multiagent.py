"""Proximal policy optimization for continuous actions, one policy for all agents: Unity, Godot and gymnasium.

    python ppo_continuous_multiagent.py --env-id Crawler                        a bundled scene: no Unity needed
    python ppo_continuous_multiagent.py --unity-path ./Builds/MyScene           your Unity build
    python ppo_continuous_multiagent.py --godot-path ./my_game                  your Godot game
    python ppo_continuous_multiagent.py --env-id HalfCheetah-v5 --num-envs 8    any gymnasium env, continuous actions
    python ppo_continuous_multiagent.py --evaluate runs/NAME --capture-video    also --resume and --export runs/NAME

One row per decision. Agents that decide at their own pace fill no (num_steps, num_envs) rectangle, so rows are kept as
they come and then ordered agent by agent: an agent's rows stand together, in time. A rollout ends when batch_size rows
are closed. An agent's open row is its bootstrap, and the first row of its next rollout. With gymnasium envs this is the
usual rectangle, and SB3's numbers.

What differs from Stable-Baselines3 (SB3) and from CleanRL; the numbers stand at the lines:
 1. SB3's VecNormalize and gymnasium's wrappers update their statistics at every step. Here they are part of the agent
    and change between iterations only: what acts is what learns, the first ratio is 1, and a saved agent carries them.
 2. SB3's loss has vf_coef * mse, CleanRL's and ours vf_coef * 0.5 * mse: our --vf-coef 1.0 is SB3's 0.5.
 3. SB3's value clipping takes the clipped error alone, CleanRL's and ours the larger one; SB3 and we have it off by
    default.
 4. SB3 anneals from the progress after the rollout (the last update has a rate of 0), CleanRL and we from the progress
    before it.
 5. CleanRL treats a time limit as a death. SB3 and we bootstrap with the value of the final observation.
 6. CleanRL shuffles time by time and in place; SB3 and we draw a fresh permutation of the rows agent by agent.
 7. CleanRL checks the KL after an epoch; SB3 and we before each step, against 1.5 times the target.
 8. Adam and the gradient's norm work on one flat vector, log-probs are computed after the rollout in one batch, and GAE
    in double precision: sums in another order, so parity with SB3 holds to rounding and not to the bit.
 9. SB3 divides an observation by its std however small (from 1e-4 on), here it is by --min-obs-std at least: what only
    trembles in training, and moves elsewhere, would fill the policy's input.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads are for larger products than a policy's

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
    env_id: str = "Crawler"
    """a bundled scene (3DBall, Crawler, GodotDiscs), a gymnasium id, or module:id"""
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
    activation: Literal["tanh", "silu"] = "tanh"
    """between the layers; silu is what ML-Agents' networks have, there called swish"""
    logstd_init: float = 0.0
    """log std of the actions at the start"""


# The reachers': short horizon, little noise, and an activation that is good at products, which kinematics is made of.
REACHER = dict(num_envs=8, num_steps=256, num_minibatches=16, learning_rate=1e-3, gamma=0.95)
REACHER |= dict(hidden_sizes=(128, 128), activation="silu", logstd_init=-0.7)
# ML-Agents' official settings for its scenes; whatever the command line says wins. Its policies send a third of their
# action, so that a std of a third is theirs of 1. 3DBall's buffer is half the official one: it learns in half the
# decisions. Crawler's is filled by two players at once. Gymnasium's own have SB3's settings but for HalfCheetah, which
# learns twice as much with these.
PRESETS = {
    "3DBall": dict(
        total_timesteps=500_000, num_steps=512, num_minibatches=96, update_epochs=3, gae_lambda=0.99, ent_coef=1e-3,
        hidden_sizes=(128, 128),
    ),
    "Crawler": dict(
        total_timesteps=10_000_000, num_players=2, num_steps=1024, num_minibatches=10, update_epochs=3, gamma=0.995,
        ent_coef=5e-3, hidden_sizes=(512, 512, 512), activation="silu", logstd_init=-1.1,
    ),
    "GodotDiscs": dict(total_timesteps=40_960, num_steps=128, learning_rate=1e-3, gamma=0.98),
    "Reacher2Dof-v0": dict(total_timesteps=300_000, **REACHER),
    "Reacher3Dof-v0": dict(total_timesteps=400_000, **REACHER),
    "Reacher6Dof-v0": dict(total_timesteps=500_000, **REACHER),
    "ReacherPlane-v0": dict(total_timesteps=200_000, **REACHER),
    "HalfCheetah-v5": dict(
        num_envs=8, num_steps=256, norm_adv=False, hidden_sizes=(128, 128), activation="silu", logstd_init=-1.0,
    ),
}  # fmt: skip


def check(args):
    above_0 = ("num_steps", "num_minibatches", "learning_rate", "max_grad_norm", "target_kl", "hidden_sizes")
    from_0, from_0_to_1 = ("clip_coef", "ent_coef", "vf_coef", "update_epochs", "min_obs_std"), ("gamma", "gae_lambda")
    runs.check(args, above_0, from_0, from_0_to_1, at_most={"update_epochs": 10_000, "hidden_sizes": 2**16})


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


def mlp(sizes, activation, out, std):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [layer_init(nn.Linear(a, b)), {"tanh": nn.Tanh, "silu": nn.SiLU}[activation]()]
    return nn.Sequential(*layers, layer_init(nn.Linear(sizes[-1], out), std))


class Agent(nn.Module):
    """What acts, learns, is saved, evaluated and exported: the statistics of the observations are part of it. spec: the
    env in plain numbers."""

    def __init__(self, spec, args):
        super().__init__()
        sizes = (spec["obs_dim"], *args.hidden_sizes)
        self.obs_rms = Normalizer(spec["obs_dim"], least=args.min_obs_std) if args.norm_obs else nn.Identity()
        self.actor_logstd = nn.Parameter(torch.full((spec["action_dim"],), args.logstd_init))
        self.actor_mean = mlp(sizes, args.activation, spec["action_dim"], std=0.01)
        self.critic = mlp(sizes, args.activation, 1, std=1.0)
        self.bounds = runs.Bounds(spec)

    def act(self, obs, deterministic=False):
        """Actions as the update sees them, and as the env gets them."""
        mean = self.actor_mean(self.obs_rms(obs))
        action = mean if deterministic else mean + self.actor_logstd.exp() * torch.randn_like(mean)
        return action, action.clamp(self.bounds.low, self.bounds.high)

    def get_value(self, obs):
        return self.critic(self.obs_rms(obs)).flatten()

    def forward(self, obs, action):
        """Log-probs of the actions, the entropy (the same for all observations), values."""
        x = self.obs_rms(obs)
        z = (action - self.actor_mean(x)) * torch.exp(-self.actor_logstd)
        logprob = (-0.5 * z**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)
        entropy = (self.actor_logstd + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprob, entropy, self.critic(x).flatten()


class Rollout:
    """Decisions in the order in which they were asked for, a row each. A row is open until it is known what came of
    it."""

    COLUMNS = ("obs", "actions", "slot", "ended", "rewards", "returns")

    def __init__(self, capacity, n, obs_dim, action_dim):
        self.obs, self.actions = np.zeros((capacity, obs_dim), np.float32), np.zeros((capacity, action_dim), np.float32)
        self.slot, self.ended = np.zeros(capacity, int), np.zeros(capacity, bool)  # whose row; its episode ended here
        self.rewards, self.returns = np.zeros((2, capacity))  # the latter are discounted, of the episode so far
        self.closed, self.num_closed = np.zeros(capacity, int), 0  # rows in the order in which they were closed
        self.row, self.count, self.finals = np.full(n, -1), 0, {}  # each slot's open row; final observations by row
        self.discounted = np.zeros(n)  # each slot's last return

    def open(self, who, obs):
        """These slots ask for actions."""
        first, self.count = self.count, self.count + len(who)
        if self.count > len(self.slot):  # players that were lost left rows behind
            for name in (*self.COLUMNS, "closed"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        self.obs[first : self.count], self.slot[first : self.count] = obs, who
        self.row[who] = np.arange(first, self.count)

    def act(self, actions):
        """Of those who asked last."""
        self.actions[self.count - len(actions) : self.count] = actions

    def close(self, who, rewards, terminated, truncated, infos, gamma):
        """What came of these slots' open rows. The arrays have an entry for each slot."""
        rows, before = self.row[who], self.num_closed
        self.num_closed += len(who)
        self.row[who], self.closed[before : self.num_closed] = -1, rows
        self.rewards[rows], self.ended[rows] = rewards[who], (terminated | truncated)[who]
        self.discounted[who] = self.returns[rows] = gamma * self.discounted[who] + rewards[who]
        if "final_obs" in infos:
            self.discounted[terminated | truncated] = 0
            for row, slot in zip(rows, who, strict=True):
                if truncated[slot] and not terminated[slot]:  # CleanRL differs (5)
                    self.finals[row] = infos["final_obs"][slot]

    def drop(self, who):
        """These slots' open rows will never be closed: the rows before them end there, as at a time limit."""
        for slot in who[self.row[who] >= 0]:
            *_, before = -1, *np.flatnonzero(self.slot[: self.row[slot]] == slot)
            if before >= 0 and not self.ended[before]:
                self.ended[before], self.finals[before] = True, self.obs[self.row[slot]]
            self.slot[self.row[slot]] = -1
        self.row[who], self.discounted[who] = -1, 0

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
        self.count, self.num_closed = len(rows), len(left)


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
    obs, actions = (torch.as_tensor(x[order], device=args.device) for x in (rollout.obs, rollout.actions))
    agent.eval()
    logprobs, _, values = agent(obs, actions)
    value = values.double().cpu().numpy()
    next_values = np.where(closed & ~ended, np.roll(value, -1), 0.0)
    if rollout.finals:
        final_obs = np.stack(list(rollout.finals.values())).astype(np.float32)
        next_values[place[list(rollout.finals)]] = agent.get_value(torch.as_tensor(final_obs, device=args.device)).cpu()
    agent.train()

    rewards = np.clip(rewards * reward_scale, -10, 10) if args.norm_reward else rewards
    goes_on = closed & ~ended & np.roll(closed, -1)
    columns = (x.tolist() for x in (rewards, value, next_values, goes_on))
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    rows = torch.as_tensor(np.sort(place[used]), device=args.device)
    advantages, values = torch.tensor(advantages, dtype=torch.float32, device=args.device)[rows], values[rows]
    return Batch(obs[rows], actions[rows], logprobs[rows], advantages, advantages + values, values)


def loss(agent, mb, args):
    """The objective on a minibatch, and what is logged of it. Change it here: whatever is read from args stays live
    when it is compiled."""
    newlogprob, entropy, newvalue = agent(mb.obs, mb.actions)
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


def update(args, objective, weights, exp_avg, exp_avg_sq, mb_inds, batch, rows, *numbers):
    """One step on a minibatch. objective: loss() as a function of the agent's weights too; rows: of this rank's batch,
    which is what it weighs."""
    leaf = weights.detach().requires_grad_()
    value, metrics = objective.of([leaf], Batch(*(x[mb_inds] for x in batch)), args)
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


def train(args, resumed=None):
    """resumed: path and content of a checkpoint to go on from."""
    check(args)
    with runs.Run(args, __file__, make_envs, resumed) as run:
        envs, n = run.envs, run.envs.num_envs
        spec, (batch_size, minibatch_size, num_iterations) = runs.describe(args, envs), runs.batches(args, n)
        total = num_iterations * batch_size * ranks.SIZE

        agent = Agent(spec, args).to(args.device)
        weights, return_rms, ent_coef = fast.Vector(agent), Normalizer(), args.ent_coef
        optimizer = {"exp_avg": torch.zeros_like(weights.data), "exp_avg_sq": torch.zeros_like(weights.data), "step": 0}
        objective, acting = fast.Functional(loss, agent, weights), fast.Acting(agent)
        step = run.compiled(update, num_iterations * args.update_epochs * args.num_minibatches)
        rollout = Rollout(batch_size + 3 * n, n, spec["obs_dim"], spec["action_dim"])
        env_actions = np.zeros((n, spec["action_dim"]), envs.single_action_space.dtype)
        kept, running = {"optimizer": optimizer, "return_rms": return_rms}, {"discounted": rollout.discounted}
        words = f"batches of {batch_size}, minibatches of {minibatch_size}"
        next_obs, infos = run.start(words, total, spec, agent, kept, running=running)
        ready = np.flatnonzero(infos["ready"])
        obs = next_obs[ready]  # of those who ask for an action
        rollout.open(ready, obs)

        for iteration in run.iterations():
            left = 1 - run.global_step / total
            lr = args.learning_rate * (left if args.anneal_lr else 1)  # SB3 differs (4)
            if args.anneal_ent:
                args.ent_coef = ent_coef * left
            torch.set_num_threads(1)  # while agents act, the players need the cores
            act = acting.checked(obs)
            while not run.enough(rollout.num_closed, batch_size):
                actions, env_actions[ready] = act(obs)
                rollout.act(actions)
                run.spent("act")
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                run.record(reward, terminated, truncated, infos)
                if "restarted" in infos:
                    rollout.drop(np.flatnonzero(infos["restarted"]))
                (closed,), (ready,) = infos["closed"].nonzero(), infos["ready"].nonzero()
                rollout.close(closed, reward, terminated, truncated, infos, args.gamma)
                obs = next_obs[ready]
                rollout.open(ready, obs)
            run.spent("act")

            torch.set_num_threads(fast.threads(minibatch_size * max(args.hidden_sizes, default=1)))
            (used, num_rows), metrics = ranks.filled(rollout.closed[: rollout.num_closed], batch_size), []
            batch = make_batch(agent, rollout, used, return_rms.scale.item(), args)
            for mb_inds in minibatches(batch_size, minibatch_size, args):
                state = weights.data, optimizer["exp_avg"], optimizer["exp_avg_sq"]
                before = [x.clone() for x in state] if args.target_kl is not None else None
                numbers = num_rows, *adam_numbers(optimizer["step"] + 1, lr)
                mb_metrics = step(args, objective, *state, mb_inds, batch, *numbers)
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
    runs.main(__file__, __doc__, Args, PRESETS, train, Agent, make_envs, runs.describe, check)


if __name__ == "__main__":
    main()
