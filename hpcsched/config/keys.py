"""Every key of hpcsched.toml and nodes.d/NAME.toml: its kind, default and purpose.

`hpcsched.config.load` reads by this table, and `hpcsched init` writes a commented file from it.
Tests compare etc/hpcsched.toml and man/hpcsched.toml.5 with it. The kinds are those of
`hpcsched.config.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcsched.config.kinds import (
    ALL_NODES,
    REQUIRED,
    BadValue,
    Key,
    absolute_path,
    devices,
    gpus,
    host,
    hosts,
    memory_mib,
    number,
    one_of,
    optional,
    python,
    resource_limits,
    seconds,
    text,
    time_limit,
    user,
    users,
    whole,
    word,
    words,
    yes_no,
)
from hpcsched.errors import ConfigError
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.text import nearest

CLUSTER = (
    Key(
        name="name",
        kind=word,
        default="cluster",
        help="What the cluster is called; part of paths on the nodes. It cannot change while jobs hold nodes.",
    ),
    Key(
        name="share",
        kind=absolute_path,
        default="",
        help="A directory that all nodes see under this path (NFS, say): for checkpoints and outputs. Empty: none.",
    ),
)

CONTROLLER = (
    Key(
        name="state_dir",
        kind=text,
        default="",
        shown='"/var/lib/hpcsched"',
        help="The database's directory, on a local disk; only the controller's account may read it. "
        "Default: /var/lib/hpcsched, for a plain user ~/.local/state/hpcsched.",
    ),
    Key(
        name="run_dir",
        kind=text,
        default="",
        shown='"/run/hpcsched"',
        help="The sockets' directory. Default: /run/hpcsched, for a plain user $XDG_RUNTIME_DIR/hpcsched; "
        "if state_dir is set, the directory run in it.",
    ),
    Key(
        name="log_level",
        kind=one_of("debug", "info", "warning", "error"),
        default="info",
        help="How much the controller says: debug, info, warning or error.",
    ),
    Key(
        name="log_max_size",
        kind=memory_mib,
        default="16M",
        help="At this size a log file, as hpcsched up and hpcschedd --log-file write it, is renamed to NAME.1 and a new one "
        "begun. 0: never.",
    ),
    Key(name="log_files", kind=whole(1, 1000), default=5, help="How many renamed log files are kept."),
    Key(
        name="admins",
        kind=users,
        default=[],
        help="Users who may act on the jobs of all users and on nodes, besides root and the controller's own account.",
    ),
    Key(
        name="ssh_config",
        kind=text,
        default="~/.ssh/config",
        help="OpenSSH client configuration that is honoured: HostName, User, Port, IdentityFile, ProxyJump.",
    ),
    Key(
        name="connect_timeout_s",
        kind=seconds(1),
        default=20,
        help="A connection to a node that is not up after so long is given up and tried again.",
    ),
    Key(
        name="heartbeat_s",
        kind=seconds(0.05),
        default=15,
        help="Seconds between keepalive pings on an idle node connection.",
    ),
    Key(
        name="node_down_after_s",
        kind=seconds(0.1),
        default=40,
        help="A node that has been silent for so long is DOWN. At least twice heartbeat_s.",
    ),
    Key(
        name="kill_wait_s",
        kind=seconds(),
        default=30,
        help="How long a job that is being ended has between SIGTERM and SIGKILL.",
    ),
    Key(
        name="lease_s",
        kind=seconds(1),
        default=120,
        help="A job with --lease=kill is ended by a node that has heard nothing of the controller for so long; then it may "
        "run elsewhere. For jobs that start from now on.",
    ),
    Key(
        name="min_job_age_s",
        kind=seconds(),
        default=3600,
        help="How long an ended job stays in hqueue's reach; hacct shows it for ever.",
    ),
    Key(
        name="propagate",
        kind=resource_limits,
        default="ALL",
        help="Which resource limits (ulimit) of the submitting process a job gets, unless it says --propagate: ALL, NONE, or "
        "some of AS,CORE,CPU,DATA,FSIZE,MEMLOCK,NOFILE,NPROC,RSS,STACK. Soft limits, never above the node's hard ones.",
    ),
    Key(
        name="requeue",
        kind=yes_no,
        default=True,
        help="Whether a job runs again after the loss of a node, unless it says --requeue or --no-requeue.",
    ),
    Key(name="requeue_delay_s", kind=seconds(), default=5, help="How long a requeued job waits at least."),
    Key(
        name="allow_uid_below",
        kind=whole(0),
        default=1000,
        help="Jobs of root and system accounts, whose uid is below this, are refused where agents run as root; so are jobs of "
        "nobody and of locked accounts without a login shell. 0: jobs of all accounts are allowed.",
    ),
    Key(
        name="request_rate",
        kind=number(),
        default=50,
        help="How many requests one user may send per second, on average; many jobs submitted at once count as one. "
        "Commands that are told so wait and ask again. Not for root and the controller's own account. 0: no limit.",
    ),
    Key(
        name="request_burst",
        kind=whole(1, 1_000_000),
        default=500,
        help="How many requests one user may send at once before request_rate counts.",
    ),
)

SCHEDULER = (
    Key(
        name="policy",
        kind=one_of("easy", "easy-sjbf", "default", "conservative", "slurm-like", "fifo"),
        default="easy",
        help="easy: a job may start ahead of its turn if it does not delay the first in line (EASY backfill); easy-sjbf: "
        "the same, short limits first; default: short expected run times first, but for who has waited long; "
        "slurm-like, conservative: nor the first 100, or 1000, in line; fifo: never.",
    ),
    Key(
        name="wait_guard",
        kind=number(),
        default=0.9,
        help="Of policy default: small jobs start ahead of all others until a job has waited for this part of the longest wait "
        "that EASY backfill would have caused. Larger: lower mean slowdown under heavy load, longer longest wait.",
    ),
    Key(
        name="default_time_limit",
        kind=time_limit,
        default="UNLIMITED",
        help="The limit of jobs that name none, where their partition has none. Backfill needs limits to work with.",
    ),
    Key(name="age_max_s", kind=seconds(1), default=604800, help="Waiting longer than this raises priority no further."),
    Key(
        name="favor_small",
        kind=yes_no,
        default=False,
        help="Whether small jobs get the weight of size, not large ones.",
    ),
    Key(
        name="small_relative_to_time",
        kind=yes_no,
        default=False,
        help="Whether size is the cpus divided by the time limit in minutes: then short jobs count as large.",
    ),
    Key(
        name="accrue_always",
        kind=yes_no,
        default=False,
        help="Whether a job's age counts from its submission, and not only while nothing but other jobs keeps it waiting.",
    ),
    Key(
        name="max_switch_wait",
        kind=seconds(),
        default=300,
        help="A job with --switches=N that says no time of its own waits so long for nodes on N switches; then more will do.",
    ),
    Key(name="max_array_size", kind=whole(1), default=10000, help="The most tasks that one array may have."),
    Key(name="max_jobs", kind=whole(1), default=100000, help="The most jobs that may wait and run in all."),
    Key(
        name="max_scripts_per_user",
        kind=memory_mib,
        default="64M",
        help="The most that the job scripts of one user's waiting and running jobs may have in all; equal scripts count once.",
    ),
    Key(
        name="max_submit_jobs",
        kind=optional(whole(1)),
        default=0,
        help="The most jobs of one user that may wait and run; each task of an array is one. Not for root and the controller's "
        "own account, nor where a user or an account has a max_submit_jobs of its own. 0: a tenth of max_jobs.",
    ),
    Key(
        name="preempt_type",
        kind=one_of(*PreemptType),
        default="none",
        help="Which waiting jobs may take the place of running ones: none; qos: those whose QOS lists the other's in preempt; "
        "partition: those of a partition with a higher priority_tier, on nodes of both.",
    ),
    Key(
        name="preempt_mode",
        kind=one_of(*PreemptMode),
        default="requeue",
        help="What happens to a job that makes room, unless its QOS says otherwise: requeue; cancel; checkpoint: it gets SIGTERM "
        "(or the signal of its --signal), time to save what it has, and is requeued; suspend: it is stopped; off: nothing.",
    ),
    Key(
        name="preempt_grace_time_s",
        kind=seconds(),
        default=60,
        help="How long a job has to save what it has with preempt_mode checkpoint, and an elastic job to give nodes back "
        "before it is preempted whole, unless its QOS says otherwise.",
    ),
    Key(
        name="preempt_exempt_time_s",
        kind=seconds(),
        default=0,
        help="For so long after its start a job is not preempted, unless its QOS says otherwise.",
    ),
)

WEIGHTS = (
    Key(name="age", kind=whole(0), default=1000, help="Weight of the time a job has waited (as a part of age_max_s)."),
    Key(name="partition", kind=whole(0), default=1000, help="Weight of the partition's priority_job_factor."),
    Key(name="size", kind=whole(0), default=0, help="Weight of the part of the nodes and cpus that a job asks for."),
    Key(name="fairshare", kind=whole(0), default=10000, help="Weight of how little the user has had of late."),
    Key(name="qos", kind=whole(0), default=10000, help="Weight of the priority of the job's quality of service."),
    Key(name="assoc", kind=whole(0), default=1000, help="Weight of the priority of the user or the account."),
)

PARTITION = (
    Key(name="nodes", kind=hosts, default=ALL_NODES, help='Its nodes: "all", or a host list as "n[1-4],gpu1".'),
    Key(name="default", kind=yes_no, default=False, help="Whether jobs that name no partition come here."),
    Key(name="up", kind=yes_no, default=True, help="Whether its jobs may start."),
    Key(name="max_time", kind=time_limit, default="UNLIMITED", help="The longest time limit that a job may have."),
    Key(
        name="default_time",
        kind=optional(time_limit),
        default="",
        help="The limit of jobs that name none. Empty: the scheduler's default_time_limit.",
    ),
    Key(name="priority_tier", kind=whole(0), default=1, help="Jobs of a higher tier go before all of a lower."),
    Key(
        name="default_mem_per_cpu",
        kind=optional(memory_mib),
        default="",
        help="Memory per cpu of jobs that name none. Empty: an even part of the node's memory.",
    ),
    Key(name="max_nodes", kind=optional(whole(1)), default=0, help="The most nodes a job may have. 0: no limit."),
)

NODE = (
    Key(
        name="host",
        kind=host,
        default=REQUIRED,
        shown='"192.0.2.7"',
        help='Host name, address or a Host of ~/.ssh/config. "local": this machine, without SSH.',
    ),
    Key(name="port", kind=optional(whole(1, 65535)), default=0, help="SSH port. 0: from ~/.ssh/config, else 22."),
    Key(name="user", kind=optional(user), default="", help="SSH account. Empty: from ~/.ssh/config, else one's own."),
    Key(
        name="identity_file",
        kind=optional(text),
        default="",
        help="The one private key to log in with. Empty: the launch key that init made, then as OpenSSH does.",
    ),
    Key(
        name="host_key",
        kind=text,
        default="",
        shown='"ssh-ed25519 AAAA..."',
        help='The public host key that it must have. Needed unless host is "local".',
    ),
    Key(name="cpus", kind=whole(1, 65536), default=REQUIRED, shown="8", help="How many cpus jobs may have."),
    Key(name="memory", kind=memory_mib, default=REQUIRED, shown='"64G"', help="How much memory jobs may have."),
    Key(
        name="gpus",
        kind=gpus,
        default=[],
        help='The type of each GPU by index: ["a100", "a100"], or ["a100:2"]. Of a MIG device its profile: ["1g.10gb:7"].',
    ),
    Key(
        name="gpu_shards",
        kind=whole(1, 1000),
        default=1,
        help="Into so many shards each GPU may be cut for jobs with --gres=shard:N. They share it: nothing keeps a job from "
        "the others' part of its memory. 1: GPUs are not shared.",
    ),
    Key(
        name="gpu_devices",
        kind=devices,
        default=[],
        help='What CUDA_VISIBLE_DEVICES calls each GPU of `gpus`, where that is not its index: "MIG-..." or "GPU-...".',
    ),
    Key(name="features", kind=words, default=[], help="Words that --constraint can ask for."),
    Key(
        name="partitions",
        kind=words,
        default=[],
        help="Partitions that it belongs to, beside those whose `nodes` name it.",
    ),
    Key(
        name="root",
        kind=absolute_path,
        default="",
        help="The agent's directory there, on a local disk. Empty: the agent's choice. Like the node's address, user and "
        "host key it cannot change while jobs are held there.",
    ),
    Key(name="python", kind=python, default="python3", help="The Python there, 3.9 or newer."),
    Key(name="weight", kind=whole(0), default=1, help="Nodes of a lower weight are used first."),
    Key(
        name="speed",
        kind=number(),
        default=0,
        help="How fast a cpu of it is beside those of other nodes, as hpcsched node probe measured it: jobs with "
        "--hint=synchronous get nodes of like speed. 0: not known.",
    ),
    Key(
        name="link_mbps",
        kind=whole(0),
        default=0,
        help="The bandwidth of its network in Mbit/s, as hpcsched node probe --links measured it (else its nominal one): jobs "
        "with --hint=comm_bound prefer nodes with clearly faster ones. 0: not known.",
    ),
    Key(
        name="tmp_disk",
        kind=memory_mib,
        default=0,
        help="The size of its file system for temporary files, which --tmp asks for. 0: not known; then "
        "--tmp does not rule the node out.",
    ),
)

SWITCH = (
    Key(
        name="nodes",
        kind=hosts,
        default=REQUIRED,
        shown='"n[1-4]"',
        help="The nodes that hang on it: a host list, or a list of them.",
    ),
)

SECTIONS = {"cluster": CLUSTER, "controller": CONTROLLER, "scheduler": SCHEDULER, "scheduler.weights": WEIGHTS}

# ----- check one table of a TOML file against its allowed keys, and fill in the defaults


def values_of(path: Path, where: str, table: Any, keys: Sequence[Key], also: Sequence[str] = ()) -> dict[str, Any]:
    """Return the value of every key of `keys`, from `table` or by default."""
    table = table_of(path, where, table)
    refuse_unknown(path, where, table, (*(key.name for key in keys), *also), kind="key")
    values = {}
    for key in keys:
        given = table.get(key.name, key.default)
        if given is REQUIRED:
            raise ConfigError(f"cannot use {path}: {where} lacks the key {key.name!r}: {key.help}")
        try:
            values[key.name] = key.kind(given)
        except BadValue as error:
            raise ConfigError(f"cannot use {path}: {where} {key.name} = {given!r}: {error}") from None
    return values


def table_of(path: Path, where: str, table: Any) -> Mapping[str, Any]:
    """Return `table`; raise ConfigError if it is not a table."""
    if not isinstance(table, dict):
        raise ConfigError(f"cannot use {path}: {where} is {table!r}, and should be a table")
    return table


def refuse_unknown(path: Path, where: str, table: Mapping[str, Any], known: Sequence[str], *, kind: str) -> None:
    """Raise ConfigError for the first name in `table` that is not `known`."""
    for name in table:
        if name not in known:
            raise ConfigError(
                f"cannot use {path}: {where} has the unknown {kind} {name!r}{nearest(name, known)}; "
                f"known are {', '.join(known)}"
            )
