"""The text of a job script: its validity, and its ``#HSUB`` and ``#SBATCH`` options.

Slurm's own rule for where these may stand: at the very beginning of a line, with or without a space behind the word, up
to the first line that is neither blank nor a comment. Quotes may open anywhere in a word and a backslash takes the next
character as it is; ``#`` outside of quotes ends the line; what is left over is an error. ``##SBATCH`` and ``# SBATCH``
are comments. Both words count, in the order of the lines. Knows no files.

``#PBS`` and ``#BSUB`` lines are allowed at the same places, and ``#SBATCH`` lines win over them. As in Slurm, a bare number of
``walltime`` is minutes, and of ``-M`` MiB. Options that have no effect here are ignored; options that a job depends on and
that cannot be parsed are rejected with an error.

Sources: sbatch(1), --ignore-pbs; sbatch's behaviour; qsub(1B); bsub(1).
"""

from __future__ import annotations

import difflib
import getopt
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpcsched.errors import RequestError
from hpcsched.jobscript.options import Settings, by_name, find_option, put, scan_options
from hpcsched.jobscript.values import parse_count, short
from hpcsched.model.units import whole_number

MAX_SCRIPT_BYTES = 4 << 20
MAX_DIRECTIVES = 1_000
_WORDS = ("#HSUB", "#SBATCH")
FOREIGN_WORDS = ("#PBS", "#BSUB")
_ALL_WORDS = (*_WORDS, *FOREIGN_WORDS)
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
    size = _script_size(text)
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


def _script_size(text: str) -> int:
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
        if line.startswith(FOREIGN_WORDS):
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
        word = next(word for word in FOREIGN_WORDS if line.startswith(word))
        if line[len(word) : len(word) + 1] not in (" ", "\t"):
            continue
        try:
            settings |= translated(word, split_directive(line[len(word) :]))
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


_PBS = "a:A:c:C:D:e:f:hIJ:j:k:l:m:M:N:o:p:P:q:r:R:S:t:T:u:v:VW:Xxz"
_MAIL = {"a": "FAIL", "b": "BEGIN", "e": "END"}
_SIZE = re.compile(r"(\d{1,15})([kmgtKMGT]?)[bB]?\Z")
_PBS_TIME = re.compile(r"(?:(\d{4})(\d\d)(\d\d))?(\d\d)(\d\d)(?:\.\d\d)?\Z")
_LSF_NAME = re.compile(r"([^\[\]]*)(?:\[([0-9,:-]+)\](%\d+)?)?\Z")
_LSF_LIMIT = re.compile(r"(\d{1,6}):(\d{1,2})\Z")
_LSF_HOSTS = re.compile(r"span\[\s*hosts\s*=\s*(\d{1,6})\s*\]")

# Options whose value is that of an option of sbatch.
_PBS_NAMES = {
    "-A": "account", "-P": "account", "-d": "chdir", "-D": "chdir", "-J": "array", "-t": "array", "-N": "job-name",
}  # fmt: skip
_BSUB_NAMES = {"-U": "reservation", "-u": "mail-user", "-cwd": "chdir", "-b": "begin"}

Give = Callable[[str, str], None]  # the name of an option, and its value


def translated(word: str, words: Sequence[str]) -> Settings:
    """Return the options on a line that begins with `word`, one of `FOREIGN_WORDS`.

    Raises RequestError.
    """
    settings: Settings = {}

    def give(name: str, value: str) -> None:
        settings.pop(name, None)  # the last one counts
        put(settings, by_name()[name], value)

    if word == "#PBS":
        _read_pbs(words, give)
    else:
        _read_bsub(words, give)
    return settings


# ----- PBS


def _read_pbs(words: Sequence[str], give: Give) -> None:
    try:
        options, rest = getopt.getopt(list(words), _PBS)
    except getopt.GetoptError as error:
        raise RequestError(f"cannot understand it: {error.msg}") from None
    if rest:
        raise RequestError(f"cannot understand {short(rest[0])}: it is neither an option nor the value of one")
    for option, value in options:
        name = _PBS_NAMES.get(option)
        if name is not None:
            give(name, value)
            continue
        match option:
            case "-a":
                give("begin", _pbs_time(value))
            case "-e" | "-o":
                give("error" if option == "-e" else "output", _path(value))
            case "-h":
                give("hold", "")
            case "-l":
                _read_resources(value, give)
            case "-m":
                give("mail-type", ",".join(_MAIL[letter] for letter in value if letter in _MAIL) or "NONE")
            case "-M":
                give("mail-user", value.split(",")[0])
            case "-q":
                give("partition", value.partition("@")[0])
            case "-r":
                give("requeue" if value[:1].lower() == "y" else "no-requeue", "")
            case "-v":
                give("export", f"ALL,{value}")
            case "-W":
                _read_attributes(value, give)


def _path(text: str) -> str:
    """Return a path without the host that PBS may have in front of it."""
    host, colon, path = text.partition(":")
    return path if colon and "/" not in host else text


def _pbs_time(text: str) -> str:
    match = _PBS_TIME.match(text)
    if match is None:
        raise RequestError(f"cannot read time {short(text)}: write hhmm or CCYYMMDDhhmm")
    year, month, day, hour, minute = match.groups()
    return f"{year}-{month}-{day}T{hour}:{minute}" if year else f"{hour}:{minute}"


def _read_attributes(text: str, give: Give) -> None:
    name, _, value = text.partition("=")
    if name.strip() == "depend":
        give("dependency", value.strip())


