"""Build the environment of a job's programs: of the batch step and of other steps.

`job_environment` makes the batch step's, `step_environment` that of any other step. Every variable is set twice: as
``HPCSCHED_x``, and as ``SLURM_x`` for programs written for Slurm. The functions are pure. They know a node only by its share.
They do not know what the node itself adds: PATH, HOME, HPCSCHED_SOCKET, CUDA_VISIBLE_DEVICES, the variables of MPI, and the
variables that differ from task to task.

Rules: the user's variables never override the scheduler's. A value that the user did not request is not set if Slurm does not
set it either (``SLURM_NTASKS`` in a batch script makes PyTorch Lightning expect `srun`). The variables are documented in
man/hpcsched-env.7.

Sources: the names that Slurm 22.05.8 set in jobs, recorded; the values are by sbatch(1) and srun(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from hpcnode.os import rlimits
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.job import Job, component, components_of
from hpcsched.model.node import GpuRequest, Share
from hpcsched.model.units import UNLIMITED_S
from hpcsched.steps.layout import NodeTasks, tasks_per_node_text

# Names that only the scheduler sets. Exceptions: HPCSCHED_CONFIG and HPCSCHED_API locate the
# controller for commands in a job; SLURM_UMASK and HPCSCHED_RLIMITS hold the submitter's values.
_RESERVED = re.compile(
    r"HPCSCHED_(?!CONFIG\Z|API\Z|RLIMITS\Z|SIGNED_(REQUEST|SALT)\Z)|SLURM_(?!TIME_FORMAT\Z|CONF\Z|UMASK\Z)|SLURMD_"
)
_OF_A_TASK = re.compile(
    r"_(PROCID|LOCALID|NODEID|GTIDS|NODENAME|CPUS_ON_NODE|(GPUS|SHARDS)_ON_NODE|TOPOLOGY_ADDR(_PATTERN)?|GPU_DEVICES)\Z"
)
_USERS_CHOICE = frozenset({"MASTER_ADDR", "MASTER_PORT", "SLURM_CONF"})

# Variables that `srun --preserve-env` passes on unchanged.
PRESERVED = frozenset({"SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NPROCS", "SLURM_NTASKS"})

MASTER_PORT_LOW = 20_000  # below the ephemeral ports (32768 and up)
MASTER_PORTS = 10_000


def job_environment(
    job: Job,
    *,
    cluster: str,
    conf: str = "",
    master_addr: str,
    share_dir: str = "",
    gid: int | None = None,
    devices: Mapping[int, str] = MappingProxyType({}),
    cut_at_s: float | None = None,
) -> dict[str, str]:
    """Return the environment of the batch step of `job`, on the first node of its shares.

    - `conf`: path of the configuration file.
    - `master_addr`: address of the first node as the other nodes reach it.
    - `share_dir`: directory that all nodes share, "" if there is none.
    - `gid`: the submitter's group, if known.
    - `devices`: CUDA's names for GPUs of the first node, for GPUs that CUDA does not know by their
      index.
    - `cut_at_s`: time at which the job is ended regardless of its time limit.
    """
    facts, job = _components(job), component(job, 0) if job.spec.components else job
    first = job.shares[0]
    facts |= _job_facts(job, cluster=cluster, share_dir=share_dir, gid=gid)
    facts |= {
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "GTIDS": "0",
        "CPUS_ON_NODE": str(first.cpus),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port(job, 0)),
        "NODELIST": facts["JOB_NODELIST"],
        "NNODES": facts["JOB_NUM_NODES"],
        "TASKS_PER_NODE": tasks_per_node_text([share.tasks for share in job.shares]),
        **_gpus_on_node(first.gpus),
        **({"SHARDS_ON_NODE": str(first.shards)} if first.shards else {}),
        **_devices(first.gpus, devices),
    }
    if job.spec.distribution:
        facts |= _distribution(job.spec.distribution)
    if cut_at_s is not None:
        facts["JOB_END_TIME"] = str(min(int(cut_at_s), int(facts.get("JOB_END_TIME", cut_at_s))))  # int: of the ledger
    facts |= _tasks_asked(job)
    ours = _twins(facts) | _of_node(first.node) | _of_installation(job, cluster, conf)
    return with_users(dict(job.spec.env), ours)


def script_environment(job: Job, *, cluster: str, share_dir: str = "", share: Share | None = None) -> dict[str, str]:
    """Return the environment of the administrator's prolog and epilog.

    `share` is that of the node where they run; None: they run on the head. Nothing in it is from the user's environment.
    """
    facts = _job_facts(job, cluster=cluster, share_dir=share_dir, gid=None)
    facts["JOB_WORK_DIR"] = job.spec.work_dir
    of_node = {}
    if share is not None:
        facts |= {"CPUS_ON_NODE": str(share.cpus), **_gpus_on_node(share.gpus)}
        of_node = _of_node(share.node)
    return _twins(facts) | of_node


def allocation_facts(batch: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the batch step's environment for a command that holds an allocation.

    Such a command runs on none of the job's nodes.
    """
    return {name: value for name, value in batch.items() if _OF_A_TASK.search(name) is None}


