"""Sums of what lies on a device: a device of plain memory whose copies end only when somebody waits for them stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpctrain.comm.base import Background, Work
from hpctrain.comm.mpi import Staging
from hpctrain.errors import TrainError


class LateCopy:
    """A copy that is made when it is waited for or joined, of what was there when it was asked for."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target = source.clone(), target
        self.joined = False

    def wait(self) -> None:
        self._target.copy_(self._source)

    def join(self) -> None:
        self.wait()
        self.joined = True


class SlowDevice:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []
        self.back: list[LateCopy] = []

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        self.memories.append(torch.full_like(like, -1.0))
        return self.memories[-1]

    def fetch(self, source: torch.Tensor, into_host: torch.Tensor) -> LateCopy:
        return LateCopy(source, into_host)

    def put(self, host: torch.Tensor, into: torch.Tensor) -> LateCopy:
        self.back.append(LateCopy(host, into))
        return self.back[-1]


class Doubling:
    """What a sum over two like ranks gives, in a thread; it notes the order."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.background = Background()

    def __call__(self, host_L: torch.Tensor, then: Callable[[], None] | None) -> Work:
        self.lengths.append(host_L.numel())
        return self.background.begin(lambda: self._sum(host_L, then))

    def _sum(self, host_L: torch.Tensor, then: Callable[[], None] | None) -> None:
        host_L.mul_(2)
        if then is not None:
            then()


def test_sums_go_by_the_host_in_order_and_reuse_its_memory() -> None:
    device, summing = SlowDevice(), Doubling()
    staging = Staging(device, summing)
    tensors = [torch.ones(3, 2), torch.full((5,), 2.0), torch.full((4,), 3.0)]
    seen: list[float] = []
    for _ in range(2):
        works = [staging.begin(tensor, lambda tensor=tensor: seen.append(float(tensor.sum()))) for tensor in tensors]
        assert seen == [] or len(seen) == 3  # what follows is called by who waits, in its turn
        for work in works:
            work.wait()
    staging.close()
    assert [tensor.flatten()[0].item() for tensor in tensors] == [4.0, 8.0, 12.0]
    assert seen == [12.0, 20.0, 24.0, 24.0, 40.0, 48.0]
    assert summing.lengths == [6, 5, 4] * 2
    assert len(device.memories) == 3
    assert all(copy.joined for copy in device.back)


def test_a_fetch_has_no_results_of_computation_after_it() -> None:
    staging = Staging(SlowDevice(), Doubling())
    tensor = torch.ones(4)
    work = staging.begin(tensor)
    tensor.fill_(100.0)
    work.wait()
    staging.close()
    assert tensor.tolist() == [2.0] * 4


def test_a_failed_sum_raises_where_it_is_waited_for() -> None:
    def fail(host_L: torch.Tensor, then: Callable[[], None] | None) -> Work:
        raise TrainError("cannot sum over hosts: the host before in the ring has ended")

    staging = Staging(SlowDevice(), fail)
    work = staging.begin(torch.ones(4))
    with pytest.raises(TrainError, match="has ended"):
        work.wait()
    staging.close()
