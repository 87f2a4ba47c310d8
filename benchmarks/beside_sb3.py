"""Run a script and SB3's algorithm with the same weights, seeds and settings, and compare them.

    python benchmarks/beside_sb3.py ppo_continuous_multiagent.py --env-id HalfCheetah-v5
    python benchmarks/beside_sb3.py my_ppo.py --env-id Hopper-v5 --iterations 3    a changed copy
    python benchmarks/beside_sb3.py sac_continuous.py --env-id Pendulum-v1 --html page.html

All other options are passed on to the script. The installed stable_baselines3 runs first, then the
script with SB3's initial weights and random numbers. The table has the largest difference of each
quantity in each iteration; for SAC, an iteration is 100 steps. A star marks differences above
--tolerance, which is absolute for numbers below 1 and relative for larger ones. Up to 1 % of the
weights may exceed it: where a gradient is 0 except for rounding, Adam still makes a whole step.

--html writes the table and the source code of both sides to a page, section by section.

Differences that the scripts list by number are translated: SB3's vf_coef is half of ours, and so is
its value loss in the table. Its learning rate is annealed like ours, over these iterations. Its
VecNormalize updates its statistics between iterations only. SAC starts to learn after 100 steps,
unless --learning-starts is given. As long as the actions agree, the script's envs receive SB3's
actions: a chaotic env would amplify a difference in the last digit.

Rounding alone makes two runs differ at some point. To find out when, SB3 runs a second time, with
initial weights that differ by a tenth of the tolerance.
"""

import argparse
import contextlib
import html
import importlib.metadata
import importlib.util
import inspect
import io
import keyword
import math
import operator
import pydoc
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs import make, pixels  # noqa: E402
from onefile_rl import fast, runs  # noqa: E402
from onefile_rl.engines.scenes import engine  # noqa: E402

BLOCK = 100  # steps of SAC per row of the table

# The quantities in the order in which they are computed, and where to look if one of them is the
# first that differs.
PPO = {
    "observations": "the envs, their seeds, the actions sent to them, or the normalization of "
    "observations",
    "actions": "the network of the policy, its std, or its random numbers",
    "log-probs": "the log-probs in get_action_and_value()",
    "values": "the network of the critic",
    "rewards": "the scaling or clipping of rewards, or the actions sent to the env",
    "advantages": "gae(), or compute_advantages()",
    "returns": "the returns in make_batch()",
    "policy loss": "the surrogate objective in ppo_loss(), or the normalization of advantages",
    "value loss": "the value loss in ppo_loss()",
    "entropy": "the entropy in get_action_and_value()",
    "gradient norm": "the sum of the losses in ppo_loss(), or a term that SB3 does not have",
    "weights": "gradient clipping, the optimizer, or the learning rate in update()",
}
SAC = {
    "observations": "the envs or their seeds",
    "actions": "the network of the policy, its std, or its random numbers",
    "rewards": "the env, or a wrapper around it",
    "critic loss": "the target or the loss in update_critics(), the sampled transitions, or the "
    "update before",
    "temperature": "the temperature in update_actor(), or its initial value",
    "actor loss": "the loss in update_actor(), or the update of the Q networks just before",
    "weights": "the optimizers, or the update of the target networks",
}
METRICS = {  # quantities that the scripts log, by their names in the scripts
    "policy loss": "losses/policy_loss",
    "value loss": "losses/value_loss",
    "entropy": "losses/entropy",
    "gradient norm": "losses/grad_norm",
    "critic loss": "losses/qf_loss",
    "actor loss": "losses/actor_loss",
    "temperature": "losses/alpha",
}


class Trace:
    """The quantities of one run.

    rows: for each iteration a dict from the name of a quantity to (times, values). A time is the
        step within the iteration at which a value was computed. Times above `num_steps` count the
        updates after a rollout.
    weights: the weights after each iteration, by name
    """

    def __init__(self, num_iterations, num_steps):
        self.rows = [{} for _ in range(num_iterations)]
        self.weights = []
        self.num_steps = num_steps
        self.steps = 0
        self.updates = 0

    def add(self, name, values, times=None):
        """Add the values with these times, or one value with the time of the last step."""
        iteration, now = divmod(self.steps - 1, self.num_steps)
        if iteration >= len(self.rows):  # a changed copy may make more steps
            return
        all_times, all_values = self.rows[iteration].setdefault(name, ([], []))
        all_times.extend([now] if times is None else times)
        all_values.extend([values] if times is None else values)

    def add_rollout(self, columns):
        """Add arrays (time, env, ...) of a rollout of PPO, by name."""
        for name, column in columns.items():
            times = range(len(column))
            if name in ("advantages", "returns"):  # computed after the rollout
                times = [self.num_steps] * len(column)
            self.add(name, column, times)
        self.updates = 0

    def add_update(self, metrics, kind):
        """Add the metrics of an update: after the rollout for PPO, after a step for SAC."""
        self.updates += 1
        now = self.num_steps + self.updates
        if kind == "SAC":
            now = (self.steps - 1) % self.num_steps + 0.5
        for name, x in metrics.items():
            self.add(name, [x.item()], [now])


