"""An elastic run in a job, whose hrun is a script of the test's: what it does when the job is asked for nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from ranks import HERE, python, started
from test_train_resume import SMALL, WITH_WAITING, lines_of
from waiting import wait_until

from hpctrain.elastic.launch import RankLauncher, RankSlot
from hpctrain.errors import EXIT_REQUEUE

pytestmark = pytest.mark.timeout(300)
PATIENCE_S = 90.0
HRUN = """#!/bin/sh
# Runs a step here; the first --resize finds no controller.
case $1 in --resize=*)
    echo "$1" >> "$(dirname "$0")/asked"
    test "$(wc -l < "$(dirname "$0")/asked")" -gt 1
    exit;;
esac
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""


def test_a_requested_node_is_given_back_when_the_controller_answers_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "hrun").write_text(HRUN)
    (tmp_path / "hrun").chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HPCSCHED_JOB_ID": "1",
        "HPCSCHED_ALLOCATION_FILE": str(tmp_path / "allocation"),
        "HPCSCHED_MASTER_ADDR": "127.0.0.1",
    }

    def tell(**facts: object) -> None:
        (tmp_path / "new").write_text(json.dumps(facts))
        os.replace(tmp_path / "new", tmp_path / "allocation")

    def world() -> int:
        return [0, *(line["world"] for line in lines_of(out) if "loss" in line)][-1]

    tell(generation=1, nodes=["a", "b"])
    script = [*python(), HERE / "faulty_chargpt.py", "none", "--out", out, *SMALL, "--steps", "1000000"]
    command = [sys.executable, "-m", "hpctrain.elastic", "--", *script]
    with (tmp_path / "log").open("w") as log, started(command, WITH_WAITING | job, output=log.fileno()) as run:
        wait_until(lambda: world() == 2, PATIENCE_S, "two ranks")
        tell(generation=2, nodes=["a", "b"], wanted=["a"])
        run.send_signal(signal.SIGWINCH)
        wait_until(lambda: world() == 1, PATIENCE_S, "one rank")
        asked = tmp_path / "asked"
        wait_until(lambda: asked.exists() and len(asked.read_text().split()) == 2, PATIENCE_S, "the job to ask again")
        run.send_signal(signal.SIGUSR1)
        status = run.wait(PATIENCE_S)
    said = (tmp_path / "log").read_text()
    assert status == EXIT_REQUEUE, said
    assert asked.read_text().split() == ["--resize=1"] * 2, "not again once it is taken"


def test_no_rank_or_spare_waits_behind_a_step_that_waits(tmp_path: Path) -> None:
    """For a node that is down, or for cpus that others have: `--overlap` starts steps at once."""
    (tmp_path / "hrun").write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\n')
    (tmp_path / "hrun").chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HPCSCHED_JOB_ID": "1"}
    launcher = RankLauncher(["train", "--steps"], job)

    async def start() -> None:
        await launcher.start(RankSlot(number=0, node="a"), {})
        await launcher.processes[0].wait()

    asyncio.run(start())
    asked = (tmp_path / "asked").read_text().split()
    assert {"--nodelist=a", "--overlap"} < set(asked)
    assert asked[-2:] == ["train", "--steps"]
