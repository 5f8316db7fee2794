"""What hmon draws on a terminal of 80 x 24: its six screens and a job, for a cluster that never changes.

A picture is textual's own, an SVG that browsers show. What is compared is each text with its place and style, so that another
version of textual may frame it in another way. To record anew, after looking at the difference:
``HPCSCHED_UPDATE_GOLDEN=1 pytest tests/golden/hmon``.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import re
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("textual")

from fake_api import NOW_S, FakeApi, job, log_answer, running
from monitored import FACTS, PING, alert, energy_of, opened, queue_line, serve, shown
from screens import node

PICTURES = Path(__file__).parent / "pictures"
A100 = [{"index": 0, "type": "a100"}, {"index": 1, "type": "a100"}]
# The keys to a screen, and the texts that it has once the controller has answered all of its questions.
PAGES = {
    "1-overview": ((), ("fit2", "fan is loud")),
    "2-jobs": (("2",), ("sweep", "(JobArrayTaskLim")),
    "3-nodes": (("3",), ("gpu 2/2", "[3 nodes]")),
    "4-queue": (("4",), ("reserved", "####")),
    "5-health": (("5",), ("NodeFailsOften", "idle reservation")),
    "6-use": (("6",), ("physics", "kg CO2")),
    "job": (("enter",), ("energy", "step 2")),
}

_TEXT = re.compile(r'<text class="[\w-]+-(r\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
_STYLE = re.compile(r"\.[\w-]+-(r\d+) \{([^}]*)\}")
_BACK = re.compile(r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def drawn(svg: str) -> list[str]:
    """Return what a picture shows: each text with its place and style, and each background."""
    styles = {name: " ".join(style.split()) for name, style in _STYLE.findall(svg)}
    texts = [(float(y), float(x), f"{unescape(text)!r} {styles[name]}") for name, x, y, text in _TEXT.findall(svg)]
    backs = [(float(y), float(x), f"{colour} {float(width):.0f} wide") for colour, x, y, width in _BACK.findall(svg)]
    return [f"{y:.0f} {x:.0f} {what}" for y, x, what in sorted(texts + backs)]


@pytest.fixture
def cluster(api: FakeApi) -> FakeApi:
    """Serve a cluster with one of each thing that a screen shows."""
    nodes = [
        node("n1", **FACTS | {"gpus": A100, "gpus_alloc": 2}, state="ALLOCATED", cpus=8, cpus_alloc=8, jobs=[11]),
        node("n2", **FACTS, state="MIXED", cpus=8, cpus_alloc=2, jobs=[11]),
        node(
            "n3",
            **FACTS | {"drained": True, "drained_why": "fan is loud"},
            state="DRAINED",
            cpus=8,
            cpus_alloc=0,
            jobs=[],
        ),
        node("n4", **FACTS, state="DOWN", cpus=8, cpus_alloc=0, jobs=[])
        | {"link": "down", "link_why": "no route to host"},
    ]
    serve(
        api,
        queue_line(11, "11", "fit"),
        queue_line(12, "12", "fit2", "PENDING", "(Resources)"),
        queue_line(20, "20_[3-9%2]", "sweep", "PENDING", "(JobArrayTaskLimit)"),
        queue_line(9, "9", "census", "FAILED", "n2"),
        nodes=nodes,
    )
    runs = running(11, name="fit", time_limit_s=12 * 3600) | {"folded": {"tasks": "", "count": 1}}
    waits = job(12, name="fit2") | {"folded": {"tasks": "", "count": 1}}
    later = job(20, name="sweep", reason="JobArrayTaskLimit", reason_detail="", expected_start_s=None, array_job_id=20)
    api.answers["GET /v1/jobs"] = lambda _, given: {
        "jobs": [runs] if given["state"] != "PENDING" else [waits, later | {"folded": {"tasks": "3-9", "count": 7}}],
        "now_s": NOW_S,
    }
    share = {"depth": 0, "shares": 1, "norm_shares": 1.0, "norm_usage": 0.5, "fairshare": None, "user": ""}
    finding = {
        "cause": "idle reservation",
        "node": "",
        "text": "n9 is reserved",
        "remedy": "hctl delete reservation r",
    }
    api.answers |= {
        "GET /v1/ping": PING | {"counts": {"RUNNING": 1, "PENDING": 8}},
        "GET /v1/job/11": {"jobs": [running(11, name="fit")]},
        "GET /v1/slow": {"findings": [finding], "text": ""},
        "GET /v1/alerts": {"left_out": 0, "alerts": [
            alert("NodeDown", "critical", node="n4"), alert("DiskFull", "warning", "resolved", node="n2"),
            alert("NodeFailsOften", "warning", "pending", node="n3"),
        ]},
        "GET /v1/reservations": {"reservations": [
            {"name": "fans", "start_s": NOW_S + 4 * 3600, "end_s": NOW_S + 8 * 3600, "node_list": "n[3-4]"},
        ]},
        "GET /v1/shares": {"shares": [
            share | {"account": ""}, share | {"account": "physics", "depth": 1, "shares": 3, "norm_shares": 0.75},
            share | {"account": "physics", "user": "ann", "depth": 2, "fairshare": 0.25},
        ]},
        "GET /v1/history": {"jobs": [energy_of("ann", 11, 5.4e6), energy_of("bob", 9, 1.8e6, "estimated")]},
        "GET /v1/log": log_answer(b"step 1\nstep 2\n"),
    }  # fmt: skip
    return api


@pytest.mark.parametrize("name", PAGES)
def test_a_screen_looks_as_its_picture(cluster: FakeApi, name: str) -> None:
    keys, parts = PAGES[name]

    async def picture() -> str:
        async with opened() as pilot:
            await shown(pilot, "fit2", "fan is loud")
            rows = pilot.app.query_one("RowList")
            if name == "job":
                await pilot.press("2")
                await shown(pilot, "sweep")
            await pilot.press(*keys)
            await shown(pilot, *parts)
            assert rows.has_focus
            return str(pilot.app.export_screenshot(title=name))

    svg, path = _FONT.sub("", asyncio.run(picture())), PICTURES / f"{name}.svg"
    if os.environ.get("HPCSCHED_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
    expected = drawn(path.read_text())
    assert len(expected) > 20
    assert list(difflib.unified_diff(expected, drawn(svg), "expected", "drawn", lineterm="", n=1)) == []


def test_a_picture_with_another_text_place_or_color_is_another() -> None:
    svg = (PICTURES / "2-jobs.svg").read_text()
    place = _TEXT.search(svg)
    assert place is not None
    style = _STYLE.search(svg)
    assert style is not None
    for old, new in ((">", ">x"), ('x="0"', 'x="12.2"')):
        assert drawn(svg) != drawn(svg.replace(place[0], place[0].replace(old, new, 1)))
    assert drawn(svg) != drawn(svg.replace(style[2], " fill: #123456 "))
