"""Shared parts of the commands with Slurm's names: version, accepted options, and errors.

Clients match these texts, so they are exactly Slurm's. Additional information follows on a separate
line. The version is below 23.11: clients then use neither the external launcher nor the later JSON.

Sources: the commands of Slurm 22.05 and 23.02; ``getopt_long(3)``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence

from hpcnode.commands import slurm_text
from hpcsched.commands.options import FAILED, Command, Option, Words, split_list
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError, UsageError

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from hpcsched.commands.call import Call
    from hpcsched.jobscript.options import ScriptOption as JobOption

SLURM_VERSION = "23.02.7"
NO_CONTACT = "Unable to contact slurm controller (connect failure)"
INVALID_JOB = "Invalid job id specified"

# Options of every command that have no effect in a single cluster.
ELSEWHERE = (
    Option("clusters", "M", "NAMES", "there is one cluster", aliases=("cluster",)),
    Option("federation", help="there is one cluster"),
    Option("local", help="there is one cluster"),
    Option("sibling", help="there is one cluster"),
    Option("noconvert", help="numbers are never rounded"),
)
USAGE = Option("usage", help="show the options in short")


class Face(namedtuple("Face", "command contact")):
    """A command with Slurm's name. `contact`: start of its error if the controller is silent."""

    __slots__ = ()

    command: Command
    contact: str


def with_usage(face: Face) -> Command:
    """Return the face's command with ``--usage``, its options in Slurm's order."""
    options = {option.name: option for option in (*face.command.options, USAGE)}
    command: Command = face.command._replace(
        options=tuple(options[name] for name in slurm_text.ordered(face.command.name, options))
    )
    return command


def usage_text(name: str, options: Iterable[Option | JobOption], *operands: str) -> str:
    """Return the output of ``--usage``: each option with its value in brackets, in order.

    The order is Slurm's.
    """
    known = {option.name: option for option in options}
    words = [
        slurm_text.usage_word(option.name, option.short, option.metavar)
        for option in map(known.get, slurm_text.ordered(name, known))
        if option
    ]
    return slurm_text.usage_text(name, [*words, *operands])


def explained(name: str, error: HpcschedError, contact: str) -> tuple[str, int]:
    """Return the text of Slurm's command for an error, and its exit status."""
    if isinstance(error, UsageError) and error.getopt:
        return f'{name}: {error.getopt}\nTry "{name} --help" for more information', FAILED
    if isinstance(error, UnavailableError) and not error.by_controller:
        return f"{contact}: {NO_CONTACT}\n{name}: error: {error}", FAILED
    if isinstance(error, NotFoundError) and str(error).startswith(INVALID_JOB):
        return f"{contact}: {INVALID_JOB}", FAILED
    return f"{name}: error: {error}", FAILED


def with_names(options: Sequence[Option], names: str) -> tuple[Option, ...]:
    """Return those of `options` in `names` (separated by spaces), shared by both commands."""
    wanted = names.split()
    found = {option.name: option for option in options}
    return tuple(found[name] for name in wanted)


def clusters_of(text: str) -> list[str]:
    """Return the cluster names in ``--clusters``, without "all" (this cluster)."""
    return [name for name in split_list(text) if name != "all"]


def refuse_others(names: Iterable[str], own: str) -> None:
    """Raise RequestError if one of the clusters `names` is not `own`."""
    other = next((name for name in names if name != own), None)
    if other is not None:
        raise RequestError(f"No cluster '{other[:60]}' known by database.")


async def refuse_other_clusters(text: str, call: Call) -> None:
    """Raise RequestError if ``--clusters`` names a cluster other than the controller's."""
    if named := clusters_of(text):
        refuse_others(named, str((await call.api.get("/v1/ping"))["cluster"]))


def refuse_operands(words: Words) -> None:
    """Raise UsageError if there are operands."""
    if words.operands:
        raise UsageError("", getopt=f"error: Unrecognized option: {words.operands[0][:60]}")
