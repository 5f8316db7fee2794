"""What is left when the story is over: files in ./demo-out, a sample of what the model writes, a table of figures.

Knows the share's files and the outcome's numbers; starts only the program that draws the loss curve.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcsched.demo.jobs import OUT_DIR, TRAIN_NAME
from hpcsched.demo.scene import tail_lines
from hpcsched.demo.story import Outcome
from hpcsched.demo.trainview import size_text
from hpcsched.demo.view import clock
from hpcsched.errors import UnavailableError

PLOT_TIMEOUT_S = 120.0
SAMPLE_LINES = 14
SAMPLE_WIDTH = 90
SAMPLE_BEGIN, SAMPLE_END = "--- sample ---", "--- end ---"


def save_results(share: Path, job_id: int, directory: Path) -> dict[str, Path]:
    """Copy model, metrics, log and other jobs' output from the share, draw the curve, and return where each lies.

    Raises UnavailableError where the directory cannot be written or the picture cannot be drawn.
    """
    kept = {
        "picture": directory / "loss.png",
        "model": directory / "model.pt",
        "metrics": directory / "metrics.jsonl",
        "log": directory / f"{TRAIN_NAME}.out",
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(share / OUT_DIR / "model.pt", kept["model"])
        shutil.copyfile(share / OUT_DIR / "metrics.jsonl", kept["metrics"])
        shutil.copyfile(share / f"{TRAIN_NAME}-{job_id}.out", kept["log"])
    except OSError as error:
        raise UnavailableError(f"cannot keep the results in {directory}: {error.strerror or error}") from None
    draw_curve(kept["metrics"], kept["picture"])
    return kept


def draw_curve(metrics: Path, picture: Path) -> None:
    """Draw the loss curve as a PNG. Raises UnavailableError."""
    command = [sys.executable, "-m", "hpctrain.plot", str(metrics), "-o", str(picture)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PLOT_TIMEOUT_S, check=False
    )
    if done.returncode != 0 or not picture.exists():
        raise UnavailableError(f"cannot draw the loss curve: {(done.stderr or done.stdout).strip()}")


def sample_of(log: Path) -> list[str]:
    """Return the last text that the model wrote at the end of its training."""
    lines = list(tail_lines(log, 1 << 20))
    if SAMPLE_BEGIN not in lines:
        return []
    start = len(lines) - lines[::-1].index(SAMPLE_BEGIN)
    text = lines[start:]
    if SAMPLE_END in text:
        text = text[: text.index(SAMPLE_END)]
    clean = ["".join(char if char.isprintable() else " " for char in line[:SAMPLE_WIDTH]).rstrip() for line in text]
    return [line for line in clean if line][:SAMPLE_LINES]


def closing_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return (name, value) of each figure."""
    training = outcome.training
    validation = training.kept_validation
    made = training.checkpoints
    full = [item.size_bytes for item in made if item.is_base]
    increments = [item.size_bytes for item in made if not item.is_base]
    loss = f"{validation[0].loss:.2f} -> {validation[-1].loss:.2f}" if validation else "-"
    return [
        ("cluster up", f"{outcome.cluster_up_s:.1f} s: three nodes, {outcome.server}"),
        ("job started", f"{outcome.start_s * 1e3:.0f} ms after it was submitted"),
        ("training", f"{training.step} steps on {training.world} ranks ({training.backend}), validation loss {loss}"),
        ("attempts", f"{1 + len(training.resumes)}"),
        (
            "lost and repeated",
            f"{len(training.lost)} steps (at step {outcome.lost_at}, resumed from {outcome.resumed_from})",
        ),
        ("checkpoints", f"{len(made)}: {_sizes(full, 'full')}, {_sizes(increments, 'increments')}"),
        (
            "controller killed",
            f"away for {outcome.controller_away_s:.1f} s, {outcome.steps_without_controller} steps done meanwhile",
        ),
        (
            "node lost",
            f"{outcome.lost_node} seen DOWN after {outcome.detect_s:.1f} s, off for {outcome.down_for_s:.1f} s",
        ),
        (
            "back at work",
            f"job running {outcome.requeue_s:.1f} s, first new step {outcome.resume_s:.1f} s after the power",
        ),
        ("the whole story", clock(outcome.total_s)),
    ]


def _sizes(sizes: Sequence[int], name: str) -> str:
    return f"{len(sizes)} {name} of {size_text(sum(sizes) / len(sizes))}" if sizes else f"no {name}"


def failure_logs(base: Path, share: Path, job_id: int) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the tails of the logs that tell why something failed: of the job, the controller, the nodes."""
    paths = [
        share / f"{TRAIN_NAME}-{job_id}.out",
        base / "etc/state/hpcschedd.log",
        base / "keeper.log",
        *sorted((base / "nodes").glob("*/agent/log")),
    ]
    found = [(path, tail_lines(path, 2000)[-15:]) for path in paths]
    return [(path, lines) for path, lines in found if lines]
