"""What a job on this node is confined by, and what this node cannot enforce.

`begin` prepares the groups and private directories for a step, its tasks enter them (`hpcnode.shepherd.task`), and `JobRemains`
takes everything of a job away when nothing of it is left on this node. The mechanisms are in `hpcnode.os`: `cgroup`, `mounts`,
`device_filter`.

Rules:
- A limit that this node can enforce is enforced, or the step does not start. A limit that it cannot enforce is in `abilities`,
  which the agent reports with its facts.
- The controller says what applies (`protocol.Confinement`): the job's share of this node, and the words of `confine`.
- Memory is always limited, by a look at /proc each second if there is no cgroup.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from hpcnode import paths
from hpcnode.os import cgroup, device_filter, mounts
from hpcnode.os.account import UserAccount
from hpcnode.os.loop import Loop, Timer
from hpcnode.wire import protocol

NOT_ROOT = "the agent is not root"
OWNERS = "/run/hpcsched-owners"  # of each root of an agent, a file for each job there: see `hpcnode.agent.adopt`
NEW = ".new"  # the end of the name of a file that is being written
RETRY_S = 0.1
TIDY_S = 2.0
Ability = Tuple[str, bool, str]


class Ground(NamedTuple):
    """What an agent can use on its node."""

    root: str = ""
    tree: cgroup.Tree = cgroup.Tree()
    missing: Dict[str, str] = {}  # see `mounts.find_missing`
    no_filter: str = NOT_ROOT  # why no BPF program can keep jobs from devices; "": it can
    owners: str = ""  # the directory of the owners of jobs; "": the agent is not root, and no login is adopted


class JobOwner(NamedTuple):
    """Whose job has this node, and where the job's groups are."""

    uid: int
    job_id: int
    groups: List[str]


class StepConfinement(NamedTuple):
    """What confines one step."""

    group: Optional[cgroup.StepGroup] = None
    cover: mounts.Cover = mounts.Cover()


def survey(root: str, node: str, boot_id: str) -> Ground:
    """Find out what this agent can use, and prepare it."""
    import hashlib  # rarely needed; see `hpcnode.agent.agent` on the cost of imports

    agent = hashlib.sha256(os.fsencode("%s %s" % (boot_id, root))).hexdigest()[:8]  # agents of one machine differ
    name = "%s-%s" % (node, agent)
    missing = mounts.find_missing(root)
    if os.geteuid() != 0:
        return Ground(root, cgroup.find(name), missing)
    return Ground(root, cgroup.find(name), missing, device_filter.why_no_bpf(), owners_directory(root))


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


def begin(ground: Ground, launch: protocol.Launch, account: UserAccount, socket_path: str) -> StepConfinement:
    """Prepare what confines a step. Raises OSError: then it must not start."""
    job = job_name(launch.token, launch.job_id, launch.attempt)
    wanted, share = set(launch.confine.words), launch.confine
    limits = cgroup.JobLimits(
        cpus=share.cpus if "cpus" in wanted else 0,
        pin="cpus" in wanted,
        mem_mib=share.mem_mib,
        step_mem_mib=launch.mem_mib,
        processes=share.max_processes if "processes" in wanted else 0,
    )
    devices = _denied_gpus(share) if "gpus" in wanted else []
    group = cgroup.create(ground.tree, job, launch.step, limits._replace(devices=bool(devices)))
    if devices:
        _deny(ground, job, devices)
    keep = (launch.work_dir, ground.root, socket_path, account.home, launch.env.get("TMPDIR", ""))
    cover = mounts.Cover()
    if "namespace" not in ground.missing and ground.root and wanted & {"tmp", "shm", "proc"}:
        cover = mounts.make(
            ground.root,
            job,
            share.mem_mib or launch.mem_mib,
            tmp="tmp" in wanted and os.path.normpath(launch.work_dir) != mounts.TMP,
            shm="shm" in wanted,
            ipc="shm" in wanted and "ipc" not in ground.missing,
            proc="proc" in wanted and "proc" not in ground.missing,
            keep=keep,
        )
    _note_owner(ground, job, launch, account)
    return StepConfinement(group, cover)


def _denied_gpus(share: protocol.Confinement) -> List[device_filter.Device]:
    files = device_filter.gpu_files(share.gpu_files)
    return device_filter.denied(files, share.gpus) if files else []


