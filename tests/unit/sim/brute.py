"""First come first served, EASY and EASY-SJBF in the plainest way: everything is looked at again at every event.

Written from the definition alone, as a second opinion on `hpcsched.sim` and `hpcsched.sched.pool`, of which it uses
nothing but the values of a trace. One pool of processors, jobs by (submission, line).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.sim.swf import TraceJob


def brute_starts(jobs: Sequence[TraceJob], size: int, policy: str) -> list[float]:
    """Return when each job starts."""
    starts: dict[int, float] = {}
    running: list[int] = []
    queue: list[int] = []
    submissions = [(job.submit_s, 0, at, at) for at, job in enumerate(jobs)]
    ends: list[tuple[float, int, int, int]] = []
    while submissions or ends:
        event = min([*submissions[:1], *ends])
        now_s, is_end, _, job = event
        if is_end:
            ends.remove(event)
            running.remove(job)
        else:
            submissions.pop(0)
            queue.append(job)
        if is_end or jobs[job].procs <= _free(jobs, starts, running, size, now_s):
            while (chosen := _next(jobs, starts, running, queue, size, now_s, policy)) is not None:
                queue.remove(chosen)
                running.append(chosen)
                starts[chosen] = now_s
                ends.append((now_s + jobs[chosen].run_s, 1, len(starts), chosen))
    return [starts[at] for at in range(len(jobs))]


def _free(jobs: Sequence[TraceJob], starts: dict[int, float], running: list[int], size: int, at_s: float) -> int:
    """Return how many processors are free at `at_s` if what runs lasts to its limit."""
    return size - sum(jobs[job].procs for job in running if starts[job] + jobs[job].asked_s > at_s)


def _next(
    jobs: Sequence[TraceJob],
    starts: dict[int, float],
    running: list[int],
    queue: list[int],
    size: int,
    now_s: float,
    policy: str,
) -> int | None:
    """Return one job that is to start now. Asked again after each: nobody's place changes by a start that may be."""
    if not queue:
        return None
    free = _free(jobs, starts, running, size, now_s)
    head, others = queue[0], queue[1:]
    if jobs[head].procs <= free:
        return head
    if policy == "fcfs":
        return None
    if policy == "easy-sjbf":
        others = sorted(others, key=lambda job: jobs[job].asked_s)
    times_s = sorted(starts[job] + jobs[job].asked_s for job in running)
    shadow_s = next(at_s for at_s in times_s if _free(jobs, starts, running, size, at_s) >= jobs[head].procs)
    extra = _free(jobs, starts, running, size, shadow_s) - jobs[head].procs
    for job in others:
        if jobs[job].procs <= free and (now_s + jobs[job].asked_s <= shadow_s or jobs[job].procs <= extra):
            return job
    return None
