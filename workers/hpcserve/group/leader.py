"""Requests and tokens between front and leader: both ends of one connection.

Lines of JSON in both directions, each authenticated by the run's key (`hpctrain.peers`). The leader calls the front when all
ranks have loaded their parts, and names its generation. The front sends `generate` and `cancel`; the leader sends `events`,
`error` and, now and then, `load`. A stream has a number, because ids of requests come from clients.
`GroupEngine` is the engine that the front's API uses. It keeps the tokens of each stream: if the generation is lost, it waits for
the next one and requests the rest, so that a client gets the tokens of an undisturbed run.
Does not know HTTP, text, or why a generation ends: an ended connection is a lost one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from hpcserve.errors import GroupLost, InvalidRequest, OverloadedError, ServeError
from hpcserve.requests import EngineLoad, GenerateRequest, SamplingSettings, TokenEngine, TokenEvent
from hpctrain.peers import GUEST, HOST, Messages, Proof, encryption_wanted

MOST_LINE_BYTES = 256 << 20  # a prompt of a million tokens, or the log probabilities of one
PROOF_S = 10.0
LOAD_EVERY_S = 0.25
LEADER_SILENT_S = 10.0
STALL_S = 120.0  # more than any step takes
MOST_LOSSES = 8  # of generations, without a token of a request in between: the request may be what kills them
Message = dict[str, Any]


class MessageLine:
    """One end of a proved connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, messages: Messages) -> None:
        self._reader, self._writer, self._messages = reader, writer, messages

    @classmethod
    async def proved(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes,
        role: bytes,
        environ: Mapping[str, str],
    ) -> MessageLine:
        """Return the line after both ends have proved the key.

        Raises:
            GroupLost: the other end does not have it, or is silent.
        """
        mine = Proof(key, role, encrypted=encryption_wanted(environ))
        try:
            async with asyncio.timeout(PROOF_S):
                if role == GUEST:
                    writer.write(mine.nonce.hex().encode() + b"\n")
                    other, proof = map(bytes.fromhex, (await reader.readline()).decode().split())
                    writer.write(mine.of(GUEST, other).hex().encode() + b"\n")
                else:
                    other = bytes.fromhex((await reader.readline()).decode().strip())
                    writer.write(f"{mine.nonce.hex()} {mine.of(HOST, other).hex()}\n".encode())
                    proof = bytes.fromhex((await reader.readline()).decode().strip())
        except (OSError, ValueError):  # a timeout is an OSError
            proof = b""
        session = mine.checked(other, proof) if proof else None
        if session is None:
            writer.close()
            raise GroupLost("cannot connect front and leader: the other end does not prove the key of the run")
        return cls(reader, writer, Messages(session))

    def send(self, message: Message) -> None:
        """Send a message; one to an ended connection is dropped."""
        if not self._writer.is_closing():
            self._writer.write(self._messages.wrapped(json.dumps(message).encode()))

    async def drained(self) -> None:
        """Wait until the other end has taken most of what was sent."""
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> Message | None:
        """Return the next message; None: the connection has ended."""
        try:
            line = await self._reader.readline()
            message = json.loads(self._messages.unwrapped(line)) if line else None
        except (OSError, ValueError, asyncio.LimitOverrunError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


# ----- requests and events as JSON values


def request_values(request: GenerateRequest) -> Message:
    """Return a request as JSON values."""
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    values["sampling"] = asdict(request.sampling) | {"logit_bias": list(request.sampling.logit_bias.items())}
    return values | {"stop_tokens": sorted(request.stop_tokens)}


def request_of(values: Mapping[str, Any]) -> GenerateRequest:
    """Return the request of `request_values`."""
    sampling = dict(values["sampling"])
    sampling["logit_bias"] = {int(token): float(bias) for token, bias in sampling["logit_bias"]}
    known = dict(values) | {
        "prompt": tuple(values["prompt"]),
        "sent": tuple(values["sent"]),
        "stop_tokens": frozenset(values["stop_tokens"]),
        "sampling": SamplingSettings(**sampling),
    }
    return GenerateRequest(**known)


def event_values(event: TokenEvent) -> Message:
    """Return what an event has beside its defaults, as JSON values."""
    found = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: value for name, value in found.items() if value not in (None, (), 0) or name == "token"}


def event_of(values: Mapping[str, Any]) -> TokenEvent:
    """Return the event of `event_values`."""
    return TokenEvent(**dict(values) | {name: deep_tuple(values[name]) for name in LISTS if name in values})


LISTS = ("top", "prompt_logprobs", "embedding")


def deep_tuple(value: Any) -> Any:
    """Return lists, and lists in them, as tuples."""
    return tuple(map(deep_tuple, value)) if isinstance(value, list) else value


