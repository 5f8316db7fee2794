"""The variables of srun's caller that a step gets. Source: srun(1), --export."""

from __future__ import annotations

import os
from typing import Dict, Mapping

from hpcnode.wire.gate import why_not_text


def exported(text: str, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that ``--export=text`` passes on: ALL, NONE, names, NAME=VALUE.

    Variables of the scheduler are always passed on.
    """
    words = [word for word in text.split(",") if word]
    env = {name: value for name, value in environ.items() if name.startswith(("HPCSCHED_", "SLURM_"))}
    if "ALL" in words or not words:
        env = dict(environ)
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            env[name] = value
        elif name not in ("ALL", "NONE") and name in environ:
            env[name] = environ[name]
    return as_text(env)


def as_text(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that are UTF-8 text and fit into a message.

    Hsub leaves out the others, too.
    """
    return {name: value for name, value in environ.items() if not why_not_text(name + value)}


def umask() -> str:
    """Return this process's umask, octal."""
    mask = os.umask(0o077)
    os.umask(mask)
    return "%04o" % mask
