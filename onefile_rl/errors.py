"""Tells errors that this project raises on purpose, with a message for the user, from errors in other code."""

import dis
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN_FOLDERS = (ROOT / "onefile_rl", ROOT / "envs")
OWN_FILES = (ROOT / "unity_vec_env.py", ROOT / "godot_vec_env.py")
RAISE = dis.opmap["RAISE_VARARGS"]


def is_message(error, script):
    """Return whether an exception was raised by a `raise` statement of this project or of the script.

    Its text is then all that the user needs. Any other exception, for example the ValueError of math.sqrt(-1) in an
    env, needs its traceback.
    """
    traceback = error.__traceback__
    while traceback.tb_next:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    file = Path(code.co_filename).resolve()
    own = file in (*OWN_FILES, Path(script).resolve())
    own = own or any(folder in file.parents for folder in OWN_FOLDERS)
    return own and code.co_code[traceback.tb_lasti] == RAISE
