"""Which mail a job gives, as `--mail-type` asks; and that its key stays the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import job as make_job

from hpcsched.alerts.jobmail import mails_of, mails_of_array
from hpcsched.model.frozen import replace as changed
from hpcsched.model.ids import JobId
from hpcsched.model.job import ExitStatus, Job, JobState

NOW_S = 1_800_000_000.0


def job(*types: str, name: str = "fit", **values: Any) -> Job:
    made = make_job(12)
    spec = replace(made.spec, mail_type=types, name=name)
    usual = {"spec": spec, "user": "ann", "submitted_at_s": NOW_S - 1000, "attempt": 1}
    return changed(made, **usual | values)


def ran(*types: str, state: JobState = JobState.COMPLETED, **values: Any) -> Job:
    usual = {"started_at_s": NOW_S - 900, "ended_at_s": NOW_S - 300, "exit": ExitStatus(code=0)}
    return job(*types, state=state, **usual | values)


def subjects(one: Job, **values: Any) -> list[str]:
    return [mail.subject for mail in mails_of(one, NOW_S, **values)]


def test_begin_and_end_have_slurms_subjects() -> None:
    assert subjects(ran("BEGIN", "END")) == [
        "Job_id=12 Name=fit Began, Queued time 00:01:40",
        "Job_id=12 Name=fit Ended, Run time 00:10:00, COMPLETED, ExitCode 0",
    ]


@pytest.mark.parametrize(
    ("types", "state", "words"),
    [
        (("END",), JobState.COMPLETED, ["Ended"]),
        (("END",), JobState.FAILED, ["Failed"]),
        (("FAIL",), JobState.FAILED, ["Failed"]),
        (("FAIL",), JobState.OUT_OF_MEMORY, ["Failed"]),
        (("FAIL",), JobState.COMPLETED, []),
        (("FAIL",), JobState.CANCELLED, []),
        (("TIME_LIMIT",), JobState.TIMEOUT, ["Failed"]),
        (("TIME_LIMIT",), JobState.FAILED, []),
        (("BEGIN", "END", "FAIL"), JobState.FAILED, ["Began", "Failed"]),
        (("ALL",), JobState.NODE_FAIL, ["Began", "Failed"]),
        (("ALL", "NONE"), JobState.FAILED, []),
        ((), JobState.FAILED, []),
    ],
)
def test_the_end_is_told_once_as_the_types_ask(types: tuple[str, ...], state: JobState, words: list[str]) -> None:
    found = subjects(ran(*types, state=state, exit=ExitStatus(code=1)))
    assert [subject.split()[2].strip(",") for subject in found] == words


def test_parts_of_the_time_limit_are_told_when_they_are_reached() -> None:
    types = ("TIME_LIMIT_50", "TIME_LIMIT_80", "TIME_LIMIT_90")
    running = job(*types, state=JobState.RUNNING, started_at_s=NOW_S - 850, time_limit_s=1000)
    assert subjects(running) == [f"Job_id=12 Name=fit Reached {part}% of time limit" for part in (50, 80)]
    assert subjects(changed(running, time_limit_s=None)) == []


def test_a_requeue_and_a_dependency_that_cannot_be_are_told() -> None:
    assert subjects(job("REQUEUE", restarts=2, not_before_s=NOW_S - 5)) == ["Job_id=12 Name=fit Requeued"]
    assert subjects(job("INVALID_DEPEND"), never_starts=True) == ["Job_id=12 Name=fit Invalid dependency"]
    assert subjects(job("INVALID_DEPEND")) == []


def test_a_key_is_the_same_for_the_same_thing_and_another_for_the_next_attempt() -> None:
    first = [mail.key for mail in mails_of(ran("ALL"), NOW_S)]
    assert first == [mail.key for mail in mails_of(ran("ALL"), NOW_S + 5000)]
    assert not set(first) & {mail.key for mail in mails_of(ran("ALL", attempt=2), NOW_S)}
    assert not set(first) & {mail.key for mail in mails_of(ran("ALL", submitted_at_s=NOW_S - 2000), NOW_S)}


def tasks(*states: JobState, types: tuple[str, ...] = ("BEGIN", "END", "FAIL")) -> list[Job]:
    return [
        ran(*types, id=JobId(12 + number), state=state, array_job_id=JobId(12), array_task_id=number)
        for number, state in enumerate(states)
    ]


def test_an_array_is_told_as_one_job() -> None:
    done, waits = JobState.COMPLETED, JobState.PENDING
    begun = list(mails_of_array([*tasks(done), *(changed(job, started_at_s=None) for job in tasks(waits))], NOW_S))
    assert [mail.subject for mail in begun] == ["Array Summary Job_id=12_* (12) Name=fit Began"]
    _, end = mails_of_array(tasks(done, done, JobState.FAILED), NOW_S)
    assert end.subject == "Array Summary Job_id=12_* (12) Name=fit Failed, Mixed"
    assert end.lines == ("2 tasks: COMPLETED", "1 tasks: FAILED")


def test_a_hostile_name_is_one_line_and_the_reason_is_cut() -> None:
    bad = "a\nBcc: x@evil\x1b[2J\u202e" + "y" * 5000
    (mail,) = mails_of(ran("END", name=bad, reason_detail=bad), NOW_S)
    assert mail.subject.isprintable()
    assert len(mail.subject) < 200
    assert all(line.isprintable() and len(line) < 500 for line in mail.lines)
