"""How far the training programs of this node's jobs are, as they say: the newest of each job, handed on now and then.

And why they fail: that is handed on at once, the first few of each attempt.
Rules: a program speaks for a job only if that job runs here as the same user. However often it speaks, the controller
hears of a job every INTERVAL_S at most, and always of the last word. A controller that has come anew hears it again.
Does not know what the numbers mean.
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
    """What is needed of the agent."""

    def to_controller(self, message: protocol.Message, blob: bytes = b"") -> bool: ...
    def job_runs_here(self, job_id: int, uid: int) -> Optional[int]: ...


Word = Union[protocol.Progress, protocol.Failure]


def check(progress: Word) -> None:
    """Return if all its numbers are ones that can be passed on. Raises WireError."""
    for name, value in progress.__dict__.items():
        if isinstance(value, (int, float)) and not abs(value) < LARGEST:  # false for infinity and NaN, too
            raise protocol.WireError("cannot take %s: %s is %.20r" % (type(progress).__name__, name, value))


class _Known:
    """The last word of one job."""

    def __init__(self, uid: int, attempt: int, progress: protocol.Progress, at_s: float) -> None:
        self.uid = uid
        self.attempt = attempt
        self.progress = progress
        self.at_s = at_s
        self.said_at_s = float("-inf")
        self.unsaid = True
        self.waits = False  # a timer will say it


class Progresses:
    """The last words of this node's training programs."""

    def __init__(self, loop: Loop, home: ProgressServices, clock: Callable[[], float] = boot_clock_s) -> None:
        self._loop = loop
        self._clock = clock
        self._home = home
        self._known: Dict[int, _Known] = {}
        self._failures: Dict[Tuple[int, int], int] = {}  # how many there were, by job and attempt
        self._unsaid: List[Tuple[float, int, int, protocol.Failure]] = []  # when, uid and attempt of each

    def note(self, uid: int, progress: Word) -> None:
        """Take a program's word. Raises WireError if its job does not run here as this user, or no numbers are in it."""
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
        known.progress, known.at_s, known.unsaid = progress, now_s, True
        wait_s = known.said_at_s + INTERVAL_S - now_s
        if wait_s <= 0:
            self._say(known)
        elif not known.waits:
            known.waits = True
            self._loop.later(wait_s, lambda: self._time_is_up(known))

    def controller_came(self) -> None:
        """Say it all again, and forget what is over."""
        self._say_failures()
        for known in self._known.values():
            if known.unsaid or self._runs(known):
                self._say(known)
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
            self._unsaid.append((now_s, uid, attempt, protocol.changed(failure, text=failure.text[-MAX_TEXT:])))
            self._say_failures()

    def _say_failures(self) -> None:
        now_s = self._clock()
        unsaid, self._unsaid = self._unsaid, []
        for at_s, uid, attempt, failure in unsaid:
            word = protocol.changed(failure, age_s=failure.age_s + now_s - at_s)
            if not self._home.to_controller(
                protocol.FromStream(0, uid, failure.job_id, attempt, protocol.to_json(word))
            ):
                self._unsaid.append((at_s, uid, attempt, failure))

    def _time_is_up(self, known: _Known) -> None:
        known.waits = False
        if known.unsaid:
            self._say(known)

    def _say(self, known: _Known) -> None:
        now_s = self._clock()
        word = protocol.changed(known.progress, age_s=known.progress.age_s + now_s - known.at_s)
        inner = protocol.to_json(word)
        frame = protocol.FromStream(0, known.uid, known.progress.job_id, known.attempt, inner)
        known.said_at_s = now_s
        known.unsaid = not self._home.to_controller(frame)

    def _runs(self, known: _Known) -> bool:
        return self._home.job_runs_here(known.progress.job_id, known.uid) == known.attempt

    def _forget_ended(self) -> None:
        over = [job_id for job_id, known in self._known.items() if not known.unsaid and not self._runs(known)]
        for job_id in over:
            del self._known[job_id]
