"""An elastic run on three hosts, one of which loses its link and has it back. The hosts are network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.hosts import can_make_hosts, hosts, set_link, space_of
from ranks import HERE, started
from test_train_resume import SMALL, WITH_WAITING, lines_of
from waiting import wait_until

from hpctrain.errors import EXIT_REQUEUE

pytestmark = [pytest.mark.netns, pytest.mark.timeout(400)]
COUNT, LAST = 3, 2
PATIENCE_S = 90.0
HRUN = """#!/bin/sh
# The hrun of a job whose nodes are namespaces: enters the one that --nodelist names.
while [ "${1#-}" != "$1" ]; do case $1 in --nodelist=*) node=${1#*=};; esac; shift; done
exec ip netns exec "$node" "$@"
"""


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    """Three hosts with a link each."""
    with ExitStack() as stack:
        try:
            if not can_make_hosts():
                pytest.skip("LOST LINKS NOT TESTED: that needs root, and ip of iproute2")
            made = stack.enter_context(hosts(COUNT, 1000, tmp_path))
            subprocess.run(["ip", "netns", "exec", space_of(tmp_path, 0), "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"LOST LINKS NOT TESTED: no network namespaces here: {getattr(error, 'stderr', error)}")
        yield made


def test_a_host_whose_link_fails_is_lost_and_joins_again_when_it_is_up(addresses: list[str], tmp_path: Path) -> None:
    """Nothing ends its connections: neither side is told anything."""
    spaces, out = [space_of(tmp_path, at) for at in range(COUNT)], tmp_path / "run"
    (tmp_path / "hrun").write_text(HRUN)
    (tmp_path / "hrun").chmod(0o755)
    (tmp_path / "allocation").write_text(json.dumps({"generation": 1, "nodes": spaces}))
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HPCSCHED_JOB_ID": "1",
        "HPCSCHED_ALLOCATION_FILE": str(tmp_path / "allocation"),
        "HPCSCHED_MASTER_ADDR": addresses[0],
    }
    script = [sys.executable, HERE / "faulty_chargpt.py", "none", "--out", out, *SMALL, "--steps", "1000000"]
    command = ["ip", "netns", "exec", spaces[0], sys.executable, "-m", "hpctrain.elastic", "--", *script]

    def world() -> int:
        return [0, *(line["world"] for line in lines_of(out) if "loss" in line)][-1]

    with (tmp_path / "log").open("w") as log, started(command, WITH_WAITING | job, output=log.fileno()) as run:
        wait_until(lambda: world() == COUNT, PATIENCE_S, "three ranks")
        set_link(tmp_path, LAST, "down")
        wait_until(lambda: world() == COUNT - 1, PATIENCE_S, "two ranks")
        set_link(tmp_path, LAST, "up")
        wait_until(lambda: world() == COUNT, PATIENCE_S, "three ranks again")
        run.send_signal(signal.SIGUSR1)
        status = run.wait(PATIENCE_S)
    said = (tmp_path / "log").read_text()
    assert status == EXIT_REQUEUE, said
    assert f"(slot {LAST}) is lost: no heartbeat for too long" in said
    steps = [line["step"] for line in lines_of(out) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), "each step once"
