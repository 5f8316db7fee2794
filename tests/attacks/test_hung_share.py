"""The share stops answering: the node and its other jobs continue, and the failure of a job says what failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_client import Controller, NodeUnderTest, new_token, running_node
from losing_disk import LosingDisk, why_not
from waiting import wait_until

from hpcnode.wire import protocol

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        bool(why_not()), reason=f"NOT TESTED: the share is a file system of the test, which {why_not()}"
    ),
]


@pytest.fixture
def share(place: Path) -> Iterator[LosingDisk]:
    with LosingDisk(place / "share") as disk:
        (disk.path / "work").mkdir()
        (disk.path / "work").chmod(0o777)
        yield disk
        disk.go_on()


@pytest.fixture(params=["root", "plain user"])
def node(request: pytest.FixtureRequest, place: Path, share: LosingDisk) -> Iterator[NodeUnderTest]:
    """An agent of root and one of a plain user; nothing of theirs is on the share."""
    with running_node(place / "node", user="nobody" if request.param == "plain user" else "") as node:
        yield node
        share.go_on()


def is_blocked(pid: int) -> bool:
    """Return whether a process is in an uninterruptible wait of the kernel."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"


def run_elsewhere(controller: Controller, work: Path, job: int) -> protocol.Report:
    return controller.final(controller.launch("echo ran", token=new_token(job=job), work_dir=str(work)))


def test_g7_a_share_that_stops_answering_holds_up_its_own_jobs_alone(
    node: NodeUnderTest, share: LosingDisk, place: Path
) -> None:
    controller = Controller(node)
    on_share = str(share.path / "work")
    # One runs there already; one begins there, and one has its output there.
    running = controller.launch(
        "touch began; until [ -e gate ]; do sleep 0.05; done",
        token=new_token(job=1), work_dir=on_share,
    )  # fmt: skip
    wait_until((share.path / "work" / "began").exists, what="the job on the share")
    share.stop()
    controller.send(protocol.SampleEvery(0.5, [str(share.path)]))
    begins = controller.launch("echo began", token=new_token(job=2), work_dir=on_share, stdout="out")
    writes = controller.launch(
        "echo hello", token=new_token(job=3), work_dir=str(place / "work"), stdout=f"{on_share}/out-3"
    )
    for job in (11, 12, 13):
        assert run_elsewhere(controller, place / "work", job).codes == [0]
    assert node.agent is not None
    assert not is_blocked(node.agent.pid)
    assert not controller.reports(begins)
    controller.send(protocol.EndStep(writes, 0.0, "enough"))
    ended = controller.final(writes)
    assert ended.codes != [0]
    assert ended.why
    answers = f"node_filesystem_answers:{share.path}"
    named = controller.wait(lambda m: isinstance(m, protocol.Sample) and answers in m.columns)
    assert named.values[named.columns.index(answers)] == 0
    assert not is_blocked(node.agent.pid)
    share.go_on()
    assert controller.final(begins).codes == [0]
    (share.path / "work" / "gate").touch()
    assert controller.final(running).codes == [0]
    assert (share.path / "work" / "out").read_text() == "began\n"


def test_g7_the_failure_of_a_job_names_the_file_on_the_share(node: NodeUnderTest, share: LosingDisk) -> None:
    controller = Controller(node)
    share.fail(errno.ESTALE)
    ended = controller.final(controller.launch("echo x", work_dir=str(share.path / "work"), stdout="out"))
    assert ended.codes != [0]
    assert ended.why == f"cannot open output file out: {os.strerror(errno.ESTALE)}"
    assert run_elsewhere(controller, Path("/tmp"), 9).codes == [0]
