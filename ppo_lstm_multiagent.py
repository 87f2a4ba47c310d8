"""PPO for discrete actions with an LSTM: one policy for all agents of a Unity, Godot or gymnasium
environment.

    python ppo_lstm_multiagent.py --env-id Hallway                       a bundled Unity scene
    python ppo_lstm_multiagent.py --unity-path ./Builds/MyScene          your Unity build
    python ppo_lstm_multiagent.py --godot-path ./my_game                 your Godot game
    python ppo_lstm_multiagent.py --env-id CartPoleBlind-v0              any gymnasium env
    python ppo_lstm_multiagent.py --resume runs/NAME                     or --evaluate, --export

An action has one choice per branch: a Discrete action space has one branch, MultiDiscrete and Unity
have several. An action mask says which choices are allowed; a choice that is not allowed has
probability 0. Unity and Godot send masks. A gymnasium env has them if it has action_masks(), the
method that sb3-contrib's MaskablePPO uses.

Agents in a game request decisions at their own pace, so a rollout is not a (num_steps, num_envs)
rectangle. It is a list of rows, one per decision whose reward has arrived, and it is sorted by
agent before the advantages are computed. An iteration uses num_steps * num_agents rows. With
gymnasium environments these are the rows of the usual rectangle.

The LSTM adds the following to ppo_discrete_multiagent.py:
 - Policy and value have an LSTM each, between the hidden layers and the output. The state of both
   LSTMs is one vector per agent. It changes with each decision of the agent, and is zero at the
   start of an episode.
 - A row stores the state before its decision. The value of a final observation is computed with the
   state at the end of its episode.
 - A minibatch consists of whole sequences: successive rows of one agent in one episode, at most
   --sequence-length, from the stored state of the first row. Sequences are packed, not padded.
 - The exported model has recurrent_in and recurrent_out, the state of the policy's LSTM. It has
   --memory-size numbers, as in ML-Agents.
 - The update is not compiled, because minibatches differ in shape.

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
 6. CleanRL shuffles environments. sb3-contrib's RecurrentPPO rotates the rows by a random number in
    each epoch, which cuts a sequence in two. Here sequences are permuted, newly for each epoch, and
    are cut only at --sequence-length and after decisions that were made before the last update.
 7. CleanRL checks target_kl after each epoch. SB3 and this script check it before each step,
    against 1.5 * target_kl.
 8. SB3 and CleanRL compute log-probs and values during the rollout, and GAE in single precision.
    Here log-probs and values are computed after the rollout in one batch, and GAE in double
    precision.
 9. SB3 divides an observation by its std even if that is tiny. Here the std is at least
    --min-obs-std: an input that is nearly constant in training would otherwise become huge as
    soon as it changes.
10. In CleanRL actor and critic share one LSTM, gradients go back through all num_steps, and the
    state is reset within the sequence where an episode ends. In sb3-contrib and this script each
    has its own LSTM, before the hidden layers in sb3-contrib, after them here. Here gradients go
    back at most --sequence-length decisions, and a sequence ends with the episode. CleanRL
    initializes the LSTM orthogonally, with biases of 0; here it is initialized as nn.LSTM is.
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
from onefile_rl.entities import Entities, num_features
from onefile_rl.normalizer import Normalizer


# Inherited from runs.Args: total_timesteps, seed, num_envs, device, and the options of Unity and
# Godot, checkpoints, videos and evaluation
@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder"""
    env_id: str = "CartPoleBlind-v0"
    """a bundled scene (Hallway), a gymnasium id, or module:id"""
    learning_rate: float = 3e-4
    """the learning rate of the optimizer"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    num_steps: int = 2048
    """decisions per agent in each iteration; the batch size is num_steps * number of agents"""
    num_minibatches: int = 32
    """the number of minibatches per epoch; they consist of whole sequences, so their rows vary"""
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
    memory_size: int = 128
    """the size of the LSTM's state, as in ML-Agents; the hidden size of the LSTM is half of it"""
    sequence_length: int = 64
    """the maximum number of decisions that a gradient goes back through"""
    forget_bias: float = 0.0
    """added to the initial biases of the forget gates; larger values: it remembers longer"""
    activation: Literal["tanh", "silu"] = "tanh"
    """the activation function; silu is ML-Agents' swish"""


