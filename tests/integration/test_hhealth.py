"""`hhealth` as cron runs it, with a controller and nodes that are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LoopbackNodes, start_nodes

BIN = Path(sys.executable).parent


class Head:
    """The commands of one cluster, each as a process of its own."""

    def __init__(self, base: Path, nodes: LoopbackNodes) -> None:
        self.base, self.nodes, self.share = base, nodes, base / "share"
        self._environ = os.environ | {"HPCSCHED_CONFIG": str(base / "config"), "HOME": str(base)}

    def __call__(self, *words: object, status: int | None = 0) -> str:
        done = subprocess.run(
            [BIN / str(words[0]), *map(str, words[1:])],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def health(self, *options: str) -> dict[str, dict[str, str]]:
        """Return hhealth's checks by node and name: ``a disk``, ``database``; the load of this machine is left out."""
        answer = json.loads(self("hhealth", "--json", *options, status=None))
        self.done: list[str] = answer["done"]
        checks = {f"{check['node'] or ''} {check['check']}".strip(): check for check in answer["checks"]}
        return {name: check for name, check in checks.items() if not name.endswith(" load")}

    def reload(self) -> None:
        """Have the controller read the configuration again."""
        code = "from hpcsched import client; client.call('POST', '/v1/reconfigure', {})"
        subprocess.run([sys.executable, "-c", code], env=self._environ, timeout=PATIENCE_S, check=True)

    def state_of(self, node: str) -> str:
        return {
            each["name"]: each["state"] for each in json.loads(self("hpcsched", "node", "list", "--json"))["nodes"]
        }[node]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    (tmp_path / "share").mkdir()
    with start_nodes(tmp_path / "nodes", ["a", "b"]) as nodes:
        head = Head(tmp_path, nodes)
        head("hpcsched", "init", "--share", head.share)
        for node in nodes.nodes.values():
            where = f"{node.user}@{node.host}:{node.port}"
            access = ["--identity", node.identity_file, "--root", node.root / "agent", "--yes"]
            head("hpcsched", "node", "add", where, "--name", node.name, "--memory", "100M", "--cpus", "1", *access)
        head("hpcsched", "up")
        try:
            wait_until(lambda: "unknown" not in head("hpcsched", "node", "list"), what="the nodes to be up")
            yield head
        finally:
            head("hpcsched", "down")


def bad(checks: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return what is broken. (A slow disk under whoever runs the tests is worth a warning, and no failure.)"""
    return {name: check["status"] for name, check in checks.items() if check["status"] not in ("OK", "WARN")}


def test_health_of_a_cluster(head: Head) -> None:
    checks = head.health()
    assert bad(checks) == {}
    expected = {"link", "clock", "resources", "disk", "tmp", "leftovers", "share"}
    # The check of the hardware comes with the first samples.
    assert {name.split()[1] for name in checks if name.startswith("a ")} - {"hardware"} == expected
    assert {name for name in checks if " " not in name} == {"database", "share", "controller", "clock"}
    assert list(head.share.iterdir()) == []

    # A node that has less than it promised is drained, with the reason, and resumed when that is over.
    toml = head.base / "config" / "nodes.d" / "a.toml"
    was = toml.read_text()
    toml.write_text(was.replace("cpus = 1", "cpus = 4000"))
    head.reload()
    wait_until(lambda: head.health().get("a resources", {}).get("status") == "CRITICAL", what="a to be seen as smaller")
    assert bad(head.health("--resume")) == {"a resources": "CRITICAL"}
    assert head.done == []
    head.health("--drain")
    assert len(head.done) == 1
    assert head.done[0].startswith("drained a: hhealth: resources: it has only ")
    assert head.state_of("a") == "DRAINED"
    head.health("--drain", "--resume")
    assert head.done == []
    toml.write_text(was)
    head.reload()
    wait_until(lambda: head.health().get("a resources", {}).get("status") == "OK", what="a to be seen as it is")
    head.health("--resume")
    assert head.done == ["a is well; hinfo -R says from when on it returns"]
    assert "if it stays well" in head("hinfo", "-R")
    settings = head.base / "config" / "hpcsched.toml"
    settings.write_text(settings.read_text().replace('#health_hold = "15m"', "health_hold = 0"))
    head.reload()
    head.health("--resume")
    assert head.done == ["resumed a"]
    assert head.state_of("a") == "IDLE"

    # What does not answer is said with why, and left to the controller.
    head.nodes.power_off("b")
    wait_until(lambda: bad(head.health()) == {"b link": "CRITICAL"}, what="b to be down")
    wait_until(lambda: "Connection refused" in head("hhealth", "-q", status=2), what="the reason to be known")
    said = head("hhealth", "-q", "--drain", status=2)
    assert "CRITICAL node b: link: down for " in said
    assert "OK " not in said
    assert "drained" not in said

    head("hpcsched", "down")
    said = head("hhealth", status=2)
    assert "CRITICAL controller: Unable to contact hpcsched controller" in said
    assert "UNKNOWN  node a: link: cannot be asked" in said
    assert "OK       database: whole" in said


def test_without_a_cluster(tmp_path: Path) -> None:
    environ = os.environ | {"HPCSCHED_CONFIG": str(tmp_path)}
    done = subprocess.run([BIN / "hhealth", "-q"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout.startswith("UNKNOWN  hhealth: cannot read ")
    assert "hpcsched init" in done.stdout
    done = subprocess.run([BIN / "hhealth", "--drane"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "drain" in done.stderr
