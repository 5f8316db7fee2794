"""Products with matrices: each maker computes what F.linear does, and one that does not is left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hpcserve import kernels
from hpcserve.kernels import BFLOAT16, LinearMaker, WeightKind, floats, make_linear, stacked
from hpcserve.weights import Int4Weight, Int8Weight, quantized_int4, quantized_int8

OUT, IN = 48, 64


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CHOSEN", {})
    monkeypatch.setattr(kernels, "_LEFT_OUT", set())


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))


def hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, IN, generator=torch.Generator().manual_seed(tokens))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize(
    ("kind", "most"),
    [("fp32", 1e-6), ("bf16", 0.01), ("int8", 0.03), ("int4", 0.12)],
    ids=["fp32", "bf16", "int8", "int4"],
)
def test_each_kind_multiplies(matrix: torch.Tensor, kind: str, most: float, tokens: int) -> None:
    bias = torch.arange(OUT).float()
    linear = make_linear(matrix, bias, WeightKind(kind))
    assert error(linear(hidden(tokens)), F.linear(hidden(tokens), matrix, bias)) < most


MAKERS = [(kind, maker) for kind in WeightKind for maker in kernels._makers(kind, "cpu")]


@pytest.mark.parametrize(("kind", "maker"), MAKERS, ids=[f"{kind}-{maker.name}" for kind, maker in MAKERS])
def test_each_maker_works_or_says_that_it_cannot(matrix: torch.Tensor, kind: WeightKind, maker: LinearMaker) -> None:
    weight = kernels._as_kind(matrix, kind)
    try:
        linear = maker.make(weight, None)
    except RuntimeError as failure:
        pytest.skip(f"not on this machine: {str(failure).splitlines()[0]}")
    for states in (hidden(1), hidden(7).bfloat16(), hidden(16).t().contiguous().t()):
        assert error(linear(states), F.linear(states.float(), floats(weight).float())) < 0.03


def test_a_maker_that_computes_wrongly_is_left_out(
    matrix: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(weight: kernels.Weight, bias: torch.Tensor | None) -> kernels.Linear:
        return lambda states: F.linear(states, 1.1 * floats(weight).float())

    def missing(weight: kernels.Weight, bias: torch.Tensor | None) -> kernels.Linear:
        raise RuntimeError("no such operator")

    bad = (LinearMaker(name="wrong", make=wrong), LinearMaker(name="missing", make=missing), BFLOAT16)
    monkeypatch.setattr(kernels, "_makers", lambda *_: bad)
    linear = make_linear(matrix, None, WeightKind.BF16)
    assert error(linear(hidden(3)), F.linear(hidden(3), matrix)) < 0.01
    assert "wrong is not used: it is wrong by 0.1" in caplog.text
    assert "missing is not used: no such operator" in caplog.text


def test_a_maker_that_is_missing_is_told_once_for_all_shapes(
    matrix: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(weight: kernels.Weight, bias: torch.Tensor | None) -> kernels.Linear:
        raise RuntimeError(f"no operator for {kernels._shape(weight)}")

    monkeypatch.setattr(kernels, "_makers", lambda *_: (LinearMaker(name="missing", make=missing), BFLOAT16))
    for rows in (OUT, OUT // 2, OUT // 4):
        make_linear(matrix[:rows], None, WeightKind.BF16)
    assert caplog.text.count("missing is not used") == 1


def test_a_maker_is_chosen_once_for_a_shape(matrix: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    make_linear(matrix, None, WeightKind.INT8)
    monkeypatch.setattr(kernels, "_fastest", None)
    make_linear(-matrix, None, WeightKind.INT8)


def test_large_activations_do_not_overflow_int8() -> None:
    weight = torch.full((16, 256), 0.5)
    states = torch.full((1, 256), 3.0)
    states[0, 0] = -3.0
    found = make_linear(weight, None, WeightKind.INT8)(states)
    assert error(found, F.linear(states, weight)) < 0.02


def test_columns_without_whole_groups_of_int4_stay_bfloat16() -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    states = torch.ones(2, 40)
    assert error(make_linear(weight, None, WeightKind.INT4)(states), F.linear(states, weight)) < 0.01


def test_stacked_rows_keep_their_numbers(matrix: torch.Tensor) -> None:
    for made in (quantized_int8, quantized_int4):
        pair = stacked([made(matrix), made(2 * matrix)])
        assert isinstance(pair, Int8Weight | Int4Weight)
        assert torch.equal(floats(pair), torch.cat([made(matrix).floats(), made(2 * matrix).floats()]))
    assert torch.equal(stacked([matrix, quantized_int8(matrix)])[:OUT], matrix)
