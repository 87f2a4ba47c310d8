"""--init-from: a new run that starts with the weights and statistics of another run.

Modules are taken: the agent with its observation statistics, and every other module that checkpoints keep, such as
return_rms. Optimizers, schedulers, counters, lessons, replay buffers and episodes start new. Tensors are matched by
name, shape and type. The specs of the envs are compared too: two branches with two and four choices have as many logits
as two with three choices each.
"""

import torch
import torch.nn as nn

from onefile_rl.checkpoints import load, not_finite, same_kind
from onefile_rl.engines.printing import printable

SHOWN = 3  # misfits that a message names
LONGEST = 200  # characters of a layout in a message
UNKNOWN = "is in the checkpoint and not in this script"


def read(source, script):
    """Return the path and the content of the checkpoint to start from, of any script.

    source: a run's folder or a checkpoint file
    """
    try:
        return load(source, script, any_script=True)
    except ValueError as error:
        raise ValueError(f"--init-from: {error}") from None


@torch.no_grad()
def start_from(path, state, keep, spec, partly):
    """Copy weights and statistics of a checkpoint into the modules of a new run.

    keep: what checkpoints of the new run keep, by name. spec: what the agent of the new run was made of. partly: start
    what does not fit new, instead of an error
    """
    for what, (theirs, ours) in other_layouts(state["spec"], spec).items():
        layouts = f"the {what} are {shortened(theirs)} in the checkpoint and {shortened(ours)} here"
        why = "the sizes are equal and the meanings are not"
        raise ValueError(f"--init-from {path}: {layouts}: {why}, leave --init-from out")
    taken = []
    misfits = {}
    new = []
    for name, thing in keep.items():
        saved = state["kept"].get(name)
        prefix = "" if name == "agent" else f"{name}."
        if isinstance(thing, nn.Module):
            fit, problems = match(tensors_of(thing), parts_of(thing), saved, prefix)
            problems = {part.removesuffix(".") or name: x for part, x in problems.items()}
        elif name.startswith("parameters of "):  # of an optimizer, outside of all modules
            fit, problems = match(thing, {key: key for key in thing}, saved, prefix)
        else:
            new.append(name)
            continue
        taken += fit
        misfits |= problems

    if misfits and not partly:
        named = "; ".join(f"{name} {problem}" for name, problem in list(misfits.items())[:SHOWN])
        more = f"; and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        fix = "--init-partly takes what fits, and starts the rest new"
        raise ValueError(f"--init-from {path} does not fit: {named}{more}: {fix}")
    of_agent = set(tensors_of(keep["agent"]))
    if not any(name in of_agent for name, _, _ in taken):
        raise ValueError(f"--init-from {path}: nothing of its agent fits, leave --init-from out")
    for name in not_finite({name: theirs.to(ours.dtype) for name, ours, theirs in taken}, ""):
        raise ValueError(f"--init-from {path}: {printable(name)} is not finite")
    for _, ours, theirs in taken:
        ours.copy_(theirs)

    started = f"Starting from {path} after {state['global_step']:,} decisions"
    print(f"{started}; new: {', '.join(new)}" if new else started, flush=True)
    for name, problem in misfits.items():
        what = "is not used" if problem == UNKNOWN else "starts new"
        print(f"{printable(name)} {what}: it {problem}", flush=True)
    for name in sorted(state["kept"].keys() - keep.keys()):
        print(f"{path} has {printable(name)}, which this script does not have", flush=True)
    for name in state["agent_attributes"]:
        attribute = printable(name).lstrip(":").replace(":", ".")
        print(f"The attribute {attribute} of the agent starts with the script's value", flush=True)


def tensors_of(module):
    """Return the parameters and buffers of a module that checkpoints keep, by name."""
    return {name: x for name, x in module.state_dict().items() if isinstance(x, torch.Tensor)}


