"""One table of a TOML file against the keys that it may have: every value checked, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcsched.config_kinds import REQUIRED, BadValue, Key
from hpcsched.errors import ConfigError
from hpcsched.model.nearest import nearest


def values_of(path: Path, where: str, table: Any, keys: Sequence[Key], also: Sequence[str] = ()) -> dict[str, Any]:
    """Return the value of every key of `keys`, from `table` or by default."""
    table = table_of(path, where, table)
    refuse_unknown(path, where, table, (*(key.name for key in keys), *also), kind="key")
    values = {}
    for key in keys:
        given = table.get(key.name, key.default)
        if given is REQUIRED:
            raise ConfigError(f"cannot use {path}: {where} lacks the key {key.name!r}: {key.help}")
        try:
            values[key.name] = key.kind(given)
        except BadValue as error:
            raise ConfigError(f"cannot use {path}: {where} {key.name} = {given!r}: {error}") from None
    return values


def table_of(path: Path, where: str, table: Any) -> Mapping[str, Any]:
    """Return `table`, or refuse what is none."""
    if not isinstance(table, dict):
        raise ConfigError(f"cannot use {path}: {where} is {table!r}, and should be a table")
    return table


def refuse_unknown(path: Path, where: str, table: Mapping[str, Any], known: Sequence[str], *, kind: str) -> None:
    """Refuse the first name in `table` that is not `known`."""
    for name in table:
        if name not in known:
            raise ConfigError(
                f"cannot use {path}: {where} has the unknown {kind} {name!r}{nearest(name, known)}; "
                f"known are {', '.join(known)}"
            )