# SB3


def make_image_env(args):
    """Return an env with the stacked images of ppo_pixel.py as one image.

    SB3's VecFrameStack can't be used: it starts an episode with black images.
    """
    names = ("from_pixels", "image_size", "grayscale", "action_repeat", "env_kwargs")
    env = pixels.make_pixel_env(args.env_id, **{name: getattr(args, name) for name in names})
    (name, space), *others = env.observation_space.spaces.items()
    if others or name == "vector":
        spaces = ", ".join(env.observation_space.spaces)
        raise ValueError(f"{args.env_id} has {spaces}: SB3's CnnPolicy supports one image only")
    env = gym.wrappers.TransformObservation(env, lambda obs: obs[name], space)

    # Images of a stack become channels
    stack_size = args.frame_stack or (3 if args.from_pixels else 1)
    env = gym.wrappers.FrameStackObservation(env, stack_size)
    low = np.concatenate(list(env.observation_space.low), -1)
    high = np.concatenate(list(env.observation_space.high), -1)
    space = gym.spaces.Box(low, high, dtype=np.uint8)
    return gym.wrappers.TransformObservation(env, lambda obs: np.concatenate(list(obs), -1), space)


def find_activation(name):
    """Return the activation layer of torch with this name, in lower case."""
    layers = {key.lower(): layer for key, layer in vars(nn.modules.activation).items()}
    if name not in layers:
        raise ValueError(f"--activation {name}: torch has no layer of this name for SB3's network")
    return layers[name]


def make_sb3(kind, args):
    """Return SB3's model with the settings of the script."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    def make_env():
        if kind == "pixels":
            return make_image_env(args)
        return make.make_env(args.env_id, **args.env_kwargs)

    envs = make_vec_env(make_env, args.num_envs, seed=args.seed)
    model = make_sb3_sac(envs, args) if kind == "SAC" else make_sb3_ppo(kind, envs, args)
    model.set_logger(configure(None, []))
    return model


def make_sb3_sac(envs, args):
    from stable_baselines3 import SAC

    return SAC(
        "MlpPolicy",
        envs,
        learning_rate=args.learning_rate,
        buffer_size=args.buffer_size,
        learning_starts=args.learning_starts,
        batch_size=args.batch_size,
        tau=args.tau,
        gamma=args.gamma,
        gradient_steps=int(args.updates_per_step),
        ent_coef=f"auto_{args.alpha}" if args.autotune else args.alpha,
        target_entropy="auto" if args.target_entropy is None else args.target_entropy,
        policy_kwargs=dict(
            net_arch=list(args.hidden_sizes), activation_fn=find_activation(args.activation)
        ),
        seed=args.seed,
        device="cpu",
    )


def make_sb3_ppo(kind, envs, args):
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    policy_kwargs = dict(log_std_init=getattr(args, "logstd_init", 0.0))
    if kind == "pixels":
        policy_kwargs["features_extractor_kwargs"] = dict(features_dim=args.features)
    else:
        policy_kwargs["net_arch"] = list(args.hidden_sizes)
        policy_kwargs["activation_fn"] = find_activation(args.activation)

    norm_obs = args.norm_obs and kind == "PPO"
    if norm_obs or args.norm_reward:
        envs = VecNormalize(
            envs,
            training=False,
            norm_obs=norm_obs,
            norm_reward=args.norm_reward,
            gamma=args.gamma,
        )

    # SB3 anneals by the progress after the rollout, we anneal by the progress before it
    batch_size = args.num_steps * args.num_envs
    learning_rate = args.learning_rate
    if args.anneal_lr:
        one_iteration = batch_size / args.total_timesteps
        learning_rate = lambda remaining: args.learning_rate * (remaining + one_iteration)
    return PPO(
        "CnnPolicy" if kind == "pixels" else "MlpPolicy",
        envs,
        learning_rate=learning_rate,
        n_steps=args.num_steps,
        batch_size=batch_size // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=0.5 * args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        target_kl=args.target_kl,
        policy_kwargs=policy_kwargs,
        seed=args.seed,
        device="cpu",
    )


def weights_of(model):
    """Return copies of the weights of SB3's model, by name."""
    state = dict(model.policy.state_dict())
    if getattr(model, "log_ent_coef", None) is not None:
        state["log_ent_coef"] = model.log_ent_coef
    return {name: x.detach().clone() for name, x in state.items()}


