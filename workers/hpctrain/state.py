"""What a run's state is made of, tensor by tensor, and who writes which part of it.

Does not know how it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpctrain.checkpoint.writing.gradient_log import GradientLog, own_of_first
from hpctrain.checkpoint.writing.snapshot import State, share_of
from hpctrain.comm import Communicator
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.optim.torch_optim import Optimizer
from hpctrain.optim.zero import ShardedOptimizer


def live_tensors(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """This will name every tensor that a restart needs: weights, buffers and the optimizer's moments."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {f"optim.{name}": tensor for name, tensor in optimizer.tensors().items()}


def state_to_write(
    model: torch.nn.Module, optimizer: Optimizer, more: Mapping[str, torch.Tensor], comm: Communicator | None
) -> State:
    """This will give what this rank writes: of ranks that write together its part, else (`comm` None) all of it.

    Who has a part of the optimizer's state calls it with the others.
    """
    if comm is None:
        return live_tensors(model, optimizer) | dict(more)
    if isinstance(optimizer, ShardedOptimizer):
        shared = {f"model.{name}": tensor for name, tensor in model.state_dict().items()} | dict(more)
        own = {f"optim.{name}": piece for name, piece in optimizer.pieces().items()}
    else:
        shared, own = live_tensors(model, optimizer) | dict(more), {}
    return {**share_of(shared, comm.rank, comm.size, own_of_first(model)), **own}


def gradient_log(
    model: torch.nn.Module,
    optimizer: Optimizer,
    buckets: GradientBuckets,
    step: int,
    every: int,
    comm: Communicator | None,
) -> GradientLog | None:
    """This will make a log of what this rank keeps of gradients, if at least `every` steps have room in it; `comm` as above."""
    if any(flat.is_complex() for flat in buckets.flats):
        return None  # steps are taken again with real numbers
    grads_bytes = sum(flat.nbytes for flat in buckets.flats)
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values()) + 2 * grads_bytes
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    log = GradientLog(model, buckets.groups, buckets.flats, step, state_bytes, optimizer.settings(), rank, size)
    return log if grads_bytes and log.most_steps >= every else None
