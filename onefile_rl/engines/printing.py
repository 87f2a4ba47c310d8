"""Text on the terminal: what a file contains can't control the terminal, and every encoding of the output works."""

import codecs
import os
import sys


def printable(text):
    """Return the text with control characters as escapes, on one line, so that a terminal does not obey them."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in str(text)
    )


def printable_lines(text):
    """Return the lines of a text, each made printable."""
    return "\n".join(map(printable, str(text).split("\n")))


def replace_unknown(error):
    """Return what is printed for characters that the output can't encode, and where to continue."""
    unknown = error.object[error.start : error.end]
    return "".join("+-" if c == "±" else "?" for c in unknown), error.end


codecs.register_error("replace_unknown", replace_unknown)


def replace_missing_streams():
    """Use os.devnull for a standard output or error that the caller has closed, as with `>&-`."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file to be opened gets this number, and a child process prints into it
            devnull = os.open(os.devnull, os.O_WRONLY)
            if devnull != number:
                os.dup2(devnull, number)
                os.close(devnull)
        setattr(sys, name, open(os.devnull, "w", errors="replace"))


def accept_any_encoding():
    """Let print() replace characters that the output can't encode, such as the sign ± on an ASCII terminal. Without an
    output, what is printed is dropped."""
    replace_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace_unknown")