def follow_actions(step, trace, reference, tolerance):
    """Return the function `step` with the actions of `reference`, as long as the given actions
    agree with them."""

    def step_with_reference(actions):
        expected = actions
        if trace.steps < len(reference.sent):
            expected = reference.sent[trace.steps]
        agree = expected.shape == actions.shape and np.allclose(
            actions, expected, tolerance, tolerance
        )
        return step(expected.astype(actions.dtype) if agree else actions)

    return step_with_reference


def run_sb3(kind, args, trace, reference=None, tolerance=0.0):
    """Train SB3's model and fill `trace`. Return the names of the algorithm and of its policy.

    `reference` is the trace of another run of SB3. With it, this run starts with slightly different
    weights.
    """
    model = make_sb3(kind, args)
    if reference:
        for weights in model.policy.parameters():
            weights.data.mul_(1 + tolerance / 10 * torch.randn_like(weights))
        model.env.step = follow_actions(model.env.step, trace, reference, tolerance)
    trace.initial = weights_of(model)
    trace.sent = []  # the actions that the envs received
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    # Losses are local variables of SB3's train(). They are read from its frame when it clips the
    # gradients (PPO) or when it updates the policy (SAC)
    clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    train = model.train

    def traced_clip(*inputs, **kwargs):
        norm = clip_grad_norm_(*inputs, **kwargs)
        variables = sys._getframe(1).f_locals
        metrics = {
            "policy loss": variables["policy_loss"],
            "value loss": 0.5 * variables["value_loss"],
            "entropy": -variables["entropy_loss"],
            "gradient norm": norm,
        }
        trace.add_update(metrics, kind)
        return norm

    def traced_actor_step(*inputs, **kwargs):
        variables = sys._getframe(1).f_locals
        metrics = {
            "critic loss": variables["critic_loss"],
            "actor loss": variables["actor_loss"],
            "temperature": variables["ent_coef"],
        }
        trace.add_update(metrics, kind)
        return actor_step(*inputs, **kwargs)

    def traced_train(*inputs, **kwargs):
        train(*inputs, **kwargs)
        if trace.steps % trace.num_steps == 0:
            trace.weights.append(weights_of(model))

    model.train = traced_train
    if kind == "SAC":
        actor_step = model.actor.optimizer.step
        model.actor.optimizer.step = traced_actor_step
    with mock.patch("torch.nn.utils.clip_grad_norm_", traced_clip):
        callback = make_callback(kind, model, trace)
        model.learn(args.total_timesteps, callback=callback, log_interval=10**9)

    # Iterations of SAC before it learned
    trace.weights[:0] = [trace.initial] * (len(trace.rows) - len(trace.weights))
    return f"{type(model).__name__}, {type(model.policy).__name__}"


def make_callback(kind, model, trace):
    """Return a callback that records the rollouts of SB3's model."""
    from stable_baselines3.common.callbacks import BaseCallback

    normalized = model.get_vec_normalize_env()

    class Record(BaseCallback):
        def _on_rollout_start(self):
            """Update the statistics of VecNormalize here only: difference (1) of the scripts."""
            if normalized is None:
                return
            if trace.steps == 0:
                self.discounted = np.zeros(normalized.num_envs)
                self.now = normalized.get_original_obs()
            else:
                normalized.ret_rms.update(np.concatenate(self.returns))
                if normalized.norm_obs:
                    normalized.obs_rms.update(np.concatenate(self.obs))
                    self.model._last_obs = normalized.normalize_obs(self.now)
            self.obs = []
            self.returns = []

        def _on_step(self):
            trace.steps += 1
            actions = self.locals.get("clipped_actions", self.locals["actions"])
            trace.sent.append(actions.copy())
            # A copy, because PPO adds bootstrap values later
            trace.add("rewards", self.locals["rewards"].copy())
            if kind == "SAC":
                trace.add("observations", self.model._last_obs.copy())
                trace.add("actions", trace.sent[-1])
            if normalized is not None:
                self.obs.append(self.now)
                self.now = normalized.get_original_obs()
                reward = normalized.get_original_reward()
                self.discounted = self.discounted * normalized.gamma + reward
                self.returns.append(self.discounted.copy())
                self.discounted[self.locals["dones"]] = 0
            return True

        def _on_rollout_end(self):
            if kind == "SAC":
                return
            names = {"log-probs": "log_probs"}
            for name in ("observations", "actions", "values", "advantages", "returns"):
                names[name] = name
            buffer = self.model.rollout_buffer
            trace.add_rollout({name: getattr(buffer, x).copy() for name, x in names.items()})

    return Record()


