"""A character-level GPT that learns to write Python, from the standard library's source.

    python -m hpctrain.examples.chargpt --out run                      one process
    mpirun -n 2 python -m hpctrain.examples.chargpt --out run          two ranks, our ring
    torchrun --nproc-per-node 2 -m hpctrain.examples.chargpt --out run two ranks, Gloo or NCCL

Run it again with the same --out and it goes on from the last checkpoint.  Exit status: 0 the training is finished, 75
stopped by SIGTERM or SIGUSR1 with a checkpoint made (queue me again), 1 an error, 2 a wrong option.
This module reads options and imports nothing heavy: `--help` and a missing package answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.env import require
from hpctrain.errors import EXIT_FAILED, TrainError


def main(arguments: Sequence[str] | None = None) -> int:
    """This will train as the options say, and return the exit status."""
    options = parse(arguments)
    try:
        require("torch", "numpy", "blake3", "zstandard")
    except TrainError as error:
        print(f"chargpt: {error}", file=sys.stderr)
        return EXIT_FAILED
    from hpctrain.examples.chargpt_run import run  # noqa: PLC0415 (torch: only after the check)

    return run(options, os.environ)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """This will read the options; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="chargpt", description="Train a character-level GPT on the Python standard library's source."
    )
    _add_training(parser)
    _add_model(parser)
    _add_run(parser)
    options = parser.parse_args(arguments)
    if options.steps is None and options.target_seconds is None:
        options.steps = 400
    if options.width % options.heads:
        parser.error(f"--width {options.width} cannot be divided among --heads {options.heads}")
    return options


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=_positive, help="how many (default: 400, or by --target-seconds)")
    group.add_argument("--target-seconds", type=float, metavar="S", help="as many steps as fit, measured at the start")
    group.add_argument(
        "--batch", type=_positive, default=32, help="samples per step, of all ranks together (%(default)s)"
    )
    group.add_argument("--lr", type=float, default=4e-3, help="highest learning rate (%(default)s)")
    group.add_argument("--warmup", type=int, default=20, metavar="STEPS", help="steps up to it (%(default)s)")
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="gradient norm's limit (%(default)s)")
    group.add_argument("--seed", type=int, default=1, help="of weights, samples and all else (%(default)s)")
    group.add_argument(
        "--shares",
        type=_shares,
        default="auto",
        metavar="auto|even|W,W,..",
        help="samples per rank: by measured speed, the same for all, or relatively (%(default)s)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--layers", type=_positive, default=4, help="(%(default)s)")
    group.add_argument("--width", type=_positive, default=128, help="(%(default)s)")
    group.add_argument("--heads", type=_positive, default=4, help="(%(default)s)")
    group.add_argument("--context", type=_positive, default=64, help="characters that it sees (%(default)s)")
    group.add_argument(
        "--freeze", type=int, default=0, metavar="N", help="do not train the first N blocks (%(default)s)"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints, metrics.jsonl and model.pt")
    group.add_argument(
        "--resume", choices=("auto", "never"), default="auto", help="go on if DIR has checkpoints (%(default)s)"
    )
    group.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="steps; 0: never (%(default)s)")
    group.add_argument(
        "--base-every", type=_positive, default=10, metavar="M", help="every M-th is a base (%(default)s)"
    )
    group.add_argument("--keep", type=_positive, default=2, help="chains of base and increments kept (%(default)s)")
    group.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps; 0: never (%(default)s)")
    group.add_argument("--print-every", type=_positive, default=10, metavar="N", help="steps (%(default)s)")
    group.add_argument(
        "--sample", type=int, default=400, metavar="N", help="characters to write at the end (%(default)s)"
    )
    group.add_argument(
        "--backend", choices=("auto", "mpi", "gloo", "nccl", "single"), default="auto", help="(%(default)s)"
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="say how ranks exchange, by size, with what was measured"
    )
    group.add_argument(
        "--sync",
        default="exact",
        metavar="HOW",
        help="exact, bf16, fp16, int8, topk[:SHARE], powersgd[:RANK], local:H[:COMPRESSION] or auto (%(default)s)",
    )
    group.add_argument("--overlap", action="store_true", help="exchange gradients beside backward, in a thread")
    group.add_argument("--threads", type=_positive, help="of torch per rank (default: 1 under several ranks)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _shares(text: str) -> str | tuple[float, ...]:
    if text in ("auto", "even"):
        return text
    weights = tuple(float(part) for part in text.split(","))
    if min(weights) < 0 or sum(weights) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: no weight may be negative, nor all zero")
    return weights


if __name__ == "__main__":
    sys.exit(main())
