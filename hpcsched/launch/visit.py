"""One check of a node through its agent, for a command that waits: `hpcsched node add`.

It uses the same dial, bundle and greeting as the controller's links, without an event loop. If it
works here, it works there.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcnode.wire import protocol
from hpcnode.wire.protocol import PROBE_BYTES, PROBE_PREFIX, CompareProbe
from hpcsched.errors import UnavailableError
from hpcsched.launch.bundle import Bundle
from hpcsched.launch.link import RECEIVE_BYTES, ControllerIdentity, Greeting, greet
from hpcsched.launch.pipe import Abort, Dial, LinkError, Pipe
from hpcsched.metrics.links import link_run_of
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The result. An error is "" if that directory is the same there, or was not checked."""

    welcome: protocol.Welcome
    facts: dict[str, Any]
    clock_ahead_s: float  # the node's clock minus ours, as exactly as it can be measured
    clock_error_s: float  # half of the request's duration
    share_error: str
    home_error: str = ""


class Asking:
    """A conversation with an agent: call it with a message to get the answer and its bytes.

    The answer has the wanted type.
    """

    def __init__(self, pipe: Pipe, greeting: Greeting, spec: NodeSpec) -> None:
        self.greeting = greeting
        self._pipe = pipe
        self._spec = spec

    def __call__(self, message: protocol.Message, wanted: type) -> tuple[Any, bytes]:
        """Send `message` and return its answer. Raises LinkError."""
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
    visit: bool = True,
) -> Iterator[Asking]:
    """Start the agent on the node, yield a conversation with it, and disconnect.

    `note` is called with each stage. Without `visit` this takes the place of the controller. Raises
    LinkError.
    """
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
            greeting = greet(pipe, spec, bundle, identity, noted, visit=visit)
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
    """Start the agent on the node, get its facts, and disconnect.

    The agent also checks whether it sees the same `probe` and `home`, if they are given. Raises
    LinkError.
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
    if bundle.sha256.startswith(welcome.agent_version):  # an older agent that still has work cannot measure
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
    """Return the next message of the wanted type.

    The agent's other messages are for the controller, and wait for it.
    """
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


# ----- network speed between nodes, for `hpcsched node probe --links`
# One node sends zeros, another counts them. Transfers run one after another, in a ring: each node
# sends to the next node and to the one after that. A transfer measures the slower of two links, so
# a node's link is at least as fast as its fastest transfer. A node that is slower than the fastest
# pair is tested again with a node of that pair, so that slow neighbours do not count against it.
# Limit: fast nodes are missed if no two of them were in one transfer. It knows no configuration and
# writes no files.


TIMEOUT_S = 60.0
STRIDES = (1, 2)
PARTNERS = 3  # of a node that is measured alone
SLOWER = 0.8  # of the fastest: tested again

Measure = Callable[[NodeName, NodeName], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A node, and how this machine and the other nodes reach it."""

    spec: NodeSpec
    dial: Dial
    address: str


def link_rates(names: Sequence[NodeName], others: Sequence[NodeName], measure: Measure) -> dict[NodeName, int]:
    """Return the link rates in Mbit/s of those of `names` that any transfer measured.

    `measure` returns the rate from one node to another. A single name is measured with some of
    `others`.
    """
    pairs = _ring(names) if len(names) > 1 else [(name, other) for name in names for other in others[:PARTNERS]]
    best: dict[NodeName, int] = {}
    rates = [(measure(giver, taker), giver, taker) for giver, taker in pairs]
    for rate, giver, taker in rates:
        for name in (giver, taker):
            best[name] = max(best.get(name, 0), rate)
    most, fastest, _ = max(rates, key=lambda one: one[0], default=(0, None, None))
    if fastest is not None and most and len(names) > 2:
        for name in names:
            if name != fastest and best[name] < SLOWER * most:
                best[name] = max(best[name], measure(fastest, name))
    return {name: best[name] for name in names if best.get(name)}


