"""PPO for discrete actions: one policy for all agents of a Unity, Godot or gymnasium environment.

    python ppo_discrete_multiagent.py --env-id Basic                     a bundled Unity scene
    python ppo_discrete_multiagent.py --unity-path ./Builds/MyScene      your Unity build
    python ppo_discrete_multiagent.py --godot-path ./my_game             your Godot game
    python ppo_discrete_multiagent.py --env-id CartPole-v1               any gymnasium env
    python ppo_discrete_multiagent.py --resume runs/NAME                 or --evaluate, --export

An action has one choice per branch: a Discrete action space has one branch, MultiDiscrete and Unity
have several. An action mask says which choices are allowed; a choice that is not allowed has
probability 0. Unity and Godot send masks. A gymnasium env has them if it has action_masks(), the
method that sb3-contrib's MaskablePPO uses.

Agents in a game request decisions at their own pace, so a rollout is not a (num_steps, num_envs)
rectangle. It is a list of rows, one per decision whose reward has arrived, and it is sorted by
agent before the advantages are computed. An iteration uses num_steps * num_agents rows. With
gymnasium environments these are the rows of the usual rectangle.

Differences from Stable-Baselines3 (SB3) and CleanRL, referenced by number in the code:
 1. SB3's VecNormalize and gymnasium's wrappers update the normalization statistics at every step.
    Here they change only between iterations, are shared by all agents, and are saved in the
    checkpoint, those of the observations as part of the agent. In the first iteration mean and std
    are still 0 and 1. The results are clipped to -10 and 10, as in SB3 and in CleanRL's
    ppo_continuous_action.py; its other PPO scripts do not normalize.
 2. SB3's value loss is vf_coef * mse. CleanRL and this script use vf_coef * 0.5 * mse: our
    --vf-coef 1.0 is SB3's 0.5.
 3. With value clipping SB3 uses the clipped error, CleanRL and this script the larger of the
    two errors. Value clipping is off by default, as in SB3.
 4. SB3 anneals by the progress after the rollout, so the last update has learning rate 0. CleanRL
    and this script anneal by the progress before the rollout.
 5. CleanRL treats a time limit as a termination. SB3 and this script bootstrap with the value of
    the final observation.
 6. CleanRL shuffles one array of indices again in each epoch, and its rows are in the order of
    time. SB3 and this script draw a new permutation, and the rows are sorted by agent.
 7. CleanRL checks target_kl after each epoch. SB3 and this script check it before each step,
    against 1.5 * target_kl.
 8. SB3 and CleanRL compute log-probs and values during the rollout, and GAE in single precision.
    Here log-probs and values are computed after the rollout in one batch, and GAE in double
    precision. Where nothing else differs, results equal SB3's up to rounding.
 9. SB3 divides an observation by its std even if that is tiny. Here the std is at least
    --min-obs-std: an input that is nearly constant in training would otherwise become huge as
    soon as it changes.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a policy is too small for several threads

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from envs.make import make_envs
from onefile_rl import distributed, fast, runs
from onefile_rl.entities import Entities, num_features
from onefile_rl.normalizer import Normalizer


# Inherited from runs.Args: total_timesteps, seed, num_envs, device, and the options of Unity and
# Godot, checkpoints, videos and evaluation
@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder"""
    env_id: str = "Basic"
    """a bundled scene (Basic, PushBlock, GodotRover), a gymnasium id, or module:id"""
    learning_rate: float = 3e-4
    """the learning rate of the optimizer"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    num_steps: int = 2048
    """decisions per agent in each iteration; the batch size is num_steps * number of agents"""
    num_minibatches: int = 32
    """the number of minibatches per epoch"""
    update_epochs: int = 10
    """the number of epochs per iteration; 0 updates the normalization statistics only"""
    gamma: float = 0.99
    """the discount factor per decision"""
    gae_lambda: float = 0.95
    """the lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """the clipping coefficient of the surrogate objective"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef in the value loss"""
    ent_coef: float = 0.0
    """the weight of the entropy bonus"""
    anneal_ent: bool = False
    """anneal ent_coef linearly to 0 (ML-Agents anneals its beta to 1e-5)"""
    vf_coef: float = 0.5
    """the weight of the value loss"""
    max_grad_norm: float = 0.5
    """the maximum norm for gradient clipping"""
    target_kl: float | None = None
    """stop the updates of an iteration when the KL divergence exceeds 1.5 times this value"""
    norm_obs: bool = True
    """normalize observations by their running mean and variance, and clip them to -10 and 10"""
    min_obs_std: float = 0.01
    """the smallest standard deviation that observations are divided by; 0: no minimum, as in SB3"""
    norm_reward: bool = True
    """divide rewards by the running std of the discounted return, and clip them to -10 and 10"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """the widths of the hidden layers of actor and critic"""
    activation: Literal["tanh", "silu"] = "tanh"
    """the activation function; silu is ML-Agents' swish"""


