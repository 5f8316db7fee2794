"""The terminal that `hrun --pty` was started at: made raw while the task runs, so that every key goes there, then as it was."""

from __future__ import annotations

import os
import termios
import tty
from typing import Any, List, Optional


class Screen:
    """The terminal on a descriptor, if it is one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: Optional[List[Any]] = None

    def make_raw(self) -> None:
        """Have every key passed on as it is."""
        if os.isatty(self._fd) and self._before is None:
            self._before = termios.tcgetattr(self._fd)
            tty.setraw(self._fd, termios.TCSADRAIN)  # what was typed meanwhile is for the task

    def restore(self) -> None:
        """Make it as it was."""
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None
