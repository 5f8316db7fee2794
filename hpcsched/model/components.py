"""The components of a heterogeneous job, each as if it were a job: what lists and environments show of it.

A heterogeneous job is one job, with one state and one batch script; its components differ in name and in what they have of
which nodes. The first one has the job's own number, the others those behind it, which no other job gets.

Source: "Heterogeneous Job Support" of Slurm's documentation.
"""

from __future__ import annotations

from hpcsched.model.frozen import replace
from hpcsched.model.job import Job

MAX_COMPONENTS = 128  # as in Slurm

_OWN = (
    "name", "nodes_min", "nodes_max", "nodes_given", "ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_task_given",
    "mem_per_node_mib", "mem_per_cpu_mib", "gpus_per_node", "gpus_total", "gpus_per_task", "shards_per_node", "exclusive",
    "nodelist", "exclude", "constraint", "prefer", "mincpus", "tmp_mib", "distribution", "hints",
)  # fmt: skip


def components_of(job: Job) -> list[Job]:
    """Return the components of `job`; of one that has none, or is one, itself."""
    if not job.spec.components or job.component is not None:
        return [job]
    return [component(job, number) for number in range(1 + len(job.spec.components))]


def component(job: Job, number: int) -> Job:
    """Return component `number` of the heterogeneous `job`."""
    spec = job.spec
    if number:
        its = spec.components[number - 1]
        spec = replace(spec, **{name: getattr(its, name) for name in _OWN})
    shares = tuple([share for share in job.shares if share.component == number])
    names = {share.node for share in shares}
    return replace(
        job,
        component=number,
        spec=spec,
        shares=shares,
        held_nodes=tuple([node for node in job.held_nodes if node in names]),
    )
