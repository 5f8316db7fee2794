"""The text of a job script: its validity, and its ``#HSUB`` and ``#SBATCH`` options.

``#PBS`` and ``#BSUB`` lines at these places are read as well (`hpcsched.jobscript.pbs`).

Slurm's own rule for where these may stand: at the very beginning of a line, with or without a space behind the word, up
to the first line that is neither blank nor a comment. Quotes may open anywhere in a word and a backslash takes the next
character as it is; ``#`` outside of quotes ends the line; what is left over is an error. ``##SBATCH`` and ``# SBATCH``
are comments. Both words count, in the order of the lines. Knows no files. Source: sbatch(1); sbatch's behaviour.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcsched.errors import RequestError
from hpcsched.jobscript import pbs
from hpcsched.jobscript.options import Settings, find_option, scan_options
from hpcsched.jobscript.values import short

MAX_SCRIPT_BYTES = 4 << 20
MAX_DIRECTIVES = 1_000
_WORDS = ("#HSUB", "#SBATCH")
_ALL_WORDS = (*_WORDS, *pbs.WORDS)
_LATE = re.compile(r"^#(?:HSUB|SBATCH)[ \t]*-", re.MULTILINE)
_COMMENTED_WORD = re.compile(r"#[ \t]*([A-Za-z]{4,8})[ \t]+-[-A-Za-z]")
_LIKENESS = 0.75  # difflib's ratio: a letter too many, too few, or two swapped
MAX_NOTED_LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Directives:
    """What the lines of a script ask for.

    `late_lines`: numbers of directives behind the first command, which do not count. `misspelled_lines`: numbers of
    comments that look like a directive (``#SBTACH -N2``, ``# SBATCH -N2``).
    """

    options: Settings
    foreign_lines: tuple[tuple[int, str], ...] = ()  # number and text of #PBS and #BSUB lines
    further: tuple[Settings, ...] = ()  # those of the components behind the first one: below a line that says hetjob
    late_lines: tuple[int, ...] = ()
    misspelled_lines: tuple[int, ...] = ()


def check_script(text: str) -> None:
    """Raise RequestError if `text` cannot be a job script, with what to do about it."""
    if not text.strip():
        raise RequestError("cannot submit the script: it is empty")
    if "\0" in text:
        raise RequestError(
            "cannot submit the script: it has a NUL character, so it is a program and not a script. "
            "To run a program: hsub --wrap 'PROGRAM ARGUMENTS'"
        )
    size = _size(text)
    if size > MAX_SCRIPT_BYTES:
        raise RequestError(f"cannot submit the script: it has {size} bytes, the most is {MAX_SCRIPT_BYTES}")
    if not text.startswith("#!"):
        raise RequestError(
            "cannot submit the script: This does not look like a batch script. The first line must start with #! "
            "followed by the path to an interpreter. For instance: #!/bin/sh"
        )
    if "\r\n" in text:
        raise RequestError(
            "cannot submit the script: Batch script contains DOS line breaks (\\r\\n) instead of expected UNIX line "
            "breaks (\\n). Convert it: sed -i 's/\\r$//' SCRIPT"
        )


def _size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise RequestError(
            f"cannot submit the script: line {line} is not UTF-8. Convert it: iconv -f latin1 -t utf-8 SCRIPT"
        ) from None


def wrap_script(command: str) -> str:
    """Return the script that runs `command`, for ``--wrap``."""
    return f"#!/bin/sh\n# This script was created by hsub --wrap.\n\n{command}\n"


def read_script(text: str) -> Directives:
    """Return the options on the ``#HSUB`` and ``#SBATCH`` lines of `text`.

    Raises RequestError with the number of the line that cannot be read.
    """
    settings: Settings = {}
    foreign: list[tuple[int, str]] = []
    components = [settings]
    for count, (number, line, _) in enumerate(_head(text), start=1):
        if count > MAX_DIRECTIVES:
            raise RequestError(f"cannot read the script: it has more than {MAX_DIRECTIVES} lines of options")
        if line.startswith(pbs.WORDS):
            foreign.append((number, line))
            continue
        try:
            found = _read_line(line)
        except RequestError as error:
            raise RequestError(f"cannot read line {number} of the script, {short(line)}: {error}") from None
        if found is None:
            settings = {}
            components.append(settings)
            continue
        for name, given in found.items():
            values = settings.pop(name, [])
            values += given
            settings[name] = values
    return Directives(
        options=components[0],
        foreign_lines=tuple(foreign),
        further=tuple(components[1:]),
        late_lines=_late_lines(text),
        misspelled_lines=_misspelled_lines(text),
    )


def _misspelled_lines(text: str) -> tuple[int, ...]:
    """Return the numbers of the comments before the first command that look like directives."""
    lines: list[int] = []
    at = number = 0
    while at < len(text) and len(lines) < MAX_NOTED_LINES:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        number += 1
        if not text.startswith(_WORDS, at):
            line = text[at:end]
            if not _is_comment(line):
                break
            if _is_like_directive(line):
                lines.append(number)
        at = end + 1
    return tuple(lines)


def _is_like_directive(line: str) -> bool:
    match = _COMMENTED_WORD.match(line)
    if match is None:
        return False
    word = match.group(1).upper()
    return any(difflib.SequenceMatcher(a=word, b=name[1:]).ratio() >= _LIKENESS for name in _WORDS)


def _head(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield number, text and end of directive lines before the script's first command."""
    at = number = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        number += 1
        if text.startswith(_ALL_WORDS, at):
            yield number, text[at:end], end
        elif not _is_comment(text[at:end]):
            return
        at = end + 1


def _is_comment(line: str) -> bool:
    stripped = line.lstrip(" \t\v\f\r")
    return not stripped or stripped.startswith("#")


def _late_lines(text: str) -> tuple[int, ...]:
    """Return the numbers of lines after the first command that look like directives."""
    last = 0
    for _, _, end in _head(text):
        last = end
    lines: list[int] = []
    number, counted = 1, 0
    for match in _LATE.finditer(text, last):
        number += text.count("\n", counted, match.start())
        counted = match.start()
        lines.append(number)
        if len(lines) == 10:
            break
    return tuple(lines)


def _read_line(line: str) -> Settings | None:
    """Return the options on a line; None: it says that those of the next component begin."""
    words = split_directive(line[len(next(word for word in _WORDS if line.startswith(word))) :])
    if words in (["hetjob"], ["packjob"]):
        return None
    found, rest = scan_options(words)
    if rest:
        raise RequestError(f"cannot understand {short(rest[0])}: it is neither an option nor the value of one")
    for name in found:
        if not find_option(name).in_script:
            raise RequestError(f"cannot take --{name} from a script: it is for the command line")
    return found


def foreign_options(lines: Iterable[tuple[int, str]]) -> Settings:
    """Return the options on #PBS and #BSUB lines.

    Raises RequestError with the number of the line that cannot be read.
    """
    settings: Settings = {}
    for number, line in lines:
        word = next(word for word in pbs.WORDS if line.startswith(word))
        if line[len(word) : len(word) + 1] not in (" ", "\t"):
            continue
        try:
            settings |= pbs.translated(word, split_directive(line[len(word) :]))
        except RequestError as error:
            raise RequestError(f"cannot read line {number} of the script, {short(line)}: {error}") from None
    return settings


def split_directive(text: str) -> list[str]:
    """Return the words of a directive's line.

    Raises RequestError for a quote without its second one.
    """
    words: list[str] = []
    current: list[str] = []
    inside = escaped = False  # inside: of a word, an empty one in quotes included
    quote = ""
    for char in text:
        if escaped:
            current.append(char)
            escaped = False
        elif char == "\\":
            escaped = inside = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                current.append(char)
        elif char in "'\"":
            quote, inside = char, True
        elif char == "#":
            break
        elif not char.isspace():
            current.append(char)
            inside = True
        elif inside:
            words.append("".join(current))
            current, inside = [], False
    if quote:
        raise RequestError(f"cannot find the second {quote} of a pair")
    if inside:
        words.append("".join(current))
    return words
