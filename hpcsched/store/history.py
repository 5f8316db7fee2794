"""The database of metrics (`metrics.db`): chunks of samples, by source and tier.

Knows rows, not what is in a chunk (`hpcsched.metrics.chunks`). One process writes it, the recorder.
It is apart from the controller's database, so that neither its size, its locks nor its damage
concern jobs. Losing the last minutes is allowed, a half-written chunk is not: every change is one
transaction.

A *source* is a node, or a job on a node. A *piece* is a chunk that is not yet combined with those
after it. Times are Unix milliseconds. `life`: within one, counters only grow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)

from hpcsched.store.engine import ExpendableDatabase, Statement, give_pages_back, place, used_bytes

APPLICATION_ID = 0x6870636D  # "hpcm"
SCHEMA = 1

metadata = MetaData()

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),  # "node" or "job"
    Column("name", Text, nullable=False),  # of the node; the id of the job
    Column("node", Text, nullable=False),
    Index("sources_by_name", "kind", "name", "node", unique=True),
)

# Lists of names of columns, each once: chunks of a node have the same ones for months.
schemas = Table(
    "schemas",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("sha256", Text, nullable=False, unique=True),
    Column("names", Text, nullable=False),  # JSON
)

chunks = Table(
    "chunks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("source_id", Integer, ForeignKey("sources.id"), nullable=False),
    Column("tier", Integer, nullable=False),
    Column("from_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),  # the time of the last row
    Column("piece", Integer, nullable=False),  # 1: to be combined
    Column("life", Text, nullable=False),
    Column("schema_id", Integer, ForeignKey("schemas.id"), nullable=False),
    Column("size", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("chunks_by_time", "source_id", "tier", "from_ms"),
    Index("chunks_by_age", "tier", "until_ms"),
)


class SampleSource(NamedTuple):
    """A node, or a job on a node: `kind` is "node" or "job", `name` the node or the job's id."""

    kind: str
    name: str
    node: str


class NewChunk(NamedTuple):
    """A chunk to be written. `names`: of its columns."""

    tier: int
    from_ms: int
    until_ms: int
    is_piece: bool
    life: str
    names: tuple[str, ...]
    data: bytes


class ChunkHead(NamedTuple):
    """A chunk without its data."""

    id: int
    tier: int
    from_ms: int
    until_ms: int
    life: str
    schema_id: int


class DueWindow(NamedTuple):
    """The pieces of a source that are due to be combined."""

    source_id: int
    tier: int
    from_ms: int


