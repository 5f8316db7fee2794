"""Lets a trace happen on a virtual clock, event by event, with the scheduler deciding what starts.

Events come one at a time, by time; submissions before ends of the same second, each in the order in which they were made. The
scheduler is asked at every end, and at a submission only if the new job fits in what is free. The clock is the trace's;
nothing here knows a policy. These are the semantics of the simulator whose published schedules are our reference (pyss).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from hpcsched.sim.swf import TraceJob


class Line(Protocol):
    """What decides: it is told of events, and returns the numbers of the jobs that are to start."""

    def submit(self, job: int, now_s: float) -> Sequence[int]: ...

    def end(self, job: int, now_s: float) -> Sequence[int]: ...


def replay(jobs: Sequence[TraceJob], line: Line) -> list[float]:
    """Return when each of `jobs` (in order of submission) starts if `line` decides."""
    starts = [-1.0] * len(jobs)
    submits = [job.submit_s for job in jobs]
    runs = [job.run_s for job in jobs]
    ends: list[tuple[float, int, int]] = []
    submit, end = line.submit, line.end
    made = coming = 0
    count = len(jobs)
    while coming < count or ends:
        if coming < count and (not ends or submits[coming] <= ends[0][0]):
            now_s = submits[coming]
            started = submit(coming, now_s)
            coming += 1
        else:
            now_s, _, done = heappop(ends)
            started = end(done, now_s)
        for job in started:
            starts[job] = now_s
            heappush(ends, (now_s + runs[job], made, job))
            made += 1
    return starts
