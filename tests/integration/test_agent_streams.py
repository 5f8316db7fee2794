"""Streams between tasks and step commands: nothing lost, doubled or unbounded."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_client import (
    AS_ROOT,
    INCARNATION,
    Controller,
    NodeUnderTest,
    StepCommand,
    from_stream,
    new_token,
    running_node,
)
from waiting import PATIENCE_S, wait_until

from hpcnode.wire import protocol
from hpctrain.heartbeat import Heartbeat, HeartbeatStatus

ELSEWHERE = protocol.Address("n2", 5)


@pytest.fixture
def node(place: Path) -> Iterator[NodeUnderTest]:
    with running_node(place / "node") as node:
        yield node


class Reader:
    """Output at a step command: each byte is taken once and acknowledged."""

    def __init__(self) -> None:
        self.data: dict[tuple[int, int], bytearray] = {}
        self.over: set[tuple[int, int]] = set()
        self.biggest = 0

    def take(self, controller: Controller, acknowledge: bool = True) -> None:
        messages, controller.messages = controller.messages, []
        for message, blob in messages:
            if not isinstance(message, protocol.Output):
                controller.messages.append((message, blob))
                continue
            key = (message.task, message.fd)
            have = self.data.setdefault(key, bytearray())
            assert message.offset <= len(have), "a gap"
            have += blob[len(have) - message.offset :]
            self.biggest = max(self.biggest, len(blob))
            if message.eof:
                assert message.offset == len(have)
                self.over.add(key)
            if acknowledge:
                controller.send(protocol.OutputAck(message.token, *key, len(have)))

    def take_all(self, controller: Controller, streams: int) -> None:
        def step() -> bool:
            controller.pump(0.05)
            self.take(controller)
            return len(self.over) >= streams

        wait_until(step, what="the end of the output")


def untaken(controller: Controller) -> int:
    return sum(len(blob) for message, blob in controller.messages if isinstance(message, protocol.Output))


def test_output_comes_with_offsets_and_an_end_before_the_report(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(
        argv=["sh", "-c", "echo out $SLURM_PROCID; echo err >&2"],
        tasks=protocol.TaskSet(2, 2, 4, 1, 2),
        stream_to=ELSEWHERE,
    )
    ended = controller.final(token)
    order = [m.status if isinstance(m, protocol.Report) else m.eof for m, _ in controller.messages[1:]]
    assert order[0] == protocol.STARTED
    assert (order[-1], order.count(True)) == (protocol.ENDED, 4)
    assert {m.to for m, _ in controller.messages if isinstance(m, protocol.Output)} == {ELSEWHERE}
    reader = Reader()
    reader.take(controller)
    assert reader.data == {(2, 1): b"out 2\n", (2, 2): b"err\n", (3, 1): b"out 3\n", (3, 2): b"err\n"}
    assert (node.root / "spool" / token).exists()
    controller.ack(ended)
    wait_until(lambda: not (node.root / "spool" / token).exists(), what="the shepherd to go when all is taken")


def test_one_process_supervises_many_steps_with_streams(node: NodeUnderTest) -> None:
    controller = Controller(node)
    workers = set()
    for number in range(6):
        token = controller.launch(argv=["cat"], stream_to=ELSEWHERE)
        controller.send(protocol.Input(token, 0, 0, True), b"%d" % number)
        reader = Reader()
        reader.take_all(controller, 2)
        ended = controller.final(token)
        workers.add(node.shepherds()[token])
        assert (reader.data[(0, 1)], ended.codes) == (b"%d" % number, [0])
        controller.ack(ended)
        wait_until(lambda token=token: not (node.root / "spool" / token).exists(), what="the step to be forgotten")
    assert len(workers) < 6


def test_output_that_was_not_taken_is_kept_and_the_writer_waits(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(
        argv=["sh", "-c", "head -c 5000000 /dev/zero; touch $HPCSCHED_AGENT_ROOT/done"], stream_to=ELSEWHERE
    )
    wait_until(lambda: controller.pump(0.05) is False and untaken(controller) >= 1 << 20, what="a full window")
    assert untaken(controller) <= (1 << 20) + (64 << 10)
    assert not (node.root / "done").exists()
    reader = Reader()
    reader.take_all(controller, 2)
    assert len(reader.data[(0, 1)]) == 5_000_000
    assert controller.final(token).codes == [0]


@pytest.mark.parametrize("who", ["agent", "controller"])
def test_nothing_is_lost_or_doubled_by_a_reconnect(node: NodeUnderTest, place: Path, who: str) -> None:
    data = os.urandom(5_000_000)
    (place / "data").write_bytes(data)
    controller = Controller(node)
    token = controller.launch(argv=["cat", str(place / "data")], stream_to=ELSEWHERE)
    reader = Reader()
    for count in (1_000_000, 2_500_000, 4_000_000):

        def enough(count: int = count, controller: Controller = controller) -> bool:
            controller.pump(0.05)
            reader.take(controller)
            return len(reader.data.get((0, 1), b"")) >= count

        wait_until(enough, what=f"{count} bytes")
        controller.close()
        if who == "agent":
            node.kill()
            node.start()
        controller = Controller(node)
    reader.take_all(controller, 2)
    assert hashlib.sha256(reader.data[(0, 1)]).digest() == hashlib.sha256(data).digest()
    assert controller.final(token).codes == [0]


def test_what_its_reader_misses_is_sent_again(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(argv=["sh", "-c", "echo once; exec sleep 1000"], stream_to=ELSEWHERE)
    controller.wait(lambda m: isinstance(m, protocol.Output))
    controller.messages.clear()
    controller.send(protocol.OutputAck(token, 0, 1, 2, again=True))
    again = controller.wait(lambda m: isinstance(m, protocol.Output))
    assert (again.offset, again.fd) == (2, 1)
    controller.send(protocol.EndStep(token=token, grace_s=0.0, why="over"))
    controller.final(token)


def test_a_reader_that_misses_only_the_end_gets_it(node: NodeUnderTest) -> None:
    """The end was lost with a controller; a shepherd whose output was taken is gone."""
    controller = Controller(node)
    here = protocol.Address("other", 5)
    token = controller.launch("exit 0", stream_to=here)
    controller.ack(controller.final(token))
    wait_until(lambda: controller.pump(0.05) or not (node.root / "spool" / token).exists(), what="the shepherd to go")
    controller.messages.clear()

    def told() -> bool:
        controller.send(protocol.OutputAck(token, 0, 1, 0, again=True, to=here))
        controller.pump(0.05)
        return (protocol.Output(here, token, protocol.ALL_TASKS, 0, 0, True), b"") in controller.messages

    wait_until(told)


def test_nothing_is_reported_of_an_unknown_token(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = new_token(job=1)
    controller.send(protocol.OutputAck(token, 0, 1, 0, again=True, to=protocol.Address("other", 5)))
    controller.send(protocol.Ping(3))
    controller.wait(lambda m: m == protocol.Pong(3))
    assert not [m for m, _ in controller.messages if isinstance(m, protocol.Output)]


def test_the_end_of_a_cancelled_step_does_not_wait_for_its_reader(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(argv=["cat", "/dev/zero"], stream_to=ELSEWHERE)
    wait_until(lambda: controller.pump(0.05) is False and untaken(controller) >= 1 << 20)
    controller.send(protocol.EndStep(token, 1.0, "cancelled"))
    ended = controller.final(token)
    controller.send(protocol.EndStep(token, 1.0, "nobody reads it any more"))
    controller.ack(controller.reports(token)[-1], ended)
    wait_until(lambda: controller.pump(0.05) or not (node.root / "spool" / token).exists() or _ack_all(controller))


def _ack_all(controller: Controller) -> bool:
    controller.ack(*(m for m, _ in controller.messages if isinstance(m, protocol.Report)))
    return False


def test_input_reaches_task_zero_once_and_ends(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(
        argv=["sh", "-c", "cat; echo end of $SLURM_PROCID"], tasks=protocol.TaskSet(0, 2, 2, 0, 1), stream_to=ELSEWHERE
    )
    controller.send(protocol.Input(token, 0, 0, False), b"hello ")
    controller.send(protocol.Input(token, 0, 0, False), b"hello ")  # doubled
    controller.send(protocol.Input(token, 0, 3, False), b"lo wor")  # overlapping
    controller.send(protocol.Input(token, 0, 50, False), b"too far")  # a gap: refused
    controller.send(protocol.Input(token, 0, 9, True), b"ld\n")
    reader = Reader()
    reader.take_all(controller, 4)
    assert reader.data[(0, 1)] == b"hello world\nend of 0\n"
    assert reader.data[(1, 1)] == b"end of 1\n"
    offsets = [m.offset for m, _ in controller.messages if isinstance(m, protocol.InputAck)]
    assert offsets == sorted(offsets)
    assert offsets[-1] == 12


def test_input_for_all_tasks(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(argv=["cat"], tasks=protocol.TaskSet(0, 3, 3, 0, 1), stream_to=ELSEWHERE, stdin="all")
    controller.send(protocol.Input(token, -1, 0, True), b"to everyone")
    reader = Reader()
    reader.take_all(controller, 6)
    assert {bytes(reader.data[(task, 1)]) for task in range(3)} == {b"to everyone"}


def test_much_input_waits_for_a_slow_program(node: NodeUnderTest, place: Path) -> None:
    controller = Controller(node)
    script = f"while [ ! -e {place}/go ]; do sleep 0.02; done; sha256sum"
    token = controller.launch(argv=["sh", "-c", script], stream_to=ELSEWHERE)
    data = os.urandom(3_000_000)
    sent = taken = 0
    refused = False
    while taken < len(data):
        if sent < len(data) and sent - taken < 512 << 10:
            part = data[sent : sent + (64 << 10)]
            controller.send(protocol.Input(token, 0, sent, False), part)
            sent += len(part)
        elif not refused:
            refused = True
            (place / "go").touch()
        controller.pump(0.02)
        taken = max([m.offset for m, _ in controller.messages if isinstance(m, protocol.InputAck)], default=0)
    controller.send(protocol.Input(token, 0, len(data), True))
    reader = Reader()
    reader.take_all(controller, 2)
    assert reader.data[(0, 1)].split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_a_program_that_reads_no_input_does_not_block_its_sender(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(argv=["sh", "-c", "exec <&-"], stream_to=ELSEWHERE)
    for number in range(10):
        controller.send(protocol.Input(token, 0, number * 50_000, False), b"x" * 50_000)
    controller.wait(lambda m: isinstance(m, protocol.InputAck) and m.offset == 500_000)
    assert controller.final(token).codes == [0]


# ----- step commands at the agent's socket


def test_a_step_command_speaks_with_the_controller_through_the_agent(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100", token=new_token(job=1, attempt=3))
    controller.wait_status(batch, protocol.STARTED)
    command = StepCommand(node)
    asked = from_stream(controller, protocol.StepRequest)
    assert (asked.uid, asked.job_id, asked.attempt) == (os.geteuid(), 1, 3)
    here = protocol.Address("n1", asked.stream)
    step = new_token(attempt=3, step="0")
    token = controller.launch(argv=["sh", "-c", "read word; echo got $word"], token=step, stream_to=here)
    controller.wait_status(token, protocol.STARTED)
    started = protocol.StepStarted(1, 0, [("n1", 0, 1, token)])
    controller.send(protocol.ToStream(asked.stream, protocol.to_json(started)))
    assert command.wait(lambda m: isinstance(m, protocol.StepStarted)) == started
    command.send(protocol.Input(token, 0, 0, False), b"ping\n")
    output = command.wait(lambda m: isinstance(m, protocol.Output) and m.fd == 1)
    assert (output.token, next(b for m, b in command.messages if m == output)) == (token, b"got ping\n")
    command.wait(lambda m: isinstance(m, protocol.Output) and m.eof and m.fd == 1)
    command.send(protocol.OutputAck(token, 0, 1, 9))
    command.send(protocol.StepSignal(10))
    assert from_stream(controller, protocol.StepSignal).message["signum"] == 10
    controller.ack(controller.final(token))
    wait_until(lambda: not (node.root / "spool" / token).exists(), what="the shepherd to go: all was taken")
    assert not [m for m, _ in controller.messages if isinstance(m, (protocol.Output, protocol.InputAck))]
    controller.send(protocol.ToStream(asked.stream, protocol.to_json(protocol.StepEnded([0], [0]))))
    controller.send(protocol.CloseStream(asked.stream))
    command.wait(lambda m: isinstance(m, protocol.StepEnded))
    wait_until(lambda: command.pump(0.05) or command.closed)
    controller.send(protocol.ToStream(asked.stream, protocol.to_json(started)))
    controller.wait(lambda m: m == protocol.CloseStream(asked.stream))


def test_output_waits_until_the_command_knows_that_its_step_started(node: NodeUnderTest) -> None:
    controller = Controller(node)
    controller.launch("sleep 100")
    command = StepCommand(node, 0)
    stream = from_stream(controller, protocol.StepRequest).stream
    token = controller.launch(argv=["echo", "early"], stream_to=protocol.Address("n1", stream))
    controller.final(token)
    started = protocol.StepStarted(1, 0, [("n1", 0, 1, token)])
    controller.send(protocol.ToStream(stream, protocol.to_json(started)))
    command.wait(lambda m: isinstance(m, protocol.Output) and m.eof)
    assert isinstance(command.messages[0][0], protocol.StepStarted)


def test_a_step_command_that_dies_is_told_also_later(node: NodeUnderTest) -> None:
    controller = Controller(node)
    command = StepCommand(node, 0)
    stream = from_stream(controller, protocol.StepRequest).stream
    command.close()
    controller.wait(lambda m: m == protocol.CloseStream(stream))
    other = StepCommand(node, 0)
    stream = wait_until(lambda: _other_stream(controller, stream))
    controller.send(protocol.ToStream(stream, protocol.to_json(protocol.StepWaiting(1, "waits"))))
    other.wait(lambda m: isinstance(m, protocol.StepWaiting))
    controller.close()
    other.close()
    again = Controller(node)
    again.wait(lambda m: m == protocol.CloseStream(stream))


def _other_stream(controller: Controller, known: int) -> int:
    controller.pump(0.05)
    found = [m.stream for m, _ in controller.messages if isinstance(m, protocol.FromStream) and m.stream != known]
    return found[0] if found else 0


def test_a_new_controller_is_asked_for_the_state_of_requests(node: NodeUnderTest) -> None:
    """The earlier agent may have ended before it acted, and its last messages may be lost."""
    controller = Controller(node)
    commands = [StepCommand(node, 0)]
    streams = [from_stream(controller, protocol.StepRequest).stream]
    commands.append(StepCommand(node, 0))
    streams.append(wait_until(lambda: _other_stream(controller, streams[0])))
    controller.send(protocol.ToStream(streams[1], protocol.to_json(protocol.StepWaiting(1, "waits"))))
    commands[1].wait(lambda m: isinstance(m, protocol.StepWaiting))
    controller.close()
    again = Controller(node)
    for stream in streams:
        asked = again.wait(lambda m, its=stream: isinstance(m, protocol.FromStream) and m.stream == its)
        assert asked.message == {"type": "StepAsked"}
    end = protocol.StepEnded([], [], "ask", again=True)
    again.send(protocol.ToStream(streams[0], protocol.to_json(end)))
    assert commands[0].wait(lambda m: isinstance(m, protocol.StepEnded)) == end


def test_a_question_to_the_api_is_not_asked_twice(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100", token=new_token(job=1))
    controller.wait_status(batch, protocol.STARTED)
    command = Controller(node, greet=False)
    command.send(protocol.ApiRequest(1, "GET", "/v1/ping"))
    from_stream(controller, protocol.ApiRequest)
    controller.close()
    again = Controller(node)
    answer = command.wait(lambda m: isinstance(m, protocol.ApiAnswer))
    assert answer.status == 503
    assert not [m for m, _ in again.messages if isinstance(m, protocol.FromStream)]


def test_output_that_comes_through_the_controller_waits_as_well(node: NodeUnderTest) -> None:
    controller = Controller(node)
    command = StepCommand(node, 0)
    stream = from_stream(controller, protocol.StepRequest).stream
    here = protocol.Address("n1", stream)
    controller.send(
        protocol.ToStream(stream, protocol.to_json(protocol.Output(here, "token", 0, 1, 0, False))), b"early"
    )
    started = protocol.StepStarted(1, 0, [("n2", 0, 1, "token")])
    controller.send(protocol.ToStream(stream, protocol.to_json(started)))
    command.wait(lambda m: isinstance(m, protocol.Output))
    assert [type(m) for m, _ in command.messages] == [protocol.StepStarted, protocol.Output]


def test_a_command_that_asks_while_the_controller_is_away_waits_for_it(node: NodeUnderTest) -> None:
    Controller(node).close()
    agent_is_alone(node)
    command = StepCommand(node, 0)
    assert "waits for it" in command.wait(lambda m: isinstance(m, protocol.StepWaiting)).text
    gone = StepCommand(node, 0)
    gone.wait(lambda m: isinstance(m, protocol.StepWaiting))
    gone.close()
    again = Controller(node)
    stream = from_stream(again, protocol.StepRequest).stream
    again.send(protocol.ToStream(stream, protocol.to_json(protocol.StepEnded([0], [0]))))
    assert command.wait(lambda m: isinstance(m, protocol.StepEnded)).codes == [0]
    assert len([m for m, _ in again.messages if isinstance(m, protocol.FromStream)]) == 1


def agent_is_alone(node: NodeUnderTest) -> None:
    """Wait until the agent has noticed the end of its controller."""

    def told_to_wait() -> bool:
        command = StepCommand(node, 0)
        command.pump(0.05)
        command.close()
        return any(isinstance(m, protocol.StepWaiting) for m, _ in command.messages)

    wait_until(told_to_wait, what="the agent to be without a controller")


def test_a_command_is_refused_for_a_job_that_is_not_here_or_not_its_users(node: NodeUnderTest) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100", token=new_token(job=1))
    controller.wait_status(batch, protocol.STARTED)
    stranger = StepCommand(node, job_id=2)
    assert "job 2 does not run on this node" in stranger.wait(lambda m: isinstance(m, protocol.StepEnded)).error
    if AS_ROOT:
        said = _ask_as_nobody(node)
        assert b"job 1 does not run on this node as uid 65534" in said
    assert not [m for m, _ in controller.messages if isinstance(m, protocol.FromStream)]


def _ask_as_nobody(node: NodeUnderTest) -> bytes:
    request = protocol.encode(protocol.StepRequest(protocol.VERSION, 1, {}, ["true"], "/", {}))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(node.socket))
        sock.sendall(request)
        answer = b""
        while part := sock.recv(65536):
            answer += part
        os.write(write_end, answer)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


def test_a_command_cannot_speak_for_another_stream(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch(argv=["cat"], stream_to=protocol.Address("n1", 12345))
    controller.wait_status(token, protocol.STARTED)
    command = StepCommand(node, 0)
    from_stream(controller, protocol.StepRequest)
    command.send(protocol.Input(token, 0, 0, True), b"mine?")
    assert from_stream(controller, protocol.Input).message["token"] == token  # the controller decides, not the agent
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 1.0))
    assert controller.final(token).codes == [0]


def test_a_command_that_does_not_read_holds_up_nobody_else(node: NodeUnderTest) -> None:
    controller = Controller(node)
    slow = StepCommand(node, 0)
    stream = from_stream(controller, protocol.StepRequest).stream
    token = controller.launch(argv=["cat", "/dev/zero"], stream_to=protocol.Address("n1", stream))
    controller.send(protocol.ToStream(stream, protocol.to_json(protocol.StepStarted(1, 0, [("n1", 0, 1, token)]))))
    controller.wait_status(token, protocol.STARTED)
    assert controller.final(controller.launch("true", token=new_token(job=2))).codes == [0]
    slow.close()
    controller.send(protocol.EndStep(token, 1.0, "its command is gone"))
    assert controller.final(token).status == protocol.ENDED


# ----- training programs


def test_a_training_program_reports_its_progress(node: NodeUnderTest) -> None:
    controller = Controller(node)
    controller.wait_status(controller.launch("sleep 100", token=new_token(job=1, attempt=3)), protocol.STARTED)
    heartbeat = Heartbeat({"HPCSCHED_SOCKET": str(node.socket), "HPCSCHED_JOB_ID": "1"})
    assert heartbeat.due()
    assert heartbeat.send(word(step=7))
    assert not heartbeat.due()
    said = from_stream(controller, protocol.Progress)
    assert (said.uid, said.job_id, said.attempt, said.message["step"]) == (os.geteuid(), 1, 3, 7)
    assert heartbeat.send(word(step=8))
    controller.close()
    again = Controller(node)
    assert from_stream(again, protocol.Progress).message["step"] == 8


def test_commands_of_other_users_are_not_passed_on(node: NodeUnderTest) -> None:
    controller = Controller(node)
    Heartbeat({"HPCSCHED_SOCKET": str(node.socket), "HPCSCHED_JOB_ID": "1"}).send(word(step=7))
    wait_until(lambda: b"does not run on this node" in (node.root / "log").read_bytes())
    controller.wait_status(controller.launch("sleep 100"), protocol.STARTED)
    assert not [m for m, _ in controller.messages if isinstance(m, protocol.FromStream)]


def test_without_an_agent_nothing_is_said(tmp_path: Path) -> None:
    assert not Heartbeat({}).due()
    assert not Heartbeat({"HPCSCHED_SOCKET": "/none", "HPCSCHED_JOB_ID": ""}).due()
    assert not Heartbeat({"HPCSCHED_SOCKET": str(tmp_path / "none"), "HPCSCHED_JOB_ID": "1"}).send(word(step=1))


def word(step: int) -> HeartbeatStatus:
    return HeartbeatStatus(
        step=step,
        total_steps=10,
        loss=float("nan"),
        samples_per_s=float("inf"),
        steps_per_s=2.0,
        checkpoint_step=5,
        checkpoint_at_s=0.0,
        goodput=0.5,
        note="",
    )
