"""A policy at work: evaluated, filmed, exported. Whatever is done with it, it is `agent.act` that does it."""

import json
import math
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

import fast
from checkpoints import fingerprint, plain, put_back, replacing
from envs import engine
from envs.vector import FILM_STEPS


def play_vectors(agent, spec, n):
    """For evaluate(): a policy that sees one vector, a mask if it has choices, and what it remembers if it does."""
    acting, act, choices = fast.Acting(agent, deterministic=True), None, sum(spec.get("branches", ()))
    memory = np.zeros((n, 2 * spec.get("memory", 0)), np.float32)

    def play(obs, infos, who, begins):
        nonlocal act
        memory[begins] = 0
        seen = [obs[who]]
        if choices:
            seen.append(infos["action_mask"][who])
        if memory.size:
            seen.append(memory[who])
        act = act or acting.checked(*seen)
        _, actions, *remembered = act(*seen)
        if remembered:
            memory[who] = remembered[0]
        return actions

    return play


def evaluate(play, envs, episodes, seed, steps=math.inf):
    """Returns, lengths and successes (nan where the env tells none) of each agent's first episodes, equally many of
    every agent: short ones don't crowd out the long. play(obs, infos, who, begins): actions of the slots `who`;
    `begins` says whose episode is new."""
    space, n = envs.single_action_space, envs.num_envs
    left = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    total, length, begins, results = np.zeros(n), np.zeros(n, int), np.ones(n, bool), []
    actions = np.zeros((n, *space.shape), space.dtype)
    obs, infos = envs.reset(seed=seed)
    while left.any() and steps > 0:
        who, steps = np.flatnonzero(infos["ready"]), steps - 1
        if len(who):
            actions[who] = play(obs, infos, who, begins).reshape(-1, *space.shape)
            begins[who] = False
        obs, reward, terminated, truncated, infos = envs.step(actions)
        done = terminated | truncated
        begins |= done
        total += reward
        length += infos["closed"]
        for slot in np.flatnonzero(done):
            if left[slot]:
                results.append((total[slot], length[slot], infos.get("is_success", {}).get(slot, math.nan)))
                left[slot] -= 1
            total[slot], length[slot] = 0, 0
    return np.array(results).T


def mean_returns(make_envs, args, play, ways, episodes=8, steps=3_000):
    """Of several ways to play, by name, in envs of their own; without a way in which some episode did not end."""
    seed, means = args.seed + 1000, {}
    with closing(make_envs(replace(args, num_envs=episodes), seed)[0]) as envs:
        for name, way in ways.items():
            results = evaluate(play(envs.num_envs, way), envs, episodes, seed, steps)
            if len(results) and len(results[0]) == episodes:
                means[name] = results[0].mean()
    return means


def film(args, make_envs, play, agent, spec, path):
    """A video of the deterministic policy, in an env of its own: an episode of a gymnasium env, or half a minute of a
    bundled scene."""
    path.parent.mkdir(exist_ok=True)
    try:
        envs, _ = make_envs(args, args.seed, film=path)
    except ValueError as error:
        raise ValueError(f"--capture-video: {error}") from None
    with closing(envs):
        scene = engine(args) is not None
        steps = getattr(envs, "film_steps", FILM_STEPS) if scene else math.inf
        evaluate(play(agent, spec, envs.num_envs), envs, 10**9 if scene else 1, args.seed, steps)


