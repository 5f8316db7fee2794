"""The text that Prometheus reads, in its own format and in OpenMetrics.

Both formats have the same lines of samples, and differ in the headers of a family and in the end.
So lines can be made when their values come, and joined when somebody asks: `Page` takes single
samples and chunks of lines. The official client library takes ten times as long.

Rules: a family's lines follow each other, and each label set occurs once. Label values are escaped.

Sources: Prometheus' "Exposition formats", the OpenMetrics 1.0 specification.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcsched.metrics.series import Series, SeriesKind

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Family(NamedTuple):
    """The header of a family of samples. `name` is that of its samples."""

    name: str
    kind: SeriesKind
    help: str
    unit: str = ""


def family_of(series: Series) -> Family:
    """Return the header of a series of the table."""
    return Family(series.full_name, series.kind, series.help, series.unit)


def labels_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the labels in braces, "" for none."""
    if not names:
        return ""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def prefix_of(series: Series, values: Sequence[str]) -> str:
    """Return the beginning of a sample's line, up to its value."""
    return f"{series.full_name}{labels_text(series.labels, values)} "


def number_text(value: float) -> str:
    """Return a sample's value as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


class Histogram:
    """Counts of observed values in buckets, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Return how many values were observed."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Return the sum of the values."""
        return self._sum

    def lines(self, name: str, names: Sequence[str], values: Sequence[str]) -> str:
        """Return its lines as the family `name`: cumulative buckets, sum and count."""
        made, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            labels = labels_text((*names, "le"), (*values, number_text(float(bound))))
            made.append(f"{name}_bucket{labels} {total}\n")
        labels = labels_text(names, values)
        made.append(f"{name}_sum{labels} {number_text(self._sum)}\n{name}_count{labels} {total}\n")
        return "".join(made)


class Page:
    """Families of samples in the making."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._chunks: dict[str, list[str]] = {}

    def add(self, series: Series, values: Sequence[str], value: float) -> None:
        """Add one sample of a series of the table."""
        self.chunk(family_of(series), f"{prefix_of(series, values)}{number_text(value)}\n")

    def histogram(self, series: Series, values: Sequence[str], found: Histogram) -> None:
        """Add a histogram of the table."""
        self.chunk(family_of(series), found.lines(series.full_name, series.labels, values))

    def chunk(self, family: Family, *lines: str) -> None:
        """Add complete lines of a family."""
        self._families.setdefault(family.name, family)
        self._chunks.setdefault(family.name, []).extend(lines)

    def text(self, *, open_metrics: bool = False) -> str:
        """Return the page. Families without samples are left out."""
        return "".join(self.parts(open_metrics=open_metrics))

    def parts(self, *, open_metrics: bool = False) -> Iterator[str]:
        """Yield the page, a family at a time."""
        for name, family in self._families.items():
            yield _header(family, open_metrics=open_metrics) + "".join(self._chunks[name])
        if open_metrics:
            yield "# EOF\n"


def _header(family: Family, *, open_metrics: bool) -> str:
    name, kind = family.name, family.kind
    help_text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    if not open_metrics:
        kind_text = "gauge" if kind is SeriesKind.INFO else kind.value
        return f"# HELP {name} {help_text}\n# TYPE {name} {kind_text}\n"
    base = name.removesuffix("_total") if kind is SeriesKind.COUNTER else name.removesuffix("_info")
    help_text = help_text.replace('"', r"\"")
    unit = f"# UNIT {base} {family.unit}\n" if family.unit else ""
    return f"# TYPE {base} {kind.value}\n{unit}# HELP {base} {help_text}\n"


def content_type_for(accept: str) -> str:
    """Return the format that a client with this `Accept` header gets."""
    return OPEN_METRICS if "application/openmetrics-text" in accept.lower() else TEXT
