"""Where things of one agent lie, and how its programs are run again: paths below its root, the socket, the shims.

A unix socket's path has 107 bytes at most; when the root's is too long, the socket lies in a private directory under /tmp.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import sys
from typing import Callable, List

MAX_SOCKET_PATH = 100
OLD_BUNDLE_S = 600.0
_BUNDLE = re.compile(r"hpcnode-([0-9a-f]+)\.pyz\Z")


def socket_path(root: str) -> str:
    """Return the path of the agent's socket for this root."""
    path = os.path.join(root, "agent.sock")
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return "/tmp/hpcnode-%d/%s.sock" % (os.geteuid(), digest)


def make_socket_folder(path: str) -> None:
    """Make the directory of the socket if it is not there. Raises PermissionError if it is somebody else's."""
    folder = os.path.dirname(path)
    mode = 0o711 if os.geteuid() == 0 else 0o700
    try:
        os.mkdir(folder, mode)
    except FileExistsError:
        pass
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(
            "cannot use %s: it must be a directory that only uid %d may write" % (folder, os.geteuid())
        )


def program() -> str:
    """Return what Python is to run to get this program again: the bundle, or the package's directory."""
    here = os.path.dirname(os.path.abspath(__file__))
    bundle = os.path.dirname(here)
    return bundle if os.path.isfile(bundle) else here


def version() -> str:
    """Return which bundle this is: its hash, `source` for a directory."""
    match = _BUNDLE.search(program())
    return match.group(1) if match else "source"


def command(*words: str) -> List[str]:
    """Return the argument vector that runs this program with `words`, isolated from the user's Python settings."""
    return [sys.executable, "-I", "-S", program(), *words]


def delete_old_bundles(root: str, in_use: Callable[[bytes], bool], now_s: float) -> List[str]:
    """Delete the bundles of other versions that no process runs from; return their names.

    Not those that came a moment ago: somebody is about to start from one.
    """
    deleted = []
    ours = os.path.basename(program())
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if name == ours or not _BUNDLE.fullmatch(name) or now_s - os.stat(path).st_mtime < OLD_BUNDLE_S:
            continue
        if not in_use(os.fsencode(path)):
            os.unlink(path)
            deleted.append(name)
    return deleted


def write_shims(root: str) -> None:
    """Put hrun and hrsh into ROOT/bin, for this bundle."""
    folder = os.path.join(root, "bin")
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o755)
    for name in ("hrun", "hrsh"):
        text = '#!/bin/sh\nexec %s "$@"\n' % " ".join(shlex.quote(word) for word in command(name))
        path = os.path.join(folder, name)
        try:
            with open(path) as file:
                if file.read() == text:
                    continue
        except FileNotFoundError:
            pass
        with open(path + ".new", "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o755)
        os.rename(path + ".new", path)  # a job may be about to run the old one
