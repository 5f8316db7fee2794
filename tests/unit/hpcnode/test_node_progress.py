"""Progress of training programs: how often it is forwarded, and which reports count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcnode.agent.training_progress import INTERVAL_S, MAX_FAILURES, MAX_NOTE, MAX_TEXT, Progresses
from hpcnode.wire import protocol


class Node:
    """An agent with job 7 of uid 1000, a loop with a manual clock, an optional controller."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.attempt: int | None = 0
        self.away = False
        self.told: list[protocol.FromStream] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.progresses = Progresses(self, self, lambda: self.now_s)  # type: ignore[arg-type]

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.timers.append((self.now_s + delay_s, call))

    def to_controller(self, message: Any, blob: bytes = b"") -> bool:
        if not self.away:
            self.told.append(message)
        return not self.away

    def job_runs_here(self, job_id: int, uid: int) -> int | None:
        return self.attempt if (job_id, uid) == (7, 1000) else None

    def says(self, step: int, **fields: Any) -> None:
        self.progresses.note(1000, protocol.Progress(job_id=7, step=step, **fields))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = [call for at_s, call in self.timers if at_s <= self.now_s]
        self.timers = [(at_s, call) for at_s, call in self.timers if at_s > self.now_s]
        for call in due:
            call()

    @property
    def steps(self) -> list[int]:
        return [frame.message["step"] for frame in self.told]


def test_a_job_cannot_flood_the_controller_and_its_last_word_comes() -> None:
    node = Node()
    for step in range(1000):
        node.says(step)
    assert node.steps == [0]
    node.wait(INTERVAL_S)
    assert node.steps == [0, 999]
    assert node.told[-1].message["age_s"] == INTERVAL_S
    node.wait(10 * INTERVAL_S)
    assert node.steps == [0, 999], "nothing new was said"
    node.says(1000)
    assert node.steps[-1] == 1000, "after a silence it is said at once"


def test_the_last_progress_of_an_ended_job_is_forwarded_once() -> None:
    node = Node()
    node.says(1)
    node.says(2)
    node.attempt = None
    node.wait(INTERVAL_S)
    assert node.steps == [1, 2]
    node.progresses.controller_came()
    assert node.steps == [1, 2]


def test_a_new_controller_gets_the_progress_again() -> None:
    node = Node()
    node.says(1)
    node.away = True
    node.wait(INTERVAL_S)
    node.says(2)
    node.away = False
    node.progresses.controller_came()
    node.progresses.controller_came()
    assert node.steps == [1, 2, 2]
    frame = node.told[-1]
    assert (frame.uid, frame.job_id, frame.attempt) == (1000, 7, 0)


def test_the_next_attempt_is_not_held_back_by_the_last_one() -> None:
    node = Node()
    node.says(50)
    node.attempt = 1
    node.says(40)
    assert [(frame.attempt, frame.message["step"]) for frame in node.told] == [(0, 50), (1, 40)]


@pytest.mark.parametrize(
    ("uid", "fields"),
    [
        (1001, {}),
        (1000, {"job_id": 8}),
        (1000, {"loss": float("inf")}),
        (1000, {"samples_per_s": float("nan")}),
        (1000, {"step": 1 << 60}),
    ],
)
def test_reports_of_other_users_and_bad_numbers_are_rejected(uid: int, fields: dict[str, Any]) -> None:
    node = Node()
    with pytest.raises(protocol.WireError):
        node.progresses.note(uid, protocol.Progress(**{"job_id": 7, "step": 1, **fields}))
    assert not node.told


def test_a_note_is_cut() -> None:
    node = Node()
    node.says(1, note="x" * 10_000)
    assert len(node.told[0].message["note"]) == MAX_NOTE


def fails(node: Node, rank: int, text: str = "why") -> None:
    node.progresses.note(1000, protocol.Failure(job_id=7, rank=rank, ranks=100, text=text))


def test_failures_of_ranks_are_forwarded_at_once_and_bounded() -> None:
    node = Node()
    for rank in range(MAX_FAILURES + 10):
        fails(node, rank, "x" * 10_000 + "end")
    assert [frame.message["rank"] for frame in node.told] == list(range(MAX_FAILURES))
    assert len(node.told[0].message["text"]) == MAX_TEXT
    assert node.told[0].message["text"].endswith("end")
    node.attempt = 1
    fails(node, 0)
    assert node.told[-1].attempt == 1


def test_a_failure_waits_for_the_controller() -> None:
    node = Node()
    node.away = True
    fails(node, 3)
    node.wait(4)
    node.away, node.attempt = False, None
    node.progresses.controller_came()
    node.progresses.controller_came()
    assert [(frame.message["rank"], frame.message["age_s"]) for frame in node.told] == [(3, 4)]
