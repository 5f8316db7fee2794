"""Runs on every rank: the ring against a reference that each rank computes for itself."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

from hpctrain.comm.mpi import Algorithm
from hpctrain.comm.ring import Ring

LENGTHS = (1, 2, 3, 7, 64, 1000, 4097, 70001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def part(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 7919 + length)
    return torch.randn(length, generator=generator).mul(100).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float64: 1e-12, torch.int64: 0.0}.get(dtype, 0.0)


def check(ring: Algorithm, comm: MPI.Comm, length: int, dtype: torch.dtype, *, roundings: int = 1) -> None:
    parts = [part(rank, length, dtype) for rank in range(comm.size)]
    mine = parts[comm.rank].clone()
    ring.all_reduce(mine)
    exact = sum(p.double() for p in parts)
    if dtype in (torch.bfloat16, torch.float16) and roundings > 1:
        step = torch.finfo(dtype).eps * max(float(p.abs().max()) for p in parts) * comm.size
        assert torch.allclose(mine.double(), exact, rtol=0.0, atol=roundings * step), (length, dtype)
    elif dtype in (torch.bfloat16, torch.float16):  # summed in float32 in rank order, rounded once
        total = parts[0].float()
        for p in parts[1:]:
            total = total + p.float()
        assert torch.equal(mine, total.to(dtype)), (length, dtype)
    else:
        assert torch.allclose(mine.double(), exact, rtol=tolerance(dtype), atol=tolerance(dtype) * 100), (length, dtype)
    everyone = comm.allgather(mine.view(torch.uint8).numpy().tobytes())
    assert len(set(everyone)) == 1, f"ranks differ: {length} {dtype}"


def main() -> None:
    comm = MPI.COMM_WORLD
    # tiny segments and no shortcut; the shortcut alone; the real sizes
    for segment_bytes, small_bytes in ((256, 0), (1 << 20, 1 << 30), (1 << 20, 16 << 10)):
        ring = Ring(MPI, comm, segment_bytes=segment_bytes, small_bytes=small_bytes)
        for length in LENGTHS:
            for dtype in DTYPES:
                check(ring, comm, length, dtype)
    if comm.rank == 0:
        print(f"checked on {comm.size}")


if __name__ == "__main__":
    sys.exit(main())
