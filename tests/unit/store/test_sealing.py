"""Environments in the database: once per equal text, unreadable without the key, dropped when no job needs them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from jobs import job, spec

from hpcsched.errors import ConfigError
from hpcsched.model.job import Job
from hpcsched.state.transaction import WriteBatch
from hpcsched.store.engine import open_database
from hpcsched.store.sealing import SealingKey, SealingKeys, sealing_keys
from hpcsched.store.store import Store

ENV = (("TOKEN", "secret"),)


@pytest.fixture
def database(tmp_path: Path) -> sqlite3.Connection:
    (tmp_path / "state").mkdir()
    return open_database(tmp_path / "state" / "h.db", make=True)


@pytest.fixture
def keys(tmp_path: Path) -> SealingKeys:
    return sealing_keys(tmp_path / "seal.key", tmp_path / "state")


def batch_of(*jobs: Job) -> WriteBatch:
    return WriteBatch(specs={one.spec_id: one.spec for one in jobs}, jobs={one.id: one for one in jobs})


def count(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT count(*) FROM environments").fetchone()[0])


def test_equal_environments_are_stored_once_and_dropped_with_their_last_job(
    database: sqlite3.Connection, keys: SealingKeys
) -> None:
    store = Store(database, keys)
    one, two, other = (job(i, spec=spec(env=env)) for i, env in ((1, ENV), (2, ENV), (3, (("A", "b"),))))
    store.commit(batch_of(one, two))
    store.commit(batch_of(other))
    assert count(database) == 2
    again = Store(database, keys)
    assert again.load_jobs(0.0) == [one, two, other]
    again.drop_environments({2, 3})
    assert count(database) == 2
    again.drop_environments({3})
    assert count(database) == 1
    assert [found.spec.env for found in again.jobs([1, 3])] == [(), (("A", "b"),)]


def test_without_its_key_an_environment_is_reported_and_not_empty_by_mistake(
    database: sqlite3.Connection, keys: SealingKeys
) -> None:
    Store(database, keys).commit(batch_of(job(1, spec=spec(env=ENV)), job(2)))
    stranger = Store(database)
    assert [one.spec.env for one in stranger.load_jobs(0.0)] == [(), ()]
    assert stranger.unopened == {1}
    stranger.drop_environments({1, 2})
    assert count(database) == 1


def test_a_rotation_reseals_what_the_older_keys_open(database: sqlite3.Connection, keys: SealingKeys) -> None:
    store = Store(database, keys)
    store.commit(batch_of(job(1, spec=spec(env=ENV))))
    (old,) = keys.ids
    SealingKeys(keys.path, tuple(keys._by_id.values())).rotate()
    assert store.reseal() == 1
    assert store.key_uses() == {keys.newest.id: 1}
    assert keys.ids[1:] == [old]
    assert keys.forget(set(store.key_uses())) == [old]
    again = Store(database, sealing_keys(keys.path, keys.path.parent / "state"))  # type: ignore[union-attr, arg-type]
    assert [one.spec.env for one in again.load_jobs(0.0)] == [ENV]
    store.drop_environments({1})
    assert count(database) == 1


def test_an_altered_or_moved_environment_is_not_opened() -> None:
    key = SealingKey(bytes(32))
    sealed = key.seal("mac", b"text")
    assert key.open("mac", sealed) == b"text"
    assert key.open("other", sealed) is None
    assert key.open("mac", sealed[:-1]) is None
    assert key.open("mac", b"") is None
    assert SealingKey(bytes(31) + b"\1").open("mac", sealed) is None
    assert key.seal("mac", b"text") != sealed


def test_a_key_file_is_private_whole_and_elsewhere(tmp_path: Path, keys: SealingKeys) -> None:
    path, state = tmp_path / "seal.key", tmp_path / "state"
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="other accounts can read it"):
            sealing_keys(path, state)
    path.chmod(0o600)
    whole = path.read_text()
    for damaged in ("", whole[:-5], whole.replace(keys.newest.id, "0" * 16), "x" * 100):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="copy of it"):
            sealing_keys(path, state)
    with pytest.raises(ConfigError, match="directory of the database"):
        sealing_keys(state / "seal.key", state)
    (tmp_path / "link.key").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot read the key"):
        sealing_keys(tmp_path / "link.key", state)
