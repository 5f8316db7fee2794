"""A start on a database that is damaged, or another cluster's, is refused with the way out."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from jobs import spec
from unit.controller.cluster import ANN, Cluster

from hpcsched import paths
from hpcsched.config.load import Config, load_config
from hpcsched.controller.__main__ import serve
from hpcsched.errors import ConfigError
from hpcsched.store import backup

PAGE = 4096


@pytest.fixture
def lab(tmp_path: Path) -> Config:
    """A cluster without nodes whose database has jobs."""
    return cluster_at(tmp_path / "lab", "lab")


def cluster_at(base: Path, name: str) -> Config:
    config_dir = base / "etc"
    config_dir.mkdir(parents=True)
    (config_dir / "hpcsched.toml").write_text(
        f'[cluster]\nname = "{name}"\n[controller]\nstate_dir = "{base}/s"\nrun_dir = "{base}/r"\n'
    )
    (base / "s").mkdir(mode=0o700)
    config = load_config(config_dir)
    cluster = Cluster("n1", path=database_of(config), up=False)
    for number in range(300):
        cluster.submit(ANN, hold=True, name=f"job{number}", comment="c" * 200)
    cluster.store.close()
    return config


def database_of(config: Config) -> Path:
    return config.controller.state_dir / paths.DATABASE_FILE


def start(config: Config) -> int:
    """Start the controller and stop it when it is ready; return its exit status."""

    async def once() -> int:
        running = asyncio.ensure_future(serve(config))
        while not running.done() and not config.steps_socket.exists():
            await asyncio.sleep(0.01)
        if not running.done():
            os.kill(os.getpid(), 15)
        return await running

    return asyncio.run(once())


def test_a_whole_database_is_taken_and_remembers_its_cluster(lab: Config) -> None:
    assert start(lab) == 0
    own = (lab.config_dir / paths.CLUSTER_ID_FILE).read_text().strip()
    assert len(own) == 16
    assert start(lab) == 0
    (lab.config_dir / paths.CLUSTER_ID_FILE).unlink()
    assert start(lab) == 0
    assert (lab.config_dir / paths.CLUSTER_ID_FILE).read_text().strip() == own


def test_d6_another_clusters_database_is_refused_until_it_is_restored(lab: Config, tmp_path: Path) -> None:
    other = cluster_at(tmp_path / "other", "other")
    assert start(lab) == start(other) == 0
    shutil.copy(database_of(other), database_of(lab))
    with pytest.raises(ConfigError, match="it is of another cluster, 'other' .* hpcsched restore FILE"):
        start(lab)
    database_of(lab).unlink()
    backup.restore(database_of(other), database_of(lab), now_s=1.0, suffix="old")
    assert start(lab) == 0


def test_a_renamed_cluster_keeps_its_database(lab: Config) -> None:
    assert start(lab) == 0
    path = lab.config_dir / "hpcsched.toml"
    path.write_text(path.read_text().replace('name = "lab"', 'name = "new"'))
    assert start(load_config(lab.config_dir)) == 0


def test_d6_a_database_with_flipped_bytes_is_refused(lab: Config) -> None:
    path = database_of(lab)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        (index,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'events_by_job'").fetchone()
    whole = path.read_bytes()
    at = (index - 1) * PAGE
    path.write_bytes(whole[: at + 3] + bytes([0xFF, 0xFF, 0xFF, 0xFF]) + whole[at + 7 :])
    with pytest.raises(ConfigError, match=r"hpcsched.db: it is damaged: .*hpcsched restore FILE"):
        start(lab)
    path.write_bytes(whole)
    assert start(lab) == 0


@pytest.mark.parametrize("harm", ["one byte", "gone", "an older copy"])
def test_d6_a_database_that_has_lost_its_last_changes_is_refused(lab: Config, harm: str) -> None:
    """SQLite takes what is left without a word: here, a queue of the day before."""
    path = database_of(lab)
    log = path.with_name(path.name + "-wal")
    assert start(lab) == 0
    older = path.read_bytes()
    with closing(sqlite3.connect(path)) as other:  # with it, the log is not merged into the database
        other.execute("SELECT count(*) FROM jobs").fetchone()
        assert start(lab) == 0
        changes, merged = bytearray(log.read_bytes()), path.read_bytes()
    assert len(changes) > PAGE
    changes[100] ^= 1
    path.write_bytes(older if harm == "an older copy" else merged)
    if harm == "one byte":
        log.write_bytes(changes)
    for _ in range(2):  # a refused start signs nothing
        with pytest.raises(ConfigError, match=r"it has lost its last changes: its audit log ends with record \d+, and"):
            start(lab)
    path.rename(path.with_name("left.db"))
    backup.restore(path.with_name("left.db"), path, now_s=1.0, suffix="old")
    assert start(lab) == 0


def test_d6_a_row_that_cannot_be_read_is_refused(lab: Config) -> None:
    with closing(sqlite3.connect(database_of(lab))) as connection:
        connection.execute("UPDATE specs SET spec = replace(spec, ':', ';') WHERE id = 7")
        connection.commit()
    with pytest.raises(ConfigError, match="it is damaged: a row cannot be read: .*hpcsched restore FILE"):
        start(lab)


def test_d6_a_script_that_has_changed_on_disk_is_not_run() -> None:
    cluster = Cluster("n1")
    kept = cluster.job(cluster.submit(hold=True, script="#!/bin/sh\ntrue\n")).spec
    assert cluster.store.script(kept) == b"#!/bin/sh\ntrue\n"
    cluster.store.connection.execute("UPDATE scripts SET text = x'00' WHERE sha256 = ?", (kept.script_sha256,))
    assert cluster.store.script(kept) is None
    assert cluster.store.script(spec(script="")) == b""
