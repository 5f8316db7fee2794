"""AdamW, the learning rate's course and gradient clipping, in few lines.

Why not torch.optim: constructing its first optimizer imports more than a second of compiler, at each restart; and a
checkpoint that replays gradients later needs to know every operation of a step.  The state is the usual one: per
parameter `exp_avg` and `exp_avg_sq`; the step count is given by the caller.
Sources: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak_lr`, then a cosine down to `floor` times it at `total_steps`."""

    peak_lr: float
    warmup_steps: int
    total_steps: int
    floor: float = 0.05

    def lr_at(self, step: int) -> float:
        """This will give the learning rate of the step with this number (the first is 0)."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return self.peak_lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


class AdamW:
    """Adam with decoupled weight decay; decay for matrices only."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """This will give the live state by name: what a checkpoint keeps, and what a restore writes into."""
        first = {f"{name}.exp_avg": m for name, (m, _) in self._moments.items()}
        second = {f"{name}.exp_avg_sq": v for name, (_, v) in self._moments.items()}
        return first | second

    @torch.no_grad()
    def step(self, number: int, lr: float) -> None:
        """This will move the weights by their gradients; `number` counts from 1."""
        beta1, beta2 = self._betas
        correction1, correction2 = 1 - beta1**number, 1 - beta2**number
        for name, parameter in self._parameters.items():
            mean, square = self._moments[name]
            grad = parameter.grad
            if grad is None:
                continue
            if parameter.dim() >= 2 and self._weight_decay:
                parameter.mul_(1 - lr * self._weight_decay)
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = (square.sqrt() / math.sqrt(correction2)).add_(self._eps)
            parameter.addcdiv_(mean, scale, value=-lr / correction1)


@torch.no_grad()
def clip_by_global_norm(grads: list[torch.Tensor], limit: float) -> float:
    """This will scale the gradients so that their norm over all of them is at most `limit`, and return what it was."""
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads))
    if norm > limit > 0:
        for grad in grads:
            grad.mul_(limit / norm)
    return norm
