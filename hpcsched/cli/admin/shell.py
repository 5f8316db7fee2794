"""`hpcsched completion` and `hpcsched slurm-path`: what a user's shell needs.

Completion of options, job ids, partitions and nodes in bash, zsh and fish is generated from the option tables of the commands.
Jobs, partitions and nodes are requested when the key is pressed. zsh runs the functions of bash (bashcompinit).

The directory of the commands with Slurm's names is made if it does not exist. It is beside the installation, or in the user's
cache if the installation cannot be written. Each file is the compiled client, or a few lines that run one module with the Python
of this installation without its site (`-S`), which halves the time that a command takes. A file with other content, of an older
release perhaps, is replaced by a rename, because other processes may be running it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import click

import hpcnode
import hpcsched
from hpcsched.cli import admin
from hpcsched.commands.options import Command, Option
from hpcsched.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
_TABLES = (
    "hacct", "hcancel", "hctl", "hinfo", "hlogs", "hprio", "hqueue", "hreport", "hsh", "hshare", "hsim", "htunnel", "hwhy"
)  # fmt: skip
_SLURMS = {
    "sacct": "hacct", "sattach": "slurm.sattach", "scancel": "hcancel", "scontrol": "slurm.scontrol", "sinfo": "hinfo",
    "sprio": "hprio", "squeue": "hqueue", "sshare": "hshare", "sstat": "slurm.sstat",
}  # fmt: skip
_TAKE_JOBS = ("hcancel", "hctl", "hlogs", "hmon", "hqueue", "hsh", "htunnel", "hwhy", "sattach", "scancel", "scontrol")

# Commands that list the possible values of an option when the key is pressed.
_JOBS, _PARTITIONS, _NODES = "hqueue -aqr", "hinfo -h -o %R", "hinfo -hN -o %n"
_VALUES = {"jobs": _JOBS, "jobid": _JOBS, "dependency": _JOBS, "partition": _PARTITIONS, "nodelist": _NODES, "nodes": _NODES,
           "exclude": _NODES}  # fmt: skip


class Completed(namedtuple("Completed", "name options verbs", defaults=((),))):
    """A command with its options and first words.

    An option is (long name, letter, whether it has a value, help).
    """

    __slots__ = ()

    name: str
    options: tuple[tuple[str, str, bool, str], ...]
    verbs: tuple[str, ...]


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.option("--install", is_flag=True, help="Install it for the shell instead of printing it.")
def completion(shell: str, install: bool) -> None:
    """Print the completion script of a shell. Use it with: source <(hpcsched completion bash)."""
    if not install:
        click.echo(text_for(shell), nl=False)
        return
    click.echo(f"written: {install_for(shell, os.environ)}")


def text_for(shell: str) -> str:
    """Return the script for the shell."""
    found = commands()
    if shell == "fish":
        return _fish(found)
    start = _ZSH if shell == "zsh" else ""
    return start + _bash(found)


def install_for(shell: str, environ: os._Environ[str] | dict[str, str]) -> Path:
    """Install the script for the shell; return the file, or the directory of the files."""
    home = Path(environ.get("HOME") or Path.home())
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local/share")
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    if shell == "zsh":
        raise ConfigError(
            "cannot install for zsh: it looks nowhere by itself; in ~/.zshrc: source <(hpcsched completion zsh)"
        )
    directory, end = (
        (data / "bash-completion/completions", "") if shell == "bash" else (config / "fish/completions", ".fish")
    )
    text = text_for(shell)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (command.name for command in commands()):
            (directory / f"{name}{end}").write_text(text)  # the shell loads the file with the name of the command
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return directory


def commands() -> list[Completed]:
    """Return all commands with the options that their help shows."""
    from hpcnode.commands import options as stepoptions  # all commands, of which slurm-path needs none
    from hpcsched.cli import halloc, hctl
    from hpcsched.cli.admin import hmon, hserve
    from hpcsched.cli.slurm import scontrol
    from hpcsched.jobscript import options as jobscript

    found = [_of_table(importlib.import_module(f"hpcsched.cli.{name}").COMMAND) for name in _TABLES]
    found.append(_of_table(hserve.COMMAND))
    for name, module in _SLURMS.items():
        found.append(_of_table(getattr(importlib.import_module(f"hpcsched.cli.{module}"), name.upper()).command))
    for name in ("hsub", "sbatch"):
        given = tuple((option.name, option.short, bool(option.metavar), option.help) for option in jobscript.OPTIONS)
        found.append(Completed(name, given))
    for names, options in ((("hrun", "srun"), stepoptions.OPTIONS), (("halloc", "salloc"), halloc.OPTIONS)):
        shown = tuple(
            (option.name, option.short, option.kind == stepoptions.VALUE, option.help)
            for option in options
            if not option.accepted
        )
        found += [Completed(name, shown) for name in names]
    verbs = {
        "hctl": hctl.VERBS,
        "hserve": (*hserve.JOB_VERBS, *hserve.VERBS, *hserve.CHILDREN),
        "scontrol": scontrol.VERBS,
    }
    found = [command._replace(verbs=tuple(verbs.get(command.name, ()))) for command in found]
    return [*found, _of_click("hmon", hmon.hmon), Completed("hpcsched", (), tuple(admin.COMMANDS))]


def _of_click(name: str, command: click.Command) -> Completed:
    options = [one for one in command.params if isinstance(one, click.Option)]
    rows = [(one.name or "", "", not one.is_flag, one.help or "") for one in options if one.name != "version"]
    return Completed(name, tuple(rows))


def _of_table(command: Command) -> Completed:
    return Completed(command.name, tuple(map(_row, command.options)))


def _row(option: Option) -> tuple[str, str, bool, str]:
    return option.name, option.short, bool(option.metavar) and option.bare is None, option.help


# ----- bash, and zsh


_ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""
_BASH = """\
# Completion of hpcsched's commands, made by: hpcsched completion
_hpcsched_words() {{  # the options of a command
  case $1 in
{options}
  esac
}}
_hpcsched_verbs() {{  # the first words of a command
  case $1 in
{verbs}
  esac
}}
_hpcsched_complete() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} name=${{COMP_WORDS[0]##*/}} ask= before=
  [ "$prev" = "=" ] && prev=${{COMP_WORDS[COMP_CWORD-2]}}
  [ "$cur" = "=" ] && cur=
  case $cur in
    --*=*) prev=${{cur%%=*}} before=${{cur%%=*}}= cur=${{cur#*=}} ;;  # zsh: one word
  esac
  case $name:$prev in
{values}
  esac
  if [ -z "$ask" ]; then
    case $cur in
      -*) COMPREPLY=($(compgen -W "$(_hpcsched_words "$name")" -- "$cur")); return ;;
    esac
    if [ "$COMP_CWORD" = 1 ] && [ -n "$(_hpcsched_verbs "$name")" ]; then
      COMPREPLY=($(compgen -W "$(_hpcsched_verbs "$name")" -- "$cur")); return
    fi
    case $name in
      {jobs}) ask="{ask_jobs}" ;;
      *) COMPREPLY=($(compgen -f -- "$cur")); return ;;
    esac
  fi
  COMPREPLY=($(compgen -P "$before" -W "$($ask 2>/dev/null)" -- "$cur"))
}}
complete -o bashdefault -F _hpcsched_complete {names}
"""


def _bash(found: Sequence[Completed]) -> str:
    options = [f"    {command.name}) echo '{' '.join(_spellings(command))}' ;;" for command in found]
    values = [
        f"    {command.name}:--{name}{f'|{command.name}:-{short}' if short else ''}) ask='{_VALUES[name]}' ;;"
        for command in found
        for name, short, has_value, _ in command.options
        if has_value and name in _VALUES
    ]
    return _BASH.format(
        options="\n".join(options),
        verbs="\n".join(
            f"    {command.name}) echo '{' '.join(command.verbs)}' ;;" for command in found if command.verbs
        ),
        values="\n".join(values),
        jobs="|".join(_TAKE_JOBS),
        ask_jobs=_JOBS,
        names=" ".join(command.name for command in found),
    )


def _spellings(command: Completed) -> list[str]:
    return [word for name, short, _, _ in command.options for word in ([f"-{short}"] if short else []) + [f"--{name}"]]


# ----- fish


def _fish(found: Sequence[Completed]) -> str:
    lines = ["# Completion of hpcsched's commands, made by: hpcsched completion"]
    for command in found:
        for name, short, has_value, text in command.options:
            words = [
                f"complete -c {command.name} -l {name}",
                *([f"-s {short}"] if short else []),
                f"-d {_quoted(text)}",
            ]
            if has_value:
                words.append(f"-x -a '({_VALUES[name]} 2>/dev/null)'" if name in _VALUES else "-r")
            lines.append(" ".join(words))
        if command.verbs:
            first = "test (count (commandline -opc)) -eq 1"
            lines.append(f"complete -c {command.name} -f -n '{first}' -a '{' '.join(command.verbs)}'")
        if command.name in _TAKE_JOBS:
            lines.append(f"complete -c {command.name} -f -a '({_JOBS} 2>/dev/null)'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# ----- the commands with Slurm's names


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

PROGRAM = """\
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
    """Return the content of each program.

    The compiled ones leave to ``hpcsched-command`` what needs Python.
    """
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
    return PROGRAM.format(first_line=first_line, roots=_roots(), module=module, function=function or "main")
