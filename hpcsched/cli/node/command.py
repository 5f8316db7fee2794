"""`hpcsched node add | rekey | list | probe | remove`: the nodes of the cluster, one file each in nodes.d/."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcsched import client, paths
from hpcsched.cli.output import print_json
from hpcsched.config.load import Config, load_config
from hpcsched.errors import UnavailableError
from hpcsched.listing.text import columns
from hpcsched.model.units import format_mem


@click.group()
def node() -> None:
    """Add, rekey, list, probe and remove nodes."""


@node.command()
@click.argument("target", metavar="[USER@]HOST[:PORT]")
@click.option("--name", metavar="NAME", help="Name of the node. Default: the first label of the host name.")
@click.option("--identity", metavar="FILE", help="Private key for the login, instead of the launch key.")
@click.option("--cpus", metavar="N", type=click.IntRange(1), help="Number of CPUs for jobs. Default: all.")
@click.option("--memory", metavar="SIZE", help="Memory for jobs, for example 64G. Default: all.")
@click.option(
    "--gpus", metavar="TYPE[:N],...", help="GPUs of the node, in the order of their indices. Default: as detected."
)
@click.option("--features", metavar="WORD,...", help="Features that jobs can request with --constraint.")
@click.option("--partition", metavar="NAME,...", help="Partitions for the node, in addition to those that list it.")
@click.option(
    "--root", metavar="DIR", help="Directory of the agent on the node, on a local disk. Default: chosen by the agent."
)
@click.option("--python", metavar="PATH", help="Python on the node, 3.9 or newer. Default: python3.")
@click.option("--weight", metavar="N", type=click.IntRange(0), help="Nodes with a lower weight are used first.")
@click.option(
    "--accept-fingerprint", metavar="SHA256:...", help="Accept the host key with this fingerprint, and no other."
)
@click.option("--yes", is_flag=True, help="Accept any host key.")
def add(target: str, name: str | None, accept_fingerprint: str | None, yes: bool, **options: Any) -> None:
    """Add a machine: pin its host key, detect its resources, and write its file.

    HOST can also be a Host of ~/.ssh/config, or "local" for this machine without SSH.
    """
    from hpcsched.cli.node.add import NodeOptions, add_node, default_name, parse_target, still_drained

    given = {
        "identity_file": os.path.abspath(options["identity"]) if options["identity"] else None,
        "cpus": options["cpus"],
        "memory": options["memory"],
        "gpus": _words(options["gpus"]),
        "features": _words(options["features"]),
        "partitions": _words(options["partition"]),
        "root": options["root"],
        "python": options["python"],
        "weight": options["weight"],
    }
    wanted = NodeOptions(name=name, given=given, yes=yes, fingerprint=accept_fingerprint)
    where = parse_target(target)
    config = _config()
    add_node(config, where, wanted)
    _tell_controller()
    for line in still_drained(config, name or default_name(where)):
        click.echo(line)


@node.command()
@click.argument("name")
@click.option(
    "--accept-fingerprint", metavar="SHA256:...", help="Accept the host key with this fingerprint, and no other."
)
@click.option("--yes", is_flag=True, help="Accept any host key.")
def rekey(name: str, accept_fingerprint: str | None, yes: bool) -> None:
    """Pin the new host key of a reinstalled machine; the rest of its file is unchanged."""
    from hpcsched.cli.node.add import NodeOptions
    from hpcsched.cli.node.rekey import rekey_node

    rekey_node(_config(), name, NodeOptions(name=name, given={}, yes=yes, fingerprint=accept_fingerprint))


@node.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the nodes as JSON.")
def list_(as_json: bool) -> None:
    """Show the configured nodes with the state that the controller reports."""
    config = _config()
    states = _states()
    rows = [
        {
            "name": spec.name,
            "host": spec.host,
            "port": spec.port,
            "user": spec.user,
            "cpus": spec.cpus,
            "mem_mib": spec.mem_mib,
            "gpus": [gpu.type for gpu in spec.gpus],
            "partitions": [partition.name for partition in config.partitions if spec.name in partition.nodes],
            "state": states.get(spec.name, "unknown"),
        }
        for spec in config.nodes
    ]
    if as_json:
        print_json({"version": 1, "nodes": rows})
        return
    if not rows:
        click.echo("There are no nodes yet; add one with: hpcsched node add user@host")
        return
    headers = ["NAME", "HOST", "CPUS", "MEMORY", "GPUS", "PARTITIONS", "STATE"]
    click.echo(columns(headers, [_row(row) for row in rows], right=(2, 3)), nl=False)


@node.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--links", is_flag=True, help="Measure the network between the nodes instead.")
def probe(names: tuple[str, ...], links: bool) -> None:
    """Measure speed, network and temporary disk of nodes again, and update their files.

    Measure idle nodes: jobs that are running change the result.
    """
    from hpcsched.cli.node.probe import probe_links, probe_node

    config = _config()
    if links:
        probe_links(config, names)
    else:
        for name in names:
            probe_node(config, name)
    _tell_controller()


@node.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Remove the node even if it holds jobs; they are ended.")
def remove(name: str, force: bool) -> None:
    """Remove a node from the cluster. Nothing is deleted on the machine itself."""
    from hpcsched.cli.node.remove import remove_node

    remove_node(_config(), name, force=force)


def _config() -> Config:
    return load_config(paths.find_config_dir(os.environ, os.getuid()))


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _row(row: dict[str, Any]) -> list[str]:
    host = row["host"] if row["port"] is None else f"{row['host']}:{row['port']}"
    where = host if row["user"] is None else f"{row['user']}@{host}"
    words = [row["name"], where, str(row["cpus"]), format_mem(row["mem_mib"]), ",".join(row["gpus"]) or "-"]
    return [*words, ",".join(row["partitions"]) or "-", row["state"].lower()]


def _states() -> dict[str, str]:
    try:
        return {view["name"]: view["state"] for view in client.call("GET", "/v1/nodes")["nodes"]}
    except UnavailableError:
        return {}


def _tell_controller() -> None:
    try:
        client.call("POST", "/v1/reconfigure", {})
    except UnavailableError:
        click.echo("the controller is not running; it reads this at its start: hpcsched up")
    else:
        click.echo("controller notified")
