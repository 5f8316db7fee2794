"""A controller that is not root serves all users: it has an account of its own, and the nodes' agents are root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_user import installation
from waiting import wait_until

from hpcnode.os.trust import is_made_by
from hpcsched import errors
from hpcsched.loopback.cluster import LocalCluster, LoopbackNode

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a controller as another account")

SERVICE, ANN, BOB = "daemon", "games", "www-data"  # accounts that every Debian has


class ForAll(LocalCluster):
    """A cluster whose commands other users can run, too."""

    bin_dir: Path

    @property
    def env(self) -> dict[str, str]:
        found = super().env
        return found | {"PATH": f"{self.bin_dir}{os.pathsep}{found['PATH']}"}

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        return super().node_values(node) | {"python": str(self.bin_dir / "python")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForAll]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        settings = {
            "controller": {"run_dir": str(base / "run"), "kill_wait_s": 1, "user": SERVICE, "requeue_delay_s": 0}
        }
        made = ForAll(base, names=("n1", "n2"), settings=settings)
        made.bin_dir = installation(base / "env")
        with made as started:
            started.share.chmod(0o1777)
            yield started


def run_as(cluster: ForAll, user: str, *command: str, stdin: str = "", check: bool = True) -> str:
    """Run a command as the user types it, in a directory of that user; return what it prints."""
    account = pwd.getpwnam(user)
    work = cluster.share / user
    if not work.exists():
        work.mkdir()
        os.chown(work, account.pw_uid, account.pw_gid)
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=work,
        env=cluster.env | {"HOME": str(work), "USER": user},
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        timeout=60,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout if check else done.stdout + done.stderr


def submit(cluster: ForAll, user: str, script: str, *options: str) -> int:
    return int(run_as(cluster, user, "hsub", "--parsable", *options, stdin="#!/bin/bash\n" + script))


def ended(cluster: ForAll, job_id: int) -> dict[str, Any]:
    def job() -> Any:
        found = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]
        return found if found["state"] in ("COMPLETED", "FAILED", "CANCELLED") else None

    return wait_until(job, what="the job's end")


def controller_pid(cluster: ForAll) -> int:
    return int(cluster.api("GET", "/v1/ping")["pid"])


def test_the_controller_has_its_account_and_no_more(cluster: ForAll) -> None:
    status = Path(f"/proc/{controller_pid(cluster)}/status").read_text()
    facts = {line.split(":")[0]: line.split(":")[1].split() for line in status.splitlines()}
    account = pwd.getpwnam(SERVICE)
    assert facts["Uid"] == [str(account.pw_uid)] * 4
    assert facts["Gid"] == [str(account.pw_gid)] * 4
    assert int(facts["CapEff"][0], 16) == int(facts["CapPrm"][0], 16) == 0


def test_files_are_private_and_the_sockets_are_for_all(cluster: ForAll) -> None:
    state, run = cluster.config_dir / "state", cluster.base / "run"
    account = pwd.getpwnam(SERVICE)
    assert state.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_uid == account.pw_uid for path in state.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in state.glob("hpcsched.db*"))
    assert (run.stat().st_mode & 0o777, run.stat().st_uid) == (0o755, account.pw_uid)
    assert all(path.stat().st_mode & 0o777 == 0o666 for path in run.glob("*.sock"))
    assert (cluster.config_dir / "hpcsched.toml").stat().st_uid == 0


def test_jobs_of_users_run_as_them_and_their_output_can_be_read(cluster: ForAll) -> None:
    job_id = submit(cluster, ANN, "id -un; hrun -N2 -n2 id -u; echo to-stderr >&2", "-N2")
    assert ended(cluster, job_id)["state"] == "COMPLETED"
    uid = str(pwd.getpwnam(ANN).pw_uid)
    assert run_as(cluster, ANN, "hlogs", str(job_id)).split() == [ANN, uid, uid, "to-stderr"]
    private = cluster.share / ANN / "private"
    private.mkdir(mode=0o700)
    os.chown(private, pwd.getpwnam(ANN).pw_uid, 0)
    job_id = submit(cluster, ANN, "echo for my eyes", f"--output={private}/out")
    ended(cluster, job_id)
    assert run_as(cluster, ANN, "hlogs", str(job_id)) == "for my eyes\n"
    assert "it belongs to" in run_as(cluster, BOB, "hlogs", str(job_id), check=False)


def test_every_command_of_a_user_trusts_the_controller(cluster: ForAll) -> None:
    for command in ("hqueue", "hinfo", "hacct", "hprio", "hshare"):
        run_as(cluster, BOB, command)
    assert run_as(cluster, BOB, "hrun", "-n1", "id", "-un") == BOB + "\n"
    assert run_as(cluster, BOB, "halloc", "-n1", "hrun", "id", "-un").split()[-1] == BOB
    job_id = submit(cluster, ANN, "sleep 100")
    assert "it belongs to" in run_as(cluster, BOB, "hcancel", str(job_id), check=False)
    run_as(cluster, ANN, "hcancel", str(job_id))
    assert ended(cluster, job_id)["state"] == "CANCELLED"


def test_python_s_client_and_the_compiled_one_trust_it_and_no_other(cluster: ForAll) -> None:
    for command in (["hqueue"], [str(cluster.bin_dir / "hpcsched-command"), "hqueue"]):
        assert "JOBID" in run_as(cluster, ANN, *command)
    aside = cluster.base / "theirs"  # as squatted: the directory is another user's than the server
    os.rename(cluster.base / "run", aside)
    os.symlink(aside, cluster.base / "run")
    try:
        assert "JOBID" in run_as(cluster, ANN, "hqueue")  # root made the link
        os.chown(aside, pwd.getpwnam(BOB).pw_uid, 0)
        for command in (["hqueue"], [str(cluster.bin_dir / "hpcsched-command"), "hqueue"]):
            assert "neither root nor you" in run_as(cluster, ANN, *command, check=False)
    finally:
        os.chown(aside, pwd.getpwnam(SERVICE).pw_uid, pwd.getpwnam(SERVICE).pw_gid)
        os.unlink(cluster.base / "run")
        os.rename(aside, cluster.base / "run")


def test_a11_a_directory_in_one_that_others_may_write_is_not_trusted(cluster: ForAll, tmp_path: Path) -> None:
    account = pwd.getpwnam(SERVICE)
    with tempfile.TemporaryDirectory(prefix="hpc", dir="/tmp") as directory:
        Path(directory).chmod(0o1777)
        folder = Path(directory) / "run"
        folder.mkdir(mode=0o755)
        os.chown(folder, account.pw_uid, account.pw_gid)
        assert not is_made_by(str(folder / "api.sock"), account.pw_uid)
        Path(directory).chmod(0o755)
        assert is_made_by(str(folder / "api.sock"), account.pw_uid)
        assert not is_made_by(str(folder / "api.sock"), account.pw_uid + 1)


def test_root_and_the_account_are_admins_and_others_are_not(cluster: ForAll) -> None:
    cluster.run("hctl", "drain", "n2", "test")
    run_as(cluster, SERVICE, "hctl", "resume", "n2")
    assert "needs the role" in run_as(cluster, ANN, "hctl", "drain", "n2", "test", check=False)
    assert cluster.run("hhealth", check=False).stdout
    cluster.run("hctl", "reconfigure")


def test_triggers_are_refused_but_for_the_account(cluster: ForAll) -> None:
    body = {"event": "down", "target": "", "offset_s": 0, "program": ["/bin/true"], "permanent": False}
    with pytest.raises(errors.PermissionDeniedError, match=f"the controller runs as {SERVICE}, not as root"):
        cluster.api("POST", "/v1/triggers/set", body)


def test_a_user_s_crontab_makes_jobs_of_that_user(cluster: ForAll) -> None:
    slurm = cluster.run("hpcsched", "slurm-path").stdout.strip()
    run_as(cluster, ANN, f"{slurm}/scrontab", "-", stdin="* * * * * id -un\n")
    assert "id -un" in run_as(cluster, ANN, f"{slurm}/scrontab", "-l")
    job_id = cluster.api("GET", f"/v1/crontab?user={ANN}")["entries"][0]["job_id"]
    assert cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["user"] == ANN
    run_as(cluster, ANN, f"{slurm}/scrontab", "-r")


def test_root_backs_up_and_restores_and_the_account_can_go_on(cluster: ForAll) -> None:
    job_id = submit(cluster, ANN, "true")
    ended(cluster, job_id)
    backups = cluster.base / "backups"
    backups.mkdir(mode=0o700)
    cluster.run("hctl", "backup", str(backups))
    cluster.down()
    shutil.rmtree(cluster.config_dir / "state")
    cluster.run("hpcsched", "restore", "--force", str(backups))
    state = cluster.config_dir / "state"
    uid = pwd.getpwnam(SERVICE).pw_uid
    assert {path.stat().st_uid for path in (state, *state.iterdir())} == {uid}
    cluster.up()
    cluster.wait_for_nodes()
    assert cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["state"] == "COMPLETED"
    again = submit(cluster, ANN, "true")
    assert ended(cluster, again)["state"] == "COMPLETED"


def test_the_log_is_not_followed_out_of_the_account_s_directory(cluster: ForAll) -> None:
    cluster.down()
    log, secret = cluster.config_dir / "state" / "hpcschedd.log", cluster.base / "of-root"
    secret.write_text("root's\n")
    secret.chmod(0o600)
    log.unlink()
    os.symlink(secret, log)
    try:
        assert "cannot write its log" in cluster.run("hpcsched", "up", check=False).stderr
        assert secret.read_text() == "root's\n"
    finally:
        log.unlink()
        cluster.up()
        cluster.wait_for_nodes()


def test_a_controller_with_another_account_does_not_start(cluster: ForAll) -> None:
    command = [str(cluster.bin_dir / "python"), "-P", "-m", "hpcsched.controller", "--config", str(cluster.config_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env=cluster.env, cwd="/")
    assert done.returncode == 1
    assert f"cannot start hpcschedd as uid 0: user = '{SERVICE}' in [controller]" in done.stderr


def test_a_node_on_the_head_without_ssh_is_refused(cluster: ForAll) -> None:
    file = cluster.config_dir / "nodes.d" / "own.toml"
    file.write_text('host = "local"\ncpus = 1\nmemory = "1G"\n')
    try:
        done = cluster.run("hctl", "reconfigure", check=False)
        assert "jobs of all users would run there as daemon" in " ".join(done.stderr.split())
    finally:
        file.unlink()


def test_init_gives_the_account_what_it_needs_and_the_rest_to_root(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        env = {**os.environ, "HPCSCHED_CONFIG": str(base / "etc"), "PYTHONSAFEPATH": "1"}
        hpcsched = str(Path(sys.executable).parent / "hpcsched")
        done = subprocess.run([hpcsched, "init", "--user", SERVICE], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert f"it runs as {SERVICE}" in done.stdout
        uid = pwd.getpwnam(SERVICE).pw_uid
        owners = {path.name: path.stat().st_uid for path in (base / "etc").iterdir()}
        assert owners == {
            "hpcsched.toml": 0,
            "nodes.d": 0,
            "cluster-id": 0,
            "id_ed25519.pub": 0,
            "id_ed25519": uid,
            "seal.key": uid,
            "state": uid,
        }
        assert (base / "etc" / "id_ed25519").stat().st_mode & 0o777 == 0o600
        assert all(path.stat().st_uid == uid for path in (base / "etc" / "state").iterdir())
        refused = subprocess.run([hpcsched, "init", "--user", "nosuchuser"], capture_output=True, text=True,
                                 env=env | {"HPCSCHED_CONFIG": str(base / "other")})  # fmt: skip
        assert "this machine has no such account; make it: useradd" in refused.stderr
