"""From a checkpoint that is a log of gradients to its state: the steps are taken again by the run's own optimizer.

Does not choose a checkpoint.  Steps of hpctrain's own AdamW on a CPU need no optimizer: `retake`.
Rules: the steps have to lead to the numbers that were noted when they were taken first; on another kind of device, or with
another torch, they may differ in last bits: then the difference is told, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.reading.replay_in_memory import can_retake, retake
from hpctrain.checkpoint.reading.restore import Gradients, Replay
from hpctrain.checkpoint.writing.gradient_log import device_facts, difference, probe_of, take_again
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.snapshot import LiveMemory, Snapshot, in_one_piece, of_model
from hpctrain.errors import DamagedError


def replay_through(
    model: torch.nn.Module,
    move: Callable[[int, float], None],
    live: Callable[[], Mapping[str, torch.Tensor]],
    warn: Callable[[str], None],
) -> Replay:
    """This will make what `restore_newest` needs; `move(number, lr)` is a step of the optimizer, `live` names all tensors."""

    def memory(logs: tuple[Manifest, ...]) -> LiveMemory | None:
        tensors = live()
        return LiveMemory(tensors) if can_retake(logs) and in_one_piece(tensors) else None

    def take(directory: Path, published: Published) -> None:
        if published.snapshot is None:
            tensors = live()
            retake(directory, published.logs, LiveMemory(tensors).named(), warn)
            _compare(published, of_model(tensors), device_facts(model), warn)
            return
        assert isinstance(published.snapshot, Snapshot)
        if can_retake(published.logs) and all(parameter.device.type == "cpu" for parameter in model.parameters()):
            tensors = published.snapshot.named()
            retake(directory, published.logs, tensors, warn)
            _compare(published, of_model(tensors), device_facts(model), warn)
            return
        published.snapshot.pour(live())
        named = dict(model.named_parameters())
        loose = {entry.name for entry in published.manifest.tensors}
        gradients = iter(Gradients(directory, published.logs))
        for manifest in published.logs:
            log = manifest.log
            assert log is not None
            missing = [name for names in log.order for name in names if name not in named]
            if missing:
                raise DamagedError(f"its log has gradients of {missing[0]!r}, which this model does not have")
            for step in log.steps:
                _check_sizes(log.order, [flat.shape for flat in step.flats], named)
            take_again(named, move, log, gradients)
        _keep_loose(published, live(), loose)
        _compare(published, model.state_dict(), device_facts(model), warn)
        published.snapshot.fill(live())

    return Replay(take=take, memory=memory)


def _keep_loose(published: Published, live: Mapping[str, torch.Tensor], loose: set[str]) -> None:
    """What no optimizer moves is as it was read, whatever the steps did."""
    assert isinstance(published.snapshot, Snapshot)
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
    apart = difference(now, log.probe)
    if here == dict(log.device):
        raise DamagedError(
            f"its logged steps led to other weights than when they were taken first (by up to {apart:g})"
        )
    warn(
        f"checkpoint {published.manifest.name}: its last steps were taken again on {_words(here)}, first on "
        f"{_words(log.device)}: weights differ by up to {apart:g}"
    )


def _words(facts: Mapping[str, object]) -> str:
    return f"{facts.get('type')} {facts.get('name')} with torch {facts.get('torch')}"
