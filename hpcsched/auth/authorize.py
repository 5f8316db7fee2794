"""Decide whether an identity may do an action on an object: one table, one function.

`MATRIX` says for each action and role which objects the role reaches. `authorize` raises if the
object is out of reach, `allows` answers. No other module decides: an identity has no other question
to ask. The roles are Slurm's (user, coordinator, operator, administrator), with `viewer` and
`service` for people and programs that only look.

`[privacy]` of hpcsched.toml reduces what users see of others, as Slurm's PrivateData does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple, Protocol

from hpcsched.errors import PermissionDeniedError


class Role(Enum):
    """What an account is to the cluster."""

    VIEWER = "viewer"
    USER = "user"
    COORDINATOR = "coordinator"
    OPERATOR = "operator"
    ADMIN = "admin"
    SERVICE = "service"


ROLES = tuple(Role)


class Reach(Enum):
    """Which objects an action of a role reaches. Each member includes those before it."""

    NONE = "no"
    OWN = "own"
    ACCOUNT = "account"  # own objects, and those of the accounts that the identity coordinates
    ALL = "all"


class Action(Enum):
    """What can be asked of the controller.

    The value names it in the audit log and in scopes of tokens.
    """

    VIEW_JOBS = "view-jobs"
    VIEW_DETAILS = "view-details"
    VIEW_FILES = "view-files"
    VIEW_NODES = "view-nodes"
    VIEW_USAGE = "view-usage"
    VIEW_RESERVATIONS = "view-reservations"
    SUBMIT = "submit"
    CANCEL = "cancel"
    HOLD = "hold"
    RELEASE = "release"
    REQUEUE = "requeue"
    UPDATE = "update"
    RUN_STEP = "run-step"
    REACH_JOB = "reach-job"
    SET_TRIGGER = "set-trigger"
    USE_SERVICE = "use-service"
    MANAGE_SERVICE = "manage-service"
    SUSPEND = "suspend"
    OVERRULE_HOLD = "overrule-hold"
    FAVOR = "favor"
    DRAIN = "drain"
    POWER = "power"
    UPDATE_PARTITION = "update-partition"
    RESERVE = "reserve"
    SILENCE = "silence"
    FENCE = "fence"
    REMOVE_NODE = "remove-node"
    BENCH_NODES = "bench-nodes"
    SYNC_NODES = "sync-nodes"
    PROBE_SHARE = "probe-share"
    SETTLE_ORPHANS = "settle-orphans"
    RESET_USAGE = "reset-usage"
    RECONFIGURE = "reconfigure"
    BACK_UP = "back-up"
    ACT_FOR_USER = "act-for-user"
    USE_TOKENS = "use-tokens"
    REVOKE_TOKENS = "revoke-tokens"
    MANAGE_TOKENS = "manage-tokens"
    READ_AUDIT = "read-audit"


_NONE, _OWN, _ACCOUNT, _ALL = Reach

# Columns: viewer, user, coordinator, operator, admin, service.
_TABLE: dict[Action, tuple[str, tuple[Reach, Reach, Reach, Reach, Reach, Reach]]] = {
    Action.VIEW_JOBS: ("see jobs, waiting, running and ended", (_ALL, _ALL, _ALL, _ALL, _ALL, _ALL)),
    Action.VIEW_DETAILS: (
        "see a job's script, environment, paths, output and history",
        (_OWN, _OWN, _ACCOUNT, _ACCOUNT, _ALL, _NONE),
    ),
    Action.VIEW_FILES: (
        "list and read the files in a job's directory",
        (_NONE, _OWN, _OWN, _OWN, _OWN, _NONE),
    ),
    Action.VIEW_NODES: ("see nodes", (_ALL, _ALL, _ALL, _ALL, _ALL, _ALL)),
    Action.VIEW_USAGE: ("see shares and usage", (_ALL, _ALL, _ALL, _ALL, _ALL, _ALL)),
    Action.VIEW_RESERVATIONS: ("see reservations", (_ALL, _ALL, _ALL, _ALL, _ALL, _ALL)),
    Action.SUBMIT: ("submit jobs and install a crontab", (_NONE, _OWN, _OWN, _OWN, _OWN, _NONE)),
    Action.CANCEL: ("cancel or signal jobs and steps", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.HOLD: ("hold jobs", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.RELEASE: ("release held jobs", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.REQUEUE: ("requeue jobs", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.UPDATE: ("change jobs", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.RUN_STEP: ("run steps in a job", (_NONE, _OWN, _OWN, _OWN, _ALL, _NONE)),
    Action.REACH_JOB: (
        "open what a job serves, or a terminal in it, in a browser",
        (_NONE, _OWN, _OWN, _OWN, _OWN, _NONE),
    ),
    Action.SET_TRIGGER: ("set and clear triggers", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.USE_SERVICE: (
        "ask a served model that is not open to others",
        (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE),
    ),
    Action.MANAGE_SERVICE: ("start, scale and stop served models", (_NONE, _OWN, _ACCOUNT, _ALL, _ALL, _NONE)),
    Action.SUSPEND: ("suspend and resume jobs", (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE)),
    Action.OVERRULE_HOLD: (
        "hold jobs so that their users cannot release them, and release these",
        (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE),
    ),
    Action.FAVOR: (
        "set a priority, a site factor, a negative nice; raise time limits above the limits",
        (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE),
    ),
    Action.DRAIN: ("drain and resume nodes", (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE)),
    Action.POWER: ("switch nodes off and on", (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE)),
    Action.UPDATE_PARTITION: ("change the state of partitions", (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE)),
    Action.RESERVE: ("create, change and delete reservations", (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE)),
    Action.SILENCE: ("silence alerts, and test who is told", (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE)),
    Action.FENCE: ("declare nodes switched off", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.REMOVE_NODE: ("remove nodes", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.BENCH_NODES: ("measure nodes while no jobs run there", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.SYNC_NODES: (
        "copy files to nodes and run commands there",
        (_NONE, _NONE, _NONE, _ALL, _ALL, _NONE),
    ),
    Action.PROBE_SHARE: ("have nodes compare the share", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.SETTLE_ORPHANS: (
        "see, adopt and end launches from before a restore",
        (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE),
    ),
    Action.RESET_USAGE: ("reset past usage", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.RECONFIGURE: ("reload the configuration", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.BACK_UP: ("back up the database", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.ACT_FOR_USER: ("see and change the crontab of other users", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
    Action.USE_TOKENS: ("create own tokens", (_OWN, _OWN, _OWN, _OWN, _OWN, _NONE)),
    Action.REVOKE_TOKENS: ("list and revoke own tokens, end own sessions", (_OWN, _OWN, _OWN, _OWN, _OWN, _OWN)),
    Action.MANAGE_TOKENS: (
        "create, list and revoke the tokens of other users; rotate the key",
        (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE),
    ),
    Action.READ_AUDIT: ("read and export the audit log", (_NONE, _NONE, _NONE, _NONE, _ALL, _NONE)),
}
MATRIX: dict[Action, dict[Role, Reach]] = {
    action: dict(zip(ROLES, cells, strict=True)) for action, (_, cells) in _TABLE.items()
}
# With the kind in `[privacy] hide`: what viewers and users see of it; coordinators see their accounts.
HIDEABLE: dict[str, Action] = {
    "jobs": Action.VIEW_JOBS,
    "nodes": Action.VIEW_NODES,
    "usage": Action.VIEW_USAGE,
    "reservations": Action.VIEW_RESERVATIONS,
}
_HIDDEN = {Role.VIEWER: Reach.OWN, Role.USER: Reach.OWN, Role.COORDINATOR: Reach.ACCOUNT}


class Owned(Protocol):
    """An object that belongs to a user, and perhaps to an account."""

    @property
    def uid(self) -> int: ...
    @property
    def user(self) -> str: ...
    @property
    def account(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of an object that is not a job."""

    uid: int
    user: str
    account: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """[roles], [privacy] and the coordinators of the accounts. Members are user names."""

    admins: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    viewers: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    default: Role = Role.USER  # of users that are not listed
    hidden: frozenset[Action] = frozenset()
    # User to the accounts that the user coordinates, with all accounts below these.
    coordinators: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def role_of(self, user: str) -> Role:
        """Return the role of a user."""
        for role, members in (
            (Role.ADMIN, self.admins),
            (Role.OPERATOR, self.operators),
            (Role.SERVICE, self.services),
            (Role.VIEWER, self.viewers),
        ):
            if user in members:
                return role
        if user in self.coordinators:
            return Role.COORDINATOR
        return self.default


