"""The processes below a shepherd: kill, suspend, resume, and measure them.

It does not know what the processes are for, nor why they are suspended or killed.

Rules:
- The shepherd is their subreaper, so "no child is left" means that the tree is empty, detached processes included. Its forker
  (see `task`) is no part of the tree.
- A suspended tree is frozen through its cgroup, if the shepherd has one: processes cannot notice that, and no signal wakes
  them. Without a cgroup they get SIGSTOP and SIGCONT. The shepherd itself is never stopped.
- A tree with a cgroup is killed through it: the kernel does that at once, and nothing forks away. To look for thousands of
  processes of a fork bomb takes longer than it takes the bomb to make others.
- A killed process that a process outside of the tree traces stays a zombie until its tracer looks: it counts as gone.
- A stopped tree can be killed, but must be resumed before it can end on SIGTERM.
- Pages that processes share count once for each process, as in Slurm. The memory limit asks for the exact share (Pss) before
  it kills, because that is more expensive.

Sources: prctl(2) PR_SET_CHILD_SUBREAPER, wait4(2), getrusage(2), signal(7), proc(5); Documentation/admin-guide/cgroup-v2.rst
(cgroup.freeze); scontrol(1) suspend; Slurm's jobacct_gather/linux, which counts rchar and wchar too.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from hpcnode.os import cgroup, process
from hpcnode.os.loop import Loop, Timer
from hpcnode.os.process import boot_clock_s

MEMORY_WATCH_S = 1.0  # between looks at the memory of a tree that no cgroup limits
FIRST_LOOK_S = 0.25  # between looks at the memory that a step uses; doubled each time
LAST_LOOK_S = 5.0
BOMB_FORKS, BOMB_FORKS_PER_S = 100, 50  # a program that tries again after a pause has fewer failed forks


class ProcessTree:
    """The tree below this process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._terminated: Set[int] = set()  # pids that were sent SIGTERM
        self._tasks: Set[int] = set()
        self._kill_rounds = 0
        self.group = ""  # a cgroup that has all the processes; "": none
        self.is_empty = False  # it had processes, and has none any more
        self.on_killed: Callable[[], None] = lambda: None  # for what sends no SIGCHLD, because it is traced

    def add_task(self, pid: int) -> None:
        """Note a child that is not counted as one by the kernel before it executes a program."""
        self._tasks.add(pid)

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL was sent to the tree."""
        return self._kill_rounds > 0

    def terminate(self) -> None:
        """Send SIGTERM to the whole tree, once."""
        if not self._terminated:
            self._terminate(process.descendants([os.getpid()]))

    def terminate_orphans(self) -> None:
        """Send SIGTERM to orphans that were forked during `terminate`."""
        if self._terminated:
            self._terminate(
                {
                    pid: stat.ticks
                    for pid in process.children_of(os.getpid())
                    if pid not in self._terminated and (stat := process.read_stat(pid)) is not None
                }
            )

    def _terminate(self, processes: Mapping[int, int]) -> None:
        self._terminated.update(processes)
        process.signal_all(processes, signal.SIGTERM)
        process.signal_all(processes, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the whole tree, repeatedly until it is empty."""
        if self.is_empty:
            return
        if self.group:
            cgroup.kill(self.group)
        if not self.group or (self._kill_rounds > 0 and not cgroup.is_populated(self.group)):
            self._kill_one_by_one()  # with a group: what root has moved out of it
        self._kill_rounds += 1
        self._loop.later(min(1.0, 0.01 * 2**self._kill_rounds), self.kill)
        if self._kill_rounds > 1:
            self.on_killed()

    def _kill_one_by_one(self) -> None:
        if self._kill_rounds > 0:
            process.stop_all_below(os.getpid())  # so that nothing forks away from the kill
        process.signal_all(process.descendants([os.getpid()]), signal.SIGKILL)

    def reap(self) -> Iterator[Tuple[int, int, resource.struct_rusage]]:
        """Collect ended children; yield (pid, wait status, usage) of each."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | process.ANY_CHILD)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if not process.end_apart(pid):
                self._tasks.discard(pid)
                yield pid, status, usage
        self.is_empty = not self._tasks and not process.has_usual_child()
        if not self.is_empty and self.was_killed:
            self.is_empty = self._is_traced_and_dead()

    def _is_traced_and_dead(self) -> bool:
        """Return whether all that is left are zombies that others trace."""
        if self.group and cgroup.is_populated(self.group):
            return False
        left = process.children_of(os.getpid())
        return bool(left) and all(process.is_traced_zombie(pid) for pid in left)


def exceeds(root_pid: int, mem_mib: int) -> bool:
    """Return whether the processes below `root_pid` together hold more than `mem_mib`."""
    limit_kib = mem_mib << 10
    page_kib = resource.getpagesize() >> 10
    pids = process.quick_descendants(root_pid)
    stats = (process.read_stat(pid) for pid in pids)
    if sum(stat.rss_pages * page_kib for stat in stats if stat is not None) <= limit_kib:
        return False
    return sum(process.proportional_memory_kib(pid) for pid in pids) > limit_kib


class ForkBomb:
    """Finds out that a job forks without pause at its limit of processes.

    The kernel copies an address space before it refuses a fork. The processes of a bomb hold the locks of shared libraries
    meanwhile, and wait for their turn on the job's cpus: other jobs of the node can hardly start a program.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._look()

    def _look(self) -> None:
        self._at_s, self._failed = boot_clock_s(), cgroup.failed_forks(self._group)

    def failed(self) -> int:
        """Return how many forks failed since the last call; 0 if that is not many."""
        at_s, failed = self._at_s, self._failed
        self._look()
        more = self._failed - failed
        return more if more >= max(BOMB_FORKS, BOMB_FORKS_PER_S * (self._at_s - at_s)) else 0


