"""Scripts whose first line asks for a login shell (``#!/bin/bash -l``): its profile sets a PATH anew that has not our commands.

Where a cluster's commands are in /usr/bin nobody notices. So the shell is given the folders of ours behind its profile, and reads
the script then: its functions, options, arguments and ``$0`` are those of a script that it was started with.

Source: bash(1), "INVOCATION"; /etc/profile of Debian.
"""

from __future__ import annotations

import os
from typing import List, Sequence

_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def is_one(first_line: Sequence[str]) -> bool:
    """Return whether the words of a script's first line (program and argument) start a login shell."""
    if len(first_line) != 2 or os.path.basename(first_line[0]) not in _SHELLS:
        return False
    flags = first_line[1]
    return flags == "--login" or (flags[:1] == "-" and flags[1:].isalpha() and "l" in flags and "c" not in flags)


def command(first_line: Sequence[str], argv: Sequence[str], folders: Sequence[str]) -> List[str]:
    """Return the words that run the script with its arguments, `argv`, with `folders` first on the PATH."""
    from shlex import quote  # few scripts need it

    return [*first_line, "-c", 'PATH=%s:"$PATH"; . "$0"' % quote(":".join(folders)), *argv]