class RepeatableRequest(NamedTuple):
    """A change with an idempotency key. `content`: the hash of its path and body."""

    key: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The account behind a request, and what it may do.

    `accounts`: accounts that it coordinates. `hidden`: actions whose objects `[privacy]` hides.
    `scope`: the actions that its token allows; None: no token, or one without a limit. `source`:
    where the request came from, for the audit log. `request`: the request, if its client may repeat it.
    """

    uid: int
    user: str
    role: Role
    accounts: frozenset[str] = frozenset()
    hidden: frozenset[Action] = frozenset()
    scope: frozenset[Action] | None = None
    source: str = "socket"
    request: RepeatableRequest | None = None

    def as_user(self) -> Identity:
        """Return this identity with the rights of a user at most, as its jobs have them."""
        above = self.role in (Role.COORDINATOR, Role.OPERATOR, Role.ADMIN)
        return replace(self, role=Role.USER if above else self.role, accounts=frozenset())


# Decides without a request: limits, health checks, lost nodes, preemption. No account has this uid.
CONTROLLER: Final = Identity(uid=-1, user="controller", role=Role.SERVICE, source="controller")
# Only root and the controller's account can send the signal.
SIGHUP: Final = replace(CONTROLLER, role=Role.ADMIN, source="SIGHUP")


def user_behind(uid: int, user: str, source: str) -> Identity:
    """Return the identity of a user whom an event names, for the audit log."""
    return Identity(uid=uid, user=user, role=Role.USER, source=source)


def identity_in(policy: AccessPolicy, uid: int, user: str, *, is_root: bool) -> Identity:
    """Return the identity of a user.

    `is_root`: root or the controller's own account, which are admins.
    """
    return Identity(
        uid=uid,
        user=user,
        role=Role.ADMIN if is_root else policy.role_of(user),
        accounts=policy.coordinators.get(user, frozenset()),
        hidden=policy.hidden,
    )


def reach(identity: Identity, action: Action) -> Reach:
    """Return which objects the identity reaches with `action`."""
    if identity.scope is not None and action not in identity.scope:
        return Reach.NONE
    if action in identity.hidden:
        return _HIDDEN.get(identity.role, MATRIX[action][identity.role])
    return MATRIX[action][identity.role]


def allows(identity: Identity, action: Action, owned: Owned | None = None) -> bool:
    """Return whether the identity may do `action`, on `owned` if the action has an object."""
    extent = reach(identity, action)
    if extent is Reach.ALL or extent is Reach.NONE:
        return extent is Reach.ALL
    if owned is None or owned.uid == identity.uid:
        return True
    return extent is Reach.ACCOUNT and owned.account in identity.accounts


def authorize(identity: Identity, action: Action, owned: Owned | None = None, what: str = "") -> None:
    """Raise PermissionDeniedError unless the identity may do `action`.

    `what` says in the error what was asked; without it the table's words are used.
    """
    if allows(identity, action, owned):
        return
    what = what or described(action)
    if identity.scope is not None and action not in identity.scope:
        raise PermissionDeniedError(f"cannot {what}: the token's scope does not allow {action.value}")
    if owned is not None and reach(identity, action) is not Reach.NONE:
        owner = owned.user if allows(identity, Action.VIEW_JOBS, owned) else "another user"
        raise PermissionDeniedError(f"cannot {what}: it belongs to {owner}, you are {identity.user}")
    roles = " or ".join(role.value for role in ROLES if MATRIX[action][role] is not Reach.NONE)
    raise PermissionDeniedError(
        f"cannot {what}: this needs the role {roles}; you are {identity.user}, with the role {identity.role.value}"
    )


def authorize_root(identity: Identity, own_uid: int, what: str) -> None:
    """Raise PermissionDeniedError unless the identity is root or the controller's account.

    For the few things that would give an admin the rights of these accounts. `own_uid` is the
    controller's.
    """
    if identity.uid not in (0, own_uid):
        raise PermissionDeniedError(
            f"cannot {what}: only root and the controller's account can; you are {identity.user}"
        )


def described(action: Action) -> str:
    """Return what the action is, as a verb and its object."""
    return _TABLE[action][0]


def matrix_text() -> str:
    """Return the table of roles, as `hctl show roles` prints it."""
    rows = [("ACTION", *(role.value.upper() for role in ROLES), "MEANING")]
    rows += [(action.value, *(MATRIX[action][role].value for role in ROLES), described(action)) for action in MATRIX]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"
