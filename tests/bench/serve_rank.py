"""A rank of a served model for the benchmark: a process on one core that carries out what its standard input says.

Each line is a JSON object with the name of a command and its arguments; each answer is a line with its result. The first line of
output says on which port the rank listens for others. Times are of the rank's own clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import uvicorn

from hpcserve.api.app import create_app, server_config
from hpcserve.batching import BatchLimits
from hpcserve.chat import ChatTemplate
from hpcserve.config import read_config
from hpcserve.engine import LocalEngine
from hpcserve.errors import GroupLost
from hpcserve.group.links import Meeting, RankAddress, RankLinks, links_of_threads
from hpcserve.group.measure import measured_node
from hpcserve.group.runner import GroupRunner, RankProgram
from hpcserve.model import DecoderModel
from hpcserve.requests import GenerateRequest, SamplingSettings
from hpcserve.split import ModelSplit
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep, StepRow
from hpcserve.tokens import TextTokenizer
from hpcserve.weights import WeightFiles

STREAM_BLOCKS = 64  # the cache of each stream
READ_BYTES = 256 << 20
WARM_STEPS = 3
GREEDY = SamplingSettings(temperature=0)


def memory_bytes() -> int:
    """Return the anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


class BenchRank:
    """The part of a model that this process has, and what can be measured with it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.empty_bytes = memory_bytes()
        self.model: DecoderModel
        self.split: ModelSplit
        self.rank = 0
        self.theirs: Any = None
        self.engine: LocalEngine | None = None
        self._runner: GroupRunner | None = None

    def read_rate(self, seconds: float) -> float:
        """Return the bytes that this core reads in a second, in the best of many passes."""
        left, right = torch.ones(READ_BYTES // 8), torch.ones(READ_BYTES // 8)
        rates, until_s = [], time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            began_s = time.perf_counter()
            torch.dot(left, right)
            rates.append(READ_BYTES / (time.perf_counter() - began_s))
        return max(rates)

    def load(self, directory: str, kind: str, split: Any, rank: int, streams: int) -> dict[str, float]:
        """Load a part; return its seconds, the bytes that were read, and the memory that came with it."""
        self.split, self.rank = ModelSplit.from_json(split), rank
        before, began_s = memory_bytes(), time.perf_counter()
        with WeightFiles(Path(directory)) as files:
            self.model = DecoderModel(read_config(Path(directory)), files, self.split.part(rank), kind)
            read = files.bytes_read
        took_s, memory = time.perf_counter() - began_s, memory_bytes() - before
        self.model.allocate(streams * STREAM_BLOCKS)
        return {"took_s": took_s, "read_bytes": read, "memory_bytes": memory, "empty_bytes": self.empty_bytes}

    def connect(self, ports: Sequence[int]) -> None:
        """Connect with the other ranks; rank 0 leads, others compute until it ends the links."""
        links = links_of_threads(self.split)[0] if self.split.size == 1 else self._meet(ports)
        if self.rank == 0:
            self._runner = GroupRunner(self.model, links)
            return
        say(None)
        with suppress(GroupLost):
            RankProgram(self.model, links).follow()
        sys.exit()

    def _meet(self, ports: Sequence[int]) -> RankLinks:
        ranks = [RankAddress(addresses=("127.0.0.1",), port=port, secret="", host="here") for port in ports]
        return Meeting(self.split, ranks, 0, b"bench").connect(self.rank, self.listener)

    @property
    def runner(self) -> GroupRunner:
        """The ranks; only the leader has them."""
        assert self._runner is not None
        return self._runner

    def decode(self, streams: int, steps: int, context: int) -> float:
        """Return the tokens of all streams together in a second; pipelines have a step for each stage under way."""
        depth = min(self.runner.depth, streams)
        groups = [range(first, streams, depth) for first in range(depth)]
        ends, count = [], depth * (steps + WARM_STEPS)
        for number in range(depth):
            self.runner.begin(decode_step(number, groups[number], context))
        for number in range(count):
            self.runner.result()
            ends.append(time.perf_counter())
            if number + depth < count:
                position = context + (number + depth) // depth
                self.runner.begin(decode_step(number + depth, groups[number % depth], position))
        rounds = [after - before for before, after in zip(ends, ends[depth:], strict=False)][depth * (WARM_STEPS - 1) :]
        return streams / statistics.median(rounds)

    def prefill(self, tokens: int) -> float:
        """Return the tokens of a prompt that are computed in a second."""
        step = ForwardStep(number=0, rows=(StepRow(tokens=(5,) * tokens, start=0, blocks=blocks_of(0)),))
        began_s = time.perf_counter()
        self.runner.begin(step)
        self.runner.result()
        return tokens / (time.perf_counter() - began_s)

    def start_engine(self, streams: int) -> None:
        """Serve requests from now on."""
        limits = BatchLimits(
            blocks=self.model.cache.blocks, context_tokens=STREAM_BLOCKS * BLOCK_POSITIONS, running=streams
        )
        vocabulary = self.model.config.vocab
        self.engine = LocalEngine(self.runner, limits, vocabulary=vocabulary, prefix_cache=False, speculate=False)

    def gaps(self, streams: int, tokens: int, prompt: int) -> dict[str, float]:
        """Return the median and the longest gap of streams beside which a prompt arrives halfway."""
        assert self.engine is not None
        engine = self.engine
        gaps: list[float] = []
        arrived = asyncio.Event()

        async def stream(number: int) -> None:
            last_s = None
            async for _ in engine.generate(request_of(f"s{number}", 8, tokens)):
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s
                if len(gaps) > streams * tokens // 3:
                    arrived.set()

        async def intrude() -> None:
            await arrived.wait()
            async for _ in engine.generate(request_of("prompt", prompt, 1)):
                pass

        async def all_of_it() -> None:
            calls = [*(stream(number) for number in range(streams)), *([intrude()] if prompt else [])]
            await asyncio.gather(*calls)

        asyncio.run(asyncio.wait_for(all_of_it(), 300))
        return {"normal_s": statistics.median(gaps), "longest_s": max(gaps[streams:])}

    def first_token(self, prompt: int) -> float:
        """Return the seconds until the engine gives the first token of a prompt."""
        assert self.engine is not None
        engine = self.engine

        async def ask() -> float:
            began_s = time.perf_counter()
            async for _ in engine.generate(request_of("first", prompt, 1)):
                return time.perf_counter() - began_s
            raise RuntimeError("no token came")

        return asyncio.run(asyncio.wait_for(ask(), 60))

    def serve(self, directory: str) -> int:
        """Serve the API in a thread; return its port."""
        assert self.engine is not None
        folder = Path(directory)
        tokenizer = TextTokenizer.load(folder, self.model.config.vocab)
        app = create_app(self.engine, tokenizer, ChatTemplate.load(folder), name="bench", version="1")
        bound = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(server_config(app))
        threading.Thread(target=server.run, args=([bound],), daemon=True).start()
        port: int = bound.getsockname()[1]
        return port

    def node(self, kind: str) -> dict[str, Any]:
        """Return what the planner wants to know of this core."""
        node = measured_node("core", kind)
        rates = {"read_bytes_s": node.read_bytes_s, "flops_s": node.flops_s}
        return rates | {"kernel_bytes_s": dict(node.kernel_bytes_s)}

    def load_theirs(self, directory: str, dtype: str) -> None:
        """Load the model with transformers."""
        from transformers import AutoModelForCausalLM

        self.theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))

    def generate_theirs(self, tokens: int, prompt: int) -> float:
        """Return the tokens that transformers' generate gives in a second after a prompt."""
        asked = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = torch.full((1, prompt), 5)
        times = []
        for count in (2, 2 + tokens):
            began_s = time.perf_counter()
            self.theirs.generate(ids, max_new_tokens=count, **asked)
            times.append(time.perf_counter() - began_s)
        return tokens / (times[1] - times[0])


def blocks_of(stream: int) -> tuple[int, ...]:
    return tuple(range(stream * STREAM_BLOCKS, (stream + 1) * STREAM_BLOCKS))


def decode_step(number: int, streams: Sequence[int], position: int) -> ForwardStep:
    """Return a step of one token for each stream."""
    rows = tuple(StepRow(tokens=(5 + stream,), start=position, blocks=blocks_of(stream)) for stream in streams)
    return ForwardStep(number=number, rows=rows)


def request_of(name: str, prompt: int, tokens: int) -> GenerateRequest:
    return GenerateRequest(id=name, prompt=(5,) * prompt, max_tokens=tokens, sampling=GREEDY, ignore_eos=True)


def say(result: Any) -> None:
    sys.stdout.write(json.dumps({"result": result}) + "\n")
    sys.stdout.flush()


def main(core: int) -> None:
    """Carry out commands on a core until the input ends."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    rank = BenchRank()
    say(rank.listener.getsockname()[1])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        call: Callable[..., Any] = getattr(rank, name)
        try:
            say(call(**arguments))
        except Exception:
            sys.stdout.write(json.dumps({"error": traceback.format_exc()}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
