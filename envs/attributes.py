"""Plain attributes of an env: numbers, strings, None and small arrays, as a checkpoint keeps them.

A training loop can change such an attribute, for example the gravity of a curriculum. `envs.sync` remembers the
attributes of each running episode, so that a resumed run replays the episode with the same values.

    attributes = read(env)                      the values now, by name
    changes = differences(attributes, others)   the values in `others` that differ, encoded for JSON and torch.save
    write(env, changes)                         set them
"""

import numpy as np

MAX_ARRAY_SIZE = 64  # numbers; larger arrays are not remembered
PLAIN_TYPES = frozenset({int, float, bool, str, type(None)})
NUMBER_KINDS = "biuf"  # numpy's bool, int, uint and float
PLAIN_DESCRIPTION = f"numbers, strings, None and arrays of at most {MAX_ARRAY_SIZE} numbers"


def is_plain(value):
    """Return whether a checkpoint can keep the value."""
    if type(value) in PLAIN_TYPES:
        return True
    if isinstance(value, (np.generic, np.ndarray)):
        return value.dtype.kind in NUMBER_KINDS and value.size <= MAX_ARRAY_SIZE
    return False


def read(env):
    """Return the plain attributes of `env.unwrapped` by name.

    An array is returned as a pair, the array itself and a copy of it: an env may write into its arrays, and `write`
    must know whether the attribute is still the same array.
    """
    attributes = {}
    for name, value in getattr(env.unwrapped, "__dict__", {}).items():
        if type(value) in PLAIN_TYPES:
            attributes[name] = value
        elif is_plain(value):
            attributes[name] = (value, value.copy()) if isinstance(value, np.ndarray) else value
    return attributes


def differences(before, after, always=()):
    """Return the attributes of `after` that are not in `before` or have another value there, encoded.

    always: names of attributes to return in any case
    """
    changes = {}
    for name, value in after.items():
        if name in always or name not in before or not equal(before[name], value):
            if isinstance(value, tuple):
                array, copy = value
                same_array = isinstance(before.get(name), tuple) and before[name][0] is array
                changes[name] = encode(copy, in_place=same_array)
            else:
                changes[name] = encode(value)
    return changes


def equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return equal_arrays(a[1], b[1])
    return a == b or (a != a and b != b)  # NaN equals NaN here


def equal_arrays(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def encode(value, in_place=False):
    """Return a plain value in a form that JSON and torch.save can write. numpy's types are kept: they affect rounding.

    in_place: write the values into the array that the env has, because other attributes may be views of it
    """
    if isinstance(value, np.ndarray):
        values = value.ravel().tolist()
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "values": values,
            "in_place": in_place,
        }
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.str, "number": value.item()}
    return value


def decode(value):
    """Return the value that `encode` was given."""
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return np.dtype(value["dtype"]).type(value["number"])
    return np.array(value["values"], value["dtype"]).reshape(value["shape"])


def write(env, changes):
    """Set the encoded attributes `changes` of `env.unwrapped`. Return the names of those that had another value."""
    current_values = getattr(env.unwrapped, "__dict__", {})
    written = []
    for name, encoded in changes.items():
        current = current_values.get(name)
        if not is_plain(current):
            continue  # an object now, for example a renderer: the env made it itself
        value = decode(encoded)
        both_arrays = isinstance(value, np.ndarray) and isinstance(current, np.ndarray)
        unchanged = equal_arrays(current, value) if both_arrays else equal(current, value)
        if name not in current_values or not unchanged:
            assign(env, name, encoded)
            written.append(name)
    return written


def assign(env, name, encoded):
    """Set one encoded attribute of `env.unwrapped`."""
    value = decode(encoded)
    if isinstance(value, np.ndarray) and encoded["in_place"]:
        current = getattr(env.unwrapped, name, None)
        if (
            isinstance(current, np.ndarray)
            and current.shape == value.shape
            and current.flags.writeable
        ):
            current[...] = value
            return
    setattr(env.unwrapped, name, value)
