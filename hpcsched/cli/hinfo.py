"""hinfo and sinfo: partitions and nodes, free resources, and why nodes are down.

Like in sinfo, a row is the nodes of a partition in one state; nodes that are down or drained are also grouped by reason and
time.
"""

from __future__ import annotations

import os
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli import hctl
from hpcsched.cli.output import bar, print_json, run_command, wants_colour
from hpcsched.cli.slurm import look_again, run_face
from hpcsched.cli.slurm.records import print_nodes, state_by_jobs
from hpcsched.client import Json
from hpcsched.commands.options import (
    ELSEWHERE,
    HELP_LONG,
    VERSION,
    Command,
    Face,
    Option,
    UsageError,
    Words,
    with_names,
)
from hpcsched.errors import NotFoundError
from hpcsched.listing.formats import (
    Cell,
    FormatField,
    Look,
    cell_text,
    format_lines,
    header_text,
    parse_long,
    parse_percent,
)
from hpcsched.listing.text import DIM, GREEN, RED, YELLOW, clean, columns, date_text
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.units import format_mem, format_time_s

Node = Json
Partition = Json

COMMAND = Command(
    "hinfo",
    ("[OPTIONS]",),
    "Show partitions and the states of their nodes, and why and since when nodes are down or drained.",
    (
        Option("Format", "O", "LIST", "show these columns, with sinfo's long names: NodeList:30,CPUsState,StateLong"),
        Option("format", "o", "FORMAT", "show these columns, with sinfo's letters: '%P %D %t %N'"),
        Option("json", help="print partitions and nodes as JSON, version 1"),
        Option("list-reasons", "R", help="show why nodes are down or drained, who drained them, and when"),
        Option("long", "l", help="show more columns"),
        Option("Node", "N", help="show one line per node: CPUs, memory and GPUs, in use and in total"),
        Option("noheader", "h", help="do not print headers"),
        Option("nodes", "n", "LIST", "show these nodes: n1,n[3-5]"),
        Option("partition", "p", "LIST", "show these partitions"),
        Option("reservation", "T", help="show the reservations with times and nodes"),
        Option(
            "states",
            "t",
            "LIST",
            "show nodes in these states: IDLE,RESERVED,MAINT,MIXED,ALLOCATED,POWERED_DOWN,POWERING_UP,POWERING_DOWN,DOWN,"
            "DRAINED,DRAINING,UNKNOWN",
        ),
        Option("summarize", "s", help="show one line per partition, with the number of nodes in use"),
        HELP_LONG,
        VERSION,
    ),
)
LONG = "%P %a %l %L %D %T %C %m %G %f %N"
SUMMARY = "%P %a %l %F %C %N"

