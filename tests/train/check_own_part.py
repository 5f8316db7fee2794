"""Runs on every rank, which all pretend to be on hosts of their own: sums of each rank's part alone move shards to the same bits.

Beside it a replica goes the plain way, whose sums are whole.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from mpi4py import MPI

from hpctrain.comm import connect
from hpctrain.comm import hosts as hosts_module
from hpctrain.comm.ring import split
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.optim.adamw import AdamW, clip_factor, multiply
from hpctrain.optim.zero import ShardedOptimizer

STEPS, LIMIT = 4, 0.05


def main() -> None:
    name = hosts_module.identity()
    hosts_module.identity = lambda: (*name[:2], str(MPI.COMM_WORLD.rank))
    comm = connect("mpi", os.environ)
    torch.manual_seed(3)
    models = [torch.nn.Sequential(torch.nn.Linear(41, 70), torch.nn.Tanh(), torch.nn.Linear(70, 7)) for _ in range(2)]
    plain, shared = models
    shared.load_state_dict(plain.state_dict())
    both = [GradientBuckets(model.parameters(), comm, bucket_bytes=4096, overlap=True) for model in models]
    both[1].sum_own_part()
    sharded = ShardedOptimizer(shared, AdamW(shared.named_parameters()), both[1], comm)
    optimizers = [AdamW(plain.named_parameters()), sharded]
    for step in range(1, STEPS + 1):
        inputs = torch.randn(8, 41, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        norms = []
        for model, buckets in zip(models, both, strict=True):
            buckets.zero()
            F.cross_entropy(model(inputs), torch.arange(8) % 7).backward()
            buckets.exchange()
            norm, factor = clip_factor(buckets.squares(), LIMIT)
            assert factor < 1, norm
            norms.append(norm)
            multiply(buckets.flats, factor)
        assert norms[0] == norms[1], norms
        for whole, own in zip(both[0].flats, both[1].flats, strict=True):
            parts = list(zip(split(whole, comm.size), split(own, comm.size), strict=True))
            assert [torch.equal(*pair) for pair in parts] == [rank == comm.rank for rank in range(comm.size)]
        for optimizer in optimizers:
            optimizer.step(step, 0.01)
        assert all(map(torch.equal, plain.parameters(), shared.parameters())), f"other weights in step {step}"
    if comm.rank == 0:
        print(f"own parts on {comm.size}")
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
