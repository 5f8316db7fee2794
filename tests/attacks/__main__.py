"""Besiege a controller for some time and print what was found: ``python -m tests.attacks [SECONDS]``, as root."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.attacks.siege import besiege, percentile

MAX_P99_S = 0.25
MAX_RSS_MB = 512
MAX_DISK_MB = 512  # at the end: files only grow


def main() -> int:
    """Return 0 if others were served and the controller stayed within its bounds."""
    with tempfile.TemporaryDirectory(prefix="siege-") as directory:
        Path(directory).chmod(0o755)
        found = besiege(Path(directory), float(sys.argv[1]) if len(sys.argv) > 1 else 180.0)
    print(found)
    slow = max(percentile(found.pings, 0.99), percentile(found.submissions, 0.99)) > MAX_P99_S
    large = found.most_rss_mb > MAX_RSS_MB or found.disk_bytes > MAX_DISK_MB * 1_000_000
    return int(slow or large or not found.same_process or bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
