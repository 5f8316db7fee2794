"""A plan never takes more power than a circuit has, now and at any time for which it has reserved something."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_plan import POLICIES, worlds

from hpcsched.model.node import Circuit
from hpcsched.sched.energy import watts_above_idle
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.plan import steps_of
from hpcsched.sched.policy import Policy
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import NodeView, Snapshot

Use = tuple[float, float, dict[str, float]]  # from, until, watts by node


@st.composite
def powered(draw: st.DrawFn) -> Snapshot:
    """A world with declared power and one or two circuits; some budgets are below what runs."""
    snapshot = draw(worlds())
    nodes = tuple(
        replace(node, idle_watts=50.0, peak_watts=draw(st.sampled_from([50.0, 170.0, 290.5])),
                gpu_watts=draw(st.sampled_from([0.0, 250.0])))
        for node in snapshot.nodes
    )  # fmt: skip
    idle = 50.0 * len(nodes)
    circuits = [Circuit(budget_watts=idle + draw(st.sampled_from([100.0, 400.5, 2000.0])))]
    if draw(st.booleans()):
        circuits.append(Circuit(name="c", budget_watts=50.0 + draw(st.integers(30, 600)), nodes=(nodes[0].name,)))
    pending = tuple(replace(job, gpu_power=draw(st.sampled_from([0, 0, 100]))) for job in snapshot.pending)
    return replace(snapshot, nodes=nodes, circuits=tuple(circuits), pending=pending)


def watts_on(nodes: dict[str, NodeView], name: str, cpus: int, gpus: float, gpu_power: int) -> float:
    return watts_above_idle(nodes[name], cpus, gpus, gpu_power) if name in nodes else 0.0


def uses_of(snapshot: Snapshot, current: SchedulingPass) -> tuple[list[Use], list[Use]]:
    """Return what running jobs take, and what the pass has given."""
    nodes = {str(node.name): node for node in snapshot.nodes}
    timeline: Timeline = current.placement.timeline
    before = [
        (snapshot.now_s, timeline.end_of(job), {str(s.node): watts_on(nodes, s.node, s.cpus, s.gpu_amount, job.gpu_power)
                                                for s in job.shares})
        for job in snapshot.running
    ]  # fmt: skip
    jobs = {job.id: job for job in snapshot.pending}
    given_: list[Use] = []
    for start in current.starts:
        job = jobs[start.job_id]
        end_s = current.run_times.end_s(job, snapshot.now_s, start.time_limit_s)
        watts = {str(s.node): watts_on(nodes, s.node, s.cpus, s.gpu_amount, job.gpu_power) for s in start.shares}
        given_.append((snapshot.now_s, end_s, watts))
    for job in jobs.values():
        if (slot := current.placement.slots.of(job)) is not None:
            watts = {}
            for part in slot.parts:
                name = str(snapshot.nodes[part.node].name)
                slots = snapshot.nodes[part.node].slots
                gpus = sum(count / one.shards for one, count in zip(slots, part.use[2], strict=True))
                watts[name] = watts.get(name, 0.0) + watts_on(nodes, name, part.use[0], gpus, job.gpu_power)
            given_.append((slot.start_s, slot.end_s, watts))
    return before, given_


@given(powered(), POLICIES)
@settings(max_examples=150, deadline=None)
def test_no_plan_exceeds_a_power_budget_at_any_instant(snapshot: Snapshot, policy: Policy) -> None:
    current = SchedulingPass(snapshot, policy)
    for _ in steps_of(current):
        pass
    before, given_ = uses_of(snapshot, current)
    for circuit in snapshot.circuits:
        names = {str(node.name) for node in snapshot.nodes if not circuit.nodes or node.name in circuit.nodes}
        total = circuit.budget_watts - sum(node.idle_watts for node in snapshot.nodes if node.name in names)

        def taken(uses: list[Use], at_s: float, names: set[str] = names) -> float:
            return sum(
                watts
                for from_s, until_s, by in uses
                if from_s <= at_s < until_s
                for name, watts in by.items()
                if name in names
            )

        for at_s in sorted({from_s for from_s, _, _ in given_}):
            if taken(given_, at_s) > 0:  # nothing is given to anybody while running jobs alone exceed the budget
                assert taken(before, at_s) + taken(given_, at_s) <= total + 1e-6
