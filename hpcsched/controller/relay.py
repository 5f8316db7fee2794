"""Relay API requests of commands in jobs on nodes without the controller's socket.

Requests and answers go through the agent. The user of a request is the owner of the job in which
the command runs. The agent says which job that is, and only a node that holds the job may do so. No
relayed request has admin rights, because a compromised node must not be able to change the cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

from hpcnode.wire import gate, protocol
from hpcsched.api import web
from hpcsched.api.connection_limits import SocketLimits, retry_after
from hpcsched.errors import report_fault
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job
from hpcsched.state.cluster import ClusterState

# A job may change jobs, but nothing of the cluster. It may read all that its owner may see.
CHANGES = frozenset(
    f"/v1/{verb}"
    for verb in ("submit", "command", "test", "cancel", "hold", "release", "requeue", "suspend", "resume", "update")
)

Send = Callable[[NodeName, protocol.Message, bytes], None]
Answer = Callable[[web.Request], Awaitable[web.Response]]


class Relaying:
    """Answers the requests that agents relay for commands in jobs."""

    def __init__(
        self, cluster: ClusterState, send: Send, answer: Answer, socket_limits: SocketLimits | None = None
    ) -> None:
        self._cluster = cluster
        self._send = send
        self._answer = answer
        self._socket_limits = socket_limits or SocketLimits()
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, node: NodeName, said: protocol.FromStream, body: bytes) -> None:
        """Handle a request; its answer goes to the stream of the request."""
        request = protocol.read_as(protocol.ApiRequest, said.message)
        job = self._cluster.jobs.get(JobId(said.job_id))
        if job is None or said.attempt != job.attempt or node not in job.held_nodes:
            self._reply(
                node, said.stream, _refusal(403, f"cannot ask from {node}: job {said.job_id} does not run there")
            )
            return
        if request.method != "GET" and request.path not in CHANGES:
            why = f"cannot {request.method} {request.path} from {node}: only on the head node"
            self._reply(node, said.stream, _refusal(403, why))
            return
        wait_s = self._socket_limits.request_wait_s(job.uid)
        asked = _RelayedRequest()
        if wait_s is not None or not self._socket_limits.limits.may_hold(job.uid, asked, len(body)):
            self._socket_limits.limits.goes(job.uid, asked)
            self._send_away(node, said.stream, job.uid, wait_s or 0)
            return
        task = asyncio.get_running_loop().create_task(self._work(node, said.stream, job, request, body))

        def drop() -> None:
            task.cancel()
            self._send_away(node, said.stream, job.uid, 0)

        asked.on_drop = drop
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(done, job.uid, asked))

    def _send_away(self, node: NodeName, stream: int, uid: int, wait_s: float) -> None:
        refusal = _refusal(429, self._socket_limits.too_often(uid))
        self._reply(node, stream, replace(refusal, headers={"Retry-After": retry_after(wait_s)}))

    def _over(self, task: asyncio.Task[None], uid: int, asked: _RelayedRequest) -> None:
        self._tasks.discard(task)
        self._socket_limits.limits.goes(uid, asked)

    async def _work(self, node: NodeName, stream: int, job: Job, request: protocol.ApiRequest, body: bytes) -> None:
        path, _, query = request.path.partition("?")
        try:
            asked = web.Request(request.method, path, web.read_query(query), {}, body, peer=None, uid=job.uid)
            answer = await self._answer(asked)
        except (UnicodeError, gate.GateError) as error:
            answer = _refusal(400, f"cannot read the request: {error}")
        except web.BadRequestError as error:
            answer = _refusal(error.status, f"cannot {request.method} {path}: {error}")
        except Exception as error:  # handlers return their errors as answers; this one failed to
            answer = _refusal(500, str(report_fault(error, f"answer {request.method} {path[:200]!r}")))
        if len(answer.body) > protocol.MAX_BLOB_BYTES:
            answer = _refusal(413, "cannot answer to a node: the answer is too long; ask for fewer jobs")
        self._reply(node, stream, answer)

    def _reply(self, node: NodeName, stream: int, answer: web.Response) -> None:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        message = protocol.to_json(protocol.ApiAnswer(status=answer.status, headers=headers))
        self._send(node, protocol.ToStream(stream=stream, message=message), answer.body)
        self._send(node, protocol.CloseStream(stream=stream), b"")


class _RelayedRequest:
    """A relayed request, as the connection limits count it."""

    is_busy = is_lasting = True
    unread_bytes = 0

    def __init__(self) -> None:
        self.on_drop: Callable[[], object] = lambda: None

    def drop(self) -> None:
        self.on_drop()


def _refusal(status: int, why: str) -> web.Response:
    kind = "PermissionDeniedError" if status == 403 else "RequestError"
    return web.Response(json.dumps({"error": why, "kind": kind}).encode(), status)
