"""Environment parameters of gymnasium envs: --env-parameters and the lessons of a curriculum.

A parameter is an argument of the env's constructor, as in --env-kwargs, or an attribute of `env.unwrapped`. Before each
episode it gets its value: a number, or one that its sampler draws. An env is made again if an argument has changed.
"""

import difflib
import inspect
import numbers

import numpy as np

ARGUMENT = "argument"
ATTRIBUTE = "attribute"


def find_places(env, names):
    """Return for each parameter whether it is an ARGUMENT or an ATTRIBUTE of the env, and whether it is an integer.

    The constructor is preferred: it may compute other attributes from its arguments.
    """
    places = {}
    if not names:
        return places
    arguments = arguments_of(env)
    attributes = attributes_of(env)
    for name in names:
        if name in arguments:
            places[name] = (ARGUMENT, is_integer(arguments[name]))
        elif name in attributes:
            places[name] = (ATTRIBUTE, is_integer(attributes[name]))
        else:
            known = {**arguments, **attributes}
            public = [other for other in known if not other.startswith("_")]
            near = difflib.get_close_matches(name, public, 3) or sorted(public)[:12]
            there = f"it has {', '.join(near)}" if near else "it has no numbers at all"
            raise ValueError(
                f"environment parameter {name}: {env.spec.id} has no such argument or attribute; {there}"
            )
    return places


def arguments_of(env):
    """Return the numbers among the arguments of the env's constructor, by name. None: no value is known."""
    given = env.spec.kwargs
    arguments = {}
    for name, parameter in inspect.signature(type(env.unwrapped).__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        value = given.get(name, parameter.default)
        if value is parameter.empty or value is None:
            arguments[name] = None
        elif is_number(value):
            arguments[name] = value
    return arguments


def attributes_of(env):
    """Return the numbers among the attributes of `env.unwrapped` that can be set, by name."""
    base = env.unwrapped
    found = {name: x for name, x in getattr(base, "__dict__", {}).items() if is_number(x)}
    for name, x in inspect.getmembers_static(type(base)):
        settable = isinstance(x, property) and x.fset is not None
        if name not in found and (settable or is_number(x)):
            value = getattr(base, name, None)
            if is_number(value):
                found[name] = value
    return found


def is_number(x):
    return isinstance(x, numbers.Real) and not isinstance(x, (bool, np.bool_))


def is_integer(x):
    return isinstance(x, numbers.Integral)


def draw(parameters, places, rng):
    """Return a value of each parameter, by name. Values of integers are rounded.

    parameters: floats and Samplers, by name. places: as find_places() returns them
    """
    values = {}
    for name, parameter in parameters.items():
        value = parameter if isinstance(parameter, float) else parameter.draw(rng)
        _, integer = places[name]
        values[name] = round(value) if integer else value
    return values


def typical_values(parameter):
    """Return a number itself, the ends of the ranges of a sampler, or the mean of gaussian."""
    if isinstance(parameter, float):
        return [parameter]
    return parameter.numbers[:1] if parameter.kind == "gaussian" else parameter.numbers


def arguments_among(values, places):
    """Return the values that are arguments of the constructor."""
    return {name: value for name, value in values.items() if places[name][0] == ARGUMENT}


def set_attributes(env, values, places):
    """Set the values that are attributes."""
    for name, value in values.items():
        if places[name][0] == ATTRIBUTE:
            setattr(env.unwrapped, name, value)
