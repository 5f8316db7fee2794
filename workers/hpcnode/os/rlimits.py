"""Resource limits that a job inherits from its submitter, as Slurm's `--propagate`.

A command writes its soft limits to one variable of the environment (`noted`). The controller removes limits that the
configuration does not propagate (`propagated`). The node applies the rest just before it executes the program (`readable`,
`apply`). ``asked:`` in front of the text means that the user named these limits.

Rules: only soft limits, and never above the node's hard limits. Unreadable parts are ignored, because the text may come from
anywhere.

Sources: sbatch(1), --propagate; getrlimit(2).
"""

from __future__ import annotations

import functools
import os
import resource

VARIABLE = "HPCSCHED_RLIMITS"
KINDS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
ALL = "ALL"
_NONE = "NONE"
_ASKED = "asked:"
_MAX_DIGITS = 18
_OF_MEMORY = (resource.RLIMIT_AS, resource.RLIMIT_DATA)

Limits = list[tuple[int, int]]  # (number of the resource, soft limit)


def environment() -> dict[str, str]:
    """Return this process's environment with its umask and limits, for the job's processes."""
    mask = os.umask(0o077)
    os.umask(mask)
    return {**os.environ, "SLURM_UMASK": "%04o" % mask, VARIABLE: noted()}


def names(text: str) -> frozenset[str]:
    """Return the kinds in ALL, NONE or a list such as ``NOFILE,STACK``.

    Raises ValueError with the unknown word.
    """
    words = [word.strip().upper().replace("RLIMIT_", "", 1) for word in text.split(",") if word.strip()]
    for word in words:
        if word not in KINDS and (word not in (ALL, _NONE) or len(words) > 1):
            raise ValueError(word)
    return frozenset(KINDS if words in ([], [ALL]) else () if words == [_NONE] else words)


def noted(asked: str = "") -> str:
    """Return this process's soft limits as text.

    `asked`: the kinds that the user named, "" for none named.
    """
    wanted = names(asked)
    soft = ["%s=%d" % (kind, resource.getrlimit(_number(kind))[0]) for kind in KINDS if kind in wanted]
    return (_ASKED if asked else "") + ",".join(soft)


def chosen(text: str, asked: str) -> str:
    """Return the limits of `noted` that the user asks for."""
    wanted = names(asked)
    return _ASKED + ",".join(pair for pair in _pairs(text) if pair.partition("=")[0] in wanted)


def propagated(text: str, wanted: frozenset[str]) -> str:
    """Return the limits of `noted` that are propagated: `wanted`, or those the user named."""
    if text.startswith(_ASKED):
        return text
    return ",".join(pair for pair in _pairs(text) if pair.partition("=")[0] in wanted)


@functools.lru_cache(maxsize=8)  # the jobs of a user often have the same
def readable(text: str) -> Limits:
    """Return the limits in `text`, without unreadable and unknown ones."""
    found: dict[str, int] = {}
    for pair in _pairs(text[:1000]):
        kind, _, value = pair.partition("=")
        digits = value[1:] if value.startswith("-") else value
        if kind in KINDS and digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS and value != "-0":
            found[kind] = resource.RLIM_INFINITY if value.startswith("-") else int(value)  # int: _MAX_DIGITS bounds it
    return [(_number(kind), soft) for kind, soft in found.items()]


def apply(limits: Limits) -> None:
    """Set the soft limits of this process, at most to its hard limits."""
    for number, soft in limits:
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
            soft = hard
        try:
            resource.setrlimit(number, (soft, hard))
        except (OSError, ValueError):
            pass  # the kernel has further maxima, such as fs.nr_open; the limit stays then


def lift_memory(limits: Limits) -> None:
    """Raise the memory limits of this process to its hard limits again."""
    for number, _ in limits:
        if number in _OF_MEMORY:
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (hard, hard))


def _pairs(text: str) -> list[str]:
    return text.replace(_ASKED, "", 1).split(",")


def _number(kind: str) -> int:
    number: int = getattr(resource, "RLIMIT_" + kind)
    return number
