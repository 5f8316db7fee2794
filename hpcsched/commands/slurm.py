"""What the commands with Slurm's names have in common: version, accepted options, and how they fail.

Clients match these texts, so they are Slurm's to the letter; what there is to say beyond them follows on a line of its
own. The version is below 23.11: clients then use neither the external launcher nor the later JSON.

Source: the commands of Slurm 22.05 and 23.02; ``getopt_long(3)``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence

from hpcnode.commands import slurm_text
from hpcsched.commands.options import FAILED, Command, Option, Words, split_list
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError, UsageError

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from hpcsched.commands.call import Call
    from hpcsched.jobscript.options import ScriptOption as JobOption

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
    """A command with Slurm's name. `contact`: the words its error begins with when the controller does not answer."""

    __slots__ = ()

    command: Command
    contact: str


def with_usage(face: Face) -> Command:
    """Return the face's command with ``--usage``, its options in Slurm's order."""
    options = {one.name: one for one in (*face.command.options, USAGE)}
    command: Command = face.command._replace(
        options=tuple(options[one] for one in slurm_text.ordered(face.command.name, options))
    )
    return command


def usage_text(name: str, options: Iterable[Option | JobOption], *operands: str) -> str:
    """Return what ``--usage`` prints: each option with its value in brackets, in Slurm's order."""
    known = {option.name: option for option in options}
    words = [
        slurm_text.usage_word(one.name, one.short, one.metavar)
        for one in map(known.get, slurm_text.ordered(name, known))
        if one
    ]
    return slurm_text.usage_text(name, [*words, *operands])


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


def clusters_of(text: str) -> list[str]:
    """Return the names in the value of ``--clusters``; "all" means this cluster, and is left out."""
    return [name for name in split_list(text) if name != "all"]


def refuse_others(names: Iterable[str], own: str) -> None:
    """Raise RequestError if one of the clusters `names` is not `own`."""
    other = next((name for name in names if name != own), None)
    if other is not None:
        raise RequestError(f"No cluster '{other[:60]}' known by database.")


async def refuse_other_clusters(text: str, call: Call) -> None:
    """Raise RequestError if the value of ``--clusters`` names another cluster than the controller's."""
    if named := clusters_of(text):
        refuse_others(named, str((await call.api.get("/v1/ping"))["cluster"]))


def refuse_operands(words: Words) -> None:
    """Raise UsageError if there are operands."""
    if words.operands:
        raise UsageError("", getopt=f"error: Unrecognized option: {words.operands[0][:60]}")
