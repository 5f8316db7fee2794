"""Resources, nodes and partitions: configuration, probe results, and state.

A node has a *link* state (does its agent answer?) and an *admin* state (drained?). What users see (`NodeState`) is
derived from both and from what is allocated, as `sinfo` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from hpcsched.model.accounting import NO_LIMITS, Limits
from hpcsched.model.ids import NodeName
from hpcsched.model.probation import CHECK, LINK_CHECK, Probation

# ----- resources: what a node has, and what a job holds of it
# Requests count GPUs by type; the indices of the GPUs that a job got are in its `Share`. A MIG device is a GPU whose type is its
# profile (``1g.10gb``).


ANY_GPU = ""  # a request that does not name a type


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node: its index there (as nvidia-smi counts) and its type, e.g. ``a100``.

    With `shards` above 1 that many jobs, or fewer that take more of it, may share it; nothing keeps them from each other's
    part of its memory. `device` is what CUDA_VISIBLE_DEVICES calls it where that is not its index: ``MIG-<uuid>``.
    """

    index: int
    type: str
    shards: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """`count` GPUs, or shards of one GPU, of one type; ANY_GPU: no type is given."""

    count: int
    type: str = ANY_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of one node that one attempt of a job holds.

    With `shards` it holds so many of the `shards_of` shards of its one GPU; 0: its GPUs are its alone.
    """

    node: NodeName
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...] = ()  # indices
    tasks: int = 1  # how many of the job's tasks run here by default
    shards: int = 0
    shards_of: int = 0
    component: int = 0  # of a heterogeneous job: whose node this is
    spool: str = ""  # into which the attempt is launched there; "": not known

    @property
    def gpu_part(self) -> float:
        """Return the part of each of its GPUs that it holds: less than 1 with shards."""
        return self.shards / self.shards_of if self.shards else 1.0

    @property
    def gpu_amount(self) -> float:
        """Return how many GPUs it holds, shards as their part of one."""
        return self.gpu_part if self.shards else float(len(self.gpus))


def without_cpus(shares: Iterable[Share]) -> tuple[Share, ...]:
    """Return the shares of a job that is suspended so that another job has its cpus."""
    return tuple(replace(share, cpus=0) for share in shares)


# ----- nodes and partitions


LAUNCH_CHECK = "hpcschedd/launch"  # drains a node that could not start jobs that other nodes could start
JOB_SCRIPTS = "hpcschedd/scripts"  # drains a node where the administrator's prolog or epilog has failed
TESTING = "TESTING: burn-in"  # the reason of the drain of a new node that gets no jobs until it has passed its tests
POWER_SAVING = "hpcschedd/power"  # switches idle nodes off, and on for jobs
OURSELVES = "hpcschedd"  # drains a node that cannot take launches, by its report or by what is known
CHECKS = frozenset({CHECK, LINK_CHECK, LAUNCH_CHECK, JOB_SCRIPTS, OURSELVES})  # drain nodes; other drains are by people


class Link(StrEnum):
    UNKNOWN = "unknown"  # no answer since the controller started
    UP = "up"
    DOWN = "down"  # no answer for longer than the configuration allows


class Power(StrEnum):
    """Whether a node is switched on.

    A node that the controller does not switch is ON.
    """

    ON = "on"
    POWERING_DOWN = "powering_down"  # told to switch itself off; takes no jobs
    POWERED_DOWN = "powered_down"  # switched off; takes jobs, which wait until it is back
    POWERING_UP = "powering_up"  # is being switched on

    @property
    def is_off(self) -> bool:
        """Return whether the node is off, or has not come back yet: nothing runs there."""
        return self in (Power.POWERED_DOWN, Power.POWERING_UP)


class NodeState(StrEnum):
    """Slurm's words for `sinfo`."""

    UNKNOWN = "UNKNOWN"
    IDLE = "IDLE"
    MIXED = "MIXED"
    ALLOCATED = "ALLOCATED"
    DOWN = "DOWN"
    DRAINED = "DRAINED"
    DRAINING = "DRAINING"
    RESERVED = "RESERVED"  # idle, in an active reservation
    MAINT = "MAINT"  # the same, for maintenance
    POWERING_DOWN = "POWERING_DOWN"
    POWERED_DOWN = "POWERED_DOWN"
    POWERING_UP = "POWERING_UP"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node as the configuration describes it: how it is reached and what it may give."""

    name: NodeName
    host: str
    port: int | None = None  # None: ~/.ssh/config or 22
    user: str | None = None
    identity_file: str | None = None
    host_key: str  # pinned: "ssh-ed25519 AAAA..."
    cpus: int
    mem_mib: int
    gpus: tuple[Gpu, ...] = ()
    features: tuple[str, ...] = ()
    root: str = ""  # directory of the agent's spool; empty: the agent's default
    python: str = "python3"
    weight: int = 1  # nodes of a lower weight are used first
    switch: str = ""  # network switch; empty: not known
    speed: float = 0.0  # as the probe measured it; 0: not known
    link_mbps: int = 0  # of its network; 0: not known
    tmp_mib: int = 0  # of its file system for temporary files
    confine: tuple[str, ...] | None = None  # what it keeps a job to; None: as the cluster does
    gpu_files: tuple[str, ...] = ()  # the device file of each GPU; empty: the driver's
    mac: str = ""  # of its network card
    added: float | None = None  # Unix seconds; None: not known
    formerly: tuple[str, ...] = ()  # its earlier names
    suspend_after: float | None = None  # seconds; 0: it stays on; None: as in [power]
    idle_watts: float = 0.0  # of its power without GPUs, as declared; 0: not known
    peak_watts: float = 0.0
    gpu_watts: float = 0.0  # the power limit of each GPU; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNode:
    """What the last assessments say of a node: see `hpcsched.metrics.bench`.

    `near`: the nodes that its links reach with at least that class, the best class first. They are a set of bits, because a
    plan intersects many of them; `link_bit` is the node's own.
    """

    features: tuple[str, ...] = ()
    cpu_speed: float = 0.0  # as `NodeSpec.speed`; 0: not measured since that was set
    gemm_gflops: float = 0.0  # of its slowest GPU; 0: not measured
    near: tuple[tuple[int, int], ...] = ()
    link_bit: int = 0


UNMEASURED = MeasuredNode()

REACH = ("host", "port", "user", "host_key", "root")  # the fields that identify the spool of a node


def reach_of(spec: NodeSpec) -> dict[str, str | int | None]:
    """Return the fields of a node's description that identify its spool."""
    return {name: getattr(spec, name) for name in REACH}


