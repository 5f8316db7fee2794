"""Text from outside becomes a number in one place per side, where its length is bounded: never by a bare ``int(text)``.

Python's int() reads up to 4,300 digits (and raises ValueError for more, or for "²"), and SQLite keeps 64 bits. What is read
with it is `hpcsched.model.units` for the head and `hpcnode.wire.gate` for the nodes. A number that is none of a stranger's text
is converted as before; the line says so with ``# int: why``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import hpcnode
import hpcsched

HEAD, NODE = Path(*hpcsched.__path__), Path(*hpcnode.__path__)
PLACES = ("controller", "steps", "jobscript", "api", "model", "listing")
READERS = {HEAD / "model" / "text.py", NODE / "wire" / "gate.py"}
COMMANDS = "commands"  # they run as their caller, whose text it is
OF_THE_KERNEL = {  # or of this agent itself, or bounded by a pattern
    "agent/attach.py", "agent/command.py", "agent/gpu_watch.py", "agent/probe.py", "agent/sampler.py",
    "agent/step_commands.py", "os/cgroup.py", "os/faults.py", "os/process.py",
}  # fmt: skip


def outside_readers() -> list[Path]:
    head = [path for place in PLACES for path in sorted((HEAD / place).rglob("*.py"))]
    node = [path for path in sorted(NODE.rglob("*.py")) if not is_excused(path.relative_to(NODE))]
    return [path for path in [*head, *node] if path not in READERS]


def is_excused(path: Path) -> bool:
    return path.parts[0] == COMMANDS or path.as_posix() in OF_THE_KERNEL


def is_number(argument: ast.expr) -> bool:
    """Say whether the argument cannot be a text: arithmetic, a literal, a named time or count."""
    if isinstance(argument, ast.BinOp | ast.Compare | ast.BoolOp):
        return not isinstance(argument, ast.BoolOp) or all(map(is_number, argument.values))
    if isinstance(argument, ast.Constant):
        return not isinstance(argument.value, str)
    if isinstance(argument, ast.Call):
        return isinstance(argument.func, ast.Name) and argument.func.id in ("max", "min", "round", "parse_when", "bool")
    if isinstance(argument, ast.IfExp):
        return is_number(argument.body) and is_number(argument.orelse)
    name = argument.attr if isinstance(argument, ast.Attribute) else getattr(argument, "id", "")
    return name.endswith(("_s", "_mib")) or name in ("id", "job_id", "seconds", "most")


def bare_numbers(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    found: dict[int, str] = {}  # by line; the smallest statement around a call, which comes last, decides
    for statement in ast.walk(ast.parse(path.read_text())):
        if not isinstance(statement, ast.stmt):
            continue
        is_exempt = any("# int: " in line for line in lines[statement.lineno - 1 : statement.end_lineno])
        for node in ast.walk(statement):
            is_bare = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "int"
            if is_bare and node.args and not is_number(node.args[0]):  # type: ignore[attr-defined]
                found[node.lineno] = "" if is_exempt else f"{path}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
    return [text for text in found.values() if text]


def test_text_from_outside_becomes_a_number_in_one_place() -> None:
    found = [one for path in outside_readers() for one in bare_numbers(path)]
    assert not found, "use whole_number() of hpcsched.model.units or hpcnode.wire.gate:\n" + "\n".join(found)
