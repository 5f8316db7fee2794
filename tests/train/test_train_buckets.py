"""Gradients in buckets: what a script does to them, what comes twice or not at all, and what rounding leaves over."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hpctrain.comm.base import SingleCommunicator, Work, done
from hpctrain.errors import TrainError
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.exchange.compress import compressor

WIDTH = 80  # enough that a layer is not sent in full for being small


class Mirror(SingleCommunicator):
    """A group of two, the other of whom has the same gradients."""

    size = 2

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        self.all_reduce(tensor)
        if then is not None:
            then()
        return done()


def model_and_buckets(sync: str, *, overlap: bool) -> tuple[torch.nn.Module, GradientBuckets]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    comm = Mirror()
    buckets = GradientBuckets(model.parameters(), comm, bucket_bytes=30_000, overlap=overlap)
    buckets.compress(compressor(sync, comm, buckets.shapes))
    return model, buckets


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7))).square().mean()


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def true_gradients() -> torch.Tensor:
    model, _ = model_and_buckets("exact", overlap=False)
    model.zero_grad()
    loss_of(model).backward()
    return gradients(model)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("sync", "one", "mean"), [("bf16", 1e-3, 3e-5), ("fp16", 1e-4, 1e-5)])
def test_rounding_errors_of_a_step_are_sent_in_later_ones(sync: str, one: float, mean: float, overlap: bool) -> None:
    model, buckets = model_and_buckets(sync, overlap=overlap)
    exact, total = 2 * true_gradients(), torch.zeros(())
    steps = 100
    for _ in range(steps):
        buckets.zero()
        loss_of(model).backward()
        buckets.exchange()
        total = total + gradients(model)
    assert one / 10 < float((gradients(model) - exact).norm() / exact.norm()) < 3 * one
    assert float((total / steps - exact).norm() / exact.norm()) < mean


def test_a_residual_is_sent_although_its_layer_has_no_gradient() -> None:
    model, buckets = model_and_buckets("bf16", overlap=True)
    exact = true_gradients()
    buckets.zero()
    loss_of(model).backward()
    buckets.exchange()
    first = gradients(model).clone()
    buckets.zero()
    model[2].bias.sum().backward()
    buckets.exchange()
    late = model[0].weight.grad
    assert late is not None
    missed = (2 * exact - first)[: late.numel()].view_as(late)
    assert float(missed.norm()) > 0
    assert float((late - missed).norm() / missed.norm()) < 1e-2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("sync", "off"), [("exact", 1e-6), ("bf16", 5e-3)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_script_that_zeroes_gradients_itself_loses_nothing(
    sync: str, off: float, overlap: bool, set_to_none: bool
) -> None:
    model, buckets = model_and_buckets(sync, overlap=overlap)
    exact = 2 * true_gradients()
    for _ in range(2):
        buckets.zero()
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model).backward()
        buckets.exchange()
        assert float((gradients(model) - exact).norm() / exact.norm()) < off
        assert float(buckets.squares().sum()) == pytest.approx(float(exact.square().sum()), rel=3 * off)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sync", ["bf16", "fp16"])
def test_after_a_gradient_that_was_not_finite_the_next_one_is(sync: str, overlap: bool) -> None:
    model, buckets = model_and_buckets(sync, overlap=overlap)
    for factor in (1.0, 1e39, float("nan"), 1.0):
        buckets.zero()
        (loss_of(model) * factor).backward()
        buckets.exchange()
        assert math.isfinite(buckets.squares().sum()) == (factor == 1.0)
    exact = 2 * true_gradients()
    assert float((gradients(model) - exact).norm() / exact.norm()) < 5e-3


def test_a_gradient_that_comes_again_while_it_may_be_on_its_way_is_refused() -> None:
    model, buckets = model_and_buckets("exact", overlap=True)
    buckets.zero()
    loss_of(model).backward()
    with pytest.raises(TrainError, match="a batch has one backward pass"):
        loss_of(model).backward()


def test_after_the_backward_pass_gradients_may_come_as_often_as_they_like() -> None:
    model, buckets = model_and_buckets("exact", overlap=False)
    buckets.zero()
    loss_of(model).backward()
    loss_of(model).backward()
    buckets.exchange()
    assert torch.allclose(gradients(model), 4 * true_gradients(), rtol=1e-5, atol=1e-9)


def test_the_norm_of_complex_gradients_is_that_of_their_numbers() -> None:
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.complex64))
    buckets = GradientBuckets([weight], SingleCommunicator(), bucket_bytes=30_000, overlap=False)
    buckets.zero()
    (weight * (3 + 4j)).real.sum().backward()
    buckets.exchange()
    assert float(buckets.squares().sum()) == pytest.approx(5 * 25)
