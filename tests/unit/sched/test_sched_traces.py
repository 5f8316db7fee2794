"""plan() replays the head of a real machine's log and starts every job at the second that the reference schedule says.

The reference is the simulator's schedule, which `test_sim_traces` holds to that of another simulator. The semantics
replayed are those of that one: events one at a time, submissions before ends of the same second; a pass at each end, and at a
submission only if the job fits in what is free; a running job's processors are free again at start + requested time.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Partition, Share
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from hpcsched.sim.policies import simulate
from hpcsched.sim.swf import read_trace

PROCS = 100
JOBS = 2000
SUBMIT, END = 0, 1

KTH = Path(__file__).parents[2] / "golden" / "traces" / "KTH-SP2.swf.gz"


@pytest.mark.parametrize(("policy", "kind"), [("easy", Backfill.EASY), ("fcfs", Backfill.NONE)])
def test_starts_are_those_of_the_reference_schedule(policy: str, kind: Backfill) -> None:
    jobs = list(_jobs(KTH))[:JOBS]
    done = simulate(read_trace(KTH), policy)
    reference = {job.id: at_s for job, at_s in zip(done.jobs, done.starts_s, strict=True)}
    # what is still waiting when the last of these jobs comes may be overtaken by later jobs: not part of this
    last_submit_s = jobs[-1][1]
    starts = _replay(jobs, Policy(backfill=kind, weight_age=0, backfill_depth=0, estimate_depth=0))
    compared = {job_id: start_s for job_id, start_s in starts.items() if start_s <= last_submit_s}
    wrong = {job_id: (at_s, reference[job_id]) for job_id, at_s in compared.items() if reference[job_id] != at_s}
    assert len(compared) > JOBS * 0.9
    assert not wrong


def _jobs(path: Path) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (id, submit, run time, processors, requested time) in file order."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if not line.startswith(";"):
                fields = line.split()
                yield int(fields[0]), int(fields[1]), int(fields[3]), int(fields[7]), int(fields[8])


def _replay(jobs: list[tuple[int, int, int, int, int]], policy: Policy) -> dict[int, int]:
    """Return when each job starts."""
    machine = NodeView(name=NodeName("m"), cpus=PROCS, mem_mib=0)
    partitions = {"main": Partition(name="main", nodes=(machine.name,), default=True)}
    run_s = {job_id: run for job_id, _, run, _, _ in jobs}
    events = [(submit, SUBMIT, order, job_id) for order, (job_id, submit, _, _, _) in enumerate(jobs)]
    views = {
        job_id: _pending(job_id, order, procs, asked_s) for order, (job_id, _, _, procs, asked_s) in enumerate(jobs)
    }
    heapq.heapify(events)
    created = len(events)
    waiting: dict[int, PendingJob] = {}
    running: dict[int, RunningJob] = {}
    starts: dict[int, int] = {}
    while events:
        now_s, what, _, job_id = heapq.heappop(events)
        if what == SUBMIT:
            waiting[job_id] = views[job_id]
        else:
            del running[job_id]
        held = tuple(job for job in running.values() if (job.ends_at_s or 0) > now_s)
        free = PROCS - sum(job.shares[0].cpus for job in held)
        if what == SUBMIT and (views[job_id].request.shape.cpus_per_task > free):
            continue
        snapshot = Snapshot(
            now_s=now_s, nodes=(machine,), partitions=partitions, running=held, pending=tuple(waiting.values())
        )
        for start in plan(snapshot, policy).starts:
            job = waiting.pop(start.job_id)
            starts[start.job_id] = now_s
            ends_at_s = now_s + (job.request.time_limit_s or 0)
            running[start.job_id] = RunningJob(
                id=job.id, display_id="", shares=start.shares, began_at_s=now_s, ends_at_s=ends_at_s
            )
            heapq.heappush(events, (now_s + run_s[start.job_id], END, created, start.job_id))
            created += 1
    return starts


def _pending(job_id: int, order: int, procs: int, asked_s: int) -> PendingJob:
    shape = Shape(cpus_per_task=procs, mem_per_node_mib=0)
    return PendingJob(
        id=JobId(job_id),
        display_id=str(job_id),
        partition="main",
        request=ResourceRequest(shape=shape, time_limit_s=asked_s),
        submitted_at_s=order,  # the queue is in the order of the file
    )


def test_the_replay_itself_gives_shares_of_one_pool() -> None:
    starts = _replay(
        [(1, 0, 50, 60, 100), (2, 1, 10, 100, 20), (3, 2, 10, 40, 40), (4, 3, 9, 40, 98)], Policy(weight_age=0)
    )
    assert starts == {1: 0, 3: 2, 2: 50, 4: 60}
    assert Share(node=NodeName("m"), cpus=1, mem_mib=0).tasks == 1
