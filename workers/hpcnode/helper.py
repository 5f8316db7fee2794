"""The root helper of a node: starts tasks that policy and their user's signature allow.

Installed by the node's administrator as a file of root, and run alone: `python3 -I -S helper.py`. It imports nothing of hpcnode,
because hpcnode.pyz comes from the controller. The agent, a plain account, asks it over a unix socket; the kernel says who asks.

Rules (see man/adr/0022): nothing runs as root, or as an account that /etc/hpcsched/node.json refuses. A script or command runs
only if its user has signed it, its directory, files and environment, for this cluster and node, until an expiry. A signature
serves one job, and each attempt (of each array task) starts here once. A step that is not signed runs beside its job's script,
or if the user signed for several nodes. The user's key is /etc/hpcsched/users/NAME.pub, a file of root.

Sources: EVP_DigestVerify(3); unix(7); credentials(7).
"""

import _hashlib
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
from typing import Any, Dict, List, NoReturn, Tuple

POLICY = "/etc/hpcsched/node.json"
USERS = "/etc/hpcsched/users"
STATE = "/var/lib/hpcsched-helper"
SOCKET = "/run/hpcsched-helper/helper.sock"
SIGNED = "HPCSCHED_SIGNED_REQUEST"
MAX_REQUEST = 8 << 20
CLOCKS_S = 300  # how far the head's clock may be ahead
LONGEST_S = 90 * 86400
OURS = re.compile(  # variables of the scheduler, without those that name a program
    r"(HPCSCHED|SLURMD?)_(?!SIGNED_SALT$|\w*(PROLOG|EPILOG|BCAST))[A-Z0-9_]{1,64}|(CUDA|ROCR)_VISIBLE_DEVICES"
    r"|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)"
)
TOLD = ("HOME", "USER", "LOGNAME", "SHELL")
Values = Dict[str, Any]
_libc = ctypes.CDLL(None, use_errno=True)


def trusted(path: str) -> bytes:
    """Return the bytes of a file that only root could write. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            raise PermissionError("cannot trust %s: its owner is %d, its mode %o" % (path, found.st_uid, found.st_mode))
        return file.read(65536)


def once(pairs: List[Tuple[str, Any]]) -> Values:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


strict = json.JSONDecoder(object_pairs_hook=once).decode


def account_of(name: str, policy: Values) -> pwd.struct_passwd:
    """Return the account of a task if policy allows it. Raises PermissionError, KeyError."""
    entry, users = pwd.getpwnam(name), policy.get("users") or policy.get("allow_users")
    is_system = entry.pw_uid in (0, 65534, policy["agent_uid"]) or entry.pw_uid < policy.get("min_uid", 1000)
    if is_system or name in policy.get("deny_users", ()) or (users and name not in users):
        raise PermissionError("%s does not allow %s, uid %d" % (POLICY, name, entry.pw_uid))
    return entry


def verified(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether `signature` is that of the Ed25519 key `public`, by Python's OpenSSL."""
    crypto, pointer, size = ctypes.CDLL(_hashlib.__file__), ctypes.c_void_p, ctypes.c_size_t
    crypto.EVP_PKEY_new_raw_public_key.restype = crypto.EVP_MD_CTX_new.restype = pointer
    key = pointer(crypto.EVP_PKEY_new_raw_public_key(1087, None, public, size(len(public))))  # EVP_PKEY_ED25519
    context = pointer(crypto.EVP_MD_CTX_new())
    if not (key and context and crypto.EVP_DigestVerifyInit(context, None, None, None, key) == 1):
        return False
    return bool(crypto.EVP_DigestVerify(context, signature, size(len(signature)), text, size(len(text))) == 1)


def signed_request(order: Values, entry: pwd.struct_passwd) -> Values:
    """Return what the user has signed. Raises PermissionError, ValueError, KeyError."""
    if SIGNED not in order["env"]:
        raise PermissionError("it is not signed, and no script of the job runs here")
    key = re.match(rb"hpcsched-ed25519 ([0-9a-f]{64})\s", trusted(os.path.join(USERS, entry.pw_name + ".pub")))
    if key is None:
        raise PermissionError("the public key of %s cannot be read" % entry.pw_name)
    envelope = strict(order["env"][SIGNED])
    text = envelope["request"]
    if not verified(bytes.fromhex(key[1].decode()), bytes.fromhex(envelope["signature"]), text.encode()):
        raise PermissionError("the signature is not that of %s" % entry.pw_name)
    return dict(strict(text))


