"""Small traces for tests, hand-made or drawn, and the planner's general way, to hold the quick one against."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Partition
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.request import Request, Shape
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from hpcsched.sim.swf import TraceJob

PROCS = 10

# Ten processors. Job 1 has six until 100 (it ends at 60), job 2 needs eight and is the head, promised 100 with two extra.
# 3 is short and would end by 100; 4 is long and takes the two extra; 5 fits but is neither short nor small enough.
SMALL = """\
; MaxProcs: 10
1 0 -1 60 6 -1 -1 6 100 -1 1 1 -1 -1 -1 -1 -1 -1
2 1 -1 50 8 -1 -1 8 50 -1 1 2 -1 -1 -1 -1 -1 -1
3 2 -1 20 2 -1 -1 2 90 -1 1 1 -1 -1 -1 -1 -1 -1
4 3 -1 300 2 -1 -1 2 300 -1 1 2 -1 -1 -1 -1 -1 -1
5 4 -1 10 3 -1 -1 3 200 -1 1 1 -1 -1 -1 -1 -1 -1
"""


def job(number: int, submit_s: float, run_s: float, procs: int, asked_s: float = 0, user: int = 1) -> TraceJob:
    return TraceJob(number, submit_s, run_s, procs, max(asked_s, run_s), user)


@st.composite
def traces(draw: st.DrawFn, most: int = 25) -> list[TraceJob]:
    """Draw jobs of a pool of PROCS processors, many at the same second and with equal requests."""
    at_s = 0
    jobs = []
    for number in range(draw(st.integers(1, most))):
        at_s += draw(st.sampled_from([0, 0, 1, 3, 10]))
        asked_s = draw(st.sampled_from([1, 5, 10, 20, 60]))
        run_s = draw(st.integers(0, asked_s))
        jobs.append(job(number, at_s, run_s, draw(st.integers(1, PROCS)), asked_s, draw(st.integers(-1, 2))))
    return jobs


class PlanLine:
    """The planner by its front door: a snapshot is made at each event and given to `plan`."""

    def __init__(self, jobs: Sequence[TraceJob], kind: Backfill) -> None:
        self.jobs = jobs
        self.policy = Policy(backfill=kind, weight_age=0, backfill_depth=0, estimate_depth=0)
        self.machine = NodeView(name=NodeName("m"), cpus=PROCS, mem_mib=0)
        self.waiting: dict[int, PendingJob] = {}
        self.running: dict[int, RunningJob] = {}

    def submit(self, at: int, now_s: float) -> list[int]:
        self.waiting[at] = self._pending(at)
        held = sum(job.shares[0].cpus for job in self._held(now_s))
        return self._plan(now_s) if self.jobs[at].procs <= PROCS - held else []

    def end(self, at: int, now_s: float) -> list[int]:
        del self.running[at]
        return self._plan(now_s)

    def _held(self, now_s: float) -> list[RunningJob]:
        return [job for job in self.running.values() if (job.ends_at_s or 0) > now_s]

    def _plan(self, now_s: float) -> list[int]:
        snapshot = Snapshot(
            now_s=now_s,
            nodes=(self.machine,),
            partitions={"main": Partition(name="main", nodes=(self.machine.name,), default=True)},
            running=tuple(self._held(now_s)),
            pending=tuple(self.waiting.values()),
        )
        started = []
        for start in plan(snapshot, self.policy).starts:
            view = self.waiting.pop(start.job_id)
            ends_at_s = now_s + (view.request.time_limit_s or 0)
            self.running[start.job_id] = RunningJob(
                id=view.id, display_id="", shares=start.shares, began_at_s=now_s, ends_at_s=ends_at_s
            )
            started.append(int(start.job_id))
        return started

    def _pending(self, at: int) -> PendingJob:
        shape = Shape(cpus_per_task=self.jobs[at].procs, mem_per_node_mib=0)
        request = Request(shape=shape, time_limit_s=int(self.jobs[at].asked_s))
        return PendingJob(id=JobId(at), display_id=str(at), partition="main", request=request, submitted_at_s=at)
