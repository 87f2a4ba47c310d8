"""A script and SB3's algorithm side by side, from the same weights, seeds and settings: where do they begin to part?

    python benchmarks/beside_sb3.py ppo_continuous_multiagent.py --env-id HalfCheetah-v5
    python benchmarks/beside_sb3.py my_ppo.py --env-id Hopper-v5 --iterations 3 --num-envs 4    a changed copy, anywhere
    python benchmarks/beside_sb3.py sac_continuous.py --env-id Pendulum-v1 --html page.html     both sources on a page

Further options are the script's own. The installed stable_baselines3 runs first, then the script, with SB3's weights
and random numbers. The table has the largest difference of each quantity in each iteration (SAC: 100 steps); a star
marks what exceeds --tolerance, which is absolute for numbers below 1 and relative above. Of the weights 1 % may: where
a gradient is 0 but for rounding, Adam makes a whole step of it.

What the scripts number as differences is translated: SB3's vf_coef is half of ours, and so is its value loss in the
table; its learning rate falls as ours does, over these iterations; its VecNormalize changes its statistics between
iterations only. SAC learns after 100 steps, unless --learning-starts says otherwise. As long as actions agree, the
script's envs are given SB3's: a chaotic env would make anything of their last digit. How long rounding leaves the rest
alone shows a second run of SB3, whose first weights differ by a tenth of the tolerance.
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

import fast  # noqa: E402
import runs  # noqa: E402
from envs import engine, pixels, vector  # noqa: E402

BLOCK = 100  # steps of SAC in a row of the table
# The quantities in the order in which they come about, and what it means if one of them is the first to part.
PPO = {
    "observations": "the envs, their seeds, what they are sent, or how observations are normalised",
    "actions": "the policy acts otherwise on the same observations: its network, its std or its random numbers",
    "log-probs": "the same actions have another density: the agent's forward()",
    "values": "the critic makes something else of the same observations: its network",
    "rewards": "how rewards are scaled or clipped, or how actions are before the env gets them",
    "advantages": "made otherwise of the same rewards and values: gae(), or what follows a row in make_batch()",
    "returns": "the critic's target: make_batch()",
    "policy loss": "the surrogate in loss(), or how advantages are normalised there",
    "value loss": "the values' error in loss()",
    "entropy": "the policy's entropy: the agent's forward()",
    "gradient norm": "how loss() adds up its parts, or a part that SB3 has not",
    "weights": "the step that is made of the gradient: its clipping, Adam, the learning rate",
}
SAC = {
    "observations": "the envs or their seeds",
    "actions": "the policy acts otherwise on the same observations: its network, its std or its random numbers",
    "rewards": "the env, or a wrapper around it",
    "critic loss": "the critics' target or error in critic_loss(), which transitions are drawn, or the step before it",
    "temperature": "its step, or where it starts",
    "actor loss": "actor_loss(), or the critics' step just before it",
    "weights": "the steps that are made of the gradients, or how the targets follow",
}
METRICS = {"policy loss": "policy_loss", "value loss": "value_loss", "entropy": "entropy", "gradient norm": "grad_norm"}
METRICS |= {"critic loss": "qf_loss", "actor loss": "actor_loss", "temperature": "alpha"}  # names of ours


class Trace:
    """What one side did: for each iteration and quantity when in the iteration it was, and what; weights after each."""

    def __init__(self, num_iterations, num_steps):
        self.rows, self.weights = [{} for _ in range(num_iterations)], []
        self.num_steps, self.steps, self.updates = num_steps, 0, 0

    def add(self, name, values, times=None):
        """Of the last step; times: of these values, else that step."""
        iteration, now = divmod(self.steps - 1, self.num_steps)
        if iteration >= len(self.rows):  # a copy that steps on
            return
        when, what = self.rows[iteration].setdefault(name, ([], []))
        when.extend([now] if times is None else times)
        what.extend([values] if times is None else values)

    def add_rollout(self, columns):
        """PPO's rows as (time, env, ...). What is made of the whole rollout comes after it."""
        for name, x in columns.items():
            late = name in ("advantages", "returns")
            self.add(name, x, [self.num_steps] * len(x) if late else range(len(x)))
        self.updates = 0

    def add_update(self, quantities, kind):
        """PPO's updates follow the rollout, SAC's a step."""
        self.updates += 1
        now = (self.steps - 1) % self.num_steps + 0.5 if kind == "SAC" else self.num_steps + self.updates
        for name, x in quantities.items():
            self.add(name, [x.item()], [now])


