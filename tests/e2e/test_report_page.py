"""The page of hreport on paper: a real Chromium makes a PDF of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from chromium import NEEDS_CHROMIUM, chromium
from playwright.sync_api import Page

from hpcsched.cli import hreport
from hpcsched.cli.hreport import ReportRow, UsageReport
from hpcsched.metrics.usage_report import NodeTime, Period, UsageRow, total_of
from hpcsched.model.tariff import EnergyPrices, PeriodPrices, PriceSteps

pytestmark = NEEDS_CHROMIUM
A4_POINTS, INCH = (595, 842), 96
WIDTH_MM, MARGIN_MM = 210, 15
ALL = list(hreport.TITLES)


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.new_page()


def report(users: int) -> str:
    """Return the page of a report with all tables, in which each figure is large and one name is hostile."""
    names = [f"user{number:03}" for number in range(users - 1)] + ["<img src=x onerror=alert(1)>" + "w" * 60]
    rows = []
    for name in names:
        use = UsageRow(
            key=(name,), jobs={1, 2}, cpu_s=9e9, gpu_s=9e8, mem_mib_s=9e12, node_s=9e8, measured_cpu_s=8e9,
            measured_mem_mib_s=9e12, measured_gpu_s=9e8, waits_s=[5.0, 86_400.0 * 9], joules=9e12,
        )  # fmt: skip
        rows.append(ReportRow(use.key, use, NodeTime(), None))
    whole = NodeTime(capacity_s=1e10, allocated_s=6e9, down_s=1e9, drained_s=1e9, off_s=1e9, idle_s=1e9)
    total = ReportRow((), total_of(row.use for row in rows), whole, None)
    energy = EnergyPrices(PriceSteps([(0.0, 0.3)]), PriceSteps([(0.0, 400.0)]))
    prices = PeriodPrices(currency="EUR", cpu_hour=0.01, gpu_hour=0.5, energy=energy)
    period = Period(1_798_761_600.0, 1_801_440_000.0, 1_801_440_000.0)
    found = UsageReport("lab", period, ("user",), rows, total, prices, ["A note."], "component")
    return hreport._page(found, [name for name in ALL if name != "nodes"])


def test_a_report_is_a_pdf_of_a4_pages_on_which_nothing_is_cut_off(page: Page, tmp_path: Path) -> None:
    page.set_content(report(120))
    data = page.pdf(prefer_css_page_size=True)
    (tmp_path / "report.pdf").write_bytes(data)
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", data)
    assert len(boxes) >= 5 * 2  # five tables of 120 rows
    assert {(round(float(wide)), round(float(high))) for wide, high in boxes} == {A4_POINTS}
    page.emulate_media(media="print")
    printed_px = int((WIDTH_MM - 2 * MARGIN_MM) / 25.4 * INCH)
    page.set_viewport_size({"width": printed_px, "height": 1000})
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().right))"
    )
    assert widest <= printed_px + 1
    styles = page.evaluate(
        "[getComputedStyle(document.querySelector('thead')).display, "
        "getComputedStyle(document.querySelector('tr')).breakInside, "
        "getComputedStyle(document.querySelector('.bar span')).printColorAdjust]"
    )
    assert styles == ["table-header-group", "avoid", "exact"]  # heads on each page, whole rows, colours


def test_a_short_report_is_one_page_and_shows_names_as_text(page: Page) -> None:
    wrong: list[str] = []
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("data:") else None)
    page.set_content(report(2))
    assert len(re.findall(rb"/MediaBox", page.pdf(prefer_css_page_size=True))) <= 2
    assert page.locator("td", has_text="<img src=x").count() == 5
    assert wrong == []
