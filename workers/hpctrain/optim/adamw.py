"""AdamW and gradient clipping.

Why not torch.optim: constructing its first optimizer imports a compiler, which takes more than a second at each restart.
And a checkpoint that replays gradients needs the same bits however tensors are cut, but torch's fused step rounds the last
few numbers of a tensor differently.  The state is the usual one: per parameter `exp_avg` and `exp_avg_sq`; the caller passes
the step count.
Sources: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LANES = 64  # a multiple of the CPU's vector length; torch's kernel rounds the remainder differently
Stretch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # weights, gradients and both moments


def each_of(stretch: Stretch, act: Callable[[torch.Tensor], torch.Tensor]) -> Stretch:
    """Return a stretch with `act` applied to each of its tensors."""
    weights, grads, first, second = stretch
    return act(weights), act(grads), act(first), act(second)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """One step of AdamW on each number: the same bits wherever tensors are cut."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @torch.no_grad()
    def move(self, stretch: Stretch, number: int, lr: float, *, decayed: bool) -> None:
        """Move weights by their gradients; `number` counts from 1."""
        if stretch[0].is_complex():
            stretch = each_of(stretch, torch.view_as_real)
        if stretch[0].device.type != "cpu":
            self._move_by_parts(stretch, number, lr, decayed=decayed)
            return
        if not stretch[0].is_contiguous():  # moments have the weights' layout; another layout of gradients costs a copy
            order = sorted(range(stretch[0].dim()), key=stretch[0].stride, reverse=True)
            stretch = each_of(stretch, lambda tensor: tensor.permute(order))
        flat = each_of(stretch, lambda tensor: tensor.contiguous().view(-1))
        whole = flat[0].numel() // LANES * LANES
        self.move_lanes([each_of(flat, lambda tensor: tensor[:whole])], number, lr, decayed=decayed)
        if whole < flat[0].numel():
            padded = each_of(flat, lambda tensor: torch.zeros(LANES, dtype=tensor.dtype))
            for wide, tensor in zip(padded, flat, strict=True):
                wide[: tensor.numel() - whole] = tensor[whole:]
            self.move_lanes([padded], number, lr, decayed=decayed)
            for wide, tensor in zip(padded, flat, strict=True):
                tensor[whole:] = wide[: tensor.numel() - whole]
        for tensor, moved in zip(stretch, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(moved.view(tensor.shape))

    @torch.no_grad()
    def move_lanes(self, stretches: Sequence[Stretch], number: int, lr: float, *, decayed: bool) -> None:
        """Move flat stretches on a CPU, in multiples of `LANES`, in one pass over memory.

        This is the operation behind `torch.optim.AdamW(fused=True)`.
        """
        parts, grads, means, squares = (list(ones) for ones in zip(*stretches, strict=True))
        torch._fused_adamw_(
            parts,
            grads,
            means,
            squares,
            [],
            [torch.tensor(float(number))] * len(parts),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay if decayed else 0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def _move_by_parts(self, stretch: Stretch, number: int, lr: float, *, decayed: bool) -> None:
        part, grad, mean, square = stretch
        correction1, correction2 = 1 - self.beta1**number, 1 - self.beta2**number
        if decayed and self.weight_decay:
            part.mul_(1 - lr * self.weight_decay)
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        scale = square.sqrt().div_(math.sqrt(correction2)).add_(self.eps)
        part.addcdiv_(mean, scale, value=-lr / correction1)


class AdamW:
    """Adam with decoupled weight decay; decay for matrices only."""

    KIND = "hpctrain.optim.AdamW"

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.lr = lr
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._rule = UpdateRule(beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        self._decayed = {name for name, p in self._parameters.items() if p.dim() >= 2}
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._parameters.items()}

    def of_parts(self, parts: dict[str, torch.nn.Parameter], decayed: set[str]) -> AdamW:
        """Return an optimizer with the same settings for flat parts of parameters.

        `decayed`: parts of matrices.
        """
        mine = [(name, part) for name, part in parts.items() if name in self._parameters]
        made = AdamW(mine, self.lr)
        made._rule, made._decayed = self._rule, decayed
        return made

    def settings(self) -> dict[str, object]:
        """Return the arguments of `from_settings` as JSON values, for a checkpoint."""
        rule = self._rule
        return {
            "kind": self.KIND,
            "betas": [rule.beta1, rule.beta2],
            "eps": rule.eps,
            "weight_decay": rule.weight_decay,
            "decayed": sorted(self._decayed),
        }

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> tuple[UpdateRule, frozenset[str]]:
        """Return the rule that `settings` describe, and the names of decaying parameters."""
        beta1, beta2 = settings["betas"]
        rule = UpdateRule(beta1=beta1, beta2=beta2, eps=settings["eps"], weight_decay=settings["weight_decay"])
        return rule, frozenset(settings["decayed"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live state by name: a checkpoint saves it, and a restore writes into it."""
        first = {f"{name}.exp_avg": m for name, (m, _) in self._moments.items()}
        second = {f"{name}.exp_avg_sq": v for name, (_, v) in self._moments.items()}
        return first | second

    def step(self, number: int, lr: float) -> None:
        """Move the weights by their gradients; `number` counts from 1."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            stretch = (parameter.detach(), parameter.grad, *self._moments[name])
            self._rule.move(stretch, number, lr, decayed=name in self._decayed)


def clip_factor(squares: torch.Tensor, limit: float, scale: float = 1.0) -> tuple[float, float]:
    """Return the norm of gradients (`scale` times too large), and their factor.

    `squares`: float64 sums of squares of parts that make up all gradients.  The factor is 1 if the norm is not finite.
    """
    norm = math.sqrt(float(squares.sum())) / scale
    factor = (limit / norm if norm > limit > 0 else 1.0) / scale
    return norm, factor if math.isfinite(norm) else 1.0


@torch.no_grad()
def multiply(grads: list[torch.Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place."""
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
