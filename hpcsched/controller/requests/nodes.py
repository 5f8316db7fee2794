"""Remove nodes from the cluster while jobs are held there.

``hpcsched node remove --force`` is an admin's decision. A node that answers is first told to end
its jobs, as if it were lost. A node that does not answer is fenced. Only then its file is deleted.

A node whose file was deleted while the controller was down has left the cluster at the next start.
If ``node remove --force`` deleted the file, its jobs are given up. Otherwise the machine may still
run them: it counts as a node that does not answer, and its jobs are held until the file is restored
or an admin fences the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcsched.api.identity import Asker
from hpcsched.controller.node_loss import end_lost, lose_node, what_became
from hpcsched.controller.nodes.edits import held_there
from hpcsched.errors import RequestError
from hpcsched.lifecycle.events import EndRequested, NodesReleased
from hpcsched.lifecycle.job import can, can_do_without
from hpcsched.lifecycle.node import NodeDrained
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import OURSELVES, Link
from hpcsched.state.transaction import Transaction

LEAVING = "it is being removed"


def remove_node(tx: Transaction, asker: Asker, node: NodeName, *, force: bool) -> dict[str, Any]:
    """Free the node of jobs, so that its file can be deleted.

    Return ``ending`` (jobs to wait for) and ``became``. Repeat the request until no job is ending.

    Raises: RequestError if jobs are held there and `force` is not given.
    """
    asker.must_be_admin("remove a node")
    jobs = tx.cluster.jobs_on(node)
    known = tx.cluster.nodes[node]
    if jobs and not force:
        raise RequestError(
            f"cannot remove node {node}: {held_there(jobs)}. Let them end (hctl drain {node} WHY lets no new "
            f"ones start); for a dead node: hctl fence {node}; or give them up with the node: hpcsched node remove --force {node}"
        )
    if not known.drained:
        tx.record_node(NodeDrained(node=node, at_s=tx.now_s, why=LEAVING, by=OURSELVES))
    why = f"node {node} was removed by {asker.user}"
    became = []
    for job in jobs:
        if known.link is Link.UP:
            _end_on(tx, asker, job, node, why)
        else:
            became.append(what_became(lose_node(tx, job, node, why)))
    if known.link is not Link.UP:
        tx.decided([key for key in tx.cluster.undecided_launches if key[0] == node])
    return {"ending": [job.display_id for job in tx.cluster.jobs_on(node)], "became": became}


def _end_on(tx: Transaction, asker: Asker, job: Job, node: NodeName, why: str) -> None:
    """Tell the node to end its part of the job, unless it is already ending."""
    if can_do_without(job, node):
        tx.record(NodesReleased(job_id=job.id, at_s=tx.now_s, nodes=(node,), by_uid=asker.uid))
    elif can(job, EndRequested) and job.state is not JobState.COMPLETING:
        end_lost(tx, job, why)


def lose_gone_nodes(tx: Transaction, given_up: Mapping[str, str]) -> list[str]:
    """Remove from jobs the nodes that an admin removed while no controller ran.

    Return what became of each job. `given_up` maps these nodes to the admin who removed them.
    """
    became = []
    for node in tx.cluster.gone_nodes():
        for job in tx.cluster.jobs_on(node) if node in given_up else ():
            lost = lose_node(tx, job, node, f"node {node} was removed by {given_up[node]}")
            became.append(f"node {node} is not in the configuration any more: {what_became(lost)}")
    return became
