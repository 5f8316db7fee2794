"""Measurements of a machine and of links, and what is read of its limits."""

from __future__ import annotations

import socket
import threading

import pytest

from hpcserve.errors import GroupLost
from hpcserve.group.measure import (
    PING,
    answer_link,
    free_bytes,
    group_rooms,
    kernel_speed,
    machine_room,
    measured_link,
    measured_node,
)
from hpcserve.kernels import WeightKind


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


def test_a_link_is_measured_between_two_ends():
    asking, answering = socket.socketpair()
    with asking, answering:
        thread = threading.Thread(target=answer_link, args=(answering, 20.0))
        thread.start()
        found = measured_link(asking, 20.0)
        thread.join()
    assert 0 < found.latency_s < 5
    assert found.rate_bytes_s > 1e4


def test_a_silent_or_closed_end_is_a_lost_rank():
    asking, silent = socket.socketpair()
    with asking, silent:
        with pytest.raises(GroupLost, match="timed out"):
            measured_link(asking, 0.01)
        silent.close()
        with pytest.raises(GroupLost):
            measured_link(asking, 0.01)


def test_an_end_that_asks_for_something_else_is_refused():
    asking, answering = socket.socketpair()
    with asking, answering:
        asking.sendall(PING.pack(1 << 50))
        with pytest.raises(GroupLost, match="something else"):
            answer_link(answering)
