"""Rank 0's reports: lines or a bar on stdout, metrics.jsonl, and heartbeats.

Measures nothing but the energy of its node; does not know what is trained.

Source of the counters of energy: Documentation/admin-guide/pm/intel-rapl and Documentation/power/powercap of the kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import SUFFIX, checkpoint_names, from_bytes
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.comm import Communicator
from hpctrain.env import StopRequest
from hpctrain.errors import EXIT_REQUEUE, CheckpointKeyError, DamagedError
from hpctrain.exchange.balance import RankTimes, Scaling
from hpctrain.heartbeat import Heartbeat, HeartbeatStatus
from hpctrain.loop import RunIdentity, StepReport, TrainingLoop, TrainingProgress
from hpctrain.metrics import MetricsFile, Writers
from hpctrain.settings import TrainSettings, epochs_text
from hpctrain.values import travels

# ----- goodput: the share of a run's time in steps that count, over all attempts
# Each line of metrics.jsonl carries it.  The time begins with the run's first attempt, and includes restarts and waiting in
# a queue.  A step that has to be taken again, because the run resumes from an older checkpoint, does not count.


@travels
@dataclass(slots=True, kw_only=True)
class Goodput:
    """The goodput account of a run; times are epoch seconds."""

    began_at_s: float
    useful_s: float = 0.0  # of steps that count
    interruptions: int = 0  # how often ranks were lost, or the run was started again
    lost_steps: int = 0  # steps that had to be taken again
    last_at_s: float | None = None  # end of the last step, if the run was interrupted after it
    reported_step: int = 0  # the last step in metrics.jsonl

    def step(self, step_s: float, now_s: float) -> dict[str, object]:
        """Count a step that ended at `now_s`, and return its entries for metrics.jsonl."""
        self.useful_s += step_s
        interrupted_s = None if self.last_at_s is None else round(now_s - self.last_at_s, 3)
        self.last_at_s = None
        return {
            "goodput": round(self.share(now_s), 4),
            "useful_s": round(self.useful_s, 6),
            "began_at_s": round(self.began_at_s, 3),
            "interruptions": self.interruptions,
            "interrupted_s": interrupted_s,  # from the end of the step before
            "lost_steps": self.lost_steps,
        }

    def share(self, now_s: float) -> float:
        """Return useful time divided by all time until `now_s`, 0 to 1."""
        return min(1.0, self.useful_s / max(now_s - self.began_at_s, 1e-9))

    def describe(self, now_s: float) -> str:
        """Return one line of text."""
        return (
            f"goodput: {self.share(now_s):.1%}, {self.useful_s:.1f} s of steps in {now_s - self.began_at_s:.1f} s; "
            f"interrupted {self.interruptions} times, {self.lost_steps} steps lost"
        )


def resume_goodput(
    lines: Iterator[Mapping[str, Any]],
    step: int,
    *,
    interrupted: bool,
    began_at_s: float,
    seen: Mapping[str, Any] | None = None,
) -> Goodput:
    """Return the account from lines of metrics, newest first, for a run at `step`.

    Or a new one.

    `interrupted`: ranks were lost, or the run was started again; false if ranks joined or left in order.
    `seen`: the account after the last step that this rank saw; a lost rank may not have written its last lines.
    """
    accounts: Iterator[Mapping[str, Any]] = (line for line in lines if "useful_s" in line)
    newest = next(accounts, None)
    if seen is not None and (newest is None or newest["step"] + 1 < seen["step"]):
        newest, accounts = seen, chain([newest] if newest else [], accounts)
    if newest is None:
        return Goodput(began_at_s=began_at_s)
    useful_s = next((line["useful_s"] for line in chain([newest], accounts) if line["step"] <= step), 0.0)
    return Goodput(
        began_at_s=newest["began_at_s"],
        useful_s=useful_s,
        interruptions=newest["interruptions"] + interrupted,
        lost_steps=newest["lost_steps"] + max(0, newest["step"] - step),
        last_at_s=newest["time"] if interrupted else None,
        reported_step=newest["step"],
    )


# ----- steps for each kilowatt-hour of this node's processors, where the kernel shows their energy
# Most kernels show it to root only. The scheduler knows the energy of all nodes of a job, with their GPUs: `hacct --energy`.

POWERCAP = Path("/sys/class/powercap")
ENERGY_EVERY_S = 60.0  # a counter begins again after a quarter of a megajoule: some hours at 20 W, minutes at 300 W
JOULES_PER_KWH = 3.6e6


class ProcessorEnergy:
    """The energy of the processors and the memory of this node since `begin`."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if _is_counted(zone)]
        self._counts: dict[Path, int] = {}
        self._joules = self._next_s = 0.0
        self._first_step: int | None = None

    def begin(self, step: int) -> None:
        """Count energy and steps from now on, unless they are counted already."""
        if self._first_step is None:
            self._first_step = step
            self._counts = {zone: count for zone in self._zones if (count := _counter(zone / "energy_uj")) is not None}
            self._next_s = time.monotonic() + ENERGY_EVERY_S

    def sample(self, now_s: float) -> None:
        """Read the counters if it is time for that; `now_s`: of the monotonic clock."""
        if self._counts and now_s >= self._next_s:
            self._next_s = now_s + ENERGY_EVERY_S
            for zone, before in self._counts.items():
                count = _counter(zone / "energy_uj")
                if count is not None:
                    again = (_counter(zone / "max_energy_range_uj") or 0) if count < before else 0
                    self._joules += max(0, count + again - before) / 1e6
                    self._counts[zone] = count

    def describe(self, step: int, hosts: Sequence[str]) -> str:
        """Return one line of text; "" if the energy is not known.

        `hosts`: of each rank, this one's first.
        """
        self.sample(self._next_s)
        steps = step - (self._first_step or 0)
        if self._joules <= 0 or steps <= 0:
            return ""
        kwh, nodes = self._joules / JOULES_PER_KWH, len(set(hosts))
        where = "this node" if nodes == 1 else f"{hosts[0]}, 1 of {nodes} nodes"
        return f"energy: {kwh:.3g} kWh of the processors of {where} (RAPL), {steps / kwh:,.0f} steps per kWh"


