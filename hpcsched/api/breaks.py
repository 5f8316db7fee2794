"""Long answers are made in slices, so that others are answered in between."""

from __future__ import annotations

import asyncio
import time

SLICE_S = 0.025


class Breaks:
    """Says when a slice has lasted long enough: then `await breaks.take()`. What is looked at may have changed after it."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + SLICE_S

    def due(self) -> bool:
        """Say whether it is time for a break."""
        return time.monotonic() > self._until_s

    async def take(self) -> None:
        """Let others go on."""
        await asyncio.sleep(0)
        self._until_s = time.monotonic() + SLICE_S
