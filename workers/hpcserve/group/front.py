"""The front of a served model: starts ranks, keeps their roster, answers OpenAI's API.

In a job the ranks are steps on the job's nodes, one a node; elsewhere they are processes of this host. A rank that ends is
started again. Requests are held while no generation is ready. Which ranks get which part: arrange.py.
Does not compute. Rules: the front outlives ranks, and ranks do not outlive the front. After SIGTERM no new requests are
taken, and running ones have a grace period.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from hpcserve.api.app import create_app, server_config
from hpcserve.api.guard import load_keys
from hpcserve.chat import ChatTemplate
from hpcserve.config import read_config
from hpcserve.errors import GroupLost, ServeError
from hpcserve.group.arrange import GroupArrangement, GroupSettings
from hpcserve.group.leader import MOST_LINE_BYTES, GroupEngine, LeaderConnection, MessageLine
from hpcserve.plan import PlanGoal, ServeLoad, replan
from hpcserve.tokens import TextTokenizer
from hpcserve.weights import WeightFiles
from hpctrain.elastic.launch import RankLauncher, RankSlot, allocation, ending, own_address, was_killed
from hpctrain.elastic.roster import Message, Roster, RosterSettings
from hpctrain.elastic.serve import RosterServer
from hpctrain.errors import TrainError
from hpctrain.peers import HOST

SILENT_S = 1.0
LEAVE_S = 5.0
AGAIN_S = 1.0  # between two starts in a slot
LONGEST_PAUSE_S = 16.0
SPARE_FIRST_S, SPARE_LOOK_S = 2.0, 0.02
MOST_LOSSES = 5  # per rank, without a generation that is ready
HOLD_S = 300.0
COMPARE_EVERY_S = 60.0
LOOK_S = 1.0
LEAST_STEPS = 20  # of one token, in a minute, for a comparison
SINGLE_STEPS = ("single_token_steps_total", "single_token_step_seconds_total")
KINDS = ("fp32", "bf16", "int8", "int4")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """What the user asked for."""

    directory: Path
    group: GroupSettings
    spares: int = 0
    silent_s: float = SILENT_S
    leave_s: float = LEAVE_S
    hold_s: float = HOLD_S
    memory_bytes: int = 0  # of each rank; 0: what is free
    step_s: float = math.inf  # the longest step with parts of prompts
    patience_s: float = 60.0  # for all ranks, before fewer of them begin


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCounts:
    """What the ranks have counted so far of steps of one token."""

    generation: int = -1
    single: tuple[float, ...] = (0.0, 0.0)  # such steps, and the seconds that they took on all ranks together
    members: Mapping[int, tuple[int, float]] = field(default_factory=dict)  # the same of each, without waiting

    def since(self, then: SpeedCounts) -> tuple[float | None, dict[int, float]]:
        """Return tokens/s since other counts, or None; and the seconds of a step by member."""
        steps, took_s = (now - before for now, before in zip(self.single, then.single, strict=True))
        if self.generation != then.generation or steps < LEAST_STEPS or took_s <= 0:
            return None, {}
        step_s = {
            number: (useful_s - then.members[number][1]) / (step - then.members[number][0])
            for number, (step, useful_s) in self.members.items()
            if number in then.members and step > then.members[number][0]
        }
        return steps / took_s, step_s


@dataclass(slots=True, kw_only=True)
class RecoveryTimes:
    """When a generation was lost, and the next one formed and ready; 0: not yet."""

    lost_at_s: float = 0.0
    formed_at_s: float = 0.0
    ready_at_s: float = 0.0


class ServeFront:
    """The ranks of a served model, and the engine that they are together."""

    def __init__(self, settings: FrontSettings, environ: Mapping[str, str]) -> None:
        self._settings, self._environ = settings, environ
        self._config = read_config(settings.directory)
        with WeightFiles(settings.directory) as checkpoint:
            self.version = checkpoint.version()
        self.engine = GroupEngine(
            context_tokens=min(self._config.context_tokens, settings.group.blocks * 16),
            vocabulary=self._config.vocab,
            hold_s=settings.hold_s,
        )
        self.failure = ""
        self.over = asyncio.Event()  # the front cannot go on
        self._arrangement = GroupArrangement(self._config, settings.group, say)
        self._key = secrets.token_hex(16)
        self._keepers: list[asyncio.Task[None]] = []
        self._slots: list[RankSlot] = []
        self._retired: set[int] = set()
        self._generation = -1
        self.inside = frozenset[int]()  # slots of the current generation
        self._leader_slot = -1
        self._losses = 0  # since a generation was ready
        self.recovery = RecoveryTimes()  # of the generation that was lost last
        command = [sys.executable, "-P", "-m", "hpcserve.group.rank", str(settings.directory)]
        self.launcher = RankLauncher(command, environ)

    @property
    def spare_count(self) -> int:
        """The ranks that wait to replace lost ones."""
        return len(self._server.roster.spares())

    async def start(self) -> None:
        """Start the roster and the ranks."""
        settings = self._settings
        here = allocation(self._environ)
        count = settings.group.ranks + settings.spares
        nodes: list[str | None] = (
            [None] * count if here is None else [here.nodes[i % len(here.nodes)] for i in range(count)]
        )
        shares = Counter(nodes)
        roster_settings = RosterSettings(
            least=1,
            want=settings.group.ranks,
            patience_s=settings.patience_s,
            silent_s=settings.silent_s,
            leave_s=settings.leave_s,
        )
        roster = Roster(roster_settings, time.monotonic(), self._arrangement)
        self._server = RosterServer(roster, self._key, say, self._lost, self._retired.add, self._formed)
        address = "0.0.0.0" if here else "127.0.0.1"  # noqa: S104  # other nodes call; both ends prove a key
        port = await self._server.listen(address)
        self._listener = await asyncio.start_server(self._greet, address, 0, limit=MOST_LINE_BYTES)
        self._facts = {
            "HPCTRAIN_ROSTER": f"{own_address(self._environ)}:{port}",
            "HPCTRAIN_ROSTER_KEY": self._key,
            "HPCSERVE_FRONT": str(self._listener.sockets[0].getsockname()[1]),
            "HPCSERVE_VERSION": self.version,
            "HPCSERVE_MEMORY": str(settings.memory_bytes),
            "HPCSERVE_STEP": str(settings.step_s),
            "HPCSERVE_SILENCE": str(settings.silent_s),
            "HPCSERVE_MEASURE": settings.group.kind if settings.group.shape == "auto" else "",
        }
        for node in nodes:
            self._open(node, shares[node])
        if here is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, self._begin_resize)
        calls = (self._watch_roster(), self._watch_leader(), self._compare())
        self._watchers = [asyncio.create_task(call) for call in calls]

    def _open(self, node: str | None, share: int) -> None:
        """Add a slot, which shares its host with others."""
        slot = RankSlot(number=len(self._slots), node=node)
        facts = {**self._facts, "HPCTRAIN_SLOT": str(slot.number), "HPCSERVE_SHARE": str(share)}
        self._slots.append(slot)
        self._keepers.append(asyncio.create_task(self._keep(slot, facts)))

    def _begin_resize(self) -> None:
        self._resizing = asyncio.create_task(self._resize())

    async def _resize(self) -> None:
        """Follow the nodes of the job: ranks leave some before they are given back."""
        here = allocation(self._environ)
        assert here is not None
        keep = here.wanted or here.nodes
        leaving = {slot.number for slot in self._slots if slot.node not in keep} - self._retired
        self._retired |= leaving
        for node in keep:
            if not any(slot.node == node and slot.number not in self._retired for slot in self._slots):
                self._open(node, 1)
        ranks = max(1, min(self._settings.group.ranks, len(keep) - self._settings.spares))
        self._arrangement.resize(ranks)
        self._server.roster.resize(ranks, set(self._retired))
        self._server.settle()
        members = {member.slot for member in self._server.roster.members.values()}
        for number in leaving - members:  # it waits for a node that is lost
            await self.launcher.end(number)
        if leaving:
            await asyncio.wait([self._keepers[number] for number in leaving])
        while here is not None and here.wanted is not None and not await self.launcher.resize_job(len(here.wanted)):
            await asyncio.sleep(AGAIN_S)
            here = allocation(self._environ)

    async def end(self) -> None:
        """End all ranks and the roster."""
        for task in (*self._keepers, *self._watchers):
            task.cancel()
        self._server.end_all()
        self.engine.detach()
        for slot in self._slots:
            await self.launcher.end(slot.number)
        self._listener.close()
        await self._server.close()

    async def _watch_roster(self) -> None:
        await self._server.over.wait()
        self._give_up(self._server.failure or "a rank has left the group")

    async def _watch_leader(self) -> None:
        """End a leader that hangs; heartbeats are no progress."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - began_s > 2 * LOOK_S:
                continue  # this process stood still: the leader's messages are still unread
            leader = self.engine.leader
            if leader is not None and (why := leader.why_stalled(time.monotonic())):
                say(f"slot {self._leader_slot} is ended: {why}")
                self._end_generation()
                self.launcher.signal(self._leader_slot, signal.SIGKILL)

    async def _compare(self) -> None:
        """Compare predicted and measured speed; plan anew if they differ twice."""
        speeds: list[float] = []
        then = SpeedCounts()
        while True:
            await asyncio.sleep(COMPARE_EVERY_S)
            members = self._server.roster.inside()
            now = SpeedCounts(
                generation=self._generation,
                single=tuple(self.engine.metrics().get(name, 0.0) for name in SINGLE_STEPS),
                members={member.number: (member.step, member.useful_s) for member in members},
            )
            measured, step_s = now.since(then)
            then, predicted = now, self._arrangement.tokens_s
            if measured is None or predicted <= 0:
                speeds.clear()  # a new generation, or too few requests of one stream
                continue
            speeds.append(measured)
            if replan(predicted, speeds):
                speeds.clear()
                changes = self._arrangement.learn(step_s, members)
                figures = f"{measured:.3g} tokens/s instead of {predicted:.3g}"
                say(f"the prediction was wrong twice, {figures}: " + ("a new plan" if changes else "the plan stays"))
                if changes:
                    self._server.roster.renew()

    def _give_up(self, why: str) -> None:
        self.failure = self.failure or why
        self.over.set()

    async def _keep(self, slot: RankSlot, facts: Mapping[str, str]) -> None:
        """Run one process after the other in a slot; wait longer if they do not even join."""
        pause_s = AGAIN_S
        while slot.number not in self._retired:
            started_s, joined = time.monotonic(), self._server.joined[slot.number]
            await self.launcher.start(slot, facts)
            status = await self.launcher.processes[slot.number].wait()
            if slot.number in self._retired:
                return
            has_joined = self._server.joined[slot.number] > joined
            pause_s = AGAIN_S if has_joined else min(2 * pause_s, LONGEST_PAUSE_S)
            if not has_joined:
                say(f"slot {slot.number}: its process {ending(status)} before it joined")
            if not self.engine.is_ready:
                self._count_loss(status, has_joined=has_joined)
            await self.spare_first(slot.number)
            await asyncio.sleep(max(0.0, started_s + pause_s - time.monotonic()))

    async def spare_first(self, slot: int) -> None:
        """Wait a moment until a spare has replaced the rank in a slot.

        On one host, a starting rank would take the spare's cores.
        """
        until_s = time.monotonic() + (SPARE_FIRST_S if self._settings.spares else 0.0)
        while (slot in self.inside or not self.engine.is_ready) and time.monotonic() < until_s:
            await asyncio.sleep(SPARE_LOOK_S)

    def _count_loss(self, status: int, *, has_joined: bool) -> None:
        """Give up if ranks end again and again, and the model is never served."""
        self._losses += 1
        if not has_joined and status > 0 and not was_killed(status) and self._generation < 0:
            self._give_up(f"a rank ended with status {status} before the model was served, see above")
        if self._losses > MOST_LOSSES * len(self._slots):
            self._give_up(f"{self._losses} ranks ended and the model was not served in between")

    def _lost(self, slot: int) -> None:
        """End the process of a lost rank, and with it the generation."""
        self.launcher.signal(slot, signal.SIGKILL)
        if slot in self.inside:
            self._end_generation()

    def _end_generation(self) -> None:
        """Let all streams wait for the next generation."""
        if self.engine.is_ready:
            self.recovery = RecoveryTimes(lost_at_s=time.monotonic())
            self.engine.detach()

    def _formed(self, news: Message) -> None:
        self._arrangement.formed(news)
        self._generation = int(str(news["generation"]))
        slots = [self._server.roster.members[number].slot for number in self._arrangement.numbers]
        self.inside, self._leader_slot = frozenset(slots), slots[0]
        self._end_generation()
        self.recovery.formed_at_s = time.monotonic()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in the leader of the current generation; one of an old generation is turned away."""
        leader = None
        with suppress(GroupLost):
            line = await MessageLine.proved(reader, writer, self._key.encode(), HOST, self._environ)
            hello = await line.receive()
            if hello is None or hello.get("generation") != self._generation:
                line.close()
                return
            self._arrangement.learn_links(hello.get("links"))
            leader = LeaderConnection(line, self._generation)
            self.engine.attach(leader)
            self._losses = 0
            self._note_ready()
            await leader.read()
        if leader is not None and leader is self.engine.leader:
            self._end_generation()

    def _note_ready(self) -> None:
        times = self.recovery
        times.ready_at_s = time.monotonic()
        after = f" {times.ready_at_s - times.lost_at_s:.2f} s after the last one was lost" if times.lost_at_s else ""
        say(f"generation {self._generation} is ready{after}")


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to the front."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the front decides when the server drains."""
        yield