# SB3


def make_image_env(args):
    """What ppo_pixel.py sees, as one image: SB3's VecFrameStack begins an episode with black ones."""
    names = ("from_pixels", "image_size", "grayscale", "action_repeat", "env_kwargs")
    env = pixels.make_pixel_env(args.env_id, **{name: getattr(args, name) for name in names})
    (name, space), *others = env.observation_space.spaces.items()
    if others or name == "vector":
        raise ValueError(f"{args.env_id} has {', '.join(env.observation_space.spaces)}: SB3's CnnPolicy sees one image")
    env = gym.wrappers.TransformObservation(env, lambda obs: obs[name], space)
    env = gym.wrappers.FrameStackObservation(env, args.frame_stack or (3 if args.from_pixels else 1))
    low, high = (np.concatenate(list(x), -1) for x in (env.observation_space.low, env.observation_space.high))
    space = gym.spaces.Box(low, high, dtype=np.uint8)
    return gym.wrappers.TransformObservation(env, lambda obs: np.concatenate(list(obs), -1), space)


def make_sb3(kind, args):
    """SB3's model with the script's settings."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import VecNormalize

    make_env = make_image_env if kind == "pixels" else lambda args: vector.make_env(args.env_id, **args.env_kwargs)
    envs = make_vec_env(lambda: make_env(args), args.num_envs, seed=args.seed)
    same = dict(gamma=args.gamma, seed=args.seed, device="cpu")
    activations = {name.lower(): layer for name, layer in vars(nn.modules.activation).items()}
    if kind == "pixels":
        policy_kwargs = dict(features_extractor_kwargs=dict(features_dim=args.features))
    else:
        if args.activation not in activations:
            raise ValueError(f"--activation {args.activation}: torch has no layer of that name, for SB3's network")
        policy_kwargs = dict(net_arch=list(args.hidden_sizes), activation_fn=activations[args.activation])
    if kind == "SAC":
        model = sb3.SAC(
            "MlpPolicy", envs, args.learning_rate, args.buffer_size, args.learning_starts, args.batch_size, args.tau,
            gradient_steps=int(args.updates_per_step), ent_coef=f"auto_{args.alpha}" if args.autotune else args.alpha,
            target_entropy="auto" if args.target_entropy is None else args.target_entropy,
            policy_kwargs=policy_kwargs, **same,
        )  # fmt: skip
    else:
        norm_obs = args.norm_obs and kind == "PPO"
        if norm_obs or args.norm_reward:
            envs = VecNormalize(envs, False, norm_obs, args.norm_reward, gamma=args.gamma)
        batch_size = args.num_steps * args.num_envs
        one = batch_size / args.total_timesteps  # SB3's progress is that after the rollout, and ours that before it
        rate = (lambda left: args.learning_rate * (left + one)) if args.anneal_lr else args.learning_rate
        model = sb3.PPO(
            "CnnPolicy" if kind == "pixels" else "MlpPolicy", envs, rate, args.num_steps,
            batch_size // args.num_minibatches, args.update_epochs, gae_lambda=args.gae_lambda,
            clip_range=args.clip_coef, clip_range_vf=args.clip_coef if args.clip_vloss else None,
            normalize_advantage=args.norm_adv, ent_coef=args.ent_coef, vf_coef=0.5 * args.vf_coef,
            max_grad_norm=args.max_grad_norm, target_kl=args.target_kl,
            policy_kwargs=policy_kwargs | dict(log_std_init=getattr(args, "logstd_init", 0.0)), **same,
        )  # fmt: skip
    model.set_logger(configure(None, []))
    return model


def weights_of(model):
    state = dict(model.policy.state_dict())
    if getattr(model, "log_ent_coef", None) is not None:
        state["log_ent_coef"] = model.log_ent_coef
    return {name: x.detach().clone() for name, x in state.items()}


def led(step, trace, theirs, tolerance):
    """step(), but with SB3's actions as long as these agree with them."""

    def led_step(actions):
        given = theirs.sent[trace.steps] if trace.steps < len(theirs.sent) else actions
        agree = given.shape == actions.shape and np.allclose(actions, given, tolerance, tolerance)
        return step(given.astype(actions.dtype) if agree else actions)

    return led_step


