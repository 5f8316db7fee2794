"""Paths below an agent's root, its socket, and how its programs are run again.

A path of a unix socket has at most 107 bytes. If the root's path is too long, the socket is in a private directory in /tmp.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from typing import Callable, List, Optional

from hpcnode.os.trust import FOLDER

MAX_SOCKET_PATH = 100
OLD_BUNDLE_S = 600.0
_BUNDLE = re.compile(r"hpcnode-([0-9a-f]+)\.pyz\Z")
_STEPS = re.compile(r"steps-[0-9a-f]+-[A-Za-z0-9_.-]+\Z")


def socket_path(root: str) -> str:
    """Return the path of the agent's socket for this root."""
    path = os.path.join(root, "agent.sock")
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    import hashlib  # rarely needed; see `agent` on the cost of imports

    digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return "/tmp/hpcnode-%d/%s.sock" % (os.geteuid(), digest)  # noqa: S108 - make_socket_folder checks its owner


def make_socket_folder(path: str) -> None:
    """Create the directory of the socket.

    Raises PermissionError if it belongs to another user.
    """
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


def remove_tree(path: str) -> None:
    """Delete a directory with its contents, as far as that is possible; it need not exist.

    Users may change the tree meanwhile: only names in directories that were opened without following links are deleted. A
    tree of any depth needs two descriptors, because directories are moved to its top before they are emptied.
    """
    try:
        top = os.open(path, FOLDER)
    except OSError:
        return
    try:
        device = os.fstat(top).st_dev
        waiting = _emptied(top, top)
        while waiting:
            name = waiting.pop()
            try:
                folder = os.open(name, FOLDER, dir_fd=top)
            except OSError:
                continue
            try:
                if os.fstat(folder).st_dev == device:  # else something is mounted there
                    waiting += _emptied(folder, top)
            finally:
                os.close(folder)
            _try(os.rmdir, name, top)
    finally:
        os.close(top)
    _try(os.rmdir, path)


def _emptied(folder: int, top: int) -> List[str]:
    """Delete the files of an open directory; return its directories, after a move to `top`."""
    folders: List[str] = []
    try:
        if os.geteuid() == 0:  # from here on no user adds anything
            os.fchown(folder, 0, 0)
            os.fchmod(folder, 0o700)
        with os.scandir(folder) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    folders.append(item.name)
                else:
                    _try(os.unlink, item.name, folder)
    except OSError:
        pass
    if folder == top:
        return folders
    moved = {os.urandom(8).hex(): name for name in folders if not _try(os.rmdir, name, folder)}
    return [new for new, name in moved.items() if _is_renamed(name, folder, new, top)]


def _is_renamed(name: str, folder: int, new: str, top: int) -> bool:
    try:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
        return True
    except OSError:
        return False


def _try(delete: Callable[..., None], path: str, folder: Optional[int] = None) -> bool:
    try:
        delete(path, dir_fd=folder)
        return True
    except OSError:
        return False


def program() -> str:
    """Return what Python runs to start this program: the bundle, or the package's directory."""
    here = os.path.dirname(os.path.abspath(__file__))
    bundle = os.path.dirname(here)
    return bundle if os.path.isfile(bundle) else here


def version() -> str:
    """Return the hash of this bundle, `source` for a directory."""
    match = _BUNDLE.search(program())
    return match.group(1) if match else "source"


def command(*words: str, source: str = "") -> List[str]:
    """Return the command that runs this program with `words`, isolated from user settings."""
    return [sys.executable, "-I", "-S", source or program(), *words]


def delete_old_bundles(root: str, in_use: Callable[[bytes], bool], now_s: float) -> List[str]:
    """Delete unused bundles of other versions; return their names.

    New bundles stay, because a process may be about to start from one.
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


def unpack(root: str) -> str:
    """Unpack and compile this bundle's modules, if need be; return the file that Python runs.

    Raises OSError.

    A step command that starts from the bundle would compile its modules each time, which takes most of its run time.
    """
    name = "steps-%s-%s" % (version(), sys.implementation.cache_tag)
    path = os.path.join(root, name)
    if not os.path.isdir(path):
        coming = os.path.join(root, "%s.%d" % (name, os.getpid()))
        try:
            _unpack_to(coming)
            os.rename(coming, path)
        except OSError:
            remove_tree(coming)
            if not os.path.isdir(path):  # else another process was quicker
                raise
    return os.path.join(path, "hpcnode", "__main__.py")


def unpack_aside(root: str, log: Callable[[str], None]) -> None:
    """Let hrun and hrsh start from compiled modules.

    A child unpacks them; the caller reaps it.
    """
    if version() == "source":
        return
    try:
        if os.fork() > 0:
            return
    except OSError as error:
        log("cannot fork: %s; hrun starts more slowly" % error)
        return
    try:
        os.umask(0o022)  # users run it
        write_shims(root, unpack(root))
    except OSError as error:
        log("cannot unpack %s: %s; hrun starts more slowly" % (program(), error))
    finally:
        os._exit(0)


def _unpack_to(folder: str) -> None:
    import py_compile  # needed once per version, in a child; see `agent` on the cost of imports
    import zipfile

    with zipfile.ZipFile(program()) as bundle:
        for name in bundle.namelist():
            if name.startswith("hpcnode/") and name.endswith(".py"):
                path = os.path.join(folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(bundle.read(name))
                py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def delete_old_steps(root: str, in_use: Callable[[bytes], bool], now_s: float) -> List[str]:
    """Delete unused directories that `unpack` of other versions made; return their names."""
    deleted = []
    ours = "steps-%s-%s" % (version(), sys.implementation.cache_tag)
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if name == ours or not _STEPS.fullmatch(name) or now_s - os.stat(path).st_mtime < OLD_BUNDLE_S:
            continue
        if not in_use(os.fsencode(os.path.join(path, "hpcnode"))):
            remove_tree(path)
            deleted.append(name)
    return deleted


def write_shims(root: str, source: str = "") -> None:
    """Write the step commands to ROOT/bin, and those with Slurm's names to ROOT/bin/slurm.

    They run this bundle, or `source` if that is given.
    """
    folder = os.path.join(root, "bin")
    for each in (folder, os.path.join(folder, "slurm")):
        os.makedirs(each, exist_ok=True)
        os.chmod(each, 0o755)  # noqa: S103 - users run what is there
    shims = {
        "hrun": ["hrun"],
        "hrsh": ["hrsh"],
        "hpty": ["hpty"],
        "htun": ["htun"],
        "hadopt": ["adopt", root],
        "slurm/srun": ["srun", root],
        "slurm/scontrol": ["scontrol"],
    }
    for name, words in shims.items():
        text = '#!/bin/sh\nexec %s "$@"\n' % " ".join(shlex.quote(word) for word in command(*words, source=source))
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
