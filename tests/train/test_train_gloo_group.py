"""A Gloo group of one generation, whose other rank is there and silent: only an end of the connections wakes who waits."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from waiting import PATIENCE_S, wait_until

from hpctrain.comm.elastic_group import GlooGroup
from hpctrain.errors import TrainError


def test_a_sum_is_broken_off_though_the_other_rank_is_silent() -> None:
    store = dist.HashStore()
    groups: dict[int, GlooGroup] = {}

    def join(rank: int) -> None:
        groups[rank] = GlooGroup(rank, 2, store, "127.0.0.1", PATIENCE_S)

    joining = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for one in joining:
        one.start()
    for one in joining:
        one.join()
    asked = groups[0].begin(torch.ones(5))
    said: list[str] = []

    def wait() -> None:
        try:
            asked.wait()
        except TrainError as error:
            said.append(str(error))

    threading.Thread(target=wait, daemon=True).start()
    groups[0].break_off()
    wait_until(lambda: bool(said), what="the sum to fail")
    assert said[0].startswith("cannot sum over gloo")
