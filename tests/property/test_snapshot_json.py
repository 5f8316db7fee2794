"""A saved world is the same when it is read again, whatever is in it, and is planned alike."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_plan import NOW_S, POLICIES, worlds

from hpcsched.errors import ProtocolError
from hpcsched.model.accounting import Account, Accounting, Limits, PreemptMode, PreemptType, Qos
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Hold, JobState
from hpcsched.model.reservation import Flag, Reservation, reserved_intervals_of
from hpcsched.model.spec import Dependency, DependencyKind
from hpcsched.sched.experience import Experience
from hpcsched.sched.fairshare import UsedResources
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Policy, PreemptRules
from hpcsched.sched.snapshot import (
    ElasticSize,
    JobFact,
    Promise,
    PromisedPart,
    Snapshot,
    UsageLedger,
    snapshot_from_json,
    snapshot_to_json,
)

RESERVED = Reservation(
    name="r", start_s=2000, end_s=3000, nodes=(NodeName("n0"),), users=("ann",), flags=(Flag.DAILY,), made_at_s=1.5
)
LEDGER = UsageLedger(
    accounting=Accounting(
        accounts=(Account(name="lab", users=("ann",), limits=Limits(grp_tres=(("cpu", 3),))),), half_life_s=None
    ),
    fairshare=((("lab", "ann"), 0.25), (("", "bob"), 1.0)),
    used=(UsedResources(account="lab", user="ann", qos="", at_s=7.5, amounts=(("cpu", 60.0),)),),
)
RULES = PreemptRules(
    type=PreemptType.QOS, qos={"high": Qos(name="high", preempt=("low",), preempt_mode=PreemptMode.CANCEL)}
)


@st.composite
def full_worlds(draw: st.DrawFn) -> Snapshot:
    """A world in which everything that a snapshot can have may be there."""
    snapshot = draw(worlds())
    first, *rest = snapshot.pending
    more = {
        "dependency": (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(3,), delay_s=60, task=2),),
        "hold": Hold.USER,
        "user": "ann",
        "licenses": (("matlab", 2),),
        "since_s": 12.5,
        "others": tuple(replace(job, id=first.id) for job in rest[:1]),
        "reserved_shares": snapshot.running[0].shares if snapshot.running else (),
        "free_to_go": False,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(more))))
    first = replace(first, **{name: more[name] for name in chosen})
    running = snapshot.running
    if running and draw(st.booleans()):
        elastic = ElasticSize(view=first, nodes_min=1, nodes_max=4, wanted=(NodeName("n0"),))
        running = (replace(running[0], elastic=elastic), *running[1:])
    snapshot = replace(snapshot, pending=(first, *rest), running=running)
    if draw(st.booleans()):
        snapshot = replace(
            snapshot, reservations=(RESERVED,), reserved_intervals=reserved_intervals_of((RESERVED,), NOW_S)
        )
    if draw(st.booleans()):
        fact = JobFact(id=JobId(3), state=JobState.COMPLETED, array_task_id=2, ended_at_s=1.0)
        experience = Experience(longest_runs_s={0: 12.0, 1000: 7.25}, easy_wait_s=99.0, began_s=-5.5)
        snapshot = replace(snapshot, facts={3: (fact,)}, ledger=LEDGER, experience=experience)
    if draw(st.booleans()):
        promises = plan(snapshot, Policy(backfill=Backfill.CONSERVATIVE)).promises
        snapshot = replace(snapshot, promises=promises)
    return snapshot


@settings(max_examples=60, deadline=None)
@given(full_worlds(), POLICIES, st.booleans())
def test_a_saved_world_is_the_same_and_planned_alike(snapshot: Snapshot, policy: Policy, preempts: bool) -> None:
    policy = replace(policy, preempt=RULES) if preempts else policy
    text = json.dumps(snapshot_to_json(snapshot, policy), allow_nan=False)
    assert snapshot_from_json(json.loads(text)) == (snapshot, policy)
    assert plan(*snapshot_from_json(json.loads(text))) == plan(snapshot, policy)


def test_a_world_saved_when_there_were_fewer_fields_is_read() -> None:
    part = PromisedPart(node=NodeName("n0"), tasks=1, use=(1, 2, ()), slots=())
    some = ResourceRequest(shape=Shape())
    promise = Promise(job_id=JobId(7), partition="p", request=some, start_s=5.0, parts=(part,))
    snapshot = Snapshot(now_s=0.0, nodes=(), partitions={}, promises={JobId(7): promise})
    saved = snapshot_to_json(snapshot, Policy())
    assert saved["snapshot"]["promises"]["7"]["parts"][0].pop() == part.component == 0  # of before heterogeneous jobs
    assert snapshot_from_json(saved) == (snapshot, Policy())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "it has version '2', this hpcsched reads 1"),
        ({"kind": "other"}, "hctl snapshot has not written this file"),
        ({"snapshot": {"now_s": "now"}}, "cannot read Snapshot: it has no 'nodes'"),
        ({"policy": {"backfill": "magic"}}, "cannot read Policy: backfill: 'magic' is none of none, easy"),
    ],
)
def test_what_is_no_saved_world_is_refused_with_why(change: dict, why: str) -> None:
    good = snapshot_to_json(Snapshot(now_s=0.0, nodes=(), partitions={}), Policy())
    with pytest.raises(ProtocolError, match=why):
        snapshot_from_json(good | change)
