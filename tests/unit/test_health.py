"""What the checks say of sick and healthy things."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hpcnode.agent import helpers
from hpcsched import health
from hpcsched.health import Check, Status, check_node, worst
from hpcsched.launch.visit import problem_of, question, share_probe

NOW_S = 1_800_000_000.0


FACTS: dict[str, Any] = {
    "cpus": 8,
    "mem_mib": 16_000,
    "mem_free_mib": 9_000,
    "gpus": [{"index": 0}],
    "disk_free_mib": 50_000,
    "disk_total_mib": 100_000,
    "tmp_free_mib": 50_000,
    "tmp_total_mib": 100_000,
    "load": [1.0, 1.0, 1.0],
    "leftovers": [],
    "time_s": NOW_S - 0.05,
    "asked_at_s": NOW_S - 0.1,
    "answered_at_s": NOW_S,
    "root": "/r",
}


def view(*, facts: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A node that is well, but for `changes` of what the controller says and of its `facts`."""
    return {
        "name": "n1",
        "link": "up",
        "link_since_s": NOW_S - 300,
        "link_why": "",
        "agent_version": "abc",
        "drained": False,
        "drained_by": "",
        "cpus": 8,
        "cpus_alloc": 0,
        "mem_mib": 16_000,
        "gpus": [{"index": 0, "type": "a100"}],
        "facts": FACTS | (facts or {}),
    } | changes


def found(node: dict[str, Any]) -> dict[str, Check]:
    return {check.name: check for check in check_node(node, NOW_S)}


def hardware(errors: dict[str, float] | None = None, **conditions: float) -> dict[str, Any]:
    """What the samples of a machine without problems say, but for `errors` and `conditions`."""
    well = {"node_filesystem_answers:/": 1, "node_filesystem_read_only:/": 0, "node_filesystem_free_inodes:/": 1e6,
            "node_on_mains": 1, "node_memory_total_bytes": 16e9, "node_swap_used_bytes": 1e8, "gpu_driver_answers": 1,
            "gpu_throttle:0:heat": 0}  # fmt: skip
    counted = {"node_ecc_errors_total:corrected": 2, "node_ecc_errors_total:uncorrected": 0,
               "node_network_errors_total:eth0": 1, "node_throttled_total:core": 0}  # fmt: skip
    return {"hours": 1.0, "conditions": well | conditions, "errors": counted | (errors or {})}


def test_a_machine_without_errors_has_one_check() -> None:
    checks = found(view(hardware=hardware()))
    assert checks["hardware"].status is Status.OK
    assert checks["hardware"].text == "no errors in the last 60 min"
    assert not {"file systems", "heat", "network", "memory errors"} & checks.keys()
    assert "hardware" not in found(view(hardware=None))  # no sample


@pytest.mark.parametrize(
    ("said", "name", "status", "words"),
    [
        (hardware(**{"node_filesystem_read_only:/": 1}), "file systems", Status.CRITICAL, "/ is read-only"),
        (hardware(**{"node_filesystem_answers:/srv": 0}), "file systems", Status.WARN, "/srv does not answer"),
        (hardware(**{"node_filesystem_free_inodes:/tmp": 40}), "file systems", Status.WARN, "/tmp has 40 free inodes"),
        (hardware(**{"node_filesystem_free_inodes:/tmp": 0}), "file systems", Status.CRITICAL, "0 free inodes"),
        (hardware(gpu_driver_answers=0), "GPU driver", Status.CRITICAL, "restart"),
        (hardware(**{"gpu_throttle:3:heat": 1}), "heat", Status.WARN, "GPU 3"),
        (hardware(node_on_mains=0), "power", Status.WARN, "battery"),
        (hardware(node_swap_used_bytes=4e9), "swap", Status.WARN, "3.7 GiB"),
        (hardware({"node_ecc_errors_total:uncorrected": 1}), "memory errors", Status.CRITICAL, "1 uncorrected"),
        (hardware({"node_ecc_errors_total:corrected": 500}), "memory errors", Status.WARN, "500 corrected"),
        (hardware({"gpu_ecc_errors_total:1:uncorrected": 2}), "memory errors", Status.CRITICAL, "2 of GPU 1"),
        (hardware({"node_network_errors_total:eth0": 900}), "network", Status.WARN, "900 errors of eth0"),
        (hardware({"node_network_carrier_changes_total:eth0": 5}), "network", Status.WARN, "changed 5 times"),
        (hardware({"node_throttled_total:core": 9}), "heat", Status.WARN, "9 times"),
        (hardware({"node_oom_kills_total": 2}), "memory", Status.WARN, "killed 2 processes"),
    ],
)
def test_problems_of_a_machine(said: dict[str, Any], name: str, status: Status, words: str) -> None:
    checks = found(view(hardware=said))
    assert checks[name].status is status
    assert words in checks[name].text
    assert "hardware" not in checks


