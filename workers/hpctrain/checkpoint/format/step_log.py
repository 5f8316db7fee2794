"""A log of gradients: the steps to replay, a probe to verify them, and their JSON.

Pure values and their JSON; knows no torch.
Rules: gradients are saved as summed over the ranks, before clipping, with the factor of the clipping.  So the bits of the
norm do not depend on the reader's ranks or threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.format.chunks import TensorEntry, tensor_from_json, tensor_to_json
from hpctrain.checkpoint.writing.buffers import Buffer


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
