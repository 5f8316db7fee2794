"""Compare files of a node with those of the head, and replace them: `hpcsched node sync`.

This program runs on a node. `hpcsched.cli.admin.sync` reads it as text, and `python3 -c` runs it
there behind `hpcnode.os.trust`, with the standard library of Python 3.9. It reads one line of JSON
with the wanted files and, if `write` is set, then their contents in this order; and answers with one
line of JSON behind MARK: for each file its state there, as text; "" if it is as wanted.

A file is replaced by rename, with its mode and owner, so that a reader sees the old or the new one.
Links and things that are not files are left alone. Root may be at work in a directory of a user, who
may exchange it for a link meanwhile. So all is done in a directory that is opened once, and that
nobody but root and the file's owner can replace.
"""

import grp
import hashlib
import json
import os
import pwd
import stat
import sys

from hpcnode.os.trust import open_directory  # its text comes before this one

MARK = "\002hpcsync\003 "
MOST_BYTES = 64 << 20


def directory_of(file, uid):
    """Return a descriptor of the file's directory. Raises OSError or ValueError."""
    try:
        return open_directory(os.path.dirname(file["path"]), uid)
    except FileNotFoundError:
        raise ValueError("its directory is missing there") from None


def look(file, directory, owner):
    """Return what differs from the wanted file, in words; "" for nothing.

    Raises OSError or ValueError.
    """
    name = os.path.basename(file["path"])
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return "missing"
    except OSError:
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
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
    if (status.st_uid, status.st_gid) != owner:
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


def owner_of(file):
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


def put(file, directory, owner, data):
    """Replace the file. Raises OSError or ValueError."""
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise ValueError("what arrived is not what was sent")
    name = os.path.basename(file["path"])
    temporary = f".{name[:200]}.hpcsync-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with open(fd, "wb") as new:
            new.write(data)
            os.fchown(fd, *owner)
            os.fchmod(fd, file["mode"])
            new.flush()
            os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise
    os.fsync(directory)


def done(file, data, write):
    """Compare the file, and replace it if `write` is set; return what differed.

    Raises OSError or ValueError.
    """
    owner = owner_of(file)
    directory = directory_of(file, owner[0])
    try:
        difference = look(file, directory, owner)
        if write and difference:
            put(file, directory, owner, data)
        return difference
    finally:
        os.close(directory)


def main():
    order = json.loads(sys.stdin.buffer.readline().decode("utf-8"))
    answers = []
    for file in order["files"]:
        data = sys.stdin.buffer.read(file["size"]) if order["write"] else b""
        answer = {"difference": "", "error": ""}
        try:
            answer["difference"] = done(file, data, order["write"])
        except ValueError as error:
            answer["error"] = str(error)
        except OSError as error:
            answer["error"] = error.strerror or str(error)
        answers.append(answer)
    sys.stdout.write("\n" + MARK + json.dumps(answers) + "\n")


if __name__ == "__main__":  # nodes get the text as a program
    main()
