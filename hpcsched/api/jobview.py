"""Build the JSON of a job (version 1): each value, and its source in the cluster state.

The queue is requested often and shows few values of each job. `JobView` therefore builds each value
separately. Values that only the owner and admins may see (paths, command line, comment, script,
environment) are null for other users.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from hpcsched.api.identity import Asker
from hpcsched.api.views import VERSION, training_view, why_waiting
from hpcsched.jobscript.dependency import terms_text
from hpcsched.jobscript.patterns import JobFiles, job_files
from hpcsched.lifecycle.clocks import cut_at_s, ran_s, suspended_s
from hpcsched.listing.jobs import SPECIAL_EXIT, shown_state
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.job import ACTIVE, SHORT_CODES, Hold, Job, JobState, Reason
from hpcsched.model.resources import Share
from hpcsched.model.spec import JobSpec
from hpcsched.state.cluster import ClusterState

# Values of an answer contain no reference cycles, so the encoder need not check for them.
json_text = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def jobs_text(now_s: float, jobs: Iterable[str]) -> bytes:
    """Return the answer with these jobs, each already JSON."""
    return f'{{"version":{VERSION},"now_s":{json_text(now_s)},"jobs":[{",".join(jobs)}]}}'.encode()


LEAST_PRIORITY = 1  # of a job before its first scheduling pass: 0 means held


class JobView(dict[str, Any]):
    """A job as `asker` may see it. Each value is built on first access and kept in the dict."""

    __slots__ = ("_files", "_why", "asker", "job", "now_s", "shares", "cluster")

    def __init__(self, job: Job, cluster: ClusterState, asker: Asker, now_s: float) -> None:
        self.job = job
        self.cluster = cluster
        self.asker = asker
        self.now_s = now_s
        # The job's present or last allocation by node; empty while it waits.
        self.shares: tuple[Share, ...] = job.shares if job.state is not JobState.PENDING else ()
        self._files: JobFiles | None = None
        self._why: tuple[Reason, str, float | None] | None = None

    def __missing__(self, name: str) -> Any:
        made = self[name] = VALUES[name](self)
        return made

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, built if needed.

        For a name that is not a job's value: the value that was set, or `default`.
        """
        return self[name] if name in VALUES else super().get(name, default)

    @property
    def why(self) -> tuple[Reason, str, float | None]:
        """Return the reason, a sentence for users, and the expected start."""
        if self._why is None:
            self._why = why_waiting(self.job, self.cluster, self.asker, self.now_s)
        return self._why

    @property
    def files(self) -> JobFiles:
        """Return the paths of input and output."""
        if self._files is None:
            self._files = job_files(self.job)
        return self._files


def job_view(
    job: Job, cluster: ClusterState, asker: Asker, now_s: float, *, whole: bool = False, script: str | None = None
) -> dict[str, Any]:
    """Return the job as `asker` may see it.

    `whole` adds its environment and its `script` (None: deleted).
    """
    view = JobView(job, cluster, asker, now_s)
    made = _ALL.copy()
    made.update(zip(_PATHS, _fields_of(view), strict=True))
    for name, value in _MADE.items():
        made[name] = value(view)
    if whole and asker.owns(job):
        made |= {"script": script, "script_args": list(job.spec.script_args), "env": dict(job.spec.env)}
    return made


_Value = Callable[[JobView], Any]


def _plains(*names: str) -> dict[str, str]:
    return {name: f"job.{name}" for name in names}


def _askeds(*names: str) -> dict[str, str]:
    return {name: f"job.spec.{name}" for name in names}


def _private(value: _Value) -> _Value:
    """Return `value` for the owner and admins only."""
    return lambda view: value(view) if view.asker.owns(view.job) else None


def _unless_waiting(name: str) -> _Value:
    """Return a time of the attempt; a waiting job has none."""
    return lambda view: None if view.job.state is JobState.PENDING else getattr(view.job, name)


