"""Soft actor-critic for continuous actions, one policy for all agents: Unity, Godot and gymnasium.

    python sac_continuous.py --env-id 3DBall                        a bundled scene: no Unity needed
    python sac_continuous.py --unity-path ./Builds/MyScene          your Unity build
    python sac_continuous.py --godot-path ./my_game                 your Godot game
    python sac_continuous.py --env-id HalfCheetah-v5                any gymnasium env with bounded continuous actions
    python sac_continuous.py --evaluate runs/NAME --capture-video   also --resume and --export runs/NAME

A transition enters the buffer when it is closed, by its agent's next decision or by its end: the right reward, the
right next observation, and terminated for true ends only, whatever the agents' pace. While players simulate, the
learner updates: the policy that acts is then behind by the updates of one step, and --no-overlap does one after the
other, as it is with gymnasium's own envs.

What differs from Stable-Baselines3 (SB3) and from CleanRL; the numbers stand at the lines:
 1. SB3 and CleanRL train once per step of all envs. Here --updates-per-step counts updates per decision, whoever made
    it.
 2. SB3 bounds log std to [-20, 2] by clipping, as we do; CleanRL squashes it into [-5, 2].
 3. SB3's and our log-probs and critics know actions between -1 and 1; CleanRL's know the env's units, which shifts the
    entropy.
 4. SB3 and we take half the critics' mse, one learning rate for all, and the temperature's loss with log alpha, on the
    policy's sample; CleanRL takes the whole mse, 1e-3 for critics and temperature, alpha in its loss, and does it last,
    with actions sampled anew.
 5. SB3 and CleanRL store observations twice, or once with next observations that are wrong at ends. Here each is stored
    once, and exactly.
 6. SB3 has no normalisation of observations; --norm-obs keeps the buffer raw and applies the present statistics to what
    is sampled.
 7. CleanRL's policy_frequency makes up for the steps it left out; ours updates policy and temperature once in so many
    updates.
 8. The twin critics are one batched product, Adam works on flat vectors: sums in another order, so parity with SB3
    holds to rounding.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads are for larger products than a policy's

import math
from copy import deepcopy
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
    min_obs_std: float = 0.01
    """the smallest std to divide by: what hardly moves in training may move in Unity; 0 is SB3's"""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """widths of the layers of policy and critics"""
    activation: Literal["relu", "silu"] = "relu"
    """between the layers; silu is what ML-Agents' networks have, there called swish"""


# ML-Agents' official settings for its scenes; whatever the command line says wins. The temperatures start at a tenth
# and a twentieth of the official ones: beside rewards this small a random policy would be worth more than a good one
# for the first hundred thousands of decisions.
REACHER = dict(total_timesteps=100_000, buffer_size=100_000, learning_starts=1_000, batch_size=128)
REACHER |= dict(learning_rate=1e-3, gamma=0.95, hidden_sizes=(128, 128))
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
    **dict.fromkeys(("Reacher2Dof-v0", "Reacher3Dof-v0", "Reacher6Dof-v0", "ReacherPlane-v0"), REACHER),
}  # fmt: skip
REPORT = 1000  # decisions between two rows of a curve
COLUMNS = ("obs", "actions", "rewards", "terminated", "next_row", "owner")  # of the buffer


def check(args):
    above_0 = ("learning_rate", "buffer_size", "batch_size", "policy_frequency", "alpha", "hidden_sizes")
    from_0, from_0_to_1 = ("learning_starts", "updates_per_step", "min_obs_std"), ("gamma", "tau")
    runs.check(args, above_0, from_0, from_0_to_1, at_most={"updates_per_step": 1_000, "hidden_sizes": 2**16})
    if args.total_timesteps <= args.learning_starts and args.updates_per_step:
        nothing = f"nothing would be learned before --learning-starts {args.learning_starts}"
        raise ValueError(f"--total-timesteps {args.total_timesteps}: {nothing}")


