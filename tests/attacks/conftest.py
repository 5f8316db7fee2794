"""Attacks on a node's agent use the small controller of tests/integration."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from agent_client import place, work  # noqa: E402, F401 - fixtures