def check(order: Values, signed: Values, entry: pwd.struct_passwd, policy: Values) -> None:
    """Raise PermissionError if the user has not signed for this task, here and now."""
    now_s, node, is_batch = time.time(), policy.get("node", os.uname().nodename), order["step"] == "batch"
    beside = not is_batch and "argv" not in signed  # a step of a signed script, on another node
    end_s = signed["expires"] + (signed["steps_s"] if beside else 0)
    for good, why in (
        (signed["v"] == 2, "its form is of another version"),
        ((signed["uid"], signed["user"]) == (entry.pw_uid, entry.pw_name), "it was signed for uid %r" % signed["uid"]),
        (signed["cluster"] == policy.get("cluster", signed["cluster"]), "its cluster is %.60r" % signed["cluster"]),
        (not signed["nodes"] or node in signed["nodes"], "it was signed for other nodes than %s" % node),
        (signed["issued"] - CLOCKS_S <= now_s, "its signature is not valid yet: compare the clocks of head and node"),
        (now_s < end_s, "its signature has expired; renew it on the head: hctl sign %d" % order["job"]),
        (signed["expires"] <= signed["issued"] + LONGEST_S, "it was signed for longer than %d s" % LONGEST_S),
        (not beside or signed["steps_s"] > 0, "the job's script does not run here, and was signed for one node"),
        (beside or order["attempt"] < signed["attempts"], "attempt %d was not signed" % order["attempt"]),
    ):
        if not good:
            raise PermissionError(why)
    own = {name: value for name, value in order["env"].items() if name not in TOLD and not OURS.fullmatch(name)}
    for name in () if beside else ("script" if is_batch else "argv", "args", "work_dir", "umask", "environment"):
        value = json.dumps(own if name == "environment" else order[name], sort_keys=True)
        if hashlib.sha256(value.encode()).hexdigest() != signed[name]:
            raise PermissionError("the %s is not what was signed" % name)
    for path, pattern in () if beside else zip(order["files"], signed["files"]):
        usual = path in ("", "/dev/null") or (path is None and not is_batch)  # None: a pipe of hrun
        if not usual and not re.fullmatch("[^/]*".join(map(re.escape, pattern.split("%"))), path):
            raise PermissionError("the file %.200r is not what was signed" % path)


def is_running(script: str) -> bool:
    """Return whether this script runs: its keeper has locked it."""
    try:
        with open(script) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError) as error:
        return isinstance(error, BlockingIOError)
    return False


def note_start(order: Values, signed: Values) -> None:
    """Record on disk what the signature serves, and this start. Raises PermissionError."""
    env, job, start = order["env"], "%d" % order["job"], ".%d" % order["attempt"]
    if signed["tasks"]:
        job, task = "%d" % int(env["SLURM_ARRAY_JOB_ID"]), int(env["SLURM_ARRAY_TASK_ID"])  # int: under the alarm
        start = "%d%s" % (task, start)
        if not any(first <= task <= last for first, last in signed["tasks"]):
            raise PermissionError("task %d of the array was not signed" % task)
    if "argv" in signed:
        job, start = "%s.%d" % (job, int(order["step"])), "rank.%d" % int(env["SLURM_PROCID"])  # int: also
    elif order["step"] != "batch":
        start = "steps"
    folder = STATE + "/used/%d.%s" % (signed["uid"], hashlib.sha256(signed["request"].encode()).hexdigest())
    os.makedirs(folder, 0o700, exist_ok=True)
    there, above = os.open(folder, os.O_RDONLY), os.open(os.path.dirname(folder), os.O_RDONLY)
    fcntl.flock(there, fcntl.LOCK_EX)
    for other, _, name in (found.partition("_") for found in os.listdir(folder)):
        if other != job:
            raise PermissionError("it has served job %s, and serves no other" % other)
        if (name == start != "steps") or (signed["once"] and name.split(".")[0] == start.split(".")[0]):
            raise PermissionError("%s of job %s was started here before" % (name, job))
    os.close(os.open(os.path.join(folder, "%s_%s" % (job, start)), os.O_CREAT, 0o600))
    for fd in (there, above):
        os.fsync(fd)
        os.close(fd)


