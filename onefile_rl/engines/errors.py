"""Tells errors that this project raises on purpose, with a message for the user, from errors in other code."""

import dis
from pathlib import Path

from onefile_rl.engines.scenes import EngineError

ROOT = Path(__file__).resolve().parents[2]
OWN_FOLDERS = (ROOT / "onefile_rl", ROOT / "envs")
OWN_FILES = (ROOT / "unity_vec_env.py", ROOT / "godot_vec_env.py")
RAISE = dis.opmap["RAISE_VARARGS"]


def raised_at(error):
    """Return the innermost entry of an exception's traceback: where it was raised."""
    traceback = error.__traceback__
    while traceback.tb_next:
        traceback = traceback.tb_next
    return traceback


def is_own(error, script):
    """Return whether an exception was raised in a file of this project or in the script."""
    file = Path(raised_at(error).tb_frame.f_code.co_filename).resolve()
    own = file in (*OWN_FILES, Path(script).resolve())
    return own or any(folder in file.parents for folder in OWN_FOLDERS)


def is_message(error, script):
    """Return whether an exception was raised by a `raise` statement of this project or of the script.

    Its text is then all that the user needs. Any other exception, for example the ValueError of math.sqrt(-1) in an
    env, needs its traceback.
    """
    traceback = raised_at(error)
    code = traceback.tb_frame.f_code
    return is_own(error, script) and code.co_code[traceback.tb_lasti] == RAISE


def is_out_of_memory(error):
    """Return whether an exception says that there is not enough memory. torch raises a RuntimeError on the CPU."""
    is_torch = isinstance(error, RuntimeError) and "allocate" in str(error)
    return isinstance(error, MemoryError) or is_torch


def describe_out_of_memory(error):
    """Return a line about an exception for which is_out_of_memory() is true."""
    traceback = raised_at(error)
    place = f"{traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno}"
    reason = (str(error).splitlines() or [""])[0]
    given = f" ({reason})" if reason else ""
    fix = "end other programs, or use fewer envs or smaller batches"
    return f"{place}: not enough memory{given}: {fix}"


def describe_exit(error):
    """Return a line about a SystemExit of other code, for example of sys.exit() in an env: a run that ends this way is
    not complete, whatever the exit code says."""
    traceback = raised_at(error)
    place = f"{traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno}"
    reason = str(error).split("\n")[0]
    given = f" ({reason})" if reason else ""
    return f"{place} ended the program with sys.exit(){given}: raise an error there instead, or end the episode"


def describe(error, script):
    """Return all that the user needs to know about an exception, as text, or None if its traceback is needed."""
    if isinstance(error, SystemExit):
        return describe_exit(error)
    if is_out_of_memory(error):
        return describe_out_of_memory(error)
    if isinstance(error, ValueError | EngineError) and is_message(error, script):
        return str(error)
    return None