POWER_SUFFIXES = {"POWERED_DOWN": "~", "POWERING_UP": "#", "POWERING_DOWN": "%"}  # sinfo's
STATES = (
    *("IDLE", "RESERVED", "MAINT", "MIXED", "ALLOCATED", *POWER_SUFFIXES, "DOWN", "DRAINED", "DRAINING", "UNKNOWN"),
)
_STATES_BY_WORD = {
    "mix": "MIXED", "alloc": "ALLOCATED", "drng": "DRAINING", "unk": "UNKNOWN", "resv": "RESERVED",
    **{word.lower(): word for word in STATES},
}  # fmt: skip
_COLOURS = {"IDLE": GREEN, "MIXED": YELLOW, "ALLOCATED": YELLOW, "UNKNOWN": DIM, "RESERVED": DIM, "MAINT": DIM}
_COLOURS |= dict.fromkeys(POWER_SUFFIXES, DIM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if words.operands:
        raise UsageError(f"cannot understand {words.operands[0][:60]!r}: to see one node write -N -n NODE")
    if words.has("reservation"):
        return _show_reservations(words, as_json=words.has("json"))
    wanted = _wanted_states(words)
    answer = client.call("GET", "/v1/nodes")
    found = client.call("GET", "/v1/partitions")
    partitions = found["partitions"]
    if words.has("partition"):
        partitions = _chosen(partitions, words.listed("partition"))
    nodes = [node for node in answer["nodes"] if node["state"] in wanted and _is_named(node, words, partitions)]
    if words.has("json"):
        print_json({**answer, "partitions": partitions, "nodes": nodes})
        return 0
    header = not words.has("noheader")
    if words.has("format") or words.has("Format") or words.has("summarize") or words.has("long"):
        sys.stdout.write(_formatted(words, partitions, nodes, header))
    elif words.has("list-reasons"):
        sys.stdout.write(_reasons(nodes, header))
    elif words.has("Node"):
        sys.stdout.write(_by_node(nodes, header))
    else:
        sys.stdout.write(_by_partition(partitions, nodes, header))
        sys.stdout.write(_power(found.get("circuits", ())) if header else "")
    return 0


def _power(circuits: Sequence[Json]) -> str:
    """Return a line for each power budget; "" if there is none."""
    lines = []
    for circuit in circuits:
        name = f" of circuit {clean(circuit['name'])}" if circuit["name"] else ""
        taken = f"; {'+'.join(circuit['sources'])}: {circuit['measured_watts']:.0f} W" if circuit["sources"] else ""
        lines.append(f"Power{name}: jobs count {circuit['used_watts']} of {circuit['total_watts']} W{taken}\n")
    return "\n" + "".join(lines) if lines else ""


def _formatted(words: Words, partitions: Sequence[Partition], nodes: Sequence[Node], header: bool) -> str:
    """Return the lines of a format; only sinfo's formats have fixed widths."""
    look = Look(0.0)
    given = words.last("format")
    if words.has("Format"):
        cells = parse_long(words.last("Format"), FIELDS)
    else:
        cells = parse_percent(given or (SUMMARY if words.has("summarize") else LONG), FIELDS)
    groups = groups_of(cells, partitions, nodes, each=words.has("Node"))
    if given or words.has("Format"):
        return "".join(f"{line}\n" for line in format_lines(cells, groups, look, header=header))
    shown = [cell for cell in cells if cell.field is not None]
    rows = [[cell_text(cell, group, look) for cell in shown] for group in groups]
    return columns([header_text(cell) for cell in shown] if header else [], rows)


def _show_reservations(words: Words, *, as_json: bool) -> int:
    answer = hctl.fetch([])
    if as_json:
        print_json(answer)
    elif answer["reservations"]:
        sys.stdout.write(hctl.table(answer["reservations"], header=not words.has("noheader")))
    else:
        print("No reservations in the system")
    return 0


def _wanted_states(words: Words) -> frozenset[str]:
    wanted = set()
    for word in words.listed("states"):
        state = _STATES_BY_WORD.get(word.lower())
        if state is None and word.lower() not in ("drain", "all"):
            raise UsageError(f"Invalid node state specified: {word[:60]}; there are {', '.join(STATES)}")
        wanted |= {"DRAINED", "DRAINING"} if word.lower() == "drain" else {state} if state else set(STATES)
    return frozenset(wanted or STATES)


def _chosen(partitions: Sequence[Partition], names: Sequence[str]) -> list[Partition]:
    known = [partition["name"] for partition in partitions]
    for name in names:
        if name not in known:
            raise NotFoundError(f"cannot show partition {name[:60]!r}: there are {', '.join(known) or 'none'}")
    return [partition for partition in partitions if partition["name"] in names]


def _is_named(node: Node, words: Words, partitions: Sequence[Partition]) -> bool:
    """Return whether --nodes and --partition, if they are given, select the node."""
    if words.has("nodes") and node["name"] not in expand_hostlist(",".join(words.given["nodes"])):
        return False
    return not words.has("partition") or any(node["name"] in partition["nodes"] for partition in partitions)


_POWER_WORDS = {
    "POWERED_DOWN": "switched off",
    "POWERING_UP": "being switched on",
    "POWERING_DOWN": "being switched off",
}


def why_text(node: Node) -> str:
    """Return why a node accepts no jobs, and since when; "" if it does."""
    if node["state"] in POWER_SUFFIXES:
        return f"{_POWER_WORDS[node['state']]} by {clean(node['power_by'])} (since {date_text(node['power_since_s'])})"
    why, since_s = _why(node)
    return f"{why or 'no reason known'} (since {date_text(since_s, 'unknown')})" if _is_out(node) else ""


def _why(node: Node) -> tuple[str, float | None]:
    if node["state"] in ("DRAINED", "DRAINING"):
        return clean(node["drained_why"]), node["drained_at_s"]
    why = clean(node["link_why"])
    if node["drained"]:
        why += f"; drained: {clean(node['drained_why'])}"
    return why, node["link_since_s"] or None


def _is_out(node: Node) -> bool:
    return node["state"] in ("DOWN", "DRAINED", "DRAINING")


# ----- by partition


def _by_partition(partitions: Sequence[Partition], nodes: Sequence[Node], header: bool) -> str:
    by_name = {node["name"]: node for node in nodes}
    rows: list[list[str]] = []
    colours = []
    for partition in partitions:
        groups: dict[tuple[str, str], list[str]] = {}
        for name in partition["nodes"]:
            if name in by_name:
                node = by_name[name]
                groups.setdefault((node["state"], why_text(node)), []).append(name)
        for (state, why), names in sorted(groups.items(), key=lambda item: STATES.index(item[0][0])):
            rows.append([*_partition_cells(partition), str(len(names)), state, compress_hostlist(names), why])
            colours.append(_COLOURS.get(state, RED))
        if not groups:
            rows.append([*_partition_cells(partition), "0", "n/a", "", ""])
            colours.append(DIM)
    headers = [
        "PARTITION",
        "AVAIL",
        "TIMELIMIT",
        "NODES",
        "STATE",
        "NODELIST",
        "WHY" if any(r[-1] for r in rows) else "",
    ]
    return columns(headers if header else [], rows, right=(2, 3), colours=colours if wants_colour() else ())


def _partition_cells(partition: Partition) -> list[str]:
    limit = "infinite" if partition["max_time_s"] is None else format_time_s(partition["max_time_s"])
    return [clean(partition["name"]) + "*" * partition["default"], avail_text(partition), limit]


# ----- by node


def _by_node(nodes: Sequence[Node], header: bool) -> str:
    bars = wants_colour()
    headers = [
        "NODE",
        "STATE",
        "CPUS",
        "MEMORY",
        "GPUS",
        "PARTITIONS",
        "JOBS",
        "WHY" if any(map(why_text, nodes)) else "",
    ]
    rows = [
        [
            clean(node["name"]),
            node["state"],
            _use(node["cpus_alloc"], node["cpus"], str, bars),
            _use(node["mem_alloc_mib"], node["mem_mib"], format_mem, bars),
            _gpus(node, bars),
            ",".join(map(clean, node["partitions"])),
            ",".join(map(str, node["jobs"])) or "-",
            why_text(node),
        ]
        for node in nodes
    ]
    colours = [_COLOURS.get(node["state"], RED) for node in nodes] if bars else ()
    return columns(headers if header else [], rows, colours=colours)


def _use(part: int, whole: int, text: Callable[[int], str], bars: bool) -> str:
    return (f"{bar(part, whole)} " if bars else "") + f"{text(part)}/{text(whole)}"


def _gpus(node: Node, bars: bool) -> str:
    if not node["gpus"]:
        return "-"
    types = sorted({clean(gpu["type"]) for gpu in node["gpus"]})
    return f"{_use(node['gpus_alloc'], len(node['gpus']), str, bars)} {','.join(types)}"


# ----- reasons


def _reasons(nodes: Sequence[Node], header: bool) -> str:
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for node in filter(_is_out, nodes):
        why, since_s = _why(node)
        by = clean(node["drained_by"]) if node["state"] != "DOWN" else "hpcsched"
        groups.setdefault((why, by, date_text(since_s, "unknown"), node["state"]), []).append(node["name"])
    rows = [[why, by, since, state, compress_hostlist(names)] for (why, by, since, state), names in groups.items()]
    return columns(["REASON", "USER", "TIMESTAMP", "STATE", "NODELIST"] if header else [], rows)


# ----- sinfo: partitions and nodes in Slurm's format


SINFO_FORMAT = "%9P %.5a %.10l %.6D %.6t %N"
SINFO_LONG = "%9P %.5a %.10l %.10s %.4r %.8h %.10g %.6D %.11T %.11i %N"
SINFO_SUMMARY = "%9P %.5a %.10l %.16F %N"
SINFO_NODES = "%N %.6D %P %6t"
SINFO_NODES_LONG = "%N %.6D %P %.11T %.4c %.8z %.6m %.8d %.6w %.8f %20E"
SINFO_REASONS = "%20E %9u %19H %N"
SINFO_REASONS_LONG = "%20E %12U %19H %6t %N"
_WIDE = ("nodelist", "partition")  # of -N: as wide as the content
_DEAD = ("DOWN", "UNKNOWN")

# fmt: off
SINFO = Face(Command(
    "sinfo",
    ("[OPTIONS]",),
    "Show partitions and nodes.",
    (
        *with_names(COMMAND.options, "Format format json list-reasons long Node nodes noheader partition reservation "
                    "states summarize"),
        Option("all", "a", help="show all partitions (the default)"),
        Option("dead", "d", help="show nodes that do not answer"),
        Option("exact", "e", help="do not group nodes that differ in numbers"),
        Option("iterate", "i", "SECONDS", "refresh every SECONDS until interrupted"),
        Option("responding", "r", help="show nodes that answer"),
        Option("sort", "S", "LIST", "sort by these columns"),
        Option("verbose", "v", help="print more"),
        HELP_LONG,
        VERSION,
    ),
    accepted=(*ELSEWHERE, Option("hide"), Option("future", "F"), Option("yaml"), Option("usage")),
), "slurm_load_partitions")
# fmt: on


def sinfo(argv: Sequence[str] | None = None) -> int:
    """Run sinfo and return its exit status."""
    return run_face(SINFO, lambda words: look_again(words, _look_sinfo), argv)


def _look_sinfo(words: Words) -> int:
    if words.has("reservation"):
        return _show_reservations(words, as_json=False)
    header = not words.has("noheader")
    cells = _sinfo_cells(words)
    answer = client.call("GET", "/v1/nodes")
    partitions = client.call("GET", "/v1/partitions")["partitions"]
    if words.has("partition"):
        wanted = words.listed("partition")
        partitions = [partition for partition in partitions if partition["name"] in wanted]
    nodes = [node for node in answer["nodes"] if _is_shown_by_sinfo(node, words, partitions)]
    if words.has("json"):
        print_nodes(nodes)
        return 0
    groups = groups_of(cells, partitions, nodes, each=words.has("Node") or words.has("exact"))
    groups = _sorted([group for group in groups if group.nodes or not _narrows(words)], words)
    look = Look(answer["now_s"], os.environ.get("SLURM_TIME_FORMAT", ""))
    if words.has("long") and header:
        print(time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(look.now_s)))
    for line in format_lines(_fitted(cells, groups, words, look), groups, look, header=header):
        print(line)
    return 0


