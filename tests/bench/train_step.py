"""Runs on every rank: samples per second of one small GPT with different ways to exchange gradients, in turns in one run.

Usage: train_step.py MODE... with modes alone (ranks do not talk: the limit), ddp:MB (torch DDP over Gloo with buckets of so
many MB), ddp:MB:bf16 (with its hook that sends bfloat16), ours (exact) and ours:SYNC (a word of `--sync`).  Rank 0 prints one
JSON line: for each mode the samples per second of all ranks together (each rank's by its own clock), of each step measured and
their median, and the milliseconds of CPU per step.
A turn is one mode's STEPS steps, of which the first, that follows another mode, is not counted.
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hpctrain.comm import connect
from hpctrain.comm.base import SingleCommunicator
from hpctrain.examples.gpt import Gpt
from hpctrain.optim import clip_factor, multiply
from hpctrain.sync import make_sync

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 6, 256, 8, 128, 8, 256
CLIP = 1.0  # as the loop does in every step
TURNS, STEPS = int(os.environ.get("BENCH_TURNS", "8")), 4


def main() -> None:
    """Run the modes in turns."""
    world = MPI.COMM_WORLD
    os.sched_setaffinity(0, {world.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    comm = connect("mpi", os.environ)
    steps = {mode: make(mode, comm, world) for mode in sys.argv[1:]}
    rates: dict[str, list[float]] = {mode: [] for mode in steps}
    cpu_ms: dict[str, list[float]] = {mode: [] for mode in steps}
    for turn in range(TURNS + 1):
        for mode, step in steps.items():
            step()
            world.Barrier()
            for _ in range(STEPS - 1):
                started_s, started_cpu_s = time.perf_counter(), time.process_time()
                step()
                spent_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
                if turn:
                    rates[mode].append(BATCH / spent_s)
                    cpu_ms[mode].append(1e3 * cpu_s)
    each = world.gather((rates, cpu_ms))
    if each is not None:
        together = {mode: [sum(step) for step in zip(*(one[0][mode] for one in each), strict=True)] for mode in steps}
        shown = {
            mode: {"median": statistics.median(r), "cpu_ms": statistics.median(cpu_ms[mode]), "all": r}
            for mode, r in together.items()
        }
        print(json.dumps(shown), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    comm.close()


def make(mode: str, comm, world) -> Callable[[], None]:  # noqa: ANN001
    """Return a function that does one training step in a mode."""
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS)
    tokens_BT = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(world.rank))
    kind, _, size = mode.partition(":")
    if kind == "ddp":
        megabytes, _, hook = size.partition(":")
        return ddp_step(model, tokens_BT, float(megabytes), world, bf16=hook == "bf16")
    buckets = make_sync(
        size or "exact", list(model.parameters()), comm if kind == "ours" else SingleCommunicator(), overlap=None
    ).buckets
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        buckets.zero()
        loss_of(model, tokens_BT).backward()
        buckets.exchange()
        multiply(buckets.flats, clip_factor(buckets.squares(), CLIP)[1])
        optimizer.step()

    return step


def ddp_step(
    model: torch.nn.Module,
    tokens_BT: torch.Tensor,
    megabytes: float,
    world,  # noqa: ANN001
    *,
    bf16: bool,
) -> Callable[[], None]:
    """Return one training step of torch's DistributedDataParallel over Gloo."""
    if not dist.is_initialized():
        address = world.bcast(os.environ.get("BENCH_ADDRESS", "127.0.0.1"))
        store = dist.TCPStore(address, 29555, world.size, is_master=world.rank == 0)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    if bf16:  # without its name, by which DDP refuses this hook on a CPU
        wrapped.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(wrapped, tokens_BT).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def loss_of(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the next-token loss."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


if __name__ == "__main__":
    main()
