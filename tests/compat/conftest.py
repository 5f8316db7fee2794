"""A cluster of three nodes whose users have Slurm's names on their PATH: real clients, as they are, run against it.

A client is a program of its own with a script from `clients/`. Those that take minutes run with `make compat` alone.
Files share one cluster, because its start takes longer than most of their tests: each begins with an empty queue and an
empty directory. A file that needs more than that has a fixture `cluster` of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clientrun import Client, new_cluster
from waiting import wait_until

from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster

CLIENTS = Path(__file__).parent / "clients"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave those that take minutes to `make compat`."""
    if os.environ.get("HPCSCHED_COMPAT"):
        return
    for item in items:
        if item.get_closest_marker("minutes"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make compat"))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[LocalCluster]:
    with new_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Return the shared cluster, whose share is a directory of this file; end what its tests leave running."""
    whole_share = shared_cluster.share
    shared_cluster.share = whole_share / request.path.stem
    shared_cluster.share.mkdir()
    yield shared_cluster
    shared_cluster.run("hcancel", "--me", check=False)
    wait_until(lambda: not shared_cluster.run("hqueue", "-h").stdout, what="the queue to be empty")
    shared_cluster.share = whole_share


@pytest.fixture(scope="module")
def slurm_env(cluster: LocalCluster) -> dict[str, str]:
    """What a user has in the environment who has put Slurm's names on the PATH."""
    return {"PATH": f"{ensure_directory()}{os.pathsep}{cluster.env['PATH']}", "HOME": str(cluster.base)}


@pytest.fixture
def client(cluster: LocalCluster, slurm_env: dict[str, str]) -> Client:
    """Return a function that runs a client's script from `clients/` in the share, and fails if it fails."""

    def run(script: str, *words: str, timeout_s: float = 250.0) -> subprocess.CompletedProcess[str]:
        path = str(CLIENTS / script)
        command = [sys.executable, path] if script.endswith(".py") else ["bash", path]
        return cluster.run(*command, *words, env=slurm_env, timeout_s=timeout_s)

    return run


@pytest.fixture
def slurm(cluster: LocalCluster, slurm_env: dict[str, str]) -> Client:
    """Return a function that runs one of Slurm's commands as a user would."""

    def run(*words: str, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
        env = slurm_env | dict(more.pop("env", {}))  # type: ignore[call-overload]
        return cluster.run(*words, check=check, env=env, **more)  # type: ignore[arg-type]

    return run