def describe(args, envs):
    spec = runs.describe(args, envs)
    if not np.isfinite([spec["low"], spec["high"]]).all():
        other = "SAC squashes them between bounds; ppo_continuous_multiagent.py takes them"
        raise ValueError(f"{args.env_id} has actions without bounds: {other}")
    return spec


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


def mlp(sizes, activation, out):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), {"relu": nn.ReLU, "silu": nn.SiLU}[activation]()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], out))


class Critics(nn.Module):
    """Several Q functions side by side: each layer is one batched product."""

    def __init__(self, sizes, activation, count=2):
        super().__init__()
        self.count, self.activation = count, {"relu": nn.functional.relu, "silu": nn.functional.silu}[activation]
        linear = [[nn.Linear(a, b) for a, b in zip(sizes, (*sizes[1:], 1), strict=True)] for _ in range(count)]
        layers = list(zip(*linear, strict=True))
        self.weights = nn.ParameterList(torch.stack([one.weight.detach().T for one in layer]) for layer in layers)
        self.biases = nn.ParameterList(torch.stack([one.bias.detach()[None] for one in layer]) for layer in layers)

    def forward(self, normalized_obs, action):
        x = torch.cat([normalized_obs, action], 1).expand(self.count, -1, -1)
        *layers, (weight, bias) = zip(self.weights, self.biases, strict=True)
        for w, b in layers:
            x = self.activation(torch.baddbmm(b, x, w))
        return (x * weight.mT).sum(2) + bias[..., 0]  # one output: no matrix product is worth its while


class Agent(nn.Module):
    """What acts, learns, is saved, evaluated and exported: the statistics of the observations are part of it. spec: the
    env in plain numbers."""

    def __init__(self, spec, args):
        super().__init__()
        obs_dim, action_dim = spec["obs_dim"], spec["action_dim"]
        # SB3 differs (6)
        self.obs_rms = Normalizer(obs_dim, least=args.min_obs_std) if args.norm_obs else nn.Identity()
        self.actor = mlp((obs_dim, *args.hidden_sizes), args.activation, 2 * action_dim)  # mean and log std
        self.log_alpha = nn.Parameter(torch.tensor([math.log(args.alpha)]))
        self.critics = Critics((obs_dim + action_dim, *args.hidden_sizes), args.activation)
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.bounds = runs.Bounds(spec)

    def policy(self, obs):
        """Mean and log std of the actions before they are squashed."""
        mean, log_std = self.actor(self.obs_rms(obs)).chunk(2, 1)
        return mean, log_std.clamp(-20.0, 2.0)  # CleanRL differs (2)

    def act(self, obs, deterministic=False):
        """Actions between -1 and 1, as the critics see them, and as the env gets them."""
        mean, log_std = self.policy(obs)
        action = torch.tanh(mean if deterministic else mean + log_std.exp() * torch.randn_like(mean))
        low, high = self.bounds.low, self.bounds.high
        return action, action * (0.5 * (high - low)) + 0.5 * (high + low)

    def forward(self, obs, noise):
        """Sampled actions between -1 and 1, and their log-probs."""
        mean, log_std = self.policy(obs)
        action = torch.tanh(mean + log_std.exp() * noise)
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - torch.log(1 - action**2 + 1e-6)  # CleanRL differs (3)
        return action, logprob.sum(1)


