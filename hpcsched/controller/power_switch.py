"""Switch nodes off and on, as their state says.

That is done by a program on the head, by their agents, or by Wake-on-LAN.

An order is carried out until it has failed, the node has changed its state, or, of a node that is switched on, it is back. It may
be carried out again after a restart of the controller. That a node is off, or back, is seen at its connection; a program's exit
status says only whether it has failed.

It does not decide: see `hpcsched.controller.nodes.power`.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from functools import partial
from typing import Any

from hpcnode.wire import protocol
from hpcsched.config.load import PowerSettings
from hpcsched.controller.head_scripts import run_program
from hpcsched.controller.nodes.links import Fleet
from hpcsched.controller.nodes.power import switching_failed
from hpcsched.controller.tick import Controller
from hpcsched.errors import HpcschedError, UnavailableError, report_fault
from hpcsched.launch.wake_on_lan import send_magic
from hpcsched.listing.text import clean
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Node, Power

log = logging.getLogger("hpcsched.power")

AT_ONCE = 16  # programs
PROGRAM_S = 120.0
ANSWER_S = 30.0  # of an agent
REPEAT_S = 5.0  # a packet may be lost, and a machine that is not quite off hears none


class PowerSwitch:
    """The orders that are being carried out."""

    def __init__(self, controller: Controller, fleet: Fleet) -> None:
        self._controller = controller
        self._fleet = fleet
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[NodeName, tuple[float, asyncio.Task[str]]] = {}  # and since when the order is

    def start(self) -> None:
        """Continue the orders of an earlier controller."""
        for name, node in self._controller.cluster.nodes.items():
            if node.power in (Power.POWERING_DOWN, Power.POWERING_UP):
                self.switch(name)

    def switch(self, name: NodeName) -> None:
        """Carry out the order to `name`, unless that is under way."""
        node = self._controller.cluster.nodes[name]
        since_s, before = self._tasks.get(name, (0.0, None))
        if before is not None and since_s == node.power_since_s:
            return
        if before is not None:
            before.cancel()
        task = asyncio.get_running_loop().create_task(self._carry_out(node))
        self._tasks[name] = node.power_since_s, task
        task.add_done_callback(partial(self._over, name, node.power_since_s))

    def _over(self, name: NodeName, since_s: float, task: asyncio.Task[str]) -> None:
        if self._tasks.get(name, (0.0, None))[1] is task:
            del self._tasks[name]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            report_fault(error, f"switch node {name}")  # type: ignore[arg-type]
        why = "an unexpected fault of the controller, see its log" if error is not None else clean(task.result())[:200]
        if why:
            log.error("node %s was not switched: %s", name, why)
            self._controller.ask(lambda tx: switching_failed(tx, name, since_s, why), _logged, keep=True)

    async def _carry_out(self, node: Node) -> str:
        """Switch the node; return "" or why that failed."""
        settings = self._controller.cluster.config.power
        log.info("node %s: %s", node.name, "switching off" if node.power is Power.POWERING_DOWN else "switching on")
        if node.power is Power.POWERING_DOWN:
            return await self._switch_off(node, settings)
        return await self._switch_on(node, settings) if node.power is Power.POWERING_UP else ""

    async def _switch_off(self, node: Node, settings: PowerSettings) -> str:
        if settings.suspend_program:
            return await self._run(settings.suspend_program, node)
        words = shlex.split(settings.suspend_command)
        try:
            answer, _ = await self._fleet.call(
                node.name, lambda number: protocol.PowerOff(number, words, PROGRAM_S), ANSWER_S + PROGRAM_S
            )
        except UnavailableError:
            return ""  # it has gone, or is told again when it connects: the time limit decides
        return str(answer.facts.get("error", ""))

    async def _switch_on(self, node: Node, settings: PowerSettings) -> str:
        if settings.resume_program:
            if why := await self._run(settings.resume_program, node):
                return why
        elif not node.spec.mac:
            return "the address of its network card is not known: hpcsched node probe, or resume_program in [power]"
        said = ""
        while self._is_current(node):
            if not settings.resume_program:
                said = await self._send_packet(node, said)
            self._fleet.retry([node.name])
            await asyncio.sleep(REPEAT_S)
        return ""

    async def _send_packet(self, node: Node, said: str) -> str:
        try:
            await asyncio.to_thread(send_magic, node.spec.mac)
        except HpcschedError as error:
            if str(error) != said:
                log.warning("node %s: %s", node.name, error)
            return str(error)
        return ""

    def _is_current(self, node: Node) -> bool:
        known = self._controller.cluster.nodes[node.name]
        return known.power is node.power and known.power_since_s == node.power_since_s

    async def _run(self, program: str, node: Node) -> str:
        async with self._turns:
            return await run_program(PROGRAM_S, program, node.name, env={})


def _logged(result: Any) -> None:
    if isinstance(result, Exception):
        log.error("%s", result)
