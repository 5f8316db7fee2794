"""Any optimizer of torch.optim in the loop, with its state by name for checkpoints.

And the script's own schedule.

    run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    run.steps(model, optimizer, schedule=torch.optim.lr_scheduler.OneCycleLR(optimizer, ...))

torch allocates an optimizer's state at its first step, but a restore has to write into the state before that.  So a trial
step with gradients and learning rates of zero allocates the state, and its effects are undone.
Rules: the first real step finds the optimizer as the script left it, so training is the same to the bit.  Parameter groups
keep the ratios of their learning rates; the first group with a learning rate above 0 has the loop's.  A schedule of
torch.optim.lr_scheduler is stepped after each step of the optimizer, and then sets all learning rates.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from hpctrain.checkpoint.tree import flattened, grown
from hpctrain.errors import TrainError


@runtime_checkable
class Optimizer(Protocol):
    """Moves the weights by their gradients."""

    lr: float  # the optimizer's own learning rate, which an option may replace

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live state by name: a checkpoint saves it, and a restore writes into it."""

    def step(self, number: int, lr: float) -> None:
        """Move the weights by their gradients; `number` counts from 1."""

    def settings(self) -> dict[str, object]:
        """Return the optimizer's kind and arguments as JSON values."""


def optimizer_for(model: torch.nn.Module, optimizer: Optimizer | torch.optim.Optimizer) -> Optimizer:
    """Return the loop's view of an optimizer; one of hpctrain is returned as it is.

    Raises:
        TrainError: the object is not an optimizer, or is of an unsupported kind.
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
    """Reject steps of an optimizer of torch.optim from outside the loop.

    A script's own `optimizer.step()`.
    """
    hook = (
        optimizer.plain.register_step_pre_hook(optimizer.check_step) if isinstance(optimizer, TorchOptimizer) else None
    )
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


class Named(Protocol):
    """An object that has named parameters, for example a module."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield names and parameters."""


class TorchOptimizer:
    """An optimizer of torch.optim."""

    def __init__(self, model: Named, optimizer: torch.optim.Optimizer, own_rates: list[float] | None = None) -> None:
        """Adapt the optimizer; `own_rates`.

        The groups' own learning rates, if steps have changed them.
        """
        self.plain = optimizer
        self.scheduled = False  # the script's schedule sets the learning rates
        self._kind = type(optimizer).__name__
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._named: dict[str, torch.nn.Parameter] = {}
        for parameter in self._parameters():
            if id(parameter) not in names:
                raise TrainError(f"cannot train with this {self._kind}: it has a parameter that is not of the model")
            if parameter.requires_grad:
                self._named[names[id(parameter)]] = parameter
        self.own_rates = own_rates or self._lrs()
        self.lr = next(filter(None, self.own_rates), 0.0)
        self.fresh = {p: copy.deepcopy(optimizer.state[p]) for p in self._named.values() if p in optimizer.state}
        self._is_stepping = False
        self._rates: list[float] = []  # the learning rates that `step` has set
        self._try_a_step()
        self.tensors()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state of every parameter, by the parameter's name.

        Raises:
            TrainError: the state has a value that is not a tensor, which a checkpoint cannot hold.
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
        """Return the optimizer's kind only; the program knows its parameter groups."""
        return {"kind": f"{type(self.plain).__module__}.{self._kind}"}

    def step(self, number: int, lr: float) -> None:
        """Move the weights by their gradients; `number` counts from 1."""
        self._check_groups()
        if number == 1:
            self._forget()
        if not self.scheduled:
            self._set_lr([self._rate_of(own, lr) for own in self.own_rates])
        self._rates = self._lrs()
        self._is_stepping = True
        self.plain.step()
        self._is_stepping = False

    def _rate_of(self, own: float, lr: float) -> float:
        """Return a group's learning rate for the loop's `lr`.

        Exactly `lr` for groups with the same rate.
        """
        return lr if own == self.lr or not self.lr else own * (lr / self.lr)

    def expect_rates(self) -> None:
        """Record the current learning rates as the schedule's."""
        self._rates = self._lrs()

    def check_step(self, *_: object) -> None:
        """Raise TrainError if a step is taken outside of `step`."""
        if not self._is_stepping:
            raise TrainError(
                f"cannot take a step of {self._kind} here: run.steps takes it after batch.backward, by the gradients of all "
                "ranks; remove optimizer.step()"
            )

    def _check_groups(self) -> None:
        if len(self.plain.param_groups) != len(self.own_rates):
            raise TrainError(
                f"cannot take a step of {self._kind}: a parameter group was added after the loop began; add all of "
                "them before run.steps"
            )
        if self._rates and self._lrs() != self._rates:
            raise TrainError(
                f"cannot take a step of {self._kind}: the script has changed its learning rate within the loop; "
                + (
                    "run.steps calls the schedule's step itself: remove schedule.step()"
                    if self.scheduled
                    else "give a schedule of torch.optim.lr_scheduler to run.steps(..., schedule=SCHEDULE), which steps it, or "
                    "use --schedule and --warmup"
                )
            )

    def _try_a_step(self) -> None:
        """Allocate the state by a step that moves nothing."""
        before = [(p, p.detach().clone(), p.grad) for p in self._named.values()]
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
                for parameter, content, grad in before:
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


