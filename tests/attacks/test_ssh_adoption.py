"""An ssh login to a node: only with a job there, and as a part of that job.

A real sshd on loopback with PAM. It has a mount namespace of its own, in which /etc/pam.d/sshd and /etc/passwd are the test's.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_client import AS_ROOT, INCARNATION, Controller, NodeUnderTest, new_token, running_node
from waiting import wait_until

from hpcnode.agent import adopt
from hpcnode.os import cgroup
from hpcnode.shepherd import confinement
from hpcnode.wire import protocol

SSHD, PAM_EXEC = shutil.which("sshd", path="/usr/sbin:/sbin"), list(Path("/lib").glob("*/security/pam_exec.so"))
pytestmark = pytest.mark.skipif(
    not (AS_ROOT and SSHD and PAM_EXEC and shutil.which("unshare")), reason="needs root, sshd and pam_exec"
)
OWNER, STRANGER, ADMIN = "nobody", "daemon", "bin"
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
UsePAM yes
PasswordAuthentication no
KbdInteractiveAuthentication yes
StrictModes no
AuthorizedKeysFile {folder}/login.pub
"""
PAM = """
auth required pam_permit.so
account required pam_permit.so
account [success=1 default=ignore] pam_succeed_if.so quiet user ingroup bin
account required pam_exec.so quiet stdout {root}/bin/hadopt
session required pam_exec.so {folder}/elsewhere
session [success=1 default=ignore] pam_succeed_if.so quiet user ingroup bin
session required pam_exec.so quiet stdout {root}/bin/hadopt
"""
# pam_systemd does this: it puts the login into a scope of its own.
ELSEWHERE = """#!/bin/sh
[ ! -e {folder}/is_systemd ] || echo $PPID > {mount}/cgroup.procs
"""


@dataclass
class Server:
    folder: Path
    port: int

    def ssh(self, user: str, command: str, *more: str) -> subprocess.Popen[str]:
        options = ["-F", "none", "-i", f"{self.folder}/login", "-p", str(self.port), "-o", "BatchMode=yes"]
        options += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        return subprocess.Popen(
            ["ssh", *more, *options, f"{user}@127.0.0.1", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def node() -> Iterator[NodeUnderTest]:
    place = Path(tempfile.mkdtemp(prefix="hpcnode-test-", dir="/var/tmp"))
    place.chmod(0o755)
    (place / "work").mkdir()
    (place / "work").chmod(0o777)
    with running_node(place / "node") as node:
        yield node
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def server(node: NodeUnderTest) -> Iterator[Server]:
    folder = node.root.parent / "ssh"
    folder.mkdir()
    for name in ("host_key", "login"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    (folder / "pam").write_text(PAM.format(root=node.root, folder=folder))
    mount = next((line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line), "")
    (folder / "elsewhere").write_text(ELSEWHERE.format(folder=folder, mount=mount))
    (folder / "elsewhere").chmod(0o755)
    lines = Path("/etc/passwd").read_text().splitlines()
    (folder / "passwd").write_text(
        "".join(
            ":".join([*line.split(":")[:5], "/", "/bin/sh"]) + "\n"
            if line.split(":")[0] in (OWNER, STRANGER, ADMIN)
            else line + "\n"
            for line in lines
        )
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    mounts = f"mount --bind {folder}/pam /etc/pam.d/sshd && mount --bind {folder}/passwd /etc/passwd"
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", f"{mounts} && exec {SSHD} -D -e -f {folder}/config"], stderr=log
        )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers, what="sshd")
        yield Server(folder, port)
    finally:
        daemon.terminate()
        daemon.wait()


def start_job(node: NodeUnderTest, **fields: object) -> tuple[Controller, str]:
    controller = Controller(node)
    confine = protocol.Confinement(words=["cpus", "processes", "shm"], cpus=1, mem_mib=200, max_processes=100)
    work = node.root.parent / "work"
    token = controller.launch(
        "touch made; sleep 600", user=OWNER, confine=confine, work_dir=str(work), **{"token": new_token(), **fields}
    )
    wait_until((work / "made").exists, what="the job")
    return controller, token


def _sandbox(node: NodeUnderTest, job: int = 1) -> str:
    return confinement.owners(confinement.owners_directory(str(node.root)))[f"{INCARNATION}.{job}.0"].sandbox


def test_e3_a_user_without_a_job_cannot_log_in(node: NodeUnderTest, server: Server) -> None:
    start_job(node)
    login = server.ssh(STRANGER, "echo in")
    out, err = login.communicate(timeout=30)
    assert login.returncode != 0
    assert "in\n" not in out
    assert server.ssh(OWNER, "echo in").communicate(timeout=30)[0] == "in\n", err
    assert server.ssh(ADMIN, "echo in").communicate(timeout=30)[0] == "in\n"


def test_e3_a_login_is_a_part_of_the_job_and_ends_with_it(node: NodeUnderTest, server: Server) -> None:
    controller, token = start_job(node)
    groups, _ = server.ssh(OWNER, "cat /proc/self/cgroup").communicate(timeout=30)
    own = [line for line in groups.splitlines() if f"/job-{_sandbox(node)}/logins" in line]
    assert {"cpu", "memory", "pids", ""} <= {line.split(":")[1] for line in own}
    pid_file = node.root.parent / "work" / "login_pid"
    stays = server.ssh(OWNER, f"setsid sh -c 'echo $$ > {pid_file}; sleep 600' & sleep 600")
    pid = wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), what="the login")
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    controller.final(token)
    stays.communicate(timeout=30)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the end of the login's processes")
    refused = server.ssh(OWNER, "echo in")
    assert refused.communicate(timeout=30)[0] != "in\n"
    assert refused.returncode != 0


