"""Whether a node is fit to start a job: by its file systems, GPUs and counters, never by a share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nodeworld import World, token

from hpcnode.agent import launch_check
from hpcnode.agent.launch_check import LaunchCheck, is_remote, kind_of, mount_kinds
from hpcnode.wire import protocol

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /tmp rw - tmpfs tmpfs rw
31 22 0:41 / /data rw shared:7 - nfs4 head:/data rw
32 22 0:42 / /with\\040space rw - fuse.sshfs a:/ rw
"""


def room(**changes: Any) -> SimpleNamespace:
    usual: dict[str, Any] = {
        "f_flag": 0,
        "f_blocks": 1 << 20,
        "f_frsize": 4096,
        "f_bavail": 1 << 19,
        "f_files": 100,
        "f_favail": 50,
    }
    return SimpleNamespace(**{**usual, **changes})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers of statvfs by path; asking for another path is a failure."""
    answers: dict[str, Any] = {}

    def statvfs(path: str) -> Any:
        if isinstance(answers[path], OSError):
            raise answers[path]
        return answers[path]

    monkeypatch.setattr(launch_check.os, "statvfs", statvfs)
    return answers


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., LaunchCheck]:
    (tmp_path / "mountinfo").write_text(MOUNTS)

    def make(*places: str, gpus: dict[str, Any] | None = None, growth: dict[str, Any] | None = None) -> LaunchCheck:
        return LaunchCheck(places, lambda: gpus or {}, lambda: growth or {}, str(tmp_path / "mountinfo"))

    return make


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (room(), ""),
        (room(f_flag=os.ST_RDONLY), "/var is read-only"),
        (room(f_bavail=255), "/var is full"),
        (room(f_favail=7), "/var has no free inodes"),
        (room(f_files=0, f_favail=0), ""),  # it counts none
        (room(f_blocks=100, f_bavail=6), ""),  # small, not full
        (OSError(5, "Input/output error"), "cannot use /var: Input/output error"),
    ],
)
def test_a_file_system_of_the_node_makes_it_unfit(
    check: Callable[..., LaunchCheck], asked: dict[str, Any], info: Any, why: str
) -> None:
    asked.update({"/var": info, "/tmp": room()})  # noqa: S108 - a name alone
    assert check("/var", "/tmp").why_unfit([]) == why  # noqa: S108


def test_a_share_is_never_asked(check: Callable[..., LaunchCheck], asked: dict[str, Any]) -> None:
    assert check("/data/spool", "/with space/spool").why_unfit([]) == ""
    assert asked == {}


def test_the_type_of_a_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS + "damaged\n")
    kinds = mount_kinds(str(tmp_path / "mountinfo"))
    assert [kind_of(path, kinds) for path in ("/", "/data", "/data/a/b", "/datax", "/with space/x")] == [
        "ext4", "nfs4", "nfs4", "ext4", "fuse.sshfs",
    ]  # fmt: skip
    assert mount_kinds(str(tmp_path / "none")) == {}
    assert (kind_of("/a", {}), is_remote("")) == ("", False)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, ""),  # not known
        ({"gpu_driver_answers": 0}, "the GPU driver does not answer"),
        ({"gpu_driver_answers": 1, "gpu_info:0:u:A": 1, "gpu_info:1:v:A": 1}, ""),
        ({"gpu_driver_answers": 1, "gpu_info:0:u:A": 1}, "GPU 1 is not there any more"),
    ],
)
def test_gpus_are_those_of_the_last_look(check: Callable[..., LaunchCheck], values: dict[str, Any], why: str) -> None:
    assert check(gpus=values).why_unfit([0, 1]) == why
    assert check(gpus=values).why_unfit([]) == ""


@pytest.mark.parametrize(
    ("column", "count", "unfit"),
    [
        ("node_ecc_errors_total:uncorrected", 1, True),
        ("node_ecc_errors_total:corrected", 1000, False),
        ("node_throttled_total:core", 600, False),
        ("node_throttled_total:package", 601, True),
    ],
)
def test_counters_that_grow_fast_make_it_unfit(
    check: Callable[..., LaunchCheck], column: str, count: int, unfit: bool
) -> None:
    assert bool(check(growth={column: count}).why_unfit([])) is unfit


def test_a_launch_is_refused_as_the_nodes_fault_until_it_is_fit(
    check: Callable[..., LaunchCheck], asked: dict[str, Any]
) -> None:
    asked["/var"] = room(f_flag=os.ST_RDONLY)
    world = World(check=check("/var"))
    refused = world.launch(token())
    (report,) = [message for message in world.sent if isinstance(message, protocol.Report)]
    assert (report.status, report.why, report.node_fault) == ("refused", "/var is read-only", True)
    assert world.sent.count(protocol.Condition("/var is read-only")) == 1
    world.ledger.repeat()
    assert world.ledger.fault == "/var is read-only"
    asked["/var"] = room()
    world.ledger.repeat()
    assert (world.ledger.fault, world.sent[-1]) == ("", protocol.Condition(""))
    started = world.launch(token(job=2))
    assert (world.shepherds.starts, refused in world.shepherds.starts) == ([started], False)


def test_steps_of_a_job_that_is_here_are_not_refused(check: Callable[..., LaunchCheck], asked: dict[str, Any]) -> None:
    asked["/var"] = room()
    world = World(check=check("/var"))
    batch = world.launch(token())
    world.started(batch)
    asked["/var"] = room(f_bavail=0)
    step = world.launch(token(step="0"))
    assert world.shepherds.starts == [batch, step]
