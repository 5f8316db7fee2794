"""The manifest of a checkpoint, its name, and the names in a directory.

Format: man/hpcsched-checkpoint.5.  Knows no tensors and writes no files.
Rules: a manifest has a checksum of itself, and names its parent by name and checksum, so that chains cannot be mixed.  An
unknown version or kind is rejected, an unknown field ignored.  In a log of steps to replay, gradients are saved as summed over
the ranks, before clipping, with the factor of the clipping.  So the bits of the norm do not depend on the reader's ranks or
threads.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.chunks import TensorEntry, digest, tensor_from_json, tensor_to_json
from hpctrain.checkpoint.encryption import CheckpointKey, opened
from hpctrain.checkpoint.writing.buffers import Buffer
from hpctrain.checkpoint.writing.files import to_json
from hpctrain.errors import CheckpointKeyError, DamagedError

FORMAT = "hpctrain-checkpoint"
VERSION = 3
HASH, KEYED_HASH = "blake3", "blake3-keyed"
SUFFIX = ".json"
NAME = re.compile(r"step-(\d{10,})\.a(\d{4,})")
KINDS = ("base", "delta", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The checkpoint that an increment builds on."""

    name: str
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of chunks; `salt` if they are encrypted, in hexadecimal."""

    file: str
    bytes: int
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The facts of a checkpoint besides its tensors: step, attempt, job, time.

    `state` is the trainer's own (sampler, random numbers, schedule), JSON values only.
    """

    step: int
    attempt: int
    generation: int
    world: int
    job: str | None
    written_at_s: float
    state: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint: a base, or an increment on its parent."""

    facts: CheckpointFacts
    kind: str  # one of KINDS
    parent: Parent | None
    base: str
    depth: int  # number of increments since the base
    chunk_bytes: int
    data: tuple[DataFile, ...]  # one per rank that wrote
    tensors: tuple[TensorEntry, ...]  # of kind "gradients": only tensors that no optimizer moves
    log: StepLog | None = None  # of kind "gradients" only

    @property
    def name(self) -> str:
        """The published name, without the suffix."""
        return checkpoint_name(self.facts.step, self.facts.attempt)


def checkpoint_name(step: int, attempt: int) -> str:
    """Return the name of the checkpoint of a step by an attempt."""
    return f"step-{step:010d}.a{attempt:04d}"


def order_of(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a checkpoint's name; None if it is not such a name."""
    match = NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def facts_to_json(facts: CheckpointFacts) -> dict[str, object]:
    """Return a manifest's facts as JSON values."""
    return asdict(facts) | {"state": dict(facts.state)}


def facts_from_json(body: Mapping[str, Any]) -> CheckpointFacts:
    """Return the facts in a manifest.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or wrong.
    """
    return CheckpointFacts(
        step=int(body["step"]),
        attempt=int(body["attempt"]),
        generation=int(body["generation"]),
        world=int(body["world"]),
        job=body["job"],
        written_at_s=float(body["written_at_s"]),
        state=body["state"],
    )


