"""Compare what nodes that should be alike tell of themselves: `hpcsched node drift`.

Nodes of one kind (the same processor family, with or without GPUs) are compared property by
property. The value of most nodes is the usual one, and the others are named. The facts are those of
`hpcnode.agent.probe`; what a node says is not trusted, and is cut before it is shown.

Pure, except for the names of accounts, which come from this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hpcnode.os.surroundings import accounts_by_hash
from hpcsched.model.hostlist import compress_hostlist

View = Mapping[str, Any]

MAX_SHOWN = 80  # characters of a value
MISSING = "none"
MOST_VALUES = 200  # of a node, of one kind: accounts and mounts


class Drift(NamedTuple):
    """A property in which nodes of one kind differ.

    `usual`: the value of most nodes, "" if no value has most. `others`: each other value with its nodes.
    """

    what: str
    kind: str
    usual: str
    usual_nodes: tuple[str, ...]
    others: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def text(self) -> str:
        """Return a sentence with all values."""
        rest = "; ".join(f"{value} on {compress_hostlist(list(nodes))}" for value, nodes in self.others)
        if not self.usual:
            return f"no value is usual: {rest}"
        return f"{self.usual} on {compress_hostlist(list(self.usual_nodes))}, but {rest}"


def drift_of(views: Sequence[View]) -> list[Drift]:
    """Return the differences among nodes that have facts, by kind and property."""
    names = accounts_by_hash()
    kinds: dict[str, dict[str, Mapping[str, str]]] = {}
    for view in views:
        facts = view.get("facts")
        if isinstance(facts, Mapping):
            kinds.setdefault(_kind(facts), {})[str(view["name"])] = dict(_properties(facts, names))
    return [drift for kind, nodes in sorted(kinds.items()) for drift in _of_kind(kind, nodes)]


def _of_kind(kind: str, nodes: Mapping[str, Mapping[str, str]]) -> Iterator[Drift]:
    names = dict.fromkeys(what for properties in nodes.values() for what in properties)
    for what in names:
        by_value: dict[str, list[str]] = {}
        for node, properties in nodes.items():
            by_value.setdefault(properties.get(what, MISSING), []).append(node)
        if len(by_value) < 2:
            continue
        ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
        has_most = 2 * len(ordered[0][1]) > len(nodes)
        usual, others = (ordered[0], ordered[1:]) if has_most else (("", []), ordered)
        yield Drift(what, kind, usual[0], tuple(usual[1]), tuple((value, tuple(found)) for value, found in others))


def _kind(facts: Mapping[str, Any]) -> str:
    gpus = facts.get("gpus")
    names = {_shown(gpu.get("name")) for gpu in _rows(gpus)}
    return " with ".join([_shown(facts.get("machine")), *sorted(names)[:4]])


def _properties(facts: Mapping[str, Any], names: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Yield the properties of a node that should be the same on nodes of its kind."""
    around = facts.get("surroundings")
    around = around if isinstance(around, Mapping) else {}
    for what, of, key in _PLAIN:
        value = (facts if of == "facts" else around).get(key)
        if value not in (None, ""):
            yield what, _shown(value)
    for name, value in _items(around.get("limits")):
        yield f"limit of {_shown(name)}", "unlimited" if value == -1 else _shown(value)
    for hashed, uid in _items(around.get("accounts")):
        if hashed in names:
            yield f"uid of {names[hashed][0]}", _shown(uid)
    for mount in _rows(around.get("mounts")):
        yield f"mount {_shown(mount.get('point'))}", f"{_shown(mount.get('kind'))}, {_shown(mount.get('state'))}"


_PLAIN = (
    ("system", "around", "system"),
    ("kernel", "facts", "kernel"),
    ("C library", "around", "libc"),
    ("Python", "facts", "python"),
    ("MPI", "around", "mpi"),
    ("NVIDIA driver", "around", "driver"),
    ("CUDA", "around", "cuda"),
    ("time zone", "around", "zone"),
    ("governor", "around", "governor"),
    ("huge pages", "around", "huge_pages"),
)


def _items(found: Any) -> list[tuple[str, Any]]:
    return list(found.items())[:MOST_VALUES] if isinstance(found, Mapping) else []


def _rows(found: Any) -> list[Mapping[str, Any]]:
    return [row for row in found[:MOST_VALUES] if isinstance(row, Mapping)] if isinstance(found, list) else []


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
