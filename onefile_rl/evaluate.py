"""Evaluation and videos of a policy, during training and from a checkpoint. Both use the script's own `agent.act`."""

import math
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from envs.make import VIDEO_STEPS
from envs.rendering import check_video
from onefile_rl import fast
from onefile_rl.checkpoints import (
    check_agent,
    check_room,
    fingerprint,
    plain,
    restore_state,
    set_attributes,
    using,
)
from onefile_rl.curriculum import at_lesson
from onefile_rl.engines.printing import printable
from onefile_rl.engines.scenes import EngineError, derive_seed, engine

EMPTY_STEPS = 1_000  # an evaluation does not wait longer for an agent to appear in a slot
LONGEST_VIDEO = 10_000  # decisions, of an episode that does not end


def play_vectors(agent, spec, num_envs):
    """Return the function `play` that evaluate() needs, for an agent with vector observations.

    agent.act gets the observations, the action masks if actions are discrete, and the memory if the agent has one.
    """
    act = fast.Acting(agent, deterministic=True)
    has_masks = bool(spec.get("branches"))
    memory = np.zeros(
        (num_envs, 2 * spec.get("memory", 0)), np.float32
    )  # of the policy and of the value network

    def play(obs, infos, slots, new_episode):
        memory[new_episode] = 0
        inputs = [obs[slots]]
        if has_masks:
            inputs.append(infos["action_mask"][slots])
        if memory.size:
            inputs.append(memory[slots])
        _, env_actions, *new_memory = act(*inputs)
        if new_memory:
            memory[slots] = new_memory[0]
        return env_actions

    return play


def evaluate(play, envs, episodes, seed, steps=math.inf):
    """Return the returns, lengths and successes of `episodes` episodes, as the rows of an array.

    A success is nan if the env does not report one. The evaluation ends after `steps` steps at the latest. See
    play_episodes().
    """
    results, _ = play_episodes(play, envs, episodes, seed, steps)
    return results


def play_episodes(play, envs, episodes, seed, steps=math.inf, patience=math.inf):
    """Play `episodes` episodes. Return the returns, lengths and successes of those that ended, and the returns and
    lengths so far of those that did not, both as the rows of an array.

    Every agent plays the same number of episodes, so that agents with short episodes do not dominate the mean. A slot
    whose episode has not ended after `patience` steps is not waited for any longer. Neither is a slot without an agent:
    the other slots play its episodes. The evaluation ends after `steps` steps at the latest.

    play(obs, infos, slots, new_episode) returns the env actions of the slots `slots`. obs, infos and the boolean array
    new_episode have an entry for every slot.
    """
    num_envs = envs.num_envs
    action_space = envs.single_action_space
    episodes_left = np.zeros(num_envs, int)
    share_out(episodes, episodes_left, np.arange(num_envs))

    results = []
    unfinished = []
    episode_return = np.zeros(num_envs)
    episode_length = np.zeros(num_envs, int)
    new_episode = np.ones(num_envs, bool)
    last_end = np.zeros(num_envs, int)  # the step at which the slot's last episode ended
    given_up = np.zeros(num_envs, bool)
    actions = np.zeros((num_envs, *action_space.shape), action_space.dtype)
    obs, infos = envs.reset(seed=seed)
    step = 0

    while episodes_left.any() and step < steps:
        step += 1
        slots = np.flatnonzero(infos["ready"])
        if len(slots):
            actions[slots] = play(obs, infos, slots, new_episode).reshape(-1, *action_space.shape)
            new_episode[slots] = False
        obs, reward, terminated, truncated, infos = envs.step(actions)

        done = terminated | truncated
        new_episode |= done
        episode_return += reward
        episode_length += infos["closed"]
        for slot in np.flatnonzero(done):
            if episodes_left[slot]:
                success = infos.get("is_success", {}).get(slot, math.nan)
                results.append((episode_return[slot], episode_length[slot], success))
                episodes_left[slot] -= 1
            episode_return[slot] = 0
            episode_length[slot] = 0
            last_end[slot] = step

        # Give up episodes that do not end, and slots that have no agent
        waited = (step - last_end) * (episodes_left > 0)
        if waited.max() > min(patience, EMPTY_STEPS):
            empty = new_episode & ~infos["ready"]
            is_endless = ~empty & (waited > patience)
            unfinished += zip(episode_return[is_endless], episode_length[is_endless], strict=True)
            is_empty = empty & (waited > EMPTY_STEPS)
            given_up |= is_endless | is_empty
            num_freed = episodes_left[is_empty].sum()
            episodes_left[given_up] = 0
            share_out(num_freed, episodes_left, np.flatnonzero(~given_up & ~empty))
    return np.reshape(results, (-1, 3)).T, np.reshape(unfinished, (-1, 2)).T


def share_out(episodes, episodes_left, slots):
    """Add a number of episodes to those that `slots` have left, as equally as possible."""
    if len(slots):
        episodes_left[slots] += episodes // len(slots)
        episodes_left[slots[: episodes % len(slots)]] += 1


