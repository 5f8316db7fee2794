"""A cluster goes back to a backup while its nodes still run what was launched since."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from killable import KillableCluster
from waiting import wait_until


@pytest.fixture
def cluster() -> Iterator[KillableCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        server = "sshd" if os.environ.get("CI") == "true" else "auto"
        with KillableCluster(Path(directory), names=("n1", "n2"), server=server) as cluster:
            yield cluster


def test_g8_a_restored_cluster_ends_strays_and_gives_no_number_twice(cluster: KillableCluster) -> None:
    backup = cluster.base / "backup"
    gate = f"while [ ! -e {cluster.share}/gate ]; do sleep 0.05; done\n"
    (running,) = cluster.submit(cluster.spec(gate))
    (held,) = cluster.submit(cluster.one_task(0, hold=True))
    wait_until(lambda: cluster.ran()[(running, 0)], what="the job to run")
    wait_until(lambda: cluster.job(running)["state"] == "RUNNING", what="the controller to know it")
    said = cluster.run("hctl", "backup", "backup", cwd=cluster.base).stdout
    assert str(backup) in said
    again = cluster.run("hctl", "backup", str(backup), check=False)
    assert (again.returncode, "there already" in again.stderr) == (1, True)
    (later,) = cluster.submit(cluster.spec(gate))
    wait_until(lambda: cluster.ran()[(later, 0)], what="the later job to run")
    refused = cluster.run("hpcsched", "restore", str(backup), check=False)
    assert "holds" in refused.stderr
    cluster.kill_controller()
    refused = cluster.run("hpcsched", "restore", str(backup), check=False)
    assert "--force sets it aside" in refused.stderr
    cluster.run("hpcsched", "restore", "--force", "--strays=end", str(backup))
    cluster.up()
    cluster.wait_for_nodes()
    wait_until(lambda: cluster.ran()[(running, 1)], what="the job of the backup to run again")
    assert "restored from a backup" in cluster.run("hctl", "story", str(running)).stdout
    assert "not ours: ending it" in cluster.log_tail()
    assert cluster.run("hqueue", "-j", str(later), check=False).returncode == 1
    (new,) = cluster.submit(cluster.one_task(0))
    assert new > later
    cluster.ask("/v1/release", {"jobs": [str(held)]})
    (cluster.share / "gate").touch()
    wait_until(cluster.all_ended, what="all jobs to end")
    assert cluster.ran() == {(running, 0): 1, (later, 0): 1, (running, 1): 1, (new, 0): 1, (held, 0): 1}
    wait_until(lambda: not cluster.leftovers(), what="the nodes to be empty")


def test_g8_a_restore_that_asks_adopts_a_stray_once(cluster: KillableCluster) -> None:
    backup = cluster.base / "backup"
    gate = f"while [ ! -e {cluster.share}/gate ]; do sleep 0.05; done\n"
    (running,) = cluster.submit(cluster.spec(gate))
    wait_until(lambda: cluster.job(running)["state"] == "RUNNING", what="the job to run")
    cluster.run("hctl", "backup", str(backup))
    (later,) = cluster.submit(cluster.spec(gate))
    wait_until(lambda: cluster.ran()[(later, 0)], what="the later job to run")
    cluster.kill_controller()
    assert "hctl strays" in cluster.run("hpcsched", "restore", "--force", "--strays=ask", str(backup)).stdout
    cluster.up()
    cluster.wait_for_nodes()
    told = cluster.run("hctl", "strays").stdout.splitlines()
    assert len(told) == 2
    mine = next(line for line in told if f"job {running} (" in line)
    other = next(line for line in told if line.endswith("not known"))
    refused = cluster.run("hctl", "strays", "adopt", other.split()[0], check=False)
    assert (refused.returncode, "does not know this launch" in refused.stderr) == (1, True)
    adopted = cluster.run("hctl", "strays", "adopt", mine.split()[0]).stdout
    assert adopted == f"adopted: {running}; still to decide about: 1\n"
    cluster.run("hctl", "strays", "end", other.split()[0])
    wait_until(lambda: "No stray jobs" in cluster.run("hctl", "strays").stdout, what="the other to be gone")
    (cluster.share / "gate").touch()
    wait_until(lambda: cluster.job(running)["state"] == "COMPLETED", what="the adopted job to end")
    assert cluster.ran() == {(running, 0): 1, (later, 0): 1}
    assert "adopted by " in cluster.run("hctl", "story", str(running)).stdout
    wait_until(lambda: not cluster.leftovers(), what="the nodes to be empty")


def test_a_new_head_adopts_what_the_backup_of_the_lost_one_knows(cluster: KillableCluster) -> None:
    gate = f"while [ ! -e {cluster.share}/gate ]; do sleep 0.05; done\n"
    (running,) = cluster.submit(cluster.spec(gate))
    (held,) = cluster.submit(cluster.one_task(0, hold=True))
    wait_until(lambda: cluster.job(running)["state"] == "RUNNING", what="the job to run")
    backups = cluster.base / "backups"
    backups.mkdir()
    said: list[str] = []

    def backed_up() -> bool:  # two of one second would have one name: the second is refused
        done = cluster.run("hctl", "backup", str(backups), "keep=2", check=False)
        said.append(done.stdout)
        return done.returncode == 0

    for _ in range(3):
        wait_until(backed_up, what="a backup")
    assert len(list(backups.iterdir())) == 2
    (later,) = cluster.submit(cluster.spec(gate))
    wait_until(lambda: cluster.ran()[(later, 0)], what="the later job to run")
    refused = cluster.run("hpcsched", "restore", str(backups), check=False)
    assert "--force sets it aside" in refused.stderr
    refused = cluster.run("hpcsched", "restore", "--force", str(backups), check=False)
    assert "holds" in refused.stderr
    drill = cluster.run("hpcsched", "restore", "--drill", str(backups)).stdout
    assert "2 jobs, 2 of them unfinished, all read; 2 nodes" in drill
    assert "jobs submitted since, which a restore would lose: 1\n" in drill
    assert " runs, this is hpcsched " in cluster.run("hpcsched", "upgrade", "--check").stdout
    cluster.kill_controller()
    before = {path.name: path.read_bytes() for path in (cluster.config_dir / "nodes.d").iterdir()}
    cluster.config_dir.rename(cluster.base / "lost")  # with the recorder's files, which it may be closing yet

    cluster.config_dir = cluster.base / "fresh"
    made = max(backups.iterdir())
    assert str(made) in said[-1]
    modes = [oct(path.stat().st_mode & 0o777) for path in (made, made / "hpcsched.db", made / "etc")]
    assert modes == ["0o700", "0o600", "0o700"]
    damaged = cluster.base / "damaged"
    shutil.copytree(made, damaged)
    (damaged / "etc/hpcsched.toml").write_text("")
    refused = cluster.run("hpcsched", "restore", str(damaged), check=False)
    assert "checksum" in refused.stderr
    assert not cluster.config_dir.exists()
    assert "hpcsched up" in cluster.run("hpcsched", "restore", str(backups)).stdout
    assert {path.name: path.read_bytes() for path in (cluster.config_dir / "nodes.d").iterdir()} == before
    cluster.up()
    cluster.wait_for_nodes()
    wait_until(lambda: f".{later}.0.batch" in cluster.run("hctl", "strays").stdout, what="the rest to be asked about")
    wait_until(
        lambda: "adopted after the database was restored" in cluster.run("hctl", "story", str(running)).stdout,
        what="the job of the backup to be adopted",
    )
    assert len(cluster.run("hctl", "strays").stdout.splitlines()) == 1
    assert cluster.job(running)["state"] == "RUNNING"
    cluster.ask("/v1/release", {"jobs": [str(held)]})
    (cluster.share / "gate").touch()
    wait_until(lambda: cluster.job(running)["state"] == "COMPLETED", what="the adopted job to end")
    wait_until(cluster.all_ended, what="all jobs to end")
    assert cluster.ran() == {(running, 0): 1, (later, 0): 1, (held, 0): 1}
    wait_until(lambda: not cluster.leftovers(), what="the nodes to be empty")
