"""Python that we start never looks for modules in the current directory, which may be anyone's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for part in ("hpcsched", "workers") for path in (ROOT / part).rglob("*.py"))


def unsafe_commands(source: str) -> Iterator[int]:
    """Yield the lines of lists that are commands of Python and have neither -P nor -I before what it runs."""
    nodes = list(ast.walk(ast.parse(source)))
    formatted = {id(node.right) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)}
    for node in nodes:
        if not isinstance(node, ast.List | ast.Tuple) or id(node) in formatted:
            continue
        words = [ast.unparse(item).strip("'\"") for item in node.elts]
        option = next((word for word in words[1:] if word in ("-m", "-c")), None)
        is_python = (words[:1] == ["sys.executable"] and len(words) > 1) or (option and "python" in " ".join(words))
        if not is_python and option != "-m":
            continue
        before = words[1 : words.index(option)] if option else words[1:2]
        if not {"-P", "-I"} & set(before) and not any("_NO_CURRENT_DIRECTORY" in word for word in words):
            yield node.lineno


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_is_started_with_p_or_i(path: Path) -> None:
    assert list(unsafe_commands(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "safe"),
    [
        ('run([sys.executable, "-m", "hpctrain.plot"])', False),
        ('run([sys.executable, "-c", "import json"])', False),
        ('run([python, "-m", "hpctrain.plot"])', False),
        ('run(("nice", "python3", "-m", "hpctrain.plot"))', False),
        ('run([sys.executable, "-P", "-m", "hpctrain.plot"])', True),
        ('run([sys.executable, "-I", "-c", "import json"])', True),
        ('run(["sh", "-c", "true"])', True),
    ],
)
def test_the_check_finds_what_it_is_for(source: str, safe: bool) -> None:
    assert (list(unsafe_commands(source)) == []) == safe
