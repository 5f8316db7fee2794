"""Every key of hpcsched.toml and nodes.d/NAME.toml: its kind, its default and what it is for, each said once.

`hpcsched.config` reads by this table, `hpcsched init` writes a commented file from it, and the tests hold
etc/hpcsched.toml and man/hpcsched.toml.5 against it. A kind is a function that takes the value TOML gave and returns
ours, or raises `BadValue` with what it wants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpcsched.errors import RequestError
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.units import parse_mem_mib, parse_time_s

ALL_NODES = "all"
LOCAL_HOST = "local"  # a node that is the head itself: reached without SSH
MAX_GPUS = 256

# What may reach a command line or a resolver: an allow-list, and nothing starts with a dash.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,254}\Z")
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,63}\Z")
_PYTHON = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.+-]{0,254}\Z")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_GPU = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})(?::([0-9]{1,3}))?\Z")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/:._-]{0,99}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadValue(Exception):
    """The value is not what the key takes; the text says what it takes."""


class Missing:
    """The default of a key that has none: it must be given."""


REQUIRED = Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. `default` is as TOML would give it; `shown` stands for it where the default depends on the rest."""

    name: str
    kind: Callable[[Any], Any]
    default: Any
    help: str
    shown: str = ""

    @property
    def default_text(self) -> str:
        """The default as the file shows it."""
        return self.shown or toml_value(self.default)


def toml_value(value: object) -> str:
    """Return `value` (text, number, truth or a list of them) as TOML. JSON's notation of these is TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def text(value: Any) -> str:
    if not isinstance(value, str) or _CONTROL.search(value):
        raise BadValue("wants a text on one line")
    return value


def word(value: Any) -> str:
    if not isinstance(value, str) or not _WORD.match(value):
        raise BadValue("wants a word of letters, digits and _.- (at most 63)")
    return value


def words(value: Any) -> tuple[str, ...]:
    return tuple(word(item) for item in _list(value))


def users(value: Any) -> tuple[str, ...]:
    return tuple(user(item) for item in _list(value))


def user(value: Any) -> str:
    if not isinstance(value, str) or not USER_NAME.match(value):
        raise BadValue("wants a user name")
    return value


def host(value: Any) -> str:
    if not isinstance(value, str) or not _HOST.match(value):
        raise BadValue("wants a host name, an address or a Host of ~/.ssh/config")
    return value


def python(value: Any) -> str:
    if not isinstance(value, str) or not _PYTHON.match(value):
        raise BadValue("wants the name or path of a Python 3.9 or newer")
    return value


def absolute_path(value: Any) -> str:
    if text(value) and not value.startswith("/"):
        raise BadValue("wants an absolute path")
    return value


def yes_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValue("wants true or false")
    return value


def whole(least: int, most: int = 10**9) -> Callable[[Any], int]:
    """Return the kind of whole numbers from `least` to `most`."""

    def kind(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise BadValue(f"wants a whole number from {least} to {most}")
        return value

    return kind


def seconds(least: float = 0.0) -> Callable[[Any], float]:
    """Return the kind of seconds, at least `least`."""

    def kind(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= 1e9:
            raise BadValue(f"wants seconds, {least:g} or more")
        return float(value)

    return kind


def number(least: float = 0.0, most: float = 1e9) -> Callable[[Any], float]:
    """Return the kind of numbers from `least` to `most`."""

    def kind(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise BadValue(f"wants a number, {least:g} or more")
        return float(value)

    return kind


def time_limit(value: Any) -> int | None:
    """The kind of times in Slurm's notation: seconds, None for UNLIMITED."""
    if type(value) is int and value >= 0:
        value = str(value)  # minutes, as in Slurm
    if not isinstance(value, str):
        raise BadValue('wants a time as "1-12:00:00" or "UNLIMITED"')
    try:
        limit_s = parse_time_s(value)
    except RequestError as error:
        raise BadValue(str(error)) from None
    if limit_s == 0:
        raise BadValue('wants a time above zero, or "UNLIMITED"')
    return limit_s