def _is_counted(zone: Path) -> bool:
    """Return whether a zone is a package, or memory, which is not a part of a package."""
    try:
        name = (zone / "name").read_text().strip()
    except OSError:
        return False
    return name.startswith("package") or name == "dram"


def _counter(path: Path) -> int | None:
    """Return the number in a file of the kernel, None if it cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# ----- what every rank records, so that it can take over from a lost first rank
# Lines that the share has not taken, the goodput account, the last checkpoint.


@dataclass(slots=True)
class LastCheckpoint:
    """The last published checkpoint, of any attempt."""

    step: int = 0
    at_s: float = 0.0  # on the monotonic clock
    away: str = ""  # why a later checkpoint is not on the share


class RunRecord:
    """A rank's record of one run, whose files are in `out`."""

    def __init__(self, out: Path) -> None:
        self._out, self._began_at_s = out, time.time()
        self.last_checkpoint, self.energy = LastCheckpoint(), ProcessorEnergy()
        self._followed: Goodput | None = None
        self._seen: Mapping[str, Any] | None = None  # the account after the last step while another rank was first

    @cached_property
    def file(self) -> MetricsFile:
        """The metrics file, for the rank that writes it."""
        return MetricsFile(self._out / "metrics.jsonl")

    def account(self, step: int, *, interrupted: bool) -> Goodput:
        """Return the run's goodput account at `step`, on the rank that reports."""
        lines = self.file.backwards()
        return resume_goodput(lines, step, interrupted=interrupted, began_at_s=self._began_at_s, seen=self._seen)

    def follow(self, account: Goodput) -> None:
        """Continue the account of the rank that reports."""
        self._followed = account

    def count_step(self, step: int, step_s: float) -> None:
        """Count a step that another rank reports."""
        if self._followed is not None:
            now_s = time.time()
            self._seen = {"step": step, "time": now_s} | self._followed.step(step_s, now_s)

    def look_for_checkpoint(self, distrusted: Collection[str], key: CheckpointKey | None = None) -> None:
        """Find the newest checkpoint if none is known.

        An unreadable one is skipped, because people only see it.
        """
        directory = self._out / "checkpoints"
        with suppress(OSError):  # the share is away
            names = (
                []
                if self.last_checkpoint.step
                else [name for name in checkpoint_names(directory) if name not in distrusted]
            )
            for name in names:
                with suppress(DamagedError, CheckpointKeyError):
                    facts = from_bytes(name, (directory / (name + SUFFIX)).read_bytes(), key).facts
                    self.last_checkpoint.step = facts.step
                    self.last_checkpoint.at_s = time.monotonic() - (time.time() - facts.written_at_s)
                    return