# Settings per environment. Options on the command line take precedence.
# Hallway: ML-Agents' official settings, but 64 agents, minibatches of 512, normalized observations, a
# larger learning rate, one more epoch, a smaller entropy bonus, and forget gates that are open at
# the start.
CLASSIC = dict(num_envs=8, num_steps=128, num_minibatches=4, learning_rate=1e-3, hidden_sizes=(64,))
PRESETS = {
    "CartPole-v1": dict(total_timesteps=200_000, **CLASSIC),
    "CartPoleBlind-v0": dict(total_timesteps=300_000, **CLASSIC),
    "Hallway": dict(
        total_timesteps=4_000_000, player_args=("--agents", "64"), num_steps=64, num_minibatches=8,
        update_epochs=4, learning_rate=1e-3, ent_coef=0.02, norm_reward=False,
        hidden_sizes=(128, 128), activation="silu", forget_bias=2.0,
    ),
}  # fmt: skip


def check(args):
    """Check the arguments before the run starts."""
    if args.compile:
        why = "minibatches of sequences differ in shape"
        raise ValueError(f"--compile: {why}, so the update can't be compiled: leave it out")
    runs.check(
        args,
        above_0=(
            "num_steps",
            "num_minibatches",
            "learning_rate",
            "max_grad_norm",
            "target_kl",
            "hidden_sizes",
            "memory_size",
            "sequence_length",
        ),
        from_0=("clip_coef", "ent_coef", "vf_coef", "update_epochs", "min_obs_std"),
        from_0_to_1=("gamma", "gae_lambda"),
        at_most={"update_epochs": 10_000, "hidden_sizes": 2**16, "memory_size": 2**16},
    )
    if args.memory_size % 2:
        why = "the hidden size of the LSTM is half of it"
        raise ValueError(f"--memory-size {args.memory_size}: must be even, because {why}")


def describe(args, envs):
    """Return the spec of the policy: sizes as plain numbers, which checkpoints store."""
    return runs.describe(args, envs, discrete=True, entities=True) | {"memory": args.memory_size}


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


