"""One rank of a served model: loads its part and computes, generation by generation.

The leader, rank 0 of a generation, also runs the engine, and serves the front's requests. A part is loaded in a thread, so that a
rank leaves a broken generation at once; a part that is still the same in the next generation is kept. A spare loads parts that it
may get before they are needed, and computes a step with each.
Environment: HPCTRAIN_ROSTER, HPCTRAIN_ROSTER_KEY and HPCTRAIN_SLOT (`hpctrain.elastic.member`); HPCSERVE_FRONT is the port of the
front, on the host of the roster; HPCSERVE_VERSION the hash of the front's model; HPCSERVE_SHARE how many ranks share this host;
HPCSERVE_MEMORY the most bytes that a rank may use, also enforced; HPCSERVE_MEASURE the kind of weights whose speed is measured;
HPCSERVE_STEP the seconds of the longest step with parts of prompts;
HPCSERVE_SILENCE the seconds after which a link that acknowledges nothing is cut; OMP_NUM_THREADS the most threads.
Does not know other ranks before the roster names them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcserve.batching import BatchLimits
from hpcserve.config import ModelConfig, read_config
from hpcserve.engine import LocalEngine
from hpcserve.errors import GroupLost, ServeError
from hpcserve.grammar import Grammar
from hpcserve.group.arrange import spare_parts
from hpcserve.group.leader import MOST_LINE_BYTES, LeaderEnd, MessageLine
from hpcserve.group.links import LinkWatch, Meeting, RankAddress, RankLinks
from hpcserve.group.measure import free_bytes, measured_links, measured_node
from hpcserve.group.runner import GroupRunner, RankProgram
from hpcserve.model import DecoderModel
from hpcserve.plan import BASE_BYTES
from hpcserve.split import ModelPart, ModelSplit
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep, StepRow
from hpcserve.tokens import TextTokenizer
from hpcserve.weights import WeightFiles
from hpctrain.comm.hosts import identity, own_addresses
from hpctrain.elastic.member import Membership
from hpctrain.elastic.roster import Message, members_of
from hpctrain.errors import TrainError
from hpctrain.peers import GUEST, encryption_wanted

LOOK_S = 0.05
REPORT_EVERY_S = 1.0
SLACK_BYTES = 128 << 20  # stacks of threads, and what malloc keeps


class PartLoader:
    """Loads parts of the model in threads.

    It keeps the one that a generation wants, or those that a spare may get.
    """

    def __init__(self, config: ModelConfig, checkpoint: WeightFiles) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._models: dict[tuple[ModelPart, str], DecoderModel] = {}
        self._model: DecoderModel | None = None  # the part that was begun last
        self._is_wanted = threading.Event()  # by a generation, so preparations end
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, part: ModelPart, kind: str, blocks: int) -> None:
        """Begin to load a part, unless this rank has it."""
        self._is_wanted.set()
        self._start(partial(self._load, part, kind, blocks))

    def prepare(self, parts: Sequence[ModelPart], kind: str) -> None:
        """Begin to load parts that this rank may get, and free all others."""
        self._is_wanted.clear()
        self._start(partial(self._prepare, parts, kind))

    def loaded(self, is_given_up: Callable[[], bool]) -> DecoderModel:
        """Wait for the part that was begun last.

        Raises:
            GroupLost: the generation is given up.
            ModelFileError: a file of the model is damaged or missing.
        """
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            if is_given_up():
                raise GroupLost("the generation is over")
        if self._error is not None:
            raise self._error
        assert self._model is not None
        return self._model

    def _start(self, call: Callable[[], None]) -> None:
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            call()

        self._thread = threading.Thread(target=run, name="load", daemon=True)
        self._thread.start()

    def _load(self, part: ModelPart, kind: str, blocks: int) -> None:
        try:
            self._free_all_but([(part, kind)])
            model = self._made(part, kind)
            if model.cache.blocks != blocks:
                model.allocate(blocks)
            self._model, self._error = model, None
        except RuntimeError as error:  # torch has no other error for too little memory
            self._error = ServeError(f"cannot load layers {part.layers.start} to {part.layers.stop}: {error}")
        except Exception as error:  # top of the thread: `loaded` raises it
            self._error = error

    def _prepare(self, parts: Sequence[ModelPart], kind: str) -> None:
        try:
            self._free_all_but([(part, kind) for part in parts])
            for part in parts:
                if self._is_wanted.is_set():
                    return
                warm_up(self._made(part, kind))
        except (ServeError, RuntimeError, MemoryError) as error:
            say(f"this spare prepares no more parts: {error}")

    def _made(self, part: ModelPart, kind: str) -> DecoderModel:
        """Return the part with an empty cache, or as it was used last."""
        if (part, kind) not in self._models:
            self._models[part, kind] = DecoderModel(self._config, self._checkpoint, part, kind)
        return self._models[part, kind]

    def _free_all_but(self, kept: Sequence[tuple[ModelPart, str]]) -> None:
        """Free other parts, because their memory is needed."""
        self._model = None
        others = self._models.keys() - set(kept)
        for key in others:
            del self._models[key]
        if others:
            gc.collect()  # errors of the last generation refer to its model


def warm_up(model: DecoderModel) -> None:
    """Compute a prompt and a token without other ranks: the first steps of a process are slow."""
    model.allocate(1)
    for tokens in (min(BLOCK_POSITIONS, model.config.context_tokens), 1):
        step = ForwardStep(number=0, rows=(StepRow(tokens=(0,) * tokens, start=0, blocks=(0,)),))
        hidden = None if model.is_first else torch.zeros(tokens, model.config.hidden)
        states = model.forward(step, hidden, lambda tensor: None)
        if model.is_last:
            model.logits(states, step)


class ServeRank:
    """This process as a rank, in one generation after the other."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._config = read_config(directory)
        self._checkpoint = WeightFiles(directory)
        self._tokenizer = TextTokenizer.load(directory, self._config.vocab)
        self._loader = PartLoader(self._config, self._checkpoint)
        self._listener = socket.create_server(("", 0), backlog=64)
        self._secret = os.urandom(16).hex()
        self._membership = Membership(environ)
        self._generations = 0
        self._free_bytes = 0
        self._program: RankProgram | None = None
        self._silent_s = float(environ.get("HPCSERVE_SILENCE") or 1.0)
        self._unreached: set[int] = set()  # members to which a link of this generation is broken
        self._measured: list[Any] = []  # links in this generation: two ranks, s, bytes/s

    def _report(self) -> None:
        """Tell the front now and then how long this rank computes for a token."""
        decoded, busy_s, steps = 0, 0.0, 0
        while True:
            time.sleep(REPORT_EVERY_S)
            now_decoded, now_busy_s = self._counts()
            if now_decoded > decoded:
                steps += now_decoded - decoded
                self._membership.report_step(self._generations + steps, now_busy_s - busy_s)
            decoded, busy_s = now_decoded, now_busy_s

    def _counts(self) -> tuple[int, float]:
        """Return the steps of one token in this generation, and their seconds."""
        program = self._program
        return (program.decoded, program.busy_s) if program is not None else (0, 0.0)

    def run(self) -> None:
        """Take part until the roster ends this process."""
        threading.Thread(target=self._report, name="report", daemon=True).start()
        membership = self._membership
        version = self._checkpoint.version()
        if version != self._environ.get("HPCSERVE_VERSION", version):
            membership.report_misfit(f"it sees another version of the model ({version[:12]}): is the share up to date?")
            sys.exit(1)
        gc.collect()
        gc.freeze()  # what there is now stays, so that later collections are quick
        membership.ready(self._offer(), self._prepare)
        while True:
            news = membership.next_generation()
            generation = int(str(news["generation"]))
            failed = not membership.changing
            self._unreached.clear()
            try:
                self._take_part(news, generation)
            except GroupLost as error:
                failed = not membership.changing
                say(f"generation {generation} is over: {error}")
            except (ServeError, MemoryError) as error:
                membership.failed(f"a rank cannot take part: {error}")
                sys.exit(1)
            membership.unwatch()
            membership.leave_generation(generation, failed=failed, unreached=self._unreached)

    def _offer(self) -> Message:
        """Return where this rank listens, and what the planner wants to know of it."""
        share = max(1, int(self._environ.get("HPCSERVE_SHARE", "1")))
        cores = max(1, len(os.sched_getaffinity(0)) // share)
        if "OMP_NUM_THREADS" in self._environ:  # torch begins with so many threads
            cores = min(cores, torch.get_num_threads())
        torch.set_num_threads(cores)
        speed = self._speed(cores)  # before the limit, because it needs memory of its own
        self._free_bytes = self._limited(free_bytes() // share)
        return {
            "addresses": [self._membership.host, *own_addresses()],
            "port": self._listener.getsockname()[1],
            "secret": self._secret,
            "host": " ".join(identity()),
            "node": self._environ.get("HPCSCHED_NODENAME") or socket.gethostname(),
            "free_bytes": self._free_bytes,
            "cores": cores,
            **speed,
        }

    def _speed(self, cores: int) -> Message:
        """Return how fast this rank reads and computes weights, if a planner asks.

        The weights are of the kind that it will hold.
        """
        kind = self._environ.get("HPCSERVE_MEASURE", "")
        if not kind:
            return {}
        node = measured_node("", kind, cores=cores)
        return {
            "read_bytes_s": node.read_bytes_s,
            "flops_s": node.flops_s,
            "kernel_bytes_s": node.kernel_bytes_s[kind],
        }

    def _limited(self, free: int) -> int:
        """Return the memory that this rank may use, and enforce the limit that the user set."""
        limit = int(self._environ.get("HPCSERVE_MEMORY") or 0)
        if limit <= 0:
            return free
        with open("/proc/self/status") as file:
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
        most = used + max(0, limit - BASE_BYTES) + SLACK_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return min(free, limit)

    def _prepare(self, facts: Message) -> None:
        """Load parts that this spare may get."""
        split, kind, blocks = ModelSplit.from_json(facts["split"]), str(facts["kind"]), int(str(facts["blocks"]))
        first, free = self._membership.number % split.size, self._free_bytes - BASE_BYTES
        parts = spare_parts(self._config, split, kind, blocks, first=first, free=free)
        self._loader.prepare(parts, kind)

    def _take_part(self, news: Message, generation: int) -> None:
        """Connect, load, and compute until the generation is over, which raises GroupLost."""
        members: list[Any] = members_of(news)
        rank = [member["number"] for member in members].index(self._membership.number)
        split = ModelSplit.from_json(news["split"])
        addresses = [
            RankAddress(
                addresses=tuple(one["addresses"]), port=one["port"], secret=one["secret"], host=one.get("host", "")
            )
            for one in members
        ]

        def is_broken() -> bool:
            return self._membership.is_broken(generation)

        def note_unreached(other: int) -> None:
            self._unreached.add(members[other]["number"])

        meeting = Meeting(
            split,
            addresses,
            generation,
            self._membership.key,
            encrypted=encryption_wanted(self._environ),
            is_given_up=is_broken,
            on_unreached=note_unreached,
        )
        links = meeting.connect(rank, self._listener)

        def cut(other: int) -> None:
            note_unreached(other)
            links.break_off()

        self._membership.watch(generation, links.break_off)
        try:
            pairs: Any = news.get("measure", [])
            self._measured = measured_links(links, pairs)
            # Not before: if the ranks do not meet, each still has the part that it had.
            self._loader.begin(split.part(rank), str(news["kind"]), int(str(news["blocks"])))
            with LinkWatch(links.connections(), self._silent_s, cut):
                self._compute(links, generation, self._loader.loaded(is_broken))
        finally:
            self._program = None  # it holds the model
            self._membership.unwatch()
            links.break_off()
            links.close()

    def _compute(self, links: RankLinks, generation: int, model: DecoderModel) -> None:
        self._generations += 1
        self._membership.report_step(self._generations, 0.0)
        if links.rank == 0:
            self._lead(model, links, generation)
        else:
            links.say_ready(self._measured)
            self._program = RankProgram(model, links)
            self._program.follow()

    def _lead(self, model: DecoderModel, links: RankLinks, generation: int) -> None:
        self._measured += links.await_ready()
        limits = BatchLimits(
            blocks=model.cache.blocks,
            context_tokens=self._config.context_tokens,
            step_s=float(self._environ.get("HPCSERVE_STEP", "inf")),
        )
        runner = GroupRunner(model, links)
        self._program = runner.program
        engine = LocalEngine(
            runner,
            limits,
            vocabulary=self._config.vocab,
            eos=frozenset(self._config.eos_tokens),
            grammar=Grammar(self._tokenizer, self._config.vocab).start,
        )
        try:
            asyncio.run(self._answer(engine, runner, links, generation))
        finally:
            links.break_off()  # the engine may wait for a rank
            engine.close()
        raise GroupLost("the leader's requests have ended")

    async def _answer(self, engine: LocalEngine, runner: GroupRunner, links: RankLinks, generation: int) -> None:
        """Serve the front's requests until the generation is over."""
        over, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            links.break_off()
            loop.call_soon_threadsafe(over.set)

        self._membership.watch(generation, end)
        try:
            host = self._environ["HPCTRAIN_ROSTER"].rpartition(":")[0]
            port = int(self._environ["HPCSERVE_FRONT"])
            reader, writer = await asyncio.open_connection(host, port, limit=MOST_LINE_BYTES)
            line = await MessageLine.proved(reader, writer, self._membership.key, GUEST, self._environ)
            line.send({"type": "leader", "generation": generation, "links": self._measured})
            serving = asyncio.create_task(LeaderEnd(engine, line, runner.metrics).serve(over))
            while not serving.done():
                await asyncio.wait([serving], timeout=LOOK_S)
                if self._membership.changing or runner.is_lost or engine.is_over:
                    over.set()
            await serving
        except OSError as error:
            raise GroupLost(f"cannot reach the front ({error})") from None
        finally:
            self._membership.unwatch()


def say(text: str) -> None:
    """Print a line for the job's output."""
    sys.stderr.write(f"hpcserve: {text}\n")
    sys.stderr.flush()


def run_rank(directory: Path) -> int:
    """Run this process as a rank; return its exit status."""
    try:
        ServeRank(directory, os.environ).run()
    except (ServeError, TrainError) as error:
        say(str(error))
    return 1


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1])))
