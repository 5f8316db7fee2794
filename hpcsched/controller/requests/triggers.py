"""Set, clear and run triggers.

Users set and clear them. The changes of a tick make them due. The daemon runs their programs after the commit.

A trigger is deleted, or armed again, in the same commit as the change that it waited for. So it runs at most once for an event,
and not at all if the controller is killed between the commit and the program. Source: strigger(1).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpcnode.os.trust import check_path
from hpcsched.auth.authorize import Action, Identity, Owner, allows, authorize
from hpcsched.controller.requests.job_ids import find_jobs
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError
from hpcsched.lifecycle.job import limit_at_s
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import FINAL, Job
from hpcsched.model.node import Link, Node, Power
from hpcsched.model.trigger import JOB_EVENTS, MAX_OFFSET_S, MAX_TRIGGERS, MAX_TRIGGERS_PER_USER, Trigger, TriggerEvent
from hpcsched.model.units import whole_number
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

log = logging.getLogger("hpcsched.triggers")

ANY_NODE = "*"
MAX_WORDS = 64
MAX_PROGRAM_BYTES = 4096
AT_ONCE = 8
AT_ONCE_OF_USER = 2
QUEUED = 1_000  # further ones are not run, which is logged
QUEUED_OF_USER = 100
PROGRAM_S = 300.0
PATH = "/usr/local/bin:/usr/bin:/bin"


def create(tx: Transaction, identity: Identity, body: dict[str, Any]) -> Trigger:
    """Set a trigger.

    `body`: event, target (a job, a node, or "" for any node), offset_s, program, permanent.
    """
    cluster = tx.cluster
    try:
        event = TriggerEvent(str(body.get("event")))
    except ValueError:
        known = ", ".join(TriggerEvent)
        raise RequestError(f"cannot set a trigger for {str(body.get('event'))[:40]!r}: there are {known}") from None
    mine = sum(trigger.uid == identity.uid for trigger in cluster.triggers.values())
    if len(cluster.triggers) >= MAX_TRIGGERS or mine >= MAX_TRIGGERS_PER_USER:
        raise RequestError(
            f"cannot set a trigger: you have {mine} of at most {MAX_TRIGGERS_PER_USER}, all users together "
            f"{len(cluster.triggers)} of at most {MAX_TRIGGERS}; clear some with strigger --clear"
        )
    offset_s = body.get("offset_s", 0)
    if type(offset_s) is not int or not 0 <= offset_s <= MAX_OFFSET_S:
        raise RequestError(f"cannot set a trigger: the offset must be 0 to {MAX_OFFSET_S} seconds")
    account = cluster.config.controller.user
    if account is not None and identity.user != account:
        raise PermissionDeniedError(
            f"cannot set a trigger: the controller runs as {account}, not as root, and can start programs as that account only; "
            f"an admin can set it: sudo -u {account} strigger ..."
        )
    made = Trigger(
        id=max(cluster.triggers, default=0) + 1,
        uid=identity.uid,
        user=identity.user,
        event=event,
        target=_target(cluster, identity, event, str(body.get("target") or "")),
        offset_s=offset_s,
        program=_program(body.get("program")),
        is_permanent=body.get("permanent") is True and event not in JOB_EVENTS,
    )
    tx.set_trigger(made.id, made)
    return made


def _target(cluster: ClusterState, identity: Identity, event: TriggerEvent, target: str) -> str:
    if event not in JOB_EVENTS:
        if target and target not in cluster.nodes:
            raise NotFoundError(f"cannot set a trigger: Invalid node name specified: {target[:60]}")
        return target or ANY_NODE
    jobs = find_jobs(cluster, target, identity.uid)
    if len(jobs) > 1:
        raise RequestError(f"cannot set a trigger for array {target[:40]}: name one of its {len(jobs)} tasks")
    authorize(identity, Action.SET_TRIGGER, jobs[0], f"set a trigger for job {jobs[0].display_id}")
    if jobs[0].state in FINAL:
        raise RequestError(f"cannot set a trigger: job {jobs[0].display_id} has already ended")
    return str(jobs[0].id)


def _program(words: Any) -> tuple[str, ...]:
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise RequestError("cannot set a trigger: the program must be a list of words")
    if len(words) > MAX_WORDS or sum(len(word.encode("utf-8", "replace")) for word in words) > MAX_PROGRAM_BYTES:
        raise RequestError(
            f"cannot set a trigger: the program has more than {MAX_WORDS} words or {MAX_PROGRAM_BYTES} bytes"
        )
    if not words[0].startswith("/"):
        raise RequestError(f"cannot set a trigger: {words[0][:60]!r} is not an absolute path")
    return tuple(words)


def clear(tx: Transaction, identity: Identity, number: int | None, target: str, user: str) -> list[int]:
    """Delete triggers by number, by job or node, or by user; return their numbers."""
    wanted = [
        trigger
        for trigger in tx.cluster.triggers.values()
        if (number is None or trigger.id == number) and target in ("", trigger.target) and user in ("", trigger.user)
    ]
    mine = [
        trigger for trigger in wanted if allows(identity, Action.SET_TRIGGER, Owner(uid=trigger.uid, user=trigger.user))
    ]
    if not wanted:
        raise NotFoundError("cannot clear a trigger: there is no such one; see strigger --get")
    if not mine:
        owner = Owner(uid=wanted[0].uid, user=wanted[0].user)
        authorize(identity, Action.SET_TRIGGER, owner, f"clear trigger {wanted[0].id}")
    for trigger in mine:
        tx.set_trigger(trigger.id, None)
    return [trigger.id for trigger in mine]


def views(cluster: ClusterState, identity: Identity) -> list[dict[str, Any]]:
    """Return the triggers as JSON; if jobs are private, those that the user may see.

    The words of a program may have a secret: others see None.
    """
    return [
        {
            "id": trigger.id,
            "type": "job" if trigger.is_of_job else "node",
            "target": trigger.target,
            "event": trigger.event.value,
            "offset_s": trigger.offset_s,
            "user": trigger.user,
            "permanent": trigger.is_permanent,
            "program": list(trigger.program) if allows(identity, Action.VIEW_DETAILS, owner) else None,
        }
        for trigger in cluster.triggers.values()
        if allows(identity, Action.VIEW_JOBS, owner := Owner(uid=trigger.uid, user=trigger.user))
    ]


def keep_up(tx: Transaction) -> list[Trigger]:
    """Record which triggers had their event; return the due ones.

    Their programs run after the commit.
    """
    due: list[Trigger] = []
    before = tx.nodes_before()
    for trigger in list(tx.cluster.triggers.values()):
        found = tx.attempt(f"look at trigger {trigger.id}", partial(_look_at, trigger=trigger, before=before))
        if isinstance(found, Trigger):
            due.append(found)
    return due


def _look_at(tx: Transaction, trigger: Trigger, before: Mapping[NodeName, Node]) -> Trigger | None:
    if not trigger.due_at_s:
        event = next(_events(tx, trigger, before), None)
        if event is not None:
            trigger = replace(trigger, hit=event[0], due_at_s=event[1])
            tx.set_trigger(trigger.id, trigger)
    if not trigger.due_at_s or trigger.due_at_s > tx.now_s:
        return None
    armed = replace(trigger, due_at_s=0.0, hit="") if trigger.is_permanent else None
    tx.set_trigger(trigger.id, armed)
    return trigger


def _events(tx: Transaction, trigger: Trigger, nodes_before: Mapping[NodeName, Node]) -> Iterator[tuple[str, float]]:
    """Yield the targets of the trigger's events, and when its program is due for each."""
    if trigger.is_of_job:
        job = tx.cluster.jobs.get(JobId(whole_number(trigger.target)))
        if trigger.event is TriggerEvent.JOB_END and (job is None or job.state in FINAL):
            yield trigger.target, tx.now_s + trigger.offset_s
        elif job is not None and job.state not in FINAL and trigger.event is TriggerEvent.TIME_LIMIT:
            limit_s = limit_at_s(job)
            if limit_s is not None and limit_s - trigger.offset_s <= tx.now_s:
                yield trigger.target, tx.now_s
        return
    for name, before in nodes_before.items():
        after = tx.cluster.nodes.get(name)
        if after is not None and trigger.target in (ANY_NODE, name) and _has_come(trigger.event, before, after):
            yield name, tx.now_s + trigger.offset_s


