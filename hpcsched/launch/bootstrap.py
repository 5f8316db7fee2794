# ruff: noqa: UP024, UP031, UP036
"""Install hpcnode.pyz on a node if it is missing, and become it.

This program runs first on a node. It is never imported: `hpcsched.launch.bundle` reads it as text,
and `python3 -c` runs it on the node. It therefore uses only syntax that every Python accepts, and
can reject an old Python. It reads one line of JSON {sha256 size root cluster node} and answers with
lines that begin with MARK, so that the controller can skip output of the shell's start-up files:

    {"need": true}         send the `size` bytes now
    {"ready": true, ...}   the next byte is the agent's
    {"error": "..."}       the end, with the reason

It reads no more of stdin than its own input: the rest is for the agent. It trusts a directory only
if no other user can change its contents.
"""

import os
import signal
import stat
import sys

MARK = "\002hpcnode\003 "
ORDER_S = 60
MAX_BYTES = 64 << 20
POLICY = "/etc/hpcsched/node.json"
NETWORK = "nfs nfs4 cifs smb3 smbfs fuse.sshfs lustre ceph fuse.ceph beegfs gpfs glusterfs fuse.glusterfs afs 9p ncpfs"


def say(**words):
    import json

    os.write(1, ("\n" + MARK + json.dumps(words) + "\n").encode("ascii"))


def read_order():
    import json

    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)  # bytes after the line are not for us
        line += part
        if not part or len(line) > 65536 or line[:1] != b"{":  # not the controller: file transfer, or a shell's input
            sys.exit(1)
    return json.loads(line.decode("utf-8"))


def read_exactly(size):
    parts = []
    while size:
        part = os.read(0, min(size, 65536))
        if not part:
            sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def file_system_of(path):
    """Return the type of the file system that `path` is on, or will be on."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mounts") as mounts:
            for line in mounts:
                point, its_kind = line.split()[1:3]
                point = point.replace("\\040", " ")
                below = path == point or path.startswith(point.rstrip("/") + "/")
                if below and len(point) >= len(best):
                    best, kind = point, its_kind
    except (IOError, OSError):
        pass  # no /proc: nothing is known against the place
    return kind


def choose_root(asked, cluster, node):
    if asked:
        return asked
    if os.geteuid() == 0:
        return os.path.join("/var/lib/hpcsched-node", cluster, node)
    base = os.path.expanduser("~/.local/state/hpcsched-node")
    if file_system_of(base) in NETWORK.split():
        # Locks and fsync must be reliable here.
        base = "/var/tmp/hpcsched-node-%d" % os.geteuid()  # noqa: S108 - its owner is checked
    return os.path.join(base, cluster, node)


def make_root(root):
    """Make the directory; reject one in which other users could change our files."""
    root = os.path.realpath(root)
    # 0711 if the agent has jobs of other users: they must reach bin/ below it.
    for_all = os.geteuid() == 0 or "agent" in policy()
    os.umask(0o066 if for_all else 0o077)
    if not os.path.isdir(root):
        os.makedirs(root)
    os.umask(0o022 if for_all else 0o077)
    path = root
    # In a user namespace without a uid for root, the owner of `/` is root.
    trusted = (0, os.stat("/").st_uid, os.geteuid())
    while True:
        status = os.stat(path)
        owners = (os.geteuid(),) if path == root else trusted
        # Above the root of an agent that is one's own, one's own group may write.
        of_group = path == root or (for_all and status.st_gid != 0)
        forbidden = stat.S_IWOTH | (stat.S_IWGRP if of_group else 0)
        if status.st_uid not in owners:
            raise ValueError("cannot use %s: %s belongs to uid %d" % (root, path, status.st_uid))
        if status.st_mode & forbidden and not (path != root and status.st_mode & stat.S_ISVTX):
            raise ValueError("cannot use %s: others may write %s (mode %o)" % (root, path, status.st_mode & 0o7777))
        if path == "/":
            return root
        path = os.path.dirname(path)


def policy():
    """Return what the administrator of this machine allows, {} if there is no POLICY."""
    import json

    try:
        with open(POLICY, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.stat("/").st_uid) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError("cannot trust %s: it must belong to root, and only root may write it" % POLICY)
            found = json.loads(file.read().decode("utf-8"))
            if not isinstance(found, dict):
                raise ValueError("cannot read %s: not a JSON object" % POLICY)
            return found
    except (IOError, OSError):
        if os.path.lexists(POLICY):
            raise
        return {}


def check_policy(order):
    """Refuse code and places that the policy of this machine does not name."""
    if not 0 < order["size"] <= MAX_BYTES:
        raise ValueError("cannot take %d bytes as hpcnode.pyz" % order["size"])
    given = policy()
    if "bundles" not in given:
        return
    if order["sha256"] not in given["bundles"]:
        text = (
            "cannot run hpcnode.pyz %s: it is not in bundles of %s; an admin of the node adds it: hpcsched key --bundle"
        )
        raise ValueError(text % (order["sha256"], POLICY))
    if order["root"] != given.get("root", ""):
        raise ValueError("cannot use %r: root in %s is %r" % (order["root"], POLICY, given.get("root", "")))
    for name in (order["cluster"], order["node"]):
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
            raise ValueError("cannot use the name %r" % name)


def digest(data):
    import hashlib

    return hashlib.sha256(data).hexdigest()


def is_there(path, sha256):
    try:
        with open(path, "rb") as pyz:
            return digest(pyz.read()) == sha256
    except (IOError, OSError):
        return False


def store(root, path, data):
    temporary = os.path.join(root, ".hpcnode-%d.tmp" % os.getpid())
    try:
        os.unlink(temporary)  # left by a process that had our pid and died here
    except OSError:
        pass
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # reduced by the umask
    try:
        with os.fdopen(fd, "wb") as pyz:
            pyz.write(data)
            pyz.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except (IOError, OSError):
        os.unlink(temporary)
        raise
    fd = os.open(root, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def main():
    version = "%d.%d.%d" % tuple(sys.version_info[:3])
    if sys.version_info < (3, 9):
        say(error="cannot run the agent: %s is Python %s, and it needs 3.9 or newer" % (sys.executable, version))
        sys.exit(1)
    signal.alarm(ORDER_S)  # ends this process
    order = read_order()
    signal.alarm(0)
    try:
        check_policy(order)
        root = make_root(choose_root(order["root"], order["cluster"], order["node"]))
        path = os.path.join(root, "hpcnode-%s.pyz" % order["sha256"][:16])
        if not is_there(path, order["sha256"]):
            say(need=True)
            data = read_exactly(order["size"])
            if digest(data) != order["sha256"]:
                raise ValueError("cannot take hpcnode.pyz: what arrived is not what was announced")
            store(root, path, data)
    except (IOError, OSError) as error:
        # Never choose another place automatically: if the home directory returns later, the agent
        # would get a spool without its state.
        elsewhere = "; name another directory: --root of hpcsched node add, root in %s.toml" % order["node"]
        say(error="cannot keep hpcnode.pyz: %s%s" % (error, "" if order["root"] else elsewhere))
        sys.exit(1)
    except ValueError as error:
        say(error=str(error))
        sys.exit(1)
    say(ready=True, root=root, python=version)
    names = ["--root", root, "--cluster", order["cluster"], "--node", order["node"]]
    os.execv(sys.executable, [sys.executable, "-I", "-S", path, "attach"] + names)


main()
