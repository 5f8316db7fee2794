"""scontrol on a node of a job: `show hostnames` works without the controller.

All other subcommands run the full scontrol, if PATH has it. The node may have nothing of hpcsched besides its agent.

Sources: scontrol(1).
"""

from __future__ import annotations

import os
import re
import sys
from typing import Iterator, List, Sequence

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
