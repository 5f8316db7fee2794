"""A served model from `hserve start` to its end: real jobs, a real gateway, and a small server in place of hpcserve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_server import AS_ROOT, USER, Served, serving
from waiting import wait_until

# It answers as hpcserve does; its second argument makes it a broken version.
SERVER = r"""#!/usr/bin/python3
import http.server, json, os, socketserver, subprocess, sys

path = subprocess.run(["htun", "socket"], check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
if os.path.exists(path):
    os.unlink(path)
HOW = "@HOW@"
if HOW == "ends":
    sys.exit(3)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, b"hpcserve_kv_used_ratio 0.25\n" if self.path == "/metrics" else b"{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if HOW == "fails":
            return self.answer(500, b'{"error": {"message": "it is broken"}}')
        words = asked["messages"][-1]["content"]
        usage = {"prompt_tokens": len(words.split()), "completion_tokens": 2}
        if not asked.get("stream"):
            message = {"role": "assistant", "content": HOW + " " + words}
            whole = {"model": asked["model"], "choices": [{"message": message}], "usage": usage}
            return self.answer(200, json.dumps(whole).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for event in [{"choices": [{"delta": {"content": word}}]} for word in ("one", "two")]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if words == "die":
                os._exit(9)
        if asked["stream_options"]["include_usage"]:
            self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


Server(path, Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def key(served: Served) -> str:
    """Start the service of all tests with two replicas, and return the owner's key."""
    run(served, "start", "/models/tiny", "--name=chat", "--replicas=2", f"--script={script(served, 'fine')}", "-D", "/")
    return served.cluster.run("hctl", "token", "create", "--scope=serve,read").stdout.strip()


def run(served: Served, *words: str) -> str:
    return served.cluster.run("hserve", *words).stdout


def script(served: Served, how: str) -> str:
    path = served.base / f"{how}.py"
    path.write_text(SERVER.replace("@HOW@", how))
    return str(path)


def service(served: Served) -> dict[str, Any]:
    found = json.loads(run(served, "ls", "chat", "--json"))["services"][0]
    assert isinstance(found, dict)
    return found


def make_room(served: Served) -> None:
    """Leave one replica: the node has two cpus, and a rollout needs one."""
    run(served, "scale", "chat", "1")
    wait_until(lambda: len(service(served)["replicas"]) == 1 and service(served)["ready"] == 1, what="one replica")


def unended(served: Served) -> list[str]:
    """Return the comments of jobs that have not ended."""
    jobs = json.loads(served.cluster.run("hqueue", "--json").stdout)["jobs"]
    return [job["comment"] for job in jobs if job["state"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")]


def wait_for_ready(served: Served, count: int) -> None:
    wait_until(lambda: service(served)["ready"] >= count, what=f"{count} ready replicas")


def chat(served: Served, key: str, words: str, **more: Any) -> tuple[int, Any]:
    body = {"model": "chat", "messages": [{"role": "user", "content": words}], **more}
    status, answer, _ = served.ask("POST", "/v1/chat/completions", body, token=key)
    return status, answer


def test_a_model_is_answered_under_its_name_whole_and_as_a_stream(served: Served, key: str) -> None:
    status, answer = chat(served, key, "hello you")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine hello you")
    status, text = chat(served, key, "hello", stream=True)
    events = text.decode().strip().split("\n\n")
    assert [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events[:-1]] == ["one", "two"]
    assert events[-1] == "data: [DONE]"
    assert (
        chat(served, key, "hello", stream=True, stream_options={"include_usage": True})[1].count(b"prompt_tokens") == 1
    )
    assert served.ask("GET", "/v1/models", token=key)[1]["data"][0]["id"] == "chat"
    assert set(unended(served)) == {"service chat@v1"}


@pytest.mark.skipif(not AS_ROOT, reason="needs a second account")
def test_f_a_key_without_the_scope_or_of_another_user_asks_nothing(served: Served, key: str) -> None:
    assert chat(served, served.token, "hello")[0] == 403
    other = served.cluster.run("hctl", "token", "create", "--scope=serve,manage", f"--user={USER}").stdout.strip()
    status, answer = chat(served, other, "hello")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert served.ask("GET", "/v1/models", token=other)[1]["data"] == []
    assert served.ask("POST", "/api/v1/services/stop", {"name": "chat"}, token=other)[0] in (403, 404)
    for verb in ("sync", "reach", "use"):
        assert served.ask("POST", f"/api/v1/services/{verb}", {"name": "chat"}, token=other)[0] in (403, 404)
    assert chat(served, "", "hello")[0] == 401


def test_a_lost_replica_is_replaced_and_its_requests_go_to_the_other(served: Served, key: str) -> None:
    wait_for_ready(served, 2)
    before = {one["job"] for one in service(served)["replicas"]}
    status, text = chat(served, key, "die", stream=True)
    assert status == 200
    assert b'"content": "one"' in text
    assert b"[DONE]" not in text
    for _ in range(5):
        assert chat(served, key, "hello")[0] == 200
    wait_until(lambda: len({one["job"] for one in service(served)["replicas"] if one["ready"]} - before) == 1)


@pytest.mark.parametrize(("how", "why"), [("ends", "ended before it was ready"), ("fails", "a check failed")])
def test_a_broken_version_is_taken_back_and_users_see_no_error(served: Served, key: str, how: str, why: str) -> None:
    make_room(served)
    check = served.base / "check.jsonl"
    check.write_text('{"messages": [{"role": "user", "content": "hi"}], "expect": "hi"}\n')
    run(served, "roll", "chat", "--to=/models/new", f"--script={script(served, how)}", f"--check={check}", "-D", "/")
    wait_until(lambda: chat(served, key, "hello")[0] != 200 or service(served)["rollout"] is None, what="going back")
    assert why in service(served)["last_rollout"]
    assert chat(served, key, "hello")[0] == 200


def test_a_good_version_answers_requests_that_name_it_and_the_controller_restarts(served: Served, key: str) -> None:
    make_room(served)
    run(served, "roll", "chat", "--to=/models/new", f"--script={script(served, 'better')}", "-D", "/", "--canary=100%")
    label = service(served)["rollout"]["label"]
    served.cluster.down()
    served.cluster.up()
    assert service(served)["rollout"]["label"] == label

    def answer() -> str:
        status, answer = chat(served, key, "hello", model=f"chat@{label}")
        return answer["choices"][0]["message"]["content"] if status == 200 else ""

    wait_until(lambda: answer() == "better hello", what="the new version")


def test_usage_is_counted_and_a_stopped_service_leaves_no_jobs(served: Served, key: str) -> None:
    rows = wait_until(lambda: json.loads(run(served, "usage", "--json"))["usage"], what="the usage")
    assert sum(row["requests"] for row in rows) > 5
    assert sum(row["completion_tokens"] for row in rows) > 5
    run(served, "stop", "chat")
    assert run(served, "ls").count("chat") == 0
    wait_until(lambda: not unended(served), what="no jobs")
    assert chat(served, key, "hello")[0] == 404
