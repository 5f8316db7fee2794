"""Regular expressions that are compiled when they are first used.

Commands import every pattern and use a few; compiling all of them took a tenth of `hsub`'s time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator


class Pattern:
    """What `re.compile` returns, as far as it is used here. Wrong patterns show at the first use: tests see to that."""

    __slots__ = ("_pattern", "flags", "text")

    def __init__(self, text: str, flags: int = 0) -> None:
        self.text = text
        self.flags = flags
        self._pattern: re.Pattern[str] | None = None

    def _compiled(self) -> re.Pattern[str]:
        if self._pattern is None:
            self._pattern = re.compile(self.text, self.flags)
        return self._pattern

    def match(self, string: str) -> re.Match[str] | None:
        return self._compiled().match(string)

    def search(self, string: str) -> re.Match[str] | None:
        return self._compiled().search(string)

    def finditer(self, string: str, pos: int = 0) -> Iterator[re.Match[str]]:
        return self._compiled().finditer(string, pos)

    def sub(self, replacement: str | Callable[[re.Match[str]], str], string: str) -> str:
        return self._compiled().sub(replacement, string)
