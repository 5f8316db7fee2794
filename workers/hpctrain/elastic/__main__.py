"""`python -m hpctrain.elastic [--ranks N] [--spares K] [--least M] -- COMMAND`.

An elastic run, whose ranks continue without a lost one.
Starts COMMAND once per rank, and again in place of a lost rank.  COMMAND is a training script of `hpctrain.run`.  One process
per slot; a slot is a place on a node.  In a job each process is a step of its own (`hrun` with one task), so that its end does
not affect the others.  When the job gains or loses nodes, slots are added or removed.
Exit status: that of the ranks: 0 finished, 75 stopped with a checkpoint, 1 an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hpctrain.elastic.launch import RankLauncher, RankSlot, allocation, ending, own_address, was_killed
from hpctrain.elastic.roster import SILENT_S, Roster, RosterSettings
from hpctrain.elastic.serve import RosterServer
from hpctrain.errors import EXIT_FAILED, EXIT_REQUEUE, TrainError

GRACE_S = 5.0
MOST_BETWEEN_BEATS_S = 0.5  # of a healthy rank on a busy machine
AGAIN_S = 1.0  # between two starts in a slot, or after a message that did not reach the controller
MOST_LOSSES = 5  # per rank, without a step between them
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks to their end, and return the exit status."""
    options = parse(arguments)
    try:
        return asyncio.run(ElasticRun(options, os.environ).run())
    except TrainError as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        return EXIT_FAILED


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="hpctrain.elastic", description="Train on ranks that may be lost, leave and join; the others continue."
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks (default: the tasks of the job, else 2)"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="K", help="further ranks that wait to replace lost ones (%(default)s)"
    )
    parser.add_argument(
        "--least", type=int, default=1, metavar="M", help="continue with at least M ranks (%(default)s)"
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=SILENT_S,
        metavar="S",
        help="a rank without a heartbeat for S seconds is lost; more than a step holds the GIL (%(default)s)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the cost of faults to FILE, as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the training script")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; a wrong one ends the program with status 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("no command; for example: python -m hpctrain.elastic -- python train.py --out run")
    if options.ranks is not None and not 1 <= options.least <= options.ranks:
        parser.error(f"--least {options.least} must be between 1 and --ranks {options.ranks}")
    if not options.silence > MOST_BETWEEN_BEATS_S:
        parser.error(f"--silence {options.silence:g}: must be more than {MOST_BETWEEN_BEATS_S:g} s")
    if options.spares < 0:
        parser.error(f"--spares {options.spares}: cannot be negative")
    return options


