"""Alerts over time: when they fire and end, who is told of them, and that nobody is told too often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.alerts.state import (
    GROUP_S,
    HOLD_S,
    LONG_HOLD_S,
    MOST_ALERTS,
    REPEAT_S,
    AlertBook,
    AlertCondition,
    AlertPhase,
    Digest,
    Inhibition,
    Silence,
    Subscriber,
)
from hpcsched.model.alerting import AlertSeverity

START_S = 1_800_000_000.0
STEP_S = 10.0
MAIL = Subscriber(name="mail")


def down(node: str = "n1", *, for_s: float = 300.0, severity: AlertSeverity = AlertSeverity.WARNING) -> AlertCondition:
    return AlertCondition(
        rule="NodeDown", labels=(("node", node),), severity=severity, text="it does not answer", for_s=for_s
    )


class Watch:
    """A book on a clock that the test moves; what is sent is delivered at once unless `delivers` is False."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self.book = AlertBook()
        self.now_s = START_S
        self.subscribers = subscribers or (MAIL,)
        self.sent: list[Digest] = []
        self.delivers = True
        self.silences: list[Silence] = []
        self.quiet_nodes: dict[str, str] = {}
        self.inhibitions: tuple[Inhibition, ...] = ()
        self.is_quiet_hour = False

    def look(self, *conditions: AlertCondition) -> None:
        self.book.look(
            conditions,
            self.now_s,
            silences=self.silences,
            quiet_nodes=self.quiet_nodes,
            inhibitions=self.inhibitions,
        )
        for digest in self.book.digests(self.subscribers, self.now_s, is_quiet_hour=self.is_quiet_hour):
            self.sent.append(digest)
            if self.delivers:
                self.book.delivered(digest.receiver, digest.rule)

    def live(self, seconds: float, *conditions: AlertCondition) -> None:
        """Look every ten seconds for so long, with these conditions."""
        for _ in range(round(seconds / STEP_S)):
            self.look(*conditions)
            self.now_s += STEP_S

    def told(self) -> list[tuple[int, str, list[str]]]:
        """Return what was told: seconds since the start, and each alert's node and phase."""
        return [
            (round(digest.at_s - START_S), digest.receiver, [_words(digest, at) for at in range(len(digest.alerts))])
            for digest in self.sent
        ]

    def phases(self) -> list[AlertPhase]:
        return [alert.shown_phase for alert in self.book.alerts.values()]


def _words(digest: Digest, at: int) -> str:
    alert = digest.alerts[at]
    return f"{alert.condition.label('node')} {alert.phase.value}"


def test_a_condition_fires_after_its_time_and_ends_after_the_hold() -> None:
    watch = Watch()
    watch.live(300, down())
    assert (watch.phases(), watch.told()) == ([AlertPhase.PENDING], [])
    watch.live(60, down())
    assert watch.told() == [(300, "mail", ["n1 firing"])]
    watch.live(HOLD_S)
    assert watch.phases() == [AlertPhase.FIRING]
    watch.live(STEP_S)
    assert watch.told()[1:] == [(360 + HOLD_S, "mail", ["n1 resolved"])]
    watch.live(90_000)
    assert watch.phases() == []
    assert len(watch.sent) == 2


def test_a_condition_that_is_over_in_time_is_not_told() -> None:
    watch = Watch()
    for _ in range(20):
        watch.live(290, down())
        watch.live(STEP_S)
    assert watch.sent == []


def test_nodes_that_fail_together_are_told_together_at_most_once_in_the_interval() -> None:
    watch = Watch()
    watch.live(310, down("n1"))
    watch.live(200, down("n1"), down("n2"), down("n3"))
    watch.live(GROUP_S, down("n1"), down("n2"), down("n3"), down("n4"))
    assert watch.told() == [(300, "mail", ["n1 firing"]), (900, "mail", ["n2 firing", "n3 firing", "n4 firing"])]
    assert watch.sent[1].firing == 4


def test_a_firing_alert_is_told_again_each_day() -> None:
    watch = Watch()
    watch.live(2 * REPEAT_S + 1000, down())
    assert [at_s for at_s, _, _ in watch.told()] == [300, 300 + REPEAT_S, 300 + 2 * REPEAT_S]
    assert [digest.is_reminder for digest in watch.sent] == [False, True, True]


