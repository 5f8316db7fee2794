"""Return priorities and fair share as JSON (version 1) for `hprio` and `hshare`.

Reads the cluster and changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hpcsched.controller.usage_ledger import charged, used_now
from hpcsched.model.ids import JobId
from hpcsched.sched.policy import Policy
from hpcsched.sched.queue.fairshare import ShareUsage, UsedResources, share_usages
from hpcsched.sched.queue.priority import Breakdown, breakdown_of, scale_of
from hpcsched.sched.snapshot import PendingJob, Snapshot
from hpcsched.state.cluster import ClusterState

Json = dict[str, Any]
WEIGHED = ("age", "assoc", "fairshare", "size", "partition", "qos")


def priority_views(snapshot: Snapshot, policy: Policy, wanted: Iterable[JobId]) -> Json:
    """Return the priority of each waiting job of `wanted`, with its components."""
    scale = scale_of(snapshot)
    ids = set(wanted)
    jobs = []
    for job in snapshot.pending:
        for view in (job, *job.others):
            if job.id in ids:
                parts = breakdown_of(view, snapshot.partitions.get(view.partition), scale, policy)
                jobs.append(_priority_view(view, parts))
    weights = {name: getattr(policy, f"weight_{name}") for name in ("site", *WEIGHED)}
    return {"jobs": jobs, "weights": {**weights, "tres": dict(policy.weights_tres)}}


def _priority_view(job: PendingJob, parts: Breakdown) -> Json:
    factors = dict(parts.factors)
    return {
        "id": job.id,
        "display_id": job.display_id,
        "user": job.user,
        "account": job.account,
        "qos": job.qos,
        "partition": job.partition,
        "priority": parts.total,
        "fixed": parts.fixed,
        "weighted": {name: getattr(parts, name) for name in ("site", *WEIGHED, "tres")},
        "nice": parts.nice,
        "factors": {name: factors[name] for name in WEIGHED if name in factors},
        "tres_factors": {name: part for name, part in factors.items() if name not in WEIGHED},
    }


def license_views(cluster: ClusterState) -> list[Json]:
    """Return the licences, with the number of each that jobs hold now."""
    used: Counter[str] = Counter()
    for job in cluster.active_jobs():
        used.update(dict(job.spec.licenses))
    return [
        {"name": name, "total": total, "used": used[name], "free": max(0, total - used[name])}
        for name, total in cluster.config.accounting.licenses
    ]


def share_views(cluster: ClusterState, now_s: float) -> Json:
    """Return the tree of accounts and users, root first, with shares, usage and factors."""
    accounting = cluster.config.accounting
    used = used_now(cluster, now_s)
    lines = share_usages(accounting, charged(cluster, now_s))
    return {
        "algorithm": accounting.fairness.value,
        "half_life_s": accounting.half_life_s,
        "shares": [_share_view(line, used, cluster) for line in lines],
    }


def _share_view(line: ShareUsage, used: list[UsedResources], cluster: ClusterState) -> Json:
    view = asdict(line)
    # None (null in JSON) if nothing is used yet.
    view["level_fs"] = None if math.isinf(line.level_fs) else line.level_fs
    amounts: dict[str, float] = {}
    for row in used:
        if _is_of(row, line, cluster):
            for name, amount in row.amounts:
                amounts[name] = amounts.get(name, 0.0) + amount
    return view | {"tres_seconds": amounts}


def _is_of(row: UsedResources, line: ShareUsage, cluster: ClusterState) -> bool:
    if line.user:
        return (row.account, row.user) == line.association
    return not line.account or cluster.config.accounting.is_part_of(row.account, (line.account,))
