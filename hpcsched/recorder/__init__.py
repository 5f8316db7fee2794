"""Run the recorder, a child process that keeps the history of metrics.

The controller never waits for the child (`hpcsched.child`). What does not fit into the queue to it is
dropped and counted.

The child (`hpcsched.recorder.__main__`) is the only process that opens the database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpcsched.child import ChildProcess

if TYPE_CHECKING:
    from hpcsched.metrics.series import Column, NodeSample

MAX_COLUMN_LISTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """What the child needs to know. `keep_s`: how long rows of each tier are kept.

    `renamed`: the present name of a node, by an earlier one.
    """

    database: str
    keep_s: tuple[float, ...]
    max_bytes: int
    remote_write: str = ""  # URL; "": none
    remote_token_file: str = ""
    cluster: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)


class Recorder(ChildProcess):
    """The child and the queue to it, on the event loop. The child's troubles block no method."""

    def __init__(self, settings: RecorderSettings) -> None:
        super().__init__("hpcsched.recorder", "the recorder", "cannot read metrics now")
        self._settings = settings
        self._columns: dict[int, tuple[int, tuple[Column, ...]]] = {}
        self._next_columns = 0
        self.samples = 0

    def greeting(self) -> tuple[Any, ...]:
        return ("settings", asdict(self._settings))

    def was_disconnected(self) -> None:
        self._columns.clear()

    def configure(self, settings: RecorderSettings) -> None:
        """Tell the child new settings."""
        if settings != self._settings:
            self._settings = settings
            self.send(self.greeting())

    # ----- samples

    def record(self, sample: NodeSample) -> None:
        """Give a sample to the child; drop it if the child is slow or does not run."""
        self.samples += 1
        if self._socket is None:
            self.dropped += 1
            return
        columns = self._columns_of(sample.columns)
        jobs = [(row.job_id, row.attempt, self._columns_of(row.columns), json.dumps(row.values)) for row in sample.jobs]
        at_ms = round(sample.received_at_s * 1000)
        message = ("sample", sample.node, sample.boot_id, at_ms, columns, json.dumps(sample.values), jobs)
        if not self.send(message):
            self.dropped += 1

    def _columns_of(self, columns: tuple[Column, ...]) -> int:
        """Return the number under which the child knows these columns; tell it if it does not."""
        known = self._columns.get(id(columns))
        if known is not None:
            return known[0]
        if len(self._columns) >= MAX_COLUMN_LISTS:
            self._columns.clear()
            self.send(("forget",))
        number = self._next_columns
        if self.send(("columns", number, tuple(column.key for column in columns))):
            self._next_columns += 1
            self._columns[id(columns)] = (number, columns)  # kept, so that its id stays its own
        return number