def _sinfo_cells(words: Words) -> list[Cell]:
    """Return the cells of the given format, or of the default format for the requested list."""
    if words.has("Format"):
        return parse_long(words.last("Format"), FIELDS)
    long = words.has("long")
    text = words.last("format")
    if not text and words.has("summarize"):
        text = SINFO_SUMMARY
    elif not text and words.has("list-reasons"):
        text = SINFO_REASONS_LONG if long else SINFO_REASONS
    elif not text and words.has("Node"):
        text = SINFO_NODES_LONG if long else SINFO_NODES
    elif not text:
        text = os.environ.get("SINFO_FORMAT", "") or (SINFO_LONG if long else SINFO_FORMAT)
    return parse_percent(text, FIELDS)


def _fitted(cells: Sequence[Cell], groups: Sequence[NodeGroup], words: Words, look: Look) -> Sequence[Cell]:
    """Return the cells; the first columns of -N become as wide as their content."""
    if not words.has("Node") or words.has("format") or words.has("Format"):
        return cells
    made = []
    for cell in cells:
        if cell.field is not None and not cell.width and cell.field.name in _WIDE:
            texts = [cell_text(cell, group, look) for group in groups]
            cell = cell._replace(width=max(map(len, [header_text(cell), *texts])))
        made.append(cell)
    return made


