"""The queue as squeue asks for it: which jobs are meant, and that it is as lenient, and as strict, as squeue is."""

from __future__ import annotations

import asyncio
import json

import pytest
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched.api import connection_limits
from hpcsched.auth.authorize import Identity
from hpcsched.controller.requests.jobs import cancel
from hpcsched.controller.views.queue import JOBS_AT_ONCE, QueueRows, Reading, queue_text
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.model.spec import ArraySpec


@pytest.fixture
def cluster() -> Cluster:
    """Job 1 of ann runs on n1, 2 and 3 of bob wait, the tasks of array 4 wait, 7 is over."""
    made = Cluster("n1")
    made.submit(name="one", ntasks=2)
    made.submit(identity=BOB, name="two", account="physics")
    made.submit(identity=BOB, name="three", qos="")
    made.submit(name="many", array=ArraySpec(indices=(0, 1, 2)))
    made.submit(name="over")
    made.ask(lambda tx: cancel(tx, ANN, ["7"], {}))
    return made


def shown(cluster: Cluster, text: str = "%i", **query: str) -> list[str]:
    asked = {"format": text, "noheader": "1", "order": "i", **query}
    return asyncio.run(queue_text(cluster.state, QueueRows(cluster.state), ANN, asked, cluster.now_s)).splitlines()


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


def test_others_have_turns_while_many_tasks_become_one_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SLICE_S", 0.0)
    cluster.submit(array=ArraySpec(indices=tuple(range(4 * JOBS_AT_ONCE))))
    turns = 0

    async def answered() -> int:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(others())
        text = await queue_text(cluster.state, QueueRows(cluster.state), ANN, {}, cluster.now_s)
        other.cancel()
        return len(text.splitlines())

    assert asyncio.run(answered()) == 1 + 5  # a header, and a line for the array
    assert turns >= 8, "four while the jobs are chosen, four while their tasks are counted"


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
    lines = shown(cluster, "JobID:4,State:8", long="1", id="1", noheader="0")
    assert lines == ["JOBISTATE   ", "1   CONFIGUR"]


@pytest.mark.parametrize(
    ("query", "says"),
    [({"id": "2,999"}, "Invalid job id specified: 999"), ({"user": "nobody-here"}, "Invalid user: nobody-here")],
)
def test_who_asks_strictly_is_told_of_what_is_not_there(cluster: Cluster, query: dict[str, str], says: str) -> None:
    shown(cluster, **query)
    with pytest.raises(RequestError, match=says):
        shown(cluster, strict="1", **query)


def test_a_person_is_told_of_the_jobs_that_are_not_shown(cluster: Cluster) -> None:
    assert shown(cluster, user="bob", others="1")[-1] == "others: 1 running, 3 waiting (hqueue -a)"
    assert shown(cluster, others="1")[-1] == "4_[0-2]"


def test_the_jobs_as_json_are_those_that_are_listed(cluster: Cluster) -> None:
    reading = Reading(cluster.state, lambda: cluster.now_s)
    for query, ids in (
        ({"user": "bob"}, [2, 3]),
        ({"account": "physics"}, [2]),
        ({"nodes": "n1"}, [1]),
        ({"state": "CANCELLED"}, [7]),
    ):
        assert [job["id"] for job in json.loads(asyncio.run(reading.jobs(ANN, query)))["jobs"]] == ids


def test_the_priorities_are_those_of_the_jobs_that_are_asked_for(cluster: Cluster) -> None:
    answer = cluster.backend().priorities(ANN, {"user": "bob"})
    assert [job["id"] for job in answer["jobs"]] == [2, 3]
    with pytest.raises(RequestError, match="Invalid user: nobody-here"):
        cluster.backend().priorities(ANN, {"user": "nobody-here"})


def table(cluster: Cluster, identity: Identity = ANN, **query: str) -> list[str]:
    """Return what hqueue prints without options."""
    asked = {
        "format": "id,st,nodes",
        "fit": "1",
        "fold": "1",
        "order": "phase",
        "strict": "1",
        "whose": "default",
        "state": "ALL",
    }
    asked |= {"ended": "1", "others": "1", **query}
    asked = {name: value for name, value in asked.items() if value}
    return asyncio.run(queue_text(cluster.state, QueueRows(cluster.state), identity, asked, cluster.now_s)).splitlines()


def test_a_user_sees_the_own_jobs_and_how_many_others_have_and_how_many_ended(cluster: Cluster) -> None:
    lines = table(cluster)
    assert [line.split()[0] for line in lines[:-2]] == ["JOBID", "1", "4_[0-2]"]
    assert lines[-2:] == [
        "1 job ended in the last hour: 1 CANCELLED (hqueue -a)",
        "others: 0 running, 2 waiting (hqueue -a)",
    ]


def test_an_admin_sees_everybodys(cluster: Cluster) -> None:
    lines = table(cluster, ROOT)
    assert [line.split()[0] for line in lines[:-1]] == ["JOBID", "1", "2", "3", "4_[0-2]"]
    assert lines[-1] == "1 job ended in the last hour: 1 CANCELLED (hqueue -a)"


def test_ended_tasks_of_an_array_are_one_line_for_each_way_to_end() -> None:
    cluster = Cluster("n1", "n2", "n3")
    first = cluster.submit(array=ArraySpec(indices=(1, 2, 3)))
    for task, code in ((0, 0), (1, 0), (2, 3)):
        cluster.run(first + task)
        cluster.end(first + task, code=code)
    lines = table(cluster, ended="")
    assert [line.split()[:2] for line in lines[1:]] == [[f"{first}_[1-2]", "CD"], [f"{first}_3", "F"]]
    assert len(table(cluster, ended="", fold="", array="1")) == 4
    assert table(cluster)[-1] == "3 jobs ended in the last hour: 2 COMPLETED 1 FAILED (hqueue -a)"


def test_nodes_of_ended_tasks_are_in_the_order_of_the_configuration() -> None:
    cluster = Cluster("n1", "n2", "n3")
    first = cluster.submit(array=ArraySpec(indices=(1, 2, 3)), cpus_per_task=2)
    for task in range(3):
        cluster.run(first + task)
        cluster.end(first + task)
    assert {cluster.job(first + task).shares[0].node for task in range(3)} == {"n1", "n2", "n3"}
    assert table(cluster, ended="", format="id,nodelist")[1].split()[1] == "n[1-3]"