def step_environment(
    job: Job,
    step: int,
    layout: Sequence[NodeTasks],
    *,
    cluster: str,
    conf: str = "",
    master_addr: str,
    share_dir: str = "",
    gid: int | None = None,
    cpus_per_task: int | None = None,
    ntasks_per_node: int | None = None,
    distribution: str = "block",
) -> dict[str, str]:
    """Return the variables of step `step` of `job` that are the same on all of its nodes.

    `layout` says which ranks run on which node, in order. `master_addr` is the address of the step's first node as the other
    nodes reach it. `distribution` is block, cyclic:block, plane=N or arbitrary. `cpus_per_task` and `ntasks_per_node` are the
    step's own values, or the job's if the step gave none. `node_environment` adds the variables that differ from node to node.
    `with_users` adds the user's variables.
    """
    counts = [part.count for part in layout]
    nodes = compress_hostlist(part.node for part in layout)
    total, nnodes = str(sum(counts)), str(len(layout))
    facts = _components(job)
    job = _component_of(job, layout)
    facts |= _job_facts(job, cluster=cluster, share_dir=share_dir, gid=gid)
    facts |= {
        "STEP_ID": str(step),
        "STEPID": str(step),
        "STEP_NODELIST": nodes,
        "STEP_NUM_NODES": nnodes,
        "STEP_NUM_TASKS": total,
        "STEP_TASKS_PER_NODE": tasks_per_node_text(counts),
        "NODELIST": nodes,
        "NNODES": nnodes,
        "NTASKS": total,
        "NPROCS": total,
        "TASKS_PER_NODE": tasks_per_node_text(counts),
        **_distribution(distribution),
        "LAUNCH_NODE_IPADDR": master_addr,
        "SRUN_COMM_HOST": master_addr,
    }
    facts |= _per_task(job, counts, cpus_per_task, ntasks_per_node)
    meeting = {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port(job, step))}
    ours = _twins(facts | meeting) | _of_installation(job, cluster, conf) | _NO_PORTS
    return ours | meeting | {"WORLD_SIZE": total}


def _per_task(
    job: Job, counts: Sequence[int], cpus_per_task: int | None, ntasks_per_node: int | None
) -> dict[str, str]:
    """Return the facts that are set only if the step or its job requested them."""
    facts = {}
    if (ntasks_per_node or job.spec.ntasks_per_node) and len(set(counts)) == 1:
        facts["NTASKS_PER_NODE"] = str(counts[0])
    cpus = cpus_per_task or (job.spec.cpus_per_task if job.spec.cpus_per_task_given else None)
    if cpus is not None:
        facts["CPUS_PER_TASK"] = str(cpus)
    return facts


def node_environment(
    part: NodeTasks,
    *,
    node_rank: int,
    cpus: int,
    gpus: Sequence[int],
    devices: Mapping[int, str] = MappingProxyType({}),
    gpus_per_task: int | None = None,
) -> dict[str, str]:
    """Return the variables of a step that are valid only on its `node_rank`-th node.

    `part` runs there, with `cpus` and `gpus` (indices). `devices` is as in `job_environment`. With
    `gpus_per_task`, the node gives each task that many of `gpus` for its own use. The node itself
    adds the variables of each task: PROCID, LOCALID, RANK, LOCAL_RANK, TASK_PID, TASK_GPUS.
    """
    facts = {
        "NODEID": str(node_rank),
        "GTIDS": ",".join(map(str, part.ranks)),
        "CPUS_ON_NODE": str(cpus),
        **_gpus_on_node(gpus),
        **({"STEP_GPUS": ",".join(map(str, gpus))} if gpus else {}),
        **({"STEP_GPUS_PER_TASK": str(gpus_per_task)} if gpus and gpus_per_task else {}),
        **_devices(gpus, devices),
    }
    return _twins(facts) | _of_node(part.node) | {"LOCAL_WORLD_SIZE": str(part.count)}


