"""Resource limits of the submitting process in batch scripts and steps, as --propagate of sbatch(1) and srun(1) says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clientrun import QUICK, Client
from waiting import wait_until

from hpcsched import client
from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster

SHOW = "ulimit -Sn; ulimit -Ss; ulimit -Sc"


@pytest.fixture(scope="module")
def some() -> Iterator[LocalCluster]:
    """Return a cluster that propagates two limits unless a job says otherwise."""
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        settings = {"controller": {**QUICK["controller"], "propagate": "STACK,CORE"}}
        with LocalCluster(Path(directory), ("n1",), cpus=4, settings=settings) as started:
            yield started


def shell(cluster: LocalCluster, text: str) -> list[str]:
    env = {"PATH": f"{ensure_directory()}{os.pathsep}{cluster.env['PATH']}"}
    return cluster.run("bash", "-c", text, env=env).stdout.split()


def test_limits_reach_steps_and_batch_scripts(cluster: LocalCluster, slurm: Client, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    own = shell(cluster, f"ulimit -Sn 777; ulimit -Ss 4096; ulimit -Sc 0; srun bash -c '{SHOW}'")
    assert own == ["777", "4096", "0"]
    (tmp_path / "job").write_text(
        f"#!/bin/bash\n{SHOW}\nulimit -Ss 2048\nsrun bash -c '{SHOW}; env' | grep -v ^HPCSCHED_RLIMITS; env | grep RLIMIT\n"
    )
    shell(cluster, f"cd {tmp_path}; ulimit -Sn 778; ulimit -Ss 4096; ulimit -Sc 0; sbatch --wait -o out job; true")
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:6] == ["778", "4096", "0", "778", "2048", "0"]
    assert not [line for line in lines if "RLIMIT" in line]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ("free", "4096")),
        ("--propagate=NONE", ("free", "free")),
        ("--propagate=NOFILE", ("779", "free")),
        ("--propagate", ("779", "4096")),
        ("--propagate=ALL", ("779", "4096")),
    ],
)
def test_an_option_wins_over_the_configuration(options: str, expected: tuple[str, str], some: LocalCluster) -> None:
    limited = f"ulimit -Sn 779; ulimit -Ss 4096; srun {options} -n1 bash -c 'ulimit -Sn; ulimit -Ss'"
    found = shell(some, limited)
    assert [text if text in ("779", "4096") else "free" for text in found] == list(expected)
    shell(some, f"ulimit -Sn 779; ulimit -Ss 4096; sbatch {options} --wait -o out --wrap 'ulimit -Sn; ulimit -Ss'")
    found = (some.share / "out").read_text().split()
    assert [text if text in ("779", "4096") else "free" for text in found] == list(expected)


@pytest.mark.parametrize("command", ["srun --propagate=FILES true", "sbatch --propagate=FILES --wrap true"])
def test_an_unknown_limit_is_refused(command: str, slurm: Client) -> None:
    refused = slurm(*command.split(), check=False)
    assert refused.returncode == 1
    assert "is not a resource limit" in refused.stderr


def test_hostile_limits_end_their_own_job_alone(cluster: LocalCluster, slurm: Client) -> None:
    limits = "AS=4096,NOFILE=0,STACK=1,CPU=x,NPROC=-7,CORE=" + "9" * 400
    words = {
        "command": "sbatch", "argv": ["--parsable", "--wrap", "true", "-o", "/dev/null"],
        "environ": [f"HPCSCHED_RLIMITS={limits}", "LANG=C.UTF-8"], "work_dir": "/tmp", "host": "h", "request_id": "",
        "width": 80, "out_is_terminal": False, "err_is_terminal": False, "utc_offset_s": 0,
    }  # fmt: skip
    answer = client.request("POST", "/v1/command", words, where=str(cluster.api_socket), timeout_s=60.0)
    job_id = answer.body.split(b"\n")[1].decode()  # after the number of the stream and the length
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")
    assert slurm("sacct", "-nXP", "-j", job_id, "-o", "State").stdout == "FAILED\n"
    assert slurm("srun", "-N3", "-n3", "echo", "fine").stdout == "fine\n" * 3
