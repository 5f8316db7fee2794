"""Control groups of jobs: for killing, suspending and limiting what a job has on a node.

    <hierarchy>/hpcsched/<agent>/job-<number>/<step>

The groups of a job that is over serve the next one, because to make and remove them takes the kernel longer than to run a
short job; `hpcnode.shepherd.confinement` says which job has which. A job's group has the limits of its allocation on this node,
so all its steps, and logins that it adopted, share them. A step's group has the step's memory limit. Tasks are in their step's
group before they become the user; shepherds stay outside.

Rules:
- Version 2 is used wherever it is mounted: to kill and freeze a tree for certain. Its controllers limit if it has them;
  controllers that are in hierarchies of version 1 limit there. Both may be on one node (systemd's "hybrid").
- We stay below a group that a container or another manager gave us, except units of systemd, which end with the login that
  started the agent.
- A task is born in its group (clone3), because moving a process takes the kernel up to 20 ms. In version 1 the task writes
  to `tasks`, which moves one thread without that cost.
- Groups of jobs are created and removed under a lock that all agents of a user on the machine share, so no directory vanishes
  while another agent uses it. The lock is a file that others cannot open: who opens a file, even to read it, can lock it.
- The groups above those of jobs have the weight of the node's cpus: with that of one cpu, a job on each cpu of a large node
  would get next to nothing beside any other process of the node.
- A job has a group only where something is limited, and in version 2, because each costs the start of a job.
- What cannot be limited here is said by `Tree.missing`, and every other thing works.
- A job has no huge pages where the kernel does not count them as memory; programs then take usual ones.
- A BPF program of the job's group, or version 1's devices controller, keeps it from GPUs that it was not given. Every GPU of
  the node that is not the job's is denied; other devices are left alone. `gpu_files` of the configuration, or the NVIDIA
  driver, says which file is which GPU.

Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/, clone(2) CLONE_INTO_CGROUP, sched(7), cpuset(7), bpf(2),
linux/bpf.h (bpf_cgroup_dev_ctx).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import stat
import struct
import time
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from hpcnode.os import process

OURS = "hpcsched"
JOB_PREFIX = "job-"
FIRST_STEP = "first"  # the group of the first step of each job that uses these groups
LOGINS = "logins"  # the group of adopted ssh logins in a job's group
CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "io", "devices", "hugetlb")
_SYSTEMD = (".slice", ".scope", ".service")
_V1_NAMES = {"blkio": "io"}
_IO_WEIGHTS = {"/io.weight": 10_000, "/blkio.bfq.weight": 1000}  # file -> most
PERIOD_US = 100_000
MAX_WEIGHT = 10_000
HUGE_PAGES = "/sys/kernel/mm/hugepages"
COUNTED = "memory_hugetlb_accounting"  # an option of the mount of version 2
SOCKETS_PART = 16  # version 1 does not count buffers of sockets as memory: they have this part of the limit besides
MAX_ROUNDS = 100
READ_BYTES = 1 << 16
ABANDONED_S = 3600.0
_NOT_DELEGATED = "the agent is not root, and its cgroup is not delegated to it"
LOCK_FILE = "/run/hpcsched-groups.lock"  # of root's agents
ENTRY_S = 10.0  # from the making of a group until its first process


class JobLimits(NamedTuple):
    """What a job may use on this node, and one of its steps. 0: no limit."""

    cpus: int = 0
    pin: bool = False  # to cpus of its own, if enough are free
    mem_mib: int = 0
    step_mem_mib: int = 0
    processes: int = 0
    devices: bool = False  # whether devices will be denied


class Tree(NamedTuple):
    """The directories of an agent's groups."""

    unified: str = ""  # of version 2; "": not usable
    controllers: Dict[str, str] = {}  # controller -> directory, in either version
    missing: Dict[str, str] = {}  # controller -> why it is not usable
    lock: str = ""  # the file that is locked while groups are created or removed

    def roots(self) -> List[str]:
        """Return every directory that has groups of jobs, each once."""
        return list(dict.fromkeys(filter(None, (self.unified, *self.controllers.values()))))


