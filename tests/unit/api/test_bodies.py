"""What a request's body may not be: refused before anything of it is done."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import played

from hpcsched.api import web
from hpcsched.api.web import Bodies
from hpcsched.auth.authorize import AccessPolicy
from hpcsched.controller.views.routes import MAX_JOBS, make_server
from hpcsched.errors import RequestError
from hpcsched.model.spec import JobSpec

JOB = {"name": "x", "script": "#!/bin/sh\n", "work_dir": "/tmp"}


async def _submit(identity: Any, request_id: str, specs: list[Any]) -> dict[str, Any]:
    if request_id == "second is wrong":
        error = RequestError("cannot do it")
        error.at = 1
        raise error
    return {"jobs": [{"job_id": 1, "tasks": 1}] * len(specs), "notes": []}


async def _drain(identity: Any, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    if body["nodes"] == "n9":
        raise RequestError("Invalid node name specified: n9")
    return {"nodes": [body["nodes"]]}


def _request(body: bytes) -> web.Request:
    return web.Request(method="POST", path="/v1/submit", query={}, headers={}, body=body, peer=None)


def _post(body: bytes, path: str = "/v1/submit") -> dict[str, Any]:
    """Return the answer to a request with this body."""

    async def play() -> bytes:
        coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        coming.set_result(SimpleNamespace(submit=_submit, act_on_nodes=_drain))
        server = make_server(SimpleNamespace(access=AccessPolicy), coming)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: web.Connection(server), theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(
            f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        answer = await reader.read()
        writer.close()
        await server.close()
        return answer.partition(b"\r\n\r\n")[2]

    answer: dict[str, Any] = json.loads(asyncio.run(asyncio.wait_for(play(), 60)))
    return answer


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"jobs":[{"name":"x","name":"y","script":"#!/bin/sh","work_dir":"/tmp"}]}', "a field is there twice"),
        (b'{"jobs":[],"jobs":[]}', "a field is there twice"),
        (json.dumps({"jobs": [JOB] * (MAX_JOBS + 1)}).encode(), f"cannot submit {MAX_JOBS + 1} jobs at once"),
        (b'{"jobs":' + b"[" * 100_000, "cannot read the request"),
        (b'{"jobs":[]} {}', "Extra data"),
    ],
)
def test_d2_a_body_that_is_ambiguous_or_too_much_is_refused(body: bytes, why: str) -> None:
    assert why in _post(body)["error"]


def test_as_many_jobs_as_are_allowed_are_taken() -> None:
    assert len(_post(json.dumps({"jobs": [JOB] * MAX_JOBS}).encode())["jobs"]) == MAX_JOBS


def test_which_of_many_jobs_is_refused_is_in_the_answer() -> None:
    answer = _post(json.dumps({"request_id": "second is wrong", "jobs": [JOB] * 3}).encode())
    assert (answer["error"], answer["at"]) == ("cannot do it", 1)


def test_jobs_of_a_refused_submission_do_not_wait_for_the_garbage_collector() -> None:
    def specs() -> int:
        return sum(type(item) is JobSpec for item in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = specs()
        _post(json.dumps({"request_id": "second is wrong", "jobs": [JOB] * 3}).encode())
        assert specs() == before
    finally:
        gc.enable()


def test_the_log_says_who_changed_what_is_of_no_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hpcsched.api")
    for node in ("n1", "n9"):
        _post(f'{{"nodes":"{node}","why":"a\\u001b[31m fan"}}'.encode(), "/v1/nodes/drain")
    _post(json.dumps({"jobs": [JOB]}).encode())
    (line,) = caplog.messages
    assert line == f"uid {os.getuid()}: /v1/nodes/drain " + r"""b'{"nodes":"n1","why":"a\\u001b[31m fan"}'"""


LARGE = 30 << 10  # characters of each job's script


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        (b"[],[]," * 3_500_000 + b"[]", "cannot read the request: it has more than 1000000 values"),
        (b"{}," * 300_000 + b"{}", f"cannot read the request: 300001 jobs at once: the most is {MAX_JOBS}"),
        (b"[" * 200 + b"]" * 200 + b',"' + b"x" * (4 << 20) + b'"', "it is nested more than 100 deep"),
        (b'{"name":"x","name":"y"},"' + b"x" * (4 << 20) + b'"', "a field is there twice"),
        (b'{"env":[' + b"1," * 600_000 + b"1]}", "it has more than 250000 values"),
        (b'"' + b'\\"' * (4 << 20), "Unterminated string"),
        (b"1,", "the body must be"),
    ],
    ids=["values", "jobs", "depth", "twice", "values of a job", "no end", "small"],
)
def test_a_large_body_is_refused_before_its_values_are_made(jobs: bytes, why: str) -> None:
    if jobs == b"1,":
        jobs = b"1"
        answer = _post(b'{"jobs":{"x":' + jobs + b"}}")
    else:
        answer = _post(b'{"request_id":"a","jobs":[' + jobs + (b"" if why.startswith("Unter") else b"]}"))
    assert why in answer["error"]


def test_a_large_submission_is_taken_as_a_small_one() -> None:
    jobs = [JOB | {"name": f"j{i}", "script": "#!/bin/sh\n# \N{SNOWMAN}\n" + "x" * LARGE} for i in range(200)]
    body = json.dumps({"request_id": "a", "jobs": jobs}).encode()
    assert len(body) > 4 << 20
    assert _post(body)["jobs"] == [{"job_id": 1, "tasks": 1}] * 200


def test_parts_of_a_large_body_say_what_it_says() -> None:
    jobs = [{"name": f"j{i}", "script": '\N{SNOWMAN}"\\"' + "x" * LARGE, "env": {"A": "\udcff"}} for i in range(200)]
    body = json.dumps({"request_id": "a", "jobs": jobs}).encode()
    found = asyncio.run(Bodies(json.loads, MAX_JOBS).read(0, _request(body)))
    assert found == {"request_id": "a", "jobs": jobs}


@played
async def test_nobody_waits_while_a_large_body_is_read() -> None:
    """Others are answered meanwhile: the loop turns, and each turn is short."""
    body = b'{"request_id":"a","jobs":[' + b"[],[]," * 1_500_000 + b"[]]}"
    loop, longest_s, turns = asyncio.get_running_loop(), 0.0, 0
    read = loop.create_task(Bodies(json.loads, MAX_JOBS).read(0, _request(body)))
    before_s = loop.time()
    while not read.done():
        await asyncio.sleep(0.001)
        now_s = loop.time()
        longest_s, before_s, turns = max(longest_s, now_s - before_s), now_s, turns + 1
    with pytest.raises(RequestError):
        await read
    assert turns > 10
    assert longest_s < 0.25
