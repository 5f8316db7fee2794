"""The queue as squeue asks for it: which jobs are meant, and that it is as lenient, and as strict, as squeue is."""

from __future__ import annotations

import pytest
from world import ANN, BOB, Cluster

from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.queueview import queue_text
from hpcsched.controller.requests import cancel
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.model.spec import ArraySpec


@pytest.fixture
def cluster() -> Cluster:
    """Job 1 of ann runs on n1, 2 and 3 of bob wait, the tasks of array 4 wait, 7 is over."""
    made = Cluster("n1")
    made.submit(name="one", ntasks=2)
    made.submit(asker=BOB, name="two", account="physics")
    made.submit(asker=BOB, name="three", qos="")
    made.submit(name="many", array=ArraySpec(indices=(0, 1, 2)))
    made.submit(name="over")
    made.ask(lambda tx: cancel(tx, ANN, ["7"], {}))
    return made


def shown(cluster: Cluster, text: str = "%i", **query: str) -> list[str]:
    asked = {"format": text, "noheader": "1", "order": "i", **query}
    return queue_text(cluster.world, QueueRows(cluster.world), ANN, asked, cluster.now_s).splitlines()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, "1 2 3 4_[0-2]"),
        ({"array": "1"}, "1 2 3 4_0 4_1 4_2"),
        ({"state": "ALL"}, "1 2 3 4_[0-2] 7"),
        ({"state": "CANCELLED"}, "7"),
        ({"user": "bob"}, "2 3"),
        ({"user": "1000", "name": "one,many"}, "1 4_[0-2]"),
        ({"account": "physics"}, "2"),
        ({"qos": "normal", "name": "two,three"}, "2 3"),
        ({"name": "nobody"}, ""),
        ({"partition": "nope"}, ""),
        ({"nodes": "n1"}, "1"),
        ({"id": "2,999,4_1"}, "2 4_1"),
        ({"id": "998,999"}, ""),
        ({"id": "7"}, ""),
        ({"expected": "1", "id": "1,2"}, "2"),
    ],
)
def test_the_jobs_that_are_meant(cluster: Cluster, query: dict[str, str], found: str) -> None:
    assert shown(cluster, **query) == found.split()


def test_one_number_that_there_is_not_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(NotFoundError, match="Invalid job id specified"):
        shown(cluster, id="999")


@pytest.mark.parametrize(
    ("query", "says"),
    [({"nodes": "n9"}, "Invalid node name specified: n9"), ({"state": "BUSY"}, "Invalid job state"), ({"color": "x"}, "color"),
     ({"format": "%?"}, "no such column"), ({"order": "?"}, "Invalid sort specification")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(cluster: Cluster, query: dict[str, str], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        shown(cluster, **query)


def test_what_only_the_owner_may_see_is_null_for_others(cluster: Cluster) -> None:
    assert shown(cluster, "%i %Z", id="2")[0] == "2 (null)"
    assert shown(cluster, "%i %Z", id="1")[0] != "1 (null)"


def test_the_format_may_be_one_of_long_names_with_a_header(cluster: Cluster) -> None:
    text = queue_text(
        cluster.world,
        QueueRows(cluster.world),
        ANN,
        {"format": "JobID:4,State:8", "long": "1", "id": "1"},
        cluster.now_s,
    )
    assert text == "JOBISTATE   \n1   CONFIGUR\n"
