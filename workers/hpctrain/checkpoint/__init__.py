"""Checkpoints on a shared file system, written in the background.

Bases and increments, restored bit by bit. NFS is enough.

A checkpoint's way: `writing.snapshot` copies the state, or `writing.gradient_log` has recorded each step's gradients;
`writing.publish` packs, writes and publishes by the rules of `writing.files`, which fences off older attempts, and removes old
checkpoints; `restore` finds the newest one that verifies, and `replay` takes logged steps again. The format is in
hpcsched-checkpoint(5).
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `Checkpointer`, imported on first use.

    The process that writes must not import torch.
    """
    if name != "Checkpointer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpctrain.checkpoint.script import Checkpointer

    return Checkpointer
