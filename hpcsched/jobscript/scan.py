"""Options read from words, as getopt_long(3) reads them: for the command line, and for the lines of a script.

``--name=value``, ``--name value``, ``-N2``, ``-N 2``, clusters (``-HQ``, ``-HN2``), unambiguous beginnings of long
names; the first word that is no option ends them, ``--`` as well. Knows no values' meaning beyond the table's readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsched.errors import RequestError, UsageError
from hpcsched.jobscript.options import ScriptOption, Use, find_option, find_short, refuse_if_unsupported
from hpcsched.jobscript.values import short

MAX_WORDS = 100_000

Settings = dict[str, list[str]]
"""Options by long name with their values in order; what was given last stands last. A flag has the value ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What the words behind `hsub` say: its options, the script's file (None: read standard input), its arguments."""

    options: Settings
    script: str | None
    args: tuple[str, ...]
    further: tuple[Settings, ...] = ()  # the options of the components behind the first one: A : B


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Return what `argv` (without the command's name) says; a word ``:`` divides the components of a heterogeneous job.

    What follows the script belongs to it. Raises RequestError for an unknown option, with the nearest known ones, and
    for a value that is missing, not taken or unreadable.
    """
    argv = list(argv)
    options, end = scan_options(argv)
    further: list[Settings] = []
    while argv[end : end + 1] == [":"]:
        end += 1
        more, taken = scan_options(argv[end:])
        for name in [
            name for name in more if find_option(name).use is Use.COMMAND
        ]:  # wherever it stands, it is for all
            options[name] = more.pop(name)
        further.append(more)
        end += taken
    rest = tuple(argv[end:])
    if rest and "wrap" in options:
        raise RequestError(f"cannot take a script and its arguments ({short(rest[0])}) beside --wrap")
    return CommandLine(options=options, script=rest[0] if rest else None, args=rest[1:], further=tuple(further))


def scan_options(words: Sequence[str]) -> tuple[Settings, int]:
    """Return the options that `words` begin with, and the index of the first word behind them. Raises RequestError."""
    if len(words) > MAX_WORDS:
        raise RequestError(f"cannot read {len(words)} words: the most is {MAX_WORDS}")
    settings: Settings = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return settings, at + 1
        if not word.startswith("-") or word == "-":
            break
        following = words[at + 1] if at + 1 < len(words) else None
        at += 1
        if word.startswith("--"):
            at += _long(word[2:], following, settings)
        else:
            at += _cluster(word[1:], following, settings)
    return settings, at


def _long(text: str, following: str | None, settings: Settings) -> int:
    """Take ``name`` or ``name=value``; return how many of the following words it took."""
    name, equals, value = text.partition("=")
    option = find_option(name)
    refuse_if_unsupported(option)
    if equals:
        if not option.takes_value:
            raise RequestError(f"cannot give --{option.name} the value {short(value)}: it takes none")
        put(settings, option, value)
        return 0
    if option.bare is not None:
        put(settings, option, option.bare)
        return 0
    if following is None:
        raise UsageError(
            f"cannot take --{option.name} without a value: write {option.spelling}",
            getopt=f"option '--{option.name}' requires an argument",
        )
    put(settings, option, following)
    return 1


def _cluster(letters: str, following: str | None, settings: Settings) -> int:
    """Take ``HN2`` of ``-HN2``; return how many of the following words it took."""
    for at, letter in enumerate(letters):
        option = find_short(letter)
        refuse_if_unsupported(option)
        if not option.takes_value or option.bare is not None:
            put(settings, option, option.bare or "")
            continue
        value = letters[at + 1 :]
        if value:
            put(settings, option, value)
            return 0
        if following is None:
            raise UsageError(
                f"cannot take -{letter} without a value: write {option.spelling}",
                getopt=f"option requires an argument -- '{letter}'",
            )
        put(settings, option, following)
        return 1
    return 0


def put(settings: Settings, option: ScriptOption, value: str) -> None:
    """Record `value` as the last one of `option`, once its reader has found nothing wrong with it."""
    option.parse(value)
    if option.sets:
        settings.pop(option.sets, None)
        settings[option.sets] = ["no"]
        return
    given = settings.pop(option.name, [])
    given.append(value)
    settings[option.name] = given
