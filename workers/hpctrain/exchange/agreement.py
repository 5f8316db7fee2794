"""Check that all ranks train the same, and keep their replicas equal.

Code, versions, options, model and data, compared by hashes at the start.

Ranks that differ would not fail: they would train different models, or wait for each other for ever.
Rules: every rank gets the facts of all ranks, and all raise the same error, which names the difference and its ranks.
Of code, only modules that all ranks have loaded are compared, each by its source.

Buffers are running statistics of batch norm, counters, and everything else that a forward pass writes.
Weights stay equal because all ranks move them by the same gradient, but each rank changes buffers by its own samples.  So
after a step the buffers of the rank with most samples (the lowest of equals) replace the others', as
`DistributedDataParallel` does with rank 0's; here rank 0 may have no samples.
Rules: only buffers that some rank has changed are sent, so that large constant tables (masks, positions) cost a comparison.
Values are compared, because torch's version counters miss batch norm's kernels, `.data` and replaced tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import Communicator
from hpctrain.errors import MismatchError, TrainError
from hpctrain.values import travels

SHORT = 12  # displayed hexadecimal digits of a hash
OF_ONE_RANK = ("verbose", "threads")  # options in which ranks may differ

Facts = Mapping[str, str]


@travels
class Ended:
    """The message of a rank that has reached the end of the script without training."""


def agree(comm: Communicator, facts: Facts) -> list[str]:
    """Return the host of each rank if all have the same facts; all ranks call it.

    Facts that a rank does not have are not compared.

    Raises:
        MismatchError: names the difference, with the hashes and the ranks that have them.
    """
    everybody: list[Any] = gather_from_all(comm, (socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in everybody]
    for what in everybody[0][1]:
        values = [mine.get(what) for _, mine in everybody]
        if None not in values and len(set(values)) > 1:
            raise MismatchError(
                f"cannot start: ranks have different {what}: {_who(values, hosts)}; {_remedy(what)}",
                [rank for rank, value in enumerate(values) if value != values[0]],
            )
    return hosts


def gather_from_all(comm: Communicator, value: object) -> list[Any]:
    """Return every rank's (small) value, by rank; all ranks call it.

    Raises:
        TrainError: other ranks have reached the end of the script.
    """
    values = comm.all_gather_object(value)
    ended = [str(rank) for rank, value in enumerate(values) if isinstance(value, Ended)]
    if 0 < len(ended) < comm.size:
        raise TrainError(
            f"cannot train: rank{'s' * (len(ended) > 1)} {', '.join(ended)} ended without run.steps; every rank has to "
            "iterate over it"
        )
    return values


def announce_end(comm: Communicator) -> None:
    """Tell ranks that wait for a value of this one that it has reached the end of the script.

    Raises:
        TrainError: such ranks exist.
    """
    gather_from_all(comm, Ended())


def facts_of(options: argparse.Namespace, model: torch.nn.Module, optimizer: object) -> dict[str, str]:
    """Return the facts that must be the same on all ranks, by name."""
    shapes = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    trained = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    compared = {name: value for name, value in vars(options).items() if name not in OF_ONE_RANK}
    return {
        "Python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__.partition("+")[0],
        "options": hash_of(sorted((name, str(value)) for name, value in compared.items())),
        "models (names, kinds and shapes of weights)": hash_of((shapes, trained)),
        "optimizers": hash_of(_described(optimizer)),
        **{f"code of {name}": digest for name, digest in sorted(code_hashes().items())},
    }


def data_facts(data: object) -> dict[str, str]:
    """Return the facts of a data source.

    Its own hash if it has one, and its number of samples.
    """
    size = {"numbers of samples": str(len(data))} if isinstance(data, Sized) else {}
    digest = getattr(data, "digest", None)
    return size | ({"data": digest} if isinstance(digest, str) else {})


def hash_of(value: object) -> str:
    """Return the SHA-256 of bytes, of the memory of numbers, or of a value's `repr`."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    content = value if isinstance(value, bytes) else getattr(value, "tobytes", lambda: repr(value).encode())()
    return hashlib.sha256(content).hexdigest()


def code_hashes() -> dict[str, str]:
    """Return the SHA-256 of the source of each loaded module that is not installed."""
    system = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py"):
            continue
        if path.startswith(system) and not name.startswith("hpctrain"):
            continue
        try:
            found[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError:
            continue  # a module without a file: the modules that use it are compared
    return found


def _described(optimizer: object) -> object:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    groups = [
        {name: str(value) for name, value in group.items() if name != "params"} | {"count": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return type(optimizer).__name__, groups


def _who(values: Sequence[str], hosts: Sequence[str]) -> str:
    """Return which ranks have which value as text, the most common value first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, having in sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1])):
        some = ", ".join(f"{rank} ({hosts[rank]})" for rank in having[:4]) + (" ..." if len(having) > 4 else "")
        parts.append(f"{value[:SHORT]} on rank{'s' * (len(having) > 1)} {some}")
    return ", ".join(parts)


def _remedy(what: str) -> str:
    if what.startswith("code"):
        return "start all ranks from one copy, for example on the share"
    if what in ("Python", "torch"):
        return "install the same version on all nodes"
    return "all ranks have to run the same script with the same options and data"


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
