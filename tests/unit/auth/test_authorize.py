"""Roles and actions: one table, and nothing beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import hpcsched
from hpcsched.auth.authorize import (
    HIDEABLE,
    MATRIX,
    AccessPolicy,
    Action,
    Identity,
    Owner,
    Reach,
    Role,
    allows,
    authorize,
    identity_in,
    matrix_text,
)
from hpcsched.errors import PermissionDeniedError

PACKAGE = Path(hpcsched.__file__).parent
CHANGES = [action for action in Action if not action.value.startswith("view-") and action is not Action.READ_AUDIT]
MINE = Owner(uid=7, user="ann", account="physics")
ACCOUNTS = Owner(uid=8, user="bob", account="physics")
OTHERS = Owner(uid=9, user="eve", account="biology")


def identity(role: Role) -> Identity:
    accounts = frozenset({"physics"}) if role is Role.COORDINATOR else frozenset[str]()
    return Identity(uid=7, user="ann", role=role, accounts=accounts)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", Action)
def test_each_cell_says_which_objects_are_reached(action: Action, role: Role) -> None:
    reached = [allows(identity(role), action, owner) for owner in (MINE, ACCOUNTS, OTHERS)]
    accounts = role is Role.COORDINATOR
    assert (
        reached
        == {
            Reach.NONE: [False, False, False],
            Reach.OWN: [True, False, False],
            Reach.ACCOUNT: [True, accounts, False],
            Reach.ALL: [True, True, True],
        }[MATRIX[action][role]]
    )


def test_a_higher_role_may_do_what_a_lower_one_may() -> None:
    extents = list(Reach)
    order = (Role.VIEWER, Role.USER, Role.COORDINATOR, Role.OPERATOR, Role.ADMIN)
    for action, cells in MATRIX.items():
        ranks = [extents.index(cells[role]) for role in order]
        assert ranks == sorted(ranks), action


@pytest.mark.parametrize("role", [Role.VIEWER, Role.SERVICE])
def test_roles_that_look_change_nothing(role: Role) -> None:
    assert [action for action in CHANGES if allows(identity(role), action)] == (
        [Action.USE_TOKENS, Action.REVOKE_TOKENS] if role is Role.VIEWER else [Action.REVOKE_TOKENS]
    )


def test_a_scope_takes_rights_and_never_gives_any() -> None:
    for role in Role:
        for action in Action:
            limited = replace(identity(role), scope=frozenset({Action.VIEW_JOBS, Action.FENCE}))
            assert allows(limited, action) == (allows(identity(role), action) and action in limited.scope)


def test_private_kinds_show_what_is_ones_own() -> None:
    for kind in HIDEABLE.values():
        hidden = {role: replace(identity(role), hidden=frozenset({kind})) for role in Role}
        for role in (Role.VIEWER, Role.USER):
            assert [allows(hidden[role], kind, owner) for owner in (MINE, ACCOUNTS, OTHERS)] == [True, False, False]
        assert [allows(hidden[Role.COORDINATOR], kind, owner) for owner in (ACCOUNTS, OTHERS)] == [True, False]
        assert all(allows(hidden[role], kind, OTHERS) for role in (Role.OPERATOR, Role.ADMIN, Role.SERVICE))


def test_a_refusal_says_which_role_is_needed_or_whose_it_is() -> None:
    with pytest.raises(PermissionDeniedError, match="this needs the role admin; you are ann, with the role operator"):
        authorize(identity(Role.OPERATOR), Action.FENCE)
    with pytest.raises(PermissionDeniedError, match="cannot cancel job 3: it belongs to eve, you are ann"):
        authorize(identity(Role.USER), Action.CANCEL, OTHERS, "cancel job 3")
    private = replace(identity(Role.USER), hidden=frozenset({Action.VIEW_JOBS}))
    with pytest.raises(PermissionDeniedError, match="cannot cancel job 3: it belongs to another user"):
        authorize(private, Action.CANCEL, OTHERS, "cancel job 3")
    with pytest.raises(PermissionDeniedError, match="the token's scope does not allow submit"):
        authorize(replace(identity(Role.ADMIN), scope=frozenset()), Action.SUBMIT)


def test_the_configuration_gives_roles_and_root_is_an_admin() -> None:
    policy = AccessPolicy(
        admins=("ada",), operators=("olga",), viewers=("vera",), services=("prom",), default=Role.VIEWER
    )
    roles = {user: identity_in(policy, 1, user, is_root=False).role for user in ("ada", "olga", "vera", "prom", "x")}
    assert [role.value for role in roles.values()] == ["admin", "operator", "viewer", "service", "viewer"]
    assert identity_in(policy, 0, "x", is_root=True).role is Role.ADMIN


def test_a_job_of_an_admin_has_the_rights_of_a_user() -> None:
    assert {role: identity(role).as_user().role for role in Role} == {
        Role.VIEWER: Role.VIEWER,
        Role.USER: Role.USER,
        Role.COORDINATOR: Role.USER,
        Role.OPERATOR: Role.USER,
        Role.ADMIN: Role.USER,
        Role.SERVICE: Role.SERVICE,
    }


def test_the_man_page_has_the_table() -> None:
    text = (PACKAGE.parent / "man/hpcsched-security.7").read_text().replace("\\-", "-")
    assert matrix_text() in text


def test_no_other_module_decides() -> None:
    decides = re.compile(r"\.role\b(?!_of| for|\.value)|Role\.[A-Z]|MATRIX|\.admins\b")
    exempt = {"auth/authorize.py", "config/load.py", "cli/hctl.py", "doctor/security_facts.py"}
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if decides.search(path.read_text()) and str(path.relative_to(PACKAGE)) not in exempt
    }
    assert found == set()