class Buffer:
    """Closed transitions in the order in which they were closed, the oldest overwritten. Each observation is stored
    once: SB3 and CleanRL differ (5).

    `obs` has a row for each transition, then one for each slot, its open decision, then those that ended episodes, of
    which there are no more than transitions: memory that is never written to is never taken. `next_row` says in which
    of them a transition's next observation is: the slot's next transition, which is overwritten later than this one, or
    its open decision, or a final one.
    """

    def __init__(self, size, n, obs_dim, action_dim):
        self.size, self.n, self.added = size, n, 0
        self.obs = np.zeros((size + n + size, obs_dim), np.float32)
        self.actions = np.zeros((size + n, action_dim), np.float32)
        self.rewards, self.terminated = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.next_row, self.owner = np.zeros(size, int), np.zeros(size, int)
        self.last = np.full(n, -1)  # each slot's last transition, if its next observation is the open decision's
        self.used, self.free = size + n, []  # rows of obs; those that final observations left behind

    def open(self, who, obs):
        """These slots ask for actions."""
        self.obs[self.size + who] = obs

    def act(self, who, actions):
        self.actions[self.size + who] = actions

    def close(self, who, rewards, terminated, finals):
        """What came of these slots' open decisions. finals: the final observations of the episodes that ended, by slot.
        Then comes open()."""
        count = np.arange(self.added, self.added + len(who))
        rows, old = count % self.size, count[count >= self.size] % self.size
        if len(old):  # overwritten now
            ended = self.next_row[old]
            self.free.extend(ended[ended >= self.size + self.n])
            self.last[self.owner[old][self.last[self.owner[old]] == old]] = -1
        self.added += len(who)
        self.obs[rows], self.actions[rows] = self.obs[self.size + who], self.actions[self.size + who]
        self.rewards[rows], self.terminated[rows] = rewards, terminated
        self.owner[rows], self.next_row[rows] = who, self.size + who
        before = self.last[who]
        self.next_row[before[before >= 0]] = rows[before >= 0]
        self.last[who] = rows
        for slot, obs in finals.items():
            self.put_aside(slot, obs)

    def put_aside(self, slot, obs):
        """The slot's last transition ends here, with this observation."""
        if self.last[slot] >= 0:
            row = self.free.pop() if self.free else self.used
            self.used = max(self.used, row + 1)
            self.next_row[self.last[slot]], self.obs[row] = row, obs
            self.last[slot] = -1

    def drop(self, who):
        """These slots' open decisions will never be closed."""
        for slot in who:
            self.put_aside(slot, self.obs[self.size + slot])

    def __len__(self):
        return min(self.added, self.size)

    def since(self, added):
        """Observations of the transitions that came after so many."""
        return self.obs[np.arange(max(added, self.added - self.size), self.added) % self.size]

    def sample(self, batch_size):
        rows = np.random.randint(0, len(self), batch_size)
        obs, next_obs = self.obs.take(rows, 0), self.obs.take(self.next_row.take(rows), 0)
        return obs, self.actions.take(rows, 0), self.rewards.take(rows), next_obs, self.terminated.take(rows)

    def state(self):
        state = {name: getattr(self, name)[: len(self)] for name in COLUMNS}
        return state | {
            "more": self.obs[self.size : self.used],
            "last": self.last,
            "free": self.free,
            "added": self.added,
        }

    def restore(self, state):
        for name in COLUMNS:
            getattr(self, name)[: len(state[name])] = state[name]
        self.used = self.size + len(state["more"])
        self.obs[self.size : self.used] = state["more"]
        self.last[:], self.free, self.added = state["last"], list(state["free"]), state["added"]


class Batch(NamedTuple):
    obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_obs: torch.Tensor
    terminated: torch.Tensor
    noise: torch.Tensor
    next_noise: torch.Tensor


def critic_loss(agent, mb, args):
    """The critics' objective, and what is logged of it. Whatever is read from args stays live when it is compiled."""
    alpha = agent.log_alpha.exp().detach()
    with torch.no_grad():
        next_actions, next_logprob = agent(mb.next_obs, mb.next_noise)
        next_values = agent.targets(agent.obs_rms(mb.next_obs), next_actions).amin(0) - alpha * next_logprob
        backup = mb.rewards + args.gamma * (1 - mb.terminated) * next_values
    qf_values = agent.critics(agent.obs_rms(mb.obs), mb.actions)
    qf_loss = 0.5 * ((qf_values - backup) ** 2).mean(1).sum()  # CleanRL differs (4)
    return qf_loss, {"losses/qf_loss": qf_loss, "losses/qf_values": backup.mean(), "losses/alpha": alpha.squeeze()}