class Exported(nn.Module):
    """The graph that Unity's inference reads: an input for each sensor, and for the mask; the statistics inside,
    actions as the env got them."""

    def __init__(self, agent, spec):
        super().__init__()
        self.agent, self.spec = agent, spec
        branches = self.branches = spec.get("branches", [])
        kind, self.size = "continuous", [float(spec.get("action_dim", 0))]
        if branches:
            kind, self.size = "discrete", [[float(b) for b in branches]]
        self.inputs = [f"obs_{i}" for i in range(len(spec["sensors"]))] + ["action_masks"] * bool(branches)
        self.outputs = [f"{kind}_actions", f"deterministic_{kind}_actions"]
        self.outputs += ["version_number", "memory_size", f"{kind}_action_output_shape"]
        self.memory = spec.get("memory", 0)  # what the policy remembers; the value's memory stays behind
        if self.memory:
            self.inputs, self.outputs = [*self.inputs, "recurrent_in"], [*self.outputs, "recurrent_out"]

    def example(self):
        """Images are (batch, channel, height, width)."""
        out = []
        for sensor in self.spec["sensors"]:
            if isinstance(sensor, str):
                height, width, channels = self.spec["images"][sensor]
                out.append(torch.zeros(1, self.spec["stack"] * channels, height, width))
            else:
                out.append(torch.zeros(1, sensor))
        out += [torch.ones(1, sum(self.branches))] * bool(self.branches)
        return (*out, torch.zeros(1, 1, self.memory)) if self.memory else tuple(out)

    def forward(self, *inputs):
        given = dict(zip(range(len(self.spec["sensors"])), inputs, strict=False))
        vectors = [given[i] for i, size in enumerate(self.spec["sensors"]) if not isinstance(size, str)]
        obs = [torch.cat(vectors, 1) if vectors else inputs[0].new_zeros(1, 0)]
        if "images" in self.spec:  # they come from 0 to 1
            places = {name: i for i, name in enumerate(self.spec["sensors"]) if isinstance(name, str)}
            images = [given[places[name]] * 255 for name in self.spec["images"]]
            obs = [images, *obs, inputs[-1] if self.branches else None]
        elif self.branches:
            obs = [*obs, inputs[len(self.spec["sensors"])]]
        if self.memory:
            obs.append(torch.cat([inputs[-1][:, 0], torch.zeros_like(inputs[-1][:, 0])], 1))
        which = 0 if self.branches else 1  # choices count from 0 here, wherever the env's begin
        ways = [self.agent.act(*obs, deterministic=deterministic) for deterministic in (False, True)]
        constants = torch.tensor([3.0]), torch.tensor([float(self.memory)]), torch.tensor(self.size)
        remembered = [ways[0][-1][:, None, : self.memory]] if self.memory else []
        return ways[0][which], ways[1][which], *constants, *remembered


class ExportedForGodot(nn.Module):
    """The graph that the inference of Godot RL Agents reads: an input for each name of get_obs(), and a state that
    nobody uses. Its output is the actions in a row, deterministic; of choices the largest number is taken."""

    def __init__(self, agent, spec):
        super().__init__()
        self.agent, self.sizes, self.branches = agent, spec["sensors"], spec.get("branches", [])
        self.inputs, self.outputs = [*spec["inputs"], "state_ins"], ["output", "state_outs"]

    def example(self):
        return (*(torch.zeros(1, size) for size in self.sizes), torch.zeros(1))

    def forward(self, *inputs):
        *obs, state = inputs
        obs = torch.cat(obs, 1) if len(obs) > 1 else obs[0]
        if not self.branches:
            return self.agent.act(obs, deterministic=True)[1], state + 0
        chosen = self.agent.act(obs, torch.ones(1, sum(self.branches)), deterministic=True)[0]
        where = [torch.arange(size) == choice for size, choice in zip(self.branches, chosen.split(1, 1), strict=True)]
        return 100.0 * torch.cat(where, 1), state + 0  # so sure that a choice drawn by softmax is the same


def fits_godot(spec):
    """Its plugin's inference has neither images nor memory."""
    return "inputs" in spec and "images" not in spec and not spec.get("memory")


