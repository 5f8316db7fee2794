"""Nodes whose agent is a plain account: jobs run as their users by the root helper, if the users have signed them."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_user import installation
from test_mpi import HELLO, mpi_bins
from test_service_account import ForAll, ended, run_as
from waiting import wait_until

import hpcnode
from hpcnode.wire import protocol
from hpcsched.config.load import load_config
from hpcsched.launch import dial_for
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.link import ControllerIdentity
from hpcsched.launch.visit import asking
from hpcsched.loopback.cluster import LoopbackNodes, start_nodes
from hpcsched.model.ids import LaunchToken

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can start the helper")

HEAD, AGENT, ANN, BOB = "bin", "daemon", "games", "www-data"  # accounts that every Debian has
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
NODE_JSON = Path("/etc/hpcsched/node.json")
RULES = """
[accounts.lab]
users = ["*"]
qos = ["night", "urgent"]
[qos.night]
preempt_mode = "requeue"
[qos.urgent]
preempt = ["night"]
"""
PLACES = ("/etc/hpcsched", "/run/hpcsched-helper", "/var/lib/hpcsched-helper")


class Helped(ForAll):
    """A cluster whose nodes let the controller in to a plain account."""

    def start_machines(self) -> LoopbackNodes:
        self.machines = start_nodes(self.base / "nodes", self._names, server="embedded", user=AGENT)
        return self.machines


@pytest.fixture(scope="module")
def places() -> Iterator[None]:
    """Give this process, and what it starts, directories of the system of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        pytest.skip("NOT TESTED: no mount namespace here")
    made = [place for place in PLACES if not os.path.isdir(place)]
    for place in PLACES:
        os.makedirs(place, exist_ok=True)
        assert libc.mount(b"none", place.encode(), b"tmpfs", 0, b"mode=755") == 0
    yield
    for place in PLACES:
        libc.umount2(place.encode(), 2)
    for place in made:
        os.rmdir(place)


@pytest.fixture(scope="module")
def cluster(places: None) -> Iterator[Helped]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        settings = {"controller": {"run_dir": str(base / "run"), "kill_wait_s": 1, "user": HEAD, "requeue_delay_s": 0,
                                   "sign_jobs": True}, "scheduler": {"preempt_type": "qos"}}  # fmt: skip
        made = Helped(base, names=("n1", "n2"), settings=settings)
        made.bin_dir = installation(base / "env")
        policy = {
            "agent": AGENT,
            "min_uid": 1,
            "users": [ANN, BOB],
            "cluster": "demo",
            "path": [str(node_commands(base))],
            "environment": mpi_variables(base / "tools" / "hrsh"),
        }
        NODE_JSON.write_text(json.dumps(policy))
        Path("/etc/hpcsched/users").mkdir()
        installed = base / "helper.py"
        shutil.copyfile(Path(hpcnode.__file__).with_name("helper.py"), installed)
        with open(base / "helper.log", "wb") as log:
            helper = subprocess.Popen(["/usr/bin/python3", "-I", "-S", installed], stdout=log, stderr=log)
        try:
            wait_until(lambda: os.path.exists("/run/hpcsched-helper/helper.sock"), what="the helper")
            with made as started:
                started.share.chmod(0o1777)
                path = started.config_dir / "hpcsched.toml"
                path.write_text(path.read_text() + RULES)
                started.run("hctl", "reconfigure")
                yield started
        finally:
            helper.kill()
            helper.wait()


