"""Host lists of a step in files: ``srun -w ./FILE``, ``-m arbitrary``, and ``-r N``.

A file has one name a line, or several with commas or blanks between them; ``n1*4`` is n1 four times. An arbitrary distribution
uses SLURM_HOSTFILE, or else --nodelist. SLURM_HOSTFILE without --nodelist requests one.

Source: srun(1), --nodelist, --distribution.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Dict, List, Mapping

from hpcnode.commands.scontrol import expand

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