# Source of each value of a `JobView`: the attribute's path, or the function that builds it.
_SOURCES: dict[str, str | _Value] = {
    **_plains("array_job_id", "array_task_id"),
    "id": "job.number",
    "het_job_id": lambda view: view.job.id if view.job.component is not None else None,
    "het_offset": "job.component",
    "het_job_ids": lambda view: (
        f"{view.job.id}-{view.job.id + len(view.job.spec.components)}" if view.job.component is not None else None
    ),
    "array_limit": lambda view: view.job.array_limit if view.job.spec.array else None,
    "display_id": lambda view: view.job.display_id,
    **_askeds("name"),
    **_plains("user", "uid", "account", "partition", "qos"),
    "licenses": lambda view: dict(view.job.spec.licenses),
    "state": lambda view: view.job.state.value,
    "state_short": lambda view: "SE" if shown_state(view) == SPECIAL_EXIT else SHORT_CODES[view.job.state],
    "reason": lambda view: view.why[0].value,
    "reason_detail": lambda view: view.why[1],
    "hold": lambda view: view.job.hold.value,
    "priority": lambda view: _priority(view.job, view.cluster),
    **_plains("nice", "site", "attempt", "restarts", "submitted_at_s", "eligible_at_s"),
    **_plains("accrued_from_s", "not_before_s"),
    "expected_start_s": lambda view: view.why[2],
    **_plains("allocated_at_s"),
    "started_at_s": _unless_waiting("started_at_s"),
    "ended_at_s": _unless_waiting("ended_at_s"),
    "elapsed_s": lambda view: elapsed_s(view.job, view.now_s),
    "suspended_s": lambda view: suspended_s(view.job, view.now_s),
    **_plains("suspended_for"),
    "elastic": lambda view: _elastic(view.job.spec),
    "wanted_nodes": lambda view: list(view.job.wanted_nodes),
    **_plains("preempted_by", "time_min_s"),
    "time_limit_s": lambda view: _time_limit_s(view.job),
    "cut_at_s": lambda view: _cut_at_s(view),
    "nodes": lambda view: [share.node for share in view.shares],
    "node_list": lambda view: compress_hostlist(view["nodes"]) if view.shares else "",
    "num_nodes": lambda view: len(view.shares) or view.job.spec.nodes_min,
    "num_cpus": lambda view: sum(share.cpus for share in view.shares) if view.shares else asked_cpus(view.job),
    "num_tasks": lambda view: sum(share.tasks for share in view.shares) if view.shares else asked_tasks(view.job),
    **_askeds("cpus_per_task", "ntasks_per_node"),
    "mem_mib": lambda view: (
        sum(share.mem_mib for share in view.shares) if view.shares else view.job.spec.mem_per_node_mib
    ),
    "gpus": lambda view: _gpus(view),
    "shards": lambda view: sum(share.shards for share in view.shares) if view.shares else asked_shards(view.job),
    "shares": lambda view: [_share(share) for share in view.shares],
    "exit_code": lambda view: view.job.exit.code if view.job.exit else None,
    "exit_signal": lambda view: view.job.exit.signal if view.job.exit else None,
    **_plains("ended_by_uid"),
    "charged": lambda view: {
        "cpu_s": view.job.charged_cpu_s,
        "mem_mib_s": view.job.charged_mem_mib_s,
        "gpu_s": view.job.charged_gpu_s,
    },
    "requeue": lambda view: (
        view.job.spec.requeue if view.job.spec.requeue is not None else view.cluster.config.controller.requeue
    ),
    **_askeds("exclusive", "constraint", "prefer", "switches", "contiguous"),
    "hints": lambda view: list(view.job.spec.hints),
    "dependency": lambda view: _dependency(view.job),
    **_plains("deadline_at_s", "reservation"),
    **_askeds("mincpus", "tmp_mib", "mem_per_cpu_mib"),
    "asked_nodes": lambda view: list(view.job.spec.nodelist),
    "excluded_nodes": lambda view: list(view.job.spec.exclude),
    **_askeds("submit_host"),
    "priority_tier": lambda view: _priority_tier(view),
    "work_dir": _private(lambda view: view.job.spec.work_dir),
    "stdout": _private(lambda view: view.files.stdout),
    "stderr": _private(lambda view: view.files.stderr),
    "stdin": _private(lambda view: view.files.stdin),
    "submit_line": _private(lambda view: view.job.spec.submit_line),
    "comment": _private(lambda view: view.job.spec.comment),
    "command": _private(lambda view: _command(view.job.spec)),
    "training": _private(lambda view: training_view(view.cluster.training.get(view.job.id))),
}