# Settings per environment. Options on the command line take precedence.
# Basic and PushBlock: sizes of networks and batches, epochs, discount and entropy bonus from
# ML-Agents' official settings, with fewer decisions. Basic fills its batch from sixteen agents.
# Sorter keeps --norm-obs, because its velocities are thirty times as large as the other numbers.
CLASSIC = dict(num_envs=8, num_steps=128, num_minibatches=8)
PRESETS = {
    "CartPole-v1": dict(total_timesteps=100_000, **CLASSIC),
    "Acrobot-v1": dict(total_timesteps=200_000, **CLASSIC),
    "LunarLander-v3": dict(
        num_envs=16, num_steps=1024, num_minibatches=256, update_epochs=4, gamma=0.999,
        gae_lambda=0.98, ent_coef=0.01,
    ),
    "GodotRover": dict(
        total_timesteps=61_440, num_steps=256, learning_rate=1e-3, gamma=0.98, ent_coef=5e-3,
    ),
    "Basic": dict(
        total_timesteps=50_000, player_args=("--agents", "16"), num_steps=16, num_minibatches=8,
        update_epochs=3, gamma=0.9, ent_coef=5e-3, norm_obs=False, norm_reward=False,
        hidden_sizes=(20,), activation="silu",
    ),
    "PushBlock": dict(
        total_timesteps=500_000, num_steps=64, num_minibatches=16, update_epochs=3, ent_coef=0.01,
        norm_obs=False, norm_reward=False, hidden_sizes=(256, 256), activation="silu",
    ),
    "Sorter": dict(
        total_timesteps=5_000_000, env_parameters={"num_tiles": 2.0}, player_args=("--agents", "64"),
        num_steps=64, num_minibatches=8, update_epochs=3, ent_coef=5e-3, anneal_lr=False,
        norm_reward=False, hidden_sizes=(128, 128), activation="silu",
    ),
    # Two behaviors: --behavior BigWall SmallWall. At times all agents have the same behavior, hence
    # max_agents
    "WallClimb": dict(
        total_timesteps=60_000, max_agents=24, num_steps=64, num_minibatches=8, update_epochs=4,
        learning_rate=1e-3, ent_coef=0.01, norm_obs=False, norm_reward=False,
    ),
}  # fmt: skip


def check(args):
    """Check the arguments before the run starts."""
    runs.check(
        args,
        above_0=(
            "num_steps",
            "num_minibatches",
            "learning_rate",
            "max_grad_norm",
            "target_kl",
            "hidden_sizes",
        ),
        from_0=("clip_coef", "ent_coef", "vf_coef", "update_epochs", "min_obs_std"),
        from_0_to_1=("gamma", "gae_lambda"),
        at_most={"update_epochs": 10_000, "hidden_sizes": 2**16},
    )