def memory_mib(value: Any) -> int:
    """The kind of memory sizes: a text as "64G", or a number of MiB."""
    if type(value) is int and value >= 0:
        value = str(value)
    if not isinstance(value, str):
        raise BadValue('wants a size as "64G", or a number of MiB')
    try:
        return parse_mem_mib(value)
    except RequestError as error:
        raise BadValue(str(error)) from None


def hosts(value: Any) -> tuple[str, ...] | None:
    """The kind of lists of nodes: None stands for all of them."""
    if value == ALL_NODES:
        return None
    names: list[str] = []
    for item in [value] if isinstance(value, str) else _list(value):
        try:
            names += expand_hostlist(item)
        except RequestError as error:
            raise BadValue(str(error)) from None
    if len(set(names)) != len(names):
        raise BadValue("names a node twice")
    return tuple(names)


def gpus(value: Any) -> tuple[str, ...]:
    """The kind of GPU lists: the type of each, in the order of their indices; ``"a100:4"`` stands for four."""
    types: list[str] = []
    for item in _list(value):
        match = _GPU.match(item)
        if match is None:
            raise BadValue('wants a list of GPU types as ["a100", "a100"] or ["a100:2"]')
        types += [match.group(1)] * int(match.group(2) or 1)
    if len(types) > MAX_GPUS:
        raise BadValue(f"wants at most {MAX_GPUS} GPUs")
    return tuple(types)


def devices(value: Any) -> tuple[str, ...]:
    """The kind of lists of devices as CUDA names them: MIG-<uuid>, GPU-<uuid> or an index."""
    found = tuple(_list(value))
    if not all(_DEVICE.match(item) for item in found) or len(set(found)) < len(found):
        raise BadValue('wants a list of devices, each once, as ["MIG-41b36db3-...", "MIG-8d3f5a6e-..."]')
    return found


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return the kind of words of which only these are known."""

    def kind(value: Any) -> str:
        if value not in choices:
            raise BadValue(f"wants one of {', '.join(choices)}")
        return str(value)

    return kind


def optional(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the kind that also takes what stands for "not set": an empty text or 0."""
    return lambda value: None if value in ("", 0) and value is not False else kind(value)


def _list(value: Any) -> Iterable[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadValue("wants a list of texts")
    return value


CLUSTER = (
    Key(name="name", kind=word, default="cluster", help="What the cluster is called; part of paths on the nodes."),
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
        name="admins",
        kind=users,
        default=[],
        help="Users who may act on everybody's jobs and on nodes, beside root and the controller's own account.",
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
    Key(name="heartbeat_s", kind=seconds(0.05), default=15, help="A silent connection to a node is pinged so often."),
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
        name="requeue",
        kind=yes_no,
        default=True,
        help="Whether a job runs again after the loss of a node, unless it says --requeue or --no-requeue.",
    ),
    Key(name="requeue_delay_s", kind=seconds(), default=5, help="How long a requeued job waits at least."),
)

SCHEDULER = (
    Key(
        name="policy",
        kind=one_of("easy", "easy-sjbf", "default", "conservative", "slurm-like", "fifo"),
        default="easy",
        help="easy: a job may start ahead of its turn if it does not delay the first in line (EASY backfill); easy-sjbf: "
        "the same, short limits first; default: the same, short expected run times first, but for who has waited long; "
        "slurm-like, conservative: nor the first 100, or 1000, in line; fifo: never.",
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
        "(or the signal of its --signal), time to save what it has, and is requeued; suspend: it stands still; off: nothing.",
    ),
    Key(
        name="preempt_grace_time_s",
        kind=seconds(),
        default=60,
        help="How long a job has to save what it has with preempt_mode checkpoint, unless its QOS says otherwise.",
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
        help="The agent's directory there, on a local disk. Empty: the agent's choice.",
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
        help="The size of its file system for temporary files, which --tmp asks for.",
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
