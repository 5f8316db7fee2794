"""Plain `mpirun prog` over an allocation, with every MPI at hand and a stand-in for hrsh that runs commands here.

MPIs: the one beside the running Python, and those in HPCSCHED_TEST_MPI_BIN (directories, os.pathsep between them).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

from hpcnode.shepherd import mpi

HRSH = """#!{python} -S
import os, sys
sys.path.insert(0, {package!r})
from hpcnode.shepherd.mpi import daemon_command

words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
node, command = words[0], " ".join(words[1:])
with open({log!r}, "a") as log:
    print(node, file=log)
command, more = daemon_command(command, node, os.environ)
env = dict(os.environ, **more)
start = ["/bin/sh", "-c", command]
if env.get("TEST_OWN_HOSTNAME"):
    start = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec sh -c "$1"', node, command]
os.execvpe(start[0], start, env)
"""

ALLREDUCE = """
from mpi4py import MPI
import numpy as np
world = MPI.COMM_WORLD
for count in (1024, 1024 * 1024):
    got = np.empty(count, "f4")
    world.Allreduce(np.full(count, world.rank + 1, "f4"), got)
    assert (got == world.size * (world.size + 1) / 2).all()
world.Barrier()
if world.rank == 0:
    print("size", world.size, flush=True)
"""


RANK = "$(( ${OMPI_COMM_WORLD_RANK:-0} + ${PMI_RANK:-0} ))"


def when_all_are_up(state: Path, ranks: int, then: str) -> tuple[str, ...]:
    """Return a command whose ranks wait for each other: PRRTE 3 may hang when one ends while others still start."""
    meet = f"touch {state}/up.{RANK}; while [ $(ls {state} | grep -c ^up) -lt {ranks} ]; do sleep 0.05; done; "
    return ("sh", "-c", meet + then)


def said(output: str) -> list[str]:
    """Return the ranks' lines, without PRRTE's warning of a harmless race."""
    return [line for line in output.splitlines() if "setpgid(" not in line]


def mpi_bins() -> list[str]:
    listed = os.environ.get("HPCSCHED_TEST_MPI_BIN", "").split(os.pathsep)
    bins = [str(Path(sys.executable).parent), *filter(None, listed)]
    return [path for path in dict.fromkeys(bins) if shutil.which("mpirun", path=path)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job's environment on the first node of a make-believe allocation."""

    bin: str
    state: Path
    env: dict[str, str]
    prefix: tuple[str, ...]

    def popen(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.prefix, *command], env=self.env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        process = self.popen(*command)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            self.kill_left()
        return process.returncode, output

    def left(self) -> list[int]:
        mark = f"TEST_MARK={self.env['TEST_MARK']}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in _environ(pid)]

    def kill_left(self) -> None:
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def open_mpi(self) -> bool:
        return "Open MPI" in self.run("mpirun", "--version")[1]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def slurm_variables(slots: list[int]) -> dict[str, str]:
    nodes = f"n[1-{len(slots)}]"
    return {
        "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NODELIST": nodes, "SLURM_JOB_NODELIST": nodes,
        "SLURM_NNODES": str(len(slots)), "SLURM_JOB_NUM_NODES": str(len(slots)), "SLURM_NTASKS": "99",
        "SLURM_TASKS_PER_NODE": ",".join(map(str, slots)), "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1",
    }  # fmt: skip


def make_job(bin_dir: str, state: Path, slots: list[int], *, own_hostname: bool = False) -> Job:
    """Set up an allocation of nodes n1, n2 ... that are all this machine."""
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    hrsh = state / "hrsh"
    package = str(Path(mpi.__file__).parents[2])
    hrsh.write_text(HRSH.format(python=python, package=package, log=str(state / "log")))
    hrsh.chmod(0o755)
    (state / "log").touch()
    (state / "log").chmod(0o666)
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin", "HOME": str(state), "TEST_MARK": state.name}
    env.update(slurm_variables(slots))
    hosts = [(f"n{number}", count) for number, count in enumerate(slots, 1)]
    env.update(
        mpi.mpi_environment(
            hosts=hosts, hrsh=str(hrsh), state_dir=str(state), same_machine=True, as_root=os.getuid() == 0
        )
    )
    prefix: tuple[str, ...] = ()
    if own_hostname:
        env["TEST_OWN_HOSTNAME"] = "1"
        first = state / "hosts.hydra"
        first.write_text(first.read_text().replace(f"{socket.gethostname()}:", "n1:", 1))
        prefix = ("unshare", "-u", "sh", "-c", 'hostname n1 && exec "$@"', "sh")
    return Job(bin=bin_dir, state=state, env=env, prefix=prefix)


