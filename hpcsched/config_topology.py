"""[topology.switches.NAME] of hpcsched.toml: which nodes hang on which switch, so that a gang can lie close.

One level: a node hangs on one switch, and all switches are as far from each other. Source: topology.conf(5), topology/tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcsched.config_keys import SWITCH
from hpcsched.config_tables import refuse_unknown, table_of, values_of
from hpcsched.errors import ConfigError
from hpcsched.model.ids import NODE_NAME
from hpcsched.model.node import NodeSpec


def on_their_switches(path: Path, topology: Any, nodes: Sequence[NodeSpec]) -> tuple[NodeSpec, ...]:
    """Return `nodes`, each with the switch that the table `topology` puts it on. Raises ConfigError."""
    table = table_of(path, "[topology]", topology)
    refuse_unknown(path, "[topology]", table, ("switches",), kind="table")
    switches = table_of(path, "[topology.switches]", table.get("switches", {}))
    switch_of = _switches(path, switches)
    known = {node.name for node in nodes}
    for name, switch in switch_of.items():
        if name not in known:
            raise ConfigError(
                f"cannot use {path}: [topology.switches.{switch}] names the node {name!r}, which has no file in nodes.d"
            )
    return tuple(replace(node, switch=switch_of.get(node.name, "")) for node in nodes)


def _switches(path: Path, switches: Mapping[str, Any]) -> dict[str, str]:
    switch_of: dict[str, str] = {}
    for switch, table in switches.items():
        where = f"[topology.switches.{switch}]"
        if not NODE_NAME.match(switch):
            raise ConfigError(
                f"cannot use {path}: {switch!r} is no name of a switch: letters, digits, _ and -, at most 63"
            )
        for name in values_of(path, where, table, SWITCH)["nodes"] or ():
            if switch_of.setdefault(name, switch) != switch:
                raise ConfigError(
                    f"cannot use {path}: {where} names the node {name!r}, which hangs on {switch_of[name]}"
                )
    return switch_of
