"""Export a checkpoint to one file for other programs: safetensors, or for torch.load.

Needs no model: logged steps are replayed by the optimizer that the log describes.
Rules: a file appears as a whole.  Tensors have the model's own names without a prefix, unless all tensors are exported.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.reading.replay import can_replay_in_memory, replay_in_memory
from hpctrain.checkpoint.reading.restore import read_checkpoint
from hpctrain.checkpoint.writing.files import write_draft
from hpctrain.checkpoint.writing.gradient_log import difference, probe_of
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, of_model
from hpctrain.env import require
from hpctrain.errors import DamagedError, TrainError

# Prefixes of a model's tensors: of hpctrain's loop and Hugging Face's Trainer, a script's own loop, Lightning.
BEFORE = ("model.", "parts.model.", "state_dict.")


def exported(directory: Path, name: str, *, everything: bool) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return a checkpoint after its logged steps.

    The model's tensors by its own names, or all tensors.

    Raises:
        DamagedError: it is damaged, or only the program that took its steps can replay them.
        TrainError: none of its tensors has a model's prefix.
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
    """Check that the file can be created; reading the checkpoint takes a while.

    Raises:
        TrainError: tells why it cannot.
    """
    if path.is_dir():
        raise TrainError(
            f"cannot export to {path}: it is a directory; name a file in it, like {path / 'model.safetensors'}"
        )
    if not path.parent.is_dir():
        raise TrainError(f"cannot export to {path}: there is no directory {path.parent}")


def write_export(path: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors to a file.

    Safetensors by the suffix `.safetensors`, else by torch.save.
    """
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
        f"cannot tell which of {len(tensors)} tensors are the model's: none is called {', '.join(BEFORE)}...; use --all "
        "to export all"
    )


def _take_again(directory: Path, published: Published, tensors: dict[str, torch.Tensor]) -> None:
    if not can_replay_in_memory(published.logs):
        raise DamagedError(
            "its steps can only be taken again by the program that took them: export the step of a base, or resume "
            "the run and let it end"
        )
    replay_in_memory(directory, published.logs, tensors)
    assert published.manifest.log is not None
    apart = difference(probe_of(of_model(tensors)), published.manifest.log.probe)
    if apart:
        raise DamagedError(
            f"its logged steps lead to other weights here than where they were taken first (by up to {apart:g})"
        )
