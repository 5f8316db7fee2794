"""Nothing that comes in by any entrance ends the controller or an agent, or fails unexpectedly.

The findings of the attack on the product are named by their ids; `make fuzz` does the random part for an hour.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from waiting import wait_until

from hpcnode.wire import protocol
from tests.attacks.fuzz import Campaign, Finding, _Http

SEED = 20_260
REQUESTS = int(os.environ.get("HPCSCHED_TEST_FUZZ_REQUESTS", "8000"))
LONG = "9" * 5000


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    base = Path("/tmp") / f"fuzz-{os.getpid()}"
    base.mkdir(mode=0o755)
    with Campaign(base, SEED) as made:
        yield made
    made.cluster.remove()


def ask(campaign: Campaign, method: str, path: str, body: bytes = b"") -> int:
    connection = _Http(campaign.cluster.api_socket)
    try:
        request = f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        return connection.ask(request, is_whole=True)
    finally:
        connection.close()


def say(path: Path, *messages: dict[str, Any]) -> list[bytes]:
    """Say these to a socket; return the JSON texts of the answers until the connection ends, or an end is told."""
    answers: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        for message in messages:
            text = json.dumps(message).encode()
            sock.sendall(struct.pack("!II", len(text), 0) + text)
        data = b""
        while not any(b"StepEnded" in answer for answer in answers):
            part = sock.recv(1 << 16)
            if not part:
                break
            data += part
            while len(data) >= 8 and len(data) >= 8 + sum(struct.unpack_from("!II", data)):
                text_size, blob_size = struct.unpack_from("!II", data)
                answers.append(data[8 : 8 + text_size])
                data = data[8 + text_size + blob_size :]
    return answers


@pytest.mark.parametrize("verb", ["cancel", "hold", "release", "requeue", "suspend", "resume"])
@pytest.mark.parametrize("rest", ["_[0-99999999999999999999]", "_" + LONG, "+" + LONG, LONG, f"_[1-{LONG}]", "_²"])
def test_s1_a_reference_with_a_long_number_or_range_is_refused(campaign: Campaign, verb: str, rest: str) -> None:
    body = json.dumps({"jobs": [f"{campaign.job_id}{rest}"]}).encode()
    assert ask(campaign, "POST", f"/v1/{verb}", body) == 200  # with the reference among the errors
    campaign.look()


@pytest.mark.parametrize(
    "change", ["account", "qos", "partition", "dependency", "nice", "priority", "time_limit", "begin"]
)
@pytest.mark.parametrize("value", ["\udcff", "a\0b", LONG])
def test_s1_an_update_with_what_cannot_be_written_is_refused(campaign: Campaign, change: str, value: str) -> None:
    body = json.dumps({"jobs": [str(campaign.job_id)], "changes": {change: value}}).encode()
    assert ask(campaign, "POST", "/v1/update", body) in (200, 400)
    campaign.look()


@pytest.mark.parametrize("request_id", ['"\\ud800"', '"\\udcff"', '"\\u0000"', "5", "[]", '"' + "x" * 300 + '"'])
def test_s1_a_request_id_that_is_no_text_is_refused(campaign: Campaign, request_id: str) -> None:
    job = '{"name":"x","script":"#!/bin/sh","work_dir":"/tmp"}'
    assert ask(campaign, "POST", "/v1/submit", f'{{"request_id":{request_id},"jobs":[{job}]}}'.encode()) == 400
    campaign.look()


@pytest.mark.parametrize("entrance", ["steps", "agent"])
@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"output": "\ud800"}},
        {"options": {"error": "\ud800"}},
        {"options": {"input": "\ud800"}},
        {"options": {"het-group": LONG}},
        {"options": {"parts": "[" * 5000}},
        {"options": {"components": "[" * 5000}},
        {"options": {"job-name": "\udcff"}},
        {"options": {"attach": LONG}},
        {"options": {"resize": "²"}},
        {"argv": ["\ud800"]},
        {"argv": ["./prog\udcff"]},
        {"work_dir": "/\ud800"},
        {"env": {"A": "\ud800"}},
        {"job_id": 10**30},
        {"argv": ["a\0b"]},
    ],
    ids=lambda changes: str(changes)[:40].encode("ascii", "replace").decode(),
)
def test_s1_a_step_request_that_cannot_be_is_refused(
    campaign: Campaign, entrance: str, changes: dict[str, Any]
) -> None:
    path = campaign.steps_socket if entrance == "steps" else campaign.agent_socket
    request = {
        "type": "StepRequest", "version": protocol.VERSION, "job_id": campaign.job_id, "options": {}, "argv": ["true"],
        "work_dir": "/tmp", "env": {}, **changes,
    }  # fmt: skip
    answers = say(path, request)
    assert b"cannot" in answers[-1] or "components" in changes.get("options", {})  # those mean nothing in a job
    campaign.look()


def test_s1_a_job_cannot_end_the_controller_through_its_agent(campaign: Campaign) -> None:
    body = b'{"jobs":["1_[0-99999999999999999999]"]}'
    text = json.dumps(
        {"type": "ApiRequest", "job_id": campaign.job_id, "method": "POST", "path": "/v1/cancel"}
    ).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(campaign.agent_socket))
        sock.sendall(struct.pack("!II", len(text), len(body)) + text + body)
        assert b"ApiAnswer" in sock.recv(1 << 16)
    campaign.look()


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/job/{LONG}",
        "/v1/job/1_[0-99999999999999999999]",
        "/v1/job/%FF",
        "/v1/job/%00",
        f"/v1/history?limit={LONG}",
        f"/v1/history?id={LONG}",
        "/v1/history?id=%C2%B2",
        "/v1/history?start_s=1e999",
        "/v1/history?end_s=nan",
        f"/v1/log?job=1&offset={LONG}",
        "/v1/log?job=1&limit=1e400",
        "/v1/log?job=1&wait_s=inf",
        "/v1/jobs?name=%FF",
        "/v1/jobs?id=1_%5B0-99999999999999999999%5D",
        f"/v1/queue?nodes={quote('n[0-99999999999]')}",
    ],
)
def test_s12g_a_number_or_text_in_a_query_that_cannot_be_is_refused(campaign: Campaign, path: str) -> None:
    assert ask(campaign, "GET", path) in (400, 404)
    campaign.look()


def test_d7_the_hostile_node_is_heard_and_the_real_one_is_not_lost(campaign: Campaign) -> None:
    """S9: what a node says is dropped with a line in the log, or ends its own link."""
    wait_until(lambda: campaign.said.stat().st_size > 50, 60, "the hostile node does not speak")
    campaign.look()
    nodes = {node["name"]: node for node in campaign.cluster.api("GET", "/v1/nodes")["nodes"]}
    assert nodes["n1"]["link"] == "up"


def test_d2_random_requests_at_all_entrances_end_nothing(campaign: Campaign) -> None:
    """Some thousands; `make fuzz` sends them for an hour."""
    requests, entrances = campaign.tally.requests, {"api", "steps", "agent", "node"}
    while sum(requests.values()) < REQUESTS or not entrances <= set(requests):  # the timeout of the suite ends it
        campaign.round()
    print(campaign.tally.text())
    assert campaign.tally.most_rss_mib < 512


def test_the_fuzzer_notices_what_it_is_there_to_notice(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(campaign.log, "a") as log:
        log.write("ERROR hpcsched.errors: fault 01234567: cannot do what was asked\n")
    with pytest.raises(Finding, match="in the controller's log"):
        campaign.look()
    monkeypatch.setattr(campaign, "pid", 2**22 + 1)
    with pytest.raises(Finding, match="has ended"):
        campaign.look()