class StepGroup(NamedTuple):
    """The groups of one step."""

    unified: str  # of version 2; "": none
    tasks: List[str]  # files of version 1 that a task writes itself to
    memory: str  # the group with the step's memory limit; "": memory is not limited
    paths: List[str]  # the step's own groups, which go with it; [] if its job keeps them
    processes: str = ""  # the group with the job's limit of processes; "": they are not limited


def find(agent: str) -> Tree:
    """Return the directories in which the agent of this name may make groups."""
    mounts, own = _mounts(), _own_groups()
    lock = LOCK_FILE if os.geteuid() == 0 else os.path.normpath(mounts.get("", "") + own.get("", "/")) + "/cgroup.kill"
    try:
        with _locked(lock):
            return _find(mounts, own, agent)._replace(lock=lock)
    except OSError as error:
        why = "cannot lock %s: %s" % (lock, error.strerror) if os.geteuid() == 0 else _NOT_DELEGATED
        return Tree(missing=dict.fromkeys(CONTROLLERS, why))


def _find(mounts: Dict[str, str], own: Dict[str, str], agent: str) -> Tree:
    unified, offered, why = _find_unified(mounts.get("", ""), own.get("", "/"), agent)
    found: Dict[str, str] = {}
    missing: Dict[str, str] = {}
    for name in CONTROLLERS:
        if name in mounts:
            path = _v1_base(mounts[name], own.get(name, "/"), agent)
            usable = _make_v1(path, name)
            why_not = "cannot make groups in %s" % mounts[name]
        else:
            path, usable = unified, name in offered
            why_not = why or "the kernel offers no controller %s to cgroups of version 2 here" % name
        if usable and name == "io" and not any(os.path.exists(path + weight) for weight in _IO_WEIGHTS):
            usable, why_not = False, "no disk scheduler here takes weights of jobs"
        if name == "hugetlb" and COUNTED in _read("/proc/self/mounts"):
            usable, why_not = False, ""
        if usable:
            found[name] = path
        elif why_not:
            missing[name] = why_not
        if name in mounts:
            _remove_base(path)
    if unified:
        _remove_base(unified)
    return Tree(unified, found, missing)


def _mounts() -> Dict[str, str]:
    """Return where controllers of version 1 are mounted; version 2 is named ""."""
    found: Dict[str, str] = {}
    for line in _read("/proc/self/mounts").splitlines():
        fields = line.split()
        path = fields[1].replace("\\040", " ")
        if fields[2] == "cgroup2":
            found.setdefault("", path)
        elif fields[2] == "cgroup":
            for option in fields[3].split(","):
                name = _V1_NAMES.get(option, option)
                if name in CONTROLLERS:
                    found.setdefault(name, path)
    return found


def _own_groups() -> Dict[str, str]:
    """Return this process's group in each hierarchy; version 2 is named ""."""
    found: Dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            found[_V1_NAMES.get(name, name)] = path
    return found


def _v1_base(mount: str, own: str, agent: str) -> str:
    parts = [part for part in own.split("/") if part]
    units = [index for index, part in enumerate(parts) if part.endswith(_SYSTEMD)]
    return os.path.join(mount, *parts[: units[0] if units else None], OURS, agent)


def _find_unified(mount: str, own: str, agent: str) -> Tuple[str, List[str], str]:
    """Make our directory of version 2.

    Return it and its controllers, or "" and why there is none.
    """
    if not mount:
        return "", [], "cgroup version 2 is not mounted"
    if os.geteuid() == 0:
        above = mount
    else:
        above = os.path.normpath(mount + own)
        if not os.access(above, os.W_OK) or not os.access(above + "/cgroup.procs", os.W_OK):
            return "", [], _NOT_DELEGATED
    base = os.path.join(above, OURS, agent)
    try:
        os.makedirs(base, exist_ok=True)
    except OSError as error:
        return "", [], "cannot make groups in %s: %s" % (above, error.strerror)
    usable = _can_use(base)
    _enable_below(base)
    offered = _read(base + "/cgroup.controllers").split()
    if usable:
        return base, offered, ""
    _remove_base(base)
    return "", [], "cannot enter groups in %s, or the kernel cannot kill them" % above


def _enable_below(base: str) -> None:
    """Let the groups of jobs below our directory of version 2 have controllers."""
    for path in (os.path.dirname(os.path.dirname(base)), os.path.dirname(base), base):
        _enable(path)


