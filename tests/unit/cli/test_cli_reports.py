"""hreport, sreport and hctl events over what a controller really answers: figures, formats, texts that mean no good."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import time
from dataclasses import replace
from email import message_from_string, policy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi
from jobs import T0
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched import client
from hpcsched.auth.authorize import HIDEABLE, Identity
from hpcsched.cli import hacct, hctl, hreport
from hpcsched.cli.slurm import sreport
from hpcsched.controller.requests import jobs
from hpcsched.controller.views.routes import read_event_filters
from hpcsched.model.accounting import EnergyUse
from hpcsched.model.tariff import Price, Tariff, price_of

PERIOD = ("-S", f"uts{T0:.0f}", "-E", f"uts{T0 + 1000:.0f}")
SREPORT_PERIOD = (f"start=uts{T0:.0f}", f"end=uts{T0 + 1000:.0f}", "-t", "Seconds", "-nP")
EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two nodes of two cpus. Job 1 of ann ran for 100 s, was requeued, and ran for 50 s. n2 was drained at 800 s."""
    made = Cluster("n1", "n2", path=tmp_path / "hpcsched.db")
    one = made.submit(ANN, requeue=True)
    made.run(one)
    made.tick(100.0)
    made.ask(lambda tx: jobs.requeue(tx, ROOT, [str(one)]))
    made.gone(one, "n1")
    made.tick(30.0)
    made.run(one)
    made.tick(50.0)
    made.end(one)
    made.tick(T0 + 800 - made.now_s)
    made.ask(lambda tx: jobs.drain(tx, ROOT, "n2", "heat", "root"))
    made.tick(200.0)
    return made


def serve(api: FakeApi, cluster: Cluster, identity: Identity = ROOT) -> None:
    backend = cluster.backend()

    def history(_: object, given: dict[str, str]) -> Any:
        return json.loads(asyncio.run(backend.history(identity, given)))

    api.answers["GET /v1/history"] = history
    api.answers["GET /v1/nodes"] = lambda _, given: asyncio.run(backend.nodes(identity, given))
    api.answers["GET /v1/outages"] = lambda _, given: asyncio.run(backend.outages(identity, given))
    api.answers["GET /v1/config"] = lambda *_: backend.config(identity)
    api.answers["GET /v1/tariff"] = lambda _, given: asyncio.run(backend.tariff(given))
    api.answers["GET /v1/ping"] = {"cluster": "lab"}
    api.answers["GET /v1/metrics/history"] = (404, {"error": "there are none", "kind": "NotFoundError"})


