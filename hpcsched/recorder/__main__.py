"""Keep the history of metrics in `metrics.db`, as a child of the controller.

Samples and questions come over a socket (`hpcsched.recorder` is its other end), answers and lines
for the log go back. The process ends when the socket is closed. What is not yet in the database is
in memory, at most `PIECE_MS` of it.

A node's samples of ten minutes become a *piece* of tier 0. Pieces of two hours are combined into one
chunk, and into one piece of tier 1, with a row for each minute. Pieces of tier 1 are combined each
day, into a chunk and a piece of tier 2 with a row for each quarter of an hour. One transaction
does each of these steps, so that a kill at any moment leaves all rows in exactly one place.

A database that cannot be written now (disk full, locked) is tried again; what waits for it is
bounded. A damaged one is put aside. One of a newer version stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.child import STATS, ControllerSocket, main_of
from hpcsched.errors import NotFoundError, RequestError, UnavailableError
from hpcsched.metrics import chunks
from hpcsched.metrics.chunks import GREATEST, LEAST, ChunkError, ColumnReader, SampleChunk, SteppedSeries
from hpcsched.metrics.series import TABLE, SeriesKind
from hpcsched.model.units import nearest
from hpcsched.recorder import RecorderSettings
from hpcsched.recorder.remote_write import QueuedRow, RemoteWriter, Target
from hpcsched.store.engine import OtherDatabaseError, is_damage
from hpcsched.store.history import ChunkHead, DueWindow, HistoryDatabase, NewChunk, SampleSource

Json = dict[str, Any]

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
PIECE_MS = 10 * MINUTE_MS
LATE_MS = 2 * MINUTE_MS  # a window is combined so long after its end
LEAST_GAP_MS = 900  # between two samples of a node: more frequent ones are dropped
FEWEST_ROWS_OF_JOB = 3  # a job with fewer has its summary in the accounting
MAX_OPEN = 8192  # nodes and jobs with samples in memory
MAX_WAITING_BYTES = 32 << 20  # of pieces that cannot be written now
MAX_COLUMNS = 2048  # of a chunk
MAX_POINTS = 20_000  # of a series in an answer
MAX_VALUES = 400_000  # of all its series
MAX_SERIES = 100  # of an answer
RETRY_S = 15.0
LOOK_S = 1.0
TIDY_S = 3600.0
STATS_S = 10.0
CLOCK_JUMP_MS = HOUR_MS  # after such a jump forwards nothing is deleted for its age for a day
AT_ONCE = 64  # pieces in a transaction, chunks that are deleted in one
FEW = 8  # chunks that are deleted at once for want of room
SHARES = (0.4, 0.3, 0.3)  # of the size of the database, by tier: where there is no room, who has more gives first
GIVEN_BACK_PAGES = 4096
LOCK_FILE = "metrics.lock"
STEPS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
USUAL_POINTS = 300

# Columns of tier 2: what a plan or a report over a year asks for.
LONG_KEPT = frozenset(
    {
        "node_cpu_seconds_total", "node_load1", "node_memory_total_bytes", "node_memory_available_bytes",
        "node_swap_used_bytes", "node_oom_kills_total", "node_pressure_seconds_total",
        "node_network_receive_bytes_total", "node_network_transmit_bytes_total", "node_network_errors_total",
        "node_disk_read_bytes_total", "node_disk_written_bytes_total", "node_disk_busy_seconds_total",
        "node_filesystem_size_bytes", "node_filesystem_free_bytes", "node_temperature_celsius",
        "node_throttled_total", "node_ecc_errors_total", "node_energy_joules_total", "node_power_watts",
        "gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_power_watts", "gpu_energy_joules_total",
        "gpu_temperature_celsius", "gpu_ecc_errors_total",
        *(name for name in TABLE if name.startswith("job_")),
    }
)  # fmt: skip


class HistoryTier(NamedTuple):
    """One fineness of rows. `chunk_ms`: what one chunk covers in the end."""

    step_ms: int
    chunk_ms: int


TIERS = (HistoryTier(0, 2 * HOUR_MS), HistoryTier(MINUTE_MS, DAY_MS), HistoryTier(15 * MINUTE_MS, 16 * DAY_MS))


def is_counter(name: str) -> bool:
    """Return whether the column is of a counter."""
    series = TABLE.get(name.partition(":")[0])
    return series is not None and series.kind is SeriesKind.COUNTER


# ----- what is in memory: the samples of the last minutes


@dataclass(slots=True)
class OpenPiece:
    """Samples of a source that are not yet a chunk.

    A row has the time, the names of the columns, and the values as a JSON list, which is small.
    """

    life: str
    end_ms: int
    opened_s: float
    rows: list[tuple[int, tuple[str, ...], str]] = field(default_factory=list)

    def chunk(self) -> SampleChunk:
        """Return the rows as a chunk with the columns of all of them."""
        parts: list[SampleChunk] = []
        begin = 0
        while begin < len(self.rows):
            names = self.rows[begin][1]
            end = begin
            while end < len(self.rows) and self.rows[end][1] is names:
                end += 1
            values = list(map(list, zip(*(json.loads(row[2]) for row in self.rows[begin:end]), strict=True)))
            times_ms = [row[0] for row in self.rows[begin:end]]
            parts.append(SampleChunk(times_ms=times_ms, columns=dict(zip(names, values, strict=True))))
            begin = end
        whole = parts[0] if len(parts) == 1 else chunks.joined(parts)
        if len(whole.columns) <= MAX_COLUMNS:
            return whole
        return SampleChunk(times_ms=whole.times_ms, columns=dict(list(whole.columns.items())[:MAX_COLUMNS]))


def encoded(chunk: SampleChunk, *, tier: int, is_piece: bool, life: str, from_ms: int | None = None) -> NewChunk:
    """Return the chunk for the database; columns without any value are left out."""
    columns = {name: values for name, values in chunk.columns.items() if any(value is not None for value in values)}
    return NewChunk(
        tier=tier,
        from_ms=chunk.times_ms[0] if from_ms is None else from_ms,
        until_ms=chunk.times_ms[-1],
        is_piece=is_piece,
        life=life,
        names=tuple(columns),
        data=chunks.encode(chunk.times_ms, columns.values()),
    )


# ----- the archive


@dataclass(slots=True)
class RecorderCounts:
    """What became of samples, since the process began."""

    samples: int = 0
    rows_dropped: int = 0  # too frequent, too many sources, or no room while the database could not be written
    chunks: int = 0
    damaged: int = 0
    trouble: str = ""  # why the database cannot be used now, "" if it can


class MetricsArchive:
    """Samples in memory and in the database."""

    def __init__(
        self,
        settings: RecorderSettings,
        say: Callable[[str, str], None],
        *,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.counts = RecorderCounts()
        self._say = say
        self._clock, self._monotonic_s = clock, monotonic_s
        self._open: dict[SampleSource, OpenPiece] = {}
        self._waiting: deque[tuple[SampleSource, NewChunk]] = deque()
        self._waiting_bytes = 0
        self._renamed: Mapping[str, str] = {}  # of which the rows in the database have their present names
        self._history: HistoryDatabase | None = None
        self._lock: int | None = None
        self._next_try_s = 0.0
        self._next_tidy_s = monotonic_s() + TIDY_S / 10
        self._clock_offset_s = clock() - monotonic_s()
        self._no_deletion_until_s = 0.0

    # ----- samples

    def take(self, node: str, boot_id: str, at_ms: int, names: tuple[str, ...], values: str) -> None:
        """Add a sample of a node. `values`: a JSON list."""
        self.counts.samples += 1
        node = self.settings.renamed.get(node, node)
        self._add(SampleSource("node", node, node), boot_id, at_ms, names, values)

    def take_job(
        self, node: str, boot_id: str, at_ms: int, job: int, attempt: int, names: tuple[str, ...], values: str
    ) -> None:
        """Add what a job used on a node."""
        node = self.settings.renamed.get(node, node)
        self._add(SampleSource("job", str(job), node), f"{boot_id}.{attempt}", at_ms, names, values)

    def _add(self, source: SampleSource, life: str, at_ms: int, names: tuple[str, ...], values: str) -> None:
        piece = self._open.get(source)
        if piece is not None:
            last_ms = piece.rows[-1][0]
            if 0 <= at_ms - last_ms < LEAST_GAP_MS and piece.life == life:
                self.counts.rows_dropped += 1
                return
            if piece.life != life or at_ms < last_ms or at_ms >= piece.end_ms:
                self._close(source)
                piece = None
        if piece is None:
            if len(self._open) >= MAX_OPEN:
                self.counts.rows_dropped += 1
                return
            end_ms = (at_ms // PIECE_MS + 1) * PIECE_MS
            piece = self._open[source] = OpenPiece(life, end_ms, self._monotonic_s())
        piece.rows.append((at_ms, names, values))

    def _close(self, source: SampleSource) -> None:
        """Make a chunk of the samples in memory, for the next write."""
        piece = self._open.pop(source)
        if source.kind == "job" and len(piece.rows) < FEWEST_ROWS_OF_JOB:
            return
        made = encoded(piece.chunk(), tier=0, is_piece=True, life=piece.life)
        self._waiting.append((source, made))
        self._waiting_bytes += len(made.data)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            _, lost = self._waiting.popleft()
            self._waiting_bytes -= len(lost.data)
            self.counts.rows_dropped += ColumnReader(lost.data).rows

    # ----- now and then

    def work(self) -> bool:
        """Do a part of what is due; return whether there is more, which other work may precede."""
        now_s = self._monotonic_s()
        self._look_at_clock(now_s)
        old = [source for source, piece in self._open.items() if now_s - piece.opened_s > PIECE_MS / 1000]
        for source in old[:AT_ONCE]:
            self._close(source)
        if now_s < self._next_try_s:
            return False
        try:
            history = self._database()
            self._write(history)
            self._rename(history)
            if self._combine(history):
                return True
            if now_s >= self._next_tidy_s or history.used_bytes() > self.settings.max_bytes:
                return self._delete(history, now_s)
        except (sqlite3.Error, OSError, OtherDatabaseError) as error:
            self._failed(error)
        return len(old) > AT_ONCE

    def finish(self) -> None:
        """Write what is in memory, as far as possible."""
        for source in list(self._open):
            self._close(source)
        try:
            self._write(self._database())
        except (sqlite3.Error, OSError, OtherDatabaseError) as error:
            self._failed(error)
        if self._history is not None:
            self._history.close()
            self._history = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _database(self) -> HistoryDatabase:
        """Return the database, which this process alone writes.

        Raises OSError, sqlite3.Error or OtherDatabaseError.
        """
        if self._history is None:
            path = Path(self.settings.database)
            if self._lock is None:
                lock = os.open(path.with_name(LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(lock)
                    raise
                self._lock = lock
            self._history = HistoryDatabase(path)
        return self._history

    def _write(self, history: HistoryDatabase) -> None:
        while self._waiting:
            part = [self._waiting[place] for place in range(min(AT_ONCE, len(self._waiting)))]
            with history.change():
                for source, made in part:
                    history.put(source, made)
            for _, made in part:
                self._waiting.popleft()
                self._waiting_bytes -= len(made.data)
            self.counts.chunks += len(part)
        if self.counts.trouble:
            self._say("info", "the database of metrics can be written again")
            self.counts.trouble = ""

    def _rename(self, history: HistoryDatabase) -> None:
        """Give what is kept of renamed nodes their present names: in memory, then in the database."""
        renamed = self.settings.renamed
        if renamed == self._renamed:
            return
        for source in [source for source in self._open if source.node in renamed]:
            self._close(source)
        self._write(history)
        with history.change():
            for former, name in renamed.items():
                history.rename(former, name)
        self._renamed = renamed

    def _failed(self, error: Exception) -> None:
        """Log why the database cannot be used, once, and try again later. Put a damaged one aside."""
        why = _in_words(error)
        if isinstance(error, sqlite3.Error) and is_damage(error):
            why = f"it is damaged: {why}; {self._put_aside()}"
            self._next_try_s = 0.0
        else:
            self._next_try_s = self._monotonic_s() + RETRY_S
        if why != self.counts.trouble:
            self._say("error", f"cannot use the database of metrics {self.settings.database}: {why}")
        self.counts.trouble = why

    def _put_aside(self) -> str:
        """Rename a damaged database; return what was done in words. An earlier one is replaced."""
        if self._history is not None:
            with contextlib.suppress(sqlite3.Error):
                self._history.close()
            self._history = None
        path = Path(self.settings.database)
        aside = path.with_name(path.name + ".damaged")
        try:
            path.replace(aside)
            for end in ("-wal", "-shm"):
                path.with_name(path.name + end).unlink(missing_ok=True)
        except OSError as error:
            return f"it could not be put aside: {error.strerror}"
        return f"it is now {aside.name}, and a new one is begun"

    def _look_at_clock(self, now_s: float) -> None:
        """After the clock jumped forwards, delete nothing for a day: it may be set right again."""
        offset_s = self._clock() - now_s
        if (offset_s - self._clock_offset_s) * 1000 > CLOCK_JUMP_MS:
            self._no_deletion_until_s = now_s + DAY_MS / 1000
            self._say("warning", "the clock jumped forwards: no metrics are deleted for their age for a day")
        self._clock_offset_s = offset_s

    # ----- combine

    def _combine(self, history: HistoryDatabase) -> bool:
        """Combine the pieces of one window of one source; return whether there may be more."""
        now_ms = self._clock() * 1000
        for number, tier in enumerate(TIERS):
            before_ms = int((now_ms - LATE_MS) // tier.chunk_ms) * tier.chunk_ms
            for window in history.due(number, before_ms, 1):
                self._combine_window(history, window)
                return True
        return False

    def _combine_window(self, history: HistoryDatabase, window: DueWindow) -> None:
        tier = TIERS[window.tier]
        begin_ms = window.from_ms // tier.chunk_ms * tier.chunk_ms
        heads = history.pieces(window.source_id, window.tier, begin_ms, begin_ms + tier.chunk_ms)
        lives: dict[str, list[SampleChunk]] = {}
        for head in heads:
            try:
                lives.setdefault(head.life, []).append(self._read(history, head))
            except ChunkError as error:
                self.counts.damaged += 1
                self._say("warning", f"dropped a damaged piece of metrics: {error}")
        made: list[NewChunk] = []
        for life, parts in lives.items():
            whole = chunks.joined(parts)
            from_ms = min(head.from_ms for head in heads if head.life == life)
            made.append(encoded(whole, tier=window.tier, is_piece=False, life=life, from_ms=from_ms))
            if window.tier + 1 < len(TIERS):
                made.append(self._rolled_up(whole, window.tier + 1, life, from_ms))
        with history.change():
            for chunk in made:
                history.put_of(window.source_id, chunk)
            history.drop([head.id for head in heads])

    def _rolled_up(self, whole: SampleChunk, tier: int, life: str, from_ms: int) -> NewChunk:
        columns = whole.columns
        if tier == len(TIERS) - 1:
            columns = {name: values for name, values in columns.items() if _plain(name).partition(":")[0] in LONG_KEPT}
        made = chunks.rolled_up(whole.times_ms, columns, TIERS[tier].step_ms, is_counter)
        return encoded(made, tier=tier, is_piece=True, life=life, from_ms=from_ms)

    def _read(self, history: HistoryDatabase, head: ChunkHead) -> SampleChunk:
        return chunks.decode(history.data(head.id), history.names(head.schema_id))

    # ----- delete

    def _delete(self, history: HistoryDatabase, now_s: float) -> bool:
        """Delete some chunks that are too old, or too many; return whether there may be more."""
        dropped = 0
        if now_s >= self._no_deletion_until_s:
            for number, keep_s in enumerate(self.settings.keep_s):
                dropped += history.drop_old(number, int((self._clock() - keep_s) * 1000), AT_ONCE)
        if not dropped and history.used_bytes() > self.settings.max_bytes:
            sizes = {row[0]: row[2] for row in history.tiers()}
            tier = max(sizes, key=lambda number: sizes[number] / SHARES[number], default=0)
            dropped = history.drop_oldest(tier, FEW)
        if dropped:
            return True
        history.tidy(GIVEN_BACK_PAGES)
        self._next_tidy_s = now_s + TIDY_S
        return False

    # ----- answers

    def answer(self, question: Json) -> Json:
        """Return the answer to a question of the API. Raises HpcschedError."""
        if question["ask"] == "stats":
            return self.stats()
        try:
            return self._list(question) if question["ask"] == "list" else self._series(question)
        except sqlite3.Error as error:
            self._failed(error)
            raise UnavailableError(f"cannot read metrics: {_in_words(error)}") from None

    def stats(self) -> Json:
        """Return what was kept and what was not."""
        counts = self.counts
        return {
            "samples": counts.samples,
            "dropped": counts.rows_dropped,
            "open": len(self._open),
            "waiting_bytes": self._waiting_bytes,
            "trouble": counts.trouble,
        }

    def _list(self, question: Json) -> Json:
        """Return the names of series of a node or job, or of all nodes with samples."""
        kind, name = question["kind"], question["name"]
        if not name:
            known = set(self._history.names_of(kind)) if self._history is not None else set()
            return {"names": sorted(known | {source.name for source in self._open if source.kind == kind})}
        found: dict[str, None] = {}
        for part in self._parts(kind, name, 0, int(self._clock() * 1000) + DAY_MS):
            for column in part.names:
                found.setdefault(_plain(column))
        if not found:
            raise _nothing_of(question, "")
        described = [_described(column) for column in sorted(found)]
        return {"version": 1, "kind": kind, "target": question["target"], "series": described}

    def _series(self, question: Json) -> Json:
        """Return the values of series, one for each step."""
        begin_ms, end_ms = int(question["from_s"] * 1000), int(question["to_s"] * 1000)
        step_ms = int(1000 * (question["step_s"] or _usual_step_s((end_ms - begin_ms) / 1000)))
        count = end_ms // step_ms - begin_ms // step_ms + 1
        if count > MAX_POINTS:
            least_s = (end_ms - begin_ms) / 1000 / (MAX_POINTS - 1)
            raise RequestError(
                f"cannot show {count} points of a series, {MAX_POINTS} are allowed: take steps of "
                f"{_usual_step_s(least_s * USUAL_POINTS)} s or more"
            )
        # A counter's first step needs the row before it.
        parts = self._parts(question["kind"], question["name"], begin_ms - max(step_ms, MINUTE_MS), end_ms)
        chosen = chosen_parts(parts, step_ms)
        if not parts:
            raise _nothing_of(question, " in this period")
        known = dict.fromkeys(_plain(name) for part in parts for name in part.names)
        asked = question["series"]
        if question.get("known_only"):
            asked = [name for name in asked if any(f"{one}:".startswith(f"{name}:") for one in known)]
        wanted = matching(asked, list(known))
        if len(wanted) * count > MAX_VALUES:
            raise RequestError(f"cannot show {len(wanted)} series of {count} points at once: take longer steps")
        made: dict[tuple[str, str], SteppedSeries] = {}
        for part in chosen:
            for name in wanted:
                key = (part.source.node, name)
                if key not in made:
                    made[key] = SteppedSeries(begin_ms, step_ms, count, is_counter=is_counter(name), of=question["of"])
            self._add_part(part, wanted, question["of"], step_ms, made)
        begin_s = begin_ms // step_ms * step_ms / 1000
        several = len({node for node, _ in made}) > 1
        series = [
            _described(name) | ({"node": node} if several else {}) | {"values": steps.values()}
            for (node, name), steps in made.items()
        ]
        head = {"version": 1, "kind": question["kind"], "target": question["target"], "of": question["of"]}
        return head | {"from_s": begin_s, "step_s": step_ms / 1000, "count": count, "series": series}

    def _add_part(
        self, part: ChunkPart, wanted: Sequence[str], of: str, step_ms: int, made: dict[tuple[str, str], SteppedSeries]
    ) -> None:
        """Add the rows of a part that no better part has."""
        places = {name: place for place, name in enumerate(part.names)}
        try:
            whole = part.load()
            times_ms = whole.times_ms()
            for begin, end in _cut(times_ms, part.spans_ms):
                times = times_ms[begin:end]
                spans = chunks.spans_of(times, step_ms)
                for name in wanted:
                    better = {"max": GREATEST, "min": LEAST}.get(of, "") + name
                    place = places.get(better, places.get(name))
                    if place is not None:
                        made[part.source.node, name].add(part.life, times, whole.column(place)[begin:end], spans)
        except ChunkError as error:
            self.counts.damaged += 1
            self._say("warning", f"left out a damaged chunk of metrics: {error}")

    def _parts(self, kind: str, name: str, begin_ms: int, end_ms: int) -> list[ChunkPart]:
        """Return what has rows of the source in the period, in the database and in memory."""
        found: list[ChunkPart] = []
        history = self._history
        if history is not None:
            for source_id, source in history.sources(kind, name):
                for head in history.heads(source_id, begin_ms, end_ms):
                    names = history.names(head.schema_id)
                    load = _ChunkLoader(history, head.id)
                    found.append(ChunkPart(source, head.tier, head.from_ms, head.until_ms, head.life, names, load))
        made = [(source, chunk) for source, chunk in self._waiting if source.kind == kind and source.name == name]
        for source, piece in self._open.items():
            if source.kind == kind and source.name == name and piece.rows:
                made.append((source, encoded(piece.chunk(), tier=0, is_piece=True, life=piece.life)))
        for source, chunk in made:
            if chunk.until_ms >= begin_ms and chunk.from_ms <= end_ms:
                load = _ChunkLoader(None, 0, chunk.data)
                found.append(ChunkPart(source, 0, chunk.from_ms, chunk.until_ms, chunk.life, chunk.names, load))
        return found


@dataclass(slots=True)
class _ChunkLoader:
    history: HistoryDatabase | None
    number: int
    data: bytes = b""

    def __call__(self) -> ColumnReader:
        return ColumnReader(self.history.data(self.number) if self.history is not None else self.data)


@dataclass(slots=True)
class ChunkPart:
    """A chunk that may be read for an answer. `spans_ms`: the times at which its rows count."""

    source: SampleSource
    tier: int
    from_ms: int
    until_ms: int
    life: str
    names: tuple[str, ...]
    load: Callable[[], ColumnReader]
    spans_ms: list[tuple[int, int]] = field(default_factory=list)


def chosen_parts(parts: Sequence[ChunkPart], step_ms: int) -> list[ChunkPart]:
    """Return the parts to read for steps of this length, by time; no time is in two of them.

    The best tier is the coarsest with steps that are not longer. Where it has no rows, finer ones
    count, then coarser ones.
    """
    best = max(number for number, tier in enumerate(TIERS) if tier.step_ms <= step_ms)
    order = [*range(best, -1, -1), *range(best + 1, len(TIERS))]
    covered: dict[str, list[tuple[int, int]]] = {}
    chosen = []
    for tier in order:
        ours = sorted((part for part in parts if part.tier == tier), key=lambda part: part.from_ms)
        for part in ours:
            part.spans_ms = _without((part.from_ms, part.until_ms), covered.get(part.source.node, ()))
            if part.spans_ms:
                chosen.append(part)
        for part in ours:
            covered.setdefault(part.source.node, []).append((part.from_ms, part.until_ms))
    return sorted(chosen, key=lambda part: part.spans_ms[0])


def _without(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of a span (both ends included) without the others."""
    left = [span]
    for begin, end in others:
        left = [
            piece
            for first, last in left
            for piece in ((first, min(last, begin - 1)), (max(first, end + 1), last))
            if piece[0] <= piece[1]
        ]
    return left


