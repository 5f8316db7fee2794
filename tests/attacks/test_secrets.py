"""Planted secrets are found in no file of the cluster: state, logs, backups, core files, spools, the system's log.

Those of a job's environment, of a token, of sessions and links to them, and of the gateway at its OpenID provider. All files
are searched, for the text and for its base64 and hexadecimal forms.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import hashlib
import itertools
import json
import os
import resource
import signal
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpcsched import paths
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.job import FINAL

CANARY = "canary-AKIA7Q2ZP4-hunter2"
DEV_LOG, SYSTEM_LOG = "/dev/log", "system.log"
ELSEWHERE = "/run/hpcsched*"  # where agents of root have files
STORIES = (("hctl", "story"), ("hwhy",), ("hqueue", "--json", "-j"), ("hctl", "show", "job"), ("hacct", "--json", "-j"))
SECRETS = {"AWS_SECRET_ACCESS_KEY": CANARY, "RESTIC_PASSWORD": f"pass phrase {CANARY}", "TOKEN": f"eyJ.{CANARY}.sig"}


@pytest.fixture(scope="module")
def started() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        quick = {"controller": {"requeue_delay_s": 0, "kill_wait_s": 2, "log_level": "debug"}}
        before = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))  # as on a machine that keeps core files
        try:
            with (
                system_log(Path(directory) / SYSTEM_LOG),
                LocalCluster(Path(directory), names=("n1",), settings=quick) as cluster,
            ):
                yield cluster
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.fixture
def cluster(started: LocalCluster) -> Iterator[LocalCluster]:
    """The cluster; its jobs end with the test."""
    yield started
    started.up()  # a test that failed may have left it down
    started.run("hcancel", "--me")
    (started.share / "gate").unlink(missing_ok=True)
    jobs = "/v1/jobs"
    wait_until(lambda: all(job["state"] in FINAL for job in started.api("GET", jobs)["jobs"]), what="the jobs to end")
    wait_until(lambda: not places_of(CANARY, started.base), what="the node to remove what it kept of them")


def places_of(secret: str, base: Path) -> list[str]:
    """Return the files below `base`, and of agents elsewhere, that have the secret in one of its forms."""
    forms = forms_of(secret.encode())
    found = []
    tops = [str(base), *glob.glob(ELSEWHERE)]
    walks = itertools.chain.from_iterable(map(os.walk, tops))  # Path.rglob fails if a directory is removed meanwhile
    for path in (Path(directory, name) for directory, _, names in walks for name in names):
        try:
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                found += [os.path.relpath(path, base)] * any(form in data for form in forms)
        except FileNotFoundError:
            continue  # of a job that has ended by now
    return found


def forms_of(secret: bytes) -> list[bytes]:
    """Return how a file may have a secret: as it is, as hexadecimal digits, in base64 at any place of a text."""
    inner = [base64.b64encode(b"x" * before + secret)[4 * bool(before) : -4] for before in range(3)]
    return [secret, secret.hex().encode(), *inner, *(base64.urlsafe_b64encode(base64.b64decode(one)) for one in inner)]


@contextlib.contextmanager
def system_log(path: Path) -> Iterator[None]:
    """Write the messages to the system's log to a file, if this machine has no such log."""
    if os.geteuid() != 0 or os.path.exists(DEV_LOG):
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, path.open("ab", buffering=0) as file:
        sock.bind(DEV_LOG)
        os.chmod(DEV_LOG, 0o666)  # noqa: S103 - as the system's
        thread = threading.Thread(
            target=lambda: [file.write(data + b"\n") for data in iter(lambda: sock.recv(65536), b"")]
        )
        thread.start()
        try:
            yield
        finally:
            sock.shutdown(socket.SHUT_RD)
            thread.join()
            os.unlink(DEV_LOG)


