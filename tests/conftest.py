"""What every test can use, and how Hypothesis behaves in all of them."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run, however slow the machine: a run judges a change, not luck. --hypothesis-profile=default
# looks for examples that nobody has seen.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