class Memory(nn.Module):
    """An LSTM. Its state is one vector of `memory_size` numbers: the hidden state and the cells.

    To use another cell, for example a GRU, change this class: acting, learning and export use its
    `step`; fast.Unrolled computes an LSTM's in another way. `output_size` is the size of the output.
    Only --forget-bias, and in check() that --memory-size must be even, are about LSTMs.

    nn.LSTMCell computes the same, but fast.Acting and fast.Unrolled do not support it.
    """

    def __init__(self, input_size, memory_size, forget_bias=0.0):
        super().__init__()
        hidden_size = memory_size // 2
        self.output_size = hidden_size
        self.linear_ih = nn.Linear(input_size, 4 * hidden_size)
        self.linear_hh = nn.Linear(hidden_size, 4 * hidden_size)
        for parameter in self.parameters():  # as nn.LSTM initializes them
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)
        self.linear_ih.bias.data[hidden_size : 2 * hidden_size] += forget_bias

    def step(self, x, state):
        """Return the output and the new state after one decision."""
        h, c = state.chunk(2, 1)
        i, f, g, o = (self.linear_ih(x) + self.linear_hh(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, torch.cat([h, c], 1)


def unroll(agent, obs, lstm_state, packed_sizes):
    """Return the outputs of the LSTMs of actor and critic over the sequences of a minibatch.

    obs: packed as minibatches() says
    lstm_state: a row for the start of each sequence
    """
    actor_outputs = []
    critic_outputs = []
    for obs_step in obs.split(packed_sizes.tolist()):
        lstm_state = lstm_state[: len(obs_step)]  # of the sequences that have this step
        actor_hidden, critic_hidden, lstm_state = agent.step(obs_step, lstm_state)
        actor_outputs.append(actor_hidden)
        critic_outputs.append(critic_hidden)
    return torch.cat(actor_outputs), torch.cat(critic_outputs)


class Agent(nn.Module):
    """Actor, critic and the statistics of the observations.

    `spec` describes the env: obs_dim, branches (the number of choices in each branch), start (the
    first choice of each branch, usually 0), memory (the size of an LSTM's state), and entities (see
    onefile_rl/entities.py) if it has any.

    `lstm_state` is the state of both LSTMs, the actor's first: 2 * memory numbers per row.
    """

    def __init__(self, spec, args):
        super().__init__()
        sizes = (num_features(spec), *args.hidden_sizes)
        self.obs_rms = nn.Identity()
        if args.norm_obs:
            self.obs_rms = Normalizer(
                spec["obs_dim"], min_std=args.min_obs_std, entities=spec.get("entities", ())
            )  # SB3 differs (9)
        self.actor_layers = mlp(sizes, args.activation)
        self.critic_layers = mlp(sizes, args.activation)
        # Only in scenes with entities: attention in front of each network turns them into a vector
        if "entities" in spec:
            self.actor_layers = nn.Sequential(Entities(spec), self.actor_layers)
            self.critic_layers = nn.Sequential(Entities(spec), self.critic_layers)
        # Each its own LSTM: CleanRL differs (10)
        self.actor_memory = Memory(sizes[-1], spec["memory"], args.forget_bias)
        self.critic_memory = Memory(sizes[-1], spec["memory"], args.forget_bias)
        hidden_size = self.actor_memory.output_size
        self.actor = layer_init(nn.Linear(hidden_size, sum(spec["branches"])), std=0.01)
        self.critic = layer_init(nn.Linear(hidden_size, 1), std=1.0)
        # unroll(), computed for all steps at once: encode() in torch, the LSTMs in numpy. Outputs and
        # gradients are compared with those of unroll(), which is used instead if they differ
        self.unrolled = fast.Unrolled(unroll, enabled=args.fast)
        ends = np.cumsum(spec["branches"]).tolist()
        self.branch_slices = tuple(map(slice, [0, *ends], ends))  # the columns of each branch
        self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)

    def encode(self, obs):
        """Return the inputs of the LSTMs of actor and critic."""
        x = self.obs_rms(obs)
        return self.actor_layers(x), self.critic_layers(x)

    def step(self, obs, lstm_state):
        """Return the outputs of the LSTMs of actor and critic after one decision per row, and the
        new LSTM state."""
        actor_x, critic_x = self.encode(obs)
        actor_state, critic_state = lstm_state.chunk(2, 1)
        actor_hidden, actor_state = self.actor_memory.step(actor_x, actor_state)
        critic_hidden, critic_state = self.critic_memory.step(critic_x, critic_state)
        return actor_hidden, critic_hidden, torch.cat([actor_state, critic_state], 1)

    def get_value(self, obs, lstm_state):
        _, hidden, _ = self.step(obs, lstm_state)
        return self.critic(hidden).flatten()

    def get_action_and_value(
        self, obs, mask, lstm_state, action=None, packed_sizes=None, deterministic=False
    ):
        """Return actions, their log-probs, the entropy of the policy, the values of the
        observations, and the new LSTM state.

        Actions are sampled unless they are given. Acting, learning, evaluation and export all use
        this method. With `packed_sizes` the rows are sequences as minibatches() packs them,
        `lstm_state` has a row for the start of each sequence, and the new LSTM state is None.
        """
        if packed_sizes is None:
            actor_hidden, critic_hidden, new_lstm_state = self.step(obs, lstm_state)
        else:
            actor_hidden, critic_hidden = self.unrolled(self, obs, lstm_state, packed_sizes)
            new_lstm_state = None
        # mask: 0 where a choice is not allowed
        logits = self.actor(actor_hidden) + (mask.float() - 1.0) * 1e8
        choice_logprobs = [logits[:, branch].log_softmax(1) for branch in self.branch_slices]
        if action is None and deterministic:
            action = torch.cat([logp.argmax(1, True) for logp in choice_logprobs], 1)
        elif action is None:
            action = torch.cat([torch.multinomial(logp.exp(), 1) for logp in choice_logprobs], 1)

        # Log-prob and entropy of categorical distributions, summed over the branches.
        # torch.distributions computes the same, but fast.Acting can't translate it
        chosen = [logp.gather(1, action[:, i : i + 1]) for i, logp in enumerate(choice_logprobs)]
        logprob = torch.cat(chosen, 1).sum(1)
        entropy = -sum((logp.exp() * logp).sum(1) for logp in choice_logprobs)
        return action, logprob, entropy, self.critic(critic_hidden).flatten(), new_lstm_state

    def act(self, obs, mask, lstm_state, deterministic=False):
        """Return the actions to learn from, the same actions numbered as in the env, and the new
        LSTM state."""
        action, _, _, _, lstm_state = self.get_action_and_value(
            obs, mask, lstm_state, deterministic=deterministic
        )
        return action, action + self.start, lstm_state


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
    so every row is complete. Rows beyond the batch size wait for the next batch. `lstm_states` are
    the states before the decisions.
    """

    # A new column needs its name here and its array in __init__. add() fills it; what is known when
    # the agent acts waits in a pending_ array that decide() fills. For the loss it also needs a field
    # in Batch, which is rollout.NAME[order][used] in make_batch()
    COLUMNS = (
        "slots",
        "obs",
        "masks",
        "lstm_states",
        "actions",
        "stale",
        "rewards",
        "next_obs",
        "terminated",
        "truncated",
        "discounted_returns",
    )

    def __init__(self, capacity, num_slots, obs_dim, branches, lstm_state_size):
        self.size = 0
        self.slots = np.zeros(capacity, int)
        self.obs = np.zeros((capacity, obs_dim), np.float32)
        self.masks = np.zeros((capacity, sum(branches)), bool)
        self.lstm_states = np.zeros((capacity, lstm_state_size), np.float32)
        self.actions = np.zeros((capacity, len(branches)), int)
        self.stale = np.zeros(capacity, bool)  # the action was chosen before the last update
        self.rewards = np.zeros(capacity)
        self.next_obs = np.zeros((capacity, obs_dim), np.float32)
        self.terminated = np.zeros(capacity, bool)
        self.truncated = np.zeros(capacity, bool)
        self.discounted_returns = np.zeros(capacity)  # of the episode so far, to normalize rewards
        self.pending_obs = np.zeros((num_slots, obs_dim), np.float32)
        self.pending_masks = np.zeros((num_slots, sum(branches)), bool)
        self.pending_lstm_states = np.zeros((num_slots, lstm_state_size), np.float32)
        self.pending_actions = np.zeros((num_slots, len(branches)), int)
        self.pending_stale = np.zeros(num_slots, bool)
        self.running_returns = np.zeros(num_slots)  # the last discounted return of each slot

    def decide(self, slots, obs, masks, lstm_states, actions):
        """Remember the decisions of these slots until their rewards arrive."""
        slots = self.as_index(slots)
        self.pending_obs[slots] = obs
        self.pending_masks[slots] = masks
        self.pending_lstm_states[slots] = lstm_states
        self.pending_actions[slots] = actions
        self.pending_stale[slots] = False

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
        self.lstm_states[rows] = self.pending_lstm_states[index]
        self.actions[rows] = self.pending_actions[index]
        self.stale[rows] = self.pending_stale[index]
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
        """Remove the first rows, which have been learned from.

        The weights have changed: what remains was decided with older ones and is stale.
        """
        for name in self.COLUMNS:
            column = getattr(self, name)
            column[: self.size - num_rows] = column[num_rows : self.size]
        self.size -= num_rows
        self.stale[: self.size] = True
        self.pending_stale[:] = True


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
    lstm_states: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    begins: torch.Tensor  # whether a sequence begins at the row
    # PPO does not need these columns. They are here for custom losses. The value of next_obs also
    # needs the next LSTM state, which make_batch() has
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
    lstm_states = torch.as_tensor(rollout.lstm_states[order], device=args.device)
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
    _, logprobs, _, values, next_lstm_states = agent.get_action_and_value(
        obs, masks, lstm_states, actions
    )
    advantages = compute_advantages(
        agent, slots, rewards, values, next_obs, next_lstm_states, terminated, truncated, args
    )
    agent.train()

    # Learn from the first batch_size rows that arrived; later rows only gave next values. A slow
    # rank of a distributed run may have fewer
    used = np.flatnonzero(order < batch_size)
    begins = sequence_begins(slots, terminated | truncated, rollout.stale[order])
    return Batch(
        obs=obs[used],
        masks=masks[used],
        lstm_states=lstm_states[used],
        actions=actions[used],
        logprobs=logprobs[used],
        advantages=advantages[used],
        returns=advantages[used] + values[used],
        values=values[used],
        begins=torch.as_tensor(begins[used], device=args.device),
        next_obs=next_obs[used],
        terminated=torch.as_tensor(terminated[used], device=args.device),
        truncated=torch.as_tensor(truncated[used], device=args.device),
    )


def sequence_begins(slots, done, stale):
    """Return for each row, sorted by agent, whether a sequence begins there.

    A sequence begins with each agent, with each episode, and after a stale row: older weights
    computed the state that follows a stale row, and the current weights would arrive at another.
    """
    begins = (slots[1:] != slots[:-1]) | done[:-1] | stale[:-1]
    return np.append(True, begins)


def compute_advantages(
    agent, slots, rewards, values, next_obs, next_lstm_states, terminated, truncated, args
):
    """Return the advantages of rows that are sorted by agent."""
    is_last = np.append(slots[1:] != slots[:-1], True)
    continues = ~(is_last | terminated | truncated)

    # The next value is that of the next row, of next_obs after a truncation or where an agent's rows
    # end, or 0 after a termination
    values = values.double().cpu().numpy()
    next_values = np.append(values[1:], 0.0)
    bootstraps = np.flatnonzero(~continues & ~terminated)  # CleanRL differs (5)
    next_values[bootstraps] = agent.get_value(
        next_obs[bootstraps], next_lstm_states[bootstraps]
    ).cpu()
    next_values[terminated] = 0.0

    # Lists, because Python reads single numbers from them faster than from arrays
    columns = [column.tolist() for column in (rewards, values, next_values, continues)]
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    return torch.tensor(advantages, dtype=torch.float32, device=args.device)


def minibatches(begins, args):
    """Yield the minibatches of one epoch: mb_inds, the rows of whole sequences, and packed_sizes.

    `begins` says at which rows a sequence begins. The sequences, not the rows, are split into
    minibatches. They are packed as in torch's PackedSequence: the first rows of all sequences, the
    longest sequence first, then their second rows, and so on. `packed_sizes` (batch_sizes in torch)
    says how many sequences have a first row, a second row, and so on.
    """
    # Cut sequences that are longer than sequence_length
    rows = np.arange(len(begins))
    first_rows = np.maximum.accumulate(np.where(begins.cpu(), rows, 0))
    starts = np.flatnonzero((rows - first_rows) % args.sequence_length == 0)
    lengths = np.diff(starts, append=len(begins))

    # Permute the sequences. All ranks make the same number of minibatches
    num_minibatches = min(args.num_minibatches, distributed.minimum(len(starts)))
    for mb_seqs in np.array_split(np.random.permutation(len(starts)), num_minibatches):
        mb_seqs = mb_seqs[np.argsort(-lengths[mb_seqs], kind="stable")]
        steps = np.arange(lengths[mb_seqs[0]])
        packed_sizes = (lengths[mb_seqs] > steps[:, None]).sum(1)
        mb_inds = []
        for step, size in zip(steps, packed_sizes, strict=True):
            mb_inds.append(starts[mb_seqs[:size]] + step)
        mb_inds = torch.as_tensor(np.concatenate(mb_inds), device=args.device)
        yield mb_inds, torch.as_tensor(packed_sizes)


def ppo_loss(agent, mb, packed_sizes, args):
    """Return the loss of a minibatch and the metrics to log. packed_sizes: see minibatches()."""
    initial_lstm_state = mb.lstm_states[: packed_sizes[0]]  # of the first rows of the sequences
    _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(
        mb.obs, mb.masks, initial_lstm_state, mb.actions, packed_sizes
    )
    logratio = newlogprob - mb.logprobs
    ratio = logratio.exp()

    # Policy loss
    mb_advantages = mb.advantages
    # The minibatches of the ranks differ in size, and all ranks have to call normalize()
    if args.norm_adv and (len(mb_advantages) > 1 or distributed.SIZE > 1):
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


def update(agent, optimizer, batch, mb_inds, packed_sizes, args):
    """Make one optimizer step on a minibatch, and return the metrics of this rank."""
    mb = Batch(*(column[mb_inds] for column in batch))
    optimizer.zero_grad()
    loss, metrics = ppo_loss(agent, mb, packed_sizes, args)
    loss.backward()
    distributed.average_gradients(agent.parameters(), len(mb_inds))
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    metrics["losses/grad_norm"] = grad_norm
    # Still tensors: reading numbers would make a GPU wait
    return fast.detach(metrics)


@torch.no_grad()
def approx_kl(agent, batch, mb_inds, packed_sizes, args):
    """Return the approximate KL divergence on a minibatch, before its update."""
    mb = Batch(*(column[mb_inds] for column in batch))
    _, metrics = ppo_loss(agent, mb, packed_sizes, args)
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
        minibatch_size = batch_size // args.num_minibatches  # on average: sequences stay whole
        # Whole iterations only. Each of the distributed.SIZE ranks collects batch_size rows
        num_iterations = args.total_timesteps // (batch_size * distributed.SIZE)
        total_timesteps = num_iterations * batch_size * distributed.SIZE

        # Agent, optimizer, and storage for one iteration. The last step of a rollout may add up to
        # num_agents more rows than needed
        agent = Agent(spec, args).to(args.device)
        optimizer = fast.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)  # or torch.optim
        initial_lrs = [group["lr"] for group in optimizer.param_groups]
        return_rms = Normalizer()
        lstm_state_size = 2 * spec["memory"]  # the LSTMs of actor and critic
        rollout = Rollout(
            batch_size + num_agents, num_agents, spec["obs_dim"], spec["branches"], lstm_state_size
        )
        next_lstm_states = np.zeros((num_agents, lstm_state_size), np.float32)
        action_space = envs.single_action_space
        env_actions = np.zeros((num_agents, *action_space.shape), action_space.dtype)
        flat_actions = env_actions.reshape(num_agents, -1)  # a view with one column per number
        initial_ent_coef = args.ent_coef

        # Acceleration. `act` is agent.act for numpy arrays, translated to numpy. It always uses the
        # current weights. The first call and every 1000th are compared with agent.act. If they differ
        # even after a new translation, or if something can't be translated, agent.act itself is
        # called from then on, and a message is printed.
        # fast.Unrolled in the agent does the same for unroll(), every 20th call.
        # --no-fast switches both off. The results are the same up to rounding if only actions are
        # random.
        act = fast.Acting(agent, enabled=args.fast)

        # Start or resume: reset the envs, or restore the checkpoint. Checkpoints contain the agent,
        # `keep` (anything with a state_dict, dicts and arrays), the arguments, and `episodes` if
        # the envs can continue their episodes
        next_obs, infos = run.start(
            agent,
            spec,
            total_timesteps,
            keep={"optimizer": optimizer, "return_rms": return_rms},
            episodes={
                "running_returns": rollout.running_returns,
                "next_lstm_states": next_lstm_states,
            },
            description=f"{num_iterations} iterations of {batch_size}, minibatches of about {minibatch_size}",
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
                lstm_states = next_lstm_states[ready]
                actions, flat_actions[ready], next_lstm_states[ready] = act(obs, masks, lstm_states)
                rollout.decide(ready, obs, masks, lstm_states, actions)
                run.spent("act")  # logs the time since the last record() or spent() as time/act

                # Step. The env ignores the actions of slots that are not ready
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                run.record(reward, terminated, truncated, infos)  # counts decisions, episodes, time

                # Store the decisions whose reward has arrived
                if "restarted" in infos:
                    rollout.cut(infos["restarted"].nonzero()[0])
                    next_lstm_states[infos["restarted"]] = 0
                closed = infos["closed"].nonzero()[0]
                rollout.add(closed, reward, terminated, truncated, next_obs, infos, args.gamma)
                next_lstm_states[terminated | truncated] = 0  # an episode starts with zeros
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
                # SB3 and CleanRL differ (6)
                for mb_inds, packed_sizes in minibatches(batch.begins, args):
                    if args.target_kl is not None:  # CleanRL differs (7)
                        mb_kl = approx_kl(agent, batch, mb_inds, packed_sizes, args)
                        stop = mb_kl > 1.5 * args.target_kl
                    if stop:
                        break
                    mb_metrics = update(agent, optimizer, batch, mb_inds, packed_sizes, args)
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
