"""The columns of nodes: sinfo's letter, header and long names, and the text for a group of nodes.

A group is one line: nodes of one partition (or of all) with equal values in the format. As in sinfo, different texts make
different lines; of different numbers, the lowest is shown with a +. Source: sinfo(1) -o and -O.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched.client import Json
from hpcsched.listing.formats import Cell, FormatField, Look
from hpcsched.listing.text import date_text
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_time_s

Node = Json
Partition = Json

IN_USE = ("ALLOCATED", "MIXED", "DRAINING")
OUT = ("DOWN", "DRAINED", "UNKNOWN")


class NodeGroup(namedtuple("NodeGroup", "partition nodes")):
    """The nodes of one line, and their partition; None if the line is for all partitions."""

    __slots__ = ()

    partition: Partition | None
    nodes: list[Node]


# ----- of one node


_SHORT = {
    "MIXED": "mix",
    "ALLOCATED": "alloc",
    "DRAINED": "drain",
    "DRAINING": "drng",
    "UNKNOWN": "unk",
    "RESERVED": "resv",
}


def state_text(node: Node, *, short: bool) -> str:
    """Return the state of a node, with a star if it does not answer."""
    state = node["state"]
    star = "*" if node["link"] != "up" else ""
    return (_SHORT.get(state, state.lower()) if short else state.lower()) + star


def gres_text(node: Node) -> str:
    """Return the GPUs of a node by their types: ``gpu:a100:4``."""
    counts: dict[str, int] = {}
    for gpu in node["gpus"]:
        counts[gpu["type"]] = counts.get(gpu["type"], 0) + 1
    shards = sum(gpu.get("shards", 1) for gpu in node["gpus"])
    parts = [f"gpu:{kind}:{count}" if kind not in ("", "gpu") else f"gpu:{count}" for kind, count in counts.items()]
    return ",".join(parts + ([f"shard:{shards}"] if shards > len(node["gpus"]) else [])) or "(null)"


def _gres_used(node: Node) -> str:
    return f"gpu:{node['gpus_alloc']}" if node["gpus"] else "gpu:0"


def reason_of(node: Node) -> tuple[str, str, str]:
    """Return why a node accepts no jobs, who drained it, and since when."""
    if node["drained"]:
        return node["drained_why"], node["drained_by"], date_text(node["drained_at_s"], "Unknown")
    if node["state"] == "DOWN":
        return node["link_why"] or "Not responding", "slurm", date_text(node["link_since_s"] or None, "Unknown")
    return "none", "Unknown", "Unknown"


def cpu_counts(nodes: Sequence[Node]) -> tuple[int, int, int, int]:
    """Return the number of CPUs that are allocated, idle, other, and in total."""
    total = sum(node["cpus"] for node in nodes)
    used = sum(node["cpus_alloc"] for node in nodes)
    out = sum(node["cpus"] - node["cpus_alloc"] for node in nodes if node["state"] in (*OUT, "DRAINING"))
    return used, total - used - out, out, total


def node_counts(nodes: Sequence[Node]) -> tuple[int, int, int, int]:
    """Return the number of nodes that are allocated, idle, other, and in total."""
    used = sum(node["state"] in IN_USE for node in nodes)
    out = sum(node["state"] in OUT for node in nodes)
    return used, len(nodes) - used - out, out, len(nodes)


# ----- the text of a group


def avail_text(partition: Partition) -> str:
    """Return the availability of the partition in sinfo's words: up, down, drain or inact."""
    state = partition.get("state") or (
        "UP" if partition["up"] else "DOWN"
    )  # missing in the answer of an older controller
    return {"INACTIVE": "inact"}.get(state, state.lower())


def _partition(text: Callable[[Partition], str]) -> Callable[[NodeGroup, Look], str]:
    return lambda group, look: "n/a" if group.partition is None else text(group.partition)


def _each(text: Callable[[Node], str]) -> Callable[[NodeGroup, Look], str]:
    """Return a writer for a value that all nodes of a group have in common."""
    return lambda group, look: text(group.nodes[0]) if group.nodes else "n/a"


def _least(number: Callable[[Node], int]) -> Callable[[NodeGroup, Look], str]:
    def text(group: NodeGroup, look: Look) -> str:
        numbers = [number(node) for node in group.nodes] or [0]
        return f"{min(numbers)}{'+' if min(numbers) != max(numbers) else ''}"

    return text


