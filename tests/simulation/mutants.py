"""Known ways to break the production code, each of which the simulation has to notice.

A mutant takes one safeguard of the launch protocol away, in this process and for as long as its block lasts. What only a rare
chain of events makes visible is looked for in the story in which it happens, with each fault alone; the rest in random worlds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from hpcnode import spool
from hpcnode.agent import ledger
from hpcnode.os import process
from hpcnode.wire import protocol
from hpcsched.controller import tick
from hpcsched.controller.nodes import edits, loss, messages
from hpcsched.controller.nodes import edits as spools
from hpcsched.store.store import Store
from simulation import chaos, stories
from simulation.stage import Stage

Change = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is taken away."""

    name: str
    change: Change
    story: str = ""  # in which it has to be noticed, not in random worlds


def _instead(where: Any, name: str, made: Callable[[Any], Any]) -> Change:
    """Return the change that puts `made(what stands there now)` in the place of a function."""
    return lambda: mock.patch.object(where, name, made(getattr(where, name)))


def _starts_again(real: Any) -> Any:
    """An agent that finds no shepherd starts another, whatever the last one has put on disk."""

    def gone(self: ledger.Ledger, token: str) -> None:
        entry = self.entries.get(token)
        if entry is not None and not entry.is_final and entry.launch is not None:
            entry.supervised, entry.status = False, protocol.CLAIMED
            self._start(entry)
        else:
            real(self, token)

    return gone


def _sends_before_the_commit(real: Any) -> Any:
    """What a tick has decided is carried out before it is on disk."""

    def commit(self: tick.Controller, tx: Any, inbox: Any) -> Any:
        for job in tx.batch.jobs.values():
            self._perform(job)
        return real(self, tx, inbox)

    return commit


def _replaced_on_a_timeout(_: Any) -> Any:
    """A node that is silent for a second is believed to run nothing."""
    return lambda job, node: 1.0


def _believes_every_report(real: Any) -> Any:
    """A report on an older attempt counts as one on the present one."""

    def take(tx: Any, node: Any, token: Any, report: protocol.Report, answer: Any) -> None:
        job = tx.cluster.jobs.get(token.job_id)
        if job is not None and job.token:
            report = protocol.changed(report, token=job.token)
        real(tx, node, token, report, answer)

    return take


def _is_never_gathered(_: Any) -> Any:
    return lambda job: False


def _finds_nothing(_: Any) -> Any:
    return lambda *args: None


def _answers_before_the_commit(real: Any, *, nodes: bool) -> Any:
    """Who asked is answered, and a node's report acknowledged, before that is on disk."""

    def commit(self: tick.Controller, tx: Any, inbox: Any) -> Any:
        for item in inbox:
            if item.keep == nodes:
                item.done(item.result)
        return real(self, tx, inbox)

    return commit


def _answers_people_first(real: Any) -> Any:
    return _answers_before_the_commit(real, nodes=False)


def _acknowledges_first(real: Any) -> Any:
    return _answers_before_the_commit(real, nodes=True)


def _keeps_nothing(_: Any) -> Any:
    return lambda *args: None


def _leaves_no_tombstone(_: Any) -> Any:
    return lambda *args: True


def _by_session_alone(real: Any) -> Any:
    def remains(tasks: Any, *, uid: int, marker: bytes) -> Any:
        return real(tasks, uid, b"no such marker")

    return remains


def _listens_to_every_spool(_: Any) -> Any:
    """The inventory of whatever spool answers is proof: an edit of the configuration starts jobs twice."""
    return lambda sim, node, welcome: ""


def _takes_every_name(real: Any) -> Any:
    """A running controller takes a new name of its cluster while jobs are held in directories of the former one."""

    def refused(sim: Any, after: Any, same_machine: Any = ()) -> Any:
        return real(sim, replace(after, name=sim.config.name), same_machine)

    return refused


def _forgets_its_name(real: Any) -> Any:
    """A controller that starts takes the name that the file says, whatever is held under the former one."""
    return lambda config, former_name, stored, held: real(config, "", stored, held)


MUTANTS = (
    Mutant("a cluster with jobs is renamed", _instead(edits, "refused_edits", _takes_every_name)),
    Mutant("a cluster with jobs starts with another name", _instead(edits, "as_before", _forgets_its_name)),
    Mutant("the inventory of another spool is proof", _instead(spools, "why_refused", _listens_to_every_spool)),
    Mutant("a lost shepherd's step is started again", _instead(ledger.Ledger, "shepherd_gone", _starts_again)),
    Mutant("a launch is sent before its commit", _instead(tick.Controller, "_commit", _sends_before_the_commit)),
    Mutant("a job is replaced on a timeout", _instead(loss, "proof_after_s", _replaced_on_a_timeout)),
    Mutant("what a silent node was sent is never launched", _instead(loss, "is_gathered", _is_never_gathered)),
    Mutant(
        "reports on older attempts are believed",
        _instead(messages, "on_batch_report", _believes_every_report),
        story="a job asks to run again",
    ),
    Mutant("a request id is not looked up", _instead(Store, "request_jobs", _finds_nothing)),
    Mutant("a request is answered before its commit", _instead(tick.Controller, "_commit", _answers_people_first)),
    Mutant(
        "a report is acknowledged before its commit",
        _instead(tick.Controller, "_commit", _acknowledges_first),
        story="a job is requeued",
    ),
    Mutant("how a step ended is not kept on its node", _instead(spool.Spool, "write_final", _keeps_nothing)),
    Mutant(
        "what is revoked leaves no tombstone",
        _instead(spool.Spool, "revoke", _leaves_no_tombstone),
        story="the disk is full after 5 writes",
    ),
    Mutant(
        "that a job is over is not kept on its node",
        _instead(spool.DoneLog, "end_attempts", _keeps_nothing),
        story="a job is cancelled while it starts",
    ),
    Mutant(
        "what is left of a step is found by its session alone",
        _instead(process, "remains_of", _by_session_alone),
        story="a shepherd is killed, not all of its job",
    ),
)


def noticed(on: Stage, mutant: Mutant, worlds: int) -> str:
    """Return the first violation that the mutant leads to, "" if there is none.

    Looked for in so many random worlds or, if it has a story, in that: without faults, then with each fault alone.
    """
    story = next((one for one in stories.STORIES if one.name == mutant.story), None)
    if story is None:
        with mutant.change():
            outcomes = (chaos.play(on, chaos.script_of(seed)) for seed in range(worlds))
            return next((str(outcome.violation) for outcome in outcomes if outcome.violation is not None), "")
    pairs = [pair for pair in stories.pairs_of(on, story) if None in pair]
    with mutant.change():
        results = (stories.attempt(on, story, pair) for pair in pairs)
        return next((result for result in results if isinstance(result, str)), "")
