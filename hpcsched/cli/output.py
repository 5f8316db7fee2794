"""Output of commands: colour, JSON, times. Plain text; colour and bars only on a terminal.

Rules: texts that users chose (job names, reasons) are printed through `clean`, so that they cannot move the cursor or look like
a second line; text is truncated, wrapped and coloured only on a terminal. Knows no jobs or nodes.
Source: NO_COLOR (no-color.org).
"""

from __future__ import annotations

import json
import os
import sys

from hpcsched.client import Json
from hpcsched.listing.text import clean as clean
from hpcsched.listing.text import date_text as date_text
from hpcsched.listing.text import fitted as fitted
from hpcsched.listing.text import when_text as when_text


def is_terminal() -> bool:
    """Return whether the output is a terminal."""
    return sys.stdout.isatty()


def terminal_width() -> int:
    """Return the number of columns of the terminal, 0 if it is not known."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def wants_colour() -> bool:
    """Return whether to use colours: on a terminal that has them, unless NO_COLOR is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def print_json(answer: Json) -> None:
    """Print an answer as JSON: on one line, indented on a terminal."""
    json.dump(answer, sys.stdout, indent=2 if is_terminal() else None)
    sys.stdout.write("\n")


def bar(part: float, whole: float, width: int = 10) -> str:
    """Return a bar with the used fraction of `whole`: ``[####------]``."""
    filled = 0 if whole <= 0 else min(width, round(width * part / whole))
    if part > 0 and filled == 0:
        filled = 1
    return "[" + "#" * filled + "-" * (width - filled) + "]"


# ----- a command that ends or requeues its own job
# The job's processes, including the command, get SIGTERM at once, perhaps before the command has read its answer: its caller
# would see a failure of a request that succeeded. So the command ignores the signal; the job is killed later if need be.


def outlive_its_end() -> None:
    """Ignore SIGTERM from now on, if this command runs in a job."""
    if os.environ.get("HPCSCHED_JOB_ID") or os.environ.get("SLURM_JOB_ID"):
        import signal  # its import takes a tenth of the start of Python

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