# describe(args, envs) returns the spec of the policy: sizes and bounds as plain numbers, which
# checkpoints store
describe = partial(runs.describe, discrete=True, entities=True)


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(sizes, activation, num_outputs, output_std):
    layers = []
    for size_in, size_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers.append(layer_init(nn.Linear(size_in, size_out)))
        layers.append({"tanh": nn.Tanh, "silu": nn.SiLU}[activation]())
    layers.append(layer_init(nn.Linear(sizes[-1], num_outputs), output_std))
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """Actor, critic and the statistics of the observations.

    `spec` describes the env: obs_dim, branches (the number of choices in each branch), start (the
    first choice of each branch, usually 0), and entities (see onefile_rl/entities.py) if it has any.
    """

    def __init__(self, spec, args):
        super().__init__()
        sizes = (num_features(spec), *args.hidden_sizes)
        self.obs_rms = nn.Identity()
        if args.norm_obs:
            self.obs_rms = Normalizer(
                spec["obs_dim"], min_std=args.min_obs_std, entities=spec.get("entities", ())
            )  # SB3 differs (9)
        self.actor = mlp(sizes, args.activation, sum(spec["branches"]), output_std=0.01)
        self.critic = mlp(sizes, args.activation, 1, output_std=1.0)
        # Only in scenes with entities: attention in front of each network turns them into a vector
        if "entities" in spec:
            self.actor = nn.Sequential(Entities(spec), self.actor)
            self.critic = nn.Sequential(Entities(spec), self.critic)
        ends = np.cumsum(spec["branches"]).tolist()
        self.branch_slices = tuple(map(slice, [0, *ends], ends))  # the columns of each branch
        self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)

    def get_value(self, obs):
        return self.critic(self.obs_rms(obs)).flatten()

    def get_choice_logprobs(self, x, mask):
        """Return the log-probs of all choices, one tensor per branch. mask: 0 if not allowed."""
        logits = self.actor(x) + (mask.float() - 1.0) * 1e8
        return [logits[:, branch].log_softmax(1) for branch in self.branch_slices]

    def get_action_and_value(self, obs, mask, action=None, deterministic=False):
        """Return actions, their log-probs, the entropy of the policy and the values of the
        observations.

        Actions are sampled unless they are given. Learning uses this method directly; acting,
        evaluation and export use it through `act`.
        """
        x = self.obs_rms(obs)
        choice_logprobs = self.get_choice_logprobs(x, mask)
        if action is None and deterministic:
            action = torch.cat([logp.argmax(1, True) for logp in choice_logprobs], 1)
        elif action is None:
            action = torch.cat([torch.multinomial(logp.exp(), 1) for logp in choice_logprobs], 1)

        # Log-prob and entropy of categorical distributions, summed over the branches.
        # torch.distributions computes the same, but fast.Acting can't translate it
        chosen = [logp.gather(1, action[:, i : i + 1]) for i, logp in enumerate(choice_logprobs)]
        logprob = torch.cat(chosen, 1).sum(1)
        entropy = -sum((logp.exp() * logp).sum(1) for logp in choice_logprobs)
        return action, logprob, entropy, self.critic(x).flatten()

    def act(self, obs, mask, deterministic=False):
        """Return the actions to learn from, and the same actions numbered as in the env."""
        action, _, _, _ = self.get_action_and_value(obs, mask, deterministic=deterministic)
        return action, action + self.start


