"""In which order the jobs behind the heads are tried with the daemon's own policy, `default`, and who of them is *old*.

The heads, the first job of each partition's line that does not fit, have EASY's promise as ever; here is only who is tried first
for what they leave free. Partitions of a higher tier come first. Among equals the old come before the young, in their order in
line: those who have waited for `Policy.old_part` of the longest wait that is remembered (an hour at least, and `age_max_s` at
most, so nobody is overtaken for longer whatever was remembered). The first of the old that do not fit are promised a start
as well. The young come by the time they have waited over the time that they are expected to run: whoever waits moves up, short
jobs quickly. As their expected times come from what their users' last jobs ran (`predict`), a wrong one gives somebody a place
in this order that is too good or too bad, and nothing else: what is promised is counted by time limits.

Compare `guarded`, the same idea on a pool of alike processors with plain EASY rehearsed beside it: that needs to know what would
fit together, which nodes with cpus, memory and GPUs of their own do not tell cheaply. So the measure is the machine's own past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hpcsched.model.ids import JobId
from hpcsched.sched.policy import Policy
from hpcsched.sched.predict import Expected
from hpcsched.sched.snapshot import PendingJob, Snapshot

SHORTEST_S = 10.0  # shorter is not worth preferring
LONGEST_S = 9000.0  # long jobs gain nothing by overtaking each other, and it is their work that keeps old ones waiting


def old_after_s(snapshot: Snapshot, policy: Policy) -> float:
    """Return how long a job that counts as old has waited."""
    return min(policy.age_max_s, max(policy.old_least_s, policy.old_part * snapshot.experience.longest_wait_s))


def old_ones(jobs: Iterable[PendingJob], snapshot: Snapshot, policy: Policy) -> frozenset[JobId]:
    """Return those of `jobs` that nobody may overtake any more but by EASY's rule."""
    since_s = snapshot.now_s - old_after_s(snapshot, policy)
    return frozenset([job.id for job in jobs if job.since_s is not None and job.since_s <= since_s])


def in_turn(
    jobs: Sequence[PendingJob], old: frozenset[JobId], snapshot: Snapshot, limit_s: Callable[[PendingJob], float]
) -> list[PendingJob]:
    """Return `jobs`, given in the order of the line, as they are to be tried."""
    expected = Expected(snapshot.experience, ((job.uid, snapshot.now_s - job.began_at_s) for job in snapshot.running))

    def key(job: PendingJob) -> tuple[int, bool, float, float]:
        tier = snapshot.partitions[job.partition].priority_tier
        if job.id in old:
            return -tier, False, 0.0, 0.0
        waited_s = snapshot.now_s - job.since_s if job.since_s is not None else 0.0
        runs_s = min(LONGEST_S, max(SHORTEST_S, expected.run_s(job.uid, limit_s(job))))
        return -tier, True, -waited_s / runs_s, runs_s  # those that have only just come: the shortest first

    return sorted(jobs, key=key)  # stable: equals stay in their order