def reachable_by_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in [path, *path.parents])


@pytest.fixture
def state() -> Iterator[Path]:
    # Not tmp_path: another user must be able to read it, and the launchers split long or odd paths.
    path = Path(tempfile.mkdtemp(prefix="mpienv"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=mpi_bins() or [None])
def bin_dir(request: pytest.FixtureRequest) -> str:
    if request.param is None:
        pytest.skip("no mpirun beside this Python nor in HPCSCHED_TEST_MPI_BIN")
    return str(request.param)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.root)], ids=["one-hostname", "own-hostnames"])
def own_hostname(request: pytest.FixtureRequest) -> bool:
    if request.param and os.getuid() != 0:
        pytest.skip("a hostname of its own needs root")
    return bool(request.param)


def test_ranks_fill_every_node(bin_dir: str, state: Path, own_hostname: bool) -> None:
    job = make_job(bin_dir, state, [2, 2, 1], own_hostname=own_hostname)
    status, output = job.run("mpirun", *when_all_are_up(state, 5, "echo on ${PMIX_HOSTNAME:-$PMI_HOSTNAME}"))
    assert status == 0, output
    first = "n1" if own_hostname else socket.gethostname()
    on = Counter(line.split()[1] for line in output.splitlines() if line.startswith("on "))
    if job.open_mpi() and not mpi._has_network():
        assert on == {first: 5}
    else:
        assert on == {first: 2, "n2": 2, "n3": 1}


