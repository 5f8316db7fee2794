"""Files of a job's directory: whose they are, and what a node may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity
from hpcsched.auth.tokens import actions_of
from hpcsched.controller.views.backend import ControllerBackend
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError


class Nodes:
    """Answers what the node is asked."""

    def __init__(self, answer: Callable[[Any], tuple[protocol.Message, bytes]]) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def call(self, node: str, make: Callable[[int], Any], timeout_s: float) -> tuple[protocol.Message, bytes]:
        self.asked.append(make(7))
        return self.answer(self.asked[-1])


def files_of(count: int) -> protocol.FileList:
    return protocol.FileList(7, [(f"f{at:03}", "file", at, 1.0) for at in range(count)], True)


def backend(cluster: Cluster, nodes: Nodes) -> ControllerBackend:
    found = cluster.backend()
    found._fleet = nodes  # type: ignore[assignment]
    return found


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("n1")


@pytest.fixture
def job(cluster: Cluster) -> int:
    job = cluster.submit(ANN, work_dir="/home/ann/run")
    cluster.run(job)
    return job


def test_the_files_are_asked_for_below_the_directory_of_the_job(cluster: Cluster, job: int) -> None:
    nodes = Nodes(lambda asked: (files_of(3), b""))
    found = asyncio.run(backend(cluster, nodes).files(ANN, {"job": str(job), "path": "out", "limit": "2"}))
    assert (nodes.asked[0].beneath, nodes.asked[0].path, nodes.asked[0].limit) == ("/home/ann/run", "out", 2)
    assert [one["name"] for one in found["files"]] == ["f000", "f001"]  # a node sends more than it was asked for
    assert found["next"] == "f001"


def test_a_part_of_a_file_says_how_much_there_is(cluster: Cluster, job: int) -> None:
    nodes = Nodes(lambda asked: (protocol.FileData(7, 2, 10), b"abc"))
    part = asyncio.run(backend(cluster, nodes).file(ANN, {"job": str(job), "path": "a/b", "offset": "2"}))
    assert (part.data, part.offset, part.size, part.ended) == (b"abc", 2, 10, False)
    assert (nodes.asked[0].beneath, nodes.asked[0].path) == ("/home/ann/run", "a/b")


@pytest.mark.parametrize("identity", [BOB, ROOT, replace(ANN, scope=actions_of(["read", "manage"]))])
def test_nobody_else_sees_the_files_and_no_token_that_cannot_submit(
    cluster: Cluster, job: int, identity: Identity
) -> None:
    nodes = Nodes(lambda asked: (files_of(1), b""))
    for ask in (backend(cluster, nodes).files, backend(cluster, nodes).file):
        with pytest.raises(PermissionDeniedError):
            asyncio.run(ask(identity, {"job": str(job), "path": "a"}))
    assert nodes.asked == []


@pytest.mark.parametrize("path", ["..", "a/..", "/etc", "a//b", ".", "a/./b", "x" * 2000])
def test_a_path_that_leaves_the_directory_never_reaches_the_node(cluster: Cluster, job: int, path: str) -> None:
    nodes = Nodes(lambda asked: (files_of(1), b""))
    for ask in (backend(cluster, nodes).files, backend(cluster, nodes).file):
        with pytest.raises(RequestError, match="below the job's directory"):
            asyncio.run(ask(ANN, {"job": str(job), "path": path}))
    assert nodes.asked == []


def test_a_job_that_has_not_started_has_no_files(cluster: Cluster) -> None:
    job = cluster.submit(ANN, hold=True)
    with pytest.raises(RequestError, match="has not started"):
        asyncio.run(backend(cluster, Nodes(lambda asked: (files_of(1), b""))).files(ANN, {"job": str(job)}))


@pytest.mark.parametrize(
    "answer", [protocol.Pong(7), protocol.Facts(7, {}), protocol.FileList(7, error="cannot list it")]
)
def test_another_answer_of_a_node_is_an_error_and_no_crash(
    cluster: Cluster, job: int, answer: protocol.Message
) -> None:
    nodes = Nodes(lambda asked: (answer, b"data"))
    for ask in (backend(cluster, nodes).files, backend(cluster, nodes).file):
        with pytest.raises(NotFoundError, match="on n1"):
            asyncio.run(ask(ANN, {"job": str(job), "path": "a"}))
