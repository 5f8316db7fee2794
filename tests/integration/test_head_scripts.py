"""Prolog and epilog on the head: damaged records, a full disk, a lock that is held."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.controller.cluster import Cluster

from hpcsched import health
from hpcsched.controller import head_scripts
from hpcsched.controller.head_scripts import HeadScripts
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState

SCRIPT = '#!/bin/sh\necho "$SLURM_SCRIPT_CONTEXT $SLURM_JOB_ID" >> {notes}\n'


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_scripts, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(head_scripts, "LONGEST_RETRY_S", 0.01)


class Head:
    """A controller without a network, whose prolog and epilog write a line."""

    def __init__(self, base: Path) -> None:
        self.notes, script, state_dir = base / "notes", base / "script", base / "state"
        state_dir.mkdir()
        self.folder = state_dir / "scripts"
        script.write_text(SCRIPT.format(notes=self.notes))
        script.chmod(0o700)
        self.cluster = Cluster("n1")
        config = self.cluster.state.config
        keys = {"state_dir": state_dir, "prolog_head": str(script), "epilog_head": str(script)}
        self.cluster.state.config = replace(config, controller=replace(config.controller, **keys))
        self.scripts = HeadScripts(self.cluster.controller)

    def record(self, job_id: JobId, attempt: int = 0) -> Path:
        self.folder.mkdir(exist_ok=True)
        return self.folder / f"{job_id}.{attempt}"

    def lines(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def run(self, *steps: Callable[[], Any]) -> None:
        """Start as a controller does, and do the steps; a step that returns a condition waits for it."""

        async def all_steps() -> None:
            self.scripts.start()
            for step in steps:
                step()
                await self.settled()

        asyncio.run(all_steps())

    async def settled(self) -> None:
        async with asyncio.timeout(30):
            while self.scripts._tasks and not self.scripts.waits:
                await asyncio.sleep(0)

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_text('{"SLURM_JOB_ID": "7'),
    "empty": lambda path: path.write_text(""),
    "not JSON": lambda path: path.write_bytes(b"\xff\x00"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a list": lambda path: path.write_text("[7]"),
    "a number as a value": lambda path: path.write_text('{"SLURM_JOB_ID": 7}'),
    "a NUL": lambda path: path.write_text('{"A": "\\u0000"}'),
    "half a character": lambda path: path.write_text('{"A": "\\ud800"}'),
    "a name with =": lambda path: path.write_text('{"A=": "x"}'),
    "huge": sparse,
    "a huge variable": lambda path: path.write_text(json.dumps({"A": "x" * (2 << 20)})),
    "many variables": lambda path: path.write_text(json.dumps(dict.fromkeys(map(str, range(9999)), "x"))),
    "a directory": lambda path: (path.mkdir(), (path / "x").write_text("x")),
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("spoil", DAMAGE.values(), ids=DAMAGE)
def test_the_epilog_runs_although_its_record_is_damaged(
    head: Head, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(head.record(JobId(7)))
    head.run(lambda: None)
    assert head.lines() == ["epilog_slurmctld 7"]
    assert head.files == []
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "is damaged" in caplog.text


def test_a_damaged_record_of_a_running_job_is_replaced_by_the_job(head: Head) -> None:
    job_id = head.cluster.submit()
    head.cluster.run(job_id)
    head.record(job_id).write_text("{")
    head.run(lambda: None)
    assert head.scripts._environments[job_id, 0]["SLURM_JOB_PARTITION"]
    assert head.lines() == []


@pytest.mark.parametrize("name", ["x", "7", "7.", ".7", "07.0", "7.0.0", "7.-1", "9" * 30 + ".0", "٧.0", "7.0\n"])
def test_other_files_among_the_records_are_left_alone(head: Head, name: str, caplog: pytest.LogCaptureFixture) -> None:
    head.record(JobId(1)).with_name(name).write_text("{}")
    head.run(lambda: None)
    assert (head.lines(), head.files) == ([], [name])
    assert "not the name of a record" in caplog.text


def test_a_file_in_place_of_the_folder_stops_no_controller(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    head.folder.write_text("")
    head.run(lambda: None)
    assert "Not a directory" in caplog.text


def launched(head: Head) -> Job:
    job_id = head.cluster.submit()
    job = head.cluster.job(job_id)
    assert job.state in (JobState.CONFIGURING, JobState.RUNNING)
    return job


@pytest.mark.parametrize("failing", ["open", "fsync", "rename"])
def test_a_full_disk_delays_the_prolog_and_is_told_once(
    head: Head, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = launched(head)
    real, tries, full = getattr(os, failing), [0], [True]

    def fails(*args: Any, **named: Any) -> Any:
        if full[0] and "scripts" in str(args[0] if failing != "fsync" else os.readlink(f"/proc/self/fd/{args[0]}")):
            tries[0] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **named)

    monkeypatch.setattr(os, failing, fails)

    async def all_steps() -> None:
        head.scripts.start()
        assert not head.scripts.may_launch(job)
        await head.until(lambda: tries[0] >= 3)
        assert head.scripts.waits == ["the prolog on the head waits: No space left on device"]
        assert not head.scripts.may_launch(job)
        full[0] = False
        await head.until(lambda: head.scripts.may_launch(job))

    asyncio.run(all_steps())
    assert (head.lines(), head.scripts.waits) == ([f"prolog_slurmctld {job.id}"], [])
    assert [record.getMessage() for record in caplog.records if "waits" in record.getMessage()] == [
        f"job {job.id}: the prolog on the head waits: No space left on device; it is tried again"
    ]


def test_tries_come_later_and_later(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_scripts, "FIRST_RETRY_S", 0.25)
    monkeypatch.setattr(head_scripts, "LONGEST_RETRY_S", 1.0)
    job, slept, sleep = launched(head), [], asyncio.sleep
    head.folder.write_text("")  # so no record can be written

    def noted(delay_s: float) -> Awaitable[None]:
        slept.append(delay_s)
        return sleep(0)

    async def all_steps() -> None:
        head.scripts.may_launch(job)
        while len(slept) < 5:
            await sleep(0)

    monkeypatch.setattr(head_scripts.asyncio, "sleep", noted)
    asyncio.run(all_steps())
    assert slept[:5] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_a_held_lock_delays_the_epilog_and_uses_no_thread(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    ids = [JobId(number) for number in range(1, 41)]
    for job_id in ids:
        head.record(job_id).write_text(json.dumps({"SLURM_JOB_ID": str(job_id)}))
    held = [os.open(f"{head.record(job_id)}.lock", os.O_RDWR | os.O_CREAT) for job_id in ids[1:]]
    for fd in held:
        fcntl.flock(fd, fcntl.LOCK_EX)

    async def all_steps() -> None:
        head.scripts.start()
        await head.until(lambda: len(head.scripts._waits) == len(held) and head.lines())
        assert head.lines() == ["epilog_slurmctld 1"]
        assert await asyncio.to_thread(lambda: "a thread is free") == "a thread is free"
        for fd in held:
            os.close(fd)
        await head.until(lambda: len(head.lines()) == len(ids) and not head.scripts._tasks)

    asyncio.run(all_steps())
    assert (head.files, head.scripts.waits) == ([], [])


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.symlink_to("/etc/passwd")], ids=["directory", "link"])
def test_a_lock_that_is_no_file_delays_the_epilog(head: Head, spoil: Callable[[Path], object]) -> None:
    head.record(JobId(7)).write_text('{"SLURM_JOB_ID": "7"}')
    lock = head.folder / "7.0.lock"
    spoil(lock)

    async def all_steps() -> None:
        head.scripts.start()
        await head.until(lambda: head.scripts.waits)
        (lock.rmdir if lock.is_dir() else lock.unlink)()
        await head.until(lambda: not head.scripts._tasks)

    asyncio.run(all_steps())
    assert head.lines() == ["epilog_slurmctld 7"]


def test_an_epilog_whose_record_stays_runs_once(
    head: Head, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head.record(JobId(7)).write_text('{"SLURM_JOB_ID": "7"}')

    def read_only(_path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", read_only)
    head.run(lambda: None)
    assert head.lines() == ["epilog_slurmctld 7"]
    assert "cannot remove the record of job 7" in caplog.text


def test_hhealth_shows_what_scripts_wait_for() -> None:
    said = health._of_before({"scripts": ["the epilog on the head waits: No space left on device"]})
    assert said == "the epilog on the head waits: No space left on device"
