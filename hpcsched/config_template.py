"""hpcsched.toml and nodes.d/NAME.toml as text: every key with its meaning and its default, the chosen ones set.

Written from `config_keys`, so a file that `hpcsched init` made, etc/hpcsched.toml and what is read never differ.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hpcsched.config_keys import NODE, PARTITION, SECTIONS, Key, toml_value

_HEAD = """\
# The configuration of hpcsched: see hpcsched.toml(5). Nodes have files of their own in nodes.d/.
#
# Every key is here with its default; what is commented out need not be there. The controller reads
# the files when it starts and when it is told to: hpcsched node add does that, and hctl reconfigure.
"""
_PARTITION_HEAD = """
# Partitions: [partitions.NAME] for each. Without any there is one, "main", with all nodes.
"""
_NODE_HEAD = """\
# The node {name} of hpcsched: see hpcsched.toml(5). What is commented out need not be there.

"""


def render_config(chosen: Mapping[str, Mapping[str, object]]) -> str:
    """Return hpcsched.toml with the `chosen` values set (section -> key -> value) and all others as comments."""
    parts = [_HEAD]
    for section, keys in SECTIONS.items():
        parts.append(f"\n[{section}]\n" + "\n".join(_entries(keys, chosen.get(section, {}))))
    parts.append(_PARTITION_HEAD)
    parts.append("[partitions.main]\n" + "\n".join(_entries(PARTITION, chosen.get("partitions.main", {}))))
    return "".join(parts)


def default_config() -> str:
    """Return the file as etc/hpcsched.toml shows it."""
    return render_config({"partitions.main": {"nodes": "all", "default": True}})


def render_node(name: str, chosen: Mapping[str, object]) -> str:
    """Return nodes.d/`name`.toml with the `chosen` values set and all others as comments."""
    return _NODE_HEAD.format(name=name) + "\n".join(_entries(NODE, chosen))


def _entries(keys: Sequence[Key], chosen: Mapping[str, object]) -> Iterator[str]:
    for key in keys:
        lines = textwrap.wrap(key.help, 98)
        entry = (
            f"{key.name} = {toml_value(chosen[key.name])}"
            if key.name in chosen
            else f"#{key.name} = {key.default_text}"
        )
        yield "".join(f"# {line}\n" for line in lines) + entry + "\n"
