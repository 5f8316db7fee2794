"""Inspect a directory of checkpoints.

`python -m hpctrain.checkpoint list|verify|prune|export DIRECTORY ...`.

`hctl checkpoint` runs it.  Does not know jobs.
Rules of an export: it needs no model, because logged steps are replayed by the optimizer that the log describes.  A file
appears as a whole.  Tensors have the model's own names without a prefix, unless all tensors are exported.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.encryption import CheckpointKey, checkpoint_key
from hpctrain.checkpoint.manifest import Manifest, check_key, checkpoint_names
from hpctrain.checkpoint.replay import can_replay_in_memory, replay_in_memory
from hpctrain.checkpoint.restore import read_chain, read_checkpoint, verify_log
from hpctrain.checkpoint.writing.files import write_draft
from hpctrain.checkpoint.writing.gradient_log import difference, probe_of
from hpctrain.checkpoint.writing.publish import Published, RetentionPolicy, prune
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, of_model
from hpctrain.env import require
from hpctrain.errors import DamagedError, TrainError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    1 if a checkpoint is damaged, or the command failed.
    """
    options = _parser().parse_args(argv)
    directory = options.directory
    if (directory / "checkpoints").is_dir():
        directory = directory / "checkpoints"
    try:
        if not checkpoint_names(directory):
            raise TrainError(f"cannot find checkpoints in {directory}: there is no manifest; name a run's --out")
        options.key = checkpoint_key(options.key_file, options.key_command, os.environ)
        check_key(directory, options.key)
        work: Callable[[Path, argparse.Namespace], int] = options.work
        return work(directory, options)
    except (TrainError, OSError) as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpctrain.checkpoint", description="Inspect the checkpoints of a run.")
    words = parser.add_subparsers(required=True, metavar="list|verify|prune|export")
    for name, work, text in (
        ("list", _list, "list the checkpoints, newest first"),
        ("verify", _verify, "read everything, and name damaged checkpoints"),
        ("prune", _prune, "remove old chains; the newest undamaged one stays"),
        ("export", _export, "write a checkpoint to a file: FILE.safetensors, or for torch.load"),
    ):
        word = words.add_parser(name, help=text, description=text)
        word.add_argument("directory", type=Path, metavar="DIRECTORY", help="a run's --out, or its checkpoints/")
        word.set_defaults(work=work)
        word.add_argument("--key-file", type=Path, metavar="FILE", help="file with the key of encrypted checkpoints")
        word.add_argument("--key-command", metavar="COMMAND", help="command that prints this key")
        if name == "prune":
            word.add_argument(
                "--keep", type=_chains, default=2, metavar="K", help="keep the newest K chains (%(default)s)"
            )
            word.add_argument(
                "--every", type=_hours, default=0.0, metavar="HOURS", help="also keep one chain per HOURS hours"
            )
        if name in ("list", "verify"):
            word.add_argument("--json", action="store_true", help="print as JSON, version 1")
        if name in ("export", "verify"):
            word.add_argument(
                "--step", type=_step, help="step of the checkpoint (default: the newest undamaged one, or all)"
            )
        if name == "export":
            word.add_argument("file", type=Path, metavar="FILE")
            word.add_argument("--all", action="store_true", help="the optimizer's state too, not only the weights")
    return parser


def _chains(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of chains; keep at least 1")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours, for example 24 (0: none)")
    return hours


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; `list` shows the steps")
    return int(text)


def _list(directory: Path, options: argparse.Namespace) -> int:
    rows = [row for name in checkpoint_names(directory) if (row := _listed(directory, name, options.key)) is not None]
    if options.json:
        _print_json(directory, rows)
    else:
        print(f"{'STEP':>10}  {'KIND':<9}  {'ATTEMPT':>7}  {'RANKS':>5}  {'MB':>10}  {'WRITTEN':<19}  PARENT")
        for row in rows:
            print(_line(row))
    return int(any(row["damage"] for row in rows))


def _listed(directory: Path, name: str, key: CheckpointKey | None) -> dict[str, Any] | None:
    """Return the facts of a checkpoint's manifest; None: it was removed meanwhile."""
    try:
        manifest = read_chain(directory, name, key)[-1][0]
    except DamagedError as error:
        return {"name": name, "damage": str(error)} if _is_there(directory, name) else None
    facts = manifest.facts
    return {
        "name": name,
        "step": facts.step,
        "kind": manifest.kind,
        "attempt": facts.attempt,
        "ranks": facts.world,
        "bytes": sum(data.bytes for data in manifest.data),
        "written_at_s": facts.written_at_s,
        "parent": manifest.parent.name if manifest.parent else None,
        "damage": None,
    }


def _line(row: Mapping[str, Any]) -> str:
    if row["damage"]:
        return f"{row['name']}: damaged: {row['damage']}"
    written = datetime.fromtimestamp(row["written_at_s"]).isoformat(sep=" ", timespec="seconds")
    return (
        f"{row['step']:>10}  {row['kind']:<9}  {row['attempt']:>7}  {row['ranks']:>5}  {row['bytes'] / 1e6:>10.2f}  "
        f"{written}  {row['parent'] or ''}"
    )


def _verify(directory: Path, options: argparse.Namespace) -> int:
    rows = []
    for name in _wanted(directory, options.step):
        started_s = time.perf_counter()
        damage = None
        try:
            _check(directory, name, options.key)
        except DamagedError as error:
            if not _is_there(directory, name):
                continue  # removed meanwhile
            damage = str(error)
        rows.append({"name": name, "damage": damage})
        if not options.json:
            seconds = time.perf_counter() - started_s
            print(f"{name}: damaged: {damage}" if damage else f"{name}: whole ({seconds:.1f} s)", flush=True)
    if options.json:
        _print_json(directory, rows)
    return int(any(row["damage"] for row in rows))


