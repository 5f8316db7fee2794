"""The fake API of the commands' unit tests, for their recorded outputs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "cli"))

from conftest_api import api  # noqa: E402, F401
