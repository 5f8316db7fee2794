"""The command-line options that every training script has, so that jobs are told alike whatever they train.

Imports nothing heavy: `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hpctrain.schedule import Course, LrRule, LrScale

WRITERS = ("tensorboard", "mlflow")


def add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """This will add the options of `hpctrain.run.start`; `defaults` replaces the defaults of some, by name."""
    _add_training(parser)
    _add_machine(parser)
    _add_ranks(parser)
    _add_run(parser)
    parser.set_defaults(**defaults)


def positive(text: str) -> int:
    """This will read a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def count(text: str) -> int:
    """This will read a number of at least 0, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def amount(text: str) -> float:
    """This will read a finite number of at least 0, for argparse."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def share(text: str) -> float:
    """This will read a number from 0 to 1, for argparse."""
    part = float(text)
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return part


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=positive, help="how many (default: 400, or by --target-seconds)")
    group.add_argument("--target-seconds", type=amount, metavar="S", help="as many steps as fit, measured at the start")
    group.add_argument(
        "--batch", type=positive, default=32, help="samples per step, of all ranks together (%(default)s)"
    )
    group.add_argument("--lr", type=amount, default=4e-3, help="highest learning rate (%(default)s)")
    group.add_argument("--warmup", type=count, default=20, metavar="STEPS", help="steps up to it (%(default)s)")
    group.add_argument(
        "--schedule",
        choices=tuple(course.value for course in Course),
        default=Course.COSINE.value,
        help="how it goes down from there (%(default)s)",
    )
    group.add_argument("--floor", type=share, default=0.05, metavar="SHARE", help="of it at the end (%(default)s)")
    group.add_argument(
        "--scale-lr",
        type=_lr_scale,
        default=LrScale(),
        metavar="linear:BASE|sqrt:BASE",
        help="--lr is meant for batches of BASE samples, a larger --batch gets more (default: not so)",
    )
    group.add_argument(
        "--ramp",
        type=_ramp,
        metavar="FIRST:STEPS",
        help="batches grow from FIRST samples to --batch within so many steps (default: they do not)",
    )
    group.add_argument(
        "--clip", type=amount, default=1.0, metavar="NORM", help="gradient norm's limit, 0: none (%(default)s)"
    )
    group.add_argument("--seed", type=int, default=1, help="of weights, samples and all else (%(default)s)")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision, memory and data")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of forward; weights and gradients stay fp32, fp16 scales the loss as it needs (%(default)s)",
    )
    group.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help="samples that a rank computes at once at the most; gradients are summed (default: all of its part)",
    )
    group.add_argument(
        "--stage",
        type=Path,
        metavar="DIR",
        help="on each node's own disk: copy the data set there first (default: read it where it is)",
    )
    group.add_argument(
        "--prefetch",
        type=count,
        default=2,
        metavar="N",
        help="pieces of data made ready beforehand, in a thread; 0: none (%(default)s)",
    )
    group.add_argument(
        "--recompute", action="store_true", help="keep less of forward in memory, compute blocks again for backward"
    )
    group.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="let torch.compile make the model faster; takes a minute or so at the start (BACKEND: %(const)s)",
    )


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
    group.add_argument(
        "--zero", action="store_true", help="each rank keeps a part of the optimizer's state (ZeRO-1), not all of it"
    )
    group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="exchange gradients beside the backward pass or not (default: beside it between hosts, after it within one)",
    )
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
    group.add_argument(
        "--checkpoint-every",
        type=_every,
        default=50,
        metavar="N|auto",
        help="steps; 0: never; auto: by what one costs and how often the run is interrupted (%(default)s)",
    )
    group.add_argument(
        "--base-every", type=positive, default=10, metavar="M", help="every M-th is a base (%(default)s)"
    )
    group.add_argument(
        "--checkpoint-writer",
        choices=("process", "thread"),
        default="process",
        help="who writes them: a process that goes on with it if training is killed, or a thread (%(default)s)",
    )
    group.add_argument("--keep", type=positive, default=2, help="chains of base and increments kept (%(default)s)")
    group.add_argument(
        "--keep-every", type=amount, default=0.0, metavar="HOURS", help="and one of so many hours (0: none older)"
    )
    group.add_argument("--eval-every", type=count, default=50, metavar="N", help="steps; 0: never (%(default)s)")
    group.add_argument(
        "--log",
        type=_writers,
        default=(),
        metavar="tensorboard,mlflow",
        help="write metrics for these too, if installed, beside metrics.jsonl (default: not)",
    )
    group.add_argument(
        "--profile",
        type=count,
        default=0,
        metavar="N",
        help="trace N steps of each rank into DIR/profile (%(default)s)",
    )
    group.add_argument("--print-every", type=positive, default=10, metavar="N", help="steps (%(default)s)")


def _every(text: str) -> int | None:
    return None if text == "auto" else count(text)


def _writers(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in WRITERS:
            raise argparse.ArgumentTypeError(f"{name!r}: there are {' and '.join(WRITERS)}")
    return names


def _shares(text: str) -> str | tuple[float, ...]:
    if text in ("auto", "even"):
        return text
    try:
        weights = tuple(amount(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write auto, even, or a number for each rank, e.g. 2,1") from None
    if sum(weights) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: not all weights may be zero")
    return weights


def _ramp(text: str) -> tuple[int, int]:
    first, _, steps = text.partition(":")
    try:
        return positive(first), positive(steps)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write FIRST:STEPS, e.g. 32:1000") from None


def _lr_scale(text: str) -> LrScale:
    rule, _, base = text.partition(":")
    try:
        return LrScale() if text == "none" else LrScale(rule=LrRule(rule), base=positive(base))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write linear:BASE or sqrt:BASE, e.g. linear:32") from None
