"""Precision, pieces of batches, recomputing: what they change of a gradient, and what they must not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.batch import Batch, StepBatch, pieces_of
from hpctrain.errors import TrainError
from hpctrain.examples.chargpt import Gpt
from hpctrain.optim import precision
from hpctrain.optim.adamw import clip_factor, multiply
from hpctrain.optim.precision import LossScale, Precision, loss_scale_for
from hpctrain.run import recompute_blocks


def test_a_scale_halves_at_once_doubles_after_a_while_and_stays_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    scale = loss_scale_for(Precision.FP16, None)
    assert "the loss is scaled by 32768 from now on" in scale.learn(finite=False)
    assert [(scale.learn(finite=True), scale.value)[1] for _ in range(4)] == [2**15, 2**15, 2**16, 2**16]
    scale.learn(finite=False)
    assert (scale.value, scale.finite_steps) == (2**15, 0)


def test_a_loss_scale_is_restored_but_new_after_another_precision() -> None:
    scale = LossScale(value=8.0, finite_steps=7, dynamic=True)
    assert loss_scale_for(Precision.FP16, scale.to_state()) == scale
    assert loss_scale_for(Precision.FP16, LossScale().to_state()).value == precision.FIRST_SCALE
    assert loss_scale_for(Precision.BF16, scale.to_state()) == LossScale()


def test_gradients_that_no_scale_helps_are_an_error() -> None:
    with pytest.raises(TrainError, match="the gradient is not finite; try a lower learning rate"):
        LossScale().learn(finite=False)
    scale = LossScale(value=precision.LEAST_SCALE, dynamic=True)
    with pytest.raises(TrainError, match="not finite even with the loss scaled by 0.015625; try bf16 or fp32"):
        scale.learn(finite=False)


def squares(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([grad.double().square().sum() for grad in grads])


def test_clipping_sees_the_gradient_without_its_scale() -> None:
    for scale in (1.0, 1024.0):
        grads = [torch.tensor([3.0, 0.0]) * scale, torch.tensor([4.0]) * scale]
        norm, factor = clip_factor(squares(grads), 1.0, scale)
        multiply(grads, factor)
        assert norm == pytest.approx(5.0)
        assert torch.cat(grads).tolist() == pytest.approx([0.6, 0.0, 0.8])
    small = [torch.tensor([0.25]) * 1024]
    norm, factor = clip_factor(squares(small), 1.0, 1024.0)
    multiply(small, factor)
    assert norm == 0.25
    assert small[0].tolist() == [0.25]


@given(low=st.integers(0, 99), count=st.integers(0, 300), largest=st.one_of(st.none(), st.integers(1, 400)))
def test_pieces_cover_a_part_in_its_order_and_none_is_too_large(low: int, count: int, largest: int | None) -> None:
    pieces = pieces_of(low, low + count, largest)
    assert [index for first, end in pieces for index in range(first, end)] == list(range(low, low + count))
    assert all(first < end for first, end in pieces)
    sizes = [end - first for first, end in pieces]
    assert not sizes or max(sizes) <= min(largest or count, min(sizes) + 1)
    assert len(pieces) == (-(-count // largest) if largest else min(count, 1))


def gradient(model: torch.nn.Module, tokens: torch.Tensor, largest: int | None, scale: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    step = StepBatch(number=1, low=0, counts=[len(tokens)], rank=0)
    for low, high in pieces_of(*step.span(), largest):
        batch = Batch(low, high, 1, (high - low) * scale / step.size)
        step.pieces.append(batch)
        logits = model(tokens[low:high, :-1])
        batch.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[low:high, 1:].flatten()))
    assert step.loss > 0
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / scale


def test_a_batch_in_pieces_has_the_gradient_and_the_loss_of_the_whole() -> None:
    torch.manual_seed(1)
    model, tokens = Gpt(50, 16, layers=2, width=32, heads=2), torch.randint(50, (7, 17))
    whole = gradient(model, tokens, None)
    for largest in (1, 3):
        assert float((gradient(model, tokens, largest) - whole).norm() / whole.norm()) < 1e-6
    assert torch.equal(gradient(model, tokens, None, scale=2.0**16), whole)


def test_blocks_computed_twice_give_the_same_bits() -> None:
    torch.manual_seed(1)
    model, tokens = Gpt(50, 16, layers=2, width=32, heads=2), torch.randint(50, (7, 17))
    model.blocks.insert(1, torch.nn.Dropout(0.3))
    model.blocks[0].attended.requires_grad_(True)

    def seeded() -> torch.Tensor:
        torch.manual_seed(5)
        return gradient(model, tokens, None)

    once = seeded()
    calls: list[int] = []
    model.blocks[2].up.register_forward_hook(lambda *_: calls.append(1))
    seeded()
    assert len(calls) == 1
    assert recompute_blocks(model) == 2  # the dropout has nothing to keep
    assert torch.equal(seeded(), once)
    assert len(calls) == 3  # forward, and again for backward
    model.eval()
    model(tokens[:, :-1])
    assert len(calls) == 4


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(TrainError, match="the model has no torch.nn.ModuleList or Sequential of blocks"):
        recompute_blocks(torch.nn.Linear(2, 2))


def test_backward_of_half_precision_runs_outside_of_autocast() -> None:
    weights = torch.ones(4, 4, requires_grad=True)
    batch = Batch(0, 4, 1, 1.0)
    with Precision.BF16.autocast(weights.device):
        product = weights @ weights
        assert product.dtype == torch.bfloat16
        seen: list[bool] = []
        product.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        batch.backward(product.mean())
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32


def test_samples_without_a_source_are_refused() -> None:
    with pytest.raises(TrainError, match="was called without a source"):
        _ = Batch(0, 1, 1, 1.0).samples