def error_values(error: ServeError) -> Message:
    """Return an error as JSON values."""
    match error:
        case InvalidRequest():
            return {"kind": "invalid", "message": str(error), "param": error.param}
        case OverloadedError():
            return {"kind": "overloaded", "message": str(error), "retry_after_s": error.retry_after_s}
        case GroupLost():
            return {"kind": "lost", "message": str(error)}
        case _:
            return {"kind": "failed", "message": str(error)}


def error_of(values: Mapping[str, Any]) -> ServeError:
    """Return the error of `error_values`."""
    message = str(values["message"])
    match values["kind"]:
        case "invalid":
            return InvalidRequest(message, param=values["param"])
        case "overloaded":
            return OverloadedError(message, retry_after_s=float(values["retry_after_s"]))
        case "lost":
            return GroupLost(message)
        case _:
            return ServeError(message)


# ----- the leader's end


class LeaderEnd:
    """Serves the front's requests by this process's engine."""

    def __init__(
        self, engine: TokenEngine, line: MessageLine, more_metrics: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self._engine, self._line, self._more_metrics = engine, line, more_metrics
        self._streams: dict[int, asyncio.Task[None]] = {}

    async def serve(self, over: asyncio.Event) -> None:
        """Serve until `over` is set, or the front ends the connection."""
        tasks = [asyncio.create_task(call) for call in (over.wait(), self._read(), self._report())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, *self._streams.values()):
                task.cancel()
            self._line.close()

    async def _read(self) -> None:
        while (message := await self._line.receive()) is not None:
            number = int(message["stream"])
            if message["type"] == "generate":
                task = asyncio.create_task(self._generate(number, request_of(message["request"])))
                self._streams[number] = task
                task.add_done_callback(partial(self._forget, number))
            elif (task_or_none := self._streams.get(number)) is not None:
                task_or_none.cancel()

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        self._streams.pop(number, None)

    async def _generate(self, number: int, request: GenerateRequest) -> None:
        try:
            stream = self._engine.generate(request)
            try:
                async for event in stream:
                    self._line.send({"type": "event", "stream": number, "event": event_values(event)})
            finally:
                await stream.aclose()  # type: ignore[attr-defined]
        except ServeError as error:
            self._line.send({"type": "error", "stream": number, **error_values(error)})

    async def _report(self) -> None:
        while True:
            metrics = {**self._engine.metrics(), **self._more_metrics()}
            self._line.send({"type": "load", "load": asdict(self._engine.load()), "metrics": metrics})
            await asyncio.sleep(LOAD_EVERY_S)


# ----- the front's end


class LeaderConnection:
    """The leader of the current generation, as the front uses it."""

    def __init__(self, line: MessageLine, generation: int) -> None:
        self.generation = generation
        self.load = EngineLoad(running=0, waiting=0, kv_used=0.0, queue_wait_s=0.0)
        self.metrics: Mapping[str, float] = {}
        self._heard_at_s = self._moved_at_s = time.monotonic()
        self._steps = 0.0
        self._line = line
        self._numbers = itertools.count()
        self._streams: dict[int, asyncio.Queue[TokenEvent | ServeError]] = {}
        self._lost: GroupLost | None = None

    async def read(self) -> None:
        """Hand out what the leader sends, until its connection or its generation is over.

        Its streams are lost then.
        """
        while (message := await self._line.receive()) is not None:
            if message["type"] == "load":
                self._note(EngineLoad(**message["load"]), message["metrics"])
                continue
            if message["type"] == "error" and message["kind"] == "lost":
                break  # the leader may stay connected for a moment, in which all requests are lost at once
            queue = self._streams.get(int(message["stream"]))
            if queue is not None:
                queue.put_nowait(event_of(message["event"]) if message["type"] == "event" else error_of(message))
        self.close()

    def _note(self, load: EngineLoad, metrics: Mapping[str, float]) -> None:
        now_s, steps = time.monotonic(), metrics.get("steps_total", 0.0)
        if steps != self._steps or not load.running:
            self._moved_at_s = now_s
        self._heard_at_s, self._steps = now_s, steps
        self.load, self.metrics = load, metrics

    def why_stalled(self, now_s: float) -> str:
        """Return why the leader must be hung although it has heartbeats; empty if it is not."""
        if now_s - self._heard_at_s > LEADER_SILENT_S:
            return f"the leader says nothing for {LEADER_SILENT_S:g} s"
        if now_s - self._moved_at_s > STALL_S:
            return f"the leader computes one step for {STALL_S:g} s"
        return ""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent]:
        """Yield the tokens of a request; closing the iterator cancels it.

        Raises:
            GroupLost: the generation is over; the events so far are valid.
        """
        number = next(self._numbers)
        queue: asyncio.Queue[TokenEvent | ServeError] = asyncio.Queue()
        if self._lost is not None:
            raise GroupLost(str(self._lost))
        self._streams[number] = queue
        is_over = False
        try:
            named = replace(request, id=f"{request.id}.{number}")  # clients may use an id twice
            self._line.send({"type": "generate", "stream": number, "request": request_values(named)})
            await self._line.drained()
            while not is_over:
                event = await queue.get()
                is_over = isinstance(event, ServeError) or event.finish is not None
                if isinstance(event, ServeError):
                    raise event
                yield event
        finally:
            del self._streams[number]
            if not is_over:
                self._line.send({"type": "cancel", "stream": number})

    def close(self) -> None:
        """End the connection; its streams are lost."""
        self._line.close()
        if self._lost is None:
            self._lost = GroupLost("the generation of the group is over")
            for queue in self._streams.values():
                queue.put_nowait(GroupLost(str(self._lost)))