def node_commands(base: Path) -> Path:
    """Return a folder with the step commands, as an admin makes it on each node."""
    folder, program = base / "tools", base / "hpcnode.pyz"
    folder.mkdir()
    program.write_bytes(build_bundle().data)
    for name in ("hrun", "hrsh", "hpty"):
        (folder / name).write_text(f'#!/bin/sh\nexec /usr/bin/python3 {program} {name} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def mpi_variables(hrsh: Path) -> dict[str, str]:
    """Return the variables of the man page, and those of nodes that are one machine."""
    hydra = {"HYDRA_RMK": "slurm", "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(hrsh)}
    prrte = {"PRTE_MCA_plm": "ssh", "PRTE_MCA_plm_ssh_agent": str(hrsh)}
    same_machine = {"HPCSCHED_MPI_NAME_DAEMONS": "1", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    return {**hydra, **prrte, **same_machine, "OMPI_MCA_btl": "^ofi,uct,openib", "OMPI_MCA_pml": "ob1", "WORD": "node"}


def let_in(cluster: Helped, user: str) -> None:
    """Install the user's public key, as an admin does on each node."""
    line = run_as(cluster, user, "hpcsched", "key", "--user")
    Path(f"/etc/hpcsched/users/{user}.pub").write_text(line)


def submit(cluster: Helped, user: str, script: str, *options: str) -> int:
    return int(run_as(cluster, user, "hsub", "--parsable", *options, stdin="#!/bin/bash\n" + script))


def test_a_signed_job_runs_as_its_user(cluster: Helped) -> None:
    let_in(cluster, ANN)
    job_id = submit(
        cluster, ANN, "id -un; grep -E 'NoNewPrivs|CapEff|Groups' /proc/self/status; echo $SLURM_JOB_ID; exit 3"
    )
    job = ended(cluster, job_id)
    assert (job["state"], job["exit_code"]) == ("FAILED", 3), job["reason_detail"]
    output = cluster.share / ANN / f"slurm-{job_id}.out"
    assert output.stat().st_uid == pwd.getpwnam(ANN).pw_uid
    lines = output.read_text().split()
    assert lines[0] == ANN
    assert lines[-1] == str(job_id)
    assert int(lines[lines.index("CapEff:") + 1], 16) == 0
    assert lines[lines.index("NoNewPrivs:") + 1] == "1"


def test_a_cancelled_job_leaves_nothing(cluster: Helped) -> None:
    let_in(cluster, ANN)
    script = "setsid sh -c 'trap \"\" TERM; exec sleep 7654321' & trap '' TERM; sleep 7654321"
    job_id = submit(cluster, ANN, script)

    def left() -> int:
        return subprocess.run(["pgrep", "-fc", "^sleep 7654321"], capture_output=True).stdout.strip() not in (b"", b"0")

    wait_until(left, what="the job's processes")
    run_as(cluster, ANN, "hcancel", str(job_id))
    assert ended(cluster, job_id)["state"] == "CANCELLED"
    wait_until(lambda: not left(), what="the end of all processes")


def test_an_unsigned_job_of_another_entrance_is_refused_in_words(cluster: Helped) -> None:
    body = {"request_id": "", "jobs": [{"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp"}]}
    with pytest.raises(Exception, match="signed by their users .* use hsub or sbatch on the head"):
        cluster.api("POST", "/v1/submit", body)


def test_d8_a_user_whose_key_is_not_there_runs_nothing(cluster: Helped) -> None:
    job_id = submit(cluster, BOB, "echo it ran > bob.txt")
    job = wait_until(lambda: refused(cluster, job_id), what="the refusal")
    assert "the root helper of this node refused" in job
    assert "No such file or directory: '/etc/hpcsched/users/www-data.pub'" in job
    assert not (cluster.share / BOB / "bob.txt").exists()


def refused(cluster: Helped, job_id: int) -> Any:
    found = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]
    return found["reason_detail"] if found["state"] in ("FAILED", "PENDING") and found["reason_detail"] else None


def test_a_waiting_job_is_signed_again_and_runs(cluster: Helped) -> None:
    let_in(cluster, ANN)
    job_id = submit(cluster, ANN, "id -un", "--hold", "--output=again", "--job-name=later")
    before = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]
    said = run_as(cluster, ANN, "hctl", "sign", str(job_id))
    assert said.startswith(f"signed job {job_id} until ")
    assert f": 'later' in {cluster.share / ANN}, signed first on " in said
    after = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]
    assert {**after, "signed": 0, "spec_id": 0} == {**before, "signed": 0, "spec_id": 0}
    run_as(cluster, ANN, "hctl", "release", str(job_id))
    assert ended(cluster, job_id)["state"] == "COMPLETED"
    assert (cluster.share / ANN / "again").read_text() == f"{ANN}\n"
    assert "signed again by games" in run_as(cluster, ANN, "hctl", "story", str(job_id))
    assert "it does not wait" in run_as(cluster, ANN, "hctl", "sign", str(job_id), check=False)


