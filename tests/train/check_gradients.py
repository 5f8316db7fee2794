"""Runs on every rank: the exchanged gradient against that of one process on the same global batch."""

from __future__ import annotations

import os
import sys

import torch

from hpctrain.comm import connect
from hpctrain.comm.base import SingleCommunicator
from hpctrain.data import shares
from hpctrain.examples.chargpt import Gpt
from hpctrain.exchange.buckets import GradientBuckets

BATCH, CONTEXT = 7, 16


def gradients(comm: object, weights: list[float], overlap: bool) -> torch.Tensor:
    torch.manual_seed(3)
    model = Gpt(50, CONTEXT, layers=2, width=32, heads=2)
    tokens = torch.randint(50, (BATCH, CONTEXT + 1))
    buckets = GradientBuckets(model.parameters(), comm, bucket_bytes=8192, overlap=overlap)
    counts = shares(BATCH, weights)
    low = sum(counts[: comm.rank])
    for factor in (3.0, 1.0):  # the second pass shows that the first is forgotten
        buckets.zero()
        if counts[comm.rank]:
            rows = tokens[low : low + counts[comm.rank]]
            logits = model(rows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            (loss * (factor * counts[comm.rank] / BATCH)).backward()
        buckets.exchange()
        norm = float(torch.cat(buckets.flats).double().norm())
        assert abs(float(buckets.squares().sum()) ** 0.5 - norm) < 1e-9 * norm, "squares of other gradients"
    return torch.cat(buckets.flats)


def main() -> None:
    torch.set_num_threads(1)
    comm = connect(sys.argv[1], os.environ)
    alone = gradients(SingleCommunicator(), [1.0], overlap=False)
    for weights in ([1.0, 1.0], [5.0, 2.0], [1.0, 0.0]):
        together = [gradients(comm, weights, overlap) for overlap in (False, True)]
        assert torch.equal(*together), "overlapped exchange gives other bits"
        error = float((together[0] - alone).norm() / alone.norm())
        assert error < 1e-6, f"gradient off by {error} at shares {weights}"
    hashes = comm.all_gather_object(together[0].numpy().tobytes())
    assert len(set(hashes)) == 1
    if comm.rank == 0:
        print(f"gradients equal over {comm.name}")
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