async def serve(
    settings: FrontSettings, environ: Mapping[str, str], *, name: str, listen: str, keys: Path | None
) -> int:
    """Serve a model until a signal comes, or the ranks cannot go on; return the exit status."""
    front = ServeFront(settings, environ)
    bound = bound_socket(listen)
    app = create_app(
        front.engine,
        TextTokenizer.load(settings.directory, front.engine.vocabulary),
        ChatTemplate.load(settings.directory),
        name=name,
        version=front.version,
        keys=load_keys(keys) if keys is not None else None,
        why_not_ready=lambda: None if front.engine.is_ready else "the ranks load the model",
    )
    server = DrainingServer(server_config(app))
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    await front.start()
    try:
        say(f"{name} listens at {listen_name(bound)}")
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        failing = asyncio.create_task(front.over.wait())
        await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
        if front.failure:  # streams get an error, and the server ends
            front.engine.give_up(front.failure)
            server.should_exit = True
        await serving
    finally:
        await front.end()
    if front.failure:
        say(front.failure)
    return 1 if front.failure else 0


def say(text: str) -> None:
    """Print a line for the job's output."""
    sys.stderr.write(f"hpcserve: {text}\n")
    sys.stderr.flush()


def listen_name(bound: socket.socket) -> str:
    """Return where a socket listens, as the user writes it."""
    name = bound.getsockname()
    return f"unix:{name}" if bound.family == socket.AF_UNIX else f"http://{name[0]}:{name[1]}"


