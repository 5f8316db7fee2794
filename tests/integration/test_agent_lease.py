"""Leases, held steps, claims and full disks with a real agent and real shepherds."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_client import INCARNATION, Controller, NodeUnderTest, new_token, running_node
from waiting import wait_until

from hpcnode.lease import read_renewal
from hpcnode.wire import protocol

KILL: dict[str, Any] = {"lease": protocol.KILL, "lease_s": 4.0, "grace_s": 0.5}
BEAT = "trap 'echo told' TERM; while :; do date +%s.%N >> beats; sleep 0.05; done"


@pytest.fixture
def work() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hpcnode-test-", dir="/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def node(work: Path) -> Iterator[NodeUnderTest]:
    with running_node(work / "node") as node:
        yield node


def beats(work: Path) -> int:
    path = work / "beats"
    return len(path.read_text().split()) if path.exists() else 0


def answer_until(controller: Controller, done: Callable[[], object]) -> None:
    """Answer the agent's Pings until a condition is true."""
    answered: set[int] = set()

    def take() -> bool:
        for message, _ in controller.messages:
            if isinstance(message, protocol.Ping) and message.request not in answered:
                answered.add(message.request)
                controller.send(protocol.Pong(message.request))
        controller.pump(0.05)
        return bool(done())

    wait_until(take)