def test_allreduce_across_nodes(bin_dir: str, state: Path, own_hostname: bool) -> None:
    python = Path(bin_dir) / "python3"
    if subprocess.run([python, "-c", "import mpi4py, numpy"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip(f"{python} has no mpi4py and numpy")
    job = make_job(bin_dir, state, [1, 1], own_hostname=own_hostname)
    status, output = job.run("mpirun", str(python), "-c", ALLREDUCE)
    assert (status, said(output)) == (0, ["size 2"])


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_ranks_than_slots(bin_dir: str, state: Path, count: int) -> None:
    job = make_job(bin_dir, state, [2, 2])
    status, output = job.run("mpirun", "-n", str(count), *when_all_are_up(state, count, "echo here"))
    assert (status, said(output)) == (0, ["here"] * count)


def test_more_slots_than_cores(bin_dir: str, state: Path) -> None:
    slots = (os.cpu_count() or 1) + 1
    job = make_job(bin_dir, state, [slots])
    status, output = job.run("mpirun", *when_all_are_up(state, slots, "echo here"))
    assert (status, said(output)) == (0, ["here"] * slots)


def test_exit_code_is_the_ranks(bin_dir: str, state: Path) -> None:
    assert make_job(bin_dir, state, [1, 1]).run("mpirun", *when_all_are_up(state, 2, "exit 7"))[0] == 7


def test_killed_rank_ends_the_run(bin_dir: str, state: Path) -> None:
    job = make_job(bin_dir, state, [1, 1])
    status, _ = job.run("mpirun", *when_all_are_up(state, 2, f"[ {RANK} = 1 ] && kill -9 $$; exec sleep 60"))
    assert status != 0


def test_sigterm_ends_daemons_and_ranks(bin_dir: str, state: Path) -> None:
    job = make_job(bin_dir, state, [1, 1, 1])
    process = job.popen("mpirun", "sh", "-c", f"touch {state}/up.{RANK}; exec sleep 60")
    try:
        wait_until(lambda: len(list(state.glob("up.*"))) == 3, what="three ranks")
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
        wait_until(lambda: not job.left(), what="the end of all processes")
    finally:
        job.kill_left()
    assert process.returncode != 0


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_as_a_plain_user(bin_dir: str, state: Path) -> None:
    if not reachable_by_all(Path(bin_dir)) or not reachable_by_all(Path(mpi.__file__).parent):
        pytest.skip(f"uid 65534 cannot reach {bin_dir}")
    state.chmod(0o777)
    job = make_job(bin_dir, state, [1, 1])
    allowed = [name for name in job.env if "ALLOW_RUN_AS_ROOT" in name]
    for name in allowed:
        del job.env[name]
    become = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    status, output = job.run(*become, "mpirun", *when_all_are_up(state, 2, "echo uid $(id -u)"))
    assert (status, output.count("uid 65534")) == (0, 2), output


def environment(state: Path, **changes: object) -> dict[str, str]:
    arguments: dict[str, object] = {
        "hosts": [("n1", 2), ("n2", 1)], "hrsh": "/opt/hrsh", "state_dir": str(state),
        "same_machine": False, "as_root": False,
    }  # fmt: skip
    return mpi.mpi_environment(**{**arguments, **changes})  # type: ignore[arg-type]


def test_real_hosts_get_no_setting_for_one_machine(state: Path) -> None:
    variables = environment(state)
    assert not {"OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_pml", "OMPI_MCA_btl", mpi.NAME_DAEMONS} & set(variables)
    assert not any("ALLOW_RUN_AS_ROOT" in name for name in variables)
    assert (state / "hosts.openmpi").read_text() == "localhost slots=2\nn2 slots=1\n"
    assert (state / "hosts.hydra").read_text() == f"{socket.gethostname()}:2\nn2:1\n"


def test_equal_hostnames_on_real_hosts_name_the_daemons(state: Path) -> None:
    assert environment(state, same_hostnames=True)[mpi.NAME_DAEMONS] == "1"


def test_loopback_only_runs_open_mpi_on_the_first_node(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_has_network", lambda: False)
    environment(state, same_machine=True)
    assert (state / "hosts.openmpi").read_text() == "localhost slots=3\n"
    assert len((state / "hosts.hydra").read_text().splitlines()) == 2


def test_hydra_is_called_back_on_the_peers_side(state: Path) -> None:
    assert environment(state, peer_address="127.0.0.2")["HYDRA_IFACE"] == "lo"


def test_hydra_is_called_back_on_the_only_interface_of_containers_without_a_route(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"lo": (0x9, "127.0.0.1"), "eth0": (0x1, "10.0.0.2"), "down0": (0, "10.0.0.3"), "bare0": (0x1, None)}
    monkeypatch.setattr(mpi, "_interfaces", lambda: found)
    monkeypatch.setattr(mpi, "_default_route_interface", lambda: None)
    assert [environment(state, same_machine=one)["HYDRA_IFACE"] for one in (True, False)] == ["eth0", "eth0"]
    del found["eth0"]
    assert environment(state, same_machine=True)["HYDRA_IFACE"] == "lo"
    assert "HYDRA_IFACE" not in environment(state)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hosts": []}, "no hosts"),
        ({"hosts": [("n1", 0)]}, "'n1' has 0 slots"),
        ({"hrsh": "/opt/my hrsh"}, "'/opt/my hrsh'"),
        ({"hrsh": "hrsh"}, "absolute"),
    ],
)
def test_refusals(state: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        environment(state, **changes)


PRTED = 'PATH=/a:$PATH;/a/bin/prted --prtemca ess "env" --prtemca ess_base_vpid 1'
ORTED = ' PATH=/a ; export PATH ; /a/bin/orted -mca ess "env" -mca ess_base_vpid 1'


@pytest.mark.parametrize("command", [PRTED, ORTED])
def test_daemons_are_named_only_on_request(command: str) -> None:
    renamed, more = mpi.daemon_command(command, "n2", {mpi.NAME_DAEMONS: "1", "SLURM_JOBID": "12"})
    assert renamed == command.replace('ess "env"', "ess slurm")
    assert more == {"SLURMD_NODENAME": "n2", "SLURM_NODEID": "0", "SLURM_JOBID": "12"}
    assert mpi.daemon_command(command, "n2", {}) == (command, {})


def test_other_commands_stay_as_they_are() -> None:
    for command in ("hydra_pmi_proxy --proxy-id 1", 'echo --prtemca ess "env"'):
        assert mpi.daemon_command(command, "n2", {mpi.NAME_DAEMONS: "1"}) == (command, {})
