"""`mpirun` of the wheels, in a job of sbatch's: it finds nodes and slots by itself, with our help and with Slurm's alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from clientrun import Client

from hpcsched.loopback.cluster import LocalCluster

OTHERS = os.environ.get("HPCSCHED_TEST_MPI_BIN", "").split(os.pathsep)
BINS = [one for one in (str(Path(sys.executable).parent), *OTHERS) if one and (Path(one) / "mpirun").exists()]
# Without what we set so that mpirun needs no srun it starts its daemons as on any Slurm. These machines have names that only
# they know, so MPICH must be told by which address it is found; Open MPI wants a word from root.
FORGET = """unset ${!OMPI_*} ${!PRTE_*} ${!HYDRA_*}
export HYDRA_IFACE=lo OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
"""
# A rank of MPICH's has the environment of mpirun; on which node it runs is in that of its parent.
RANK = r"""echo rank ${PMIX_RANK-$PMI_RANK} on $(tr "\0" "\n" < /proc/$PPID/environ | sed -n s/^SLURMD_NODENAME=//p)"""


def test_there_is_an_mpi_to_test() -> None:
    if os.environ.get("CI") == "true":
        assert len(BINS) >= 2, "CI must test Open MPI and MPICH: set HPCSCHED_TEST_MPI_BIN"


@pytest.mark.parametrize("mpi_bin", BINS)
@pytest.mark.parametrize("before", ["", FORGET], ids=["ours", "slurms"])
def test_ranks_on_both_nodes(before: str, mpi_bin: str, cluster: LocalCluster, slurm: Client) -> None:
    script = f"#!/bin/bash\n{before}\nexport PATH={mpi_bin}:$PATH\nmpirun sh -c '{RANK}'\n"
    words = ("sbatch", "--parsable", "--wait", "-N2", "--ntasks-per-node=2")
    job_id = slurm(*words, stdin=script, check=False).stdout.strip()
    shown = (cluster.share / f"slurm-{job_id}.out").read_text()
    # Open MPI warns now and then that its remote shell was quicker than setpgid(2), which does no harm.
    ranks = sorted(line for line in shown.splitlines() if "setpgid(" not in line)
    assert ranks == [f"rank {rank} on n{rank // 2 + 1}" for rank in range(4)]
    steps = slurm("sacct", "-n", "-P", "-j", job_id, "-o", "JobName").stdout.splitlines()[2:]
    assert {"prted", "hydra_pmi_proxy"} & set(steps) if before else steps, steps
