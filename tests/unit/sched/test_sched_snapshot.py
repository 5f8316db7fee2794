"""From the controller's jobs and nodes to what the planner sees, and what is kept between snapshots."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import world

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import JobState
from hpcsched.model.node import Partition
from hpcsched.model.spec import Dependency, DependencyKind
from hpcsched.sched.snapshot import SnapshotCache, snapshot_of


def test_a_job_is_looked_at_again_only_when_it_changed() -> None:
    sketch = world("1x4", waiting=["1: 1c", "2: 1c"])
    cache = SnapshotCache()

    def pending() -> list[object]:
        return list(snapshot_of(sketch.jobs, sketch.nodes, sketch.partitions, 0.0, cache).pending)

    first = pending()
    sketch.change(2, nice=5)
    second = pending()
    assert second[0] is first[0]
    assert second[1] is not first[1]


def test_equal_shapes_become_one() -> None:
    sketch = world("1x4", waiting=["1: 2c 60s", "2: 2c 90s", "3: 1c 60s"])
    one, two, three = snapshot_of(sketch.jobs, sketch.nodes, sketch.partitions, 0.0).pending
    assert one.request.shape is two.request.shape
    assert one.request.shape is not three.request.shape


def test_a_changed_partition_is_noticed() -> None:
    sketch = world("1x4", waiting=["1: 1c"])
    cache = SnapshotCache()
    before = snapshot_of(sketch.jobs, sketch.nodes, sketch.partitions, 0.0, cache).pending[0]
    changed = [replace(sketch.partitions[0], default_time_s=77)]
    after = snapshot_of(sketch.jobs, sketch.nodes, changed, 0.0, cache).pending[0]
    assert (before.request.time_limit_s, after.request.time_limit_s) == (None, 77)


def test_jobs_that_ended_are_forgotten() -> None:
    sketch = world("1x4", waiting=["1: 1c", "2: 1c"])
    cache = SnapshotCache()
    snapshot_of(sketch.jobs, sketch.nodes, sketch.partitions, 0.0, cache)
    sketch.change(1, state=JobState.COMPLETED)
    snapshot = snapshot_of(sketch.jobs, sketch.nodes, sketch.partitions, 0.0, cache)
    assert [job.id for job in snapshot.pending] == list(cache.pending) == [2]


def test_the_end_of_a_running_job_follows_its_limit() -> None:
    sketch = world("1x8", running=["1: n1 1c 60s", "2: n1 1c", "3: n1 1c 60s", "4: n1 1c 60s"])
    sketch.change(2, started_at_s=5.0).change(3, time_limit_s=90).change(
        4, state=JobState.CONFIGURING, started_at_s=None
    )
    sketch.change(4, allocated_at_s=7.0)
    assert [job.ends_at_s for job in sketch.snapshot().running] == [60, None, 90, 67]
    sketch.partitions = [Partition(name="main", nodes=(NodeName("n1"),), default=True, max_time_s=100)]
    assert sketch.snapshot().running[1].ends_at_s == 105


def test_a_requeued_job_that_still_holds_a_node_does_not_start_again() -> None:
    sketch = world("2x4", running=["1: n1 4c 60s"]).change(1, state=JobState.PENDING)
    assert sketch.starts() == {}
    assert sketch.change(1, held_nodes=()).starts() == {1: "n1:4"}


def test_a_begin_time_that_an_update_has_brought_forward_counts() -> None:
    sketch = world("1x4", waiting=["1: 1c"]).change(1, begin_at_s=50, not_before_s=20.0)
    assert sketch.snapshot().pending[0].not_before_s == 20  # an update has brought it forward


def test_only_jobs_that_others_wait_for_leave_facts() -> None:
    sketch = world("1x8", running=["1: n1 1c", "2: n1 1c", "3: n1 1c"], waiting=["9: 1c"])
    sketch.change(2, array_job_id=JobId(2), array_task_id=0).change(3, array_job_id=JobId(2), array_task_id=1)
    sketch.change(9, dependency=(Dependency(kind=DependencyKind.AFTER_OK, job_ids=(2,)),))
    facts = sketch.snapshot().facts
    assert {key: [fact.id for fact in found] for key, found in facts.items()} == {2: [2, 3]}
