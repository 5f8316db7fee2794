"""What nodes that should be alike differ in."""

from __future__ import annotations

from typing import Any

import pytest

from hpcnode.os import surroundings
from hpcsched.cli.admin import drift
from hpcsched.cli.admin.drift import drift_of


def node(
    name: str, *, gpus: tuple[str, ...] = (), facts: dict[str, Any] | None = None, **around: Any
) -> dict[str, Any]:
    seen = {"system": "Debian 12", "libc": "glibc 2.36", "zone": "Etc/UTC", "limits": {"open files": 1024},
            "mounts": [{"point": "/srv", "kind": "nfs4", "state": "ok"}], "accounts": {}}  # fmt: skip
    made = {"machine": "x86_64", "kernel": "6.1.0-18", "python": "3.11.2", "gpus": [{"name": gpu} for gpu in gpus]}
    return {"name": name, "facts": made | {"surroundings": seen | around} | (facts or {})}


def test_equal_nodes_have_no_drift() -> None:
    assert drift_of([node("n1"), node("n2"), {"name": "n3", "facts": None}]) == []


@pytest.mark.parametrize(
    ("other", "what", "text"),
    [
        (node("n3", facts={"kernel": "6.1.0-13"}), "kernel", "6.1.0-18 on n[1-2], but 6.1.0-13 on n3"),
        (node("n3", zone="Europe/Berlin"), "time zone", "Etc/UTC on n[1-2], but Europe/Berlin on n3"),
        (node("n3", mounts=[]), "mount /srv", "nfs4, ok on n[1-2], but none on n3"),
        (node("n3", limits={"open files": -1}), "limit of open files", "1024 on n[1-2], but unlimited on n3"),
    ],
)
def test_the_node_that_differs_is_named_beside_the_usual_value(other: dict[str, Any], what: str, text: str) -> None:
    (found,) = drift_of([node("n1"), node("n2"), other])
    assert (found.what, found.text) == (what, text)


def test_without_a_majority_no_value_is_usual() -> None:
    (found,) = drift_of([node("n1"), node("n2", facts={"python": "3.9.2"})])
    assert found.text == "no value is usual: 3.11.2 on n1; 3.9.2 on n2"


def test_only_nodes_of_one_kind_are_compared() -> None:
    mixed = [node("n1"), node("n2"), node("g1", gpus=("H100",), driver="550"), node("g2", gpus=("H100",), driver="535")]
    (found,) = drift_of(mixed)
    assert (found.what, found.kind) == ("NVIDIA driver", "x86_64 with H100")


def test_users_with_other_ids_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ann = surroundings.hash_of("ann")
    monkeypatch.setattr(drift, "accounts_by_hash", lambda: {ann: ("ann", 1001)})
    stranger = surroundings.hash_of("eve")
    found = drift_of([node("n1", accounts={ann: 1001}), node("n2", accounts={ann: 1004, stranger: 7})])
    assert [(one.what, one.others) for one in found] == [("uid of ann", (("1001", ("n1",)), ("1004", ("n2",))))]


def test_what_a_hostile_node_says_is_cut_and_ends_nothing() -> None:
    hostile: list[Any] = ["x" * 10_000, 7, None, [], {"a": {}}, [1, None, {"point": 3}], {"open files": []}]
    for value in hostile:
        for key in ("system", "limits", "accounts", "mounts", "zone"):
            found = drift_of([node("n1"), node("n2"), node("n3", **{key: value})])
            assert all(len(one.text) < 400 for one in found)
        drift_of([node("n1"), node("n2", facts={"surroundings": value, "gpus": value, "machine": value})])


def test_the_software_of_a_machine_is_read_from_its_files(tmp_path: Any) -> None:
    for path, text in (
        ("etc/os-release", 'NAME=x\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release\n"),
        ("usr/local/cuda/version.json", '{"cuda" : {"name": "CUDA SDK", "version": "12.4.1"}, "x": {"version": "1"}}'),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = surroundings.software(str(tmp_path))
    assert {key: found[key] for key in ("system", "driver", "cuda", "huge_pages")} == {
        "system": "Debian GNU/Linux 12 (bookworm)", "driver": "550.54.15", "cuda": "12.4.1", "huge_pages": "madvise",
    }  # fmt: skip
    assert "governor" not in found


def test_the_limits_of_this_process_are_told() -> None:
    assert surroundings.limits().keys() == {"open files", "locked memory", "core files", "stack"}
