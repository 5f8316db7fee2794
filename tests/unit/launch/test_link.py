"""The link's state machine on a clock that only the test moves, over a pipe that only the test fills."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from waiting import PATIENCE_S

from hpcnode.wire import protocol
from hpcsched.launch.bundle import MARK, Bundle
from hpcsched.launch.link import MAX_UNSENT_BYTES, ControllerIdentity, LinkTimes, NodeLink
from hpcsched.launch.pipe import Abort, LinkError, LinkProgress
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec

SPEC = NodeSpec(name=NodeName("n1"), host="h", host_key="", cpus=1, mem_mib=1)
WELCOME = protocol.Welcome(
    version=protocol.VERSION, node="n1", boot_id="b", agent_version="v", pid=1, epoch=1, inventory=[], facts={}
)


class Timer:
    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s, self.call, self.cancelled = due_s, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop by hand: `settle` runs what threads asked for, `advance` moves the clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[Timer] = []
        self._soon: list[Callable[[], None]] = []
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + delay_s, call)
        self._timers.append(timer)
        return timer

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._soon.append(lambda: call(*args))

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.put(lambda: call(*args))

    def settle(self, until: Callable[[], object], what: str) -> None:
        """Run calls of threads until the condition holds."""
        while not until():
            try:
                self._calls.get(timeout=PATIENCE_S)()
            except queue.Empty:
                raise AssertionError(f"waited {PATIENCE_S:g} s for {what}") from None

    def turn(self) -> None:
        """Run what the link itself has asked for."""
        calls, self._soon = self._soon, []
        for call in calls:
            call()

    def waiting_s(self) -> list[float]:
        """Return in how many seconds each timer is due."""
        return [timer.due_s - self.now_s for timer in self._timers if not timer.cancelled]

    def advance(self, seconds: float) -> None:
        """Move the clock in one step, then run what is due: as a loop does that was held up."""
        self.now_s += seconds
        for timer in [timer for timer in self._timers if timer.due_s <= self.now_s]:
            self._timers.remove(timer)
            if not timer.cancelled:
                timer.call()
        self.turn()


class FakePipe:
    """A node in memory: answers the bootstrap's order and Hello by itself, the rest is the test's."""

    def __init__(self, *first: Any) -> None:
        self.first = first or (WELCOME,)
        self.writes: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # after Hello
        self.may_write = threading.Event()
        self.may_write.set()
        self.closed = threading.Event()
        self._incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._greeted = 0
        self.refuses = False
        self.last_words = "it ended with status 9"

    def say(self, *messages: Any) -> None:
        self._incoming.put(b"".join(protocol.encode(message) for message in messages))

    def end(self) -> None:
        self._incoming.put(b"")
        self.may_write.set()

    def receive(self, limit: int) -> bytes:
        return self._incoming.get(timeout=PATIENCE_S)

    def send_all(self, data: bytes) -> None:
        if self.refuses:
            raise BrokenPipeError
        self._greeted += 1
        if self._greeted == 1:
            assert json.loads(data)["node"] == "n1"
            self._incoming.put(b"noise\n" + MARK + b'{"ready": true}\n')
        elif self._greeted == 2:
            self.say(*self.first)
        else:
            self.writes.put(data)
            self.may_write.wait(PATIENCE_S)

    def epitaph(self) -> str:
        return self.last_words

    def close(self) -> None:
        self.closed.set()


class LinkBench:
    """A link, and all that was heard of it."""

    def __init__(self, *dials: FakePipe | Exception | threading.Event, **times: float) -> None:
        self.loop = Loop()
        self.said: list[tuple[str, Any]] = []
        self.aborts = 0
        self._dials = list(dials)
        self.link = NodeLink(
            SPEC,
            dial=self._dial,
            bundle=Bundle(data=b"pyz", sha256="00"),
            identity=ControllerIdentity(cluster="c", incarnation="i", epoch=1),
            times=LinkTimes(**times),
            events=self,
            loop=self.loop,  # type: ignore[arg-type]
        )

    def _dial(self, abort: Abort, progress: LinkProgress) -> FakePipe:
        progress("knocking")
        answer = self._dials.pop(0) if self._dials else LinkError("cannot reach it: nobody is there")
        if isinstance(answer, threading.Event):
            abort.also(answer.set)
            answer.wait(PATIENCE_S)
            self.aborts += 1
            raise LinkError("cannot reach it: too late to matter")
        if isinstance(answer, Exception):
            raise answer
        abort.also(answer.end)
        return answer

    def on_up(self, node: NodeName, welcome: protocol.Welcome) -> None:
        self.said.append(("up", welcome.node))

    def on_message(self, node: NodeName, message: Any, blob: bytes) -> None:
        self.said.append(("message", message))

    def on_down(self, node: NodeName, why: str) -> None:
        self.said.append(("down", why))

    def hear(self, count: int) -> None:
        """Let the link work until it has said so much in all."""
        self.loop.settle(lambda: len(self.said) >= count, f"{count} events, so far {self.said}")


def test_up_then_what_came_with_the_welcome_then_the_rest() -> None:
    pipe = FakePipe(WELCOME, protocol.JobGone(incarnation="i", job_id=1, attempt=0))
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(2)
    pipe.say(protocol.Pong(request=1), protocol.JobGone(incarnation="i", job_id=2, attempt=0))
    bench.hear(3)
    assert [kind for kind, _ in bench.said] == ["up", "message", "message"]
    assert [message.job_id for _, message in bench.said[1:]] == [1, 2]
    bench.link.close()
    assert pipe.closed.wait(PATIENCE_S)


def test_after_close_nobody_is_told() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(1)
    bench.link.close()
    pipe.say(protocol.JobGone(incarnation="i", job_id=2, attempt=0))
    assert pipe.closed.wait(PATIENCE_S)
    assert bench.loop.waiting_s() == []
    bench.link.retry_now()
    assert bench.said == [("up", "n1")]


def test_a_node_that_was_up_of_late_is_dialled_often() -> None:
    bench = LinkBench(FakePipe(), retry_first_s=1, retry_most_s=30, retry_missed_s=5, missed_s=100)
    bench.loop.now_s += 1000
    bench.link.start()
    bench.hear(1)
    bench.link._fail("it is gone")
    longest_s = 0.0
    for _ in range(12):
        (delay_s,) = bench.loop.waiting_s()
        longest_s = max(longest_s, delay_s)
        bench.loop.advance(delay_s)
        bench.loop.settle(lambda: bench.link._session is None, "the attempt to fail")
    assert 2.5 <= longest_s <= 5
    bench.loop.advance(100)
    for _ in range(4):
        bench.loop.settle(lambda: bench.link._session is None, "the attempt to fail")
        bench.loop.advance(bench.loop.waiting_s()[0])
    bench.loop.settle(lambda: bench.link._session is None, "the attempt to fail")
    assert bench.loop.waiting_s()[0] >= 15


def test_attempts_come_ever_later_up_to_a_limit() -> None:
    bench = LinkBench(retry_first_s=1, retry_most_s=30, missed_s=0)
    bench.link.start()
    for attempt in range(9):
        bench.loop.settle(lambda: bench.link._session is None, "the attempt to fail")
        (delay_s,) = bench.loop.waiting_s()
        longest_s = min(30, 2**attempt)
        assert longest_s / 2 <= delay_s <= longest_s
        bench.loop.advance(delay_s)
    assert bench.said == [("down", "cannot reach it: nobody is there")]  # once for the same reason


def test_a_new_reason_is_told() -> None:
    bench = LinkBench(LinkError("one"), LinkError("one"), LinkError("two"), RuntimeError("what is this"))
    bench.link.start()
    for _ in range(3):
        bench.loop.settle(lambda: bench.link._session is None, "the attempt to fail")
        bench.link.retry_now()
    bench.hear(3)
    whys = [why for _, why in bench.said]
    assert whys == ["one", "two", "cannot reach n1: RuntimeError: what is this"]


def test_an_attempt_that_hangs_is_aborted_and_its_end_is_not_heard() -> None:
    stuck = threading.Event()
    bench = LinkBench(stuck, connect_s=20)
    bench.link.start()
    bench.loop.settle(lambda: bench.link._session is not None and bench.link._session.stage == "knocking", "the dial")
    bench.loop.advance(19)
    assert bench.said == []
    bench.loop.advance(2)
    assert bench.said == [("down", "cannot reach n1: no answer within 20 s while knocking")]
    assert stuck.wait(PATIENCE_S)
    bench.loop.advance(1)  # the next attempt, which nobody answers either
    bench.hear(2)
    assert bench.said[1:] == [("down", "cannot reach it: nobody is there")]


def test_a_silent_link_is_pinged_and_then_given_up() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe, heartbeat_s=15, down_after_s=45)
    bench.link.start()
    bench.hear(1)
    framer = protocol.Framer()
    for expected in (1, 2):
        bench.loop.advance(15)
        ((ping, _),) = framer.feed(pipe.writes.get(timeout=PATIENCE_S))
        assert ping == protocol.Ping(request=expected)
    bench.loop.advance(15)
    assert bench.said[1:] == [("down", "no sign of life for 45 s")]
    assert not bench.link.up


def test_an_answer_keeps_it_up() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe, heartbeat_s=15, down_after_s=45)
    bench.link.start()
    bench.hear(1)
    for number in range(10):
        bench.loop.advance(15)
        pipe.writes.get(timeout=PATIENCE_S)
        pipe.say(protocol.Pong(request=number), protocol.JobGone(incarnation="i", job_id=number, attempt=0))
        bench.hear(2 + number)
    assert bench.link.up


def test_a_link_that_is_heard_of_is_not_pinged() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe, heartbeat_s=15, down_after_s=45)
    bench.link.start()
    bench.hear(1)
    bench.loop.now_s += 10
    pipe.say(protocol.JobGone(incarnation="i", job_id=1, attempt=0))
    bench.hear(2)
    bench.loop.advance(5)
    assert pipe.writes.empty()


def test_a_process_that_stood_still_blames_nobody() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe, heartbeat_s=15, down_after_s=45)
    bench.link.start()
    bench.hear(1)
    bench.loop.advance(3600)
    assert bench.link.up
    bench.loop.advance(15)
    assert pipe.writes.get(timeout=PATIENCE_S)
    bench.loop.advance(15)
    bench.loop.advance(15)
    assert not bench.link.up


def test_what_waits_is_sent_in_one_write() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(1)
    pipe.may_write.clear()
    assert bench.link.send(protocol.Ping(request=0))
    bench.loop.turn()
    first = pipe.writes.get(timeout=PATIENCE_S)
    for number in (1, 2, 3):
        assert bench.link.send(protocol.Ping(request=number))
    bench.loop.turn()
    pipe.may_write.set()
    framer = protocol.Framer()
    assert [m.request for m, _ in framer.feed(first)] == [0]
    assert [m.request for m, _ in framer.feed(pipe.writes.get(timeout=PATIENCE_S))] == [1, 2, 3]


def test_frames_of_one_turn_of_the_loop_are_sent_in_one_write() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(1)
    for number in (1, 2, 3):
        assert bench.link.send(protocol.Ping(request=number))
    assert pipe.writes.empty()
    bench.loop.turn()
    assert [m.request for m, _ in protocol.Framer().feed(pipe.writes.get(timeout=PATIENCE_S))] == [1, 2, 3]


def test_too_much_that_waits_ends_the_link() -> None:
    pipe = FakePipe()
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(1)
    pipe.may_write.clear()
    blob = bytes(protocol.MAX_BLOB_BYTES)
    sent = 0
    while bench.link.send(protocol.Probe(request=1), blob):
        sent += 1
        assert sent < 20
    assert sent * len(blob) <= MAX_UNSENT_BYTES + len(blob)  # one more is on its way
    assert bench.said[1][0] == "down"
    assert "takes nothing" in bench.said[1][1]
    assert bench.link.send(protocol.Ping(request=1)) is False


def test_a_message_that_is_too_long_is_the_sender_s_fault() -> None:
    bench = LinkBench(FakePipe())
    bench.link.start()
    bench.hear(1)
    with pytest.raises(protocol.WireError, match="too many"):
        bench.link.send(protocol.Probe(request=1), bytes(protocol.MAX_BLOB_BYTES + 1))
    assert bench.link.up


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (protocol.Goodbye(why="too old"), "cannot use node n1: its agent says: too old"),
        (protocol.Pong(request=1), "cannot understand the agent on n1: it said Pong before Welcome"),
        (
            protocol.Welcome(**(WELCOME.__dict__ | {"node": "n2"})),
            "cannot use node n1: the agent there says that it is 'n2'",
        ),
        (
            protocol.Welcome(**(WELCOME.__dict__ | {"version": 99})),
            f"cannot use node n1: its agent speaks protocol 99, we speak {protocol.VERSION}",
        ),
    ],
)
def test_a_wrong_first_word(first: Any, why: str) -> None:
    pipe = FakePipe(first)
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(1)
    assert bench.said == [("down", why)]
    assert pipe.closed.wait(PATIENCE_S)


def test_a_command_that_is_gone_before_it_is_told_anything() -> None:
    pipe = FakePipe()
    pipe.refuses, pipe.last_words = True, "it ended with status 127: sh: python3: not found"
    bench = LinkBench(pipe)
    bench.link.start()
    bench.hear(1)
    assert bench.said[0][1].startswith("cannot start the agent on n1: it ended with status 127: sh: python3: not found")
    assert "is there no python3?" in bench.said[0][1]


def test_the_end_of_the_pipe_is_told_with_its_epitaph_and_a_new_one_is_dialled() -> None:
    first, second = FakePipe(), FakePipe()
    bench = LinkBench(first, second)
    bench.link.start()
    bench.hear(1)
    first.end()
    bench.hear(2)
    assert bench.said[1] == ("down", "lost the agent of n1: it ended with status 9")
    bench.loop.advance(1)
    bench.hear(3)
    assert bench.link.up
    second.say(protocol.Goodbye(why="I am replaced"))
    bench.hear(4)
    assert bench.said[3] == ("down", "the agent of n1 ended the connection: I am replaced")


def test_a_link_that_was_steady_is_dialled_again_soon() -> None:
    pipe = FakePipe()
    bench = LinkBench(LinkError("a"), LinkError("b"), LinkError("c"), LinkError("d"), pipe)
    bench.link.start()
    for count in range(1, 5):
        bench.hear(count)
        bench.link.retry_now()
    bench.hear(5)
    bench.loop.now_s += 11
    pipe.end()
    bench.hear(6)
    (delay_s,) = bench.loop.waiting_s()
    assert delay_s <= 1