def _has_come(event: TriggerEvent, before: Node, after: Node) -> bool:
    if before.power is not Power.ON and (after.power is not Power.ON or after.link is Link.UP):
        return False  # it was switched off and on to save power
    match event:
        case TriggerEvent.NODE_DOWN:
            return before.link is not Link.DOWN and after.link is Link.DOWN
        case TriggerEvent.NODE_UP:
            return before.link is Link.DOWN and after.link is Link.UP
        case TriggerEvent.NODE_DRAINED:
            return after.drained and not before.drained
        case _:
            return False


def next_time_s(cluster: ClusterState, now_s: float) -> float | None:
    """Return when the next trigger is due by time alone, or None."""
    times_s = [trigger.due_at_s for trigger in cluster.triggers.values()]
    for trigger in cluster.triggers.values():
        if trigger.event is TriggerEvent.TIME_LIMIT:
            job: Job | None = cluster.jobs.get(JobId(whole_number(trigger.target)))
            limit_s = limit_at_s(job) if job is not None and job.state not in FINAL else None
            times_s += [] if limit_s is None else [limit_s - trigger.offset_s]
    return min((at_s for at_s in times_s if at_s > now_s), default=None)


# ----- trigger programs: they run on the head as the users who set them, a few at a time, each with
# a timeout


