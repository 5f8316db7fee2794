"""Which checkpoints a directory has, by name.

Does not know whether they are whole.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.checkpoint.format.manifest import SUFFIX, order_of

LATEST = "LATEST"


def checkpoint_names(directory: Path) -> list[str]:
    """This will list the checkpoints by name, the newest first."""
    try:
        names = {name.removesuffix(SUFFIX) for name in os.listdir(directory) if name.endswith(SUFFIX)}
    except FileNotFoundError:
        return []
    names.update(_hinted(directory))
    return sorted((name for name in names if order_of(name)), key=lambda name: order_of(name) or (), reverse=True)


def _hinted(directory: Path) -> list[str]:
    """A client may list an old directory and yet read a new file: so the hint can only add a name."""
    try:
        name = (directory / LATEST).read_text(errors="replace").strip().removesuffix(SUFFIX)
    except OSError:
        return []
    return [name] if (directory / (name + SUFFIX)).exists() else []
