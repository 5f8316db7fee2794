"""A measured figure, and how figures are shown and kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row: what was measured, how much, and beside what."""

    name: str
    value: float
    unit: str
    bar: str = ""  # what was aimed at
    floor: float | None = None  # what the machine or a peer does, measured in the same run
    floor_name: str = ""
    samples: list[float] = field(default_factory=list)
    missing: str = ""  # why there is no value

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None


def from_samples(name: str, samples: Sequence[float], unit: str, **more: object) -> Figure:
    """Return the median of `samples` as a figure that keeps them all."""
    return Figure(
        name=name,
        value=statistics.median(samples),
        unit=unit,
        samples=[round(sample, 6) for sample in samples],
        **more,  # type: ignore[arg-type]
    )


def without_value(name: str, why: str, bar: str = "") -> Figure:
    """Return the row of what this run cannot measure."""
    return Figure(name=name, value=0.0, unit="", bar=bar, missing=why)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned text."""
    rows = [("what", "measured", "min-max", "ratio to", "bar")]
    for one in figures:
        spread = f"{min(one.samples):.4g}-{max(one.samples):.4g}" if one.samples else ""
        ratio = f"{one.ratio:.2f}x {one.floor_name} ({one.floor:.4g})" if one.ratio is not None else ""
        value = "-" if one.missing else f"{one.value:.4g} {one.unit}"
        rows.append((one.name, value, spread, one.missing or ratio, one.bar))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def save(figures: Sequence[Figure], path: Path) -> None:
    """Write the figures, with the machine that they were measured on, as JSON."""
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    body = {"version": 1, "at_s": time.time(), "machine": machine, "figures": [asdict(one) for one in figures]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