def _slashes(counts: Callable[[Sequence[Node]], tuple[int, ...]], of: int = 4) -> Callable[[NodeGroup, Look], str]:
    return lambda group, look: "/".join(map(str, counts(group.nodes)[:of]))


def _always(text: str) -> Callable[[NodeGroup, Look], str]:
    return lambda group, look: text


def _names(group: NodeGroup, look: Look) -> str:
    return compress_hostlist(node["name"] for node in group.nodes)


def _limit(partition: Partition) -> str:
    return "infinite" if partition["max_time_s"] is None else format_time_s(partition["max_time_s"])


def _default_time(partition: Partition) -> str:
    return "n/a" if partition["default_time_s"] is None else format_time_s(partition["default_time_s"])


# fmt: off
# Fields that separate groups: those of partitions (then lines are per partition), and texts of nodes.
_OF_PARTITION = (
    FormatField("partition", "P", "PARTITION", _partition(lambda partition: partition["name"] + "*" * partition["default"]),
          longs=("partition",)),
    FormatField("partitionname", "R", "PARTITION", _partition(lambda partition: partition["name"]), longs=("partitionname",)),
    FormatField("avail", "a", "AVAIL", _partition(avail_text), longs=("available",)),
    FormatField("limit", "l", "TIMELIMIT", _partition(_limit), longs=("time",)),
    FormatField("usual", "L", "DEFAULTTIME", _partition(_default_time), longs=("defaulttime",)),
    FormatField("tier", "p", "PRIO_TIER", _partition(lambda partition: str(partition["priority_tier"])), longs=("prioritytier",)),
    FormatField("factor", "I", "PRIO_JOB_FACTOR", _partition(lambda partition: str(partition["priority_job_factor"])),
          longs=("priorityjobfactor",)),
    FormatField("groups", "g", "GROUPS", _always("all"), longs=("groups",)),
    FormatField("root", "r", "ROOT", _always("no"), longs=("root",)),
    FormatField("size", "s", "JOB_SIZE", _always("1-infinite"), longs=("size",)),
    FormatField("shared", "h", "OVERSUBSCRIBE", _always("NO"), longs=("oversubscribe", "share")),
    FormatField("most", "B", "MAX_CPUS_PER_NODE", _always("UNLIMITED"), longs=("maxcpuspernode",)),
    FormatField("preempt", "M", "PREEMPT_MODE", _always("OFF"), longs=("preemptmode",)),
    FormatField("from", "S", "ALLOCNODES", _always("all"), longs=("allocnodes",)),
)
_OF_NODE = (
    FormatField("state", "T", "STATE", _each(lambda node: state_text(node, short=False)), longs=("statelong",)),
    FormatField("st", "t", "STATE", _each(lambda node: state_text(node, short=True)), longs=("statecompact", "state")),
    FormatField("states", "", "STATECOMPLETE", _each(lambda node: state_text(node, short=False)), longs=("statecomplete",)),
    FormatField("features", "f", "AVAIL_FEATURES", _each(lambda node: ",".join(node["features"]) or "(null)"),
          longs=("features",)),
    FormatField("active", "b", "ACTIVE_FEATURES", _each(lambda node: ",".join(node["features"]) or "(null)"),
          longs=("features-act", "features_act")),
    FormatField("gres", "G", "GRES", _each(gres_text), longs=("gres",)),
    FormatField("gresused", "", "GRES_USED", _each(_gres_used), longs=("gresused",)),
    FormatField("reason", "E", "REASON", _each(lambda node: reason_of(node)[0]), longs=("reason",)),
    FormatField("user", "u", "USER", _each(lambda node: reason_of(node)[1]), longs=("user",)),
    FormatField("userlong", "U", "USER", _each(lambda node: reason_of(node)[1]), longs=("userlong",)),
    FormatField("since", "H", "TIMESTAMP", _each(lambda node: reason_of(node)[2]), longs=("timestamp",)),
    FormatField("notenforced", "", "NOT_ENFORCED", _each(lambda node: ",".join(node.get("not_enforced") or ()) or "none"),
          longs=("notenforced",)),
    FormatField("reservation", "i", "RESERVATION", _each(lambda node: node.get("reservation") or ""), longs=("reservation",)),
)
_BY_NAME = (  # these columns show one node per line
    FormatField("hosts", "n", "HOSTNAMES", _each(lambda node: node["name"]), longs=("nodehost",)),
    FormatField("address", "o", "NODE_ADDR", _each(lambda node: node["host"]), longs=("nodeaddr",)),
)
_OF_GROUP = (
    FormatField("nodelist", "N", "NODELIST", _names, longs=("nodelist",)),
    FormatField("nodes", "D", "NODES", lambda group, look: str(len(group.nodes)), True, ("nodes",)),
    FormatField("use", "A", "NODES(A/I)", _slashes(node_counts, 2), longs=("nodeai",)),
    FormatField("usage", "F", "NODES(A/I/O/T)", _slashes(node_counts), longs=("nodeaiot",)),
    FormatField("cpustate", "C", "CPUS(A/I/O/T)", _slashes(cpu_counts), longs=("cpusstate",)),
    FormatField("cpus", "c", "CPUS", _least(lambda node: node["cpus"]), True, ("cpus",)),
    FormatField("memory", "m", "MEMORY", _least(lambda node: node["mem_mib"]), True, ("memory",)),
    FormatField("allocmem", "", "ALLOCMEM", _least(lambda node: node["mem_alloc_mib"]), True, ("allocmem",)),
    FormatField("free", "e", "FREE_MEM", _least(lambda node: node["mem_mib"] - node["mem_alloc_mib"]), True, ("freemem",)),
    FormatField("disk", "d", "TMP_DISK", _least(lambda node: node.get("tmp_mib") or 0), True, ("disk",)),
    FormatField("load", "O", "CPU_LOAD", _always("N/A"), True, ("cpusload",)),
    FormatField("weight", "w", "WEIGHT", _least(lambda node: node["weight"]), True, ("weight",)),
    FormatField("sockets", "X", "SOCKETS", _always("1"), True, ("sockets",)),
    FormatField("cores", "Y", "CORES", _least(lambda node: node["cpus"]), True, ("cores",)),
    FormatField("threads", "Z", "THREADS", _always("1"), True, ("threads",)),
    FormatField("sct", "z", "S:C:T", lambda group, look: f"1:{_least(lambda node: node['cpus'])(group, look)}:1", True,
          ("socketcorethread",)),
    FormatField("version", "v", "VERSION", _always("23.02.7"), longs=("version",)),
    FormatField("cluster", "V", "CLUSTER", _always("N/A"), longs=("cluster",)),
    FormatField("port", "", "PORT", lambda group, look: str(group.nodes[0]["port"] or 22) if group.nodes else "n/a",
          True, ("port",)),
    FormatField("comment", "", "COMMENT", _always("(null)"), longs=("comment",)),
    FormatField("extra", "", "EXTRA", _always("(null)"), longs=("extra",)),
)
# fmt: on
FIELDS = (*_OF_PARTITION, *_OF_NODE, *_BY_NAME, *_OF_GROUP)


