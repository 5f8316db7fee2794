"""The web pages as pictures, for a cluster and a clock that never change: in light, in dark, and on a phone.

`page_drawer` draws them, in a way that does not depend on the fonts of a machine. Pictures are kept at half their size. To record
anew, after looking at the difference: ``HPCSCHED_UPDATE_GOLDEN=1 pytest tests/golden/web``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("fontTools")
pytest.importorskip("PIL")

from chromium import NEEDS_CHROMIUM
from page_drawer import LOOKS, Drawer, drawing, lab
from PIL import Image, ImageChops

pytestmark = NEEDS_CHROMIUM

PICTURES = Path(__file__).parent / "pictures"
PAGES = {
    "overview": "/",
    "job": "/job/1",
    "queue": "/queue",
    "node": "/node/n1",
    "submit": "/submit?from=1",
    "alerts": "/alerts",
}
SEEN = 20  # of 255: a difference of a color that counts
MOST_PIXELS = 40  # of a picture that may differ: two or three letters
MOST_ROWS = 2  # by which the height may differ


@pytest.fixture(scope="module")
def drawer() -> Iterator[Drawer]:
    with drawing(lab(), boxes=True) as made:
        yield made


def different_pixels(one: Image.Image, other: Image.Image) -> Image.Image:
    """Return where two pictures differ, white on black; both have the size of the smaller one."""
    size = (min(one.width, other.width), min(one.height, other.height))
    found = ImageChops.difference(one.crop((0, 0, *size)), other.crop((0, 0, *size)))
    largest = found.split()
    return ImageChops.lighter(ImageChops.lighter(largest[0], largest[1]), largest[2]).point(
        lambda value: 255 * (value > SEEN)
    )


def why_different(one: Image.Image, other: Image.Image) -> str:
    """Return why two pictures are not the same, "" if they are."""
    if one.width != other.width or abs(one.height - other.height) > MOST_ROWS:
        return f"the size is {one.size}, and not {other.size}"
    where = different_pixels(one, other)
    count = where.histogram()[255]
    return f"{count} pixels differ, within {where.getbbox()}" if count > MOST_PIXELS else ""


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_as_its_picture(drawer: Drawer, tmp_path: Path, name: str, look: str) -> None:
    drawn, path = drawer.picture(PAGES[name], look), PICTURES / f"{name}-{look}.webp"
    if os.environ.get("HPCSCHED_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        drawn.save(path, lossless=True, quality=100, method=6)
    expected = Image.open(path).convert("RGB")
    why = why_different(drawn, expected)
    if why:
        drawn.save(tmp_path / "drawn.png")
        different_pixels(drawn, expected).save(tmp_path / "difference.png")
    assert why == "", f"of half its size; compare {path} with the pictures in {tmp_path}"


@pytest.mark.parametrize(
    ("name", "look", "rule"),
    [
        ("overview", "light", ".panel.bad { border-left: 5px solid var(--bad); }"),
        ("job", "dark", "dt { color: var(--quiet); font-size: .9em; }"),
        ("queue", "light", ".chart .running { fill: var(--s2); }"),
        ("node", "phone", "h1 { font-size: 1.45em; margin: .8em 0 .5em; }"),
        ("submit", "phone", ".fields input, .fields select { width: 100%; }"),
    ],
)
def test_a_page_without_one_rule_of_its_style_is_another(drawer: Drawer, name: str, look: str, rule: str) -> None:
    def without(style: str) -> str:
        assert rule in style
        return style.replace(rule, "")

    assert why_different(drawer.picture(PAGES[name], look, without), drawer.picture(PAGES[name], look)) != ""


def test_a_picture_does_not_depend_on_the_fonts_of_the_machine(drawer: Drawer) -> None:
    def other(style: str) -> str:
        assert "system-ui, sans-serif" in style
        return style.replace("system-ui, sans-serif", "serif").replace("ui-monospace, monospace", "cursive")

    for name in ("job", "queue"):
        assert why_different(drawer.picture(PAGES[name], "light", other), drawer.picture(PAGES[name], "light")) == ""