def test_a_hung_file_system_is_the_nodes_fault_if_the_heads_share_is_well() -> None:
    hung = hardware(**{"node_filesystem_answers:/srv": 0})
    assert found(view(hardware=hung, share_error=""))["file systems"].status is Status.CRITICAL


def test_a_healthy_node() -> None:
    checks = found(view(share_error=""))
    assert {check.status for check in checks.values()} == {Status.OK}
    assert list(checks) == ["link", "clock", "resources", "disk", "tmp", "load", "leftovers", "share"]
    assert checks["link"].text == "up for 5 min, agent abc"


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"link": "down", "link_why": "no route"}, Status.CRITICAL, "down for 5 min: no route"),
        ({"link": "unknown"}, Status.UNKNOWN, "not heard of"),
        ({"facts_error": "cannot ask"}, Status.CRITICAL, "cannot ask"),
    ],
)
def test_a_node_that_does_not_answer(changes: dict[str, Any], status: Status, words: str) -> None:
    (check,) = check_node(view(**changes), NOW_S)
    assert (check.name, check.status) == ("link", status)
    assert words in check.text


def test_a_node_that_was_not_asked() -> None:
    (check,) = check_node(view() | {"facts": None}, NOW_S)
    assert (check.name, check.status) == ("link", Status.UNKNOWN)


@pytest.mark.parametrize(
    ("facts", "name", "status", "words"),
    [
        ({"time_s": NOW_S + 30}, "clock", Status.WARN, "30.05 s ahead of"),
        ({"time_s": NOW_S - 90}, "clock", Status.CRITICAL, "89.95 s behind"),
        ({"time_s": NOW_S - 30, "asked_at_s": NOW_S - 60}, "clock", Status.OK, "known to 30.00 s"),
        ({"cpus": 6}, "resources", Status.CRITICAL, "6 of 8 cpus"),
        ({"cpus": 12}, "resources", Status.OK, "12 cpus"),
        ({"mem_mib": 8000}, "resources", Status.CRITICAL, "8000 MiB memory of 16000"),
        ({"gpus": []}, "resources", Status.CRITICAL, "0 of 1 GPU"),
        ({"load": [17.0, 0, 0]}, "load", Status.WARN, "17.0 on 8 cpus"),
        ({"disk_free_mib": 1000}, "disk", Status.WARN, "1000 MiB free in /r"),
        ({"disk_free_mib": 100}, "disk", Status.CRITICAL, "100 MiB"),
        ({"disk_free_mib": 900, "disk_total_mib": 1000}, "disk", Status.OK, "900 MiB"),
        ({"tmp_free_mib": 10}, "tmp", Status.CRITICAL, "10 MiB free in /tmp"),
        ({"leftovers": [{"pid": 7, "job": 3}]}, "leftovers", Status.WARN, "1 processes of ended jobs 3: pids 7"),
    ],
)
def test_a_node_that_is_not_well(facts: dict[str, Any], name: str, status: Status, words: str) -> None:
    check = found(view(facts=facts))[name]
    assert check.status is status
    assert words in check.text


def test_a_share_that_is_another() -> None:
    check = found(view(share_error="another directory"))["share"]
    assert (check.status, check.text) == (Status.CRITICAL, "another directory")


def test_a_node_that_is_down_is_not_looked_into() -> None:
    assert list(found(view(link="down"))) == ["link"]


def checks_with(*statuses: Status) -> list[Check]:
    return [Check(name=f"c{i}", status=status, text="t", node="n1") for i, status in enumerate(statuses)]


def test_the_worst_is_what_is_known_to_be_broken() -> None:
    assert worst([]) is Status.OK
    assert worst(checks_with(Status.OK, Status.WARN)) is Status.WARN
    assert worst(checks_with(Status.UNKNOWN, Status.WARN)) is Status.UNKNOWN
    assert worst(checks_with(Status.UNKNOWN, Status.CRITICAL, Status.OK)) is Status.CRITICAL


def test_only_failing_nodes_that_answer_are_drained() -> None:
    bad = checks_with(Status.OK, Status.CRITICAL)
    assert health.to_drain([view()], bad) == {"n1": "hhealth: c1: t"}
    assert health.to_drain([view()], checks_with(Status.WARN, Status.UNKNOWN)) == {}
    assert health.to_drain([view(drained=True)], bad) == {}
    assert health.to_drain([view(link="down")], bad) == {}
    assert health.to_drain([view(name="n2")], bad) == {}


