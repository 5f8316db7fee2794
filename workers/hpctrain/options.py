"""The command-line options that every training script has.

Imports nothing heavy: `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hpctrain.errors import TrainError
from hpctrain.optim.schedule import Course, LrRule, LrScale

WRITERS = ("tensorboard", "mlflow")
LENGTHS = ("steps", "epochs", "target_seconds")  # how long a run is, in one of three ways


def add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Add the options of `hpctrain.run.start`.

    `defaults` replaces the defaults of some, by name.

    Raises:
        TrainError: `defaults` give the length of a run twice.
    """
    _add_training(parser)
    _add_machine(parser)
    _add_ranks(parser)
    _add_run(parser)
    check_one_length(defaults)
    parser.set_defaults(**defaults)


def options_from(settings: Mapping[str, object]) -> argparse.Namespace:
    """Return the options for settings by name: `out`, `lr`, `scale_lr`, ...

    Values are as on the command line, or Python's own; None stands for the default.

    Raises:
        TypeError: a setting of that name does not exist.
        TrainError: a value is not allowed, or a setting is missing.
    """
    check_one_length(settings)
    parser = _Refusing(add_help=False, prog="start")
    add_options(parser)
    actions = {action.dest: action for action in parser._actions}
    words = []
    for name, value in settings.items():
        if name not in actions:
            near = difflib.get_close_matches(name, actions, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ": see hpctrain(1) for their names"
            raise TypeError(f"start() has no setting {name!r}{hint}")
        words += _words_of(actions[name], value)
    if settings.get("out") is None:
        raise TrainError("cannot start: give a directory for checkpoints and metrics: start(out=DIRECTORY)")
    return parser.parse_args(words)


class _Refusing(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(f"cannot start: {message.removeprefix('argument ')}")


def _words_of(action: argparse.Action, value: object) -> list[str]:
    """Return the command-line words for one setting."""
    name = action.option_strings[-1 if action.option_strings[0].count("-") == 1 else 0]
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        return [name if value else f"--no-{name[2:]}"]
    if action.nargs == 0 or isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, (tuple, list)):
        value = (":" if action.dest == "ramp" else ",").join(map(str, value))
    return [f"{name}={value}"]


def check_one_length(settings: Mapping[str, object]) -> None:
    """Raise TrainError if a script's settings give the length of a run twice."""
    given = [name for name in LENGTHS if settings.get(name) is not None]
    if len(given) > 1:
        raise TrainError(f"cannot give a run two lengths, {' and '.join(given)}: give one of them")


class _Length(argparse.Action):
    """An option for the length of a run.

    It replaces the other ones, including a script's defaults.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        for name in LENGTHS:
            setattr(namespace, name, values if name == self.dest else None)


def positive(text: str) -> int:
    """Read a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def count(text: str) -> int:
    """Read a number of at least 0, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def amount(text: str) -> float:
    """Read a finite number of at least 0, for argparse."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def share(text: str) -> float:
    """Read a number from 0 to 1, for argparse."""
    part = float(text)
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return part


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add_length(group)
    _add_learning_rate(group)
    group.add_argument(
        "--clip", type=amount, default=0.0, metavar="NORM", help="limit of the gradient's norm (%(default)g: none)"
    )
    group.add_argument("--seed", type=int, default=1, help="of weights, samples and all else (%(default)s)")


def _add_length(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--steps",
        type=positive,
        action=_Length,
        metavar="N",
        help="steps of the run (default: 400); of --steps, --epochs and --target-seconds the last one given counts",
    )
    group.add_argument("--epochs", type=positive, action=_Length, metavar="N", help="passes over the data")
    group.add_argument(
        "--target-seconds",
        type=amount,
        action=_Length,
        metavar="S",
        help="as many steps as fit into S seconds, measured at the start",
    )
    group.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="samples per step, summed over all ranks (default: a DataLoader's batch_size, else 32)",
    )


