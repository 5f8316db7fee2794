"""Option tables of commands: read words by them, write help texts and errors.

The grammar is that of `hpcnode.commands.getopt_long`.

Options may follow operands. Long options may be abbreviated if that is unambiguous. Users, and tools that call Slurm's commands,
rely on this. `hsub` has its own table, because its options are those of job scripts (`hpcsched.jobscript.options`). Knows no
command and no meaning of a value. click is not used: its import takes 34 ms (Python itself takes 8), and it supports neither
abbreviated options nor these optional values.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence

from hpcnode.commands import slurm_text
from hpcnode.commands.getopt_long import OptionReader, SlurmOption
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.errors import UsageError as UsageError
from hpcsched.listing.text import nearest as nearest
from hpcsched.listing.text import split_list as split_list

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from hpcsched.jobscript.options import ScriptOption as JobOption


FAILED = 1  # exit statuses
USAGE_ERROR = 2
HELP_WIDTH = 100
HELP_COLUMN = 28


class Option(
    SlurmOption, namedtuple("Option", "name short metavar help bare aliases", defaults=("", "", "", None, ()))
):
    """One option. `metavar` "" takes no value.

    `bare` is the value if the option is given without one, None if a value is required.
    """

    __slots__ = ()

    name: str  # long, without the dashes
    short: str
    metavar: str
    help: str
    bare: str | None
    aliases: tuple[str, ...]


class Command(namedtuple("Command", "name usage about options notes accepted", defaults=((), ()))):
    """A command in its help: `usage` are the words after its name, `about` is its purpose."""

    __slots__ = ()

    name: str
    usage: tuple[str, ...]
    about: str
    options: tuple[Option, ...]
    notes: tuple[str, ...]  # paragraphs after the options
    accepted: tuple[Option, ...]  # accepted for compatibility with Slurm, without effect; not in the help


class Words(namedtuple("Words", "given operands")):
    """A parsed command line: values by option name, in order (a flag's is ""), and operands."""

    __slots__ = ()

    given: dict[str, list[str]]
    operands: list[str]

    def has(self, name: str) -> bool:
        """Return whether the option was given."""
        return name in self.given

    def last(self, name: str, default: str = "") -> str:
        """Return the last value of an option."""
        values = self.given.get(name)
        return values[-1] if values else default

    def listed(self, name: str) -> list[str]:
        """Return the comma-separated parts of all values; commas in brackets do not separate."""
        return [word for value in self.given.get(name, ()) for word in split_list(value)]

    def number(self, name: str, default: float, *, at_least: float = 0) -> float:
        """Return the option's value as a number. Raises UsageError."""
        text = self.last(name)
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not at_least <= value < float("inf"):
            raise UsageError(f"cannot take --{name} {text[:60]!r}: it must be a number, at least {at_least:g}")
        return value


HELP = Option("help", "h", help="show this help")
HELP_LONG = Option("help", help="show this help")  # of commands whose -h is --noheader
VERSION = Option("version", "V", help="show the version")


def read_words(command: Command, argv: Sequence[str]) -> Words:
    """Return the parsed `argv` (without the command's name).

    Raises UsageError with the nearest known options.
    """
    reader = _CommandWords(command)
    operands = reader.read(argv)
    return Words(given=reader.given, operands=operands)


class _CommandWords(OptionReader):
    """The options of a command; they may follow operands."""

    takes_operands = True

    def __init__(self, command: Command) -> None:
        self.given: dict[str, list[str]] = {}
        self._command = command

    def find(self, name: str) -> Option:
        return find_option(self._command, name)

    def find_letter(self, letter: str) -> Option:
        option = next((option for option in _known(self._command) if option.short == letter), None)
        if option is None:
            raise UsageError(_unknown_letter(self._command, letter), getopt=f"invalid option -- '{letter}'")
        return option

    def take(self, option: Option, value: str | None) -> None:
        self.given.setdefault(option.name, []).append((option.bare or "") if value is None else value)

    def takes_none(self, option: Option, value: str) -> UsageError:
        return UsageError(
            f"cannot give --{option.name} the value {value[:60]!r}: it takes none",
            getopt=f"option '--{option.name}' doesn't allow an argument",
        )

    def needs_value(self, option: Option, spelled: str) -> UsageError:
        return UsageError(
            f"cannot take --{option.name} without a value: write {option.spelling}",
            getopt=f"option '--{option.name}' requires an argument",
        )


def _known(command: Command) -> tuple[Option, ...]:
    return command.options + command.accepted


def find_option(command: Command, name: str) -> Option:
    """Return the option of that long name, or of its abbreviation. Raises UsageError."""
    for option in _known(command):
        if name == option.name or name in option.aliases:
            return option
    found = [option for option in _known(command) if name and option.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        some = [f"--{option.name}" for option in found]
        raise UsageError(
            f"cannot tell which option --{name} is: it could be {', '.join(some)}",
            getopt=f"option '--{name}' is ambiguous; possibilities: " + " ".join(f"'{word}'" for word in some),
        )
    near = nearest(name, [option.name for option in command.options])
    hint = f"did you mean {' or '.join('--' + word for word in near)}?" if near else f"see {command.name} --help"
    raise UsageError(
        f"cannot understand {'--' + name[:60]!r}: no such option; {hint}", getopt=f"unrecognized option '--{name[:60]}'"
    )


def _unknown_letter(command: Command, letter: str) -> str:
    other = next((option for option in command.options if option.short == letter.swapcase()), None)
    hint = f"did you mean -{other.short} (--{other.name})?" if other else f"see {command.name} --help"
    return f"cannot understand {'-' + letter!r}: no such option; {hint}"


def help_text(command: Command) -> str:
    """Return the output of ``--help``."""
    lines = [f"{'Usage:' if i == 0 else '      '} {command.name} {words}" for i, words in enumerate(command.usage)]
    lines += ["", *_wrapped(command.about, "", ""), "", "Options:"]
    for option in command.options:
        lines += option_lines(option.spelling, option.help, indented=not option.short)
    for note in command.notes:
        lines += ["", *_wrapped(note, "", "")]
    return "\n".join(lines) + "\n"


def option_lines(spelling: str, text: str, *, indented: bool) -> list[str]:
    """Return the help lines of one option.

    Options without a letter are `indented` to align with the other options' long names.
    """
    head = "  " + ("    " if indented else "") + spelling
    if len(head) + 2 > HELP_COLUMN:
        return [head, *_wrapped(text, " " * HELP_COLUMN, " " * HELP_COLUMN)]
    return _wrapped(text, head.ljust(HELP_COLUMN), " " * HELP_COLUMN)


def _wrapped(text: str, first: str, later: str) -> list[str]:
    import textwrap  # only needed for a help text

    return textwrap.wrap(text, HELP_WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def header_note(name: str) -> str:
    """Return the note about ``-h`` alone, for users that expect help from it."""
    return f"-h leaves the header out, as in Slurm; for help: {name} --help"


def explained(name: str, error: HpcschedError) -> tuple[str, int]:
    """Return an error's text for standard error, and the exit status."""
    return f"{name}: error: {error}", USAGE_ERROR if isinstance(error, UsageError) else FAILED


# ----- the commands with Slurm's names: version, accepted options, and errors
# Clients match these texts, so they are exactly Slurm's. Additional information follows on a separate line. The version is
# below 23.11: clients then use neither the external launcher nor the later JSON.
# Sources: the commands of Slurm 22.05 and 23.02; ``getopt_long(3)``.


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


def slurm_explained(name: str, error: HpcschedError, contact: str) -> tuple[str, int]:
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


def refuse_operands(words: Words) -> None:
    """Raise UsageError if there are operands."""
    if words.operands:
        raise UsageError("", getopt=f"error: Unrecognized option: {words.operands[0][:60]}")
