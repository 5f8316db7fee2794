"""Fine-tuning with most weights frozen: from the digits 0 to 4 to the digits 5 to 9.

    python -m hpctrain.examples.finetune --out run                       one process
    mpirun -n 2 python -m hpctrain.examples.finetune --out run           two ranks
    python -m hpctrain.examples.finetune --out run --unfreeze            for comparison: nothing is frozen

A few pictures of the new digits suffice, because the lower layers are trained already.  Their weights are trained at the start
(one process, some seconds) and saved in `pretrained.pt`; `--from FILE` uses your own.  Frozen weights are not exchanged, and
increments of a checkpoint do not contain them.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.env import require_or_exit

require_or_exit("finetune", "torch", "numpy", "blake3", "numcodecs", "sklearn")

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from hpctrain.data import Rows
from hpctrain.errors import TrainError
from hpctrain.options import add_options, positive
from hpctrain.run import Run, save_model, start


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the options say, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="finetune", description="Teach a trained network new digits, with frozen layers."
    )
    add_options(parser, batch=20, lr=1e-2, steps=80, warmup=5, schedule="cosine", clip=1.0)
    group = parser.add_argument_group("fine-tuning")
    group.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="initial weights (default: trained at the start)"
    )
    group.add_argument(
        "--pictures", type=positive, default=100, metavar="N", help="number of pictures of new digits (%(default)s)"
    )
    group.add_argument("--unfreeze", action="store_true", help="train all weights")
    options = parser.parse_args(arguments)
    return run(options)


KNOWN = 5  # digits below are learned before
PRETRAIN_STEPS = 150
PRETRAIN_BATCH = 64
FEATURES = 64 * 16  # inputs of the head


def run(options: argparse.Namespace) -> int:
    """Train on this rank; every rank calls it."""
    with start(options, "finetune") as here:
        images, names = digits()
        old = names < KNOWN
        new_images, new_names = images[~old], names[~old] - KNOWN
        model = network().to(here.device)
        model.load_state_dict(here.share(lambda: pretrained(here, options, images[old], names[old])))
        if not options.unfreeze:
            model.requires_grad_(False)
        model.head = torch.nn.Linear(FEATURES, 10 - KNOWN, device=here.device)  # for the new digits
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
        data = Rows({"image": new_images[: options.pictures], "name": new_names[: options.pictures]}, options.seed)
        test_images = torch.from_numpy(new_images[options.pictures :]).to(here.device)
        test_names = torch.from_numpy(new_names[options.pictures :]).to(here.device)

        def validation(part: int, parts: int) -> tuple[float, int]:
            wanted = test_names[part::parts]
            return float(F.cross_entropy(model(test_images[part::parts]), wanted, reduction="sum")), len(wanted)

        for batch in here.steps(model, optimizer, validation, data):
            batch.backward(F.cross_entropy(model(batch.samples["image"]), batch.samples["name"]))
        if here.finished and here.is_first:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            print(
                f"{100 * accuracy(model, test_images, test_names):.1f} % of {len(test_names)} unseen new digits "
                f"classified correctly, "
                f"{trained} of {sum(p.numel() for p in model.parameters())} weights trained",
                flush=True,
            )
    return here.status


def network() -> torch.nn.Sequential:
    """Return the network: convolutional layers, and a head that classifies."""
    eyes = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
    )
    model = torch.nn.Sequential()
    model.add_module("eyes", eyes)
    model.add_module("head", torch.nn.Linear(FEATURES, KNOWN))
    return model


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pictures (N, 1, 8, 8) and their digits."""
    found = load_digits()
    return (found.images.astype(np.float32) / 16.0)[:, None], found.target.astype(np.int64)


def pretrained(
    here: Run, options: argparse.Namespace, images: np.ndarray, names: np.ndarray
) -> dict[str, torch.Tensor]:
    """Return the initial weights; called on one rank."""
    path: Path = options.source or options.out / "pretrained.pt"
    if path.exists() or options.source:
        return weights_in(path)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = Rows({"image": images, "name": names}, options.seed)
    for low in range(0, PRETRAIN_STEPS * PRETRAIN_BATCH, PRETRAIN_BATCH):
        part = rows[low : low + PRETRAIN_BATCH]
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(part["image"])), torch.from_numpy(part["name"])).backward()
        optimizer.step()
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(path, model)
    print(f"finetune: learned the digits below {KNOWN}, saved in {path}", flush=True)
    return model.state_dict()


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a file.

    Raises:
        TrainError: it is none, or of another network.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        network().load_state_dict(weights)
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise TrainError(
            f"cannot begin with {path}: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    return weights


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, names: torch.Tensor) -> float:
    """Return the fraction of pictures that are classified correctly."""
    return float((model(images).argmax(dim=1) == names).float().mean())


if __name__ == "__main__":
    sys.exit(main())
