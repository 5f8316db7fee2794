"""Who listens to a running step beside the step command that asked for it (sattach): output is copied to them as it comes.

A listener acknowledges nothing and holds up nobody: from its request on it gets what the nodes send; one that reads too slowly is
cut off by whoever holds its connection. Knows neither permissions nor what a step is told.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcnode import protocol
from hpcsched.controller.stepstate import Origin, Step
from hpcsched.model.ids import NodeName


class Watching:
    """All listeners, by their connections."""

    def __init__(self, send: Callable[[NodeName, protocol.Message, bytes], None]) -> None:
        self._send = send
        self._steps: dict[Origin, Step] = {}

    def __contains__(self, origin: Origin) -> bool:
        return origin in self._steps

    def add(self, origin: Origin, step: Step) -> None:
        """Let `origin` hear the step from now on."""
        self._steps[origin] = step
        self._tell(origin, step, on=True)

    def drop(self, origin: Origin) -> None:
        """It is gone."""
        step = self._steps.pop(origin, None)
        if step is not None:
            self._tell(origin, step, on=False)

    def hears(self, origin: Origin, step: Step) -> bool:
        """Return whether `origin` listens to the step."""
        return self._steps.get(origin) is step

    def over(self, step: Step) -> list[Origin]:
        """The step is over: forget who listens to it, and return them."""
        origins = [origin for origin, watched in self._steps.items() if watched is step]
        for origin in origins:
            del self._steps[origin]
        return origins

    def _tell(self, origin: Origin, step: Step, on: bool) -> None:
        to = protocol.Address(node=origin[0], stream=origin[1])
        for run in step.runs.values():
            if not run.ended:
                self._send(run.node, protocol.Watch(token=run.token, to=to, on=on), b"")
