"""The root helper of a node: starts tasks that policy and their user's signature allow.

Installed by the node's administrator as a file of root, and run alone: `python3 -I -S helper.py`. It imports nothing of hpcnode,
because hpcnode.pyz comes from the controller. The agent, a plain account, asks it over a unix socket; the kernel says who asks.

Rules (see man/adr/0022): nothing runs as root, or as an account that /etc/hpcsched/node.json refuses. A batch script runs only if
its user has signed exactly this script, its arguments, directory and environment for this cluster, the signature has not expired,
and this attempt was not started here before. A step runs only beside its job's script here, or if the user signed for several
nodes. The user's key is /etc/hpcsched/users/NAME.pub, a file of root, which the controller cannot write.

Sources: RFC 8032 (Ed25519); unix(7); credentials(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import pwd
import re
import resource
import select
import signal
import socket
import stat
import struct
import time
from typing import Any, Dict, List, NoReturn, Optional, Tuple

POLICY = "/etc/hpcsched/node.json"
USERS = "/etc/hpcsched/users"
STATE = "/var/lib/hpcsched-helper"
JOBS = STATE + "/jobs"  # scripts of running jobs
SOCKET = "/run/hpcsched-helper/helper.sock"
SIGNED = "HPCSCHED_SIGNED_REQUEST"
MAX_REQUEST = 8 << 20
CLOCKS_S = 300  # how far the head's clock may be ahead
LONGEST_S = 90 * 86400
OURS = re.compile(
    "(HPCSCHED|SLURMD?)_[A-Z0-9_]{1,64}|(CUDA|ROCR)_VISIBLE_DEVICES|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)"
)  # variables of the scheduler
TOLD = ("HOME", "USER", "LOGNAME", "SHELL")
Point = Tuple[int, int, int, int]
Values = Dict[str, Any]
_libc = ctypes.CDLL(None, use_errno=True)
_ucred = struct.Struct("3i")


class Refused(Exception):
    """The task is not started; the text is the reason."""


# ----- Ed25519: verification only, so nothing here is secret (RFC 8032, section 5.1.7)

_p = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_d = -121665 * pow(121666, _p - 2, _p) % _p


def _add(P: Point, Q: Point) -> Point:
    a, b = (P[1] - P[0]) * (Q[1] - Q[0]) % _p, (P[1] + P[0]) * (Q[1] + Q[0]) % _p
    c, e = 2 * P[3] * Q[3] * _d % _p, 2 * P[2] * Q[2] % _p
    return (b - a) * (e - c) % _p, (e + c) * (b + a) % _p, (e - c) * (e + c) % _p, (b - a) * (b + a) % _p


def _times(number: int, P: Point) -> Point:
    Q = (0, 1, 1, 0)
    while number:
        if number & 1:
            Q = _add(Q, P)
        P, number = _add(P, P), number >> 1
    return Q


def _point(data: bytes) -> Optional[Point]:
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & ((1 << 255) - 1)
    if y >= _p:
        return None
    xx = (y * y - 1) * pow(_d * y * y + 1, _p - 2, _p) % _p
    x = pow(xx, (_p + 3) // 8, _p)
    if (x * x - xx) % _p:
        x = x * pow(2, (_p - 1) // 4, _p) % _p
    if (x * x - xx) % _p or (x == 0 and sign):
        return None
    x = _p - x if x & 1 != sign else x
    return x, y, 1, x * y % _p


_G = _point((4 * pow(5, _p - 2, _p) % _p).to_bytes(32, "little")) or (0, 1, 1, 0)


def _same(P: Point, Q: Point) -> bool:
    return (P[0] * Q[2] - Q[0] * P[2]) % _p == 0 and (P[1] * Q[2] - Q[1] * P[2]) % _p == 0


def verified(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether `signature` is that of the key `public` for `text`."""
    if len(public) != 32 or len(signature) != 64:
        return False
    A, R, s = _point(public), _point(signature[:32]), int.from_bytes(signature[32:], "little")
    if A is None or R is None or s >= _L or _same(_times(8, A), (0, 1, 1, 0)):
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + text).digest(), "little") % _L
    return _same(_times(s, _G), _add(R, _times(h, A)))


# ----- files of root, and what they allow