class ElasticRun:
    """One run: its roster, its processes, and the cost of faults."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._options, self._environ = options, environ
        self._launcher = RankLauncher(options.command, environ)
        self._key = secrets.token_hex(16)
        self._slots: dict[int, RankSlot] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._retired: set[int] = set()
        self._ended: dict[int, int] = {}  # exit status of the last process of each slot
        self._status: int | None = None
        self._stopping = False
        self._losses_without_step, self._step_then = 0, 0

    async def run(self) -> int:
        """Start everything, wait for the end, and print a summary."""
        here = allocation(self._environ)
        places: list[str | None]
        if here is None:
            places = [None] * (self._options.ranks or 2)
        else:
            places = [node for node in here.nodes for _ in range(here.per_node)]
        spares = [places[i % len(places)] for i in range(self._options.spares)]
        least = min(self._options.least, len(places))
        settings = RosterSettings(least=least, want=len(places), silent_s=self._options.silence)
        roster = Roster(settings, time.monotonic())
        self._server = RosterServer(roster, self._key, _print_line, self._lost, self._retired.add)
        port = await self._server.listen("0.0.0.0" if here else "127.0.0.1")
        self._facts = {"HPCTRAIN_ROSTER": f"{own_address(self._environ)}:{port}", "HPCTRAIN_ROSTER_KEY": self._key}
        self._heed_signals(in_job=here is not None)
        for place in places:
            self._open(place, spare=False)
        for place in spares:
            self._open(place, spare=True)
        await self._server.over.wait()
        return await self._end()

    def _open(self, node: str | None, spare: bool) -> None:
        slot = RankSlot(number=len(self._slots), node=node, spare=spare)
        self._slots[slot.number] = slot
        self._keepers[slot.number] = asyncio.create_task(self._keep(slot))

    async def _keep(self, slot: RankSlot) -> None:
        """Run one process after another in a slot, until the run is over or the slot is given up."""
        while not self._server.over.is_set() and slot.number not in self._retired and not self._stopping:
            started_s, joined = time.monotonic(), self._server.joined[slot.number]
            await self._launcher.start(slot, self._facts | {"HPCTRAIN_SLOT": str(slot.number)})
            process = self._launcher.processes[slot.number]
            status = self._ended[slot.number] = await process.wait()
            if self._server.over.is_set() or slot.number in self._retired:
                return
            if self._server.joined[slot.number] == joined and not self._stopping:
                _print_line(f"slot {slot.number}: its process {ending(status)} before it joined")
            if self._server.roster.generation < 0:
                self._count_loss()
                if status > 0 and not was_killed(status):
                    self._give_up(f"a rank ended with status {status} before the run began", status)
            if self._is_hopeless():
                self._give_up(f"{self._losses_without_step} ranks were lost without a step between", EXIT_FAILED)
            else:
                await asyncio.sleep(max(0.0, started_s + AGAIN_S - time.monotonic()))
        if self._stopping and self._launcher.all_ended:
            self._give_up("every rank ended at the stop signal", EXIT_REQUEUE)

    def _lost(self, slot: int) -> None:
        self._launcher.signal(slot, signal.SIGKILL)
        self._count_loss()

    def _count_loss(self) -> None:
        if self._step_then < self._server.account.step:
            self._step_then, self._losses_without_step = self._server.account.step, 0
        self._losses_without_step += 1

    def _is_hopeless(self) -> bool:
        return self._losses_without_step > MOST_LOSSES * max(1, len(self._slots))

    def _give_up(self, why: str, status: int) -> None:
        self._status = status
        self._server.failure = self._server.failure or why
        self._server.over.set()

    def _heed_signals(self, *, in_job: bool) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        if in_job:
            loop.add_signal_handler(signal.SIGWINCH, self._begin_resize)

    def _stop(self, number: signal.Signals) -> None:
        """Make the ranks stop with a checkpoint; before they have begun, end them."""
        self._stopping = True
        self._launcher.signal_all(number)
        if self._server.roster.generation < 0:
            self._give_up(f"{number.name} came before the run began", EXIT_REQUEUE)

    def _begin_resize(self) -> None:
        self._resizing = asyncio.create_task(self._resize())

    async def _resize(self) -> None:
        """Follow the job's nodes: ranks leave between two steps, before their node is given back."""
        here = allocation(self._environ)
        assert here is not None
        keep = here.wanted or here.nodes
        leaving = {slot.number for slot in self._slots.values() if slot.node not in keep} - self._retired
        self._retired |= leaving
        for node in keep:
            had = any(slot.node == node for slot in self._slots.values() if slot.number not in self._retired)
            for _ in range(0 if had else here.per_node):
                self._open(node, spare=False)
        want = sum(not slot.spare for slot in self._slots.values() if slot.number not in self._retired)
        self._server.roster.resize(want, set(self._retired))
        self._server.settle()
        await asyncio.gather(*(self._keepers[number] for number in leaving))
        if here.wanted is not None:
            await self._give_back(here.wanted)

    async def _give_back(self, wanted: tuple[str, ...]) -> None:
        """Keep only these nodes.

        The controller asks once, so tell it until it answers or asks again.
        """
        while not await self._launcher.resize_job(len(wanted)):
            await asyncio.sleep(AGAIN_S)
            here = allocation(self._environ)
            if self._server.over.is_set() or here is None or here.wanted != wanted:
                return

    async def _end(self) -> int:
        """Let the ranks finish; end spares and processes that are starting."""
        server = self._server
        if not server.failure:
            ending = {*server.done.values()} | {member.slot for member in server.roster.inside()}
            await asyncio.wait([self._keepers[slot] for slot in ending])  # ends, because silent ranks count as lost
        server.end_all()
        if server.failure:  # each rank may print a reason
            await asyncio.wait(self._keepers.values(), timeout=GRACE_S)
        for slot in self._keepers:
            self._keepers[slot].cancel()
            await self._launcher.end(slot)
        await server.close()
        self._report()
        if server.failure:
            _print(f"hpctrain: {server.failure}", sys.stderr)
            return self._status or EXIT_FAILED
        return self._status_of_all()

    def _status_of_all(self) -> int:
        """Return the ranks' exit status.

        A rank killed after the training loses nothing, except the first rank.
        """
        done = self._server.done
        first = self._ended[done[self._server.first]] if self._server.first in done else -signal.SIGKILL
        if was_killed(first):
            _print_line(
                "rank 0 was killed after the last step: what the script does after the training may be missing; run the same "
                "command again; it resumes there"
            )
            return EXIT_REQUEUE
        return max(status for slot in done.values() if not was_killed(status := self._ended[slot]))

    def _report(self) -> None:
        account, now_s = self._server.account, time.monotonic()
        if self._options.report is not None:
            try:
                self._options.report.write_text(json.dumps(account.facts(now_s)) + "\n")
            except OSError as error:  # keep the ranks' exit status
                _print_line(f"cannot write {self._options.report}: {error.strerror}")
        for line in account.describe(now_s):
            _print_line(line)


def _print_line(text: str) -> None:
    _print(f"elastic: {text}", sys.stdout)


def _print(line: str, stream: TextIO) -> None:
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:  # the reader is gone: the ranks continue, and nothing is flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