def with_users(users: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Return `ours` plus those of the user's variables that the scheduler does not own.

    The scheduler's names are always removed from `users`, so that no value of another job or step
    remains. Exception: the user's MASTER_ADDR and MASTER_PORT override ours.
    """
    users_own = {name: value for name, value in users.items() if _RESERVED.match(name) is None}
    return users_own | {
        name: value for name, value in ours.items() if name not in _USERS_CHOICE or name not in users_own
    }


def with_propagated(env: Mapping[str, str], wanted: frozenset[str]) -> dict[str, str]:
    """Return `env` plus the submitter's resource limits that are `wanted` or requested."""
    limits = env.get(rlimits.VARIABLE)
    return {**env, rlimits.VARIABLE: rlimits.propagated(limits, wanted)} if limits else dict(env)


def master_port(job: Job, step: int) -> int:
    """Return the rendezvous port of a step's ranks.

    Neighbouring jobs, steps and attempts get different ports.
    """
    return MASTER_PORT_LOW + (job.id * 101 + step * 13 + job.attempt * 7) % MASTER_PORTS


def _job_facts(job: Job, *, cluster: str, share_dir: str, gid: int | None) -> dict[str, str]:
    """Return the job's values that are the same on every node, by names without prefix."""
    spec = job.spec
    facts = {
        "CLUSTER_NAME": cluster,
        "JOB_ID": str(job.id),
        "JOBID": str(job.id),
        "JOB_NAME": spec.name,
        "JOB_NODELIST": compress_hostlist(share.node for share in job.shares),
        "JOB_NUM_NODES": str(len(job.shares)),
        "JOB_CPUS_PER_NODE": tasks_per_node_text([share.cpus for share in job.shares]),
        "JOB_PARTITION": job.partition or spec.partition,
        "JOB_UID": str(job.uid),
        "JOB_USER": job.user,
        "SUBMIT_DIR": spec.submit_dir or spec.work_dir,
        "SUBMIT_HOST": spec.submit_host,
        **_memory(job),
        **_array(job),
        **_gpus_asked(job),
        **_times(job),
    }
    optional = {
        "JOB_GID": "" if gid is None else str(gid),
        "JOB_ACCOUNT": job.account,
        "JOB_QOS": job.qos,
        "JOB_RESERVATION": job.reservation,
        "OVERCOMMIT": "1" if spec.overcommit else "",
        "SHARE": share_dir,
    }
    return facts | {name: value for name, value in optional.items() if value}


def _tasks_asked(job: Job) -> dict[str, str]:
    """Return the task counts that the user gave, without those that the user did not give."""
    facts = {}
    if job.spec.ntasks is not None or job.spec.ntasks_per_node is not None:
        facts["NTASKS"] = facts["NPROCS"] = str(sum(share.tasks for share in job.shares))
    if job.spec.ntasks_per_node is not None:
        facts["NTASKS_PER_NODE"] = str(job.spec.ntasks_per_node)
    if job.spec.cpus_per_task_given:
        facts["CPUS_PER_TASK"] = str(job.spec.cpus_per_task)
    return facts


def _components(job: Job) -> dict[str, str]:
    """Return the number of components of a heterogeneous job and each component's values.

    The names are like ``JOB_NODELIST_HET_GROUP_1``.
    """
    if not job.spec.components:
        return {}
    components = components_of(job)
    facts = {"HET_SIZE": str(len(components))}
    for at, part in enumerate(components):
        values = {
            "JOB_ID": str(part.number),
            "JOB_NAME": part.spec.name,
            "JOB_PARTITION": part.partition or part.spec.partition,
            **_nodes(part),
            **_memory(part),
            **_gpus_asked(part),
            **_tasks_asked(part),
        }
        if job.account:
            values["JOB_ACCOUNT"] = job.account
        facts |= {f"{name}_HET_GROUP_{at}": value for name, value in values.items()}
    return facts


def _component_of(job: Job, layout: Sequence[NodeTasks]) -> Job:
    """Return the component of a heterogeneous `job` that a step runs in: the first of several."""
    if not job.spec.components:
        return job
    numbers = {share.node: share.component for share in job.shares}
    return component(job, min(numbers[part.node] for part in layout))


def _nodes(job: Job) -> dict[str, str]:
    nodes, count = compress_hostlist(share.node for share in job.shares), str(len(job.shares))
    return {
        "JOB_NODELIST": nodes,
        "JOB_NUM_NODES": count,
        "JOB_CPUS_PER_NODE": tasks_per_node_text([share.cpus for share in job.shares]),
        "NODELIST": nodes,
        "NNODES": count,
        "TASKS_PER_NODE": tasks_per_node_text([share.tasks for share in job.shares]),
    }


def _memory(job: Job) -> dict[str, str]:
    """Return one of Slurm's two memory variables; `srun` rejects a job that has both."""
    if job.spec.mem_per_cpu_mib:
        return {"MEM_PER_CPU": str(job.spec.mem_per_cpu_mib)}
    mem_mib = job.spec.mem_per_node_mib or job.shares[0].mem_mib
    return {"MEM_PER_NODE": str(mem_mib)} if mem_mib else {}


def _array(job: Job) -> dict[str, str]:
    if job.array_job_id is None or job.spec.array is None:
        return {}
    indices = job.spec.array.indices
    steps = {high - low for low, high in zip(indices, indices[1:], strict=False)}
    return {
        "ARRAY_JOB_ID": str(job.array_job_id),
        "ARRAY_TASK_ID": str(job.array_task_id),
        "ARRAY_TASK_COUNT": str(len(indices)),
        "ARRAY_TASK_MIN": str(indices[0]),
        "ARRAY_TASK_MAX": str(indices[-1]),
        "ARRAY_TASK_STEP": str(steps.pop() if len(steps) == 1 else 1),
    }


def _times(job: Job) -> dict[str, str]:
    facts = {"ATTEMPT": str(job.attempt), "RESTART_COUNT": str(job.restarts)}
    start_s = job.started_at_s if job.started_at_s is not None else job.allocated_at_s
    if start_s is None:
        return facts
    facts["JOB_START_TIME"] = str(int(start_s))
    if job.time_limit_s is not None and job.time_limit_s < UNLIMITED_S:
        facts["JOB_END_TIME"] = str(int(start_s + job.time_limit_s))
    return facts


def _gpus_asked(job: Job) -> dict[str, str]:
    asked = {
        "GPUS": job.spec.gpus_total,
        "GPUS_PER_NODE": job.spec.gpus_per_node,
        "GPUS_PER_TASK": job.spec.gpus_per_task,
    }
    return {name: _gpu_text(requests) for name, requests in asked.items() if requests}


def _gpu_text(requests: Iterable[GpuRequest]) -> str:
    return ",".join(f"{request.type}:{request.count}" if request.type else str(request.count) for request in requests)


def _gpus_on_node(gpus: Sequence[int]) -> dict[str, str]:
    return {"GPUS_ON_NODE": str(len(gpus)), "JOB_GPUS": ",".join(map(str, gpus))} if gpus else {}


def _devices(gpus: Sequence[int], devices: Mapping[int, str]) -> dict[str, str]:
    """Return CUDA's names of `gpus`, if they differ from their indices."""
    if not any(devices.get(index) for index in gpus):
        return {}
    return {"GPU_DEVICES": ",".join(devices.get(index) or str(index) for index in gpus)}


def _of_node(node: str) -> dict[str, str]:
    return {
        "HPCSCHED_NODENAME": node,
        "SLURMD_NODENAME": node,
        "SLURM_TOPOLOGY_ADDR": node,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "SLURM_NODE_ALIASES": "(null)",
    }


def _distribution(text: str) -> dict[str, str]:
    kind, _, size = text.partition("=")
    return {"DISTRIBUTION": kind, **({"DIST_PLANESIZE": size} if size else {})}


def _of_installation(job: Job, cluster: str, conf: str) -> dict[str, str]:
    """Return Slurm's variables about its installation, for Slurm's commands; ours ignore them."""
    ours = {"SLURM_PRIO_PROCESS": "0", "SLURM_WORKING_CLUSTER": f"{cluster}:{job.spec.submit_host}:0:0:0"}
    return ours | ({"SLURM_CONF": conf} if conf else {})


_NO_PORTS = {"SLURM_SRUN_COMM_PORT": "0", "SLURM_STEP_LAUNCHER_PORT": "0"}  # only the agent reaches hrun

# Values for which Slurm has no variable, or which Slurm omits if they are zero.
_OURS_ONLY = frozenset({"STEP_GPUS_PER_TASK", "GPU_DEVICES", "ATTEMPT", "SHARE", "MASTER_ADDR", "MASTER_PORT"})
_NOT_ZERO = frozenset({"RESTART_COUNT"})


def _twins(facts: Mapping[str, str]) -> dict[str, str]:
    env = {f"HPCSCHED_{name}": value for name, value in facts.items()}
    for name, value in facts.items():
        if name not in _OURS_ONLY and not (name in _NOT_ZERO and value == "0"):
            env[f"SLURM_{name}"] = value
    return env
