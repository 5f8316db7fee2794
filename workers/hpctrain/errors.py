"""The errors of training, sorted by their remedy.

`TrainError` is the root; its text is *cannot X: why*.  Exit codes are here too, because a batch system reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_FAILED = 1
# sysexits.h, EX_TEMPFAIL: the run made a checkpoint and asks to be queued again.
EXIT_REQUEUE = 75


class TrainError(Exception):
    """Training cannot start or continue; the text says why and what to do."""


class MissingPackageError(TrainError):
    """A package or a library is not installed on this machine."""


class DamagedError(TrainError):
    """A checkpoint does not hold what its manifest promises."""


class CheckpointKeyError(TrainError):
    """The key of checkpoints is missing or does not fit them."""


class NoCheckpointError(TrainError):
    """The directory has no usable checkpoint."""


class MismatchError(TrainError):
    """A checkpoint or another rank has another model, data or code.

    `ranks`: the ranks that differ from the first one.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = frozenset(ranks)


class StaleAttemptError(TrainError):
    """A later attempt of the same run has taken over: this one must not publish."""


class PublishError(TrainError):
    """A checkpoint could not be written or published; training can continue without it."""


class PeerLost(TrainError):
    """Another rank is lost, and the exchange with it; the other ranks can continue."""