def to_bytes(manifest: Manifest, key: CheckpointKey | None = None) -> bytes:
    """Return a manifest as JSON with its checksum; encrypted if there is a key."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "hash": KEYED_HASH if key else HASH,
        "name": manifest.name,
        "kind": manifest.kind,
        "parent": asdict(manifest.parent) if manifest.parent else None,
        "base": manifest.base,
        "depth": manifest.depth,
        "chunk_bytes": manifest.chunk_bytes,
        "data": [data_to_json(data) for data in manifest.data],
        "tensors": [tensor_to_json(tensor) for tensor in manifest.tensors],
        **facts_to_json(manifest.facts),
    }
    if manifest.log is not None:
        body["log"] = log_to_json(manifest.log)
    return checked_to_bytes(manifest.name, body, key)


def checked_to_bytes(name: str, body: Mapping[str, object], key: CheckpointKey | None) -> bytes:
    """Return a manifest or record with its checksum; encrypted under `name` if there is a key."""
    text = to_json(body)
    content = to_json({**body, "checksum": key.digest(text) if key else digest(text)}) + b"\n"
    return key.sealed(name, content) if key else content


def from_bytes(name: str, content: bytes, key: CheckpointKey | None = None) -> Manifest:
    """Return the manifest in the content of the file of this name, without its suffix.

    Raises: as `with_checksum`.
    """
    return with_checksum(name, content, key)[0]


def with_checksum(name: str, content: bytes, key: CheckpointKey | None = None) -> tuple[Manifest, str]:
    """Return the manifest in a file's content, and its checksum.

    Raises:
        DamagedError: it is incomplete, altered, of an unknown version, of another name, or contradicts itself.
        CheckpointKeyError: it is encrypted and there is no key or another one, or it is not and there is a key.
    """
    body = read_json(name, content, key)
    if body.get("format") != FORMAT:
        raise DamagedError("it is not a checkpoint manifest")
    hashes = KEYED_HASH if key else HASH
    if body.get("version") != VERSION or body.get("hash") != hashes:
        raise DamagedError(
            f"it is of version {body.get('version')} with {body.get('hash')} hashes; this program reads version "
            f"{VERSION} with {hashes}"
        )
    checksum = take_checksum(body, key)
    try:
        manifest = _from_json(body)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"a field is missing or wrong ({type(error).__name__}: {error})") from error
    if manifest.name != name:
        raise DamagedError(f"it has the name of {manifest.name}")
    return manifest, checksum


def read_json(name: str, content: bytes, key: CheckpointKey | None) -> dict[str, Any]:
    """Return what `checked_to_bytes` has made a file's content of, and the checksum in it.

    Raises: as `with_checksum`.
    """
    try:
        body = json.loads(opened(name, content, key))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is incomplete ({error})") from error
    if not isinstance(body, dict):
        raise DamagedError("it is not an object")
    return body


def take_checksum(body: dict[str, Any], key: CheckpointKey | None) -> str:
    """Remove the checksum from what `read_json` has returned, verify and return it.

    Raises:
        DamagedError: it is not the content's.
    """
    checksum = body.pop("checksum", None)
    text = to_json(body)
    if not isinstance(checksum, str) or (key.digest(text) if key else digest(text)) != checksum:
        raise DamagedError("its checksum does not match its content")
    return checksum


def data_to_json(data: DataFile) -> dict[str, object]:
    """Return a data file's entry in a manifest or a record."""
    return {"file": data.file, "bytes": data.bytes} | ({"salt": data.salt} if data.salt else {})


def data_from_json(entry: Mapping[str, Any]) -> DataFile:
    """Return the data file of an entry. Raises ValueError, KeyError, TypeError."""
    return DataFile(file=str(entry["file"]), bytes=int(entry["bytes"]), salt=str(entry.get("salt", "")))


def _data_from_json(entries: list[dict]) -> tuple[DataFile, ...]:
    data = tuple(data_from_json(entry) for entry in entries)
    outside = [entry.file for entry in data if "/" in entry.file or entry.file.startswith(".")]
    if outside:
        raise ValueError(f"data file {outside[0]!r} is outside of the directory")
    return data


def _from_json(body: dict) -> Manifest:
    if body["kind"] not in KINDS:
        raise ValueError(f"unknown kind {body['kind']!r}")
    parent = body["parent"]
    if (body["kind"] == "base") != (parent is None):
        raise ValueError("a base has no parent, an increment has one")
    data = _data_from_json(body["data"])
    manifest = Manifest(
        facts=facts_from_json(body),
        kind=body["kind"],
        parent=Parent(name=str(parent["name"]), checksum=str(parent["checksum"])) if parent else None,
        base=str(body["base"]),
        depth=int(body["depth"]),
        chunk_bytes=int(body["chunk_bytes"]),
        data=data,
        tensors=tuple(tensor_from_json(entry) for entry in body["tensors"]),
        log=log_from_json(body["log"]) if body["kind"] == "gradients" else None,
    )
    flats = [flat for step in manifest.log.steps for flat in step.flats] if manifest.log else []
    if any(chunk.file >= len(data) for tensor in (*manifest.tensors, *flats) for chunk in tensor.chunks):
        raise ValueError("a chunk is in a data file that the manifest does not name")
    return manifest