def core_limits_on(cluster: LocalCluster) -> set[str]:
    """Return the limits of core files of the processes of the node's agent, the batch step's too."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = path.joinpath("cmdline").read_bytes()
            limits = path.joinpath("limits").read_text()
        except OSError:
            continue  # it has just ended
        if b"hpcnode" in command and str(cluster.base / "nodes" / "n1").encode() in command:
            found += [line.split()[4] for line in limits.splitlines() if line.startswith("Max core file size")]
    assert len(found) >= 2, "the agent, and the shepherd of the job"
    return set(found)


def submit(cluster: LocalCluster, *options: str) -> int:
    script = 'test "$TOKEN" && echo "$TOKEN" | wc -c; while [ ! -e gate ]; do sleep 0.05; done\n'
    told = cluster.run("hsub", "--parsable", "-o", "out-%j", *options, stdin="#!/bin/sh\n" + script, env=SECRETS)
    return int(told.stdout)


def state_of(cluster: LocalCluster, job_id: int) -> str:
    return str(cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["state"])


def test_f1_a_secret_of_a_job_is_found_nowhere(cluster: LocalCluster) -> None:
    backups = cluster.base / "backups"
    backups.mkdir()
    waiting, running = submit(cluster, "--hold"), submit(cluster)
    wait_until(lambda: state_of(cluster, running) == "RUNNING", what="the job to run")
    cluster.run("hctl", "backup", str(backups))
    meanwhile = places_of(CANARY, cluster.base)
    assert all(place.startswith("nodes/n1/agent/spool/") for place in meanwhile), meanwhile
    assert {(cluster.base / place).stat().st_mode & 0o077 for place in meanwhile} <= {0}, "documented: the node's spool"
    assert core_limits_on(cluster) == {"0"}, "of the agent and the shepherd, which know the environment"
    os.kill(cluster.api("GET", "/v1/ping")["pid"], signal.SIGKILL)
    assert places_of(CANARY, cluster.base) == meanwhile
    cluster.up()
    (cluster.share / "gate").touch()
    wait_until(lambda: state_of(cluster, running) == "COMPLETED", what="the job to end")
    for words in STORIES:
        assert CANARY not in cluster.run(*words, str(running)).stdout, words
    assert "ended" in cluster.run("hctl", "story", str(running)).stdout
    cluster.run("hctl", "audit", "export", str(cluster.base / "audit"))
    assert (cluster.base / "audit").stat().st_size > 100, "which is searched below"
    cluster.run("hctl", "audit", "verify")  # signs the end of the log, in the system's log, too
    if (cluster.base / SYSTEM_LOG).exists():
        assert "audit head" in (cluster.base / SYSTEM_LOG).read_text()
    wait_until(lambda: not places_of(CANARY, cluster.base), what="the node to remove what it kept of the job")
    cluster.down()
    assert places_of(CANARY, cluster.base) == []
    assert (cluster.share / f"out-{running}").read_text().strip() == str(len(SECRETS["TOKEN"]) + 1)
    cluster.up()
    assert cluster.api("GET", f"/v1/job/{waiting}")["jobs"][0]["env"]["TOKEN"] == SECRETS["TOKEN"]


def test_f1_the_controller_leaves_no_core_file(cluster: LocalCluster) -> None:
    submit(cluster, "--hold")
    before = set(Path("/").glob("core*"))
    pid = cluster.api("GET", "/v1/ping")["pid"]
    if os.geteuid() == 0:
        resource.prlimit(pid, resource.RLIMIT_CORE, (-1, -1))  # as if a unit file allowed it
    os.kill(pid, signal.SIGABRT)
    wait_until(lambda: _state(pid) == "Z", what="the controller to end")
    assert set(Path("/").glob("core*")) == before  # its working directory
    assert places_of(CANARY, cluster.base) == []
    cluster.up()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_f1_equal_environments_have_no_hash_that_confirms_a_guess(cluster: LocalCluster) -> None:
    job_id = submit(cluster, "--hold", "--export=TOKEN")
    env = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["env"]
    guess = json.dumps(list(env.items()))
    reader = sqlite3.connect(f"file:{_database(cluster)}?mode=ro", uri=True)
    rows = reader.execute("SELECT mac, sealed FROM environments").fetchall()
    assert rows
    for hashed in (hashlib.sha256(guess.encode()), hashlib.blake2b(guess.encode()), hashlib.sha1(guess.encode())):
        assert hashed.hexdigest() not in [mac for mac, _ in rows]


def _database(cluster: LocalCluster) -> Path:
    return next(cluster.config_dir.rglob(paths.DATABASE_FILE))


def sealed_in(database: Path) -> int:
    """Return how many environments a database has, those of earlier tests too."""
    reader = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    return int(reader.execute("SELECT count(*) FROM environments").fetchone()[0])


def test_f1_a_key_that_others_can_read_is_refused_and_a_rotation_reseals(cluster: LocalCluster) -> None:
    held = submit(cluster, "--hold")
    key = cluster.config_dir / paths.SEAL_KEY
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_text().split()[-2]
    said = cluster.run("hpcsched", "seal", "--rotate", "--forget-old").stdout
    assert before in said
    assert before not in key.read_text()
    assert f"seals {sealed_in(_database(cluster))} environments" in said
    cluster.down()
    key.chmod(0o640)
    refused = cluster.run("hpcsched", "up", check=False)
    assert "other accounts can read it" in refused.stderr
    key.chmod(0o600)
    cluster.run("hpcsched", "seal", "--rotate")
    cluster.up()
    assert cluster.api("GET", f"/v1/job/{held}")["jobs"][0]["env"]["TOKEN"] == SECRETS["TOKEN"]


def test_f1_a_database_without_its_key_keeps_its_jobs_and_runs_none(cluster: LocalCluster) -> None:
    job_id = submit(cluster)
    cluster.run("hcancel", str(job_id))
    held = submit(cluster, "--hold")
    backup = cluster.base / "copy.db"
    cluster.run("hctl", "backup", str(backup))
    sealed = sealed_in(backup)
    cluster.down()
    key = cluster.config_dir / paths.SEAL_KEY
    lost = key.rename(cluster.base / "lost.key")
    cluster.run("hpcsched", "restore", "--force", str(backup))
    cluster.up()
    cluster.wait_for_nodes()
    (cluster.share / "gate").touch()
    cluster.run("hctl", "release", str(held))
    later = submit(cluster)
    wait_until(lambda: state_of(cluster, later) == "COMPLETED", what="a job with the new key to run")
    seen = cluster.api("GET", f"/v1/job/{held}")["jobs"][0]
    assert (seen["state"], seen["reason"]) == ("PENDING", "JobHeldAdmin"), seen
    assert "sealed with a key" in cluster.run("hwhy", str(held), check=False).stdout
    refused = cluster.run("hctl", "update", f"JobId={held}", "Comment=x", check=False)
    assert "no key opens its environment" in refused.stderr
    assert f"missing: {sealed} environments" in cluster.run("hpcsched", "seal").stdout
    cluster.down()
    with key.open("a") as file:
        file.write(lost.read_text())
    cluster.up()
    wait_until(lambda: state_of(cluster, held) == "COMPLETED", what="the job to run with its environment")
    assert (cluster.share / f"out-{held}").read_text().strip() == str(len(SECRETS["TOKEN"]) + 1)
