"""Plain `mpirun prog` inside a job: all of the allocation, no flags, no keys between nodes, nothing left afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

HELLO = """
from mpi4py import MPI
import os
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
for rank in range(world.size):  # one after another: launchers do not keep lines of several ranks apart
    world.Barrier()
    if rank == world.rank:
        line = f"rank {world.rank} of {world.size} on {os.uname().nodename} sum {total}\\n"
        os.write(1, line.encode())  # at once: print may write it piece by piece
"""


def mpi_bins() -> list[str]:
    """Return the directories with an mpirun and a python with mpi4py: ours, and those of other environments."""
    others = os.environ.get("HPCSCHED_TEST_MPI_BIN", "").split(os.pathsep)
    bins = [str(Path(sys.executable).parent), *(one for one in others if one)]
    return [one for one in bins if (Path(one) / "mpirun").exists()]


def test_there_is_an_mpi_to_test() -> None:
    if os.environ.get("CI") == "true":
        assert len(mpi_bins()) >= 2, "CI must test Open MPI and MPICH: set HPCSCHED_TEST_MPI_BIN"
    assert mpi_bins()


@pytest.mark.parametrize("mpi_bin", mpi_bins())
def test_mpirun_uses_all_nodes_and_slots(
    cluster: LocalCluster, sub: Callable[..., int], ended: Any, output: Callable[[int], str], mpi_bin: str
) -> None:
    (cluster.share / "hello.py").write_text(HELLO)
    job_id = sub(f"export PATH={mpi_bin}:$PATH\nmpirun python hello.py", "-N2", "--ntasks-per-node=2")
    assert ended(job_id)["state"] == "COMPLETED", output(job_id)
    lines = sorted(line for line in output(job_id).splitlines() if line.startswith("rank"))
    assert [line.split(" on ")[0] for line in lines] == [f"rank {i} of 4" for i in range(4)], output(job_id)
    assert cluster.machines is not None
    if all(node.own_hostname for node in cluster.machines.nodes.values()):
        assert len({line.split()[5] for line in lines}) == 2
    assert all(line.endswith("sum 6") for line in lines)


@pytest.mark.parametrize("mpi_bin", mpi_bins())
def test_all_ranks_die_with_the_job(
    cluster: LocalCluster,
    sub: Callable[..., int],
    running: Any,
    ended: Any,
    output: Callable[[int], str],
    mpi_bin: str,
) -> None:
    (cluster.share / "stay.py").write_text(HELLO + "import time\ntime.sleep(600)\n")
    job_id = sub(f"export PATH={mpi_bin}:$PATH\nmpirun python stay.py", "-N2")
    running(job_id)
    wait_until(lambda: output(job_id).count("rank") == 2, what="both ranks to speak")
    cluster.run("hcancel", str(job_id))
    assert ended(job_id)["state"] == "CANCELLED"
    assert cluster.machines is not None
    for name in cluster.machines.nodes:
        for pid in cluster.machines.processes(name):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            assert b"stay.py" not in command
