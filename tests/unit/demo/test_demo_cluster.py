"""A loopback cluster's commands mean that cluster, whatever the environment they are started in says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.loopback.cluster import LocalCluster


def test_variables_of_another_cluster_do_not_reach_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = ("SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURM_JOB_ID", "SLURMD_NODENAME", "HPCSCHED_JOB_ID", "HSUB_QOS")
    for name in foreign:
        monkeypatch.setenv(name, "of another one")
    monkeypatch.setenv("MINE", "kept")
    env = LocalCluster(tmp_path).env
    assert env["HPCSCHED_CONFIG"] == str(tmp_path / "etc")
    assert env["MINE"] == "kept"
    assert not set(foreign) & set(env)
