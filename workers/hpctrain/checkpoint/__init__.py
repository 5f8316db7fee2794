"""Checkpoints on a share that is only NFS: bases and increments, written in the background, restored bit by bit.

The way of one: `snapshot` copies, or `gradlog` has noted each step's gradients; `pack` shrinks, `write` publishes by the rules of
`files` if `fence` allows it, `retain` removes old ones, `restore` finds the newest that verifies, and `replay` takes logged
steps again.  The format is in hpcsched-checkpoint(5).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.checkpoint.background import BackgroundWriter, Wish, Writer
    from hpctrain.checkpoint.fence import Claim, claim
    from hpctrain.checkpoint.gradlog import GradientLog
    from hpctrain.checkpoint.kept import KeptWriter
    from hpctrain.checkpoint.maker import Report
    from hpctrain.checkpoint.manifest import Facts
    from hpctrain.checkpoint.replay import replay_through
    from hpctrain.checkpoint.restore import Restored, restore_newest
    from hpctrain.checkpoint.retain import Policy, Retention
    from hpctrain.checkpoint.script import Checkpointer

# Where each name is: whoever needs no torch (the process that writes) imports none.
_HOMES = {
    "BackgroundWriter": "background",
    "Checkpointer": "script",
    "Claim": "fence",
    "Facts": "manifest",
    "GradientLog": "gradlog",
    "KeptWriter": "kept",
    "Policy": "retain",
    "Report": "maker",
    "Restored": "restore",
    "Retention": "retain",
    "Wish": "background",
    "Writer": "background",
    "claim": "fence",
    "replay_through": "replay",
    "restore_newest": "restore",
}

__all__ = [
    "BackgroundWriter",
    "Checkpointer",
    "Claim",
    "Facts",
    "GradientLog",
    "KeptWriter",
    "Policy",
    "Report",
    "Restored",
    "Retention",
    "Wish",
    "Writer",
    "claim",
    "replay_through",
    "restore_newest",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