class Rollout:
    """Completed decisions of all agents, one row each, in the order in which their rewards arrived.

        row  slots  obs  actions  rewards  next_obs  terminated  truncated
        0    0      o0   a0       1.0      o2        False       False
        1    2      o1   a1       0.5      o3        False       True
        2    0      o2   a2       0.7      o4        False       False
        ...
        pending_obs[0] = o4, pending_actions[0] = a4

    Row 2 is the next decision of slot 0 after row 0. Row 1 ended by a time limit: o3 is the final
    observation. The decision (o4, a4) of slot 0 is still pending, so it is not a row yet.

    A slot is an agent's place in the vector env. A decision becomes a row when its reward arrives,
    so every row is complete. Rows beyond the batch size wait for the next batch.
    """

    # A new column needs its name here and its array in __init__. add() fills it; what is known when
    # the agent acts waits in a pending_ array that decide() fills. For the loss it also needs a field
    # in Batch, which is rollout.NAME[order][used] in make_batch()
    COLUMNS = (
        "slots",
        "obs",
        "masks",
        "actions",
        "rewards",
        "next_obs",
        "terminated",
        "truncated",
        "discounted_returns",
    )

    def __init__(self, capacity, num_slots, obs_dim, branches):
        self.size = 0
        self.slots = np.zeros(capacity, int)
        self.obs = np.zeros((capacity, obs_dim), np.float32)
        self.masks = np.zeros((capacity, sum(branches)), bool)
        self.actions = np.zeros((capacity, len(branches)), int)
        self.rewards = np.zeros(capacity)
        self.next_obs = np.zeros((capacity, obs_dim), np.float32)
        self.terminated = np.zeros(capacity, bool)
        self.truncated = np.zeros(capacity, bool)
        self.discounted_returns = np.zeros(capacity)  # of the episode so far, to normalize rewards
        self.pending_obs = np.zeros((num_slots, obs_dim), np.float32)
        self.pending_masks = np.zeros((num_slots, sum(branches)), bool)
        self.pending_actions = np.zeros((num_slots, len(branches)), int)
        self.running_returns = np.zeros(num_slots)  # the last discounted return of each slot

    def decide(self, slots, obs, masks, actions):
        """Remember the decisions of these slots until their rewards arrive."""
        slots = self.as_index(slots)
        self.pending_obs[slots] = obs
        self.pending_masks[slots] = masks
        self.pending_actions[slots] = actions

    def as_index(self, slots):
        """`slots` is sorted. Return a slice if it has all of them: numpy copies slices faster."""
        return slots if len(slots) < len(self.running_returns) else slice(None)

    def add(self, slots, reward, terminated, truncated, next_obs, infos, gamma):
        """Store the pending decisions of `slots`, whose rewards have arrived.

        reward, terminated, truncated and next_obs are the arrays that envs.step() returned.
        """
        rows = slice(self.size, self.size + len(slots))
        index = self.as_index(slots)
        self.slots[rows] = slots
        self.obs[rows] = self.pending_obs[index]
        self.masks[rows] = self.pending_masks[index]
        self.actions[rows] = self.pending_actions[index]
        self.rewards[rows] = reward[index]
        self.next_obs[rows] = next_obs[index]
        self.terminated[rows] = terminated[index]
        self.truncated[rows] = truncated[index]
        self.running_returns[index] = gamma * self.running_returns[index] + reward[index]
        self.discounted_returns[rows] = self.running_returns[index]
        self.size += len(slots)

        # The env resets itself: after an end next_obs is of the next episode, and infos has the
        # final observation
        if "final_obs" in infos:
            done = terminated | truncated
            for row, slot in enumerate(slots, rows.start):
                if done[slot]:
                    self.next_obs[row] = infos["final_obs"][slot]
            self.running_returns[done] = 0

    def cut(self, slots):
        """End the episodes of slots whose game crashed, as a time limit does.

        Their pending decisions are never stored.
        """
        for slot in slots:
            rows = np.flatnonzero(self.slots[: self.size] == slot)
            if len(rows) and not self.terminated[rows[-1]]:
                self.truncated[rows[-1]] = True
        self.running_returns[slots] = 0

    def remove(self, num_rows):
        """Remove the first rows, which have been learned from."""
        for name in self.COLUMNS:
            column = getattr(self, name)
            column[: self.size - num_rows] = column[num_rows : self.size]
        self.size -= num_rows


def gae(rewards, values, next_values, continues, gamma, gae_lambda):
    """Return the advantages of rows sorted by agent. `next_values` are the values of the next
    observations, 0 after a termination. `continues` says whether the next row is the next decision
    of the same episode."""
    advantages = [0.0] * len(rewards)
    lastgaelam = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] - values[t]
        lastgaelam = delta + gamma * gae_lambda * lastgaelam if continues[t] else delta
        advantages[t] = lastgaelam
    return advantages