def _cut(times_ms: list[int], spans_ms: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (first row, row after the last) of the rows in each span."""
    for first_ms, last_ms in spans_ms:
        begin, end = bisect_left(times_ms, first_ms), bisect_right(times_ms, last_ms)
        if begin < end:
            yield begin, end


# ----- names


def matching(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the columns that the names mean, also without prefix, unit and ``_total``.

    Labels after a colon choose some of a name's columns.

    Raises NotFoundError with the nearest names, RequestError if there are too many.
    """
    names = dict.fromkeys(column.partition(":")[0] for column in known)
    found: dict[str, None] = {}
    for text in asked:
        name, colon, labels = text.partition(":")
        whole = [one for one in names if one == name] or [one for one in names if _is_short_for(name, one)]
        if not whole:
            near = nearest(name, list(names)) if names else ""
            raise NotFoundError(f"cannot show {text[:80]!r}: no such series here{near}; see hctl metrics --list")
        columns = [
            column
            for column in known
            if column.partition(":")[0] in whole and (not colon or _has_labels(column.partition(":")[2], labels))
        ]
        if not columns:
            parts = sorted(one.partition(":")[2] for one in known if one.partition(":")[0] in whole)
            others = f"there are: {', '.join(parts[:20])}" if any(parts) else f"write {name}"
            raise NotFoundError(f"cannot show {text[:80]!r}: {whole[0]} has no {labels[:40]!r} here; {others}")
        found |= dict.fromkeys(columns)
    if len(found) > MAX_SERIES:
        raise RequestError(f"cannot show {len(found)} series at once, {MAX_SERIES} are allowed: name fewer")
    return list(found)


_UNITS = ("", *(f"_{unit}" for unit in sorted({series.unit for series in TABLE.values() if series.unit})))


def _is_short_for(name: str, whole: str) -> bool:
    """Return whether `whole` is the name with a prefix, unit or ``_total`` that was left out."""
    prefixes = ("", "node_", "gpu_", "job_", "job_training_")
    return any(
        prefix + name + unit + total == whole for prefix in prefixes for unit in _UNITS for total in ("", "_total")
    )


def _has_labels(labels: str, wanted: str) -> bool:
    return labels == wanted or labels.startswith(wanted + ":")


def _plain(column: str) -> str:
    return column.removeprefix(GREATEST).removeprefix(LEAST)


def _described(column: str) -> Json:
    """Return name, labels, kind, unit and meaning of a column."""
    name, _, rest = column.partition(":")
    series = TABLE.get(name)
    if series is None:
        return {"key": column, "name": name, "labels": {}, "kind": "gauge", "unit": "", "help": ""}
    names = series.column_labels
    labels = dict(zip(names, rest.split(":", len(names) - 1), strict=False)) if names else {}
    kind, unit = series.kind.value, series.unit
    return {"key": column, "name": name, "labels": labels, "kind": kind, "unit": unit, "help": series.help}


def _nothing_of(question: Json, when: str) -> NotFoundError:
    near = question.get("near", "")
    return NotFoundError(f"cannot show metrics of {question['target'][:80]}: there are none{when}{near}")


def _usual_step_s(span_s: float) -> int:
    return next((step_s for step_s in STEPS_S if span_s / step_s <= USUAL_POINTS), STEPS_S[-1])


def _in_words(error: Exception) -> str:
    if isinstance(error, BlockingIOError):
        return "another recorder has it open"
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)[:300]


