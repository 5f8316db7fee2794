"""Identify the client of the unix socket.

The kernel identifies it (SO_PEERCRED, unix(7)), never the request. `hpcsched.auth.authorize` decides
what it may do.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct

from hpcnode.os import account as node_user
from hpcsched.auth.authorize import AccessPolicy, Identity, identity_in

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the connected process at the time when it connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(credentials)
    return int(uid)  # int: of the kernel


def identity_of(uid: int, policy: AccessPolicy) -> Identity:
    """Return the identity of `uid`. Root and the controller's own account are admins."""
    return identity_in(policy, uid, user_name(uid), is_root=uid in (0, os.getuid()))


def is_account(name: str) -> bool:
    """Return whether this machine has an account of that name."""
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def uid_of(name: str) -> int | None:
    """Return the uid of the account of that name, None: this machine has none."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def user_name(uid: int) -> str:
    """Return the account's name, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def home_of(uid: int) -> str:
    """Return the home directory of an account, "" if it has none."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


def why_refused(uid: int, allow_uid_below: int) -> str:
    """Return why jobs of `uid` are refused unless `allow_uid_below` is 0, "" if they are not."""
    try:
        return node_user.why_refused(pwd.getpwuid(uid), allow_uid_below)
    except KeyError:  # no account: another check decides about it
        return f"its uid {uid} is below allow_uid_below = {allow_uid_below}" if uid < allow_uid_below else ""
