"""One look at a node through its agent, from a command that waits for it: for `hpcsched node add`.

The same dial, bundle and greeting as the controller's links, without an event loop: what works here works there.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcnode.wire import protocol
from hpcsched.errors import UnavailableError
from hpcsched.launch.bundle import Bundle
from hpcsched.launch.greeting import RECEIVE_BYTES, ControllerIdentity, Greeting, greet
from hpcsched.launch.pipe import Abort, Dial, LinkError, Pipe
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec
from hpcsched.shareprobe import ShareProbe, problem_of, question


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was found. `share_error` and `home_error` are "" if that directory is the same there, or was not asked about."""

    welcome: protocol.Welcome
    facts: dict[str, Any]
    clock_ahead_s: float  # the node's clock less ours, as well as it can be told
    clock_error_s: float  # half of the time that the question took
    share_error: str
    home_error: str = ""


class Asking:
    """A conversation with a node's agent: called with a message, it returns the answer of the wanted type and its bytes."""

    def __init__(self, pipe: Pipe, greeting: Greeting, spec: NodeSpec) -> None:
        self.greeting = greeting
        self._pipe = pipe
        self._spec = spec

    def __call__(self, message: protocol.Message, wanted: type) -> tuple[Any, bytes]:
        """Say `message` and return what answers it. Raises LinkError."""
        self._pipe.send_all(protocol.encode(message))
        return _answer(self._pipe, self.greeting, wanted, self._spec)


@contextmanager
def asking(
    spec: NodeSpec,
    *,
    dial: Dial,
    bundle: Bundle,
    identity: ControllerIdentity,
    timeout_s: float,
    note: Callable[[str], None] = lambda stage: None,
) -> Iterator[Asking]:
    """Start the agent on the node, be in conversation with it, and leave; `note` hears of each stage. Raises LinkError."""
    abort = Abort()
    timer = threading.Timer(timeout_s, abort.now)
    timer.daemon = True
    stages = ["starting"]

    def noted(stage: str) -> None:
        stages.append(stage)
        note(stage)

    timer.start()
    try:
        pipe = dial(abort, noted)
        try:
            greeting = greet(pipe, spec, bundle, identity, noted)
            noted("looking around there")
            yield Asking(pipe, greeting, spec)
        finally:
            pipe.close()
    except UnavailableError:
        if timer.is_alive():
            raise
        raise LinkError(f"cannot reach {spec.name}: no answer within {timeout_s:g} s while {stages[-1]}") from None
    finally:
        timer.cancel()


def visit(
    spec: NodeSpec,
    *,
    dial: Dial,
    bundle: Bundle,
    identity: ControllerIdentity,
    timeout_s: float,
    probe: ShareProbe | None,
    home: ShareProbe | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Visit:
    """Start the agent on the node, ask for its facts (and whether it sees the same `probe` and `home`), and leave.

    Raises LinkError.
    """
    with asking(spec, dial=dial, bundle=bundle, identity=identity, timeout_s=timeout_s, note=progress) as ask:
        return _look(ask, probe, home, bundle)


def _look(ask: Asking, probe: ShareProbe | None, home: ShareProbe | None, bundle: Bundle) -> Visit:
    welcome = ask.greeting.welcome
    asked_s = time.time()
    facts, _ = ask(protocol.Probe(request=1), protocol.Facts)
    answered_s = time.time()
    share_error = _difference(ask, probe) if probe is not None else ""
    home_error = _difference(ask, home) if home is not None else ""
    if bundle.sha256.startswith(welcome.agent_version):  # one of before that still has work knows no measuring
        measured, _ = ask(protocol.Probe(request=3, measure=True), protocol.Facts)
        facts.facts["speed"] = measured.facts.get("speed", 0)
    return Visit(
        welcome=welcome,
        facts=facts.facts,
        clock_ahead_s=float(facts.facts.get("time_s", asked_s)) - (asked_s + answered_s) / 2,
        clock_error_s=(answered_s - asked_s) / 2,
        share_error=share_error,
        home_error=home_error,
    )


def _difference(ask: Asking, probe: ShareProbe) -> str:
    """Return why the directory of `probe` is not the same on the node; "" if it is."""
    directory = str(probe.path.parent)
    compared, _ = ask(question(2, directory, probe.path.name, probe.sha256, probe.uid), protocol.ProbeCompared)
    return problem_of(directory, same=compared.same, error=compared.error)


def _answer(pipe: Pipe, greeting: Greeting, wanted: type, spec: NodeSpec) -> tuple[Any, bytes]:
    """Return the next message of the wanted type; what else the agent says is for the controller, and waits for it."""
    while True:
        while greeting.rest:
            message, blob = greeting.rest.pop(0)
            if isinstance(message, wanted):
                return message, blob
            if isinstance(message, protocol.Goodbye):
                raise LinkError(f"cannot use node {spec.name}: its agent says: {message.why}")
        data = pipe.receive(RECEIVE_BYTES)
        if not data:
            raise LinkError(f"lost the agent of {spec.name}: {pipe.epitaph()}")
        greeting.rest.extend(greeting.framer.feed(data))


# ----- the network between nodes, measured for `hpcsched node probe --links`: one node gives zeros to another, which counts them
# Transfers come one after another: each node gives to the next and to the one after that, in a ring. What one transfer shows is
# the slower of two links, so a node's link is at least as fast as the fastest of its transfers. Who then seems slower than the
# fastest pair is tried again with one of these, so that slow neighbours are not held against it. Fast nodes of which no two
# were together in a transfer are missed. It knows no configuration and writes nothing.


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
