"""A group of ranks under `mpirun --with-ft ulfm` that goes on without those it loses: MPI's own user-level failure mitigation.

Only Open MPI 5 has it.  The group shrinks, and never grows (`hpctrain.elastic` does both).  Sums go round `Ring`, which any
missing rank breaks; shared memory would not notice.
Rules: whoever cannot exchange revokes the generation, so that nobody waits in it; then all that are left come to `_shrink`, those
who have finished in `close` and the others in `meet`, and those are the next generation.
That is the barrier at the end, too: MPI_Finalize's own waits for a rank that mpirun has not missed yet, and for ever.
Sources: MPI Forum, "User Level Failure Mitigation"; Open MPI 5, "User-Level Fault Mitigation (ULFM)", and its issue 11404.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hpctrain.comm.background import Background, Work, done
from hpctrain.comm.base import Pace, Plain, check_contiguous
from hpctrain.comm.mpi import BROADCAST_BYTES, load_mpi
from hpctrain.comm.ring import Ring
from hpctrain.errors import PeerLost

BUCKET_BYTES = 4 << 20


def has_ulfm(environ: Mapping[str, str]) -> bool:
    """Whether mpirun was told to let ranks outlive others."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true")


class UlfmCommunicator(Plain):
    """The ranks of one mpirun that are left."""

    name = "ulfm"
    elastic = True

    def __init__(self) -> None:
        os.environ["OMPI_MCA_async_mpi_finalize"] = "1"  # noqa: SIM112 (Open MPI's spelling; it is read when MPI starts)
        self._mpi = load_mpi()
        self.generation = -1
        self._background = Background()
        self._take(self._mpi.COMM_WORLD.Dup())

    def _take(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._ring = Ring(self._mpi, comm, patient=True)

    def meet(self) -> None:
        """Come together with those who are left."""
        self.changing = False
        if self.generation >= 0:
            self._shrink(leaves=False)
        self.generation += 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return
        host = tensor.detach().cpu()  # the tensor itself if it is there already
        with self._breaking():
            self._ring.all_reduce(host.view(-1))
        if host.device != tensor.device:
            tensor.copy_(host)

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """The same in a thread."""
        if self.size == 1 and then is None:
            return done()
        return self._background.begin(lambda: self._sum_then(tensor, then))

    def _sum_then(self, tensor: torch.Tensor, then: Callable[[], None] | None) -> None:
        self.all_reduce(tensor)
        if then is not None:
            then()

    def run(self, call: Callable[[], None]) -> Work:
        """Make a call in the thread."""
        return self._background.begin(call)

    def pace(self) -> Pace:
        """Buckets that keep a slow link busy early."""
        return Pace(bucket_bytes=BUCKET_BYTES, beside=True)

    def describe(self) -> list[str]:
        """How many are left."""
        return [f"generation {self.generation}: {self.size} ranks over MPI with ULFM"]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """The tensor of `root`."""
        check_contiguous(tensor)
        host = tensor.detach().cpu().view(-1)
        with self._breaking():
            for piece in host.view(torch.uint8).split(BROADCAST_BYTES):
                self._comm.Bcast([piece.numpy(), self._mpi.BYTE], root)
        if tensor.device.type != "cpu":
            tensor.copy_(host.view(tensor.shape))

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's piece for this one."""
        with self._breaking():
            return self._comm.alltoall(pieces)

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Every rank's piece."""
        with self._breaking():
            return self._comm.allgather(piece)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        with self._breaking():
            self._comm.Barrier()

    def all_gather_object(self, value: object) -> list[Any]:
        """Every rank's value, by rank."""
        with self._breaking():
            return self._comm.allgather(value)

    def abort(self, code: int) -> None:
        """Take the whole job down."""
        if self.size > 1:  # of the last process mpirun would not tell the code
            self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def close(self) -> None:
        """Leave; whoever is not through yet goes on without those who are."""
        self._shrink(leaves=True)
        self._background.close()

    def _shrink(self, *, leaves: bool) -> None:
        """Go on with those who are left and have not finished. All that are left come here once for each generation."""
        comm = self._comm
        comm.Revoke()
        self._background.close()  # what it was about has failed
        self._background = Background()
        while True:
            left = comm.Shrink()
            try:
                self._take(left.Split(color=int(leaves), key=left.Get_rank()))
                return
            except self._mpi.Exception:  # another rank is lost meanwhile
                if leaves:
                    return
                left.Revoke()
                comm = left

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What fails because a rank is lost ends this generation for all.

        Raises:
            PeerLost: a rank is lost.
        """
        try:
            yield
        except self._mpi.Exception as error:
            failed = self._comm.Get_failed().Get_size()
            if not failed and not self._comm.Is_revoked():
                raise
            self._comm.Revoke()
            why = "cannot exchange over MPI: "
            raise PeerLost(why + (f"{failed} of {self.size} ranks failed" if failed else str(error))) from None
