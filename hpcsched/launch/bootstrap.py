# ruff: noqa: UP024, UP031, UP036
"""What runs first on a node: puts hpcnode.pyz there if it is not there yet, and becomes it.

Never imported: `hpcsched.launch.bundle` takes it as text, and `python3 -c` runs it on the node, so it keeps to what any
Python understands and can tell an old one apart. It reads one line of JSON {sha256 size root cluster node} and answers
with lines that begin with MARK, so that the controller can skip what a noisy start-up file printed before:

    {"need": true}         send the `size` bytes now
    {"ready": true, ...}   the next byte is the agent's
    {"error": "..."}       the end, in words

It reads from stdin exactly what belongs to it: what follows is for the agent. It believes a directory only if nobody
else can change what lies in it.
"""

import os
import stat
import sys

MARK = "\002hpcnode\003 "
NETWORK = "nfs nfs4 cifs smb3 smbfs fuse.sshfs lustre ceph fuse.ceph beegfs gpfs glusterfs fuse.glusterfs afs 9p ncpfs"


def say(**words):
    import json

    os.write(1, ("\n" + MARK + json.dumps(words) + "\n").encode("ascii"))


def read_order():
    import json

    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)  # what is behind the line is not ours yet
        if not part or len(line) > 65536:
            sys.exit(1)
        line += part
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
    """The type of the file system that `path` is on, or will be."""
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
        pass  # no /proc: then nothing is known against the place
    return kind


def choose_root(asked, cluster, node):
    if asked:
        return asked
    if os.geteuid() == 0:
        return os.path.join("/var/lib/hpcsched-node", cluster, node)
    base = os.path.expanduser("~/.local/state/hpcsched-node")
    if file_system_of(base) in NETWORK.split():
        base = "/var/tmp/hpcsched-node-%d" % os.geteuid()  # locks and fsync have to mean something there  # noqa: S108 - its owner is checked
    return os.path.join(base, cluster, node)


def make_root(root):
    """Make the directory, and refuse one in which others could change what we put there."""
    root = os.path.realpath(root)
    # 0711 where the agent is root: other users' jobs have to reach bin/ below it.
    os.umask(0o066 if os.geteuid() == 0 else 0o077)
    if not os.path.isdir(root):
        os.makedirs(root)
    os.umask(0o022 if os.geteuid() == 0 else 0o077)
    path, forbidden = root, stat.S_IWGRP | stat.S_IWOTH
    # In a user namespace that has no uid for root, root is whoever `/` belongs to.
    trusted = (0, os.stat("/").st_uid, os.geteuid())
    while True:
        status = os.stat(path)
        owners = (os.geteuid(),) if path == root else trusted
        if status.st_uid not in owners:
            raise ValueError("cannot use %s: %s belongs to uid %d" % (root, path, status.st_uid))
        if status.st_mode & forbidden and not (path != root and status.st_mode & stat.S_ISVTX):
            raise ValueError("cannot use %s: others may write %s (mode %o)" % (root, path, status.st_mode & 0o7777))
        if path == "/":
            return root
        path, forbidden = os.path.dirname(path), stat.S_IWOTH


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
        os.unlink(temporary)  # of a process that had our pid and died here
    except OSError:
        pass
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # the umask takes from it
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
    order = read_order()
    try:
        root = make_root(choose_root(order["root"], order["cluster"], order["node"]))
        path = os.path.join(root, "hpcnode-%s.pyz" % order["sha256"][:16])
        if not is_there(path, order["sha256"]):
            say(need=True)
            data = read_exactly(order["size"])
            if digest(data) != order["sha256"]:
                raise ValueError("cannot take hpcnode.pyz: what arrived is not what was announced")
            store(root, path, data)
    except (IOError, OSError) as error:
        # Never another place by itself: a home that is there again tomorrow would bring the agent a spool that knows nothing.
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
