"""What rank 0 says of a run: lines for people on stdout, and one JSON object per step in metrics.jsonl.

Measures nothing; does not know what is trained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import torch

from hpctrain.checkpoint import Report
from hpctrain.comm import Communicator
from hpctrain.errors import EXIT_REQUEUE
from hpctrain.goodput import Goodput
from hpctrain.heartbeat import Heartbeat, Word
from hpctrain.loop import Loop
from hpctrain.progress import Identity, Progress, StepReport
from hpctrain.record import Record
from hpctrain.scaling import RankTimes, Scaling
from hpctrain.signals import StopRequest
from hpctrain.writers import Writers

PACE = 0.1  # what a step weighs in the pace that is told


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
        environ: Mapping[str, str],
        hosts: Sequence[str],
        epoch_samples: int | None,
        goodput: Goodput,
        record: Record,
    ) -> None:
        self._options, self._comm, self._identity, self._goodput = options, comm, identity, goodput
        self._heartbeat = Heartbeat(environ)
        self._file, self._kept = record.file, record.kept
        self._epoch_samples = epoch_samples
        self._scaling = Scaling(hosts)
        self._writers = Writers(options.log, options.out, name, {"ranks": comm.size, **_plain(vars(options))})
        self._pace_s = 0.0  # seconds of a step, the last ones counting most
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
        line = self._line(report, time.time())
        self._file.write(line)
        self._writers.write({name: value for name, value in line.items() if value is not None})
        self._scaling.note(report.step_s, report.times)
        self._resumed_from = None
        if line["interrupted_s"] is not None:
            print(
                f"step {report.step}: {line['interrupted_s']:.2f} s after the one before the interruption", flush=True
            )
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
        self._pace_s += (report.step_s - self._pace_s) * (PACE if self._pace_s else 1.0)
        if last or self._heartbeat.due():
            self._beat(report)

    def make_up(self, report: StepReport, over_at_s: float) -> None:
        """Tell about the last step, which was over then, if the rank that had to is lost and did not."""
        if report.step != self._goodput.told_step + 1:
            return
        interrupted = self._goodput.last_at_s is not None
        self._goodput.last_at_s = None
        self._file.write(self._line(report, over_at_s))
        self._goodput.last_at_s = over_at_s if interrupted else None

    def _beat(self, report: StepReport) -> None:
        """Tell the scheduler."""
        rate = 1.0 / self._pace_s
        self._heartbeat.say(
            Word(
                step=report.step,
                total_steps=report.total_steps or 0,
                loss=report.loss,
                samples_per_s=rate * sum(report.shares),
                steps_per_s=rate,
                checkpoint_step=self._kept.step,
                checkpoint_at_s=self._kept.at_s,
                goodput=self._goodput.share(time.time()),
                note=self._kept.away or self._scaling.straggler(),
            )
        )

    def end(self, loop: Loop, stop: StopRequest, finished: bool) -> None:
        """Tell about what ended after the last step."""
        for late in loop.late_reports:
            self._tell_checkpoint(late)
            line = {"step": loop.progress.step, "attempt": self._identity.attempt, "time": round(time.time(), 3)}
            self._file.write(line | _checkpoint_facts(late))
        self._file.close()
        self._writers.close()
        if summary := self._scaling.summary():
            print(summary, flush=True)
        print(self._goodput.describe(time.time()), flush=True)
        if loop.ended and not finished:
            print(f"ended by the script at step {loop.progress.step}", flush=True)
            return
        if not finished and stop.received is None:
            print("another rank was asked to stop", flush=True)
        if not finished:
            why = stop.received.name if stop.received else "a signal"
            print(f"stopped by {why} at step {loop.progress.step}, to be resumed (exit {EXIT_REQUEUE})", flush=True)

    def _line(self, report: StepReport, now_s: float) -> dict[str, object]:
        line: dict[str, object] = {
            "step": report.step,
            "total_steps": report.total_steps,
            "loss": round(report.loss, 6),
            "val_loss": None if report.val_loss is None else round(report.val_loss, 6),
            "lr": report.lr,
            "grad_norm": round(report.grad_norm, 6),
            "loss_scale": report.loss_scale,
            "batch": sum(report.shares),
            "samples_per_s": round(report.samples_per_s, 2),
            "samples": report.samples,
            "epoch": round(report.samples / self._epoch_samples, 6) if self._epoch_samples else None,
            "t_step_s": round(report.step_s, 6),
            "t_data_s": round(report.data_s, 6),
            "t_forward_s": round(report.forward_s, 6),
            "t_backward_s": round(report.backward_s, 6),
            "t_wait_s": round(report.wait_s, 6),
            "t_comm_s": round(report.comm_s, 6),
            "t_checkpoint_copy_s": round(report.checkpoint_copy_s, 6) or None,
            "bytes": report.exchanged_bytes,
            "ranks": _rank_facts(report.times),
            "shares": report.shares if len(report.shares) > 1 else None,
            "attempt": self._identity.attempt,
            "world": self._comm.size,
            "backend": self._comm.name,
            "resumed_from": self._resumed_from,
            "time": round(now_s, 3),
        }
        return line | self._goodput.step(report.step_s, now_s) | _checkpoint_facts(report.checkpoint)

    def _tell_checkpoint(self, report: Report | None) -> None:
        if report is None:
            return
        self._kept.away = f"checkpoints: {report.error}" if report.error else ""
        if report.error:
            print(f"checkpoint of step {report.step}: {report.error}", flush=True)
            return
        self._kept.step, self._kept.at_s = report.step, time.monotonic()
        print(
            f"checkpoint: step {report.step}, {report.kind}, {report.stored_bytes / 1e6:.2f} MB, written in "
            f"{report.write_s * 1e3:.0f} ms (training waited {report.copy_s * 1e3:.1f} ms)",
            flush=True,
        )
        if report.note:
            print(f"checkpoint: {report.note}", flush=True)


def _rank_facts(times: RankTimes | None) -> dict[str, list[float]] | None:
    """What each rank's own work and wait took, and getting data within its work."""
    if times is None or len(times.own_s) == 1:
        return None
    parts = (("t_own_s", times.own_s), ("t_data_s", times.data_s), ("t_wait_s", times.wait_s))
    return {name: [round(seconds, 6) for seconds in values] for name, values in parts}


def _plain(options: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


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
