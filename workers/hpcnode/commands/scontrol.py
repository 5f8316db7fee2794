"""Host lists on a node: `scontrol show hostnames`, and the host files of a step.

All other subcommands of scontrol run the full one, if PATH has it. The node may have nothing of hpcsched besides its agent.

``srun -w ./FILE``, ``-m arbitrary`` with the node of each task, and ``-r N`` use host files: one name a line, or several with
commas or blanks between them; ``n1*4`` is n1 four times. An arbitrary distribution uses SLURM_HOSTFILE, or else --nodelist.
SLURM_HOSTFILE without --nodelist requests one.

Sources: scontrol(1); srun(1), --nodelist, --distribution.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from typing import Dict, Iterator, List, Mapping, Sequence

_WORD = re.compile(r"(?:[^\[\],\s]|\[[^\]]*\])+")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?\Z")
MAX_NAMES = 100_000


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    words = [word for word in argv if word not in ("-o", "--oneliner")]
    if len(words) in (2, 3) and words[0] == "show" and "hostnames".startswith(words[1]) and len(words[1]) > 5:
        return _show_hostnames(words[2] if len(words) > 2 else "")
    return _full_command(list(argv))


def expand(text: str) -> List[str]:
    """Return the names of a host list such as ``n[1-3,07],m``. Raises ValueError."""
    if _WORD.sub("", text).strip(", \t\n"):
        raise ValueError("cannot read the host list %.100r: its brackets do not match" % text)
    names: List[str] = []
    for word in _WORD.findall(text):
        for name in _names(word):
            names.append(name)
            if len(names) > MAX_NAMES:
                raise ValueError("cannot show more than %d names" % MAX_NAMES)
    return names


def _names(word: str) -> Iterator[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        found = _SPAN.match(part)
        if found is None:
            raise ValueError("cannot read %.60r in a host list: numbers like 3 or 1-4 are needed" % part)
        low, high = found.group(1), found.group(2) or found.group(1)
        for number in range(int(low), int(high) + 1):
            for end in _names(after):
                yield before + str(number).zfill(len(low)) + end


def _show_hostnames(given: str) -> int:
    given = given or os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    if not given:
        sys.stderr.write("SLURM_JOB_NODELIST environment variable is not set\n")
        return 1
    try:
        names = expand(given)
    except ValueError as error:
        sys.stderr.write("scontrol: error: %s\n" % error)
        return 1
    sys.stdout.write("".join(name + "\n" for name in names))
    return 0


def _full_command(argv: List[str]) -> int:
    """Execute the next scontrol on PATH that is not an agent's."""
    for folder in os.environ.get("PATH", "").split(":"):
        path = os.path.join(folder, "scontrol")
        if folder.endswith("/bin/slurm") or not os.access(path, os.X_OK):
            continue
        os.execv(path, [path, *argv])
    sys.stderr.write(
        "scontrol: error: cannot do '%s' on this node: only 'show hostnames' works where hpcsched is not installed; "
        "run it on the head node\n" % " ".join(argv)[:200]
    )
    return 1


MAX_HOSTS = 100_000
_REPEATED = re.compile(r"(.+)\*(\d{1,6})\Z")


class HostFileError(Exception):
    """The hosts cannot be determined; the text is for the user."""


def settle(options: Dict[str, object], environ: Mapping[str, str]) -> None:
    """Replace the path of a file by its names, and ``-m arbitrary`` by the node of each task."""
    arbitrary = str(options.get("distribution", "")).startswith("arbitrary")
    given = str(options.pop("nodelist", "") or "")
    if arbitrary:
        given = environ.get("SLURM_HOSTFILE") or given
        options.pop("distribution")
        if not given:
            raise HostFileError(
                "cannot place tasks with -m arbitrary: SLURM_HOSTFILE must name the file of their hosts"
            )
    is_file = "/" in given or (arbitrary and bool(environ.get("SLURM_HOSTFILE")))
    try:
        hosts = _read(given) if is_file else expand(given)
    except ValueError as error:
        raise HostFileError(str(error)) from None
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise HostFileError("cannot use %s: it has %d hosts" % (given, len(hosts)))
    options["hosts" if arbitrary else "nodelist"] = ",".join(hosts)


def ask_for(options: Dict[str, object]) -> None:
    """Add the nodes of the tasks to the request of a job that is made for the step."""
    ntasks = str(options.get("ntasks", ""))
    hosts = str(options["hosts"]).split(",")
    hosts = hosts[: int(ntasks)] if ntasks.isdigit() and len(ntasks) < 10 else hosts
    counts = Counter(hosts)
    options["nodelist"] = ",".join(counts)
    options["nodes"] = str(len(counts))
    options["ntasks-per-node"] = str(max(counts.values(), default=1))


def leave_out(options: Dict[str, object], number: str, environ: Mapping[str, str]) -> None:
    """Exclude the first `number` nodes of the job (``--relative``)."""
    nodes = expand(environ.get("SLURM_JOB_NODELIST", ""))
    if not nodes:
        raise HostFileError("cannot take --relative=%s: it counts the nodes of the job that srun runs in" % number)
    if not number.isdigit() or int(number) >= len(nodes):
        raise HostFileError("cannot take --relative=%s: the job has nodes 0 to %d" % (number[:40], len(nodes) - 1))
    given = [str(options["exclude"])] if options.get("exclude") else []
    if int(number):
        options["exclude"] = ",".join([*given, *nodes[: int(number)]])


def _read(path: str) -> List[str]:
    """Return the hosts of a file, in order. Raises HostFileError, ValueError."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.partition("#")[0] for line in file.read(MAX_HOSTS * 64).splitlines()]
    except OSError as error:
        raise HostFileError("cannot read the hosts in %s: %s" % (path, error.strerror)) from None
    hosts: List[str] = []
    for word in " ".join(lines).split():
        found = _REPEATED.match(word)
        hosts += expand(found.group(1)) * int(found.group(2)) if found else expand(word)
        if len(hosts) > MAX_HOSTS:
            break
    return hosts
