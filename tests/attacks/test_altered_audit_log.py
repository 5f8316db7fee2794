"""The audit log against somebody who can write the controller's files: what verify names, and what only a copy shows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from waiting import wait_until

from hpcsched import client
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.store.audit_heads import HEADS_FILE


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="audit-") as directory,
        LocalCluster(Path(directory), names=("n1",)) as started,
    ):
        for _ in range(5):
            started.run("hctl", "drain", "n1", "attack")
            started.run("hctl", "resume", "n1")
        assert verify(started) == ""  # signs the end
        yield started


def verify(cluster: LocalCluster, *words: str) -> str:
    """Return what `hctl audit verify` has found, "" if nothing."""
    done = cluster.run("hctl", "audit", "verify", *words, check=False)
    assert done.returncode == (1 if done.stderr else 0), done.stdout + done.stderr
    return done.stderr


def socket_of(cluster: LocalCluster) -> str:
    return str(cluster.config_dir / "state" / "run" / "api.sock")


def database(cluster: LocalCluster) -> Path:
    return cluster.config_dir / "state" / "hpcsched.db"


def change(cluster: LocalCluster, *statements: str) -> None:
    with closing(sqlite3.connect(database(cluster), isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements:
            connection.execute(statement)
        connection.execute("COMMIT")


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        (["UPDATE audit SET user = 'eve' WHERE seq = 3"], "record 3 was altered"),
        (["UPDATE audit SET after = '' WHERE seq = 7"], "record 7 was altered"),
        (["DELETE FROM audit WHERE seq = 4"], "record 4 is missing: after record 3 comes record 5"),
        (["DELETE FROM audit WHERE seq <= 2"], "record 1 is missing"),
        (
            ["UPDATE audit SET seq = 1000 WHERE seq = 5", "UPDATE audit SET seq = 5 WHERE seq = 6",
             "UPDATE audit SET seq = 6 WHERE seq = 1000"],
            "record 5 was altered, or is not the one that followed record 4",
        ),
        (["DELETE FROM audit WHERE seq >= 9"], "record 9 is missing: a signed head knows 11 records"),
        (["DELETE FROM audit"], "record 1 is missing: a signed head knows 11 records"),
        (
            ["CREATE TABLE last AS SELECT * FROM audit WHERE seq = 11", "UPDATE last SET seq = 12",
             "INSERT INTO audit SELECT * FROM last"],
            "record 12 was altered, or is not the one that followed record 11",
        ),
    ],
    ids=["who", "what", "one", "first", "order", "tail", "all", "twice"],
)  # fmt: skip
def test_f2_the_first_bad_record_of_the_database_is_named(
    cluster: LocalCluster, statements: list[str], found: str
) -> None:
    change(cluster, "CREATE TABLE IF NOT EXISTS whole AS SELECT * FROM audit")
    try:
        change(cluster, *statements)
        assert found in verify(cluster)
    finally:
        change(cluster, "DELETE FROM audit", "INSERT INTO audit SELECT * FROM whole")
    assert verify(cluster) == ""


def test_f2_a_database_and_heads_that_went_back_together_differ_from_a_copy(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    heads = database(cluster).with_name(HEADS_FILE)
    change(cluster, "CREATE TABLE earlier AS SELECT * FROM audit")
    earlier = heads.read_text()
    cluster.run("hctl", "drain", "n1", "to be hidden")
    cluster.run("hctl", "resume", "n1")
    assert verify(cluster) == ""
    copy = tmp_path / "heads"  # as the system's log on another machine has them
    shutil.copy(heads, copy)
    change(cluster, "DELETE FROM audit", "INSERT INTO audit SELECT * FROM earlier")
    heads.write_text(earlier)
    assert verify(cluster) == ""  # as hpcsched-security(7) says: nothing on this machine shows it
    assert "record 12 is missing: a signed head knows 13 records" in verify(cluster, f"heads={copy}")


def test_a_reload_by_a_signal_leaves_records_with_its_source(cluster: LocalCluster) -> None:
    before = client.call("GET", "/v1/audit", where=socket_of(cluster))["last"]
    os.kill(int(client.call("GET", "/v1/ping", where=socket_of(cluster))["pid"]), signal.SIGHUP)
    reload = f"/v1/audit?after={before}"
    wait_until(lambda: len(client.call("GET", reload, where=socket_of(cluster))["records"]) == 2, what="the reload")
    records = client.call("GET", reload, where=socket_of(cluster))["records"]
    assert {(one["action"], one["user"], one["source"]) for one in records} == {("reconfigure", "controller", "SIGHUP")}


def test_the_start_of_a_controller_leaves_a_record_with_the_members_of_roles(cluster: LocalCluster) -> None:
    first = client.call("GET", "/v1/audit?limit=1", where=socket_of(cluster))["records"][0]
    assert (first["action"], first["user"]) == ("start", "controller")
    assert "admins" in json.loads(first["after"])["roles"]


LISTEN = """
import os, socket, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from hpcsched.store.audit_heads import AuditHeads
listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
listener.bind("/dev/log")
listener.settimeout(20)
folder = Path(sys.argv[1])
AuditHeads(folder, folder / "heads", lambda: (3, "ab" * 32), to_syslog=True).sign(5.0)
print(listener.recv(65536).decode())
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a /dev/log of the test needs a mount namespace")
def test_f2_each_signed_end_goes_to_the_systems_log(tmp_path: Path) -> None:
    words = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "sh"]
    done = subprocess.run(
        [*words, sys.executable, "-c", LISTEN, str(tmp_path), *sys.path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    priority, _, line = done.stdout.partition(": audit head ")
    assert priority.startswith("<85>")  # authpriv.notice
    assert "hpcschedd" in priority
    assert line.strip("\0\n") == (tmp_path / "heads").read_text().strip()
    assert json.loads(line.strip("\0\n"))["seq"] == 3


def test_no_request_changes_or_deletes_a_record(cluster: LocalCluster) -> None:
    before = client.call("GET", "/v1/audit?limit=5000", where=cluster.api_socket)["records"]
    cluster.run("hctl", "drain", "n1", "again")
    after = client.call("GET", "/v1/audit?limit=5000", where=cluster.api_socket)["records"]
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1
