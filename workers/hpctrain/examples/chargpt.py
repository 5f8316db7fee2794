"""A GPT that learns to write Python from the standard library's source, or `--data`.

    python -m hpctrain.examples.chargpt --out run                      one process
    mpirun -n 2 python -m hpctrain.examples.chargpt --out run          two ranks, our ring
    torchrun --nproc-per-node 2 -m hpctrain.examples.chargpt --out run two ranks, Gloo or NCCL

    python -m hpctrain.data text --out texts --vocabulary 4096 FILE...  tokens of your own text, and then
    mpirun -n 2 python -m hpctrain.examples.chargpt --out run --data texts --stage /var/tmp

Run it again with the same --out to continue from the last checkpoint.  Exit status: 0 the training is finished, 75 stopped by
SIGTERM or SIGUSR1 with a checkpoint (queue the job again), 1 an error, 2 a wrong option.
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
from hpctrain.options import add_options, positive


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the options say, and return the exit status."""
    options = parse(arguments)
    try:
        require("torch", "numpy", "blake3", "numcodecs")
    except TrainError as error:
        print(f"chargpt: {error}", file=sys.stderr)
        return EXIT_FAILED
    from hpctrain.examples.chargpt_run import run  # noqa: PLC0415 (torch: only after the check)

    return run(options, os.environ)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="chargpt", description="Train a character-level GPT on the Python standard library's source."
    )
    add_options(parser, lr=4e-3, warmup=20, schedule="cosine", clip=1.0)
    _add_model(parser)
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} cannot be divided among --heads {options.heads}")
    return options


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="tokens made by `python -m hpctrain.data text` (default: characters)",
    )
    group.add_argument("--layers", type=positive, default=4, help="(%(default)s)")
    group.add_argument("--width", type=positive, default=128, help="(%(default)s)")
    group.add_argument("--heads", type=positive, default=4, help="(%(default)s)")
    group.add_argument(
        "--context", type=positive, default=64, help="length of the context in characters or tokens (%(default)s)"
    )
    group.add_argument(
        "--freeze", type=int, default=0, metavar="N", help="do not train the first N blocks (%(default)s)"
    )
    group.add_argument(
        "--sample", type=int, default=400, metavar="N", help="characters or tokens to write at the end (%(default)s)"
    )


if __name__ == "__main__":
    sys.exit(main())
