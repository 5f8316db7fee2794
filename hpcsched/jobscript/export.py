"""``--export``: the variables of the submitter's environment that a job gets.

Knows nothing of what the scheduler adds later (`hpcsched.steps.environment`). Rules: ``ALL`` (the default) takes all, ``NONE``
and ``NIL`` none, a list the names in it; ``NAME=value`` sets one, ``ALL,NAME=value`` does both. Variables that describe a job
in which `hsub` itself runs are not taken, and values that cannot be variables of a job are left out with a note. The
submitter's umask and resource limits are always taken. Without the submitter's PATH, a job has the PATH of the node, with the
directories of Slurm's commands in front if the submitter has them. Sources: sbatch(1), --export; execve(2), "Limits".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcnode.os import rlimits
from hpcsched.errors import RequestError
from hpcsched.jobscript.values import short

MAX_VARIABLES = 10_000
MAX_ENV_BYTES = 1 << 20
MAX_STRING_BYTES = 128 << 10  # NAME=value and its NUL: what Linux lets one string of an environment have

UMASK = "SLURM_UMASK"
NODE_PATH = "/usr/local/bin:/usr/bin:/bin"
_SLURM_PATH = re.compile(r"/hpcsched/slurm(-[0-9a-f]{12})?/?\Z")  # what `hpcsched slurm-path` prints

_NAME = re.compile(r"[^=\x00-\x20\x7f]+\Z")

# What a job sets for itself says nothing of the jobs that are submitted from within it.
_OF_A_JOB = re.compile(
    r"SLURM_(?!TIME_FORMAT\Z|CONF\Z)|SLURMD_|HPCSCHED_(?!CONFIG\Z|API\Z)|SRUN_|PMIX?_|PRTE_|OMPI_|HYDRA_(?!FULL_ERROR\Z)"
)
# fmt: off
_OF_A_TASK = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
})
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What ``--export`` asks for: everything, or `names`; and what it sets itself."""

    everything: bool
    names: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()


def parse_export(text: str) -> Export:
    """Return what the text of ``--export`` asks for. Quotes keep commas in a value. Raises RequestError."""
    everything, nothing = False, False
    names: list[str] = []
    values: dict[str, str] = {}
    for item in _items(text):
        name, equals, value = item.partition("=")
        if not equals and name.upper() == "ALL":
            everything = True
        elif not equals and name.upper() in ("NONE", "NIL"):
            nothing = True
        elif _NAME.match(name) is None:
            raise RequestError(f"cannot export {short(name)}: it cannot be a variable's name")
        elif equals:
            values[name] = value
        else:
            names.append(name)
    if nothing and everything:
        raise RequestError(f"cannot read --export={short(text)}: it asks for both ALL and NONE")
    return Export(everything=everything, names=tuple(names), values=tuple(values.items()))


def _items(text: str) -> list[str]:
    """Return what stands between the commas of `text` that are not in quotes, without the quotes."""
    items: list[str] = []
    current: list[str] = []
    quote = ""
    for char in text:
        if quote and char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif not quote and char == ",":
            items.append("".join(current).strip())
            current = []
        else:
            current.append(char)
    if quote:
        raise RequestError(f"cannot read --export={short(text)}: it has a {quote} without its second one")
    items.append("".join(current).strip())
    return [item for item in items if item]


def _names_to_take(export: Export, environ: Mapping[str, str]) -> list[str]:
    """Return the names in `environ` that `export` asks for; within a job, without the variables of that job."""
    if not export.everything:
        return [name for name in export.names if name in environ and name != "_"]
    within_job = "HPCSCHED_JOB_ID" in environ or "SLURM_JOB_ID" in environ
    # bash's $_ names the command that ran hsub.
    return [name for name in environ if name != "_" and not (within_job and _is_of_a_job(name))]


def exported(export: Export, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the job takes along, and notes on those of `environ` that it cannot."""
    taken: dict[str, str] = {}
    left_out: list[str] = []
    for name in _names_to_take(export, environ):
        value = environ[name]
        if why_not_a_variable(name, value):
            left_out.append(name)
        else:
            taken[name] = value
    taken.update(export.values)
    for name in (UMASK, rlimits.VARIABLE):
        if name in environ:
            taken[name] = environ[name]
    slurm = [path for path in environ.get("PATH", "").split(":") if _SLURM_PATH.search(path)]
    if slurm and "PATH" not in taken:
        taken["PATH"] = ":".join([*slurm, NODE_PATH])
    return taken, [f"left out of the environment: {short(name)} is not UTF-8, or too long" for name in left_out]


def _is_of_a_job(name: str) -> bool:
    return name in _OF_A_TASK or _OF_A_JOB.match(name) is not None


def why_not_a_variable(name: str, value: str) -> str:
    """Return why no program can be given ``name=value``, or "" if one can."""
    if not name or "=" in name or "\0" in name or "\n" in name:
        return f"{short(name)} cannot be a variable's name"
    if "\0" in value:
        return f"the value of {short(name)} has a NUL"
    try:
        size = len(name.encode()) + len(value.encode()) + 2
    except UnicodeEncodeError:
        return f"{short(name)} is not UTF-8"
    if size > MAX_STRING_BYTES:
        return f"{short(name)} has {size} bytes, the most is {MAX_STRING_BYTES}"
    return ""
