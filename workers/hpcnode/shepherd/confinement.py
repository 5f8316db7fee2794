"""What a job on this node is confined by, and what this node cannot enforce.

A *sandbox* is the groups and private mounts of one job on this node. The agent gives one to each job, the tasks of its steps
enter it (`hpcnode.shepherd.task`), and the agent takes it back when nothing of the job is left here. The mechanisms are in
`hpcnode.os`: `cgroup` and `mounts`.

Rules:
- A limit that this node can enforce is enforced, or the step does not start. A limit that it cannot enforce is in `abilities`,
  which the agent reports with its facts.
- The controller says what applies (`protocol.Confinement`): the job's share of this node, and the words of `confine`.
- Memory is always limited, by a look at /proc each second if there is no cgroup.
- A sandbox serves one job after the other, because the kernel needs longer to make one than to run a short job. It serves
  another one only if no process, no file and no memory of the last one is left in it; otherwise it is removed.
- A file for each job says which sandbox it has, for the next agent and for logins (`hpcnode.agent.adopt`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import zlib
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from hpcnode import paths
from hpcnode.os import cgroup, mounts
from hpcnode.os.account import UserAccount
from hpcnode.os.durable import write_plainly
from hpcnode.os.loop import Loop, Timer
from hpcnode.wire import protocol

NOT_ROOT = "the agent is not root"
OWNERS = "/run/hpcsched-owners"  # of each root of an agent, a file for each job there
OWN_OWNERS = "owners"  # the same of an agent that is not root, in its root
NEW = ".new"  # the end of the name of a file that is being written
RETRY_S = 0.1
IDLE_S = 2.0  # how long a sandbox waits for another job
LOOK_S = 0.1  # after all cpus were found taken, until they are looked at again
LEFT_BYTES = 1 << 20  # of memory that may be charged to the next job: what the kernel counts in batches
Ability = Tuple[str, bool, str]


class Ground(NamedTuple):
    """What an agent can use on its node."""

    root: str = ""
    tree: cgroup.Tree = cgroup.Tree()
    missing: Dict[str, str] = {}  # see `mounts.find_missing`
    no_filter: str = NOT_ROOT  # why no BPF program can keep jobs from devices; "": it can
    owners: str = ""  # the directory of the owners of jobs; "": nothing can be confined here


class JobOwner(NamedTuple):
    """Whose job has this node, where the job's groups are, and which sandbox it has."""

    uid: int
    job_id: int
    groups: List[str]
    sandbox: str


class StepConfinement(NamedTuple):
    """What confines one step."""

    group: Optional[cgroup.StepGroup] = None
    cover: mounts.Cover = mounts.Cover()


def survey(root: str, node: str, boot_id: str) -> Ground:
    """Find out what this agent can use, and prepare it."""
    # The agents of one machine differ. `hashlib` would map OpenSSL into each process that is forked from here.
    name = "%s-%08x" % (node, zlib.crc32(os.fsencode("%s %s" % (boot_id, root))))
    missing = mounts.find_missing(root)
    tree = cgroup.find(name)
    if os.geteuid() != 0:
        return Ground(root, tree, missing, owners=owners_directory(root) if tree.roots() else "")
    return Ground(root, tree, missing, cgroup.why_no_bpf(), owners_directory(root))


def abilities(ground: Ground) -> List[Ability]:
    """Return what this node can enforce on jobs: a word, whether it can, and why not.

    The words are those of `confine`, and kill (nothing of a job survives it), memory, hugepages, io shares and logins.
    """
    tree = ground.tree
    found: List[Ability] = []

    def add(word: str, why: str) -> None:
        found.append((word, not why, why))

    no_group = "" if tree.unified else "no cgroup of version 2 is usable"
    add("kill", no_group)
    add("memory", tree.missing.get("memory", ""))
    add("hugepages", tree.missing.get("hugetlb", "") if cgroup.has_huge_pages() else "")
    add("cpus", tree.missing.get("cpu", ""))
    add("pin", tree.missing.get("cpuset", ""))
    add("processes", tree.missing.get("pids", ""))
    add("io", tree.missing.get("io", ""))
    add("gpus", _why_no_devices(ground))
    no_namespace = ground.missing.get("namespace", "")
    add("shm", no_namespace or ground.missing.get("ipc", ""))
    add("tmp", no_namespace)
    add("proc", ground.missing.get("proc", ""))
    add("logins", "" if tree.roots() and os.geteuid() == 0 else NOT_ROOT if os.geteuid() else "no cgroup is usable")
    return found