def _remove_base(base: str) -> None:
    """Remove our directory if no job has a group: an agent that is killed leaves nothing."""
    _rmdir(base)
    _rmdir(os.path.dirname(base))


def _enable(path: str, wanted: Sequence[str] = CONTROLLERS) -> None:
    """Let groups below `path` have controllers, one by one: each may be refused."""
    for name in _read(path + "/cgroup.controllers").split():
        if name in wanted:
            _write(path + "/cgroup.subtree_control", "+" + name)


def _can_use(base: str) -> bool:
    """Return whether a child can enter a group there, and the kernel can kill groups."""
    path = os.path.join(base, "try-%d" % os.getpid())
    try:
        os.mkdir(path)
    except OSError:
        return False
    child = os.fork()
    if child == 0:
        os._exit(0 if _write(path + "/cgroup.procs", "0") else 1)
    entered = os.waitpid(child, 0)[1] == 0
    usable = entered and os.path.exists(path + "/cgroup.kill")
    os.rmdir(path)
    return usable


def _make_v1(path: str, controller: str) -> bool:
    """Make a group of version 1 and those above it; return whether it can be used."""
    if not os.path.isdir(path):
        if not _make_v1(os.path.dirname(path), controller):
            return False
        try:
            os.mkdir(path)
        except FileExistsError:
            pass  # another agent made it
        except OSError:
            return False
    if controller == "cpuset":  # a new group has no cpus and no memory, and nothing can enter it
        for name in ("/cpuset.mems", "/cpuset.cpus"):
            if not _read(path + name).strip():
                _write(path + name, _read(os.path.dirname(path) + name).strip())
    return os.access(path, os.W_OK)


# ----- the groups of a job and of its steps


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Lock the groups of this user's agents; root's lock is the file of pinned cpus, too."""
    how = os.O_CREAT | os.O_RDWR if path == LOCK_FILE else os.O_WRONLY
    fd = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def controllers_for(tree: Tree, limits: JobLimits) -> Tuple[str, ...]:
    """Return the controllers that a job with these limits needs."""
    wanted = {
        "cpu": limits.cpus > 0,
        "io": limits.cpus > 0,
        "cpuset": limits.pin and limits.cpus > 0,
        "memory": limits.mem_mib > 0 or limits.step_mem_mib > 0,
        "pids": limits.processes > 0,
        "devices": limits.devices,
        "hugetlb": limits.mem_mib > 0,
    }
    found = tuple(name for name in tree.controllers if wanted[name])
    return found or (() if tree.unified else tuple(tree.controllers)[:1])  # one, to find the job's processes


def _roots_with(tree: Tree, controllers: Iterable[str]) -> Iterator[Tuple[str, List[str], bool]]:
    """Yield the roots where a job has a group.

    Each with the job's controllers there, and whether it is version 2.
    """
    for root in tree.roots():
        here = [name for name in controllers if tree.controllers[name] == root]
        if here or root == tree.unified:
            yield root, here, root == tree.unified


def make_job(tree: Tree, job: str, controllers: Sequence[str], limits: JobLimits) -> None:
    """Make the groups of a job, with its limits, and those of its first step.

    Raises OSError if a group or a limit that this node can have is refused.
    """
    with _locked(tree.lock):
        for root, here, version_2 in _roots_with(tree, controllers):
            _make_base(root, here, version_2)
            _make(os.path.join(root, JOB_PREFIX + job), here, version_2)
    limit_job(tree, job, controllers, JobLimits(), limits)
    make_step(tree, job, FIRST_STEP, controllers, limits.step_mem_mib)


def limit_job(tree: Tree, job: str, controllers: Iterable[str], had: JobLimits, limits: JobLimits) -> None:
    """Change the limits of a job's groups from what they `had`. Raises OSError."""
    for name in controllers:
        root = tree.controllers[name]
        group, version_2 = os.path.join(root, JOB_PREFIX + job), root == tree.unified
        if name == "memory" and limits.mem_mib != had.mem_mib:
            _limit_memory(group, limits.mem_mib, version_2)
        elif name == "pids" and limits.processes != had.processes:
            _must_write(group + "/pids.max", str(limits.processes))
        elif name == "cpu" and limits.cpus != had.cpus:
            _limit_cpu(group, limits.cpus, version_2)
        elif name == "io" and limits.cpus != had.cpus:
            for file in _IO_WEIGHTS:
                _write(group + file, str(min(_IO_WEIGHTS[file], 100 * limits.cpus)))
        elif name == "hugetlb" and had.mem_mib == 0:
            _deny_huge_pages(group, version_2)


