"""hcancel: what it asks for, and what it says of what was refused."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from fake_api import FakeApi, ended, job, running

from hpcsched import client
from hpcsched.cli import hcancel

NOTHING: dict[str, Any] = {"jobs": [], "filters": {}, "signal": None, "batch": False, "full": False}
UNKNOWN = {"job": "99", "error": "Invalid job id specified: 99", "kind": "NotFoundError"}
FOREIGN = {"job": "12", "error": "cannot cancel job 12: it belongs to eve", "kind": "PermissionDeniedError"}


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["12", "10_[1,3],train"], {"jobs": ["12", "10_[1,3]", "train"]}),
        (["12", "--signal", "SIGTERM"], {"jobs": ["12"], "signal": "TERM"}),
        (["-b", "-s", "10", "12"], {"jobs": ["12"], "signal": "USR1", "batch": True}),
        (["-fsUSR2", "12"], {"jobs": ["12"], "signal": "USR2", "full": True}),
        (["-t", "pd,Running", "-n", "a,b"], {"filters": {"state": "PENDING,RUNNING", "name": "a,b"}}),
        (["-u", "ann", "-p", "gpu", "12"], {"jobs": ["12"], "filters": {"user": "ann", "partition": "gpu"}}),
        (["--me"], {"filters": {"user": client.my_name()}}),
    ],
)
def test_the_request_is_what_was_said(argv: list[str], asked: dict[str, Any], api: FakeApi) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [12], "errors": []}
    assert hcancel.main(argv) == 0
    assert api.requests("POST /v1/cancel") == [NOTHING | asked]


def test_success_is_silent_and_verbose_speaks_as_scancel_does(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [12], "errors": []}
    assert hcancel.main(["12"]) == 0
    assert capsys.readouterr() == ("", "")
    assert hcancel.main(["-v", "12"]) == 0
    assert capsys.readouterr() == ("", "hcancel: Terminating job 12\n")


def test_an_unknown_id_is_an_error_unless_the_face_or_the_user_tolerates_it(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [], "errors": [UNKNOWN]}
    assert hcancel.main(["99"]) == 1
    assert capsys.readouterr().err == "hcancel: error: Invalid job id specified: 99\n"
    assert hcancel.main(["-Q", "99"]) == 0
    assert hcancel.scancel(["99"]) == 0
    assert capsys.readouterr().err == ""


def test_somebody_elses_job_is_always_an_error(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [11], "errors": [UNKNOWN, FOREIGN]}
    assert hcancel.main(["-Q", "11", "12", "99"]) == 1
    assert capsys.readouterr().err == "hcancel: error: cannot cancel job 12: it belongs to eve\n"


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        ([], 2, "no job was named"),
        (["-b", "12"], 2, "--batch without --signal"),
        (["-s", "NOPE", "12"], 1, "cannot read signal 'NOPE'"),
        (["-t", "nope"], 2, "Invalid job state specified: nope"),
        (["--singal=TERM", "12"], 2, "did you mean --signal?"),
    ],
)
def test_what_is_not_meant_is_refused_before_it_is_asked(
    argv: list[str], status: int, says: str, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hcancel.main(argv) == status
    assert says in capsys.readouterr().err
    assert api.asked == []


def test_interactive_asks_for_each_job_that_is_not_over(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers["GET /v1/jobs"] = {"jobs": [ended(), running(), job()]}
    api.answers["POST /v1/cancel"] = {"jobs": [12], "errors": []}
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\ny\n"))
    assert hcancel.main(["-i", "-u", "ann"]) == 0
    assert capsys.readouterr().out.count("[y/n]?") == 2
    assert api.requests("POST /v1/cancel") == [NOTHING | {"jobs": ["12"]}]
