"""Names of test files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by their names alone, and refuses to collect a second one of the same name."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
