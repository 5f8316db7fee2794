"""Where the tasks of a step go: small sketches, then properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Share
from hpcsched.steps.layout import NodeTasks, StepShape, lay_out, tasks_per_node_text


def shares(*cpus: int, tasks: int = 1) -> tuple[Share, ...]:
    return tuple(Share(node=NodeName(f"n{i}"), cpus=c, mem_mib=1000, tasks=tasks) for i, c in enumerate(cpus, start=1))


def placed(layout: tuple[NodeTasks, ...]) -> str:
    return " ".join(f"{part.node}:{part.first_rank}+{part.count}" for part in layout)


def names(*words: str) -> tuple[NodeName, ...]:
    return tuple(NodeName(word) for word in words)


@pytest.mark.parametrize(
    ("cpus", "shape", "expected"),
    [
        ((4, 4, 4), StepShape(nodes_min=3, ntasks=5), "n1:0+3 n2:3+1 n3:4+1"),  # as recorded from Slurm
        ((4, 4, 4), StepShape(), "n1:0+1 n2:1+1 n3:2+1"),
        ((4, 4), StepShape(nodes_min=2, ntasks=4), "n1:0+3 n2:3+1"),
        ((4, 4), StepShape(ntasks=8), "n1:0+4 n2:4+4"),
        ((4, 4), StepShape(ntasks=1), "n1:0+1"),
        ((4, 4, 4), StepShape(nodes_min=3, ntasks=2), "n1:0+1 n2:1+1"),  # the third has nothing to do
        ((4, 4), StepShape(nodes_min=1), "n1:0+1"),
        ((1, 4), StepShape(nodes_min=1, ntasks=3), "n2:0+3"),  # the first is too small
        ((1, 4), StepShape(ntasks=2, cpus_per_task=2), "n2:0+2"),
        ((4, 4), StepShape(ntasks_per_node=2), "n1:0+2 n2:2+2"),
        ((4, 4), StepShape(ntasks_per_node=1, ntasks=2), "n1:0+1 n2:1+1"),
        ((4, 4, 4), StepShape(nodelist=names("n2")), "n2:0+1"),
        ((4, 4, 4), StepShape(nodelist=names("n3"), nodes_min=2), "n1:0+1 n3:1+1"),
        ((4, 4, 4), StepShape(exclude=names("n1"), ntasks=5), "n2:0+4 n3:4+1"),
        ((2, 2, 2), StepShape(nodes_min=1, nodes_max=2, ntasks=4), "n1:0+2 n2:2+2"),
        ((1,), StepShape(ntasks=3, overcommit=True), "n1:0+3"),
        ((4, 2), StepShape(ntasks=3, cpus_per_task=2), "n1:0+2 n2:2+1"),
    ],
)
def test_a_step_is_laid_out_as_slurm_does(cpus: tuple[int, ...], shape: StepShape, expected: str) -> None:
    assert placed(lay_out(shares(*cpus), shape)) == expected


@pytest.mark.parametrize(
    ("cpus", "shape", "expected"),
    [
        ((4, 4, 4), StepShape(ntasks=5, plane=1), [(0, 3), (1, 4), (2,)]),
        ((1, 4, 2), StepShape(ntasks=6, plane=1), [(0,), (1, 3, 5), (2, 4)]),  # a full node is passed over
        ((4, 4), StepShape(ntasks=7, plane=2), [(0, 1, 4, 5), (2, 3, 6)]),
        ((3, 8), StepShape(ntasks=9, plane=2), [(0, 1, 4), (2, 3, 5, 6, 7, 8)]),
        ((4, 4), StepShape(ntasks_per_node=2, plane=1), [(0, 2), (1, 3)]),
        ((4, 4), StepShape(ntasks=2, plane=1, overcommit=True), [(0,), (1,)]),
    ],
)
def test_tasks_are_dealt_in_turn(cpus: tuple[int, ...], shape: StepShape, expected: list[tuple[int, ...]]) -> None:
    layout = lay_out(shares(*cpus), shape)
    assert [tuple(part.ranks) for part in layout] == expected
    assert [(part.first_rank, part.count) for part in layout] == [(ranks[0], len(ranks)) for ranks in expected]


def test_a_plane_that_leaves_a_node_without_tasks_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot give the step 2 nodes: 3 tasks, 4 at a time, need 1"):
        lay_out(shares(4, 4), StepShape(ntasks=3, plane=4))


@pytest.mark.parametrize(
    ("cpus", "parts", "expected"),
    [
        (
            (4, 4, 4),
            (StepShape(ntasks=1, cpus_per_task=4), StepShape(nodes_min=2, ntasks=4)),
            "n1:0/4 n2:1,2,3/3 n3:4/1",
        ),
        (
            (2, 2),
            (StepShape(ntasks=1), StepShape(ntasks=3)),
            "n1:0,1/2 n2:2,3/2",
        ),  # n2 alone is too small for the second
        ((4, 4), (StepShape(ntasks=1), StepShape(ntasks=1), StepShape(ntasks=2)), "n1:0,2/2 n2:1,3/2"),
        ((4, 4), (StepShape(ntasks=2, nodelist=names("n2")), StepShape(ntasks=1, nodelist=names("n2"))), "n2:0,1,2/3"),
        ((4, 4), (StepShape(nodes_min=2, ntasks=2), StepShape(nodes_min=2, ntasks=2)), "n1:0,2/2 n2:1,3/2"),
    ],
)
def test_parts_of_a_step_have_nodes_of_their_own_if_there_are_enough(
    cpus: tuple[int, ...], parts: tuple[StepShape, ...], expected: str
) -> None:
    layout = lay_out(shares(*cpus), StepShape(parts=parts))
    assert " ".join(f"{one.node}:{','.join(map(str, one.ranks))}/{one.cpus}" for one in layout) == expected


def test_a_part_without_room_is_refused_by_its_number() -> None:
    with pytest.raises(
        RequestError, match="part 2 of the step: cannot give the step 2 tasks: the job has 1 cpu on 1 node"
    ):
        lay_out(shares(2), StepShape(parts=(StepShape(ntasks=1), StepShape(ntasks=2))))


def test_a_list_of_hosts_says_where_each_task_runs() -> None:
    layout = lay_out(shares(4, 4, 4), StepShape(hosts=names("n3", "n1", "n1", "n3")))
    assert [(one.node, tuple(one.ranks)) for one in layout] == [("n1", (1, 2)), ("n3", (0, 3))]
    assert placed(lay_out(shares(4, 4), StepShape(ntasks=1, hosts=names("n2", "n1")))) == "n2:0+1"
    with pytest.raises(RequestError, match="cannot give the step 3 tasks: its list has 1 hosts"):
        lay_out(shares(4), StepShape(ntasks=3, hosts=names("n1")))
    with pytest.raises(RequestError, match="cannot start the step on n7: the job has n1"):
        lay_out(shares(4), StepShape(hosts=names("n7")))
    with pytest.raises(RequestError, match="cannot give the step 2 tasks on n1: the job has 1 cpu there"):
        lay_out(shares(1), StepShape(hosts=names("n1", "n1")))


def test_without_numbers_a_step_has_the_jobs_tasks() -> None:
    assert placed(lay_out(shares(4, 4, tasks=2), StepShape())) == "n1:0+2 n2:2+2"
    assert placed(lay_out(shares(4, 4, tasks=2), StepShape(nodes_min=1))) == "n1:0+2"
    assert placed(lay_out(shares(4, tasks=4), StepShape(cpus_per_task=2))) == "n1:0+2"


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (StepShape(ntasks=9), "cannot give the step 9 tasks: the job has 8 cpus on 2 nodes"),
        (StepShape(ntasks=5, cpus_per_task=2), "cannot give the step 5 tasks of 2 cpus: the job has 8 cpus on 2 nodes"),
        (StepShape(nodes_min=3), "cannot give the step 3 nodes: the job has 2 nodes"),
        (StepShape(nodes_min=2, exclude=names("n1")), "the job has 2 nodes, 1 of them excluded"),
        (
            StepShape(cpus_per_task=5),
            "cannot give the step 2 nodes with 5 cpus on each: the job's nodes have 4, 4 cpus",
        ),
        (
            StepShape(ntasks_per_node=5),
            "cannot give the step 2 nodes with 5 cpus on each: the job's nodes have 4, 4 cpus",
        ),
        (StepShape(nodelist=names("n1"), cpus_per_task=5), "step on n1: it needs 5 cpus, the job has fewer there"),
        (StepShape(nodelist=names("n9")), "cannot start the step on n9: the job has n[1-2]"),
        (StepShape(nodelist=names("n1"), exclude=names("n1")), "cannot start the step on n1: it is excluded as well"),
        (StepShape(nodelist=names("n1", "n2"), nodes_min=1), "cannot start the step on 1 node: its node list has 2"),
        (StepShape(nodelist=names("n1", "n2"), ntasks=1), "cannot start the step on 1 node: its node list has 2"),
        (StepShape(ntasks_per_node=1, ntasks=3), "cannot give the step 3 tasks: 1 on each of 2 nodes are 2"),
        (StepShape(ntasks=0), "--ntasks is 0, it must be 1 to"),
        (StepShape(nodes_min=3, nodes_max=2), "--nodes=3-2 ends before it begins"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(shape: StepShape, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        lay_out(shares(4, 4), shape)
    assert text in str(caught.value)


def test_tasks_per_node_is_written_in_runs() -> None:
    assert tasks_per_node_text([2, 2, 1]) == "2(x2),1"
    assert tasks_per_node_text([3, 1, 1]) == "3,1(x2)"
    assert tasks_per_node_text([4]) == "4"


@given(
    cpus=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    nodes=st.none() | st.integers(1, 6),
    ntasks=st.none() | st.integers(1, 30),
    cpus_per_task=st.integers(1, 3),
    per_node=st.none() | st.integers(1, 5),
)
def test_a_layout_keeps_within_the_shares_and_numbers_every_rank_once(
    cpus: list[int], nodes: int | None, ntasks: int | None, cpus_per_task: int, per_node: int | None
) -> None:
    job = shares(*cpus)
    shape = StepShape(nodes_min=nodes, ntasks=ntasks, cpus_per_task=cpus_per_task, ntasks_per_node=per_node)
    try:
        layout = lay_out(job, shape)
    except RequestError:
        return
    by_node = {share.node: share.cpus for share in job}
    ranks = [rank for part in layout for rank in range(part.first_rank, part.first_rank + part.count)]
    assert ranks == list(range(len(ranks)))
    assert [part.node for part in layout] == [share.node for share in job if share.node in {p.node for p in layout}]
    assert all(part.count >= 1 and part.count * cpus_per_task <= by_node[part.node] for part in layout)
    assert ntasks is None or len(ranks) == ntasks
    assert per_node is None or max(part.count for part in layout) <= per_node
    assert nodes is None or len(layout) == min(nodes, len(ranks))


@given(cpus=st.lists(st.integers(1, 8), min_size=1, max_size=6), data=st.data())
def test_as_many_tasks_as_the_job_has_cpus_always_fit(cpus: list[int], data: st.DataObject) -> None:
    ntasks = data.draw(st.integers(1, sum(cpus)))
    assert sum(part.count for part in lay_out(shares(*cpus), StepShape(ntasks=ntasks))) == ntasks