def run_sb3(kind, args, trace, theirs=None, tolerance=0.0):
    """Learn, and watch: rollouts by a callback, losses where SB3's own train() has them. theirs: of another run of SB3,
    to be compared with; this one begins with other last digits."""
    from stable_baselines3.common.callbacks import BaseCallback

    model = make_sb3(kind, args)
    if theirs:
        for weights in model.policy.parameters():
            weights.data.mul_(1 + tolerance / 10 * torch.randn_like(weights))
        model.env.step = led(model.env.step, trace, theirs, tolerance)
    trace.initial, trace.sent = weights_of(model), []  # sent: what the envs got
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    normalized = model.get_vec_normalize_env()

    class Watch(BaseCallback):
        def _on_rollout_start(self):
            """Statistics of VecNormalize change here and nowhere else: difference (1) of the scripts."""
            if normalized is None:
                return
            if not trace.steps:
                self.discounted, self.now = np.zeros(normalized.num_envs), normalized.get_original_obs()
            else:
                normalized.ret_rms.update(np.concatenate(self.returns))
                if normalized.norm_obs:
                    normalized.obs_rms.update(np.concatenate(self.obs))
                    self.model._last_obs = normalized.normalize_obs(self.now)
            self.obs, self.returns = [], []

        def _on_step(self):
            trace.steps += 1
            trace.sent.append(self.locals.get("clipped_actions", self.locals["actions"]).copy())
            trace.add("rewards", self.locals["rewards"].copy())  # PPO adds a bootstrap to them later
            if kind == "SAC":
                trace.add("observations", self.model._last_obs.copy())
                trace.add("actions", trace.sent[-1])
            if normalized is not None:
                self.obs.append(self.now)
                self.now = normalized.get_original_obs()
                self.discounted = self.discounted * normalized.gamma + normalized.get_original_reward()
                self.returns.append(self.discounted.copy())
                self.discounted[self.locals["dones"]] = 0
            return True

        def _on_rollout_end(self):
            if kind != "SAC":
                names = {"observations": "observations", "actions": "actions", "log-probs": "log_probs"}
                names |= {name: name for name in ("values", "advantages", "returns")}
                trace.add_rollout({ours: getattr(self.model.rollout_buffer, x).copy() for ours, x in names.items()})

    def clip(*inputs, **kwargs):
        norm, local = clip_grad_norm_(*inputs, **kwargs), sys._getframe(1).f_locals
        quantities = {"policy loss": local["policy_loss"], "value loss": 0.5 * local["value_loss"]}
        trace.add_update(quantities | {"entropy": -local["entropy_loss"], "gradient norm": norm}, kind)
        return norm

    def step(*inputs, **kwargs):
        local = sys._getframe(1).f_locals
        quantities = {"critic loss": local["critic_loss"], "actor loss": local["actor_loss"]}
        trace.add_update(quantities | {"temperature": local["ent_coef"]}, kind)
        return actor_step(*inputs, **kwargs)

    def watched_train(*inputs, **kwargs):
        train(*inputs, **kwargs)
        if trace.steps % trace.num_steps == 0:
            trace.weights.append(weights_of(model))

    clip_grad_norm_, train, model.train = torch.nn.utils.clip_grad_norm_, model.train, watched_train
    if kind == "SAC":
        actor_step, model.actor.optimizer.step = model.actor.optimizer.step, step
    with mock.patch("torch.nn.utils.clip_grad_norm_", clip):
        model.learn(args.total_timesteps, callback=Watch(), log_interval=10**9)
    trace.weights[:0] = [trace.initial] * (len(trace.rows) - len(trace.weights))  # blocks of SAC before it learned
    return f"{type(model).__name__}, {type(model.policy).__name__}"