# ----- the process


class RecorderService:
    """Carries out what the controller sends."""

    def __init__(self, connection: ControllerSocket) -> None:
        self._connection = connection
        self._columns: dict[int, tuple[str, ...]] = {}
        self.archive: MetricsArchive | None = None
        self._target = Target("")
        self._writer: RemoteWriter | None = None
        self._next_stats_s = 0.0

    def take(self, message: Sequence[Any]) -> None:
        """Carry out one message."""
        kind, *rest = message
        if kind == "settings":
            settings = RecorderSettings(**rest[0] | {"keep_s": tuple(rest[0]["keep_s"])})
            if self.archive is None:
                self.archive = MetricsArchive(settings, self._connection.say)
            self.archive.settings = settings
            self._set_target(Target(settings.remote_write, settings.remote_token_file, settings.cluster))
        elif kind == "columns":
            self._columns[rest[0]] = tuple(rest[1])
        elif kind == "forget":
            self._columns.clear()
        elif self.archive is None:
            return
        elif kind == "ask":
            question = json.loads(rest[1])
            self._connection.answer(rest[0], question, partial(self.archive.answer, question))
        else:
            self._sample(self.archive, *rest)

    def _sample(
        self, archive: MetricsArchive, node: str, boot_id: str, at_ms: int, columns: int, values: str, jobs: list[Any]
    ) -> None:
        names = self._columns.get(columns)
        if names is not None:
            archive.take(node, boot_id, at_ms, names, values)
            self._send_on(QueuedRow(node, "", at_ms, names, values))
        for job, attempt, job_columns, job_values in jobs:
            names = self._columns.get(job_columns)
            if names is not None:
                archive.take_job(node, boot_id, at_ms, job, attempt, names, job_values)
                self._send_on(QueuedRow(node, str(job), at_ms, names, job_values))

    def _set_target(self, target: Target) -> None:
        if target == self._target:
            return
        self._target = target
        if self._writer is not None:
            self._writer.close()
        self._writer = RemoteWriter(target, self._connection.say) if target.url else None

    def _send_on(self, row: QueuedRow) -> None:
        if self._writer is not None:
            self._writer.add(row)

    def report(self) -> None:
        """Tell the controller now and then how it goes."""
        now_s = time.monotonic()
        if self.archive is not None and now_s >= self._next_stats_s:
            self._next_stats_s = now_s + STATS_S
            stats = self.archive.stats()
            if self._writer is not None:
                stats |= {"remote_sent": self._writer.sent, "remote_dropped": self._writer.dropped}
            self._connection.send(STATS, json.dumps(stats).encode())


def run(connection: ControllerSocket, ended: Callable[[], bool]) -> None:
    """Serve the controller until it is gone, or this process is told to end."""
    service = RecorderService(connection)
    more = False
    try:
        while not ended():
            for message in connection.messages(0.0 if more else LOOK_S):
                service.take(message)
            more = service.archive is not None and service.archive.work()
            service.report()
    except (EOFError, ConnectionError):
        pass
    if service.archive is not None:
        service.archive.finish()


if __name__ == "__main__":
    main_of(run)
