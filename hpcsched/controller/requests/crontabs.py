"""Run recurring jobs: each entry of a user's crontab has one job in the queue.

The job begins at the next time of its schedule. When it has ended, with any result, the next one is
submitted. A job that a user cancels disables its entry, as in Slurm. A refused submission (a limit,
a deleted partition) is retried at the next time, and the entry says why. Source: scrontab(1).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hpcsched.api.identity import identity_of
from hpcsched.auth.authorize import Identity
from hpcsched.controller.requests import jobs, submission
from hpcsched.errors import RequestError
from hpcsched.model.codec import spec_from_json
from hpcsched.model.cron import MAX_YEARS, CronEntry, Crontab, next_time_s, parse_crontab, parse_schedule, with_disabled
from hpcsched.model.ids import JobId
from hpcsched.model.job import FINAL, Job, JobState
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

NEVER_DUE_S = 365 * 86_400.0  # a schedule that is never due is checked again after this time


def install(tx: Transaction, owner: Identity, text: str, specs: Sequence[Any]) -> Crontab:
    """Replace the crontab of `owner`; `specs` are the jobs of its entries, as JSON.

    Waiting jobs of the old crontab are cancelled.

    Raises: RequestError if the text cannot be parsed, or the numbers of jobs and entries differ.
    """
    lines = parse_crontab(text)
    if len(lines) != len(specs):
        raise RequestError(f"cannot take the crontab: it has {len(lines)} entries, and {len(specs)} jobs came with it")
    for spec in specs:
        made = spec_from_json(spec)
        if made.array is not None:
            raise RequestError("cannot take the crontab: an entry cannot be an array")
    remove(tx, owner)
    entries = tuple(
        CronEntry(number=line.number, schedule=line.schedule, spec=json.dumps(spec))
        for line, spec in zip(lines, specs, strict=True)
    )
    crontab = Crontab(uid=owner.uid, user=owner.user, text=text, entries=entries)
    tx.set_crontab(owner.uid, crontab)
    return crontab


def remove(tx: Transaction, owner: Identity) -> None:
    """Delete the crontab of `owner`, and cancel its waiting jobs. Running jobs continue."""
    known = tx.cluster.crontabs.get(owner.uid)
    if known is None:
        return
    tx.set_crontab(owner.uid, None)
    for entry in known.entries:
        job = _job_of(tx, entry)
        if job is not None and job.state is JobState.PENDING:
            jobs.cancel(tx, owner, [str(job.id)], {})


def keep_up(tx: Transaction) -> None:
    """Submit the next job of each entry whose last job has ended."""
    for crontab in list(tx.cluster.crontabs.values()):
        for at, entry in enumerate(crontab.entries):
            if _is_live(tx, entry):
                continue  # in most ticks there is nothing to do: avoid a savepoint
            tx.attempt(f"keep the crontab of {crontab.user} up", partial(_keep_up_entry, uid=crontab.uid, at=at))


def _keep_up_entry(tx: Transaction, uid: int, at: int) -> None:
    crontab = tx.cluster.crontabs.get(uid)
    if crontab is None or at >= len(crontab.entries):  # the previous entry has just been disabled
        return
    entry = crontab.entries[at]
    job = _job_of(tx, entry)
    if _is_live(tx, entry):
        return
    if job is not None and job.state is JobState.CANCELLED and job.ended_by_uid is not None:
        left = tuple(other for other in crontab.entries if other is not entry)
        tx.set_crontab(uid, replace(crontab, text=with_disabled(crontab.text, entry.number), entries=left))
        return
    changed = _submitted(tx, identity_of(uid, tx.cluster.config.access).as_user(), entry)
    entries = (*crontab.entries[:at], changed, *crontab.entries[at + 1 :])
    tx.set_crontab(uid, replace(crontab, entries=entries))


def _is_live(tx: Transaction, entry: CronEntry) -> bool:
    """Return whether the entry's job has not ended, or its next submission is not due yet."""
    job = _job_of(tx, entry)
    return (job is not None and job.state not in FINAL) or entry.retry_at_s > tx.now_s


def _submitted(tx: Transaction, owner: Identity, entry: CronEntry) -> CronEntry:
    """Return the entry with its next job submitted, or with the reason of the refusal."""
    due_s = next_time_s(parse_schedule(entry.schedule), tx.now_s)
    if due_s is None:
        why = f"its schedule {entry.schedule!r} is not due in the next {MAX_YEARS} years"
        return replace(entry, job_id=0, problem=why, retry_at_s=tx.now_s + NEVER_DUE_S)
    spec = replace(spec_from_json(json.loads(entry.spec)), begin_at_s=int(due_s))
    made = tx.attempt(
        "submit a recurring job", lambda inner: submission.submit(inner, owner, "", [spec], lambda *_: None)
    )
    if isinstance(made, Exception):
        return replace(entry, job_id=0, problem=str(made), retry_at_s=due_s)
    return replace(entry, job_id=made[0]["job_id"], problem="", retry_at_s=0.0)


def next_retry_s(cluster: ClusterState, now_s: float) -> float | None:
    """Return when the next refused submission is retried, or None."""
    times_s = (entry.retry_at_s for crontab in cluster.crontabs.values() for entry in crontab.entries)
    return min((at_s for at_s in times_s if at_s > now_s), default=None)


def view(crontab: Crontab | None) -> dict[str, Any]:
    """Return a crontab as JSON; empty if there is none."""
    if crontab is None:
        return {"text": "", "entries": []}
    shown = [
        {"line": entry.number, "schedule": entry.schedule, "job_id": entry.job_id or None, "problem": entry.problem}
        for entry in crontab.entries
    ]
    return {"text": crontab.text, "entries": shown, "user": crontab.user}


def _job_of(tx: Transaction, entry: CronEntry) -> Job | None:
    return tx.cluster.jobs.get(JobId(entry.job_id)) if entry.job_id else None
