"""``#PBS`` and ``#BSUB`` lines of a job script, as options of ``#SBATCH`` lines.

Knows the options of PBS and LSF, not their effect on a job. The lines are allowed where ``#SBATCH`` lines are, which win over
them. As in Slurm, a bare number of ``walltime`` is minutes, and of ``-M`` MiB. Options that have no effect here are ignored;
options that a job depends on and that cannot be parsed are rejected with an error. Sources: sbatch(1), --ignore-pbs; Slurm's
sbatch; qsub(1B); bsub(1).
"""

from __future__ import annotations

import getopt
import re
from collections.abc import Callable, Sequence

from hpcsched.errors import RequestError
from hpcsched.jobscript.options import Settings, by_name, put
from hpcsched.jobscript.values import parse_count, short
from hpcsched.model.units import whole_number

WORDS = ("#PBS", "#BSUB")
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
    """Return the options on a line that begins with `word`, one of `WORDS`.

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