def run_task(order: Values, entry: pwd.struct_passwd, fds: List[int], argv: List[str], env: Dict[str, str]) -> NoReturn:
    """Become the user, open the task's files, wait for the release, and execute it."""
    what, given = "prepare", fds[2:]
    try:
        os.setsid()
        os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
        os.setresgid(*(entry.pw_gid,) * 3)
        os.setresuid(*(entry.pw_uid,) * 3)
        if {*os.getresuid()} != {entry.pw_uid} or {*os.getresgid()} != {entry.pw_gid} or _libc.prctl(38, 1, 0, 0, 0):
            raise OSError("cannot become %s" % entry.pw_name)  # 38: PR_SET_NO_NEW_PRIVS
        os.umask(order["umask"])
        os.chdir(order["work_dir"])
        for number, path in enumerate(order["files"][:3]):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
            flags |= os.O_NONBLOCK | os.O_NOCTTY | (os.O_TRUNC if number and order["truncate"][number - 1] else 0)
            fd = given.pop(0) if path is None else 1 if (number, path) == (2, "") else os.open(path, flags, 0o666)
            os.set_blocking(fd, True)
            os.dup2(fd, number)
        for kind, soft in order["limits"]:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (soft if hard < 0 or 0 <= soft <= hard else hard, hard))
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: with the keeper
        os.write(fds[0], b"R")
        what = "execute"
        if os.read(fds[1], 1):
            os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        os.write(fds[0], ("cannot %s the task: %s" % (what, error)).encode()[:4000])
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
    """Return the wait status of `main`; kill all that it leaves, at once if the agent goes."""
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
        ready = select.select([woken] if over else [woken, sock.fileno()], [], [], 0.02 if over else 5)[0]
        said = sock.recv(64) if sock.fileno() in ready else None  # signals for the task
        if woken in ready:
            os.read(woken, 4096)
        over = over or said == b""
        for number in (signal.SIGSTOP, signal.SIGKILL) if over else said or b"":
            for each in below(os.getpid()):
                with contextlib.suppress(OSError):  # it has just ended
                    os.kill(each, number)


def serve(sock: socket.socket, policy: Values) -> None:
    """Start the task that a connection of the agent asks for, and keep it."""
    signal.alarm(60)
    head, fds, _, _ = socket.recv_fds(sock, 4, 5)
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        order = strict(sock.makefile(errors="surrogateescape").read(min(struct.unpack("!I", head)[0], MAX_REQUEST)))
        entry, argv, is_batch = account_of(order["user"], policy), order["argv"], order["step"] == "batch"
        env = {**order["env"], **dict(zip(TOLD, (entry.pw_dir, entry.pw_name, entry.pw_name, entry.pw_shell)))}
        env = {**policy.get("environment", {}), **env, "PATH": ":".join([*policy.get("path", ()), env["PATH"]])}
        script = STATE + "/jobs/%d.%d.%d" % (entry.pw_uid, order["job"], order["attempt"])
        if is_batch or not is_running(script):
            signed = signed_request(order, entry)
            check(order, signed, entry, policy)
            note_start(order, signed)
        if is_batch:
            with open(os.open(script, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o500), "wb") as file:
                file.write(order["script"].encode("utf-8", "surrogateescape"))
            os.chown(script, entry.pw_uid, entry.pw_gid)
            lock = os.open(script, os.O_RDONLY)  # open, and locked, as long as this process lives
            fcntl.flock(lock, fcntl.LOCK_EX)
            argv = [script, *order["args"]]
        main = os.fork() or run_task(order, entry, fds, argv, env)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        os.write(fds[0], ("the root helper of this node refused: %s" % (error or type(error).__name__)).encode()[:4000])
        return
    signal.alarm(0)
    for fd in fds:
        os.close(fd)
    status = keep(sock, main)
    if is_batch:
        os.unlink(script)
    sock.sendall(struct.pack("!I", status))


def main() -> NoReturn:
    agent = pwd.getpwnam(strict(trusted(POLICY).decode())["agent"])
    for folder, mode in ((os.path.dirname(SOCKET), 0o755), (STATE, 0o711), (STATE + "/jobs", 0o711)):
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
                uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                child = os.fork() if uid == agent.pw_uid else -1
            except OSError:
                time.sleep(0.1)  # no descriptor, or no process: others end
                continue
            if child == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                _libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
                serve(sock, {**strict(trusted(POLICY).decode()), "agent_uid": agent.pw_uid})
                os._exit(0)
            sock.close()


if __name__ == "__main__":
    main()