def counterparts(kind, agent, state):
    """Return SB3's weights with the names and the layout of our agent's weights.

    Layers are paired in their order, and the last layers with each other. Other modules between
    them do not matter.
    """
    weights = {}

    def pair(part, *prefixes):
        """Pair the layers of a part of our agent with SB3's layers of these prefixes. SB3's state
        has the last layer last. Return the name of our last layer."""
        module = getattr(agent, part, nn.Identity())
        ours = []
        for name, layer in module.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                ours.append(f"{part}.{name}".strip("."))
        theirs = []
        for name in state:
            if name.startswith(prefixes) and name.endswith(".weight"):
                theirs.append(name.removesuffix(".weight"))
        pairs = list(zip(ours[:-1], theirs[:-1], strict=False))
        pairs += zip(ours[-1:], theirs[-1:], strict=False)
        for our_name, their_name in pairs:
            for end in ("weight", "bias"):
                weights[f"{our_name}.{end}"] = state[f"{their_name}.{end}"]
        return ours[-1] if ours else None

    if "log_std" in state:
        weights["actor_logstd"] = state["log_std"]
    if kind == "PPO":
        actor = "actor_mean" if hasattr(agent, "actor_mean") else "actor"
        pair(actor, "mlp_extractor.policy_net", "action_net")
        pair("critic", "mlp_extractor.value_net", "value_net")
    elif kind == "pixels":
        pair("encoders", "features_extractor")
        pair("actor", "action_net")
        pair("critic", "value_net")
    else:
        if "log_ent_coef" in state:
            weights["log_alpha"] = state["log_ent_coef"]
        # Mean and log std are one layer of our agent
        last = pair("actor", "actor.latent_pi", "actor.mu")
        for end in ("weight", "bias"):
            both = [state[f"actor.mu.{end}"], state[f"actor.log_std.{end}"]]
            weights[f"{last}.{end}"] = torch.cat(both)
        # The weights of our Q networks are stacked
        for part, prefix in {"qf": "critic", "qf_target": "critic_target"}.items():
            num_layers = sum(name.startswith(f"{prefix}.qf0") for name in state) // 2
            for i in range(num_layers):
                layers = [f"{prefix}.qf{k}.{2 * i}" for k in range(2)]
                stacked_weights = [state[f"{layer}.weight"].T for layer in layers]
                stacked_biases = [state[f"{layer}.bias"][None] for layer in layers]
                weights[f"{part}.weights.{i}"] = torch.stack(stacked_weights)
                weights[f"{part}.biases.{i}"] = torch.stack(stacked_biases)
    return weights


def shared(weights, theirs):
    """Return pairs of our weights and SB3's weights with the same name and shape, by name.

    Of three Q networks, the first two are paired with SB3's.
    """
    pairs = {}
    for name, x in theirs.items():
        ours = weights.get(name)
        if ours is None or ours.dim() != x.dim():
            continue
        if ours.shape[1:] == x.shape[1:] and len(ours) >= len(x):
            pairs[name] = (ours[: len(x)], x)
    return pairs


# The script


def run_script(kind, module, args, trace, reference, tolerance):
    """Train with the script and fill `trace`. Return the agent.

    The agent has the initial weights of `reference`, a trace of SB3, and the same random numbers.
    The envs receive the actions of `reference`, as long as the agent's actions agree with them.
    """
    Agent = module.Agent
    make_envs = module.make_envs
    update = module.update
    agents = []

    def make_agent(*inputs, **kwargs):
        agent = Agent(*inputs, **kwargs)
        theirs = counterparts(kind, agent, reference.initial)
        for ours, x in shared(dict(agent.named_parameters()), theirs).values():
            ours.data.copy_(x)
        agents.append(agent)
        torch.manual_seed(args.seed)
        np.random.seed(args.seed)
        return agent

    def keep_weights():
        weights = {name: x.detach().clone() for name, x in agents[0].named_parameters()}
        trace.weights.append(weights)

    def make_traced_envs(*inputs, **kwargs):
        envs, how = make_envs(*inputs, **kwargs)
        step = follow_actions(envs.step, trace, reference, tolerance)
        reset = envs.reset
        now = None

        def traced_reset(*inputs, **kwargs):
            nonlocal now
            now, infos = reset(*inputs, **kwargs)
            return now, infos

        def traced_step(actions):
            nonlocal now
            if trace.steps and trace.steps % trace.num_steps == 0:
                keep_weights()
            actions = actions.copy()
            result = step(actions)
            trace.steps += 1
            if kind == "SAC":
                trace.add("observations", now.copy())
                trace.add("actions", actions)
                trace.add("rewards", result[1].copy())
            now = result[0]
            return result

        envs.reset = traced_reset
        envs.step = traced_step
        return envs, how

    def by_time(rows):
        """Return rows that are sorted by agent as an array (time, agent, ...)."""
        return rows.reshape(args.num_envs, -1, *rows.shape[1:]).swapaxes(0, 1)

    @torch.no_grad()
    def traced_make_batch(agent, rollout, *inputs, **kwargs):
        batch = make_batch(agent, rollout, *inputs, **kwargs)
        if kind == "PPO":
            columns = {"observations": getattr(agent, "obs_rms", nn.Identity())(batch.obs)}
        else:
            all_images = inputs[0]
            columns = {"observations": module.stacked(all_images, batch.stacks)[0]}
        names = {"log-probs": "logprobs"}
        for name in ("actions", "values", "advantages", "returns"):
            names[name] = name
        for name, column in names.items():
            if hasattr(batch, column):
                columns[name] = getattr(batch, column)
        trace.add_rollout({name: by_time(x.cpu().numpy()) for name, x in columns.items()})
        return batch

    def traced_gae(rewards, *inputs, **kwargs):
        trace.add_rollout({"rewards": by_time(np.array(rewards))})
        return gae(rewards, *inputs, **kwargs)

    def traced_update(*inputs, **kwargs):
        metrics = update(*inputs, **kwargs)
        found = {name: metrics[logged] for name, logged in METRICS.items() if logged in metrics}
        trace.add_update(found, kind)
        return metrics

    module.Agent = make_agent
    module.make_envs = make_traced_envs
    module.update = traced_update
    if kind != "SAC":
        gae = module.gae
        make_batch = module.make_batch
        module.gae = traced_gae
        module.make_batch = traced_make_batch
    # EnvPool's envs differ from those that SB3 uses
    with mock.patch.object(make, "is_in_envpool", return_value=False):
        module.train(args)
    keep_weights()
    return agents[0]


