"""Private /tmp, /dev/shm, IPC objects and /proc of a job, by namespaces. Needs root.

    ROOT/private/          mode 0700, a small tmpfs whose mounts no other namespace sees; there while a job uses it
      proc/                /proc with hidepid=2, for all jobs
      NAME/shm/            a tmpfs as large as the job's memory; a later job may have it, if it is empty
      NAME/ipc             the job's IPC namespace: System V shared memory, semaphores and queues, and POSIX message queues
    ROOT/tmp/JOB/          a directory on disk; ROOT/tmp has mode 0700

Each task has a mount namespace of its own, in which these directories cover /dev/shm, /tmp and /proc. All tasks of a job on a
node cover them with the same directories, so its steps, mpirun's daemons and their ranks share them, and they last as long as
the job has the node. Pages of the tmpfs are charged to the job's memory cgroup. Likewise all its tasks enter one IPC namespace,
with which the kernel removes what is in it.

Rules:
- A job keeps directories below /tmp that it was given (work directory, home, the agent's root): the first directory below /tmp
  of each stays visible. Files of its output are opened below the node's /tmp, see `HostTmp`.
- A job whose work directory is /tmp itself has the node's /tmp.
- No path below a directory that a user can write to is followed: names are opened with O_NOFOLLOW and mounted by descriptor.
- hidepid needs a kernel of 5.8: before, it would change every /proc of the machine.

Sources: mount_namespaces(7), ipc_namespaces(7), mq_overview(7), mount(2), unshare(2), setns(2), proc(5), tmpfs(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

TMP, SHM, PROC, QUEUES = "/tmp", "/dev/shm", "/proc", "/dev/mqueue"  # noqa: S108 - what is covered
OWN_IPC = "/proc/self/ns/ipc"
PRIVATE, TMPS = "private", "tmp"
GONE = ".gone-"  # before the name of a /tmp that is being deleted
FIRST_HIDEPID = (5, 8)
FILES_PER_MIB = 128  # the kernel's own ratio, see tmpfs(5)

CLONE_NEWNS, CLONE_NEWIPC = 0x20000, 0x8000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 0x2, 0x4, 0x8, 0x20, 0x1000, 0x4000
MS_PRIVATE, MS_SLAVE = 0x40000, 0x80000
MNT_DETACH = 2
OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class Cover(NamedTuple):
    """What a job's tasks do not share with the rest of the node. Directories; "": shared."""

    tmp: str = ""
    shm: str = ""
    proc: str = ""
    ipc: str = ""  # the file of an IPC namespace
    keep: Tuple[str, ...] = ()  # directories below /tmp that stay visible

    @property
    def is_empty(self) -> bool:
        return not (self.tmp or self.shm or self.proc)


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, "%s: %s" % (what, os.strerror(code)))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), "cannot mount %s" % target)


def _unmount(target: str) -> None:
    _libc().umount2(os.fsencode(target), MNT_DETACH)  # not mounted: nothing to do


def _is_mounted(path: str) -> bool:
    """Return whether something is mounted exactly there."""
    try:
        return os.stat(path).st_dev != os.stat(os.path.dirname(path)).st_dev
    except OSError:
        return False


# ----- on the node


def find_missing(root: str) -> Dict[str, str]:
    """Return what is not possible here and why; nothing stays mounted.

    The keys are "namespace" (then nothing is possible), "ipc" and "proc".
    """
    all_of_it = ("namespace", "ipc", "proc")
    if os.geteuid() != 0:
        return dict.fromkeys(all_of_it, "the agent is not root")
    why = _why_in_child(lambda: enter(Cover()))
    if why:
        return dict.fromkeys(all_of_it, why)
    found = {
        "ipc": _why_in_child(_unshare_ipc),
        "proc": _why_no_hidepid() or _why_in_child(lambda: _try_proc(root)),
    }
    return {name: why for name, why in found.items() if why}


def _unshare_ipc() -> None:
    _check(_libc().unshare(CLONE_NEWIPC), "cannot have an IPC namespace")


def _try_proc(root: str) -> None:
    enter(Cover())
    _mount_proc(root)


