"""Who may do what is decided in `hpcsched.auth`: no other module compares roles or accounts of an identity."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
AUTH = ROOT / "hpcsched" / "auth"
QUESTIONS = ("uid", "user", "role", "accounts", "hidden", "scope")  # of an identity
# Comparisons that decide nothing about rights, by the function that has them.
NO_DECISION = {
    "controller/views/queue.py:_selection",  # hqueue lists the own jobs by default
    "controller/views/backend.py:_visible_reservations",  # "own" of a reservation: it names the user
    "controller/views/queue.py:share_views",  # "own" of a share
    "controller/requests/jobs.py:_hold_of",  # whose hold it is called
    "controller/requests/triggers.py:create",  # how many triggers the user has
    "controller/requests/services.py:create",  # how many services the user has
    "controller/requests/services.py:use",  # the owner is charged for replicas, not for tokens
    "controller/requests/submission.py:check_share_of_queue",  # root's jobs are not limited in number
    "controller/credentials.py:create",  # which of two actions to authorize
    "controller/credentials.py:revoke",
    "controller/credentials.py:make_code",  # which codes the user has
}
# Refusals that are not about who asks, but about what: by the function.
REFUSES = {
    "controller/views/backend.py:submit",  # the account does not exist on this machine
    "controller/views/backend.py:snapshot",  # reach() says that a part of it is hidden
    "controller/views/routes.py",  # scopes of tokens (auth.tokens says which); what cannot be asked from a job
    "controller/credentials.py:identify",
    "controller/credentials.py:finish_login",  # the account that a login names
    "controller/requests/submission.py:check_account",  # allow_uid_below
    "controller/requests/reservations.py:check_use",  # the reservation's users and accounts, as Slurm
    "controller/requests/triggers.py:create",  # an account that the controller cannot become
    "cli/admin/daemon.py:down",  # of the kernel
    "cli/slurm/scontrol.py:_notify",
    "steps/service.py:asking_uid",  # a command that runs in no job
}


def functions(path: Path, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (place, function) for each function of a file that is in no other function."""
    name = str(path.relative_to(ROOT / "hpcsched"))
    stack: list[ast.AST] = [tree]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", node
            else:
                stack.append(node)


def is_question(node: ast.expr) -> bool:
    """Return whether an expression is `identity.uid` or such."""
    return isinstance(node, ast.Attribute) and node.attr in QUESTIONS and ast.unparse(node.value).endswith("identity")


def decides(function: ast.AST) -> bool:
    return any(
        any(map(is_question, (node.left, *node.comparators)))
        for node in ast.walk(function)
        if isinstance(node, ast.Compare)
    )


def refuses(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Raise) and node.exc is not None and "PermissionDeniedError(" in ast.unparse(node.exc)
        for node in ast.walk(function)
    )


def files() -> list[Path]:
    found = [path for path in sorted((ROOT / "hpcsched").rglob("*.py")) if AUTH not in path.parents]
    assert len(found) > 100
    return found


def names_roles(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and any(alias.name in ("Role", "MATRIX") for alias in node.names)
        for node in ast.walk(tree)
    )


@functools.cache
def found() -> tuple[set[str], set[str], set[str]]:
    """Return the functions that decide, the functions that refuse, and the files that name roles."""
    deciding, refusing, naming = set(), set(), set()
    for path in files():
        tree = ast.parse(path.read_text())
        for place, function in functions(path, tree):
            if decides(function):
                deciding.add(place)
            if refuses(function):
                refusing.add(place.partition(":")[0] if "routes.py" in place else place)
        if names_roles(tree):
            naming.add(str(path.relative_to(ROOT)))
    return deciding, refusing, naming


def test_only_auth_compares_what_an_identity_is() -> None:
    assert found()[0] == NO_DECISION


def test_only_auth_refuses_for_who_asks() -> None:
    assert found()[1] == REFUSES


def test_roles_are_named_by_the_configuration_only() -> None:
    assert found()[2] == {"hpcsched/config/load.py", "hpcsched/cli/hctl.py"}  # hctl prints the table
