"""hlogs: all of the output, its last lines, and what is written while it looks."""

from __future__ import annotations

from typing import Any

import pytest
from fake_api import NOW_S, FakeApi, job, log_answer

from hpcsched.cli import hlogs

TEXT = b"".join(b"line %d\n" % i for i in range(100_000)) + b"no newline"


@pytest.fixture(autouse=True)
def a_job(api: FakeApi) -> None:
    for reference in ("12", "last", "10_3"):
        api.answers[f"GET /v1/job/{reference}"] = {"jobs": [job()]}


def looks(api: FakeApi) -> list[dict[str, str]]:
    return [given for route, given, _ in api.asked if route == "GET /v1/log"]


def file_answer(data: bytes, *, most: int = 1000, ended: bool = True) -> Any:
    """Return an answer that behaves as the controller does for a file of `data`, `most` bytes at a time."""

    def answer(body: Any, given: dict[str, str]) -> bytes:
        offset = int(given.get("offset", "0"))
        start = max(0, len(data) + offset) if offset < 0 else offset
        return log_answer(
            data[start : start + most], offset=start, size=len(data), ended=ended and start + most >= len(data)
        )

    return answer


def test_the_whole_output_comes_in_as_many_pieces_as_it_takes(api: FakeApi, capfdbinary: Any) -> None:
    api.answers["GET /v1/log"] = file_answer(TEXT[:25_000])
    assert hlogs.main(["12"]) == 0
    assert capfdbinary.readouterr().out == TEXT[:25_000]
    assert len(looks(api)) == 25


@pytest.mark.parametrize(
    ("count", "last"), [(0, b""), (1, b"no newline"), (2, b"line 99999\nno newline"), (20_000, None), (10**6, TEXT)]
)
def test_the_last_lines_are_found_however_long_they_are(
    count: int, last: bytes | None, api: FakeApi, capfdbinary: Any
) -> None:
    api.answers["GET /v1/log"] = file_answer(TEXT, most=1 << 17)
    assert hlogs.main(["-n", str(count), "12"]) == 0
    expected = b"\n".join(TEXT.split(b"\n")[-count:]) if last is None else last
    assert capfdbinary.readouterr().out == expected


def test_follow_goes_on_to_the_end_through_silence_and_a_restart(
    api: FakeApi, capfdbinary: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(hlogs, "RECONNECT_S", 0.0)
    api.answers["GET /v1/log"] = [
        log_answer(b"", ended=False),
        log_answer(b"one\n", ended=False),
        None,  # the controller restarts
        log_answer(b"", offset=4, size=0, ended=False),  # the file cannot be looked at just now
        log_answer(b"two\n", offset=4),
    ]
    assert hlogs.main(["-f", "12"]) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\n"
    assert [given["offset"] for given in looks(api)] == ["0", "0", "4", "4", "4"]
    assert float(api.parameters("GET /v1/log")["wait_s"]) > 0


def test_a_file_that_began_anew_is_shown_from_its_beginning(api: FakeApi, capfdbinary: Any) -> None:
    api.answers["GET /v1/log"] = [
        log_answer(b"first try\n", ended=False),
        log_answer(b"", offset=10, size=4, ended=False),
        log_answer(b"two\n"),
    ]
    assert hlogs.main(["-f", "12"]) == 0
    assert capfdbinary.readouterr().out == b"first try\ntwo\n"
    assert [given["offset"] for given in looks(api)] == ["0", "10", "0"]


def test_standard_error_and_refusals(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/log"] = (403, {"error": "cannot read the output of job 12", "kind": "PermissionDeniedError"})
    assert hlogs.main(["--err", "12"]) == 1
    assert api.parameters("GET /v1/log")["stream"] == "err"
    assert capsys.readouterr().err == "hlogs: error: cannot read the output of job 12\n"
    assert hlogs.main(["12", "13"]) == 2
    assert hlogs.main(["-n", "x", "12"]) == 2


def test_binary_output_passes_as_it_is(api: FakeApi, capfdbinary: Any) -> None:
    data = bytes(range(256))
    api.answers["GET /v1/log"] = file_answer(data)
    assert hlogs.main(["last"]) == 0
    assert capfdbinary.readouterr().out == data


def test_why_ranks_failed_is_told_before_the_output_the_first_cause_first(api: FakeApi, capfdbinary: Any) -> None:
    first = {
        "rank": 1,
        "ranks": 3,
        "node": "n2",
        "at_s": NOW_S,
        "echo": False,
        "text": "Traceback:\n  f\nOSError: \x1bgone\n",
    }
    echo = {"rank": 0, "ranks": 3, "node": "n1", "at_s": NOW_S, "echo": True, "text": ""}
    api.answers["GET /v1/job/12"] = {"jobs": [job() | {"failures": [first, echo]}]}
    api.answers["GET /v1/log"] = log_answer(b"output\n")
    assert hlogs.main(["12"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"output\n"
    assert err.decode().splitlines() == [
        "hlogs: first cause: rank 1 of 3 on n2 at 2027-01-15 08:00:00: OSError: ?gone",
        "hlogs:     Traceback:",
        "hlogs:       f",
        "hlogs: noticed by: rank 0 of 3 on n1 at 2027-01-15 08:00:00: (no reason was given)",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"state": "CANCELLED", "reason_detail": "cancelled by ben"},
            "job 12 was cancelled before it started: cancelled by ben",
        ),
        ({"state": "FAILED", "reason_detail": "no user"}, "job 12 ended (FAILED) before it started: no user"),
        ({"state": "PENDING"}, "job 12 has not started; hwhy 12 says what it waits for"),
    ],
)
def test_why_there_is_no_output_is_said_once(
    api: FakeApi, capsys: pytest.CaptureFixture[str], fields: dict[str, str], said: str
) -> None:
    api.answers["GET /v1/job/12"] = {"jobs": [job(started_at_s=None, **fields)]}
    api.answers["GET /v1/log"] = log_answer(b"", offset=0, size=0, ended=True)
    assert hlogs.main(["12"]) == 0
    assert capsys.readouterr().err == f"hlogs: {said}\n"


def test_the_reason_of_a_job_that_could_not_be_started_is_printed_once(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["GET /v1/job/12"] = {"jobs": [job(started_at_s=None, state="FAILED", reason_detail="no user")]}
    refusal = "cannot show the output of job 12 on n1: no user"
    api.answers["GET /v1/log"] = (404, {"error": refusal, "kind": "NotFoundError"})
    assert hlogs.main(["12"]) == 1
    assert capsys.readouterr().err == "hlogs: job 12 ended (FAILED) before it started: no user\n"
