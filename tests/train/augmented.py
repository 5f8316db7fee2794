"""A script with a DataLoader whose dataset draws random numbers: `augmented.py OPTIONS...`; one line of numbers per step."""

from __future__ import annotations

import argparse
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from hpctrain.options import add_options
from hpctrain.run import start

COUNT, BATCH = 20, 6


class Noisy(Dataset):
    """Samples with noise of all three generators."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(2) + random.random() + np.random.rand()
        return torch.tensor([float(place), 1.0]).sin() + noise, place


def main() -> int:
    parser = argparse.ArgumentParser()
    add_options(parser, epochs=3, checkpoint_every=2, print_every=100)
    options = parser.parse_args()
    with start(options, "augmented") as run:
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True)
        for batch in run.steps(model, torch.optim.SGD(model.parameters(), lr=0.01), data=loader):
            inputs, places = batch.samples
            print(f"took {batch.step} {places.tolist()} {[round(x, 5) for x in inputs[:, 0].tolist()]}", flush=True)
            batch.backward(F.mse_loss(model.eval()(inputs), inputs[:, :1]))
    return run.status


if __name__ == "__main__":
    sys.exit(main())
