"""A controller's API for the tests of the commands: a real unix socket that gives canned answers and keeps the requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hpcsched.listing.formats import Look
from hpcsched.listing.queue import make_listing, queue_text, row_of

Json = dict[str, Any]
Answer = Json | tuple[int, Json] | bytes | Callable[[Json, dict[str, str]], Any]


class FakeApi:
    """Answers by ``"GET /v1/jobs"``; an answer may be JSON, (status, JSON), raw bytes of HTTP, or a function of the
    request's body and parameters that returns one of these. None as answer breaks the connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer | None | list[Any]] = {}
        self.asked: list[tuple[str, dict[str, str], Json]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
        self.path.unlink()

    def requests(self, route: str) -> list[Json]:
        """Return the bodies of the requests for `route`."""
        return [body for asked, _, body in self.asked if asked == route]

    def parameters(self, route: str) -> dict[str, str]:
        """Return the parameters of the last request for `route`."""
        return [given for asked, given, _ in self.asked if asked == route][-1]

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self._one(connection)

    def _one(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        words = stream.readline().decode().split()
        if len(words) != 3:
            return
        length = 0
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        body = json.loads(stream.read(length) or b"{}")
        target = urlsplit(words[1])
        route, given = f"{words[0]} {unquote(target.path)}", dict(parse_qsl(target.query))
        self.asked.append((route, given, body))
        answer = self.answers.get(route, (404, {"error": f"no route {route}", "kind": "NotFoundError"}))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if callable(answer):
            answer = answer(body, given)
        if answer is not None:
            connection.sendall(_http(answer))


def _http(answer: Any) -> bytes:
    if isinstance(answer, bytes):
        return answer
    status, body = answer if isinstance(answer, tuple) else (200, answer)
    data = json.dumps({"version": 1, **body}).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


def queue_answer(*jobs: Json) -> Callable[[Json, dict[str, str]], bytes]:
    """Return how ``GET /v1/queue`` is answered if there are these jobs: in the layout that it asks for."""

    def answer(body: Json, given: dict[str, str]) -> bytes:
        layout = {name: given.get(name) == "1" for name in ("long", "fit", "colour", "array", "dated")}
        listing = make_listing(given["format"], order=given["order"], header=given.get("noheader") != "1", **layout)
        look = Look(NOW_S, given.get("time_format", ""))
        wanted = set(given.get("state", "ALL").split(","))
        shown = [one for one in jobs if "ALL" in wanted or one["state"] in wanted]
        return text_answer(queue_text([row_of(one, listing, look) for one in shown], listing, look))

    return answer


def text_answer(text: str) -> bytes:
    """Return the bytes of an answer that is text."""
    data = text.encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def log_answer(data: bytes, *, offset: int = 0, size: int | None = None, ended: bool = True) -> bytes:
    """Return the bytes of an answer of ``GET /v1/log``."""
    total = offset + len(data) if size is None else size
    head = f'HTTP/1.1 200 OK\r\nX-Offset: {offset}\r\nX-Size: {total}\r\nX-Path: "/w/out"\r\nX-Ended: {int(ended)}\r\n'
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def serving(path: Path) -> Iterator[FakeApi]:
    """Serve at `path`."""
    api = FakeApi(path)
    try:
        yield api
    finally:
        api.close()


NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00 UTC


def job(job_id: int = 12, **changes: Any) -> Json:
    """Return a job as the API shows it: one that waits, unless `changes` say otherwise."""
    made: Json = {
        "id": job_id, "array_job_id": None, "array_task_id": None, "array_limit": None, "display_id": str(job_id),
        "name": "train", "user": "ann", "uid": 1000, "account": "", "partition": "main", "qos": "", "state": "PENDING",
        "state_short": "PD", "reason": "Resources", "reason_detail": "needs 2 nodes with 4 cpus each; 1 is free",
        "hold": "none", "priority": None, "nice": 0, "attempt": 0, "restarts": 0, "submitted_at_s": NOW_S - 600,
        "eligible_at_s": NOW_S - 600, "not_before_s": None, "expected_start_s": NOW_S + 1200, "allocated_at_s": None,
        "started_at_s": None, "ended_at_s": None, "elapsed_s": 0.0, "time_limit_s": 3600, "nodes": [], "node_list": "",
        "num_nodes": 2, "num_cpus": 8, "num_tasks": 2, "cpus_per_task": 4, "mem_mib": 4096, "gpus": 0, "shares": [],
        "exit_code": None, "exit_signal": None, "ended_by_uid": None, "requeue": True, "exclusive": False,
        "constraint": "", "dependency": "", "priority_tier": 1, "work_dir": "/home/ann", "stdout": "/home/ann/slurm.out",
        "stderr": "/home/ann/slurm.out", "stdin": "", "submit_line": "hsub -N2 train.sh", "comment": "",
        "command": "train.sh", "ntasks_per_node": None,
    }  # fmt: skip
    assert set(changes) <= set(made), set(changes) - set(made)
    return made | changes


def running(job_id: int = 11, **changes: Any) -> Json:
    """Return a job that has run for 400 s on two nodes."""
    shares = [{"node": node, "cpus": 4, "mem_mib": 4096, "gpus": [0], "tasks": 1} for node in ("n1", "n2")]
    return job(job_id) | {
        "state": "RUNNING", "state_short": "R", "reason": "None", "reason_detail": "", "started_at_s": NOW_S - 400,
        "allocated_at_s": NOW_S - 401, "elapsed_s": 400.0, "nodes": ["n1", "n2"], "node_list": "n[1-2]", "shares": shares,
        "mem_mib": 8192, "gpus": 2, "expected_start_s": None,
    } | changes  # fmt: skip


def ended(job_id: int = 10, **changes: Any) -> Json:
    """Return a job that failed with exit code 3 after 61 s."""
    return running(job_id) | {
        "state": "FAILED", "state_short": "F", "reason": "NonZeroExitCode", "started_at_s": NOW_S - 500,
        "ended_at_s": NOW_S - 439, "elapsed_s": 61.0, "exit_code": 3, "exit_signal": 0, "gpus": 0,
    } | changes  # fmt: skip


def task(array_id: int, index: int, **changes: Any) -> Json:
    """Return a task of an array of which two may run at a time."""
    return job(array_id + index) | {
        "array_job_id": array_id, "array_task_id": index, "array_limit": 2, "display_id": f"{array_id}_{index}",
    } | changes  # fmt: skip


def step(number: str, **changes: Any) -> Json:
    """Return a step of `ended`."""
    return {
        "step": number, "attempt": 0, "name": "", "nodes": ["n1"], "ntasks": 1, "state": "FAILED",
        "started_at_s": NOW_S - 500, "ended_at_s": NOW_S - 439, "exit_code": 3, "exit_signal": 0, "cpu_user_s": 59.5,
        "cpu_system_s": 1.25, "max_rss_kib": 20480,
    } | changes  # fmt: skip


def node(name: str, **changes: Any) -> Json:
    """Return an idle node."""
    made: Json = {
        "name": name, "state": "IDLE", "link": "up", "link_since_s": NOW_S - 9000, "link_why": "", "drained": False,
        "drained_why": "", "drained_by": "", "drained_at_s": None, "host": f"{name}.lab", "port": None, "cpus": 8,
        "cpus_alloc": 0, "mem_mib": 16384, "mem_alloc_mib": 0, "gpus": [], "gpus_alloc": 0, "features": [],
        "partitions": ["main"], "jobs": [], "boot_id": "b", "agent_version": "a", "weight": 1, "facts": None,
    }  # fmt: skip
    assert set(changes) <= set(made), set(changes) - set(made)
    return made | changes


def partition(name: str, nodes: list[str], **changes: Any) -> Json:
    """Return a partition."""
    return {
        "name": name, "default": name == "main", "up": True, "state": "UP", "nodes": nodes, "node_list": ",".join(nodes),
        "max_time_s": None, "default_time_s": 3600, "priority_tier": 1, "state_counts": {"IDLE": len(nodes)},
        "priority_job_factor": 1, "allow_accounts": [], "allow_qos": [],
        "cpus": 8 * len(nodes), "cpus_alloc": 0,
    } | changes  # fmt: skip
