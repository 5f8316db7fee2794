"""The database of alerts (`alerts.db`): their state, and the letters that wait.

Knows rows, not what is in them (`hpcsched.alerts`). One process writes it, the child that tells the
alerts. It is apart from the controller's database, so that neither its locks nor its damage concern
jobs. A commit is on disk when it returns: what was told must be known after a power cut.

An *entry* has a kind and a key: an alert, a silence, what a receiver was told. A *letter* waits for its
delivery; those of one receiver are sent in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Column, Float, Index, Integer, MetaData, Table, Text, delete, func, insert, or_, select, update

from hpcsched.store.engine import ExpendableDatabase, Statement, place, upsert

APPLICATION_ID = 0x68706361  # "hpca"
SCHEMA = 1
LONGEST_PAUSE_S = 1800.0  # between two tries of a letter

metadata = MetaData()

entries = Table(
    "entries",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("data", Text, nullable=False),  # JSON
)

letters = Table(
    "letters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("receiver", Text, nullable=False),
    Column("about", Text, nullable=False),  # the rule; of job mail, the user
    Column("at_s", Float, nullable=False),
    Column("due_s", Float, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("open", Integer, nullable=False),  # 1: more may be added until it is due
    Column("data", Text, nullable=False),  # JSON
    Index("letters_by_time", "receiver", "due_s"),
)


class WaitingLetter(NamedTuple):
    """A letter that waits. `tries`: how often it was sent in vain."""

    id: int
    receiver: str
    about: str
    at_s: float
    due_s: float
    tries: int
    open: int
    data: str


class NewLetter(NamedTuple):
    """A letter to be kept until it is delivered."""

    receiver: str
    about: str
    at_s: float
    due_s: float
    data: str
    open: int = 0


_e, _l = entries.c, letters.c
_LOAD = Statement(select(_e.key, _e.at_s, _e.data).where(_e.kind == place("of_kind")))
_ONE = Statement(select(_e.data).where(_e.kind == place("of_kind"), _e.key == place("of_key")))
_HAS = Statement(select(func.count()).where(_e.kind == place("of_kind"), _e.key == place("of_key")))
_PUT = Statement(upsert(entries))
_DROP = Statement(delete(entries).where(_e.kind == place("of_kind"), _e.key == place("of_key")))
_DROP_OLD = Statement(delete(entries).where(_e.kind == place("of_kind"), _e.at_s < place("before_s")))
_NEW_LETTER = Statement(insert(letters), [column.name for column in letters.columns if column.name != "id"])
_NEXT = Statement(
    select(letters)
    .where(_l.receiver == place("of_receiver"), or_(_l.due_s <= place("now_s"), _l.due_s > place("latest_s")))
    .order_by(_l.due_s, _l.id)
    .limit(1)
)
_OPEN = Statement(
    select(letters).where(_l.receiver == place("of_receiver"), _l.about == place("of_about"), _l.open == 1).limit(1)
)
_FILL = Statement(update(letters).where(_l.id == place("number")).values(data=place("new_data")))
_PUT_OFF = Statement(
    update(letters).where(_l.id == place("number")).values(due_s=place("new_due_s"), tries=_l.tries + 1, open=0)
)
_CLOSE = Statement(update(letters).where(_l.id == place("number")).values(open=0))
_DONE = Statement(delete(letters).where(_l.id == place("number")))
_WAITING = Statement(select(_l.receiver, _l.about, func.count().label("count")).group_by(_l.receiver, _l.about))
_DROP_ALL_TO = Statement(delete(letters).where(_l.receiver == place("of_receiver")))


class AlertDatabase(ExpendableDatabase):
    """The open database."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, metadata, APPLICATION_ID, SCHEMA, loses_none=True)

    # ----- entries

    def load(self, kind: str) -> dict[str, tuple[float, str]]:
        """Return (time, data) of all entries of a kind, by key."""
        return {row.key: (row.at_s, row.data) for row in _LOAD.rows(self._connection, {"of_kind": kind})}

    def has(self, kind: str, key: str) -> bool:
        """Return whether there is such an entry."""
        return bool(_HAS.value(self._connection, {"of_kind": kind, "of_key": key}))

    def load_one(self, kind: str, key: str) -> str:
        """Return the data of an entry, "" if there is none."""
        return str(_ONE.value(self._connection, {"of_kind": kind, "of_key": key}) or "")

    def put(self, kind: str, rows: Iterable[tuple[str, float, str]]) -> None:
        """Write entries (key, time, data), in a transaction."""
        made = [{"kind": kind, "key": key, "at_s": at_s, "data": data} for key, at_s, data in rows]
        _PUT.run_many(self._connection, made)

    def drop(self, kind: str, keys: Iterable[str]) -> None:
        """Delete entries, in a transaction."""
        _DROP.run_many(self._connection, [{"of_kind": kind, "of_key": key} for key in keys])

    def drop_old(self, kind: str, before_s: float) -> None:
        """Delete the entries of a kind from before a time, in a transaction."""
        _DROP_OLD.run(self._connection, {"of_kind": kind, "before_s": before_s})

    # ----- letters

    def add(self, letter: NewLetter) -> None:
        """Keep a letter until it is delivered, in a transaction."""
        _NEW_LETTER.run(self._connection, {**letter._asdict(), "tries": 0})

    def next_letter(self, receiver: str, now_s: float) -> WaitingLetter | None:
        """Return the first letter to a receiver that is due.

        None is put off for longer than `LONGEST_PAUSE_S`: one that seems so is from before the clock was set back.
        """
        values = {"of_receiver": receiver, "now_s": now_s, "latest_s": now_s + LONGEST_PAUSE_S}
        rows = _NEXT.rows(self._connection, values)
        return WaitingLetter(*rows[0]) if rows else None

    def open_letter(self, receiver: str, about: str) -> WaitingLetter | None:
        """Return the letter to which more may be added."""
        rows = _OPEN.rows(self._connection, {"of_receiver": receiver, "of_about": about})
        return WaitingLetter(*rows[0]) if rows else None

    def fill(self, number: int, data: str) -> None:
        """Change what is in a letter, in a transaction."""
        _FILL.run(self._connection, {"number": number, "new_data": data})

    def shut(self, number: int) -> None:
        """Let nothing more be added to a letter, in a transaction."""
        _CLOSE.run(self._connection, {"number": number})

    def put_off(self, number: int, due_s: float) -> None:
        """Note that a letter was sent in vain, in a transaction."""
        _PUT_OFF.run(self._connection, {"number": number, "new_due_s": due_s})

    def done(self, number: int) -> None:
        """Delete a letter, in a transaction."""
        _DONE.run(self._connection, {"number": number})

    def waiting(self) -> dict[tuple[str, str], int]:
        """Return how many letters wait, by receiver and what they are about."""
        rows: list[Any] = _WAITING.rows(self._connection)
        return {(row.receiver, row.about): row.count for row in rows}

    def drop_letters_to(self, receiver: str) -> None:
        """Delete the letters to a receiver that is not there any more, in a transaction."""
        _DROP_ALL_TO.run(self._connection, {"of_receiver": receiver})
