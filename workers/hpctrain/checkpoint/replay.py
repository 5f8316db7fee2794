"""Replay a log of gradients to a checkpoint's state, by the optimizer or in memory.

Steps of hpctrain's own AdamW on a CPU need neither model nor optimizer (`replay_in_memory`).  AdamW moves each number by
itself, so a stretch of weights takes all its steps while it is in a core's cache, and several threads take several stretches.
Does not choose a checkpoint.
Rules: the replayed weights must have the numbers that were recorded.  On another kind of device, or with another torch, the
last bits may differ; then the difference is printed, and the run continues.  Gradients are read, unpacked, verified and
multiplied as they were; the bits do not depend on how tensors are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.checkpoint.chunks import ITEM_BYTES, TensorEntry
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import Manifest, StepEntry, StepLog
from hpctrain.checkpoint.restore import ChunkReader, Gradients, Placed, ReadProgress, Replay, finish, placed
from hpctrain.checkpoint.writing.gradient_log import device_facts, difference, probe_of, replay_steps
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.snapshot import LiveMemory, TensorSnapshot, in_one_piece, of_model
from hpctrain.errors import DamagedError
from hpctrain.optim.adamw import LANES, AdamW, Stretch, UpdateRule, each_of


def replay_through(
    model: torch.nn.Module,
    move: Callable[[int, float], None],
    live: Callable[[], Mapping[str, torch.Tensor]],
    warn: Callable[[str], None],
    key: CheckpointKey | None = None,
) -> Replay:
    """Return the replay for `restore_newest`.

    `move(number, lr)` steps the optimizer, `live` returns all tensors.
    """

    def memory(logs: tuple[Manifest, ...]) -> LiveMemory | None:
        tensors = live()
        return LiveMemory(tensors) if can_replay_in_memory(logs) and in_one_piece(tensors) else None

    def take(directory: Path, published: Published) -> None:
        if published.snapshot is None:
            tensors = live()
            replay_in_memory(directory, published.logs, LiveMemory(tensors).named(), warn, key)
            _compare(published, of_model(tensors), device_facts(model), warn)
            return
        assert isinstance(published.snapshot, TensorSnapshot)
        if can_replay_in_memory(published.logs) and all(
            parameter.device.type == "cpu" for parameter in model.parameters()
        ):
            tensors = published.snapshot.named()
            replay_in_memory(directory, published.logs, tensors, warn, key)
            _compare(published, of_model(tensors), device_facts(model), warn)
            return
        published.snapshot.pour(live())
        named = dict(model.named_parameters())
        loose = {entry.name for entry in published.manifest.tensors}
        gradients = iter(Gradients(directory, published.logs, key))
        for manifest in published.logs:
            log = manifest.log
            assert log is not None
            missing = [name for names in log.order for name in names if name not in named]
            if missing:
                raise DamagedError(f"its log has gradients of {missing[0]!r}, which this model does not have")
            for step in log.steps:
                _check_sizes(log.order, [flat.shape for flat in step.flats], named)
            replay_steps(named, move, log, gradients)
        _keep_loose(published, live(), loose)
        _compare(published, model.state_dict(), device_facts(model), warn)
        published.snapshot.fill(live())

    return Replay(take=take, memory=memory)


def _keep_loose(published: Published, live: Mapping[str, torch.Tensor], loose: set[str]) -> None:
    """Copy the tensors that no optimizer moves from the snapshot, whatever the steps did."""
    assert isinstance(published.snapshot, TensorSnapshot)
    with torch.no_grad():
        for slot, tensor in zip(published.snapshot.layout, published.snapshot.tensors(), strict=True):
            if slot.name in loose:
                live[slot.name].copy_(tensor)


def _check_sizes(
    order: tuple[tuple[str, ...], ...], shapes: list[tuple[int, ...]], named: Mapping[str, torch.nn.Parameter]
) -> None:
    for names, shape in zip(order, shapes, strict=True):
        numbers = sum(named[name].numel() for name in names)
        if shape != (numbers,):
            raise DamagedError(f"its log has {list(shape)} gradients for {numbers} numbers of {names[0]!r} and others")


def _compare(
    published: Published, state: Mapping[str, torch.Tensor], here: dict[str, object], warn: Callable[[str], None]
) -> None:
    log = published.manifest.log
    assert log is not None
    now = probe_of(state)
    if now == log.probe:
        return
    largest = difference(now, log.probe)
    if here == dict(log.device):
        raise DamagedError(
            f"its logged steps led to other weights than when they were taken first (by up to {largest:g})"
        )
    warn(
        f"checkpoint {published.manifest.name}: its last steps were taken again on {_words(here)}, first on "
        f"{_words(log.device)}: weights differ by up to {largest:g}"
    )


def _words(facts: Mapping[str, object]) -> str:
    return f"{facts.get('type')} {facts.get('name')} with torch {facts.get('torch')}"


OPEN_FILES = 64  # data files that are open at the same time


def can_replay_in_memory(logs: tuple[Manifest, ...]) -> bool:
    """Return whether all steps of these logs are AdamW's."""
    return all(manifest.log is not None and manifest.log.optimizer.get("kind") == AdamW.KIND for manifest in logs)


