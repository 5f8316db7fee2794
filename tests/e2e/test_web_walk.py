"""A walk over all web pages: with a keyboard, on a phone, in clusters without nodes, with one, with many, and with odd texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("fontTools")
pytest.importorskip("PIL")

from chromium import NEEDS_CHROMIUM
from page_drawer import Controller, drawing, lab
from unit.controller.cluster import ANN, Cluster

from hpcsched.lifecycle.node import NodeDrained
from hpcsched.model.ids import NodeName

pytestmark = NEEDS_CHROMIUM

PAGES = [
    "/",
    "/jobs",
    "/nodes",
    "/queue",
    "/services",
    "/use",
    "/submit",
    "/alerts",
    "/network",
    "/admin",
    "/plan",
    "/plan?params=7B",
]
PAGES += ["/plan/worth", "/plan/worth?add=1x2:4G", "/login", "/login?code=x", "/job/none", "/node/none", "/none"]
OF_A_JOB = ["/job/1", "/job/1/log", "/job/1/files", "/job/1/file?path=a", "/job/1/checkpoints", "/submit?from=1"]
LONG = "word" * 100
# What a tab reaches, in order, with the style of the focus.
REACHED = """() => {
  const one = document.activeElement;
  const style = getComputedStyle(one);
  return [one.tagName, one.id, one.getAttribute("href") ?? one.name ?? one.textContent, style.outlineStyle, style.outlineWidth];
}"""
REACHABLE = """() => [...document.querySelectorAll("a[href],button,input,select,textarea,summary,[tabindex]")]
  .filter((one) => one.checkVisibility() && !one.disabled && one.type !== "hidden").length"""


def without_nodes() -> Controller:
    return Controller(Cluster())


def one_node() -> Controller:
    cluster = Cluster("n1")
    cluster.run(cluster.submit(ANN, name="train"))
    return Controller(cluster)


def many_nodes() -> Controller:
    controller = lab()
    known = controller.cluster.state.nodes
    for number in range(500):
        name = NodeName(f"m{number:03}")
        known[name] = replace(known[NodeName("n3")], spec=replace(known[NodeName("n3")].spec, name=name))
    for number in range(200):
        controller.cluster.submit(ANN, name=f"job {number}", hold=True)
    return controller


def odd_texts() -> Controller:
    cluster = Cluster("n1", "n2")
    texts = {"comment": LONG, "submit_line": f"hsub {LONG}", "work_dir": f"/{LONG}", "script": f"#!/bin/sh\n{LONG}\n"}
    cluster.run(cluster.submit(ANN, name=LONG, **texts))
    cluster.submit(ANN, name="<b>&amp;'\"", nodes_min=2, exclusive=True)
    cluster.ask(lambda tx: tx.record_node(NodeDrained(node="n2", at_s=tx.now_s, why=LONG, by="root")))
    controller = Controller(cluster)
    controller.files = {LONG: "file", "b": "directory", LONG + "x": "link"}
    controller.file = controller.log = f"{LONG}\n<b>\x1b[31m{LONG}".encode()
    for one in controller.alerts or ():
        one |= {"text": LONG, "remedy": LONG, "labels": {"node": LONG}}
    return controller


@pytest.mark.parametrize("made", [without_nodes, one_node, many_nodes, odd_texts], ids=lambda made: made.__name__)
def test_pages_fit_a_phone_whatever_the_cluster_has(made: Callable[[], Controller]) -> None:
    with drawing(made(), boxes=False) as drawer:
        page = drawer.page("phone")
        for path in PAGES + (OF_A_JOB if made is not without_nodes else []):
            page.goto(f"https://head{path}")
            assert page.get_by_role("heading", level=1).count() == 1, path
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), path
            small = page.evaluate(
                "() => [...document.querySelectorAll('button,input:not([type]),select')]"
                ".filter((one) => one.checkVisibility() && one.getBoundingClientRect().height < 24).map((one) => one.outerHTML)"
            )
            assert small == [], path
        assert [text for text in drawer.wrong if "404" not in text and "401" not in text] == []


def test_a_keyboard_reaches_all_of_a_page_and_shows_where_it_is() -> None:
    with drawing(lab(), boxes=False) as drawer:
        page = drawer.page("light")
        for path in [*PAGES, *OF_A_JOB]:
            page.goto(f"https://head{path}")
            wanted, reached = page.evaluate(REACHABLE), []
            for _ in range(wanted):
                page.keyboard.press("Tab")
                reached.append(tuple(page.evaluate(REACHED)))
            assert "BODY" not in [one[0] for one in reached], path
            assert [one for one in reached if one[3] == "none" or one[4] == "0px"] == [], path


def test_pages_without_scripts_show_no_control_that_does_nothing() -> None:
    with drawing(lab(), boxes=False) as drawer:
        page = drawer.page("light", java_script_enabled=False)
        for path in [*PAGES, *OF_A_JOB]:
            page.goto(f"https://head{path}")
            for one in page.locator("button:visible, input:visible").all():
                form = one.locator("xpath=ancestor::form[@method]")
                assert form.count() == 1 or path.startswith("/submit"), (path, one.evaluate("(one) => one.outerHTML"))


def test_a_page_shows_after_a_minute_what_no_event_tells() -> None:
    controller = one_node()
    with drawing(controller, boxes=False) as drawer:
        page = drawer.page("light")
        page.clock.install()
        page.goto("https://head/")
        page.get_by_text("Healthy: the node takes jobs").wait_for()
        controller.cluster.ask(lambda tx: tx.record_node(NodeDrained(node="n1", at_s=tx.now_s, why="fan", by="root")))
        page.clock.run_for(61_000)
        page.get_by_text("node n1 is drained: fan").wait_for()
