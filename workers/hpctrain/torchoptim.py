"""Any optimizer of torch.optim as the loop's: its state by name for checkpoints, its learning rate from the schedule.

    run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

torch makes an optimizer's state at its first step, but a checkpoint has to be poured into it before that.  So a step is tried
with gradients and learning rates of zero, which makes the state, and what it did is put back.
Rules: the first step finds the optimizer as its maker left it: training is bit for bit what it is without this.  Parameter
groups keep the ratios of their learning rates; the first has the schedule's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch

from hpctrain.errors import TrainError


@runtime_checkable
class Optimizer(Protocol):
    """What moves the weights by their gradients."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state by name: what a checkpoint keeps, and what a restore writes into."""

    def step(self, number: int, lr: float) -> None:
        """Move the weights by their gradients; `number` counts from 1."""

    def settings(self) -> dict[str, object]:
        """Its kind, and what it can be made of again, as JSON values."""


def optimizer_for(model: torch.nn.Module, optimizer: Optimizer | torch.optim.Optimizer) -> Optimizer:
    """This will give the loop's view of an optimizer; ours is one already.

    Raises:
        TrainError: it is none, or one that cannot be served.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOptimizer(model, optimizer)
    if isinstance(optimizer, type) or not isinstance(optimizer, Optimizer):
        what = optimizer.__name__ if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise TrainError(
            f"cannot train with {what} for an optimizer: give run.steps one object of torch.optim or hpctrain.optim; several "
            "rates or settings are parameter groups of one"
        )
    return optimizer


@contextmanager
def guarded(optimizer: Optimizer) -> Iterator[None]:
    """This will refuse steps of an optimizer of torch.optim that are not the loop's: a script's own `optimizer.step()`."""
    hook = (
        optimizer.plain.register_step_pre_hook(optimizer.check_step) if isinstance(optimizer, TorchOptimizer) else None
    )
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


class TorchOptimizer:
    """An optimizer of torch.optim."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.plain = optimizer
        self._kind = type(optimizer).__name__
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._named: dict[str, torch.nn.Parameter] = {}
        for parameter in self._parameters():
            if id(parameter) not in names:
                raise TrainError(f"cannot train with this {self._kind}: it has a parameter that is not of the model")
            if parameter.requires_grad:
                self._named[names[id(parameter)]] = parameter
        first_lr = float(optimizer.param_groups[0]["lr"])
        self._ratios = [float(group["lr"]) / first_lr if first_lr else 1.0 for group in optimizer.param_groups]
        self.fresh = {p: copy.deepcopy(optimizer.state[p]) for p in self._named.values() if p in optimizer.state}
        self._is_stepping = False
        self._rates: list[float] = []  # as `step` has set them
        self._try_a_step()
        self.tensors()

    def tensors(self) -> dict[str, torch.Tensor]:
        """This will give the state of every parameter, by the parameter's name.

        Raises:
            TrainError: the optimizer keeps something that is no tensor, so no checkpoint could hold it.
        """
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._named.items():
            for key, value in sorted(self.plain.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    found[f"{name}.{key}"] = value
                elif value is not None:
                    raise TrainError(
                        f"cannot train with {self._kind}: its state {key!r} is a {type(value).__name__}, and a "
                        "checkpoint keeps tensors"
                    )
        return found

    def settings(self) -> dict[str, object]:
        """This will give its kind only: parameter groups are the program's."""
        return {"kind": f"{type(self.plain).__module__}.{self._kind}"}

    def step(self, number: int, lr: float) -> None:
        """This will move the weights by their gradients; `number` counts from 1."""
        self._check_groups()
        if number == 1:
            self._forget()
        self._set_lr([lr * ratio for ratio in self._ratios])
        self._rates = self._lrs()
        self._is_stepping = True
        self.plain.step()
        self._is_stepping = False

    def check_step(self, *_: object) -> None:
        """Raises TrainError: it is not `step` that moves the weights."""
        if not self._is_stepping:
            raise TrainError(
                f"cannot take a step of {self._kind} here: run.steps takes it after batch.backward, by the gradients of all "
                "ranks; leave optimizer.step() away"
            )

    def _check_groups(self) -> None:
        if len(self.plain.param_groups) != len(self._ratios):
            raise TrainError(
                f"cannot take a step of {self._kind}: it has got another parameter group since the loop began; give it all of "
                "them before run.steps"
            )
        if self._rates and self._lrs() != self._rates:
            raise TrainError(
                f"cannot take a step of {self._kind}: the script has set its learning rate (a scheduler's step?), but that is "
                "--lr's, by --warmup and --schedule; leave it away"
            )

    def _try_a_step(self) -> None:
        """Make the state by a step that moves nothing."""
        kept = [(p, p.detach().clone(), p.grad) for p in self._named.values()]
        rates = [group["lr"] for group in self.plain.param_groups]
        for parameter in self._named.values():
            parameter.grad = torch.zeros_like(parameter)
        self._set_lr([0.0] * len(rates))
        try:
            self.plain.step()
        except TypeError as error:
            raise TrainError(
                f"cannot train with {self._kind}: it computes the loss several times within a step ({error})"
            ) from error
        except RuntimeError as error:
            raise TrainError(f"cannot train with {self._kind}: {error}") from error
        finally:
            for group, rate in zip(self.plain.param_groups, rates, strict=True):
                group["lr"] = rate
            with torch.no_grad():
                for parameter, content, grad in kept:
                    parameter.copy_(content)
                    parameter.grad = grad

    def _forget(self) -> None:
        self.plain.state.clear()
        for parameter, state in self.fresh.items():
            self.plain.state[parameter] = copy.deepcopy(state)

    def _set_lr(self, rates: list[float]) -> None:
        for group, rate in zip(self.plain.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.plain.param_groups]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for group in self.plain.param_groups:
            yield from group["params"]
