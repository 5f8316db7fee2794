"""A user's script that trains on a prepared data set: which token follows.  Says which samples each rank takes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from hpctrain.data import Windows
from hpctrain.options import add_options
from hpctrain.run import start


def main() -> int:
    parser = argparse.ArgumentParser()
    add_options(parser, warmup=20, schedule="cosine", clip=1.0, eval_every=0, lr=1e-2)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    with start(options, "tokens") as here:
        dataset = here.dataset(options.data)
        model = torch.nn.Sequential(torch.nn.Embedding(dataset.vocabulary, 8), torch.nn.Linear(8, dataset.vocabulary))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = Windows(dataset.split("train"), options.seed, length=4)
        for batch in here.steps(model, optimizer, data=data):
            print(f"rank {here.rank} step {batch.step} samples {batch.low} to {batch.high}", flush=True)
            inputs_BT, targets_BT = batch.samples
            batch.backward(F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten()))
        if here.is_first:
            print(f"weights sha256 {here.weights_sha256}")
    return here.status


if __name__ == "__main__":
    sys.exit(main())