class TriggerPrograms:
    """The running trigger programs, and those that wait in line."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._turns_of_users: dict[int, asyncio.Semaphore] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}  # and the user's number

    def run(self, trigger: Trigger) -> None:
        """Run the program of a trigger, with the event's target as its last argument."""
        of_user = sum(uid == trigger.uid for uid in self._tasks.values())
        if len(self._tasks) >= QUEUED or of_user >= QUEUED_OF_USER:
            waiting = f"{of_user} programs of {trigger.user}, and {len(self._tasks)} of all users, wait or run already"
            log.error("cannot run the program of trigger %d: %s", trigger.id, waiting)
            return
        turns = self._turns_of_users.setdefault(trigger.uid, asyncio.Semaphore(AT_ONCE_OF_USER))
        task = asyncio.get_running_loop().create_task(self._run(trigger, turns))
        self._tasks[task] = trigger.uid
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        uid = self._tasks.pop(task)
        if uid not in self._tasks.values():
            del self._turns_of_users[uid]

    async def _run(self, trigger: Trigger, turns_of_user: asyncio.Semaphore) -> None:
        async with turns_of_user, self._turns:
            try:
                status = await _status_of([*trigger.program, trigger.hit], trigger.uid)
            except (OSError, KeyError, subprocess.SubprocessError) as error:
                log.warning("cannot run the program of trigger %d of %s: %s", trigger.id, trigger.user, error)
                return
        if status:
            log.warning("the program of trigger %d of %s ended with status %d", trigger.id, trigger.user, status)
        else:
            log.info("ran the program of trigger %d of %s", trigger.id, trigger.user)


async def _status_of(command: list[str], uid: int) -> int:
    account = pwd.getpwuid(uid)
    await asyncio.to_thread(check_path, command[0], uid)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={
            "PATH": PATH,
            "HOME": account.pw_dir,
            "USER": account.pw_name,
            "LOGNAME": account.pw_name,
            "SHELL": "/bin/sh",
        },
        start_new_session=True,
        **_as_user(account),
    )
    try:
        return await asyncio.wait_for(process.wait(), PROGRAM_S)
    except TimeoutError:
        os.killpg(process.pid, 9)
        await process.wait()
        raise subprocess.TimeoutExpired(command, PROGRAM_S) from None


def _as_user(account: pwd.struct_passwd) -> dict[str, Any]:
    """Return Popen arguments that run a process as the account; empty if we already are it.

    Raises: PermissionError.
    """
    if account.pw_uid == os.geteuid():
        return {}
    if os.geteuid() != 0:
        raise PermissionError(f"the controller does not run as root, so it cannot become {account.pw_name}")
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups, "umask": 0o022}