class Batch(NamedTuple):
    obs: torch.Tensor  # not normalized: the networks get agent.obs_rms(obs)
    masks: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    # PPO does not need these columns. They are here for custom losses
    next_obs: torch.Tensor  # likewise; the final observation where an episode ended
    terminated: torch.Tensor
    truncated: torch.Tensor


@torch.no_grad()
def make_batch(agent, rollout, batch_size, reward_scale, args):
    """Return the first `batch_size` rows of the rollout, sorted by agent, with their advantages."""
    # The sort by slot is stable, so the rows of each agent stay in the order of time
    order = np.argsort(rollout.slots[: rollout.size], kind="stable")
    slots = rollout.slots[order]
    obs = torch.as_tensor(rollout.obs[order], device=args.device)
    masks = torch.as_tensor(rollout.masks[order], device=args.device)
    actions = torch.as_tensor(rollout.actions[order], device=args.device)
    rewards = rollout.rewards[order]
    next_obs = torch.as_tensor(rollout.next_obs[order], device=args.device)
    terminated = rollout.terminated[order]
    truncated = rollout.truncated[order]
    if args.norm_reward:
        rewards = np.clip(rewards * reward_scale, -10, 10)
    # Other terms of the reward belong here: the scale is computed from the rewards of the env

    # Log-probs and values with the weights of this iteration: SB3 differs (8). Rows that
    # were pending or left over were decided before the last update. They get the log-probs of the
    # current policy as well
    agent.eval()  # as fast.Acting does: no dropout
    _, logprobs, _, values = agent.get_action_and_value(obs, masks, actions)
    advantages = compute_advantages(
        agent, slots, rewards, values, next_obs, terminated, truncated, args
    )
    agent.train()

    # Learn from the first batch_size rows that arrived; later rows only gave next values. np.resize
    # repeats rows on a slow rank of a distributed run that has fewer
    used = np.resize(np.flatnonzero(order < batch_size), batch_size)
    return Batch(
        obs=obs[used],
        masks=masks[used],
        actions=actions[used],
        logprobs=logprobs[used],
        advantages=advantages[used],
        returns=advantages[used] + values[used],
        values=values[used],
        next_obs=next_obs[used],
        terminated=torch.as_tensor(terminated[used], device=args.device),
        truncated=torch.as_tensor(truncated[used], device=args.device),
    )


def compute_advantages(agent, slots, rewards, values, next_obs, terminated, truncated, args):
    """Return the advantages of rows that are sorted by agent."""
    is_last = np.append(slots[1:] != slots[:-1], True)
    continues = ~(is_last | terminated | truncated)

    # The next value is that of the next row, of next_obs after a truncation or where an agent's rows
    # end, or 0 after a termination
    values = values.double().cpu().numpy()
    next_values = np.append(values[1:], 0.0)
    bootstraps = np.flatnonzero(~continues & ~terminated)  # CleanRL differs (5)
    next_values[bootstraps] = agent.get_value(next_obs[bootstraps]).cpu()
    next_values[terminated] = 0.0

    # Lists, because Python reads single numbers from them faster than from arrays
    columns = [column.tolist() for column in (rewards, values, next_values, continues)]
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    return torch.tensor(advantages, dtype=torch.float32, device=args.device)


def ppo_loss(agent, mb, args):
    """Return the loss of a minibatch and the metrics to log."""
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb.obs, mb.masks, mb.actions)
    logratio = newlogprob - mb.logprobs
    ratio = logratio.exp()

    # Policy loss
    mb_advantages = mb.advantages
    if args.norm_adv and len(mb_advantages) > 1:
        mb_advantages = distributed.normalize(mb_advantages)
    pg_loss1 = -mb_advantages * ratio
    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()

    # Value loss: SB3 differs (2)
    v_loss = (newvalue - mb.returns) ** 2
    if args.clip_vloss:  # SB3 differs (3)
        v_clipped = mb.values + torch.clamp(newvalue - mb.values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb.returns) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropy_loss,
        "losses/approx_kl": ((ratio - 1) - logratio).mean(),
        "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, metrics


