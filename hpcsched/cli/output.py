"""How commands write: colour or none, JSON, times. Plain text; colour and bars only on a terminal.

What a user chose (a job's name, a reason) may hold anything: `clean` keeps it from moving the terminal's cursor or from
looking like a second line. Nothing is ever cut, wrapped or coloured where the output is no terminal. Knows no jobs or nodes.
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
    """Say whether a person sees the output."""
    return sys.stdout.isatty()


def terminal_width() -> int:
    """Return how many columns the terminal has that shows the output, 0 if that is not known."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def wants_colour() -> bool:
    """Say whether the output may have colours: on a terminal that knows them, unless NO_COLOR is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def print_json(answer: Json) -> None:
    """Print an answer as JSON: on one line, spread out on a terminal."""
    json.dump(answer, sys.stdout, indent=2 if is_terminal() else None)
    sys.stdout.write("\n")


def bar(part: float, whole: float, width: int = 10) -> str:
    """Return how much of `whole` is in use: ``[####------]``."""
    filled = 0 if whole <= 0 else min(width, round(width * part / whole))
    if part > 0 and filled == 0:
        filled = 1
    return "[" + "#" * filled + "-" * (width - filled) + "]"


# ----- a command that ends or requeues the very job that it runs in
# The job's processes get SIGTERM at once, the command among them, perhaps before it has read its answer: whoever called it
# would take that for a failure of the request. So it lets that signal pass; what does not end by itself is killed later.


def outlive_its_end() -> None:
    """From now on SIGTERM does not end this command, if it runs in a job."""
    if os.environ.get("HPCSCHED_JOB_ID") or os.environ.get("SLURM_JOB_ID"):
        import signal  # takes as long as a tenth of Python's start

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
