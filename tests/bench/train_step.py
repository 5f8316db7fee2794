"""Runs on every rank: samples per second of one small GPT with different ways to exchange gradients, in turns in one run.

Usage: train_step.py MODE... with modes alone (ranks do not talk: the limit), ddp:MB (torch DDP over Gloo with buckets of so
many MB) and ours. Rank 0 prints one JSON line: the medians over the turns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from hpctrain.buckets import GradientBuckets
from hpctrain.comm import connect
from hpctrain.comm.base import SingleCommunicator
from hpctrain.examples.gpt import Gpt

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 6, 256, 8, 128, 8, 256
TURNS, STEPS = 5, 6


def main() -> None:
    """Run the modes in turns."""
    world = MPI.COMM_WORLD
    os.sched_setaffinity(0, {world.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    comm = connect("mpi", os.environ)
    steps = {mode: make(mode, comm, world) for mode in sys.argv[1:]}
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    for turn in range(TURNS + 1):
        for mode, step in steps.items():
            world.Barrier()
            started_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            spent_s = world.allreduce((time.perf_counter() - started_s) / STEPS, MPI.MAX)
            if turn:
                seconds[mode].append(spent_s)
    if comm.rank == 0:
        rates = {mode: [comm.size * BATCH / s for s in times_s] for mode, times_s in seconds.items()}
        print(json.dumps({mode: {"median": statistics.median(r), "all": r} for mode, r in rates.items()}), flush=True)
    world.Barrier()
    os._exit(0)  # Gloo's threads and DDP's hooks need no orderly end


def make(mode: str, comm, world) -> Callable[[], None]:  # noqa: ANN001
    """Return a function that does one training step in a mode."""
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS)
    tokens_BT = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(world.rank))
    kind, _, size = mode.partition(":")
    if kind == "ddp":
        return ddp_step(model, tokens_BT, float(size), world)
    buckets = GradientBuckets(
        model.parameters(), comm if kind == "ours" else SingleCommunicator(), overlap=kind == "ours"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        buckets.zero()
        loss_of(model, tokens_BT).backward()
        buckets.exchange()
        optimizer.step()

    return step


def ddp_step(model: torch.nn.Module, tokens_BT: torch.Tensor, megabytes: float, world) -> Callable[[], None]:  # noqa: ANN001
    """Return one training step of torch's DistributedDataParallel over Gloo."""
    if not dist.is_initialized():
        address = world.bcast(os.environ.get("BENCH_ADDRESS", "127.0.0.1"))
        store = dist.TCPStore(address, 29555, world.size, is_master=world.rank == 0)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(wrapped, tokens_BT).backward()
        optimizer.step()

    return step


def loss_of(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the next-token loss."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


if __name__ == "__main__":
    main()
