"""hrun and hrsh when the node's agent ends: they reconnect, and nothing is lost or doubled."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from step_commands import Controller, Running

from hpcnode.wire.protocol import (
    ALL_TASKS,
    Goodbye,
    Input,
    InputAck,
    OutputAck,
    StepBack,
    StepEnded,
    StepRequest,
    StepSignal,
    StepWaiting,
)
from hpcnode.wire.protocol import Address as To

Run = Callable[..., Running]
HERE = To(node="", stream=1)


def come_back(controller: Controller, *, started: bool = True) -> None:
    """End the connection as a killed agent does, and become the next agent."""
    controller.hang_up()
    back, _ = controller.take(StepBack)
    assert back.started is started
    if started:
        controller.say(StepWaiting(job_id=12, text=""))


@pytest.mark.parametrize("module", ["hpcnode.commands.hrun", "hpcnode.commands.hrsh"])
def test_output_goes_on_where_it_was(controller: Controller, run: Run, module: str) -> None:
    command = run("n1", "prog", module=module)
    controller.start(tasks=1)
    controller.output(0, b"one\ntwo\n")
    controller.take(OutputAck, lambda ack: ack.offset == 8)
    come_back(controller)
    again, _ = controller.take(OutputAck, lambda ack: ack.again)
    assert (again.token, again.offset) == ("token0", 8)
    controller.output(0, b"two\nthree\n", offset=4)  # the shepherd had not heard of the acknowledgement
    controller.output(0, b"", offset=14, eof=True)
    controller.end(0, close=(2,))
    assert command.finish() == (0, "one\ntwo\nthree\n", "")


def test_input_that_may_be_lost_is_said_again(controller: Controller, run: Run) -> None:
    hrun = run("-n1", "prog")
    controller.start(tasks=1)
    hrun.feed(b"onetwo")
    controller.take(Input)
    controller.say(InputAck(to=HERE, token="token0", task=0, offset=3))
    hrun.feed(b"three")
    assert hrun.process.stdin is not None
    hrun.process.stdin.close()
    hrun.process.stdin = None
    while not controller.take(Input)[0].eof:
        pass
    come_back(controller)
    again, data = controller.take(Input)
    assert (again.token, again.task, again.offset, again.eof, data) == ("token0", 0, 3, True, b"twothree")
    controller.end(0)
    assert hrun.finish()[0] == 0


def test_input_for_all_is_kept_until_all_that_live_have_it(controller: Controller, run: Run) -> None:
    hrun = run("-iall", "prog")
    controller.start(tasks=2)
    hrun.feed(b"words")
    for _ in range(2):
        controller.take(Input)
    controller.say(InputAck(to=HERE, token="token0", task=0, offset=5))
    come_back(controller)
    assert sorted(controller.take(Input)[0].token for _ in range(2)) == ["token0", "token1"]
    for fd in (1, 2):
        controller.output(1, b"", fd=fd, eof=True)  # it has ended without taking any
    controller.take(OutputAck, lambda ack: ack.again)
    come_back(controller)
    controller.take(OutputAck, lambda ack: ack.again)
    hrun.feed(b"more")
    more, data = controller.take(Input)
    assert (more.task, more.offset, data) == (ALL_TASKS, 5, b"more")
    for fd in (1, 2):
        controller.output(0, b"", fd=fd, eof=True)
    controller.say(StepEnded(codes=[0, 0], signals=[0, 0]))
    assert hrun.finish()[0] == 0


def test_a_signal_that_comes_meanwhile_is_passed_on_afterwards(controller: Controller, run: Run) -> None:
    hrun = run("-n1", "-i", "none", "prog")
    controller.start(tasks=1)
    controller.output(0, b"ready\n")
    controller.take(OutputAck)
    controller.hang_up()
    hrun.process.send_signal(signal.SIGUSR1)
    controller.take(StepBack)
    controller.say(StepWaiting(job_id=12, text=""))
    assert controller.take(StepSignal)[0].signum == signal.SIGUSR1
    controller.end(0)
    assert hrun.finish()[0] == 0


def test_a_request_that_no_agent_has_read_is_made_again(controller: Controller, run: Run) -> None:
    hrun = run("-n1", "-i", "none", "prog")
    request, _ = controller.take(StepRequest)
    come_back(controller, started=False)
    controller.say(StepEnded([], [], again=True))
    controller.hang_up()
    assert controller.start(tasks=1) == request
    controller.end(0)
    assert hrun.finish() == (0, "", "")


def test_a_client_returns_to_an_agent_that_restarts_repeatedly(controller: Controller, run: Run) -> None:
    hrun = run("-n1", "-i", "none", "prog")
    controller.start(tasks=1)
    for _ in range(3):
        controller.hang_up()
        controller.take(StepBack)
    controller.say(StepWaiting(job_id=12, text=""))
    controller.output(0, b"at last\n", eof=True)
    controller.end(0, close=(2,))
    assert hrun.finish() == (0, "at last\n", "")


def test_a_step_that_the_next_agent_does_not_know_is_lost(controller: Controller, run: Run) -> None:
    hrun = run("prog")
    controller.start()
    controller.hang_up()
    controller.take(StepBack)
    controller.say(Goodbye("the previous agent had closed it"))
    code, _, err = hrun.finish()
    assert code == 1
    assert err.startswith("hrun: error: lost the connection to the node's agent: the previous agent had closed it.")


def test_output_that_is_missing_at_the_end_is_fetched_from_the_next_agent(controller: Controller, run: Run) -> None:
    hrun = run("-n1", "-i", "none", "prog")
    controller.start(tasks=1)
    controller.say(StepEnded(codes=[3], signals=[0]))
    come_back(controller)
    controller.take(OutputAck, lambda ack: ack.again)
    for fd, text in ((1, b"whole\n"), (2, b"")):
        controller.output(0, text, fd=fd, eof=True)
    assert hrun.finish() == (3, "whole\n", "hrun: error: n1: task 0: Exited with exit code 3\n")
