"""Rules of preemption: permission, method, and lost work, for two jobs at a time.

By QOS, a job outranks another job if its QOS lists the QOS of the other, and not the other way
round. By partition, it outranks the other if its partition has the higher priority tier. So a job
is never preempted by a job of its own or a lower rank, or by a job that it could preempt itself,
because the configuration rejects circles of QOS. Sources: preempt.html of Slurm's documentation,
sacctmgr(1) Preempt, GraceTime.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.node import Partition
from hpcsched.sched.policy import PreemptRules
from hpcsched.sched.snapshot import PendingJob, RunningJob


def outranks(job: PendingJob, other: RunningJob, rules: PreemptRules, partitions: Mapping[str, Partition]) -> bool:
    """Say whether `job` may preempt `other` at all."""
    match rules.type:
        case PreemptType.QOS:
            own, others = rules.qos.get(job.qos), rules.qos.get(other.qos)
            listed = own is not None and other.qos in own.preempt
            return listed and not (others is not None and job.qos in others.preempt)
        case PreemptType.PARTITION:
            own_in, other_in = partitions.get(job.partition), partitions.get(other.partition)
            return own_in is not None and other_in is not None and own_in.priority_tier > other_in.priority_tier
        case PreemptType.NONE:
            return False


def mode_of(victim: RunningJob, rules: PreemptRules) -> PreemptMode:
    """Return the preemption mode of `victim`. A job that cannot be requeued is cancelled."""
    mode = _configured_mode(victim, rules)
    again = victim.may_run_again if victim.may_run_again is not None else rules.requeue
    if mode in (PreemptMode.REQUEUE, PreemptMode.CHECKPOINT) and not again:
        return PreemptMode.CANCEL
    return mode


def grace_s(victim: RunningJob, rules: PreemptRules) -> float | None:
    """Return the grace period of `victim`, in which it can save its work.

    None: it is ended like a cancelled job.
    """
    qos = rules.qos.get(victim.qos)
    if qos is not None and qos.grace_time_s > 0:
        return qos.grace_time_s
    checkpoints = _configured_mode(victim, rules) is PreemptMode.CHECKPOINT
    return rules.grace_s if checkpoints and rules.grace_s > 0 else None


def answer_s(qos_name: str, rules: PreemptRules) -> float:
    """Return how long an elastic job of this QOS has to give back requested nodes."""
    qos = rules.qos.get(qos_name)
    return qos.grace_time_s if qos is not None and qos.grace_time_s > 0 else rules.grace_s


def _configured_mode(victim: RunningJob, rules: PreemptRules) -> PreemptMode:
    qos = rules.qos.get(victim.qos)
    return qos.preempt_mode if qos is not None and qos.preempt_mode is not None else rules.mode


def may_be_preempted(victim: RunningJob, rules: PreemptRules, now_s: float) -> bool:
    """Say whether `victim` may be preempted now.

    It runs, is past its exempt time, and has a mode that allows preemption.
    """
    if not victim.runs or mode_of(victim, rules) is PreemptMode.OFF:
        return False
    return now_s - victim.began_at_s >= exempt_s(victim.qos, rules)


def exempt_s(qos_name: str, rules: PreemptRules) -> float:
    """Return the time after its start in which a job of this QOS is exempt from preemption."""
    qos = rules.qos.get(qos_name)
    return qos.exempt_time_s if qos is not None and qos.exempt_time_s > 0 else rules.exempt_s


def lost_s(victim: RunningJob, rules: PreemptRules, now_s: float) -> float:
    """Return the work that is lost with `victim`, in seconds times its `weight`.

    That is its work since its last reported checkpoint. It is all its work if it is not requeued,
    and none if it is suspended.
    """
    mode = mode_of(victim, rules)
    if mode is PreemptMode.SUSPEND:
        return 0.0
    saved_at_s = victim.saved_at_s if mode is not PreemptMode.CANCEL else None
    since_s = max(victim.began_at_s, saved_at_s if saved_at_s is not None else victim.began_at_s)
    return max(0.0, now_s - since_s) * weight(victim)


def weight(victim: RunningJob) -> float:
    """Return the weight of the job: its cpus, where a GPU counts as eight."""
    return sum(share.cpus for share in victim.shares) + 8 * sum(share.gpu_amount for share in victim.shares)
