"""Limits of jobs in cgroups of version 2. Directories stand for the kernel's, which has its controllers in version 1 here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcnode.os import cgroup

FILES = [
    "cgroup.controllers",
    "cgroup.subtree_control",
    "cpu.max",
    "cpu.weight",
    "cpuset.cpus",
    "cpuset.cpus.effective",
    "io.weight",
    "memory.max",
    "memory.swap.max",
    "pids.max",
]


def _group(path: Path, without: str = "") -> Path:
    path.mkdir(parents=True)
    for name in FILES:
        (path / name).write_text("")
    (path / "cgroup.controllers").write_text("cpuset cpu io memory pids")
    (path / "cpuset.cpus.effective").write_text(f"0-{(os.cpu_count() or 1) + 3}")
    if without:
        (path / without).unlink()
    return path


def _create(base: Path, limits: cgroup.JobLimits) -> cgroup.StepGroup:
    lock = base / "lock"
    lock.touch()
    controllers = dict.fromkeys(("cpu", "cpuset", "io", "memory", "pids"), str(base))
    tree = cgroup.Tree(str(base), controllers, {}, str(lock))
    cgroup.make_job(tree, "9", list(controllers), limits)
    cgroup.pin(tree, "9", limits.cpus, set())
    return cgroup.step_group(tree, "9", cgroup.FIRST_STEP, list(controllers))


LIMITS = cgroup.JobLimits(cpus=2, pin=True, mem_mib=100, processes=50)


def test_every_limit_is_written_where_the_kernel_has_it(tmp_path: Path) -> None:
    base = _group(tmp_path / "hpcsched" / "n1")
    job = _group(base / "job-9")
    group = _create(base, LIMITS)
    assert os.path.dirname(group.unified) == str(job)
    assert {
        name: (job / name).read_text() for name in FILES if (job / name).read_text() and "effective" not in name
    } == {
        "cgroup.controllers": "cpuset cpu io memory pids",
        "cgroup.subtree_control": "+memory",
        "cpu.max": "200000 100000",
        "cpu.weight": "200",
        "cpuset.cpus": "0,1",
        "io.weight": "200",
        "memory.max": str(100 << 20),
        "memory.swap.max": "0",
        "pids.max": "50",
    }


@pytest.mark.parametrize("lacks", ["memory.swap.max", "io.weight", "cpu.weight"])
def test_a_kernel_without_swap_or_weights_starts_jobs(tmp_path: Path, lacks: str) -> None:
    base = _group(tmp_path / "hpcsched" / "n1")
    job = _group(base / "job-9", without=lacks)
    _create(base, LIMITS)
    assert (job / "memory.max").read_text() == str(100 << 20)


@pytest.mark.parametrize("lacks", ["memory.max", "cpu.max", "pids.max", "cpuset.cpus"])
def test_a_limit_that_cannot_be_set_refuses_the_step(tmp_path: Path, lacks: str) -> None:
    base = _group(tmp_path / "hpcsched" / "n1")
    _group(base / "job-9", without=lacks)
    with pytest.raises(FileNotFoundError):
        _create(base, LIMITS)
