"""What every test can use, and how Hypothesis behaves in all of them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# Many tests have unix sockets in directories of their own, and a socket's path has 107 bytes at most (unix(7)): where TMPDIR is
# long, the tests' is the short one.
if len(tempfile.gettempdir()) > 30:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# The same examples in every run, however slow the machine: a run judges a change, not luck. --hypothesis-profile=default
# looks for examples that nobody has seen.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
