"""Estimate when a job will start, and explain why it waits, with the scheduler itself.

Pure: it works on a snapshot. It may run in its own thread, so that a long queue delays only the
client that asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState, Reason
from hpcsched.sched.explain import WhatIf, explain, in_words
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt.plan import full_plan
from hpcsched.sched.snapshot import Snapshot

Json = dict[str, Any]


def first_waiting(jobs: Sequence[Job]) -> Job:
    """Return the array task to explain: the first that waits, if any."""
    return next((job for job in jobs if job.state is JobState.PENDING), jobs[0])


def why_words(snapshot: Snapshot, policy: Policy, job_id: JobId) -> Json:
    """Return why a job waits, as text lines and as values; empty if it would start now."""
    found = explain(snapshot, policy, full_plan(snapshot, policy), job_id)
    if found is None:
        return {}
    return {
        "lines": in_words(found, snapshot.now_s).splitlines(),
        "needs": found.needs,
        "position": found.position,
        "ahead": list(found.ahead),
        "nodes": dict(found.nodes),
        "nearest": list(found.nearest),
        "expected_start_s": found.expected_start_s,
        "expected_place": asdict(found.place) if found.place is not None else None,
        "smaller": list(found.smaller or ()),
    }


def first_start(snapshot: Snapshot, policy: Policy, job_id: JobId) -> Json:
    """Return when and where a job of the snapshot would start, and why not at once.

    The job was not submitted.
    """
    job = next(job for job in snapshot.pending if job.id == job_id)
    made = full_plan(snapshot, policy)
    answer: Json = {
        "job_id": job_id,
        "partition": job.partition,
        "start_s": None,
        "nodes": [],
        "node_list": "",
        "cpus": 0,
    }
    for start in made.starts:
        if start.job_id == job_id:
            nodes = [share.node for share in start.shares]
            answer |= {"start_s": snapshot.now_s, "nodes": nodes, "node_list": compress_hostlist(nodes)}
            answer |= {"cpus": sum(share.cpus for share in start.shares), "partition": start.partition}
            text = f"would start at once on {answer['node_list']} in partition {start.partition}"
            return answer | {"reason": "None", "text": text}
    wait = made.waits[job_id]
    answer |= {"reason": wait.reason.value, "start_s": wait.expected_start_s}
    place = WhatIf(snapshot, policy, job).place() if wait.reason in (Reason.RESOURCES, Reason.PRIORITY) else None
    if place is not None:
        answer |= {"start_s": place.start_s, "nodes": list(place.nodes), "node_list": compress_hostlist(place.nodes)}
        answer |= {"cpus": place.cpus, "partition": place.partition}
    return answer | {"text": f"would wait in partition {job.partition} ({wait.reason}): {wait.detail}"}
