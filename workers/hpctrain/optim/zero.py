"""Optimizer state in shards (ZeRO-1).

Each rank keeps the moments of its part of the weights, and moves that part.

    each bucket of gradients:  a rank gets the sum of its part  ->  moves that part of the weights  ->  the parts are gathered

This sends two thirds of the bytes of a full all-reduce, if our own connections join hosts of one rank each
(`GradientBuckets.sum_own_part`).  Otherwise each rank gets all parts: with other ways to sum, if the run logs its gradients in
checkpoints, or sends them in fewer bits.

Weights are in flat buckets like their gradients, and a rank's part is one slice of each bucket, which may cut parameters.  So
the optimizer must treat each number by itself; this is tested on a small matrix, whole and in pieces.
Does not know checkpoint files: it returns the whole state, tensor by tensor, with the names and shapes of the plain optimizer,
so that checkpoints do not depend on the number of ranks or on sharding.
Rules: weights end with the same bits as with the plain optimizer; all ranks call everything here together.
Sources: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.checkpoint.writing.snapshot import TensorPiece as CheckpointPiece
from hpctrain.comm import Communicator
from hpctrain.errors import TrainError
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.torch_optim import Optimizer, TorchOptimizer

PROBE_STEPS = 3
PROBE_LR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPiece:
    """This rank's piece of a parameter: its numbers [low, high) in memory order."""

    name: str
    whole: torch.nn.Parameter
    part: torch.nn.Parameter
    low: int
    high: int


class _Named:
    """Pieces under their parameters' names, as a model's named parameters."""

    def __init__(self, pieces: list[ParameterPiece]) -> None:
        self._pieces = pieces

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter([(piece.name, piece.part) for piece in self._pieces])


