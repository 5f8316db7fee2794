"""Requests that a node passes on: answered as the job's owner, never as an admin, and only to a node that has the job."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from cluster import Cluster

from hpcnode.wire import protocol
from hpcsched.api import web
from hpcsched.controller.relay import Relaying
from hpcsched.model.ids import NodeName


class Wire:
    """What is sent to nodes, and what the API was asked."""

    def __init__(self, cluster: Cluster, body: bytes = b"{}") -> None:
        self.sent: list[tuple[str, Any, bytes]] = []
        self.asked: list[web.Request] = []
        self.body = body
        self.relaying = Relaying(
            cluster.state, lambda node, message, blob: self.sent.append((node, message, blob)), self.answer
        )

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        if request.path == "/v1/nowhere":
            raise web.BadRequestError(404, "Not Found")
        return web.Response(self.body)

    def told(
        self, node: str, job_id: int, method: str, path: str, *, attempt: int = 0, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Have a node pass on a request; return status and body of the answer."""
        inner = protocol.to_json(protocol.ApiRequest(job_id=job_id, method=method, path=path))
        said = protocol.FromStream(stream=7, uid=4242, job_id=job_id, attempt=attempt, message=inner)

        async def run() -> None:
            self.relaying.told(NodeName(node), said, body)
            await asyncio.sleep(0)
            await asyncio.gather(*self.relaying._tasks)

        asyncio.run(run())
        (to, wrapped, blob), (_, closing, _) = self.sent[-2:]
        assert (to, wrapped.stream, closing) == (node, 7, protocol.CloseStream(stream=7))
        return protocol.from_json(wrapped.message).status, blob


@pytest.fixture
def cluster() -> Cluster:
    """Job 1 of ann has n1; n2 is idle."""
    made = Cluster("n1", "n2")
    made.submit()
    return made


def test_who_asks_is_the_owner_of_the_job_whatever_the_node_says_of_the_uid(cluster: Cluster) -> None:
    wire = Wire(cluster, b'{"jobs": []}')
    assert wire.told("n1", 1, "GET", "/v1/jobs?id=1&user=a%20b") == (200, b'{"jobs": []}')
    (request,) = wire.asked
    assert (request.uid, request.peer, request.path, request.query) == (
        1000,
        None,
        "/v1/jobs",
        {"id": "1", "user": "a b"},
    )
    assert wire.told("n1", 1, "POST", "/v1/requeue", body=b'{"jobs": ["1"]}')[0] == 200
    assert wire.asked[-1].body == b'{"jobs": ["1"]}'


@pytest.mark.parametrize(
    ("node", "job_id", "attempt"),
    [("n2", 1, 0), ("n1", 2, 0), ("n1", 1, 1)],
    ids=["not there", "no such", "another attempt"],
)
def test_a_node_that_has_not_the_job_is_refused(node: str, job_id: int, attempt: int, cluster: Cluster) -> None:
    wire = Wire(cluster)
    status, body = wire.told(node, job_id, "GET", "/v1/jobs", attempt=attempt)
    assert (status, wire.asked) == (403, [])
    assert "does not run there" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "path", ["/v1/backup", "/v1/reconfigure", "/v1/nodes/drain", "/v1/strays/end", "/v1/usage/reset"]
)
def test_nothing_of_the_cluster_is_changed_from_a_node(path: str, cluster: Cluster) -> None:
    wire = Wire(cluster)
    assert (wire.told("n1", 1, "POST", path)[0], wire.asked) == (403, [])


def test_what_the_api_refuses_and_what_is_too_long_are_answers(cluster: Cluster) -> None:
    assert Wire(cluster).told("n1", 1, "GET", "/v1/nowhere")[0] == 404
    assert Wire(cluster, b"x" * (protocol.MAX_BLOB_BYTES + 1)).told("n1", 1, "GET", "/v1/jobs")[0] == 413