def test_a_receiver_that_is_down_gets_everything_once_when_it_is_back() -> None:
    watch = Watch()
    watch.delivers = False
    watch.live(400, down("n1"))
    watch.live(HOLD_S + 600, down("n2"))  # n1 is over meanwhile
    watch.live(2000)
    assert watch.told() == [(300, "mail", ["n1 firing"])]
    watch.delivers = True
    watch.book.delivered("mail", "NodeDown")
    watch.live(4000)
    assert [words for _, _, words in watch.told()[1:]] == [["n1 resolved", "n2 resolved"]]
    assert watch.sent[1].alerts[1].fired_at_s is not None  # it is told that it was


def test_each_receiver_gets_its_severities_and_ends_only_if_it_wants() -> None:
    pager = Subscriber(name="pager", least=AlertSeverity.CRITICAL, resolved=False)
    watch = Watch(MAIL, pager)
    watch.live(20, down("n1", for_s=0.0), down("n2", for_s=0.0, severity=AlertSeverity.CRITICAL))
    watch.live(HOLD_S + 20)
    assert watch.told() == [
        (0, "mail", ["n1 firing", "n2 firing"]),
        (0, "pager", ["n2 firing"]),
        (20 + HOLD_S, "mail", ["n1 resolved", "n2 resolved"]),
    ]


def test_only_critical_alerts_are_told_in_quiet_hours() -> None:
    watch = Watch()
    watch.is_quiet_hour = True
    watch.live(100, down("n1", for_s=0.0))
    assert watch.sent == []
    watch.live(20, down("n1", for_s=0.0), down("n2", for_s=0.0, severity=AlertSeverity.CRITICAL))
    assert [words for _, _, words in watch.told()] == [["n2 firing"]]
    watch.is_quiet_hour = False
    watch.live(GROUP_S, down("n1", for_s=0.0), down("n2", for_s=0.0, severity=AlertSeverity.CRITICAL))
    assert [words for _, _, words in watch.told()[1:]] == [["n1 firing"]]


def test_a_silenced_alert_is_told_when_the_silence_ends_and_it_still_fires() -> None:
    watch = Watch()
    watch.silences = [
        Silence(id=1, matchers=(("node", ("n[12]",)),), from_s=START_S, until_s=START_S + 1000, by="ann", why="fan")
    ]
    watch.live(990, down("n1", for_s=0.0), down("n3", for_s=0.0))
    assert watch.told() == [(0, "mail", ["n3 firing"])]
    assert [alert.quiet for alert in watch.book.alerts.values()] == ["silence 1 by ann", ""]
    watch.live(20, down("n1", for_s=0.0), down("n3", for_s=0.0))
    assert watch.told()[1:] == [(1000, "mail", ["n1 firing"])]


def test_what_was_over_while_it_was_silenced_is_not_told() -> None:
    watch = Watch()
    watch.quiet_nodes = {"n1": "drained by ann"}
    watch.live(100, down("n1", for_s=0.0))
    watch.live(HOLD_S + 20)
    watch.quiet_nodes = {}
    watch.live(2000)
    assert watch.sent == []


def test_an_alert_keeps_its_consequences_quiet_even_while_it_is_pending() -> None:
    watch = Watch()
    watch.inhibitions = (Inhibition("NodeDown", ("NodeSilent",), ("node",)),)
    silent = replace(down("n1", for_s=0.0), rule="NodeSilent")
    watch.live(200, down("n1"), silent, replace(silent, labels=(("node", "n2"),)))
    assert watch.told() == [(0, "mail", ["n2 firing"])]
    watch.live(600, down("n1"), silent)
    assert watch.told()[1:] == [(300, "mail", ["n1 firing"])]
    assert "because of NodeDown" in [alert.quiet for alert in watch.book.alerts.values()]


@pytest.mark.parametrize("away_s", [-7200.0, 7200.0])
def test_time_without_looks_and_a_clock_that_is_set_do_not_count(away_s: float) -> None:
    watch = Watch()
    watch.live(200, down())
    watch.now_s += away_s
    watch.live(90, down())
    assert watch.phases() == [AlertPhase.PENDING]
    watch.live(150, down())
    assert watch.phases() == [AlertPhase.FIRING]
    watch.live(HOLD_S - 100)
    watch.now_s += away_s
    watch.live(20)
    assert watch.phases() == [AlertPhase.FIRING]


