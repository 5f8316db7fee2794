"""Suspended steps: stopped processes and limits, and ends, also by a later agent."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from agent_client import INCARNATION, Controller, NodeUnderTest, new_token, pids
from waiting import wait_until

from hpcnode.os import process
from hpcnode.wire import protocol


def suspend(controller: Controller, job: int, on: bool = True) -> None:
    controller.send(protocol.SuspendJob(INCARNATION, job, 0, on))


def stands_still(pid: int) -> bool:
    stat = process.read_stat(pid)
    assert stat is not None
    if stat.state == "T":
        return True
    groups = [line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::")]
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line]
    own = [Path(mounts[0] + group) for group in groups if mounts and group != "/"]
    if stat.state == "D":  # between vfork and exec it waits for its child: it stands still if that does
        below = [process.read_stat(child) for child in process.children_of(pid)]
        stopped = any(child is not None and child.state == "T" for child in below)
        return stopped or any((path / "cgroup.freeze").read_text() == "1\n" for path in own)
    return any("frozen 1" in (path / "cgroup.events").read_text() for path in own)


# Two processes, one of which detached itself; each can be seen to run by the file that it makes when it is asked to.
SCRIPT = """
setsid sh -c 'echo $$ >> pids; while [ ! -e ask ]; do sleep 0.02; done; touch other; sleep 100' &
echo $$ >> pids; while [ ! -e ask ]; do sleep 0.02; done; touch shell; wait
"""


def test_a_suspended_job_stops_and_resumes(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    controller.launch(SCRIPT, token=new_token(job=3), work_dir=str(work))
    both = pids(work, 2)
    suspend(controller, 3)
    wait_until(lambda: all(map(stands_still, both)), what="both to stand still")
    suspend(controller, 3)
    suspend(controller, 3, on=False)
    wait_until(lambda: not any(map(stands_still, both)), what="both to go on")
    (work / "ask").touch()
    wait_until(lambda: (work / "shell").exists() and (work / "other").exists())


def test_a_step_stays_suspended_without_an_agent(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(SCRIPT, token=new_token(job=3), work_dir=str(work))
    controller.wait_status(token, protocol.STARTED)
    both = pids(work, 2)
    suspend(controller, 3)
    wait_until(lambda: all(map(stands_still, both)))
    node.kill()
    node.start()
    again = Controller(node)
    assert [report["status"] for report in again.welcome.inventory] == ["started"]
    assert all(map(stands_still, both))
    suspend(again, 3, on=False)
    wait_until(lambda: not any(map(stands_still, both)), what="both to go on")


def test_the_time_limit_does_not_run_meanwhile(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(SCRIPT, token=new_token(job=3), work_dir=str(work), limit_s=6.0, grace_s=0.5)
    both = pids(work, 2)
    suspend(controller, 3)
    wait_until(lambda: all(map(stands_still, both)))
    clock = controller.launch(argv=["sleep", "100"], token=new_token(job=4, step="0"), limit_s=6.5, grace_s=0.5)
    assert controller.final(clock).timed_out
    assert [report.status for report in controller.reports(token)] == [protocol.STARTED]
    suspend(controller, 3, on=False)
    assert controller.final(token).timed_out


def test_what_is_launched_in_a_suspended_job_waits_for_it(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    controller.launch(SCRIPT, token=new_token(job=3), work_dir=str(work))
    both = pids(work, 2)
    suspend(controller, 3)
    wait_until(lambda: all(map(stands_still, both)))
    step = controller.launch(argv=["true"], token=new_token(job=3, step="0"), work_dir=str(work))
    other = controller.launch(argv=["true"], token=new_token(job=4, step="0"))
    assert controller.final(other).status == protocol.ENDED
    assert [report.status for report in controller.reports(step)] == []
    suspend(controller, 3, on=False)
    assert controller.final(step).codes == [0]


def test_a_suspended_step_stays_suspended_if_the_agent_dies_after_the_start(node: NodeUnderTest, work: Path) -> None:
    node.kill()
    node.start(crash_at="fork.after:2")  # nothing can follow the order that the shepherd of the step was given
    controller = Controller(node)
    controller.launch(SCRIPT, token=new_token(job=3), work_dir=str(work))
    both = pids(work, 2)
    suspend(controller, 3)
    wait_until(lambda: all(map(stands_still, both)))
    step = controller.launch(argv=["touch", "ran"], token=new_token(job=3, step="0"), work_dir=str(work))
    wait_until(lambda: controller.pump(0.1) or controller.closed, what="the agent to die")
    node.start()
    again = Controller(node)
    status = {report["token"]: report["status"] for report in again.welcome.inventory}
    other = again.launch(argv=["true"], token=new_token(job=4, step="0"))
    assert again.final(other).status == protocol.ENDED
    assert [status.get(step), again.reports(step)] == [protocol.CLAIMED, []]
    assert not (work / "ran").exists()
    suspend(again, 3, on=False)
    assert again.final(step).codes == [0]
    assert (work / "ran").exists()


def test_a_suspended_job_that_is_ended_has_its_grace(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(
        "trap 'echo told >> out; exit 3' TERM; echo $$ >> pids; while :; do sleep 0.02; done",
        token=new_token(job=3),
        work_dir=str(work),
    )
    mine = pids(work, 1)
    suspend(controller, 3)
    wait_until(lambda: stands_still(mine[0]))
    controller.send(protocol.EndJob(INCARNATION, 3, 0, 20.0))
    assert controller.final(token).codes == [3]
    assert (work / "out").read_text().split() == ["told"]


@pytest.mark.parametrize("batch_only", [False, True])
def test_a_job_is_ended_by_the_signal_that_lets_it_save_what_it_has(
    node: NodeUnderTest, work: Path, batch_only: bool
) -> None:
    controller = Controller(node)
    trap = "trap 'echo {0} >> out; exit 75' USR1; touch {0}; while :; do sleep 0.02; done"
    batch = controller.launch(trap.format("shell"), token=new_token(job=3), work_dir=str(work))
    step = controller.launch(
        argv=["sh", "-c", trap.format("step")], token=new_token(job=3, step="0"), work_dir=str(work), grace_s=0.2
    )
    wait_until(lambda: (work / "shell").exists() and (work / "step").exists())
    order = protocol.EndJob(INCARNATION, 3, 0, 20.0 if batch_only else 2.0, signal.SIGUSR1, batch_only)
    controller.send(order)
    ended = controller.final(batch)
    if batch_only:  # the step is told when the script is over, as ever
        assert (ended.codes, (work / "out").read_text().split()) == ([75], ["shell"])
    else:  # the shell does not get it, its steps and children do; then KILL
        assert (ended.signals, (work / "out").read_text().split()) == ([signal.SIGKILL], ["step"])
        assert controller.final(step).codes == [75]


def test_a_job_gets_one_signal_for_its_nodes_and_a_file(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    trap = "trap 'cat $HPCSCHED_ALLOCATION_FILE >> {0}' WINCH; echo $$ >> pids; while :; do sleep 0.02; done"
    batch = controller.launch(trap.format("shell"), token=new_token(job=3), work_dir=str(work))
    step = controller.launch(
        argv=["sh", "-c", trap.format("step")], token=new_token(job=3, step="0"), work_dir=str(work)
    )
    ignorant = controller.launch(argv=["sleep", "100"], token=new_token(job=3, step="1"))
    for token in (batch, step, ignorant):
        controller.wait_status(token, protocol.STARTED)
    pids(work, 2)
    order = protocol.Allocation(INCARNATION, 3, 0, 1, ["n1", "n2"], ["n1"])
    for each in (order, order, protocol.Allocation(INCARNATION, 3, 0, 2, ["n1"], [])):
        controller.send(each)
        told = f'"generation": {each.generation},'
        wait_until(lambda told=told: all(told in _read(work / name) for name in ("shell", "step")), what="both to hear")
    assert [_read(work / name).count('"generation": 1') for name in ("shell", "step")] == [1, 1]
    assert controller.reports(ignorant)[-1].status == protocol.STARTED


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
