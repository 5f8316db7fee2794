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
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.env import require
from hpctrain.errors import EXIT_FAILED, TrainError
from hpctrain.options import add_options, positive


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
    try:
        require("torch", "numpy", "blake3", "numcodecs", "sklearn")
    except TrainError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return EXIT_FAILED
    from hpctrain.examples.finetune_run import run  # noqa: PLC0415 (torch: only after the check)

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
