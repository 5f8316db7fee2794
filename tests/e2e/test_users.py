"""As root the controller serves many users: the kernel says who asks, and their jobs run as them."""

from __future__ import annotations

import json
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcsched import client
from hpcsched.cli.admin import daemon, hpcsched_command, run
from hpcsched.commands.options import FAILED
from hpcsched.errors import HpcschedError
from hpcsched.health import check_database
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can serve several users")

ANN, BOB = "games", "www-data"  # accounts that every Debian has


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        settings = {"controller": {"run_dir": str(base / "run"), "kill_wait_s": 1}}
        with LocalCluster(base, names=("n1",), settings=settings) as started:
            yield started


def as_user(name: str, ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns, or the text of its error, in a process of that user."""
    account = pwd.getpwnam(name)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() != account.pw_uid:
                os.setgroups([])
                os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
                os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
            try:
                result = ask()
            except HpcschedError as error:
                result = str(error)
            os.write(write_end, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    return json.loads(data)


def directory_of(cluster: LocalCluster, name: str) -> Path:
    path = cluster.share / name
    path.mkdir(exist_ok=True)
    os.chown(path, pwd.getpwnam(name).pw_uid, pwd.getpwnam(name).pw_gid)
    return path


def submit(cluster: LocalCluster, name: str, script: str, **fields: Any) -> Any:
    spec = JobSpec(name="j", script=script, work_dir=str(directory_of(cluster, name)), **fields)
    body = {"request_id": "", "jobs": [spec_to_json(spec)], "user": "root", "uid": 0}
    return as_user(name, lambda: client.call("POST", "/v1/submit", body, where=cluster.api_socket))


def ended(cluster: LocalCluster, job_id: int) -> dict[str, Any]:
    def job() -> Any:
        found = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]
        return found if found["state"] in ("COMPLETED", "FAILED", "CANCELLED") else None

    return wait_until(job, what="the job's end")


def test_b2_a_job_runs_as_its_submitter_whatever_the_request_says(cluster: LocalCluster) -> None:
    script = "#!/bin/sh\nid -un; id -u; grep -E 'Groups|NoNewPrivs|CapEff' /proc/self/status; echo $HOME\n"
    job_id = submit(cluster, ANN, script)["jobs"][0]["job_id"]
    job = ended(cluster, job_id)
    assert (job["user"], job["state"]) == (ANN, "COMPLETED")
    output = directory_of(cluster, ANN) / f"slurm-{job_id}.out"
    account = pwd.getpwnam(ANN)
    lines = output.read_text().splitlines()
    assert lines[:2] == [ANN, str(account.pw_uid)]
    facts = {line.split(":")[0]: line.split(":")[1].strip() for line in lines[2:5]}
    assert facts["Groups"].split() == [str(account.pw_gid)]
    assert int(facts["CapEff"], 16) == 0
    assert facts["NoNewPrivs"] == "1"
    assert lines[5] == account.pw_dir
    assert output.stat().st_uid == account.pw_uid


def test_b3_the_user_s_files_are_opened_with_the_user_s_rights(cluster: LocalCluster) -> None:
    secret = cluster.share / "secret"
    secret.write_text("root's\n")
    secret.chmod(0o600)
    job_id = submit(cluster, ANN, "#!/bin/sh\necho overwritten\n", stdout=str(secret))["jobs"][0]["job_id"]
    assert ended(cluster, job_id)["state"] == "FAILED"
    assert secret.read_text() == "root's\n"


def test_others_see_that_a_job_is_there_and_no_more_and_cannot_touch_it(cluster: LocalCluster) -> None:
    job_id = submit(cluster, ANN, "#!/bin/sh\nsleep 60\n", env=(("SECRET", "x"),), comment="mine")["jobs"][0]["job_id"]
    ref = f"/v1/job/{job_id}"
    own = as_user(ANN, lambda: client.call("GET", ref, where=cluster.api_socket))["jobs"][0]
    assert (own["comment"], own["env"]) == ("mine", {"SECRET": "x"})
    seen = as_user(BOB, lambda: client.call("GET", ref, where=cluster.api_socket))["jobs"][0]
    assert seen["user"] == ANN
    assert [seen[key] for key in ("comment", "work_dir", "stdout", "submit_line")] == [None] * 4
    assert "env" not in seen
    assert "script" not in seen
    for method, path, body in (
        ("POST", "/v1/cancel", {"jobs": [str(job_id)]}),
        ("POST", "/v1/requeue", {"jobs": [str(job_id)]}),
    ):
        refused = as_user(BOB, lambda m=method, p=path, b=body: client.call(m, p, b, where=cluster.api_socket))
        assert refused["jobs"] == []
        assert f"it belongs to {ANN}" in refused["errors"][0]["error"]
    assert "needs the role operator" in as_user(
        BOB, lambda: client.call("POST", "/v1/nodes/drain", {"nodes": "n1", "why": "x"}, where=cluster.api_socket)
    )
    log = as_user(BOB, lambda: client.call("GET", f"{ref}/story", where=cluster.api_socket))
    assert "it belongs to" in log
    done = as_user(ANN, lambda: client.call("POST", "/v1/cancel", {"jobs": [str(job_id)]}, where=cluster.api_socket))
    assert done["jobs"] == [job_id]
    assert ended(cluster, job_id)["state"] == "CANCELLED"


def test_what_the_daemon_keeps_is_private(cluster: LocalCluster) -> None:
    state = cluster.config_dir / "state"
    assert state.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in state.glob("hpcsched.db*"))


def test_what_others_may_not_do_is_refused_in_words(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_CONFIG", str(cluster.config_dir))
    assert "cannot stop hpcschedd" in as_user(BOB, lambda: daemon.down.callback())
    node_file = cluster.config_dir / "nodes.d" / "n1.toml"
    remove = ["node", "remove", "n1", "--force"]
    assert as_user(BOB, lambda: run(hpcsched_command, "hpcsched", remove)) == FAILED
    assert node_file.exists()
    database = cluster.config_dir / "state" / "hpcsched.db"
    assert as_user(BOB, lambda: check_database(database).status.name) == "UNKNOWN"
