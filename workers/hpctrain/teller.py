"""What rank 0 says of a run: lines for people on stdout, and one JSON object per step in metrics.jsonl.

Measures nothing; does not know what is trained.
"""

from __future__ import annotations

import argparse
import time

import torch

from hpctrain.checkpoint import Report
from hpctrain.comm import Communicator
from hpctrain.errors import EXIT_REQUEUE
from hpctrain.loop import Identity, Loop, Progress, StepReport
from hpctrain.metrics import MetricsFile
from hpctrain.signals import StopRequest


class Teller:
    """Rank 0's lines for people and for programs."""

    def __init__(
        self,
        options: argparse.Namespace,
        name: str,
        comm: Communicator,
        identity: Identity,
        progress: Progress,
        model: torch.nn.Module,
    ) -> None:
        self._options, self._comm, self._identity = options, comm, identity
        self._file = MetricsFile(options.out / "metrics.jsonl")
        self._resumed_from: int | None = progress.step or None
        count = sum(parameter.numel() for parameter in model.parameters())
        start = f"resumed from step {progress.step}" if progress.step else "a fresh start"
        print(
            f"{name}: {count / 1e6:.2f} M parameters, {comm.size} rank{'s' * (comm.size > 1)} over {comm.name}, "
            f"attempt {identity.attempt}, {start}",
            flush=True,
        )

    def step(self, report: StepReport) -> None:
        """Tell about one step."""
        self._file.write(self._line(report))
        self._resumed_from = None
        last = report.step == report.total_steps
        if last or report.val_loss is not None or report.step % self._options.print_every == 0:
            validation = f"  val {report.val_loss:.4f}" if report.val_loss is not None else ""
            print(
                f"step {report.step:5d}/{report.total_steps or '?'}  loss {report.loss:.4f}{validation}  "
                f"lr {report.lr:.2e}  {report.samples_per_s:6.0f} samples/s  {report.step_s * 1e3:5.0f} ms "
                f"({report.comm_s * 1e3:.0f} ms exchange)",
                flush=True,
            )
        if report.changed:
            print(f"step {report.step}: {report.changed}", flush=True)
        self._tell_checkpoint(report.checkpoint)

    def end(self, loop: Loop, stop: StopRequest, finished: bool) -> None:
        """Tell about what ended after the last step."""
        for late in loop.late_reports:
            self._tell_checkpoint(late)
            line = {"step": loop.progress.step, "attempt": self._identity.attempt, "time": round(time.time(), 3)}
            self._file.write(line | _checkpoint_facts(late))
        self._file.close()
        if not finished and stop.received is None:
            print("another rank was asked to stop", flush=True)
        if not finished:
            why = stop.received.name if stop.received else "a signal"
            print(f"stopped by {why} at step {loop.progress.step}, to be resumed (exit {EXIT_REQUEUE})", flush=True)

    def _line(self, report: StepReport) -> dict[str, object]:
        line: dict[str, object] = {
            "step": report.step,
            "total_steps": report.total_steps,
            "loss": round(report.loss, 6),
            "val_loss": None if report.val_loss is None else round(report.val_loss, 6),
            "lr": report.lr,
            "grad_norm": round(report.grad_norm, 6),
            "samples_per_s": round(report.samples_per_s, 2),
            "t_step_s": round(report.step_s, 6),
            "t_comm_s": round(report.comm_s, 6),
            "t_checkpoint_copy_s": round(report.checkpoint_copy_s, 6) or None,
            "shares": report.shares if len(report.shares) > 1 else None,
            "attempt": self._identity.attempt,
            "world": self._comm.size,
            "backend": self._comm.name,
            "resumed_from": self._resumed_from,
            "time": round(time.time(), 3),
        }
        return line | _checkpoint_facts(report.checkpoint)

    def _tell_checkpoint(self, report: Report | None) -> None:
        if report is None:
            return
        if report.error:
            print(f"checkpoint of step {report.step}: {report.error}", flush=True)
            return
        print(
            f"checkpoint: step {report.step}, {report.kind}, {report.stored_bytes / 1e6:.2f} MB, written in "
            f"{report.write_s * 1e3:.0f} ms (training waited {report.copy_s * 1e3:.1f} ms)",
            flush=True,
        )


def _checkpoint_facts(report: Report | None) -> dict[str, object]:
    if report is None:
        return {}
    return {
        "checkpoint_step": report.step,
        "checkpoint_kind": report.kind,
        "checkpoint_bytes": report.stored_bytes,
        "checkpoint_write_s": round(report.write_s, 6),
        "checkpoint_error": report.error,
    }
