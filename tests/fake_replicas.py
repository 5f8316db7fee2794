"""A gateway whose controller says yes, with replicas that are made up or run in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import h11
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from waiting import PATIENCE_S

from hpcsched.gateway.app import ProblemError
from hpcsched.gateway.serving import ModelGateway, ModelRequest, Replica, ServedModel
from hpcsched.gateway.streams import StreamError
from hpcsched.gateway.upstream import UpstreamReply


class FakeApp:
    """The application with a controller that says yes. `on`: other answers, by path."""

    def __init__(self) -> None:
        self.upstream = self
        self.body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
        self.refusal: ProblemError | None = None
        self.read = 0
        self.on: dict[str, Callable[[bytes], UpstreamReply]] = {}

    def admit(self, request: Request) -> dict[str, str]:
        if self.refusal is not None:
            raise self.refusal
        return {"authorization": "Bearer x"}

    async def json_text(self, request: Request) -> bytes:
        self.read += 1
        return json.dumps(self.body).encode()

    async def ask(self, *words: Any) -> UpstreamReply:
        path, body = next(word for word in words if str(word).startswith("/v1/")), words[-1]
        return self.on.get(path, lambda _: said(user="ann", account="lab"))(body)


def said(status: int = 200, **values: Any) -> UpstreamReply:
    return UpstreamReply(status, {}, json.dumps(values).encode())


class FakeAnswer:
    """A connection to a replica and the exchange on it."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    async def body(self) -> AsyncIterator[bytes]:
        yield b"{}"


class Gateway(ModelGateway):
    """The gateway of one service with ready replicas, whose answers are `answer`."""

    def __init__(self, replicas: int = 1) -> None:
        self.app, self.answer = FakeApp(), FakeAnswer()
        self.failing: dict[int, Exception] = {}
        self.tries_take_s = 0.0
        self.asked: list[tuple[int, ModelRequest]] = []  # each begun request, and the replica that got it
        super().__init__(self.app, "/nowhere", hold_s=PATIENCE_S)  # type: ignore[arg-type]
        there = [{"job": job, "version": "v1", "drained": False} for job in range(1, replicas + 1)]
        self.serve({"name": "chat", "weights": {"v1": 100}, "replicas": there})

    def serve(self, *found: dict[str, Any]) -> None:
        self.app.on["/v1/services/sync"] = lambda _: said(services=list(found))

    async def synced(self) -> None:
        await self._sync()
        for model in self._models.values():
            for replica in model.replicas.values():
                assert replica.probe is not None
                replica.probe.cancel()
                replica.is_ready = True

    async def _begun(self, model: ServedModel, replica: Replica, wanted: ModelRequest) -> Any:
        wanted.began_s -= self.tries_take_s
        self.asked.append((replica.job, wanted))
        if error := self.failing.get(replica.job):
            raise error
        return await self.begun(replica, wanted)

    async def begun(self, replica: Replica, wanted: ModelRequest) -> Any:
        """Return connection, exchange and head of an answer."""
        return self.answer, self.answer, h11.Response(status_code=200, headers=[])

    async def flap(self, times: int) -> None:
        """Make the failing replica ready again, so often, each time it has failed; then it works."""
        for _ in range(times):
            await until(lambda: not self.replica().is_ready)
            self.replica().is_ready = True
            self._models["chat"].tell()
        self.failing.clear()

    def replica(self, job: int = 1) -> Replica:
        return self._models["chat"].replicas[job]


async def until(cond: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not cond():
            await asyncio.sleep(0)


def request(path: str = "/v1/chat/completions", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": path, "headers": raw, "state": {}})


async def text_of(answer: Response) -> bytes:
    """Return the body of an answer as the client gets it."""
    assert isinstance(answer, StreamingResponse)
    return b"".join([bytes(part) async for part in answer.body_iterator])  # type: ignore[arg-type]


# ----- replicas of hpcserve in this process


class ReplicaExchange:
    """A request to an application in this process; its answer breaks off after `whole` events and a part of the next one."""

    def __init__(self, app: Any, wanted: ModelRequest, whole: int | None, *, within: bool) -> None:
        self._whole, self._within = whole, within
        self._sent = wanted.sent("tiny")
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)
        self._gone = asyncio.Event()
        headers = [("content-type", "application/json"), *wanted.headers()]
        raw = [(name.encode(), value.encode()) for name, value in headers]
        scope = {
            "type": "http",
            "method": "POST",
            "path": wanted.path,
            "raw_path": b"",
            "query_string": b"",
            "headers": raw,
        }
        self._task = asyncio.create_task(app(scope | {"state": {}}, self._received, self._messages.put))

    async def _received(self) -> dict[str, Any]:
        if self._sent is not None:
            body, self._sent = self._sent, None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def head(self) -> h11.Response:
        """Return the head of the answer."""
        message = await self._messages.get()
        return h11.Response(status_code=message["status"], headers=message["headers"])

    async def body(self) -> AsyncIterator[bytes]:
        for number in itertools.count():
            message = await self._messages.get()
            if number == self._whole:
                if self._within:
                    yield message["body"][: len(message["body"]) // 2]
                raise StreamError("the replica was killed")
            yield message["body"]
            if not message.get("more_body"):
                return

    def close(self) -> None:
        self._gone.set()
        self._task.cancel()


class ServedGateway(Gateway):
    """A gateway whose replicas are applications in this process. The first answers break off after so many events."""

    def __init__(self, *apps: Any, breaks: Sequence[int] = (), within: bool = False) -> None:
        super().__init__(len(apps))
        self._apps, self._breaks, self._within = apps, list(breaks), within

    async def begun(self, replica: Replica, wanted: ModelRequest) -> Any:
        """Ask the application of a replica."""
        whole = self._breaks.pop(0) if self._breaks else None
        exchange = ReplicaExchange(self._apps[replica.job - 1], wanted, whole, within=self._within)
        return exchange, exchange, await exchange.head()