def make_step(tree: Tree, job: str, step: str, controllers: Sequence[str], mem_mib: int) -> StepGroup:
    """Make the groups of a step below those of its job. Raises OSError."""
    paths: List[str] = []
    for root, here, version_2 in _roots_with(tree, controllers):
        if version_2 or "memory" in here:
            paths.append(os.path.join(root, JOB_PREFIX + job, step))
            _make(paths[-1], [] if version_2 else here, version_2=False)
    group = step_group(tree, job, step, controllers)._replace(paths=paths)
    if mem_mib <= 0:
        return group._replace(memory="")
    if group.memory:
        _limit_memory(group.memory, mem_mib, tree.controllers["memory"] == tree.unified)
    return group


def step_group(tree: Tree, job: str, step: str, controllers: Sequence[str]) -> StepGroup:
    """Return the groups of a step with a memory limit that exist already. Its job keeps them."""
    unified, memory, processes = "", "", ""
    tasks: List[str] = []
    for root, here, version_2 in _roots_with(tree, controllers):
        own = os.path.join(root, JOB_PREFIX + job)
        if "pids" in here:
            processes = own
        if version_2 or "memory" in here:
            own = os.path.join(own, step)
        if version_2:
            unified = own
        else:
            tasks.append(own + "/tasks")
        if "memory" in here:
            memory = own
    return StepGroup(unified, tasks, memory, [], processes)


def groups_of(tree: Tree, job: str, controllers: Iterable[str]) -> List[str]:
    """Return the groups of a job."""
    return [os.path.join(root, JOB_PREFIX + job) for root, _, _ in _roots_with(tree, controllers)]


def controllers_of(tree: Tree, job: str) -> Tuple[str, ...]:
    """Return the controllers that a job's groups have."""
    return tuple(name for name, root in tree.controllers.items() if os.path.isdir(os.path.join(root, JOB_PREFIX + job)))


def limit_step(tree: Tree, job: str, step: str, mem_mib: int) -> None:
    """Change the memory limit of a step, which has the memory controller. Raises OSError."""
    root = tree.controllers["memory"]
    _limit_memory(os.path.join(root, JOB_PREFIX + job, step), mem_mib, root == tree.unified)


def _make_base(base: str, controllers: Iterable[str], version_2: bool) -> None:
    if os.path.isdir(base):
        return
    if version_2:
        os.makedirs(base, exist_ok=True)
        _enable_below(base)
    else:
        _make_v1(base, "cpuset" if "cpuset" in controllers else "")
    for path in (os.path.dirname(base), base):
        _weigh(path, os.cpu_count() or 1, version_2)


def _weigh(group: str, cpus: int, version_2: bool) -> None:
    """Give a group the weight of so many cpus; not every hierarchy has weights."""
    if version_2:
        _write(group + "/cpu.weight", str(min(MAX_WEIGHT, 100 * cpus)))
    else:
        _write(group + "/cpu.shares", str(1024 * cpus))


def _make(path: str, controllers: Iterable[str], version_2: bool) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        pass
    if version_2:
        _enable(path, ["memory"])  # all other limits are on the job's group
    elif "cpuset" in controllers:
        _make_v1(path, "cpuset")


def _limit_cpu(group: str, cpus: int, version_2: bool) -> None:
    quota = cpus * PERIOD_US
    if version_2:
        _must_write(group + "/cpu.max", "%d %d" % (quota, PERIOD_US))
    else:
        _must_write(group + "/cpu.cfs_period_us", str(PERIOD_US))
        _must_write(group + "/cpu.cfs_quota_us", str(quota))
    _weigh(group, cpus, version_2)