def groups_of(
    cells: Sequence[Cell], partitions: Sequence[Partition], nodes: Sequence[Node], *, each: bool = False
) -> list[NodeGroup]:
    """Return the lines for `nodes`: one per set of equal values, or with `each` one per node."""
    shown = [cell.field for cell in cells if cell.field is not None]
    apart = [field for field in shown if field in _OF_NODE]
    each = each or any(field in _BY_NAME for field in shown)
    look = Look(0.0)
    by_name = {node["name"]: node for node in nodes}
    if not any(field in _OF_PARTITION for field in shown):
        return _grouped(None, list(nodes), apart, look, each=each)
    found: list[NodeGroup] = []
    for partition in partitions:
        mine = [by_name[name] for name in partition["nodes"] if name in by_name]
        found += _grouped(partition, mine, apart, look, each=each) or ([] if each else [NodeGroup(partition, [])])
    return found


def _grouped(
    partition: Partition | None, nodes: Sequence[Node], apart: Sequence[FormatField], look: Look, *, each: bool
) -> list[NodeGroup]:
    groups: dict[tuple[str, ...], list[Node]] = {}
    for node in nodes:
        alone = NodeGroup(partition, [node])
        key = tuple(field.text(alone, look) for field in apart) + ((node["name"],) if each else ())
        groups.setdefault(key, []).append(node)
    return [NodeGroup(partition, mine) for mine in groups.values()]
