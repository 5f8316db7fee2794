"""Debian's Chromium, as the tests of web pages start it. Imports no package that a developer may lack."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CI") != "true", reason="NOT TESTED: needs Debian's chromium"
)


@contextmanager
def chromium(*more: str) -> Iterator[Browser]:
    """Run a browser, with `more` arguments."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, *more])
        yield browser
        browser.close()
