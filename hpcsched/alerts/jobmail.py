"""Find the mail that is due for a job, as its ``--mail-type`` asks.

Pure. Each mail has a key that stays the same for ever, so that whoever sends it can tell that it was sent
before: a job may be looked at again at any time, after a restart too.

An array without ARRAY_TASKS is one job here: its begin is that of its first task, its end that of its last.

Source: sbatch(1), ``--mail-type``; the subjects are Slurm's, so that filters for its mail work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcsched.alerts.rules import one_line
from hpcsched.lifecycle.job import limit_at_s
from hpcsched.model.job import FINAL, Job, JobState, exit_words
from hpcsched.model.units import format_time_s

ALL = frozenset({"BEGIN", "END", "FAIL", "REQUEUE", "INVALID_DEPEND"})
AT_PARTS = {"TIME_LIMIT_50": 0.5, "TIME_LIMIT_80": 0.8, "TIME_LIMIT_90": 0.9}
NOT_FAILED = frozenset({JobState.COMPLETED, JobState.CANCELLED, JobState.PREEMPTED})
MAX_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMail:
    """A mail about a job. `mail_to`: the job's ``--mail-user``; "": to its user.

    `is_end`: the mail has room for what the job has used.
    """

    key: str
    at_s: float
    job: str
    user: str
    mail_to: str
    subject: str
    lines: tuple[str, ...] = ()
    is_end: bool = False


def types_of(job: Job) -> frozenset[str]:
    """Return the events of which the job's user wants mail."""
    wanted = frozenset(job.spec.mail_type)
    if "NONE" in wanted:
        return frozenset()
    return wanted | ALL if "ALL" in wanted else wanted


def key_of(job: Job) -> str:
    """Return what names the job for ever: a restored database may give its number again."""
    return f"{job.id}.{job.submitted_at_s:.0f}"


def is_told_as_array(job: Job) -> bool:
    """Return whether the job is a task of an array of which one mail is sent."""
    return job.array_job_id is not None and "ARRAY_TASKS" not in job.spec.mail_type


def mails_of(job: Job, now_s: float, *, never_starts: bool = False) -> Iterator[JobMail]:
    """Yield the mail of a job up to now; `never_starts`: a dependency cannot be satisfied."""
    types = types_of(job)
    head, base = _head(job), key_of(job)
    started_s = job.started_at_s if job.state is not JobState.PENDING else None
    if "REQUEUE" in types and job.restarts:
        at_s = job.not_before_s if job.not_before_s is not None else now_s
        yield _mail(job, f"{base}.requeue{job.restarts}", min(at_s, now_s), f"{head} Requeued")
    if "BEGIN" in types and started_s is not None:
        waited = format_time_s(max(0.0, started_s - job.submitted_at_s), full=True)
        yield _mail(job, f"{base}.{job.attempt}.begin", started_s, f"{head} Began, Queued time {waited}")
    yield from mails_of_limits(job, now_s)
    if "INVALID_DEPEND" in types and never_starts and job.state is JobState.PENDING:
        yield _mail(job, f"{base}.never", now_s, f"{head} Invalid dependency")
    if job.state in FINAL and _is_end_wanted(types, [job.state]):
        yield _end_of(job, head, base, now_s)


def mails_of_limits(job: Job, now_s: float) -> Iterator[JobMail]:
    """Yield the mail about how much of its time limit a running job has used."""
    types, limit_s = types_of(job), limit_at_s(job)
    if job.state is not JobState.RUNNING or limit_s is None or not job.time_limit_s:
        return
    for word, part in AT_PARTS.items():
        at_s = limit_s - (1 - part) * job.time_limit_s
        if word in types and at_s <= now_s:
            text = f"{_head(job)} Reached {part:.0%} of time limit"
            yield _mail(job, f"{key_of(job)}.{job.attempt}.{word.lower()}", at_s, text)


def _head(job: Job) -> str:
    return f"Job_id={job.display_id} Name={one_line(job.spec.name, MAX_NAME)}"


def _is_end_wanted(types: frozenset[str], states: Sequence[JobState]) -> bool:
    is_failed = "FAIL" in types and any(state not in NOT_FAILED for state in states)
    return "END" in types or is_failed or ("TIME_LIMIT" in types and JobState.TIMEOUT in states)


def _mail(job: Job, key: str, at_s: float, subject: str, lines: Sequence[str] = ()) -> JobMail:
    return JobMail(
        key=key,
        at_s=at_s,
        job=job.display_id,
        user=job.user,
        mail_to=job.spec.mail_user,
        subject=subject,
        lines=tuple(lines),
    )


def _end_of(job: Job, head: str, base: str, now_s: float) -> JobMail:
    ended_s = now_s if job.ended_at_s is None else job.ended_at_s
    ran_s = 0.0 if job.started_at_s is None else max(0.0, ended_s - job.started_at_s - (job.suspended_s or 0.0))
    word = "Ended" if job.state in NOT_FAILED else "Failed"
    exit_text = "" if job.exit is None else f", ExitCode {job.exit.signal or job.exit.code}"
    subject = f"{head} {word}, Run time {format_time_s(ran_s, full=True)}, {job.state.value}{exit_text}"
    meaning = "" if job.exit is None else exit_words(job.exit.code, job.exit.signal)
    nodes = one_line(", ".join(share.node for share in job.shares[:20]), 400)
    lines = [
        f"Job {job.display_id} ({one_line(job.spec.name, 200)}) of {job.user}: {job.state.value}",
        *([f"Why: {one_line(job.reason_detail, 400)}"] if job.reason_detail else []),
        *([f"Exit status {job.exit}: {meaning}"] if meaning else []),
        *([f"Nodes: {nodes}"] if nodes else []),
    ]
    return replace(_mail(job, f"{base}.{job.attempt}.end", ended_s, subject, lines), is_end=True)


def mails_of_array(tasks: Sequence[Job], now_s: float) -> Iterator[JobMail]:
    """Yield the mail of an array as a whole; `tasks`: those in memory, at least one."""
    first = tasks[0]
    types = types_of(first)
    number = first.array_job_id
    head = f"Array Summary Job_id={number}_* ({number}) Name={one_line(first.spec.name, MAX_NAME)}"
    base = f"{number}.{first.submitted_at_s:.0f}.array"
    started_s = [job.started_at_s for job in tasks if job.started_at_s is not None]
    if "BEGIN" in types and started_s:
        yield replace(_mail(first, f"{base}.begin", min(started_s), f"{head} Began"), job=str(number))
    states = [job.state for job in tasks]
    if all(state in FINAL for state in states) and _is_end_wanted(types, states):
        ended_s = max((job.ended_at_s for job in tasks if job.ended_at_s is not None), default=now_s)
        counted = Counter(state.value for state in states)
        failed = sum(state not in NOT_FAILED for state in states)
        word = "Failed" if failed else "Ended"
        lines = [f"{count} tasks: {state}" for state, count in counted.most_common()]
        subject = f"{head} {word}, {_mixed(counted)}"
        yield replace(_mail(first, f"{base}.end", ended_s, subject, lines), job=str(number))


def _mixed(counted: Counter[str]) -> str:
    return next(iter(counted)) if len(counted) == 1 else "Mixed"