def _add_learning_rate(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=amount, metavar="RATE", help="peak learning rate (default: the optimizer's own)")
    group.add_argument(
        "--warmup",
        type=count,
        default=0,
        metavar="STEPS",
        help="steps in which the learning rate rises to its peak (%(default)s)",
    )
    group.add_argument(
        "--schedule",
        choices=tuple(course.value for course in Course),
        default=Course.CONSTANT.value,
        help="how the learning rate changes after the warm-up (%(default)s)",
    )
    group.add_argument(
        "--floor",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="share of the peak learning rate that cosine and linear end with (%(default)s)",
    )
    group.add_argument(
        "--scale-lr",
        type=_lr_scale,
        default=LrScale(),
        metavar="linear:BASE|sqrt:BASE",
        help="the learning rate is for batches of BASE samples; a larger --batch raises it (default: it does not)",
    )
    group.add_argument(
        "--ramp",
        type=_ramp,
        metavar="FIRST:STEPS",
        help="batches grow from FIRST samples to --batch in STEPS steps (default: they do not)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision, memory and data")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the forward pass; weights and gradients stay fp32; fp16 scales the loss (%(default)s)",
    )
    group.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help="at most N samples at once on a rank; gradients are accumulated (default: all samples of the rank)",
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
        help="batches loaded ahead, by a thread or by each worker; 0: none (%(default)s)",
    )
    group.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes of each rank that load samples of a torch Dataset (default: a DataLoader's num_workers, else 0)",
    )
    group.add_argument(
        "--recompute",
        action="store_true",
        help="save memory: keep the inputs of blocks only, and compute the blocks again in the backward pass",
    )
    group.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile the model with torch.compile; takes about a minute at the start (BACKEND: %(const)s)",
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
    group.add_argument("--zero", action="store_true", help="shard the optimizer's state over the ranks (ZeRO-1)")
    group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="overlap the exchange of gradients with the backward pass (default: between hosts only)",
    )
    group.add_argument(
        "--threads", type=positive, help="torch threads per rank (default: 1 if there are several ranks)"
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print how ranks exchange messages of each size, with the measurements",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for checkpoints, metrics.jsonl and model.pt"
    )
    group.add_argument(
        "--resume", choices=("auto", "never"), default="auto", help="continue if DIR has checkpoints (%(default)s)"
    )
    _add_checkpoints(group)
    _add_reports(group)


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--checkpoint-every",
        type=_every,
        default=50,
        metavar="N|auto",
        help="steps between checkpoints; 0: never; auto: by their cost and the rate of interruptions (%(default)s)",
    )
    group.add_argument(
        "--base-every", type=positive, default=10, metavar="M", help="every M-th checkpoint is a base (%(default)s)"
    )
    group.add_argument("--keep", type=positive, default=2, help="chains of a base and increments to keep (%(default)s)")
    group.add_argument(
        "--keep-every", type=amount, default=0.0, metavar="HOURS", help="also keep one chain per HOURS hours (0: none)"
    )
    group.add_argument(
        "--save-model",
        action=argparse.BooleanOptionalAction,
        help="write the weights to DIR/model.pt at the end, not encrypted (default: yes, unless checkpoints are encrypted)",
    )
    group.add_argument(
        "--checkpoint-key-file",
        type=Path,
        metavar="FILE",
        help="encrypt checkpoints with the key in FILE, 32 bytes in hexadecimal or base64, mode 0600 "
        "(default: $HPCTRAIN_CHECKPOINT_KEY_FILE, else they are not encrypted)",
    )
    group.add_argument(
        "--checkpoint-key-command",
        metavar="COMMAND",
        help="the same with the key that COMMAND prints, without a shell (default: $HPCTRAIN_CHECKPOINT_KEY_COMMAND)",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eval-every",
        type=count,
        metavar="N",
        help="steps between validations, 0: never; if the script passes a validation to run.steps "
        "(default: each epoch with --epochs, else 50)",
    )
    group.add_argument(
        "--patience",
        type=positive,
        metavar="N",
        help="stop after N validations without a lower loss; the best weights are in DIR/best.pt "
        "(default: do not stop)",
    )
    group.add_argument(
        "--log",
        type=_writers,
        default=(),
        metavar="tensorboard,mlflow",
        help="also write metrics for these programs, which have to be installed (default: metrics.jsonl only)",
    )
    group.add_argument(
        "--profile",
        type=count,
        default=0,
        metavar="N",
        help="trace N steps of each rank into DIR/profile (%(default)s)",
    )
    group.add_argument(
        "--print-every", type=positive, default=10, metavar="N", help="steps between lines of output (%(default)s)"
    )
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show a progress bar instead of lines, on a terminal and if rich is installed (default: yes)",
    )


def _every(text: str) -> int | None:
    return None if text == "auto" else count(text)


def _writers(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in WRITERS:
            raise argparse.ArgumentTypeError(f"{name!r}: the known ones are {' and '.join(WRITERS)}")
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
