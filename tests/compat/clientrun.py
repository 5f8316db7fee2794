"""What runs a client: see the fixtures of `conftest`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Client = Callable[..., subprocess.CompletedProcess[str]]
