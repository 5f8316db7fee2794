"""What the controller is told of each entry, and what of it was committed: numbers, repetition, acknowledgement.

Rules:
- Each report has a number higher than all before it, those of the agents before this one included.
- A report is repeated until its number is acknowledged; a newer one of the same token takes the place of an older one.
- Of an entry that is `held` only the inventory tells, as of one that still runs.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List

from hpcnode import protocol
from hpcnode.entry import Entry, report_of
from hpcnode.spool import Spool


class Reports:
    """The reports of one agent."""

    def __init__(
        self,
        *,
        spool: Spool,
        send: Callable[[protocol.Message], None],
        boot_id: str,
        wall_s: Callable[[], float],
        boot_s: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._send = send
        self._boot_id = boot_id
        self._wall_s = wall_s
        self._boot_s = boot_s
        self._unanswered: Dict[int, Entry] = {}
        self._next_seq, self._seq_end = spool.reserve_seqs()
        self._repeat_below = 0

    def send(self, entry: Entry) -> None:
        """Report the entry's present state under a new number."""
        self._number(entry)
        self._send(self._report(entry))

    def tell_over(self, token: str, why: str) -> None:
        """Answer for a token whose entry has gone: it will not run."""
        self._send(protocol.Report(self._new_seq(), token, protocol.BARRED, self._wall_s(), why=why))

    def inventory(self, entries: Iterable[Entry]) -> List[Dict[str, Any]]:
        """Return a report of each of these entries, as `Welcome` has them."""
        reports = []
        for entry in entries:
            if not entry.seq:
                self._number(entry)
            report = protocol.to_json(self._report(entry))
            del report["type"]
            reports.append(report)
        return reports

    def acknowledged(self, seqs: Iterable[int]) -> List[Entry]:
        """Take note that these reports are committed; return the entries whose last report is among them."""
        entries = [self._unanswered.pop(seq) for seq in seqs if seq in self._unanswered]
        for entry in entries:
            entry.acked = True
        return entries

    def repeat(self) -> None:
        """Send again the reports that have had no answer since the last call."""
        for seq, entry in tuple(self._unanswered.items()):
            if seq < self._repeat_below and not entry.held:
                self._send(self._report(entry))
        self._repeat_below = self._next_seq

    def forget(self, entry: Entry) -> None:
        """Repeat nothing of this entry any more."""
        self._unanswered.pop(entry.seq, None)

    def _report(self, entry: Entry) -> protocol.Report:
        return report_of(entry, self._wall_s(), self._boot_id, self._boot_s())

    def _number(self, entry: Entry) -> None:
        self.forget(entry)
        entry.seq, entry.acked = self._new_seq(), False
        self._unanswered[entry.seq] = entry

    def _new_seq(self) -> int:
        if self._next_seq >= self._seq_end:
            self._next_seq, self._seq_end = self._spool.reserve_seqs(self._next_seq)
        self._next_seq += 1
        return self._next_seq - 1