def bound_socket(listen: str) -> socket.socket:
    """Return a socket that listens at `unix:PATH` or HOST:PORT.

    Raises:
        ServeError: the address cannot be used.
    """
    try:
        if listen.startswith("unix:"):
            path = Path(listen.removeprefix("unix:"))
            with suppress(FileNotFoundError):
                path.unlink()
            bound = socket.socket(socket.AF_UNIX)
            bound.bind(str(path))
            path.chmod(0o600)  # nobody can connect before `listen`
            bound.listen(128)
            return bound
        host, _, port = listen.rpartition(":")
        return socket.create_server((host.strip("[]"), int(port)), backlog=128)
    except (OSError, ValueError, OverflowError) as error:
        raise ServeError(f"cannot listen at '{listen}': {error}") from None


# ----- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m hpcserve run`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the model, as Hugging Face keeps it")
    parser.add_argument("--name", help="name of the model in the API (default: that of the directory)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of the group (default: the nodes of the job, else 1)"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="further ranks that replace lost ones (%(default)s)"
    )
    parser.add_argument("--kind", choices=KINDS, help="weights in memory (default: as they are stored, else bf16)")
    parser.add_argument(
        "--split", choices=("auto", "tensor", "pipeline"), default="auto", help="how to split the model (%(default)s)"
    )
    parser.add_argument(
        "--goal",
        choices=[goal.value for goal in PlanGoal],
        default="latency",
        help="what the split is for (%(default)s)",
    )
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="requests at once (%(default)s)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="longest request (default: 4096, or the model's)")
    parser.add_argument(
        "--listen", default="127.0.0.1:8000", metavar="ADDRESS", help="unix:PATH or HOST:PORT (%(default)s)"
    )
    parser.add_argument(
        "--max-step-ms", type=float, default=math.inf, metavar="MS", help="longest step with parts of prompts"
    )
    parser.add_argument(
        "--memory",
        type=int,
        default=0,
        metavar="MIB",
        help="memory of each rank, also enforced (default: what is free)",
    )
    parser.add_argument("--keys", type=Path, metavar="FILE", help="keys of the API; without it no key is needed")
    parser.add_argument(
        "--hold",
        type=float,
        default=HOLD_S,
        metavar="S",
        help="hold requests while ranks are started anew (%(default)g)",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=SILENT_S,
        metavar="S",
        help="a rank without a heartbeat for S is lost (%(default)g)",
    )


def settings_of(options: argparse.Namespace, environ: Mapping[str, str]) -> FrontSettings:
    """Return the settings that options mean.

    Raises:
        ServeError: an option does not fit the model, or the others.
    """
    if (
        min(options.streams, 1 if options.ranks is None else options.ranks) < 1
        or options.spares < 0
        or not 0.5 <= options.silence < 3600
        or not options.max_step_ms >= 1
    ):
        raise ServeError(
            "cannot serve: --streams, --ranks and --max-step-ms are from 1, --spares from 0, --silence from 0.5"
        )
    config = read_config(options.model)
    asked = 4096 if options.context is None else options.context
    context = min(asked, config.context_tokens)
    if context < 2 or (options.context is not None and asked > config.context_tokens):
        raise ServeError(f"cannot serve: --context is from 2 to {config.context_tokens}, the most that the model knows")
    half = min(256, context // 2)
    here = allocation(environ)
    nodes = 1 if here is None else len(here.nodes)
    group = GroupSettings(
        ranks=options.ranks or max(1, nodes - options.spares),
        kind=options.kind or (config.stored.value if config.stored.value in KINDS else "bf16"),
        load=ServeLoad(streams=options.streams, prompt_tokens=half, answer_tokens=half, context_tokens=context),
        goal=PlanGoal(options.goal),
        shape=options.split,
    )
    return FrontSettings(
        directory=options.model.resolve(),
        group=group,
        spares=options.spares,
        silent_s=options.silence,
        hold_s=options.hold,
        memory_bytes=max(0, options.memory) << 20,
        step_s=options.max_step_ms / 1000,
    )


def run(options: argparse.Namespace) -> int:
    """Carry out `python -m hpcserve run`; return the exit status."""
    try:
        settings = settings_of(options, os.environ)
        name = options.name or settings.directory.name
        return asyncio.run(serve(settings, os.environ, name=name, listen=options.listen, keys=options.keys))
    except (ServeError, TrainError) as error:
        say(str(error))
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the model that the options name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="hpcserve run", description="Serve a model on one or several nodes.")
    add_options(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
