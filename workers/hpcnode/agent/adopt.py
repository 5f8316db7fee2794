"""`hpcnode adopt ROOT`: admit a user's ssh login only as a part of a job here.

pam_exec runs it as root, in the stack of sshd:

    account required pam_exec.so quiet stdout ROOT/bin/hadopt
    session required pam_exec.so quiet stdout ROOT/bin/hadopt

The first line refuses a login before it is authenticated in full, also one that only forwards ports. The second one must be the
last of the session: pam_systemd moves the login into a scope of its own before, and with keyboard-interactive authentication sshd
asks PAM about the account in a process that is not the login.

Its parent is the process of the login. That enters the `logins` group of the user's newest job here, and what the login starts is
born there: it has the job's cpus, memory, processes and GPUs, and ends with the job. PAM refuses the login if this exits with
another status than 0.

Rules:
- Root, and the account of the agent, may always log in; nobody else without a job that has this node.
- A login that cannot enter the job's groups is refused, because nothing would end it.
- It reads only what root's agent has written, and PAM_USER and PAM_TYPE.
- The login sees the node's /tmp, /dev/shm and /proc: a mount namespace cannot be given to another process.

Sources: pam_exec(8), pam(7), Slurm's pam_slurm_adopt.
"""

from __future__ import annotations

import os
import pwd
import sys
from typing import List, Mapping

from hpcnode.os import cgroup
from hpcnode.shepherd import confinement

LEAVING = ("close_session", "password")
ALLOWED, REFUSED = 0, 1


def main(argv: List[str]) -> int:
    """Decide about the login that PAM asks for; return the exit status."""
    if len(argv) != 1:
        sys.stderr.write("usage: hpcnode adopt ROOT\n")
        return 2
    why = why_refused(argv[0], os.environ, os.getppid())
    if why:
        sys.stdout.write("Access denied: %s\n" % why)
    return REFUSED if why else ALLOWED


def why_refused(root: str, environ: Mapping[str, str], pid: int) -> str:
    """Adopt the login of process `pid`; return "" or why it is refused."""
    if environ.get("PAM_TYPE", "") in LEAVING:
        return ""
    name = environ.get("PAM_USER", "")
    try:
        uid = pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return "this node has no account %r" % name[:60]
    if uid in (0, os.stat(root).st_uid):
        return ""
    directory = confinement.owners_directory(root)
    owners = confinement.owners(directory)
    jobs = [job for job, owner in owners.items() if owner.uid == uid and owner.groups]
    if not jobs:
        return "%s has no job on this node" % name
    for job in sorted(jobs, key=lambda job: owners[job].job_id, reverse=True):
        # Looked at again: if the job has ended meanwhile, the next job may have its sandbox.
        if cgroup.adopt(owners[job].groups, pid) and confinement.owners(directory).get(job) == owners[job]:
            return ""
    return "cannot put the login into a job of %s: hctl show node says what this node cannot enforce (logins)" % name
