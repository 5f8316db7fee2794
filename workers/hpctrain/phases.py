"""Where the time of a rank's own work goes within a step: getting data, forward, backward.

Data is what passes from the moment that the script has its batch until the model's forward begins; forward lasts until
`batch.backward` is called, the loss included. On a GPU these are the times at which work was handed to it, and what it has not
done by then shows in the wait.  Costs a microsecond or two a step; knows no ranks.
"""

from __future__ import annotations

import time
from typing import Any

import torch

DATA, FORWARD, BACKWARD = range(3)


class Phases:
    """A clock that is told when the next phase begins."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seconds = [0.0, 0.0, 0.0]
        self._phase = -1  # between steps: what is computed then, a validation say, does not count
        self._since_s = 0.0
        self._hook = model.register_forward_pre_hook(self._forward_begins)

    def begin(self) -> None:
        """A step begins."""
        self._seconds = [0.0, 0.0, 0.0]
        self._turn(DATA)

    def backward_begins(self) -> None:
        """The loss of a batch is there."""
        self._turn(BACKWARD)

    def backward_ended(self) -> None:
        """The gradients of a batch are there; more data may follow."""
        self._turn(DATA)

    def end(self) -> tuple[float, float, float]:
        """This will give the seconds of data, forward and backward of the step; it is over."""
        self._turn(-1)
        return self._seconds[DATA], self._seconds[FORWARD], self._seconds[BACKWARD]

    def close(self) -> None:
        """This will leave the model as it was."""
        self._hook.remove()

    def _forward_begins(self, _module: torch.nn.Module, _inputs: Any) -> None:
        if not torch.compiler.is_compiling() and self._phase == DATA:
            self._turn(FORWARD)

    def _turn(self, phase: int) -> None:
        now_s = time.perf_counter()
        if self._phase >= 0:
            self._seconds[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s