def trusted(path: str) -> bytes:
    """Return the bytes of a file that only root could write. Raises Refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refused("cannot read %s: %s" % (path, error.strerror)) from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            raise Refused("cannot trust %s: its owner is %d, its mode %o" % (path, found.st_uid, found.st_mode))
        return file.read(65536)


def strict(text: str) -> Values:
    """Return the object in a JSON text; double names are errors. Raises ValueError."""

    def once(pairs: List[Tuple[str, Any]]) -> Values:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    found = json.loads(text, object_pairs_hook=once)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def account_of(name: str, policy: Values) -> pwd.struct_passwd:
    """Return the account of a task if policy allows it. Raises Refused."""
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError, TypeError):
        raise Refused("this node has no account %.60r" % (name,)) from None
    users, denied = policy.get("users") or policy.get("allow_users"), policy.get("deny_users") or ()
    if entry.pw_uid == 0 or entry.pw_uid < policy.get("min_uid", 1000) or entry.pw_uid == 65534:
        raise Refused("uid %d of %s is not one that %s allows" % (entry.pw_uid, name, POLICY))
    if name in denied or (users and name not in users) or entry.pw_uid == policy["agent_uid"]:
        raise Refused("%s does not allow %s" % (POLICY, name))
    return entry


def public_key(entry: pwd.struct_passwd) -> bytes:
    """Return the key (32 bytes) that a user's requests are signed with. Raises Refused."""
    words = trusted(os.path.join(USERS, entry.pw_name + ".pub")).split()
    if len(words) < 2 or words[0] != b"hpcsched-ed25519" or not re.fullmatch(b"[0-9a-f]{64}", words[1]):
        raise Refused("the public key of %s cannot be read" % entry.pw_name)
    return bytes.fromhex(words[1].decode())


def digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def check(order: Values, entry: pwd.struct_passwd, policy: Values, now_s: float) -> Values:
    """Return the signed request of `order`. Raises Refused, ValueError, KeyError."""
    envelope = strict(order["env"][SIGNED])
    text = envelope["request"]
    if not verified(public_key(entry), bytes.fromhex(envelope["signature"]), text.encode()):
        raise Refused("the signature is not that of %s" % entry.pw_name)
    signed = dict(strict(text), text=text)
    if signed["v"] != 1 or signed["uid"] != entry.pw_uid or signed["user"] != entry.pw_name:
        raise Refused("it was signed for uid %r" % (signed["uid"],))
    if signed["cluster"] != policy.get("cluster", signed["cluster"]):
        raise Refused("it was signed for cluster %.60r" % (signed["cluster"],))
    if not signed["issued"] - CLOCKS_S <= now_s < signed["expires"] <= signed["issued"] + LONGEST_S:
        raise Refused("the signature has expired, or is not valid yet; submit the job again")
    if signed["nodes"] and policy.get("node", os.uname().nodename) not in signed["nodes"]:
        raise Refused("it was signed for other nodes")
    if order["step"] == "batch":
        check_batch(order, signed, policy)
    elif not signed["steps"] and not is_running(order, entry):
        raise Refused("the job's script does not run here, and its user signed for one node")
    return signed


def check_batch(order: Values, signed: Values, policy: Values) -> None:
    """Raise Refused if the script, or what decides its effect, is not what was signed."""
    if digest(order["script"]) != signed["script"] or order["args"] != signed["args"]:
        raise Refused("the script or its arguments are not those that were signed")
    if order["work_dir"] != signed["work_dir"]:
        raise Refused("the directory is not the one that was signed")
    for name, value in order["env"].items():
        mine = signed["env"].get(name)
        for folder in policy.get("path", ()) if name == "PATH" else ():
            value = value[len(folder) + 1 :] if mine != digest(value) and value.startswith(folder + ":") else value
        if mine != digest(value) and name not in TOLD and not OURS.fullmatch(name):
            raise Refused("the variable %.60r is not as it was signed" % name)


