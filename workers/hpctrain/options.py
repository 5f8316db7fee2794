"""The command-line options that every training script has, so that jobs are told alike whatever they train.

Imports nothing heavy: `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """This will add the options of `hpctrain.run.start`; `defaults` replaces the defaults of some, by name."""
    _add_training(parser)
    _add_ranks(parser)
    _add_run(parser)
    parser.set_defaults(**defaults)


def positive(text: str) -> int:
    """This will read a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=positive, help="how many (default: 400, or by --target-seconds)")
    group.add_argument("--target-seconds", type=float, metavar="S", help="as many steps as fit, measured at the start")
    group.add_argument(
        "--batch", type=positive, default=32, help="samples per step, of all ranks together (%(default)s)"
    )
    group.add_argument("--lr", type=float, default=4e-3, help="highest learning rate (%(default)s)")
    group.add_argument("--warmup", type=int, default=20, metavar="STEPS", help="steps up to it (%(default)s)")
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="gradient norm's limit (%(default)s)")
    group.add_argument("--seed", type=int, default=1, help="of weights, samples and all else (%(default)s)")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--backend", choices=("auto", "mpi", "gloo", "nccl", "single"), default="auto", help="(%(default)s)"
    )
    group.add_argument(
        "--sync",
        default="exact",
        metavar="HOW",
        help="exact, bf16, fp16, int8, topk[:SHARE], powersgd[:RANK], local:H[:COMPRESSION] or auto (%(default)s)",
    )
    group.add_argument(
        "--shares",
        type=_shares,
        default="even",
        metavar="auto|even|W,W,..",
        help="samples per rank: by measured speed, the same for all, or relatively (%(default)s)",
    )
    group.add_argument("--overlap", action="store_true", help="exchange gradients beside backward, in a thread")
    group.add_argument("--threads", type=positive, help="of torch per rank (default: 1 under several ranks)")
    group.add_argument(
        "-v", "--verbose", action="store_true", help="say how ranks exchange, by size, with what was measured"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints, metrics.jsonl and model.pt")
    group.add_argument(
        "--resume", choices=("auto", "never"), default="auto", help="go on if DIR has checkpoints (%(default)s)"
    )
    group.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="steps; 0: never (%(default)s)")
    group.add_argument(
        "--base-every", type=positive, default=10, metavar="M", help="every M-th is a base (%(default)s)"
    )
    group.add_argument("--keep", type=positive, default=2, help="chains of base and increments kept (%(default)s)")
    group.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps; 0: never (%(default)s)")
    group.add_argument("--print-every", type=positive, default=10, metavar="N", help="steps (%(default)s)")


def _shares(text: str) -> str | tuple[float, ...]:
    if text in ("auto", "even"):
        return text
    weights = tuple(float(part) for part in text.split(","))
    if min(weights) < 0 or sum(weights) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: no weight may be negative, nor all zero")
    return weights
