"""The structure of the product's code: no import circles, no crowded folders, short functions, unique class names."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import hpcsched

ROOT = Path(__file__).parents[2]
TOPS = (ROOT / "hpcsched", ROOT / "workers" / "hpcnode", ROOT / "workers" / "hpctrain", ROOT / "workers" / "hpcserve")
MOST_MODULES_OF_A_FOLDER = 20
MOST_LINES_OF_A_FUNCTION = 50
MOST_CLASS_NAMES_USED_TWICE = 1
# The bars: 350 modules without those of metrics, findings, drift, quiet hours, recorder, planner, doctor, rolling, the
# assessment of nodes (3: measured there, judged, and its command) and of links (3: measured there, who with whom, judged),
# new names of nodes, files for nodes (2: on the head, and there), machines on the local network, what a new node has
# changed, what jobs serve in a browser (4: what the API prepares, streams to jobs, their origins, terminals),
# scheduled backups (2: when, and which are kept), prolog and epilog (3: of
# nodes, of the head, and the program that both run), fitness of a node, web pages (5: what all have, those that
# show, those to work with, those for admins, and charts), which models fit, what machines are worth,
# the terminal's screen (10: what is asked, lines, views, training, output, actions, the app, its command, the demo's
# picture, and the summary that it shares with the web pages), probation of a node, trust in paths, idle nodes that are
# switched off (4: which, recorded, done, and Wake-on-LAN), alerts and mail (10: table, rules, state, job mail, texts, sending,
# the child, its database, what it is told), children of the controller, problems of machines, efficiency of jobs, serving
# (41: its package, errors, splits, steps, requests, config, weights, kernels, model, cache, tokens, grammars, batching,
# sampling, speculation, engine, links, runner, plan, arrange, leader, rank, front, their package, random model,
# chats, and the API with 9, commands, measurements, smaller models with 4), the example that is served, starts of
# elastic ranks, the demo's model, services (6: values, how many replicas, requests, hserve, which replica, and the way
# to it), streams that continue at another replica (2: what the gateway keeps, and the replica takes), a cluster's facts for
# plans of served models, no long function.
MOST_MODULES = 485
MOST_LONG_FUNCTIONS = 0
MOST_CHARACTERS_OF_A_SUMMARY = 88


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for top in TOPS:
        for path in top.rglob("*.py"):
            parts = path.relative_to(top.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return what the tests look at in a file, without the rest: trees of all files would fill the memory."""
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, KINDS)]
    for node in found:
        if isinstance(node, KINDS[:4]):
            del node.body[1:]
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules that this one imports anywhere: late and for types only, too."""
    found = set()
    for node in nodes_of(path):
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


def classes_and_long_functions(path: Path) -> tuple[set[str], set[str]]:
    """Return the names of the classes of a file, and of its functions that are too long."""
    nodes = nodes_of(path)
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}, long


def test_functions_are_short_and_class_names_are_used_once() -> None:
    names: Counter[str] = Counter()
    long: set[str] = set()
    for path in modules().values():
        classes, long_here = classes_and_long_functions(path)
        names.update(classes)
        long |= long_here
    twice = {name for name, count in names.items() if count > 1}
    assert len(twice) <= MOST_CLASS_NAMES_USED_TWICE, sorted(twice)
    assert len(long) <= MOST_LONG_FUNCTIONS, sorted(long)


def test_the_first_line_of_a_docstring_is_short() -> None:
    texts = [
        ast.get_docstring(node) or ""
        for path in modules().values()
        for node in nodes_of(path)
        if isinstance(node, KINDS[:4])
    ]
    long = [text.split("\n")[0] for text in texts if len(text.split("\n")[0]) > MOST_CHARACTERS_OF_A_SUMMARY]
    assert long == []


def test_the_product_has_few_modules() -> None:
    assert len(modules()) <= MOST_MODULES


def test_no_exception_is_made_at_import_to_be_raised_again() -> None:
    """Each time that it is raised, it would keep the frames of all earlier times."""
    made = [
        (name, ast.unparse(statement))
        for name, path in modules().items()
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).endswith(("Error", "Exception"))
    ]
    assert made == []
