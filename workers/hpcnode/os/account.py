"""Accounts of tasks: looking one up, and becoming it irrevocably.

Rules: a process never continues with more rights than its account. Every step of the change is verified, and a failure is an
error of the launch. An agent that is not root runs tasks only as itself. A node's administrator may restrict accounts in
`/etc/hpcsched/node.json` (owned by root): {"allow_root": false, "min_uid": 1000, "deny_users": [], "allow_users": []}. If root is
not allowed, root's agent runs prologs and epilogs only if the administrator names them, too: {"programs": ["/etc/prolog"]}.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
from typing import Any, Dict, List, NamedTuple

from hpcnode.os.process import forbid_new_privileges

HELPER_SOCKET = "/run/hpcsched-helper/helper.sock"  # of `hpcnode.helper`, by which a plain agent starts tasks as users
POLICY_PATH = "/etc/hpcsched/node.json"
SHADOW_PATH = "/etc/shadow"
NOBODY_UID = 65534
_UID = re.compile("[0-9]{1,10}")
NO_LOGIN_SHELLS = ("nologin", "false")


class UserError(Exception):
    """This account cannot run here; the text is the reason."""


class UserAccount(NamedTuple):
    """An account of this node."""

    name: str
    uid: int
    gid: int
    groups: List[int]
    home: str
    shell: str


def why_refused(entry: pwd.struct_passwd, allow_uid_below: int) -> str:
    """Return why jobs of an account are refused by default, "" if they are allowed.

    `allow_uid_below` 0 allows all.
    """
    if allow_uid_below == 0:
        return ""
    if entry.pw_uid < allow_uid_below:
        return "its uid %d is below allow_uid_below = %d" % (entry.pw_uid, allow_uid_below)
    if entry.pw_uid == NOBODY_UID:
        return "it is the account nobody"
    if os.path.basename(entry.pw_shell) in NO_LOGIN_SHELLS and _is_locked(entry):
        return "it is locked, and its shell is %s" % entry.pw_shell
    return ""


def _is_locked(entry: pwd.struct_passwd) -> bool:
    """Return whether the account has no password login, judged by this machine's files."""
    password = entry.pw_passwd
    try:
        with open(SHADOW_PATH, "rb") as shadow:
            for line in shadow:
                name, _, rest = line.partition(b":")
                if name == os.fsencode(entry.pw_name):
                    password = os.fsdecode(rest.partition(b":")[0])
                    break
    except OSError:
        pass  # only root can read it, and only root decides which accounts run
    return password[:1] in ("!", "*")


def find_account(name: str, agent_uid: int, allow_uid_below: int = 0) -> UserAccount:
    """Return the account that a launch for `name` runs as. Raises UserError."""
    try:
        entry = pwd.getpwnam(name) if name else pwd.getpwuid(agent_uid)
    except KeyError:
        raise UserError("cannot run as %s: this node has no such account" % (name or "uid %d" % agent_uid)) from None
    if agent_uid != 0 and entry.pw_uid != agent_uid and not has_helper():
        raise UserError(
            "cannot run as %s: the agent of this node runs as %s and is not root" % (name, _name_of(agent_uid))
        )
    if agent_uid == 0:
        check_policy(entry.pw_name, entry.pw_uid)
        why = why_refused(entry, allow_uid_below)
        if why:
            raise UserError("cannot run as %s: %s" % (entry.pw_name, why))
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid) if agent_uid == 0 else []  # the helper looks itself
    return UserAccount(
        entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir or "/", entry.pw_shell or "/bin/sh"
    )


def has_helper() -> bool:
    """Return whether the root helper serves this process."""
    return os.geteuid() != 0 and os.access(HELPER_SOCKET, os.W_OK)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid


def check_policy(name: str, uid: int) -> None:
    """Check that the node's administrator lets root's agent run things as this account.

    Raises UserError.
    """
    policy = read_policy(POLICY_PATH)
    if uid == 0 and not policy.get("allow_root", True):
        raise UserError("cannot run as root: %s forbids it on this node" % POLICY_PATH)
    if uid != 0 and uid < policy.get("min_uid", 0):
        raise UserError("cannot run as %s: uid %d is below min_uid %d of this node" % (name, uid, policy["min_uid"]))
    allowed = policy.get("allow_users") or []
    if name in (policy.get("deny_users") or []) or (allowed and name not in allowed):
        raise UserError("cannot run as %s: %s of this node does not allow it" % (name, POLICY_PATH))


def why_not_as_root(program: str) -> str:
    """Return why root's agent must not run a program that the controller names, "" if it may."""
    if os.geteuid() != 0:
        return ""
    try:
        policy = read_policy(POLICY_PATH)
    except UserError as error:
        return str(error)
    if ("programs" not in policy and policy.get("allow_root", True)) or program in policy.get("programs", ()):
        return ""
    return "is not run: %s of this node does not name %s in programs" % (POLICY_PATH, program)


def read_policy(path: str) -> Dict[str, Any]:
    """Return the administrator's policy, {} without one.

    Raises UserError if it cannot be trusted: then nothing runs.
    """
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != 0 or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UserError("cannot trust %s: it must belong to root and be writable by root only" % path)
            policy = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError("cannot read %s: %s" % (path, error)) from None
    if not isinstance(policy, dict):
        raise UserError("cannot read %s: not a JSON object" % path)
    return policy


def become(account: UserAccount) -> None:
    """Become the account irrevocably, without privileges.

    Raises UserError or OSError; then exit at once.
    """
    if os.geteuid() == 0:
        os.setgroups(account.groups)
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
        if sorted(set(os.getgroups())) != sorted(set(account.groups)):
            raise UserError("cannot become %s: the groups did not change" % account.name)
    if os.getresuid() != (account.uid,) * 3:
        raise UserError("cannot become %s: the user did not change" % account.name)
    if (os.geteuid() == 0 or account.groups) and os.getresgid() != (account.gid,) * 3:
        raise UserError("cannot become %s: the group did not change" % account.name)
    if account.uid != 0:
        _check_no_way_back()
    forbid_new_privileges()


def change(name: str) -> None:
    """Change this process of root to the account `name` (or number), for ``--uid``.

    Raises UserError.
    """
    if os.getuid() != 0:
        raise UserError("--uid only permitted by root user")
    try:
        entry = pwd.getpwuid(int(name)) if _UID.fullmatch(name) else pwd.getpwnam(name)  # int: at most ten digits
    except (KeyError, OverflowError):
        raise UserError("Invalid --uid specification: this machine has no account %r" % name[:60]) from None
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)


def refuse_group() -> None:
    """Raise UserError for ``--gid``."""
    if os.getuid() != 0:
        raise UserError("--gid only permitted by root user")
    raise UserError("cannot take --gid: a job has the groups that its user has on each node; use --uid")


def _check_no_way_back() -> None:
    try:
        os.setuid(0)
    except OSError:
        return  # EPERM; EINVAL if this namespace has no root
    raise UserError("cannot drop root's rights: setuid(0) still works")
