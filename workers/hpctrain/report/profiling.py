"""A trace of some steps by torch's profiler, for `--profile N`.

One file per rank, for ui.perfetto.dev.

The first steps, which fill caches, are left out.  Does not know what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SKIPPED_STEPS = 3


class StepProfiler:
    """Traces `steps` steps of this rank, after the first `SKIPPED_STEPS`; 0: no step."""

    def __init__(self, steps: int, path: Path) -> None:
        self._left = steps
        self._skip = SKIPPED_STEPS
        self._path = path
        self._profiler: Any = None

    @property
    def is_on(self) -> bool:
        """Whether the current step is traced, which makes it slower."""
        return self._profiler is not None

    def step_begins(self) -> None:
        """Start the trace, if this is its first step."""
        if not self._left or self._profiler is not None:
            return
        if self._skip:
            self._skip -= 1
            return
        import torch.profiler  # noqa: PLC0415 (only who wants it waits for its import)

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def step_ended(self) -> Path | None:
        """Write the trace after its last step; return its path if that was now, else None."""
        if self._profiler is None:
            return None
        self._left -= 1
        return self._write() if self._left <= 0 else None

    def _write(self) -> Path | None:
        profiler, self._profiler, self._left = self._profiler, None, 0
        if profiler is None:
            return None
        profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        return self._path

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Write the incomplete trace when the steps end, or an error ends them."""
        try:
            yield
        finally:
            self._write()