def actor_loss(agent, mb, args):
    """The policy's and the temperature's objective, with critics that have just been updated."""
    actions, logprob = agent(mb.obs, mb.noise)
    min_qf = agent.critics(agent.obs_rms(mb.obs), actions).amin(0)
    actor_loss = (agent.log_alpha.exp().detach() * logprob - min_qf).mean()
    metrics = {"losses/actor_loss": actor_loss, "losses/entropy": -logprob.mean()}
    if not args.autotune:
        return actor_loss, metrics
    alpha_loss = -(agent.log_alpha * (logprob + args.target_entropy).detach()).mean()
    return actor_loss + alpha_loss, metrics | {"losses/alpha_loss": alpha_loss}


def adam(weights, grad, exp_avg, exp_avg_sq, rate, correction):
    """Adam in place, on all weights at once. The last two: see adam_numbers()."""
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    weights.sub_(rate * exp_avg / (exp_avg_sq.sqrt() * correction + 1e-8))


def adam_numbers(step, lr):
    """Adam's learning rate and bias correction, worked out once and not at every weight, as a compiled kernel would."""
    return lr / (1 - 0.9**step), 1 / math.sqrt(1 - 0.999**step)


def update(
    args, critics_objective, actors_objective, policy, critics, targets, critic_averages, policy_averages, mb, *numbers
):
    """One step of the critics and their targets and, if it has an objective, of policy and temperature. The objectives:
    critic_loss() and actor_loss() as functions of the agent's weights too."""
    leaf = critics.detach().requires_grad_()
    value, metrics = critics_objective.of([policy, leaf, targets], mb, args)
    (grad,) = torch.autograd.grad(value, leaf)
    with torch.no_grad():
        adam(critics, ranks.mean(grad), *critic_averages, *numbers[:2])
        targets.lerp_(critics, args.tau)
    if actors_objective is not None:
        leaf = policy.detach().requires_grad_()
        value, more = actors_objective.of([leaf, critics, targets], mb, args)
        metrics |= more
        (grad,) = torch.autograd.grad(value, leaf)
        with torch.no_grad():
            adam(policy, ranks.mean(grad), *policy_averages, *numbers[2:])
    return {name: x.detach() for name, x in metrics.items()}


