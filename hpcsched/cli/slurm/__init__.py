"""Slurm's names for the commands: sbatch, squeue, scancel, sacct, sinfo, scontrol and the rest.

The same code as our own commands with other defaults: Slurm's formats, its texts on standard error, its exit statuses.
They are found only by those who put the directory of ``hpcsched slurm-path`` on their PATH.
"""

from __future__ import annotations

import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence

from hpcnode.commands import slurm_help
from hpcsched.cli.errors import FAILED, run_command
from hpcsched.cli.options import Command, Option, Words
from hpcsched.errors import HpcschedError, NotFoundError, UnavailableError, UsageError

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start

if TYPE_CHECKING:
    from hpcsched.jobscript.options import Option as JobOption

# ----- what all commands with Slurm's names have in common: the version that they announce, and how they fail
# Clients match these texts, so they are Slurm's to the letter; what there is to say beyond them follows on a line of its
# own. The version is below 23.11: clients then use neither the external launcher nor the later JSON.
#
# Source: the commands of Slurm 22.05 and 23.02; ``getopt_long(3)``.


SLURM_VERSION = "23.02.7"
NO_CONTACT = "Unable to contact slurm controller (connect failure)"
INVALID_JOB = "Invalid job id specified"

# Options that every command takes and that mean nothing in a cluster that is alone.
ELSEWHERE = (
    Option("clusters", "M", "NAMES", "there is one cluster", aliases=("cluster",)),
    Option("federation", help="there is one cluster"),
    Option("local", help="there is one cluster"),
    Option("sibling", help="there is one cluster"),
    Option("noconvert", help="numbers are never rounded"),
)
USAGE = Option("usage", help="show the options in short")


class Face(namedtuple("Face", "command contact")):
    """A command with Slurm's name. `contact`: with which words it begins when the controller does not answer."""

    __slots__ = ()

    command: Command
    contact: str


def run_face(face: Face, work: Callable[[Words], int], argv: Sequence[str] | None) -> int:
    """Run the command as Slurm's would run, and return its exit status."""

    name = face.command.name
    options = {one.name: one for one in (*face.command.options, USAGE)}
    command = face.command._replace(options=tuple(options[one] for one in slurm_help.ordered(name, options)))

    def here(words: Words) -> int:
        if words.has("usage"):
            sys.stdout.write(usage_text(command.name, command.options, *command.usage[0].split()[1:]))
            return 0
        if words.has("clusters"):
            from hpcsched.cli.options import refuse_others  # few need it

            refuse_others(words.listed("clusters"))
        return work(words)

    return run_command(
        command,
        here,
        argv,
        explain=lambda name, error: explained(name, error, face.contact),
        version=lambda name: print(f"slurm {SLURM_VERSION}"),
    )


def usage_text(name: str, options: Iterable[Option | JobOption], *operands: str) -> str:
    """Return what ``--usage`` prints: each option with its value in brackets, in Slurm's order."""
    known = {option.name: option for option in options}
    words = [
        slurm_help.usage_word(one.name, one.short, one.metavar)
        for one in map(known.get, slurm_help.ordered(name, known))
        if one
    ]
    return slurm_help.usage_text(name, [*words, *operands])


def look_again(words: Words, look: Callable[[Words], int]) -> int:
    """Look once, or with --iterate again and again until interrupted; there are no operands. Raises UsageError."""
    if words.operands:
        raise UsageError("", getopt=f"error: Unrecognized option: {words.operands[0][:60]}")
    if not words.has("iterate"):
        return look(words)
    pause_s = words.number("iterate", 1, at_least=1)
    while True:
        look(words)
        sys.stdout.write("\n")
        sys.stdout.flush()
        time.sleep(pause_s)


def explained(name: str, error: HpcschedError, contact: str) -> tuple[str, int]:
    """Return what Slurm's command says of an error, and its exit status."""
    if isinstance(error, UsageError) and error.getopt:
        return f'{name}: {error.getopt}\nTry "{name} --help" for more information', FAILED
    if isinstance(error, UnavailableError) and not error.by_controller:
        return f"{contact}: {NO_CONTACT}\n{name}: error: {error}", FAILED
    if isinstance(error, NotFoundError) and str(error).startswith(INVALID_JOB):
        return f"{contact}: {INVALID_JOB}", FAILED
    return f"{name}: error: {error}", FAILED


def with_names(options: Sequence[Option], names: str) -> tuple[Option, ...]:
    """Return those of `options` that `names` (with spaces between) asks for: what both faces of a command have."""
    wanted = names.split()
    found = {option.name: option for option in options}
    return tuple(found[name] for name in wanted)
