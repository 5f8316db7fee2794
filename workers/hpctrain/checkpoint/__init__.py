"""Checkpoints on a share that may be NFS.

Bases and increments, written in the background, restored bit by bit.

A checkpoint's way: `snapshot` copies the state, or `gradient_log` has recorded each step's gradients; `packer` packs, `publish`
writes and publishes by the rules of `files` if `fence` allows it, `retain` removes old ones, `restore` finds the newest one
that verifies, and `replay` takes logged steps again.  The format is in hpcsched-checkpoint(5).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.manifest import CheckpointFacts
    from hpctrain.checkpoint.reading.replay import replay_through
    from hpctrain.checkpoint.reading.restore import RestoredCheckpoint, restore_newest
    from hpctrain.checkpoint.script import Checkpointer
    from hpctrain.checkpoint.writing.fence import Claim, claim
    from hpctrain.checkpoint.writing.gradient_log import GradientLog
    from hpctrain.checkpoint.writing.maker import CheckpointReport
    from hpctrain.checkpoint.writing.retain import Retention, RetentionPolicy
    from hpctrain.checkpoint.writing.writer import CheckpointWriter, NextCheckpoint, ProcessWriter

# The modules of these names are imported on first use, because the process that writes must not import torch.
_HOMES = {
    "Checkpointer": "script",
    "Claim": "writing.fence",
    "CheckpointFacts": "format.manifest",
    "GradientLog": "writing.gradient_log",
    "ProcessWriter": "writing.writer",
    "RetentionPolicy": "writing.retain",
    "CheckpointReport": "writing.maker",
    "RestoredCheckpoint": "reading.restore",
    "Retention": "writing.retain",
    "NextCheckpoint": "writing.writer",
    "CheckpointWriter": "writing.writer",
    "claim": "writing.fence",
    "replay_through": "reading.replay",
    "restore_newest": "reading.restore",
}

__all__ = [
    "Checkpointer",
    "Claim",
    "CheckpointFacts",
    "GradientLog",
    "ProcessWriter",
    "RetentionPolicy",
    "CheckpointReport",
    "RestoredCheckpoint",
    "Retention",
    "NextCheckpoint",
    "CheckpointWriter",
    "claim",
    "replay_through",
    "restore_newest",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
