"""Draw the loss curve of a run: `python -m hpctrain.plot OUT/metrics.jsonl -o loss.png`.

Reads metrics.jsonl only; the run may still be running.
Rules: of a step that was done twice, the higher attempt counts; lost work is drawn faintly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.env import require
from hpctrain.errors import EXIT_FAILED, TrainError
from hpctrain.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, VALIDATION, RESTART, CHECKPOINT, FAINT = "#9db8d9", "#c8482c", "#444444", "#3b7d4f", "#ececec"
SMOOTHING = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The data of the picture: lists of (step, value), or of steps."""

    loss: list[tuple[int, float]]
    validation: list[tuple[int, float]]
    lost: list[list[tuple[int, float]]]  # per attempt that was killed: the steps that had to be done again
    restarts: list[tuple[int, int]]  # (step resumed from, attempt)
    bases: list[int]
    increments: list[int]
    total_steps: int


def read_curve(path: Path) -> Curve:
    """Read a run's metrics.

    Raises:
        TrainError: the file is missing, or has no step yet.
    """
    try:
        lines = list(read_metrics(path))
    except OSError as error:
        raise TrainError(f"cannot plot {path}: {error.strerror}") from error
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise TrainError(f"cannot plot {path}: it has no step yet")
    final: dict[int, dict] = {}
    for line in steps:
        if line["attempt"] >= final.get(line["step"], line)["attempt"]:
            final[line["step"]] = line
    used = [final[step] for step in sorted(final)]
    bases, increments = _checkpoints(lines)
    return Curve(
        loss=[(line["step"], line["loss"]) for line in used],
        validation=[(line["step"], line["val_loss"]) for line in used if "val_loss" in line],
        lost=_lost(steps, final),
        restarts=[(line["resumed_from"], line["attempt"]) for line in steps if line.get("resumed_from")],
        bases=bases,
        increments=increments,
        total_steps=max(used[-1]["step"], used[-1].get("total_steps") or 0),
    )


def _lost(steps: list[dict], final: dict[int, dict]) -> list[list[tuple[int, float]]]:
    """Return (step, loss) of steps that were done again, per attempt that lost some."""
    attempts = sorted({line["attempt"] for line in steps})
    lost = [
        [(line["step"], line["loss"]) for line in steps if line["attempt"] == a and final[line["step"]] is not line]
        for a in attempts
    ]
    return [part for part in lost if part]


def _checkpoints(lines: list[dict]) -> tuple[list[int], list[int]]:
    """Return the steps of bases, and of increments."""
    made = [line for line in lines if "checkpoint_step" in line and "checkpoint_bytes" in line]
    bases = [line["checkpoint_step"] for line in made if line["checkpoint_kind"] == "base"]
    return bases, [line["checkpoint_step"] for line in made if line["checkpoint_kind"] != "base"]


def smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the exponential moving average, without the bias of the start."""
    average, weight, result = 0.0, 0.0, []
    for step, value in points:
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append((step, average / weight))
    return result


def draw(curve: Curve, path: Path, title: str) -> None:
    """Draw the curve into a PNG file."""
    import matplotlib  # noqa: PLC0415 (only after the check that it is there)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=140, layout="constrained")
    axes.plot(*zip(*curve.loss, strict=True), color=LOSS, linewidth=0.8, alpha=0.7)
    axes.plot(*zip(*smooth(curve.loss), strict=True), color="#2f5f9e", linewidth=2, label="training loss (smoothed)")
    for number, part in enumerate(curve.lost):
        label = "done again after a restart" if number == 0 else None
        axes.axvspan(part[0][0] - 1, part[-1][0], color=FAINT, linewidth=0, zorder=0, label=label)
    if curve.validation:
        axes.plot(
            *zip(*curve.validation, strict=True),
            color=VALIDATION, linewidth=1.6, marker="o", markersize=4.5, markeredgecolor="white",
            label="validation loss",
        )  # fmt: skip
        step, value = curve.validation[-1]
        axes.annotate(
            f"{value:.2f}", (step, value), xytext=(6, -2), textcoords="offset points", color=VALIDATION, weight="bold"
        )
    _mark_restarts(axes, curve)
    _mark_checkpoints(axes, curve)
    axes.set_xlim(0, curve.total_steps * 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    # Outside of the axes, where it hides neither the curve nor the text of a restart.
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def _mark_restarts(axes: Axes, curve: Curve) -> None:
    for step, attempt in curve.restarts:
        axes.axvline(step, color=RESTART, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f" attempt {attempt} resumes\n from step {step}",
            (step, 0.78), xycoords=("data", "axes fraction"), fontsize=8.5, color=RESTART,
        )  # fmt: skip


def _mark_checkpoints(axes: Axes, curve: Curve) -> None:
    """Draw ticks along the lower edge, long ones for bases."""
    edge = axes.get_xaxis_transform()
    for steps, height, label in ((curve.bases, 0.035, "checkpoint: base"), (curve.increments, 0.018, "increment")):
        if steps:
            width = 2.2 if height > 0.02 else 1.4
            axes.vlines(steps, 0, height, color=CHECKPOINT, linewidth=width, transform=edge, label=label)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the curve, and return the exit status."""
    parser = argparse.ArgumentParser(prog="hpctrain.plot", description="Draw the loss curve of a training run.")
    parser.add_argument("metrics", type=Path, help="OUT/metrics.jsonl of the run")
    parser.add_argument("-o", "--output", type=Path, default=Path("loss.png"), help="PNG file (%(default)s)")
    parser.add_argument("--title", default="", help="default: a summary of the run")
    options = parser.parse_args(arguments)
    try:
        require("matplotlib")
        curve = read_curve(options.metrics)
    except TrainError as error:
        print(f"hpctrain.plot: {error}", file=sys.stderr)
        return EXIT_FAILED
    restarts = len(curve.restarts)
    summary = f"{curve.loss[-1][0]} steps, {restarts} restart{'s' * (restarts != 1)}, loss {curve.loss[-1][1]:.2f}"
    try:
        draw(curve, options.output, options.title or summary)
    except OSError as error:
        print(f"hpctrain.plot: cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    print(f"wrote {options.output}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