class ShardedOptimizer:
    """An optimizer whose state is sharded over the ranks."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizer, buckets: GradientBuckets, comm: Communicator
    ) -> None:
        """Take over this rank's part of the optimizer's current state, and free the rest.

        Raises:
            TrainError: the optimizer does not treat each number by itself.
        """
        self._comm = comm
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._settings, self.lr = optimizer.settings(), optimizer.lr
        whole = optimizer.tensors()
        self._shapes = {name: tensor.shape for name, tensor in whole.items()}
        self._kinds = {name: tensor.dtype for name, tensor in whole.items()}
        self._flats: list[torch.Tensor] = []
        self._bounds: list[list[int]] = []
        self._cuts: dict[str, list[int]] = {}  # per parameter: where each rank's numbers begin, and the end
        self._pieces: list[ParameterPiece] = []
        for parameters, grads in zip(buckets.groups, buckets.flats, strict=True):
            self._flatten(parameters, grads, names)
        order = {name: at for at, name in enumerate(names.values())}
        self._pieces.sort(key=lambda piece: order[piece.name])
        self._optimizer = self._shard(optimizer)
        mine = self._optimizer.tensors()
        with torch.no_grad():
            for piece in self._pieces:
                for name, tensor in _states_of(piece.name, mine):
                    source = whole[name]
                    tensor.copy_(_slice_of(source, piece))

    @property
    def of_own_part(self) -> Optimizer:
        """The optimizer of this rank's part."""
        return self._optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole state by name, gathered from all ranks; all ranks call it."""
        mine = self._optimizer.tensors()
        return {name: self._gathered(name, mine.get(name)) for name in self._shapes}

    def settings(self) -> dict[str, object]:
        """Return the settings of the plain optimizer."""
        return self._settings

    def pieces(self) -> dict[str, torch.Tensor | CheckpointPiece]:
        """Return this rank's part of the state, for a checkpoint in parts."""
        mine: dict[str, torch.Tensor | CheckpointPiece] = {}
        low_of = {piece.name: piece.low for piece in self._pieces}
        for name, tensor in self._optimizer.tensors().items():
            parameter = _parameter_of(name, self._cuts)
            shape, numbers = tuple(self._shapes[name]), self._cuts[parameter][-1]
            if math.prod(shape) == numbers:
                mine[name] = CheckpointPiece(part=tensor.detach().reshape(-1), low=low_of[parameter], whole=shape)
            elif low_of[parameter] == 0:  # for example a step count, which every rank with a piece has
                mine[name] = tensor
        return mine

    def step(self, number: int, lr: float) -> None:
        """Move this rank's part of the weights, and gather the parts of the other ranks."""
        self._optimizer.step(number, lr)
        with torch.no_grad():
            for flat, bounds in zip(self._flats, self._bounds, strict=True):
                self._hand_round(flat, bounds)

    def held_bytes(self) -> int:
        """Return the bytes of state on this rank."""
        return sum(tensor.nbytes for tensor in self._optimizer.tensors().values())

    def _hand_round(self, flat: torch.Tensor, bounds: list[int]) -> None:
        rank, spans = self._comm.rank, list(zip(bounds, bounds[1:], strict=False))
        lengths = [(high - low) * flat.element_size() for low, high in spans]
        low, high = spans[rank]
        parts = self._comm.all_gather(_bytes_of(flat[low:high]).cpu(), lengths)
        for other, (low, high) in enumerate(spans):
            if other != rank and high > low:
                _bytes_of(flat[low:high]).copy_(parts[other])

    def _flatten(self, parameters: list[torch.nn.Parameter], grads: torch.Tensor, names: dict[int, str]) -> None:
        """Move the weights of a bucket into a flat tensor, and record this rank's pieces."""
        comm, length = self._comm, grads.numel()
        bounds = [length * rank // comm.size for rank in range(comm.size + 1)]
        flat = torch.empty_like(grads)
        at = 0
        for parameter in parameters:
            name, end = names[id(parameter)], at + parameter.numel()
            flat[at:end] = parameter.detach().reshape(-1)
            parameter.data = flat[at:end].view_as(parameter)
            cuts = [min(max(bound, at), end) - at for bound in bounds]
            self._cuts[name] = cuts
            low, high = cuts[comm.rank], cuts[comm.rank + 1]
            if high > low:
                # A single number keeps its shape, so that its optimizer's state has the usual shape.
                shape = parameter.shape if parameter.dim() == 0 else (high - low,)
                part = torch.nn.Parameter(flat[at + low : at + high].view(shape))
                part.grad = grads[at + low : at + high].view(shape)
                self._pieces.append(ParameterPiece(name=name, whole=parameter, part=part, low=low, high=high))
            at = end
        self._flats.append(flat)
        self._bounds.append(bounds)

    def _shard(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, AdamW):
            decayed = {piece.name for piece in self._pieces if piece.whole.dim() >= 2}
            return optimizer.of_parts({piece.name: piece.part for piece in self._pieces}, decayed)
        assert isinstance(optimizer, TorchOptimizer)
        parts = {id(piece.whole): piece for piece in self._pieces}
        plain = optimizer.plain
        fresh: dict[torch.Tensor, Any] = {
            p: _sliced(state, parts[id(p)]) for p, state in optimizer.fresh.items() if id(p) in parts
        }
        for group in plain.param_groups:
            group["params"] = [parts[id(p)].part for p in group["params"] if id(p) in parts]
        plain.state.clear()
        plain.state.update(fresh)
        return TorchOptimizer(_Named(self._pieces), plain, optimizer.own_rates)

    def _gathered(self, name: str, mine: torch.Tensor | None) -> torch.Tensor:
        """Return one state tensor as a whole.

        The ranks' parts joined, or one rank's value if it is not per number.
        """
        shape, kind, cuts = self._shapes[name], self._kinds[name], self._cuts[_parameter_of(name, self._cuts)]
        whole = torch.empty(shape, dtype=kind)
        counts = [high - low for low, high in zip(cuts, cuts[1:], strict=False)]
        if whole.numel() != cuts[-1]:  # for example a step count, which every rank with a piece has
            counts = [whole.numel() if count else 0 for count in counts]
        own = torch.empty(0, dtype=kind) if mine is None else mine.detach().cpu().reshape(-1)
        lengths = [count * whole.element_size() for count in counts]
        parts = self._comm.all_gather(_bytes_of(own), lengths)
        if whole.numel() == cuts[-1]:
            _bytes_of(whole.view(-1)).copy_(torch.cat(parts))
        else:
            _bytes_of(whole.view(-1)).copy_(next(part for part in parts if part.numel()))
        return whole


def check_elementwise(optimizer: Optimizer | torch.optim.Optimizer) -> None:
    """Check that the optimizer moves each number by that number's own gradients.

    Raises:
        TrainError: it does not, so a rank cannot move a part of a matrix.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return  # hpctrain's does
    kind = type(optimizer).__name__
    torch_state = torch.random.get_rng_state()
    whole = torch.nn.Parameter(torch.randn(6, 8))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().view(-1).split((13, 35))]
    try:
        on_whole, on_parts = _copy_for(optimizer, [whole]), _copy_for(optimizer, parts)
        for _ in range(PROBE_STEPS):
            whole.grad = torch.randn(6, 8)
            for part, grad in zip(parts, whole.grad.view(-1).split((13, 35)), strict=True):
                part.grad = grad.clone()
            on_whole.step()
            on_parts.step()
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise TrainError(
            f"cannot shard {kind}'s state: it cannot take a step with a piece of a matrix ({error}); omit --zero"
        ) from error
    finally:
        torch.random.set_rng_state(torch_state)
    if not torch.equal(whole.detach().view(-1), torch.cat([part.detach() for part in parts])):
        raise TrainError(
            f"cannot shard {kind}'s state: it moves a number by others' gradients too, so a piece of a matrix moves "
            "differently from the whole; omit --zero"
        )


def _copy_for(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same kind and settings for other parameters."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    fresh = copy.copy(optimizer)
    first: dict[str, Any] = next((state for parameter, state in optimizer.state.items() if parameter.dim()), {})
    fresh.param_groups = [copy.deepcopy(group) | {"params": parameters, "lr": PROBE_LR}]
    fresh.state = type(optimizer.state)(dict)
    for parameter in parameters:  # the state from its constructor
        for name, value in first.items():
            like = isinstance(value, torch.Tensor) and value.dim() > 0
            start = torch.full_like(parameter, float(value.reshape(-1)[0])) if like else copy.deepcopy(value)
            fresh.state[parameter][name] = start
    return fresh


def _sliced(state: dict[str, object], piece: ParameterPiece) -> dict[str, object]:
    """Return the initial state of a parameter, for a piece of it."""
    return {
        name: _slice_of(value, piece).clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def _slice_of(state: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
    """Return the piece's part of a state with one number per weight.

    Other states, like a step count, unchanged.
    """
    return state.reshape(-1)[piece.low : piece.high] if state.dim() and state.shape == piece.whole.shape else state


def _states_of(name: str, tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(full, tensor) for full, tensor in tensors.items() if full.rpartition(".")[0] == name]


def _parameter_of(name: str, cuts: dict[str, list[int]]) -> str:
    parameter = name.rpartition(".")[0]
    assert parameter in cuts, f"{name} belongs to no parameter"
    return parameter


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.detach().view(torch.uint8)
