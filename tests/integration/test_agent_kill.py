"""Ends of steps: limits, signals, stubborn trees, killed shepherds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agent_client import Controller, NodeUnderTest, new_token, pids, running_node
from waiting import wait_until

from hpcnode.os import process
from hpcnode.wire import protocol

STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for _ in range(2):              # double fork, each in a session of its own, nothing of the environment left
    if os.fork():
        os._exit(0) if sys.argv[1] == "detach" else time.sleep(100)
    os.setsid()
os.execve("/bin/sh", ["sh", "-c", "trap '' TERM INT HUP; echo $$ >> pids; while :; do sleep 1; done"], {"PATH": "/bin"})
"""


@pytest.fixture
def work(work: Path) -> Path:
    (work / "stubborn.py").write_text(STUBBORN)
    return work


def alive(numbers: list[int]) -> list[int]:
    found = []
    for pid in numbers:
        stat = process.read_stat(pid)
        if stat is not None and stat.state not in "ZX":
            found.append(pid)
    return found


def test_a_step_that_ignores_term_is_killed_after_its_grace(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch("trap '' TERM; echo $$ >> pids; while :; do sleep 1; done", work_dir=str(work))
    mine = pids(work)
    controller.send(protocol.EndStep(token, 0.2, "cancelled"))
    ended = controller.final(token)
    assert (ended.signals, ended.why) == ([signal.SIGKILL], "cancelled")
    assert alive(mine) == []


def test_what_detaches_itself_from_a_step_is_killed_with_it(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    script = "python3 stubborn.py detach; python3 stubborn.py detach; echo $$ >> pids; sleep 100"
    token = controller.launch(script, work_dir=str(work))
    mine = pids(work, 3)
    controller.send(protocol.EndStep(token, 0.2, "cancelled"))
    assert controller.final(token).status == protocol.ENDED
    assert alive(mine) == []


def test_what_a_script_leaves_behind_is_killed_when_it_ends(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch("python3 stubborn.py detach; while [ ! -s pids ]; do sleep 0.1; done", work_dir=str(work))
    ended = controller.final(token)
    assert (ended.status, ended.codes) == (protocol.ENDED, [0])
    assert alive(pids(work)) == []


def test_a_batch_step_is_over_when_the_jobs_other_steps_are(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    step = controller.launch(
        argv=["sh", "-c", "trap '' TERM; echo $$ >> pids; while :; do sleep 1; done"],
        work_dir=str(work),
        token=new_token(job=6, step="0"),
        grace_s=0.5,
    )
    mine = pids(work)
    batch = controller.launch("exit 4", token=new_token(job=6), grace_s=0.5)
    assert controller.final(batch).codes == [4]
    order = [r.token for r, _ in controller.messages if isinstance(r, protocol.Report) and r.status == protocol.ENDED]
    assert order == [step, batch]
    assert alive(mine) == []


def test_fork_bombs_end(node: NodeUnderTest, work: Path) -> None:
    bomb = "import os, time\nif os.fork():\n    time.sleep(100)\nfor i in range(4):\n    os.fork()\n"
    bomb += "for i in range(3000):\n    os.fork() and os._exit(0)\n"  # each is gone before one can kill it
    (work / "bomb.py").write_text(bomb)
    controller = Controller(node)
    token = controller.launch("echo $$ >> pids; exec python3 bomb.py", work_dir=str(work))
    pids(work)
    controller.send(protocol.EndStep(token, 0.0, "cancelled"))
    assert controller.final(token).signals == [signal.SIGKILL]
    assert node.job_processes() == []


# The limit is far away until the traps are set, however slow the machine is; then it is brought near.
FAR: dict[str, Any] = {"limit_s": 3600.0, "signum": signal.SIGUSR1, "signal_before_s": 1800.0}


def test_the_time_limit_ends_a_step_after_a_warning(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(
        "trap 'echo warned >> out' USR1; trap 'echo told >> out; exit 0' TERM; touch up; while :; do sleep 0.05; done",
        work_dir=str(work),
        grace_s=60.0,
        signal_batch_only=True,
        **FAR,
    )
    wait_until(lambda: (work / "up").exists())
    controller.send(protocol.TimeLimit(token, 1799.0))
    wait_until(lambda: (work / "out").exists())
    controller.send(protocol.TimeLimit(token, 0.1))
    ended = controller.final(token)
    assert (ended.timed_out, ended.why) == (True, "timeout")
    assert (work / "out").read_text().split() == ["warned", "told"]


def test_the_warning_reaches_steps_but_not_the_batch_shell(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    trap = "trap 'echo {0} >> out' USR1; touch {0}; while :; do sleep 0.05; done"
    batch = controller.launch(
        f"sh -c \"{trap.format('child')}\" &\ntrap 'echo shell >> out' USR1; wait; wait",
        token=new_token(job=7),
        work_dir=str(work),
        **FAR,
    )
    step = controller.launch(
        argv=["sh", "-c", trap.format("step")], token=new_token(job=7, step="0"), work_dir=str(work)
    )
    wait_until(lambda: (work / "child").exists() and (work / "step").exists())
    controller.send(protocol.TimeLimit(batch, 1799.0))
    wait_until(lambda: (work / "out").exists() and len((work / "out").read_text().split()) == 2, what="both to hear")
    controller.send(protocol.TimeLimit(batch, 0.1))
    assert controller.final(batch).timed_out
    assert controller.final(step).status == protocol.ENDED
    assert sorted((work / "out").read_text().split()) == ["child", "step"]


def test_signals_go_where_they_are_sent(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    trap = "trap 'echo {0} >> out' USR1; touch {0}; while :; do sleep 0.05; done"
    batch = controller.launch(
        f'sh -c "{trap.format("child")}" &\n{trap.format("shell")}', token=new_token(job=7), work_dir=str(work)
    )
    step = controller.launch(
        argv=["sh", "-c", trap.format("step")], token=new_token(job=7, step="0"), work_dir=str(work)
    )
    wait_until(lambda: all((work / name).exists() for name in ("child", "shell", "step")))

    def heard(count: int) -> list[str]:
        out = work / "out"
        return wait_until(
            lambda: (w := sorted(out.read_text().split()) if out.exists() else []) and len(w) >= count and w
        )

    controller.send(protocol.SignalStep(batch, signal.SIGUSR1, batch_only=True))
    assert heard(1) == ["shell"]
    controller.send(protocol.SignalStep(batch, signal.SIGUSR1, steps=True))
    assert heard(2) == ["shell", "step"]
    controller.send(protocol.SignalStep(step, signal.SIGUSR1))
    assert heard(3) == ["shell", "step", "step"]
    controller.send(protocol.SignalStep(batch, signal.SIGUSR1, full=True))
    assert heard(6) == ["child", "shell", "shell", "step", "step", "step"]


def test_one_failed_task_ends_the_others_if_that_was_asked_for(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(
        argv=["sh", "-c", "[ $SLURM_PROCID = 1 ] && exit 9; sleep 100"],
        tasks=protocol.TaskSet(0, 3, 3, 0, 1),
        kill_on_bad_exit=True,
    )
    ended = controller.final(token)
    assert (ended.codes, ended.signals) == ([0, 9, 0], [signal.SIGTERM, 0, signal.SIGTERM])


def test_a_step_that_takes_too_much_memory_is_ended(node: NodeUnderTest) -> None:
    controller = Controller(node)
    eater = "import time; b = bytearray(200 << 20); b[::4096] = b'x' * len(b[::4096]); time.sleep(100)"
    ended = controller.final(controller.launch(argv=["python3", "-c", eater], mem_mib=64))
    assert ended.out_of_memory
    assert ended.signals == [signal.SIGKILL]


def test_a_job_is_found_again_when_the_agent_was_killed(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch("echo $$ >> pids; while [ ! -e go ]; do sleep 0.05; done; exit 5", work_dir=str(work))
    started = controller.wait_status(token, protocol.STARTED)
    pids(work)
    node.kill()
    node.start()
    again = Controller(node)
    assert [(r["token"], r["status"], r["pid"]) for r in again.welcome.inventory] == [(token, "started", started.pid)]
    assert again.welcome.inventory[0]["seq"] > started.seq
    (work / "go").touch()
    ended = again.final(token)
    assert (ended.codes, len(pids(work))) == ([5], 1)


def test_a_killed_process_that_forks_tasks_is_replaced(node: NodeUnderTest, work: Path) -> None:
    controller, shepherds = Controller(node), set()
    while True:
        token = controller.launch("while [ ! -e go ]; do sleep 0.05; done; rm go", work_dir=str(work))
        started = controller.wait_status(token, protocol.STARTED)
        shepherd = node.shepherds()[token]
        for forker in set(process.children_of(shepherd)) - {started.pid}:
            os.kill(forker, signal.SIGKILL)
        (work / "go").touch()
        ended = controller.final(token)
        assert (ended.status, ended.codes) == (protocol.ENDED, [0])
        controller.ack(ended)
        if shepherd in shepherds:
            return
        shepherds.add(shepherd)


def test_a_job_that_ended_while_there_was_no_agent_is_reported(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch("while [ ! -e go ]; do sleep 0.05; done; exit 6", work_dir=str(work))
    controller.wait_status(token, protocol.STARTED)
    node.kill()
    (work / "go").touch()
    wait_until(lambda: (node.root / "spool" / token / "final").exists(), what="the end to be on disk")
    node.start()
    again = Controller(node)
    report = again.welcome.inventory[0] if again.welcome.inventory[0]["status"] == "ended" else again.final(token)
    assert (report["codes"] if isinstance(report, dict) else report.codes) == [6]


def test_an_end_reaches_a_shepherd_of_an_earlier_agent(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch("echo $$ >> pids; sleep 100", work_dir=str(work))
    mine = pids(work)
    node.kill()
    node.start()
    again = Controller(node)
    again.send(protocol.EndStep(token, 1.0, "cancelled"))
    assert again.final(token).signals == [signal.SIGTERM]
    assert alive(mine) == []


@pytest.mark.parametrize("agent_too", [False, True])
def test_g4_a_killed_shepherd_means_lost_and_nothing_left(node: NodeUnderTest, work: Path, agent_too: bool) -> None:
    controller = Controller(node)
    script = "python3 -S -c 'import os; os.setsid()' & (setsid sh -c 'trap \"\" TERM; echo $$ >> pids; sleep 100' &) \n"
    token = controller.launch(script + "echo $$ >> pids; sleep 100", work_dir=str(work))
    mine = pids(work, 2)
    controller.wait_status(token, protocol.STARTED)
    if agent_too:
        node.kill()
    os.kill(node.shepherds()[token], signal.SIGKILL)
    if agent_too:
        node.start()
        controller = Controller(node)
    wait_until(lambda: alive(mine) == [], what="the tree to be gone")
    if agent_too and controller.welcome.inventory[0]["status"] == protocol.LOST:
        lost = protocol.Report(**controller.welcome.inventory[0])
    else:
        lost = controller.final(token)
    assert (lost.status, lost.why) == (protocol.LOST, "its shepherd was killed")
    controller.ack(lost)
    wait_until(lambda: not (node.root / "spool" / token).exists())
    assert node.job_processes() == []


def test_b11_g4_a_rebooted_node_loses_its_jobs_and_kills_no_stranger(place: Path, work: Path) -> None:
    with running_node(place / "node", environ={"HPCNODE_BOOT_ID": "first"}) as node:
        controller = Controller(node)
        token = controller.launch("echo $$ >> pids; sleep 100", work_dir=str(work))
        controller.wait_status(token, protocol.STARTED)
        stranger = pids(work)  # to the node of the second boot it is one that got a pid of the first
        os.kill(node.shepherds()[token], signal.SIGSTOP)
        node.kill()
        node.environ = {"HPCNODE_BOOT_ID": "second"}
        node.start()
        again = Controller(node)
        assert [(r["status"], r["why"]) for r in again.welcome.inventory] == [("lost", "the node was rebooted")]
        assert again.welcome.boot_id == "second"
        assert alive(stranger) == stranger


def test_g4_a_session_with_the_number_of_a_task_that_is_gone_is_a_stranger(node: NodeUnderTest, work: Path) -> None:
    """The user has logged in since, and the shell has the pid that a task had."""
    controller = Controller(node)
    token = controller.launch("sleep 100", work_dir=str(work))
    controller.wait_status(token, protocol.STARTED)
    node.kill()
    record = node.root / "spool" / token / "started"
    started = json.loads(record.read_text())
    os.kill(started["shepherd"][0], signal.SIGKILL)
    with subprocess.Popen(["sleep", "100"], start_new_session=True, user=node.user or None) as stranger:
        stat = process.read_stat(stranger.pid)
        assert stat is not None
        started["tasks"][0][:2] = stranger.pid, stat.ticks - 1
        record.write_text(json.dumps(started))
        node.start()
        wait_until((record.parent / "final").exists, what="the end of the step")
        assert stranger.poll() is None
        stranger.kill()


def test_g4_a_pid_that_was_reused_after_the_look_is_not_signalled() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        ticks = process.descendants([os.getpid()])[child.pid]
        process.signal_all({child.pid: ticks - 1}, signal.SIGKILL)
        os.write(child.stdin.fileno(), b"alive")
        assert os.read(child.stdout.fileno(), 5) == b"alive"
        process.signal_all({child.pid: ticks}, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_a_time_limit_that_is_changed_counts_from_the_start(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    script = "trap 'echo warned >> out' USR1; touch up; while :; do sleep 0.05; done"
    token = controller.launch(script, work_dir=str(work), grace_s=0.5, signal_batch_only=True, **FAR)
    controller.wait_status(token, protocol.STARTED)
    wait_until(lambda: (work / "up").exists())
    controller.send(protocol.TimeLimit(token, 1799.0))  # so it is warned now
    wait_until(lambda: (work / "out").exists())
    for limit_s in (None, 3600.0, 0.1):
        controller.send(protocol.TimeLimit(token, limit_s))
    ended = controller.final(token)
    assert (ended.timed_out, ended.why) == (True, "timeout")
    assert (work / "out").read_text().split() == ["warned"]  # once