# The comparison


def compare(kind, ours, theirs, tolerance, agent=None):
    """Return the differences of two traces, a dict by quantity for each iteration: see `differ`.

    `agent` is the agent of the script. If it is None, both traces are SB3's.
    """
    rows = []
    iterations = zip(ours.rows, theirs.rows, ours.weights, theirs.weights, strict=False)
    for our_row, their_row, our_weights, their_weights in iterations:
        row = {}
        for name in SAC if kind == "SAC" else PPO:
            if name in our_row and name in their_row:
                row[name] = differ(*our_row[name], *their_row[name], tolerance)
        if agent:
            their_weights = counterparts(kind, agent, their_weights)
        pairs = shared(our_weights, their_weights).values()
        if pairs:
            our_vector = torch.cat([pair[0].flatten() for pair in pairs])[None]
            their_vector = torch.cat([pair[1].flatten() for pair in pairs])[None]
            row["weights"] = differ(
                [math.inf], our_vector, [math.inf], their_vector, tolerance, allowed=0.01
            )
        rows.append(row)
    return rows


def differ(times, ours, their_times, theirs, tolerance, allowed=0.0):
    """Return the largest difference and the place where the values first differ too much.

    A place is (time, our value, SB3's value, how many numbers differ too much). It is None if at
    most the share `allowed` of the numbers differs too much.
    """
    num_ours = len(ours)
    num_theirs = len(theirs)
    count = min(num_ours, num_theirs)
    ours = np.array([np.ravel(x) for x in ours[:count]], np.float32)
    theirs = np.array([np.ravel(x) for x in theirs[:count]], np.float32)
    if ours.shape != theirs.shape:
        return math.inf, (times[0], f"{ours.shape[1:]} numbers", f"{theirs.shape[1:]}", "")

    difference = np.nan_to_num(abs(ours - theirs), nan=math.inf)
    too_large = difference > tolerance * np.maximum(1, abs(theirs))
    if too_large.mean() > allowed:
        row = too_large.any(1).argmax()
        column = (difference[row] * too_large[row]).argmax()
        share = f"{too_large.sum():,} of {too_large.size:,} numbers of the iteration differ"
        our_number = f"{ours[row, column]:.6g}"
        their_number = f"{theirs[row, column]:.6g}"
        return difference.max(), (times[row], our_number, their_number, share)
    if num_ours != num_theirs:
        longer = max(times, their_times, key=len)
        return math.inf, (longer[count], f"{num_ours} of them", f"{num_theirs}", "")
    return difference.max(), None


def cell(largest, place):
    """Return the text of a cell of the table."""
    if largest is None:
        text = "-"
    elif largest == math.inf:
        text = "other"
    else:
        text = f"{largest:.1e}" if largest else "0"
    return f"{text:>8}{'*' if place else ' '}"


