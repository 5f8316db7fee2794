"""What runs a client: see the fixtures of `conftest`; and a cluster of three nodes for clients."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcsched.loopback.cluster import LocalCluster

Client = Callable[..., subprocess.CompletedProcess[str]]
QUICK = {"controller": {"requeue_delay_s": 0, "kill_wait_s": 2}}


@contextmanager
def new_cluster() -> Iterator[LocalCluster]:
    """Start a cluster for files that count jobs from the first, or that change more than the queue."""
    # A short path: a unix socket's may have 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), cpus=4, mem_mib=8192, settings=QUICK) as started:
            yield started
