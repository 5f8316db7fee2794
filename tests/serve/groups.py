"""A tiny model served by several ranks, which are processes of this host; and the tokens that one rank alone gives."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from hpcserve.batching import BatchLimits
from hpcserve.config import read_config
from hpcserve.engine import LocalEngine
from hpcserve.group.arrange import GroupSettings
from hpcserve.group.front import FrontSettings, ServeFront
from hpcserve.group.runner import local_runner
from hpcserve.model import DecoderModel, whole_part
from hpcserve.plan import ServeLoad
from hpcserve.requests import GenerateRequest, SamplingSettings, TokenEngine
from hpcserve.weights import WeightFiles

LOAD = ServeLoad(streams=8, prompt_tokens=64, answer_tokens=64, context_tokens=256)
GREEDY = SamplingSettings(temperature=0.0)


def prompts(count: int) -> list[tuple[int, ...]]:
    """Return prompts of different lengths, whose tokens are bytes of text."""
    return [tuple(4 + (7 * number + 3 * at) % 300 for at in range(5 + 3 * number)) for number in range(count)]


async def tokens_of(engine: TokenEngine, prompt: Sequence[int], count: int, name: str) -> list[int]:
    """Return the tokens that an engine generates, each the most likely one."""
    request = GenerateRequest(id=name, prompt=tuple(prompt), max_tokens=count, sampling=GREEDY, ignore_eos=True)
    return [event.token async for event in engine.generate(request) if event.token is not None]


async def all_tokens(engine: TokenEngine, asked: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the tokens of several prompts, which are generated at once."""
    return await asyncio.gather(*(tokens_of(engine, prompt, count, f"r{at}") for at, prompt in enumerate(asked)))


def undisturbed(directory: Path, asked: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the tokens that one rank of this process generates."""
    config = read_config(directory)
    with WeightFiles(directory) as checkpoint:
        model = DecoderModel(config, checkpoint, whole_part(config), "fp32", blocks=256)
    limits = BatchLimits(blocks=256, context_tokens=config.context_tokens)
    engine = LocalEngine(local_runner(model), limits, vocabulary=config.vocab)
    try:
        return asyncio.run(all_tokens(engine, asked, count))
    finally:
        engine.close()


@asynccontextmanager
async def group(directory: Path, *, ranks: int, shape: str = "tensor", **settings: Any) -> AsyncIterator[ServeFront]:
    """Serve a model by so many ranks, until the block ends."""
    wanted = GroupSettings(ranks=ranks, kind="fp32", load=LOAD, shape=shape)
    environ = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    front = ServeFront(FrontSettings(directory=directory, group=wanted, **settings), environ)
    await front.start()
    try:
        yield front
    finally:
        await front.end()


async def ready(front: ServeFront, limit_s: float = 400.0) -> None:
    """Wait until a generation serves requests."""
    until_s = time.monotonic() + limit_s
    while not front.engine.is_ready:
        assert not front.failure, front.failure
        assert time.monotonic() < until_s, "no generation is ready"
        await asyncio.sleep(0.02)


class Streams:
    """Streams that are read at once: their tokens, and the longest pause between two of them."""

    def __init__(self, engine: TokenEngine, asked: Sequence[Sequence[int]], count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in asked]
        self.gap_s = 0.0
        self._tasks = [asyncio.create_task(self._read(engine, at, prompt, count)) for at, prompt in enumerate(asked)]

    @property
    def total(self) -> int:
        """The tokens of all streams so far."""
        return sum(map(len, self.tokens))

    async def reach(self, total: int) -> None:
        """Wait until so many tokens are there."""
        while self.total < total:
            await asyncio.sleep(0.001)

    async def end(self) -> list[list[int]]:
        """Return all tokens."""
        await asyncio.gather(*self._tasks)
        return self.tokens

    async def _read(self, engine: TokenEngine, at: int, prompt: Sequence[int], count: int) -> None:
        request = GenerateRequest(id=f"s{at}", prompt=tuple(prompt), max_tokens=count, sampling=GREEDY, ignore_eos=True)
        last_s = None
        async for event in engine.generate(request):
            now_s = time.monotonic()
            if last_s is not None:
                self.gap_s = max(self.gap_s, now_s - last_s)
            last_s = now_s
            if event.token is not None:
                self.tokens[at].append(event.token)


def cut_connections(pid: int) -> int:
    """Break the connections of a process with others that it did not accept on its listener; return how many."""
    get_descriptor, cut = 438, 0  # pidfd_getfd(2)
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            copy = libc.syscall(get_descriptor, process, int(name), 0)
            if copy < 0:
                continue
            try:
                connection = socket.socket(fileno=copy)
            except OSError:  # not a socket
                os.close(copy)
                continue
            with connection, suppress(OSError):
                if connection.family == socket.AF_INET:
                    connection.getpeername()  # a listener has none
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    finally:
        os.close(process)
    return cut
