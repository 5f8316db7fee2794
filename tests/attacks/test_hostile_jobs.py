"""Jobs, names, files and variables of a hostile user, against a cluster that was started with umask 000.

As root, the hostile user is another account. As a plain user, it is the account of the controller and of the agents.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcnode.os import account
from hpcsched import client
from hpcsched.loopback.cluster import LocalCluster
from tests.e2e import test_users
from tests.e2e.test_users import as_user, directory_of, ended, submit

AS_ROOT = os.geteuid() == 0
ANN = test_users.ANN if AS_ROOT else pwd.getpwuid(os.geteuid()).pw_name

CANARY = "/nonexistent/canary-of-c1"
LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "BASH_ENV", "ENV", "GCONV_PATH")
CLONE_NEWUSER = 0x10000000
WORK = {"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp", "begin_at_s": 4_000_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        base = Path(directory)
        base.chmod(0o755)
        settings = {"controller": {"run_dir": str(base / "run"), "kill_wait_s": 1}}
        made = LocalCluster(base, names=("n1",), settings=settings)
        try:
            made.start_machines()
            made.write_config()  # which is refused if others may write it
            os.umask(0)
            made.up()
            made.wait_for_nodes()
            os.umask(before)
            yield made
        finally:
            os.umask(before)
            made.stop()


def posted(connection: socket.socket) -> dict[str, Any]:
    """Submit a job on this connection and return the answer."""
    body = json.dumps({"request_id": "", "jobs": [WORK], "uid": 0, "user": "root"}).encode()
    head = f"POST /v1/submit HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    with connection.makefile("rb") as stream:
        answer: dict[str, Any] = json.loads(stream.read().partition(b"\r\n\r\n")[2])
    return answer


def connected(cluster: LocalCluster) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(cluster.api_socket))
    return connection


def owner(cluster: LocalCluster, answer: dict[str, Any]) -> str:
    return str(cluster.api("GET", f"/v1/job/{answer['jobs'][0]['job_id']}")["jobs"][0]["user"])


def test_a9_root_of_a_user_namespace_is_the_account_outside(cluster: LocalCluster) -> None:
    def ask() -> Any:
        uid = os.getuid()
        libc = ctypes.CDLL(None)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: after the change of user, /proc/self is root's
        if libc.unshare(CLONE_NEWUSER):
            return "no user namespace"
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        assert os.getuid() == 0
        return posted(connected(cluster))

    answer = as_user(ANN, ask)
    if answer == "no user namespace":
        pytest.skip("NOT TESTED: this kernel refuses user namespaces to users")
    assert owner(cluster, answer) == ANN


def test_a1_who_submits_is_told_by_the_kernel_and_not_by_the_request(cluster: LocalCluster) -> None:
    """The body of the request says uid 0 and user root."""
    assert owner(cluster, as_user(ANN, lambda: posted(connected(cluster)))) == ANN


@pytest.mark.skipif(not AS_ROOT, reason="needs to run as root: it becomes an account that does not exist")
def test_a9_an_account_without_a_passwd_entry_submits_nothing(cluster: LocalCluster) -> None:
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(30001, 30001, 30001)
        os.setresuid(30001, 30001, 30001)
        theirs.sendall(json.dumps(posted(connected(cluster))).encode())
        os._exit(0)
    theirs.close()
    with mine.makefile("rb") as stream:
        answer = json.loads(stream.read())
    os.waitpid(pid, 0)
    job_id = answer["jobs"][0]["job_id"] if answer.get("jobs") else 0
    assert not job_id, cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["user"]


def test_a10_a_connection_that_was_passed_on_acts_for_the_account_that_made_it(cluster: LocalCluster) -> None:
    mine, theirs = socket.socketpair()

    def pass_on() -> bool:
        with connected(cluster) as connection:
            socket.send_fds(theirs, [b"x"], [connection.fileno()])
        return True

    assert as_user(ANN, pass_on)
    _, descriptors, _, _ = socket.recv_fds(mine, 1, 1)
    answer = posted(socket.socket(fileno=descriptors[0]))  # by root; who connected is gone
    assert owner(cluster, answer) == ANN


def refuse(*_: Any) -> None:
    raise OSError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("call", ["setgroups", "setresgid", "setresuid"])
@pytest.mark.parametrize("fault", [refuse, lambda *_: None], ids=["fails", "does nothing"])
def test_b1_a_step_of_the_change_that_fails_ends_the_task(call: str, fault: Callable[..., None]) -> None:
    entry = pwd.getpwnam(test_users.ANN)
    target = account.UserAccount(entry.pw_name, entry.pw_uid, entry.pw_gid, [entry.pw_gid], "/", "/bin/sh")
    pid = os.fork()
    if pid == 0:
        if AS_ROOT:
            os.setgroups([0, 4])
        setattr(os, call, fault)
        try:
            account.become(target)
        except (OSError, account.UserError):
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_b3_output_through_links_devices_and_parents_changes_nothing(cluster: LocalCluster) -> None:
    victim = cluster.share / "victim"
    victim.write_text("kept")
    victim.chmod(0o600)
    work = directory_of(cluster, ANN)
    (work / "link").symlink_to(victim)
    os.mkfifo(work / "fifo", 0o666)
    os.chown(work / "fifo", pwd.getpwnam(ANN).pw_uid, -1)
    paths = [str(work / "fifo"), "/proc/1/mem", "/dev/mem", "/etc/passwd"]
    if AS_ROOT:  # else the victim is the attacker
        paths += [str(work / "link"), "link", "../victim"]
    before = Path("/etc/passwd").read_bytes()
    jobs = [submit(cluster, ANN, "#!/bin/sh\necho evil\n", stdout=path)["jobs"][0]["job_id"] for path in paths]
    assert {path: ended(cluster, job)["state"] for path, job in zip(paths, jobs, strict=True)} == dict.fromkeys(
        paths, "FAILED"
    )
    assert (victim.read_text(), Path("/etc/passwd").read_bytes()) == ("kept", before)


@pytest.mark.parametrize("name", ["$(touch X)", ";touch X", "`touch X`", "../../X", "-rf", "%%%n%s", "a" * 100])
def test_b6_a_hostile_name_is_refused_or_a_part_of_a_file_name(cluster: LocalCluster, name: str) -> None:
    work = directory_of(cluster, ANN)
    answer = as_user(
        ANN,
        lambda: posted_job(cluster, {**WORK, "name": name, "work_dir": str(work), "stdout": "%x.out", "begin_at_s": 0}),
    )
    if answer.get("jobs") and answer["jobs"][0].get("job_id"):
        assert ended(cluster, answer["jobs"][0]["job_id"])["state"] == "COMPLETED"
    assert not list(cluster.base.rglob("X"))
    assert not (Path("/tmp") / "X").exists()


def posted_job(cluster: LocalCluster, job: dict[str, Any]) -> dict[str, Any]:
    body = {"request_id": "", "jobs": [job]}
    answer: dict[str, Any] = client.call("POST", "/v1/submit", body, where=cluster.api_socket)
    return answer


def test_b10_nothing_of_the_cluster_can_be_written_or_read_by_others(cluster: LocalCluster) -> None:
    wrong = []
    for top in (cluster.config_dir / "state", cluster.base / "nodes" / "n1" / "agent"):
        for path in [top, *top.rglob("*")]:
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and not stat.S_ISSOCK(mode) and mode & 0o022 and not mode & stat.S_ISVTX:
                wrong.append((oct(mode), str(path)))
    for path in (cluster.config_dir / "state").rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            wrong.append((oct(path.stat().st_mode), str(path)))
    assert not wrong


def is_of_another(owner_uid: int, uid: int, variables: bytes) -> bool:
    """Return whether a process is not the job's: as a plain user, the daemons have the same account."""
    return owner_uid != uid or b"SLURM_JOB_ID=" not in variables


