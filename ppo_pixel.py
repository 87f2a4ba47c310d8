"""PPO from images, or images and vectors: one policy for all agents of a Unity, Godot or gymnasium
environment, with continuous or discrete actions.

    python ppo_pixel.py --env-id GridWorld                   a bundled Unity scene
    python ppo_pixel.py --unity-path ./Builds/MyScene        your Unity build
    python ppo_pixel.py --godot-path ./my_game               your Godot game
    python ppo_pixel.py --env-id DummyPixels-v0              any gymnasium env with images
    python ppo_pixel.py --env-id ale_py:ALE/Pong-v5          Atari
    python ppo_pixel.py --env-id Reacher-v5 --from-pixels    any MuJoCo env of gymnasium, rendered
    python ppo_pixel.py --resume runs/NAME                   or --evaluate, --export

Differences from ppo_continuous_multiagent.py, which explains the rest:
 - Each image is stored once, as uint8 (see onefile_rl/frames.py). A row of the rollout has the
   numbers of its last --frame-stack images.
 - Each camera has its own encoder. Vectors are normalized and join after the encoders. Actor and
   critic share all layers but the last.
 - Log-probs and values are computed when acting and stored in the rollout: computing them again for
   the whole batch would take another forward pass of the encoders.
 - Actions are continuous, or discrete as in ppo_discrete_multiagent.py.
 - Atari games are preprocessed by gymnasium's AtariPreprocessing: up to 30 no-op actions, four frames
   per action, the maximum of the last two, grayscale, 84 x 84 pixels. Four images are stacked. The
   v5 envs repeat the last action with probability 0.25. Rewards are not clipped to their sign, lost
   lives do not end an episode, and FIRE is not pressed at its start.
 - Two runs with the same seed are bit-identical with one thread only (OMP_NUM_THREADS=1). With
   several threads, sums in convolutions are rounded differently from run to run.
 - The exported model takes images as ML-Agents' own models do, for Barracuda (package 2.x) and
   Sentis (3.x): floats from 0 to 1, (batch, channels, height, width). With --frame-stack K the
   camera sensor in Unity needs K Observation Stacks, which start with black images there.

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
 8. GAE is computed in double precision, and convolutions get images with the channels last in
    memory. So where nothing else differs, results equal SB3's up to rounding.
 9. With one image and no vector, --encoder nature and --features 512, which are the defaults, the
    network is that of SB3's CnnPolicy. Several images, or images and vectors, share one more layer,
    where SB3's MultiInputPolicy has two layers of 64 for the policy and two for the value.
10. SB3 divides an observation by its std even if that is tiny. Here the std is at least
    --min-obs-std: an input that is nearly constant in training would otherwise become huge as
    soon as it changes.
11. SB3 and CleanRL clip actions to the bounds of the env. So does this script, but bounds that a
    new policy (mean 0, std about 1) would hardly reach, such as 100 to 200, are first rescaled to
    -1 to 1 (envs/make.py).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from envs.pixels import describe_seen, frame_stack, make_envs
from onefile_rl import distributed, fast, runs
from onefile_rl.engines.scenes import engine
from onefile_rl.frames import Frames, stacked
from onefile_rl.normalizer import Normalizer


# Inherited from runs.Args: total_timesteps, seed, num_envs, device, and the options of Unity and
# Godot, checkpoints, videos and evaluation
@dataclass
class Args(runs.Args):
    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run's folder"""
    env_id: str = "GridWorld"
    """a bundled scene (GridWorld, GodotRover), a gymnasium id, or module:id"""
    from_pixels: bool = False
    """replace the observations of a MuJoCo env of gymnasium by rendered images"""
    image_size: int | None = None
    """the size of rendered images (default 64) and Atari's (84); other images are resized to it"""
    frame_stack: int | None = None
    """the number of last images in an observation; default: 3 with --from-pixels, 4 in Atari, or 1"""
    grayscale: bool = False
    """convert images to grayscale"""
    action_repeat: int | None = None
    """how often a gymnasium env repeats each action; by default 4 in Atari, otherwise 1"""
    num_envs: int = 8
    """the number of parallel gymnasium envs; in a Unity or Godot scene every agent counts as one"""
    num_workers: int = 0
    """the number of processes that step the gymnasium envs, each several; 0: this process does"""
    learning_rate: float = 3e-4
    """the learning rate of the optimizer"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    num_steps: int = 256
    """decisions per agent in each iteration; the batch size is num_steps * number of agents"""
    num_minibatches: int = 8
    """the number of minibatches per epoch"""
    update_epochs: int = 4
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
    """normalize vector observations by their running mean and variance, and clip them to -10 and 10"""
    min_obs_std: float = 0.01
    """the smallest standard deviation that vectors are divided by; 0: no minimum, as in SB3"""
    norm_reward: bool = True
    """divide rewards by the running std of the discounted return, and clip them to -10 and 10"""
    encoder: Literal["nature", "simple", "impala"] = "nature"
    """three convolutions as in SB3's CnnPolicy, two as in ML-Agents, or IMPALA's residual network"""
    features: int = 512
    """the width of the layer after each encoder, and of the layer that joins images and vectors"""
    logstd_init: float = 0.0
    """the initial log standard deviation of continuous actions"""


# Settings per environment. Options on the command line take precedence.
# GridWorld: the discount and the entropy bonus of ML-Agents' official settings.
# ATARI: the sizes, learning rate, clip_coef and ent_coef of CleanRL and SB3's zoo. Here rewards are
# normalized, not clipped to their sign. CleanRL also clips the value loss, the zoo anneals clip_coef.
DUMMY = dict(total_timesteps=100_000, learning_rate=1e-3, gamma=0.9)
ATARI = dict(
    total_timesteps=10_000_000, num_steps=128, num_minibatches=4, learning_rate=2.5e-4,
    clip_coef=0.1, ent_coef=0.01,
)  # fmt: skip
PRESETS = {
    "ale_py:ALE/Breakout-v5": ATARI,
    "ale_py:ALE/Pong-v5": ATARI,
    "DummyPixels-v0": DUMMY,
    "DummyPixelsDiscrete-v0": DUMMY,
    "DummyPixelsMultiDiscrete-v0": DUMMY,
    "DummyPixelsDict-v0": DUMMY,
    "GodotRover": dict(
        total_timesteps=100_000, learning_rate=1e-3, gamma=0.98, features=256, ent_coef=5e-3,
        player_args=("--camera=48", "--disable-render-loop"),  # it renders only for observations
    ),
    "GridWorld": dict(
        total_timesteps=100_000, num_steps=128, num_minibatches=9, learning_rate=1e-3, gamma=0.9,
        ent_coef=5e-3, features=256,
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
            "features",
            "image_size",
            "frame_stack",
            "action_repeat",
        ),
        from_0=("clip_coef", "ent_coef", "vf_coef", "update_epochs", "num_workers", "min_obs_std"),
        from_0_to_1=("gamma", "gae_lambda"),
        at_most={
            "update_epochs": 10_000,
            "features": 2**16,
            "image_size": 4096,
            "frame_stack": 256,
            "num_workers": 1000,
        },
    )
    for name in ("from_pixels", "grayscale", "num_workers", "image_size", "action_repeat"):
        if getattr(args, name) and engine(args):
            reason = f"a {engine(args)} scene has its own cameras, processes and decision period"
            raise ValueError(f"{runs.option(name)} is for gymnasium envs: {reason}")
    _, smallest = ENCODERS[args.encoder]
    if args.image_size and args.image_size < smallest:
        needed = f"--encoder {args.encoder} needs at least {smallest} x {smallest}"
        raise ValueError(f"--image-size {args.image_size}: {needed}")


def describe(args, envs):
    """Return the spec of a policy on images: sizes of observations and actions, and bounds."""
    spec = describe_seen(args, envs)
    runs.describe_entities(args, envs, supported=False)  # says that they are flattened
    spec["stack"] = frame_stack(args)
    _, smallest = ENCODERS[args.encoder]
    for name, (height, width, _) in spec["images"].items():
        if min(height, width) < smallest:
            needed = f"--encoder {args.encoder} needs at least {smallest} x {smallest}"
            fix = "" if engine(args) else f"; resize it with --image-size {smallest}"
            raise ValueError(f"{name} is {height} x {width}: {needed}{fix}")

    action_space = envs.single_action_space
    if isinstance(action_space, gym.spaces.Box):
        spec["action_dim"] = math.prod(action_space.shape)
        spec["branches"] = []
        return spec | runs.bounds(action_space)
    if not isinstance(action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        supported = "this script supports continuous or discrete actions, not both at once"
        raise ValueError(f"{args.env_id} has actions {action_space}: {supported}")
    sizes = action_space.n if isinstance(action_space, gym.spaces.Discrete) else action_space.nvec
    spec["branches"] = np.ravel(sizes).tolist()
    spec["start"] = np.ravel(action_space.start).tolist()
    spec["action_dim"] = len(spec["branches"])
    return spec


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def nature(channels):
    """Return the convolutions of DQN, as it was published in Nature."""
    conv1 = nn.Conv2d(channels, 32, kernel_size=8, stride=4)
    conv2 = nn.Conv2d(32, 64, kernel_size=4, stride=2)
    conv3 = nn.Conv2d(64, 64, kernel_size=3, stride=1)
    return nn.Sequential(
        layer_init(conv1),
        nn.ReLU(),
        layer_init(conv2),
        nn.ReLU(),
        layer_init(conv3),
        nn.ReLU(),
    )


def simple(channels):
    """Return two convolutions of the sizes that ML-Agents has by default: half the time of nature."""
    conv1 = nn.Conv2d(channels, 16, kernel_size=8, stride=4)
    conv2 = nn.Conv2d(16, 32, kernel_size=4, stride=2)
    return nn.Sequential(layer_init(conv1), nn.ReLU(), layer_init(conv2), nn.ReLU())


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = layer_init(nn.Conv2d(channels, channels, kernel_size=3, padding=1))
        self.conv2 = layer_init(nn.Conv2d(channels, channels, kernel_size=3, padding=1))

    def forward(self, x):
        y = self.conv1(torch.relu(x))
        y = self.conv2(torch.relu(y))
        return x + y


def impala(channels):
    """Return the residual convolutions of IMPALA."""
    layers = []
    for out_channels in (16, 32, 32):
        layers.append(layer_init(nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)))
        layers.append(nn.MaxPool2d(kernel_size=3, stride=2, padding=1))
        layers.append(ResidualBlock(out_channels))
        layers.append(ResidualBlock(out_channels))
        channels = out_channels
    layers.append(nn.ReLU())
    return nn.Sequential(*layers)


# For --encoder: the convolutions, and the smallest height and width that they support
ENCODERS = {"nature": (nature, 36), "simple": (simple, 20), "impala": (impala, 8)}


class Agent(nn.Module):
    """Encoders, actor, critic and the statistics of the vectors.

    `spec` describes the env: images ((height, width, channels) by name), stack (images per
    observation), vector (its size, 0 if there is none), action_dim, and the bounds of continuous
    actions, or branches (the number of choices in each branch of discrete actions) and start (the
    first choice of each branch, usually 0).
    """

    def __init__(self, spec, args):
        super().__init__()
        self.branches = spec["branches"]
        if self.branches:
            self.register_buffer("start", torch.tensor(spec["start"]), persistent=False)
        else:
            self.actor_logstd = nn.Parameter(torch.full((spec["action_dim"],), args.logstd_init))
            # Tensors low and high, not in the state_dict. SB3 differs (11): far bounds were rescaled
            self.bounds = runs.Bounds(spec)

        # An encoder for each camera. The images of a stack are channels
        shapes = []
        for height, width, channels in spec["images"].values():
            shapes.append((spec["stack"] * channels, height, width))
        convolutions, _ = ENCODERS[args.encoder]
        self.encoders = nn.ModuleList([convolutions(channels) for channels, _, _ in shapes])
        for encoder, shape in zip(self.encoders, shapes, strict=True):
            encoder.append(nn.Flatten())
            num_outputs = encoder(torch.zeros(1, *shape)).shape[1]
            encoder.append(layer_init(nn.Linear(num_outputs, args.features)))
            encoder.append(nn.ReLU())

        # A layer that joins the images and the vector
        self.has_vector = spec["vector"] > 0
        self.obs_rms = nn.Identity()
        if args.norm_obs and self.has_vector:
            self.obs_rms = Normalizer(spec["vector"], min_std=args.min_obs_std)  # SB3 differs (10)
        self.trunk = nn.Identity()
        if len(self.encoders) > 1 or self.has_vector:  # SB3 differs (9)
            num_inputs = len(self.encoders) * args.features + spec["vector"]
            self.trunk = nn.Sequential(layer_init(nn.Linear(num_inputs, args.features)), nn.ReLU())

        # One output per choice of each branch, or the mean of each continuous action
        num_outputs = sum(self.branches) or spec["action_dim"]
        self.actor = layer_init(nn.Linear(args.features, num_outputs), std=0.01)
        self.critic = layer_init(nn.Linear(args.features, 1), std=1.0)

    def encode(self, images, vector):
        """Return the features of the observations.

        `images` is a list with a tensor (batch, channels, height, width) for each camera, with
        values from 0 to 255. An exported model gets values from 0 to 1 and multiplies them by 255
        first, so the division belongs here.
        """
        features = []
        for encoder, image in zip(self.encoders, images, strict=True):
            features.append(encoder(image / 255))
        if self.has_vector:
            features.append(self.obs_rms(vector))
        return self.trunk(torch.cat(features, 1))

    def get_value(self, images, vector):
        return self.critic(self.encode(images, vector)).flatten()

    def get_action_and_value(self, images, vector, mask, action=None, deterministic=False):
        """Return actions, their log-probs, the entropy of the policy and the values of the
        observations.

        Actions are sampled unless they are given. Acting, learning, evaluation and export all use
        this method. `mask` is for discrete actions.
        """
        x = self.encode(images, vector)
        if self.branches:
            action, logprob, entropy = self.get_discrete_action(x, mask, action, deterministic)
        else:
            action, logprob, entropy = self.get_continuous_action(x, action, deterministic)
        return action, logprob, entropy, self.critic(x).flatten()

    def get_continuous_action(self, x, action, deterministic):
        action_mean = self.actor(x)
        action_std = self.actor_logstd.exp()
        if action is None and deterministic:
            action = action_mean
        elif action is None:
            action = action_mean + action_std * torch.randn_like(action_mean)

        # Log-density and entropy of a normal distribution, summed over the action's dimensions
        z = (action - action_mean) / action_std
        logprob = (-0.5 * z**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)
        entropy = (self.actor_logstd + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        return action, logprob, entropy.expand_as(logprob)

    def get_discrete_action(self, x, mask, action, deterministic):
        logits = self.actor(x) + (mask.float() - 1.0) * 1e8  # mask: 0 where a choice is not allowed
        choice_logprobs = [branch.log_softmax(1) for branch in logits.split(self.branches, 1)]
        if action is None and deterministic:
            action = torch.cat([logp.argmax(1, True) for logp in choice_logprobs], 1)
        elif action is None:
            action = torch.cat([torch.multinomial(logp.exp(), 1) for logp in choice_logprobs], 1)

        # Log-prob and entropy of categorical distributions, summed over the branches
        chosen = [logp.gather(1, action[:, i : i + 1]) for i, logp in enumerate(choice_logprobs)]
        logprob = torch.cat(chosen, 1).sum(1)
        entropy = -sum((logp.exp() * logp).sum(1) for logp in choice_logprobs)
        return action, logprob, entropy

    def act(self, images, vector, mask, deterministic=False):
        """Return the actions to learn from, the same actions for the env (continuous ones within
        its bounds, discrete ones as it counts them), their log-probs and the values."""
        action, logprob, _, value = self.get_action_and_value(
            images, vector, mask, deterministic=deterministic
        )
        if self.branches:
            return action, action + self.start, logprob, value
        env_action = action.clamp(self.bounds.low, self.bounds.high)
        return action, env_action, logprob, value


def get_vectors_and_masks(obs, infos, slots, spec):
    """Return the vectors and the action masks of `slots`.

    Vectors are empty in an env without any, masks in one with continuous actions. Without masks
    from the env, every discrete action is allowed.
    """
    vectors = np.zeros((len(slots), 0), np.float32)
    if "vector" in obs:
        vectors = obs["vector"][slots]
    masks = np.ones((len(slots), sum(spec["branches"])), bool)
    if "action_mask" in infos:
        masks = infos["action_mask"][slots]
    return vectors, masks


class Rollout:
    """Completed decisions of all agents, one row each, in the order in which their rewards arrived.

        row  slots  stacks     actions  rewards  next_stacks  terminated  truncated
        0    0      [0, 0, 0]  a0       1.0      [0, 0, 2]    False       False
        1    1      [1, 1, 1]  a1       0.5      [1, 1, 4]    False       True
        2    0      [0, 0, 2]  a2       0.7      [0, 2, 5]    False       False
        ...
        pending_stacks[0] = [0, 2, 5], pending_actions[0] = a5

    A slot is an agent's place in the vector env. Row 1 ends at a time limit: image 4 is the final
    observation of its episode. Row 2 is the next decision of slot 0 after row 0. The decision on
    [0, 2, 5] is pending: it becomes a row when its reward arrives, so every row is complete. Rows
    beyond the batch size wait for the next batch.

    `frames` has the images.
    """

    # A new column needs its name here and its array in __init__. add() fills it; what is known when
    # the agent acts waits in a pending_ array that decide() fills. For the loss it also needs a field
    # in Batch, which is rollout.NAME[order][used] in make_batch()
    COLUMNS = (
        "slots",
        "stacks",
        "vectors",
        "masks",
        "actions",
        "logprobs",
        "values",
        "stale",
        "rewards",
        "next_stacks",
        "next_vectors",
        "terminated",
        "truncated",
        "discounted_returns",
    )

    def __init__(self, capacity, frames, spec):
        num_slots, stack_size = frames.last.shape
        num_choices = sum(spec["branches"])
        action_dtype = int if spec["branches"] else np.float32
        self.frames = frames
        self.size = 0
        self.slots = np.zeros(capacity, int)
        self.stacks = np.zeros((capacity, stack_size), int)
        self.vectors = np.zeros((capacity, spec["vector"]), np.float32)
        self.masks = np.zeros((capacity, num_choices), bool)
        self.actions = np.zeros((capacity, spec["action_dim"]), action_dtype)
        self.logprobs = np.zeros(capacity, np.float32)
        self.values = np.zeros(capacity, np.float32)
        self.stale = np.zeros(capacity, bool)  # logprobs and values are from before the last update
        self.rewards = np.zeros(capacity)
        self.next_stacks = np.zeros((capacity, stack_size), int)
        self.next_vectors = np.zeros((capacity, spec["vector"]), np.float32)
        self.terminated = np.zeros(capacity, bool)
        self.truncated = np.zeros(capacity, bool)
        self.discounted_returns = np.zeros(capacity)  # of the episode so far, to normalize rewards
        self.pending_stacks = np.zeros((num_slots, stack_size), int)
        self.pending_vectors = np.zeros((num_slots, spec["vector"]), np.float32)
        self.pending_masks = np.zeros((num_slots, num_choices), bool)
        self.pending_actions = np.zeros((num_slots, spec["action_dim"]), action_dtype)
        self.pending_logprobs = np.zeros(num_slots, np.float32)
        self.pending_values = np.zeros(num_slots, np.float32)
        self.pending_stale = np.zeros(num_slots, bool)
        self.running_returns = np.zeros(num_slots)  # the last discounted return of each slot

    def decide(self, slots, stacks, vectors, masks, actions, logprobs, values):
        """Remember the decisions of these slots until their rewards arrive."""
        self.pending_stacks[slots] = stacks
        self.pending_vectors[slots] = vectors
        self.pending_masks[slots] = masks
        self.pending_actions[slots] = actions
        self.pending_logprobs[slots] = logprobs
        self.pending_values[slots] = values
        self.pending_stale[slots] = False

    def add(self, slots, reward, terminated, truncated, next_obs, infos, gamma):
        """Store the pending decisions of `slots`, whose rewards have arrived.

        reward, terminated, truncated and next_obs are what envs.step() returned. The images of
        next_obs are in `frames` already.
        """
        rows = slice(self.size, self.size + len(slots))
        self.slots[rows] = slots
        self.stacks[rows] = self.pending_stacks[slots]
        self.vectors[rows] = self.pending_vectors[slots]
        self.masks[rows] = self.pending_masks[slots]
        self.actions[rows] = self.pending_actions[slots]
        self.logprobs[rows] = self.pending_logprobs[slots]
        self.values[rows] = self.pending_values[slots]
        self.stale[rows] = self.pending_stale[slots]
        self.rewards[rows] = reward[slots]
        self.next_stacks[rows] = self.frames.last[slots]
        if "vector" in next_obs:
            self.next_vectors[rows] = next_obs["vector"][slots]
        self.terminated[rows] = terminated[slots]
        self.truncated[rows] = truncated[slots]
        self.running_returns[slots] = gamma * self.running_returns[slots] + reward[slots]
        self.discounted_returns[rows] = self.running_returns[slots]
        self.size += len(slots)

        # The env resets itself: after an end next_obs is of the next episode, and infos has the
        # final observation
        if "final_obs" in infos:
            done = terminated | truncated
            for row, slot in enumerate(slots, rows.start):
                if done[slot]:
                    final_obs = infos["final_obs"][slot]
                    self.next_stacks[row] = self.frames.add_final(self.stacks[row], final_obs)
                    if "vector" in final_obs:
                        self.next_vectors[row] = final_obs["vector"]
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
        self.frames.new_episode[slots] = True

    def remove(self, num_rows):
        """Remove the first rows, which have been learned from, and the images that only they have.

        The weights have changed: the log-probs and values of what remains are stale.
        """
        for name in self.COLUMNS:
            column = getattr(self, name)
            column[: self.size - num_rows] = column[num_rows : self.size]
        self.size -= num_rows
        self.stale[: self.size] = True
        self.pending_stale[:] = True

        # A slot with a pending decision gets its next image with the reward: until then the stack
        # of the decision is its last stack
        used = np.concatenate([self.stacks[: self.size], self.next_stacks[: self.size]])
        renumbered = self.frames.keep(used)
        self.stacks[: self.size] = renumbered[: self.size]
        self.next_stacks[: self.size] = renumbered[self.size :]
        self.pending_stacks[:] = self.frames.last


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
    stacks: torch.Tensor
    vectors: torch.Tensor
    masks: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    # PPO does not need these columns. They are here for custom losses
    next_stacks: torch.Tensor
    next_vectors: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor


@torch.no_grad()
def make_batch(agent, rollout, all_images, batch_size, reward_scale, args):
    """Return the first `batch_size` rows of the rollout, sorted by agent, with their advantages.

    `all_images` is what Frames.images() returns.
    """
    # Log-probs and values were computed when acting. Where that was before the last update (pending
    # decisions, and rows beyond the last batch) they are computed again with the current weights
    agent.eval()  # as fast.Acting does: no dropout
    stale = np.flatnonzero(rollout.stale[: rollout.size])
    if len(stale):
        _, logprobs, _, values = agent.get_action_and_value(
            stacked(all_images, torch.as_tensor(rollout.stacks[stale], device=args.device)),
            torch.as_tensor(rollout.vectors[stale], device=args.device),
            torch.as_tensor(rollout.masks[stale], device=args.device),
            torch.as_tensor(rollout.actions[stale], device=args.device),
        )
        rollout.logprobs[stale] = logprobs.cpu()
        rollout.values[stale] = values.cpu()

    # The sort by slot is stable, so the rows of each agent stay in the order of time
    order = np.argsort(rollout.slots[: rollout.size], kind="stable")
    slots = rollout.slots[order]
    stacks = torch.as_tensor(rollout.stacks[order], device=args.device)
    vectors = torch.as_tensor(rollout.vectors[order], device=args.device)
    masks = torch.as_tensor(rollout.masks[order], device=args.device)
    actions = torch.as_tensor(rollout.actions[order], device=args.device)
    logprobs = torch.as_tensor(rollout.logprobs[order], device=args.device)
    values = torch.as_tensor(rollout.values[order], device=args.device)
    rewards = rollout.rewards[order]
    next_stacks = torch.as_tensor(rollout.next_stacks[order], device=args.device)
    next_vectors = torch.as_tensor(rollout.next_vectors[order], device=args.device)
    terminated = rollout.terminated[order]
    truncated = rollout.truncated[order]
    if args.norm_reward:
        rewards = np.clip(rewards * reward_scale, -10, 10)
    # Other terms of the reward belong here: the scale is computed from the rewards of the env

    advantages = compute_advantages(
        agent,
        slots,
        rewards,
        values,
        all_images,
        next_stacks,
        next_vectors,
        terminated,
        truncated,
        args,
    )
    agent.train()

    # Learn from the first batch_size rows that arrived; later rows only gave next values. np.resize
    # repeats rows on a slow rank of a distributed run that has fewer
    used = np.resize(np.flatnonzero(order < batch_size), batch_size)
    return Batch(
        stacks=stacks[used],
        vectors=vectors[used],
        masks=masks[used],
        actions=actions[used],
        logprobs=logprobs[used],
        advantages=advantages[used],
        returns=advantages[used] + values[used],
        values=values[used],
        next_stacks=next_stacks[used],
        next_vectors=next_vectors[used],
        terminated=torch.as_tensor(terminated[used], device=args.device),
        truncated=torch.as_tensor(truncated[used], device=args.device),
    )


def compute_advantages(
    agent,
    slots,
    rewards,
    values,
    all_images,
    next_stacks,
    next_vectors,
    terminated,
    truncated,
    args,
):
    """Return the advantages of rows that are sorted by agent: SB3 differs (8)."""
    is_last = np.append(slots[1:] != slots[:-1], True)
    continues = ~(is_last | terminated | truncated)

    # The next value is that of the next row, of the next observation where no row follows, or 0
    # after a termination
    values = values.double().cpu().numpy()
    next_values = np.append(values[1:], 0.0)
    bootstraps = np.flatnonzero(~continues & ~terminated)  # CleanRL differs (5)
    next_images = stacked(all_images, next_stacks[bootstraps])
    next_values[bootstraps] = agent.get_value(next_images, next_vectors[bootstraps]).cpu()
    next_values[terminated] = 0.0

    # Lists, because Python reads single numbers from them faster than from arrays
    columns = [column.tolist() for column in (rewards, values, next_values, continues)]
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    return torch.tensor(advantages, dtype=torch.float32, device=args.device)


def ppo_loss(agent, images, mb, args):
    """Return the loss of a minibatch and the metrics to log. `images` are those of mb.stacks."""
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(
        images, mb.vectors, mb.masks, mb.actions
    )
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


def update(agent, optimizer, images, mb, grad_weight, args):
    """Make one optimizer step on a minibatch, and return the metrics of this rank.

    images: the images of mb.stacks
    grad_weight: the weight of this rank's gradients in a distributed run
    """
    optimizer.zero_grad()
    loss, metrics = ppo_loss(agent, images, mb, args)
    loss.backward()
    distributed.average_gradients(agent.parameters(), grad_weight)
    # foreach=False: the compiler for CPUs has no fast form of foreach
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=False)
    optimizer.step()
    metrics["losses/grad_norm"] = grad_norm
    # Still tensors: reading numbers would make a GPU wait
    return fast.detach(metrics)


@torch.no_grad()
def approx_kl(agent, images, mb, args):
    """Return the approximate KL divergence on a minibatch, before its update."""
    _, metrics = ppo_loss(agent, images, mb, args)
    return distributed.average(metrics["losses/approx_kl"])


def play(agent, spec, num_envs):
    """Return the function that evaluate.evaluate() needs. It remembers the last images."""
    act = fast.Acting(agent, enabled=False, deterministic=True)
    frames = Frames(spec["images"], spec["stack"], num_envs, 4 * num_envs * (1 + spec["stack"]))

    def get_env_actions(obs, infos, slots, new_episode):
        frames.new_episode[:] = new_episode
        stacks = frames.add(slots, obs)
        images = stacked(frames.images(), stacks)
        frames.keep(stacks)
        vectors, masks = get_vectors_and_masks(obs, infos, slots, spec)
        _, env_actions, _, _ = act(images, vectors, masks)
        return env_actions

    return get_env_actions


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
        optimizer = fast.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        initial_lrs = [group["lr"] for group in optimizer.param_groups]
        return_rms = Normalizer()

        # Frames stores each image once, as uint8 (height, width, channels), and numbers it. A stack
        # is the numbers of the last images of a slot, oldest first
        #   frames.add(slots, obs)      stores the new images of these slots
        #   frames.last[slots]          their current stacks, int (slots, stack size)
        #   frames.images()             a list with all images of each camera, uint8 tensors
        #   stacked(images, stacks)     a list of uint8 tensors (batch, stack size * channels, height,
        #                               width), from 0 to 255: Agent.encode() divides by 255
        # Capacity: an image per row, at most one final image per row, and the current stacks. It
        # grows if necessary
        num_images = 2 * batch_size + num_agents * spec["stack"]
        frames = Frames(spec["images"], spec["stack"], num_agents, num_images)
        rollout = Rollout(batch_size + num_agents, frames, spec)
        action_space = envs.single_action_space
        env_actions = np.zeros((num_agents, *action_space.shape), action_space.dtype)
        flat_actions = env_actions.reshape(num_agents, -1)  # a view with one column per number
        initial_ent_coef = args.ent_coef

        # Acceleration. numpy has no convolutions, so `act` calls agent.act here.
        # run.compile compiles `update`, with fast.Adam or any optimizer of torch.optim, if there is
        # a C++ compiler: by default in runs of at least 5,000 updates, with --compile in any run.
        # Learning rates, float arguments of `update` and float fields of args may change between
        # calls. Other Python values that `update` reads are compiled in: if one changes, a message
        # names it and `update` is no longer compiled (with --compile it is an error).
        # --no-fast switches it off. The results are the same up to rounding if only actions are
        # random. Dropout, for example, draws other random numbers when it is compiled.
        act = fast.Acting(agent, enabled=False)
        num_updates = num_iterations * args.update_epochs * args.num_minibatches
        compiled_update = run.compile(update, num_updates)
        # Freed activations, up to 1 GiB each and 2 GiB in total, stay allocated for the next update
        fast.keep_freed_memory(threshold=2**30, trim=2**31 - 1)

        # Start or resume. Checkpoints have the agent and `keep`, and `episodes` where the envs can
        # be restored
        next_obs, infos = run.start(
            agent,
            spec,
            total_timesteps,
            keep={"optimizer": optimizer, "return_rms": return_rms},
            episodes={"running_returns": rollout.running_returns, "frames": frames},
            play=play,  # for videos: the policy with its stacks of images
            description=f"{num_iterations} iterations of {batch_size}, minibatches of {minibatch_size}",
        )

        # Agents decide at their own pace. infos has these flags for each slot:
        #   ready      it requests an action now: its rows of next_obs and action_mask are new
        #   closed     the reward of its pending action has arrived. An agent that is new or was
        #              restarted is ready but not closed
        #   restarted  its game crashed and was started again: its pending action gets no reward
        # With gymnasium envs every slot is ready and closed in every step (EnvPool: except resets)
        ready = infos["ready"].nonzero()[0]
        if frames.size == 0:  # otherwise a checkpoint has restored the images of running episodes
            frames.add(ready, next_obs)

        # Iterations 0, 1, ... until total_timesteps, or until a stop is requested (Ctrl+C, SIGTERM).
        # run.log ends an iteration: checkpoints and videos are written then if they are due
        for iteration in run.iterations():
            # Annealing: SB3 differs (4)
            remaining = 1 - run.global_step / total_timesteps
            if args.anneal_lr:
                for group, initial_lr in zip(optimizer.param_groups, initial_lrs, strict=True):
                    group["lr"] = initial_lr * remaining
            if args.anneal_ent:
                args.ent_coef = initial_ent_coef * remaining

            # Collect a rollout, with several threads unless workers or games need the cores
            envs_in_this_process = getattr(envs, "num_workers", None) == 0
            torch.set_num_threads(fast.THREADS if envs_in_this_process else 1)
            agent.eval()  # or else fast.Acting would change the mode at every step
            # Until rollout.size >= batch_size; with --rollout-share, until enough other ranks have it
            while not run.has_enough(rollout.size, batch_size):
                # Act for the agents that request an action
                stacks = frames.last[ready]
                vectors, masks = get_vectors_and_masks(next_obs, infos, ready, spec)
                images = stacked(frames.images(), stacks)
                actions, flat_actions[ready], logprobs, values = act(images, vectors, masks)
                rollout.decide(ready, stacks, vectors, masks, actions, logprobs, values)
                run.spent("act")  # logs the time since the last record() or spent() as time/act

                # Step. The env ignores the actions of slots that are not ready
                next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                run.record(reward, terminated, truncated, infos)  # counts decisions, episodes, time

                # Store the new images, and the decisions whose reward has arrived
                if "restarted" in infos:
                    rollout.cut(infos["restarted"].nonzero()[0])
                frames.new_episode |= terminated | truncated
                ready = infos["ready"].nonzero()[0]
                frames.add(ready, next_obs)
                closed = infos["closed"].nonzero()[0]
                rollout.add(closed, reward, terminated, truncated, next_obs, infos, args.gamma)
            run.spent("act")  # storing the last step

            # Advantages
            torch.set_num_threads(
                fast.THREADS
            )  # the fastest number, measured when it is first used
            num_rows = min(rollout.size, batch_size)  # fewer only on a slow rank
            all_images = frames.images(args.device)
            reward_scale = return_rms.scale.item()  # 1 / std of the returns of earlier iterations
            batch = make_batch(agent, rollout, all_images, batch_size, reward_scale, args)

            # Optimize the policy and the value function
            metrics = []
            stop = False
            for epoch in range(args.update_epochs):
                # CleanRL differs (6)
                b_inds = torch.as_tensor(np.random.permutation(batch_size), device=args.device)
                for mb_inds in b_inds.split(minibatch_size):
                    # Not part of the compiled update, because the number of all images changes. An
                    # augmentation of mb_images, which are uint8, belongs below approx_kl
                    mb = Batch(*(column[mb_inds] for column in batch))
                    mb_images = stacked(all_images, mb.stacks)
                    if args.target_kl is not None:  # CleanRL differs (7)
                        stop = approx_kl(agent, mb_images, mb, args) > 1.5 * args.target_kl
                    if stop:
                        break
                    mb_metrics = compiled_update(
                        agent, optimizer, mb_images, mb, float(num_rows), args
                    )
                    metrics.append(mb_metrics)
                if stop:
                    break

            # Update the statistics of vectors and returns: SB3 and CleanRL differ (1)
            if args.norm_obs and spec["vector"]:
                b_vectors = torch.as_tensor(rollout.vectors[:num_rows], device=args.device)
                agent.obs_rms.update(b_vectors)
            return_rms.update(torch.as_tensor(rollout.discounted_returns[:num_rows]))
            rollout.remove(num_rows)  # numbers the images again: `batch` has the old numbers
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
        play=play,  # for --evaluate
        free=["num_workers"],  # options that may differ when a run is resumed
    )


if __name__ == "__main__":
    main()