def _adopted(node: NodeUnderTest, groups: str) -> bool:
    own = [line for line in groups.splitlines() if f"/job-{_sandbox(node)}/logins" in line]
    return {"cpu", "memory", "pids", ""} <= {line.split(":")[1] for line in own}


def test_e3_a_login_by_keyboard_interactive_is_a_part_of_the_job(node: NodeUnderTest, server: Server) -> None:
    """sshd asks PAM in a process of its own then, which is not the login: see sshpam_thread in its auth-pam.c."""
    start_job(node)
    login = server.ssh(
        OWNER, "cat /proc/self/cgroup", "-o", "BatchMode=no", "-o", "PreferredAuthentications=keyboard-interactive"
    )
    groups, err = login.communicate(timeout=30)
    assert _adopted(node, groups), groups + err


def test_e3_a_login_that_another_pam_module_has_moved_is_a_part_of_the_job(node: NodeUnderTest, server: Server) -> None:
    (server.folder / "is_systemd").touch()
    start_job(node)
    groups, err = server.ssh(OWNER, "cat /proc/self/cgroup").communicate(timeout=30)
    assert _adopted(node, groups), groups + err


def test_e3_without_an_agent_logins_enter_jobs_that_are_there(node: NodeUnderTest, server: Server) -> None:
    start_job(node)
    node.kill()
    assert server.ssh(OWNER, "echo in").communicate(timeout=30)[0] == "in\n"
    assert server.ssh(STRANGER, "echo in").communicate(timeout=30)[0] != "in\n"
    (node.root / "bin" / "hadopt").unlink()
    assert server.ssh(OWNER, "echo in").communicate(timeout=30)[0] != "in\n"


def test_e3_a_login_belongs_to_the_newest_job(node: NodeUnderTest, server: Server) -> None:
    """And stays when an older one ends."""
    _, token = start_job(node)
    older = _sandbox(node)
    work = node.root.parent / "work"
    (work / "made").unlink()
    controller, _ = start_job(node, token=new_token(job=2))
    login = server.ssh(
        OWNER, f"cat /proc/self/cgroup; touch {work}/logged_in; while [ ! -e {work}/leave ]; do sleep 0.01; done"
    )
    wait_until((work / "logged_in").exists, what="the login")
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    controller.final(token)
    (work / "leave").touch()
    groups, err = login.communicate(timeout=30)
    assert f"/job-{_sandbox(node, 2)}/logins" in groups, err
    assert f"/job-{older}/" not in groups
    assert login.returncode == 0


def test_e3_a_claim_without_a_step_lets_its_user_in(node: NodeUnderTest, server: Server) -> None:
    """mpirun may use ssh to a node that the job has, before anything of the job runs there."""
    controller = Controller(node)
    confine = protocol.Confinement(words=["cpus", "processes"], cpus=1, mem_mib=200, max_processes=100)
    token = new_token(step="alloc")
    controller.launch(token=token, user=OWNER, confine=confine, work_dir="/", argv=[])
    controller.wait_status(token, protocol.CLAIMED)
    groups, err = server.ssh(OWNER, "cat /proc/self/cgroup").communicate(timeout=30)
    assert f"/job-{_sandbox(node)}/logins" in groups, err


def test_e3_the_job_is_found_if_the_root_of_the_agent_is_named_by_a_link(node: NodeUnderTest) -> None:
    start_job(node)
    link = node.root.parent / "link"
    link.symlink_to(node.root)
    owners = confinement.owners(confinement.owners_directory(str(link))).values()
    assert [owner.job_id for owner in owners] == [1]


def test_root_and_the_account_of_the_agent_may_always_log_in(tmp_path: Path) -> None:
    assert adopt.why_refused(str(tmp_path), {"PAM_USER": "root", "PAM_TYPE": "account"}, os.getppid()) == ""


def test_an_unknown_account_is_refused(tmp_path: Path) -> None:
    why = adopt.why_refused(str(tmp_path), {"PAM_USER": "no-such-user\n", "PAM_TYPE": "account"}, os.getppid())
    assert why == r"this node has no account 'no-such-user\n'"


def test_e3_a_login_whose_job_ends_while_it_enters_is_refused(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job may have the sandbox by then."""
    controller, token = start_job(node)
    enter = cgroup.adopt

    def enter_late(groups: list[str], pid: int) -> bool:
        entered = enter(groups, pid)
        controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
        controller.final(token)
        return entered

    monkeypatch.setattr(adopt.cgroup, "adopt", enter_late)
    with subprocess.Popen(["sleep", "600"]) as login:
        environ = {"PAM_TYPE": "account", "PAM_USER": OWNER}
        assert "cannot put the login into a job" in adopt.why_refused(str(node.root), environ, login.pid)
        login.kill()
