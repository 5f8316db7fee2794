"""The API for commands in jobs on nodes that the controller's socket is not on: requests come and go through the agent.

Who asks is the owner of the job that the command runs in: the agent says which job that is, and only a node that holds the
job may. Nobody is an admin this way: a node that has been taken over must not be able to change the cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from hpcnode import protocol
from hpcsched.api import web
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job
from hpcsched.store.world import World

log = logging.getLogger("hpcsched.relaying")

# What a job may ask to be changed: jobs, and nothing of the cluster. To look at, there is all that its owner may see.
CHANGES = frozenset(
    f"/v1/{verb}" for verb in ("submit", "test", "cancel", "hold", "release", "requeue", "suspend", "resume", "update")
)

Send = Callable[[NodeName, protocol.Message, bytes], None]
Answer = Callable[[web.Request], Awaitable[web.Response]]


class Relaying:
    """Answers what agents pass on from their jobs' commands."""

    def __init__(self, world: World, send: Send, answer: Answer) -> None:
        self._world = world
        self._send = send
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, node: NodeName, said: protocol.FromStream, body: bytes) -> None:
        """Take a request; its answer goes to the stream that it came by."""
        request = protocol.from_json(said.message)
        job = self._world.jobs.get(JobId(said.job_id))
        if job is None or said.attempt != job.attempt or node not in job.held_nodes:
            self._reply(
                node, said.stream, _refusal(403, f"cannot ask from {node}: job {said.job_id} does not run there")
            )
            return
        if request.method != "GET" and request.path not in CHANGES:
            why = f"cannot {request.method} {request.path} from {node}: only on the head node"
            self._reply(node, said.stream, _refusal(403, why))
            return
        task = asyncio.get_running_loop().create_task(self._work(node, said.stream, job, request, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, node: NodeName, stream: int, job: Job, request: protocol.ApiRequest, body: bytes) -> None:
        path, _, query = request.path.partition("?")
        values = dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape")) if query else {}
        asked = web.Request(request.method, path, values, {}, body, peer=None, uid=job.uid)
        try:
            answer = await self._answer(asked)
        except web.BadRequestError as error:
            answer = _refusal(error.status, f"cannot {request.method} {path}: {error}")
        except Exception:  # handlers answer for their errors; this is one that did not
            log.exception("cannot answer %s %s", request.method, path)
            answer = _refusal(500, "the controller failed at this request: see its log")
        if len(answer.body) > protocol.MAX_BLOB_BYTES:
            answer = _refusal(413, "cannot answer to a node: the answer is too long; ask for fewer jobs")
        self._reply(node, stream, answer)

    def _reply(self, node: NodeName, stream: int, answer: web.Response) -> None:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        message = protocol.to_json(protocol.ApiAnswer(status=answer.status, headers=headers))
        self._send(node, protocol.ToStream(stream=stream, message=message), answer.body)
        self._send(node, protocol.CloseStream(stream=stream), b"")


def _refusal(status: int, why: str) -> web.Response:
    kind = "PermissionDeniedError" if status == 403 else "RequestError"
    return web.Response(json.dumps({"error": why, "kind": kind}).encode(), status)