def environments() -> Iterator[tuple[int, str, bytes, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            owner_uid = folder.stat().st_uid
            yield owner_uid, folder.name, (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue


def test_c1_c7_variables_of_a_job_are_in_no_process_but_its_own(cluster: LocalCluster) -> None:
    env = tuple((name, CANARY) for name in LOADER)
    script = "#!/bin/sh\nread x < gate\nenv > seen\n"
    gate = directory_of(cluster, ANN) / "gate"
    os.mkfifo(gate, 0o666)
    os.chown(gate, pwd.getpwnam(ANN).pw_uid, -1)
    job_id = submit(cluster, ANN, script, env=env)["jobs"][0]["job_id"]
    uid = pwd.getpwnam(ANN).pw_uid
    found, own = set(), False
    while not own:  # the timeout of the suite ends it
        for owner_uid, pid, variables, words in environments():
            of_another = is_of_another(owner_uid, uid, variables)
            if CANARY.encode() in words or (of_another and CANARY.encode() in variables):
                found.add(pid)
            own = own or (not of_another and CANARY.encode() in variables)
    gate.write_text("\n")
    assert ended(cluster, job_id)["state"] == "COMPLETED"
    assert not found
    seen = (directory_of(cluster, ANN) / "seen").read_text()
    assert all(f"{name}={CANARY}" in seen for name in LOADER)


def test_c2_the_schedulers_variables_win(cluster: LocalCluster) -> None:
    names = ("SLURM_JOB_ID", "HPCSCHED_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_NODELIST", "HPCSCHED_AGENT_ROOT")
    env = tuple((name, "forged") for name in names)
    job_id = submit(cluster, ANN, "#!/bin/sh\nenv\n", env=env)["jobs"][0]["job_id"]
    assert ended(cluster, job_id)["state"] == "COMPLETED"
    text = (directory_of(cluster, ANN) / f"slurm-{job_id}.out").read_text()
    assert "=forged" not in text
    assert f"SLURM_JOB_ID={job_id}\n" in text


@pytest.mark.parametrize(
    "env",
    [(("", "x"),), (("a=b", "x"),), (("a\0b", "x"),), (("a", "b\0c"),), (("a", "x" * 12_000_000),),
     tuple((f"V{n}", "x") for n in range(100_000))],
    ids=["empty", "equals", "nul", "nul in the value", "12 MB", "100,000"],
)  # fmt: skip
def test_c3_an_environment_that_cannot_be_is_refused(cluster: LocalCluster, env: tuple[tuple[str, str], ...]) -> None:
    assert "cannot" in str(submit(cluster, ANN, "#!/bin/sh\n", env=env))
    assert cluster.api("GET", "/v1/ping")


@pytest.mark.parametrize("field", ["mail_user", "account", "partition", "qos", "nodelist"])
@pytest.mark.parametrize("value", ["a;touch X", "$(touch X)", "`touch X`", "a\nb", "-oProxyCommand=touch X"])
def test_c4_what_a_shell_would_run_is_refused(cluster: LocalCluster, field: str, value: str) -> None:
    assert "cannot" in str(submit(cluster, ANN, "#!/bin/sh\n", **{field: (value,) if field == "nodelist" else value}))
    assert not list(cluster.base.rglob("X"))
