"""Prepare training data:

python -m hpctrain.data text --out DIR [--vocabulary N] FILE...      tokens from text
python -m hpctrain.data arrays --out DIR FILE.npz | FILE.npy...      rows of arrays
python -m hpctrain.data check DIR                                    check the checksums
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.data.dataset import TOKENIZER, Dataset
from hpctrain.data.prepare import LEAST_VOCABULARY, arrays_in, prepare_arrays, prepare_text, tokenizer_from
from hpctrain.errors import EXIT_FAILED, TrainError
from hpctrain.options import positive, share


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.act(options)
    except TrainError as error:
        print(f"hpctrain.data: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.data", description="Prepare training data.")
    acts = parser.add_subparsers(required=True, metavar="text|arrays|check")
    text = acts.add_parser("text", help="make a data set of tokens from text")
    text.add_argument(
        "paths", nargs="+", type=Path, metavar="FILE", help="text or .jsonl (or .gz of them), or a directory"
    )
    text.add_argument(
        "--vocabulary",
        type=positive,
        default=4096,
        metavar="N",
        help=f"tokens to learn, at least {LEAST_VOCABULARY} (%(default)s)",
    )
    text.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="use the tokenizer of this file or data set, instead of a new one",
    )
    text.add_argument("--field", default="text", help="key of the text in a line of .jsonl (%(default)s)")
    text.set_defaults(act=_text)
    arrays = acts.add_parser("arrays", help="make a data set of rows from arrays")
    arrays.add_argument("paths", nargs="+", type=Path, metavar="FILE", help=".npz, or an .npy for each array")
    arrays.set_defaults(act=_arrays)
    for made in (text, arrays):
        made.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
        made.add_argument(
            "--validation",
            type=share,
            default=0.02,
            metavar="SHARE",
            help="share of the samples for validation (%(default)s)",
        )
        made.add_argument(
            "--shard-mib", type=positive, default=64, metavar="N", help="largest size of a shard (%(default)s)"
        )
    check = acts.add_parser("check", help="print what a data set has, and check its checksums")
    check.add_argument("directory", type=Path, metavar="DIR")
    check.set_defaults(act=_check)
    return parser


def _text(options: argparse.Namespace) -> None:
    tokenizer = None
    if options.tokenizer is not None:
        path = options.tokenizer / TOKENIZER if options.tokenizer.is_dir() else options.tokenizer
        try:
            tokenizer = tokenizer_from(path.read_bytes(), str(path))
        except OSError as error:
            raise TrainError(f"cannot read {path}: {error.strerror}") from error
    prepare_text(
        options.out,
        options.paths,
        tokenizer=tokenizer,
        vocabulary=options.vocabulary,
        validation=options.validation,
        shard_bytes=options.shard_mib << 20,
        key=options.field,
    )
    _print_summary(Dataset(options.out))


def _arrays(options: argparse.Namespace) -> None:
    arrays: dict[str, np.ndarray] = {}
    for path in options.paths:
        arrays |= arrays_in(path)
    prepare_arrays(options.out, arrays, validation=options.validation, shard_bytes=options.shard_mib << 20)
    _print_summary(Dataset(options.out))


def _check(options: argparse.Namespace) -> None:
    dataset = Dataset(options.directory)
    for shard in dataset.shards():
        shard.check_all()
    dataset.tokenizer()
    _print_summary(dataset)
    print("no damage: every chunk matches its hash")


def _print_summary(dataset: Dataset) -> None:
    for name, entries in dataset.splits.items():
        print(f"{name}: {sum(entry.rows for entry in entries)} {dataset.kind} in {len(entries)} shards")
    if dataset.vocabulary is not None:
        print(f"vocabulary: {dataset.vocabulary}")


if __name__ == "__main__":
    sys.exit(main())