def _limit_memory(group: str, mem_mib: int, version_2: bool) -> None:
    """Limit memory, and memory with swap to the same. 0: no limit."""
    if version_2:
        _must_write(group + "/memory.max", str(mem_mib << 20) if mem_mib else "max")
        _write(group + "/memory.swap.max", "0")  # a kernel without swap lacks the file
        return
    limit, total = str(mem_mib << 20) if mem_mib else "-1", group + "/memory.memsw.limit_in_bytes"
    if not mem_mib or _number(total) < mem_mib << 20:  # it never may be below the other
        _write(total, limit)
    _must_write(group + "/memory.limit_in_bytes", limit)
    _write(total, limit)
    _write(group + "/memory.kmem.tcp.limit_in_bytes", str((mem_mib << 20) // SOCKETS_PART) if mem_mib else "-1")


def _deny_huge_pages(group: str, version_2: bool) -> None:
    limit = "max" if version_2 else "limit_in_bytes"
    for size in _huge_page_sizes():
        if not _write("%s/hugetlb.%s.rsvd.%s" % (group, size, limit), "0"):  # a kernel before 5.7
            _must_write("%s/hugetlb.%s.%s" % (group, size, limit), "0")


@functools.lru_cache(maxsize=1)
def _huge_page_sizes() -> List[str]:
    """Return the sizes of huge pages, as in the names of control files: 2MB."""
    sizes_kib = [int(name[len("hugepages-") : -len("kB")]) for name in _children(HUGE_PAGES)]  # int: the kernel's
    return [
        "%dGB" % (kib >> 20) if kib >> 20 else "%dMB" % (kib >> 10) if kib >> 10 else "%dKB" % kib for kib in sizes_kib
    ]


def has_huge_pages() -> bool:
    """Return whether this node has huge pages, or makes some when programs ask for them."""
    files = ("nr_hugepages", "nr_overcommit_hugepages")
    return any(_number(os.path.join(HUGE_PAGES, size, name)) for size in _children(HUGE_PAGES) for name in files)


def memory_bytes(tree: Tree, job: str) -> int:
    """Return what is still charged to a job's group, 0 if its memory is not counted."""
    if "memory" not in tree.controllers:
        return 0
    group = os.path.join(tree.controllers["memory"], JOB_PREFIX + job)
    return _number(group + "/memory.current") or _number(group + "/memory.usage_in_bytes")


# ----- cpus of a job's own


def usable_cpus(tree: Tree) -> Set[int]:
    """Return the cpus that jobs may be pinned to.

    Read each time: cpus of the machine, and of the group above ours, come and go.
    """
    base = tree.controllers["cpuset"]
    for path in (os.path.dirname(base), base):  # version 1 gives a group no cpus that the one above it has got later
        cpus = _read(os.path.dirname(path) + "/cpuset.cpus")
        if os.path.exists(path + "/cpuset.effective_cpus") and _read(path + "/cpuset.cpus") != cpus:
            _write(path + "/cpuset.cpus", cpus.strip())
    while not os.path.isdir(base):  # not made yet: those of the group above
        base = os.path.dirname(base)
    return cpu_list(_read(base + "/cpuset.cpus.effective") or _read(base + "/cpuset.effective_cpus"))


def pin(tree: Tree, job: str, count: int, own: Set[int]) -> Set[int]:
    """Give the job cpus that no other job has, and return them; none if too few are free.

    Whole cores come first. `own`: those of this agent's other jobs. Those of root's other agents are in the file that is locked.
    """
    usable = usable_cpus(tree)
    path = os.path.join(tree.controllers["cpuset"], JOB_PREFIX + job)
    with _locked(tree.lock) as fd:
        pinned = _read_pins(fd) if tree.lock == LOCK_FILE else {}
        others = {cpu for cpu, group in pinned.items() if not _is_below(group, tree) and _is_used(group)}
        free = sorted(usable - own - others, key=lambda cpu: (_core(cpu), cpu))[:count]
        if len(free) < count:
            return set()
        _must_write(path + "/cpuset.cpus", ",".join(map(str, free)))
        os.utime(path)  # it has no process yet, see `_is_used`
        if tree.lock == LOCK_FILE:
            kept = {cpu: group for cpu, group in pinned.items() if group != path and cpu in own | others}
            _write_pins(fd, {**kept, **dict.fromkeys(free, path)})
    return set(free)


def unpin(tree: Tree, job: str) -> None:
    """Let the job, which has no process, have all cpus again. Raises OSError."""
    path = os.path.join(tree.controllers["cpuset"], JOB_PREFIX + job)
    _must_write(path + "/cpuset.cpus", ",".join(map(str, sorted(usable_cpus(tree)))))


def pinned_to(tree: Tree, job: str) -> Set[int]:
    """Return the cpus of the job's own."""
    if "cpuset" not in tree.controllers:
        return set()
    cpus = cpu_list(_read(os.path.join(tree.controllers["cpuset"], JOB_PREFIX + job, "cpuset.cpus")))
    return cpus if cpus < usable_cpus(tree) else set()


def _is_below(group: str, tree: Tree) -> bool:
    return group.startswith(tree.controllers["cpuset"] + "/")


def _read_pins(fd: int) -> Dict[int, str]:
    """Return which group has which cpu: a line for each cpu."""
    lines = os.fsdecode(os.pread(fd, READ_BYTES, 0)).splitlines()
    words = [line.split(" ", 1) for line in lines]
    return {int(pair[0]): pair[1] for pair in words if len(pair) == 2 and pair[0].isdigit()}  # int: written by root


def _write_pins(fd: int, pins: Dict[int, str]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, os.fsencode("".join("%d %s\n" % pair for pair in sorted(pins.items()))), 0)


def _is_used(path: str) -> bool:
    """Return whether a job's group has processes, or is so new that they are about to enter."""
    return os.path.isdir(path) and (is_populated(path) or time.time() - os.stat(path).st_mtime < ENTRY_S)


def _core(cpu: int) -> int:
    siblings = cpu_list(_read("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list" % cpu))
    return min(siblings, default=cpu)


def cpu_list(text: str) -> Set[int]:
    """Return the cpus of a list as the kernel writes it: "0-3,8"."""
    found: Set[int] = set()
    for item in text.strip().split(","):
        first, _, last = item.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))  # int: the kernel's
    return found


