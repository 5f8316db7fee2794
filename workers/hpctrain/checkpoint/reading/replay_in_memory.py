"""Logged steps of hpctrain's AdamW, taken again in memory: needs neither the model nor the optimizer.

AdamW moves each number by itself: a stretch of weights takes all of its steps one after another while it is in a core's cache,
and several threads take several stretches.  Does not know whether where the steps lead is right.
Rules: gradients are read, unpacked, verified and multiplied as they were; the bits do not depend on how tensors are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.checkpoint.format.chunks import ITEM_BYTES, TensorEntry
from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.format.step_log import StepEntry, StepLog
from hpctrain.checkpoint.reading.reader import Placed, Progress, Reader, finish, placed
from hpctrain.errors import DamagedError
from hpctrain.optim.adamw import LANES, AdamW, Rule, Stretch, each_of

OPEN_FILES = 64  # data files that are open at the same time


def can_retake(logs: tuple[Manifest, ...]) -> bool:
    """Whether all steps of these logs are AdamW's."""
    return all(manifest.log is not None and manifest.log.optimizer.get("kind") == AdamW.KIND for manifest in logs)


def retake(
    directory: Path,
    logs: tuple[Manifest, ...],
    tensors: Mapping[str, torch.Tensor],
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """This will bring tensors, by the names that manifests have, through the steps of `logs`; `tell` hears how far it is.

    Raises:
        DamagedError: gradients are not what was written, or not of these tensors.
    """
    steps = sum(len(manifest.log.steps) for manifest in logs if manifest.log)
    progress = Progress(tell, f"taking {steps} logged steps again", logs)
    with _one_thread_each(), Reader(directory, progress) as reader:
        for run in _runs(logs):
            _take(reader, run, tensors)
    for name, first in (logs[-1].log.tied if logs[-1].log else {}).items():
        tensors[f"model.{name}"].copy_(tensors[f"model.{first}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """A parameter in a flat array of gradients: its numbers are those from `low` to `high`."""

    low: int
    high: int
    decayed: bool
    live: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # weights and moments, flat


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A step, and where its gradients are."""

    manifest: Manifest
    descriptors: list[int]
    step: StepEntry


def _take(reader: Reader, run: list[Manifest], tensors: Mapping[str, torch.Tensor]) -> None:
    log = run[0].log
    assert log is not None
    rule, decayed = AdamW.from_settings(log.optimizer)
    with ExitStack() as stack:
        steps = [
            _Taken(manifest=manifest, descriptors=descriptors, step=step)
            for manifest in run
            for descriptors in [stack.enter_context(reader.opened(manifest))]
            for step in (manifest.log.steps if manifest.log else ())
        ]
        works = []
        for index, names in enumerate(log.order):
            moved = _moved(names, decayed, tensors, log.steps[0].flats[index])
            for low, parts in _parts([one.step.flats[index] for one in steps]):
                works.append(reader.pool.submit(_move, reader, rule, steps, index, low, parts, moved))
        finish(works)


def _move(
    reader: Reader,
    rule: Rule,
    steps: list[_Taken],
    index: int,
    low: int,
    parts: list[list[Placed]],
    moved: list[_Moved],
) -> None:
    """Take all steps with one part of one flat array, which begins at the number `low`."""
    dtype = steps[0].step.flats[index].dtype
    content = reader.memory(sum(chunk.bytes for _, _, chunk in parts[0]))
    grads = torch.frombuffer(content, dtype=getattr(torch, dtype))
    wide, rest = _by_lanes(_overlaps(moved, low, grads))
    for one, chunks in zip(steps, parts, strict=True):
        reader.read(one.descriptors, one.manifest, one.step.flats[index], chunks, content, {})
        if one.step.factor != 1.0:
            grads.mul_(one.step.factor)
        # In one call, not cut further: threads that call less often wait less for each other.
        for decayed, stretches in wide.items():
            rule.move_lanes(stretches, one.step.number, one.step.lr, decayed=decayed)
        for decayed, stretch in rest:
            rule.move(stretch, one.step.number, one.step.lr, decayed=decayed)


def _cut(stretch: Stretch, low: int, high: int) -> Stretch:
    return each_of(stretch, lambda one: one[low:high])


def _by_lanes(
    stretches: Iterable[tuple[bool, Stretch]],
) -> tuple[dict[bool, list[Stretch]], list[tuple[bool, Stretch]]]:
    """What a CPU moves whole, by whether it decays, and the few numbers at the ends of stretches that are left over."""
    wide: dict[bool, list[Stretch]] = {}
    rest: list[tuple[bool, Stretch]] = []
    for decayed, stretch in stretches:
        end = len(stretch[0]) // LANES * LANES
        if end:
            wide.setdefault(decayed, []).append(_cut(stretch, 0, end))
        if end < len(stretch[0]):
            rest.append((decayed, _cut(stretch, end, len(stretch[0]))))
    return wide, rest


def _overlaps(moved: list[_Moved], low: int, grads: torch.Tensor) -> Iterator[tuple[bool, Stretch]]:
    """The stretches of parameters whose gradients these are, and whether they decay."""
    high = low + len(grads)
    for one in moved[max(0, bisect_right(moved, low, key=lambda one: one.low) - 1) :]:
        if one.low >= high:
            break
        first, last = max(low, one.low), min(high, one.high)
        weights, mean, square = (tensor[first - one.low : last - one.low] for tensor in one.live)
        yield one.decayed, (weights, grads[first - low : last - low], mean, square)


def _moved(
    names: tuple[str, ...], decayed: frozenset[str], tensors: Mapping[str, torch.Tensor], flat: TensorEntry
) -> list[_Moved]:
    found, at = [], 0
    for name in names:
        live = [tensors.get(full) for full in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq")]
        if any(one is None for one in live):
            raise DamagedError(f"its log has gradients of {name!r}, which this model does not have")
        weights, mean, square = (one.view(-1) for one in live if one is not None)
        found.append(_Moved(low=at, high=at + len(weights), decayed=name in decayed, live=(weights, mean, square)))
        at += len(weights)
    if flat.shape != (at,):
        raise DamagedError(f"its log has {list(flat.shape)} gradients for {at} numbers of {names[0]!r} and others")
    return found


def _parts(flats: list[TensorEntry]) -> Iterator[tuple[int, list[list[Placed]]]]:
    """Each part of a flat array that begins and ends with chunks in all steps: its first number, and each step's chunks."""
    starts = sorted(set.intersection(*({low for _, low, _ in placed(flat)} for flat in flats)))
    parts: list[list[list[Placed]]] = [[[] for _ in flats] for _ in starts]
    for which, flat in enumerate(flats):
        for number, low, chunk in placed(flat):
            index = bisect_right(starts, low) - 1
            parts[index][which].append((number, low - starts[index], chunk))
    for start, part in zip(starts, parts, strict=True):
        yield start // ITEM_BYTES[flats[0].dtype], part


def _runs(logs: tuple[Manifest, ...]) -> Iterator[list[Manifest]]:
    """Logs one after another whose gradients lie alike, not more than can be open at the same time."""
    run: list[Manifest] = []
    for manifest in logs:
        if manifest.log is None or not manifest.log.steps:
            continue
        files = sum(len(one.data) for one in [*run, manifest])
        if run and (files > OPEN_FILES or _kind(run[0].log) != _kind(manifest.log)):
            yield run
            run = []
        run.append(manifest)
    if run:
        yield run


def _kind(log: StepLog | None) -> object:
    assert log is not None
    return log.order, dict(log.optimizer), [(flat.dtype, flat.shape) for flat in log.steps[0].flats]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Have threads that are started now compute with one each: else each would start as many as there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
