"""What the controller agrees on with an SSH server, and that nothing here believes an unknown host key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FINDERS = {"security.py"}  # names these settings to find them in the files of a site
BELIEVERS = re.compile(
    r"AutoAddPolicy|WarningPolicy|set_missing_host_key_policy|StrictHostKeyChecking[ =](no|off|accept-new)"
)


def believers(folder: Path) -> list[str]:
    """Return the files below a folder that would believe an unknown host key."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*.py"))
        if BELIEVERS.search(path.read_text()) and path.name not in FINDERS
    ]


def test_f3_no_file_of_ours_believes_an_unknown_host_key() -> None:
    assert {folder: believers(ROOT / folder) for folder in ("hpcsched", "workers")} == {"hpcsched": [], "workers": []}


@pytest.mark.parametrize(
    "text", ["c.set_missing_host_key_policy(x)", "'-oStrictHostKeyChecking=no'", "AutoAddPolicy()"]
)
def test_f3_the_gate_finds_each_kind(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text)
    assert believers(tmp_path) == ["a.py"]
