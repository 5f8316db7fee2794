"""A link between two ranks is cut without a word, while both reach the roster. The nodes are network namespaces."""

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

from hpcsched.demo.serving import StreamedAnswer
from tests.bench.hosts import can_make_hosts, hosts, space_of
from tests.tiny_models import tiny_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.netns, pytest.mark.timeout(400)]
COUNT = 3
PATIENCE_S = 120.0
HRUN = """#!/bin/sh
# The hrun of a job whose nodes are namespaces: enters the one that --nodelist names.
while [ "${1#-}" != "$1" ]; do case $1 in --nodelist=*) node=${1#*=};; esac; shift; done
exec ip netns exec "$node" env HPCSCHED_NODENAME="$node" "$@"
"""
NOT_THERE = "02:00:00:00:00:01"


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    """Three nodes with a link each."""
    with ExitStack() as stack:
        try:
            if not can_make_hosts():
                pytest.skip("CUT LINKS NOT TESTED: that needs root, and ip of iproute2")
            made = stack.enter_context(hosts(COUNT, 1000, tmp_path))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"CUT LINKS NOT TESTED: no network namespaces here: {getattr(error, 'stderr', error)}")
        yield made


def cut(spaces: list[str], addresses: list[str], one: int, other: int) -> None:
    """Let packets between two nodes go astray; neither is told, and all other links work."""
    for here, there in ((one, other), (other, one)):
        neighbour = ["neigh", "replace", addresses[there], "lladdr", NOT_THERE, "nud", "permanent", "dev", "eth0"]
        subprocess.run(["ip", "-n", spaces[here], *neighbour], check=True)


def answer_of(path: Path, after_tokens: int = 0) -> StreamedAnswer:
    """Begin the same answer as always; return it after so many tokens."""
    answer = StreamedAnswer(path)
    wait_until(lambda: answer.tokens > after_tokens or answer.is_over, PATIENCE_S, "tokens")
    return answer


def test_one_of_two_ranks_with_a_cut_link_leaves_and_the_answer_stays_the_same(
    addresses: list[str], tmp_path: Path
) -> None:
    spaces, log = [space_of(tmp_path, at) for at in range(COUNT)], tmp_path / "log"
    (tmp_path / "hrun").write_text(HRUN)
    (tmp_path / "hrun").chmod(0o755)
    (tmp_path / "allocation").write_text(json.dumps({"generation": 1, "nodes": spaces}))
    environ = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HPCSCHED_JOB_ID": "1",
        "HPCSCHED_ALLOCATION_FILE": str(tmp_path / "allocation"),
        "HPCSCHED_MASTER_ADDR": addresses[0],
        "OMP_NUM_THREADS": "1",
    }
    directory, path = tiny_model(tmp_path / "model", max_position_embeddings=512), tmp_path / "s"
    options = ["--name=demo", "--kind=fp32", "--split=tensor", "--context=400", "--silence=2", f"--listen=unix:{path}"]
    command = ["ip", "netns", "exec", spaces[0], sys.executable, "-m", "hpcserve", "run", str(directory), *options]
    with log.open("w") as output, subprocess.Popen(command, env=environ, stdout=output, stderr=output) as run:
        try:
            wait_until(
                lambda: f"{COUNT} members" in log.read_text() and "is ready" in log.read_text(), PATIENCE_S, "ranks"
            )
            expected = answer_of(path)
            wait_until(lambda: expected.is_over, PATIENCE_S, "the undisturbed answer")
            answer = answer_of(path, after_tokens=20)
            cut(spaces, addresses, 1, 2)
            wait_until(lambda: answer.is_over, PATIENCE_S, "the answer")
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait()
    said = log.read_text()
    assert answer.error == "", said
    assert answer.text == expected.text
    assert "do not reach each other" in said
    assert said.rindex("2 members, in slots") > said.index("do not reach each other"), said