def train(args, resumed=None):
    """resumed: path and content of a checkpoint to go on from."""
    check(args)
    with runs.Run(args, __file__, make_envs, resumed) as run:
        envs, n = run.envs, run.envs.num_envs
        spec = describe(args, envs)
        if args.buffer_size < max(n, args.batch_size):
            size = f"a batch of {args.batch_size} (--batch-size), and a transition of each of {n} agents"
            raise ValueError(f"--buffer-size {args.buffer_size}: must hold {size}")
        needed = (args.buffer_size + n) * (4 * spec["obs_dim"] + 4 * spec["action_dim"] + 24)
        runs.check_memory("--buffer-size", args.buffer_size, needed)
        if args.target_entropy is None:
            args.target_entropy = -float(spec["action_dim"])

        agent = Agent(spec, args).to(args.device)
        critics, targets = fast.Vector(agent, only=["critics"]), fast.Vector(agent, only=["targets"])
        policy = fast.Vector(agent, but=["critics", "targets"])
        optimizer = {f"critic_{name}": torch.zeros_like(critics.data) for name in ("exp_avg", "exp_avg_sq")}
        optimizer |= {f"policy_{name}": torch.zeros_like(policy.data) for name in ("exp_avg", "exp_avg_sq")}
        counts = {"updates": 0, "owed": 0.0, "normalized": 0}
        objectives = [fast.Functional(f, agent, policy, critics, targets) for f in (critic_loss, actor_loss)]
        num_updates = int((args.total_timesteps - args.learning_starts) * args.updates_per_step)
        step, step_of_critics = run.compiled(update, num_updates), run.compiled(update, num_updates)
        buffer, acting = Buffer(args.buffer_size, n, spec["obs_dim"], spec["action_dim"]), fast.Acting(agent)
        space = envs.single_action_space
        env_actions = np.zeros((n, spec["action_dim"]), space.dtype)
        center, half = 0.5 * (space.high + space.low), 0.5 * (space.high - space.low)
        overlap = args.overlap and hasattr(envs, "step_async")
        torch.set_num_threads(fast.threads(2 * args.batch_size * max(args.hidden_sizes, default=1)))
        fast.keep_freed_memory(2**25, 2**30)

        words = f"a buffer of {needed / 2**20:,.0f} MiB" + ", updates while they simulate" * overlap
        kept, large = {"optimizer": optimizer, "counts": counts}, {"buffer": buffer} if args.save_buffer else {}
        next_obs, infos = run.start(words, args.total_timesteps, spec, agent, kept, large=large)
        learn_from = args.learning_starts
        if resumed and not len(buffer):
            learn_from, counts["normalized"] = run.global_step + args.learning_starts, 0
            first = f"{args.learning_starts} decisions of the policy fill a new one before learning goes on"
            print(f"The buffer was not saved: {first}", flush=True)
        if not run.came_back:
            buffer.drop(range(n))
        ready, act, metrics = np.flatnonzero(infos["ready"]), None, []
        obs = next_obs[ready]  # of those who ask for an action
        buffer.open(ready, obs)

        def learn():
            while counts["owed"] >= 1:
                mb = [torch.as_tensor(x, device=args.device) for x in buffer.sample(args.batch_size)]
                mb = Batch(*mb, torch.randn_like(mb[1]), torch.randn_like(mb[1]))
                vectors, count, lr = (policy.data, critics.data, targets.data), counts["updates"], args.learning_rate
                averages = tuple(optimizer.values())[:2], tuple(optimizer.values())[2:]
                numbers = *adam_numbers(count + 1, lr), *adam_numbers(count // args.policy_frequency + 1, lr)
                if count % args.policy_frequency == 0:  # CleanRL differs (7)
                    metrics.append(step(args, *objectives, *vectors, *averages, mb, *numbers))
                else:
                    metrics.append(step_of_critics(args, objectives[0], None, *vectors, *averages, mb, *numbers))
                counts["owed"], counts["updates"] = counts["owed"] - 1, count + 1

        for _ in run.iterations():
            if run.global_step < args.learning_starts:
                actions = (np.stack([space.sample() for _ in ready]) - center) / half
                env_actions[ready] = center + half * actions
            else:
                act = act or acting.checked(obs)
                actions, env_actions[ready] = act(obs)
                if not np.isfinite(actions).all():
                    run.check_agent()
            buffer.act(ready, actions)
            run.spent("act")
            if overlap:
                envs.step_async(env_actions)
                run.spent("env")
                learn()
                run.spent("learn")
                next_obs, reward, terminated, truncated, infos = envs.step_wait()
            else:
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
            made = run.record(reward, terminated, truncated, infos, in_step=True)
            if "restarted" in infos:
                buffer.drop(np.flatnonzero(infos["restarted"]))
            (closed,), (ready,) = infos["closed"].nonzero(), infos["ready"].nonzero()
            finals = {slot: infos["final_obs"][slot] for slot in closed[(terminated | truncated)[closed]]}
            buffer.close(closed, reward[closed], terminated[closed], finals)
            obs = next_obs[ready]
            buffer.open(ready, obs)
            if run.global_step > learn_from:
                counts["owed"] += args.updates_per_step * made / ranks.SIZE  # SB3 and CleanRL differ (1)
            if args.norm_obs and ranks.total(buffer.added - counts["normalized"]) >= REPORT * ranks.SIZE:
                agent.obs_rms.update(torch.as_tensor(buffer.since(counts["normalized"]), device=args.device))
                counts["normalized"] = buffer.added
            run.spent("act")
            if not overlap:
                learn()
                run.spent("learn")
            if run.due(REPORT):
                run.log(fast.means(metrics))
                metrics.clear()
                act = None  # what is not a weight may have changed


def main():
    runs.main(__file__, __doc__, Args, PRESETS, train, Agent, make_envs, describe, check, free=["save_buffer"])


if __name__ == "__main__":
    main()
