"""The shepherd: supervises one step on one node, and outlives agent and controller.

Rules:
- What may happen when is in `step_state`: nothing is released before `started` is on disk, and nothing is reported before
  it is on disk.
- It is the subreaper of all processes that start below it (see `process_tree`).
- When the tasks are over, it kills what they left behind at once; if an end was requested, after its grace period.
- If the agent goes away, it listens in its spool entry until the next agent connects.
- It ends a step whose lease runs out, with or without an agent.

It does not know the controller, nor other steps. Sources: unix(7).
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import sys
import time
from typing import Dict, List, NamedTuple, Optional, Set, Type

from hpcnode.lease import LOOK_S, StepLease
from hpcnode.os import cgroup, process, rlimits
from hpcnode.os.loop import READ, Loop, Timer
from hpcnode.shepherd import confinement, environment
from hpcnode.shepherd import task as task_files
from hpcnode.shepherd.assignment import Assignment, Own, Setting, Task
from hpcnode.shepherd.process_tree import (
    FIRST_LOOK_S,
    MEMORY_WATCH_S,
    ForkBomb,
    ProcessTree,
    Suspension,
    Usage,
    exceeds,
)
from hpcnode.shepherd.relay import Relay, untaken_limit
from hpcnode.shepherd.step_state import BEFORE_RELEASE, REPORTABLE, RUNNING, StepEvent, StepState, after, allows
from hpcnode.shepherd.task import READY, TaskPlan
from hpcnode.wire import protocol
from hpcnode.wire.message import Message
from hpcnode.wire.shepherd_messages import (
    ChangeTimeLimit,
    EndCommitted,
    EndTasks,
    ReleaseTasks,
    SignalOtherSteps,
    SignalTasks,
    SuspendTasks,
    TasksEnded,
    TasksReady,
    TasksStarted,
    record_of,
)

LINGER_S = 3600.0  # how long output waits for a reader that takes none of it
STEP_COMMANDS = ("hrun", "srun")  # what the kernel calls the processes of step commands
RETRY_S = 1.0  # between attempts to record an end on a full disk


class Finding(enum.Enum):
    """A fact for the record of the end, besides exit codes; any number of them may hold."""

    NODE_FAULT = "the node is to blame: nothing could be started"
    UNEXECUTED = "a released task could not execute its program"
    TIMED_OUT = "the time limit was reached"
    OUT_OF_MEMORY = "the memory limit was exceeded"
    LEASE_OVER = "the lease ran out, and nothing else had ended the step before"


class TaskStreams(NamedTuple):
    """The descriptors of a task's pipes; None if that stream is a file."""

    stdin: Optional[int]
    stdout: Optional[int]
    stderr: Optional[int]