def _narrows(words: Words) -> bool:
    return any(words.has(name) for name in ("nodes", "states", "dead", "responding", "list-reasons"))


_SLURMS_STATES = {
    "comp": (), "completing": (), "drain": ("DRAINED", "DRAINING"), "drng": ("DRAINING",), "fail": (), "failing": (),
    "future": (), "maint": ("MAINT",), "resv": ("RESERVED",), "no_respond": _DEAD, "npc": (), "perfctrs": (), "planned": (),
    "power_down": ("POWERING_DOWN",), "power_up": ("POWERING_UP",), "reboot": (), "cloud": (),
    "error": (), "inval": (), "block": (), "blocked": (), "unk": ("UNKNOWN",), "alloc": ("ALLOCATED",), "mix": ("MIXED",),
}  # fmt: skip


def _is_shown_by_sinfo(node: Json, words: Words, partitions: Sequence[Json]) -> bool:
    if not _is_named(node, words, partitions):
        return False
    if words.has("dead") and node["link"] == "up" or words.has("responding") and node["link"] != "up":
        return False
    if words.has("list-reasons") and not (node["drained"] or node["state"] == "DOWN"):
        return False
    wanted = words.listed("states")
    return not wanted or any(_is_in(node, word) for word in wanted)


def _is_in(node: Json, word: str) -> bool:
    """Return whether a node is in state `word`, in Slurm's syntax: a name or its beginning.

    ``all``; ``a&b``.
    """
    if "&" in word:
        return all(_is_in(node, part) for part in word.split("&"))
    plain = word.lower().rstrip("*~#!%$@^-+")
    if plain == "all":
        return True
    states = _SLURMS_STATES.get(plain)
    if states is None:
        states = tuple(state for state in STATES if plain and state.lower().startswith(plain))
        if not states:
            raise UsageError(f"Bad state string: {word[:60]}")
    return node["state"] in states