def _why_no_devices(ground: Ground) -> str:
    if "devices" in ground.tree.controllers or (ground.tree.unified and not ground.no_filter):
        return ""
    return ground.no_filter or "no cgroup is usable"


def job_name(token: str, job_id: int, attempt: int) -> str:
    """Return the name of a job's groups and directories."""
    return "%s.%d.%d" % (token.partition(".")[0], job_id, attempt)


def _denied_gpus(share: protocol.Confinement) -> List[cgroup.Device]:
    files = cgroup.gpu_files(share.gpu_files)
    return cgroup.denied(files, share.gpus) if files else []


def memory_left_mib(held: StepConfinement, mem_mib: int) -> int:
    """Return what is left of a memory limit when the job's tmpfs counts."""
    return max(1, mem_mib - mounts.used_mib(held.cover))


# ----- whose job has which sandbox


def owners_directory(root: str) -> str:
    """Return the directory of the owners of an agent's jobs.

    `root` may be written in any way. Root's is in memory, because each job would cost a file on disk.
    """
    if os.geteuid() != 0:
        return os.path.join(root, OWN_OWNERS)
    return os.path.join(OWNERS, os.path.realpath(root).replace("%", "%25").replace("/", "%2F"))


def owners(directory: str) -> Dict[str, JobOwner]:
    """Return the jobs that have the node of this agent. Raises OSError."""
    found: Dict[str, JobOwner] = {}
    for job in _names(directory):
        if not job.endswith(NEW):
            with contextlib.suppress(FileNotFoundError):  # over by now
                with open(os.path.join(directory, job)) as file:
                    found[job] = JobOwner(*json.load(file))
    return found