@pytest.fixture
def served(api: FakeApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(hreport, "_now_s", lambda: T0 + 1000)
    monkeypatch.setattr(sreport, "_now_s", lambda: T0 + 1000)
    serve(api, cluster)
    return cluster


def report(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert hreport.main([*PERIOD, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_use_is_the_sum_over_all_attempts(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = report(capsys, "--by=user")["rows"]
    assert (row["user"], row["jobs"], row["starts"]) == ("ann", 1, 2)
    assert row["cpu_hours"] * 3600 == pytest.approx(150)
    assert row["requeued_cpu_hours"] * 3600 == pytest.approx(100)
    assert sreport.main(["user", "top", *SREPORT_PERIOD]) == 0
    assert capsys.readouterr().out == "demo|ann||root|150|0\n".replace("demo", "lab")


def test_reports_are_read_page_by_page(served: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        one = served.submit(ANN)
        served.run(one)
        served.end(one)
    monkeypatch.setattr("hpcsched.client.PAGE_JOBS", 2)
    assert [job["id"] for job in client.each_of_history(attempts=1)] == [4, 5, 2, 3, 1]


def test_a_drained_node_is_not_idle(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["node"]: row for row in report(capsys, "nodes", "--by=node")["rows"]}
    assert rows["n2"]["drained_part"] == pytest.approx(0.2)
    assert rows["n1"]["drained_part"] == 0
    assert rows["n1"]["allocated_part"] == pytest.approx(150 / 2000)
    assert sreport.main(["cluster", "utilization", *SREPORT_PERIOD]) == 0
    allocated, down, planned, idle, _, whole = map(int, capsys.readouterr().out.strip().split("|")[1:])
    assert (allocated, down, planned, whole) == (150, 400, 0, 4000)
    assert allocated + down + idle == whole


def test_a_node_without_jobs_has_a_row_too(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["node"] for row in report(capsys, "--by=node")["rows"]] == ["n1", "n2"]


def test_months_are_parts_of_the_period_in_local_time() -> None:
    period = hreport.Period(0.0, 40 * 86_400.0, 1e9)
    months = hreport.months_of(period)
    assert [month.name for month in months] == ["1970-01", "1970-02"]
    assert (months[0].start_s, months[-1].end_s, months[0].end_s) == (0.0, period.end_s, months[1].start_s)


def test_costs_are_shown_if_there_are_prices(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert hreport.main([*PERIOD]) == 0
    assert "Cost" not in capsys.readouterr().out
    tariff = Tariff(currency="CHF", cpu_hour=36.0)
    served.state.config = replace(served.state.config, cost=tariff)
    assert hreport.main([*PERIOD, "cost"]) == 0
    assert re.search(r"^user +CHF\n-+ -+\nann +1\.50$", capsys.readouterr().out, re.MULTILINE)


def test_energy_is_only_what_meters_measured(served: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "--by=node")["energy_source"] is None
    meter = {"name": "node_power_watts", "labels": {"sensor": "power_meter/power1"}, "values": [360.0]}
    found = {"from_s": T0, "step_s": 3600.0, "count": 1, "series": [meter]}
    api.answers["GET /v1/metrics/history"] = lambda _, given: (
        found if given["target"] == "n1" else found | {"series": []}
    )
    told = report(capsys, "energy", "--by=node")
    assert [row["kwh"] for row in told["rows"]] == [pytest.approx(0.1), None]
    assert told["energy_source"] == "measured"
    assert any("known for 50% of the nodes' time" in note for note in told["notes"])
    assert hreport.main([*PERIOD, "nodes"]) == 2
    assert "only by node, month, or both" in capsys.readouterr().err


def test_a_history_of_metrics_that_is_off_is_said(
    served: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["GET /v1/metrics/history"] = (503, {"error": "no history is kept", "kind": "UnavailableError"})
    assert any("no history is kept" in note for note in report(capsys, "--by=node")["notes"])


def test_csv_has_plain_numbers_and_no_formulas(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    served.submit(replace(BOB, user="=1+2"))
    served.tick(0.0)
    assert hreport.main(["-S", f"uts{T0:.0f}", "-E", f"uts{T0 + 2000:.0f}", "--csv", "use", "waste"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["user"] for row in rows] == ["'=1+2", "ann"]
    assert float(rows[1]["cpu_hours"]) == pytest.approx(150 / 3600)
    assert rows[1]["unused_cpu_hours"] == ""


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "action") or name[:2] == "on"]


def test_the_page_is_one_file_without_scripts_and_with_escaped_names(
    served: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    served.submit(replace(BOB, user=EVIL))
    assert hreport.main(["-S", f"uts{T0:.0f}", "-E", f"uts{T0 + 2000:.0f}", "--html"]) == 0
    page = capsys.readouterr().out
    tags = Tags()
    tags.feed(page)
    assert not {"script", "img", "link", "iframe", "object"}.intersection(tags.found)
    assert tags.addresses == []
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;") == 3
    assert "default-src 'none'" in page
    assert "@media print" in page


def test_a_mail_has_the_tables_as_text_and_as_the_page(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    served.submit(replace(BOB, user=EVIL))
    served.state.config = replace(served.state.config, name="lab\nBcc: eve@example.org")
    assert hreport.main([*PERIOD, "use", "--mail=boss@example.org,anna"]) == 0
    mail = message_from_string(capsys.readouterr().out, policy=policy.default)
    assert mail["To"] == "boss@example.org, anna"
    assert (mail["Bcc"], mail["Auto-Submitted"]) == (None, "auto-generated")
    assert mail["Subject"].startswith("[lab Bcc: eve@example.org] use from 1970-01-12")
    text, page = mail.iter_parts()
    assert (text.get_content_type(), page.get_content_type()) == ("text/plain", "text/html")
    assert re.search(r"^ann +1 ", text.get_content(), re.MULTILINE)
    assert page.get_content().startswith("<!doctype html>")


def test_hidden_usage_of_others_is_not_reported(
    served: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = frozenset({HIDEABLE["usage"]})
    served.state.config = replace(served.state.config, access=replace(served.state.config.access, hidden=hidden))
    serve(api, served, replace(BOB, hidden=hidden))
    told = report(capsys)
    assert told["rows"] == []
    assert "the report has what you may see" in told["notes"][0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profit"], "cannot report 'profit': there are use, waits"),
        (["--by=colour"], "cannot report by 'colour': there are user, account"),
        (["--month=2027-13"], "write 2027-01, this or last"),
        (["--month=last", "-S", "now-1day"], "give one of them"),
        (["--csv", "--html"], "at once"),
        (["--mail=a@b\nBcc: c@d"], "cannot write a mail: an address wants a mail address"),
        (["-S", "now", "-E", "now-1day"], "the end is not after the start"),
    ],
)
def test_what_cannot_be_reported_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hreport.main(words) == 2
    assert text in capsys.readouterr().err


# ----- the stream of events


def serve_events(api: FakeApi, cluster: Cluster) -> None:
    """Answer as the controller does, then be gone once, then be there again."""
    backend = cluster.backend()

    def events(_: object, given: dict[str, str]) -> Any:
        about, nodes = read_event_filters(given)
        return backend.events(ROOT, int(given["after"]) if "after" in given else None, about, nodes)

    api.answers["GET /v1/events"] = events
    api.answers["GET /v1/ping"] = {"cluster": "lab"}


def test_events_are_printed_with_their_numbers(
    api: FakeApi, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_events(api, cluster)
    assert hctl.main(["events"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[1:] == ["1", "node n1: up: agent x"]
    assert any(line.endswith("job 1 of ann: submitted; now COMPLETED") for line in lines)
    assert len(lines) == cluster.store.last_event()
    assert hctl.main(["events", f"after={len(lines) - 1}", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["event"]["sequence"] == len(lines)


def test_events_are_filtered_by_what_they_are_about(
    api: FakeApi, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_events(api, cluster)
    for word, count in (("node", 3), ("reservation", 0), ("job,node", cluster.store.last_event())):
        assert hctl.main(["events", f"--kind={word}"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == count
    assert hctl.main(["events", "--node=n[2-3]"]) == 0
    assert "node n2: drained by root: heat" in capsys.readouterr().out
    assert hctl.main(["events", "--node=n9"]) == 0
    assert capsys.readouterr().out == ""


def test_events_are_followed_over_a_restart_of_the_controller(
    api: FakeApi, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_events(api, cluster)
    answer = api.answers["GET /v1/events"]
    last = cluster.store.last_event()
    pauses: list[float] = []
    gone = (503, {"error": "the controller is starting", "kind": "UnavailableError"})
    calls: list[str] = []

    def flaky(body: Any, given: dict[str, str]) -> Any:
        if "after" in given:
            calls.append(given["after"])
        if len(calls) == 2:
            return gone
        if len(calls) == 4:
            return (403, {"error": "enough", "kind": "PermissionDeniedError"})
        return answer(body, given)  # type: ignore[operator, misc]

    monkeypatch.setattr(hctl.time, "sleep", pauses.append)
    api.answers["GET /v1/events"] = flaky
    assert hctl.main(["events", "-f", "--json", f"after={last - 2}"]) == 1
    out = capsys.readouterr()
    assert [json.loads(line)["event"]["sequence"] for line in out.out.splitlines()] == [last - 1, last]
    assert (calls, pauses) == ([str(last - 2), str(last), str(last), str(last)], [hctl.RETRY_S])
    assert f"following from event {last} when it answers again" in out.err


def test_a_restored_database_is_followed_from_its_last_event(
    api: FakeApi, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = cluster.store.last_event()
    asked: list[str] = []

    def restored(_: Any, given: dict[str, str]) -> Any:
        asked.append(given.get("after", ""))
        if len(asked) == 1:
            return (503, {"error": "the controller is starting", "kind": "UnavailableError"})
        if len(asked) == 5:
            return (403, {"error": "enough", "kind": "PermissionDeniedError"})
        return cluster.backend().events(ROOT, int(given["after"]) if "after" in given else None)

    monkeypatch.setattr(hctl.time, "sleep", lambda _: None)
    api.answers["GET /v1/events"] = restored
    assert hctl.main(["events", "-f", "after=900"]) == 1
    assert asked == ["900", "900", "", str(last), str(last)]
    assert f"the database was restored: its last event is {last}" in capsys.readouterr().err


def test_words_that_are_no_place_among_events_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert hctl.main(["events", "yesterday"]) == 2
    assert "write hctl events [-f] [--json] [--kind=LIST] [--node=NODES] [after=NUMBER]" in capsys.readouterr().err


# ----- energy of jobs


def test_hacct_shows_the_energy_of_a_job_its_source_and_price(
    served: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = [EnergyUse(1, 0, "n1", "component", 3.6e6), EnergyUse(1, 1, "n1", "estimated", 1.8e6)]
    served.ask(lambda tx: tx.put_energy(uses, {}))
    served.ask(lambda tx: tx.put_energy(uses[:1], {}))
    served.state.config = replace(served.state.config, cost=Tariff(kwh=Price(0.3), gco2_per_kwh=Price(400.0)))
    assert hacct.main(["-j", "1", "--energy"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["EnergyWh", "EnergySource", "EnergyCost", "EnergyCO2"]
    assert row.split()[-4:] == ["2500.00", "component+estimated", "0.7500", "1000"]
    assert hacct.main(["-n", "-P", "-X", "-j", "1", "-o", "ConsumedEnergy,ConsumedEnergyRaw"]) == 0
    assert capsys.readouterr().out == "9.00M|9000000\n"
    assert hacct.main(["-n", "-P", "-X", "-j", "1", "-o", "TrainStepsPerKWh"]) == 0
    assert capsys.readouterr().out == "\n"  # it is not a training


def test_a_job_pays_the_prices_of_the_hours_in_which_it_ran(
    served: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempt 0 held n1 from T0 to T0+100, attempt 1 for 50 s from T0+130; the price falls at T0+80."""
    at = time.localtime(T0 + 80)
    assert at.tm_sec == 0
    day = ("Mo", "Tu", "We", "Th", "Fr", "Sa", "Su")[at.tm_wday]
    cheap = f"{day} {at.tm_hour:02}:{at.tm_min:02}-24:00"
    served.ask(lambda tx: tx.put_energy([EnergyUse(1, number, "n1", "component", 3.6e6) for number in (0, 1)], {}))
    served.state.config = replace(served.state.config, cost=Tariff(kwh=price_of({"default": 0.4, cheap: 0.1})))
    assert hacct.main(["-n", "-P", "-X", "-j", "1", "-o", "EnergyCost"]) == 0
    assert capsys.readouterr().out == "0.4400\n"
    for by in ("user", "account", "account,month"):
        (row,) = report(capsys, "cost", f"--by={by}")["rows"]
        assert row["cost"] == pytest.approx(0.44)


def test_sreport_shows_the_energy_of_users_in_joules(served: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    served.ask(lambda tx: tx.put_energy([EnergyUse(1, 0, "n1", "component", 7200.0)], {}))
    assert sreport.main(["user", "top", *SREPORT_PERIOD]) == 0
    assert capsys.readouterr().out == "lab|ann||root|150|7200\n"
    assert sreport.main(["cluster", "accountutilizationbyuser", *SREPORT_PERIOD]) == 0
    assert [line.split("|")[-1] for line in capsys.readouterr().out.splitlines()] == ["7200", "7200"]


def test_energy_by_user_is_what_the_jobs_caused_in_the_period(
    served: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    served.ask(lambda tx: tx.put_energy([EnergyUse(1, 0, "n1", "component", 3.6e6)], {}))
    told = report(capsys, "energy")
    assert told["rows"] == [{"user": "ann", "kwh": pytest.approx(1.0), "co2_kg": None}]
    assert told["energy_source"] == "component"
    assert hreport.main(["--json", "-S", f"uts{T0:.0f}", "-E", f"uts{T0 + 50:.0f}", "energy"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["kwh"] == pytest.approx(0.5)
