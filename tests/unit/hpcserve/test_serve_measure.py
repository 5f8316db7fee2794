"""Measurements of a machine and of links, and what is read of its limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcserve.errors import GroupLost
from hpcserve.group.links import LENGTH, RankLink, RankLinks, links_of_threads
from hpcserve.group.measure import (
    FIRST_BYTES,
    MOST_ASKED,
    answer_link,
    free_bytes,
    group_rooms,
    kernel_speed,
    machine_room,
    measured_link,
    measured_links,
    measured_node,
)
from hpcserve.kernels import WeightKind
from hpcserve.split import ModelPart, ModelSplit, Span


@pytest.mark.parametrize("readers", [1, 2], ids=["alone", "beside another"])
def test_kernels_are_measured_alone_and_beside_others(readers):
    speed = kernel_speed(WeightKind.INT8, readers=readers, limit_s=0.02)
    assert 1e7 < speed.read_bytes_s < 1e13
    assert 1e7 < speed.flops_s < 1e16


def test_a_measured_node_predicts_what_was_measured():
    node = measured_node("here", "fp32")
    rate = node.kernel_bytes_s["fp32"]
    assert node.weight_s("fp32", 1) == pytest.approx(4 / rate)
    assert node.free_bytes == pytest.approx(free_bytes(), rel=0.5)


def test_free_memory_is_the_smallest_limit_above(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert machine_room(tmp_path / "meminfo") == 2 << 20
    assert machine_room(tmp_path / "none") is None
    inner = tmp_path / "groups" / "job" / "step"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (inner.parent, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    (tmp_path / "own").write_text("0::/job/step\n")
    assert group_rooms(tmp_path / "own", tmp_path / "groups") == [500]
    assert group_rooms(tmp_path / "none", tmp_path / "groups") == []


def ranks(count: int) -> list[RankLinks]:
    """Return the links of ranks of one stage, which are threads."""
    part = ModelPart(layers=Span(0, 1), kv_groups=Span(0, 1), ffn=Span(0, 1), vocab=Span(0, 1))
    return links_of_threads(ModelSplit(stages=((part,) * count,)))


def test_all_ranks_measure_their_links_and_tell_the_leader() -> None:
    def measure(links: RankLinks) -> list[list[float]]:
        found = measured_links(links, [(2, 1), (0, 1), (0, 2), (0, 9)])
        if links.rank == 0:
            return found + links.await_ready()
        links.say_ready(found)
        return found

    links = ranks(3)
    with ThreadPoolExecutor(3) as pool:
        leader, *others = pool.map(measure, links)
    assert [row[:2] for row in leader] == [[0, 1], [0, 2], [1, 2]]
    assert [[row[:2] for row in rows] for rows in others] == [[[1, 2]], []]
    for _, _, latency_s, rate in leader:
        assert 0 < latency_s < 5
        assert rate > 1e4
    links[0].send_step(b"a step")
    assert links[2].next_step() == b"a step", "nothing is left on a measured link"
    for one in links:
        one.close()


def test_a_slow_link_is_measured_with_few_and_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def asked_s(link: RankLink, size: int) -> float:
        asked.append(size)
        return 0.2 + size / 2e5

    monkeypatch.setattr("hpcserve.group.measure.asked_s", asked_s)
    links = ranks(2)
    found = measured_link(links[0].control(1), limit_s=0.5)
    assert (found.latency_s, found.rate_bytes_s) == (pytest.approx(0.1), pytest.approx(2e5))
    assert [size for size in asked if size] == [FIRST_BYTES]


def test_a_lost_or_hostile_end_of_a_link_ends_the_generation() -> None:
    links = ranks(3)
    links[1].break_off()
    with pytest.raises(GroupLost, match="rank 1 is lost"):
        measured_link(links[0].control(1))
    links[0].control(2).post(LENGTH.pack(1 << 50))
    with pytest.raises(GroupLost, match="rank 0 is lost: sent a message of"):
        answer_link(links[2].control(0))
    links = ranks(2)
    for _ in range(MOST_ASKED):
        links[0].control(1).post(LENGTH.pack(0))
    with pytest.raises(GroupLost, match="without an end"):
        answer_link(links[1].control(0))


def test_a_rank_that_says_something_else_than_measurements_is_lost() -> None:
    links = ranks(2)
    links[1].control(0).post(LENGTH.pack(3), b"[[[")
    with pytest.raises(GroupLost, match="something else than its measurements"):
        links[0].await_ready()
