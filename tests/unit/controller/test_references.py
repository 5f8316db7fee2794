"""What users call their jobs."""

from __future__ import annotations

import asyncio

import pytest
from unit.controller.cluster import ANN, BOB, Cluster

from hpcsched.controller.requests.job_ids import find_jobs
from hpcsched.controller.requests.jobs import cancel
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.model.spec import ArraySpec


@pytest.fixture
def cluster() -> Cluster:
    """Job 1 of ann is over, 2 waits; 3 is an array of two tasks, 5 and 6 are called alike, 7 is bob's."""
    made = Cluster("n1")
    made.submit(name="fit", hold=True)
    made.ask(lambda tx: cancel(tx, ANN, ["1"], {}))
    made.submit(name="fit", hold=True)
    made.submit(name="many", hold=True, array=ArraySpec(indices=(1, 4)))
    made.submit(name="twin", hold=True)
    made.submit(name="twin", hold=True)
    made.submit(identity=BOB, name="other", hold=True)
    return made


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("2", [2]),
        ("3", [3, 4]),
        ("3_4", [4]),
        ("3_[1-9]", [3, 4]),
        ("5+0", [5]),
        ("fit", [2]),
        ("many", [3, 4]),
        ("last", [6]),
    ],
)
def test_who_is_meant(cluster: Cluster, reference: str, found: list[int]) -> None:
    assert [job.id for job in find_jobs(cluster.state, reference, ANN.uid)] == found


def test_the_last_is_what_was_submitted_last_though_it_is_an_array(cluster: Cluster) -> None:
    cluster.submit(hold=True, array=ArraySpec(indices=(0, 1, 2)))
    assert [job.display_id for job in find_jobs(cluster.state, "last", ANN.uid)] == ["8_0", "8_1", "8_2"]


def test_a_name_that_only_jobs_that_are_over_have_means_the_one(cluster: Cluster) -> None:
    cluster.ask(lambda tx: cancel(tx, ANN, ["3"], {}))
    assert [job.id for job in find_jobs(cluster.state, "many", ANN.uid)] == [3, 4]


@pytest.mark.parametrize("reference", ["99", "3_7", "other", "nothing"])
def test_nobody_is_meant(cluster: Cluster, reference: str) -> None:
    with pytest.raises(NotFoundError, match="Invalid job id specified"):
        find_jobs(cluster.state, reference, ANN.uid)


def test_a_name_of_several_is_refused_with_their_numbers(cluster: Cluster) -> None:
    with pytest.raises(RequestError, match="you have 2 of that name: 5 6"):
        find_jobs(cluster.state, "twin", ANN.uid)


@pytest.mark.parametrize(
    ("verb", "body", "why"),
    [
        ("cancel", {"jobs": [], "filters": {"usr": "ann"}}, "cannot filter by usr"),
        ("hold", {"jobs": ["2"], "filters": {"user": "bob"}}, "by filters"),
        ("cancel", {"filters": {"user": "ann"}}, "the body must be"),
        ("cancel", {"jobs": ["2"], "signal": ["KILL"]}, "the signal must be a text"),
        ("cancel", {"jobs": [str(number) for number in range(10_001)]}, "the most is 10000"),
        ("cancel", {"jobs": [f"a{number}" for number in range(101)]}, "the most is 100"),
    ],
)
def test_d4_a_request_for_nothing_or_too_many_jobs_is_refused(
    cluster: Cluster, verb: str, body: dict[str, object], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        asyncio.run(cluster.backend().act(ANN, verb, body))
    assert cluster.job(2).state.value == "PENDING"