def update(agent, optimizer, batch, mb_inds, grad_weight, args):
    """Make one optimizer step on a minibatch, and return the metrics of this rank.

    grad_weight: the weight of this rank's gradients in a distributed run
    """
    mb = Batch(*(column[mb_inds] for column in batch))
    optimizer.zero_grad()
    loss, metrics = ppo_loss(agent, mb, args)
    loss.backward()
    distributed.average_gradients(agent.parameters(), grad_weight)
    # foreach=False: the compiler for CPUs has no fast form of foreach
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=False)
    optimizer.step()
    metrics["losses/grad_norm"] = grad_norm
    # Still tensors: reading numbers would make a GPU wait
    return fast.detach(metrics)


@torch.no_grad()
def approx_kl(agent, batch, mb_inds, args):
    """Return the approximate KL divergence on a minibatch, before its update."""
    mb = Batch(*(column[mb_inds] for column in batch))
    _, metrics = ppo_loss(agent, mb, args)
    return distributed.average(metrics["losses/approx_kl"])


def train(args, resumed=None):
    """Train an agent. `resumed` is the path and the content of a checkpoint to continue from."""
    check(args)
    # A run seeds the random number generators, makes the envs and opens the log
    with runs.Run(args, __file__, make_envs, resumed) as run:
        envs = run.envs
        num_agents = envs.num_envs  # of all copies of the env, or of all games
        spec = describe(args, envs)
        runs.check_batch(args, num_agents, spec)
        batch_size = args.num_steps * num_agents
        minibatch_size = batch_size // args.num_minibatches
        # Whole iterations only. Each of the distributed.SIZE ranks collects batch_size rows
        num_iterations = args.total_timesteps // (batch_size * distributed.SIZE)
        total_timesteps = num_iterations * batch_size * distributed.SIZE

        # Agent, optimizer, and storage for one iteration. The last step of a rollout may add up to
        # num_agents more rows than needed
        agent = Agent(spec, args).to(args.device)
        optimizer = fast.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)  # or torch.optim
        initial_lrs = [group["lr"] for group in optimizer.param_groups]
        return_rms = Normalizer()
        rollout = Rollout(batch_size + num_agents, num_agents, spec["obs_dim"], spec["branches"])
        action_space = envs.single_action_space
        env_actions = np.zeros((num_agents, *action_space.shape), action_space.dtype)
        flat_actions = env_actions.reshape(num_agents, -1)  # a view with one column per number
        initial_ent_coef = args.ent_coef

        # Acceleration. `act` is agent.act for numpy arrays, translated to numpy. It always uses the
        # current weights. The first call and every 1000th are compared with agent.act. If they differ
        # even after a new translation, or if something can't be translated, agent.act itself is
        # called from then on, and a message is printed.
        # run.compile compiles `update`, with fast.Adam or any optimizer of torch.optim, if there is
        # a C++ compiler: by default in runs of at least 5,000 updates, with --compile in any run.
        # Learning rates, float arguments of `update` and float fields of args may change between
        # calls. Other Python values that `update` reads are compiled in: if one changes, a message
        # names it and `update` is no longer compiled (with --compile it is an error).
        # --no-fast switches both off. The results are the same up to rounding if only actions are
        # random. Dropout, for example, draws other random numbers when it is compiled.
        act = fast.Acting(agent, enabled=args.fast)
        num_updates = num_iterations * args.update_epochs * args.num_minibatches
        compiled_update = run.compile(update, num_updates)

        # Start or resume: reset the envs, or restore the checkpoint. Checkpoints contain the agent,
        # `keep` (anything with a state_dict, dicts and arrays), the arguments, and `episodes` if
        # the envs can continue their episodes
        next_obs, infos = run.start(
            agent,
            spec,
            total_timesteps,
            keep={"optimizer": optimizer, "return_rms": return_rms},
            episodes={"running_returns": rollout.running_returns},
            description=f"{num_iterations} iterations of {batch_size}, minibatches of {minibatch_size}",
        )

        # Agents decide at their own pace. infos has these flags for each slot:
        #   ready      it requests an action now: its rows of next_obs and action_mask are new
        #   closed     the reward of its pending action has arrived. An agent that is new or was
        #              restarted is ready but not closed
        #   restarted  its game crashed and was started again: its pending action gets no reward
        # With gymnasium envs every slot is ready and closed in every step (EnvPool: except resets)
        ready = infos["ready"].nonzero()[0]

        # Iterations 0, 1, ... until total_timesteps, or until a stop is requested (Ctrl+C, SIGTERM).
        # run.log ends an iteration: checkpoints and videos are written then if they are due
        for iteration in run.iterations():
            # Annealing: SB3 differs (4)
            remaining = 1 - run.global_step / total_timesteps
            if args.anneal_lr:
                for group, initial_lr in zip(optimizer.param_groups, initial_lrs, strict=True):
                    group["lr"] = initial_lr * remaining
            if args.anneal_ent:
                # Checkpoints contain the arguments as given, so a resumed run anneals as before
                args.ent_coef = initial_ent_coef * remaining

            # Collect a rollout. One thread for torch: the environments need the other cores
            torch.set_num_threads(1)
            # Until rollout.size >= batch_size; with --rollout-share, until enough other ranks have it
            while not run.has_enough(rollout.size, batch_size):
                # Act for the agents that request an action
                obs = next_obs[ready]
                masks = infos["action_mask"][ready]
                actions, flat_actions[ready] = act(obs, masks)
                rollout.decide(ready, obs, masks, actions)
                run.spent("act")  # logs the time since the last record() or spent() as time/act

                # Step. The env ignores the actions of slots that are not ready
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                run.record(reward, terminated, truncated, infos)  # counts decisions, episodes, time

                # Store the decisions whose reward has arrived
                if "restarted" in infos:
                    rollout.cut(infos["restarted"].nonzero()[0])
                closed = infos["closed"].nonzero()[0]
                rollout.add(closed, reward, terminated, truncated, next_obs, infos, args.gamma)
                ready = infos["ready"].nonzero()[0]
            run.spent("act")  # storing the last step

            # Advantages. Small networks are faster with one thread
            torch.set_num_threads(fast.threads(minibatch_size * max(args.hidden_sizes, default=1)))
            num_rows = min(rollout.size, batch_size)  # fewer only on a slow rank
            reward_scale = return_rms.scale.item()  # 1 / std of the returns of earlier iterations
            batch = make_batch(agent, rollout, batch_size, reward_scale, args)

            # Optimize the policy and the value function
            metrics = []
            stop = False
            for epoch in range(args.update_epochs):
                # CleanRL differs (6)
                b_inds = torch.as_tensor(np.random.permutation(batch_size), device=args.device)
                for mb_inds in b_inds.split(minibatch_size):
                    if args.target_kl is not None:  # CleanRL differs (7)
                        stop = approx_kl(agent, batch, mb_inds, args) > 1.5 * args.target_kl
                    if stop:
                        break
                    mb_metrics = compiled_update(
                        agent, optimizer, batch, mb_inds, float(num_rows), args
                    )
                    metrics.append(mb_metrics)
                if stop:
                    break

            # Update the statistics of observations and returns: SB3 and CleanRL differ (1). This
            # changes the policy, so it comes after the updates
            if args.norm_obs:
                agent.obs_rms.update(torch.as_tensor(rollout.obs[:num_rows], device=args.device))
            return_rms.update(torch.as_tensor(rollout.discounted_returns[:num_rows]))
            rollout.remove(num_rows)
            run.spent("learn")

            # Log
            scalars = fast.means(metrics)  # over the updates; {} without any
            scalars["losses/explained_variance"] = (
                1 - (batch.advantages.var() / batch.returns.var()).item()
            )
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
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
    )


if __name__ == "__main__":
    main()
