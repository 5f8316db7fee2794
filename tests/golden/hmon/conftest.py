"""The fake API of hmon's unit tests, for its recorded pictures."""

from __future__ import annotations

import sys
from pathlib import Path

UNIT = Path(__file__).parents[2] / "unit"
sys.path[:0] = [str(UNIT / "cli"), str(UNIT / "tui")]

from conftest_api import api  # noqa: E402, F401
