"""The administrator's prolog and epilog of each job on the head.

    (allocated) --prolog--> ready: it is launched --ended--> epilog --> (gone)

`prolog_head` runs before anything of an attempt is launched. If it fails, a job with a script is requeued and held, as in Slurm,
and any other is cancelled. `epilog_head` runs after the attempt has given back all nodes; that it fails is logged. Both run as
the controller's account, bounded by `hpcnode.os.program`.

An attempt with scripts has a record, ``STATE_DIR/scripts/JOB.ATTEMPT``: durable before its prolog, removed after its epilog. So
each runs at least once: a controller that was killed meanwhile waits for what it had begun, then runs it again. If neither is
configured, nothing here costs anything.

A damaged record is replaced by what the job says. What cannot be done now (a full disk, a lock that is held, no process) is
tried again with back-off: one line in the log, and hhealth shows it until it succeeds.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpcnode.os.durable import read_object, write_durably
from hpcnode.paths import remove_tree
from hpcsched.auth.authorize import CONTROLLER
from hpcsched.config.load import ControllerSettings
from hpcsched.controller.tick import Controller
from hpcsched.errors import RequestError, report_fault
from hpcsched.lifecycle.events import EndRequested, Held
from hpcsched.lifecycle.job import can
from hpcsched.model.ids import JobId
from hpcsched.model.job import ACTIVE, Hold, Job, JobState
from hpcsched.model.units import whole_number
from hpcsched.state.transaction import Transaction
from hpcsched.steps.environment import script_environment

log = logging.getLogger("hpcsched.scripts")

AT_ONCE = 16
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 15.0
MOST_CHARS, MOST_VARIABLES = 30_000, 1000  # of an environment that is read; Linux refuses a variable of 128 KiB
FOLDER = "scripts"
Attempt = tuple[JobId, int]
Kind = Literal["prolog", "epilog"]


class HeadScripts:
    """The attempts whose scripts run, or are still to run."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._folder = self._settings.state_dir / FOLDER
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._ready: dict[Attempt, bool] = {}  # whether the prolog has succeeded
        self._environments: dict[Attempt, dict[str, str]] = {}  # by attempt whose epilog is still to come
        self._tasks: dict[JobId, asyncio.Task[None]] = {}  # the last of each job
        self._waits: dict[Attempt, str] = {}  # why a script is tried again later

    @property
    def _settings(self) -> ControllerSettings:
        return self._controller.cluster.config.controller

    def start(self) -> None:
        """Read the records of an earlier controller; run the epilogs of attempts that are over."""
        self._controller.gate = self
        try:
            paths = [path for path in self._folder.iterdir() if path.suffix not in (".new", ".lock")]
        except FileNotFoundError:
            return
        except OSError as error:
            log.error("cannot read the records of scripts in %s: %s", self._folder, error.strerror)
            return
        for path in paths:
            key = _key_of(path.name)
            if key is None:
                log.warning("ignored %r in %s: it is not the name of a record", path.name[:200], self._folder)
            else:
                self._environments[key] = self._environment(path, key)
        for job_id in {key[0] for key in self._environments}:
            self._end(job_id, self._controller.cluster.jobs.get(job_id))

    def _environment(self, path: Path, key: Attempt) -> dict[str, str]:
        """Return the environment in a record.

        If it is damaged: what the job says, or its number alone.
        """
        try:
            found = read_object(str(path))
        except OSError:
            found = None  # a damaged disk: as if it was cut off
        if (
            found is not None
            and len(found) <= MOST_VARIABLES
            and all(_is_variable(name, value) for name, value in found.items())
        ):
            return found
        log.error("the record %s is damaged: the epilog of job %d runs with what the queue has of it", path, key[0])
        cluster, job = self._controller.cluster, self._controller.cluster.jobs.get(key[0])
        if job is None or job.attempt != key[1]:
            return {f"{prefix}_JOB_ID": str(key[0]) for prefix in ("SLURM", "HPCSCHED")}
        return script_environment(job, cluster=cluster.config.name, share_dir=cluster.config.share)

    @property
    def waits(self) -> list[str]:
        """What the scripts wait for that should not be so, for hhealth."""
        return list(dict.fromkeys(self._waits.values()))

    def may_launch(self, job: Job) -> bool:
        """Return whether the attempt may be launched; if not yet, run its prolog."""
        if not self._settings.prolog_head and not self._settings.epilog_head:
            return True
        key = job.id, job.attempt
        if key not in self._ready and job.id not in self._tasks:
            self._follow(key, "prolog")
        return self._ready.get(key, False)

    def changed(self, job: Job) -> None:
        """Run the epilogs of attempts that this job has ended."""
        if self._environments:
            self._end(job.id, job)

    def _end(self, job_id: JobId, job: Job | None) -> None:
        for key in [key for key in self._environments if key[0] == job_id]:
            if job is None or job.attempt != key[1] or job.state not in ACTIVE:
                self._follow(key, "epilog")

    def _follow(self, key: Attempt, kind: Kind) -> None:
        before = self._tasks.get(key[0])
        task = asyncio.get_running_loop().create_task(self._run(key, kind, before))
        self._tasks[key[0]] = task
        task.add_done_callback(lambda done: self._over(key[0], done))

    def _over(self, job_id: JobId, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            report_fault(error, f"run a script of job {job_id}")  # type: ignore[arg-type]
        if self._tasks.get(job_id) is task:
            del self._tasks[job_id]
            job = self._controller.cluster.jobs.get(job_id)
            self._end(job_id, job)
            if job is not None:
                self._controller.launch_again(job)

    async def _run(self, key: Attempt, kind: Kind, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        wait_s = FIRST_RETRY_S
        while (job := self._controller.cluster.jobs.get(key[0])) is not None or kind == "epilog":
            try:
                if kind == "epilog":
                    await self._run_epilog(key, job)
                elif (
                    job is not None and job.attempt == key[1] and job.state in (JobState.CONFIGURING, JobState.RUNNING)
                ):
                    await self._run_prolog(key, job)
                break
            except Exception as error:
                self._note(key, kind, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        self._waits.pop(key, None)

    def _note(self, key: Attempt, kind: Kind, error: Exception) -> None:
        """Note why a script has to be tried again; log it if no other script waits for the same."""
        if isinstance(error, OSError):
            why = f"the {kind} on the head waits: {error.strerror}" + (f": {error.filename}" if error.filename else "")
        else:
            why = str(report_fault(error, f"run the {kind} of a job on the head"))
        if why not in self._waits.values():
            log.error("job %d: %s; it is tried again", key[0], why)
        self._waits[key] = why

    async def _run_prolog(self, key: Attempt, job: Job) -> None:
        cluster = self._controller.cluster
        env = script_environment(job, cluster=cluster.config.name, share_dir=cluster.config.share)
        await asyncio.to_thread(_write, self._folder, key, env)
        self._environments[key] = env
        why = await self._status(key, "prolog", self._settings.prolog_head, env)
        self._ready[key] = not why
        if not why:
            return
        log.error("the prolog of job %s on the head failed: %s", job.display_id, why)
        self._controller.ask(lambda tx: _give_up(tx, key, why), lambda _result: None, keep=True)

    async def _run_epilog(self, key: Attempt, job: Job | None) -> None:
        if key not in self._environments:
            return
        env = self._environments[key] | (_exit_facts(job) if job is not None else {})
        why = await self._status(key, "epilog", self._settings.epilog_head, env)
        if why:
            log.error("the epilog of job %d on the head failed: %s", key[0], why)
        self._ready.pop(key, None)
        self._environments.pop(key, None)
        try:
            await asyncio.to_thread(_remove, self._folder, key)
        except OSError as error:  # the epilog has run, so it is not tried again
            log.error("cannot remove the record of job %d in %s: %s", key[0], self._folder, error.strerror)

    async def _status(self, key: Attempt, kind: Kind, program: str, env: dict[str, str]) -> str:
        """Run a script; return "" or why it failed."""
        if not program:
            return ""
        context = f"{kind}_slurmctld"
        async with self._turns:
            lock = await asyncio.to_thread(_locked, self._folder, key)
            try:
                return await run_program(
                    self._settings.prolog_epilog_timeout,
                    program,
                    env={**env, "SLURM_SCRIPT_CONTEXT": context, "HPCSCHED_SCRIPT_CONTEXT": context},
                    pass_fds=(lock,),
                )
            finally:
                os.close(lock)


async def run_program(
    limit_s: float, program: str, *args: str, env: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> str:
    """Run a program of the administrator on the head, bounded; return "" or why it failed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "hpcnode.os.program", str(limit_s), program, *args),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd="/",
        env=dict(env),
        start_new_session=True,
        pass_fds=pass_fds,
    )
    output, _ = await process.communicate()
    return output.decode(errors="replace") or ("" if process.returncode == 0 else "it was killed")


def _name(key: Attempt) -> str:
    return f"{key[0]}.{key[1]}"


def _write(folder: Path, key: Attempt, env: dict[str, str]) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    write_durably(str(folder), _name(key), json.dumps(env).encode(), parents=(str(folder.parent),))


def _remove(folder: Path, key: Attempt) -> None:
    for path in (folder / _name(key), folder / f"{_name(key)}.lock"):
        if path.is_dir() and not path.is_symlink():
            remove_tree(str(path))  # a damaged disk
        else:
            path.unlink(missing_ok=True)


def _locked(folder: Path, key: Attempt) -> int:
    """Return a locked file.

    Raises OSError: BlockingIOError if what an earlier controller has begun is not over.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    path = str(folder / f"{_name(key)}.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BlockingIOError(errno.EAGAIN, "a script of an earlier controller holds the lock", path) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _key_of(name: str) -> Attempt | None:
    """Return the attempt whose record has this name, None if no record has it."""
    job_id, _, attempt = name.partition(".")
    try:
        key = JobId(whole_number(job_id)), whole_number(attempt)
    except RequestError:
        return None
    return key if min(key) >= 0 and _name(key) == name else None


def _is_variable(name: str, value: object) -> bool:
    """Return whether a process can have this environment variable."""
    if not isinstance(value, str) or not name or "=" in name or "\0" in name + value or len(value) > MOST_CHARS:
        return False
    try:
        os.fsencode(name + value)
    except UnicodeEncodeError:
        return False
    return True


def _exit_facts(job: Job) -> dict[str, str]:
    if job.exit is None:
        return {}
    facts = {
        "JOB_EXIT_CODE": str(job.exit.code << 8 | job.exit.signal),
        "JOB_EXIT_CODE2": f"{job.exit.code}:{job.exit.signal}",
    }
    return {f"{prefix}_{name}": value for prefix in ("SLURM", "HPCSCHED") for name, value in facts.items()}


def _give_up(tx: Transaction, key: Attempt, why: str) -> None:
    """Requeue and hold a job whose prolog has failed; cancel it if a command waits for it."""
    job = tx.cluster.jobs.get(key[0])
    if job is None or job.attempt != key[1] or job.state is JobState.COMPLETING or not can(job, EndRequested):
        return
    again = job.spec.has_script
    said = f"the prolog on the head failed: {why}"
    tx.record(
        EndRequested(
            job_id=job.id,
            at_s=tx.now_s,
            outcome=JobState.NODE_FAIL if again else JobState.CANCELLED,
            by_uid=None,
            why=said,
            requeue=again,
            not_before_s=tx.now_s,
        )
    )
    if again:
        tx.record(Held(job_id=job.id, at_s=tx.now_s, hold=Hold.ADMIN, by_uid=CONTROLLER.uid))
