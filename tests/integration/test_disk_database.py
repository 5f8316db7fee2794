"""The database on a disk that loses what was not fsynced, and on one that fails: what was acknowledged is there."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from losing_disk import LosingDisk, remains, why_not

from hpcsched.config.load import build_config
from hpcsched.errors import UnavailableError
from hpcsched.model.job import JobSpec
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction
from hpcsched.store.backup import contents_of
from hpcsched.store.engine import current_epoch, open_database, raise_epoch
from hpcsched.store.store import HistoryQuery, Store

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LosingDisk]:
    with LosingDisk(tmp_path / "disk") as disk:
        yield disk


class Controller:
    """The part of a controller that accepts jobs."""

    def __init__(self, path: Path) -> None:
        engine = open_database(path, make=True)
        self.epoch = raise_epoch(engine)
        self.store = Store(engine)
        config = build_config({}, [], config_dir=Path("/nonexistent"), environ={})
        self.state = ClusterState(config=config, incarnation="0" * 16, epoch=self.epoch)
        self.state.last_job_id, self.state.last_spec_id = self.store.last_ids()

    def submit(self, name: str, size: int = 10) -> int:
        """Commit a job; return its id, or undo it all and raise what the commit raised."""
        tx = Transaction(self.state, 1e9)
        spec = JobSpec(name=name, script="#!/bin/sh\n" + "#" * size, work_dir="/")
        (job,) = tx.submit(spec, uid=1, user="ann", partition="main", time_limit_s=None)
        tx.note_request(1, name, [job.id])
        try:
            self.store.commit(tx.batch)
        except UnavailableError:
            tx.undo()
            raise
        return job.id


def names_in(path: Path) -> list[str]:
    """Open the database as a controller does and return the names of its jobs, each checked to be whole."""
    assert contents_of(path)
    store = Store(open_database(path))
    jobs = store.history(HistoryQuery())
    for job in jobs:
        assert [type(event).__name__ for event in store.load_events(job.id)] == ["Submitted"]
        assert store.request_jobs(1, job.spec.name) == {job.id: job.spec}
    store.close()
    return [job.spec.name for job in jobs]


def test_g6_what_was_acknowledged_is_there_whenever_the_power_fails(disk: LosingDisk, tmp_path: Path) -> None:
    """A database is made, used, closed and used again; the power fails after each single change that reached the disk."""
    path = disk.path / "h.db"
    for life in range(2):
        controller = Controller(path)
        disk.mark(f"epoch {controller.epoch}")
        for i in range(3):
            controller.submit(f"job-{life}-{i}", size=6000 * (i % 2))
            disk.mark(f"job job-{life}-{i}")
        controller.store.close()
    log = disk.log()
    rng = random.Random(1)
    looked = 0
    for end in range(1, len(log) + 1):
        for left in ("synced", "some", "all"):
            target = tmp_path / "left"
            promised = [mark.split() for mark in remains(log[:end], left, rng, target)]
            jobs = [name for kind, name in promised if kind == "job"]
            epochs = [int(text) for kind, text in promised if kind == "epoch"]
            where = f"after change {end}, with {left} left: {os.listdir(target)}"
            if (target / "h.db").exists() and not promised:
                Store(open_database(target / "h.db", make=True)).close()  # whatever there is, it can be opened
            elif promised:
                assert names_in(target / "h.db")[: len(jobs)] == jobs, where
                assert current_epoch(open_database(target / "h.db")) >= max(epochs), where
            shutil.rmtree(target)
            looked += 1
    assert looked > 250


def refusal_of(work: Callable[[], object]) -> str:
    """Return in which words the disk's trouble was told, "" if there was none."""
    try:
        work()
    except UnavailableError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("times", [1, 1 << 60])
def test_a_write_that_fails_loses_nothing_that_was_acknowledged(disk: LosingDisk, error: int, times: int) -> None:
    path = disk.path / "h.db"
    controller = Controller(path)
    accepted: list[str] = []
    refused = 0
    for after in range(40):
        disk.fail(error, after=after, times=times)
        for i in range(2):
            said = refusal_of(lambda name=f"job-{after}-{i}": controller.submit(name, size=3000))
            if not said:
                accepted.append(f"job-{after}-{i}")
            else:
                refused += "cannot write the database" in said
        disk.heal()
        controller.submit(f"job-{after}-healed")
        accepted.append(f"job-{after}-healed")
        controller.submit(f"job-{after}-again")
        accepted.append(f"job-{after}-again")
    assert refused > 5
    controller.store.close()
    assert names_in(path) == accepted


def test_a_database_that_cannot_be_made_says_why_and_can_be_made_later(disk: LosingDisk) -> None:
    for after in range(30):
        path = disk.path / f"h{after}.db"
        disk.fail(errno.ENOSPC, after=after)
        said = refusal_of(lambda path=path: Controller(path).store.close())
        assert bool(said) == (disk.heal() > 0)
        assert not said or "database" in said
        controller = Controller(path)
        controller.submit("a job")
        controller.store.close()
        assert names_in(path) == ["a job"]
