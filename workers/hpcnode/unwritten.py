"""What a full or broken disk leaves to be done: the controller is told, and what could not be written is tried again.

A spool that cannot be written is a fault of the node, not of the job: while it lasts the node can take no launches. So is it
that no process can be forked: a node that refused every job would soon have had them all.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from hpcnode import protocol
from hpcnode.entry import Minding
from hpcnode.spool import Spool


class Unwritten:
    """What the spool of this node did not take yet."""

    def __init__(
        self, spool: Spool, minders: Minding, send: Callable[[protocol.Message], None], log: Callable[[str], None]
    ) -> None:
        self._spool = spool
        self._minders = minders
        self._send = send
        self._log = log
        self.fault = ""  # why this node can take no launches
        self._tombstones: Dict[str, Dict[str, Any]] = {}
        self._ended: List[protocol.EndJob] = []

    @property
    def waits(self) -> bool:
        """Whether `retry` has something to try."""
        return bool(self._tombstones or self._ended)

    # ----- the node's fault

    def is_unwell(self, why: str) -> None:
        """This node can take no launches: say so."""
        if why != self.fault:
            self._log(why)
        self.fault = why
        self._send(protocol.Condition(why))

    def look_again(self) -> None:
        """Find out whether a fault is still there, and say so when it has gone."""
        if not self.fault:
            return
        try:
            self._spool.try_to_write()
            self._minders.try_to_start()
        except OSError as error:
            self._log("nothing can be started here yet: %s" % error)
            return
        self.fault = ""
        self._send(protocol.Condition(""))

    # ----- what is to be written

    def bury(self, token: str, record: Dict[str, Any]) -> None:
        """Make durable that the token never runs here; while that cannot be, this agent remembers it (`has`)."""
        try:
            if not self._spool.bar(token, record):
                self._spool.write_final(token, record)
            self._tombstones.pop(token, None)
        except OSError as error:
            if token not in self._tombstones:
                self.is_unwell("cannot write a tombstone in the spool %s: %s" % (self._spool.path, error.strerror))
            self._tombstones[token] = record

    def has(self, token: str) -> bool:
        """Return whether the token's tombstone is not on disk yet."""
        return token in self._tombstones

    def drop(self, token: str) -> None:
        """Try no more to write the token's tombstone."""
        del self._tombstones[token]

    def note_ended(self, order: protocol.EndJob) -> bool:
        """Make durable that nothing of the job may start; False: not yet, it is tried again and answered then."""
        try:
            self._spool.done.end_attempts((order.incarnation, order.job_id), (order.attempt, order.stay))
        except OSError as error:
            if order not in self._ended:
                self._ended.append(order)
                self.is_unwell(
                    "cannot note in the spool %s that a job is over: %s" % (self._spool.path, error.strerror)
                )
            return False
        if order in self._ended:
            self._ended.remove(order)
        return True

    def retry(self) -> List[protocol.EndJob]:
        """Try again to write the tombstones; return the orders to end a job that are to be carried out again."""
        for token, record in list(self._tombstones.items()):
            self.bury(token, record)
        return list(self._ended)
