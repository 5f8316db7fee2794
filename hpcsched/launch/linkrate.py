"""The network between nodes, measured for `hpcsched node probe --links`: one node gives zeros to another, which counts them.

Transfers come one after another: each node gives to the next and to the one after that, in a ring. What one transfer shows is
the slower of two links, so a node's link is at least as fast as the fastest of its transfers. Who then seems slower than the
fastest pair is tried again with one of these, so that slow neighbours are not held against it. Fast nodes of which no two
were together in a transfer are missed. It knows no configuration and writes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcnode import protocol
from hpcsched.errors import UnavailableError
from hpcsched.launch.bundle import Bundle
from hpcsched.launch.greeting import ControllerIdentity
from hpcsched.launch.pipe import Dial
from hpcsched.launch.visit import Asking, asking
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec

TIMEOUT_S = 60.0
STRIDES = (1, 2)
PARTNERS = 3  # of a node that is measured alone
SLOWER = 0.8  # of the fastest: worth another look

Measure = Callable[[NodeName, NodeName], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A node, and how it is reached from here and from the other nodes."""

    spec: NodeSpec
    dial: Dial
    address: str


def link_rates(names: Sequence[NodeName], others: Sequence[NodeName], measure: Measure) -> dict[NodeName, int]:
    """Return the Mbit/s of the links of `names`, of those that any transfer says something of.

    `measure` returns the rate from one node to another. One name alone is measured with some of `others`.
    """
    if len(names) > 1:
        pairs = _ring(names)
    else:
        pairs = [(name, other) for name in names for other in others[:PARTNERS]]
    best: dict[NodeName, int] = {}
    fastest: tuple[int, NodeName] | None = None
    for giver, taker in pairs:
        rate = measure(giver, taker)
        for name in (giver, taker):
            best[name] = max(best.get(name, 0), rate)
        if rate and (fastest is None or rate > fastest[0]):
            fastest = (rate, giver)
    if fastest is not None and len(names) > 2:
        for name in names:
            if name != fastest[1] and best[name] < SLOWER * fastest[0]:
                best[name] = max(best[name], measure(fastest[1], name))
    return {name: best[name] for name in names if best.get(name)}


def _ring(names: Sequence[NodeName]) -> list[tuple[NodeName, NodeName]]:
    """Return each of `names` with the next one and with the one after that; no two are together twice."""
    count = len(names)
    pairs = [(names[at], names[(at + stride) % count]) for stride in STRIDES for at in range(count)]
    seen = {frozenset(pair): pair for pair in reversed(pairs) if pair[0] != pair[1]}
    return [pair for pair in pairs if seen.get(frozenset(pair)) == pair]


def transfer_mbps(giver: Peer, taker: Peer, bundle: Bundle, identity: ControllerIdentity) -> int:
    """Return the Mbit/s that come from one node to the other. Raises UnavailableError: a node or the way between them."""
    token = secrets.token_hex(16)
    with asking(giver.spec, dial=giver.dial, bundle=bundle, identity=identity, timeout_s=TIMEOUT_S) as at_giver:
        port = _asked(at_giver, giver, bundle, "link_port", protocol.Probe(request=1, link_token=token))
    with asking(taker.spec, dial=taker.dial, bundle=bundle, identity=identity, timeout_s=TIMEOUT_S) as at_taker:
        question = protocol.Probe(request=1, link_token=token, link_host=giver.address, link_port=port)
        return _asked(at_taker, taker, bundle, "rate_mbps", question)


def _asked(ask: Asking, peer: Peer, bundle: Bundle, wanted: str, question: protocol.Probe) -> int:
    if not bundle.sha256.startswith(ask.greeting.welcome.agent_version):
        raise UnavailableError(
            f"cannot measure the link of {peer.spec.name}: its agent is of another version and has work; try when it has none"
        )
    facts = ask(question, protocol.Facts)[0].facts
    if wanted not in facts:
        where = f" with {question.link_host}" if question.link_host else ""
        raise UnavailableError(f"cannot measure the link of {peer.spec.name}{where}: {facts.get('error', 'no answer')}")
    return int(facts[wanted])