class GroupEngine:
    """The `TokenEngine` of a group of ranks, which continues streams in the next generation."""

    def __init__(self, *, context_tokens: int, vocabulary: int, hold_s: float) -> None:
        self.context_tokens, self.vocabulary = context_tokens, vocabulary
        self._hold_s = hold_s
        self._leader: LeaderConnection | None = None
        self._attached = asyncio.Event()
        self._failure = ""
        self._held = 0
        self._counts = {"generations_total": 0, "resumed_streams_total": 0, "resumed_tokens_total": 0}
        self.longest_gap_s = 0.0  # of a stream that was continued

    @property
    def leader(self) -> LeaderConnection | None:
        """The leader of the generation that serves requests now."""
        return self._leader

    @property
    def is_ready(self) -> bool:
        """Whether a generation serves requests now."""
        return self._leader is not None

    def attach(self, leader: LeaderConnection) -> None:
        """Use the leader of a new generation from now on."""
        self.detach()
        self._leader = leader
        self._counts["generations_total"] += 1
        self._attached.set()

    def give_up(self, why: str) -> None:
        """End all streams, and refuse new ones."""
        self._failure = why
        self.detach()
        self._attached.set()

    def detach(self, leader: LeaderConnection | None = None) -> None:
        """Use a leader, by default any, no longer; its streams wait for the next one."""
        if self._leader is not None and leader in (None, self._leader):
            self._leader.close()
            self._leader = None
            self._attached.clear()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent]:
        """Yield the tokens of a request, over any number of generations of the group.

        Raises:
            InvalidRequest: the request does not fit the model.
            OverloadedError: too many requests wait.
            GroupLost: no generation is ready within the time to hold requests.
        """
        if request.sampling.seed is None:  # so that the rest of the stream has the same random numbers
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        sent = list(request.sent)
        lost_at_s, losses = None, 0
        while True:
            leader = await self._next_leader()
            try:
                async with aclosing(leader.generate(replace(request, sent=tuple(sent)))) as events:
                    async for event in events:
                        losses = 0
                        if lost_at_s is not None:
                            self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - lost_at_s)
                            lost_at_s = None
                        if event.token is not None:
                            sent.append(event.token)
                            request = replace(request, prompt_logprobs=False)  # the first event has them
                        yield event
                        if event.finish is not None:
                            return
            except GroupLost:
                losses += 1
                if losses > MOST_LOSSES:
                    raise ServeError(
                        f"cannot continue request {request.id!r}: {losses} generations were lost computing its next token"
                    ) from None
                lost_at_s = time.monotonic() if lost_at_s is None else lost_at_s
                self._counts["resumed_streams_total"] += 1
                self._counts["resumed_tokens_total"] += len(sent)

    async def _next_leader(self) -> LeaderConnection:
        """Return the leader, and wait for one as long as requests are held."""
        self._held += 1
        try:
            async with asyncio.timeout(self._hold_s):
                while self._leader is None and not self._failure:
                    await self._attached.wait()
            if self._leader is None:
                raise ServeError(f"cannot continue: {self._failure}")
            return self._leader
        except TimeoutError:
            raise GroupLost(
                f"cannot continue: no rank serves the model since {self._hold_s:g} s; try again later"
            ) from None
        finally:
            self._held -= 1

    def load(self) -> EngineLoad:
        """Return how busy the leader's engine is, as it said last; held requests wait, too."""
        if self._leader is None:
            return EngineLoad(running=0, waiting=self._held, kv_used=0.0, queue_wait_s=0.0)
        return self._leader.load

    def metrics(self) -> Mapping[str, float]:
        """Return the leader's counters, and those of generations."""
        own = {**self._counts, "held_requests": self._held, "group_ready": float(self.is_ready)}
        return {**(self._leader.metrics if self._leader is not None else {}), **own}