def table(rows, names):
    """Return the table as text. The names of the quantities fill two lines."""
    hyphenated = {
        "observations": "obser- vations",
        "advantages": "advan- tages",
        "temperature": "temper- ature",
    }
    first_line = " " * 10
    second_line = "iteration "
    for name in names:
        *first, second = hyphenated.get(name, name.replace("-", "- ")).split(" ")
        first_line += f"{first[0] if first else '':>8} "
        second_line += f"{second:>8} "
    lines = [first_line, second_line]
    for i, row in enumerate(rows):
        cells = [cell(*row.get(name, (None, None))) for name in names]
        lines.append(f"{i + 1:>9} " + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def first_difference(rows):
    """Return iteration, time and quantity of the first difference, or None.

    If several quantities differ at one time, it is the one that is computed first.
    """
    for i, row in enumerate(rows):
        places = []
        for order, (name, (_, place)) in enumerate(row.items()):
            if place:
                places.append((place[0], order, name))
        if places:
            time, _, name = min(places)
            return i, time, name
    return None


def verdict(rows, rounding, hints, num_steps, tolerance):
    """Return the conclusion as text.

    `rounding` has the differences of two runs of SB3 that start with slightly different weights.
    After these runs differ, a difference of the script means nothing.
    """

    def where(i, time):
        if time in (num_steps, math.inf):
            return f"iteration {i + 1}"
        if time < num_steps:
            return f"iteration {i + 1}, step {int(time) + 1}"
        return f"iteration {i + 1}, update {time - num_steps}"

    first = first_difference(rows)
    if first is None:
        return f"All quantities agree to {tolerance:g}, in all {len(rows)} iteration(s)."
    i, time, name = first

    limit = first_difference(rounding)
    if limit and limit[:2] <= first[:2]:
        limit_i, limit_time, limit_name = limit
        return (
            f"All quantities agree to {tolerance:g} until rounding errors grow: {name} differ "
            f"in {where(i, time)}.\n"
            f"Two runs of SB3 whose weights differ by {tolerance / 10:g} differ no later: "
            f"{limit_name} in {where(limit_i, limit_time)}.\n"
            "The table can't show a change after that. With a smaller --learning-rate rounding "
            "errors grow more slowly."
        )

    _, ours, theirs, share = rows[i][name][1]
    numbers = f"ours {ours}, SB3's {theirs}" + (f" ({share})" if share else "")
    hint = hints[name]
    if ours.endswith("of them"):
        hint = "the number of updates: epochs, minibatches, a stop by target_kl"
    text = f"First difference: {name}, in {where(i, time)}: {numbers}.\n"
    text += f"All quantities before it agree to {tolerance:g}, and rounding does not explain it. "
    text += f"Look at: {hint}."
    if num_steps + 1 < time < math.inf and not ours.endswith("of them"):
        text += "\nOr at the update before: the optimizer, the learning rate, gradient clipping."
    return text


# The page

# Each section has names of the script, then lines of SB3: a class and its methods, or a function
# with the lines at which its excerpt begins and ends.
PPO_PAGE = """
## Networks: layer_init mlp nature simple impala ResidualBlock Agent
common.torch_layers.MlpExtractor __init__
common.policies.ActorCriticPolicy _build forward evaluate_actions
## Normalization: Normalizer
common.running_mean_std.RunningMeanStd update_from_moments
common.vec_env.vec_normalize.VecNormalize step_wait _update_reward _normalize_obs
## Rollout: Frames stacked Rollout
common.on_policy_algorithm.OnPolicyAlgorithm collect_rollouts
## Advantages: gae Batch make_batch compute_advantages
common.buffers.RolloutBuffer compute_returns_and_advantage get
## Loss: ppo_loss
ppo.ppo.PPO.train | values, log_prob, entropy = | # Calculate approximate form
## Update: update approx_kl fast.Adam
ppo.ppo.PPO.train | # Calculate approximate form | self._n_updates
## Training loop: train
common.on_policy_algorithm.OnPolicyAlgorithm learn
ppo.ppo.PPO.train | def train | values, log_prob, entropy =
common.base_class.BaseAlgorithm _update_learning_rate
"""
SAC_PAGE = """
## Networks: mlp SoftQNetworks Agent
sac.policies.Actor get_action_dist_params action_log_prob
common.distributions.SquashedDiagGaussianDistribution log_prob
common.policies.ContinuousCritic __init__ forward
## Replay buffer: Batch ReplayBuffer
common.buffers.ReplayBuffer add sample _get_samples
## Update of the Q networks: update_critics
sac.sac.SAC.train | with th.no_grad(): | # Compute actor loss
common.utils polyak_update
## Update of policy and temperature: update_actor update fast.Adam
sac.sac.SAC.train | # Action by the current actor | ent_coefs.append
sac.sac.SAC.train | # Compute actor loss | self._n_updates
## Training loop: train
common.off_policy_algorithm.OffPolicyAlgorithm learn collect_rollouts _sample_action
"""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1700px; padding: 0 2em }
body { color: #222 }
pre { margin: 0; font: 12px/1.45 ui-monospace, monospace }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
pre.table { white-space: pre; overflow-x: auto }
h2 { margin: 2em 0 .3em; border-top: 1px solid #ccc; padding-top: 1em }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2em } .two > div { min-width: 0 }
.code { background: #f7f7f5; border: 1px solid #ddd; padding: .6em .8em; margin: .2em 0 .8em }
.where { color: #777; font-size: 13px } i { color: #777; font-style: normal }
u { background: #ffe98a; text-decoration: none } b { color: #0550ae; font-weight: normal }
"""


def excerpt(thing, first="", last=None):
    """Return the source of a function or class as HTML, or its lines from the one that contains
    `first` to the one before that which contains `last`."""
    lines, number = inspect.getsourcelines(thing)
    begin = next((i for i, line in enumerate(lines) if first in line), 0)
    end = len(lines)
    if last:
        end = next((i for i in range(begin + 1, end) if last in lines[i]), end)
    code = html.escape(textwrap.dedent("".join(lines[begin:end]).rstrip()), quote=False)

    # Comments and docstrings grey, keywords blue, references to differences yellow
    def highlight(match):
        return f"<i>{match[1]}</i>" if match[1] else f"<b>{match[0]}</b>"

    keywords = "|".join(keyword.kwlist)
    code = re.sub(rf'(#[^\n]*|"""[\s\S]*?""")|\b(?:{keywords})\b', highlight, code)
    differs = r"((?:SB3|CleanRL|SB3 and CleanRL) differs? \([\d, ]+\))"
    code = re.sub(differs, r"<u>\1</u>", code)
    file = Path(inspect.getsourcefile(inspect.unwrap(thing))).name
    where = f"{thing.__qualname__} in {file}, line {number + begin}"
    return f"<div class=where>{where}</div><div class=code><pre>{code}</pre></div>"


def our_excerpts(module, names):
    """Return the sources of these names of the script. Names that it does not have are omitted."""
    out = ""
    for name in names:
        with contextlib.suppress(AttributeError):
            out += excerpt(operator.attrgetter(name)(module))
    return out


def their_excerpts(lines):
    """Return the sources of SB3 that these lines of a section name."""
    out = ""
    for line in lines:
        where, *part = line.split(" | ")
        owner, *functions = where.split()
        for function in [f"{owner}.{x}" for x in functions] or [owner]:
            out += excerpt(pydoc.locate(f"stable_baselines3.{function}"), *part)
    return out


def page(module, kind, text):
    """Return a page with the table and both sources, section by section."""
    list_item = r"^ (\d+)\. (.*?)(?=^ \d+\. |\Z)"
    differences = dict(re.findall(list_item, module.__doc__, re.MULTILINE | re.DOTALL))
    sections = SAC_PAGE if kind == "SAC" else PPO_PAGE
    if kind == "pixels":
        sections = sections.replace("MlpExtractor", "NatureCNN")

    body = ""
    for section in sections.split("## ")[1:]:
        head, *lines = section.strip().splitlines()
        title, names = head.split(": ")
        ours = our_excerpts(module, names.split())
        numbers = set()
        for mark in re.findall(r"SB3(?: and CleanRL)? differs? \(([\d, ]+)\)", ours):
            numbers |= {int(number) for number in mark.split(",")}
        if title == "Normalization":  # the class is in the package and has no references
            numbers |= {int(n) for n, x in differences.items() if "statistics" in x}
        items = ""
        for number in sorted(numbers):
            difference = html.escape(differences.get(str(number), ""))
            items += f"<li value={number}>{difference}</li>"
        listed = f"<ol>{items}</ol>" if items else "<p>No numbered difference from SB3 here.</p>"
        columns = f"<div>{ours}</div><div>{their_excerpts(lines)}</div>"
        body += f"<h2>{title}</h2>{listed}<div class=two>{columns}</div>"

    version = importlib.metadata.version("stable_baselines3")
    title = f"{Path(module.__file__).name} beside stable_baselines3 {version}"
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    result = f"<div class=code><pre class=table>{html.escape(text)}</pre></div>"
    return f"{head}<h1>{title}</h1>{result}{body}"


# The command


def load(path):
    """Return the script as a module, and its kind: "PPO", "pixels" or "SAC"."""
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{path}: there is no such script")
    spec = importlib.util.spec_from_file_location("beside_sb3_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} can't be loaded: {reason}") from None

    is_sac = hasattr(module, "ReplayBuffer")
    needed = ["Args", "PRESETS", "check", "make_envs", "Agent", "update", "train"]
    needed += ["update_critics"] if is_sac else ["gae", "make_batch"]
    for name in needed:
        if not hasattr(module, name):
            accepted = "give a PPO or SAC script, or a changed copy of one"
            raise ValueError(f"{path} has no {name}: {accepted}")
    if hasattr(module, "Memory"):
        reason = "docs/lstm.md compares it with RecurrentPPO"
        raise ValueError(f"{path} has a recurrent policy, and SB3's PPO has none: {reason}")
    if is_sac and "tau" not in module.Args.__annotations__:
        reason = "docs/crossq.md compares it with sb3-contrib's CrossQ"
        raise ValueError(f"{path} has no target networks, and SB3's SAC has them: {reason}")
    if is_sac:
        return module, "SAC"
    return module, "pixels" if "images" in inspect.getsource(module.Agent) else "PPO"


def settings(module, kind, path, iterations, options):
    """Return the arguments of the script, and the number of steps per iteration."""
    if "--total-timesteps" in options:
        raise ValueError("--total-timesteps: give --iterations instead")
    with mock.patch.object(sys, "argv", [str(path), *options]):
        args, _, checkpoint = runs.command_line(path, module.Args, module.PRESETS, module.__doc__)
    if checkpoint:
        raise ValueError("--resume, --evaluate, --export: leave them out, this starts a new run")
    if game := engine(args):
        scene = args.unity_path or args.godot_path or args.env_id
        raise ValueError(f"{scene} is a {game} scene, which SB3 can't run: give a gymnasium env")

    args.compile = False
    args.device = "cpu"
    args.capture_video = False
    args.track = False
    if not any(option.startswith("--min-obs-std") for option in options):
        args.min_obs_std = 0.0  # as in SB3
    num_steps = BLOCK if kind == "SAC" else args.num_steps
    batch_size = num_steps * args.num_envs
    args.total_timesteps = iterations * batch_size
    if kind == "SAC":
        if not any(option.startswith("--learning-starts") for option in options):
            args.learning_starts = BLOCK
        unlike = args.num_envs > 1 or args.updates_per_step % 1 or args.policy_frequency > 1
        if unlike or args.norm_obs:
            same = "--num-envs 1, whole --updates-per-step, no --policy-frequency, no --norm-obs"
            raise ValueError(f"SB3's SAC can be compared with {same} only")
    else:
        check_minibatches(args, batch_size)
    module.check(args)

    # An env that the script refuses is reported before SB3 runs
    envs, _ = module.make_envs(args, args.seed)
    with contextlib.closing(envs):
        getattr(module, "describe", runs.describe)(args, envs)
    return args, num_steps


def check_minibatches(args, batch_size):
    if batch_size % args.num_minibatches or batch_size <= args.num_minibatches:
        batch = f"{args.num_envs} x {args.num_steps} = {batch_size} decisions"
        reason = f"SB3 needs minibatches of equal size, with 2 or more of {batch}"
        raise ValueError(f"--num-minibatches {args.num_minibatches}: {reason}")
    if args.update_epochs == 0:
        raise ValueError("--update-epochs 0: nothing is learned, so there is nothing to compare")


def beside(path, iterations, tolerance, options):
    """Return the table with the verdict as text, and the page."""
    if not importlib.util.find_spec("stable_baselines3"):
        raise ValueError("stable_baselines3 is not installed: pip install stable_baselines3")
    if iterations < 1 or not 0 < tolerance < math.inf:
        numbers = f"--iterations {iterations} --tolerance {tolerance}"
        raise ValueError(f"{numbers}: both must be above 0")
    module, kind = load(path)
    args, num_steps = settings(module, kind, path, iterations, options)
    fast.THREADS = 1  # with several threads, sums are rounded differently from run to run
    torch.set_num_threads(1)

    # SB3, SB3 with slightly different weights, and the script
    theirs = Trace(iterations, num_steps)
    again = Trace(iterations, num_steps)
    ours = Trace(iterations, num_steps)
    name = run_sb3(kind, args, theirs)
    run_sb3(kind, args, again, theirs, tolerance)
    with contextlib.redirect_stdout(io.StringIO()):
        agent = run_script(kind, module, args, ours, theirs, tolerance)

    # Table and verdict
    size = f"{num_steps} steps x {args.num_envs} env(s) each"
    lines = [f"{path.name} beside SB3's {name}, on {args.env_id}: {size}"]
    pairs = shared(dict(agent.named_parameters()), counterparts(kind, agent, theirs.initial))
    unpaired = []
    for name, x in agent.named_parameters():
        if name not in pairs or len(x) > len(pairs[name][0]):
            unpaired.append(name)
    if unpaired:
        names = ", ".join(unpaired)
        lines.append(f"Not or only partly initialized with SB3's weights: {names}")
    rows = compare(kind, ours, theirs, tolerance, agent)
    rounding = compare(kind, again, theirs, tolerance)
    hints = SAC if kind == "SAC" else PPO
    lines += ["", table(rows, hints), "", verdict(rows, rounding, hints, num_steps, tolerance)]
    text = "\n".join(lines)
    return text, page(*load(path), text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", type=Path, help="a script of this repository, or a changed copy")
    parser.add_argument("--iterations", type=int, default=5, help="the number of iterations")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="the largest difference")
    parser.add_argument("--html", type=Path, help="write the table and both sources to this page")
    args, options = parser.parse_known_args()
    path = (args.script if args.script.exists() else ROOT / args.script).resolve()
    target = args.html.resolve() if args.html else None
    try:
        if target and not target.parent.is_dir():
            raise ValueError(f"--html {args.html}: there is no such folder")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            text, sources = beside(path, args.iterations, args.tolerance, options)
        print(text)
        if target:
            target.write_text(sources)
            print(f"Wrote {args.html}")
    except (ValueError, FloatingPointError, MemoryError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
