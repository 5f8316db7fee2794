"""Several programs as one step: srun --multi-prog FILE, and srun A : B.

They become one shell command that all tasks run.

A line of the file is ``0-3,7 program argument...``, or ``* program argument...`` for all other tasks. ``%t`` is
the task's number, ``%o`` its position in its line. ``#`` starts a comment; a backslash at the end of a line continues it.

Source: srun(1), "MULTIPLE PROGRAM CONFIGURATION", and "Heterogeneous Steps" of Slurm's documentation.
"""

from __future__ import annotations

import re
import shlex
from typing import List, Mapping, Sequence, Set, Tuple

MAX_BYTES = 100_000  # of the shell command: the kernel limits an argument to 128 KiB

_TASKS = re.compile(r"\*|\d+(-\d+)?(,\d+(-\d+)?)*\Z")
_HOLE = re.compile(r"(%[to])")


class MultiProgError(Exception):
    """The file cannot be read; the text is the reason."""


def command_of(path: str) -> List[str]:
    """Return the command that runs the program of each task in the file at `path`.

    Raises MultiProgError.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except OSError as error:
        raise MultiProgError("cannot read %s: %s" % (path, error.strerror)) from None
    return _shell(script_of(text, path), path)


def command_for(programs: Sequence[Tuple[int, Mapping[str, str], List[str]]]) -> List[str]:
    """Return the command of (number of tasks, variables, program) for consecutive tasks.

    Raises MultiProgError.
    """
    cases, first = [], 0
    for count, env, words in programs:
        numbers = "|".join(map(str, range(first, first + count)))
        exports = "".join("export %s=%s; " % (name, shlex.quote(value)) for name, value in env.items())
        cases.append("%s) %s%s;;" % (numbers, exports, _exec([shlex.quote(word) for word in words])))
        first += count
    return _shell("case $SLURM_PROCID in\n%s\nesac" % "\n".join(cases), "the command line")


def script_of(text: str, path: str) -> str:
    """Return a shell script that executes the program of its task.

    Raises MultiProgError with the line number.
    """
    seen: Set[int] = set()
    cases = []
    for number, line in _lines(text):
        where = "%s, line %d" % (path, number)
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise MultiProgError("cannot read %s: %s" % (where, error)) from None
        if not words:
            continue
        if not _TASKS.match(words[0]):
            raise MultiProgError(
                "cannot read %s: it begins with %.40r, not with tasks as 0-3,7 or *" % (where, words[0])
            )
        if len(words) == 1:
            raise MultiProgError("cannot read %s: tasks %.40s have no program" % (where, words[0]))
        cases += _cases(words[0], words[1:], seen, where)
    other = 'echo "srun: error: no program for task $t in %s" >&2; exit 1' % re.sub(r'["$`\\]', "", path)
    return "t=$SLURM_PROCID; case $t in\n%s\n*) %s;;\nesac" % ("\n".join(cases), other)


def _lines(text: str) -> List[Tuple[int, str]]:
    """Return (number, line), with continued lines joined."""
    lines: List[Tuple[int, str]] = []
    is_continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        if is_continued:
            lines[-1] = (lines[-1][0], lines[-1][1] + " " + line.rstrip("\\"))
        else:
            lines.append((number, line.rstrip("\\")))
        is_continued = line.endswith("\\")
    return lines


def _cases(tasks: str, words: List[str], seen: Set[int], where: str) -> List[str]:
    run = _exec([_quoted(word) for word in words])
    if tasks == "*":
        return ["*) o=$((t - %d)); %s;;" % (len(seen), run)]
    cases = []
    place = 0
    for span in tasks.split(","):
        first, _, last = span.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or len(numbers) > 100_000:
            raise MultiProgError("cannot read %s: %s are not tasks" % (where, span))
        if not seen.isdisjoint(numbers):
            raise MultiProgError("cannot read %s: tasks %s have a program already" % (where, span))
        seen.update(numbers)
        o = "o=$((t - %d))" % (int(first) - place)
        cases.append("%s) %s; %s;;" % ("|".join(map(str, numbers)), o, run))
        place += len(numbers)
    return cases


def _exec(words: Sequence[str]) -> str:
    """Return the shell command that executes this program; it exits with 2 without it."""
    return "command -v %s >/dev/null || exit 2; exec %s" % (words[0], " ".join(words))


def _shell(script: str, source: str) -> List[str]:
    if len(script) > MAX_BYTES:
        raise MultiProgError("cannot use %s: it has %d bytes, the maximum is %d" % (source, len(script), MAX_BYTES))
    return ["/bin/sh", "-c", script]


def _quoted(word: str) -> str:
    """Return `word` as a shell word with %t and %o filled in."""
    holes = {"%t": '"$t"', "%o": '"$o"'}
    return "".join(holes.get(piece) or shlex.quote(piece) for piece in _HOLE.split(word) if piece) or "''"
