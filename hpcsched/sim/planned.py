"""A trace that the daemon's own plan decides: at each event a snapshot is made of the pool and given to `plan`.

It is what `hpcschedd` runs, to the letter, and slower than the pools of `sched.pool`, which follow the same rules event by event.
The pool is one node; its cpus are the processors. A limit counts in whole seconds there, 1 at least. Jobs are looked at in the
order of arrival, all of them at every event. What `default` knows of ended jobs is what the daemon would: each user's last runs,
and how long plain EASY would have had jobs wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Partition
from hpcsched.sched.decisions import Plan
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import DEFAULT_GUARD, Backfill, Guard, Policy
from hpcsched.sched.predict import Experience, History
from hpcsched.sched.rehearsal import Rehearsal
from hpcsched.sched.request import Request, Shape
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from hpcsched.sim.swf import TraceJob

KINDS = {
    "fcfs": Backfill.NONE,
    "easy": Backfill.EASY,
    "easy-sjbf": Backfill.EASY_SJBF,
    "default": Backfill.DEFAULT,
    "conservative": Backfill.CONSERVATIVE,
    "slurm-like": Backfill.SLURM_LIKE,
}


class PlannedLine:
    """Decides by `plan`; see `world.Line`. `kind` is the policy, `size` the number of processors, `guard` that of "default"."""

    def __init__(self, jobs: Sequence[TraceJob], kind: Backfill, size: int, guard: Guard = DEFAULT_GUARD) -> None:
        self.last_plan = Plan(starts=(), waits={})
        self._jobs = jobs
        self._policy = Policy(backfill=kind, guard=guard, weight_age=0, backfill_depth=0, estimate_depth=0)
        self._nodes = (NodeView(name=NodeName("pool"), cpus=size, mem_mib=0),)
        self._partitions = {"main": Partition(name="main", nodes=(self._nodes[0].name,), default=True)}
        self._size = size
        self._shapes: dict[int, Shape] = {}
        self._waiting: dict[int, PendingJob] = {}
        self._running: dict[int, RunningJob] = {}
        self._history = History()
        self._rehearsal: Rehearsal | None = None  # for whom it matters
        if kind is Backfill.DEFAULT:
            self._rehearsal = Rehearsal(size)

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        """Let `job` wait from now on. If it fits in what is free, or has to be promised a start, return what is to start."""
        self._waiting[job] = self._pending(job, now_s)
        if self._rehearsal is not None:
            self._rehearsal.submitted(self._jobs[job].procs, self._jobs[job].asked_s, now_s)
            self._rehearsal.go_on(now_s, more_may_come=True)
        held = sum(other.shares[0].cpus for other in self._held(now_s))
        fits = self._jobs[job].procs <= self._size - held
        return self._plan(now_s) if fits or self._policy.backfill is Backfill.CONSERVATIVE else []

    def end(self, job: int, now_s: float) -> Sequence[int]:
        """Take back what `job` held, and return what is to start."""
        ended = self._running.pop(job)
        self._history.record(ended.uid, now_s - ended.began_at_s)
        if self._rehearsal is not None:
            self._rehearsal.ended(job, now_s)
            self._rehearsal.go_on(now_s, more_may_come=False)
        return self._plan(now_s) if self._waiting else []

    def _held(self, now_s: float) -> list[RunningJob]:
        """Return the jobs whose time limit is not up: the processors of the others count as free."""
        return [job for job in self._running.values() if job.ends_at_s is not None and job.ends_at_s > now_s]

    def _plan(self, now_s: float) -> list[int]:
        snapshot = Snapshot(
            now_s=now_s,
            nodes=self._nodes,
            partitions=self._partitions,
            running=tuple(self._held(now_s)),
            pending=tuple(self._waiting.values()),
            promises=self.last_plan.promises,
            experience=Experience(
                longest_runs_s=self._history.longest_s,
                easy_wait_s=self._rehearsal.longest_wait_s if self._rehearsal is not None else 0.0,
                began_s=self._jobs[0].submit_s,
            ),
        )
        self.last_plan = plan(snapshot, self._policy)
        started = []
        for start in self.last_plan.starts:
            view = self._waiting.pop(start.job_id)
            ends_at_s = now_s + self._jobs[start.job_id].asked_s
            self._running[start.job_id] = RunningJob(
                id=view.id,
                display_id="",
                shares=start.shares,
                began_at_s=now_s,
                ends_at_s=ends_at_s,
                uid=view.uid,
                partition=view.partition,
            )
            if self._rehearsal is not None:
                self._rehearsal.started(int(start.job_id), now_s)
            started.append(int(start.job_id))
        return started

    def _pending(self, job: int, now_s: float) -> PendingJob:
        procs = self._jobs[job].procs
        shape = self._shapes.setdefault(procs, Shape(cpus_per_task=procs, mem_per_node_mib=0))
        request = Request(shape=shape, time_limit_s=max(1, ceil(self._jobs[job].asked_s)))  # 0 would be no limit
        return PendingJob(
            id=JobId(job),
            display_id=str(job),
            partition="main",
            request=request,
            submitted_at_s=job,
            since_s=now_s,
            uid=self._jobs[job].user,
        )
