"""Conservative backfill, plan after plan: what was promised is kept, whatever ends early and whoever comes later."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_plan import CUT0, CUT1, X0, X1, check_nothing_is_given_twice

from hpcsched.model.accounting import Accounting
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Gpu, Partition
from hpcsched.sched.decisions import Plan
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import as_running, plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot, UsageLedger

POLICY = Policy(weight_age=0, backfill=Backfill.CONSERVATIVE, conservative_depth=8, estimate_depth=2)
MOST_EVENTS = 60
NODES = tuple(
    NodeView(name=NodeName(f"n{at}"), cpus=cpus, mem_mib=1000, gpus=gpus)
    for at, (cpus, gpus) in enumerate([(4, (X0, X1)), (4, (CUT0, CUT1)), (6, (X0, Gpu(index=1, type="y"))), (4, ())])
)
NAMES = tuple(node.name for node in NODES)
LEDGER = UsageLedger(accounting=Accounting(licenses=(("tool", 3),)))
SHAPES = st.sampled_from(
    [
        Shape(nodes_min=low, nodes_max=high, mem_asked=True, mem_per_node_mib=mem_mib, **rest)
        for low, high in ((1, 1), (2, 2), (3, 3), (4, 4), (1, 3))
        for mem_mib in (100, 600)
        for rest in (
            {"cpus_per_task": 1},
            {"cpus_per_task": 3},
            {"cpus_per_task": 4},
            {"gpus_per_node": (("x", 1),)},
            {"gpus_per_node": (("", 2),)},
            {"shards": (("", 2),)},
            {"gpus_total": (("", 3),)} if low < 3 else {"exclusive": True},
            {"ntasks": low + 2, "cpus_per_task": 2},
            {"exclude": (NAMES[0],)} if low < 4 else {},
        )
    ]
)
Timed = tuple[float, PendingJob]


@st.composite
def _jobs(draw: st.DrawFn, at: int) -> Timed:
    """Return when a job comes, and the job: in one partition or two, now and then with a licence, or before those in line."""
    request = ResourceRequest(shape=draw(SHAPES), time_limit_s=10 * draw(st.integers(1, 20)))
    licenses = draw(st.sampled_from([(), (), (), (("tool", 2),)]))
    job = PendingJob(
        id=JobId(at),
        display_id=str(at),
        partition="a",
        request=request,
        submitted_at_s=float(at),
        nice=draw(st.sampled_from([0, 0, -50])),
        licenses=licenses,
    )
    if least_s := draw(st.sampled_from([0, 0, 0, 10, 60])):
        job = replace(job, lowers=True, time_min_s=least_s)
    where = draw(st.sampled_from(["a", "a", "b", "ab", "ba"]))
    views = tuple(replace(job, partition=name) for name in where)
    return draw(st.sampled_from([0, 0, 5, 35, 77, 160])), replace(views[0], others=views[1:])


@st.composite
def stories(draw: st.DrawFn) -> tuple[Snapshot, dict[JobId, float], list[Timed]]:
    """Return an empty cluster, what part of its limit each job runs, and who comes, and when."""
    count = draw(st.integers(2, len(NODES)))
    partitions = {
        "a": Partition(name="a", nodes=NAMES[:count], default=True),
        "b": Partition(name="b", nodes=NAMES[draw(st.integers(0, 1)) : count]),
    }
    come = sorted([draw(_jobs(at)) for at in range(1, draw(st.integers(4, 14)))], key=lambda one: one[0])
    come = [(at_s, _numbered(job, at)) for at, (at_s, job) in enumerate(come, 1)]
    parts = {job.id: draw(st.sampled_from([1.0, 1.0, 0.5, 0.1])) for _, job in come}
    world = Snapshot(now_s=0.0, nodes=NODES[:count], partitions=partitions, ledger=LEDGER)
    return world, parts, come


def _numbered(job: PendingJob, at: int) -> PendingJob:
    others = tuple(_numbered(other, at) for other in job.others)
    return replace(job, id=JobId(at), display_id=str(at), submitted_at_s=float(at), others=others)


class Story:
    """A world that goes on from event to event: jobs end or come, promises fall due."""

    def __init__(self, world: Snapshot, parts: dict[JobId, float], come: list[Timed], policy: Policy) -> None:
        self.world = world
        self.come = come
        self.policy = policy
        self.parts = parts
        self.made = Plan(starts=(), waits={})

    def go_on(self) -> bool:
        """Go to the next event; say whether there is one."""
        times_s = [at_s for at_s, _ in self.come] + [self._end_s(job) for job in self.world.running]
        times_s += [promise.start_s for promise in self.made.promises.values()]
        if not times_s:
            return False
        now_s = max(self.world.now_s, min(times_s))
        new = [job for at_s, job in self.come if at_s <= now_s]
        self.come = [(at_s, job) for at_s, job in self.come if at_s > now_s]
        running = tuple(job for job in self.world.running if self._end_s(job) > now_s)
        pending = (*self.world.pending, *new)
        self.world = replace(self.world, now_s=now_s, running=running, pending=pending, promises=self.made.promises)
        return True

    def plan(self) -> Plan:
        self.made = plan(self.world, self.policy)
        starts = {start.job_id: start for start in self.made.starts}
        assert len(starts) == len(self.made.starts)
        views = {job.id: job for job in self.world.pending}
        now_s = self.world.now_s
        started = [
            as_running(views[start.job_id], start.shares, now_s, time_limit_s=start.time_limit_s)
            for start in self.made.starts
        ]
        pending = tuple(job for job in self.world.pending if job.id not in starts)
        self.world = replace(self.world, running=(*self.world.running, *started), pending=pending)
        return self.made

    def _end_s(self, job: RunningJob) -> float:
        assert job.ends_at_s is not None
        return job.began_at_s + (job.ends_at_s - job.began_at_s) * self.parts[job.id]


@given(stories())
@settings(max_examples=150, deadline=None)
def test_no_promised_start_slips_while_jobs_keep_to_their_limits(
    story: tuple[Snapshot, dict[JobId, float], list[Timed]],
) -> None:
    told = Story(*story, POLICY)
    promised_s: dict[JobId, float] = {}
    for _ in range(MOST_EVENTS):
        if not told.go_on():
            break
        made = told.plan()
        now_s = told.world.now_s
        for start in made.starts:
            assert now_s <= promised_s.pop(start.job_id, now_s)
        for job_id, latest_s in promised_s.items():
            expected_s = made.waits[job_id].expected_start_s
            assert made.promises[job_id].start_s <= latest_s
            assert expected_s is not None
            assert now_s < expected_s <= latest_s
        promised_s |= {job_id: promise.start_s for job_id, promise in made.promises.items()}
        check_nothing_is_given_twice(told.world.nodes, [share for job in told.world.running for share in job.shares])