def counterparts(kind, agent, state):
    """SB3's weights under our names and in our layout. Layers are paired in their order, whatever stands between."""

    def pair(part, *theirs):  # in the order of SB3's state, which has the last layer last
        kinds, module = (nn.Linear, nn.Conv2d), getattr(agent, part, nn.Identity())
        ours = [f"{part}.{name}".strip(".") for name, layer in module.named_modules() if isinstance(layer, kinds)]
        theirs = [name[:-7] for name in state if name.startswith(theirs) and name.endswith(".weight")]
        for a, b in [*zip(ours[:-1], theirs[:-1], strict=False), *zip(ours[-1:], theirs[-1:], strict=False)]:
            out.update({f"{a}.{end}": state[f"{b}.{end}"] for end in ("weight", "bias")})
        return ours[-1] if ours else None

    out = {"actor_logstd": state["log_std"]} if "log_std" in state else {}
    if kind == "PPO":
        pair("actor_mean" if hasattr(agent, "actor_mean") else "actor", "mlp_extractor.policy_net", "action_net")
        pair("critic", "mlp_extractor.value_net", "value_net")
    elif kind == "pixels":
        pair("encoders", "features_extractor")
        pair("actor", "action_net")
        pair("critic", "value_net")
    else:
        out |= {"log_alpha": state["log_ent_coef"]} if "log_ent_coef" in state else {}
        last = pair("actor", "actor.latent_pi", "actor.mu")
        for end in ("weight", "bias"):  # mean and log std are one layer of ours
            out[f"{last}.{end}"] = torch.cat([state[f"actor.mu.{end}"], state[f"actor.log_std.{end}"]])
        for ours, theirs in {"critics": "critic", "targets": "critic_target"}.items():
            for i in range(sum(name.startswith(f"{theirs}.qf0") for name in state) // 2):
                q = [f"{theirs}.qf{k}.{2 * i}" for k in range(2)]
                out[f"{ours}.weights.{i}"] = torch.stack([state[f"{name}.weight"].T for name in q])
                out[f"{ours}.biases.{i}"] = torch.stack([state[f"{name}.bias"][None] for name in q])
    return out


def shared(weights, theirs):
    """Pairs of ours and SB3's by name, as far as ours have their shape: of three critics the first two."""
    out = {}
    for name, x in theirs.items():
        ours = weights.get(name)
        if ours is not None and ours.shape[1:] == x.shape[1:] and ours.dim() == x.dim() and len(ours) >= len(x):
            out[name] = ours[: len(x)], x
    return out


# The script


def run_script(kind, module, args, trace, theirs, tolerance):
    """Train with SB3's weights, random numbers and, while they agree, actions. Returns the agent."""
    Agent, make_envs, update, agents = module.Agent, module.make_envs, module.update, []

    def begin(*inputs, **kwargs):
        agent = Agent(*inputs, **kwargs)
        for ours, x in shared(dict(agent.named_parameters()), counterparts(kind, agent, theirs.initial)).values():
            ours.data.copy_(x)
        agents.append(agent)
        torch.manual_seed(args.seed)
        np.random.seed(args.seed)
        return agent

    def watched_envs(*inputs, **kwargs):
        envs, how = make_envs(*inputs, **kwargs)
        step, reset, now = led(envs.step, trace, theirs, tolerance), envs.reset, None

        def watched_reset(*inputs, **kwargs):
            nonlocal now
            now, infos = reset(*inputs, **kwargs)
            return now, infos

        def watched_step(actions):
            nonlocal now
            if trace.steps and trace.steps % trace.num_steps == 0:
                keep_weights()
            actions, out = actions.copy(), step(actions)
            trace.steps += 1
            if kind == "SAC":
                for name, x in {"observations": now, "actions": actions, "rewards": out[1]}.items():
                    trace.add(name, x.copy())
            now = out[0]
            return out

        envs.reset, envs.step = watched_reset, watched_step
        return envs, how

    def keep_weights():
        trace.weights.append({name: x.detach().clone() for name, x in agents[0].named_parameters()})

    @torch.no_grad()
    def watched_batch(agent, rollout, *inputs, **kwargs):
        batch = make_batch(agent, rollout, *inputs, **kwargs)
        names = {"actions": "actions", "logprobs": "log-probs", "values": "values"}
        names |= {"advantages": "advantages", "returns": "returns"}
        if kind == "PPO":
            columns = {"observations": getattr(agent, "obs_rms", nn.Identity())(batch.obs)}
        else:
            columns = {"observations": module.stacked(rollout.frames.images(), batch.images)[0]}
        columns |= {ours: getattr(batch, name) for name, ours in names.items() if hasattr(batch, name)}
        trace.add_rollout({name: by_time(x.cpu().numpy()) for name, x in columns.items()})
        return batch

    def watched_gae(rewards, *inputs, **kwargs):
        trace.add_rollout({"rewards": by_time(np.array(rewards))[: trace.num_steps]})  # an agent's last row is open
        return gae(rewards, *inputs, **kwargs)

    def by_time(rows):
        """Rows that stand agent by agent as (time, agent, ...)."""
        return rows.reshape(args.num_envs, -1, *rows.shape[1:]).swapaxes(0, 1)

    def watched_update(*inputs, **kwargs):
        metrics = update(*inputs, **kwargs)
        target = getattr(args, "target_kl", None)
        if target is None or metrics["losses/approx_kl"] <= 1.5 * target:  # else it is taken back
            found = {name: metrics.get(f"losses/{ours}") for name, ours in METRICS.items()}
            trace.add_update({name: x for name, x in found.items() if x is not None}, kind)
        return metrics

    module.Agent, module.make_envs, module.update = begin, watched_envs, watched_update
    if kind != "SAC":
        gae, make_batch, module.gae, module.make_batch = module.gae, module.make_batch, watched_gae, watched_batch
    with mock.patch.object(vector, "is_envpools", return_value=False):  # EnvPool's envs are others than SB3's
        module.train(args)
    keep_weights()
    return agents[0]


# The comparison


def compare(kind, ours, theirs, tolerance, agent=None):
    """For each iteration and quantity: the largest difference, and the first place where it is too large, or None.
    agent: of the script's; else both are SB3's."""
    out = []
    for here, there, weights, their_weights in zip(ours.rows, theirs.rows, ours.weights, theirs.weights, strict=False):
        names = [name for name in (SAC if kind == "SAC" else PPO) if name in here and name in there]
        row = {name: differ(*here[name], *there[name], tolerance) for name in names}
        pairs = shared(weights, counterparts(kind, agent, their_weights) if agent else their_weights).values()
        if pairs:
            ends = (torch.cat([pair[k].flatten() for pair in pairs])[None] for k in (0, 1))
            row["weights"] = differ([math.inf], next(ends), [math.inf], next(ends), tolerance, few=0.01)
        out.append(row)
    return out


def differ(times, ours, their_times, theirs, tolerance, few=0.0):
    """A place: when, ours, SB3's, and how many numbers differ too much of how many, if they are more than a few."""
    counts, count = (len(ours), len(theirs)), min(len(ours), len(theirs))
    ours, theirs = (np.array([np.ravel(y) for y in x[:count]], np.float32) for x in (ours, theirs))
    if ours.shape != theirs.shape:
        return math.inf, (times[0], f"{ours.shape[1:]} numbers", f"{theirs.shape[1:]}", "")
    difference = np.nan_to_num(abs(ours - theirs), nan=math.inf)
    over = difference > tolerance * np.maximum(1, abs(theirs))
    if over.mean() > few:
        row = over.any(1).argmax()
        column = (difference[row] * over[row]).argmax()
        share = f"{over.sum():,} of the iteration's {over.size:,} are too far apart"
        return difference.max(), (times[row], f"{ours[row, column]:.6g}", f"{theirs[row, column]:.6g}", share)
    if counts[0] != counts[1]:
        return math.inf, (max(times, their_times, key=len)[count], f"{counts[0]} of them", f"{counts[1]}", "")
    return difference.max(), None


def table(rows, names):
    broken = {"observations": "obser- vations", "advantages": "advan- tages", "temperature": "temper- ature"}
    heads = [f" {broken.get(name, name.replace('-', '- '))}".split(" ")[-2:] for name in names]
    lines = [start + "".join(f"{head[k]:>8} " for head in heads) for k, start in enumerate((" " * 10, "iteration "))]
    for i, row in enumerate(rows):
        line = f"{i + 1:>9} "
        for name in names:
            largest, place = row.get(name, (None, None))
            text = "-" if largest is None else "other" if largest == math.inf else f"{largest:.1e}" if largest else "0"
            line += f"{text:>8}{'*' if place else ' '}"
        lines.append(line)
    return "\n".join(line.rstrip() for line in lines)


def first_to_part(rows):
    """Iteration, time in it and quantity: the earliest, and of those at one time the first to be computed."""
    for i, row in enumerate(rows):
        parted = [(place[0], order, name) for order, (name, (_, place)) in enumerate(row.items()) if place]
        if parted:
            return i, min(parted)[0], min(parted)[2]
    return None


def verdict(rows, rounding, meanings, num_steps, tolerance):
    """rounding: what SB3 differs from itself by, with other last digits. After it parts, nothing can be told."""

    def where(parted):
        i, time, _ = parted
        place = f", step {int(time) + 1}" if time < num_steps else f", update {time - num_steps}"
        return f"iteration {i + 1}{'' if time in (num_steps, math.inf) else place}"

    ours, limit = first_to_part(rows), first_to_part(rounding)
    if ours is None:
        return f"All quantities agree to {tolerance:g}, in all {len(rows)} iteration(s)."
    i, time, name = ours
    if limit and limit[:2] <= ours[:2]:
        return (
            f"All quantities agree to {tolerance:g} until rounding takes over: {name} part in {where(ours)}.\n"
            f"SB3 parts from itself no later, {limit[2]} in {where(limit)}, if weights change by {tolerance / 10:g}.\n"
            "After that the table can't tell a change. A smaller --learning-rate puts it off."
        )
    _, mine, theirs, share = rows[i][name][1]
    text = f"The first to part: {name}, in {where(ours)}: ours {mine}, SB3's {theirs}{f' ({share})' * bool(share)}.\n"
    text += f"What comes before agrees to {tolerance:g}, and rounding would not do it. So look at: "
    if mine.endswith("of them"):
        return text + "how many updates there are: epochs, minibatches, a stop."
    text += f"{meanings[name]}."
    if num_steps + 1 < time < math.inf:
        text += "\nOr at the step before it: Adam, the learning rate, the gradient's clipping."
    return text


# The page

# By section: names of ours, then lines of SB3's: a class and its methods, or a function from one line to another.
PPO_PAGE = """
## Networks: layer_init mlp nature impala Residual Agent
common.torch_layers.MlpExtractor __init__
common.policies.ActorCriticPolicy _build forward evaluate_actions
## Normalisation: Normalizer
common.running_mean_std.RunningMeanStd update_from_moments
common.vec_env.vec_normalize.VecNormalize step_wait _update_reward _normalize_obs
## Rollout: Frames stacked Rollout
common.on_policy_algorithm.OnPolicyAlgorithm collect_rollouts
## Advantage: gae Batch make_batch
common.buffers.RolloutBuffer compute_returns_and_advantage get
## Loss: loss
ppo.ppo.PPO.train | values, log_prob, entropy = | # Calculate approximate form
## Update: adam adam_numbers update
ppo.ppo.PPO.train | # Calculate approximate form | self._n_updates
## The loop: minibatches train
common.on_policy_algorithm.OnPolicyAlgorithm learn
ppo.ppo.PPO.train | def train | values, log_prob, entropy =
common.base_class.BaseAlgorithm _update_learning_rate
"""
SAC_PAGE = """
## Networks: mlp Critics Agent
sac.policies.Actor get_action_dist_params action_log_prob
common.distributions.SquashedDiagGaussianDistribution log_prob
common.policies.ContinuousCritic __init__ forward
## Buffer: Buffer
common.buffers.ReplayBuffer add sample _get_samples
## The critics' loss: critic_loss
sac.sac.SAC.train | with th.no_grad(): | # Optimize the critic
## The policy's and the temperature's loss: actor_loss
sac.sac.SAC.train | # Action by the current actor | ent_coefs.append
sac.sac.SAC.train | # Compute actor loss | # Optimize the actor
## Update: adam adam_numbers update
sac.sac.SAC.train | # Optimize the critic | # Compute actor loss
sac.sac.SAC.train | # Optimize the actor | self._n_updates
common.utils polyak_update
## The loop: train
common.off_policy_algorithm.OffPolicyAlgorithm learn collect_rollouts _sample_action
"""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1700px; padding: 0 2em; color: #222 }
pre { margin: 0; font: 12px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
pre.table { white-space: pre; overflow-x: auto } h2 { margin: 2em 0 .3em; border-top: 1px solid #ccc; padding-top: 1em }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2em } .two > div { min-width: 0 }
.code { background: #f7f7f5; border: 1px solid #ddd; padding: .6em .8em; margin: .2em 0 .8em }
.where { color: #777; font-size: 13px } i { color: #777; font-style: normal }
u { background: #ffe98a; text-decoration: none } b { color: #0550ae; font-weight: normal }
"""


def piece(thing, first="", last=None):
    """The source of a function or class, or its lines from the one that has `first` until the one that has `last`."""
    lines, number = inspect.getsourcelines(thing)
    begin = next((i for i, line in enumerate(lines) if first in line), 0)
    end = next((i for i in range(begin + 1, len(lines)) if last and last in lines[i]), len(lines))
    code = html.escape(textwrap.dedent("".join(lines[begin:end]).rstrip()), quote=False)
    words = "|".join(keyword.kwlist)
    look = lambda m: f"<i>{m[1]}</i>" if m[1] else f"<b>{m[0]}</b>"
    code = re.sub(rf'(#[^\n]*|"""[\s\S]*?""")|\b(?:{words})\b', look, code)
    code = re.sub(r"((?:SB3|CleanRL|SB3 and CleanRL) differs? \([\d, ]+\))", r"<u>\1</u>", code)
    file = Path(inspect.getsourcefile(inspect.unwrap(thing))).name
    where = f"{thing.__qualname__} in {file}, line {number + begin}"
    return f"<div class=where>{where}</div><div class=code><pre>{code}</pre></div>"


def page(module, kind, text):
    numbered = dict(re.findall(r"^ (\d+)\. (.*?)(?=^ \d+\. |\Z)", module.__doc__, re.MULTILINE | re.DOTALL))
    name, out, sections = Path(module.__file__).name, [], SAC_PAGE if kind == "SAC" else PPO_PAGE
    if kind == "pixels":
        sections = sections.replace("MlpExtractor", "NatureCNN")
    for section in sections.split("## ")[1:]:
        head, *lines = section.strip().splitlines()
        title, names = head.split(": ")
        ours, theirs = [piece(getattr(module, name)) for name in names.split() if hasattr(module, name)], []
        for line in lines:
            where, *part = line.split(" | ")
            owner, *functions = where.split()
            for function in [f"{owner}.{x}" for x in functions] or [owner]:
                theirs.append(piece(pydoc.locate(f"stable_baselines3.{function}"), *part))
        ours, theirs = "".join(ours), "".join(theirs)
        marks = re.findall(r"SB3(?: and CleanRL)? differs? \(([\d, ]+)\)", ours)
        marks = {int(number) for mark in marks for number in mark.split(",")}
        marks |= {int(n) for n, x in numbered.items() if title == "Normalisation" and "statistics" in x}
        told = "".join(f"<li value={n}>{html.escape(numbered.get(str(n), ''))}</li>" for n in sorted(marks))
        told = f"<ol>{told}</ol>" if told else "<p>No numbered difference from SB3 here.</p>"
        out.append(f"<h2>{title}</h2>{told}<div class=two><div>{ours}</div><div>{theirs}</div></div>")
    title = f"{name} beside stable_baselines3 {importlib.metadata.version('stable_baselines3')}"
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    return f"{head}<div class=code><pre class=table>{html.escape(text)}</pre></div>{''.join(out)}"


# The command


def load(path):
    """The script as a module, and its kind."""
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{path}: there is no such script")
    spec = importlib.util.spec_from_file_location("beside_sb3_script", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} can't be loaded: {type(error).__name__}: {error}") from None
    needed = ["Args", "PRESETS", "check", "make_envs", "Agent", "update", "train"]
    needed += ["Buffer"] if hasattr(module, "Buffer") else ["gae", "make_batch"]
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{path} has no {missing[0]}: this takes the PPO and SAC scripts and changed copies of them")
    if hasattr(module, "Memory"):
        raise ValueError(f"{path} remembers, which SB3's PPO does not: docs/lstm.md says how it stands to RecurrentPPO")
    kind = "SAC" if hasattr(module, "Buffer") else "pixels" if "images" in inspect.getsource(module.Agent) else "PPO"
    return module, kind


def settings(module, kind, path, iterations, options):
    """The script's arguments, and how many steps an iteration has."""
    if "--total-timesteps" in options:
        raise ValueError("--total-timesteps: give --iterations in its place")
    with mock.patch.object(sys, "argv", [str(path), *options]):
        args, _, checkpoint = runs.command_line(path, module.Args, module.PRESETS, module.__doc__)
    if checkpoint:
        raise ValueError("--resume, --evaluate and --export: this begins a run of its own")
    if game := engine(args):
        scene = args.unity_path or args.godot_path or args.env_id
        raise ValueError(f"{scene} is a {game} scene, which SB3 can't run: give a gymnasium --env-id")
    args.compile, args.device, args.capture_video, args.track = False, "cpu", False, False
    if not any(option.startswith("--min-obs-std") for option in options):
        args.min_obs_std = 0.0  # SB3's
    num_steps = BLOCK if kind == "SAC" else args.num_steps
    args.total_timesteps = iterations * num_steps * args.num_envs
    if kind == "SAC":
        if not any(option.startswith("--learning-starts") for option in options):
            args.learning_starts = BLOCK
        if args.num_envs > 1 or args.updates_per_step % 1 or args.policy_frequency > 1 or args.norm_obs:
            same = "--num-envs 1, whole --updates-per-step, no --policy-frequency, no --norm-obs"
            raise ValueError(f"SB3's SAC can be compared with {same}: it has the rest otherwise, or not at all")
    elif num_steps * args.num_envs % args.num_minibatches or num_steps * args.num_envs <= args.num_minibatches:
        batch = f"{args.num_envs} x {num_steps} = {num_steps * args.num_envs} decisions"
        raise ValueError(f"--num-minibatches {args.num_minibatches}: SB3 needs equal ones, of 2 or more of {batch}")
    elif args.update_epochs == 0:
        raise ValueError("--update-epochs 0: nothing would be learned, there is nothing to compare")
    module.check(args)
    with contextlib.closing(module.make_envs(args, args.seed)[0]) as envs:  # what the script refuses, before SB3 runs
        getattr(module, "describe", runs.describe)(args, envs)
    return args, num_steps


def beside(path, iterations, tolerance, options):
    """The table and what it means, as text, and the page."""
    if not importlib.util.find_spec("stable_baselines3"):
        raise ValueError("stable_baselines3 is not here: pip install stable_baselines3")
    if iterations < 1 or not 0 < tolerance < math.inf:
        raise ValueError(f"--iterations {iterations} --tolerance {tolerance}: both must be above 0")
    module, kind = load(path)
    args, num_steps = settings(module, kind, path, iterations, options)
    fast.THREADS = 1  # in several, sums are rounded differently from run to run
    torch.set_num_threads(1)
    ours, theirs, again = (Trace(iterations, num_steps) for _ in range(3))
    name = run_sb3(kind, args, theirs)
    run_sb3(kind, args, again, theirs, tolerance)
    lines = [f"{path.name} beside SB3's {name}, on {args.env_id}: {num_steps} steps x {args.num_envs} env(s) each"]
    with contextlib.redirect_stdout(io.StringIO()):
        agent = run_script(kind, module, args, ours, theirs, tolerance)
    rows, meanings = compare(kind, ours, theirs, tolerance, agent), SAC if kind == "SAC" else PPO
    rounding = compare(kind, again, theirs, tolerance)
    pairs = shared(dict(agent.named_parameters()), counterparts(kind, agent, theirs.initial))
    alone = [name for name, x in agent.named_parameters() if name not in pairs or len(x) > len(pairs[name][0])]
    if alone:
        lines.append(f"SB3 has nothing like {', '.join(alone)}, or only a part: the rest begins as the script makes it")
    lines += ["", table(rows, meanings), "", verdict(rows, rounding, meanings, num_steps, tolerance)]
    text = "\n".join(lines)
    return text, page(*load(path), text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", type=Path, help="a script of the repository, or a changed copy of one")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--html", type=Path, help="write both sources and the table to this page")
    args, options = parser.parse_known_args()
    path = (args.script if args.script.exists() else ROOT / args.script).resolve()
    target = args.html and args.html.resolve()
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
