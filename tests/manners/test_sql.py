"""One SQL language: statements are SQLAlchemy Core, and what only SQLite has is in the engine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "hpcsched" / "store" / "engine.py"
SQL = re.compile(
    r"\s*(SELECT|INSERT (INTO|OR)|UPDATE \S+ SET|DELETE FROM|REPLACE INTO|(CREATE|DROP|ALTER) (TABLE|INDEX)|WITH \w+ AS|"
    r"ATTACH|VACUUM|EXPLAIN|PRAGMA|BEGIN (IMMEDIATE|TRANSACTION)|SAVEPOINT)\b"
)
OWN = re.compile(r"PRAGMA |BEGIN IMMEDIATE$")  # what SQLAlchemy has no construct for
CALLS = frozenset({"execute", "executemany", "executescript", "exec_driver_sql"})


def sql_texts(path: Path) -> list[str]:
    """Return the strings of a file that are SQL, docstrings excepted; and the calls that would run such strings."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += [node.value] if SQL.match(node.value) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            found.append(f".{node.func.attr}(")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sqlalchemy"):
            found += [f"import {alias.name}" for alias in node.names if alias.name in ("text", "literal_column")]
    return found


def test_there_is_no_sql_text_outside_the_engine() -> None:
    files = [path for folder in ("hpcsched", "workers") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): texts for path in files if path != ENGINE and (texts := sql_texts(path))}
    assert found == {}


def test_the_engine_has_only_what_core_cannot_say() -> None:
    texts = sql_texts(ENGINE)
    assert "BEGIN IMMEDIATE" in texts
    assert [text for text in texts if not OWN.match(text) and not text.startswith(".execute")] == []


FOR_POSTGRESQL = """
from sqlalchemy.dialects import postgresql, sqlite
sqlite.insert, sqlite.Insert, sqlite.dialect = postgresql.insert, postgresql.Insert, postgresql.dialect
from hpcsched.store import engine, rows, store
from sqlalchemy.schema import CreateIndex, CreateTable
statements = [one for module in (engine, store) for one in vars(module).values() if isinstance(one, engine.Statement)]
query = store.HistoryQuery(job_ids=(1,), users=("a",), states=("FAILED",), names=("b",), start_s=1.0, end_s=2.0)
for table in (rows.jobs, rows.submissions):
    statements.append(engine.Statement(store.select(table.c.id).where(*store._conditions(query, table))))
for statement in statements:
    assert str(statement.core.compile(dialect=postgresql.dialect(), compile_kwargs={"render_postcompile": True}))
for table in rows.metadata.sorted_tables:
    assert str(CreateTable(table).compile(dialect=postgresql.dialect()))
    assert all(str(CreateIndex(index).compile(dialect=postgresql.dialect())) for index in table.indexes)
print(len(statements))
"""


def test_the_same_statements_are_those_of_postgresql() -> None:
    done = subprocess.run([sys.executable, "-c", FOR_POSTGRESQL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50