def test_a8_only_what_the_users_key_has_signed_is_signed_again(cluster: Helped) -> None:
    let_in(cluster, ANN)
    job_id = submit(cluster, ANN, "true", "--hold")
    said = run_as(cluster, BOB, "hctl", "sign", str(job_id), check=False)
    assert "is not yours" in said
    key = cluster.share / ANN / ".config" / "hpcsched" / "signing_key"
    key.rename(key.with_name("old"))
    assert "your key did not sign what the controller sent" in run_as(
        cluster, ANN, "hctl", "sign", str(job_id), check=False
    )
    key.with_name("old").rename(key)
    run_as(cluster, ANN, "hcancel", str(job_id))


def test_a_change_that_was_not_signed_is_refused(cluster: Helped) -> None:
    let_in(cluster, ANN)
    job_id = submit(cluster, ANN, "true", "--hold")
    said = run_as(cluster, ANN, "hctl", "update", str(job_id), "work_dir=/tmp", check=False)
    assert "it differs from what its user has signed in its directory" in said
    run_as(cluster, ANN, "hctl", "update", str(job_id), "name=other", "time_limit=10")
    run_as(cluster, ANN, "hcancel", str(job_id))


def test_commands_on_the_head_sign_each_step(cluster: Helped) -> None:
    let_in(cluster, ANN)
    assert run_as(cluster, ANN, "hrun", "-n2", "-N2", "id", "-un") == f"{ANN}\n{ANN}\n"
    said = run_as(
        cluster, ANN, "halloc", "-N2", "sh", "-c", "hrun -n2 -N2 id -un; hrun -n1 -N1 --output=of-step echo done"
    )
    assert said.split()[-2:] == [ANN] * 2
    assert (cluster.share / ANN / "of-step").read_text() == "done\n"
    assert run_as(cluster, ANN, "hrun", "-n1", "--pty", "id", "-un").strip() == ANN


@pytest.mark.parametrize("option", ["--task-prolog=/bin/true", "--task-epilog=/bin/true", "--wait-for-children"])
def test_what_the_helper_does_not_do_is_refused_at_once(cluster: Helped, option: str) -> None:
    said = run_as(cluster, ANN, "hrun", "-n1", option, "id", check=False)
    assert f"cannot start the step with {option.partition('=')[0]}: the root helpers of this cluster's nodes" in said


def test_a_requeued_job_runs_as_its_next_attempt(cluster: Helped) -> None:
    let_in(cluster, ANN)
    script = "echo attempt ${SLURM_RESTART_COUNT:-0}; [ ${SLURM_RESTART_COUNT:-0} = 0 ] && exec sleep 1000; true"
    job_id = submit(cluster, ANN, script, "--requeue", "--output=again-%j", "--open-mode=append")
    output = cluster.share / ANN / f"again-{job_id}"
    wait_until(lambda: output.exists() and output.read_text() == "attempt 0\n", what="the first attempt")
    run_as(cluster, ANN, "hctl", "requeue", str(job_id))
    assert ended(cluster, job_id)["state"] == "COMPLETED"
    assert output.read_text() == "attempt 0\nattempt 1\n"


def test_a_job_makes_room_for_another_users_and_comes_back(cluster: Helped) -> None:
    let_in(cluster, ANN)
    let_in(cluster, BOB)
    script = (
        "echo attempt ${SLURM_RESTART_COUNT:-0}; hrun -N2 -n2 id -un; [ ${SLURM_RESTART_COUNT:-0} = 1 ] || sleep 1000"
    )
    low = submit(cluster, ANN, script, "-N2", "--exclusive", "--qos=night", "--output=room", "--open-mode=append")
    output = cluster.share / ANN / "room"
    wait_until(lambda: output.exists() and output.read_text().count(ANN) == 2, what="the steps of the first attempt")
    high = submit(cluster, BOB, "id -un", "-N2", "--exclusive", "--qos=urgent", "--output=urgent")
    assert ended(cluster, high)["state"] == "COMPLETED"
    assert (cluster.share / BOB / "urgent").read_text() == f"{BOB}\n"
    assert ended(cluster, low)["state"] == "COMPLETED"
    assert output.read_text().split() == ["attempt", "0", ANN, ANN, "attempt", "1", ANN, ANN]


