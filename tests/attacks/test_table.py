"""The table of attacks in README.md: complete, in order, and naming tests that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

TESTS = Path(__file__).parents[1]
COUNTS = {"A": 13, "B": 11, "C": 8, "D": 8, "E": 8, "F": 7, "G": 8}
# Their tests start no process of ours, so that the account which runs them changes nothing.
PURE = (
    "unit/",
    "manners/",
    "simulation/",
    "attacks/test_input_bounds.py",
    "attacks/test_model_service.py",
    "attacks/test_security_report.py",
    "attacks/test_ssh_algorithms.py",
    "attacks/test_table.py",
)
_ROW = re.compile(r"\| ([A-G]\d+) \| (.*) \| (.*)\|")
_TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.M)


def table() -> list[tuple[str, list[str]]]:
    rows = map(_ROW.fullmatch, Path(__file__).with_name("README.md").read_text().splitlines())
    return [(row[1], re.findall(r"`([^`]+)`", row[2])) for row in rows if row]


def reasons() -> dict[str, str]:
    """Return why no test of an attack runs as a plain user."""
    rows = map(_ROW.fullmatch, Path(__file__).with_name("README.md").read_text().splitlines())
    return {row[1]: row[3].strip() for row in rows if row and row[3].strip()}


def ids_of(test: str) -> set[str]:
    """Return the attacks that the name of a test has, in capitals."""
    return {word.upper() for word in test.split("_") if re.fullmatch(r"[a-g][0-9]+", word)}


def test_each_attack_has_a_row_in_order() -> None:
    assert [name for name, _ in table()] == [
        f"{group}{n}" for group, last in COUNTS.items() for n in range(1, last + 1)
    ]


def named(test: str) -> list[str]:
    """Return the names of the tests that an entry of the table stands for."""
    path, _, pattern = test.partition("::")
    names = _TEST.findall((TESTS / path).read_text()) if (TESTS / path).is_file() else []
    return [name for name in names if fnmatchcase(name, pattern)]


def test_the_tests_that_the_table_names_exist() -> None:
    assert [(attack, test) for attack, tests in table() for test in tests if not named(test)] == []


def test_each_attack_has_a_test_with_its_id_in_the_name() -> None:
    def has_one(attack: str, tests: list[str]) -> bool:
        return any(attack in ids_of(name) for test in tests for name in named(test))

    assert [attack for attack, tests in table() if not has_one(attack, tests)] == []


def test_no_test_of_the_table_is_left_out_as_root() -> None:
    files = {test.partition("::")[0] for _, tests in table() for test in tests}
    left_out = re.compile(r"skipif\((AS_ROOT|os\.gete?uid\(\) == 0)")
    assert [name for name in sorted(files) if left_out.search((TESTS / name).read_text())] == []