VALUES: dict[str, _Value] = {
    name: attrgetter(source) if isinstance(source, str) else source for name, source in _SOURCES.items()
}
# For tens of thousands of jobs: values that are plain attributes are fetched by one call for each
# job.
_PATHS = {name: source for name, source in _SOURCES.items() if isinstance(source, str)}
_MADE = {name: source for name, source in _SOURCES.items() if not isinstance(source, str)}
_ALL: dict[str, Any] = dict.fromkeys(_SOURCES)
_fields_of = attrgetter(*_PATHS.values())


def _share(share: Share) -> dict[str, Any]:
    return {
        "node": share.node,
        "cpus": share.cpus,
        "mem_mib": share.mem_mib,
        "gpus": list(share.gpus),
        "tasks": share.tasks,
        "shards": share.shards,
    }


def _elastic(spec: JobSpec) -> list[int] | None:
    return [spec.nodes_min, spec.nodes_max or spec.nodes_min] if spec.elastic else None


def _cut_at_s(view: JobView) -> float | None:
    job = view.job
    return cut_at_s(job, view.cluster.reservations.get(job.reservation)) if job.state in ACTIVE else None


def _gpus(view: JobView) -> int:
    if view.shares:
        return sum(len(share.gpus) for share in view.shares if not share.shards)
    return asked_gpus(view.job)


def _dependency(job: Job) -> str:
    return terms_text(job.dependency, any_one=job.dependency_any) if job.dependency else ""


def _priority_tier(view: JobView) -> int | None:
    partitions = view.cluster.partitions
    only = partitions.get(view.job.partition)
    if only is not None:
        return only.priority_tier
    names = view.job.partition.split(",")
    return max((partitions[name].priority_tier for name in names if name in partitions), default=None)


def _command(spec: JobSpec) -> str | None:
    """Return the script's path and its arguments; None if it was not in a file.

    A job of hrun has its program as its name.
    """
    program = spec.script_path or (spec.name if not spec.has_script else "")
    return " ".join((program, *spec.script_args)) if program else None


def asked_tasks(job: Job) -> int:
    """Return the minimum number of tasks of the job."""
    if job.spec.ntasks is not None:
        return job.spec.ntasks
    return job.spec.nodes_min * (job.spec.ntasks_per_node or 1)


def asked_cpus(job: Job) -> int:
    """Return the minimum number of CPUs of the job."""
    tasks = job.spec.nodes_min if job.spec.overcommit else asked_tasks(job)
    return tasks * job.spec.cpus_per_task


def asked_gpus(job: Job) -> int:
    """Return the minimum number of GPUs of the job."""
    spec = job.spec
    if not (spec.gpus_total or spec.gpus_per_node or spec.gpus_per_task):
        return 0
    total = sum(request.count for request in spec.gpus_total)
    per_node = sum(request.count for request in spec.gpus_per_node) * spec.nodes_min
    per_task = sum(request.count for request in spec.gpus_per_task) * asked_tasks(job)
    return max(total, per_node, per_task)


def asked_shards(job: Job) -> int:
    """Return the minimum number of GPU shards of the job."""
    asked = job.spec.shards_per_node
    return sum(request.count for request in asked) * job.spec.nodes_min if asked else 0


def elapsed_s(job: Job, now_s: float) -> float:
    """Return the run time of the present or last attempt, without time in suspension."""
    if job.state is JobState.PENDING:
        return 0.0
    return ran_s(job, job.ended_at_s if job.ended_at_s is not None and job.state not in ACTIVE else now_s)


def _time_limit_s(job: Job) -> int | None:
    """Return the job's time limit; without one, the time until its deadline, if any.

    For a waiting job this counts, as in Slurm, from its submission or its begin time.
    """
    if job.deadline_at_s is None or job.spec.time_limit_s is not None:
        return job.time_limit_s
    from_s = max(job.submitted_at_s, job.spec.begin_at_s or 0.0)
    if job.state is not JobState.PENDING and job.started_at_s is not None:
        from_s = job.started_at_s
    left_s = max(1, round(job.deadline_at_s - from_s))
    return left_s if job.time_limit_s is None else min(job.time_limit_s, left_s)


def _priority(job: Job, cluster: ClusterState) -> int | None:
    """Return the job's fixed priority, else that of the last pass; 0: held, None: unknown."""
    if job.state is not JobState.PENDING:
        return job.priority_set if job.priority_set is not None else cluster.priorities.get(job.id)
    if job.hold is not Hold.NONE:
        return 0
    return job.priority_set if job.priority_set is not None else cluster.priorities.get(job.id, LEAST_PRIORITY)