def _ring(names: Sequence[NodeName]) -> list[tuple[NodeName, NodeName]]:
    """Return each of `names` paired with the next two; no pair occurs twice."""
    count = len(names)
    pairs = [(names[at], names[(at + stride) % count]) for stride in STRIDES for at in range(count)]
    seen = {frozenset(pair): pair for pair in reversed(pairs) if pair[0] != pair[1]}
    return [pair for pair in pairs if seen.get(frozenset(pair)) == pair]


def transfer_mbps(giver: Peer, taker: Peer, bundle: Bundle, identity: ControllerIdentity) -> int:
    """Return the rate in Mbit/s from one node to the other.

    Raises UnavailableError: a node, or the network between them.
    """
    token = secrets.token_hex(16)
    with asking(giver.spec, dial=giver.dial, bundle=bundle, identity=identity, timeout_s=TIMEOUT_S) as at_giver:
        port = int(_asked(at_giver, giver, bundle, "link_port", protocol.Probe(request=1, link_token=token)))
    with asking(taker.spec, dial=taker.dial, bundle=bundle, identity=identity, timeout_s=TIMEOUT_S) as at_taker:
        question = protocol.Probe(request=1, link_token=token, link_host=giver.address, link_port=port)
        link = _asked(at_taker, taker, bundle, "link", question)
    return max(1, round(link_run_of(link, taker.spec.name, giver.spec.name, at_s=0.0).from_mbps))


def _asked(ask: Asking, peer: Peer, bundle: Bundle, wanted: str, question: protocol.Probe) -> Any:
    if not bundle.sha256.startswith(ask.greeting.welcome.agent_version):
        raise UnavailableError(
            f"cannot measure the link of {peer.spec.name}: its agent is of another version and has work; try when it has none"
        )
    facts = ask(question, protocol.Facts)[0].facts
    if wanted not in facts:
        where = f" with {question.link_host}" if question.link_host else ""
        raise UnavailableError(f"cannot measure the link of {peer.spec.name}{where}: {facts.get('error', 'no answer')}")
    return facts[wanted]


# ----- whether another machine has the same share: a probe file is compared with its hash
# `hpcsched node add`, `hhealth` and the controller use it. Nodes get the file's SHA-256 and answer whether the file is the same.


_PROBE_NAME = re.compile(re.escape(PROBE_PREFIX) + r"[0-9a-f]{16}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(slots=True)
class ShareProbe:
    """A file with random content; it exists within the `with` block."""

    path: Path
    content: str = field(default_factory=lambda: secrets.token_hex(PROBE_BYTES // 2))
    uid: int = -1  # the file's owner; may differ from its writer (NFS may map root to another account)

    def __enter__(self) -> ShareProbe:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "w", encoding="ascii") as file:
            file.write(self.content)
            file.flush()
            os.fsync(fd)  # other clients cannot read data that is not on the server yet
            self.uid = os.fstat(fd).st_uid
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def sha256(self) -> str:
        """Return the hash of the content, in hexadecimal."""
        return hashlib.sha256(self.content.encode("ascii")).hexdigest()


def share_probe(share: str) -> ShareProbe:
    """Return a probe for the directory `share`; entering it raises OSError on a failed write."""
    return ShareProbe(Path(share) / (PROBE_PREFIX + secrets.token_hex(8)))


def question(request: int, share: str, name: str, sha256: str, uid: int) -> CompareProbe:
    """Return the message that asks whether the share probe `name` is the same on a node.

    Raises ValueError if `name` is not a probe's name.
    """
    if not _PROBE_NAME.match(name) or not _SHA256.match(sha256):
        raise ValueError("not a share probe")
    return CompareProbe(request=request, directory=share, name=name, sha256=sha256, uid=uid)


def problem_of(share: str, *, same: bool, error: str) -> str:
    """Return the problem of the share on a node, from the node's answer; "" if there is none."""
    if same:
        return ""
    return f"cannot compare {share} there: {error}" if error else f"{share} there is another directory than here"
