"""Usage decays exactly, is charged for what was held, and is the same however its time is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import T0, job, share, spec

from hpcsched.model.accounting import Accounting, Qos
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Partition
from hpcsched.sched.fairshare import (
    ServiceCredit,
    UsedResources,
    accrued,
    at,
    by_association,
    charge_of,
    decay,
    integral,
    plus,
    running_use,
    weights_of,
)

DAY_S = 86400.0
WEEK = Accounting(half_life_s=7 * DAY_S)
FOR_EVER = Accounting(half_life_s=None, qos=(Qos(name="half", usage_factor=0.5), Qos(name="free", usage_factor=0.0)))
CPU = {"cpu": 1.0}


def billed(amounts: tuple[tuple[str, float], ...]) -> float:
    return dict(amounts)["billing"]


def running(**fields: object) -> Job:
    values = {
        "state": JobState.RUNNING,
        "shares": (share("n1", cpus=4, mem_mib=2048, gpus=(0, 1)),),
        "held_nodes": ("n1",),
    }
    return job(**values | {"allocated_at_s": T0} | fields)


def test_usage_halves_in_one_half_life() -> None:
    used = UsedResources(account="p", user="ann", qos="", at_s=T0, amounts=(("billing", 1000.0), ("cpu", 8.0)))
    later = at(used, T0 + 7 * DAY_S, 7 * DAY_S)
    assert dict(later.amounts) == pytest.approx({"billing": 500.0, "cpu": 4.0}, rel=1e-9)
    assert (later.key, later.at_s) == (used.key, T0 + 7 * DAY_S)
    assert at(used, T0 - 5, 7 * DAY_S) is used
    assert at(used, T0 + 1e9, None).amounts == used.amounts


def test_a_job_of_one_half_life_counts_what_many_short_ones_in_a_row_count() -> None:
    half_life_s = 7 * DAY_S
    whole = integral(half_life_s, half_life_s)
    steps = 1000
    pieces = sum(
        integral(half_life_s / steps, half_life_s) * decay(half_life_s * k / steps, half_life_s) for k in range(steps)
    )
    assert pieces == pytest.approx(whole, rel=1e-9)
    assert integral(60.0, half_life_s) == pytest.approx(60.0, rel=1e-4)
    assert integral(60.0, None) == 60.0


def test_what_runs_is_charged_as_it_runs_and_its_end_adds_nothing_to_that() -> None:
    before = running()
    now_s = T0 + 3 * DAY_S
    just_before = running_use(before, now_s, WEEK, CPU, {})
    ended = replace(
        before, charged_cpu_s=4 * 3 * DAY_S, charged_mem_mib_s=2048 * 3 * DAY_S, charged_gpu_s=2 * 3 * DAY_S
    )
    assert dict(charge_of(before, ended, now_s, WEEK, CPU, {})) == pytest.approx(dict(just_before))
    assert charge_of(ended, ended, now_s, WEEK, CPU, {}) == ()


def test_billing_goes_by_the_partition_s_weights_and_the_type_of_gpu() -> None:
    weights = weights_of(
        FOR_EVER, Partition(name="g", nodes=(), billing=(("cpu", 1.0), ("mem", 0.5), ("gres/gpu", 2.0)))
    )
    assert billed(running_use(running(), T0 + 10, FOR_EVER, weights, {})) == pytest.approx(10 * (4 + 2 * 0.5 + 2 * 2))
    typed = weights | {"gres/gpu:a100": 10.0}
    kinds = {"n1": {0: "A100", 1: "t4"}}
    assert billed(running_use(running(), T0 + 10, FOR_EVER, typed, kinds)) == pytest.approx(10 * (4 + 1 + 10 + 2))
    assert weights_of(FOR_EVER, None) == {"cpu": 1.0}


def test_the_qos_factor_counts_for_all_of_it() -> None:
    for qos, factor in (("half", 0.5), ("free", 0.0), ("unknown", 1.0)):
        use = dict(running_use(running(spec=spec(qos=qos)), T0 + 10, FOR_EVER, CPU, {}))
        assert (use["billing"], use["gres/gpu"]) == (40.0 * factor, 20.0 * factor)


def test_only_what_is_still_held_runs_on() -> None:
    two = running(shares=(share("n1", cpus=4), share("n2", cpus=3)), held_nodes=("n2",))
    assert billed(running_use(two, T0 + 10, FOR_EVER, CPU, {})) == 30.0
    assert running_use(job(), T0 + 10, FOR_EVER, CPU, {}) == ()


def test_rows_add_up_by_association() -> None:
    row = UsedResources(account="p", user="ann", qos="", at_s=T0, amounts=(("billing", 1.0),))
    other = plus(replace(row, qos="high"), (("billing", 2.0), ("cpu", 3.0)))
    assert dict(other.amounts) == {"billing": 3.0, "cpu": 3.0}
    assert by_association([row, other, replace(row, user="bob")]) == {("p", "ann"): 4.0, ("p", "bob"): 1.0}


def test_nodes_and_licences_with_a_weight_are_billed_as_long_as_they_are_held() -> None:
    weights = {"cpu": 1.0, "node": 10.0, "license/matlab": 100.0}
    two = (share("n1", cpus=4), share("n2", cpus=4))
    before = running(shares=two, held_nodes=("n1", "n2"), spec=spec(licenses=(("matlab", 2), ("other", 9))))
    assert billed(running_use(before, T0 + 60, FOR_EVER, weights, {})) == 60 * (8 + 20 + 200)
    one = replace(before, held_nodes=("n2",), charged_cpu_s=4 * 20)
    none = replace(one, held_nodes=(), charged_cpu_s=4 * 20 + 4 * 60)
    charges = [
        charge_of(before, one, T0 + 20, FOR_EVER, weights, {}), charge_of(one, none, T0 + 60, FOR_EVER, weights, {})
    ]  # fmt: skip
    assert [billed(charge) for charge in charges] == [20 * (4 + 10), 60 * (4 + 10 + 200)]
    stopped = replace(before, charged_until_s=T0 + 30, charged_cpu_s=8 * 30)
    assert billed(charge_of(before, stopped, T0 + 30, FOR_EVER, weights, {})) == 30 * (8 + 20 + 200)


def test_a_service_whose_replicas_are_charged_to_another_begins_without_credit() -> None:
    known = ServiceCredit(payer=("p", "ann", ""), at_s=T0, billing_s=5.0)
    assert accrued(known, ("p", "ann", ""), 2.0, T0 + 10).billing_s == 25.0
    assert accrued(known, ("q", "ann", ""), 2.0, T0 + 10) == ServiceCredit(payer=("q", "ann", ""), at_s=T0 + 10)