def is_running(order: Values, entry: pwd.struct_passwd) -> bool:
    """Return whether the job's script runs here: its keeper holds a lock."""
    for name in os.listdir(JOBS):
        if name.startswith("%d.%d." % (entry.pw_uid, order["job"])):
            fd = os.open(os.path.join(JOBS, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
    return False


def note_start(order: Values, signed: Values) -> None:
    """Record durably that this attempt starts here, once. Raises Refused."""
    folder = os.path.join(STATE, "used", digest(signed["text"]))  # not the envelope: that can be written otherwise
    os.makedirs(folder, 0o700, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        name = "%d.%d" % (order["job"], order["attempt"])
        if name in os.listdir(folder):
            raise Refused("attempt %d of job %d was started here before" % (order["attempt"], order["job"]))
        if len(os.listdir(folder)) > signed["starts"]:
            raise Refused("it was started %d times already, as often as was signed" % signed["starts"])
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL, 0o600))
    for path in (folder, os.path.dirname(folder)):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# ----- one task: the keeper (root) waits for it, forwards signals, and kills all that it left


def prepare(order: Values, entry: pwd.struct_passwd, fds: List[int]) -> None:
    """Become the user, with directory, files and limits of the task. Raises OSError."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
    os.setresgid(*(entry.pw_gid,) * 3)
    os.setresuid(*(entry.pw_uid,) * 3)
    if os.getresuid() != (entry.pw_uid,) * 3 or os.getresgid() != (entry.pw_gid,) * 3 or _libc.prctl(38, 1, 0, 0, 0):
        raise OSError("cannot become %s" % entry.pw_name)
    os.umask(order["umask"] & 0o777)
    os.chdir(order["work_dir"])
    given, opened = list(fds[2:]), [0][:0]
    for number, path in enumerate(order["files"]):
        flags = os.O_NONBLOCK | os.O_NOCTTY | (os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        flags |= os.O_TRUNC if number and order["truncate"][number - 1] else 0
        opened.append(given.pop(0) if path is None else opened[1] if path == "" else os.open(path, flags, 0o666))
        os.set_blocking(opened[-1], True)
    for number, fd in enumerate(opened):
        os.dup2(fd, number)
    for kind, soft in order["limits"]:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard < 0 or 0 <= soft <= hard else hard, hard))
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: with the keeper


def run_task(order: Values, entry: pwd.struct_passwd, fds: List[int], script: str) -> NoReturn:
    ready = False
    try:
        prepare(order, entry, fds)
        os.write(fds[0], b"R")
        ready = True
        if os.read(fds[1], 1):
            env = dict(order["env"], HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name, SHELL=entry.pw_shell)
            argv = [script, *order["args"]] if script else order["argv"]
            os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        os.write(fds[0], ("cannot %s the task: %s" % ("execute" if ready else "prepare", error)).encode()[:4000])
    os._exit(127)


def below(pid: int) -> List[int]:
    """Return the processes below `pid`."""
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid)) as file:
            mine = [int(word) for word in file.read().split()]  # int: of the kernel
    except OSError:
        return []
    return mine + [other for each in mine for other in below(each)]


def keep(sock: socket.socket, main: int) -> int:
    """Wait for the task `main`, kill all that it leaves, and return its wait status.

    Its agent may send signals for it. If the agent goes, it is killed.
    """
    status, over, (woken, wake) = 0, False, os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid:
            status, over = (code, True) if pid == main else (status, over)
            continue
        watched: List[Any] = [woken] if over else [sock, woken]
        ready = select.select(watched, [], [], 0.02 if over else 5)[0]
        said = sock.recv(64) if sock in ready else None
        if woken in ready:
            os.read(woken, 4096)
        over = over or said == b""
        for number in (signal.SIGSTOP, signal.SIGKILL) if over else said or b"":
            for each in below(os.getpid()):
                with contextlib.suppress(OSError):  # it has just ended
                    os.kill(each, number)


def serve_one(sock: socket.socket, policy: Values) -> None:
    """Start the task that a connection of the agent asks for, and keep it."""
    signal.alarm(60)
    head, fds, _, _ = socket.recv_fds(sock, 4, 5)
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        size = struct.unpack("!I", head)[0]
        data = sock.makefile("rb").read(min(size, MAX_REQUEST))
        order = strict(data.decode("utf-8", "surrogateescape"))
        entry = account_of(order["user"], policy)
        signed, script = check(order, entry, policy, time.time()), ""
        if order["step"] == "batch":
            note_start(order, signed)
            script = os.path.join(JOBS, "%d.%d.%s" % (entry.pw_uid, order["job"], os.urandom(8).hex()))
            with open(
                os.open(script, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o500), "w", errors="surrogateescape"
            ) as file:
                file.write(order["script"])
            os.chown(script, entry.pw_uid, entry.pw_gid)
            lock = os.open(script, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        main = os.fork()
        if not main:
            signal.alarm(0)
            run_task(order, entry, fds, script)
    except (Refused, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        os.write(fds[0], ("the root helper of this node refused: %s" % (error or type(error).__name__)).encode()[:4000])
        return
    signal.alarm(0)
    for fd in fds:
        os.close(fd)
    status = keep(sock, main)
    if script:
        os.unlink(script)
    sock.sendall(struct.pack("!I", status))


def main() -> NoReturn:
    policy = strict(trusted(POLICY).decode())
    agent = pwd.getpwnam(policy["agent"])
    for folder, mode in ((os.path.dirname(SOCKET), 0o755), (STATE, 0o711), (JOBS, 0o711)):
        os.makedirs(folder, mode, exist_ok=True)
        os.chmod(folder, mode)
    with socket.socket(socket.AF_UNIX) as listener:
        if os.path.lexists(SOCKET):
            os.unlink(SOCKET)
        listener.bind(SOCKET)
        os.chown(SOCKET, 0, agent.pw_gid)
        os.chmod(SOCKET, 0o660)
        listener.listen(128)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            try:
                sock = listener.accept()[0]
                uid = _ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size))[1]
                child = os.fork() if uid == agent.pw_uid else -1
            except OSError:
                time.sleep(0.1)  # no descriptor, or no process: others end
                continue
            if child == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                _libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
                try:
                    serve_one(sock, dict(strict(trusted(POLICY).decode()), agent_uid=agent.pw_uid))
                finally:
                    os._exit(0)
            sock.close()


if __name__ == "__main__":
    main()
