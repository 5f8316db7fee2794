"""Tensors travel between ranks with their type and shape."""

from __future__ import annotations

import pytest
import torch

from hpctrain.values import decode, encode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = torch.ones(shape).to(dtype)
    again = decode(encode({"weight": made}))["weight"]
    assert (again.dtype, again.shape) == (made.dtype, made.shape)
    assert torch.equal(again, made)
