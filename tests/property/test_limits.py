"""Nothing that a plan starts breaks a limit, or takes a licence that is not there: counted again here, the simple way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sched.world import world

from hpcsched.model.accounting import Account, Accounting, Limits, Qos, Tres, UserRules
from hpcsched.model.job import Job
from hpcsched.model.node import Share
from hpcsched.sched.fairshare import UsedResources
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill
from hpcsched.sched.snapshot import UsageLedger

USERS = {"ann": ("a", "sub"), "bob": ("a",), "cat": ("b", "sub")}
PARENTS = {"sub": "a", "a": "", "b": ""}


def tres(*names: str) -> st.SearchStrategy[Tres]:
    """One or two resources: limits that all bind at once leave nothing to start."""
    return st.dictionaries(st.sampled_from(names), st.integers(0, 12), min_size=1, max_size=2).map(
        lambda found: tuple(found.items())
    )


FIELDS = {
    "max_jobs": st.integers(0, 3),
    "max_wall_s": st.integers(60, 900),
    "max_tres_per_job": tres("cpu", "node", "gres/gpu", "license/x"),
    "max_tres_per_user": tres("cpu", "node", "gres/gpu:t4"),
    "max_tres_mins_per_job": tres("cpu"),
    "grp_jobs": st.integers(0, 4),
    "grp_tres": tres("cpu", "node", "gres/gpu", "license/x", "billing"),
    "grp_tres_mins": st.integers(0, 120).map(lambda most: (("cpu", most),)),
}
ONE = st.one_of(st.builds(Limits, **{name: values}) for name, values in FIELDS.items())
LIMITS = st.just(Limits()) | ONE


@st.composite
def jobs(draw: st.DrawFn, *, running: bool) -> tuple[str, str, str, str, int]:
    words = f"{draw(st.integers(1, 3))}c {draw(st.integers(1, 10)) * 60}s"
    if running:
        words += f" n{draw(st.integers(1, 4))} {draw(st.integers(0, 1))}g"
    else:
        words += f" {draw(st.integers(1, 2))} nodes {draw(st.integers(0, 2))}g"
        words += draw(st.sampled_from(["", " exclusive"]))
    user = draw(st.sampled_from(sorted(USERS)))
    qos = draw(st.sampled_from(["", "high"]))
    return words.replace(" 0g", ""), user, draw(st.sampled_from(USERS[user])), qos, draw(st.integers(0, 2))


def amount(job: Job, shares: tuple[Share, ...], resource: str) -> float:
    match resource:
        case "cpu" | "billing":
            return sum(share.cpus for share in shares)
        case "node":
            return len(shares)
        case "license/x":
            return dict(job.spec.licenses).get("x", 0)
        case _:
            return sum(len(share.gpus) for share in shares)


@settings(max_examples=100)
@given(
    st.lists(jobs(running=True), max_size=4),
    st.lists(jobs(running=False), min_size=3, max_size=8),
    LIMITS,
    LIMITS,
    LIMITS,
    LIMITS,
    st.integers(0, 60),
    st.sampled_from(list(Backfill)),
)
def test_nothing_started_breaks_a_limit(
    runs: list, waits: list, of_a: Limits, of_qos: Limits, of_main: Limits, of_ann: Limits, used_min: int, how: Backfill
) -> None:
    every = [*runs, *waits]
    sketch = world(
        "4x12/9000/8xt4",
        running=[f"{at}: {job[0]}" for at, job in enumerate(runs, 1)],
        waiting=[f"{at}: {job[0]}" for at, job in enumerate(waits, len(runs) + 1)],
        backfill=how,
    )
    for at, (_, user, account, qos, licenses) in enumerate(every, 1):
        sketch.change(at, user=user, account=account, qos=qos, licenses=(("x", licenses),) if licenses else ())
    sketch.partitions = [replace(sketch.partitions[0], limits=of_main)]
    accounting = Accounting(
        accounts=(
            Account(name="a", users=("ann", "bob"), limits=of_a),
            Account(name="sub", parent="a", users=("ann", "cat")),
            Account(name="b", users=("cat",)),
        ),
        users=(UserRules(name="ann", limits=of_ann),),
        qos=(Qos(name="high", limits=of_qos),),
        licenses=(("x", 3),),
    )
    used = UsedResources(account="sub", user="cat", qos="high", at_s=0.0, amounts=(("cpu", used_min * 60.0),))
    snapshot = replace(sketch.snapshot(), ledger=UsageLedger(accounting=accounting, used=(used,)))
    found = plan(snapshot, sketch.policy)
    assert plan(snapshot, sketch.policy) == found
    assert {start.job_id for start in found.starts} | set(found.waits) == set(range(len(runs) + 1, len(every) + 1))

    started = {start.job_id: start.shares for start in found.starts}
    alive = [(job, job.shares or started[job.id]) for job in sketch.jobs if job.shares or job.id in started]
    held = sum(amount(job, shares, "license/x") for job, shares in alive)
    assert held <= max(3, sum(amount(job, shares, "license/x") for job, shares in alive if job.shares))

    def in_a(job: Job) -> bool:
        return job.spec.account in ("a", "sub")

    check(alive, started, of_qos, lambda job: job.spec.qos == "high", used_min)
    check(alive, started, of_main, lambda job: True, 0)
    check(alive, started, groups_of(of_a), in_a, used_min)
    check(alive, started, own_of(of_a), lambda job: in_a(job) and job.user != "ann", 0)
    check(alive, started, of_ann, lambda job: job.user == "ann", 0)


def groups_of(limits: Limits) -> Limits:
    return Limits(grp_jobs=limits.grp_jobs, grp_tres=limits.grp_tres, grp_tres_mins=limits.grp_tres_mins)


def own_of(limits: Limits) -> Limits:
    return replace(limits, grp_jobs=None, grp_tres=(), grp_tres_mins=())


def check(
    alive: list[tuple[Job, tuple[Share, ...]]],
    started: dict,
    limits: Limits,
    mine: Callable[[Job], bool],
    used_min: float,
) -> None:
    """Check that each job that started is within `limits`, counting those that are alive and `mine`."""
    those = [(job, shares) for job, shares in alive if mine(job)]
    for job, shares in those:
        if job.id not in started:
            continue
        limit_s = job.spec.time_limit_s
        assert limit_s is not None
        his = [pair for pair in those if pair[0].user == job.user]
        assert limits.max_jobs is None or len(his) <= limits.max_jobs
        assert limits.grp_jobs is None or len(those) <= limits.grp_jobs
        assert limits.max_wall_s is None or limit_s <= limits.max_wall_s
        for resource, most in limits.max_tres_per_job:
            assert amount(job, shares, resource) <= most
        for resource, most in limits.max_tres_mins_per_job:
            assert amount(job, shares, resource) * limit_s / 60 <= most
        for resource, most in limits.max_tres_per_user:
            if amount(job, shares, resource):
                assert sum(amount(other, its, resource) for other, its in his) <= most
        for resource, most in limits.grp_tres:
            if amount(job, shares, resource):
                assert sum(amount(other, its, resource) for other, its in those) <= most
        for resource, most in limits.grp_tres_mins:
            total = sum(amount(other, its, resource) * (other.spec.time_limit_s or 0) / 60 for other, its in those)
            assert total + used_min <= most