def _text_of(field: FormatField) -> Callable[[NodeGroup], str]:
    return lambda group: field.text(group, Look(0.0))


def _sorted(groups: Sequence[NodeGroup], words: Words) -> list[NodeGroup]:
    """Return the lines in the requested order.

    By default by partition, unavailable nodes first, like sinfo.
    """
    made = list(groups)
    keys = words.listed("sort") or ([] if words.has("Node") else ["-st"])
    for word in reversed(keys):
        name = word.lstrip("#+-")
        field = next((field for field in FIELDS if name and name in (field.letter, field.name)), None)
        if field is None:
            raise UsageError(f"Invalid sort specification: {word[:60]}")
        if word == "-st":
            order = {id(group.partition): at for at, group in reversed(list(enumerate(groups)))}
            made.sort(key=lambda group: (order[id(group.partition)], _rank(group)))
        else:
            made.sort(key=_text_of(field), reverse="-" in word)
    return made


_RANKS = (
    *("DOWN", "UNKNOWN", "DRAINED", "DRAINING", *POWER_SUFFIXES, "MAINT", "RESERVED", "MIXED", "ALLOCATED", "IDLE"),
)


def _rank(group: NodeGroup) -> int:
    return _RANKS.index(group.nodes[0]["state"]) if group.nodes else 0


# ----- the columns of nodes: sinfo's letter, header and long names, and the text for a group of nodes
# A group is one line: nodes of one partition (or of all) with equal values in the format. As in sinfo, different texts make
# different lines; of different numbers, the lowest is shown with a +. Source: sinfo(1) -o and -O.


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
    if state in POWER_SUFFIXES:
        state, star = state_by_jobs(node), POWER_SUFFIXES[state]
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
    return {"INACTIVE": "inact"}.get(partition["state"], partition["state"].lower())


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
