"""`--sync auto`: what it goes by."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.base import BucketPlan, SingleCommunicator
from hpctrain.exchange.compress import NAMES
from hpctrain.exchange.sync import MEASURED_STEPS, make_sync


class SecondOfTwo(SingleCommunicator):
    """The rank that waits, beside one that computes as long as it waits."""

    rank, size = 1, 2

    def __init__(self, other: tuple[float, float]) -> None:
        self.other = torch.tensor(other, dtype=torch.float64)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor[0], tensor[2] = self.other

    def bucket_plan(self) -> BucketPlan:
        return BucketPlan(bucket_bytes=1 << 20, beside=True, bytes_per_s=12.5e6)


@pytest.mark.parametrize(("other", "chosen"), [((0.4, 0.001), "exact"), ((0.4, 0.3), "int8")])
def test_auto_does_not_take_a_slow_rank_for_a_slow_link(other: tuple[float, float], chosen: str) -> None:
    sync = make_sync("auto", [torch.nn.Parameter(torch.zeros(3))], SecondOfTwo(other), overlap=False)
    said = [sync.measured(0.1, 0.3) for _ in range(MEASURED_STEPS)]
    assert said[:-1] == [""] * (MEASURED_STEPS - 1)
    assert said[-1].startswith(f"sync {chosen}: a step computes 400 ms")
    assert said[-1].endswith("over a link of 12 MB/s")


def test_a_bucket_of_half_the_bits_has_twice_the_numbers() -> None:
    class Slow(SingleCommunicator):
        def bucket_plan(self) -> BucketPlan:
            return BucketPlan(bucket_bytes=4096, beside=False)

    parameters = [torch.nn.Parameter(torch.zeros(256)) for _ in range(40)]
    syncs = {name: make_sync(name, parameters, Slow(), overlap=None) for name in NAMES}
    largest = {name: max(flat.nbytes for flat in sync.buckets.flats) for name, sync in syncs.items()}
    assert largest["exact"] == largest["int8"] == 4096
    assert largest["bf16"] == largest["fp16"] == 8192
