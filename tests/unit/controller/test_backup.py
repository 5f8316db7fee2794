"""Backups of a live database, and what a restore makes of them."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from cluster import Cluster

from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.store.backup import back_up, contents_of, restore
from hpcsched.store.engine import incarnation, open_database, restored_last_id
from hpcsched.store.store import Store

NOW_S = 2e9


def test_a_backup_has_what_was_committed_and_is_private_and_one_file(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    first = cluster.submit()
    size = back_up(tmp_path / "h.db", tmp_path / "copy")
    cluster.submit()
    contents = contents_of(tmp_path / "copy")
    assert (contents.jobs, contents.last_job_id, contents.unfinished) == (1, first, 1)
    assert (tmp_path / "copy").stat().st_size == size
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"h.db", "h.db-wal", "h.db-shm", "copy"}


def test_a_backup_replaces_no_file_and_leaves_no_part_behind(tmp_path: Path) -> None:
    Cluster("n1", path=tmp_path / "h.db")
    there = tmp_path / "there"
    there.write_text("mine")
    with pytest.raises(RequestError, match="there already"):
        back_up(tmp_path / "h.db", there)
    with pytest.raises(RequestError, match="No such file"):
        back_up(tmp_path / "h.db", tmp_path / "no" / "where")
    assert there.read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_a_restore_is_a_new_incarnation_keeps_the_old_database_and_reuses_no_id(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    cluster.submit()
    back_up(tmp_path / "h.db", tmp_path / "copy")
    later = cluster.submit()
    cluster.store.close()
    done = restore(tmp_path / "copy", tmp_path / "h.db", now_s=NOW_S, suffix="old")
    assert done.kept == tmp_path / "h.db.old"
    assert contents_of(done.kept).last_job_id == later
    engine = open_database(tmp_path / "h.db")
    store = Store(engine)
    assert incarnation(engine) == done.incarnation != cluster.state.incarnation
    assert restored_last_id(engine) == 1
    assert [job.id for job in store.load_jobs(0.0)] == [1]
    assert store.last_ids()[0] == later
    assert [row.boot_id for row in store.load_nodes().values()] == [""]


def test_what_is_damaged_or_not_ours_is_not_restored(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    cluster.submit(script="#!/bin/sh\n" + "true\n" * 20_000)
    back_up(tmp_path / "h.db", tmp_path / "copy")
    damaged = bytearray((tmp_path / "copy").read_bytes())
    damaged[8192:40_000] = bytes(40_000 - 8192)
    (tmp_path / "damaged").write_bytes(damaged)
    with closing(sqlite3.connect(tmp_path / "others")) as others:
        others.execute("CREATE TABLE meta (key, value)")
    (tmp_path / "text").write_text("no database at all")
    for name, why in (
        ("damaged", "damaged|malformed"),
        ("others", "not a database of hpcsched"),
        ("text", "not a database"),
    ):
        with pytest.raises(ConfigError, match=why):
            restore(tmp_path / name, tmp_path / "h.db", now_s=NOW_S, suffix="old")
    assert contents_of(tmp_path / "h.db").incarnation == cluster.state.incarnation
    assert not (tmp_path / "h.db.old").exists()


def test_a_damaged_database_is_replaced_and_its_log_does_not_get_into_the_new_one(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    cluster.submit()
    back_up(tmp_path / "h.db", tmp_path / "copy")
    cluster.store.close()
    (tmp_path / "h.db").write_bytes(b"rubbish" * 1000)
    (tmp_path / "h.db-wal").write_bytes(b"leftover" * 1000)
    done = restore(tmp_path / "copy", tmp_path / "h.db", now_s=NOW_S, suffix="old")
    assert contents_of(tmp_path / "h.db").jobs == 1
    assert done.kept is not None
    assert done.kept.read_bytes()[:7] == b"rubbish"
    assert (tmp_path / "h.db.old-wal").exists()
    assert contents_of(tmp_path / "h.db").last_job_id > 1000, "ids that nobody knows of stay free"


def test_a_database_that_somebody_reads_is_not_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.store.engine.BUSY_S", 0.05)
    cluster = Cluster("n1", path=tmp_path / "h.db")
    cluster.submit()
    back_up(tmp_path / "h.db", tmp_path / "copy")
    with pytest.raises(UnavailableError, match="cannot restore"):
        restore(tmp_path / "copy", tmp_path / "h.db", now_s=NOW_S, suffix="old")
    assert contents_of(tmp_path / "h.db").incarnation == cluster.state.incarnation