# ----- entering


def fork_into(group: Optional[StepGroup], exit_signal: int = signal.SIGCHLD, flags: int = 0) -> Tuple[int, bool]:
    """Fork as `process.clone` does, if possible into the group of version 2.

    Return the child's pid, and whether it was born in the group. Raises OSError. The child must call `enter` then.
    """
    if group is not None and group.unified:
        fd = os.open(group.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return process.clone(exit_signal, flags | process.CLONE_INTO_CGROUP, fd), True
        except OSError:
            pass  # a kernel before 5.7
        finally:
            os.close(fd)
    return process.clone(exit_signal, flags), False


def enter(group: StepGroup, is_in_unified: bool) -> None:
    """Move this process, which must have one thread, into the groups. Raises OSError."""
    if group.unified and not is_in_unified:
        _must_write(group.unified + "/cgroup.procs", "0")
    for path in group.tasks:
        _must_write(path, "0")


def adopt(tree_paths: Iterable[str], pid: int) -> bool:
    """Move another process into the groups of logins of a job; return whether all took it."""
    moved = []
    for group in tree_paths:
        own = os.path.join(group, LOGINS)
        try:
            os.mkdir(own)
        except FileExistsError:
            pass
        except OSError:
            return False
        _make(own, ["cpuset"] if os.path.exists(own + "/cpuset.cpus") else [], version_2=False)
        moved.append(_write(own + "/cgroup.procs", str(pid)))
    return bool(moved) and all(moved)


# ----- memory, killing, freezing, removing


def memory_kills(path: str) -> int:
    """Return how many processes of the group the kernel has killed for memory."""
    for line in (_read(path + "/memory.events") or _read(path + "/memory.oom_control")).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)  # int: the kernel's
    return 0


def failed_forks(path: str) -> int:
    """Return how many forks in the group the kernel has refused at its limit of processes."""
    name, _, count = _read(path + "/pids.events").partition("\n")[0].partition(" ")
    return int(count) if name == "max" else 0  # int: the kernel's


def kill(path: str) -> None:
    """Kill all processes of the group of version 2, including those that fork meanwhile."""
    _write(path + "/cgroup.kill", "1")


def freeze(path: str, on: bool) -> bool:
    """Freeze or thaw all processes of a group of version 2; return whether that worked."""
    return _write(path + "/cgroup.freeze", "1" if on else "0")


