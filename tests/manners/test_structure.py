"""The cut of the product's code: no circles of imports, no crowded folders, and a map whose files exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import hpcsched

ROOT = Path(__file__).parents[2]
TOPS = (ROOT / "hpcsched", ROOT / "workers" / "hpcnode", ROOT / "workers" / "hpctrain")
MOST_MODULES_OF_A_FOLDER = 20


def modules() -> dict[str, Path]:
    found = {}
    for top in TOPS:
        for path in top.rglob("*.py"):
            parts = path.relative_to(top.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules that this one imports anywhere: late and for types only, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return found & known.keys()


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves by way of others: what is left when all others are taken away."""
    left = {name: set(others) - {name} for name, others in graph.items()}
    while done := {name for name, others in left.items() if not others} | (
        left.keys() - set().union(*left.values()) if left else set()
    ):
        left = {name: others - done for name, others in left.items() if name not in done}
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    assert circles({name: imports_of(path, known) for name, path in known.items()}) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_no_folder_is_crowded() -> None:
    counts = Counter(path.parent for path in modules().values())
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES_OF_A_FOLDER} == {}


def test_the_files_that_the_map_names_exist() -> None:
    named = re.findall(r"[a-z_/]+\.py", str(hpcsched.__doc__))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "hpcsched" / name).exists() and not (ROOT / name).exists()] == []