def export(agent, spec, path):
    """Opset 9, as ML-Agents writes it: Unity knows 7 to 15, and torch's newer exporter none of them."""
    graph = (ExportedForGodot if fits_godot(spec) else Exported)(agent, spec).eval()
    names = {"input_names": graph.inputs, "output_names": graph.outputs}
    batches = {name: {0: "batch"} for name in (*graph.inputs, *graph.outputs[:2], "recurrent_out")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of age, and that constants are constant
        with replacing(path) as temporary:
            settings = {"dynamo": False, "opset_version": 9, "dynamic_axes": batches}
            torch.onnx.export(graph, graph.example(), temporary, **settings, **names)


NO_PLACE = {"bins": "continuous actions in bins", "window": "a transformer's last observations"}
# What envs/godot/policy.gd can do: the operations of ONNX, on vectors.
OPERATIONS = {
    "Gemm",
    "Concat",
    "Slice",
    "ReduceMean",
    "ArgMax",
    "LogSoftmax",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Equal",
}
OPERATIONS |= {"Clip", "Elu", "Relu", "Tanh", "Sigmoid", "Sqrt", "Cast"}


def export_for_gdscript(model, path):
    """The exported graph as JSON, step by step, for policy.gd."""
    import onnx

    graph, constants, steps = onnx.load(model).graph, {}, []
    numbers = lambda tensor: onnx.numpy_helper.to_array(tensor).astype(float)
    constants = {tensor.name: numbers(tensor) for tensor in graph.initializer}
    for node in graph.node:
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        kind, inputs, (out, *others) = node.op_type, list(node.input), node.output
        if kind in ("Identity", "Constant"):
            constants[out] = numbers(given["value"]) if kind == "Constant" else constants[inputs[0]]
        elif kind == "MatMul" and inputs[1] in constants:  # a layer without a bias
            zeros = f"{out}.bias"
            constants[inputs[1]], constants[zeros] = constants[inputs[1]].T, np.zeros(constants[inputs[1]].shape[1])
            steps.append({"op": "Gemm", "in": [*inputs, zeros], "out": out})
        elif kind == "Split":
            ends = np.cumsum(given["split"]).tolist()
            for name, end, size in zip((out, *others), ends, given["split"], strict=True):
                steps.append({"op": "Slice", "in": inputs, "out": name, "start": end - size, "end": end})
        elif kind not in OPERATIONS:
            raise ValueError(f"it has {kind}")
        elif kind == "Slice":
            steps.append({"op": kind, "in": inputs, "out": out, "start": given["starts"][0], "end": given["ends"][0]})
        else:
            limits = {name: given[name] for name in ("min", "max", "alpha") if name in given and kind != "Gemm"}
            steps.append({"op": kind, "in": inputs, "out": out} | limits)
    needed = {"output"}
    for step in reversed(steps):
        needed |= set(step["in"]) if step["out"] in needed else set()
    constants = {
        name: np.atleast_1d(x.squeeze()) if x.ndim < 2 or 1 in x.shape[:1] else x for name, x in constants.items()
    }
    program = {"inputs": [x.name for x in graph.input if x.name in needed]}
    program["constants"] = {name: x.tolist() for name, x in constants.items() if name in needed}
    program["steps"] = [step for step in steps if step["out"] in needed]
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(program))


def use(args, path, state, script, Agent, make_envs, describe, play):
    """Export, or evaluate, an agent that was saved: its statistics come with it, and nothing changes them."""
    agent, spec = Agent(state["spec"], args), state["spec"]
    put_back(agent, state["kept"]["agent"], path)
    agent.eval()
    if state["fingerprint"] != fingerprint(script):
        print(
            f"{Path(script).name} is not what it was when {path} was written: {path.parent / Path(script).name} is",
            flush=True,
        )
    if args.export:
        for key, what in NO_PLACE.items():
            if spec.get(key):
                raise ValueError(f"--export: Unity's layout of a model has no place for {what}")
        target = path.with_name("policy.onnx")
        try:
            export(agent, spec, target)
        except (OSError, RuntimeError) as error:  # a full disk; a layer that opset 9 does not have
            raise ValueError(f"{target} can't be written: {str(error).splitlines()[0]}") from None
        if not fits_godot(spec):
            print(f"Wrote {target}: drop it into a Unity project, and into the Model field of its Behavior Parameters")
            return
        print(f"Wrote {target}: give it to the plugin's Sync node as Onnx Model Path, in a Godot with .NET")
        try:
            export_for_gdscript(target, target.with_suffix(".json"))
            print(f"Wrote {target.with_suffix('.json')}: for any Godot, with envs/godot/policy.gd")
        except ValueError as error:
            print(f"Wrote no policy.json: {error}, which envs/godot/policy.gd does not know")
        return
    agent.to(args.device)
    with closing(make_envs(replace(args, max_restarts=0), args.seed)[0]) as envs:
        for key, there in describe(args, envs).items():
            if plain(there) != spec[key]:
                raise ValueError(f"{path} has {key} {spec[key]}, the env has {there}")
        returns, lengths, successes = evaluate(play(agent, spec, envs.num_envs), envs, args.eval_episodes, args.seed)
    line = f"{path} after {state['global_step']:,} decisions, {len(returns)} episodes"
    line += f" of {lengths.mean():.0f} decisions on average: return {returns.mean():.2f} ± {returns.std():.2f}"
    line += f", from {returns.min():.2f} to {returns.max():.2f}"
    print(line if np.isnan(successes).any() else f"{line}; success {successes.mean():.1%}")
    if args.capture_video:
        video = path.parent / "videos" / "evaluation.mp4"
        film(args, make_envs, play, agent, spec, video)
        print(f"Wrote {video}")
