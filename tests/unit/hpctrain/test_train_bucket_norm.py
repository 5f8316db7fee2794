"""How gradients are cut into buckets: by the link, in backward order, with little left for the end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.mpi import bucket_bytes
from hpctrain.exchange.buckets import PARTS, GradientBuckets


def cut(sizes: list[int], most: int) -> list[list[int]]:
    """The numbers of the parameters in each bucket, parameters given in the model's order."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    numbers = {id(parameter): at for at, parameter in enumerate(parameters)}
    buckets = GradientBuckets(parameters, SingleCommunicator(), bucket_bytes=4 * most)
    return [[numbers[id(p)] for p in group] for group in buckets.groups]


def test_buckets_go_from_the_last_parameter_to_the_first_and_end_with_a_small_one() -> None:
    assert cut([10, 10, 500, 60, 60], most=128) == [[4, 3], [2], [1, 0]]


def test_a_last_parameter_that_is_large_is_alone() -> None:
    assert cut([100, 10, 10], most=128) == [[2, 1], [0]]


def test_early_gradients_do_not_wait_for_a_large_one_near_the_end() -> None:
    assert cut([16, 192, 64, 256, 256, 256, 256], most=256) == [[6], [5], [4], [3], [2], [1], [0]]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(4, 400))
def test_every_parameter_is_in_one_bucket_in_order_and_none_is_too_full(sizes: list[int], most: int) -> None:
    buckets = cut(sizes, most)
    assert [at for bucket in buckets for at in bucket] == list(reversed(range(len(sizes))))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[at] for at in bucket) <= most
    assert len(buckets[-1]) == 1 or sum(sizes[at] for at in buckets[-1]) <= most // PARTS


@pytest.mark.parametrize(
    ("mbit_per_s", "kib"),
    [(1, 256), (100, 256), (900, 1024), (1100, 1024), (2500, 4096), (10_000, 16384), (400_000, 32768)],
)
def test_a_bucket_has_the_bytes_of_some_milliseconds_of_the_link(mbit_per_s: int, kib: int) -> None:
    assert bucket_bytes(mbit_per_s * 125e3) == kib << 10
