"""A training script whose ranks may differ: `telling.py WHAT OPTIONS...`, WHAT is same, model, optimizer, data, or python."""

from __future__ import annotations

import argparse
import platform
import sys

import torch
import torch.nn.functional as F

from hpctrain.options import add_options
from hpctrain.run import start


def main() -> int:
    what = sys.argv.pop(1)
    parser = argparse.ArgumentParser()
    add_options(
        parser,
        schedule="cosine",
        clip=1.0,
        batch=8,
        steps=12,
        warmup=0,
        checkpoint_every=6,
        eval_every=0,
        print_every=100,
        lr=1e-2,
    )
    options = parser.parse_args()
    with start(options, "telling") as here:
        odd = here.rank == here.size - 1
        if what == "python" and odd:
            platform.python_version = lambda: "3.9.1"
        model = torch.nn.Linear(4, 3 if what == "model" and odd else 2)
        inputs_NC = torch.arange(64.0).view(16, 4).sin()
        here.agree("data", inputs_NC + (what == "data" and odd))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 if what == "optimizer" and odd else 0.9)
        for batch in here.steps(model, optimizer, samples=16):
            rows = torch.arange(batch.low, batch.high) % 16
            batch.backward(F.mse_loss(model(inputs_NC[rows]), inputs_NC[rows, :2]))
    return here.status


if __name__ == "__main__":
    sys.exit(main())
