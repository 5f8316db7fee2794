"""The screens of hmon as lines: values in, text out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_api import NOW_S, FakeApi, job, running
from monitored import FACTS, PING, alert, energy_of, queue_line, serve
from screens import node, training

from hpcsched.listing.jobs import energy_text, steps_per_kwh
from hpcsched.tui import reading, views
from hpcsched.tui.lines import bar, cell, plain
from hpcsched.tui.reading import Asked, ClusterReader, ClusterScreen, UserEnergy, UsersEnergy, queue_of
from hpcsched.tui.views import (
    SCREENS,
    command_name,
    filtered,
    first_task,
    headline,
    job_rows,
    node_rows,
    plain_text,
    row_line,
    tabs,
    view_of,
)

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold]\n\u202e"


def seen(**values: Any) -> ClusterScreen:
    """Return a cluster with a job that runs, one that waits, and two nodes."""
    known: dict[str, Any] = {
        "now_s": NOW_S,
        "controller": PING,
        "nodes": (node("n1", **FACTS), node("n2", **FACTS | {"drained": True, "drained_why": "heat"}, state="DRAINED")),
        "queue": queue_of(queue_line(11, "11") + queue_line(12, "12_[1-9%2]", "later", "PENDING", "(Resources)")),
        "running": (running(11),),
        "waiting": (job(12),),
    }
    return ClusterScreen(**known | values)


def text_of(screen: ClusterScreen, name: str, width: int = 80) -> str:
    """Return all rows of a screen."""
    view = view_of(name, screen, width)
    return "\n".join([plain(view.header), *(plain(row_line(view, row, width)) for row in view.rows)])


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [80, 200])
def test_headers_fit_the_terminal(name: str, width: int) -> None:
    screen = seen()
    assert len(plain(view_of(name, screen, width).header)) <= width
    assert len(plain(tabs(name, width))) <= width
    assert len(plain(headline(screen))) <= 80


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_without_answers_is_empty(name: str) -> None:
    assert text_of(ClusterScreen(), name) == ""


def test_the_overview_has_the_node_in_trouble_first_and_why_a_job_waits() -> None:
    text = text_of(seen(), "overview")
    assert text.index("n2") < text.index("n1")
    assert "heat" in text
    assert "6:40 to 08:53 n[1-2]" in text
    assert "08:20 Resources: needs 2 nodes" in text


def test_health_names_what_is_wrong_and_the_command_that_helps() -> None:
    finding = {"cause": "idle reservation", "node": "", "text": "n9 is reserved", "remedy": "hctl delete reservation r"}
    text = text_of(seen(findings={"findings": [finding]}), "health")
    for part in ("node n2 is drained: heat", "$ hctl resume n2", "idle reservation: n9 is reserved", "hctl delete"):
        assert part in text


def test_health_has_the_alerts_the_worst_first_and_those_that_are_over_last() -> None:
    alerts = [
        alert("DiskFull", "warning", "resolved", node="n2"),
        alert("JobWaste", "info", job="7") | {"quiet": "silence 3"},
        alert("NodeDown", "critical", node="n1"),
    ]
    text = text_of(seen(alerts={"alerts": alerts, "left_out": 4}), "health")
    assert "critical NodeDown of n1: firing since 07:50:00" in text
    assert "(silence 3)" in text
    assert "warning DiskFull of n2: resolved since 07:59:00" in text
    assert "and 4 more alerts" in text
    assert text.count("$ hpcsched doctor n1") == 2  # nothing is to be done for an alert that is over
    places = [text.index(rule) for rule in ("NodeDown", "JobWaste", "DiskFull")]
    assert places == sorted(places)
    assert "alerts: they are switched off" in text_of(
        seen(alerts={"trouble": "alerts: they are switched off"}), "health"
    )


def test_use_has_the_energy_of_users_with_its_source_price_and_co2() -> None:
    energy = UsersEnergy(
        (UserEnergy("ann", 7.2e6, "component", 0.6, 800.0), UserEnergy("bob", 3.6e6, "estimated")), False
    )
    lines = text_of(seen(energy=energy, currency="EUR"), "use").splitlines()
    assert "OF THE NEWEST 1000 JOBS" in lines[-3]
    assert lines[-2].split() == [
        "ann",
        "#####---",
        "66.7%",
        "2",
        "kWh",
        "(component),",
        "0.60",
        "EUR,",
        "0.8",
        "kg",
        "CO2",
    ]
    assert "1 kWh (estimated)" in lines[-1]
    assert max(map(len, lines)) <= 80
    assert "no meter of a node is known" in text_of(seen(), "use")


def test_details_of_a_job_have_its_energy() -> None:
    uses = (
        {"source": "component", "joules": 3.6e6, "cost": 0.3, "co2_g": 400.0},
        {"source": "estimated", "joules": 1.8e6, "cost": 0.15, "co2_g": 200.0},
    )
    text = "\n".join(plain(row.value) for row in job_rows(seen(job=running(11), job_energy=uses, currency="EUR"), 80))
    assert "energy     1.5 kWh (component+estimated), 0.45 EUR, 0.6 kg CO2" in text
    assert "energy" not in "\n".join(plain(row.value) for row in job_rows(seen(job=running(11)), 80))


def test_energy_of_a_training_has_its_steps_for_each_kilowatt_hour() -> None:
    uses = [{"source": "component", "joules": 5.4e6, "cost": None, "co2_g": None}]
    assert energy_text(uses, "EUR", {"training": {"step": 3000}}) == "1.5 kWh (component), 2,000 steps per kWh"
    assert energy_text(uses, "EUR", {"training": None}) == "1.5 kWh (component)"
    assert steps_per_kwh({"training": {"step": 3000}}, []) is None


def test_energy_is_asked_for_once_a_minute(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(api)
    api.answers["GET /v1/history"] = {"jobs": [energy_of("ann", 11, 3.6e6), energy_of("bob", 12, 7.2e6)]}
    reader, asked = ClusterReader(), Asked(parts=frozenset({"energy"}))
    for _ in range(3):
        screen = reader.look(None, asked)
    assert screen.energy is not None
    assert [(one.user, one.joules, one.source) for one in screen.energy.users] == [
        ("bob", 7.2e6, "component"), ("ann", 3.6e6, "component"),
    ]  # fmt: skip
    assert [one.cost for one in screen.energy.users] == [pytest.approx(0.6), pytest.approx(0.3)]
    assert (len(api.requests("GET /v1/history")), screen.currency) == (1, "EUR")
    assert reader.look("11", Asked()).job_energy[0]["joules"] == 3.6e6
    monkeypatch.setattr(reading, "ENERGY_EVERY_S", -1.0)
    reader = ClusterReader()
    reader.look(None, asked)
    api.answers["GET /v1/history"] = (403, {"error": "hidden", "kind": "PermissionDeniedError"})
    screen = reader.look(None, asked)
    assert screen.energy is not None  # what was read last
    assert screen.controller is not None


def test_alerts_that_are_switched_off_are_no_trouble_of_the_controller(api: FakeApi) -> None:
    serve(api)
    api.answers["GET /v1/alerts"] = (503, {"error": "cannot use alerts: they are off", "kind": "UnavailableError"})
    screen = ClusterReader().look(None, Asked(parts=frozenset({"alerts"})))
    assert screen.controller is not None
    assert screen.alerts["trouble"] == "cannot use alerts: they are off"


def test_the_schedule_draws_what_runs_and_what_is_expected() -> None:
    first, last = text_of(seen(running=(running(11, time_limit_s=12 * 3600),)), "queue").splitlines()[1:]
    assert first.count("#") == pytest.approx(43 * 12 / 24, abs=1)
    assert last.startswith("12")
    assert "=" in last


def test_the_schedule_says_why_a_job_has_no_expected_start() -> None:
    assert "(Resources)" in text_of(seen(waiting=(job(12, expected_start_s=None),)), "queue")


def test_use_shows_shares_and_what_was_used() -> None:
    line = {"account": "lab", "user": "ann", "depth": 1, "shares": 3, "norm_shares": 0.75, "norm_usage": 0.5}
    text = text_of(seen(shares=({**line, "fairshare": 0.25},)), "use")
    assert text.splitlines()[1].split() == ["lab", "ann", "3", "75.0%", "50.0%", "#####-----", "0.250"]


def test_a_filter_keeps_rows_with_all_words() -> None:
    view = view_of("jobs", seen(), 80)
    assert [row.name for row in filtered(view, "LATER pend").rows] == ["12_[1-9]"]
    assert list(filtered(view, "later running").rows) == []
    assert filtered(view, "").rows == view.rows


def test_a_row_of_the_queue_is_found_again_among_others() -> None:
    view = view_of("jobs", seen(), 80)
    last = view.rows[len(view.rows) - 1]
    kept = filtered(view, last.value.display_id)
    assert (view.place_of(last, 0), kept.place_of(last, 5)) == (len(view.rows) - 1, 0)
    assert filtered(view, "no such row").place_of(last, 5) == 5


def test_rows_of_the_queue_are_made_when_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    known = views._queued_row

    def counted(job: Any) -> Any:
        made.append(job.display_id)
        return known(job)

    monkeypatch.setattr(views, "_queued_row", counted)
    queue = queue_of("".join(queue_line(number, str(number)) for number in range(10_000)))
    view = view_of("jobs", seen(queue=queue), 80)
    assert (len(view.rows), made) == (10_000, [])
    assert [row.name for row in view.rows[3:5]] == ["3", "4"]
    assert made == ["3", "4"]


def test_a_folded_row_names_its_tasks_for_commands_and_one_for_details() -> None:
    assert command_name("12_[1-9%2]") == "12_[1-9]"
    assert first_task("12_[1-9%2]") == "12_1"
    assert (command_name("12"), first_task("12_3")) == ("12", "12_3")


def test_text_of_users_has_no_control_characters_on_any_screen() -> None:
    named = {"name": HOSTILE, "reason_detail": HOSTILE, "user": HOSTILE}
    hostile = seen(
        controller=PING | {"cluster": HOSTILE, "not_taken": [HOSTILE]},
        nodes=(node(HOSTILE, **FACTS, state="DOWN") | {"link": "down", "link_why": HOSTILE},),
        queue=(queue_of(queue_line(11, "11"))[0]._replace(name=HOSTILE, where=HOSTILE),),
        running=(running(11, **named),),
        waiting=(job(12, **named),),
        job=running(11, **named, comment=HOSTILE),
        log=(HOSTILE,),
        alerts={"alerts": [alert(HOSTILE, node=HOSTILE) | {"text": HOSTILE, "remedy": HOSTILE, "quiet": HOSTILE}]},
        energy=UsersEnergy((UserEnergy(HOSTILE, 1.0, "component", 1.0),), True),
        currency=HOSTILE,
        job_energy=({"source": HOSTILE, "joules": 1.0, "cost": 1.0},),
        run=dataclasses.replace(training(), backend=HOSTILE),
    )
    texts = [text_of(hostile, name) for name in SCREENS]
    texts += [plain(row.value) for row in (*job_rows(hostile, 80), *node_rows(HOSTILE, hostile, 80)[:-1])]
    texts += [plain(headline(hostile)), plain_text(hostile)]
    assert [char for char in "".join(texts) if not char.isprintable() and char != "\n"] == []
    assert "[bold]x[/bold]" in texts[0]


def test_details_of_a_training_have_its_curve_and_the_end_of_its_output() -> None:
    text = "\n".join(plain(row.value) for row in job_rows(seen(job=running(11), run=training(), log=("loss 2.1",)), 80))
    for part in ("job 11  train  of ann", "step 300/500", "12 saved", "| loss 2.1"):
        assert part in text


def test_plain_text_has_nodes_jobs_and_what_is_wrong() -> None:
    text = plain_text(seen(job=running(11)))
    for part in (
        "hpcschedd is running",
        "n2",
        "heat",
        "later",
        "(Resources)",
        "! node n2 is drained",
        "hctl resume n2",
    ):
        assert part in text


def test_a_cell_has_its_width_in_columns_of_the_terminal() -> None:
    assert cell("abc", 5) == "abc  "
    assert cell("abcdef", 4) == "abc~"
    assert cell("日本語", 5) == "日本~"
    assert cell("abc", 5, right=True) == "  abc"


def test_a_bar_shows_a_little_of_something_as_one_mark() -> None:
    assert [bar(part, 100, 4) for part in (0, 1, 50, 100)] == ["----", "#---", "##--", "####"]
    assert bar(3, 0, 2) == "--"


def test_a_controller_that_is_down_is_reported_and_asked_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_API", str(tmp_path / "api.sock"))
    reader = ClusterReader()
    for _ in range(2):
        screen = reader.look()
        assert screen.controller is None
        assert "Unable to contact" in screen.trouble


def test_what_was_seen_last_stays_while_the_controller_is_away(api: FakeApi) -> None:
    serve(api)
    reader = ClusterReader()
    assert [node["name"] for node in reader.look().nodes] == ["n1", "n2"]
    api.answers["GET /v1/ping"] = None
    screen = reader.look()
    assert (screen.controller, len(screen.nodes), len(screen.queue)) == (None, 2, 2)