def address_of(spec: NodeSpec) -> str:
    """Return the address at which other nodes reach this one."""
    return "127.0.0.1" if spec.host == "local" else spec.host


class Ability(NamedTuple):
    """Whether a node can enforce something on jobs: see `hpcnode.shepherd.confinement`."""

    word: str
    can: bool
    why_not: str


_ABILITY = re.compile(r"[a-z][a-z_]{0,31}\Z")
MAX_ABILITIES = 32
MAX_WHY = 200


def abilities_of(facts: object) -> tuple[Ability, ...]:
    """Return the abilities in an agent's facts; malformed ones are ignored."""
    if not isinstance(facts, list):
        return ()
    found = []
    for item in facts[:MAX_ABILITIES]:
        match item:
            case [str(word), bool(can), str(why)] if _ABILITY.match(word):
                found.append(Ability(word, can, "".join(c if c.isprintable() else "?" for c in why[:MAX_WHY])))
    return tuple(found)


class LaunchFailure(NamedTuple):
    """A job that this node could not start and another node could."""

    job_id: int
    uid: int
    by_admin: bool
    of_exec: bool  # see `hpcsched.model.job.Refusal`
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as the controller keeps it.

    One row of the table `nodes` (specs come from the configuration).
    """

    spec: NodeSpec
    link: Link = Link.UNKNOWN
    link_since_s: float = 0.0
    link_why: str = ""
    drained: bool = False
    drained_why: str = ""
    drained_by: str = ""  # user name, or "hhealth" for what the health check drained (it resumes only those)
    drained_at_s: float | None = None
    boot_id: str = ""
    machine_id: str = ""  # equal for several nodes on one machine
    spool: str = ""  # of the agent that answered last; "": not known
    hardware: str = ""  # of the machine that answered last: equal after a reboot; "": not known
    agent_version: str = ""
    launch_failures: tuple[LaunchFailure, ...] = ()  # since the last job that it started, the newest last
    has_orphans: bool = False  # it runs what was launched before the database was restored, by its last word
    root_agent: bool = False  # the agent runs as root there and can start jobs as their submitters
    abilities: tuple[Ability, ...] = ()  # empty: not known
    measured: MeasuredNode = UNMEASURED
    probation: Probation = Probation()  # read from its events
    power: Power = Power.ON
    power_since_s: float = 0.0
    power_by: str = ""  # who switches it off or on: a user, or `POWER_SAVING`
    power_why: str = ""  # why the last switching has failed; "": it has not

    @property
    def name(self) -> NodeName:
        return self.spec.name

    @property
    def features(self) -> tuple[str, ...]:
        """The configured features, then those of its assessments."""
        return tuple(dict.fromkeys((*self.spec.features, *self.measured.features)))

    @property
    def speed(self) -> float:
        """The newer one of the measured and the configured speed of its cpus."""
        return self.measured.cpu_speed or self.spec.speed

    def not_enforced(self, confine: tuple[str, ...]) -> tuple[Ability, ...]:
        """Return what the node cannot enforce of memory, huge pages and `confine`."""
        wanted = {"memory", "hugepages", *(confine if self.spec.confine is None else self.spec.confine)}
        if not self.spec.gpus:
            wanted.discard("gpus")
        return tuple(ability for ability in self.abilities if not ability.can and ability.word in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """Nodes with a common supply of power, and what they may take together.

    The one without a name is that of all nodes.
    """

    name: str = ""
    budget_watts: float
    nodes: tuple[NodeName, ...] = ()  # empty: all

    def feeds(self, node: NodeName) -> bool:
        """Return whether it supplies this node."""
        return not self.nodes or node in self.nodes


class PartitionState(StrEnum):
    """Slurm's states of a partition. What runs in it continues in all of them."""

    UP = "UP"
    DOWN = "DOWN"  # accepts jobs, starts none
    DRAIN = "DRAIN"  # accepts no jobs, starts those that it has
    INACTIVE = "INACTIVE"  # neither

    @property
    def takes_jobs(self) -> bool:
        return self in (PartitionState.UP, PartitionState.DOWN)

    @property
    def starts_jobs(self) -> bool:
        return self in (PartitionState.UP, PartitionState.DRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    name: str
    nodes: tuple[NodeName, ...]
    default: bool = False
    state: PartitionState = PartitionState.UP
    max_time_s: int | None = None  # None: no limit
    default_time_s: int | None = None
    priority_tier: int = 1
    priority_job_factor: int = 1  # against the highest of all partitions
    default_mem_per_cpu_mib: int | None = None  # None: an even part of the node's memory
    max_nodes: int | None = None
    limits: Limits = NO_LIMITS
    billing: tuple[tuple[str, float], ...] = ()  # see `Accounting.billing`; empty: as there
    allow_accounts: tuple[str, ...] = ()  # whose jobs it takes, those of their subaccounts too; empty: of all
    allow_qos: tuple[str, ...] = ()
    keep_on: int = 0  # so many of its nodes are not switched off to save power
