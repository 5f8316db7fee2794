"""Prolog and epilog on the head with a damaged or full disk: the controller continues, and no script is forgotten."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.controller.cluster import Cluster
from waiting import PATIENCE_S

from hpcsched.controller import head_scripts
from hpcsched.controller.head_scripts import HeadScripts
from hpcsched.model.job import JobState


class Head:
    """A controller whose scripts append what they are called with to a file."""

    def __init__(self, base: Path) -> None:
        self.folder, self.said = base / "scripts", base / "said"
        program = base / "script"
        program.write_text(f'#!/bin/sh\necho "$SLURM_SCRIPT_CONTEXT $SLURM_JOB_ID $SLURM_JOB_NAME" >> {self.said}\n')
        program.chmod(0o755)
        self.cluster = Cluster("n1")
        settings = replace(
            self.cluster.state.config.controller, state_dir=base, prolog_head=str(program), epilog_head=str(program)
        )
        self.cluster.state.config = replace(self.cluster.state.config, controller=settings)
        self.scripts = HeadScripts(self.cluster.controller)

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines() if self.said.exists() else []


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


DAMAGED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "cut off": lambda path: path.write_text('{"A": "'),
    "a list": lambda path: path.write_text("[1]"),
    "a number": lambda path: path.write_text('{"A": 5}'),
    "a zero byte": lambda path: path.write_text(json.dumps({"A": "a\0b"})),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "huge": lambda path: path.write_text(json.dumps({"A": "x" * (2 << 20)})),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a fifo": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_the_epilog_of_a_damaged_record_runs_with_the_number_of_its_job(
    head: Head, damage: Callable[[Path], object]
) -> None:
    head.folder.mkdir()
    damage(head.folder / "7.0")
    (head.folder / "8.0").write_text('{"SLURM_JOB_NAME": "whole", "SLURM_JOB_ID": "8"}')
    (head.folder / "notes.txt").write_text("not ours")

    async def scene() -> None:
        head.scripts.start()
        await until(lambda: [path.name for path in head.folder.iterdir()] == ["notes.txt"])

    run(scene)
    assert sorted(head.lines()) == ["epilog_slurmctld 7 ", "epilog_slurmctld 8 whole"]


def test_a_record_that_cannot_be_removed_runs_its_epilog_once(head: Head) -> None:
    (head.folder / "7.0").mkdir(parents=True)

    async def scene() -> None:
        head.scripts.start()
        await until(lambda: not head.scripts._tasks)

    run(scene)
    assert head.lines() == ["epilog_slurmctld 7 "]


def test_a_full_disk_delays_the_prolog_and_does_not_spin(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = head.cluster.submit()
    assert head.cluster.job(job_id).state is JobState.CONFIGURING
    monkeypatch.setattr(head_scripts, "RETRY_S", 0.3)
    write, tries = head_scripts._write, []

    def full(*given: object) -> None:
        tries.append(asyncio.get_running_loop)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(head_scripts, "_write", full)

    async def scene() -> None:
        head.scripts.start()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert not head.scripts.may_launch(head.cluster.job(job_id))
        await until(lambda: head.scripts.may_launch(head.cluster.job(job_id)))
        assert loop.time() - began_s >= 0.6  # two waits: without them it would have spun

    run(scene)
    assert len(tries) == 3
    assert [line.split()[0] for line in head.lines()] == ["prolog_slurmctld"]
