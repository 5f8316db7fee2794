"""The ledger that a plan goes by, and the same in full for people: usage as it counts now, and the factors that it makes.

Factors are made anew every few seconds at most: they change slowly, and looking at all that runs for each plan would cost
more than the plan.
"""

from __future__ import annotations

from hpcsched.model.accounting import Accounting, Association
from hpcsched.sched.fairshare import factors_of
from hpcsched.sched.snapshot import Ledger
from hpcsched.sched.usage import Used, at, by_association, plus, running_use, weights_of
from hpcsched.store.world import World

REFRESH_S = 5.0


class Books:
    """Makes the ledger of a world, and remembers the factors for a while."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made_at_s = float("-inf")
        self._factors: tuple[tuple[Association, float], ...] = ()

    def ledger(self, now_s: float, *, fairshare: bool) -> Ledger:
        """Return what a plan at `now_s` goes by; without `fairshare` nobody asks for the factors."""
        accounting = self._world.config.accounting
        if not fairshare:
            self._factors = ()
        elif not 0.0 <= now_s - self._made_at_s < REFRESH_S:
            factors = factors_of(accounting, charged(self._world, now_s))
            self._factors, self._made_at_s = tuple(factors.items()), now_s
        used: tuple[Used, ...] = ()
        if _bounds_usage(accounting):
            used = tuple(at(row, now_s, accounting.half_life_s) for row in self._world.usage.values())
        return Ledger(accounting=accounting, fairshare=self._factors, used=used)

    def forget(self) -> None:
        """Make everything anew when it is next asked for."""
        self._made_at_s = float("-inf")


def _bounds_usage(accounting: Accounting) -> bool:
    """Say whether any limit is on what has been used."""
    holders = (*accounting.accounts, *accounting.users, *accounting.qos)
    return any(holder.limits.grp_tres_mins for holder in holders)


def used_now(world: World, now_s: float) -> list[Used]:
    """Return what everybody has used as it counts at `now_s`, running jobs included."""
    accounting = world.config.accounting
    rows = {key: at(used, now_s, accounting.half_life_s) for key, used in world.usage.items()}
    for job in world.active_jobs():
        weights = weights_of(accounting, world.partitions.get(job.partition))
        account, user = accounting.association_of(job.user, job.account)
        key = (account, user, job.qos)
        known = rows.get(key) or Used(account=account, user=user, qos=job.qos, at_s=now_s)
        rows[key] = plus(known, running_use(job, now_s, accounting, weights, world.gpu_types(job)))
    return list(rows.values())


def charged(world: World, now_s: float) -> dict[Association, float]:
    """Return what each association has been charged; 0 for those who only wait."""
    accounting = world.config.accounting
    found = by_association(used_now(world, now_s))
    for job_id in world.pending:
        job = world.jobs[job_id]
        found.setdefault(accounting.association_of(job.user, job.account), 0.0)
    return found
