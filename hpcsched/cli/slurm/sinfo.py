"""sinfo: partitions and nodes in Slurm's format. The columns are in `hpcsched.cli.render.node_fields`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli import hctl, hinfo
from hpcsched.cli.render.node_fields import FIELDS, NodeGroup, groups_of
from hpcsched.cli.slurm import look_again, run_face
from hpcsched.client import Json
from hpcsched.commands.options import HELP_LONG, VERSION, Command, Option, UsageError, Words
from hpcsched.commands.slurm import ELSEWHERE, Face, with_names
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
from hpcsched.model.hostlist import expand_hostlist

FORMAT = "%9P %.5a %.10l %.6D %.6t %N"
LONG = "%9P %.5a %.10l %.10s %.4r %.8h %.10g %.6D %.11T %.11i %N"
SUMMARY = "%9P %.5a %.10l %.16F %N"
NODES = "%N %.6D %P %6t"
NODES_LONG = "%N %.6D %P %.11T %.4c %.8z %.6m %.8d %.6w %.8f %20E"
REASONS = "%20E %9u %19H %N"
REASONS_LONG = "%20E %12U %19H %6t %N"
_WIDE = ("nodelist", "partition")  # of -N: as wide as the content
_DEAD = ("DOWN", "UNKNOWN")

# fmt: off
FACE = Face(Command(
    "sinfo",
    ("[OPTIONS]",),
    "Show partitions and nodes.",
    (
        *with_names(hinfo.COMMAND.options, "Format format json list-reasons long Node nodes noheader partition reservation "
                    "states summarize"),
        Option("all", "a", help="show all partitions (always so)"),
        Option("dead", "d", help="show nodes that do not answer"),
        Option("exact", "e", help="do not group nodes that differ in numbers"),
        Option("iterate", "i", "SECONDS", "show anew every SECONDS until interrupted"),
        Option("responding", "r", help="show nodes that answer"),
        Option("sort", "S", "LIST", "sort by these columns"),
        Option("verbose", "v", help="say more"),
        HELP_LONG,
        VERSION,
    ),
    accepted=(*ELSEWHERE, Option("hide"), Option("future", "F"), Option("yaml"), Option("usage")),
), "slurm_load_partitions")
# fmt: on


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, _work, argv)


def _work(words: Words) -> int:
    return look_again(words, _look)


def _look(words: Words) -> int:
    if words.has("reservation"):
        return _show_reservations(words)
    header = not words.has("noheader")
    cells = _cells(words)
    answer = client.call("GET", "/v1/nodes")
    partitions = client.call("GET", "/v1/partitions")["partitions"]
    if words.has("partition"):
        wanted = words.listed("partition")
        partitions = [one for one in partitions if one["name"] in wanted]
    nodes = [node for node in answer["nodes"] if _is_shown(node, words, partitions)]
    if words.has("json"):
        from hpcsched.cli.render.slurm_json import print_nodes  # polling does not need it

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


def _show_reservations(words: Words) -> int:
    reservations = hctl.fetch([])["reservations"]
    none = "No reservations in the system\n"
    sys.stdout.write(hctl.table(reservations, header=not words.has("noheader")) if reservations else none)
    return 0


def _cells(words: Words) -> list[Cell]:
    """Return the cells of the given format, or of the default format for the requested list."""
    if words.has("Format"):
        return parse_long(words.last("Format"), FIELDS)
    long = words.has("long")
    text = words.last("format")
    if not text and words.has("summarize"):
        text = SUMMARY
    elif not text and words.has("list-reasons"):
        text = REASONS_LONG if long else REASONS
    elif not text and words.has("Node"):
        text = NODES_LONG if long else NODES
    elif not text:
        text = os.environ.get("SINFO_FORMAT", "") or (LONG if long else FORMAT)
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
    "power_down": (), "powering_down": (), "powered_down": (), "powering_up": (), "power_up": (), "reboot": (), "cloud": (),
    "error": (), "inval": (), "block": (), "blocked": (), "unk": ("UNKNOWN",), "alloc": ("ALLOCATED",), "mix": ("MIXED",),
}  # fmt: skip


def _is_shown(node: Json, words: Words, partitions: Sequence[Json]) -> bool:
    if words.has("nodes") and node["name"] not in expand_hostlist(",".join(words.given["nodes"])):
        return False
    if words.has("partition") and not any(node["name"] in partition["nodes"] for partition in partitions):
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
        states = tuple(state for state in hinfo.STATES if plain and state.lower().startswith(plain))
        if not states:
            raise UsageError(f"Bad state string: {word[:60]}")
    return node["state"] in states


def _text_of(field: FormatField) -> Callable[[NodeGroup], str]:
    look = Look(0.0)
    return lambda group: field.text(group, look)


def _sorted(groups: Sequence[NodeGroup], words: Words) -> list[NodeGroup]:
    """Return the lines in the requested order.

    By default by partition, unavailable nodes first, like sinfo.
    """
    made = list(groups)
    keys = words.listed("sort") or ([] if words.has("Node") else ["-st"])
    for word in reversed(keys):
        name = word.lstrip("#+-")
        field = next((one for one in FIELDS if name and name in (one.letter, one.name)), None)
        if field is None:
            raise UsageError(f"Invalid sort specification: {word[:60]}")
        if word == "-st":
            order = {id(group.partition): at for at, group in reversed(list(enumerate(groups)))}
            made.sort(key=lambda group: (order[id(group.partition)], _rank(group)))
        else:
            made.sort(key=_text_of(field), reverse="-" in word)
    return made


_RANKS = ("DOWN", "UNKNOWN", "DRAINED", "DRAINING", "MAINT", "RESERVED", "MIXED", "ALLOCATED", "IDLE")


def _rank(group: NodeGroup) -> int:
    return _RANKS.index(group.nodes[0]["state"]) if group.nodes else 0