def test_only_what_hhealth_drained_is_resumed_and_only_when_well() -> None:
    mine = view(drained=True, drained_by="hhealth")
    assert health.to_resume([mine], checks_with(Status.OK, Status.WARN)) == ["n1"]
    assert health.to_resume([mine], checks_with(Status.OK, Status.UNKNOWN)) == []
    assert health.to_resume([mine], checks_with(Status.CRITICAL)) == []
    assert health.to_resume([mine], []) == []
    assert health.to_resume([mine | {"link": "down"}], checks_with(Status.OK)) == []
    assert health.to_resume([view(drained=True, drained_by="ada")], checks_with(Status.OK)) == []
    assert health.to_resume([view(drained_by="hhealth")], checks_with(Status.OK)) == []


def database(path: Path) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.executemany("INSERT INTO t VALUES (?)", [(str(i) * 100,) for i in range(2000)])
        connection.execute("CREATE INDEX i ON t (a)")
    connection.close()
    return path


def test_a_database(tmp_path: Path) -> None:
    path = database(tmp_path / "d b?.db")  # a name that a URI has to quote
    check = health.check_database(path)
    assert (check.status, check.text.split(";")[0]) == (Status.OK, "whole")
    assert check.numbers["free_mib"] > 0
    data = bytearray(path.read_bytes())
    data[20_000:21_000] = os.urandom(1000)
    path.write_bytes(data)
    check = health.check_database(path)
    assert check.status is Status.CRITICAL
    assert "damaged" in check.text or "malformed" in check.text  # by which page SQLite meets first
    path.write_bytes(b"this is no database " * 100)
    assert health.check_database(path).status is Status.CRITICAL
    path.unlink()
    assert "is not there" in health.check_database(path).text


def test_a_share(tmp_path: Path) -> None:
    check = health.check_share(str(tmp_path))
    assert check.status in (Status.OK, Status.WARN)  # the disk of whoever runs this may be full
    assert "write, fsync, link, rename" in check.text
    assert list(tmp_path.iterdir()) == []
    check = health.check_share(str(tmp_path / "gone"))
    assert (check.status, check.text) == (
        Status.CRITICAL,
        f"{tmp_path / 'gone'}: open fails: No such file or directory",
    )


@pytest.mark.parametrize("call", ["link", "fsync", "rename"])
def test_a_share_that_cannot_do_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, call, fail)
    assert health.probe_directory(tmp_path) == f"{call} fails: Operation not supported"
    assert list(tmp_path.iterdir()) == []


def test_a_share_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    forever = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: forever.wait(60))
    monkeypatch.setattr(health, "SHARE_S", 0.05)
    check = health.check_share(str(tmp_path))
    forever.set()
    assert check.status is Status.CRITICAL
    assert "hangs" in check.text


def clock(wall_s: tuple[float, float], monotonic_s: tuple[float, float], commit_s: float | None) -> Check:
    return health.check_clock(wall_s=wall_s, monotonic_s=monotonic_s, last_commit_s=commit_s)


def test_a_clock() -> None:
    assert clock((NOW_S, NOW_S + 5), (100, 105), NOW_S).status is Status.OK
    assert clock((NOW_S, NOW_S + 5), (100, 105), None).status is Status.OK
    assert clock((NOW_S, NOW_S - 5), (100, 105), None).text == "it was just set back by 10.0 s"
    assert clock((5.0, 6.0), (100, 101), None).status is Status.CRITICAL
    assert "set back" in clock((NOW_S, NOW_S), (1, 1), NOW_S + 3600).text


def test_a_share_probe(tmp_path: Path) -> None:
    with share_probe(str(tmp_path)) as probe:
        asked = question(1, str(tmp_path), probe.path.name, probe.sha256, probe.uid)
        compared, _ = helpers.compare_probe(asked)
        assert compared.same
    assert not probe.path.exists()
    assert problem_of("/s", same=True, error="") == ""
    assert problem_of("/s", same=False, error="") == "/s there is another directory than here"
    assert problem_of("/s", same=False, error="Permission denied") == "cannot compare /s there: Permission denied"
    for name in (".hpcsched-probe-../../etc/passwd", "LATEST"):
        with pytest.raises(ValueError, match="not a share probe"):
            question(1, str(tmp_path), name, probe.sha256, 0)
