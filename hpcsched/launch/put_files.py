"""Compare files of a node with those of the head, and replace them: `hpcsched node sync`.

This program runs on a node. It is never imported: `hpcsched.cli.admin.sync` reads it as text, and
`python3 -c` runs it there, with the standard library of Python 3.9. It reads one line of JSON with
the wanted files and, if `write` is set, then their contents in this order; and answers with one
line of JSON behind MARK: for each file its state there, as text; "" if it is as wanted.

A file is replaced by rename, with its mode and owner, so that a reader sees the old or the new one.
Links and things that are not files are left alone.
"""

import grp
import hashlib
import json
import os
import pwd
import stat
import sys

MARK = "\002hpcsync\003 "
MOST_BYTES = 64 << 20


def look(file):
    """Return what differs from the wanted file, in words; "" for nothing.

    Raises OSError or ValueError.
    """
    try:
        fd = os.open(file["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(file["path"])):
            raise ValueError("its directory is missing there") from None
        return "missing"
    except OSError:
        if os.path.islink(file["path"]):
            raise ValueError("it is a symbolic link there; name what it leads to") from None
        raise
    with open(fd, "rb") as there:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file there")
        found = []
        if status.st_size != file["size"] or digest(there) != file["sha256"]:
            there.seek(0)
            found.append("content {} there, {} here".format(digest(there)[:12], file["sha256"][:12]))
    if stat.S_IMODE(status.st_mode) != file["mode"]:
        found.append("mode {:04o} there, {:04o} here".format(stat.S_IMODE(status.st_mode), file["mode"]))
    if (status.st_uid, status.st_gid) != owner(file):
        has = f"{name_of(pwd.getpwuid, status.st_uid)}:{name_of(grp.getgrgid, status.st_gid)}"
        found.append("owner {} there, {}:{} here".format(has, file["user"], file["group"]))
    return ", ".join(found)


def digest(there):
    found = hashlib.sha256()
    left = MOST_BYTES
    while left > 0:
        part = there.read(1 << 20)
        if not part:
            break
        found.update(part)
        left -= len(part)
    return found.hexdigest()


def owner(file):
    """Return the ids of the wanted owner; an account that is not root's keeps its own."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        return pwd.getpwnam(file["user"]).pw_uid, grp.getgrnam(file["group"]).gr_gid
    except KeyError:
        raise ValueError("{}:{} are not known there".format(file["user"], file["group"])) from None


def name_of(find, number):
    try:
        return find(number)[0]
    except KeyError:
        return str(number)


def put(file, data):
    """Replace the file. Raises OSError or ValueError."""
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise ValueError("what arrived is not what was sent")
    uid, gid = owner(file)
    directory = os.path.dirname(file["path"])
    temporary = os.path.join(directory, ".{}.hpcsync-{}".format(os.path.basename(file["path"])[:200], os.getpid()))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as new:
            new.write(data)
            os.fchown(fd, uid, gid)
            os.fchmod(fd, file["mode"])
            new.flush()
            os.fsync(fd)
        os.rename(temporary, file["path"])
    except BaseException:
        os.unlink(temporary)
        raise
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def main():
    order = json.loads(sys.stdin.buffer.readline().decode("utf-8"))
    answers = []
    for file in order["files"]:
        data = sys.stdin.buffer.read(file["size"]) if order["write"] else b""
        answer = {"difference": "", "error": ""}
        try:
            answer["difference"] = look(file)
            if order["write"] and answer["difference"]:
                put(file, data)
        except ValueError as error:
            answer["error"] = str(error)
        except OSError as error:
            answer["error"] = error.strerror or str(error)
        answers.append(answer)
    sys.stdout.write("\n" + MARK + json.dumps(answers) + "\n")


if __name__ == "__main__":  # nodes get the text as a program
    main()
