"""The shepherd: minds one step on one node, and outlives the agent, the connection and the controller.

    prepare -> tasks forked, each stopped on a pipe -> who they are is durable -> released -> all over -> end durable -> told

Rules:
- Nothing is released before `started` is on disk; nothing is told before it is on disk.
- It is the subreaper of all that starts below (see `tree`).
- When the tasks are over, what they left behind is killed at once; if an end was asked for, after its grace.
- The agent may go and come: then it listens in its spool entry until the next one connects.
- A step with a lease is ended here when that runs out, whether there is an agent or not.

It does not know the controller, nor other steps. Sources: unix(7).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from hpcnode.lease import LOOK_S, StepLease
from hpcnode.os import cgroup, process, rlimits
from hpcnode.os.loop import READ, Loop, Timer
from hpcnode.os.process import boot_clock_s
from hpcnode.shepherd import environment
from hpcnode.shepherd import task as task_files
from hpcnode.shepherd.assignment import Assignment, Own, Setting, Task
from hpcnode.shepherd.relay import Relay
from hpcnode.shepherd.streams import untaken_limit
from hpcnode.shepherd.task import READY, TaskPlan, run_task
from hpcnode.wire import protocol

# ----- all processes below this one, which is their subreaper: told to end, killed until none is left, collected
# *No child is left* means that the tree is empty, whoever detached. It does not know what the processes are for.
# Sources: prctl(2) PR_SET_CHILD_SUBREAPER, wait(2).


class Tree:
    """The tree below this process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._told: Set[int] = set()  # who got TERM
        self._kill_rounds = 0
        self.is_empty = False  # it had processes, and has none any more

    def terminate(self) -> None:
        """Send TERM to all of it."""
        self._terminate(process.descendants([os.getpid()]))

    def terminate_orphans(self) -> None:
        """Send TERM to what was forked while the tree was told to end, and whose parent has ended since: it missed it."""
        if self._told:
            self._terminate([pid for pid in process.children_of(os.getpid()) if pid not in self._told])

    def _terminate(self, pids: List[int]) -> None:
        self._told.update(pids)
        process.signal_all(pids, signal.SIGTERM)
        process.signal_all(pids, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, again and again until nothing is left of it."""
        if self.is_empty:
            return
        if self._kill_rounds > 0:
            process.stop_all_below_us()  # so that nothing forks away from the kill
        process.signal_all(process.descendants([os.getpid()]), signal.SIGKILL)
        self._kill_rounds += 1
        self._loop.later(min(1.0, 0.01 * 2**self._kill_rounds), self.kill)

    def reap(self) -> Iterator[Tuple[int, int, resource.struct_rusage]]:
        """Collect whatever has ended: pid, status and usage of each."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.is_empty = True
                return
            if pid == 0:
                return
            yield pid, status, usage


# ----- limits that the shepherd itself has to keep, where no cgroup does
# Memory: the resident pages of the tree are added up every second. Pages that processes share count once for each of them, so
# when the sum is too high, the exact share (Pss) decides, which costs more to ask for.


WATCH_S = 1.0


def exceeds(root_pid: int, mem_mib: int) -> bool:
    """Return whether the processes below `root_pid` together hold more than `mem_mib`."""
    limit_kib = mem_mib << 10
    page_kib = resource.getpagesize() >> 10
    pids = process.quick_descendants(root_pid)
    stats = (process.read_stat(pid) for pid in pids)
    if sum(stat.rss_pages * page_kib for stat in stats if stat is not None) <= limit_kib:
        return False
    return sum(process.proportional_memory_kib(pid) for pid in pids) > limit_kib


# ----- stopping a step and letting it go on: its processes stand still meanwhile, and its time limit does not run
# With a control group of our own the processes are moved into a group below it, which is frozen: they cannot tell, and nobody
# wakes them by a signal. Elsewhere they get SIGSTOP, and SIGCONT to go on. The shepherd itself is never stopped: it minds the
# lease and obeys. A stopped tree can be killed as it is; to end by itself on SIGTERM it has to go on first.
#
# It does not know why a step is stopped. Sources: scontrol(1) suspend, Documentation/admin-guide/cgroup-v2.rst
# (cgroup.freeze), signal(7).


class Suspension:
    """Whether the processes below this one stand still, and for how long they have run."""

    def __init__(self, loop: Loop, group: Optional[str], on: bool) -> None:
        self.on = on  # from the first moment: then there is nothing yet to stop, and the caller releases nothing
        self._loop = loop
        self._group = group
        self._frozen = False  # by the kernel, not by SIGSTOP
        self._begun = False
        self._ran_s = 0.0  # until the last stop
        self._since_s: Optional[float] = None  # it runs since; None: it does not
        self._alarms: List[Tuple[float, Callable[[], None]]] = []  # after how long a run, what is called
        self._timers: List[Timer] = []

    def begin(self) -> None:
        """Count from now on: the tasks have been released."""
        self._begun, self._since_s = True, boot_clock_s()

    def after_run(self, run_s: float, call: Callable[[], None]) -> None:
        """Call once when the step has run for so long; while it is stopped the time does not count."""
        self._alarms.append((run_s, call))
        if self._since_s is not None:
            self._set_alarm(run_s, call)

    def forget(self) -> None:
        """Call nothing of what was to be called after a run."""
        self._cancel()
        self._alarms.clear()

    def stop(self) -> None:
        """Have everything below this process stand still, also what forks meanwhile."""
        if self.on:
            return
        self.on = True
        if self._since_s is not None:
            self._ran_s += boot_clock_s() - self._since_s
            self._since_s = None
        self._cancel()
        self._frozen = self._group is not None and cgroup.freeze_others(self._group)
        if not self._frozen:
            process.stop_all_below_us()

    def go_on(self) -> None:
        """Let everything go on that `stop` has stopped."""
        if not self.on:
            return
        self.on = False
        if self._frozen and self._group is not None:
            cgroup.thaw_others(self._group)
        else:
            process.signal_all(process.descendants([os.getpid()]), signal.SIGCONT)
        if self._begun:
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

        ran_s = self._ran_s + (boot_clock_s() - self._since_s if self._since_s is not None else 0.0)
        self._timers.append(self._loop.later(max(0.0, run_s - ran_s), ring))


# ----- what a step uses on this node: processor time, memory, and what it reads and writes
# Processor time comes with each process that has ended below (wait4); what was read and written the kernel adds up likewise, for
# whoever waits for them (/proc/self/io, less what this process itself did). Memory is that of one task with all that runs below
# it: the highest sum of resident pages that was seen, looked at ever more seldom, or of a single process, which the kernel
# remembers to the page. Pages that processes share count once for each of them, as in Slurm.
#
# Sources: proc(5), getrusage(2), wait4(2); Slurm's jobacct_gather/linux, which counts rchar and wchar too.


FIRST_LOOK_S = 0.25
LAST_LOOK_S = 5.0


class Usage:
    """What all that runs, and has ended, below this process has used since this was made."""

    def __init__(self) -> None:
        self.user_s = 0.0
        self.system_s = 0.0
        self.max_rss_kib = 0
        self._look_s = FIRST_LOOK_S
        self._moved = _moved_below()

    def add(self, usage: resource.struct_rusage) -> None:
        """Take account of a child that has ended."""
        self.user_s += usage.ru_utime
        self.system_s += usage.ru_stime
        self.max_rss_kib = max(self.max_rss_kib, usage.ru_maxrss)

    def look(self, roots: Iterable[int]) -> float:
        """Take account of the memory of each of `roots` with all below it, and return after how many seconds to look again."""
        page_kib = resource.getpagesize() >> 10
        for root in roots:
            stats = [process.read_stat(pid) for pid in (root, *process.quick_descendants(root))]
            self.max_rss_kib = max(
                self.max_rss_kib, sum(stat.rss_pages * page_kib for stat in stats if stat is not None)
            )
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        return self._look_s

    def as_dict(self) -> Dict[str, float]:
        """Return it as a report has it."""
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
    """Return how many bytes were read and written by all below that has ended; None where the kernel does not count them."""
    whole, own = _moved("/proc/self/io"), _moved("/proc/self/task/%d/io" % os.getpid())
    return None if whole is None or own is None else (whole[0] - own[0], whole[1] - own[1])


def _moved(path: str) -> Optional[Tuple[int, int]]:
    """Return what an io file of proc(5) says in its first two lines, rchar and wchar."""
    try:
        words = process.read_file(path).split(None, 4)
    except OSError:
        return None
    return int(words[1]), int(words[3])  # int: the kernel's


LINGER_S = 3600.0  # how long output waits for a reader that takes none of it
STEP_COMMANDS = ("hrun", "srun")  # what the kernel calls the processes of step commands
RETRY_S = 1.0  # between attempts to record an end on a full disk


class Shepherd:
    """The state of one step on this node, and what it does about each thing that happens."""

    def __init__(self, setting: Setting, job: Assignment, agent: socket.socket, loop: Loop, own: Own) -> None:
        self.setting = setting
        self.own = own
        self.job = job
        self.launch = job.launch
        self.token = job.launch.token
        self.loop = loop
        self._relay = Relay(loop, setting.spool.entry(self.token), self.token, job.round, agent)
        self._relay.obey, self._relay.greet, self._relay.moved = self._obey, self._greet, self._after_moves
        self._tasks: List[Task] = []
        self._release_fd = -1
        self._released = False
        self._started: Dict[str, Any] = {}
        self._final: Optional[Dict[str, Any]] = None
        self._final_kept = False
        self._final_told = False
        self._acknowledged = False
        self._suspension = Suspension(loop, own.cgroup, job.suspended)
        self._kernel_limits_memory = False
        self._memory_kills = 0
        self._ending_at_s: Optional[float] = None  # on the boot clock: when everything is killed
        self._end_timer: Optional[Timer] = None
        self._told_to_end = False
        self._tree = Tree(loop)
        self._why = ""
        self._may_go = not self.launch.hold
        self._lease = StepLease(self.launch, lambda: setting.spool.renewed_s(self.token))
        self._lease_over = False
        self._node_fault = False
        self._unexecuted = False
        self._timed_out = False
        self._warned = False  # that the time limit is near
        self._limit_s: Optional[float] = None
        self._out_of_memory = False
        self._usage = Usage()

    # ----- from the fork to the release

    def run(self) -> None:
        """Run the step to its end."""
        self.setting.faults.reached("shepherd.begun")
        group = self.own.cgroup
        if group is not None and self.own.limits_memory and self.launch.mem_mib > 0:
            self._kernel_limits_memory = cgroup.limit_memory(group, self.launch.mem_mib)
            self._memory_kills = cgroup.memory_kills(group)
        self._relay.say_here()
        try:
            self._fork_tasks()
        except (OSError, ValueError) as error:
            # The node's fault if not even one task could be forked; that a job asks for too many is its own.
            self._node_fault = not self._tasks and getattr(error, "errno", None) in process.NO_PROCESS
            self._refuse("cannot start the step: %s" % error)
        self._watch_lease()
        self.loop.run()

    @property
    def is_clean(self) -> bool:
        """Whether nothing of the step is left, so that this process may mind another one."""
        return self._tree.is_empty and self._relay.is_over

    def close(self) -> None:
        """Close what the step had open."""
        for task in self._tasks:
            if task.status_fd >= 0:
                self.loop.watch(task.status_fd, 0, _nothing)
                os.close(task.status_fd)
        self._relay.close()

    def _fork_tasks(self) -> None:
        launch, job, setting = self.launch, self.job, self.setting
        shared = environment.step_environment(
            launch, job.account, root=setting.spool.root, socket_path=setting.socket_path, has_gpus=setting.has_gpus
        )
        shared.update(job.environment)
        release_read, self._release_fd = os.pipe2(os.O_CLOEXEC)
        for local_rank in range(launch.tasks.count):
            self._fork_task(local_rank, shared, release_read)
        os.close(release_read)
        self.setting.faults.reached("tasks.forked")

    def _fork_task(self, local_rank: int, shared: Dict[str, str], release_read: int) -> None:
        launch = self.launch
        rank = launch.tasks.ranks()[local_rank]
        stdin_fd = self._input_pipe(rank)
        stdout_fd = self._output_pipe(rank, 1, launch.stdout)
        both = stdout_fd is None and launch.stderr == "" and launch.stdout != ""
        stderr_path = "" if launch.stderr == protocol.STREAMED else launch.stderr
        stderr_fd = None if both else self._output_pipe(rank, 2, stderr_path)
        status_read, status_write = os.pipe2(os.O_CLOEXEC)

        def path(pattern: str) -> str:
            return task_files.fill(pattern, rank, launch.tasks.node_rank, self.setting.node)

        def empties(pattern: str) -> bool:
            return not launch.append and task_files.truncates(pattern, local_rank, launch.tasks.node_rank)

        argv = list(launch.argv)
        is_script = launch.step == protocol.BATCH
        if is_script:
            argv.insert(0, self.setting.spool.script(self.token))
        plan = TaskPlan(
            rank=rank,
            argv=argv,
            is_script=is_script,
            env=environment.task_environment(shared, launch, local_rank),
            account=self.job.account,
            work_dir=launch.work_dir,
            stdin="" if launch.stdin == "all" or launch.stdin.isdigit() else path(launch.stdin),
            stdout=path(launch.stdout),
            stderr=path(launch.stderr) if both or launch.stderr else "/dev/null",
            stdin_fd=stdin_fd,
            stdout_fd=stdout_fd,
            stderr_fd=stderr_fd,
            truncate_stdout=empties(launch.stdout),
            truncate_stderr=empties(launch.stderr),
            umask=environment.umask_of(launch),
            limits=rlimits.readable(launch.env.get(rlimits.VARIABLE, "")),
            release_fd=release_read,
            status_fd=status_write,
            prolog=launch.task_prolog,
            epilog=launch.task_epilog,
            wait_for_children=launch.wait_for_children,
            signals=self.own.signals,
        )
        pid = os.fork()
        if pid == 0:
            os.close(self._release_fd)  # or the release pipe would never end for us
            run_task(plan)
        for fd in (stdin_fd, stdout_fd, stderr_fd, status_write):
            if fd is not None:
                os.close(fd)
        os.set_blocking(status_read, False)
        task = Task(rank, pid, status_read)
        self._tasks.append(task)
        self.loop.watch(status_read, READ, lambda _events: self._status_of(task))

    def _input_pipe(self, rank: int) -> Optional[int]:
        """Return the read end of the task's input if it is fed by messages, None if it is a file."""
        wanted = self.launch.stdin
        if self.launch.stream_to is None or wanted not in ("", "all", str(rank)) or (wanted == "" and rank != 0):
            return None
        return self._relay.add_input(rank)

    def _output_pipe(self, rank: int, fd: int, path: str) -> Optional[int]:
        """Return the write end of the task's output if it is a stream, None if it is a file."""
        if self.launch.stream_to is None or path != "":
            return None
        return self._relay.add_output(rank, fd, untaken_limit(self.launch.tasks.total))

    def _status_of(self, task: Task) -> None:
        """A task says that it is ready, or why it cannot be; or that its program could not be executed."""
        try:
            data = os.read(task.status_fd, 4096)
        except BlockingIOError:
            return
        if not data:
            self.loop.watch(task.status_fd, 0, _nothing)
            os.close(task.status_fd)
            task.status_fd = -1
            if not task.ready:
                self._refuse("cannot start task %d: it died before it could run" % task.rank)
            return
        if not task.ready and data[:1] == READY:
            task.ready, data = True, data[1:]
            self._release_if_ready()
        if data and not task.ready:
            self._refuse(data.decode("utf-8", "surrogateescape"))
        elif data:
            self._not_executed(data)

    def _not_executed(self, why: bytes) -> None:
        """A task that was released says why its program could not be executed."""
        self._unexecuted = True
        self._why = self._why or why.decode("utf-8", "surrogateescape")

    @property
    def _is_ready(self) -> bool:
        """Whether nothing but the release is missing."""
        ready = all(task.ready for task in self._tasks)
        unhindered = not self._released and not self._suspension.on
        return ready and unhindered and self._final is None and self._ending_at_s is None

    def _release_if_ready(self) -> None:
        if self._is_ready and self._may_go:
            self._release()
        elif self._is_ready:
            self._relay.say(["prepared"])

    def _release(self) -> None:
        """Put on disk who runs, then let them run."""
        if not self._lease.lasts_for_ever and self._lease.left_s() <= 0:
            self._end(0.0, protocol.LEASE_OVER)
            return
        who = [process.identify(task.pid, self.setting.boot_id) for task in self._tasks]
        self._started = {
            "status": protocol.STARTED,
            "pid": self._tasks[0].pid if self._tasks else 0,
            "at_s": time.time(),
            "started_at_s": time.time(),
            "tasks": [identity for identity in who if identity is not None],
            "shepherd": self.own.identity,
            "boot_id": self.setting.boot_id,
            "started_boot_s": process.boot_clock_s(),
            "uid": self.job.account.uid,
            "cgroup": self.own.cgroup,
            "stream_to": self._stream_to(),
        }
        try:
            self.setting.spool.write_started(self.token, self._started)
        except OSError as error:
            self._node_fault = True
            self._refuse("cannot record the start in the spool %s: %s" % (self.setting.spool.path, error.strerror))
            return
        self._released = True
        with contextlib.suppress(BrokenPipeError):  # all its tasks have been killed meanwhile
            os.write(self._release_fd, b"x" * len(self._tasks))
        os.close(self._release_fd)
        self.setting.faults.reached("released")
        self._relay.say(["started", self._started])
        self.loop.later(0.0, self._check_over)  # of tasks that ended before, nothing more is heard
        self._suspension.begin()
        self._set_time_limit(self.launch.limit_s)
        if self.launch.mem_mib > 0 and not self._kernel_limits_memory:
            self.loop.later(WATCH_S, self._watch_memory)
        self.loop.later(FIRST_LOOK_S, self._look_at_usage)

    def _stream_to(self) -> Optional[Dict[str, Any]]:
        address = self.launch.stream_to
        return None if address is None else {"node": address.node, "stream": address.stream}

    def _refuse(self, why: str) -> None:
        """The step cannot run; it never will under this token."""
        if self._final is None and not self._released:
            self._why = self._why or why
            self._over_before_release(protocol.REFUSED)

    def _over_before_release(self, status: str) -> None:
        if self._release_fd >= 0:
            os.close(self._release_fd)  # the tasks that wait on it end
            self._release_fd = -1
        for task in self._tasks:
            if not task.over:
                os.kill(task.pid, signal.SIGKILL)  # our own child, not yet waited for
        self._close_with(self._record(status))

    # ----- limits

    def _set_time_limit(self, limit_s: Optional[float]) -> None:
        """End the step when it has run for so long (None: never), whatever was to happen before; warn it as the job asked."""
        self._suspension.forget()
        self._limit_s = limit_s
        if limit_s is not None:
            if self.launch.signum and self.launch.signal_before_s > 0 and not self._warned:
                self._suspension.after_run(max(0.0, limit_s - self.launch.signal_before_s), self._warn)
            self._suspension.after_run(limit_s, self._limit_reached)

    def _watch_lease(self) -> None:
        """End the step when its lease runs out; whatever of its grace has passed meanwhile is gone."""
        if self._final is not None or self._lease.lasts_for_ever:
            return
        left_s = self._lease.left_s()
        if left_s <= 0:
            self._lease_over = self._lease_over or self._ending_at_s is None
            self._end(max(0.0, left_s + self._lease.grace_s), protocol.LEASE_OVER)
        self.loop.later(min(LOOK_S, left_s) if left_s > 0 else LOOK_S, self._watch_lease)

    def _warn(self) -> None:
        self._warned = True
        self._signal(self.launch.signum, self.launch.signal_batch_only)
        if self.launch.step == protocol.BATCH and not self.launch.signal_batch_only:
            self._relay.say(["signal_steps", self.launch.signum])

    def _limit_reached(self) -> None:
        if self._final is None:
            self._timed_out = True
            self._end(self.launch.grace_s, "timeout")

    def _look_at_usage(self) -> None:
        if self._final is None:
            self.loop.later(self._usage.look(process.children_of(os.getpid())), self._look_at_usage)

    def _watch_memory(self) -> None:
        if self._final is not None:
            return
        if exceeds(os.getpid(), self.launch.mem_mib):
            self._out_of_memory = True
            self._end(0.0, "out of memory: more than %d MiB" % self.launch.mem_mib)
        else:
            self.loop.later(WATCH_S, self._watch_memory)

    # ----- signals and the end

    def _signal(self, signum: int, batch_only: bool, full: bool = False) -> None:
        """Signal the tasks; of a batch step the children of its shell, the shell alone (`batch_only`) or both (`full`).

        Step commands among the children hand signals on to their tasks, which get this one from their own shepherds.
        """
        if not self._released or self._final is not None:
            return
        if self.launch.step != protocol.BATCH:
            for task in self._tasks:
                if not task.over:
                    process.signal_group(task.pid, signum)
            return
        shell = self._tasks[0]
        pids = [] if batch_only else process.descendants([os.getpid()])
        pids = [pid for pid in pids if pid != shell.pid and process.name_of(pid) not in STEP_COMMANDS]
        if (batch_only or full or signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)) and not shell.over:
            pids.insert(0, shell.pid)
        process.signal_all(pids, signum)

    def told_to_stop(self) -> None:
        """SIGTERM: the node is going down."""
        self._end(self.launch.grace_s, "the node told the shepherd to stop")

    def _suspend(self, on: bool) -> None:
        if not on:
            self._suspension.go_on()
            self._release_if_ready()
        elif self._final is None and self._ending_at_s is None:
            self._suspension.stop()

    def _end(self, grace_s: float, why: str, signum: int = 0, batch_only: bool = False) -> None:
        """TERM to everything (or `signum`, as `_signal`), after the grace KILL; a second call can only shorten the grace."""
        if self._final is not None:
            self._drop_output()
            return
        self._why = self._why or why
        if not self._released:
            self._ending_at_s = 0.0
            self._over_before_release(protocol.BARRED)
            return
        self._suspension.go_on()
        at_s = process.boot_clock_s() + grace_s
        if grace_s > 0 and not signum and not self._told_to_end:
            self._told_to_end = True
            self._tree.terminate()
        elif signum and self._ending_at_s is None and (not batch_only or self.launch.step == protocol.BATCH):
            self._signal(signum, batch_only)
        if self._ending_at_s is None or at_s < self._ending_at_s:
            self._ending_at_s = at_s
            if self._end_timer is not None:
                self._end_timer.cancel()
            self._end_timer = self.loop.later(grace_s, self._tree.kill)

    def reap(self) -> None:
        """Collect whatever has ended below."""
        for pid, status, usage in self._tree.reap():
            self._usage.add(usage)
            for task in self._tasks:
                if task.pid == pid:
                    self._task_over(task, status)
        if not self._tree.is_empty and self._ending_at_s is not None and process.boot_clock_s() < self._ending_at_s:
            self._tree.terminate_orphans()
        self._check_over()

    def _task_over(self, task: Task, status: int) -> None:
        task.over = True
        if os.WIFSIGNALED(status):
            task.signal = os.WTERMSIG(status)
        else:
            task.code = os.WEXITSTATUS(status)
        failed = task.code != 0 or task.signal != 0
        if self._released and failed and self.launch.kill_on_bad_exit:
            self._end(self.launch.grace_s, "task %d failed" % task.rank)

    def _check_over(self) -> None:
        if not self._released or self._final is not None or not all(task.over for task in self._tasks):
            return
        if not self._tree.is_empty:
            if self._ending_at_s is None:
                self._ending_at_s = 0.0
                self._tree.kill()
            return
        self.setting.faults.reached("tasks.over")
        for task in self._tasks:
            self._last_status(task)
        self._close_with(self._record(protocol.ENDED))

    def _last_status(self, task: Task) -> None:
        """Why the program could not be executed, if the task said so just before it ended."""
        if task.status_fd < 0:
            return
        try:
            data = os.read(task.status_fd, 4096)
        except BlockingIOError:
            return
        if data:
            self._not_executed(data)

    def _record(self, status: str) -> Dict[str, Any]:
        record: Dict[str, Any] = {
            "status": status,
            "at_s": time.time(),
            "why": self._why,
            "stream_to": self._stream_to(),
        }
        if status == protocol.ENDED:
            if self._kernel_limits_memory and cgroup.memory_kills(self.own.cgroup or "") > self._memory_kills:
                self._out_of_memory = True
            record.update(
                pid=self._started["pid"],
                started_at_s=self._started["started_at_s"],
                boot_id=self.setting.boot_id,
                ended_boot_s=process.boot_clock_s(),
                ran_s=process.boot_clock_s() - self._started["started_boot_s"],
                codes=[task.code for task in self._tasks],
                signals=[task.signal for task in self._tasks],
                timed_out=self._timed_out,
                out_of_memory=self._out_of_memory,
                usage=self._usage.as_dict(),
            )
            if self._lease_over:
                record["status"] = protocol.LOST
            if self._unexecuted:
                record["unexecuted"] = True
            if self.launch.step == protocol.BATCH and self._output_is_full():
                record["output_full"] = True
        if self._node_fault and not self._released:
            record["node_fault"] = True
        return record

    def _output_is_full(self) -> bool:
        """Return whether the file system of the batch step's output file is known to be full."""
        launch = self.launch
        path = task_files.fill(launch.stdout, launch.tasks.first_rank, launch.tasks.node_rank, self.setting.node)
        if path in ("", "none", "/dev/null"):
            return False
        return task_files.is_full(os.path.join(launch.work_dir, path))

    def _close_with(self, final: Dict[str, Any]) -> None:
        """Put the end on disk and tell it, then go as soon as the output was taken."""
        self._final = final
        if self._kernel_limits_memory:
            cgroup.limit_memory(self.own.cgroup or "", 0)
        self.loop.later(LINGER_S, lambda: self._linger(self._relay.taken_bytes))
        self._keep_final()

    def _keep_final(self) -> None:
        """Put the end on disk; an end that is not there is not told, unless nothing ever ran."""
        assert self._final is not None
        try:
            self.setting.spool.write_final(self.token, self._final)
        except OSError as error:
            print("cannot record the end of %s: %s" % (self.token, error), file=sys.stderr, flush=True)
            if self._released:
                self.loop.later(RETRY_S, self._keep_final)
                return
        self._final_kept = True
        if not self._released or self._ending_at_s is not None:
            self._tell_final()
        self._relay.pump()

    def _tell_final(self) -> None:
        if self._final_kept and not self._final_told and self._relay.is_connected:
            self._final_told = True
            self._relay.say(["final", self._final])

    def _after_moves(self) -> None:
        """Tell the end when the output has gone before it, and go when there is nothing left to do."""
        if not self._final_kept:
            return
        if self._relay.all_sent:
            self._tell_final()
        if not self._relay.has_output or (self._relay.all_taken and self._acknowledged):
            self.loop.stopped = True
            self._relay.finish()

    def _linger(self, taken_before: int) -> None:
        taken_bytes = self._relay.taken_bytes
        if taken_bytes == taken_before:
            self._drop_output()
        else:
            self.loop.later(LINGER_S, lambda: self._linger(taken_bytes))

    def _drop_output(self) -> None:
        """Nobody takes what is left of the output."""
        self._acknowledged = True
        self._relay.drop_output()
        self.loop.stopped = True

    # ----- the agent

    def _obey(self, words: List[Any]) -> None:
        if words[0] == "end":
            self._end(*words[1:5])
        elif words[0] == "signal":
            self._signal(words[1], words[2], full=len(words) > 3 and words[3])
        elif words[0] == "limit":
            if self._released and self._final is None and words[1] != self._limit_s:
                self._set_time_limit(words[1])
        elif words[0] == "suspend":
            self._suspend(words[1])
        elif words[0] == "go":
            self._may_go = True
            self._release_if_ready()
        elif words[0] == "acknowledged":
            self._acknowledged = True

    def _greet(self) -> None:
        """A new agent is there."""
        self._final_told = False
        if self._released:
            self._relay.say(["started", self._started])
        else:
            self._release_if_ready()
        if self._ending_at_s is not None:
            self._tell_final()


def _nothing(_events: int) -> None:
    pass
