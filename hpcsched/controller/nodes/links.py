"""Manage the links to all nodes: start and stop them, send messages, match answers.

Links are started and stopped by the configuration. Incoming reports go to the controller, streams
to the step service, and answers to the caller of `call`. Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hpcnode.wire import protocol
from hpcsched.config.load import Config
from hpcsched.controller.relay import Relaying
from hpcsched.controller.stepping import Stepping
from hpcsched.controller.tick import Controller
from hpcsched.errors import HpcschedError, InvariantError, UnavailableError, report_fault
from hpcsched.launch import make_link
from hpcsched.launch.bundle import Bundle
from hpcsched.launch.link import ControllerIdentity, NodeLink
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec

log = logging.getLogger("hpcsched.fleet")

Answer = tuple[Any, bytes]
Facts = dict[str, Any]

PROBE_GAP_S = 0.5  # between two probes of a node


class Fleet:
    """The present connections to nodes; listens to every link."""

    def __init__(
        self, controller: Controller, *, bundle: Bundle, identity: ControllerIdentity, clock: Callable[[], float]
    ) -> None:
        self.stepping: Stepping | None = None
        self.relaying: Relaying | None = None
        self._controller = controller
        self._bundle = bundle
        self._identity = identity
        self._clock = clock
        self._links: dict[NodeName, NodeLink] = {}
        self._waiting: dict[tuple[NodeName, int], asyncio.Future[Answer]] = {}
        self._last_request = 0
        self._last_probe: dict[NodeName, asyncio.Task[Facts]] = {}  # of each node, begun or not
        self._coming_probe: dict[NodeName, asyncio.Task[Facts]] = {}  # not begun yet

    def configure(self, config: Config) -> None:
        """Keep a link to each node of `config`, and to no other node.

        A node whose settings changed is reconnected.
        """
        wanted = {spec.name: spec for spec in config.nodes}
        renamed = config.name != self._identity.cluster
        self._identity = replace(self._identity, cluster=config.name)
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.spec or renamed:
                self._links.pop(name).close()
                self._controller.node_redialled(name, "its description was changed")
                self._abandon(name, "it was taken out of the configuration")
        for name, spec in wanted.items():
            if name not in self._links:
                self._links[name] = self._start(spec, config)

    def _start(self, spec: NodeSpec, config: Config) -> NodeLink:
        link = make_link(
            spec,
            config,
            bundle=self._bundle,
            identity=self._identity,
            events=self,
            loop=asyncio.get_running_loop(),
        )
        link.start()
        return link

    def close(self) -> None:
        """Close all links. Jobs on the nodes continue."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def retry(self, nodes: Iterable[NodeName]) -> None:
        """Connect now to those of these nodes that are not connected."""
        for node in nodes:
            if node in self._links:
                self._links[node].retry_now()

    # ----- outgoing

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        """Send to the node's agent if it is connected; otherwise drop the message.

        Effects are repeated when the node connects.
        """
        link = self._links.get(node)
        if link is not None:
            link.send(message, blob)

    async def call(self, node: NodeName, make: Callable[[int], Any], timeout_s: float) -> Answer:
        """Send the request `make(request number)` and return the answer and its blob.

        Raises: UnavailableError.
        """
        link = self._links.get(node)
        self._last_request += 1
        key = (node, self._last_request)
        if link is None or not link.send(make(self._last_request)):
            raise UnavailableError(f"cannot ask node {node}: it does not answer")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise UnavailableError(f"cannot ask node {node}: no answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(key, None)

    async def facts(self, node: NodeName, timeout_s: float) -> Facts:
        """Return the facts of a node, and when it was asked and has answered.

        A probe costs the node more than a request costs its sender. So there is one at a time, and requests that come meanwhile
        share the next one. Raises UnavailableError.
        """
        task = self._coming_probe.get(node)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._probed(node, timeout_s, self._last_probe.get(node)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all clients may have left
            self._coming_probe[node] = self._last_probe[node] = task
        return await asyncio.shield(task)

    async def _probed(self, node: NodeName, timeout_s: float, before: asyncio.Task[Facts] | None) -> Facts:
        if before is not None and not before.done():
            await asyncio.wait([before])
            await asyncio.sleep(PROBE_GAP_S)
        del self._coming_probe[node]
        asked_s = self._clock()
        answer, _ = await self.call(node, lambda request: protocol.Probe(request=request), timeout_s)
        return {**answer.facts, "asked_at_s": asked_s, "answered_at_s": self._clock()}

    def _abandon(self, node: NodeName, why: str) -> None:
        for (name, _), future in self._waiting.items():
            if name == node and not future.done():
                future.set_exception(UnavailableError(f"cannot ask node {node}: {why}"))

    # ----- incoming (LinkEvents)

    def on_up(self, node: NodeName, welcome: protocol.Welcome) -> str:
        why = self._controller.node_up(node, welcome, self._clock())
        if why:
            return why
        log.info("node %s is up: agent %s, boot %s", node, welcome.agent_version, welcome.boot_id)
        if self.stepping is not None:
            self.stepping.node_welcome(node, welcome.inventory)
        return ""

    def on_down(self, node: NodeName, why: str) -> None:
        log.warning("node %s is down: %s", node, why)
        self._abandon(node, why)
        self._controller.node_down(node, why)

    def on_message(self, node: NodeName, message: Any, blob: bytes) -> None:
        try:
            self._take(node, message, blob)
        except (HpcschedError, protocol.WireError) as error:
            log.warning("dropped a message of node %s: %s", node, error)
        except InvariantError:
            raise
        except Exception as error:
            report_fault(error, f"take a {type(message).__name__} of node {node}")

    def _take(self, node: NodeName, message: Any, blob: bytes) -> None:
        match message:
            case protocol.Output() | protocol.InputAck():
                if self.stepping is not None:
                    self.stepping.on_output(node, message, blob)
            case protocol.FromStream(message={"type": "Progress" | "Failure"}):
                self._controller.training.told(node, message, self._clock())
            case protocol.Sample():
                self._controller.metrics.sampled(node, message, self._clock())
            case protocol.FromStream(message={"type": "ApiRequest"}):
                if self.relaying is not None:
                    self.relaying.told(node, message, blob)
            case protocol.FromStream():
                if self.stepping is not None:
                    self.stepping.on_from_stream(node, message, blob)
            case protocol.CloseStream():
                if self.stepping is not None:
                    self.stepping.on_stream_closed((node, message.stream))
            case protocol.Facts() | protocol.FileData() | protocol.FileList() | protocol.ProbeCompared():
                future = self._waiting.get((node, message.request))
                if future is not None and not future.done():
                    future.set_result((message, blob))
            case _:
                self._controller.node_says(node, message)


def monotonic_s() -> float:
    """Return the monotonic time that planning is measured with."""
    return time.perf_counter()