NEWEST_WEIGHT = 0.1  # weight of the newest step in the moving average
BAR_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReporterSetup:
    """What a reporter reports of, and where. `hosts`: of each rank."""

    options: argparse.Namespace
    name: str
    comm: Communicator
    identity: RunIdentity
    progress: TrainingProgress
    model: torch.nn.Module
    environ: Mapping[str, str]
    hosts: Sequence[str]
    settings: TrainSettings
    goodput: Goodput
    record: RunRecord


class Reporter:
    """Rank 0's reports of a run, for people and programs."""

    def __init__(self, setup: ReporterSetup) -> None:
        options, name, comm, progress = setup.options, setup.name, setup.comm, setup.progress
        self._options, self._comm, self._identity, self._goodput = options, comm, setup.identity, setup.goodput
        self._heartbeat = Heartbeat(setup.environ)
        self._file, self._last_checkpoint = setup.record.file, setup.record.last_checkpoint
        self._hosts, self._energy = setup.hosts, setup.record.energy
        self._energy.begin(progress.step)
        self._settings, self._epoch_samples = setup.settings, setup.settings.batches.epoch_samples
        self._last: StepReport | None = None
        self._bar: Bar | None = None
        self._scaling = Scaling(setup.hosts)
        self._writers = Writers(options.log, options.out, name, {"ranks": comm.size, **_plain(vars(options))})
        self._mean_step_s = self._mean_samples = 0.0  # moving averages of the steps
        self._resumed_from: int | None = progress.step or None
        count = sum(parameter.numel() for parameter in setup.model.parameters())
        start = f"resumed from step {progress.step}" if progress.step else "a fresh start"
        print(
            f"{name}: {count / 1e6:.2f} M parameters, {comm.size} rank{'s' * (comm.size > 1)} over {comm.name}, "
            f"attempt {setup.identity.attempt}, {start}",
            flush=True,
        )
        print(f"{name}: {setup.settings.described(progress.total_steps)}", flush=True)
        if progress.step:
            self._send_first_heartbeat(progress)
        if options.progress and can_show_bar():
            self._bar = Bar(name, progress)

    def step(self, report: StepReport) -> None:
        """Report one step."""
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
        self._last = report
        self._energy.sample(time.monotonic())
        weight = NEWEST_WEIGHT if self._mean_step_s else 1.0
        self._mean_step_s += (report.step_s - self._mean_step_s) * weight
        self._mean_samples += (sum(report.shares) - self._mean_samples) * weight
        if self._bar is not None:
            self._bar.step(
                report, self._epoch_text(report), self._left_s(report), self._mean_samples / self._mean_step_s
            )
        shown = report.step % self._options.print_every == 0 and self._bar is None
        if last or report.val_loss is not None or shown:
            print(self._text(report), flush=True)
        if report.changed:
            print(f"step {report.step}: {report.changed}", flush=True)
        self._report_checkpoint(report.checkpoint)
        if last or self._heartbeat.due():
            self._send_heartbeat(report)

    def _text(self, report: StepReport) -> str:
        """Return a step as one line of text."""
        epoch, left_s = self._epoch_text(report), self._left_s(report)
        parts = [
            f"step {report.step:5d}/{report.total_steps or '?'}",
            f"epoch {epoch}" if epoch else "",
            f"loss {report.loss:.4f}",
            f"val {report.val_loss:.4f}" if report.val_loss is not None else "",
        ]
        if self._bar is not None:  # the bar shows the rest
            return "  ".join(filter(None, parts))
        parts += [
            f"lr {report.lr:.2e}",
            f"{report.samples_per_s:6.0f} samples/s",
            f"{report.step_s * 1e3:5.0f} ms ({report.comm_s * 1e3:.0f} ms exchange)",
            f"ETA {duration_text(left_s)}" if left_s else "",
        ]
        return "  ".join(filter(None, parts))

    def _epoch_text(self, report: StepReport) -> str:
        """Return the epochs done and their total as text; empty if an epoch's length is not known."""
        samples, batches = self._epoch_samples, self._settings.batches
        if not samples:
            return ""
        total = batches.epochs or (batches.epochs_in(report.total_steps) if report.total_steps else None)
        digits = 1 if total is None or total >= 1 else 3
        return f"{report.samples / samples:.{digits}f}" + (f"/{epochs_text(total)}" if total else "")

    def _left_s(self, report: StepReport) -> float | None:
        """Return the seconds until the last step, by the average of recent steps."""
        return (report.total_steps - report.step) * self._mean_step_s if report.total_steps else None

    def report_done(self, step: int) -> None:
        """Print that no steps are left."""
        print(f"all {step} steps are done: give more --steps or --epochs, or another --out", flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def report_missed(self, report: StepReport, over_at_s: float) -> None:
        """Report the last step, which ended at `over_at_s`, if the rank that had to do so is lost."""
        if report.step != self._goodput.reported_step + 1:
            return
        interrupted = self._goodput.last_at_s is not None
        self._goodput.last_at_s = None
        self._file.write(self._line(report, over_at_s))
        self._goodput.last_at_s = over_at_s if interrupted else None

    def _send_heartbeat(self, report: StepReport) -> None:
        """Send a heartbeat."""
        rate = 1.0 / self._mean_step_s
        self._heartbeat.send(
            HeartbeatStatus(
                step=report.step,
                total_steps=report.total_steps or 0,
                loss=report.loss,
                samples_per_s=rate * self._mean_samples,
                steps_per_s=rate,
                checkpoint_step=self._last_checkpoint.step,
                checkpoint_at_s=self._last_checkpoint.at_s,
                goodput=self._goodput.share(time.time()),
                note=self._last_checkpoint.away or self._scaling.straggler(),
                directory=str(self._options.out / "checkpoints"),
            )
        )

    def _send_first_heartbeat(self, progress: TrainingProgress) -> None:
        """Send the step from which the run resumes; the scheduler has an earlier attempt's number."""
        self._heartbeat.send(
            HeartbeatStatus(
                step=progress.step,
                total_steps=progress.total_steps or 0,
                loss=math.nan,
                samples_per_s=0.0,
                steps_per_s=0.0,
                checkpoint_step=self._last_checkpoint.step,
                checkpoint_at_s=self._last_checkpoint.at_s,
                goodput=self._goodput.share(time.time()),
                note=self._last_checkpoint.away,
                directory=str(self._options.out / "checkpoints"),
            )
        )

    def end(self, loop: TrainingLoop, stop: StopRequest, finished: bool, saved: Path | None) -> None:
        """Report the end of the run; `saved`: the path of the model."""
        self.close()
        for late in loop.late_reports:
            self._report_checkpoint(late)
            line = {"step": loop.progress.step, "attempt": self._identity.attempt, "time": round(time.time(), 3)}
            self._file.write(line | _checkpoint_facts(late))
        self._file.close()
        self._writers.close()
        if self._last is not None:
            self._send_heartbeat(self._last)  # with the last checkpoint
            if summary := self._scaling.summary():
                print(summary, flush=True)
            print(self._goodput.describe(time.time()), flush=True)
            if energy := self._energy.describe(loop.progress.step, self._hosts):
                print(energy, flush=True)
        if saved is not None:
            print(f"model saved to {saved}", flush=True)
        if loop.ended and not finished:
            print(loop.why_ended, flush=True)
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

    def _report_checkpoint(self, report: CheckpointReport | None) -> None:
        if report is None:
            return
        self._last_checkpoint.away = f"checkpoints: {report.error}" if report.error else ""
        if report.error:
            print(f"checkpoint of step {report.step}: {report.error}", flush=True)
            return
        self._last_checkpoint.step, self._last_checkpoint.at_s = report.step, time.monotonic()
        print(
            f"checkpoint: step {report.step}, {report.kind}, {report.stored_bytes / 1e6:.2f} MB, written in "
            f"{report.write_s * 1e3:.0f} ms (training waited {report.copy_s * 1e3:.1f} ms)",
            flush=True,
        )
        if report.note:
            print(f"checkpoint: {report.note}", flush=True)


def can_show_bar() -> bool:
    """Return whether stdout is a terminal that can redraw a line, and rich is installed."""
    if not sys.stdout.isatty() or not importlib.util.find_spec("rich"):
        return False
    from rich.console import Console  # noqa: PLC0415 (nodes may not have it)

    return Console().is_interactive  # with TERM=dumb rich shows nothing until the end


class Bar:
    """A progress bar on a terminal; other output appears above it."""

    def __init__(self, name: str, progress: TrainingProgress) -> None:
        from rich.console import Console  # noqa: PLC0415 (nodes may not have it)
        from rich.progress import BarColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as Live  # noqa: PLC0415

        console = Console()
        texts = ("{task.description}", "{task.completed:.0f}/{task.fields[of]}", "{task.fields[facts]}")
        first, *others = (TextColumn(text, markup=False) for text in texts)
        self._live = Live(first, BarColumn(bar_width=None), *others, console=console, auto_refresh=False, expand=True)
        whole = progress.total_steps
        self._task = self._live.add_task(name, completed=progress.step, total=whole, facts="", of=whole or "?")
        self._live.start()
        console.show_cursor(True)  # a killed process could not show it again
        self._shown_at_s = float("-inf")

    def step(self, report: StepReport, epoch: str, left_s: float | None, rate: float) -> None:
        """Show one step, unless another was shown a moment ago."""
        now_s = time.monotonic()
        last = report.step == report.total_steps
        if now_s - self._shown_at_s < BAR_EVERY_S and not last:
            return
        self._shown_at_s = now_s
        facts = [
            f"epoch {epoch}" if epoch else "",
            f"loss {report.loss:.4f}",
            f"{rate:.0f} samples/s",
            f"ETA {duration_text(left_s)}" if left_s else "",
        ]
        self._live.update(
            self._task,
            completed=report.step,
            total=report.total_steps,
            of=report.total_steps or "?",
            facts="  ".join(filter(None, facts)),
            refresh=True,
        )

    def close(self) -> None:
        """Leave the bar as it is, and print below it from now on."""
        self._live.stop()


def duration_text(seconds: float) -> str:
    """Return seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _rank_facts(times: RankTimes | None) -> dict[str, list[float]] | None:
    """Return each rank's seconds of own work, wait, and data within its work."""
    if times is None or len(times.own_s) == 1:
        return None
    parts = (("t_own_s", times.own_s), ("t_data_s", times.data_s), ("t_wait_s", times.wait_s))
    return {name: [round(seconds, 6) for seconds in values] for name, values in parts}


def _plain(options: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


def _checkpoint_facts(report: CheckpointReport | None) -> dict[str, object]:
    if report is None:
        return {}
    return {
        "checkpoint_step": report.step,
        "checkpoint_kind": report.kind,
        "checkpoint_bytes": report.stored_bytes,
        "checkpoint_write_s": round(report.write_s, 6),
        "checkpoint_error": report.error,
    }
