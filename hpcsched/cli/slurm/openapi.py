"""What the JSON of all commands with Slurm's names has in common: Slurm's OpenAPI, data_parser v0.0.39, that of Slurm 23.02."""

from __future__ import annotations

import sys

from hpcsched.cli.slurm.face import SLURM_VERSION
from hpcsched.client import Json


def meta() -> Json:
    """Return what stands at the head of each answer."""
    major, micro, minor = SLURM_VERSION.split(".")
    return {
        "plugin": {"type": "openapi/v0.0.39", "name": "Slurm OpenAPI v0.0.39", "data_parser": "data_parser/v0.0.39"},
        "command": sys.argv,
        "Slurm": {
            "version": {"major": int(major), "micro": int(minor), "minor": int(micro)},
            "release": SLURM_VERSION,
        },
    }


def number(value: float | None) -> Json:
    """Return a number as the parser writes one that may be missing or without limit."""
    return {"set": value is not None, "infinite": False, "number": int(value or 0)}


def limit_minutes(seconds: float | None) -> Json:
    """Return a time limit in minutes; None is unlimited."""
    return {"set": True, "infinite": seconds is None, "number": 0 if seconds is None else int(seconds) // 60}