def _read_resources(text: str, give: Give) -> None:
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match name.lower():
            case "walltime" | "cput" | "pcput":
                give("time", value)
            case "mem":
                give("mem", _size(value))
            case "pmem":
                give("mem-per-cpu", _size(value))
            case "file":
                give("tmp", _size(value))
            case "nodes":
                _read_nodes(value, give)
            case "select":
                _read_chunk(value, give)
            case "procs":
                give("ntasks", value)
            case "ncpus":
                give("cpus-per-task", value)
            case "mpiprocs":
                give("ntasks-per-node", value)
            case "host":
                give("nodelist", value)
            case "ngpus" | "gpus" | "naccelerators":
                give("gres", f"gpu:{value}")


def _read_nodes(text: str, give: Give) -> None:
    """Read ``2:ppn=4:gpus=1``, or names of nodes: ``n1+n2``, ``n1:ppn=2+n2:ppn=2``."""
    names, count = [], 0
    for chunk in text.split("+"):
        first, *rest = chunk.split(":")
        if first.isascii() and first.isdigit():
            count += parse_count(first)
        else:
            names.append(first)
            count += 1
        for word in rest:
            name, equals, value = word.partition("=")
            if name == "ppn":
                give("ntasks-per-node", value)
            elif name == "gpus":
                give("gres", f"gpu:{value}")
            elif not equals:
                give("constraint", name)
    give("nodes", str(count))
    if names:
        give("nodelist", ",".join(names))


def _read_chunk(text: str, give: Give) -> None:
    """Read ``2:ncpus=8:mpiprocs=4:mem=16gb:ngpus=1``."""
    if "+" in text:
        raise RequestError(
            f"cannot read select={short(text)}: chunks of several kinds are components, write sbatch A : B"
        )
    first, *rest = text.split(":")
    if "=" in first:
        first, rest = "1", [first, *rest]
    give("nodes", first)
    asked = dict(word.partition("=")[::2] for word in rest)
    tasks, cpus = asked.pop("mpiprocs", ""), asked.pop("ncpus", "")
    if tasks or cpus:
        give("ntasks-per-node", tasks or "1")
    if cpus:
        give("cpus-per-task", str(max(1, parse_count(cpus) // parse_count(tasks or "1"))))
    _read_resources(",".join(f"{name}={value}" for name, value in asked.items()), give)


def _size(text: str) -> str:
    match = _SIZE.match(text.strip())
    if match is None:
        raise RequestError(f"cannot read size {short(text)}: write 500mb or 4gb")
    number, unit = match.groups()
    if unit:
        return number + unit.upper()
    return f"{-(-whole_number(number) >> 10)}K" if text.lower().endswith("b") else number


# ----- LSF

_WITH_VALUE = frozenset((
    "J", "o", "oo", "e", "eo", "i", "is", "n", "q", "W", "M", "m", "R", "P", "w", "b", "u", "cwd", "gpu", "g", "G", "t", "c", "C",
    "D", "E", "Ep", "F", "f", "k", "L", "Lp", "S", "s", "sla", "sp", "T", "U", "v", "We", "a", "app", "env", "outdir", "notify",
    "wa", "wt",
))  # fmt: skip
_FILES = {"-o": "output", "-oo": "output", "-e": "error", "-eo": "error", "-i": "input", "-is": "input"}


def _read_bsub(words: Sequence[str], give: Give) -> None:
    rest = list(words)
    while rest:
        option = rest.pop(0)
        if not option.startswith("-"):
            raise RequestError(f"cannot understand {short(option)}: it is neither an option nor the value of one")
        if option[1:] not in _WITH_VALUE:
            _read_bsub_flag(option, give)
        elif not rest:
            raise RequestError(f"cannot take {option} without a value")
        else:
            _read_bsub_option(option, rest.pop(0), give)


def _read_bsub_flag(option: str, give: Give) -> None:
    match option:
        case "-x":
            give("exclusive", "")
        case "-H":
            give("hold", "")
        case "-r":
            give("requeue", "")
        case "-rn":
            give("no-requeue", "")


def _read_bsub_option(option: str, value: str, give: Give) -> None:
    name = _BSUB_NAMES.get(option)
    if name is not None:
        give(name, value)
        return
    match option:
        case "-J":
            _read_bsub_name(value, give)
        case "-o" | "-oo" | "-e" | "-eo" | "-i" | "-is":
            give(_FILES[option], value.replace("%J", "%A" if "%I" in value else "%j").replace("%I", "%a"))
        case "-n":
            give("ntasks", value.partition(",")[0])
        case "-q":
            give("partition", value.split()[0] if value.split() else value)
        case "-W":
            limit = value.partition("/")[0]
            hours = _LSF_LIMIT.match(limit)
            give("time", f"{hours[1]}:{hours[2]}:00" if hours else limit)
        case "-M":
            give("mem-per-cpu", _size(value))
        case "-m":
            give("nodelist", ",".join(value.split()))
        case "-R":
            if hosts := _LSF_HOSTS.search(value):
                give("nodes", hosts[1])
        case "-gpu":
            count = re.search(r"num=(\d{1,6})", value)
            give("gres", f"gpu:{count[1] if count else 1}")
        case "-w":
            raise RequestError(f"cannot read -w {short(value)}: say --dependency on an #SBATCH line instead")


def _read_bsub_name(value: str, give: Give) -> None:
    """Read ``-J NAME[INDICES]%LIMIT``: the name of the job, and its array."""
    match = _LSF_NAME.match(value)
    if match is None:
        raise RequestError(f"cannot read name {short(value)}: write NAME or NAME[1-10]%2")
    name, indices, limit = match.groups()
    if name:
        give("job-name", name)
    if indices:
        give("array", indices + (limit or ""))
