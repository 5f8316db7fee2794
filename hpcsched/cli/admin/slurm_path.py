"""`hpcsched slurm-path`: the directory of the commands with Slurm's names, made if it does not exist.

It is beside the installation, or in the user's cache if the installation cannot be written. Each file is the compiled
client, or a few lines that run one module with the Python of this installation without its site (`-S`), which halves the
time that a command takes. A file with other content, of an older release perhaps, is replaced by a rename, because other
processes may be running it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

import click

import hpcsched
from hpcsched.errors import ConfigError

# Slurm's name -> its module, and the function there if it is not main.
COMMANDS = {
    "sbatch": "hpcsched.cli.thin",
    "squeue": "hpcsched.cli.thin",
    "scancel": "hpcsched.cli.thin",
    "sacct": "hpcsched.cli.hacct:sacct",
    "sinfo": "hpcsched.cli.hinfo:sinfo",
    "scontrol": "hpcsched.cli.slurm.scontrol",
    "srun": "hpcnode.commands.srun",
    "salloc": "hpcsched.cli.halloc:salloc",
    "sacctmgr": "hpcsched.cli.slurm.sacctmgr",
    "sshare": "hpcsched.cli.hshare:sshare",
    "sprio": "hpcsched.cli.hprio:sprio",
    "sdiag": "hpcsched.cli.slurm.sdiag",
    "sstat": "hpcsched.cli.slurm.sstat",
    "sreport": "hpcsched.cli.slurm.sreport",
    "strigger": "hpcsched.cli.slurm.strigger",
    "scrontab": "hpcsched.cli.slurm.scrontab",
    "sbcast": "hpcsched.cli.slurm.sbcast",
    "sattach": "hpcsched.cli.slurm.sattach",
    "seff": "hpcsched.cli.hacct:seff",
    "sgather": "hpcsched.cli.slurm.sbcast:sgather",
}
COMPILED = ("sbatch", "squeue", "scancel")  # if hsub is compiled: the same program under these names
LONGEST_FIRST_LINE = 120  # older Linux cuts it at 127

SCRIPT = """\
{first_line}
import sys

sys.path[:0] = {roots!r}
from {module} import {function} as main

sys.exit(main())
"""


@click.command("slurm-path")
def slurm_path() -> None:
    """Print the directory of the commands with Slurm's names.

    Use it with: export PATH=$(hpcsched slurm-path):$PATH
    """
    click.echo(ensure_directory())


def ensure_directory() -> Path:
    """Return the directory, with all commands in it. Raises ConfigError."""
    refused = ""
    for directory in _places():
        try:
            _fill(directory)
        except OSError as error:
            refused = f"{error.filename}: {error.strerror}"
        else:
            return directory
    raise ConfigError(f"cannot make the directory of Slurm's commands: {refused}")


def _places() -> list[Path]:
    prefix = Path(sys.prefix)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    mark = hashlib.sha256(f"{sys.executable}:{_roots()}".encode()).hexdigest()[:12]
    return [prefix / "libexec" / "hpcsched" / "slurm", cache / "hpcsched" / f"slurm-{mark}"]


def _roots() -> list[str]:
    """Return the directories from which our packages are imported."""
    import hpcnode

    return list(dict.fromkeys(str(Path(str(package.__file__)).parents[1]) for package in (hpcsched, hpcnode)))


def _fill(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _files().items():
        path = directory / name
        if not path.exists() or path.read_bytes() != content or not os.access(path, os.X_OK):
            fresh = directory / f".{name}.{os.getpid()}"
            fresh.write_bytes(content)
            fresh.chmod(0o755)
            fresh.replace(path)


def _files() -> dict[str, bytes]:
    """Return the content of each program. The compiled ones leave to ``hpcsched-command`` what needs Python."""
    files = {name: _script(place).encode() for name, place in COMMANDS.items()}
    try:
        program = (Path(sysconfig.get_path("scripts")) / "hsub").read_bytes()
    except OSError:
        program = b""
    if program.startswith(b"\x7fELF"):
        files |= dict.fromkeys(COMPILED, program)
        files["hpcsched-command"] = _script("hpcsched.cli.thin:whole").encode()
    return files


def _script(place: str) -> str:
    module, _, function = place.partition(":")
    python = sys.executable
    first_line = f"#!{python} -ES"
    if len(first_line) > LONGEST_FIRST_LINE or " " in python:
        # For a shell this is a command that never returns, for Python a string.
        first_line = f"#!/bin/sh\n'''exec' \"{python}\" -ES \"$0\" \"$@\"\n' '''"
    return SCRIPT.format(first_line=first_line, roots=_roots(), module=module, function=function or "main")
