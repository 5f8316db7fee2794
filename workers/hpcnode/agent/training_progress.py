"""Progress and failures of this node's training programs, at a bounded rate.

Rules:
- A program speaks for a job only if the job runs here as the same user.
- The controller gets a job's progress every INTERVAL_S at most, and always the last one. A new controller gets it again.
- Failures are forwarded at once, the first few of each attempt.

It does not know what the numbers mean.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Protocol, Tuple, Union

from hpcnode.os.loop import Loop
from hpcnode.os.process import boot_clock_s
from hpcnode.wire import protocol

INTERVAL_S = 5.0
MAX_NOTE = 200
MAX_PATH = 4096
MAX_TEXT = 4000
MAX_FAILURES = 64  # of one attempt
LARGEST = 1 << 53


class ProgressServices(Protocol):
    """The agent, as training progress uses it."""

    def to_controller(self, message: protocol.Message, blob: bytes = b"") -> bool: ...
    def job_runs_here(self, job_id: int, uid: int) -> Optional[int]: ...


TrainingReport = Union[protocol.Progress, protocol.Failure]


def check(progress: TrainingReport) -> None:
    """Raise WireError if a number cannot be passed on."""
    for name, value in progress.__dict__.items():
        if isinstance(value, (int, float)) and not abs(value) < LARGEST:  # false for infinity and NaN, too
            raise protocol.WireError("cannot take %s: %s is %.20r" % (type(progress).__name__, name, value))


class _Known:
    """The last progress of one job."""

    def __init__(self, uid: int, attempt: int, progress: protocol.Progress, at_s: float) -> None:
        self.uid = uid
        self.attempt = attempt
        self.progress = progress
        self.at_s = at_s
        self.sent_at_s = float("-inf")
        self.unsent = True
        self.waits = False  # a timer sends it


class Progresses:
    """The last progress of this node's training programs."""

    def __init__(self, loop: Loop, home: ProgressServices, clock: Callable[[], float] = boot_clock_s) -> None:
        self._loop = loop
        self._clock = clock
        self._home = home
        self._known: Dict[int, _Known] = {}
        self._failures: Dict[Tuple[int, int], int] = {}  # their number by job and attempt
        self._unsent_failures: List[Tuple[float, int, int, protocol.Failure]] = []  # (time, uid, attempt, failure)

    def note(self, uid: int, progress: TrainingReport) -> None:
        """Take a program's report.

        Raises WireError if its job does not run here as this user, or a number is invalid.
        """
        check(progress)
        attempt = self._home.job_runs_here(progress.job_id, uid)
        if attempt is None:
            raise protocol.WireError("job %d does not run on this node as uid %d" % (progress.job_id, uid))
        now_s = self._clock()
        if isinstance(progress, protocol.Failure):
            self._note_failure(now_s, uid, attempt, progress)
            return
        directory = progress.directory if len(progress.directory) <= MAX_PATH else ""
        progress = protocol.changed(progress, note=progress.note[:MAX_NOTE], directory=directory)
        known = self._known.get(progress.job_id)
        if known is None or known.attempt != attempt:
            self._forget_ended()
            known = self._known[progress.job_id] = _Known(uid, attempt, progress, now_s)
        known.progress, known.at_s, known.unsent = progress, now_s, True
        wait_s = known.sent_at_s + INTERVAL_S - now_s
        if wait_s <= 0:
            self._send(known)
        elif not known.waits:
            known.waits = True
            self._loop.later(wait_s, lambda: self._interval_is_over(known))

    def controller_came(self) -> None:
        """Send everything again, and drop ended jobs."""
        self._send_failures()
        for known in self._known.values():
            if known.unsent or self._runs(known):
                self._send(known)
        self._forget_ended()

    def _note_failure(self, now_s: float, uid: int, attempt: int, failure: protocol.Failure) -> None:
        key = failure.job_id, attempt
        if key not in self._failures:
            self._failures = {
                (job, number): count
                for (job, number), count in self._failures.items()
                if self._home.job_runs_here(job, 0) == number
            }
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] <= MAX_FAILURES:
            self._unsent_failures.append(
                (now_s, uid, attempt, protocol.changed(failure, text=failure.text[-MAX_TEXT:]))
            )
            self._send_failures()

    def _send_failures(self) -> None:
        now_s = self._clock()
        unsent, self._unsent_failures = self._unsent_failures, []
        for at_s, uid, attempt, failure in unsent:
            word = protocol.changed(failure, age_s=failure.age_s + now_s - at_s)
            if not self._home.to_controller(
                protocol.FromStream(0, uid, failure.job_id, attempt, protocol.to_json(word))
            ):
                self._unsent_failures.append((at_s, uid, attempt, failure))

    def _interval_is_over(self, known: _Known) -> None:
        known.waits = False
        if known.unsent:
            self._send(known)

    def _send(self, known: _Known) -> None:
        now_s = self._clock()
        word = protocol.changed(known.progress, age_s=known.progress.age_s + now_s - known.at_s)
        inner = protocol.to_json(word)
        frame = protocol.FromStream(0, known.uid, known.progress.job_id, known.attempt, inner)
        known.sent_at_s = now_s
        known.unsent = not self._home.to_controller(frame)

    def _runs(self, known: _Known) -> bool:
        return self._home.job_runs_here(known.progress.job_id, known.uid) == known.attempt

    def _forget_ended(self) -> None:
        over = [job_id for job_id, known in self._known.items() if not known.unsent and not self._runs(known)]
        for job_id in over:
            del self._known[job_id]