def is_populated(path: str) -> bool:
    """Return whether the group, or a group below it, has living processes."""
    events = _read(path + "/cgroup.events")
    if events:
        return "populated 1" in events
    below = (is_populated(os.path.join(path, name)) for name in _children(path))
    return bool(_read(path + "/cgroup.procs")) or any(below)


def remove_step(group: StepGroup) -> None:
    """Remove the groups of a step without processes, unless its job keeps them."""
    for path in group.paths:
        remove(path)


def is_empty(tree: Tree, job: str, controllers: Iterable[str]) -> bool:
    """Return whether no process is left in the groups of a job."""
    root = tree.unified or next((tree.controllers[name] for name in controllers), "")
    return not root or not is_populated(os.path.join(root, JOB_PREFIX + job))


def remove_job(tree: Tree, job: str) -> bool:
    """Kill what a job has left, logins too, and remove its groups; return whether all went."""
    with _locked(tree.lock):
        left = [_remove_job(tree, root, job) for root in tree.roots()]
    return not any(left)


def _remove_job(tree: Tree, root: str, job: str) -> bool:
    """Remove a job's group in one hierarchy; return whether it is still there."""
    path = os.path.join(root, JOB_PREFIX + job)
    if not os.path.isdir(path):
        return False
    if root == tree.unified:
        kill(path)
    elif not tree.unified:
        _kill_one_by_one(path)
    remove(path)
    return os.path.isdir(path)


def _kill_one_by_one(path: str) -> None:
    for _ in range(MAX_ROUNDS):
        pids = [pid for group in (path, *_below(path)) for pid in _read(group + "/cgroup.procs").split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)  # int: the kernel's


def _below(path: str) -> List[str]:
    found = [os.path.join(path, name) for name in _children(path)]
    return found + [each for group in found for each in _below(group)]


def jobs(tree: Tree) -> Set[str]:
    """Return the names of all groups of jobs of this agent."""
    names = {name for root in tree.roots() for name in _children(root)}
    return {name[len(JOB_PREFIX) :] for name in names if name.startswith(JOB_PREFIX)}


def remove_unused(tree: Tree) -> None:
    """Remove the agent's own directories, if no job has a group there."""
    with _locked(tree.lock):
        for root in tree.roots():
            _remove_base(root)


def remove_abandoned(tree: Tree, now_s: float) -> None:
    """Remove old empty groups of agents that were killed and never came back."""
    with _locked(tree.lock):
        for root in tree.roots():
            above = os.path.dirname(root)
            for agent in _children(above):
                path = os.path.join(above, agent)
                with contextlib.suppress(FileNotFoundError):  # another manager of groups may remove it
                    if now_s - os.stat(path).st_mtime > ABANDONED_S and not is_populated(path):
                        remove(path)


def remove(path: str) -> None:
    """Remove the group, and groups that a job made below it, if they are empty."""
    for name in _children(path):
        remove(os.path.join(path, name))
    _rmdir(path)


def _rmdir(path: str) -> None:
    with contextlib.suppress(OSError):  # gone, or not empty yet: the agent tries again
        os.rmdir(path)


