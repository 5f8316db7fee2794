"""Prepare the steps that the gateway opens for users.

Such a step is a terminal in a job, or has the connections to what the job serves.

The API proves and authorizes the request of a user, and answers with a key. A connection to the steps socket that begins with
this key is the step command of that user, for the one step that was prepared. So the gateway can name neither a user nor a
command. `HeadStreams` asks every few seconds whether the step may go on: a revoked session, an expired token or a lost role
ends it.

Rules: a key works once, within `KEY_S`. Keys of a user and steps of a credential are limited. The step runs on one node of the
job, with nothing of the head's environment.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcnode.wire import protocol
from hpcsched.api.identity import identity_of
from hpcsched.auth.authorize import Action, Identity, allows, authorize
from hpcsched.auth.tokens import hash_of
from hpcsched.errors import RequestError, UnauthenticatedError, UnavailableError
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState
from hpcsched.model.service import Service
from hpcsched.state.cluster import ClusterState

KEY_S = 20.0
MAX_KEYS_PER_USER = 32
MAX_STEPS_PER_CREDENTIAL = 16
MAX_STEPS_PER_SERVICE = 256
MAX_ROWS, MAX_COLUMNS = 100, 300
SHELL = ("sh", "-c", 'cd; exec "${SHELL:-/bin/sh}" -l')
TERMINAL_ENVIRONMENT = {"TERM": "linux", "LANG": "C.UTF-8"}  # what the gateway's screen understands
FIELDS = frozenset({"job", "terminal", "node", "rows", "columns"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedJob:
    """A step that was prepared for a user.

    `credential_id` "": asked for on the head, without a credential, or for a replica of `service`.
    """

    identity: Identity
    credential_id: str
    job_id: JobId
    request: protocol.StepRequest
    until_s: float
    service: str = ""  # of a replica: the connections of all who may ask it


class Reaches:
    """The steps that were prepared, by the hashes of their keys."""

    def __init__(self, cluster: ClusterState, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._waiting: dict[str, ReachedJob] = {}
        self._open: dict[int, ReachedJob] = {}  # by the number of the stream

    def prepare(self, identity: Identity, job: Job, body: Mapping[str, Any], credential_id: str) -> str:
        """Return the key of a new step.

        Raises PermissionDeniedError, RequestError, UnavailableError.
        """
        authorize(identity, Action.REACH_JOB, job, f"reach job {job.display_id}")
        if job.state is not JobState.RUNNING:
            raise RequestError(f"cannot reach job {job.display_id}: it is {job.state}, not RUNNING")
        if self._cluster.config.controller.sign_jobs:
            raise RequestError(
                f"cannot reach job {job.display_id} in a browser: users of this cluster sign each step (sign_jobs in "
                "hpcsched.toml); use hsh and htunnel on the head"
            )
        reach = ReachedJob(
            identity=identity,
            credential_id=credential_id,
            job_id=job.id,
            request=step_request(job, body),
            until_s=self._clock() + KEY_S,
        )
        return self._key_of(reach, f"job {job.display_id}")

    def prepare_replica(self, service: Service, job: Job) -> str:
        """Return the key of connections to a replica, which the gateway asks for.

        They are the owner's. For each request the gateway asks besides whether its user may use the service.

        Raises UnavailableError.
        """
        reach = ReachedJob(
            identity=identity_of(service.uid, self._cluster.config.access).as_user(),
            credential_id="",
            job_id=job.id,
            request=step_request(job, {}),
            until_s=self._clock() + KEY_S,
            service=service.name,
        )
        return self._key_of(reach, f"service {service.name}")

    def _key_of(self, reach: ReachedJob, what: str) -> str:
        """Keep a step until it begins, and return its key. Raises UnavailableError."""
        now_s = self._clock()
        self._waiting = {key: one for key, one in self._waiting.items() if one.until_s > now_s}
        whose = reach.identity.uid, reach.service
        if sum((one.identity.uid, one.service) == whose for one in self._waiting.values()) >= MAX_KEYS_PER_USER:
            raise UnavailableError(f"cannot reach {what}: {MAX_KEYS_PER_USER} of your requests wait")
        key = secrets.token_urlsafe(32)
        self._waiting[hash_of(key)] = reach
        return key

    def begin(self, stream: int, key: str) -> ReachedJob:
        """Return the step of a key, and note that it runs on a stream.

        Raises UnauthenticatedError, UnavailableError.
        """
        found = self._waiting.pop(hash_of(key), None)
        if found is None or found.until_s <= self._clock():
            raise UnauthenticatedError("cannot start the step: its key is unknown, used or too old; ask the API again")
        mine = [one for one in self._open.values() if _owner(one) == _owner(found)]
        most = MAX_STEPS_PER_SERVICE if found.service else MAX_STEPS_PER_CREDENTIAL
        if len(mine) >= most:
            whose = f"to service {found.service}" if found.service else "of this session"
            raise UnavailableError(
                f"cannot start the step: {most} terminals and connections {whose} are open; close one"
            )
        self._open[stream] = found
        return found

    def end(self, stream: int) -> None:
        """Note that a stream has closed."""
        self._open.pop(stream, None)

    def why_over(self, stream: int) -> str:
        """Return why the step of a stream must end now, "" if it may go on."""
        reach = self._open.get(stream)
        if reach is None:
            return ""
        if reach.credential_id:
            credential = self._cluster.credentials.get(reach.credential_id)
            if credential is None:
                return "its credential is gone"
            if why := credential.why_invalid(self._clock()):
                return f"its {credential.kind} {why}"
        if reach.service and not self._is_replica(reach):
            return f"it is not a replica of service {reach.service} any more"
        job = self._cluster.jobs.get(reach.job_id)
        now = identity_of(reach.identity.uid, self._cluster.config.access)
        if job is not None and not allows(replace(now, scope=reach.identity.scope), Action.REACH_JOB, job):
            return f"{now.user} may not reach the job any more"
        return ""

    def _is_replica(self, reach: ReachedJob) -> bool:
        service = self._cluster.services.get(reach.service)
        return service is not None and reach.job_id in {one.job_id for one in service.replicas}


def _owner(reach: ReachedJob) -> tuple[int, str, str]:
    return reach.identity.uid, reach.credential_id, reach.service


def step_request(job: Job, body: Mapping[str, Any]) -> protocol.StepRequest:
    """Return the request of a terminal, or of connections to what the job serves.

    Raises RequestError.
    """
    if unknown := body.keys() - FIELDS:
        raise RequestError(
            f"cannot reach the job: unknown field {min(unknown)[:40]!r}; there are {', '.join(sorted(FIELDS))}"
        )
    is_terminal, node = body.get("terminal", False), body.get("node", "") or job.shares[0].node
    rows, columns = body.get("rows", 24), body.get("columns", 80)
    whole = all(type(value) is int for value in (rows, columns))
    if type(is_terminal) is not bool or not whole or not (1 <= rows <= MAX_ROWS and 1 <= columns <= MAX_COLUMNS):
        raise RequestError(
            f"cannot reach the job: terminal is true or false, rows 1 to {MAX_ROWS}, columns 1 to {MAX_COLUMNS}"
        )
    if not isinstance(node, str) or node not in {share.node for share in job.shares}:
        raise RequestError(f"cannot reach job {job.display_id} on {str(node)[:80]!r}: that is none of its nodes")
    argv = ["hpty", f"{rows}x{columns}", *SHELL] if is_terminal else ["htun", "served"]
    return protocol.StepRequest(
        version=protocol.VERSION,
        job_id=job.id,
        options={
            "overlap": True,
            "overcommit": True,
            "nodes": "1",
            "ntasks": "1",
            "nodelist": node,
            "job-name": "terminal" if is_terminal else "served",
        },
        argv=argv,
        work_dir="/",
        env=dict(TERMINAL_ENVIRONMENT) if is_terminal else {},
    )
