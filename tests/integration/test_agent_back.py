"""Step commands outlive their agent: the next one gives each its own stream again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_client import Controller, NodeUnderTest, StepCommand, from_stream, new_token, running_node
from waiting import wait_until

from hpcnode.wire import protocol

BACK = protocol.StepBack(started=True)
# A process that says one frame to the agent, tells us that it has, and stays until its input ends.
SAYER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[2]))
print("said", flush=True)
print(sock.recv(1 << 16).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(place: Path) -> Iterator[NodeUnderTest]:
    with running_node(place / "node") as node:
        yield node


def sayer(node: NodeUnderTest, message: protocol.Message) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SAYER, str(node.socket), protocol.encode(message).hex()]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "said\n"
    return process


def asked(controller: Controller, kind: type, stream: int) -> protocol.FromStream:
    return controller.wait(
        lambda m: isinstance(m, protocol.FromStream) and (m.message["type"], m.stream) == (kind.__name__, stream)
    )


def replaced(node: NodeUnderTest) -> Controller:
    """Kill the agent, start the next one, and connect to it."""
    node.kill()
    node.start()
    return Controller(node)


@pytest.mark.parametrize("controller_first", [True, False])
def test_it_has_its_stream_again_and_no_output_is_lost(node: NodeUnderTest, controller_first: bool) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100", token=new_token(job=1, attempt=3))
    controller.wait_status(batch, protocol.STARTED)
    command = StepCommand(node)
    stream = from_stream(controller, protocol.StepRequest).stream
    here = protocol.Address("n1", stream)
    token = controller.launch(
        argv=["sh", "-c", "echo one; read word; echo got $word"], token=new_token(attempt=3, step="0"), stream_to=here
    )
    started = protocol.StepStarted(1, 0, [("n1", 0, 1, token)])
    controller.send(protocol.ToStream(stream, protocol.to_json(started)))
    command.wait(lambda m: isinstance(m, protocol.Output) and m.fd == 1)
    node.kill()
    command.close()  # it never acknowledged what came: as if that had been under way when the agent died
    node.start()
    if controller_first:
        controller = Controller(node)
        command = StepCommand(node, first=BACK)
    else:
        command = StepCommand(node, first=BACK)
        controller = Controller(node)
    back = asked(controller, protocol.StepAsked, stream)
    assert (back.uid, back.job_id, back.attempt) == (os.geteuid(), 1, 3)
    command.wait(lambda m: isinstance(m, protocol.StepWaiting))
    again = command.wait(lambda m: isinstance(m, protocol.Output) and m.fd == 1)
    assert (again.to, again.token, again.offset) == (here, token, 0)
    command.send(protocol.OutputAck(token, 0, 1, 4))
    command.send(protocol.Input(token, 0, 0, False), b"word\n")
    command.wait(lambda m: isinstance(m, protocol.Output) and (m.fd, m.offset) == (1, 4) and not m.eof)
    controller.send(protocol.ToStream(stream, protocol.to_json(protocol.StepEnded([0], [0]))))
    command.wait(lambda m: isinstance(m, protocol.StepEnded))
    command.close()
    controller.wait(lambda m: m == protocol.CloseStream(stream))
    assert not list((node.root / "streams").iterdir())


def test_a_job_is_not_reported_gone_before_it_is(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100")
    controller.wait_status(batch, protocol.STARTED)
    request = protocol.StepRequest(protocol.VERSION, 1, {"ntasks": "1"}, ["true"], "/", {})
    command = sayer(node, request)
    stream = from_stream(controller, protocol.StepRequest).stream
    controller = replaced(node)
    controller.send(protocol.ToStream(stream, protocol.to_json(protocol.StepWaiting(1, ""))))
    controller.send(protocol.Probe(7))
    controller.wait(lambda m: isinstance(m, protocol.Facts))  # answered after the word to the stream
    assert not [m for m, _ in controller.messages if isinstance(m, protocol.CloseStream)]
    command.kill()
    command.communicate()
    controller.wait(lambda m: m == protocol.CloseStream(stream))


def test_one_that_ended_with_its_agent_is_gone(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100")
    controller.wait_status(batch, protocol.STARTED)
    command = sayer(node, protocol.StepRequest(protocol.VERSION, 1, {"ntasks": "1"}, ["true"], "/", {}))
    stream = from_stream(controller, protocol.StepRequest).stream
    node.kill()
    command.kill()
    command.communicate()
    node.start()
    controller = Controller(node)
    controller.send(protocol.ToStream(stream, protocol.to_json(protocol.StepWaiting(1, ""))))
    controller.wait(lambda m: m == protocol.CloseStream(stream))


def test_no_other_process_gets_a_stream(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100")
    controller.wait_status(batch, protocol.STARTED)
    first = StepCommand(node)
    stream = from_stream(controller, protocol.StepRequest).stream
    controller = replaced(node)
    other = sayer(node, BACK)
    assert other.stdout is not None
    message, _ = next(protocol.Framer().feed(bytes.fromhex(other.stdout.readline())))
    assert isinstance(message, protocol.Goodbye)
    other.communicate()
    command = StepCommand(node, first=BACK)
    asked(controller, protocol.StepAsked, stream)
    first.close()
    command.close()


def test_a_client_without_a_request_sends_it_again(node: NodeUnderTest) -> None:
    command = StepCommand(node, first=protocol.StepBack(started=False))
    assert command.wait(lambda m: isinstance(m, protocol.StepEnded)).again


def test_a_step_that_cannot_be_kept_is_refused(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100")
    controller.wait_status(batch, protocol.STARTED)
    (node.root / "streams").rmdir()
    command = StepCommand(node)
    assert (
        "cannot start a step: this node cannot record"
        in command.wait(lambda m: isinstance(m, protocol.StepEnded)).error
    )
    wait_until(lambda: command.pump(0.05) or command.closed)


def test_foreign_files_among_the_streams_do_not_stop_an_agent(node: NodeUnderTest) -> None:
    """A file system may leave names of its own there, as NFS does of a file that is deleted while it is open."""
    (node.root / "streams" / ".nfs0000000000a1b2c3").touch()
    controller = replaced(node)
    assert isinstance(controller.welcome, protocol.Welcome)