def parts_of(module):
    """Return, by the name of each tensor of a module, the part that must be taken or started new as a whole.

    A layer is a part: a bias belongs to its weight, and a mean to its variance and count. The part "" is the module
    itself.
    """
    parts = {}
    for path, layer in module.named_modules():
        is_layer = next(layer.children(), None) is None
        for name, _ in [
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        ]:
            full_name = f"{path}.{name}" if path else name
            parts[full_name] = path if is_layer else full_name
    return parts


def other_layouts(theirs, ours):
    """Return how the specs of two envs give tensors of the same size another meaning: both layouts, by what differs.

    Other sizes are found when the tensors are compared. Bounds of actions may differ.
    """
    found = {}
    if num_outputs(theirs) == num_outputs(ours):
        found["actions"] = (actions_of(theirs), actions_of(ours))
    if theirs.get("obs_dim") == ours.get("obs_dim"):
        found["entities"] = tuple(plain_lists(x.get("entities", [])) for x in (theirs, ours))
    if num_channels(theirs) == num_channels(ours):
        found["images"] = (images_of(theirs), images_of(ours))
    return {what: layouts for what, layouts in found.items() if layouts[0] != layouts[1]}


def plain_lists(x):
    """Return tuples as lists, so that equal ones compare equal."""
    return [plain_lists(each) for each in x] if isinstance(x, (list, tuple)) else x


def actions_of(spec):
    """Return the number of continuous actions, the choices of each branch and the first number of each."""
    branches = plain_lists(spec.get("branches", []))
    is_discrete = branches and "low" not in spec
    return {
        "continuous": 0 if is_discrete else spec.get("action_dim", 0),
        "branches": branches,
        "start": plain_lists(spec.get("start", [0] * len(branches))),
    }


def num_outputs(spec):
    """Return the size of the layer from which the actions are computed."""
    actions = actions_of(spec)
    return actions["continuous"] + sum(actions["branches"])


def images_of(spec):
    """Return (number of last images, height, width, channels) of each camera."""
    return [(spec.get("stack", 1), *shape) for shape in spec.get("images", {}).values()]


def num_channels(spec):
    """Return the size of the stacked images of each camera, as its encoder gets them."""
    return [(h, w, stack * channels) for stack, h, w, channels in images_of(spec)]


def shortened(layout):
    return printable(layout)[:LONGEST]


def match(here, parts, saved, prefix):
    """Compare tensors by name. Return (name, ours, theirs) of those that fit, and why others do not, by part.

    prefix: of the names in messages
    """
    saved = saved if isinstance(saved, dict) else {}
    saved = {name: x for name, x in saved.items() if isinstance(x, torch.Tensor)}
    problems = {}
    for name, ours in here.items():
        problem = misfit(ours, saved.get(name))
        if problem:
            part = parts.get(name, name)
            detail = name.removeprefix(f"{part}.")
            text = problem if part == name else f"has {detail} that {problem}"
            problems.setdefault(part, text)
    fit = [
        (prefix + name, ours, saved[name])
        for name, ours in here.items()
        if parts.get(name, name) not in problems
    ]
    unknown = {name: UNKNOWN for name in saved if name not in here}
    return fit, {prefix + name: problem for name, problem in {**problems, **unknown}.items()}


def misfit(ours, theirs):
    """Return why a tensor can't be taken, or None."""
    if theirs is None:
        return "is not in the checkpoint"
    if ours.shape != theirs.shape:
        return f"is {list(theirs.shape)} in the checkpoint and {list(ours.shape)} here"
    if not same_kind(ours, theirs):
        return f"is {theirs.dtype} in the checkpoint and {ours.dtype} here"
    return None


def report_settings(path, state, args, script, common):
    """Print which arguments of the script the other run had with other values: they may belong to its weights.

    common: names of arguments that do not matter
    """
    if state["script"] != script:
        print(f"{path} was written by {printable(state['script'])}.py", flush=True)
    different = [
        f"{name} {printable(value)} (here {args[name]})"
        for name, value in state["args"].items()
        if name in args and name not in common and value != args[name]
    ]
    if different:
        print(f"{path} was trained with {', '.join(different)}", flush=True)
