"""What the tests of hmon use: a controller's API at a socket, with a cluster in it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from conftest_api import api  # noqa: E402, F401