def test_a_job_with_a_lease_lives_as_long_as_the_controller_answers(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    leased = controller.launch(BEAT, work_dir=str(work), **KILL)
    kept = controller.launch("while [ ! -e go ]; do sleep 0.05; done", new_token(job=2), work_dir=str(work))
    answer_until(controller, lambda: beats(work))
    longer_s = time.monotonic() + KILL["lease_s"] + 1.0
    answer_until(controller, lambda: time.monotonic() > longer_s)
    assert not [report for report in controller.reports(leased) if report.status != protocol.STARTED]
    controller.close()
    wait_until(lambda: (node.root / "spool" / leased / "final").exists(), what="the lease to run out")
    seen = beats(work)
    again = Controller(node)
    report = next(item for item in again.welcome.inventory if item["token"] == leased)
    assert (report["status"], report["why"], report["signals"]) == (protocol.LOST, protocol.LEASE_OVER, [9])
    (work / "go").touch()
    assert again.final(kept).codes == [0]
    assert beats(work) == seen
    again.close()


def test_it_needs_no_agent_to_end(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    leased = controller.launch(BEAT, work_dir=str(work), **KILL)
    answer_until(controller, lambda: beats(work))
    node.kill()
    wait_until(lambda: (node.root / "spool" / leased / "final").exists(), what="the lease to run out")
    node.start()
    again = Controller(node)
    assert [item["why"] for item in again.welcome.inventory] == [protocol.LEASE_OVER]
    again.close()


def test_a_controller_that_does_not_answer_starts_nothing(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    leased = controller.launch(BEAT, work_dir=str(work), **KILL)
    controller.wait(lambda message: isinstance(message, protocol.Ping))
    controller.send(protocol.Ping(9))
    controller.wait(lambda message: message == protocol.Pong(9))
    controller.close()
    wait_until(lambda: (node.root / "spool" / leased / "final").exists(), what="the launch to be revoked")
    again = Controller(node)
    assert again.welcome.inventory[0]["status"] == protocol.REVOKED
    assert beats(work) == 0
    again.close()


def test_an_agent_that_took_over_renews_what_it_found(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    leased = controller.launch(BEAT, work_dir=str(work), **KILL | {"lease_s": 60.0})
    answer_until(controller, lambda: beats(work))
    node.kill()
    node.start()
    entry = str(node.root / "spool" / leased)
    before_s = read_renewal(entry) or 0.0
    again = Controller(node)
    answer_until(again, lambda: (read_renewal(entry) or 0.0) > before_s)
    again.send(protocol.EndStep(leased, 0.0, "enough"))
    assert again.final(leased).status == protocol.ENDED
    again.close()


def test_a_step_that_is_held_runs_after_go(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    held = controller.launch(argv=["touch", "ran"], work_dir=str(work), hold=True)
    controller.wait_status(held, protocol.READY)
    assert not (work / "ran").exists()
    assert not (node.root / "spool" / held / "started").exists()
    node.kill()  # whoever was told of it may be gone: Go is said again
    node.start()
    again = Controller(node)
    if (held, protocol.READY) not in [(item["token"], item["status"]) for item in again.welcome.inventory]:
        again.wait_status(held, protocol.READY)  # else its shepherd was back before we were
    again.send(protocol.Go(held))
    again.send(protocol.Go(held))
    assert again.final(held).codes == [0]
    assert (work / "ran").exists()
    again.close()


def test_a_step_whose_task_is_killed_while_it_is_held_ends_after_go(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    held = controller.launch(argv=["touch", "ran"], work_dir=str(work), hold=True)
    controller.wait_status(held, protocol.READY)
    (task,) = [pid for pid in node.processes() if os.readlink(f"/proc/{pid}/cwd") == str(work)]
    os.kill(task, signal.SIGKILL)
    wait_until(lambda: task not in node.processes(), what="the end of the task")
    controller.send(protocol.Go(held))
    ended = controller.final(held, 20)
    assert (ended.status, ended.signals) == (protocol.ENDED, [signal.SIGKILL])
    assert not (work / "ran").exists()
    controller.close()


def test_a_held_step_can_be_revoked_and_reports_errors_early(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    held = controller.launch(argv=["touch", "ran"], work_dir=str(work), hold=True)
    controller.wait_status(held, protocol.READY)
    controller.send(protocol.EndStep(held, 5.0, "another node could not"))
    assert controller.final(held).status == protocol.REVOKED
    lacking = controller.launch(argv=["true"], token=new_token(step="1"), work_dir=str(work / "none"), hold=True)
    assert controller.final(lacking).status == protocol.REFUSED
    assert not (work / "ran").exists()
    controller.close()


def test_a_claim_holds_a_place_and_survives_its_agent(node: NodeUnderTest) -> None:
    controller = Controller(node)
    claim = controller.launch(token=new_token(step="alloc"))
    controller.wait_status(claim, protocol.CLAIMED)
    node.kill()
    node.start()
    again = Controller(node)
    assert [item["status"] for item in again.welcome.inventory] == [protocol.CLAIMED]
    again.send(protocol.EndJob(INCARNATION, 1, 0, 5.0))
    again.wait(lambda message: message == protocol.JobGone(INCARNATION, 1, 0))
    again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_and_its_end_are_reported(work: Path) -> None:
    root = work / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=711", "hpcnode-test", str(root)], check=True)
    try:
        with running_node(root) as node:
            controller = Controller(node)
            running = controller.launch("while [ ! -e go ]; do sleep 0.05; done", work_dir=str(work))
            controller.wait_status(running, protocol.STARTED)
            with open(root / "filler", "wb", buffering=0) as filler:
                fill(filler)
            refused = controller.final(controller.launch("true", new_token(job=2)))
            assert (refused.status, refused.node_fault) == (protocol.REFUSED, True)
            said = controller.wait(_is_condition)
            assert "No space left on device" in said.why
            (root / "filler").unlink()
            controller.wait(lambda message: message == protocol.Condition(""))
            (work / "go").touch()
            assert controller.final(running).codes == [0]
            assert controller.final(controller.launch("true", new_token(job=3))).codes == [0]
            controller.close()
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def fill(filler: Any) -> None:
    for size in (65536, 4096, 1):
        try:
            while True:
                filler.write(bytes(size))
        except OSError:
            continue


def test_a_node_that_cannot_fork_reports_it_and_recovers(work: Path) -> None:
    # Root has no such limit: its agent is nobody's here.
    with running_node(work / "node", user="nobody" if os.geteuid() == 0 else "") as node:
        controller = Controller(node)
        assert controller.final(controller.launch("true", work_dir=str(work))).codes == [0]
        assert node.agent is not None
        let_have(node.agent.pid, "1")  # first: whom it forks now has that limit as well
        for pid in node.processes():
            let_have(pid, "1")
        refused = controller.final(controller.launch("true", new_token(job=2), work_dir=str(work)))
        assert (refused.status, refused.node_fault) == (protocol.REFUSED, True)
        assert "Resource temporarily unavailable" in controller.wait(_is_condition).why
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]  # as we have
        for pid in node.processes():
            let_have(pid, "unlimited" if most == resource.RLIM_INFINITY else str(most))
        controller.wait(lambda message: message == protocol.Condition(""))
        assert controller.final(controller.launch("true", new_token(job=3), work_dir=str(work))).codes == [0]
        controller.close()


def let_have(pid: int, processes: str) -> None:
    """Set how many processes the account of `pid`, if it still runs, may have for it to fork one more."""
    own_account = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    command = [*own_account, "prlimit", f"--nproc={processes}:", f"--pid={pid}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "No such process" in done.stderr


def _is_condition(message: Any) -> bool:
    return isinstance(message, protocol.Condition)
