"""Measure the links between nodes: a tournament of pairs, then slow pairs alone.

It asks the agents; `hpcnode.agent.link_speed` measures and `hpcsched.metrics.links` judges. Rules: a pair
that fails costs `PAIR_S` at most and is recorded with its reason; each pair has a key of its own; pairs
are measured alone for `ALONE_S` at most.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from hpcnode.wire import protocol
from hpcsched.controller.nodes.links import Fleet, monotonic_s
from hpcsched.errors import HpcschedError, NotFoundError, ProtocolError
from hpcsched.metrics.links import (
    ALONE_S,
    PAIR_S,
    LinkRun,
    failed_run,
    link_run_of,
    rounds,
    slower_together,
    with_alone,
)
from hpcsched.model.ids import NodeName
from hpcsched.model.node import address_of
from hpcsched.state.cluster import ClusterState


class Tournament:
    """One tournament. `busy`: jobs beside it; then the runs are no baseline."""

    def __init__(self, fleet: Fleet, cluster: ClusterState, *, busy: str, clock: Callable[[], float]) -> None:
        self._fleet, self._cluster, self._clock = fleet, cluster, clock
        self._busy = f"jobs were running: {busy}" if busy else ""

    async def run(self, names: Sequence[str]) -> list[LinkRun]:
        """Measure all pairs of the nodes."""
        found = [
            run
            for pairs in rounds(sorted(names))
            for run in await asyncio.gather(*(self._measured(*pair) for pair in pairs))
        ]
        if len(names) > 3:  # otherwise no two pairs were measured at the same time
            until_s = monotonic_s() + ALONE_S
            for slow in slower_together(found):
                if monotonic_s() > until_s:
                    break
                again = await self._measured(*slow.pair)
                if not again.why:
                    found[found.index(slow)] = with_alone(slow, again)
        return found

    async def _measured(self, one: str, other: str) -> LinkRun:
        at_s = self._clock()
        try:
            async with asyncio.timeout(PAIR_S):
                return await self._asked(one, other, at_s)
        except TimeoutError:
            return failed_run(one, other, at_s=at_s, why=f"no answer within {PAIR_S:g} s")
        except HpcschedError as error:
            return failed_run(one, other, at_s=at_s, why=str(error))

    async def _asked(self, one: str, other: str, at_s: float) -> LinkRun:
        key = secrets.token_hex(16)
        spec = self._cluster.nodes.get(NodeName(other))
        if spec is None:
            raise NotFoundError(f"cannot measure the link to {other}: it was removed meanwhile")
        listening, _ = await self._fleet.call(
            NodeName(other), lambda request: protocol.Probe(request=request, link_token=key), PAIR_S
        )
        port = listening.facts.get("link_port")
        if not isinstance(port, int) or not 0 < port < 1 << 16:
            raise ProtocolError(f"{other} cannot listen: {listening.facts.get('error', 'it named no port')}")
        host = address_of(spec.spec)
        answer, _ = await self._fleet.call(
            NodeName(one),
            lambda request: protocol.Probe(request=request, link_token=key, link_host=host, link_port=port),
            PAIR_S,
        )
        if "link" not in answer.facts:
            raise ProtocolError(f"{one} cannot reach {host} port {port}: {answer.facts.get('error', 'no answer')}")
        return link_run_of(answer.facts["link"], one, other, at_s=at_s, busy=self._busy)
