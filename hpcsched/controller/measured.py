"""What nodes have measured of a step, as the columns of its row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

_MOST = (
    2.0**53
)  # of a node that sends what cannot be: beyond this nothing is exact, and SQLite has no larger integers to spare

_COLUMNS: dict[str, tuple[Callable[[Iterable[float]], float], type]] = {
    "cpu_user_s": (sum, float),
    "cpu_system_s": (sum, float),
    "max_rss_kib": (max, int),
    "disk_read_bytes": (sum, int),
    "disk_write_bytes": (sum, int),
}


def used(usages: Iterable[Mapping[str, float]]) -> dict[str, float | int | None]:
    """Return what the step has used by the word of each of its nodes; None: no node has said."""
    told = list(usages)
    found: dict[str, float | int | None] = {}
    for name, (whole, kind) in _COLUMNS.items():
        values = [one[name] for one in told if name in one and 0 <= one[name] <= _MOST]
        found[name] = kind(whole(values)) if values else None
    return found