def test_steps_run_beside_the_script_and_on_the_other_nodes(cluster: Helped) -> None:
    let_in(cluster, ANN)
    job_id = submit(cluster, ANN, "hrun -N2 -n2 id -un; hrun -n1 -N1 sh -c 'echo one; exit 4'; echo $?", "-N2")
    assert ended(cluster, job_id)["state"] == "COMPLETED"
    words = (cluster.share / ANN / f"slurm-{job_id}.out").read_text().split()
    assert words[:3] == [ANN, ANN, "one"]
    assert words[-1] == "4"


@pytest.mark.parametrize("mpi_bin", mpi_bins())
def test_mpirun_uses_all_nodes_and_slots_of_a_signed_job(cluster: Helped, mpi_bin: str) -> None:
    let_in(cluster, ANN)
    (cluster.share / "hello.py").write_text(HELLO)
    prefix = Path(mpi_bin).parent
    packages = next(prefix.glob("lib/python*/site-packages"))
    script = f"export PATH={mpi_bin}:$PATH LD_LIBRARY_PATH={prefix}/lib PYTHONPATH={packages}\n"
    script += f"echo $WORD\nmpirun {cluster.bin_dir}/python {cluster.share}/hello.py"
    job_id = submit(cluster, ANN, script, "-N2", "--ntasks-per-node=2", "--export=ALL,WORD=own")
    state = ended(cluster, job_id)["state"]
    said = (cluster.share / ANN / f"slurm-{job_id}.out").read_text()
    assert state == "COMPLETED", said
    lines = sorted(line.split(" on ")[0] for line in said.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4" for rank in range(4)]
    assert said.startswith("own\n"), "what the user has set stays"


def test_an_array_and_a_job_without_an_environment_are_signed_too(cluster: Helped) -> None:
    let_in(cluster, ANN)
    job_id = submit(cluster, ANN, "echo task $SLURM_ARRAY_TASK_ID", "--array=1-3", "--output=array-%a")
    bare = submit(cluster, ANN, "echo $PATH", "--export=NONE", "--output=bare")
    wait_until(lambda: (cluster.share / ANN / "bare").exists(), what="the job without an environment")
    for task in (1, 2, 3):
        path = cluster.share / ANN / f"array-{task}"
        wait_until(lambda path=path: path.exists() and path.read_text(), what=f"task {task} of job {job_id}")
        assert path.read_text() == f"task {task}\n"
    assert ended(cluster, bare)["state"] == "COMPLETED"


def test_d8_who_has_the_controllers_key_runs_nothing_as_root_or_a_stranger(cluster: Helped) -> None:
    """Runs last: the node takes the thief for a newer controller."""
    let_in(cluster, ANN)
    cluster.down()
    config = load_config(cluster.config_dir)
    spec = config.nodes[0]
    identity = ControllerIdentity(cluster=config.name, incarnation="f" * 16, epoch=10**6)
    work = cluster.base / "stolen"
    work.mkdir(mode=0o777)
    work.chmod(0o1777)
    with asking(
        spec, dial=dial_for(spec, config), bundle=build_bundle(), identity=identity, timeout_s=60, visit=False
    ) as ask:
        for number, user in enumerate(("root", BOB, ANN, "nobody", HEAD), 1):
            token = LaunchToken.parse(f"ffffffffffffffff.{number}.0.batch.{spec.name}.{number:032x}")
            launch = protocol.Launch(
                token=str(token), job_id=number, attempt=0, step="batch", epoch=10**6, user=user, work_dir=str(work), argv=[],
                env={"PATH": "/usr/bin:/bin"}, cpus=1, mem_mib=1, gpus=[], allow_uid_below=0,
                tasks=protocol.TaskSet(first_rank=0, count=1, total=1, node_rank=0, nnodes=1),
            )  # fmt: skip
            ask._pipe.send_all(protocol.encode(launch, f"#!/bin/sh\nid > {work}/{user}\n".encode()))
            report, _ = ask(protocol.Ping(number), protocol.Report)
            while report.token != str(token) or report.status not in (protocol.REFUSED, protocol.ENDED):
                report, _ = ask(protocol.Ping(number), protocol.Report)
            assert report.status == protocol.REFUSED
            assert "the root helper of this node refused" in report.why
    assert list(work.iterdir()) == []
