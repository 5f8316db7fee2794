"""Steps of the head node's wall clock: set by hand, or by NTP on a machine that booted without knowing the time.

What is stored are times of that clock, and for how long a job has run is their difference: a clock that was set forward by an
hour would end what has an hour left, one that was set back would let it run an hour longer. So the wall clock is compared
with the one that counts since boot and knows no steps; when they no longer go together, the times of all jobs that hold
nodes are moved along (`ClockStepped`), in the same tick, before anything goes by them. How the two clocks stand is kept with the
ledger, so that a step while the controller is down is seen as well, if the machine has not been booted since.

What is a time of day (begin times, deadlines, reservations) stays as it is: it comes when the clock shows it.
Source: clock_gettime(2): CLOCK_REALTIME may be set, CLOCK_BOOTTIME counts on; NTP slews both alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpcsched.lifecycle.events import ClockStepped
from hpcsched.model.job import JobState
from hpcsched.model.units import format_time_s
from hpcsched.store.world import Transaction

log = logging.getLogger("hpcsched.clock")

STEP_S = 5.0  # less is no matter, and may be a process that stood still between its looks at the two clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """What the wall clock shows beyond the time since boot; "" for a boot that nothing is known of."""

    boot_id: str = ""
    ahead_s: float = 0.0

    def text(self) -> str:
        """Return it as it is stored."""
        return f"{self.boot_id} {self.ahead_s!r}" if self.boot_id else ""


def mark_of(text: str) -> ClockMark:
    """Return the mark that `ClockMark.text` wrote."""
    boot_id, _, ahead = text.partition(" ")
    return ClockMark(boot_id=boot_id, ahead_s=float(ahead)) if boot_id else ClockMark()


def keep_step(tx: Transaction, known: ClockMark, boot_id: str, boot_s: float) -> ClockMark:
    """Move what is measured by the wall clock if that was set since `known`; return how the clocks stand now.

    The mark goes into the transaction's batch: it counts when that is committed.
    """
    mark = ClockMark(boot_id=boot_id, ahead_s=tx.now_s - boot_s)
    same_boot = bool(boot_id) and boot_id == known.boot_id
    step_s = mark.ahead_s - known.ahead_s
    if not boot_id or (same_boot and abs(step_s) < STEP_S):
        return known
    tx.batch.clock = mark.text()
    if same_boot:
        _move(tx, step_s)
    return mark


def _move(tx: Transaction, step_s: float) -> None:
    world = tx.world
    how = "forward" if step_s > 0 else "back"
    log.warning("the clock was set %s by %s: running jobs' times move along", how, format_time_s(round(abs(step_s))))
    pause_s = world.config.controller.requeue_delay_s
    paused = [world.jobs[job_id] for job_id in world.pending if world.jobs[job_id].attempt]
    then_s = tx.now_s - step_s  # now, by the clock of before
    for job in (*world.active_jobs(), *paused):
        waits_s = (job.not_before_s or 0.0) - then_s
        if job.state is not JobState.PENDING or 0.0 < waits_s <= pause_s:
            tx.record(ClockStepped(job_id=job.id, at_s=tx.now_s, by_s=step_s))