def _mount_proc(path: str) -> None:
    _mount("proc", path, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")


def _why_in_child(work: Callable[[], None]) -> str:
    """Return why a child cannot do this, "" if it can."""
    child = os.fork()
    if child == 0:
        code = errno.EIO
        try:
            work()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return os.strerror(code) if code else ""


def _why_no_hidepid() -> str:
    version = os.uname().release.split("-")[0].split(".")
    if tuple(int(word) for word in version[:2] if word.isdigit()) < FIRST_HIDEPID:  # int: the kernel's
        return "hidepid for one mount needs a kernel of 5.8 or newer"
    masked = [path for path in _mounted() if path.startswith("/proc/") and path != "/proc/sys/fs/binfmt_misc"]
    return "%s is mounted over, and a new /proc would uncover it" % masked[0] if masked else ""


def _mounted() -> List[str]:
    with open("/proc/self/mounts") as file:
        return [line.split()[1].replace("\\040", " ") for line in file]


@contextlib.contextmanager
def _private(root: str) -> Iterator[str]:
    """Lock the directory of private mounts, which is there while a job uses it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.path.join(root, PRIVATE)
    finally:
        os.close(fd)


def _begin(private: str, proc: bool) -> None:
    if not _is_mounted(private):
        os.makedirs(private, mode=0o700, exist_ok=True)
        _mount("tmpfs", private, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700,size=4m")
        _mount("", private, "", MS_PRIVATE)
    path = os.path.join(private, "proc")
    if proc and not _is_mounted(path):
        os.makedirs(path, exist_ok=True)
        _mount_proc(path)


def end_if_unused(root: str) -> None:
    """Unmount what all jobs share, if no job is here."""
    with _private(root) as private:
        if not os.path.isdir(private) or set(_names(private)) - {"proc"}:
            return
        for path in (os.path.join(private, "proc"), private):
            _unmount(path)
            with contextlib.suppress(OSError):  # never made
                os.rmdir(path)


# ----- of a job


def make_private(root: str, name: str, mem_mib: int, *, shm: bool, ipc: bool, proc: bool) -> Cover:
    """Make the private mounts of a job. Raises OSError."""
    with _private(root) as private:
        _begin(private, proc)
        folder = os.path.join(private, name)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        cover = Cover(proc=os.path.join(private, "proc") if proc else "")
        if ipc:
            cover = cover._replace(ipc=_make_ipc(os.path.join(folder, "ipc")))
        if not shm:
            return cover
        path = os.path.join(folder, "shm")
        os.makedirs(path, exist_ok=True)
        if not _is_mounted(path):
            _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777," + _size(mem_mib))
        return cover._replace(shm=path)


def _make_ipc(path: str) -> str:
    """Make an IPC namespace that a file keeps; this process stays in its own."""
    if not _is_mounted(path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _mount_new_ipc(path)
    return path


def _mount_new_ipc(path: str) -> None:
    ours = os.open(OWN_IPC, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _unshare_ipc()
        _mount(OWN_IPC, path, "", MS_BIND)
    finally:
        _check(_libc().setns(ours, CLONE_NEWIPC), "cannot return to the IPC namespace")
        os.close(ours)


def find_private(root: str, name: str) -> Cover:
    """Return the private mounts that an earlier agent has made for a job."""
    private = os.path.join(root, PRIVATE)
    paths = [os.path.join(private, *parts) for parts in ((name, "shm"), (name, "ipc"), ("proc",))]
    shm, ipc, proc = [path if _is_mounted(path) else "" for path in paths]
    return Cover(shm=shm, ipc=ipc, proc=proc)


def renew(cover: Cover) -> None:
    """Make a new IPC namespace, because the last job may have left something in it.

    Raises OSError.
    """
    if cover.ipc:
        _unmount(cover.ipc)
        _mount_new_ipc(cover.ipc)


def resize(cover: Cover, mem_mib: int) -> None:
    """Make an empty tmpfs as large as the memory of another job. Raises OSError."""
    if cover.shm:
        _mount("tmpfs", cover.shm, "tmpfs", MS_NOSUID | MS_NODEV | MS_REMOUNT, _size(mem_mib))


def _size(mem_mib: int) -> str:
    """Return the limits of a tmpfs: bytes and files.

    Even an empty file takes memory of the kernel.
    """
    return "size=%dm,nr_inodes=%d" % (mem_mib, mem_mib * FILES_PER_MIB) if mem_mib > 0 else "size=50%"


def is_clean(cover: Cover) -> bool:
    """Return whether a job has left nothing in its tmpfs."""
    if not cover.shm:
        return True
    with os.scandir(cover.shm) as items:  # a list of millions of names would take long
        is_empty = next(items, None) is None
    return is_empty and stat.S_IMODE(os.stat(cover.shm).st_mode) == 0o1777


def make_tmp(root: str, job: str) -> str:
    """Make the private /tmp of a job, or find it. Raises OSError."""
    path = os.path.join(root, TMPS, job)
    if not os.path.isdir(path):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.mkdir(path)
        os.chmod(path, 0o1777)  # noqa: S103 - as /tmp
    return path


def kept(paths: Iterable[str]) -> Tuple[str, ...]:
    """Return the first directory below /tmp of each path that is there."""
    found: Dict[str, None] = {}
    for path in paths:
        parts = os.path.normpath(path).split("/")
        if parts[:2] == ["", TMP[1:]] and len(parts) > 2:
            found["/".join(parts[:3])] = None
    return tuple(found)


def used_mib(cover: Cover) -> int:
    """Return the MiB in the job's tmpfs."""
    if not cover.shm:
        return 0
    info = os.statvfs(cover.shm)
    return (info.f_blocks - info.f_bfree) * info.f_frsize >> 20


def remove_private(root: str, name: str) -> None:
    """Take the private mounts of a job away. Raises OSError."""
    with _private(root) as private:
        folder = os.path.join(private, name)
        for entry in ("shm", "ipc"):
            _unmount(os.path.join(folder, entry))
        for entry in _names(folder):
            path = os.path.join(folder, entry)
            (os.rmdir if os.path.isdir(path) else os.unlink)(path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)


def remove_tmp(root: str, job: str) -> str:
    """Take a job's /tmp away; return the directory that the caller must delete, "" for none."""
    gone = os.path.join(root, TMPS, GONE + os.urandom(8).hex())
    try:
        os.rename(os.path.join(root, TMPS, job), gone)
    except FileNotFoundError:
        return ""
    return gone


def private_names(root: str) -> List[str]:
    """Return the names that have private mounts here."""
    return [name for name in _names(os.path.join(root, PRIVATE)) if name != "proc"]


def tmp_names(root: str) -> List[str]:
    """Return the jobs that have a /tmp here, and directories that are being deleted."""
    return _names(os.path.join(root, TMPS))


def _names(path: str) -> List[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


# ----- in the task, before it becomes the user


class HostTmp:
    """The node's /tmp, which stays reachable by a descriptor when it is covered."""

    def __init__(self, cover: Cover) -> None:
        self._fd = os.open(TMP, OPEN) if cover.tmp else -1

    def place(self, path: str) -> str:
        """Return a path that reaches the node's file, also if it is below a covered /tmp."""
        if self._fd < 0:
            return path
        whole = os.path.normpath(os.path.join(os.getcwd(), path))
        return "/proc/self/fd/%d/%s" % (self._fd, whole[len(TMP) + 1 :]) if whole.startswith(TMP + "/") else path


def enter(cover: Cover) -> None:
    """Cover the node's directories with the job's in a new mount namespace. Raises OSError."""
    _check(_libc().unshare(CLONE_NEWNS), "cannot have a mount namespace")
    _mount("", "/", "", MS_REC | MS_SLAVE)
    if cover.ipc:
        _enter_ipc(cover.ipc)
    if cover.shm and os.path.isdir(SHM):
        _mount(cover.shm, SHM, "", MS_BIND)
    if cover.tmp:
        kept = [(os.path.basename(path), fd) for path, fd in map(_opened, cover.keep) if fd >= 0]
        links = [(os.path.basename(path), os.readlink(path)) for path in cover.keep if os.path.islink(path)]
        _mount(cover.tmp, TMP, "", MS_BIND)
        for name, fd in kept:
            _keep(name, fd)
        for name, target in links:
            if not os.path.lexists(os.path.join(TMP, name)):
                os.symlink(target, os.path.join(TMP, name))
    if cover.proc:
        _mount(cover.proc, PROC, "", MS_BIND)


def _enter_ipc(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(fd, CLONE_NEWIPC), "cannot enter the job's IPC namespace")
    finally:
        os.close(fd)
    if os.path.ismount(QUEUES):  # its files are the queues of the node
        _mount("mqueue", QUEUES, "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _opened(path: str) -> Tuple[str, int]:
    try:
        return path, os.open(path, OPEN)
    except OSError:
        return path, -1  # a link, or gone


def _keep(name: str, source: int) -> None:
    """Mount a directory of the node's /tmp at its place in the job's."""
    try:
        os.mkdir(os.path.join(TMP, name), 0o755)
    except FileExistsError:
        pass
    target = os.open(os.path.join(TMP, name), OPEN)  # a link that the job has put there is refused
    if not stat.S_ISDIR(os.fstat(target).st_mode):
        raise OSError("cannot keep /tmp/%s: the job has put something else there" % name)
    _mount("/proc/self/fd/%d" % source, "/proc/self/fd/%d" % target, "", MS_BIND | MS_REC)
    os.close(source)
    os.close(target)