def _children(path: str) -> List[str]:
    try:
        return [item.name for item in os.scandir(path) if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _number(path: str) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else 0  # int: the kernel's


def _read(path: str) -> str:
    """Return a file of the kernel, or "".

    A stream of Python's costs four times as much, many times for each job.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    parts: List[bytes] = []
    try:
        while not parts or parts[-1]:
            parts.append(os.read(fd, READ_BYTES))
    except OSError:
        return ""
    finally:
        os.close(fd)
    return os.fsdecode(b"".join(parts))


def _must_write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _write(path: str, text: str) -> bool:
    """Write to an existing control file; return whether the kernel accepted it."""
    try:
        _must_write(path, text)
        return True
    except OSError:
        return False


NVIDIA = "/proc/driver/nvidia/gpus"
SYS_BPF = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
PROG_LOAD, PROG_ATTACH, PROG_QUERY = 5, 8, 16
PROG_TYPE_CGROUP_DEVICE, ATTACH_DEVICE = 15, 6
ALLOW_MULTI = 2
CHARACTER = 2
_LOAD, _AND, _JUMP_UNLESS, _SET, _EXIT = 0x61, 0x54, 0x55, 0xB7, 0x95
ATTR_BYTES = 128

Device = Tuple[int, int]  # major, minor


def gpu_files(configured: Sequence[str]) -> List[str]:
    """Return the device file of each GPU by index; [] if they are not known."""
    if configured:
        return list(configured)
    try:
        folders = sorted(os.listdir(NVIDIA))  # by PCI address, as nvidia-smi numbers them
    except OSError:
        return []
    return ["/dev/nvidia%s" % _minor(os.path.join(NVIDIA, folder, "information")) for folder in folders]


def _minor(path: str) -> str:
    with open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "Device Minor":
                return value.strip()
    raise OSError("cannot read the device minor in %s" % path)


def denied(files: Sequence[str], given: Iterable[int]) -> List[Device]:
    """Return the devices of the GPUs that are not given. Raises OSError."""
    allowed = set(given)
    mine = {_device(path) for index, path in enumerate(files) if index in allowed}
    others = [_device(path) for index, path in enumerate(files) if index not in allowed]
    return [device for device in dict.fromkeys(others) if device not in mine]


def _device(path: str) -> Device:
    info = os.stat(path)
    if not stat.S_ISCHR(info.st_mode):
        raise OSError("cannot keep jobs from the GPU %s: it is not a character device" % path)
    return os.major(info.st_rdev), os.minor(info.st_rdev)


# ----- BPF


def program(devices: Iterable[Device]) -> bytes:
    """Return a BPF program that denies these character devices, and allows everything else."""
    code = [_instruction(_LOAD, 2, 1, 0, 0), _instruction(_AND, 2, 0, 0, 0xFFFF)]
    code += [_instruction(_LOAD, 3, 1, 4, 0), _instruction(_LOAD, 4, 1, 8, 0)]
    for major, minor in devices:
        code += [_instruction(_JUMP_UNLESS, 2, 0, 4, CHARACTER), _instruction(_JUMP_UNLESS, 3, 0, 3, major)]
        code += [_instruction(_JUMP_UNLESS, 4, 0, 2, minor), _instruction(_SET, 0, 0, 0, 0), _instruction(_EXIT)]
    code += [_instruction(_SET, 0, 0, 0, 1), _instruction(_EXIT)]
    return b"".join(code)


def _instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | to, offset, value)


def _bpf(command: int, attr: bytes) -> Tuple[int, bytes]:
    number = SYS_BPF.get(os.uname().machine)
    if number is None:
        raise OSError("bpf is not known on %s" % os.uname().machine)
    buffer = ctypes.create_string_buffer(attr.ljust(ATTR_BYTES, b"\0"), ATTR_BYTES)
    result = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, ATTR_BYTES)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "bpf: %s" % os.strerror(code))
    return result, buffer.raw


def _load(code: bytes) -> int:
    words = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = struct.pack(
        "=IIQQ", PROG_TYPE_CGROUP_DEVICE, len(code) // 8, ctypes.addressof(words), ctypes.addressof(licence)
    )
    return _bpf(PROG_LOAD, attr)[0]


def why_no_bpf() -> str:
    """Return why this process cannot load such a program, "" if it can."""
    try:
        os.close(_load(program([])))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def deny_by_bpf(group: str, devices: Sequence[Device]) -> None:
    """Deny the devices to a group of version 2, once. Raises OSError."""
    fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        answer = _bpf(PROG_QUERY, struct.pack("=IIIIQI", fd, ATTACH_DEVICE, 0, 0, 0, 0))[1]
        if struct.unpack_from("=I", answer, 24)[0] > 0:
            return  # by an earlier step of the job
        loaded = _load(program(devices))
        try:
            _bpf(PROG_ATTACH, struct.pack("=IIII", fd, loaded, ATTACH_DEVICE, ALLOW_MULTI))
        finally:
            os.close(loaded)
    finally:
        os.close(fd)


# ----- version 1


def deny_by_controller(group: str, devices: Iterable[Device]) -> None:
    """Deny the devices to a group of the devices controller. Raises OSError."""
    for major, minor in devices:
        fd = os.open(group + "/devices.deny", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"c %d:%d rwm" % (major, minor))
        finally:
            os.close(fd)
