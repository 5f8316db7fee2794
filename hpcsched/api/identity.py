"""Identify the client of the unix socket, and decide its permissions.

The kernel identifies it (SO_PEERCRED, unix(7)), never the request.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from dataclasses import dataclass

from hpcnode.os import account as node_user
from hpcsched.errors import PermissionDeniedError
from hpcsched.model.job import Job

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """The account behind a request.

    `admin`: root, the account of the controller, and the configured admins.
    """

    uid: int
    user: str
    admin: bool

    def owns(self, job: Job) -> bool:
        """Return whether the asker owns this job, or may act as its owner."""
        return self.admin or job.uid == self.uid

    def must_own(self, job: Job, what: str) -> None:
        """Raise an error if the job belongs to another user; `what` names the action."""
        if not self.owns(job):
            raise PermissionDeniedError(
                f"cannot {what} job {job.display_id}: it belongs to {job.user}, you are {self.user}"
            )

    def must_be_admin(self, what: str) -> None:
        """Raise an error if the asker is not an admin; `what` names the action."""
        if not self.admin:
            raise PermissionDeniedError(f"cannot {what}: only root and the configured admins may, you are {self.user}")


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the connected process at the time when it connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(credentials)
    return int(uid)  # int: of the kernel


def asker_of(uid: int, admins: tuple[str, ...]) -> Asker:
    """Return the `Asker` of `uid`.

    Root, the controller's own account and the configured admins have all permissions.
    """
    user = user_name(uid)
    return Asker(uid=uid, user=user, admin=uid in (0, os.getuid()) or user in admins)


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


def why_refused(uid: int, allow_uid_below: int) -> str:
    """Return why jobs of `uid` are refused unless `allow_uid_below` is 0, "" if they are not."""
    try:
        return node_user.why_refused(pwd.getpwuid(uid), allow_uid_below)
    except KeyError:  # no account: another check decides about it
        return f"its uid {uid} is below allow_uid_below = {allow_uid_below}" if uid < allow_uid_below else ""
