"""`hpcsched node rekey`: pins the new host key of a reinstalled machine; the rest of its file is unchanged.

Rule: the file is written after a login with that key, and is restored if the controller rejects the change.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace

import click

from hpcsched import client, paths
from hpcsched.cli.admin.init import write_file
from hpcsched.cli.node.add import NodeOptions, look_at, pin
from hpcsched.cli.node.probe import with_keys
from hpcsched.config.kinds import LOCAL_HOST
from hpcsched.config.load import Config, node_from
from hpcsched.errors import HpcschedError, NotFoundError, RequestError


def rekey_node(config: Config, name: str, options: NodeOptions) -> None:
    """Pin the host key of node `name`, if it is accepted.

    Raises HpcschedError; then its file is unchanged.
    """
    spec = next((spec for spec in config.nodes if spec.name == name), None)
    if spec is None:
        there = ", ".join(spec.name for spec in config.nodes) or "none"
        raise NotFoundError(f"cannot rekey {name[:60]!r}: there is no node of that name; there are: {there}")
    if spec.host == LOCAL_HOST:
        raise RequestError(f"cannot rekey {name}: it is this machine, without SSH")
    key = pin(config, replace(spec, host_key=""), options)
    if key == spec.host_key:
        click.echo(f"{name} has the pinned host key: nothing has changed")
        return
    look_at(config, replace(spec, host_key=key))
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    before = path.read_text(encoding="utf-8")
    text = with_keys(before, {"host_key": key})
    node_from(path, tomllib.loads(text))
    write_file(path, text)
    try:
        client.call("POST", "/v1/reconfigure", {})
    except client.NoControllerError:
        click.echo("the controller is not running; it reads this at its start: hpcsched up")
    except HpcschedError:
        write_file(path, before)
        raise
    click.echo(f"wrote {path}")