class Shepherd:
    """One step on this node: its state, its processes, and what is done about each event."""

    def __init__(self, setting: Setting, job: Assignment, agent: socket.socket, loop: Loop, own: Own) -> None:
        self.setting = setting
        self.own = own
        self.job = job
        self.launch = job.launch
        self.token = job.launch.token
        self.loop = loop
        self.state = StepState.PREPARING
        self._relay = Relay(loop, setting.spool.entry(self.token), job.round, agent)
        self._relay.handle, self._relay.greet, self._relay.moved = self._handle, self._greet, self._after_moves
        self._tasks: List[Task] = []
        self._release_fd = -1
        self._held = self.launch.hold  # Go has not come yet
        self._started: Optional[TasksStarted] = None  # on disk
        self._ended: Optional[TasksEnded] = None  # from OVER on
        self._findings: Set[Finding] = set()
        self._why = ""
        self._suspension = Suspension(loop, job.suspended)
        self._confined = job.confined
        self._tree = ProcessTree(loop)
        self._tree.on_killed = self.reap
        self._bomb: Optional[ForkBomb] = None  # None: processes are not limited
        if job.confined.group is not None:
            self._suspension.group = self._tree.group = job.confined.group.unified
            self._bomb = ForkBomb(job.confined.group.processes) if job.confined.group.processes else None
        self._usage = Usage()
        self._kill_at_s: Optional[float] = None  # boot clock; None: no end was requested
        self._kill_timer: Optional[Timer] = None
        self._lease = StepLease(self.launch, lambda: setting.spool.renewed_s(self.token))
        self._limit_s: Optional[float] = None
        self._warning = self.launch.signum if self.launch.signal_before_s > 0 else 0  # 0: no signal before the limit

    # ----- the state

    def _apply(self, event: StepEvent) -> None:
        """Go to the next state. Raises TransitionError: then the caller is wrong."""
        self.state = after(self.state, event)

    def _accepts(self, event: StepEvent) -> bool:
        """Return whether an event from outside is allowed now; log it if not."""
        if allows(self.state, event):
            return True
        print("%s dropped: step %s is %s" % (event.value, self.token, self.state.value), file=sys.stderr, flush=True)
        return False

    # ----- from the fork to the release

    def run(self) -> None:
        """Run the step to its end."""
        self.setting.faults.reached("shepherd.begun")
        try:
            self._fork_tasks()
        except (OSError, ValueError) as error:
            # The node is at fault if not even one task could be forked; a job that asks for too many tasks is not.
            if not self._tasks and getattr(error, "errno", None) in process.NO_PROCESS:
                self._findings.add(Finding.NODE_FAULT)
            self._refuse("cannot start the step: %s" % error)
        self._watch_lease()
        if self.state is not StepState.GONE:
            self.loop.run()

    @property
    def is_clean(self) -> bool:
        """Whether nothing of the step is left, so that this process may supervise another one."""
        return self._tree.is_empty and self._relay.is_over

    def close(self) -> None:
        """Close the descriptors of the step, and remove the groups that go with it."""
        self._remove_group()
        for task in self._tasks:
            if task.status_fd >= 0:
                self.loop.watch(task.status_fd, 0, _nothing)
                os.close(task.status_fd)
        self._relay.close()

    def _remove_group(self) -> None:
        """Remove the groups that go with the step, if they are empty."""
        if self._confined.group is not None:
            cgroup.remove_step(self._confined.group)

    def _fork_tasks(self) -> None:
        launch, job, setting = self.launch, self.job, self.setting
        shared = environment.step_environment(
            launch,
            job.account,
            root=setting.spool.root,
            socket_path=setting.socket_path,
            has_gpus=setting.has_gpus,
            cannot=setting.cannot,
        )
        if not self._is_helped:
            shared.update(job.environment)
        release_read, self._release_fd = os.pipe2(os.O_CLOEXEC)
        try:
            for local_rank in range(launch.tasks.count):
                self._fork_task(local_rank, shared, release_read)
        finally:
            os.close(release_read)
        self.setting.faults.reached("tasks.forked")

    def _fork_task(self, local_rank: int, shared: Dict[str, str], release_read: int) -> None:
        rank = self.launch.tasks.ranks()[local_rank]
        streams = self._streams_of(rank)
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        plan = self._plan_of(
            local_rank, streams, task_env=environment.task_environment(shared, self.launch, local_rank)
        )
        pid = self.own.forker.fork(
            plan._replace(release_fd=release_read, status_fd=status_write), self.job.lock_fd, self._release_fd
        )
        self._tree.add_task(pid)
        for fd in (*streams, status_write):
            if fd is not None:
                os.close(fd)
        os.set_blocking(status_read, False)
        task = Task(rank, pid, status_read)
        self._tasks.append(task)
        self.loop.watch(status_read, READ, lambda _events: self._status_of(task))

    def _streams_of(self, rank: int) -> TaskStreams:
        """Make the pipes of a task."""
        launch = self.launch
        stdin_fd = self._input_pipe(rank)
        stdout_fd = self._output_pipe(rank, 1, launch.stdout)
        if _stderr_follows_stdout(launch):
            return TaskStreams(stdin_fd, stdout_fd, None)
        stderr_path = "" if launch.stderr == protocol.STREAMED else launch.stderr
        return TaskStreams(stdin_fd, stdout_fd, self._output_pipe(rank, 2, stderr_path))

    def _plan_of(self, local_rank: int, streams: TaskStreams, task_env: Dict[str, str]) -> TaskPlan:
        """Return what a task does; the caller adds the two pipes of its start."""
        launch = self.launch
        rank = launch.tasks.ranks()[local_rank]

        def path(pattern: str) -> str:
            return task_files.fill(pattern, rank, launch.tasks.node_rank, self.setting.node)

        def truncates(pattern: str) -> bool:
            return not launch.append and task_files.truncates(pattern, local_rank, launch.tasks.node_rank)

        is_script = launch.step == protocol.BATCH
        has_stderr = launch.stderr or _stderr_follows_stdout(launch)
        return TaskPlan(
            rank=rank,
            argv=[self.setting.spool.script(self.token), *launch.argv] if is_script else list(launch.argv),
            is_script=is_script,
            env=task_env,
            account=self.job.account,
            work_dir=launch.work_dir,
            stdin="" if launch.stdin == "all" or launch.stdin.isdigit() else path(launch.stdin),
            stdout=path(launch.stdout),
            stderr=path(launch.stderr) if has_stderr else "/dev/null",
            stdin_fd=streams.stdin,
            stdout_fd=streams.stdout,
            stderr_fd=streams.stderr,
            truncate_stdout=truncates(launch.stdout),
            truncate_stderr=truncates(launch.stderr),
            umask=environment.umask_of(launch),
            limits=rlimits.readable(launch.env.get(rlimits.VARIABLE, "")),
            release_fd=-1,
            status_fd=-1,
            prolog=launch.task_prolog,
            epilog=launch.task_epilog,
            wait_for_children=launch.wait_for_children,
            confined=self._confined,
            helped=self._helped() if self._is_helped else None,
        )

    @property
    def _is_helped(self) -> bool:
        """Whether the root helper starts the tasks: this process cannot become their user."""
        return os.geteuid() not in (0, self.job.account.uid)

    def _helped(self) -> task_files.Helped:
        launch = self.launch
        script = ""
        if launch.step == protocol.BATCH:
            with open(self.setting.spool.script(self.token), encoding="utf-8", errors="surrogateescape") as file:
                script = file.read()
        return task_files.Helped(launch.job_id, launch.attempt, launch.step, script)

    def _input_pipe(self, rank: int) -> Optional[int]:
        """Return the read end of the task's input if messages feed it, None if it is a file."""
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
        """Read a task's status pipe: it is ready, or cannot run, or could not execute its program."""
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
            if self.state is StepState.PREPARING and all(task.ready for task in self._tasks):
                self._apply(StepEvent.TASKS_READY)
                self._release_if_allowed()
        if data and not task.ready:
            self._refuse(data.decode("utf-8", "surrogateescape"))
        elif data:
            self._not_executed(data)

    def _not_executed(self, why: bytes) -> None:
        """Note why a released task could not execute its program."""
        self._findings.add(Finding.UNEXECUTED)
        self._why = self._why or why.decode("utf-8", "surrogateescape")

    def _release_if_allowed(self) -> None:
        if self.state is not StepState.READY or self._suspension.on:
            return
        if self._held:
            self._relay.send(TasksReady())
        else:
            self._release()

    def _release(self) -> None:
        """Put on disk which processes run, then let them run."""
        if not self._lease.lasts_for_ever and self._lease.left_s() <= 0:
            self._end(0.0, protocol.LEASE_OVER)
            return
        started = self._start_record()
        try:
            self.setting.spool.write_started(self.token, record_of(started))
        except OSError as error:
            self._findings.add(Finding.NODE_FAULT)
            self._refuse("cannot record the start in the spool %s: %s" % (self.setting.spool.path, error.strerror))
            return
        self._started = started
        self._apply(StepEvent.RELEASE)
        with contextlib.suppress(BrokenPipeError):  # all its tasks have been killed meanwhile
            os.write(self._release_fd, b"x" * len(self._tasks))
        os.close(self._release_fd)
        self.setting.faults.reached("released")
        self._relay.send(started)
        self.loop.later(0.0, self._check_over)  # tasks that ended before send no further event
        self._suspension.begin()
        self._set_time_limit(self.launch.limit_s)
        if self.launch.mem_mib > 0 and not self._memory_group:
            self.loop.later(MEMORY_WATCH_S, self._watch_memory)
        self.loop.later(FIRST_LOOK_S, self._look_at_usage)

    def _start_record(self) -> TasksStarted:
        identities = [process.identify(task.pid, self.setting.boot_id) for task in self._tasks]
        now_s = time.time()
        return TasksStarted(
            pid=self._tasks[0].pid if self._tasks else 0,
            at_s=now_s,
            started_at_s=now_s,
            tasks=[identity for identity in identities if identity is not None],
            shepherd=self.own.identity,
            boot_id=self.setting.boot_id,
            started_boot_s=process.boot_clock_s(),
            uid=self.job.account.uid,
            cgroup=self._confined.group.unified if self._confined.group is not None else None,
            stream_to=self.launch.stream_to,
        )

    def _refuse(self, why: str) -> None:
        """End a step that cannot run; a step that runs, or is over, is left alone."""
        if self.state in BEFORE_RELEASE:
            self._why = self._why or why
            self._over_before_release(StepEvent.REFUSE, protocol.REFUSED)

    def _over_before_release(self, event: StepEvent, status: str) -> None:
        if self._release_fd >= 0:
            os.close(self._release_fd)  # the tasks that wait on it end
            self._release_fd = -1
        for task in self._tasks:
            if not task.over:
                os.kill(task.pid, signal.SIGKILL)  # our own child, not yet waited for
        ended = TasksEnded(
            status=status,
            at_s=time.time(),
            why=self._why,
            stream_to=self.launch.stream_to,
            node_fault=Finding.NODE_FAULT in self._findings,
        )
        self._close(event, ended)

    # ----- limits

    def _set_time_limit(self, limit_s: Optional[float]) -> None:
        """End the step after this run time (None: never) and warn it before.

        Replaces an earlier limit.
        """
        self._suspension.cancel_alarms()
        self._limit_s = limit_s
        if limit_s is not None:
            if self._warning:
                self._suspension.after_run(max(0.0, limit_s - self.launch.signal_before_s), self._warn)
            self._suspension.after_run(limit_s, self._limit_reached)

    def _watch_lease(self) -> None:
        """End the step when its lease runs out; less grace is left if that was noticed late."""
        if self.state not in BEFORE_RELEASE | RUNNING or self._lease.lasts_for_ever:
            return
        left_s = self._lease.left_s()
        if left_s <= 0:
            if self.state is not StepState.ENDING:
                self._findings.add(Finding.LEASE_OVER)
            self._end(max(0.0, left_s + self._lease.grace_s), protocol.LEASE_OVER)
        self.loop.later(min(LOOK_S, left_s) if left_s > 0 else LOOK_S, self._watch_lease)

    def _warn(self) -> None:
        signum, self._warning = self._warning, 0
        self._signal(signum, self.launch.signal_batch_only)
        if self.launch.step == protocol.BATCH and not self.launch.signal_batch_only:
            self._relay.send(SignalOtherSteps(signum))

    def _limit_reached(self) -> None:
        self._findings.add(Finding.TIMED_OUT)
        self._end(self.launch.grace_s, "timeout")

    def _look_at_usage(self) -> None:
        if self.state in RUNNING:
            failed = self._bomb.failed() if self._bomb is not None else 0
            if failed:
                self._end(0.0, "fork bomb: %d forks failed at the limit of processes of the job" % failed)
            self.loop.later(self._usage.look(process.children_of(os.getpid())), self._look_at_usage)

    @property
    def _memory_group(self) -> str:
        """The group that limits the memory of the step, "" if none does."""
        return self._confined.group.memory if self._confined.group is not None else ""

    def _watch_memory(self) -> None:
        if self.state not in RUNNING:
            return
        if exceeds(os.getpid(), confinement.memory_left_mib(self._confined, self.launch.mem_mib)):
            self._findings.add(Finding.OUT_OF_MEMORY)
            self._end(0.0, "out of memory: more than %d MiB" % self.launch.mem_mib)
        else:
            self.loop.later(MEMORY_WATCH_S, self._watch_memory)

    # ----- signals and the end

    def _signal(self, signum: int, batch_only: bool, full: bool = False) -> None:
        """Signal the tasks.

        Of a batch step the children of its shell, the shell alone (`batch_only`) or both (`full`).

        Step commands among the children are left out: the shepherds of their steps get this signal, too.
        """
        if self.launch.step != protocol.BATCH:
            for task in self._tasks:
                if not task.over:
                    process.signal_group(task.pid, signum)
            return
        shell = self._tasks[0]
        below = {} if batch_only else process.descendants([os.getpid()])
        if (batch_only or full or signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)) and not shell.over:
            os.kill(shell.pid, signum)  # our own child, not yet waited for
        process.signal_all(
            {
                pid: ticks
                for pid, ticks in below.items()
                if pid != shell.pid and process.name_of(pid) not in STEP_COMMANDS
            },
            signum,
        )

    def terminate(self) -> None:
        """End the step because this process got SIGTERM: the node is going down."""
        if self._accepts(StepEvent.END):
            self._end(self.launch.grace_s, "the node told the shepherd to stop")

    def _suspend(self, on: bool) -> None:
        if on:
            self._suspension.stop()
        else:
            self._suspension.resume()
            self._release_if_allowed()

    def _end(self, grace_s: float, why: str, signum: int = 0, batch_only: bool = False) -> None:
        """Send SIGTERM (or `signum`, as `_signal`) to all processes, after `grace_s` SIGKILL.

        A second call can only shorten the grace. If the step is over, the rest of its output is dropped.
        """
        self._why = self._why or why
        if self.state in BEFORE_RELEASE:
            self._over_before_release(StepEvent.END, protocol.REVOKED)
        elif self.state in RUNNING:
            self._end_tasks(grace_s, signum, batch_only)
        else:
            self._drop_output(StepEvent.END)

    def _end_tasks(self, grace_s: float, signum: int, batch_only: bool) -> None:
        was_ending = self.state is StepState.ENDING
        self._suspension.resume()
        if signum:
            if not was_ending and (not batch_only or self.launch.step == protocol.BATCH):
                self._signal(signum, batch_only)
        elif grace_s > 0:
            self._tree.terminate()
        self._apply(StepEvent.END)
        at_s = process.boot_clock_s() + grace_s
        if self._kill_at_s is None or at_s < self._kill_at_s:
            self._kill_at_s = at_s
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            self._kill_timer = self.loop.later(grace_s, self._tree.kill)

    def reap(self) -> None:
        """Collect ended children."""
        for pid, status, usage in self._tree.reap():
            self._usage.add(usage)
            for task in self._tasks:
                if task.pid == pid:
                    self._task_over(task, status)
        if self._tree.is_empty:
            for task in self._tasks:  # killed, and another process traces it
                if not task.over:
                    self._task_over(task, signal.SIGKILL)
        in_grace = self._kill_at_s is not None and process.boot_clock_s() < self._kill_at_s
        if self.state is StepState.ENDING and in_grace and not self._tree.is_empty:
            self._tree.terminate_orphans()
        self._check_over()

    def _task_over(self, task: Task, status: int) -> None:
        task.over = True
        if os.WIFSIGNALED(status):
            task.signal = os.WTERMSIG(status)
        else:
            task.code = os.WEXITSTATUS(status)
        failed = task.code != 0 or task.signal != 0
        if failed and self.state in RUNNING and self.launch.kill_on_bad_exit:
            self._end(self.launch.grace_s, "task %d failed" % task.rank)

    def _check_over(self) -> None:
        if self.state not in RUNNING or not all(task.over for task in self._tasks):
            return
        if not self._tree.is_empty:
            if self.state is StepState.RELEASED:
                self._apply(StepEvent.TASKS_OVER)
                self._kill_at_s = 0.0
                self._tree.kill()
            return
        self.setting.faults.reached("tasks.over")
        for task in self._tasks:
            self._last_status(task)
        self._close(StepEvent.TREE_EMPTY, self._end_record())

    def _last_status(self, task: Task) -> None:
        """Read why the program could not be executed, if the task wrote that just before it ended."""
        if task.status_fd < 0:
            return
        try:
            data = os.read(task.status_fd, 4096)
        except BlockingIOError:
            return
        if data:
            self._not_executed(data)

    def _end_record(self) -> TasksEnded:
        """Return the record of a step whose tasks have run."""
        started = self._started
        assert started is not None
        if self._memory_group and cgroup.memory_kills(self._memory_group) > 0:
            self._findings.add(Finding.OUT_OF_MEMORY)
        now_s = process.boot_clock_s()
        return TasksEnded(
            status=protocol.LOST if Finding.LEASE_OVER in self._findings else protocol.ENDED,
            at_s=time.time(),
            why=self._why,
            stream_to=self.launch.stream_to,
            pid=started.pid,
            started_at_s=started.started_at_s,
            boot_id=self.setting.boot_id,
            ended_boot_s=now_s,
            ran_s=now_s - started.started_boot_s,
            codes=[task.code for task in self._tasks],
            signals=[task.signal for task in self._tasks],
            timed_out=Finding.TIMED_OUT in self._findings,
            out_of_memory=Finding.OUT_OF_MEMORY in self._findings,
            usage=self._usage.as_dict(),
            unexecuted=Finding.UNEXECUTED in self._findings,
            output_full=self.launch.step == protocol.BATCH and self._output_is_full(),
            killed=self._tree.was_killed,
        )

    def _output_is_full(self) -> bool:
        """Return whether the file system of the batch step's output file is known to be full."""
        launch = self.launch
        path = task_files.fill(launch.stdout, launch.tasks.first_rank, launch.tasks.node_rank, self.setting.node)
        if path in ("", "none", "/dev/null"):
            return False
        return task_files.is_full(os.path.join(launch.work_dir, path))

    def _close(self, event: StepEvent, ended: TasksEnded) -> None:
        """Put the end on disk and report it; leave as soon as the output was taken."""
        self._apply(event)
        self._ended = ended
        self._suspension.cancel_alarms()
        self._remove_group()
        self.loop.later(LINGER_S, lambda: self._linger(self._relay.taken_bytes))
        self._write_final()

    def _write_final(self) -> None:
        """Put the end on disk, now or when the disk has room.

        A step that never ran is reported without that.
        """
        assert self._ended is not None
        try:
            self.setting.spool.write_final(self.token, record_of(self._ended))
        except OSError as error:
            print("cannot record the end of %s: %s" % (self.token, error), file=sys.stderr, flush=True)
            if self._started is not None:
                self.loop.later(RETRY_S, self._write_final)
                return
        self._apply(StepEvent.RECORD)
        if self._started is None or self._kill_at_s is not None:
            self._report_final()
        self._relay.pump()

    def _report_final(self) -> None:
        if self.state is StepState.RECORDED and self._relay.is_connected and self._ended is not None:
            self._relay.send(self._ended)
            self._apply(StepEvent.REPORT)

    def _after_moves(self) -> None:
        """Report the end after the output before it was sent; leave when nothing is left to do."""
        if self.state not in REPORTABLE:
            return
        if self._relay.all_sent:
            self._report_final()
        if not self._relay.has_output or (self._relay.all_taken and self.state is StepState.ACKNOWLEDGED):
            self._leave(StepEvent.LEAVE)

    def _leave(self, event: StepEvent) -> None:
        self._apply(event)
        self.loop.stopped = True
        self._relay.finish()

    def _linger(self, taken_before: int) -> None:
        taken_bytes = self._relay.taken_bytes
        if taken_bytes == taken_before and self.state in REPORTABLE:
            self._drop_output(StepEvent.LEAVE)
        else:
            self.loop.later(LINGER_S, lambda: self._linger(taken_bytes))

    def _drop_output(self, event: StepEvent) -> None:
        """Drop the rest of the output, and leave if the end is on disk."""
        self._relay.drop_output()
        if self.state in REPORTABLE:
            self._leave(event)

    # ----- the agent

    def _handle(self, message: Message) -> None:
        """Do what the agent says, if the state allows it."""
        event = _EVENTS.get(type(message))
        if isinstance(message, SuspendTasks):
            event = StepEvent.SUSPEND if message.on else StepEvent.RESUME
        if event is None or not self._accepts(event):
            return
        if isinstance(message, EndTasks):
            self._end(message.grace_s, message.why, message.signum, message.batch_only)
        elif isinstance(message, SignalTasks):
            self._signal(message.signum, message.batch_only, message.full)
        elif isinstance(message, ChangeTimeLimit):
            if message.limit_s != self._limit_s:
                self._set_time_limit(message.limit_s)
        elif isinstance(message, SuspendTasks):
            self._suspend(message.on)
        elif isinstance(message, ReleaseTasks):
            self._held = False
            self._release_if_allowed()
        else:
            self._apply(event)

    def _greet(self) -> None:
        """Repeat the reports of the step to a new agent."""
        if not self._accepts(StepEvent.RECONNECT):
            return
        self._apply(StepEvent.RECONNECT)
        if self._started is not None:
            self._relay.send(self._started)
        else:
            self._release_if_allowed()
        if self.state is StepState.ACKNOWLEDGED and self._ended is not None:
            self._relay.send(self._ended)  # the order does not matter: the controller has it
        elif self._kill_at_s is not None:
            self._report_final()


_EVENTS: Dict[Type[Message], StepEvent] = {
    EndTasks: StepEvent.END,
    SignalTasks: StepEvent.SIGNAL,
    ChangeTimeLimit: StepEvent.LIMIT,
    ReleaseTasks: StepEvent.GO,
    EndCommitted: StepEvent.ACKNOWLEDGE,
}


def _stderr_follows_stdout(launch: protocol.Launch) -> bool:
    """Return whether standard error goes to the file of standard output."""
    return launch.stderr == "" and launch.stdout != ""


def _nothing(_events: int) -> None:
    pass
