"""Keep replicas equal: transfer a state to other ranks, and buffers after each step.

Buffers are running statistics of batch norm, counters, and everything else that a forward pass writes.
Weights stay equal because all ranks move them by the same gradient, but each rank changes buffers by its own samples.  So
after a step the buffers of the rank with most samples (the lowest of equals) replace the others', as
`DistributedDataParallel` does with rank 0's; here rank 0 may have no samples.
Rules: only buffers that some rank has changed are sent, so that large constant tables (masks, positions) cost a comparison.
Values are compared, because torch's version counters miss batch norm's kernels, `.data` and replaced tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from hpctrain.comm import Communicator
from hpctrain.errors import TrainError

PIECE_BYTES = 64 << 20
ALIGNED_BYTES = 16


def hand_over(tensors: Mapping[str, torch.Tensor], comm: Communicator, source: int) -> None:
    """Copy the tensors of rank `source` to every rank.

    An interrupted rank of an elastic run keeps its old ones.
    """
    if not comm.elastic:
        for tensor in tensors.values():
            dense = tensor.detach().contiguous()  # a copy only if transposed or channels-last
            comm.broadcast(dense, source)
            if not tensor.is_contiguous():
                tensor.detach().copy_(dense)
        return
    whole = torch.empty(sum(_padded(tensor.nbytes) for tensor in tensors.values()), dtype=torch.uint8)
    parts = {}
    at = 0
    for name, tensor in tensors.items():
        parts[name] = whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += _padded(tensor.nbytes)
        if comm.rank == source:
            parts[name].copy_(tensor.detach())
    # Together, not tensor by tensor: on a busy machine every exchange waits for each rank.
    for piece in whole.split(PIECE_BYTES):
        comm.broadcast(piece, source)
    comm.barrier()
    if comm.rank != source:
        for name, tensor in tensors.items():
            tensor.detach().copy_(parts[name])


def _padded(count: int) -> int:
    """Return the bytes, rounded up to where the next tensor may begin."""
    return -(-count // ALIGNED_BYTES) * ALIGNED_BYTES


class Replicas:
    """This rank's buffers of a model, and the buffers that the ranks last agreed on."""

    def __init__(self, model: torch.nn.Module, comm: Communicator) -> None:
        self._model, self._comm = model, comm
        self._names = [name for name, _ in model.named_buffers()] if comm.size > 1 else []
        # Empty at first: a buffer that is not agreed on counts as changed.  An elastic run may have to restore it.
        self._agreed = {name: tensor.clone() for name, tensor in self._now().items()} if comm.elastic else {}

    def changes(self) -> torch.Tensor:
        """Return 1.0 for each buffer that changed here, else 0.0.

        (buffers,), float64, to be summed over the ranks.
        """
        now = self._now()
        changed = [name not in self._agreed or not torch.equal(now[name], self._agreed[name]) for name in self._names]
        return torch.tensor(changed, dtype=torch.float64)

    @torch.no_grad()
    def follow(self, changes: torch.Tensor, counts: Sequence[int]) -> None:
        """Take changed buffers from the rank with most samples (`counts`, by rank)."""
        names = [name for name, sum_ in zip(self._names, changes.tolist(), strict=True) if sum_ > 0]
        if not names:
            return
        now = self._now()
        pieces = [now[name].reshape(-1).view(torch.uint8) for name in names]
        whole = torch.cat(pieces)
        root = max(range(len(counts)), key=lambda rank: (counts[rank], -rank))
        self._comm.broadcast(whole, root)
        for name, piece in zip(names, whole.split([len(piece) for piece in pieces]), strict=True):
            agreed = piece.clone().view(now[name].dtype).view(now[name].shape)
            now[name].copy_(agreed)
            self._agreed[name] = agreed

    def settle(self, counts: Sequence[int]) -> None:
        """Exchange changes and buffers; all ranks call it."""
        if self._names:
            changes = self.changes()
            self._comm.all_reduce(changes)
            self.follow(changes, counts)

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo the forward passes since the last step taken, because that step will be repeated."""
        now = self._now()
        for name, agreed in self._agreed.items():
            now[name].copy_(agreed)

    def _now(self) -> dict[str, torch.Tensor]:
        """Return the current buffers by name; a module may have replaced a tensor."""
        return {name: tensor.detach() for name, tensor in self._model.named_buffers()} if self._names else {}


def check_replicas(model: torch.nn.Module, comm: Communicator) -> str:
    """Return the SHA-256 of the weights, after comparing it among the ranks.

    Raises:
        TrainError: the replicas differ, which never happens in a correct run.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    hashes = comm.all_gather_object(total.hexdigest())
    if len(set(hashes)) != 1:
        raise TrainError(f"cannot trust the result: the ranks' weights differ: {hashes}")
    return total.hexdigest()
