"""What the controller tells the child that watches the cluster: conditions, quiet nodes, and job mail until it is kept."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, ROOT, Cluster, full_disk
from waiting import played

from hpcnode.wire import protocol
from hpcsched.config.load import AlertSettings, ReportSettings
from hpcsched.controller.requests import reservations
from hpcsched.controller.requests.jobs import cancel
from hpcsched.controller.views import alerts
from hpcsched.controller.views.alerts import AlertFeed, quiet_nodes, read_silence
from hpcsched.errors import RequestError, UnavailableError
from hpcsched.lifecycle.node import NodeDown, NodeDrained
from hpcsched.model.ids import NodeName
from hpcsched.model.spec import ArraySpec


class Child:
    """The child: it keeps what it is asked, or does not answer."""

    def __init__(self) -> None:
        self.pid = 1
        self.is_new = True
        self.answers = True
        self.questions: list[dict[str, Any]] = []
        self.news: dict[str, Any] = {}
        self.due = False

    async def ask(self, question: dict[str, Any]) -> bytes:
        if not self.answers:
            raise UnavailableError("cannot use alerts now")
        self.questions.append(question)
        for number in question.get("known_news", ()):
            self.news.pop(number, None)
        return json.dumps({"news": self.news, "due": self.due}).encode()

    def mails(self) -> list[str]:
        """Return the ends of the keys of all mail that it was given."""
        given = [mail for question in self.questions if question["ask"] == "mail" for mail in question["mails"]]
        return [mail["key"].partition(".")[0] + "." + mail["key"].rpartition(".")[2] for mail in given]


class Watched:
    def __init__(self, *names: str, up: bool = True) -> None:
        self.cluster = Cluster(*names, up=up)
        config = self.cluster.state.config
        self.cluster.state.config = replace(config, alerts=AlertSettings(smtp="smtp://localhost"))
        self.child = Child()
        self.feed = AlertFeed(self.cluster.controller, None, lambda: self.cluster.now_s)
        self.feed._process = self.child  # type: ignore[assignment]

    async def look(self) -> list[dict[str, Any]]:
        await self.feed._look(self.child)  # type: ignore[arg-type]
        found: list[dict[str, Any]] = self.child.questions[-1]["conditions"]
        return found

    async def give(self) -> None:
        await self.feed._give_mail(self.child)  # type: ignore[arg-type]

    def record(self, event: Any) -> None:
        self.cluster.ask(lambda tx: tx.record_node(event))


@played
async def test_a_node_that_does_not_answer_is_a_condition() -> None:
    lab = Watched("n1", "n2", "n3")
    assert await lab.look() == []
    lab.record(NodeDown(node=NodeName("n1"), at_s=lab.cluster.now_s, why="no route to host"))
    (found,) = await lab.look()
    assert (found["rule"], found["labels"], found["text"]) == ("NodeDown", [["node", "n1"]], "no route to host")


@played
async def test_nodes_that_people_work_on_are_quiet_and_those_that_a_check_drained_are_told() -> None:
    lab = Watched("n1", "n2", "n3")
    for name, by in (("n1", "ann"), ("n2", "hhealth")):
        lab.record(NodeDrained(node=NodeName(name), at_s=lab.cluster.now_s, by=by, why="disk"))
    words = {"nodes": "n3", "starttime": "now", "duration": "60", "users": "root", "flags": "MAINT"}
    made = lab.cluster.ask(lambda tx: reservations.create(tx, ROOT, "fan", words))
    assert made.name == "fan", made
    assert [found["rule"] for found in await lab.look()] == ["NodeDrained"]
    quiet = quiet_nodes(lab.cluster.state, lab.cluster.now_s + 1)
    assert quiet == {"n1": "drained by ann", "n3": "reservation fan"}


@played
async def test_job_mail_is_kept_until_the_child_has_it_and_given_again_to_a_new_child() -> None:
    lab = Watched("n1")
    job = lab.cluster.submit(mail_type=("BEGIN", "END"))
    lab.cluster.submit()
    await lab.give()
    assert lab.child.mails() == []
    lab.child.answers = False
    lab.cluster.run(job)
    for _ in range(2):
        try:
            await lab.give()
        except UnavailableError:
            continue
    lab.cluster.end(job)
    lab.child.answers = True
    await lab.give()
    assert sorted(lab.child.mails()) == [f"{job}.begin", f"{job}.end"]
    await lab.give()
    assert len(lab.child.mails()) == 2
    lab.child.is_new = True
    await lab.give()
    assert sorted(lab.child.mails()[2:]) == [f"{job}.begin", f"{job}.end"]
    assert any("hacct -j" in line for mail in lab.child.questions[-1]["mails"] for line in mail["lines"])


@played
async def test_more_changes_than_are_kept_at_once_lose_no_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MOST_MAILS", 2)
    lab = Watched("n1")
    await lab.give()
    jobs = [lab.cluster.submit(ANN, mail_type=("END",), hold=True) for _ in range(9)]
    for job in jobs:
        lab.cluster.ask(lambda tx, job=job: cancel(tx, ANN, [str(job)], {}))
    lab.child.answers = False
    with pytest.raises(UnavailableError):
        await lab.give()
    assert len(lab.feed._mails) == 2
    lab.child.answers = True
    await lab.give()
    assert set(lab.child.mails()) == {f"{job}.end" for job in jobs}


@played
async def test_a_part_of_the_time_limit_is_told_once_although_nothing_changes() -> None:
    lab = Watched("n1")
    job = lab.cluster.submit(mail_type=("TIME_LIMIT_50",), time_limit_s=1000)
    lab.cluster.run(job)
    await lab.give()
    assert lab.child.mails() == []
    lab.cluster.now_s += 600
    for _ in range(3):
        await lab.give()
    assert lab.child.mails() == [f"{job}.time_limit_50"]


@played
async def test_an_array_is_one_mail_when_its_last_task_ends() -> None:
    lab = Watched("n1")
    first = lab.cluster.submit(mail_type=("END",), array=ArraySpec(indices=(1, 2, 3)), hold=True)
    lab.cluster.ask(lambda tx: cancel(tx, ANN, [f"{first}_1"], {}))
    await lab.give()
    assert lab.child.mails() == []
    lab.cluster.ask(lambda tx: cancel(tx, ANN, [str(first)], {}))
    await lab.give()
    assert lab.child.mails() == [f"{first}.end"]


@played
async def test_a_look_at_1000_nodes_is_made_in_short_slices() -> None:
    lab = Watched(*(f"n{number}" for number in range(1000)))
    columns = [f"node_filesystem_answers:/m{number}" for number in range(10)]
    columns += [f"node_network_errors_total:eth{number}" for number in range(30)]
    for name in lab.cluster.state.nodes:
        lab.cluster.controller.metrics.connected(name, samples=True)
        sample = protocol.Sample(columns=columns, values=[1] * 40)
        lab.cluster.controller.metrics.sampled(name, sample, lab.cluster.now_s)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    assert await lab.look() == []
    ticking.cancel()
    assert turns > 3, "the loop had no turn while the nodes were looked at"


SILENCE: dict[str, Any] = {
    "matchers": {"node": "n[1-3]", "rule": "Node*, ShareHangs"},
    "until_s": 2000.0,
    "why": "new\nfan",
}


def test_a_silence_says_what_it_is_about_and_ends() -> None:
    asked = read_silence(SILENCE, "ann", 1000.0)
    assert asked["matchers"] == [["node", ["n1", "n2", "n3"]], ["rule", ["Node*", "ShareHangs"]]]
    assert (asked["by"], asked["why"]) == ("ann", "new fan")


@pytest.mark.parametrize(
    "change",
    [
        *({"matchers": made} for made in ({}, {"colour": "red"}, {"node": ""}, {"node": "n[1-999999]"}, [1], None)),
        {"matchers": {"rule": "x" * 1000}},
        *({"until_s": until_s} for until_s in (500.0, 1e300, float("nan"), "tomorrow", None)),
        {"why": None},
    ],
)
def test_a_silence_of_nothing_or_for_ever_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot"):
        read_silence(SILENCE | change, "ann", 1000.0)


FIRED = {
    "kind": "AlertFired", "name": "NodeDown", "at_s": 5.0, "text": "no route", "labels": {"node": "n1"},
    "severity": "warning", "uid": None, "user": "", "account": "",
}  # fmt: skip


@played
async def test_an_alert_that_fires_is_an_event_once_and_the_child_is_told() -> None:
    lab = Watched("n1")
    last = lab.cluster.store.last_event()
    lab.child.news = {"f.firing.5": FIRED}
    await lab.look()
    await lab.look()  # before the commit: the child says it again
    lab.cluster.tick()
    await lab.look()
    assert (lab.child.news, lab.feed._recorded, lab.feed._known_news) == ({}, {}, {})
    (found,) = lab.cluster.backend().events(ROOT, last)["events"]
    assert {name: found[name] for name in ("about", "kind", "name", "text", "severity", "labels")} == {
        "about": "alert", "kind": "AlertFired", "name": "NodeDown", "text": "no route", "severity": "warning",
        "labels": {"node": "n1"},
    }  # fmt: skip
    assert "uid" not in found


@played
async def test_news_whose_commit_failed_is_recorded_later() -> None:
    lab = Watched("n1")
    last = lab.cluster.store.last_event()
    lab.child.news = {"f.firing.5": FIRED}
    with full_disk(lab.cluster):
        await lab.look()
        lab.cluster.tick()
    await lab.look()
    lab.cluster.tick()
    await lab.look()
    assert lab.child.news == {}
    assert len(lab.cluster.backend().events(ROOT, last)["events"]) == 1


def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Let a script of the shell stand for hreport; return a file to which it may write."""
    said = tmp_path / "said"
    program = tmp_path / "hreport"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{said}"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr(alerts, "REPORTER", (str(program),))
    return said


