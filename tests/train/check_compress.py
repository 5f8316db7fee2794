"""Runs on every rank: each compressor's sum, its error feedback, and local steps, over the backend that is named."""

from __future__ import annotations

import os
import sys

import torch

from hpctrain.comm import connect
from hpctrain.exchange.compress import Exact, compressor
from hpctrain.exchange.sync import LocalSteps

SHAPES = [torch.Size((96, 80)), torch.Size((80,)), torch.Size((64, 7, 5))]
LENGTH = sum(shape.numel() for shape in SHAPES)
# How far a first sum may be from the exact one, and what all steps together are off, both relative to the exact sum's norm.
BOUNDS = {
    "exact": (1e-6, 1e-6),
    "bf16": (5e-3, 3e-3),
    "fp16": (1e-3, 4e-4),
    "int8": (2e-2, 2e-3),
    "topk:0.2": (0.7, 0.1),
}
BOUNDS["powersgd:8"] = (0.9, 0.35)
STEPS = 40


def part(rank: int) -> torch.Tensor:
    """A gradient that is nearly of low rank, as real ones are."""
    generator = torch.Generator().manual_seed(rank)
    pieces = []
    for shape in SHAPES:
        rows = shape[0]
        thin = torch.randn(rows, 3, generator=generator) @ torch.randn(3, shape.numel() // rows, generator=generator)
        pieces.append((thin + 0.1 * torch.randn(thin.shape, generator=generator)).reshape(-1))
    return torch.cat(pieces)


def main() -> None:
    comm = connect(sys.argv[1], os.environ)
    exact = sum(part(rank) for rank in range(comm.size))
    for name, (first, last) in BOUNDS.items():
        way = compressor(name, comm, lambda index: SHAPES)
        total = torch.zeros(LENGTH)
        for step in range(STEPS):
            flat = part(comm.rank)
            way.sum(0, flat)
            if step == 0:
                off = float((flat - exact).norm() / exact.norm())
                assert off <= first, (name, off)
            assert len(set(comm.all_gather_object(flat.numpy().tobytes()))) == 1, f"ranks differ: {name}"
            total += flat
        off = float((total / STEPS - exact).norm() / exact.norm())
        assert off <= last, (name, off)  # what was not sent at first came later
        flat = part(comm.rank)
        if comm.rank == comm.size - 1:
            flat[7] = float("nan")
        way.sum(0, flat)
        assert not torch.isfinite(flat).all(), f"{name} hides what is not finite"
        way.forget_what_is_not_finite()  # as the loop's norm of the gradients says
        way.sum(0, again := part(comm.rank))
        assert torch.isfinite(again).all(), f"{name} keeps what was not finite"
    check_local_steps(comm)
    if comm.rank == 0:
        print(f"compressed over {comm.name}")
    comm.barrier()
    comm.close()


def check_local_steps(comm) -> None:  # noqa: ANN001
    parameter = torch.nn.Parameter(torch.zeros(5000))
    local = LocalSteps([parameter], comm, Exact(comm), every=3)
    assert [step for step in range(1, 8) if local.due(step)] == [3, 6]
    with torch.no_grad():
        parameter += 1.0 + comm.rank
    local.exchange(1 / comm.size)
    mean = (
        1.0 + (comm.size - 1) / 2
    )  # the way of the mean, times the outer rate, and so much more by the first momentum
    assert torch.allclose(parameter, torch.full((5000,), 0.8 * 1.5 * mean)), parameter[:3]


if __name__ == "__main__":
    main()
