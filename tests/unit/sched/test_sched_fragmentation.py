"""Jobs go where they strand the fewest GPUs, by what runs and waits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from unit.sched.world import World, world

from hpcsched.model.node import Gpu
from hpcsched.sched.place.fragmentation import Demand, Mix, mix_of
from hpcsched.sched.place.gpus import all_units, gpu_slots


def first(sketch: World) -> str:
    """Return where job 1 goes: node, GPUs, shards."""
    share = next(start.shares[0] for start in sketch.plan().starts if start.job_id == 1)
    return f"{share.node} {','.join(map(str, share.gpus))} {share.shards}".strip()


def test_cpus_are_not_taken_where_gpus_need_them() -> None:
    gpu_jobs = ["2: 1g 4c", "3: 1g 4c", "4: 1g 4c"]
    assert first(world("1x8/2xa 1x16/2xa", waiting=["1: 4c", *gpu_jobs])) == "n2  0"
    assert first(world("1x8/2xa 1x16/2xa", waiting=["1: 4c"])) == "n1  0"  # nobody asks for GPUs: the tightest


def test_a_pair_of_gpus_is_left_to_those_who_need_two() -> None:
    pairs = ["2: 2g", "3: 2g", "4: 2g"]
    assert first(world("1x8/2xa 1x8/3xa", waiting=["1: 1g", *pairs])) == "n2 0 0"
    assert first(world("1x8/2xa 1x8/3xa", waiting=["1: 1g"])) == "n1 0 0"


def test_shards_are_taken_where_what_is_left_is_of_use() -> None:
    parts = ["2: 3shards", "3: 3shards", "4: 3shards"]
    running = ["9: n1 1c"]
    sketch = world("1x8/2xa%4", running=running, waiting=["1: 1shards", *parts])
    shares = sketch.job(9).shares
    one = [replace(share, gpus=(0,), shards=1, shards_of=4) for share in shares]
    sketch.change(9, shares=tuple(one))
    assert first(sketch) == "n1 1 1"  # GPU 0 has just the three that the others ask for


def test_the_administrators_weight_comes_first() -> None:
    sketch = world("1x8/2xa 1x16/2xa", waiting=["1: 4c", "2: 1g 4c", "3: 1g 4c"])
    heavy = replace(sketch.nodes[1].spec, weight=5)
    sketch.change_node("n2", spec=heavy)
    assert first(sketch) == "n1  0"


def test_what_runs_tells_of_what_comes() -> None:
    assert mix_of(world("1x8/2xa").snapshot()) is None
    assert mix_of(world("1x8", running=["1: n1 1c"], waiting=["2: 1g"]).snapshot()) is None  # there are no GPUs
    assert mix_of(world("1x8/2xa", running=["1: n1 1c 1g"]).snapshot()) is not None


DEMANDS = st.builds(
    Demand,
    cpus=st.integers(1, 8),
    mem_mib=st.integers(0, 100),
    gpus=st.integers(0, 2),
    shards=st.integers(1, 4),
    shards_of=st.just(4),
).map(lambda one: one._replace(shards=0) if one.gpus else one)


@given(st.dictionaries(DEMANDS, st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_no_more_is_stranded_than_is_free_and_nothing_of_nothing(
    counts: dict[Demand, int], data: st.DataObject
) -> None:
    gpus = [Gpu(index=at, type="x", shards=data.draw(st.sampled_from([1, 4]))) for at in range(3)]
    slots = gpu_slots(gpus)
    units = tuple(data.draw(st.integers(0, count)) for count in all_units(gpus, slots))
    room = data.draw(st.integers(0, 16)), data.draw(st.integers(0, 200)), units
    mix = Mix(counts)  # type: ignore[arg-type]
    free = sum(count / slot.shards for slot, count in zip(slots, units, strict=True))
    assert 0 <= mix.stranded(slots, room) <= free + 1e-9
    assert mix.newly_stranded(slots, room, (0, 0, (0,) * len(units))) == 0
