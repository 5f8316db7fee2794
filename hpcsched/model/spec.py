"""What a user asks for: a job's specification, before it is a job.

Never changes after submission.

Separate from `hpcsched.model.job`, because commands make specifications and know no jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpcsched.model.frozen import frozen
from hpcsched.model.ids import NodeName
from hpcsched.model.node import GpuRequest


class DependencyKind(StrEnum):
    AFTER = "after"
    AFTER_OK = "afterok"
    AFTER_NOT_OK = "afternotok"
    AFTER_ANY = "afterany"
    AFTER_CORR = "aftercorr"
    SINGLETON = "singleton"


SIGNED_REQUEST = "HPCSCHED_SIGNED_REQUEST"  # the variable of `signed` on a node; see `hpcnode.helper`


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """One term of ``--dependency``; `job_ids` is empty for a singleton.

    An id may be an array's: then all its tasks.
    """

    kind: DependencyKind
    job_ids: tuple[int, ...] = ()
    delay_s: int = 0  # after:12+5 means five minutes after its start
    task: int | None = None  # afterok:12_3: of these arrays this task alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """``--array``: the task indices, ascending, and how many may run at once (0: no limit)."""

    indices: tuple[int, ...]
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSpec:
    """``--signal=[B:]SIG[@s]``: send `signum` `before_s` seconds before the time limit."""

    signum: int
    before_s: int = 60
    batch_only: bool = False  # B: - to the batch shell alone, not to its children and steps


@frozen
class JobSpec:
    """What a user asks for.

    Never changes after submission; `Job` has the fields that an update may override.
    """

    name: str
    script: str  # text with its #! line; empty: an allocation without a batch step (hrun alone)
    work_dir: str
    script_args: tuple[str, ...] = ()
    script_path: str = ""  # where the script was read, on the submitter's machine; empty: it was not in a file
    # Of a job in the queue: `script` is empty, and its text is in the database under this hash. See `hpcsched.state.cluster`.
    script_sha256: str = ""
    script_bytes: int = 0
    env: tuple[tuple[str, str], ...] = ()  # the part of the submitter's environment that the job inherits
    submit_line: str = ""
    submit_dir: str = ""  # where the submitting command ran; --chdir makes work_dir another
    submit_host: str = ""
    account: str = ""
    partition: str = ""  # empty: the default one
    qos: str = ""
    comment: str = ""
    stdout: str = ""  # file-name pattern, empty: slurm's default, slurm-%j.out / slurm-%A_%a.out
    stderr: str = ""  # empty: to stdout's file
    stdin: str = ""  # empty: /dev/null
    open_mode: str = ""  # "", "append" or "truncate"; empty: truncate at first, append after a requeue
    time_limit_s: int | None = None  # None: the partition's default
    time_min_s: int | None = (
        None  # the time limit may be lowered to this if the job then starts earlier; None: it stays
    )
    nodes_min: int = 1
    nodes_max: int = 1
    elastic: bool = False  # it may be asked to give nodes back, down to nodes_min, and be given more, up to nodes_max
    nodes_given: bool = False  # --nodes was given
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int = 1
    cpus_per_task_given: bool = False
    mem_per_node_mib: int | None = None  # 0: all of the node's memory
    mem_per_cpu_mib: int | None = None
    gpus_per_node: tuple[GpuRequest, ...] = ()
    gpus_total: tuple[GpuRequest, ...] = ()  # --gpus
    gpus_per_task: tuple[GpuRequest, ...] = ()
    shards_per_node: tuple[GpuRequest, ...] = ()  # --gres=shard:2, of one GPU of each node
    exclusive: bool = False
    no_shell: bool = False  # an allocation that no command holds: it stays until it is cancelled or its time is up
    overcommit: bool = False  # tasks share the cpus of one task on each node
    nodelist: tuple[NodeName, ...] = ()
    exclude: tuple[NodeName, ...] = ()
    constraint: str = ""  # features: a&b, a|b, [a*2&b*1], [a|b]
    prefer: str = ""  # features that are wanted, not needed
    mincpus: int = 0  # that each node has
    tmp_mib: int = 0  # that each node has for temporary files
    switches: int = 0  # most switches for its nodes; 0: any number
    switches_wait_s: int | None = (
        None  # after this wait it accepts more switches; None: max_switch_wait of the configuration
    )
    contiguous: bool = False  # its nodes are adjacent in the order of nodes
    spread: bool = False  # as many nodes as it may have
    distribution: str = ""  # how its steps deal tasks where they do not say: block, cyclic:block, plane=N, arbitrary
    hints: tuple[str, ...] = ()  # synchronous, comm_bound
    array: ArraySpec | None = None
    dependency: tuple[Dependency, ...] = ()
    dependency_any: bool = False  # terms joined by "?": one of them is enough
    kill_on_invalid_dep: bool = False  # it is cancelled if a dependency can never be satisfied
    begin_at_s: int | None = None  # Unix time
    deadline_at_s: int | None = None  # Unix time: it does not start if it cannot end before
    cheap_by_s: int | None = None  # Unix time: by which it must have ended if it waits for cheap energy
    gpu_power: int = 0  # watts to which each of its GPUs is limited; 0: not limited
    reservation: str = ""
    hold: bool = False
    nice: int = 0
    priority: int | None = None
    requeue: bool | None = None  # None: the configuration's default
    signal: SignalSpec | None = None
    lease: str = "keep"  # keep | kill: what a node without contact to the controller does with the job
    licenses: tuple[tuple[str, int], ...] = ()  # name and count, of the whole cluster's
    signed: str = ""  # what its user has signed, for nodes with the root helper: see `hpcsched.jobscript.signing`
    signed_until_s: int = 0  # Unix time: its signature expires
    mail_user: str = ""
    mail_type: tuple[str, ...] = ()
    # Of a heterogeneous job (sbatch A : B) what is behind its first component, which is this: of each of them only its
    # name and what it asks of its own nodes count.
    components: tuple[JobSpec, ...] = ()

    @property
    def has_script(self) -> bool:
        """Whether there is a batch step to run; if not, it is an allocation."""
        return bool(self.script or self.script_sha256)
