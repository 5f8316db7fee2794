"""`hpcsched node probe`: measures a node again and writes the results into its file.

Rule: only the measured keys change; the rest of the file, including comments, does not. With ``--links`` it measures the network
by transfers between nodes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpcsched import paths
from hpcsched.cli.admin.init import write_file
from hpcsched.cli.node.add import identity_of, look_at, measured_keys
from hpcsched.config.kinds import toml_value
from hpcsched.config.load import Config, node_from
from hpcsched.errors import NotFoundError, RequestError, UnavailableError
from hpcsched.launch import dial_for
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.visit import Peer, link_rates, transfer_mbps
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec, address_of


def probe_node(config: Config, name: str) -> None:
    """Measure the node `name`, print and write the results.

    Raises HpcschedError; then its file is unchanged.
    """
    spec = _spec(config, name)
    facts = look_at(config, spec).facts
    if spec.link_mbps:
        facts.pop("link_mbps", None)  # a measured or configured value is better than the nominal one
    _write(config, name, measured_keys(facts))


def probe_links(config: Config, names: Sequence[str]) -> None:
    """Measure the network of the nodes `names`, print and write the results.

    Raises HpcschedError.

    Failed transfers are printed; a node without a successful one keeps the value in its file, and the command fails at the end.
    """
    named = list(dict.fromkeys(_spec(config, name).name for name in names))
    others = [spec.name for spec in config.nodes if spec.name not in named]
    if len(named) == 1 and not others:
        raise RequestError(f"cannot measure the network of {named[0]}: there is no other node to send to it")
    peers = {spec.name: Peer(spec=spec, dial=dial_for(spec, config), address=address_of(spec)) for spec in config.nodes}
    bundle, identity = build_bundle(), identity_of(config)

    def measure(giver: NodeName, taker: NodeName) -> int:
        try:
            rate = transfer_mbps(peers[giver], peers[taker], bundle, identity)
        except UnavailableError as error:
            click.echo(f"! {giver} to {taker}: {error}", err=True)
            return 0
        click.echo(f"  {giver} to {taker}: {rate} Mbit/s")
        return rate

    rates = link_rates(named, others, measure)
    for name, rate in rates.items():
        _write(config, name, {"link_mbps": rate})
    if silent := [name for name in named if name not in rates]:
        raise UnavailableError(f"cannot measure the network of {', '.join(silent)}: no transfer went through")


def _spec(config: Config, name: str) -> NodeSpec:
    spec = next((spec for spec in config.nodes if spec.name == name), None)
    if spec is None:
        raise NotFoundError(f"cannot measure {name}: there is no node of that name")
    return spec


def _write(config: Config, name: str, found: Mapping[str, Any]) -> None:
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    text = with_keys(path.read_text(), found)
    node_from(path, tomllib.loads(text))
    write_file(path, text)
    click.echo(f"{name}: " + ", ".join(f"{key} = {toml_value(value)}" for key, value in found.items()))


def with_keys(text: str, keys: Mapping[str, Any]) -> str:
    """Return the TOML `text` with `keys` set, replacing their lines, even commented ones."""
    for key, value in keys.items():
        line = f"{key} = {toml_value(value)}"
        text, count = re.subn(rf"(?m)^#?{key} *=.*$", line.replace("\\", r"\\"), text, count=1)
        if not count:
            text = text.rstrip("\n") + f"\n{line}\n"
    return text
