"""Names of test files and of tests."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
MOST_CHARACTERS = 80  # a name says the rule


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by their names alone, and refuses to collect a second one of the same name."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_name_of_a_test_has_at_most_80_characters() -> None:
    names = [
        (path.name, name)
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name[1]) > MOST_CHARACTERS] == []
