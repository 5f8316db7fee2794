"""What a rank keeps of the telling over generations: lines that the share has not taken, the account, the last checkpoint.

The first rank tells; the others follow, so that one of them can take over.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.listing import checkpoint_names
from hpctrain.checkpoint.manifest import SUFFIX, from_bytes
from hpctrain.errors import DamagedError
from hpctrain.goodput import Goodput, carried_on
from hpctrain.metrics import MetricsFile


@dataclass(slots=True)
class Kept:
    """The last checkpoint, of whichever attempt."""

    step: int = 0
    at_s: float = 0.0  # on the monotonic clock
    away: str = ""  # why a later one is not on the share


class Record:
    """A rank's record of one run, whose files lie in `out`."""

    def __init__(self, out: Path) -> None:
        self._out, self._began_at_s = out, time.time()
        self.kept = Kept()
        self._followed: Goodput | None = None
        self._seen: Mapping[str, Any] | None = None  # the account of the last step while another rank told

    @cached_property
    def file(self) -> MetricsFile:
        """The metrics, for the rank that writes them."""
        return MetricsFile(self._out / "metrics.jsonl")

    def account(self, step: int, *, interrupted: bool) -> Goodput:
        """This will take up the run's account at `step`, for the rank that tells."""
        lines = self.file.backwards()
        return carried_on(lines, step, interrupted=interrupted, began_at_s=self._began_at_s, seen=self._seen)

    def follow(self, account: Goodput) -> None:
        """This will go on with the account that another rank has taken up."""
        self._followed = account

    def saw(self, step: int, step_s: float) -> None:
        """This will count a step of which another rank tells."""
        if self._followed is not None:
            now_s = time.time()
            self._seen = {"step": step, "time": now_s} | self._followed.step(step_s, now_s)

    def look_for_checkpoint(self, distrusted: Collection[str]) -> None:
        """This will note the newest checkpoint, if none is known: for people, so one that cannot be read is passed over."""
        directory = self._out / "checkpoints"
        with suppress(OSError):  # a share that is away
            names = [] if self.kept.step else [name for name in checkpoint_names(directory) if name not in distrusted]
            for name in names:
                with suppress(DamagedError):
                    facts = from_bytes((directory / (name + SUFFIX)).read_bytes()).facts
                    self.kept.step = facts.step
                    self.kept.at_s = time.monotonic() - (time.time() - facts.written_at_s)
                    return
