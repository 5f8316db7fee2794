"""What the tests of the commands use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from conftest_api import api, linked  # noqa: E402, F401