def with_reports(lab: Watched) -> None:
    config = lab.cluster.state.config
    lab.cluster.state.config = replace(config, reports=ReportSettings(mail=("head@lab.org",)))


MAIL = """cat <<'END'
MIME-Version: 1.0
Subject: [lab] use
Content-Type: multipart/alternative; boundary="x"

--x
Content-Type: text/plain

much
--x
Content-Type: text/html

<p>much</p>
--x--
END"""


@played
async def test_the_report_of_the_last_month_is_made_if_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Watched("n1")
    with_reports(lab)
    said = reporter(tmp_path, monkeypatch, MAIL)
    await lab.feed._report(lab.child, lab.cluster.state.config)  # type: ignore[arg-type]
    assert not said.exists()
    lab.child.due = True
    await lab.feed._report(lab.child, lab.cluster.state.config)  # type: ignore[arg-type]
    first = datetime.fromtimestamp(lab.cluster.now_s).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    month = f"{first - timedelta(days=1):%Y-%m}"
    assert said.read_text().splitlines() == [f"--month={month}", "--by=account,user", "--mail=head@lab.org"]
    given = lab.child.questions[-1]
    assert (given["key"], given["ended_at_s"]) == (month, first.timestamp())
    assert {name: given["letter"][name] for name in ("subject", "lines", "to")} == {
        "subject": "[lab] use", "lines": ["much"], "to": ["head@lab.org"],
    }  # fmt: skip
    assert "<p>much</p>" in given["letter"]["html"]


@played
async def test_a_report_that_fails_is_logged_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = Watched("n1")
    with_reports(lab)
    lab.child.due = True
    for script in ("echo no controller >&2; exit 1", "echo no mail"):
        caplog.clear()
        reporter(tmp_path, monkeypatch, script)
        for _ in range(2):
            await lab.feed._report(lab.child, lab.cluster.state.config)  # type: ignore[arg-type]
        assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert not any("letter" in question for question in lab.child.questions)