_c = chunks.c
_SOURCE = Statement(
    select(sources.c.id).where(
        sources.c.kind == place("of_kind"), sources.c.name == place("named"), sources.c.node == place("on_node")
    )
)
_SOURCES = Statement(select(sources).where(sources.c.kind == place("of_kind"), sources.c.name == place("named")))
_ON_NODE = Statement(select(sources).where(sources.c.node == place("on_node")))
_CHUNKS_MOVED = Statement(update(chunks).where(_c.source_id == place("former")), ("source_id",))
_SOURCE_GONE = Statement(delete(sources).where(sources.c.id == place("former")))
_NAMES_OF_KIND = Statement(select(sources.c.name).where(sources.c.kind == place("of_kind")).distinct())
_NEW_SOURCE = Statement(insert(sources), ("kind", "name", "node"))
_SCHEMA = Statement(select(schemas.c.id).where(schemas.c.sha256 == place("hashed")))
_SCHEMA_NAMES = Statement(select(schemas.c.names).where(schemas.c.id == place("number")))
_NEW_SCHEMA = Statement(insert(schemas), ("sha256", "names"))
_NEW_CHUNK = Statement(insert(chunks), [column.name for column in chunks.columns if column.name != "id"])
_HEADS = Statement(
    select(_c.id, _c.tier, _c.from_ms, _c.until_ms, _c.life, _c.schema_id)
    .where(_c.source_id == place("of_source"), _c.until_ms >= place("since_ms"), _c.from_ms <= place("before_ms"))
    .order_by(_c.from_ms)
)
_DATA = Statement(select(_c.data).where(_c.id == place("number")))
_PIECES_BEFORE = Statement(
    select(_c.source_id, func.min(_c.from_ms).label("from_ms"))
    .where(_c.tier == place("of_tier"), _c.piece == 1, _c.until_ms < place("before_ms"))
    .group_by(_c.source_id)
    .limit(place("most"))
)
_PIECES = Statement(
    select(_c.id, _c.tier, _c.from_ms, _c.until_ms, _c.life, _c.schema_id)
    .where(
        _c.source_id == place("of_source"),
        _c.tier == place("of_tier"),
        _c.piece == 1,
        _c.from_ms >= place("since_ms"),
        _c.from_ms < place("before_ms"),
    )
    .order_by(_c.from_ms, _c.id)
)
_DROP = Statement(delete(chunks).where(_c.id == place("number")))
_OLD = Statement(
    select(_c.id).where(_c.tier == place("of_tier"), _c.until_ms < place("before_ms")).limit(place("most"))
)
_OLDEST = Statement(select(_c.id).where(_c.tier == place("of_tier")).order_by(_c.until_ms).limit(place("most")))
_OLDEST_OF = Statement(
    select(_c.id)
    .where(_c.tier == place("of_tier"), _c.source_id == place("of_source"))
    .order_by(_c.until_ms)
    .limit(place("most"))
)
_SIZES = Statement(
    select(_c.source_id, func.sum(_c.size).label("size"), sources.c.kind)
    .join(sources, sources.c.id == _c.source_id)
    .where(_c.tier == place("of_tier"))
    .group_by(_c.source_id)
)
_TIERS = Statement(
    select(
        _c.tier,
        func.count().label("chunks"),
        func.sum(_c.size).label("size"),
        func.min(_c.from_ms).label("from_ms"),
        func.max(_c.until_ms).label("until_ms"),
    )
    .group_by(_c.tier)
    .order_by(_c.tier)
)
_IDLE_SOURCES = Statement(delete(sources).where(sources.c.id.not_in(select(_c.source_id))))
_IDLE_SCHEMAS = Statement(delete(schemas).where(schemas.c.id.not_in(select(_c.schema_id))))

GREEDY = 3  # times the mean size of the sources of a tier


