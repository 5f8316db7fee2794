"""hmon as its users see it: keys in, the terminal's text out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_api import FakeApi, log_answer, running
from monitored import FACTS, PING, opened, queue_line, serve, shown, text_of
from screens import node
from textual.pilot import Pilot

from hpcsched.tui import app as app_module
from hpcsched.tui.app import MonitorApp, RowList
from hpcsched.tui.views import row_line

Steps = Callable[[Pilot[int]], Awaitable[None]]


def run(steps: Steps, job_id: str = "", size: tuple[int, int] = (80, 24)) -> None:
    """Run hmon, do the steps, and end it."""

    async def opened_for() -> None:
        async with opened(job_id, size=size) as pilot:
            await steps(pilot)

    asyncio.run(opened_for())


def test_number_keys_show_the_six_screens(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await shown(pilot, "[1 overview]", "n1", "train", "RUNS, OR WHY IT WAITS")
        for key, parts in {
            "2": ("[2 jobs]", "later", "(Resources)"),
            "3": ("[3 nodes]", "n2", "IDLE"),
            "4": ("[4 queue]", "##"),
            "5": ("[5 health]", "nothing holds up the queue"),
            "6": ("[6 use]", "no usage yet"),
        }.items():
            await pilot.press(key)
            await shown(pilot, *parts)
        await pilot.press("left", "left")
        await shown(pilot, "[4 queue]")

    run(steps)


def test_details_open_with_enter_and_close_with_escape(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("down", "enter")
        await shown(pilot, "job 12  train  of ann", "needs 2 nodes with 4 cpus each")
        await pilot.press("escape")
        await shown(pilot, "[2 jobs]")
        await pilot.press("3")
        await shown(pilot, "n2")
        await pilot.press("enter")
        await shown(pilot, "node n1", "1G of 4G held by jobs", "11  ")
        await pilot.press("q", "q")

    run(steps)


def test_a_job_that_is_named_is_shown_first(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await shown(pilot, "job 11  train  of ann", "| step 2")

    run(steps, "11")


def test_a_filter_is_applied_as_it_is_typed_and_ends_with_escape(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("slash", *"lat")
        await shown(pilot, "/lat 1 of 2", "later", absent="RUNNING")
        await pilot.press("enter", "escape")
        await shown(pilot, "RUNNING", absent="/lat")

    run(steps)


def test_a_key_that_changes_something_shows_its_command_and_waits_for_enter(api: FakeApi) -> None:
    serve(api)
    api.answers["POST /v1/hold"] = {"jobs": ["12"], "errors": []}

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("down", "h")
        await shown(pilot, "hctl hold 12", "enter runs this command, escape does not")
        await pilot.press("escape")
        await shown(pilot, "nothing was run")
        assert api.requests("POST /v1/hold") == []
        await pilot.press("h", "enter")
        await shown(pilot, "$ hctl hold 12", until=lambda: bool(api.requests("POST /v1/hold")))
        await shown(pilot, "done")

    run(steps)
    assert [body["jobs"] for body in api.requests("POST /v1/hold")] == [["12"]]


def test_an_action_is_for_all_marked_rows(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("space", "space", "c")
        await shown(pilot, "* 11", "* 12", "hcancel 11 12")

    run(steps)


def test_an_error_of_a_command_is_shown(api: FakeApi) -> None:
    serve(api)
    api.answers["POST /v1/requeue"] = (
        403,
        {"error": "cannot requeue job 11: it is bob's", "kind": "PermissionDeniedError"},
    )

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("r", "enter")
        await shown(pilot, "cannot requeue job 11: it is bob's")

    run(steps)


def test_nodes_are_drained_with_a_reason_that_can_be_changed(api: FakeApi) -> None:
    serve(api)
    api.answers["POST /v1/nodes/drain"] = {"nodes": ["n1"]}

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("3")
        await shown(pilot, "n2")
        await pilot.press("d")
        await shown(pilot, "hctl drain n1 maintenance")
        await pilot.press(*["backspace"] * len("maintenance"), *"fan", "enter")
        await shown(pilot, "$ hctl drain n1 fan", until=lambda: bool(api.requests("POST /v1/nodes/drain")))

    run(steps)
    assert api.requests("POST /v1/nodes/drain")[0] == {"nodes": "n1", "why": "fan"}


def test_a_command_line_runs_commands_of_hpcsched_alone_on_what_is_selected(api: FakeApi) -> None:
    serve(api)
    api.answers["GET /v1/job/11/why"] = {
        "job": "11",
        "lines": [],
        "text": "job 11 is running",
        "reason": "None",
        "waiting": 0,
        "expected_start_s": None,
    }

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("colon", *"rm x", "enter")
        await shown(pilot, "cannot run 'rm' here")
        await pilot.press("colon", *"hwhy %", "enter")
        await shown(pilot, "$ hwhy %", "job 11 is running", "ended with exit status 0")

    run(steps)


def test_output_is_followed_and_filtered(api: FakeApi) -> None:
    serve(api)
    api.answers["GET /v1/log"] = [
        log_answer(b"step 1 [red]x[/red]\x1b[31m\x07\n10%\r90%\n", ended=False),
        log_answer(b"step 2\n", offset=40, ended=False),
        log_answer(b"", offset=47, ended=True),
    ]

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("l")
        text = await shown(pilot, "output of job 11", "step 1 [red]x[/red]", "90%", "step 2", "the job has ended")
        assert not [part for part in ("10%", "\x1b", "\x07", "31m") if part in text]
        await pilot.press("slash", *"90", "enter")
        await shown(pilot, "90%", absent="step 2")

    run(steps)


def test_a_controller_that_is_away_is_named_and_the_screen_continues_when_it_is_back(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await shown(pilot, "n1", "train")
        api.answers["GET /v1/ping"] = None
        await shown(pilot, "hpcschedd does not answer (below: as last seen)", "n1", "train")
        api.answers["GET /v1/ping"] = (503, {"error": "it starts", "kind": "UnavailableError"})
        await shown(pilot, "does not answer", "it starts", "n1")
        api.answers["GET /v1/ping"] = PING | {"cluster": "again"}
        await shown(pilot, "hmon: again", absent="does not answer")

    run(steps)


@pytest.mark.parametrize(
    "answer", [{}, {"cluster": 3, "counts": [], "now_s": "x"}, (400, {"error": "no", "kind": "RequestError"})]
)
def test_an_answer_that_cannot_be_read_does_not_end_hmon(api: FakeApi, answer: Any) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await shown(pilot, "hmon: lab", "n1")
        api.answers["GET /v1/ping"] = answer
        await shown(pilot, "hpcschedd does not answer (below: as last seen)", "n1", "train")
        api.answers["GET /v1/ping"] = PING
        await shown(pilot, "hmon: lab", "n1")

    run(steps)


def test_markup_and_control_characters_of_users_are_text(api: FakeApi) -> None:
    evil = "[red]x[/red][@click=app.quit]y[/]"
    serve(api, queue_line(11, "11", evil), nodes=[node("n1", **FACTS) | {"link": "down", "link_why": evil}])
    api.answers["GET /v1/job/11"] = {"jobs": [running(11, name=evil, comment="\x1b[2J" + evil)]}

    async def steps(pilot: Pilot[int]) -> None:
        await shown(pilot, "[red]x[/red]")
        await pilot.press("2")
        await shown(pilot, "[red]x[/red")
        await pilot.press("c")
        await pilot.press("escape", "enter")
        text = await shown(pilot, "[red]x[/red][@click=app.quit]y[/]", "?[2J[red]x")
        assert "\x1b" not in text

    run(steps, size=(120, 40))


def test_arrays_are_folded_and_ended_jobs_hidden_until_a_key_asks(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later", until=lambda: api.parameters("GET /v1/queue").get("fold") == "1")
        assert "state" not in api.parameters("GET /v1/queue")
        await pilot.press("a", "f")
        await shown(pilot, until=lambda: api.parameters("GET /v1/queue").get("array") == "1")
        await shown(pilot, until=lambda: api.parameters("GET /v1/queue").get("state") == "ALL")

    run(steps)


def test_of_ten_thousand_jobs_only_the_visible_rows_are_drawn(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(api, *(queue_line(number, str(number), f"job{number}") for number in range(1, 10_001)))
    drawn: list[str] = []

    def counted(view: Any, row: Any, width: int) -> Any:
        drawn.append(row.key)
        return row_line(view, row, width)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "job1 ")
        api.answers["GET /v1/ping"] = None  # no refresh meanwhile
        await shown(pilot, "does not answer")
        monkeypatch.setattr(app_module, "row_line", counted)
        await pilot.press("end")
        await shown(pilot, "job10000")
        assert len(drawn) <= 3 * 24
        await pilot.press("up", "pageup")
        rows = pilot.app.query_one(RowList)
        assert rows.view.rows[rows.at].name == str(10_000 - 1 - (rows.size.height - 1))

    run(steps)


def test_the_cursor_stays_on_its_job_when_others_come_and_go(api: FakeApi) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("2")
        await shown(pilot, "later")
        await pilot.press("down")
        serve(
            api, queue_line(9, "9", "new"), queue_line(11, "11"), queue_line(12, "12", "later", "PENDING", "(Priority)")
        )
        await shown(pilot, "(Priority)", "new")
        current = pilot.app.query_one(RowList).current
        assert current is not None
        assert current.name == "12"

    run(steps)


@pytest.mark.parametrize("size", [(80, 24), (40, 8), (200, 60)])
def test_every_screen_and_the_help_fit_the_terminal(api: FakeApi, size: tuple[int, int]) -> None:
    serve(api)

    async def steps(pilot: Pilot[int]) -> None:
        assert isinstance(pilot.app, MonitorApp)
        await shown(pilot, "n1")
        for key in ("2", "3", "4", "5", "6", "question_mark"):
            await pilot.press(key)
            lines = text_of(pilot.app).splitlines()
            assert (len(lines), max(map(len, lines)) <= size[0]) == (size[1], True)

    run(steps, size=size)
