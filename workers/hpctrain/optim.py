"""AdamW and gradient clipping, in few lines.

Why not torch.optim: constructing its first optimizer imports more than a second of compiler, at each restart; and a
checkpoint that replays gradients later needs to know every operation of a step.  The state is the usual one: per
parameter `exp_avg` and `exp_avg_sq`; the step count is given by the caller.
Sources: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

STRETCH = 1 << 16  # numbers


class AdamW:
    """Adam with decoupled weight decay; decay for matrices only."""

    KIND = "hpctrain.optim.AdamW"

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._decayed = {name for name, p in self._parameters.items() if p.dim() >= 2}
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._parameters.items()}

    def of_parts(self, parts: dict[str, torch.nn.Parameter], decayed: set[str]) -> AdamW:
        """This will make one with the same settings for flat parts of these parameters, of which `decayed` were matrices."""
        mine = [(name, part) for name, part in parts.items() if name in self._parameters]
        made = AdamW(mine, self._betas, self._eps, self._weight_decay)
        made._decayed = decayed
        return made

    def settings(self) -> dict[str, object]:
        """This will give what `from_settings` needs, as JSON values: for who has a checkpoint, and not the program."""
        betas, decayed = list(self._betas), sorted(self._decayed)
        return {
            "kind": self.KIND,
            "betas": betas,
            "eps": self._eps,
            "weight_decay": self._weight_decay,
            "decayed": decayed,
        }

    @classmethod
    def from_settings(cls, parameters: Mapping[str, torch.nn.Parameter], settings: Mapping[str, Any]) -> AdamW:
        """This will make one for these parameters as `settings` gave it."""
        beta1, beta2 = settings["betas"]
        made = cls(parameters.items(), (beta1, beta2), settings["eps"], settings["weight_decay"])
        made._decayed = set(settings["decayed"])
        return made

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
            if parameter.grad is None:
                continue
            decay = 1 - lr * self._weight_decay if name in self._decayed and self._weight_decay else 1.0
            for part, grad, mean, square in _in_stretches(parameter, parameter.grad, *self._moments[name]):
                if decay != 1.0:
                    part.mul_(decay)
                mean.lerp_(grad, 1 - beta1)
                square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                scale = square.sqrt().div_(math.sqrt(correction2)).add_(self._eps)
                part.addcdiv_(mean, scale, value=-lr / correction1)


def _in_stretches(*alike: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same stretches of tensors of one shape: on a CPU as long as its cache has room for; whole if they lie otherwise."""
    if alike[0].device.type != "cpu" or not all(one.is_contiguous() for one in alike):
        return iter([alike])
    return zip(*(one.detach().view(-1).split(STRETCH) for one in alike), strict=True)


def clip_factor(squares: torch.Tensor, limit: float, scale: float = 1.0) -> tuple[float, float]:
    """This will give the norm of gradients that are `scale` times too large, and what they have to be multiplied by.

    `squares`: sums of squares, float64, of parts that make up all gradients.  The factor is 1 if the norm is not finite.
    """
    norm = math.sqrt(float(squares.sum())) / scale
    factor = (limit / norm if norm > limit > 0 else 1.0) / scale
    return norm, factor if math.isfinite(norm) else 1.0


@torch.no_grad()
def multiply(grads: list[torch.Tensor], factor: float) -> None:
    """This will multiply gradients by a number."""
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
