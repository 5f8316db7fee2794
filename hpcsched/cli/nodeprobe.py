"""What `hpcsched node probe` does: visit a node again and write how capable it was found into its file.

Only the measured keys are changed; all else in the file, comments too, stays as it is.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import click

from hpcsched import paths
from hpcsched.cli.nodeadd import look_at, measured_keys
from hpcsched.cli.setup import write_file
from hpcsched.config import Config, node_from
from hpcsched.config_keys import toml_value
from hpcsched.errors import NotFoundError


def probe_node(config: Config, name: str) -> None:
    """Measure the node `name`, tell what was found and write it. Raises HpcschedError; then its file is as it was."""
    spec = next((spec for spec in config.nodes if spec.name == name), None)
    if spec is None:
        raise NotFoundError(f"cannot measure {name}: there is no node of that name")
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    found = measured_keys(look_at(config, spec).facts)
    text = with_keys(path.read_text(), found)
    node_from(path, tomllib.loads(text))
    write_file(path, text)
    click.echo(f"{name}: " + ", ".join(f"{key} = {toml_value(value)}" for key, value in found.items()))


def with_keys(text: str, keys: Mapping[str, Any]) -> str:
    """Return the TOML `text` of a node's file with `keys` set: in the place of their lines, commented out or not."""
    for key, value in keys.items():
        line = f"{key} = {toml_value(value)}"
        text, count = re.subn(rf"(?m)^#?{key} *=.*$", lambda _, line=line: line, text, count=1)  # type: ignore[misc]
        if not count:
            text = text.rstrip("\n") + f"\n{line}\n"
    return text
