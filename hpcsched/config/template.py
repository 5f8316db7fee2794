"""Render hpcsched.toml and nodes.d/NAME.toml: every key with its meaning and default.

Only the chosen keys are set. The text comes from `hpcsched.config.keys`, so files that
`hpcsched init` writes, etc/hpcsched.toml and the accepted keys never differ.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hpcsched.config.accounts import ACCOUNT, ALL_PARTITION, ALL_SECTIONS, QOS, USER
from hpcsched.config.keys import NODE, SWITCH, Key, toml_value
from hpcsched.errors import ConfigError

_HEAD = """\
# The configuration of hpcsched: see hpcsched.toml(5). Nodes have files of their own in nodes.d/.
#
# Every key is here with its default; what is commented out need not be there. The controller reads
# the files when it starts and when it is told to: hpcsched node add does that, and hctl reconfigure.
"""
_PARTITION_HEAD = """
# Partitions: [partitions.NAME] for each. Without any there is one, "main", with all nodes.
"""
_ACCOUNT_HEAD = """
# Accounts, users, QOS and licences: [accounts.NAME], [users.NAME], [qos.NAME] for each, and [licenses]. Without any
# everyone has an equal share and no limits. To set one, take the "# " away.
#
"""
_NAMED = {"accounts.physics": ACCOUNT, "users.anna": USER, "qos.high": QOS}
_LICENSES = """
[licenses]
# How many of each licence all jobs may have at once, as hsub --licenses asks for them: NAME = COUNT.
#matlab = 4
"""
_TOPOLOGY = """
# Which nodes hang on which switch: [topology.switches.NAME] for each. A job on several nodes gets them on as few switches as
# can be. To set one, take the "# " away.
#
"""
# Sections with a name of their own: PREFIX.NAME.
_NAMED_SECTIONS = {
    "partitions": ALL_PARTITION,
    "accounts": ACCOUNT,
    "users": USER,
    "qos": QOS,
    "topology.switches": SWITCH,
}
_MAIN = "partitions.main"
_NODE_HEAD = """\
# The node {name} of hpcsched: see hpcsched.toml(5). What is commented out need not be there.

"""


def render_config(chosen: Mapping[str, Mapping[str, object]]) -> str:
    """Return hpcsched.toml with the `chosen` values set, and all other keys as comments.

    `chosen` maps section -> key -> value.

    Raises: ConfigError: a section or a key that the file cannot have.
    """
    more = [_chosen_section(name, values) for name, values in chosen.items() if name not in {*ALL_SECTIONS, _MAIN}]
    parts = [_HEAD]
    for section, keys in ALL_SECTIONS.items():
        parts.append("\n" + _section(section, keys, chosen.get(section, {})))
    parts.append(_PARTITION_HEAD)
    parts.append(_section(_MAIN, ALL_PARTITION, chosen.get(_MAIN, {})))
    parts.append(_ACCOUNT_HEAD + "\n".join(_commented(_section(*item, {})) for item in _NAMED.items()))
    parts.append(_commented(_LICENSES))
    parts.append(_TOPOLOGY + _commented(_section("topology.switches.s1", SWITCH, {})))
    return "".join([*parts, *more])


def _chosen_section(name: str, values: Mapping[str, object]) -> str:
    """Return the section `name` with only its `values`."""
    if name != "licenses":
        keys = _NAMED_SECTIONS.get(name.rpartition(".")[0])
        if keys is None:
            known = ", ".join([*ALL_SECTIONS, "licenses", *(f"{prefix}.NAME" for prefix in _NAMED_SECTIONS)])
            raise ConfigError(f"cannot write section [{name}]: the sections are {known}")
        _refuse_unknown_keys(name, keys, values)
    return "".join([f"\n[{name}]\n", *(f"{key} = {toml_value(value)}\n" for key, value in values.items())])


def _refuse_unknown_keys(name: str, keys: Sequence[Key], values: Mapping[str, object]) -> None:
    unknown = values.keys() - {key.name for key in keys}
    if unknown:
        raise ConfigError(f"cannot write {min(unknown)!r} in section [{name}]: there is no such key")


def _section(name: str, keys: Sequence[Key], chosen: Mapping[str, object]) -> str:
    _refuse_unknown_keys(name, keys, chosen)
    return f"[{name}]\n" + "\n".join(_entries(keys, chosen))


def _commented(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def default_config() -> str:
    """Return the content of etc/hpcsched.toml."""
    return render_config({"partitions.main": {"nodes": "all", "default": True}})


def render_node(name: str, chosen: Mapping[str, object]) -> str:
    """Return nodes.d/`name`.toml with the `chosen` values set, and all other keys as comments."""
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