def replay_in_memory(
    directory: Path,
    logs: tuple[Manifest, ...],
    tensors: Mapping[str, torch.Tensor],
    print_line: Callable[[str], None] = lambda _: None,
    key: CheckpointKey | None = None,
) -> None:
    """Take the steps of `logs` on tensors, by their names in manifests.

    `print_line` gets lines about the progress.

    Raises:
        DamagedError: gradients are damaged, or are not of these tensors.
    """
    steps = sum(len(manifest.log.steps) for manifest in logs if manifest.log)
    progress = ReadProgress(print_line, f"taking {steps} logged steps again", logs)
    with _one_thread_each(), ChunkReader(directory, progress, key) as reader:
        for run in _runs(logs):
            _take(reader, run, tensors)
    for name, first in (logs[-1].log.tied if logs[-1].log else {}).items():
        tensors[f"model.{name}"].copy_(tensors[f"model.{first}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """A parameter in a flat array of gradients: its numbers are [low, high)."""

    low: int
    high: int
    decayed: bool
    live: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # flat: weights and both moments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A step, and the place of its gradients."""

    manifest: Manifest
    descriptors: list[int]
    step: StepEntry


def _take(reader: ChunkReader, run: list[Manifest], tensors: Mapping[str, torch.Tensor]) -> None:
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
            for low, parts in _parts([taken.step.flats[index] for taken in steps]):
                works.append(reader.pool.submit(_move, reader, rule, steps, index, low, parts, moved))
        finish(works)


def _move(
    reader: ChunkReader,
    rule: UpdateRule,
    steps: list[_Taken],
    index: int,
    low: int,
    parts: list[list[Placed]],
    moved: list[_Moved],
) -> None:
    """Take all steps with one part of one flat array, which begins at number `low`."""
    dtype = steps[0].step.flats[index].dtype
    content = reader.memory(sum(chunk.bytes for _, _, chunk in parts[0]))
    grads = torch.frombuffer(content, dtype=getattr(torch, dtype))
    wide, rest = _by_lanes(_overlaps(moved, low, grads))
    for taken, chunks in zip(steps, parts, strict=True):
        reader.read(taken.descriptors, taken.manifest, taken.step.flats[index], chunks, content, {})
        if taken.step.factor != 1.0:
            grads.mul_(taken.step.factor)
        # In one call, not cut further: fewer calls mean less waiting of threads for each other.
        for decayed, stretches in wide.items():
            rule.move_lanes(stretches, taken.step.number, taken.step.lr, decayed=decayed)
        for decayed, stretch in rest:
            rule.move(stretch, taken.step.number, taken.step.lr, decayed=decayed)


def _cut(stretch: Stretch, low: int, high: int) -> Stretch:
    return each_of(stretch, lambda tensor: tensor[low:high])


def _by_lanes(
    stretches: Iterable[tuple[bool, Stretch]],
) -> tuple[dict[bool, list[Stretch]], list[tuple[bool, Stretch]]]:
    """Return the parts in multiples of `LANES`, by decay, and the remaining numbers."""
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
    """Yield the stretches of parameters for these gradients, and whether they decay."""
    high = low + len(grads)
    for parameter in moved[max(0, bisect_right(moved, low, key=lambda parameter: parameter.low) - 1) :]:
        if parameter.low >= high:
            break
        first, last = max(low, parameter.low), min(high, parameter.high)
        weights, mean, square = (tensor[first - parameter.low : last - parameter.low] for tensor in parameter.live)
        yield parameter.decayed, (weights, grads[first - low : last - low], mean, square)


def _moved(
    names: tuple[str, ...], decayed: frozenset[str], tensors: Mapping[str, torch.Tensor], flat: TensorEntry
) -> list[_Moved]:
    found, at = [], 0
    for name in names:
        live = [tensors.get(full) for full in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq")]
        if any(tensor is None for tensor in live):
            raise DamagedError(f"its log has gradients of {name!r}, which this model does not have")
        weights, mean, square = (tensor.view(-1) for tensor in live if tensor is not None)
        found.append(_Moved(low=at, high=at + len(weights), decayed=name in decayed, live=(weights, mean, square)))
        at += len(weights)
    if flat.shape != (at,):
        raise DamagedError(f"its log has {list(flat.shape)} gradients for {at} numbers of {names[0]!r} and others")
    return found


def _parts(flats: list[TensorEntry]) -> Iterator[tuple[int, list[list[Placed]]]]:
    """Yield parts that begin and end with chunks in all steps.

    The first number, and each step's chunks.
    """
    starts = sorted(set.intersection(*({low for _, low, _ in placed(flat)} for flat in flats)))
    parts: list[list[list[Placed]]] = [[[] for _ in flats] for _ in starts]
    for which, flat in enumerate(flats):
        for number, low, chunk in placed(flat):
            index = bisect_right(starts, low) - 1
            parts[index][which].append((number, low - starts[index], chunk))
    for start, part in zip(starts, parts, strict=True):
        yield start // ITEM_BYTES[flats[0].dtype], part


def _runs(logs: tuple[Manifest, ...]) -> Iterator[list[Manifest]]:
    """Yield runs of logs with the same layout, at most as many as can be open at once."""
    run: list[Manifest] = []
    for manifest in logs:
        if manifest.log is None or not manifest.log.steps:
            continue
        files = sum(len(log.data) for log in [*run, manifest])
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
    """Let new threads compute with one core each.

    By default each would start as many threads as there are cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
