"""Handwritten digits, 8 by 8 pixels, classified by a small convolutional network.

The data comes with scikit-learn.

    python -m hpctrain.examples.digits --out run                one process
    mpirun -n 2 python -m hpctrain.examples.digits --out run    two ranks

A whole training script: a model, an optimizer, a data source and one loop.  It ends with the accuracy on unseen digits.
Options, checkpoints and exit status are those of every hpctrain script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hpctrain.env import require_or_exit

require_or_exit("digits", "torch", "numpy", "blake3", "numcodecs", "sklearn")

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from hpctrain.data import Rows
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options
from hpctrain.run import start

TEST_SHARE = 5  # every fifth digit is for the test


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the options say, and return the exit status."""
    parser = argparse.ArgumentParser(prog="digits", description="Train a small network to read handwritten digits.")
    add_options(parser, batch=64, lr=3e-3, steps=300, warmup=20, schedule="cosine", clip=1.0)
    options = parser.parse_args(arguments)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Train on this rank; every rank calls it."""
    with start(options, "digits") as here:
        digits = load_digits()
        images_NCHW, names_N = digits.images.astype(np.float32)[:, None] / 16, digits.target.astype(np.int64)
        for_test = np.arange(len(names_N)) % TEST_SHARE == 0
        data = Rows({"image": images_NCHW[~for_test], "name": names_N[~for_test]}, options.seed)
        test_images = torch.from_numpy(images_NCHW[for_test]).to(here.device)
        test_names = torch.from_numpy(names_N[for_test]).to(here.device)
        here.agree("data", images_NCHW)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(64 * 16, 10),
        ).to(here.device)

        def validation(part: int, parts: int) -> tuple[float, int]:
            names = test_names[part::parts]
            return float(F.cross_entropy(model(test_images[part::parts]), names, reduction="sum")), len(names)

        for batch in here.steps(model, AdamW(model.named_parameters()), validation, data):
            digits = batch.samples
            batch.backward(F.cross_entropy(model(digits["image"]), digits["name"]))
        if here.finished and here.is_first:
            with torch.no_grad():
                right = float((model(test_images).argmax(dim=1) == test_names).float().mean())
            print(f"{100 * right:.1f} % of {len(test_names)} unseen digits classified correctly", flush=True)
    return here.status


if __name__ == "__main__":
    sys.exit(main())