def _deny(ground: Ground, job: str, devices: List[device_filter.Device]) -> None:
    tree, name = ground.tree, cgroup.JOB_PREFIX + job
    if tree.unified and not ground.no_filter:
        device_filter.deny_by_bpf(os.path.join(tree.unified, name), devices)
    elif "devices" in tree.controllers:
        device_filter.deny_by_controller(os.path.join(tree.controllers["devices"], name), devices)


def _note_owner(ground: Ground, job: str, launch: protocol.Launch, account: UserAccount) -> None:
    """Note whose job it is and where its groups are, for logins."""
    if not ground.owners:
        return
    path = os.path.join(ground.owners, job)
    groups = [os.path.join(root, cgroup.JOB_PREFIX + job) for root in ground.tree.roots()]
    groups = [group for group in groups if os.path.isdir(group)]
    new = "%s.%s%s" % (path, launch.step, NEW)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(new, "w") as file:
        json.dump(JobOwner(account.uid, launch.job_id, groups), file)
    os.replace(new, path)


def owners_directory(root: str) -> str:
    """Return the directory of the owners of an agent's jobs.

    `root` may be written in any way. The directory is in memory, because each job would cost a file on disk.
    """
    return os.path.join(OWNERS, os.path.realpath(root).replace("%", "%25").replace("/", "%2F"))


def owners(root: str) -> List[JobOwner]:
    """Return the jobs that have the node of this agent. Raises OSError."""
    found: List[JobOwner] = []
    directory = owners_directory(root)
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return found
    for name in [name for name in names if not name.endswith(NEW)]:
        try:
            with open(os.path.join(directory, name)) as file:
                found.append(JobOwner(*json.load(file)))
        except FileNotFoundError:
            pass  # over by now
    return [owner for owner in found if owner.groups]


def memory_left_mib(held: StepConfinement, mem_mib: int) -> int:
    """Return what is left of a memory limit when the job's tmpfs counts."""
    return max(1, mem_mib - mounts.used_mib(held.cover))


class JobRemains:
    """Takes away what jobs leave on this node: groups, logins and private directories."""

    def __init__(self, loop: Loop, ground: Ground) -> None:
        self._loop = loop
        self._ground = ground
        self._tidy_timer: Optional[Timer] = None
        self._going: Dict[str, None] = {}  # jobs with groups that are not empty yet
        self.delete: Callable[[str], None] = paths.remove_tree  # may take long

    def job_over(self, job: str) -> None:
        """Take away everything of a job that is over here."""
        ground = self._ground
        if ground.owners:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(ground.owners, job))
        if ground.tree.roots() and not cgroup.remove_job(ground.tree, job) and job not in self._going:
            self._going[job] = None
            self._loop.later(RETRY_S, lambda: self._again(job))
        gone = mounts.remove(ground.root, job) if ground.root else ""
        if gone:
            self.delete(gone)
        if self._tidy_timer is None:
            self._tidy_timer = self._loop.later(TIDY_S, self.tidy)

    def tidy(self) -> None:
        """Remove what jobs here share, if there are none: the next one makes it again."""
        self._tidy_timer = None
        if self._ground.tree.roots():
            cgroup.remove_unused(self._ground.tree)
        if self._ground.owners:
            with contextlib.suppress(OSError):  # not empty, or never made
                os.rmdir(self._ground.owners)
        if self._ground.root:
            mounts.end_if_unused(self._ground.root)

    def _again(self, job: str) -> None:
        del self._going[job]
        self.job_over(job)

    def sweep(self, live: Iterable[str]) -> None:
        """Take away what earlier agents have left of jobs that are not `live`."""
        kept = set(live)
        if self._ground.tree.roots():
            cgroup.remove_abandoned(self._ground.tree, time.time())
        for job in set(cgroup.jobs(self._ground.tree)) - kept:
            self.job_over(job)
        known = {*mounts.jobs(self._ground.root), *(_names(self._ground.owners) if self._ground.owners else ())}
        for name in known - kept:
            if name.startswith(mounts.GONE):
                self.delete(os.path.join(self._ground.root, mounts.TMPS, name))
            else:
                self.job_over(name)


def _names(path: str) -> List[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