class TorchSchedule:
    """A schedule of torch.optim.lr_scheduler.

    Stepped after each step, ReduceLROnPlateau after each validation.
    """

    def __init__(self, optimizer: Optimizer, schedule: Any) -> None:
        """Raise TrainError if it is not this optimizer's schedule or cannot be saved."""
        kind = type(schedule).__name__
        if not isinstance(optimizer, TorchOptimizer):
            raise TrainError(f"cannot train with {kind}: it needs an optimizer of torch.optim; or use --schedule")
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        if isinstance(schedule, type) or not isinstance(schedule, (torch.optim.lr_scheduler.LRScheduler, plateau)):
            raise TrainError(f"cannot train with schedule={kind}: give one object of torch.optim.lr_scheduler")
        if schedule.optimizer is not optimizer.plain:
            raise TrainError(f"cannot train with {kind}: it was not made for the optimizer that run.steps was given")
        self._optimizer = optimizer
        self._schedule: Any = schedule  # of two kinds with different step methods
        self.by_validation = isinstance(schedule, plateau)
        optimizer.scheduled = True
        optimizer.expect_rates()
        self.state()

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of the first group."""
        return float(self._optimizer.plain.param_groups[0]["lr"])

    def stepped(self) -> None:
        """Step the schedule after a step of the optimizer."""
        if not self.by_validation:
            self._schedule.step()
            self._optimizer.expect_rates()

    def validated(self, loss: float) -> None:
        """Step a plateau schedule after a validation."""
        if self.by_validation:
            self._schedule.step(loss)
            self._optimizer.expect_rates()

    def state(self) -> object:
        """Return the state and the groups' changed settings (momentum) as JSON values."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.plain.param_groups
        ]
        tensors, tree = flattened(_numbers({"schedule": self._schedule.state_dict(), "groups": groups}), "schedule")
        if tensors:
            raise TrainError(
                f"cannot train with {type(self._schedule).__name__}: its state has tensors ({min(tensors)})"
            )
        return tree

    def load(self, state: object) -> None:
        """Restore what `state` returned."""
        tree: Any = grown(state, {})
        now = self._schedule.state_dict()
        counted = {name for name, value in now.items() if isinstance(value, Counter)}
        saved = {name: Counter(value) if name in counted else value for name, value in tree["schedule"].items()}
        self._schedule.load_state_dict(saved)
        for group, settings in zip(self._optimizer.plain.param_groups, tree["groups"], strict=True):
            for name, value in settings.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        self._optimizer.expect_rates()


def _numbers(value: Any) -> Any:
    """Return a value with single-number tensors and arrays as Python numbers."""
    if isinstance(value, (torch.Tensor, np.generic)) and getattr(value, "numel", lambda: 1)() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {name: _numbers(part) for name, part in value.items()}
    return type(value)(map(_numbers, value)) if type(value) in (list, tuple) else value
