"""Test that the transitions of UnityVecEnv are those of each agent, for random timings of the agents."""

from collections import Counter

import numpy as np
from conftest import ScriptedPlayer, agent
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_vec_env import UnityVecEnv

NAME = "Scripted?team=0"
EVENTS = (
    "nothing",
    "decide",
    "end",
    "interrupt",
    "end and decide",
    "interrupt and decide",
    "leave",
)


@st.composite
def scripts(draw):
    """Draw the messages of a player with up to six agents at a time. Agents join, request decisions, end, are
    interrupted, and leave."""
    places = draw(st.integers(1, 6))
    ids, decided, next_id, clock, script = [None] * places, [False] * places, 0, 0, []
    for step in range(draw(st.integers(2, 40))):
        ended, deciding = [], []
        for place in range(places):
            choices = EVENTS if step > 0 else EVENTS[1:2] if place == 0 else EVENTS[:2]
            event = draw(st.sampled_from(choices))
            if ids[place] is None and event != "nothing":  # a new agent
                ids[place], decided[place], next_id = next_id, False, next_id + 1
            elif event in ("end", "interrupt") and not decided[place] and draw(st.booleans()):
                event = "nothing"  # an end before the first decision is possible, but rare
            reward, clock = draw(st.sampled_from((-1.0, 0.0, 0.5, 2.0))), clock + 1
            if "end" in event or "interrupt" in event or event == "leave":
                how = dict(done=True, interrupted="interrupt" in event)
                ended.append(agent(ids[place], [[ids[place], clock, 1]], reward, **how))
                decided[place] = False
            if "decide" in event:
                deciding.append(
                    agent(ids[place], [[ids[place], clock, 0]], reward + 100 * ("and" in event))
                )
                decided[place] = True
            if event == "leave":
                ids[place] = None
        if ended or deciding:
            script.append({NAME: ended + draw(st.permutations(deciding))})
    last = next_id if ids[0] is None else ids[0]
    script.append(
        {NAME: [agent(last, [[last, clock + 1, 0]])]}
    )  # a step returns when an agent requests a decision
    return script, places, draw(st.sets(st.integers(1, 30), max_size=2))


def transitions_of_each_agent(script, replies):
    """Return the transitions (obs, action, reward, next obs, terminated, truncated) of the messages, by agent id."""
    pending, out = {}, []
    for message, reply in zip(script, replies, strict=True):
        for info in message[NAME]:
            if info["done"] and info["id"] in pending:
                obs, action = pending.pop(info["id"])
                interrupted = info["max_step_reached"]
                out.append((obs, action, info["reward"], seen(info), not interrupted, interrupted))
        requesting = [info for info in message[NAME] if not info["done"]]
        for info in requesting:
            if info["id"] in pending:
                out.append((*pending.pop(info["id"]), info["reward"], seen(info), False, False))
        if reply is None:  # the last message is not answered
            break
        if reply.command == 1:  # a reset: pending decisions get no reward
            pending.clear()
        else:
            for info, action in zip(requesting, reply.agent_actions[NAME].value, strict=True):
                pending[info["id"]] = (seen(info), tuple(action.continuous_actions))
    return out


def seen(info):
    return tuple(info["observations"][0]["float_data"]["data"])


def transitions_of_the_env(envs, resets, last_clock):
    """Return the transitions that a training loop sees, slot by slot, until the last message arrives."""
    rng, out, episodes = np.random.default_rng(0), [], []
    obs, infos = envs.reset()
    pending, running, steps = {}, {}, 0
    while not (obs[infos["ready"], 1] == last_clock).any():
        steps += 1
        if steps in resets:
            obs, infos = envs.reset()
            pending, running = {}, {}
            continue
        actions = rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
        for slot in np.flatnonzero(infos["ready"]):
            assert slot not in pending, "a second request without a reward for the first"
            pending[slot] = (tuple(obs[slot].tolist()), tuple(actions[slot].tolist()))
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for slot in range(envs.num_envs):
            ended, ready = terminated[slot] or truncated[slot], infos["ready"][slot]
            closed = slot in pending and bool(ended or ready)
            assert infos["closed"][slot] == closed, "closed if the pending decision got its reward"
            if slot not in pending or not (ended or ready):
                assert rewards[slot] == 0 and not ended, "no transition in this row"
                continue
            after = infos["final_obs"][slot] if ended else obs[slot]
            end = bool(terminated[slot]), bool(truncated[slot])
            out.append((*pending.pop(slot), rewards[slot], tuple(after.tolist()), *end))
            total, length = running.pop(slot, (0, 0))
            running[slot] = (total + rewards[slot], length + 1)
            if ended:
                episode = infos["final_info"]["episode"]
                assert (episode["r"][slot], episode["l"][slot]) == running.pop(slot)
                episodes.append(slot)
    return out


@settings(max_examples=150, deadline=None)
@given(scripts())
def test_transitions_are_those_of_each_agent(drawn):
    script, places, resets = drawn
    player = ScriptedPlayer(script)
    envs = UnityVecEnv(
        "editor", base_port=player.port, max_agents=places, timeout=60
    )  # no spare slots
    try:
        got = transitions_of_the_env(
            envs, resets, script[-1][NAME][0]["observations"][0]["float_data"]["data"][1]
        )
    finally:
        envs.close()
        player.thread.join(5)
    expected = transitions_of_each_agent(script, [*player.replies, None])
    assert Counter(got) == Counter(expected)