def test_many_alerts_are_bounded_and_critical_ones_come_first() -> None:
    watch = Watch()
    many = [down(f"n{number}", for_s=0.0) for number in range(2 * MOST_ALERTS)]
    watch.look(*many, down("head", for_s=0.0, severity=AlertSeverity.CRITICAL))
    assert len(watch.book.alerts) == MOST_ALERTS
    assert watch.book.left_out == MOST_ALERTS + 1
    assert "head firing" in watch.told()[0][2]
    assert len(watch.sent) == 1


def test_an_alert_of_a_user_is_told_to_no_receiver() -> None:
    watch = Watch()
    wastes = replace(down(for_s=0.0), rule="JobWastes", uid=7, user="ann", told_once="12.JobWastes")
    watch.live(100, wastes)
    assert watch.sent == []
    assert [alert.condition.user for alert in watch.book.of_owners()] == ["ann"]


def most_in_an_hour(times_s: Iterable[float]) -> int:
    every = sorted(times_s)
    return max((sum(begin <= at_s < begin + 3600 for at_s in every) for begin in every), default=0)


@settings(max_examples=60)
@given(
    for_s=st.sampled_from([0.0, 60.0, 300.0]),
    periods=st.lists(st.tuples(st.integers(10, 2500), st.integers(10, 4500)), min_size=1, max_size=12),
)
def test_a_node_that_comes_and_goes_gives_at_most_four_messages_in_any_hour(
    for_s: float, periods: list[tuple[int, int]]
) -> None:
    watch = Watch()
    for down_s, up_s in periods:
        watch.live(down_s, down(for_s=for_s))
        watch.live(up_s)
    assert most_in_an_hour(at_s for at_s, _, _ in watch.told()) <= 4


@pytest.mark.parametrize("for_s", [0.0, 300.0])
@pytest.mark.parametrize("down_s", [10.0, 40.0, 310.0, 610.0])
@pytest.mark.parametrize("up_s", [10.0, 40.0, HOLD_S + 20, HOLD_S + 300, LONG_HOLD_S + 20])
def test_a_node_that_flaps_for_an_hour_and_more_is_told_seldom(for_s: float, down_s: float, up_s: float) -> None:
    watch = Watch()
    while watch.now_s < START_S + 6 * 3600:
        watch.live(down_s, down(for_s=for_s))
        watch.live(up_s)
    assert most_in_an_hour(at_s for at_s, _, _ in watch.told()) <= 4


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 200)), min_size=1, max_size=12))
def test_whatever_happens_the_last_thing_told_is_what_is_true(steps: list[tuple[bool, bool, int]]) -> None:
    """Receivers are down now and then; an hour after the last change each has been told how it is."""
    watch = Watch()
    for is_down, delivers, count in steps:
        watch.delivers = delivers
        if delivers:
            watch.book.delivered("mail", "NodeDown")
        watch.live(count * STEP_S, *([down(for_s=0.0)] if is_down else []))
    watch.delivers = True
    watch.book.delivered("mail", "NodeDown")
    is_down = steps[-1][0]
    watch.live(2 * LONG_HOLD_S, *([down(for_s=0.0)] if is_down else []))
    last = next((words[0] for _, _, words in reversed(watch.told()) if words), None)
    was_ever_down = any(down_then for down_then, _, _ in steps)
    assert last == (None if not was_ever_down else "n1 firing" if is_down else "n1 resolved")


def restarted(watch: Watch, how: Callable[[AlertBook], AlertBook]) -> None:
    watch.book = how(watch.book)


def test_a_book_that_is_read_again_tells_nothing_twice_and_forgets_nothing() -> None:
    """The tables of the book are its whole state."""
    watch = Watch()

    def again(book: AlertBook) -> AlertBook:
        return AlertBook(
            alerts=dict(book.alerts),
            told=dict(book.told),
            sent_s=dict(book.sent_s),
            waiting=set(book.waiting),
            looked_at_s=book.looked_at_s,
        )

    for _ in range(60):
        watch.live(STEP_S, down())
        restarted(watch, again)
    for _ in range(200):
        watch.live(STEP_S)
        restarted(watch, again)
    assert watch.told() == [(300, "mail", ["n1 firing"]), (600 + HOLD_S, "mail", ["n1 resolved"])]
