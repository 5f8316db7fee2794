"""What holds of every plan, whatever the world: found by Hypothesis in small worlds of a few nodes and jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Gpu, Partition, Share
from hpcsched.sched.decisions import Plan
from hpcsched.sched.place.features import matches, parse_constraint
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot

NOW_S = 1000.0
POLICY = Policy(weight_age=0)
SMALL = Shape(mem_per_node_mib=10, mem_asked=True)
X0, X1 = Gpu(index=0, type="x"), Gpu(index=1, type="x")
CUT0, CUT1 = Gpu(index=0, type="x", shards=3), Gpu(index=1, type="x", shards=3)
POLICIES = st.builds(
    lambda kind, promises: replace(POLICY, backfill=kind, promises=promises),
    st.sampled_from(Backfill),
    st.integers(1, 3),
)
CONSTRAINTS = (
    "",
    "",
    "",
    "",
    "",
    "a",
    "b",
    "a&b",
    "a|b",
    "[a|b]",
    "[b|c]&a",
    "[a*1&b*1]",
    "[a*2&c*1]",
    "b*1",
    "[(a&b)*1&a*1]",
)


@st.composite
def shapes(draw: st.DrawFn, *, many_nodes: bool = True) -> Shape:
    low = draw(st.sampled_from([1, 1, 1, 2, 3])) if many_nodes else 1
    ntasks = draw(st.none() | st.integers(low, 6))
    per_node = draw(st.sampled_from([1, 1, 2])) if ntasks is None else 1
    text = draw(st.sampled_from(CONSTRAINTS if many_nodes else CONSTRAINTS[:9]))
    constraint = parse_constraint(text)
    low = max(low, sum(count for _, count in constraint.counts))
    if ntasks is not None:
        ntasks = max(ntasks, low)
    memory = draw(st.sampled_from(["default", "default", "node", "node", "cpu", "all"]))
    gpus = draw(st.sampled_from([(), (), (), (("x", 1),), (("", 1),), (("", 2),)]))
    where = draw(st.sampled_from(["node", "task", "total", "shard"]))
    return Shape(
        nodes_min=low,
        nodes_max=low + draw(st.integers(0, 2)) if many_nodes else 1,
        ntasks=ntasks,
        tasks_min=per_node,
        tasks_max=per_node if ntasks is None else 0,
        cpus_per_task=draw(st.sampled_from([1, 1, 2, 3])),
        mem_all=memory == "all",
        mem_per_node_mib=draw(st.integers(1, 500)) if memory == "node" else None,
        mem_per_cpu_mib=draw(st.integers(1, 150)) if memory == "cpu" else None,
        mem_asked=memory != "default",
        gpus_per_node=gpus if where == "node" else (),
        gpus_per_task=gpus if where == "task" else (),
        gpus_total=gpus if where == "total" and ntasks is None else (),
        shards=gpus if where == "shard" else (),
        exclusive=draw(st.sampled_from([False] * 7 + [True])),
        features=constraint.every,
        alike=constraint.alike,
        counts=constraint.counts,
        constraint=text,
        prefer=draw(st.sampled_from([(), (), ("b",)])),
        switches=draw(st.sampled_from([0, 0, 0, 1, 2])) if many_nodes else 0,
        synchronous=draw(st.sampled_from([False, False, True])),
        comm_bound=draw(st.sampled_from([False, False, True])),
        mincpus=draw(st.sampled_from([0, 0, 0, 4])),
        nodelist=draw(st.sampled_from([(), (), (), (), (), (NodeName("n0"),), (NodeName("n1"),)])),
        exclude=draw(st.sampled_from([(), (), (), (NodeName("n0"),)])),
    )


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    """A few nodes in one or two partitions; jobs that run were started by the planner itself, then more wait."""
    nodes = tuple(draw(_node(at)) for at in range(draw(st.integers(2, 4))))
    names = tuple(node.name for node in nodes)
    partitions = {"a": Partition(name="a", nodes=names, default=True)}
    if draw(st.booleans()):
        partitions["b"] = Partition(name="b", nodes=names[: draw(st.integers(1, len(names)))], priority_tier=2)
    first = [
        _job(at, draw(shapes()), draw(st.sampled_from(sorted(partitions))), _limit(draw))
        for at in range(1, draw(st.integers(1, 5)))
    ]
    empty = Snapshot(now_s=0.0, nodes=nodes, partitions=partitions, pending=tuple(first))
    running = tuple(_run(empty, plan(empty, POLICY)))
    pool = st.sampled_from(
        [SMALL, *[draw(shapes()) for _ in range(draw(st.integers(0, 3)))]]
    )  # jobs of one shape share it
    waiting = [
        _job(
            at, draw(pool), draw(st.sampled_from(sorted(partitions))), _limit(draw), draw(st.sampled_from([0, 0, 1, 2]))
        )
        for at in range(10, 10 + draw(st.integers(3, 8)))
    ]
    least_s = draw(st.sampled_from([0, 0, 60, 600]))  # --time-min of every second job
    waiting = [replace(job, lowers=True, time_min_s=least_s) if least_s and job.id % 2 else job for job in waiting]
    return Snapshot(now_s=NOW_S, nodes=nodes, partitions=partitions, running=running, pending=tuple(waiting))


def _node(at: int) -> st.SearchStrategy[NodeView]:
    return st.builds(
        NodeView,
        name=st.just(NodeName(f"n{at}")),
        cpus=st.integers(2, 6),
        mem_mib=st.sampled_from([400, 1000]),
        gpus=st.sampled_from(
            [(), (X0, X1), (X0, X1, Gpu(index=2, type="y")), (Gpu(index=3, type="y"), X0), (CUT0, CUT1)]
        ),
        features=st.sampled_from([frozenset("ab"), frozenset("ab"), frozenset("a"), frozenset(), frozenset("c")]),
        weight=st.integers(1, 2),
        switch=st.sampled_from(["", "", "s1", "s2"]),
        speed=st.sampled_from([0.0, 1.0, 1.0, 1.05, 2.0]),
        link_mbps=st.sampled_from([0, 100, 1000]),
        why_not=st.sampled_from([""] * 7 + ["is down"]),
    )


def _limit(draw: st.DrawFn) -> int | None:
    return draw(st.none() | st.integers(1, 3000))


def _job(at: int, shape: Shape, partition: str, limit_s: int | None, array: int = 0) -> PendingJob:
    return PendingJob(
        id=JobId(at),
        display_id=str(at),
        partition=partition,
        request=ResourceRequest(shape=shape, time_limit_s=limit_s),
        submitted_at_s=float(at),
        array_job_id=JobId(1000 + array) if array else None,
        array_limit=array,
    )


def _run(snapshot: Snapshot, made: Plan, end: str = "limit") -> list[RunningJob]:
    jobs = {job.id: job for job in snapshot.pending}
    running = []
    for start in made.starts:
        limit_s = start.time_limit_s or jobs[start.job_id].request.time_limit_s
        running.append(
            RunningJob(
                id=start.job_id,
                display_id=str(start.job_id),
                shares=start.shares,
                began_at_s=snapshot.now_s,
                ends_at_s=None if limit_s is None else snapshot.now_s + limit_s,
                array_job_id=jobs[start.job_id].array_job_id,
            )
        )
    return running


def _shares(snapshot: Snapshot, made: Plan) -> list[Share]:
    return [share for job in (*snapshot.running, *made.starts) for share in job.shares]


def check_nothing_is_given_twice(nodes: Iterable[NodeView], shares: list[Share]) -> None:
    """Check that what is held of each node is what it has at most."""
    for node in nodes:
        held = [share for share in shares if share.node == node.name]
        assert sum(share.cpus for share in held) <= node.cpus
        assert sum(share.mem_mib for share in held) <= node.mem_mib
        gpus: Counter[int] = Counter()
        for share in held:
            gpus.update(dict.fromkeys(share.gpus, share.gpu_amount / len(share.gpus) if share.gpus else 0))
        assert all(amount < 1.000001 for amount in gpus.values())
        assert set(gpus) <= {gpu.index for gpu in node.gpus}


@given(worlds(), POLICIES)
@settings(max_examples=160, deadline=None)
def test_a_plan_gives_nothing_twice_and_each_job_what_it_asked(snapshot: Snapshot, policy: Policy) -> None:
    """All that holds of one plan, checked of the same plan: to draw a world and to plan it are what takes time."""
    made = plan(snapshot, policy)
    check_nothing_is_given_twice(snapshot.nodes, _shares(snapshot, made))
    check_jobs_get_exactly_what_they_asked_where_they_may(snapshot, made)
    check_a_plan_is_deterministic_and_whole(snapshot, policy, made)
    check_no_array_runs_more_tasks_than_its_limit(snapshot, made)


def check_jobs_get_exactly_what_they_asked_where_they_may(snapshot: Snapshot, made: Plan) -> None:
    jobs = {job.id: job for job in snapshot.pending}
    nodes = {node.name: node for node in snapshot.nodes}
    for start in made.starts:
        job = jobs[start.job_id]
        shape, names = job.request.shape, [share.node for share in start.shares]
        assert len(set(names)) == len(names)
        assert max(shape.nodes_min, len(shape.nodelist)) <= len(names) <= shape.nodes_max
        assert set(shape.nodelist) <= set(names) <= set(snapshot.partitions[job.partition].nodes)
        assert not set(shape.exclude) & set(names)
        assert all(nodes[name].usable and matches(shape.features, nodes[name].features) for name in names)
        assert all(nodes[name].cpus >= shape.mincpus for name in names)
        its = [nodes[name].features for name in names]
        assert not shape.alike or any(all(matches(kind, one) for one in its) for kind in shape.alike)
        wanted = [kind for kind, count in shape.counts for _ in range(count)]
        assert any(all(map(matches, wanted, some)) for some in permutations(its, len(wanted)))
        assert len({nodes[name].switch for name in names}) <= (shape.switches or len(names))
        tasks = [share.tasks for share in start.shares]
        assert sum(tasks) == shape.ntasks if shape.ntasks is not None else set(tasks) == {shape.tasks_min}
        assert min(tasks) >= 1
        for share in start.shares:
            cpus = nodes[share.node].cpus if shape.exclusive else share.tasks * shape.cpus_per_task
            assert share.cpus == cpus
            assert share.cpus >= share.tasks * shape.cpus_per_task
            if shape.shards and not shape.exclusive:
                asked = shape.shards[0][1]
                cut = nodes[share.node].gpus[0].shards
                assert (len(share.gpus), share.gpu_amount) == (1, asked / cut)
            elif not shape.exclusive and not shape.gpus_total:
                per_task = sum(count for _, count in shape.gpus_per_task) * share.tasks
                assert len(share.gpus) == sum(count for _, count in shape.gpus_per_node) + per_task
        if shape.gpus_total and not shape.exclusive:
            assert sum(len(share.gpus) for share in start.shares) == shape.gpus_total[0][1]


def check_a_plan_is_deterministic_and_whole(snapshot: Snapshot, policy: Policy, made: Plan) -> None:
    assert plan(snapshot, policy) == made
    shuffled = replace(snapshot, pending=snapshot.pending[::-1], running=snapshot.running[::-1])
    again = plan(shuffled, policy)
    assert again.starts == made.starts
    assert again.waits == made.waits
    assert sorted([start.job_id for start in made.starts] + list(made.waits)) == [job.id for job in snapshot.pending]


def check_no_array_runs_more_tasks_than_its_limit(snapshot: Snapshot, made: Plan) -> None:
    jobs = {job.id: job for job in snapshot.pending}
    counts = Counter(jobs[start.job_id].array_job_id for start in made.starts)
    assert all(count <= array_id - 1000 for array_id, count in counts.items() if array_id is not None)


def _first_start_s(snapshot: Snapshot, job_id: JobId) -> float | None:
    """Return when the job would start if only what runs stood in its way: now, when it is expected to, or never (None)."""
    alone = replace(snapshot, pending=tuple(job for job in snapshot.pending if job.id == job_id))
    made = plan(alone, replace(POLICY, default_time_limit_s=10_000))
    if made.starts:
        return snapshot.now_s
    wait = made.waits[job_id]
    return wait.expected_start_s if wait.expected_start_s is not None else float("inf")


@given(worlds())
@settings(max_examples=120, deadline=None)
def test_backfill_never_delays_the_first_job_that_waits(snapshot: Snapshot) -> None:
    """Let everything run to its limit: the head starts no later with the backfilled jobs than without them."""
    snapshot = _with_limits(snapshot)
    made = plan(snapshot, POLICY)
    order = sorted(snapshot.pending, key=lambda job: (-snapshot.partitions[job.partition].priority_tier, job.id))
    head = next((job for job in order if job.id in made.waits and made.waits[job.id].reason == "Resources"), None)
    if head is None:
        return
    ahead = {job.id for job in order[: order.index(head)]}
    before = [start for start in made.starts if start.job_id in ahead]
    with_those_ahead = _after(snapshot, Plan(starts=tuple(before), waits={}))
    with_all = _after(snapshot, made)
    promised_s = _first_start_s(with_those_ahead, head.id)
    expected_s = made.waits[head.id].expected_start_s
    assert (expected_s if expected_s is not None else float("inf")) == promised_s  # on too few switches: not yet known
    assert _first_start_s(with_all, head.id) <= promised_s


@given(worlds())
@settings(max_examples=120, deadline=None)
def test_without_backfill_no_job_overtakes_another_of_its_partition(snapshot: Snapshot) -> None:
    made = plan(snapshot, replace(POLICY, backfill=Backfill.NONE))
    starts = {start.job_id for start in made.starts}
    for partition in snapshot.partitions:
        line = [job for job in snapshot.pending if job.partition == partition]
        blocked = False
        for job in line:
            if job.id in starts:
                assert not blocked
            else:
                blocked = blocked or made.waits[job.id].reason in ("Resources", "Priority")


@given(worlds(), st.data())
@settings(max_examples=120, deadline=None)
def test_more_resources_never_make_the_head_start_later(snapshot: Snapshot, data: st.DataObject) -> None:
    head = snapshot.pending[0]
    before_s = _first_start_s(snapshot, head.id)
    richer = data.draw(st.sampled_from(["node", "cpus", "memory", "gpu"]))
    if richer == "node":
        more = replace(snapshot.nodes[0], name=NodeName("extra"), why_not="")
        parts = {name: replace(part, nodes=(*part.nodes, more.name)) for name, part in snapshot.partitions.items()}
        grown = replace(snapshot, nodes=(*snapshot.nodes, more), partitions=parts)
    else:
        at = data.draw(st.integers(0, len(snapshot.nodes) - 1))
        node = snapshot.nodes[at]
        if richer == "cpus":
            node = replace(node, cpus=node.cpus + 1)
        elif richer == "memory":
            node = replace(node, mem_mib=node.mem_mib + 100)
        else:
            node = replace(node, gpus=(*node.gpus, Gpu(index=9, type="x", shards=data.draw(st.sampled_from([1, 3])))))
        grown = replace(snapshot, nodes=(*snapshot.nodes[:at], node, *snapshot.nodes[at + 1 :]))
    assert _first_start_s(grown, head.id) <= before_s


def _with_limits(snapshot: Snapshot) -> Snapshot:
    """Give every job a limit: about others nothing can be promised."""
    running = tuple(
        replace(job, ends_at_s=job.ends_at_s if job.ends_at_s is not None else 2500.0) for job in snapshot.running
    )
    pending = tuple(
        replace(job, request=replace(job.request, time_limit_s=job.request.time_limit_s or 700), array_limit=0)
        for job in snapshot.pending
    )
    return replace(snapshot, running=running, pending=pending)


def _after(snapshot: Snapshot, made: Plan) -> Snapshot:
    started = {start.job_id for start in made.starts}
    return replace(
        snapshot,
        running=(*snapshot.running, *_run(snapshot, made)),
        pending=tuple(job for job in snapshot.pending if job.id not in started),
    )
