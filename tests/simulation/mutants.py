"""Known ways to break the production code, each of which the simulation has to notice.

A mutant takes one safeguard of the launch protocol away, in this process and for as long as its block lasts. What is a second
safeguard beside another (a tombstone beside the note that an attempt is over) cannot be seen missing, and is not here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hpcnode import ledger, protocol
from hpcsched.controller import reports, silence, tick
from hpcsched.store.store import Store
from simulation import chaos
from simulation.world import Stage

Change = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is taken away."""

    name: str
    change: Change


def _instead(where: Any, name: str, made: Callable[[Any], Any]) -> Change:
    """Return the change that puts `made(what stands there now)` in the place of a function."""
    return lambda: mock.patch.object(where, name, made(getattr(where, name)))


def _starts_again(real: Any) -> Any:
    """An agent that finds no shepherd starts another, whatever the last one has put on disk."""

    def gone(self: ledger.Ledger, token: str) -> None:
        entry = self.entries.get(token)
        if entry is not None and not entry.is_final and entry.launch is not None:
            entry.minded, entry.status = False, protocol.CLAIMED
            self._start(entry)
        else:
            real(self, token)

    return gone


def _sends_before_the_commit(real: Any) -> Any:
    """What a tick has decided is carried out before it is on disk."""

    def commit(self: tick.Controller, tx: Any, answers: Any) -> bool:
        for job in tx.batch.jobs.values():
            self._perform(job)
        return bool(real(self, tx, answers))

    return commit


def _replaced_on_a_timeout(_: Any) -> Any:
    """A node that is silent for a second is believed to run nothing."""
    return lambda job: 1.0


def _believes_every_report(real: Any) -> Any:
    """A report on an older attempt counts as one on the present one."""

    def take(tx: Any, node: Any, token: Any, report: protocol.Report, answer: Any) -> None:
        job = tx.world.jobs.get(token.job_id)
        if job is not None and job.token:
            report = dataclasses.replace(report, token=job.token)
        real(tx, node, token, report, answer)

    return take


def _is_never_gathered(_: Any) -> Any:
    return lambda job: False


def _finds_nothing(_: Any) -> Any:
    return lambda *args: None


MUTANTS = (
    Mutant("a lost shepherd's step is started again", _instead(ledger.Ledger, "shepherd_gone", _starts_again)),
    Mutant("a launch is sent before its commit", _instead(tick.Controller, "_commit", _sends_before_the_commit)),
    Mutant("a job is replaced on a timeout", _instead(silence, "proof_after_s", _replaced_on_a_timeout)),
    Mutant("what a silent node was sent is never launched", _instead(silence, "is_gathered", _is_never_gathered)),
    Mutant("reports on older attempts are believed", _instead(reports, "on_batch_report", _believes_every_report)),
    Mutant("a request id is not looked up", _instead(Store, "request_jobs", _finds_nothing)),
)


def noticed(on: Stage, mutant: Mutant, worlds: int) -> chaos.Outcome | None:
    """Return the first of so many random worlds that breaks an invariant with the mutant, None if none does."""
    with mutant.change():
        for seed in range(worlds):
            outcome = chaos.play(on, chaos.script_of(seed))
            if outcome.violation is not None:
                return outcome
    return None