def _print_json(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    print(json.dumps({"version": 1, "directory": str(directory), "checkpoints": rows}))


def _is_there(directory: Path, name: str) -> bool:
    """Return whether a checkpoint still exists: a run removes old ones, their manifests first."""
    return name in checkpoint_names(directory)


def _check(directory: Path, name: str, key: CheckpointKey | None) -> None:
    published = read_checkpoint(directory, name, key=key)
    verify_log(directory, published.logs, key)


def _prune(directory: Path, options: argparse.Namespace) -> int:
    policy = RetentionPolicy(keep=options.keep, every_s=3600 * options.every)
    whole: set[str] = set()  # undamaged chains
    damaged = []
    for name in checkpoint_names(directory):
        if len(whole) >= policy.keep:
            break
        if _is_whole(directory, name, options.key):
            whole.add(read_chain(directory, name, options.key)[0][0].name)
        else:
            print(f"{name} is damaged and does not count")
            damaged.append(name)
    if not whole:
        raise TrainError(f"cannot prune {directory}: no checkpoint is undamaged, so nothing is removed")
    removed = prune(directory, policy, damaged, options.key)
    print("\n".join([*removed, f"removed {len(removed)} files"]))
    return 0


def _is_whole(directory: Path, name: str, key: CheckpointKey | None) -> bool:
    try:
        _check(directory, name, key)
    except DamagedError:
        return False
    return True


def _export(directory: Path, options: argparse.Namespace) -> int:
    check_place(options.file)
    wanted = _wanted(directory, options.step)
    while wanted:
        name = wanted.pop(0)
        try:
            manifest, tensors = exported(directory, name, everything=options.all, key=options.key)
        except DamagedError as error:
            if not _is_there(directory, name):
                wanted = _wanted(directory, options.step)
                continue
            print(f"{name} cannot be used: {error}; trying the one before", file=sys.stderr)
            continue
        write_export(options.file, manifest, tensors)
        write_description(directory, options.file)
        print(f"{options.file}: step {manifest.facts.step}, {len(tensors)} tensors{_note(manifest)}")
        return 0
    raise TrainError(f"cannot export from {directory}: no checkpoint{_of(options.step)} is undamaged")


def _note(manifest: Manifest) -> str:
    return "; its logged steps were taken again" if manifest.log is not None else ""


def _of(step: int | None) -> str:
    return "" if step is None else f" of step {step}"


def _wanted(directory: Path, step: int | None) -> list[str]:
    names = checkpoint_names(directory)
    wanted = [name for name in names if step is None or name.startswith(f"step-{step:010d}.")]
    if not wanted:
        raise TrainError(f"cannot find a checkpoint{_of(step)} in {directory}: there are {', '.join(names[:9])}")
    return wanted


# Prefixes of a model's tensors: of hpctrain's loop and Hugging Face's Trainer, a script's own loop, Lightning.
BEFORE = ("model.", "parts.model.", "state_dict.")


def exported(
    directory: Path, name: str, *, everything: bool, key: CheckpointKey | None = None
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return a checkpoint after its logged steps.

    The model's tensors by its own names, or all tensors.

    Raises:
        DamagedError: it is damaged, or only the program that took its steps can replay them.
        TrainError: none of its tensors has a model's prefix.
    """
    published = read_checkpoint(directory, name, key=key)
    snapshot = published.snapshot
    assert isinstance(snapshot, TensorSnapshot)
    tensors = snapshot.named()
    if published.logs:
        _take_again(directory, published, tensors, key)
    if not everything:
        tensors = _weights(tensors)
    return published.manifest, {name: tensor.clone() for name, tensor in tensors.items()}


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


MODEL_FILE = "model.safetensors"  # Hugging Face's name
DESCRIPTION = ("config.json", "tokenizer.json", "tokenizer_config.json")


def write_description(directory: Path, path: Path) -> None:
    """Copy what a run says of its model beside a file of the name that Hugging Face uses."""
    folder = (directory.parent if directory.name == "checkpoints" else directory) / "model"
    if path.name != MODEL_FILE:
        return
    for name in DESCRIPTION:
        if (folder / name).is_file():
            os.replace(write_draft(path.parent / name, (folder / name).read_bytes()), path.parent / name)


def _weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for before in BEFORE:
        if found := {name.removeprefix(before): tensor for name, tensor in tensors.items() if name.startswith(before)}:
            return found
    raise TrainError(
        f"cannot tell which of {len(tensors)} tensors are the model's: none is called {', '.join(BEFORE)}...; use --all "
        "to export all"
    )


def _take_again(
    directory: Path, published: Published, tensors: dict[str, torch.Tensor], key: CheckpointKey | None
) -> None:
    if not can_replay_in_memory(published.logs):
        raise DamagedError(
            "its steps can only be taken again by the program that took them: export the step of a base, or resume "
            "the run and let it end"
        )
    replay_in_memory(directory, published.logs, tensors, key=key)
    assert published.manifest.log is not None
    largest = difference(probe_of(of_model(tensors)), published.manifest.log.probe)
    if largest:
        raise DamagedError(
            f"its logged steps lead to other weights here than where they were taken first (by up to {largest:g})"
        )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader has closed the pipe
    sys.exit(main())
