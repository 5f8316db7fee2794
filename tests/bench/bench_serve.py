"""Serving: how fast a model answers on a core and on two, beside the memory's bandwidth, transformers and the planner.

Each rank is a process on a core of its own (serve_rank.py). What is compared takes turns in one run. The weights are random: 90
million with `--quick`, else 1.1 billion. The weights of a token are read from memory once, so bandwidth is the floor of decoding.
What one machine with two cores and pip's wheels cannot measure is a row that says why.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcserve.config import ModelConfig, read_config
from hpcserve.group.arrange import even_split
from hpcserve.model import whole_part
from hpcserve.plan import KERNELS, LinkTable, PlanGoal, ServeLoad, ServeNode, make_plan, model_shape
from hpcserve.random_model import write_random_model
from hpcserve.split import ModelPart, ModelSplit
from tests.bench.figures import Figure, from_samples, without_value
from tests.tiny_models import FAMILIES, tokenizer

LIMIT_S = 600.0  # for one answer of a rank
SMALL = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
LARGE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
STORED_BYTES = 2  # of a weight in the files: bfloat16
KINDS = ("fp32", "bf16", "int8")
STREAMS = 16
CONTEXT = 64
PROMPT = 512
DECODING = 8  # streams beside the prompt
NOT_HERE = {
    "one core beside llama.cpp": ("llama-cpp-python has no wheel on PyPI", "bf16 >= 0.95x, int8 >= 1.1x"),
    "2 ranks beside distributed-llama": ("it is not packaged", ">= 1.5x"),
    "2 ranks, 1 Gbit/s and 0.2 ms": ("needs a slow link", ">= 1.71x"),
    f"2 stages, {STREAMS} streams, 3 ms": ("needs a slow link", ">= 1.8x"),
    "unequal ranks, 2:1": ("needs a quota of a core", ">= 0.85x of the sum"),
    "survival": ("make serve-rounds", "all tokens right"),
    "perplexity of int8 and int4": ("needs a trained model", "+ <= 1 % and 5 %"),
    "clients, and 10,000 schemathesis cases": ("make compat", "no 500"),
    "GPU, 1 and 32 streams": ("cores only", ">= 0.9x of vLLM"),
}


class RankProcess:
    """A rank on a core; `call` waits for its answer."""

    def __init__(self, core: int) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.serve_rank", str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        self.port: int = self.answer()

    def ask(self, command: str, **arguments: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the result of the oldest command without an answer."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LIMIT_S)[0]:
            raise TimeoutError(f"a rank is silent for {LIMIT_S:g} s")
        line = json.loads(self._process.stdout.readline() or '{"error": "a rank has ended"}')
        if "error" in line:
            raise RuntimeError(line["error"])
        return line["result"]

    def call(self, command: str, **arguments: object) -> Any:
        """Send a command and return its result."""
        self.ask(command, **arguments)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def ranks(count: int) -> Iterator[list[RankProcess]]:
    """Start ranks, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    made: list[RankProcess] = []
    try:
        for core in cores[:count]:
            made.append(RankProcess(core))
        yield made
    finally:
        for one in made:
            one.close()


def weights_of(config: ModelConfig, part: ModelPart) -> int:
    """Return the weights of a part's matrices."""
    shape = model_shape(config)
    layer = len(part.kv_groups) * shape.group_weights() + len(part.ffn) * shape.column_weights()
    ends = (part.layers.start == 0) + (part.layers.stop == shape.layers)
    return len(part.layers) * layer + ends * len(part.vocab) * shape.width


def weights_of_token(config: ModelConfig, part: ModelPart) -> int:
    """Return the weights that a token reads: of the embedding one row, which does not count."""
    return weights_of(config, part) - (part.layers.start == 0) * len(part.vocab) * config.hidden


