"""Heterogeneous jobs: components on nodes of their own, all of them or none."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from unit.sched.world import World, refusal_of, spec_of, world

from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.sched.place.request import request_of, whole_of
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill
from hpcsched.sched.sentences import needs
from hpcsched.sched.tres import least_of


def hetjob(sketch: World, job_id: int, *components: str) -> World:
    """Give a waiting job further components."""
    return sketch.change(job_id, components=tuple(spec_of(words) for words in components))


def test_each_component_has_nodes_of_its_own() -> None:
    start = hetjob(world("4x4", waiting=["1: 1c 60s"]), 1, "2 nodes 2c", "3 tasks").plan().starts[0]
    assert [(share.node, share.cpus, share.tasks, share.component) for share in start.shares] == [
        ("n1", 1, 1, 0),
        ("n2", 2, 1, 1),
        ("n3", 2, 1, 1),
        ("n4", 3, 3, 2),
    ]


def test_all_components_start_or_none() -> None:
    short = hetjob(world("2x4", running=["2: n2 1c 60s"], waiting=["1: 4c 60s"]), 1, "4c")
    wait = short.plan().waits[JobId(1)]
    assert (short.starts(), wait.reason, wait.expected_start_s) == ({}, Reason.RESOURCES, 60)
    each = "1 node with 4 cpus"
    assert wait.detail == f"needs {each} and apart from that {each}; 1 is free"


def test_a_component_leaves_a_node_to_the_one_that_can_use_no_other() -> None:
    assert hetjob(world("1x2 1x8", waiting=["1: 1c 60s"]), 1, "1c n1").starts() == {1: "n2:1 n1:1"}
    three = world("1x4+a 1x4+a+b 1x4+b", waiting=["1: +a 60s"])
    assert len(hetjob(three, 1, "+a", "n3").plan().starts) == 1
    assert hetjob(three, 1, "+b", "n1").starts() == {1: "n2:1 n3:1 n1:1"}


@pytest.mark.parametrize("seed", range(40))
def test_a_place_is_found_wherever_there_is_one(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(count, 5))]
    asked = [rng.randint(1, 6) for _ in range(count)]
    features = [rng.choice("ab") if rng.random() < 0.5 else "" for _ in sizes]
    wanted = [rng.choice(["", "", "a", "b"]) for _ in asked]
    nodes = " ".join(f"1x{size}" + (f"+{it}" if it else "") for size, it in zip(sizes, features, strict=True))
    words = [f"{cpus}c" + (f" +{it}" if it else "") for cpus, it in zip(asked, wanted, strict=True)]
    there = any(
        all(
            sizes[node] >= cpus and (not it or features[node] == it)
            for node, cpus, it in zip(order, asked, wanted, strict=True)
        )
        for order in permutations(range(len(sizes)), count)
    )
    sketch = hetjob(world(nodes, waiting=[f"1: {words[0]} 60s"]), 1, *words[1:])
    assert bool(sketch.starts()) is there
    request = request_of(sketch.job(1).spec, sketch.partitions[0])
    assert (refusal_of(request, sketch.nodes, sketch.partitions[0]) is None) is there


@pytest.mark.parametrize("backfill", list(Backfill))
def test_room_is_kept_for_all_of_it_and_others_go_where_that_leaves_any(backfill: Backfill) -> None:
    running, waiting = ["2: n1 4c 60s", "3: n2 4c 90s"], ["1: 4c 60s", "4: 4c 80s", "5: 4c 100s"]
    queue = hetjob(world("3x4", running=running, waiting=waiting, backfill=backfill), 1, "4c", "4c")
    queue.change(1, priority_set=2**31)
    made = queue.plan()
    assert made.waits[JobId(1)].expected_start_s == 90
    assert [start.job_id for start in made.starts] == ([4] if backfill is not Backfill.NONE else [])


def test_what_was_promised_is_kept_component_by_component() -> None:
    waiting = ["1: 4c 60s", "4: 8c 100s"]
    queue = hetjob(
        world("2x4 1x8", running=["2: n1 4c 60s"], waiting=waiting, backfill=Backfill.CONSERVATIVE), 1, "4c", "8c"
    )
    queue.change(1, priority_set=2**31)
    promises = queue.plan().promises
    assert [(part.component, part.use[0]) for part in promises[JobId(1)].parts] == [(0, 4), (1, 4), (2, 8)]
    queue.jobs = [job for job in queue.jobs if job.id != 2]
    queue.now_s = 60.0
    shares = plan(replace(queue.snapshot(), promises=promises), queue.policy).starts[0].shares
    assert [(share.component, share.cpus) for share in shares] == [(0, 4), (1, 4), (2, 8)]


def test_what_it_asks_for_is_the_sum_of_its_components() -> None:
    one, two = spec_of("2 nodes 3c 100M"), spec_of("4 tasks 2c 1g:a100")
    sketch = world("4x8")
    shapes = [request_of(spec, sketch.partitions[0]).shape for spec in (one, two)]
    whole = whole_of(shapes)
    assert least_of(whole) == {"node": 3, "cpu": 14, "mem": 200.0, "gres/gpu": 1, "gres/gpu:a100": 1}
    assert needs(whole) == " and apart from that ".join(map(needs, shapes))


@pytest.mark.parametrize(
    ("components", "why"),
    [
        (["9c"], "component 1: cannot give job one node with 9 cpus: no node of partition 'main' has more than 8"),
        (["1c", "1c"], "its components run on nodes of their own, and partition 'main' has 2 nodes, not enough"),
        (["5c", "6c"], "its components run on nodes of their own"),
    ],
)
def test_what_never_fits_is_refused(components: list[str], why: str) -> None:
    sketch = hetjob(world("2x8", waiting=["1: 1c 60s"]), 1, *components)
    said = refusal_of(request_of(sketch.job(1).spec, sketch.partitions[0]), sketch.nodes, sketch.partitions[0])
    assert said is not None
    assert why in said
