"""Which controller this node obeys: one of a lower epoch, or of an incarnation that another has followed, is refused for ever."""

from __future__ import annotations

from hpcnode.spool import Epochs, Spool

ADVICE = (
    ": another controller runs, or the database is an older copy (the way to put one in its place is hpcsched restore)"
)


class Terms:
    """The controllers' terms that this node has seen; kept on disk."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.seen = spool.epochs()

    def begin(self, incarnation: str, epoch: int) -> str:
        """Take a controller's term, durably; return "" or why it is refused."""
        seen = self.seen
        if incarnation in seen.former:
            return "this node obeys incarnation %s since; %s is of the past%s" % (seen.incarnation, incarnation, ADVICE)
        if incarnation == seen.incarnation and epoch < seen.epoch:
            return "this node has seen epoch %d; %d is of the past%s" % (seen.epoch, epoch, ADVICE)
        if (incarnation, epoch) != (seen.incarnation, seen.epoch):
            former = seen.former
            if seen.incarnation not in ("", incarnation):
                former = (*former, seen.incarnation)
            try:
                self._spool.store_epochs(Epochs(incarnation, epoch, former))
            except OSError as error:
                return "cannot write to the spool %s: %s" % (self._spool.path, error.strerror)
            self.seen = self._spool.epochs()
        return ""

    def is_past(self, incarnation: str, epoch: int) -> bool:
        """Return whether what bears these was ordered by another controller than the one that is obeyed now."""
        return epoch < self.seen.epoch or incarnation != self.seen.incarnation