def in_turns(rounds: int, *calls: Callable[[], float]) -> list[list[float]]:
    """Return the results of calls that take turns."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for samples, call in zip(found, calls, strict=True):
            samples.append(call())
    return found


class ServeBench:
    """The measurements of one run; `figures` are the rows of the table."""

    def __init__(self, directory: Path, config: ModelConfig, *, quick: bool) -> None:
        self.directory, self.config = directory, config
        self.rounds, self.steps = (3, 12) if quick else (5, 16)
        self.whole = ModelSplit(stages=((whole_part(config),),))
        self.figures: list[Figure] = []
        self.memory_bytes: dict[str, float] = {}  # of both ranks, by the kind of weights

    def load(self, group: Sequence[RankProcess], kind: str, split: ModelSplit) -> list[dict[str, float]]:
        """Load the parts of a split and connect their ranks; return what loading took."""
        where = {"directory": str(self.directory), "kind": kind, "split": split.to_json(), "streams": STREAMS}
        for rank, one in enumerate(group):
            one.ask("load", rank=rank, **where)
        loads = [one.answer() for one in group]
        for one in group:
            one.ask("connect", ports=[other.port for other in group])
        for one in group:
            one.answer()
        return loads

    def decode(self, leader: RankProcess, streams: int = 1) -> float:
        """Return the tokens of all streams in a second."""
        found: float = leader.call("decode", streams=streams, steps=self.steps, context=CONTEXT)
        return found

    def one_core(self, kind: str) -> None:
        """Measure a core beside its bandwidth and, for floats, beside transformers on the same core."""
        with ranks(1) as group, ranks(1) as others:
            self.load(group, kind, self.whole)
            size = KERNELS[kind].weight_bytes * weights_of_token(self.config, self.whole.part(0))
            calls = [lambda: self.decode(group[0]), lambda: others[0].call("read_rate", seconds=0.5) / size]
            if kind == "int8":
                self.load(others, "bf16", self.whole)
                peer, peer_bar = "bf16", ">= 1.7x"
                calls.append(lambda: self.decode(others[0]))
            else:
                dtype = {"fp32": "float32", "bf16": "bfloat16"}[kind]
                others[0].call("load_theirs", directory=str(self.directory), dtype=dtype)
                peer, peer_bar = "transformers' generate", ""
                calls.append(lambda: others[0].call("generate_theirs", tokens=self.steps, prompt=CONTEXT))
            ours, most, theirs = in_turns(self.rounds, *calls)
        bar = {"bf16": ">= 0.80x", "int8": ">= 0.75x"}.get(kind, "")
        self.add(f"one core, {kind}, 1 stream", ours, "tok/s", most, "memory's bandwidth", bar)
        self.add(f"one core, {kind}, 1 stream", ours, "tok/s", theirs, peer, peer_bar)

    def batches(self) -> None:
        """Measure several streams on a core, a prompt beside them, and the API's share of the first token."""
        with ranks(1) as (leader,):
            self.load([leader], "int8", self.whole)
            counts = (1, 8, STREAMS)
            found = in_turns(self.rounds, *(lambda count=count: self.decode(leader, count) for count in counts))
            for count, samples in zip(counts[1:], found[1:], strict=True):
                bar = ">= 6x" if count == STREAMS else ""
                self.add(f"one core, int8, {count} streams", samples, "tok/s", found[0], "1 stream", bar)
            samples = [leader.call("prefill", tokens=PROMPT) for _ in range(self.rounds)]
            self.add(f"one core, int8, prompt of {PROMPT}", samples, "tok/s")
            leader.call("start_engine", streams=STREAMS)
            self.interference(leader)
            self.overhead(leader)

    def interference(self, leader: RankProcess) -> None:
        """Measure how long streams wait while a prompt arrives."""
        beside = [leader.call("gaps", streams=DECODING, tokens=96, prompt=PROMPT) for _ in range(self.rounds)]
        alone = leader.call("gaps", streams=DECODING, tokens=96, prompt=0)
        normal = [1000 * alone["normal_s"]]
        name = f"longest gap of {DECODING} streams"
        self.add(f"{name}, no prompt", [1000 * alone["longest_s"]], "ms", normal, "normal gap")
        longest = [1000 * one["longest_s"] for one in beside]
        self.add(f"{name}, a prompt of {PROMPT}", longest, "ms", normal, "normal gap", "<= 2.5x")

    def overhead(self, leader: RankProcess) -> None:
        """Measure what the API adds to the time until the first token."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", leader.call("serve", directory=str(self.directory)), timeout=60
        )
        prompt = [5] * 8
        asked = json.dumps({"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True})

        def ask() -> float:
            began_s = time.perf_counter()
            connection.request("POST", "/v1/completions", asked, {"content-type": "application/json"})
            reply = connection.getresponse()
            first = reply.readline()
            took_s = time.perf_counter() - began_s
            assert first.startswith(b"data: {"), first
            reply.read()
            return 1000 * took_s

        served, alone = in_turns(10 * self.rounds, ask, lambda: 1000 * leader.call("first_token", prompt=len(prompt)))
        self.add("first token by the API", served, "ms", alone, "the engine alone")
        more = statistics.median(served) - statistics.median(alone)
        self.figures.append(Figure(name="first token, the API's part", value=more, unit="ms", bar="<= 2 ms"))

    def two_ranks(self, kind: str) -> None:
        """Measure two ranks that share each layer beside one; their memory, and what the planner says of both."""
        split = even_split(self.config, 2, "tensor")
        with ranks(1) as alone, ranks(2) as group:
            self.load(alone, kind, self.whole)
            loads = self.load(group, kind, split)
            one, two = in_turns(self.rounds, lambda: self.decode(alone[0]), lambda: self.decode(group[0]))
        self.add(f"2 ranks, {kind}, 1 stream", two, "tok/s", one, "1 rank", ">= 1.71x")
        single, both = self.bandwidths()
        self.add("2 cores read at once", [both], "GB/s", [single], "1 core")
        gains = [after / before for before, after in zip(one, two, strict=True)]
        self.add(f"2 ranks, {kind}, gain", gains, "x", [both / single], "the cores' bandwidth", ">= 0.92x")
        self.memory(kind, split, loads)
        self.predictions(kind, split, statistics.median(one), statistics.median(two))

    def replicas(self) -> None:
        """Measure two models that decode at once beside one alone."""
        with ranks(2) as group:
            for one in group:
                self.load([one], "int8", self.whole)

            def both() -> float:
                asked = {"streams": 1, "steps": 8 * self.steps, "context": CONTEXT}
                for one in group:
                    one.ask("decode", **asked)
                return sum(one.answer() for one in group)

            alone, together = in_turns(self.rounds, lambda: self.decode(group[0]), both)
        self.add("2 replicas, int8, a stream each", together, "tok/s", alone, "1 replica", ">= 1.9x")

    def bandwidths(self) -> tuple[float, float]:
        """Return the GB/s of one core alone, and of two together."""
        with ranks(2) as cores:
            single = cores[0].call("read_rate", seconds=1.0)
            for core in cores:
                core.ask("read_rate", seconds=1.0)
            return single / 1e9, sum(core.answer() for core in cores) / 1e9

    def memory(self, kind: str, split: ModelSplit, loads: Sequence[dict[str, float]]) -> None:
        """Add what ranks read, and the memory that their parts take."""
        for rank, load in enumerate(loads):
            weights = weights_of(self.config, split.part(rank))
            stored, kept = STORED_BYTES * weights / 1e6, KERNELS[kind].weight_bytes * weights / 1e6
            name = f"rank {rank} of 2, {kind}"
            self.add(f"{name}, read", [load["read_bytes"] / 1e6], "MB", [stored], "own part", "<= 1.05x")
            self.add(f"{name}, memory", [load["memory_bytes"] / 1e6], "MB", [kept], "own part", "<= 1.1x + 0.45 GiB")
            self.add(f"{name}, load", [load["took_s"]], "s")
        self.memory_bytes[kind] = sum(load["memory_bytes"] for load in loads)

    def predictions(self, kind: str, split: ModelSplit, one: float, two: float) -> None:
        """Compare what the planner says of one rank and of two with what was measured."""
        with ranks(2) as cores:
            facts = cores[0].call("node", kind=kind)
            for core in cores:
                core.ask("node", kind=kind)
            shared = cores[0].answer(), cores[1].answer()
        load = ServeLoad(prompt_tokens=CONTEXT, answer_tokens=CONTEXT, context_tokens=2 * CONTEXT)
        for measured, known in ((one, [facts]), (two, list(shared))):
            nodes = [ServeNode(name=f"n{at}", free_bytes=1 << 40, **values) for at, values in enumerate(known)]
            plan = make_plan(model_shape(self.config), kind, nodes, LinkTable(), load, PlanGoal.LATENCY)
            found = [
                one.replicas[0]
                for one in plan.candidates
                if len(one.replicas) == 1 and one.replicas[0].split.size == len(nodes)
            ]
            best = next((replica for replica in found if len(replica.stages) == 1), None)
            if best is not None:
                name = f"predicted, {kind}, {len(nodes)} rank{'s' * (len(nodes) > 1)}"
                self.add(name, [1 / best.alone_s], "tok/s", [measured], "measured", "0.9-1.1x")

    def pipeline(self) -> None:
        """Measure two stages with many streams beside one rank with as many."""
        with ranks(1) as alone, ranks(2) as group:
            self.load(alone, "int8", self.whole)
            self.load(group, "int8", even_split(self.config, 2, "pipeline"))
            one, two = in_turns(
                self.rounds, lambda: self.decode(alone[0], STREAMS), lambda: self.decode(group[0], STREAMS)
            )
        self.add(f"2 stages, int8, {STREAMS} streams", two, "tok/s", one, "1 rank", ">= 1.8x")

    def add(
        self, name: str, samples: Sequence[float], unit: str, floor: Sequence[float] = (), of: str = "", bar: str = ""
    ) -> None:
        """Add a row: the median, beside the median of what it is compared with."""
        beside = statistics.median(floor) if floor else None
        self.figures.append(from_samples(name, samples, unit, floor=beside, floor_name=of, bar=bar))


def run(quick: bool) -> list[Figure]:
    """Return the table of serving."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        config = {**FAMILIES["llama"], "model_type": "llama", **(SMALL if quick else LARGE)}
        write_random_model(directory, config, tokenizer())
        bench = ServeBench(directory, read_config(directory), quick=quick)
        for kind in KINDS:
            bench.one_core(kind)
        bench.batches()
        if len(os.sched_getaffinity(0)) > 1:
            bench.two_ranks("bf16")
            bench.two_ranks("int8")
            less, more = (bench.memory_bytes[kind] / 1e6 for kind in ("int8", "bf16"))
            bench.add("2 ranks, int8, memory", [less], "MB", [more], "bf16", "<= 0.53x")
            bench.pipeline()
            bench.replicas()
        else:
            bench.figures.append(without_value("2 ranks, 2 stages, 2 replicas", "needs two cores"))
    return bench.figures + [without_value(name, why, bar) for name, (why, bar) in NOT_HERE.items()]