class Suspension:
    """Suspends and resumes the tree, and counts how long it has run.

    Alarms ring after a run time, not a wall time.
    """

    def __init__(self, loop: Loop, on: bool) -> None:
        self.on = on  # true from the start: nothing runs yet, and the caller releases nothing
        self._loop = loop
        self.group = ""  # a cgroup that has all the processes; "": none
        self._frozen = False  # by the kernel, not by SIGSTOP
        self._ran_s: Optional[float] = None  # until the last suspension; None: the tasks are not released
        self._since_s: Optional[float] = None  # running since; None: not running
        self._alarms: List[Tuple[float, Callable[[], None]]] = []  # run time, call
        self._timers: List[Timer] = []

    def begin(self) -> None:
        """Count run time from now on: the tasks have been released."""
        self._ran_s, self._since_s = 0.0, boot_clock_s()

    def after_run(self, run_s: float, call: Callable[[], None]) -> None:
        """Call once when the step has run for `run_s`; suspended time does not count."""
        self._alarms.append((run_s, call))
        if self._since_s is not None:
            self._set_alarm(run_s, call)

    def cancel_alarms(self) -> None:
        """Drop all alarms of `after_run`."""
        self._cancel()
        self._alarms.clear()

    def stop(self) -> None:
        """Suspend all processes below this one, including those that fork meanwhile."""
        if self.on:
            return
        self.on = True
        if self._ran_s is not None and self._since_s is not None:
            self._ran_s += boot_clock_s() - self._since_s
            self._since_s = None
        self._cancel()
        self._frozen = self.group != "" and cgroup.freeze(self.group, on=True)
        if not self._frozen:
            process.stop_all_below(os.getpid())

    def resume(self) -> None:
        """Resume what `stop` suspended."""
        if not self.on:
            return
        self.on = False
        if self._frozen:
            cgroup.freeze(self.group, on=False)
        else:
            process.signal_all(process.descendants([os.getpid()]), signal.SIGCONT)
        if self._ran_s is not None:
            self._since_s = boot_clock_s()
        for run_s, call in self._alarms:
            self._set_alarm(run_s, call)

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _set_alarm(self, run_s: float, call: Callable[[], None]) -> None:
        def ring() -> None:
            self._alarms.remove((run_s, call))
            call()

        ran_s = (self._ran_s or 0.0) + (boot_clock_s() - self._since_s if self._since_s is not None else 0.0)
        self._timers.append(self._loop.later(max(0.0, run_s - ran_s), ring))


class Usage:
    """Processor time, memory, and bytes read and written by all processes below.

    Processor time comes from wait4 of each ended child. The kernel adds up the bytes likewise (/proc/self/io, less the
    shepherd's own). Memory is that of one task with all processes below it: the highest sum of resident pages seen, or of a
    single process, which the kernel remembers to the page.
    """

    def __init__(self) -> None:
        self.user_s = 0.0
        self.system_s = 0.0
        self.max_rss_kib = 0
        self._look_s = FIRST_LOOK_S
        self._moved = _moved_below()

    def add(self, usage: resource.struct_rusage) -> None:
        """Add the usage of a child that has ended."""
        self.user_s += usage.ru_utime
        self.system_s += usage.ru_stime
        self.max_rss_kib = max(self.max_rss_kib, usage.ru_maxrss)

    def look(self, roots: Iterable[int]) -> float:
        """Measure the memory of each of `roots` with all below it.

        Return seconds until the next look.
        """
        page_kib = resource.getpagesize() >> 10
        for root in roots:
            stats = [process.read_stat(pid) for pid in (root, *process.quick_descendants(root))]
            self.max_rss_kib = max(
                self.max_rss_kib, sum(stat.rss_pages * page_kib for stat in stats if stat is not None)
            )
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        return self._look_s

    def as_dict(self) -> Dict[str, float]:
        """Return the `usage` of a report."""
        found = {
            "cpu_user_s": self.user_s,
            "cpu_system_s": self.system_s,
            "max_rss_kib": float(self.max_rss_kib),
        }
        moved = _moved_below()
        if moved is not None and self._moved is not None:
            found["disk_read_bytes"] = float(moved[0] - self._moved[0])
            found["disk_write_bytes"] = float(moved[1] - self._moved[1])
        return found


def _moved_below() -> Optional[Tuple[int, int]]:
    """Return bytes read and written by ended processes below.

    None if the kernel does not count them.
    """
    whole, own = _moved("/proc/self/io"), _moved("/proc/self/task/%d/io" % os.getpid())
    return None if whole is None or own is None else (whole[0] - own[0], whole[1] - own[1])


def _moved(path: str) -> Optional[Tuple[int, int]]:
    """Return rchar and wchar, the first two lines of an io file of proc(5)."""
    try:
        words = process.read_file(path).split(None, 4)
    except OSError:
        return None
    return int(words[1]), int(words[3])  # int: the kernel's
