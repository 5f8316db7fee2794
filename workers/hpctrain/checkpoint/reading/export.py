"""A checkpoint as one file that other programs read: safetensors, or what torch.load takes.

Needs no model: logged steps are taken again by an optimizer that is made of what the log says of it.
Rules: a file appears whole; names are the model's own, without what stands before them, unless all tensors are asked for.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.reading.replay import can_retake, retake
from hpctrain.checkpoint.reading.restore import read_checkpoint
from hpctrain.checkpoint.writing.files import write_draft
from hpctrain.checkpoint.writing.gradient_log import difference, probe_of
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, of_model
from hpctrain.env import require
from hpctrain.errors import DamagedError, TrainError

# What stands before the names of a model: of hpctrain's loop and Hugging Face's Trainer, a script's own loop, Lightning.
BEFORE = ("model.", "parts.model.", "state_dict.")


def exported(directory: Path, name: str, *, everything: bool) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Read a checkpoint, logged steps included: the model's tensors by its own names, or all of them.

    Raises:
        DamagedError: it is not whole, or its steps cannot be taken again without the program that took them.
        TrainError: nothing in it is called as a model's weights are.
    """
    published = read_checkpoint(directory, name)
    snapshot = published.snapshot
    assert isinstance(snapshot, TensorSnapshot)
    tensors = snapshot.named()
    if published.logs:
        _take_again(directory, published, tensors)
    if not everything:
        tensors = _weights(tensors)
    return published.manifest, {name: one.clone() for name, one in tensors.items()}


def check_place(path: Path) -> None:
    """Return if there is a directory for the file, and nothing there that is none: reading takes a while.

    Raises:
        TrainError: says which.
    """
    if path.is_dir():
        raise TrainError(
            f"cannot export to {path}: it is a directory; name a file in it, like {path / 'model.safetensors'}"
        )
    if not path.parent.is_dir():
        raise TrainError(f"cannot export to {path}: there is no directory {path.parent}")


def write_export(path: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors to a file: of safetensors if it is called so, else of torch.save."""
    if path.suffix == ".safetensors":
        require("safetensors")
        from safetensors.torch import save  # noqa: PLC0415 (an optional package)

        content = save(tensors, {"step": str(manifest.facts.step), "checkpoint": manifest.name})
    else:
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        content = buffer.getvalue()
    os.replace(write_draft(path, content), path)


def _weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for before in BEFORE:
        if found := {name.removeprefix(before): one for name, one in tensors.items() if name.startswith(before)}:
            return found
    raise TrainError(
        f"cannot tell which of {len(tensors)} tensors are the model's: none is called {', '.join(BEFORE)}...; with --all "
        "all are exported"
    )


def _take_again(directory: Path, published: Published, tensors: dict[str, torch.Tensor]) -> None:
    if not can_retake(published.logs):
        raise DamagedError(
            "its steps can only be taken again by the program that took them: export the step of a base, or resume "
            "the run and let it end"
        )
    retake(directory, published.logs, tensors)
    assert published.manifest.log is not None
    apart = difference(probe_of(of_model(tensors)), published.manifest.log.probe)
    if apart:
        raise DamagedError(
            f"its logged steps lead to other weights here than where they were taken first (by up to {apart:g})"
        )
