"""The numbers that an env may return: a single invalid one would spoil weights or running statistics for good."""

import numpy as np

# Sums of such numbers fit into single precision, and their squares into double precision
LARGEST = 1e30
# A sum of squares up to this number, which is below the largest of single precision, has no such number
SAFE_SQUARES = 1e36


def find_invalid(rows):
    """Return the row and the column of the first number that is not finite or beyond LARGEST, None if there is none.

    `rows` is a contiguous array of floats. The sum of squares is the fastest test there is. If it is large, each number
    is compared.
    """
    if np.vdot(rows, rows) <= SAFE_SQUARES:
        return None
    valid = np.abs(rows.reshape(len(rows), -1)) <= LARGEST  # False for NaN too
    return None if valid.all() else tuple(np.argwhere(~valid)[0].tolist())


def describe(number):
    """Return a number that is not valid as text for a message."""
    return f"{number}, and must be at most {LARGEST:g}" if np.isfinite(number) else f"{number}"