LATEST = "LATEST"
MOST_HEAD_BYTES = 256  # of a manifest, to tell whether it is encrypted


def check_key(directory: Path, key: CheckpointKey | None) -> None:
    """Check that the key fits all manifests and records of a directory.

    Raises:
        CheckpointKeyError: names the first file that it does not fit.
    """
    try:
        names = sorted((name for name in os.listdir(directory) if name.endswith(SUFFIX)), reverse=True)
    except OSError:
        return  # there are none, or reading them fails later
    for name in names:
        try:
            with (directory / name).open("rb") as stream:
                opened(name.removesuffix(SUFFIX), stream.read() if key else stream.read(MOST_HEAD_BYTES), key)
        except CheckpointKeyError as error:
            raise CheckpointKeyError(f"cannot use {directory / name}: {error}") from None
        except (DamagedError, OSError):
            continue


def checkpoint_names(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, newest first."""
    try:
        names = {name.removesuffix(SUFFIX) for name in os.listdir(directory) if name.endswith(SUFFIX)}
    except FileNotFoundError:
        return []
    names.update(_hinted(directory))
    return sorted((name for name in names if order_of(name)), key=lambda name: order_of(name) or (), reverse=True)


def _hinted(directory: Path) -> list[str]:
    """Return the name in the hint file.

    An NFS client may list an old directory, and yet read a new file.
    """
    try:
        name = (directory / LATEST).read_text(errors="replace").strip().removesuffix(SUFFIX)
    except OSError:
        return []
    return [name] if (directory / (name + SUFFIX)).exists() else []


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step that moved the weights."""

    number: int
    lr: float
    factor: float
    flats: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The logged steps between two checkpoints."""

    since: int  # the step of the first of the two
    steps: tuple[LoggedStep, ...]
    order: tuple[tuple[str, ...], ...]
    tied: Mapping[str, str]
    loose: Buffer
    device: Mapping[str, object]
    optimizer: Mapping[str, object]
    probe: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One step of the optimizer, in a manifest."""

    number: int  # as the optimizer counts, from 1
    lr: float
    factor: float  # factor of the gradients (clipping, loss scale)
    flats: tuple[TensorEntry, ...]  # one per list of names in the log's order


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """The steps since the parent that moved weights."""

    order: tuple[tuple[str, ...], ...]  # names of the parameters in each flat array, in order
    tied: Mapping[str, str]  # further names of tied parameters, each with its name in `order`
    device: Mapping[str, object]  # the device of the run
    optimizer: Mapping[str, object]  # its kind, and its arguments if it can be made of them
    probe: bytes  # some numbers of the weights after the last step, as float64
    steps: tuple[StepEntry, ...]


def log_to_json(log: StepLog) -> dict[str, object]:
    """Return a log's entry in a manifest."""
    steps = [
        {
            "number": step.number,
            "lr": step.lr,
            "factor": step.factor,
            "flats": [tensor_to_json(flat) for flat in step.flats],
        }
        for step in log.steps
    ]
    return {
        "order": [list(names) for names in log.order],
        "tied": dict(log.tied),
        "device": dict(log.device),
        "optimizer": dict(log.optimizer),
        "probe": log.probe.hex(),
        "steps": steps,
    }


def log_from_json(body: dict[str, Any]) -> StepLog:
    """Return the log of a manifest's entry.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or wrong.
    """
    order = tuple(tuple(str(name) for name in names) for names in body["order"])
    steps = []
    for step in body["steps"]:
        flats = tuple(tensor_from_json(flat) for flat in step["flats"])
        lr, factor = float(step["lr"]), float(step["factor"])
        if len(flats) != len(order) or not (math.isfinite(lr) and math.isfinite(factor)):
            raise ValueError(f"step {step['number']} of the log has {len(flats)} flats for {len(order)}, lr {lr}")
        steps.append(StepEntry(number=int(step["number"]), lr=lr, factor=factor, flats=flats))
    return StepLog(
        order=order,
        tied={str(name): str(first) for name, first in dict(body.get("tied", {})).items()},
        device=dict(body["device"]),
        optimizer=dict(body["optimizer"]),
        probe=bytes.fromhex(body["probe"]),
        steps=tuple(steps),
    )
