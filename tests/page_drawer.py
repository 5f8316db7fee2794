"""The web pages in Chromium without a server: each address is answered by the application in this process.

The cluster, the clock and the answers never change. Letters are boxes of a font that is made here, and controls are plain. So the
fonts and the theme of a machine do not count: what is drawn has the layout, the colors and the lengths of texts.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import chromium
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from jobs import T0
from PIL import Image
from playwright.sync_api import Browser, Page, Route
from starlette.testclient import TestClient
from unit.controller.cluster import ANN, BOB, Cluster
from waiting import PATIENCE_S
from zones import time_zone

import hpcsched
from hpcsched.gateway.app import COOKIE, GatewayApp
from hpcsched.gateway.pages import Pages
from hpcsched.gateway.site import Site
from hpcsched.lifecycle.node import NodeDrained
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Gpu, GpuRequest
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import ArraySpec

sys.path.insert(0, str(Path(__file__).parent / "unit" / "gateway"))

from test_pages import Controller, alert  # noqa: E402

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 640}, "color_scheme": "light"},
}
HALF = 2  # pixels of the browser in one of a picture, each way
PLAIN = """
*, *::before, *::after, *::placeholder { font-family: Boxes !important; }
select, input, textarea, meter { appearance: none !important; resize: none !important; }
meter { background: var(--s0) !important; } meter::-webkit-meter-inner-element { display: none !important; }
summary { list-style: none !important; }
"""
ARGUMENTS = ("--font-render-hinting=none", "--disable-lcd-text", "--force-color-profile=srgb", "--hide-scrollbars")
Changed = Callable[[str], str]  # of the style sheet


def lab() -> Controller:
    """Return a controller with one of each thing that a page shows."""
    cluster = Cluster("n1", "n2", "n3", "n4")
    gpus = tuple(Gpu(index=at, type="a100") for at in range(4))
    for name in ("n1", "n2"):
        known = cluster.state.nodes[NodeName(name)]
        cluster.state.nodes[NodeName(name)] = replace(
            known, spec=replace(known.spec, cpus=16, mem_mib=64_000, gpus=gpus, features=("nvlink",))
        )
    script = "#!/bin/bash\n#HSUB --gpus-per-node=2 --time=4:00:00\nmpirun python train.py\n"
    training = {"script": script, "submit_line": "hsub train.sh", "comment": "for the paper"}
    gpu = {"gpus_per_node": (GpuRequest(count=2),), "time_limit_s": 4 * 3600}
    cluster.run(cluster.submit(ANN, name="train-gpt", cpus_per_task=8, **gpu, **training))
    cluster.run(cluster.submit(BOB, name="evaluate", cpus_per_task=4, time_limit_s=7200))
    cluster.submit(ANN, name="next", nodes_min=2, exclusive=True, **gpu)
    cluster.submit(BOB, name="sweep", array=ArraySpec(indices=tuple(range(40))), hold=True)
    cluster.submit(BOB, name="too-long-a-name-for-any-column-of-any-page", hold=True)
    cluster.ask(lambda tx: tx.record_node(NodeDrained(node="n4", at_s=tx.now_s, why="fan is loud", by="root")))
    times = {"start_s": int(T0) + 3600, "end_s": int(T0) + 7200}
    cluster.state.reservations["weekend"] = Reservation(
        name="weekend", nodes=(NodeName("n3"), NodeName("n4")), users=("ann",), **times
    )
    cluster.tick()
    controller = Controller(cluster)
    controller.alerts = [
        alert("NodeDown", "critical", node="n3"),
        alert("DiskFull", "warning", "pending", node="n2", mount="/"),
        alert("JobWaste", "info", "resolved", job="1"),
    ]
    return controller


def box_font(height: int) -> bytes:
    """Return a font whose letters are boxes of this height, in thousandths of the size; each half as wide as the size."""
    pen = TTGlyphPen(None)
    for move, point in (("moveTo", (60, 0)), ("lineTo", (60, height)), ("lineTo", (440, height)), ("lineTo", (440, 0))):
        getattr(pen, move)(point)
    pen.closePath()
    empty, box = TTGlyphPen(None).glyph(), pen.glyph()
    made = FontBuilder(1000, isTTF=True)
    made.setupGlyphOrder([".notdef", "space", "box"])
    letters = [
        *range(0x21, 0x7F),
        *range(0xA1, 0x250),
        *range(0x2010, 0x2050),
        *range(0x2190, 0x2300),
        *range(0x25A0, 0x2600),
    ]
    made.setupCharacterMap({0x20: "space", 0xA0: "space", **dict.fromkeys(letters, "box")})
    made.setupGlyf({".notdef": box, "space": empty, "box": box})
    made.setupHorizontalMetrics({".notdef": (500, 60), "space": (500, 0), "box": (500, 60)})
    made.setupHorizontalHeader(ascent=800, descent=-200)
    made.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
    made.setupNameTable({"familyName": "Boxes", "styleName": "Regular"})
    made.setupPost()
    data = io.BytesIO()
    made.save(data)
    return data.getvalue()


def font_faces() -> str:
    """Return the style that has the font: bold letters are higher."""
    return "".join(
        f'@font-face {{ font-family: Boxes; font-weight: {weight}; src: url("data:font/ttf;base64,'
        f'{base64.b64encode(box_font(height)).decode()}"); }}\n'
        for weight, height in (("100 500", 420), ("501 900", 640))
    )


@dataclass
class Drawer:
    """Draws pages in Chromium. `wrong`: errors and warnings of the pages' console."""

    browser: Browser
    client: TestClient
    style: str = ""
    wrong: list[str] = field(default_factory=list)

    def page(self, look: str, changed: Changed = str, **how: Any) -> Page:
        """Return a page of a browser with this look; `changed`: what becomes of the style sheet."""
        context = self.browser.new_context(bypass_csp=bool(self.style), reduced_motion="reduce", **LOOKS[look], **how)
        context.route("**/*", lambda route: self._answer(route, changed))
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("console", lambda one: self.wrong.append(one.text) if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        return page

    def _answer(self, route: Route, changed: Changed) -> None:
        asked = urlsplit(route.request.url)
        if asked.path.startswith("/api/"):
            route.fulfill(status=204)  # a stream that stays closed: a refresh would say when it was
            return
        names = ("accept", "content-type", "x-requested-with")
        found = self.client.request(
            route.request.method,
            asked._replace(scheme="", netloc="").geturl(),
            content=route.request.post_data_buffer,
            headers={name: value for name, value in route.request.headers.items() if name in names},
        )
        headers = {
            name: found.headers[name] for name in ("content-type", "content-security-policy") if name in found.headers
        }
        body = changed(found.text) + self.style if asked.path == "/static/style.css" else found.content
        route.fulfill(status=found.status_code, headers=headers, body=body)

    def picture(self, path: str, look: str, changed: Changed = str) -> Image.Image:
        """Return a page at half its size."""
        page = self.page(look, changed)
        page.goto(f"https://head{path}")
        page.evaluate("() => document.fonts.ready")
        if path.startswith("/submit"):
            page.locator("#check", has_text="to start at").wait_for()
        data = page.screenshot(full_page=True, animations="disabled")
        page.context.close()
        return Image.open(io.BytesIO(data)).convert("RGB").reduce(HALF)


@contextmanager
def drawing(controller: Controller, *, boxes: bool) -> Iterator[Drawer]:
    """Draw the pages of a controller, as an administrator sees them, in UTC; with `boxes` as letters, or with fonts."""
    with pytest.MonkeyPatch.context() as patch, time_zone("UTC"), chromium(*ARGUMENTS) as browser:
        patch.setattr(hpcsched, "__version__", "1.0.0")
        settings = replace(controller.cluster.state.config.gateway, rate=1e6, burst=1e6)
        app = GatewayApp(controller, settings)  # type: ignore[arg-type]
        client = TestClient(app.asgi(Pages(Site(app)).routes()), base_url="https://head", cookies={COOKIE: "roots"})
        with client:
            yield Drawer(browser, client, PLAIN + font_faces() if boxes else "")