class HistoryDatabase(ExpendableDatabase):
    """The open database."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, metadata, APPLICATION_ID, SCHEMA)
        self._names: dict[int, tuple[str, ...]] = {}

    # ----- write

    def put(self, source: SampleSource, chunk: NewChunk) -> None:
        """Write a chunk, in a transaction."""
        self.put_of(self._source_id(source), chunk)

    def put_of(self, source_id: int, chunk: NewChunk) -> None:
        """Write a chunk of a known source, in a transaction."""
        row = {
            "source_id": source_id,
            "tier": chunk.tier,
            "from_ms": chunk.from_ms,
            "until_ms": chunk.until_ms,
            "piece": int(chunk.is_piece),
            "life": chunk.life,
            "schema_id": self._schema_id(chunk.names),
            "size": len(chunk.data),
            "data": chunk.data,
        }
        _NEW_CHUNK.run(self._connection, row)

    def _source_id(self, source: SampleSource) -> int:
        names = {"of_kind": source.kind, "named": source.name, "on_node": source.node}
        known = _SOURCE.value(self._connection, names)
        return known or int(_NEW_SOURCE.run(self._connection, source._asdict()).lastrowid or 0)

    def rename(self, former: str, name: str) -> None:
        """Give the rows of a node, and of jobs on it, to its present name, in a transaction."""
        for row in _ON_NODE.rows(self._connection, {"on_node": former}):
            moved = SampleSource(row.kind, name if row.kind == "node" else row.name, name)
            _CHUNKS_MOVED.run(self._connection, {"former": row.id, "source_id": self._source_id(moved)})
            _SOURCE_GONE.run(self._connection, {"former": row.id})

    def _schema_id(self, names: tuple[str, ...]) -> int:
        text = json.dumps(names)
        hashed = hashlib.sha256(text.encode()).hexdigest()
        known = _SCHEMA.value(self._connection, {"hashed": hashed})
        return known or int(_NEW_SCHEMA.run(self._connection, {"sha256": hashed, "names": text}).lastrowid or 0)

    def drop(self, ids: Sequence[int]) -> None:
        """Delete chunks, in a transaction."""
        _DROP.run_many(self._connection, [{"number": number} for number in ids])

    # ----- read

    def sources(self, kind: str, name: str) -> list[tuple[int, SampleSource]]:
        """Return the sources with this name: a job has one for each of its nodes."""
        rows = _SOURCES.rows(self._connection, {"of_kind": kind, "named": name})
        return [(row.id, SampleSource(row.kind, row.name, row.node)) for row in rows]

    def names_of(self, kind: str) -> list[str]:
        """Return the names of all sources of a kind."""
        return [row.name for row in _NAMES_OF_KIND.rows(self._connection, {"of_kind": kind})]

    def heads(self, source_id: int, since_ms: int, before_ms: int) -> list[ChunkHead]:
        """Return the chunks of a source with rows in the period, by time."""
        values = {"of_source": source_id, "since_ms": since_ms, "before_ms": before_ms}
        return [ChunkHead(*row) for row in _HEADS.rows(self._connection, values)]

    def data(self, number: int) -> bytes:
        """Return the data of a chunk; b"" if it is gone."""
        found: bytes | None = _DATA.value(self._connection, {"number": number})
        return found or b""

    def names(self, schema_id: int) -> tuple[str, ...]:
        """Return the names of the columns of a schema."""
        known = self._names.get(schema_id)
        if known is None:
            text = _SCHEMA_NAMES.value(self._connection, {"number": schema_id})
            known = tuple(json.loads(text)) if text else ()
            if len(self._names) > 256:
                self._names.clear()
            self._names[schema_id] = known
        return known

    def due(self, tier: int, before_ms: int, most: int) -> list[DueWindow]:
        """Return sources with pieces that ended before a time, and the begin of the first."""
        values = {"of_tier": tier, "before_ms": before_ms, "most": most}
        rows = _PIECES_BEFORE.rows(self._connection, values)
        return [DueWindow(row.source_id, tier, row.from_ms) for row in rows]

    def pieces(self, source_id: int, tier: int, since_ms: int, before_ms: int) -> list[ChunkHead]:
        """Return the pieces of a source that begin in the period."""
        values = {"of_source": source_id, "of_tier": tier, "since_ms": since_ms, "before_ms": before_ms}
        return [ChunkHead(*row) for row in _PIECES.rows(self._connection, values)]

    # ----- keep it small

    def drop_old(self, tier: int, before_ms: int, most: int) -> int:
        """Delete at most so many chunks of a tier that ended before a time; return how many."""
        values = {"of_tier": tier, "before_ms": before_ms, "most": most}
        ids = [row.id for row in _OLD.rows(self._connection, values)]
        with self.change():
            self.drop(ids)
        return len(ids)

    def drop_oldest(self, tier: int, most: int) -> int:
        """Delete the oldest chunks of a tier; return how many.

        Those of nodes that have several times as much as the others come first, so that one node
        does not cost the history of all.
        """
        sizes = [(row.size, row.source_id) for row in _SIZES.rows(self._connection, {"of_tier": tier})]
        if not sizes:
            return 0
        largest, source_id = max(sizes)
        if len(sizes) > 2 and largest > GREEDY * sum(size for size, _ in sizes) / len(sizes):
            rows = _OLDEST_OF.rows(self._connection, {"of_tier": tier, "of_source": source_id, "most": most})
        else:
            rows = _OLDEST.rows(self._connection, {"of_tier": tier, "most": most})
        with self.change():
            self.drop([row.id for row in rows])
        return len(rows)

    def tidy(self, pages: int) -> None:
        """Delete names that no chunk uses, and give free pages back to the file system."""
        with self.change():
            _IDLE_SOURCES.run(self._connection)
            _IDLE_SCHEMAS.run(self._connection)
        give_pages_back(self._connection, pages)

    def used_bytes(self) -> int:
        """Return the size of the file without its free pages."""
        return used_bytes(self._connection)

    def tiers(self) -> list[tuple[int, int, int, int, int]]:
        """Return (tier, chunks, bytes, first time, last time) of each tier."""
        return [tuple(row) for row in _TIERS.rows(self._connection)]
