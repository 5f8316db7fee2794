"""Runs on every rank: samples per second of one small GPT with different ways to exchange gradients, in turns in one run.

Usage: train_step.py MODE... with modes alone (ranks do not talk: the limit), floor and floor:bf16 (two ranks; bare sockets carry
as many bytes, see `train_floor`), ddp:MB (torch DDP over Gloo with buckets of so many MB), ddp:MB:bf16 (with its hook that sends
bfloat16), ours (exact) and ours:SYNC (a word of `--sync`).
A round is one turn of each mode, in an order that changes, so that what else the machine does hits all of them alike.  A turn
is STEPS steps, of which the first, that follows another mode, is not counted.  Rank 0 prints one JSON line: for each mode, by
round, the median samples per second of all ranks together (each rank's by its own clock); and for each step in the median
what it cost the first rank: CPU of the thread that trains and of all others in ms, its wait at the exchange in ms, and
how often each kind of thread was switched to.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_floor
from mpi4py import MPI
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hpctrain.comm import connect
from hpctrain.comm.base import SingleCommunicator
from hpctrain.examples.chargpt import Gpt
from hpctrain.exchange.sync import make_sync
from hpctrain.optim.adamw import clip_factor, multiply

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 6, 256, 8, 128, 8, 256
CLIP = 1.0  # as the loop does in every step
ROUNDS, STEPS = int(os.environ.get("BENCH_ROUNDS", "12")), 3


@dataclass(frozen=True, slots=True)
class Cost:
    """What this process has used so far."""

    own_cpu_ms: float  # of the thread that trains
    other_cpu_ms: float
    own_switches: int
    other_switches: int

    @classmethod
    def now(cls) -> Cost:
        """Return what it is."""
        own, all_of_us = (resource.getrusage(who) for who in (resource.RUSAGE_THREAD, resource.RUSAGE_SELF))
        own_ms, all_ms = 1e3 * time.thread_time(), 1e3 * time.process_time()
        own_switches, switches = (one.ru_nvcsw + one.ru_nivcsw for one in (own, all_of_us))
        return cls(own_ms, all_ms - own_ms, own_switches, switches - own_switches)

    def since(self, before: Cost) -> dict[str, float]:
        """Return what was used in between."""
        return {name: value - getattr(before, name) for name, value in asdict(self).items()}


def main() -> None:
    """Run the modes in turns."""
    world = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    comm = connect("mpi", os.environ)
    steps = {mode: make(mode, comm, world) for mode in sys.argv[1:]}
    rates: dict[str, list[list[float]]] = {mode: [] for mode in steps}  # by round, of each step
    costs: dict[str, list[dict[str, float]]] = {mode: [] for mode in steps}
    order = list(steps)
    for number in range(ROUNDS + 1):
        random.Random(number).shuffle(order)  # alike on all ranks
        for mode in order:
            steps[mode]()
            world.Barrier()
            turn = []
            for _ in range(STEPS - 1):
                started_s, before = time.perf_counter(), Cost.now()
                waited_ms = steps[mode]()
                turn.append(BATCH / (time.perf_counter() - started_s))
                if number:
                    costs[mode].append(Cost.now().since(before) | {"waited_ms": waited_ms})
            if number:
                rates[mode].append(turn)
    each = world.gather(rates)
    if each is not None:
        shown = {
            mode: {
                "rates": [statistics.median(map(sum, zip(*turn, strict=True))) for turn in zip(*of_ranks, strict=True)],
                "costs": {name: statistics.median(one[name] for one in costs[mode]) for name in costs[mode][0]},
            }
            for mode in steps
            for of_ranks in [[one[mode] for one in each]]
        }
        print(json.dumps(shown), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    comm.close()


def make(mode: str, comm, world) -> Callable[[], float]:  # noqa: ANN001
    """Return a function that does one training step in a mode, and returns how many ms it waited for others."""
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS)
    tokens_BT = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(world.rank))
    kind, _, size = mode.partition(":")
    if kind == "ddp":
        megabytes, _, hook = size.partition(":")
        return ddp_step(model, tokens_BT, float(megabytes), world, bf16=hook == "bf16")
    parameters = list(model.parameters())
    groups = make_sync(size or "exact", parameters, comm, overlap=False).buckets.groups
    if kind == "ours":
        buckets = make_sync(size or "exact", parameters, comm, overlap=None).buckets
    else:
        buckets = make_sync("exact", parameters, SingleCommunicator(), overlap=None).buckets
    carrier = None
    if kind == "floor":
        number_bytes = 2 if size == "bf16" else 4
        peer = train_floor.connect(world, os.environ.get("BENCH_ADDRESS", "127.0.0.1"))
        carrier = train_floor.Carrier(peer, [number_bytes * sum(p.numel() for p in group) for group in groups])
        carrier.watch(groups)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> float:
        buckets.zero()
        if carrier is not None:
            carrier.begin()
        loss_of(model, tokens_BT).backward()
        _, waited_s = buckets.exchange()
        squares = buckets.squares()
        if carrier is not None:
            started_s = time.perf_counter()
            carrier.wait()
            waited_s = time.perf_counter() - started_s
        multiply(buckets.flats, clip_factor(squares, CLIP)[1])
        optimizer.step()
        return 1e3 * waited_s

    return step


def ddp_step(
    model: torch.nn.Module,
    tokens_BT: torch.Tensor,
    megabytes: float,
    world,  # noqa: ANN001
    *,
    bf16: bool,
) -> Callable[[], float]:
    """Return one training step of torch's DistributedDataParallel over Gloo, which does not say how long it waits."""
    if not dist.is_initialized():
        address = world.bcast(os.environ.get("BENCH_ADDRESS", "127.0.0.1"))
        store = dist.TCPStore(address, 29555, world.size, is_master=world.rank == 0)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    if bf16:  # without its name, by which DDP refuses this hook on a CPU
        wrapped.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        loss_of(wrapped, tokens_BT).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return 0.0

    return step


def loss_of(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the next-token loss."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


if __name__ == "__main__":
    main()
