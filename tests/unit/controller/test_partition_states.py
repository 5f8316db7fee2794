"""Partitions in Slurm's states: which take jobs, which start them, and that the states are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import ANN, ROOT, Cluster
from jobs import partition

from hpcnode.commands import slurm_text
from hpcsched.api.views import node_views, partition_views
from hpcsched.controller.requests import jobs
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.model.job import JobState, Reason
from hpcsched.model.node import PartitionState


def put(cluster: Cluster, state: str, identity: object = ROOT) -> None:
    cluster.ask(lambda tx: jobs.set_partition_state(tx, identity, "main", state))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "takes", "starts", "reason"),
    [
        ("UP", True, True, None),
        ("DOWN", True, False, Reason.PARTITION_DOWN),
        ("DRAIN", False, True, None),
        ("inactive", False, False, Reason.PARTITION_INACTIVE),
    ],
)
def test_what_a_partition_takes_and_starts(state: str, takes: bool, starts: bool, reason: Reason | None) -> None:
    cluster = Cluster("n1")
    runs = cluster.submit(cpus_per_task=2)
    cluster.run(runs)
    waits = cluster.submit()
    put(cluster, state)
    if takes:
        cluster.submit()
    else:
        with pytest.raises(RequestError, match=r"Required partition not available \(inactive or drain\)") as caught:
            cluster.submit()
        assert slurm_text.of_job(str(caught.value)) == "Required partition not available (inactive or drain)"
    assert cluster.job(runs).state is JobState.RUNNING
    cluster.end(runs)
    assert (cluster.job(waits).state is JobState.CONFIGURING) == starts
    if reason is not None:
        assert cluster.state.waits[waits].reason is reason
    (view,) = partition_views(cluster.state, node_views(cluster.state, cluster.now_s))
    assert (view["state"], view["up"]) == (state.upper(), starts)
    put(cluster, "UP")
    assert cluster.job(waits).state is not JobState.PENDING


def test_only_admins_change_it_and_mistakes_are_told() -> None:
    cluster = Cluster("n1")
    with pytest.raises(PermissionDeniedError, match="cannot change a partition"):
        put(cluster, "DOWN", ANN)
    with pytest.raises(RequestError, match="'CLOSED': the states are UP, DOWN, DRAIN, INACTIVE"):
        put(cluster, "CLOSED")
    with pytest.raises(NotFoundError, match="'gpu'; there are: main"):
        cluster.ask(lambda tx: jobs.set_partition_state(tx, ROOT, "gpu", "UP"))
    assert cluster.state.partitions["main"].state is PartitionState.UP


def test_the_state_outlives_the_controller_and_the_configuration(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    put(cluster, "DRAIN")
    cluster.store.close()
    after = Cluster("n1", path=tmp_path / "h.db")
    after.state.partition_states = after.store.partition_states()
    after.state.set_partitions([partition("n1")])
    assert after.state.partitions["main"].state is PartitionState.DRAIN


def test_a_state_that_cannot_be_kept_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")

    def fail(batch: object) -> None:
        raise UnavailableError("cannot write the database: disk full")

    monkeypatch.setattr(cluster.store, "commit", fail)
    with pytest.raises(UnavailableError):
        put(cluster, "DOWN")
    assert cluster.state.partitions["main"].state is PartitionState.UP
    assert not cluster.state.partition_states
