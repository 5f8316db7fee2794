"""hinfo: partitions and nodes: free resources, and why and since when nodes are down.

Like in sinfo, a row is the nodes of a partition in one state; nodes that are down or drained are also grouped by reason and
time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli import hctl
from hpcsched.cli.errors import run_command
from hpcsched.cli.output import bar, clean, date_text, print_json, wants_colour
from hpcsched.cli.render.node_fields import FIELDS, avail_text, groups_of
from hpcsched.client import Json
from hpcsched.commands.options import HELP_LONG, VERSION, Command, Option, UsageError, Words
from hpcsched.errors import NotFoundError
from hpcsched.listing.formats import Look, cell_text, format_lines, header_text, parse_long, parse_percent
from hpcsched.listing.table import DIM, GREEN, RED, YELLOW, columns
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
            "show nodes in these states: IDLE,RESERVED,MAINT,MIXED,ALLOCATED,DOWN,DRAINED,DRAINING,UNKNOWN",
        ),
        Option("summarize", "s", help="show one line per partition, with the number of nodes in use"),
        HELP_LONG,
        VERSION,
    ),
)
LONG = "%P %a %l %L %D %T %C %m %G %f %N"
SUMMARY = "%P %a %l %F %C %N"

STATES = ("IDLE", "RESERVED", "MAINT", "MIXED", "ALLOCATED", "DOWN", "DRAINED", "DRAINING", "UNKNOWN")
_STATES_BY_WORD = {
    "mix": "MIXED", "alloc": "ALLOCATED", "drng": "DRAINING", "unk": "UNKNOWN", "resv": "RESERVED",
    **{word.lower(): word for word in STATES},
}  # fmt: skip
_COLOURS = {"IDLE": GREEN, "MIXED": YELLOW, "ALLOCATED": YELLOW, "UNKNOWN": DIM, "RESERVED": DIM, "MAINT": DIM}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if words.operands:
        raise UsageError(f"cannot understand {words.operands[0][:60]!r}: to see one node write -N -n NODE")
    if words.has("reservation"):
        return _show_reservations(words)
    wanted = _wanted_states(words)
    answer = client.call("GET", "/v1/nodes")
    partitions = client.call("GET", "/v1/partitions")["partitions"]
    if words.has("partition"):
        partitions = _chosen(partitions, words.listed("partition"))
    nodes = [node for node in answer["nodes"] if _is_shown(node, words, partitions, wanted)]
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
    return 0


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


def _show_reservations(words: Words) -> int:
    answer = hctl.fetch([])
    if words.has("json"):
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


def _is_shown(node: Node, words: Words, partitions: Sequence[Partition], states: frozenset[str]) -> bool:
    if words.has("nodes") and node["name"] not in expand_hostlist(",".join(words.given["nodes"])):
        return False
    if words.has("partition") and not any(node["name"] in partition["nodes"] for partition in partitions):
        return False
    return node["state"] in states


def why_text(node: Node) -> str:
    """Return why a node accepts no jobs, and since when; "" if it does."""
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
        "WHY" if any(map(_is_out, nodes)) else "",
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
