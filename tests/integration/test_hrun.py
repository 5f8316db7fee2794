"""hrun and hrsh as processes, against a small controller of the test's own behind a real unix socket."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from step_commands import HERE, Controller, Running
from waiting import PATIENCE_S, wait_until

from hpcnode.wire import protocol, sockets
from hpcnode.wire.protocol import Input, Output, OutputAck, StepEnded, StepRequest, StepSignal, StepStarted, StepWaiting
from hpcsched import paths


def test_the_request_says_what_was_typed(controller: Controller, run: Callable[..., Running], tmp_path: Path) -> None:
    hrun = run(
        "-N2", "-n4", "-lu", "--gpus-per-task=a100:1", "--mem", "2G", "--overl", "-K", "prog", "-n", "x", FOO="1"
    )
    request = controller.start()
    controller.end(0, 0)
    assert hrun.finish()[0] == 0
    assert request.job_id == 12
    assert request.argv == ["prog", "-n", "x"]
    assert request.work_dir == str(tmp_path)
    assert request.env["FOO"] == "1"
    assert request.options == {
        "nodes": "2",
        "ntasks": "4",
        "label": True,
        "gpus-per-task": "a100:1",
        "mem": "2G",
        "overlap": True,
        "kill-on-bad-exit": True,
    }


def test_output_comes_in_whole_lines_each_with_its_task(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("-l", "prog")
    controller.start(tasks=11)
    controller.output(0, b"on")
    controller.output(10, b"ten\nunfini")
    controller.output(0, b"e\ntwo\n", offset=2)
    controller.output(0, b"e\ntwo\n", offset=2)  # twice: shown once
    controller.output(10, b"finished", offset=8 + 2)
    controller.output(3, b"oops\n", fd=2)
    for task in range(11):
        controller.output(task, b"", offset={0: 8, 10: 18}.get(task, 0), eof=True)
        controller.output(task, b"", fd=2, offset={3: 5}.get(task, 0), eof=True)
    controller.say(StepEnded(codes=[0] * 11, signals=[0] * 11))
    code, out, err = hrun.finish()
    assert out.splitlines() == ["10: ten", " 0: one", " 0: two", "10: unfinifinished"]
    assert err == " 3: oops\n"
    assert code == 0


def test_output_is_acknowledged_when_it_is_written(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog")
    controller.start(tasks=1)
    big = b"x" * (300 << 10)  # more than the pipe that nobody reads yet holds
    controller.output(0, b"hello\n")
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.task, ack.fd, ack.offset) == ("token0", 0, 1, 6)
    controller.output(0, big, offset=6)
    controller.output(0, b"e", fd=2)
    controller.take(OutputAck, lambda ack: ack.fd == 2)  # the loop goes on although stdout is full
    assert not [ack for ack in controller.came(OutputAck) if ack.fd == 1]
    controller.output(0, b"", offset=6 + len(big), eof=True)
    controller.output(0, b"", fd=2, offset=1, eof=True)
    controller.say(StepEnded(codes=[0], signals=[0]))
    code, out, err = hrun.finish()
    assert (code, len(out), err) == (0, 6 + len(big), "e")


def test_output_after_the_end_of_the_step_is_waited_for(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog")
    controller.start(tasks=1)
    controller.say(StepEnded(codes=[0], signals=[0]))
    controller.output(0, b"late\n", eof=True)
    controller.output(0, b"", fd=2, eof=True)
    assert hrun.finish() == (0, "late\n", "")


def test_what_is_missing_of_the_output_is_asked_for_again(controller: Controller, run: Callable[..., Running]) -> None:
    """The message was lost when a controller ended."""
    hrun = run("prog")
    controller.start(tasks=1)
    controller.output(0, b"first\n")
    ack, _ = controller.take(OutputAck)
    assert (ack.offset, ack.again) == (6, False)
    controller.output(0, b"third\n", offset=13)
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.fd, ack.offset, ack.again) == ("token0", 1, 6, True)
    controller.output(0, b"second\nthird\n", offset=6)
    controller.output(0, b"", offset=19, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0], signals=[0]))
    assert hrun.finish() == (0, "first\nsecond\nthird\n", "")


def test_output_after_the_end_of_the_step_is_asked_for_again_and_again(
    controller: Controller, run: Callable[..., Running]
) -> None:
    """A controller that was killed on the way has to be started again first."""
    hrun = run("prog", changes="import hpcnode.commands.step_client as c; c.DRAIN_S = 1")
    controller.start(tasks=1)
    controller.say(StepEnded(codes=[0], signals=[0]))
    for _ in range(2):
        controller.take(OutputAck, lambda ack: ack.again)
    controller.output(0, b"late\n", eof=True)
    controller.output(0, b"", fd=2, eof=True)
    assert hrun.finish() == (0, "late\n", "")


def test_after_a_reconnect_possibly_lost_messages_are_requested_again(
    controller: Controller, run: Callable[..., Running]
) -> None:
    hrun = run("prog")
    controller.start(tasks=2)
    controller.output(0, b"first\n")
    ack, _ = controller.take(OutputAck)
    controller.output(1, b"", eof=True)
    controller.output(1, b"", fd=2, eof=True)
    controller.say(StepWaiting(job_id=12, text=""))
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.offset, ack.again) == ("token0", 6, True)  # and nothing of task 1, which has closed all
    controller.output(0, b"first\nsecond\n")  # word of the first line was lost as well
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.offset, ack.again) == ("token0", 13, False)
    controller.output(0, b"second\n", offset=6)
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.offset, ack.again) == ("token0", 13, False)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0, 0], signals=[0, 0]))
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.offset, ack.again) == ("token0", 13, True)
    controller.output(0, b"third\n", offset=13, eof=True)
    assert hrun.finish() == (0, "first\nsecond\nthird\n", "")


def test_an_end_for_all_tasks_completes_their_output(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("-l", "prog")
    controller.start()
    controller.output(0, b"first\n")
    controller.output(1, b"other\n")
    controller.say(StepEnded(codes=[0, 0], signals=[0, 0]))
    asked = [controller.take(OutputAck, lambda ack: ack.again)[0].token for _ in range(2)]
    for token in asked:
        controller.say(Output(to=HERE, token=token, task=protocol.ALL_TASKS, fd=0, offset=0, eof=True))
    assert hrun.finish() == (0, "0: first\n1: other\n", "")


def test_what_never_comes_is_given_up(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog", changes="import hpcnode.commands.step_client as c; c.DRAIN_S = c.ASK_AGAIN_S")
    controller.start(tasks=1)
    controller.say(StepEnded(codes=[0], signals=[0]))
    controller.say(protocol.Pong(controller.take(protocol.Ping)[0].request))  # somebody is there, and has nothing
    assert hrun.finish() == (1, "", "hrun: error: some of the tasks' output did not arrive\n")


def test_it_is_asked_for_again_when_a_node_comes_to_a_new_controller(
    controller: Controller, run: Callable[..., Running]
) -> None:
    """Nothing need come after what was lost."""
    hrun = run("prog")
    controller.start()
    controller.output(0, b"first\n")
    controller.take(OutputAck)
    controller.say(StepWaiting(job_id=12, text=""))
    asked = [controller.take(OutputAck)[0] for _ in range(2)]
    assert [(ack.token, ack.fd, ack.offset, ack.again) for ack in asked] == [
        ("token0", 1, 6, True),
        ("token1", 1, 0, True),
    ]
    controller.output(0, b"", offset=6, eof=True)
    controller.output(1, b"", eof=True)
    controller.end(0, 0, close=(2,))
    assert hrun.finish() == (0, "first\n", "")


def test_what_has_not_come_by_the_end_is_asked_for(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog")
    controller.start(tasks=1)
    controller.say(StepEnded(codes=[0], signals=[0]))
    ack, _ = controller.take(OutputAck)
    assert (ack.token, ack.fd, ack.offset, ack.again) == ("token0", 1, 0, True)
    controller.output(0, b"late\n", eof=True)
    ack, _ = controller.take(OutputAck, lambda message: message.again and message.fd == 2)
    assert ack.token == "token0"
    controller.output(0, b"", fd=2, eof=True)
    assert hrun.finish() == (0, "late\n", "")


@pytest.mark.parametrize(
    ("codes", "signals", "code", "text"),
    [
        ((0, 0), (0, 0), 0, ""),
        ((0, 7), (0, 0), 7, "hrun: error: n2: task 1: Exited with exit code 7\n"),
        ((3, 0), (0, 9), 137, "hrun: error: n1: task 0: Exited with exit code 3\nhrun: error: n2: task 1: Killed\n"),
        (
            (2, 2),
            (0, 0),
            2,
            "hrun: error: n1: task 0: Exited with exit code 2\nhrun: error: n2: task 1: Exited with exit code 2\n",
        ),
    ],
)
def test_the_exit_code_is_the_highest(
    controller: Controller,
    run: Callable[..., Running],
    codes: tuple[int, ...],
    signals: tuple[int, ...],
    code: int,
    text: str,
) -> None:
    hrun = run("prog")
    controller.start()
    controller.end(*codes, signals=signals)
    assert hrun.finish() == (code, "", text)


def test_stdin_goes_to_task_0_and_stops_at_the_window(controller: Controller, run: Callable[..., Running]) -> None:
    data = bytes(range(256)) * 2048  # 512 KiB
    hrun = run("prog")
    controller.start()
    assert hrun.process.stdin is not None
    hrun.process.stdin.write(data[:300_000])  # the window takes 256 KiB of it, the rest fits into the pipe
    hrun.process.stdin.flush()
    got = bytearray()
    while len(got) < 256 << 10:
        message, blob = controller.take(Input)
        assert (message.token, message.task, message.offset, message.eof) == ("token0", 0, len(got), False)
        got += blob
    assert len(got) == 256 << 10
    controller.output(0, b"e", fd=2)
    controller.take(OutputAck)  # hrun is awake, yet sends no more input before it is told to
    assert not [message for message, _ in controller._came if isinstance(message, Input)]
    controller.say(protocol.InputAck(to=HERE, token="token0", task=0, offset=len(got)))
    while len(got) < 300_000:
        got += controller.take(Input)[1]
    controller.say(protocol.InputAck(to=HERE, token="token0", task=0, offset=len(got)))
    hrun.process.stdin.write(data[300_000:])
    hrun.process.stdin.close()
    eof = False
    while not eof:
        message, blob = controller.take(Input)
        got += blob
        eof = message.eof
        controller.say(protocol.InputAck(to=HERE, token="token0", task=0, offset=len(got)))
    assert bytes(got) == data
    controller.output(0, b"", fd=2, offset=1, eof=True)
    controller.output(0, b"", eof=True)
    controller.end(0, 0)
    hrun.process.stdin = None
    assert hrun.finish()[0] == 0


def test_input_all_goes_to_every_node(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("-i", "all", "prog")
    assert controller.start().options["input"] == "all"
    assert hrun.process.stdin is not None
    hrun.process.stdin.write(b"abc")
    hrun.process.stdin.close()
    hrun.process.stdin = None
    said = [controller.take(Input) for _ in range(4)]
    assert sorted((m.token, m.task, m.offset, m.eof, blob) for m, blob in said) == [
        ("token0", -1, 0, False, b"abc"),
        ("token0", -1, 3, True, b""),
        ("token1", -1, 0, False, b"abc"),
        ("token1", -1, 3, True, b""),
    ]
    controller.end(0, 0)
    assert hrun.finish()[0] == 0


def test_files_shared_by_tasks_are_written_here_and_others_on_the_nodes(
    controller: Controller, run: Callable[..., Running], tmp_path: Path
) -> None:
    hrun = run("-o", "logs/%j.%s.out", "-e", "err.%t", "-i", "none", "prog")
    request = controller.start()
    assert request.options["error"] == "err.%t"
    assert request.options["input"] == "/dev/null"
    assert "output" not in request.options
    controller.output(0, b"a\n")
    controller.output(1, b"b\n")
    for task in (0, 1):
        controller.output(task, b"", offset=2, eof=True)
    controller.say(StepEnded(codes=[0, 0], signals=[0, 0]))
    assert hrun.finish() == (0, "", "")
    assert (tmp_path / "logs" / "12.3.out").read_text() == "a\nb\n"


def test_output_of_one_task_only(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("-o", "1", "prog")
    controller.start()
    controller.output(0, b"no\n")
    controller.output(1, b"yes\n")
    for task, offset in ((0, 3), (1, 4)):
        controller.output(task, b"", offset=offset, eof=True)
        controller.output(task, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0, 0], signals=[0, 0]))
    assert hrun.finish() == (0, "yes\n", "")


def test_an_interrupt_tells_and_a_second_one_kills(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog", changes="m.AGAIN_S = 1000.0")
    controller.start()
    controller.output(1, b"", eof=True)
    controller.output(1, b"", fd=2, eof=True)
    controller.output(0, b"go\n")
    controller.take(OutputAck, lambda ack: ack.task == 0)  # it runs, and has seen the rest
    hrun.process.send_signal(signal.SIGINT)
    assert hrun.process.stderr is not None
    told = [hrun.process.stderr.readline().decode() for _ in range(3)]
    assert told == [
        "hrun: interrupt (one more within 1 sec to abort)\n",
        "hrun: StepId=12.3 task 0: running\n",
        "hrun: StepId=12.3 task 1: exited\n",
    ]
    hrun.process.send_signal(signal.SIGINT)
    message, _ = controller.take(StepSignal)
    assert message.signum == signal.SIGKILL
    controller.output(0, b"", offset=3, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0, 0], signals=[9, 0]))
    assert hrun.finish()[0] == 137


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_other_signals_are_passed_on(
    controller: Controller, run: Callable[..., Running], signum: signal.Signals
) -> None:
    hrun = run("prog")
    controller.start()
    controller.output(0, b"go\n")
    controller.take(OutputAck)
    hrun.process.send_signal(signum)
    assert controller.take(StepSignal)[0].signum == signum
    controller.output(0, b"", offset=3, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.end(0, 0)
    assert hrun.finish()[0] == 0


def test_a_closed_stdout_is_told_to_the_tasks(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog")
    controller.start(tasks=1)
    assert hrun.process.stdout is not None
    hrun.process.stdout.close()
    controller.output(0, b"nobody reads this\n")
    assert controller.take(StepSignal)[0].signum == signal.SIGPIPE
    controller.take(OutputAck, lambda ack: ack.offset == 18)  # dropped, not kept
    controller.output(0, b"", offset=18, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0], signals=[13]))
    assert hrun.process.wait(PATIENCE_S) == 141


def test_a_long_wait_is_told_of(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog")
    controller.take(StepRequest)
    controller.say(StepWaiting(job_id=12, text="job 12 queued and waiting for resources"))
    assert hrun.process.stderr is not None
    assert hrun.process.stderr.readline() == b"hrun: job 12 queued and waiting for resources\n"
    controller.say(StepWaiting(job_id=12, text="job 12 has been allocated resources"))
    assert hrun.process.stderr.readline() == b"hrun: job 12 has been allocated resources\n"
    hrun.process.send_signal(signal.SIGINT)  # nothing runs yet: this is the end
    code, _, err = hrun.finish()
    assert (code, err) == (1, "hrun: error: cancelled by signal 2 while waiting\n")


def test_a_short_wait_is_not(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog", changes="m.QUIET_S = 1000.0")
    controller.take(StepRequest)
    controller.say(StepWaiting(job_id=12, text="job 12 queued and waiting for resources"))
    controller.say(StepStarted(job_id=12, step=0, tasks=[("n1", 0, 1, "token0")]))
    controller.end(0)
    assert hrun.finish() == (0, "", "")


def test_immediate_does_not_wait(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("--immediate=0", "prog")
    controller.take(StepRequest)
    code, _, err = hrun.finish()
    assert (code, err) == (1, "hrun: error: cannot start the step at once, as --immediate asks\n")


def test_wait_ends_the_rest_after_the_first_task(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("--wait=1", "prog")
    controller.start()
    controller.output(0, b"", eof=True)
    controller.output(0, b"", fd=2, eof=True)
    assert controller.take(StepSignal)[0].signum == signal.SIGKILL
    controller.output(1, b"", eof=True)
    controller.output(1, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0, 0], signals=[0, 9]))
    assert hrun.finish()[0] == 137


def test_a_refusal_is_shown(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("-n9", "prog")
    controller.take(StepRequest)
    controller.say(StepEnded(codes=[], signals=[], error="cannot give the step 9 tasks: the job has 8 cpus on 2 nodes"))
    assert hrun.finish() == (1, "", "hrun: error: cannot give the step 9 tasks: the job has 8 cpus on 2 nodes\n")


def test_resize_asks_for_nothing_else(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("--resize=2")
    request, _ = controller.take(StepRequest)
    assert (request.options["resize"], request.argv) == ("2", [])
    controller.say(StepEnded(codes=[], signals=[]))
    assert hrun.finish() == (0, "", "")


def lose_the_step(controller: Controller) -> None:
    """The messages about a step that no controller has started, then the end."""
    controller.say(StepEnded([], [], "the controller was restarted before it could start the step", again=True))
    controller.hang_up()


@pytest.mark.parametrize("started", [False, True])
def test_a_step_that_was_lost_before_it_ran_is_asked_for_again(
    controller: Controller, run: Callable[..., Running], tmp_path: Path, started: bool
) -> None:
    hrun = run("-n1", "-o", "out", "-i", "none", "prog")
    request = controller.start(1) if started else controller.take(StepRequest)[0]
    lose_the_step(controller)
    assert controller.start(1) == request
    controller.output(0, b"once\n")
    controller.output(0, b"", offset=5, eof=True)
    controller.end(0, close=(2,))
    assert hrun.finish() == (0, "", "")
    assert (tmp_path / "out").read_text() == "once\n"


@pytest.mark.parametrize("module", ["hpcnode.commands.hrun", "hpcnode.commands.hrsh"])
def test_input_that_was_read_for_it_is_sent_again(
    controller: Controller, run: Callable[..., Running], module: str
) -> None:
    command = run("n1", "prog", module=module)
    controller.start(1)
    assert command.process.stdin is not None
    command.process.stdin.write(b"words")
    command.process.stdin.flush()
    controller.take(Input)
    lose_the_step(controller)
    controller.start(1)
    again, data = controller.take(Input)
    assert (again.offset, data) == (0, b"words")
    command.process.stdin.write(b" more")
    command.process.stdin.flush()
    more, data = controller.take(Input)
    assert (more.offset, data) == (5, b" more")
    controller.end(0)
    assert command.finish()[0] == 0


def test_an_input_file_is_read_once_though_its_step_is_asked_for_again(
    controller: Controller, run: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("words")
    hrun = run("-n1", "-i", "in", "prog")
    for loses in (True, False):
        controller.start(1)
        data = b""
        while True:
            message, part = controller.take(Input)
            assert message.offset == len(data)
            data += part
            if message.eof:
                break
        assert data == b"words"
        if loses:
            lose_the_step(controller)
    controller.end(0)
    assert hrun.finish()[0] == 0


def test_hrsh_asks_again_as_well(controller: Controller, run: Callable[..., Running]) -> None:
    hrsh = run("-n", "n1", "prog", module="hpcnode.commands.hrsh")
    request, _ = controller.take(StepRequest)
    lose_the_step(controller)
    assert controller.start(1) == request
    controller.end(0)
    assert hrsh.finish()[0] == 0


def test_hrun_does_not_poll(controller: Controller, run: Callable[..., Running]) -> None:
    hrun = run("prog")
    controller.start(tasks=1)
    controller.output(0, b"go\n")
    controller.take(OutputAck)

    def switches() -> int:
        text = Path(f"/proc/{hrun.process.pid}/status").read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if "voluntary_ctxt" in line)

    state = Path(f"/proc/{hrun.process.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", what="hrun to sleep")

    def rests() -> bool:
        before, until_s = switches(), time.monotonic() + 0.7
        wait_until(lambda: time.monotonic() > until_s)
        return switches() - before <= 2

    wait_until(rests, what="hrun to rest when it has settled")
    controller.output(0, b"", offset=3, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0], signals=[0]))
    assert hrun.finish()[0] == 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--lable", "x"), "unknown option --lable: did you mean --label?"),
        (("-Y", "x"), "unknown option -Y: the short options are "),
        (("--mem",), "option --mem needs a value: SIZE"),
        (("--ntask=2", "x"), "option --ntask is ambiguous: --ntasks --ntasks-per-core --ntasks-per-node"),
        (("--label=yes", "x"), "option --label takes no value"),
        (("-n2",), "no command given"),
        (("--mpi=pmix", "x"), "cannot start tasks with --mpi=pmix: only none exists. Start MPI programs with mpirun"),
        (("--wait=soon", "x"), "cannot read --wait=soon"),
        (("-K2", "x"), "cannot read '2': 0 or 1 is needed"),
    ],
)
def test_what_cannot_be_read_is_refused(run: Callable[..., Running], args: tuple[str, ...], text: str) -> None:
    code, out, err = run(*args).finish()
    assert (code, out) == (2, "")
    assert err.startswith("hrun: error: " + text)


def test_what_is_answered_at_once(run: Callable[..., Running]) -> None:
    assert run("--mpi=list").finish() == (0, "MPI plugin types are...\n\tnone\n", "")
    assert run("--version").finish()[1].startswith("hpcsched ")
    assert "--ntasks-per-node=N" in run("--help").finish()[1]


def test_without_a_controller_it_says_what_to_start(run: Callable[..., Running], tmp_path: Path) -> None:
    hrun = run("x", HPCSCHED_SOCKET="", HPCSCHED_JOB_ID="", HPCSCHED_CONFIG=str(tmp_path / "conf"))
    code, _, err = hrun.finish()
    assert code == 1
    path = tmp_path / "conf" / "state" / "run" / "steps.sock"
    assert err == (
        f"hrun: error: Unable to contact hpcsched controller ({path}: No such file or directory): "
        "start it with 'hpcsched up'; 'hpcsched doctor' says what is wrong\n"
    )


@pytest.mark.parametrize("module", ["hpcnode.commands.hrun", "hpcnode.commands.hrsh"])
def test_an_agent_that_is_away_for_a_moment_is_waited_for(
    controller: Controller, run: Callable[..., Running], module: str
) -> None:
    away = controller.path.with_name("away")
    controller.path.rename(away)
    comes_back = "import os, time; time.sleep = lambda _: os.path.exists('away') and os.rename('away', 'agent.sock')"
    command = run("n1", "true", module=module, changes=comes_back)
    controller.start(1)
    controller.end(0)
    assert command.finish()[0] == 0


def test_an_agent_that_stays_away_is_an_error(controller: Controller, run: Callable[..., Running]) -> None:
    controller.path.unlink()
    code, _, err = run("true", changes="import hpcnode.wire.sockets as s; s.AGENT_BACK_S = 0.0").finish()
    assert (code, err) == (
        1,
        f"hrun: error: cannot reach the node's agent ({controller.path}: No such file or directory): is the job over?\n",
    )


def test_environment_gives_defaults_and_export_chooses(controller: Controller, run: Callable[..., Running]) -> None:
    # The controller knows the job's own numbers; one that the user has set differs from it.
    job_fact = {"HPCSCHED_CPUS_PER_TASK": "4", "HPCSCHED_NTASKS": "8", "SLURM_NTASKS": "8"}
    settings = {"SLURM_KILL_BAD_EXIT": "1", "HPCSCHED_OVERLAP": "1", "SLURM_NTASKS_PER_NODE": "2"}
    hrun = run("--export=A,B=2", "--label", "prog", A="1", C="3", **settings, **job_fact)
    request = controller.start()
    assert "cpus-per-task" not in request.options
    assert "ntasks" not in request.options
    controller.end(0, 0)
    hrun.finish()
    assert (request.env.get("A"), request.env.get("B"), request.env.get("C")) == ("1", "2", None)
    assert request.env["HPCSCHED_JOB_ID"] == "12"
    assert request.options["kill-on-bad-exit"] is True
    assert request.options["overlap"] is True
    assert request.options["ntasks-per-node"] == "2"


@pytest.mark.parametrize("toml", [None, "", '[controller]\nrun_dir = "r"\n', '[controller]\nstate_dir = "/s"\n'])
@pytest.mark.parametrize("variables", ["config", "xdg", "home"])
def test_the_heads_socket_is_where_the_other_commands_look(tmp_path: Path, toml: str | None, variables: str) -> None:
    environ = {
        "config": {"HPCSCHED_CONFIG": str(tmp_path / "c")},
        "xdg": {"XDG_CONFIG_HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/nowhere"},
        "home": {"HOME": str(tmp_path)},
    }[variables]
    config_dir = paths.own_config_dir(environ, 1000)
    if toml is not None:
        config_dir.mkdir(parents=True)
        (config_dir / "hpcsched.toml").write_text(toml)
    expected = Path(paths.api_socket(environ, 1000)).with_name(paths.STEPS_SOCKET)
    assert sockets.steps_socket(environ, 1000) == str(expected)


# ----- hrsh


def test_hrsh_runs_a_command_on_one_node(controller: Controller, run: Callable[..., Running]) -> None:
    hrsh = run(
        "-x",
        "-o",
        "BatchMode=yes",
        "-p",
        "22",
        "me@n2",
        "-q",
        "echo",
        "$HOME;",
        "exit 3",
        module="hpcnode.commands.hrsh",
    )
    request, _ = controller.take(StepRequest)
    assert request.argv == ["/bin/sh", "-c", "cd 2>/dev/null; echo $HOME; exit 3"]
    assert (request.options["nodelist"], request.options["overlap"], request.options["ntasks"]) == ("n2", True, "1")
    controller.say(StepStarted(job_id=12, step=0, tasks=[("n2", 0, 1, "token0")]))
    controller.output(0, b"no newline, at once")
    controller.take(OutputAck)
    controller.output(0, b"", offset=19, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[3], signals=[0]))
    assert hrsh.finish() == (3, "no newline, at once", "")


def test_hrsh_told_to_end_ends_its_command(controller: Controller, run: Callable[..., Running]) -> None:
    hrsh = run("-n", "n2", "sleep 60", module="hpcnode.commands.hrsh")
    request = controller.start(tasks=1)
    assert request.options["input"] == "/dev/null"
    controller.output(0, b"go")
    controller.take(OutputAck)
    hrsh.process.terminate()
    assert controller.take(StepSignal)[0].signum == signal.SIGTERM
    assert controller.take(StepSignal)[0].signum == signal.SIGKILL  # it did not end in time
    controller.output(0, b"", offset=2, eof=True)
    controller.output(0, b"", fd=2, eof=True)
    controller.say(StepEnded(codes=[0], signals=[9]))
    assert hrsh.finish()[0] == 143


def test_hrsh_names_mpi_daemons_where_it_must(controller: Controller, run: Callable[..., Running]) -> None:
    command = 'prted --prtemca ess "env" --prtemca x 1'
    hrsh = run("n2", command, module="hpcnode.commands.hrsh", HPCSCHED_MPI_NAME_DAEMONS="1")
    request = controller.start(tasks=1)
    assert "export SLURMD_NODENAME=n2; " in request.argv[2]
    assert request.argv[2].endswith("prted --prtemca ess slurm --prtemca x 1")
    controller.end(0)
    assert hrsh.finish()[0] == 0


@pytest.mark.parametrize("args", [(), ("n2",), ("-l", "me", "n2")])
def test_hrsh_opens_no_login_shell(run: Callable[..., Running], args: tuple[str, ...]) -> None:
    code, _, err = run(*args, module="hpcnode.commands.hrsh").finish()
    assert code == 255
    assert err.startswith("hrsh: error: cannot open a login shell")


def test_hrsh_fails_as_ssh_does(controller: Controller, run: Callable[..., Running]) -> None:
    hrsh = run("n9", "true", module="hpcnode.commands.hrsh")
    controller.take(StepRequest)
    controller.say(StepEnded(codes=[], signals=[], error="cannot start the step on n9: the job has n[1-2]"))
    assert hrsh.finish() == (255, "", "hrsh: error: cannot start the step on n9: the job has n[1-2]\n")