def mean_returns(make_envs, args, play, variants, episodes=8, steps=3_000):
    """Return the mean return of each variant of a policy, by name, evaluated in separate envs.

    variants: by name, the second argument of play(num_envs, variant), which returns a function for evaluate(). A
    variant is left out if an episode does not end within `steps` steps.
    """
    seed = derive_seed(args.seed, 1000)
    means = {}
    envs, _ = make_envs(replace(args, num_envs=episodes), seed)
    with closing(envs):
        for name, variant in variants.items():
            results = evaluate(play(envs.num_envs, variant), envs, episodes, seed, steps)
            if len(results) and len(results[0]) == episodes:
                means[name] = results[0].mean()
    return means


def record_video(args, make_envs, play, agent, spec, path):
    """Record a video of the deterministic policy in a separate env.

    The video shows one episode of a gymnasium env, at most LONGEST_VIDEO steps of it, or VIDEO_STEPS steps of a bundled
    scene. It is complete or does not exist: an OSError says why it could not be written.
    """
    if path.parent.is_symlink():
        raise ValueError(f"{path.parent} is a link to another folder: delete it")
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    for file in (temporary, temporary.with_suffix(".avi")):
        file.unlink(missing_ok=True)  # ffmpeg would write to the target of a link
    try:
        record(args, make_envs, play, agent, spec, temporary)
        check_video(temporary)
        os.replace(temporary, path)
    except (OSError, EngineError) as error:
        check_room(path.parent)  # raises the reason if the disk is full
        if isinstance(error, EngineError):
            raise
        raise OSError(f"ffmpeg failed: {str(error).splitlines()[0]}") from None
    finally:
        for file in (temporary, temporary.with_suffix(".avi")):
            file.unlink(missing_ok=True)


def record(args, make_envs, play, agent, spec, path):
    seed = derive_seed(args.seed, 0)
    try:
        envs, _ = make_envs(args, seed, video=path)
    except ValueError as error:
        raise ValueError(f"--capture-video: {error}") from None

    episodes = 1
    steps = LONGEST_VIDEO
    if engine(args):
        episodes = 10**9  # the number of steps is the limit
        steps = getattr(envs, "video_steps", VIDEO_STEPS)
    with closing(envs):
        evaluate(play(agent, spec, envs.num_envs), envs, episodes, seed, steps)


def load_agent(args, path, state, script, Agent):
    """Return the agent of a checkpoint, with its normalization statistics, in evaluation mode."""
    check_agent(path, state, Agent, args)
    with using(path, state):
        agent = Agent(state["spec"], args)
        restore_state(agent, state["kept"]["agent"], path)
        set_attributes(agent, state["agent_attributes"])
    agent.eval()
    if state["fingerprint"] != fingerprint(script):
        name = Path(script).name
        print(f"{name} has changed since {path} was written by {path.parent / name}", flush=True)
    return agent


def evaluate_checkpoint(args, path, state, script, Agent, make_envs, describe, play):
    """Print the return of a checkpoint's deterministic policy, and record a video with --capture-video.

    path, state: the checkpoint. describe(args, envs): the spec of the envs, which must be that of the checkpoint.
    """
    spec = state["spec"]
    agent = load_agent(args, path, state, script, Agent).to(args.device)
    args = replace(args, env_parameters=at_lesson(args, state, path))

    # A player that crashes ends the evaluation: a restart would lose its episodes.
    seed = derive_seed(args.seed, 0)
    envs, _ = make_envs(replace(args, max_restarts=0), seed)
    with closing(envs):
        here = plain(describe(args, envs))
        with using(path, state):
            for key in [*here, *spec]:
                if here.get(key) != spec.get(key):
                    theirs = f"{printable(key)} {printable(spec.get(key))}"
                    raise ValueError(f"{path} has {theirs}, the env has {here.get(key)}")
        play_agent = play(agent, spec, envs.num_envs)
        results, unfinished = play_episodes(
            play_agent, envs, args.eval_episodes, seed, patience=args.eval_steps
        )

    line = f"{path} after {state['global_step']:,} decisions, "
    print(line + summary(args, *results, *unfinished))

    if args.capture_video:
        video = path.parent / "videos" / "evaluation.mp4"
        try:
            record_video(args, make_envs, play, agent, spec, video)
        except OSError as error:
            raise ValueError(f"{video} could not be written: {error}") from None
        print(f"Wrote {video}")
    if not len(results[0]):
        raise ValueError(f"{path}: no episode ended: give a larger --eval-steps")


def summary(args, returns, lengths, successes, returns_so_far, lengths_so_far):
    """Return the line about an evaluation. The last two arguments are those of episodes that did not end."""
    line = f"{len(returns)} episodes"
    if len(returns):
        line += f" of {lengths.mean():.0f} decisions on average: return {returns.mean():.2f} ± {returns.std():.2f}"
        line += f", from {returns.min():.2f} to {returns.max():.2f}"
        if not np.isnan(successes).any():
            line += f"; success {successes.mean():.1%}"
    if len(returns) < args.eval_episodes:
        missing = args.eval_episodes - len(returns)
        line += f"; {missing} of {args.eval_episodes} episodes are missing"
    if len(returns_so_far):
        running = f"{len(returns_so_far)} agents did not end an episode within --eval-steps {args.eval_steps} steps"
        so_far = f"return {returns_so_far.mean():.2f} so far, in {lengths_so_far.mean():.0f} decisions on average"
        line += f": {running}, with a {so_far}"
    return line