def _names(path: str) -> List[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


# ----- sandboxes


class SandboxKind(NamedTuple):
    """What two jobs must have in common to have the same sandbox, one after the other."""

    controllers: Tuple[str, ...]
    denied: Tuple[cgroup.Device, ...]
    shm: bool
    proc: bool


class Sandbox:
    """The groups and private mounts of one job at a time."""

    def __init__(self, name: str, kind: SandboxKind, limits: cgroup.JobLimits, tree: cgroup.Tree) -> None:
        self.name = name
        self.kind = kind
        self.limits = limits  # that its groups have
        self.groups = cgroup.groups_of(tree, name, kind.controllers)
        self._first = cgroup.step_group(tree, name, cgroup.FIRST_STEP, kind.controllers)
        self.cover = mounts.Cover()
        self.shm_mib = 0
        self.cpus: Set[int] = set()  # of its own
        self.first_is_taken = False  # by a step of the job
        self.is_known = True  # how it was made; False: an earlier agent made it
        self.idle_since_s = 0.0

    def take_first(self, mem_mib: int) -> cgroup.StepGroup:
        """Return the groups of the job's first step, which has this memory limit."""
        self.first_is_taken = True
        return self._first if mem_mib > 0 else self._first._replace(memory="")


class Sandboxes:
    """The sandboxes of this node."""

    def __init__(self, loop: Loop, ground: Ground) -> None:
        self._loop = loop
        self._ground = ground
        self._name, self._numbers = os.urandom(4).hex(), itertools.count(1)
        self._of_job: Dict[str, Sandbox] = {}
        self._idle: List[Sandbox] = []
        self._removing: Set[str] = set()  # names whose groups are not empty yet
        self._tidy_timer: Optional[Timer] = None
        self._look_s = 0.0  # when to look for free cpus again
        self.delete: Callable[[str], None] = paths.remove_tree  # may take long

    def begin(self, launch: protocol.Launch, account: UserAccount, socket_path: str) -> StepConfinement:
        """Return what confines a step of a job. Raises OSError: then it must not start."""
        ground = self._ground
        if not ground.owners:
            return StepConfinement()
        job = job_name(launch.token, launch.job_id, launch.attempt)
        sandbox = self._sandbox_of(job, launch, account)
        cover = sandbox.cover
        wants_tmp = "tmp" in launch.confine.words and os.path.normpath(launch.work_dir) != mounts.TMP
        if wants_tmp and ground.root and "namespace" not in ground.missing:
            given = (launch.work_dir, ground.root, socket_path, account.home, launch.env.get("TMPDIR", ""))
            cover = cover._replace(tmp=mounts.make_tmp(ground.root, job), keep=mounts.kept(given))
        return StepConfinement(self._group_of_step(sandbox, launch), cover)

    def claim(self, launch: protocol.Launch, account: UserAccount) -> None:
        """Give a sandbox to a job that has this node and runs nothing here yet. Raises OSError."""
        if self._ground.owners:
            self._sandbox_of(job_name(launch.token, launch.job_id, launch.attempt), launch, account)

    def _sandbox_of(self, job: str, launch: protocol.Launch, account: UserAccount) -> Sandbox:
        limits = self._limits(launch)
        sandbox = self._of_job.get(job)
        if sandbox is None:
            sandbox = self._take(self._kind(launch, limits), limits)
            self._of_job[job] = sandbox
            self._note_owner(job, sandbox, launch, account)
        elif sandbox.limits._replace(step_mem_mib=0) != limits._replace(step_mem_mib=0):
            self._change(sandbox, limits)
        return sandbox

    def _limits(self, launch: protocol.Launch) -> cgroup.JobLimits:
        share = launch.confine
        has_cpus = "cpus" in share.words and share.cpus > 0
        can_pin = has_cpus and "cpuset" in self._ground.tree.controllers
        return cgroup.JobLimits(
            cpus=share.cpus if has_cpus else 0,
            pin=can_pin and share.cpus < len(cgroup.usable_cpus(self._ground.tree)),
            mem_mib=share.mem_mib,
            step_mem_mib=launch.mem_mib,
            processes=share.max_processes if "processes" in share.words else 0,
        )

    def _kind(self, launch: protocol.Launch, limits: cgroup.JobLimits) -> SandboxKind:
        ground, words = self._ground, launch.confine.words
        denied = tuple(_denied_gpus(launch.confine)) if "gpus" in words else ()
        mounted = bool(ground.root) and "namespace" not in ground.missing
        return SandboxKind(
            controllers=cgroup.controllers_for(ground.tree, limits._replace(devices=bool(denied))),
            denied=denied,
            shm=mounted and "shm" in words,
            proc=mounted and "proc" in words and "proc" not in ground.missing,
        )

    def _take(self, kind: SandboxKind, limits: cgroup.JobLimits) -> Sandbox:
        """Return an idle sandbox of this kind, or a new one, with these limits. Raises OSError."""
        for sandbox in reversed(self._idle):
            if sandbox.kind == kind:
                self._idle.remove(sandbox)
                try:
                    for group in sandbox.groups[:1]:
                        os.stat(group)
                    self._change(sandbox, limits)
                    mounts.renew(sandbox.cover)
                    return sandbox
                except OSError:  # somebody took its groups away: they were empty, and may have looked abandoned
                    self._remove(sandbox.name)
                    break
        return self._make(kind, limits)

    def _make(self, kind: SandboxKind, limits: cgroup.JobLimits) -> Sandbox:
        ground = self._ground
        sandbox = Sandbox("%s-%d" % (self._name, next(self._numbers)), kind, limits, ground.tree)
        try:
            if ground.tree.roots():
                cgroup.make_job(ground.tree, sandbox.name, kind.controllers, limits)
                self._deny(sandbox)
                self._pin(sandbox)
            if kind.shm or kind.proc:
                sandbox.shm_mib = limits.mem_mib or limits.step_mem_mib
                ipc = kind.shm and "ipc" not in ground.missing
                sandbox.cover = mounts.make_private(
                    ground.root, sandbox.name, sandbox.shm_mib, shm=kind.shm, ipc=ipc, proc=kind.proc
                )
        except OSError:
            self._remove(sandbox.name)
            raise
        return sandbox

    def _change(self, sandbox: Sandbox, limits: cgroup.JobLimits) -> None:
        """Give a sandbox other limits. Raises OSError."""
        cgroup.limit_job(self._ground.tree, sandbox.name, sandbox.kind.controllers, sandbox.limits, limits)
        sandbox.limits = limits._replace(step_mem_mib=sandbox.limits.step_mem_mib)
        shm_mib = limits.mem_mib or limits.step_mem_mib
        if shm_mib != sandbox.shm_mib:
            mounts.resize(sandbox.cover, shm_mib)
            sandbox.shm_mib = shm_mib
        self._pin(sandbox)

    def _deny(self, sandbox: Sandbox) -> None:
        tree, devices = self._ground.tree, sandbox.kind.denied
        group = cgroup.JOB_PREFIX + sandbox.name
        if devices and tree.unified and not self._ground.no_filter:
            cgroup.deny_by_bpf(os.path.join(tree.unified, group), devices)
        elif devices and "devices" in tree.controllers:
            cgroup.deny_by_controller(os.path.join(tree.controllers["devices"], group), devices)

    def _pin(self, sandbox: Sandbox) -> None:
        """Give the job cpus of its own, if enough are free.

        If none are, no other job looks for LOOK_S, because a queue of short jobs would do nothing else.
        """
        if "cpuset" in sandbox.kind.controllers and not sandbox.cpus and time.monotonic() >= self._look_s:
            own = set().union(*(other.cpus for other in self._of_job.values()))
            sandbox.cpus = cgroup.pin(self._ground.tree, sandbox.name, sandbox.limits.cpus, own)
            if not sandbox.cpus:
                self._look_s = time.monotonic() + LOOK_S

    def _group_of_step(self, sandbox: Sandbox, launch: protocol.Launch) -> Optional[cgroup.StepGroup]:
        """Return the groups of a step: those of the first step, or new ones. Raises OSError."""
        tree, controllers, mem_mib = self._ground.tree, sandbox.kind.controllers, launch.mem_mib
        if not tree.roots():
            return None
        if sandbox.first_is_taken:
            step = "%s-%s" % (launch.step, os.urandom(4).hex())
            return cgroup.make_step(tree, sandbox.name, step, controllers, mem_mib)
        if "memory" in controllers and mem_mib != sandbox.limits.step_mem_mib:
            cgroup.limit_step(tree, sandbox.name, cgroup.FIRST_STEP, mem_mib)
        sandbox.limits = sandbox.limits._replace(step_mem_mib=mem_mib)
        return sandbox.take_first(mem_mib)

    def _note_owner(self, job: str, sandbox: Sandbox, launch: protocol.Launch, account: UserAccount) -> None:
        data = json.dumps(JobOwner(account.uid, launch.job_id, sandbox.groups, sandbox.name)).encode()
        path = os.path.join(self._ground.owners, job)
        try:
            write_plainly(path + NEW, data, 0o600, new=False)
        except FileNotFoundError:  # the first job here
            os.makedirs(self._ground.owners, mode=0o700, exist_ok=True)
            write_plainly(path + NEW, data, 0o600, new=False)
        os.replace(path + NEW, path)

    # ----- taking them back

    def job_over(self, job: str, may_serve_again: bool) -> None:
        """Take back the sandbox of a job that is over here, and its /tmp."""
        ground = self._ground
        if not ground.owners:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(ground.owners, job))
        gone = mounts.remove_tmp(ground.root, job) if ground.root else ""
        if gone:
            self.delete(gone)
        sandbox = self._of_job.pop(job, None)
        if sandbox is None:
            return
        if may_serve_again and sandbox.is_known and self._is_clean(sandbox):
            sandbox.first_is_taken, sandbox.idle_since_s = False, time.monotonic()
            self._idle.append(sandbox)
        else:
            self._remove(sandbox.name)
        self._tidy_later()

    def _is_clean(self, sandbox: Sandbox) -> bool:
        """Return whether nothing of its last job is left in a sandbox."""
        tree = self._ground.tree
        try:
            if not cgroup.is_empty(tree, sandbox.name, sandbox.kind.controllers):
                return False
            if "memory" in sandbox.kind.controllers and cgroup.memory_bytes(tree, sandbox.name) > LEFT_BYTES:
                return False
            if sandbox.cpus:
                cgroup.unpin(tree, sandbox.name)
                sandbox.cpus = set()
            return mounts.is_clean(sandbox.cover)
        except OSError:
            return False

    def _remove(self, name: str) -> None:
        """Remove the groups and mounts of a sandbox; repeat it until all processes in it are dead."""
        ground = self._ground
        if ground.tree.roots() and not cgroup.remove_job(ground.tree, name):
            if name not in self._removing:
                self._removing.add(name)
                self._loop.later(RETRY_S, lambda: self._remove_again(name))
            return
        if ground.root and "namespace" not in ground.missing:
            mounts.remove_private(ground.root, name)

    def _remove_again(self, name: str) -> None:
        self._removing.discard(name)
        self._remove(name)

    def _tidy_later(self) -> None:
        if self._tidy_timer is None:
            self._tidy_timer = self._loop.later(IDLE_S, self._tidy_idle)

    def _tidy_idle(self) -> None:
        self._tidy_timer = None
        self.tidy(time.monotonic() - IDLE_S)
        if self._idle or self._removing:
            self._tidy_later()

    def tidy(self, before_s: float) -> None:
        """Remove sandboxes that are idle since before `before_s`.

        If no job is here, also what all jobs share.
        """
        ground = self._ground
        old = [sandbox for sandbox in self._idle if sandbox.idle_since_s <= before_s]
        self._idle = [sandbox for sandbox in self._idle if sandbox.idle_since_s > before_s]
        for sandbox in old:
            self._remove(sandbox.name)
        if self._of_job or self._idle:
            return
        if ground.tree.roots():
            cgroup.remove_unused(ground.tree)
        if ground.owners:
            with contextlib.suppress(OSError):  # not empty, or never made
                os.rmdir(ground.owners)
        if ground.root:
            mounts.end_if_unused(ground.root)

    def take_over(self) -> None:
        """Take over the sandboxes that an earlier agent has given to jobs. Raises OSError."""
        tree = self._ground.tree
        for job, owner in (owners(self._ground.owners) if self._ground.owners else {}).items():
            kind = SandboxKind(cgroup.controllers_of(tree, owner.sandbox), (), False, False)
            sandbox = Sandbox(owner.sandbox, kind, cgroup.JobLimits(), tree)
            sandbox.first_is_taken, sandbox.is_known = True, False
            sandbox.cpus = cgroup.pinned_to(tree, owner.sandbox)
            sandbox.cover = mounts.find_private(self._ground.root, owner.sandbox)
            self._of_job[job] = sandbox

    def sweep(self, live: Iterable[str]) -> None:
        """Take back the sandboxes of jobs that are not `live`, and remove what no job has."""
        ground, kept = self._ground, set(live)
        if ground.tree.roots():
            cgroup.remove_abandoned(ground.tree, time.time())
        for job in self._of_job.keys() - kept:
            self.job_over(job, may_serve_again=False)
        names = {sandbox.name for sandbox in (*self._of_job.values(), *self._idle)}
        for name in (cgroup.jobs(ground.tree) | set(mounts.private_names(ground.root))) - names:
            self._remove(name)
        for name in set(mounts.tmp_names(ground.root)) - kept:
            gone = os.path.join(ground.root, mounts.TMPS, name) if name.startswith(mounts.GONE) else ""
            self.delete(gone or mounts.remove_tmp(ground.root, name))
