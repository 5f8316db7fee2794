"""Which directory `hctl checkpoint` looks at, and what it refuses before it looks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hpcsched import client
from hpcsched.cli import hctl
from hpcsched.commands.options import UsageError
from hpcsched.errors import NotFoundError


def claimed(directory: Path, job: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "attempt.0000").write_text(json.dumps({"job": job}))
    return directory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The jobs 19_1 and 19_2 work in `tmp_path`; returns the commands that are run for them."""
    jobs = [{"id": 18 + task, "display_id": f"19_{task}", "work_dir": str(tmp_path)} for task in (1, 2)]
    shown = {"/v1/job/19": jobs, "/v1/job/19_1": jobs[:1], "/v1/job/19_2": jobs[1:]}
    commands: list[list[str]] = []

    class Ended:
        returncode = 0

    def run(command: list[str], check: bool) -> Ended:
        assert not check
        commands.append(command)
        return Ended()

    monkeypatch.setattr(client, "call", lambda _method, path: {"jobs": shown[path]})
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_task_of_an_array_has_the_directory_that_it_claimed(asked: list[list[str]], tmp_path: Path) -> None:
    claimed(tmp_path / "one" / "checkpoints", "19")
    second = claimed(tmp_path / "two" / "checkpoints", "20")
    assert hctl._on_checkpoints(["list", "19_2"], as_json=True) == 0
    assert asked[0][-4:] == ["list", "--json", "--", str(second)]


@pytest.fixture
def told(asked: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program of job 19_1 has said that its checkpoints are here, outside of the job's directory."""
    directory = tmp_path.parent / f"{tmp_path.name}-share" / "run1" / "checkpoints"
    job = {"id": 19, "display_id": "19_1", "work_dir": str(tmp_path), "training": {"directory": str(directory)}}
    monkeypatch.setattr(client, "call", lambda _method, path: {"jobs": [job]})
    return directory


def test_checkpoints_are_found_where_the_program_said(asked: list[list[str]], told: Path) -> None:
    claimed(told, "19")
    assert hctl._on_checkpoints(["verify", "19_1"], as_json=False) == 0
    assert asked[0][-3:] == ["verify", "--", str(told)]


def test_a_directory_that_another_job_has_claimed_is_not_taken(asked: list[list[str]], told: Path) -> None:
    claimed(told, "20")
    with pytest.raises(NotFoundError, match=f"in {told}, which its program named, are none of it"):
        hctl._on_checkpoints(["prune", "19_1"], as_json=False)
    assert not asked


def test_an_array_as_a_whole_is_refused_with_its_tasks(asked: list[list[str]]) -> None:
    with pytest.raises(UsageError, match="2 jobs 19 means: name one, as 19_1, 19_2"):
        hctl._on_checkpoints(["list", "19"], as_json=False)
    assert not asked


def test_a_job_without_checkpoints_is_told_where_was_looked(asked: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(
        NotFoundError, match=f"not said where they are, and no directory in {tmp_path} has any of it; name"
    ):
        hctl._on_checkpoints(["verify", "19_1"], as_json=False)
    assert not asked


def test_json_is_refused_where_there_is_none(asked: list[list[str]]) -> None:
    with pytest.raises(UsageError, match="only list and verify take --json"):
        hctl._on_checkpoints(["prune", "19_1"], as_json=True)
    assert not asked


def test_code_in_the_current_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "hpctrain" / "checkpoint"
    planted.mkdir(parents=True)
    for path in (planted.parent / "__init__.py", planted / "__init__.py", planted / "__main__.py"):
        path.write_text(f"open({str(tmp_path / 'planted')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    hctl._on_checkpoints(["list", "./"], as_json=False)
    assert not (tmp_path / "planted").exists()
